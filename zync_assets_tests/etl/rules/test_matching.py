"""Which rule takes a record, as columns of a frame; ``etl/test_commit.py`` has what becomes of it on real topics."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import DataType, LongType, StringType

from zync_assets.errors import EtlError
from zync_assets.etl.rules import matching
from zync_assets.pipeline import Denorm, Input, Rule, SideFormat, Stateless

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TEXT = SideFormat("string")
NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def source(unmatched: Any = "keep") -> Input:
    return Input("t", "Raw", TEXT, TEXT, unmatched=unmatched)


def stateless(name: str, where: str | None, topic: str = "t") -> Stateless:
    return Stateless(name, topic, "out", where, "in.key", "in.value")


def frame(spark: SparkSession, *values: str | None, kind: str = "string") -> DataFrame:
    rows = [(("t", 0, offset), "k", value, NOW, False) for offset, value in enumerate(values)]
    return spark.createDataFrame(
        rows,
        f"kafka struct<topic: string, partition: int, offset: long>, key string, value {kind}, time timestamp, old boolean",
    )


def taken(item: Input, records: DataFrame, *rules: Rule) -> list[int | None]:
    chosen = matching.assign(item, 0, records, rules).choice({index: str(index) for index in range(len(rules))})
    found = records.orderBy("kafka.offset").selectExpr(f"{chosen} AS taken").collect()
    return [row.taken for row in found]


def left_over(item: Input, records: DataFrame, *rules: Rule) -> list[tuple[int, str]]:
    """(offset, class) of what the rules of a pool leave."""
    own = list(range(len(rules)))
    rows = matching.singles(matching.assign(item, 0, records, rules), rules, {}, own, [], matching.columns).collect()
    return sorted((row.source[0].offset, row.kind) for row in rows)


def test_a_record_goes_to_the_first_rule_whose_condition_is_true(spark: SparkSession) -> None:
    rules = (
        stateless("a", "value = 'x'"),
        stateless("other", None, "u"),
        stateless("b", "value >= 'x'"),
        stateless("c", None),
    )
    assert taken(source(), frame(spark, "x", "y", "a", None), *rules) == [0, 2, 3, None]


def test_each_side_of_a_denorm_rule_has_its_own_condition(spark: SparkSession) -> None:
    rule = Denorm("d", "u", "t", (("left.key", "right.key"),), "out", "value = 'left'", "value = 'right'", "1", "1")
    assert taken(source(), frame(spark, "left", "right"), rule) == [None, 0]


def test_a_tombstone_is_taken_only_by_a_rule_that_asks_for_it(spark: SparkSession) -> None:
    assert taken(source(), frame(spark, None), stateless("a", None), stateless("b", "value IS NULL")) == [1]


def test_values_of_no_type_yet_are_tombstones(spark: SparkSession) -> None:
    records = frame(spark, None, None, kind="void")
    assert taken(source(), records, stateless("a", "value.op = 'c'"), stateless("b", None)) == [None, None]
    assert left_over(source(), records, stateless("b", None)) == [(0, "dropped"), (1, "dropped")]


def test_what_no_rule_takes_is_unmatched_or_dropped(spark: SparkSession) -> None:
    records, rule = frame(spark, "x", "y", None), stateless("a", "value = 'x'")
    assert left_over(source(), records, rule) == [(1, "unmatched"), (2, "dropped")]
    assert left_over(source("drop"), records, rule) == [(1, "dropped"), (2, "dropped")]
    assert left_over(source("fail"), records, rule) == [(1, "unmatched"), (2, "dropped")]


def test_a_condition_that_is_none_is_an_error(spark: SparkSession) -> None:
    with pytest.raises(EtlError, match=r"rule a, where: length\(value\) is int; it must be a condition"):
        taken(source(), frame(spark, "x"), stateless("a", "length(value)"))


def test_the_hash_of_a_join_key_is_null_where_one_of_its_parts_is(spark: SparkSession) -> None:
    rule = Denorm(
        "d", "t", "u", (("left.key", "right.key"), ("left.value", "right.value")), "out", None, None, "1", "1"
    )
    keyed = matching.keyed(
        rule, "left", matching.in_frame(frame(spark, "x", "x", None), "left"), [StringType(), StringType()]
    )
    hashes = [row.hash for row in keyed.orderBy("left.kafka.offset").collect()]
    assert hashes[0] == hashes[1] is not None
    assert hashes[2] is None


@pytest.mark.parametrize(
    ("join", "kind"),
    [(("left.value.id", "right.value.id"), LongType()), (("upper(left.value.name)", "right.key"), StringType())],
)
def test_a_join_reads_and_moves_the_used_fields_alone_and_each_side_once(
    spark: SparkSession, tmp_path: Path, join: tuple[str, str], kind: DataType
) -> None:
    """Unused fields of a record would pass through two shuffles and four sorts."""
    rows = [(("t", 0, 0, NOW, None), "k", (1, "x", "large"), NOW, False)]
    schema = (
        "kafka struct<topic: string, partition: int, offset: long, time: timestamp, headers: array<string>>, key string,"
        " value struct<id: long, name: string, rest: string>, time timestamp, old boolean"
    )
    spark.createDataFrame(rows, schema).write.parquet(str(tmp_path / "records"))
    rule = Denorm("d", "t", "u", (join,), "out", None, None, "1", "1")
    records = spark.read.schema(schema).parquet(str(tmp_path / "records"))
    left, right = (matching.keyed(rule, side, matching.in_frame(records, side), [kind]) for side in ("left", "right"))
    target = matching.Target("", None, None)
    made = [("out", "struct(left.value.name, right.value.id)")]
    found = matching.paired(rule, 0, left, right, [kind], {"t": 0, "u": 1}, target, lambda rule, target: made)
    plan = found._jdf.queryExecution().executedPlan().toString()  # type: ignore[operator]
    read = re.findall(r"ReadSchema: (.*)", plan)
    assert len(read) == 2
    assert not [name for name in ("topic", "headers", "rest") if any(name in schema for schema in read)]
    assert "key" not in read[0]
    assert plan.count("Exchange") == 2
    assert [row.kind for row in found.collect()] == (["out"] if join[0] == "left.value.id" else ["pending"] * 2)
