"""Fields that a rule or an input's shape names and that no record of its topic has had yet.

The pipeline file may be there before the source adds the column, or renames the column.

Asked only where Spark can't resolve a name. The registry's newest schema of the topic says a field's type; a field that it lacks
too is null. A field of the result that is nothing but such a field is left out of the records until the field has a type.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import pyarrow as pa
from sqlglot import exp

from zync_assets.codecs.avro.schema import subject_name
from zync_assets.codecs.avro.types import arrow_type
from zync_assets.codecs.fields import fields_named, fields_of, in_lake, lacked_by, maybe_missing, merge_notes, places
from zync_assets.errors import FieldMissing, SchemaError, SchemaUnknown
from zync_assets.kafka.registry import Registry
from zync_assets.lake.raw import RawState
from zync_assets.lake.raw_files import raw_schema
from zync_assets.pipeline import Input, Pipeline, RecordShape, Rule, Shape
from zync_assets.pipeline_file.conditions import TextSpan, with_nulls
from zync_assets.pipeline_file.expressions import SqlProblem, columns, parse
from zync_assets.pipeline_file.references import in_first_names
from zync_assets.pipeline_file.view_expressions import row_expressions
from zync_assets.spark.sql import edited, leaves

_log = logging.getLogger(__name__)
_said: set[tuple[str, str, str]] = set()
"""Pipeline, topic and field of the warnings that this process gave. A process gives each warning once."""

_NOTHING: tuple[Shape, ...] = ("NULL", "(NULL)", {})
"""The result for a shape with nothing but missing fields."""

Path: TypeAlias = tuple[str, ...]
"""``value``, ``after``, ``coupon``."""
Sides: TypeAlias = Mapping[str, tuple[str, Path]]
"""``in``, ``left`` or ``right`` → its topic, and no path, since it is a record. The alias of a table → its topic, and the path of
its row in a record. ``""``: of expressions that name no side."""


@dataclass(frozen=True)
class _Name:
    """A column's name in an expression, from character ``start`` to before ``end``.

    ``names``: the parts of the dotted name, with the side first if the name has a side.
    """

    start: int
    end: int
    names: Path


def with_missing_fields(
    pipeline: Pipeline, pool: str, raw: Mapping[str, RawState | None]
) -> tuple[Pipeline, dict[str, RawState]] | None:
    """The pipeline with NULL for the fields that are missing in the raw tables of a staging pool's inputs.

    Returns the raw tables that lack a field, with the fields that the registry's newest schema has. None if no field is missing.
    Raises FieldMissing for a field that the newest schema lacks too, if the pipeline file says ``missing-field: fail``.
    """
    states = with_newest_fields(pipeline, pool, raw)
    if not states:
        return None
    # A view names fields that its tables have: no field of a row is null in place of a field that is missing everywhere.
    rules = [rule for rule in pipeline.rules_of(pool) if rule.view is None]
    schemas = {topic: state.schema for topic, state in {**raw, **states}.items() if state is not None}
    for rule in rules:
        for topic in rule.topics:
            for path in _missing_fields(_expressions(rule), topic, schemas[topic]) if topic in schemas else ():
                _say(pipeline, f"rule {rule.name}", topic, ".".join(path))
    lenient_pipeline = replace(
        pipeline, rules=tuple(_without_missing(rule, schemas) if rule in rules else rule for rule in pipeline.rules)
    )
    return lenient_pipeline, states


def with_newest_fields(pipeline: Pipeline, pool: str, raw: Mapping[str, RawState | None]) -> dict[str, RawState]:
    """The raw tables that lack a field which a rule of the pool names, with the fields and the names of fields of the registry's
    newest schema."""
    rules = pipeline.rules_of(pool)
    columns = {
        topic: {item.name: item.type for item in state.schema} for topic, state in raw.items() if state is not None
    }
    expressions = list(_of_rules([rule for rule in rules if rule.view is None]))
    expressions += [item for rule in rules for item in row_expressions(rule, columns)]
    states: dict[str, RawState] = {}
    for topic, state in raw.items():
        missing = partial(_missing_fields, expressions, topic)
        if state is not None and missing(state.schema):
            states[topic] = _expecting(pipeline, pipeline.input(topic), state, missing)
    return states


@dataclass(frozen=True)
class Expected:
    """An input whose shape names fields that no record has had so far, or renamed fields by other names than the first.

    ``types``: ``key_type`` and ``value_type`` with the fields that the newest schema has. ``missing``: the fields that the
    newest schema lacks too. They are null in the shape of ``item``.
    """

    pipeline: Pipeline
    item: Input
    types: dict[str, pa.DataType]
    missing: tuple[str, ...]

    def say(self) -> None:
        """Warn of the missing fields; FieldMissing where the file says ``missing-field: fail``."""
        for path in self.missing:
            _say(self.pipeline, f"input {self.item.topic}, shape", self.item.topic, path)


def expected_fields(
    pipeline: Pipeline, item: Input, types: Mapping[str, pa.DataType | None], ids: Mapping[str, Sequence[int]]
) -> Expected | None:
    """The fields that an input's shape names and no record has had; None if no field is missing and none is renamed.

    ``types``: side → the type of the records so far. ``ids``: side → the ids of the writers' schemas so far.
    FieldMissing if a side would be nothing but such fields.
    """
    assert item.shape is not None
    schema = raw_schema(types["key"] or pa.null(), types["value"] or pa.null())
    sides: Sides = {"": (item.topic, ())}
    shapes = (item.shape.where, *item.shape.sides.values())
    expressions = [(sql, sides) for shape in shapes for _, sql in leaves(shape, "")]
    missing = partial(_missing_fields, expressions, item.topic)
    # Each batch comes here. The look parses every expression, and few shapes lack a field.
    if is_missing := bool(missing(schema)):
        schema = _with_newest(pipeline, item, schema, missing, ids)
    roots = {field.name: field.type for field in schema}
    try:
        shape = _in_first_names(item.shape, roots)
    except SqlProblem:
        # The shape itself is an error, which names its place.
        return None
    if not is_missing and shape == item.shape:
        return None
    schemas = {item.topic: schema}
    side_shapes: dict[str, Shape] = {}
    for side, side_shape in shape.sides.items():
        filled_shape = _edited_shape(side_shape, sides, schemas)
        side_shapes[side] = _filled(filled_shape, item.shape.sides[side], f"input {item.topic}, shape", side)
    where = edited(shape.where, partial(_edited_sql, sides=sides, schemas=schemas))
    side_types = {f"{side}_type": schema.field(side).type for side in ("key", "value") if side in schema.names}
    missing_names = tuple(".".join(path) for path in missing(schema))
    return Expected(pipeline, replace(item, shape=RecordShape(where, side_shapes)), side_types, missing_names)


def _in_first_names(shape: RecordShape, roots: Mapping[str, pa.DataType]) -> RecordShape:
    """The shape with the first names of renamed fields, which Spark has. SqlProblem as ``in_lake_names``."""
    rewrite = partial(in_first_names, roots=roots)
    sides = {side: edited(part, rewrite) for side, part in shape.sides.items()}
    return replace(shape, where=edited(shape.where, rewrite), sides=sides)


def _say(pipeline: Pipeline, place: str, topic: str, path: str) -> None:
    where = f"{place}: no record of topic {topic} has had the field {path} so far, nor has its newest schema"
    if pipeline.missing_field == "fail":
        raise FieldMissing(
            f"{where}. Nothing was committed. Correct the name, or wait for the source; or set missing-field: null, and the"
            " field is null until then."
        )
    if (pipeline.name, topic, path) not in _said:
        _said.add((pipeline.name, topic, path))
        _log.warning("%s; it is null until then", where)


def _missing_fields(expressions: Iterable[tuple[str, Sides]], topic: str, schema: pa.Schema) -> list[Path]:
    """The fields of a topic that expressions name and its table lacks, each once, down to the first name that is missing."""
    paths: dict[Path, None] = {}
    for sql, sides in expressions:
        for name in _names(sql):
            if (place := _place(name, sides)) is not None and place[0] == topic:
                paths |= dict.fromkeys(_lacking(schema, place[1]))
    return list(paths)


def _of_rules(rules: Sequence[Rule]) -> Iterator[tuple[str, Sides]]:
    for rule in rules:
        yield from _expressions(rule)


def _expressions(rule: Rule) -> Iterator[tuple[str, Sides]]:
    """A rule's expressions, each with the topics of its sides; a condition has one side, without a name."""
    sides = _sides(rule)
    yield from ((sql, sides) for side in rule.sides for sql in side.keys)
    yield from ((side.where, {"": (side.topic, ())}) for side in rule.sides if side.where is not None)
    yield from ((record, sides) for item in rule.lookups for record, _ in item.on)
    yield from ((sql, sides) for sql in (() if rule.group is None else rule.group.expressions))
    for shape in (rule.key, rule.value, rule.headers, rule.keep, rule.explode):
        yield from ((sql, sides) for _, sql in leaves(shape, ""))


