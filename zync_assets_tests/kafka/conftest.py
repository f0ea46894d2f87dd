"""Topics of a test's own on the real broker, and plain producers to fill them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import pytest
from confluent_kafka import Producer

from zync_assets.kafka.topics import create_topic, topic_states
from zync_assets.local.services import Services


@pytest.fixture
def kafka(services: Services) -> dict[str, str]:
    """The ``kafka:`` mapping of a pipeline on this run's broker."""
    return {"bootstrap.servers": services.bootstrap_servers}


@pytest.fixture
def topic(kafka: dict[str, str], unique: str) -> str:
    """A topic of one partition."""
    create_topic(kafka, unique, 1, 1, {})
    return unique


def await_end(kafka: dict[str, str], topic: str, end: int) -> None:
    """Wait until partition 0 ends at ``end``: a transaction is over a moment before its marker is written."""
    give_up = time.monotonic() + 10
    while (now := topic_states(kafka, [topic])[topic].partitions[0].end) != end:
        assert time.monotonic() < give_up, f"{topic} ends at {now}, not at {end}"
        time.sleep(0.01)


Fill = Callable[..., None]


@pytest.fixture
def fill(kafka: dict[str, str], topic: str) -> Fill:
    """Produce values (or whole records, as mappings of ``produce``'s arguments) to partition 0 of ``topic``."""

    def produce(*records: str | bytes | Mapping[str, object] | None, **properties: object) -> None:
        producer = Producer({**kafka, "log_level": 0, **properties})
        for record in records:
            fields = record if isinstance(record, Mapping) else {"value": record}
            producer.produce(topic, **{"partition": 0, **fields})  # type: ignore[arg-type]
        assert producer.flush(10) == 0

    return produce


@pytest.fixture
def transactional(kafka: dict[str, str], unique: str) -> Producer:
    """A producer that is ready to begin a transaction."""
    producer = Producer({**kafka, "transactional.id": unique, "log_level": 0})
    producer.init_transactions(10)
    return producer
