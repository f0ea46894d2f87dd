"""A target's contract: after random batches, schema changes and kills, the table equals a model in plain Python.

A process applies batches as a sink does, from the target's own position on, or empties the table. A test kills the process at a
crash point, and starts another one. A new target passes by a call of ``assert_conforms``.
"""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from zync_assets import crashes
from zync_assets.codecs.fields import DEBEZIUM_DATE, ZONED_TIMESTAMP
from zync_assets.errors import CommitConflict, TableUnfit, TargetRefused
from zync_assets.pipeline import Sink
from zync_assets.sinks.fold import Records, fold
from zync_assets.sinks.plan import REPLAYS
from zync_assets.sinks.target import BadRecord, Column, LoadTable, Merge, Place, TableSpec, Target, open_target

POINTS = ("sink:loaded", "sink:merging", "sink:merged")
RESET_POINTS = ("sink:emptied", "sink:merging", "sink:merged")
PLACE = Place("pipe", "sink", "Staging.rows")
ORIGIN = "table-1"
BATCH = 12
PART = 'Part "Name" of 5%s'
CHANGE_AT = 4
"""The batch before which the source gets another column and a wider one."""

TYPES: dict[str, pa.DataType] = {
    "flag": pa.bool_(),
    "tiny": pa.int8(),
    "number": pa.int32(),
    "large": pa.int64(),
    "single": pa.float32(),
    "double": pa.float64(),
    "price": pa.decimal128(6, 2),
    "exact": pa.decimal128(38, 10),
    "text": pa.string(),
    "bytes": pa.binary(),
    "day": pa.date32(),
    "instant": pa.timestamp("us", "UTC"),
    "local": pa.timestamp("us"),
    "clock": pa.time64("us"),
    "words": pa.list_(pa.string()),
    "nested": pa.struct([("a", pa.int64()), ("b", pa.string())]),
    "days": pa.int32(),
    "zoned": pa.string(),
}
NOTES = {"days": DEBEZIUM_DATE, "zoned": ZONED_TIMESTAMP}
LATER: dict[str, Any] = {
    "new flag": False,
    "new large": 2**63 - 1,
    "new double": 0.1,
    "new price": Decimal("-1.50"),
    "new exact": Decimal("12345678901234567890.0123456789"),
    "new text": '5% of \\ "ü"',
    "other text": "",
    "new day": date(2026, 2, 28),
    "new instant": datetime(2026, 2, 28, 23, 59, 59, 123456, UTC),
    "new clock": time(23, 59, 59, 123456),
    "new days": 20000,
    "new zoned": "2026-02-28T23:59:59.123456Z",
}
"""Columns that come with the schema change, and their defaults. The last word is the name of the type in TYPES."""
ODD = [
    "",
    "null",
    "NULL",
    "\\N",
    "007",
    "1.0",
    "a,b",
    'say "no"',
    "two\nlines",
    "\r",
    "\\.",
    "back\\slash",
    "ümlaut ☃",
    "{1}",
    "'",
]
DECIMALS = [Decimal("0E-10"), Decimal("-1234567890123456789012345678.0123456789"), Decimal("1.1000000000")]


def sink(kind: str, url: str) -> Sink:
    return Sink("sink", kind, url)


def spec(target: Target, *, changed: bool) -> TableSpec:
    """The table, before and after the schema change."""
    types: dict[str, pa.DataType] = {"id": pa.int64(), PART: pa.string(), **TYPES}
    if changed:
        types |= {"added": pa.string()}
    columns = [
        Column(name, kind, as_json=not target.is_native(kind), note=NOTES.get(name, "")) for name, kind in types.items()
    ]
    if changed:
        for name, default in LATER.items():
            of = name.split()[1]
            columns.append(Column(name, TYPES[of], default=pa.scalar(default, TYPES[of]), note=NOTES.get(of, "")))
    return TableSpec('rows of "it" at 5%s', tuple(columns), ("id", PART), "upsert", "a comment")


