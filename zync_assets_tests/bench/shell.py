"""Commands from the shell to the next prompt: each is a whole process with a JVM of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from tempfile import TemporaryDirectory

from zync_assets.kafka.topics import delete_topic
from zync_assets.pipeline import Pipeline
from zync_assets_tests.bench import data, etl, ingest
from zync_assets_tests.bench.table import rate_row, time_row
from zync_assets_tests.bench.world import ZYNC, World


def measure_shell(world: World) -> Iterator[dict[str, object]]:
    """Ingest of 5 million records, ETL of 4.5 million, and the checks of these and of their published outputs."""
    yield from _ingest(world)
    yield from _etl_and_check(world)


def _ingest(world: World) -> Iterator[dict[str, object]]:
    records = world.sized(5_000_000)
    topic = f"bench-orders-1-{records}"
    pipeline = world.pipeline(f"shell-{topic}", ingest.REST.format(topic=topic))
    data.fill_topic(pipeline, topic, 1, records, data.ORDER, data.orders)

    def ours() -> float:
        world.empty(pipeline)
        return _run(pipeline, "from-kafka")

    def first() -> float:
        world.empty(pipeline)
        with TemporaryDirectory() as cache:
            took = _run(pipeline, "from-kafka", XDG_CACHE_HOME=cache)
            # Waits for the process in the background, which would disturb the next measurement.
            archive = [sys.executable, "-m", "zync_assets.spark.settings"]
            subprocess.run(archive, check=True, capture_output=True, env={**os.environ, "XDG_CACHE_HOME": cache})
            return took

    found = world.rounds.measure(
        f"shell, ingest, {records}",
        {"ours": ours, "first": first, "reference": lambda: ingest.bare_read(world, topic, 1, records)},
    )
    world.empty(pipeline)
    work = f"zync from-kafka, {records:,} records"
    yield rate_row("shell", work, records, found["ours"], found["reference"], 0.55)
    yield time_row("shell", f"{work}, first time on a machine", found["first"], found["ours"], "≤ 1.5")


def _etl_and_check(world: World) -> Iterator[dict[str, object]]:
    records = world.sized(4_500_000)
    pipeline = world.pipeline(f"shell-etl-{records}", etl.REST)
    world.empty(pipeline)
    # The checks compare the raw tables with the topics.
    data.fill_topic(pipeline, "invoices", 1, records // 3, etl.INVOICE, etl.invoices_of)
    data.fill_topic(pipeline, "statuses", 1, records // 3 * 2, etl.STATUS, etl.statuses_of)
    _run(pipeline, "from-kafka")

    def ours() -> float:
        world.empty(pipeline, "Staging")
        return _run(pipeline, "etl")

    found = world.rounds.measure(
        f"shell, etl, {records}",
        {"ours": ours, "reference": lambda: etl.reference(world, pipeline, records)},
    )
    yield time_row("shell", f"zync etl, {records:,} raw records", found["ours"], found["reference"], "≤ 5")
    _run(pipeline, "to-kafka")
    checks = world.rounds.measure(f"shell, check, {records}", {"ours": lambda: _run(pipeline, "check")})
    yield time_row(
        "shell", f"zync check, {records:,} raw records, {records // 3 * 2:,} published", checks["ours"], None, "≤ 5 s"
    )
    world.empty(pipeline)
    delete_topic(pipeline.kafka, pipeline.outputs[0].topic)


def _run(pipeline: Pipeline, command: str, **environment: str) -> float:
    started = time.monotonic()
    command_line = [*ZYNC, command, str(pipeline.path)]
    subprocess.run(command_line, check=True, capture_output=True, env={**os.environ, **environment})
    return time.monotonic() - started
