"""A target that is an SQL database, through SQLAlchemy: its tables and the merge of a batch.

Databases differ in their types and in the way into a load table. The classes in ``sinks.sqlite``, ``sinks.postgres``,
``sinks.mysql``, ``sinks.clickhouse`` and ``sinks.databend`` have methods for these differences. SQLAlchemy quotes the names.
Values are parameters.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from alembic.ddl.base import AddColumn, ColumnType
from sqlalchemy import exc
from sqlalchemy.engine import Connection, Engine

from zync_assets.crashes import crash_point
from zync_assets.errors import CommitConflict, SinkError, TableUnfit, TargetUnavailable
from zync_assets.offsets import offset_parts
from zync_assets.pipeline import Evolve
from zync_assets.sinks import sql_types
from zync_assets.sinks.fold import DELETE, OP, REPLACE, SET, UPDATE, UPSERT, inserted_names
from zync_assets.sinks.server_watch import silence_error
from zync_assets.sinks.sql_types import (
    BOOK,
    POSITIONS,
    QUARANTINE,
    SqlType,
    at_place,
    default_text,
    has_trait,
    holds,
    is_exact,
    place_values,
    sql_text,
    standard_type,
    type_text,
    wider,
)
from zync_assets.sinks.target import Column, LoadTable, Merge, Place, Progress, TableSpec, Target, Trait, named

_ENGINES: dict[tuple[type[SqlTarget], str], Engine] = {}
"""Class and URL → the process's engine."""


