"""Avro values: bytes to plain values by fastavro, and plain values to the lake's values, and back.

fastavro converts the records that ``column_reader`` can't read, one by one. Tests compare ``column_reader`` with fastavro.

fastavro reads a *plain* schema with the same bytes and no logical types. In the plain schema, each branch of a wider union is a
record of one field, whose bytes are the field's. A union's value therefore arrives as ``{branch: value}``, as in the lake.

A recursive record is a JSON text: an object with the record's fields in order. A union's value is ``{branch: value}``, bytes
are a string of the characters U+0000 to U+00FF, NaN and infinities have JavaScript's spelling, and logical types are plain
values. The text converts back to the same bytes.

``to_lake`` and ``from_lake`` convert between plain values (``types.plain_type``) and the lake's values (``lake_type``), as
Avro's logical types ask (table in ``types``). Both functions work on whole arrays and raise ValueError (pyarrow's errors are
ValueErrors) if a value does not fit. ``codecs.arrays.isolate`` finds this value.
"""

from __future__ import annotations

import decimal
import io
import json
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa

from zync_assets.codecs.arrays import is_valid, list_of, list_parts, map_entries, struct_of, validity_buffer
from zync_assets.codecs.avro.schema import Node, branch_names, is_recursive, visible_fields, walk
from zync_assets.codecs.avro.types import (
    MAX_DECIMAL,
    TIMESTAMP,
    fastavro_schema,
    lake_type,
    members,
    own_name,
    plain_type,
    wrapper_name,
)
from zync_assets.private import private

fastavro_py: Any = private("fastavro", "fastavro", "_read_py")

_SAFE_DEPTH = 900
"""fastavro's compiled reader does not count its depth and ends the process; so many bytes can't be too deep."""


class TrailingBytes(ValueError):
    """A record is longer than its schema says."""


def row_reader(node: Node) -> Callable[[bytes], Any]:
    """A function from one record's bytes to its value of the plain type; it raises whatever is wrong."""
    schema = fastavro_schema(node)
    recursive = is_recursive(node)
    shape = _shaper(node, _definitions(node))

    def read(payload: bytes) -> Any:
        stream = io.BytesIO(payload)
        reader = fastavro_py if recursive and len(payload) > _SAFE_DEPTH else fastavro
        value = reader.schemaless_reader(stream, schema, None)
        if stream.tell() != len(payload):
            raise TrailingBytes(f"{len(payload) - stream.tell()} bytes too many")
        return value if shape is None else shape(value)

    return read


def row_writer(node: Node) -> Callable[[Any], bytes]:
    """The way back: a value of the plain type, as pyarrow gives it to Python, to Avro's bytes.

    ValueError names the field that the schema has no room for.
    """
    schema = fastavro_schema(node)
    definitions = _definitions(node)

    def write(value: Any) -> bytes:
        stream = io.BytesIO()
        try:
            fastavro.schemaless_writer(stream, schema, _for_writer(node, value, "value", definitions, False))
        except ValueError:
            raise
        # The JSON of a record inside itself can hold anything, and the writer stumbles over it in any way.
        except Exception as error:
            raise ValueError(f"not a value of the schema: {type(error).__name__}: {error}") from None
        return stream.getvalue()

    return write


def _fastavro_name(node: Node) -> str:
    return own_name(node.name) if node.name else node.kind


def _definitions(node: Node) -> dict[str, Node]:
    return {item.name: item for item in walk(node) if item.kind == "record"}


def _shaper(node: Node, definitions: Mapping[str, Node]) -> Callable[[Any], Any] | None:
    """A function that converts fastavro's value to a value that pyarrow accepts for the plain type; None: no conversion."""
    if node.kind == "ref":
        return lambda value: json.dumps(_jsonable(value), ensure_ascii=False, separators=(",", ":"))
    if node.kind == "record" and not visible_fields(node):
        return lambda value: True
    if node.kind in ("record", "union"):
        pairs = node.fields if node.kind == "record" else zip(branch_names(node), node.branches, strict=True)
        inner = [(name, shape) for name, child in pairs if (shape := _shaper(child, definitions)) is not None]
        return _field_shaper(inner) if inner else None
    if node.items is None:
        return None
    shape = _shaper(node.items, definitions)
    if node.kind == "map":
        return _map_shaper(shape)
    if shape is None:
        return None
    inside = shape
    if node.kind == "array":
        return lambda value: [inside(item) for item in value]
    return lambda value: None if value is None else inside(value)


