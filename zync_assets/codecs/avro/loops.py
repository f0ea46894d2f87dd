"""The innermost loops of ``column_reader``, compiled by numba. The callers' docstrings describe the loops.

``valid`` has length 0 if every record is valid. The loops move positions in place. They set ``odd`` for each record that
needs the slow path, and return whether such a record was found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

# numba gives its functions no types that a checker sees.
# pyright: reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false


_Bytes = types.Array(types.uint8, 1, "C", readonly=True)
_Longs, _Ends, _Flags = types.int64[::1], types.int32[::1], types.boolean[::1]

_VARINTS_SIGNATURE = types.boolean(_Bytes, _Longs, _Longs, _Flags, _Longs, _Flags, types.boolean)


@njit(_VARINTS_SIGNATURE, cache=True, nogil=True)
def read_varints(data: Any, pos: Any, end: Any, valid: Any, values: Any, odd: Any, lengths: bool) -> bool:
    """Reads a varint at each position. ``lengths``: the varints are lengths of bytes that the record must have. The loop calls
    no function for a single varint. A call would cost more than the read, because numba counts the references to each array
    argument."""
    any_odd = False
    all_ = len(valid) == 0
    for index in range(len(pos)):
        if not all_ and not valid[index]:
            values[index] = 0
            continue
        # No index is negative: numba need not look.
        at = np.uintp(pos[index])
        byte = data[at]
        raw = np.uint64(byte & 0x7F)
        is_good = True
        if byte >= 0x80:
            shift = np.uint64(7)
            while byte >= 0x80 and shift < np.uint64(70):
                at += np.uintp(1)
                byte = data[at]
                raw |= np.uint64(byte & 0x7F) << shift
                shift += np.uint64(7)
            is_good = byte < 0x80 and (shift < np.uint64(70) or byte <= 1)
        value = np.int64(raw >> np.uint64(1)) ^ -np.int64(raw & np.uint64(1))
        after = np.int64(at) + 1
        if after > end[index]:
            is_good = False
            after = end[index]
        if lengths and (not is_good or value < 0 or value > end[index] - after):
            is_good = False
            value = 0
        values[index] = value
        pos[index] = after
        if not is_good:
            odd[index] = any_odd = True
    return any_odd


@njit(types.void(_Bytes, _Longs, _Longs, _Ends, types.uint8[::1]), cache=True, nogil=True)
def take_bytes(data: Any, pos: Any, lengths: Any, ends: Any, content: Any) -> None:
    """``ends``: Arrow's offsets of what is taken."""
    for index in range(len(pos)):
        place, at = np.uintp(ends[index]), np.uintp(pos[index])
        for step in range(np.uintp(lengths[index])):
            content[place + step] = data[at + step]
        pos[index] += lengths[index]


@njit(types.boolean(_Bytes, _Longs, _Longs, _Flags, types.int64, _Flags, _Flags), cache=True, nogil=True)
def read_tags(data: Any, pos: Any, end: Any, valid: Any, null_index: int, has_value: Any, odd: Any) -> bool:
    """``has_value``: the value's branch, not the null's, by a tag of one byte."""
    any_odd = False
    for index in range(len(pos)):
        if len(valid) and not valid[index]:
            has_value[index] = False
            continue
        tag = np.int64(data[np.uintp(pos[index])])
        has_value[index] = tag == 2 * (1 - null_index)
        if pos[index] >= end[index]:
            odd[index] = any_odd = True
            continue
        if not has_value[index] and tag != 2 * null_index:
            odd[index] = any_odd = True
        pos[index] += 1
    return any_odd
