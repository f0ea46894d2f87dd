"""Python functions as Spark tasks, one task an index, and the settings of a session for one piece of work.

The results and errors of the tasks come back whole.

A Spark job of a few records costs a tenth of a second, whatever it does. ``side_by_side`` therefore runs the steps of many small
topics at the same time, each in a thread, and the tasks that they ask for meanwhile share a job.
"""

from __future__ import annotations

import gc
import pickle
import re
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from threading import Condition, local
from typing import TYPE_CHECKING, Any, TypeVar
from zipimport import zipimporter

import pyarrow as pa

from zync_assets.errors import SetupError, SparkLost, ZyncError
from zync_assets.lake import tables
from zync_assets.spark.failures import spark_failures

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


SETTINGS: Mapping[str, str] = {
    "spark.sql.subexpressionElimination.enabled": "false",
    "spark.sql.legacy.allowHashOnMapType": "true",
}


@contextmanager
def search_settings(spark: SparkSession) -> Generator[None]:
    """The session with SETTINGS."""
    with _with_settings(spark, SETTINGS):
        yield


@contextmanager
def planned_once(spark: SparkSession) -> Generator[None]:
    """The session without adaptive execution, which plans a query again after each of its stages, and with one task after each
    shuffle. A query over few rows takes longer to plan, and each task longer to begin, than to run. No side of a join is
    broadcast, which would be a job of its own."""
    settings = {
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.autoBroadcastJoinThreshold": "-1",
    }
    with _with_settings(spark, settings):
        yield


@contextmanager
def sorted_groups(spark: SparkSession) -> Generator[None]:
    """The session that aggregates rows in their order, where a join has sorted them: Spark would fill a table of groups, and sort
    the rows again when there are many. Spark broadcasts no side of a join by itself: it would by the size of compressed files."""
    # Not `replaceHashWithSortAgg`, which forgets the FILTER of an aggregate.
    settings = {"spark.sql.execution.useObjectHashAggregateExec": "false", "spark.sql.autoBroadcastJoinThreshold": "-1"}
    with _with_settings(spark, settings):
        yield


@contextmanager
def guarded_elements(spark: SparkSession, expressions: str) -> Generator[None]:
    """The session that computes ``items[0].sku`` only where the surrounding CASE asks for the field.

    ``expressions``: the text of all expressions.

    Spark's rule NestedColumnAliasing (4.1.4) computes the field of an element below a join, for every row of a side, and fails
    for an index that is out of bounds. Without the rule, Spark reads whole structs: it is off for such expressions alone.
    """
    if not _ELEMENT.search(expressions):
        yield
        return
    with _with_settings(spark, {"spark.sql.optimizer.nestedSchemaPruning.enabled": "false"}):
        yield


_ELEMENT = re.compile(r"\]\s*\.")


