"""The target SQLite, through Python's standard library.

SQLite lets one process write at a time. Load tables are therefore files of their own beside the database, which Spark tasks
write in parallel. The merge attaches the files, and writes to the database alone, so that its transaction is atomic.

A column's affinity changes what is stored: in a NUMERIC column the text 007 becomes the number 7. Decimals, dates and JSON
are therefore TEXT.
"""

from __future__ import annotations

import math
import re
import shlex
import sqlite3
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date, datetime
from datetime import time as time_of_day
from decimal import Decimal
from glob import escape
from pathlib import Path
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine import Connection, Engine

from zync_assets.codecs.fields import DEBEZIUM_DATE
from zync_assets.errors import SinkError, TargetRefused, TargetUnavailable
from zync_assets.sinks.sql import SqlTarget
from zync_assets.sinks.sql_types import SqlType, fitting, on_conflict
from zync_assets.sinks.target import LOAD_PREFIX, Column, Merge, Place, Progress, TableSpec, named

TIMEOUT_SECONDS = 30.0
"""How long a statement waits for another writer of the file."""

_REFUSALS = (sqlite3.IntegrityError, sqlite3.DataError)
_PASSING = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_PROTOCOL,
}


def _own_key(spec: TableSpec) -> str:
    """The name of the primary key of a table that a sink of the pipeline makes: tables of SQLite have no comments.

    Letters, digits and _ alone: SQLAlchemy finds no other names.

    >>> _own_key(TableSpec("orders", (), ("id",), "upsert", "web-shop: Staging.orders"))
    'zync_web_2dshop'
    """
    pipeline = spec.comment.partition(": ")[0]
    return "zync_" + re.sub(r"[^A-Za-z0-9]", lambda found: f"_{ord(found[0]):x}", pipeline)


class NumericText(sa.types.UserDefinedType[str]):
    """A column of texts with the affinity NUMERIC, as DATE, TIMESTAMP and JSON have it: the text 2024 would become a number. A
    date, a time, and the JSON of a nested value stay texts."""

    cache_ok = True

    def __init__(self, name: str) -> None:
        self.name = name

    def get_col_spec(self, **_: object) -> str:
        return self.name