def value(name: str, chance: random.Random, target: Target) -> Any:
    """A value of a column, of those that databases get wrong and the target holds."""
    if chance.random() < 0.15:
        return None
    number, days = chance.randrange(-(2**31), 2**31), target.days
    infinity = math.inf if target.infinities else 0.5
    made = {
        "flag": lambda: chance.random() < 0.5,
        "tiny": lambda: chance.randrange(-128, 128),
        "number": lambda: number,
        "large": lambda: chance.choice([-(2**63), 2**63 - 1, number]),
        "single": lambda: float(np.float32(chance.choice([0.1, -0.0, infinity, 3.4e38, chance.random()]))),
        "double": lambda: chance.choice([0.1, 1e-300, -infinity, 1.7e308, chance.random()]),
        "price": lambda: Decimal(chance.randrange(-(10**6) + 1, 10**6)).scaleb(-2),
        "exact": lambda: chance.choice([*DECIMALS]),
        "text": lambda: chance.choice(ODD),
        "bytes": lambda: chance.choice([b"", b"\x00\xff", b"\\x41", chance.randbytes(5)]),
        "day": lambda: chance.choice(
            [*days, date.fromordinal(chance.randint(days[0].toordinal(), days[1].toordinal()))]
        ),
        "instant": lambda: datetime.fromtimestamp(number, UTC).replace(microsecond=abs(number) % 10**6),
        "local": lambda: datetime.fromtimestamp(number, UTC).replace(tzinfo=None, microsecond=abs(number) % 10**6),
        "clock": lambda: time(abs(number) % 24, 59, 59, abs(number) % 10**6),
        "words": lambda: [chance.choice([None, *ODD]) for _ in range(chance.randrange(3))],
        "nested": lambda: {"a": number, "b": chance.choice(ODD)},
        "days": lambda: (made["day"]() - date(1970, 1, 1)).days,
        "zoned": lambda: f"{made['local']().isoformat()}Z",
        "added": lambda: chance.choice(ODD),
    }
    return made[name.split()[-1]]()


class Update(dict[str, Any]):
    """The fields of a record that makes no new row."""


Change = tuple[tuple[int, str], dict[str, Any] | None]


def batches(target: Target, seed: int, count: int) -> Iterator[list[Change]]:
    """The same changes for the same seed: whole rows, partial rows, updates and tombstones."""
    chance = random.Random(seed)
    for number in range(count):
        names = [*TYPES, *(["added", *LATER] if number >= CHANGE_AT else [])]
        batch: list[Change] = []
        for _ in range(BATCH):
            key = chance.randrange(8), chance.choice(["a", "", "ö'\""])
            kind = chance.random()
            chosen = names if kind < 0.4 else [name for name in names if chance.random() < 0.3]
            fields = {name: value(name, chance, target) for name in chosen}
            batch.append((key, None if kind > 0.8 else Update(fields) if kind > 0.65 else fields))
        yield batch


def model(target: Target, seed: int, count: int) -> dict[tuple[int, str], dict[str, Any]]:
    """The rows after the batches. A row that is older than a column has the column's default."""
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for key, fields in (change for batch in batches(target, seed, count) for change in batch):
        if fields is None:
            rows.pop(key, None)
        elif key in rows or not isinstance(fields, Update):
            rows.setdefault(key, {**dict.fromkeys([*TYPES, "added"]), **LATER}).update(fields)
    return rows


def records(table: TableSpec, batch: Sequence[Change], offset: int) -> Records:
    """Records as ``sinks.columns`` makes them: sorted by key, nested values as JSON. ``offset``: of the first record."""
    ordered = sorted(enumerate(batch), key=lambda item: (item[1][0], item[0]))
    columns: list[pa.Array] = []
    others = [column.name for column in table.others]
    for column in table.columns:
        values = [
            key[table.key.index(column.name)]
            if column.name in table.key
            else (fields or {}).get(column.name, LATER.get(column.name))
            for _, (key, fields) in ordered
        ]
        if column.as_json:
            values = [None if item is None else json.dumps(item) for item in values]
        columns.append(pa.array(values, pa.string() if column.as_json else column.type))
    is_set = np.array([[name in (fields or {}) for name in others] for _, (_, fields) in ordered], np.bool_)
    is_delete = np.array([fields is None for _, (_, fields) in ordered], np.bool_)
    rows = pa.RecordBatch.from_arrays(columns, names=[column.name for column in table.columns])
    offsets = np.array([offset + at for at, _ in ordered], np.int64)
    is_update = np.array([isinstance(fields, Update) for _, (_, fields) in ordered], np.bool_)
    return Records(rows, is_delete, is_set.reshape(-1, len(others)), pa.array(offsets), is_update)


