"""Rows of this process are a table of the JVM's own, with the values and the types that were asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from zync_assets.codecs.spark_types import arrow_frame, rows_frame

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = pa.schema([("name", pa.string()), ("part", pa.int32()), ("first", pa.int64()), ("time", pa.float64())])


def test_values_and_types_are_kept_and_no_python_reads_them(spark: SparkSession) -> None:
    rows = [("a", 1, 2**60, 0.5), (None, None, None, None)]
    frame = rows_frame(spark, SCHEMA, rows)
    assert [tuple(row) for row in frame.collect()] == rows
    assert [kind for _, kind in frame.dtypes] == ["string", "int", "bigint", "double"]
    plan: Any = frame._jdf
    assert "LocalTableScan" in plan.queryExecution().executedPlan().toString()


def test_no_rows_have_types_too(spark: SparkSession) -> None:
    frame = rows_frame(spark, SCHEMA, [])
    assert frame.collect() == []
    assert [kind for _, kind in frame.dtypes] == ["string", "int", "bigint", "double"]


def test_an_empty_part_of_a_table_hides_no_row(spark: SparkSession) -> None:
    """Spark's own conversion ends at the first batch without rows."""
    parts = [pa.table({"number": pa.array(range(count), pa.int64())}) for count in (3, 0, 2, 0, 1)]
    table = pa.concat_tables(parts)
    assert [row["number"] for row in arrow_frame(spark, table).collect()] == table["number"].to_pylist()
