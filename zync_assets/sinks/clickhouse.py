"""The target ClickHouse, through clickhouse-connect and its dialect of SQLAlchemy.

ClickHouse has no transactions of several statements. Each step can therefore be repeated without a change:

- A table is a ReplacingMergeTree by its key. The version of a row is the offset of the record that made it, so that a record
  that is written again, or too late, changes nothing. A delete is a row with ``zync_deleted = 1``.
- The offsets of different partitions tell no order. Of a raw table with several partitions, the version is made of time,
  partition and offset (``fold.timed_versions``). It is higher than every offset, and a table of before goes on.
- Whole records go into the table itself, in any order and one row each. Others go by way of load tables.
- The merge writes load tables first and the position last. With mode insert, an insert from a load table has a token of source,
  ranges and content, and a ClickHouse that still knows the token skips it. No other insert may be skipped: after an edit, the
  same range has other rows. It has a token of its own.
- A partial record takes the columns that it leaves out from the present row of its key. A repeated step writes the same
  row: it sets the record's own columns again, and no other record has changed the row in between.

A reader may see the rows of a batch before the position has moved, but never a row's earlier state again.

ClickHouse's own reader of Parquet is faster than an insert of Arrow batches, and is no way here: it reads a null struct, which
is a tombstone, as a struct of nulls (tried on 26.9). A server does not see the lake's files either.

A dead run's load tables are known by their names (``process_mark``). chdb, the embedded engine, lets one process in at a time.
Every connection is therefore short, and a batch is one task.
"""

from __future__ import annotations

import re
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from clickhouse_connect.cc_sqlalchemy import types as ch
from clickhouse_connect.cc_sqlalchemy.ddl.tableengine import MergeTree, ReplacingMergeTree
from clickhouse_connect.cc_sqlalchemy.sql import final
from clickhouse_connect.cc_sqlalchemy.sql.sqlparse import split_top_level
from clickhouse_connect.dbapi.connection import Connection as ChConnection
from clickhouse_connect.driver.binding import quote_identifier
from clickhouse_connect.driver.exceptions import Error
from sqlalchemy import exc
from sqlalchemy.engine import Connection, Engine

from zync_assets.crashes import crash_point
from zync_assets.errors import CommitConflict, SinkError, TableUnfit
from zync_assets.sinks.clickhouse_types import (
    DAYS,
    DELETED,
    TOKEN,
    as_source,
    cast_column,
    check_parsed,
    client_of,
    error_class,
    error_text,
    holds,
    insert_changes,
    insert_records,
    is_open,
    load_token,
    merged_rows,
    new_type,
    nullable,
    own_token,
    read_column,
    sql_text,
    stored,
    version_changes,
    version_type,
    wider,
)
from zync_assets.sinks.fold import CREATION, DELETE, OFFSET, OP, SET
from zync_assets.sinks.sql import SqlTarget
from zync_assets.sinks.sql_types import SqlType, at_place, check_load, ddl_text, place_values
from zync_assets.sinks.target import (
    LOCAL_HOSTS,
    BadRecord,
    Column,
    LoadTable,
    Merge,
    Place,
    Progress,
    TableSpec,
    counted,
    gathered,
    named,
    tls_fault,
)

INSERT_BYTES = 64 << 20
"""The bytes of one insert into a load table. Each insert makes a part, and ClickHouse works best with few large parts."""

APPEND_BYTES = 16 << 20
"""The bytes of one insert into the table itself. Meanwhile, Spark makes the rows of the next insert."""

TOKENS = 1000
"""How many inserts a table remembers by their tokens."""

_CLEARING = -1
"""The partition of a position that says: the table is being emptied."""
_EMPTIED = -2
"""The partition of a position that says when the table was emptied, in nanoseconds since the epoch."""
_COORDINATES = ("kafka.topic", "kafka.partition", "kafka.offset")
_PLACE = ("pipeline", "sink", "source", "partition")
_VERSION = re.compile(rf"ReplacingMergeTree\([^)]*\b{OFFSET}, {DELETED}\)")


