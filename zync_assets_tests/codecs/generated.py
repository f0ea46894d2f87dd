"""Random Avro schemas, with data, and what the lake should hold of it: worked out apart from the code under test."""

from __future__ import annotations

import datetime
import decimal
import io
import itertools
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = max(100, settings.default.max_examples)
"""How many batches of generated records a test tries; ``pytest --hypothesis-profile many`` has it try more."""

QUIET = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
"""The settings of tests over generated records, which take long to generate."""

UTC = datetime.UTC
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Kind:
    """A schema, a strategy for what fastavro writes by it, and the lake's form of such a value."""

    schema: Any
    data: st.SearchStrategy[Any]
    lake: Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def _logical(base: str, logical: str, data: st.SearchStrategy[Any], lake: Callable[[Any], Any]) -> Kind:
    return Kind({"type": base, "logicalType": logical}, data, lake)


INTS = st.one_of(st.integers(-(1 << 31), (1 << 31) - 1), st.integers(-70, 70))
LONGS = st.one_of(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-70, 70), st.integers(-(1 << 40), 1 << 40))
MOMENTS = st.integers(-62_000_000_000_000, 250_000_000_000_000)
TEXTS = st.text(max_size=12)

SIMPLE: list[Kind] = [
    Kind("boolean", st.booleans(), _same),
    Kind("int", INTS, _same),
    Kind("long", LONGS, _same),
    Kind("float", st.floats(width=32, allow_nan=False), _same),
    Kind("double", st.floats(allow_nan=False), _same),
    Kind("string", TEXTS, _same),
    Kind("bytes", st.binary(max_size=12), _same),
    _logical("int", "date", st.integers(-700_000, 2_900_000), lambda days: (EPOCH + datetime.timedelta(days)).date()),
    _logical("int", "time-millis", st.integers(0, 86_399_999), _same),
    _logical("long", "time-micros", st.integers(0, 86_399_999_999), _same),
    _logical("long", "timestamp-millis", MOMENTS, lambda ms: EPOCH + datetime.timedelta(milliseconds=ms)),
    _logical(
        "long",
        "timestamp-micros",
        MOMENTS.map(lambda ms: ms * 1000 + 7),
        lambda us: EPOCH + datetime.timedelta(microseconds=us),
    ),
    _logical("long", "timestamp-nanos", LONGS, _same),
    _logical("long", "local-timestamp-millis", MOMENTS, _same),
    _logical("long", "local-timestamp-micros", LONGS, _same),
    _logical("long", "local-timestamp-nanos", LONGS, _same),
    _logical("string", "uuid", st.uuids().map(str), _same),
    _logical("string", "unheard-of", TEXTS, _same),
]


@st.composite
def kinds(draw: st.DrawFn, depth: int = 2, names: Any = None, top: bool = False) -> Kind:
    """Any type; below ``depth`` only those without others inside."""
    names = names if names is not None else itertools.count()
    choices = ["simple", "simple", "option", "enum", "fixed", "decimal"]
    if depth > 0:
        choices += ["record", "record", "array", "map", "union"]
    choice = "record" if top else draw(st.sampled_from(choices))
    if choice == "simple":
        return draw(st.sampled_from(SIMPLE))
    return draw(_COMPOSED[choice](depth, names))


@st.composite
def _enum(draw: st.DrawFn, depth: int, names: Any) -> Kind:
    symbols = draw(st.lists(st.sampled_from("ABCDEFG"), min_size=1, unique=True))
    return Kind({"type": "enum", "name": f"E{next(names)}", "symbols": symbols}, st.sampled_from(symbols), _same)


@st.composite
def _fixed(draw: st.DrawFn, depth: int, names: Any) -> Kind:
    if draw(st.booleans()):
        schema = {"type": "fixed", "name": f"U{next(names)}", "size": 16, "logicalType": "uuid"}
        return Kind(schema, st.binary(min_size=16, max_size=16), lambda raw: str(uuid.UUID(bytes=raw)))
    size = draw(st.integers(1, 12))
    logical = {"logicalType": "duration"} if size == 12 else {}
    schema = {"type": "fixed", "name": f"F{next(names)}", "size": size, **logical}
    return Kind(schema, st.binary(min_size=size, max_size=size), _same)


