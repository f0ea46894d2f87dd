"""The target PostgreSQL, through psycopg 3.

A Spark task fills a load table by COPY from CSV text, which Arrow writes. Load tables are not logged: they are gone soon.
The merge counts their rows, since a server that crashed has emptied them. Records to append go into the table itself by one
COPY, in the transaction of the position: a load table would be written twice.

A run holds an advisory lock for its whole time. A load table whose run holds no lock is what a killed run left behind.

TLS: a server on another host must show a certificate for its host's name that the system trusts (``sslmode=verify-full``).
An ``sslmode`` in the URL or in the environment decides otherwise.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import ssl
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from itertools import chain
from typing import Any
from warnings import catch_warnings, simplefilter

import psycopg
import pyarrow as pa
import sqlalchemy as sa
from alembic.ddl.base import ColumnType
from psycopg import sql
from pyarrow import csv
from sqlalchemy import event, exc
from sqlalchemy.dialects.postgresql import ARRAY, ENUM, HSTORE, INTERVAL, JSONB, insert
from sqlalchemy.dialects.postgresql.ranges import AbstractRange
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine.interfaces import ReflectedColumn

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.fields import DEBEZIUM_JSON, ZONED_TIMESTAMP
from zync_assets.crashes import crash_point
from zync_assets.errors import SinkError, TableLocked, TargetRefused, TargetUnavailable
from zync_assets.pipeline import Evolve
from zync_assets.sinks.postgres_dialect import (
    CASCADES,
    NAMED_TYPES,
    NamedType,
    base_type,
    column_values,
    copied_text,
    is_local_times,
    is_plain,
    lasting_cure,
    lock_holders,
    missing_rights,
    own_type_holds,
    read_value,
)
from zync_assets.sinks.server_watch import TCP_OPTIONS, watch_server
from zync_assets.sinks.sql import SqlTarget
from zync_assets.sinks.sql_types import (
    POSITIONS,
    SqlType,
    is_exact,
    loose_key,
    missing_key,
    on_conflict,
    standard_type,
)
from zync_assets.sinks.target import Column, LoadTable, Merge, Place, TableSpec, counted, load_names, named

OPTIONS = {
    "connect_timeout": "10",
    "options": "-c timezone=UTC -c intervalstyle=iso_8601 -c lock_timeout=10s",
    "application_name": "zync",
    "keepalives_idle": str(TCP_OPTIONS["TCP_KEEPIDLE"]),
    "keepalives_interval": str(TCP_OPTIONS["TCP_KEEPINTVL"]),
    "keepalives_count": str(TCP_OPTIONS["TCP_KEEPCNT"]),
    "tcp_user_timeout": str(TCP_OPTIONS["TCP_USER_TIMEOUT"]),
}
"""Options of a connection that the URL may set otherwise. Other sinks and steps wait as long as a statement does. A lock, or a
server that does not answer, is therefore an outage soon."""

_LOCK_SPACE = 0x7A796E63
"""The first number of the advisory locks of runs: ``zync`` in ASCII."""
_PASSING = ("08", "53", "57", "58", "40", "55P", "55006")
"""How SQLSTATEs of outages begin: connection, resources, operator, system, rollback by a deadlock, locks, object in use."""
_REFUSALS = ("21", "22", "23", "44", "P0", "54000", "54001")
"""How SQLSTATEs of refusals begin. In order: a trigger's subquery with several rows; data; integrity; WITH CHECK OPTION. Then a
trigger's own error; too long for an index; too deep."""
_SERVER_CLASS = re.compile("0[01238ABFLPZ]|10|2[0-8BDF]|34|3[89BDF]|4[024]|5[34578]|72|F0|HV|P0|XX")
"""The classes of PostgreSQL's own SQLSTATEs (appendix A of its manual). A trigger may raise an error with another class."""
_LOCKED = "55P03"
_UNREAD = ("42", "XX000")
"""SQLSTATEs of input functions that have no class of data, as those of ltree and hstore."""
_DENIED = ("42501", "3F000")  # a right is missing; no schema, or none of the search path that the role may use
_COPY_PLACE = re.compile(r"\s*CONTEXT: +COPY .*, line \d+$|COPY .*?, line \d+, (?=column )")
_QUESTION = re.compile(r"\s*Is the server running [^?]*\?")
_NO_CHARACTER = "22021"  # the SQLSTATE of a character that a text can't have
_DEFERRABLE = sa.text("SELECT conname FROM pg_constraint WHERE conrelid = to_regclass(:name) AND condeferrable")
_LOOSE = sa.text(
    "SELECT attname FROM pg_attribute JOIN pg_type t ON t.oid = atttypid LEFT JOIN pg_collation c ON c.oid = attcollation"
    " WHERE attrelid = to_regclass(:name) AND attname = ANY(:key)"
    " AND (t.typname IN ('citext', 'bpchar') OR NOT c.collisdeterministic)"
)
"""Constraints that ON CONFLICT does not take, and columns of a key that take texts for equal that differ."""

