"""The types of the lake in ClickHouse, the values as Arrow has them on the way in and out, inserts, and errors.

| the lake | ClickHouse |
| --- | --- |
| boolean, integers, float, double | Bool, Int8 to Int64, Float32, Float64 |
| decimal(p, s) | Decimal(p, s) |
| string, binary | String |
| date | Date32, which goes from 1900 to 2299 |
| timestamp, timestamp_ntz | DateTime64(6, 'UTC'), which goes from 1900 to 2299 |
| time of day | String, ISO 8601 |
| array, struct, map | String, JSON: none of ClickHouse's own can be null |

Each column outside the key is Nullable.

ClickHouse skips an insert whose token it knows. That is right for rows that a killed run has written. But the same offsets
may come with other values, after an edit of the pipeline file, and a position may come again, after a reset.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from alembic.ddl.base import ColumnType
from clickhouse_connect.cc_sqlalchemy import types as ch
from clickhouse_connect.driver.exceptions import OperationalError
from sqlalchemy.engine import Connection

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.fields import DEBEZIUM_DATE
from zync_assets.errors import SinkError, TargetRefused, TargetUnavailable
from zync_assets.sinks.fold import CREATION, DELETE, OFFSET, OP, SET, UPDATE, UPSERT
from zync_assets.sinks.sql_types import DIGITS, SqlType, fitting, place_values, type_text
from zync_assets.sinks.target import Column, Merge, TableSpec

DELETED = "zync_deleted"
"""The column of a table that marks deleted rows. The version column is OFFSET."""

TOKEN = "insert_deduplication_token"

DAYS = (date(1900, 1, 1), date(2299, 12, 31))
"""The days of Date32 and DateTime64."""

_INTEGERS: tuple[tuple[type[SqlType], int], ...] = (
    (ch.Int8, 8),
    (ch.Int16, 16),
    (ch.Int32, 32),
    (ch.Int64, 64),
    (ch.Int128, 128),
    (ch.Int256, 256),
)
_TEXTS = (ch.String, ch.UUID, ch.Enum8, ch.Enum16, ch.IPv4, ch.IPv6, ch.JSON)

# https://github.com/ClickHouse/ClickHouse/blob/master/src/Common/ErrorCodes.cpp
_PASSING = {159, 160, 198, 202, 203, 209, 210, 225, 236, 241, 242, 243, 252, 279, 285, 286, 319, 341, 394, 473, 999}
"""Timeouts, connections, memory, disks, replicas that can't be reached, too many parts."""
_REFUSALS = {6, 26, 27, 38, 41, 53, 69, 70, 72, 117, 131, 190, 321, 349, 376, 407, 441, 467, 469, 675, 676, 691}  # fmt: skip
"""Values that can't be parsed or converted, nulls, and constraints."""


_SERVER = re.compile(r"executing HTTP request attempt \d+ \(https?://([^)]+)\)")

for _name in ("urllib3.connectionpool", "clickhouse_connect.driver"):
    # Each failed connection has a warning of its own in both, and becomes an error here.
    logging.getLogger(_name).setLevel(logging.ERROR)


def new_type(column: Column) -> SqlType:
    """The type of a new column. A type without a lossless counterpart in ClickHouse becomes a text."""
    kinds, kind = pa.types, column.type
    if column.as_json:
        return ch.String()
    if kinds.is_boolean(kind):
        return ch.Bool()
    if kinds.is_date(kind) or (column.note == DEBEZIUM_DATE and kinds.is_integer(kind)):
        return ch.Date32()
    if kinds.is_integer(kind):
        return next(of for of, bits in _INTEGERS if bits == kind.bit_width)()
    if kinds.is_floating(kind):
        return ch.Float64() if kinds.is_float64(kind) else ch.Float32()
    if kinds.is_decimal(kind):
        return ch.Decimal(kind.precision, kind.scale)
    if kinds.is_timestamp(kind):
        return ch.DateTime64(6, "UTC")
    return ch.String()


def nullable(kind: SqlType) -> SqlType:
    """The type with null."""
    wrap: Any = ch.Nullable
    return wrap(kind)


def version_type(spec: TableSpec) -> SqlType:
    """The type of the versions of a table's rows."""
    return ch.UInt128() if spec.is_timed else ch.UInt64()


