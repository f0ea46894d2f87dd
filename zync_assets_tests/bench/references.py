"""The references of the benchmark: tuned loops without any guarantee, in separate, warm processes."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka import Consumer, Message, Producer, TopicPartition

CONSUMER: Mapping[str, str | int | bool] = {
    "group.id": "bench",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "fetch.queue.backoff.ms": 5,
    "max.partition.fetch.bytes": 4 << 20,
    "fetch.max.bytes": 50 << 20,
    "queued.min.messages": 50_000,
}


def consume(servers: str, topic: str, parts: Sequence[tuple[int, int, int]]) -> int:
    """Read the ranges ``parts`` of (partition, first, end), and discard the data. Returns the number of records.

    Each range must end at its partition's end, unless the call has one range only.
    """
    # A thousand new messages set the collector off, which finds nothing and takes a third of the time.
    gc.disable()
    consumer = Consumer({"bootstrap.servers": servers, **CONSUMER})
    # All at once: a partition after the other waits half a second for more of the one before.
    consumer.assign([TopicPartition(topic, partition, first) for partition, first, _ in parts])
    count, total = 0, sum(end - first for _, first, end in parts)
    while count < total:
        # By more at once it takes twice as long: messages leave the processor's cache before they are looked at.
        messages = consumer.consume(min(1_000, total - count), 0.05)
        for read in (Message.offset, Message.timestamp, Message.key, Message.value):
            list(map(read, messages))
        count += len(messages)
    consumer.close()
    return count


_ready: list[list[dict[str, bytes]]] = []


def prepare_records(path: str) -> int:
    """Load ready-made bytes (columns ``key`` and ``value``) into this process."""
    if not _ready:
        for batch in pq.ParquetFile(path).iter_batches(10_000):
            _ready.append(pa.RecordBatch.to_pylist(batch))
    return sum(map(len, _ready))


def produce(servers: str, topic: str) -> float:
    """Send the ready-made bytes with an idempotent producer; the seconds until all were acknowledged."""
    chunks = [[dict(record) for record in chunk] for chunk in _ready]
    started = time.monotonic()
    producer = Producer(
        {
            "bootstrap.servers": servers,
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": 5,
            "batch.size": 1_000_000,
            "queue.buffering.max.messages": 10_000_000,
            "queue.buffering.max.kbytes": 1 << 21,
        }
    )
    for chunk in chunks:
        assert producer.produce_batch(topic, chunk, partition=0) == len(chunk)
        producer.poll(0)
    assert producer.flush(120) == 0
    return time.monotonic() - started
