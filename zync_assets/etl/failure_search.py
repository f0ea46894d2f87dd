"""The search for the records that an ETL batch fails on.

A search runs one Spark job for the conditions and join keys of each input. It then repeats a job for the outputs until the job
finds no failure: after one record of a pair is removed, the other record may make another pair. A few more jobs fetch Spark's
error texts. If an output of several records fails, the search removes the record that makes the expression fail alone. If there
is no such record, the search removes the record that completed the output. Of the failing pairs of a join key, a job counts the
first pair, because its removal changes the later pairs. The pairs of a held output count once the search knows which records
end with their source row (``Attempt.decide_hold``). The choice of records then does not depend on the cut of the batches.

A record that overflows Java's stack fails the search too. ``OverflowSearch`` finds the record, and the search goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

from zync_assets.errors import EtlError
from zync_assets.etl import failures
from zync_assets.etl.batch import Transform
from zync_assets.etl.failures import Failure, Failures
from zync_assets.etl.hold import HeldRecord, Place
from zync_assets.etl.partitions import Partitions, failing_partitions, partition_numbers, without_partition
from zync_assets.etl.result_checks import UNSENT_TEXT, Attempt, odd_conditions
from zync_assets.etl.rules import kind_of
from zync_assets.etl.rules.kind import Columns, OutputColumns
from zync_assets.etl.rules.results import output_columns, rule_conditions
from zync_assets.etl.source_rows import FAILING_COLUMNS, failing_record
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Rule
from zync_assets.spark.failures import (
    MOST,
    TEXT,
    TOO_DEEP,
    cause_line,
    fails,
    is_overflow,
    overflow_errors,
    overflow_records,
    spark_errors,
)
from zync_assets.spark.sql import excerpt
from zync_assets.spark.tasks import search_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

COMPLETING = "element_at(source, last + 1)"
"""The input that completes an output. ``ord`` may be the order of another record, which the output follows (``etl.hold``)."""

Found = tuple[Place, Rule, str]
"""A record, the rule that overflows on it, and the side of the rule: where, join-on, shape, key, value or headers."""


class OverflowSearch:
    """``rows``: the result rows of the batch without the records that are known to fail by now."""

    def __init__(self, transform: Transform, rows: Callable[[Columns], DataFrame]) -> None:
        self.transform, self.rules, self.rows = transform, transform.rules, rows
        self.topics = [item.topic for item in transform.pipeline.inputs]

    def records(self, topic: str, ranges: Sequence[OffsetRange], known_condition: str) -> Iterator[Found]:
        """Records that overflow before the outputs of their rule, MOST and one of a range at the most. ``known_condition``: as
        for ``failures.failing_records``."""
        item = self.transform.pipeline.input(topic)

        def overflows(part: OffsetRange) -> bool:
            frame = self.transform.frames[topic].where(_inside(part, "kafka"))
            return _overflows(
                failures.failing_records(item, frame, self.rules, self.transform.frames, known_condition), "failed"
            )

        for place in self._places(topic, ranges, overflows):
            rule = self._rule_of_record(place)
            if rule is not None:
                yield place, *rule

    def outputs(self) -> Iterator[Found]:
        """Records on which the outputs of a rule overflow: at most MOST and one record of a range."""
        from pyspark.sql import functions as F

        rows, places = (
            self.rows(columns).selectExpr("*", f"{COMPLETING} AS completing")
            for columns in (failures.failing_sides, failures.no_sides)
        )
        bounds = F.min("completing.offset").alias("first"), F.max("completing.offset").alias("last")
        for row in sorted(places.groupBy("completing.place", "completing.partition").agg(*bounds).collect()):
            span, place = OffsetRange(row["partition"], row["first"], row["last"] + 1), row["place"]

            def overflows(part: OffsetRange, place: int = place) -> bool:
                is_in_span = f"completing.place = {place} AND {_inside(part, 'completing')}"
                return _overflows(rows.where(is_in_span), "failed", "blamed")

            for record in self._places(self.topics[place], [span], overflows):
                yield from self._blamed(record)

    def _places(
        self, topic: str, ranges: Sequence[OffsetRange], overflows: Callable[[OffsetRange], bool]
    ) -> Iterator[Place]:
        for part in ranges:
            if overflows(OffsetRange(part.partition, part.first, part.first)):
                raise EtlError(f"topic {topic}: {TOO_DEEP}")
            for overflow in islice(overflow_records(part, overflows), MOST + 1):
                yield topic, overflow.partition, overflow.first

    def _rule_of_record(self, place: Place) -> tuple[Rule, str] | None:
        """The rule that overflows on a record before its outputs, and the part of the rule."""
        topic, partition, offset = place
        frame = self.transform.frames[topic].where(_inside(OffsetRange(partition, offset, offset + 1), "kafka"))
        conditions = rule_conditions(self.transform.pipeline.input(topic), frame, self.rules)
        frame = frame.selectExpr("*", *failures.names_sql(self.rules, topic))
        for end, (index, _) in enumerate(conditions):
            choice = f"CASE {' '.join(f'WHEN {sql} THEN {at}' for at, sql in conditions[: end + 1])} END"
            if _overflows(frame.selectExpr(f"{choice} AS chosen"), "chosen"):
                return self.rules[index], "where"
            [row] = frame.selectExpr(f"{choice} AS chosen").collect()
            if row["chosen"] is not None:
                rule = self.rules[index]
                for part, keys in failures.key_parts(rule, topic, self.transform.frames).items():
                    # Spark computes nothing to count what is never null.
                    if _overflows(frame.selectExpr(f"CASE WHEN {fails(keys)} THEN 0 END AS it"), "it"):
                        return rule, part
                return None
        return None

    def _blamed(self, completing: Place) -> Iterator[Found]:
        """The overflowing source record of the output that ``completing`` completed, with the rule and its side."""
        topic, partition, offset = completing
        is_output = f"kind = 'out' AND {COMPLETING}.place = {self.topics.index(topic)} AND " + _inside(
            OffsetRange(partition, offset, offset + 1), COMPLETING
        )

        def overflows(rule: Rule, side: str, sql: Callable[[str], str]) -> bool:
            def side_columns(other_rule: Rule, target: OutputColumns) -> list[tuple[str, str]]:
                sides = failures.sides_sql(other_rule, target) if other_rule.name == rule.name else {}
                return [("it", sql(sides[side]) if side in sides else "false")]

            return _overflows(self.rows(side_columns).where(is_output), "it")

        rows = self.rows(failures.no_sides).where(is_output).select("rule", "source").collect()
        for row in rows:
            rule = self.rules[row["rule"]]
            sides = ("explode", "shape", "key", "value", "headers")
            side = next((side for side in sides if overflows(rule, side, fails)), None)
            if side is None:
                continue
            failing_place = completing
            alone = [
                at
                for at, rule_side in enumerate(rule.sides if len(rule.sides) > 1 and rule.group is None else ())
                if overflows(rule, side, partial(failures.fails_alone, rule, side=rule_side.name))
            ]
            if len(alone) == 1 and len(row["source"]) == len(rule.sides):
                source = row["source"][alone[0]]
                failing_place = self.topics[source["place"]], source["partition"], source["offset"]
            yield failing_place, rule, side


def _inside(part: OffsetRange, of: str) -> str:
    place = f"{of}.partition = {part.partition}"
    return f"{place} AND {of}.offset >= {part.first} AND {of}.offset < {part.end}"


def _overflows(frame: DataFrame, *columns: str) -> bool:
    """Whether computing these columns of a frame overflows the stack. Other failures are raised."""
    from pyspark.sql import functions as F

    try:
        frame.agg(*(F.count(name) for name in columns)).collect()
    except spark_errors() as error:
        if is_overflow(error):
            return True
        raise
    return False


_PARTITION = "partition-by"
"""The part that fails where an output's partition can't be computed."""
_OUTPUT = "output"
"""The part that fails where an output can't be encoded."""
MOST_JOBS = 40
"""Jobs of one search that look for failing outputs."""
MOST_TURNS = 20
"""Jobs of one search that count the first failing pair of a join key alone. Later jobs count all failing outputs."""
TEXTS = 8
"""The most failures of one search that quote Spark's error text, because each text takes a Spark job. The first failure of
every expression quotes Spark."""


