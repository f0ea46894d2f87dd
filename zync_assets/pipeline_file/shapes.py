"""Reads the parts of a rule or shape that make a record: conditions, keys and values, headers."""

from __future__ import annotations

from collections.abc import Mapping

from zync_assets.errors import Problem
from zync_assets.pipeline import SOURCE_HEADER, Headers, RecordShape, Shape
from zync_assets.pipeline_file.expressions import RECORD_ROOTS, check_expression
from zync_assets.pipeline_file.fields import Fields, kind
from zync_assets.pipeline_file.keys import known_names
from zync_assets.pipeline_file.rule_keys import input_shape
from zync_assets.pipeline_file.source import Node, Scalar, Table


def read_condition(fields: Fields, key: str, roots: tuple[str, ...] = RECORD_ROOTS) -> str | None:
    """A condition on one record; None where the key is missing or wrong."""
    node = fields.node(key)
    # `where: true` is a condition too.
    if isinstance(node, Scalar) and isinstance(node.value, bool):
        return node.text.lower()
    sql = fields.text(key)
    if sql is None:
        return None
    for message in check_expression(sql, roots):
        fields.problem(key, message)
    return sql


def read_shape(node: Node, path: str, line: int, roots: tuple[str, ...], problems: list[Problem]) -> Shape:
    """One expression, a mapping of names to such, or null."""
    if isinstance(node, Table):
        if not node.entries:
            problems.append(Problem(line, path, "has no fields; name at least one"))
        shape: dict[str, Shape] = {}
        for entry in node.entries:
            inner = f"{path}.{entry.key}"
            if not entry.key.strip():
                problems.append(Problem(entry.line, inner, "a field needs a name"))
            shape[entry.key] = read_shape(entry.node, inner, entry.line, roots, problems)
        return shape
    if not isinstance(node, Scalar):
        problems.append(Problem(line, path, f"must be an expression, a mapping or null, not {kind(node)}"))
        return None
    if node.value is None:
        return None
    problems.extend(Problem(line, path, message) for message in check_expression(node.text, roots))
    return node.text


def read_headers(fields: Fields, roots: tuple[str, ...], provenance: bool) -> Headers | None:
    """The headers of a rule's records; ``provenance``: whether its output adds some of its own."""
    node = fields.node("headers")
    if not isinstance(node, Table):
        sql = fields.text("headers", "write a mapping of names to expressions, or leave the key out") if node else None
        for message in check_expression(sql, roots) if sql is not None else ():
            fields.problem("headers", message)
        return sql
    if not node.entries:
        fields.problem("headers", "is empty; name a header, or leave the key out")
    headers: dict[str, str] = {}
    for entry in node.entries:
        path = f"{fields.key('headers')}.{entry.key}"
        if not entry.key:
            fields.problems.append(Problem(entry.line, path, "a header needs a name"))
        if provenance and entry.key == SOURCE_HEADER:
            message = "is what the output's provenance: true adds; give this header another name"
            fields.problems.append(Problem(entry.line, path, message))
        if not isinstance(entry.node, Scalar) or entry.node.value is None:
            found = kind(entry.node)
            fields.problems.append(Problem(entry.line, path, f"must be one expression, not {found}"))
            continue
        fields.problems.extend(
            Problem(entry.line, path, message) for message in check_expression(entry.node.text, roots)
        )
        headers[entry.key] = entry.node.text
    return headers


def read_record_shape(
    item: Fields, roots: tuple[str, ...], formats: Mapping[str, str] | None = None
) -> RecordShape | None:
    """The ``shape`` of an input or an output: a filter and a mapping for all of its records. ``formats``: an output's, by
    side."""
    table = item.table("shape")
    if table is None:
        return None
    fields = Fields(table, item.key("shape"), item.problems, known_names(input_shape().keys))
    if not table.entries:
        item.problem("shape", "is empty; write where:, key: or value:, or leave it out")
    sides: dict[str, Shape] = {}
    for side in ("key", "value"):
        node = fields.node(side)
        if node is None:
            continue
        if side == "value" and isinstance(node, Scalar) and node.value is None:
            fields.problem("value", "would make every record a tombstone; name the fields to keep, or leave it out")
        form = (formats or {}).get(side)
        if isinstance(node, Table) and form in ("string", "bytes"):
            fields.problem(side, f"must be one expression, not a mapping: the output's {side} format is {form}")
        sides[side] = read_shape(node, fields.key(side), fields.line_of(side), roots, item.problems)
    return RecordShape(read_condition(fields, "where", roots), sides)
