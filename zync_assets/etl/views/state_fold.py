"""Upkeep of state: the small files of many batches become few files.

Each batch adds a file or two to each table, and each look-up opens the files. A fold writes the versions of some files again,
sorted, without the versions that are replaced by another file of the fold. The live rows stay the same. The largest runs are left
alone until the smaller ones together hold as many records, so that the size of a record's run at least doubles with each fold.

Most folds have few records. One Spark task for each table then reads and writes the files with Arrow: Spark would plan its
queries for longer. Spark folds many records, and files with other types than the table, as those of before a column was widened.

A deleted row is a version too: an earlier record that comes later must not bring the row back. A replay brings such a record, and
so does another partition if the latest time of a key counts. A fold of all files drops the deleted rows of other tables. Records
that go into quarantine later have greater offsets.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.spark_types import spark_type
from zync_assets.crashes import crash_point
from zync_assets.etl.views.state import (
    StateFiles,
    StateReader,
    state_files,
    write_state,
    write_versions,
)
from zync_assets.etl.views.state_index import index_columns, indexed_columns, indexes_of, write_index
from zync_assets.etl.views.tables import VERSION, TableType, place_sql, stored_tables, stored_type, without_versions
from zync_assets.lake import compaction, storage, tables
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw import ORDER
from zync_assets.lake.staging import StagingState, staging_state
from zync_assets.spark.tasks import run_tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RUNS = 4
"""The number of runs of similar size that a fold needs. A run is all files of one write, with the files of replaced versions.
No key has a version in two files of a run. A batch of many new rows writes many files, and all of them are one run."""
FILE_RECORDS = 1_000_000
"""The approximate number of records of a folded file."""
TASK_RECORDS, TASK_BYTES = 200_000, 8 << 20
"""The most records of a fold that a task has in memory, and the most bytes of its files."""


def due_files(files: StateFiles) -> StateFiles | None:
    """The files of a table to fold; None if no fold is due.

    All files are due if a quarter of the versions is replaced, so that the state stays small.
    """
    runs = _runs(files.rows)
    if len(runs) < RUNS:
        return None
    if _records(files.replaced) * 4 >= _records(files.versions):
        return files
    small = _small_runs(runs)
    small_paths = {item.path for run in small for item in run}
    due_state = StateFiles(
        *([item for item in group if item.path in small_paths] for group in (files.versions, files.replaced))
    )
    return due_state if len(small) >= RUNS else None


def _runs(files: Sequence[DataFile]) -> list[list[DataFile]]:
    """The files of each write."""
    runs: dict[str, list[DataFile]] = {}
    for item in files:
        runs.setdefault(item.path.rpartition("/")[0].partition("/gone=")[0], []).append(item)
    return list(runs.values())


def _small_runs(runs: Sequence[Sequence[DataFile]]) -> Sequence[Sequence[DataFile]]:
    """The runs without the largest, each of which holds more records than all smaller runs together."""
    sorted_runs = sorted(runs, key=lambda run: -_records(run))
    remaining_records = sum(map(_records, sorted_runs))
    for place, run in enumerate(sorted_runs):
        remaining_records -= _records(run)
        if _records(run) <= remaining_records:
            return sorted_runs[place:]
    return ()


def _records(files: Sequence[DataFile]) -> int:
    return sum(item.records for item in files)


def fold_state(spark: SparkSession, before: StagingState | None) -> None:
    """Fold the state of views' tables after a commit, if the table before the commit shows that a fold is due. A failure is
    only logged: a later commit tries again."""
    if before is None or not any(due_files(state_files(before, table)) for table in stored_tables(before.head)):
        return
    with compaction.log_failures(before.table.uri):
        state = staging_state(tables.open_table(before.table.uri))
        if state is not None:
            fold(spark, state)


def fold(spark: SparkSession, state: StagingState) -> int:
    """Fold the files that are due, in one commit. Returns the number of replaced files. Raises CommitConflict if another writer
    committed first."""
    uri, folder = state.table.uri, f"compact-{uuid.uuid4().hex}"
    reader = StateReader(spark, uri)
    folds: list[_Fold] = []
    for at, table in enumerate(stored_tables(state.head)):
        files, kind = state_files(state, table), stored_type(table, state)
        due_state = due_files(files)
        if due_state is not None and kind is not None:
            deleted = len(due_state.rows) < len(files.rows) or table.by_time or has_quarantined(state, table.topic)
            folds.append(_Fold(uri, f"{folder}/state-{at}", kind, files, due_state, deleted))
    if not folds:
        return 0
    added_files: list[DataFile] = []
    with storage.uncommitted(storage.join(uri, folder)):
        small = [item for item in folds if item.is_small]
        by_arrow = run_tasks(spark, len(small), lambda at: small[at].by_arrow())
        files_by_folder = {item.folder: new_files for item, new_files in zip(small, by_arrow, strict=True)}
        for item in folds:
            new_files = files_by_folder.get(item.folder) or item.by_spark(reader)
            columns = indexed_columns(item.kind, index_columns(item.files))
            indexes = write_index(reader, item.kind, new_files.versions, columns, small=item.is_small)
            added_files += [*new_files.rows, *indexes]
        removed_files = [[*item.due.rows, *indexes_of(item.files, item.due.versions)] for item in folds]
        crash_point("fold:written")
    # Not in the block: after an error of the commit, the log may name the files.
    compaction.commit(state.table, added_files, removed_files)
    crash_point("fold:committed")
    return sum(map(len, removed_files))


@dataclass(frozen=True)
class _Fold:
    """The fold of a table's files ``due``, into a ``folder`` below the staging table ``uri``. ``files``: all files of the table;
    ``deleted``: with deleted rows."""

    uri: str
    folder: str
    kind: TableType
    files: StateFiles
    due: StateFiles
    deleted: bool

    @property
    def is_small(self) -> bool:
        return _records(self.due.rows) <= TASK_RECORDS and sum(item.size for item in self.due.rows) <= TASK_BYTES

    def by_spark(self, reader: StateReader) -> StateFiles:
        """The fold by Spark's queries: the new files."""
        from pyspark.sql import functions as F

        frame = folded(reader, self.kind, self.due, deleted=self.deleted)
        parts = max(1, _records(self.due.versions) // FILE_RECORDS)
        if parts > 1:
            frame = frame.repartitionByRange(parts, "gone", F.expr(place_sql("key", self.kind.state_key)))
        return write_state(frame, self.kind, self.uri, self.folder, small=parts == 1)

    def by_arrow(self) -> StateFiles | None:
        """The fold in a Spark task: the new files; None if a file has not the types of the table."""
        versions, replaced = self._read(self.due.versions), self._read(self.due.replaced)
        if versions is None or replaced is None:
            return None
        table = self.kind.table
        live = versions.filter(pa.array(~_is_in(versions, replaced)))
        live = live if self.deleted else live.filter(pc.is_valid(live[table.row_column]))
        replaced_rows = replaced.filter(pa.array(~_is_in(replaced, versions)))
        return StateFiles(self._write(0, table.versions, live), self._write(1, table.replaced, replaced_rows))

    def _read(self, files: Iterable[DataFile]) -> pa.Table | None:
        schema = self.kind.schema
        parts = [schema.empty_table()]
        for item in files:
            place = storage.join(self.uri, item.path)
            system, path = storage.filesystem(place)
            # Spark writes times as INT96.
            with (
                storage.access_errors(place, "can't be read"),
                pq.ParquetFile(path, filesystem=system, coerce_int96_timestamp_unit="us") as file,
            ):
                rows = file.read()
            if not _has_types(rows.schema, schema):
                return None
            columns = [_cast(rows[field.name], field.type) for field in schema]
            parts.append(pa.Table.from_arrays(columns, schema=schema))
        return pa.concat_tables(parts).combine_chunks()

    def _write(self, at: int, group: str, rows: pa.Table) -> list[DataFile]:
        high, low = (pc.struct_field(rows[ORDER], [part]) for part in (0, 1))
        order = pc.sort_indices(pa.table({"high": high, "low": low}), [("high", "ascending"), ("low", "ascending")])
        entry = write_versions(self.uri, f"{self.folder}/gone={at}", group, [rows.take(order)] if len(rows) else [])
        return [] if entry is None else [entry]


def _has_types(file_schema: pa.Schema, table_schema: pa.Schema) -> bool:
    """Whether a file has the columns of a table as they are now. Of a time in INT96, Arrow does not know the zone."""
    texts = [
        {field.name: spark_type(field.type).simpleString().replace("timestamp_ntz", "timestamp") for field in schema}
        for schema in (file_schema, table_schema)
    ]
    return texts[0] == texts[1]


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    return column if column.type.equals(kind) else column.cast(kind)


def _is_in(rows: pa.Table, others: pa.Table) -> np.ndarray:
    """By row: whether its version is among the versions of other rows."""
    own_parts, other_parts = (
        [pc.struct_field(table[VERSION], [part]).to_numpy() for part in (0, 1)] for table in (rows, others)
    )
    is_in = np.zeros(len(rows), dtype=bool)
    for partition in np.unique(own_parts[0]):
        at = own_parts[0] == partition
        is_in[at] = np.isin(own_parts[1][at], other_parts[1][other_parts[0] == partition])
    return is_in


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
