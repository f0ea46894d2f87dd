"""Spark tasks: how many there may be at one time, that a worker process knows nothing of the command before, and that the tasks
of many works share a job."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from zync_assets.errors import SparkLost, ZyncError
from zync_assets.lake import tables
from zync_assets.spark import tasks
from zync_assets.spark.tasks import run_tasks, side_by_side, slots

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


def tens(spark: SparkSession, number: int) -> list[int]:
    return run_tasks(spark, number % 3, lambda index: 10 * number + index)


def test_works_side_by_side_share_a_job(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[int] = []
    run = tasks.frame_results
    monkeypatch.setattr(tasks, "frame_results", lambda *args: jobs.append(1) or run(*args))
    found = [future.result() for future in side_by_side(spark, [partial(tens, spark, number) for number in range(12)])]
    assert found == [[10 * number + index for index in range(number % 3)] for number in range(12)]
    # Eight works have tasks. How many share a job depends on the machine's load.
    assert len(jobs) < 8


def busy_threads(spark: SparkSession) -> int:
    def task(index: int) -> int:
        # As a work waits for a broker.
        time.sleep(0.3)
        return threading.active_count()

    return max(run_tasks(spark, 1, task))


@pytest.mark.parametrize(("offsets", "most"), [(tasks.SMALL_OFFSETS, 9), (1000, 33)])
def test_the_smaller_the_works_the_more_a_task_does_at_a_time(spark: SparkSession, offsets: int, most: int) -> None:
    works = [partial(busy_threads, spark)] * 60
    found = max(future.result() for future in side_by_side(spark, works, offsets))
    # The threads of the works, and the worker's own.
    assert most // 2 < found <= most


def test_the_error_of_a_work_is_its_own(spark: SparkSession) -> None:
    def work(number: int) -> list[int]:
        def task(index: int) -> int:
            if number == 1:
                raise ZyncError("work 1 has no luck")
            return index // (number - 2)

        return run_tasks(spark, 2, task)

    found = list(side_by_side(spark, [partial(work, number) for number in range(4)]))
    assert [found[number].result() for number in (0, 3)] == [[0, -1], [0, 1]]
    assert str(found[1].exception()) == "work 1 has no luck"
    assert "ZeroDivisionError" in str(found[2].exception())


def test_a_worker_that_ends_fails_each_work_of_its_job(spark: SparkSession) -> None:
    def work(number: int) -> list[int]:
        return run_tasks(spark, 1, lambda index: os.kill(os.getpid(), signal.SIGKILL) if number else index)

    found = list(side_by_side(spark, [partial(work, number) for number in range(2)]))
    assert [type(future.exception()) for future in found] == [SparkLost, SparkLost]
    assert run_tasks(spark, 1, lambda index: index) == [0]


def test_a_caller_that_stops_ends_what_waits(spark: SparkSession) -> None:
    ends: list[str] = []

    def work(number: int) -> None:
        try:
            for _ in range(number + 1):
                run_tasks(spark, 1, lambda index: index)
            ends.append("done")
        except CancelledError:
            ends.append("stopped")
            raise

    running = side_by_side(spark, [partial(work, number) for number in (0, 500)])
    next(running).result()
    running.close()  # type: ignore[attr-defined]
    assert ends == ["done", "stopped"]
