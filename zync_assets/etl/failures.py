"""Records that an ETL batch can't transform, and that go into quarantine.

An expression of a rule fails on such a record, the output of the record can't be encoded, or ingest could not decode the record.
Spark stops at the first record on which an expression fails, and does not name the record. ``fails`` is a condition that is true
for such a record: Spark's ``try_to_binary`` returns NULL for any error inside its argument. One pass over a batch therefore finds
every failing record. The pass needs ``spark.tasks.search_settings``. Otherwise Spark computes an expression that occurs twice
only once, outside of ``try_to_binary``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.codecs.spark_types import rows_frame
from zync_assets.etl import account
from zync_assets.etl.hold import HeldRecord, Place
from zync_assets.etl.plan import EtlPlan
from zync_assets.etl.retries import ClassRange
from zync_assets.etl.rules import kind_of
from zync_assets.etl.rules.group import AGGREGATE, COMPLETE
from zync_assets.etl.rules.kind import OutputColumns, union
from zync_assets.etl.rules.results import if_kept, output_columns, rule_conditions
from zync_assets.etl.rules.shapes import has_schema, headers_sql
from zync_assets.lake import quarantine_table, raw
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw import RawState
from zync_assets.lake.raw_files import BAD_SCHEMA, RANGE_STAGES
from zync_assets.lake.snapshot import Snapshot
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Input, Pipeline, Rule
from zync_assets.spark import frames
from zync_assets.spark.failures import fails
from zync_assets.spark.sql import leaves, shape_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession


def sides_sql(rule: Rule, target: OutputColumns) -> dict[str, str]:
    """A rule's output expressions: side (shape, key, value, headers) → SQL."""
    sides = {} if rule.keep is None else {"shape": rule.keep}
    sides |= {side: if_kept(rule, shape_sql(shape)) for side, shape in (("key", rule.key), ("value", rule.value))}
    if target.headers and rule.headers is not None:
        sides["headers"] = if_kept(rule, headers_sql(rule.headers))
    if rule.explode is not None:
        # The expressions of every element.
        sides = {"explode": rule.explode} | {
            side: f"transform({rule.explode}, item -> {sql})" for side, sql in sides.items()
        }
    return sides


def failing_sides(rule: Rule, target: OutputColumns) -> list[tuple[str, str]]:
    """The columns ``failed``, ``blamed``, ``pair_key`` and ``pair_rank`` for ``singles`` and ``paired``, as (name, SQL).

    ``failed``: the output side whose expression fails. ``blamed``: the side of the rule whose record makes the expression
    fail with any record on the others. Null if several records fail alone, or if only the records together fail. The others are
    ``pair_columns``.
    """
    sides = sides_sql(rule, target)
    side_cases = " ".join(f"WHEN {fails(sql)} THEN '{side}'" for side, sql in sides.items())
    blamed = "CAST(NULL AS STRING)"
    if is_paired(rule):
        cases = [f"WHEN {fails(sql)} THEN {_single_side(rule, sql)}" for sql in sides.values()]
        blamed = f"CASE {' '.join(cases)} END"
    return [("failed", f"CASE {side_cases} END"), ("blamed", blamed), *pair_columns(rule)]


def no_sides(rule: Rule, target: OutputColumns) -> list[tuple[str, str]]:
    """Columns in place of ``failing_sides`` for which no output is computed, and so no element of an ``explode``."""
    return [(name, "CAST(NULL AS STRING)") for name in ("failed", "blamed")]


def pair_columns(rule: Rule) -> list[tuple[str, str]]:
    """The columns ``pair_key`` and ``pair_rank`` of a rule's outputs, as (name, SQL).

    ``pair_key``: a hash of the join key of a pair, or of a record that expired; null for other outputs. ``pair_rank``: the pair's
    rank within the join key; null if the results of a key have the order of outputs.
    """
    key, rank = "NULL", "NULL"
    if is_paired(rule):
        first_side = rule.sides[0]
        # The results of records that expire have the hash of the join key.
        key = "hash" if rule.expiry is not None else f"xxhash64({', '.join(first_side.keys)})"
        rank = rank if rule.expiry is not None else f"{first_side.name}_rank"
    return [("pair_key", f"CAST({key} AS BIGINT)"), ("pair_rank", f"CAST({rank} AS INT)")]


def paired_columns(rule: Rule, target: OutputColumns) -> list[tuple[str, str]]:
    """``output_columns`` and ``pair_columns``."""
    return [*output_columns(rule, target), *pair_columns(rule)]


def is_paired(rule: Rule) -> bool:
    """Whether the outputs of a rule are of pairs."""
    return len(rule.sides) > 1 and rule.group is None


