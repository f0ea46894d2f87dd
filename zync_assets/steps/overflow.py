"""Records on which an expression overflows Java's stack, as a regular expression with a repeated group does on a long text.

No expression of Spark can catch this error, so that ``etl.failing`` can't find such a record. Spark jobs over ever fewer
records can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from zync_assets.offsets import OffsetRange

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


def culprits(part: OffsetRange, overflows: Callable[[OffsetRange], bool]) -> Iterator[OffsetRange]:
    """The records of a part that overflow the stack, a range of one offset each, in order of offsets.

    ``overflows``: whether some record of a part does; it takes a Spark job. Each record takes two jobs for each halving of
    the part at the most.
    """
    if overflows(part):
        yield from _within(part, overflows)


def _within(part: OffsetRange, overflows: Callable[[OffsetRange], bool]) -> Iterator[OffsetRange]:
    """As ``culprits``, of a part that is known to hold one."""
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
