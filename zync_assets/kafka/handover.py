"""Writes records of one partition from Arrow's memory into librdkafka's, with no Python object for a record."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import KafkaError

from zync_assets.compute import pc
from zync_assets.kafka.librdkafka import MESSAGE, Client, quick_library

_COPY = 0x2
"""RD_KAFKA_MSG_F_COPY: librdkafka copies the value; it always copies the key."""
_QUEUED, _IN_FLIGHT = 0x1, 0x2
"""Which messages ``rd_kafka_purge`` drops."""

_PART = np.dtype(
    {
        "names": ["type", "number", "address", "size"],
        "formats": ["<i4", "<i4", "u8", "u8"],
        "offsets": [0, 8, 8, 16],
        "itemsize": 72,
    }
)
"""``rd_kafka_vu_t``: a part of one message."""
_PARTS = ("topic", "partition", "flags", "key", "value", "headers")
_PART_TYPES = (2, 3, 7, 5, 4, 10)


@dataclass(frozen=True)
class Report:
    """How ``count`` records fared, which follow those of the report before. ``last``: the offset of the last of them, where
    the broker said it."""

    count: int
    error: KafkaError | None
    last: int | None


class Handover(Client):
    """A producer of one partition. ``hand_over`` keeps the order; reports come in that order, each for many records."""

    def __init__(self, properties: Mapping[str, Any], topic: str, partition: int) -> None:
        """``properties`` as for Client."""
        self._reports: list[Report] = []
        self._topic = 0
        super().__init__("producer", properties)
        self._partition = partition
        self._topic = self.library.rd_kafka_topic_new(self.handle, topic.encode(), None)

    def hand_over(self, records: pa.RecordBatch) -> KafkaError | None:
        """Queue the records (columns ``key`` and ``value``, binary, and perhaps ``headers``) in order; the error of the first
        that was refused."""
        messages = np.zeros(len(records), MESSAGE)
        messages["partition"] = self._partition
        # Held until librdkafka has copied what lies in them.
        columns = {name: records[name].cast(pa.binary()) for name in ("key", "value")}
        for name, column in columns.items():
            messages[name], messages[f"{name}_size"] = _places(column)
        if has_headers(records):
            return self._hand_over_each(messages, records["headers"])
        self.library.rd_kafka_produce_batch(self._topic, self._partition, _COPY, messages.ctypes.data, len(messages))
        refused = np.flatnonzero(messages["err"])
        return KafkaError(int(messages["err"][refused[0]])) if len(refused) else None

    def _hand_over_each(self, messages: Any, headers: pa.Array) -> KafkaError | None:
        """librdkafka takes headers a record at a time."""
        parts = np.zeros((len(messages), len(_PARTS)), _PART)
        parts["type"] = _PART_TYPES
        of = dict(zip(_PARTS, parts.T, strict=True))
        of["topic"]["address"], of["partition"]["number"], of["flags"]["number"] = self._topic, self._partition, _COPY
        for side in ("key", "value"):
            of[side]["address"], of[side]["size"] = messages[side], messages[f"{side}_size"]
        first, step = parts.ctypes.data, _PART.itemsize * len(_PARTS)
        names, values = (column.to_pylist() for column in headers.flatten().flatten())
        names = [name.encode() for name in names]
        counts = pc.fill_null(pc.list_value_length(headers), 0).to_pylist()
        produce, place = self.library.rd_kafka_produceva, 0
        for index, count in enumerate(counts):
            end = place + count
            made = self._headers(names[place:end], values[place:end]) if count else None
            place = end
            if made:
                of["headers"]["address"][index] = made
            error = produce(self.handle, first + index * step, len(_PARTS) if made else len(_PARTS) - 1)
            if error:
                # Headers belong to librdkafka only with a message that it took.
                if made:
                    self.library.rd_kafka_headers_destroy(made)
                code = self.library.rd_kafka_error_code(error)
                self.library.rd_kafka_error_destroy(error)
                return KafkaError(code)
        return None

    def _headers(self, names: list[bytes], values: list[bytes | None]) -> int:
        functions = quick_library()
        made: int = functions.rd_kafka_headers_new(len(names))
        add = functions.rd_kafka_header_add
        for name, value in zip(names, values, strict=True):
            add(made, name, len(name), value, 0 if value is None else len(value))
        return made

    def reports(self, timeout: float) -> list[Report]:
        """The reports that come within ``timeout`` seconds. Raises what ``poll`` raises."""
        self.poll(timeout)
        found, self._reports = self._reports, []
        return found

    def on_delivery(self, event: int) -> None:
        """Note what the broker said of some messages."""
        addresses = np.zeros(self.library.rd_kafka_event_message_count(event), np.uint64)
        count = self.library.rd_kafka_event_message_array(event, addresses.ctypes.data, len(addresses))
        if count:
            (last,) = np.frombuffer(ctypes.string_at(int(addresses[count - 1]), MESSAGE.itemsize), MESSAGE)
            offset = int(last["offset"])
            code = self.library.rd_kafka_event_error(event) or int(last["err"])
            self._reports.append(Report(count, KafkaError(code) if code else None, offset if offset >= 0 else None))

    def close(self) -> None:
        """End the producer and drop what waits to be sent. What is on its way may still arrive, as a prefix."""
        if self._topic:
            self.library.rd_kafka_purge(self.handle, _QUEUED | _IN_FLIGHT)
            self.library.rd_kafka_topic_destroy(self._topic)
            self._topic = 0
        super().close()


def has_headers(records: pa.RecordBatch) -> bool:
    """Whether any of the records may have headers."""
    return "headers" in records.schema.names and records["headers"].null_count < len(records)


def _places(column: pa.Array) -> tuple[Any, Any]:
    """Addresses and sizes of the values of a binary column; the address of a null is 0, that of an empty value is not."""
    _, starts, data = column.buffers()
    ends = np.frombuffer(starts, np.int32, len(column) + 1, column.offset * 4).astype(np.uint64)
    base = starts.address if data is None or not data.address else data.address
    addresses, sizes = ends[:-1] + np.uint64(base), np.diff(ends)
    if column.null_count:
        there = column.is_valid().to_numpy(zero_copy_only=False)
        addresses, sizes = addresses * there, sizes * there
    return addresses, sizes
