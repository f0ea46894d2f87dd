"""Spark's properties for a pipeline: defaults, and the file's own. ``spark_pins`` has those that results depend on."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from zync_assets.lake import storage
from zync_assets.local.jars import spark_s3_jars
from zync_assets.local.java import find_java
from zync_assets.pipeline import SHARED

SECRET = "(?i)secret|password|passphrase|token|credential|access[._-]?key|account[._-]?key|sas[._-]"
"""Spark properties whose names say that they hold a secret: never on a command line, nor in Spark's log and pages."""

_SHORT = "-XX:TieredStopAtLevel=1 -XX:+UseParallelGC -Xmn160m"
_LONG = (
    "-XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000 -XX:Tier4CompileThreshold=150000"
    " -XX:Tier4BackEdgeThreshold=400000 -XX:+UseParallelGC"
)
"""HotSpot's compilers. The quick one alone starts a session and does a small first batch in half the time; the optimising one
halves the time of large batches, after tens of CPU seconds. Ten times its usual thresholds keep it to what is really hot.
The collector that stops the world takes a tenth less of a large batch than the one beside it, a fifth where nothing is compiled
yet, and nobody waits for a pause. What is new gets little room where memory is to be the same however much there is to do."""

_STACK = "-Xss16m"
"""A thread's stack, of which memory is only what was used once. In Java's own megabyte a regular expression that repeats a
group overflows on 10,000 characters."""

_DEFAULTS = {
    "spark.master": "local[*]",
    "spark.app.name": "zync_assets",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1536m",
    # The more records a batch has the more of these tasks, of one size, once what is little is put together.
    "spark.sql.shuffle.partitions": "24",
    # Else Spark makes as few of them as there are cores: tasks that sort as much as that are slow, take memory, and end
    # one long after the other. What is little stays together.
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
    "spark.sql.adaptive.advisoryPartitionSizeInBytes": "4m",
    # What is kept is read twice, a moment later: to compress it takes longer than to read it.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    # A call site noted for each expression costs a third of the time that a small batch's plan takes to build.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # Compiled code is found again by its text; a session that goes on has more of it than Spark's hundred places.
    "spark.sql.codegen.cache.maxEntries": "1000",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
    "spark.redaction.regex": SECRET,
    # A record that overflows the stack fails its task, and so can be found. Spark would end its JVM, and with it a server
    # that other pipelines use.
    "spark.executor.killOnFatalError.depth": "0",
}

_IS_LOCAL = re.compile(r"local(\[|$)")
"""A master whose Python workers have this package as the session's own process has it. A cluster's may get it with a task,
which is too late for the daemon that forks them."""


def _has_package(own: Mapping[str, str]) -> bool:
    """Whether Python workers are of this interpreter, and have this package from the start."""
    python = own.get("spark.pyspark.python", os.environ.get("PYSPARK_PYTHON", sys.executable))
    return python == sys.executable and _IS_LOCAL.match(own.get("spark.master", _DEFAULTS["spark.master"])) is not None


def spark_settings(spark: Mapping[str, str], lake: str = "", *, long: bool = False) -> dict[str, str]:
    """Spark's properties for a pipeline's ``spark:``: its own win over the defaults. ``long``: for a session that goes on.

    ``master`` and ``remote`` are short for ``spark.master`` and ``spark.remote``. For a ``lake`` in S3 the jars that read it
    are added (and fetched the first time), unless ``spark:`` names a hadoop-aws; a remote Spark has jars of its own, but for
    the shared one, which is started with these settings.
    """
    own = {name if name.startswith("spark.") else f"spark.{name}": value for name, value in spark.items()}
    log = Path(__file__).with_name("log4j2.properties").as_uri()
    remote = own.get("spark.remote")
    java = f"{_LONG if long or remote == SHARED else _SHORT} {_STACK} -Dlog4j2.configurationFile={log}"
    settings = _DEFAULTS | {"spark.driver.extraJavaOptions": java}
    if remote not in (None, SHARED):
        del settings["spark.master"]
    elif _has_package(own):
        settings["spark.python.daemon.module"] = "zync_assets.steps.python_daemon"
    settings |= own
    named = [settings[name] for name in ("spark.jars", "spark.jars.packages") if name in settings]
    if storage.is_s3(lake) and remote in (None, SHARED) and not any("hadoop-aws" in text for text in named):
        ours = map(str, spark_s3_jars(find_java))
        settings["spark.jars"] = ",".join([text for text in [settings.get("spark.jars")] if text] + list(ours))
    return settings
