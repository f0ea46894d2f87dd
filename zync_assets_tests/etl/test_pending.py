"""Pending records are looked up by hash in the ledger's files. A process reads a ledger file once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pytest

from zync_assets.errors import LakeError
from zync_assets.etl import pending
from zync_assets.lake import staging, storage
from zync_assets.lake.head import Head
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
    found = pending.look_up(state, pa.Table.from_pylist(rows, pending.WANTED))
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
    monkeypatch.setattr(pending, "LOOKUP_ENTRIES", 1)
    assert pending.look_up(state, pending.WANTED.empty_table()) is None
