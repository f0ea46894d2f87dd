"""Records that an ETL batch can't transform: found by SQL, sent to quarantine, or undecoded beside the raw table.

Finds the records that an expression fails on. Spark stops at the first failing record, and does not name the
record.

``fails`` is a condition that is true for a record on which an expression fails: Spark's ``try_to_binary`` returns NULL
for any error inside its argument. One pass over a batch therefore finds every failing record. The pass needs the
settings SETTINGS. Otherwise Spark computes an expression that occurs twice once, outside of ``try_to_binary``.

Records of an ETL batch that go into quarantine: an expression fails on them, or what is made of them can't be
encoded.

Reads the side table of a raw table within a batch's new offsets: undecodable records, and offset ranges that
retention removed or that an input's shape excludes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.codecs.spark_types import listed_frame
from zync_assets.etl import account
from zync_assets.etl.plan import EtlPlan
from zync_assets.etl.retries import Taken
from zync_assets.etl.rules import matching
from zync_assets.etl.rules.join_keys import key_types
from zync_assets.etl.rules.matching import Target, conditions, has_schema, wanted
from zync_assets.etl.rules.shapes import headers_sql, type_sql
from zync_assets.lake import quarantine, raw
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw import RawState
from zync_assets.lake.raw_files import BAD_SCHEMA, RANGE_STAGES
from zync_assets.lake.snapshot import Snapshot
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Denorm, Input, Pipeline, Rule
from zync_assets.spark import frames
from zync_assets.spark.sql import shape_sql
from zync_assets.spark.tasks import fails

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def sides_sql(rule: Rule, target: Target) -> dict[str, str]:
    """A rule's output expressions: side (shape, key, value, headers) → SQL."""
    sides = {} if rule.keep is None else {"shape": rule.keep}
    sides |= {side: wanted(rule, shape_sql(shape)) for side, shape in (("key", rule.key), ("value", rule.value))}
    if target.headers and rule.headers is not None:
        sides["headers"] = wanted(rule, headers_sql(rule.headers))
    return sides


def failing_sides(rule: Rule, target: Target) -> list[tuple[str, str]]:
    """The columns ``failed`` and ``blamed`` for ``etl.rules.matching.singles`` and ``paired``, as (name, SQL).

    ``failed``: the output side whose expression fails. ``blamed``: the input side, left or right, whose record makes the
    expression fail with any record on the other side. Null if both records fail alone, or if only the pair fails.
    """
    sides = sides_sql(rule, target)
    found = " ".join(f"WHEN {fails(sql)} THEN '{side}'" for side, sql in sides.items())
    blamed = "CAST(NULL AS STRING)"
    if isinstance(rule, Denorm):
        alone = {sql: (fails_alone(sql, "left"), fails_alone(sql, "right")) for sql in sides.values()}
        cases = [
            f"WHEN {fails(sql)} THEN CASE WHEN {left} AND NOT {right} THEN 'left' WHEN {right} AND NOT {left} THEN 'right' END"
            for sql, (left, right) in alone.items()
        ]
        blamed = f"CASE {' '.join(cases)} END"
    return [("failed", f"CASE {found} END"), ("blamed", blamed)]


def first_failing(expressions: Sequence[tuple[str, str]]) -> str:
    """The index of the first of a rule's expressions that fails; null where none does. ``expressions``: (place, SQL)."""
    cases = " ".join(f"WHEN {fails(f'({sql})')} THEN {index}" for index, (_, sql) in enumerate(expressions))
    return f"CAST(CASE {cases} END AS INT)"


def fails_alone(sql: str, side: str) -> str:
    """Whether an expression fails with one side's record while the other's is null."""
    other = "right" if side == "left" else "left"
    absent = f"CASE WHEN `{other}`.kafka.offset < 0 THEN `{other}` END"
    return fails(f"transform(array({absent}), `{other}` -> {sql})")


def failing_records(
    item: Input,
    frame: DataFrame,
    rules: Sequence[Rule],
    others: Mapping[str, DataFrame],
    known: str,
) -> DataFrame:
    """The records of a topic that fail in a ``where`` or a ``join-on``: partition, offset, ``rule`` (its index), ``failed``.

    ``rules``: the staging pool's; ``others``: the record frames of all topics that have a table;
    ``known``: a condition for records that are not looked at.
    """
    asked = conditions(item, frame, rules)
    chosen = [
        f"CASE {' '.join(f'WHEN {sql} THEN {index}' for index, sql in asked[: end + 1])} END"
        for end in range(len(asked))
    ]
    # The first rule at which the conditions fail is the failing rule.
    where = " ".join(f"WHEN {fails(sql)} THEN {index}" for (index, _), sql in zip(asked, chosen, strict=True))
    if not asked or not has_schema(frame):
        return frame.where("false").selectExpr("0 AS partition", "0L AS offset", "0 AS rule", "'' AS failed")
    frame = frame.where(f"NOT ({known})").selectExpr("*", f"CASE {where} END AS wrong")
    frame = frame.selectExpr("*", f"CASE WHEN wrong IS NULL THEN {chosen[-1]} END AS taken")
    frame = frame.selectExpr(
        "kafka", "wrong", "taken", "struct(kafka, key, value) AS `left`", "struct(kafka, key, value) AS `right`"
    )
    joins: list[str] = []
    for index, rule in enumerate(rules):
        if not isinstance(rule, Denorm) or item.topic not in rule.topics:
            continue
        sides = {"left": rule.left, "right": rule.right}
        kinds = key_types(
            rule,
            {side: others[topic] for side, topic in sides.items() if topic in others and has_schema(others[topic])},
        )
        place = 0 if item.topic == rule.left else 1
        keys = ", ".join(
            f"CAST(({pair[place]}) AS {type_sql(kind)})" for kind, pair in zip(kinds, rule.join_on, strict=True)
        )
        joins.append(f"WHEN taken = {index} AND {fails(keys)} THEN 'join-on'")
    joined = f"WHEN wrong IS NULL THEN CASE {' '.join(joins)} END" if joins else ""
    return frame.selectExpr(
        "kafka.partition AS partition",
        "kafka.offset AS offset",
        "coalesce(wrong, taken) AS rule",
        f"CASE WHEN wrong IS NOT NULL THEN 'where' {joined} END AS failed",
    ).where("failed IS NOT NULL")


