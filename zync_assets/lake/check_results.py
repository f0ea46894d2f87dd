"""The results of checks, and the blocks and the progress of blocking checks that the lake keeps.

Each pool has a table of blocks. Its log also holds the offsets up to which each check has passed.

A block is a failed check with the offsets that the check looked at: one file of one row, ``block-<uuid>.parquet``. A
block stays until the same check passes over all of these offsets. A writer removes only blocks that existed before its
check began. Progress is kept as Delta ``txn`` actions:

    zync:passed:<check>:<table id>:<topic>:<partition>   below this offset the check has passed, from where it began
    zync:began:<check>:<table id>                        1 once the check has passed over a part of the table
    zync:accepted:<check>:<table id>:<subject>           how much of a count that never sinks was accepted by hand

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
from zync_assets.lake.log import DataFile, LakeTable
from zync_assets.offsets import OffsetRange, normalize, subtract
from zync_assets.pipeline import Pipeline

UNKEPT = 100_000
"""Offsets that may have passed in this process and are not committed yet: the next process looks at them again."""
ATTEMPTS = 10
"""The most attempts at a commit, if another writer of the table commits first each time."""

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

TopicPartition = tuple[str, int]
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
    extent: Mapping[TopicPartition, tuple[int, int]] = field(
        default_factory=dict[TopicPartition, tuple[int, int]], repr=False
    )
    together: bool = False

    def covers(self, other_look: Look) -> bool:
        """Whether this look was of the same check and table, and of all offsets of ``other_look``."""
        if (self.check, self.subject, self.table) != (other_look.check, other_look.subject, other_look.table):
            return False
        return not any(subtract(parts, self.ranges.get(topic, ())) for topic, parts in other_look.ranges.items())

    def reach(self, place: TopicPartition, progress: int) -> int:
        """The offset up to which the partition has passed after this look, if it had passed up to ``progress`` before."""
        topic, partition = place
        for part in normalize(self.ranges.get(topic, ())):
            if part.partition == partition and part.first <= progress < part.end:
                return part.end
        return progress


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
class CheckState:
    """The results of one pool's blocking checks, in one version of the table."""

    lake: str
    pool: str
    table: LakeTable | None = field(repr=False)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Every block of the pool, the oldest first."""
        files = self.table.files if self.table else ()
        blocks = [_read(self.table.uri, item.path) for item in files] if self.table else []
        return tuple(sorted(blocks, key=lambda item: (item.time, item.path)))

    def blocks_of(self, subjects: Iterable[str], table_ids: Iterable[str]) -> list[Block]:
        """The blocks of some assets' tables. A block of a table that was replaced or removed blocks nothing."""
        subjects, table_ids = set(subjects), set(table_ids)
        return [item for item in self.blocks if item.look.subject in subjects and item.look.table in table_ids]

    def has_begun(self, look: Look) -> bool:
        """Whether the lake holds progress of the check for a part of the table."""
        return self.table is not None and self.table.number(_begin_number(look)) is not None

    def progress(self, look: Look, place: TopicPartition) -> int | None:
        """The offset below which a check has passed; None where it never has."""
        name = _progress_number(look, place)
        number = None if self.table is None else self.table.number(name)
        return None if number is None else max(number, _recent.get((storage.check_uri(self.lake, self.pool), name), 0))

    def accepted(self, check: str, table: str, subject: str) -> int:
        """How much of a check's count was accepted by hand, for one subject of the table with an id."""
        return 0 if self.table is None else self.table.number(_accepted_number(check, table, subject)) or 0


def offsets_text(look: Look) -> str:
    """The offsets of a look, for a message."""
    parts = [f"{topic} {part}" for topic, ranges in sorted(look.ranges.items()) for part in ranges if not part.empty]
    more = f" and {len(parts) - 4} more ranges" if len(parts) > 4 else ""
    return (", ".join(parts[:4]) or "no offsets") + more


def open_check_state(lake: str, pool: str) -> CheckState:
    """The results of a pool's blocking checks; empty until a check has kept a result."""
    return CheckState(lake, pool, tables.open_table(storage.check_uri(lake, pool)))


def keep_failure(before: CheckState, look: Look, summary: str) -> CheckState:
    """Write a block for the offsets of a failed check, unless an existing block covers them already."""

    def change(state: CheckState) -> _Change:
        if any(item.look.covers(look) for item in state.blocks):
            return [], [], {}
        smaller = [item.path for item in state.blocks if look.covers(item.look)]
        return [_write(storage.check_uri(state.lake, state.pool), look, summary)], smaller, {}

    return _commit(before, change)


def keep_pass(before: CheckState, look: Look, *, soon: bool = False) -> CheckState:
    """Move the check's progress forward over what passed, and lift the blocks that the look covers.

    ``before``: the record as it was before the check looked; a block that came since stays. ``soon``: progress of less
    than UNKEPT offsets need not be committed, since a publisher that goes on and on can't commit each time.
    """
    old_blocks = {item.path for item in before.blocks if look.covers(item.look)}
    numbers = progress_numbers(before, look)
    if soon and not old_blocks and numbers and before.table is not None and before.has_begun(look):
        old_numbers = {name: before.table.number(name) for name in numbers}
        if (
            None not in old_numbers.values()
            and sum(numbers.values()) - sum(n or 0 for n in old_numbers.values()) < UNKEPT
        ):
            uri = storage.check_uri(before.lake, before.pool)
            _recent.update({(uri, name): number for name, number in numbers.items()})
            return before

    def change(state: CheckState) -> _Change:
        removals = [item.path for item in state.blocks if item.path in old_blocks]
        return [], removals, progress_numbers(state, look)

    return _commit(before, change)


