"""Spark's settings and, outside Dagster, its session."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zync_assets.lake import storage
from zync_assets.local.jars import spark_s3_jars
from zync_assets.local.java import find_java
from zync_assets.steps.class_archive import share_classes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECRET = "(?i)secret|password|passphrase|token|credential|access[._-]?key|account[._-]?key|sas[._-]"
"""Spark properties whose names say that they hold a secret: never on a command line, nor in Spark's log and pages."""

_SHORT = "-XX:TieredStopAtLevel=1"
_LONG = (
    "-XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000 -XX:Tier4CompileThreshold=150000"
    " -XX:Tier4BackEdgeThreshold=400000 -XX:+UseParallelGC"
)
"""HotSpot's compilers. The quick one alone starts a session and does a small first batch in half the time; the optimising one
halves the time of large batches, after tens of CPU seconds. Ten times its usual thresholds keep it to what is really hot.
The collector that stops the world takes a tenth less of a large batch than the one beside it, and nobody waits for a pause."""

_DEFAULTS = {
    "spark.master": "local[*]",
    "spark.app.name": "zync_assets",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1536m",
    "spark.sql.shuffle.partitions": "8",
    # A batch's results are kept for a moment and read twice: to compress them takes longer than to read them.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    # A call site noted for each expression costs a third of the time that a small batch's plan takes to build.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
    "spark.redaction.regex": SECRET,
}

REQUIRED = {
    "spark.sql.ansi.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.requireAllClusterKeysForCoPartition": "false",
    "spark.sql.caseSensitive": "false",
    # Readers' and writers' options stand in plans. Spark's own pattern has no `fs.azure.account.key`.
    "spark.sql.redaction.options.regex": "(?i)url|secret|password|token|key",
}
"""Settings that results, or secrets, depend on; set on every session that is used, whoever made it."""


def spark_settings(spark: Mapping[str, str], lake: str = "", *, long: bool = False) -> dict[str, str]:
    """Spark's properties for a pipeline's ``spark:``: its own win over the defaults. ``long``: for a session that goes on.

    ``master`` and ``remote`` are short for ``spark.master`` and ``spark.remote``. For a ``lake`` in S3 the jars that read it
    are added (and fetched the first time), unless ``spark:`` names a hadoop-aws; a remote Spark has jars of its own.
    """
    own = {name if name.startswith("spark.") else f"spark.{name}": value for name, value in spark.items()}
    log = Path(__file__).with_name("log4j2.properties").as_uri()
    java = f"{_LONG if long else _SHORT} -Dlog4j2.configurationFile={log}"
    settings = _DEFAULTS | {"spark.driver.extraJavaOptions": java}
    if "spark.remote" in own:
        del settings["spark.master"]
    settings |= own
    named = [settings[name] for name in ("spark.jars", "spark.jars.packages") if name in settings]
    if storage.is_s3(lake) and "spark.remote" not in settings and not any("hadoop-aws" in text for text in named):
        ours = map(str, spark_s3_jars(find_java))
        settings["spark.jars"] = ",".join([text for text in [settings.get("spark.jars")] if text] + list(ours))
    return settings


def spark_session(spark: Mapping[str, str], lake: str = "", *, long: bool = False) -> SparkSession:
    """The session of this process, made at the first call; SetupError if there is no Java that Spark runs on. ``lake`` and
    ``long``: as for ``spark_settings``."""
    from pyspark.sql import SparkSession

    settings = spark_settings(spark, lake, long=long)
    if "spark.remote" not in settings:
        use_this_machine()
        start_jvm(settings)
    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    _hush()
    return prepared(builder.getOrCreate())


def _hush() -> None:
    """PySpark logs each error that it raises to stderr, as JSON, plan and all; who catches it says it in a line."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel("CRITICAL")


def use_this_machine() -> None:
    """Point Spark at a Java that it runs on, and its Python workers at this interpreter, which has this package.

    Raises SetupError if there is no such Java.
    """
    java = find_java()
    os.environ["JAVA_HOME"] = str(java.parent.parent)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    share_classes(java)


def start_jvm(settings: Mapping[str, str]) -> None:
    """Start this process's JVM, if there is none yet, with those settings on its command line that hold no secret.

    PySpark would put all of them there, for every user of the machine to read. The session that is made next gets the
    others through the open connection.
    """
    from pyspark import SparkConf, SparkContext

    # At its debug level py4j logs all that passes to the JVM: settings, and tasks' code with the connections in it; at its
    # info level that a connection was closed, which nobody asks for.
    logging.getLogger("py4j").setLevel(logging.WARNING)
    # Known to Spark's launcher before there is a JVM to ask.
    public = SparkConf(loadDefaults=False)
    public.setAll([(name, value) for name, value in settings.items() if not re.search(SECRET, name)])
    start: Any = SparkContext._ensure_initialized  # pyright: ignore[reportPrivateUsage]
    start(conf=public)


def prepared(session: SparkSession) -> SparkSession:
    """The session with the settings that results depend on."""
    for name, value in REQUIRED.items():
        session.conf.set(name, value)
    return session
