"""The files of one batch of ingest, and the columns of the raw table after it.

The columns of a raw table after a batch: what its files were written with, as one schema.

The files of one batch of ingest, as Spark tasks write them; a later commit names them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.codecs.evolution import holds, merge_types
from zync_assets.codecs.fields import Note
from zync_assets.errors import SchemaError
from zync_assets.ingest.source import Arrived, Source, assuming, first_schemas, notes_of, read_chunks
from zync_assets.lake import quarantine, storage
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw_files import RangeWriter, lift, lost_rows, raw_schema
from zync_assets.lake.storage import has_longs
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Input
from zync_assets.spark.tasks import run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def settled_types(source: Source, schemas: Sequence[pa.Schema]) -> Source:
    """The source with its sides' types after all files, in their order; what can't be merged has no say."""
    sides = {"key": source.key_type, "value": source.value_type}
    for schema in schemas:
        for name in sides.keys() & set(schema.names):
            with suppress(SchemaError):
                sides[name] = merge_types(sides[name], schema.field(name).type, name)
    return replace(source, key_type=sides["key"], value_type=sides["value"])


def can_read(source: Source, schema: pa.Schema) -> bool:
    """Whether a file can be read with the source's types. A new file has no long where the column is a double: only of a
    column that was widened later do readers expect that."""
    sides = {"key": source.key_type, "value": source.value_type}
    given = [
        (kind, schema.field(name).type) for name, kind in sides.items() if kind is not None and name in schema.names
    ]
    return all(holds(kind, found) and not has_longs(found, kind) for kind, found in given)


def table_schema(known: pa.Schema, source: Source) -> pa.Schema:
    """The raw table's columns after a batch. Present columns keep their order."""
    wanted = raw_schema(source.key_type or pa.null(), source.value_type or pa.null())
    if set(known.names) & {"key", "value"} == set(wanted.names) & {"key", "value"}:
        return pa.schema(
            [wanted.field(name) if name in ("key", "value") else known.field(name) for name in known.names]
        )
    return wanted


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
class Reading:
    """The offsets of a topic to read, and their source. One Spark task reads each of ``parts``.

    ``now``: the time of ingest; ``table``: the raw table's present columns; ``attempt``: the number in the names of side
    files; ``reached``: partition → the highest time of the records before the batch. Times are milliseconds since the epoch.
    """

    spark: SparkSession = field(repr=False)
    lake: str
    item: Input
    source: Source = field(repr=False)
    parts: Sequence[OffsetRange]
    now: int
    table: pa.Schema = field(repr=False)
    attempt: int
    reached: Mapping[int, int] = field(default_factory=dict)

    @property
    def uri(self) -> str:
        return storage.raw_uri(self.lake, self.item.pool, self.item.topic)

    @property
    def side_uri(self) -> str:
        return storage.quarantine_uri(self.lake, self.item.pool, self.item.topic)

    @property
    def side_name(self) -> str:
        """The prefix of the names of side files."""
        return quarantine.file_name(self.attempt)


@dataclass(frozen=True)
class BatchFiles:
    """The uncommitted files of one batch.

    ``schema``: the raw table's columns after the batch; ``source``: the source with the column types after the batch;
    ``arrived``: the writer schemas of the batch; ``dropped``: side files with the offset ranges that a shape excludes;
    ``left_out``: partition → number of excluded records; ``reached``: the time of the last record of each part, in
    milliseconds since the epoch, 0 for a part without records; ``notes``: side → the note of Kafka Connect's schemas for the
    whole key or value.
    """

    files: list[DataFile]
    bad: list[DataFile]
    schema: pa.Schema
    source: Source
    arrived: list[Arrived]
    dropped: list[DataFile] = field(default_factory=list)
    left_out: Mapping[int, int] = field(default_factory=dict)
    reached: Sequence[int] = ()
    notes: Mapping[str, Note] = field(default_factory=dict[str, Note])


