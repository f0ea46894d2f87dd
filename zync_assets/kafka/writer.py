"""Writes records to one partition so that record k gets offset k, or reports that a record got another offset.

A Kafka producer can't choose an offset. The writer therefore uses one idempotent producer, which sends in order and stops
at the first record that is not accepted (KIP-98's sequence numbers, with librdkafka's gapless guarantee on top). The writer
checks record sizes before it sends anything. It compares the offsets of the delivery reports with the expected offsets.

The writers of several partitions share a producer. The order and its promises hold for each partition by itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException

from zync_assets.codecs.arrays import pc
from zync_assets.crashes import crash_point
from zync_assets.errors import BrokerUnavailable, DataLoss, ForeignRecord, KafkaError, RecordTooLarge
from zync_assets.kafka.client import Connection
from zync_assets.kafka.reader import read_range
from zync_assets.kafka.topics import high_watermark, record_limits
from zync_assets.kafka.zero_copy import Handover, Report, has_headers

STALL_SECONDS = 120.0
"""A broker counts as unreachable if it takes no record for this many seconds."""

CHUNK_RECORDS = 10_000
CHUNK_BYTES = 4 << 20
QUEUE_RECORDS = 100_000
QUEUE_BYTES = 64 << 20
"""Records go to the producer in chunks, while at most QUEUE_RECORDS records and QUEUE_BYTES bytes await a report."""

BATCH_OVERHEAD = 61
"""Bytes of a record batch before its records (message format v2)."""

PROMISES: Mapping[str, Any] = {
    "enable.idempotence": True,
    "enable.gapless.guarantee": True,
    "acks": "all",
    "max.in.flight": 5,
    # A record never times out: giving up is decided here, for all of them at once.
    "message.timeout.ms": 0,
    "retries": 2147483647,
    # What waits is bounded here. A full queue would refuse one record and take the next.
    "queue.buffering.max.messages": 0,
    "queue.buffering.max.kbytes": 1 << 21,
    "delivery.report.only.error": False,
}


def _check_end(topic: str, partition: int, expected_offset: int, end: int, rebuild: str) -> None:
    if end > expected_offset:
        raise _foreign(topic, partition, expected_offset, rebuild)
    if end < expected_offset:
        raise DataLoss(
            f"{topic}/{partition} ends at offset {end}, before {expected_offset}, up to which records were published: "
            f"it was truncated or created again; rebuild it with: {rebuild}"
        )


def _foreign(topic: str, partition: int, offset: int, rebuild: str) -> ForeignRecord:
    return ForeignRecord(
        f"{topic}/{partition} holds a record at offset {offset} that this pipeline did not publish. Either another "
        f"producer writes to {topic}: stop this producer. Or records of a killed publisher arrived later than `settle` allows: "
        f"raise `settle`. Then rebuild the topic with: {rebuild}"
    )


def _is_of_broker(error: ClientError | None) -> bool:
    """Whether an error came from the broker. librdkafka's own errors have negative codes."""
    return error is not None and error.code() > 0


@dataclass(frozen=True)
class _Chunk:
    """Records on their way, the first of them for offset ``first``."""

    first: int
    records: pa.RecordBatch

    @property
    def end(self) -> int:
        return self.first + len(self.records)


