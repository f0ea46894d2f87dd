"""The two ends of a Spark task that shapes records: Kafka → decoded columns, and shaped columns → files of the raw table.

The module ``shape`` holds the Spark SQL in the middle. The decoded records pass through the task in memory. Spark's workers
import this module, so it imports nothing that only the driver needs.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.evolution import conform, holds
from zync_assets.errors import ZyncError
from zync_assets.etl.rules.output_schemas import type_notes
from zync_assets.ingest.source import Arrived, Source, read_chunks
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw_files import KAFKA_TYPE, RangeWriter, dropped_rows, raw_schema
from zync_assets.offsets import OffsetRange
from zync_assets.spark.tasks import indexes

if TYPE_CHECKING:
    pass

CONTROL = "control"
"""The column of the one row of a task that is no record: what the reading end has to say (pickled), at the end."""
KEPT = "kept"

Types = tuple[pa.DataType | None, pa.DataType | None]


@dataclass(frozen=True)
class ReadEnd:
    """The results of the reading end. ``wider``: set if the end stopped at records that the source's types don't hold; these
    types hold the records."""

    bad: list[DataFile] = field(default_factory=list)
    wider: Types | None = None
    arrived: list[Arrived] = field(default_factory=list)
    error: ZyncError | None = None
    reached: int = 0
    """The time of the last record, milliseconds since the epoch."""


@dataclass(frozen=True)
class TaskEnd:
    """The results of one task.

    ``dropped``: side files with the offset ranges that the shape excludes; ``left_out``: the number of excluded records.
    """

    read: ReadEnd
    files: list[DataFile] = field(default_factory=list)
    dropped: list[DataFile] = field(default_factory=list)
    left_out: int = 0
    error: ZyncError | None = None


def decoded_schema(source: Source) -> pa.Schema:
    """The columns between the two ends: those of decoded records, and CONTROL."""
    sides = raw_schema(source.key_type or pa.null(), source.value_type or pa.null())
    return pa.schema([pa.field(CONTROL, pa.binary()), *sides])


@dataclass(frozen=True)
class Reader:
    """The reading end. ``refused``: (partition, offset) → why the record goes to quarantine; ``reached``: as in ``Reading``."""

    source: Source
    parts: Sequence[OffsetRange]
    now: int
    reached: Mapping[int, int]
    refused: Mapping[tuple[int, int], str]
    side_uri: str | None
    """The table of the quarantine files; None for a trial run, which writes no files."""
    side_name: str
    """The prefix of the quarantine files' names."""

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for index in indexes(batches):
            yield from self._part(self.parts[index])

    def _part(self, part: OffsetRange) -> Iterator[pa.RecordBatch]:
        schema = decoded_schema(self.source)
        refused = {offset: text for (partition, offset), text in self.refused.items() if partition == part.partition}
        wider: Types | None = None
        arrived: list[Arrived] = []
        writer = RangeWriter(self.side_uri, part.partition, self.side_name) if self.side_uri is not None else None
        reached = self.reached.get(part.partition, 0)
        try:
            with ExitStack() as stack:
                if writer is not None:
                    stack.enter_context(writer)
                for chunk in read_chunks(self.source, part, self.now, refused, reached=reached):
                    arrived.extend(chunk.arrivals)
                    reached = chunk.reached
                    wider = self._wider(chunk.records.schema)
                    if wider is not None:
                        break
                    if writer is not None:
                        writer.write(chunk.bad)
                    yield with_control(chunk.records, schema)
            bad = [item for item, _ in writer.files] if writer is not None else []
            found = ReadEnd(bad, wider, arrived, reached=reached)
        except ZyncError as error:
            found = ReadEnd(error=error)
        yield _control(found, schema)

    def _wider(self, met: pa.Schema) -> Types | None:
        own = {"key": self.source.key_type, "value": self.source.value_type}
        types = {side: met.field(side).type if side in met.names else None for side in own}
        fits = all(kind is None or _holds(own[side], kind) for side, kind in types.items())
        return None if fits else (types["key"], types["value"])


