"""Types of expressions that are plain to see in the file, without data and without Spark."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
from sqlglot import exp

from zync_assets.codecs.ddl import parse_ddl
from zync_assets.codecs.encode import check_fits
from zync_assets.errors import SchemaError
from zync_assets.pipeline import Format, Input, SideFormat
from zync_assets.pipeline_file.expressions import SqlProblem, parse
from zync_assets.records import KAFKA_TYPE


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
    for node, type in _NESTED:
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
    found = KAFKA_TYPE if form is None else _format_type(form)
    for part in path[1:]:
        if found is None or not pa.types.is_struct(found):
            return None
        exact = {found.field(at).name: found.field(at).type for at in range(found.num_fields)}
        # As it is written, else without regard to case.
        found = exact.get(part, {name.lower(): type for name, type in exact.items()}.get(part.lower()))
    return found


def _format_type(form: SideFormat) -> pa.DataType | None:
    if form.format == "bytes":
        return pa.binary()
    if form.format == "string":
        return pa.string()
    if form.format != "json":
        return None
    return pa.string() if form.ddl is None else parse_ddl(form.ddl)


_RECORD = pa.struct([("kafka", KAFKA_TYPE)])
_NESTED = (
    (exp.Struct, _RECORD),
    (exp.Array, pa.list_(pa.string())),
    (exp.Map | exp.VarMap, pa.map_(pa.string(), pa.string())),
)
"""Expressions that make nested values, each with a type of that kind; what is inside does not matter."""
