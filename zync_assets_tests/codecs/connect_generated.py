"""Random Connect schemas, with data as JsonConverter writes it, and what the lake should hold of it."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from zync_assets_tests.codecs.generated import EPOCH, INTS, LONGS, MOMENTS, TEXTS, fewest_bytes

CONNECT = "org.apache.kafka.connect.data"
DEBEZIUM = "io.debezium"


@dataclass(frozen=True)
class Kind:
    """A schema, a strategy for payloads by it, and the lake's form of such a payload (never given a null)."""

    schema: dict[str, Any]
    data: st.SearchStrategy[Any]
    lake: Callable[[Any], Any]

    def envelope(self, payload: Any) -> bytes:
        return enveloped(self.schema, payload)


def enveloped(schema: Any, payload: Any) -> bytes:
    return json.dumps({"schema": schema, "payload": payload}, separators=(",", ":"), ensure_ascii=False).encode()


def _same(value: Any) -> Any:
    return value


def _of(type: str, data: st.SearchStrategy[Any], lake: Callable[[Any], Any] = _same, name: str | None = None) -> Kind:
    return Kind({"type": type} if name is None else {"type": type, "name": name, "version": 1}, data, lake)


def base64_of(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _days(days: int) -> datetime.date:
    return (EPOCH + datetime.timedelta(days)).date()


def _millis(millis: int) -> datetime.datetime:
    return EPOCH + datetime.timedelta(milliseconds=millis)


def _micros(micros: int) -> datetime.datetime:
    return EPOCH + datetime.timedelta(microseconds=micros)


def _shortest(value: float) -> float:
    """The double that Arrow writes for a float. Several doubles round to the same float."""
    return float(pa.scalar(value, pa.float32()).cast(pa.string()).as_py())


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False).map(_shortest)
DAYS = st.integers(-700_000, 2_900_000)
BYTES = st.binary(max_size=12).map(base64_of)

SIMPLE: list[Kind] = [
    _of("boolean", st.booleans()),
    _of("int8", st.integers(-128, 127)),
    _of("int16", st.integers(-(1 << 15), (1 << 15) - 1)),
    _of("int32", INTS),
    _of("int64", LONGS),
    _of("float", FLOATS, lambda value: float(np.float32(value))),
    _of("double", st.floats(allow_nan=False, allow_infinity=False) | st.just("-Infinity"), float),
    _of("string", TEXTS),
    _of("bytes", BYTES, base64.b64decode),
    _of("int32", DAYS, _days, f"{CONNECT}.Date"),
    _of("int32", st.integers(0, 86_399_999), name=f"{CONNECT}.Time"),
    _of("int64", MOMENTS, _millis, f"{CONNECT}.Timestamp"),
    _of("int32", DAYS, _days, f"{DEBEZIUM}.time.Date"),
    _of("int64", MOMENTS, _millis, f"{DEBEZIUM}.time.Timestamp"),
    _of("int64", MOMENTS.map(lambda ms: ms * 1000 + 7), _micros, f"{DEBEZIUM}.time.MicroTimestamp"),
    _of("int64", LONGS, name=f"{DEBEZIUM}.time.NanoTimestamp"),
    _of("int64", st.integers(0, 86_399_999_999), name=f"{DEBEZIUM}.time.MicroTime"),
    _of("string", st.just("2024-02-29T10:00:00.5+02:00"), name=f"{DEBEZIUM}.time.ZonedTimestamp"),
    _of("int32", st.integers(0, 9999), name=f"{DEBEZIUM}.time.Year"),
    _of("string", st.uuids().map(str), name=f"{DEBEZIUM}.data.Uuid"),
    _of("string", st.just('{"a": 1}'), name=f"{DEBEZIUM}.data.Json"),
    _of("bytes", BYTES, base64.b64decode, f"{DEBEZIUM}.data.Bits"),
    _of("string", TEXTS, name="unheard.of"),
]


@st.composite
def kinds(draw: st.DrawFn, depth: int = 2) -> Kind:
    """Any type; below ``depth`` only those without others inside."""
    choices = ["simple", "simple", "decimal", "variable"]
    if depth > 0:
        choices += ["struct", "struct", "array", "map"]
    choice = draw(st.sampled_from(choices))
    if choice == "simple":
        return draw(st.sampled_from(SIMPLE))
    return draw(_COMPOSED[choice](depth))


