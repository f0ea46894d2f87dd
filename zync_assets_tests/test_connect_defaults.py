"""A database → Debezium → zync's sink → the same kind of database: rows from before ALTER TABLE ... ADD COLUMN ... DEFAULT."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zync_assets.checks.state_checks import rows_match
from zync_assets.kafka.topics import survey
from zync_assets.local.services import Services
from zync_assets.sinks.steps import reset_sink, sink_all
from zync_assets_tests.connect import Worker, mariadb_settings, postgres, source_settings, worker
from zync_assets_tests.mariadb import mariadb
from zync_assets_tests.mini import Mini, mini

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PIPELINE = """
inputs:
  - {topic: $left.NAMESPACE.items, pool: Raw, format: avro}
outputs: [{topic: $out, pool: Staging, create: {replication-factor: 1}}]
transforms:
  - {name: row, type: stateless, where: value.op <> 'd', in: $left.NAMESPACE.items, out: $out, key: in.key,
     value: in.value.after}
  - {name: gone, type: stateless, where: value.op = 'd', in: $left.NAMESPACE.items, out: $out, key: in.key, value: null}
sinks:
  - {name: copy, type: KIND, url: "URL", from: [Raw.$left.NAMESPACE.items], table: items, evolve: add}
  - {name: staged, type: KIND, url: "URL", from: [Staging.$out], table: staged, evolve: add}
"""
POSTGRES_ADDITION = """ALTER TABLE items
  ADD region text NOT NULL DEFAULT '5% ☃',
  ADD empty varchar(9) DEFAULT '',
  ADD plain text,
  ADD good boolean NOT NULL DEFAULT true,
  ADD small smallint DEFAULT -3,
  ADD whole integer NOT NULL DEFAULT 0,
  ADD large bigint DEFAULT 9223372036854775807,
  ADD price numeric(10, 2) NOT NULL DEFAULT 12.30,
  ADD ratio double precision DEFAULT 0.1,
  ADD doc jsonb DEFAULT '{"a": [1]}',
  ADD day date NOT NULL DEFAULT '2020-02-29',
  ADD stamp timestamptz DEFAULT '2020-02-29 11:12:13.5+01'
"""
MARIADB_ADDITION = """ALTER TABLE items
  ADD region varchar(40) NOT NULL DEFAULT '5% ☃',
  ADD empty varchar(9) DEFAULT '',
  ADD plain varchar(30),
  ADD good tinyint(1) NOT NULL DEFAULT 1,
  ADD flag bit(1) DEFAULT b'1',
  ADD small smallint DEFAULT -3,
  ADD whole int unsigned NOT NULL DEFAULT 4294967295,
  ADD large bigint DEFAULT 9223372036854775807,
  ADD price decimal(10, 2) NOT NULL DEFAULT 12.30,
  ADD ratio double DEFAULT 0.1,
  ADD kind enum('a', 'b') NOT NULL DEFAULT 'b',
  ADD kinds set('a', 'b') DEFAULT 'a,b',
  ADD founded year DEFAULT 2021,
  ADD doc json DEFAULT '{"a": [1]}',
  ADD day date NOT NULL DEFAULT '2020-02-29',
  ADD stamp timestamp NULL DEFAULT '2020-02-29 11:12:13',
  ADD moment datetime(6) NOT NULL DEFAULT '2020-02-29 11:12:13.456789',
  ADD clock time DEFAULT '10:11:12'
