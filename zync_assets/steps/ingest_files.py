"""The files of one batch of ingest, as Spark tasks write them; a later commit names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.kafka.source import Arrived, Source, read_chunks
from zync_assets.lake import quarantine, storage
from zync_assets.lake.tables import DataFile
from zync_assets.lake.writer import RangeWriter
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Input
from zync_assets.records import lost_rows
from zync_assets.steps import schema_changes
from zync_assets.steps.raw_columns import can_read, settled_types, table_schema
from zync_assets.steps.tasks import run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Reading:
    """What of a topic is to be read, and as what: a Spark task for each of ``parts``. ``now``: the time of ingest,
    milliseconds since the epoch; ``table``: the raw table's columns so far; ``attempt``: the number that side files carry."""

    spark: SparkSession = field(repr=False)
    lake: str
    item: Input
    source: Source = field(repr=False)
    parts: Sequence[OffsetRange]
    now: int
    table: pa.Schema = field(repr=False)
    attempt: int

    @property
    def uri(self) -> str:
        return storage.raw_uri(self.lake, self.item.pool, self.item.topic)

    @property
    def side_uri(self) -> str:
        return storage.quarantine_uri(self.lake, self.item.pool, self.item.topic)

    @property
    def side_name(self) -> str:
        """What the names of side files begin with."""
        return quarantine.file_name(self.attempt)


@dataclass(frozen=True)
class BatchFiles:
    """What one batch wrote; no commit names it yet.

    ``schema``: the raw table's columns after it; ``source``: with the types that records are decoded to after it;
    ``arrived``: the writer schemas that came; ``dropped``: side files with the ranges that a shape left out; ``left_out``:
    how many records of each partition these are.
    """

    files: list[DataFile]
    bad: list[DataFile]
    schema: pa.Schema
    source: Source
    arrived: list[Arrived]
    dropped: list[DataFile] = field(default_factory=list)
    left_out: Mapping[int, int] = field(default_factory=dict)


def write_plain(reading: Reading) -> BatchFiles:
    """Read, decode and write the records as they are."""
    assumed: list[Arrived] = []
    while True:
        source = reading.source
        files, schemas, bad, arrived = _write(reading)
        if firsts := schema_changes.first_schemas(source, reading.item, arrived):
            # Only now is known which schema came first, so that the others are changes.
            assumed += firsts
            reading = replace(reading, source=schema_changes.assuming(source, firsts))
            continue
        settled = settled_types(source, schemas)
        if all(can_read(settled, found) for found in schemas):
            return BatchFiles(files, bad, table_schema(reading.table, settled), settled, [*assumed, *arrived])
        # Tasks met writer schemas that can't share a column: the first has it, as within one task; the files of the
        # others stay invisible. Each time the types have grown, so that this ends.
        reading = replace(reading, source=settled)


def write_lost(reading: Reading, lost: Sequence[OffsetRange]) -> list[DataFile]:
    """Files of the side table with what retention took."""
    files: list[DataFile] = []
    for row in lost_rows(reading.item.topic, lost, reading.now):
        with RangeWriter(reading.side_uri, row.column("kafka")[0]["partition"].as_py(), reading.side_name) as writer:
            writer.write(row)
        files += [found for found, _ in writer.files]
    return files


@dataclass(frozen=True)
class _Written:
    """What one task wrote: data files with their schemas, and quarantine files; and the writer schemas that it met first."""

    files: list[tuple[DataFile, pa.Schema]]
    bad: list[DataFile]
    arrived: list[Arrived]


def _write(reading: Reading) -> tuple[list[DataFile], list[pa.Schema], list[DataFile], list[Arrived]]:
    """Read, decode and write in one Spark job. Returns data files, their schemas, quarantine files, and new schemas."""
    source, parts, now, uri = reading.source, reading.parts, reading.now, reading.uri
    side_uri, side_name = reading.side_uri, reading.side_name

    def work(index: int) -> _Written:
        part = parts[index]
        arrived: list[Arrived] = []
        data, side = RangeWriter(uri, part.partition), RangeWriter(side_uri, part.partition, side_name)
        with data, side:
            for chunk in read_chunks(source, part, now):
                data.write(chunk.records)
                side.write(chunk.bad)
                arrived.extend(chunk.arrivals)
        return _Written(data.files, [found for found, _ in side.files], arrived)

    written = run_tasks(reading.spark, len(parts), work)
    files = [pair for part in written for pair in part.files]
    files.sort(key=lambda pair: (pair[0].partition or 0, pair[0].first or 0))
    return (
        [found for found, _ in files],
        [schema for _, schema in files],
        [found for part in written for found in part.bad],
        [found for part in written for found in part.arrived],
    )
