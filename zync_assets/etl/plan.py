"""The plan of an ETL batch: which new records it has, and which older records it matches again.

A batch has a limit. Outputs are numbered batch by batch. A batch of one topic's last week and another topic's last hour would
number a recent event before an event of last week. A batch therefore ends at one place in the sequence of all records
(``lake.sequence``): by the order of their source, or by their carried time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias

from zync_assets.audit.guard import check_begins, check_rollback
from zync_assets.codecs.fields import has_lacking
from zync_assets.errors import EtlError
from zync_assets.etl.retries import (
    NOTHING,
    ClassRange,
    Retries,
    Retry,
    Waits,
    retries_of,
    split,
    waits_of,
    waits_on,
    with_joins,
)
from zync_assets.etl.rule_changes import renamed_rules
from zync_assets.etl.streams import Cut, cuts, domains_of, owners, unseen
from zync_assets.lake import publication, raw, staging
from zync_assets.lake.head import Head
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw import RawState
from zync_assets.lake.sequence import time_batch
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange, normalize
from zync_assets.pipeline import Pipeline
from zync_assets.spark import frames
from zync_assets.spark.session import Session, lazy_session
from zync_assets.spark.sql import shape_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BATCH_RECORDS = 5_000_000
"""The approximate number of raw records in a batch. Files say how many records have which times, about."""


Rebuild: TypeAlias = Literal["views", "state"]
"""``views``: the results of views whose definition changed; ``state``: also the state of all tables, from the raw pool."""

_ALL_OF_KAFKA = re.compile(r"\bkafka`?\s*(?![`.\w])", re.IGNORECASE)


@dataclass(frozen=True)
class Recomputed:
    """A scratch pool with the results of a staging pool's event rules over the raw history.

    ``prefix``: the prefix of the names of the scratch pool's output topics; ``topics``: the output topics that get the
    differences; ``replayed``: topic → replays in the account of the staging pool, before the results were computed.
    """

    state: StagingState = field(repr=False)
    prefix: str
    topics: tuple[str, ...]
    replayed: Mapping[str, int]


@dataclass(frozen=True)
class EtlPlan:
    """The new and retried offsets of one batch for a staging pool.

    The plan reads staging before raw, so that seen is never past the raw table's next offset.
    """

    pool: str
    state: StagingState | None = field(repr=False)
    raw: Mapping[str, RawState | None] = field(repr=False)
    ranges: Mapping[str, tuple[OffsetRange, ...]]
    """Input topic → new offsets of this batch, from seen on."""
    retries: Retries = field(default_factory=Retries, repr=False)
    """The records below seen that the batch matches again."""
    domains: Mapping[str, str] = field(default_factory=dict[str, str])
    """Input topic → its domain. An input in the order of time has none."""
    cuts: Mapping[str, Cut] = field(default_factory=dict[str, Cut], repr=False)
    """Domain → its part of the batch. Empty if there is nothing new."""
    rebuild: Rebuild | None = None
    """The results that the batch computes again. The batch then takes no new records."""
    recomputed: Recomputed | None = None
    """The scratch pool that the batch compares with the staged outputs. The batch then takes no new records."""
    waits: Waits = field(default=Waits(), repr=False)
    """The records that wait for a row."""
    new_views: tuple[str, ...] = ()
    """The views without a result whose tables the pool has."""

    @property
    def nothing_to_do(self) -> bool:
        idle = not any(self.ranges.values()) and not self.retries.parts
        return idle and not self.waits.overdue and not self.is_rebuild and not self.new_views

    @property
    def is_rebuild(self) -> bool:
        return self.rebuild is not None or self.recomputed is not None

    @property
    def reads_nothing(self) -> bool:
        """Whether no record goes through the rules, and there is something to do all the same."""
        return not any(self.reads(topic) for topic in self.ranges)

    def reads(self, topic: str) -> tuple[OffsetRange, ...]:
        """The offsets of an input that go through the rules: new ones, and what is looked at again."""
        return self._reads[topic]

    @cached_property
    def _reads(self) -> Mapping[str, tuple[OffsetRange, ...]]:
        return {topic: tuple(normalize([*self.retries.ranges(topic), *new])) for topic, new in self.ranges.items()}

    @property
    def head(self) -> Head:
        return self.state.head if self.state else Head()


def rebuild_plan(pipeline: Pipeline, pool: str, kind: Rebuild) -> EtlPlan:
    """The plan of a batch without new records, which computes the results of views again. ``kind``: also ``state``, the state of
    their tables from raw records."""
    plan = plan_etl(pipeline, pool)
    has_tables = plan.state is not None and any(rule.tables for rule in pipeline.rules_of(pool))
    ranges: dict[str, tuple[OffsetRange, ...]] = dict.fromkeys(plan.ranges, ())
    waits = waits_on(plan.state)
    return replace(plan, ranges=ranges, retries=Retries(), cuts={}, rebuild=kind if has_tables else None, waits=waits)


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
        return None if state is None else frames.record_frame(self.spark, state, self.plan.reads(self.topic))


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
    """The result of one ETL commit. ``outputs``: topic → new output offsets; ``consumed``: input topic → the new offsets of the
    batch; ``counts``: as ``positions.new_counts``."""

    pool: str
    batch: int
    outputs: Mapping[str, tuple[OffsetRange, ...]]
    consumed: Mapping[str, tuple[OffsetRange, ...]]
    counts: Mapping[str, int]
    seconds: float


def plan_etl(
    pipeline: Pipeline,
    pool: str,
    retry: Retry = NOTHING,
    limit: int = BATCH_RECORDS,
    until: Mapping[tuple[str, int], int] | None = None,
) -> EtlPlan:
    """The plan of the next batch: about ``limit`` new records of a staging pool, the earliest in time.

    The plan also has every record to match again: replays, and the records that ``retry`` selects. ``until``: (topic,
    partition) → the offset that the batch must not reach, 0 for other partitions; None: the batch has no such limit. Raises
    EtlError for a raw table that was replaced.
    """
    # Reads against the flow of the data, because another process may commit meanwhile: published, staging, raw.
    verified = publication.verified_ends(pipeline.lake, pool, [item.topic for item in pipeline.outputs_of(pool)])
    state = staging.open_staging(pipeline.lake, pool)
    head = state.head if state else Head()
    for topic in dict.fromkeys(topic for topic, _ in verified):
        recreate = pipeline.command("to-kafka", "--recreate", topic)
        parts = {p: offset for (name, p), offset in verified.items() if name == topic}
        error = publication.rollback_error(pool, topic, parts, head.output_ends(topic), recreate)
        if error is not None:
            raise error
    if state is None and pipeline.rules_of(pool):
        check_begins(pipeline, pool)
    topics = pipeline.inputs_of(pool)
    states = {item.topic: raw.open_raw(pipeline.lake, item.pool, item.topic) for item in topics}
    states = {
        topic: None if state is None else with_ids(pipeline, pool, topic, state) for topic, state in states.items()
    }
    for topic, table in states.items():
        check_rollback(pipeline.input(topic), head, table)
        if table is None:
            continue
        _check_table(pool, head, topic, table)
        if _is_outdated(pipeline, pool, head, topic, table):
            return plan_etl(pipeline, pool, retry, limit, until)
    ranges = unseen(states, head)
    if until is not None:
        ends = {
            topic: [(part, until.get((topic, part.partition), 0)) for part in parts] for topic, parts in ranges.items()
        }
        ranges = {
            topic: tuple(replace(part, end=min(part.end, end)) for part, end in parts if end > part.first)
            for topic, parts in ends.items()
        }
    retry = replace(retry, waiting=(*retry.waiting, *renamed_rules(pipeline, pool, head)))
    retries = retries_of(pipeline, pool, state, states, retry)
    waits = waits_of(pipeline, pool, state)
    views, is_unfilled = _new_views(pipeline, pool, states, state)
    if any(ranges.values()) or retries.parts or waits.overdue or views or is_unfilled:
        # A batch reads old records of every input that wait for a new one.
        for table in states.values():
            if table is not None:
                raw.check_whole(table)
        if state is not None:
            staging.check_whole(state)
    domains = domains_of(topics, states)
    owner = owners(domains)
    states = {topic: _with_order(table) if topic in owner else table for topic, table in states.items()}
    if is_unfilled and not retries.parts:
        # Before new records, the rows that are there get the default. A replay that the user asked for comes first.
        ranges = dict.fromkeys(ranges, ())
        return EtlPlan(pool, state, states, ranges, domains=owner, rebuild="views", waits=waits_on(state))
    if not any(ranges.values()):
        # A tick with nothing new lists no files.
        return EtlPlan(pool, state, states, ranges, retries, owner, waits=waits, new_views=views)
    files = {
        topic: [item for item in raw.raw_files(table, ranges[topic]) if not raw.is_replay(item)]
        for topic, table in states.items()
        if table is not None and ranges[topic]
    }
    groups = {name: [topic for topic in ranges if owner.get(topic) == name] for name in (*domains, None)}
    limits = _shares(groups, files, limit)
    batch_cuts = cuts(pipeline, domains, states, head, ranges, {name: limits[name] for name in domains})
    batch = time_batch(states, {topic: ranges[topic] for topic in groups[None]}, limits[None])
    for part in batch_cuts.values():
        batch |= part.ranges
    ranges = {topic: batch[topic] for topic in ranges}
    return EtlPlan(pool, state, states, ranges, retries, owner, batch_cuts, waits=waits, new_views=views)


def _with_order(state: RawState | None) -> RawState | None:
    return state if state is None else replace(state, with_order=True)


def _files_of(files: Mapping[str, Sequence[DataFile]], topics: Iterable[str]) -> dict[str, Sequence[DataFile]]:
    return {topic: files[topic] for topic in topics if topic in files}


def _shares(
    groups: Mapping[str | None, Sequence[str]], files: Mapping[str, Sequence[DataFile]], limit: int
) -> dict[str | None, int]:
    """The records that a batch takes of each group of topics, about: as large a share of each group's new records."""
    records = {
        name: sum(item.records for topic_files in _files_of(files, topics).values() for item in topic_files)
        for name, topics in groups.items()
    }
    total = max(limit, sum(records.values()))
    return {name: max(1, limit * count // total) if total > limit else limit for name, count in records.items()}


def with_ids(pipeline: Pipeline, pool: str, topic: str, state: RawState) -> RawState:
    """The state, with the schema ids of its records if some writer's schema lacks a column. An output then leaves out a field
    that is this column, and a table of views has its default. An event rule of the pool that passes on all of ``kafka`` would
    pass on the ids too. Its outputs have null for the field instead."""
    if not any(has_lacking(item.type) for item in state.schema if item.name in ("key", "value")):
        return state
    rules = [rule for rule in pipeline.rules_of(pool) if topic in rule.topics]
    whole = any(_ALL_OF_KAFKA.search(shape_sql(shape)) for rule in rules for shape in (rule.key, rule.value))
    return state if whole else replace(state, with_ids=True)


def with_raw(pipeline: Pipeline, batch: EtlBatch, raw: Mapping[str, RawState]) -> EtlBatch:
    """The batch with other states of some raw tables, by topic."""
    states = {topic: with_ids(pipeline, batch.plan.pool, topic, state) for topic, state in raw.items()}
    return _with_plan(batch, replace(batch.plan, raw={**batch.plan.raw, **states}))


def looking_again(pipeline: Pipeline, batch: EtlBatch, rules: frozenset[str]) -> EtlBatch:
    """The batch, where the pending records of ``rules`` are matched again like new records."""
    plan = batch.plan
    if plan.state is None:
        return batch
    retries = with_joins(pipeline, plan.pool, plan.state, plan.raw, plan.retries, rules)
    return _with_plan(batch, replace(plan, retries=retries))


def with_parts(batch: EtlBatch, parts: Sequence[ClassRange], oldest: Mapping[str, int]) -> EtlBatch:
    """The batch, where some pending records are matched again like new records. ``oldest``: as in ``Waits``, without them."""
    plan = batch.plan
    if plan.state is None or (not parts and oldest == plan.waits.oldest):
        return batch
    retries = plan.retries
    again_parts, expired_parts = split(parts, plan.state, plan.raw)
    sides = frozenset((item.rule, item.topic) for item in parts if item.rule is not None)
    retries = replace(
        retries,
        again=(*retries.again, *again_parts),
        expired=(*retries.expired, *expired_parts),
        some=retries.some | sides,
    )
    return _with_plan(batch, replace(plan, retries=retries, waits=replace(plan.waits, oldest=oldest)))


def _with_plan(batch: EtlBatch, plan: EtlPlan) -> EtlBatch:
    """The batch and its slices with another plan."""
    return replace(batch, plan=plan, slices={topic: replace(part, plan=plan) for topic, part in batch.slices.items()})


def _check_table(pool: str, head: Head, topic: str, table: RawState) -> None:
    """EtlError if an input's raw table was replaced. ETL would skip the new table's records below seen."""
    for (name, partition), item in sorted(head.inputs.items()):
        if name == topic and item.table not in (None, table.table_id):
            raise EtlError(
                f"pool {pool}: topic {topic}, partition {partition}, was transformed up to offset {item.seen} from another raw"
                f" table than {table.table.uri}, which was made since. Put the old table back, or begin anew: give this"
                " input's outputs another staging pool and other topics."
            )


def _is_outdated(pipeline: Pipeline, pool: str, head: Head, topic: str, table: RawState) -> bool:
    """Whether another process committed a batch since this plan read staging, and retention removed that batch's records.

    Raises EtlError if retention removed records that ETL has not seen. This happens if the pipeline file of another process,
    without this pool, let retention remove the records.
    """
    for partition, offset in head.seen(topic).items():
        start = table.retention_start.get(partition, 0)
        if offset < start:
            now = staging.open_staging(pipeline.lake, pool)
            if now is not None and now.head.batch != head.batch:
                return True
            raise EtlError(
                f"pool {pool}: topic {topic}, partition {partition}, was transformed up to offset {offset}, and"
                f" {table.table.uri} begins at offset {start}: retention removed what is between, by a pipeline file that does"
                " not name this pool. Restore the table to a version before that, or begin anew: give this input's outputs"
                " another staging pool and other topics, and let one file name all pools that read the input."
            )
    return False


def read_raw(spark: SparkSession | Session, pipeline: Pipeline, plan: EtlPlan, topic: str) -> RawSlice:
    """The read half for one input."""
    pipeline.input(topic)
    return RawSlice(topic, plan, lazy_session(spark))


def transform(spark: SparkSession | Session, plan: EtlPlan, slices: Mapping[str, RawSlice]) -> EtlBatch:
    """The lazy batch over the slices of one plan; EtlError if a slice is missing or belongs to another batch."""
    for topic in plan.ranges:
        raw_slice = slices.get(topic)
        if raw_slice is None or raw_slice.plan.head.batch != plan.head.batch:
            raise EtlError(
                f"pool {plan.pool}: the slice of {topic} is not of batch {plan.head.batch + 1}; read it again"
            )
    return EtlBatch(plan, slices, lazy_session(spark))


def _new_views(
    pipeline: Pipeline, pool: str, states: Mapping[str, RawState | None], state: StagingState | None
) -> tuple[tuple[str, ...], bool]:
    """The views without a result whose tables the pool has, and whether rows of a table lack the default of a column. The state
    has the tables by the lake's names."""
    if state is None or not any(rule.tables for rule in pipeline.rules_of(pool)):
        return (), False
    # Here alone: Spark's workers load this module, and need no SQL parser.
    from zync_assets.etl.views.query import unfilled_tables
    from zync_assets.etl.views.tables import has_changed, new_views
    from zync_assets.pipeline_file.references import with_lake_names

    rules = with_lake_names(pipeline, states, state).rules_of(pool)
    # A changed view waits for the user's rebuild.
    is_changed = any(rule.view is not None and has_changed(state.head.views, rule, rules) for rule in rules)
    return new_views(rules, state), not is_changed and bool(unfilled_tables(rules, state, states))
