"""The files of one batch of ingest, and the columns of the raw table after the batch.

Spark tasks write the files; a later commit names them. The columns are those that the files were written with, as one
schema. A shaped topic has two sets of types: the types that its records are decoded to, and the types of its raw table. A
table without rows (``~decoded``) keeps the decoded types, with the notes of Connect's schemas. A bare column in the shape
passes its notes on to the raw table.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.codecs.evolution import holds, merge_types
from zync_assets.codecs.fields import PLAIN, Note, connect_note_of, optional, with_connect_note
from zync_assets.codecs.spark_types import arrow_type
from zync_assets.errors import SchemaError
from zync_assets.etl.rules import output_schemas
from zync_assets.etl.rules.output_schemas import Notes, shape_notes
from zync_assets.ingest.repeats import PartitionSearch, Remainder, has_positions, identifies_changes, leave_out
from zync_assets.ingest.source import NewSchema, TopicSource, first_schemas, notes_of, with_schemas, with_side_notes
from zync_assets.ingest.task import TaskEnd, TopicReader, Types, side_types, write_part
from zync_assets.lake import quarantine_table, raw, storage, tables
from zync_assets.lake.log import DataFile, Order
from zync_assets.lake.raw import RawState, WriterSchema
from zync_assets.lake.raw_files import LOWEST, RangeWriter, lift, loss_rows, raw_schema
from zync_assets.lake.storage import has_longs
from zync_assets.offsets import Mark, OffsetRange
from zync_assets.pipeline import Input
from zync_assets.pipeline_file.references import shape_in_lake_names, with_notes
from zync_assets.spark.tasks import run_tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def can_read(source: TopicSource, schema: pa.Schema) -> bool:
    """Whether a file can be read with the source's types. A new file must not hold a long in a double column. Readers expect a
    long there only if the column became a double after the file was written."""
    pairs = zip((source.key_type, source.value_type), side_types(schema), strict=True)
    return all(
        kind is None or column is None or (holds(kind, column) and not has_longs(column, kind))
        for kind, column in pairs
    )


def table_schema(schema: pa.Schema, source: TopicSource) -> pa.Schema:
    """The raw table's columns after a batch. Present columns keep their order."""
    batch_schema = raw_schema(source.key_type or pa.null(), source.value_type or pa.null())
    if set(schema.names) & {"key", "value"} == set(batch_schema.names) & {"key", "value"}:
        return pa.schema(
            [batch_schema.field(name) if name in ("key", "value") else schema.field(name) for name in schema.names]
        )
    return batch_schema


def own_writers(item: Input, writers: Sequence[WriterSchema]) -> list[WriterSchema]:
    """The writer schemas of the sides that reach the raw table as they are. A side that a shape makes has fields of its own."""
    made_sides = item.shape.sides if item.shape is not None else {}
    return [writer for writer in writers if writer.side not in made_sides]


def added_fields(old: pa.Schema, new: pa.Schema) -> Iterator[str]:
    """Dotted names of the fields that ``new`` has and ``old`` has not."""
    before, after = set(_paths(old)), _paths(new)
    return (path for path in after if path not in before)


def _paths(schema: pa.Schema) -> Iterator[str]:
    def walk(prefix: str, item: pa.Field) -> Iterator[str]:
        yield prefix + item.name
        if pa.types.is_struct(item.type):
            for child in item.type:
                yield from walk(f"{prefix}{item.name}.", child)

    for item in schema:
        yield from walk("", item)


@dataclass(frozen=True)
class RangeReading:
    """The offsets of a topic to read, and their source. Each part of ``parts`` has a Spark task.

    ``now``: the time of ingest; ``table``: the raw table's present columns; ``attempt``: the number in the names of the new
    files; ``times``, ``orders``: partition → the highest time and order of the records before the batch. ``orders`` is None for a
    table without orders. Times are milliseconds since the epoch.
    """

    spark: SparkSession = field(repr=False)
    lake: str
    item: Input
    source: TopicSource = field(repr=False)
    parts: Sequence[OffsetRange]
    now: int
    table: pa.Schema = field(repr=False)
    attempt: int
    times: Mapping[int, int] = field(default_factory=dict)
    orders: Mapping[int, Order] | None = None

    @property
    def uri(self) -> str:
        return storage.raw_uri(self.lake, self.item.pool, self.item.topic)

    @property
    def side_uri(self) -> str:
        return storage.quarantine_uri(self.lake, self.item.pool, self.item.topic)

    @property
    def file_prefix(self) -> str:
        """The prefix of the names of all new files."""
        return quarantine_table.file_name(self.attempt)


