"""Upkeep of state: the small files of many batches become few files.

Each batch adds a file or two to each table. A fold writes the versions of some files again, sorted, without the versions that are
replaced by another file of the fold. The live rows stay the same. The largest files are left alone until the smaller ones
together hold as many records, so that the size of a record's file at least doubles with each fold.

A deleted row is a version too: a record that a replay brings later must not bring the row back. A fold of all files drops the
deleted rows of a topic without quarantined records. Records that go into quarantine later have greater offsets.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zync_assets.crashes import crash_point
from zync_assets.etl.views.state import StateFiles, StateReader, state_files, without_versions, write_state
from zync_assets.etl.views.state_index import index_columns, indexed_columns, indexes_of, write_index
from zync_assets.etl.views.tables import TableType, place_sql, stored_tables, stored_type
from zync_assets.lake import compaction, storage, tables
from zync_assets.lake.log import DataFile
from zync_assets.lake.staging import StagingState, staging_state

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RUNS = 24
"""Runs of a table before some of them are folded. A run is the files of one write: no key has a version in two of them. A batch
of many new rows writes many files, none of which is in the way of another one."""
FILE_RECORDS = 1_000_000
"""Records of a folded file, about."""


def due_files(files: StateFiles) -> StateFiles | None:
    """The files of a table to fold; None if no fold is due.

    All files are due if a quarter of the versions is replaced, so that the state stays small.
    """
    runs = _runs(files.rows)
    if len(runs) < RUNS:
        return None
    if _records(files.replaced) * 4 >= _records(files.versions):
        return files
    small = _balanced(runs)
    own = {item.path for run in small for item in run}
    due = StateFiles(*([item for item in each if item.path in own] for each in (files.versions, files.replaced)))
    return due if len(small) >= RUNS // 2 else None


def _runs(files: Sequence[DataFile]) -> list[list[DataFile]]:
    """The files of each folder."""
    found: dict[str, list[DataFile]] = {}
    for item in files:
        found.setdefault(item.path.rpartition("/")[0], []).append(item)
    return list(found.values())


def _balanced(runs: Sequence[Sequence[DataFile]]) -> Sequence[Sequence[DataFile]]:
    """The runs without the largest, each of which holds more records than all smaller runs together."""
    ordered = sorted(runs, key=lambda run: -_records(run))
    left = sum(map(_records, ordered))
    for place, run in enumerate(ordered):
        left -= _records(run)
        if _records(run) <= left:
            return ordered[place:]
    return ()


def _records(files: Sequence[DataFile]) -> int:
    return sum(item.records for item in files)


def fold_state(spark: SparkSession, before: StagingState | None) -> None:
    """Fold the state of views' tables after a commit, where the table before the commit shows that this is due. A failure is
    logged: a later commit tries again."""
    if before is None or not any(due_files(state_files(before, table)) for table in stored_tables(before.head)):
        return
    with compaction.log_failures(before.table.uri):
        state = staging_state(tables.open_table(before.table.uri))
        if state is not None:
            fold(spark, state)


def fold(spark: SparkSession, state: StagingState) -> int:
    """Fold what is due, in one commit; the number of files that it replaced. CommitConflict if another writer was first."""
    from pyspark.sql import functions as F

    uri, folder = state.table.uri, f"compact-{uuid.uuid4().hex}"
    added: list[DataFile] = []
    removed: list[list[DataFile]] = []
    try:
        for at, table in enumerate(stored_tables(state.head)):
            due = due_files(state_files(state, table))
            kind = stored_type(table, state)
            if due is None or kind is None:
                continue
            files = state_files(state, table)
            everything = len(due.rows) == len(files.rows)
            frame = folded(
                StateReader(spark, uri), kind, due, deleted=not everything or has_quarantined(state, table.topic)
            )
            parts = max(1, sum(item.records for item in due.versions) // FILE_RECORDS)
            if parts > 1:
                frame = frame.repartitionByRange(parts, "gone", F.expr(place_sql("key", kind.state_key)))
            found = write_state(frame, kind, uri, f"{folder}/state-{at}", small=parts == 1)
            columns = indexed_columns(kind, index_columns(files))
            indexes = write_index(StateReader(spark, uri), kind, found.versions, columns, small=False)
            added += [*found.rows, *indexes]
            removed.append([*due.rows, *indexes_of(files, due.versions)])
        if not removed:
            return 0
        crash_point("fold:written")
        compaction.commit(state.table, added, removed)
    except BaseException:
        storage.remove_files(storage.join(uri, folder))
        raise
    crash_point("fold:committed")
    return sum(map(len, removed))


def has_quarantined(state: StagingState, topic: str) -> bool:
    """Whether a replay may bring earlier records of a topic."""
    return any(count for (name, _, kind), count in state.head.counts.items() if (name, kind) == (topic, "quarantined"))


def folded(reader: StateReader, kind: TableType, files: StateFiles, *, deleted: bool) -> DataFrame:
    """The versions of some files that none of the files replaces, and the replaced versions of other files: key, row, version,
    gone. ``deleted``: with deleted rows."""
    versions, replaced = reader.rows(kind, files.versions), reader.rows(kind, files.replaced)
    live = without_versions(versions, replaced).selectExpr("0 AS gone", "*")
    live = live if deleted else live.where("row IS NOT NULL")
    return live.unionByName(without_versions(replaced, versions).selectExpr("1 AS gone", "*"))
