"""Writes to several partitions of a topic at the same time, with a writer for each partition (``writer.InOrder``).

Most of the time a writer waits for the broker. The writers therefore work in a thread each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self

import pyarrow as pa

from zync_assets.kafka.topics import high_watermarks, max_message_bytes
from zync_assets.kafka.writer import InOrder
from zync_assets.offsets import OffsetRange

Windows = Mapping[int, Sequence[pa.RecordBatch]]
"""Partition → the next records to write."""


class Writers:
    """``with Writers(…) as writers``: writes to the partitions of ``parts``, from the first offset of each part on.

    When the block ends, the replicas in sync have acknowledged every record at its own offset. When the block raises, the
    written records of each partition are a prefix. The errors are those of ``InOrder``.
    """

    def __init__(self, kafka: Mapping[str, str], topic: str, parts: Sequence[OffsetRange], rebuild: str) -> None:
        """``rebuild``: the command that publishes the topic again. Errors quote the command."""
        self._kafka, self._topic, self._parts, self._rebuild = kafka, topic, parts, rebuild
        self._writers: dict[int, InOrder] = {}
        self._threads = ThreadPoolExecutor(len(parts))
        self._has_begun = False

    def __enter__(self) -> Self:
        limit = max_message_bytes(self._kafka, self._topic)
        try:
            for part in self._parts:
                place = part.partition, part.first
                self._writers[part.partition] = InOrder(self._kafka, self._topic, *place, self._rebuild, limit)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # Together, since the end of a producer takes as long as the end of its threads.
            self._run(lambda partition: self._writers[partition].__exit__(kind, error, trace), self._writers)
        finally:
            self._threads.shutdown()

    def check_sizes(self, windows: Windows) -> None:
        """RecordTooLarge if any of the records that are to be written next is larger than the topic takes."""
        for partition, window in windows.items():
            self._writers[partition].check_sizes(window)

    def marks(self, windows: Windows) -> dict[int, tuple[int, int]]:
        """Partition → the offset after the window that is to be written next, and the offset below which each record is at its
        own offset."""
        return {
            partition: (self._writers[partition].sent + sum(map(len, window)), self._writers[partition].verified)
            for partition, window in windows.items()
        }

    def write(self, windows: Windows) -> None:
        """Hand over the windows. Returns before every record is confirmed."""
        if not self._has_begun:
            ends = high_watermarks(self._kafka, self._topic, self._writers)
            for partition, writer in self._writers.items():
                writer.begin(ends[partition])
            self._has_begun = True

        def hand_over(partition: int) -> None:
            for batch in windows[partition]:
                self._writers[partition].write(batch)

        self._run(hand_over, windows)

    def _run(self, work: Callable[[int], None], partitions: Iterable[int]) -> None:
        """Call ``work`` for each partition, and wait for all of them. Raises the first error."""
        futures = [self._threads.submit(work, partition) for partition in partitions]
        wait(futures)
        for future in futures:
            future.result()