def version_changes(table: sa.Table, spec: TableSpec) -> Iterator[tuple[int, str, Any]]:
    """The change of a table whose versions are too small, for any ``evolve``: the column is zync's own. The rows of before keep
    their versions, which are lower than all new ones."""
    if spec.is_timed and OFFSET in table.c and str(table.c[OFFSET].type) == "UInt64":
        ddl = ColumnType(table.name, OFFSET, version_type(spec), schema=table.schema)
        yield 0, f"column {OFFSET} holds no versions of several partitions", ddl


def inner_name(kind: SqlType) -> str:
    """The name of a type without Nullable."""
    return str(kind).removeprefix("Nullable(").removesuffix(")")


def holds(existing: SqlType, column: Column) -> bool:
    """Whether a column of ClickHouse holds the values of a source's column without loss, or refuses them."""
    kinds, kind = pa.types, column.type
    if column.as_json:
        return isinstance(existing, (ch.String, ch.JSON))
    if kinds.is_boolean(kind):
        return isinstance(existing, (ch.Bool, ch.UInt8))
    if isinstance(existing, ch.Date32):
        return kinds.is_date(kind) or column.note == DEBEZIUM_DATE
    if kinds.is_integer(kind):
        return kind.bit_width <= _bits(existing) or _decimal_holds(existing, DIGITS[kind.bit_width], 0)
    if kinds.is_floating(kind):
        return isinstance(existing, ch.Float64) or (isinstance(existing, ch.Float32) and kinds.is_float32(kind))
    if kinds.is_decimal(kind):
        return _decimal_holds(existing, kind.precision - kind.scale, kind.scale)
    if kinds.is_date(kind):
        return False
    if kinds.is_timestamp(kind):
        scale, zone = _instant(existing)
        # A time without zone is kept as if it were in UTC, and must be shown so.
        return scale >= 6 and (kind.tz is not None or zone == "UTC")
    if kinds.is_string(kind) or kinds.is_large_string(kind):
        return isinstance(existing, _TEXTS)
    return isinstance(existing, ch.String)


def wider(existing: SqlType, column: Column) -> SqlType | None:
    """A type that holds the old values of a column and those of a source's column; None if there is no such type."""
    kinds, kind = pa.types, column.type
    larger: SqlType | None = None
    if _bits(existing) and kinds.is_integer(kind):
        # Not the type of a new column: a column of numbers takes Debezium's dates as numbers.
        larger = next(of for of, bits in _INTEGERS if bits == kind.bit_width)()
    elif isinstance(existing, ch.Float32) and kinds.is_floating(kind):
        larger = ch.Float64()
    elif isinstance(existing, ch.Decimal) and kinds.is_decimal(kind):
        scale = max(kind.scale, existing.scale or 0)
        whole_digits = max(kind.precision - kind.scale, (existing.precision or 0) - (existing.scale or 0))
        larger = ch.Decimal(whole_digits + scale, scale) if whole_digits + scale <= 76 else None
    is_nullable = bool(getattr(existing, "nullable", False))
    return nullable(larger) if larger is not None and is_nullable else larger


def stored(column: pa.Array, name: str, existing: SqlType) -> pa.Array:
    """The values of a column as ClickHouse reads them from Arrow. ``existing``: the type of the table's column. TargetRefused for
    a date that ClickHouse does not have."""
    if pa.types.is_integer(column.type) and inner_name(existing) == "Date32":
        column = fitting(column, sa.Date(), name)
    kinds, kind = pa.types, column.type
    if kinds.is_time(kind):
        values = [None if value is None else value.isoformat() for value in column.to_pylist()]
        return pa.array(values, pa.string())
    if kinds.is_date(kind) or kinds.is_timestamp(kind):
        first, last = DAYS
        if kinds.is_timestamp(kind):
            column = column.cast(pa.timestamp("us", kind.tz))
            first, last = (datetime.combine(day, at) for day, at in ((first, time.min), (last, time.max)))
            column = column.cast(pa.timestamp("us"))
        outside = pc.or_(
            pc.less(column, pa.scalar(first, column.type)), pc.greater(column, pa.scalar(last, column.type))
        )
        if bool(pc.any(outside).as_py()):
            value = column.filter(outside)[0].as_py().isoformat()
            raise TargetRefused(
                f"the column {name} is {value}; ClickHouse's {type_text(kind)} goes from {first} to {last}"
            )
    return column


