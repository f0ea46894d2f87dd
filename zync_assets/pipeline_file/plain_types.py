"""Types of expressions that are plain to see in the file, without data and without Spark."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
from sqlglot import exp

from zync_assets.codecs.dispatch import check_fits
from zync_assets.codecs.fields import fields_of
from zync_assets.codecs.spark_types import parse_ddl
from zync_assets.errors import Problem, SchemaError
from zync_assets.lake.raw_files import KAFKA_TYPE, ORDER_KINDS, is_orderly
from zync_assets.pipeline import Format, Input, Pipeline, SideFormat
from zync_assets.pipeline_file.expressions import SqlProblem, parse
from zync_assets.pipeline_file.fields import suggestion, word_list
from zync_assets.pipeline_file.references import lacking_fields, record_type
from zync_assets.spark.sql import JSON_TEXT


def format_problem(sql: str, form: Format, inputs: Mapping[str, Input]) -> str | None:
    """Why an output format has no form for what an expression makes; None if that is not plain to see.

    ``inputs``: side (``in``, ``left``, ``right``) → input.
    """
    type = plain_type(sql, inputs)
    try:
        if type is not None:
            check_fits(form, type)
    except SchemaError as error:
        return str(error)
    return None


def plain_type(sql: str, inputs: Mapping[str, Input]) -> pa.DataType | None:
    """The type of an expression if its text shows the type, else None.

    Such expressions are numbers, constructors of a struct, an array or a map, and bare columns of an input whose format has
    one type. ``inputs``: side (``in``, ``left``, ``right``) → input.
    """
    try:
        tree = parse(sql).tree.unnest()
    except SqlProblem:
        return None
    if isinstance(tree, exp.Literal) and tree.is_number:
        return pa.int64() if tree.is_int else pa.float64()
    for node, type in _CONSTRUCTORS:
        if isinstance(tree, node):
            return type
    if not isinstance(tree, exp.Column):
        return None
    side, *path = (part.name for part in tree.parts)
    if side.lower() not in inputs:
        return None
    if not path:
        return _RECORD
    item, name = inputs[side.lower()], path[0].lower()
    form = {"key": item.key, "value": item.value}.get(name)
    if item.shape is not None and name in item.shape.sides:
        return None
    result = KAFKA_TYPE if form is None else _format_type(form)
    for part in path[1:]:
        if result is None or not pa.types.is_struct(result):
            return None
        exact = {result.field(at).name: result.field(at).type for at in range(result.num_fields)}
        # As it is written, else without regard to case.
        result = exact.get(part, {name.lower(): type for name, type in exact.items()}.get(part.lower()))
    return result


def order_problem(sql: str, path: tuple[str, ...] | None, key: SideFormat, value: SideFormat) -> str | None:
    """Why an expression gives no order; None if that is not plain to see. ``path``: its names, where it is a plain field."""
    item = Input("", "", key, value)
    type = plain_type(sql, {}) if path is None else plain_type(f"in.{sql}", {"in": item})
    # The fields of a struct that the expression makes do not show. Ingest knows their types.
    if type is None or type is _RECORD or is_orderly(type):
        return None
    return f"is {type}, and an order is {ORDER_KINDS}; name such a field, or CAST it"


def unknown_fields(pipeline: Pipeline) -> tuple[list[Problem], list[str]]:
    """The fields that rules name and their inputs lack, where the file shows the inputs' types: problems and notes.

    A note is of a field that ETL takes for null (``missing-field: null``).
    """
    problems, notes = dict[Problem, None](), dict[str, None]()
    types = {item.topic: record_type(_sides(item)) for item in pipeline.inputs}
    for rule in pipeline.rules:
        for path, owner in lacking_fields(rule, types).items():
            while pa.types.is_list(owner):
                owner = owner.value_type
            # The rules of further outputs have the conditions of the first.
            problem = Problem(0, f"rule {rule.part_of or rule.name}", f"{path}: {_lack(owner, path)}")
            if rule.view is None and pipeline.missing_field == "null" and pa.types.is_struct(owner):
                notes[f"{problem.key}: {problem.message} The field is null, by missing-field: null"] = None
            else:
                problems[problem] = None
    return [*problems], [*notes]


def _lack(owner: pa.DataType, path: str) -> str:
    """The fields that a type has in place of the last one of a path."""
    if not pa.types.is_struct(owner):
        return f"{owner} has no fields." + (f" {JSON_TEXT}" if pa.types.is_string(owner) else "")
    names = [item.name for item in fields_of(owner)]
    cure = suggestion(path.rpartition(".")[2].strip("`"), names) or "."
    return f"the input's schema has no such field; there are {word_list(names)}{cure}"


def _sides(item: Input) -> list[pa.Field]:
    """The key and the value of an input's records in the raw table; null where the file does not show the type."""
    types = {"key": _format_type(item.key), "value": _format_type(item.value)} if item.shape is None else {}
    return [pa.field(name, types.get(name) or pa.null()) for name in ("key", "value")]


def _format_type(form: SideFormat) -> pa.DataType | None:
    if form.format == "bytes":
        return pa.binary()
    if form.format == "string":
        return pa.string()
    if form.format != "json":
        return None
    return pa.string() if form.ddl is None else parse_ddl(form.ddl)


_RECORD = pa.struct([("kafka", KAFKA_TYPE)])
_CONSTRUCTORS = (
    (exp.Struct, _RECORD),
    (exp.Array, pa.list_(pa.string())),
    (exp.Map | exp.VarMap, pa.map_(pa.string(), pa.string())),
)
"""Expressions that make nested values, each with a type of that kind; what is inside does not matter."""
