"""The innermost loops of the codecs, compiled by numba: Avro's varints and bytes, and the texts of times and of base64.

The loops of ``avro.column_reader`` move positions in place. The caller's docstring describes such a loop. ``valid`` has length 0
if every record is valid. The loops set ``odd`` for each record that needs the slow path, and return whether such a record
was found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

# numba gives its functions no types that a checker sees.
# pyright: reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportReturnType=false


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


_ONE = np.uintp(1)
_Offsets = types.Array(types.int32, 1, "C", readonly=True)


@njit(types.int64(_Bytes, types.uintp, types.int64), cache=True, nogil=True, inline="always")
def _digits(data: Any, at: Any, count: int) -> int:
    """The number of some decimal digits; negative if they are none."""
    number = 0
    for step in range(count):
        byte = np.int64(data[at + np.uintp(step)])
        number = number * 10 + byte - 48 if 48 <= byte <= 57 else -(10**9)
    return number


@njit(types.void(_Bytes, _Offsets, _Flags, _Longs, _Flags), cache=True, nogil=True)
def read_times(data: Any, ends: Any, valid: Any, micros: Any, unusual: Any) -> None:
    """Reads times such as ``2026-01-31T12:00:00.123Z`` as microseconds since 1970. ``ends``: Arrow's offsets.

    A fraction has three or six digits. A zone is ``Z``, an offset such as ``+02:00``, or absent (UTC). ``unusual``: marks the
    texts of another form, and times that are none.
    """
    for index in range(len(micros)):
        if not valid[index]:
            continue
        at, end = np.uintp(ends[index]), np.uintp(ends[index + 1])
        unusual[index] = True
        if end - at < 19:
            continue
        year, month, day = _digits(data, at, 4), _digits(data, at + np.uintp(5), 2), _digits(data, at + np.uintp(8), 2)
        hour, minute = _digits(data, at + np.uintp(11), 2), _digits(data, at + np.uintp(14), 2)
        second = _digits(data, at + np.uintp(17), 2)
        separators = data[at + np.uintp(4)] == 45 and data[at + np.uintp(7)] == 45 and data[at + np.uintp(10)] == 84
        if not separators or data[at + np.uintp(13)] != 58 or data[at + np.uintp(16)] != 58:
            continue
        # An offset must not lead to another year of Python's.
        if not (1000 < year < 9999 and 1 <= month <= 12 and 0 <= hour < 24 and 0 <= minute < 60 and 0 <= second < 60):
            continue
        leap = 1 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 0
        most = 28 + leap if month == 2 else 30 if month == 4 or month == 6 or month == 9 or month == 11 else 31
        if not 1 <= day <= most:
            continue
        at += np.uintp(19)
        fraction = np.int64(0)
        if at < end and data[at] == 46:
            at += _ONE
            first = at
            while at < end and 48 <= data[at] <= 57:
                at += _ONE
            if at - first == np.uintp(3):
                fraction = _digits(data, first, 3) * 1000
            elif at - first == np.uintp(6):
                fraction = _digits(data, first, 6)
            else:
                continue
        offset = np.int64(0)
        if end - at == _ONE and data[at] == 90:
            at += _ONE
        elif end - at == np.uintp(6) and (data[at] == 43 or data[at] == 45) and data[at + np.uintp(3)] == 58:
            hours, minutes = _digits(data, at + _ONE, 2), _digits(data, at + np.uintp(4), 2)
            if not (0 <= hours < 24 and 0 <= minutes < 60):
                continue
            offset = (hours * 60 + minutes) * (1 if data[at] == 43 else -1)
            at = end
        if at != end:
            continue
        # Days since 1970, of a year that begins in March.
        shifted_year, shifted_month = (year, month - 3) if month > 2 else (year - 1, month + 9)
        days = shifted_year * 365 + shifted_year // 4 - shifted_year // 100 + shifted_year // 400
        days += (153 * shifted_month + 2) // 5 + day - 1 - 719468
        seconds = (days * 24 + hour) * 3600 + (minute - offset) * 60 + second
        micros[index], unusual[index] = seconds * 1_000_000 + fraction, False


@njit(
    types.int64(_Bytes, _Offsets, _Flags, types.uint8[::1], types.boolean, _Ends, types.uint8[::1], _Flags),
    cache=True,
    nogil=True,
)
def read_base64(
    data: Any, ends: Any, has_value: Any, sextets: Any, empty_is_odd: bool, byte_ends: Any, content: Any, odd: Any
) -> int:
    """Reads base64 texts (see ``arrays.base64_bytes``), and returns the number of bytes in ``content``.

    ``ends``, ``byte_ends``: Arrow's offsets of the texts and of the bytes; ``sextets``: the number of each character, 255: none.
    """
    place = np.uintp(0)
    for index in range(len(has_value)):
        at, end = np.uintp(ends[index]), np.uintp(ends[index + 1])
        first, bad = place, False
        if has_value[index]:
            padding = np.uintp(0)
            if end > at and data[end - _ONE] == 61:
                padding = np.uintp(2 if data[end - np.uintp(2)] == 61 and end - at > np.uintp(1) else 1)
            bad = (end - at) % np.uintp(4) != np.uintp(0) or (at == end and empty_is_odd)
            while at < end and not bad:
                number = np.int64(0)
                for step in range(4):
                    character = at + np.uintp(step)
                    sextet = np.int64(sextets[data[character]])
                    if character >= end - padding:
                        sextet = 0
                    bad = bad or sextet == 255
                    number = number << 6 | sextet
                content[place], content[place + _ONE] = number >> 16, number >> 8 & 255
                content[place + np.uintp(2)] = number & 255
                at, place = at + np.uintp(4), place + np.uintp(3)
            place = first if bad else place - padding
        odd[index] = bad
        byte_ends[index + 1] = place
    return int(place)
