"""Python functions as Spark tasks: one task an index, results and errors brought back whole."""

from __future__ import annotations

import gc
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar
from zipimport import zipimporter

import pyarrow as pa

from zync_assets.errors import ZyncError
from zync_assets.lake import tables
from zync_assets.steps.failures import spark_failures

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")

_modules_seen = 0
"""How many modules this process had when ``settle`` looked last."""


def run_tasks(spark: SparkSession, count: int, work: Callable[[int], T]) -> list[T]:
    """``work(index)`` for each index below ``count``, each in a Spark task of its own; their results, by index.

    A ZyncError that a task raises is raised here, as it was: Spark would bury it in its own stack trace. All tasks run
    to their end first, so that none is still at work when this returns. ZyncError too if a task fails in any other way.
    """

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for index in indexes(batches):
            try:
                found: object = work(index)
            except ZyncError as error:
                found = error
            yield pa.RecordBatch.from_arrays(
                [pa.array([index]), pa.array([pickle.dumps(found)])], names=["task", "found"]
            )

    if count == 0:
        return []
    with spark_failures(_failed):
        rows = task_frame(spark, count).mapInArrow(run, "task long, found binary").collect()
    results = [pickle.loads(bytes(row["found"])) for row in sorted(rows, key=lambda row: row["task"])]
    for found in results:
        if isinstance(found, ZyncError):
            raise found
    return results


def _failed(text: str) -> ZyncError:
    return ZyncError(
        f"a Spark task failed: {text.rstrip('.')}. What was committed before is kept: correct the cause and run it again."
    )


def task_frame(spark: SparkSession, count: int) -> DataFrame:
    """A frame of ``count`` rows (column ``id``, from 0), a Spark partition each."""
    return spark.range(0, count, 1, max(1, count))


def slots(spark: SparkSession) -> int:
    """How many tasks Spark runs at one time, as far as it says; over Spark Connect no more than 256."""
    from pyspark.sql.functions import spark_partition_id

    # A session on a Connect server has none.
    context = getattr(spark, "sparkContext", None)
    with spark_failures(_failed):
        if context is not None:
            return context.defaultParallelism
        # A Connect server tells by the partitions that it cuts a range into.
        return len({row[0] for row in spark.range(256).select(spark_partition_id()).collect()})


def indexes(batches: Iterable[pa.RecordBatch]) -> Iterator[int]:
    """The ids of a ``task_frame`` within one task."""
    settle()
    tables.expect_nothing()
    for batch in batches:
        yield from batch.column(0).to_pylist()


def settle() -> None:
    """Make the work of Spark's worker process between two tasks cheap. Otherwise it takes 0.1 s of CPU time."""
    global _modules_seen
    # The worker invalidates the caches of importers. The importers of Spark's zip files would read the contents again at
    # once. Python creates a missing importer on demand, from contents that it has read before.
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimporter):
            del sys.path_importer_cache[path]
    # The worker runs the garbage collector over every object. Frozen objects, those of modules, are skipped.
    if len(sys.modules) != _modules_seen:
        _modules_seen = len(sys.modules)
        gc.freeze()
