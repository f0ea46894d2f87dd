"""Payloads of Connect, record by record: the way for what ``connect_columns`` leaves, and the judge of it.

Plain values are those of ``connect_schema.plain_type``. JsonConverter itself takes whatever stands there (a string where
a number should be is 0); here such a record is bad.
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

from zync_assets.codecs.connect_schema import Connect

Read = Callable[[Any, str], Any]

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


def _fraction(text: str) -> decimal.Decimal:
    try:
        return decimal.Decimal(text)
    except decimal.DecimalException:
        raise ValueError(f"{text[:40]} is out of range") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_float=_fraction, parse_constant=_no_constant)


@lru_cache(maxsize=1024)
def row_reader(node: Connect) -> Callable[[Any], Any]:
    """A function from a payload (as ``parse_json`` gives it) to its plain value; ValueError names the path.

    A null payload is null whatever the schema says: a tombstone.
    """
    read = _known(node)
    return lambda payload: None if payload is None else read(payload, "payload")


def _reader(node: Connect) -> Read:
    read = _known(node)

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


def _known(node: Connect) -> Read:
    if node.kind in ("struct", "variable-decimal"):
        return _struct_reader(node)
    if node.kind == "array":
        item = _reader(node.item)
        return lambda value, path: [
            item(one, f"{path}[{at}]") for at, one in enumerate(_of(value, list, "an array", path))
        ]
    if node.kind == "map":
        return _map_reader(node)
    if node.kind.startswith("int"):
        return _integer_reader(node.kind)
    if node.kind in ("float", "double"):
        return _float_reader(_FLOAT_LIMIT if node.kind == "float" else math.inf)
    if node.logical and node.logical.logical == "decimal":
        return _decimal_reader(node.logical.scale)
    return {"boolean": _boolean, "string": _string, "bytes": _bytes}[node.kind]


def _of(value: Any, wanted: type | tuple[type, ...], what: str, path: str) -> Any:
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        shown = json.dumps(value, default=str)
        raise ValueError(f"{path}: {shown if len(shown) <= 40 else shown[:40] + '…'} is not {what}")
    return value


def _struct_reader(node: Connect) -> Read:
    fields = [(name, _reader(child)) for name, child in node.fields]

    def read(value: Any, path: str) -> Any:
        given = _of(value, dict, "an object", path)
        return {name: inner(given.get(name, _MISSING), f"{path}.{name}") for name, inner in fields} if fields else True

    return read


def _map_reader(node: Connect) -> Read:
    key, item = _reader(node.key), _reader(node.item)

    def entry(one: Any, other: Any, path: str) -> tuple[Any, Any]:
        name = key(one, f"{path} (key)")
        if name is None:
            raise ValueError(f"{path}: a map with a null key has no form in the lake")
        return name, item(other, f"{path}[{json.dumps(one, default=str)[:40]}]")

    def by_name(value: Any, path: str) -> Any:
        return [entry(one, other, path) for one, other in _of(value, dict, "an object", path).items()]

    def by_pair(value: Any, path: str) -> Any:
        pairs = _of(value, list, "an array of pairs", path)
        if any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
            raise ValueError(f"{path}: the entries of a map are arrays of a key and a value")
        return [entry(one, other, path) for one, other in pairs]

    return by_name if node.by_name else by_pair


def _integer_reader(kind: str) -> Read:
    limit = 1 << (int(kind[3:]) - 1)

    def read(value: Any, path: str) -> int:
        number = _of(value, int, f"a whole number ({kind})", path)
        if not -limit <= number < limit:
            raise ValueError(f"{path}: {str(number)[:40]} is out of the range of {kind}")
        return number

    return read


def _float_reader(limit: float) -> Read:
    def read(value: Any, path: str) -> float:
        if isinstance(value, str) and value in _ODD_FLOATS:
            return _ODD_FLOATS[value]
        given = _of(value, (int, decimal.Decimal), "a number", path)
        try:
            number = float(given)
        except OverflowError:
            number = math.inf
        if abs(number) >= limit:
            raise ValueError(f"{path}: {str(given)[:40]} is out of range")
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
        given = _of(value, (int, decimal.Decimal), "a decimal", path)
        try:
            unscaled = decimal.Decimal(given).scaleb(scale, _EXACT)
            number = int(unscaled.to_integral_exact(context=_EXACT)) if unscaled.adjusted() < 2000 else None
        except decimal.DecimalException:
            number = None
        if number is None:
            raise ValueError(f"{path}: {str(given)[:40]} is no decimal with {scale} digits after the point")
        return number.to_bytes((number + (number < 0)).bit_length() // 8 + 1, "big", signed=True)

    return read


def _bytes(value: Any, path: str) -> bytes:
    text = _of(value, str, "base64", path)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"{path}: {json.dumps(text)[:40]} is not base64") from None


def _boolean(value: Any, path: str) -> bool:
    return _of(value, bool, "true or false", path)


def _string(value: Any, path: str) -> str:
    text = _of(value, str, "a string", path)
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
        return [write_row(node.item, one) for one in value]
    if node.kind == "map":
        pairs = [(write_row(node.key, one), write_row(node.item, other)) for one, other in value]
        return dict(pairs) if node.by_name else [list(pair) for pair in pairs]
    if node.kind == "bytes":
        return base64.b64encode(value).decode()
    if node.kind in ("float", "double"):
        return _written_float(value, node.kind == "float")
    return value


def _written_float(value: float, short: bool) -> Any:
    if math.isfinite(value):
        return float(str(np.float32(value))) if short else value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
