"""Sinks against bare statements over bytes that are ready.

PostgreSQL: COPY, and COPY with INSERT ... ON CONFLICT. ClickHouse, on its embedded engine: an insert of Arrow batches.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import clickhouse_connect
import numpy as np
import psycopg
import pyarrow as pa
from pyarrow import csv

from zync_assets.pipeline import Pipeline
from zync_assets.sinks.steps import sink_all
from zync_assets_tests.bench.data import EPOCH, append_raw, orders, texts
from zync_assets_tests.bench.memory import peak_memory
from zync_assets_tests.bench.rounds import Way
from zync_assets_tests.bench.table import rate_row, time_row
from zync_assets_tests.bench.world import World
from zync_assets_tests.connect import Postgres, postgres

REST = """
inputs:
  - {{topic: sunk, pool: Raw, key-format: string, value-format: avro}}
sinks:
  - {{name: insert, type: postgres, url: "{url}", from: [Raw.sunk], table: inserted, mode: insert, key: [value.id],
     columns: {{include: [{columns}]}}}}
  - {{name: upsert, type: postgres, url: "{url}", from: [Raw.sunk], table: upserted, key: [value.id], delete: false,
     columns: {{include: [{columns}]}}}}
"""
HOUSE = """
  - {{name: house, type: clickhouse, url: "chdb://{folder}", from: [Raw.sunk], table: housed, key: [value.id], delete: false,
     columns: {{include: [{columns}]}}}}
