"""Spark tasks and their failures: what Spark says, and which records an expression fails on.

Turns an error of Spark into one line. Spark's exceptions carry query plans and the stack traces of two languages.

Records on which an expression overflows Java's stack, as a regular expression with a repeated group does on a long
text.

No expression of Spark can catch this error, so that ``etl.failures`` can't find such a record. Spark jobs over ever
fewer records can.

Python functions as Spark tasks: one task an index, results and errors brought back whole.
"""

from __future__ import annotations

import gc
import pickle
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar
from zipimport import zipimporter

import pyarrow as pa

from zync_assets.errors import SetupError, SparkLost, ZyncError
from zync_assets.lake import stores, tables
from zync_assets.offsets import OffsetRange

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@contextmanager
def spark_failures(make_error: Callable[[str], ZyncError]) -> Generator[None]:
    """Raise ``make_error(what Spark says)`` in place of whatever Spark or the way to its JVM raises."""
    try:
        yield
    except _of_spark() as error:
        text = str(error)
        loss = (
            _jvm_loss(error)
            or _part_loss(text)
            or stores.missing_file(text)
            or stores.disk_refusal("the lake, or Spark's own folder", text)
        )
        raise (loss or make_error(cause_line(error))) from error


@contextmanager
def ignore_release_errors() -> Generator[None]:
    """Ignore Spark's errors while caches are released. A Spark that has ended holds no cache, and the step has succeeded."""
    with suppress(*_of_spark()):
        yield


def _of_spark() -> tuple[type[Exception], ...]:
    """The exceptions of Spark, and of the connection to its JVM."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    return PySparkException, Py4JError, ConnectionError


_OF_DATA = re.compile(r"SQLSTATE: (22|23|P0)")


def is_of_data(error: Exception) -> bool:
    """Whether an expression failed on a record: SQL's classes of data and integrity errors, or ``raise_error``."""
    return _OF_DATA.search(str(error)) is not None


def _jvm_loss(error: Exception) -> ZyncError | None:
    """The error for a JVM of this process's own that ended; None for another exception."""
    from py4j.protocol import Py4JNetworkError

    if not isinstance(error, ConnectionError | Py4JNetworkError):
        return None
    return SetupError(
        "Spark's JVM ended; what it said last is above. Nothing of this step is visible, and what was committed before is kept:"
        " run it again. If it ran out of memory, give it more: spark: {spark.driver.memory: 3g}."
    )


_LOSSES = {
    re.compile(
        r"StatusCode\.UNAVAILABLE|\bStream removed\b|\bRST_STREAM\b"
        r"|\[INVALID_HANDLE\.(SESSION|OPERATION)|\[RETRIES_EXCEEDED\]|NO_ACTIVE_SESSION"
    ): "the Spark Connect server ended, or can't be reached any more. Nothing of this step is visible, and what was"
    " committed before is kept: run it again when the server is up; of `remote: shared` another is started then.",
    re.compile(
        r"Python worker exited unexpectedly|Python worker failed to connect back|reading the port number from \S+'s stdout"
    ): "a Spark task failed: its Python worker ended, killed or out of memory. Nothing of this step is visible, and what was"
    " committed before is kept: run it again.",
}
"""Spark's error text for a part of Spark that ended → the text for the user. The parts: a Connect server; a Python worker
in a task or before the task; the daemon that forks the workers."""

_OUT_OF_MEMORY = (
    "a Spark task failed: Spark's JVM ran out of memory. Nothing of this step is visible, and what was committed before is kept."
    " Give it more and run it again: spark: {spark.driver.memory: 3g}."
)


def _part_loss(text: str) -> ZyncError | None:
    """The error for a part of Spark that ended, or that can't be reached any more; None for another text."""
    if "java.lang.OutOfMemoryError" in text:
        return SetupError(_OUT_OF_MEMORY)
    return next((SparkLost(message) for pattern, message in _LOSSES.items() if pattern.search(text)), None)


