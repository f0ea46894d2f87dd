"""The rows in which records may have to wait."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from zync_assets.etl.account import Labels, Sources
from zync_assets.etl.hold import HeldRecord, decide
from zync_assets.etl.ledger import NO_ENTRIES
from zync_assets.etl.source_rows import (
    HeldRules,
    RowTimes,
    failing_record,
    held_records,
    joined,
    plainly_waiting,
    records_about,
    records_in_question,
)


def times(pending: Sequence[tuple[int, int]], single: Sequence[tuple[int, int]]) -> RowTimes:
    def column(values: Iterable[int]) -> np.ndarray[Any, Any]:
        return np.array(list(values), np.int64)

    return RowTimes(
        column(row for row, _ in pending),
        column(until for _, until in pending),
        column(row for row, _ in single),
        column(at for _, at in single),
        column([]),
    )


def test_only_rows_with_a_change_before_their_completion_are_in_question() -> None:
    found = joined([times([(1, 5), (2, 9), (2, 3)], [(1, 6)]), times([], [(2, 4), (3, 1)])])
    assert found.in_question().tolist() == [2]
    assert joined([]).in_question().tolist() == []


PLACES = st.tuples(st.integers(-4, 4).map(lambda row: row << 3), st.integers(0, 9))
"""A source row, whose lowest bits are those of other rows, and a number."""


@given(st.lists(PLACES, max_size=8), st.lists(PLACES, max_size=8))
def test_rows_in_question_do_not_depend_on_rows_of_the_same_slot(
    pending: list[tuple[int, int]], single: list[tuple[int, int]]
) -> None:
    found = times(pending, single).in_question().tolist()
    assert found == sorted({row for row, at in single if any(row == other and at < end for other, end in pending)})


ORDER = pa.struct([("high", pa.int64()), ("place", pa.int32())])
SOURCE = pa.struct([("place", pa.int32()), ("partition", pa.int32()), ("offset", pa.int64())])
LABELS = Labels(["L", "R"], ["create", "update", "delete"], ["out", "out", "out"])
RULES = HeldRules(frozenset({0}), frozenset({1, 2}))


def results(*rows: tuple[str, int | None, list[tuple[int, int, int | None]], bool]) -> pa.RecordBatch:
    """Result rows: kind, rule, sources (input, offset, source row), and whether the record ends its row. The offset is the
    record's place in the source's order. Join keys are 7."""
    columns = {
        "kind": pa.array([kind for kind, *_ in rows]),
        "rule": pa.array([rule for _, rule, *_ in rows], pa.int32()),
        "source": pa.array(
            [
                [{"place": at, "partition": 0, "offset": offset} for at, offset, _ in sources]
                for _, _, sources, _ in rows
            ],
            pa.list_(SOURCE),
        ),
        "last": pa.array([int(np.argmax([offset for _, offset, _ in each])) for _, _, each, _ in rows], pa.int32()),
        "waited": pa.array([0] * len(rows), pa.int32()),
        "hash": pa.array([7 if rule == 0 else None for _, rule, *_ in rows], pa.int64()),
        "exact": pa.array([7 if rule == 0 else None for _, rule, *_ in rows], pa.int64()),
        "joined": pa.array([7 if rule == 0 else None for _, rule, *_ in rows], pa.int64()),
        "row": pa.array([sources[0][2] for _, _, sources, _ in rows], pa.int64()),
        "other_row": pa.array([sources[1][2] if len(sources) > 1 else None for _, _, sources, _ in rows], pa.int64()),
        "changes": pa.array([0 if rule == 0 else 1 for _, rule, *_ in rows], pa.int32()),
        "ords": pa.array(
            [[{"high": offset, "place": at} for at, offset, _ in sources] for _, _, sources, _ in rows], pa.list_(ORDER)
        ),
        "deletes": pa.array([ends for *_, ends in rows]),
        "ends": pa.array([ends for *_, ends in rows]),
        "bucket": pa.array([0] * len(rows), pa.int32()),
    }
    return pa.RecordBatch.from_pydict(columns)


def test_the_records_of_results_lead_to_the_decision() -> None:
    batch = results(
        ("out", 1, [(0, 2, 100)], False),  # an update between creation and counterpart
        ("out", 1, [(0, 3, 900)], False),  # of another row
        ("out", 0, [(0, 1, 100), (1, 4, 200)], False),
        ("out", 1, [(1, 5, 200)], False),
        ("pending", 0, [(0, 6, 300)], False),
        ("out", 2, [(0, 7, 300)], True),  # ends the row
        ("out", 1, [(0, 8, None)], False),  # a record without a key
        ("pending", 0, [(1, 9, 400)], False),
        ("unmatched", None, [(1, 10, 400)], True),  # a delete that no rule takes
        ("unmatched", None, [(1, 11, 500)], True),  # of another row
    )
    times, found = RULES.report(Sources(batch), batch, 0)
    assert times.in_question().tolist() == [100, 300, 400]
    assert found is not None
    packed = [None, pickle.dumps(found)]
    records, rows, freed = records_in_question(partial(records_about, packed), times.in_question())
    assert (rows.tolist(), freed.tolist()) == ([100, 200, 300, 400], [7])
    decision = decide(held_records(records, RULES, LABELS, {}))
    assert decision.following == {("L", 0, 2): ((4, 1), 1)}
    assert decision.ended == {("L", 0, 6), ("L", 0, 7), ("R", 0, 9)}
    assert not decision.waiting


def test_rows_that_only_wait_need_no_object_for_each_record() -> None:
    batch = results(
        ("out", 1, [(0, 1, 100)], False),  # before the pending creation
        ("pending", 0, [(0, 2, 100)], False),
        ("out", 1, [(0, 3, 100)], False),
        ("out", 1, [(0, 4, 100)], False),
        ("pending", 0, [(0, 5, 200)], False),
        ("out", 2, [(0, 6, 200)], True),  # a delete
        ("out", 1, [(0, 7, 300)], False),  # behind a record of the ledger
        ("out", 1, [(0, 8, 400)], False),  # behind a change of the ledger, which follows
    )
    _, found = RULES.report(Sources(batch), batch, 0)
    assert found is not None
    places = {"topic": "L", "partition": 0, "text": None}
    ledger = [
        {**places, "rule": "create", "first": 90, "hash": 8, "row": 300},
        {**places, "rule": "update", "first": 91, "hash": None, "row": 400},
    ]
    entries = pa.Table.from_pylist(ledger, NO_ENTRIES.schema)
    plain, waits = plainly_waiting(pa.table(found), entries, np.array([9]), RULES, LABELS)
    assert plain.tolist() == [True, True, True, True, False, False, True, False]
    assert waits.tolist() == [False, False, True, True, False, False, True, False]
    # The counterpart of a dead record may complete the creation.
    plain, _ = plainly_waiting(pa.table(found), entries, np.array([7]), RULES, LABELS)
    assert plain.tolist() == [False] * 6 + [True, False]


def test_a_small_batch_follows_the_decision_at_once() -> None:
    batch = results(
        ("pending", 0, [(0, 1, 300)], False),
        ("out", 1, [(0, 2, 100)], False),  # an update between creation and counterpart
        ("out", 1, [(0, 3, 300)], False),  # an update of a pending row
        ("out", 1, [(0, 4, 100)], False),
        ("out", 0, [(0, 0, 100), (1, 5, 200)], False),
        ("pending", 0, [(0, 6, 400)], False),
        ("out", 1, [(0, 7, 900)], False),  # of another row
        ("out", 2, [(0, 8, 400)], True),  # ends the row
        ("dropped", 1, [(0, 9, 300)], False),  # by the condition of the output
    )
    sides = pa.StructArray.from_arrays([pa.array(range(len(batch)))], ["side0"])
    made = pa.ListArray.from_arrays(pa.array(range(len(batch) + 1), pa.int32()), sides)
    batch = batch.append_column("out0", made)
    times, records = RULES.report(Sources(batch), batch, 0)
    assert records is not None
    settled = RULES.settled(batch, times, records, LABELS)
    assert settled is not None and settled.changed
    found = [(row["source"][0]["offset"], row["kind"], bool(row["out0"])) for row in settled.rows.to_pylist()]
    assert found == [
        (1, "pending", True),
        (3, "pending", False),
        (0, "out", True),
        (2, "out", True),
        (4, "out", True),
        (6, "ended", False),
        (7, "out", True),
        (8, "ended", False),
        (9, "dropped", True),
    ]
    # A pair whose record ended has to be made in another way. Spark makes the pairs.
    batch = results(
        ("out", 2, [(0, 2, 100)], True),
        ("out", 0, [(0, 1, 100), (1, 3, 200)], False),
    )
    times, records = RULES.report(Sources(batch), batch, 0)
    assert records is not None and RULES.settled(batch, times, records, LABELS) is None


def test_a_delete_behind_a_change_that_fails_is_emitted() -> None:
    """Both records of the pair, or the delete, may come from quarantine. An earlier batch may have emitted the row."""
    rule: Any = SimpleNamespace(name="join", out="out")
    pair = {"row": 1, "other_row": 2, "ords": [(3,), (9,)], "ord": (9,), "waited": 1, "changes": 1}
    change = failing_record(rule, ("left", 0, 0), 0, pair)
    assert change is not None and change.before and change.changes
    delete = HeldRecord(("left", 0, 4), "delete", ("out", 1), True, (5,), False, ends=True)
    assert decide([change, delete]).ended == set()
    assert failing_record(rule, ("right", 0, 0), 1, pair) is None
