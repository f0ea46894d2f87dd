"""The plan of an ETL batch, the slices of its inputs, the lazy batch, and the result of its commit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from zync_assets.codecs.field_notes import has_lacking
from zync_assets.errors import EtlError
from zync_assets.etl.batches import BATCH_RECORDS, first_batch
from zync_assets.lake import published, raw, reading, staging
from zync_assets.lake.raw import RawState
from zync_assets.lake.staging import Head, StagingState
from zync_assets.offsets import OffsetRange, new_ranges, normalize
from zync_assets.pipeline import Pipeline
from zync_assets.sql_text import shape_sql
from zync_assets.steps.reopened import NOTHING, Reopening, Retry, reopen, with_joins
from zync_assets.steps.seen import check_begins, check_seen
from zync_assets.steps.session import Session, deferred

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_ALL_OF_KAFKA = re.compile(r"\bkafka`?\s*(?![`.\w])", re.IGNORECASE)


@dataclass(frozen=True)
class EtlPlan:
    """The new and reopened offsets of one batch for a staging pool.

    The plan reads staging before raw, so that seen is never past the raw table's next offset.
    """

    pool: str
    state: StagingState | None = field(repr=False)
    raw: Mapping[str, RawState | None] = field(repr=False)
    ranges: Mapping[str, tuple[OffsetRange, ...]]
    """Input topic → new offsets of this batch, from seen on."""
    reopening: Reopening = field(default_factory=Reopening, repr=False)
    """The records below seen that the batch matches again."""

    @property
    def nothing_to_do(self) -> bool:
        return not any(self.ranges.values()) and not self.reopening.taken

    @property
    def reads_nothing(self) -> bool:
        """Whether no record goes through the rules, and there is something to do all the same."""
        return not any(self.reads(topic) for topic in self.ranges)

    def reads(self, topic: str) -> tuple[OffsetRange, ...]:
        """The offsets of an input that go through the rules: new ones, and what is looked at again."""
        return tuple(normalize([*self.reopening.ranges(topic), *self.ranges[topic]]))

    @property
    def head(self) -> Head:
        return self.state.head if self.state else Head()


@dataclass(frozen=True)
class RawSlice:
    """A lazy slice of one input: the batch's new records, and the records below seen that the batch matches again."""

    topic: str
    plan: EtlPlan = field(repr=False)
    session: Session = field(repr=False)

    @property
    def spark(self) -> SparkSession:
        return self.session()

    def dataframe(self) -> DataFrame | None:
        """The records with ``kafka``, ``key``, ``value`` and ``time``; None if the topic has no raw table yet."""
        state = self.plan.raw[self.topic]
        return None if state is None else reading.record_frame(self.spark, state, self.plan.reads(self.topic))


@dataclass(frozen=True)
class EtlBatch:
    """A lazy batch: the plan and the slices that it was made from. Nothing has run."""

    plan: EtlPlan
    slices: Mapping[str, RawSlice] = field(repr=False)
    session: Session = field(repr=False)

    @property
    def spark(self) -> SparkSession:
        return self.session()


@dataclass(frozen=True)
class EtlCommit:
    """The result of one ETL commit. ``outputs``: topic → new output offsets; ``counts``: class → number of new records."""

    pool: str
    batch: int
    outputs: Mapping[str, tuple[OffsetRange, ...]]
    consumed: Mapping[str, tuple[OffsetRange, ...]]
    counts: Mapping[str, int]
    seconds: float


def plan_etl(pipeline: Pipeline, pool: str, retry: Retry = NOTHING, limit: int = BATCH_RECORDS) -> EtlPlan:
    """The plan of the next batch: about ``limit`` new records of a staging pool, the earliest in time.

    The plan also has every record to match again: replays, and the records that ``retry`` selects. Raises EtlError for a raw
    table that was replaced.
    """
    # Reads against the flow of the data, because another process may commit meanwhile: published, staging, raw.
    verified = published.verified_ends(pipeline.lake, pool, [item.topic for item in pipeline.outputs_of(pool)])
    state = staging.open_staging(pipeline.lake, pool)
    head = state.head if state else Head()
    for topic, offset in verified.items():
        position = head.outputs.get((topic, 0))
        recreate = pipeline.command("to-kafka", "--recreate", topic)
        gone = published.went_back(pool, topic, offset, position.next if position else None, recreate)
        if gone is not None:
            raise gone
    if state is None and pipeline.rules_of(pool):
        check_begins(pipeline, pool)
    topics = pipeline.inputs_of(pool)
    states = {item.topic: raw.open_raw(pipeline.lake, item.pool, item.topic) for item in topics}
    states = {topic: None if state is None else with_ids(pipeline, topic, state) for topic, state in states.items()}
    ranges: dict[str, tuple[OffsetRange, ...]] = {}
    for topic, found in states.items():
        check_seen(pipeline.input(topic), head, found)
        if found is None:
            ranges[topic] = ()
            continue
        _check_table(pool, head, topic, found)
        if _is_outdated(pipeline, pool, head, topic, found):
            return plan_etl(pipeline, pool, retry, limit)
        ranges[topic] = tuple(new_ranges({**found.first, **found.kept, **head.seen(topic)}, found.next))
    reopening = reopen(pipeline, pool, state, states, retry)
    if any(ranges.values()) or reopening.taken:
        # A batch reads old records of every input that wait for a new one.
        for found in states.values():
            if found is not None:
                raw.check_whole(found)
        if state is not None:
            staging.check_whole(state)
    files = {
        topic: [item for item in raw.raw_files(found, ranges[topic]) if not raw.is_replay(item)]
        for topic, found in states.items()
        if found is not None and ranges[topic]  # a tick with nothing new lists no files
    }
    return EtlPlan(pool, state, states, first_batch(ranges, files, limit), reopening)


