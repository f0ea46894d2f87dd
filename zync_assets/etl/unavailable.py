"""Values that the source did not send: Debezium's placeholder for a large column that an update left as it was.

PostgreSQL keeps large values apart (TOAST) and does not log those that an update leaves unchanged; Debezium puts a placeholder
there, ``unavailable.value.placeholder`` in its configuration. An output field that is the placeholder is left out of its
record, so that it overwrites nothing downstream.

What the placeholder looks like depends on the column's type (Debezium, ``UnchangedToastedPlaceholder`` of its PostgreSQL
connector): a string is the placeholder; binary its bytes; an array of strings or binary holds it alone, of UUIDs the
name-based UUID of its bytes, of numbers, dates and times one element a byte; an hstore maps it to itself, as a map or as
JSON. Arrays of booleans are not looked at: one true a byte may be a value.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import uuid
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING

from zync_assets.etl.shapes import dotted

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType, StructType

_HEX = "hex:"


def placeholder_bytes(text: str) -> bytes:
    """The bytes of a placeholder as Debezium's property says it: UTF-8, or hexadecimal after ``hex:``. ValueError."""
    return bytes.fromhex(text.removeprefix(_HEX)) if text.startswith(_HEX) else text.encode()


def left_out(column: Column, kind: DataType, side: str, placeholder: str | None) -> tuple[Column, Column] | None:
    """The column with null for unavailable fields, and the paths of these (null: none) beneath ``side``.

    None where no field of the type can hold the placeholder, which then costs nothing.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    if placeholder is None or not isinstance(kind, StructType):
        return None
    found = list(_fields(column, kind, (side,), placeholder))
    if not found:
        return None
    some = functools.reduce(operator.or_, (condition for _, condition in found))
    paths = F.array_compact(F.array(*(F.when(condition, F.lit(dotted(path))) for path, condition in found)))
    return F.when(some, _cleared(column, kind, placeholder)).otherwise(column), F.when(some, paths)


def _fields(
    column: Column, kind: StructType, path: tuple[str, ...], placeholder: str
) -> Iterator[tuple[tuple[str, ...], Column]]:
    """Path and condition of each field that can hold the placeholder, at any depth of structs."""
    from pyspark.sql.types import StructType

    for item in kind:
        inner, name = column.getField(item.name), (*path, item.name)
        if isinstance(item.dataType, StructType):
            yield from _fields(inner, item.dataType, name, placeholder)
        elif (condition := _is_placeholder(inner, item.dataType, placeholder)) is not None:
            yield name, condition


def _cleared(column: Column, kind: StructType, placeholder: str) -> Column:
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    parts: list[Column] = []
    for item in kind:
        inner = column.getField(item.name)
        condition = _is_placeholder(inner, item.dataType, placeholder)
        if isinstance(item.dataType, StructType):
            inner = _cleared(inner, item.dataType, placeholder)
        elif condition is not None:
            inner = F.when(~condition, inner)
        parts.append(inner.alias(item.name))
    return F.when(column.isNotNull(), F.struct(*parts))


def _is_placeholder(column: Column, kind: DataType, placeholder: str) -> Column | None:
    """False, not null, for a null value; None for a type that can't hold the placeholder."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, BinaryType, MapType, StringType

    raw = placeholder_bytes(placeholder)
    text = raw.decode(errors="replace")
    if isinstance(kind, StringType):
        as_hstore = json.dumps({text: text}, ensure_ascii=False, separators=(",", ":"))
        return F.coalesce(column.isin(text, as_hstore), F.lit(False))
    if isinstance(kind, BinaryType):
        return column.eqNullSafe(F.lit(raw))
    if isinstance(kind, ArrayType):
        forms = _arrays(kind, raw, text)
        return functools.reduce(operator.or_, (column.eqNullSafe(form) for form in forms)) if forms else None
    if isinstance(kind, MapType) and isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType):
        held = (F.size(column) == 1) & F.try_element_at(column, F.lit(text)).eqNullSafe(text)
        return F.coalesce(held, F.lit(False))
    return None


def _arrays(kind: DataType, raw: bytes, text: str) -> list[Column]:
    from pyspark.sql import functions as F
    from pyspark.sql import types as T

    assert isinstance(kind, T.ArrayType)
    inner = kind.elementType
    numbers = [int.from_bytes([one], "big", signed=True) for one in raw]
    if isinstance(inner, T.StringType):
        md5 = str(_uuid(raw))
        return [F.array(*map(F.lit, each)) for each in ([text], [md5], [str(one) for one in numbers])]
    if isinstance(inner, T.BinaryType):
        return [F.array(F.lit(raw))]
    if isinstance(inner, T.DecimalType):
        if inner.precision < 3:
            return []
        return [F.array(*(F.lit(Decimal(one).scaleb(-inner.scale)).cast(inner) for one in numbers))]
    if isinstance(inner, T.ByteType | T.ShortType | T.IntegerType | T.LongType | T.FloatType | T.DoubleType):
        return [F.array(*(F.lit(one).cast(inner) for one in numbers))]
    if isinstance(inner, T.DateType):
        return [F.array(*(F.date_from_unix_date(F.lit(one)) for one in numbers))]
    if isinstance(inner, T.TimestampType):
        units = (F.timestamp_millis, F.timestamp_micros)
        return [F.array(*(of(F.lit(one)) for one in numbers)) for of in units]
    return []


def _uuid(raw: bytes) -> uuid.UUID:
    """Java's ``UUID.nameUUIDFromBytes``: version 3 without a namespace."""
    return uuid.UUID(bytes=hashlib.md5(raw, usedforsecurity=False).digest(), version=3)