def read_column(table: sa.Table, spec: Column) -> sa.ColumnElement[Any]:
    """A column as ``as_source`` takes its values. A column that no batch has needed yet is not there: nulls."""
    if spec.name not in table.c:
        return sa.cast(sa.null(), ch.Nullable(ch.String())).label(spec.name)
    column = table.c[spec.name]
    is_text = spec.as_json or pa.types.is_string(spec.type)
    return sa.func.toString(column).label(spec.name) if is_text else column


def as_source(batch: pa.RecordBatch, spec: TableSpec) -> pa.RecordBatch:
    """A batch that ClickHouse gave, with the types of the source's columns."""
    columns: list[pa.Array] = []
    for number, item in enumerate(spec.columns):
        values = batch.column(number)
        if values.null_count == len(values):
            values = pa.nulls(len(values))
        elif pa.types.is_time(item.type):
            texts = values.cast(pa.string()).to_pylist()
            values = pa.array([None if text is None else time.fromisoformat(text) for text in texts], item.type)
        columns.append(values.cast(pa.string() if item.as_json else item.type))
    return pa.RecordBatch.from_arrays(columns, names=[item.name for item in spec.columns])


def merged_rows(rows: sa.Table, table: sa.Table, spec: TableSpec) -> sa.Select[Any]:
    """The rows of a load table, with the columns that partial records leave out from the present rows.

    A killed run may have written the batch, or another part of its records. A present row from the record that makes the row, or
    from a later record, has the values of all records before. Whether the row was there before does not matter then.
    """
    partial = sa.and_(rows.c[OP].in_([UPSERT, UPDATE]), rows.c[SET].is_not(None))
    keys = [cast_column(rows, table, name) for name in spec.key]
    partial_keys = sa.select(*keys).where(partial)
    key_columns = [table.c[name] for name in spec.key]
    # The setting `final` of the insert has the effect of FINAL here, where the dialect does not write it.
    present_rows = (
        sa.select(*table.c)
        .where((sa.tuple_(*key_columns) if len(key_columns) > 1 else key_columns[0]).in_(partial_keys))
        .subquery("present")
    )
    is_same_key = sa.and_(partial, *(present_rows.c[name] == key for name, key in zip(spec.key, keys, strict=True)))
    shape = sa.func.ifNull(rows.c[SET], "1" * len(spec.others))
    is_there = present_rows.c[spec.key[0]].is_not(None)
    was_there = sa.and_(is_there, present_rows.c[OFFSET] < rows.c[CREATION])
    values: list[sa.ColumnElement[Any]] = []
    for at, item in enumerate(spec.others):
        mark = sa.func.substring(shape, at + 1, 1)
        is_set = sa.or_(mark == "1", sa.and_(mark == "2", was_there), sa.and_(mark == "3", sa.not_(is_there)))
        values.append(sa.case((is_set, cast_column(rows, table, item.name)), else_=present_rows.c[item.name]))
    query = sa.select(*keys, *values, rows.c[OFFSET], sa.literal(0)).select_from(
        rows.outerjoin(present_rows, is_same_key)
    )
    return query.where(sa.or_(rows.c[OP] != UPDATE, is_there))


def cast_column(rows: sa.Table, table: sa.Table, name: str) -> sa.ColumnElement[Any]:
    """A column of a load table as the table's type. A null in a column that takes none is an error."""
    return sa.cast(rows.c[name], table.c[name].type)


def check_parsed(connection: Connection, rows: sa.Table, table: sa.Table) -> None:
    """TargetRefused for a text that ClickHouse can't parse: its cast to a Nullable type makes such a text null."""
    for column in table.c:
        if isinstance(column.type, (ch.UUID, ch.IPv4, ch.IPv6, ch.JSON)) and column.name in rows.c:
            text = rows.c[column.name]
            is_unparsed = sa.and_(text.is_not(None), cast_column(rows, table, column.name).is_(None))
            row = connection.execute(sa.select(text).where(is_unparsed).limit(1)).first()
            if row is not None:
                raise TargetRefused(f"the column {column.name} is {row[0]!r}, which is no {inner_name(column.type)}")


def _bits(existing: SqlType) -> int:
    return next((bits for of, bits in _INTEGERS if isinstance(existing, of)), 0)


