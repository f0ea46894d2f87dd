"""Cleaning removes unneeded files, and no other files."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from deltalake import DeltaTable

from zync_assets.errors import CommitConflict, TableDamaged
from zync_assets.lake import compaction, tables
from zync_assets.lake import log as lake_log
from zync_assets_tests.lake.rows import SCHEMA, file, records

OLD = time.time() - 30 * 24 * 3600


def aged(path: Path) -> Path:
    os.utime(path, (OLD, OLD))
    return path


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is too young to be removed."""
    monkeypatch.setattr(compaction, "RETENTION_HOURS", 0)


@pytest.fixture
def opened(tmp_path: Path) -> tables.LakeTable:
    """A table of two files, the first of which was replaced a moment ago."""
    uri = str(tmp_path / "Pool")
    first, second = file(uri, records([0])), file(uri, records([0]))
    tables.create_table(uri, SCHEMA, "", [first], {})
    found = tables.open_table(uri)
    assert found is not None
    tables.commit(found, [second], {}, removals=[first])
    for item in (first, second):
        aged(tmp_path / "Pool" / item.path)
    found = tables.open_table(uri)
    assert found is not None
    return found


def test_an_orphan_goes_once_it_is_old_and_a_file_that_a_reader_may_need_stays(opened: tables.LakeTable) -> None:
    folder = Path(opened.uri)
    orphan, fresh = file(opened.uri, records([7])), file(opened.uri, records([8]))
    aged(folder / orphan.path)
    before = DeltaTable(opened.uri).file_uris()
    assert compaction.clean(opened) == [orphan.path]
    assert not (folder / orphan.path).exists()
    assert (folder / fresh.path).exists()
    assert len(list(folder.glob("*.parquet"))) == 3  # the table's own, the one replaced just now, and the fresh one
    assert DeltaTable(opened.uri).file_uris() == before


@pytest.mark.usefixtures("hasty")
def test_what_a_commit_replaced_goes_in_time(opened: tables.LakeTable) -> None:
    assert len(compaction.clean(opened)) == 1
    assert [path.name for path in Path(opened.uri).glob("*.parquet")] == [item.path for item in opened.files]


@pytest.mark.usefixtures("hasty")
def test_a_table_below_is_another_table(opened: tables.LakeTable) -> None:
    """A raw pool and a staging pool of two pipelines that share a lake may have one name."""
    below = f"{opened.uri}/topic"
    own = file(below, records([1]))
    tables.create_table(below, SCHEMA, "", [own], {})
    aged(Path(below) / own.path)
    compaction.clean(opened)
    assert DeltaTable(below).to_pyarrow_table().num_rows == 1


def test_a_reader_of_an_older_version_keeps_its_files(opened: tables.LakeTable) -> None:
    reader = DeltaTable(opened.uri, version=0)
    compaction.clean(opened)
    assert reader.to_pyarrow_table().num_rows == 1


def test_the_files_of_a_batch_under_way_stay_and_are_committed(opened: tables.LakeTable) -> None:
    """The batch was planned, and wrote, before the clean-up; it commits after it."""
    made = file(opened.uri, records([1, 2]))
    other = tables.open_table(opened.uri)
    assert other is not None
    compaction.clean(other)
    tables.commit(opened, [made], {"mine": 3})
    assert DeltaTable(opened.uri).to_pyarrow_table().num_rows == 3


