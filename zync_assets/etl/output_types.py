"""Output topics: the type of their keys and values over all rules, and each rule's own output schema.

Publish encodes a record by its output schema, and not by the pipeline file, which may have changed since ETL. The output
schema holds the formats, the Avro schema of the rule's fields for key and value, and whether headers name the raw records.
The pool keeps an output schema under its fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from zync_assets.codecs.avro.schema import parse, subject_name
from zync_assets.codecs.avro.types import Outer, avro_schema, lake_type
from zync_assets.codecs.dispatch import check_fits
from zync_assets.codecs.fields import PLAIN, Note, topic_type_of
from zync_assets.codecs.spark_types import has_forbidden, original_name, spark_type
from zync_assets.errors import EtlError, SchemaError
from zync_assets.etl.rules.group import aggregate_types
from zync_assets.etl.rules.kind import OutputColumns
from zync_assets.etl.rules.output_schemas import (
    FieldPath,
    lacking_sql,
    later_fields,
    required_fields,
    shape_notes,
    topic_notes,
    with_notes,
    written_forms,
)
from zync_assets.etl.rules.results import item_frame
from zync_assets.etl.rules.shapes import (
    ITEM,
    Question,
    check_headers,
    expression_type,
    has_schema,
    own_type,
    shape_type,
    uncollated,
    unify,
    void_fields,
)
from zync_assets.lake import staging
from zync_assets.lake.raw_files import HEADERS_TYPE
from zync_assets.lake.staging import StagingState
from zync_assets.pipeline import Output, Pipeline, Rule
from zync_assets.spark.sql import shape_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

_NO_VALUE = "No value has come yet, only tombstones; a rule for these can use their keys alone."


@dataclass(frozen=True)
class OutputType:
    """An output topic's columns in the staging table, and the values that its rules write there."""

    topic: str
    columns: Mapping[str, pa.DataType]
    """Column name → type. A side that is NULL in every rule has no column; neither have headers that no rule sets."""
    targets: Mapping[str, OutputColumns]
    texts: Mapping[str, str]
    """Rule → its output schema, as JSON."""
    required: Collection[FieldPath]
    """The fields of values that every schema of this batch requires."""
    untyped: Mapping[str, str]
    """Rule → the error for a NULL without a type, which only another rule of the topic can resolve."""
    later_fields: Mapping[str, str | None] = field(default_factory=dict[str, "str | None"])
    """As ``output_schemas.later_fields``."""


def output_types(
    pipeline: Pipeline,
    pool: str,
    state: StagingState | None,
    frames: Mapping[str, DataFrame],
    tables: Mapping[str, pa.Schema],
    *,
    lacks: bool = False,
) -> dict[str, OutputType]:
    """The types of a pool's outputs, from its table and from all rules whose inputs have a schema by now.

    ``frames``: input topic → records (``kafka``, ``key``, ``value``, ``time``, ``old``); ``tables``: input topic → the raw
    table's columns; ``lacks``: records have the ids of their schemas.

    EtlError if two rules disagree or an expression can't be resolved.
    """
    spellings: dict[str, str] = {}
    for item in pipeline.outputs_of(pool):
        first_spelling = spellings.setdefault(item.topic.lower(), item.topic)
        if first_spelling != item.topic:
            raise EtlError(
                f"pool {pool}: topics {first_spelling} and {item.topic} differ in case alone, and so would their columns."
                " Give one of them another pool."
            )
    return {
        item.topic: _output_type(pipeline, item, state, frames, tables, lacks) for item in pipeline.outputs_of(pool)
    }


