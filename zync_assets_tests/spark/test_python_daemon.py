"""Spark's Python workers begin with what tasks need, from a daemon of one thread; and who has a daemon of their own keeps it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from zync_assets.spark.python_daemon import MODULES
from zync_assets.spark.settings import spark_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "spark.python.daemon.module"

LOADED = """
import json, os, sys
from zync_assets.spark import python_daemon
python_daemon.load()
import pyspark.daemon
threads = [open(f"/proc/self/task/{each}/comm").read().strip() for each in os.listdir("/proc/self/task")]
print(json.dumps({"threads": threads, "modules": sorted(sys.modules)}))
"""


def test_what_it_loads_starts_no_thread_and_nothing_that_small_work_does_without() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert len(found["threads"]) == 1, found["threads"]
    assert set(MODULES) <= set(found["modules"])
    assert not {"numba", "dagster", "sqlglot", "pyspark.sql.connect"} & set(found["modules"])


def test_workers_are_its_forks(spark: SparkSession) -> None:
    def look(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import os
        from pathlib import Path

        for _ in batches:
            daemon = Path(f"/proc/{os.getppid()}")
            words = daemon.joinpath("cmdline").read_text().split("\0")
            yield pa.RecordBatch.from_arrays(
                [pa.array([words]), pa.array([len(list((daemon / "task").iterdir()))])], names=["words", "threads"]
            )

    [found] = spark.range(0, 1, 1, 1).mapInArrow(look, "words array<string>, threads long").collect()
    assert found["words"][1:4] == ["-m", "zync_assets.spark.python_daemon", "pyspark.worker"]
    assert found["threads"] == 1


HIDING = ("re.py", "random.py", "numpy.py", "zync_assets.py")
"""Files in the current folder with the names of modules that Spark's workers import."""

IN_A_FOLDER = """
import sys
from zync_assets.spark.session import spark_session
from zync_assets.spark.tasks import run_tasks
spark = spark_session({"master": "local[1]", **dict(text.split("=") for text in sys.argv[1:])})
spark._jvm.System.err.println("of the JVM")
print(run_tasks(spark, 1, lambda index: (sys.flags.safe_path, [path for path in sys.path if path in ("", ".")])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("own", [[], ["spark.python.daemon.module=pyspark.daemon"]])
def test_workers_import_nothing_from_the_current_folder(tmp_path: Path, own: list[str]) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "folder"
    script.write_text(IN_A_FOLDER)
    folder.mkdir()
    for name in HIDING:
        (folder / name).write_text("raise ImportError(f'{__file__} was imported')")
    done = subprocess.run([sys.executable, script, *own], cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[(True, [])]\n", "of the JVM\n")


@pytest.mark.parametrize("own", [{}, {"master": "local"}, {"master": "local[2,3]"}, {"remote": "shared"}])
def test_sessions_of_this_machine_have_it(own: dict[str, str]) -> None:
    assert spark_settings(own)[NAME] == "zync_assets.spark.python_daemon"


@pytest.mark.parametrize(
    "own",
    [
        {"master": "spark://host:7077"},
        {"master": "yarn"},
        {"master": "local-cluster[2,1,1024]"},
        {"remote": "sc://host"},
        {"remote": "shared", "master": "spark://host:7077"},
        {"spark.pyspark.python": "/usr/bin/python3"},
    ],
)
def test_a_spark_that_may_lack_this_package_has_not(own: dict[str, str]) -> None:
    assert NAME not in spark_settings(own)


def test_a_user_s_own_wins() -> None:
    assert spark_settings({"master": "local[2]", NAME: "pyspark.daemon"})[NAME] == "pyspark.daemon"
