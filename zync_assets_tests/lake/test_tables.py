"""Delta tables: one of two writers wins, a commit that happened counts, and what could be read wrongly is refused."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError

from zync_assets.errors import CommitConflict, LakeError, SchemaError, TableDamaged, TableUnsupported
from zync_assets.lake import log, tables, tampering
from zync_assets.lake.log import DataFile, LakeTable, list_files
from zync_assets.lake.tables import commit, create_table, open_table, widen
from zync_assets_tests.lake.rows import SCHEMA, file, records


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "Raw" / "shop.public.orders")


@pytest.fixture
def table(uri: str) -> str:
    """A table with one file and the number ``n`` at 3."""
    create_table(uri, SCHEMA, "test", [file(uri, records([0, 1, 2]))], {"n": 3})
    return uri


def opened(uri: str) -> LakeTable:
    found = open_table(uri)
    assert found is not None
    return found


def rows(uri: str) -> list[int]:
    """Offsets as delta-rs itself reads them."""
    found = DeltaTable(uri).to_pyarrow_table(columns=["kafka"]).to_pylist()
    return sorted(row["kafka"]["offset"] for row in found)


def test_where_nothing_is_there_is_no_table(uri: str, tmp_path: Path) -> None:
    assert open_table(uri) is None
    (tmp_path / "Raw").mkdir()
    assert open_table(str(tmp_path / "Raw")) is None


@pytest.mark.parametrize("was_open", [False, True])
def test_a_folder_that_this_user_may_not_read_is_an_error_of_its_table(table: str, was_open: bool) -> None:
    if was_open:
        opened(table)
    Path(table).chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read everything
    try:
        with pytest.raises(LakeError, match=f"lake {table}: this user may not do that. Give it the right to read"):
            open_table(table)
    finally:
        os.seteuid(user)
        Path(table).chmod(0o755)
    assert rows(opened(table).uri) == [0, 1, 2]


def test_files_come_back_with_their_statistics(table: str) -> None:
    commit(opened(table), [file(table, records([7, 9], [5_000, 1_700_000_000_123], partition=12))], {"n": 10})
    first, second = sorted(list_files(opened(table)), key=lambda item: item.first or 0)
    assert (first.records, first.partition, first.first, first.last) == (3, 0, 0, 2)
    assert (second.records, second.partition, second.first, second.last) == (2, 12, 7, 9)
    assert (second.min_time, second.max_time) == (5_000, 1_700_000_000_123)


def test_of_two_writers_from_one_state_one_wins_and_nothing_of_the_other_is_visible(table: str) -> None:
    one, other = opened(table), opened(table)
    commit(one, [file(table, records([3, 4]))], {"n": 5})
    with pytest.raises(CommitConflict):
        commit(other, [file(table, records([3, 4, 5]))], {"n": 6})
    assert rows(table) == [0, 1, 2, 3, 4]
    assert opened(table).number("n") == 5


def test_the_same_number_again_is_no_success(table: str) -> None:
    """The loser wrote the same offsets; the winner wrote other files."""
    one, other = opened(table), opened(table)
    commit(one, [file(table, records([3]))], {"n": 4})
    with pytest.raises(CommitConflict):
        commit(other, [file(table, records([3]))], {"n": 4})
    assert rows(table) == [0, 1, 2, 3]


def test_an_opened_table_is_for_one_commit(table: str) -> None:
    state = opened(table)
    commit(state, [file(table, records([3]))], {"n": 4})
    with pytest.raises(CommitConflict):
        commit(state, [file(table, records([4]))], {"n": 5})


def test_writers_of_different_numbers_do_not_meet(table: str) -> None:
    one, other = opened(table), opened(table)
    commit(one, [file(table, records([0], partition=1))], {"a": 1})
    commit(other, [file(table, records([0], partition=2))], {"b": 1})
    now = opened(table)
    assert (now.number("a"), now.number("b"), now.number("n")) == (1, 1, 3)


def test_a_newer_version_that_another_thread_sees_first_is_none_that_went_back(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*given: Any, **named: Any) -> DeltaTable:
        found = DeltaTable(*given, **named)
        monkeypatch.setattr(tables, "DeltaTable", DeltaTable)
        commit(opened(table), [], {"n": 4})
        opened(table)
        return found

    commit(opened(table), [], {"m": 1})
    tables.forget(table)
    monkeypatch.setattr(tables, "DeltaTable", slow)
    assert opened(table).version == 1
    assert opened(table).version == 2


def test_the_newest_version_is_read_once(table: str) -> None:
    before = opened(table)
    assert before.number("n") == 3 and before.number("m") is None
    assert opened(table) is before
    commit(opened(table), [], {"m": 1})
    commit(opened(table), [], {"n": 4})
    commit(opened(table), [], {"o": 5})
    now = opened(table)
    assert now is opened(table) and now is not before
    assert [now.number(name) for name in "mno"] == [now.delta.transaction_version(name) for name in "mno"] == [1, 4, 5]
    assert before.number("n") == 3


def test_all_numbers_come_from_one_replay_of_the_log(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic of a hundred partitions has a thousand numbers. They are in a checkpoint and in entries after it."""
    commit(opened(table), [], {f"next:{n}": n for n in range(500)})
    opened(table).delta.create_checkpoint()
    commit(opened(table), [], {f"next:{n}": 1000 + n for n in range(0, 500, 2)})
    tables._newest.clear()  # pyright: ignore[reportPrivateUsage]  # as a new process
    reads: list[str] = []
    real = log.storage.filesystem
    monkeypatch.setattr(log.storage, "filesystem", lambda uri: (reads.append(uri), real(uri))[1])
    now = opened(table)
    reads.clear()
    assert [now.number(f"next:{n}") for n in range(500)] == [n + 1000 * (n % 2 == 0) for n in range(500)]
    assert now.number("n") == 3 and now.number("m") is None
    assert len(reads) <= 5
    assert all(now.delta.transaction_version(f"next:{n}") == now.number(f"next:{n}") for n in (0, 1, 499))


