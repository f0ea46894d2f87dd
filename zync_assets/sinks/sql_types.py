"""The parts that all SQL targets share.

SQLAlchemy's types stand for the types of the lake. A check finds the columns that can't hold a type without loss. Two tables of
zync lie in each target: the positions of the sources, and the records that the target refused.

| the lake | PostgreSQL | SQLite |
| --- | --- | --- |
| boolean | boolean | BOOLEAN, 0 or 1 |
| tinyint, smallint, int, bigint | smallint, integer, bigint | INTEGER |
| float, double | real, double precision | REAL; NaN is refused |
| decimal(p, s) | numeric(p, s) | TEXT, all digits |
| string | text | TEXT |
| binary | bytea | BLOB |
| date, timestamp | date, timestamp with time zone | TEXT, ISO 8601, UTC |
| timestamp_ntz | timestamp without time zone | TEXT, ISO 8601 |
| time of day | time | TEXT, ISO 8601 |
| an array of one of these | an array | TEXT, JSON |
| struct, map, other arrays | jsonb | TEXT, JSON |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.fields import DEBEZIUM_DATE, ZONED_TIMESTAMP
from zync_assets.errors import CommitConflict, TableUnfit, TargetRefused
from zync_assets.sinks.target import BadRecord, Column, LoadTable, Merge, Place, Progress, Trait, checked_times

SqlType: TypeAlias = sa.types.TypeEngine[Any]

_INTEGERS: tuple[tuple[type[SqlType], int], ...] = ((sa.SmallInteger, 16), (sa.BigInteger, 64), (sa.Integer, 32))
"""Classes of integers and their bits. The last one is the base of the others."""
DIGITS = {8: 3, 16: 5, 32: 10, 64: 19}
"""Bits of an integer → its decimal digits."""


def standard_type(kind: pa.DataType, note: str = "") -> SqlType:
    """The type of a new column in a database with SQL's types. By its ``note``, a number is a date, or a text an instant."""
    kinds = pa.types
    if note == ZONED_TIMESTAMP:
        return sa.DateTime(timezone=True)
    if kinds.is_boolean(kind):
        return sa.Boolean()
    if kinds.is_date(kind) or (note == DEBEZIUM_DATE and kinds.is_integer(kind)):
        return sa.Date()
    if kinds.is_integer(kind):
        return sa.SmallInteger() if kind.bit_width <= 16 else sa.Integer() if kind.bit_width == 32 else sa.BigInteger()
    if kinds.is_floating(kind):
        return sa.REAL() if kinds.is_float32(kind) else sa.Double()
    if kinds.is_decimal(kind):
        return sa.Numeric(kind.precision, kind.scale)
    if kinds.is_binary(kind) or kinds.is_large_binary(kind):
        return sa.LargeBinary()
    if kinds.is_time(kind):
        return sa.Time()
    if kinds.is_timestamp(kind):
        return sa.DateTime(timezone=kind.tz is not None)
    return sa.Text()


def type_text(kind: pa.DataType) -> str:
    """A type of the lake in messages and comments, as Spark writes it."""
    kinds = pa.types
    if kinds.is_decimal(kind):
        return f"decimal({kind.precision}, {kind.scale})"
    if kinds.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    names = {
        pa.int8(): "tinyint",
        pa.int16(): "smallint",
        pa.int32(): "int",
        pa.int64(): "bigint",
        pa.float32(): "float",
    }
    names |= {pa.float64(): "double", pa.bool_(): "boolean", pa.date32(): "date", pa.null(): "void"}
    names |= {pa.time64("us"): "time of day"}
    return names.get(kind) or ("struct" if kinds.is_struct(kind) else str(kind).partition("<")[0])


