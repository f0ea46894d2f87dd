"""The plan and the read half of publishing: staging table → output topic.

plan_publish   the records that Kafka lacks, and the records to verify first (no JVM)
read_staging   the lazy batch
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zync_assets.audit.guard import check_begins, refuse_unsound
from zync_assets.conflicts import keep_errors
from zync_assets.errors import (
    CheckFailed,
    ForeignRecord,
    KafkaError,
    PartitionsChanged,
    TopicMissing,
    TopicRecreated,
    ZyncError,
)
from zync_assets.kafka.topics import TopicState, high_watermarks, known_watermarks, survey, topic_states
from zync_assets.lake import staging, storage
from zync_assets.lake.check_results import count_text
from zync_assets.lake.head import OutputPosition
from zync_assets.lake.publication import PublishState, rollback_error
from zync_assets.lake.snapshot import Snapshot
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Output, Pipeline
from zync_assets.spark import frames
from zync_assets.spark.session import Session, lazy_session
from zync_assets.spark.tasks import MANY, SMALL_OFFSETS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PATIENCE = 1.0
"""Seconds that a look at many topics waits for a partition's leader."""


@dataclass(frozen=True)
class PartitionPlan:
    """An output partition in Kafka, compared with staging.

    ``position``: the staged offsets. ``publish_state``: how far the partition is published. ``high``: the partition's high
    watermark; for a topic that is not created yet, the base.
    """

    position: OutputPosition
    publish_state: PublishState = field(repr=False)
    high: int

    @property
    def partition(self) -> int:
        return self.publish_state.partition

    @property
    def end(self) -> int:
        """The offset after the last staged record."""
        return self.position.next

    @property
    def verified_end(self) -> int:
        verified_end = self.publish_state.verified_end
        return self.position.base if verified_end is None else verified_end

    @property
    def announced_end(self) -> int:
        """The offset below which a publisher may have sent records. Every publisher announces a window before it sends."""
        return max(self.verified_end, self.publish_state.window or 0)

    @property
    def clean(self) -> bool:
        """Whether the last publisher stopped with all that it had announced sent and verified."""
        return self.announced_end == self.verified_end

    @property
    def nothing_to_do(self) -> bool:
        return self.clean and self.high == self.verified_end == self.end

    @property
    def range(self) -> OffsetRange:
        """The staged offsets that Kafka lacks."""
        return OffsetRange(self.partition, min(self.high, self.end), self.end)

    @property
    def lag(self) -> int:
        """The number of staged records past the verified offset. The topic's own end proves nothing, because the topic may
        hold records of another program."""
        return max(0, self.end - self.verified_end)


@dataclass(frozen=True)
class PublishPlan:
    """The state of an output topic compared with staging.

    ``topic_state``: None for a topic that must be created; ``parts``: the partitions, none if nothing is staged for the topic.
    """

    output: Output
    snapshot: Snapshot = field(repr=False)
    topic_state: TopicState | None
    parts: tuple[PartitionPlan, ...]

    @property
    def state(self) -> StagingState | None:
        return self.snapshot.staging(self.output.pool)

    @property
    def recreate(self) -> str:
        """The command that publishes all of staging to a new topic of the name."""
        return self.snapshot.pipeline.command("to-kafka", "--recreate", self.output.topic)

    @property
    def clean(self) -> bool:
        """Whether the last publisher stopped with all that it had announced sent and verified."""
        return all(part.clean for part in self.parts)

    @property
    def nothing_to_do(self) -> bool:
        if not self.parts:
            return True
        return self.topic_state is not None and all(part.nothing_to_do for part in self.parts)

    @property
    def ranges(self) -> tuple[OffsetRange, ...]:
        """The staged offsets that Kafka lacks."""
        return tuple(part.range for part in self.parts)

    @property
    def lag(self) -> int:
        """The number of staged records that are not verified to be in Kafka."""
        return sum(part.lag for part in self.parts)


@dataclass(frozen=True)
class OutputBatch:
    """A lazy batch of staged records to publish."""

    plan: PublishPlan
    session: Session = field(repr=False)

    @property
    def spark(self) -> SparkSession:
        return self.session()

    @property
    def topic(self) -> str:
        return self.plan.output.topic

    def dataframe(self) -> DataFrame:
        """The staged records that Kafka lacks: kafka, key, value, rule, source, as a Spark DataFrame."""
        if self.plan.state is None:
            raise TopicMissing(f"topic {self.topic}: nothing is staged yet. Run ETL first.")
        return frames.output_frame(self.spark, self.plan.state, self.topic, self.plan.ranges)


@dataclass(frozen=True)
class OutputEnds:
    """The ends of output topics in Kafka, all read at one time. ``snapshot``: the tables of publish, read before. ``states``:
    the topics that exist. ``highs``: topic → its high watermarks; no entry for a topic that lacks a watermark. ``errors``:
    topic → its error, or the error of its first partition without a leader."""

    snapshot: Snapshot
    states: Mapping[str, TopicState]
    highs: Mapping[str, Mapping[int, int]]
    errors: Mapping[str, KafkaError]


