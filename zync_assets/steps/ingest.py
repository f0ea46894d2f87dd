"""Ingest: source topic → raw table.

plan_ingest   what is new, by comparing watermarks with the table's next offsets (no JVM)
read_input    the lazy batch: Spark reads and decodes the ranges when it is asked to
commit_raw    files, quarantine and next offsets, once
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.codecs.spark_types import spark_schema
from zync_assets.crashes import crash_point
from zync_assets.errors import CommitConflict, DataLoss, KafkaError, TopicMissing, TopicRecreated
from zync_assets.kafka.source import Source, read_chunks
from zync_assets.kafka.topics import TopicState, commit_group_offsets, led_state, offsets_at
from zync_assets.lake import cleaning, quarantine, raw, storage
from zync_assets.lake.raw import RawState
from zync_assets.lake.rows import rows_at
from zync_assets.lake.tables import DataFile
from zync_assets.lake.times import highest_times
from zync_assets.offsets import OffsetRange, new_ranges
from zync_assets.pipeline import Input, Pipeline
from zync_assets.records import raw_schema
from zync_assets.shares import LEAST, shares
from zync_assets.steps import schema_changes
from zync_assets.steps.ingest_files import Reading, with_carried_times, write_lost, write_plain
from zync_assets.steps.quarantined import Held, admit
from zync_assets.steps.raw_columns import added_fields
from zync_assets.steps.retention import keep_short
from zync_assets.steps.schema_changes import SchemaChange
from zync_assets.steps.seen import check_before_ingest
from zync_assets.steps.session import Session, deferred
from zync_assets.steps.shaped_types import known_types
from zync_assets.steps.shaping import looks_at_time, shaped_records, write_shaped
from zync_assets.steps.tasks import indexes, slots, task_frame
from zync_assets.steps.upkeep import keep_up

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_log = logging.getLogger(__name__)

BATCH_OFFSETS = 8_000_000
"""Offsets of one topic in one batch at the most; a longer backlog takes several batches, each committed."""
LEADER_SECONDS = 1.0
"""Seconds that ingest waits for a partition's leader before it goes on with the other partitions."""
FEW_OFFSETS = 200_000
"""Offsets that are cut into tasks without asking how many Spark would run at one time."""


@dataclass(frozen=True)
class IngestPlan:
    """The offsets of one topic to ingest. ``state``: the raw table at the time of the plan, None before the first ingest."""

    input: Input
    topic_state: TopicState
    state: RawState | None = field(repr=False)
    ranges: tuple[OffsetRange, ...]
    first: Mapping[int, int]
    """New partition → its first offset."""
    lost: tuple[OffsetRange, ...]
    """Offsets that Kafka's retention removed before ingest. Empty unless the pipeline file accepts the loss."""
    lag: int
    """Offsets from the next offsets to the topic's end, over all partitions: at least as many as there are records."""

    @property
    def nothing_to_do(self) -> bool:
        return not self.ranges and not self.first and not self.lost


@dataclass(frozen=True)
class RawBatch:
    """A lazy batch of one topic. The offsets are fixed; no record has been read.

    ``dataframe()`` returns the decoded records. The commit reads and writes in the same Spark tasks.
    """

    plan: IngestPlan
    source: Source = field(repr=False)
    session: Session = field(repr=False)

    @property
    def spark(self) -> SparkSession:
        return self.session()

    @property
    def topic(self) -> str:
        return self.plan.input.topic

    def dataframe(self) -> DataFrame:
        """The records that can be decoded, as a Spark DataFrame with the columns of a raw table. ``kafka.time`` begins anew
        in each Spark task: only committed records have the carried time."""
        source, parts, now = self.source, _tasks(self.spark, self.plan), _now()
        if self.plan.input.shape is not None:
            reading = Reading(self.spark, "", self.plan.input, source, parts, now, raw_schema(pa.null(), pa.null()), 0)
            return shaped_records(reading)
        if source.key_type is None and source.value_type is None:
            raise TopicMissing(f"topic {self.topic}: no schema is known before the first ingest. Ingest it first.")
        schema = raw_schema(source.key_type or pa.null(), source.value_type or pa.null())

        def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for index in indexes(batches):
                for chunk in read_chunks(source, parts[index], now):
                    yield pa.RecordBatch.from_arrays(
                        [chunk.records.column(item.name).cast(item.type) for item in schema], schema=schema
                    )

        return task_frame(self.spark, len(parts)).mapInArrow(read, spark_schema(schema))


