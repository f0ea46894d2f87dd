"""Values that the source did not send: Debezium's placeholder for a large column that an update left as it was.

PostgreSQL keeps large values apart (TOAST) and does not log those that an update leaves unchanged; Debezium puts a placeholder
there, ``unavailable.value.placeholder`` in its configuration. A record omits an output field that is the placeholder, so
that the placeholder overwrites no value downstream.

The placeholder's form depends on the column's type (Debezium, ``UnchangedToastedPlaceholder`` of its PostgreSQL connector):

- a string: the placeholder itself
- binary: the placeholder's bytes
- an array of strings or binary: the placeholder as the only item
- an array of UUIDs: the name-based UUID of the placeholder's bytes
- an array of numbers, dates or times: an element for each byte
- an hstore, as a map or as JSON: the placeholder mapped to itself

Arrays of booleans are ignored, because an array with a true for each byte may be a value.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING

from zync_assets.sql_text import dotted, name_sql, text_sql

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

_HEX = "hex:"


def placeholder_bytes(text: str) -> bytes:
    """The bytes of a placeholder as Debezium's property says it: UTF-8, or hexadecimal after ``hex:``. ValueError."""
    return bytes.fromhex(text.removeprefix(_HEX)) if text.startswith(_HEX) else text.encode()


def left_out(column: str, kind: DataType, side: str, placeholder: str | None) -> tuple[str, str] | None:
    """A column's SQL with null for unavailable fields, and the SQL of their paths beneath ``side`` (null: none).

    None where no field of the type can hold the placeholder, which then costs nothing.
    """
    from pyspark.sql.types import StructType

    if placeholder is None or not isinstance(kind, StructType):
        return None
    found = list(_fields(column, kind, (side,), placeholder))
    if not found:
        return None
    # Short, since every batch plans it: IF takes null for false, and one IN looks at all strings.
    texts = [inner for _, inner, _, is_text in found if is_text]
    some = " OR ".join(
        [f"{form} IN ({', '.join(texts)})" for form in _texts(placeholder) if texts]
        + [condition for _, _, condition, is_text in found if not is_text]
    )
    paths = ", ".join(f"IF({condition}, {text_sql(dotted(path))}, NULL)" for path, _, condition, _ in found)
    value = f"IF({some}, {_cleared(column, kind, placeholder)}, {column})"
    return value, f"IF({some}, array_compact(array({paths})), NULL)"


def _fields(
    column: str, kind: StructType, path: tuple[str, ...], placeholder: str
) -> Iterator[tuple[tuple[str, ...], str, str, bool]]:
    """Path, SQL, condition of each field that can hold the placeholder, and whether it is a string; at any depth of structs."""
    from pyspark.sql.types import StringType, StructType

    for item in kind:
        inner, name = f"{column}.{name_sql(item.name)}", (*path, item.name)
        if isinstance(item.dataType, StructType):
            yield from _fields(inner, item.dataType, name, placeholder)
        elif (condition := _is_placeholder(inner, item.dataType, placeholder)) is not None:
            yield name, inner, condition, isinstance(item.dataType, StringType)


def _cleared(column: str, kind: StructType, placeholder: str) -> str:
    from pyspark.sql.types import StructType

    parts: list[str] = []
    for item in kind:
        inner = f"{column}.{name_sql(item.name)}"
        condition = _is_placeholder(inner, item.dataType, placeholder)
        if isinstance(item.dataType, StructType):
            inner = _cleared(inner, item.dataType, placeholder)
        elif condition is not None:
            inner = f"IF({condition}, NULL, {inner})"
        parts.append(f"{text_sql(item.name)}, {inner}")
    return f"IF({column} IS NULL, NULL, named_struct({', '.join(parts)}))"


def _is_placeholder(column: str, kind: DataType, placeholder: str) -> str | None:
    """A condition, which may be null for a null value; None for a type that can't hold the placeholder."""
    from pyspark.sql.types import ArrayType, BinaryType, MapType, StringType

    raw = placeholder_bytes(placeholder)
    text = raw.decode(errors="replace")
    if isinstance(kind, StringType):
        return f"{column} IN ({', '.join(_texts(placeholder))})"
    if isinstance(kind, BinaryType):
        return f"{column} <=> {_binary(raw)}"
    if isinstance(kind, ArrayType):
        return " OR ".join(f"{column} <=> {form}" for form in _arrays(kind.elementType, raw, text)) or None
    if isinstance(kind, MapType) and isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType):
        held = f"try_element_at({column}, {text_sql(text)}) = {text_sql(text)}"
        return f"(size({column}) = 1 AND {held})"
    return None


def _texts(placeholder: str) -> tuple[str, str]:
    """The forms of the placeholder as SQL strings: the placeholder, and the JSON of an hstore that maps it to itself."""
    text = placeholder_bytes(placeholder).decode(errors="replace")
    as_hstore = json.dumps({text: text}, ensure_ascii=False, separators=(",", ":"))
    return text_sql(text), text_sql(as_hstore)


def _arrays(inner: DataType, raw: bytes, text: str) -> list[str]:
    from pyspark.sql import types as T

    numbers = [str(int.from_bytes([one], "big", signed=True)) for one in raw]
    forms: list[list[str]] = []
    if isinstance(inner, T.StringType):
        forms = [[text_sql(text)], [text_sql(str(_uuid(raw)))], [text_sql(one) for one in numbers]]
    elif isinstance(inner, T.BinaryType):
        forms = [[_binary(raw)]]
    elif isinstance(inner, T.DecimalType) and inner.precision >= 3:
        # The unscaled number is the byte.
        digits = [f"{Decimal(one).scaleb(-inner.scale):f}" for one in numbers]
        forms = [[f"CAST('{one}' AS {inner.simpleString()})" for one in digits]]
    elif isinstance(inner, T.ByteType | T.ShortType | T.IntegerType | T.LongType | T.FloatType | T.DoubleType):
        forms = [[f"CAST({one} AS {inner.simpleString()})" for one in numbers]]
    elif isinstance(inner, T.DateType):
        forms = [[f"date_from_unix_date({one})" for one in numbers]]
    elif isinstance(inner, T.TimestampType):
        forms = [[f"{unit}({one})" for one in numbers] for unit in ("timestamp_millis", "timestamp_micros")]
    return [f"array({', '.join(form)})" for form in forms]


def _binary(raw: bytes) -> str:
    return f"X'{raw.hex()}'"


def _uuid(raw: bytes) -> uuid.UUID:
    """Java's ``UUID.nameUUIDFromBytes``: version 3 without a namespace."""
    return uuid.UUID(bytes=hashlib.md5(raw, usedforsecurity=False).digest(), version=3)