def test_a_writer_that_held_its_files_for_too_long_is_refused(
    opened: tables.LakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a week of a machine's sleep, its uncommitted files may have been removed. A repeated batch succeeds."""
    late = file(opened.uri, records([1]))
    monkeypatch.setattr(tables, "UNCOMMITTED_HOURS", 1 / 3600 / 1e6)
    for refused in (
        lambda: tables.commit(opened, [late], {"mine": 2}),
        lambda: tables.create_table(f"{opened.uri}2", SCHEMA, "", [late], {"mine": 2}),
    ):
        with pytest.raises(CommitConflict, match=r"a clean-up may have removed them since.*Run the command again"):
            refused()
    monkeypatch.undo()
    assert tables.open_table(f"{opened.uri}2") is None
    now = tables.open_table(opened.uri)
    assert now is not None
    assert now.version == opened.version
    tables.commit(now, [file(opened.uri, records([1]))], {"mine": 2})
    assert DeltaTable(opened.uri).to_pyarrow_table().num_rows == 2


def test_files_wait_for_a_commit_for_less_time_than_orphans_are_kept() -> None:
    assert tables.UNCOMMITTED_HOURS + 24 <= compaction.RETENTION_HOURS == 7 * 24


def test_of_two_at_once_one_cleans(opened: tables.LakeTable) -> None:
    other = tables.open_table(opened.uri)
    assert other is not None
    compaction.clean(opened)
    with pytest.raises(CommitConflict):
        compaction.clean(other)


def test_it_is_due_every_so_many_commits(opened: tables.LakeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compaction.is_due(opened)
    monkeypatch.setattr(compaction, "COMMITS", 2)
    due: list[bool] = []
    for _ in range(4):
        found = tables.open_table(opened.uri)
        assert found is not None
        due.append(compaction.is_due(found))
        if due[-1]:
            compaction.clean(found)
        else:
            tables.commit(found, [], {"mine": found.version})
    assert due == [False, True, False, True]


def log(opened: tables.LakeTable) -> list[str]:
    return sorted(path.name for path in Path(opened.uri, "_delta_log").iterdir() if path.name[0] == "0")


def again(opened: tables.LakeTable) -> tables.LakeTable:
    found = tables.open_table(opened.uri)
    assert found is not None
    return found


@pytest.mark.slow
def test_a_log_keeps_so_many_versions_and_a_checkpoint_has_few_tombstones(
    opened: tables.LakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "LOG_VERSIONS", 20)
    monkeypatch.setattr(compaction, "COMMITS", 10)
    sizes: list[int] = []
    for number in range(10, 260):
        now = again(opened)
        last = max(now.files, key=lambda item: item.first or 0)
        replaced = [last] if last.first else []
        tables.commit(now, [file(opened.uri, records([number]))], {"mine": number}, removals=replaced)
        if compaction.is_due(again(opened)):
            compaction.clean(again(opened))
            sizes.append(len(log(opened)))
    assert max(sizes) <= 20 + 100 + 20
    assert sizes[-1] < 100
    found = again(opened)
    assert found.number("mine") == 259
    assert DeltaTable(opened.uri).to_pyarrow_table().num_rows == 2
    tombstones = lake_log.removal_times(opened.uri, found.version)
    assert len(tombstones) > 20
    found.delta.create_checkpoint()
    # The fixture's own removal gives no age of the file: that tombstone lasts.
    assert len(lake_log.removal_times(opened.uri, found.version)) == 1


def test_a_log_that_shall_be_kept_is_kept(opened: tables.LakeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "LOG_VERSIONS", 0)
    opened.delta.alter.set_table_properties({"delta.logRetentionDuration": "interval 1 hour"})
    again(opened).delta.create_checkpoint()
    assert compaction.clean_log(again(opened)) == 0
    for name in log(opened):
        aged(Path(opened.uri, "_delta_log", name))
    assert compaction.clean_log(again(opened)) == 2
    assert DeltaTable(opened.uri).to_pyarrow_table().num_rows == 1


def test_a_log_keeps_the_entries_that_a_commit_under_way_needs(
    opened: tables.LakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit is based on a version that others have committed to since, in this process too."""
    monkeypatch.setattr(compaction, "LOG_VERSIONS", 3)
    late, made = opened, file(opened.uri, records([1]))
    opened.delta.create_checkpoint()
    for number in range(3):
        tables.commit(again(opened), [], {"other": number})
    assert compaction.clean_log(again(opened)) == 1
    assert lake_log.name(1) in log(opened)
    tables.commit(late, [made], {"mine": 1})
    assert again(opened).number("mine") == 1


def test_an_old_file_that_was_replaced_just_now_stays_though_a_checkpoint_was_made(
    opened: tables.LakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written long ago, but a reader may have opened the version before a moment ago."""
    monkeypatch.setattr(tables, "YOUNG_HOURS", 0)
    [old] = opened.files
    tables.commit(again(opened), [file(opened.uri, records([0]))], {"mine": 1}, removals=[old])
    again(opened).delta.create_checkpoint()
    aged(Path(opened.uri, old.path))
    assert old.path not in compaction.clean(again(opened))
    assert (Path(opened.uri) / old.path).exists()


def test_files_are_listed_once_a_day_and_empty_folders_of_batches_go(
    opened: tables.LakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many commits and cleanings a day has."""
    looks: list[str] = []
    unneeded = compaction.unneeded_files

    def counted(opened: tables.LakeTable) -> list[str]:
        looks.append(opened.uri)
        return unneeded(opened)

    monkeypatch.setattr(compaction, "unneeded_files", counted)
    folder = Path(opened.uri, "batch-000000000001-0123456789ab", "topic=t")
    folder.mkdir(parents=True)
    orphan = Path(opened.uri, file(opened.uri, records([7])).path).rename(folder / "part-0.parquet")
    aged(orphan)
    aged(folder.parent)
    assert compaction.clean(again(opened)) == ["batch-000000000001-0123456789ab/topic=t/part-0.parquet"]
    assert not folder.parent.exists()
    late = file(opened.uri, records([8])).path
    aged(Path(opened.uri, late))
    for hours in (0, 1, 23):
        tables.commit(again(opened), [], {"zync:swept": int(time.time()) - hours * 3600})
        assert compaction.clean(again(opened)) == []
    assert len(looks) == 1
    tables.commit(again(opened), [], {"zync:swept": int(time.time()) - 24 * 3600})
    assert compaction.clean(again(opened)) == [late]
    assert len(looks) == 2


def test_what_one_cleaning_leaves_goes_with_the_next(opened: tables.LakeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "MOST", 2)
    orphans = {file(opened.uri, records([number])).path for number in range(5)}
    for path in orphans:
        aged(Path(opened.uri, path))
    found = [compaction.clean(again(opened)) for _ in range(4)]
    assert [len(paths) for paths in found] == [2, 2, 1, 0]
    assert {path for paths in found for path in paths} == orphans


def test_a_link_that_leads_nowhere_stops_no_look(opened: tables.LakeTable) -> None:
    Path(opened.uri, "gone.parquet").symlink_to("/nowhere/gone.parquet")
    Path(opened.uri, "batch-000000000001-0123456789ab").symlink_to("/nowhere")
    orphan = file(opened.uri, records([7])).path
    aged(Path(opened.uri, orphan))
    assert compaction.clean(opened) == [orphan]
    assert Path(opened.uri, "gone.parquet").is_symlink()


@pytest.mark.usefixtures("hasty")
def test_nothing_is_cleaned_of_a_table_that_another_program_changed(opened: tables.LakeTable) -> None:
    DeltaTable(opened.uri).delete()
    with pytest.raises(TableDamaged):
        compaction.clean(again(opened))
    assert len(list(Path(opened.uri).glob("*.parquet"))) == 2
