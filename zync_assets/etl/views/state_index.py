"""The look-up of rows in a table's state by their values: the filter, and the index of the rows' places.

The files of a state are sorted by the place of the key (``tables.place_sql``). A join looks rows up by another column, whose
values are anywhere in the files. Without an index, such a look-up reads the column of all rows.

    topic=#index:<table>:<column>   the place of each row (``order``) and the column, sorted by the column

Each write of versions has an index for each such column, in a folder below the folder of its files. An entry stays as long as
its version, replaced or not: a look-up gives a few places too many, and the found rows are compared with the values again. A
fold writes the index of the folded versions, and drops the index of the files that it replaces.

The driver reads an index without Spark, which would take a tenth of a second for each job. A row group has few entries, so
that its statistics select the row groups that may have a value.
"""

from __future__ import annotations

import pickle
import uuid
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.codecs.arrays import pc
from zync_assets.etl.rules.shapes import type_sql
from zync_assets.etl.views.query import Query
from zync_assets.etl.views.state import PAGE_RECORDS, Places, Range, StateFiles, StateReader
from zync_assets.etl.views.tables import TableType, leaves_of, table_of
from zync_assets.lake import storage
from zync_assets.lake.log import DataFile
from zync_assets.lake.parquet_rows import RecentCache
from zync_assets.lake.raw import ORDER
from zync_assets.lake.raw_files import ORDER_TYPE
from zync_assets.pipeline import Rule, View
from zync_assets.spark import frames
from zync_assets.spark.sql import in_sql, int_sql, long_sql, name_sql, text_sql
from zync_assets.spark.tasks import tune_worker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructField

GROUP_RECORDS = 2_000
"""Entries of a row group."""
FILE_RECORDS = 1_000_000
"""The approximate number of entries of a file."""
SHARE = 4
"""A look-up uses the index if it reads at most one in SHARE of the entries, and at most one in SHARE of the rows. For more
rows, Spark reads the column of all rows, which takes as long."""


@dataclass(frozen=True)
class KeyFilter:
    """A filter of an alias's rows by the values of expressions.

    ``own``: the expressions over the alias. ``frame``: the allowed values, in the columns ``z_k0``, ``z_k1`` …; None if the
    filter is a ``span`` alone. ``column``: a plain column among the expressions. ``values``: the allowed values of the column;
    ``value_list``: the same values as SQL. ``span``: the least and the greatest allowed value of the column, in place of a list.
    ``null_safe``: whether null equals null.
    """

    frame: DataFrame | None
    own: Sequence[str]
    column: str | None = None
    value_list: Sequence[str] = ()
    null_safe: bool = False
    span: tuple[int, int] | None = None
    values: pa.Array | pa.ChunkedArray | None = None

    def within(self, rows: DataFrame) -> DataFrame:
        """The rows (``row``) with one of the listed values, or in the span."""
        return rows if self.column is None else rows.where(self._condition(f"row.{name_sql(self.column)}"))

    @property
    def is_exact(self) -> bool:
        """Whether ``within`` alone gives the rows."""
        return self.column is not None and (self.span is None or self.frame is None)

    def keep(self, frame: DataFrame, alias: str) -> DataFrame:
        """The rows with one of the values. ``alias``: the column of the rows."""
        from pyspark.sql import functions as F

        if self.frame is None or self.is_exact:
            return frame.where(self._condition(f"{name_sql(alias)}.{name_sql(self.column or '')}"))
        sign = "<=>" if self.null_safe else "="
        equal = " AND ".join(f"({sql}) {sign} z_k{at}" for at, sql in enumerate(self.own))
        return frame.join(self.frame, F.expr(equal), "left_semi")

    def _condition(self, sql: str) -> str:
        if self.span is not None:
            return f"{sql} BETWEEN {long_sql(self.span[0])} AND {long_sql(self.span[1])}"
        return in_sql(sql, self.value_list)


