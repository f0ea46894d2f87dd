"""The loops of ``scan``, compiled by numba: one pass over JSON texts (RFC 8259), and the copies of their strings.

A scan never judges a text. It marks each text as odd that it does not read with certainty, and another reader reads the text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

# numba gives its functions no types that a checker sees.
# pyright: reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportReturnType=false

STRUCT, INT, FLOAT, BOOL, STRING, DECIMAL, UNKNOWN = range(7)
"""The kinds of a node."""
ABSENT, VALUE, NULL, TEXT, ESCAPED = range(5)
"""The states of a node in a text. TEXT: a number that the loop leaves to Arrow, which rounds correctly.
ESCAPED: a string with escaped characters."""

_DEPTH = 64
"""A text with so many open brackets is odd."""
_MOST_DIGITS = 400
"""A number with so many digits is odd."""
_MOST = 2**63 - 1
"""The greatest integer."""
_EXACT = 10**15
"""A double is exact for each smaller integer. The quotient of the integer and a power of ten is then rounded once."""
DIGITS = 18
"""An integer of 64 bits holds each number of so many digits."""

_Bytes = types.Array(types.uint8, 1, "C", readonly=True)
_Longs, _Small, _Flags = types.int64[::1], types.uint8[::1], types.boolean[::1]

_ONE = np.uintp(1)
"""No place is negative: numba need not look, where places and steps are unsigned."""

_QUOTE, _BACKSLASH, _COMMA, _COLON, _MINUS, _POINT, _ZERO, _NINE = tuple(b'"\\,:-.09')
_OBJECT, _OBJECT_END, _LIST, _LIST_END, _N, _T, _F, _U = tuple(b"{}[]ntfu")
"""Characters. The last four begin ``null``, ``true``, ``false``, and a character's number after a backslash."""
_ESCAPES = tuple(b'"\\/bfnrt')
"""The characters after a backslash, but for a character's number."""
_STOPS = np.array([byte < 32 or byte in b'"\\' for byte in range(256)])
"""The characters at which a string is no longer plain."""

_FIRST, _KEY, _ITEM, _AFTER = range(4)
"""The places in a text: after an opening bracket, at a key, at a value, after a value."""


@njit(types.int64(_Bytes, types.int64), cache=True, nogil=True)
def _hex(data: Any, at: int) -> int:
    """The number of four hexadecimal digits; -1 if they are none."""
    number = 0
    for step in range(4):
        byte = np.int64(data[at + step])
        if 48 <= byte <= 57:
            digit = byte - 48
        elif 65 <= byte <= 70:
            digit = byte - 55
        elif 97 <= byte <= 102:
            digit = byte - 87
        else:
            return -1
        number = number * 16 + digit
    return number


@njit(types.UniTuple(types.int64, 2)(_Bytes, types.int64, types.int64), cache=True, nogil=True)
def _string(data: Any, at: int, end: int) -> tuple[int, int]:
    """The place of the closing quote, and the bytes of the string in UTF-8; -1 if the string is odd. ``at``: its first byte."""
    length = 0
    while at < end:
        byte = data[at]
        if byte == _QUOTE:
            return at, length
        if byte < 32:
            break
        if byte != _BACKSLASH:
            at, length = at + 1, length + 1
            continue
        if at + 1 >= end:
            break
        byte = data[at + 1]
        if byte == _U:
            code = _hex(data, at + 2) if at + 6 <= end else -1
            at += 6
            if 0xD800 <= code < 0xDC00:
                pair = at + 6 <= end and data[at] == _BACKSLASH and data[at + 1] == _U
                low = _hex(data, at + 2) if pair else -1
                if not 0xDC00 <= low < 0xE000:
                    break
                at, length = at + 6, length + 4
            elif code < 0 or 0xDC00 <= code < 0xE000:
                break
            else:
                length += 1 if code < 0x80 else 2 if code < 0x800 else 3
        elif byte in _ESCAPES:
            at, length = at + 2, length + 1
        else:
            break
    return -1, 0