def _map_shaper(shape: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    if shape is None:
        return lambda value: list(value.items())
    return lambda value: [(key, shape(item)) for key, item in value.items()]


def _field_shaper(inner: list[tuple[str, Callable[[Any], Any]]]) -> Callable[[Any], Any]:
    def shape(value: Any) -> Any:
        if value is not None:
            for name, child in inner:
                if name in value:
                    value[name] = child(value[name])
        return value

    return shape


def _jsonable(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_jsonable(item) for item in value]
    return value


def _for_writer(node: Node, value: Any, path: str, definitions: Mapping[str, Node], in_json: bool) -> Any:
    """The value as fastavro's writer accepts it. Checks the value, because fastavro writes some wrong values without an
    error."""
    kind = node.kind
    if kind == "option":
        if value is None:
            return None
        # With the branch's name fastavro does not guess; its guess fails over a named branch further in.
        return (_fastavro_name(node.child), _for_writer(node.child, value, path, definitions, in_json))
    if kind == "ref":
        return _for_writer(definitions[node.name], value if in_json else json.loads(value), path, definitions, True)
    if kind == "null":
        return None
    if kind == "union":
        return _branch_for_writer(node, value, path, definitions, in_json)
    if value is None:
        raise ValueError(f"{path} is null, and its schema has no null")
    if kind == "record":
        items = value if isinstance(value, dict) else {}
        return {
            name: _for_writer(child, items.get(name), f"{path}.{name}", definitions, in_json)
            for name, child in node.fields
        }
    if kind == "array":
        return [_for_writer(node.child, item, f"{path}[]", definitions, in_json) for item in value]
    if kind == "map":
        pairs = value.items() if isinstance(value, dict) else value
        return {key: _for_writer(node.child, item, f"{path}[{key!r}]", definitions, in_json) for key, item in pairs}
    if kind in ("bytes", "fixed") and in_json:
        value = value.encode("latin-1")
    _check_scalar(node, value, path)
    return value


def _branch_for_writer(node: Node, value: Any, path: str, definitions: Mapping[str, Node], in_json: bool) -> Any:
    names = [name for name, item in value.items() if item is not None] if value else []
    if len(names) > 1:
        raise ValueError(f"{path} has values in {', '.join(names)}; a union holds one")
    if not names:
        if any(branch.kind == "null" for branch in node.branches):
            return None
        raise ValueError(f"{path} is null, and its schema has no null")
    position = branch_names(node).index(names[0])
    inner = _for_writer(node.branches[position], value[names[0]], f"{path}.{names[0]}", definitions, in_json)
    return (wrapper_name(node, names[0]), {names[0]: inner})


_RANGES = {"int": 1 << 31, "long": 1 << 63}


def _check_scalar(node: Node, value: Any, path: str) -> None:
    if node.kind in _RANGES:
        limit = _RANGES[node.kind]
        if not -limit <= value < limit:
            raise ValueError(f"{path}: {value} is out of the range of {node.kind}")
    elif node.kind == "enum" and value not in node.symbols:
        raise ValueError(f"{path}: {value!r} is none of the symbols of {node.name}")
    elif node.kind == "fixed" and len(value) != node.size:
        raise ValueError(f"{path}: {len(value)} bytes, and {node.name} has {node.size}")


Convert = Callable[[Node, pa.Array], pa.Array]


def to_lake(node: Node, array: pa.Array) -> pa.Array:
    """An array of the plain type as one of the lake's type, with what its fields say beside (``codecs.fields``)."""
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
    padded_data = np.zeros(len(raw) + 16, dtype=np.uint8)
    padded_data[16:] = raw
    # The 16 bytes that end where a value ends, as two big-endian words; what is before the value becomes its sign.
    words = np.ndarray((len(padded_data) - 7,), dtype=">i8", buffer=padded_data.data, strides=(1,))
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
    decimals = pa.Array.from_buffers(type, len(array), [validity_buffer(valid), pa.py_buffer(pairs)])
    limit = 10 ** min(node.precision, 18)
    if longest > 8 or low.max() >= limit or low.min() <= -limit:
        decimals.validate(full=True)
    return decimals


def _extend(words: Any, count: Any) -> None:
    """Keep only the lowest ``count`` bytes of each signed word (0 where there are none), with the sign of the highest of
    them."""
    spare_bits = (8 - np.clip(count, 0, 8)).astype(np.int64) * 8
    # numpy shifts by a word's whole width to 0.
    words <<= spare_bits
    words >>= spare_bits


def _decimal_from_lake(node: Node, array: pa.Array) -> pa.Array:
    if node.kind == "bytes" and node.precision <= MAX_DECIMAL:
        return _short_bytes(array)

    def raw(value: Any) -> bytes:
        number = _unscaled_number(value, node)
        size = node.size if node.kind == "fixed" else (number + (number < 0)).bit_length() // 8 + 1
        try:
            return number.to_bytes(size, "big", signed=True)
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
    sign_byte_counts = np.logical_and.accumulate(spare, axis=1).sum(axis=1)
    mask = np.arange(16) >= sign_byte_counts[:, None]
    offsets = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(16 - sign_byte_counts, out=offsets[1:])
    buffers = [validity_buffer(is_valid(array)), pa.py_buffer(offsets), pa.py_buffer(matrix[mask])]
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


def _unscaled_number(value: decimal.Decimal | str, node: Node) -> int:
    try:
        exact = decimal.Decimal(value).scaleb(node.scale, _WIDE)
        number = int(exact)
    except (decimal.DecimalException, ValueError, OverflowError):
        number, exact = 0, None
    if number != exact or abs(number) >= 10**node.precision:
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