def load(target: Target, table: TableSpec, run: str, batch: Sequence[Change], offset: int) -> list[LoadTable]:
    """Two load tables, as two tasks make them: no key is in both."""
    loads: list[LoadTable] = []
    for number in (0, 1):
        own = [change for change in batch if change[0][0] % 2 == number]
        if own:
            folded = fold(records(table, own, offset), table.key, [column.name for column in table.others])
            loads.append(target.load(table, f"{run}{number}", iter([folded])))
    return loads


def apply(target: Target, seed: int, count: int) -> None:
    """Apply batches from the target's position on."""
    for number, batch in enumerate(batches(target, seed, count)):
        progress = target.progress(PLACE)
        first = progress.next.get(0)
        if (first or 0) > number * BATCH:
            continue
        assert (first or 0) == number * BATCH
        table = spec(target, changed=number >= CHANGE_AT)
        target.prepare(table, create=True, evolve="widen")
        with target.run(PLACE) as run:
            loads = load(target, table, run, batch, number * BATCH)
            target.merge(Merge(PLACE, table, ORIGIN, {0: first}, {0: (number + 1) * BATCH}, tuple(loads)))


def reset(target: Target) -> None:
    """Empty the table and forget its position."""
    target.merge(Merge(PLACE, spec(target, changed=True), ORIGIN, {}, {}, clear=True))


def rows_of(target: Target) -> dict[tuple[int, str], dict[str, Any]]:
    table = spec(target, changed=True)
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for batch in target.rows(table):
        for row in batch.to_pylist():
            for column in table.columns:
                if column.as_json and row[column.name] is not None:
                    row[column.name] = json.loads(row[column.name])
                if column.note == ZONED_TIMESTAMP and row[column.name] is not None:
                    instant = datetime.fromisoformat(row[column.name]).astimezone(UTC)
                    row[column.name] = f"{instant.replace(tzinfo=None).isoformat()}Z"
            found[row.pop("id"), row.pop(PART)] = row
    return found


def run(kind: str, url: str, *batches: int, point: str | None = None) -> int | None:
    """Apply some batches, of a seed and to a count, in a process of its own; without them empty the table. Returns the exit
    code. ``point``: where the process is killed."""
    context = multiprocessing.get_context("forkserver")
    # The server of the processes imports these modules once. The import takes longer than the work.
    context.set_forkserver_preload([__name__, "zync_assets.sinks.sql"])
    process = context.Process(target=_work, args=(kind, url, batches, point))
    process.start()
    process.join()
    return process.exitcode


def _work(kind: str, url: str, batches: Sequence[int], point: str | None) -> None:
    if point is not None:
        os.environ["ZYNC_CRASH"] = point
        importlib.reload(crashes)
    target = open_target(sink(kind, url))
    if batches:
        apply(target, *batches)
    else:
        reset(target)


def assert_conforms(kind: str, url: str, load_tables: Any, *, count: int = 8, seed: int = 1) -> None:
    """The target equals the model after kills at every crash point, and twice the same batch changes nothing.

    ``load_tables()``: the names of the load tables that are in the target now.
    """
    target = open_target(sink(kind, url))
    assert target.progress(PLACE).next == {}
    for number, point in enumerate(POINTS):
        # Each kill comes in a later batch, the last after the schema change.
        assert run(kind, url, seed, count, point=f"{point}@{2 * number + 1}") == -9
    assert run(kind, url, seed, count) == 0
    assert rows_of(target) == model(target, seed, count)
    assert target.progress(PLACE).next == {0: count * BATCH}
    assert load_tables() == []
    _assert_loser_changes_nothing(target, seed, count)
    _assert_bad_records_are_kept(target)
    _assert_replays_are_counted(target)
    assert rows_of(target) == model(target, seed, count)
    _assert_missing_column_is_null(target)
    _assert_own_table_grows(target)
    _assert_reset_goes_on(kind, url, seed, count)


def _assert_loser_changes_nothing(target: Target, seed: int, count: int) -> None:
    """A batch that was planned before another run's commit, or for another lake, is refused whole."""
    table = spec(target, changed=True)
    change: list[Change] = [((99, "a"), {"text": "loser"})]
    for origin, expected in ((ORIGIN, (count - 1) * BATCH), (ORIGIN, None), ("another", count * BATCH)):
        with target.run(PLACE) as name:
            loads = load(target, table, name, change, 0)
            with pytest.raises(CommitConflict):
                target.merge(Merge(PLACE, table, origin, {0: expected}, {0: 10_000}, tuple(loads)))


