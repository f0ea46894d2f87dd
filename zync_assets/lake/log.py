"""The Delta log of a table: its entries, and the table's files and numbers at one version.

delta-rs reads the log from the last checkpoint on to open a table, and reads the log again for each number. A table has
several numbers for each partition of its topic. Here one read returns every number of the table. The log also shows whether
a version is still the newest.

Delta protocol: "Delta Log Entries", "Checkpoints", "Last Checkpoint File", "Transaction Identifiers", "Add File and Remove
File", "Per-file Statistics".
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, Metadata, Schema
from pyarrow import fs

from zync_assets.codecs.arrays import pc
from zync_assets.errors import LakeError
from zync_assets.lake import storage
from zync_assets.offsets import OffsetRange

Order = tuple[int, int]
"""The place of a record in its source's order: ``high`` and ``low``, compared as a tuple."""
Mark = tuple[int | None, int | None]
"""Identifies a log entry: its size in bytes, and its modification time in nanoseconds."""
CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.\d{10}\.\d{10})?\.parquet")
"""The names of a checkpoint's files: one file, or several parts."""
_READERS = 16
"""Entries that are read at the same time from a store, where each of them is a round trip."""


@dataclass(frozen=True)
class LogEntry:
    """A commit by its log entry: ``info`` is its commitInfo, ``numbers`` are the application ids that it set, ``adds`` its
    ``add`` actions, and ``removes`` the paths of its ``remove`` actions."""

    info: Mapping[str, Any]
    numbers: Mapping[str, int]
    adds: Sequence[Mapping[str, Any]]
    removes: Sequence[str]


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
    with _log_errors(uri, version):
        checkpoint = _checkpoint(uri, version)
        checkpoint_numbers = (
            {} if checkpoint is None else _checkpoint_values(uri, checkpoint[1], "txn", "appId", "version")
        )
        return checkpoint_numbers | numbers_set(uri, 0 if checkpoint is None else checkpoint[0] + 1, version)


def numbers_set(uri: str, first: int, last: int) -> dict[str, int]:
    """Application ids that the versions from ``first`` to ``last`` set, each with its last number. FileNotFoundError if one
    of them has no entry (any more)."""
    last_numbers: dict[str, int] = {}
    for action in _actions(uri, "txn", first, last):
        last_numbers[action["appId"]] = action["version"]
    return last_numbers


def entry(uri: str, version: int) -> LogEntry | None:
    """The commit of a version; None if it has no entry (any more)."""
    with suppress(FileNotFoundError):
        return next(entries(uri, version, version))
    return None


def entries(uri: str, first: int, last: int) -> Iterator[LogEntry]:
    """The commits of some versions. FileNotFoundError if one of them has no entry (any more)."""
    for actions in _read(uri, first, last, lambda line: True):
        info = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
        numbers = {action["txn"]["appId"]: action["txn"]["version"] for action in actions if "txn" in action}
        adds = [action["add"] for action in actions if "add" in action]
        yield LogEntry(info, numbers, adds, [action["remove"]["path"] for action in actions if "remove" in action])


def are_whole(uri: str, first: int, last: int) -> bool:
    """Whether every version from ``first`` to ``last`` still has its entry. Lists the log."""
    system, path = _log(uri)
    names = {info.base_name for info in system.get_file_info(fs.FileSelector(path))}
    return all(name(version) in names for version in range(first, last + 1))


def removal_times(uri: str, version: int) -> dict[str, int]:
    """Path → when a commit removed the file, in milliseconds since the epoch, of the tombstones that the log still has.
    LakeError where the log does not reach back to that version."""
    with _log_errors(uri, version):
        checkpoint = _checkpoint(uri, version)
        times = (
            {} if checkpoint is None else _checkpoint_values(uri, checkpoint[1], "remove", "path", "deletionTimestamp")
        )
        for action in _actions(uri, "remove", 0 if checkpoint is None else checkpoint[0] + 1, version):
            times[action["path"]] = action.get("deletionTimestamp") or 0
    return {unquote(path): at or 0 for path, at in times.items()}


def name(version: int) -> str:
    """The name of a version's entry."""
    return f"{version:020d}.json"