@dataclass(frozen=True)
class BatchFiles:
    """The uncommitted files of one batch.

    ``schema``: the raw table's columns after the batch; ``source``: the source with the column types after the batch;
    ``new_schemas``: the writer schemas of the batch; ``dropped``: side files with the offset ranges that a shape excludes;
    ``left_out``: partition → number of excluded records; ``last_times``: the time of the last record of each part, in
    milliseconds since the epoch, 0 for a part without records; ``first_orders``, ``last_orders``: the orders of the first and
    the last record of each part, None for a part without records or orders; ``positions``, ``goes_back``: of each part, as in
    ``Carrier``; ``repeats``: the number of changes that the connector sent again; ``domain``: the ``source.name`` of the
    first Debezium envelope; ``notes``: side → the note of Kafka Connect's schemas for the whole key or value; ``marks``:
    partition → its last record.
    """

    files: list[DataFile]
    bad: list[DataFile]
    schema: pa.Schema
    source: TopicSource
    new_schemas: list[NewSchema]
    dropped: list[DataFile]
    left_out: Mapping[int, int]
    last_times: Sequence[int]
    first_orders: Sequence[Order | None]
    last_orders: Sequence[Order | None]
    positions: Sequence[Order | None]
    goes_back: Sequence[bool]
    domain: str | None
    notes: Mapping[str, Note]
    marks: Mapping[int, Mark]
    repeats: int = 0


def reader_of(reading: RangeReading, rejections: Mapping[tuple[int, int], str], side_uri: str | None) -> TopicReader:
    """The reading half of the batch's tasks. ``rejections``, ``side_uri``: see ``TopicReader``."""
    places = reading.times, reading.orders
    return TopicReader(reading.source, reading.parts, reading.now, *places, rejections, side_uri, reading.file_prefix)


def batch_files(
    reading: RangeReading,
    ends: Sequence[TaskEnd],
    schema: pa.Schema,
    schemas: Sequence[NewSchema],
    notes: Mapping[str, Note],
) -> BatchFiles:
    """The files of a batch from the results of its tasks, a result for each part of ``reading``.

    ``reading``: with the source after the batch; the others: see ``BatchFiles``.
    """
    left_out = Counter[int]()
    domains: list[tuple[OffsetRange, str]] = []
    marks: dict[int, Mark] = {}
    for part, end in zip(reading.parts, ends, strict=True):
        left_out[part.partition] += end.left_out
        if end.read.domain is not None:
            domains.append((part, end.read.domain))
        if end.read.mark is not None:
            marks[part.partition] = max(marks.get(part.partition, end.read.mark), end.read.mark)
    return BatchFiles(
        sorted((item for end in ends for item, _ in end.files), key=_place),
        [item for end in ends for item in end.read.bad],
        schema,
        reading.source,
        list(schemas),
        [item for end in ends for item in end.dropped],
        +left_out,
        [end.read.last_time for end in ends],
        [end.first_order for end in ends],
        [end.last_order for end in ends],
        [end.position for end in ends],
        [end.goes_back for end in ends],
        min(domains)[1] if domains else None,
        notes,
        marks,
    )


def write_plain(reading: RangeReading) -> BatchFiles:
    """Read, decode and write the records as they are."""
    baseline: list[NewSchema] = []
    while True:
        reader, uri = reader_of(reading, {}, reading.side_uri), reading.uri
        ends = run_tasks(
            reading.spark,
            len(reading.parts),
            lambda index, part_reader=reader, to=uri: write_part(part_reader, index, to),
        )
        pairs = sorted((pair for end in ends for pair in end.files), key=lambda pair: _place(pair[0]))
        new_schemas = [new_schema for end in ends for new_schema in end.read.new_schemas]
        if firsts := first_schemas(reading.source, reading.item, new_schemas):
            # Only now is known which schema came first, so that the others are changes.
            baseline += firsts
            reading = replace(reading, source=with_schemas(reading.source, firsts))
            continue
        reading = replace(reading, source=with_types(reading.source, [side_types(schema) for _, schema in pairs]))
        if all(can_read(reading.source, schema) for _, schema in pairs):
            schemas = [*baseline, *new_schemas]
            return batch_files(reading, ends, table_schema(reading.table, reading.source), schemas, notes_of(schemas))
        # Two tasks found writer schemas that can't share a column. The first schema gets the column, as within one task,
        # and the files of the other tasks stay invisible. The loop ends because each round widens the types.


def write_losses(reading: RangeReading, losses: Sequence[OffsetRange]) -> list[DataFile]:
    """Write the offset ranges that Kafka's retention removed to files of the side table."""
    files: list[DataFile] = []
    for row in loss_rows(reading.item.topic, losses, reading.now):
        with RangeWriter(reading.side_uri, row.column("kafka")[0]["partition"].as_py(), reading.file_prefix) as writer:
            writer.write(row)
        files += [file for file, _ in writer.files]
    return files


