"""A batch as result rows: every record has a rule, and the pending records that new records complete are there too.

Everything is lazy. ``commit`` runs the result rows, and ``failure_search`` runs them with other columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.codecs.spark_types import rows_frame
from zync_assets.etl import positions, source_rows
from zync_assets.etl.account import Labels, labels_of
from zync_assets.etl.coalescence import final_rows
from zync_assets.etl.encodability import output_limits
from zync_assets.etl.failures import Failures
from zync_assets.etl.hold import Hold
from zync_assets.etl.lookups import row_frames, with_lookups
from zync_assets.etl.output_types import OutputType, output_types, questions
from zync_assets.etl.pending import PendingRecords
from zync_assets.etl.plan import EtlBatch, EtlPlan
from zync_assets.etl.positions import Bound
from zync_assets.etl.rules import is_apart, kind_of, results
from zync_assets.etl.rules.expiry import has_causes
from zync_assets.etl.rules.kind import Columns, Emission, Ordering, OutputColumns, RuleRecords, in_frame, union
from zync_assets.etl.rules.results import Assignment, parts_of, several
from zync_assets.etl.rules.shapes import has_schema, learn_types, note_schema, schema_of
from zync_assets.etl.rules.stateless import singles
from zync_assets.etl.source_rows import NO_HELD_RULES, HeldRules, held_rules, row_columns
from zync_assets.etl.views.batch import Stage, ViewBatch
from zync_assets.etl.views.tables import declared_frame
from zync_assets.kafka.topics import RecordLimits
from zync_assets.lake import raw
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw import RawState
from zync_assets.lake.raw_files import LOWEST
from zync_assets.lake.sequence import OrderSpan
from zync_assets.lake.staging import STATE
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Pipeline, Rule
from zync_assets.spark import frames
from zync_assets.spark.session import set_compiler

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PLACES = pa.schema([("partition", pa.int32()), ("first", pa.int64())])


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
    its type. ``small``: one Spark task runs the whole batch, and the driver fetches the task's account entries. ``held``: the
    rules of held outputs. ``rows``: as ``frames``, for the inputs that are tables of views. No rule takes such a record.
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
    held: HeldRules = NO_HELD_RULES
    rows: Mapping[str, DataFrame] = field(default_factory=dict[str, "DataFrame"], repr=False)

    @property
    def plan(self) -> EtlPlan:
        return self.batch.plan

    @property
    def spark(self) -> SparkSession:
        return self.batch.spark

    def stage(self, failures: Failures) -> Stage:
        """The data for the views of the batch. ``failures``: the records that are known to fail."""
        reads = {topic: self.plan.reads(topic) for topic in self.plan.ranges}
        place = self.pipeline, self.plan.pool, self.spark, self.plan.state
        about = self.types, failures, self.small, self.plan.raw, self.plan.rebuild
        return Stage(*place, self.rules, self.ordering, self.rows, reads, *about)

    @cached_property
    def limits(self) -> Mapping[str, RecordLimits]:
        """Output topic → the most bytes of a record, as far as it is known."""
        return output_limits(self.pipeline, self.types)

    @cached_property
    def bounds(self) -> list[Bound]:
        """The bounds of the buckets of the result rows."""
        return positions.bucket_bounds(self.spans, self.ordering.parts)

    @property
    def components(self) -> list[results.Component]:
        """The components with a query each. A batch of several buckets is one query: each bucket counts the outputs of the
        buckets before."""
        rules, inputs = self.rules, self.ordering.places
        divides = self.plan.recomputed is None and not self.bounds
        return results.components(rules, inputs) if divides else [results.one_component(rules, inputs)]

    @property
    def spans(self) -> list[list[OrderSpan]]:
        """The orders of the records that go through the rules, by the statistics of their files, group by group."""
        return [[span for topic in topics for span in self._spans(topic)] for topics in self.ordering.groups.values()]

    def _spans(self, topic: str) -> Iterator[OrderSpan]:
        for item in self.files.get(topic, ()):
            bounds = item.min_order or LOWEST, item.max_order or LOWEST
            if topic not in self.ordering.domains:
                bounds = ((item.min_time or 0) * 1000, 0), ((item.max_time or 0) * 1000, 0)
            place = self.ordering.places[topic], item.partition or 0, item.first or 0, (item.last or 0) + 1
            yield OrderSpan(*bounds, item.records, *place)


@dataclass(frozen=True)
class ResultFrame:
    """The result rows of a component. ``frame``: a result frame (``etl.rules.kind``). ``outputs``: the component's output
    topics. ``optional``: the columns that only some rules need. ``in_turn``: whether the rows have the column TURN."""

    frame: DataFrame
    outputs: frozenset[str]
    optional: Sequence[str] = ()
    in_turn: bool = False


@dataclass(frozen=True)
class ResultRows:
    """The result frames of a batch, no two of which share a topic. ``joins``: rule → the definition of the rule's join
    hashes."""

    frames: Sequence[ResultFrame]
    joins: Mapping[str, str]

    @property
    def frame(self) -> DataFrame:
        """All rows."""
        return union(item.frame for item in self.frames)


def transform_of(pipeline: Pipeline, batch: EtlBatch) -> Transform:
    """The transformation of a batch. ``pipeline``: its rules name fields as the lake does.

    Raises EtlError if two rules of an output disagree about a type, and FieldMissing for a field that no input has.
    """
    plan, rules = batch.plan, pipeline.rules_of(batch.plan.pool)
    places = {item.topic: place for place, item in enumerate(pipeline.inputs) if item.topic in plan.ranges}
    held = NO_HELD_RULES if plan.recomputed is not None else held_rules(rules)
    ordering = Ordering(places, plan.domains, bool(held))
    states = {topic: state for topic, state in plan.raw.items() if state is not None}
    files = {topic: raw.raw_files(state, plan.reads(topic)) for topic, state in states.items()}
    records: dict[str, DataFrame] = {}
    for topic, state in states.items():
        frame = batch.slices[topic].dataframe() if topic in batch.slices else None
        if frame is not None:
            frame = ordering.carried(frame, topic).selectExpr("*", "false AS old", *row_columns(topic, state, held))
            records[topic] = note_schema(frame, frames.record_types(state))
    tabular = {table.topic for rule in rules for table in rule.tables}
    for topic in sorted(tabular):
        table_frame = declared_frame(pipeline, batch.spark, topic, records.get(topic))
        if table_frame is not None:
            records[topic] = table_frame
    learn_types(questions(rules, records))
    tables = {topic: state.schema for topic, state in states.items()}
    lacks = any(state.with_ids for state in states.values())
    rows = sum(_records(item, plan.reads(topic)) for topic, topic_files in files.items() for item in topic_files)
    state = [item for item in (plan.state.files if plan.state else ()) if (item.group or "").startswith(STATE)]
    set_compiler(batch.spark, pipeline.spark, rows + sum(item.records for item in state))
    return Transform(
        pipeline,
        batch,
        rules,
        labels_of(pipeline, plan.pool),
        ordering,
        files,
        {topic: frame for topic, frame in records.items() if topic not in tabular},
        output_types(pipeline, plan.pool, plan.state, records, tables, lacks=lacks),
        rows <= positions.SMALL and not plan.is_rebuild,
        held,
        {topic: frame for topic, frame in records.items() if topic in tabular},
    )


def _records(item: DataFile, ranges: Sequence[OffsetRange]) -> int:
    """The most records of a raw file that lie in some ranges."""
    first, end = item.first or 0, (item.last or 0) + 1
    inside = sum(
        max(0, min(end, part.end) - max(first, part.first)) for part in ranges if part.partition == item.partition
    )
    return min(item.records, inside)


def result_rows(
    transform: Transform,
    pending: PendingRecords,
    failures: Failures,
    columns: Columns,
    views: ViewBatch | None = None,
    only: Collection[str] | None = None,
) -> ResultRows:
    """The result rows of a batch. ``failures``: the records that are known to fail. They go to no rule. ``columns``: a function
    that returns the columns of outputs. ``views``: the views of the batch, with the rows that its records look up. ``only``:
    the rules whose results the caller needs; None: all rules. The result may hold results of other rules too.

    Raises JoinsChanged if records are pending by hashes of another join.
    """
    plan, rules, types = transform.plan, transform.rules, transform.types
    assignments = {
        topic: results.assign(
            transform.pipeline.input(topic),
            transform.ordering,
            note_schema(_with_decisions(transform, pending.hold, topic, frame), schema_of(frame)),
            rules,
            failures.condition(topic),
            deletes=source_rows.ends_sql(schema_of(frame)["value"].dataType) if transform.held else "false",
            decided=pending.hold.concerns(topic),
        )
        for topic, frame in transform.frames.items()
        if plan.reads(topic) or plan.reads_nothing
    }
    untyped = [index for index, rule in enumerate(rules) if rule.name in types[rule.out].untyped]
    of_records = [(index, rule) for index, rule in enumerate(rules) if rule.view is None]
    manifold = several(rules)
    others = [index for index, rule in of_records if is_apart(rule, manifold) and index not in untyped]
    targets = {
        index: types[rule.out].targets[rule.name]
        for index, rule in of_records
        if index not in others and rule.part_of is None and rule.name in types[rule.out].targets
    }
    parts = {
        topic: [
            singles(
                assignment,
                rules,
                {index: target for index, target in targets.items() if topic in rules[index].topics},
                [index for index in others if topic in rules[index].topics],
                [index for index in untyped if topic in rules[index].topics],
                columns,
                held=bool(transform.held),
            )
        ]
        for topic, assignment in assignments.items()
        if only is None or any(topic in rules[index].topics and rules[index].name in only for index in targets)
    }
    passed_topics = frozenset(parts)
    for topic, released_rows in _released_results(transform, pending.hold, failures, targets, columns):
        parts.setdefault(topic, []).append(released_rows)
    others = [index for index in others if only is None or rules[index].name in only]
    rule_records = [_rule_records(transform, index, assignments) for index in others]
    changed_rules = {records.rule.name for records in rule_records if _is_changed(plan, records)}
    # Records that waited behind others when their output was held.
    changed_rules |= {rules[index].name for index in targets if not rules[index].held and _waits(plan, rules[index])}
    if changed_rules:
        raise JoinsChanged(frozenset(changed_rules))
    pending.look_up(rule_records, small=transform.small)
    for records in rule_records:
        target = types[records.rule.out].targets.get(records.rule.name)
        rows = views.events.joined if views is not None and records.lookups is not None else None
        outputs = parts_of(rules, types, records.rule) if target is not None and records.rule.name in manifold else []
        emission = Emission(target, columns, transform.ordering, transform.small, bool(transform.held), rows, outputs)
        pending_frames = _pending_frames(transform, records, pending, failures)
        parts.setdefault(records.rule.topics[0], []).extend(
            kind_of(records.rule).results(records, pending_frames, emission)
        )
    joins = {records.rule.name: records.join for records in rule_records if records.join is not None}
    result_frames = [
        _result_frame(transform, item, parts, rule_records, views, passed_topics) for item in transform.components
    ]
    empty = ResultFrame(no_rows(transform), frozenset())
    return ResultRows([item for item in result_frames if item is not None] or [empty], joins)


def _result_frame(
    transform: Transform,
    component: results.Component,
    parts: Mapping[str, Sequence[DataFrame]],
    records: Sequence[RuleRecords],
    views: ViewBatch | None,
    topics: Collection[str],
) -> ResultFrame | None:
    """The result rows of a component. ``parts``: input topic → result rows of its records; ``topics``: those with a pass
    over their new records. None if there are none."""
    pipeline, is_held = transform.pipeline, bool(transform.held)
    rules = [rule for rule in transform.rules if rule.out in component.outputs]
    record_rows = [frame for topic, frames in parts.items() if topic in component.inputs for frame in frames]
    merges = any(pipeline.output(rule.out).coalesce for rule in rules)
    with_records = [item.rule for item in records if item.frames and item.rule.out in component.outputs]
    optional = results.optional_columns(with_records, several(rules), merges=merges and bool(record_rows), held=is_held)
    all_rows: list[DataFrame] = []
    if record_rows:
        together = transform.small
        about = transform.types, transform.labels, lambda: transform.limits
        rows = union(record_rows)
        all_rows.append(
            final_rows(rows, pipeline, transform.rules, component.outputs, *about, together=together, held=is_held)
        )
    if component.views and views is not None:
        all_rows += views.rows
    if not all_rows:
        return None
    rows = union(all_rows)
    # Results of one pass over a topic have all columns. Rules without a new record, and views, lack some.
    rows = _with_row_columns(rows) if is_held and component.inputs.isdisjoint(topics) else rows
    in_turn = any(has_causes(rule, transform.ordering) for rule in with_records)
    return ResultFrame(rows, component.outputs, optional, in_turn)


def _with_row_columns(rows: DataFrame) -> DataFrame:
    """Result rows with the columns of held outputs, null where the rows lack them."""
    types = dict.fromkeys(("row", "other_row", "joined", "exact"), "bigint")
    types |= {"changes": "int", "follows": "int", "deletes": "boolean"}
    none = {name: f"CAST(NULL AS {kind})" for name, kind in types.items()} | {"ords": "IF(false, array(ord), NULL)"}
    columns = rows.columns
    return rows.selectExpr("*", *(f"{sql} AS {name}" for name, sql in none.items() if name not in columns))


def no_rows(transform: Transform) -> DataFrame:
    """An empty frame of result rows."""
    source = "array(struct(0 AS place, 0 AS partition, 0L AS offset))"
    order = transform.ordering.of_parts("part")
    parts = (f"0L AS part{at}" for at, _ in enumerate(transform.ordering.parts))
    columns = ["'out' AS kind", "0 AS rule", f"{order} AS ord", f"{source} AS source", "0 AS last", "0 AS waited"]
    rows = transform.spark.range(0).selectExpr(*parts).selectExpr(*columns, "CAST(NULL AS bigint) AS hash")
    return _with_row_columns(rows) if transform.held else rows


def records_at(transform: Transform, state: RawState, places: Sequence[tuple[int, int]]) -> DataFrame:
    """The raw records at some places (partition, offset)."""
    spans = sorted({(partition, offset // frames.SPAN) for partition, offset in places})
    ranges = [OffsetRange(part, span * frames.SPAN, (span + 1) * frames.SPAN) for part, span in spans]
    place_frame = rows_frame(transform.spark, _PLACES, places)
    return frames.records_at(transform.spark, state, place_frame, ranges, few=True)


def _rule_records(transform: Transform, index: int, assignments: Mapping[str, Assignment]) -> RuleRecords:
    """The new records of a rule. A side whose topic has no schema yet has none."""
    rule, records, ordering = transform.rules[index], transform.frames, transform.ordering
    topics = {side.name: side.topic for side in rule.sides if side.topic in records and has_schema(records[side.topic])}
    side_frames = {
        side: in_frame(assignments[topic].by(index) if topic in assignments else records[topic], side, ordering)
        for side, topic in topics.items()
    }
    inputs = {side: records[topic] for side, topic in topics.items()}
    rule_records = kind_of(rule).records(rule, index, inputs, side_frames)
    if not rule.lookups:
        return rule_records
    return with_lookups(rule_records, inputs, row_frames(rule, transform.rows, transform.plan.state))


def _pending_frames(
    transform: Transform, records: RuleRecords, pending: PendingRecords, failures: Failures
) -> dict[str, DataFrame]:
    """Side → the pending records whose join key a new record has, without the failing and the ended ones."""
    frames_by_side: dict[str, DataFrame] = {}
    for side in records.rule.sides:
        frame = pending.records(records.rule, side.topic)
        if frame is not None:
            frame = _old_records(transform, pending.hold, failures, side.topic, frame)
            if pending.hold.concerns(side.topic):
                frame = frame.where("coalesce(fate <> 'ended', true)")
            frames_by_side[side.name] = in_frame(frame, side.name, transform.ordering)
    return frames_by_side


def _old_records(transform: Transform, hold: Hold, failures: Failures, topic: str, frame: DataFrame) -> DataFrame:
    """Pending records as a record frame, without the failing ones."""
    state, condition = transform.plan.raw[topic], failures.condition(topic)
    assert state is not None
    frame = transform.ordering.carried(frame, topic).selectExpr("*", *row_columns(topic, state, transform.held))
    return _with_decisions(transform, hold, topic, frame if condition is None else frame.where(f"NOT ({condition})"))


def _with_decisions(transform: Transform, hold: Hold, topic: str, frame: DataFrame) -> DataFrame:
    """The records with ``fate``, ``at`` and ``follows``, if there is a decision on records of the topic."""
    rows = hold.rows(topic)
    if not rows:
        return frame
    from pyspark.sql import functions as F

    parts = transform.ordering.parts
    schema = pa.schema(
        [
            ("at_partition", pa.int32()),
            ("at_offset", pa.int64()),
            ("fate", pa.string()),
            *((f"part{number}", pa.int64()) for number in range(len(parts))),
            ("follows", pa.int32()),
        ]
    )
    decision_rows = [(*row[:3], *(row.order or [None] * len(parts)), row.number) for row in rows]
    decisions = rows_frame(transform.spark, schema, decision_rows).selectExpr(
        "at_partition", "at_offset", "fate", f"{transform.ordering.of_parts('part')} AS at", "follows"
    )
    at_place = F.expr("kafka.partition = at_partition AND kafka.offset = at_offset")
    return frame.join(F.broadcast(decisions), at_place, "left").selectExpr("* EXCEPT (at_partition, at_offset)")


def _released_results(
    transform: Transform,
    hold: Hold,
    failures: Failures,
    targets: Mapping[int, OutputColumns],
    columns: Columns,
) -> Iterator[tuple[str, DataFrame]]:
    """The results of pending records of earlier batches that follow the record before them, with the topic of the records."""
    index = {rule.name: at for at, rule in enumerate(transform.rules)}
    for (name, topic), places in hold.released().items():
        state, at = transform.plan.raw[topic], index.get(name, -1)
        if state is None or at not in targets:
            continue
        records = records_at(transform, state, places).selectExpr("*", "true AS old")
        frame = _old_records(transform, hold, failures, topic, records)
        item = Assignment(transform.pipeline.input(topic), transform.ordering, frame, [(at, "true")], decided=True)
        yield topic, singles(item, transform.rules, {at: targets[at]}, [], [], columns, held=True)


def _is_changed(plan: EtlPlan, records: RuleRecords) -> bool:
    """Whether records are pending for a rule by hashes that its join no longer makes."""
    rule = records.rule
    if records.join is None or not _waits(plan, rule):
        return False
    definition = plan.head.joins.get(rule.name)
    return definition != records.join if definition is not None else not records.original


def _waits(plan: EtlPlan, rule: Rule) -> bool:
    """Whether records are pending for a rule that the batch does not match again."""
    counts, retries = plan.head.waiting, plan.retries
    waits = any(counts.get((rule.name, topic), 0) and (rule.name, topic) not in retries.sides for topic in rule.topics)
    return waits and rule.name not in retries.joins