def holds(existing: SqlType, kind: pa.DataType) -> bool:
    """Whether a column of a standard database holds every value of a type of the lake, or refuses it by an error.

    A text may go into any type that is written as a text and that no implicit conversion shortens: uuid, enum, json, inet. A
    date would lose the text's time, and a time its zone.
    """
    kinds = pa.types
    for is_kind, of in ((kinds.is_boolean, sa.Boolean), (kinds.is_binary, sa.LargeBinary), (kinds.is_date, sa.Date)):
        if is_kind(kind):
            return isinstance(existing, of)
    if kinds.is_integer(kind):
        bits = _bits(existing)
        return kind.bit_width <= bits if bits else _numeric_holds(existing, DIGITS[kind.bit_width], 0)
    if kinds.is_floating(kind):
        return _is_double(existing) or (kinds.is_float32(kind) and isinstance(existing, sa.Float))
    if kinds.is_decimal(kind):
        return _numeric_holds(existing, kind.precision - kind.scale, kind.scale)
    if kinds.is_time(kind):
        return isinstance(existing, sa.Time) and not existing.timezone
    if kinds.is_timestamp(kind):
        # Without a zone, an instant would be a time of day in a zone that nobody knows.
        has_zone = kind.tz is not None
        return isinstance(existing, sa.DateTime) and bool(existing.timezone) == has_zone
    if kinds.is_list(kind) and isinstance(existing, sa.ARRAY):
        item_type = existing.item_type
        return not kinds.is_nested(kind.value_type) and holds(item_type, kind.value_type) and is_exact(item_type)
    if kinds.is_nested(kind):
        return isinstance(existing, sa.JSON)
    numbers = (sa.Boolean, sa.Integer, sa.Numeric, sa.Float, sa.LargeBinary, sa.ARRAY)
    return not isinstance(existing, (*numbers, sa.Date, sa.DateTime, sa.Time))


def default_text(column: Column, kind: SqlType) -> str:
    """The default of a column, as a text that a database casts to the type ``kind``."""
    return fitting(pa.array([column.default], column.type), kind, column.name).cast(pa.string())[0].as_py()


def is_exact(existing: SqlType) -> bool:
    """Whether a type has microseconds, if it is one of times. A type with fewer digits would round them without a word."""
    return not isinstance(existing, (sa.DateTime, sa.Time)) or time_digits(existing) == 6


def time_digits(existing: SqlType) -> int:
    """The digits of a second's fraction in a type of times."""
    if "fsp" in vars(existing):
        return vars(existing)["fsp"] or 0
    digits = getattr(existing, "precision", None)
    return 6 if digits is None else digits


def fitting(values: pa.Array, existing: SqlType, name: str) -> pa.Array:
    """The values as a column takes them: a number for a date is Debezium's days since 1970. TargetRefused for a value that the
    column would cut without a word: a time with more digits than its type has, or a text with too many spaces at its end."""
    if isinstance(existing, sa.Date) and pa.types.is_integer(values.type):
        return checked_times(values.cast(pa.int32()).cast(pa.date32()), Column(name, pa.date32()))
    items = values.flatten() if pa.types.is_list(values.type) else values
    existing = getattr(existing, "item_type", existing)
    is_text, length = pa.types.is_string(items.type), getattr(existing, "length", None)
    is_uncut = isinstance(existing, (sa.CHAR, sa.Enum))
    if isinstance(existing, (sa.DateTime, sa.Time)):
        digits = time_digits(existing)
        limit, unit = f"a time of {digits} digits of a second", 10 ** (6 - digits)
        if is_text:
            is_cut = pc.match_substring_regex(items, rf"\.\d{{{digits}}}\d*[1-9]")
        elif unit > 1:
            count = items.cast(pa.int64())
            is_cut = pc.not_equal(pc.multiply(pc.divide(count, unit), unit), count)
        else:
            return values
    elif is_text and length is not None and isinstance(existing, sa.String) and not is_uncut:
        # The server itself refuses other texts.
        limit = f"a text of {length} characters"
        lengths = [pc.utf8_length(part) for part in (items, pc.utf8_rtrim(items, " "))]
        is_cut = pc.and_(pc.greater(lengths[0], length), pc.less_equal(lengths[1], length))
    else:
        return values
    if len(cut := items.filter(is_cut)):
        raise TargetRefused(f"the column {name} is {str(cut[0])[:100]!r}, and takes {limit}")
    return values


def is_padded(existing: SqlType) -> bool:
    """Whether a type of texts ignores spaces at their ends."""
    return isinstance(getattr(existing, "data_type", existing), sa.CHAR)


def has_trait(existing: SqlType, trait: Trait) -> bool:
    """Whether a type has a trait of ``Target.columns_of``."""
    return is_padded(existing) if trait == "padded" else isinstance(existing, (sa.Integer, sa.Numeric))


