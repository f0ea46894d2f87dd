"""A table at one version: its files, and the numbers that commits set.

Delta protocol: "Add File and Remove File", "Per-file Statistics", "Transaction Identifiers".
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable

from zync_assets.compute import pc
from zync_assets.lake import log_entries

TOKEN = "zync.commit"
"""The key of a commit's own mark in its log entry. A writer finds its commit by the mark. The mark is no state."""
_CARRIED = 100
"""Versions from one opened table to the next over which numbers are carried; as many lie between two checkpoints."""


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


@dataclass(frozen=True, eq=False)
class Opened:
    """A table at one version. A commit on this object conflicts with every commit since that version.

    Several callers may share the object: nothing changes the version of ``table``.
    """

    uri: str
    table: DeltaTable

    @property
    def version(self) -> int:
        return self.table.version()

    @property
    def schema(self) -> pa.Schema:
        return pa.schema(self.table.schema().to_arrow())

    @cached_property
    def files(self) -> tuple[DataFile, ...]:
        """Every file of this version, in no particular order; the log is asked once."""
        return tuple(list_files(self))

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """Application id → the last version that was committed with it. The log is replayed once for all of them."""
        return log_entries.numbers(self.uri, self.version)

    def number(self, name: str) -> int | None:
        """The last version that was committed with an application id, or None."""
        return self.numbers.get(name)

    def carry(self, before: Opened) -> None:
        """Take over the numbers of an older version of the same table, with the numbers that commits set since."""
        known = before.__dict__.get("numbers")
        if known is not None and 0 <= self.version - before.version <= _CARRIED:
            with suppress(FileNotFoundError):
                since = log_entries.numbers_set(self.uri, before.version + 1, self.version)
                self.__dict__["numbers"] = {**known, **since}


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