def _sides(rule: Rule) -> dict[str, tuple[str, Path]]:
    """The names of records in a rule's expressions, in lower case."""
    sides: dict[str, tuple[str, Path]] = {side.name.lower(): (side.topic, ()) for side in rule.sides}
    aggregates = rule.group.named("first", "list") if rule.group is not None else ()
    return sides | {item.name.lower(): sides[name.lower()] for item in aggregates for name in item.arguments}


def _names(sql: str) -> Iterator[_Name]:
    """The names of columns and of their elements with all their parts: ``in.value.items[0].name`` is one name."""
    for node in parse(sql).tree.find_all(exp.Column, exp.Dot):
        parts = _parts(node)
        if parts is not None and not _has_field(node):
            names, first, last = parts
            yield _Name(int(first.meta["start"]), int(last.meta["end"]) + 1, names)


def _parts(node: exp.Expr | None) -> tuple[Path, exp.Expr, exp.Expr] | None:
    """The names of a column or of its element, and the first and the last of their identifiers; None for other nodes."""
    if isinstance(node, exp.Column) and next(columns(node), None) is not None:
        return tuple(part.name for part in node.parts), node.parts[0], node.parts[-1]
    if isinstance(node, exp.Dot) and (name := _field_name(node)) is not None:
        parts = _parts(node.this)
        return None if parts is None else ((*parts[0], name.name), parts[1], name)
    if isinstance(node, exp.Paren):
        return _parts(node.this)
    if isinstance(node, exp.Bracket) and (parts := _parts(node.this)) is not None:
        # A text is the name of a struct's field, a number the place of an element.
        names = tuple(item.name for item in node.expressions if isinstance(item, exp.Literal) and item.is_string)
        return (*parts[0], *names), parts[1], parts[2]
    if isinstance(node, exp.Identifier) and (array := _array_of(node)) is not None:
        parts = _parts(array)
        return None if parts is None else (parts[0], node, node)
    return None