def carry_times(reading: RangeReading, batch: BatchFiles) -> tuple[BatchFiles, dict[int, int], dict[int, Order]]:
    """The files with times and orders that never decrease from part to part. Also partition → the highest time, and partition
    → the highest order, after the batch.

    A task does not know the records of the part before its own. A file that begins below that part is written again. This is
    rare: timestamps and orders ascend in most topics, and a batch without a backlog has one part per partition.
    """
    times, orders = dict(reading.times), dict(reading.orders or {})
    floors: dict[OffsetRange, _Floor] = {}
    ends = zip(reading.parts, batch.last_times, batch.first_orders, batch.last_orders, strict=True)
    for part, last_time, first_order, last_order in sorted(ends, key=lambda end: end[0]):
        partition = part.partition
        order = orders.get(partition, None if reading.orders is None else LOWEST)
        is_below = order is not None and (first_order is None or first_order < order)
        floors[part] = _Floor(times.get(partition, 0), order if is_below else None)
        times[partition] = max(times.get(partition, 0), last_time)
        if last_order is not None:
            orders[partition] = last_order if order is None else max(order, last_order)
    parts = sorted(floors)
    starts = [(part.partition, part.first) for part in parts]

    def floor(item: DataFile) -> _Floor:
        return floors[parts[bisect_right(starts, _place(item)) - 1]]

    groups = (
        (reading.uri, batch.files, True),
        (reading.side_uri, [*batch.bad, *batch.dropped], False),
    )
    low_files = [
        (uri, item, floor(item).time, floor(item).order if with_order else None, reading.file_prefix)
        for uri, files, with_order in groups
        for item in files
        if floor(item).is_above(item, with_order)
    ]
    if not low_files:
        return batch, times, orders
    new_files = run_tasks(reading.spark, len(low_files), lambda index: lift(*low_files[index]))
    for uri, item, *_ in low_files:
        storage.remove_file(storage.join(uri, item.path))
    replacements = {item.path: files for (_, item, *_), files in zip(low_files, new_files, strict=True)}

    def final(files: Sequence[DataFile]) -> list[DataFile]:
        return [file for item in files for file in replacements.get(item.path, [item])]

    batch = replace(batch, files=final(batch.files), bad=final(batch.bad), dropped=final(batch.dropped))
    return batch, times, orders


def without_repeats(reading: RangeReading, batch: BatchFiles, table: RawState | None) -> BatchFiles:
    """The files without the changes that the connector sent again. ``batch``: its orders are final; ``table``: the raw table
    before the batch."""
    value = batch.source.value_type
    if not has_positions(reading.item) or value is None or not identifies_changes(value):
        return batch
    earlier_files: dict[int, list[DataFile]] = {}
    for item in table.files if table else ():
        if not raw.is_replay(item):
            earlier_files.setdefault(item.partition or 0, []).append(item)
    end_marks = _marks_of_left_out(table, earlier_files)
    before, partitions = dict(reading.orders or {}), set(end_marks)
    first_parts = {part.partition: part for part in sorted(reading.parts, reverse=True)}
    ends = zip(reading.parts, batch.positions, batch.last_orders, batch.goes_back, strict=True)
    for part, position, last_order, goes_back in sorted(ends, key=lambda end: end[0]):
        order = before.get(part.partition, LOWEST)
        # The task of a later part did not know the order at the end of the part before.
        is_below = part != first_parts[part.partition] and position is not None and position <= order
        if goes_back or is_below:
            partitions.add(part.partition)
        before[part.partition] = max(order, last_order or LOWEST)
    searches = [
        PartitionSearch(
            reading.source,
            partition,
            [item for item in batch.files if item.partition == partition],
            earlier_files.get(partition, []),
            (reading.orders or {}).get(partition, LOWEST),
            end_marks.get(partition),
            reading.uri,
            reading.side_uri,
            reading.file_prefix,
        )
        for partition in sorted(partitions & {item.partition for item in batch.files})
    ]
    remainders: list[Remainder] = run_tasks(reading.spark, len(searches), lambda index: leave_out(searches[index]))
    replacements = {path: files for part in remainders for path, files in part.files.items()}
    for path in replacements:
        storage.remove_file(storage.join(reading.uri, path))
    counts = {search.partition: part.repeats for search, part in zip(searches, remainders, strict=True) if part.repeats}
    return replace(
        batch,
        files=[file for item in batch.files for file in replacements.get(item.path, [item])],
        dropped=[*batch.dropped, *(item for part in remainders for item in part.dropped)],
        left_out={**batch.left_out, **counts},
        repeats=sum(counts.values()),
    )


