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

import hashlib
import json
import uuid
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import TYPE_CHECKING

from zync_assets.etl.shapes import dotted, name_sql, text_sql, type_sql

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

_HEX = "hex:"


def placeholder_bytes(text: str) -> bytes:
    """The bytes of a placeholder as Debezium's property says it: UTF-8, or hexadecimal after ``hex:``. ValueError."""
    return bytes.fromhex(text.removeprefix(_HEX)) if text.startswith(_HEX) else text.encode()


def left_out(column: str, kind: DataType, side: str, placeholder: str | None) -> tuple[str, str] | None:
    """A column, given as SQL, with null for unavailable fields, and the paths of these (null: none) beneath ``side``.

    None where no field of the type can hold the placeholder, which then costs nothing.
    """
    from pyspark.sql.types import StructType

    if placeholder is None or not isinstance(kind, StructType):
        return None
    found = list(_fields(column, kind, (side,), placeholder))
    if not found:
        return None
    some = " OR ".join(condition for _, condition in found)
    paths = ", ".join(f"CASE WHEN {condition} THEN {text_sql(dotted(path))} END" for path, condition in found)
    cleared = f"CASE WHEN {some} THEN {_cleared(column, kind, placeholder)} ELSE {column} END"
    return cleared, f"CASE WHEN {some} THEN array_compact(array({paths})) END"


def _fields(
    column: str, kind: StructType, path: tuple[str, ...], placeholder: str
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Path and condition of each field that can hold the placeholder, at any depth of structs."""
    from pyspark.sql.types import StructType

    for item in kind:
        inner, name = f"{column}.{name_sql(item.name)}", (*path, item.name)
        if isinstance(item.dataType, StructType):
            yield from _fields(inner, item.dataType, name, placeholder)
        elif (condition := _is_placeholder(inner, item.dataType, placeholder)) is not None:
            yield name, condition


def _cleared(column: str, kind: StructType, placeholder: str) -> str:
    from pyspark.sql.types import StructType

    parts: list[str] = []
    for item in kind:
        inner = f"{column}.{name_sql(item.name)}"
        condition = _is_placeholder(inner, item.dataType, placeholder)
        if isinstance(item.dataType, StructType):
            inner = _cleared(inner, item.dataType, placeholder)
        elif condition is not None:
            inner = f"CASE WHEN NOT {condition} THEN {inner} END"
        parts.append(f"{text_sql(item.name)}, {inner}")
    return f"CASE WHEN {column} IS NOT NULL THEN named_struct({', '.join(parts)}) END"


def _is_placeholder(column: str, kind: DataType, placeholder: str) -> str | None:
    """A condition that is false, not null, for a null value; None for a type that can't hold the placeholder."""
    from pyspark.sql.types import ArrayType, BinaryType, MapType, StringType

    raw = placeholder_bytes(placeholder)
    text = raw.decode(errors="replace")
    if isinstance(kind, StringType):
        as_hstore = json.dumps({text: text}, ensure_ascii=False, separators=(",", ":"))
        return f"coalesce({column} IN ({text_sql(text)}, {text_sql(as_hstore)}), false)"
    if isinstance(kind, BinaryType):
        return f"({column} <=> X'{raw.hex()}')"
    if isinstance(kind, ArrayType):
        forms = " OR ".join(f"{column} <=> {form}" for form in _arrays(kind.elementType, raw, text))
        return f"({forms})" if forms else None
    if isinstance(kind, MapType) and isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType):
        held = f"try_element_at({column}, {text_sql(text)}) <=> {text_sql(text)}"
        return f"coalesce(size({column}) = 1 AND {held}, false)"
    return None


def _arrays(inner: DataType, raw: bytes, text: str) -> list[str]:
    """The forms that an array of such elements may have as the placeholder."""
    from pyspark.sql import types as T

    numbers = [int.from_bytes([one], "big", signed=True) for one in raw]

    def array(elements: Iterable[object]) -> str:
        return f"array({', '.join(map(str, elements))})"

    if isinstance(inner, T.StringType):
        md5 = str(_uuid(raw))
        return [array(map(text_sql, each)) for each in ([text], [md5], map(str, numbers))]
    if isinstance(inner, T.BinaryType):
        return [f"array(X'{raw.hex()}')"]
    if isinstance(inner, T.DecimalType):
        if inner.precision < 3:
            return []
        return [array(f"CAST({Decimal(one).scaleb(-inner.scale):f}BD AS {type_sql(inner)})" for one in numbers)]
    if isinstance(inner, T.ByteType | T.ShortType | T.IntegerType | T.LongType | T.FloatType | T.DoubleType):
        return [f"CAST({array(numbers)} AS array<{type_sql(inner)}>)"]
    if isinstance(inner, T.DateType):
        return [array(f"date_from_unix_date({one})" for one in numbers)]
    if isinstance(inner, T.TimestampType):
        return [array(f"{made}({one})" for one in numbers) for made in ("timestamp_millis", "timestamp_micros")]
    return []


def _uuid(raw: bytes) -> uuid.UUID:
    """Java's ``UUID.nameUUIDFromBytes``: version 3 without a namespace."""
    return uuid.UUID(bytes=hashlib.md5(raw, usedforsecurity=False).digest(), version=3)