class SharedProducer:
    """One producer for the writers of some partitions of a topic: each producer has threads and a connection of its own.

    The error of a partition ends the producer. The end of the producer ends the writers of all partitions.
    """

    def __init__(self, kafka: Mapping[str, str], topic: str) -> None:
        self.limits = record_limits(kafka, topic)
        self.writers: dict[int, InOrder] = {}
        """By partition. Each writer adds itself."""
        self.connection = Connection(kafka, {**PROMISES, **self.limits.producer_sizes})
        try:
            self._handover = Handover(self.connection.properties, topic)
        except KafkaException as error:
            raise self.connection.error(error, "setting up a producer") from None

    @property
    def is_full(self) -> bool:
        """Whether too many records await their delivery report. The caller then hands over no more records."""
        writers = self.writers.values()
        records = sum(writer.sent - writer.confirmed for writer in writers)
        size = sum(writer.waiting_bytes for writer in writers)
        return records > QUEUE_RECORDS or size > QUEUE_BYTES

    def hand_over(self, partition: int, records: pa.RecordBatch) -> ClientError | None:
        """As ``Handover.hand_over``."""
        return self._handover.hand_over(partition, records)

    def serve(self, timeout: float) -> None:
        """Pass the reports of the next ``timeout`` seconds to the writers. Raises a writer's error.

        If several writers have an error, the first one counts that is a cause (``InOrder.is_cause``).
        """
        reports: list[Report] = []
        end: ClientError | None = None
        try:
            reports = self._handover.reports(timeout)
        except KafkaException as error:
            # An error that ended the producer. A report names the partition, and this error does not.
            end = error.args[0]
        if end is not None or any(report.error is not None for report in reports):
            reports = self._reports_to_cause(reports)
        failures = [writer for report in reports if not (writer := self.writers[report.partition]).confirm(report)]
        failures.sort(key=lambda writer: not writer.is_cause)
        if end is not None:
            raise (failures[0] if failures else self._late()).refusal(end)
        if failures:
            failures[0].raise_error()

    def _reports_to_cause(self, reports: list[Report]) -> list[Report]:
        """The reports up to the broker's error. Waits a second for it at the most."""
        reports, until = reports + self._handover.take_reports(), time.monotonic() + 1.0
        while not any(_is_of_broker(report.error) for report in reports) and (left := until - time.monotonic()) > 0:
            # The end may be reported more than once.
            with suppress(KafkaException):
                reports += self._handover.reports(left)
        return reports + self._handover.take_reports()

    def wait(self) -> None:
        """Wait for a report. Raises BrokerUnavailable after too long a wait, and TrustError if the broker is not trusted."""
        began, writers = time.monotonic(), self.writers.values()
        before = sum(writer.confirmed for writer in writers)
        while sum(writer.confirmed for writer in writers) == before:
            self.serve(0.2)
            late = self._late()
            self.connection.raise_refusal(late.doing, began)
            if time.monotonic() - began > STALL_SECONDS:
                raise BrokerUnavailable(
                    f"{self.connection.stalled(late.doing)}; records up to offset {late.confirmed} are written"
                )
        self.connection.note_answer()

    def _late(self) -> InOrder:
        """A writer that has records without a report; where all records have one, any writer."""
        return max(self.writers.values(), key=lambda writer: writer.confirmed < writer.sent)

    def close(self) -> None:
        """Close the producer. The producer drops the records that it has not sent."""
        self._handover.close()


