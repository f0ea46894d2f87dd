"""Plain values ↔ the lake's values: what Avro's logical types change (table in ``avro_types``).

Plain values are those of ``avro_types.plain_type``, the lake's those of ``lake_type``. Both functions work on whole
arrays and raise ValueError (pyarrow's errors are ValueErrors) if one value does not fit; ``nested.isolate`` finds it.
"""

from __future__ import annotations

import decimal
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from zync_assets.codecs.avro_schema import Node
from zync_assets.codecs.avro_types import MAX_DECIMAL, TIMESTAMP, lake_type, members, plain_type
from zync_assets.codecs.nested import is_valid, list_of, list_parts, map_entries, struct_of, validity_buffer

Convert = Callable[[Node, pa.Array], pa.Array]


def to_lake(node: Node, array: pa.Array) -> pa.Array:
    """An array of the plain type as one of the lake's type, with what its fields say beside (``field_notes``)."""
    if plain_type(node).equals(lake_type(node), check_metadata=True):
        return array
    leaf = _TO_LAKE.get(node.logical)
    return leaf(node, array) if leaf else _inside(node, array, lake_type(node), to_lake)


def from_lake(node: Node, array: pa.Array) -> pa.Array:
    """An array of the lake's type as one of the plain type."""
    if plain_type(node) == lake_type(node):
        return array
    leaf = _FROM_LAKE.get(node.logical)
    return leaf(node, array) if leaf else _inside(node, array, plain_type(node), from_lake)


def _inside(node: Node, array: pa.Array, type: pa.DataType, convert: Convert) -> pa.Array:
    if node.kind == "option":
        return convert(node.child, array)
    valid = is_valid(array)
    if node.kind in ("record", "union"):
        parts = zip(members(node), array.flatten(), strict=True)
        return struct_of(type, [convert(child, part) for (_, child), part in parts], len(array), valid)
    offsets, values = list_parts(array)
    if node.kind == "array":
        return list_of(type, offsets, convert(node.child, values), valid)
    keys, items = values.flatten()
    return list_of(type, offsets, map_entries(type, keys, convert(node.child, items)), valid)


def _timestamp_to_lake(node: Node, array: pa.Array) -> pa.Array:
    unit = "ms" if node.logical == "timestamp-millis" else "us"
    return array.cast(pa.timestamp(unit, tz="UTC")).cast(TIMESTAMP)


def _timestamp_from_lake(node: Node, array: pa.Array) -> pa.Array:
    micros = array.cast(pa.int64())
    if node.logical == "timestamp-micros":
        return micros
    # Microseconds that a millisecond can't hold are cut off towards the past, before 1970 too.
    millis = np.floor_divide(micros.fill_null(0).to_numpy(zero_copy_only=False), 1000)
    return pa.Array.from_buffers(pa.int64(), len(array), [validity_buffer(is_valid(array)), pa.py_buffer(millis)])


def _decimal_to_lake(node: Node, array: pa.Array) -> pa.Array:
    if node.precision > MAX_DECIMAL:
        return _by_value(array, pa.string(), lambda raw: _digits(raw, node))
    type = pa.decimal128(node.precision, node.scale)
    if len(array) == 0:
        return pa.nulls(0, type)
    valid = is_valid(array)
    offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
    lengths = np.diff(offsets)
    if valid is not None:
        lengths *= valid
    longest = lengths.max(initial=0)
    if longest > 16:
        short = _by_value(array, pa.binary(), lambda raw: _number(raw, node).to_bytes(16, "big", signed=True))
        return _decimal_to_lake(node, short)
    data = array.buffers()[2]
    raw = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]] if data else np.zeros(0, np.uint8)
    padded = np.zeros(len(raw) + 16, dtype=np.uint8)
    padded[16:] = raw
    # The 16 bytes that end where a value ends, as two big-endian words; what is before the value becomes its sign.
    words = np.ndarray((len(padded) - 7,), dtype=">i8", buffer=padded.data, strides=(1,))
    at = (offsets[:-1] - offsets[0]).astype(np.int64) + lengths
    pairs = np.empty((len(array), 2), dtype=np.int64)
    low, high = pairs[:, 0], pairs[:, 1]
    low[:] = words[at + 8]
    if longest <= 8:
        _extend(low, lengths)
        np.right_shift(low, 63, out=high)
    else:
        high[:] = words[at]
        _extend(high, lengths - 8)
        short = lengths <= 8
        part = low[short]
        _extend(part, lengths[short])
        low[short] = part
        high[short] = part >> 63
    made = pa.Array.from_buffers(type, len(array), [validity_buffer(valid), pa.py_buffer(pairs)])
    limit = 10 ** min(node.precision, 18)
    if longest > 8 or low.max() >= limit or low.min() <= -limit:
        made.validate(full=True)
    return made


