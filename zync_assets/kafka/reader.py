"""Reads a range of offsets of one partition into Arrow, read-committed and in order.

Offsets have legal gaps (compaction, transaction markers, aborted transactions), so a range ends with the
first record at or past its end, or with the end of the partition: never with a count, and never by waiting
for the offset ``end - 1``. Arguments are plain data, so that a Spark task can make the call.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import numpy as np
import pyarrow as pa
from confluent_kafka import Consumer, KafkaException, Message, TopicPartition
from confluent_kafka import KafkaError as ClientError

from zync_assets.errors import DataLoss, TopicMissing
from zync_assets.kafka.client import PATIENCE, UNKNOWN_TOPIC, UNREACHABLE, Connection
from zync_assets.kafka.questions import BETWEEN_LEADERS

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

RECORD_SCHEMA = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.int64()),
        pa.field("headers", HEADERS),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
    ]
)
"""``timestamp``: milliseconds since the epoch, null where the record has none (see ``timestamps``). ``headers``: null where there
are none. ``key`` and ``value`` are the record's bytes; null and empty differ, and a null value is a
tombstone."""

STALLED = 60.0
"""Seconds without any progress after which the broker counts as gone."""

PROPAGATION = 5.0
"""Seconds for which a broker that comes back may not know a topic that is there."""

CHUNK = 1000
"""Messages asked for at once: large enough that a call costs nothing, small enough to see how large they
are."""

LATEST = 253_402_300_799_999
"""The last millisecond of the year 9999."""

POLL = 0.05
"""Seconds that one call waits for a chunk to fill."""

TUNING: Mapping[str, Any] = {
    # By default a full local queue makes the fetcher pause for a second.
    "fetch.queue.backoff.ms": 5,
    # What is fetched past the end of a range is thrown away: twice these bounds, for each range.
    "max.partition.fetch.bytes": 2 << 20,
    "fetch.max.bytes": 50 << 20,
    "queued.min.messages": 20_000,
    "queued.max.messages.kbytes": 64 << 10,
}

_PROMISES: Mapping[str, Any] = {
    "isolation.level": "read_committed",
    "enable.partition.eof": True,
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    # A position that is gone is data loss, to be reported; never a reset.
    "auto.offset.reset": "error",
    "allow.auto.create.topics": False,
    # A topic that was there and is unknown now is gone; the default waits 30 s for it.
    "topic.metadata.propagation.max.ms": int(PROPAGATION * 1000),
}

_GROUP: Mapping[str, str] = {"group.id": "zync"}
"""A consumer needs a group's name; partitions are assigned here and nothing is committed, so that it is only
a name."""


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
) -> Iterator[pa.RecordBatch]:
    """The visible records with ``first <= offset < end``, as batches of RECORD_SCHEMA, in order.

    A batch has up to ``batch_records`` records, and little more than ``batch_bytes`` of keys and values.
    ``end`` must not be past the partition's last stable offset at the time of the call; with ``uncommitted``, which
    shows the records of open and of aborted transactions too, not past its high watermark.

    Raises DataLoss when records of the range are gone, TopicMissing, BrokerUnavailable after a minute without progress.
    """
    if first >= end:
        return
    doing = f"reading {topic}/{partition} from offset {first}"
    with open_consumer(kafka, doing, uncommitted=uncommitted) as (consumer, connection):
        check_range(consumer, connection, topic, partition, first, end)
        consumer.assign([TopicPartition(topic, partition, first)])
        columns = _Columns()
        position = first
        chunk = min(CHUNK, batch_records)
        progress = time.monotonic()
        while position < end:
            with _no_collection():
                messages = consumer.consume(min(chunk, end - position), POLL)
                connection.raise_missing(topic)
                if not messages:
                    connection.raise_refused(doing, progress)
                    if time.monotonic() - progress > STALLED:
                        raise connection.unavailable(doing)
                    continue
                progress = time.monotonic()
                connection.answered()
                if any(map(Message.error, messages)):
                    messages, reached = _split(messages, connection, topic, partition, position, end)
                    position = max(position, reached)
                if messages:
                    size, position = columns.add(messages, position, end)
                    # Large records: ask for fewer at once, so that a batch stays near its limit.
                    chunk = max(1, min(CHUNK, batch_records, batch_bytes * len(messages) // (8 * size + 1) + 1))
                # Let go of while nobody collects: see there.
                del messages
            if len(columns) >= batch_records or columns.bytes >= batch_bytes:
                yield columns.take()
                progress = time.monotonic()
        if len(columns):
            yield columns.take()


@contextmanager
def _no_collection() -> Generator[None]:
    """Without Python's search for garbage in cycles, where that was on. A chunk's messages are more new objects than it takes
    to set it off, and are in no cycle: it would look through them a few times, for a third of what reading takes."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@contextmanager
def open_consumer(
    kafka: Mapping[str, str], doing: str, *, uncommitted: bool = False
) -> Generator[tuple[Consumer, Connection]]:
    """A consumer that commits nothing and resets nothing, closed at the end."""
    isolation = {"isolation.level": "read_uncommitted"} if uncommitted else {}
    connection = Connection(kafka, {**TUNING, **_PROMISES, **isolation}, _GROUP)
    try:
        consumer = Consumer(connection.properties)
    except (KafkaException, ValueError) as error:
        raise connection.error(error, "setting up a consumer") from None
    try:
        yield consumer, connection
    except KafkaException as error:
        raise connection.error(error, doing) from None
    finally:
        consumer.close()


