"""Messages taken from librdkafka straight into Arrow's memory, with no Python object for any of them."""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import Consumer
from confluent_kafka import KafkaError as ClientError

from zync_assets.codecs.nested import validity_buffer
from zync_assets.errors import KafkaError
from zync_assets.kafka.librdkafka import LIBRARY, handle_of
from zync_assets.kafka.taken import HEADERS, RECORD_SCHEMA, Taken, Trouble, timestamps, troubles_of

Longs = npt.NDArray[np.int64]


@contextmanager
def open_intake(consumer: Consumer, topic: str, partition: int) -> Generator[Intake | None]:
    """To be opened before the partition is assigned; None where it is not possible."""
    handle = handle_of(consumer)
    if handle is None or LIBRARY is None:
        yield None
        return
    queue = LIBRARY.rd_kafka_queue_get_partition(handle, topic.encode(), partition)
    # A later assignment keeps the separation: the partition's messages, and no other events, arrive in this queue.
    LIBRARY.rd_kafka_queue_forward(queue, None)
    try:
        yield Intake(consumer, queue, topic, partition)
    finally:
        LIBRARY.rd_kafka_queue_destroy(queue)


class Intake:
    def __init__(self, consumer: Consumer, queue: int, topic: str, partition: int) -> None:
        # A late import, because a reader of few records does not need numba.
        from zync_assets.kafka import intake_loops

        self._consumer, self._queue, self._topic, self._partition = consumer, queue, topic, partition
        self._loops = intake_loops

    def take(self, count: int, timeout: float) -> Taken:
        """The messages that arrive within ``timeout`` seconds, at most ``count``."""
        messages = np.zeros(count, np.int64)
        found = self._loops.take(self._queue, int(timeout * 1000), messages)
        messages = messages[: max(0, found)]
        try:
            records, troubles = self._look(messages)
        finally:
            self._loops.release(messages)
        # Also serves events that belong to no partition: callbacks, and trouble with connections and rights.
        return Taken(records, [*troubles, *troubles_of(self._consumer.consume(100, 0))])

    def _look(self, messages: Longs) -> tuple[pa.RecordBatch, list[Trouble]]:
        count = len(messages)
        errors, offsets, headers = np.empty(count, np.int32), np.empty(count, np.int64), np.empty(count, np.int64)
        values, keys = np.empty((count, 2), np.int64), np.empty((count, 2), np.int64)
        self._loops.look(messages, errors, offsets, values, keys, headers)
        troubles: list[Trouble] = []
        if errors.any():
            for index in np.flatnonzero(errors).tolist():
                address, size = values[index].tolist()
                text = ctypes.string_at(address, size).decode(errors="replace") if address else None
                error = ClientError(int(errors[index]), text)
                troubles.append(Trouble(error, self._topic, self._partition, int(offsets[index])))
            good = errors == 0
            messages, offsets, headers = messages[good], offsets[good], headers[good]
            values, keys = values[good], keys[good]
        pairs = np.empty((len(messages), 2), np.int64)
        self._loops.times(messages, pairs)
        columns = [
            pa.array(offsets),
            timestamps(pairs),
            self._headers(messages, headers),
            self._binary(keys),
            self._binary(values),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA), troubles

    def _binary(self, parts: Longs) -> pa.Array:
        """The bytes at these addresses (0: null), of these sizes."""
        there = parts[:, 0] != 0
        size = int(parts[:, 1].sum(where=there))
        if size > np.iinfo(np.int32).max:
            raise KafkaError(
                f"{len(parts)} records of {self._topic}/{self._partition} came at once with {size} bytes, more than 2 GiB."
            )
        ends, data = np.empty(len(parts) + 1, np.int32), np.empty(size, np.uint8)
        self._loops.gather(parts, ends, data)
        buffers = [validity_buffer(there), pa.py_buffer(ends), pa.py_buffer(data)]
        return pa.Array.from_buffers(pa.binary(), len(parts), buffers)

    def _headers(self, messages: Longs, counts: Longs) -> pa.Array:
        total = int(counts.sum())
        if total == 0:
            return pa.nulls(len(messages), HEADERS)
        names, values = np.empty((total, 2), np.int64), np.empty((total, 2), np.int64)
        self._loops.look_headers(messages, names, values)
        each = pa.StructArray.from_arrays(
            [_text(self._binary(names)), self._binary(values)], fields=list(HEADERS.value_type)
        )
        ends: Any = np.zeros(len(messages) + 1, np.int32)
        np.cumsum(counts, out=ends[1:])
        return pa.ListArray.from_arrays(pa.array(ends), each, HEADERS, mask=pa.array(counts == 0))


def _text(names: pa.Array) -> pa.Array:
    try:
        return names.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([name.decode(errors="replace") for name in names.to_pylist()], pa.string())
