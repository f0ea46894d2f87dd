"""The librdkafka that confluent-kafka was linked with: its own functions, for what the client does a record at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from confluent_kafka import (
    Consumer,
    Producer,
    cimpl,  # pyright: ignore[reportAttributeAccessIssue]
)

TRIED = frozenset({"2.16.0"})
"""Versions of confluent-kafka whose objects are known to be laid out as ``handle_of`` reads them. With another one records go
by the client's own methods, until the tests of ``handover`` and ``intake`` have passed with it and it is added here."""

MESSAGE = {
    "err": ("<i4", 0),
    "partition": ("<i4", 16),
    "value": ("u8", 24),
    "value_size": ("u8", 32),
    "key": ("u8", 40),
    "key_size": ("u8", 48),
    "offset": ("<i8", 56),
}
"""Field → (numpy's type, place) of ``rd_kafka_message_t`` (rdkafka.h) on a machine of 64 bits."""
MESSAGE_SIZE = 72

_POINTER, _INT32 = ctypes.c_void_p, ctypes.c_int32
_FUNCTIONS: Mapping[str, tuple[Any, list[Any]]] = {
    "rd_kafka_opaque": (_POINTER, [_POINTER]),
    "rd_kafka_topic_new": (_POINTER, [_POINTER, ctypes.c_char_p, _POINTER]),
    "rd_kafka_topic_destroy": (None, [_POINTER]),
    "rd_kafka_produce_batch": (ctypes.c_int, [_POINTER, _INT32, ctypes.c_int, _POINTER, ctypes.c_int]),
    "rd_kafka_queue_get_partition": (_POINTER, [_POINTER, ctypes.c_char_p, _INT32]),
    "rd_kafka_queue_forward": (None, [_POINTER, _POINTER]),
    "rd_kafka_queue_destroy": (None, [_POINTER]),
    "rd_kafka_consume_batch_queue": (ctypes.c_ssize_t, [_POINTER, ctypes.c_int, _POINTER, ctypes.c_size_t]),
    "rd_kafka_message_timestamp": (ctypes.c_int64, [_POINTER, _POINTER]),
    "rd_kafka_message_headers": (ctypes.c_int, [_POINTER, _POINTER]),
    "rd_kafka_message_destroy": (None, [_POINTER]),
    "rd_kafka_header_cnt": (ctypes.c_size_t, [_POINTER]),
    "rd_kafka_header_get_all": (ctypes.c_int, [_POINTER, ctypes.c_size_t, _POINTER, _POINTER, _POINTER]),
}


def _library() -> ctypes.CDLL | None:
    """librdkafka's functions, typed; None for an untried version of confluent-kafka, or a build that hides the functions."""
    if ctypes.sizeof(ctypes.c_void_p) != 8 or version("confluent-kafka") not in TRIED:
        return None
    library = ctypes.CDLL(cimpl.__file__)
    try:
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError:
        return None
    return library


LIBRARY = _library()


def handle_of(client: Producer | Consumer) -> int | None:
    """The address of a client's ``rd_kafka_t``; None if it is not found.

    The client keeps the address right after the header of every Python object. The handle's opaque pointer must be the
    client, which proves that the address is right.
    """
    if LIBRARY is None:
        return None
    found = ctypes.c_void_p.from_address(id(client) + object.__basicsize__).value
    return found if found and LIBRARY.rd_kafka_opaque(found) == id(client) else None


def addresses() -> Iterator[tuple[str, int]]:
    """Each function's name and address, for compiled code."""
    assert LIBRARY is not None
    for name in _FUNCTIONS:
        found = ctypes.cast(getattr(LIBRARY, name), ctypes.c_void_p).value
        assert found is not None
        yield name, found
