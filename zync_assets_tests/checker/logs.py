"""The records of a topic, read by a plain read-committed consumer."""

from __future__ import annotations

import time
from dataclasses import dataclass

from confluent_kafka import Consumer, Message, TopicPartition
from confluent_kafka import KafkaError as ClientError

STALLED = 60.0
"""Seconds without an answer after which the broker counts as gone."""


@dataclass(frozen=True)
class LogRecord:
    """A record as it lies in Kafka. ``timestamp``: milliseconds since the epoch, None where it has none or one past the year
    9999."""

    offset: int
    timestamp: int | None
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


@dataclass(frozen=True)
class Log:
    """A partition's low watermark, last stable offset, and visible records."""

    low: int
    end: int
    records: tuple[LogRecord, ...]


def read_topic(servers: str, topic: str) -> dict[int, Log]:
    """Partition → log; empty if there is no such topic."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "checker",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
        }
    )
    try:
        found = consumer.list_topics(topic, timeout=20).topics[topic]
        if found.error is not None:
            return {}
        return {number: _read(consumer, topic, number) for number in sorted(found.partitions)}
    finally:
        consumer.close()


def _read(consumer: Consumer, topic: str, partition: int) -> Log:
    low, end = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=20)
    records: list[LogRecord] = []
    position = low
    consumer.assign([TopicPartition(topic, partition, low)])
    progress = time.monotonic()
    while position < end:
        messages = consumer.consume(min(10_000, end - position), timeout=0.2)
        if time.monotonic() - progress > STALLED:
            raise TimeoutError(f"{topic}/{partition}: nothing came after offset {position}")
        for message in messages:
            progress = time.monotonic()
            error = message.error()
            if error is None:
                record = _record(message)
                position = record.offset + 1
                if record.offset < end:
                    records.append(record)
            elif error.code() == ClientError._PARTITION_EOF:
                position = max(position, message.offset() or 0)
            elif not error.retriable() and error.code() not in (ClientError._TRANSPORT, ClientError._ALL_BROKERS_DOWN):
                raise RuntimeError(f"{topic}/{partition}: {error.str()}")
    consumer.unassign()
    return Log(low, end, tuple(records))


def _record(message: Message) -> LogRecord:
    kind, millis = message.timestamp()
    return LogRecord(
        message.offset() or 0,
        millis if kind and 0 <= millis < 253_402_300_800_000 else None,
        message.key(),  # type: ignore[arg-type]
        message.value(),  # type: ignore[arg-type]
        tuple((str(name), value) for name, value in message.headers() or ()),  # type: ignore[misc]
    )


def partition_of(key: bytes, count: int) -> int:
    """The partition that Kafka's default partitioner chooses for a key: murmur2 as in the Java client."""
    found = 0x9747B28C ^ len(key)
    whole = len(key) - len(key) % 4
    for at in range(0, whole, 4):
        word = int.from_bytes(key[at : at + 4], "little") * _M & _BITS
        found = (found * _M & _BITS) ^ ((word ^ word >> 24) * _M & _BITS)
    if key[whole:]:
        found = (found ^ int.from_bytes(key[whole:], "little")) * _M & _BITS
    found = (found ^ found >> 13) * _M & _BITS
    return ((found ^ found >> 15) & 0x7FFFFFFF) % count


_M, _BITS = 0x5BD1E995, 0xFFFFFFFF
