"""The results of checks, and the blocks and the progress of blocking checks that the lake keeps.

Each pool has a table of blocks. Its log also holds the offsets up to which each check has passed.

A block is a failed check with the offsets that the check looked at: one file of one row, ``block-<uuid>.parquet``. A
block stays until the same check passes over all of these offsets. A writer removes only blocks that existed before its
check began. Progress is kept as Delta ``txn`` actions:

    zync:passed:<check>:<table id>:<topic>:<partition>   below this offset the check has passed, from where it began
    zync:began:<check>:<table id>                        1 once the check has passed over a part of the table

``<table id>`` is the id of the checked table. Another table at the same place has other records at the same offsets.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.errors import CommitConflict, LakeError
from zync_assets.lake import compaction, storage, tables
from zync_assets.lake.log import DataFile, Opened
from zync_assets.offsets import OffsetRange, normalize, subtract
from zync_assets.pipeline import Pipeline

UNKEPT = 100_000
"""Offsets that may have passed in this process and are not committed yet: the next process looks at them again."""
ATTEMPTS = 10
"""How often in a row another writer of the table may be first."""

_recent: dict[tuple[str, str], int] = {}
"""Place of the table, name of a number → how far a check has passed in this process, past what is committed."""

_RANGE = pa.struct([("topic", pa.string()), ("partition", pa.int32()), ("first", pa.int64()), ("end", pa.int64())])
_SCHEMA = pa.schema(
    [
        ("check", pa.string()),
        ("subject", pa.string()),
        ("table", pa.string()),
        ("summary", pa.string()),
        ("time", pa.timestamp("ms", "UTC")),
        ("ranges", pa.list_(_RANGE)),
    ]
)

Place = tuple[str, int]
"""Topic and partition."""

_Change = tuple[list[DataFile], list[str], Mapping[str, int]]
"""Files to add, paths of files to remove, numbers to set."""


@dataclass(frozen=True)
class Look:
    """The table and the offsets that one run of a blocking check read.

    ``subject``: the asset's path (``Raw/Invoices``, ``Staging``); ``table``: the table's id; ``ranges``: topic → offsets.
    ``extent``: each existing partition → the offset where its first check begins, and the partition's end.
    ``together``: the progress of the partitions moves for all of them at once, or for none.
    """

    check: str
    subject: str
    table: str
    ranges: Mapping[str, tuple[OffsetRange, ...]]
    extent: Mapping[Place, tuple[int, int]] = field(default_factory=dict[Place, tuple[int, int]], repr=False)
    together: bool = False

    def covers(self, other: Look) -> bool:
        """Whether this look was of the same check and table, and of all offsets of the other one."""
        if (self.check, self.subject, self.table) != (other.check, other.subject, other.table):
            return False
        return not any(subtract(parts, self.ranges.get(topic, ())) for topic, parts in other.ranges.items())

    def reach(self, place: Place, passed: int) -> int:
        """The offset up to which the partition has passed after this look, if it had passed up to ``passed`` before."""
        topic, partition = place
        for part in normalize(self.ranges.get(topic, ())):
            if part.partition == partition and part.first <= passed < part.end:
                return part.end
        return passed


@dataclass(frozen=True)
class Block:
    """A failed check that no pass has lifted yet. ``time``: seconds since the epoch; ``path``: its file in the table."""

    look: Look
    summary: str
    time: float
    path: str

    def __str__(self) -> str:
        return f"check {self.look.check} of {self.look.subject} failed over {offsets_text(self.look)}: {self.summary}"


@dataclass(frozen=True)
class Checked:
    """The results of one pool's blocking checks, in one version of the table."""

    lake: str
    pool: str
    opened: Opened | None = field(repr=False)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Every block of the pool, the oldest first."""
        files = self.opened.files if self.opened else ()
        found = [_read(self.opened.uri, item.path) for item in files] if self.opened else []
        return tuple(sorted(found, key=lambda item: (item.time, item.path)))

    def blocks_of(self, subjects: Iterable[str], tables_there: Iterable[str]) -> list[Block]:
        """The blocks of some assets' tables. A block of a table that was replaced or removed blocks nothing."""
        wanted, there = set(subjects), set(tables_there)
        return [item for item in self.blocks if item.look.subject in wanted and item.look.table in there]

    def began(self, look: Look) -> bool:
        """Whether the check has passed over a part of the table since the lake keeps what checks say."""
        return self.opened is not None and self.opened.number(_began(look)) is not None

    def passed(self, look: Look, place: Place) -> int | None:
        """The offset below which a check has passed; None where it never has."""
        name = _number(look, place)
        kept = None if self.opened is None else self.opened.number(name)
        return None if kept is None else max(kept, _recent.get((storage.checked_uri(self.lake, self.pool), name), 0))


