"""Spark tasks: how many there may be at one time, and that a worker process knows nothing of the command before."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.lake import tables
from zync_assets.spark.tasks import run_tasks, slots

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class WithoutContext:
    """A session as it is over Spark Connect."""

    def __init__(self, spark: SparkSession) -> None:
        self.range = spark.range


def test_tasks_at_one_time(spark: SparkSession) -> None:
    assert slots(spark) == 2
    assert slots(WithoutContext(spark)) == 2  # type: ignore[arg-type]


def test_a_task_takes_a_table_that_was_made_again_as_it_is(spark: SparkSession, tmp_path: Path) -> None:
    """Python workers outlive a command, on a shared server for hours."""
    uri = str(tmp_path / "table")

    def make() -> None:
        tables.create_table(uri, pa.schema([("n", pa.int64())]), "", [], {"zync:n": 1})

    def version(_: int) -> int | None:
        opened = tables.open_table(uri)
        return None if opened is None else opened.version

    make()
    opened = tables.open_table(uri)
    assert opened is not None
    tables.commit(opened, [], {"zync:n": 2})
    assert run_tasks(spark, 4, version) == [1] * 4
    shutil.rmtree(uri)
    assert run_tasks(spark, 4, version) == [None] * 4
    tables.forget(uri)
    make()
    assert run_tasks(spark, 4, version) == [0] * 4