MOST_FAILURES = 10_000
"""Records of one batch that may fail: more are no bad records but a bad rule, or output."""

Place = tuple[str, int, int]
"""Input topic, partition, offset."""


@dataclass(frozen=True)
class Failure:
    """A record, the rule that fails on it, and why."""

    topic: str
    partition: int
    offset: int
    rule: str
    text: str

    @property
    def place(self) -> Place:
        return self.topic, self.partition, self.offset

    @property
    def said(self) -> str:
        """Rule and reason."""
        return f"rule {self.rule}, {self.text}"

    @property
    def part(self) -> OffsetRange:
        return OffsetRange(self.partition, self.offset, self.offset + 1)

    def entry(self) -> dict[str, object]:
        """Its ledger row."""
        taken = Taken(self.topic, "pending", None, self.part)
        return {**taken.entry("quarantined"), "rule": self.rule, "text": self.text}


@dataclass(frozen=True)
class Failures:
    """The known failures of a batch."""

    found: Mapping[Place, Failure] = field(default_factory=dict)

    def condition(self, topic: str) -> str | None:
        """An SQL condition that is true for the failing records of a topic; None if no record of the topic fails."""
        offsets: dict[int, list[int]] = {}
        for name, partition, offset in sorted(self.found):
            if name == topic:
                offsets.setdefault(partition, []).append(offset)
        parts = [
            f"(kafka.partition = {partition} AND kafka.offset IN ({', '.join(map(str, places))}))"
            for partition, places in offsets.items()
        ]
        return " OR ".join(parts) or None

    def of(self, plan: EtlPlan, *, old: bool) -> list[Failure]:
        """The failures of pending records (``old``), or of the batch's new records. Sorted by topic, partition, offset."""
        reads = {topic: plan.reads(topic) for topic in plan.ranges}
        return [
            failure
            for _, failure in sorted(self.found.items())
            if old
            != any(
                part.partition == failure.partition and part.first <= failure.offset < part.end
                for part in reads[failure.topic]
            )
        ]

    def waited(self, plan: EtlPlan) -> list[Taken]:
        """The failing pending records, which leave the class pending."""
        return [Taken(one.topic, "pending", one.rule, one.part) for one in self.of(plan, old=True)]


NONE = Failures()


def undecoded_rows(spark: SparkSession, pipeline: Pipeline, plan: EtlPlan) -> DataFrame | None:
    """The quarantined and lost offsets within the new ranges, as rows like ``account.ENTRIES`` with a column ``records``.

    None without such offsets.
    """
    frames: list[DataFrame] = []
    for topic, ranges in plan.ranges.items():
        state = plan.raw[topic]
        if not ranges or state is None or not any([*state.bad.values(), *state.left_out.values()]):
            continue
        side = Snapshot(pipeline, plan.raw).quarantine(topic)
        files = [
            item
            for item in quarantine.quarantine_files(state, side)
            if any(part.partition == item.partition and part.first <= (item.last or 0) for part in ranges)
        ]
        if side is not None and files:
            frames.append(_rows(spark, plan, topic, state, side.uri, files))
    return matching.union(frames) if frames else None


def quarantined(rows: DataFrame | None) -> Counter[tuple[str, int]]:
    """(topic, partition) → quarantined records in the new ranges; ranges hold none."""
    if rows is None:
        return Counter()
    found = rows.where("kind = 'quarantined'").groupBy("topic", "partition").count().collect()
    return Counter({(row["topic"], row["partition"]): row["count"] for row in found})


def _rows(
    spark: SparkSession, plan: EtlPlan, topic: str, state: RawState, uri: str, files: Sequence[DataFile]
) -> DataFrame:
    from pyspark.sql import functions as F

    of_range = F.col("stage").isin(*RANGE_STAGES)
    frame = frames.parquet_frame(spark, uri, files, BAD_SCHEMA).select(
        F.when(of_range, "dropped").otherwise("quarantined").alias("kind"),
        F.lit(topic).alias("topic"),
        F.col("kafka.partition").alias("partition"),
        F.col("kafka.offset").alias("first"),
        "end",
        F.when(of_range, 0).otherwise(1).cast("long").alias("records"),
    )
    inside = F.lit(False)
    for part in plan.ranges[topic]:
        inside = inside | ((F.col("partition") == part.partition) & F.col("first").between(part.first, part.end - 1))
    frame = frame.filter(inside)
    replayed = [(p, offset) for p, found in raw.replayed_offsets(state).items() for offset in found.tolist()]
    if replayed:
        # They are in the raw table, and go through the rules.
        places = listed_frame(spark, pa.schema([("partition", pa.int32()), ("first", pa.int64())]), replayed)
        frame = frame.join(places, ["partition", "first"], "left_anti")
    return account.cut_at_strides(frame)
