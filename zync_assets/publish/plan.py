"""The plan and the read half of publishing: staging table → output topic.

plan_publish   the records that Kafka lacks, and the records to verify first (no JVM)
read_staging   the lazy batch
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zync_assets.audit.guard import check_begins
from zync_assets.errors import ForeignRecord, KafkaError, TopicMissing, TopicRecreated
from zync_assets.kafka.topics import TopicState, high_watermark, topic_states
from zync_assets.lake import staging
from zync_assets.lake.head import OutputPosition
from zync_assets.lake.publication import PublishState, rollback_error
from zync_assets.lake.snapshot import Snapshot
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Output, Pipeline
from zync_assets.spark import frames
from zync_assets.spark.session import Session, lazy_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class PublishPlan:
    """The state of an output topic compared with staging.

    ``topic_state``: None for a topic that must be created; ``high``: the topic's high watermark.
    """

    output: Output
    snapshot: Snapshot = field(repr=False)
    topic_state: TopicState | None
    high: int

    @property
    def state(self) -> StagingState | None:
        return self.snapshot.staging(self.output.pool)

    @property
    def position(self) -> OutputPosition | None:
        """The staged offsets of the topic; None if nothing is staged for it."""
        return self.state.head.outputs.get((self.output.topic, 0)) if self.state else None

    @property
    def publish_state(self) -> PublishState:
        return self.snapshot.publish_state(self.output.pool, self.output.topic)

    @property
    def recreate(self) -> str:
        """The command that publishes all of staging to a new topic of the name."""
        return self.snapshot.pipeline.command("to-kafka", "--recreate", self.output.topic)

    @property
    def end(self) -> int:
        """The offset after the last staged record."""
        return self.position.next if self.position else 0

    @property
    def verified_end(self) -> int:
        if self.publish_state.verified_end is not None:
            return self.publish_state.verified_end
        return self.position.base if self.position else 0

    @property
    def clean(self) -> bool:
        """Whether the last publisher stopped with all that it had announced sent and verified."""
        return (self.publish_state.window or 0) <= self.verified_end

    @property
    def nothing_to_do(self) -> bool:
        if self.position is None:
            return True
        return self.topic_state is not None and self.clean and self.high == self.verified_end == self.end

    @property
    def ranges(self) -> tuple[OffsetRange, ...]:
        """The staged offsets that Kafka lacks."""
        return (OffsetRange(0, min(self.high, self.end), self.end),) if self.position else ()

    @property
    def lag(self) -> int:
        """The number of staged records past the verified offset. The topic's own end proves nothing, because the topic may
        hold records of another program."""
        return max(0, self.end - self.verified_end)


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


def plan_publish(pipeline: Pipeline, topic: str) -> PublishPlan:
    """The publish plan of a topic. Raises TopicMissing, TopicRecreated or ForeignRecord if the topic's state shows it."""
    item, snapshot = pipeline.output(topic), Snapshot(pipeline)
    # Each before the one that it is made from: another publisher may be at work, and must not look like damage.
    publish_state = snapshot.publish_state(item.pool, topic)
    topic_state = topic_states(pipeline.kafka, [topic]).get(topic)
    high = high_watermark(pipeline.kafka, topic, 0) if topic_state else None
    state = snapshot.staging(item.pool)
    position = state.head.outputs.get((topic, 0)) if state else None
    base = position.base if position else 0
    plan = PublishPlan(item, snapshot, topic_state, base if high is None else high)
    loss = rollback_error(
        item.pool, topic, publish_state.verified_end, position.next if position else None, plan.recreate
    )
    if loss is not None:
        raise loss
    if state is None:
        check_begins(pipeline, item.pool)
    else:
        staging.check_whole(state)
    if topic_state is None and position is not None:
        if publish_state.has_topic() or position.topic_id is not None:
            raise TopicMissing(
                f"topic {topic} is gone; it was there when it was numbered. Restore it, or publish all of staging to a new"
                f" one with: {plan.recreate}"
            )
        if item.create is None:
            raise missing_topic(topic)
    if topic_state is not None:
        _check_identity(plan, topic_state)
    if position is not None:
        _check_watermark(plan)
    return plan


def read_staging(spark: SparkSession | Session, pipeline: Pipeline, plan: PublishPlan) -> OutputBatch:
    """The read half: a lazy batch of what Kafka lacks."""
    pipeline.output(plan.output.topic)
    return OutputBatch(plan, lazy_session(spark))


def _check_identity(plan: PublishPlan, topic_state: TopicState) -> None:
    position, publish_state = plan.position, plan.publish_state
    same_topic = publish_state.belongs_to(topic_state.topic_id) if publish_state.has_topic() else None
    if same_topic is None and position is not None and position.topic_id is not None:
        same_topic = position.topic_id == topic_state.topic_id
    if same_topic is False:
        raise TopicRecreated(
            f"topic {topic_state.topic} is another topic than the one that was published to (its id is now"
            f" {topic_state.topic_id}): it was deleted and created again. To publish all of staging to it: {plan.recreate}"
        )


def _check_watermark(plan: PublishPlan) -> None:
    if plan.high < plan.verified_end:
        raise KafkaError(
            f"topic {plan.output.topic}, partition 0: its high watermark {plan.high} is below {plan.verified_end}, up to where it"
            f" was published: the topic has lost records. To publish all of staging again: {plan.recreate}"
        )
    if plan.high > plan.end:
        raise foreign_record(plan.output.topic, plan.end, plan.recreate)


def missing_topic(topic: str) -> TopicMissing:
    return TopicMissing(f"topic {topic} is not there. Create it, or add create: to the output.")


def foreign_record(topic: str, offset: int, recreate: str) -> ForeignRecord:
    return ForeignRecord(
        f"topic {topic}, partition 0: the record at offset {offset} is not staging's; another program writes to this topic."
        f" Nothing more is published. Stop that program, then: {recreate}"
    )
