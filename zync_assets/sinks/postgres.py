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
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
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
from sqlalchemy.dialects.postgresql import ARRAY, DOMAIN, ENUM, JSONB, MONEY, TSVECTOR, dialect, insert
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine.interfaces import ReflectedColumn

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.fields import ZONED_TIMESTAMP
from zync_assets.crashes import crash_point
from zync_assets.errors import SinkError, TargetRefused, TargetUnavailable
from zync_assets.pipeline import Evolve
from zync_assets.sinks.sql import SqlTarget
from zync_assets.sinks.sql_types import (
    POSITIONS,
    QUARANTINE,
    SqlType,
    is_exact,
    loose_key,
    missing_key,
    on_conflict,
    standard_type,
    with_single_percents,
)
from zync_assets.sinks.target import Column, LoadTable, Merge, Place, TableSpec, counted, load_names, named

OPTIONS = {
    "connect_timeout": "10",
    "options": "-c timezone=UTC -c lock_timeout=10s",
    "application_name": "zync",
    **{f"keepalives_{name}": number for name, number in (("idle", "30"), ("interval", "10"), ("count", "3"))},
}
"""Options of a connection that the URL may set otherwise. Other sinks and steps wait as long as a statement does. A lock, or a
server that does not answer, is therefore an outage soon."""

_LOCK_SPACE = 0x7A796E63
"""The first number of the advisory locks of runs: ``zync`` in ASCII."""
_PASSING = ("08", "53", "57", "58", "40", "55P", "55006")
"""How SQLSTATEs of outages begin: connection, resources, operator, system, rollback by a deadlock, locks, object in use."""
_REFUSALS = ("22", "23", "44", "P0")
"""Classes of SQLSTATE: data, integrity, WITH CHECK OPTION, an error of a trigger."""
_DENIED = ("42501", "3F000")  # a right is missing; no schema, or none of the search path that the role may use
_LOGIN_ERRORS: Mapping[str, str] = {
    "certificate verify failed": "Name the file of its CA in the url, ?sslrootcert=FILE; sslmode=require would trust any server.",
    "server does not support SSL": "Turn TLS on at the server. In a network that you trust, write ?sslmode=disable in the url.",
    "does not match host name": "Write the host's name as the server's certificate has it in the url.",
    "password authentication failed": "Correct the user or the password in the url.",
    "no pg_hba.conf entry": "Let the server's pg_hba.conf take this host, user and database.",
    "does not exist": "Correct the url, or create it.",
    r"invalid (integer value|\S+ value:)": "Correct the option in the url, or its variable such as PGSSLMODE.",
}
"""Texts of failed logins that no waiting cures → the cure. A failed login has no SQLSTATE."""
_STATEMENT_ERRORS: Mapping[str, str] = {
    "statement timeout": "A batch takes longer than statement_timeout allows: raise it for the role, ALTER ROLE ... SET.",
    "in a read-only transaction": "The server is a standby, or set to read only: write the primary's address in the url.",
}
"""Texts of failed statements that no waiting cures → the cure."""
_COPY_PLACE = re.compile(r"\s*CONTEXT: +COPY .*, line \d+$|COPY .*?, line \d+, (?=column )")
_NO_CHARACTER = "22021"  # the SQLSTATE of a character that a text can't have
_DEFERRABLE = sa.text("SELECT conname FROM pg_constraint WHERE conrelid = to_regclass(:name) AND condeferrable")
_LOOSE = sa.text(
    "SELECT attname FROM pg_attribute JOIN pg_type t ON t.oid = atttypid LEFT JOIN pg_collation c ON c.oid = attcollation"
    " WHERE attrelid = to_regclass(:name) AND attname = ANY(:key)"
    " AND (t.typname IN ('citext', 'bpchar') OR NOT c.collisdeterministic)"
)
"""Constraints that ON CONFLICT does not take, and columns of a key that take texts for equal that differ."""
_TABLE_RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE")