def offsets_text(look: Look) -> str:
    """The offsets of a look, for a message."""
    parts = [f"{topic} {part}" for topic, found in sorted(look.ranges.items()) for part in found if not part.empty]
    more = f" and {len(parts) - 4} more ranges" if len(parts) > 4 else ""
    return (", ".join(parts[:4]) or "no offsets") + more


def open_checked(lake: str, pool: str) -> Checked:
    """The results of a pool's blocking checks; empty until a check has kept a result."""
    return Checked(lake, pool, tables.open_table(storage.checked_uri(lake, pool)))


def keep_failure(before: Checked, look: Look, summary: str) -> Checked:
    """Write a block for the offsets of a failed check, unless an existing block covers them already."""

    def change(now: Checked) -> _Change:
        if any(item.look.covers(look) for item in now.blocks):
            return [], [], {}
        smaller = [item.path for item in now.blocks if look.covers(item.look)]
        return [_write(storage.checked_uri(now.lake, now.pool), look, summary)], smaller, {}

    return _commit(before, change)


def keep_pass(before: Checked, look: Look, *, soon: bool = False) -> Checked:
    """Move the check's progress forward over what passed, and lift the blocks that the look covers.

    ``before``: the record as it was before the check looked; a block that came since stays. ``soon``: progress of less
    than UNKEPT offsets need not be committed, since a publisher that goes on and on can't commit each time.
    """
    known = {item.path for item in before.blocks if look.covers(item.look)}
    numbers = progress(before, look)
    if soon and not known and numbers and before.opened is not None and before.began(look):
        kept = {name: before.opened.number(name) for name in numbers}
        if None not in kept.values() and sum(numbers.values()) - sum(n or 0 for n in kept.values()) < UNKEPT:
            uri = storage.checked_uri(before.lake, before.pool)
            _recent.update({(uri, name): number for name, number in numbers.items()})
            return before

    def change(now: Checked) -> _Change:
        lifted = [item.path for item in now.blocks if item.path in known]
        return [], lifted, progress(now, look)

    return _commit(before, change)


def progress(now: Checked, look: Look) -> dict[str, int]:
    """The numbers that a passed look moves forward, past what is committed."""
    found: dict[str, int] = {} if now.began(look) else {_began(look): 1}
    for place, (begin, end) in look.extent.items():
        old, name = now.passed(look, place), _number(look, place)
        at = look.reach(place, begin if old is None else old)
        if look.together and at < end:
            return {}
        if old is None or now.opened is None or at > (now.opened.number(name) or 0):
            found[name] = at
    return found


def _began(look: Look) -> str:
    return f"zync:began:{look.check}:{look.table}"


def _number(look: Look, place: Place) -> str:
    return f"zync:passed:{look.check}:{look.table}:{place[0]}:{place[1]}"


def _commit(before: Checked, change: Callable[[Checked], _Change]) -> Checked:
    now = before
    for _ in range(ATTEMPTS):
        added, removed, numbers = change(now)
        if not added and not removed and not numbers:
            return now
        with suppress(CommitConflict):
            uri = storage.checked_uri(now.lake, now.pool)
            if now.opened is None:
                tables.create_table(uri, _SCHEMA, f"What the checks of {now.pool} said", added, numbers)
            else:
                files = [item for item in now.opened.files if item.path in removed]
                tables.commit(now.opened, added, numbers, removed=files)
            now = open_checked(now.lake, now.pool)
            compaction.tidy(now.opened)
            return now
        now = open_checked(now.lake, now.pool)
    raise CommitConflict(f"pool {now.pool}: other checks kept their results {ATTEMPTS} times in a row; run again")


