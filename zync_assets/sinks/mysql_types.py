"""MySQL's and MariaDB's types: what a column of a table holds, and the values as PyMySQL takes and gives them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import Connection

from zync_assets.codecs.evolution import bits_number, number_bits
from zync_assets.codecs.fields import BITS, DEBEZIUM_DATE, ZONED_TIMESTAMP
from zync_assets.errors import TargetRefused
from zync_assets.sinks.sql_types import DIGITS, SqlType, fitting, with_single_percents
from zync_assets.sinks.sql_types import holds as standard_holds
from zync_assets.sinks.target import Column, TableSpec, named

_BITS: tuple[tuple[type[SqlType], int], ...] = (
    (mysql.TINYINT, 8),
    (mysql.SMALLINT, 16),
    (mysql.MEDIUMINT, 24),
    (mysql.BIGINT, 64),
    (mysql.INTEGER, 32),
)
_SOURCE_BITS: tuple[tuple[type[SqlType], bool, int], ...] = (
    (mysql.TINYINT, False, 16),
    (mysql.TINYINT, True, 16),
    (mysql.SMALLINT, True, 32),
    (mysql.MEDIUMINT, False, 32),
    (mysql.MEDIUMINT, True, 32),
    (mysql.INTEGER, True, 64),
    (mysql.BIGINT, True, 64),
)
"""A type of numbers, whether it is unsigned, and the bits of the number that Debezium makes of it. The server refuses others."""
_BINARIES = (sa.LargeBinary, sa.BINARY, sa.VARBINARY, sa.BLOB, mysql.TINYBLOB, mysql.MEDIUMBLOB, mysql.LONGBLOB)
_LENGTHS: tuple[tuple[type[SqlType], int], ...] = (
    (mysql.TINYTEXT, 2**8 - 1),
    (mysql.MEDIUMTEXT, 2**24 - 1),
    (mysql.LONGTEXT, 2**32 - 1),
    (mysql.TEXT, 2**16 - 1),
)
"""The bytes of each type of long texts."""
_CASCADES = sa.text("""
SELECT constraint_schema, table_name, constraint_name FROM information_schema.referential_constraints
WHERE delete_rule IN ('CASCADE', 'SET NULL') AND table_name <> referenced_table_name AND referenced_table_name = :name
AND unique_constraint_schema = coalesce(:schema, database()) AND @@foreign_key_checks ORDER BY 1, 2, 3
""")
"""The foreign keys by which the deletes of a table delete or change rows of other tables."""
TEXTS = tuple(of for of, _ in _LENGTHS)
_HEADER_BYTES = 64
"""More than a packet has beside its statement."""


def holds(existing: SqlType, column: Column) -> bool:
    """Whether a column holds the values of a source's column, or refuses them by an error."""
    kinds, kind = pa.types, column.type
    bits = signed_bits(existing)
    if column.as_json:
        return isinstance(existing, (mysql.LONGTEXT, mysql.JSON))
    if isinstance(existing, mysql.BIT):
        # Other binaries and texts have their bits in another order.
        return existing.length == 1 if kinds.is_boolean(kind) else column.note == BITS
    if kinds.is_boolean(kind):
        return bool(bits)
    if kinds.is_integer(kind) and isinstance(existing, mysql.YEAR):
        return kind.bit_width == 32
    if kinds.is_integer(kind) and (bits or source_bits(existing)):
        return kind.bit_width <= max(bits, source_bits(existing))
    if kinds.is_decimal(kind) and source_bits(existing) == 64:
        return kind.scale == 0
    if kinds.is_floating(kind):
        is_single = kinds.is_float32(kind) and isinstance(existing, mysql.FLOAT) and existing.precision is None
        return is_single or isinstance(existing, (mysql.DOUBLE, sa.Double))
    if kinds.is_timestamp(kind):
        # A TIMESTAMP has the time zone of the session, which is UTC.
        return isinstance(existing, mysql.DATETIME) or (isinstance(existing, mysql.TIMESTAMP) and kind.tz is not None)
    if column.note == ZONED_TIMESTAMP and isinstance(existing, (mysql.DATETIME, mysql.TIMESTAMP)):
        return True
    if column.note == DEBEZIUM_DATE and isinstance(existing, sa.Date):
        return True
    if kinds.is_time(kind):
        return isinstance(existing, mysql.TIME)
    if kinds.is_integer(kind) or kinds.is_decimal(kind):
        # A decimal with fewer digits after the point would be rounded without a word.
        return isinstance(existing, mysql.DECIMAL) and standard_holds(existing, kind)
    if kinds.is_binary(kind) or kinds.is_large_binary(kind):
        return isinstance(existing, _BINARIES)
    # A text would be bytes, or a year of another century.
    others = (*_BINARIES, mysql.DATETIME, mysql.TIMESTAMP, mysql.YEAR, sa.types.NullType)
    return not isinstance(existing, others) and standard_holds(existing, kind)


def signed_bits(existing: SqlType) -> int:
    """The bits of a signed integer's type; 0 for another type."""
    if getattr(existing, "unsigned", False):
        return 0
    return next((bits for of, bits in _BITS if isinstance(existing, of)), 0)


def source_bits(existing: SqlType) -> int:
    """The bits of Debezium's number for a type whose range no number of the lake has; 0 for another type."""
    is_unsigned = bool(getattr(existing, "unsigned", False))
    rows = (bits for of, unsigned, bits in _SOURCE_BITS if type(existing) is of and unsigned == is_unsigned)
    return next(rows, 0)


