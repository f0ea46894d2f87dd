"""PostgreSQL as a target: the conformance of any target, what is PostgreSQL's own, and the least rights."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from zync_assets.errors import SinkError, TableUnfit, TargetUnavailable
from zync_assets.sinks.fold import fold
from zync_assets.sinks.postgres import PostgresTarget
from zync_assets.sinks.target import Column, Merge, TableSpec
from zync_assets_tests.connect import Postgres, postgres
from zync_assets_tests.sinks.conformance import ORIGIN, PLACE, Change, assert_conforms, records

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
    return f"postgresql://{user}:secret@127.0.0.1:{server.port}/{database}"


def spec(**types: pa.DataType) -> TableSpec:
    columns = tuple(Column(name, kind) for name, kind in types.items())
    return TableSpec("rows", columns, (columns[0].name,), "upsert")


def apply(target: PostgresTarget, table: TableSpec, batch: list[Change]) -> None:
    """One batch, at the end of what is there."""
    at = target.progress(PLACE).next.get(0)
    with target.run(PLACE) as name:
        folded = fold(records(table, sorted(batch)), table.key, [column.name for column in table.others])
        loads = (target.load(table, f"{name}0", iter([folded])),)
        target.merge(Merge(PLACE, table, ORIGIN, {0: at}, {0: (at or 0) + len(batch)}, loads))


def one(number: int, fields: dict[str, Any] | None) -> Change:
    return (number, ""), fields


@pytest.mark.parametrize("seed", [1, 2])
def test_postgres_conforms(server: Postgres, database: str, seed: int) -> None:
    def load_tables() -> list[str]:
        return [
            row[0] for row in server.run(database, r"SELECT relname FROM pg_class WHERE relname LIKE 'zync\_load%'")
        ]

    assert_conforms("postgres", url(server, database), load_tables, seed=seed)


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
    assert "invalid input value for enum" in assert_refused(target, table, [one(2, {"m": "mad"})])
    assert "value too long" in assert_refused(target, table, [one(2, {"v": "long"})])
    assert "0x00" in assert_refused(target, table, [one(2, {"v": "\0"})])


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


def test_the_least_rights_are_enough_and_less_is_named(server: Postgres, database: str, unique: str) -> None:
    user = f"u{unique}"
    server.run(database, f"CREATE USER {user}", "CREATE TABLE rows (id bigint PRIMARY KEY, name text)")
    table = spec(id=pa.int64(), name=pa.string())
    target = PostgresTarget(url(server, database, user))
    with pytest.raises(SinkError, match="permission denied for schema public"):
        target.prepare(table, create=False, evolve="none")
    server.run(
        database,
        f"GRANT USAGE, CREATE ON SCHEMA public TO {user}",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON rows TO {user}",
    )
    target.prepare(table, create=False, evolve="none")
    apply(target, table, [one(1, {"name": "a"}), one(2, {"name": "b"})])
    apply(target, table, [one(1, None), one(2, {"name": "B"})])
    assert server.run(database, "SELECT * FROM rows") == [(2, "B")]


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
    server.run("postgres", f"ALTER DATABASE {database} SET lock_timeout = 200")
    with pytest.raises(TargetUnavailable, match="lock timeout"):
        apply(target, table, [one(1, {"name": "a"})])
    blocker.close()
    apply(target, table, [one(1, {"name": "a"})])
    assert server.run(database, "SELECT name FROM rows") == [("a",)]
