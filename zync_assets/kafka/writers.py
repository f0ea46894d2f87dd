"""Writers beside ``writer.InOrder``: for several partitions at the same time, and for records with their own timestamps.

``Writers`` has an ``InOrder`` for each partition. They share a producer, and one thread hands over a chunk of each partition in
turn. Producers of their own, and a thread for each, would wait for each other most of the time.

``TimedWriter`` writes records with timestamps to one partition, so that record k gets offset k. ``InOrder`` is faster, and takes
no timestamps: it hands whole columns over to librdkafka. Both keep the same promises. One idempotent producer sends the records
in order. It sends nothing after a refused record, and checks the offset of each record.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException, Message

from zync_assets.codecs.arrays import pc
from zync_assets.errors import ForeignRecord, KafkaError, RecordTooLarge
from zync_assets.kafka.client import Connection
from zync_assets.kafka.topics import high_watermark, high_watermarks, record_limits
from zync_assets.kafka.writer import (
    BATCH_OVERHEAD,
    PROMISES,
    STALL_SECONDS,
    InOrder,
    SharedProducer,
    batch_size,
)
from zync_assets.offsets import OffsetRange


def key_error(topic: str, partition: int, offset: int) -> KafkaError:
    """The error for a record without a key that a compacted topic does not take."""
    return KafkaError(
        f"the record for offset {offset} of {topic}/{partition} has no key, and Kafka takes no such record in a compacted topic."
        f" Remove `compact` from the cleanup.policy of {topic}, then run it again"
    )


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

    def check_records(self, windows: Windows) -> None:
        """RecordTooLarge if any of the records that are to be written next is larger than the topic takes. KafkaError if the
        topic takes no record without a key, and a record has none."""
        for partition, window in windows.items():
            writer = self._writers[partition]
            writer.check_sizes(window)
            if self._producer.limits.needs_key:
                keys = pa.chunked_array([batch.column("key") for batch in window], pa.binary())
                if keys.null_count:
                    raise key_error(self._topic, partition, writer.sent + pc.index(pc.is_null(keys), True).as_py())

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


WAITING_RECORDS = 50_000
"""The most records that may await their delivery report."""

SERVED_RECORDS = 100
"""A writer takes delivery reports each time it has sent this many records."""

_LENGTHS = 36
"""The most bytes of the lengths and deltas of a record, and of the lengths of a header."""

Headers = tuple[tuple[str, bytes | None], ...]


@dataclass(frozen=True)
class TimedRecord:
    """A record as Kafka is to hold it. ``timestamp``: milliseconds since the epoch; None: Kafka gives it the present."""

    timestamp: int | None
    headers: Headers
    key: bytes | None
    value: bytes | None

    @property
    def most(self) -> int:
        """As ``size``, or some bytes more: the exact size takes ten times as long."""
        size = BATCH_OVERHEAD + _LENGTHS + len(self.key or b"") + len(self.value or b"")
        return size + sum(_LENGTHS + 4 * len(key) + len(value or b"") for key, value in self.headers)

    @property
    def size(self) -> int:
        """The bytes of a record batch that holds the record alone."""
        headers = [{"key": key, "value": value} for key, value in self.headers]
        return batch_size({"key": self.key, "value": self.value, "headers": headers})


class TimedWriter:
    """Writes to one partition from ``first`` on: ``with TimedWriter(…) as writer: writer.write(records)``.

    ``confirmed``: the next offset to be confirmed. Raises RecordTooLarge before anything of a window is sent, ForeignRecord if
    another writer's record is in the way, and BrokerUnavailable.
    """

    def __init__(self, kafka: Mapping[str, str], topic: str, partition: int, first: int) -> None:
        limits = record_limits(kafka, topic)
        self._limit, self._needs_key = limits.size, limits.needs_key
        self._kafka, self._topic, self._partition = kafka, topic, partition
        self._first = self.sent = self.confirmed = first
        self._doing = f"writing {topic}/{partition}"
        self._error: ClientError | None = None
        self._mismatch: int | None = None
        self._unlocated: int | None = None
        self._connection = Connection(kafka, {**PROMISES, **limits.producer_sizes})
        try:
            self._producer = self._connection.idempotent_producer(topic)
        except (KafkaException, ValueError) as error:
            raise self._connection.error(error, self._doing, topic, "Write") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            # The client drops the records that wait. The next run reads from the topic which records arrived.
            self._producer.purge()
        self._producer.flush(0.1)

    def check_records(self, records: Iterable[TimedRecord]) -> None:
        """RecordTooLarge if one of the records that are to be written next is larger than the topic takes. KafkaError if the
        topic takes no record without a key, and a record has none."""
        for number, record in enumerate(records):
            if self._needs_key and record.key is None:
                raise key_error(self._topic, self._partition, self.sent + number)
            if record.most > self._limit and (size := record.size) > self._limit:
                raise RecordTooLarge(
                    f"the record for offset {self.sent + number} of {self._topic}/{self._partition} takes {size} bytes, and"
                    f" {self._topic} takes {self._limit} at most (max.message.bytes); raise it to {size} or more, then run it"
                    " again"
                )

    def write(self, records: Iterable[TimedRecord]) -> None:
        """Send records, and wait until each is at its offset."""
        for record in records:
            self._send(record)
            # A broker that knows nothing of a producer takes any sequence number: the first record goes alone.
            if self.sent == self._first + 1 or self.sent - self.confirmed >= WAITING_RECORDS:
                self._drain()
        self._drain()

    def _send(self, record: TimedRecord) -> None:
        arguments: dict[str, Any] = {} if record.timestamp is None else {"timestamp": record.timestamp}
        while True:
            try:
                self._producer.produce(
                    self._topic,
                    record.value,
                    record.key,
                    self._partition,
                    on_delivery=self._confirm,
                    headers=list(record.headers) or None,
                    **arguments,
                )
                break
            except BufferError:
                self._serve(0.2)
            except KafkaException as error:
                raise self._connection.error(error, self._doing, self._topic, "Write") from None
        self.sent += 1
        if self.sent % SERVED_RECORDS == 0:
            self._serve(0)

    def _confirm(self, error: ClientError | None, message: Message) -> None:
        if self._mismatch is not None:
            return
        if error is not None:
            # The broker's refusal of one record makes librdkafka drop the others. Their errors have negative codes.
            if self._error is None or self._error.code() < 0 < error.code():
                self._error = error
            return
        if self._error is not None:
            return
        offset = message.offset()
        if offset is None or offset < 0:
            # The broker's first answer was lost. The broker answers the retry without an offset.
            self._unlocated = self.confirmed if self._unlocated is None else self._unlocated
        elif offset != self.confirmed:
            self._mismatch = self.confirmed
            return
        self.confirmed += 1

    def _serve(self, timeout: float) -> None:
        end: ClientError | None = None
        try:
            self._producer.poll(timeout)
        except KafkaException as error:
            # An error that ended the producer. The report on a record says why.
            end = error.args[0]
            with suppress(KafkaException):
                self._producer.poll(1.0)
        if self._mismatch is not None:
            raise ForeignRecord(
                f"{self._topic}/{self._partition} holds a record of another producer at offset {self._mismatch}. Stop the other"
                " producer, and restore into a new topic."
            )
        if (error := self._error or end) is not None:
            raise self._refusal(error)

    def _refusal(self, error: ClientError) -> KafkaError:
        """An error of the producer as one of this package's."""
        # Of several such records in a batch, librdkafka says that they are invalid. A record without a key was refused before.
        if error.code() in (ClientError.INVALID_TIMESTAMP, ClientError.INVALID_RECORD):
            return KafkaError(
                f"{self._topic}/{self._partition} takes no record with a timestamp so far from the present, after offset"
                f" {self.confirmed - 1}. Raise message.timestamp.after.max.ms and message.timestamp.before.max.ms of"
                f" {self._topic} (before Kafka 3.6: message.timestamp.difference.max.ms), then run it again"
            )
        return self._connection.error(error, self._doing, self._topic, "Write")

    def _drain(self) -> None:
        began, before = time.monotonic(), self.confirmed
        while self.confirmed < self.sent:
            self._serve(0.2)
            self._connection.raise_refusal(self._doing, began)
            if self.confirmed > before:
                self._connection.note_answer()
                began, before = time.monotonic(), self.confirmed
            elif time.monotonic() - began > STALL_SECONDS:
                raise self._connection.stalled(self._doing)
        if self._unlocated is not None:
            # The topic's end shows whether another producer's record took the place of a record without an offset.
            if high_watermark(self._kafka, self._topic, self._partition) != self.sent:
                self._mismatch = self._unlocated
                self._serve(0)
            self._unlocated = None