@contextmanager
def _with_settings(spark: SparkSession, settings: Mapping[str, str]) -> Generator[None]:
    previous_values = {name: spark.conf.get(name) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, value in previous_values.items():
            spark.conf.set(name, str(value))


T = TypeVar("T")


_module_count = 0
"""How many modules this process had when ``tune_worker`` looked last."""


def run_tasks(spark: SparkSession, count: int, work: Callable[[int], T]) -> list[T]:
    """``work(index)`` for each index below ``count``, each in a Spark task of its own; their results, by index.

    Errors are as ``frame_results`` has them. Within ``side_by_side`` the tasks share a Spark job, and several may share a task.
    """
    shared_jobs: _SharedJobs | None = getattr(_thread, "jobs", None)
    if shared_jobs is not None and count:
        return shared_jobs.results(count, work)

    def numbered_results(batches: Iterator[pa.RecordBatch]) -> list[tuple[int, T]]:
        return [(index, work(index)) for batch in batches for index in batch.column(0).to_pylist()]

    if count == 0:
        return []
    parts = frame_results(task_frame(spark, count), numbered_results, _task_failure)
    return [result for _, result in sorted(chain.from_iterable(parts), key=itemgetter(0))]


MANY = 4
"""If at least this many topics are small, a step works on them side by side. With fewer topics, a Spark job for each costs
little."""
SMALL_OFFSETS = 20_000
"""The most new offsets of a small topic."""
THREADS = 64
"""Works that ``side_by_side`` has under way at once. Most of them wait for the same Spark job."""
_TASK_THREADS, _TASK_OFFSETS = 32, 8 * SMALL_OFFSETS
"""Works of one Spark task at a time, and their offsets, whose records a task holds in memory. A small work waits for the broker
most of the time."""
_GATHERING_SECONDS = 0.1
"""How long a work waits at the most for others to join its Spark job, while no other job runs."""
_thread = local()
"""``jobs``: the shared jobs of the thread's work."""


def side_by_side(
    spark: SparkSession, works: Sequence[Callable[[], T]], offsets: int = SMALL_OFFSETS
) -> Iterator[Future[T]]:
    """Run ``works`` at the same time, each in a thread. Yields the future of each work in their order, once the work has ended.

    ``offsets``: the most new offsets of a work. The less they are, the more works a Spark task does at a time.

    Their calls of ``run_tasks`` share Spark jobs, which the calling thread runs. A whole job fails if, for example, its worker
    process ends. Each work with tasks in the job then raises SparkLost: the work may succeed when it runs alone. If the caller
    stops or is interrupted, works that wait for tasks end. The function waits for each other work up to its next ``run_tasks``.
    """
    shared_jobs = _SharedJobs(len(works))
    together = min(_TASK_THREADS, max(1, _TASK_OFFSETS // max(1, offsets)))

    def run(work: Callable[[], T]) -> T:
        _thread.jobs = shared_jobs
        try:
            return work()
        finally:
            _thread.jobs = None

    with ThreadPoolExecutor(THREADS) as threads:
        try:
            futures = [threads.submit(run, work) for work in works]
            for future in futures:
                future.add_done_callback(shared_jobs.leave)
            tasks = slots(spark)
            for future in futures:
                while not future.done():
                    if requests := shared_jobs.take(future):
                        _run_shared(spark, tasks, together, requests)
                yield future
        finally:
            shared_jobs.stop()
            threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class _Request:
    """A call of ``run_tasks`` that waits for a shared job."""

    count: int
    work: Callable[[int], Any]
    results: Future[list[Any]] = field(default_factory=Future)


class _SharedJobs:
    """The calls of ``run_tasks`` that wait for their Spark job, for one ``side_by_side``."""

    def __init__(self, works: int) -> None:
        self._changed = Condition()
        self._requests: list[_Request] = []
        self._works = works
        self._is_stopped = False

    def results(self, count: int, work: Callable[[int], T]) -> list[T]:
        """Called by a work: the results of its tasks. CancelledError where the caller has stopped."""
        request = _Request(count, work)
        with self._changed:
            if self._is_stopped:
                raise CancelledError
            self._requests.append(request)
            self._changed.notify_all()
        return request.results.result()

    def leave(self, _: Future[Any]) -> None:
        """A work has ended."""
        with self._changed:
            self._works -= 1
            self._changed.notify_all()

    def take(self, future: Future[Any]) -> list[_Request]:
        """The requests of the next job, once all works under way wait for it, or the first has waited long enough. There
        may be none once ``future`` has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._requests or future.done())
            until = time.monotonic() + _GATHERING_SECONDS
            while len(self._requests) < min(self._works, THREADS) and (seconds_left := until - time.monotonic()) > 0:
                self._changed.wait(seconds_left)
            requests, self._requests = self._requests, []
            return requests

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            for request in self._requests:
                request.results.set_exception(CancelledError())
            self._requests = []


def _run_shared(spark: SparkSession, tasks: int, together: int, requests: Sequence[_Request]) -> None:
    """Run the tasks of some requests in one Spark job of ``tasks`` tasks at the most, and answer the requests. ``together``: the
    works that a Spark task does at a time."""
    works = [request.work for request in requests]
    request_tasks = [(at, index) for at, request in enumerate(requests) for index in range(request.count)]
    count = min(tasks, len(request_tasks))

    def several(batches: Iterator[pa.RecordBatch]) -> list[tuple[int, object]]:
        positions = [
            at
            for batch in batches
            for task in batch.column(0).to_pylist()
            for at in range(task, len(request_tasks), count)
        ]
        with ThreadPoolExecutor(together) as threads:
            return list(
                zip(
                    positions,
                    threads.map(lambda at: _outcome(works[request_tasks[at][0]], request_tasks[at][1]), positions),
                    strict=True,
                )
            )

    try:
        result_by_position = dict(chain.from_iterable(frame_results(task_frame(spark, count), several, _task_failure)))
    except BaseException as error:
        loss = SparkLost(str(error)) if len(requests) > 1 and not isinstance(error, SetupError) else error
        for request in requests:
            request.results.set_exception(loss if isinstance(error, ZyncError) else CancelledError())
        if not isinstance(error, ZyncError):
            raise
        return
    for at, request in enumerate(requests):
        results = [result_by_position[number] for number, (owner, _) in enumerate(request_tasks) if owner == at]
        errors = [result for result in results if isinstance(result, ZyncError)]
        if errors:
            request.results.set_exception(errors[0])
        else:
            request.results.set_result(results)


def _outcome(work: Callable[[int], object], index: int) -> object:
    """The result of a work, or its error. An error of one work never fails the other works of the Spark task."""
    try:
        return work(index)
    except ZyncError as error:
        return error
    except Exception as error:
        return _task_failure(f"{type(error).__name__}: {error}")


def frame_results(
    frame: DataFrame,
    work: Callable[[Iterator[pa.RecordBatch]], T],
    make_error: Callable[[str], ZyncError],
    last: type[ZyncError] | None = None,
) -> list[T]:
    """``work(batches)`` for each partition of a frame, each in a Spark task of its own; their results. No batch is empty.

    A ZyncError that a task raises is raised here, as it was: Spark would bury it in its own stack trace. All tasks run
    to their end first, so that none is still at work when this returns. ``make_error(what Spark says)`` is raised if a task
    fails in any other way. ``last``: an error that is raised only if no task has another one.
    """

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        tune_worker()
        tables.forget_versions()
        try:
            result: object = work(batch for batch in batches if batch.num_rows)
        except ZyncError as error:
            result = error
        yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps(result)])], names=["found"])

    with spark_failures(make_error):
        rows = frame.mapInArrow(run, "found binary").collect()
    results = [pickle.loads(bytes(row["found"])) for row in rows]
    errors = [result for result in results if isinstance(result, ZyncError)]
    for error in sorted(errors, key=lambda error: last is not None and isinstance(error, last)):
        raise error
    return results


def _task_failure(text: str) -> ZyncError:
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
    with spark_failures(_task_failure):
        if context is not None:
            return context.defaultParallelism
        # A Connect server tells by the partitions that it cuts a range into.
        return len({row[0] for row in spark.range(256).select(spark_partition_id()).collect()})


def indexes(batches: Iterable[pa.RecordBatch]) -> Iterator[int]:
    """The ids of a ``task_frame`` within one task."""
    tune_worker()
    tables.forget_versions()
    for batch in batches:
        yield from batch.column(0).to_pylist()


def tune_worker() -> None:
    """Make the work of Spark's worker process between two tasks cheap. Otherwise it takes 0.1 s of CPU time."""
    global _module_count
    # The worker invalidates the caches of importers. The importers of Spark's zip files would read the contents again at
    # once. Python creates a missing importer on demand, from contents that it has read before.
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimporter):
            del sys.path_importer_cache[path]
    # The worker runs the garbage collector over every object. Frozen objects, those of modules, are skipped.
    if len(sys.modules) != _module_count:
        _module_count = len(sys.modules)
        gc.freeze()


BATCH_BYTES, _BATCH_RECORDS = (f"spark.sql.execution.arrow.max{unit}PerBatch" for unit in ("Bytes", "Records"))
MEASURED = 1_000
"""Mean bytes of a record in its file from which on rows are measured on their way to Python."""
_UNMEASURED = 1_000
"""Rows of an Arrow batch that is not measured in bytes."""


@contextmanager
def unmeasured(spark: SparkSession) -> Generator[None]:
    """Limit Arrow's batches by a low number of rows alone.

    With a limit in bytes, Spark would measure the batch after each row. This walk over the columns takes longer than the
    rest of the work on the row.
    """
    previous_values = {name: str(spark.conf.get(name)) for name in (BATCH_BYTES, _BATCH_RECORDS)}
    spark.conf.set(BATCH_BYTES, str(2**31 - 1))
    spark.conf.set(_BATCH_RECORDS, str(min(_UNMEASURED, int(previous_values[_BATCH_RECORDS]))))
    try:
        yield
    finally:
        for name, value in previous_values.items():
            spark.conf.set(name, value)