def with_ids(pipeline: Pipeline, topic: str, state: RawState) -> RawState:
    """The state, whose records have the ids of their writers' schemas where some schema lacks a column: a field that is the
    column is left out then. A rule that passes all of ``kafka`` on would pass the ids on too: it has null for such a field."""
    if not any(has_lacking(item.type) for item in state.schema if item.name in ("key", "value")):
        return state
    rules = [rule for rule in pipeline.rules if topic in rule.topics]
    whole = any(_ALL_OF_KAFKA.search(shape_sql(shape)) for rule in rules for shape in (rule.key, rule.value))
    return state if whole else replace(state, with_ids=True)


def looking_again(pipeline: Pipeline, batch: EtlBatch, rules: frozenset[str]) -> EtlBatch:
    """The batch, where the pending records of ``rules`` are matched again like new records."""
    plan = batch.plan
    if plan.state is None:
        return batch
    whole = replace(plan, reopening=with_joins(pipeline, plan.pool, plan.state, plan.raw, plan.reopening, rules))
    return replace(batch, plan=whole, slices={topic: replace(part, plan=whole) for topic, part in batch.slices.items()})


def _check_table(pool: str, head: Head, topic: str, found: RawState) -> None:
    """EtlError if an input's raw table was replaced. ETL would skip the new table's records below seen."""
    for (name, partition), item in sorted(head.inputs.items()):
        if name == topic and item.table not in (None, found.table_id):
            raise EtlError(
                f"pool {pool}: topic {topic}, partition {partition}, was transformed up to offset {item.seen} from another raw"
                f" table than {found.opened.uri}, which was made since. Put the old table back, or begin anew: give this"
                " input's outputs another staging pool and other topics."
            )


def _is_outdated(pipeline: Pipeline, pool: str, head: Head, topic: str, found: RawState) -> bool:
    """Whether another process committed a batch since this plan read staging, and retention removed that batch's records.

    Raises EtlError if retention removed records that ETL has not seen. This happens if the pipeline file of another process,
    without this pool, let retention remove the records.
    """
    for partition, seen in head.seen(topic).items():
        kept = found.kept.get(partition, 0)
        if seen < kept:
            now = staging.open_staging(pipeline.lake, pool)
            if now is not None and now.head.batch != head.batch:
                return True
            raise EtlError(
                f"pool {pool}: topic {topic}, partition {partition}, was transformed up to offset {seen}, and"
                f" {found.opened.uri} begins at offset {kept}: retention removed what is between, by a pipeline file that does"
                " not name this pool. Restore the table to a version before that, or begin anew: give this input's outputs"
                " another staging pool and other topics, and let one file name all pools that read the input."
            )
    return False


def read_raw(spark: SparkSession | Session, pipeline: Pipeline, plan: EtlPlan, topic: str) -> RawSlice:
    """The read half for one input."""
    pipeline.input(topic)
    return RawSlice(topic, plan, deferred(spark))


def transform(
    spark: SparkSession | Session, pipeline: Pipeline, plan: EtlPlan, slices: Mapping[str, RawSlice]
) -> EtlBatch:
    """The lazy batch over the slices of one plan; EtlError if a slice is missing or belongs to another batch."""
    for topic in plan.ranges:
        found = slices.get(topic)
        if found is None or found.plan.head.batch != plan.head.batch:
            raise EtlError(
                f"pool {plan.pool}: the slice of {topic} is not of batch {plan.head.batch + 1}; read it again"
            )
    return EtlBatch(plan, slices, deferred(spark))