def _extend(words: Any, count: Any) -> None:
    """Keep only the lowest ``count`` bytes of each signed word (0 where there are none), with the sign of the highest of
    them."""
    unused = (8 - np.clip(count, 0, 8)).astype(np.int64) * 8
    # numpy shifts by a word's whole width to 0.
    words <<= unused
    words >>= unused


def _decimal_from_lake(node: Node, array: pa.Array) -> pa.Array:
    if node.kind == "bytes" and node.precision <= MAX_DECIMAL:
        return _short_bytes(array)

    def raw(value: Any) -> bytes:
        unscaled = _unscaled(value, node)
        size = node.size if node.kind == "fixed" else (unscaled + (unscaled < 0)).bit_length() // 8 + 1
        try:
            return unscaled.to_bytes(size, "big", signed=True)
        except OverflowError:
            raise ValueError(f"the decimal {value} does not fit into {size} bytes") from None

    return _by_value(array, pa.binary(), raw)


def _short_bytes(array: pa.Array) -> pa.Array:
    """Decimals as the fewest big-endian bytes that hold them (Avro specification, "Decimal")."""
    count = len(array)
    if count == 0:
        return pa.nulls(0, pa.binary())
    plain = array.fill_null(decimal.Decimal(0)).take(pa.array(np.arange(count)))
    pairs = np.frombuffer(plain.buffers()[1], "<u8")[: 2 * count].reshape(count, 2)
    matrix = np.column_stack([pairs[:, 1], pairs[:, 0]]).astype(">u8").view(np.uint8).reshape(count, 16)
    sign = np.where(matrix[:, :1] >= 0x80, np.uint8(0xFF), np.uint8(0))
    # A leading byte goes if it is all sign and the next one says the same.
    spare = (matrix[:, :-1] == sign) & ((matrix[:, 1:] >= 0x80) == (sign == 0xFF))
    leading = np.logical_and.accumulate(spare, axis=1).sum(axis=1)
    kept = np.arange(16) >= leading[:, None]
    offsets = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(16 - leading, out=offsets[1:])
    buffers = [validity_buffer(is_valid(array)), pa.py_buffer(offsets), pa.py_buffer(matrix[kept])]
    return pa.Array.from_buffers(pa.binary(), count, buffers)


_WIDE = decimal.Context(prec=100_000)


def _number(raw: bytes, node: Node) -> int:
    number = int.from_bytes(raw, "big", signed=True)
    if abs(number) >= 10**node.precision:
        raise ValueError(f"a decimal of more than {node.precision} digits")
    return number


def _digits(raw: bytes, node: Node) -> str:
    """Two's complement bytes as plain digits."""
    return format(decimal.Decimal(_number(raw, node)).scaleb(-node.scale, _WIDE), "f")


def _unscaled(value: decimal.Decimal | str, node: Node) -> int:
    try:
        scaled = decimal.Decimal(value).scaleb(node.scale, _WIDE)
        number = int(scaled)
    except (decimal.DecimalException, ValueError, OverflowError):
        number, scaled = 0, None
    if number != scaled or abs(number) >= 10**node.precision:
        raise ValueError(f"{value} is no decimal of {node.precision} digits with {node.scale} after the point")
    return number


def _uuid_to_lake(node: Node, array: pa.Array) -> pa.Array:
    if node.kind == "string":
        return array
    return _by_value(array, pa.string(), lambda raw: str(uuid.UUID(bytes=raw)))


def _uuid_from_lake(node: Node, array: pa.Array) -> pa.Array:
    if node.kind == "string":
        return array
    return _by_value(array, pa.binary(), lambda text: uuid.UUID(text).bytes)


def _by_value(array: pa.Array, type: pa.DataType, convert: Callable[[Any], Any]) -> pa.Array:
    """For the few forms that Arrow has no operation for."""
    return pa.array([None if value is None else convert(value) for value in array.to_pylist()], type)


_TO_LAKE: dict[str, Convert] = {
    "decimal": _decimal_to_lake,
    "uuid": _uuid_to_lake,
    "date": lambda node, array: array.cast(pa.date32()),
    "int8": lambda node, array: array.cast(pa.int8()),
    "int16": lambda node, array: array.cast(pa.int16()),
    "timestamp-millis": _timestamp_to_lake,
    "timestamp-micros": _timestamp_to_lake,
}
_FROM_LAKE: dict[str, Convert] = {
    "decimal": _decimal_from_lake,
    "uuid": _uuid_from_lake,
    "date": lambda node, array: array.cast(pa.int32()),
    "int8": lambda node, array: array.cast(pa.int32()),
    "int16": lambda node, array: array.cast(pa.int32()),
    "timestamp-millis": _timestamp_from_lake,
    "timestamp-micros": _timestamp_from_lake,
}
