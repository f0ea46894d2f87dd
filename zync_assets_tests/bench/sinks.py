"""Sinks of PostgreSQL against bare statements over bytes that are ready: COPY, and COPY with INSERT ... ON CONFLICT."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import psycopg
import pyarrow as pa
from pyarrow import csv

from zync_assets.pipeline import Pipeline
from zync_assets.sinks.steps import sink_all
from zync_assets_tests.bench.data import EPOCH, append_raw, orders, texts
from zync_assets_tests.bench.rounds import Way
from zync_assets_tests.bench.table import rate_row
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


def _filled(world: World, server: Postgres, records: int) -> Pipeline:
    """A pipeline whose raw table has that many records."""
    name = f"sinks-{records}"
    url = f"postgresql://postgres@127.0.0.1:{server.port}/sinks"
    pipeline = world.pipeline(name, REST.format(url=url, columns=", ".join(COLUMNS)))
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