def check_range(consumer: Consumer, connection: Connection, topic: str, partition: int, first: int, end: int) -> None:
    """Raise DataLoss unless the partition still holds ``first`` and already holds ``end - 1``."""
    doing = f"reading {topic}/{partition} from offset {first}"
    try:
        low, high = _watermarks(consumer, connection, topic, partition, doing)
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


def _watermarks(consumer: Consumer, connection: Connection, topic: str, partition: int, doing: str) -> tuple[int, int]:
    """The partition's watermarks. While a broker is waited for, what it reports is looked at."""
    began = time.monotonic()
    while True:
        try:
            found = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=PATIENCE)
        except KafkaException as error:
            code, waited = error.args[0].code(), time.monotonic() - began
            if waited > (PROPAGATION if code in UNKNOWN_TOPIC else STALLED):
                raise
            if code not in UNREACHABLE | BETWEEN_LEADERS | UNKNOWN_TOPIC:
                raise
            time.sleep(0.1)
            # Serves the callbacks: nothing is assigned yet that it could return.
            consumer.poll(0)
            connection.raise_refused(doing, began)
        else:
            connection.answered()
            return found


class _Columns:
    """The columns of the next batch, chunk by chunk: to look at a message's parts while they are in the processor's cache,
    and to let go of them then, takes half as long as to keep them until the batch is whole."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.bytes = 0
        self._count = 0
        self._chunks: list[list[pa.Array]] = []

    def __len__(self) -> int:
        return self._count

    def add(self, messages: Sequence[Message], position: int, end: int) -> tuple[int, int]:
        """Append the messages before ``end``; return their size in bytes, and the position after all ``messages``."""
        # An int for every record; the stubs also think of messages that were not sent yet.
        offsets = np.fromiter(cast("Iterator[int]", map(Message.offset, messages)), np.int64, len(messages))
        position = max(position, int(offsets[-1]) + 1)
        if position > end:
            offsets = offsets[offsets < end]
            messages = messages[: len(offsets)]
        pairs = chain.from_iterable(map(Message.timestamp, messages))
        times = timestamps(np.fromiter(pairs, np.int64, 2 * len(messages)).reshape(-1, 2))
        keys = pa.array(list(map(Message.key, messages)), pa.binary())
        values = pa.array(list(map(Message.value, messages)), pa.binary())
        headers: list[Any] = list(map(Message.headers, messages))
        self._chunks.append(
            [
                pa.array(offsets),
                times,
                headers_array(headers) if any(headers) else pa.nulls(len(messages), HEADERS),
                keys,
                values,
            ]
        )
        self._count += len(messages)
        size = _bytes_of(keys) + _bytes_of(values)
        self.bytes += size
        return size, position

    def take(self) -> pa.RecordBatch:
        """The batch; the columns are empty again."""
        columns = [pa.concat_arrays(list(chunks)) for chunks in zip(*self._chunks, strict=True)]
        self._clear()
        return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)


def _bytes_of(column: pa.Array) -> int:
    data = column.buffers()[2]
    return 0 if data is None else int(data.size)


def timestamps(pairs: np.ndarray[Any, np.dtype[np.int64]]) -> pa.Array:
    """librdkafka's (type, milliseconds), an array of shape (records, 2), as int64; null where the type is "not available",
    the time is -1 (or before 1970), or past the year 9999, which few readers of a table can tell."""
    kinds, times = pairs[:, 0], pairs[:, 1]
    return pa.array(times, pa.int64(), mask=(kinds == 0) | (times < 0) | (times > LATEST))


def headers_array(headers: Sequence[Sequence[tuple[str, bytes | None]] | None]) -> pa.Array:
    """Headers as lists of (key, value) structs; null for a record without any."""
    return pa.array(
        [[{"key": key, "value": value} for key, value in each] if each else None for each in headers], HEADERS
    )


def _split(
    messages: Sequence[Message],
    connection: Connection,
    topic: str,
    partition: int,
    position: int,
    end: int,
) -> tuple[list[Message], int]:
    """The records among ``messages``, and the offset up to which the partition is known to hold no others."""
    records: list[Message] = []
    reached = position
    for message in messages:
        if message.error() is None:
            records.append(message)
            position = (message.offset() or 0) + 1
        else:
            wanted = f"{max(reached, position)} (wanted up to {end})"
            reached = max(reached, end_reported(message, connection, f"{topic}/{partition}", wanted) or 0)
    return records, reached


def end_reported(message: Message, connection: Connection, place: str, wanted: str) -> int | None:
    """The partition's end, if that is what a ``message`` with an error reports; None for trouble that may pass.

    Raises anything else as what it is. ``place``: topic and partition; ``wanted``: the offset that was to be read.
    """
    error = message.error()
    assert error is not None
    if error.code() == ClientError._PARTITION_EOF:
        return message.offset()
    if error.code() in (ClientError._AUTO_OFFSET_RESET, ClientError.OFFSET_OUT_OF_RANGE):
        raise DataLoss(
            f"{place} no longer holds offset {wanted}: retention has deleted it, or the topic was created again; "
            "raise the topic's retention, and set on-data-loss: continue on the input to go on after the gap"
        )
    if not error.fatal() and (message.topic() is None or error.code() in UNREACHABLE):
        # Of the connection or of the unused group: librdkafka goes on trying.
        connection.trouble = error
        return None
    raise connection.error(error, f"reading {place}", message.topic(), "Read")
