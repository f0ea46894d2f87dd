"""The checks of a batch's results before its commit.

Every record is in one class, every output can be published, and no record overtakes a pending one of its source row.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.spark_types import rows_frame, spark_type
from zync_assets.errors import EtlError
from zync_assets.etl import failures, ledger, lookups, positions, retries, source_rows
from zync_assets.etl.account import CHANGE
from zync_assets.etl.batch import Transform, records_at, result_rows
from zync_assets.etl.encodability import EncodingFailures, odd_sql, side_format
from zync_assets.etl.failures import Failure, Failures
from zync_assets.etl.hold import NO_HOLD, HeldRecord, Hold, Place, decide, possible_outputs
from zync_assets.etl.output_files import BucketWriter, ResultQuery, Results
from zync_assets.etl.pending import PendingRecords
from zync_assets.etl.plan import EtlPlan
from zync_assets.etl.rules.group import ENDING
from zync_assets.etl.rules.kind import LACKING, MISSING, SEVERAL, Columns, OutputColumns
from zync_assets.etl.rules.results import KEPT, output_columns
from zync_assets.etl.rules.shapes import ITEM
from zync_assets.etl.source_rows import Fetch, RowTimes
from zync_assets.etl.views.batch import ViewBatch
from zync_assets.lake import staging
from zync_assets.lake.head import OutputPosition
from zync_assets.lake.raw_files import HEADERS_TYPE
from zync_assets.offsets import place_text
from zync_assets.pipeline import Output, Rule
from zync_assets.spark.failures import fails
from zync_assets.spark.sql import text_sql
from zync_assets.spark.tasks import search_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_PLACES = pa.schema([("of_place", pa.int32()), ("of_partition", pa.int32()), ("of_offset", pa.int64())])
_UNSENT = "unsent"
_TEXT = "an output of its group can't be encoded"
UNSENT_TEXT = "a value has no form in the output's format, or a text is not UTF-8."
"""The reason that quarantine gives where a search finds that an output of a pair can't be encoded."""
Positions = Mapping[tuple[str, int], OutputPosition]
"""(output topic, partition) → position."""


def check_classes(transform: Transform, results: Results) -> None:
    """Raise the first error of the results.

    Every new record must be in exactly one class. No record may be unmatched if the pipeline file forbids unmatched
    records. No rule with an unresolved NULL column may take a record. Publish must be able to encode every output.
    """
    plan, facts = transform.plan, results.facts
    for row in facts:
        if row.kind == "untyped":
            rule = row.rule or ""
            raise EtlError(next(kind.untyped[rule] for kind in transform.types.values() if rule in kind.untyped))
    if results.encoding_failures:
        raise EncodingFailures(_encoding_failures(transform, results))
    for item in transform.pipeline.inputs:
        if item.unmatched == "fail" and any(r.kind == "unmatched" and r.topic == item.topic for r in facts):
            unmatched_rows = results.entries().where("kind = 'unmatched'").where(f"topic = {text_sql(item.topic)}")
            [row] = unmatched_rows.selectExpr("min(struct(partition, first)) AS at").collect()
            raise EtlError(
                f"topic {item.topic}, partition {row['at']['partition']}, offset {row['at']['first']}: no rule takes this"
                " record. Add a rule, or set unmatched: keep or drop."
            )
    counts = Counter[str]()
    for row in facts:
        if not row.old:
            counts[row.topic] += row.entries
    for topic, files in transform.files.items():
        ranges = plan.reads(topic)
        inside = all(item.lies_in(ranges) for item in files)
        read_count = (
            sum(item.records for item in files) if inside else {**transform.frames, **transform.rows}[topic].count()
        )
        if counts[topic] != read_count:
            raise EtlError(
                f"pool {plan.pool}: {read_count} new records of {topic} were read and {counts[topic]} accounted for;"
                " nothing was committed. This is a defect of zync_assets: please report it with the pipeline file."
            )


def _encoding_failures(transform: Transform, results: Results) -> dict[failures.Place, Failure]:
    """Place → the failure of each record whose output can't be encoded. EtlError if they are too many."""
    labels = transform.labels
    failure_by_place: dict[failures.Place, Failure] = {}
    for failure in results.encoding_failures:
        place = (labels.topics[failure.place], failure.partition, failure.offset)
        failure_by_place[place] = Failure(
            *place, str(labels.rule(failure.rule)), f"output to {failure.topic}: {failure.text}"
        )
    refuse_many(transform.plan, failure_by_place)
    return failure_by_place


