"""Records between librdkafka's memory and Arrow's, without a Python object for each record.

``Intake`` reads one partition into Arrow's memory. A call of the consumer gives the records as columns, and the errors among
the messages. ``Handover`` writes records from Arrow's memory into librdkafka's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Message

from zync_assets.codecs.arrays import list_of, numbers, pays, pc, validity_buffer
from zync_assets.errors import KafkaError as ZyncKafkaError
from zync_assets.kafka.client import METADATA_SECONDS
from zync_assets.kafka.librdkafka import MESSAGE, Client

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

    error: KafkaError
    topic: str | None
    partition: int | None
    offset: int | None


@dataclass(frozen=True)
class Fetch:
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
    return numbers(np.ascontiguousarray(times), pa.int64(), (kinds != 0) & (times >= 0) & (times <= LATEST))


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
            raise KafkaException(KafkaError(code))
        return low.value, high.value

    def start(self, first: int, count: int) -> None:
        """Begin at offset ``first``, or go there. ``count``: how many records are expected, roughly."""
        if pays(count):
            from zync_assets.kafka import zero_copy_loops as loops
        else:
            from zync_assets.kafka import zero_copy_plain as loops
        self._loops: Any = loops
        topic, at = self._topic.encode(), self._partition
        if not self._queue:
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
            raise KafkaException(KafkaError(code))

    def close(self) -> None:
        """End the consumer."""
        if self._queue:
            self.library.rd_kafka_queue_destroy(self._queue)
            self._queue = 0
        super().close()

    def take(self, count: int, timeout: float) -> Fetch:
        """The messages that arrive within ``timeout`` seconds, at most ``count``. Raises the errors of ``poll``."""
        messages = np.zeros(count, np.int64)
        message_count = self.library.rd_kafka_consume_batch_queue(
            self._queue, int(timeout * 1000), messages.ctypes.data, len(messages)
        )
        messages = messages[: max(0, message_count)]
        try:
            records, troubles = self._look(messages)
        finally:
            self._loops.release(messages)
        # Handles trouble with connections and rights.
        self.poll(0)
        return Fetch(records, troubles)

    def _look(self, messages: Longs) -> tuple[pa.RecordBatch, list[Trouble]]:
        count = len(messages)
        errors, offsets = np.empty(count, np.int32), np.empty(count, np.int64)
        values, keys = np.empty((count, 2), np.int64), np.empty((count, 2), np.int64)
        lists, headers = np.empty(count, np.int64), np.empty(count, np.int64)
        self._loops.look(messages, errors, offsets, values, keys, lists, headers)
        troubles: list[Trouble] = []
        if errors.any():
            for index in np.flatnonzero(errors).tolist():
                address, size = values[index].tolist()
                text = ctypes.string_at(address, size).decode(errors="replace") if address else None
                error = KafkaError(int(errors[index]), text)
                troubles.append(Trouble(error, self._topic, self._partition, int(offsets[index])))
            mask = errors == 0
            messages, offsets, lists, headers = (
                messages[mask],
                offsets[mask],
                lists[mask],
                headers[mask],
            )
            values, keys = values[mask], keys[mask]
        pairs = np.empty((len(messages), 2), np.int64)
        self._loops.times(messages, pairs)
        columns = [
            numbers(offsets, pa.int64()),
            timestamps(pairs),
            self._headers(lists, headers),
            self._binary(keys),
            self._binary(values),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA), troubles

    def _binary(self, parts: Longs) -> pa.Array:
        """The bytes at these addresses (0: null), of these sizes."""
        is_valid = parts[:, 0] != 0
        size = int(parts[:, 1].sum(where=is_valid))
        if size > np.iinfo(np.int32).max:
            raise ZyncKafkaError(
                f"{len(parts)} records of {self._topic}/{self._partition} came at once with {size} bytes, more than 2 GiB."
            )
        ends, data = np.empty(len(parts) + 1, np.int32), np.empty(size, np.uint8)
        self._loops.gather(parts, ends, data)
        buffers = [validity_buffer(is_valid), pa.py_buffer(ends), pa.py_buffer(data)]
        return pa.Array.from_buffers(pa.binary(), len(parts), buffers)

    def _headers(self, lists: Longs, counts: Longs) -> pa.Array:
        total = int(counts.sum())
        if total == 0:
            return pa.nulls(len(lists), HEADERS)
        names, values = np.empty((total, 2), np.int64), np.empty((total, 2), np.int64)
        self._loops.look_headers(lists, counts, names, values)
        structs = pa.StructArray.from_arrays(
            [_text(self._binary(names)), self._binary(values)], fields=list(HEADERS.value_type)
        )
        ends: Any = np.zeros(len(lists) + 1, np.int32)
        np.cumsum(counts, out=ends[1:])
        return list_of(HEADERS, ends, structs, counts != 0)


def _text(names: pa.Array) -> pa.Array:
    try:
        return names.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([name.decode(errors="replace") for name in names.to_pylist()], pa.string())


_COPY = 0x2
"""RD_KAFKA_MSG_F_COPY: librdkafka copies the value; it always copies the key."""
_QUEUE, _IN_FLIGHT = 0x1, 0x2
"""Which messages ``rd_kafka_purge`` drops."""

_PART = np.dtype(
    {
        "names": ["type", "number", "address", "size", "name", "value", "value_size"],
        "formats": ["<i4", "<i4", "u8", "u8", "u8", "u8", "u8"],
        "offsets": [0, 8, 8, 16, 8, 16, 24],
        "itemsize": 72,
    }
)
"""``rd_kafka_vu_t``: a part of one message. ``address`` and ``size`` are of a key or value, the last three of a header."""
_PARTS = {"topic": 2, "partition": 3, "flags": 7, "key": 5, "value": 4}
"""The parts of each message, and their types. The message's headers follow."""
_HEADER, _HEADERS = 9, 10