class InOrder:
    """Writes to one partition from ``first`` on: ``with InOrder(…) as writer: writer.write(batch)``.

    ``sent``: the next offset to send; ``confirmed``: the next offset to be confirmed. ``write`` returns before every record
    is confirmed. Below ``verified`` each record is at its own offset. When the block ends, the replicas in sync have
    acknowledged every record at its own offset. When the block raises, the written records are a prefix.

    The writer checks the offset of the last record of each report. This check suffices: records are sent in order, a foreign
    record shifts the offsets of every later record, and a refused record ends the producer.

    Raises ForeignRecord if another writer's record is in the way, DataLoss if the topic ends before ``first``,
    TopicMissing, and BrokerUnavailable after two minutes without a delivery.
    """

    def __init__(
        self,
        kafka: Mapping[str, str],
        topic: str,
        partition: int,
        first: int,
        rebuild: str,
        producer: SharedProducer | None = None,
    ) -> None:
        """``rebuild``: the command that publishes the topic again. Errors quote the command. ``producer``: for this topic; a
        producer of its own if none is given."""
        self.sent = first
        self.confirmed = first
        self.verified = first
        self.waiting_bytes = 0
        self.doing = f"writing {topic}/{partition}"
        self._first = first
        self._has_begun = False
        self._kafka = kafka
        self._topic = topic
        self._partition = partition
        self._rebuild = rebuild
        self._error: ClientError | None = None
        self._mismatch: tuple[int, int] | None = None
        self._waiting: deque[_Chunk] = deque()
        self._producer = producer or SharedProducer(kafka, topic)
        self._producer.writers[partition] = self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.drain()
                crash_point("publish:acknowledged")
        finally:
            self._producer.close()
        if kind is None and self.verified < self.sent:
            # The topic must end where the next record is to go.
            end = high_watermark(self._kafka, self._topic, self._partition)
            _check_end(self._topic, self._partition, self.sent, end, self._rebuild)
            self.verified = self.sent

    def begin(self, end: int) -> None:
        """Raise unless the topic ends where the first record is to go. ``end``: the topic's high watermark."""
        _check_end(self._topic, self._partition, self.sent, end, self._rebuild)
        self._has_begun = True

    def check_sizes(self, batches: Iterable[pa.RecordBatch]) -> None:
        """RecordTooLarge if any of the records that are to be written next is larger than the topic takes."""
        first = self.sent
        for batch in batches:
            _check_sizes(batch, self._topic, self._partition, first, self._producer.limits.size)
            first += len(batch)

    def write(self, batch: pa.RecordBatch) -> None:
        """Hand over the records of ``batch``: columns ``key`` and ``value`` (binary), and perhaps ``headers`` (list of
        structs of key and value). RecordTooLarge before anything of it is sent."""
        for _ in self.chunks_sent(batch):
            if self.is_first_alone:
                self.drain()

    def chunks_sent(self, batch: pa.RecordBatch) -> Iterator[int]:
        """As ``write``, chunk by chunk: each step sends a chunk, and gives ``sent``. The caller calls ``drain`` before the next
        step if ``is_first_alone``."""
        self.check_sizes([batch])
        if not self._has_begun and len(batch):
            self.begin(high_watermark(self._kafka, self._topic, self._partition))
        for chunk in _chunks(batch, first_alone=self.sent == self._first):
            self._send(chunk)
            crash_point("publish:produced")
            yield self.sent

    @property
    def is_first_alone(self) -> bool:
        """Whether the very first record waits for its report, and nothing is sent behind it.

        A broker that does not know a producer accepts any sequence number. If the broker refused the first record while later
        records were in flight, a later record would get the first record's offset.
        """
        return self.confirmed == self._first and self.sent == self._first + 1

    def _send(self, records: pa.RecordBatch) -> None:
        """Hand over ``records``, a chunk, once there is room for them."""
        while self._producer.is_full:
            self._producer.wait()
        self._waiting.append(_Chunk(self.sent, records))
        self.waiting_bytes += records.nbytes
        self.sent += len(records)
        if (refusal := self._producer.hand_over(self._partition, records)) is not None:
            # Where an earlier record ended the producer, its report says why.
            self._producer.serve(1.0)
            raise KafkaError(f"{self.doing}: a record was refused: {refusal.str()}; run it again")
        self._producer.serve(0)

    def drain(self) -> None:
        """Wait until every sent record is confirmed."""
        while self.confirmed < self.sent:
            self._producer.wait()

    @property
    def is_cause(self) -> bool:
        """Whether the broker refused a record, or put it at another offset. The producer then ends, and the reports of the other
        partitions have errors of librdkafka's."""
        return self._mismatch is not None or _is_of_broker(self._error)

    def raise_error(self) -> None:
        """Raise the error of a report, if one had an error."""
        if self._error is not None:
            raise self.refusal(self._error)
        if self._mismatch is not None:
            raise self._misplacement(*self._mismatch)

    def confirm(self, report: Report) -> bool:
        """Note the report on the oldest records that wait for one. False if it, or an earlier one, was an error."""
        if self._mismatch is not None:
            return False
        if report.error is not None:
            # The broker's refusal is the cause, also after reports on records that librdkafka dropped because of it.
            if self._error is None or (_is_of_broker(report.error) and not _is_of_broker(self._error)):
                self._error = report.error
            return False
        if self._error is not None:
            return False
        end = self.confirmed + report.count
        # If the broker's first answer was lost, the broker answers the retry without an offset. The next report's offset, or
        # the topic's end, then proves the offsets of this report too.
        if report.last is not None:
            if report.last != end - 1:
                self._mismatch = (end - 1, report.last)
                return False
            self.verified = end
        self.confirmed = end
        while self._waiting and self._waiting[0].end <= end:
            self.waiting_bytes -= self._waiting.popleft().records.nbytes
        return True

    def refusal(self, error: ClientError) -> KafkaError:
        """An error of the producer as one of this package's. If the broker refused a record, the refusal is the cause."""
        error = self._error if self._error is not None and _is_of_broker(self._error) else error
        if error.code() == ClientError.MSG_SIZE_TOO_LARGE:
            return RecordTooLarge(
                f"{self._topic}/{self._partition} did not take a record after offset {self.confirmed - 1}: "
                f"{error.str()}; raise max.message.bytes of {self._topic}, then run it again"
            )
        return self._producer.connection.error(
            error, f"{self.doing} from offset {self.confirmed} on", self._topic, "Write"
        )

    def _misplacement(self, expected_offset: int, offset: int) -> KafkaError:
        """Why the record for offset ``expected_offset`` is at ``offset``."""
        if offset < expected_offset:
            return DataLoss(
                f"{self._topic}/{self._partition} put the record for offset {expected_offset} at {offset}: the topic was "
                f"created again or lost records; rebuild it with: {self._rebuild}"
            )
        self._producer.close()
        place = self.confirmed
        for chunk in self._waiting:
            place = _first_difference(self._kafka, self._topic, self._partition, chunk)
            if place < chunk.end:
                break
        return _foreign(self._topic, self._partition, place, self._rebuild)


