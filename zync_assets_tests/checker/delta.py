"""A Delta table as its log says, read by hand: the JSON commits after the newest checkpoint, and that checkpoint.

Delta protocol: "Delta Log Entries", "Checkpoints", "Action Reconciliation".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq

_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\.parquet")


@dataclass(frozen=True)
class DataFile:
    """A file that a table's version lists. ``group``: the value of the partition column ``topic``, if there is one.

    ``low``, ``high`` and ``partition``: what the log claims for it; ``modified``: milliseconds since the epoch.
    """

    path: Path
    group: str | None
    records: int | None
    low: int | None
    high: int | None
    modified: int
    partition: int | None = None

    def rows(self, columns: list[str] | None = None) -> list[dict[str, Any]]:
        source = pq.ParquetFile(self.path)
        present = None if columns is None else [name for name in columns if name in source.schema_arrow.names]
        return source.read(columns=present).to_pylist(maps_as_pydicts="lossy")


@dataclass(frozen=True)
class Table:
    """The newest version of a table. ``numbers``: application id → version of its last ``txn`` action."""

    version: int
    id: str
    numbers: Mapping[str, int]
    files: tuple[DataFile, ...]
    commits: Mapping[int, tuple[DataFile, ...]]
    """Version → the added files, for the commits whose JSON still exists."""


def open_table(folder: Path) -> Table | None:
    """The table in a folder; None if there is none. ValueError for a log with a hole or of a kind not known here."""
    log = folder / "_delta_log"
    if not log.is_dir():
        return None
    commits = {int(m[1]): path for path in log.iterdir() if (m := _COMMIT.fullmatch(path.name))}
    checkpoints = {int(m[1]): path for path in log.iterdir() if (m := _CHECKPOINT.fullmatch(path.name))}
    if not commits and not checkpoints:
        return None
    start = max(checkpoints, default=-1)
    version = max([start, *commits])
    state = _State(folder)
    if start >= 0:
        for action in pq.read_table(checkpoints[start]).to_pylist(maps_as_pydicts="lossy"):
            state.apply(action)
    for number in range(start + 1, version + 1):
        if number not in commits:
            raise ValueError(f"{folder}: version {number} of the log is missing")
        for action in _actions(commits[number]):
            state.apply(action)
    added = {
        number: tuple(_file(folder, action["add"]) for action in _actions(path) if action.get("add"))
        for number, path in sorted(commits.items())
    }
    files = tuple(_file(folder, add) for add in state.files.values())
    return Table(version, state.id, state.numbers, files, added)


class _State:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.id = ""
        self.numbers: dict[str, int] = {}
        self.files: dict[str, dict[str, Any]] = {}

    def apply(self, action: Mapping[str, Any]) -> None:
        if add := action.get("add"):
            if add.get("deletionVector"):
                raise ValueError(f"{self.folder}: deletion vectors are not known here")
            self.files[add["path"]] = add
        elif remove := action.get("remove"):
            self.files.pop(remove["path"], None)
        elif txn := action.get("txn"):
            self.numbers[txn["appId"]] = txn["version"]
        elif meta := action.get("metaData"):
            self.id = meta["id"]


def _actions(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        if line.strip():
            yield json.loads(line)


def _file(folder: Path, add: Mapping[str, Any]) -> DataFile:
    stats = json.loads(add["stats"]) if add.get("stats") else {}
    low, high = (stats.get(side, {}).get("kafka", {}).get("offset") for side in ("minValues", "maxValues"))
    return DataFile(
        folder / unquote(add["path"]),
        dict(add.get("partitionValues") or {}).get("topic"),
        stats.get("numRecords"),
        low,
        high,
        add.get("modificationTime") or 0,
        stats.get("minValues", {}).get("kafka", {}).get("partition"),
    )