@dataclass(frozen=True)
class RawCommit:
    """The result of one ingest commit. ``until``: partition → its next offset after the commit."""

    topic: str
    ranges: tuple[OffsetRange, ...]
    records: int
    quarantined: int
    until: Mapping[int, int]
    added_fields: tuple[str, ...]
    schema_changes: tuple[SchemaChange, ...]
    seconds: float
    left_out: int = 0
    """Records that the input's shape left out."""


def plan_ingest(
    pipeline: Pipeline,
    topic: str,
    *,
    within: Sequence[OffsetRange] | None = None,
    limit: int = BATCH_OFFSETS,
    known: Mapping[str, TopicState] | None = None,
) -> IngestPlan:
    """The plan of the next ingest batch: at most ``limit`` new offsets of a topic.

    ``within`` narrows the plan to ranges that begin at the partitions' next offsets. The plan omits a partition without a
    leader, except before the first ingest, because the partition's first offset is unknown then. Raises TopicMissing,
    TopicRecreated, DataLoss (unless the input says ``on-data-loss: continue``), BrokerUnavailable.
    """
    item = pipeline.input(topic)
    # The table before the topic: another writer may be ahead of what was known of the topic, never of the topic.
    state = raw.open_raw(pipeline.lake, item.pool, topic)
    found = known.get(topic) if known is not None else None
    if known is None or _is_behind(found, state):
        found = led_state(pipeline.kafka, topic, LEADER_SECONDS)
    if found is None:
        raise TopicMissing(f"topic {topic} is not there. Create it, or take it out of inputs.")
    if state is None:
        for error in found.away.values():
            raise error
    if state is not None and not state.made_from(found.topic_id):
        raise _recreated(item, found)
    first = _first_offsets(pipeline, item, found, state)
    position = dict(state.next if state else {}) | first
    lost = _lost(item, found, state, position)
    position |= {part.partition: part.end for part in lost}
    ends = {p.partition: p.end for p in found.partitions}
    ranges = new_ranges(position, ends)
    lag = sum(part.end - part.first for part in ranges)
    if within is not None:
        ranges = [
            OffsetRange(part.partition, part.first, min(part.end, limit_.end))
            for part in ranges
            for limit_ in within
            if limit_.partition == part.partition and limit_.first <= part.first < limit_.end
        ]
    if ranges:
        check_before_ingest(pipeline, item, state)
    return IngestPlan(item, found, state, tuple(_limited(ranges, limit)), first, lost, lag)


def read_input(spark: SparkSession | Session, pipeline: Pipeline, plan: IngestPlan) -> RawBatch:
    """The read half: a lazy batch over the plan's ranges."""
    return RawBatch(plan, source_of(pipeline, plan.input, plan.state), deferred(spark))


def source_of(pipeline: Pipeline, item: Input, state: RawState | None) -> Source:
    """The connections, formats and column types that a Spark task needs to read a topic into its raw table."""
    names = state.schema.names if state else []

    def present(side: str) -> pa.DataType | None:
        return state.schema.field(side).type if state and side in names else None

    key, value = present("key"), present("value")
    if item.shape is not None:
        key, value = known_types(pipeline.lake, item) or (None, None)
    return Source(
        pipeline.kafka,
        pipeline.registry,
        item.topic,
        item.key,
        item.value,
        key,
        value,
        *schema_changes.known_ids(state),
        closed=item.on_schema_change != "merge",
    )


