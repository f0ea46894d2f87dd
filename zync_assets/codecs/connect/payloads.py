"""Payloads of Kafka Connect: column by column, and record by record.

``read_columns`` reads many payloads of one Connect schema at once with pyarrow's JSON reader, and marks the records that are
unsafe for this reader. These are damaged and unusual records, and records that lack a field with a rule in the schema. pyarrow
refuses duplicate and unexpected fields, numbers for strings, and half surrogates. But pyarrow accepts infinities, knows no
base64 and no maps, and reads two documents in a line as two records.

``row_reader`` reads the unsafe records one by one, and defines the right result. Plain values are those of
``schema.plain_type``. JsonConverter itself takes any value (a string where a number should be is 0). Here such a record is bad.
"""

from __future__ import annotations

import base64
import binascii
import decimal
import json
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from zync_assets.codecs.arrays import Mask, base64_bytes, is_valid, list_of, list_parts, pc, struct_of
from zync_assets.codecs.connect.schema import Connect, nested_type, plain_type
from zync_assets.codecs.json.values import Read, expect, fraction, integer_reader

_FEW = 64
"""A block of so many records that fails is left over whole."""
_PARTS = 8


@lru_cache(maxsize=1024)
def has_columns(node: Connect) -> bool:
    """Whether pyarrow can read the type: no maps, no structs without fields."""
    if node.kind == "map" or (node.kind == "struct" and not node.fields):
        return False
    inner = [child for _, child in node.fields] + ([node.items] if node.items else [])
    return all(has_columns(child) for child in inner)


