"""Replay and drop: a quarantined record is decoded once more and put into its place, or given up.

Replay puts records into their places in the raw table. The side table holds the records whole. One commit adds the files of
the records that can be decoded now. A record in the raw table is no longer in quarantine, although its entry stays in the side
table. ETL compares the number of replays with its account, and so finds the replayed records below *seen*. A kill before the
commit leaves no trace; after it, the replay is complete. Of two concurrent replays, the second conflicts and plans again.

Drop moves a record in the account of a staging pool from the class quarantined to the class dropped. The record stays where
it is.
"""

from __future__ import annotations

import pickle
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.spark_types import spark_schema
from zync_assets.errors import ZyncError
from zync_assets.etl.retries import ClassRange, carve, runs_within
from zync_assets.ingest.carrier import highest_orders, orders_between
from zync_assets.ingest.files import own_writers, shaped_schema, table_schema
from zync_assets.ingest.order import own_orders
from zync_assets.ingest.plan import source_of
from zync_assets.ingest.shape import failing_frame, resolvable, shaped_frame
from zync_assets.ingest.source import (
    NewSchema,
    TopicSource,
    bad_sides,
    make_decoders,
    new_schemas,
    notes_of,
    record_batch,
    schema_changes,
    with_lacking_fields,
    with_side_notes,
)
from zync_assets.ingest.task import KEPT, decoded_schema, shaped_batch, with_control
from zync_assets.lake import quarantine_table, raw, staging, storage
from zync_assets.lake.log import DataFile
from zync_assets.lake.quarantine_table import Selection, quarantined_records
from zync_assets.lake.raw import ORDER, RawState
from zync_assets.lake.raw_files import BAD_SCHEMA, KAFKA_TYPE, RANGE_STAGES, Longs, PartitionWriters, orders_around
from zync_assets.lake.snapshot import Snapshot
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange, place_text
from zync_assets.pipeline import Input, Pipeline
from zync_assets.spark.failures import spark_failures
from zync_assets.spark.tasks import indexes, run_tasks, search_settings, task_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Offsets = Mapping[int, npt.NDArray[np.int64]]
"""Partition → offsets, sorted."""

_ROWS = 20_000


@dataclass(frozen=True)
class ReplayPlan:
    """The quarantined offsets of one topic to decode again, for one state of the raw table."""

    input: Input
    snapshot: Snapshot = field(repr=False)
    state: RawState = field(repr=False)
    offsets: Offsets


@dataclass(frozen=True)
class ReplayCommit:
    """The result of one replay: the number of replayed records, and why the other records stay in quarantine."""

    topic: str
    records: int
    reasons: Mapping[tuple[int, int], str]
    """(partition, offset) → why the record stays."""


def plan_replay(pipeline: Pipeline, item: Input, selection: Selection) -> ReplayPlan | None:
    """The selected records of a topic that could not be decoded; None if there are none."""
    snapshot = Snapshot(pipeline)
    state = snapshot.raw(item.topic)
    if state is None:
        return None
    offset_lists: dict[int, list[int]] = {}
    for record in quarantined_records(pipeline, Selection((item.topic,), selection.ranges), snapshot):
        if record.stage != "etl":
            offset_lists.setdefault(record.partition, []).append(record.offset)
    if not offset_lists:
        return None
    return ReplayPlan(item, snapshot, state, {p: np.array(offsets, np.int64) for p, offsets in offset_lists.items()})


def commit_replay(spark: SparkSession, pipeline: Pipeline, plan: ReplayPlan) -> ReplayCommit:
    """The protocol of a replay. Raises CommitConflict if another replay came first, and SchemaChanged if the pipeline file
    accepts no new schema. Nothing of this replay is visible after an error."""
    item, state, side = plan.input, plan.state, plan.snapshot.quarantine(plan.input.topic)
    # 1. Find the side table's files with entries of the wanted partitions.
    files = [file for file in quarantine_table.quarantine_files(state, side) if file.partition in plan.offsets]
    orders = {partition: orders_around(state, partition, offsets) for partition, offsets in plan.offsets.items()}
    task = RawReplayTask(
        source_of(pipeline, item, state),
        storage.quarantine_uri(pipeline.lake, item.pool, item.topic),
        tuple(files),
        plan.offsets,
        state.table.uri,
        raw.replay_name(state.replays + 1),
        floors_of(state, plan.offsets),
        orders if state.has_order else None,
    )
    # 2. Decode the records, and write the records that can be decoded to new files. One Spark task suffices for the few
    #    quarantined records, and gives one type per column.
    if item.shape is not None:
        result, schema = _write_shapes(spark, pipeline, plan, task)
    else:
        result, schema = _write_records(spark, plan, task)
    if result.files:
        # 3. Check that the pipeline file accepts the schemas of the writers.
        source = replace(task.source, key_type=result.key_type, value_type=result.value_type)
        writers, _ = schema_changes(item, source, result.new_schemas)
        schema = with_lacking_fields(schema, source, state, own_writers(item, writers))
        # 4. Commit the files and the number of the replay together. The commit conflicts with any other replay.
        raw.commit_replay_files(state, schema, result.files, writers, highest_orders(state, result.files))
    return ReplayCommit(item.topic, sum(file.records for file in result.files), result.reasons)


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

    def time(self, offset: int, ingest_time: int, timestamp: int | None) -> int:
        """The time of a replayed record at ``offset``.

        ``ingest_time``: the partition's highest time when ingest read the record, 0 if unknown; ``timestamp``: the record's
        timestamp.
        """
        at = int(np.searchsorted(self.lasts, offset)) - 1
        floor = max(ingest_time, int(self.highest[at]) if at >= 0 else 0, self.before)
        if floor:
            return floor
        after = int(np.searchsorted(self.firsts, offset))
        return min([timestamp or 0, *self.lowest[after : after + 1].tolist()])