def _actions(uri: str, kind: str, first: int, last: int) -> Iterator[Any]:
    """The actions of a kind of some versions' entries, in their order."""
    for actions in _read(uri, first, last, lambda line: f'"{kind}"' in line):
        yield from (action[kind] for action in actions if kind in action)


def _read(uri: str, first: int, last: int, line_filter: Callable[[str], bool]) -> Iterator[list[dict[str, Any]]]:
    """The actions of each version's entry, of the lines that pass ``line_filter``."""
    system, path = _log(uri)

    def read(version: int) -> list[dict[str, Any]]:
        with system.open_input_file(storage.join(path, name(version))) as file:
            # Not splitlines: a name may hold U+2028, which JSON leaves as it is.
            lines = file.read().decode().split("\n")
        return [json.loads(line) for line in lines if line and line_filter(line)]

    versions = range(first, last + 1)
    if not storage.is_store(uri) or len(versions) < 2:
        yield from map(read, versions)
        return
    with ThreadPoolExecutor(_READERS) as pool:
        yield from pool.map(read, versions)


@contextmanager
def _log_errors(uri: str, version: int) -> Generator[None]:
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
            hint = json.loads(file.read())
        single = f"{int(hint['version']):020d}.checkpoint.parquet"
        usable = hint["version"] <= version and not hint.get("parts")
        if usable and system.get_file_info(storage.join(path, single)).is_file:
            return int(hint["version"]), [single]
    checkpoints: dict[int, list[str]] = {}
    for info in system.get_file_info(fs.FileSelector(path)):
        match = CHECKPOINT.fullmatch(info.base_name)
        if match is not None and int(match[1]) <= version:
            checkpoints.setdefault(int(match[1]), []).append(info.base_name)
    return max(checkpoints.items(), default=None)


def _checkpoint_values(uri: str, names: Iterable[str], kind: str, key: str, value: str) -> dict[str, Any]:
    """The field ``key`` → the field ``value``, of the actions of a kind in a checkpoint's files."""
    system, path = _log(uri)
    values: dict[str, Any] = {}
    for file_name in names:
        with pq.ParquetFile(storage.join(path, file_name), filesystem=system) as file:
            table = file.read(columns=[f"{kind}.{key}", f"{kind}.{value}"])
        if kind in table.column_names:
            rows = table[kind].filter(pc.is_valid(pc.struct_field(table[kind], key)))
            values |= dict(zip(*(pc.struct_field(rows, part).to_pylist() for part in (key, value)), strict=True))
    return values


def _log(uri: str) -> tuple[fs.FileSystem, str]:
    return storage.filesystem(storage.join(uri, "_delta_log"))


TOKEN = "zync.commit"
"""The key of a commit's own mark in its log entry. A writer finds its commit by the mark. The mark is no state."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_CARRY_VERSIONS = 100
"""The most versions between two opened tables for which the newer table takes over numbers and files. As many versions lie
between two checkpoints."""


@dataclass(frozen=True)
class DataFile:
    """One Parquet file of a table, with the statistics that its log entry carries.

    ``path`` is relative to the table; ``first`` and ``last`` are the lowest and highest offset in it; times are
    milliseconds since the epoch. ``partition``, ``first``, ``last`` and the times are None where the log has none.
    """

    path: str
    size: int
    records: int
    partition: int | None = None
    first: int | None = None
    last: int | None = None
    min_time: int | None = None
    max_time: int | None = None
    group: str | None = None
    """The value of the table's partition column ``topic``; None for a table without one."""
    min_order: Order | None = None
    """No record of the file has a lower order: the lowest ``high``, and the lowest ``low``. None: some records have none."""
    max_order: Order | None = None
    """No record of the file has a higher order: the highest ``high``, and the highest ``low``. None: no record has one."""
    arrival: float = field(default_factory=time.time, compare=False, repr=False)
    """When this process, or a Spark task of its, came to know the file: seconds since the epoch."""
    commit_time: int | None = field(default=None, compare=False, repr=False)
    """When the file was committed, by its log entry: milliseconds since the epoch; None for a file that is not committed."""

    def meets(self, ranges: Iterable[OffsetRange]) -> bool:
        """Whether the file may have a record of a range."""
        return any(
            part.partition == self.partition and (self.first or 0) < part.end and part.first <= (self.last or 0)
            for part in ranges
        )

    def lies_in(self, ranges: Iterable[OffsetRange]) -> bool:
        """Whether all records of the file are surely in one of the ranges."""
        first, last = self.first, self.last
        if first is None or last is None:
            return False
        return any(part.partition == self.partition and part.first <= first and last < part.end for part in ranges)


