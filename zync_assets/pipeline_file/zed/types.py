"""The types that a rule's Zed relies on, and the records whose fields only their topics' schemas name.

ETL calls ``with_topic_types`` before it runs the rules, with the columns of the raw tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from zync_assets.codecs.fields import fields_named, fields_of, original
from zync_assets.errors import EtlError
from zync_assets.lake.raw import RawState
from zync_assets.lake.raw_files import KAFKA_TYPE
from zync_assets.pipeline import Pipeline, Rule, Shape
from zync_assets.pipeline_file.zed.values import ELEMENT, noun, nouns, path_sql
from zync_assets.queries import Demand, FieldSteps, Path, ZedTypes
from zync_assets.spark.sql import shape_sql

Sides = Mapping[str, pa.DataType | None]


def with_topic_types(pipeline: Pipeline, raw: Mapping[str, RawState | None]) -> Pipeline:
    """The pipeline with the fields of the topics in the rules' records. ``raw``: the states of the inputs' tables.

    EtlError for a field whose type has another result in Zed than in Spark SQL.
    """
    if not any(rule.zed for rule in pipeline.rules):
        return pipeline
    types = {topic: None if state is None else _record(state.schema) for topic, state in raw.items()}
    return replace(pipeline, rules=tuple(with_types(rule, types) for rule in pipeline.rules))


def with_types(rule: Rule, types: Mapping[str, pa.DataType | None]) -> Rule:
    """One rule. ``types``: topic → the type of its records, None where it is not known yet."""
    if rule.zed is None:
        return rule
    sides: dict[str, pa.DataType | None] = {side.name: types.get(side.topic) for side in rule.sides}
    for demand in rule.zed.demands:
        scopes = [sides]
        if demand.path[0] not in sides:
            # The condition of a rule sees the columns of one record.
            scopes = [_columns(type) for type in sides.values()]
        for columns in scopes:
            _check(rule, demand, columns)
    shapes: dict[str, Shape] = {"key": rule.key, "value": rule.value}
    for record in rule.zed.records:
        name, *path = record.place
        shapes[name] = _with_shape_at(shapes[name], path, expanded(record, sides, rule.name))
    return replace(rule, key=shapes["key"], value=shapes["value"], zed=ZedTypes(rule.zed.demands))


def expanded(record: FieldSteps, sides: Sides, rule: str) -> Shape:
    """The record with its fields listed. A record without a type yet has no fields of its topic."""
    fields: dict[str, Shape] = {}
    for step in record.steps:
        if step.kind == "keep":
            type = type_at(sides, step.path)
            if type is not None and not pa.types.is_struct(type):
                raise EtlError(f"rule {rule}: {path_sql(step.path)} is {type}, and Zed needs a record there.")
            names = [original(item) for item in fields_of(type)] if type is not None else []
            fields |= {name: path_sql((*step.path, name)) for name in names}
        elif step.kind == "put":
            fields[step.name] = expanded(step.shape, sides, rule) if isinstance(step.shape, FieldSteps) else step.shape
        elif step.kind == "drop":
            fields.pop(step.name, None)
        elif step.old in fields:
            if step.name in fields:
                raise EtlError(f"rule {rule}: rename finds a field {step.name} already. Drop it first.")
            fields = {step.name if name == step.old else name: part for name, part in fields.items()}
    return fields or None


def type_at(sides: Sides, path: Path) -> pa.DataType | None:
    """The type of a field by the topic's names; None if it is not known, or no record has the field."""
    field_type = sides.get(path[0])
    for name in path[1:]:
        if name == ELEMENT and field_type is not None and kind_of(field_type) == "array":
            field_type = field_type.value_type  # pyright: ignore[reportAttributeAccessIssue]
            continue
        if field_type is None or not pa.types.is_struct(field_type):
            return None
        alike = fields_named(field_type, name)
        field_type = alike[0].type if alike else None
    return field_type


