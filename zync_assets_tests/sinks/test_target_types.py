"""Every type of a source, in a table that the sink makes, and in one that a user made with the target's own types."""

from __future__ import annotations

import json
import sqlite3
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from zync_assets.checks.state_checks import rows_match
from zync_assets.kafka.registry import Registry
from zync_assets.local.services import Services
from zync_assets.sinks.steps import sink_all
from zync_assets_tests.connect import postgres
from zync_assets_tests.mini import Mini, framed, mini

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PIPELINE = """
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: avro}
sinks:
  - {name: made, type: KIND, url: "URL", from: [Raw.$left], table: made, key: [value.id], delete: false}
  - {name: own, type: KIND, url: "URL", from: [Raw.$left], table: own, key: [value.id], delete: false, create: false}
  - {name: log, type: KIND, url: "URL", from: [Raw.$left], table: log, mode: insert}
"""


def logical(kind: str, name: str, **more: int) -> dict[str, Any]:
    return {"type": kind, "logicalType": name, **more}


def named(kind: str, name: str) -> dict[str, Any]:
    return {"type": kind, "connect.name": name}


TYPES: dict[str, Any] = {
    "flag": "boolean",
    "small": "int",
    "large": "long",
    "single": "float",
    "double": "double",
    "money": logical("bytes", "decimal", precision=9, scale=2),
    "exact": logical("bytes", "decimal", precision=38, scale=10),
    "huge": logical("bytes", "decimal", precision=60, scale=20),
    "text": "string",
    "ident": logical("string", "uuid"),
    "mood": {"type": "enum", "name": "Mood", "symbols": ["glad", "sad"]},
    "bytes": "bytes",
    "day": logical("int", "date"),
    "clock": logical("long", "time-micros"),
    "millis": logical("int", "time-millis"),
    "instant": logical("long", "timestamp-micros"),
    "local": named("long", "io.debezium.time.MicroTimestamp"),
    "zoned": named("string", "io.debezium.time.ZonedTimestamp"),
    "hour": named("string", "io.debezium.time.ZonedTime"),
    "span": named("string", "io.debezium.time.Interval"),
    "document": named("string", "io.debezium.data.Json"),
    "numbers": {"type": "array", "items": "int"},
    "words": {"type": "array", "items": ["null", "string"]},
    "places": {"type": "map", "values": "long"},
    "nested": {
        "type": "record",
        "name": "Nested",
        "fields": [
            {"name": "price", "type": logical("bytes", "decimal", precision=38, scale=10)},
            {"name": "tags", "type": {"type": "array", "items": "string"}},
        ],
    },
}
SCHEMA: Any = {
    "type": "record",
    "name": "Row",
    "fields": [
        {"name": "id", "type": "long"},
        *({"name": name, "type": ["null", kind], "default": None} for name, kind in TYPES.items()),
    ],
}
ROW: dict[str, Any] = {
    "flag": True,
    "small": -(2**31),
    "large": 2**63 - 1,
    "single": 0.5,
    "double": 0.1,
    "money": Decimal("-1234567.89"),
    "exact": Decimal("-1234567890123456789012345678.0123456789"),
    "huge": Decimal("1234567890123456789012345678901234567890.01234567890123456789"),
    "text": 'a "b",\n\\N',
    "ident": UUID("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    "mood": "sad",
    "bytes": b"\0\xff\\x",
    "day": date(1582, 10, 14),
    "clock": time(23, 59, 59, 999999),
    "millis": time(23, 59, 59, 999000),
    "instant": datetime(1, 1, 1, 0, 0, 0, 1, tzinfo=UTC),
    "local": 1_700_000_000_123_456,
    "zoned": "2023-11-14T22:13:20.123456Z",
    "hour": "23:59:59.5Z",
    "span": "P0Y0M-1DT0H0M0S",
    "document": '{"a": 1.10}',
    "numbers": [1, -2],
    "words": ["a,b", None, "NULL", ""],
    "places": {"a": 2**53 + 1},
    "nested": {"price": Decimal("1.1000000000"), "tags": ["x"]},
}


def play(services: Services, spark: SparkSession, folder: Path, unique: str, kind: str, url: str) -> Mini:
    """Write a full row, an empty row, and then the full row to where the empty one was."""
    it = mini(services, spark, folder, unique, PIPELINE.replace("KIND", kind).replace("URL", url))
    assert it.pipeline.registry is not None
    schema_id = Registry(it.pipeline.registry).register(f"{it.left}-value", json.dumps(SCHEMA))
    for rows in ({1: ROW, 2: {}, 3: ROW}, {2: ROW, 3: {}}):
        it.send(it.left, *(framed(schema_id, SCHEMA, {"id": number, **values}) for number, values in rows.items()))
        it.ingest()
        assert [made.quarantined for made in sink_all(it.pipeline, lambda: spark)] == [0, 0, 0]
    for sink in it.pipeline.sinks:
        found = rows_match(it.pipeline, lambda: spark, sink, sink.tables[0])
        assert found.passed, found.summary
    return it


@pytest.mark.slow
def test_postgres_keeps_every_type(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> None:
    with postgres() as server:
        server.run("postgres", f"CREATE DATABASE {unique}")
        server.run(
            unique,
            "CREATE TYPE mood AS ENUM ('glad', 'sad')",
            "CREATE TABLE own (id bigint PRIMARY KEY, flag boolean, small integer, large numeric(19), single real, double"
            " double precision, money numeric(38, 10), exact numeric(38, 10), huge text, text char(20), ident uuid, mood"
            " mood, bytes bytea, day date, clock time, millis time(6), instant timestamptz, local timestamp, zoned timestamptz,"
            " hour timetz, span interval, document jsonb, numbers int[], words jsonb, places json, nested text)",
        )
        play(services, spark, tmp_path, unique, "postgres", f"postgresql://postgres@127.0.0.1:{server.port}/{unique}")
        columns = ", ".join(f"{name}::text" for name in ROW)
        wanted = (
            ("true", "-2147483648", "9223372036854775807", "0.5", "0.1"),
            ("-1234567.89", "-1234567890123456789012345678.0123456789", format(ROW["huge"], "f")),
            ('a "b",\n\\N', str(ROW["ident"]), "sad", "\\x00ff5c78", "1582-10-14", "23:59:59.999999", "23:59:59.999"),
            ("0001-01-01 00:00:00.000001+00", "2023-11-14 22:13:20.123456"),
        )
        made = (
            "2023-11-14T22:13:20.123456Z",
            "23:59:59.5Z",
            "P0Y0M-1DT0H0M0S",
            '{"a": 1.10}',
            "{1,-2}",
            '{"a,b",NULL,"NULL",""}',
            '{"a": 9007199254740993}',
        )
        own = (
            "2023-11-14 22:13:20.123456+00",
            "23:59:59.5+00",
            "-1 days",
            '{"a": 1.10}',
            "{1,-2}",
            '["a,b", null, "NULL", ""]',
            '{"a":9007199254740993}',
        )
        nested = ('{"tags": ["x"], "price": 1.1000000000}', '{"price":1.1000000000,"tags":["x"]}')
        simple = [text for part in wanted for text in part]
        rows = server.run(unique, f"SELECT {columns} FROM made ORDER BY id")
        assert rows == [(*simple, *made, nested[0])] * 2 + [(None,) * len(ROW)]
        simple[5] = "-1234567.8900000000"
        rows = server.run(unique, f"SELECT {columns} FROM own ORDER BY id")
        assert rows == [(*simple, *own, nested[1])] * 2 + [(None,) * len(ROW)]
        assert server.run(unique, "SELECT count(*), count(nested) FROM log") == [(5, 3)]


def test_sqlite_keeps_every_type(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> None:
    place = tmp_path / "it.db"
    with sqlite3.connect(place) as connection:
        connection.execute(
            "CREATE TABLE own (id INTEGER PRIMARY KEY, flag BOOLEAN, small INT, large BIGINT, single REAL, double DOUBLE,"
            " money TEXT, exact TEXT, huge TEXT, text VARCHAR(20), ident TEXT, mood TEXT, bytes BLOB, day DATE, clock TIME,"
            " millis TIME, instant TIMESTAMP, local DATETIME, zoned TEXT, hour TEXT, span TEXT,"
            " document TEXT, numbers JSON, words JSON, places JSON,"
            " nested JSON)"
        )
    play(services, spark, tmp_path, unique, "sqlite", str(place))
    wanted = (
        *(1, -(2**31), 2**63 - 1, 0.5, 0.1, "-1234567.89", "-1234567890123456789012345678.0123456789"),
        *(format(ROW["huge"], "f"), 'a "b",\n\\N', str(ROW["ident"]), "sad", b"\0\xff\\x", "1582-10-14"),
        *("23:59:59.999999", "23:59:59.999000", "0001-01-01T00:00:00.000001+00:00", "2023-11-14T22:13:20.123456"),
        *(
            "2023-11-14T22:13:20.123456Z",
            "23:59:59.5Z",
            "P0Y0M-1DT0H0M0S",
            '{"a": 1.10}',
            "[1,-2]",
            '["a,b",null,"NULL",""]',
            '{"a":9007199254740993}',
        ),
        '{"price":1.1000000000,"tags":["x"]}',
    )
    with sqlite3.connect(place) as connection:
        for table in ("made", "own"):
            rows = connection.execute(f"SELECT {', '.join(ROW)} FROM {table} ORDER BY id").fetchall()
            assert rows == [wanted] * 2 + [(None,) * len(ROW)]
        assert connection.execute("SELECT count(*), count(nested) FROM log").fetchall() == [(5, 3)]
