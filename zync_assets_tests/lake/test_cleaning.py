"""What no one needs goes, and nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from deltalake import DeltaTable

from zync_assets.errors import CommitConflict
from zync_assets.lake import cleaning, tables
from zync_assets_tests.lake.rows import SCHEMA, file, records

OLD = time.time() - 30 * 24 * 3600


def aged(path: Path) -> Path:
    os.utime(path, (OLD, OLD))
    return path


@pytest.fixture
def opened(tmp_path: Path) -> tables.Opened:
    """A table of two files, the first of which was replaced a moment ago."""
    uri = str(tmp_path / "Pool")
    first, second = file(uri, records([0])), file(uri, records([0]))
    tables.create_table(uri, SCHEMA, "", [first], {})
    found = tables.open_table(uri)
    assert found is not None
    tables.commit(found, [second], {}, removed=[first])
    for item in (first, second):
        aged(tmp_path / "Pool" / item.path)
    found = tables.open_table(uri)
    assert found is not None
    return found


def test_an_orphan_goes_once_it_is_old_and_a_file_that_a_reader_may_need_stays(opened: tables.Opened) -> None:
    folder = Path(opened.uri)
    orphan, fresh = file(opened.uri, records([7])), file(opened.uri, records([8]))
    aged(folder / orphan.path)
    before = DeltaTable(opened.uri).file_uris()
    assert cleaning.clean(opened) == [orphan.path]
    assert not (folder / orphan.path).exists()
    assert (folder / fresh.path).exists()
    assert len(list(folder.glob("*.parquet"))) == 3  # the table's own, the one replaced just now, and the fresh one
    assert DeltaTable(opened.uri).file_uris() == before


def test_what_a_commit_replaced_goes_in_time(opened: tables.Opened) -> None:
    assert len(cleaning.clean(opened, hours=0)) == 1
    assert [path.name for path in Path(opened.uri).glob("*.parquet")] == [item.path for item in opened.files]


def test_a_table_below_is_another_table(opened: tables.Opened) -> None:
    """A raw pool and a staging pool of two pipelines that share a lake may have one name."""
    below = f"{opened.uri}/topic"
    own = file(below, records([1]))
    tables.create_table(below, SCHEMA, "", [own], {})
    aged(Path(below) / own.path)
    cleaning.clean(opened, hours=0)
    assert DeltaTable(below).to_pyarrow_table().num_rows == 1


def test_a_reader_of_an_older_version_keeps_its_files(opened: tables.Opened) -> None:
    reader = tables.open_table(opened.uri, version=0)
    assert reader is not None
    cleaning.clean(opened)
    assert reader.table.to_pyarrow_table().num_rows == 1


def test_the_files_of_a_batch_under_way_stay_and_are_committed(opened: tables.Opened) -> None:
    """The batch was planned, and wrote, before the clean-up; it commits after it."""
    made = file(opened.uri, records([1, 2]))
    other = tables.open_table(opened.uri)
    assert other is not None
    cleaning.clean(other)
    tables.commit(opened, [made], {"mine": 3})
    assert DeltaTable(opened.uri).to_pyarrow_table().num_rows == 3


def test_a_writer_that_held_its_files_for_too_long_is_refused(
    opened: tables.Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that slept for a week: what it wrote before may be gone. The batch is made anew and goes through."""
    late = file(opened.uri, records([1]))
    monkeypatch.setattr(tables, "UNCOMMITTED_HOURS", 1 / 3600 / 1e6)
    for refused in (
        lambda: tables.commit(opened, [late], {"mine": 2}),
        lambda: tables.create_table(f"{opened.uri}2", SCHEMA, "", [late], {"mine": 2}),
    ):
        with pytest.raises(CommitConflict, match=r"a clean-up may have taken them since.*run again"):
            refused()
    monkeypatch.undo()
    assert tables.open_table(f"{opened.uri}2") is None
    now = tables.open_table(opened.uri)
    assert now is not None
    assert now.version == opened.version
    tables.commit(now, [file(opened.uri, records([1]))], {"mine": 2})
    assert DeltaTable(opened.uri).to_pyarrow_table().num_rows == 2


def test_files_wait_for_a_commit_for_less_time_than_orphans_are_kept() -> None:
    assert tables.UNCOMMITTED_HOURS + 24 <= cleaning.RETENTION_HOURS == 7 * 24


def test_of_two_at_once_one_cleans(opened: tables.Opened) -> None:
    other = tables.open_table(opened.uri)
    assert other is not None
    cleaning.clean(opened)
    with pytest.raises(CommitConflict):
        cleaning.clean(other)


def test_it_is_due_every_so_many_commits(opened: tables.Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not cleaning.is_due(opened)
    monkeypatch.setattr(cleaning, "COMMITS", 2)
    due: list[bool] = []
    for _ in range(4):
        found = tables.open_table(opened.uri)
        assert found is not None
        due.append(cleaning.is_due(found))
        if due[-1]:
            cleaning.clean(found)
        else:
            tables.commit(found, [], {"mine": found.version})
    assert due == [False, True, False, True]
