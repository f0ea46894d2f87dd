"""Offset arithmetic: half-open ranges, sets of ranges, partition keys, and ranges shared out to tasks.

Pure, without I/O.

Offsets of a Kafka partition may have gaps (compaction, transaction markers). No function here takes ``end - first`` for
a number of records: a range names offsets, and says nothing about the number of records.

Ranges of offsets shared out among Spark tasks: few tasks, as each costs a start, and such that all end at about one
time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import groupby
from typing import NamedTuple

RANGE_SIZE = 1_000_000
"""Offsets in one partition key of an asset."""

_KEY = re.compile(r"(\d+):(\d+)-(\d+)")


def place_text(topic: str, partition: int, offset: int | None = None) -> str:
    """A partition of a topic, or a record, as messages name it: ``topic orders, partition 0, offset 7``."""
    return f"topic {topic}, partition {partition}" + ("" if offset is None else f", offset {offset}")


class Mark(NamedTuple):
    """A record of a partition: its offset, and a digest of its time, key and value."""

    offset: int
    digest: int


@dataclass(frozen=True, order=True)
class OffsetRange:
    """The offsets ``first <= offset < end`` of one Kafka partition. Sorts by partition and offset, as numbers."""

    partition: int
    first: int
    end: int

    def __post_init__(self) -> None:
        if self.partition < 0 or self.first < 0 or self.end < self.first:
            raise ValueError(f"no offset range: partition {self.partition}, {self.first} to {self.end}")

    @property
    def empty(self) -> bool:
        return self.first == self.end

    def __str__(self) -> str:
        return f"{self.partition}:{self.first}-{self.end - 1}"


def split(whole: OffsetRange, size: int) -> list[OffsetRange]:
    """The range cut into pieces of at most ``size`` offsets, in order."""
    return [
        OffsetRange(whole.partition, first, min(first + size, whole.end))
        for first in range(whole.first, whole.end, size)
    ]


def normalize(ranges: Iterable[OffsetRange]) -> list[OffsetRange]:
    """The same offsets as disjoint, sorted ranges with no two that touch."""
    disjoint: list[OffsetRange] = []
    for item in sorted(ranges):
        if item.empty:
            continue
        if disjoint and disjoint[-1].partition == item.partition and item.first <= disjoint[-1].end:
            disjoint[-1] = OffsetRange(item.partition, disjoint[-1].first, max(disjoint[-1].end, item.end))
        else:
            disjoint.append(item)
    return disjoint


def subtract(whole: Iterable[OffsetRange], parts: Iterable[OffsetRange]) -> list[OffsetRange]:
    """The offsets of ``whole`` that are in none of ``parts``, normalized."""
    cuts = normalize(parts)
    difference: list[OffsetRange] = []
    for item in normalize(whole):
        first = item.first
        for part in cuts:
            if part.partition != item.partition or part.end <= first or part.first >= item.end:
                continue
            if part.first > first:
                difference.append(OffsetRange(item.partition, first, part.first))
            first = part.end
            if first >= item.end:
                break
        if first < item.end:
            difference.append(OffsetRange(item.partition, first, item.end))
    return difference


def intersection(whole: Sequence[OffsetRange], parts: Iterable[OffsetRange]) -> list[OffsetRange]:
    """The offsets of ``whole`` that are in one of ``parts``, normalized."""
    return subtract(whole, subtract(whole, parts))


def offset_count(ranges: Iterable[OffsetRange]) -> int:
    """The number of offsets in some ranges. There may be fewer records."""
    return sum(part.end - part.first for part in ranges)


def format_key(part: OffsetRange) -> str:
    """The partition key of an asset for a range: ``partition:first-last``, last included (``0:0-999999``)."""
    return str(part)


def parse_key(key: str) -> OffsetRange:
    """The range of a partition key; ValueError if it is none."""
    match = _KEY.fullmatch(key)
    if match is None or int(match[3]) < int(match[2]):
        raise ValueError(f"{key!r} is no partition key; one looks like 0:0-999999 (partition:first-last)")
    return OffsetRange(int(match[1]), int(match[2]), int(match[3]) + 1)


def key_of(partition: int, offset: int, size: int = RANGE_SIZE) -> OffsetRange:
    """The fixed range of ``size`` offsets that holds an offset."""
    first = offset - offset % size
    return OffsetRange(partition, first, first + size)


def keys_over(ranges: Iterable[OffsetRange], size: int = RANGE_SIZE) -> list[OffsetRange]:
    """The fixed ranges that share an offset with any of ``ranges``, each once, sorted as numbers."""
    keys: set[OffsetRange] = set()
    for item in ranges:
        start = item.end if item.empty else item.first - item.first % size
        for first in range(start, item.end, size):
            keys.add(OffsetRange(item.partition, first, first + size))
    return sorted(keys)


def new_ranges(since: Mapping[int, int], until: Mapping[int, int]) -> list[OffsetRange]:
    """The ranges between two positions (partition → next offset), without empty ranges."""
    return [
        OffsetRange(partition, since.get(partition, 0), end)
        for partition, end in sorted(until.items())
        if end > since.get(partition, 0)
    ]


LEAST, MOST = 50_000, 2_500_000
"""The least and the most offsets of one task."""

START = 100_000
"""The number of offsets that a task could read in the time of its start. It sets up a consumer and waits for the first records.
It also throws away the records fetched past its end."""

_ROUNDS = 4
"""The most tasks that a slot should run one after another. MOST may ask for more tasks. With further tasks, the slots end at
more equal times, but the starts of the tasks cost more than that."""


def shares(ranges: Sequence[OffsetRange], slots: int) -> list[OffsetRange]:
    """The ranges cut into pieces, the longest first, of which ``slots`` are worked on at one time."""
    total = offset_count(ranges)
    sizes = {min(MOST, max(LEAST, -(-total // (slots * rounds)))) for rounds in range(1, _ROUNDS + 1)}
    divisions = [[piece for part in ranges for piece in _even(part, size)] for size in sorted(sizes, reverse=True)]
    return min(
        (sorted(division, key=_length, reverse=True) for division in divisions),
        key=lambda division: _end(division, slots),
    )


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


def offset_parts(spots: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, list[int]]]:
    """Places (partition, offset) as parts of one partition: the partition, and ``size`` offsets at the most.

    >>> list(offset_parts([(0, 3), (1, 7), (0, 4), (0, 5)], 2))
    [(0, [3, 4]), (0, [5]), (1, [7])]
    """
    for partition, group in groupby(sorted(spots), lambda spot: spot[0]):
        offsets = [offset for _, offset in group]
        yield from ((partition, offsets[at : at + size]) for at in range(0, len(offsets), size))