class LakeTable:
    """A table at one version. A commit on this object conflicts with every commit since that version.

    Several callers may hold the object, and its version never changes. After a commit on ``delta``, delta-rs's own object,
    ``delta`` shows the next version. A newer table takes ``delta`` over, because that is cheaper than to read the log again. If
    a caller still needs ``delta`` at the old version, delta-rs reads the log again.
    """

    def __init__(self, uri: str, delta: DeltaTable) -> None:
        self.uri = uri
        self.version = delta.version()
        self.lock = threading.RLock()
        """A caller holds the lock while it uses ``delta`` and another thread may commit. ``give_away`` then waits for the
        caller."""
        self._delta: DeltaTable | None = delta

    @property
    def delta(self) -> DeltaTable:
        """delta-rs's object for this version. DeltaError if it was given away and the log lacks this version by now."""
        with self.lock:
            if self._delta is None:
                options = storage.delta_options(self.uri)
                self._delta = DeltaTable(self.uri, version=self.version, storage_options=options)
            return self._delta

    def give_away(self) -> DeltaTable:
        """Gives delta-rs's object to a newer version of the table. This table no longer has the object. ``load`` must have run
        before the commit on the object, because the object shows the newer version after the commit."""
        with self.lock:
            delta, self._delta = self.delta, None
            return delta

    def load(self) -> None:
        """Read from delta-rs's object everything that callers may ask for after a commit. If this fails, nothing is committed
        yet."""
        _ = self.delta_schema, self.metadata, self.files

    @cached_property
    def delta_schema(self) -> Schema:
        with self.lock:
            return self.delta.schema()

    @cached_property
    def schema(self) -> pa.Schema:
        return pa.schema(self.delta_schema.to_arrow())

    @cached_property
    def metadata(self) -> Metadata:
        with self.lock:
            return self.delta.metadata()

    @cached_property
    def files(self) -> tuple[DataFile, ...]:
        """Every file of this version, in no particular order; the log is asked once."""
        with self.lock:
            return tuple(list_files(self))

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """Application id → the last version that was committed with it. The log is replayed once for all of them."""
        return numbers(self.uri, self.version)

    def number(self, name: str) -> int | None:
        """The last version that was committed with an application id, or None."""
        return self.numbers.get(name)

    def carry(self, before: LakeTable) -> None:
        """Take over the numbers and files of an older version of the same table, with the changes of the commits since.

        The files are taken over if all these commits are zync's own. The statistics of other programs are for delta-rs.
        """
        if not 0 <= self.version - before.version <= _CARRY_VERSIONS:
            return
        with suppress(FileNotFoundError):
            commits = list(entries(self.uri, before.version + 1, self.version))
            old_numbers = before.__dict__.get("numbers")
            if old_numbers is not None:
                self.__dict__["numbers"] = {
                    **old_numbers,
                    **{name: n for commit in commits for name, n in commit.numbers.items()},
                }
            files = before.__dict__.get("files")
            if files is not None and all(TOKEN in commit.info for commit in commits):
                self.__dict__["files"] = _files_after(files, commits)


def _files_after(files: Iterable[DataFile], commits: Iterable[LogEntry]) -> tuple[DataFile, ...]:
    """The files of a table after some commits of zync."""
    files_by_path = {item.path: item for item in files}
    for commit in commits:
        for path in commit.removes:
            files_by_path.pop(unquote(path), None)
        for action in commit.adds:
            item = _data_file(action)
            files_by_path[item.path] = item
    return tuple(files_by_path.values())


def _data_file(action: Mapping[str, Any]) -> DataFile:
    """The file of an ``add`` action that zync wrote."""
    stats = json.loads(action["stats"])
    low, high = (stats.get(name, {}).get("kafka", {}) for name in ("minValues", "maxValues"))
    return DataFile(
        unquote(action["path"]),
        action["size"],
        stats["numRecords"],
        low.get("partition"),
        low.get("offset"),
        high.get("offset"),
        _since_epoch(low.get("time")),
        _since_epoch(high.get("time")),
        action["partitionValues"].get("topic"),
        _order(stats, "minValues"),
        _order(stats, "maxValues"),
        commit_time=action["modificationTime"],
    )


