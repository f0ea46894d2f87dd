"""Turns an error of Spark into one line. Spark's exceptions carry query plans and the stack traces of two languages."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from zync_assets.errors import SetupError, SparkLost, ZyncError
from zync_assets.etl.shapes import without_advice
from zync_assets.lake import refusals


@contextmanager
def spark_failures(raised: Callable[[str], ZyncError]) -> Generator[None]:
    """Raise ``raised(what Spark says)`` in place of whatever Spark or the way to its JVM raises."""
    try:
        yield
    except _of_spark() as error:
        text = str(error)
        known = (
            _jvm_gone(error)
            or _part_gone(text)
            or refusals.missing_file(text)
            or refusals.disk_refusal("the lake, or Spark's own folder", text)
        )
        raise (known or raised(said(error))) from error


@contextmanager
def released() -> Generator[None]:
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


def _jvm_gone(error: Exception) -> ZyncError | None:
    """The error for a JVM of this process's own that ended; None for another exception."""
    from py4j.protocol import Py4JNetworkError

    if not isinstance(error, ConnectionError | Py4JNetworkError):
        return None
    return SetupError(
        "Spark's JVM ended; what it said last is above. Nothing of this step is visible, and what was committed before is kept:"
        " run it again. If it ran out of memory, give it more: spark: {spark.driver.memory: 3g}."
    )


_GONE = {
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


def _part_gone(text: str) -> ZyncError | None:
    """The error for a part of Spark that ended, or that can't be reached any more; None for another text."""
    if "java.lang.OutOfMemoryError" in text:
        return SetupError(_OUT_OF_MEMORY)
    return next((SparkLost(ours) for pattern, ours in _GONE.items() if pattern.search(text)), None)


def said(error: Exception) -> str:
    """The line of an exception's text that says what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if details := re.search(r'^\s*details = "(.*)"$', str(error), re.MULTILINE):
        return without_advice(details[1])  # of a request to a Spark Connect server
    if any(line.startswith("Traceback (most recent call last)") for line in lines):
        return lines[-1]  # of a Python worker
    told = [line for line in lines if not line.startswith(("An error occurred while calling", "at "))]
    if not told:
        return type(error).__name__
    # Java's chain of causes in one line: the last is the cause.
    return without_advice(told[0].rsplit("Exception: ", 1)[-1].partition(" Consider setting ")[0])
