"""A bounded cache keeps what was used last."""

from __future__ import annotations

from zync_assets.lake.parquet_rows import RecentCache


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