def _has_field(node: exp.Expr) -> bool:
    """Whether a field of the node, or of its elements, follows."""
    parent = node.parent
    while isinstance(parent, exp.Bracket | exp.Paren) and parent.this is node:
        node, parent = parent, parent.parent
    return isinstance(parent, exp.Dot) and parent.this is node and _field_name(parent) is not None


def _field_name(node: exp.Dot) -> exp.Identifier | None:
    return node.expression if isinstance(node.expression, exp.Identifier) else None


def _array_of(variable: exp.Identifier) -> exp.Expr | None:
    """The array whose elements a variable of a condition is: ``items`` of ``exists(items, item -> item.flag)``."""
    parent = variable.parent
    while parent is not None:
        if isinstance(parent, exp.Lambda):
            variables = [item.name.lower() for item in parent.expressions]
            if variable.name.lower() in variables:
                call = parent.parent
                if variables[0] != variable.name.lower():
                    return None
                if isinstance(call, exp.Exists | exp.ArrayFilter):
                    return call.this
                if isinstance(call, exp.Anonymous) and call.name.lower() == "forall":
                    return call.expressions[0]
                return None
        parent = parent.parent
    return None


def _place(name: _Name, sides: Sides) -> tuple[str, Path] | None:
    """The topic and the path of a name; None if the name is no field of a key or a value."""
    topic, path = sides.get("" if "" in sides else name.names[0].lower(), (None, ()))
    path = (*path, *(name.names if "" in sides else name.names[1:]))
    return None if topic is None or not path or path[0].lower() not in ("key", "value") else (topic, path)