def sql_values(kind: DataType, values: Sequence[Any]) -> list[str] | None:
    """Values of a plain column as SQL; None for a column of another type than integers and texts."""
    from pyspark.sql import types as spark

    if isinstance(kind, spark.LongType | spark.IntegerType) and all(type(value) is int for value in values):
        if isinstance(kind, spark.LongType):
            return [long_sql(value) for value in values]
        return [int_sql(value) for value in values if -(2**31) <= value < 2**31]
    if kind == spark.StringType() and all(type(value) is str for value in values):
        return [text_sql(value) for value in values]
    return None


def with_list(key_filter: KeyFilter, item: StructField | None, table: pa.Table) -> KeyFilter | None:
    """The filter with fetched values in a list. ``item``: the plain column that must equal them. None if they can't be listed."""
    if item is None or len(key_filter.own) > 1 or (key_filter.null_safe and table["z_k0"].null_count):
        return None
    value_list = sql_values(item.dataType, sorted(set(table["z_k0"].drop_null().to_pylist())))
    return (
        None
        if value_list is None
        else replace(key_filter, frame=None, column=item.name, value_list=value_list, values=table["z_k0"])
    )


def is_kept(kind: DataType, other: DataType) -> bool:
    """Whether a value is the same after a cast to another type, if it equals a value of that type.

    Spark compares two types by a common one. A text equals a number of another spelling, 0.0 equals -0.0, and a collation makes
    texts equal.
    """
    from pyspark.sql import types as spark

    numbers: list[DataType] = [spark.ByteType(), spark.ShortType(), spark.IntegerType(), spark.LongType()]
    if kind in numbers and other in numbers:
        return numbers.index(kind) <= numbers.index(other)
    whole = spark.StringType(), spark.BooleanType(), spark.DateType(), spark.TimestampType(), spark.TimestampNTZType()
    return kind == other and (kind in whole or isinstance(kind, spark.DecimalType | spark.BinaryType))


def plain_field(row: DataType, sql: str, alias: str) -> StructField | None:
    """The field of a row that an expression is; None if the expression is no plain column of the alias, or is not there."""
    from pyspark.sql.types import StructType

    name = plain_column(sql, alias)
    if name is None or not isinstance(row, StructType):
        return None
    return next((item for item in row if item.name.lower() == name.lower()), None)


def integral_column(row: DataType, sql: str, alias: str) -> str | None:
    """The column of integers that an expression is; None if it is none."""
    from pyspark.sql.types import IntegralType

    item = plain_field(row, sql, alias)
    return item.name if item is not None and isinstance(item.dataType, IntegralType) else None


def plain_column(sql: str, alias: str) -> str | None:
    """The name of the column, if the expression is a plain column of the alias."""
    before, dot, name = sql.strip().partition(".")
    plain = dot and before.strip("`").lower() == alias.lower() and name.strip("`").isidentifier()
    return name.strip("`") if plain else None


def gives_key(frame: DataFrame, near_sql: str, far_row: DataType, far_sql: str, far: str) -> bool:
    """Whether an expression of a frame gives the key what an equal expression of ``far`` gives it. Values of two types can be
    equal, and differ as parts of a key: 1 and '01'."""
    item = plain_field(far_row, far_sql, far)
    return item is not None and is_kept(frame.selectExpr(f"({near_sql}) AS it").schema[0].dataType, item.dataType)


def key_spans(
    keys: DataFrame, fields: Iterable[tuple[str, str, str]], kinds: Mapping[str, TableType]
) -> tuple[int, dict[str, Range]]:
    """The number of touched keys, and the spans of their fields that are columns of integers. ``fields``: expression, its place
    and its alias; ``kinds``: by alias."""
    paths = {sql.strip(): path for sql, path, alias in fields if integral_column(kinds[alias].state_row, sql, alias)}
    sums = (f"struct(min({path}), max({path}), count({path})) AS f{at}" for at, path in enumerate(paths.values()))
    [row] = keys.selectExpr("count(*) AS count", *sums).collect()
    bounds = {sql: tuple(row[f"f{at}"]) for at, sql in enumerate(paths)}
    # A null has no place in a span.
    return row["count"], {sql: bound[:2] for sql, bound in bounds.items() if row["count"] and bound[2] == row["count"]}