def read_output_ends(pipeline: Pipeline, topics: Sequence[str], patience: float | None = None) -> OutputEnds:
    """Look at many output topics with four requests a broker. ``patience``: seconds to wait for a partition's leader, by default
    PATIENCE. Raises BrokerUnavailable and TrustError."""
    snapshot = Snapshot(pipeline)
    for topic in topics:
        snapshot.publish_state(pipeline.output(topic).pool, topic)
    topic_survey = survey(pipeline.kafka, topics, patience=PATIENCE if patience is None else patience)
    whole_states = {topic: state for topic, state in topic_survey.states.items() if not state.away}
    highs = known_watermarks(pipeline.kafka, {topic: partition_numbers(state) for topic, state in whole_states.items()})
    absent_highs = {
        topic: {} for topic in topics if topic not in topic_survey.states and topic not in topic_survey.problems
    }
    return OutputEnds(snapshot, whole_states, {**highs, **absent_highs}, topic_survey.errors)


def plan_publish(pipeline: Pipeline, topic: str, ends: OutputEnds | None = None) -> PublishPlan:
    """The publish plan of a topic. ``ends``: an earlier look at the topic, in place of a look at it alone.

    Raises TopicMissing, TopicRecreated, PartitionsChanged or ForeignRecord if the topic's state shows it.
    """
    item, known_ends = pipeline.output(topic), ends if ends is not None and topic in ends.highs else None
    snapshot = known_ends.snapshot if known_ends else Snapshot(pipeline)
    # Each before the one that it is made from: another publisher may be at work, and must not look like damage.
    publish_state, verified_ends = snapshot.publish_state(item.pool, topic), snapshot.verified_parts(item.pool, topic)
    if known_ends is not None:
        topic_state, highs = known_ends.states.get(topic), known_ends.highs[topic]
    else:
        topic_state = topic_states(pipeline.kafka, [topic]).get(topic)
        highs = high_watermarks(pipeline.kafka, topic, partition_numbers(topic_state)) if topic_state else {}
    state = snapshot.staging(item.pool)
    positions = state.head.positions(topic) if state else {}
    recreate = pipeline.command("to-kafka", "--recreate", topic)
    staged_ends = state.head.output_ends(topic) if state else {}
    loss = rollback_error(item.pool, topic, verified_ends, staged_ends, recreate)
    if loss is not None:
        raise loss
    if state is None:
        check_begins(pipeline, item.pool)
    elif ("files", item.pool) not in snapshot.passed:
        staging.check_whole(state)
        snapshot.passed.add(("files", item.pool))
    if topic_state is None and positions:
        if publish_state.has_topic() or positions[0].topic_id is not None:
            raise TopicMissing(
                f"topic {topic} is gone; it was there when it was numbered. Restore it, or publish all of staging to a new"
                f" one with: {recreate}"
            )
        if item.create is None:
            raise missing_topic(topic)
    if topic_state is not None and positions:
        _check_identity(positions[0], publish_state, topic_state, recreate)
        if error := partitions_error(positions, topic_state, recreate):
            raise error
    parts = tuple(
        PartitionPlan(
            position, snapshot.publish_state(item.pool, topic, partition), highs.get(partition, position.base)
        )
        for partition, position in positions.items()
    )
    for part in parts:
        _check_watermark(topic, part, recreate)
    return PublishPlan(item, snapshot, topic_state, parts)


def small_outputs(
    pipeline: Pipeline, session: Session, topics: Sequence[str], patience: float | None
) -> tuple[dict[str, OutputBatch], list[str], list[ZyncError]]:
    """Returns the batches of small topics, the other topics with records to publish or an unknown end, and the errors of
    topics. A small topic lacks at most SMALL_OFFSETS records. If fewer than MANY topics are small, they are among the other
    topics. ``patience``: the seconds to wait for a partition's leader; without a leader, the topic has an error. None: a topic
    without a leader is among the other topics.

    The small topics have passed their checks. Their batches share one snapshot.
    """
    ends = read_output_ends(pipeline, topics, patience)
    batches: dict[str, OutputBatch] = {}
    other_topics, troubles = list[str](), list[ZyncError]()
    for topic in topics:
        if patience is not None and topic in ends.errors:
            troubles.append(ends.errors[topic])
            continue
        if topic not in ends.highs:
            other_topics.append(topic)
            continue
        with keep_errors(troubles):
            plan = plan_publish(pipeline, topic, ends)
            if plan.nothing_to_do:
                continue
            try:
                if plan.lag <= SMALL_OFFSETS:
                    refuse_unsound(ends.snapshot, topic)
                    batches[topic] = read_staging(session, plan)
                else:
                    other_topics.append(topic)
            except CheckFailed:
                # Each topic looks at a failed check again, which is no work for many threads.
                other_topics.append(topic)
    return (batches, other_topics, troubles) if len(batches) >= MANY else ({}, [*batches, *other_topics], troubles)