def write_plain(reading: Reading) -> BatchFiles:
    """Read, decode and write the records as they are."""
    assumed: list[Arrived] = []
    while True:
        source = reading.source
        written = _write(reading)
        pairs = sorted((pair for part in written for pair in part.files), key=lambda pair: _place(pair[0]))
        schemas = [schema for _, schema in pairs]
        arrived = [found for part in written for found in part.arrived]
        if firsts := first_schemas(source, reading.item, arrived):
            # Only now is known which schema came first, so that the others are changes.
            assumed += firsts
            reading = replace(reading, source=assuming(source, firsts))
            continue
        settled = settled_types(source, schemas)
        if all(can_read(settled, found) for found in schemas):
            return BatchFiles(
                [found for found, _ in pairs],
                [found for part in written for found in part.bad],
                table_schema(reading.table, settled),
                settled,
                [*assumed, *arrived],
                reached=[part.reached for part in written],
                notes=notes_of([*assumed, *arrived]),
            )
        # Two tasks found writer schemas that can't share a column. The first schema gets the column, as within one task,
        # and the files of the other tasks stay invisible. The loop ends because each round widens the types.
        reading = replace(reading, source=settled)


def write_lost(reading: Reading, lost: Sequence[OffsetRange]) -> list[DataFile]:
    """Write the offset ranges that Kafka's retention removed to files of the side table."""
    files: list[DataFile] = []
    for row in lost_rows(reading.item.topic, lost, reading.now):
        with RangeWriter(reading.side_uri, row.column("kafka")[0]["partition"].as_py(), reading.side_name) as writer:
            writer.write(row)
        files += [found for found, _ in writer.files]
    return files


@dataclass(frozen=True)
class _Written:
    """The files that one task wrote: data files with their schemas, and quarantine files. Also the writer schemas that the task
    read first, and the time of the task's last record."""

    files: list[tuple[DataFile, pa.Schema]]
    bad: list[DataFile]
    arrived: list[Arrived]
    reached: int


def _write(reading: Reading) -> list[_Written]:
    """Read, decode and write in one Spark job: what became of each of the reading's parts."""
    before = dict(reading.reached)
    source, parts, now, uri = reading.source, reading.parts, reading.now, reading.uri
    side_uri, side_name = reading.side_uri, reading.side_name

    def work(index: int) -> _Written:
        part = parts[index]
        arrived: list[Arrived] = []
        reached = before.get(part.partition, 0)
        data, side = RangeWriter(uri, part.partition), RangeWriter(side_uri, part.partition, side_name)
        with data, side:
            for chunk in read_chunks(source, part, now, reached=reached):
                data.write(chunk.records)
                side.write(chunk.bad)
                arrived.extend(chunk.arrivals)
                reached = chunk.reached
        return _Written(data.files, [found for found, _ in side.files], arrived, reached)

    return run_tasks(reading.spark, len(parts), work)


def with_carried_times(reading: Reading, made: BatchFiles) -> tuple[BatchFiles, dict[int, int]]:
    """The files with times that never decrease from part to part, and partition → the highest time after the batch.

    A task does not know the times of the part before its own. A file with a lower time than that part is written again. This
    is rare: timestamps ascend in most topics, and a batch without a backlog has one part per partition.
    """
    ends, floors = dict(reading.reached), dict[OffsetRange, int]()
    for part, reached in sorted(zip(reading.parts, made.reached, strict=True)):
        floors[part] = ends.get(part.partition, 0)
        ends[part.partition] = max(floors[part], reached)
    starts = sorted((part.partition, part.first) for part in floors)
    lows = {(part.partition, part.first): low for part, low in floors.items()}

    def floor(item: DataFile) -> int:
        return lows[starts[bisect_right(starts, _place(item)) - 1]]

    written = (
        (reading.uri, "part", made.files),
        (reading.side_uri, reading.side_name, [*made.bad, *made.dropped]),
    )
    late = [
        (uri, item, floor(item), name)
        for uri, name, files in written
        for item in files
        if (item.min_time or 0) < floor(item)
    ]
    if not late:
        return made, ends
    lifted = run_tasks(reading.spark, len(late), lambda index: lift(*late[index]))
    for uri, item, _, _ in late:
        storage.remove_file(storage.join(uri, item.path))
    others = {item.path: found for (_, item, _, _), found in zip(late, lifted, strict=True)}

    def settled(files: Sequence[DataFile]) -> list[DataFile]:
        return [found for item in files for found in others.get(item.path, [item])]

    files, bad, dropped = settled(made.files), settled(made.bad), settled(made.dropped)
    return replace(made, files=files, bad=bad, dropped=dropped), ends


def _place(item: DataFile) -> tuple[int, int]:
    return item.partition or 0, item.first or 0