def _decimal_holds(existing: SqlType, whole_digits: int, scale: int) -> bool:
    if not isinstance(existing, ch.Decimal):
        return False
    existing_scale = existing.scale or 0
    return (existing.precision or 0) - existing_scale >= whole_digits and existing_scale >= scale


def _instant(existing: SqlType) -> tuple[int, str]:
    """Digits of a second and the zone of a DateTime64; (0, "") for another type."""
    if not isinstance(existing, ch.DateTime64):
        return 0, ""
    scale, zone, *_ = (*existing.type_def.values, "")
    return int(scale), str(zone).strip("'")


def error_class(error: object) -> type[SinkError]:
    """Whether an error of the driver is an outage, a refused record or neither."""
    code = getattr(error, "code", None)
    if code is None:
        return TargetUnavailable if isinstance(error, OperationalError) else SinkError
    return TargetUnavailable if code in _PASSING else TargetRefused if code in _REFUSALS else SinkError


def error_text(error: object) -> str:
    """ClickHouse's words, without the statement that they repeat. Of a failed connection, the server and the first cause."""
    text = " ".join(str(error).split())
    if server := _SERVER.search(text):
        cause = error
        while isinstance(cause, BaseException) and cause.__cause__ is not None:
            cause = cause.__cause__
        return f"{server[1]} does not answer: {getattr(cause, 'strerror', None) or cause}"
    text = re.split(r":? (?:In scope|While executing|while executing) ", text)[0].strip()
    return text if error_class(error) is not SinkError else f"the target says: {text}"


def insert_records(connection: Connection, table: sa.Table, merge: Merge, batch: pa.RecordBatch) -> None:
    """Insert records into the table itself. With mode insert, ClickHouse skips a block that it has."""
    names = [column.name for column in merge.spec.columns]
    is_deleted = pc.equal(batch.column(OP), DELETE).cast(pa.uint8())
    versions = batch.column(OFFSET)
    versions = versions if merge.spec.is_timed else versions.cast(pa.uint64())
    columns = [*(stored(batch.column(name), name, table.c[name].type) for name in names), versions, is_deleted]
    arrow_table = pa.Table.from_arrays(columns, names=[*names, OFFSET, DELETED])
    # Rows of one key in a block are left to FINAL and to merges: to look for them takes half of the insert's time.
    settings: dict[str, Any] = {"optimize_on_insert": 0}
    if merge.spec.mode == "upsert":
        settings[TOKEN] = own_token()
    client_of(connection).insert_arrow(table.name, arrow_table, database=table.schema, settings=settings)


def insert_changes(connection: Connection, statement: sa.Executable, token: str, **further_settings: int) -> None:
    """Insert what a statement selects."""
    settings = {TOKEN: token, "join_use_nulls": 1, "final": 1, **further_settings}
    client_of(connection).command(sql_text(connection, statement), settings=settings)


def is_open(merge: Merge, row: Mapping[str, Any]) -> bool:
    """Whether a refused record lies in the ranges that the merge passes."""
    next_offset = merge.upcoming.get(row["partition"])
    first = merge.expected.get(row["partition"]) or 0
    return next_offset is not None and first <= row["offset"] < next_offset


def own_token() -> str:
    """The token of an insert that ClickHouse must not skip, whatever settings it has."""
    return secrets.token_hex(16)


def load_token(merge: Merge, *load: int) -> str:
    """The token of a load table's insert: source, ranges and rows.

    Another run shares the rows out in another way, and an edit of the pipeline file gives them other values. Below 0 lie marks.
    """
    ends = sorted((partition, end) for partition, end in merge.upcoming.items() if partition >= 0)
    ranges = [f"{partition}:{merge.expected.get(partition)}-{end}" for partition, end in ends]
    parts = [*place_values(merge.place).values(), merge.origin, *ranges, *map(str, (*merge.cured, *load))]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def sql_text(connection: Connection, statement: Any) -> str:
    """A statement as text, with its values."""
    text = str(statement.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True}))
    # SQLAlchemy doubles each percent sign, as for a statement with parameters.
    return text.replace("%%", "%")


def client_of(connection: Connection) -> Any:
    """The client of clickhouse-connect below a connection."""
    driver: Any = connection.connection.driver_connection
    return driver.client
