"""A Spark task of ingest: a range of Kafka's offsets → decoded columns → files of the raw table and of its quarantine.

``TopicReader`` reads and decodes, for inputs with and without a shape. Without a shape, ``write_part`` writes the decoded
records in the same loop. With a shape, Spark SQL stands between ``TopicReader`` and ``Writer`` (module ``shape``). The decoded
records then pass through the task in memory. Spark's workers import this module. It imports nothing that only the driver needs.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.evolution import conform, holds
from zync_assets.errors import ZyncError
from zync_assets.etl.rules.output_schemas import type_notes
from zync_assets.ingest.carrier import Carrier
from zync_assets.ingest.order import has_orders, source_name
from zync_assets.ingest.repeats import Gaps
from zync_assets.ingest.source import NewSchema, TopicSource, read_chunks
from zync_assets.lake.log import DataFile, Order
from zync_assets.lake.raw import ORDER
from zync_assets.lake.raw_files import (
    KAFKA_TYPE,
    ORDER_TYPE,
    RangeWriter,
    raw_schema,
)
from zync_assets.offsets import Mark, OffsetRange
from zync_assets.spark.tasks import indexes

CONTROL = "control"
"""The column of the one row of a task that is no record. The row is the last one and holds the pickled ``ReadEnd``."""
KEPT = "kept"

Types = tuple[pa.DataType | None, pa.DataType | None]
"""The types of keys and of values; None for a side whose type is not known."""


def side_types(schema: pa.Schema) -> Types:
    """The types of the columns ``key`` and ``value``, as far as they are there."""
    key, value = (schema.field(side).type if side in schema.names else None for side in ("key", "value"))
    return key, value


@dataclass
class ReadEnd:
    """The results of the reading half of a task.

    ``wider``: set if the half stopped at records that the source's types don't hold; these types hold the records.
    """

    bad: list[DataFile] = field(default_factory=list)
    wider: Types | None = None
    new_schemas: list[NewSchema] = field(default_factory=list)
    error: ZyncError | None = None
    last_time: int = 0
    """The time of the last record, milliseconds since the epoch."""
    mark: Mark | None = None
    """The last record; None without records."""
    domain: str | None = None
    """The ``source.name`` of the first Debezium envelope."""


@dataclass(frozen=True)
class TaskEnd:
    """The results of one task.

    ``files``: data files with their schemas; ``dropped``: side files with the offset ranges that the shape excludes;
    ``left_out``: the number of excluded records; ``first_order``: the order of the first record; ``last_order``: the order of
    the last record, None where no record has an order; ``position``, ``goes_back``: as in ``Carrier``.
    """

    read: ReadEnd
    files: list[tuple[DataFile, pa.Schema]] = field(default_factory=list)
    dropped: list[DataFile] = field(default_factory=list)
    left_out: int = 0
    error: ZyncError | None = None
    first_order: Order | None = None
    last_order: Order | None = None
    position: Order | None = None
    goes_back: bool = False


def decoded_schema(source: TopicSource) -> pa.Schema:
    """The columns between the two halves: those of decoded records with their own orders, and CONTROL."""
    sides = raw_schema(source.key_type or pa.null(), source.value_type or pa.null())
    orders = [pa.field(ORDER, ORDER_TYPE)] if has_orders(source.order, source.value_type) else []
    return pa.schema([pa.field(CONTROL, pa.binary()), *sides, *orders])


@dataclass(frozen=True)
class TopicReader:
    """The reading half of a task.

    ``times``, ``orders``: as in ``RangeReading``; ``rejections``: (partition, offset) → why the record goes to quarantine.
    """

    source: TopicSource
    parts: Sequence[OffsetRange]
    now: int
    times: Mapping[int, int]
    orders: Mapping[int, Order] | None
    rejections: Mapping[tuple[int, int], str]
    side_uri: str | None
    """The table of the quarantine files; None for a trial run, which writes no files."""
    file_prefix: str
    """The prefix of the new files' names."""

    def records(self, part: OffsetRange, end: ReadEnd) -> Iterator[pa.RecordBatch]:
        """The decodable records of a part. The bad records go to files of the side table. ``end`` grows on the way, and is
        complete at the end of the iteration."""
        rejections = {
            offset: text for (partition, offset), text in self.rejections.items() if partition == part.partition
        }
        end.last_time = self.times.get(part.partition, 0)
        with ExitStack() as stack:
            side: RangeWriter | None = None
            if self.side_uri is not None:
                side = stack.enter_context(RangeWriter(self.side_uri, part.partition, self.file_prefix))
            for chunk in read_chunks(self.source, part, self.now, rejections, floor=end.last_time):
                end.new_schemas.extend(chunk.new_schemas)
                end.last_time, end.mark = chunk.last_time, chunk.mark
                if side is not None:
                    side.write(chunk.bad)
                if end.domain is None and ORDER in chunk.records.schema.names:
                    end.domain = source_name(chunk.records)
                yield chunk.records
        if side is not None:
            end.bad.extend(item for item, _ in side.files)

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Decoded records for Spark SQL, and the control row of each part."""
        for index in indexes(batches):
            yield from self._part(self.parts[index])

    def _part(self, part: OffsetRange) -> Iterator[pa.RecordBatch]:
        schema = decoded_schema(self.source)
        end = ReadEnd()
        try:
            for records in self.records(part, end):
                end.wider = self._wider(records.schema)
                if end.wider is not None:
                    break
                yield with_control(records, schema)
        except ZyncError as error:
            end = ReadEnd(error=error)
        yield _control(end, schema)

    def _wider(self, schema: pa.Schema) -> Types | None:
        types = side_types(schema)
        pairs = zip((self.source.key_type, self.source.value_type), types, strict=True)
        return None if all(kind is None or _has_room(own, kind) for own, kind in pairs) else types


def write_part(reader: TopicReader, index: int, uri: str) -> TaskEnd:
    """The whole task of an input without a shape: the records go from Kafka to files of the raw table as they are."""
    part, end = reader.parts[index], ReadEnd()
    orders = Carrier(reader.orders, part.partition)
    with RangeWriter(uri, part.partition, reader.file_prefix) as data:
        for records in reader.records(part, end):
            data.write(orders.carry(records))
    places = orders.first, orders.last, orders.position, orders.goes_back
    return TaskEnd(end, data.files, [], 0, None, *places)


def _has_room(column_type: pa.DataType | None, kind: pa.DataType) -> bool:
    """Whether a type has room for the values of another type, and has the same notes of Kafka Connect."""
    if column_type is None or column_type.equals(kind, check_metadata=True):
        return column_type is not None
    return holds(column_type, kind) and list(type_notes(column_type)) == list(type_notes(kind))


def with_control(records: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Decoded records with the columns of ``decoded_schema``."""
    columns = [
        conform(records.column(item.name), item.type)
        if item.name in records.schema.names
        else pa.nulls(records.num_rows, item.type)
        for item in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _control(end: ReadEnd, schema: pa.Schema) -> pa.RecordBatch:
    columns = [pa.array([pickle.dumps(end)]) if item.name == CONTROL else pa.nulls(1, item.type) for item in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@dataclass(frozen=True)
class Writer:
    """The writing half of a task with a shape.

    Its input has CONTROL, KEPT and the columns of ``schema``, in the order of offsets.
    """

    uri: str
    side_uri: str
    file_prefix: str
    schema: pa.Schema
    orders: Mapping[int, Order] | None
    """As in ``RangeReading``."""

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            with ExitStack() as writers:
                end = self._write(batches, writers)
        except ZyncError as error:
            end = TaskEnd(ReadEnd(), error=error)
        yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps(end)])], names=["found"])

    def _write(self, batches: Iterable[pa.RecordBatch], writers: ExitStack) -> TaskEnd:
        data = side = orders = None
        read, left_out = ReadEnd(), 0
        gaps = Gaps()
        for batch in batches:
            is_record = pc.is_null(batch.column(CONTROL))
            for text in batch.column(CONTROL).drop_null().to_pylist():
                read = pickle.loads(text)
            rows = batch.filter(is_record)
            if not rows.num_rows:
                continue
            kafka = rows.column("kafka").cast(KAFKA_TYPE)
            if data is None or side is None or orders is None:
                partition = kafka[0]["partition"].as_py()
                data = writers.enter_context(RangeWriter(self.uri, partition, self.file_prefix))
                side = writers.enter_context(RangeWriter(self.side_uri, partition, self.file_prefix))
                orders = Carrier(self.orders, partition)
            rows = orders.carry(rows)
            in_shape = rows.column(KEPT)
            out = kafka.filter(pc.invert(in_shape))
            left_out += len(out)
            side.write(gaps.add(out))
            data.write(shaped_batch(kafka.filter(in_shape), rows.filter(in_shape), self.schema))
        if data is None or side is None or orders is None:
            return TaskEnd(read)
        side.write(gaps.last_range())
        data.close()
        side.close()
        dropped = [item for item, _ in side.files]
        return TaskEnd(read, data.files, dropped, left_out, first_order=orders.first, last_order=orders.last)


def shaped_batch(kafka: pa.Array, rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Shaped rows with the columns of the raw table; ``kafka`` in place of theirs."""
    columns: list[pa.Array] = []
    for item in schema:
        if item.name == "kafka":
            columns.append(kafka)
        elif item.name in rows.schema.names:
            columns.append(conform(rows.column(item.name), item.type))
        else:
            columns.append(pa.nulls(rows.num_rows, item.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