def _write(uri: str, look: Look, summary: str) -> DataFile:
    path = f"block-{uuid.uuid4().hex}.parquet"
    ranges = [
        {"topic": topic, "partition": part.partition, "first": part.first, "end": part.end}
        for topic, parts in sorted(look.ranges.items())
        for part in normalize(parts)
    ]
    row = {"check": look.check, "subject": look.subject, "table": look.table, "summary": summary}
    rows = pa.Table.from_pylist([{**row, "time": int(time.time() * 1000), "ranges": ranges}], _SCHEMA)
    storage.make_folder(uri)
    place = storage.join(uri, path)
    system, full = storage.filesystem(place)
    with storage.accessed(place, "can't be written"):
        pq.write_table(rows, full, filesystem=system)
    return DataFile(path, storage.file_size(place), 1)


@lru_cache(1024)
def _read(uri: str, path: str) -> Block:
    place = storage.join(uri, path)
    system, full = storage.filesystem(place)
    with storage.accessed(place, "can't be read"):
        [row] = pq.ParquetFile(full, filesystem=system).read().to_pylist()
    ranges: dict[str, list[OffsetRange]] = {}
    for part in row["ranges"]:
        ranges.setdefault(part["topic"], []).append(OffsetRange(part["partition"], part["first"], part["end"]))
    look = Look(row["check"], row["subject"], row["table"], {topic: tuple(parts) for topic, parts in ranges.items()})
    return Block(look, row["summary"], row["time"].timestamp(), path)


Severity: TypeAlias = Literal["error", "warn"]
Number: TypeAlias = "int | float | str"


@dataclass(frozen=True)
class CheckResult:
    """One check of one asset.

    ``subject``: the asset's path (``Raw/Invoices``). ``numbers``: what was looked at and what was found.
    ``look``: what a blocking check looked at; None where there was nothing to look at, or nobody waits for the check.
    """

    name: str
    subject: str
    passed: bool
    severity: Severity
    summary: str
    numbers: Mapping[str, Number]
    look: Look | None = field(default=None, repr=False)


def conclude(
    name: str,
    subject: str,
    severity: Severity,
    problems: Sequence[str],
    good: str,
    numbers: Mapping[str, Number],
    look: Look | None = None,
) -> CheckResult:
    """Passed where there are no problems; else the summary is the first of them, and how many more there are."""
    if not problems:
        return CheckResult(name, subject, True, severity, good, dict(numbers), look)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return CheckResult(name, subject, False, severity, problems[0] + more, {**numbers, "problems": len(problems)}, look)


_log = logging.getLogger(__name__)


def with_record(
    pipeline: Pipeline, before: Checked, found: CheckResult, *, soon: bool = False
) -> tuple[CheckResult, Checked]:
    """Keep the result of a blocking check; returns the result, and the pool's results after that.

    ``before``: the pool's results from before the check. A check that passes is a failure all the same while a block stands
    that the check does not cover. If the lake can't be written, the result is not kept, and a warning says so. ``soon``: a
    pass need not be committed at once.
    """
    if found.look is None:
        return found, before
    now = before
    try:
        now = (
            keep_pass(before, found.look, soon=soon)
            if found.passed
            else keep_failure(before, found.look, found.summary)
        )
    except LakeError as error:
        _log.warning("the result of check %s of %s is not kept: %s", found.name, found.subject, error)
    return (_with_blocks(pipeline, found, now) if found.passed else found), now


def _with_blocks(pipeline: Pipeline, found: CheckResult, now: Checked) -> CheckResult:
    assert found.look is not None
    standing = [
        item for item in now.blocks_of([found.look.subject], [found.look.table]) if item.look.check == found.name
    ]
    if not standing:
        return found
    summary = f"this look passed, and an earlier one failed that it does not cover: {standing[0]} {remedy(pipeline)}"
    return replace(found, passed=False, summary=summary, numbers={**found.numbers, "blocks": len(standing)})


def remedy(pipeline: Pipeline) -> str:
    """The way out of a block."""
    return f"Repair the lake; then this lifts the block: {pipeline.command('check')}"
