"""Raw tables: data and next offsets are one commit, and a record's time never runs back across files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from zync_assets.errors import CommitConflict
from zync_assets.lake.log import DataFile, Order, list_files
from zync_assets.lake.raw import (
    ORDER,
    RawAdvance,
    RawState,
    WriterSchema,
    commit_advance,
    commit_replay_files,
    open_raw,
    raw_files,
    record_ranges,
    replay_name,
)
from zync_assets.lake.raw_files import LOWEST, ORDER_TYPE, order_bounds, time_floors
from zync_assets.lake.storage import raw_uri
from zync_assets.offsets import OffsetRange
from zync_assets_tests.lake.rows import SCHEMA, file, records

TOPIC = "shop.public.orders"


def put(
    lake: Path,
    before: RawState | None,
    offsets: range,
    partition: int = 0,
    schema: pa.Schema = SCHEMA,
    bad: Mapping[int, int] | None = None,
    topic_id: str = "id-1",
    writers: Sequence[WriterSchema] = (),
    orders: Sequence[Order] = (),
    domain: str | None = None,
) -> None:
    """Commit records at some offsets of a partition, which begins at 0. ``orders``: of each record."""
    known = before.first if before else {}
    uri = raw_uri(str(lake), "Raw", TOPIC)
    batch = records(list(offsets), partition=partition)
    if orders:
        batch = batch.append_column(ORDER, pa.array([{"high": a, "low": b} for a, b in orders], ORDER_TYPE))
        schema = schema.append(pa.field(ORDER, ORDER_TYPE))
    data = file(uri, batch)
    first = {} if partition in known else {partition: 0}
    until = {partition: offsets.stop}
    advance = RawAdvance(TOPIC, topic_id, schema, [data], first, until, bad=bad or {}, writers=writers, domain=domain)
    commit_advance(uri, before, replace(advance, orders={partition: orders[-1]} if orders else {}))


def state(lake: Path) -> RawState:
    found = open_raw(str(lake), "Raw", TOPIC)
    assert found is not None
    return found


def stored(lake: Path) -> list[tuple[int, int]]:
    found = DeltaTable(raw_uri(str(lake), "Raw", TOPIC)).to_pyarrow_table(columns=["kafka"]).to_pylist()
    return sorted((row["kafka"]["partition"], row["kafka"]["offset"]) for row in found)


def test_a_table_knows_its_topic_its_beginning_and_its_next_offsets(tmp_path: Path) -> None:
    assert open_raw(str(tmp_path), "Raw", TOPIC) is None
    put(tmp_path, None, range(5), partition=2)
    found = state(tmp_path)
    assert (found.first, found.next) == ({2: 0}, {2: 5})
    assert found.is_from("id-1")
    assert not found.is_from("id-2")


def test_partitions_are_added_and_go_on_by_themselves(tmp_path: Path) -> None:
    put(tmp_path, None, range(5))
    put(tmp_path, state(tmp_path), range(3), partition=11)
    put(tmp_path, state(tmp_path), range(5, 6))
    found = state(tmp_path)
    assert found.next == {0: 6, 11: 3}
    assert [(item.partition, item.first) for item in raw_files(found)] == [(0, 0), (0, 5), (11, 0)]


def test_quarantined_records_are_counted_over_all_commits(tmp_path: Path) -> None:
    put(tmp_path, None, range(5), bad={0: 2})
    put(tmp_path, state(tmp_path), range(5, 6))
    put(tmp_path, state(tmp_path), range(6, 7), bad={0: 1})
    assert state(tmp_path).bad == {0: 3}


def test_the_loser_of_a_race_leaves_nothing(tmp_path: Path) -> None:
    put(tmp_path, None, range(5))
    before = state(tmp_path)
    put(tmp_path, before, range(5, 8))
    with pytest.raises(CommitConflict):
        put(tmp_path, before, range(5, 9))
    assert state(tmp_path).next == {0: 8}
    assert stored(tmp_path) == [(0, offset) for offset in range(8)]


def test_the_loser_of_the_first_commit_leaves_nothing(tmp_path: Path) -> None:
    put(tmp_path, None, range(5))
    with pytest.raises(CommitConflict):
        put(tmp_path, None, range(4))
    assert stored(tmp_path) == [(0, offset) for offset in range(5)]


def test_widening_does_not_let_a_loser_through(tmp_path: Path) -> None:
    """It makes a commit of its own and opens the table anew; what came in between still counts."""
    put(tmp_path, None, range(5))
    before = state(tmp_path)
    put(tmp_path, before, range(5, 8))
    wide = SCHEMA.append(pa.field("more", pa.string()))
    with pytest.raises(CommitConflict):
        put(tmp_path, before, range(5, 9), schema=wide)
    assert stored(tmp_path) == [(0, offset) for offset in range(8)]
    put(tmp_path, state(tmp_path), range(8, 9), schema=wide)
    assert "more" in state(tmp_path).schema.names


def test_widening_does_not_let_a_writer_schema_take_the_number_of_another(tmp_path: Path) -> None:
    """A replay may bring one and leaves the next offsets as they are."""
    put(tmp_path, None, range(5))
    before = state(tmp_path)
    replay = file(before.table.uri, records([2]), replay_name(1))
    commit_replay_files(before, SCHEMA, [replay], [WriterSchema("value", 7, 0, 2, True)])
    wide = SCHEMA.append(pa.field("more", pa.string()))
    with pytest.raises(CommitConflict):
        put(tmp_path, before, range(5, 9), schema=wide, writers=[WriterSchema("value", 8, 0, 5, True)])
    assert [item.id for item in state(tmp_path).writers] == [7]


def test_files_of_a_range_are_those_that_may_hold_it(tmp_path: Path) -> None:
    put(tmp_path, None, range(5))
    put(tmp_path, state(tmp_path), range(5, 10))
    put(tmp_path, state(tmp_path), range(10), partition=1)
    found = state(tmp_path)

    def places(*ranges: OffsetRange) -> list[tuple[int | None, int | None]]:
        return [(item.partition, item.first) for item in raw_files(found, ranges)]

    assert places(OffsetRange(0, 4, 5)) == [(0, 0)]
    assert places(OffsetRange(0, 4, 6)) == [(0, 0), (0, 5)]
    assert places(OffsetRange(1, 9, 10)) == [(1, 0)]
    assert places(OffsetRange(0, 10, 20)) == []
    assert places() == []


def listed(times: list[list[int]]) -> list[DataFile]:
    return [
        DataFile(f"f{index}", 1, 1, 0, index, index, min_time=min(part), max_time=max(part))
        for index, part in enumerate(times)
    ]


def test_a_file_that_begins_below_an_earlier_file_s_end_is_lifted() -> None:
    assert time_floors(listed([[10, 20], [15, 18], [19, 30], [30, 31]])) == {"f1": 20, "f2": 20}


def test_partitions_do_not_carry_into_each_other() -> None:
    files = [DataFile("a", 1, 1, 0, 0, 0, 5, 9), DataFile("b", 1, 1, 1, 0, 0, 1, 2)]
    assert time_floors(files) == {}


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=4), min_size=1, max_size=6))
def test_carried_times_make_a_running_maximum_of_all_records(timestamps: list[list[int]]) -> None:
    def running(values: list[int]) -> list[int]:
        return [max(values[: place + 1]) for place in range(len(values))]

    within = [running(part) for part in timestamps]
    carried = time_floors(listed(within))
    lifted = [max(time, carried.get(f"f{index}", 0)) for index, part in enumerate(within) for time in part]
    assert lifted == running([time for part in timestamps for time in part])


def test_held_offsets_are_told_by_ranges_however_many_they_are(tmp_path: Path) -> None:
    """Only a file with gaps is read."""
    lake = str(tmp_path)
    uri = raw_uri(lake, "Raw", TOPIC)
    whole = DataFile("whole.parquet", 1, 4_000_000_000, 0, 100, 4_000_000_099)
    gaps = file(uri, records([3, 4, 7, 9]))
    other = file(uri, records([50], partition=1))
    files = [gaps, whole, other]
    commit_advance(uri, None, RawAdvance(TOPIC, "id", SCHEMA, files, {0: 0, 1: 50}, {0: 5_000_000_000, 1: 51}))
    state = open_raw(lake, "Raw", TOPIC)
    assert state is not None
    found = record_ranges(state, [OffsetRange(0, 0, 5_000_000_000)])
    assert found == [
        OffsetRange(0, 3, 5),
        OffsetRange(0, 7, 8),
        OffsetRange(0, 9, 10),
        OffsetRange(0, 100, 4_000_000_100),
    ]
    assert record_ranges(state, [OffsetRange(0, 4, 8)]) == [OffsetRange(0, 4, 5), OffsetRange(0, 7, 8)]
    parts = [OffsetRange(0, at, at + 1) for at in (4, 5, 6, 7, 8, 150, 151)]
    assert record_ranges(state, parts[::-1]) == [OffsetRange(0, 4, 5), OffsetRange(0, 7, 8), OffsetRange(0, 150, 152)]
    assert record_ranges(state, []) == []
    assert record_ranges(state, [OffsetRange(0, 4, 200)], release=8) == [
        OffsetRange(0, 9, 10),
        OffsetRange(0, 100, 200),
    ]


def test_a_table_from_before_orders_gets_them_with_the_next_batch(tmp_path: Path) -> None:
    put(tmp_path, None, range(2))
    assert (state(tmp_path).has_order, state(tmp_path).domain, state(tmp_path).orders) == (False, None, {})
    columns = state(tmp_path).schema
    put(tmp_path, state(tmp_path), range(2, 4), orders=[LOWEST, (5, 9)], domain="shop")
    put(tmp_path, state(tmp_path), range(4, 6), orders=[(6, 7), (7, 1)], domain="shop")
    put(tmp_path, state(tmp_path), range(3), partition=1, orders=[LOWEST] * 3, domain="shop")
    found = state(tmp_path)
    assert (found.has_order, found.domain, found.schema) == (True, "shop", columns)
    assert found.orders == {0: (7, 1), 1: LOWEST}
    bounds = [(None, None), (LOWEST, (5, 9)), ((6, 1), (7, 7)), (LOWEST, LOWEST)]
    assert [(item.min_order, item.max_order) for item in found.files] == bounds
    listing = sorted(list_files(found.table), key=lambda item: (item.partition or 0, item.first or 0))
    assert [(item.min_order, item.max_order) for item in listing] == bounds
    assert order_bounds(found.files[1:3]) == ((LOWEST[0], 0), (7, 9))
    assert order_bounds(found.files[:3]) == (None, (7, 9))


def test_the_last_domain_counts(tmp_path: Path) -> None:
    put(tmp_path, None, range(1), orders=[(1, 0)], domain="shop")
    domains: list[str | None] = []
    for number, domain in enumerate(["other", None, None, "shop", "shop"], 1):
        put(tmp_path, state(tmp_path), range(number, number + 1), orders=[(1, 0)], domain=domain)
        domains.append(state(tmp_path).domain)
    assert domains == ["other", None, None, "shop", "shop"]
