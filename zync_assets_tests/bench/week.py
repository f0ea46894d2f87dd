"""A week of ``zync run`` at one commit a second, in minutes: what do its commits cost at the beginning and at the end?

``python -m zync_assets_tests.bench.week [--folder F] [--rate N] [--profile P]``

A round is what one second of a pipeline commits: a batch of raw records, an ETL batch with its head and ledger, the two
commits of a publisher, and the upkeep of the three tables. The commits and the looks before them are the package's own,
without Kafka and Spark. The first hour is simulated round by round. The rest of a day and of a week
is laid down at once: the large files that compaction would have left in the tables, and on disk the empty files of the
last seven days that commits replaced. All figures are seconds of this process on a processor.
"""

from __future__ import annotations

import cProfile
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.etl import ledger
from zync_assets.lake import compaction, publication, raw, raw_files, staging, storage, tables
from zync_assets.lake.head import Head, OutputPosition, Position
from zync_assets.lake.log import DataFile
from zync_assets.lake.staging import ACCOUNT_FOLDER, BASE_SCHEMA
from zync_assets_tests.bench import data

MINUTE, HOUR, DAY = 60, 3600, 24 * 3600
SAMPLE = 200
"""Rounds of a measurement: two cleanings of each log are among them."""
POOL, TOPIC, OUT = "Staging", "shop.orders", "out.orders"
LARGE = 256_000
"""Records of a file that compaction leaves as it is."""


@click.command()
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Holds the lake; made and removed.")
@click.option("--rate", default=100, show_default=True, help="Records a second.")
@click.option("--scale", default=1.0, show_default=True, help="Times as many rounds and files.")
@click.option("--profile", type=click.Path(path_type=Path, dir_okay=False), help="Where the profiles of samples go.")
def week(folder: Path | None, rate: int, scale: float, profile: Path | None) -> None:
    """Print what a commit costs in the first minute, after an hour, a day and a week, and the ratios."""
    place = Path(tempfile.mkdtemp(prefix="zync-week-", dir=folder))
    try:
        run = _Run(str(place), rate)
        run.rounds_of(max(1, int(MINUTE * scale)))  # imports and caches
        run.restart()
        first = None
        for name, seconds in (("first minutes", 0), ("hour", HOUR), ("day", DAY), ("week", 7 * DAY)):
            until = int(seconds * scale)
            if seconds > HOUR:
                run.leap(until - run.rounds)
            elif until > run.rounds:
                run.rounds_of(until - run.rounds)
            found = run.sample(int(SAMPLE * min(1, scale)), profile and profile.with_suffix(f".{name.split()[0]}"))
            first = first or found
            click.echo(
                f"{name}: {found}; ratio {found.median / first.median:.2f}, {found.whole / first.whole:.2f} with upkeep"
            )
            for text in run.sizes():
                click.echo(f"    {text}")
    finally:
        shutil.rmtree(place)


@dataclass(frozen=True)
class _Sample:
    """Seconds of some rounds: of their commits, and of the upkeep after each; ``sweep``: of a day's look at the files."""

    commits: list[float]
    upkeep: list[float]
    sweep: float

    @property
    def median(self) -> float:
        return float(np.median(self.commits))

    @property
    def amortised(self) -> float:
        """Seconds of upkeep a round."""
        return float(np.mean(self.upkeep)) + self.sweep / DAY

    @property
    def whole(self) -> float:
        return self.median + self.amortised

    def __str__(self) -> str:
        p90 = float(np.quantile(self.commits, 0.9))
        return (
            f"{1000 * self.median:.1f} ms a round (p90 {1000 * p90:.1f}), upkeep {1000 * self.amortised:.1f} ms a round;"
            f" a day's look at the files {self.sweep:.2f} s"
        )


