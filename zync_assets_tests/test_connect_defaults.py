"""PostgreSQL → Debezium → zync's sink → PostgreSQL: rows from before ALTER TABLE ... ADD COLUMN ... DEFAULT."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zync_assets.checks.state_checks import rows_match
from zync_assets.kafka.topics import survey
from zync_assets.local.services import Services
from zync_assets.sinks.steps import reset_sink, sink_all
from zync_assets_tests.connect import postgres, source_settings, worker
from zync_assets_tests.mini import mini

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PIPELINE = """
inputs:
  - {topic: $left.public.items, pool: Raw, format: avro}
outputs: [{topic: $out, pool: Staging, create: {replication-factor: 1}}]
transforms:
  - {name: row, type: stateless, where: value.op <> 'd', in: $left.public.items, out: $out, key: in.key,
     value: in.value.after}
  - {name: gone, type: stateless, where: value.op = 'd', in: $left.public.items, out: $out, key: in.key, value: null}
sinks:
  - {name: copy, type: postgres, url: "URL", from: [Raw.$left.public.items], table: items, evolve: add}
  - {name: staged, type: postgres, url: "URL", from: [Staging.$out], table: staged, evolve: add}
"""
ADDED = """ALTER TABLE items
  ADD region text NOT NULL DEFAULT '5% ☃',
  ADD empty varchar(9) DEFAULT '',
  ADD plain text,
  ADD good boolean NOT NULL DEFAULT true,
  ADD small smallint DEFAULT -3,
  ADD whole integer NOT NULL DEFAULT 0,
  ADD large bigint DEFAULT 9223372036854775807,
  ADD price numeric(10, 2) NOT NULL DEFAULT 12.30,
  ADD ratio double precision DEFAULT 0.1,
  ADD doc jsonb DEFAULT '{"a": [1]}'
"""
COLUMNS = "id, name, region, empty, plain, good, small, whole, large, price, ratio, doc::text"
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


def test_the_target_has_the_defaults_that_the_source_gave_its_rows(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    with postgres() as server, worker(services, tmp_path, "UTC") as connect:
        server.run("postgres", "CREATE DATABASE source", "CREATE DATABASE target")
        server.run("source", "CREATE TABLE items (id int PRIMARY KEY, name text)")
        server.run("source", "INSERT INTO items SELECT n, 'old ' || n FROM generate_series(1, 3) n")
        url = f"postgresql://postgres@127.0.0.1:{server.port}/target"
        it = mini(services, spark, tmp_path, unique, PIPELINE.replace("URL", url))
        topic = f"{it.left}.public.items"

        def end() -> int:
            state = survey(it.pipeline.kafka, [topic]).states.get(topic)
            return state.partitions[0].end if state else 0

        def written() -> list[tuple[object, ...]]:
            it.ingest()
            it.etl()
            assert list(sink_all(it.pipeline, lambda: spark))
            return server.run("target", "SELECT * FROM items ORDER BY id")

        connect.start("source", source_settings(server, "source", "public.items", it.left, "slot"), "avro")
        connect.wait("the snapshot", lambda: end() == 3)
        assert written() == [(1, "old 1"), (2, "old 2"), (3, "old 3")]
        server.run("source", ADDED, *CHANGES)
        # With the first change after ALTER TABLE, Debezium reads the defaults that the table has at this moment.
        connect.wait("the changes", lambda: end() == 3 + 4)
        server.run("source", *LATER)
        connect.wait("the later change", lambda: end() == 3 + 5)
        source = server.run("source", f"SELECT {COLUMNS} FROM items ORDER BY id")
        assert [row[2] for row in source] == ["5% ☃", "us", "5% ☃", "asia"]
        written()
        for sink, table in (("copy", "items"), ("staged", "staged")):
            assert server.run("target", f"SELECT {COLUMNS} FROM {table} ORDER BY id") == source
            rows = it.pipeline.sink(sink)
            assert rows_match(it.pipeline, lambda: spark, rows, rows.tables[0]).passed
            reset_sink(it.pipeline, lambda: spark, sink, table)
        written()
        for table in ("items", "staged"):
            assert server.run("target", f"SELECT {COLUMNS} FROM {table} ORDER BY id") == source
