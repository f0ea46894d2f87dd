"""``zero_copy_loops`` without compiled code: for a process that reads few records, or where numba can keep no compiled code.

A call through ctypes costs as much as a Python object. NumPy reads whole arrays of messages. ctypes makes only the calls that
rdkafka.h demands for each message, from ``map`` instead of a Python loop.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.codecs.arrays import numbers
from zync_assets.kafka.librdkafka import MESSAGE, NAME_SIZE, quick_library

Longs = npt.NDArray[np.int64]

_bytes_at: Any = ctypes.pythonapi.PyBytes_FromStringAndSize
_bytes_at.restype, _bytes_at.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_ssize_t]

_Words: Any = ctypes.c_int64 * (1 << 44)
"""All memory above an address, for NumPy to read items from."""

_GAP = 1024
"""Bytes between two values that are copied along with them. A further call would cost more. The values' own pages hold all
bytes between them, for a gap is smaller than a page."""


def release(messages: Longs) -> None:
    """See ``zero_copy_loops.release``."""
    deque(map(quick_library().rd_kafka_message_destroy, messages.tolist()), maxlen=0)


def look(
    messages: Longs, errors: Any, offsets: Longs, values: Longs, keys: Longs, lists: Longs, headers: Longs
) -> None:
    """See ``zero_copy_loops.look``."""
    headers[:] = 0
    if not len(messages):
        return
    first = messages.min()
    memory = np.frombuffer(_Words.from_address(int(first)), np.int64)
    fields = memory[((messages - first) >> 3)[:, None] + np.arange(MESSAGE.itemsize // 8)].view(MESSAGE)[:, 0]
    errors[:], offsets[:] = fields["err"], fields["offset"]
    for side, parts in (("value", values), ("key", keys)):
        parts[:, 0], parts[:, 1] = fields[side], fields[f"{side}_size"]
    functions = quick_library()
    codes = list(map(functions.rd_kafka_message_headers, messages.tolist(), _item_addresses(lists)))
    has_headers = (np.array(codes) == 0) & (errors == 0)
    headers[has_headers] = list(map(functions.rd_kafka_header_cnt, lists[has_headers].tolist()))


def gather(parts: Longs, ends: Any, data: Any) -> None:
    """See ``zero_copy_loops.gather``."""
    sizes = np.where(parts[:, 0] != 0, parts[:, 1], 0)
    ends[0] = 0
    np.cumsum(sizes, out=ends[1:])
    nonempty = np.flatnonzero(sizes)
    if not len(nonempty):
        return
    order = np.argsort(parts[nonempty, 0], kind="stable")
    starts, sizes = parts[nonempty, 0][order], sizes[nonempty][order]
    stops = starts + sizes
    # Values that lie close to each other are copied in one piece.
    breaks = np.flatnonzero(starts[1:] - stops[:-1] > _GAP) + 1
    first, last = np.append(0, breaks), np.append(breaks, len(starts)) - 1
    lengths = stops[last] - starts[first]
    pieces = b"".join(map(_bytes_at, starts[first].tolist(), lengths.tolist()))
    shifts = np.repeat(np.cumsum(lengths) - lengths - starts[first], last - first + 1)
    # Arrow's values are the pieces' values in turn with the bytes between them.
    bounds = np.empty(2 * len(starts), np.int64)
    bounds[::2], bounds[1::2] = starts + shifts, stops + shifts
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(pieces)]
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order)) * 2
    copies = pa.Array.from_buffers(pa.large_binary(), len(bounds) - 1, buffers).take(numbers(places, pa.int64()))
    data[:] = np.frombuffer(copies.buffers()[2], np.uint8, len(data))


def times(messages: Longs, pairs: Longs) -> None:
    """See ``zero_copy_loops.times``."""
    kinds = np.zeros(len(messages), np.int64)
    pairs[:, 1] = list(map(quick_library().rd_kafka_message_timestamp, messages.tolist(), _item_addresses(kinds)))
    pairs[:, 0] = kinds & 0xFFFFFFFF


def look_headers(lists: Longs, headers: Longs, names: Longs, values: Longs) -> None:
    """See ``zero_copy_loops.look_headers``."""
    total = len(names)
    owners = np.repeat(lists, headers)
    numbers = np.arange(total) - np.repeat(np.cumsum(headers) - headers, headers)
    parts = np.zeros((3, total), np.int64)
    get = quick_library().rd_kafka_header_get_all
    deque(map(get, owners.tolist(), numbers.tolist(), *map(_item_addresses, parts)), maxlen=0)
    names[:, 0], values[:] = parts[0], parts[1:].T
    sizes = parts[0] - NAME_SIZE
    first = sizes.min()
    names[:, 1] = np.frombuffer(_Words.from_address(int(first)), np.int64)[(sizes - first) >> 3]


def _item_addresses(words: Longs) -> range:
    """The addresses of an array's items."""
    first = words.ctypes.data
    return range(first, first + 8 * len(words), 8)
