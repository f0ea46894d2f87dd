"""Failures of Spark: an error of Spark as one line, and the records on which an expression overflows Java's stack.

Spark's exceptions carry query plans and the stack traces of two languages. ``spark_failures`` raises one line instead.

No expression of Spark can catch an overflow of Java's stack, so that ``etl.failures`` can't find such a record. A regular
expression with a repeated group overflows the stack on a long text. ``overflow_records`` finds the record by Spark jobs over
ever fewer records.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress

from zync_assets.errors import SetupError, SparkLost, ZyncError
from zync_assets.lake import stores
from zync_assets.offsets import OffsetRange


@contextmanager
def spark_failures(make_error: Callable[[str], ZyncError]) -> Generator[None]:
    """Raise ``make_error(what Spark says)`` in place of whatever Spark or the way to its JVM raises.

    A failure that follows from a Ctrl-C is raised as the Ctrl-C.
    """
    try:
        yield
    except (*spark_errors(), ConnectionError) as error:
        if interrupt := interrupt_of(error):
            raise interrupt from None
        text = str(error)
        loss = (
            _jvm_loss(error)
            or _part_loss(text)
            or stores.missing_file(text)
            or stores.disk_refusal("the lake, or Spark's own folder", text)
            or stores.no_answer(text)
        )
        raise (loss or make_error(cause_line(error))) from error


def interrupt_of(error: BaseException | None) -> KeyboardInterrupt | None:
    """The Ctrl-C during whose handling an error was raised."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error


@contextmanager
def ignore_release_errors() -> Generator[None]:
    """Ignore Spark's errors while caches are released. A Spark that has ended holds no cache, and the step has succeeded."""
    with suppress(*spark_errors(), ConnectionError):
        yield


def spark_errors() -> tuple[type[Exception], ...]:
    """The errors that Spark raises."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    return PySparkException, Py4JError


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
        r"stopped SparkContext|SparkContext (was shut down|has been shut ?down)"
    ): "Spark ended during a step. Nothing of this step is visible, and what was committed before is kept: run it again.",
    re.compile(
        r"Python worker exited unexpectedly|Python worker failed to connect back|reading the port number from \S+'s stdout"
    ): "a Spark task failed: its Python worker ended, killed or out of memory. Nothing of this step is visible, and what was"
    " committed before is kept: run it again.",
}
"""Spark's error text for a part of Spark that ended → the text for the user. The parts are a Connect server, Spark's context and
a Python worker. A JVM that ends may still answer that its context has stopped. A worker may end in a task, or with the daemon
that forks the workers."""
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
        return _OWN_CLASS.sub("", lines[-1])  # of a Python worker
    messages = [line for line in lines if not line.startswith(("An error occurred while calling", "at "))]
    if not messages:
        return type(error).__name__
    # Java's chain of causes in one line: the last is the cause.
    return without_advice(messages[0].rsplit("Exception: ", 1)[-1].partition(" Consider setting ")[0])


_OWN_CLASS = re.compile(r"^zync_assets\.errors\.\w+: ")

_ANSI_ADVICE = re.compile(r" *If necessary,? (you can )?set [^\n]*? to bypass this error\.")


def raised_text(error: Exception, mark: str) -> str | None:
    """The text that ``raise_error`` of Spark SQL raised after ``mark``; None if an error does not have the mark."""
    _, separator, text = str(error).partition(mark)
    return text.splitlines()[0].partition(" SQLSTATE:")[0].strip() if separator else None


def short(error: Exception) -> str:
    """The first line of what Spark says, without its plan and its error class's link."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return without_advice(lines[0]) if lines else type(error).__name__


def without_advice(text: str) -> str:
    """Spark's error text without its advice to turn ANSI mode off. Results depend on ANSI mode."""
    return _ANSI_ADVICE.sub("", text)


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
TOO_DEEP = (
    f"an expression over a whole group, a partition-by, or an expression without any record: {TEXT} Nothing was committed."
    " Correct the rule, or divide it among rules."
)
"""The error for an overflow of the stack that is not the fault of one record."""


@contextmanager
def overflow_errors(make_error: Callable[[str], ZyncError]) -> Generator[None]:
    """Raise ``make_error(TOO_DEEP)`` in place of Spark's error for an overflow of the stack."""
    try:
        yield
    except spark_errors() as error:
        if is_overflow(error):
            raise make_error(TOO_DEEP) from error
        raise


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
