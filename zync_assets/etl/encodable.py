"""A cheap SQL condition for outputs that may be impossible to encode. A later step encodes these outputs as a test.

The condition is true for every record that can't be encoded, and for few other records. JSON has no NaN and no infinities,
most languages have no years past 9999, bytes that become text must be UTF-8, and a record has a largest size. The module
``codecs.utf8`` finds strings that are not UTF-8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zync_assets.sql_text import name_sql

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

_ESCAPED = 6
"""The most bytes that a byte of text takes in JSON (``\\u0001``); in base64 it is less than two."""
_NUMBER = 48
"""More than any number or time takes."""


def odd_sql(sql: str, kind: DataType, form: str, depth: int = 0) -> str | None:
    """Whether a value holds something that may have no form, as a condition (null: no); None if its type can't.

    ``sql``: an expression of the type; ``form``: the output's format.
    """
    from pyspark.sql.types import (
        ArrayType,
        BinaryType,
        DateType,
        DoubleType,
        FloatType,
        MapType,
        StructType,
        TimestampNTZType,
        TimestampType,
    )

    if isinstance(kind, FloatType | DoubleType) and form == "json":
        return f"(isnan({sql}) OR abs({sql}) = double('Infinity'))"
    if isinstance(kind, BinaryType) and form == "string":
        return f"(NOT is_valid_utf8(CAST({sql} AS STRING)))"
    if isinstance(kind, DateType | TimestampType | TimestampNTZType):
        return f"(year({sql}) NOT BETWEEN 2 AND 9998)"
    if isinstance(kind, StructType):
        found = [odd_sql(f"{sql}.{name_sql(item.name)}", item.dataType, form, depth) for item in kind]
        parts = [part for part in found if part is not None]
        return f"({' OR '.join(parts)})" if parts else None
    if isinstance(kind, ArrayType):
        return _exists(sql, kind.elementType, form, depth)
    if isinstance(kind, MapType):
        sides = (("map_keys", kind.keyType), ("map_values", kind.valueType))
        found = [_exists(f"{name}({sql})", inner, form, depth) for name, inner in sides]
        parts = [part for part in found if part is not None]
        return f"({' OR '.join(parts)})" if parts else None
    return None


def _exists(sql: str, kind: DataType, form: str, depth: int) -> str | None:
    inner = odd_sql(f"x{depth}", kind, form, depth + 1)
    return None if inner is None else f"exists({sql}, x{depth} -> {inner})"


def size_sql(sql: str, kind: DataType, depth: int = 0) -> str:
    """An expression for a number of bytes that a value takes at most, in any format."""
    from pyspark.sql.types import ArrayType, BinaryType, MapType, StringType, StructType

    if isinstance(kind, StringType | BinaryType):
        return f"({_ESCAPED} * coalesce(octet_length({sql}), 0) + 12)"
    if isinstance(kind, StructType):
        fields = [size_sql(f"{sql}.{name_sql(item.name)}", item.dataType, depth) for item in kind]
        names = sum(_ESCAPED * len(item.name.encode()) + 4 for item in kind)
        return f"({' + '.join([*fields, str(names + 12)])})"
    if isinstance(kind, ArrayType):
        return _sum(sql, kind.elementType, depth)
    if isinstance(kind, MapType):
        return (
            f"({_sum(f'map_keys({sql})', kind.keyType, depth)} + {_sum(f'map_values({sql})', kind.valueType, depth)})"
        )
    return str(_NUMBER)


def _sum(sql: str, kind: DataType, depth: int) -> str:
    inner = size_sql(f"x{depth}", kind, depth + 1)
    if inner.isdigit():
        return f"(coalesce(size({sql}), 0) * {inner}L + 12)"
    return f"(coalesce(aggregate({sql}, 12L, (a{depth}, x{depth}) -> a{depth} + {inner}), 12L))"
