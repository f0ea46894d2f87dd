"""The codecs per family of types: records a second of CPU time, native and by fastavro, each way."""

from __future__ import annotations

import io
import itertools
import json
import random
import string
import time
from collections.abc import Callable, Iterator
from typing import Any

import fastavro
import pyarrow as pa

from zync_assets.codecs.dispatch import make_decoder, make_encoder
from zync_assets.pipeline import SideFormat

COLUMNS = (
    "family",
    "decode native",
    "decode fastavro",
    "decode ratio",
    "encode native",
    "encode fastavro",
    "encode ratio",
)

LEAST = 0.3
"""Seconds of CPU time to measure for at least."""


Value = Callable[[random.Random], Any]


def _text(size: int) -> Value:
    return lambda draw: "".join(draw.choices(string.ascii_letters, k=size))


def _decimal(precision: int, scale: int, kind: str = "bytes", **rest: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": "decimal", "precision": precision, "scale": scale, **rest}


def _unscaled(digits: int, size: int | None = None) -> Value:
    def make(draw: random.Random) -> bytes:
        number = draw.randrange(-(10**digits), 10**digits)
        return number.to_bytes(size or (number + (number < 0)).bit_length() // 8 + 1, "big", signed=True)

    return make


def _logical(base: str, logical: str) -> dict[str, Any]:
    return {"type": base, "logicalType": logical}


_ROW: dict[str, tuple[Any, Value]] = {
    "ID": ("int", lambda draw: draw.randrange(1 << 20)),
    "customer": (["null", "string"], _text(12)),
    "amount": (["null", _decimal(10, 2)], _unscaled(7)),
    "at": (["null", "long"], lambda draw: draw.randrange(1 << 40)),
}


def _record(name: str, fields: dict[str, tuple[Any, Value]]) -> tuple[dict[str, Any], Value]:
    listed = [{"name": field, "type": kind} for field, (kind, _) in fields.items()]
    makers = {field: make for field, (_, make) in fields.items()}
    schema = {"type": "record", "name": name, "fields": listed}
    return schema, lambda draw: {field: make(draw) for field, make in makers.items()}


def _envelope() -> tuple[dict[str, Any], Value]:
    row, make = _record("Row", _ROW)
    source, source_of = _record(
        "Source", {"table": ("string", _text(8)), "lsn": (["null", "long"], lambda draw: draw.randrange(1 << 34))}
    )
    fields: dict[str, tuple[Any, Value]] = {
        "before": (["null", row], lambda draw: make(draw) if draw.random() < 0.5 else None),
        "after": (["null", "Row"], make),
        "source": (source, source_of),
        "op": ("string", lambda draw: draw.choice("cud")),
        "ts_ms": (["null", "long"], lambda draw: draw.randrange(1 << 41)),
    }
    return _record("Envelope", fields)


def _tree() -> tuple[dict[str, Any], Value]:
    schema = {
        "type": "record",
        "name": "Tree",
        "fields": [{"name": "n", "type": "int"}, {"name": "next", "type": ["null", "Tree"]}],
    }
    return schema, lambda draw: {"n": 1, "next": {"n": 2, "next": None}}


FAMILIES: dict[str, tuple[Any, Value]] = {
    "integers": _record("R", {f"f{i}": ("long", lambda draw: draw.randrange(-(1 << 30), 1 << 30)) for i in range(8)}),
    "reals": _record("R", {f"f{i}": ("double", lambda draw: draw.random()) for i in range(8)}),
    "booleans and enums": _record(
        "R",
        {
            "a": ("boolean", lambda draw: draw.random() < 0.5),
            "b": ({"type": "enum", "name": "E", "symbols": ["A", "B", "C"]}, lambda draw: draw.choice("ABC")),
        },
    ),
    "strings": _record("R", {f"f{i}": ("string", _text(12)) for i in range(4)}),
    "bytes and fixed": _record(
        "R",
        {
            "a": ("bytes", lambda draw: draw.randbytes(12)),
            "b": ({"type": "fixed", "name": "F", "size": 8}, lambda draw: draw.randbytes(8)),
        },
    ),
    "nullable": _record(
        "R",
        {
            f"f{i}": (["null", "long"], lambda draw: draw.randrange(99) if draw.random() < 0.7 else None)
            for i in range(8)
        },
    ),
    "dates and timestamps": _record(
        "R",
        {
            "a": (_logical("int", "date"), lambda draw: draw.randrange(20_000)),
            "b": (_logical("long", "timestamp-millis"), lambda draw: draw.randrange(1 << 41)),
            "c": (_logical("long", "timestamp-micros"), lambda draw: draw.randrange(1 << 50)),
            "d": (_logical("long", "timestamp-nanos"), lambda draw: draw.randrange(1 << 60)),
        },
    ),
    "decimals on bytes": _record("R", {"a": (_decimal(10, 2), _unscaled(9)), "b": (_decimal(38, 10), _unscaled(30))}),
    "decimals on fixed": _record("R", {"a": (_decimal(20, 4, "fixed", name="D", size=10), _unscaled(19, 10))}),
    "decimals past 38 digits": _record("R", {"a": (_decimal(60, 4), _unscaled(50))}),
    "uuids": _record(
        "R",
        {
            "a": (_logical("string", "uuid"), lambda draw: "123e4567-e89b-12d3-a456-426614174000"),
            "b": ({"type": "fixed", "name": "U", "size": 16, "logicalType": "uuid"}, lambda draw: draw.randbytes(16)),
        },
    ),
    "arrays": _record(
        "R",
        {
            "a": (
                {"type": "array", "items": "long"},
                lambda draw: [draw.randrange(999) for _ in range(draw.randrange(6))],
            )
        },
    ),
    "maps": _record(
        "R",
        {
            "a": (
                {"type": "map", "values": "long"},
                lambda draw: {key: draw.randrange(999) for key in "abcd"[: draw.randrange(5)]},
            )
        },
    ),
    "nested records": _record("R", {"a": _record("A", {"b": _record("B", _ROW)}), "c": ("B", _record("B", _ROW)[1])}),
    "wide unions": _record(
        "R", {"a": (["null", "long", "string", "double"], lambda draw: draw.choice([None, 7, "text", 0.5]))}
    ),
    "Debezium envelope": _envelope(),
    "recursive": _tree(),
}


def measure_codecs(records: int) -> Iterator[dict[str, object]]:
    """A row a family. A ratio is native over fastavro; a family without a native way (recursion) has about 1."""
    for name, (schema, make) in FAMILIES.items():
        yield {"family": name, **_measured(json.dumps(schema), _payloads(schema, make, records))}


def _payloads(schema: Any, make: Value, records: int) -> pa.Array:
    draw = random.Random(records)
    # Datums are written by their plain types: the bytes of a logical type are those of the type below.
    parsed = fastavro.parse_schema(_plain(schema))
    # Records of which each comes a few times are made in a moment, and tell as much.
    made: list[bytes] = []
    for _ in range(min(records, 2_000)):
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, parsed, make(draw))
        made.append(b"\0\0\0\0\1" + stream.getvalue())
    return pa.array(itertools.islice(itertools.cycle(made), records), pa.binary())


def _plain(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: _plain(item) for key, item in schema.items() if key != "logicalType"}
    return [_plain(item) for item in schema] if isinstance(schema, list) else schema


def _measured(schema: str, payloads: pa.Array) -> dict[str, object]:
    found: dict[str, object] = {}
    column = make_decoder(SideFormat("avro"), lambda _: schema, None).decode(payloads).values
    for what, work in (
        (
            "decode",
            lambda native: make_decoder(SideFormat("avro"), lambda _: schema, None, native=native).decode(payloads),
        ),
        ("encode", lambda native: make_encoder("avro", schema, 1, native=native).encode(column)),
    ):
        speeds = {
            way: _speed(lambda work=work, way=way: work(way == "native"), len(payloads))
            for way in ("native", "fastavro")
        }
        found |= {f"{what} {way}": round(speed) for way, speed in speeds.items()}
        found[f"{what} ratio"] = round(speeds["native"] / speeds["fastavro"], 1)
    return found


def _speed(work: Callable[[], Any], records: int) -> float:
    """Records a second of this process's CPU time, after a first run that does not count."""
    assert work().bad == ()
    rounds, started = 0, time.process_time()
    while (spent := time.process_time() - started) < LEAST or not rounds:
        work()
        rounds += 1
    return rounds * records / spent