def _lacking(schema: pa.Schema, path: Path) -> list[Path]:
    """The path down to the first name that is missing; none if all are there, or the side has no type yet."""
    if path[0].lower() not in schema.names:
        return []
    kind = schema.field(path[0].lower()).type
    for index, name in enumerate(path[1:], start=1):
        while pa.types.is_list(kind):
            kind = kind.value_type
        if not pa.types.is_struct(kind):
            return []
        item = _field(kind, name)
        if item is None:
            return [(path[0].lower(), *path[1 : index + 1])]
        kind = item.type
    return []


def _field(kind: pa.DataType, name: str) -> pa.Field | None:
    """The field of a topic's name: as it is written, else without regard to case, as Spark does; else the field that was
    renamed to or from the name."""
    in_lake_case = [item for item in fields_of(kind) if item.name.lower() == name.lower()]
    return next(iter([*fields_named(kind, name), *in_lake_case]), None)


def _expecting(
    pipeline: Pipeline, item: Input, state: RawState, missing: Callable[[pa.Schema], Sequence[Path]]
) -> RawState:
    """The table, with the missing fields that the newest schema has. An input's shape makes other columns."""
    schema = state.schema
    if item.shape is None:
        ids = {
            side: [writer.id for writer in state.writers if writer.side == side and writer.id is not None]
            for side in ("key", "value")
        }
        schema = _with_newest(pipeline, item, schema, missing, ids)
    return replace(state, reader_schema=schema)


def _with_newest(
    pipeline: Pipeline,
    item: Input,
    schema: pa.Schema,
    missing: Callable[[pa.Schema], Sequence[Path]],
    ids: Mapping[str, Sequence[int]],
) -> pa.Schema:
    """The columns, with the missing fields that the registry's newest schema has. A field that this schema renames is the known
    field, under one more name. ``missing``: the paths that are missing in some columns; ``ids``: side → the ids of its writer
    schemas so far."""
    newest_types: dict[str, pa.DataType | None] = {}
    while paths := missing(schema):
        known_schema = schema
        for side in dict.fromkeys(path[0] for path in paths):
            if side not in newest_types:
                newest_types[side] = newest_type(pipeline, item, side, ids[side])
            column, newest = schema.field(side), newest_types[side]
            kind = column.type
            for path in paths:
                if path[0] == side and newest is not None:
                    kind = _with_field(kind, newest, path[1:], ids[side])
            schema = schema.set(schema.get_field_index(side), pa.field(side, kind, metadata=column.metadata))
        # A renamed field may lack a field below the path.
        if schema.equals(known_schema, check_metadata=True):
            break
    return schema


def newest_type(pipeline: Pipeline, item: Input, side: str, ids: Sequence[int]) -> pa.DataType | None:
    """The type of a side by the newest schema of the registry; None where it has none.

    ``ids``: of the writers' schemas so far. RegistryError if the registry can't be asked.
    """
    if getattr(item, side).format != "avro" or pipeline.registry is None:
        return None
    registry = Registry(pipeline.registry)
    subjects = [f"{item.topic}-{side}"]
    for strategy in ("topic-record", "record") if ids else ():
        try:
            subjects.append(subject_name(strategy, item.topic, side, registry.schema(ids[-1])))
        except (SchemaError, SchemaUnknown):
            continue
    for subject in subjects:
        try:
            if (schema := registry.latest(subject)) is not None:
                return arrow_type(schema[1])
        except (SchemaError, SchemaUnknown):
            return None
    return None


