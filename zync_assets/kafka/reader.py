"""Reads a range of offsets of one partition into Arrow, read-committed and in order.

Offsets have legal gaps (compaction, transaction markers, aborted transactions). A range therefore ends with the first
record at or past its end, or with the end of the partition. The reader never counts records, and never waits for the
offset ``end - 1``. Arguments are plain data, so that a Spark task can make the call.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException

from zync_assets.errors import DataLoss, TopicMissing, TopicTruncated
from zync_assets.kafka.admin import BETWEEN_LEADERS
from zync_assets.kafka.client import PATIENCE, UNKNOWN_TOPIC, UNREACHABLE, Connection
from zync_assets.kafka.zero_copy import Intake, Trouble
from zync_assets.offsets import Mark, place_text

STALL_SECONDS = 60.0
"""Seconds without any progress after which the broker counts as gone."""

PROPAGATION = 5.0
"""Seconds for which a restarted broker may not know an existing topic."""

FIRST, CHUNK = 1000, 4000
"""Messages of one request: of the first, and the most of a later one. Large requests save calls. Small requests show the
size of the records before a batch gets too large."""

POLL = 0.05
"""Seconds that one call waits for a chunk to fill."""

MARK_DISTANCE = 1000
"""Offsets between a range and its mark at the most. A mark further away is not compared, since what lies between is read too."""

ANEW = " To begin anew, give the input another pool, and its outputs another staging pool and other topics."

TUNING: Mapping[str, Any] = {
    # By default a full local queue makes the fetcher pause for a second.
    "fetch.queue.backoff.ms": 5,
    # A reader discards the bytes fetched past a range's end, up to twice these bounds.
    "max.partition.fetch.bytes": 4 << 20,
    "fetch.max.bytes": 50 << 20,
    "queued.min.messages": 20_000,
    "queued.max.messages.kbytes": 64 << 10,
}

_PROMISES: Mapping[str, Any] = {
    "isolation.level": "read_committed",
    "enable.partition.eof": True,
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    # A missing position is data loss and must be reported. A reset would hide the loss.
    "auto.offset.reset": "error",
    "allow.auto.create.topics": False,
    # A topic that becomes unknown was deleted. By default librdkafka waits 30 s for the topic.
    "topic.metadata.propagation.max.ms": int(PROPAGATION * 1000),
}

_DEFAULTS: Mapping[str, str] = {"group.id": "zync", "receive.message.max.bytes": str(320 << 20)}
"""librdkafka demands a group's name. The reader assigns partitions itself and commits nothing, so that no group exists.

