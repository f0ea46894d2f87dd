"""The memory of all processes together, but the broker, for a large amount of work and for a tenth of it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from zync_assets.pipeline import Pipeline
from zync_assets_tests.bench import data
from zync_assets_tests.bench.etl import REST as ETL
from zync_assets_tests.bench.etl import append_invoices
from zync_assets_tests.bench.ingest import REST as INGEST
from zync_assets_tests.bench.publish import staged
from zync_assets_tests.bench.rounds import say
from zync_assets_tests.bench.table import time_row
from zync_assets_tests.bench.world import ZYNC, World


def measure_memory(world: World) -> Iterator[dict[str, object]]:
    """Ingest of 20 million, ETL of 4.5 million, publishing of 5 million; each by the command."""
    for step, records, command in (
        ("ingest", 20_000_000, "from-kafka"),
        ("etl", 4_500_000, "etl"),
        ("publish", 5_000_000, "to-kafka"),
    ):
        peaks: list[float] = []
        for part in (records // 10, records):
            count = world.sized(part)
            pipeline = _prepared(world, step, count)
            say(f"memory: {step} of {count:,}")
            peaks.append(_peak(command, world.folder / f"{pipeline.name}.yaml") / (1 << 30))
            world.empty(pipeline)
        work = f"{step} of {records * world.scale:,.0f}, beside a tenth"
        yield time_row("memory", work, [peaks[1]], [peaks[0]], "≤ 1.1, ≤ 3 GiB", "GiB")


def _prepared(world: World, step: str, records: int) -> Pipeline:
    if step == "publish":
        return staged(world, records)
    if step == "etl":
        pipeline = world.pipeline(f"memory-etl-{records}", ETL)
        world.empty(pipeline)
        append_invoices(pipeline, 0, records // 3)
        return pipeline
    topic = f"bench-memory-{records}"
    pipeline = world.pipeline(topic, INGEST.format(topic=topic))
    world.empty(pipeline)
    data.fill_topic(pipeline, topic, 1, records, data.ORDER, data.orders)
    return pipeline


def _peak(command: str, path: Path) -> float:
    """The most bytes that a command and all that it started held at one time; what they share counts once."""
    most = 0.0
    with subprocess.Popen([*ZYNC, command, str(path)], stdout=subprocess.DEVNULL) as process:
        root = psutil.Process(process.pid)
        while process.poll() is None:
            most = max(most, sum(map(_held, [root, *root.children(recursive=True)])))
            time.sleep(0.2)
        assert process.returncode == 0
    return most


def _held(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0
