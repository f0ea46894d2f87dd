"""The plan and the read half of ingest: source topic → raw table.

plan_ingest   the new offsets, by comparing watermarks with the table's next offsets (no JVM)
read_input    the lazy batch: Spark reads and decodes the ranges when it is asked to
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.audit.guard import check_before_ingest
from zync_assets.codecs.spark_types import spark_schema
from zync_assets.conflicts import keep_errors
from zync_assets.errors import DataLoss, TopicMissing, TopicRecreated, TopicTruncated, ZyncError
from zync_assets.ingest import source
from zync_assets.ingest.files import RangeReading, decoded_types
from zync_assets.ingest.shape import looks_at_time, shaped_records
from zync_assets.ingest.source import TopicSource, read_chunks
from zync_assets.ingest.task import side_types
from zync_assets.kafka.reader import ANEW, read_range
from zync_assets.kafka.topics import TopicState, led_state, offsets_at
from zync_assets.lake import raw
from zync_assets.lake.raw import RawState
from zync_assets.lake.raw_files import highest_times, raw_schema
from zync_assets.offsets import LEAST, OffsetRange, new_ranges, offset_count, shares
from zync_assets.pipeline import Input, Pipeline
from zync_assets.spark.session import Session, lazy_session
from zync_assets.spark.tasks import MANY, SMALL_OFFSETS, indexes, slots, task_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BATCH_OFFSETS = 8_000_000
"""Offsets of one topic in one batch at the most; a longer backlog takes several batches, each committed."""
MOST_TIME = 253_402_300_800_000
"""The end of the year 9999, in milliseconds since the epoch."""
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
    losses: tuple[OffsetRange, ...]
    """Offsets that Kafka's retention removed before ingest. Empty unless the pipeline file accepts the loss."""
    lag: int
    """Offsets from the next offsets to the topic's end, over all partitions: at least as many as there are records."""

    @property
    def nothing_to_do(self) -> bool:
        return not self.ranges and not self.first and not self.losses


@dataclass(frozen=True)
class RawBatch:
    """A lazy batch of one topic. The offsets are fixed; no record has been read.

    ``dataframe()`` returns the decoded records. The commit reads and writes in the same Spark tasks.
    """

    plan: IngestPlan
    source: TopicSource = field(repr=False)
    session: Session = field(repr=False)

    @property
    def spark(self) -> SparkSession:
        return self.session()

    @property
    def topic(self) -> str:
        return self.plan.input.topic

    def dataframe(self) -> DataFrame:
        """The records that can be decoded, as a Spark DataFrame with the columns of a raw table. ``kafka.time`` starts
        again in each Spark task: only committed records have the carried time."""
        source, parts, now = self.source, task_ranges(self.spark, self.plan), now_millis()
        if self.plan.input.shape is not None:
            reading = RangeReading(
                self.spark, "", self.plan.input, source, parts, now, raw_schema(pa.null(), pa.null()), 0
            )
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


def plan_ingest(
    pipeline: Pipeline,
    topic: str,
    *,
    within: Sequence[OffsetRange] | None = None,
    limit: int = BATCH_OFFSETS,
    topic_states: Mapping[str, TopicState] | None = None,
) -> IngestPlan:
    """The plan of the next ingest batch: at most ``limit`` new offsets of a topic.

    ``within`` narrows the plan to ranges that begin at the partitions' next offsets. The plan omits a partition without a
    leader, except before the first ingest, because the partition's first offset is unknown then. Raises TopicMissing,
    TopicRecreated, DataLoss (unless the input says ``on-data-loss: continue``), BrokerUnavailable.
    """
    item = pipeline.input(topic)
    # The table before the topic: another writer may be ahead of what was known of the topic, never of the topic.
    state = raw.open_raw(pipeline.lake, item.pool, topic)
    topic_state = topic_states.get(topic) if topic_states is not None else None
    if topic_states is None or _is_behind(topic_state, state):
        topic_state = led_state(pipeline.kafka, topic, LEADER_SECONDS)
    if topic_state is None:
        raise absent_error(item, was_there=state is not None)
    if state is None:
        for error in topic_state.away.values():
            raise error
    first = _first_offsets(pipeline, item, topic_state, state)
    position = dict(state.next if state else {}) | first
    losses = losses_of(item, topic_state, state, position)
    position |= {part.partition: part.end for part in losses}
    ends = {p.partition: p.end for p in topic_state.partitions}
    ranges = new_ranges(position, ends)
    lag = offset_count(ranges)
    if within is not None:
        ranges = [
            OffsetRange(part.partition, part.first, min(part.end, limit_.end))
            for part in ranges
            for limit_ in within
            if limit_.partition == part.partition and limit_.first <= part.first < limit_.end
        ]
    if ranges:
        check_before_ingest(pipeline, item, state)
    within_limit = earliest(ranges, limit, _time_index(pipeline, item, topic_state, state, ranges))
    return IngestPlan(item, topic_state, state, tuple(within_limit), first, losses, lag)