@st.composite
def _decimal(draw: st.DrawFn, depth: int, names: Any) -> Kind:
    precision = draw(st.sampled_from([1, 4, 10, 18, 19, 31, 38, 50]))
    scale = draw(st.integers(0, min(precision, 30)))
    context = decimal.Context(prec=200)
    limit = 10**precision - 1
    unscaled = st.one_of(st.integers(-limit, limit), st.integers(-min(limit, 300), min(limit, 300)))
    rest = {"logicalType": "decimal", "precision": precision, "scale": scale}

    def lake(raw: bytes) -> Any:
        value = decimal.Decimal(int.from_bytes(raw, "big", signed=True)).scaleb(-scale, context)
        return format(value, "f") if precision > 38 else value

    if draw(st.booleans()):
        size = 24
        data = unscaled.map(lambda number: number.to_bytes(size, "big", signed=True))
        return Kind({"type": "fixed", "name": f"D{next(names)}", "size": size, **rest}, data, lake)
    return Kind({"type": "bytes", **rest}, unscaled.map(fewest_bytes), lake)


def fewest_bytes(number: int) -> bytes:
    size = 1
    while not -(1 << (8 * size - 1)) <= number < 1 << (8 * size - 1):
        size += 1
    return number.to_bytes(size, "big", signed=True)


@st.composite
def _option(draw: st.DrawFn, depth: int, names: Any) -> Kind:
    inner = draw(kinds(depth, names).filter(lambda kind: not isinstance(kind.schema, list)))
    schema = ["null", inner.schema] if draw(st.booleans()) else [inner.schema, "null"]
    name = _branch_name(inner.schema)
    data = st.none() | inner.data.map(lambda value: (name, value))
    return Kind(schema, data, lambda value: None if value is None else inner.lake(value[1]))


@st.composite
def _array(draw: st.DrawFn, depth: int, names: Any) -> Kind:
    inner = draw(kinds(depth - 1, names).filter(lambda kind: not _takes_no_bytes(kind.schema)))
    data = st.lists(inner.data, max_size=4)
    return Kind({"type": "array", "items": inner.schema}, data, lambda items: [inner.lake(item) for item in items])


def _takes_no_bytes(schema: Any, empty_records: frozenset[str] = frozenset()) -> bool:
    """``empty_records``: the names of the records before it that take no bytes. A field may have such a name as its type."""
    if isinstance(schema, dict) and schema.get("type") == "record":
        for field in schema["fields"]:
            if not _takes_no_bytes(field["type"], empty_records):
                return False
            if isinstance(field["type"], dict):
                empty_records |= {field["type"]["name"]}
        return True
    return isinstance(schema, str) and (schema == "null" or schema in empty_records)


@st.composite
def _map(draw: st.DrawFn, depth: int, names: Any) -> Kind:
    inner = draw(kinds(depth - 1, names))
    data = st.dictionaries(st.text(max_size=3), inner.data, max_size=4)
    schema = {"type": "map", "values": inner.schema}
    return Kind(schema, data, lambda items: [(key, inner.lake(item)) for key, item in items.items()])


@st.composite
def _union(draw: st.DrawFn, depth: int, names: Any) -> Kind:
    wanted = draw(st.lists(kinds(depth - 1, names), min_size=2, max_size=4))
    branches: dict[str, Kind] = {}
    for kind in wanted:
        if not isinstance(kind.schema, list):
            branches.setdefault(_branch_name(kind.schema), kind)
    schema: list[Any] = [kind.schema for kind in branches.values()]
    data: list[st.SearchStrategy[Any]] = [
        kind.data.map(lambda value, name=name: (name, value)) for name, kind in branches.items()
    ]
    # Without null, and with two branches at least: null and one type is an option.
    if len(branches) > 1 and draw(st.booleans()):
        schema.insert(draw(st.integers(0, len(schema))), "null")
        data.append(st.none())
    if not schema:
        return draw(_option(depth, names))

    def lake(value: Any) -> Any:
        if value is None:
            return None
        chosen, inner = value
        return {name: branches[name].lake(inner) if name == chosen else None for name in branches}

    return Kind(schema, st.one_of(data), lake)


def _branch_name(schema: Any) -> str:
    if isinstance(schema, str):
        return schema
    return schema.get("name", schema["type"])


