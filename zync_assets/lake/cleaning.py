"""Remove unneeded files: old entries of a table's log, files that a commit replaced long ago, and files that no commit
ever named.

delta-rs lists the whole log three times for each commit. So the log is cleaned every COMMITS commits, and keeps
LOG_VERSIONS versions. A commit then costs the same after a week as after LOG_VERSIONS commits.

A reader may still read a version whose files were replaced since. A writer writes files before the commit that names them.
Both have RETENTION_HOURS: seven days, Delta's own default (Delta protocol, "Vacuum"; ``deletedFileRetentionDuration``).
For a young file the hours count from the time when the file was written (``tables.YOUNG_HOURS``).
``tables.commit`` refuses a slower writer a day earlier, so that no commit names a removed file.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from pyarrow import fs

from zync_assets.errors import CommitConflict, ZyncError
from zync_assets.lake import foreign, log_entries, storage, tables
from zync_assets.lake.tables import Opened

_log = logging.getLogger(__name__)

RETENTION_HOURS = tables.UNCOMMITTED_HOURS + 24
COMMITS = 100
"""Commits of a table between two cleanings of its log; as many as between two checkpoints."""
LOG_VERSIONS = 1_000
"""Versions that a cleaned log keeps at the least, to be restored or read. delta-rs looks for conflicts in the entries since
the version that a commit is based on. So a commit that is more versions late is refused, and is made again."""
SWEEP_HOURS = 6
"""Time between two looks at all files of a table. A file has RETENTION_HOURS / SWEEP_HOURS looks before it goes, so that all
looks cost as much as the commits that wrote the files."""
MOST = 200_000
"""Files and log entries that one cleaning removes at the most."""
_NUMBER = "zync:cleaned"
_SWEPT = "zync:swept"
_ENTRY = re.compile(r"(\d{20})\.(json|crc|checkpoint\..*)")
_DELETERS = 16
_OWN_FOLDER = re.compile(r"(batch|compact)-[0-9a-f-]+")


def is_due(opened: Opened) -> bool:
    return opened.version // COMMITS > (opened.number(_NUMBER) or 0)


def clean(opened: Opened, hours: float = RETENTION_HOURS) -> list[str]:
    """Remove old entries of the log, and once in SWEEP_HOURS files that are older than ``hours`` and no longer, or not, in
    the table. Returns the paths of these files, relative to the table.

    Raises CommitConflict if another writer cleans the table at the same moment, TableDamaged if another program changed the
    table: its older versions may be needed.
    """
    foreign.check(opened)
    now = time.time()
    sweeps = now - (opened.number(_SWEPT) or 0) >= SWEEP_HOURS * 3600
    numbers = {_NUMBER: opened.version // COMMITS} | ({_SWEPT: int(now)} if sweeps else {})
    tables.commit(opened, [], numbers, partition_by=opened.metadata.partition_columns)
    found = tables.open_table(opened.uri)
    if found is None:
        return []
    clean_log(found)
    if not sweeps:
        return []
    system, base = storage.filesystem(opened.uri)
    gone = unneeded(found, hours)[:MOST]
    _each(opened.uri, lambda path: system.delete_file(f"{base.rstrip('/')}/{path}"), gone)
    if not storage.is_store(opened.uri):
        _remove_folders(base, gone)
    return gone


def clean_log(opened: Opened) -> int:
    """Remove the log's files before the last checkpoint that leaves LOG_VERSIONS versions; how many there were.

    Returns the number of removed files. A table's property ``delta.logRetentionDuration`` can keep more files. The property
    ``delta.enableExpiredLogCleanup = false`` keeps every file.
    """
    properties = opened.metadata.configuration
    if properties.get("delta.enableExpiredLogCleanup", "").lower() == "false":
        return 0
    system, log = storage.filesystem(storage.join(opened.uri, "_delta_log"))
    entries = [
        (match, info)
        for info in system.get_file_info(fs.FileSelector(log))
        if (match := _ENTRY.fullmatch(info.base_name))
    ]
    whole = [match for match, _ in entries if match[2] == "checkpoint.parquet"]
    limit = max((int(match[1]) for match in whole if int(match[1]) <= opened.version - LOG_VERSIONS), default=0)
    kept_from = _kept_from(properties.get("delta.logRetentionDuration"))
    # The oldest first: a log that begins late is whole, a log with a hole is not.
    early = sorted((match[0], (info.mtime_ns or 0) / 1e9) for match, info in entries if int(match[1]) < limit)
    gone = [name for name, _ in takewhile(lambda each: each[1] <= kept_from, early)][:MOST]
    _each(opened.uri, lambda name: system.delete_file(storage.join(log, name)), gone)
    return len(gone)


def tidy(uri: str) -> None:
    """Look after a side table after a commit to it, where that is due. A failure is logged: another commit tries again."""
    try:
        opened = tables.open_table(uri)
        if opened is not None and is_due(opened):
            clean(opened)
    except CommitConflict as error:
        _log.info("%s", error)
    except (ZyncError, OSError) as error:
        _log.warning("upkeep of table %s: %s", uri, error)


def unneeded(opened: Opened, hours: float) -> list[str]:
    """Files below the table's folder that are older than ``hours`` and not in the table: commits replaced them so long
    ago, or none names them. Paths relative to the table, the oldest first."""
    limit = time.time() - hours * 3600
    kept = {item.path for item in opened.files}
    kept |= {
        path for path, removed in log_entries.removed(opened.uri, opened.version).items() if removed / 1000 > limit
    }
    found = _stored(opened.uri, limit) if storage.is_store(opened.uri) else _on_disk(opened.uri, "", limit)
    return [each[1] for each in sorted(each for each in found if each[1] not in kept)]


def _stored(uri: str, limit: float) -> Iterator[tuple[float, str]]:
    """The files below a table in a store that were written up to ``limit``: when, and the path relative to the table."""
    system, base = storage.filesystem(uri)
    for path, written in storage.files_with_times(uri, ".parquet"):
        if written <= limit and not _of_another_table(system, base, path):
            yield written, path


def _on_disk(uri: str, folder: str, limit: float) -> Iterator[tuple[float, str]]:
    """The same of a table in a folder. Arrow takes ten times as long for it.

    A batch's folder that changed after ``limit`` is passed over: its files are not older than the folder.
    """
    base = os.path.join(uri, folder)  # noqa: PTH118  a week's files are a million paths
    if folder and Path(base, "_delta_log").exists():
        return  # another table, as a raw table below a staging pool of its pool's name
    with os.scandir(base) as found:
        for entry in found:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.name.startswith(("_", ".")):
                continue
            if entry.is_dir(follow_symlinks=False):
                if not _OWN_FOLDER.fullmatch(entry.name) or entry.stat().st_mtime <= limit:
                    yield from _on_disk(uri, path, limit)
            elif entry.name.endswith(".parquet") and (written := entry.stat().st_mtime) <= limit:
                yield written, path


def _each(uri: str, delete: Callable[[str], object], names: Sequence[str]) -> None:
    """Delete files, many at the same time because each request to a store waits. A missing file is no error."""

    def gone(name: str) -> None:
        with suppress(FileNotFoundError):
            delete(name)

    if not storage.is_store(uri):
        for name in names:
            gone(name)
        return
    with ThreadPoolExecutor(_DELETERS) as pool:
        list(pool.map(gone, names))


def _remove_folders(base: str, paths: Iterable[str]) -> None:
    """Remove the folders of batches and compactions that are empty now. Nobody writes to them again."""
    folders = {
        folder
        for path in paths
        for folder in Path(path).parents
        if _OWN_FOLDER.fullmatch(folder.parts[0] if folder.parts else "")
    }
    for folder in sorted(folders, key=lambda each: -len(each.parts)):
        with suppress(OSError):
            Path(base, folder).rmdir()


def _kept_from(retention: str | None) -> float:
    """The time up to which entries may go, by ``interval <number> <unit>`` of the table; now where that is not set."""
    found = re.fullmatch(r"\s*interval\s+(\d+)\s+(second|minute|hour|day|week)s?\s*", retention or "", re.IGNORECASE)
    if retention is None:
        return time.time() + 1
    if found is None:
        return 0
    unit = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800}[found[2].lower()]
    return time.time() - int(found[1]) * unit


def _of_another_table(system: fs.FileSystem, base: str, path: str) -> bool:
    """Whether the file lies in a table below this one, as a raw table does below a staging pool of its pool's name."""
    folders = path.split("/")[:-1]
    logs = ["/".join([base.rstrip("/"), *folders[: count + 1], "_delta_log"]) for count in range(len(folders))]
    return any(info.type != fs.FileType.NotFound for info in system.get_file_info(logs))
