"""All that is to be judged, gathered: topics, raw tables, their quarantine, the staging table, and tables of sinks, as plain
rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from zync_assets_tests.checker.database import Database, read_database
from zync_assets_tests.checker.delta import DataFile, Table, open_table
from zync_assets_tests.checker.logs import Log, read_topic
from zync_assets_tests.checker.statement import Statement

Row = dict[str, Any]

ABSENT = ("lost", "dropped")
"""Stages of side-table entries that stand for ranges of offsets: retention removed them, or the input's shape left them out."""


@dataclass(frozen=True)
class RawFile:
    """One data file of a raw table: its rows as they lie in it, and when it was committed."""

    file: DataFile
    rows: list[Row]

    @property
    def replayed(self) -> bool:
        return self.file.path.name.startswith("replay-")


@dataclass(frozen=True)
class Raw:
    """A raw table. ``first`` and ``next``: partition → the first ingested offset, and the next offset to ingest.

    ``quarantine``: the entries of the side table that count. An entry counts if its offset is below the next offset, and no
    data file named ``replay-…`` holds its record. From the sealed offset on, only the entries of the attempt that the raw
    table names count. ``entered``: partition → the number of entries ever.
    """

    id: str
    first: Mapping[int, int]
    next: Mapping[int, int]
    bad: Mapping[int, int]
    files: list[RawFile]
    quarantine: list[Row]
    entered: Mapping[int, int]
    kept: Mapping[int, int] = field(default_factory=dict)
    """Partition → the first offset that retention left; what replays brought stays below it too."""
    removed: Mapping[int, int] = field(default_factory=dict)
    """Partition → how many records retention removed."""
    reached: Mapping[int, int] = field(default_factory=dict)
    """Partition → the highest time of those."""


@dataclass(frozen=True)
class OutputFile:
    """Output rows of one file, as they lie in it."""

    file: DataFile
    rows: list[Row]


@dataclass(frozen=True)
class Staging:
    """The staging table: ``head`` and ``ledger`` are account rows, ``outputs`` the files of each output topic.

    ``cuts``: output topic → partitions and offsets at which a batch began.
    """

    batch: int | None
    head: list[Row]
    heads: int
    ledger: list[Row]
    outputs: Mapping[str, list[OutputFile]]
    cuts: Mapping[str, set[tuple[int, int]]]
    id: str = ""

    def of(self, kind: str) -> list[Row]:
        return [row for row in self.head if row["kind"] == kind]

    def rebuilt(self, topic: str, partition: int) -> int:
        """The offset that a topic had reached at the last rebuild. The account does not say what made the outputs before, and
        what the records before made."""
        return self._rebuilt.get((topic, partition), 0)

    @cached_property
    def _rebuilt(self) -> Mapping[tuple[str, int], int]:
        return {(row["topic"], row["partition"]): row["end"] for row in self.of("rebuilt")}

    def current(self, topic: str) -> list[Row]:
        """The rows of an output topic since the last rebuild."""
        rows = (row for item in self.outputs.get(topic, []) for row in item.rows)
        return [row for row in rows if row["kafka"]["offset"] >= self.rebuilt(topic, row["kafka"]["partition"])]


@dataclass(frozen=True)
class Evidence:
    """What is there. ``raw`` lacks a topic, and ``staging`` is None, where nothing was written yet."""

    logs: Mapping[str, Mapping[int, Log]]
    raw: Mapping[str, Raw]
    staging: Staging | None
    published: Mapping[str, int] = field(default_factory=dict)
    """Application id → number, of the table that says how far outputs are published."""
    database: Database | None = None


def gather(servers: str, lake: Path, statement: Statement, database: Path | None = None) -> Evidence:
    """Read everything. Nothing may be written meanwhile. ``database``: the file of SQLite that the sinks write."""
    found = gather_lake(lake, statement, gather_logs(servers, statement))
    return found if database is None else replace(found, database=read_database(database))


def gather_logs(servers: str, statement: Statement) -> dict[str, dict[int, Log]]:
    """Topic → partition → log, of all topics of the pipeline."""
    return {item.topic: read_topic(servers, item.topic) for item in (*statement.inputs, *statement.outputs)}