def refuse_many(plan: EtlPlan, failure_by_place: Mapping[failures.Place, Failure]) -> None:
    """EtlError if more records fail than a batch may have."""
    if len(failure_by_place) > failures.MOST_FAILURES:
        first = failure_by_place[min(failure_by_place)]
        raise EtlError(
            f"pool {plan.pool}: rule {first.rule}, {first.text}. {len(failure_by_place)} records or more fail in this way, the"
            f" first at topic {first.topic}, partition {first.partition}, offset {first.offset}. Nothing was committed."
            " Correct the rule, or the output."
        )


@dataclass(frozen=True)
class Attempt:
    """An attempt at a batch, some of whose records fail. ``failures``, ``views``: as for ``result_rows``."""

    transform: Transform
    pending: PendingRecords
    failures: Failures
    views: ViewBatch | None

    def rows(self, columns: Columns, only: Collection[str] | None = None) -> DataFrame:
        """The result rows of event rules, with other columns. A view's outputs are not here. ``only``: as for ``result_rows``."""
        event_views = None if self.views is None else replace(self.views, rows=())
        return result_rows(self.transform, self.pending, self.failures, columns, event_views, only).frame

    def decide_hold(self) -> None:
        """Set ``pending.hold`` to the decision on the source rows of the batch, without a look at the outputs of pairs. An output
        that fails is no tombstone. With the settings of a search."""
        pending = self.pending
        pending.hold = NO_HOLD
        for _ in range(_DECISIONS):
            results = _row_results(self.transform, self.rows(_row_ends), pending.hold)
            try:
                about = self.transform, results.times, results.held_records, pending.hold, self.failures
                check_rows(*about, settled=False)
                break
            except RowsWait as error:
                pending.hold = error.hold
            finally:
                results.release()


def first_unsent(attempt: Attempt, unsent: Mapping[failures.Place, Failure]) -> dict[failures.Place, Failure]:
    """The failures without those of a join key after its first pair that can't be encoded (``failures.first_pairs``).

    ``unsent``: place → the failure of each output that can't be encoded. The place is of the record that completed the output.
    """
    transform = attempt.transform
    takers = {rule.name: rule.part_of or rule.name for rule in transform.rules if failures.is_paired(rule)}
    counts = Counter(takers[failure.rule] for failure in unsent.values() if failure.rule in takers)
    names = {name for name, count in counts.items() if count > 1}
    if not names or transform.plan.recomputed is not None:
        return dict(unsent)
    from pyspark.sql import functions as F

    numbers = {topic: number for number, topic in enumerate(transform.labels.topics)}
    places = rows_frame(transform.spark, _PLACES, [(numbers[place[0]], *place[1:]) for place in unsent])
    rows = attempt.rows(lambda rule, _: failures.pair_columns(rule), names).where("kind = 'out'")
    rows = rows.selectExpr("rule", "element_at(source, last + 1) AS at", "source", "ord", "pair_key", "pair_rank")
    is_unsent = "at.place = of_place AND at.partition = of_partition AND at.offset = of_offset"
    rows = rows.join(F.broadcast(places), F.expr(is_unsent), "left_semi").collect()
    all_places, first_places = (
        {
            (str(transform.labels.topics[row["at"]["place"]]), row["at"]["partition"], row["at"]["offset"])
            for row in some
        }
        for some in (rows, failures.first_pairs(rows, transform.rules))
    )
    return {place: failure for place, failure in unsent.items() if place in first_places or place not in all_places}