A broker answers with a record of any size that it has, and takes records of 100 MB by default. librdkafka would take an answer of
100 MB at the most. Above 336 MB, it would take the alert of a TLS listener for the length of an answer."""


_OUT_OF_RANGE = (ClientError._AUTO_OFFSET_RESET, ClientError.OFFSET_OUT_OF_RANGE)


def read_range(
    kafka: Mapping[str, str],
    topic: str,
    partition: int,
    first: int,
    end: int,
    *,
    batch_records: int = 50_000,
    batch_bytes: int = 64 << 20,
    uncommitted: bool = False,
    mark: Mark | None = None,
) -> Iterator[pa.RecordBatch]:
    """The visible records with ``first <= offset < end``, as batches of RECORD_SCHEMA, in order.

    A batch has up to ``batch_records`` records, and little more than ``batch_bytes`` of keys and values.
    ``end`` must not be past the partition's last stable offset at the time of the call. ``uncommitted`` also returns the
    records of open and aborted transactions; ``end`` must then not be past the high watermark.

    ``mark``: the last record before the range, as an earlier call read it. The call reads from there, and compares the record at
    that offset. Nothing is compared where retention or compaction has removed the record.

    Raises DataLoss when records of the range were removed, TopicTruncated if the record of ``mark`` is another one now,
    TopicMissing, BrokerUnavailable after a minute without progress.
    """
    if first >= end:
        return
    doing = f"reading {topic}/{partition} from offset {first}"
    with open_intake(kafka, topic, partition, doing, uncommitted=uncommitted) as (intake, connection):
        low = check_range(intake, connection, topic, partition, first, end)
        position = first if mark is None or mark.offset < max(low, first - MARK_DISTANCE) else mark.offset
        intake.start(position, end - first)
        parts = _Parts()
        chunk = min(FIRST, batch_records)
        progress = time.monotonic()
        while position < end:
            fetch = intake.take(min(chunk, end - position), POLL)
            connection.raise_missing(topic)
            if not fetch.records and not fetch.troubles:
                connection.raise_refusal(doing, progress)
                if time.monotonic() - progress > STALL_SECONDS:
                    raise connection.unavailable(doing)
                continue
            progress = time.monotonic()
            connection.note_answer()
            records = fetch.records
            if records:
                if mark is not None and position < first:
                    records = _records_after(mark, records, first, place_text(topic, partition, mark.offset))
                position = max(position, fetch.records["offset"][-1].as_py() + 1)
            if records:
                size = parts.add(records, end)
                # Large records: ask for fewer at once, so that a batch stays near its limit.
                chunk = max(1, min(CHUNK, batch_records, batch_bytes * len(records) // (8 * size + 1) + 1))
            for trouble in fetch.troubles:
                if position < first and trouble.error.code() in _OUT_OF_RANGE:
                    # Retention has removed the marked record since the check of the range.
                    position = first
                    intake.start(position, end - first)
                    continue
                offset_text = f"{position} (wanted up to {end})"
                position = max(position, reported_end(trouble, connection, f"{topic}/{partition}", offset_text) or 0)
            if len(parts) >= batch_records or parts.bytes >= batch_bytes:
                yield parts.take()
                progress = time.monotonic()
        if len(parts):
            yield parts.take()


@contextmanager
def open_intake(
    kafka: Mapping[str, str], topic: str, partition: int, doing: str, *, uncommitted: bool = False
) -> Generator[tuple[Intake, Connection]]:
    """A consumer of one partition that commits nothing and resets nothing, closed at the end."""
    connection = reading_connection(kafka, uncommitted=uncommitted)
    try:
        intake = Intake(connection.properties, topic, partition)
    except KafkaException as error:
        raise connection.error(error, "setting up a consumer") from None
    try:
        yield intake, connection
    except KafkaException as error:
        raise connection.error(error, doing) from None
    finally:
        intake.close()


def reading_connection(kafka: Mapping[str, str], *, uncommitted: bool = False) -> Connection:
    """The configuration of a consumer that commits nothing and resets nothing."""
    isolation = {"isolation.level": "read_uncommitted"} if uncommitted else {}
    return Connection(kafka, {**TUNING, **_PROMISES, **isolation}, _DEFAULTS)


def mark_of(records: pa.RecordBatch) -> Mark:
    """The mark of the last of some records, which have the columns of RECORD_SCHEMA. The lake keeps digests of it."""
    offset, timestamp, *sides = (records[name][-1].as_py() for name in ("offset", "timestamp", "key", "value"))
    digest = hashlib.sha256(b"%d;" % (-1 if timestamp is None else timestamp))
    for side in sides:
        digest.update(b"-" if side is None else b"%d:" % len(side))
        digest.update(side or b"")
    return Mark(offset, int.from_bytes(digest.digest()[:7], "big"))


def _records_after(mark: Mark, records: pa.RecordBatch, first: int, place: str) -> pa.RecordBatch:
    """The records from offset ``first`` on. TopicTruncated if the first record has the mark's offset and is another record."""
    if records["offset"][0].as_py() == mark.offset and mark_of(records.slice(0, 1)) != mark:
        raise TopicTruncated(
            f"{place}: Kafka has another record there than the one that was ingested; the topic has lost records that were"
            f" ingested, and later records took their offsets. Nothing was ingested. Restore the topic.{ANEW}"
        )
    return records.slice(int(np.searchsorted(records["offset"].to_numpy(), first)))


