"""Pending records are looked up by hash and by age in the ledger's files. A process reads a small ledger file once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from zync_assets.errors import LakeError
from zync_assets.etl import ledger
from zync_assets.lake import staging, storage
from zync_assets.lake.head import Head
from zync_assets.lake.log import DataFile
from zync_assets.lake.staging import StagingState, commit_batch, open_staging, write_ledger


def entry(kind: str, first: int, hash: int | None = None, rule: str = "join", topic: str = "t") -> dict[str, object]:
    return {"kind": kind, "topic": topic, "partition": 0, "first": first, "end": first + 1, "rule": rule, "hash": hash}


def batch(lake: str, number: int, *entries: Mapping[str, object]) -> StagingState:
    uri = storage.staging_uri(lake, "Staging")
    file = write_ledger(uri, f"b{number}/{staging.ACCOUNT_FOLDER}/part-0.parquet", entries)
    commit_batch(lake, "Staging", open_staging(lake, "Staging"), Head(number), staging.BASE_SCHEMA, [file])
    found = open_staging(lake, "Staging")
    assert found is not None
    return found


def places(state: StagingState, *wanted: tuple[str, str, int]) -> list[tuple[str, str, int, int]]:
    rows = [dict(zip(("rule", "topic", "hash"), each, strict=True)) for each in wanted]
    found = ledger.look_up(state, pa.Table.from_pylist(rows, ledger.WANTED))
    assert found is not None
    return sorted(tuple(row.values()) for row in found.to_pylist())


def test_what_waits_for_the_rule_and_has_the_hash_is_found_until_it_is_completed(tmp_path: Path) -> None:
    lake = str(tmp_path)
    state = batch(
        lake,
        1,
        entry("done", 0),
        entry("pending", 3, 7),
        entry("pending", 1, 7),
        entry("pending", 2),
        entry("pending", 4, 8),
        entry("pending", 5, 7, "other"),
        entry("pending", 5, 7, "join", "u"),
    )
    assert places(state, ("join", "t", 7), ("join", "t", 7), ("join", "t", 99)) == [
        ("join", "t", 0, 1),
        ("join", "t", 0, 3),
    ]
    assert places(state, ("join", "u", 7), ("other", "u", 7)) == [("join", "u", 0, 5)]
    assert places(state, ("join", "t", 9)) == []
    assert places(state) == []
    state = batch(lake, 2, entry("completed", 3), entry("completed", 4, topic="u"), entry("pending", 9, 7))
    assert places(state, ("join", "t", 7), ("join", "t", 8)) == [
        ("join", "t", 0, 1),
        ("join", "t", 0, 4),
        ("join", "t", 0, 9),
    ]


def test_a_file_is_read_once_and_its_loss_is_an_error(tmp_path: Path) -> None:
    lake = str(tmp_path)
    state = batch(lake, 1, entry("pending", 1, 7))
    assert places(state, ("join", "t", 7)) == [("join", "t", 0, 1)]
    state = batch(lake, 2, entry("pending", 2, 7))
    for path in tmp_path.rglob("b1/*/*.parquet"):
        path.unlink()
    assert places(state, ("join", "t", 7)) == [("join", "t", 0, 1), ("join", "t", 0, 2)]
    state = batch(lake, 3, entry("pending", 3, 7))
    for path in tmp_path.rglob("b3/*/*.parquet"):
        path.unlink()
    with pytest.raises(LakeError, match="can't be read"):
        places(state, ("join", "t", 7))


def test_a_long_ledger_is_for_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = batch(str(tmp_path), 1, entry("pending", 1, 7), entry("pending", 2, 7))
    monkeypatch.setattr(ledger, "LOOKUP_ENTRIES", 1)
    assert ledger.look_up(state, ledger.WANTED.empty_table()) is None


def since(first: int, text: str | None, rule: str = "join", hash: int | None = 7) -> dict[str, object]:
    return {**entry("pending", first, hash, rule), "text": text}


def aged(state: StagingState, until: int) -> tuple[list[tuple[int, int]], int | None]:
    """Offset and time of the records that wait since before ``until``, and the time of the next."""
    late, rest = ledger.waiting_since(state, "join", until)
    return sorted((row["first"], row["since"]) for row in late.to_pylist()), rest


@pytest.mark.parametrize("large", [False, True])
def test_what_waits_since_before_a_time_is_found_with_the_time_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    if large:
        monkeypatch.setattr(ledger, "SMALL_ENTRIES", 0)
    lake = str(tmp_path)
    rows = [since(1, "500"), since(2, "90"), since(3, "1000"), since(4, "80", "other"), since(5, "80"), since(6, "-7")]
    # Texts of rules as they were before an edit: of a held output, and of a rule that looks up rows.
    rows += [since(7, "change"), since(8, None), since(9, "1970-01-01T00:00:00.600+00:00", hash=None)]
    batch(lake, 1, *rows)
    state = batch(lake, 2, entry("completed", 5), entry("completed", 2, topic="u"))
    assert aged(state, 500) == ([(2, 90), (6, -7)], 500)
    assert aged(state, 601) == ([(1, 500), (2, 90), (6, -7), (9, 600)], 1000)
    assert aged(state, 1001)[1] is None
    assert aged(state, -7) == ([], -7)
    # The record that waits longest among the others is completed.
    state = batch(lake, 3, entry("completed", 1))
    assert aged(state, 500) == ([(2, 90), (6, -7)], 600)
    monkeypatch.setattr(ledger, "_NEXT", 1)
    assert aged(state, 500) == ([(2, 90), (6, -7)], 500)


@pytest.mark.parametrize("large", [False, True])
def test_a_search_finds_what_a_look_up_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    if large:
        monkeypatch.setattr(ledger, "SMALL_ENTRIES", 0)
    lake = str(tmp_path)
    batch(lake, 1, *(entry("pending", at, at % 5 or None, "join", "tu"[at % 2]) for at in range(40)))
    state = batch(lake, 2, *(entry("completed", at, topic="tu"[at % 2]) for at in range(0, 40, 3)))
    wanted = [("join", "t", 2), ("join", "u", 2), ("join", "t", 4), ("other", "t", 1), ("join", "v", 3)]
    rows = [dict(zip(("rule", "topic", "hash"), each, strict=True)) for each in wanted]
    found = ledger.search(state, pa.Table.from_pylist(rows, ledger.WANTED))
    assert sorted(tuple(row.values()) for row in found.to_pylist()) == places(state, *wanted)
    assert found.num_rows == 9


def test_memory_holds_a_part_of_the_records_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million records wait, and some of them wait too long."""
    entries: Callable[[pa.Table, str], pa.Table] = vars(ledger)["_entries"]
    uri, count = storage.staging_uri(str(tmp_path), "Staging"), 250_000
    files: list[DataFile] = []
    for number in range(4):
        first = np.arange(number * count, (number + 1) * count)
        fields: dict[str, pa.Array] = {
            "kind": pa.repeat("pending", count),
            "topic": pa.repeat("a.topic.with.a.long.name", count),
            "partition": pa.repeat(pa.scalar(0, pa.int32()), count),
            "first": pa.array(first),
            "end": pa.array(first + 1),
            "rule": pa.repeat("join", count),
            "hash": pa.array(first * 7919 % 2**40),
            "text": pa.array(1_700_000_000_000 + first).cast(pa.string()),
        }
        kinds = staging.ACCOUNT_TYPE
        columns = [fields.get(item.name, pa.nulls(count, item.type)) for item in kinds]
        files.append(
            staging.write_entries(
                uri, f"b{number}/{staging.ACCOUNT_FOLDER}/part-0.parquet", pa.table(columns, names=kinds.names)
            )
        )
    commit_batch(str(tmp_path), "Staging", None, Head(1), staging.BASE_SCHEMA, files)
    state = open_staging(str(tmp_path), "Staging")
    assert state is not None
    before, held = pa.total_allocated_bytes(), list[int]()

    def noted(rows: pa.Table, kind: str) -> pa.Table:
        held.append(pa.total_allocated_bytes() - before)
        return entries(rows, kind)

    monkeypatch.setattr(ledger, "_entries", noted)
    late, rest = ledger.waiting_since(state, "join", 1_700_000_000_100)
    hashes = pa.table([["join"] * 100, ["a.topic.with.a.long.name"] * 100, late["hash"]], schema=ledger.WANTED)
    assert ledger.search(state, hashes).num_rows == late.num_rows == 100
    assert rest == 1_700_000_000_100
    # All entries take more than 100 MB.
    assert max(held) < 40 << 20