"""
_SHARED = "id, name, region, empty, plain, good, small, whole, large, price, ratio"
POSTGRES_COLUMNS = f"{_SHARED}, doc::text, day, stamp"
MARIADB_COLUMNS = f"{_SHARED}, kind, kinds, founded, doc, flag + 0, day, stamp, moment, clock"
BINARY_LOG = [
    "--log-bin=bin",
    "--binlog-format=ROW",
    "--server-id=1",
    "--default-time-zone=+00:00",
    "--character-set-server=utf8mb4",
]
"""Options of a server whose changes Debezium can read."""
CHANGES = (
    "INSERT INTO items (id, name) VALUES (4, 'new')",
    # Not to null: the converter of this test writes a default in place of a null (KIP-581).
    "UPDATE items SET region = 'us', empty = 'x', plain = 'y' WHERE id = 2",
    "DELETE FROM items WHERE id = 3",
)
LATER = (
    "ALTER TABLE items ALTER region SET DEFAULT 'asia'",
    "INSERT INTO items (id, name) VALUES (5, 'newer')",
)


@dataclass(frozen=True)
class Source:
    """A server with the databases ``source`` and ``target``. ``kind``: of the sink; ``url``: of its target; ``run``: statements
    in a database, the rows of the last one; ``addition``: the statement that adds columns; ``columns``: to compare, as SQL."""

    kind: str
    url: str
    namespace: str
    run: Callable[..., list[tuple[Any, ...]]]
    addition: str
    columns: str

    def rows(self, database: str, table: str) -> list[tuple[Any, ...]]:
        return self.run(database, f"SELECT {self.columns} FROM {table} ORDER BY id")

    def assert_equal_targets(self) -> None:
        for table in ("items", "staged"):
            assert self.rows("target", table) == self.rows("source", "items")


def test_postgres_rows_have_the_defaults_that_the_source_gave_them(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    with postgres() as server, worker(services, tmp_path, "UTC") as connect:
        url = f"postgresql://postgres@127.0.0.1:{server.port}/target"
        source = Source("postgres", url, "public", server.run, POSTGRES_ADDITION, POSTGRES_COLUMNS)
        server.run("postgres", "CREATE DATABASE source", "CREATE DATABASE target")
        it = _pipeline(services, spark, tmp_path, unique, source)
        connect.start("source", source_settings(server, "source", "public.items", it.left, "slot"), "avro")
        _assert_defaults(it, connect, source)


@pytest.mark.skipif(shutil.which("mariadbd") is None, reason="no MariaDB here: apt-get install mariadb-server")
def test_mariadb_rows_have_the_defaults_that_the_source_gave_them(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    with mariadb(BINARY_LOG) as server, worker(services, tmp_path, "UTC") as connect:
        source = Source("mysql", server.url("target"), "source", server.run, MARIADB_ADDITION, MARIADB_COLUMNS)
        server.run("mysql", "CREATE DATABASE source", "CREATE DATABASE target")
        it = _pipeline(services, spark, tmp_path, unique, source)
        connect.start("source", mariadb_settings(server, services, "source.items", it.left), "avro")
        _assert_defaults(it, connect, source)


def _pipeline(services: Services, spark: SparkSession, folder: Path, unique: str, source: Source) -> Mini:
    """The pipeline, and a table with three rows."""
    source.run("source", "CREATE TABLE items (id int PRIMARY KEY, name varchar(50))")
    source.run("source", "INSERT INTO items VALUES (1, 'old 1'), (2, 'old 2'), (3, 'old 3')")
    text = PIPELINE.replace("URL", source.url).replace("KIND", source.kind).replace("NAMESPACE", source.namespace)
    return mini(services, spark, folder, unique, text)


def _assert_defaults(it: Mini, connect: Worker, source: Source) -> None:
    """After ALTER TABLE ... ADD COLUMN ... DEFAULT, the targets of the raw table and of the staged topic equal the source."""
    topic = f"{it.left}.{source.namespace}.items"

    def end() -> int:
        state = survey(it.pipeline.kafka, [topic]).states.get(topic)
        return state.partitions[0].end if state else 0

    def write() -> None:
        it.ingest()
        it.etl()
        assert list(sink_all(it.pipeline, lambda: it.spark))

    connect.wait("the snapshot", lambda: end() == 3)
    write()
    assert source.run("target", "SELECT * FROM items ORDER BY id") == [(1, "old 1"), (2, "old 2"), (3, "old 3")]
    source.run("source", source.addition, *CHANGES)
    # With the first change after ALTER TABLE, Debezium reads the defaults that the table has at this moment.
    connect.wait("the changes", lambda: end() == 3 + 4)
    source.run("source", *LATER)
    connect.wait("the later change", lambda: end() == 3 + 5)
    assert [row[2] for row in source.rows("source", "items")] == ["5% ☃", "us", "5% ☃", "asia"]
    write()
    source.assert_equal_targets()
    for sink, table in (("copy", "items"), ("staged", "staged")):
        rows = it.pipeline.sink(sink)
        assert rows_match(it.pipeline, lambda: it.spark, rows, rows.tables[0]).passed
        reset_sink(it.pipeline, lambda: it.spark, sink, table)
    write()
    source.assert_equal_targets()