def _holds(own: pa.DataType | None, kind: pa.DataType) -> bool:
    """Whether a type has room for the values of another one, and says of them for Kafka Connect what the other one says."""
    if own is None or own.equals(kind, check_metadata=True):
        return own is not None
    return holds(own, kind) and list(type_notes(own)) == list(type_notes(kind))


def with_control(records: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Decoded records with the columns of ``decoded_schema``."""
    columns = [
        conform(records.column(item.name), item.type)
        if item.name in records.schema.names
        else pa.nulls(records.num_rows, item.type)
        for item in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _control(found: ReadEnd, schema: pa.Schema) -> pa.RecordBatch:
    columns = [pa.array([pickle.dumps(found)]) if item.name == CONTROL else pa.nulls(1, item.type) for item in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@dataclass(frozen=True)
class Writer:
    """The writing end. Its input has CONTROL, KEPT and the columns of ``schema``, in the order of offsets."""

    uri: str
    side_uri: str
    side_name: str
    schema: pa.Schema

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            found = self._write(batches)
        except ZyncError as error:
            found = TaskEnd(ReadEnd(), error=error)
        yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps(found)])], names=["found"])

    def _write(self, batches: Iterable[pa.RecordBatch]) -> TaskEnd:
        data = side = None
        read, left_out = ReadEnd(), 0
        gaps = _Gaps()
        for batch in batches:
            is_record = pc.is_null(batch.column(CONTROL))
            for text in batch.column(CONTROL).drop_null().to_pylist():
                read = pickle.loads(text)
            rows = batch.filter(is_record)
            if not rows.num_rows:
                continue
            kafka = rows.column("kafka").cast(KAFKA_TYPE)
            if data is None or side is None:
                partition = kafka[0]["partition"].as_py()
                data, side = RangeWriter(self.uri, partition), RangeWriter(self.side_uri, partition, self.side_name)
            kept = rows.column(KEPT)
            out = kafka.filter(pc.invert(kept))
            left_out += len(out)
            side.write(gaps.add(out))
            data.write(shaped_batch(kafka.filter(kept), rows.filter(kept), self.schema))
        if data is None or side is None:
            return TaskEnd(read)
        side.write(gaps.rest())
        data.close()
        side.close()
        return TaskEnd(read, [item for item, _ in data.files], [item for item, _ in side.files], left_out)


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


class _Gaps:
    """Records that are left out, as ranges. None goes over an offset that is not there: it may lie in quarantine."""

    def __init__(self) -> None:
        self._open: tuple[pa.StructArray, int, int] | None = None

    def add(self, kafka: pa.StructArray) -> pa.RecordBatch:
        """The ranges that are complete by now."""
        if not len(kafka):
            return _no_ranges()
        offsets = pc.struct_field(kafka, "offset").to_numpy()
        starts = np.concatenate([[0], np.flatnonzero(np.diff(offsets) != 1) + 1])
        ends = np.concatenate([starts[1:], [len(offsets)]]) - 1
        firsts, lasts = offsets[starts], offsets[ends] + 1
        places = kafka.take(pa.array(starts))
        if self._open is not None:
            place, first, end = self._open
            if end == firsts[0]:
                firsts = np.concatenate([[first], firsts[1:]])
            else:
                firsts, lasts = np.concatenate([[first], firsts]), np.concatenate([[end], lasts])
                places = pa.concat_arrays([place, places])
        self._open = (places.slice(len(places) - 1), int(firsts[-1]), int(lasts[-1]))
        return dropped_rows(places.slice(0, len(places) - 1), pa.array(firsts[:-1]), pa.array(lasts[:-1]))

    def rest(self) -> pa.RecordBatch:
        if self._open is None:
            return _no_ranges()
        place, first, end = self._open
        return dropped_rows(place, pa.array([first]), pa.array([end]))


def _no_ranges() -> pa.RecordBatch:
    return dropped_rows(pa.array([], KAFKA_TYPE), pa.array([], pa.int64()), pa.array([], pa.int64()))