def _first_difference(kafka: Mapping[str, str], topic: str, partition: int, chunk: _Chunk) -> int:
    """The first offset from the chunk's on at which the topic holds another record than the chunk does."""
    contents = list(_contents(chunk.records))
    end = min(high_watermark(kafka, topic, partition), chunk.end)
    place = chunk.first
    # The records of somebody else's transaction are foreign whether it is over or not.
    for batch in read_range(kafka, topic, partition, chunk.first, end, uncommitted=True):
        for offset, record in zip(batch["offset"].to_pylist(), _contents(batch), strict=True):
            # A transaction's marker takes an offset and shows no record.
            if offset != place or record != contents[place - chunk.first]:
                return place
            place += 1
    return place


def _contents(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """The records without their offsets; no headers and an empty list are one."""
    pairs = batch["headers"].to_pylist() if "headers" in batch.schema.names else [None] * len(batch)
    for key, value, headers in zip(batch["key"].to_pylist(), batch["value"].to_pylist(), pairs, strict=True):
        yield key, value, headers or None


def _lengths(column: pa.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    lengths = pc.call_function("binary_length", [column])
    return pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False).astype(np.int64)


def _payloads(batch: pa.RecordBatch) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Per record the bytes of its key, value and headers, without the lengths between them."""
    sizes = _lengths(batch["key"]) + _lengths(batch["value"])
    if has_headers(batch):
        headers = batch["headers"]
        keys, values = pc.call_function("list_flatten", [headers]).flatten()
        owners = pc.call_function("list_parent_indices", [headers]).to_numpy(zero_copy_only=False)
        np.add.at(sizes, owners, _lengths(keys) + _lengths(values) + 10)
    return sizes


def oversize_records(batch: pa.RecordBatch, limit: int) -> Iterator[tuple[int, int]]:
    """Index and size of each record that, in a record batch of its own, takes more than ``limit`` bytes.

    ``batch`` has ``key`` and ``value`` (binary), and perhaps ``headers``. ETL and publish both ask here: a record that ETL
    numbers must be one that publish can send.
    """
    payloads = _payloads(batch)
    # Lengths and deltas take at most 36 bytes: only what is that near to the limit is worth an exact look.
    for index in np.flatnonzero(payloads + BATCH_OVERHEAD + 36 > limit):
        size = batch_size(batch.slice(int(index), 1).to_pylist()[0])
        if size > limit:
            yield int(index), size


def _check_sizes(batch: pa.RecordBatch, topic: str, partition: int, first: int, limit: int) -> None:
    """RecordTooLarge if any record, in a batch of its own, is larger than the topic takes."""
    for index, size in oversize_records(batch, limit):
        raise RecordTooLarge(
            f"the record for offset {first + index} of {topic}/{partition} takes {size} bytes, and {topic} "
            f"takes {limit} at most (max.message.bytes); raise it to {size} or more, then run it again"
        )


def batch_size(record: Mapping[str, Any]) -> int:
    """The bytes of a record batch that holds one record: the message format v2, uncompressed.

    ``record`` has ``key``, ``value`` and perhaps ``headers``.
    """
    body = 1 + 1 + 1  # attributes, timestamp delta 0, offset delta 0
    for part in (record["key"], record["value"]):
        body += _varint(-1) if part is None else _varint(len(part)) + len(part)
    headers = record.get("headers") or []
    body += _varint(len(headers))
    for header in headers:
        name, value = header["key"].encode(), header["value"]
        body += _varint(len(name)) + len(name)
        body += _varint(-1) if value is None else _varint(len(value)) + len(value)
    return BATCH_OVERHEAD + _varint(body) + body


def _varint(number: int) -> int:
    """The bytes of a zigzag varint."""
    zigzag = (number << 1) ^ (number >> 63)
    return max(1, (zigzag.bit_length() + 6) // 7)


def _chunks(batch: pa.RecordBatch, *, first_alone: bool) -> Iterator[pa.RecordBatch]:
    """``batch`` cut into chunks of bounded count and size; ``first_alone``: its first record by itself."""
    ends = np.cumsum(_payloads(batch))
    start = 0
    while start < len(batch):
        before = int(ends[start - 1]) if start else 0
        fits = int(np.searchsorted(ends, before + CHUNK_BYTES, side="right"))
        stop = start + 1 if first_alone and start == 0 else max(start + 1, min(fits, start + CHUNK_RECORDS))
        yield batch.slice(start, stop - start)
        start = stop
