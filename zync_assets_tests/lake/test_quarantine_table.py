"""Quarantine: which entries count is decided by the raw table's commit, whatever other writers left beside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from zync_assets.audit.account import quarantined_offsets, read_quarantine
from zync_assets.errors import CommitConflict, TableDamaged
from zync_assets.lake.log import DataFile, list_files
from zync_assets.lake.quarantine_table import add, file_name, quarantine_files, withdraw
from zync_assets.lake.raw import RawAdvance, RawState, commit_advance, commit_replay_files, open_raw
from zync_assets.lake.snapshot import Snapshot
from zync_assets.lake.storage import quarantine_uri, raw_uri
from zync_assets.lake.tables import forget, open_table
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Input, Pipeline, SideFormat
from zync_assets_tests.lake.rows import SCHEMA, bad_records, file, records

PLACE = ("Raw", "shop.public.orders")


def written(lake: Path, attempt: int, *offsets: int, partition: int = 0) -> DataFile:
    return file(quarantine_uri(str(lake), *PLACE), bad_records(offsets, partition), file_name(attempt))


def state(lake: Path) -> RawState | None:
    return open_raw(str(lake), *PLACE)


def put(lake: Path, *files: DataFile) -> None:
    """The first half of an attempt."""
    add(str(lake), *PLACE, state(lake), files, lambda: None)


def commit(lake: Path, attempt: int, until: dict[int, int], bad: dict[int, int] | None = None) -> None:
    """The second half: the raw table goes on up to ``until``."""
    before = state(lake)
    known = before.next if before else {}
    first = {partition: 0 for partition in until if partition not in known}
    uri = raw_uri(str(lake), *PLACE)
    data = [file(uri, records([known.get(partition, 0)], partition=partition)) for partition in until]
    attempts = dict.fromkeys(until, attempt) if attempt else {}
    advance = RawAdvance(PLACE[1], "id-1", SCHEMA, data, first, until, bad=bad or {}, attempts=attempts)
    commit_advance(uri, before, advance)


def snapshot(lake: Path) -> Snapshot:
    form = SideFormat("json")
    inputs = (Input(PLACE[1], PLACE[0], form, form),)
    return Snapshot(Pipeline("small", lake / "small.yaml", {}, None, str(lake), {}, inputs, (), ()))


def files_of(lake: Path, upcoming: dict[int, int] | None = None) -> list[DataFile]:
    """The files whose entries count; none before the first ingest. ``upcoming``: other next offsets of the raw table."""
    found = state(lake)
    if found is None:
        return []
    found = found if upcoming is None else replace(found, next=upcoming)
    return quarantine_files(found, open_table(quarantine_uri(str(lake), *PLACE)))


def counted(lake: Path, upcoming: dict[int, int] | None = None) -> list[tuple[int | None, int | None]]:
    return [(item.partition, item.first) for item in files_of(lake, upcoming)]


def listed(lake: Path) -> list[int | None]:
    opened = open_table(quarantine_uri(str(lake), *PLACE))
    assert opened is not None
    return sorted(item.first or 0 for item in list_files(opened))


def test_nothing_quarantined_makes_no_table(tmp_path: Path) -> None:
    put(tmp_path)
    assert not Path(quarantine_uri(str(tmp_path), *PLACE)).exists()
    assert counted(tmp_path) == []


def test_an_entry_counts_from_the_raw_table_s_commit_on(tmp_path: Path) -> None:
    put(tmp_path, written(tmp_path, 1, 3))
    assert counted(tmp_path) == []
    commit(tmp_path, 1, {0: 10})
    assert counted(tmp_path) == [(0, 3)]
    assert counted(tmp_path, {0: 2}) == []


def test_what_a_killed_attempt_left_never_counts_and_what_counts_stays(tmp_path: Path) -> None:
    put(tmp_path, written(tmp_path, 1, 3), written(tmp_path, 1, 4, partition=1))
    put(tmp_path, written(tmp_path, 2, 3))
    commit(tmp_path, 2, {0: 10})
    # Partition 1 went on later, by an attempt that found another bad record.
    put(tmp_path, written(tmp_path, 3, 11), written(tmp_path, 3, 7, partition=1))
    commit(tmp_path, 3, {0: 20, 1: 20})
    assert counted(tmp_path) == [(0, 3), (0, 11), (1, 7)]


def test_an_attempt_without_bad_records_leaves_none_of_another_s(tmp_path: Path) -> None:
    put(tmp_path, written(tmp_path, 1, 3, 12))
    put(tmp_path)
    commit(tmp_path, 0, {0: 10})
    assert counted(tmp_path) == []


def test_nobody_takes_out_what_may_be_committed_yet(tmp_path: Path) -> None:
    put(tmp_path, written(tmp_path, 1, 3))
    put(tmp_path, written(tmp_path, 2, 2, 5))
    put(tmp_path)
    # The first one was slow, not dead.
    commit(tmp_path, 1, {0: 4})
    assert counted(tmp_path) == [(0, 3)]


def test_what_was_left_over_is_taken_out_before_the_next_batch(tmp_path: Path) -> None:
    put(tmp_path, written(tmp_path, 1, 3))
    put(tmp_path, written(tmp_path, 2, 2, 5))
    put(tmp_path, written(tmp_path, 4, 6))
    commit(tmp_path, 1, {0: 4})
    assert listed(tmp_path) == [2, 3, 6]
    put(tmp_path, written(tmp_path, 3, 5))
    assert listed(tmp_path) == [3, 5, 6]
    commit(tmp_path, 3, {0: 8})
    assert counted(tmp_path) == [(0, 3), (0, 5)]
    put(tmp_path)
    assert listed(tmp_path) == [3, 5]


def test_the_loser_of_a_race_takes_its_own_out(tmp_path: Path) -> None:
    mine = written(tmp_path, 2, 2, 5)
    put(tmp_path, written(tmp_path, 1, 3))
    put(tmp_path, mine)
    commit(tmp_path, 1, {0: 4})
    for _ in range(2):
        withdraw(str(tmp_path), *PLACE, [mine])
        assert listed(tmp_path) == [3]


def test_of_two_that_add_at_once_one_is_refused(tmp_path: Path) -> None:
    put(tmp_path, written(tmp_path, 1, 3))
    with pytest.raises(CommitConflict):
        add(str(tmp_path), *PLACE, None, [written(tmp_path, 2, 4)], lambda: put(tmp_path, written(tmp_path, 3, 4)))
    commit(tmp_path, 1, {0: 10})
    assert counted(tmp_path) == [(0, 3)]


@pytest.mark.parametrize("earlier", [None, 7])
def test_what_a_paused_writer_adds_after_others_went_on_never_counts(tmp_path: Path, earlier: int | None) -> None:
    """It was paused between its look at the raw table and its commit, and is killed after it."""
    if earlier:
        put(tmp_path, written(tmp_path, earlier, 1))
    before = state(tmp_path)

    def others() -> None:
        commit(tmp_path, earlier or 0, {0: 10})
        commit(tmp_path, 0, {0: 20})

    add(str(tmp_path), *PLACE, before, [written(tmp_path, 2, 3)], others)
    assert counted(tmp_path) == ([(0, 1)] if earlier else [])
    put(tmp_path, written(tmp_path, 3, 25))
    assert listed(tmp_path) == ([1, 25] if earlier else [25])
    commit(tmp_path, 3, {0: 30})
    commit(tmp_path, 0, {0: 40})
    assert counted(tmp_path) == ([(0, 1), (0, 25)] if earlier else [(0, 25)])


def test_what_another_program_does_to_the_side_table_is_an_error(tmp_path: Path) -> None:
    put(tmp_path, written(tmp_path, 1, 3), written(tmp_path, 1, 4))
    commit(tmp_path, 1, {0: 10}, {0: 2})
    uri = quarantine_uri(str(tmp_path), *PLACE)
    ours = DeltaTable(uri).version()
    DeltaTable(uri).delete("kafka.offset = 3")
    with pytest.raises(TableDamaged, match=r"it holds 1 entries of partition 0, and 2 were put there.*DELETE"):
        counted(tmp_path)
    DeltaTable(uri).restore(ours)
    assert counted(tmp_path) == [(0, 3), (0, 4)]
    DeltaTable(uri).update({"error": "'other'"}, predicate="kafka.offset = 3")
    with pytest.raises(TableDamaged, match=r"its files differ.*UPDATE.*Restore version"):
        counted(tmp_path)
    DeltaTable(uri).restore(ours)
    Path(uri).rename(tmp_path / "away")
    forget(uri)
    with pytest.raises(TableDamaged, match="the quarantine table is missing"):
        counted(tmp_path)


def test_a_check_of_a_batch_reads_the_side_files_of_the_batch_alone(tmp_path: Path) -> None:
    for attempt, (bad, until) in enumerate([((1, 2), 5), ((6, 7, 8), 10), ((12,), 15)], 1):
        put(tmp_path, written(tmp_path, attempt, *bad))
        commit(tmp_path, attempt, {0: until}, {0: len(bad)})
    before = state(tmp_path)
    assert before is not None
    commit_replay_files(before, SCHEMA, [file(before.table.uri, records([7]), "replay-1")], [])
    now = state(tmp_path)
    assert now is not None
    every = [OffsetRange(0, 0, 15)]
    assert quarantined_offsets(snapshot(tmp_path), PLACE[1], every).tolist() == [1, 2, 6, 8, 12]
    assert read_quarantine(snapshot(tmp_path), PLACE[1], every).offsets(0).tolist() == [1, 2, 6, 8, 12]
    uri = quarantine_uri(str(tmp_path), *PLACE)
    for item in files_of(tmp_path):
        if item.first != 6:
            Path(uri, item.path).unlink()
    assert quarantined_offsets(snapshot(tmp_path), PLACE[1], [OffsetRange(0, 3, 8)]).tolist() == [6]
    Path(uri).rename(tmp_path / "away")
    assert quarantined_offsets(snapshot(tmp_path), PLACE[1], []).tolist() == []
