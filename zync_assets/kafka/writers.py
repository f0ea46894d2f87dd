"""Writes to several partitions of a topic at the same time, with a writer for each partition (``writer.InOrder``).

The writers share a producer, and one thread hands over a chunk of each partition in turn. Producers of their own, and a thread
for each, would wait for each other most of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from types import TracebackType
from typing import Self

import pyarrow as pa

from zync_assets.kafka.topics import high_watermarks
from zync_assets.kafka.writer import InOrder, SharedProducer
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
        self._has_begun = False

    def __enter__(self) -> Self:
        self._producer = SharedProducer(self._kafka, self._topic)
        for part in self._parts:
            place = part.partition, part.first
            self._writers[part.partition] = InOrder(self._kafka, self._topic, *place, self._rebuild, self._producer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                for writer in self._writers.values():
                    writer.drain()
        finally:
            self._producer.close()
        for writer in self._writers.values():
            writer.__exit__(kind, error, trace)

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

        steps = [
            chain.from_iterable(map(self._writers[partition].chunks_sent, window))
            for partition, window in windows.items()
        ]
        while steps:
            steps = [step for step in steps if next(step, None) is not None]
            for writer in self._writers.values():
                if writer.is_first_alone:
                    writer.drain()
