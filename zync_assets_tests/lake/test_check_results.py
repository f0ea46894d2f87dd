"""The results of blocking checks in the lake. Only a pass over the same offsets removes a block, or moves the progress."""

from __future__ import annotations

from pathlib import Path

import pytest

from zync_assets.lake import compaction
from zync_assets.lake.check_results import Look, keep_failure, keep_pass, open_check_state
from zync_assets.offsets import OffsetRange


@pytest.fixture
def lake(tmp_path: Path) -> str:
    return str(tmp_path / "lake")


def look(*parts: tuple[int, int, int], ends: dict[int, int] | None = None, table: str = "t", together: bool = False):
    """A look at some (partition, first, end) of the topic ``orders``, which begins at 0 and ends at ``ends``."""
    ranges = tuple(OffsetRange(*part) for part in parts)
    reach = ends or {part.partition: part.end for part in ranges}
    extent = {("orders", partition): (0, end) for partition, end in reach.items()}
    return Look("no_loss", "Raw/orders", table, {"orders": ranges}, extent, together)


def blocked(lake: str, table: str = "t") -> list[str]:
    return [item.summary for item in open_check_state(lake, "Raw").blocks_of(["Raw/orders"], [table])]


def passed(lake: str, partition: int = 0) -> int | None:
    return open_check_state(lake, "Raw").progress(look((0, 0, 1)), ("orders", partition))


def test_a_block_stays_until_the_check_passes_over_all_of_it(lake: str) -> None:
    keep_failure(open_check_state(lake, "Raw"), look((0, 0, 3), (1, 0, 2)), "offset 1 is missing")
    for other in (look((1, 0, 9)), look((0, 0, 2), (1, 0, 2)), look((0, 0, 3), (1, 0, 2), table="another")):
        keep_pass(open_check_state(lake, "Raw"), other)
        assert blocked(lake) == ["offset 1 is missing"]
    keep_pass(open_check_state(lake, "Raw"), look((0, 0, 5), (1, 0, 2)))
    assert blocked(lake) == []


def test_a_larger_failure_takes_the_place_of_smaller_ones(lake: str) -> None:
    for end in (2, 3, 3, 1):
        keep_failure(open_check_state(lake, "Raw"), look((0, 0, end)), f"up to {end}")
    assert blocked(lake) == ["up to 3"]
    version = open_check_state(lake, "Raw").table
    keep_failure(open_check_state(lake, "Raw"), look((0, 0, 3)), "again")
    assert open_check_state(lake, "Raw").table is version


def test_a_block_that_came_while_a_check_looked_stays(lake: str) -> None:
    keep_failure(open_check_state(lake, "Raw"), look((0, 0, 3)), "first")
    before = open_check_state(lake, "Raw")
    keep_failure(open_check_state(lake, "Raw"), look((0, 2, 5)), "second")
    keep_pass(before, look((0, 0, 9)))
    assert blocked(lake) == ["second"]


def test_the_record_is_cleaned_as_other_tables_are(lake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "COMMITS", 5)
    for end in range(1, 12):
        keep_pass(open_check_state(lake, "Raw"), look((0, 0, end)))
    opened = open_check_state(lake, "Raw").table
    assert opened is not None
    assert opened.number("zync:cleaned") == 2
    assert passed(lake) == 11


def test_a_block_of_a_table_that_is_no_more_blocks_nothing(lake: str) -> None:
    keep_failure(open_check_state(lake, "Raw"), look((0, 0, 3)), "first")
    assert blocked(lake, "made since") == []


def test_progress_has_no_hole(lake: str) -> None:
    keep_pass(open_check_state(lake, "Raw"), look((0, 0, 3), ends={0: 3, 1: 5}))
    assert (passed(lake), passed(lake, 1)) == (3, 0)
    keep_pass(open_check_state(lake, "Raw"), look((0, 4, 9), (1, 0, 5)))
    assert (passed(lake), passed(lake, 1)) == (3, 5)
    keep_pass(open_check_state(lake, "Raw"), look((0, 2, 9)))
    keep_pass(open_check_state(lake, "Raw"), look((0, 0, 4)))
    assert passed(lake) == 9


def test_progress_of_an_account_moves_as_one(lake: str) -> None:
    keep_pass(open_check_state(lake, "Raw"), look((0, 0, 3), ends={0: 3, 1: 5}, together=True))
    assert (passed(lake), passed(lake, 1)) == (None, None)
    keep_pass(open_check_state(lake, "Raw"), look((0, 0, 3), (1, 0, 5), together=True))
    assert (passed(lake), passed(lake, 1)) == (3, 5)


def test_two_writers_keep_what_both_said(lake: str) -> None:
    """Each was at work on the record as it was before the other's commit; the first makes the table."""
    before = open_check_state(lake, "Raw")
    keep_pass(before, look((0, 0, 3)))
    keep_failure(before, look((1, 0, 3)), "of the second")
    older = open_check_state(lake, "Raw")
    keep_pass(older, look((0, 3, 9)))
    keep_pass(older, look((0, 3, 5)))
    assert passed(lake) == 9
    assert blocked(lake) == ["of the second"]