@njit(types.UniTuple(types.int64, 4)(_Bytes, types.int64, types.int64), cache=True, nogil=True)
def _number(data: Any, at: int, end: int) -> tuple[int, int, int, int]:
    """The place after a number, its digits as an integer, the digits of its fraction (-1: none, -2: the number has an exponent
    or too many digits), and its sign. The place is -1 if the number is odd."""
    sign, digits, count, places, large = 1, np.int64(0), 0, -1, False
    if data[at] == _MINUS:
        sign, at = -1, at + 1
    first = at
    while at < end and _ZERO <= data[at] <= _NINE:
        digit = np.int64(data[at]) - _ZERO
        large = (
            large
            or count > 18
            or (count == 18 and digits >= _MOST // 10 and (digits > _MOST // 10 or digit > _MOST % 10))
        )
        digits = digits if large else digits * 10 + digit
        at, count = at + 1, count + 1
    if count == 0 or (count > 1 and data[first] == _ZERO):
        return -1, 0, 0, 0
    if at < end and data[at] == _POINT:
        at, places = at + 1, 0
        while at < end and _ZERO <= data[at] <= _NINE:
            large = large or count >= DIGITS
            digits = digits if large else digits * 10 + (np.int64(data[at]) - _ZERO)
            at, count, places = at + 1, count + 1, places + 1
        if places == 0:
            return -1, 0, 0, 0
    if count >= _MOST_DIGITS:
        return -1, 0, 0, 0
    if large:
        places = -2
    if at < end and (data[at] == 101 or data[at] == 69):
        at, places = at + 1, -2
        if at < end and (data[at] == 43 or data[at] == _MINUS):
            at += 1
        first = at
        while at < end and _ZERO <= data[at] <= _NINE:
            at += 1
        # A longer exponent has no meaning in a decimal of Python.
        if not 0 < at - first <= 4:
            return -1, 0, 0, 0
    return at, digits, places, sign


@njit(types.int64(*[types.int64] * 4, _Longs), cache=True, nogil=True)
def _unscaled(digits: int, places: int, scale: int, most: int, tens: Any) -> int:
    """The digits of a decimal with ``scale`` places; -1 if a number (``_number``) does not fit. ``tens``: the powers of ten."""
    missing = scale - max(places, 0)
    return -1 if places == -2 or missing < 0 or digits > most // tens[missing] else digits * tens[missing]


@njit(types.boolean(_Bytes, types.int64), cache=True, nogil=True)
def _is_word(data: Any, at: int) -> bool:
    """Whether ``null``, ``true`` or ``false`` begins at a place with the word's first letter."""
    first, second, third, fourth = data[at], data[at + 1], data[at + 2], data[at + 3]
    if first == _N:
        return second == 117 and third == 108 and fourth == 108
    if first == _T:
        return second == 114 and third == 117 and fourth == 101
    return second == 97 and third == 108 and fourth == 115 and data[at + 4] == 101


@njit(types.int64(_Bytes, types.uintp, types.uintp, _Bytes, _Longs, types.int64, types.int64), cache=True, nogil=True)
def _child(data: Any, start: Any, end: Any, names: Any, name_ends: Any, first: int, count: int) -> int:
    """The child with the name ``data[start:end]``; -1 if there is none. ``first``, ``count``: of the children."""
    for node in range(first, first + count):
        name, at = np.uintp(name_ends[node]), start
        if np.uintp(name_ends[node + 1]) - name != end - start:
            continue
        while at < end and data[at] == names[name]:
            at, name = at + _ONE, name + _ONE
        if at == end:
            return node
    return -1


@njit(types.void(_Bytes, _Longs, _Small, *[_Longs] * 2, _Bytes, *[_Longs] * 6, _Small, _Flags), cache=True, nogil=True)
def scan_texts(
    data: Any, bounds: Any, kinds: Any, firsts: Any, counts: Any, names: Any, name_ends: Any, least: Any, most: Any, scales: Any,
    numbers: Any, lengths: Any, states: Any, odd: Any,
) -> None:  # fmt: skip
    """Reads the texts ``data[bounds[i]:bounds[i + 1]]``. Node 0 is the whole text.

    ``kinds``, ``firsts``, ``counts``: of each node: its kind, its first child and the number of its children; ``name_ends``: the
    bounds of its name in ``names``; ``least``, ``most``: of its integers, of a decimal without its point; ``scales``: of its
    decimals, at most 18. ``odd``: by text. The other results are by node, and then by text:

    ``states``; ``numbers``: an integer, a boolean, a decimal without its point, the bits of a double, or the place of a string or
    of a number's text in ``data``; ``lengths``: of the string in UTF-8, or of the number's text.
    """
    nodes, guesses, lists = np.zeros(_DEPTH, np.int64), np.zeros(_DEPTH, np.int64), np.zeros(_DEPTH, np.bool_)
    powers, tens = 10.0 ** np.arange(DIGITS + 1), 10 ** np.arange(DIGITS + 1)
    real = np.zeros(1, np.float64)
    bits = real.view(np.int64)
    count = np.uintp(len(odd))
    for text in range(len(odd)):
        at, end = np.uintp(bounds[text]), np.uintp(bounds[text + 1])
        place, target, cell, good = _ITEM, 0, np.uintp(text), False
        # The open bracket: its node (-1: unknown), its child to expect, whether it is a list.
        depth, node, guess, in_list = 0, -1, 0, False
        while True:
            while at < end and data[at] <= 32 and (data[at] == 32 or data[at] == 10 or data[at] == 13 or data[at] == 9):
                at += _ONE
            if at >= end:
                # The text ends well after its only value.
                good = depth == 0 and place == _AFTER
                break
            byte = data[at]
            if place in (_AFTER, _FIRST):
                if depth == 0:
                    break
                if byte == (_LIST_END if in_list else _OBJECT_END):
                    at, depth, place = at + _ONE, depth - 1, _AFTER
                    node, guess, in_list = nodes[depth], guesses[depth], lists[depth]
                    continue
                if place == _AFTER:
                    if byte != _COMMA:
                        break
                    at += _ONE
                place, target = _ITEM if in_list else _KEY, -1
                continue
            if place == _KEY:
                if byte != _QUOTE:
                    break
                at += _ONE
                close = at
                if node >= 0:
                    # Most texts have their fields in one order.
                    child = firsts[node] + (guess if guess < counts[node] else 0)
                    name, name_end = np.uintp(name_ends[child]), np.uintp(name_ends[child + 1])
                    while close < end and name < name_end and data[close] == names[name]:
                        close, name = close + _ONE, name + _ONE
                    target = child if name == name_end and close < end and data[close] == _QUOTE else -1
                if target < 0:
                    close = at
                    while close < end and not _STOPS[data[close]]:
                        close += _ONE
                    # A name with an escaped character is odd.
                    if close >= end or data[close] != _QUOTE:
                        break
                    if node >= 0:
                        target = _child(data, at, close, names, name_ends, firsts[node], counts[node])
                if target >= 0:
                    guess, cell = target - firsts[node] + 1, np.uintp(target) * count + np.uintp(text)
                    if states[cell] != ABSENT:
                        break  # the field comes twice
                at = close + _ONE
                while (
                    at < end
                    and data[at] <= 32
                    and (data[at] == 32 or data[at] == 10 or data[at] == 13 or data[at] == 9)
                ):
                    at += _ONE
                if at >= end or data[at] != _COLON:
                    break
                at, place = at + _ONE, _ITEM
                continue
            kind = kinds[target] if target >= 0 else UNKNOWN
            if byte in (_OBJECT, _LIST):
                if depth == _DEPTH or (kind != UNKNOWN and (byte == _LIST or kind != STRUCT)):
                    break
                if kind == STRUCT:
                    states[cell] = VALUE
                nodes[depth], guesses[depth], lists[depth] = node, guess, in_list
                at, depth, place = at + _ONE, depth + 1, _FIRST
                node, guess, in_list = target, 0, byte == _LIST
                continue
            if depth == 0:
                break  # no object
            if byte == _QUOTE:
                at += _ONE
                close = at
                while close < end and not _STOPS[data[close]]:
                    close += _ONE
                if close >= end:
                    break
                length, state = np.int64(close - at), VALUE
                if data[close] != _QUOTE:
                    after, length = _string(data, np.int64(at), np.int64(end))
                    if after < 0:
                        break
                    close, state = np.uintp(after), ESCAPED
                if kind == STRING:
                    states[cell], numbers[cell], lengths[cell] = state, at, length
                elif kind == DECIMAL:
                    # A decimal may stand in quotes.
                    after, digits, places, sign = _number(data, np.int64(at), np.int64(close))
                    number = _unscaled(digits, places, scales[target], most[target], tens)
                    if after != close or number < 0:
                        break
                    states[cell], numbers[cell] = VALUE, sign * number
                elif kind != UNKNOWN:
                    break
                at = close + _ONE
            elif byte in (_N, _T, _F):
                word_end = at + np.uintp(5 if byte == _F else 4)
                if word_end > end or not _is_word(data, np.int64(at)):
                    break
                if kind != UNKNOWN:
                    if byte != _N and kind != BOOL:
                        break
                    states[cell], numbers[cell] = NULL if byte == _N else VALUE, byte == _T
                at = word_end
            elif byte == _MINUS or _ZERO <= byte <= _NINE:
                after, digits, places, sign = _number(data, np.int64(at), np.int64(end))
                if after < 0:
                    break
                if kind == INT:
                    number = digits * sign
                    if places != -1 or number < least[target] or number > most[target]:
                        break
                    states[cell], numbers[cell] = VALUE, number
                elif kind == FLOAT and (places == -2 or digits >= _EXACT):
                    states[cell], numbers[cell], lengths[cell] = TEXT, at, after - np.int64(at)
                elif kind == FLOAT:
                    real[0] = sign * np.float64(digits) / powers[max(places, 0)]
                    states[cell], numbers[cell] = VALUE, bits[0]
                elif kind == DECIMAL:
                    number = _unscaled(digits, places, scales[target], most[target], tens)
                    if number < 0:
                        break
                    states[cell], numbers[cell] = VALUE, sign * number
                elif kind != UNKNOWN:
                    break
                at = np.uintp(after)
            else:
                break
            place = _AFTER
        if not good:
            odd[text] = True
            states[text :: len(odd)] = ABSENT


@njit(types.void(_Bytes, _Small, _Longs, _Longs, types.int32[::1], _Small), cache=True, nogil=True)
def copy_strings(data: Any, states: Any, starts: Any, lengths: Any, ends: Any, content: Any) -> None:
    """The strings at ``starts``, without their escapes. ``lengths``: in UTF-8, 0 for no string; ``ends``: Arrow's offsets."""
    for index in range(len(starts)):
        at, place, end = np.uintp(starts[index]), np.uintp(ends[index]), np.uintp(ends[index + 1])
        if states[index] != ESCAPED:
            for step in range(end - place):
                content[place + step] = data[at + step]
            continue
        while place < end:
            byte = data[at]
            if byte != _BACKSLASH:
                content[place] = byte
                at, place = at + _ONE, place + _ONE
                continue
            byte = data[at + _ONE]
            if byte != _U:
                escape = 8 if byte == 98 else 12 if byte == 102 else 10 if byte == 110 else 13 if byte == 114 else byte
                content[place] = 9 if byte == 116 else escape
                at, place = at + np.uintp(2), place + _ONE
                continue
            code = _hex(data, np.int64(at) + 2)
            at += np.uintp(6)
            if 0xD800 <= code < 0xDC00:
                code = 0x10000 + ((code - 0xD800) << 10) + _hex(data, np.int64(at) + 2) - 0xDC00
                at += np.uintp(6)
            if code < 0x80:
                content[place] = code
                place += _ONE
            elif code < 0x800:
                content[place], content[place + _ONE] = 0xC0 | code >> 6, 0x80 | code & 63
                place += np.uintp(2)
            elif code < 0x10000:
                content[place], content[place + _ONE] = 0xE0 | code >> 12, 0x80 | code >> 6 & 63
                content[place + np.uintp(2)] = 0x80 | code & 63
                place += np.uintp(3)
            else:
                content[place], content[place + _ONE] = 0xF0 | code >> 18, 0x80 | code >> 12 & 63
                content[place + np.uintp(2)], content[place + np.uintp(3)] = 0x80 | code >> 6 & 63, 0x80 | code & 63
                place += np.uintp(4)