_locked_tables: set[tuple[str, str]] = set()
"""URL and name of each table whose last merge ended at a lock."""
_AGAIN_SECONDS = 1
"""The seconds that the next merge of such a table waits for the lock: other tables and steps wait meanwhile."""


class PostgresTarget(SqlTarget):
    """A database of a PostgreSQL server."""

    load_prefixes = ("UNLOGGED",)
    name_limit = 63, "bytes"
    odd_instants = re.compile(r"[+-]\d|.*\.\d{6}\d*[1-9]")
    _table: str | None = None
    """The table of the present call, for the cure of a missing right."""

    def make_engine(self) -> Engine:
        url = sa.make_url(self.url.replace("postgres://", "postgresql://", 1)).set(drivername="postgresql+psycopg")
        engine = sa.create_engine(url, poolclass=sa.pool.NullPool)

        @event.listens_for(engine, "do_connect")
        def connect(dialect: object, record: object, arguments: object, options: dict[str, Any]) -> None:
            options |= connect_options(url, os.environ)

        watch_server(engine, lambda connection: connection)
        names: Any = engine.dialect
        names.ischema_names = {**names.ischema_names, **NAMED_TYPES}
        return engine

    def prepare(self, spec: TableSpec, *, create: bool, evolve: Evolve) -> None:
        self._table = spec.name
        super().prepare(spec, create=create, evolve=evolve)

    def load(self, spec: TableSpec, name: str, rows: Iterator[pa.RecordBatch]) -> LoadTable:
        self._table = spec.name
        return super().load(spec, name, rows)

    def merge(self, merge: Merge) -> None:
        self._table, place = merge.spec.name, (self.url, merge.spec.name)
        try:
            super().merge(merge)
        except TableLocked:
            _locked_tables.add(place)
            raise
        _locked_tables.discard(place)

    @contextmanager
    def merging(self, merge: Merge) -> Generator[Connection]:
        with super().merging(merge) as connection:
            place = self.url, merge.spec.name
            if place in _locked_tables:
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{_AGAIN_SECONDS}s'")
            yield connection

    def cascades(self, connection: Connection, spec: TableSpec) -> Sequence[str]:
        return connection.execute(CASCADES, {"table": _sql_name(spec)}).scalars().all()

    def is_native(self, kind: pa.DataType) -> bool:
        if pa.types.is_list(kind):
            return not pa.types.is_nested(kind.value_type)
        return super().is_native(kind)

    def sort(self, error: exc.DBAPIError) -> type[SinkError]:
        state = getattr(error.orig, "sqlstate", None)
        if state is None:
            # The connection failed or broke. Otherwise, psycopg itself refuses no statement of this module.
            is_outage = isinstance(error, exc.OperationalError) and lasting_cure(error, self.engine().url) is None
            return TargetUnavailable if is_outage else SinkError
        if state == _LOCKED:
            return TableLocked
        if state.startswith(_PASSING) and lasting_cure(error, self.engine().url) is None:
            return TargetUnavailable
        is_refusal = state.startswith(_REFUSALS) or _SERVER_CLASS.match(state) is None or _is_unread(error)
        return TargetRefused if is_refusal else SinkError

    def error_text(self, error: exc.DBAPIError) -> str:
        """The message without the name and the line of a load table, the statement that met a lock, and libpq's question."""
        text = _QUESTION.sub("", super().error_text(error))
        return text.partition("\n")[0] if self.sort(error) is TableLocked else _COPY_PLACE.sub("", text)

    def error(self, error: exc.DBAPIError) -> SinkError:
        fault, cure = super().error(error), lasting_cure(error, self.engine().url)
        if getattr(error.orig, "sqlstate", None) in _DENIED:
            with suppress(exc.SQLAlchemyError), self.engine().connect() as connection:
                cure = missing_rights(connection, self._table)
        elif isinstance(fault, TargetRefused) and _is_unread(error):
            cure = "Give the column a type for texts, or make a text that its type reads with before: {set: ...}."
        elif isinstance(fault, TableLocked):
            with suppress(exc.SQLAlchemyError), self.engine().connect() as connection:
                cure = lock_holders(connection, self._table)
        return fault if cure is None else type(fault)(f"{str(fault).rstrip('.')}. {cure}")

    @contextmanager
    def run(self, place: Place) -> Generator[str]:
        number = secrets.randbelow(2**31)
        with self.errors(), self.engine().connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(sa.select(sa.func.pg_advisory_lock(_LOCK_SPACE, number)))
            for name in load_names(sa.inspect(connection).get_table_names(), place):
                owner = name.removeprefix(place.load_prefix).partition("_")[0]
                is_locked = connection.execute(
                    sa.select(sa.func.pg_try_advisory_lock(_LOCK_SPACE, int(owner, 16)))
                ).scalar()
                if is_locked:
                    sa.Table(name, sa.MetaData()).drop(connection, checkfirst=True)
                    connection.execute(sa.select(sa.func.pg_advisory_unlock(_LOCK_SPACE, int(owner, 16))))
            yield f"{place.load_prefix}{number:x}_"

    def column_type(self, column: Column, *, in_key: bool) -> SqlType:
        if pa.types.is_list(column.type) and not column.as_json:
            return ARRAY(standard_type(column.type.value_type))
        return JSONB() if column.as_json else super().column_type(column, in_key=in_key)

    def holds(self, existing: SqlType, column: Column) -> bool:
        kind, existing = column.type, base_type(existing)
        is_held = own_type_holds(existing, column)
        if is_held is not None:
            return is_held
        if column.as_json:
            return isinstance(existing, (sa.JSON, sa.Text))
        if is_local_times(kind) and isinstance(existing, ARRAY) and isinstance(existing.item_type, sa.DateTime):
            # Earlier versions made arrays of instants.
            return is_exact(existing.item_type)
        if pa.types.is_list(kind) and isinstance(existing, sa.JSON):
            return is_plain(kind.value_type)
        return super().holds(existing, column)

    def key_problem(self, connection: Connection, table: sa.Table, spec: TableSpec) -> str | None:
        if spec.mode == "insert":
            return None
        parameters = {"name": _identifier(table.schema, table.name).as_string(None)}
        unfit = connection.execute(_DEFERRABLE, parameters).scalars().all()
        loose = connection.execute(_LOOSE, {**parameters, "key": list(spec.key)}).scalars().all()
        ddl = [ColumnType(table.name, name, sa.Text(collation="C"), schema=table.schema) for name in loose]
        return missing_key(connection, table, spec.key, unfit) or loose_key(connection, loose, ddl)

    def load_type(self, existing: SqlType) -> SqlType:
        if isinstance(existing, ENUM):
            return ENUM(name=existing.name, schema=existing.schema, create_type=False)
        return existing

    def reflect(self, connection: Connection, name: str, schema: str | None) -> sa.Table:
        """Without keys, indexes and comments, whose queries take longer than a small batch."""
        with catch_warnings():
            # A column that no record names may have a type of an extension.
            simplefilter("ignore", exc.SAWarning)
            infos = sa.inspect(connection).get_columns(name, schema)
        columns = [
            sa.Column(item["name"], item["type"], *_generation(item), nullable=item["nullable"]) for item in infos
        ]
        return sa.Table(name, sa.MetaData(), *columns, schema=schema)

    def write(self, connection: Connection, table: sa.Table, rows: Iterator[pa.RecordBatch]) -> None:
        first_batch = next(rows, None)
        if first_batch is None:
            return
        names = first_batch.schema.names
        driver: Any = connection.connection.driver_connection
        json_names = {name for name in names if isinstance(table.c[name].type, sa.JSON)}
        # A line that is nothing but backslash and point would end the COPY.
        options = csv.WriteOptions(include_header=False, quoting_style="needed" if len(names) > 1 else "all_valid")
        columns = sql.SQL(", ").join(map(sql.Identifier, names))
        statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(
            _identifier(table.schema, table.name), columns
        )
        texts: list[pa.Array] = []
        try:
            # One COPY for all rows: the server reads a batch while the next one is made.
            with _dbapi_errors(connection), driver.cursor() as cursor, cursor.copy(statement) as copy:
                for batch in chain((first_batch,), rows):
                    values = [column_values(batch.column(name), table.c[name].type, name) for name in names]
                    texts = [
                        copied_text(part, as_json=name in json_names) for name, part in zip(names, values, strict=True)
                    ]
                    buffer = BytesIO()
                    csv.write_csv(pa.RecordBatch.from_arrays(texts, names=names), buffer, options)
                    copy.write(buffer.getbuffer())
        except exc.DBAPIError as error:
            # The server names no column here. A search for the refused record ends with a batch of this record alone.
            odd = [
                name for name, text in zip(names, texts, strict=False) if pc.any(pc.match_substring(text, "\0")).as_py()
            ]
            if getattr(error.orig, "sqlstate", None) == _NO_CHARACTER and odd:
                raise TargetRefused(
                    f"the column {odd[0]} has the character NUL (0x00), which PostgreSQL does not take"
                ) from None
            raise

    def _lock_positions(self, connection: Connection, merge: Merge) -> None:
        if merge.clear:
            # No statement sees the positions and rows of a first batch that is under way. The lock waits for each transaction
            # that has claimed positions, and blocks new transactions.
            connection.exec_driver_sql(f"LOCK TABLE {POSITIONS.name} IN EXCLUSIVE MODE")
        super()._lock_positions(connection, merge)

    # ---- a batch without load tables

    def appends(self, spec: TableSpec, *, whole: bool) -> bool:
        """COPY goes into tables that have neither rules nor policies of rows."""
        if spec.mode != "insert":
            return False
        table = _sql_name(spec)
        classes = sa.table("pg_class", *map(sa.column, ("oid", "relkind", "relrowsecurity", "relhasrules")))
        query = sa.select(classes.c.oid).where(
            classes.c.oid == sa.func.to_regclass(table),
            classes.c.relkind.in_(["r", "p"]),
            ~classes.c.relrowsecurity,
            ~classes.c.relhasrules,
        )
        with self.connection() as connection:
            return connection.execute(query).first() is not None

    def append(self, merge: Merge, rows: Iterator[pa.RecordBatch]) -> int:
        self._table = merge.spec.name
        with self.connection() as connection:
            # Another run of the same place waits here, and finds then that the positions have moved.
            self._lock_positions(connection, merge)
            self._advance_positions(connection, merge)
            counts: list[int] = []
            names = [column.name for column in merge.spec.columns]
            self.write(
                connection,
                self._reflect_table(connection, merge.spec),
                (batch.select(names) for batch in counted(rows, counts)),
            )
            crash_point("sink:loaded")
            crash_point("sink:merging")
        crash_point("sink:merged")
        return sum(counts)

    def upserts(
        self, table: sa.Table, rows: sa.Select[Any], key: Sequence[str], others: Sequence[str]
    ) -> Sequence[sa.Executable]:
        return [on_conflict(insert(table).from_select([*key, *others], rows), key, others)]

    def read_column(self, table: sa.Table, column: Column) -> sa.ColumnElement[Any]:
        """As the text that the server writes, where the driver has its own form. An hstore as the JSON of Debezium."""
        found = super().read_column(table, column)
        kind = base_type(found.type)
        if isinstance(kind, HSTORE) and (column.note == DEBEZIUM_JSON or column.as_json):
            return sa.cast(sa.func.hstore_to_json(found), sa.Text)
        is_texts = pa.types.is_list(column.type) and pa.types.is_string(column.type.value_type)
        if isinstance(kind, ARRAY) and is_texts and not isinstance(kind.item_type, sa.CHAR):
            return sa.cast(found, ARRAY(sa.Text))
        is_as_text = (
            isinstance(kind, (AbstractRange, INTERVAL, NamedType))
            # The driver has no infinity, and no year before 1 or after 9999.
            or column.note == ZONED_TIMESTAMP
            or (isinstance(kind, sa.Time) and kind.timezone)
            # The driver reads JSON: of the text "x", quotes included, it would give x.
            or (isinstance(kind, sa.JSON) and pa.types.is_string(column.type))
        )
        return sa.cast(found, sa.Text) if is_as_text else found

    def value(self, column: Column, value: Any) -> Any:
        value = read_value(value, column)
        if isinstance(value, dict) or (isinstance(value, list) and not pa.types.is_list(column.type)) or column.as_json:
            return value if value is None or isinstance(value, str) else json.dumps(value)
        if isinstance(value, list) and pa.types.is_string(column.type.value_type):
            return [None if item is None else str(item) for item in value]
        return super().value(column, value)


