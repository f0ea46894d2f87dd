"""The cost of each kind of work after years of history: a batch, its check, a commit, an opening of the lake, a tick's keys.

The Delta log names files of a million records each. The files are not there: each step reads the files of new records
alone. The log, the account and the numbers of the tables are real.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

from dagster import DagsterInstance

from zync_assets.assets.facts import Grid
from zync_assets.assets.names import keys_of, spans_between
from zync_assets.assets.runs import ActiveRuns
from zync_assets.assets.sensor import definition_keys
from zync_assets.audit.guard import exactly_once_done_coverage
from zync_assets.lake import raw, staging, storage
from zync_assets.lake.log import DataFile
from zync_assets.offsets import RANGE_SIZE, OffsetRange
from zync_assets.pipeline import Pipeline
from zync_assets.runner import etl_all
from zync_assets_tests.bench.data import EPOCH, make_empty
from zync_assets_tests.bench.etl import REST, append_invoices
from zync_assets_tests.bench.table import time_row
from zync_assets_tests.bench.world import World

NEW = 2_000
SHARE = 1_000_000
"""Records of a file of the history."""
HISTORIES = {"30 million records": 10, "10 billion records": 3_400}
"""Name → files of the invoices; there are twice as many of the statuses."""
COMMITS = 20
"""Commits that bring the history."""
RANGES = {"100 ranges": 100, "100,000 ranges": 100_000}
"""Name → ranges of an asset with PARTITIONS partitions."""
PARTITIONS = 10

OPEN = """
import sys, time
from zync_assets import pipeline_file
from zync_assets.lake import raw, staging
pipeline = pipeline_file.load(sys.argv[1])
started = time.monotonic()
for item in pipeline.inputs:
    state = raw.open_raw(pipeline.lake, item.pool, item.topic)
    raw.check_whole(state)