def commit_raw(pipeline: Pipeline, batch: RawBatch) -> RawCommit:
    """The commit half: run the batch, write its files, commit quarantine, then data with the next offsets.

    Nothing of the batch is visible after an error. Raises CommitConflict if another writer committed first, SchemaChanged if
    the pipeline file accepts no new schema, and BadRecords if the file accepts no undecodable records.
    """
    started = time.monotonic()
    plan, item = batch.plan, batch.plan.input
    lake, pool, topic = pipeline.lake, item.pool, item.topic
    known = plan.state.schema if plan.state else raw_schema(pa.null(), pa.null())
    attempt = quarantine.new_attempt()
    parts, reached = _tasks(batch.spark, plan), highest_times(plan.state)
    reading = Reading(batch.spark, lake, item, batch.source, parts, _now(), known, attempt, reached)
    try:
        made = write_plain(reading) if item.shape is None else write_shaped(pipeline, reading)
    except DataLoss:
        # A recreated topic also lacks records. A pipeline file that accepts a loss to retention does not accept this case.
        _check_identity(pipeline, plan)
        raise
    _check_identity(pipeline, plan)
    made, reached = with_carried_times(reading, made)
    lost = write_lost(reading, plan.lost)
    crash_point("ingest:files-written")
    files, schema = made.files, made.schema
    writers, changes = schema_changes.settled(item, made.source, made.arrived)
    schema = schema_changes.with_side_notes(schema, plan.state.schema if plan.state else None, made.notes)
    if item.shape is None:
        schema = schema_changes.with_lacking_fields(schema, made.source, plan.state, writers)
    _admit(pipeline, plan, made.bad)
    bad = [*made.bad, *lost, *made.dropped]
    before = dict(plan.state.next if plan.state else {}) | dict(plan.first)
    until = before | {part.partition: part.end for part in plan.lost} | {p.partition: p.end for p in plan.ranges}
    changed = {p: end for p, end in until.items() if plan.state is None or plan.state.next.get(p) != end}
    bad_counts: dict[int, int] = {}
    for found in (*made.bad, *lost):
        bad_counts[found.partition or 0] = bad_counts.get(found.partition or 0, 0) + found.records

    def still_first() -> None:
        now = raw.open_raw(lake, pool, topic)
        if (now.next if now else {}) != (plan.state.next if plan.state else {}):
            raise CommitConflict(
                f"table {storage.raw_uri(lake, pool, topic)}: another writer committed first; run again"
            )

    quarantine.add(lake, pool, topic, plan.state, bad, still_first)
    if bad:
        crash_point("ingest:quarantine-written")
    try:
        raw.commit_raw(
            lake,
            pool,
            topic,
            plan.topic_state.topic_id,
            plan.state,
            schema,
            files,
            plan.first,
            changed,
            bad_counts,
            writers,
            made.left_out,
            {found.partition or 0: attempt for found in bad},
            reached,
        )
    except CommitConflict:
        quarantine.withdraw(lake, pool, topic, bad)
        raise
    _show_progress(pipeline, topic, until)
    keep_up(batch.spark, plan.state.opened if plan.state else None, item.retention_ms)
    if bad:
        cleaning.tidy(storage.quarantine_uri(lake, pool, topic))
    keep_short(pipeline, item, plan.state)
    return RawCommit(
        topic,
        plan.ranges,
        sum(found.records for found in files),
        sum(bad_counts.values()),
        until,
        tuple(added_fields(known, schema)) if plan.state else (),
        changes,
        time.monotonic() - started,
        sum(made.left_out.values()),
    )


def _show_progress(pipeline: Pipeline, topic: str, until: Mapping[int, int]) -> None:
    """Tell Kafka's own tools how far the topic is read. Nothing depends on it: what is ingested, the lake alone says."""
    if pipeline.consumer_group is None:
        return
    try:
        commit_group_offsets(pipeline.kafka, pipeline.consumer_group, topic, until)
    except KafkaError as error:
        _log.warning("the lag that Kafka shows for %s is out of date, and nothing else: %s", topic, error)


def _admit(pipeline: Pipeline, plan: IngestPlan, bad: Sequence[DataFile]) -> None:
    """BadRecords where what could not be decoded may not be committed. ``bad`` is on disk; no commit names it yet."""
    item = plan.input
    if item.on_bad_record == "quarantine" and item.max_bad_records is None:
        return
    if not bad:
        return
    lowest = min(bad, key=lambda each: (each.partition or 0, each.first or 0))
    place = (lowest.partition or 0, lowest.first or 0)
    uri = storage.quarantine_uri(pipeline.lake, item.pool, item.topic)
    row = rows_at(uri, [lowest], place[0], [place[1]], ["stage", "error"])[place[1]]
    first = Held(item.pool, item.topic, *place, row["stage"], None, f"{row['stage']}: {row['error']}", None, False)
    admit(pipeline, item, plan.state, sum(each.records for each in bad), first, "ingest")