@pytest.mark.parametrize("last", ["", "{", '{"version": 99}', None])
def test_numbers_are_read_without_a_right_last_checkpoint(table: str, last: str | None) -> None:
    opened(table).delta.create_checkpoint()
    commit(opened(table), [], {"m": 1})
    told = Path(table, "_delta_log", "_last_checkpoint")
    told.unlink() if last is None else told.write_text(last)
    assert log.numbers(table, 1) | {"zync:files": 0} == {"n": 3, "m": 1, "zync:files": 0}


def test_a_field_name_with_a_line_separator_ends_no_line_of_the_log(uri: str) -> None:
    """JSON writes U+0085 and U+2028 as they are, and Python takes them for the ends of lines."""
    name = "line\u2028and\u0085line"
    create_table(uri, SCHEMA, "test", [], {"n": 1})
    widened = widen(opened(uri), pa.schema([("value", pa.struct([("id", pa.int64()), (name, pa.int64())]))]))
    commit = log.entry(uri, widened.version)
    assert commit is not None and "operation" in commit.info
    assert widened.schema.field("value").type.get_field_index(name) == 1


def test_a_commit_does_not_clean_the_log_up(table: str) -> None:
    """It would list the whole log. The clean-up is upkeep's."""
    opened(table).delta.alter.set_table_properties({"delta.logRetentionDuration": "interval 0 seconds"})
    opened(table).delta.create_checkpoint()
    for number in range(4, 6):
        commit(opened(table), [], {"n": number})
        widen(opened(table), wider(*((f"c{n}", pa.string()) for n in range(4, number + 1))))
    assert Path(table, "_delta_log", f"{0:020d}.json").exists()