def _output_type(
    pipeline: Pipeline,
    item: Output,
    state: StagingState | None,
    frames: Mapping[str, DataFrame],
    tables: Mapping[str, pa.Schema],
    lacks: bool,
) -> OutputType:
    from pyspark.sql.pandas.types import to_arrow_type

    rules = {rule.name: rule for rule in pipeline.rules if rule.out == item.topic}
    kinds_by_rule: dict[str, tuple[DataType, DataType]] = {}
    unknown: dict[str, str] = {}
    for name, rule in rules.items():
        try:
            if (key_and_value := _rule_types(rule, frames, state)) is not None:
                kinds_by_rule[name] = uncollated(key_and_value[0]), uncollated(key_and_value[1])
        except EtlError as error:
            if has_schema(frames[rule.topics[0]]):
                raise
            unknown[name] = f"{error} {_NO_VALUE}"
    names = (staging.key_column(item.topic), staging.value_column(item.topic))
    have = {field.name: field.type for field in state.schema} if state else {}
    table = [spark_type(have[column]) if column in have else None for column in names]
    untyped: dict[str, str] = {}
    while True:
        whole = [
            _side_type(item.topic, side, table_kind, {name: kinds[index] for name, kinds in kinds_by_rule.items()})
            for index, (side, table_kind) in enumerate(zip(("key", "value"), table, strict=True))
        ]
        own_kinds = {
            name: [own_type(kind, whole_kind) for kind, whole_kind in zip(kinds, whole, strict=True)]
            for name, kinds in kinds_by_rule.items()
        }
        wrong = {name: path for name, kinds in own_kinds.items() if (path := _untyped_field(kinds, whole)) is not None}
        if not wrong:
            break
        for name, path in wrong.items():
            if all(has_schema(frames[topic]) for topic in rules[name].topics):
                untyped[name] = (
                    f"rule {name}, {path}: NULL has no type, and no other rule gives the field one."
                    " Write CAST(NULL AS <type>)."
                )
            else:
                unknown[name] = f"rule {name}, {path}: it has no type yet. {_NO_VALUE}"
            del kinds_by_rule[name]
    if untyped and len(kinds_by_rule) + len(untyped) == len(rules):
        raise EtlError(next(iter(untyped.values())))
    columns = {
        column: to_arrow_type(kind) for column, kind in zip(names, whole, strict=True) if kind.simpleString() != "void"
    }
    with_headers = any(rule.headers is not None for rule in rules.values())
    if with_headers:
        columns[staging.HEADERS_COLUMN] = HEADERS_TYPE
    targets: dict[str, OutputColumns] = {}
    earlier = _Earlier.of(item.topic, state)
    unresolved = [rule for name, rule in rules.items() if name not in kinds_by_rule]
    texts = _schema_texts(
        item, {name: (rules[name], own_kinds[name]) for name in kinds_by_rule}, earlier, tables, unresolved
    )
    for name, kinds in kinds_by_rule.items():
        sides = [
            None if column not in columns else (column, kind, whole_kind)
            for column, kind, whole_kind in zip(names, kinds, whole, strict=True)
        ]
        shape = rules[name].value
        lacking = lacking_sql(shape, _tables_of(rules[name], tables)) if lacks else []
        targets[name] = OutputColumns(fingerprint(item.topic, texts[name]), sides[0], sides[1], with_headers, lacking)
    values = [json.loads(text)["value"]["schema"] for text in texts.values()]
    required = {path for schema in values if schema is not None for path in required_fields(schema)}
    later = later_fields((rules[name].value, _tables_of(rules[name], tables)) for name in kinds_by_rule)
    return OutputType(item.topic, columns, targets, texts, required, untyped | unknown, later)


def questions(rules: Iterable[Rule], frames: Mapping[str, DataFrame]) -> list[Question]:
    """The expressions whose types a batch needs (``shapes.learn_types``), of rules whose topics have a schema. ``frames``: input
    topic → records."""
    expressions: list[Question] = []
    for rule in rules:
        # Expressions of rules with tables name rows.
        if rule.tables or not all(topic in frames and has_schema(frames[topic]) for topic in rule.topics):
            continue
        sides = {side.name: frames[side.topic] for side in rule.sides}
        for side in rule.sides:
            expressions += [({side.name: sides[side.name]}, f"({sql})") for sql in side.keys]
            expressions += [({"": sides[side.name]}, f"({side.where})")] if side.where is not None else []
        if rule.group is None and rule.explode is None:
            expressions += [(sides, shape_sql(rule.key)), (sides, shape_sql(rule.value))]
            expressions += [(sides, f"({rule.keep})")] if rule.keep is not None else []
    return expressions


def _side_type(topic: str, side: str, table: DataType | None, rules: Mapping[str, DataType]) -> DataType:
    return unify([(f"rule {name}", kind) for name, kind in rules.items()], topic, side, table)


def _untyped_field(kinds: Sequence[DataType], whole: Sequence[DataType]) -> str | None:
    """The first field that has no type; a whole side may have none, where no rule gives it one."""
    for side, kind, whole_kind in zip(("key", "value"), kinds, whole, strict=True):
        for path in void_fields(kind, side):
            if path != side or whole_kind.simpleString() != "void":
                return path
    return None


