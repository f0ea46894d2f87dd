"""The files of raw tables: their columns, their writer, and the carried time and order of their records.

The columns of raw records and of quarantined records are Arrow schemas. In a Spark task of ingest, ``RangeWriter`` writes
record batches to Parquet files. A later commit names the files.

``kafka.time``, the carried time, never decreases within a partition, across files and batches. Ingest writes the carried time.
A batch begins with the partition's highest time so far (``highest_times``). The tasks of a batch do not know each other's
times, and ``lift`` corrects their files before the commit. Tables of older versions have a running maximum within each file
only. Readers take the maximum of that time and of ``time_floors``, from the log.

The column ``order`` says where the source put a record in its own order. Ingest carries it like the time: a record without an
order has the order of the record before it in its partition. Only tables of inputs with a source order have the column. Older
files lack the column, and their records have the order LOWEST.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.codecs.arrays import is_valid, pc, struct_of
from zync_assets.lake import storage
from zync_assets.lake.log import DataFile, Order
from zync_assets.lake.raw import ORDER, RawState, is_replay
from zync_assets.offsets import OffsetRange

HEADERS_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

KAFKA_TYPE = pa.struct(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("time", pa.timestamp("us", "UTC")),
        ("headers", HEADERS_TYPE),
    ]
)
"""Where a record comes from. ``timestamp`` is the record's own; ``time`` never runs back within a partition: the highest
timestamp up to the record, a missing one taken from the record before, a future one cut to the time of ingest."""

ORDER_TYPE = pa.struct([("high", pa.int64()), ("low", pa.int64())])
LOWEST: Order = (-(2**63), 0)
"""The order of records that come before all changes of the source: snapshots, and records before any ordered record."""
_NO_ORDER: Order = (-(2**63), -(2**63))
Longs = npt.NDArray[np.int64]

ORDER_KINDS = "an integer, a timestamp, a date, or a struct of two of these"


def is_orderly(kind: pa.DataType) -> bool:
    """Whether a type is one of ORDER_KINDS."""
    kinds = pa.types
    if kinds.is_struct(kind):
        parts = [item.type for item in kind]
        return len(parts) == 2 and all(not kinds.is_struct(part) and is_orderly(part) for part in parts)
    return kinds.is_integer(kind) or kinds.is_timestamp(kind) or kinds.is_date(kind)


BAD_SCHEMA = pa.schema(
    [
        ("kafka", KAFKA_TYPE),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("stage", pa.string()),
        ("error", pa.string()),
        ("end", pa.int64()),
    ]
)
"""A quarantined record, whole: its bytes and headers as Kafka had them, and why it is here.
``stage``: ``key`` or ``value`` (could not be decoded), ``shape`` (the input's shape fails on it), or one of RANGE_STAGES.
``end`` is the offset after the entry."""

LOSS, DROPPED = "lost", "dropped"
RANGE_STAGES = (LOSS, DROPPED)
"""Entries that stand for the offsets from ``kafka.offset`` to before ``end``. Their ``key`` and ``value`` are null.

LOSS: retention removed the records before ingest. DROPPED: ingest left the records out, by the input's shape or as repeats."""


def raw_schema(key: pa.DataType, value: pa.DataType) -> pa.Schema:
    """The columns of a raw table, without ``order``. A side with nulls alone has no type yet, and no column."""
    sides = [pa.field(name, kind) for name, kind in (("key", key), ("value", value)) if not pa.types.is_null(kind)]
    ids = [pa.field("key_schema_id", pa.int32()), pa.field("value_schema_id", pa.int32())]
    return pa.schema([pa.field("kafka", KAFKA_TYPE), *sides, *ids])


def loss_rows(topic: str, ranges: Iterable[OffsetRange], now: int) -> list[pa.RecordBatch]:
    """Side-table rows for offset ranges that retention removed, one batch per range. ``now``: milliseconds since the epoch."""
    return [
        pa.RecordBatch.from_pylist(
            [
                {
                    "kafka": {"topic": topic, "partition": part.partition, "offset": part.first, "time": now * 1000},
                    "stage": LOSS,
                    "end": part.end,
                    "error": f"offsets {part.first} to {part.end - 1} were gone by retention before they were ingested",
                }
            ],
            schema=BAD_SCHEMA,
        )
        for part in ranges
    ]


def dropped_rows(kafka: pa.StructArray, firsts: pa.Array, ends: pa.Array, text: str | None) -> pa.RecordBatch:
    """Side-table rows for records that are left out, one row per range of consecutive records.

    ``kafka``: the ``kafka`` struct of one record per range, of which only place and time are kept; ``text``: why the records
    are left out. The records that a shape excludes have no text.
    """
    count = len(firsts)
    columns = dict(zip(KAFKA_TYPE.names, kafka.flatten(), strict=True))
    columns |= {"offset": firsts, "timestamp": pa.nulls(count, KAFKA_TYPE.field("timestamp").type)}
    columns["headers"] = pa.nulls(count, HEADERS_TYPE)
    place = pa.StructArray.from_arrays([columns[name] for name in KAFKA_TYPE.names], fields=list(KAFKA_TYPE))
    nulls = pa.nulls(count, pa.binary())
    stages = pa.repeat(pa.scalar(DROPPED), count)
    return pa.RecordBatch.from_arrays(
        [place, nulls, nulls, stages, pa.repeat(pa.scalar(text, pa.string()), count), ends], schema=BAD_SCHEMA
    )


MAX_RECORDS = 1_000_000
"""The most records in one file. The limit keeps a batch cheap if the batch needs one record of the file."""


_CONSTANT = ["kafka.topic", "kafka.partition", "key_schema_id", "value_schema_id"]
_ASCENDING = ("kafka.offset", "kafka.timestamp", "kafka.time")
_ORDER_COLUMNS = (f"{ORDER}.high", f"{ORDER}.low")
"""Parquet's dictionary suits the columns with few values, and its delta encoding (DELTA_BINARY_PACKED) suits the ascending
columns. A trial dictionary for every column would double the time of a write."""


_WRITE_FAILURE = "can't be written"


class RangeWriter:
    """Writes the batches of one Kafka partition, in offset order, as sorted files of a table.

    A file has one schema: when a batch is wider than the one before (a record with a newer writer schema came), the next
    file begins. Files that no commit names are invisible. A failed step removes them.
    """

    def __init__(self, table_uri: str, partition: int, name: str = "part") -> None:
        """``name``: the prefix of the files' names."""
        self._uri = table_uri
        self._partition = partition
        self._name = name
        self._open: _OpenFile | None = None
        self._finished_files: list[tuple[DataFile, pa.Schema]] = []

    def __enter__(self) -> RangeWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._open is not None:
            self._open.abandon()
            self._open = None

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        file = self._open
        if file is not None and (not file.schema.equals(batch.schema) or file.records >= MAX_RECORDS):
            self.close()
            file = None
        if file is None:
            file = self._open = _OpenFile(self._uri, self._partition, batch.schema, self._name)
        file.write(batch)

    def close(self) -> None:
        if self._open is not None:
            self._finished_files.append((self._open.finish(), self._open.schema))
            self._open = None

    @property
    def files(self) -> list[tuple[DataFile, pa.Schema]]:
        """The finished files, each with its own Arrow schema."""
        return self._finished_files


class PartitionWriters(dict[int, RangeWriter]):
    """Partition → its writer, from its first use on. A context that leaves no file open."""

    def __init__(self, table_uri: str, name: str) -> None:
        """``name``: what the files' names begin with."""
        super().__init__()
        self._uri, self._name = table_uri, name
        self._writers = ExitStack()

    def __missing__(self, partition: int) -> RangeWriter:
        writer = self[partition] = self._writers.enter_context(RangeWriter(self._uri, partition, self._name))
        return writer

    def __enter__(self) -> PartitionWriters:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writers.__exit__(kind, error, trace)

    @property
    def files(self) -> list[DataFile]:
        """The finished files of all partitions."""
        return [item for writer in self.values() for item, _ in writer.files]


class _OpenFile:
    def __init__(self, table_uri: str, partition: int, schema: pa.Schema, name: str) -> None:
        self.schema = schema
        self.records = 0
        self._partition = partition
        self._path = f"{name}-{partition:05d}-{uuid.uuid4().hex}.parquet"
        self._uri = storage.join(table_uri, self._path)
        self._first: int | None = None
        self._last = 0
        self._low: int | None = None
        self._high = 0
        self._orders: list[tuple[Order, Order]] = []
        sorted_columns = _ASCENDING + (_ORDER_COLUMNS if ORDER in schema.names else ())
        system, path = storage.filesystem(self._uri)
        with storage.access_errors(self._uri, _WRITE_FAILURE):
            system.create_dir(path.rsplit("/", 1)[0], recursive=True)
            self._writer = pq.ParquetWriter(
                path,
                schema,
                filesystem=system,
                compression="snappy",
                use_dictionary=_CONSTANT,  # type: ignore[arg-type]  # a sequence of names too
                column_encoding=dict.fromkeys(sorted_columns, "DELTA_BINARY_PACKED"),
                # Rows are sorted by offset. No reader could skip a row group by the statistics of another column.
                write_statistics=sorted_columns,  # type: ignore[arg-type]
            )

    def write(self, batch: pa.RecordBatch) -> None:
        kafka = batch.column("kafka")
        offsets, times = pc.struct_field(kafka, "offset"), pc.struct_field(kafka, "time")
        if self._first is None:
            self._first, self._low = offsets[0].as_py(), times[0].value // 1000
        self._last, self._high = offsets[-1].as_py(), times[-1].value // 1000
        if ORDER in self.schema.names:
            self._orders.append(_bounds(batch.column(ORDER)))
        self.records += batch.num_rows
        with storage.access_errors(self._uri, _WRITE_FAILURE):
            self._writer.write_batch(batch)

    def abandon(self) -> None:
        storage.abandon(self._writer)

    def finish(self) -> DataFile:
        with storage.access_errors(self._uri, _WRITE_FAILURE):
            self._writer.close()
        return DataFile(
            self._path,
            storage.file_size(self._uri),
            self.records,
            self._partition,
            self._first,
            self._last,
            self._low,
            self._high,
            min_order=_lowest_order([low for low, _ in self._orders]),
            max_order=_highest_order([high for _, high in self._orders]),
        )


def _bounds(orders: pa.StructArray) -> tuple[Order, Order]:
    """The lowest high and low, and the highest high and low. Delta's statistics are bounds of each column by itself."""
    high, low = (pc.min_max(pc.struct_field(orders, name)).as_py() for name in ("high", "low"))
    return (high["min"], low["min"]), (high["max"], low["max"])


def _lowest_order(orders: Sequence[Order]) -> Order | None:
    return (min(high for high, _ in orders), min(low for _, low in orders)) if orders else None


def _highest_order(orders: Sequence[Order]) -> Order | None:
    return (max(high for high, _ in orders), max(low for _, low in orders)) if orders else None


def order_bounds(files: Sequence[DataFile]) -> tuple[Order | None, Order | None]:
    """``min_order`` and ``max_order`` of a file with the records of some files."""
    lows = [item.min_order for item in files if item.min_order is not None]
    highs = [item.max_order for item in files if item.max_order is not None]
    return _lowest_order(lows) if len(lows) == len(files) else None, _highest_order(highs)


_ROWS = 50_000


def highest_times(state: RawState | None) -> dict[int, int]:
    """Partition → the highest time of all records before its next offset, in milliseconds since the epoch.

    Quarantined and left-out records count, and records that retention removed. A table of an older version knows the times
    of the records that it holds or held.
    """
    if state is None:
        return {}
    highest = dict(state.retention_time)
    for times in (state.times, _of_files(state.files)):
        for partition, time in times.items():
            highest[partition] = max(highest.get(partition, 0), time)
    return highest


def _of_files(files: Sequence[DataFile]) -> dict[int, int]:
    highest: dict[int, int] = {}
    for item in files:
        if item.max_time is not None and item.partition is not None and not is_replay(item):
            highest[item.partition] = max(highest.get(item.partition, 0), item.max_time)
    return highest


def time_floors(files: Sequence[DataFile], retention_time: Mapping[int, int] | None = None) -> dict[str, int]:
    """File path → the highest record time of its partition before it, only where that is above the file's lowest.

    ``files`` are all files of the table, sorted by partition and offset; ``retention_time``: partition → the highest time of
    the records that retention removed. A replay's records have their final time.
    """
    floors: dict[str, int] = {}
    partition, highest = None, None
    for item in files:
        if is_replay(item):
            continue
        if item.partition != partition:
            partition, highest = item.partition, (retention_time or {}).get(item.partition or 0)
        if highest is not None and item.min_time is not None and item.min_time < highest:
            floors[item.path] = highest
        if item.max_time is not None:
            highest = item.max_time if highest is None else max(highest, item.max_time)
    return floors


def carry_times(kafka: pa.StructArray, floor: int | None) -> pa.StructArray:
    """Places of one partition in the order of their offsets, with times that begin at ``floor`` (microseconds since the
    epoch; None: at their own) and never run back."""
    at = kafka.type.get_field_index("time")
    if at < 0:
        return kafka
    parts = kafka.flatten()
    times = pc.max_element_wise(parts[at].cast(pa.int64()), pa.scalar(floor, pa.int64()))
    parts[at] = pc.cumulative_max(times).cast(parts[at].type)
    return struct_of(kafka.type, parts, len(kafka), is_valid(kafka))


def last_time(kafka: pa.StructArray) -> int | None:
    """The carried time that some places end with, in microseconds since the epoch."""
    return None if kafka.type.get_field_index("time") < 0 else pc.struct_field(kafka, "time")[-1].value


def running_orders(orders: pa.Array, floor: Order) -> pa.StructArray:
    """Orders of one partition's records by offset, which begin at ``floor`` and never run back. Null: no order of its own."""
    high, low = (
        np.concatenate(
            [[floor_number], pc.fill_null(pc.struct_field(orders, name), no_number).to_numpy(zero_copy_only=False)]
        )
        for name, floor_number, no_number in zip(("high", "low"), floor, _NO_ORDER, strict=True)
    )
    if not ((high[1:] > high[:-1]) | ((high[1:] == high[:-1]) & (low[1:] >= low[:-1]))).all():
        high, low = _running_maximum(high, low)
    return pa.StructArray.from_arrays([pa.array(high[1:]), pa.array(low[1:])], fields=list(ORDER_TYPE))


def _running_maximum(
    high: npt.NDArray[np.int64], low: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The highest pair up to each place. ``low`` counts only where ``high`` is the highest so far."""
    highest = np.maximum.accumulate(high)
    values, ranks = np.unique(low, return_inverse=True)
    # Each run of one highest ``high`` has ranks of its own, above the ranks of the run before.
    base = np.cumsum(np.concatenate([[0], highest[1:] != highest[:-1]])) * len(values)
    ranks = np.maximum.accumulate(base + np.where(high == highest, ranks, 0)) - base
    return highest, values[ranks]


def order_at(orders: pa.StructArray, place: int) -> Order:
    """The carried order at a place."""
    return pc.struct_field(orders, "high")[place].as_py(), pc.struct_field(orders, "low")[place].as_py()


def with_orders(records: pa.RecordBatch, floor: Order | None) -> tuple[pa.RecordBatch, Order | None]:
    """Records of one partition with carried orders, and the order at their end.

    ``floor``: the order before the records. None where no record had an order: the records then get the column only if they
    bring it.
    """
    at = records.schema.get_field_index(ORDER)
    if not records.num_rows or (at < 0 and floor is None):
        return records, floor
    own_orders = records.column(at) if at >= 0 else pa.nulls(records.num_rows, ORDER_TYPE)
    orders = running_orders(own_orders, floor or LOWEST)
    records = records.append_column(ORDER, orders) if at < 0 else records.set_column(at, ORDER, orders)
    return records, order_at(orders, -1)


def orders_around(state: RawState, partition: int, offsets: npt.NDArray[np.int64]) -> tuple[Longs, Longs]:
    """The orders of the last record before each offset, and of the first record after it: two arrays of pairs. Without a record
    after an offset, the second pair is above every order. ``offsets``: sorted, of records that the table lacks.

    Reads two columns of the files around the offsets. LakeError if a file can't be read.
    """
    files = [item for item in state.files if item.partition == partition and not is_replay(item)]
    firsts, lasts = (np.array([getattr(item, name) or 0 for item in files], np.int64) for name in ("first", "last"))
    places = np.searchsorted(firsts, offsets) - 1, np.searchsorted(lasts, offsets)
    before, after = (np.tile(np.array(LOWEST, np.int64), (len(offsets), 1)) for _ in places)
    for file in np.unique(np.concatenate(places)).tolist():
        if not 0 <= file < len(files) or files[file].max_order is None:
            continue  # the file has no orders: LOWEST
        table = storage.read_file(storage.join(state.table.uri, files[file].path), ["kafka.offset", ORDER])
        table = table.flatten().flatten()
        file_offsets = table["kafka.offset"].to_numpy()
        orders = np.column_stack([table[_ORDER_COLUMNS[side]].fill_null(LOWEST[side]).to_numpy() for side in (0, 1)])
        for pairs, is_here, step in ((before, places[0] == file, -1), (after, places[1] == file, 0)):
            pairs[is_here] = orders[np.searchsorted(file_offsets, offsets[is_here]) + step]
    return before, np.where((places[1] < len(files))[:, None], after, np.iinfo(np.int64).max)


def lift(table_uri: str, item: DataFile, time: int, order: Order | None, name: str) -> list[DataFile]:
    """Write the records of an uncommitted file to another file, with times and orders that begin at a floor.

    ``time``: milliseconds since the epoch; ``order``: None where the records need no other order; ``name``: the beginning of
    the new file's name. The old file stays, because Spark may run the task again. LakeError if a file can't be read or
    written.
    """
    with RangeWriter(table_uri, item.partition or 0, name) as writer:
        for batch in storage.read_parts(storage.join(table_uri, item.path), _ROWS):
            place = batch.schema.get_field_index("kafka")
            kafka = carry_times(batch.column(place), time * 1000)
            batch = batch.set_column(place, batch.schema.field(place), kafka)
            if order is not None:
                batch, order = with_orders(batch, order)
            writer.write(batch)
    return [data_file for data_file, _ in writer.files]
