"""Reads one partition from librdkafka's memory into Arrow's, with no Python object for a record."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException

from zync_assets.codecs.nested import validity_buffer
from zync_assets.compiled import pays
from zync_assets.errors import KafkaError
from zync_assets.kafka.librdkafka import Client
from zync_assets.kafka.taken import HEADERS, RECORD_SCHEMA, Taken, Trouble, timestamps

Longs = npt.NDArray[np.int64]


class Intake(Client):
    """A consumer of one partition, which is in no group and commits nothing."""

    def __init__(self, properties: Mapping[str, Any], topic: str, partition: int) -> None:
        """``properties`` as for Client."""
        super().__init__("consumer", properties)
        self._topic, self._partition = topic, partition
        self._queue = 0

    def watermarks(self, timeout: float) -> tuple[int, int]:
        """The partition's low watermark and end. Raises KafkaException without an answer in ``timeout`` seconds."""
        low, high = ctypes.c_int64(), ctypes.c_int64()
        code = self.library.rd_kafka_query_watermark_offsets(
            self.handle, self._topic.encode(), self._partition, low, high, int(timeout * 1000)
        )
        if code:
            raise KafkaException(ClientError(code))
        return low.value, high.value

    def start(self, first: int, count: int) -> None:
        """Begin at offset ``first``. ``count``: how many records are expected, roughly."""
        if pays(count):
            from zync_assets.kafka import intake_loops as loops
        else:
            from zync_assets.kafka import intake_plain as loops
        self._loops: Any = loops
        topic, at = self._topic.encode(), self._partition
        self._queue = self.library.rd_kafka_queue_get_partition(self.handle, topic, at)
        # A later assignment keeps the separation: the partition's messages, and no other events, arrive in this queue.
        self.library.rd_kafka_queue_forward(self._queue, None)
        places = self.library.rd_kafka_topic_partition_list_new(1)
        try:
            self.library.rd_kafka_topic_partition_list_add(places, topic, at)
            self.library.rd_kafka_topic_partition_list_set_offset(places, topic, at, first)
            code = self.library.rd_kafka_assign(self.handle, places)
        finally:
            self.library.rd_kafka_topic_partition_list_destroy(places)
        if code:
            raise KafkaException(ClientError(code))

    def close(self) -> None:
        """End the consumer."""
        if self._queue:
            self.library.rd_kafka_queue_destroy(self._queue)
            self._queue = 0
        super().close()

    def take(self, count: int, timeout: float) -> Taken:
        """The messages that arrive within ``timeout`` seconds, at most ``count``. Raises the errors of ``poll``."""
        messages = np.zeros(count, np.int64)
        found = self.library.rd_kafka_consume_batch_queue(
            self._queue, int(timeout * 1000), messages.ctypes.data, len(messages)
        )
        messages = messages[: max(0, found)]
        try:
            records, troubles = self._look(messages)
        finally:
            self._loops.release(messages)
        # Handles trouble with connections and rights.
        self.poll(0)
        return Taken(records, troubles)

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
