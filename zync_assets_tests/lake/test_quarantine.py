"""Quarantine: entries count once the raw table has passed them; what an unfinished ingest left is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from zync_assets.errors import CommitConflict
from zync_assets.lake.quarantine import quarantine_files, replace_uncounted, settle
from zync_assets.lake.storage import quarantine_uri
from zync_assets.lake.tables import DataFile
from zync_assets_tests.lake.rows import bad_records, file

PLACE = ("Raw", "shop.public.orders")


def written(lake: Path, *offsets: int, partition: int = 0) -> DataFile:
    return file(quarantine_uri(str(lake), *PLACE), bad_records(offsets, partition))


def counted(lake: Path, upcoming: dict[int, int]) -> list[tuple[int | None, int | None]]:
    return [(item.partition, item.first) for item in quarantine_files(str(lake), *PLACE, upcoming)]


def replace(lake: Path, upcoming: dict[int, int], *files: DataFile) -> list[DataFile]:
    return replace_uncounted(str(lake), *PLACE, upcoming, files)


def test_nothing_quarantined_makes_no_table(tmp_path: Path) -> None:
    assert replace(tmp_path, {0: 0}) == []
    assert not Path(quarantine_uri(str(tmp_path), *PLACE)).exists()
    assert counted(tmp_path, {0: 9}) == []


def test_an_entry_counts_from_the_raw_table_s_commit_on(tmp_path: Path) -> None:
    replace(tmp_path, {0: 0}, written(tmp_path, 3))
    assert counted(tmp_path, {0: 0}) == []
    assert counted(tmp_path, {0: 10}) == [(0, 3)]


def test_what_a_killed_ingest_left_is_replaced_and_what_counts_stays(tmp_path: Path) -> None:
    replace(tmp_path, {0: 0, 1: 0}, written(tmp_path, 3), written(tmp_path, 4, partition=1))
    # Partition 0 was committed up to 10, partition 1 never: then another attempt finds other bad records.
    replace(tmp_path, {0: 10, 1: 0}, written(tmp_path, 11), written(tmp_path, 7, partition=1))
    assert counted(tmp_path, {0: 20, 1: 20}) == [(0, 3), (0, 11), (1, 7)]


def test_an_attempt_without_bad_records_clears_what_the_one_before_left(tmp_path: Path) -> None:
    replace(tmp_path, {0: 0}, written(tmp_path, 3))
    replace(tmp_path, {0: 0})
    assert counted(tmp_path, {0: 10}) == []


def test_the_loser_of_a_race_puts_back_what_counts_by_now_and_takes_its_own_out(tmp_path: Path) -> None:
    replace(tmp_path, {0: 0}, written(tmp_path, 3))
    mine = written(tmp_path, 2, 5)
    removed = replace(tmp_path, {0: 0}, mine)
    assert [item.first for item in removed] == [3]
    # The other one's raw commit came first, up to offset 4: its entry counts.
    settle(str(tmp_path), *PLACE, removed, [mine])
    assert counted(tmp_path, {0: 4}) == [(0, 3)]


def test_the_winner_finds_its_entries_again_where_a_killed_loser_took_them_out(tmp_path: Path) -> None:
    mine = written(tmp_path, 3)
    replace(tmp_path, {0: 0}, mine)
    replace(tmp_path, {0: 0})
    settle(str(tmp_path), *PLACE, [mine], [])
    assert counted(tmp_path, {0: 4}) == [(0, 3)]


def test_a_writer_that_opened_the_table_before_the_winner_settled_conflicts(tmp_path: Path) -> None:
    """The winner commits to the side table once more after its raw commit, so nobody can take its entries out late."""
    mine = written(tmp_path, 3)
    replace(tmp_path, {0: 0}, mine)
    with pytest.raises(CommitConflict):
        replace_uncounted(
            str(tmp_path), *PLACE, {0: 0}, [written(tmp_path, 4)], lambda: settle(str(tmp_path), *PLACE, [mine], [])
        )
    assert counted(tmp_path, {0: 9}) == [(0, 3)]
