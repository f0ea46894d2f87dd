"""A lake in a bucket of an S3 server on this machine, against the same lake in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from zync_assets.local.services import Services
from zync_assets_tests import s3
from zync_assets_tests.bench import data, ingest
from zync_assets_tests.bench.etl import REST
from zync_assets_tests.bench.increments import HISTORIES, NEW, Growing
from zync_assets_tests.bench.rounds import Rounds
from zync_assets_tests.bench.table import time_row
from zync_assets_tests.bench.world import World


def measure_bucket(world: World) -> Iterator[dict[str, object]]:
    """Ingest of 5 million records, and 2,000 new records after 0.6 million."""
    # A JVM gets the jars for buckets at its start.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        yield from process.submit(_rows, world.folder, world.services, world.rounds, world.scale).result()


def _rows(folder: Path, services: Services, rounds: Rounds, scale: float) -> list[dict[str, object]]:
    buckets = folder / "buckets"
    buckets.mkdir(exist_ok=True)
    with s3.serving(buckets) as server, ThreadPoolExecutor() as threads:
        server.bucket("bench")
        world = World(folder, services, rounds, scale, threads)
        return [_ingest(world, server), _increment(world, server)]


def _ingest(world: World, server: s3.S3) -> dict[str, object]:
    records = world.sized(5_000_000)
    topic = f"bench-orders-1-{records}"
    text = ingest.REST.format(topic=topic)
    own = world.pipeline(f"bucket-{topic}", text, lake=server.lake(f"bench/{topic}"))
    other = world.pipeline(f"folder-{topic}", text)
    data.fill_topic(own, topic, 1, records, data.ORDER, data.orders)
    found = world.rounds.measure(
        f"bucket, ingest, {records}",
        {
            "bucket": lambda: ingest.ingest_once(world, own, records),
            "folder": lambda: ingest.ingest_once(world, other, records),
        },
    )
    world.empty(own)
    world.empty(other)
    return time_row("bucket", f"ingest of {records:,} × 8 fields", found["bucket"], found["folder"], "≤ 1.3")


def _increment(world: World, server: s3.S3) -> dict[str, object]:
    history = HISTORIES[0]
    own = Growing(world, history, REST, "bucket", server.lake(f"bench/increment-{world.scale}"))
    other = Growing(world, history, REST, "folder")
    found = world.rounds.measure(
        f"bucket, increment, {world.scale}", {"bucket": own.increment, "folder": other.increment}
    )
    return time_row("bucket", f"{NEW:,} after {history.work}", found["bucket"], found["folder"], "≤ 2")