def keep_accepted(before: CheckState, check: str, table: str, counts: Mapping[str, int]) -> CheckState:
    """Accept the counts of a check for the subjects of the table with an id."""

    def change(state: CheckState) -> _Change:
        news = {subject: count for subject, count in counts.items() if count > state.accepted(check, table, subject)}
        return [], [], {_accepted_number(check, table, subject): count for subject, count in news.items()}

    return _commit(before, change)


def progress_numbers(state: CheckState, look: Look) -> dict[str, int]:
    """The numbers that a passed look moves forward, past what is committed."""
    numbers: dict[str, int] = {} if state.has_begun(look) else {_begin_number(look): 1}
    for place, (begin, end) in look.extent.items():
        old_progress, name = state.progress(look, place), _progress_number(look, place)
        new_progress = look.reach(place, begin if old_progress is None else old_progress)
        if look.together and new_progress < end:
            return {}
        if old_progress is None or state.table is None or new_progress > (state.table.number(name) or 0):
            numbers[name] = new_progress
    return numbers


def _begin_number(look: Look) -> str:
    return f"zync:began:{look.check}:{look.table}"


def _accepted_number(check: str, table: str, subject: str) -> str:
    return f"zync:accepted:{check}:{table}:{subject}"


def _progress_number(look: Look, place: TopicPartition) -> str:
    return f"zync:passed:{look.check}:{look.table}:{place[0]}:{place[1]}"


def _commit(before: CheckState, change: Callable[[CheckState], _Change]) -> CheckState:
    state = before
    for _ in range(ATTEMPTS):
        additions, removals, numbers = change(state)
        if not additions and not removals and not numbers:
            return state
        with suppress(CommitConflict):
            uri = storage.check_uri(state.lake, state.pool)
            if state.table is None:
                tables.create_table(uri, _SCHEMA, f"What the checks of {state.pool} said", additions, numbers)
            else:
                files = [item for item in state.table.files if item.path in removals]
                tables.commit(state.table, additions, numbers, removals=files)
            state = open_check_state(state.lake, state.pool)
            compaction.tidy(state.table)
            return state
        state = open_check_state(state.lake, state.pool)
    raise CommitConflict(f"pool {state.pool}: other checks kept their results {ATTEMPTS} times in a row; run again")


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
    with storage.access_errors(place, "can't be written"):
        pq.write_table(rows, full, filesystem=system)
    return DataFile(path, storage.file_size(place), 1)


@lru_cache(1024)
def _read(uri: str, path: str) -> Block:
    [row] = storage.read_file(storage.join(uri, path)).to_pylist()
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
    pass_text: str,
    numbers: Mapping[str, Number],
    look: Look | None = None,
) -> CheckResult:
    """Passed where there are no problems; else the summary is the first of them, and how many more there are."""
    if not problems:
        return CheckResult(name, subject, True, severity, pass_text, dict(numbers), look)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return CheckResult(name, subject, False, severity, problems[0] + more, {**numbers, "problems": len(problems)}, look)


def count_text(count: int, noun: str) -> str:
    """A number of things.

    >>> count_text(1, "file"), count_text(2, "file")
    ('1 file', '2 files')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


_log = logging.getLogger(__name__)


def keep_result(
    pipeline: Pipeline, before: CheckState, result: CheckResult, *, soon: bool
) -> tuple[CheckResult, CheckState]:
    """Keep the result of a blocking check; returns the result, and the pool's results after that.

    ``before``: the pool's results from before the check. A check that passes is a failure all the same while a block stands
    that the check does not cover. If the lake can't be written, the result is not kept, and a warning says so. ``soon``: a
    pass need not be committed at once.
    """
    if result.look is None:
        return result, before
    state = before
    try:
        state = (
            keep_pass(before, result.look, soon=soon)
            if result.passed
            else keep_failure(before, result.look, result.summary)
        )
    except LakeError as error:
        _log.warning("the result of check %s of %s is not kept: %s", result.name, result.subject, error)
    return (_with_blocks(pipeline, result, state) if result.passed else result), state


def _with_blocks(pipeline: Pipeline, result: CheckResult, state: CheckState) -> CheckResult:
    assert result.look is not None
    blocks = [
        item for item in state.blocks_of([result.look.subject], [result.look.table]) if item.look.check == result.name
    ]
    if not blocks:
        return result
    summary = f"this look passed, and an earlier one failed that it does not cover: {blocks[0]} {remedy(pipeline)}"
    return replace(result, passed=False, summary=summary, numbers={**result.numbers, "blocks": len(blocks)})


def remedy(pipeline: Pipeline) -> str:
    """The way out of a block."""
    return f"Repair the lake; then this lifts the block: {pipeline.command('check')}"