def _generation(column: ReflectedColumn) -> list[sa.Computed | sa.Identity]:
    """A mark, without its expression, of a column that the database generates."""
    identity: list[sa.Computed | sa.Identity] = [sa.Identity(always=True)]
    return [sa.Computed("")] if "computed" in column else identity if column.get("identity", {}).get("always") else []


def connect_options(url: sa.URL, environment: Mapping[str, str]) -> dict[str, str]:
    """The options of a connection beside those of the URL. ``environment``: libpq reads variables such as PGSSLMODE.

    >>> connect_options(sa.make_url("postgresql://u@db.example/shop?sslrootcert=ca.pem"), {})["sslmode"]
    'verify-full'
    """
    options = dict(OPTIONS)
    names = [url.host, url.query.get("host"), url.query.get("hostaddr")]
    hosts = [
        host
        for item in names
        if item
        for texts in ([item] if isinstance(item, str) else item)
        for host in texts.split(",")
    ]
    hosts = hosts or (environment.get("PGHOST") or environment.get("PGHOSTADDR") or "").split(",")
    # A service file sets all options itself.
    is_chosen = "sslmode" in url.query or {"PGSSLMODE", "PGSERVICE"} & environment.keys() or "service" in url.query
    if not is_chosen and not all(map(_is_local, hosts)):
        options["sslmode"] = "verify-full"
        if "PGSSLROOTCERT" not in environment:
            # Not `system`: the OpenSSL of psycopg's wheels looks for certificates where no system has them.
            options["sslrootcert"] = ssl.get_default_verify_paths().cafile or "system"
    return {name: value for name, value in options.items() if name not in url.query}


