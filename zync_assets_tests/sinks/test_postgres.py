"""PostgreSQL as a target: the conformance of any target, what is PostgreSQL's own, and the least rights."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, date, datetime
from datetime import time as clock
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import psycopg
import pyarrow as pa
import pytest

from zync_assets.checks.state_checks import rows_match
from zync_assets.codecs.fields import (
    BITS,
    DEBEZIUM_DATE,
    DEBEZIUM_JSON,
    POINT,
    TSVECTOR,
    VARIABLE_DECIMAL,
    ZONED_TIME,
    ZONED_TIMESTAMP,
)
from zync_assets.errors import CommitConflict, SinkError, TableLocked, TableUnfit, TargetRefused, TargetUnavailable
from zync_assets.lake.quarantine_table import Selection
from zync_assets.local.processes import free_port
from zync_assets.local.services import Services
from zync_assets.sinks.commit import SinkCommit
from zync_assets.sinks.postgres import PostgresTarget
from zync_assets.sinks.replay import refused_records
from zync_assets.sinks.steps import sink_all, sink_awake
from zync_assets.sinks.target import Column, Merge, TableSpec
from zync_assets_tests.connect import Postgres, postgres
from zync_assets_tests.mini import mini
from zync_assets_tests.network.certificates import Authority
from zync_assets_tests.sinks.batches import apply, apply_days, assert_defaults_of_older_rows_alone, one, spec, text
from zync_assets_tests.sinks.conformance import ORIGIN, PLACE, Change, assert_conforms

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with postgres() as running:
        yield running


@pytest.fixture
def database(server: Postgres, unique: str) -> str:
    server.run("postgres", f"CREATE DATABASE {unique}")
    return unique


def url(server: Postgres, database: str, user: str = "postgres") -> str:
    return f"postgresql://{quote(user)}:secret@127.0.0.1:{server.port}/{database}"


@pytest.mark.parametrize("seed", [1, 2])
def test_postgres_conforms(server: Postgres, database: str, seed: int) -> None:
    def load_tables() -> list[str]:
        return [
            row[0] for row in server.run(database, r"SELECT relname FROM pg_class WHERE relname LIKE 'zync\_load%'")
        ]

    assert_conforms("postgres", url(server, database), load_tables, seed=seed)


TEXTS = """
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: json, schema: "id string, v string"}
sinks:
  - {name: house, type: postgres, url: "URL", from: [Raw.$left], table: rows, key: [value.id], delete: false}
"""


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the option is Linux's")
def test_a_statement_ends_when_the_host_of_the_server_is_gone(server: Postgres, database: str) -> None:
    with PostgresTarget(url(server, database)).engine().connect() as connection:
        driver: Any = connection.connection.driver_connection
        with socket.socket(fileno=os.dup(driver.fileno())) as own:
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


def test_a_key_with_a_character_that_postgres_lacks_is_put_aside(
    server: Postgres, database: str, services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, TEXTS.replace("URL", url(server, database)))
    it.send(it.left, {"id": "a\0b", "v": "x"}, {"id": "c", "v": "y"})
    it.ingest()
    (made,) = sink_all(it.pipeline, lambda: spark)
    assert (made.records, made.quarantined) == (1, 1)
    assert server.run(database, "SELECT * FROM rows") == [("c", "y")]
    ((key, error),) = server.run(database, "SELECT key, error FROM zync_quarantine")
    assert (key, "0x00" in error) == ("id=a\\0b", True)


def test_a_key_that_is_too_long_for_its_index_is_put_aside(
    server: Postgres, database: str, services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, TEXTS.replace("URL", url(server, database)))
    long_key = "".join(map(str, range(4_000)))
    it.send(it.left, {"id": "a", "v": "x"}, {"id": long_key, "v": "x"}, {"id": "c", "v": "y"})
    it.ingest()
    (made,) = sink_all(it.pipeline, lambda: spark)
    assert (made.records, made.quarantined) == (2, 1)
    assert server.run(database, "SELECT * FROM rows") == [("a", "x"), ("c", "y")]
    ((error,),) = server.run(database, "SELECT error FROM zync_quarantine")
    assert "index row" in error


def test_a_json_that_is_too_deep_is_refused(server: Postgres, database: str) -> None:
    server.run(database, "CREATE TABLE rows (id bigint PRIMARY KEY, v jsonb)")
    target, table = PostgresTarget(url(server, database)), spec(id=pa.int64(), v=pa.string())
    target.prepare(table, create=False, evolve="none")
    with pytest.raises(TargetRefused, match="stack depth limit exceeded"):
        apply(target, table, [one(1, {"v": "[" * 100_000 + "]" * 100_000})])


def test_an_error_of_a_trigger_is_a_refusal_whatever_its_sqlstate(server: Postgres, database: str) -> None:
    check = (
        "BEGIN IF new.id = 2 THEN RAISE EXCEPTION 'no two' USING ERRCODE = 'ZZ001'; END IF;"
        " IF new.id = 3 THEN new.v = (SELECT v FROM (VALUES ('a'), ('b')) AS two (v)); END IF; RETURN new; END"
    )
    server.run(
        database,
        "CREATE TABLE rows (id bigint PRIMARY KEY, v text)",
        f"CREATE FUNCTION checked() RETURNS trigger LANGUAGE plpgsql AS $$ {check} $$",
        "CREATE TRIGGER checked BEFORE INSERT ON rows FOR EACH ROW EXECUTE FUNCTION checked()",
    )
    target, table = PostgresTarget(url(server, database)), spec(id=pa.int64(), v=pa.string())
    target.prepare(table, create=False, evolve="none")
    for id, words in ((2, "no two"), (3, "more than one row returned by a subquery")):
        with pytest.raises(TargetRefused, match=words):
            apply(target, table, [text(id, "v")])
    apply(target, table, [text(1, "v")])


NESTED_KEYS = """
inputs:
  - {topic: $left, pool: Raw, key-format: json, key-schema: "tags array<string>, place struct<a: bigint, b: string>",
     value-format: json, schema: "score string, v string"}
