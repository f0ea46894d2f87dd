"""Loops over librdkafka's messages, compiled by numba. A Python object per message would cost more than the loops.

The import takes a quarter of a second. Numba keeps the compiled code beside this module, or in the user's cache.

A message is an address, ``rd_kafka_message_t *``. The caller must ``release`` each message exactly once.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numpy as np
from numba import njit, types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from zync_assets.kafka.librdkafka import NAME_SIZE, addresses

# numba gives its functions no types that a checker sees.
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false


for _name, _address in addresses():
    llvmlite.binding.add_symbol(_name, _address)

_POINTER, _LONG, _INT, _SIZE = types.uintp, types.int64, types.int32, types.uint64
_timestamp = types.ExternalFunction("rd_kafka_message_timestamp", _LONG(_POINTER, _POINTER))
_headers = types.ExternalFunction("rd_kafka_message_headers", _INT(_POINTER, _POINTER))
_destroy = types.ExternalFunction("rd_kafka_message_destroy", types.void(_POINTER))
_header_count = types.ExternalFunction("rd_kafka_header_cnt", _SIZE(_POINTER))
_header = types.ExternalFunction("rd_kafka_header_get_all", _INT(_POINTER, _SIZE, _POINTER, _POINTER, _POINTER))
_copy = types.ExternalFunction("memcpy", _POINTER(_POINTER, _POINTER, _SIZE))

_Longs, _Ints, _Bytes = types.int64[::1], types.int32[::1], types.uint8[::1]


@intrinsic
def _words(typing_context: Any, address: Any) -> Any:
    """An address as a pointer to words of 64 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int64)(types.uintp), generate


@njit(types.void(_Longs), cache=True, nogil=True)
def release(messages: Any) -> None:
    for message in messages:
        _destroy(np.uintp(message))


@njit(
    types.void(_Longs, _Ints, _Longs, types.int64[:, ::1], types.int64[:, ::1], _Longs, _Longs), cache=True, nogil=True
)
def look(messages: Any, errors: Any, offsets: Any, values: Any, keys: Any, lists: Any, headers: Any) -> None:
    """Fill the arrays with each message's error code, offset, value and key (address and size), and with the address of its
    list of headers and the number of headers."""
    scratch = np.zeros(1, np.int64)
    scratch_address = np.uintp(scratch.ctypes.data)
    for index in range(len(messages)):
        message = np.uintp(messages[index])
        words = carray(_words(message), 8)
        errors[index] = np.int32(words[0] & 0xFFFFFFFF)
        values[index, 0], values[index, 1] = words[3], words[4]
        keys[index, 0], keys[index, 1] = words[5], words[6]
        offsets[index] = words[7]
        headers[index] = 0
        if errors[index] == 0 and _headers(message, scratch_address) == 0:
            lists[index] = scratch[0]
            headers[index] = np.int64(_header_count(np.uintp(scratch[0])))


@njit(types.void(types.int64[:, ::1], _Ints, _Bytes), cache=True, nogil=True)
def gather(parts: Any, ends: Any, data: Any) -> None:
    """The bytes at these addresses, of these sizes, one after the other, with Arrow's offsets."""
    place = np.int64(0)
    ends[0] = 0
    start = data.ctypes.data
    for index in range(len(parts)):
        size = parts[index, 1] if parts[index, 0] != 0 else 0
        if size > 0:
            _copy(np.uintp(start + place), np.uintp(parts[index, 0]), np.uint64(size))
            place += size
        ends[index + 1] = np.int32(place)


@njit(types.void(_Longs, types.int64[:, ::1]), cache=True, nogil=True)
def times(messages: Any, pairs: Any) -> None:
    """Each message's type of timestamp, and the timestamp."""
    scratch = np.zeros(1, np.int64)
    scratch_address = np.uintp(scratch.ctypes.data)
    for index in range(len(messages)):
        pairs[index, 1] = _timestamp(np.uintp(messages[index]), scratch_address)
        pairs[index, 0] = scratch[0] & 0xFFFFFFFF


@njit(types.void(_Longs, _Longs, types.int64[:, ::1], types.int64[:, ::1]), cache=True, nogil=True)
def look_headers(lists: Any, headers: Any, names: Any, values: Any) -> None:
    """Address and size of the name and of the value of each header in the lists, which hold so many headers."""
    scratch = np.zeros(3, np.int64)
    at = scratch.ctypes.data
    place = 0
    for index in range(len(lists)):
        for number in range(headers[index]):
            _header(np.uintp(lists[index]), np.uint64(number), np.uintp(at), np.uintp(at + 8), np.uintp(at + 16))
            names[place, 0] = scratch[0]
            names[place, 1] = carray(_words(np.uintp(scratch[0] - NAME_SIZE)), 1)[0]
            values[place, 0] = scratch[1]
            values[place, 1] = scratch[2]
            place += 1
