"""The search for the records that an ETL batch fails on.

Search for the records of an ETL batch on which a rule overflows Java's stack. See ``spark.tasks`` for how.

Search for the records that an ETL batch fails on. See ``failures`` for how.

A search runs one Spark job for the conditions and join keys of each input. It then repeats a job for the outputs until
the job finds no failure: after one record of a pair is removed, the other record may make another pair. A few more jobs
fetch Spark's error texts. If the output of a pair fails, the search removes the record that makes the expression fail
alone. If no such record is found, the search removes the record that completed the pair. This choice does not depend on
the cut of the batches.

A record that overflows Java's stack fails the search too: ``OverflowSearch`` finds it, and the search goes on without
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from zync_assets.errors import EtlError
from zync_assets.etl import failures
from zync_assets.etl.batch import EtlRun
from zync_assets.etl.failures import Failure, Failures, Place
from zync_assets.etl.output_types import OutputType, output_types
from zync_assets.etl.pending import Waiting
from zync_assets.etl.plan import EtlBatch
from zync_assets.etl.rules import matching
from zync_assets.etl.rules.shapes import headers_sql
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Denorm, Pipeline, Rule
from zync_assets.spark import tasks
from zync_assets.spark.sql import leaves
from zync_assets.spark.tasks import MOST, TEXT, culprits, is_overflow, said

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Found = tuple[Place, Rule, str]
"""A record, the rule that overflows on it, and the side of the rule: where, join-on, shape, key, value or headers."""


class OverflowSearch:
    """``rules``: the staging pool's; ``frames``: the records of each input; ``types``: the outputs' types; ``run``: the
    batch without the records that are known to fail by now."""

    def __init__(
        self,
        pipeline: Pipeline,
        rules: Sequence[Rule],
        frames: Mapping[str, DataFrame],
        types: Mapping[str, OutputType],
        run: Callable[[], EtlRun],
    ) -> None:
        self.pipeline, self.rules, self.run = pipeline, rules, run
        self.frames, self.types = frames, types
        self.topics = [item.topic for item in pipeline.inputs]

    def records(self, topic: str, ranges: Sequence[OffsetRange], known: str) -> Iterator[Found]:
        """Records that overflow in a ``where`` or a ``join-on``, MOST and one of a range at the most. ``known``: as for
        ``failures.failing_records``."""
        item = self.pipeline.input(topic)

        def overflows(part: OffsetRange) -> bool:
            frame = self.frames[topic].where(_inside(part, "kafka"))
            return _overflows(failures.failing_records(item, frame, self.rules, self.frames, known), "failed")

        for place in self._places(topic, ranges, overflows):
            rule = self._rule_of_record(place)
            if rule is not None:
                yield place, *rule

    def outputs(self) -> Iterator[Found]:
        """Records that overflow in what a rule makes of them, MOST and one of a range at the most."""
        from pyspark.sql import functions as F

        rows = self._results(failures.failing_sides)
        bounds = F.min("ord.offset").alias("first"), F.max("ord.offset").alias("last")
        for row in sorted(rows.groupBy("ord.place", "ord.partition").agg(*bounds).collect()):
            span, place = OffsetRange(row["partition"], row["first"], row["last"] + 1), row["place"]

            def overflows(part: OffsetRange, place: int = place) -> bool:
                return _overflows(rows.where(f"ord.place = {place} AND {_inside(part, 'ord')}"), "failed", "blamed")

            for found in self._places(self.topics[place], [span], overflows):
                yield from self._blamed(found)

    def _places(
        self, topic: str, ranges: Sequence[OffsetRange], overflows: Callable[[OffsetRange], bool]
    ) -> Iterator[Place]:
        for part in ranges:
            if overflows(OffsetRange(part.partition, part.first, part.first)):
                raise EtlError(
                    f"topic {topic}: an expression of its rules is too deep for Java's stack, without any record. Make it"
                    " shorter, or divide it among rules."
                )
            for found in islice(culprits(part, overflows), MOST + 1):
                yield topic, found.partition, found.first

    def _rule_of_record(self, place: Place) -> tuple[Rule, str] | None:
        """The rule whose ``where`` or ``join-on`` overflows on a record, and which of both it is."""
        topic, partition, offset = place
        frame = self.frames[topic].where(_inside(OffsetRange(partition, offset, offset + 1), "kafka"))
        asked = matching.conditions(self.pipeline.input(topic), frame, self.rules)
        sides = "struct(kafka, key, value) AS `left`", "struct(kafka, key, value) AS `right`"
        frame = frame.selectExpr("*", *sides)
        for end, (index, _) in enumerate(asked):
            taken = f"CASE {' '.join(f'WHEN {sql} THEN {at}' for at, sql in asked[: end + 1])} END"
            if _overflows(frame.selectExpr(f"{taken} AS taken"), "taken"):
                return self.rules[index], "where"
            [row] = frame.selectExpr(f"{taken} AS taken").collect()
            if row["taken"] is not None:
                rule = self.rules[index]
                keys = join_keys(rule, topic) if isinstance(rule, Denorm) else []
                hashed = frame.selectExpr(f"xxhash64({', '.join(keys)}) AS hash")
                return (rule, "join-on") if keys and _overflows(hashed, "hash") else None
        return None

    def _blamed(self, completing: Place) -> Iterator[Found]:
        """The record that overflows of the output that a record completed, the rule and its side."""
        topic, partition, offset = completing
        mine = f"kind = 'out' AND ord.place = {self.topics.index(topic)} AND " + _inside(
            OffsetRange(partition, offset, offset + 1), "ord"
        )

        def overflows(rule: Rule, side: str, sql: Callable[[str], str]) -> bool:
            def only(other: Rule, target: matching.Target) -> list[tuple[str, str]]:
                sides = failures.sides_sql(other, target) if other.name == rule.name else {}
                return [("it", sql(sides[side]) if side in sides else "false")]

            return _overflows(self._results(only).where(mine), "it")

        rows = self._results(lambda rule, target: []).where(mine).select("rule", "source").collect()
        for row in rows:
            rule = self.rules[row["rule"]]
            sides = ("shape", "key", "value", "headers")
            side = next((side for side in sides if overflows(rule, side, tasks.fails)), None)
            if side is None:
                continue
            blamed = completing
            if isinstance(rule, Denorm):
                left, right = (
                    overflows(rule, side, partial(failures.fails_alone, side=alone)) for alone in ("left", "right")
                )
                if left != right:
                    source = row["source"][0 if left else 1]
                    blamed = self.topics[source["place"]], source["partition"], source["offset"]
            yield blamed, rule, side

    def _results(self, made_by: matching.Made) -> DataFrame:
        return self.run().results(self.frames, self.types, made_by)


def join_keys(rule: Denorm, topic: str) -> list[str]:
    """The expressions of a rule's ``join-on`` that take a topic's records."""
    return [f"({pair[0 if topic == rule.left else 1]})" for pair in rule.join_on]


def _inside(part: OffsetRange, of: str) -> str:
    place = f"{of}.partition = {part.partition}"
    return f"{place} AND {of}.offset >= {part.first} AND {of}.offset < {part.end}"


def _overflows(frame: DataFrame, *columns: str) -> bool:
    """Whether computing these columns of a frame overflows the stack. Other failures are raised."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F

    try:
        frame.agg(*(F.count(name) for name in columns)).collect()
    except (PySparkException, Py4JError) as error:
        if is_overflow(error):
            return True
        raise
    return False


