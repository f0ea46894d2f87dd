"""What a consumer gives at once: records as columns, and what else it has to say."""

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
    """What comes within ``timeout`` seconds, up to ``count`` messages, by the client's own objects."""
    with _no_collection():
        messages = consumer.consume(count, timeout)
        troubles: list[Trouble] = []
        if any(map(Message.error, messages)):
            troubles = troubles_of(messages)
            messages = [message for message in messages if message.error() is None]
        found = Taken(_columns(messages), troubles)
        # Let go of while nobody collects: see there.
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
    """Without Python's search for garbage in cycles, where that was on. A chunk's messages are more new objects than it takes
    to set it off, and are in no cycle: it would look through them a few times, for a third of what reading takes."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _columns(messages: Sequence[Message]) -> pa.RecordBatch:
    """To look at a message's parts while they are in the processor's cache, and to let go of them then, takes half as long as
    to keep them until a batch is whole."""
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
    """librdkafka's (type, milliseconds), an array of shape (records, 2), as int64; null where the type is "not available",
    the time is -1 (or before 1970), or past the year 9999, which few readers of a table can tell."""
    kinds, times = pairs[:, 0], pairs[:, 1]
    return pa.array(times, pa.int64(), mask=(kinds == 0) | (times < 0) | (times > LATEST))


def headers_array(headers: Sequence[Sequence[tuple[str, bytes | None]] | None]) -> pa.Array:
    """Headers as lists of (key, value) structs; null for a record without any."""
    return pa.array(
        [[{"key": key, "value": value} for key, value in each] if each else None for each in headers], HEADERS
    )