def absent_joins(spark: SparkSession, view: View, kinds: Mapping[str, TableType]) -> frozenset[tuple[str, str]]:
    """The joins (near alias, alias) that find rows for a missing row of the near alias: ON r.id = coalesce(c.region, 0).

    ``kinds``: by alias. A column of a missing row is null, and matches nothing.
    """
    conditions = {
        (join.near, join.alias): " AND ".join(f"({near_sql}) IS NOT NULL" for near_sql, _ in join.on)
        for join in view.joins
        if join.near in view.optional and not any(plain_column(near_sql, join.near) for near_sql, _ in join.on)
    }
    if not conditions:
        return frozenset()
    rows = [f"CAST(NULL AS {type_sql(kinds[near].state_row)}) AS {name_sql(near)}" for near, _ in conditions]
    place = (*dict.fromkeys(rows), *conditions.values())
    answers = _ABSENT.get(place)
    if answers is None:
        [row] = spark.range(1).selectExpr(*dict.fromkeys(rows)).selectExpr(*conditions.values()).collect()
        answers = tuple(row)
        _ABSENT.put(place, answers)
    return frozenset(pair for pair, is_there in zip(conditions, answers, strict=True) if is_there)


def missing_row(spark: SparkSession, query: Query, alias: str, kinds: Mapping[str, TableType]) -> DataFrame:
    """A frame of the row under an alias that a LEFT JOIN lacks. ``kinds``: by alias."""
    kind = kinds[alias].state_row
    row = spark.range(1).selectExpr(f"CAST(NULL AS {type_sql(kind)}) AS row")
    return row.selectExpr(f"{query.row_sql(alias, kind)} AS {name_sql(alias)}")


_ABSENT: RecentCache[tuple[str, ...], tuple[bool, ...]] = RecentCache(1_000)
"""The known answers of ``absent_joins``. Each batch has the same questions."""


def join_columns(rules: Iterable[Rule]) -> dict[str, list[str]]:
    """Name of a table → the plain columns by which joins and look-ups of the rules find its rows."""
    columns_by_table: dict[str, dict[str, None]] = {}
    for rule in rules:
        tables = {item.alias: item for item in rule.tables}
        pairs = [join.on for join in rule.view.joins] if rule.view is not None else [item.on for item in rule.lookups]
        for condition in pairs:
            # A look-up lists the values of a single column.
            for sql in condition[0] if len(condition) == 1 else ():
                names = [(item, plain_column(sql, alias)) for alias, item in tables.items()]
                for name, column in ((table_of(item).name, column) for item, column in names if column is not None):
                    columns_by_table.setdefault(name, {})[column] = None
    return {name: list(columns) for name, columns in columns_by_table.items()}


def indexed_columns(kind: TableType, columns: Iterable[str]) -> list[str]:
    """The columns of integers and texts among some columns of a table, as the table spells them.

    A column of integers that is the first field of the key has the order of the files, and needs no index.
    """
    from pyspark.sql import types as spark

    if not isinstance(kind.state_row, spark.StructType):
        return []
    types: dict[str, tuple[str, DataType]] = {item.name.lower(): (item.name, item.dataType) for item in kind.state_row}
    first_field = next((sql.lower() for sql, _ in leaves_of("key", kind.state_key)), "")
    names: list[str] = []
    for name, data_type in (types[column.lower()] for column in columns if column.lower() in types):
        is_number = isinstance(data_type, spark.LongType | spark.IntegerType)
        if (is_number and first_field != f"key.{name_sql(name)}".lower()) or data_type == spark.StringType():
            names.append(name)
    return names


def write_index(
    reader: StateReader, kind: TableType, versions: Sequence[DataFile], columns: Sequence[str], *, small: bool
) -> list[DataFile]:
    """Write an index of new versions for each column. No commit names the files yet."""
    index_files: list[DataFile] = []
    for folder in dict.fromkeys(_folder(item) for item in versions):
        folder_versions = [item for item in versions if _folder(item) == folder]
        for at, column in enumerate(columns):
            writer = _IndexWriter(
                reader.uri, f"{folder}/index-{at}", kind.table.index(column), kind.table.row_column, column
            )
            entries = (
                [writer.write(_entries(reader.uri, folder_versions, writer))]
                if small
                else _large(reader, kind, folder_versions, writer)
            )
            # An index without an entry says that no row has a value.
            index_files += entries or [writer.write(_no_entries(kind, column))]
    return index_files


