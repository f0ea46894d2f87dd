"""How much of a backlog one ETL batch takes: so many records, and those that came first in time.

Outputs are numbered batch by batch, so a batch that took one topic's last week and another's last hour would number what
happened an hour ago before what happened a week ago. Raw files know the times that they lie between; a batch takes whole
files, in the order of the highest time that their partition has reached by then, so that it takes a partition's first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from zync_assets.offsets import OffsetRange

BATCH_RECORDS = 2_000_000
"""Raw records of a batch, about: a batch ends with the file that reaches it."""


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
    def max_time(self) -> int | None: ...


def first_batch(
    ranges: Mapping[str, Sequence[OffsetRange]], files: Mapping[str, Iterable[Span]], limit: int
) -> dict[str, tuple[OffsetRange, ...]]:
    """As much of the new ``ranges`` (topic → one range a partition) as holds about ``limit`` records.

    ``files``: topic → the files that hold records of its ranges; none overlaps another. Ranges that no file is in hold
    no records and are taken whole, as is a range whose files are all taken.
    """
    queue: list[tuple[int, str, int, int, int]] = []
    for topic, spans in files.items():
        reached: dict[int, int] = {}
        for item in sorted(spans, key=lambda span: (span.partition or 0, span.first or 0)):
            partition = item.partition or 0
            reached[partition] = max(reached.get(partition, 0), item.max_time or 0)
            queue.append((reached[partition], topic, partition, (item.last or 0) + 1, item.records))
    total = 0
    taken: dict[tuple[str, int], int] = {}
    left: set[tuple[str, int]] = set()
    for _, topic, partition, end, records in sorted(queue):
        if total < limit:
            taken[topic, partition] = end
        else:
            left.add((topic, partition))
        total += records
    return {
        topic: tuple(cut for part in parts if not (cut := _cut(topic, part, taken, left)).empty)
        for topic, parts in ranges.items()
    }


def _cut(
    topic: str, part: OffsetRange, taken: Mapping[tuple[str, int], int], left: set[tuple[str, int]]
) -> OffsetRange:
    if (topic, part.partition) not in left:
        return part
    end = min(part.end, taken.get((topic, part.partition), part.first))
    return OffsetRange(part.partition, part.first, end)