def digits_of(kind: pa.DataType) -> tuple[int, int]:
    """The most digits before and after the point."""
    return (kind.precision - kind.scale, kind.scale) if pa.types.is_decimal(kind) else (DIGITS[kind.bit_width], 0)


def stored_values(column: pa.Array, existing: SqlType, name: str, days: tuple[date, date]) -> Sequence[Any]:
    """The values of a column as PyMySQL takes them. TargetRefused for a value that the column does not have, and would change
    without a word."""
    kinds, kind = pa.types, column.type
    if kinds.is_timestamp(kind):
        column = column.cast(pa.timestamp("us", kind.tz)).cast(pa.timestamp("us"))
    column = fitting(column, existing, name)
    values = column.to_pylist()
    change = _change(column.type, existing, days)
    if change is None:
        return values
    for at, value in enumerate(values):
        try:
            values[at] = None if value is None else change(value)
        except (ValueError, OverflowError) as error:
            raise TargetRefused(f"the column {name} is {str(value)[:100]}; {error}") from None
    return values


def _change(kind: pa.DataType, existing: SqlType, days: tuple[date, date]) -> Callable[[Any], Any] | None:
    """The function that turns a value of ``kind`` into a value of the column; None if the values stay as they are. The function
    raises ValueError, or OverflowError, for a value that the column does not have."""
    kinds = pa.types
    if kinds.is_floating(kind):
        return _finite
    if kinds.is_date(kind) or kinds.is_timestamp(kind):
        return partial(_day, days=days)
    match existing:
        case mysql.DATETIME() | mysql.TIMESTAMP() if kinds.is_string(kind):
            return lambda text: _day(datetime.fromisoformat(text).astimezone(UTC).replace(tzinfo=None), days=days)
        case mysql.BIT():
            return bits_number
        case mysql.YEAR():
            return _year
        case mysql.SET():
            return partial(_members, values=existing.values)
        case mysql.ENUM():
            return partial(_member, values=existing.enums)
        case sa.BINARY():
            return partial(_whole, length=existing.length or 1)
        case _:
            length = next((length for of, length in _LENGTHS if isinstance(existing, of)), None)
            return None if length is None else partial(_uncut, length=length)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("MySQL has no such number")
    return value


def _day(value: date, days: tuple[date, date]) -> date:
    if not days[0] <= (value.date() if isinstance(value, datetime) else value) <= days[1]:
        raise ValueError(f"MySQL's dates go from {days[0]} to {days[1]}")
    return value


def _year(value: int) -> int:
    if 0 < value < 100:
        raise ValueError("MySQL would make another century of it")
    return value


def _member(value: str, values: Sequence[str]) -> str:
    # The server takes another case, spaces at the end, and the number of a value.
    if value not in values:
        raise ValueError(f"its values are {', '.join(values)}")
    return value


def _members(value: str, values: Sequence[str]) -> str:
    chosen = value.split(",")
    if value and value != ",".join(item for item in values if item in chosen):
        raise ValueError(f"its values are, in this order, {', '.join(values)}")
    return value


def _whole(value: bytes, length: int) -> bytes:
    # The server would add zeros.
    if len(value) != length:
        raise ValueError(f"its values have {length} bytes")
    return value


def _uncut(value: str, length: int) -> str:
    # The server itself refuses other texts.
    if len(value.encode()) > length >= len(value.rstrip(" ").encode()):
        raise ValueError(f"its values have {length} bytes at the most")
    return value


def read_value(value: Any, column: Column) -> Any:
    """A value that PyMySQL gave, as the source has it."""
    kinds, kind = pa.types, column.type
    if isinstance(value, timedelta):
        return (datetime.min + value).time()
    if isinstance(value, datetime) and kinds.is_string(kind):
        return f"{value.isoformat()}Z"
    if isinstance(value, int) and kinds.is_boolean(kind):
        return bool(value)
    if isinstance(value, int) and kinds.is_binary(kind):
        return number_bits(value)
    return Decimal(value) if isinstance(value, int) and kinds.is_decimal(kind) else value


def foreign_key_drops(connection: Connection, spec: TableSpec) -> list[str]:
    """The statements that drop the foreign keys by which deletes of a table change rows of other tables."""
    name, schema = named(spec)
    quote = connection.dialect.identifier_preparer.quote_identifier
    keys = connection.execute(_CASCADES, {"name": name, "schema": schema}).all()
    drops = [f"ALTER TABLE {quote(s)}.{quote(table)} DROP FOREIGN KEY {quote(key)};" for s, table, key in keys]
    return [with_single_percents(item, connection.dialect) for item in drops]


def refuse_large(connection: Connection, statement: str, rows: Sequence[tuple[Any, ...]], size: int) -> None:
    """TargetRefused for a row whose statement is longer than the server takes. It would end the connection, as an outage does.
    ``size``: the bytes of the rows before they are texts."""
    limit = int(connection.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one())
    # To write the statements takes as long as to send them. An escaped byte is two, and a number may have 20 digits.
    if 4 * size < limit:
        return
    driver: Any = connection.connection.driver_connection
    with driver.cursor() as cursor:
        for row in rows:
            length = len(cursor.mogrify(statement, row).encode(errors="surrogateescape")) + _HEADER_BYTES
            if length > limit:
                raise TargetRefused(
                    f"the record's statement has {length} bytes, and the server's max_allowed_packet is {limit}. Raise it there"
                )