def _folder(item: DataFile) -> str:
    return item.path.rpartition("/")[0]


def _large(reader: StateReader, kind: TableType, versions: Sequence[DataFile], writer: _IndexWriter) -> list[DataFile]:
    """The index of many versions. Spark sorts the entries; each task writes a file."""
    value = f"{name_sql(kind.table.row_column)}.{name_sql(writer.column)}"
    rows = frames.parquet_frame(reader.spark, reader.uri, versions, kind.schema)
    rows = rows.selectExpr(f"{value} AS value", f"{name_sql(ORDER)}.high AS high").where("value IS NOT NULL")
    count = max(1, sum(item.records for item in versions) // FILE_RECORDS)
    rows = rows.repartitionByRange(count, "value").sortWithinPartitions("value", "high")
    return [pickle.loads(bytes(row["found"])) for row in rows.mapInArrow(writer.run, "found binary").collect()]


def _entries(uri: str, versions: Sequence[DataFile], writer: _IndexWriter) -> pa.Table:
    """The sorted entries of a few versions: ``value`` and ``high``."""
    tables: list[pa.Table] = []
    for item in versions:
        place = storage.join(uri, item.path)
        system, path = storage.filesystem(place)
        # Not `read_table`, which takes a dot in a column's name for the way to a field.
        with storage.access_errors(place, "can't be read"), pq.ParquetFile(path, filesystem=system) as file:
            rows = file.read(columns=[f"{ORDER}.high", writer.path]).combine_chunks()
        value, high = (pc.struct_field(rows[name], [0]) for name in (writer.row_column, ORDER))
        tables.append(pa.table({"value": value, "high": high}))
    entries = pa.concat_tables(tables, promote_options="permissive")
    entries = entries.filter(pc.is_valid(entries["value"]))
    return entries.sort_by([("value", "ascending"), ("high", "ascending")])


def _no_entries(kind: TableType, column: str) -> pa.Table:
    value = kind.schema.field(kind.table.row_column).type.field(column).type
    return pa.table({"value": pa.array([], value), "high": pa.array([], pa.int64())})


@dataclass(frozen=True)
class _IndexWriter:
    """Writes files of the index of one column. ``folder``: below the table of ``uri``; ``group``: of the files."""

    uri: str
    folder: str
    group: str
    row_column: str
    column: str

    @property
    def path(self) -> str:
        """The column in Parquet files."""
        return f"{self.row_column}.{self.column}"

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """A row with the pickled log entry of a file with these entries, which are sorted. No row if there are none."""
        tune_worker()
        rows = list(batches)
        if sum(map(len, rows)):
            log_entry = pickle.dumps(self.write(pa.Table.from_batches(rows)))
            yield pa.RecordBatch.from_arrays([pa.array([log_entry], pa.binary())], ["found"])

    def write(self, entries: pa.Table) -> DataFile:
        """The log entry of a new file."""
        path = f"{self.folder}/part-{uuid.uuid4().hex}.parquet"
        place = storage.join(self.uri, path)
        system, full = storage.filesystem(place)
        high = entries["high"].combine_chunks().cast(pa.int64())
        value = entries["value"].combine_chunks()
        order = pa.StructArray.from_arrays([high, pa.array(np.zeros(len(high), np.int64))], fields=list(ORDER_TYPE))
        table = pa.table({ORDER: order, self.row_column: pa.StructArray.from_arrays([value], [self.column])})
        with storage.access_errors(place, "can't be written"):
            system.create_dir(full.rsplit("/", 1)[0], recursive=True)
            # Sorted numbers, and numbers near each other, take a third of the room of a dictionary.
            numbers = [f"{ORDER}.high", f"{ORDER}.low", *([self.path] if pa.types.is_integer(value.type) else [])]
            pq.write_table(
                table,
                full,
                filesystem=system,
                row_group_size=GROUP_RECORDS,
                compression="zstd",
                use_dictionary=False,
                column_encoding=dict.fromkeys(numbers, "DELTA_BINARY_PACKED"),
            )
        bounds = pc.min_max(high).as_py()
        least, most = ((bounds[name] or 0, 0) for name in ("min", "max"))
        size = storage.file_size(place)
        return DataFile(path, size, len(table), group=self.group, min_order=least, max_order=most)


def looked_up_places(reader: StateReader, kind: TableType, files: StateFiles, values: KeyFilter) -> Places | None:
    """The places of the rows with one of the listed values. Other rows may be there too.

    None if a file of versions lacks the index, or if the look-up needs a large part of the rows (``SHARE``).
    """
    column = values.column
    if column is None or values.values is None:
        return None
    index_files = [item for item in files.indexes if item.group == kind.table.index(column)]
    folders = {_folder(item).rpartition("/")[0] for item in index_files}
    records = sum(item.records for item in files.versions)
    sorted_values = sorted(set(values.values.drop_null().to_pylist()))
    if not index_files or any(_folder(item) not in folders for item in files.versions):
        return None
    highs: set[int] = set()
    for item in index_files:
        uri = storage.join(reader.uri, item.path)
        file_highs = _highs(uri, f"{kind.table.row_column}.{column}", sorted_values, records)
        if file_highs is None or len(highs := highs | file_highs) * PAGE_RECORDS * SHARE >= records:
            return None
    return Places(sorted(highs))


def _highs(uri: str, path: str, sorted_values: Sequence[int] | Sequence[str], records: int) -> set[int] | None:
    """The places of some values in a file of an index; None if the entries to read are many.

    ``sorted_values``: the values; ``records``: of the state.
    """
    system, full = storage.filesystem(uri)
    with storage.access_errors(uri, "can't be read"), pq.ParquetFile(full, filesystem=system) as file:
        about = file.metadata
        at = [about.schema.column(number).path for number in range(about.num_columns)].index(path)
        groups: list[int] = []
        for number in range(about.num_row_groups):
            span = about.row_group(number).column(at).statistics
            position = bisect_left(sorted_values, span.min) if span is not None and span.has_min_max else 0
            if position < len(sorted_values) and (
                span is None or not span.has_min_max or sorted_values[position] <= span.max
            ):
                groups.append(number)
        if not groups:
            return set()
        if sum(about.row_group(number).num_rows for number in groups) * SHARE > records:
            return None
        entries = file.read_row_groups(groups, columns=[f"{ORDER}.high", path]).combine_chunks()
    name = path.removesuffix(f".{path.rpartition('.')[2]}")
    column, high = (pc.struct_field(entries[column_name], [0]) for column_name in (name, ORDER))
    # A wanted number may be too large for the column.
    values = pa.array(sorted_values)
    matches = high.filter(pc.is_in(column.cast(values.type), value_set=values))
    return set(matches.unique().to_pylist())


def unindexed_rows(reader: StateReader, kind: TableType, files: StateFiles) -> int:
    """The number of values in versions with an index that the index lacks. Spark compares all entries."""
    count = 0
    for column in indexed_columns(kind, index_columns(files)):
        index_files = [item for item in files.indexes if item.group == kind.table.index(column)]
        folders = {_folder(item).rpartition("/")[0] for item in index_files}
        value = kind.schema.field(kind.table.row_column).type.field(column)
        schema = pa.schema([kind.schema.field(ORDER), pa.field(kind.table.row_column, pa.struct([value]))])
        sides = ([item for item in files.versions if _folder(item) in folders], index_files)
        names = f"{name_sql(ORDER)}.high AS high", f"{name_sql(kind.table.row_column)}.{name_sql(column)} AS value"
        rows, entries = (
            frames.parquet_frame(reader.spark, reader.uri, side, schema).selectExpr(*names).where("value IS NOT NULL")
            for side in sides
        )
        count += rows.join(entries, ["high", "value"], "left_anti").count()
    return count


def index_columns(files: StateFiles) -> list[str]:
    """The columns that a state has an index of."""
    return list(dict.fromkeys((item.group or "").split(":", 2)[2] for item in files.indexes))


def indexes_of(files: StateFiles, versions: Sequence[DataFile]) -> list[DataFile]:
    """The indexes of some versions, all files of a write."""
    folders = {_folder(item) for item in versions}
    return [item for item in files.indexes if _folder(item).rpartition("/")[0] in folders]
