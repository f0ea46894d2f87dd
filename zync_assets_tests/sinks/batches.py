"""Single batches for a target, as the tests of one target give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from zync_assets.codecs.fields import DEBEZIUM_DATE
from zync_assets.sinks.fold import fold
from zync_assets.sinks.target import Column, Merge, TableSpec, Target
from zync_assets_tests.sinks.conformance import ORIGIN, PLACE, Change, records


def spec(**types: pa.DataType) -> TableSpec:
    columns = tuple(Column(name, kind) for name, kind in types.items())
    return TableSpec("rows", columns, (columns[0].name,), "upsert")


def apply(target: Target, table: TableSpec, batch: Sequence[Change]) -> None:
    """Load and merge one batch. Its offsets follow the position of the target."""
    at = target.progress(PLACE).next.get(0)
    with target.run(PLACE) as name:
        folded = fold(records(table, sorted(batch), at or 0), table.key, [column.name for column in table.others])
        loads = (target.load(table, f"{name}0", iter([folded])),)
        target.merge(Merge(PLACE, table, ORIGIN, {0: at}, {0: (at or 0) + len(batch)}, loads))


def text(key: str, value: str) -> Change:
    """A record of a table with the text columns ``id``, the key, and ``v``."""
    changed: Any = (key, "")
    return changed, {"v": value}


def one(number: int, fields: dict[str, Any] | None) -> Change:
    return (number, ""), fields


def assert_defaults_of_older_rows_alone(target: Target) -> None:
    """A new column has its default in the rows that are there. A row of a later record without the column has a null."""
    table = spec(id=pa.int64(), v=pa.string())
    target.prepare(table, create=True, evolve="add")
    apply(target, table, [one(1, {"v": "a"})])
    table = replace(table, columns=(*table.columns, Column("w", pa.string(), default=pa.scalar("default"))))
    target.prepare(table, create=True, evolve="add")
    apply(target, table, [one(2, {"v": "b"}), one(3, {"v": "c", "w": "own"})])
    rows = [row for batch in target.rows(table) for row in batch.to_pylist()]
    assert sorted(rows, key=lambda row: row["id"]) == [
        {"id": 1, "v": "a", "w": "default"},
        {"id": 2, "v": "b", "w": None},
        {"id": 3, "v": "c", "w": "own"},
    ]


def apply_days(target: Target) -> None:
    """Write Debezium's days into a column ``old`` of numbers, as earlier versions made it, into a column ``small`` of too small
    numbers, and into a new column ``day``."""
    old = spec(id=pa.int64(), old=pa.int32(), small=pa.int16())
    target.prepare(old, create=True, evolve="none")
    # The number is the 13th of October 2001 for MySQL, if it is to become a date.
    apply(target, old, [one(1, {"old": -1, "small": 11013})])
    names = ("old", "small", "day")
    table = replace(old, columns=(old.columns[0], *(Column(name, pa.int32(), note=DEBEZIUM_DATE) for name in names)))
    target.prepare(table, create=True, evolve="widen")
    # A further batch finds nothing to change.
    target.prepare(table, create=False, evolve="none")
    apply(target, table, [one(2, {"old": 19782, "small": 40000, "day": 19782}), one(3, {"day": -1})])
    rows = [row for batch in target.rows(table) for row in batch.to_pylist()]
    assert sorted(rows, key=lambda row: row["id"]) == [
        {"id": 1, "old": -1, "small": 11013, "day": None},
        {"id": 2, "old": 19782, "small": 40000, "day": 19782},
        {"id": 3, "old": None, "small": None, "day": -1},
    ]
