"""The settings of a Spark session, and the archive of Spark's classes that makes its start faster.

The properties are defaults and the pipeline file's own. The properties that change results are in ``sql``.

With the archive, a session starts in half the CPU time. This is application class-data sharing with a dynamic archive (JEP
350). With ``-XX:ArchiveClassesAtExit`` a JVM writes its loaded classes to the archive. With ``-XX:SharedArchiveFile`` a JVM
maps the archive. An archive fits one JVM and one list of jars; another JVM ignores the archive. Each machine creates the
archive once, in a session that runs ingest and ETL on a handful of rows. The archive (170 MB) lies beside the jars of the
services. ``python -m zync_assets.spark.settings`` makes the archive in the background.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from zync_assets.lake import storage
from zync_assets.local import processes
from zync_assets.local.java import cache_dir, find_java, spark_s3_jars
from zync_assets.local.processes import python_environment
from zync_assets.pipeline import SHARED
from zync_assets.spark.sql import MOST_IN

SECRET = "(?i)secret|password|passphrase|token|credential|access[._-]?key|account[._-]?key|sas[._-]"
"""Spark properties whose names say that they hold a secret: never on a command line, nor in Spark's log and pages."""

_SHORT = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseParallelGC -Xmn160m"
_LONG = (
    "-XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000 -XX:Tier4CompileThreshold=150000"
    " -XX:Tier4BackEdgeThreshold=400000 -XX:+UseParallelGC"
)
"""HotSpot's compilers. The quick compiler alone halves the time of a session's start and of a small first batch. The optimising
compiler halves the time of large batches, after tens of CPU seconds. Higher thresholds restrict this compiler to hot methods.
The parallel collector saves a tenth of a large batch's time over the concurrent collector, and a fifth before compilation.
Its pauses disturb nobody. By default, the quick compiler alone has 48 MB for its code, which the code of a long pipeline fills.
A small young generation keeps the memory of a short session constant for any amount of data."""

_STACK = "-Xss16m"
"""The size of a thread's stack. Only the used part takes memory. With Java's default of 1 MB, a regular expression that
repeats a group overflows on 10,000 characters."""

_DEFAULTS = {
    "spark.master": "local[*]",
    "spark.app.name": "zync_assets",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1536m",
    # Spark merges small partitions into tasks of one size: a larger batch has more tasks, up to this number.
    "spark.sql.shuffle.partitions": "24",
    # By default Spark merges partitions down to the number of cores. Such large sort tasks are slow, take memory, and end at
    # different times.
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
    "spark.sql.adaptive.advisoryPartitionSizeInBytes": "4m",
    # A cache is read at most twice, soon after it was written. Compression would take longer than the reads.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    # A call site noted for each expression costs a third of the time that a small batch's plan takes to build.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # Spark finds compiled code again by its source text. A long session has more than Spark's default of 100 sources.
    "spark.sql.codegen.cache.maxEntries": "1000",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
    # A look-up of so many values skips the pages of Parquet files without one.
    "spark.sql.parquet.pushdown.inFilterThreshold": str(MOST_IN),
    # A list of few values is not a part of the compiled code either.
    "spark.sql.optimizer.inSetConversionThreshold": "0",
    # Spark writes each query's plan as text for a page that nobody looks at. Spark's default form takes longer.
    "spark.sql.ui.explainMode": "simple",
    "spark.redaction.regex": SECRET,
    # A record that overflows the stack fails its task, and so can be found. Spark would end its JVM, and with it a server
    # that other pipelines use.
    "spark.executor.killOnFatalError.depth": "0",
}

_IS_LOCAL = re.compile(r"local(\[|$)")
"""A master whose Python workers have this package as the session's own process has it. A cluster's may get it with a task,
which is too late for the daemon that forks them."""


def _has_package(properties: Mapping[str, str]) -> bool:
    """Whether Python workers are of this interpreter, and have this package from the start."""
    python = properties.get("spark.pyspark.python", os.environ.get("PYSPARK_PYTHON", sys.executable))
    return (
        python == sys.executable
        and _IS_LOCAL.match(properties.get("spark.master", _DEFAULTS["spark.master"])) is not None
    )


