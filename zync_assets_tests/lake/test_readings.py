"""Readings of ends: which are kept, and what a lost or a damaged object means."""

from __future__ import annotations

from pathlib import Path

import pytest

from zync_assets.errors import LakeError
from zync_assets.lake import storage
from zync_assets.lake.readings import MOST, Reading, TopicEnds, are_confirmed, keep_reading, read_readings, thinned


def reading(at: float, end: int) -> Reading:
    return Reading(at, at, {"a": TopicEnds("id", {0: end}), "missing": TopicEnds(None)})


def test_a_reading_says_how_far_each_partition_is() -> None:
    found = reading(1, 7)
    assert [found.end("a", 0), found.end("a", 1), found.end("missing", 3), found.end("other", 0)] == [7, None, 0, None]
    assert found.without(["a"]).end("a", 0) is None


def test_an_end_before_an_open_transaction_is_not_whole(tmp_path: Path) -> None:
    ends = {"a": TopicEnds("id", {0: 7, 1: 8}, frozenset({1})), "missing": TopicEnds(None)}
    (found,) = keep_reading(str(tmp_path), "Raw", Reading(1, 1, ends), 1)
    assert read_readings(str(tmp_path), "Raw") == [found]
    places = ("a", 0), ("a", 1), ("missing", 0), ("other", 0)
    assert [found.whole_end(*place) for place in places] == [7, None, 0, None]


def test_readings_come_back_from_the_lake(tmp_path: Path) -> None:
    lake = str(tmp_path)
    assert read_readings(lake, "Raw") == []
    one = keep_reading(lake, "Raw", reading(1.25, 7), 1)
    both = keep_reading(lake, "Raw", reading(3.5, 9), 1)
    assert read_readings(lake, "Raw") == both == [*one, reading(3.5, 9)]


def test_a_damaged_object_is_no_reading_and_is_replaced(tmp_path: Path) -> None:
    lake = str(tmp_path)
    keep_reading(lake, "Raw", reading(1, 7), 1)
    Path(storage.readings_uri(lake, "Raw")).write_text('[{"began": 1')
    assert read_readings(lake, "Raw") == []
    assert keep_reading(lake, "Raw", reading(2, 7), 1) == [reading(2, 7)]


def test_an_object_that_cant_be_read_is_an_error(tmp_path: Path) -> None:
    uri = storage.readings_uri(str(tmp_path), "Raw")
    Path(uri).mkdir(parents=True)
    with pytest.raises(LakeError, match=f"file {uri} can't be read: "):
        read_readings(str(tmp_path), "Raw")


def test_quiet_topics_write_nothing(tmp_path: Path) -> None:
    lake = str(tmp_path)
    for at in (0.0, 0.5, 1.0):
        keep_reading(lake, "Raw", reading(at, 7), 1)
    path = Path(storage.readings_uri(lake, "Raw"))
    before = path.stat().st_mtime_ns, path.read_text()
    assert [item.began for item in keep_reading(lake, "Raw", reading(60, 7), 1)] == [0.0, 1.0]
    assert (path.stat().st_mtime_ns, path.read_text()) == before


def test_ends_are_confirmed_by_a_second_reading_after_the_delay() -> None:
    assert not are_confirmed([], 1)
    assert not are_confirmed([reading(0, 7)], 0)
    assert not are_confirmed([reading(0, 7), reading(0.9, 7)], 1)
    assert are_confirmed([reading(0, 7), reading(1, 7)], 1)
    assert not are_confirmed([reading(0, 6), reading(1, 7)], 1)


def test_the_first_of_equal_readings_stays_however_close_it_is_to_the_one_before() -> None:
    """A command reads the ends soon after another command, ingests, and reads them again after the delay."""
    found = thinned([reading(0, 6), reading(0.1, 7), reading(1.2, 7)], 1)
    assert [item.began for item in found] == [0, 0.1, 1.2]
    assert are_confirmed(found, 1)


def test_a_reading_stays_until_a_later_one_can_confirm_its_ends() -> None:
    """However close it is to the one before, and though records came meanwhile."""
    found = thinned([reading(0, 6), reading(0.1, 7), reading(1.2, 8)], 1)
    assert [item.began for item in found] == [0, 0.1, 1.2]
    assert [item.began for item in thinned([reading(0, 6), reading(0.1, 7), reading(1, 8)], 1)] == [0, 1]


def test_with_a_limit_the_last_of_equal_readings_is_renewed_after_it() -> None:
    """An idle pipeline writes one reading for each limit, and none without a limit."""
    equal = [reading(at, 7) for at in range(0, 100, 2)]
    assert [item.began for item in thinned(equal, 1)] == [0, 2]
    assert [item.began for item in thinned(equal, 1, 60)] == [0, 62]


def test_however_often_ends_are_read_two_readings_are_a_delay_apart() -> None:
    """A loop of a tenth of the delay would otherwise never keep a reading for as long as the delay."""
    found: list[Reading] = []
    for tick in range(200):
        found = thinned([*found, reading(tick / 10, tick)], 1)
        assert len(found) <= MOST
        assert found[-1].began == tick / 10
        assert tick < 20 or any(tick / 10 - 2 <= item.ended <= tick / 10 - 1 for item in found)
