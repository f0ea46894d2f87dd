"""A week of ``zync run`` at one commit a second, in minutes: what do its commits cost at the beginning and at the end?

``python -m zync_assets_tests.bench.week [--folder F]``

A round has the commits of one second of a pipeline: a batch of raw records, an ETL batch with its head and ledger, the two
commits of a publisher, and the upkeep of the three tables. The commits are the lake's own, without Kafka and Spark. Upkeep
keeps a bounded log, so ROUNDS rounds reach the state of a log after a week. The benchmark also writes the replaced files of
the rest of the week, as empty files that are younger than seven days.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.lake import cleaning, compaction, fold, published, raw, staging, storage, tables
from zync_assets.lake.staging import BASE_SCHEMA, Head, OutputPosition, Position
from zync_assets.lake.tables import DataFile
from zync_assets_tests.bench import data

MINUTE = 60
"""Rounds of the first minute, and of each other sample."""
ROUNDS = 1_200
"""Rounds until the log and the ledger are as they stay."""
DAY = 24 * 3600
POOL, TOPIC, OUT = "Staging", "shop.orders", "out.orders"
RECORDS = 5
"""Records of one round."""


@click.command()
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Holds the lake; made and removed.")
@click.option("--scale", default=1.0, show_default=True, help="Times as many rounds and files.")
def week(folder: Path | None, scale: float) -> None:
    """Print what a commit costs in the first minute, after a day and after a week, and the ratios."""
    place = Path(tempfile.mkdtemp(prefix="zync-week-", dir=folder))
    try:
        run = _Run(str(place))
        first = run.sample(MINUTE)
        click.echo(f"first minute: {_told(first)}")
        run.sample(max(1, int(ROUNDS * scale)))
        for name, seconds in (("a day", DAY), ("a week", 7 * DAY)):
            run.leave_behind(int(seconds * scale))
            sample = run.sample(MINUTE)
            sweep = run.sweep()
            hourly = sweep / (cleaning.SWEEP_HOURS * 3600)
            click.echo(f"after {name}: {_told(sample)}; looking at all files once an hour takes {sweep:.1f} s")
            click.echo(f"ratio after {name}: {(np.mean(sample) + hourly) / np.mean(first):.2f}")
    finally:
        shutil.rmtree(place)


def _told(sample: list[float]) -> str:
    return f"{1000 * np.mean(sample):.1f} ms a round (median {1000 * np.median(sample):.1f})"


class _Run:
    """A pipeline's lake, and how many rounds it has had."""

    def __init__(self, lake: str) -> None:
        self.lake = lake
        self.rounds = 0
        self.left = 0

    def sample(self, rounds: int) -> list[float]:
        """Seconds of each of so many rounds."""
        return [_timed(self._round) for _ in range(rounds)]

    def sweep(self) -> float:
        """Seconds of one look at all files of the tables."""
        return _timed(lambda: [self._swept(uri) for uri in self._tables()])

    def leave_behind(self, rounds: int) -> None:
        """The replaced files of so many rounds since the pipeline began, written at their times in the last seven days."""
        now = time.time()
        for uri in self._tables()[:2]:
            for number in range(self.left, rounds):
                name = f"{number:012d}-{number:012x}"
                folder = Path(uri, f"batch-{name}", "topic=t") if uri.endswith(POOL) else Path(uri)
                folder.mkdir(parents=True, exist_ok=True)
                made = folder / f"part-00000-{number:032x}.parquet"
                made.touch()
                os.utime(made, (now, now - (rounds - number) % (6 * DAY)))
        self.left = rounds

    def _tables(self) -> list[str]:
        lake = self.lake
        return [storage.staging_uri(lake, POOL), storage.raw_uri(lake, "Raw", TOPIC), storage.published_uri(lake, POOL)]

    def _swept(self, uri: str) -> object:
        opened = tables.open_table(uri)
        return opened and cleaning.unneeded(opened, cleaning.RETENTION_HOURS)

    def _round(self) -> None:
        first, end = self.rounds * RECORDS, (self.rounds + 1) * RECORDS
        self.rounds += 1
        offsets = np.arange(first, end)
        values = pa.array([{"id": int(offset)} for offset in offsets])
        times = pa.array(offsets + 1_700_000_000_000)
        data.append_raw(self.lake, "Raw", TOPIC, offsets, pa.array([f"k{n}" for n in offsets]), values, times)
        raw_state = raw.open_raw(self.lake, "Raw", TOPIC)
        assert raw_state is not None
        raw.check_whole(raw_state)
        self._transform(first, end)
        for window, verified in ((end, first), (end, end)):
            known = published.open_published(self.lake, POOL, OUT)
            published.commit_published(self.lake, POOL, known, window=window, verified=verified, topic_id="id")
        for uri in self._tables():
            self._keep_up(uri)

    def _transform(self, first: int, end: int) -> None:
        before = staging.open_staging(self.lake, POOL)
        if before is not None:
            staging.check_whole(before)
        head = before.head if before else Head()
        uri = storage.staging_uri(self.lake, POOL)
        folder = f"batch-{head.batch + 1:012d}-{os.urandom(6).hex()}"
        rows = [{"kind": "done", "topic": TOPIC, "partition": 0, "first": first, "end": end, "count": RECORDS}]
        files = [staging.write_ledger(uri, f"{folder}/{staging.ACCOUNT_FOLDER}/part-0.parquet", rows)]
        files.append(self._outputs(uri, f"{folder}/topic={OUT}/part-0.parquet", first, end))
        head = replace(
            head,
            batch=head.batch + 1,
            inputs={(TOPIC, 0): Position(0, end, end)},
            outputs={(OUT, 0): OutputPosition(0, end, "id", 1)},
            counts={(TOPIC, 0, "done"): end},
        )
        folded, removed = fold.fold_ledger(before) if before else ([], [])
        staging.commit_batch(self.lake, POOL, before, head, BASE_SCHEMA, [*files, *folded], removed)

    def _outputs(self, uri: str, path: str, first: int, end: int) -> DataFile:
        rows = [
            {"kafka": {"topic": OUT, "partition": 0, "offset": offset}, "rule": "copy"} for offset in range(first, end)
        ]
        storage.make_folder(storage.join(uri, path.rsplit("/", 1)[0]))
        schema = pa.schema([BASE_SCHEMA.field(name) for name in ("kafka", "rule")])
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), storage.join(uri, path))
        size = storage.file_size(storage.join(uri, path))
        return DataFile(path, size, end - first, 0, first, end - 1, group=OUT)

    def _keep_up(self, uri: str) -> None:
        """As ``steps.upkeep`` does, without Spark."""
        opened = tables.open_table(uri)
        if opened is None:
            return
        runs = [part for run in compaction.due(opened.files) for part in compaction.alike(uri, run)]
        if runs:
            compaction.commit(opened, [compaction.rewrite(uri, run, opened.schema) for run in runs], runs)
            opened = tables.open_table(uri)
        if opened is not None and cleaning.is_due(opened):
            cleaning.clean(opened)


def _timed(work: Callable[[], object]) -> float:
    """Seconds of this process on a processor: what other processes do does not count."""
    started = time.process_time()
    work()
    return time.process_time() - started


if __name__ == "__main__":
    week()
