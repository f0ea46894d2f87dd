"""Replay: records that could not be decoded, decoded once more and put into their place in the raw table.

The side table has them whole, so Kafka is not asked. One commit adds the files of all that can be decoded now, and that is
the whole of it: an entry whose offset is in the raw table lies in quarantine no more. ETL finds by the number of replays
that there is something below *seen* to look at. Killed before the commit nothing happened, after it all did; of two
replays at once the second conflicts, and looks again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.compute import pc
from zync_assets.errors import LakeError
from zync_assets.kafka.source import Arrived, Source, arrived, bad_sides, make_decoders, record_batch
from zync_assets.lake import quarantine, raw, storage
from zync_assets.lake.raw import RawState
from zync_assets.lake.tables import DataFile
from zync_assets.lake.writer import RangeWriter
from zync_assets.pipeline import Input, Pipeline
from zync_assets.records import BAD_SCHEMA, KAFKA_TYPE, RANGE_STAGES
from zync_assets.steps import schema_changes
from zync_assets.steps.ingest import source_of
from zync_assets.steps.quarantined import Selection, held
from zync_assets.steps.raw_columns import table_schema
from zync_assets.steps.tasks import run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Offsets = Mapping[int, npt.NDArray[np.int64]]
"""Partition → offsets, sorted."""

_ROWS = 20_000


@dataclass(frozen=True)
class ReplayPlan:
    """What of one topic is to be decoded once more, by its raw table's state."""

    input: Input
    state: RawState
    wanted: Offsets


@dataclass(frozen=True)
class ReplayCommit:
    """What one replay did: how many records are in the raw table now, and how many still can't be decoded."""

    topic: str
    records: int
    still_bad: int
    first_error: str


def plan_replay(pipeline: Pipeline, item: Input, selection: Selection) -> ReplayPlan | None:
    """The selected records of a topic that could not be decoded; None if there are none."""
    state = raw.open_raw(pipeline.lake, item.pool, item.topic)
    if state is None or item.shape is not None:
        return None
    # What lies there is told by a state that is not older than this one: at worst a replay came between, and ours conflicts.
    places: dict[int, list[int]] = {}
    for record in held(pipeline, Selection((item.topic,), selection.ranges)):
        if record.stage != "etl":
            places.setdefault(record.partition, []).append(record.offset)
    return ReplayPlan(item, state, {p: np.array(found, np.int64) for p, found in places.items()}) if places else None


def commit_replay(spark: SparkSession, pipeline: Pipeline, plan: ReplayPlan) -> ReplayCommit:
    """Decode, write, commit, in one Spark task: what is in quarantine is little, and types can't differ between tasks.

    Raises CommitConflict if another replay came first, SchemaChanged where the file accepts no new schema; nothing of this
    one is visible then.
    """
    item, state = plan.input, plan.state
    files = quarantine.quarantine_files(pipeline.lake, item.pool, item.topic, state.next)
    task = _Task(
        source_of(pipeline, item, state),
        storage.quarantine_uri(pipeline.lake, item.pool, item.topic),
        tuple(found for found in files if found.partition in plan.wanted),
        plan.wanted,
        state.opened.uri,
        raw.replay_name(state.replays + 1),
        _floors(state, plan.wanted),
    )
    [done] = run_tasks(spark, 1, lambda _: task.run())
    if done.files:
        source = replace(task.source, key_type=done.key_type, value_type=done.value_type)
        writers, _ = schema_changes.settled(item, source, done.arrived)
        raw.commit_replay(state, table_schema(state.schema, source), done.files, writers)
    records = sum(found.records for found in done.files)
    return ReplayCommit(item.topic, records, done.bad, done.first_error)


@dataclass(frozen=True)
class _Floors:
    """The times of one partition's files: by the time of a record its place in the order of outputs is told, and it must
    never run back. Arrays sorted by offset; milliseconds."""

    lasts: npt.NDArray[np.int64]
    highest: npt.NDArray[np.int64]
    """The highest time in the files up to each."""
    firsts: npt.NDArray[np.int64]
    lowest: npt.NDArray[np.int64]
    """The lowest time in each."""

    def time(self, offset: int, reached: int, own: int | None) -> int:
        """The time of a record that comes into its place now. ``reached``: the time reached before it when it was read,
        0 if none was; ``own``: its timestamp."""
        at = int(np.searchsorted(self.lasts, offset)) - 1
        floor = max(reached, int(self.highest[at]) if at >= 0 else 0)
        if floor:
            return floor
        after = int(np.searchsorted(self.firsts, offset))
        return min([own or 0, *self.lowest[after : after + 1].tolist()])


def _floors(state: RawState, wanted: Offsets) -> dict[int, _Floors]:
    floors: dict[int, _Floors] = {}
    for partition in wanted:
        files = [item for item in raw.raw_files(state) if item.partition == partition and not raw.is_replay(item)]
        numbers = [
            np.array([getattr(item, name) or 0 for item in files], np.int64)
            for name in ("last", "max_time", "first", "min_time")
        ]
        highest = np.maximum.accumulate(numbers[1]) if files else numbers[1]
        floors[partition] = _Floors(numbers[0], highest, numbers[2], numbers[3])
    return floors


@dataclass(frozen=True)
class _Done:
    files: list[DataFile]
    key_type: pa.DataType
    value_type: pa.DataType
    bad: int
    first_error: str
    arrived: list[Arrived]


@dataclass(frozen=True)
class _Task:
    """All that the Spark task needs; it pickles."""

    source: Source
    side_uri: str
    side_files: tuple[DataFile, ...]
    wanted: Offsets
    uri: str
    name: str
    floors: Mapping[int, _Floors]

    def run(self) -> _Done:
        key, value = make_decoders(self.source)
        files: list[DataFile] = []
        bad, first_error = 0, ""
        schemas: list[Arrived] = []
        for partition in sorted(self.wanted):
            with RangeWriter(self.uri, partition, self.name) as writer:
                for rows in self._rows(partition):
                    keys, values = key.decode(rows.column("key")), value.decode(rows.column("value"))
                    schemas += arrived(partition, pc.struct_field(rows.column("kafka"), "offset"), keys, values)
                    errors = bad_sides(keys, values)
                    if errors:
                        bad += len(errors)
                        side, worst = errors[min(errors)]
                        first_error = first_error or f"{side}: {worst.error}"
                    good = np.ones(rows.num_rows, dtype=np.bool_)
                    good[list(errors)] = False
                    kafka = self._timed(partition, rows.column("kafka"))
                    writer.write(record_batch(kafka, keys, values).filter(pa.array(good)))
            files += [found for found, _ in writer.files]
        return _Done(files, key.type, value.type, bad, first_error, schemas)

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
                    for batch in file.iter_batches(_ROWS, columns=["kafka", "key", "value", "stage"]):
                        offsets = pc.struct_field(batch.column("kafka"), "offset")
                        mine = pc.and_(
                            pc.is_in(offsets, wanted),
                            pc.invert(pc.is_in(batch.column("stage"), pa.array(RANGE_STAGES))),
                        )
                        found = batch.filter(mine)
                        if found.num_rows:
                            yield found.cast(pa.schema([BAD_SCHEMA.field(name) for name in found.schema.names]))
            except (OSError, pa.ArrowInvalid) as error:
                raise LakeError(f"file {uri} can't be read: {error}; run zync check") from error

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