def with_groups(attempt: Attempt, unsent: Mapping[failures.Place, Failure]) -> dict[failures.Place, Failure]:
    """The failures, with the records that leave their groups because an output can't be encoded.

    The record that completed the group leaves it, and the next record of the key may complete the group again. Whether the next
    output can be encoded is known once it is made. A search goes through the records of each key as the fold does. One search
    finds all outputs with a value that the format lacks, such as NaN in JSON. For outputs that are too large, it finds the
    outputs of the attempt before. All records of an expired group leave the group.

    ``unsent``: as for ``first_unsent``.
    """
    transform = attempt.transform
    takers = {rule.name: rule.part_of or rule.name for rule in transform.rules if rule.group is not None}
    ends = {place: takers[failure.rule] for place, failure in unsent.items() if failure.rule in takers}
    if not ends or transform.plan.recomputed is not None:
        return dict(unsent)
    search = _Search(transform, ends, takers)
    with search_settings(transform.spark):
        unsent_rows = (
            attempt.rows(search.columns)
            .where(f"failed = '{_UNSENT}'")
            .selectExpr("rule", "element_at(source, last + 1) AS at")
        )
        rows = unsent_rows.limit(failures.MOST_FAILURES + 1).collect()
    failure_by_place = {place: failure for place, failure in unsent.items() if place not in ends}
    for row in rows:
        rule, at = transform.rules[row["rule"]], row["at"]
        place = str(transform.labels.topics[int(at["place"])]), int(at["partition"]), int(at["offset"])
        failure_by_place[place] = unsent.get(place) or Failure(*place, rule.name, f"output to {rule.out}: {_TEXT}")
    return failure_by_place or dict(unsent)


@dataclass(frozen=True)
class _Search:
    """``ends``: the place of the last record of each group whose output can't be encoded → the group's rule. ``takers``: a rule
    of groups, or of their further outputs → the rule."""

    transform: Transform
    ends: Mapping[failures.Place, str]
    takers: Mapping[str, str]

    def columns(self, rule: Rule, target: OutputColumns) -> list[tuple[str, str]]:
        """The columns ``failed`` and ``blamed`` of a rule, as in ``failures.failing_sides``."""
        none = "CAST(NULL AS STRING)"
        taker = self.takers.get(rule.name)
        places = [place for place, name in self.ends.items() if name == taker]
        if not places:
            return [("failed", none), ("blamed", none)]
        topics = list(self.transform.labels.topics)
        ending_places = (f"({topics.index(topic)}, {partition}, {offset}L)" for topic, partition, offset in places)
        ending = f"({ENDING}.place, {ENDING}.partition, {ENDING}.offset) IN ({', '.join(ending_places)})"
        odd = odd_conditions(self.transform.pipeline.output(rule.out), rule, target)
        failed = dict(failures.failing_sides(rule, target))["failed"]
        # An output with an expression that fails is not made, and has no form to look at.
        unsent = f"CASE WHEN {' OR '.join([ending, *odd])} THEN '{_UNSENT}' END"
        return [("failed", f"coalesce({failed}, {unsent})"), ("blamed", none)]


def odd_conditions(item: Output, rule: Rule, target: OutputColumns) -> list[str]:
    """Conditions for outputs of a rule with a value that the output's format can't hold."""
    kinds = {side[0]: side[2] for side in (target.key, target.value) if side is not None}
    kinds[staging.HEADERS_COLUMN] = spark_type(HEADERS_TYPE)
    conditions: list[str] = []
    for name, sql in output_columns(rule, target):
        if name in (LACKING, KEPT):
            continue
        odd = odd_sql("made", kinds[name], side_format(item, name), times=False, texts=True)
        outputs = f"array({sql})" if rule.explode is None else f"transform({rule.explode}, {ITEM} -> {sql})"
        conditions += [f"coalesce(exists({outputs}, made -> {odd}), false)"] if odd is not None else []
    return conditions


def without_rows(transform: Transform, rows: DataFrame) -> dict[failures.Place, Failure]:
    """Place → the failure of each record that looks up a row and finds none, or several. ``rows``: the result rows."""
    kinds = ", ".join(text_sql(kind) for kind in (MISSING, SEVERAL))
    failure_by_place: dict[failures.Place, Failure] = {}
    failing_rows = rows.where(f"kind IN ({kinds})").selectExpr("kind", "rule", "element_at(source, last + 1) AS at")
    for row in failing_rows.limit(failures.MOST_FAILURES + 1).collect():
        rule, at = transform.rules[row["rule"]], row["at"]
        place = str(transform.labels.topics[int(at["place"])]), int(at["partition"]), int(at["offset"])
        failure_by_place[place] = Failure(*place, rule.name, lookups.reason(rule, row["kind"]))
    if len(failure_by_place) > failures.MOST_FAILURES:
        first = failure_by_place[min(failure_by_place)]
        raise EtlError(
            f"pool {transform.plan.pool}: rule {first.rule}, {first.text}, for {failures.MOST_FAILURES} records or more. Nothing"
            " was committed. Ingest the table first, or write missing: null or wait."
        )
    return failure_by_place