sinks:
  - {name: house, type: postgres, url: "URL", from: [Raw.$left], table: rows, key: [key.tags, key.place, score],
     before: {set: {score: CAST(value.score AS DOUBLE)}}, delete: false}
"""


def test_a_key_has_arrays_structs_and_nan(
    server: Postgres, database: str, services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, NESTED_KEYS.replace("URL", url(server, database)))
    keys = [f'{{"tags": ["a", "{tag}"], "place": {{"a": 1, "b": "{tag}"}}}}' for tag in "xy"]

    def send(*values: tuple[int, str, str]) -> None:
        it.send(it.left, *((keys[key], {"score": score, "v": v}) for key, score, v in values))
        it.ingest()
        for _ in sink_all(it.pipeline, lambda: spark):
            pass

    send((0, "NaN", "first"), (1, "-0.0", "y"), (0, "NaN", "second"), (1, "0.0", "z"))
    # A refused record is looked for among records with such keys.
    send((1, "NaN", "third"), (0, "NaN", "fourth"), (1, "NaN", "\0"), (1, "0.0", "last"))
    found = server.run(database, "SELECT tags, place->>'b', score::text, v FROM rows ORDER BY tags, score")
    assert found == [
        (["a", "x"], "x", "NaN", "fourth"),
        (["a", "y"], "y", "0", "last"),
        (["a", "y"], "y", "NaN", "third"),
    ]
    assert len(list(refused_records(it.pipeline, Selection()))) == 1
    (sink,) = it.pipeline.sinks
    assert rows_match(it.pipeline, lambda: spark, sink, sink.tables[0]).passed


INSTANT_KEYS = """
inputs:
  - {topic: $left, pool: Raw, format: connect-json}
sinks:
  - {name: house, type: postgres, url: "URL", from: [Raw.$left], table: rows, key: [device, at]}
