"""Ingest against a bare consumer loop in as many processes as there are Spark tasks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from zync_assets.codecs.avro.schema import parse
from zync_assets.codecs.avro.types import lake_type
from zync_assets.codecs.spark_types import spark_ddl
from zync_assets.pipeline import Format, Pipeline
from zync_assets.runner import ingest_all
from zync_assets_tests.bench import data
from zync_assets_tests.bench.references import consume
from zync_assets_tests.bench.table import rate_row
from zync_assets_tests.bench.world import TASKS, World

REST = """
inputs:
  - {{topic: {topic}, pool: Raw, key-format: string, value-format: avro}}
outputs:
  - {{topic: {topic}-out, pool: Staging, format: avro, create: {{replication-factor: 1}}}}
transforms:
  - {{name: all, type: stateless, in: {topic}, out: {topic}-out, key: {{id: in.kafka.offset}}, value: in.value}}
"""


AVRO = "value-format: avro"
CONNECT = "value-format: connect-json"


def measure_ingest(world: World) -> Iterator[dict[str, object]]:
    """5 million records of 8 fields in one partition and over 8, and 2 million envelopes in each format."""
    million = 1_000_000
    typed = f"value-format: json, value-schema: '{spark_ddl(lake_type(parse(json.dumps(data.ENVELOPE))))}'"
    cases: list[tuple[str, int, int, dict[str, Any], data.Columns, float, Format, str]] = [
        ("8 fields, 1 partition", 1, 5 * million, data.ORDER, data.orders, 0.6, "avro", AVRO),
        ("8 fields, 8 partitions", 8, 5 * million, data.ORDER, data.orders, 0.6, "avro", AVRO),
        ("Debezium envelopes", 1, 2 * million, data.ENVELOPE, data.envelopes, 0.4, "avro", AVRO),
        ("envelopes, Connect JSON", 1, 2 * million, data.ENVELOPE, data.envelopes, 0.3, "connect-json", CONNECT),
        ("envelopes, JSON with a schema", 1, 2 * million, data.ENVELOPE, data.envelopes, 0.3, "json", typed),
    ]
    for work, partitions, records, schema, columns, goal, format, side in cases:
        records = world.sized(records)
        kind = "" if format == "avro" else f"{format}-"
        topic = f"bench-{kind}{schema['name'].lower()}s-{partitions}-{records}"
        pipeline = world.pipeline(topic, REST.format(topic=topic).replace(AVRO, side))
        data.fill_topic(pipeline, topic, partitions, records, schema, columns, format)
        found = world.rounds.measure(
            f"ingest, {work}, {records}",
            {
                "ours": lambda pipeline=pipeline, records=records: ingest_once(world, pipeline, records),
                "reference": lambda topic=topic, partitions=partitions, records=records: bare_read(
                    world, topic, partitions, records
                ),
            },
        )
        world.empty(pipeline)
        yield rate_row("ingest", f"{records:,} × {work}", records, found["ours"], found["reference"], goal)


def ingest_once(world: World, pipeline: Pipeline, records: int) -> float:
    world.empty(pipeline)
    spark = world.spark(pipeline)
    started = time.monotonic()
    made = sum(commit.records for commit in ingest_all(pipeline, lambda: spark, [pipeline.inputs[0].topic]))
    took = time.monotonic() - started
    assert made == records
    return took


def bare_read(world: World, topic: str, partitions: int, records: int) -> float:
    """Seconds of the bare loops in warm processes, a loop a task."""
    share = records // partitions
    if partitions == 1:
        parts = [[(0, records * part // TASKS, records * (part + 1) // TASKS)] for part in range(TASKS)]
    else:
        parts = [[(each, 0, share) for each in range(part, partitions, TASKS)] for part in range(TASKS)]
    started = time.monotonic()
    asked = [world.processes.submit(consume, world.services.bootstrap_servers, topic, part) for part in parts]
    assert sum(each.result() for each in asked) == records
    return time.monotonic() - started
