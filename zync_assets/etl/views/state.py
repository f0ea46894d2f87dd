"""The state of a table in files: written by Spark, and read with as few files and columns as a look-up allows.

Files are sorted by the place of their keys (``tables.place_sql``). A large batch writes slices: the places of its files do not
overlap. The Delta log has the least and the greatest place of each file, so that a look-up of few keys opens few files. A
look-up lists the wanted values: Spark hands a list of up to ``spark.sql.parquet.pushdown.inFilterThreshold`` values to Parquet,
which skips pages. Spark compiles the same code for any list.

A large batch writes the rows of new keys in one pass. Spark sorts the records by the place of their key, and by their order
within the key. Each task takes the last record of each key, and writes the file with Arrow. An aggregation by key takes three
times as long, and Spark's writer twice as long.
"""

from __future__ import annotations

import pickle
import uuid
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.etl.views.tables import VERSION, VERSION_TYPE, Table, TableType, place_sql, without_versions
from zync_assets.lake import storage
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw import ORDER
from zync_assets.lake.raw_files import ORDER_TYPE
from zync_assets.lake.staging import StagingState
from zync_assets.spark import frames
from zync_assets.spark.sql import in_sql, long_sql, name_sql, search_sql, tuple_sql
from zync_assets.spark.tasks import tune_worker, unmeasured

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROW_GROUP = 32 << 20
"""Bytes of a row group, before compression."""
PAGE_RECORDS = 500
"""Records of a page. Parquet has the least and the greatest value of each page, so that a look-up reads the pages that may hold
a wanted value."""

MOST_VALUES = 20_000
"""The most values of a look-up that the driver fetches and lists, so that Spark skips parts of files."""

Range = tuple[int, int]
"""The least and the greatest value."""
SlicePlace = tuple[int, int, int]
"""The place of a key in the order of files (``tables.place_sql``): high, low. The third number is a hash of the key: it divides
the keys of a place."""


@dataclass(frozen=True)
class Places:
    """The places of wanted keys. ``highs``: sorted, the first part of each place; ``hashes``: of the whole keys, if their
    places are not distinct enough."""

    highs: Sequence[int]
    hashes: Sequence[int] = ()

    def may_be_in(self, item: DataFile) -> bool:
        """Whether a file may have one of the keys."""
        if item.min_order is None or item.max_order is None:
            return True
        at = bisect_left(self.highs, item.min_order[0])
        return at < len(self.highs) and self.highs[at] <= item.max_order[0]

    def condition(self, high: str, key: str) -> str:
        """The condition of these keys, as SQL. Other keys may have it too."""
        hashed = f" AND xxhash64({key}) IN ({', '.join(map(long_sql, self.hashes))})" if self.hashes else ""
        return f"{in_sql(high, [long_sql(value) for value in self.highs])}{hashed}"


@dataclass(frozen=True)
class StateFiles:
    """The files of a table's state. ``versions``: of rows; ``replaced``: the versions that are no longer live; ``indexes``: see
    ``state_index``."""

    versions: Sequence[DataFile] = ()
    replaced: Sequence[DataFile] = ()
    indexes: Sequence[DataFile] = ()

    def __add__(self, other: StateFiles) -> StateFiles:
        own_groups, other_groups = (
            (self.versions, self.replaced, self.indexes),
            (other.versions, other.replaced, other.indexes),
        )
        return StateFiles(
            *((*own_files, *other_files) for own_files, other_files in zip(own_groups, other_groups, strict=True))
        )

    @property
    def rows(self) -> tuple[DataFile, ...]:
        """The files with rows."""
        return (*self.versions, *self.replaced)

    @property
    def all(self) -> tuple[DataFile, ...]:
        return (*self.rows, *self.indexes)

    @property
    def records(self) -> int:
        """The number of live versions."""
        return sum(item.records for item in self.versions) - sum(item.records for item in self.replaced)

    def within(self, span: Range) -> StateFiles:
        """The files that may have keys at places of a span."""

        def may_have(item: DataFile) -> bool:
            if item.min_order is None or item.max_order is None:
                return True
            return item.min_order[0] <= span[1] and span[0] <= item.max_order[0]

        return StateFiles(*(list(filter(may_have, files)) for files in (self.versions, self.replaced)))


def state_files(state: StagingState | None, table: Table) -> StateFiles:
    """The files of a table in a version of the staging table."""
    files = () if state is None else state.files
    versions, replaced = ([item for item in files if item.group == name] for name in (table.versions, table.replaced))
    return StateFiles(versions, replaced, [item for item in files if (item.group or "").startswith(table.index(""))])