def wider(existing: SqlType, kind: pa.DataType) -> SqlType | None:
    """A type that holds the old values of a column, and those of a type of the lake; None if there is no such number."""
    kinds = pa.types
    bits, new_type = _bits(existing), standard_type(kind)
    if bits and kinds.is_integer(kind):
        return new_type
    if isinstance(existing, sa.Float) and kinds.is_floating(kind):
        return sa.Double()
    if isinstance(new_type, (sa.DateTime, sa.Time)):
        is_alike = isinstance(existing, type(new_type)) and bool(existing.timezone) == new_type.timezone
        return new_type if is_alike else None
    digits = _digits(existing) if not bits else (DIGITS[bits], 0)
    if digits is None or not (kinds.is_decimal(kind) or kinds.is_integer(kind)):
        return None
    new_digits = (kind.precision - kind.scale, kind.scale) if kinds.is_decimal(kind) else (DIGITS[kind.bit_width], 0)
    scale = max(new_digits[1], digits[1])
    return sa.Numeric(max(new_digits[0], digits[0]) + scale, scale)


def _bits(existing: SqlType) -> int:
    return next((bits for of, bits in _INTEGERS if isinstance(existing, of)), 0)


def _is_double(existing: SqlType) -> bool:
    return isinstance(existing, sa.Double) or (isinstance(existing, sa.Float) and (existing.precision or 0) > 24)


def _digits(existing: SqlType) -> tuple[int, int] | None:
    """Digits before and after the point; None for what is no decimal, or has no limit."""
    if not isinstance(existing, sa.Numeric) or isinstance(existing, sa.Float) or existing.precision is None:
        return None
    scale = existing.scale or 0
    return existing.precision - scale, scale


def _numeric_holds(existing: SqlType, whole_digits: int, scale: int) -> bool:
    if not isinstance(existing, sa.Numeric) or isinstance(existing, sa.Float):
        return False
    digits = _digits(existing)
    return digits is None or (digits[0] >= whole_digits and digits[1] >= scale)


BOOK = sa.MetaData()
"""The tables that zync keeps in a target."""

_NAME = sa.String(255)


def _place_columns() -> list[sa.Column[Any]]:
    """The columns of a source's partition, the begin of a primary key."""
    names = [sa.Column(name, _NAME, primary_key=True) for name in ("pipeline", "sink", "source")]
    return [*names, sa.Column("partition", sa.Integer, primary_key=True, autoincrement=False)]


