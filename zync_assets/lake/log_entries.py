"""Reads the entries of a Delta log: whether a version is still the newest, and the numbers and tombstones of versions.

delta-rs reads the log from the last checkpoint on to open a table, and reads the log again for each number. A table has
several numbers for each partition of its topic. Here one read returns every number of the table.

Delta protocol: "Delta Log Entries", "Checkpoints", "Last Checkpoint File", "Transaction Identifiers".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq
from pyarrow import fs

from zync_assets.compute import pc
from zync_assets.errors import LakeError
from zync_assets.lake import storage

Mark = tuple[int | None, int | None]
"""Identifies a log entry: its size in bytes, and its modification time in nanoseconds."""
CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.\d{10}\.\d{10})?\.parquet")
"""The names of a checkpoint's files: one file, or several parts."""
_READERS = 16
"""Entries that are read at the same time from a store, where each of them is a round trip."""


@dataclass(frozen=True)
class Entry:
    """A commit by its log entry: ``info`` is its commitInfo, ``numbers`` are the application ids that it set, ``added`` its
    ``add`` actions, and ``removed`` the paths of its ``remove`` actions."""

    info: Mapping[str, Any]
    numbers: Mapping[str, int]
    added: Sequence[Mapping[str, Any]]
    removed: Sequence[str]


def newest_mark(uri: str, version: int) -> Mark | None:
    """The mark of a version; None if it is not the newest, or has no entry (any more)."""
    system, path = _log(uri)
    entry, following = system.get_file_info([storage.join(path, name(n)) for n in (version, version + 1)])
    if not entry.is_file or following.is_file:
        return None
    return entry.size, entry.mtime_ns


def mark(uri: str, version: int) -> Mark | None:
    """The mark of a version; None if it has no entry (any more)."""
    system, path = _log(uri)
    entry = system.get_file_info(storage.join(path, name(version)))
    return (entry.size, entry.mtime_ns) if entry.is_file else None


def numbers(uri: str, version: int) -> dict[str, int]:
    """Application id → its last number, as of a version. LakeError where the log does not reach back to that version."""
    with _reaching(uri, version):
        checkpoint = _checkpoint(uri, version)
        found = {} if checkpoint is None else _in_checkpoint(uri, checkpoint[1], "txn", "appId", "version")
        return found | numbers_set(uri, 0 if checkpoint is None else checkpoint[0] + 1, version)


def numbers_set(uri: str, first: int, last: int) -> dict[str, int]:
    """Application ids that the versions from ``first`` to ``last`` set, each with its last number. FileNotFoundError if one
    of them has no entry (any more)."""
    found: dict[str, int] = {}
    for action in _actions(uri, "txn", first, last):
        found[action["appId"]] = action["version"]
    return found


def entry(uri: str, version: int) -> Entry | None:
    """The commit of a version; None if it has no entry (any more)."""
    with suppress(FileNotFoundError):
        return next(entries(uri, version, version))
    return None


def entries(uri: str, first: int, last: int) -> Iterator[Entry]:
    """The commits of some versions. FileNotFoundError if one of them has no entry (any more)."""
    for actions in _read(uri, first, last, lambda line: True):
        info = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
        numbers = {action["txn"]["appId"]: action["txn"]["version"] for action in actions if "txn" in action}
        added = [action["add"] for action in actions if "add" in action]
        yield Entry(info, numbers, added, [action["remove"]["path"] for action in actions if "remove" in action])


def are_whole(uri: str, first: int, last: int) -> bool:
    """Whether every version from ``first`` to ``last`` still has its entry. Lists the log."""
    system, path = _log(uri)
    names = {info.base_name for info in system.get_file_info(fs.FileSelector(path))}
    return all(name(version) in names for version in range(first, last + 1))


def removed(uri: str, version: int) -> dict[str, int]:
    """Path → when a commit removed the file, in milliseconds since the epoch, of the tombstones that the log still has.
    LakeError where the log does not reach back to that version."""
    with _reaching(uri, version):
        checkpoint = _checkpoint(uri, version)
        found = {} if checkpoint is None else _in_checkpoint(uri, checkpoint[1], "remove", "path", "deletionTimestamp")
        for action in _actions(uri, "remove", 0 if checkpoint is None else checkpoint[0] + 1, version):
            found[action["path"]] = action.get("deletionTimestamp") or 0
    return {unquote(path): at or 0 for path, at in found.items()}


def name(version: int) -> str:
    """The name of a version's entry."""
    return f"{version:020d}.json"


def _actions(uri: str, kind: str, first: int, last: int) -> Iterator[Any]:
    """The actions of a kind of some versions' entries, in their order."""
    for actions in _read(uri, first, last, lambda line: f'"{kind}"' in line):
        yield from (action[kind] for action in actions if kind in action)


def _read(uri: str, first: int, last: int, wanted: Callable[[str], bool]) -> Iterator[list[dict[str, Any]]]:
    """The actions of each version's entry, of ``wanted`` lines only."""
    system, path = _log(uri)

    def read(version: int) -> list[dict[str, Any]]:
        with system.open_input_file(storage.join(path, name(version))) as file:
            lines = file.read().decode().splitlines()
        return [json.loads(line) for line in lines if line and wanted(line)]

    versions = range(first, last + 1)
    if not storage.is_store(uri) or len(versions) < 2:
        yield from map(read, versions)
        return
    with ThreadPoolExecutor(_READERS) as pool:
        yield from pool.map(read, versions)


@contextmanager
def _reaching(uri: str, version: int) -> Generator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise LakeError(
            f"table {uri}: the Delta log lacks an entry that version {version} needs ({error}). Run again: the table may have"
            " newer versions. If the error comes again, restore the log's files from a copy."
        ) from None


def _checkpoint(uri: str, version: int) -> tuple[int, list[str]] | None:
    """The newest checkpoint at or before a version, and the names of its files; None where there is none."""
    system, path = _log(uri)
    # Without a listing, which takes the longer the more entries there are.
    with suppress(FileNotFoundError, ValueError, KeyError):
        with system.open_input_file(storage.join(path, "_last_checkpoint")) as file:
            told = json.loads(file.read())
        single = f"{int(told['version']):020d}.checkpoint.parquet"
        usable = told["version"] <= version and not told.get("parts")
        if usable and system.get_file_info(storage.join(path, single)).is_file:
            return int(told["version"]), [single]
    found: dict[int, list[str]] = {}
    for info in system.get_file_info(fs.FileSelector(path)):
        match = CHECKPOINT.fullmatch(info.base_name)
        if match is not None and int(match[1]) <= version:
            found.setdefault(int(match[1]), []).append(info.base_name)
    return max(found.items(), default=None)


def _in_checkpoint(uri: str, names: Iterable[str], kind: str, key: str, number: str) -> dict[str, int]:
    system, path = _log(uri)
    found: dict[str, int] = {}
    for each in names:
        table = pq.ParquetFile(storage.join(path, each), filesystem=system).read(
            columns=[f"{kind}.{key}", f"{kind}.{number}"]
        )
        if kind in table.column_names:
            rows = table[kind].filter(pc.is_valid(pc.struct_field(table[kind], key)))
            found |= dict(zip(*(pc.struct_field(rows, part).to_pylist() for part in (key, number)), strict=True))
    return found


def _log(uri: str) -> tuple[fs.FileSystem, str]:
    return storage.filesystem(storage.join(uri, "_delta_log"))
