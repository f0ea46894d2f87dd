"""Offsets are cut out of the ledger's entries, and every other offset stays where it is."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from zync_assets.etl.ledger import compacted
from zync_assets.etl.retries import ClassRange, Spans, spans_of, without
from zync_assets.lake.staging import ACCOUNT_TYPE
from zync_assets.offsets import OffsetRange

KINDS = ("done", "unmatched", "quarantined")


def ledger(entries: list[tuple[str, int, int, int]]) -> pa.Table:
    """Entries from (class, partition, first, end)."""
    rows = [
        {"kind": kind, "topic": "t", "partition": partition, "first": first, "end": end, "count": end - first}
        for kind, partition, first, end in entries
    ]
    array = pa.array(rows, ACCOUNT_TYPE)
    return pa.table(array.flatten(), names=ACCOUNT_TYPE.names)


def offsets(rows: pa.Table) -> dict[tuple[int, int], str]:
    """(partition, offset) → class; each offset must be there once."""
    found: dict[tuple[int, int], str] = {}
    for row in rows.to_pylist():
        assert row["count"] == row["end"] - row["first"] > 0
        for offset in range(row["first"], row["end"]):
            assert (row["partition"], offset) not in found
            found[row["partition"], offset] = row["kind"]
    return found


def spans(kind: str, *parts: tuple[int, int, int]) -> Spans:
    return spans_of([ClassRange("t", kind, None, OffsetRange(*part)) for part in parts])


def test_a_range_is_cut_where_offsets_are_taken_out_of_it() -> None:
    rows = ledger([("unmatched", 0, 0, 10), ("done", 0, 10, 20), ("unmatched", 1, 0, 10)])
    left = without(rows, spans("unmatched", (0, 0, 2), (0, 4, 5), (0, 8, 30)))
    assert sorted((row["kind"], row["partition"], row["first"], row["end"]) for row in left.to_pylist()) == [
        ("done", 0, 10, 20),
        ("unmatched", 0, 2, 4),
        ("unmatched", 0, 5, 8),
        ("unmatched", 1, 0, 10),
    ]


def test_entries_that_nothing_is_taken_from_are_the_same(tmp_path: Path) -> None:
    rows = ledger([("unmatched", 0, 0, 10)])
    assert without(rows, spans("quarantined", (0, 0, 5))) is rows
    assert without(rows, spans("unmatched", (0, 10, 12))) is rows


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 1), st.integers(1, 6)), max_size=12),
    st.sampled_from(KINDS),
    st.sets(st.tuples(st.integers(0, 1), st.integers(0, 40)), max_size=30),
)
def test_exactly_what_is_taken_is_gone(
    pieces: list[tuple[str, int, int]], kind: str, places: set[tuple[int, int]]
) -> None:
    entries: list[tuple[str, int, int, int]] = []
    reach = {0: 0, 1: 0}
    for name, partition, length in pieces:
        entries.append((name, partition, reach[partition], reach[partition] + length))
        reach[partition] += length
    rows = ledger(entries)
    parts = spans(kind, *[(partition, offset, offset + 1) for partition, offset in places])
    expected = {place: name for place, name in offsets(rows).items() if name != kind or place not in places}
    assert offsets(without(rows, parts)) == expected


def test_compaction_keeps_why_a_rule_failed_on_each_record() -> None:
    rows = ledger(
        [("quarantined", 0, 0, 1), ("quarantined", 0, 1, 2), ("quarantined", 0, 2, 3), ("quarantined", 0, 3, 4)]
    )
    texts = pa.array([None, "first", "second", None], pa.string())
    rows = rows.set_column(rows.schema.get_field_index("text"), "text", texts)
    kept = sorted((row["first"], row["end"], row["text"]) for row in compacted(rows).to_pylist())
    assert kept == [(0, 1, None), (1, 2, "first"), (2, 3, "second"), (3, 4, None)]