def floors_of(state: RawState, offsets: Offsets) -> dict[int, Floors]:
    """Partition → the times of its files in the raw table, without those of replays; for the partitions of ``offsets``."""
    floors: dict[int, Floors] = {}
    for partition in offsets:
        files = [item for item in raw.raw_files(state) if item.partition == partition and not raw.is_replay(item)]
        numbers = [
            np.array([getattr(item, name) or 0 for item in files], np.int64)
            for name in ("last", "max_time", "first", "min_time")
        ]
        highest = np.maximum.accumulate(numbers[1]) if files else numbers[1]
        floors[partition] = Floors(numbers[0], highest, numbers[2], numbers[3], state.retention_time.get(partition, 0))
    return floors


@dataclass
class ReplayResult:
    """The results of the task, which grow as the task runs."""

    files: list[DataFile] = field(default_factory=list)
    key_type: pa.DataType = field(default_factory=pa.null)
    value_type: pa.DataType = field(default_factory=pa.null)
    reasons: dict[tuple[int, int], str] = field(default_factory=dict)
    """(partition, offset) → why the record stays in quarantine."""
    new_schemas: list[NewSchema] = field(default_factory=list)


@dataclass(frozen=True)
class RawReplayTask:
    """The picklable arguments of the Spark task."""

    source: TopicSource
    side_uri: str
    side_files: tuple[DataFile, ...]
    offsets: Offsets
    uri: str
    name: str
    floors: Mapping[int, Floors]
    orders: Mapping[int, tuple[Longs, Longs]] | None
    """Partition → the orders around its offsets; None for a table without orders."""

    def with_orders(self, partition: int, records: pa.RecordBatch, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The records with the orders of their places, in a table with orders. ``rows``: perhaps with the records' own orders."""
        if self.orders is None:
            return records
        at = np.searchsorted(self.offsets[partition], pc.struct_field(records.column("kafka"), "offset").to_numpy())
        own = rows.column(ORDER) if ORDER in rows.schema.names else None
        return records.append_column(ORDER, orders_between(own, *(orders[at] for orders in self.orders[partition])))

    def run(self) -> ReplayResult:
        """Decode and write what can be decoded, as it is."""
        result = ReplayResult()
        with PartitionWriters(self.uri, self.name) as writers:
            for partition, rows in self.batches(result):
                records = rows.drop_columns([ORDER]) if ORDER in rows.schema.names else rows
                writers[partition].write(self.with_orders(partition, records, rows))
        result.files += writers.files
        return result

    def look(self) -> ReplayResult:
        """Decode, to see what that gives; nothing is written."""
        result = ReplayResult()
        for _ in self.batches(result):
            pass
        return result

    def batches(self, result: ReplayResult) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Batches of decodable records with their own orders and their partition, in order of partition and offset.

        Adds writer schemas and reasons to ``result`` on the way, and the column types at the end.
        """
        key, value = make_decoders(self.source)
        for partition in sorted(self.offsets):
            for rows in self._rows(partition):
                keys, values = key.decode(rows.column("key")), value.decode(rows.column("value"))
                offsets = pc.struct_field(rows.column("kafka"), "offset")
                result.new_schemas += new_schemas(partition, offsets, keys, values)
                errors = bad_sides(keys, values)
                for index, (side, worst) in errors.items():
                    result.reasons[partition, offsets[index].as_py()] = f"{side}: {worst.error}"
                is_good = ~np.isin(np.arange(rows.num_rows), list(errors))
                kafka = self._with_times(partition, rows.column("kafka"))
                records = record_batch(kafka, keys, values)
                sides = {"kafka": kafka, "key": keys.values, "value": values.values}
                if (orders := own_orders(self.source.topic, self.source.order, sides)) is not None:
                    records = records.append_column(ORDER, orders)
                yield partition, records.filter(pa.array(is_good))
        result.key_type, result.value_type = key.type, value.type

    def _rows(self, partition: int) -> Iterator[pa.RecordBatch]:
        """The wanted entries, in the order of their offsets."""
        targets = pa.array(self.offsets[partition])
        for item in sorted(self.side_files, key=lambda item: item.first or 0):
            if item.partition != partition:
                continue
            uri = storage.join(self.side_uri, item.path)
            for batch in storage.read_parts(uri, _ROWS, ["kafka", "key", "value", "stage"]):
                offsets = pc.struct_field(batch.column("kafka"), "offset")
                is_target = pc.and_(
                    pc.is_in(offsets, targets),
                    pc.invert(pc.is_in(batch.column("stage"), pa.array(RANGE_STAGES))),
                )
                entries = batch.filter(is_target)
                if entries.num_rows:
                    yield entries.cast(pa.schema([BAD_SCHEMA.field(name) for name in entries.schema.names]))

    def _with_times(self, partition: int, kafka: pa.Array) -> pa.Array:
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


def _write_records(spark: SparkSession, plan: ReplayPlan, task: RawReplayTask) -> tuple[ReplayResult, pa.Schema]:
    """Decode and write the records as they are; the result, and the raw table's columns after it."""
    [result] = run_tasks(spark, 1, lambda _: task.run())
    source = replace(task.source, key_type=result.key_type, value_type=result.value_type)
    schema = table_schema(plan.state.schema, source)
    return result, with_side_notes(schema, plan.state.schema, notes_of(result.new_schemas))


Places = frozenset[tuple[int, int]]
"""Partition and offset."""


def _write_shapes(
    spark: SparkSession, pipeline: Pipeline, plan: ReplayPlan, task: RawReplayTask
) -> tuple[ReplayResult, pa.Schema]:
    """Decode the records, shape them as ingest does, and write them; the result, and the raw table's columns after it.

    Nothing is written by the two looks that come first: at the types of what can be decoded, and at the records that the
    shape fails on. The failing records, and the records that the shape leaves out, stay in quarantine. SchemaError if the
    shape does not fit the records, or its result the table; FieldMissing for a field that no record has had where the file
    says so.
    """
    [result] = run_tasks(spark, 1, lambda _: task.look())
    source = replace(task.source, key_type=result.key_type, value_type=result.value_type)
    item, source = resolvable(
        pipeline, plan.input, source, lambda new_source: _frame(spark, replace(task, source=new_source), frozenset())
    )
    task = replace(task, source=source)
    with search_settings(spark), spark_failures(_replay_failure(item)):
        rows = failing_frame(_frame(spark, task, frozenset()), item).collect()
    failures: Places = frozenset((row["partition"], row["offset"]) for row in rows)
    frame = shaped_frame(_frame(spark, task, failures), item)
    schema = shaped_schema(item, task.source, plan.state.schema, frame)
    writer = _Writer(task, schema)
    with spark_failures(_replay_failure(item)):
        [row] = frame.mapInArrow(writer.run, "outcome binary").collect()
    outcome: tuple[list[DataFile], list[tuple[int, int]]] | ZyncError = pickle.loads(bytes(row["outcome"]))
    if isinstance(outcome, ZyncError):
        raise outcome
    result.files, left_out = outcome
    result.reasons |= dict.fromkeys(failures, "its shape fails on the record")
    result.reasons |= dict.fromkeys(left_out, "its shape leaves the record out; it can only be dropped")
    return result, schema


def _replay_failure(item: Input):
    return lambda text: ZyncError(
        f"input {item.topic}: the replay failed: {text} Nothing was committed; correct the shape, or run it again."
    )


def _frame(spark: SparkSession, task: RawReplayTask, exclusions: Places) -> DataFrame:
    """The decoded records, in the order of their places, less those at some."""
    schema = decoded_schema(task.source)

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in indexes(batches):
            for partition, records in task.batches(ReplayResult()):
                skips = pa.array([offset for at, offset in exclusions if at == partition], pa.int64())
                offsets = pc.struct_field(records.column("kafka"), "offset")
                yield with_control(records.filter(pc.invert(pc.is_in(offsets, skips))), schema)

    return task_frame(spark, 1).mapInArrow(read, spark_schema(schema))


class _Writer:
    """Shaped records → the replay's files, and the places of the records that the shape left out."""

    def __init__(self, task: RawReplayTask, schema: pa.Schema) -> None:
        self.task, self.schema = task, schema

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            outcome: object = self._write(batches)
        except ZyncError as error:
            outcome = error
        yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps(outcome)])], names=["outcome"])

    def _write(self, batches: Iterable[pa.RecordBatch]) -> tuple[list[DataFile], list[tuple[int, int]]]:
        with PartitionWriters(self.task.uri, self.task.name) as writers:
            left_out = list(self._write_batches(batches, writers))
        return writers.files, left_out

    def _write_batches(self, batches: Iterable[pa.RecordBatch], writers: PartitionWriters) -> Iterator[tuple[int, int]]:
        """Write the records of the shape. The places of the others."""
        for batch in batches:
            leftovers = batch.filter(pc.invert(batch.column(KEPT))).column("kafka")
            numbers = (pc.struct_field(leftovers, name).to_pylist() for name in ("partition", "offset"))
            yield from zip(*numbers, strict=True)
            shaped_rows = batch.filter(batch.column(KEPT))
            partitions = pc.struct_field(shaped_rows.column("kafka"), "partition")
            for partition in partitions.unique().to_pylist():
                rows = shaped_rows.filter(pc.equal(partitions, partition))
                records = shaped_batch(rows.column("kafka").cast(KAFKA_TYPE), rows, self.schema)
                writers[partition].write(self.task.with_orders(partition, records, rows))


