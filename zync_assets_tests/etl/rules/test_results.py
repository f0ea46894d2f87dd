"""Which rule takes a record, as columns of a frame; ``etl/test_commit.py`` has what becomes of it on real topics."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import DataType, LongType, StringType

from zync_assets.errors import EtlError
from zync_assets.etl.rules import denorm
from zync_assets.etl.rules.kind import Emission, Ordering, OutputColumns, RuleRecords, in_frame
from zync_assets.etl.rules.results import Assignment, assign, output_columns
from zync_assets.etl.rules.stateless import singles
from zync_assets.pipeline import Input, Rule, Side, SideFormat

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TEXT = SideFormat("string")
NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def source(unmatched: Any = "keep") -> Input:
    return Input("t", "Raw", TEXT, TEXT, unmatched=unmatched)


def stateless(name: str, where: str | None, topic: str = "t") -> Rule:
    return Rule("stateless", name, (Side("in", topic, where),), "out", "in.key", "in.value")


def join(left: Side, right: Side) -> Rule:
    return Rule("denorm", "d", (left, right), "out", "1", "1")


def frame(spark: SparkSession, *values: str | None, kind: str = "string") -> DataFrame:
    rows = [(("t", 0, offset), "k", value, NOW, False) for offset, value in enumerate(values)]
    return spark.createDataFrame(
        rows,
        f"kafka struct<topic: string, partition: int, offset: long>, key string, value {kind}, time timestamp, old boolean",
    )


def given(item: Input, records: DataFrame, rules: Sequence[Rule]) -> Assignment:
    return assign(item, Ordering({item.topic: 0}), records, rules)


def assigned(item: Input, records: DataFrame, *rules: Rule) -> list[int | None]:
    chosen = given(item, records, rules).choice({index: str(index) for index in range(len(rules))})
    found = records.orderBy("kafka.offset").selectExpr(f"{chosen} AS assigned").collect()
    return [row.assigned for row in found]


def left_over(item: Input, records: DataFrame, *rules: Rule) -> list[tuple[int, str]]:
    """(offset, class) of what the rules of a pool leave."""
    own = list(range(len(rules)))
    rows = singles(given(item, records, rules), rules, {}, own, [], output_columns).collect()
    return sorted((row.source[0].offset, row.kind) for row in rows)


def test_a_record_goes_to_the_first_rule_whose_condition_is_true(spark: SparkSession) -> None:
    rules = (
        stateless("a", "value = 'x'"),
        stateless("other", None, "u"),
        stateless("b", "value >= 'x'"),
        stateless("c", None),
    )
    assert assigned(source(), frame(spark, "x", "y", "a", None), *rules) == [0, 2, 3, None]


def test_each_side_of_a_denorm_rule_has_its_own_condition(spark: SparkSession) -> None:
    rule = join(
        Side("left", "u", "value = 'left'", ("left.key",)), Side("right", "t", "value = 'right'", ("right.key",))
    )
    assert assigned(source(), frame(spark, "left", "right"), rule) == [None, 0]


def test_a_tombstone_is_taken_only_by_a_rule_that_asks_for_it(spark: SparkSession) -> None:
    assert assigned(source(), frame(spark, None), stateless("a", None), stateless("b", "value IS NULL")) == [1]


def test_values_of_no_type_yet_are_tombstones(spark: SparkSession) -> None:
    records = frame(spark, None, None, kind="void")
    assert assigned(source(), records, stateless("a", "value.op = 'c'"), stateless("b", None)) == [None, None]
    assert left_over(source(), records, stateless("b", None)) == [(0, "dropped"), (1, "dropped")]


def test_what_no_rule_takes_is_unmatched_or_dropped(spark: SparkSession) -> None:
    records, rule = frame(spark, "x", "y", None), stateless("a", "value = 'x'")
    assert left_over(source(), records, rule) == [(1, "unmatched"), (2, "dropped")]
    assert left_over(source("drop"), records, rule) == [(1, "dropped"), (2, "dropped")]
    assert left_over(source("fail"), records, rule) == [(1, "unmatched"), (2, "dropped")]


def test_a_condition_that_is_none_is_an_error(spark: SparkSession) -> None:
    with pytest.raises(EtlError, match=r"rule a, where: length\(value\) is int; it must be a condition"):
        assigned(source(), frame(spark, "x"), stateless("a", "length(value)"))


def test_the_hash_of_a_join_key_is_null_where_one_of_its_parts_is(spark: SparkSession) -> None:
    rule = join(
        Side("left", "t", keys=("left.key", "left.value")), Side("right", "u", keys=("right.key", "right.value"))
    )
    keyed = denorm.keyed(
        rule,
        "left",
        in_frame(frame(spark, "x", "x", None), "left", Ordering({})),
        [StringType(), StringType()],
    )
    hashes = [row.hash for row in keyed.orderBy("left.kafka.offset").collect()]
    assert hashes[0] == hashes[1] is not None
    assert hashes[2] is None


@pytest.mark.parametrize(
    ("keys", "kind"),
    [(("left.value.id", "right.value.id"), LongType()), (("upper(left.value.name)", "right.key"), StringType())],
)
def test_a_join_reads_and_moves_the_used_fields_alone_and_each_side_once(
    spark: SparkSession, tmp_path: Path, keys: tuple[str, ...], kind: DataType
) -> None:
    """Unused fields of a record would pass through two shuffles and four sorts."""
    rows = [(("t", 0, 0, NOW, None), "k", (1, "x", "large"), NOW, False)]
    schema = (
        "kafka struct<topic: string, partition: int, offset: long, time: timestamp, headers: array<string>>, key string,"
        " value struct<id: long, name: string, rest: string>, time timestamp, old boolean"
    )
    spark.createDataFrame(rows, schema).write.parquet(str(tmp_path / "records"))
    rule = join(Side("left", "t", keys=keys[:1]), Side("right", "u", keys=keys[1:]))
    records = spark.read.schema(schema).parquet(str(tmp_path / "records"))
    ordering = Ordering({"t": 0, "u": 1})
    frames = {side: denorm.keyed(rule, side, in_frame(records, side, ordering), [kind]) for side in ("left", "right")}
    target = OutputColumns("", None, None)
    outputs = [("out", "struct(left.value.name, right.value.id)")]
    emission = Emission(target, lambda rule, target: outputs, ordering, together=False)
    found = denorm.paired(RuleRecords(rule, 0, frames, [kind]), frames, emission)
    plan = found._jdf.queryExecution().executedPlan().toString()  # type: ignore[operator]
    read = re.findall(r"ReadSchema: (.*)", plan)
    assert len(read) == 2
    assert not [name for name in ("topic", "headers", "rest") if any(name in schema for schema in read)]
    assert "key" not in read[0]
    assert plan.count("Exchange") == 2
    assert [row.kind for row in found.collect()] == (["out"] if keys[0] == "left.value.id" else ["pending"] * 2)