class _Run:
    """A pipeline's lake, and how many rounds it has had."""

    def __init__(self, lake: str, rate: int) -> None:
        self.lake, self.rate = lake, rate
        self.rounds = self.end = 0

    def restart(self) -> None:
        """Begin anew, with an empty lake."""
        tables.forget(self.lake)
        shutil.rmtree(self.lake)
        Path(self.lake).mkdir()
        self.rounds = self.end = 0

    def rounds_of(self, count: int) -> None:
        """So many rounds that are not measured."""
        for _ in range(count):
            self._round()
            self._keep_up()

    def sample(self, rounds: int, profile: Path | None) -> _Sample:
        """Seconds of each of so many rounds."""
        profiler = cProfile.Profile()
        if profile is not None:
            profiler.enable()
        commits, upkeep = zip(*((_timed(self._round), _timed(self._keep_up)) for _ in range(rounds)), strict=True)
        profiler.disable()
        if profile is not None:
            profiler.dump_stats(profile)
        return _Sample(list(commits), list(upkeep), _timed(lambda: [self._swept(uri) for uri in self._tables()]))

    def sizes(self) -> list[str]:
        """A line for each table: the number of files and of log entries."""
        found: list[str] = []
        for uri in self._tables():
            opened = tables.open_table(uri)
            assert opened is not None
            log = sum(path.suffix == ".json" for path in Path(uri, "_delta_log").iterdir())
            found.append(f"{uri.removeprefix(self.lake)}: {len(opened.files)} files, {log} log entries")
        return found

    def leap(self, rounds: int) -> None:
        """So many rounds at once: the large files of their records, and the empty files that they replaced."""
        self._leap_records(rounds * self.rate)
        now = time.time()
        staging_uri, raw_uri = self._tables()[:2]
        for number in range(self.rounds, self.rounds + rounds):
            name = f"batch-{number:012d}-{number:012x}"
            outputs, ledger = Path(staging_uri, name, f"topic={OUT}"), Path(staging_uri, name, ACCOUNT_FOLDER)
            outputs.mkdir(parents=True)
            ledger.mkdir()
            made = [
                Path(raw_uri, f"part-00000-{number:032x}.parquet"),
                outputs / "part-0.parquet",
                ledger / "part-0.parquet",
                Path(staging_uri, ACCOUNT_FOLDER, f"head-{number:012d}-{number:032x}.parquet"),
            ]
            written = now - (self.rounds + rounds - number) % (6 * DAY)
            for path in made:
                path.touch()
            for path in (*made, outputs.parent):
                os.utime(path, (written, written))
        self.rounds += rounds

    def _tables(self) -> list[str]:
        lake = self.lake
        return [storage.staging_uri(lake, POOL), storage.raw_uri(lake, "Raw", TOPIC), storage.publish_uri(lake, POOL)]

    def _swept(self, uri: str) -> object:
        opened = tables.open_table(uri)
        return opened and compaction.unneeded_files(opened)

    def _leap_records(self, records: int) -> None:
        """Commit files of LARGE records to the raw table and to the output."""
        raw_state, state = raw.open_raw(self.lake, "Raw", TOPIC), staging.open_staging(self.lake, POOL)
        assert raw_state is not None
        assert state is not None
        first = self.end
        self.end = first + records // LARGE * LARGE
        starts = range(first, self.end, LARGE)
        now = int(time.time() * 1000)
        made = [
            DataFile(f"compact-{uuid.uuid4().hex}.parquet", 1000, LARGE, 0, at, at + LARGE - 1, now, now)
            for at in starts
        ]
        data.make_empty(raw_state.table.uri, made)
        advance = raw.RawAdvance(TOPIC, "bench", raw_state.schema, made, {}, {0: self.end}, times={0: now})
        raw.commit_advance(raw_state.table.uri, raw_state, advance)
        outputs = [
            replace(item, path=f"compact-{uuid.uuid4().hex}/topic={OUT}/part-0.parquet", group=OUT) for item in made
        ]
        data.make_empty(state.table.uri, outputs)
        head = self._next_head(state.head)
        staging.commit_batch(self.lake, POOL, state, head, BASE_SCHEMA, outputs)

    def _round(self) -> None:
        first = self.end
        self.end = first + self.rate
        self.rounds += 1
        offsets = np.arange(first, self.end)
        values = pa.StructArray.from_arrays([pa.array(offsets)], ["id"])
        stamps = pa.array(offsets + 1_700_000_000_000)
        raw_state = raw.open_raw(self.lake, "Raw", TOPIC)
        if raw_state is not None:
            raw.check_whole(raw_state)
            raw_files.highest_times(raw_state)
        data.append_raw(self.lake, "Raw", TOPIC, offsets, data.texts("k", offsets), values, stamps)
        self._transform(first)
        for window, verified in ((self.end, first), (self.end, self.end)):
            known = publication.open_publish_state(self.lake, POOL, OUT)
            publication.commit_publish_state(
                self.lake, POOL, known, window=window, verified_end=verified, topic_id="id"
            )

    def _transform(self, first: int) -> None:
        before = staging.open_staging(self.lake, POOL)
        raw_state = raw.open_raw(self.lake, "Raw", TOPIC)
        assert raw_state is not None
        raw_files.time_floors(raw_state.files, raw_state.retention_time)
        if before is not None:
            staging.check_whole(before)
        head = self._next_head(before.head if before else Head())
        uri = storage.staging_uri(self.lake, POOL)
        folder = f"batch-{head.batch:012d}-{os.urandom(6).hex()}"
        rows = [{"kind": "done", "topic": TOPIC, "partition": 0, "first": first, "end": self.end, "count": self.rate}]
        files = [staging.write_ledger(uri, f"{folder}/{staging.ACCOUNT_FOLDER}/part-0.parquet", rows)]
        files.append(self._outputs(uri, f"{folder}/topic={OUT}/part-0.parquet", first))
        made, removed = ledger.compact_ledger(before) if before else ([], [])
        staging.commit_batch(self.lake, POOL, before, head, BASE_SCHEMA, [*files, *made], removed)
        after = staging.open_staging(self.lake, POOL)
        assert after is not None
        staging.check_whole(after)

    def _next_head(self, head: Head) -> Head:
        return replace(
            head,
            batch=head.batch + 1,
            inputs={(TOPIC, 0): Position(0, self.end, self.end)},
            outputs={(OUT, 0): OutputPosition(0, self.end, "id", 1)},
            counts={(TOPIC, 0, "done"): self.end},
        )

    def _outputs(self, uri: str, path: str, first: int) -> DataFile:
        offsets = pa.array(np.arange(first, self.end))
        count = len(offsets)
        kafka = pa.StructArray.from_arrays(
            [pa.repeat(pa.scalar(OUT), count), pa.repeat(pa.scalar(0, pa.int32()), count), offsets],
            fields=list(BASE_SCHEMA.field("kafka").type),
        )
        storage.make_folder(storage.join(uri, path.rsplit("/", 1)[0]))
        made = pa.table({"kafka": kafka, "rule": pa.repeat(pa.scalar("copy"), count)})
        pq.write_table(made, storage.join(uri, path))
        size = storage.file_size(storage.join(uri, path))
        return DataFile(path, size, count, 0, first, self.end - 1, group=OUT)

    def _keep_up(self) -> None:
        """As ``upkeep`` does, without Spark."""
        for uri in self._tables():
            opened = tables.open_table(uri)
            if opened is None:
                continue
            runs = [part for run in compaction.due_runs(opened.files) for part in compaction.split_by_types(uri, run)]
            if runs:
                folder = f"compact-{uuid.uuid4().hex}"
                files = [compaction.rewrite(uri, run, opened.schema, folder) for run in runs]
                compaction.commit(opened, files, runs)
                opened = tables.open_table(uri)
            if opened is not None and compaction.is_due(opened):
                compaction.clean(opened)


def _timed(work: Callable[[], object]) -> float:
    """Seconds of this process on a processor: what other processes do does not count."""
    started = time.process_time()
    work()
    return time.process_time() - started


if __name__ == "__main__":
    week()
