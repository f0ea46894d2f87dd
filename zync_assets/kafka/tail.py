"""Follows a topic, record by record, for somebody who looks on. ``reader`` is the way for anything that must
be fast."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from zync_assets.kafka.client import Connection
from zync_assets.kafka.reader import STALLED, end_reported, reading_connection
from zync_assets.kafka.taken import troubles_of

log = logging.getLogger(__name__)

ANSWER = 10.0
"""Seconds that a broker has to answer before it counts as absent."""


@dataclass(frozen=True)
class Record:
    """A record as it is in Kafka. ``timestamp``: milliseconds since the epoch, None where it has none."""

    topic: str
    partition: int
    offset: int
    timestamp: int | None
    headers: tuple[tuple[str, bytes | None], ...]
    key: bytes | None
    value: bytes | None


def follow(
    kafka: Mapping[str, str],
    topic: str,
    starts: Mapping[int, int],
    ends: Mapping[int, int] | None = None,
    patience: float | None = None,
) -> Iterator[Record]:
    """The records of the partitions in ``starts`` from those offsets on: up to ``ends`` by partition, or for ever.

    In order within a partition; partitions come as they answer. With ``ends``, BrokerUnavailable after a
    minute without progress; without, an outage is logged and waited for. ``patience``: seconds without a record
    after which the records end; BrokerUnavailable if no broker answers at that moment.
    """
    open_ends = {place: ends[place] for place, first in starts.items() if first < ends[place]} if ends else None
    if open_ends is not None and not open_ends:
        return
    doing = f"reading {topic}"
    with _open_consumer(kafka, doing) as (consumer, connection):
        wanted = starts if open_ends is None else {place: starts[place] for place in open_ends}
        consumer.assign([TopicPartition(topic, place, first) for place, first in sorted(wanted.items())])
        progress = time.monotonic()
        while open_ends is None or open_ends:
            # Ctrl-C is heard between two calls only.
            messages = consumer.consume(500, 0.1)
            connection.raise_missing(topic)
            if messages:
                progress = time.monotonic()
            elif patience is not None and time.monotonic() - progress > patience:
                _ask_broker(consumer, connection, topic, doing)
                return
            elif open_ends is not None and time.monotonic() - progress > STALLED:
                raise connection.unavailable(doing)
            elif open_ends is None and connection.trouble is not None:
                log.warning("%s: %s; waiting", connection.servers, connection.trouble.str())
                connection.trouble = None
            for message in messages:
                place = message.partition() or 0
                if message.error() is None:
                    reached = (message.offset() or 0) + 1
                    if open_ends is None or reached <= open_ends.get(place, 0):
                        yield _record(topic, message)
                else:
                    wanted_offset = str(starts.get(place, ""))
                    (trouble,) = troubles_of([message])
                    reached = end_reported(trouble, connection, f"{topic}/{place}", wanted_offset) or 0
                if open_ends is not None and reached >= open_ends.get(place, reached + 1):
                    del open_ends[place]


@contextmanager
def _open_consumer(kafka: Mapping[str, str], doing: str) -> Generator[tuple[Consumer, Connection]]:
    """A consumer of several partitions, closed at the end."""
    connection = reading_connection(kafka)
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


def _ask_broker(consumer: Consumer, connection: Connection, topic: str, doing: str) -> None:
    """BrokerUnavailable unless a broker answers: silence of an absent broker is no end of the records."""
    try:
        consumer.list_topics(topic, timeout=ANSWER)
    except KafkaException:
        raise connection.unavailable(doing) from None


def _record(topic: str, message: Message) -> Record:
    kind, milliseconds = message.timestamp()
    return Record(
        topic,
        message.partition() or 0,
        message.offset() or 0,
        milliseconds if kind and milliseconds >= 0 else None,
        tuple((str(name), value) for name, value in message.headers() or ()),  # type: ignore[misc]
        message.key(),  # type: ignore[arg-type]
        message.value(),  # type: ignore[arg-type]
    )
