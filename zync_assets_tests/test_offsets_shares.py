"""A division of work into shares loses no part, and makes shares of about equal size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zync_assets.offsets import LEAST, MOST, OffsetRange, normalize, shares


def of_lengths(*lengths: int) -> list[OffsetRange]:
    return [OffsetRange(partition, 7, 7 + length) for partition, length in enumerate(lengths)]


def lengths(pieces: list[OffsetRange]) -> list[int]:
    return [piece.end - piece.first for piece in pieces]


@given(st.lists(st.integers(0, 9_000_000), max_size=6), st.integers(1, 40))
def test_every_offset_is_in_one_piece_and_none_is_too_long(given: list[int], slots: int) -> None:
    ranges = of_lengths(*given)
    pieces = shares(ranges, slots)
    assert normalize(pieces) == normalize(ranges)
    assert sum(lengths(pieces)) == sum(given), "none is in two"
    assert all(0 < length <= MOST for length in lengths(pieces))
    assert lengths(pieces) == sorted(lengths(pieces), reverse=True)


@given(st.lists(st.integers(0, 9_000_000), min_size=1, max_size=6), st.integers(1, 40))
def test_no_task_has_much_more_than_its_share(given: list[int], slots: int) -> None:
    longest = max(lengths(shares(of_lengths(*given), slots)), default=0)
    assert longest <= max(LEAST, -(-sum(given) // slots))


@pytest.mark.parametrize(
    ("given", "slots", "expected"),
    [
        ([5_000_000], 2, [2_500_000] * 2),
        ([5_000_000], 8, [625_000] * 8),
        ([8_000_000], 2, [2_000_000] * 4),
        ([2_000_000] * 3, 2, [1_000_000] * 6),
        ([1_000_000] * 8, 2, [1_000_000] * 8),
        ([2_000_000, 10], 2, [1_000_000] * 2 + [10]),
        ([60_000], 2, [30_000] * 2),
        ([10], 2, [10]),
        ([], 2, []),
    ],
)
def test_there_are_few_tasks_and_all_slots_have_something_to_do_to_the_end(
    given: list[int], slots: int, expected: list[int]
) -> None:
    assert lengths(shares(of_lengths(*given), slots)) == expected
