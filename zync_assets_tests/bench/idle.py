"""The cost of a step without work."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

from dagster import DagsterInstance, build_sensor_context

from zync_assets.assets.build import build_definitions
from zync_assets.assets.names import Names
from zync_assets.pipeline import Pipeline
from zync_assets.runner import etl_all, ingest_all, publish_all
from zync_assets_tests.bench import data
from zync_assets_tests.bench.ingest import REST
from zync_assets_tests.bench.table import time_row
from zync_assets_tests.bench.world import ZYNC, World


def measure_idle(world: World) -> Iterator[dict[str, object]]:
    """A tick of the sensor, ``zync etl`` and ``zync status``, after 600,000 records."""
    records = world.sized(600_000)
    topic = f"bench-idle-{records}"
    pipeline = world.pipeline(topic, REST.format(topic=topic))
    path = world.folder / f"{topic}.yaml"
    data.fill_topic(pipeline, topic, 1, records, data.ORDER, data.orders)
    spark = world.spark(pipeline)
    list(ingest_all(pipeline, lambda: spark, [topic]))
    list(etl_all(pipeline, lambda: spark))
    list(publish_all(pipeline, lambda: spark, [pipeline.outputs[0].topic]))
    ticks = _Ticks(pipeline)
    found = world.rounds.measure(
        f"idle, {records}",
        {
            "tick": ticks.tick,
            "etl": lambda: _command("etl", str(path)),
            "status": lambda: _command("status", str(path)),
        },
    )
    ticks.instance.dispose()
    yield time_row(
        "nothing to do", "a tick of the sensor", [1000 * took for took in found["tick"]], None, "≤ 100", "ms"
    )
    for command in ("etl", "status"):
        yield time_row("nothing to do", f"zync {command}", found[command], None, "≤ 1 s")


class _Ticks:
    def __init__(self, pipeline: Pipeline) -> None:
        self.instance = DagsterInstance.ephemeral()
        self.definitions = build_definitions(pipeline)
        self.sensor = self.definitions.resolve_sensor_def(Names(pipeline).sensor)
        self.cursor: str | None = None

    def tick(self) -> float:
        context = build_sensor_context(instance=self.instance, cursor=self.cursor, definitions=self.definitions)
        started = time.monotonic()
        result = self.sensor(context)
        took = time.monotonic() - started
        self.cursor = getattr(result, "cursor", self.cursor)
        for request in getattr(result, "dynamic_partitions_requests", None) or ():
            self.instance.add_dynamic_partitions(request.partitions_def_name, list(request.partition_keys))
        return took


def _command(name: str, path: str) -> float:
    started = time.monotonic()
    subprocess.run(
        [*ZYNC, name, path],
        check=True,
        capture_output=True,
        env={**os.environ, "JAVA_HOME": "/nowhere"},
    )
    return time.monotonic() - started