def overdue_failures(transform: Transform) -> list[Failure]:
    """The failures of the records that waited too long for a row, without those that the batch matches again."""
    plan, rules = transform.plan, {rule.name: rule for rule in transform.rules}
    retry_spans = retries.spans_of(plan.retries.parts)
    overdue: list[Failure] = []
    for item in plan.waits.overdue:
        place = item.topic, item.part.partition, item.part.first
        if item.rule in rules and not retries.is_in(retry_spans, place, "pending"):
            overdue.append(Failure(*place, item.rule, lookups.overdue_reason(rules[item.rule])))
    return overdue


def output_ends(plan: EtlPlan, results: Results, outputs: Positions) -> dict[tuple[str, int], int]:
    """(topic, partition) → the first output offset of the next batch. EtlError if the files' offsets have gaps or overlap."""
    ends = {place: position.next for place, position in outputs.items()}
    for file in results.files:
        place = str(file.group), file.partition or 0
        end = ends[place]
        if file.first != end:
            raise EtlError(
                f"pool {plan.pool}, {place_text(*place)}: offset {file.first} follows {end - 1}: Spark made the rows twice, and"
                " not the same. Nothing was committed. Do the rules use the time of day? Without such a rule, run it again."
            )
        ends[place] += file.records
    for topic in {topic for topic, _ in outputs}:
        output_count = sum(ends[place] - position.next for place, position in outputs.items() if place[0] == topic)
        if output_count != sum(row.rows for row in results.facts if row.kind == "out" and row.out == topic):
            raise EtlError(
                f"pool {plan.pool}, topic {topic}: not all outputs were written; nothing was committed. This is a defect of"
                " zync_assets: please report it with the pipeline file."
            )
    return ends


class RowsWait(Exception):
    """Records have to wait behind others of their source row, or to follow them. Nothing was done."""

    def __init__(self, hold: Hold) -> None:
        super().__init__(f"{len(hold.decision.waiting)} records wait")
        self.hold = hold


def check_rows(
    transform: Transform, times: RowTimes, fetch: Fetch, hold: Hold, known_failures: Failures, *, settled: bool
) -> None:
    """RowsWait if records of held outputs have to wait behind others of their source row, or to follow them.

    ``times``, ``fetch``, ``settled``: of the batch's results (``Results``). ``hold``: the decision that the results followed.
    """
    if not transform.held:
        return
    plan, state, labels = transform.plan, transform.plan.state, transform.labels
    held_by_name = {rule.name: rule for rule in transform.rules if rule.held}
    failed_places = {failure.place for failure in known_failures.of(plan, old=True)}
    waits_in = state if state is not None and any(plan.head.waiting.values()) else None
    rows, ledger_rows = times.in_question(), np.array([], np.int64)
    if waits_in is not None:
        joining = {rule.name for rule in held_by_name.values() if rule.sides[0].keys}
        expired_places = {
            (item.topic, item.part.partition, offset)
            for item in plan.retries.expired
            for offset in range(item.part.first, item.part.end)
            if item.kind == "pending"
        }
        ledger_rows = ledger.rows_before(waits_in, times.single, times.completed, joining)
        ledger_rows = np.union1d(ledger_rows, ledger.rows_at(waits_in, failed_places | expired_places))
    failing_rows = [item.row[1] for item in known_failures.waiting if item.row is not None]
    other_rows = np.union1d(ledger_rows, np.array(failing_rows, np.int64))
    rows = np.union1d(rows, other_rows)
    if not len(other_rows if settled else rows):
        return
    records, rows, freed = source_rows.records_in_question(fetch, rows)
    entries = ledger.NO_ENTRIES if waits_in is None else ledger.pending_in(waits_in, rows)
    waiting: frozenset[Place] = frozenset()
    if not failed_places and not failing_rows and not plan.retries.parts:
        plain, waits = source_rows.plainly_waiting(records, entries, freed, transform.held, labels)
        waiting = frozenset(source_rows.places(records.filter(pa.array(waits)), labels))
        plain_rows = pc.unique(records.filter(pa.array(plain))["row"])
        records = records.filter(pa.array(~plain))
        entries = entries.filter(pc.invert(pc.is_in(entries["row"], plain_rows)))
    decided_places = failed_places | hold.decision.ended | {*source_rows.places(records, labels)}
    retry_spans = retries.spans_of(plan.retries.parts)
    rules: dict[Place, str] = {}
    seen_offsets = {place: position.seen for place, position in plan.head.inputs.items()}
    held_records = [*source_rows.held_records(records, transform.held, labels, seen_offsets), *known_failures.waiting]
    names = {rule.name for rule in transform.rules}
    for entry in entries.to_pylist():
        place: Place = entry["topic"], entry["partition"], entry["first"]
        name, rule, changes = entry["rule"], held_by_name.get(entry["rule"]), entry["text"] == CHANGE
        if (rule is None and name in names) or retries.is_in(retry_spans, place, "pending"):
            continue
        rules[place] = name
        if place in decided_places:
            continue
        if rule is not None:
            row, joins = (rule.out, entry["row"]), bool(rule.sides[0].keys)
            held_records.append(HeldRecord(place, name, row, True, None, joins, entry["hash"], changes=changes))
            continue
        # The pipeline file lacks the rule, and so the output. The record holds its row in each output of the topic.
        for out in possible_outputs(transform.rules, place[0]):
            held_records.append(HeldRecord(place, name, (out, entry["row"]), True, None, True, changes=changes))
    decision = decide(_with_sequences(transform, held_records))
    decision = replace(decision, waiting=decision.waiting | waiting)
    if not hold.covers(decision):
        raise RowsWait(hold.extended(decision, rules))