def _is_local(host: str) -> bool:
    """Whether a host of a connection is this machine: a socket's folder, or a name or an address of the loopback."""
    name = host.partition("]")[0].strip("[") if host.startswith("[") else host
    return (
        name in ("", "localhost", "::1") or name.startswith(("127.", "/", "@")) or name.partition(":")[0] == "localhost"
    )


def _identifier(schema: str | None, name: str) -> sql.Identifier:
    """The name of a table. SQLAlchemy would double each percent sign, as for a statement with parameters."""
    return sql.Identifier(*([schema] if schema else []), name)


def _sql_name(spec: TableSpec) -> str:
    name, schema = named(spec)
    return _identifier(schema, name).as_string(None)


@contextmanager
def _dbapi_errors(connection: Connection) -> Generator[None]:
    """Errors of psycopg as SQLAlchemy raises them."""
    try:
        yield
    except psycopg.Error as error:
        dialect: Any = connection.dialect
        raise exc.DBAPIError.instance(None, None, error, psycopg.Error, dialect=dialect) from error


def _is_unread(error: exc.DBAPIError) -> bool:
    """Whether the input function of a column's type, such as hstore or ltree, did not understand a text of a COPY."""
    context = getattr(getattr(error.orig, "diag", None), "context", None) or ""
    return getattr(error.orig, "sqlstate", "").startswith(_UNREAD) and bool(re.match(r"COPY .*, column ", context))
