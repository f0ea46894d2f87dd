"""Results depend on no setting of a session, wherever the session comes from."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.spark.session import prepare
from zync_assets.spark.sql import PINS, contradictions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OWN = {
    "spark.sql.parquet.outputTimestampType",
    "spark.sql.redaction.options.regex",
    "spark.sql.requireAllClusterKeysForCoPartition",
    "spark.sql.session.timeZone",
}
"""Pins that have other values than Spark itself."""
WRONG = {
    "LTZ": "NTZ",
    "ANSI": "LEGACY",
    "CORRECTED": "LEGACY",
    "EXCEPTION": "LAST_WIN",
    "true": "false",
    "false": "true",
}


def wrong(name: str, value: str) -> str:
    own = {
        "spark.sql.timestampType": "TIMESTAMP_NTZ",
        "spark.sql.session.timeZone": "America/New_York",
        "spark.sql.parquet.outputTimestampType": "INT96",
        "spark.sql.redaction.options.regex": "none",
    }
    return own.get(name) or WRONG[value]


def test_every_pin_is_a_setting_of_this_spark_with_its_default(spark: SparkSession) -> None:
    fresh = spark.newSession()
    assert {name for name, value in PINS.items() if fresh.conf.get(name) != value} <= OWN


def test_a_session_of_whatever_settings_gives_the_results_of_any_other(spark: SparkSession, tmp_path: Path) -> None:
    other = spark.newSession()
    for name, value in PINS.items():
        other.conf.set(name, wrong(name, value))
    prepare(other)
    assert {name: other.conf.get(name) for name in PINS} == dict(PINS)
    path = tmp_path / "old.parquet"
    moments = pa.array([-62_135_596_800_000_000], pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"day": [date(1, 1, 1)], "at": moments, "raw": [b"x"]}), path)
    made = (
        "CAST(day AS STRING) AS day",
        "unix_micros(at) AS at",
        "typeof(raw) AS raw",
        r"'a\tb' AS text",
        "typeof(CAST('2024-01-01 00:00:00' AS TIMESTAMP)) AS kind",
        "typeof(TIMESTAMP '2024-01-01 00:00:00') AS literal",
        "CAST(array(1, NULL) AS STRING) AS list",
    )
    for session in (spark, other):
        row = session.read.parquet(str(path)).selectExpr(*made).collect()[0]
        assert tuple(row) == (
            *("0001-01-01", -62_135_596_800_000_000, "binary"),
            *("a\tb", "timestamp", "timestamp", "[1, null]"),
        )


def test_a_setting_that_is_as_it_must_be_may_be_given() -> None:
    assert list(contradictions(PINS)) == []
    assert list(contradictions({"spark.sql.session.timeZone": "utc", "spark.sql.shuffle.partitions": "7"})) == []