def _with_field(kind: pa.DataType, newest: pa.DataType, path: Path, ids: Sequence[int]) -> pa.DataType:
    """``kind`` with the field at ``path`` added from the type ``newest``; ``kind`` itself if ``newest`` lacks the field.

    ``ids``: the registry ids of the known writer schemas, which lack the field.
    """
    if pa.types.is_list(kind) and pa.types.is_list(newest):
        return pa.list_(_with_field(kind.value_type, newest.value_type, path, ids))
    if not pa.types.is_struct(kind) or not pa.types.is_struct(newest):
        return kind
    known_field, newest_field = _field(kind, path[0]), _field(newest, path[0])
    if newest_field is None:
        return kind
    if known_field is None and (at := places(kind, newest)[fields_of(newest).index(newest_field)]) is not None:
        fields = fields_of(kind)
        fields[at] = merge_notes(fields[at], newest_field, fields[at].type)
        return pa.struct(fields)
    if known_field is None:
        added_field = in_lake(maybe_missing(newest_field), [item.name for item in fields_of(kind)])
        return pa.struct([*fields_of(kind), lacked_by(added_field, ids)])
    inner = known_field.with_type(_with_field(known_field.type, newest_field.type, path[1:], ids))
    return pa.struct([inner if item.name == known_field.name else item for item in fields_of(kind)])


def _without_missing(rule: Rule, schemas: Mapping[str, pa.Schema]) -> Rule:
    """The rule with NULL for the fields that are still missing."""
    sides = _sides(rule)
    edit = partial(_edited_sql, sides=sides, schemas=schemas)
    key = _filled(_edited_shape(rule.key, sides, schemas), rule.key, f"rule {rule.name}", "key")
    value = _filled(_edited_shape(rule.value, sides, schemas), rule.value, f"rule {rule.name}", "value")
    edited_sides = tuple(
        replace(
            side,
            where=edited(side.where, partial(_edited_sql, sides={"": (side.topic, ())}, schemas=schemas)),
            keys=tuple(map(edit, side.keys)),
        )
        for side in rule.sides
    )
    lookups = tuple(replace(item, on=tuple((edit(record), row) for record, row in item.on)) for item in rule.lookups)
    return replace(
        rule,
        sides=edited_sides,
        key=key,
        value=value,
        keep=edited(rule.keep, edit),
        headers=edited(rule.headers, edit),
        lookups=lookups,
        group=None if rule.group is None else rule.group.edited(edit),
        explode=edited(rule.explode, edit),
    )


def _edited_sql(sql: str, sides: Sides, schemas: Mapping[str, pa.Schema]) -> str:
    """The expression with NULL for the fields that no table has. ``schemas``: topic → its table's schema."""
    spans: list[TextSpan] = []
    for name in _names(sql):
        place = _place(name, sides)
        if place is not None and place[0] in schemas and _lacking(schemas[place[0]], place[1]):
            spans.append((name.start, name.end))
    return with_nulls(parse(sql), spans) if spans else sql


def _edited_shape(shape: Shape, sides: Sides, schemas: Mapping[str, pa.Schema]) -> Shape:
    """The shape with edited expressions. A field whose expression is only a missing field is left out."""
    if isinstance(shape, str) or shape is None:
        return None if shape is None else _edited_sql(shape, sides, schemas)
    parts = {name: _edited_shape(part, sides, schemas) for name, part in shape.items()}
    return {name: part for name, part in parts.items() if part == shape[name] or part not in _NOTHING}


def _filled(shape: Shape, before: Shape, place: str, side: str) -> Shape:
    """A side must have something: a value that is nothing but a missing field would be a tombstone."""
    if shape != before and shape in _NOTHING:
        raise FieldMissing(
            f"{place}, {side}: {json.dumps(before)} is nothing but fields that no record has had so far, nor has"
            " the newest schema. Nothing was committed. Correct the names, or wait for the source."
        )
    return shape
