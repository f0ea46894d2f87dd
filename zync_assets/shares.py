"""Ranges of offsets shared out among Spark tasks: few tasks, as each costs a start, and such that all end at about one time."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace

from zync_assets.offsets import OffsetRange, split

LEAST, MOST = 50_000, 2_500_000
"""Offsets in one task."""

START = 100_000
"""Offsets that a task would have read while it starts: a consumer is set up and waits for its first records, and what it has
fetched past the end is thrown away."""

_ROUNDS = 4
"""In as many rounds of tasks all is done at the most, but for MOST: more would cost more than they even out."""


def shares(ranges: Sequence[OffsetRange], slots: int) -> list[OffsetRange]:
    """The ranges cut into pieces, the longest first, of which ``slots`` are worked on at one time."""
    total = sum(map(_length, ranges))
    sizes = {min(MOST, max(LEAST, -(-total // (slots * rounds)))) for rounds in range(1, _ROUNDS + 1)}
    cuts = [[piece for part in ranges for piece in _even(part, size)] for size in sorted(sizes, reverse=True)]
    return min((sorted(cut, key=_length, reverse=True) for cut in cuts), key=lambda cut: _end(cut, slots))


def _even(part: OffsetRange, size: int) -> list[OffsetRange]:
    count = -(-_length(part) // size)
    return split(part, -(-_length(part) // count)) if count else []


def _end(pieces: Sequence[OffsetRange], slots: int) -> int:
    """When all is done, in offsets, if each slot takes the next piece as soon as it has done one."""
    busy = [0] * slots
    for piece in pieces:
        heapreplace(busy, busy[0] + START + _length(piece))
    return max(busy)


def _length(part: OffsetRange) -> int:
    return part.end - part.first
