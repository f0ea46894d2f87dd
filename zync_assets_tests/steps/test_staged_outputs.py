"""Outputs are numbered and written by many tasks, none of which sees them all."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zync_assets.etl.labels import Labels
from zync_assets.etl.numbering import arranged, facts
from zync_assets.lake import staging
from zync_assets.steps.staged_outputs import BucketWriter, write_outputs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
LABELS = Labels(["first", "second"], ["for-a", "for-b"], ["a", "b"])


def results(spark: SparkSession) -> DataFrame:
    """Forty outputs of two topics, and a record that waits."""
    rows = [
        ("out", int(number % 3 == 0), (EPOCH + dt.timedelta(milliseconds=number * 7 % 60), 1, 0, number),
         [(1, 0, number), (0, 0, number)], 0, f"value {number}")
        for number in range(40)
    ] + [("pending", 0, (EPOCH, 1, 0, 100), [(1, 0, 100)], 0, None)]  # fmt: skip
    schema = (
        "kind string, rule int, ord struct<time: timestamp, place: int, partition: int, offset: long>,"
        " source array<struct<place: int, partition: int, offset: long>>, waited int, value string"
    )
    return spark.createDataFrame(rows, schema).repartition(3)


@pytest.mark.parametrize("bounds", [[], [30], [10, 30, 31, 90]])
@pytest.mark.parametrize("group", [3, 50_000])
def test_the_numbers_follow_the_order_over_all_buckets(
    spark: SparkSession, tmp_path: Path, bounds: list[int], group: int
) -> None:
    """Two topics share the buckets; each is numbered by itself."""
    before = spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch")
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 2)
    made = arranged(results(spark), bounds).persist()
    counted = facts(made, LABELS)
    assert sum(row.rows for row in counted if row.kind == "out") == 40
    assert sum(row.entries for row in counted if row.kind == "pending") == 1
    for topic, rule in (("a", 0), ("b", 1)):
        sizes = [0] * (len(bounds) + 1)
        for row in counted:
            if row.out == topic and row.topic == "first":
                sizes[row.bucket] += row.entries
        firsts = [1000 + sum(sizes[:place]) for place in range(len(sizes))]
        own = {"value:it": pa.string()}
        writer = BucketWriter(str(tmp_path), f"topic={topic}", topic, firsts, LABELS, ["fa", "fb"], own, group)
        columns = ("bucket", "rule", "source", "CAST(NULL AS array<string>) AS left_out", "value AS side0")
        mine = made.where(f"kind = 'out' AND rule = {rule}").selectExpr(*columns)
        files = write_outputs(spark, mine, writer, 100.0)
        assert [item.first for item in files] == [firsts[at] for at, size in enumerate(sizes) if size]
        assert all((item.last or 0) - (item.first or 0) + 1 == item.records for item in files)
        rows = [row for item in files for row in pq.read_table(tmp_path / item.path, partitioning=None).to_pylist()]
        assert [row["kafka"] for row in rows] == [
            {"topic": topic, "partition": 0, "offset": offset} for offset in range(1000, 1000 + sum(sizes))
        ]
        numbers = [row["source"][0]["offset"] for row in rows]
        assert numbers == sorted((n for n in range(40) if (n % 3 == 0) == rule), key=lambda n: (n * 7 % 60, n))
        assert rows[0] | {"kafka": None} == {
            "kafka": None,
            "rule": f"for-{topic}",
            "source": [{"topic": name, "partition": 0, "offset": numbers[0]} for name in ("second", "first")],
            "schema": f"f{topic}",
            "left_out": None,
            "value:it": f"value {numbers[0]}",
        }
        base = {
            name: staging.BASE_SCHEMA.field(name).type for name in ("kafka", "rule", "source", "schema", "left_out")
        }
        assert dict(zip(*(lambda s: (s.names, s.types))(pq.read_schema(tmp_path / files[0].path)), strict=True)) == {
            **base,
            "value:it": pa.string(),
        }
    made.unpersist()
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(before))


def test_what_a_batch_of_arrow_s_may_hold_is_as_it_was_afterwards(spark: SparkSession, tmp_path: Path) -> None:
    before = spark.conf.get("spark.sql.execution.arrow.maxBytesPerBatch")
    writer = BucketWriter(str(tmp_path), "topic=a", "a", [0], LABELS, ["fa", "fb"], {"value:it": pa.string()})
    none = arranged(results(spark), []).where("false")
    columns = ("bucket", "rule", "source", "CAST(NULL AS array<string>) AS left_out", "value AS side0")
    assert write_outputs(spark, none.selectExpr(*columns), writer, 100.0) == []
    assert spark.conf.get("spark.sql.execution.arrow.maxBytesPerBatch") == before