POSITIONS = sa.Table(
    "zync_positions",
    BOOK,
    *_place_columns(),
    sa.Column("next", sa.BigInteger, nullable=False),
    sa.Column("origin", _NAME, nullable=False),
)
QUARANTINE = sa.Table(
    "zync_quarantine",
    BOOK,
    *_place_columns(),
    sa.Column("offset", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("key", sa.Text),
    sa.Column("error", sa.Text),
)


def place_values(place: Place) -> dict[str, str]:
    """A place as values of the columns of the book."""
    return {"pipeline": place.pipeline, "sink": place.sink, "source": place.source}


def at_place(table: sa.Table, place: Place) -> list[sa.ColumnElement[bool]]:
    """The condition for the rows of a place, in a table of the book."""
    return [table.c[name] == value for name, value in place_values(place).items()]


def read_progress(connection: Connection, place: Place) -> Progress:
    """How far the source of a place was written, by the book. A table of the book that is missing has no row."""
    inspector = sa.inspect(connection)
    rows, refused_rows = (
        connection.execute(sa.select(table).where(*at_place(table, place))).mappings().all()
        if inspector.has_table(table.name)
        else []
        for table in (POSITIONS, QUARANTINE)
    )
    bad_records = [BadRecord(row["partition"], row["offset"], row["key"], row["error"]) for row in refused_rows]
    next_offsets = {row["partition"]: row["next"] for row in rows}
    return Progress(next_offsets, rows[0]["origin"] if rows else None, tuple(sorted(bad_records)))


def check_cured(connection: Connection, merge: Merge, lock: Callable[[sa.Select[Any]], sa.Select[Any]]) -> None:
    """CommitConflict unless the records that leave quarantine are there: another replay may have written them. ``lock``: makes a
    query that sees the newest rows."""
    if merge.cured:
        offsets = [offset for _, offset in merge.cured]
        is_near = QUARANTINE.c.offset.between(min(offsets), max(offsets))
        query = sa.select(QUARANTINE).where(*at_place(QUARANTINE, merge.place), is_near)
        rows = connection.execute(lock(query)).mappings().all()
        if not {(row["partition"], row["offset"]) for row in rows}.issuperset(merge.cured):
            raise CommitConflict(f"{merge.place}: another run took a record out of quarantine first; run again")


def counted_rows(
    rows: Iterator[pa.RecordBatch], names: Sequence[str], loads: list[LoadTable]
) -> Iterator[pa.RecordBatch]:
    """Columns of rows. The load table, which is alone in ``loads``, counts the rows."""
    for batch in rows:
        loads[0] = loads[0].plus(batch)
        yield batch.select(names)


def check_load(connection: Connection, rows: sa.Table, load: LoadTable) -> None:
    """CommitConflict unless a load table has the rows that were written. A server's crash empties a table that is not logged."""
    count = connection.execute(sa.select(sa.func.count()).select_from(rows)).scalar_one()
    if count != load.rows:
        raise CommitConflict(f"{load.name} has {count} rows, and {load.rows} were written; run again")


def past_writers(connection: Connection, place: Place, origin: str, writers: Mapping[Place, bool]) -> list[Place]:
    """The places that wrote a source before, by the book. A place without a sink, if the book has no position of the topic but
    those of other tables. The parameters are those of ``Target.past_places``."""
    positions = POSITIONS.c
    # The partitions of a source begin at 0. Others are marks.
    query = sa.select(positions.pipeline, positions.sink, positions.source, positions.origin).distinct()
    query = query.where(positions.partition >= 0)
    topic = place.source.partition(".")[2]
    rows = [row for row in connection.execute(query).all() if row[2].partition(".")[2] == topic]
    # A sink of the file that writes another table made no row of this one.
    if not any(writers.get(Place(*row[:3]), True) for row in rows):
        return [replace(place, sink="")]
    sinks = {item.sink for item in writers}
    # A pipeline that was renamed has the same sinks. Other pipelines of the lake may write to this target too.
    places = {
        Place(row[0], row[1], row[2])
        for row in rows
        if row[2] == place.source
        and (row[0] == place.pipeline or (row[1] == place.sink and row[3] == origin))
        and (row[0] != place.pipeline or row[1] not in sinks)
    }
    return sorted(places, key=str)


def on_conflict(insert: Any, key: Sequence[str], others: Sequence[str]) -> sa.Executable:
    """An INSERT of PostgreSQL's or SQLite's dialect that updates the columns ``others`` of a row with the same key."""
    if not others:
        return insert.on_conflict_do_nothing(index_elements=list(key))
    new_values = {name: insert.excluded[name] for name in others}
    return insert.on_conflict_do_update(index_elements=list(key), set_=new_values)


def sql_text(kind: SqlType, connection: sa.Connection) -> str:
    """A type as the database writes it."""
    try:
        return kind.compile(connection.dialect)
    except exc.CompileError:
        return "of another type"


def ddl_text(ddl: sa.schema.ExecutableDDLElement, connection: sa.Connection) -> str:
    """A statement as a user runs it."""
    return with_single_percents(str(ddl.compile(connection)).strip(), connection.dialect)


def with_single_percents(text: str, dialect: sa.Dialect) -> str:
    """SQL of SQLAlchemy as a user runs it. SQLAlchemy doubles percent signs where a driver's parameters have them."""
    return text.replace("%%", "%") if dialect.paramstyle in ("format", "pyformat") else text


def refuse_creation(connection: sa.Connection, name: str, table: sa.Table, *, create: bool) -> None:
    """TableUnfit for a missing table that a sink can't make, or may not make by ``create``. ``name``: as the pipeline file has
    it."""
    lacks_schema = table.schema is not None and not sa.inspect(connection).has_schema(table.schema)
    if lacks_schema and connection.dialect.name == "sqlite":
        raise TableUnfit(f"table {name}: SQLite has no schema {table.schema}. Write table: {table.name}.")
    if create and not lacks_schema:
        return
    items = [*([sa.schema.CreateSchema(table.schema or "")] if lacks_schema else []), sa.schema.CreateTable(table)]
    ddl = [f"{ddl_text(item, connection)};" for item in items]
    if create:
        raise TableUnfit(f"table {name}: schema {table.schema} does not exist. Run:\n{ddl[0]}")
    raise TableUnfit(f"table {name} is not there. Set create: true, or run:\n" + "\n".join(ddl))


def refuse_cascades(name: str, drops: Sequence[str]) -> None:
    """TableUnfit if deletes change rows of other tables. ``drops``: the statements that drop the foreign keys."""
    words = "also deletes or changes rows of other tables, by the ON DELETE of foreign keys. No record writes these rows again"
    if drops:
        cure = "Drop the foreign keys, or switch them off in the url:"
        raise TableUnfit("\n".join([f"table {name}: a delete {words}. {cure}", *drops]))


def missing_key(connection: Connection, table: sa.Table, key: Sequence[str], unfit: Collection[str] = ()) -> str | None:
    """Why a table can't take rows by a key; None if a primary key, or a unique constraint, is on the key's columns.

    ``unfit``: the names of constraints and indexes that count for none.
    """
    inspector, place = sa.inspect(connection), (table.name, table.schema)
    primary = inspector.get_pk_constraint(*place)
    # Each batch asks. The queries below take longer than a small batch. MySQL's primary keys have the name PRIMARY.
    if set(key) == set(primary["constrained_columns"]) and (primary["name"] or "PRIMARY") not in unfit:
        return None
    if table.name in inspector.get_view_names(table.schema):
        return "it is a view; name the view's table with table:"
    # MySQL has each unique index as a constraint too.
    constraints = inspector.get_unique_constraints(*place)
    unique: list[tuple[str | None, Sequence[str | None]]] = [
        (item["name"], item["column_names"]) for item in constraints if not item.get("duplicates_index")
    ]
    for item in inspector.get_indexes(*place):
        options = item.get("dialect_options", {})
        # An index of some rows (WHERE), or of the beginnings of values (a length), leaves keys alone that are equal.
        is_partial = any(
            (name.endswith("_where") and value is not None) or (name.endswith("_length") and value)
            for name, value in options.items()
        )
        if item["unique"] and not is_partial:
            unique.append((item["name"], item["column_names"]))
    if any(set(key) == set(columns) and name not in unfit for name, columns in unique):
        return None
    columns = [sa.Column(name) for name in key]
    sa.Table(table.name, sa.MetaData(), *columns, schema=table.schema)
    ddl = ddl_text(sa.schema.CreateIndex(sa.Index(f"{table.name[:40]}_key", *columns, unique=True)), connection)
    return f"no primary key or unique constraint is on ({', '.join(key)}); run: {ddl};"


def misfit(connection: Connection, existing: SqlType, column: Column) -> str:
    """The types of a column and of its source, for an error."""
    return f"column {column.name} is {sql_text(existing, connection)}, and its source is {type_text(column.type)}"


def generation(connection: Connection, table: sa.Table, name: str) -> str | None:
    """Why a column takes no values, because the database itself makes them; None for another column."""
    column = table.c[name]
    if column.identity is not None and column.identity.always:
        quote = connection.dialect.identifier_preparer
        text = f"ALTER TABLE {quote.format_table(table)} ALTER COLUMN {quote.quote(name)} SET GENERATED BY DEFAULT;"
        return f"the database itself numbers column {name}; run: {with_single_percents(text, connection.dialect)}"
    if column.computed is not None:
        return f"the database itself generates column {name}; leave it out with columns: {{include: [...]}}"
    return None


def loose_key(
    connection: Connection, names: Sequence[str], ddl: Sequence[sa.schema.ExecutableDDLElement]
) -> str | None:
    """Why columns of a key take several keys for one key; None if no column does. ``ddl``: the statements that cure the
    columns."""
    if not names:
        return None
    statements = "\n".join(f"{ddl_text(item, connection)};" for item in ddl)
    return (
        f"the key's column {', '.join(names)} takes texts for equal that differ in case or spaces; run:\n{statements}"
    )


def advice(
    connection: Connection, name: str, statements: Sequence[tuple[int, str, Any]], hopeless: Sequence[str]
) -> str:
    """The text of TableUnfit. ``statements``: the statements that the sink may not run, as (level of `evolve`, problem, DDL).
    ``hopeless``: the problems that no DDL of the sink cures. Their cures come last: an index may be on a new column."""
    words = "; ".join([problem for _, problem, _ in statements] or hopeless)
    if not statements:
        return f"table {name}: {words}{'' if words.endswith(';') else '.'}"
    ddl = "".join(f"\n{ddl_text(item, connection)};" for _, _, item in statements)
    word = {1: "add", 2: "widen"}[max(level for level, _, _ in statements)]
    rest = f"\nAfter that: {'; '.join(hopeless)}" if hopeless else ""
    return f"table {name}: {words}. Set evolve: {word}, or run:{ddl}{rest}"
