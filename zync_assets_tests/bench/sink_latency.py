"""How long a change takes from the source topic to a row of PostgreSQL, while ``zync run`` works."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import psycopg

from zync_assets.kafka.topics import create_topic
from zync_assets_tests.bench.latency import RATE, middle_and_late, under_load
from zync_assets_tests.bench.rounds import say
from zync_assets_tests.bench.table import time_row
from zync_assets_tests.bench.world import World
from zync_assets_tests.connect import Postgres, postgres

INPUT = """
inputs:
  - {{topic: {topic}, pool: Raw, key-format: string, value-format: json, schema: "id bigint, sent bigint"}}
"""
STAGED = """
outputs:
  - {{topic: {topic}-out, pool: Staging, key-format: string, value-format: json, create: {{replication-factor: 1}}}}
transforms:
  - {{name: all, type: stateless, in: {topic}, out: {topic}-out, key: in.key, value: in.value}}
"""
SINK = """
sinks:
  - {{name: house, type: postgres, url: "{url}", from: ["{source}"], table: arrived, key: [value.id], delete: false}}
"""
SOURCES = {"Raw.{topic}": ("raw table to row", ""), "Staging.{topic}-out": ("staging to row", STAGED)}
POLL_SECONDS = 0.02


def measure_sink_latency(world: World) -> Iterator[dict[str, object]]:
    """A thousand changes a second for a minute, upserted from a raw table, and from a staging pool."""
    with postgres() as server:
        for number, (source, (what, rest)) in enumerate(SOURCES.items()):
            topic, database = f"bench-sink-latency-{int(time.time())}", f"arrivals{number}"
            server.run("postgres", f"CREATE DATABASE {database}")
            url = f"postgresql://postgres@127.0.0.1:{server.port}/{database}"
            text = (INPUT + rest + SINK).format(topic=topic, url=url, source=source.format(topic=topic))
            pipeline = world.pipeline("sink-latency", text)
            world.empty(pipeline)
            create_topic(pipeline.kafka, topic, 1, 1, {})
            say(f"sink latency, {what}: starting zync run")
            found = under_load(world, "sink-latency", [topic], partial(_arrived, server, database))
            middle, late = middle_and_late(found)
            yield time_row("sink-latency", f"{what}, {RATE:,}/s, median", [middle], None, "≤ 2 s")
            yield time_row("sink-latency", f"{what}, {RATE:,}/s, 99th percentile", [late], None, "")


def _arrived(server: Postgres, database: str, count: int, check: Callable[[], None]) -> list[float]:
    """Seconds from sending to the moment when the row can be read, in the order of sending. One partition has all records."""
    seen: list[float] = []
    with psycopg.connect(
        host="127.0.0.1", port=server.port, user="postgres", dbname=database, autocommit=True
    ) as reader:
        while not reader.execute("SELECT to_regclass('zync_positions')::text").fetchall()[0][0]:
            check()
            time.sleep(1)
        while len(seen) < count:
            check()
            time.sleep(POLL_SECONDS)
            ((upcoming,),) = reader.execute("SELECT coalesce(max(next), 0) FROM zync_positions").fetchall()
            seen += [time.time()] * (upcoming - len(seen))
        sent = [row[0] / 1e9 for row in reader.execute("SELECT sent FROM arrived ORDER BY id")]
    return [arrived - began for began, arrived in zip(sent, seen, strict=True)]