def _assert_bad_records_are_kept(target: Target) -> None:
    """A refused record comes with its position in one transaction."""
    table = spec(target, changed=True)
    at = target.progress(PLACE).next[0]
    bad = BadRecord(0, at, "id=1", "no such 'value'")
    target.merge(Merge(PLACE, table, ORIGIN, {0: at}, {0: at + 1}, bad=(bad,)))
    assert target.progress(PLACE).bad == (bad,)
    assert target.progress(PLACE).next == {0: at + 1}


def _assert_replays_are_counted(target: Target) -> None:
    """The count of replays is a position too. It comes with the records of a replay, which have lower offsets."""
    table = spec(target, changed=True)
    before = target.progress(PLACE)
    expected, late = {0: before.next[0], REPLAYS: None}, BadRecord(0, 1, "", "late")
    target.merge(Merge(PLACE, table, ORIGIN, expected, {REPLAYS: 2}, bad=(late,)))
    after = target.progress(PLACE)
    assert (after.next, after.origin) == ({**before.next, REPLAYS: 2}, ORIGIN)
    assert {*after.bad} == {*before.bad, late}
    with pytest.raises(CommitConflict):
        target.merge(Merge(PLACE, table, ORIGIN, expected, {REPLAYS: 3}))
    target.merge(Merge(PLACE, table, ORIGIN, {0: before.next[0]}, {}, cured=((0, 1),)))
    assert target.progress(PLACE) == replace(before, next=after.next)


def _assert_missing_column_is_null(target: Target) -> None:
    """Rows are read with every column of the source. The table lacks a column that no batch has had."""
    table, count = spec(target, changed=True), len(rows_of(target))
    wider = replace(table, columns=(*table.columns, Column("missing", pa.date32())))
    assert [row["missing"] for batch in target.rows(wider) for row in batch.to_pylist()] == [None] * count


def _assert_own_table_grows(target: Target) -> None:
    """By default, a sink adds columns to a table that a sink of its pipeline made."""
    columns = Column("id", pa.int64()), Column("text", pa.string())
    first, later = (TableSpec("own rows", columns[:count], ("id",), "upsert", "pipe: Raw.rows") for count in (1, 2))
    target.prepare(first, create=True, evolve="own")
    with pytest.raises(TableUnfit, match="column text is missing"):
        target.prepare(later, create=True, evolve="none")
    # Another pipeline, with a name that begins as this one's, made no table here.
    for comment in ("pip: Raw.rows", "pipe-2: Raw.rows", ""):
        with pytest.raises(TableUnfit, match="column text is missing"):
            target.prepare(replace(later, comment=comment), create=False, evolve="own")
    target.prepare(replace(later, comment="pipe: Staging.rows"), create=False, evolve="own")
    target.prepare(later, create=False, evolve="none")


def _assert_reset_goes_on(kind: str, url: str, seed: int, count: int) -> None:
    """A killed reset has changed nothing, or has done all its work, or has left a mark. The mark blocks batches until another
    reset."""
    target = open_target(sink(kind, url))
    wanted = model(target, seed, count)
    for point in RESET_POINTS:
        before = target.progress(PLACE)
        assert (before.origin, rows_of(target)) == (ORIGIN, wanted)
        assert run(kind, url, point=point) == -9
        after = target.progress(PLACE)
        if after.origin == ORIGIN:
            assert (after, rows_of(target)) == (before, wanted)
        elif after.origin is None:
            assert (after.next, after.bad, rows_of(target)) == ({}, (), {})
        else:
            with pytest.raises(CommitConflict):
                target.merge(Merge(PLACE, spec(target, changed=True), ORIGIN, before.next, {0: 10_000}))
        assert run(kind, url) == 0
        assert (target.progress(PLACE).next, target.progress(PLACE).bad, rows_of(target)) == ({}, (), {})
        assert run(kind, url, seed, count) == 0
    assert rows_of(target) == wanted


def assert_refuses(target: Target, table: TableSpec, batch: Sequence[Change]) -> str:
    """The target's message on a batch that it refuses; nothing of the batch is in the target."""
    target.prepare(table, create=True, evolve="none")
    with target.run(PLACE) as name, pytest.raises(TargetRefused) as refusal:
        loads = load(target, table, name, batch, 0)
        target.merge(Merge(PLACE, table, ORIGIN, {0: None}, {0: 1}, tuple(loads)))
    return str(refusal.value)
