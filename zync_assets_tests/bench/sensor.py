"""How long a pair of records takes from its source topics to the output topic by Dagster's sensor alone."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import psutil

from zync_assets.kafka.topics import create_topic, topic_states
from zync_assets.local import processes
from zync_assets.pipeline import Pipeline
from zync_assets_tests.bench.rounds import say
from zync_assets_tests.bench.table import time_row
from zync_assets_tests.bench.world import ZYNC, World
from zync_assets_tests.mini import send

ROOT = Path(__file__).resolve().parents[2]
PAIRS = 20
"""Pairs of records that count, at scale 1, after two that do not: the first start of Spark is not latency."""
LIMIT = 300.0
"""Seconds after which a pair that has not arrived is taken for lost."""

REST = """
inputs:
  - {{topic: {left}, pool: Raw, key-format: string, value-format: json, schema: "id bigint"}}
  - {{topic: {right}, pool: Raw, key-format: string, value-format: json, schema: "id bigint"}}
outputs:
  - {{topic: {out}, pool: Staging, key-format: string, value-format: json, create: {{replication-factor: 1}}}}
transforms:
  - name: pairs
    type: denorm
    left: {left}
    right: {right}
    join-on: left.value.id = right.value.id
    out: {out}
    key: left.key
    value: {{id: left.value.id}}
"""


def measure_sensor(world: World) -> Iterator[dict[str, object]]:
    """Pairs of records, each sent at some time after the pair before has arrived, with the Spark of a code location."""
    stamp, rng = int(time.time()), random.Random(22)
    left, right, out = (f"bench-sensor-{stamp}-{name}" for name in ("left", "right", "out"))
    # One Spark for all runs of the code location.
    pipeline = world.pipeline("sensor", REST.format(left=left, right=right, out=out), "remote: shared")
    world.empty(pipeline)
    for topic in (left, right):
        create_topic(pipeline.kafka, topic, 1, 1, {})
    found: list[float] = []
    with _dagster(world, pipeline) as process:
        for number in range(2 + max(2, int(PAIRS * world.scale))):
            time.sleep(rng.uniform(0, 5))
            began = time.monotonic()
            for topic in (left, right):
                send(pipeline, topic, [{"id": number}], times=[int(time.time() * 1000)])
            _await(pipeline, out, number + 1, process)
            found.append(time.monotonic() - began)
            say(f"sensor: pair {number} took {found[-1]:.1f} s")
    counted = sorted(found[2:])
    yield time_row("sensor", "source record to output topic, median", [statistics.median(counted)], None, "≤ 10 s")
    late = counted[len(counted) * 99 // 100]
    yield time_row("sensor", "source record to output topic, 99th percentile", [late], None, "≤ 20 s")


@contextmanager
def _dagster(world: World, pipeline: Pipeline) -> Generator[subprocess.Popen[bytes]]:
    """``dagster dev`` with the pipeline's sensor, and its Spark servers in the world's folder."""
    home = world.folder / "sensor-home"
    home.mkdir(exist_ok=True)
    (home / "dagster.yaml").write_text((ROOT / "demo" / "dagster.yaml").read_text())
    env = {
        **os.environ,
        "DAGSTER_HOME": str(home),
        "ZYNC_PIPELINE": str(pipeline.path),
        "ZYNC_SENSOR": "running",
        "ZYNC_SPARK_DIR": str(world.folder / "spark"),
    }
    env.pop("SPARK_REMOTE", None)
    command = [sys.executable, "-m", "dagster", "dev", "--port", "0"]
    with (
        (world.folder / "sensor.log").open("w") as log,
        subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log) as process,
    ):
        try:
            yield process
        finally:
            family = psutil.Process(process.pid).children(recursive=True)
            processes.stop([psutil.Process(process.pid)])
            processes.stop(processes.wait(family, 20.0), gently=False)
            subprocess.run([*ZYNC, "spark", "down"], env=env, check=False, capture_output=True)


def _await(pipeline: Pipeline, topic: str, count: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT
    while True:
        state = topic_states(pipeline.kafka, [topic]).get(topic)
        if state is not None and state.partitions[0].end >= count:
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise click.ClickException(f"sensor: pair {count} did not arrive; see sensor.log in the folder")
        time.sleep(0.1)
