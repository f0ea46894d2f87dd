"""The checks of a batch's results before its commit: every record is in one class, and every output can be published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from zync_assets.errors import EtlError
from zync_assets.etl import failures, retries
from zync_assets.etl.batch import Transform
from zync_assets.etl.encodability import EncodingFailures
from zync_assets.etl.failures import Failure
from zync_assets.etl.output_files import Results
from zync_assets.etl.plan import EtlPlan
from zync_assets.etl.rules import lookups
from zync_assets.etl.rules.kind import MISSING, SEVERAL
from zync_assets.lake.head import OutputPosition
from zync_assets.offsets import place_text
from zync_assets.spark.sql import text_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
            mine = results.entries().where("kind = 'unmatched'").where(f"topic = {text_sql(item.topic)}")
            [row] = mine.selectExpr("min(struct(partition, first)) AS at").collect()
            raise EtlError(
                f"topic {item.topic}, partition {row['at']['partition']}, offset {row['at']['first']}: no rule takes this"
                " record. Add a rule, or set unmatched: keep or drop."
            )
    counted = Counter[str]()
    for row in facts:
        if not row.old:
            counted[row.topic] += row.entries
    for topic, files in transform.files.items():
        ranges = plan.reads(topic)
        inside = all(item.lies_in(ranges) for item in files)
        expected = (
            sum(item.records for item in files) if inside else {**transform.frames, **transform.rows}[topic].count()
        )
        if counted[topic] != expected:
            raise EtlError(
                f"pool {plan.pool}: {expected} new records of {topic} were read and {counted[topic]} accounted for;"
                " nothing was committed. This is a defect of zync_assets: please report it with the pipeline file."
            )


def _encoding_failures(transform: Transform, results: Results) -> dict[failures.Place, Failure]:
    """Place → the failure of each record whose output can't be encoded. EtlError if they are too many."""
    labels = transform.labels
    found: dict[failures.Place, Failure] = {}
    for one in results.encoding_failures:
        place = (labels.topics[one.place], one.partition, one.offset)
        found[place] = Failure(*place, str(labels.rule(one.rule)), f"output to {one.topic}: {one.text}")
    if len(found) > failures.MOST_FAILURES:
        first = found[min(found)]
        raise EtlError(
            f"pool {transform.plan.pool}: rule {first.rule}, {first.text}. {len(found)} records or more fail in this way, the"
            f" first at topic {first.topic}, partition {first.partition}, offset {first.offset}. Nothing was committed."
            " Correct the rule, or the output."
        )
    return found


def without_rows(transform: Transform, rows: DataFrame) -> dict[failures.Place, Failure]:
    """Place → the failure of each record that looks up a row and finds none, or several. ``rows``: the result rows."""
    kinds = ", ".join(text_sql(kind) for kind in (MISSING, SEVERAL))
    found: dict[failures.Place, Failure] = {}
    wanted = rows.where(f"kind IN ({kinds})").selectExpr("kind", "rule", "element_at(source, last + 1) AS at")
    for row in wanted.limit(failures.MOST_FAILURES + 1).collect():
        rule, at = transform.rules[row["rule"]], row["at"]
        place = str(transform.labels.topics[int(at["place"])]), int(at["partition"]), int(at["offset"])
        found[place] = Failure(*place, rule.name, lookups.reason(rule, row["kind"]))
    if len(found) > failures.MOST_FAILURES:
        first = found[min(found)]
        raise EtlError(
            f"pool {transform.plan.pool}: rule {first.rule}, {first.text}, for {failures.MOST_FAILURES} records or more. Nothing"
            " was committed. Ingest the table first, or write missing: null or wait."
        )
    return found


def overdue_failures(transform: Transform) -> list[Failure]:
    """The failures of the records that waited too long for a row, without those that the batch matches again."""
    plan, rules = transform.plan, {rule.name: rule for rule in transform.rules}
    again = retries.spans_of(plan.reopening.parts)
    found: list[Failure] = []
    for item in plan.waits.overdue:
        place = item.topic, item.part.partition, item.part.first
        if item.rule in rules and not retries.is_in(again, place, "pending"):
            found.append(Failure(*place, item.rule, lookups.overdue_reason(rules[item.rule])))
    return found


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
        written = sum(ends[place] - position.next for place, position in outputs.items() if place[0] == topic)
        if written != sum(row.rows for row in results.facts if row.kind == "out" and row.out == topic):
            raise EtlError(
                f"pool {plan.pool}, topic {topic}: not all outputs were written; nothing was committed. This is a defect of"
                " zync_assets: please report it with the pipeline file."
            )
    return ends