@dataclass(frozen=True)
class StateReader:
    """Reads the state of tables. ``uri``: the staging table."""

    spark: SparkSession = field(repr=False)
    uri: str
    _frames: dict[tuple[str, ...], DataFrame] = field(default_factory=dict, repr=False, compare=False)
    """Files → their frame, because Spark lists the files of each new frame."""

    def rows(self, kind: TableType, files: Sequence[DataFile], places: Places | None = None) -> DataFrame:
        """The rows of some files: ``key``, ``row``, ``version``. ``places``: of the wanted keys; a few others may be there."""
        table = kind.table
        read_files = files if places is None else [item for item in files if places.may_be_in(item)]
        place = (table.name, *(item.path for item in read_files))
        frame = self._frames.get(place)
        if frame is None:
            frame = self._frames[place] = frames.parquet_frame(self.spark, self.uri, read_files, kind.schema, _READING)
        if places is not None:
            frame = frame.where(places.condition(f"{name_sql(ORDER)}.high", name_sql(table.key_column)))
        return frame.selectExpr(f"{name_sql(table.key_column)} AS key", f"{name_sql(table.row_column)} AS row", VERSION)

    def live(self, kind: TableType, files: StateFiles) -> DataFrame:
        """The live versions of rows, deleted ones (null) too: ``key``, ``row``, ``version``."""
        versions = self.rows(kind, files.versions)
        return without_versions(versions, self.rows(kind, files.replaced)) if files.replaced else versions


FEW_RECORDS, FEW_BYTES = 400_000, 8 << 20
"""The most rows that each task of a large batch may have as a whole, and the most bytes of their files."""


def is_few(files: Sequence[DataFile]) -> bool:
    """Whether each task may have the rows of some files."""
    records, size = sum(item.records for item in files), sum(item.size for item in files)
    return records <= FEW_RECORDS and size <= FEW_BYTES


_READING = {
    # Parquet would decode a dictionary once for each of the listed values.
    "parquet.filter.dictionary.enabled": "false",
    "parquet.filter.bloom.enabled": "false",
}
_WRITING = {
    # A marker file that nothing here reads.
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    # Two thirds of what snappy makes of a file.
    "compression": "zstd",
    # The differences of numbers and of texts take little room. A dictionary would be read whole for one page.
    "parquet.writer.version": "PARQUET_2_0",
    "parquet.enable.dictionary": "false",
    "parquet.block.size": str(ROW_GROUP),
    "parquet.page.row.count.limit": str(PAGE_RECORDS),
}


def write_state(frame: DataFrame, kind: TableType, uri: str, folder: str, *, small: bool) -> StateFiles:
    """Write versions of rows as files of the staging table, which no commit names yet.

    ``frame``: ``key``, ``row``, ``version``, and ``gone`` (1: a replaced version, else 0). ``folder``: below the table.
    """
    table = kind.table
    rows = frame.selectExpr(
        "gone",
        f"{place_sql('key', kind.state_key)} AS {name_sql(ORDER)}",
        VERSION,
        f"key AS {name_sql(table.key_column)}",
        f"row AS {name_sql(table.row_column)}",
    )
    rows = rows.coalesce(1) if small else rows
    order = name_sql(ORDER)
    rows = rows.selectExpr("*", f"{order}.high AS high", f"{order}.low AS low")
    rows = rows.sortWithinPartitions("gone", "high", "low").drop("high", "low")
    place = storage.join(uri, folder)
    rows.write.partitionBy("gone").options(**_WRITING, **storage.spark_options(uri)).parquet(storage.spark_path(place))
    file_groups: list[list[DataFile]] = []
    for gone, group in ((0, table.versions), (1, table.replaced)):
        subfolder = f"{folder}/gone={gone}"
        paths = storage.list_files(storage.join(uri, subfolder), ".parquet")
        file_groups.append([item for name in paths if (item := _state_file(uri, f"{subfolder}/{name}", group)).records])
    return StateFiles(*file_groups)


def _state_file(uri: str, path: str, group: str) -> DataFile:
    """The log entry of a file that Spark wrote."""
    place = storage.join(uri, path)
    system, full = storage.filesystem(place)
    with storage.access_errors(place, "can't be read"):
        about = pq.read_metadata(full, filesystem=system)
    lows, highs = zip(*storage.footer_bounds(about, f"{ORDER}.high", f"{ORDER}.low"), strict=True)
    min_order, max_order = None if None in lows else lows, None if None in highs else highs
    size = storage.file_size(place)
    return DataFile(path, size, about.num_rows, group=group, min_order=min_order, max_order=max_order)


TASK_RECORDS = 250_000
"""The approximate number of records of a task."""
_GATHERED = 50_000
"""The number of records that a task handles together."""
SAMPLE = 4_000
"""A sample holds about one in this many records, by a hash of the record's place in the topic. The sample shows where the
slices of a large batch begin."""