def _first_offsets(pipeline: Pipeline, item: Input, found: TopicState, state: RawState | None) -> dict[int, int]:
    """New partition → its first offset.

    The first ingest records every partition of the topic, also empty partitions. A partition that the table does not know was
    therefore added later. Ingest reads such a partition from offset 0, whatever ``from`` says.
    """
    if state is not None:
        return {part.partition: 0 for part in found.partitions if part.partition not in state.next}
    fresh = found.partitions
    if item.start == "earliest":
        return {part.partition: part.low for part in fresh}
    if item.start == "latest":
        return {part.partition: part.end for part in fresh}
    at = offsets_at(pipeline.kafka, item.topic, item.start)
    return {part.partition: at.get(part.partition, part.end) for part in fresh}


def _check_identity(pipeline: Pipeline, plan: IngestPlan) -> None:
    """TopicRecreated if the topic that was read is not the one that the plan was made for: offsets alone don't tell, since
    the new one may have as many records."""
    topic = plan.input.topic
    found = led_state(pipeline.kafka, topic, LEADER_SECONDS)
    if found is None:
        raise TopicMissing(f"topic {topic} went away while it was read; nothing of the batch was committed.")
    if found.topic_id != plan.topic_state.topic_id:
        raise _recreated(plan.input, found)


def _recreated(item: Input, found: TopicState) -> TopicRecreated:
    return TopicRecreated(
        f"topic {item.topic} is another topic than the one that {item.pool}.{item.topic} was made from (its id is now"
        f" {found.topic_id}): it was deleted and created again. To begin anew, give the input another pool,"
        " and its outputs another staging pool and other topics."
    )


def _is_behind(known: TopicState | None, state: RawState | None) -> bool:
    """Whether the table is past the ends that were known of the topic."""
    if known is None or state is None:
        return False
    return any(part.end < state.next.get(part.partition, 0) for part in known.partitions)


def _lost(
    item: Input, found: TopicState, state: RawState | None, position: Mapping[int, int]
) -> tuple[OffsetRange, ...]:
    lost: list[OffsetRange] = []
    for part in found.partitions:
        upcoming = position.get(part.partition, part.low)
        new = state is not None and part.partition not in state.next
        if part.end < upcoming:
            raise DataLoss(
                f"topic {item.topic}, partition {part.partition}: next offset {upcoming} is past the topic's end {part.end};"
                " the topic has lost records that were ingested. Restore the topic. To begin anew, give the input another pool,"
                " and its outputs another staging pool and other topics."
            )
        if part.low > upcoming:
            if item.on_data_loss == "fail":
                added = (
                    " The partition was added after the pipeline began, so all its records are expected." if new else ""
                )
                raise DataLoss(
                    f"topic {item.topic}, partition {part.partition}: next offset {upcoming} is below the low watermark"
                    f" {part.low}; {part.low - upcoming} offsets are gone by retention, {upcoming} to {part.low - 1}.{added}"
                    " Set on-data-loss: continue to accept that."
                )
            lost.append(OffsetRange(part.partition, upcoming, part.low))
    return tuple(lost)


def _limited(ranges: Sequence[OffsetRange], limit: int) -> list[OffsetRange]:
    """At most ``limit`` offsets in all, shared evenly so that no partition holds back the rest."""
    share = max(1, limit // max(1, len(ranges)))
    return [replace(part, end=min(part.end, part.first + share)) for part in ranges]


def _tasks(spark: SparkSession, plan: IngestPlan) -> list[OffsetRange]:
    """The plan's ranges in pieces, a Spark task each."""
    ranges = plan.ranges
    if looks_at_time(plan.input):
        return list(ranges)
    total = sum(part.end - part.first for part in ranges)
    return shares(ranges, slots(spark) if total > FEW_OFFSETS else FEW_OFFSETS // LEAST)


def _now() -> int:
    return int(time.time() * 1000)