@dataclass(frozen=True)
class Report:
    """The delivery report of ``count`` records of a partition. They follow the records of the partition's report before.
    ``last``: the offset of the last record; None if the broker gave no offset."""

    partition: int
    count: int
    error: KafkaError | None
    last: int | None


class Handover(Client):
    """A producer of one topic. ``hand_over`` keeps the order of each partition, and so do the reports. A report covers many
    records of one partition."""

    def __init__(self, properties: Mapping[str, Any], topic: str) -> None:
        """``properties`` as for Client."""
        self._reports: list[Report] = []
        self._topic = 0
        super().__init__("producer", properties)
        self._topic = self.library.rd_kafka_topic_new(self.handle, topic.encode(), None)
        self._get_producer_id()

    def _get_producer_id(self) -> None:
        """Let librdkafka ask for the producer's id now.

        An idempotent producer asks when it gets metadata over an open connection, and else every half second. The first
        metadata may come over the connection to a bootstrap server, which librdkafka closes then. The second come over the
        connection to a broker. Without a broker, a later call raises the error.
        """
        for _ in range(2):
            metadata = ctypes.c_void_p()
            answer = ctypes.byref(metadata)
            if self.library.rd_kafka_metadata(self.handle, 0, self._topic, answer, int(METADATA_SECONDS * 1000)):
                return
            self.library.rd_kafka_metadata_destroy(metadata)

    def hand_over(self, partition: int, records: pa.RecordBatch) -> KafkaError | None:
        """Queue the records (columns ``key`` and ``value``, binary, and perhaps ``headers``) in order; the error of the first
        that was refused."""
        messages = np.zeros(len(records), MESSAGE)
        messages["partition"] = partition
        # Held until librdkafka has copied what lies in them.
        columns = {name: records[name].cast(pa.binary()) for name in ("key", "value")}
        for name, column in columns.items():
            messages[name], messages[f"{name}_size"] = _places(column)
        if has_headers(records):
            return self._hand_over_each(messages, records["headers"])
        self.library.rd_kafka_produce_batch(self._topic, partition, _COPY, messages.ctypes.data, len(messages))
        refusals = np.flatnonzero(messages["err"])
        return KafkaError(int(messages["err"][refusals[0]])) if len(refusals) else None

    def _hand_over_each(self, messages: Any, headers: pa.Array) -> KafkaError | None:
        """librdkafka takes records with headers one at a time."""
        counts: Any = pc.fill_null(pc.list_value_length(headers), 0).to_numpy().astype(np.int64)
        names, values = (column.cast(pa.binary()) for column in headers.flatten().flatten())
        if names.null_count:
            return KafkaError(KafkaError._INVALID_ARG, "a header's name is null")
        owners = np.repeat(np.arange(len(counts)), counts)
        # A header among the parts ends at its name's first zero byte. A list of headers takes names with their sizes.
        list_mask = np.zeros(len(counts), np.bool_)
        list_mask[owners[pc.match_substring(names, b"\0").to_numpy(zero_copy_only=False)]] = True
        names, part_mask = pc.binary_join_element_wise(names, b"\0", b""), ~list_mask[owners]
        lengths = len(_PARTS) + np.where(list_mask, 1, counts)
        starts = np.cumsum(lengths) - lengths
        parts = np.zeros(int(lengths.sum()), _PART)
        parts["type"] = _HEADER
        for place, kind in enumerate(_PARTS.values()):
            parts["type"][starts + place] = kind
        at = {part: starts + place for place, part in enumerate(_PARTS)}
        parts["address"][at["topic"]], parts["number"][at["partition"]] = self._topic, messages["partition"]
        parts["number"][at["flags"]] = _COPY
        for side in ("key", "value"):
            parts["address"][at[side]], parts["size"][at[side]] = messages[side], messages[f"{side}_size"]
        lists = starts[list_mask] + len(_PARTS)
        parts["type"][lists] = _HEADERS
        parts["address"][lists] = [self._header_list(headers[int(index)]) for index in np.flatnonzero(list_mask)]
        of_headers = parts["type"] == _HEADER
        parts["name"][of_headers] = _places(names)[0][part_mask]
        addresses, sizes = _places(values)
        parts["value"][of_headers], parts["value_size"][of_headers] = addresses[part_mask], sizes[part_mask]
        calls = parts.ctypes.data + starts * _PART.itemsize
        # The loop ends at the first error.
        errors = map(self.library.rd_kafka_produceva, repeat(self.handle), calls.tolist(), lengths.tolist())
        for index, error in enumerate(errors):
            if error:
                code = self.library.rd_kafka_error_code(error)
                self.library.rd_kafka_error_destroy(error)
                # librdkafka owns the lists of the records that it took.
                for address in parts["address"][lists[lists >= starts[index]]].tolist():
                    self.library.rd_kafka_headers_destroy(address)
                return KafkaError(code)
        return None

    def _header_list(self, headers: pa.Scalar[Any]) -> int:
        """The address of a ``rd_kafka_headers_t``."""
        header_list: int = self.library.rd_kafka_headers_new(len(headers))
        for header in headers.as_py():
            name, value = header["key"].encode(), header["value"]
            self.library.rd_kafka_header_add(header_list, name, len(name), value, len(value or b""))
        return header_list

    def reports(self, timeout: float) -> list[Report]:
        """The reports that come within ``timeout`` seconds. Raises what ``poll`` raises."""
        self.poll(timeout)
        return self.take_reports()

    def take_reports(self) -> list[Report]:
        """The reports that came already."""
        reports, self._reports = self._reports, []
        return reports

    def on_delivery(self, event: int) -> None:
        """Note what the broker said of some messages."""
        addresses = np.zeros(self.library.rd_kafka_event_message_count(event), np.uint64)
        count = self.library.rd_kafka_event_message_array(event, addresses.ctypes.data, len(addresses))
        if count:
            (last,) = np.frombuffer(ctypes.string_at(int(addresses[count - 1]), MESSAGE.itemsize), MESSAGE)
            offset = int(last["offset"])
            code = self.library.rd_kafka_event_error(event) or int(last["err"])
            error, partition = KafkaError(code) if code else None, int(last["partition"])
            self._reports.append(Report(partition, count, error, offset if offset >= 0 else None))

    def close(self) -> None:
        """End the producer and drop what waits to be sent. What is on its way may still arrive, as a prefix."""
        if self._topic:
            self.library.rd_kafka_purge(self.handle, _QUEUE | _IN_FLIGHT)
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
        is_valid = column.is_valid().to_numpy(zero_copy_only=False)
        addresses, sizes = addresses * is_valid, sizes * is_valid
    return addresses, sizes
