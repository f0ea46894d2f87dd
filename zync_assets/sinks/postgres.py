"""The target PostgreSQL, through psycopg 3.

A Spark task fills a load table by COPY from CSV text, which Arrow writes. Load tables are not logged: they are gone soon.
The merge counts their rows, since a server that crashed has emptied them.

A run holds an advisory lock for its whole time. A load table whose run holds no lock is what a killed run left behind.

TLS: a server on another host must show a certificate that the system trusts, for its host's name (``sslmode=verify-full``),
unless the URL has an ``sslmode`` of its own.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from pyarrow import csv
from sqlalchemy import exc
from sqlalchemy.dialects.postgresql import ARRAY, ENUM, JSONB, insert
from sqlalchemy.engine import Connection, Engine

from zync_assets.codecs.arrays import pc
from zync_assets.errors import SinkError, TargetRefused, TargetUnavailable
from zync_assets.sinks.sql import SqlTarget, load_names, on_conflict
from zync_assets.sinks.sql_types import SqlType, standard_type
from zync_assets.sinks.target import Column, Place

CONNECT_SECONDS = "10"
LOCAL_HOSTS = ("", "localhost", "127.0.0.1", "::1")

_LOCK_SPACE = 0x7A796E63
"""The first number of the advisory locks of runs: ``zync`` in ASCII."""
_PASSING = ("08", "53", "57", "58", "40", "55")
"""Classes of SQLSTATE: connection, resources, operator's intervention, system, rollback by a deadlock, object in use."""
_REFUSALS = ("22", "23", "44", "P0")
"""Classes of SQLSTATE: data, integrity, WITH CHECK OPTION, an error of a trigger."""


class PostgresTarget(SqlTarget):
    """A database of a PostgreSQL server."""

    load_prefixes = ("UNLOGGED",)

    def make_engine(self) -> Engine:
        url = sa.make_url(self.url.replace("postgres://", "postgresql://", 1)).set(drivername="postgresql+psycopg")
        options = {"connect_timeout": CONNECT_SECONDS, "options": "-c timezone=UTC", "application_name": "zync"}
        host = url.host or str(url.query.get("host", ""))
        if "sslmode" not in url.query and host not in LOCAL_HOSTS and not host.startswith("/"):
            options |= {"sslmode": "verify-full", "sslrootcert": "system"}
        own = {name: value for name, value in options.items() if name not in url.query}
        return sa.create_engine(url, poolclass=sa.pool.NullPool, connect_args=own)

    def is_native(self, kind: pa.DataType) -> bool:
        if pa.types.is_list(kind):
            return not pa.types.is_nested(kind.value_type)
        return super().is_native(kind)

    def sort(self, error: exc.DBAPIError) -> type[SinkError]:
        state = getattr(error.orig, "sqlstate", None)
        if state is None:
            # No answer of a server: no connection, or one that broke. psycopg itself refuses nothing of ours otherwise.
            return TargetUnavailable if isinstance(error, exc.OperationalError) else SinkError
        if state[:2] in _PASSING:
            return TargetUnavailable
        return TargetRefused if state[:2] in _REFUSALS else SinkError

    @contextmanager
    def run(self, place: Place) -> Generator[str]:
        number = secrets.randbelow(2**31)
        with self.errors(), self.engine().connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(sa.select(sa.func.pg_advisory_lock(_LOCK_SPACE, number)))
            for name in load_names(sa.inspect(connection).get_table_names(), place):
                other = name.removeprefix(place.load_prefix).partition("_")[0]
                locked = connection.execute(
                    sa.select(sa.func.pg_try_advisory_lock(_LOCK_SPACE, int(other, 16)))
                ).scalar()
                if locked:
                    sa.Table(name, sa.MetaData()).drop(connection, checkfirst=True)
                    connection.execute(sa.select(sa.func.pg_advisory_unlock(_LOCK_SPACE, int(other, 16))))
            yield f"{place.load_prefix}{number:x}_"

    def column_type(self, column: Column, *, in_key: bool) -> SqlType:
        if pa.types.is_list(column.type) and not column.as_json:
            return ARRAY(standard_type(column.type.value_type))
        return JSONB() if column.as_json else standard_type(column.type)

    def load_type(self, existing: SqlType) -> SqlType:
        if isinstance(existing, ENUM):
            return ENUM(name=existing.name, schema=existing.schema, create_type=False)
        return existing

    def write(self, connection: Connection, table: sa.Table, rows: pa.RecordBatch) -> None:
        quote = connection.dialect.identifier_preparer
        columns = ", ".join(quote.quote(name) for name in rows.schema.names)
        texts = [_text(rows.column(name)) for name in rows.schema.names]
        buffer = BytesIO()
        options = csv.WriteOptions(include_header=False, quoting_style="needed")
        csv.write_csv(pa.RecordBatch.from_arrays(texts, names=rows.schema.names), buffer, options)
        driver: Any = connection.connection.driver_connection
        with _dbapi_errors(connection), driver.cursor() as cursor:
            statement = f"COPY {quote.format_table(table)} ({columns}) FROM STDIN (FORMAT csv)"
            with cursor.copy(statement) as copy:
                copy.write(buffer.getbuffer())

    def upsert(self, table: sa.Table, rows: sa.Select[Any], key: Sequence[str], others: Sequence[str]) -> sa.Executable:
        return on_conflict(insert(table).from_select([*key, *others], rows), key, others)

    def value(self, column: Column, value: Any) -> Any:
        if column.as_json and value is not None and not isinstance(value, str):
            import json

            return json.dumps(value)
        return value


@contextmanager
def _dbapi_errors(connection: Connection) -> Generator[None]:
    """Errors of psycopg as SQLAlchemy raises them."""
    import psycopg

    try:
        yield
    except psycopg.Error as error:
        dialect: Any = connection.dialect
        raise exc.DBAPIError.instance(None, None, error, psycopg.Error, dialect=dialect) from error


def _text(column: pa.Array) -> pa.Array:
    """The values as PostgreSQL reads them in a CSV field. An empty text differs from a null: Arrow puts it in quotes."""
    kinds, kind = pa.types, column.type
    if kinds.is_string(kind) or kinds.is_large_string(kind):
        return column
    if kinds.is_binary(kind) or kinds.is_large_binary(kind):
        return _mapped(column, lambda value: "\\x" + value.hex())
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        return _arrays(column)
    if kinds.is_timestamp(kind) and kind.tz is not None:
        return pc.binary_join_element_wise(column.cast(pa.timestamp("us")).cast(pa.string()), "+00", "")
    return column.cast(pa.string())


def _mapped(column: pa.Array, change: Callable[[Any], str]) -> pa.Array:
    return pa.array([None if value is None else change(value) for value in column.to_pylist()], pa.string())


def _arrays(column: pa.Array) -> pa.Array:
    """Lists as PostgreSQL's array literals."""
    items = _text(column.flatten()).to_pylist()
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_pylist()
    texts: list[str | None] = []
    at = 0
    for length, is_there in zip(lengths, column.is_valid().to_pylist(), strict=True):
        texts.append("{" + ",".join(map(_item, items[at : at + length])) + "}" if is_there else None)
        at += length
    return pa.array(texts, pa.string())


def _item(text: str | None) -> str:
    return "NULL" if text is None else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
