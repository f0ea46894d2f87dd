"""Topics as they are found: with transactions, compacted, cut by retention, their partitions and settings changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,  # pyright: ignore[reportPrivateImportUsage]
    AlterConfigOpType,  # pyright: ignore[reportPrivateImportUsage]
    ConfigEntry,  # pyright: ignore[reportPrivateImportUsage]
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    NewPartitions,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)

from zync_assets.kafka.topics import topic_states

Kafka = Mapping[str, str]
Sent = tuple[str, int, int, str | bytes | None, bytes | None]
"""Topic, partition, timestamp, key, value."""


def until(what: str, holds: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until something holds that the broker does in its own time."""
    give_up = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < give_up, what
        time.sleep(0.02)


def configure(kafka: Kafka, topic: str, **settings: str) -> None:
    """Set a topic's properties, underscores for dots."""
    entries = [
        ConfigEntry(name.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
        for name, value in settings.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    client = AdminClient(dict(kafka))
    for future in client.incremental_alter_configs([resource]).values():
        future.result(10)


def add_partitions(kafka: Kafka, topic: str, count: int) -> None:
    client = AdminClient(dict(kafka))
    for future in client.create_partitions([NewPartitions(topic, count)]).values():
        future.result(10)
    until(f"{topic} has {count} partitions", lambda: len(topic_states(kafka, [topic])[topic].partitions) == count)


def cut(kafka: Kafka, topic: str, before: int, partition: int = 0) -> None:
    """Delete the offsets below ``before``, as retention does."""
    client = AdminClient(dict(kafka))
    for future in client.delete_records([TopicPartition(topic, partition, before)]).values():
        future.result(10)


def plain(kafka: Kafka, records: Iterable[Sent]) -> None:
    producer = Producer({**kafka, "linger.ms": 5, "log_level": 0, "queue.buffering.max.messages": 2_000_000})
    refused: list[object] = []
    for topic, partition, at, key, value in records:
        producer.produce(
            topic,
            value,
            key,
            partition,
            timestamp=at,
            on_delivery=lambda error, _: refused.append(error) if error else None,
        )
    assert producer.flush(60) == 0
    assert not refused


def in_transactions(kafka: Kafka, name: str, records: Iterable[Sent], abort: Callable[[int], bool]) -> None:
    """Send each record in its own transaction. ``abort``: the places before which an aborted transaction sends the record
    too."""
    producer = Producer({**kafka, "transactional.id": name, "linger.ms": 0, "log_level": 0})
    producer.init_transactions(20)
    for place, (topic, partition, at, key, value) in enumerate(records):
        for commit in (False, True) if abort(place) else (True,):
            producer.begin_transaction()
            producer.produce(topic, value, key, partition, timestamp=at)
            producer.flush(20)
            (producer.commit_transaction if commit else producer.abort_transaction)(20)


def open_transaction(kafka: Kafka, topic: str, name: str, value: bytes) -> Producer:
    """A producer whose transaction holds a record and is not over."""
    producer = Producer({**kafka, "transactional.id": name, "linger.ms": 0, "log_level": 0})
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce(topic, value, partition=0)
    producer.flush(20)
    return producer