class SqliteTarget(SqlTarget):
    """A file of SQLite."""

    tasks = 8
    ignores_case = True

    def progress(self, place: Place) -> Progress:
        return super().progress(place) if self.path.exists() else Progress()

    @property
    def path(self) -> Path:
        """The database's file."""
        return Path(self.url.removeprefix("sqlite:///"))

    def make_engine(self) -> Engine:
        # Transactions begin and end by statements of our own: Python's module would begin one too late to lock the file.
        return sa.create_engine(
            self.url,
            poolclass=sa.pool.NullPool,
            isolation_level="AUTOCOMMIT",
            connect_args={"timeout": TIMEOUT_SECONDS},
        )

    def sort(self, error: exc.DBAPIError) -> type[SinkError]:
        original: Any = error.orig
        if isinstance(original, (*_REFUSALS, OverflowError)):
            return TargetRefused
        code = getattr(original, "sqlite_errorcode", 0)
        return TargetUnavailable if code & 0xFF in _PASSING else SinkError

    def error(self, error: exc.DBAPIError) -> SinkError:
        code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            return SinkError(
                f"{self.path}: the disk is full. Make room, and run again: nothing of the batch was written."
            )
        if code not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            return super().error(error)
        if self.path.is_dir():
            return SinkError(
                f"{self.path} is a folder. Name a file in the sink's url, such as {self.path / 'rows.db'}."
            )
        folder = self.path.parent
        if not folder.is_dir():
            return SinkError(
                f"the folder {folder} of the sink's url is not there. Run:\nmkdir -p {shlex.quote(str(folder))}"
            )
        return SinkError(
            f"{self.path} can't be opened or written. Let the sink's user read and write the file and its folder."
        )

    @contextmanager
    def connection(self) -> Generator[Connection]:
        with self.errors(), self.engine().connect() as connection, _transaction(connection):
            yield connection

    @contextmanager
    def run(self, place: Place) -> Generator[str]:
        with super().run(place) as run:
            try:
                yield run
            finally:
                for item in self._files(run):
                    _remove(item)

    def tables(self) -> Sequence[str]:
        return [item.name.removeprefix(f"{self.path.name}-") for item in self._files(LOAD_PREFIX)]

    def _files(self, prefix: str) -> list[Path]:
        return [item for item in self.path.parent.glob(f"{escape(self.path.name)}-{prefix}*") if item.is_file()]

    @contextmanager
    def loading(self, spec: TableSpec, name: str) -> Generator[tuple[Connection, sa.Table]]:
        with self.connection() as connection:
            table = self.load_table(self._reflect_table(connection, spec), spec, name, None)
        engine = sa.create_engine(
            f"sqlite:///{self._file(name)}", poolclass=sa.pool.NullPool, isolation_level="AUTOCOMMIT"
        )
        with self.errors(), engine.connect() as connection:
            # After a kill, the file is removed. It therefore needs no journal, and SQLite need not wait for the disk.
            connection.exec_driver_sql("PRAGMA journal_mode = OFF")
            connection.exec_driver_sql("PRAGMA synchronous = OFF")
            with _transaction(connection):
                table.create(connection)
                yield connection, table

    def _file(self, name: str) -> Path:
        return self.path.with_name(f"{self.path.name}-{name}")

    @contextmanager
    def merging(self, merge: Merge) -> Generator[Connection]:
        with self.errors(), self.engine().connect() as connection:
            for number, load in enumerate(merge.loads):
                connection.execute(
                    sa.text("ATTACH DATABASE :file AS " + f"load_{number}"), {"file": str(self._file(load.name))}
                )
            with _transaction(connection, "BEGIN IMMEDIATE"):
                yield connection

    def load_schema(self, number: int) -> str | None:
        return f"load_{number}"

    def drop(self, names: Sequence[str]) -> None:
        for name in names:
            _remove(self._file(name))

    def lock(self, query: sa.Select[Any]) -> sa.Select[Any]:
        return query

    def write(self, connection: Connection, table: sa.Table, rows: Iterator[pa.RecordBatch]) -> None:
        for batch in rows:
            columns = [_stored_values(batch.column(name), name, table.c[name].type) for name in batch.schema.names]
            statement = str(sa.insert(table).compile(dialect=connection.dialect, column_keys=batch.schema.names))
            if batch.num_rows:
                # The columns' own types would convert each value again.
                connection.exec_driver_sql(statement, list(zip(*columns, strict=True)))

    def default(self, column: Column, kind: SqlType) -> Any:
        if column.default is None:
            return None
        (value,) = _stored_values(pa.array([column.default], column.type), column.name, kind)
        return str(int(value) if isinstance(value, bool) else value)

    def upserts(
        self, table: sa.Table, rows: sa.Select[Any], key: Sequence[str], others: Sequence[str]
    ) -> Sequence[sa.Executable]:
        return [on_conflict(insert(table).from_select([*key, *others], rows), key, others)]

    def column_type(self, column: Column, *, in_key: bool) -> SqlType:
        kinds, kind = pa.types, column.type
        if kinds.is_boolean(kind):
            return sa.Boolean()
        if kinds.is_integer(kind):
            return sa.Text() if column.note == DEBEZIUM_DATE else sa.BigInteger()
        if kinds.is_floating(kind):
            return sa.REAL()
        return sa.LargeBinary() if kinds.is_binary(kind) or kinds.is_large_binary(kind) else sa.Text()

    def holds(self, existing: SqlType, column: Column) -> bool:
        kinds, kind = pa.types, column.type
        if isinstance(existing, sa.types.NullType):
            return True
        is_number = isinstance(existing, (sa.Boolean, sa.Integer, sa.Numeric, sa.Float))
        if column.note == DEBEZIUM_DATE and isinstance(existing, (NumericText, sa.Text, sa.String)):
            return True
        if kinds.is_boolean(kind) or kinds.is_integer(kind):
            return is_number and not (isinstance(existing, sa.Float) and kinds.is_int64(kind))
        if kinds.is_floating(kind):
            return isinstance(existing, sa.Float)
        if isinstance(existing, NumericText):
            return kinds.is_temporal(kind) or column.as_json
        return isinstance(existing, (sa.Text, sa.String, sa.LargeBinary))

    def key_problem(self, connection: Connection, table: sa.Table, spec: TableSpec) -> str | None:
        problem = super().key_problem(connection, table, spec)
        if spec.mode == "insert" or problem is not None:
            return problem
        quote = connection.dialect.identifier_preparer.quote
        for index in connection.exec_driver_sql(f"PRAGMA index_list({quote(table.name)})").mappings():
            columns = connection.exec_driver_sql(f"PRAGMA index_xinfo({quote(index['name'])})").mappings().all()
            collations = {item["name"]: item["coll"] for item in columns if item["key"]}
            if index["unique"] and collations.keys() == set(spec.key) and {*collations.values()} - {"BINARY"}:
                names = ", ".join(name for name, collation in collations.items() if collation != "BINARY")
                return (
                    f"the key's column {names} takes texts for equal that differ; make the table anew without COLLATE"
                )
        return None

    def wider(self, existing: SqlType, column: Column) -> SqlType | None:
        return None

    def new_table(self, spec: TableSpec) -> sa.Table:
        table = super().new_table(spec)
        table.primary_key.name = _own_key(spec)
        return table

    def is_own(self, connection: Connection, spec: TableSpec) -> bool:
        return sa.inspect(connection).get_pk_constraint(*named(spec))["name"] == _own_key(spec)

    def load_type(self, existing: SqlType) -> SqlType:
        """The affinity of the column; no CHECK and no length."""
        if isinstance(existing, (sa.Boolean, sa.Integer)):
            return sa.BigInteger()
        if isinstance(existing, sa.Float):
            return sa.REAL()
        if isinstance(existing, sa.Numeric):
            return sa.Numeric(asdecimal=False)
        if isinstance(existing, (sa.Date, sa.DateTime, sa.Time, sa.JSON)):
            return NumericText(type(existing).__name__.upper())
        return sa.LargeBinary() if isinstance(existing, (sa.LargeBinary, sa.types.NullType)) else sa.Text()

    def _reflect_table(self, connection: Connection, spec: TableSpec) -> sa.Table:
        table = super()._reflect_table(connection, spec)
        for column in table.c:
            # Values are written as they are stored, without SQLAlchemy's conversions.
            is_boolean = isinstance(column.type, sa.Boolean)
            column.type = sa.Boolean(create_constraint=False) if is_boolean else self.load_type(column.type)
        return table

    def value(self, column: Column, value: Any) -> Any:
        kinds, kind = pa.types, column.type
        if value is None or column.as_json:
            return value
        if kinds.is_decimal(kind):
            return Decimal(value)
        if kinds.is_date(kind):
            return date.fromisoformat(value)
        if kinds.is_integer(kind) and isinstance(value, str):
            return super().value(column, date.fromisoformat(value))
        if kinds.is_time(kind):
            return time_of_day.fromisoformat(value)
        if kinds.is_timestamp(kind):
            return datetime.fromisoformat(value)
        return bool(value) if kinds.is_boolean(kind) else value


def _stored_values(column: pa.Array, name: str, existing: SqlType) -> Sequence[Any]:
    """The values of a column as SQLite stores them. ``existing``: the type of the table's column."""
    if pa.types.is_integer(column.type) and isinstance(existing, (NumericText, sa.Text)):
        column = fitting(column, sa.Date(), name)
    kinds, kind = pa.types, column.type
    values = column.to_pylist()
    if kinds.is_decimal(kind):
        return [None if value is None else format(value, "f") for value in values]
    if kinds.is_temporal(kind):
        return [None if value is None else value.isoformat() for value in values]
    if kinds.is_floating(kind) and any(value is not None and math.isnan(value) for value in values):
        # SQLite would store a null.
        raise TargetRefused(f"the column {name} is nan, and SQLite has no such number")
    return values


@contextmanager
def _transaction(connection: Connection, begin: str = "BEGIN") -> Generator[None]:
    connection.exec_driver_sql(begin)
    try:
        yield
    except BaseException:
        with suppress(exc.DBAPIError):
            connection.exec_driver_sql("ROLLBACK")
        raise
    connection.exec_driver_sql("COMMIT")


def _remove(item: Path) -> None:
    for suffix in ("", "-journal", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            item.with_name(item.name + suffix).unlink()