def foreign_changes() -> dict[str, Callable[[str], object]]:
    return {
        "delete": lambda uri: DeltaTable(uri).delete("kafka.offset = 1"),
        "update": lambda uri: DeltaTable(uri).update({"key": "'other'"}, predicate="kafka.offset = 1"),
        "append": lambda uri: write_deltalake(uri, DeltaTable(uri).to_pyarrow_table(), mode="append"),
        "optimize": lambda uri: DeltaTable(uri).optimize.compact(),
        "restore": lambda uri: DeltaTable(uri).restore(0),
    }


@pytest.mark.parametrize("change", foreign_changes())
def test_nothing_is_committed_onto_files_that_another_program_changed(table: str, change: str) -> None:
    """Also after the log forgot who committed, and after a commit of ours that rebased onto the change."""
    commit(opened(table), [file(table, records([3]))], {"n": 4})
    late = opened(table)
    own = late.version
    foreign_changes()[change](table)
    if change == "append":
        commit(late, [file(table, records([0], partition=1))], {"p": 1})
    opened(table).delta.create_checkpoint()
    for entry in sorted(Path(table, "_delta_log").glob("*.json"))[:-1]:
        entry.unlink()
    tables._newest.clear()  # pyright: ignore[reportPrivateUsage]  # as a new process
    before = rows(table)
    with pytest.raises(TableDamaged, match="its files differ from the files that zync committed"):
        commit(opened(table), [file(table, records([4]))], {"n": 5})
    assert rows(table) == before
    assert own == 1


def test_a_table_that_is_restored_to_our_last_version_goes_on(table: str) -> None:
    own = opened(table).version
    DeltaTable(table).delete("kafka.offset = 1")
    with pytest.raises(TableDamaged, match=f"version 1 .DELETE. to it. Restore version {own}") as told:
        commit(opened(table), [file(table, records([3]))], {"n": 4})
    text = str(told.value)
    assert "VACUUM" not in text
    subprocess.run([sys.executable, *shlex.split(text.split("Run: python ")[1])], check=True)
    commit(opened(table), [file(table, records([3]))], {"n": 4})
    assert rows(table) == [0, 1, 2, 3]