def slice_bounds(sample: Sequence[SlicePlace], count: int) -> list[SlicePlace]:
    """The place at which each slice but the first begins.

    ``sample``: the places of a few records; ``count``: of all records. A slice has about TASK_RECORDS of them:

    >>> slice_bounds([(3, 0, 8), (1, 0, 9), (2, 0, 7), (4, 0, 6)], 500_000)
    [(3, 0, 8)]
    """
    slices, sorted_sample = -(-count // TASK_RECORDS), sorted(sample)
    return [sorted_sample[len(sorted_sample) * at // slices] for at in range(1, slices)] if sorted_sample else []


def slice_sql(bounds: Sequence[SlicePlace], place: str) -> str:
    """The slice of a row as SQL: how many bounds the row has reached. ``place``: SQL of a SlicePlace, as a struct."""
    return search_sql(len(bounds), lambda at: f"{tuple_sql([*map(long_sql, bounds[at])])} <= {place}")


def slice_place_sql(kind: TableType) -> str:
    """The SlicePlace of a row with a ``key``, as a struct."""
    place = place_sql("key", kind.state_key)
    # Spark hashes no map.
    key_hash = "0L" if "map<" in kind.state_key.simpleString() else "xxhash64(key)"
    return tuple_sql([f"{place}.high", f"{place}.low", key_hash])


def sliced(frame: DataFrame, kind: TableType, bounds: Sequence[SlicePlace]) -> DataFrame:
    """Rows with a ``key``, and their ``slice``. Each task writes one slice."""
    slice_number = slice_sql(bounds, slice_place_sql(kind))
    return frame.selectExpr("*", f"{slice_number} AS slice").repartitionById(len(bounds) + 1, "slice")


def write_new_rows(
    reader: StateReader,
    kind: TableType,
    records: DataFrame,
    error_sql: str,
    folder: str,
    *,
    bounds: Sequence[SlicePlace],
    measured: bool,
) -> StateFiles:
    """Write the last record of each key as a version of a row. No commit names the files yet.

    ``records``: see ``TableRecords``. No key of them is in the state, and none has a value that was not sent.
    ``error_sql``: SQL that fails, for a key in the partitions ``before`` and ``partition``. ``bounds``: see ``slice_bounds``.
    A file has one slice. ``measured``: whether rows may be large.
    """
    # The slice comes last: Spark sorts by the first column fastest.
    window = "(PARTITION BY place.high, place.low, key, slice ORDER BY offset)"
    rows = (
        sliced(records.selectExpr("*", f"{place_sql('key', kind.state_key)} AS place"), kind, bounds)
        .selectExpr("*", f"lag(partition) OVER {window} AS before")
        .selectExpr(
            f"CASE WHEN before <> partition THEN {error_sql} ELSE before IS NULL END AS first",
            "key",
            "row",
            "place",
            "struct(partition, offset, high, low) AS version",
        )
    )
    writer = KeyWriter(reader.uri, folder, kind.table.versions, kind.schema)
    with nullcontext() if measured else unmeasured(reader.spark):
        task_rows = rows.mapInArrow(writer.run, "found binary").collect()
    files: list[DataFile] = [pickle.loads(bytes(row["found"])) for row in task_rows]
    return StateFiles(sorted(files, key=lambda item: item.min_order or (0, 0)))


@dataclass(frozen=True)
class KeyWriter:
    """Writes the last record of each key of one task. ``schema``: of the file: ORDER, VERSION, and the columns of key and row."""

    uri: str
    folder: str
    group: str
    schema: pa.Schema

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """A row with the pickled log entry of the file."""
        tune_worker()
        tables = _groups(self._versions(rows) for rows in _keys(_larger_batches(batches)))
        entry = write_versions(self.uri, self.folder, self.group, tables)
        if entry is not None:
            yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps(entry)], pa.binary())], ["found"])

    def _versions(self, keys: tuple[pa.RecordBatch, pa.ListArray]) -> pa.RecordBatch:
        """Last records as versions, with the columns of the file."""
        rows, offsets = keys
        partition, offset, high, low = rows["version"].flatten()
        version = pa.StructArray.from_arrays([partition, offset, high, low, offsets], fields=list(VERSION_TYPE))
        columns = [rows["place"].cast(ORDER_TYPE), version, rows["key"], rows["row"]]
        names = [ORDER, VERSION, *(name for name in self.schema.names if name not in (ORDER, VERSION))]
        types = [self.schema.field(name).type for name in names]
        arrays = [
            column if column.type.equals(kind) else column.cast(kind)
            for column, kind in zip(columns, types, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, names)


def write_versions(uri: str, folder: str, group: str, tables: Iterable[pa.Table]) -> DataFile | None:
    """Write a file of versions: each table is a row group. Returns its log entry; None, and no file, without a table.

    The rows are sorted by place. ``uri``: of the staging table; ``folder``: below it; ``group``: of the file.
    """
    path = f"{folder}/part-{uuid.uuid4().hex}.parquet"
    place = storage.join(uri, path)
    system, full = storage.filesystem(place)
    writer: pq.ParquetWriter | None = None
    records, bounds = 0, list[tuple[int, int, int, int]]()
    with storage.access_errors(place, "can't be written"), ExitStack() as writers:
        for table in tables:
            if writer is None:
                system.create_dir(full.rsplit("/", 1)[0], recursive=True)
                writer = writers.enter_context(_writer(full, system, table.schema))
            writer.write_table(table)
            records += len(table)
            bounds.append(_place_bounds(table[ORDER].combine_chunks()))
        if writer is None:
            return None
        writer.close()
        size = storage.file_size(place)
    low, high = (min(bound[:2] for bound in bounds), max(bound[2:] for bound in bounds))
    least, most = (low[0], min(bound[1] for bound in bounds)), (high[0], max(bound[3] for bound in bounds))
    return DataFile(path, size, records, group=group, min_order=least, max_order=most)


def _larger_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in larger batches."""
    gathered_batches: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        gathered_batches.append(batch)
        rows, size = rows + len(batch), size + batch.get_total_buffer_size()
        if rows >= _GATHERED or size >= ROW_GROUP:
            yield pa.concat_batches(gathered_batches)
            gathered_batches, rows, size = [], 0, 0
    if rows:
        yield pa.concat_batches(gathered_batches)


def _keys(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[pa.RecordBatch, pa.ListArray]]:
    """The last record of each key, and the offsets of all records of the key. The records are sorted by key."""
    last_record: pa.RecordBatch | None = None
    offset_parts: list[np.ndarray[Any, Any]] = []
    for batch in batches:
        starts = np.flatnonzero(batch["first"].to_numpy(zero_copy_only=False))
        offsets = batch["version"].field("offset").to_numpy()
        if not len(starts):
            last_record = batch.take(pa.array([len(batch) - 1]))
            offset_parts.append(offsets.copy())
            continue
        if starts[0]:
            last_record = batch.slice(starts[0] - 1, 1)
            offset_parts.append(offsets[: starts[0]])
        if last_record is not None:
            yield last_record, _lists(np.concatenate(offset_parts), [0, sum(map(len, offset_parts))])
        if len(starts) > 1:
            inner = batch.take(pa.array(starts[1:] - 1))
            yield inner, _lists(offsets[starts[0] : starts[-1]], starts - starts[0])
        last_record, offset_parts = batch.take(pa.array([len(batch) - 1])), [offsets[starts[-1] :].copy()]
    if last_record is not None:
        yield last_record, _lists(np.concatenate(offset_parts), [0, sum(map(len, offset_parts))])


def _lists(values: np.ndarray[Any, Any], bounds: Any) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), pa.array(values, pa.int64()))


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The same rows in row groups."""
    group_batches: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        group_batches.append(batch)
        size += batch.get_total_buffer_size()
        if size >= ROW_GROUP:
            yield pa.Table.from_batches(group_batches)
            group_batches, size = [], 0
    if group_batches:
        yield pa.Table.from_batches(group_batches)


def _place_bounds(order: pa.StructArray) -> tuple[int, int, int, int]:
    """The least high and low, and the greatest high and low."""
    high, low = (part.to_numpy() for part in order.flatten())
    return int(high.min()), int(low.min()), int(high.max()), int(low.max())


def _writer(path: str, system: Any, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        path,
        schema,
        filesystem=system,
        compression="zstd",
        use_dictionary=False,
        column_encoding={name: encoding for item in schema for name, encoding in _encodings(item.name, item.type)},
        write_page_index=True,
        max_rows_per_page=PAGE_RECORDS,
    )


def _encodings(path: str, kind: pa.DataType) -> Iterator[tuple[str, str]]:
    """The leaf columns with numbers and with texts, by their paths in Parquet, each with its encoding by differences."""
    kinds = pa.types
    if kinds.is_struct(kind):
        for item in kind:
            yield from _encodings(f"{path}.{item.name}", item.type)
    elif kinds.is_list(kind):
        yield from _encodings(f"{path}.list.element", kind.value_type)
    elif kinds.is_integer(kind) or kinds.is_date(kind) or kinds.is_timestamp(kind):
        yield path, "DELTA_BINARY_PACKED"
    elif kinds.is_string(kind) or kinds.is_binary(kind):
        yield path, "DELTA_BYTE_ARRAY"
