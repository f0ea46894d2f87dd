"""``intake_loops`` without compiled code: for a process that reads few records, or where numba can keep no compiled code."""

from __future__ import annotations

import ctypes
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from zync_assets.kafka.librdkafka import MESSAGE, library

Longs = npt.NDArray[np.int64]


def release(messages: Longs) -> None:
    destroy = library().rd_kafka_message_destroy
    for message in messages.tolist():
        destroy(message)


def look(messages: Longs, errors: Any, offsets: Longs, values: Longs, keys: Longs, headers: Longs) -> None:
    """See ``intake_loops.look``."""
    addresses = messages.tolist()
    found = np.frombuffer(b"".join(map(ctypes.string_at, addresses, repeat(MESSAGE.itemsize))), MESSAGE)
    errors[:], offsets[:] = found["err"], found["offset"]
    for side, parts in (("value", values), ("key", keys)):
        parts[:, 0], parts[:, 1] = found[side], found[f"{side}_size"]
    look_up, count = library().rd_kafka_message_headers, library().rd_kafka_header_cnt
    place = ctypes.c_void_p()
    at = ctypes.addressof(place)
    headers[:] = [count(place) if look_up(address, at) == 0 else 0 for address in addresses]


def gather(parts: Longs, ends: Any, data: Any) -> None:
    """See ``intake_loops.gather``."""
    sizes = np.where(parts[:, 0] != 0, parts[:, 1], 0)
    ends[0] = 0
    np.cumsum(sizes, out=ends[1:])
    data[:] = np.frombuffer(b"".join(map(ctypes.string_at, parts[:, 0].tolist(), sizes.tolist())), np.uint8)


def times(messages: Longs, pairs: Longs) -> None:
    """See ``intake_loops.times``."""
    timestamp = library().rd_kafka_message_timestamp
    kind = ctypes.c_int()
    at = ctypes.addressof(kind)
    for index, message in enumerate(messages.tolist()):
        pairs[index, 1] = timestamp(message, at)
        pairs[index, 0] = kind.value


def look_headers(messages: Longs, names: Longs, values: Longs) -> None:
    """See ``intake_loops.look_headers``."""
    functions = library()
    headers, name, value, size = (ctypes.c_void_p() for _ in range(4))
    at = [ctypes.addressof(each) for each in (headers, name, value, size)]
    place = 0
    for message in messages.tolist():
        if functions.rd_kafka_message_headers(message, at[0]) != 0:
            continue
        for number in range(functions.rd_kafka_header_cnt(headers)):
            functions.rd_kafka_header_get_all(headers, number, *at[1:])
            names[place, 0], names[place, 1] = name.value or 0, len(ctypes.string_at(name.value or 0))
            values[place, 0], values[place, 1] = value.value or 0, size.value or 0
            place += 1