def _book(name: str, *columns: sa.Column[Any], version: str, is_deleted: str | None = None) -> sa.Table:
    key = [sa.Column(item, ch.String()) for item in _PLACE[:3]]
    order = (*_PLACE, "offset") if is_deleted else _PLACE
    engine = ReplacingMergeTree(version=version, is_deleted=is_deleted, order_by=order)
    return sa.Table(name, sa.MetaData(), *key, sa.Column("partition", ch.Int32()), *columns, engine)


POSITIONS = _book("zync_positions", sa.Column("next", ch.UInt64()), sa.Column("origin", ch.String()), version="next")
QUARANTINE = _book(
    "zync_quarantine",
    sa.Column("offset", ch.UInt64()),
    sa.Column("key", ch.Nullable(ch.String())),
    sa.Column("error", ch.Nullable(ch.String())),
    sa.Column("change", ch.UInt64()),
    sa.Column(DELETED, ch.UInt8()),
    version="change",
    is_deleted=DELETED,
)


class ClickhouseTarget(SqlTarget):
    """A database of a ClickHouse server, ``clickhouse://user:password@host/database``, or a folder of the embedded engine,
    ``chdb:///folder``."""

    days = DAYS
    is_atomic = False
    has_versions = True

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.is_embedded = url.startswith("chdb:")
        self.tasks = 1 if self.is_embedded else super().tasks

    def make_engine(self) -> Engine:
        if self.is_embedded:
            import_module("chdb")
            folder = self.url.removeprefix("chdb://")
            return sa.create_engine(
                "clickhousedb://",
                poolclass=sa.pool.NullPool,
                creator=lambda: ChConnection(interface="chdb", path=folder),
            )
        url = sa.make_url(self.url).set(drivername="clickhousedb")
        if "secure" not in url.query and (url.host or "") not in LOCAL_HOSTS:
            url = url.update_query_dict({"secure": "true"})
        return sa.create_engine(url, poolclass=sa.pool.NullPool)

    # ---- errors

    @contextmanager
    def errors(self) -> Generator[None]:
        try:
            with super().errors():
                yield
        except Error as error:
            raise self.error(error) from None

    def sort(self, error: exc.DBAPIError) -> type[SinkError]:
        return error_class(error.orig)

    def error(self, error: exc.DBAPIError | Error) -> SinkError:
        driver_error = error.orig if isinstance(error, exc.DBAPIError) else error
        return tls_fault(error_class(driver_error)(error_text(driver_error)), "ca_cert", "secure=false")

    # ---- positions

    def create_book(self, connection: Connection) -> None:
        for table in (POSITIONS, QUARANTINE):
            connection.execute(sa.schema.CreateTable(table, if_not_exists=True))

    def progress(self, place: Place) -> Progress:
        with self.connection() as connection:
            rows = _rows(connection, POSITIONS, place)
            quarantine_rows = _rows(connection, QUARANTINE, place)
        positions = [row for row in rows if row["partition"] not in (_CLEARING, _EMPTIED)]
        next_offsets = {row["partition"]: row["next"] for row in positions}
        # The refused records of a batch that did not move the position do not count.
        refusals = [row for row in quarantine_rows if row["offset"] < next_offsets.get(row["partition"], 0)]
        records = tuple(
            sorted(BadRecord(row["partition"], row["offset"], row["key"], row["error"]) for row in refusals)
        )
        if any(row["partition"] == _CLEARING for row in rows):
            # The table was being emptied: no lake has this id, so that the sink asks for another --reset.
            return Progress({}, "being emptied", records)
        return Progress(next_offsets, positions[0]["origin"] if positions else None, records)

    # ---- load tables

    def load(self, spec: TableSpec, name: str, rows: Iterator[pa.RecordBatch]) -> LoadTable:
        counts: list[int] = []
        with self.loading(spec, name) as (connection, table):
            self.write(connection, table, counted(rows, counts))
        crash_point("sink:loaded")
        return LoadTable(name, sum(counts))

    def write(self, connection: Connection, table: sa.Table, rows: Iterator[pa.RecordBatch]) -> None:
        for batch in gathered(rows, INSERT_BYTES):
            columns = [stored(batch.column(name), name, table.c[name].type) for name in batch.schema.names]
            if batch.num_rows:
                arrow_table = pa.Table.from_arrays(columns, names=batch.schema.names)
                client_of(connection).insert_arrow(table.name, arrow_table)

    def load_table(self, table: sa.Table, spec: TableSpec, name: str, schema: str | None) -> sa.Table:
        """The load table has the source's types. The merge converts the values, and refuses a value that does not fit."""
        columns = [sa.Column(item.name, self.column_type(item, in_key=False)) for item in spec.columns]
        marks = [
            sa.Column(OP, ch.String()),
            sa.Column(SET, ch.Nullable(ch.String())),
            sa.Column(OFFSET, version_type(spec)),
        ]
        if spec.mode == "upsert":
            marks.append(sa.Column(CREATION, nullable(version_type(spec))))
        return sa.Table(name, sa.MetaData(), *columns, *marks, MergeTree(order_by="tuple()"))

    # ---- the merge

    def merge(self, merge: Merge) -> None:
        with self.connection() as connection:
            # 1. Nobody else has written since the batch was planned. A run that writes at the same time writes the same.
            emptied_at = self._claim(connection, merge)
            if merge.clear:
                self._clear(connection, merge)
            # 2. The data, one load table after the other: no key is in two of them.
            table = self._reflect_table(connection, merge.spec) if merge.loads else None
            for load in merge.loads:
                assert table is not None
                self._insert(connection, table, merge, load)
            crash_point("sink:merging")
            # 3. What was refused, and at last the position, unless another run has emptied the table meanwhile.
            self._advance(connection, merge, emptied_at)
        crash_point("sink:merged")
        self.drop([load.name for load in merge.loads])

    # ---- a batch without load tables

    def appends(self, spec: TableSpec, *, whole: bool) -> bool:
        """Rows may come in any order, since the version of a row decides. Only a load table can convert them, or look up the
        columns that a record leaves out."""
        if not whole:
            return False
        with self.connection() as connection:
            table = self._reflect_table(connection, spec)
        types = {item.name: self.column_type(item, in_key=item.name in spec.key) for item in spec.columns}
        return all(str(table.c[name].type) == str(kind) for name, kind in types.items())

    def append(self, merge: Merge, rows: Iterator[pa.RecordBatch]) -> int:
        counts: list[int] = []
        with self.connection() as connection, ThreadPoolExecutor(1) as pool:
            emptied_at = self._claim(connection, merge)
            table = self._reflect_table(connection, merge.spec)
            # Spark makes the next rows while these are inserted.
            insert: Future[None] | None = None
            for batch in gathered(counted(rows, counts), APPEND_BYTES):
                if insert is not None:
                    insert.result()
                insert = pool.submit(insert_records, connection, table, merge, batch)
            if insert is not None:
                insert.result()
            crash_point("sink:merging")
            self._advance(connection, merge, emptied_at)
        crash_point("sink:merged")
        return sum(counts)

    def _claim(self, connection: Connection, merge: Merge) -> int:
        """CommitConflict unless the positions are the expected ones; returns when the table was emptied, 0 for never."""
        if merge.clear:
            return 0
        positions = {row["partition"]: row for row in _rows(connection, POSITIONS, merge.place)}
        is_changed = _CLEARING in positions or any(
            (row["next"] if (row := positions.get(partition)) else None) != expected
            or (row is not None and row["origin"] != merge.origin)
            for partition, expected in merge.expected.items()
        )
        if is_changed:
            raise CommitConflict(f"{merge.place}: another run wrote first; run again")
        return int(positions[_EMPTIED]["next"]) if _EMPTIED in positions else 0

    def _clear(self, connection: Connection, merge: Merge) -> None:
        """Empty the table. A kill on the way leaves a mark, and the sink then asks for another --reset."""
        client_of(connection).set_client_setting(TOKEN, own_token())
        marks = [
            {**place_values(place), "partition": partition, "next": time.time_ns(), "origin": merge.origin}
            for place in merge.cleared
            for partition in (_CLEARING, _EMPTIED)
        ]
        connection.execute(sa.insert(POSITIONS), marks)
        name, schema = named(merge.spec)
        full = ".".join(quote_identifier(item) for item in (schema, name) if item)
        connection.exec_driver_sql(f"TRUNCATE TABLE IF EXISTS {full}")
        crash_point("sink:emptied")
        for table, place in [(table, place) for table in (QUARANTINE, POSITIONS) for place in merge.cleared]:
            connection.execute(sa.delete(table).where(*at_place(table, place), table.c.partition != _EMPTIED))

    def _insert(self, connection: Connection, table: sa.Table, merge: Merge, load: LoadTable) -> None:
        """Insert the changes of a load table."""
        spec = merge.spec
        rows = self.load_table(table, spec, load.name, None)
        check_load(connection, rows, load)
        check_parsed(connection, rows, table)
        names = [column.name for column in spec.others]
        if spec.mode == "insert":
            # The text of a row also covers nulls, of which a hash would be null.
            marks = sa.func.sum(sa.func.sipHash64(sa.func.formatRow("TSV", *rows.c)))
            content = connection.execute(sa.select(marks).select_from(rows)).scalar_one()
            # In one order and one thread, the same rows make the same blocks: a token counts block by block.
            columns = [cast_column(rows, table, name) for name in (*spec.key, *names)]
            changes = sa.select(*columns, rows.c[OFFSET], sa.literal(0))
            changes = changes.order_by(*(rows.c[name] for name in _order(spec)))
            statement = self.upserts(table, changes, spec.key, [*names, OFFSET, DELETED])[0]
            token = load_token(merge, load.rows, content)
            insert_changes(connection, statement, token, max_threads=1, max_insert_threads=1)
            return
        deletions = sa.select(*(cast_column(rows, table, name) for name in spec.key), rows.c[OFFSET], sa.literal(1))
        deletions = deletions.where(rows.c[OP] == DELETE)
        insert_changes(connection, self.upserts(table, deletions, spec.key, [OFFSET, DELETED])[0], own_token())
        is_partial = rows.c[SET].is_not(None)
        partial = sa.select(sa.literal(1)).select_from(rows).where(is_partial, rows.c[OP] != DELETE).limit(1)
        if connection.execute(partial).first() is None:
            columns = [cast_column(rows, table, name) for name in (*spec.key, *names)]
            changes = sa.select(*columns, rows.c[OFFSET], sa.literal(0))
        else:
            changes = merged_rows(rows, table, spec)
        changes = changes.where(rows.c[OP] != DELETE)
        insert_changes(connection, self.upserts(table, changes, spec.key, [*names, OFFSET, DELETED])[0], own_token())

    def upserts(
        self, table: sa.Table, rows: sa.Select[Any], key: Sequence[str], others: Sequence[str]
    ) -> Sequence[sa.Executable]:
        """An insert: ClickHouse keeps the row of the highest offset."""
        return [sa.insert(table).from_select([*key, *others], rows)]

    def _advance(self, connection: Connection, merge: Merge, emptied_at: int) -> None:
        if self._claim(connection, merge) != emptied_at:
            raise CommitConflict(f"{merge.place}: another run has emptied the table; run again")
        # After a reset, ClickHouse must not skip the insert of a position that it has seen before.
        client_of(connection).set_client_setting(TOKEN, own_token())
        self._note(connection, merge)
        rows = [
            {**place_values(merge.place), "partition": partition, "next": next_offset, "origin": merge.origin}
            for partition, next_offset in merge.upcoming.items()
        ]
        if rows:
            connection.execute(sa.insert(POSITIONS), rows)

    def _note(self, connection: Connection, merge: Merge) -> None:
        """Note refused records, and remove those that leave quarantine, or that an unfinished batch noted."""
        record_by_spot = {(item.partition, item.offset): item for item in merge.bad}
        rows = _rows(connection, QUARANTINE, merge.place) if merge.upcoming or merge.cured else []
        open_spots = {(row["partition"], row["offset"]) for row in rows if is_open(merge, row)}
        removed_spots = (open_spots | set(merge.cured)) - record_by_spot.keys()
        change = max((row["change"] for row in rows), default=0) + 1
        values = [
            {"partition": at[0], "offset": at[1], "key": item and item.key, "error": item and item.error}
            for at, item in [*record_by_spot.items(), *((at, None) for at in sorted(removed_spots))]
        ]
        common = {**place_values(merge.place), "change": change}
        if values:
            connection.execute(
                sa.insert(QUARANTINE), [{**common, **item, DELETED: int(item["error"] is None)} for item in values]
            )

    # ---- tables

    def rows(self, spec: TableSpec) -> Iterator[pa.RecordBatch]:
        with self.connection() as connection:
            table = self._reflect_table(connection, spec)
            query = final(sa.select(*(read_column(table, item) for item in spec.columns)), table)
            text = sql_text(connection, query)
            with client_of(connection).query_arrow_stream(text, use_strings=False) as batches:
                for batch in batches:
                    yield as_source(batch, spec)

    def new_table(self, spec: TableSpec) -> sa.Table:
        table = super().new_table(spec)
        columns = [sa.Column(item.name, item.type, comment=item.comment) for item in table.columns]
        engine = ReplacingMergeTree(
            version=OFFSET,
            is_deleted=DELETED,
            order_by=[quote_identifier(name) for name in _order(spec)],
            settings={"non_replicated_deduplication_window": TOKENS},
        )
        marks = [sa.Column(OFFSET, version_type(spec)), sa.Column(DELETED, ch.UInt8())]
        return sa.Table(table.name, sa.MetaData(), *columns, *marks, engine, schema=table.schema, comment=table.comment)

    def _differences(
        self, connection: Connection, table: sa.Table, spec: TableSpec, *, widens: bool
    ) -> tuple[list[tuple[int, str, Any]], list[str]]:
        statements, hopeless = super()._differences(connection, table, spec, widens=widens)
        return [*statements, *version_changes(table, spec)], hopeless

    def key_problem(self, connection: Connection, table: sa.Table, spec: TableSpec) -> str | None:
        query = sa.text("SELECT engine_full, sorting_key FROM system.tables WHERE database = :at AND name = :name")
        database = table.schema or connection.execute(sa.text("SELECT currentDatabase()")).scalar_one()
        engine, order = connection.execute(query, {"at": database, "name": table.name}).one()
        columns = {column.strip() for column in split_top_level(order.removeprefix("(").removesuffix(")"))}
        names = _order(spec)
        in_order = len(columns) == len(names) and all({name, quote_identifier(name)} & columns for name in names)
        if in_order and _VERSION.search(engine):
            return None
        ddl = ddl_text(sa.schema.CreateTable(self.new_table(spec)), connection)
        engine = f"ReplacingMergeTree({OFFSET}, {DELETED})"
        return f"it is no {engine} ordered by ({', '.join(names)}); move it away, and make it so:\n{ddl};"

    def column_type(self, column: Column, *, in_key: bool) -> SqlType:
        kind = new_type(column)
        return kind if in_key else nullable(kind)

    def default(self, column: Column, kind: SqlType) -> Any:
        text = super().default(column, kind)
        return text.removesuffix("Z") if text is not None and pa.types.is_timestamp(column.type) else text

    def holds(self, existing: SqlType, column: Column) -> bool:
        return holds(existing, column)

    def wider(self, existing: SqlType, column: Column) -> SqlType | None:
        return wider(existing, column)


def _order(spec: TableSpec) -> list[str]:
    """The sorting key. Appended rows must differ in it: it has the coordinates in Kafka."""
    if spec.mode == "upsert":
        return list(spec.key)
    places = {column.field: column.name for column in spec.columns if column.field in _COORDINATES}
    if len(places) < len(_COORDINATES):
        raise TableUnfit(
            f"table {spec.name}: ClickHouse appends a record once only with its topic, partition and offset. Let columns:"
            " include name kafka_topic, kafka_partition and kafka_offset."
        )
    return [*spec.key, *(name for name in places.values() if name not in spec.key)]


def _rows(connection: Connection, table: sa.Table, place: Place) -> list[Mapping[str, Any]]:
    if not sa.inspect(connection).has_table(table.name):
        return []
    query = final(sa.select(*table.c), table).where(*at_place(table, place))
    return [dict(row) for row in connection.execute(query).mappings()]
