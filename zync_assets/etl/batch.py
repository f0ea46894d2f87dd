"""A batch as result rows: every record has a rule, and the pending records that new records complete are there too.

Everything is lazy. ``commit`` runs the result rows, and ``failure_search`` runs them with other columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zync_assets.etl import positions
from zync_assets.etl.account import Labels, labels_of
from zync_assets.etl.failures import Failures
from zync_assets.etl.frontier import Span
from zync_assets.etl.output_types import OutputType, output_types
from zync_assets.etl.pending import PendingRecords
from zync_assets.etl.plan import EtlBatch, EtlPlan
from zync_assets.etl.rules import kind_of, matching
from zync_assets.etl.rules.matching import Assignment, Columns, Emission, Ordering, RuleRecords
from zync_assets.etl.rules.shapes import learn_types, note_schema
from zync_assets.lake import raw
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw_files import LOWEST
from zync_assets.pipeline import Pipeline, Rule
from zync_assets.spark import frames

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class JoinsChanged(Exception):
    """Records are pending by hashes that the joins of the rules no longer make. Nothing was done."""

    def __init__(self, rules: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(rules)))
        self.rules = rules


@dataclass(frozen=True)
class Transform:
    """The transformation of one batch, the same for every attempt. ``transform_of`` makes it.

    ``ordering``: the order of the result rows. ``files``: input topic → the raw files of the records that go through
    the rules. ``frames``: input topic → these records; no entry for a topic without a raw table. ``types``: output topic →
    its type. ``small``: one Spark task runs the whole batch, and the driver fetches the task's account entries.
    """

    pipeline: Pipeline
    batch: EtlBatch = field(repr=False)
    rules: Sequence[Rule]
    labels: Labels
    ordering: Ordering
    files: Mapping[str, Sequence[DataFile]] = field(repr=False)
    frames: Mapping[str, DataFrame] = field(repr=False)
    types: Mapping[str, OutputType] = field(repr=False)
    small: bool

    @property
    def plan(self) -> EtlPlan:
        return self.batch.plan

    @property
    def spark(self) -> SparkSession:
        return self.batch.spark

    @property
    def spans(self) -> list[list[Span]]:
        """The orders of the records that go through the rules, by the statistics of their files, group by group."""
        return [[span for topic in topics for span in self._spans(topic)] for topics in self.ordering.groups.values()]

    def _spans(self, topic: str) -> Iterator[Span]:
        for item in self.files.get(topic, ()):
            bounds = item.min_order or LOWEST, item.max_order or LOWEST
            if topic not in self.ordering.domains:
                bounds = ((item.min_time or 0) * 1000, 0), ((item.max_time or 0) * 1000, 0)
            place = self.ordering.places[topic], item.partition or 0, item.first or 0, (item.last or 0) + 1
            yield Span(*bounds, item.records, *place)


@dataclass(frozen=True)
class ResultRows:
    """``frame``: see ``matching``. ``joins``: rule → the definition of its join hashes, as in ``Head``."""

    frame: DataFrame
    joins: Mapping[str, str]


def transform_of(pipeline: Pipeline, batch: EtlBatch) -> Transform:
    """The transformation of a batch. ``pipeline``: its rules name fields as the lake does.

    Raises EtlError if two rules of an output disagree about a type, and FieldMissing for a field that no input has.
    """
    plan, rules = batch.plan, pipeline.rules_of(batch.plan.pool)
    places = {item.topic: place for place, item in enumerate(pipeline.inputs) if item.topic in plan.ranges}
    ordering = Ordering(places, plan.domains)
    states = {topic: state for topic, state in plan.raw.items() if state is not None}
    files = {topic: raw.raw_files(state, plan.reads(topic)) for topic, state in states.items()}
    records: dict[str, DataFrame] = {}
    for topic, state in states.items():
        frame = batch.slices[topic].dataframe() if topic in batch.slices else None
        if frame is not None:
            frame = ordering.carried(frame, topic).selectExpr("*", "false AS old")
            records[topic] = note_schema(frame, frames.record_types(state))
    learn_types(matching.questions(rules, records))
    tables = {topic: state.schema for topic, state in states.items()}
    lacks = any(state.with_ids for state in states.values())
    return Transform(
        pipeline,
        batch,
        rules,
        labels_of(pipeline, plan.pool),
        ordering,
        files,
        records,
        output_types(pipeline, plan.pool, plan.state, records, tables, lacks=lacks),
        sum(item.records for each in files.values() for item in each) <= positions.SMALL,
    )


def result_rows(transform: Transform, pending: PendingRecords, failures: Failures, columns: Columns) -> ResultRows:
    """The result rows of a batch. ``failures``: the records with a known failure, which go to no rule. ``columns``: a function
    that returns the columns of outputs.

    Raises JoinsChanged if records are pending by hashes of another join.
    """
    plan, rules, types = transform.plan, transform.rules, transform.types
    assignments = {
        topic: matching.assign(
            transform.pipeline.input(topic), transform.ordering, frame, rules, failures.condition(topic)
        )
        for topic, frame in transform.frames.items()
        if plan.reads(topic) or plan.reads_nothing
    }
    untyped = [index for index, rule in enumerate(rules) if rule.name in types[rule.out].untyped]
    others = [index for index, rule in enumerate(rules) if not kind_of(rule).single and index not in untyped]
    targets = {
        index: types[rule.out].target(rule.name)
        for index, rule in enumerate(rules)
        if index not in others and rule.name in types[rule.out].targets
    }
    parts = [
        matching.singles(
            assignment,
            rules,
            {index: target for index, target in targets.items() if topic in rules[index].topics},
            [index for index in others if topic in rules[index].topics],
            [index for index in untyped if topic in rules[index].topics],
            columns,
        )
        for topic, assignment in assignments.items()
    ]
    each = [_rule_records(transform, index, assignments) for index in others]
    if changed := frozenset(records.rule.name for records in each if _is_changed(plan, records)):
        raise JoinsChanged(changed)
    pending.look_up(each, small=transform.small)
    for records in each:
        target = types[records.rule.out].targets.get(records.rule.name)
        emission = Emission(target, columns, transform.ordering, transform.small)
        waiting = _pending_frames(transform.ordering, records, pending, failures)
        parts += kind_of(records.rule).results(records, waiting, emission)
    joins = {records.rule.name: records.join for records in each if records.join is not None}
    return ResultRows(matching.without_dropped(matching.union(parts), rules), joins)


def _rule_records(transform: Transform, index: int, assignments: Mapping[str, Assignment]) -> RuleRecords:
    """The new records of a rule. A side whose topic has no schema yet has none."""
    rule, records, ordering = transform.rules[index], transform.frames, transform.ordering
    topics = {
        side.name: side.topic
        for side in rule.sides
        if side.topic in records and matching.has_schema(records[side.topic])
    }
    own = {
        side: matching.in_frame(
            assignments[topic].by(index) if topic in assignments else records[topic], side, ordering
        )
        for side, topic in topics.items()
    }
    return kind_of(rule).records(rule, index, {side: records[topic] for side, topic in topics.items()}, own)


def _pending_frames(
    ordering: Ordering, records: RuleRecords, pending: PendingRecords, failures: Failures
) -> dict[str, DataFrame]:
    """Side → the pending records whose join key a new record has, without the failing ones."""
    frames_by_side: dict[str, DataFrame] = {}
    for side in records.rule.sides:
        frame = pending.records(records.rule, side.topic)
        if frame is not None:
            failed = failures.condition(side.topic)
            frame = frame if failed is None else frame.where(f"NOT ({failed})")
            frames_by_side[side.name] = matching.in_frame(ordering.carried(frame, side.topic), side.name, ordering)
    return frames_by_side


def _is_changed(plan: EtlPlan, records: RuleRecords) -> bool:
    """Whether records are pending for a rule by hashes that its join no longer makes."""
    rule, head, again = records.rule, plan.head, plan.reopening
    waits = any(
        head.waiting.get((rule.name, topic), 0) and (rule.name, topic) not in again.sides for topic in rule.topics
    )
    if not waits or records.join is None or rule.name in again.joins:
        return False
    definition = head.joins.get(rule.name)
    return definition != records.join if definition is not None else not records.original
