"""The target Databend, through its dialect of SQLAlchemy and the connections of ``sinks.databend_engine``.

A transaction of Databend spans tables and is atomic. It pins a table when it first writes to the table, and its COMMIT fails
if another one has committed a change of a pinned table in the meantime. The merge therefore begins with a mark in the table of
positions, and compares the positions after that. DDL commits implicitly, and is never part of a merge. A statement that fails
does not end the transaction: the merge rolls back.

There are no unique keys. Only MERGE on the key keeps a key in one row, and two merges of a table can't both commit.

A dead run's load tables are known by their names (``process_mark``).
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from databend_sqlalchemy import connector
from databend_sqlalchemy import types as databend_types
from databend_sqlalchemy.databend_dialect import DatabendDialect, DatabendExecutionContext, DatabendIdentifierPreparer
from databend_sqlalchemy.dml import Merge as MergeInto
from pyarrow import parquet
from sqlalchemy import exc
from sqlalchemy.dialects import registry
from sqlalchemy.engine import Connection, Engine

from zync_assets.codecs.fields import DEBEZIUM_DATE
from zync_assets.errors import CommitConflict, SinkError, TableUnfit, TargetRefused, TargetUnavailable
from zync_assets.sinks.databend_engine import BUSY, EngineSession, ServerSession
from zync_assets.sinks.databend_engine import Connection as DatabendConnection
from zync_assets.sinks.fold import DELETE, OP, REPLACE, SET, UPDATE, inserted_names
from zync_assets.sinks.sql import SqlTarget
from zync_assets.sinks.sql_types import BOOK, POSITIONS, SqlType, check_load, fitting, holds, place_values, wider
from zync_assets.sinks.target import (
    LOCAL_HOSTS,
    Column,
    LoadTable,
    Merge,
    TableSpec,
    gathered,
    tls_fault,
)

SCHEME = "databend://"

LOAD_BYTES = 64 << 20
"""The rows of one COPY into a load table: each makes a snapshot of the table."""

_MARK = -1
"""The partition of the row that pins the positions."""

# https://github.com/databendlabs/databend/blob/main/src/common/exception/src/exception_code.rs
_CODE = re.compile(r"Code: (\d+)|\[(\d{4})\]")
_CONFLICTS = {2009, 2011, 2014}
_PASSING = {1035, 1036, 1037, 1038, 1041, 1042, 1043, 1044, 1053, 1122, 1127, 2001, 2003, 2015, 2016, 2317, 2404, 2411}
"""Connections, sessions and queries that ended, timeouts, the meta service, locks, memory."""
_REFUSALS = {1006, 1007, 1010, 1046, 1049, 1060, 1079, 1080, 1133, 1202, 2513}
"""Values that can't be converted, nulls, constraints."""
_OUTAGES = re.compile(
    rf"error sending request|connect|timed out|timeout|embedded engine has ended|{BUSY}", re.IGNORECASE
)
_LOGINS = re.compile(r"unauthori|authenti|password|certificate", re.IGNORECASE)


class Variant(sa.types.UserDefinedType[str]):
    """A column of the type VARIANT, read as a text."""

    cache_ok = True

    def get_col_spec(self, **kw: Any) -> str:
        return "VARIANT"

    def column_expression(self, colexpr: Any) -> Any:
        return sa.func.to_string(colexpr, type_=self)


class Other(sa.types.UserDefinedType[Any]):
    """A column of a type that holds no value of ours, such as ARRAY."""

    cache_ok = True

    def __init__(self, name: str = "NULL") -> None:
        self.name = name

    def get_col_spec(self, **kw: Any) -> str:
        return self.name


