"""Upkeep of a table: small neighbouring files become one file, and unneeded files and log entries are removed.

Each batch adds a file, so a pipeline that runs every second leaves thousands of files. Compaction merges them. delta-rs's own
``optimize.compact`` mixes the rows of files. Here a partition's records stay sorted, so that readers can still skip files by
their offsets. The records stay the same, and the commit says so (Delta protocol, "Add File and Remove File": ``dataChange``
false). The old files stay on disk for present readers, until cleaning removes the files.

Cleaning removes old entries of the log, files that a commit replaced long ago, and files that no commit ever named.

- delta-rs lists the whole log three times for each commit. So the log is cleaned every COMMITS commits, and keeps LOG_VERSIONS
  versions. A commit then costs the same after a week as after LOG_VERSIONS commits.
- A look for unneeded files lists every file of the table, and a week of one commit a second leaves millions. So a table is
  looked at once in LOOK_HOURS at the most. A look that finds more than MOST files leaves the rest to the next look.
- A reader may still read a version whose files were replaced since. A writer writes files before the commit that names them.
  Both have RETENTION_HOURS: seven days, Delta's own default (Delta protocol, "Vacuum"; ``deletedFileRetentionDuration``). For a
  young file the hours count from the time when the file was written (``tables.YOUNG_HOURS``). ``tables.commit`` refuses a
  slower writer a day earlier, so that no commit names a removed file.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import groupby, takewhile
from pathlib import Path
from threading import Lock

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.evolution import conform
from zync_assets.errors import CommitConflict, LakeError, ZyncError
from zync_assets.lake import log, raw, raw_files, storage, stores, tables, tampering
from zync_assets.lake.log import DataFile, LakeTable
from zync_assets.lake.raw_files import MAX_RECORDS
from zync_assets.lake.staging import ACCOUNT

SMALL = 200_000
"""The most records of a small file."""
FILES = 32
"""The number of neighbouring small files that become one file."""
_NUMBER = "zync:compacted"
_BATCH = 50_000
_RESTORE = "Restore the table to a version before that was so."


def due_runs(files: Iterable[DataFile], span: int | None = None) -> list[list[DataFile]]:
    """The runs of neighbouring files that are due to become one file. The account and replays stay as they are.

    ``span``: the most milliseconds between the times of a run's records, for a table whose old files are removed one by one.
    """
    runs: list[list[DataFile]] = []
    candidates = [
        item for item in files if item.partition is not None and item.group != ACCOUNT and not raw.is_replay(item)
    ]
    candidates.sort(key=lambda item: (item.group or "", item.partition or 0, item.first or 0))
    for _, neighbours in groupby(candidates, key=lambda item: (item.group, item.partition, item.records <= SMALL)):
        runs += [run for part in _split(list(neighbours), span) if len(run := _balanced_run(part)) >= FILES]
    return runs


def _split(neighbours: Sequence[DataFile], span: int | None) -> Iterator[list[DataFile]]:
    run: list[DataFile] = []
    for item in neighbours:
        is_apart = span is not None and bool(run) and (item.max_time or 0) - (run[0].min_time or 0) > span
        if run and (is_apart or sum(file.records for file in run) + item.records > MAX_RECORDS):
            yield run
            run = []
        run.append(item)
    yield run


def _balanced_run(run: Sequence[DataFile]) -> list[DataFile]:
    """A run without its first files that hold more records than all later files together.

    With every rewrite of a record, the size of the record's file therefore at least doubles, however small the batches are.
    """
    remainder = sum(item.records for item in run)
    for place, item in enumerate(run):
        remainder -= item.records
        if item.records <= remainder:
            return list(run[place:])
    return []


def split_by_types(uri: str, run: Sequence[DataFile]) -> Iterator[list[DataFile]]:
    """Cuts a run of files wherever a numeric column has another type from one file to the next. Omits parts of one file.

    The table's column may be wider, but publish encodes a staged record by the record's own output schema. A long past
    2^53 changes its value as a double, and the encoder of a long refuses a double. A float has other digits in JSON as a
    double.
    """
    part: list[DataFile] = []
    types: pa.DataType = pa.null()
    for item in run:
        file_types = _columns(uri, item)
        common_types = _common_type(types, file_types)
        if common_types is None:
            if len(part) > 1:
                yield part
            part, common_types = [], file_types
        part.append(item)
        types = common_types
    if len(part) > 1:
        yield part


def _columns(uri: str, item: DataFile) -> pa.DataType:
    with _open(uri, item) as file:
        return pa.struct(list(file.schema_arrow))


def _common_type(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    """A type with the fields of both, and the wider of two integers; None where numbers are of two kinds."""
    kinds = pa.types
    if kinds.is_null(left) or kinds.is_null(right):
        return right if kinds.is_null(left) else left
    if kinds.is_struct(left) and kinds.is_struct(right):
        fields = {field.name: field.type for field in left}
        for field in right:
            common = _common_type(fields.get(field.name, pa.null()), field.type)
            if common is None:
                return None
            fields[field.name] = common
        return pa.struct(list(fields.items()))
    if kinds.is_list(left) and kinds.is_list(right):
        inner = _common_type(left.value_type, right.value_type)
        return None if inner is None else pa.list_(inner)
    if kinds.is_map(left) and kinds.is_map(right):
        key, inner = _common_type(left.key_type, right.key_type), _common_type(left.item_type, right.item_type)
        return None if key is None or inner is None else pa.map_(key, inner)
    if kinds.is_integer(left) and kinds.is_integer(right):
        return max(left, right, key=lambda kind: kind.bit_width)
    return None if (_is_number(left) or _is_number(right)) and left != right else left


def _narrow_type(table: pa.DataType, file_type: pa.DataType) -> pa.DataType:
    """The table's type, with numbers as the files have them."""
    kinds = pa.types
    if kinds.is_struct(table) and kinds.is_struct(file_type):
        types = {field.name: field.type for field in file_type}
        return pa.struct([item.with_type(_narrow_type(item.type, types.get(item.name, item.type))) for item in table])
    if kinds.is_list(table) and kinds.is_list(file_type):
        return pa.list_(table.value_field.with_type(_narrow_type(table.value_type, file_type.value_type)))
    if kinds.is_map(table) and kinds.is_map(file_type):
        return pa.map_(
            _narrow_type(table.key_type, file_type.key_type), _narrow_type(table.item_type, file_type.item_type)
        )
    return file_type if _is_number(file_type) else table


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def rewrite(uri: str, run: Sequence[DataFile], schema: pa.Schema, folder: str) -> DataFile:
    """Write the records of some files as one file below ``folder``, without a commit. The files are a run of ``split_by_types``.
    The new file has the columns of ``schema``, the table's schema, but numbers keep the types of the files.

    Raises LakeError if the files overlap, or do not hold the records that the log names.
    """
    common_type: pa.DataType | None = pa.null()
    for item in run:
        common_type = None if common_type is None else _common_type(common_type, _columns(uri, item))
    if common_type is None:
        raise LakeError(f"table {uri}: files {run[0].path} to {run[-1].path} have numbers of different types")
    group = run[0].group
    path = f"{folder}{'' if group is None else f'/topic={group}'}/part-{uuid.uuid4().hex}.parquet"
    storage.make_folder(storage.join(uri, *path.split("/")[:-1]))
    types = {field.name: field.type for field in common_type}
    file_schema = pa.schema(
        [item.with_type(_narrow_type(item.type, types[item.name])) for item in schema if item.name in types]
    )
    system, full = storage.filesystem(storage.join(uri, path))
    records, last, last_time = 0, -1, None
    with pq.ParquetWriter(full, file_schema, filesystem=system, compression="snappy") as writer:
        for item in run:
            with _open(uri, item) as file:
                for batch in storage.read_batches(file, _BATCH):
                    output = _conform_batch(batch, file_schema, last_time)
                    offsets = pc.struct_field(output.column("kafka"), "offset").to_numpy()
                    if offsets[0] <= last or (offsets[1:] <= offsets[:-1]).any():
                        raise LakeError(f"table {uri}, file {item.path}: its offsets are not in order. {_RESTORE}")
                    records, last = records + len(offsets), int(offsets[-1])
                    last_time = raw_files.last_time(output.column("kafka"))
                    writer.write_batch(output)
    if records != sum(item.records for item in run):
        raise LakeError(f"table {uri}: files hold {records} records where the log says otherwise. {_RESTORE}")
    low = [item.min_time for item in run if item.min_time is not None]
    high = [item.max_time for item in run if item.max_time is not None]
    return DataFile(
        path,
        storage.file_size(storage.join(uri, path)),
        records,
        run[0].partition,
        run[0].first,
        run[-1].last,
        low[0] if low else None,
        max(high) if high else None,
        group,
        *raw_files.order_bounds(run),
    )


