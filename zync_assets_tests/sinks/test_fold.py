"""The fold of a batch equals its records applied one by one."""

from __future__ import annotations

from datetime import date
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from zync_assets.sinks.fold import (
    DELETE,
    OFFSET,
    OP,
    REPLACE,
    SET,
    UPDATE,
    UPSERT,
    PartialRecords,
    Records,
    fold_all,
    timed_versions,
)
from zync_assets_tests.sinks.conformance import Update

COLUMNS = ("a", "b", "c")
TYPES = pa.schema([("k", pa.int64()), ("a", pa.int64()), ("b", pa.string()), ("c", pa.float64())])

Change = tuple[int, dict[str, Any] | None]
"""A key, and the fields of a record; None: a tombstone."""

FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "a": st.none() | st.integers(0, 9),
        "b": st.none() | st.sampled_from("xyz"),
        "c": st.none() | st.just(0.5),
    },
)
UPDATES = FIELDS.map(lambda fields: Update({name: value for name, value in fields.items() if name != "c"}))
"""Updates of columns without a default. A change holds one value of a column: an update's, or the default of a new row."""
CHANGES = st.lists(st.tuples(st.integers(0, 4), st.none() | FIELDS | UPDATES), max_size=30)


LIMITS = ((date.min, date.max), None)
DEFAULT = 7.5
"""The default of column c. A record that lacks c is from before the column."""


def applied(rows: dict[int, dict[str, Any]], changes: list[Change]) -> dict[int, dict[str, Any]]:
    """The rows after all changes. The model applies the changes in their order."""
    rows = {key: dict(row) for key, row in rows.items()}
    for key, fields in changes:
        if fields is None:
            rows.pop(key, None)
        elif key in rows or not isinstance(fields, Update):
            rows.setdefault(key, {**dict.fromkeys(COLUMNS), "c": DEFAULT}).update(fields)
    return rows


def merged(rows: dict[int, dict[str, Any]], folded: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What a target does with folded changes."""
    rows = {key: dict(row) for key, row in rows.items()}
    for change in folded:
        if change[OP] in (DELETE, REPLACE):
            rows.pop(change["k"], None)
        if change[OP] in (UPSERT, REPLACE) or (change[OP] == UPDATE and change["k"] in rows):
            is_set = change[SET] or "1" * len(COLUMNS)
            marks = "12" if change["k"] in rows else "13"
            own = {name: change[name] for name, mark in zip(COLUMNS, is_set, strict=True) if mark in marks}
            rows.setdefault(change["k"], dict.fromkeys(COLUMNS)).update(own)
    return rows


def records(changes: list[Change], first: int) -> Records:
    rows = [{"k": key, "c": DEFAULT, **(fields or {})} for key, fields in changes]
    return Records(
        pa.RecordBatch.from_pylist(rows, schema=TYPES),
        np.array([fields is None for _, fields in changes], np.bool_),
        np.array([[name in (fields or {}) for name in COLUMNS] for _, fields in changes], np.bool_).reshape(-1, 3),
        pa.array(range(first, first + len(changes)), pa.int64()),
        np.array([isinstance(fields, Update) for _, fields in changes], np.bool_),
    )


@given(before=CHANGES, changes=CHANGES, cuts=st.lists(st.integers(0, 30), max_size=4))
def test_a_fold_is_what_its_records_do_one_by_one(before: list[Change], changes: list[Change], cuts: list[int]) -> None:
    start = applied({}, before)
    ordered = sorted(changes, key=lambda change: change[0])
    edges = [0, *sorted(min(cut, len(ordered)) for cut in cuts), len(ordered)]
    parts = [records(ordered[first:end], first) for first, end in pairwise(edges)]
    folded = [row for batch in fold_all(parts, ["k"], COLUMNS) for row in batch.to_pylist()]
    assert [row["k"] for row in folded] == sorted({key for key, _ in changes})
    assert merged(start, folded) == applied(start, changes)
    last = {key: at for at, (key, _) in enumerate(ordered)}
    assert {row["k"]: row[OFFSET] for row in folded} == last
    assert {row[OP] for row in folded} <= {UPSERT, UPDATE, REPLACE, DELETE}


def test_a_field_of_a_staged_topic_has_a_default_if_it_came_with_its_source() -> None:
    """Another rule's record lacks more than the field. Its schema alone says nothing of a change of the source."""
    kind = pa.struct([("id", pa.int64()), ("name", pa.string()), ("status", pa.string()), ("region", pa.string())])
    whole = frozenset({"id", "name", "region", "plain"})
    prints: dict[str, frozenset[str] | None] = {"late": whole, "status": frozenset({"id", "status"}), "key": None}

    def default(schemas: dict[str, frozenset[str] | None], *, fills: bool = True) -> tuple[str, list[Any]] | None:
        partial = PartialRecords(
            "value", kind, schemas, False, None, LIMITS if fills else None, {"region": "eu", "plain": None}
        )
        found = partial.default(kind.field("region"))
        return None if found is None else (found[0], found[1].to_pylist())

    # The field came in the first batch: records from before it are of the late schema.
    left_out = "coalesce(array_contains(left_out, 'value.region'), false)"
    assert default(prints) == (left_out, ["eu"])
    early = {**prints, "early": frozenset({"id", "name"})}
    assert default(early) == (f"schema IN ('early', 'status') OR {left_out}", ["eu"])
    assert default(early, fills=False) is None
    assert PartialRecords("value", kind, early, False, None, LIMITS, {}).default(kind.field("region")) is None


PLACES = st.tuples(st.none() | st.integers(0, 10**13), st.integers(0, 2**20 - 1), st.integers(0, 2**62))


@given(st.lists(PLACES, min_size=1))
def test_timed_versions_have_the_order_of_time_partition_and_offset(places: list[tuple[int | None, int, int]]) -> None:
    millis, partitions, offsets = (list(column) for column in zip(*places, strict=True))
    times = pa.array(millis, pa.int64()).cast(pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC"))
    made = timed_versions(times, pa.array(partitions, pa.int32()), pa.array(offsets, pa.int64()))
    versions = [int.from_bytes(version.as_py(), "little") for version in made]
    assert versions == [(time or 0) << 84 | partition << 64 | offset for time, partition, offset in places]
