"""The world of the benchmarks: their own broker and registry, a warm Spark session of two tasks, and a folder."""

from __future__ import annotations

import sys
from collections.abc import Generator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from zync_assets.lake import storage, tables
from zync_assets.local import services
from zync_assets.pipeline import Pipeline
from zync_assets.spark.session import spark_session
from zync_assets_tests.bench.rounds import Rounds
from zync_assets_tests.mini import make_pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASKS = 2
"""Spark tasks at once, and processes of a reference."""

ZYNC = (sys.executable, "-c", "from zync_assets.cli.main import main; main()")
"""The command line, of this interpreter and this checkout."""


@dataclass(frozen=True)
class World:
    folder: Path
    services: services.Services
    rounds: Rounds
    scale: float
    processes: Executor
    """Warm Python processes for the references."""

    def sized(self, records: int) -> int:
        """That many records, times the scale that was asked for; even over 8 partitions."""
        return max(8, int(records * self.scale) // 8 * 8)

    def pipeline(
        self, name: str, rest: str, spark: str = f'master: "local[{TASKS}]"', lake: str | None = None
    ) -> Pipeline:
        """A pipeline. ``rest``: its inputs, outputs and transforms; ``lake``: as in its file, default in this world's folder."""
        lake = lake or str(self.folder / "lakes" / name)
        return make_pipeline(self.services, self.folder, rest, name=name, lake=lake, spark=f"{{{spark}}}")

    def spark(self, pipeline: Pipeline) -> SparkSession:
        return spark_session(pipeline.spark, pipeline.lake, long=True)

    def empty(self, pipeline: Pipeline, pool: str = "") -> None:
        """Remove a pipeline's lake, or one pool of it."""
        for folder in ("", "~published", "~quarantine"):
            storage.remove_folder(storage.join(pipeline.lake, *filter(None, (folder, pool))))
        tables.forget(pipeline.lake)


@contextmanager
def world(folder: Path, rounds: Rounds, scale: float) -> Generator[World]:
    """Services that keep their topics from one run to the next, stopped at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    running = services.up(folder / "services")
    processes = ProcessPoolExecutor(TASKS, mp_context=get_context("spawn"))
    try:
        yield World(folder, running, rounds, scale, processes)
    finally:
        processes.shutdown(cancel_futures=True)
        services.down(folder / "services")