def cause_line(error: Exception) -> str:
    """The line of an exception's text that says what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if details := re.search(r'^\s*details = "(.*)"$', str(error), re.MULTILINE):
        return without_advice(details[1])  # of a request to a Spark Connect server
    if any(line.startswith("Traceback (most recent call last)") for line in lines):
        return lines[-1]  # of a Python worker
    messages = [line for line in lines if not line.startswith(("An error occurred while calling", "at "))]
    if not messages:
        return type(error).__name__
    # Java's chain of causes in one line: the last is the cause.
    return without_advice(messages[0].rsplit("Exception: ", 1)[-1].partition(" Consider setting ")[0])


_ANSI_ADVICE = re.compile(r" *If necessary,? (you can )?set [^\n]*? to bypass this error\.")


def raised_text(error: Exception, mark: str) -> str | None:
    """The text that ``raise_error`` of Spark SQL raised after ``mark``; None if an error does not have the mark."""
    _, found, text = str(error).partition(mark)
    return text.splitlines()[0].partition(" SQLSTATE:")[0].strip() if found else None


def short(error: Exception) -> str:
    """The first line of what Spark says, without its plan and its error class's link."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return without_advice(lines[0]) if lines else type(error).__name__


def without_advice(text: str) -> str:
    """Spark's error text without its advice to turn ANSI mode off. Results depend on ANSI mode."""
    return _ANSI_ADVICE.sub("", text)


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
    shuffle. A query over few rows takes longer to plan, and each task longer to begin, than to run."""
    with _with_settings(spark, {"spark.sql.adaptive.enabled": "false", "spark.sql.shuffle.partitions": "1"}):
        yield


@contextmanager
def _with_settings(spark: SparkSession, settings: Mapping[str, str]) -> Generator[None]:
    before = {name: spark.conf.get(name) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, str(value))


def fails(sql: str) -> str:
    """An SQL condition: whether an expression fails. The hash makes Spark compute the whole expression."""
    return f"(try_to_binary(CAST(xxhash64({sql}) AS STRING), 'utf-8') IS NULL)"


MOST = 20
"""Records that one search finds. More are no bad records but a bad expression."""

TEXT = (
    "it needs more stack than Java has. Does a regular expression repeat a group, as (a|b)* does? [ab]* and (a|b)*+ need no"
    " stack for each character."
)
"""The reason that quarantine gives for a record that overflows the stack."""


def is_overflow(error: Exception) -> bool:
    """Whether a Spark task failed since it overflowed Java's stack."""
    text = str(error)
    return "java.lang.StackOverflowError" in text and "stage failure" in text


def overflow_records(part: OffsetRange, overflows: Callable[[OffsetRange], bool]) -> Iterator[OffsetRange]:
    """The records of a part that overflow the stack, a range of one offset each, in order of offsets.

    ``overflows``: whether some record of a part does; it takes a Spark job. Each record takes two jobs for each halving of
    the part at the most.
    """
    if overflows(part):
        yield from _within(part, overflows)


def _within(part: OffsetRange, overflows: Callable[[OffsetRange], bool]) -> Iterator[OffsetRange]:
    """As ``overflow_records``, of a part that is known to hold one."""
    middle = (part.first + part.end) // 2
    if middle == part.first:
        yield part
        return
    low, high = OffsetRange(part.partition, part.first, middle), OffsetRange(part.partition, middle, part.end)
    in_low = overflows(low)
    if in_low:
        yield from _within(low, overflows)
    if not in_low or overflows(high):
        yield from _within(high, overflows)


T = TypeVar("T")

_module_count = 0
"""How many modules this process had when ``tune_worker`` looked last."""


def run_tasks(spark: SparkSession, count: int, work: Callable[[int], T]) -> list[T]:
    """``work(index)`` for each index below ``count``, each in a Spark task of its own; their results, by index.

    Errors are as ``frame_results`` has them.
    """

    def numbered(batches: Iterator[pa.RecordBatch]) -> list[tuple[int, T]]:
        return [(index, work(index)) for batch in batches for index in batch.column(0).to_pylist()]

    if count == 0:
        return []
    parts = frame_results(task_frame(spark, count), numbered, _task_failure)
    return [result for _, result in sorted(chain.from_iterable(parts), key=itemgetter(0))]


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


BATCH_BYTES, _BATCH_RECORDS = (f"spark.sql.execution.arrow.max{what}PerBatch" for what in ("Bytes", "Records"))
_UNMEASURED = 1_000
"""Rows of an Arrow batch that is not measured in bytes."""


@contextmanager
def unmeasured(spark: SparkSession) -> Generator[None]:
    """Limit Arrow's batches by a low number of rows alone.

    With a limit in bytes, Spark would measure the batch after each row. This walk over the columns takes longer than the
    rest of the work on the row.
    """
    before = {name: str(spark.conf.get(name)) for name in (BATCH_BYTES, _BATCH_RECORDS)}
    spark.conf.set(BATCH_BYTES, str(2**31 - 1))
    spark.conf.set(_BATCH_RECORDS, str(min(_UNMEASURED, int(before[_BATCH_RECORDS]))))
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)