opened = staging.open_staging(pipeline.lake, "Staging")
staging.check_whole(opened)
print(time.monotonic() - started)
"""
"""Opens and checks all tables in a new process, as each command and each run of Dagster does. Prints seconds."""


def measure_history(world: World) -> Iterator[dict[str, object]]:
    """2,000 new records, the check of their account, a raw commit and the opening of all tables, after each history in turn."""
    lakes = {name: _Lake(world, name, max(2, int(files * world.scale))) for name, files in HISTORIES.items()}
    least, *_ = HISTORIES
    works = {
        "an increment of ETL": (_Lake.increment, "≤ 1.2, ≤ 1.5 s"),
        "the check of an increment": (_Lake.check, "≤ 1 s"),
        "a raw commit": (_Lake.commit, "≤ 1.5, ≤ 0.2 s"),
        "all tables opened": (_Lake.open, "≤ 1 s"),
    }
    for work, (way, goal) in works.items():
        ways = {name: partial(way, lake) for name, lake in lakes.items()}
        found = world.rounds.measure(f"history, {work}, {world.scale}", ways)
        for name in HISTORIES:
            yield time_row("history", f"{work} after {name}", found[name], found[least], goal)
    yield from _measure_keys(world)


def _measure_keys(world: World) -> Iterator[dict[str, object]]:
    """The partition keys of one asset, as each tick of the sensor compares them with Dagster's."""
    with tempfile.TemporaryDirectory() as folder, DagsterInstance.local_temp(folder) as instance:
        ways: dict[str, Callable[[], float]] = {}
        for name, count in RANGES.items():
            ends = dict.fromkeys(range(PARTITIONS), max(1, int(count * world.scale) // PARTITIONS) * RANGE_SIZE - 1)
            spans = spans_between(dict.fromkeys(ends, 0), ends)
            grid = Grid(name, tuple(spans), frozenset(ends), "job", frozenset())
            keys = list(keys_of(spans))
            for first in range(0, len(keys), 5_000):
                instance.add_dynamic_partitions(name, keys[first : first + 5_000])
            ways[name] = partial(_compare_keys, instance, grid)
        found = world.rounds.measure(f"history, keys, {world.scale}", ways)
    for name in RANGES:
        yield time_row("history", f"a tick's keys with {name}", found[name], None, "≤ 1 s")


def _compare_keys(instance: DagsterInstance, grid: Grid) -> float:
    started = time.monotonic()
    _, changes = definition_keys(instance, ActiveRuns(instance), grid)
    took = time.monotonic() - started
    assert not changes
    return took


class _Lake:
    """A lake with a history, made when it is first needed. Each increment makes it longer by NEW records."""

    def __init__(self, world: World, name: str, files: int) -> None:
        self.world, self.files = world, files
        self.name = f"history-{name.replace(' ', '-')}-{world.scale}"
        self.pipeline = world.pipeline(self.name, REST)
        self.invoice = 0

    def increment(self) -> float:
        self.commit()
        spark = self.world.spark(self.pipeline)
        started = time.monotonic()
        list(etl_all(self.pipeline, lambda: spark))
        return time.monotonic() - started

    def check(self) -> float:
        """Seconds of the blocking check of the account, for the new records and outputs of an increment."""
        if not self.invoice:
            self._make()
        before = self._ends()
        self.increment()
        ranges: dict[str, list[OffsetRange]] = {}
        for (topic, partition), end in self._ends().items():
            ranges.setdefault(topic, []).append(OffsetRange(partition, before[topic, partition], end))
        started = time.monotonic()
        result = exactly_once_done_coverage(self.pipeline, "Staging", ranges)
        took = time.monotonic() - started
        assert result.passed, result.summary
        return took

    def _ends(self) -> dict[tuple[str, int], int]:
        """The next offset of each input and output of the account."""
        state = staging.open_staging(self.pipeline.lake, "Staging")
        assert state is not None
        ends = {place: position.seen for place, position in state.head.inputs.items()}
        return ends | {place: position.next for place, position in state.head.outputs.items()}

    def commit(self) -> float:
        if not self.invoice:
            self._make()
        started = time.monotonic()
        self.invoice = self._append(self.invoice, NEW)
        return time.monotonic() - started

    def open(self) -> float:
        if not self.invoice:
            self._make()
        path = str(self.world.folder / f"{self.name}.yaml")
        done = subprocess.run([sys.executable, "-c", OPEN, path], check=True, capture_output=True, text=True)
        return float(done.stdout)

    def _append(self, first: int, records: int) -> int:
        end = first + max(1, records // 3)
        append_invoices(self.pipeline, first, end)
        return end

    def _make(self) -> None:
        self.world.empty(self.pipeline)
        spark = self.world.spark(self.pipeline)
        self.invoice = self._append(0, NEW)
        list(etl_all(self.pipeline, lambda: spark))
        for _ in range(COMMITS):
            _lengthen_raw(self.pipeline, "invoices", self.files // COMMITS or 1)
            _lengthen_raw(self.pipeline, "statuses", 2 * (self.files // COMMITS or 1))
        _lengthen_staging(self.pipeline, 2 * self.files)
        state = raw.open_raw(self.pipeline.lake, "Raw", "invoices")
        assert state is not None
        self.invoice = state.next[0]


def _history_end(first: int, count: int) -> int:
    """The offset after ``count`` files from the offset ``first`` on. All files end at multiples of SHARE: a check reads the
    files of the SHARE offsets around a new record."""
    return (first // SHARE + count) * SHARE


def _history_files(group: str | None, first: int, count: int) -> list[DataFile]:
    """Entries of ``count`` files of SHARE records each, or less in the first, from the offset ``first`` on."""
    # As ingest and ETL name their files. The check takes other names for those of another program.
    folder = "part-00000-" if group is None else f"batch-{1:012d}-{0:012x}/"
    starts = [first, *(_history_end(first, number) for number in range(1, count + 1))]
    return [
        DataFile(
            f"{folder}{start:032x}.parquet",
            (end - start) * 60,
            end - start,
            0,
            start,
            end - 1,
            EPOCH,
            EPOCH,
            group,
        )
        for start, end in pairwise(starts)
    ]


def _lengthen_raw(pipeline: Pipeline, topic: str, count: int) -> None:
    state = raw.open_raw(pipeline.lake, "Raw", topic)
    assert state is not None
    start = state.next[0]
    files = _history_files(None, start, count)
    make_empty(state.table.uri, files)
    advance = raw.RawAdvance(topic, "bench", state.table.schema, files, {}, {0: _history_end(start, count)})
    raw.commit_advance(storage.raw_uri(pipeline.lake, "Raw", topic), state, advance)


def _lengthen_staging(pipeline: Pipeline, count: int) -> None:
    """The account of the whole raw history, in one batch of the numbers that its head would have after many."""
    state = staging.open_staging(pipeline.lake, "Staging")
    assert state is not None
    head, topic = state.head, pipeline.outputs[0].topic
    inputs, counts = dict(head.inputs), dict(head.counts)
    entries: list[dict[str, object]] = []
    for (name, partition), position in head.inputs.items():
        opened = raw.open_raw(pipeline.lake, "Raw", name)
        assert opened is not None
        end = opened.next[partition]
        records = end - position.seen
        place = {"topic": name, "partition": partition}
        entries.append({"kind": "done", **place, "first": position.seen, "end": end, "count": records})
        inputs[name, partition] = replace(position, seen=end, records=position.records + records)
        counts[name, partition, "done"] = counts.get((name, partition, "done"), 0) + records
    out = head.outputs[topic, 0]
    files = _history_files(topic, out.next, count)
    make_empty(state.table.uri, files)
    outputs = {**head.outputs, (topic, 0): replace(out, next=_history_end(out.next, count))}
    after = replace(head, batch=head.batch + 1, inputs=inputs, outputs=outputs, counts=counts)
    ledger = staging.write_ledger(state.table.uri, f"{staging.ACCOUNT_FOLDER}/folded-history.parquet", entries)
    staging.commit_batch(pipeline.lake, "Staging", state, after, state.schema, [*files, ledger])
