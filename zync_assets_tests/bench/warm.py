"""The time of a small ``zync etl`` from the shell with a running shared Spark server."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

from zync_assets.lake import raw
from zync_assets.pipeline import Pipeline
from zync_assets_tests.bench.etl import REST, append_invoices
from zync_assets_tests.bench.increments import NEW
from zync_assets_tests.bench.table import time_row
from zync_assets_tests.bench.world import ZYNC, World


def measure_warm(world: World) -> Iterator[dict[str, object]]:
    """2,000 new records; the reference is the same command with a JVM of its own."""
    environment = {**os.environ, "ZYNC_SPARK_DIR": str(world.folder / "spark")}
    warm = world.pipeline("warm", REST, "remote: shared")
    cold = world.pipeline("cold", REST)
    try:
        found = world.rounds.measure(
            "warm start", {"warm": lambda: _etl(warm, environment), "cold": lambda: _etl(cold, environment)}
        )
    finally:
        subprocess.run([*ZYNC, "spark", "down"], env=environment, check=True, capture_output=True)
    yield time_row("warm start", f"zync etl, {NEW:,} new records", found["warm"], found["cold"], "≤ 3 s")


def _etl(pipeline: Pipeline, environment: dict[str, str]) -> float:
    state = raw.open_raw(pipeline.lake, "Raw", "invoices")
    first = 0 if state is None else sum(item.records for item in raw.raw_files(state))
    append_invoices(pipeline, first, first + NEW // 3)
    started = time.monotonic()
    subprocess.run([*ZYNC, "etl", str(pipeline.path)], env=environment, check=True, capture_output=True)
    return time.monotonic() - started
