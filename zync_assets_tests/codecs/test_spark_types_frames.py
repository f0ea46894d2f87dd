"""Rows of this process are a table of the JVM's own, with the values and the types that were asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.codecs.spark_types import listed_frame

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = pa.schema([("name", pa.string()), ("part", pa.int32()), ("first", pa.int64()), ("time", pa.float64())])


def test_values_and_types_are_kept_and_no_python_reads_them(spark: SparkSession) -> None:
    rows = [("a", 1, 2**60, 0.5), (None, None, None, None)]
    frame = listed_frame(spark, SCHEMA, rows)
    assert [tuple(row) for row in frame.collect()] == rows
    assert [kind for _, kind in frame.dtypes] == ["string", "int", "bigint", "double"]
    assert "LocalTableScan" in frame._jdf.queryExecution().executedPlan().toString()


def test_no_rows_have_types_too(spark: SparkSession) -> None:
    frame = listed_frame(spark, SCHEMA, [])
    assert frame.collect() == []
    assert [kind for _, kind in frame.dtypes] == ["string", "int", "bigint", "double"]