def find_failures(attempt: Attempt, partitions: Mapping[str, Partitions]) -> dict[Place, Failure]:
    """Place → failure of each failing record that the attempt does not know; empty if the batch fails for another reason.
    ``pending.hold`` is then the decision without the failing records, if pairs of a held output fail: some may have ended.

    ``partitions``: of the output topics, as far as they are known.

    Raises EtlError for too many failures, or for a search that needs more than MOST_JOBS jobs. Raises Spark's own error if the
    search itself fails.
    """
    # A search is for records that go to rules. Those of views' tables go to none.
    transform = attempt.transform
    with overflow_errors(lambda text: EtlError(f"pool {transform.plan.pool}: {text}")):
        return _Search(attempt, partitions).run() if transform.frames else {}


class _Search:
    def __init__(self, attempt: Attempt, partitions: Mapping[str, Partitions]) -> None:
        self.attempt, self.partitions = attempt, partitions
        self.transform = transform = attempt.transform
        self.pipeline, self.rules, self.frames = transform.pipeline, transform.rules, transform.frames
        self.found: dict[Place, tuple[Rule, str]] = {}
        """Place → the rule, and the failing part of the rule."""
        self.waiting: dict[Place, HeldRecord | None] = {}
        """Place → the record, if it waited for the counterpart with which a rule fails."""
        self.overflowing: set[Place] = set()
        """The places of the records that overflow Java's stack."""
        self.only: frozenset[str] | None = None
        """The rules that may have more failing outputs; None: all rules. Without a failing record, a rule pairs others."""
        self.unshared: frozenset[str] | None = None
        """The rules that have outputs since the last look at partitions; None: all."""
        self.counts_all = False
        """Whether all failing pairs of a join key count."""
        self.undecided: frozenset[str] = frozenset()
        """The rules of held outputs with failing pairs, while the decision on source rows is not known."""
        self.decides = False
        """Whether each job follows the decision without the records found so far."""
        self.overflow = OverflowSearch(transform, self._rows)

    def run(self) -> dict[Place, Failure]:
        with search_settings(self.transform.spark):
            self._records()
            for number in range(MOST_JOBS):
                self.counts_all = number >= MOST_TURNS
                if not self._outputs():
                    break
            else:
                raise EtlError(
                    f"{self._summary()} The search for more took {MOST_JOBS} jobs. Nothing was committed. Correct the rule."
                )
        return self._with_reasons()

    def _records(self) -> None:
        for topic in self.frames:
            if ranges := self.transform.plan.reads(topic):
                overflowing = self.overflow.records(topic, ranges, self._failures().condition(topic) or "false")
                self._run_without(overflowing, partial(self._failing_records, topic))
        self._check()

    def _failing_records(self, topic: str) -> None:
        item, rules = self.pipeline.input(topic), self.rules
        condition = self._failures().condition(topic) or "false"
        rows = failures.failing_records(item, self.frames[topic], rules, self.frames, condition)
        for row in rows.limit(failures.MOST_FAILURES + 1).collect():
            self.found[topic, row["partition"], row["offset"]] = (rules[row["rule"]], row["failed"])

    def _outputs(self) -> bool:
        """Look for failing outputs. Returns whether there are any."""
        known_places = {*self.found}
        self.undecided = frozenset()
        if self.decides:
            replace(self.attempt, failures=self._failures()).decide_hold()
        if self.only is None or self.only:
            self._run_without(self.overflow.outputs(), self._failing_outputs)
        if len(self.found) == len(known_places) and not self.undecided:
            # Keys and values are sound.
            self._failing_partitions()
            self.unshared = frozenset()
        self._check()
        new_rules = [rule for place, (rule, _) in self.found.items() if place not in known_places]
        self.only = frozenset(rule.part_of or rule.name for rule in new_rules if not kind_of(rule).single)
        self.only |= self.undecided
        self.unshared = None if self.unshared is None else self.unshared | self.only
        self.decides = self.decides or bool(self.undecided)
        return bool(new_rules or self.undecided)

    def _failing_partitions(self) -> None:
        if self.unshared == frozenset() or not any(item.by for item in self.partitions.values()):
            return
        frame = self._result_rows(failures.paired_columns, self._failures(), self.unshared)
        frames = failing_partitions(frame, self.partitions, self.transform.labels)
        names = ("rule", "last", "CAST(NULL AS STRING) AS blamed", "source", "ord", "pair_key", "pair_rank")
        rows = [rows.selectExpr(*names).limit(failures.MOST_FAILURES + 1).collect() for rows in frames]
        for row in self._counted([*chain(*rows)]):
            of = row["source"][row["last"]]
            topic = self.pipeline.inputs[of["place"]].topic
            self.found[topic, of["partition"], of["offset"]] = (self.rules[row["rule"]], _PARTITION)

    def _counted(self, rows: Sequence[Row]) -> Iterable[Row]:
        """The failing outputs that count in this job."""
        if self.counts_all or len(rows) > failures.MOST_FAILURES:
            return rows
        joining = frozenset() if self.decides else self.transform.held.joining
        self.undecided |= {self.rules[row["rule"]].name for row in rows if row["rule"] in joining}
        return failures.first_pairs([row for row in rows if row["rule"] not in joining], self.rules)

    def _failing_sides(self, rule: Rule, target: OutputColumns) -> list[tuple[str, str]]:
        """``failures.failing_sides``. An output of a pair that has no form or no partition fails too, before the later pairs of
        its join key."""
        (name, sql), *others = failures.failing_sides(rule, target)
        if failures.is_paired(rule):
            odd = " OR ".join(odd_conditions(self.pipeline.output(rule.out), rule, target)) or "false"
            by = self.partitions[rule.out].by if rule.out in self.partitions else None
            unshared = f"WHEN {without_partition(by, rule, target)} THEN '{_PARTITION}'" if by else ""
            sql = f"coalesce({sql}, CASE WHEN {odd} THEN '{_OUTPUT}' {unshared} END)"
        return [(name, sql), *others]

    def _failing_outputs(self) -> None:
        rows = self._rows(self._failing_sides)
        if "failed" not in rows.columns:
            return
        names = ["rule", "failed", "last", "blamed", "source", "ord", "pair_key", "pair_rank"]
        names += FAILING_COLUMNS if self.transform.held else ()
        rows = rows.where("failed IS NOT NULL").select(names).limit(failures.MOST_FAILURES + 1)
        for row in self._counted(rows.collect()):
            rule = self.rules[row["rule"]]
            names = [side.name for side in rule.sides]
            # The output of a record that expired has that record alone.
            alone = row["blamed"] is None or len(row["source"]) < len(names)
            side = row["last"] if alone else names.index(row["blamed"])
            source = row["source"][side]
            place = self.pipeline.inputs[source["place"]].topic, source["partition"], source["offset"]
            self.found[place] = (rule, row["failed"])
            if row["rule"] in self.transform.held.joining:
                self.waiting[place] = failing_record(rule, place, side, row.asDict())

    def _run_without(self, overflowing: Iterable[Found], look: Callable[[], None]) -> None:
        """``look``, again without the records that overflow the stack if one does. EtlError if they are too many."""
        try:
            look()
        except spark_errors() as error:
            if not is_overflow(error):
                raise
            rule_by_place = {place: (rule, side) for place, rule, side in overflowing}
            self.found |= rule_by_place
            self.overflowing |= rule_by_place.keys()
            if len(self.overflowing) > MOST:
                raise EtlError(f"{self._summary()} {TEXT} Nothing was committed. Correct the rule.") from error
            look()

    def _rows(self, columns: Columns) -> DataFrame:
        """The result rows of rules that may have further failures, without the records that are known to fail."""
        return self._result_rows(columns, self._failures(), self.only)

    def _rows_with(self, columns: Columns, place: Place, rule: Rule) -> DataFrame:
        """The result rows of a record that fails in a rule."""
        rows = self._result_rows(columns, self._failures(place), [rule.part_of or rule.name])
        return rows.where(self._is_of(place))

    def _result_rows(self, columns: Columns, known_failures: Failures, only: Collection[str] | None) -> DataFrame:
        return replace(self.attempt, failures=known_failures).rows(columns, only)

    def _failures(self, without: Place | None = None) -> Failures:
        places = {
            place: Failure(*place, rule.name, "", self.waiting.get(place))
            for place, (rule, _) in self.found.items()
            if place != without
        }
        return Failures({**self.attempt.failures.found, **places})

    def _check(self) -> None:
        if len(self.found) > failures.MOST_FAILURES:
            raise EtlError(f"{self._summary()} Nothing was committed. Correct the rule.")

    def _summary(self) -> str:
        place = min(self.found)
        rule, side = self.found[place]
        return (
            f"pool {self.transform.plan.pool}: rule {rule.name}, {side} fails on {len(self.found)} records or more, the first"
            f" at topic {place[0]}, partition {place[1]}, offset {place[2]}."
        )

    def _with_reasons(self) -> dict[Place, Failure]:
        """The failures with their reasons."""
        order = sorted(self.found)
        firsts: dict[tuple[str, str], Place] = {}
        for place in order:
            rule, side = self.found[place]
            firsts.setdefault((rule.name, side), place)
        text_places = list(dict.fromkeys([*firsts.values(), *order]))[:TEXTS]
        failure_by_place: dict[Place, Failure] = {}
        for place in order:
            rule, side = self.found[place]
            expressions = self._expressions(rule, side, place[0])
            where, sql = expressions[0] if len(expressions) == 1 else (side, "")
            words = "an expression fails on this record."
            if place in self.overflowing or side == _OUTPUT:
                words = UNSENT_TEXT if side == _OUTPUT else TEXT
            elif place in text_places:
                where, sql = self._expression(place, rule, side)
                words = self._words(place, rule, side)
            failure_by_place[place] = Failure(
                *place, rule.name, f"{where}: {f'{excerpt(sql)}: ' if sql else ''}{words}", self.waiting.get(place)
            )
        return failure_by_place

    def _expression(self, place: Place, rule: Rule, side: str) -> tuple[str, str]:
        """The expression of a side that fails on a record: its place in the rule and its text, if the search finds it."""
        expressions = self._expressions(rule, side, place[0])
        if len(expressions) == 1:
            return expressions[0]
        first_sql = failures.first_failing(expressions)
        try:
            with search_settings(self.transform.spark):
                rows = self._rows_with(
                    lambda of, _: [("at", first_sql if of is rule else "CAST(NULL AS INT)")], place, rule
                )
                failing_rows = rows.where("at IS NOT NULL").select("at").limit(1).collect()
        except spark_errors():
            return side, ""
        return expressions[failing_rows[0]["at"]] if failing_rows else (side, "")

    def _is_of(self, place: Place) -> str:
        """Whether a result row is an output of a record, as SQL."""
        number = [item.topic for item in self.pipeline.inputs].index(place[0])
        is_source = f"of.place = {number} AND of.partition = {place[1]} AND of.offset = {place[2]}"
        return f"kind = 'out' AND exists(source, of -> {is_source})"

    def _words(self, place: Place, rule: Rule, side: str) -> str:
        """Spark's error text for this record alone."""
        topic, partition, offset = place
        try:
            if side in ("where", kind_of(rule).join, failures.LOOKUP):
                frame = self.frames[topic].where(f"kafka.partition = {partition} AND kafka.offset = {offset}")
                conditions = rule_conditions(self.pipeline.input(topic), frame, self.rules)
                cases = " ".join(f"WHEN {sql} THEN {index}" for index, sql in conditions)
                keys = failures.key_parts(rule, topic, self.frames)
                sql = f"CASE {cases} END" if side == "where" else keys[side]
                frame.selectExpr("*", *failures.names_sql([rule], topic)).selectExpr(f"xxhash64({sql})").collect()
            else:
                rows = self._rows_with(output_columns, place, rule)
                if side == _PARTITION:
                    rule_rows = rows.where(f"rule = {self.rules.index(rule)}")
                    rows = partition_numbers(rule_rows, self.partitions[rule.out])
                rows.collect()
        except spark_errors() as error:
            return cause_line(error)
        return "an expression fails on this record."

    def _expressions(self, rule: Rule, side: str, topic: str) -> list[tuple[str, str]]:
        """The expressions of a rule that may fail for a side, as (place in the rule, SQL)."""
        if side == _OUTPUT:
            return [(f"output to {rule.out}", "")]
        if side == _PARTITION:
            return [(side, self.pipeline.output(rule.out).partition_by or "")]
        return failures.part_expressions(rule, side, topic)