"""
COLUMNS = ("id", "customer", "city", "item", "amount", "price", "paid", "at")
NAMES = ", ".join(f'"{name}"' for name in COLUMNS)
UPDATES = ", ".join(f'"{name}" = excluded."{name}"' for name in COLUMNS[1:])
GOALS = {"insert": 0.5, "upsert": 0.6}


def measure_sinks(world: World) -> Iterator[dict[str, object]]:
    """A million raw records into a table of 8 columns. Of the rows that are upserted, every other one is there."""
    records = world.sized(1_000_000)
    with postgres() as server:
        server.run("postgres", "CREATE DATABASE sinks")
        pipeline = _filled(world, server, records)
        path = world.folder / f"rows-{records}.csv"
        rows = pa.RecordBatch.from_struct_array(orders(np.arange(records)))
        csv.write_csv(rows, path, csv.WriteOptions(include_header=False, quoting_style="needed"))
        for mode, table in (("insert", "inserted"), ("upsert", "upserted")):
            _written(world, pipeline, mode)  # makes the table
            server.run("sinks", f"CREATE TABLE bare_{table} (LIKE {table} INCLUDING ALL)")
            ways: dict[str, Way] = {
                "ours": partial(_ours, world, pipeline, server, mode, table, records),
                "reference": partial(_reference, world, server, mode, f"bare_{table}", path, records),
            }
            found = world.rounds.measure(f"sinks, {mode}, {records}", ways)
            work = f"PostgreSQL, {mode}, {records:,} × 8 columns"
            yield rate_row("sinks", work, records, found["ours"], found["reference"], GOALS[mode])
    # PostgreSQL's work in the background has ended.
    found = world.rounds.measure(
        f"sinks, clickhouse, {records}",
        {
            "ours": partial(_to_clickhouse, world, pipeline, records),
            "reference": lambda: world.processes.submit(_bare_arrow, world.folder / "bare-house", records).result(),
        },
    )
    work = f"ClickHouse, upsert, {records:,} × 8 columns"
    yield rate_row("sinks", work, records, found["ours"], found["reference"], 0.6)


def measure_sink_memory(world: World) -> Iterator[dict[str, object]]:
    """The memory of a command that appends rows to one table and upserts them into another, beside a quarter of the rows.

    The JVM's old generation grows to its limit during the first few million rows. A quarter is past this growth.
    """
    sizes = {"all": world.sized(20_000_000), "quarter": world.sized(5_000_000)}
    with postgres() as server:
        server.run("postgres", "CREATE DATABASE sinks")
        pipelines = {name: _filled(world, server, records, with_house=False) for name, records in sizes.items()}
        ways: dict[str, Way] = {name: partial(_peak, world, server, found) for name, found in pipelines.items()}
        once = replace(world.rounds, count=1)
        found = once.measure(f"sink-memory, {sizes['all']}", ways)
        for pipeline in pipelines.values():
            world.empty(pipeline)
        named = f"sinks of {sizes['all']:,}, beside a quarter"
        yield time_row("sink-memory", named, found["all"], found["quarter"], "≤ 1.1", "GiB")


def _peak(world: World, server: Postgres, pipeline: Pipeline) -> float:
    server.run("sinks", "DROP TABLE IF EXISTS zync_positions, zync_quarantine, inserted, upserted")
    return peak_memory("sink", world.folder / f"{pipeline.name}.yaml") / (1 << 30)


def _filled(world: World, server: Postgres, records: int, *, with_house: bool = True) -> Pipeline:
    """A pipeline whose raw table has that many records."""
    name = f"sinks-{records}"
    url = f"postgresql://postgres@127.0.0.1:{server.port}/sinks"
    text = REST + (HOUSE if with_house else "")
    pipeline = world.pipeline(name, text.format(url=url, columns=", ".join(COLUMNS), folder=_house(world)))
    world.empty(pipeline)
    for first in range(0, records, 1_000_000):
        numbers = np.arange(first, min(first + 1_000_000, records))
        append_raw(
            pipeline.lake, "Raw", "sunk", numbers, texts("k", numbers), orders(numbers), pa.array(EPOCH + numbers)
        )
    return pipeline


def _written(world: World, pipeline: Pipeline, sink: str) -> int:
    spark = world.spark(pipeline)
    return sum(made.records for made in sink_all(pipeline, lambda: spark, [sink]))


def _prepare(server: Postgres, mode: str, table: str, records: int) -> None:
    """The table as it is before a round: empty, or with every other row."""
    server.run("sinks", f"TRUNCATE {table}")
    if mode == "upsert":
        series = f"SELECT number, 'customer', 'city' FROM generate_series(0, {records - 1}, 2) AS number"
        server.run("sinks", f"INSERT INTO {table} (id, customer, city) {series}")
    server.run("sinks", f"VACUUM ANALYZE {table}", "CHECKPOINT")


def _ours(world: World, pipeline: Pipeline, server: Postgres, mode: str, table: str, records: int) -> float:
    _prepare(server, mode, table, records)
    server.run("sinks", f"DELETE FROM zync_positions WHERE sink = '{mode}'")
    started = time.monotonic()
    assert _written(world, pipeline, mode) == records
    took = time.monotonic() - started
    assert server.run("sinks", f"SELECT count(*), count(price) FROM {table}") == [(records, records)]
    return took


def _reference(world: World, server: Postgres, mode: str, table: str, path: Path, records: int) -> float:
    _prepare(server, mode, table, records)
    took = world.processes.submit(_bare, server.port, mode, table, path).result()
    assert server.run("sinks", f"SELECT count(*), count(price) FROM {table}") == [(records, records)]
    return took


def _bare(port: int, mode: str, table: str, path: Path) -> float:
    """Seconds of the bare statements, in one transaction."""
    content = memoryview(path.read_bytes())
    started = time.monotonic()
    with psycopg.connect(host="127.0.0.1", port=port, user="postgres", dbname="sinks") as connection:
        cursor = connection.cursor()
        target = table
        if mode == "upsert":
            target = "loaded"
            cursor.execute(f"CREATE TEMPORARY TABLE loaded (LIKE {table}) ON COMMIT DROP".encode())
        with cursor.copy(f"COPY {target} ({NAMES}) FROM STDIN (FORMAT csv)".encode()) as copy:
            for at in range(0, len(content), 1 << 20):
                copy.write(content[at : at + (1 << 20)])
        if mode == "upsert":
            query = f"INSERT INTO {table} ({NAMES}) SELECT {NAMES} FROM loaded"
            cursor.execute(f"{query} ON CONFLICT (id) DO UPDATE SET {UPDATES}".encode())
    return time.monotonic() - started


def _house(world: World) -> Path:
    return world.folder / "house"


def _to_clickhouse(world: World, pipeline: Pipeline, records: int) -> float:
    shutil.rmtree(_house(world), ignore_errors=True)
    started = time.monotonic()
    assert _written(world, pipeline, "house") == records
    took = time.monotonic() - started
    client: Any = clickhouse_connect.get_client(interface="chdb", path=str(_house(world)))
    with closing(client):
        assert client.query("SELECT count(), count(price) FROM housed FINAL").result_rows == [(records, records)]
    return took


def _bare_arrow(folder: Path, records: int) -> float:
    """Seconds of one insert into an empty table of the same kind. As in PostgreSQL's references, the connection counts."""
    shutil.rmtree(folder, ignore_errors=True)
    rows = pa.Table.from_batches([pa.RecordBatch.from_struct_array(orders(np.arange(records)))])
    kinds = ("Int64", "String", "String", "String", "Int32", "Float64", "Bool", "Int64")
    columns = ", ".join(
        f"{name} {kind if name == 'id' else f'Nullable({kind})'}" for name, kind in zip(COLUMNS, kinds, strict=True)
    )
    client: Any = clickhouse_connect.get_client(interface="chdb", path=str(folder))
    with closing(client):
        client.command(
            f"CREATE TABLE bare ({columns}, zync_offset UInt64, zync_deleted UInt8)"
            " ENGINE = ReplacingMergeTree(zync_offset, zync_deleted) ORDER BY id"
        )
    started = time.monotonic()
    client = clickhouse_connect.get_client(interface="chdb", path=str(folder))
    with closing(client):
        client.insert_arrow("bare", rows)
    took = time.monotonic() - started
    client = clickhouse_connect.get_client(interface="chdb", path=str(folder))
    with closing(client):
        assert client.query("SELECT count() FROM bare FINAL").result_rows == [(records,)]
    return took