_TYPES: dict[str, SqlType] = {
    "boolean": sa.BOOLEAN(),
    "int8": databend_types.TINYINT(),
    "int16": sa.SMALLINT(),
    "int32": sa.INTEGER(),
    "int64": sa.BIGINT(),
    "float32": databend_types.FLOAT(),
    "float64": databend_types.DOUBLE(),
    "string": sa.VARCHAR(),
    "binary": sa.BINARY(),
    "date": sa.DATE(),
    "timestamp": sa.TIMESTAMP(),
    "variant": Variant(),
}
"""The name of a type in ``information_schema`` → the type."""
_DECIMAL = re.compile(r"decimal\((\d+), ?(\d+)\)")
_BITS: tuple[tuple[type[SqlType], int], ...] = (
    (databend_types.TINYINT, 8),
    (sa.SMALLINT, 16),
    (sa.BIGINT, 64),
    (sa.INTEGER, 32),
)


class _Context(DatabendExecutionContext):
    """The dialect's, which asks for a number of rows that nobody uses here."""

    def post_exec(self) -> None:
        pass


class _Preparer(DatabendIdentifierPreparer):
    """Quotes every name: the dialect does not know all reserved words."""

    def _requires_quotes(self, value: str) -> bool:
        return True


class Dialect(DatabendDialect):
    """The dialect, with types that tell FLOAT from DOUBLE, and decimals with all digits."""

    preparer = _Preparer
    execution_ctx_cls = _Context
    supports_native_decimal = True
    supports_comments = True
    inline_comments = True
    supports_statement_cache = False

    @classmethod
    def import_dbapi(cls) -> Any:
        return connector

    def get_pk_constraint(self, connection: Any, table_name: str, schema: str | None = None, **kw: Any) -> Any:
        return {"constrained_columns": [], "name": None}

    def get_table_options(self, connection: Any, table_name: str, schema: str | None = None, **kw: Any) -> Any:
        return {}

    def get_multi_table_comment(
        self, connection: Any, schema: Any, filter_names: Any, scope: Any, kind: Any, **kw: Any
    ) -> Any:
        return {}

    def _get_column_type(self, column_type: Any) -> Any:
        name = column_type.lower()
        if name.startswith("nullable("):
            name = name.removeprefix("nullable(")[:-1]
        digits = _DECIMAL.fullmatch(name)
        return sa.DECIMAL(int(digits[1]), int(digits[2])) if digits else _TYPES.get(name) or Other(name.upper())


registry.register("zyncdatabend", __name__, "Dialect")


