"""A stream of batches as windows: pieces of bounded size, the next one made while the last one is worked on."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pyarrow as pa

T = TypeVar("T")


def windows(batches: Iterable[pa.RecordBatch], records: int, size: int) -> Iterator[list[pa.RecordBatch]]:
    """``batches`` in lists of ``records`` records, fewer where they have ``size`` bytes before that, and at the end."""
    window: list[pa.RecordBatch] = []
    left, room = records, size
    for batch in batches:
        at = 0
        while at < len(batch):
            piece = batch.slice(at, left)
            at += len(piece)
            window.append(piece)
            left, room = left - len(piece), room - piece.nbytes
            if left == 0 or room <= 0:
                yield window
                window, left, room = [], records, size
    if window:
        yield window


@contextmanager
def ahead(items: Iterator[T]) -> Generator[Iterator[T]]:
    """``with ahead(items) as same``: the first item is made at once by a thread, each other one while the one before it is
    used, and none earlier."""
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, items, None)

        def same() -> Iterator[T]:
            upcoming = first
            while (item := upcoming.result()) is not None:
                upcoming = pool.submit(next, items, None)
                yield item

        yield same()