class PostgresTarget(SqlTarget):
    """A database of a PostgreSQL server."""

    load_prefixes = ("UNLOGGED",)
    name_limit = 63, "bytes"
    _table: str | None = None
    """The table of the present call, for the cure of a missing right."""

    def make_engine(self) -> Engine:
        url = sa.make_url(self.url.replace("postgres://", "postgresql://", 1)).set(drivername="postgresql+psycopg")
        engine = sa.create_engine(url, poolclass=sa.pool.NullPool)

        @event.listens_for(engine, "do_connect")
        def connect(dialect: object, record: object, arguments: object, options: dict[str, Any]) -> None:
            options |= connect_options(url, os.environ)

        return engine

    def prepare(self, spec: TableSpec, *, create: bool, evolve: Evolve) -> None:
        self._table = spec.name
        super().prepare(spec, create=create, evolve=evolve)

    def load(self, spec: TableSpec, name: str, rows: Iterator[pa.RecordBatch]) -> LoadTable:
        self._table = spec.name
        return super().load(spec, name, rows)

    def merge(self, merge: Merge) -> None:
        self._table = merge.spec.name
        super().merge(merge)

    def is_native(self, kind: pa.DataType) -> bool:
        if pa.types.is_list(kind):
            return not pa.types.is_nested(kind.value_type)
        return super().is_native(kind)

    def sort(self, error: exc.DBAPIError) -> type[SinkError]:
        state = getattr(error.orig, "sqlstate", None)
        if state is None:
            # The connection failed or broke. Otherwise, psycopg itself refuses no statement of this module.
            is_outage = isinstance(error, exc.OperationalError) and _cure(error, self.engine().url) is None
            return TargetUnavailable if is_outage else SinkError
        if state.startswith(_PASSING) and _cure(error, self.engine().url) is None:
            return TargetUnavailable
        return TargetRefused if state[:2] in _REFUSALS else SinkError

    def error_text(self, error: exc.DBAPIError) -> str:
        """The message without the name and the line of a load table."""
        return _COPY_PLACE.sub("", super().error_text(error))

    def error(self, error: exc.DBAPIError) -> SinkError:
        fault, cure = super().error(error), _cure(error, self.engine().url)
        if getattr(error.orig, "sqlstate", None) in _DENIED:
            with suppress(exc.SQLAlchemyError), self.engine().connect() as connection:
                cure = missing_rights(connection, self._table)
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
        return JSONB() if column.as_json else standard_type(column.type)

    def holds(self, existing: SqlType, column: Column) -> bool:
        kind, existing = column.type, existing.data_type if isinstance(existing, DOMAIN) else existing
        if column.as_json:
            return isinstance(existing, (sa.JSON, sa.Text))
        if pa.types.is_list(kind) and isinstance(existing, sa.JSON):
            return _is_plain(kind.value_type)
        if column.note == ZONED_TIMESTAMP and isinstance(existing, sa.DateTime):
            return bool(existing.timezone) and is_exact(existing)
        # A money has two digits after the point, a tsvector sorts words, and the types name and "char" cut texts. A char(n) adds
        # spaces, and ignores those at the end.
        is_cut = isinstance(existing, (MONEY, TSVECTOR, sa.CHAR, sa.types.NullType)) or type(existing) is sa.String
        return not is_cut and super().holds(existing, column)

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
                    texts = [_text(batch.column(name), as_json=name in json_names) for name in names]
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
        name, schema = named(spec)
        table = _identifier(schema, name).as_string(None)
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

    def value(self, column: Column, value: Any) -> Any:
        if isinstance(value, dict) or (isinstance(value, list) and not pa.types.is_list(column.type)) or column.as_json:
            return value if value is None or isinstance(value, str) else json.dumps(value)
        if isinstance(value, list) and pa.types.is_string(column.type.value_type):
            return [None if item is None else str(item) for item in value]
        return super().value(column, value)


def _generation(column: ReflectedColumn) -> list[sa.Computed]:
    """A mark, without its expression, of a column that the database generates."""
    return [sa.Computed("")] if "computed" in column or column.get("identity", {}).get("always") else []


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


def _cure(error: exc.DBAPIError, url: sa.URL) -> str | None:
    """The cure of a login or a statement that failed for good; None for an outage, and for an error without such a cure."""
    text = str(error.orig)
    if getattr(error.orig, "sqlstate", None) is not None:
        return next((cure for words, cure in _STATEMENT_ERRORS.items() if words in text), None)
    if "permission denied for database" in text:
        names = dialect()
        quote = names.identifier_preparer.quote
        grant = f"GRANT CONNECT ON DATABASE {quote(url.database or '')} TO {quote(url.username or '')};"
        return f"Run:\n{with_single_percents(grant, names)}"
    return next((cure for words, cure in _LOGIN_ERRORS.items() if re.search(words, text)), None)