class SqlTarget(Target):
    """An SQL database with transactions."""

    is_atomic = True
    """Whether rows are never in a table before their position."""

    _session: Connection | None = None

    def engine(self) -> Engine:
        """The process's engine of the URL. It keeps compiled statements, and no connection, because a run is short."""
        place = type(self), self.url
        if place not in _ENGINES:
            try:
                _ENGINES[place] = self.make_engine()
            except ImportError as error:
                raise SinkError(f"{error}. Install it: pip install {error.name}.") from None
            except (exc.ArgumentError, ValueError):
                # Not the library's words on the URL, which may repeat a password.
                raise SinkError("the sink's url can't be read. Write it as the README says.") from None
        return _ENGINES[place]

    # ---- what a database does in its own way

    @abstractmethod
    def make_engine(self) -> Engine:
        """The engine of the URL."""

    @abstractmethod
    def sort(self, error: exc.DBAPIError) -> type[SinkError]:
        """Whether an error is an outage (TargetUnavailable), a refused record (TargetRefused) or neither (SinkError)."""

    @abstractmethod
    def write(self, connection: Connection, table: sa.Table, rows: Iterator[pa.RecordBatch]) -> None:
        """Append rows to a table. They have all its columns."""

    @abstractmethod
    def upserts(
        self, table: sa.Table, rows: sa.Select[Any], key: Sequence[str], others: Sequence[str]
    ) -> Sequence[sa.Executable]:
        """The statements that insert new rows and update existing rows. ``rows``: ``key``, then ``others``."""

    def removal(self, table: sa.Table, rows: sa.Table, key: Sequence[str]) -> sa.Executable:
        """The statement that deletes the rows whose keys a load table deletes or replaces."""
        columns = [table.c[name] for name in key]
        row_key = sa.tuple_(*columns) if len(columns) > 1 else columns[0]
        deleted_keys = sa.select(*(rows.c[name] for name in key)).where(rows.c[OP].in_([DELETE, REPLACE]))
        return sa.delete(table).where(row_key.in_(deleted_keys))

    def column_type(self, column: Column, *, in_key: bool) -> SqlType:
        """The type of a new column."""
        return standard_type(column.type, "" if in_key and pa.types.is_string(column.type) else column.note)

    def holds(self, existing: SqlType, column: Column) -> bool:
        """Whether an existing column holds the values of a source's column."""
        return holds(existing, column.type)

    def wider(self, existing: SqlType, column: Column) -> SqlType | None:
        """The type to widen an existing column to; None if that is not possible."""
        return wider(existing, column.type)

    def widening(self, table: sa.Table, name: str, larger: SqlType) -> Any:
        """The DDL that widens a column."""
        return ColumnType(table.name, name, larger, schema=table.schema)

    def default(self, column: Column, kind: SqlType) -> Any:
        """The DEFAULT of a new column, as a text that the database casts; None without one."""
        return None if column.default is None else default_text(column, kind)

    def load_type(self, existing: SqlType) -> SqlType:
        """The type of a load table's column beside a column of the table."""
        return existing

    @contextmanager
    def session(self) -> Generator[None]:
        with self.errors(), self.engine().connect() as self._session:
            try:
                yield
            finally:
                self._session = None

    @contextmanager
    def connection(self) -> Generator[Connection]:
        """A connection in a transaction: the session's connection, or a new one."""
        with self.errors():
            if self._session is None:
                with self.engine().begin() as connection:
                    yield connection
            else:
                with self._session.begin():
                    yield self._session

    @contextmanager
    def merging(self, merge: Merge) -> Generator[Connection]:
        """The connection, in a transaction, of a merge."""
        with self.connection() as connection:
            yield connection

    @contextmanager
    def loading(self, spec: TableSpec, name: str) -> Generator[tuple[Connection, sa.Table]]:
        """A connection, in a transaction, with a new load table."""
        with self.connection() as connection:
            table = self.load_table(self._reflect_table(connection, spec), spec, name, None)
            table.create(connection)
            yield connection, table

    def load_schema(self, number: int) -> str | None:
        """The schema in which the merge sees the load table of that number."""
        return None

    def tables(self) -> Sequence[str]:
        with self.connection() as connection:
            return sa.inspect(connection).get_table_names()

    def drop(self, names: Sequence[str]) -> None:
        with self.connection() as connection:
            for name in names:
                connection.execute(sa.schema.DropTable(sa.Table(name, sa.MetaData()), if_exists=True))

    def has_table(self, spec: TableSpec) -> bool:
        with self.connection() as connection:
            return sa.inspect(connection).has_table(*named(spec))

    def past_places(self, place: Place, spec: TableSpec, origin: str, writers: Mapping[Place, bool]) -> Sequence[Place]:
        topic_columns = [item.name for item in spec.columns if item.field == "kafka.topic"]
        with self.connection() as connection:
            places = sql_types.past_writers(connection, place, origin, writers)
            if not places or (any(not item.sink for item in places) and not (topic_columns and self.is_atomic)):
                return []
            # A table without a column for the topic: any row counts.
            table = self._reflect_table(connection, spec)
            conditions = [table.c[name] == place.source.partition(".")[2] for name in topic_columns]
            query = sa.select(sa.literal(1)).select_from(table).where(*conditions).limit(1)
            return places if connection.execute(query).first() is not None else []

    def columns_of(self, spec: TableSpec, trait: Trait) -> frozenset[str]:
        with self.connection() as connection:
            columns = self._reflect_table(connection, spec).c if sa.inspect(connection).has_table(*named(spec)) else ()
            return frozenset(item.name for item in columns if has_trait(item.type, trait))

    def lock(self, query: sa.Select[Any]) -> sa.Select[Any]:
        """A query of positions that lets no other run go on until the transaction ends."""
        return query.with_for_update()

    def create_book(self, connection: Connection) -> None:
        """Make the tables of positions and of refused records, if they are missing."""
        BOOK.create_all(connection)

    # ---- the interface of a target

    def progress(self, place: Place) -> Progress:
        with self.connection() as connection:
            return sql_types.read_progress(connection, place)

    def prepare(self, spec: TableSpec, *, create: bool, evolve: Evolve) -> None:
        with self.connection() as connection:
            self.create_book(connection)
            if not sa.inspect(connection).has_table(*named(spec)):
                table = self.new_table(spec)
                sql_types.refuse_creation(connection, spec.name, table, create=create)
                table.create(connection)
                return
            table = self._reflect_table(connection, spec)
            statements, hopeless = self._differences(connection, table, spec, widens=evolve == "widen")
            is_own = evolve == "own" and bool(statements) and self.is_own(connection, spec)
            level = {"none": 0, "own": int(is_own), "add": 1, "widen": 2}[evolve]
            refused_statements = [item for item in statements if item[0] > level]
            if hopeless or refused_statements:
                missing = [column.name for column in spec.columns if column.name not in table.c]
                raise TableUnfit(sql_types.advice(connection, spec.name, refused_statements, hopeless), missing)
            for _, _, ddl in statements:
                connection.execute(ddl)

    def load(self, spec: TableSpec, name: str, rows: Iterator[pa.RecordBatch]) -> LoadTable:
        loads = [LoadTable(name, 0, removes=False, partial=False)]
        with self.loading(spec, name) as (connection, table):
            names = [column.name for column in table.columns]
            self.write(connection, table, sql_types.counted_rows(rows, names, loads))
        crash_point("sink:loaded")
        return loads[0]

    def merge(self, merge: Merge) -> None:
        with self.merging(merge) as connection:
            # 1. Nobody else has written since the batch was planned.
            self._lock_positions(connection, merge)
            # 2. The data, one load table after the other: no key is in two of them.
            is_there = merge.clear and sa.inspect(connection).has_table(*named(merge.spec))
            table = self._reflect_table(connection, merge.spec) if merge.loads or is_there else None
            if table is not None and (merge.clear or any(load.removes for load in merge.loads)):
                sql_types.refuse_cascades(merge.spec.name, self.cascades(connection, merge.spec))
            if merge.clear and table is not None:
                self.delete(connection, table)
                crash_point("sink:emptied")
            for number, load in enumerate(merge.loads):
                assert table is not None
                self._apply(connection, table, merge.spec, load, number)
            # 3. The positions and what was refused, in the same transaction.
            self._advance_positions(connection, merge)
            crash_point("sink:merging")
        crash_point("sink:merged")
        self.drop([load.name for load in merge.loads])

    def cascades(self, connection: Connection, spec: TableSpec) -> Sequence[str]:
        """The statements that drop the foreign keys by which a delete changes rows of other tables."""
        return ()

    def delete(self, connection: Connection, table: sa.Table, *where: sa.ColumnElement[bool]) -> None:
        """Remove rows of a table; all rows without a condition."""
        connection.execute(sa.delete(table).where(*where))

    def rows(self, spec: TableSpec) -> Iterator[pa.RecordBatch]:
        with self.connection() as connection:
            table = self._reflect_table(connection, spec)
            columns = [self.read_column(table, item) for item in spec.columns]
            for part in connection.execution_options(yield_per=10_000).execute(sa.select(*columns)).partitions():
                yield self.arrow_rows(spec, [tuple(row) for row in part])

    def read_column(self, table: sa.Table, column: Column) -> sa.ColumnElement[Any]:
        """A column as ``rows`` reads it. A column that no batch has needed yet is not there."""
        return table.c.get(column.name, sa.null().label(column.name))

    def arrow_rows(self, spec: TableSpec, rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
        """Rows that the driver gave, with the types of the source's columns; JSON as texts."""
        arrays = [
            pa.array([self.value(column, row[at]) for row in rows], pa.string() if column.as_json else column.type)
            for at, column in enumerate(spec.columns)
        ]
        return pa.RecordBatch.from_arrays(arrays, names=[column.name for column in spec.columns])

    def value(self, column: Column, value: Any) -> Any:
        """A value that the driver gave, as pyarrow takes it. A text may lie in a column of another type, such as uuid."""
        if isinstance(value, date) and pa.types.is_integer(column.type):
            return (value - date(1970, 1, 1)).days
        return str(value) if pa.types.is_string(column.type) and value is not None else value

    @contextmanager
    def errors(self) -> Generator[None]:
        """Raise errors of the project in place of SQLAlchemy's. The message is the database's own, without the statement."""
        try:
            yield
        except exc.DBAPIError as error:
            raise silence_error(self.engine()) or self.error(error) from None
        except exc.SQLAlchemyError as error:
            raise SinkError(f"the target's library says: {str(error).partition(chr(10))[0]}.") from None

    def error_text(self, error: exc.DBAPIError) -> str:
        """The message of the database."""
        return str(error.orig)

    def error(self, error: exc.DBAPIError) -> SinkError:
        """The error of the project for an error of the database."""
        kind = TargetUnavailable if error.connection_invalidated else self.sort(error)
        text = " ".join(self.error_text(error).split())
        return kind(f"the target says: {text}" if kind is SinkError else text)

    def is_own(self, connection: Connection, spec: TableSpec) -> bool:
        """Whether a sink of this pipeline made the table, as the table's comment says. A user's comment is no Pool.Topic."""
        comment: str = sa.inspect(connection).get_table_comment(*named(spec))["text"] or ""
        pipeline = spec.comment.partition(": ")[0]
        return pipeline != "" and re.fullmatch(rf"{re.escape(pipeline)}: \w+\.[\w.-]+", comment) is not None

    def _reflect_table(self, connection: Connection, spec: TableSpec) -> sa.Table:
        """The present table. TableUnfit if the table no longer exists."""
        try:
            return self.reflect(connection, *named(spec))
        except exc.NoSuchTableError:
            raise TableUnfit(f"table {spec.name} is not there any more. Run the sink again.") from None

    def reflect(self, connection: Connection, name: str, schema: str | None) -> sa.Table:
        """A table with the columns that it has."""
        return sa.Table(name, sa.MetaData(), schema=schema, autoload_with=connection, resolve_fks=False)

    def new_table(self, spec: TableSpec) -> sa.Table:
        """The definition of a new table."""
        name, schema = named(spec)
        columns = [
            sa.Column(
                column.name,
                self.column_type(column, in_key=column.name in spec.key),
                primary_key=column.name in spec.key,
                autoincrement=False,
                comment=f"{column.field}: {type_text(column.type)}" if column.field else None,
            )
            for column in spec.columns
        ]
        return sa.Table(name, sa.MetaData(), *columns, schema=schema, comment=spec.comment or None)

    def _differences(
        self, connection: Connection, table: sa.Table, spec: TableSpec, *, widens: bool
    ) -> tuple[list[tuple[int, str, Any]], list[str]]:
        """The problems with their DDL, as (level of `evolve`, problem, DDL), and the others. ``widens``: the level is `widen`."""
        statements, hopeless = list[tuple[int, str, Any]](), list[str]()
        for column in spec.columns:
            new_type = self.column_type(column, in_key=column.name in spec.key)
            if column.name not in table.c:
                new = sa.Column(column.name, new_type, server_default=self.default(column, new_type))
                statements.append((1, f"column {column.name} is missing", AddColumn(table.name, new, table.schema)))
                continue
            existing = table.c[column.name].type
            if problem := sql_types.generation(connection, table, column.name):
                hopeless.append(problem)
                continue
            is_held = self.holds(existing, column)
            if is_held and (self.holds_all(existing, column) or not widens):
                continue
            mismatch = sql_types.misfit(connection, existing, column)
            if (larger := self.wider(existing, column)) is not None:
                statements.append((2, mismatch, self.widening(table, column.name, larger)))
            elif not is_held:
                fit = sql_text(new_type, connection)
                hopeless.append(f"{mismatch}; change the column to {fit}, or make the value with before: {{set: ...}}")
        if problem := self.key_problem(connection, table, spec):
            hopeless.append(problem)
        return statements, hopeless

    def holds_all(self, existing: SqlType, column: Column) -> bool:
        """Whether a column that ``holds`` the values of a source's column refuses none of them."""
        return is_exact(existing)

    def key_problem(self, connection: Connection, table: sa.Table, spec: TableSpec) -> str | None:
        """Why a table can't take rows by their key; None if it can."""
        return None if spec.mode == "insert" else sql_types.missing_key(connection, table, spec.key)

    def load_table(self, table: sa.Table, spec: TableSpec, name: str, schema: str | None) -> sa.Table:
        """A load table beside a table. The rows to append have no marks."""
        columns = [sa.Column(item.name, self.load_type(table.c[item.name].type)) for item in spec.columns]
        marks = [sa.Column(OP, sa.String(1)), sa.Column(SET, sa.Text)] if spec.mode == "upsert" else []
        return sa.Table(name, sa.MetaData(), *columns, *marks, schema=schema, prefixes=self.load_prefixes)

    load_prefixes: Sequence[str] = ()
    """The words before TABLE in the statement that creates a load table."""

    # ---- the merge

    def _lock_positions(self, connection: Connection, merge: Merge) -> None:
        """Lock the positions, and raise CommitConflict unless they are the expected ones."""
        if merge.clear:
            for place in merge.cleared:
                self.delete(connection, POSITIONS, *at_place(POSITIONS, place))
                self.delete(connection, QUARANTINE, *at_place(QUARANTINE, place))
            return
        query = self.lock(sa.select(POSITIONS).where(*at_place(POSITIONS, merge.place)))
        rows = {row["partition"]: row for row in connection.execute(query).mappings()}
        for partition, expected in merge.expected.items():
            row = rows.get(partition)
            if (row["next"] if row else None) != expected or (row is not None and row["origin"] != merge.origin):
                raise CommitConflict(f"{merge.place}: another run wrote first; run again")
        sql_types.check_cured(connection, merge, self.lock)

    def _advance_positions(self, connection: Connection, merge: Merge) -> None:
        at, names = at_place(POSITIONS, merge.place), place_values(merge.place)
        for partition, next_offset in merge.upcoming.items():
            values = {"next": next_offset, "origin": merge.origin}
            if merge.expected.get(partition) is None:
                try:
                    connection.execute(sa.insert(POSITIONS).values(**names, partition=partition, **values))
                except exc.IntegrityError:
                    raise CommitConflict(f"{merge.place}: another run wrote first; run again") from None
            else:
                connection.execute(sa.update(POSITIONS).where(*at, POSITIONS.c.partition == partition).values(**values))
        for partition, offsets in offset_parts(merge.cured, 1_000):
            conditions = (QUARANTINE.c.partition == partition, QUARANTINE.c.offset.in_(offsets))
            self.delete(connection, QUARANTINE, *at_place(QUARANTINE, merge.place), *conditions)
        if merge.bad:
            connection.execute(sa.insert(QUARANTINE), [names | vars(record) for record in merge.bad])

    def _apply(self, connection: Connection, table: sa.Table, spec: TableSpec, load: LoadTable, number: int) -> None:
        """Apply the changes of a load table."""
        rows = self.load_table(table, spec, load.name, self.load_schema(number))
        sql_types.check_load(connection, rows, load)
        names = [column.name for column in spec.columns]
        if spec.mode == "insert":
            connection.execute(sa.insert(table).from_select(names, sa.select(*(rows.c[name] for name in names))))
            return
        if load.removes:
            connection.execute(self.removal(table, rows, spec.key))
        other_names = [column.name for column in spec.others]
        is_same_key = sa.and_(*(table.c[name] == rows.c[name] for name in spec.key))
        is_partial = rows.c[SET].is_not(None)
        if other_names and load.partial:
            # A partial record of a row that exists changes its columns only. A database that checks NOT NULL before it looks
            # for the row would refuse INSERT ... ON CONFLICT.
            values = {
                name: sa.case((sa.func.substr(rows.c[SET], at, 1).between("1", "2"), rows.c[name]), else_=table.c[name])
                for at, name in enumerate(other_names, 1)
            }
            is_change = sa.and_(is_same_key, rows.c[OP].in_([UPSERT, UPDATE]), is_partial)
            connection.execute(sa.update(table).where(is_change).values(values))
            is_new = ~sa.exists(sa.select(sa.literal(1)).select_from(table).where(is_same_key).correlate(rows))
            is_insert = sa.and_(is_partial, rows.c[OP].in_([UPSERT, REPLACE]), is_new)
            blanks = [item.name for item in spec.others if item.default is not None and table.c[item.name].nullable]
            for (shape,) in connection.execute(sa.select(rows.c[SET]).where(is_insert).distinct()).all():
                set_names = [*spec.key, *inserted_names(other_names, shape, blanks)]
                query = sa.select(*(rows.c[name] for name in set_names)).where(rows.c[SET] == shape, is_insert)
                connection.execute(sa.insert(table).from_select(set_names, query))
        whole_rows = sa.select(*(rows.c[name] for name in (*spec.key, *other_names))).where(
            rows.c[OP] != DELETE, ~is_partial
        )
        for statement in self.upserts(table, whole_rows, spec.key, other_names):
            connection.execute(statement)
