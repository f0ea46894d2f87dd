"""A bounded cache keeps what was used last. A damaged file is named with its cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from zync_assets.lake.parquet_rows import DamagedFile, RecentCache, read_columns


def test_what_was_used_last_stays() -> None:
    kept: RecentCache[str, int] = RecentCache(3)
    for place, key in enumerate("abc"):
        kept.put(key, place)
    assert kept.get("a") == 0
    kept.put("d", 3)
    assert [key for key in "abcd" if key in kept] == ["a", "c", "d"]
    assert kept.get("b") is None


def test_weights_add_up_and_one_value_stays_whatever_it_weighs() -> None:
    kept: RecentCache[str, int] = RecentCache(10)
    kept.put("a", 1, 6)
    kept.put("a", 2, 4)
    kept.put("b", 3, 6)
    assert (kept.get("a"), kept.get("b")) == (2, 3)
    kept.put("c", 4, 11)
    assert [key for key in "abc" if key in kept] == ["c"]
    kept.remove("c")
    kept.put("d", 5, 10)
    assert kept.get("d") == 5


def test_a_file_that_was_cut_off_is_named_in_whole_sentences(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"PAR1 the first half of a file")
    with pytest.raises(DamagedFile, match=r"rows\.parquet can't be read: .*[^.]\. Restore it from a copy\.$"):
        list(read_columns(str(file), ["kafka.offset"]))
