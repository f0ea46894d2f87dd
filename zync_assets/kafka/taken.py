"""The messages of one consumer call: records as columns, and the errors among the messages."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import numpy as np
import pyarrow as pa
from confluent_kafka import Consumer, Message
from confluent_kafka import KafkaError as ClientError

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

LATEST = 253_402_300_799_999
"""The last millisecond of the year 9999."""


@dataclass(frozen=True)
class Trouble:
    """An error that came in place of a record, or a partition's end. ``topic``: None where it is of the connection."""

    error: ClientError
    topic: str | None
    partition: int | None
    offset: int | None


@dataclass(frozen=True)
class Taken:
    """``records``: of RECORD_SCHEMA."""

    records: pa.RecordBatch
    troubles: Sequence[Trouble]


def take_messages(consumer: Consumer, count: int, timeout: float) -> Taken:
    """The messages that arrive within ``timeout`` seconds, at most ``count``, read through the client's own objects."""
    with _no_collection():
        messages = consumer.consume(count, timeout)
        troubles: list[Trouble] = []
        if any(map(Message.error, messages)):
            troubles = troubles_of(messages)
            messages = [message for message in messages if message.error() is None]
        found = Taken(_columns(messages), troubles)
        # Freed while the garbage collector is off: see ``_no_collection``.
        del messages
    return found


def troubles_of(messages: Iterable[Message]) -> list[Trouble]:
    """The errors among messages."""
    return [
        Trouble(error, message.topic(), message.partition(), message.offset())
        for message in messages
        if (error := message.error()) is not None
    ]


@contextmanager
def _no_collection() -> Generator[None]:
    """Turn Python's garbage collector off for a while.

    A chunk of messages has enough new objects to start the collector several times, although messages are in no cycle. The
    collector would cost a third of a read's time.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _columns(messages: Sequence[Message]) -> pa.RecordBatch:
    """The messages of a chunk as columns.

    The messages of one chunk are still in the processor's cache. A conversion of the whole batch would take twice as long.
    """
    # An int for every record; the stubs also think of messages that were not sent yet.
    offsets = np.fromiter(cast("Iterator[int]", map(Message.offset, messages)), np.int64, len(messages))
    pairs = chain.from_iterable(map(Message.timestamp, messages))
    times = timestamps(np.fromiter(pairs, np.int64, 2 * len(messages)).reshape(-1, 2))
    headers: list[Any] = list(map(Message.headers, messages))
    columns = [
        pa.array(offsets),
        times,
        headers_array(headers) if any(headers) else pa.nulls(len(messages), HEADERS),
        pa.array(list(map(Message.key, messages)), pa.binary()),
        pa.array(list(map(Message.value, messages)), pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)


def timestamps(pairs: np.ndarray[Any, np.dtype[np.int64]]) -> pa.Array:
    """Milliseconds since the epoch, int64. ``pairs``: librdkafka's (type, milliseconds), an array of shape (records, 2).

    A time is null if its type is "not available", or if it is before 1970 (librdkafka's -1) or past the year 9999. Few
    readers of a table know later years.
    """
    kinds, times = pairs[:, 0], pairs[:, 1]
    return pa.array(times, pa.int64(), mask=(kinds == 0) | (times < 0) | (times > LATEST))


def headers_array(headers: Sequence[Sequence[tuple[str, bytes | None]] | None]) -> pa.Array:
    """Headers as lists of (key, value) structs; null for a record without any."""
    return pa.array(
        [[{"key": key, "value": value} for key, value in each] if each else None for each in headers], HEADERS
    )
