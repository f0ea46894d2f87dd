"""A file with Spark's loaded classes. With the file, a session starts in half the CPU time.

This is application class-data sharing with a dynamic archive (JEP 350). With ``-XX:ArchiveClassesAtExit`` a JVM writes its
loaded classes to the archive. With ``-XX:SharedArchiveFile`` a JVM maps the archive. An archive fits one JVM and one list
of jars; another JVM ignores the archive. Each machine creates the archive once, in a session that runs ingest and ETL on a
handful of rows. The archive (170 MB) lies beside the jars of the services.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from zync_assets.local.jars import cache_dir
from zync_assets.local.python import python_environment
from zync_assets.private import of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa
    from pyspark.sql import SparkSession

_OPTIONS = "SPARK_SUBMIT_OPTS"
"""The variable whose content spark-submit gives to the driver's JVM."""
_QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
_PATIENCE = 180.0
"""Seconds to wait for an archive that this or another process makes; a session starts without one then."""

_log = logging.getLogger(__name__)


def share_classes(java: Path) -> None:
    """Have the next JVM that this process starts for Spark use the archive, which is made first where there is none.

    ``java`` is the executable that Spark runs on. Never fails: without an archive Spark starts more slowly.
    """
    given = os.environ.get(_OPTIONS, "")
    if "SharedArchiveFile" in given or "ArchiveClassesAtExit" in given or "-Xshare" in given:
        return
    archive = _made(java)
    if archive is not None:
        os.environ[_OPTIONS] = f"{given} -XX:SharedArchiveFile={archive} {_QUIET}".strip()


def _made(java: Path) -> Path | None:
    try:
        name = archive_name(java)
        folder = cache_dir()
        if name is None or (folder / f"{name}.failed").exists():
            return None
        if found(folder, name) is None:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / f"{name}.lock", timeout=_PATIENCE):
                if found(folder, name) is None:
                    _make(folder, name)
        return found(folder, name)
    except (OSError, Timeout) as error:
        _log.info("Spark starts without an archive of its classes: %s", error)
        return None


def found(folder: Path, name: str) -> Path | None:
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
    found = importlib.util.find_spec("pyspark")
    root = Path(home) if home else Path(found.origin).parent if found and found.origin else None
    return root / "jars" if root and (root / "jars").is_dir() else None


def _make(folder: Path, name: str) -> None:
    """Write the archive, whole or not at all; a marker in its place says that this can't be done here."""
    print("Archiving Spark's classes, once on this machine (about 20 seconds) …", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "made.jsa"
        options = f"-XX:ArchiveClassesAtExit={made} -Xlog:disable"
        environment = (
            os.environ | python_environment() | {_OPTIONS: f"{os.environ.get(_OPTIONS, '')} {options}".strip()}
        )
        try:
            subprocess.run(
                [sys.executable, "-m", __name__, scratch],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=True,
                timeout=_PATIENCE,
            )
            with made.open("rb") as file:
                os.fsync(file.fileno())
            made.replace(folder / f"{name}.{made.stat().st_size}.jsa")
        except (OSError, subprocess.SubprocessError) as error:
            _log.info("no archive of Spark's classes can be made here: %s", error)
            (folder / f"{name}.failed").touch()


def rehearse(spark: SparkSession, folder: Path) -> None:
    """Do what the steps do, on a handful of rows, so that the classes for it are loaded."""
    rows = spark.range(10, numPartitions=2).selectExpr(
        "named_struct('partition', 0, 'offset', id) AS kafka", "id % 5 AS k", "timestamp_millis(id) AS time"
    )
    rows.mapInArrow(_same, rows.schema).write.parquet(str(folder / "raw"))
    raw = spark.read.schema(rows.schema).parquet(str(folder / "raw"))
    ranked = raw.selectExpr(
        "*", "xxhash64(k) AS hash", "row_number() OVER (PARTITION BY k ORDER BY kafka.offset) AS rank"
    )
    left, right = (ranked.selectExpr("k", "rank", "hash", f"kafka AS {side}", "time") for side in ("a", "b"))
    joined = left.join(right.drop("hash", "time"), ["k", "rank"], "full_outer").selectExpr(
        "'out' AS kind",
        "array(a, b) AS source",
        "time",
        "CASE WHEN a IS NOT NULL THEN named_struct('x', k) END AS value",
    )
    single = raw.where("k = 1").selectExpr("'pending' AS kind", "array(kafka) AS source", "time")
    whole = joined.unionByName(single, allowMissingColumns=True).selectExpr("*", "0 AS bucket")
    sorted_rows = whole.repartitionById(1, "bucket").sortWithinPartitions("kind", "time").persist()
    each = sorted_rows.selectExpr("kind", "posexplode(source) AS (place, of)")
    each.groupBy("kind").agg({"*": "count", "place": "sum"}).collect()
    numbered = sorted_rows.where("kind = 'out'").selectExpr("*", "monotonically_increasing_id() AS offset")
    numbered.write.option("compression", "snappy").parquet(str(folder / "staged"))
    some = raw.join(raw.where("k = 2").select("k"), "k", "left_semi").join(raw.where("k = 3"), "k", "left_anti")
    some.selectExpr("kafka.partition AS partition", "k DIV 2 AS span").distinct().collect()
    sorted_rows.unpersist()


def _same(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def _main(folder: Path) -> None:
    from zync_assets.steps.session import spark_session

    spark = spark_session({"master": "local[2]"})
    gateway: Any = of("pyspark", spark.sparkContext, "_gateway")
    rehearse(spark, folder)
    spark.stop()
    process = gateway.proc  # the JVM, which writes the archive as it ends
    process.stdin.close()
    process.wait()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