class DatabendTarget(SqlTarget):
    """A database of a server, ``databend://user:password@host/database``, or a folder of the embedded engine,
    ``databend:///folder``."""

    load_prefixes = ("TRANSIENT",)

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.is_embedded = url.startswith(f"{SCHEME}/")
        self.tasks = 1 if self.is_embedded else super().tasks

    def make_engine(self) -> Engine:
        return sa.create_engine("zyncdatabend://", poolclass=sa.pool.NullPool, creator=self._connect)

    def _connect(self) -> DatabendConnection:
        from databend_sqlalchemy.errors import Error

        try:
            if self.is_embedded:
                return DatabendConnection(EngineSession(Path(self.url.removeprefix(SCHEME))))
            session = ServerSession(_dsn(self.url))
            session.run("SET timezone = 'UTC'")
            return DatabendConnection(session)
        except ImportError:
            raise
        except Exception as error:  # the driver and the engine have no class of errors in common
            raise Error(str(error)) from error

    def create_book(self, connection: Connection) -> None:
        for table in BOOK.sorted_tables:
            connection.execute(sa.schema.CreateTable(table, if_not_exists=True))

    # ---- errors

    def sort(self, error: exc.DBAPIError) -> type[SinkError]:
        text = str(error.orig)
        code = _code(text)
        if code in _REFUSALS or "unable to cast `NULL`" in text:
            return TargetRefused
        if code in _PASSING:
            return TargetUnavailable
        is_outage = not code and _OUTAGES.search(text) and not _LOGINS.search(text)
        return TargetUnavailable if is_outage else SinkError

    def error(self, error: exc.DBAPIError) -> SinkError:
        fault = super().error(error)
        # The dialect's class of errors says that it has no code.
        return tls_fault(type(fault)(str(fault).replace("Code: None. ", "")), "tls_ca_file", "sslmode=disable")

    # ---- load tables

    def load_table(self, table: sa.Table, spec: TableSpec, name: str, schema: str | None) -> sa.Table:
        """The load table has the source's types. The merge converts the values, and refuses a value that does not fit."""
        columns = [sa.Column(item.name, self.column_type(item, in_key=False)) for item in spec.columns]
        marks = [sa.Column(OP, sa.VARCHAR()), sa.Column(SET, sa.VARCHAR())] if spec.mode == "upsert" else []
        return sa.Table(name, sa.MetaData(), *columns, *marks, prefixes=list(self.load_prefixes))

    def write(self, connection: Connection, table: sa.Table, rows: Iterator[pa.RecordBatch]) -> None:
        quote = connection.dialect.identifier_preparer
        driver: Any = connection.connection.driver_connection
        with TemporaryDirectory() as folder:
            for number, batch in enumerate(gathered(rows, LOAD_BYTES)):
                names = batch.schema.names
                arrays = [fitting(batch.column(name), table.c[name].type, name) for name in names]
                path = Path(folder) / f"{table.name}-{number}.parquet"
                parquet.write_table(pa.Table.from_arrays([_stored_values(values) for values in arrays], names), path)
                columns = ", ".join(quote.quote_identifier(name) for name in names)
                try:
                    driver.session.load(quote.quote_identifier(table.name), columns, path)
                except Exception as error:  # as in _connect
                    raise exc.DBAPIError(None, None, error) from error
                path.unlink()

    # ---- the merge

    @contextmanager
    def merging(self, merge: Merge) -> Generator[Connection]:
        with self.errors(), self.engine().connect() as connection:
            connection.exec_driver_sql("BEGIN")
            try:
                yield connection
                connection.exec_driver_sql("COMMIT")
            except BaseException as error:
                with suppress(exc.DBAPIError):
                    connection.exec_driver_sql("ROLLBACK")
                if isinstance(error, exc.DBAPIError) and _code(str(error.orig)) in _CONFLICTS:
                    raise CommitConflict("another transaction changed the same tables of Databend; run again") from None
                raise

    def lock(self, query: sa.Select[Any]) -> sa.Select[Any]:
        return query

    def delete(self, connection: Connection, table: sa.Table, *where: sa.ColumnElement[bool]) -> None:
        # The embedded engine may end a DELETE that finds no row with "entered unreachable code", again and again.
        query = sa.select(sa.literal(1)).select_from(table).where(*where).limit(1)
        if connection.execute(query).first() is not None:
            super().delete(connection, table, *where)

    def _lock_positions(self, connection: Connection, merge: Merge) -> None:
        mark = {"partition": _MARK, "next": 0, "origin": merge.origin}
        connection.execute(sa.insert(POSITIONS).values(**place_values(merge.place), **mark))
        super()._lock_positions(connection, merge)

    def _advance_positions(self, connection: Connection, merge: Merge) -> None:
        super()._advance_positions(connection, merge)
        self.delete(connection, POSITIONS, POSITIONS.c.partition == _MARK)

    def _apply(self, connection: Connection, table: sa.Table, spec: TableSpec, load: LoadTable, number: int) -> None:
        rows = self.load_table(table, spec, load.name, None)
        check_load(connection, rows, load)
        names = [column.name for column in spec.columns]
        if spec.mode == "insert":
            query = sa.select(*(_converted_column(rows, table, name) for name in names))
            connection.execute(sa.insert(table).from_select(names, query))
            return
        if load.removes:
            deleted_keys = sa.select(*(rows.c[name] for name in spec.key)).where(rows.c[OP].in_([DELETE, REPLACE]))
            statement, _ = self._merge_into(table, deleted_keys, spec.key)
            statement.when_matched_then_delete()
            connection.execute(statement)
        other_names = [column.name for column in spec.others]
        blanks = [item.name for item in spec.others if item.default is not None and table.c[item.name].nullable]
        shapes: set[tuple[str | None, bool]] = {(None, False)}
        if load.partial:
            partial = sa.select(rows.c[SET], rows.c[OP]).where(rows.c[SET].is_not(None), rows.c[OP] != DELETE)
            shapes |= {(row[0], row[1] == UPDATE) for row in connection.execute(partial.distinct())}
        for shape, is_update in sorted(shapes, key=str):
            # A record that leaves columns out is written by the columns that it has. A new row gets the others' defaults.
            marks = dict(zip(other_names, shape or "1" * len(other_names), strict=True))
            set_names = [name for name, mark in marks.items() if mark in "12"]
            insert_names = None if is_update else inserted_names(other_names, "".join(marks.values()), blanks)
            query = sa.select(*(_converted_column(rows, table, name) for name in (*spec.key, *other_names)))
            of_shape = rows.c[SET].is_(None) if shape is None else rows.c[SET] == shape
            of_op = rows.c[OP] == UPDATE if is_update else rows.c[OP].not_in([UPDATE, DELETE])
            query = query.where(of_op, of_shape)
            if set_names or not is_update:
                connection.execute(self._changes(table, query, spec.key, set_names, insert_names))

    def upserts(
        self, table: sa.Table, rows: sa.Select[Any], key: Sequence[str], others: Sequence[str]
    ) -> Sequence[sa.Executable]:
        return [self._changes(table, rows, key, others, others)]

    def _changes(
        self,
        table: sa.Table,
        rows: sa.Select[Any],
        key: Sequence[str],
        others: Sequence[str],
        insert_names: Sequence[str] | None,
    ) -> sa.Executable:
        """The statement that updates rows that exist. ``insert_names``: the columns of rows to insert; None: it inserts none."""
        statement, changes = self._merge_into(table, rows, key)
        if others:
            statement.when_matched_then_update().set = {name: changes.c[name] for name in others}
        if insert_names is None:
            return statement
        quote = self.engine().dialect.identifier_preparer.quote_identifier
        statement.when_not_matched_then_insert().set = {quote(name): changes.c[name] for name in (*key, *insert_names)}
        return statement

    def _merge_into(self, table: sa.Table, rows: sa.Select[Any], key: Sequence[str]) -> tuple[Any, sa.Subquery]:
        """A MERGE of rows, without its clauses, and the rows."""
        changes = rows.subquery("changes")
        return MergeInto(table, changes, sa.and_(*(table.c[name] == changes.c[name] for name in key))), changes

    # ---- tables

    def key_problem(self, connection: Connection, table: sa.Table, spec: TableSpec) -> str | None:
        """Databend has no unique keys."""
        return None

    def column_type(self, column: Column, *, in_key: bool) -> SqlType:
        kinds, kind = pa.types, column.type
        if column.as_json or kinds.is_time(kind):
            return sa.VARCHAR()
        if kinds.is_decimal(kind):
            return sa.DECIMAL(kind.precision, kind.scale)
        if kinds.is_timestamp(kind):
            return sa.TIMESTAMP()
        if kinds.is_binary(kind) or kinds.is_large_binary(kind):
            return sa.BINARY()
        if kinds.is_floating(kind):
            return databend_types.DOUBLE() if kinds.is_float64(kind) else databend_types.FLOAT()
        if kinds.is_date(kind) or (column.note == DEBEZIUM_DATE and kinds.is_integer(kind)):
            return sa.DATE()
        if kinds.is_integer(kind):
            return next(of for of, bits in _BITS if bits == kind.bit_width)()
        return sa.BOOLEAN() if kinds.is_boolean(kind) else sa.VARCHAR()

    def default(self, column: Column, kind: SqlType) -> Any:
        text = super().default(column, kind)
        if text is not None and "'" in text:
            # Databend keeps the DEFAULT as SQL, and can't parse it again.
            raise TableUnfit(
                f"column {column.name} is missing, and Databend takes no DEFAULT with a quote. Add the column as a"
                f" {kind}, and set it to {text} in all rows."
            )
        if text is None or pa.types.is_string(column.type):
            return text and text.replace("\\", "\\\\")
        return text.removesuffix("Z")

    def holds(self, existing: SqlType, column: Column) -> bool:
        kinds, kind = pa.types, column.type
        if kinds.is_time(kind):
            return isinstance(existing, sa.VARCHAR)
        if column.as_json or kinds.is_string(kind) or kinds.is_large_string(kind):
            return isinstance(existing, (sa.VARCHAR, Variant))
        if kinds.is_integer(kind) and (bits := _bits(existing)):
            return kind.bit_width <= bits
        if kinds.is_floating(kind):
            single = kinds.is_float32(kind) and isinstance(existing, databend_types.FLOAT)
            return single or isinstance(existing, databend_types.DOUBLE)
        if kinds.is_timestamp(kind):
            # A time without zone is kept as if it were in UTC.
            return isinstance(existing, sa.TIMESTAMP)
        if kinds.is_binary(kind) or kinds.is_large_binary(kind):
            return isinstance(existing, sa.BINARY)
        return (column.note == DEBEZIUM_DATE and isinstance(existing, sa.DATE)) or holds(existing, kind)

    def wider(self, existing: SqlType, column: Column) -> SqlType | None:
        kinds, kind = pa.types, column.type
        if _bits(existing) and kinds.is_integer(kind):
            return next(of for of, bits in _BITS if bits == kind.bit_width)()
        if isinstance(existing, databend_types.FLOAT) and kinds.is_floating(kind):
            return databend_types.DOUBLE()
        larger = wider(existing, kind) if isinstance(existing, sa.DECIMAL) else None
        if not isinstance(larger, sa.Numeric) or (larger.precision or 0) > 76:
            return None
        return sa.DECIMAL(larger.precision, larger.scale)

    def widening(self, table: sa.Table, name: str, larger: SqlType) -> Any:
        quote, column = self.engine().dialect.identifier_preparer, table.c[name]
        kind = larger.compile(self.engine().dialect)
        null = "NULL" if column.nullable else "NOT NULL"
        text = f"ALTER TABLE {quote.format_table(table)} MODIFY COLUMN {quote.quote(name)} {kind} {null}"
        return sa.DDL(text.replace("%", "%%"))

    def value(self, column: Column, value: Any) -> Any:
        if pa.types.is_time(column.type) and value is not None:
            return time.fromisoformat(value)
        return super().value(column, value)


