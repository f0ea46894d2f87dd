"""The messages of one consumer call: records as columns, and the errors among the messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import Message

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


def troubles_of(messages: Iterable[Message]) -> list[Trouble]:
    """The errors among messages."""
    return [
        Trouble(error, message.topic(), message.partition(), message.offset())
        for message in messages
        if (error := message.error()) is not None
    ]


def timestamps(pairs: np.ndarray[Any, np.dtype[np.int64]]) -> pa.Array:
    """Milliseconds since the epoch, int64. ``pairs``: librdkafka's (type, milliseconds), an array of shape (records, 2).

    A time is null if its type is "not available", or if it is before 1970 (librdkafka's -1) or past the year 9999. Few
    readers of a table know later years.
    """
    kinds, times = pairs[:, 0], pairs[:, 1]
    return pa.array(times, pa.int64(), mask=(kinds == 0) | (times < 0) | (times > LATEST))