def gather_lake(lake: Path, statement: Statement, logs: Mapping[str, Mapping[int, Log]]) -> Evidence:
    """The evidence of the lake, combined with the given logs of the topics."""
    raw = {item.topic: found for item in statement.inputs if (found := _raw(lake, item.pool, item.topic)) is not None}
    published = open_table(lake / "~published" / statement.staging)
    return Evidence(logs, raw, _staging(lake / statement.staging), published.numbers if published else {})


def _raw(lake: Path, pool: str, topic: str) -> Raw | None:
    table = open_table(lake / pool / topic)
    if table is None:
        return None
    count = table.numbers.get("zync:partitions", 0)

    def of(name: str) -> dict[int, int]:
        ids = {number: f"zync:{name}:{number}" for number in range(count)}
        return {number: table.numbers[text] for number, text in ids.items() if text in table.numbers}

    upcoming = of("next")
    aside = open_table(lake / "~quarantine" / pool / topic)
    began, attempt = of("began"), of("attempt")
    counted: list[Row] = []
    for item in aside.files if aside else ():
        rows = item.rows()
        partition, low = rows[0]["kafka"]["partition"], rows[0]["kafka"]["offset"]
        # Below the sealed offset all entries count; a side table from before that has them sealed up to the last batch.
        sealed = aside.numbers.get(f"zync:sealed:{partition}", began.get(partition)) if aside else None
        last = sealed is not None and sealed <= low < upcoming.get(partition, 0)
        if not last or item.path.name.startswith(f"attempt-{attempt.get(partition, 0):016x}-"):
            counted += [row for row in rows if row["kafka"]["offset"] < upcoming.get(partition, 0)]
    files = [RawFile(item, item.rows()) for item in table.files]
    files.sort(key=lambda item: (item.rows[0]["kafka"]["partition"], item.rows[0]["kafka"]["offset"]))
    replayed = {_place(row) for item in files if item.replayed for row in item.rows}
    waiting = [row for row in counted if _place(row) not in replayed]
    entered = Counter(row["kafka"]["partition"] for row in counted if row["stage"] != "dropped")
    gone = of("kept"), of("removed"), of("reached")
    return Raw(table.id, of("first"), upcoming, of("bad"), files, waiting, entered, *gone)


def _place(row: Row) -> tuple[int, int]:
    return row["kafka"]["partition"], row["kafka"]["offset"]


def _staging(folder: Path) -> Staging | None:
    table = open_table(folder)
    if table is None:
        return None
    heads = [item for item in table.files if item.group == "#account" and item.path.name.startswith("head-")]
    ledger = [item for item in table.files if item.group == "#account" and item not in heads]
    outputs: dict[str, list[OutputFile]] = {}
    for item in table.files:
        # The state of views is private: the checker makes the latest rows of the raw records itself.
        if item.group is not None and not item.group.startswith("#"):
            outputs.setdefault(item.group, []).append(OutputFile(item, item.rows()))
    for files in outputs.values():
        files.sort(key=lambda item: (item.rows[0]["kafka"]["partition"], item.rows[0]["kafka"]["offset"]))
    return Staging(
        table.numbers.get("zync:batch"),
        [row["account"] for item in heads for row in item.rows(["account"])],
        len(heads),
        [row["account"] for item in ledger for row in item.rows(["account"])],
        outputs,
        {topic: _cuts(table, topic) for topic in outputs},
        table.id,
    )


def _cuts(table: Table, topic: str) -> set[tuple[int, int]]:
    """(partition, first output offset) of each batch: the lowest offset of each commit that added higher offsets than before.

    A commit that only rewrites files begins no batch. If the log lacks the oldest commits, any file may begin a batch.
    """
    cuts: set[tuple[int, int]] = set()
    reached: dict[int, int] = {}
    for _, added in sorted(table.commits.items()):
        fresh: dict[int, int] = {}
        for item in (item for item in added if item.group == topic and item.low is not None and item.high is not None):
            partition = item.partition or 0
            if (item.low or 0) > reached.get(partition, -1):
                fresh[partition] = min(fresh.get(partition, item.low or 0), item.low or 0)
        for item in (item for item in added if item.group == topic and item.high is not None):
            reached[item.partition or 0] = max(reached.get(item.partition or 0, -1), item.high or 0)
        cuts |= set(fresh.items())
    if 0 not in table.commits:
        cuts |= {
            (item.partition or 0, item.low) for item in table.files if item.group == topic and item.low is not None
        }
    return cuts
