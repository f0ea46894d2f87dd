"""Records handed to librdkafka straight from Arrow's memory, by librdkafka's own ``rd_kafka_produce_batch``.

confluent-kafka's ``produce_batch`` takes a dict a record, and its reports take Python's lock a record: together that costs
more than librdkafka's own work. Here a record costs Python nothing, and none is reported but through the producer's fatal
error: who wants reports sends some of the records by ``Producer.produce``, which keeps the order.
"""

from __future__ import annotations

import ctypes
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import (
    KafkaError,
    Producer,
    cimpl,  # pyright: ignore[reportAttributeAccessIssue]
)

TRIED = frozenset({"2.16.0"})
"""Versions of confluent-kafka whose objects are known to be laid out as ``_handle`` reads them. With another one records go
by ``Producer.produce``, until the tests of this module have passed with it and it is added here."""

_COPY = 0x2
"""RD_KAFKA_MSG_F_COPY: librdkafka copies the value; it always copies the key."""

_MESSAGE = np.dtype(
    {
        "names": ["err", "partition", "value", "value_size", "key", "key_size"],
        "formats": ["<i4", "<i4", "u8", "u8", "u8", "u8"],
        "offsets": [0, 16, 24, 32, 40, 48],
        "itemsize": 72,
    }
)
"""``rd_kafka_message_t`` (rdkafka.h) on a machine of 64 bits; what is left out stays zero."""


def _library() -> ctypes.CDLL | None:
    """The librdkafka that the client was linked with; None where it does not show its functions."""
    if ctypes.sizeof(ctypes.c_void_p) != 8 or version("confluent-kafka") not in TRIED:
        return None
    library = ctypes.CDLL(cimpl.__file__)
    try:
        library.rd_kafka_opaque.argtypes = [ctypes.c_void_p]
        library.rd_kafka_opaque.restype = ctypes.c_void_p
        library.rd_kafka_topic_new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        library.rd_kafka_topic_new.restype = ctypes.c_void_p
        library.rd_kafka_topic_destroy.argtypes = [ctypes.c_void_p]
        library.rd_kafka_topic_destroy.restype = None
        library.rd_kafka_produce_batch.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_int,
        ]
        library.rd_kafka_produce_batch.restype = ctypes.c_int
    except AttributeError:
        return None
    return library


_librdkafka = _library()


class Handover:
    """Hands records over to one partition, by a producer that must outlive this."""

    def __init__(self, producer: Producer, topic: str, partition: int) -> None:
        self._handle = _handle(producer)
        self._topic = topic.encode()
        self._partition = partition

    @property
    def possible(self) -> bool:
        """Where it is not, records go by ``Producer.produce``, one by one."""
        return self._handle is not None

    def hand_over(self, records: pa.RecordBatch) -> KafkaError | None:
        """Queue the records (columns ``key`` and ``value``, binary) in order; the error of the first that was refused."""
        assert _librdkafka is not None
        messages = np.zeros(len(records), _MESSAGE)
        messages["partition"] = self._partition
        # Held until librdkafka has copied what lies in them.
        columns = {name: records[name].cast(pa.binary()) for name in ("key", "value")}
        for name, column in columns.items():
            messages[name], messages[f"{name}_size"] = _places(column)
        topic = _librdkafka.rd_kafka_topic_new(self._handle, self._topic, None)
        try:
            _librdkafka.rd_kafka_produce_batch(topic, self._partition, _COPY, messages.ctypes.data, len(messages))
        finally:
            _librdkafka.rd_kafka_topic_destroy(topic)
        refused = np.flatnonzero(messages["err"])
        return KafkaError(int(messages["err"][refused[0]])) if len(refused) else None


def _handle(producer: Producer) -> int | None:
    """The ``rd_kafka_t`` of a producer, which the client keeps right after what every Python object begins with, and whose
    opaque is the producer; None where that is not so."""
    if _librdkafka is None:
        return None
    found = ctypes.c_void_p.from_address(id(producer) + object.__basicsize__).value
    return found if found and _librdkafka.rd_kafka_opaque(found) == id(producer) else None


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