def first_pairs(rows: Sequence[Row], rules: Sequence[Rule]) -> Iterator[Row]:
    """The failing outputs that certainly fail: without those of a join key after its first failing pair. Without a record of that
    pair, the later records pair anew, and other records may expire. ``rows``: of ``rules``, with rule (its index), ord, source,
    and ``pair_columns``."""

    def turn(row: Row) -> tuple[int, ...]:
        return row["pair_rank"] or 0, *row["ord"]

    names = [rule.part_of or rule.name for rule in rules]
    firsts: dict[tuple[str, int], tuple[int, ...]] = {}
    for row in rows:
        # The output of a record that expired has that record alone. Without the record, the others pair as before.
        if row["pair_key"] is not None and len(row["source"]) > 1:
            key = names[row["rule"]], row["pair_key"]
            firsts[key] = min(turn(row), firsts.get(key, turn(row)))
    for row in rows:
        first = firsts.get((names[row["rule"]], row["pair_key"]))
        if first is None or turn(row) <= first:
            yield row


def _single_side(rule: Rule, sql: str) -> str:
    """The side whose record alone makes an expression fail; null unless there is exactly one such side."""
    alone = {side.name: fails_alone(rule, sql, side.name) for side in rule.sides}
    cases = " ".join(
        f"WHEN {condition} AND NOT ({' OR '.join(sql for other, sql in alone.items() if other != side)}) THEN '{side}'"
        for side, condition in alone.items()
    )
    return f"CASE {cases} END"


def first_failing(expressions: Sequence[tuple[str, str]]) -> str:
    """The index of the first of a rule's expressions that fails; null where none does. ``expressions``: (place, SQL)."""
    cases = " ".join(f"WHEN {fails(f'({sql})')} THEN {index}" for index, (_, sql) in enumerate(expressions))
    return f"CAST(CASE {cases} END AS INT)"


def fails_alone(rule: Rule, sql: str, side: str) -> str:
    """Whether an expression fails with one side's record while the others are null."""
    for other in rule.sides:
        if other.name != side:
            absent = f"CASE WHEN `{other.name}`.kafka.offset < 0 THEN `{other.name}` END"
            sql = f"transform(array({absent}), `{other.name}` -> {sql})"
    return fails(sql)


def names_sql(rules: Sequence[Rule], topic: str) -> list[str]:
    """A topic's record under each name that the rules' expressions have for it, as columns."""
    names = dict.fromkeys(rule.side(topic).name for rule in rules if topic in rule.topics)
    return [f"struct(kafka, key, value) AS `{name}`" for name in names]


def join_keys(rule: Rule, topic: str) -> list[str]:
    """The expressions of a rule's join key that take a topic's records."""
    return [f"({sql})" for sql in rule.side(topic).keys]


def lookup_keys(rule: Rule, topic: str) -> list[str]:
    """The expressions of a rule's look-ups that take a topic's records."""
    name = rule.side(topic).name if topic in rule.topics else None
    return [f"({record})" for item in rule.lookups if item.side == name for record, _ in item.on]


def key_parts(rule: Rule, topic: str, record_frames: Mapping[str, DataFrame]) -> dict[str, str]:
    """The parts of a rule that fail before its outputs on a record that its ``where`` takes: the join key, of a group also the
    arguments of aggregates, and the look-ups. Each with its expressions as a list in SQL. ``record_frames``: as for
    ``failing_records``."""
    parts: dict[str, str] = {}
    if topic in rule.topics and rule.side(topic).keys:
        inputs = {side.name: record_frames[side.topic] for side in rule.sides if side.topic in record_frames}
        inputs = {name: frame for name, frame in inputs.items() if has_schema(frame)}
        keys = kind_of(rule).key_sql(rule, topic, inputs)
        parts |= {} if keys is None else {kind_of(rule).join: keys}
    if lookup_sql := lookup_keys(rule, topic):
        parts[LOOKUP] = ", ".join(lookup_sql)
    return parts


def failing_records(
    item: Input,
    frame: DataFrame,
    rules: Sequence[Rule],
    record_frames: Mapping[str, DataFrame],
    known_condition: str,
) -> DataFrame:
    """The records of a topic that fail in a ``where``, a ``join-on`` or a ``lookup``.

    The columns are partition, offset, ``rule`` (its index), ``failed``.

    ``rules``: the staging pool's; ``record_frames``: the record frames of all topics that have a table;
    ``known_condition``: a condition for records that are not looked at.
    """
    conditions = rule_conditions(item, frame, rules)
    choices = [
        f"CASE {' '.join(f'WHEN {sql} THEN {index}' for index, sql in conditions[: end + 1])} END"
        for end in range(len(conditions))
    ]
    # The first rule at which the conditions fail is the failing rule. The names of columns are no aliases of a group.
    where = " ".join(f"WHEN {fails(sql)} THEN {index}" for (index, _), sql in zip(conditions, choices, strict=True))
    if not conditions or not has_schema(frame):
        return frame.where("false").selectExpr("0 AS partition", "0L AS offset", "0 AS rule", "'' AS failed")
    frame = frame.where(f"NOT ({known_condition})").selectExpr("*", f"CASE {where} END AS z_wrong")
    frame = frame.selectExpr("*", f"CASE WHEN z_wrong IS NULL THEN {choices[-1]} END AS z_chosen")
    joins: list[str] = []
    frame = frame.selectExpr("kafka", "z_wrong", "z_chosen", *names_sql(rules, item.topic))
    for index, rule in enumerate(rules):
        for part, keys in key_parts(rule, item.topic, record_frames).items():
            joins.append(f"WHEN z_chosen = {index} AND {fails(keys)} THEN '{part}'")
    join_cases = f"WHEN z_wrong IS NULL THEN CASE {' '.join(joins)} END" if joins else ""
    return frame.selectExpr(
        "kafka.partition AS partition",
        "kafka.offset AS offset",
        "coalesce(z_wrong, z_chosen) AS rule",
        f"CASE WHEN z_wrong IS NOT NULL THEN 'where' {join_cases} END AS failed",
    ).where("failed IS NOT NULL")