MOST_JOBS = 40
"""Jobs of one search that look for failing outputs."""
TEXTS = 8
"""The most failures of one search that quote Spark's error text, because each text takes a Spark job. The first failure of
every expression quotes Spark."""


def find_failures(pipeline: Pipeline, batch: EtlBatch, waiting: Waiting, known: Failures) -> dict[Place, Failure]:
    """Place → failure of each failing record that is not ``known``; empty if the batch fails for another reason.

    Raises EtlError for too many failures, or for a search that needs more than MOST_JOBS jobs. Raises Spark's own error if
    the search itself fails.
    """
    return _Search(pipeline, batch, waiting, known).run()


class _Search:
    def __init__(self, pipeline: Pipeline, batch: EtlBatch, waiting: Waiting, known: Failures) -> None:
        self.pipeline, self.batch, self.waiting, self.known = pipeline, batch, waiting, known
        self.found: dict[Place, tuple[Rule, str]] = {}
        """Place → the rule, and the failing part of the rule."""
        first = EtlRun(pipeline, batch, waiting, known)
        self.rules = first.rules
        self.overflowing: set[Place] = set()
        """The places of the records that overflow Java's stack."""
        self.frames: Mapping[str, DataFrame] = first.frames()
        self.types: Mapping[str, OutputType] = output_types(
            pipeline, batch.plan.pool, batch.plan.state, self.frames, first.tables(), lacks=first.lacks
        )
        self.overflow = OverflowSearch(pipeline, self.rules, self.frames, self.types, self._run)

    def run(self) -> dict[Place, Failure]:
        with tasks.looking(self.batch.spark):
            self._records()
            for _ in range(MOST_JOBS):
                if not self._outputs():
                    break
            else:
                raise EtlError(
                    f"{self._summary()} The search for more took {MOST_JOBS} jobs. Nothing was committed. Correct the rule."
                )
        return self._told()

    def _records(self) -> None:
        for topic in self.frames:
            if ranges := self.batch.plan.reads(topic):
                known = self._failures().condition(topic) or "false"
                overflowing = self.overflow.records(topic, ranges, known)
                self._without(overflowing, partial(self._failing_records, topic))
        self._check()

    def _failing_records(self, topic: str) -> None:
        item, rules = self.pipeline.input(topic), self.rules
        known = self._failures().condition(topic) or "false"
        rows = failures.failing_records(item, self.frames[topic], rules, self.frames, known)
        for row in rows.limit(failures.MOST_FAILURES + 1).collect():
            self.found[topic, row["partition"], row["offset"]] = (rules[row["rule"]], row["failed"])

    def _outputs(self) -> bool:
        """Look for outputs that can't be made; whether there are some."""
        before = len(self.found)
        self._without(self.overflow.outputs(), self._failing_outputs)
        self._check()
        return len(self.found) > before

    def _failing_outputs(self) -> None:
        rows = self._run().results(self.frames, self.types, failures.failing_sides)
        if "failed" not in rows.columns:
            return
        blame = "CASE blamed WHEN 'left' THEN source[0] WHEN 'right' THEN source[1] END AS blame"
        found = rows.where("failed IS NOT NULL").selectExpr("rule", "failed", "ord", blame)
        for row in found.limit(failures.MOST_FAILURES + 1).collect():
            of = row["blame"] or row["ord"]
            topic = self.pipeline.inputs[of["place"]].topic
            self.found[topic, of["partition"], of["offset"]] = (self.rules[row["rule"]], row["failed"])

    def _without(self, overflowing: Iterable[Found], look: Callable[[], None]) -> None:
        """``look``, again without the records that overflow the stack if one does. EtlError if they are too many."""
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        try:
            look()
        except (PySparkException, Py4JError) as error:
            if not is_overflow(error):
                raise
            found = {place: (rule, side) for place, rule, side in overflowing}
            self.found |= found
            self.overflowing |= found.keys()
            if len(self.overflowing) > MOST:
                raise EtlError(f"{self._summary()} {TEXT} Nothing was committed. Correct the rule.") from error
            look()

    def _run(self, without: Place | None = None) -> EtlRun:
        """The batch without what is known to fail, but for one record."""
        return EtlRun(self.pipeline, self.batch, self.waiting, self._failures(without))

    def _failures(self, without: Place | None = None) -> Failures:
        places = {place: Failure(*place, rule.name, "") for place, (rule, _) in self.found.items() if place != without}
        return Failures({**self.known.found, **places})

    def _check(self) -> None:
        if len(self.found) > failures.MOST_FAILURES:
            raise EtlError(f"{self._summary()} Nothing was committed. Correct the rule.")

    def _summary(self) -> str:
        place = min(self.found)
        rule, side = self.found[place]
        return (
            f"pool {self.batch.plan.pool}: rule {rule.name}, {side} fails on {len(self.found)} records or more, the first"
            f" at topic {place[0]}, partition {place[1]}, offset {place[2]}."
        )

    def _told(self) -> dict[Place, Failure]:
        """The failures with their reasons."""
        order = sorted(self.found)
        firsts: dict[tuple[str, str], Place] = {}
        for place in order:
            rule, side = self.found[place]
            firsts.setdefault((rule.name, side), place)
        asked = list(dict.fromkeys([*firsts.values(), *order]))[:TEXTS]
        made: dict[Place, Failure] = {}
        for place in order:
            rule, side = self.found[place]
            expressions = _expressions(rule, side, place[0])
            where, sql = expressions[0] if len(expressions) == 1 else (side, "")
            words = "an expression fails on this record."
            if place in self.overflowing:
                words = TEXT
            elif place in asked:
                where, sql = self._expression(place, rule, side)
                words = self._words(place, rule, side)
            made[place] = Failure(*place, rule.name, f"{where}: {f'{_cut(sql)}: ' if sql else ''}{words}")
        return made

    def _expression(self, place: Place, rule: Rule, side: str) -> tuple[str, str]:
        """The expression of a side that fails on a record: its place in the rule and its text, if the search finds it."""
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        expressions = _expressions(rule, side, place[0])
        if len(expressions) == 1:
            return expressions[0]
        first = failures.first_failing(expressions)
        try:
            with tasks.looking(self.batch.spark):
                rows = self._run(without=place).results(
                    self.frames, self.types, lambda of, _: [("at", first if of is rule else "CAST(NULL AS INT)")]
                )
                found = rows.where(self._is_of(place)).where("at IS NOT NULL").select("at").limit(1).collect()
        except (PySparkException, Py4JError):
            return side, ""
        return expressions[found[0]["at"]] if found else (side, "")

    def _is_of(self, place: Place) -> str:
        """Whether a result row is an output of a record, as SQL."""
        number = [item.topic for item in self.pipeline.inputs].index(place[0])
        mine = f"of.place = {number} AND of.partition = {place[1]} AND of.offset = {place[2]}"
        return f"kind = 'out' AND exists(source, of -> {mine})"

    def _words(self, place: Place, rule: Rule, side: str) -> str:
        """Spark's error text for this record alone."""
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        topic, partition, offset = place
        try:
            if side in ("where", "join-on"):
                frame = self.frames[topic].where(f"kafka.partition = {partition} AND kafka.offset = {offset}")
                asked = matching.conditions(self.pipeline.input(topic), frame, self.rules)
                cases = " ".join(f"WHEN {sql} THEN {index}" for index, sql in asked)
                sides = "struct(kafka, key, value) AS `left`", "struct(kafka, key, value) AS `right`"
                keys = join_keys(rule, topic) if isinstance(rule, Denorm) else []
                sql = f"CASE {cases} END" if side == "where" else ", ".join(keys)
                frame.selectExpr("*", *sides).selectExpr(f"xxhash64({sql})").collect()
            else:
                rows = self._run(without=place).results(self.frames, self.types, matching.columns)
                rows.where(self._is_of(place)).collect()
        except (PySparkException, Py4JError) as error:
            return said(error)
        return "an expression fails on this record."


def _expressions(rule: Rule, side: str, topic: str) -> list[tuple[str, str]]:
    """The expressions of a rule that may fail for a side, as (place in the rule, SQL)."""
    if side == "where":
        return [(side, sql or "") for sql in matching.wheres(rule, topic)[:1]]
    if side == "join-on":
        return [(side, " AND ".join(join_keys(rule, topic)) if isinstance(rule, Denorm) else "")]
    if side == "shape":
        return [(side, rule.keep or "")]
    if side == "headers":
        return [(side, "" if rule.headers is None else headers_sql(rule.headers))]
    return list(leaves({"key": rule.key, "value": rule.value}[side], side))


def _cut(sql: str) -> str:
    """The text of an expression, cut where it is long."""
    return sql if len(sql) <= 200 else f"{sql[:200]}…"