@dataclass(frozen=True)
class DropPlan:
    """The quarantined records to drop in the account of one staging pool. ``places``: topic, partition, offset."""

    pool: str
    snapshot: Snapshot = field(repr=False)
    places: frozenset[tuple[str, int, int]]


def plan_drop(pipeline: Pipeline, pool: str, selection: Selection) -> DropPlan:
    """The selected records that one staging pool can drop. No JVM.

    Raises ZyncError for a record that ETL has not seen yet: the account can't say of it that it is dropped.
    """
    snapshot = Snapshot(pipeline)
    snapshot.staging(pool)
    places: set[tuple[str, int, int]] = set()
    for record in quarantined_records(pipeline, selection, snapshot):
        if record.stage == "etl" and record.pool != pool:
            continue
        if record.stage != "etl" and pool not in pipeline.readers_of(record.topic):
            continue
        if not record.seen:
            raise ZyncError(f"{place_text(*record.place)} was not seen by ETL yet. First run {pipeline.command('etl')}")
        places.add(record.place)
    return DropPlan(pool, snapshot, frozenset(places))


def commit_drop(plan: DropPlan) -> frozenset[tuple[str, int, int]]:
    """Drop the records in one commit; their places. Raises CommitConflict if an ETL batch came first."""
    state = plan.snapshot.staging(plan.pool)
    reasons = dict(_quarantined_ranges(state, plan.places)) if state is not None else {}
    if state is None or not reasons:
        return frozenset()
    ranges = list(reasons)
    files, removals = carve(state, ranges)
    folder = f"batch-{state.head.batch + 1:012d}-{uuid.uuid4().hex[:12]}/{staging.ACCOUNT_FOLDER}"
    entries = [item.entry("dropped") | reason for item, reason in reasons.items()]
    files.append(staging.write_ledger(state.table.uri, f"{folder}/dropped.parquet", entries))
    counts = Counter(state.head.counts)
    for item in ranges:
        counts[item.topic, item.part.partition, item.kind] -= item.records
        counts[item.topic, item.part.partition, "dropped"] += item.records
    head = replace(state.head, batch=state.head.batch + 1, counts=dict(counts))
    lake = plan.snapshot.pipeline.lake
    staging.commit_batch(lake, plan.pool, state, head, state.schema, files, removals)
    return plan.places


def _quarantined_ranges(
    state: StagingState, places: Iterable[tuple[str, int, int]]
) -> Iterator[tuple[ClassRange, dict[str, object]]]:
    """The places that are quarantined in this state of the account, or expired. Each has ``rule`` and ``text`` of a failure: no
    state of a table gets the row of a record that a view failed on, also after its drop."""
    offset_lists: dict[tuple[str, int], list[int]] = {}
    for topic, partition, offset in sorted(places):
        offset_lists.setdefault((topic, partition), []).append(offset)
    for entry in staging.read_ledger(state, ["quarantined", "expired"]).to_pylist():
        topic, partition = entry["topic"], entry["partition"]
        offsets = np.array(offset_lists.get((topic, partition), []), np.int64)
        has_failed = entry["kind"] == "quarantined"
        reason: dict[str, object] = {name: entry[name] for name in ("rule", "text") if has_failed}
        for part in runs_within(OffsetRange(partition, entry["first"], entry["end"]), offsets):
            yield ClassRange(topic, entry["kind"], None, part), reason
