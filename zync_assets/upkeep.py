"""Upkeep: the work on a table that follows a commit: retention, compaction and clean-up.

Retention removes raw records that are older than an input's ``retention``, once no staging pool and no sink needs them. It
removes whole files from the begin of a partition, by the log's statistics alone. One number, ``zync:kept:<partition>``, says
where the remaining records begin; the commit that removes the files sets the number. A record's age counts from its time, as
in Kafka's own retention: the highest timestamp in its partition up to the record, never later than its ingest. Retention
keeps replayed records: without its record in the raw table, an entry of the quarantine would count again.

Retention takes two commits, because two tables change. First every staging pool releases the records
(``staging.release``). The release conflicts with every batch planned before it, and no later batch reads a released
record, not even to retry unmatched records. Second, the raw table removes the files. After a kill in between, the next
attempt continues. The files stay on disk for present readers, until ``lake.compaction`` deletes them days later.

Compaction merges small files, and clean-up removes unneeded files. They run after a commit, in the session of the commit, if
the table's log shows that they are due. Upkeep never fails the step of the commit; a later commit tries again.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np

from zync_assets.codecs.arrays import pc
from zync_assets.crashes import crash_point
from zync_assets.errors import CommitConflict, ZyncError
from zync_assets.lake import compaction, raw, staging, storage, tables
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw import RawState
from zync_assets.lake.staging import StagingState
from zync_assets.pipeline import Input, Pipeline
from zync_assets.spark.tasks import run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)

Positions = Mapping[int, int]
"""Partition → offset."""

SLACK = 16
"""A removal waits until a file is older than the retention by a 16th of it, and then removes every file past the
retention. Few commits suffice."""


def apply_retention(
    pipeline: Pipeline, item: Input, state: RawState | None, written: Callable[[], Positions] | None = None
) -> None:
    """Remove what is old, where the table's ``state`` shows that it is due. It never fails the step: what could
    not be done is done after another commit.

    ``written``: as in ``retire``. Without it, the records of a table that a sink reads stay: a commit of the sink removes them.
    """
    if item.retention_ms is None or state is None or (written is None and pipeline.raw_sinks(item.topic)):
        return
    try:
        now = int(time.time() * 1000)
        if is_retention_due(state, now, item.retention_ms):
            parts = retire(pipeline, item, now, written() if written is not None else None)
            count = sum(file.records for retirement in parts for file in retirement.files)
            age = timedelta(milliseconds=item.retention_ms)
            if count:
                _log.info("%s.%s: %d records older than %s are removed", item.pool, item.topic, count, age)
    except CommitConflict as error:
        _log.info("%s", error)
    except (ZyncError, OSError) as error:
        _log.warning("retention of %s.%s: %s", item.pool, item.topic, error)


def retire(pipeline: Pipeline, item: Input, now: int, written: Positions | None = None) -> Sequence[Retirement]:
    """Remove an input's raw records that no staging pool and no sink wants; returns what it removed.

    ``now``: milliseconds since the epoch, from which ages count. ``written``: partition → the first offset that a sink may
    still want, None if no sink reads the table. CommitConflict if a batch or a compaction came first.
    """
    table = raw.open_raw(pipeline.lake, item.pool, item.topic)
    pools = _pools(pipeline, item)
    if table is None or item.retention_ms is None or pools is None:
        return ()
    limits = dict(table.next)
    for state in pools:
        pool_limits = needed_from(state, item.topic)
        limits = {partition: min(end, pool_limits.get(partition, 0)) for partition, end in limits.items()}
    if written is not None:
        limits = {partition: min(end, written.get(partition, 0)) for partition, end in limits.items()}
    parts = retirements(table, now - item.retention_ms, limits)
    if not parts:
        return ()
    for state in pools:
        staging.release(state, item.topic, {part.partition: part.start for part in parts})
    crash_point("retention:released")
    commit_retention(table, parts)
    crash_point("retention:removed")
    return parts


def _pools(pipeline: Pipeline, item: Input) -> list[StagingState] | None:
    """The staging pools that read an input, or did; None while one has not begun."""
    states: list[StagingState] = []
    readers = pipeline.readers_of(item.topic)
    for pool in pipeline.staging_pools:
        state = staging.open_staging(pipeline.lake, pool)
        reads = pool in readers
        if state is None and reads:
            return None
        if state is not None and (reads or state.head.seen(item.topic)):
            states.append(state)
    return states


def needed_from(state: StagingState, topic: str) -> dict[int, int]:
    """Partition → the first offset whose raw record a staging pool may still want: the cursor, and what a rule failed on.

    The ledger is read only where something waits.
    """
    offsets = state.head.seen(topic)
    waits = [
        partition
        for (name, partition, kind), count in state.head.counts.items()
        if name == topic and kind in ("pending", "quarantined") and count
    ]
    if not waits:
        return offsets
    rows = staging.read_ledger(state, ["pending", "completed", "quarantined"])
    rows = rows.filter(pc.equal(rows["topic"], topic))
    for partition in set(waits):
        partition_rows = rows.filter(pc.equal(rows["partition"], partition))
        rows_by_kind = {
            kind: partition_rows.filter(pc.equal(partition_rows["kind"], kind))
            for kind in ("pending", "completed", "quarantined")
        }
        failures = rows_by_kind["quarantined"].filter(pc.is_valid(rows_by_kind["quarantined"]["text"]))
        waiting = np.setdiff1d(
            rows_by_kind["pending"]["first"].to_numpy(), rows_by_kind["completed"]["first"].to_numpy()
        )
        offsets[partition] = min([offsets.get(partition, 0), *waiting[:1].tolist(), *failures["first"].to_pylist()])
    return offsets


@dataclass(frozen=True)
class Retirement:
    """The removable files of a partition, all below offset ``start``.

    ``time``: the highest time of all removed records, of earlier removals too, in milliseconds since the epoch.
    """

    partition: int
    files: tuple[DataFile, ...]
    start: int
    time: int


def is_retention_due(state: RawState, now: int, retention_ms: int) -> bool:
    """Whether a partition begins with a file that is past its time by a good while."""
    limit = now - retention_ms - retention_ms // SLACK
    return any(_old_files(files, limit) for files in _by_partition(state).values())


def retirements(state: RawState, limit: int, limits: Mapping[int, int]) -> list[Retirement]:
    """The removable files of each partition: the first files whose records are all older than ``limit`` (milliseconds since
    the epoch) and below the offset that staging pools need (``limits``: partition → offset)."""
    parts: list[Retirement] = []
    for partition, files in _by_partition(state).items():
        upto = limits.get(partition, 0)
        below = next((place for place, item in enumerate(files) if (item.last or 0) >= upto), len(files))
        old_files = _old_files(files[:below], limit)
        if old_files:
            highest = max(state.retention_time.get(partition, 0), *(item.max_time or 0 for item in old_files))
            parts.append(Retirement(partition, tuple(old_files), (old_files[-1].last or 0) + 1, highest))
    return parts


def _by_partition(state: RawState) -> dict[int, list[DataFile]]:
    files_by_partition: dict[int, list[DataFile]] = {}
    for item in raw.raw_files(state):
        if not raw.is_replay(item):
            files_by_partition.setdefault(item.partition or 0, []).append(item)
    return files_by_partition


def _old_files(files: Sequence[DataFile], limit: int) -> Sequence[DataFile]:
    """The first files that are old. Where records have no time (0), only a later record shows their age."""
    count = 0
    for place, item in enumerate(files):
        if item.max_time is None or item.max_time >= limit:
            break
        if item.max_time > 0:
            count = place + 1
    return files[:count]


def commit_retention(state: RawState, parts: Sequence[Retirement]) -> None:
    """Remove the files and say where the partitions begin now. CommitConflict if a compaction came first."""
    numbers = {f"zync:kept:{part.partition}": part.start for part in parts}
    numbers |= {f"zync:reached:{part.partition}": part.time for part in parts}
    numbers |= {
        f"zync:removed:{part.partition}": state.retention_count.get(part.partition, 0)
        + sum(item.records for item in part.files)
        for part in parts
    }
    # A compaction puts records of such files into another one.
    numbers["zync:compacted"] = state.table.number("zync:compacted") or 0
    tables.commit(state.table, [], numbers, removals=[item for part in parts for item in part.files])


SHARES = 8
"""Files that hold what a retention keeps, at the least, where they are compacted."""


def keep_up(spark: SparkSession, before: tables.LakeTable | None, retention_ms: int | None = None) -> None:
    """Compact and clean a table after a commit. ``before``: the table before the commit, None for a new table.

    ``retention_ms``: how long records are kept. Compaction then merges only files within a share of this time, so that
    retention can remove files bit by bit.
    """
    span = None if retention_ms is None else retention_ms // SHARES
    if before is None or not (compaction.due_runs(before.files, span) or compaction.is_due(before)):
        return
    with compaction.log_failures(before.uri):
        compact(spark, before.uri, span)
        table = tables.open_table(before.uri)
        if table is not None and compaction.is_due(table):
            compaction.clean(table)
            crash_point("clean:done")


def compact(spark: SparkSession, uri: str, span: int | None = None) -> int:
    """Merge small neighbouring files in Spark tasks, with one commit. Returns the number of removed files. ``span``: see
    ``compaction.due_runs``.

    Raises CommitConflict if another compaction came first; nothing of this one is visible then.
    """
    table = tables.open_table(uri)
    runs = [
        part
        for run in (compaction.due_runs(table.files, span) if table else [])
        for part in compaction.split_by_types(uri, run)
    ]
    if table is None or not runs:
        return 0
    schema, folder = table.schema, f"compact-{uuid.uuid4().hex}"
    with storage.uncommitted(storage.join(uri, folder)):
        files = run_tasks(spark, len(runs), lambda index: compaction.rewrite(uri, runs[index], schema, folder))
        crash_point("compact:written")
    compaction.commit(table, files, runs)
    crash_point("compact:committed")
    return sum(len(run) for run in runs)