def read_columns(node: Connect, texts: pa.Array) -> tuple[pa.Array, Mask]:
    """Plain values, and which are odd: to be read again by ``row_reader``.

    ``texts``: binary without nulls, each a payload and the ``}`` that closes the record around it.
    """
    if len(texts) == 0:
        return pa.nulls(0, plain_type(node)), np.zeros(0, np.bool_)
    try:
        return _plain(node, _read(node, texts))
    except ValueError:
        pass
    if len(texts) <= _FEW:
        return pa.nulls(len(texts), plain_type(node)), np.ones(len(texts), np.bool_)
    size = -(-len(texts) // _PARTS)
    parts = [read_columns(node, texts.slice(at, size)) for at in range(0, len(texts), size)]
    return pa.concat_arrays([part for part, _ in parts]), np.concatenate([odd for _, odd in parts])


def _read(node: Connect, texts: pa.Array) -> pa.Array:
    # Each line begins with an object and ends with its bracket, so that none can run on into the next: as many rows as
    # lines means a row a line.
    lines = pc.binary_join_element_wise(b'{"payload":', texts, b"\n", b"")
    lines.cast(pa.string()).validate(full=True)
    size = int(lines.offset) + len(lines)
    ends = np.frombuffer(lines.buffers()[1], np.int32)
    data = lines.buffers()[2].slice(int(ends[lines.offset]), int(ends[size] - ends[lines.offset]))
    table = pj.read_json(
        pa.BufferReader(data),
        read_options=pj.ReadOptions(use_threads=False, block_size=data.size + 1),
        parse_options=pj.ParseOptions(
            explicit_schema=pa.schema([("payload", _json_type(node))]), unexpected_field_behavior="error"
        ),
    )
    if table.num_rows != len(texts):
        raise ValueError("more than one document in a record")
    return pa.concat_arrays(table.column(0).chunks)


@lru_cache(maxsize=1024)
def _json_type(node: Connect) -> pa.DataType:
    return pa.string() if node.kind == "bytes" else nested_type(node, _json_type)


def _plain(node: Connect, array: pa.Array) -> tuple[pa.Array, Mask]:
    """The plain values of what pyarrow read, and which of them are odd."""
    count, valid = len(array), is_valid(array)
    if node.kind in ("struct", "variable-decimal"):
        children: list[pa.Array] = []
        odd = np.zeros(count, np.bool_)
        for (_, child), column in zip(node.fields, array.flatten(), strict=True):
            part, wrong = _plain(child, column)
            children.append(part)
            odd |= wrong | _says_more(child, column, valid)
        return struct_of(plain_type(node), children, count, valid), odd
    if node.kind == "array":
        offsets, values = list_parts(array)
        items, wrong = _plain(node.item, values)
        wrong = wrong | _says_more(node.item, values, None)
        before = np.concatenate([[0], np.cumsum(wrong)])
        return list_of(plain_type(node), offsets, items, valid), before[offsets[1:]] > before[offsets[:-1]]
    if node.kind == "bytes":
        return base64_bytes(array, valid, empty_is_odd=node.logical is not None)
    odd = np.zeros(count, np.bool_)
    if node.kind in ("float", "double"):
        odd = pc.invert(pc.is_finite(array)).fill_null(False).to_numpy(zero_copy_only=False)
    elif node.kind == "string":
        array.validate(full=True)
    return array, odd


def _says_more(node: Connect, column: pa.Array, parent: Mask | None) -> Mask:
    """Nulls inside what is there, where the schema asks for a value or has a default for a missing one."""
    if column.null_count == 0 or (node.optional and node.default is None):
        return np.zeros(len(column), np.bool_)
    nulls = column.is_null().to_numpy(zero_copy_only=False)
    return nulls if parent is None else nulls & parent


_MISSING = object()
_ODD_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_FLOAT_LIMIT = float((1 << 128) - (1 << 103))
"""From here on a number is rounded to a float's infinity."""
_EXACT = decimal.Context(prec=2000, traps=[decimal.Inexact, decimal.InvalidOperation])


def parse_json(text: str) -> Any:
    """A JSON document, its fractions as decimals; ValueError if it is none."""
    return _DECODER.decode(text)


def parse_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at ``start``, and where it ends."""
    return _DECODER.raw_decode(text, start)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_float=fraction, parse_constant=_no_constant)


@lru_cache(maxsize=1024)
def row_reader(node: Connect) -> Callable[[Any], Any]:
    """A function from a payload (as ``parse_json`` gives it) to its plain value; ValueError names the path.

    A null payload is null whatever the schema says: a tombstone.
    """
    read = _value_reader(node)
    return lambda payload: None if payload is None else read(payload, "payload")


def _reader(node: Connect) -> Read:
    read = _value_reader(node)

    def check(value: Any, path: str) -> Any:
        if value is not None and value is not _MISSING:
            return read(value, path)
        if node.default is not None and (value is _MISSING or not node.optional):
            return read(parse_json(node.default), f"{path} (default)")
        if not node.optional:
            raise ValueError(
                f"{path}: {'is missing' if value is _MISSING else 'is null'}, and its schema says required"
            )
        return None

    return check


def _value_reader(node: Connect) -> Read:
    if node.kind in ("struct", "variable-decimal"):
        return _struct_reader(node)
    if node.kind == "array":
        item = _reader(node.item)
        return lambda value, path: [
            item(element, f"{path}[{at}]") for at, element in enumerate(expect(value, list, "an array", path))
        ]
    if node.kind == "map":
        return _map_reader(node)
    if node.kind.startswith("int"):
        return integer_reader(pa.type_for_alias(node.kind))
    if node.kind in ("float", "double"):
        return _float_reader(_FLOAT_LIMIT if node.kind == "float" else math.inf)
    if node.logical and node.logical.logical == "decimal":
        return _decimal_reader(node.logical.scale)
    return {"boolean": _boolean, "string": _string, "bytes": _bytes}[node.kind]


def _struct_reader(node: Connect) -> Read:
    fields = [(name, _reader(child)) for name, child in node.fields]

    def read(value: Any, path: str) -> Any:
        entries = expect(value, dict, "an object", path)
        return (
            {name: inner(entries.get(name, _MISSING), f"{path}.{name}") for name, inner in fields} if fields else True
        )

    return read


def _map_reader(node: Connect) -> Read:
    key, item = _reader(node.key), _reader(node.item)

    def entry(raw_key: Any, raw_item: Any, path: str) -> tuple[Any, Any]:
        name = key(raw_key, f"{path} (key)")
        if name is None:
            raise ValueError(f"{path}: a map with a null key has no form in the lake")
        return name, item(raw_item, f"{path}[{json.dumps(raw_key, default=str)[:40]}]")

    def by_name(value: Any, path: str) -> Any:
        return [entry(raw_key, raw_item, path) for raw_key, raw_item in expect(value, dict, "an object", path).items()]

    def by_pair(value: Any, path: str) -> Any:
        pairs = expect(value, list, "an array of pairs", path)
        if any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
            raise ValueError(f"{path}: the entries of a map are arrays of a key and a value")
        return [entry(raw_key, raw_item, path) for raw_key, raw_item in pairs]

    return by_name if node.by_name else by_pair


def _float_reader(limit: float) -> Read:
    def read(value: Any, path: str) -> float:
        if isinstance(value, str) and value in _ODD_FLOATS:
            return _ODD_FLOATS[value]
        literal = expect(value, (int, decimal.Decimal), "a number", path)
        try:
            number = float(literal)
        except OverflowError:
            number = math.inf
        if abs(number) >= limit:
            raise ValueError(f"{path}: {str(literal)[:40]} is out of range")
        return number

    return read


def _decimal_reader(scale: int) -> Read:
    """Base64 of the unscaled number, or, where the converter's ``decimal.format`` is NUMERIC (KIP-481), the number."""

    def read(value: Any, path: str) -> bytes:
        if isinstance(value, str):
            raw = _bytes(value, path)
            if not raw:
                raise ValueError(f"{path}: a decimal of no bytes")
            return raw
        literal = expect(value, (int, decimal.Decimal), "a decimal", path)
        try:
            unscaled_decimal = decimal.Decimal(literal).scaleb(scale, _EXACT)
            number = (
                int(unscaled_decimal.to_integral_exact(context=_EXACT)) if unscaled_decimal.adjusted() < 2000 else None
            )
        except decimal.DecimalException:
            number = None
        if number is None:
            raise ValueError(f"{path}: {str(literal)[:40]} is no decimal with {scale} digits after the point")
        return number.to_bytes((number + (number < 0)).bit_length() // 8 + 1, "big", signed=True)

    return read


def _bytes(value: Any, path: str) -> bytes:
    text = expect(value, str, "base64", path)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"{path}: {json.dumps(text)[:40]} is not base64") from None


def _boolean(value: Any, path: str) -> bool:
    return expect(value, bool, "true or false", path)


def _string(value: Any, path: str) -> str:
    text = expect(value, str, "a string", path)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{path}: half a surrogate pair is no text") from None
    return text


def write_row(node: Connect, value: Any) -> Any:
    """The way back: a plain value, as pyarrow gives it to Python, as what ``json.dumps`` takes."""
    if value is None:
        return None
    if node.kind in ("struct", "variable-decimal"):
        return {name: write_row(child, value[name]) for name, child in node.fields}
    if node.kind == "array":
        return [write_row(node.item, element) for element in value]
    if node.kind == "map":
        pairs = [(write_row(node.key, key), write_row(node.item, item)) for key, item in value]
        return dict(pairs) if node.by_name else [list(pair) for pair in pairs]
    if node.kind == "bytes":
        return base64.b64encode(value).decode()
    if node.kind in ("float", "double"):
        return _written_float(value, node.kind == "float")
    return value


def _written_float(value: float, short: bool) -> Any:
    if math.isfinite(value):
        return float(str(np.float32(value))) if short else value
    return odd_float_text(value)


def odd_float_text(value: float) -> str:
    """NaN or an infinity as Kafka Connect writes it in JSON."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
