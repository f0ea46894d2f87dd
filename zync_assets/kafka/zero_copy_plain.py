"""``zero_copy_loops`` without compiled code: for a process that reads few records, or where numba can keep no compiled code."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from zync_assets.kafka.librdkafka import MESSAGE, quick_library

Longs = npt.NDArray[np.int64]

_bytes_at: Any = ctypes.pythonapi.PyBytes_FromStringAndSize
_bytes_at.restype, _bytes_at.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_ssize_t]


def release(messages: Longs) -> None:
    destroy = quick_library().rd_kafka_message_destroy
    for message in messages.tolist():
        destroy(message)


def look(messages: Longs, errors: Any, offsets: Longs, values: Longs, keys: Longs, headers: Longs) -> None:
    """See ``zero_copy_loops.look``."""
    found = np.frombuffer(b"".join([_bytes_at(address, MESSAGE.itemsize) for address in messages.tolist()]), MESSAGE)
    errors[:], offsets[:] = found["err"], found["offset"]
    for side, parts in (("value", values), ("key", keys)):
        parts[:, 0], parts[:, 1] = found[side], found[f"{side}_size"]
    look_up, count = quick_library().rd_kafka_message_headers, quick_library().rd_kafka_header_cnt
    place = ctypes.c_void_p()
    at = ctypes.addressof(place)
    headers[:] = [0 if look_up(address, at) else count(place) for address in messages.tolist()]


def gather(parts: Longs, ends: Any, data: Any) -> None:
    """See ``zero_copy_loops.gather``."""
    sizes = np.where(parts[:, 0] != 0, parts[:, 1], 0)
    ends[0] = 0
    np.cumsum(sizes, out=ends[1:])
    there = sizes != 0
    data[:] = np.frombuffer(b"".join(map(_bytes_at, parts[there, 0].tolist(), sizes[there].tolist())), np.uint8)


def times(messages: Longs, pairs: Longs) -> None:
    """See ``zero_copy_loops.times``."""
    timestamp = quick_library().rd_kafka_message_timestamp
    kind = ctypes.c_int()
    at = ctypes.addressof(kind)
    # The call comes before the look at ``kind``.
    found = [(timestamp(message, at), kind.value) for message in messages.tolist()]
    pairs[:] = np.array(found, np.int64).reshape(-1, 2)[:, ::-1]


def look_headers(messages: Longs, names: Longs, values: Longs) -> None:
    """See ``zero_copy_loops.look_headers``."""
    functions = quick_library()
    look_up, count, get = (
        functions.rd_kafka_message_headers,
        functions.rd_kafka_header_cnt,
        functions.rd_kafka_header_get_all,
    )
    headers, out = ctypes.c_void_p(), (ctypes.c_uint64 * 3)()
    at, first = ctypes.addressof(headers), ctypes.addressof(out)
    found: list[list[int]] = []
    for message in messages.tolist():
        if look_up(message, at):
            continue
        for number in range(count(headers)):
            get(headers, number, first, first + 8, first + 16)
            found.append(out[:])
    table = np.array(found, np.uint64).astype(np.int64).reshape(-1, 3)
    names[:, 0], values[:] = table[:, 0], table[:, 1:]
    names[:, 1] = [len(ctypes.string_at(name)) for name in table[:, 0].tolist()]
