"""Outputs are numbered and written, and all rows accounted for, by many tasks, none of which sees them all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException

from zync_assets.errors import LakeError
from zync_assets.etl.account import Fact, Labels
from zync_assets.etl.output_files import BucketWriter, ResultQuery, Results
from zync_assets.etl.partitions import Partitions
from zync_assets.etl.positions import Numbered, arranged
from zync_assets.etl.topic_outputs import TopicOutputs, row_sql
from zync_assets.kafka.partitioner import key_partitions
from zync_assets.lake import staging
from zync_assets.publish.encoding import SideSchema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTS = ("high", "place", "partition", "offset")
LABELS = Labels(["first", "second"], ["for-a", "for-b"], ["a", "b"])
OWN = {topic: {f"value:{topic}": pa.string()} for topic in "ab"}
TOPICS = [TopicOutputs(topic, f"topic={topic}", [1000], OWN[topic], ["fa", "fb"], {}, None) for topic in "ab"]


def results(spark: SparkSession) -> DataFrame:
    """Forty outputs of two topics, of which the first was pending on one side, and two records that wait."""
    rows = [
        ("out", int(number % 3 == 0), (number * 7 % 60, 1, 0, number),
         [(1, 0, number), (0, 0, number)], 1, 2 * int(number == 0), None,
         *((None, f"value {number}") if number % 3 == 0 else (f"value {number}", None)))
        for number in range(40)
    ] + [("pending", 0, (0, 1, 0, at), [(1, 0, at)], 0, 0, 7, None, None) for at in (100, 101)]  # fmt: skip
    schema = (
        "kind string, rule int, ord struct<high: long, place: int, partition: int, offset: long>,"
        " source array<struct<place: int, partition: int, offset: long>>, last int, waited int, hash long,"
        " `value:a` string, `value:b` string"
    )
    return spark.createDataFrame(rows, schema).repartition(3)


def made(spark: SparkSession, bounds: list[int]) -> DataFrame:
    outs = [Numbered(LABELS.of_topic(topic)) for topic in "ab"]
    wanted = row_sql(TOPICS, LABELS, "false", None)
    return arranged(results(spark), PARTS, [(bound,) for bound in bounds], wanted, outs)


@pytest.mark.parametrize("bounds", [[], [30], [10, 30, 31, 90]])
@pytest.mark.parametrize("group", [3, 50_000])
@pytest.mark.parametrize("small", [False, True])
def test_the_numbers_follow_the_order_over_all_buckets(
    spark: SparkSession, tmp_path: Path, bounds: list[int], group: int, small: bool
) -> None:
    """Two topics share the buckets; each is numbered by itself."""
    before = spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch")
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 2)
    try:
        found = Results(
            spark, [ResultQuery(made(spark, bounds), BucketWriter(str(tmp_path), TOPICS, LABELS, group))], small=small
        )
    finally:
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(before))
    assert sorted(found.facts, key=str) == sorted(
        [
            Fact("out", "a", "for-a", "first", 0, False, 26, 0),
            Fact("out", "a", "for-a", "second", 0, False, 26, 26),
            Fact("out", "b", "for-b", "first", 0, False, 13, 0),
            Fact("out", "b", "for-b", "first", 0, True, 1, 0),
            Fact("out", "b", "for-b", "second", 0, False, 14, 14),
            Fact("pending", None, "for-a", "second", 0, False, 2, 2),
        ],
        key=str,
    )
    entries = sorted(found.few_entries().to_pylist(), key=lambda entry: str(entry["first"]))
    assert entries == sorted((row.asDict() for row in found.entries().collect()), key=lambda entry: str(entry["first"]))
    assert [(entry["kind"], entry["topic"], entry["first"], entry["hash"]) for entry in entries] == [
        ("completed", "first", 0, None),
        ("pending", "second", 100, 7),
        ("pending", "second", 101, 7),
    ]
    paths = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.parquet")}
    assert paths == {item.path for item in found.files}, "to ask for the entries writes nothing again"
    for rule, topic in enumerate("ab"):
        files = [item for item in found.files if item.group == topic]
        rows = [row for item in files for row in pq.read_table(tmp_path / item.path, partitioning=None).to_pylist()]
        assert [row["kafka"] for row in rows] == [
            {"topic": topic, "partition": 0, "offset": offset} for offset in range(1000, 1000 + [26, 14][rule])
        ]
        assert [item.first for item in files] == [
            pq.read_table(tmp_path / item.path)["kafka"][0].as_py()["offset"] for item in files
        ]
        assert all((item.last or 0) - (item.first or 0) + 1 == item.records for item in files)
        numbers = [row["source"][0]["offset"] for row in rows]
        assert numbers == sorted((n for n in range(40) if (n % 3 == 0) == rule), key=lambda n: (n * 7 % 60, n))
        assert rows[0] | {"kafka": None} == {
            "kafka": None,
            "rule": f"for-{topic}",
            "source": [{"topic": name, "partition": 0, "offset": numbers[0]} for name in ("second", "first")],
            "schema": f"f{topic}",
            "left_out": None,
            f"value:{topic}": f"value {numbers[0]}",
        }
        base = {
            name: staging.BASE_SCHEMA.field(name).type for name in ("kafka", "rule", "source", "schema", "left_out")
        }
        assert dict(zip(*(lambda s: (s.names, s.types))(pq.read_schema(tmp_path / files[0].path)), strict=True)) == {
            **base,
            f"value:{topic}": pa.string(),
        }
    found.release()


def made_in_partitions(spark: SparkSession, bounds: list[int]) -> tuple[list[TopicOutputs], DataFrame]:
    """Topic a has three partitions by an expression, topic b has two by the bytes of its keys."""
    shared = [Partitions("a", 3, by=True), Partitions("b", 2, [None, SideSchema("string", "s", None, "")], pa.string())]
    own = [OWN["a"], {"key:b": pa.string(), **OWN["b"]}]
    topics = [
        TopicOutputs(item.topic, item.topic, [100, 200, 300][: item.count], columns, ["fa", "fb"], {}, None, (), item)
        for item, columns in zip(shared, own, strict=True)
    ]
    part = "CAST(source[0].offset DIV 3 % 3 AS INT) AS `partition:a`"
    frame = results(spark).selectExpr("*", part, "`value:b` AS `key:b`")
    outs = [Numbered(LABELS.of_topic(item.topic), item.count, item.column()) for item in shared]
    wanted = row_sql(topics, LABELS, "false", None)
    return topics, arranged(frame, PARTS, [(bound,) for bound in bounds], wanted, outs)


@pytest.mark.parametrize("bounds", [[], [30], [10, 30, 31, 90]])
def test_each_partition_of_a_topic_is_numbered_by_itself(
    spark: SparkSession, tmp_path: Path, bounds: list[int]
) -> None:
    topics, rows = made_in_partitions(spark, bounds)
    found = Results(spark, [ResultQuery(rows, BucketWriter(str(tmp_path), topics, LABELS))], small=True)
    kept = [row for item in found.files for row in pq.read_table(tmp_path / item.path, partitioning=None).to_pylist()]
    for topic, count in (("a", 3), ("b", 2)):
        for partition in range(count):
            here = [row for row in kept if (row["kafka"]["topic"], row["kafka"]["partition"]) == (topic, partition)]
            first = 100 * (partition + 1)
            assert [row["kafka"]["offset"] for row in here] == list(range(first, first + len(here)))
            numbers = [row["source"][0]["offset"] for row in here]
            assert numbers == sorted(numbers, key=lambda n: (n * 7 % 60, n)), "the order is kept within a partition"
            assert numbers
            if topic == "a":
                assert {number // 3 % 3 for number in numbers} == {partition}
            else:
                payloads = pa.array([row["key:b"].encode() for row in here])
                assert set(key_partitions(payloads, 2).tolist()) == {partition}
    assert len(kept) == 40
    found.release()


@pytest.mark.parametrize("shared", [False, True])
def test_rows_are_made_once_to_be_counted_and_to_be_written(spark: SparkSession, shared: bool) -> None:
    """With two computations, every join would run twice, and rows that differ between runs would get wrong numbers."""
    rows = made_in_partitions(spark, [10, 30])[1] if shared else made(spark, [10, 30])
    assert len(rows.collect()) == 42
    plan = rows._jdf.queryExecution().executedPlan().toString()  # type: ignore[operator]
    final = plan.partition("== Initial Plan ==")[0]
    exchanges = [line for line in plan.splitlines() if "REPARTITION_BY_NUM" in line and "ReusedExchange" in line]
    assert "Subquery" in final
    assert exchanges


def test_what_a_batch_of_arrow_s_may_hold_is_as_it_was_afterwards(spark: SparkSession, tmp_path: Path) -> None:
    names = [f"spark.sql.execution.arrow.max{what}PerBatch" for what in ("Bytes", "Records")]
    before = [spark.conf.get(name) for name in names]
    none = made(spark, []).where("false")
    found = Results(spark, [ResultQuery(none, BucketWriter(str(tmp_path), TOPICS, LABELS))], small=False)
    assert (list(found.files), found.facts, found.few_entries().num_rows) == ([], [], 0)
    found.release()
    assert [spark.conf.get(name) for name in names] == before


def test_a_batch_that_can_t_be_written_leaves_nothing_in_spark_s_cache(spark: SparkSession, tmp_path: Path) -> None:
    place = tmp_path / "lake"
    place.write_text("a file where a folder is needed")
    with pytest.raises(LakeError, match="can't be written"):
        Results(spark, [ResultQuery(made(spark, []), BucketWriter(str(place), TOPICS, LABELS))], small=False)
    assert spark._jsparkSession.sharedState().cacheManager().isEmpty()  # type: ignore[operator]


@pytest.mark.slow
def test_entries_that_spark_lost_and_can_t_make_again_are_an_error(spark: SparkSession, tmp_path: Path) -> None:
    """A recomputed task writes its files again. If the write fails, the task ends without an error, but has fewer entries."""
    place = tmp_path / "lake"
    found = Results(spark, [ResultQuery(made(spark, [30]), BucketWriter(str(place), TOPICS, LABELS))], small=False)
    assert len(found.few_entries()) == 3
    for kept in spark.sparkContext._jsc.getPersistentRDDs().values():  # type: ignore[union-attr]
        manager = spark.sparkContext._jvm.org.apache.spark.SparkEnv.get().blockManager()  # type: ignore[union-attr]
        manager.removeRdd(kept.id())
    place.rename(tmp_path / "was")
    place.write_text("a file where a folder is needed")
    with pytest.raises(LakeError, match="can't be written"):
        found.few_entries()
    with pytest.raises(PySparkException, match="can't be written"):
        found.entries().collect()
    found.release()


@pytest.mark.slow
@pytest.mark.parametrize("small", [False, True])
def test_large_rows_among_small_ones_fit_in_memory(spark: SparkSession, tmp_path: Path, small: bool) -> None:
    """Sixteen thousand of 60,000 bytes: as one batch of Arrow's, as many small ones are, they would end the JVM."""
    each = "struct(1 AS place, 0 AS partition, id AS offset)"
    large = spark.range(16_000).selectExpr(
        "'out' AS kind",
        "0 AS rule",
        "struct(id AS high, 1 AS place, 0 AS partition, id AS offset) AS ord",
        f"array({each}) AS source",
        "0 AS last",
        "0 AS waited",
        "CAST(NULL AS bigint) AS hash",
        "repeat('x', 60000) AS `value:a`",
        "CAST(NULL AS string) AS `value:b`",
    )
    rows = arranged(large, PARTS, [], row_sql(TOPICS, LABELS, "false", None), [Numbered("0"), Numbered("1")])
    found = Results(spark, [ResultQuery(rows, BucketWriter(str(tmp_path), TOPICS, LABELS))], small=small)
    assert sum(item.records for item in found.files) == 16_000
    found.release()