def missing_rights(connection: Connection, table: str | None) -> str:
    """The statements that make the table's schema, and grant the role of a connection what a sink needs and the role lacks.

    ``table``: the target table as the pipeline file names it, None if no table was in use.
    """
    quote = connection.dialect.identifier_preparer.quote
    role, current_schema = connection.execute(sa.select(sa.func.current_user(), sa.func.current_schema())).one()
    own_schema = current_schema or "public"  # a schema that the role may not use is not current
    schema, _, name = (table or "").rpartition(".")
    needs = [("SCHEMA", quote(own_schema), ["USAGE", "CREATE"], sa.func.has_schema_privilege, own_schema)]
    classes = sa.table("pg_class", *map(sa.column, ("oid", "relname", "relnamespace")))
    spaces = sa.table("pg_namespace", *map(sa.column, ("oid", "nspname")))
    own_places = [(own_schema, POSITIONS.name), (own_schema, QUARANTINE.name)]
    places = [*own_places, *([(schema or own_schema, name)] if name else [])]
    is_there = False
    for place in places:
        table_id = connection.execute(
            sa.select(classes.c.oid)
            .join_from(classes, spaces, classes.c.relnamespace == spaces.c.oid)
            .where(spaces.c.nspname == place[0], classes.c.relname == place[1])
        ).scalar()
        is_there = table_id is not None
        if is_there:
            text = ".".join(map(quote, place))
            needs.append(("TABLE", text, list(_TABLE_RIGHTS), sa.func.has_table_privilege, table_id))
    lines: list[str] = []
    if schema:
        if connection.execute(sa.select(spaces.c.oid).where(spaces.c.nspname == schema)).first() is None:
            lines.append(f"CREATE SCHEMA {quote(schema)};")
        else:
            # The sink makes a table that is missing.
            rights = ["USAGE"] if is_there else ["USAGE", "CREATE"]
            needs.insert(1, ("SCHEMA", quote(schema), rights, sa.func.has_schema_privilege, schema))
    for kind, text, rights, has_right, subject in needs:
        lacks = [right for right in rights if not connection.execute(sa.select(has_right(subject, right))).scalar()]
        if lacks:
            lines.append(f"GRANT {', '.join(lacks)} ON {kind} {text} TO {quote(role)};")
    if not lines:
        return f"Only the owner may do so. Run what the table needs as its owner, or make {quote(role)} its owner."
    return "Run:\n" + with_single_percents("\n".join(lines), connection.dialect)


def _identifier(schema: str | None, name: str) -> sql.Identifier:
    """The name of a table. SQLAlchemy would double each percent sign, as for a statement with parameters."""
    return sql.Identifier(*([schema] if schema else []), name)


@contextmanager
def _dbapi_errors(connection: Connection) -> Generator[None]:
    """Errors of psycopg as SQLAlchemy raises them."""
    try:
        yield
    except psycopg.Error as error:
        dialect: Any = connection.dialect
        raise exc.DBAPIError.instance(None, None, error, psycopg.Error, dialect=dialect) from error


def _is_plain(kind: pa.DataType) -> bool:
    """Whether values of a type are written alike in Python's JSON and in the lake's."""
    kinds = pa.types
    return kinds.is_string(kind) or kinds.is_boolean(kind) or kinds.is_integer(kind)


def _text(column: pa.Array, *, as_json: bool = False) -> pa.Array:
    """The values as PostgreSQL reads them in a CSV field. An empty text differs from a null: Arrow puts it in quotes.
    ``as_json``: lists are JSON, and no array literals."""
    kinds, kind = pa.types, column.type
    if kinds.is_string(kind) or kinds.is_large_string(kind):
        return column
    if kinds.is_binary(kind) or kinds.is_large_binary(kind):
        return _mapped_texts(column, lambda value: "\\x" + value.hex())
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        return _mapped_texts(column, json.dumps) if as_json else _arrays(column)
    if kinds.is_timestamp(kind) and kind.tz is not None:
        return pc.binary_join_element_wise(column.cast(pa.timestamp("us")).cast(pa.string()), "+00", "")
    return column.cast(pa.string())


def _mapped_texts(column: pa.Array, change: Callable[[Any], str]) -> pa.Array:
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