def _open(uri: str, item: DataFile) -> pq.ParquetFile:
    system, path = storage.filesystem(storage.join(uri, item.path))
    try:
        return pq.ParquetFile(path, filesystem=system)
    except (OSError, pa.ArrowInvalid) as error:
        reason = stores.first_line(error)
        raise LakeError(f"table {uri}, file {item.path} can't be read: {reason}. Restore it from a copy.") from error


def _conform_batch(batch: pa.RecordBatch, schema: pa.Schema, last_time: int | None) -> pa.RecordBatch:
    columns = [
        conform(batch.column(field.name), field.type)
        if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    place = schema.get_field_index("kafka")
    columns[place] = raw_files.carry_times(columns[place], last_time)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def commit(table: LakeTable, files: Sequence[DataFile], runs: Sequence[Sequence[DataFile]]) -> None:
    """Put the written files in place of the runs. CommitConflict if another compaction came first."""
    tables.commit(
        table,
        files,
        {_NUMBER: (table.number(_NUMBER) or 0) + 1},
        removals=[item for run in runs for item in run],
        partition_by=table.metadata.partition_columns,
        rewritten=True,
    )


_log = logging.getLogger(__name__)

RETENTION_HOURS = tables.UNCOMMITTED_HOURS + 24
COMMITS = 100
"""Commits of a table between two cleanings of its log; as many as between two checkpoints."""
LOG_VERSIONS = 300
"""Versions that a cleaned log keeps at the least, to be restored or read. delta-rs looks for conflicts in the entries since
the version that a commit is based on. So a commit that is more versions late is refused, and is made again. At one commit a
second a commit may take five minutes."""
LOOK_HOURS = 24
"""Time between two looks at the files of a table."""
MOST = 200_000
"""The most files and log entries that one cleaning removes."""
_LOG_NUMBER = "zync:cleaned"
_LOOK_NUMBER = "zync:swept"
_ENTRY = re.compile(r"(\d{20})\.(json|crc|checkpoint\..*)")
_DELETERS = 16
_OWN_FOLDER = re.compile(r"(batch|compact)-[0-9a-f-]+")


def is_due(table: LakeTable) -> bool:
    return table.version // COMMITS > (table.number(_LOG_NUMBER) or 0)


def clean(table: LakeTable) -> list[str]:
    """Remove old entries of the log. If a look is due, also remove files that are older than RETENTION_HOURS and not, or no
    longer, in the table. Returns the paths of these files, relative to the table.

    Raises CommitConflict if another writer cleans the table at the same moment, TableDamaged if another program changed the
    table: its older versions may be needed.
    """
    tampering.check(table)
    now, last = time.time(), table.number(_LOOK_NUMBER) or 0
    looks = now - last >= LOOK_HOURS * 3600
    # The number is set first: a look that fails is repeated a day later, not with each cleaning.
    numbers = {_LOG_NUMBER: table.version // COMMITS} | ({_LOOK_NUMBER: int(now)} if looks else {})
    tables.commit(table, [], numbers, partition_by=table.metadata.partition_columns)
    newest = tables.open_table(table.uri)
    if newest is None:
        return []
    clean_log(newest)
    if not looks:
        return []
    system, base = storage.filesystem(table.uri)
    candidates = unneeded_files(newest)
    paths = candidates[:MOST]
    _delete_files(table.uri, lambda path: system.delete_file(f"{base.rstrip('/')}/{path}"), paths)
    if not storage.is_store(table.uri):
        _remove_folders(base, paths)
    if len(candidates) > MOST:
        tables.commit(newest, [], {_LOOK_NUMBER: last}, partition_by=newest.metadata.partition_columns)
    return paths


def clean_log(table: LakeTable) -> int:
    """Remove the log's files before the last checkpoint that leaves LOG_VERSIONS versions. Returns the number of removed files.

    A table's property ``delta.logRetentionDuration`` can keep more files. The property ``delta.enableExpiredLogCleanup =
    false`` keeps every file.
    """
    properties = table.metadata.configuration
    if properties.get("delta.enableExpiredLogCleanup", "").lower() == "false":
        return 0
    system, log = storage.filesystem(storage.join(table.uri, "_delta_log"))
    entries = [
        (match, info)
        for info in system.get_file_info(fs.FileSelector(log))
        if (match := _ENTRY.fullmatch(info.base_name))
    ]
    whole = [match for match, _ in entries if match[2] == "checkpoint.parquet"]
    limit = max((int(match[1]) for match in whole if int(match[1]) <= table.version - LOG_VERSIONS), default=0)
    expiry_time = _expiry_time(properties.get("delta.logRetentionDuration"))
    # The oldest first: a log that begins late is whole, a log with a hole is not.
    early = sorted((match[0], (info.mtime_ns or 0) / 1e9) for match, info in entries if int(match[1]) < limit)
    names = [name for name, _ in takewhile(lambda pair: pair[1] <= expiry_time, early)][:MOST]
    _delete_files(table.uri, lambda name: system.delete_file(storage.join(log, name)), names)
    return len(names)


def tidy(table: LakeTable | None) -> None:
    """Clean a side table if a cleaning is due. ``table``: opened after a commit to it.

    The threads of many topics come at once. One of them cleans the table, and the others find that nothing is due.
    """
    if table is None or not is_due(table):
        return
    with _cleaning_locks.setdefault(table.uri, Lock()), log_failures(table.uri):
        newest = tables.open_table(table.uri)
        if newest is not None and is_due(newest):
            clean(newest)


_cleaning_locks: dict[str, Lock] = {}
"""Place of a table → held while it is cleaned."""


@contextmanager
def log_failures(uri: str) -> Generator[None]:
    """Log the failure of a table's upkeep instead of raising the error. A later commit tries again."""
    try:
        yield
    except CommitConflict as error:
        _log.info("%s", error)
    except (ZyncError, OSError) as error:
        _log.warning("upkeep of table %s: %s", uri, error)


def unneeded_files(table: LakeTable) -> list[str]:
    """Files below the table's folder that are older than RETENTION_HOURS and not in the table: commits replaced them so
    long ago, or none names them. Paths relative to the table, the oldest first."""
    limit = time.time() - RETENTION_HOURS * 3600
    live_paths = {item.path for item in table.files}
    live_paths |= {
        path
        for path, removal_time in log.removal_times(table.uri, table.version).items()
        if removal_time / 1000 > limit
    }
    files = _store_files(table.uri, limit) if storage.is_store(table.uri) else _disk_files(table.uri, "", limit)
    return [file[1] for file in sorted(file for file in files if file[1] not in live_paths)]


def _store_files(uri: str, limit: float) -> Iterator[tuple[float, str]]:
    """The files below a table in a store that were written up to ``limit``: when, and the path relative to the table."""
    system, base = storage.filesystem(uri)
    for path, write_time in storage.files_with_times(uri, ".parquet"):
        if write_time <= limit and not _of_another_table(system, base, path):
            yield write_time, path


def _disk_files(uri: str, folder: str, limit: float) -> Iterator[tuple[float, str]]:
    """The files of a table in a folder, likewise. Arrow takes ten times as long for it.

    A batch's folder that changed after ``limit`` is passed over: its files are not older than the folder. Links are passed
    over too, since zync writes none.
    """
    base = os.path.join(uri, folder)  # noqa: PTH118  a week's files are a million paths
    if folder and os.path.exists(os.path.join(base, "_delta_log")):  # noqa: PTH110, PTH118
        return  # another table, as a raw table below a staging pool of its pool's name
    with suppress(OSError), os.scandir(base) as entries:  # another clean-up may just have removed the folder
        for entry in entries:
            if entry.name.startswith(("_", ".")):
                continue
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                if not _OWN_FOLDER.fullmatch(entry.name) or _write_time(entry) <= limit:
                    yield from _disk_files(uri, path, limit)
            elif entry.name.endswith(".parquet"):
                write_time = _write_time(entry)
                if write_time <= limit:
                    yield write_time, path


def _write_time(entry: os.DirEntry[str]) -> float:
    """When a file was written, or a folder was changed; infinity for a link, and for what the system can't look at."""
    with suppress(OSError):
        return math.inf if entry.is_symlink() else entry.stat(follow_symlinks=False).st_mtime
    return math.inf


def _delete_files(uri: str, delete: Callable[[str], object], names: Sequence[str]) -> None:
    """Delete files, many at the same time because each request to a store waits. A missing file is no error."""

    def delete_file(name: str) -> None:
        with suppress(FileNotFoundError):
            delete(name)

    if not storage.is_store(uri):
        for name in names:
            delete_file(name)
        return
    with ThreadPoolExecutor(_DELETERS) as pool:
        list(pool.map(delete_file, names))


def _remove_folders(base: str, paths: Iterable[str]) -> None:
    """Remove the folders of batches and compactions that are empty now. Nobody writes to them again."""
    folders = {
        folder
        for path in paths
        for folder in Path(path).parents
        if _OWN_FOLDER.fullmatch(folder.parts[0] if folder.parts else "")
    }
    for folder in sorted(folders, key=lambda item: -len(item.parts)):
        with suppress(OSError):
            Path(base, folder).rmdir()


def _expiry_time(retention: str | None) -> float:
    """The time up to which log entries may be removed, by the table's ``interval <number> <unit>``; now if the table sets
    none."""
    match = re.fullmatch(r"\s*interval\s+(\d+)\s+(second|minute|hour|day|week)s?\s*", retention or "", re.IGNORECASE)
    if retention is None:
        return time.time() + 1
    if match is None:
        return 0
    unit = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800}[match[2].lower()]
    return time.time() - int(match[1]) * unit


def _of_another_table(system: fs.FileSystem, base: str, path: str) -> bool:
    """Whether the file lies in a table below this one, as a raw table does below a staging pool of its pool's name."""
    folders = path.split("/")[:-1]
    logs = ["/".join([base.rstrip("/"), *folders[: count + 1], "_delta_log"]) for count in range(len(folders))]
    return any(info.type != fs.FileType.NotFound for info in system.get_file_info(logs))
