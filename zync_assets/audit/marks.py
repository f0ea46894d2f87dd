"""A set of offsets per topic and partition, a byte an offset in chunks that are made as they are touched."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zync_assets.audit.columns import distinct

CHUNK = 1_000_000
"""Offsets in a chunk."""


class Marks:
    """A set of marked offsets, and the offsets that were marked twice."""

    def __init__(self) -> None:
        self.doubled: list[tuple[str, int, int]] = []
        """(topic, partition, offset) of offsets that were marked again."""
        self.count = 0
        """Marks that were set, without doubles."""
        self._chunks: dict[tuple[str, int], dict[int, np.ndarray]] = {}

    def add(self, topic: str, partition: int, offsets: np.ndarray) -> None:
        unique, times = np.unique(offsets, return_counts=True)
        self._note(topic, partition, unique[times > 1])
        chunks = self._chunks.setdefault((topic, partition), {})
        for number in distinct(unique // CHUNK).tolist():
            chunk = chunks.setdefault(number, np.zeros(CHUNK, dtype=bool))
            places = unique[unique // CHUNK == number] - number * CHUNK
            again = chunk[places]
            self._note(topic, partition, places[again] + number * CHUNK)
            chunk[places] = True
            self.count += int((~again).sum())

    def between(self, topic: str, partition: int, first: int, end: int) -> np.ndarray:
        """The marked offsets with ``first <= offset < end``, sorted."""
        found = [np.empty(0, np.int64)]
        for number, chunk in sorted(self._chunks.get((topic, partition), {}).items()):
            base = number * CHUNK
            if base < end and first < base + CHUNK:
                found.append(np.flatnonzero(chunk) + base)
        every = np.concatenate(found)
        return every[(every >= first) & (every < end)]

    def places(self) -> Iterator[tuple[str, int]]:
        yield from sorted(self._chunks)

    def chunks(self, topic: str, partition: int) -> list[tuple[int, int]]:
        """The spans of offsets that hold a mark."""
        return [(number * CHUNK, (number + 1) * CHUNK) for number in sorted(self._chunks.get((topic, partition), {}))]

    def _note(self, topic: str, partition: int, offsets: np.ndarray) -> None:
        # A few are enough to say where; all of them could be as many as there are records.
        room = max(0, 100 - len(self.doubled))
        self.doubled += [(topic, partition, offset) for offset in offsets[:room].tolist()]
