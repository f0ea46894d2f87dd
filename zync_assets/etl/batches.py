"""Chooses the part of a backlog for one ETL batch: the oldest records in time, up to a limit.

Outputs are numbered batch by batch. A batch of one topic's last week and another topic's last hour would number a recent
event before an event of last week. The log knows the lowest and highest time of each raw file. A batch takes whole files, in
the order of the highest time that their partition has reached so far. This order keeps the files of a partition in sequence.

The batch ends within the second half of its limit, at the cut that leaves the fewest records of the same times in other
files. The counterparts of such records would be pending until the next batch, and a pending record costs several times as
much as a new record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from zync_assets.offsets import OffsetRange

BATCH_RECORDS = 5_000_000
"""Raw records of a batch, about: a batch ends with the file that reaches it, if not before."""


class Span(Protocol):
    """A raw file: records of one partition, their offsets and times (milliseconds)."""

    @property
    def partition(self) -> int | None: ...
    @property
    def first(self) -> int | None: ...
    @property
    def last(self) -> int | None: ...
    @property
    def records(self) -> int: ...
    @property
    def min_time(self) -> int | None: ...
    @property
    def max_time(self) -> int | None: ...


class _Next(NamedTuple):
    """A file in the order in which files are taken. ``since``: the time from which on its records are."""

    reached: int
    topic: str
    partition: int
    end: int
    since: int
    records: int


def first_batch(
    ranges: Mapping[str, Sequence[OffsetRange]], files: Mapping[str, Iterable[Span]], limit: int
) -> dict[str, tuple[OffsetRange, ...]]:
    """As much of the new ``ranges`` (topic → one range a partition) as holds about ``limit`` records.

    ``files``: topic → the files that hold records of its ranges; none overlaps another. Ranges that no file is in hold
    no records and are taken whole, as is a range whose files are all taken.
    """
    queue: list[_Next] = []
    for topic, spans in files.items():
        reached: dict[int, int] = {}
        for item in sorted(spans, key=lambda span: (span.partition or 0, span.first or 0)):
            partition = item.partition or 0
            before = reached.get(partition, 0)
            reached[partition] = max(before, item.max_time or 0)
            since = max(before, item.min_time or 0)
            queue.append(_Next(reached[partition], topic, partition, (item.last or 0) + 1, since, item.records))
    queue.sort()
    count = _even_cut(queue, limit)
    taken = {(item.topic, item.partition): item.end for item in queue[:count]}
    left = {(item.topic, item.partition) for item in queue[count:]}
    return {
        topic: tuple(cut for part in parts if not (cut := _cut(topic, part, taken, left)).empty)
        for topic, parts in ranges.items()
    }


def _even_cut(queue: Sequence[_Next], limit: int) -> int:
    """How many files to take: all, if they have fewer records than the limit."""
    records = np.array([item.records for item in queue], dtype=np.int64)
    totals = np.cumsum(records)
    most = int(np.searchsorted(totals, limit)) + 1
    if most >= len(queue):
        return len(queue)
    since, reached = (np.array([getattr(item, name) for item in queue], float) for name in ("since", "reached"))

    def left_behind(count: int) -> float:
        """Records of the files that are not taken whose times are not past those taken, if spread evenly."""
        time = reached[count - 1]
        share = np.clip((time - since[count:]) / np.maximum(1, reached[count:] - since[count:]), 0, 1)
        return float(np.sum(np.where(reached[count:] <= time, 1, share) * records[count:]))

    least = int(np.searchsorted(totals, limit / 2)) + 1
    return min(range(most, least - 1, -1), key=left_behind)


def _cut(
    topic: str, part: OffsetRange, taken: Mapping[tuple[str, int], int], left: set[tuple[str, int]]
) -> OffsetRange:
    if (topic, part.partition) not in left:
        return part
    end = min(part.end, taken.get((topic, part.partition), part.first))
    return OffsetRange(part.partition, part.first, end)