def kind_of(type: pa.DataType) -> str:
    """The kind of Zed's values that a column has."""
    kinds = pa.types
    for kind, tests in _KINDS.items():
        if any(getattr(kinds, test)(type) for test in tests):
            return kind
    return str(type)


_KINDS = {
    "bool": ("is_boolean",),
    "int": ("is_integer",),
    "float": ("is_floating",),
    "number": ("is_decimal",),
    "text": ("is_string", "is_large_string"),
    "bytes": ("is_binary", "is_large_binary", "is_fixed_size_binary"),
    "time": ("is_timestamp",),
    "array": ("is_list", "is_large_list"),
    "record": ("is_struct",),
}
_NUMBERS = ("int", "float", "number")


def _check(rule: Rule, demand: Demand, sides: Sides) -> None:
    type = type_at(sides, demand.path)
    other_type = type_at(sides, demand.other) if demand.other else None
    if (
        type is None
        or pa.types.is_null(type)
        or (demand.other and (other_type is None or pa.types.is_null(other_type)))
    ):
        return
    kind = kind_of(type)
    if other_type is not None:
        kinds = (kind_of(other_type),)
        takes = f"{_named(demand.other)}, which is {noun(kinds[0])}"
    else:
        kinds = demand.kinds
        takes = nouns(kinds)
    if kind in kinds or (kind in _NUMBERS and any(other_kind in ("number", kind) for other_kind in kinds)):
        return
    if other_type is not None and kind in _NUMBERS and kinds[0] in _NUMBERS:
        return
    line, column = demand.place
    raise EtlError(
        f"rule {rule.name}: {_named(demand.path)} is {noun(kind)} and {demand.role}"
        f" (line {line}, column {column} of the pipeline file); Zed takes {takes} there, and Spark SQL would give another"
        " result. Cast the field, such as string(…) or int64(…)."
    )


def _named(path: Path) -> str:
    """A path in an error, such as ``in.value.tags[].name``."""
    return path_sql(path).replace(f".`{ELEMENT}`", ELEMENT)


def _record(schema: pa.Schema) -> pa.DataType:
    sides = [schema.field(name) for name in ("key", "value") if name in schema.names]
    return pa.struct([pa.field("kafka", KAFKA_TYPE), *sides])


def _columns(type: pa.DataType | None) -> Sides:
    return {} if type is None else {item.name: item.type for item in fields_of(type)}


def _with_shape_at(shape: Shape, path: Sequence[str], new_shape: Shape) -> Shape:
    if not path:
        return new_shape
    assert isinstance(shape, Mapping)
    return {
        name: _with_shape_at(part, path[1:], new_shape) if name == path[0] else part for name, part in shape.items()
    }


def explained(rule: Rule) -> Rule:
    """The rule with records of topics as SQL to read: ``struct(in.value.after.* EXCEPT (a), 1L AS a)``."""
    shapes: dict[str, Shape] = {"key": rule.key, "value": rule.value}
    for record in rule.zed.records if rule.zed is not None else ():
        name, *path = record.place
        shapes[name] = _with_shape_at(shapes[name], path, _star_sql(record))
    return replace(rule, key=shapes["key"], value=shapes["value"])


def _star_sql(record: FieldSteps) -> str:
    paths: list[str] = []
    changes: dict[str, str | None] = {}
    for step in record.steps:
        if step.kind == "keep":
            paths.append(path_sql(step.path))
        elif step.kind == "put":
            shape = _star_sql(step.shape) if isinstance(step.shape, FieldSteps) else shape_sql(step.shape)
            changes[step.name] = f"{shape} AS {path_sql((step.name,))}"
        elif step.kind == "drop":
            changes[step.name] = None
        else:
            changes |= {step.old: None, step.name: f"{path_sql((step.old,))} AS {path_sql((step.name,))}"}
    less = f" EXCEPT ({', '.join(path_sql((name,)) for name in changes)})" if changes else ""
    return f"struct({', '.join([*(f'{path}.*{less}' for path in paths), *filter(None, changes.values())])})"
