"""The Spark task of a replay: entries of the side table, decoded once more, with the times that they keep in the raw table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.compute import pc
from zync_assets.errors import LakeError
from zync_assets.kafka.source import Arrived, Source, arrived, bad_sides, make_decoders, record_batch
from zync_assets.lake import raw, storage
from zync_assets.lake.raw import RawState
from zync_assets.lake.tables import DataFile
from zync_assets.lake.writer import RangeWriter
from zync_assets.records import BAD_SCHEMA, KAFKA_TYPE, RANGE_STAGES

Offsets = Mapping[int, npt.NDArray[np.int64]]
"""Partition → offsets, sorted."""

_ROWS = 20_000


@dataclass(frozen=True)
class Floors:
    """The times of one partition's files.

    A record's time decides the order of outputs, and must never decrease from one offset to the next. The arrays are sorted
    by offset. Times are milliseconds since the epoch.
    """

    lasts: npt.NDArray[np.int64]
    highest: npt.NDArray[np.int64]
    """Per file: the highest time in this file and in the files before it."""
    firsts: npt.NDArray[np.int64]
    lowest: npt.NDArray[np.int64]
    """Per file: its lowest time."""
    before: int = 0
    """The highest time of the records that retention removed from before the files."""

    def time(self, offset: int, reached: int, own: int | None) -> int:
        """The time of a replayed record at ``offset``.

        ``reached``: the partition's highest time when ingest read the record, 0 if unknown; ``own``: the record's timestamp.
        """
        at = int(np.searchsorted(self.lasts, offset)) - 1
        floor = max(reached, int(self.highest[at]) if at >= 0 else 0, self.before)
        if floor:
            return floor
        after = int(np.searchsorted(self.firsts, offset))
        return min([own or 0, *self.lowest[after : after + 1].tolist()])


def floors_of(state: RawState, wanted: Offsets) -> dict[int, Floors]:
    floors: dict[int, Floors] = {}
    for partition in wanted:
        files = [item for item in raw.raw_files(state) if item.partition == partition and not raw.is_replay(item)]
        numbers = [
            np.array([getattr(item, name) or 0 for item in files], np.int64)
            for name in ("last", "max_time", "first", "min_time")
        ]
        highest = np.maximum.accumulate(numbers[1]) if files else numbers[1]
        floors[partition] = Floors(numbers[0], highest, numbers[2], numbers[3], state.reached.get(partition, 0))
    return floors


@dataclass
class Decoded:
    """The results of the task, which grow as the task runs."""

    files: list[DataFile] = field(default_factory=list)
    key_type: pa.DataType = field(default_factory=pa.null)
    value_type: pa.DataType = field(default_factory=pa.null)
    reasons: dict[tuple[int, int], str] = field(default_factory=dict)
    """(partition, offset) → why the record stays in quarantine."""
    arrived: list[Arrived] = field(default_factory=list)


@dataclass(frozen=True)
class ReplayTask:
    """The picklable arguments of the Spark task."""

    source: Source
    side_uri: str
    side_files: tuple[DataFile, ...]
    wanted: Offsets
    uri: str
    name: str
    floors: Mapping[int, Floors]

    def run(self) -> Decoded:
        """Decode and write what can be decoded, as it is."""
        found = Decoded()
        writers: dict[int, RangeWriter] = {}
        for partition, records in self.decoded(found):
            writers.setdefault(partition, RangeWriter(self.uri, partition, self.name)).write(records)
        for writer in writers.values():
            writer.close()
            found.files += [item for item, _ in writer.files]
        return found

    def look(self) -> Decoded:
        """Decode, to see what that gives; nothing is written."""
        found = Decoded()
        for _ in self.decoded(found):
            pass
        return found

    def decoded(self, found: Decoded) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Batches of decodable records with their partition, in order of partition and offset.

        Adds writer schemas and reasons to ``found`` on the way, and the column types at the end.
        """
        key, value = make_decoders(self.source)
        for partition in sorted(self.wanted):
            for rows in self._rows(partition):
                keys, values = key.decode(rows.column("key")), value.decode(rows.column("value"))
                found.arrived += arrived(partition, pc.struct_field(rows.column("kafka"), "offset"), keys, values)
                errors = bad_sides(keys, values)
                offsets = pc.struct_field(rows.column("kafka"), "offset")
                for index, (side, worst) in errors.items():
                    found.reasons[partition, offsets[index].as_py()] = f"{side}: {worst.error}"
                good = np.ones(rows.num_rows, dtype=np.bool_)
                good[list(errors)] = False
                kafka = self._timed(partition, rows.column("kafka"))
                yield partition, record_batch(kafka, keys, values).filter(pa.array(good))
        found.key_type, found.value_type = key.type, value.type

    def _rows(self, partition: int) -> Iterator[pa.RecordBatch]:
        """The wanted entries, in the order of their offsets."""
        wanted = pa.array(self.wanted[partition])
        for item in sorted(self.side_files, key=lambda item: item.first or 0):
            if item.partition != partition:
                continue
            uri = storage.join(self.side_uri, item.path)
            system, path = storage.filesystem(uri)
            try:
                with pq.ParquetFile(path, filesystem=system) as file:
                    for batch in storage.read_batches(file, _ROWS, ["kafka", "key", "value", "stage"]):
                        offsets = pc.struct_field(batch.column("kafka"), "offset")
                        mine = pc.and_(
                            pc.is_in(offsets, wanted),
                            pc.invert(pc.is_in(batch.column("stage"), pa.array(RANGE_STAGES))),
                        )
                        found = batch.filter(mine)
                        if found.num_rows:
                            yield found.cast(pa.schema([BAD_SCHEMA.field(name) for name in found.schema.names]))
            except (OSError, pa.ArrowInvalid) as error:
                raise LakeError(f"file {uri} can't be read: {error}. Restore it from a copy.") from error

    def _timed(self, partition: int, kafka: pa.Array) -> pa.Array:
        """The places with their final times."""
        rows: list[Mapping[str, Any]] = kafka.cast(KAFKA_TYPE).to_pylist()
        micros = [
            self.floors[partition].time(row["offset"], _millis(row["time"]) or 0, _millis(row["timestamp"])) * 1000
            for row in rows
        ]
        fields = [
            pa.array(micros, item.type) if item.name == "time" else pc.struct_field(kafka, item.name)
            for item in KAFKA_TYPE
        ]
        return pa.StructArray.from_arrays(fields, fields=list(KAFKA_TYPE))


def _millis(moment: Any) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)