_ROW_COLUMNS = (
    *("kind", "rule", "source", "last", "waited", "hash", "false AS suspect", "row", "other_row", "changes"),
    "coalesce(deletes, false) AS deletes",
    "coalesce(CASE kind WHEN 'out' THEN ends ELSE deletes END, false) AS ends",
    *("ords", "joined", "exact"),
)
"""The columns of result rows that tell about source rows (``HeldRules.report``)."""
_DECISIONS = 20
"""Runs of a batch that look for a decision: mostly two."""


def _row_results(transform: Transform, frame: DataFrame, hold: Hold) -> Results:
    """The results of rows about their source rows alone. ``hold``: the decision that the rows follow."""
    frame = frame if "ends" in frame.columns else frame.selectExpr("*", "false AS ends")
    ties, together = [] if hold is NO_HOLD else ["follows"], transform.small
    parts, bounds = transform.ordering.parts, transform.bounds
    rows = positions.arranged(frame, parts, bounds, _ROW_COLUMNS, [], together=together, ties=ties)
    writer = BucketWriter("", [], transform.labels, held=transform.held)
    return Results(transform.spark, [ResultQuery(rows, writer)], small=together, records=lambda: rows)


def _row_ends(rule: Rule, target: OutputColumns) -> list[tuple[str, str]]:
    """The column ``ends`` of a rule without a counterpart: whether its output is a tombstone. And KEPT."""
    if not rule.held or rule.sides[0].keys:
        # The query computes no part of these outputs, because an output may fail.
        return [("failed", "CAST(NULL AS STRING)"), ("blamed", "CAST(NULL AS STRING)")]
    columns = dict(output_columns(rule, target))
    value = "NULL" if target.value is None else columns[target.value[0]]
    kept = [(KEPT, f"NOT {fails(columns[KEPT])} AND {columns[KEPT]}")] if KEPT in columns else []
    return [("ends", f"NOT {fails(value)} AND ({value}) IS NULL"), *kept]


def _with_sequences(transform: Transform, records: Sequence[HeldRecord]) -> list[HeldRecord]:
    """The records, with ``sequence`` where a row has records below *seen* in several partitions: the key moved."""
    partitions: dict[object, set[int]] = defaultdict(set)
    for item in records:
        if item.before and item.row is not None:
            partitions[item.row].add(item.place[1])
    moved_records = [item for item in records if item.before and len(partitions[item.row]) > 1]
    orders = {item.place: item.order for item in moved_records if item.order is not None}
    unread_places = {item.place for item in moved_records} - orders.keys()
    for topic in sorted({topic for topic, *_ in unread_places}):
        state = transform.plan.raw[topic]
        assert state is not None
        frame = transform.ordering.carried(
            records_at(transform, state, [at[1:] for at in unread_places if at[0] == topic]), topic
        )
        order = transform.ordering.sql(topic, "kafka.partition", "kafka.offset")
        for row in frame.selectExpr("kafka.partition AS part", "kafka.offset AS offset", f"{order} AS ord").collect():
            orders[topic, row["part"], row["offset"]] = tuple(row["ord"])
    return [replace(item, sequence=orders[item.place]) if item.place in orders else item for item in records]
