"""Search for the records of an ETL batch on which a rule overflows Java's stack. See ``steps.overflow`` for how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from zync_assets.errors import EtlError
from zync_assets.etl import failing, matching
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Denorm, Pipeline, Rule
from zync_assets.steps.etl_failures import Place
from zync_assets.steps.etl_run import EtlRun
from zync_assets.steps.outputs import OutputType
from zync_assets.steps.overflow import MOST, culprits, is_overflow

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
        ``failing.failing_records``."""
        item = self.pipeline.input(topic)

        def overflows(part: OffsetRange) -> bool:
            frame = self.frames[topic].where(_inside(part, "kafka"))
            return _overflows(failing.failing_records(item, frame, self.rules, self.frames, known), "failed")

        for place in self._places(topic, ranges, overflows):
            rule = self._rule_of_record(place)
            if rule is not None:
                yield place, *rule

    def outputs(self) -> Iterator[Found]:
        """Records that overflow in what a rule makes of them, MOST and one of a range at the most."""
        from pyspark.sql import functions as F

        rows = self._results(failing.failing_sides)
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
                sides = failing.sides_sql(other, target) if other.name == rule.name else {}
                return [("it", sql(sides[side]) if side in sides else "false")]

            return _overflows(self._results(only).where(mine), "it")

        rows = self._results(lambda rule, target: []).where(mine).select("rule", "source").collect()
        for row in rows:
            rule = self.rules[row["rule"]]
            sides = ("shape", "key", "value", "headers")
            side = next((side for side in sides if overflows(rule, side, failing.fails)), None)
            if side is None:
                continue
            blamed = completing
            if isinstance(rule, Denorm):
                left, right = (
                    overflows(rule, side, partial(failing.fails_alone, side=alone)) for alone in ("left", "right")
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
