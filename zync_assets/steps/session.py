"""Spark's settings and, outside Dagster, its session."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from zync_assets.local.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DEFAULTS = {
    "spark.master": "local[*]",
    "spark.app.name": "zync_assets",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1536m",
    "spark.driver.extraJavaOptions": "-XX:+UseParallelGC -Dlog4j2.level=ERROR",
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": "8",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
}

REQUIRED = {
    "spark.sql.ansi.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.requireAllClusterKeysForCoPartition": "false",
    "spark.sql.caseSensitive": "false",
}
"""Settings that results depend on; set on every session that is used, whoever made it."""


def spark_settings(spark: Mapping[str, str]) -> dict[str, str]:
    """Spark's properties for a pipeline's ``spark:``: its own win over the defaults. ``master`` and ``remote`` are
    short for ``spark.master`` and ``spark.remote``."""
    own = {name if name.startswith("spark.") else f"spark.{name}": value for name, value in spark.items()}
    settings = dict(_DEFAULTS)
    if "spark.remote" in own:
        del settings["spark.master"]
    return settings | own


def spark_session(spark: Mapping[str, str]) -> SparkSession:
    """The session of this process, made at the first call. SetupError if there is no Java that Spark runs on."""
    from pyspark.sql import SparkSession

    settings = spark_settings(spark)
    if "spark.remote" not in settings:
        os.environ["JAVA_HOME"] = str(find_java().parent.parent)
    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    return prepared(builder.getOrCreate())


def prepared(session: SparkSession) -> SparkSession:
    """The session with the settings that results depend on."""
    for name, value in REQUIRED.items():
        session.conf.set(name, value)
    return session