def small_inputs(
    pipeline: Pipeline, session: Session, topics: Sequence[str], states: Mapping[str, TopicState]
) -> tuple[dict[str, RawBatch], list[str], list[ZyncError]]:
    """The topics that one small batch each brings to their known ends, with these batches; the other topics that have something
    new, or may have; and errors of topics. ``states``: as ``topic_states`` of ``plan_ingest``.

    None is small if there are few. A topic with a shape is not, since Spark SQL stands between its tasks.
    """
    batches: dict[str, RawBatch] = {}
    other_topics, troubles = list[str](), list[ZyncError]()
    if len(topics) < MANY:
        return batches, list(topics), troubles
    for topic in topics:
        with keep_errors(troubles):
            batch = read_input(session, pipeline, plan_ingest(pipeline, topic, topic_states=states))
            plan = batch.plan
            whole = offset_count(plan.ranges) == plan.lag
            if not whole or plan.lag > SMALL_OFFSETS or plan.input.shape is not None:
                other_topics.append(topic)
            elif not plan.nothing_to_do:
                batches[topic] = batch
    return (batches, other_topics, troubles) if len(batches) >= MANY else ({}, [*batches, *other_topics], troubles)


def read_input(spark: SparkSession | Session, pipeline: Pipeline, plan: IngestPlan) -> RawBatch:
    """The read half: a lazy batch over the plan's ranges."""
    return RawBatch(plan, source_of(pipeline, plan.input, plan.state), lazy_session(spark))


def source_of(pipeline: Pipeline, item: Input, state: RawState | None) -> TopicSource:
    """The connections, formats and column types that a Spark task needs to read a topic into its raw table."""
    if item.shape is not None:
        key, value = decoded_types(pipeline.lake, item) or (None, None)
    else:
        key, value = side_types(state.schema) if state else (None, None)
    return TopicSource(
        pipeline.kafka,
        pipeline.registry,
        item.topic,
        item.key,
        item.value,
        key,
        value,
        *source.known_ids(state),
        digests=state.digests if state else {},
        fixed_schema=item.on_schema_change != "merge",
        order=item.order,
        marks={(partition, state.next[partition]): mark for partition, mark in state.marks.items()} if state else {},
    )


def _first_offsets(pipeline: Pipeline, item: Input, topic_state: TopicState, state: RawState | None) -> dict[int, int]:
    """New partition → its first offset.

    The first ingest records every partition of the topic, also empty partitions. A partition that the table does not know was
    therefore added later. Ingest reads such a partition from offset 0, whatever ``from`` says.
    """
    if state is not None:
        return {part.partition: 0 for part in topic_state.partitions if part.partition not in state.next}
    fresh = topic_state.partitions
    if item.start == "earliest":
        return {part.partition: part.low for part in fresh}
    if item.start == "latest":
        return {part.partition: part.end for part in fresh}
    at = offsets_at(pipeline.kafka, item.topic, item.start)
    return {part.partition: at.get(part.partition, part.end) for part in fresh}


def recreation_error(item: Input, topic_state: TopicState) -> TopicRecreated:
    """The error for an input topic that is another topic than the one that its raw table was made from."""
    return TopicRecreated(
        f"topic {item.topic} is another topic than the one that {item.pool}.{item.topic} was made from (its id is now"
        f" {topic_state.topic_id}): it was deleted and created again.{ANEW}"
    )


def absent_error(item: Input, *, was_there: bool) -> TopicMissing:
    """The error for an input topic that the broker does not have. ``was_there``: whether it has a raw table."""
    if not was_there:
        return TopicMissing(f"topic {item.topic} is not there. Create it, or take it out of inputs.")
    return TopicMissing(
        f"topic {item.topic} is gone; it was there when it was ingested into {item.pool}.{item.topic}. A topic of that name that"
        f" is created now is another topic.{ANEW}"
    )


def _is_behind(topic_state: TopicState | None, state: RawState | None) -> bool:
    """Whether the table is past the ends that were known of the topic."""
    if topic_state is None or state is None:
        return False
    return any(part.end < state.next.get(part.partition, 0) for part in topic_state.partitions)


