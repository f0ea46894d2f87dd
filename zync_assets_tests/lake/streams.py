"""Streams of records with given orders, without files, and readings of their ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zync_assets.lake.log import Order
from zync_assets.lake.readings import Reading, TopicEnds
from zync_assets.lake.sequence import File, Orders, Stream


@dataclass(frozen=True)
class RawFile:
    first: int
    last: int
    orders: tuple[Order, ...]
    commit_time: int | None = None

    @property
    def records(self) -> int:
        return len(self.orders)

    @property
    def min_order(self) -> Order:
        return min(high for high, _ in self.orders), min(low for _, low in self.orders)

    @property
    def max_order(self) -> Order:
        return max(high for high, _ in self.orders), max(low for _, low in self.orders)


def orders(stream: Stream, item: File) -> Orders:
    assert isinstance(item, RawFile)
    offsets = np.arange(item.first, item.last + 1)
    return Orders(offsets, *(np.array([order[part] for order in item.orders]) for part in (0, 1)))


def whole(name: str, place: int, found: Sequence[Order], seen: int = 0) -> Stream:
    """A stream with one file."""
    files = [RawFile(0, len(found) - 1, tuple(found))] if found else []
    return Stream(name, 0, place, seen, len(found), files, found[-1] if found else None)


def reading(began: float, ended: float, **ends: int) -> Reading:
    return Reading(began, ended, {name: TopicEnds("id", {0: end}) for name, end in ends.items()})