def _marks_of_left_out(table: RawState | None, files: Mapping[int, Sequence[DataFile]]) -> dict[int, Mark]:
    """Partition → its last record before the batch, if the raw table left it out."""
    return {
        partition: mark
        for partition, mark in (table.marks if table else {}).items()
        if table is not None
        and table.left_out.get(partition)
        and mark.offset > max((item.last or 0 for item in files.get(partition, ())), default=-1)
    }


@dataclass(frozen=True)
class _Floor:
    """The least time and order of a part's records. ``order``: None where the part's own orders are high enough."""

    time: int
    order: Order | None

    def is_above(self, item: DataFile, with_order: bool) -> bool:
        """Whether a file of the part may have records below the floor. ``with_order``: whether its records have orders."""
        if (item.min_time or 0) < self.time:
            return True
        return with_order and self.order is not None and (item.min_order is None or item.min_order < self.order)


def _place(item: DataFile) -> tuple[int, int]:
    return item.partition or 0, item.first or 0


def decoded_types(lake: str, item: Input) -> Types | None:
    """The decoded types of a shaped topic's key and value, before the shape; None before the first batch."""
    table = tables.open_table(storage.decoded_uri(lake, item.pool, item.topic))
    return None if table is None else side_types(table.schema)


def commit_types(lake: str, item: Input, source: TopicSource, notes: Mapping[str, Note]) -> pa.Schema:
    """Keep the types that records are decoded to, with the notes of their sides; returns the columns that are kept."""
    uri = storage.decoded_uri(lake, item.pool, item.topic)
    schema = raw_schema(source.key_type or pa.null(), source.value_type or pa.null())
    table = tables.open_table(uri)
    schema = with_side_notes(schema, table.schema if table else None, notes)
    if table is None:
        tables.create_table(uri, schema, f"Types of topic {item.topic} before it is shaped; no records", [], {})
    else:
        tables.widen(table, schema)
    return schema


def with_types(source: TopicSource, types: Sequence[Types]) -> TopicSource:
    """The source with its types widened by other types. A type that can't be merged is skipped: the first type wins."""
    key, value = source.key_type, source.value_type
    for own_key, own_value in types:
        with suppress(SchemaError):
            key = key if own_key is None else merge_types(key, own_key, "key")
        with suppress(SchemaError):
            value = value if own_value is None else merge_types(value, own_value, "value")
    return replace(source, key_type=key, value_type=value)


def shaped_schema(item: Input, source: TopicSource, table: pa.Schema, frame: DataFrame) -> pa.Schema:
    """The raw table's present columns (``table``) merged with the columns of a shaped ``frame``.

    Raises SchemaError for types that can't be merged.
    """
    types: dict[str, pa.DataType] = {}
    for side in ("key", "value"):
        table_type = table.field(side).type if side in table.names else None
        try:
            kind = with_notes(arrow_type(frame.schema[side].dataType))
            side_type = output_schemas.with_notes(kind, _notes(item, source, side, kind))
            types[side] = merge_types(table_type, side_type, side)
        except SchemaError as error:
            raise SchemaError(
                f"input {item.topic}, shape: the result does not fit the columns of the raw table: {error}. Nothing was"
                " ingested. CAST the result to the type of the table. Or begin anew: give the input another pool, and its"
                " outputs another staging pool and other topics."
            ) from None
    return table_schema(table, replace(source, key_type=types["key"], value_type=types["value"]))


def shaped_notes(item: Input, source: TopicSource, before: pa.Schema, after: pa.Schema) -> dict[str, Note]:
    """Side → what Connect's schemas say of the whole key or value after the shape. ``before``, ``after``: the columns before
    and after it."""
    side_notes = {side: connect_note_of(before.field(side)) for side in ("key", "value") if side in before.names}
    return {
        side: optional(_notes(item, source, side, after.field(side).type, side_notes).get(()) or PLAIN)
        for side in ("key", "value")
        if side in after.names
    }


def _notes(
    item: Input,
    source: TopicSource,
    side: str,
    kind: pa.DataType,
    side_notes: Mapping[str, Note] = MappingProxyType({}),
) -> Notes:
    """What Connect's schemas say of a side as the shape makes it. ``kind``: its type; ``side_notes``: what they say of a whole
    key or value before it is shaped."""
    assert item.shape is not None
    types = {"key": source.key_type or pa.null(), "value": source.value_type or pa.null()}
    shape = shape_in_lake_names(item.shape, types["key"], types["value"])
    # A null value stays null: within the shaped value, the value before is there.
    columns = [
        with_connect_note(pa.field(name, type), replace(side_notes.get(name, PLAIN), required=name == side == "value"))
        for name, type in types.items()
    ]
    return shape_notes(shape.sides.get(side, side), kind, {"": pa.schema(columns)}, certain=True)