def test_a_table_that_another_program_vacuumed_has_another_cure(table: str) -> None:
    DeltaTable(table).optimize.compact()
    DeltaTable(table).delete("kafka.offset = 1")
    DeltaTable(table).vacuum(0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(
        TableDamaged, match=r"A VACUUM since may have removed its files: .* begin anew, with other pools"
    ):
        commit(opened(table), [file(table, records([3]))], {"n": 4})


def test_a_file_that_a_vacuum_removed_before_its_commit_is_not_committed(table: str) -> None:
    before = opened(table)
    lost = file(table, records([3]))
    DeltaTable(table).vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    with pytest.raises(CommitConflict, match=f"file {lost.path} was removed before its commit"):
        commit(before, [lost], {"n": 4})
    commit(opened(table), [file(table, records([3]))], {"n": 4})
    assert rows(table) == [0, 1, 2, 3]


def test_commits_of_ours_that_rebase_onto_each_other_change_nothing_that_is_foreign(table: str) -> None:
    old = opened(table).files
    ingest, compaction, replay = opened(table), opened(table), opened(table)
    commit(ingest, [file(table, records([3]))], {"next:0": 4, "began:0": 3})
    commit(compaction, [file(table, records([0, 1, 2]))], {"compacted": 1}, removals=old, rewritten=True)
    commit(replay, [file(table, records([9]))], {"replay": 1})
    widen(opened(table), wider(("city", pa.string())))
    commit(opened(table), [file(table, records([4]))], {"next:0": 5})
    assert rows(table) == [0, 1, 2, 3, 4, 9]


def test_a_table_from_before_sums_were_kept_goes_on_and_has_one_from_then_on(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tampering, "first_numbers", lambda files: {})
        create_table(uri, SCHEMA, "test", [file(uri, records([0, 1, 2]))], {"n": 3})
    DeltaTable(uri).optimize.compact()
    commit(opened(uri), [file(uri, records([3]))], {"n": 4})
    commit(opened(uri), [file(uri, records([4]))], {"n": 5})
    DeltaTable(uri).delete("kafka.offset = 3")
    with pytest.raises(TableDamaged):
        commit(opened(uri), [file(uri, records([5]))], {"n": 6})


@pytest.fixture
def older_version(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``commit`` as a version of zync without sums does it."""

    def commit_without_a_sum(state: LakeTable, files: Sequence[DataFile], numbers: dict[str, int], **more: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(tampering, "sum_numbers", lambda *_: {})
            patch.setattr(tampering, "check", lambda _: None)
            commit(state, files, numbers, **more)

    return commit_without_a_sum


def forget_log(uri: str) -> None:
    """Leave nothing of the log but the newest version, and open as a new process."""
    opened(uri).delta.create_checkpoint()
    for entry in sorted(Path(uri, "_delta_log").glob("*.json"))[:-1]:
        entry.unlink()
    tables._newest.clear()  # pyright: ignore[reportPrivateUsage]


def test_commits_of_an_older_version_are_ours_and_the_sum_begins_anew(
    table: str, older_version: Callable[..., None]
) -> None:
    commit(opened(table), [file(table, records([3]))], {"n": 4})
    older_version(opened(table), [file(table, records([4]))], {"n": 5})
    late, replay = opened(table), opened(table)
    older_version(
        opened(table), [file(table, records([5]))], {"n": 6}, removals=opened(table).files[:1], rewritten=True
    )
    tampering.check(opened(table))
    # Both begin the sum anew, so one of them is refused; the other one was rebased onto a commit without a sum.
    commit(late, [file(table, records([0], partition=1))], {"p": 1})
    with pytest.raises(CommitConflict):
        commit(replay, [file(table, records([9]))], {"replay": 1})
    commit(opened(table), [file(table, records([6]))], {"n": 7})
    forget_log(table)
    commit(opened(table), [file(table, records([7]))], {"n": 8})
    assert tampering.is_untouched(opened(table))
    DeltaTable(table).delete("kafka.offset = 7")
    with pytest.raises(TableDamaged):
        commit(opened(table), [file(table, records([8]))], {"n": 9})


@pytest.mark.parametrize("unknown", ["missing", "delete before", "delete after"])
def test_beside_commits_of_an_older_version_another_program_is_found(
    table: str, older_version: Callable[..., None], unknown: str
) -> None:
    commit(opened(table), [file(table, records([3]))], {"n": 4})
    if unknown == "delete before":
        DeltaTable(table).delete("kafka.offset = 1")
    older_version(opened(table), [file(table, records([4]))], {"n": 5})
    older_version(opened(table), [file(table, records([5]))], {"n": 6})
    if unknown == "delete after":
        DeltaTable(table).delete("kafka.offset = 1")
    if unknown == "missing":
        forget_log(table)
    with pytest.raises(TableDamaged, match="its files differ from the files that zync committed"):
        commit(opened(table), [file(table, records([6]))], {"n": 7})


@pytest.mark.parametrize("gone", [1, 2, 5])
def test_a_commit_that_is_late_for_a_cleaned_log_is_a_conflict(table: str, gone: int) -> None:
    """delta-rs looks for conflicts in the entries from the version on that the commit is based on."""
    late = opened(table)
    for number in range(5):
        commit(opened(table), [file(table, records([3 + number]))], {"n": 4 + number})
    opened(table).delta.create_checkpoint()
    for version in range(gone):
        Path(table, "_delta_log", log.name(version)).unlink()
    for late_commit in (
        lambda: commit(late, [file(table, records([0], partition=1))], {"p": 1}),
        lambda: widen(late, wider(("city", pa.string()))),
    ):
        with pytest.raises(CommitConflict, match=r"based on version 0, .* version 5, .*run again"):
            late_commit()
    assert opened(table).version == 5
    commit(opened(table), [file(table, records([0], partition=1))], {"p": 1})
    assert rows(table) == [0, 0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.slow
def test_a_commit_costs_the_same_however_many_there_were(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted are the log entries that are read: one for each commit, checkpoints or not, and never the whole log."""
    commit(opened(table), [], {"m": 0})
    assert opened(table).number("m") == 0
    read: list[int] = []
    entries = log.entries

    def counted(uri: str, first: int, last: int) -> Iterator[log.LogEntry]:
        read.append(last - first + 1)
        return entries(uri, first, last)

    def whole(*given: Any, **named: Any) -> DeltaTable:
        raise AssertionError("the whole log is read")

    with monkeypatch.context() as patch:
        patch.setattr(log, "entries", counted)
        patch.setattr(tables, "DeltaTable", whole)
        patch.setattr("zync_assets.lake.log.list_files", whole)
        patch.setattr("zync_assets.lake.log.DeltaTable", whole)
        patch.setattr(log, "numbers", whole)
        for number in range(3, 108):
            before = opened(table)
            removed = [item for item in before.files if item.last == number - 50]
            commit(before, [file(table, records([number]))], {"n": number}, removals=removed)
            assert opened(table).number("n") == number
    assert set(read) == {1}
    assert len(read) == 105
    assert sorted(known(opened(table))) == sorted(known(LakeTable(table, DeltaTable(table))))


def test_what_other_processes_committed_is_read_though_the_log_was_cleaned(table: str) -> None:
    commit(opened(table), [file(table, records([3]))], {"n": 3})
    for number in range(4, 9):
        commit(LakeTable(table, DeltaTable(table)), [file(table, records([number]))], {"o": number})
    DeltaTable(table).create_checkpoint()
    for version in range(5):
        Path(table, "_delta_log", log.name(version)).unlink()
    now = opened(table)
    assert (now.version, now.number("n"), now.number("o")) == (6, 3, 8)
    assert sorted(known(now)) == sorted(known(LakeTable(table, DeltaTable(table))))
    commit(now, [file(table, records([9]))], {"n": 9})
    assert rows(table) == list(range(10))


def test_a_commit_after_a_hole_in_a_cleaned_log_is_a_conflict_once(table: str) -> None:
    """A clean-up that was killed may have removed the entry after the version that this process opened last."""
    opened(table)
    for number in range(3, 8):
        commit(LakeTable(table, DeltaTable(table)), [file(table, records([number]))], {"n": number + 1})
    tables._versions[table] = 0  # pyright: ignore[reportPrivateUsage]  # another process made these commits
    DeltaTable(table).create_checkpoint()
    for version in (1, 2):
        Path(table, "_delta_log", log.name(version)).unlink()
    with pytest.raises(CommitConflict, match="log entries between them were cleaned up"):
        commit(opened(table), [file(table, records([3]))], {"n": 4})
    assert (opened(table).version, opened(table).number("n")) == (5, 8)
    commit(opened(table), [file(table, records([8]))], {"n": 9})
    assert rows(table) == list(range(9))


def test_after_a_commit_that_failed_the_next_one_begins_with_a_new_object(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object may keep a token of a store that ran out."""
    first = opened(table)
    real = DeltaTable.create_write_transaction

    def fail(self: DeltaTable, *args: Any, **named: Any) -> None:
        if self is stale:
            raise OSError("token has expired")
        real(self, *args, **named)

    stale = first.delta
    monkeypatch.setattr(DeltaTable, "create_write_transaction", fail)
    with pytest.raises(LakeError, match="token has expired"):
        commit(opened(table), [file(table, records([3]))], {"n": 4})
    commit(opened(table), [file(table, records([3]))], {"n": 4})
    assert rows(table) == [0, 1, 2, 3]


def test_a_table_that_lost_the_last_commit_of_this_process_went_back(table: str) -> None:
    """The process has not opened the table since its commit."""
    commit(opened(table), [file(table, records([3]))], {"n": 4})
    commit(opened(table), [file(table, records([4]))], {"n": 5})
    Path(table, "_delta_log", log.name(2)).unlink()
    with pytest.raises(LakeError, match="went back: it is at version 1, and was at 2"):
        opened(table)


@pytest.mark.parametrize("other", ["widen", "property", "restore", "delete", "vacuum", "compact", "overwrite"])
def test_what_another_program_committed_after_a_commit_is_as_a_whole_reading_finds_it(table: str, other: str) -> None:
    for number in (3, 4):
        state = opened(table)
        assert state.number("n") == number
        commit(state, [file(table, records([number]))], {"n": number + 1})
    found = DeltaTable(table)
    match other:
        case "widen":
            widen(LakeTable(table, found), wider(("city", pa.string())))
        case "property":
            found.alter.set_table_properties({"delta.logRetentionDuration": "interval 3 hours"})
        case "restore":
            found.restore(1)
        case "delete":
            found.delete("kafka.offset = 1")
        case "vacuum":
            found.vacuum(0, dry_run=False, enforce_retention_duration=False)
        case "compact":
            found.optimize.compact()
        case _:
            write_deltalake(table, records([9]), mode="overwrite", schema_mode="overwrite")
    now, whole = opened(table), LakeTable(table, DeltaTable(table))
    assert now.version == whole.version
    assert sorted(known(now)) == sorted(known(whole))
    assert (now.numbers, now.schema) == (whole.numbers, whole.schema)
    assert now.metadata.configuration == whole.metadata.configuration
    if other in ("restore", "delete", "compact", "overwrite"):
        with pytest.raises(TableDamaged):
            commit(now, [file(table, records([5]))], {"n": 6})


def test_threads_that_commit_to_one_table_lose_and_double_nothing(table: str) -> None:
    """Two share a number, a third has its own. All use the objects that this process keeps."""

    def write(name: str) -> None:
        done = 0
        while done < 8:
            state = opened(table)
            number = state.number(name) or 0
            with suppress(CommitConflict):
                commit(state, [file(table, records([number], partition=len(name)))], {name: number + 1})
                done += 1
                assert (opened(table).number(name) or 0) > number

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, ["o", "o", "oo"]))
    now = opened(table)
    assert (now.number("o"), now.number("oo")) == (16, 8)
    assert rows(table) == sorted([0, 1, 2, *range(16), *range(8)])
    assert sorted(known(now)) == sorted(known(LakeTable(table, DeltaTable(table))))
    assert tampering.is_untouched(now)


def known(state: LakeTable) -> list[tuple[object, ...]]:
    """Files with all that is known of them, as often as one is in the table."""
    return [astuple(replace(item, arrival=0.0)) for item in state.files]


def test_another_table_at_the_same_place_and_version_is_read(table: str) -> None:
    before = opened(table)
    shutil.rmtree(table)
    create_table(table, SCHEMA, "another", [file(table, records([7, 8, 9]))], {"n": 3})
    assert opened(table).delta.metadata().id != before.delta.metadata().id
    assert rows(table) == [7, 8, 9]


def test_widening_leaves_what_others_have_opened_as_it_was(table: str) -> None:
    before = opened(table)
    schema = before.schema
    after = widen(opened(table), wider(("city", pa.string())))
    assert (before.version, before.schema) == (0, schema)
    assert after.version == 1 and after.number("n") == 3


def test_of_two_creations_one_wins(uri: str) -> None:
    create_table(uri, SCHEMA, "first", [file(uri, records([0]))], {"n": 1})
    with pytest.raises(CommitConflict):
        create_table(uri, SCHEMA, "second", [file(uri, records([0, 1]))], {"n": 2})
    assert rows(uri) == [0]


@pytest.mark.parametrize("error", [DeltaError("post-commit hook"), OSError("disk full")])
def test_a_commit_that_happened_before_its_exception_counts(
    table: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    real = DeltaTable.create_write_transaction

    def commit_and_fail(self: DeltaTable, *args: Any, **named: Any) -> None:
        real(self, *args, **named)
        raise error

    monkeypatch.setattr(DeltaTable, "create_write_transaction", commit_and_fail)
    commit(opened(table), [file(table, records([3]))], {"n": 4})
    assert rows(table) == [0, 1, 2, 3]


def test_an_exception_before_the_commit_is_an_error(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: DeltaTable, *args: Any, **named: Any) -> None:
        raise DeltaError("no space left")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", fail)
    with pytest.raises(LakeError, match="nothing of it is visible: no space left"):
        commit(opened(table), [file(table, records([3]))], {"n": 4})


def test_numbers_survive_a_checkpoint_and_the_log_s_cleaning(table: str) -> None:
    commit(opened(table), [file(table, records([3]))], {"m": 1})
    state = opened(table)
    state.delta.alter.set_table_properties(
        {"delta.logRetentionDuration": "interval 0 seconds", "delta.enableExpiredLogCleanup": "true"}
    )
    state = opened(table)
    state.delta.create_checkpoint()
    state.delta.cleanup_metadata()
    log = Path(table) / "_delta_log"
    assert not list(log.glob("*0000.json")), "the log was not cleaned: this test shows nothing"
    now = opened(table)
    assert (now.number("n"), now.number("m")) == (3, 1)
    commit(now, [file(table, records([4]))], {"n": 5})
    assert rows(table) == [0, 1, 2, 3, 4]


def wider(*fields: tuple[str, pa.DataType]) -> pa.Schema:
    value = pa.struct([("id", pa.int64()), *fields])
    return SCHEMA.set(SCHEMA.get_field_index("value"), pa.field("value", value))


def test_widening_adds_nested_fields_and_keeps_what_is_there(table: str) -> None:
    nested = wider(("address", pa.struct([("city", pa.string())])))
    now = widen(opened(table), nested)
    again = widen(
        now, wider(("address", pa.struct([("city", pa.string()), ("zip", pa.string())])), ("vip", pa.bool_()))
    )
    kind = again.schema.field("value").type
    assert [kind.field(i).name for i in range(kind.num_fields)] == ["id", "address", "vip"]
    assert [field.name for field in kind.field("address").type] == ["city", "zip"]
    assert rows(table) == [0, 1, 2]
    assert again.number("n") == 3


def test_what_is_wide_enough_is_not_widened(table: str) -> None:
    state = opened(table)
    assert widen(state, SCHEMA) is state


def test_a_type_is_not_changed_by_widening(table: str) -> None:
    text = pa.schema([pa.field("value", pa.struct([("id", pa.string())]))])
    with pytest.raises(SchemaError, match="value"):
        widen(opened(table), text)
    assert opened(table).schema.field("value").type.field("id").type == pa.int64()


def write_log(folder: Path, protocol: dict[str, Any], configuration: dict[str, str]) -> None:
    """A table's first log entry, as another program may have written it."""
    (folder / "_delta_log").mkdir(parents=True)
    field = {"name": "x", "type": "long", "nullable": True, "metadata": {}}
    schema = json.dumps({"type": "struct", "fields": [field]})
    metadata = {
        "id": "00000000-0000-0000-0000-000000000000",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": schema,
        "partitionColumns": [],
        "configuration": configuration,
        "createdTime": 0,
    }
    entries = [{"protocol": protocol}, {"metaData": metadata}]
    path = folder / "_delta_log" / f"{0:020d}.json"
    path.write_text("\n".join(json.dumps(entry) for entry in entries))


def protocol(reader: int, features: Sequence[str] | None = None) -> dict[str, Any]:
    if features is None:
        return {"minReaderVersion": reader, "minWriterVersion": 5}
    return {
        "minReaderVersion": reader, "minWriterVersion": 7, "readerFeatures": features, "writerFeatures": features,
    }  # fmt: skip


@pytest.mark.parametrize(
    "asked", [protocol(2), protocol(3, ["deletionVectors"]), protocol(3, ["timestampNtz", "columnMapping"])]
)
def test_a_table_that_this_package_could_read_wrongly_is_refused(tmp_path: Path, asked: dict[str, Any]) -> None:
    write_log(tmp_path / "t", asked, {})
    with pytest.raises(TableUnsupported, match="reader version"):
        open_table(str(tmp_path / "t"))


def test_a_known_reader_feature_is_taken(tmp_path: Path) -> None:
    write_log(tmp_path / "t", protocol(3, ["timestampNtz"]), {})
    assert open_table(str(tmp_path / "t")) is not None


def test_a_table_that_forgets_its_numbers_is_refused(tmp_path: Path) -> None:
    write_log(tmp_path / "t", protocol(1), {"delta.setTransactionRetentionDuration": "interval 7 days"})
    with pytest.raises(TableUnsupported, match="setTransactionRetentionDuration"):
        open_table(str(tmp_path / "t"))


def test_a_log_that_is_no_log_is_a_lake_error(tmp_path: Path) -> None:
    folder = tmp_path / "t" / "_delta_log"
    folder.mkdir(parents=True)
    (folder / f"{0:020d}.json").write_text("{ not json")
    with pytest.raises(LakeError, match="Delta log"):
        tables.open_table(str(tmp_path / "t"))


def with_actions(uri: str, *actions: dict[str, Any]) -> None:
    """Another program commits."""
    version = opened(uri).version + 1
    Path(uri, "_delta_log", f"{version:020d}.json").write_text("".join(json.dumps(item) + "\n" for item in actions))


def asks(reader: int, writer: int, readers: Sequence[str] = (), writers: Sequence[str] = ()) -> dict[str, Any]:
    found: dict[str, Any] = {"minReaderVersion": reader, "minWriterVersion": writer}
    if writer == 7:
        found["writerFeatures"] = [*readers, *writers]
    if reader == 3:
        found["readerFeatures"] = list(readers)
    return {"protocol": found}


@pytest.mark.parametrize(
    "action",
    [
        asks(3, 7, ["deletionVectors"]),
        asks(3, 7, ["v2Checkpoint"]),
        asks(3, 7, ["fromTheFuture"]),
        asks(2, 5),
        asks(9, 12),
    ],
)
def test_a_table_that_can_t_be_read_rightly_is_not_read(table: str, action: dict[str, Any]) -> None:
    with_actions(table, action)
    with pytest.raises(TableUnsupported, match="Restore the table to a version from before that feature"):
        open_table(table)


@pytest.mark.parametrize("feature", ["fromTheFuture", "rowTracking", "icebergCompatV1"])
def test_a_feature_that_only_writers_must_know_is_no_conflict(table: str, feature: str) -> None:
    """Such an error looked like another writer's commit before, and was tried again for ever."""
    with_actions(table, asks(1, 7, writers=[feature]))
    with pytest.raises(TableUnsupported, match="could not be written, and nothing was committed"):
        commit(opened(table), [file(table, records([3]))], {"n": 4})
    assert rows(table) == [0, 1, 2]


@pytest.mark.parametrize("name", ["delta.constraints.low", "delta.appendOnly", "delta.enableChangeDataFeed"])
def test_a_property_that_writers_must_obey_is_refused(table: str, name: str) -> None:
    first = Path(table, "_delta_log", f"{0:020d}.json").read_text().splitlines()
    [found] = [json.loads(line) for line in first if "metaData" in line]
    found["metaData"]["configuration"] = {name: "true"}
    with_actions(table, asks(1, 4), found)
    with pytest.raises(TableUnsupported, match=f"property {name} = true"):
        commit(opened(table), [file(table, records([3]))], {"n": 4})
