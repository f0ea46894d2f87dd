"""Schemas and records that are made to do harm: each costs itself alone, in little time and memory."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from zync_assets.codecs.avro.schema import MAX_DEPTH
from zync_assets.codecs.dispatch import make_decoder
from zync_assets.pipeline import SideFormat


@pytest.fixture(autouse=True)
def _little_memory() -> Any:
    """Two GiB more than there is, at the most: what asks for more fails with a MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * 1024**3, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, old)


def varint(number: int) -> bytes:
    zigzag, out = (number << 1) ^ (number >> 63), b""
    while zigzag > 0x7F:
        out, zigzag = out + bytes([zigzag & 0x7F | 0x80]), zigzag >> 7
    return out + bytes([zigzag])


def avro(schema: Any, *datums: bytes, native: bool = True) -> list[tuple[int, str]]:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    decoder = make_decoder(SideFormat("avro"), lambda _: text, None, native=native)
    found = decoder.decode(pa.array([b"\0\0\0\0\1" + datum for datum in datums], pa.binary()))
    return [(bad.index, bad.error) for bad in found.bad]


def arrays(depth: int) -> str:
    return '{"type": "array", "items": ' * depth + '"int"' + "}" * depth


def records(depth: int) -> Any:
    made: Any = "int"
    for number in range(depth):
        made = {"type": "record", "name": f"R{number}", "fields": [{"name": "x", "type": made}]}
    return made


def named(count: int, uses: int) -> Any:
    """Records that use the one before, in a union: flat to look at."""
    made: list[Any] = [{"type": "record", "name": "R0", "fields": [{"name": "x", "type": "int"}]}]
    for number in range(1, count):
        fields = [{"name": f"x{use}", "type": f"R{number - 1}"} for use in range(uses)]
        made.append({"type": "record", "name": f"R{number}", "fields": fields})
    return made


@pytest.mark.slow
@pytest.mark.parametrize("native", [True, False])
def test_a_schema_of_ten_thousand_fields_is_decoded(native: bool) -> None:
    wide = {"type": "record", "name": "R", "fields": [{"name": f"f{n}", "type": "int"} for n in range(10_000)]}
    assert avro(wide, b"\x02" * 10_000, b"\x02" * 9_999, native=native) == [
        (1, "schema id 1: the record ends before its schema does")
    ]


@pytest.mark.parametrize(
    "schema", [arrays(200), arrays(2_000), arrays(100_000), json.dumps(records(200)), json.dumps(named(200, 1))]
)
def test_a_schema_of_hundreds_of_levels_makes_its_records_bad(schema: str) -> None:
    ((_, error),) = avro(schema, b"\x02")
    assert f"deeper than {MAX_DEPTH} levels" in error


def test_a_schema_of_many_levels_is_decoded() -> None:
    assert avro(records(MAX_DEPTH - 1), b"\x02") == []


def test_named_types_that_multiply_make_their_records_bad() -> None:
    ((_, error),) = avro(named(40, 2), b"\x02")
    assert "more than 50000 types" in error


ITEMS = {"type": "array", "items": "int"}
LIES = [
    ({"type": "record", "name": "R", "fields": [{"name": "s", "type": "string"}]}, varint(2**40) + b"abc"),
    ("bytes", varint(2**62) + b"abc"),
    ("bytes", varint(-5) + b"abc"),
    (ITEMS, varint(2**40) + b"\2\2\0"),
    (ITEMS, varint(2**62) + b"\2\2\0"),
    ({"type": "array", "items": "null"}, varint(2**40) + b"\0"),
    ({"type": "map", "values": "null"}, varint(2**35) + b"\0"),
    ({"type": "fixed", "name": "F", "size": 2**40}, b"abc"),
    ("long", b"\xff" * 20),
    ("int", varint(2**40)),
    (["null", "int"], varint(7)),
    (["null", "int"], varint(-1)),
    ({"type": "enum", "name": "E", "symbols": ["a"]}, varint(2**62)),
    ({"type": "record", "name": "L", "fields": [{"name": "n", "type": ["null", "L"]}]}, b"\x02" * 100_000 + b"\0"),
]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("schema", "datum"), LIES)
def test_a_record_that_lies_about_lengths_and_places_is_bad(schema: Any, datum: bytes, native: bool) -> None:
    text = json.dumps(schema)
    assert [index for index, _ in avro(text, datum, native=native)] == [0]


def connect(payload: bytes) -> list[str]:
    decoder = make_decoder(SideFormat("connect-json"), lambda _: "", None)
    good = b'{"schema": {"type": "int32"}, "payload": 1}'
    found = decoder.decode(pa.array([good, payload], pa.binary()))
    assert found.values[0].as_py() == 1
    return [bad.error for bad in found.bad if bad.index == 1]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("precision", "scale"), [(2_000_000_000, 2_000_000_000), (10**30, 0)])
def test_a_decimal_of_a_thousand_million_digits_is_bad(precision: int, scale: int, native: bool) -> None:
    schema = {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}
    ((_, error),) = avro(schema, b"\x02\x05", native=native)
    assert "more than 10000 digits" in error


@pytest.mark.parametrize(
    "part", [{"name": None}, {"name": "\ud800"}, {"type": {"type": "enum", "name": "E", "symbols": [[]]}}]
)
def test_names_that_are_none_make_their_records_bad(part: Any) -> None:
    fields = [{"name": "x", "type": "int", **part}]
    ((index, _),) = avro({"type": "record", "name": "R", "fields": fields}, b"\x02")
    assert index == 0


@pytest.mark.parametrize("depth", [200, 300, 3_000, 100_000])
def test_connect_json_of_many_levels_is_bad(depth: int) -> None:
    schema = '{"type": "array", "items": ' * depth + '{"type": "int32"}' + "}" * depth
    assert len(connect(f'{{"schema": {schema}, "payload": []}}'.encode())) == 1
    assert len(connect(b'{"schema": {"type": "int32"}, "payload": ' + b"[" * depth + b"]" * depth + b"}")) == 1


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"id": ' + b"9" * 100_000 + b"}",
        b'{"id": 1e999999999}',
        b'{"id": NaN}',
        b'{"text": "\\ud800"}',
        b'{"text": "\xff"}',
    ],
)
def test_json_that_is_none_or_too_much_is_bad(text: bytes) -> None:
    decoder = make_decoder(SideFormat("json", "id bigint, text string"), lambda _: "", None)
    found = decoder.decode(pa.array([text, b'{"id": 1}'], pa.binary()))
    assert [bad.index for bad in found.bad] == [0]
    assert found.values[1].as_py() == {"id": 1, "text": None}
