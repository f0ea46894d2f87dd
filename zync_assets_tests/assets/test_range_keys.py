"""Partition keys are ranges of offsets. Dagster keeps keys in the order of their creation; zync sorts keys as numbers."""

import pytest

from zync_assets.assets import range_keys
from zync_assets.errors import RangeUnknown
from zync_assets.offsets import OffsetRange, format_key, parse_key

MILLION = 1_000_000


def keys(*ranges: OffsetRange) -> list[str]:
    return [format_key(part) for part in ranges]


def test_keys_are_sorted_as_numbers_not_as_text() -> None:
    found = range_keys.on_grid(["10:0-999999", "2:10000000-10999999", "2:2000000-2999999", "june"])
    assert keys(*found) == ["2:2000000-2999999", "2:10000000-10999999", "10:0-999999"]


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("june", "0:0-999999"),
        ("0:0-499999", "0:0-999999"),
        ("3:500000-1499999", "3:0-999999 and 3:1000000-1999999"),
        ("00:0-999999", "0:0-999999"),
        ("0:0-0999999", "0:0-999999"),
        ("\u0660:0-999999", "0:0-999999"),
        ("0:9-3", "0:0-999999"),
        (f"0:0-{'9' * 5000}", "0:0-999999"),
    ],
)
def test_a_key_that_is_not_of_the_grid_is_refused_with_the_right_key(key: str, right: str) -> None:
    assert range_keys.range_of(key) is None
    with pytest.raises(RangeUnknown) as refused:
        range_keys.run_keys(["1:0-999999", key], "Raw/orders")
    assert f"Raw/orders has no range {key!r}. " in str(refused.value)
    assert f"Run {right} instead" in str(refused.value)


@pytest.mark.parametrize(
    ("first", "until", "expected"),
    [
        ({}, {0: 0}, ["0:0-999999"]),
        ({0: 0}, {0: 5}, ["0:0-999999"]),
        ({0: 0}, {0: MILLION}, ["0:0-999999", "0:1000000-1999999"]),
        ({0: MILLION + 5}, {0: MILLION + 9}, ["0:1000000-1999999"]),
        ({1: 0}, {0: 2 * MILLION, 1: 3}, ["0:2000000-2999999", "1:0-999999"]),
    ],
)
def test_the_ranges_that_are_there_and_the_open_one(
    first: dict[int, int], until: dict[int, int], expected: list[str]
) -> None:
    assert list(range_keys.keys_of(range_keys.spans_between(first, until))) == expected


def test_only_new_keys_are_added_ascending() -> None:
    wanted = [parse_key(key) for key in ("10:0-999999", "9:0-999999", "1:0-999999")]
    assert range_keys.new_keys({"1:0-999999"}, range_keys.keys_of(wanted)) == ["9:0-999999", "10:0-999999"]


def test_a_run_takes_only_what_lies_together() -> None:
    known = ["0:0-999999", "1:0-999999", "0:1000000-1999999", "0:2000000-2999999"]
    wanted = [parse_key(key) for key in ("0:2000000-2999999", "0:0-999999", "1:0-999999")]
    assert range_keys.clusters(known, wanted) == [["0:0-999999", "1:0-999999"], ["0:2000000-2999999"]]