def spark_settings(spark: Mapping[str, str], lake: str = "", *, long: bool = False) -> dict[str, str]:
    """Spark's properties for a pipeline. The properties of ``spark:`` win over the defaults. ``long``: for a long session.

    ``master`` and ``remote`` are short for ``spark.master`` and ``spark.remote``. A ``lake`` in S3 adds Spark's S3 jars, and
    downloads them the first time, unless ``spark:`` names a hadoop-aws. A remote Spark uses its own jars, except the shared
    server, which starts with these settings.
    """
    properties = {name if name.startswith("spark.") else f"spark.{name}": value for name, value in spark.items()}
    log = Path(__file__).with_name("log4j2.properties").as_uri()
    remote = properties.get("spark.remote")
    is_short = not long and remote != SHARED
    java = f"{_SHORT if is_short else _LONG} {_STACK} -Dlog4j2.configurationFile={log}"
    settings = _DEFAULTS | {"spark.driver.extraJavaOptions": java}
    if is_short:
        # Objects that outlive a young collection fill the heap to its limit before the first collection of all objects.
        # A long session collects by itself, and its latency counts.
        settings["spark.cleaner.periodicGC.interval"] = "20s"
    if remote not in (None, SHARED):
        del settings["spark.master"]
    elif _has_package(properties):
        settings["spark.python.daemon.module"] = "zync_assets.spark.python_daemon"
    settings |= properties
    if not storage.is_s3(lake):
        # By default Spark lists more than 32 files of a frame in a job. On a disk, the job takes longer than the list.
        settings.setdefault("spark.sql.sources.parallelPartitionDiscovery.threshold", "10000")
    jars = [settings[name] for name in ("spark.jars", "spark.jars.packages") if name in settings]
    own_s3 = any("hadoop-aws" in text for text in jars)
    if storage.is_s3(lake) and remote in (None, SHARED) and not own_s3:
        s3_jars = map(str, spark_s3_jars(find_java))
        settings["spark.jars"] = ",".join([text for text in [settings.get("spark.jars")] if text] + list(s3_jars))
    if not storage.is_store(lake) and not own_s3:
        # Hadoop's own class for files writes a checksum beside each file, and reads 512 bytes at a time to verify it. Look-ups
        # in a state would take twice as long. Hadoop's clients of object stores need Hadoop's class for their buffers.
        settings.setdefault("spark.hadoop.fs.file.impl", "org.apache.hadoop.fs.RawLocalFileSystem")
    return settings


_OPTIONS = "SPARK_SUBMIT_OPTS"
"""The variable whose content spark-submit gives to the driver's JVM."""
_QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
_PATIENCE = 180.0
"""Seconds to wait for an archive that this or another process makes; a session starts without one then."""
_PAUSE = 24 * 3600.0
"""Seconds after which an archive that could not be made is tried again."""

_log = logging.getLogger(__name__)


def keep_classes(jvm: Any) -> None:
    """Have py4j keep the classes that PySpark uses in each batch. ``jvm``: py4j's view of the JVM.

    py4j asks the JVM at each use of a name. The JVM then searches all jars for the class. A search takes half a millisecond. A
    batch of one plain rule uses these names 20 times, and a batch of a view 200 times.
    """
    for name in ("PythonErrorUtils", "PythonSQLUtils", "PythonUtils", "SimplePythonFunction", "functions", "py4j"):
        setattr(jvm, name, getattr(jvm, name))
    jvm.PythonUtils.toSeq = jvm.PythonUtils.toSeq
    jvm.py4j.reflection = jvm.py4j.reflection
    jvm.py4j.reflection.TypeUtil = jvm.py4j.reflection.TypeUtil


