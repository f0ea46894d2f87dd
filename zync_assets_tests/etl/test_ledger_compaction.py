"""A ledger of many files is compacted, no more entries at once than take a moment, batches in their order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zync_assets.etl import ledger
from zync_assets.lake import staging, storage, tampering
from zync_assets.lake.head import Head
from zync_assets.lake.log import DataFile
from zync_assets.lake.staging import BASE_SCHEMA, StagingState, commit_batch, open_staging, write_ledger

POOL = "Staging"


def file(lake: str, batch: int) -> DataFile:
    """Two records wait, and those of the batch before are completed."""
    place = {"topic": "t", "partition": 0}
    rows = [
        {"kind": "pending", **place, "first": at, "end": at + 1, "rule": "r", "hash": 5 - at}
        for at in (2 * batch, 2 * batch + 1)
    ]
    rows += [
        {"kind": "completed", **place, "first": at, "end": at + 1} for at in (2 * batch - 2, 2 * batch - 1) if at >= 0
    ]
    path = f"batch-{batch:012d}/{staging.ACCOUNT_FOLDER}/part-0.parquet"
    return write_ledger(storage.staging_uri(lake, POOL), path, rows)


def state(lake: str) -> StagingState:
    found = open_staging(lake, POOL)
    assert found is not None
    return found


def facts(found: StagingState) -> set[tuple[object, ...]]:
    """(class, offset) of every record."""
    rows = ledger.compacted(staging.read_entries(found, found.ledger_files)).to_pylist()
    return {(row["kind"], at) for row in rows for at in range(row["first"], row["end"])}


def test_a_compaction_takes_so_many_entries_and_goes_on_with_the_next_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, head = str(tmp_path), Head(batch=1)
    # In no order: the log has none.
    batches = sorted(range(40), key=lambda number: number * 7 % 40)
    commit_batch(lake, POOL, None, head, BASE_SCHEMA, [file(lake, batch) for batch in batches])
    wanted = facts(state(lake))
    assert wanted == {("done", at) for at in range(78)} | {("pending", 78), ("pending", 79)}
    monkeypatch.setattr(ledger, "COMPACTION_ENTRIES", 26)
    taken: list[int] = []
    while (before := state(lake)) and (made := ledger.compact_ledger(before))[0]:
        added, removed = made
        taken.append(len(removed))
        assert tampering.strange_file(before.table, added) is None
        head = replace(head, batch=head.batch + 1)
        commit_batch(lake, POOL, before, head, BASE_SCHEMA, added, removed)
        assert facts(state(lake)) == wanted
    # The first batch completes nothing: 2 entries and 6 times 4.
    assert taken == [7, 6]
    assert len(before.ledger_files) == 29


def test_two_large_files_are_compacted_where_that_makes_them_shorter_and_are_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One large file has pending records, another file has their ``completed`` entries, and a third file has neither."""
    lake, uri = str(tmp_path), storage.staging_uri(str(tmp_path), POOL)
    monkeypatch.setattr(ledger, "SMALL_ENTRIES", 4)
    monkeypatch.setattr(ledger, "COMPACTION_FILES", 2)

    def entries(name: str, topic: str, kind: str) -> DataFile:
        rows = [
            {"kind": kind, "topic": topic, "partition": 0, "first": at, "end": at + 1, "rule": "r", "hash": at}
            for at in range(0, 20, 2)
        ]
        return write_ledger(uri, f"batch-{name}/{staging.ACCOUNT_FOLDER}/part-0.parquet", rows)

    large = [entries("1", "t", "pending"), entries("2", "t", "completed"), entries("3", "u", "pending")]
    commit_batch(lake, POOL, None, Head(batch=1), BASE_SCHEMA, [*large, *(file(lake, batch) for batch in (7, 8))])
    wanted = facts(state(lake))
    reads: list[int] = []
    real = ledger.compacted
    monkeypatch.setattr(ledger, "compacted", lambda rows: (reads.append(rows.num_rows), real(rows))[1])
    for batch in range(2, 6):
        before = state(lake)
        added, removed = ledger.compact_ledger(before)
        more = [file(lake, 10 * batch + at) for at in (1, 2)]
        wanted |= facts(replace(before, files=tuple(more)))
        commit_batch(lake, POOL, before, Head(batch=batch), BASE_SCHEMA, [*added, *more], removed)
    found = state(lake)
    paths = {item.path for item in found.ledger_files}
    assert [item.path in paths for item in large] == [False, False, True]
    assert sum(count == 20 for count in reads) <= 3
    monkeypatch.setattr(ledger, "compacted", real)
    assert {fact for fact in facts(found) if fact[0] == "done" or int(str(fact[1])) < 20} >= {
        ("done", at) for at in range(0, 20, 2)
    }
