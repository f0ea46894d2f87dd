"""Spark's properties for a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zync_assets.spark.settings import spark_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILES = "spark.hadoop.fs.file.impl"


def test_spark_writes_and_verifies_no_checksum_beside_a_file(spark: SparkSession, tmp_path: Path) -> None:
    spark.range(10).coalesce(1).write.parquet(str(tmp_path / "rows"))
    names = sorted(path.name for path in (tmp_path / "rows").iterdir())
    assert [name for name in names if name.endswith(".crc")] == []
    (file,) = (tmp_path / "rows" / name for name in names if name.endswith(".parquet"))
    file.with_name(f".{file.name}.crc").write_bytes(b"of other bytes")
    assert spark.read.parquet(str(tmp_path / "rows")).count() == 10


def test_s3_has_hadoop_s_own_class_for_its_buffers(tmp_path: Path) -> None:
    assert FILES in spark_settings({}, str(tmp_path))
    assert FILES not in spark_settings({"jars": "/jars/hadoop-aws-3.4.2.jar"}, str(tmp_path))
    assert spark_settings({"hadoop.fs.file.impl": "org.example.Files"}, str(tmp_path))[FILES] == "org.example.Files"


def test_a_short_session_collects_garbage_often() -> None:
    interval = "spark.cleaner.periodicGC.interval"
    assert spark_settings({})[interval] == "20s"
    assert interval not in spark_settings({}, long=True)
    assert spark_settings({"cleaner.periodicGC.interval": "1h"})[interval] == "1h"
