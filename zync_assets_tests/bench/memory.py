"""The memory of all processes together, but the broker, for a large amount of work and for a tenth of it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from zync_assets.pipeline import Pipeline
from zync_assets.publish.commit import recreate_topic
from zync_assets_tests.bench import data
from zync_assets_tests.bench.etl import REST as ETL
from zync_assets_tests.bench.etl import append_invoices
from zync_assets_tests.bench.ingest import REST as INGEST
from zync_assets_tests.bench.publish import staged
from zync_assets_tests.bench.table import time_row
from zync_assets_tests.bench.world import ZYNC, World


def measure_memory(world: World) -> Iterator[dict[str, object]]:
    """Ingest of 20 million, ETL of 4.5 million, publishing of 5 million; each by the command."""
    for step, records, command in (
        ("ingest", 20_000_000, "from-kafka"),
        ("etl", 4_500_000, "etl"),
        ("publish", 5_000_000, "to-kafka"),
    ):
        all_of_it, tenth = _Work(world, step, command, records), _Work(world, step, command, records // 10)
        found = world.rounds.measure(
            f"memory, {step} of {all_of_it.records}", {"all": all_of_it.peak, "tenth": tenth.peak}
        )
        for work in (all_of_it, tenth):
            work.remove()
        named = f"{step} of {all_of_it.records:,}, beside a tenth"
        yield time_row("memory", named, found["all"], found["tenth"], "≤ 1.1, ≤ 3 GiB", "GiB")


class _Work:
    """The repeated work of one command, in a new process each time. Its data are produced at the first use."""

    def __init__(self, world: World, step: str, command: str, records: int) -> None:
        self.world, self.step, self.command, self.records = world, step, command, world.sized(records)
        self.pipeline: Pipeline | None = None

    def peak(self) -> float:
        """GiB at the most."""
        if self.pipeline is None:
            self.pipeline = _prepared(self.world, self.step, self.records)
        elif self.step == "publish":
            recreate_topic(self.pipeline, self.pipeline.outputs[0].topic)
        else:
            self.world.empty(self.pipeline, "Staging" if self.step == "etl" else "")
        return peak_memory(self.command, self.world.folder / f"{self.pipeline.name}.yaml") / (1 << 30)

    def remove(self) -> None:
        if self.pipeline is not None:
            self.world.empty(self.pipeline)


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


def peak_memory(command: str, path: Path) -> float:
    """The peak memory in bytes of a command and its descendants. Shared memory counts once."""
    most = 0.0
    with subprocess.Popen([*ZYNC, command, str(path)], stdout=subprocess.DEVNULL) as process:
        root = psutil.Process(process.pid)
        try:
            while process.poll() is None:
                most = max(most, sum(map(_held, [root, *root.children(recursive=True)])))
                time.sleep(0.1)
        finally:
            # Who ends the benchmark does not wait for a command's last record.
            process.terminate()
        assert process.returncode == 0
    return most


def _held(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0