def fingerprint(topic: str, text: str) -> str:
    """The name of a topic's output schema: the first 16 hexadecimal digits of a SHA-256. Two topics may have one text."""
    return hashlib.sha256(f"{topic}\n{text}".encode()).hexdigest()[:16]


def _rule_types(
    rule: Rule, frames: Mapping[str, DataFrame], state: StagingState | None
) -> tuple[DataType, DataType] | None:
    """The types of a rule's key and value; None while an input has no table, or one side of a join no schema."""
    if any(topic not in frames for topic in rule.inputs):
        return None
    if rule.view is not None:
        # Loads an SQL parser, which Spark's workers do without.
        from zync_assets.etl.views.query import rule_types

        kinds = rule_types(rule, frames, state)
        if kinds is None:
            return None
        _check_names(rule, *kinds[:2])
        return kinds[:2]
    if len(rule.sides) > 1 and not all(has_schema(frames[topic]) for topic in rule.topics):
        return None
    sides = {side.name: frames[side.topic] for side in rule.sides}
    if rule.group is not None:
        sides = {"": aggregate_types(rule, sides)}
    if rule.lookups:
        from zync_assets.etl.lookups import row_frames

        rows = row_frames(rule, frames, state)
        if not rows or not all(map(has_schema, sides.values())):
            return None
        sides |= rows
    if rule.explode is not None:
        sides |= {ITEM: item_frame(sides, rule)}
    if rule.headers is not None:
        check_headers(sides, rule.headers, rule.name)
    if rule.keep is not None:
        place = f"where of output {rule.out}"
        kind = expression_type(sides, f"({rule.keep})", rule.name, place).simpleString()
        if kind not in ("boolean", "void"):
            raise EtlError(f"rule {rule.name}, {place}: {rule.keep} is {kind}; it must be a condition")
    key, value = (
        shape_type(sides, shape, rule.name, side) for side, shape in (("key", rule.key), ("value", rule.value))
    )
    _check_names(rule, key, value)
    return key, value


def _check_names(rule: Rule, key: DataType, value: DataType) -> None:
    """EtlError for a field whose name the lake can't hold."""
    for side, kind in (("key", key), ("value", value)):
        if name := next(_unheld(kind), None):
            raise EtlError(
                f"rule {rule.name}, {side}: an expression makes a field called `{name}`, a name that the lake can't hold. Write"
                " the fields as a mapping, or give the field another name."
            )


def _unheld(kind: DataType) -> Iterator[str]:
    """The names of fields that the lake can't hold."""
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(kind, StructType):
        for item in kind:
            if has_forbidden(item.name):
                yield item.name
            yield from _unheld(item.dataType)
    elif isinstance(kind, ArrayType):
        yield from _unheld(kind.elementType)
    elif isinstance(kind, MapType):
        yield from _unheld(kind.valueType)


@dataclass(frozen=True)
class _Earlier:
    """The schemas of a topic's earlier records.

    ``sides``: key or value → Avro schemas; ``nullable``: required fields that were null nevertheless. Fields have the
    topic's names.
    """

    sides: Mapping[str, Sequence[Any]]
    nullable: Collection[FieldPath]

    @classmethod
    def of(cls, topic: str, state: StagingState | None) -> _Earlier:
        schemas = [json.loads(text) for name, text in state.head.schemas.values() if name == topic] if state else []
        sides = {
            side: [schema[side]["schema"] for schema in schemas if schema[side]["schema"]] for side in ("key", "value")
        }
        return cls(sides, state.head.nullable.get(topic, ()) if state else ())

    def required(self, side: str) -> set[FieldPath] | None:
        """The fields that every schema of a side requires; None for a side without a schema."""
        if not self.sides[side]:
            return None
        paths = set[FieldPath].intersection(*(set(required_fields(schema)) for schema in self.sides[side]))
        return paths - set(self.nullable) if side == "value" else paths

    def forms(self, side: str) -> dict[str, str]:
        """The form of each field. Schemas have no order: of two forms, long and record are before string."""
        pairs = {pair for schema in self.sides[side] for pair in written_forms(schema, side.capitalize())}
        return dict(sorted(pairs, reverse=True))

    def key(self, kind: pa.DataType, notes: Mapping[FieldPath, Note]) -> Any:
        """An earlier schema for keys of this type, so that equal keys keep the same bytes. None if there is no such schema, or
        if it requires a field that may be null now."""
        for schema in self.sides["key"]:
            sure = all(notes.get(path, PLAIN).required for path in required_fields(schema))
            if sure and lake_type(parse(json.dumps(schema))) == kind:
                return schema
        return None


