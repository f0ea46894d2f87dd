"""A table at one version: its files, and the numbers that commits set.

Delta protocol: "Add File and Remove File", "Per-file Statistics", "Transaction Identifiers".
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable, Metadata, Schema

from zync_assets.compute import pc
from zync_assets.lake import log_entries, storage

TOKEN = "zync.commit"
"""The key of a commit's own mark in its log entry. A writer finds its commit by the mark. The mark is no state."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_CARRIED = 100
"""Versions from one opened table to the next over which numbers and files are carried; as many lie between two
checkpoints."""


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
    made: float = field(default_factory=time.time, compare=False, repr=False)
    """When this process, or a Spark task of its, came to know the file: seconds since the epoch."""
    added: int | None = field(default=None, compare=False, repr=False)
    """When the file was committed, by its log entry: milliseconds since the epoch; None for a file that is not committed."""


class Opened:
    """A table at one version. A commit on this object conflicts with every commit since that version.

    It may have several holders, and the version never changes. delta-rs's own object, ``table``, goes on to the next
    version once a commit was made on it, which is cheaper than to read the log again. It is read again for a holder that
    still needs it.
    """

    def __init__(self, uri: str, table: DeltaTable) -> None:
        self.uri = uri
        self.version = table.version()
        self.lock = threading.RLock()
        """Whoever uses ``table`` while another thread may commit holds the lock: the table is not given away meanwhile."""
        self._table: DeltaTable | None = table

    @property
    def table(self) -> DeltaTable:
        """delta-rs's object for this version. DeltaError if it was given away and the log lacks this version by now."""
        with self.lock:
            if self._table is None:
                options = storage.delta_options(self.uri)
                self._table = DeltaTable(self.uri, version=self.version, storage_options=options)
            return self._table

    def give_away(self) -> DeltaTable:
        """delta-rs's object, for a newer version of the table. Nobody else has it then."""
        with self.lock:
            # Holders ask for these after a commit too.
            _ = self.delta_schema, self.metadata, self.files
            table, self._table = self.table, None
            return table

    @cached_property
    def delta_schema(self) -> Schema:
        with self.lock:
            return self.table.schema()

    @cached_property
    def schema(self) -> pa.Schema:
        return pa.schema(self.delta_schema.to_arrow())

    @cached_property
    def metadata(self) -> Metadata:
        with self.lock:
            return self.table.metadata()

    @cached_property
    def files(self) -> tuple[DataFile, ...]:
        """Every file of this version, in no particular order; the log is asked once."""
        with self.lock:
            return tuple(list_files(self))

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """Application id → the last version that was committed with it. The log is replayed once for all of them."""
        return log_entries.numbers(self.uri, self.version)

    def number(self, name: str) -> int | None:
        """The last version that was committed with an application id, or None."""
        return self.numbers.get(name)

    def carry(self, before: Opened) -> None:
        """Take over the numbers and files of an older version of the same table, with the changes of the commits since.

        The files are taken over if all these commits are zync's own. The statistics of other programs are for delta-rs.
        """
        if not 0 <= self.version - before.version <= _CARRIED:
            return
        with suppress(FileNotFoundError):
            since = list(log_entries.entries(self.uri, before.version + 1, self.version))
            known = before.__dict__.get("numbers")
            if known is not None:
                self.__dict__["numbers"] = {**known, **{name: n for each in since for name, n in each.numbers.items()}}
            files = before.__dict__.get("files")
            if files is not None and all(TOKEN in each.info for each in since):
                self.__dict__["files"] = _changed(files, since)


def _changed(files: Iterable[DataFile], since: Iterable[log_entries.Entry]) -> tuple[DataFile, ...]:
    """The files of a table after some commits of zync."""
    found = {item.path: item for item in files}
    for each in since:
        for path in each.removed:
            found.pop(unquote(path), None)
        for action in each.added:
            item = _added(action)
            found[item.path] = item
    return tuple(found.values())


def _added(action: Mapping[str, Any]) -> DataFile:
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
        added=action["modificationTime"],
    )


def _since_epoch(text: str | None) -> int | None:
    """Milliseconds, of a time in a log entry's statistics."""
    return None if text is None else (datetime.fromisoformat(text) - EPOCH) // timedelta(milliseconds=1)


def list_files(opened: Opened) -> list[DataFile]:
    """Every file of the table as of the opened version, in no particular order."""
    # Not by pa.table, which imports pandas to see whether it is given one of its frames: a quarter of what a command takes.
    actions = pa.RecordBatchReader.from_stream(opened.table.get_add_actions(flatten=True)).read_all()
    count = actions.num_rows

    def column(name: str) -> list[Any]:
        if name not in actions.column_names:
            return [None] * count
        found = actions[name]
        return (_millis(found) if pa.types.is_timestamp(found.type) else found).to_pylist()

    now = time.time()
    return [
        DataFile(unquote(path), size, records or 0, partition, first, last, low, high, group, now, added)
        for path, size, records, partition, first, last, low, high, group, added in zip(
            column("path"),
            column("size_bytes"),
            column("num_records"),
            column("min.kafka.partition"),
            column("min.kafka.offset"),
            column("max.kafka.offset"),
            column("min.kafka.time"),
            column("max.kafka.time"),
            column("partition.topic"),
            column("modification_time"),
            strict=True,
        )
    ]


def _millis(moments: pa.ChunkedArray) -> pa.ChunkedArray:
    """Since the epoch. A thousand of them as Python's times take as long as all else of a thousand files."""
    return pc.floor_temporal(moments, unit="millisecond").cast(pa.timestamp("ms", "UTC")).cast(pa.int64())