def share_classes(java: Path) -> None:
    """Have the next JVM that this process starts for Spark use the archive.

    Without an archive Spark starts two seconds later, and a process in the background makes the archive once this process has
    ended. ``java`` is the executable that Spark runs on. Never fails.
    """
    options = os.environ.get(_OPTIONS, "")
    if "SharedArchiveFile" in options or "ArchiveClassesAtExit" in options or "-Xshare" in options:
        return
    try:
        name, folder = archive_name(java), cache_dir()
        if name is None:
            return
        archive, failed = find_archive(folder, name), has_failed(folder, name)
    except OSError as error:
        _log.info("Spark starts without an archive of its classes: %s", error)
        return
    if archive is not None:
        os.environ[_OPTIONS] = f"{options} -XX:SharedArchiveFile={archive} {_QUIET}".strip()
    elif not failed:
        atexit.unregister(_archive_later)
        atexit.register(_archive_later)


def archive_classes(java: Path) -> None:
    """Make the archive, unless it is there or failed a short while ago. Waits for another process that makes the archive."""
    name, folder = archive_name(java), cache_dir()
    if name is None or has_failed(folder, name):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(Timeout), FileLock(folder / f"{name}.lock", timeout=_PATIENCE):
        if find_archive(folder, name) is None:
            _make(folder, name)


def has_failed(folder: Path, name: str) -> bool:
    """Whether the archive could not be made in the last hours. A machine may have been busy, or its disk full."""
    with suppress(FileNotFoundError):
        return time.time() - _failure(folder, name).stat().st_mtime < _PAUSE
    return False


def _failure(folder: Path, name: str) -> Path:
    """The file whose time says when the archive could not be made."""
    return folder / f"{name}.failed"


def _archive_later() -> None:
    """Start a process that makes the archive. The process has the lowest priority."""
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        processes.spawn([sys.executable, "-m", __name__], cwd=folder, log=folder / "spark-classes.log")
    except (OSError, subprocess.SubprocessError) as error:
        _log.info("no archive of Spark's classes: %s", error)
    else:
        print(
            "Spark's classes are archived in the background, once on this machine, for quicker starts.", file=sys.stderr
        )


def find_archive(folder: Path, name: str) -> Path | None:
    """The finished archive of that name. The size is part of the file's name, since the JVM crashes on a shorter one."""
    for path in folder.glob(f"{name}.*.jsa"):
        if path.name == f"{name}.{path.stat().st_size}.jsa":
            return path
    return None


def archive_name(java: Path) -> str | None:
    """The archive's file name for a Java and this PySpark; None if PySpark's jars are not found."""
    jars = _jars()
    modules = java.parent.parent / "lib" / "modules"
    if jars is None or not modules.exists():
        return None
    parts = [str(java), str(modules.stat().st_mtime_ns), str(jars), str(jars.stat().st_mtime_ns)]
    return f"spark-classes-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:12]}"


def _jars() -> Path | None:
    home = os.environ.get("SPARK_HOME")
    spec = importlib.util.find_spec("pyspark")
    root = Path(home) if home else Path(spec.origin).parent if spec and spec.origin else None
    return root / "jars" if root and (root / "jars").is_dir() else None


def _make(folder: Path, name: str) -> None:
    """Write the archive, whole or not at all; a marker in its place says that it could not be made."""
    print("Archiving Spark's classes, once on this machine (about 20 seconds) …", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        archive = Path(scratch) / "made.jsa"
        options = f"-XX:ArchiveClassesAtExit={archive} -Xlog:disable"
        environment = (
            os.environ | python_environment() | {_OPTIONS: f"{os.environ.get(_OPTIONS, '')} {options}".strip()}
        )
        try:
            subprocess.run(
                [sys.executable, "-m", "zync_assets.spark.session", scratch],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=True,
                timeout=_PATIENCE,
            )
            with archive.open("rb") as file:
                os.fsync(file.fileno())
            archive.replace(folder / f"{name}.{archive.stat().st_size}.jsa")
        except (OSError, subprocess.SubprocessError) as error:
            _log.info("no archive of Spark's classes could be made: %s", error)
            _failure(folder, name).touch()


if __name__ == "__main__":
    os.nice(19)
    archive_classes(find_java())