def check_range(intake: Intake, connection: Connection, topic: str, partition: int, first: int, end: int) -> int:
    """The partition's low watermark. Raises DataLoss unless the partition still holds ``first`` and already holds
    ``end - 1``."""
    doing = f"reading {topic}/{partition} from offset {first}"
    try:
        low, high = _watermarks(intake, connection, doing)
    except KafkaException as error:
        failure = connection.error(error, doing, topic)
        if isinstance(failure, TopicMissing):
            failure = TopicMissing(
                f"topic {topic} at {connection.servers} does not exist or has no partition {partition}; "
                "create it, or correct the name"
            )
        raise failure from None
    if first < low:
        raise DataLoss(
            f"records of {topic}/{partition} are gone that were not read: wanted from offset {first}, "
            f"the topic begins at {low}; raise its retention, and set on-data-loss: continue on the input to go on at {low}"
        )
    if end > high:
        raise DataLoss(
            f"{topic}/{partition} ends at offset {high}, before the wanted end {end}: "
            "it was truncated or created again; start a new pool for it if that is meant"
        )
    return low


def _watermarks(intake: Intake, connection: Connection, doing: str) -> tuple[int, int]:
    """The partition's watermarks. While a broker is waited for, what it reports is looked at."""
    began = time.monotonic()
    unknown_since: float | None = None
    while True:
        try:
            watermarks = intake.watermarks(PATIENCE)
        except KafkaException as error:
            code, now = error.args[0].code(), time.monotonic()
            # Of a broker that was away before, that time does not count.
            unknown_since = (unknown_since or now) if code in UNKNOWN_TOPIC else None
            if now - began > STALL_SECONDS or (unknown_since is not None and now - unknown_since > PROPAGATION):
                raise
            if code not in UNREACHABLE | BETWEEN_LEADERS | UNKNOWN_TOPIC:
                raise
            time.sleep(0.1)
            intake.poll(0)
            connection.raise_refusal(doing, began)
        else:
            connection.note_answer()
            return watermarks


class _Parts:
    """The parts of the next batch."""

    def __init__(self) -> None:
        self._parts: list[pa.RecordBatch] = []
        self._count = self.bytes = 0

    def __len__(self) -> int:
        return self._count

    def add(self, records: pa.RecordBatch, end: int) -> int:
        """Append the records before ``end``; return the size of all in bytes."""
        size = _bytes_of(records["key"]) + _bytes_of(records["value"])
        if records["offset"][-1].as_py() >= end:
            records = records.slice(0, int(np.searchsorted(records["offset"].to_numpy(), end)))
        self._parts.append(records)
        self._count += len(records)
        self.bytes += size
        return size

    def take(self) -> pa.RecordBatch:
        """Return the collected parts as one batch, and start a new batch."""
        whole = pa.concat_batches(self._parts)
        self._parts, self._count, self.bytes = [], 0, 0
        return whole


def _bytes_of(column: pa.Array) -> int:
    data = column.buffers()[2]
    return 0 if data is None else int(data.size)


def reported_end(trouble: Trouble, connection: Connection, place: str, offset: str) -> int | None:
    """The partition's end if librdkafka reports an end; None for trouble that may pass.

    Raises DataLoss or another KafkaError for lasting trouble. ``place``: topic and partition; ``offset``: the offset to read.
    """
    error = trouble.error
    if error.code() == ClientError._PARTITION_EOF:
        return trouble.offset
    if error.code() in _OUT_OF_RANGE:
        raise DataLoss(
            f"{place} no longer holds offset {offset}: retention has deleted it, or the topic was created again; "
            "raise the topic's retention, and set on-data-loss: continue on the input to go on after the gap"
        )
    if not error.fatal() and (trouble.topic is None or error.code() in UNREACHABLE):
        # Trouble with the connection or with the unused group. librdkafka tries again.
        connection.trouble = error
        return None
    raise connection.error(error, f"reading {place}", trouble.topic, "Read")