def partition_numbers(state: TopicState) -> list[int]:
    """The partitions of a topic, those without a leader too."""
    return sorted([*(part.partition for part in state.partitions), *state.away])


def settling_highs(
    pipeline: Pipeline, topic: str, windows: Mapping[int, int], highs: dict[int, int]
) -> Iterator[dict[int, int]]:
    """The high watermarks of a topic's partitions, look by look, after an unclean stop. A crashed producer's records can still
    surface: the looks end when the topic holds all that was announced, or has stood still for ``settle``.

    ``windows``: partition → the end of the announced window; ``highs``: partition → its high watermark, the first look.
    """
    last_move = time.monotonic()
    yield highs
    while short := [partition for partition, window in windows.items() if highs[partition] < window]:
        if time.monotonic() - last_move >= pipeline.settle_seconds:
            return
        time.sleep(0.2)
        new_highs = high_watermarks(pipeline.kafka, topic, highs)
        # The records of another program in another partition must not lengthen the wait.
        if any(new_highs[partition] != highs[partition] for partition in short):
            last_move = time.monotonic()
        highs = new_highs
        yield highs


def read_staging(spark: SparkSession | Session, plan: PublishPlan) -> OutputBatch:
    """The read half: a lazy batch of what Kafka lacks."""
    return OutputBatch(plan, lazy_session(spark))


def _check_identity(
    position: OutputPosition, publish_state: PublishState, topic_state: TopicState, recreate: str
) -> None:
    same_topic = publish_state.belongs_to(topic_state.topic_id) if publish_state.has_topic() else None
    if same_topic is None and position.topic_id is not None:
        same_topic = position.topic_id == topic_state.topic_id
    if same_topic is False:
        raise TopicRecreated(
            f"topic {topic_state.topic} is another topic than the one that was published to (its id is now"
            f" {topic_state.topic_id}): it was deleted and created again. To publish all of staging to it: {recreate}"
        )


def partitions_error(
    positions: Mapping[int, OutputPosition], topic_state: TopicState, recreate: str
) -> PartitionsChanged | None:
    """The error for a topic that has other partitions than its outputs were numbered for."""
    count, numbered_count = len(partition_numbers(topic_state)), len(positions)
    if count == numbered_count or positions[0].partitions != numbered_count:
        return None
    return PartitionsChanged(
        f"topic {topic_state.topic} has {count_text(count, 'partition')}, and its outputs are numbered for {numbered_count}:"
        " with other partitions, later records of a key would not follow its earlier ones. Nothing was published."
        f" For {count_text(count, 'partition')}, give the output another topic and another staging pool."
        f" To publish all of staging to a new topic with {count_text(numbered_count, 'partition')}: {recreate}"
    )


def _check_watermark(topic: str, part: PartitionPlan, recreate: str) -> None:
    if part.high < part.verified_end:
        raise KafkaError(
            f"topic {topic}, partition {part.partition}: its high watermark {part.high} is below {part.verified_end}, up to where"
            f" it was published: the topic has lost records. To publish all of staging again: {recreate}"
        )
    if part.high > part.end:
        raise foreign_record(topic, part.partition, part.end, recreate)


def missing_topic(topic: str) -> TopicMissing:
    """The error for an output topic that is not there, and that the pipeline file does not let zync create."""
    return TopicMissing(f"topic {topic} is not there. Create it, or add create: to the output.")


def foreign_record(topic: str, partition: int, offset: int, recreate: str) -> ForeignRecord:
    """The error for a record at an offset that is another program's. ``recreate``: the command that publishes the topic again."""
    return ForeignRecord(
        f"topic {topic}, partition {partition}: the record at offset {offset} is not staging's; another program writes to this"
        f" topic, or the lake came from an older copy. Nothing more is published. Stop that program, then: {recreate}"
    )


def difference(plan: PublishPlan, partition: int, offset: int, *, was_cut: bool) -> ForeignRecord:
    """The error for a record that is not staging's. ``was_cut``: retention or compaction may have removed staging's record."""
    if not was_cut or any(part.publish_state.verified_end is not None for part in plan.parts):
        return foreign_record(plan.output.topic, partition, offset, plan.recreate)
    place = storage.publish_uri(plan.snapshot.pipeline.lake, plan.output.pool)
    return ForeignRecord(
        f"topic {plan.output.topic}, partition {partition}: the record at offset {offset} is gone or not staging's, and the lake"
        f" does not know what was published to the topic. If {place} was removed, put it back. If another program writes to this"
        f" topic, stop that program. Nothing more is published. To publish all of staging to a new topic: {plan.recreate}"
    )
