"""Offset arithmetic held to sets of single offsets, which can't be wrong."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zync_assets.offsets import (
    OffsetRange,
    format_key,
    intersection,
    key_of,
    keys_over,
    new_ranges,
    normalize,
    parse_key,
    split,
    subtract,
)

ranges = st.builds(
    lambda partition, first, length: OffsetRange(partition, first, first + length),
    st.integers(0, 2),
    st.integers(0, 25),
    st.integers(0, 10),
)
many = st.lists(ranges, max_size=8)


def offsets(parts: list[OffsetRange]) -> set[tuple[int, int]]:
    return {(part.partition, offset) for part in parts for offset in range(part.first, part.end)}


@pytest.mark.parametrize("place", [(-1, 0, 1), (0, -1, 1), (0, 2, 1)])
def test_no_range_before_zero_or_backwards(place: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="no offset range"):
        OffsetRange(*place)


@given(many)
def test_normalize_keeps_the_offsets_and_leaves_no_two_ranges_that_touch(parts: list[OffsetRange]) -> None:
    found = normalize(parts)
    assert offsets(found) == offsets(parts)
    assert found == sorted(found)
    assert all(not part.empty for part in found)
    assert all(one.partition != other.partition or one.end < other.first for one, other in itertools.pairwise(found))


@given(many, many)
def test_subtract_is_the_difference_of_sets(whole: list[OffsetRange], parts: list[OffsetRange]) -> None:
    left = subtract(whole, parts)
    assert offsets(left) == offsets(whole) - offsets(parts)
    assert left == normalize(left)


@given(many, many)
def test_intersection_is_that_of_sets(whole: list[OffsetRange], parts: list[OffsetRange]) -> None:
    both = intersection(whole, parts)
    assert offsets(both) == offsets(whole) & offsets(parts)
    assert both == normalize(both)


@given(ranges, st.integers(1, 7))
def test_split_cuts_without_a_gap(whole: OffsetRange, size: int) -> None:
    pieces = split(whole, size)
    assert offsets(pieces) == offsets([whole])
    assert sum(piece.end - piece.first for piece in pieces) == len(offsets(pieces))
    assert all(0 < piece.end - piece.first <= size for piece in pieces)


@given(ranges.filter(lambda part: not part.empty))
def test_a_partition_key_is_read_as_it_was_written(part: OffsetRange) -> None:
    assert parse_key(format_key(part)) == part


def test_a_partition_key_names_its_last_offset() -> None:
    assert format_key(OffsetRange(0, 0, 1_000_000)) == "0:0-999999"


@pytest.mark.parametrize("key", ["", "0", "0:5", "0:5-4", "a:0-1", "0:0-1 ", "0:-1-5", "0:0-1,0:2-3"])
def test_what_is_no_partition_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="is no partition key"):
        parse_key(key)


@given(many, st.integers(1, 9))
def test_keys_cover_the_ranges_and_no_key_is_there_for_nothing(parts: list[OffsetRange], size: int) -> None:
    keys = keys_over(parts, size)
    assert keys == sorted(set(keys))
    assert offsets(parts) <= offsets(keys)
    assert all(offsets([key]) & offsets(parts) for key in keys)
    assert all(key == key_of(key.partition, key.first, size) for key in keys)


def test_keys_of_an_empty_range_are_none() -> None:
    assert keys_over([OffsetRange(0, 12, 12)], 10) == []


def test_partitions_sort_as_numbers() -> None:
    assert [part.partition for part in sorted([OffsetRange(10, 0, 1), OffsetRange(9, 5, 6)])] == [9, 10]


@given(st.dictionaries(st.integers(0, 3), st.integers(0, 9)), st.dictionaries(st.integers(0, 3), st.integers(0, 9)))
def test_new_ranges_lie_between_two_positions(since: dict[int, int], until: dict[int, int]) -> None:
    expected = {(p, offset) for p, end in until.items() for offset in range(since.get(p, 0), end)}
    assert offsets(new_ranges(since, until)) == expected