@st.composite
def optional(draw: st.DrawFn, depth: int) -> Kind:
    """A type as it stands in a field, an array or a map: it may be null, and may have a default."""
    inner = draw(kinds(depth))
    schema = {**inner.schema, "optional": draw(st.booleans())}
    if draw(st.integers(0, 4)) == 0:
        schema["default"] = draw(inner.data)
    data = inner.data | st.none() if schema["optional"] else inner.data
    return Kind(schema, data, lambda value: None if value is None else inner.lake(value))


@st.composite
def _decimal(draw: st.DrawFn, depth: int) -> Kind:
    precision = draw(st.sampled_from([None, 1, 4, 10, 18, 19, 38, 50]))
    scale = draw(st.integers(-3, min(precision or 38, 30)))
    limit = 10 ** (precision or 38) - 1
    parameters = {"scale": str(scale)} | ({"connect.decimal.precision": str(precision)} if precision else {})
    unscaled = st.one_of(st.integers(-limit, limit), st.integers(-min(limit, 300), min(limit, 300)))

    def lake(text: str) -> Any:
        number = int.from_bytes(base64.b64decode(text), "big", signed=True)
        value = decimal.Decimal(number).scaleb(-scale, decimal.Context(prec=200))
        return format(value, "f") if (precision or 0) > 38 or scale < 0 else value

    schema = {"type": "bytes", "name": f"{CONNECT}.Decimal", "version": 1, "parameters": parameters}
    return Kind(schema, unscaled.map(fewest_bytes).map(base64_of), lake)


VARIABLE = {
    "type": "struct",
    "name": f"{DEBEZIUM}.data.VariableScaleDecimal",
    "fields": [
        {"type": "int32", "optional": False, "field": "scale"},
        {"type": "bytes", "optional": False, "field": "value"},
    ],
}


def _variable() -> st.SearchStrategy[Kind]:
    numbers = st.tuples(st.integers(-(10**40), 10**40), st.integers(-20, 60))
    data = numbers.map(lambda pair: {"scale": pair[1], "value": base64_of(fewest_bytes(pair[0]))})

    def lake(value: Any) -> str:
        number = int.from_bytes(base64.b64decode(value["value"]), "big", signed=True)
        scale = value["scale"]
        return f"{number}E{-scale:+d}" if scale < 0 else format(decimal.Decimal(f"{number}E{-scale}"), "f")

    return st.just(Kind(VARIABLE, data, lake))


@st.composite
def _array(draw: st.DrawFn, depth: int) -> Kind:
    inner = draw(optional(depth - 1))
    schema = {"type": "array", "items": inner.schema}
    return Kind(schema, st.lists(inner.data, max_size=4), lambda items: [inner.lake(item) for item in items])


@st.composite
def _map(draw: st.DrawFn, depth: int) -> Kind:
    inner = draw(optional(depth - 1))
    if draw(st.booleans()):
        schema = {"type": "map", "keys": {"type": "string", "optional": False}, "values": inner.schema}
        data = st.dictionaries(st.text(max_size=3), inner.data, max_size=4)
        return Kind(schema, data, lambda items: [(key, inner.lake(item)) for key, item in items.items()])
    keys = draw(st.sampled_from([kind for kind in SIMPLE if kind.schema["type"] in ("int32", "int64", "boolean")]))
    schema = {"type": "map", "keys": {**keys.schema, "optional": False}, "values": inner.schema}
    pairs = st.lists(st.tuples(keys.data, inner.data).map(list), max_size=4, unique_by=lambda pair: pair[0])
    return Kind(schema, pairs, lambda items: [(keys.lake(key), inner.lake(item)) for key, item in items])


@st.composite
def _struct(draw: st.DrawFn, depth: int) -> Kind:
    names = draw(st.lists(st.sampled_from(["id", "größe", "a.b", "op", 'q"', "f$"]), max_size=5, unique=True))
    fields = {name: draw(optional(depth - 1)) for name in names}
    schema = {"type": "struct", "fields": [{**kind.schema, "field": name} for name, kind in fields.items()]}
    data = st.fixed_dictionaries({name: kind.data for name, kind in fields.items()})
    return Kind(schema, data, lambda value: {name: kind.lake(value[name]) for name, kind in fields.items()} or True)


_COMPOSED: dict[str, Any] = {
    "decimal": _decimal,
    "variable": lambda depth: _variable(),
    "array": _array,
    "map": _map,
    "struct": _struct,
}