def _schema_texts(
    item: Output,
    rules: Mapping[str, tuple[Rule, list[DataType]]],
    earlier: _Earlier,
    tables: Mapping[str, pa.Schema],
    unresolved: Sequence[Rule],
) -> dict[str, str]:
    """Rule → its output schema. ``rules``: with the types of their keys and values; ``unresolved``: those without."""
    from pyspark.sql.pandas.types import to_arrow_type

    notes: dict[str, dict[FieldPath, Note]] = {}
    for index, side in enumerate(("key", "value")):
        parts = [
            # Schemas have the topic's field names, which may differ from the lake's.
            {
                tuple(map(original_name, path)): note
                for path, note in shape_notes(
                    shape, to_arrow_type(kinds[index]), _tables_of(rule, tables), certain=side == "key"
                ).items()
            }
            for rule, kinds in rules.values()
            if (shape := getattr(rule, side)) is not None and kinds[index].simpleString() != "void"
        ]
        whole = all(getattr(rule, side) is None for rule in unresolved)
        notes[side] = topic_notes(parts, earlier.required(side), whole=whole)
    return {name: _schema_text(item, rule, kinds, earlier, notes) for name, (rule, kinds) in rules.items()}


def _tables_of(rule: Rule, tables: Mapping[str, pa.Schema]) -> dict[str, pa.Schema]:
    """Side → the columns of its raw table. The expressions of a view name rows, those of a group aggregates, and no
    columns of raw tables."""
    if rule.view is not None or rule.group is not None:
        return {}
    return {side.name: tables[side.topic] for side in rule.sides}


def _schema_text(
    item: Output,
    rule: Rule,
    kinds: list[DataType],
    earlier: _Earlier,
    notes: Mapping[str, Mapping[FieldPath, Note]],
) -> str:
    from pyspark.sql.pandas.types import to_arrow_type

    sides: dict[str, Any] = {}
    for side, shape, kind, codec in zip(
        ("key", "value"), (rule.key, rule.value), kinds, (item.key, item.value), strict=True
    ):
        schema, is_renamed = None, False
        if shape is not None and kind.simpleString() != "void":
            space = item.namespace or namespace(item.topic)
            staged_type = to_arrow_type(kind)
            plain = topic_type_of(staged_type)
            has_notes = codec.format in ("avro", "connect-json")
            outer = Outer(
                has_notes,
                notes[side].get((), PLAIN),
                earlier.forms(side),
                codec.format == "avro",
                codec.format != "avro",
            )
            try:
                check_fits(codec.format, plain)
                schema = earlier.key(plain, notes[side]) if side == "key" else None
                if schema is None:
                    schema = json.loads(avro_schema(with_notes(plain, notes[side]), side.capitalize(), space, outer))
                is_renamed = plain != staged_type
            except SchemaError as error:
                raise SchemaError(f"topic {item.topic}, rule {rule.name}, {side}: {error}") from None
        sides[side] = {"format": codec.format, "schema": schema}
        strategy = item.key_subject if side == "key" else item.value_subject
        if schema is not None and codec.format == "avro" and strategy != "topic":
            # The check is here and not in publish, because a staged record can't be changed.
            subject_name(strategy, item.topic, side, json.dumps(schema))
            sides[side] = {"format": codec.format, "schema": schema, "subject": strategy}
        if is_renamed:
            sides[side] = {**sides[side], "renamed": True}
    if item.provenance:
        sides["provenance"] = True
    return json.dumps(sides, separators=(",", ":"))


def namespace(topic: str) -> str:
    """An Avro namespace from a topic's name. An underscore replaces each character that Avro's names don't allow."""
    parts = [re.sub(r"[^A-Za-z0-9_]", "_", part) for part in topic.split(".") if part]
    return ".".join(f"_{part}" if part[0].isdigit() else part for part in parts)