"""


def test_the_rows_of_a_table_with_instants_in_its_key_and_infinity_are_compared(
    server: Postgres, database: str, services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    server.run(
        database, "CREATE TABLE rows (device int, at timestamptz, v text, until timestamptz, PRIMARY KEY (at, device))"
    )
    it = mini(services, spark, tmp_path, unique, INSTANT_KEYS.replace("URL", url(server, database)))
    device = {"field": "device", "type": "int32"}
    at, until = ({"field": name, "type": "string", "name": ZONED_TIMESTAMP} for name in ("at", "until"))
    key_schema = {"type": "struct", "fields": [device, at]}
    schema = {"type": "struct", "fields": [{"field": "v", "type": "string"}, until]}
    for second, v in ((1, "a"), (2, "b"), (1, "c")):
        key = {"schema": key_schema, "payload": {"device": 1, "at": f"2024-01-02T03:04:0{second}.500000Z"}}
        it.send(it.left, (json.dumps(key), {"schema": schema, "payload": {"v": v, "until": "infinity"}}))
    it.ingest()
    assert list(sink_all(it.pipeline, lambda: spark))
    assert server.run(database, "SELECT v, until::text FROM rows ORDER BY at") == [("c", "infinity"), ("b", "infinity")]
    (sink,) = it.pipeline.sinks
    assert rows_match(it.pipeline, lambda: spark, sink, sink.tables[0]).passed


def test_a_partial_update_of_a_row_needs_no_column_that_may_be_null(server: Postgres, database: str) -> None:
    """PostgreSQL checks NOT NULL before ON CONFLICT."""
    target = PostgresTarget(url(server, database))
    server.run(
        database, "CREATE TABLE rows (id bigint PRIMARY KEY, name text NOT NULL, price numeric NOT NULL DEFAULT 7)"
    )
    table = spec(id=pa.int64(), name=pa.string(), price=pa.decimal128(9, 2))
    target.prepare(table, create=False, evolve="none")
    apply(target, table, [one(1, {"name": "a", "price": Decimal("1.50")}), one(2, {"name": "b"})])
    apply(target, table, [one(1, {"price": Decimal("2.50")}), one(2, {"name": "B"})])
    assert server.run(database, "SELECT id, name, price::text FROM rows ORDER BY id") == [
        (1, "a", "2.50"),
        (2, "B", "7"),
    ]
    assert "null value in column" in assert_refused(target, table, [one(3, {"price": Decimal(1)})])


def assert_refused(target: PostgresTarget, table: TableSpec, batch: list[Change]) -> str:
    before = target.progress(PLACE)
    with pytest.raises(SinkError) as refusal:
        apply(target, table, batch)
    assert target.progress(PLACE) == before
    return str(refusal.value)


def test_texts_go_into_the_types_of_an_existing_table(server: Postgres, database: str) -> None:
    server.run(
        database,
        "CREATE TYPE mood AS ENUM ('glad', 'sad')",
        "CREATE SCHEMA shop",
        "CREATE TABLE shop.rows (id bigint PRIMARY KEY, u uuid, m mood, j jsonb, i inet, v varchar(3), t time)",
    )
    target = PostgresTarget(url(server, database))
    types = {"id": pa.int64(), **dict.fromkeys(("u", "m", "j", "i", "v"), pa.string()), "t": pa.time64("us")}
    table = TableSpec("shop.rows", tuple(Column(name, kind) for name, kind in types.items()), ("id",), "upsert")
    target.prepare(table, create=False, evolve="none")
    good = {"u": "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "m": "sad", "j": '{"a": 1.10}', "i": "10.0.0.1", "v": "abc"}
    apply(target, table, [one(1, good)])
    found = server.run(database, "SELECT u::text, m::text, j::text, host(i), v FROM shop.rows")
    assert found == [tuple(good.values())]
    apply(target, table, [one(3, {"j": '"x"'}), one(4, {"j": "null"}), one(5, {"j": "1.50"})])
    rows = {row["id"]: row["j"] for batch in target.rows(table) for row in batch.to_pylist()}
    assert rows == {1: good["j"], 3: '"x"', 4: "null", 5: "1.50"}
    mad = assert_refused(target, table, [one(2, {"m": "mad"})])
    assert mad == 'invalid input value for enum mood: "mad" CONTEXT: column m: "mad"'
    assert "value too long" in assert_refused(target, table, [one(2, {"v": "long"})])
    odd = assert_refused(target, table, [one(2, {"v": "\0"})])
    assert odd == "the column v has the character NUL (0x00), which PostgreSQL does not take"


def test_debezium_values_go_into_the_types_that_they_come_from(server: Postgres, database: str) -> None:
    server.run(
        database,
        "CREATE EXTENSION hstore",
        "CREATE DOMAIN amount AS numeric",
        "CREATE TABLE rows (id bigint PRIMARY KEY, digits numeric, struct amount, span tsrange, pairs hstore,"
        " times timestamptz[], words tsquery)",
    )
    struct = pa.struct([("scale", pa.int32()), ("value", pa.binary())])
    columns = (
        Column("id", pa.int64()),
        Column("digits", pa.string(), note=VARIABLE_DECIMAL),
        Column("struct", struct, as_json=True, note=VARIABLE_DECIMAL),
        Column("span", pa.string()),
        Column("pairs", pa.string(), note=DEBEZIUM_JSON),
        Column("times", pa.list_(pa.timestamp("us"))),
        Column("words", pa.string()),
    )
    target, table = PostgresTarget(url(server, database)), TableSpec("rows", columns, ("id",), "upsert")
    target.prepare(table, create=False, evolve="none")
    values = {
        "digits": "0.0000001250",
        "struct": {"scale": 3, "value": "BOI="},
        "span": '["2024-01-01 00:00:00","2024-02-01 00:00:00")',
        "pairs": '{"c": null, "a\\"b": "1"}',
        "times": [datetime(2024, 1, 2, 3, 4, 5, 6), None],
        "words": "'cat'",
    }
    apply(target, table, [one(1, values), one(2, {"pairs": "a=>1", "struct": {"scale": 0, "value": "/w=="}})])
    found = server.run(database, "SELECT digits::text, struct::text, times::text, pairs->'a\"b' FROM rows ORDER BY id")
    assert found == [
        ("0.0000001250", "1.250", '{"2024-01-02 03:04:05.000006+00",NULL}', "1"),
        (None, "-1", None, None),
    ]
    rows = [row for batch in target.rows(table) for row in batch.to_pylist()]
    assert min(rows, key=lambda row: row["id"]) == {"id": 1, **values, "struct": json.dumps(values["struct"])}
    unread = assert_refused(target, table, [one(3, {"words": "a b"})])
    assert unread.startswith(
        'syntax error in tsquery: "a b" CONTEXT: column words: "a b". Give the column a type for texts'
    )
    for kind in ("numeric(10, 2)", "double precision"):
        server.run(database, f"ALTER TABLE rows ALTER COLUMN digits TYPE {kind}")
        with pytest.raises(TableUnfit, match="column digits is "):
            target.prepare(table, create=False, evolve="widen")


def test_a_number_of_days_becomes_a_date_in_a_new_column_alone(server: Postgres, database: str) -> None:
    apply_days(PostgresTarget(url(server, database)))
    rows = server.run(database, "SELECT old, day FROM rows ORDER BY id")
    assert rows == [(-1, None), (19782, date(2024, 2, 29)), (None, date(1969, 12, 31))]


def test_a_column_of_a_domain_takes_the_values_of_its_type(server: Postgres, database: str) -> None:
    server.run(
        database,
        "CREATE DOMAIN size AS integer CHECK (VALUE > 0)",
        "CREATE DOMAIN price AS numeric(8, 3)",
        "CREATE DOMAIN code AS money",
        "CREATE TABLE rows (id bigint PRIMARY KEY, size size, price price, code code)",
    )
    target = PostgresTarget(url(server, database))
    table = spec(id=pa.int64(), size=pa.int32(), price=pa.decimal128(8, 3))
    target.prepare(table, create=False, evolve="none")
    apply(target, table, [one(1, {"size": 2, "price": Decimal("1.250")})])
    assert server.run(database, "SELECT size, price FROM rows") == [(2, Decimal("1.250"))]
    assert "violates check constraint" in assert_refused(target, table, [one(2, {"size": 0})])
    for name, kind in (("size", pa.int64()), ("price", pa.float64()), ("code", pa.string())):
        with pytest.raises(TableUnfit, match=f"table rows: column {name} is .*; change the column to "):
            target.prepare(spec(**{"id": pa.int64(), name: kind}), create=False, evolve="widen")


@pytest.mark.parametrize(
    "kind",
    [
        "date",
        "time",
        "timestamp",
        "timestamptz",
        "timetz",
        "money",
        "name",
        '"char"',
        "point",
        "tsvector",
        "interval(0)",
        "interval day",
    ],
)
def test_a_text_does_not_go_into_a_column_that_would_cut_it(server: Postgres, database: str, kind: str) -> None:
    server.run(database, f"CREATE TABLE rows (id bigint PRIMARY KEY, v {kind})")
    with pytest.raises(TableUnfit, match=r"table rows: column v is .*, and its source is string; change the column"):
        PostgresTarget(url(server, database)).prepare(spec(id=pa.int64(), v=pa.string()), create=False, evolve="widen")


def test_a_key_that_on_conflict_does_not_take_is_made_by_the_statement_of_the_error(
    server: Postgres, database: str
) -> None:
    target, table = PostgresTarget(url(server, database)), spec(id=pa.string(), v=pa.string())
    for made in (
        "TABLE rows (id text PRIMARY KEY DEFERRABLE, v text)",
        "TABLE rows (id text NOT NULL, v text)",
        "TABLE rows (id text NOT NULL, v text) & CREATE UNIQUE INDEX part ON rows (id) WHERE v > 'a'",
    ):
        server.run(database, "DROP TABLE IF EXISTS rows", *f"CREATE {made}".split(" & "))
        with pytest.raises(TableUnfit, match=r"no primary key or unique constraint is on \(id\); run: ") as error:
            target.prepare(table, create=False, evolve="none")
        server.run(database, str(error.value).split("run: ")[1])
        target.prepare(table, create=False, evolve="none")
    server.run(database, "CREATE VIEW shown AS SELECT * FROM rows")
    with pytest.raises(TableUnfit, match="it is a view; name the view's table with table:"):
        target.prepare(replace(table, name="shown"), create=False, evolve="none")


def test_a_key_that_takes_different_texts_for_equal_is_refused(server: Postgres, database: str) -> None:
    server.run(
        database,
        "CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false)",
        "CREATE TABLE rows (id text COLLATE loose PRIMARY KEY, v text)",
        "CREATE TABLE padded (id char(5) PRIMARY KEY, v text)",
        "CREATE TABLE made (id text PRIMARY KEY, v text GENERATED ALWAYS AS (id || 'x') STORED)",
        "CREATE TABLE counted (id text PRIMARY KEY, v bigint GENERATED ALWAYS AS IDENTITY)",
    )
    target, table = PostgresTarget(url(server, database)), spec(id=pa.string(), v=pa.string())
    with pytest.raises(
        TableUnfit, match="column id takes texts for equal that differ in case or spaces; run:"
    ) as error:
        target.prepare(table, create=False, evolve="none")
    server.run(database, str(error.value).split("run:\n")[1])
    target.prepare(table, create=False, evolve="none")
    apply(target, table, [text("abc", "1"), text("ABC", "2")])
    assert server.run(database, "SELECT id, v FROM rows ORDER BY v") == [("abc", "1"), ("ABC", "2")]
    with pytest.raises(TableUnfit, match="column id takes texts for equal that differ in case or spaces; run:"):
        target.prepare(replace(table, name="padded"), create=False, evolve="none")
    with pytest.raises(TableUnfit, match="the database itself generates column v; leave it out with columns:"):
        target.prepare(replace(table, name="made"), create=False, evolve="none")
    counted = replace(spec(id=pa.string(), v=pa.int64()), name="counted")
    with pytest.raises(TableUnfit, match="the database itself numbers column v; run: ALTER TABLE counted") as error:
        target.prepare(counted, create=False, evolve="none")
    server.run(database, str(error.value).split("run: ")[1])
    target.prepare(counted, create=False, evolve="none")


@pytest.mark.parametrize(
    ("kind", "source", "exact", "finer"),
    [
        (
            "timestamp(3) with time zone",
            pa.timestamp("us", "UTC"),
            datetime(2024, 1, 2, 3, 4, 5, 678000, UTC),
            datetime(1969, 1, 2, 3, 4, 5, 678900, UTC),
        ),
        ("timestamp(0)", pa.timestamp("us"), datetime(1969, 1, 2, 3, 4, 5), datetime(1969, 1, 2, 3, 4, 5, 1)),
        ("time(3)", pa.time64("us"), clock(1, 2, 3, 4000), clock(1, 2, 3, 4005)),
        ("varchar(3)", pa.string(), "ab ", "ab  "),
        ("varchar(3)[]", pa.list_(pa.string()), ["ab ", None], ["ab  "]),
        ("oid", pa.int64(), 2**32 - 1, -1),
    ],
)
def test_a_value_that_a_column_would_change_without_a_word_is_refused(
    server: Postgres, database: str, kind: str, source: pa.DataType, exact: Any, finer: Any
) -> None:
    target = PostgresTarget(url(server, database))
    server.run(database, f"CREATE TABLE rows (id bigint PRIMARY KEY, v {kind})")
    table = spec(id=pa.int64(), v=source)
    target.prepare(table, create=False, evolve="add")
    apply(target, table, [one(1, {"v": exact})])
    assert [row for batch in target.rows(table) for row in batch.to_pylist()] == [{"id": 1, "v": exact}]
    assert "the column v is " in assert_refused(target, table, [one(2, {"v": finer})])
    if pa.types.is_temporal(source):
        # A column of times can be made finer.
        target.prepare(table, create=False, evolve="widen")
        apply(target, table, [one(2, {"v": finer})])


def test_debezium_values_go_into_the_types_of_postgres_that_they_come_from(server: Postgres, database: str) -> None:
    """Debezium 3.5 made these values of each type of the table."""
    server.run(
        database,
        "CREATE EXTENSION ltree",
        "CREATE EXTENSION hstore",
        "CREATE TABLE rows (id bigint PRIMARY KEY, code char(10), flag bit(1), bits bit(10), span interval, big oid,"
        " clock timetz(3), doc xml, words tsvector, place point, tree ltree, trees ltree[], codes char(3)[], pairs hstore,"
        " day date, zoned timestamptz(3))",
    )
    place = pa.struct([("x", pa.float64()), ("y", pa.float64()), ("wkb", pa.binary()), ("srid", pa.int32())])
    columns = (
        Column("id", pa.int64()),
        Column("code", pa.string()),
        Column("flag", pa.bool_()),
        Column("bits", pa.binary(), note=BITS),
        Column("span", pa.string()),
        Column("big", pa.int64()),
        Column("clock", pa.string(), note=ZONED_TIME),
        Column("doc", pa.string()),
        Column("words", pa.string(), note=TSVECTOR),
        Column("place", place, as_json=True, note=POINT),
        Column("tree", pa.string()),
        Column("trees", pa.list_(pa.string())),
        Column("codes", pa.list_(pa.string())),
        Column("pairs", pa.map_(pa.string(), pa.string()), as_json=True),
        Column("day", pa.int32(), note=DEBEZIUM_DATE),
        Column("zoned", pa.string(), note=ZONED_TIMESTAMP),
    )
    target, table = PostgresTarget(url(server, database)), TableSpec("rows", columns, ("id",), "upsert")
    target.prepare(table, create=False, evolve="none")
    values: dict[str, Any] = {
        "code": "ab        ",
        "flag": True,
        "bits": b"\x05\x02",
        "span": "P1Y2M3DT4H5M6.789S",
        "big": 2**32 - 1,
        "clock": "21:59:59.999Z",
        "doc": '<?xml version="1.0"?><a> é </a>',
        "words": "'a' 'cat'",
        "place": {"x": 1.5, "y": -2.0, "wkb": "AQEAAAAAAAAAAAD4PwAAAAAAAADA", "srid": None},
        "tree": "Top.Sci",
        "trees": ["Top.Sci"],
        "codes": ["a  "],
        "pairs": {"a": "1", "b": None},
        "day": 19782,
        "zoned": "2024-02-29T10:00:00.123Z",
    }
    apply(target, table, [one(1, values), one(2, {"code": "ab", "bits": b"", "flag": False, "day": -1})])
    names = ", ".join(f"{name}::text" for name in values)
    whole, other = server.run(database, f"SELECT {names} FROM rows ORDER BY id")
    assert whole == (
        *("ab", "1", "1000000101", "1 year 2 mons 3 days 04:05:06.789", "4294967295", "21:59:59.999+00"),
        *(
            values["doc"],
            "'a' 'cat'",
            "(1.5,-2)",
            "Top.Sci",
            "{Top.Sci}",
            '{"a  "}',
            '"a"=>"1", "b"=>NULL',
            "2024-02-29",
        ),
        "2024-02-29 10:00:00.123+00",
    )
    assert other == ("ab", "0", "0000000000", *(None,) * 10, "1969-12-31", None)
    found = {row.pop("id"): row for batch in target.rows(table) for row in batch.to_pylist()}
    read = {**values, "clock": "21:59:59.999+00", "zoned": found[1]["zoned"]}
    read |= {name: json.dumps(values[name]) for name in ("place", "pairs")}
    assert found[1] == read
    assert (found[2]["code"], found[2]["bits"], found[2]["day"]) == ("ab        ", b"", -1)
    assert target.columns_of(table, "padded") == {"code"}
    for name, value in (
        ("bits", b"\xff\xff"),
        ("big", 2**32),
        ("clock", "21:59:59.9999Z"),
        ("zoned", "2024-02-29T10:00:00.1234567Z"),
        ("day", 10**7),
    ):
        assert_refused(target, table, [one(3, {name: value})])


def test_a_column_is_widened_or_the_error_has_the_ddl(server: Postgres, database: str) -> None:
    target = PostgresTarget(url(server, database))
    old = spec(id=pa.int64(), n=pa.int32(), p=pa.decimal128(5, 2), r=pa.float32())
    target.prepare(old, create=True, evolve="none")
    new = spec(id=pa.int64(), n=pa.int64(), p=pa.decimal128(7, 4), r=pa.float64())
    with pytest.raises(TableUnfit, match=r"Set evolve: widen, or run:\nALTER TABLE rows ALTER COLUMN n TYPE BIGINT;"):
        target.prepare(new, create=True, evolve="add")
    target.prepare(new, create=True, evolve="widen")
    types = server.run(
        database,
        "SELECT format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = 'rows'::regclass AND attnum > 0",
    )
    assert [row[0] for row in types] == ["bigint", "bigint", "numeric(7,4)", "double precision"]
    # A decimal with fewer digits would be rounded without a word.
    with pytest.raises(TableUnfit, match="column p is NUMERIC"):
        target.prepare(spec(id=pa.int64(), p=pa.decimal128(9, 6)), create=True, evolve="none")


def test_a_table_or_view_with_a_comment_of_its_user_s_is_not_changed_by_default(
    server: Postgres, database: str
) -> None:
    server.run(
        database,
        "CREATE TABLE rows (id bigint PRIMARY KEY)",
        "COMMENT ON TABLE rows IS 'shop: rows of the shop. With care.'",
        "CREATE VIEW seen AS SELECT id FROM rows",
    )
    table = replace(spec(id=pa.int64(), more=pa.string()), comment="shop: Raw.rows", mode="insert")
    for name in ("rows", "public.rows", "seen"):
        with pytest.raises(TableUnfit, match=r"column more is missing\. Set evolve: add, or run:"):
            PostgresTarget(url(server, database)).prepare(replace(table, name=name), create=True, evolve="own")


LOG = TableSpec("log", (Column("place", pa.int64()), Column("text", pa.string())), ("place",), "insert")


def append(target: PostgresTarget, first: int, end: int, *, expected: int | None) -> int:
    """Append the records of some offsets, as the Spark task of a batch does."""
    rows = pa.RecordBatch.from_pydict({"place": list(range(first, end)), "text": ["a,b\n"] * (end - first)})
    merge = Merge(PLACE, LOG, ORIGIN, {0: expected}, {0: end})
    return target.append(merge, iter([rows.slice(0, 1), rows.slice(1)]))


def test_an_appended_batch_is_there_whole_and_once_wherever_it_is_killed(server: Postgres, database: str) -> None:
    target = PostgresTarget(url(server, database))
    target.prepare(LOG, create=True, evolve="none")
    assert target.appends(LOG, whole=True)
    code = (
        "from zync_assets.sinks.postgres import PostgresTarget\n"
        "from zync_assets_tests.sinks.test_postgres import append\n"
        f"append(PostgresTarget({url(server, database)!r}), 0, 3, expected=None)"
    )
    for point, count in (("sink:loaded", 0), ("sink:merging", 0), ("sink:merged", 3)):
        ended = subprocess.run([sys.executable, "-c", code], env={**os.environ, "ZYNC_CRASH": point}, check=False)
        assert ended.returncode == -signal.SIGKILL
        assert server.run(database, "SELECT count(*) FROM log") == [(count,)]
        assert target.progress(PLACE).next == ({0: 3} if count else {})
    for expected in (None, 2):
        with pytest.raises(CommitConflict):
            append(target, 0, 3, expected=expected)
    assert append(target, 3, 5, expected=3) == 2
    assert server.run(database, "SELECT count(*), count(DISTINCT place), min(text) FROM log") == [(5, 5, "a,b\n")]


def test_a_reset_waits_for_a_first_batch_under_way(server: Postgres, database: str) -> None:
    """Nobody sees the position of the batch before its transaction ends. The row that the batch changed was there before."""
    table, target = spec(id=pa.int64(), v=pa.string()), PostgresTarget(url(server, database))
    target.prepare(table, create=True, evolve="none")
    server.run(database, "INSERT INTO rows VALUES (1, 'old')")
    place = (PLACE.pipeline, PLACE.sink, PLACE.source)
    with ThreadPoolExecutor(1) as pool:
        with psycopg.connect(url(server, database)) as connection:
            connection.execute("SELECT * FROM zync_positions FOR UPDATE")
            connection.execute("INSERT INTO rows VALUES (1, 'a') ON CONFLICT (id) DO UPDATE SET v = 'a'")
            connection.execute("INSERT INTO zync_positions VALUES (%s, %s, %s, 0, 1, %s)", (*place, ORIGIN))
            reset = pool.submit(target.merge, Merge(PLACE, table, ORIGIN, {}, {}, clear=True))
            await_locked(server, database)
        reset.result()
    assert server.run(database, "SELECT * FROM rows") == []
    assert target.progress(PLACE).next == {}


def test_a_delete_that_cascades_is_refused(server: Postgres, database: str) -> None:
    table, target = spec(id=pa.int64(), v=pa.string()), PostgresTarget(url(server, database))
    target.prepare(table, create=True, evolve="none")
    apply(target, table, [text(1, "a")])
    key = '"a key" FOREIGN KEY (id) REFERENCES rows (id) ON DELETE'
    server.run(
        database,
        "CREATE SCHEMA shop",
        f'CREATE TABLE shop."child 5%" (id bigint, CONSTRAINT {key} CASCADE)',
        'INSERT INTO shop."child 5%" VALUES (1)',
        "ALTER TABLE rows ADD FOREIGN KEY (id) REFERENCES rows (id) ON DELETE CASCADE",
    )
    reset = Merge(PLACE, table, ORIGIN, {}, {}, clear=True)
    with pytest.raises(TableUnfit, match="table rows: a delete also deletes or changes rows of other tables") as error:
        target.merge(reset)
    with pytest.raises(TableUnfit, match="a delete also deletes"):
        apply(target, table, [one(7, None)])
    assert (target.progress(PLACE).next, server.run(database, 'SELECT id FROM shop."child 5%"')) == ({0: 1}, [(1,)])
    apply(target, table, [text(1, "b")])
    # A session may switch foreign keys off.
    PostgresTarget(f"{url(server, database)}?options=-c%20session_replication_role%3Dreplica").merge(reset)
    assert server.run(database, 'SELECT id FROM shop."child 5%"') == [(1,)]
    server.run(database, str(error.value).partition("\n")[2], "INSERT INTO rows VALUES (2)")
    target.merge(reset)
    assert server.run(database, "SELECT id FROM rows") == []


def await_locked(server: Postgres, database: str) -> None:
    """Wait until a session of the database waits for a lock."""
    give_up = time.monotonic() + 30
    query = f"SELECT 1 FROM pg_stat_activity WHERE datname = '{database}' AND wait_event_type = 'Lock'"
    while not server.run(database, query):
        assert time.monotonic() < give_up


def test_a_text_that_would_end_a_copy_is_appended(server: Postgres, database: str) -> None:
    """A line of a backslash and a point is the end of a COPY, if a table has no other column."""
    target = PostgresTarget(url(server, database))
    server.run(database, "CREATE TABLE log (text text)")
    table = TableSpec("log", (Column("text", pa.string()),), (), "insert")
    texts = ["a", "\\.", "", None, "\r", "b"]
    target.prepare(table, create=False, evolve="none")
    rows = pa.RecordBatch.from_pydict({"text": pa.array(texts, pa.string())})
    assert target.append(Merge(PLACE, table, ORIGIN, {0: None}, {0: 6}), iter([rows])) == 6
    assert server.run(database, "SELECT text FROM log ORDER BY ctid") == [(text,) for text in texts]


def test_copy_does_not_go_into_what_it_would_pass_by(server: Postgres, database: str) -> None:
    """COPY refuses policies of rows and views, and passes rules by. INSERT obeys all three."""
    target = PostgresTarget(url(server, database))
    target.prepare(LOG, create=True, evolve="none")
    server.run(database, "ALTER TABLE log ENABLE ROW LEVEL SECURITY")
    assert not target.appends(LOG, whole=True)
    server.run(database, "ALTER TABLE log DISABLE ROW LEVEL SECURITY", "CREATE VIEW seen AS SELECT * FROM log")
    assert not target.appends(replace(LOG, name="seen"), whole=True)
    assert not target.appends(replace(LOG, mode="upsert"), whole=True)
    server.run(database, "CREATE RULE no_negatives AS ON INSERT TO log WHERE new.place < 0 DO INSTEAD NOTHING")
    assert not target.appends(LOG, whole=True)


@pytest.fixture
def role(server: Postgres, database: str, unique: str) -> str:
    """A role with exactly the rights that demo/sinks.md lists, and a table of another schema."""
    name = f"Role {unique}"
    server.run(
        database,
        f'CREATE USER "{name}"',
        "CREATE SCHEMA shop",
        "CREATE TABLE shop.rows (id bigint PRIMARY KEY, name text, n int)",
        f'REVOKE CONNECT ON DATABASE "{database}" FROM PUBLIC',
        f'GRANT CONNECT ON DATABASE "{database}" TO "{name}"',
        f'GRANT USAGE, CREATE ON SCHEMA public TO "{name}"',
        f'GRANT USAGE ON SCHEMA shop TO "{name}"',
        f'GRANT SELECT, INSERT, UPDATE, DELETE ON shop.rows TO "{name}"',
    )
    return name


def write_all_kinds(target: PostgresTarget) -> None:
    """Whole rows, a partial row and a delete, from where the target stands."""
    columns = {"id": pa.int64(), "name": pa.string(), "n": pa.int32()}
    table = TableSpec("shop.rows", tuple(Column(name, kind) for name, kind in columns.items()), ("id",), "upsert")
    target.progress(PLACE)
    target.prepare(table, create=False, evolve="none")
    apply(target, table, [one(1, {"name": "a", "n": 1}), one(2, {"name": "b", "n": 2})])
    apply(target, table, [one(1, None), one(2, {"name": "B"})])


def test_the_least_rights_are_enough(server: Postgres, database: str, role: str) -> None:
    write_all_kinds(PostgresTarget(url(server, database, role)))
    assert server.run(database, "SELECT * FROM shop.rows") == [(2, "B", 2)]
    # Nor are more rights needed where an owner has made the tables of zync.
    owned = [f"ALTER TABLE {name} OWNER TO postgres" for name in ("zync_positions", "zync_quarantine")]
    grants = [
        f'GRANT SELECT, INSERT, UPDATE, DELETE ON {name} TO "{role}"' for name in ("zync_positions", "zync_quarantine")
    ]
    server.run(database, *owned, *grants)
    write_all_kinds(PostgresTarget(url(server, database, role)))


@pytest.mark.parametrize(
    "right",
    [
        "USAGE ON SCHEMA public",
        "CREATE ON SCHEMA public",
        "USAGE ON SCHEMA shop",
        "CONNECT ON DATABASE",
        *(f"{right} ON TABLE {name}" for right in ("SELECT", "INSERT", "UPDATE", "DELETE") for name in ("shop.rows",)),
        *(f"{right} ON TABLE public.zync_positions" for right in ("SELECT", "INSERT", "UPDATE")),
    ],
)
def test_a_role_that_lacks_a_right_is_told_the_grant_that_cures_it(
    server: Postgres, database: str, role: str, right: str
) -> None:
    target = PostgresTarget(url(server, database, role))
    if "zync_positions" in right:
        # The tables of zync are there and belong to somebody else. A first batch needs INSERT, a later one UPDATE.
        target.prepare(
            TableSpec("shop.rows", (Column("id", pa.int64()),), ("id",), "insert"), create=False, evolve="none"
        )
        for name in ("zync_positions", "zync_quarantine"):
            server.run(database, f"ALTER TABLE {name} OWNER TO postgres")
            server.run(database, f'GRANT SELECT, INSERT, UPDATE, DELETE ON {name} TO "{role}"')
    on_database = f' "{database}"' if right.endswith("DATABASE") else ""
    server.run(database, f'REVOKE {right}{on_database} FROM PUBLIC, "{role}"')
    with pytest.raises(SinkError) as error:
        write_all_kinds(target)
    assert not isinstance(error.value, TargetUnavailable | TargetRefused)
    message, grant = str(error.value).split("Run:\n")
    assert "permission denied" in message or "no schema has been selected" in message
    assert grant.replace('"', "") == f"GRANT {right}{on_database} TO {role};".replace('"', "")
    server.run(database, grant)
    if "zync_positions" not in right:
        write_all_kinds(target)
        assert server.run(database, "SELECT * FROM shop.rows") == [(2, "B", 2)]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("statement_timeout = '200ms'", "statement timeout.* raise it for the role"),
        ("default_transaction_read_only = on", "read-only transaction.* the primary's address"),
    ],
)
def test_a_setting_of_the_server_that_stops_every_batch_is_no_outage_and_is_named(
    server: Postgres, database: str, setting: str, words: str
) -> None:
    target = PostgresTarget(url(server, database))
    table = TableSpec("rows", (Column("id", pa.int64()), Column("v", pa.string())), ("id",), "upsert")
    target.prepare(table, create=True, evolve="none")
    slow = "BEGIN PERFORM pg_sleep(1); RETURN new; END"
    server.run(database, f"CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS '{slow}'")
    server.run(database, "CREATE TRIGGER slow BEFORE INSERT ON rows FOR EACH ROW EXECUTE FUNCTION slow()")
    server.run("postgres", f"ALTER DATABASE {database} SET {setting}")
    with pytest.raises(SinkError, match=words) as error:
        apply(target, table, [one(1, {"v": "a"})])
    assert not isinstance(error.value, TargetUnavailable | TargetRefused)
    assert "\n" not in str(error.value)
    server.run("postgres", f"ALTER DATABASE {database} RESET ALL")
    apply(target, table, [one(1, {"v": "a"})])
    assert server.run(database, "SELECT * FROM rows") == [(1, "a")]


def test_a_missing_schema_is_made_by_the_statements_of_the_errors(server: Postgres, database: str, role: str) -> None:
    target, name = PostgresTarget(url(server, database, role)), "No 5% such.rows"
    table = TableSpec(name, (Column("id", pa.int64()), Column("v", pa.string())), ("id",), "upsert")
    for message, cure in [
        ("schema No 5% such does not exist", 'CREATE SCHEMA "No 5% such";'),
        ("permission denied for schema No 5% such", f'GRANT USAGE, CREATE ON SCHEMA "No 5% such" TO "{role}";'),
    ]:
        with pytest.raises(SinkError) as error:
            target.prepare(table, create=True, evolve="none")
        assert message in str(error.value)
        assert str(error.value).split("Run:\n")[1] == cure
        server.run(database, cure)
    target.prepare(table, create=True, evolve="none")
    apply(target, table, [one(1, {"v": "a"})])
    assert server.run(database, 'SELECT * FROM "No 5% such".rows') == [(1, "a")]


def test_a_table_that_the_sink_may_not_make_is_made_by_the_statements_of_the_error(
    server: Postgres, database: str
) -> None:
    target = PostgresTarget(url(server, database))
    table = TableSpec("No such.rows", (Column("id", pa.int64()), Column("v", pa.string())), ("id",), "upsert")
    for first in ('CREATE SCHEMA "No such"', 'CREATE TABLE "No such".rows'):
        with pytest.raises(TableUnfit, match=r"is not there\. Set create: true, or run:") as error:
            target.prepare(table, create=False, evolve="none")
        statements = str(error.value).split("run:\n")[1]
        assert statements.startswith(first)
        server.run(database, statements if "TABLE" in first else statements.partition(";")[0])
    target.prepare(table, create=False, evolve="none")
    apply(target, table, [one(1, {"v": "a"})])
    assert server.run(database, 'SELECT * FROM "No such".rows') == [(1, "a")]


def test_a_change_that_only_an_owner_may_make_says_so(server: Postgres, database: str, role: str) -> None:
    columns = tuple(Column(name, pa.string() if name != "id" else pa.int64()) for name in ("id", "name", "more"))
    with pytest.raises(SinkError, match=f'must be owner of table rows.* make "{role}" its owner'):
        PostgresTarget(url(server, database, role)).prepare(
            TableSpec("shop.rows", columns, ("id",), "upsert"), create=False, evolve="add"
        )


def test_an_outage_is_no_refusal_and_no_error_has_the_password(server: Postgres, database: str) -> None:
    for address in (
        f"postgresql://postgres:secret@127.0.0.1:1/{database}",
        f"postgresql://postgres:secret@[bad/{database}",
    ):
        with pytest.raises(SinkError) as error:
            PostgresTarget(address).progress(PLACE)
        assert "secret" not in str(error.value)
    table = spec(id=pa.int64(), name=pa.string())
    target = PostgresTarget(url(server, database))
    target.prepare(table, create=True, evolve="none")
    blocker = psycopg.connect(host="127.0.0.1", port=server.port, user="postgres", dbname=database)
    blocker.execute("LOCK TABLE rows")
    # The session's own limit: other sinks and steps wait as long as the statement does.
    with pytest.raises(
        TableLocked, match=r"^canceling statement due to lock timeout\. Sessions with a lock.* user postgres"
    ):
        apply(target, table, [one(1, {"name": "a"})])
    blocker.close()
    apply(target, table, [one(1, {"name": "a"})])
    assert server.run(database, "SELECT name FROM rows") == [("a",)]


def test_no_other_table_waits_for_the_lock_on_one(
    server: Postgres,
    database: str,
    services: Services,
    spark: SparkSession,
    tmp_path: Path,
    unique: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = TEXTS.replace("URL", url(server, database) + "?options=-c%20lock_timeout%3D100")
    text = text.replace("table: rows", "table: '{whole-topic}'").replace("[Raw.$left]", "[Raw.*]")
    more = (
        '  - {topic: $right, pool: Raw, key-format: string, value-format: json, schema: "id string, v string"}\nsinks:'
    )
    text = text.replace("sinks:", more)
    it = mini(services, spark, tmp_path, unique, text)

    def send() -> None:
        for topic in (it.left, it.right):
            it.send(topic, {"id": "a", "v": "x"})
        it.ingest()

    def written(commits: Iterator[SinkCommit]) -> list[str]:
        return [made.table for made in commits]

    send()
    (left, right) = tables = written(sink_all(it.pipeline, lambda: spark))
    with psycopg.connect(host="127.0.0.1", port=server.port, user="postgres", dbname=database) as blocker:
        blocker.execute(f'LOCK TABLE "{left}"')  # pyright: ignore[reportCallIssue]
        send()
        assert written(sink_awake(it.pipeline, lambda: spark, {})) == [right]
        assert f"table {left}: canceling statement due to lock timeout. Sessions with a lock" in caplog.text
        send()
        locked = sink_all(it.pipeline, lambda: spark)
        assert next(locked).table == right
    assert written(locked) == [left]
    assert tables == [left, right]


def test_a_server_on_another_host_must_have_a_certificate_that_the_system_trusts(
    server: Postgres, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers on the loopback, under the name of another host."""
    authority = Authority(tmp_path, "ca")
    issued = authority.server("db", "db.example")
    folder = Path(server.run(database, "SHOW data_directory")[0][0])
    for name, file in (("server.crt", issued.certificate), ("server.key", issued.key)):
        copy = folder / name
        copy.write_bytes(file.read_bytes())
        copy.chmod(0o600)
        os.chown(copy, folder.stat().st_uid, folder.stat().st_gid)

    def connect(host: str, more: str = "") -> None:
        address = f"postgresql://postgres:secret@{host}:{server.port}/{database}?hostaddr=127.0.0.1{more}"
        target = PostgresTarget(address)
        assert target.progress(PLACE).next == {}
        with target.connection() as connection:
            (tls,) = connection.exec_driver_sql("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").one()
        assert tls is ("disable" not in more)

    def refusal(host: str, more: str = "") -> str:
        with pytest.raises(SinkError) as error:
            connect(host, more)
        assert not isinstance(error.value, TargetUnavailable)
        assert "secret" not in str(error.value)
        return str(error.value)

    assert "write ?sslmode=disable in the url" in refusal("db.example")
    connect("db.example", "&sslmode=disable")
    server.run(database, "ALTER SYSTEM SET ssl = on", "SELECT pg_reload_conf()")
    try:
        assert "?sslrootcert=FILE" in refusal("db.example")
        connect("db.example", f"&sslrootcert={authority.path}")
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
        connect("db.example")
        assert "Write the host's name as the server's certificate has it" in refusal("other.example")
        connect("other.example", "&sslmode=require")
    finally:
        server.run(database, "ALTER SYSTEM RESET ssl", "SELECT pg_reload_conf()")


def test_a_wrong_password_or_database_is_no_outage(server: Postgres, database: str) -> None:
    target = PostgresTarget(url(server, f"{database}x"))
    with pytest.raises(SinkError, match=r"does not exist.* Correct the url, or create it") as error:
        target.progress(PLACE)
    assert not isinstance(error.value, TargetUnavailable)


def test_a_role_that_may_not_log_in_is_no_outage(server: Postgres, database: str) -> None:
    name = f"n{database}"
    server.run(database, f"CREATE ROLE {name} NOLOGIN")
    target = PostgresTarget(url(server, database, name))
    with pytest.raises(SinkError, match=r"not permitted to log in\. Give the role the right to log in") as error:
        target.progress(PLACE)
    assert not isinstance(error.value, TargetUnavailable)


def test_a_server_that_is_not_there_is_an_outage_without_a_question(database: str) -> None:
    target = PostgresTarget(f"postgresql://postgres@127.0.0.1:{free_port()}/{database}")
    with pytest.raises(TargetUnavailable, match=r"Connection refused$"):
        target.progress(PLACE)


def test_the_default_of_a_new_column_is_for_older_rows_alone(server: Postgres, database: str) -> None:
    assert_defaults_of_older_rows_alone(PostgresTarget(url(server, database)))