LOOKUP = "lookup"
"""The part of a rule that fails on a record whose row can't be looked up."""


def part_expressions(rule: Rule, part: str, topic: str) -> list[tuple[str, str]]:
    """The expressions of a rule's part that may fail, as (place in the rule, SQL). ``part``: where, the join key, look-up or an
    output side; ``topic``: of the failing record."""
    if part == "where":
        return [(part, rule.side(topic).where or "")]
    if part == LOOKUP:
        return [(part, " AND ".join(lookup_keys(rule, topic)))]
    if part == kind_of(rule).join and rule.group is not None:
        return [(f"{part}, or the argument of an aggregate", "")]
    if part == kind_of(rule).join:
        return [(part, " AND ".join(join_keys(rule, topic)))]
    if part in (COMPLETE, AGGREGATE):
        return [(part, "" if rule.group is None or part == AGGREGATE else rule.group.complete)]
    if part == "shape":
        return [(part, rule.keep or "")]
    if part == "explode":
        return [(part, rule.explode or "")]
    if part == "headers":
        return [(part, "" if rule.headers is None else headers_sql(rule.headers))]
    return list(leaves({"key": rule.key, "value": rule.value}[part], part))


MOST_FAILURES = 10_000
"""Records of one batch that may fail: more are no bad records but a bad rule, or output."""


@dataclass(frozen=True)
class Failure:
    """A record, the rule that fails on it, and why."""

    topic: str
    partition: int
    offset: int
    rule: str
    text: str
    waiting: HeldRecord | None = None
    """The record of a held output, if the record waited for the counterpart with which the rule fails."""

    @property
    def place(self) -> Place:
        return self.topic, self.partition, self.offset

    @property
    def reason(self) -> str:
        """Rule and reason."""
        return f"rule {self.rule}, {self.text}"

    @property
    def part(self) -> OffsetRange:
        return OffsetRange(self.partition, self.offset, self.offset + 1)

    def entry(self) -> dict[str, object]:
        """Its ledger row."""
        return {
            **ClassRange(self.topic, "pending", None, self.part).entry("quarantined"),
            "rule": self.rule,
            "text": self.text,
        }


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

    @property
    def waiting(self) -> list[HeldRecord]:
        """The records of held outputs that waited until they failed."""
        return [failure.waiting for failure in self.found.values() if failure.waiting is not None]

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

    def waited(self, plan: EtlPlan, rules: Sequence[Rule]) -> list[ClassRange]:
        """The failing pending records, which leave the class pending. A record waits for the first of a rule's outputs,
        whichever output it fails on."""
        takers = {rule.name: rule.part_of or rule.name for rule in rules}
        return [
            ClassRange(failure.topic, "pending", takers.get(failure.rule, failure.rule), failure.part)
            for failure in self.of(plan, old=True)
        ]


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
        files = [item for item in quarantine_table.quarantine_files(state, side) if item.meets(ranges)]
        if side is not None and files:
            frames.append(_rows(spark, plan, topic, state, side.uri, files))
    return union(frames) if frames else None


def quarantined(rows: DataFrame | None) -> Counter[tuple[str, int]]:
    """(topic, partition) → quarantined records in the new ranges; ranges hold none."""
    if rows is None:
        return Counter()
    counts = rows.where("kind = 'quarantined'").groupBy("topic", "partition").count().collect()
    return Counter({(row["topic"], row["partition"]): row["count"] for row in counts})


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
    replayed = [(p, offset) for p, offsets in raw.replay_offsets(state).items() for offset in offsets.tolist()]
    if replayed:
        # They are in the raw table, and go through the rules.
        places = rows_frame(spark, pa.schema([("partition", pa.int32()), ("first", pa.int64())]), replayed)
        frame = frame.join(places, ["partition", "first"], "left_anti")
    return account.cut_at_strides(frame)