def _order(stats: Mapping[str, Any], bound: str) -> Order | None:
    order = stats.get(bound, {}).get("order")
    return None if order is None else (order["high"], order["low"])


def _since_epoch(text: str | None) -> int | None:
    """Milliseconds, of a time in a log entry's statistics."""
    return None if text is None else (datetime.fromisoformat(text) - EPOCH) // timedelta(milliseconds=1)


def list_files(table: LakeTable) -> list[DataFile]:
    """Every file of the table as of the opened version, in no particular order."""
    # Not by pa.table, which imports pandas to see whether it is given one of its frames: a quarter of what a command takes.
    actions = pa.RecordBatchReader.from_stream(table.delta.get_add_actions(flatten=True)).read_all()
    count = actions.num_rows

    def column(name: str) -> list[Any]:
        if name not in actions.column_names:
            return [None] * count
        values = actions[name]
        return (_millis(values) if pa.types.is_timestamp(values.type) else values).to_pylist()

    def orders(bound: str) -> list[Order | None]:
        pairs = zip(column(f"{bound}.order.high"), column(f"{bound}.order.low"), strict=True)
        return [None if high is None or low is None else (high, low) for high, low in pairs]

    pairs = list(zip(orders("min"), orders("max"), strict=True))
    # The limit of 32 columns may lie between the two parts of an order.
    if "order" in table.schema.names and not {"min.order.high", "min.order.low"} <= set(actions.column_names):
        logged = _logged_orders(table.uri, table.version)
        pairs = [logged[path] if any(logged[path]) else _compacted_orders(table.uri, path) for path in column("path")]
    now = time.time()
    return [
        DataFile(unquote(path), size, count, partition, first, last, low, high, group, least, most, now, commit_time)
        for path, size, count, partition, first, last, low, high, group, commit_time, (least, most) in zip(
            column("path"),
            column("size_bytes"),
            (records or 0 for records in column("num_records")),
            column("min.kafka.partition"),
            column("min.kafka.offset"),
            column("max.kafka.offset"),
            column("min.kafka.time"),
            column("max.kafka.time"),
            column("partition.topic"),
            column("modification_time"),
            pairs,
            strict=True,
        )
    ]


def _logged_orders(uri: str, version: int) -> dict[str, tuple[Order | None, Order | None]]:
    """Path, as the log has it → the lowest and the highest order, of every file that the log names.

    delta-rs reads the statistics of a table's first 32 columns alone, unless the table has a property that ``create_table``
    sets. An older table lacks the property, and ``order`` is the last column of a raw table.
    """
    texts: dict[str, str | None] = {}
    with _log_errors(uri, version):
        checkpoint = _checkpoint(uri, version)
        if checkpoint is not None:
            texts = _checkpoint_values(uri, checkpoint[1], "add", "path", "stats")
        for action in _actions(uri, "add", 0 if checkpoint is None else checkpoint[0] + 1, version):
            texts[action["path"]] = action.get("stats")
    stats = {path: json.loads(text or "{}") for path, text in texts.items()}
    return {path: (_order(item, "minValues"), _order(item, "maxValues")) for path, item in stats.items()}


def _compacted_orders(uri: str, path: str) -> tuple[Order | None, Order | None]:
    """Earlier versions did not know the orders of such a table's files, and logged none of a file that compaction made."""
    if not re.fullmatch(r"compact-[0-9a-f]+\.parquet", path):
        return None, None
    lows, highs = zip(*storage.column_bounds(storage.join(uri, path), "order.high", "order.low"), strict=True)
    return None if None in lows else lows, None if None in highs else highs


def _millis(moments: pa.ChunkedArray) -> pa.ChunkedArray:
    """Since the epoch. A thousand of them as Python's times take as long as all else of a thousand files."""
    return pc.floor_temporal(moments, unit="millisecond").cast(pa.timestamp("ms", "UTC")).cast(pa.int64())
