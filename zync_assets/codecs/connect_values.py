"""Plain values ↔ the lake's values: what the logical types of Connect and Debezium change (table in ``connect_schema``).

Both functions work on whole arrays and raise ValueError if one value does not fit; ``nested.isolate`` finds it.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable

import pyarrow as pa

from zync_assets.codecs import lake_values
from zync_assets.codecs.avro_schema import Node
from zync_assets.codecs.connect_schema import Connect, lake_type, plain_type
from zync_assets.codecs.nested import is_valid, list_of, list_parts, map_entries, struct_of
from zync_assets.codecs.written import variable_decimal

_LONGEST = 1000
"""Digits after the point that are written out; more of them make an exponent."""


def to_lake(node: Connect, array: pa.Array) -> pa.Array:
    """An array of the plain type as one of the lake's type."""
    if node.kind == "variable-decimal":
        return pa.array([_digits(value) for value in array.to_pylist()], pa.string())
    return _convert(node, array, lake_values.to_lake, to_lake, lake_type)


def from_lake(node: Connect, array: pa.Array) -> pa.Array:
    """An array of the lake's type as one of the plain type."""
    if node.kind == "variable-decimal":
        return pa.array([variable_decimal(text) for text in array.to_pylist()], plain_type(node))
    return _convert(node, array, lake_values.from_lake, from_lake, plain_type)


def _convert(
    node: Connect,
    array: pa.Array,
    leaf: Callable[[Node, pa.Array], pa.Array],
    inner: Callable[[Connect, pa.Array], pa.Array],
    type_of: Callable[[Connect], pa.DataType],
) -> pa.Array:
    if plain_type(node) == lake_type(node):
        return array
    if node.logical:
        return leaf(node.logical, array)
    type, valid = type_of(node), is_valid(array)
    if node.kind == "struct":
        parts = [inner(child, part) for (_, child), part in zip(node.fields, array.flatten(), strict=True)]
        return struct_of(type, parts, len(array), valid)
    offsets, values = list_parts(array)
    if node.kind == "array":
        return list_of(type, offsets, inner(node.item, values), valid)
    keys, items = values.flatten()
    return list_of(type, offsets, map_entries(type, inner(node.key, keys), inner(node.item, items)), valid)


def _digits(value: dict[str, int | bytes | None] | None) -> str | None:
    if value is None:
        return None
    raw, scale = value["value"], value["scale"]
    assert isinstance(raw, bytes) and isinstance(scale, int)
    if not raw:
        raise ValueError("a decimal of no bytes")
    number = decimal.Decimal(int.from_bytes(raw, "big", signed=True)).as_tuple()
    if not 0 <= scale <= _LONGEST:
        return f"{'-' * number.sign}{''.join(map(str, number.digits))}E{-scale:+d}"
    return format(decimal.Decimal((number.sign, number.digits, -scale)), "f")