@st.composite
def _record(draw: st.DrawFn, depth: int, names: Any) -> Kind:
    fields = {f"f{index}": draw(kinds(depth - 1, names)) for index in range(draw(st.integers(0, 5)))}
    named = [kind for kind in fields.values() if isinstance(kind.schema, dict) and "name" in kind.schema]
    if named and draw(st.booleans()):
        # A type that was defined before, by its name.
        again = draw(st.sampled_from(named))
        fields["again"] = Kind(again.schema["name"], again.data, again.lake)
    if draw(st.integers(0, 9)) == 0:
        fields["nothing"] = Kind("null", st.none(), _same)
    number = next(names)
    schema = {
        "type": "record",
        "name": f"R{number}",
        "fields": [{"name": name, "type": kind.schema} for name, kind in fields.items()],
    }

    def lake(value: Any) -> Any:
        made = {name: kind.lake(value[name]) for name, kind in fields.items() if kind.schema != "null"}
        return made or True

    return Kind(schema, st.fixed_dictionaries({name: kind.data for name, kind in fields.items()}), lake)


@st.composite
def recursive_kinds(draw: st.DrawFn) -> Kind:
    """A record inside itself, by one of the ways there are; what the lake holds of it is not worked out here."""
    names = itertools.count(100)
    inner = draw(kinds(1, names).filter(lambda kind: not isinstance(kind.schema, list)))
    way = draw(st.sampled_from(["option", "array", "map", "union"]))
    below: dict[str, Any] = {
        "option": ["null", "Tree"],
        "array": {"type": "array", "items": "Tree"},
        "map": {"type": "map", "values": "Tree"},
        "union": ["string", "Tree", "null"],
    }
    fields = [{"name": "it", "type": inner.schema}, {"name": "below", "type": below[way]}]
    schema = {"type": "record", "name": "Tree", "fields": fields}

    def trees(depth: int) -> st.SearchStrategy[Any]:
        deeper = trees(depth - 1) if depth else st.nothing()
        ways: dict[str, st.SearchStrategy[Any]] = {
            "option": st.none() | deeper.map(lambda tree: ("Tree", tree)),
            "array": st.lists(deeper, max_size=2) if depth else st.just([]),
            "map": st.dictionaries(st.text(max_size=2), deeper, max_size=2) if depth else st.just({}),
            "union": st.none() | TEXTS.map(lambda text: ("string", text)) | deeper.map(lambda tree: ("Tree", tree)),
        }
        return st.fixed_dictionaries({"it": inner.data, "below": ways[way]})

    return Kind(schema, trees(3), _same)


_COMPOSED: dict[str, Any] = {
    "enum": _enum,
    "fixed": _fixed,
    "decimal": _decimal,
    "option": _option,
    "array": _array,
    "map": _map,
    "union": _union,
    "record": _record,
}


def datums(schema: Any, values: list[Any]) -> list[bytes]:
    """Avro's bytes as fastavro writes them."""
    parsed = fastavro.parse_schema(json.loads(json.dumps(schema)))
    made: list[bytes] = []
    for value in values:
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, parsed, value)
        made.append(stream.getvalue())
    return made


def framed(schema_id: int, datum: bytes) -> bytes:
    return b"\0" + schema_id.to_bytes(4, "big") + datum


def same(left: pa.Array, right: pa.Array) -> bool:
    """Whether two arrays hold the same, bit by bit; a NaN may be signalling in one and quiet in the other."""
    if left.type != right.type or len(left) != len(right) or not left.is_valid().equals(right.is_valid()):
        return False
    kinds_ = pa.types
    if kinds_.is_struct(left.type):
        return all(same(one, other) for one, other in zip(left.flatten(), right.flatten(), strict=True))
    if kinds_.is_list(left.type) or kinds_.is_map(left.type):
        if left.value_lengths().equals(right.value_lengths()) if kinds_.is_list(left.type) else True:
            if kinds_.is_map(left.type):
                entries = pa.list_(pa.struct([("key", pa.string()), ("value", left.type.item_type)]))
                return same(left.cast(entries), right.cast(entries))
            return same(left.flatten(), right.flatten())
        return False
    if kinds_.is_floating(left.type):
        whole = np.uint64 if left.type == pa.float64() else np.uint32
        quiet = np.uint64(1 << 51) if left.type == pa.float64() else np.uint32(1 << 22)
        numbers = [array.fill_null(0).to_numpy(zero_copy_only=False) for array in (left, right)]
        # A signalling NaN becomes a quiet one on its way through a Python float.
        one, other = (np.where(np.isnan(given), given.view(whole) | quiet, given.view(whole)) for given in numbers)
        return bool((one == other).all())
    return left.equals(right)
