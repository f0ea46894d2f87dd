"""Publishing against a bare idempotent producer loop over bytes that are ready."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.kafka.topics import create_topic, delete_topic, topic_states
from zync_assets.lake import staging
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Pipeline
from zync_assets.publish.commit import recreate_topic
from zync_assets.publish.encoding import encoded_rows, staged_topic
from zync_assets.runner import etl_all, publish_all
from zync_assets_tests.bench.data import EPOCH, append_raw, orders, texts
from zync_assets_tests.bench.references import prepare_records, produce
from zync_assets_tests.bench.table import rate_row
from zync_assets_tests.bench.world import World

PARTITIONS = 12

REST = """
inputs:
  - {{topic: sent, pool: Raw, key-format: string, value-format: avro}}
outputs:
  - {{topic: {out}, pool: Staging, format: avro, create: {{partitions: {count}, replication-factor: 1}}}}
transforms:
  - {{name: all, type: stateless, in: sent, out: {out}, key: {{id: in.value.id}}, value: in.value}}
"""


def measure_publish(world: World) -> Iterator[dict[str, object]]:
    """A million staged records in Avro."""
    records = world.sized(1_000_000)
    pipeline = staged(world, records)
    path = world.folder / f"bytes-{records}.parquet"
    state = staging.open_staging(pipeline.lake, "Staging")
    assert state is not None
    rows = encoded_rows(staged_topic(state, pipeline.outputs[0].topic, pipeline.registry), OffsetRange(0, 0, records))
    pq.write_table(pa.Table.from_batches(list(rows)).select(["key", "value"]), path)
    found = world.rounds.measure(
        f"publish, {records}",
        {
            "ours": lambda: publish_once(world, pipeline, records),
            "reference": lambda: _reference(world, pipeline, str(path), records),
        },
    )
    yield rate_row("publish", f"{records:,} × 8 fields", records, found["ours"], found["reference"], 0.7)
    shared = staged(world, records, PARTITIONS)
    found = world.rounds.measure(
        f"publish to {PARTITIONS} partitions, {records}",
        {
            "ours": lambda: publish_once(world, shared, records),
            "reference": lambda: publish_once(world, pipeline, records),
        },
    )
    world.empty(shared)
    world.empty(pipeline)
    what = f"{records:,} × 8 fields to {PARTITIONS} partitions, against one"
    yield rate_row("publish", what, records, found["ours"], found["reference"], 1.0)


def staged(world: World, records: int, count: int = 1) -> Pipeline:
    """A pipeline whose staging pool has that many records, none of them published. ``count``: the topic's partitions."""
    name = f"publish-{records}" + (f"-{count}" if count > 1 else "")
    pipeline = world.pipeline(name, REST.format(out=f"bench-{name}", count=count))
    world.empty(pipeline)
    if topic_states(pipeline.kafka, [pipeline.outputs[0].topic]):
        delete_topic(pipeline.kafka, pipeline.outputs[0].topic)  # of an earlier run
    for first in range(0, records, 1_000_000):
        numbers = np.arange(first, min(first + 1_000_000, records))
        keys = texts("k", numbers)
        append_raw(pipeline.lake, "Raw", "sent", numbers, keys, orders(numbers), pa.array(EPOCH + numbers))
    spark = world.spark(pipeline)
    list(etl_all(pipeline, lambda: spark))
    return pipeline


def publish_once(world: World, pipeline: Pipeline, records: int) -> float:
    """Seconds to publish all of staging to an empty topic."""
    topic, spark = pipeline.outputs[0].topic, world.spark(pipeline)
    recreate_topic(pipeline, topic)
    started = time.monotonic()
    made = sum(commit.records for commit in publish_all(pipeline, lambda: spark, [topic]))
    took = time.monotonic() - started
    assert made == records
    return took


def _reference(world: World, pipeline: Pipeline, path: str, records: int) -> float:
    topic = "bench-reference"
    if topic_states(pipeline.kafka, [topic]):
        delete_topic(pipeline.kafka, topic)
    create_topic(pipeline.kafka, topic, 1, 1, {})
    return world.processes.submit(_prepared, world.services.bootstrap_servers, topic, path, records).result()


def _prepared(servers: str, topic: str, path: str, records: int) -> float:
    assert prepare_records(path) == records
    return produce(servers, topic)