def losses_of(
    item: Input, topic_state: TopicState, state: RawState | None, position: Mapping[int, int]
) -> tuple[OffsetRange, ...]:
    """The offsets from ``position`` on (partition → next offset; 0 for other partitions) that retention removed. Raises
    TopicRecreated, TopicTruncated, and DataLoss unless the input says ``on-data-loss: continue``."""
    if state is not None and not state.is_from(topic_state.topic_id):
        raise recreation_error(item, topic_state)
    losses: list[OffsetRange] = []
    for part in topic_state.partitions:
        upcoming = position.get(part.partition, 0)
        new = state is not None and part.partition not in state.next
        if part.end < upcoming:
            raise TopicTruncated(
                f"topic {item.topic}, partition {part.partition}: next offset {upcoming} is past the topic's end {part.end};"
                f" the topic has lost records that were ingested. Restore the topic.{ANEW}"
            )
        if part.low > upcoming:
            if item.on_data_loss == "fail":
                hint = (
                    " The partition was added after the pipeline began, so all its records are expected." if new else ""
                )
                raise DataLoss(
                    f"topic {item.topic}, partition {part.partition}: next offset {upcoming} is below the low watermark"
                    f" {part.low}; {_removed_offsets(upcoming, part.low)}.{hint}"
                    " Set on-data-loss: continue to accept that."
                )
            losses.append(OffsetRange(part.partition, upcoming, part.low))
    return tuple(losses)


def _removed_offsets(first: int, end: int) -> str:
    if end - first == 1:
        return f"1 offset is gone by retention, {first}"
    return f"{end - first} offsets are gone by retention, {first} to {end - 1}"


def earliest(
    ranges: Sequence[OffsetRange], limit: int, offsets_of: Callable[[int], Mapping[int, int]]
) -> list[OffsetRange]:
    """At most ``limit`` offsets in all, the earliest by time, partition and offset.

    ``offsets_of``: a time in milliseconds since the epoch → partition → the first offset of this or a later time. After new
    partitions, the records of a key are in several of them: a later batch must not have an older record.
    """
    if len(ranges) < 2 or offset_count(ranges) <= limit:
        return [replace(part, end=min(part.end, part.first + limit)) for part in ranges]

    def before(time: int) -> list[OffsetRange]:
        offsets = offsets_of(time)
        ends = [min(part.end, offsets.get(part.partition, part.end)) for part in ranges]
        return [replace(part, end=max(part.first, end)) for part, end in zip(ranges, ends, strict=True)]

    times = range(MOST_TIME)
    later = bisect_right(times, limit, key=lambda time: offset_count(before(time)))
    parts = before(later - 1) if later else [replace(part, end=part.first) for part in ranges]
    # The rest of the limit takes records of one time, partition by partition.
    tied_parts = before(later) if later < MOST_TIME else ranges
    left, batch = limit - offset_count(parts), list[OffsetRange]()
    for part, tied in zip(parts, tied_parts, strict=True):
        count = min(left, tied.end - part.end)
        left -= count
        batch.append(replace(part, end=part.end + count))
    return [part for part in batch if not part.empty]


def _time_index(
    pipeline: Pipeline, item: Input, topic_state: TopicState, state: RawState | None, ranges: Sequence[OffsetRange]
) -> Callable[[int], Mapping[int, int]]:
    """The ``offsets_of`` of ``earliest``, by the carried time of records.

    Kafka finds a time by the highest timestamp so far. After a record with a timestamp in the future, it therefore finds no later
    record of the partition. Ingest then reads the times of single records of this partition.
    """

    @cache
    def stuck_parts() -> list[OffsetRange]:
        at_present = offsets_at(pipeline.kafka, item.topic, now_millis(), topic_state)
        return [part for part in ranges if at_present.get(part.partition, part.end) <= part.first]

    @cache
    def floors() -> dict[int, int]:
        return highest_times(state)

    @cache
    def time_at(partition: int, offset: int, end: int) -> int:
        batches = read_range(pipeline.kafka, item.topic, partition, offset, end, batch_records=1)
        timestamp = next((batch.column("timestamp")[0].as_py() for batch in batches), MOST_TIME)
        return max(timestamp or 0, floors().get(partition, 0))

    def offsets_of(time: int) -> dict[int, int]:
        offsets = offsets_at(pipeline.kafka, item.topic, time, topic_state)
        for part in stuck_parts():
            partition, end = part.partition, part.end
            offsets[partition] = bisect_left(
                range(end),
                time,
                lo=part.first,
                key=lambda at, partition=partition, end=end: time_at(partition, at, end),
            )
        return offsets

    return offsets_of


def task_ranges(spark: SparkSession, plan: IngestPlan) -> list[OffsetRange]:
    """The plan's ranges in pieces, a Spark task each."""
    ranges = plan.ranges
    if looks_at_time(plan.input):
        return list(ranges)
    total = offset_count(ranges)
    return shares(ranges, slots(spark) if total > FEW_OFFSETS else FEW_OFFSETS // LEAST)


def now_millis() -> int:
    """The present time, in milliseconds since the epoch."""
    return int(time.time() * 1000)