def _dsn(url: str) -> str:
    """The URL as the driver takes it. A server on another host is asked over TLS. The sink repeats what fails, not the driver."""
    address = sa.make_url(url)
    options = {"retry_count": "1"}
    if (address.host or "") in LOCAL_HOSTS:
        options["sslmode"] = "disable"
    address = address.update_query_dict({name: value for name, value in options.items() if name not in address.query})
    return address.render_as_string(hide_password=False)


def _code(text: str) -> int:
    match = _CODE.search(text)
    return int(match[1] or match[2]) if match else 0


def _bits(existing: SqlType) -> int:
    return next((bits for of, bits in _BITS if isinstance(existing, of)), 0)


def _stored_values(column: pa.Array) -> pa.Array:
    """The values of a column as Databend reads them from Parquet."""
    kinds, kind = pa.types, column.type
    if kinds.is_time(kind):
        return pa.array([None if value is None else value.isoformat() for value in column.to_pylist()], pa.string())
    return column.cast(pa.timestamp("us", kind.tz)) if kinds.is_timestamp(kind) else column


def _converted_column(rows: sa.Table, table: sa.Table, name: str) -> sa.ColumnElement[Any]:
    """A column of a load table for a column of the table."""
    column = rows.c[name]
    if isinstance(column.type, sa.DATE) and isinstance(table.c[name].type, sa.Integer):
        return sa.cast(column, sa.BIGINT()).label(name)
    return sa.func.parse_json(column).label(name) if isinstance(table.c[name].type, Variant) else column
