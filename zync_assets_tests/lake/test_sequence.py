"""The sequence of raw records across partitions, and the ends of batches in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zync_assets.errors import LakeError
from zync_assets.lake import storage
from zync_assets.lake.raw import RawAdvance, RawState, commit_advance, open_raw
from zync_assets.lake.raw_files import KAFKA_TYPE, LOWEST, RangeWriter, raw_schema
from zync_assets.lake.sequence import (
    END,
    OrderKey,
    OrderSpan,
    after,
    batch_of,
    bounded,
    highest_below,
    keys_at,
    late_offsets,
    offset_at,
    spread,
    time_batch,
)
from zync_assets.offsets import OffsetRange, new_ranges, offset_count
from zync_assets_tests.lake.streams import orders, whole


def test_a_key_ends_every_stream_at_one_place_of_the_sequence() -> None:
    found = [(LOWEST), (3, 0), (3, 0), (3, 1), (4, 0)]
    streams = [whole(name, place, found) for place, name in enumerate("abc")]
    assert [offset_at(stream, OrderKey(3), orders) for stream in streams] == [1, 1, 1]
    assert [offset_at(stream, OrderKey(*after((3, 0))), orders) for stream in streams] == [3, 3, 3]
    assert [offset_at(stream, OrderKey(3, 0, 1, 0, 2), orders) for stream in streams] == [3, 2, 1]
    assert [offset_at(stream, OrderKey(*END), orders) for stream in streams] == [5, 5, 5]
    assert highest_below(streams[0], 3, orders) == (3, 0)
    assert highest_below(streams[0], 5, orders) == (4, 0)
    assert highest_below(whole("a", 0, []), 5, orders) is None


def test_records_below_an_order_are_late_but_for_snapshots() -> None:
    stream = whole("a", 0, [LOWEST, (1, 0), (2, 0), (2, 0), (5, 0)], seen=0)
    assert late_offsets(stream, (1, 0), 5, orders) == (1, 1)
    assert late_offsets(stream, (5, 0), 5, orders) == (1, 4)
    assert late_offsets(stream, (5, 0), 3, orders) == (1, 3)
    assert late_offsets(stream, (5, 0), 1, orders) == (1, 1)
    assert late_offsets(stream, (5, 0), 0, orders) == (0, 0)


spans = st.lists(
    st.builds(
        lambda low, more, records, place, first: OrderSpan(
            low, max(low, (low[0] + more[0], more[1])), records, place, 0, first * 1000, first * 1000 + records
        ),
        st.one_of(st.just(LOWEST), st.tuples(st.integers(-5, 5), st.integers(0, 3))),
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
        st.integers(1, 900),
        st.integers(0, 2),
        st.integers(0, 3),
    ),
    max_size=12,
)


@given(spans, st.lists(st.integers(1, 5000), min_size=1, max_size=6))
def test_keys_ascend_and_lie_within_the_spans(found: list[OrderSpan], counts: list[int]) -> None:
    keys = keys_at(found, sorted(counts))
    assert keys == sorted(set(keys))
    for key in keys:
        assert min(span.low for span in found)[0] <= key.high <= max(span.high for span in found)[0]


@given(
    st.lists(
        st.tuples(st.integers(0, 10**13), st.integers(0, 10**9), st.integers(0, 5_000_000)), min_size=1, max_size=12
    )
)
def test_the_records_below_a_value_are_the_sum_over_all_spans(found: list[tuple[int, int, int]]) -> None:
    parts = [(low, low + length, float(records)) for low, length, records in found]

    def below(low: int, high: int, records: float, point: int) -> float:
        if low == high:
            return 0.0 if point <= low else records
        return records * min(1.0, max(0.0, (point - low) / (high - low)))

    points, reached, at = spread(parts)
    assert points == sorted({value for low, high, _ in parts for value in (low, high)})
    # Of buckets of 150,000.
    assert np.allclose(reached, [sum(below(*part, point) for part in parts) for point in points], rtol=1e-6, atol=100.0)
    assert list(at) == [sum(records for low, high, records in parts if low == high == point) for point in points]


def test_keys_divide_evenly_whatever_part_of_the_order_records_share() -> None:
    """The orders differ, or belong to one transaction, or are those of a snapshot, which are equal."""
    apart = [OrderSpan((0, 0), (1000, 0), 1000.0)]
    assert [key.high for key in keys_at(apart, [250, 500])] == [250, 500]
    same_high = [OrderSpan((7, 0), (7, 1000), 1000.0), OrderSpan((7, 0), (7, 1000), 1000.0, 1)]
    assert [key[:2] for key in keys_at(same_high, [500, 1000])] == [(7, 250), (7, 500)]
    tied = [OrderSpan(LOWEST, LOWEST, 1000.0, place, 0, 5000, 6000) for place in (1, 0)]
    assert keys_at(tied, [250, 1500]) == [OrderKey(*LOWEST, 0, 0, 5250), OrderKey(*LOWEST, 1, 0, 5500)]
    mixed = [OrderSpan(LOWEST, LOWEST, 1000.0, 0, 0, 0, 1000), OrderSpan(LOWEST, (50, 0), 100.0, 0, 0, 1000, 1100)]
    assert keys_at(mixed, [500, 1050])[0] == OrderKey(*LOWEST, 0, 0, 500)


@pytest.mark.parametrize("limit", [1, 7, 50])
def test_a_batch_of_many_records_with_one_order_ends_between_them(limit: int) -> None:
    """A snapshot of a million records is no reason for a batch of a million records."""
    streams = [whole(name, place, [LOWEST] * 100) for place, name in enumerate("ab")]
    assert sum(batch_of(streams, END, limit, orders).ends.values()) == limit


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 6])
def test_a_bounded_batch_has_the_first_records_of_the_sequence(most: int) -> None:
    streams = [whole("b", 1, [(1, 0), (3, 0), (3, 0)]), whole("a", 0, [(2, 0), (3, 0), (9, 0)])]
    ends = bounded(streams, {stream.name: 3 for stream in streams}, most, orders)
    places = [("b", 0), ("a", 0), ("a", 0), ("b", 0), ("b", 0), ("a", 0)]
    assert ends == {place: places[:most].count(place) for place in (("a", 0), ("b", 0))}


def test_a_bounded_batch_ends_within_a_gap_that_is_longer_than_the_batch() -> None:
    empty = replace(whole("b", 1, []), next=10_000)
    far = replace(whole("a", 0, [(2, 0)]), next=10)
    assert bounded([far, empty], {("a", 0): 10, ("b", 0): 10_000}, 100, orders) == {("a", 0): 0, ("b", 0): 100}


Records = Mapping[tuple[str, int], Sequence[tuple[int, int]]]
"""(topic, partition) → the offset and the carried time of each record."""


def append(lake: str, records: Records) -> dict[str, RawState | None]:
    """Ingest records into raw tables, a file for each partition. The state of each table."""
    schema = raw_schema(pa.string(), pa.string())
    for topic in sorted({topic for topic, _ in records}):
        uri = storage.raw_uri(lake, "Raw", topic)
        state = open_raw(lake, "Raw", topic)
        files, ends = [], dict[int, int]()
        for partition in sorted(p for name, p in records if name == topic):
            rows = records[topic, partition]
            kafka = [
                {"topic": topic, "partition": partition, "offset": offset, "time": time * 1000} for offset, time in rows
            ]
            columns = [pa.array(kafka, KAFKA_TYPE), *(pa.nulls(len(rows), item.type) for item in list(schema)[1:])]
            with RangeWriter(uri, partition) as writer:
                writer.write(pa.RecordBatch.from_arrays(columns, schema=schema))
            files += [item for item, _ in writer.files]
            ends[partition] = rows[-1][0] + 1
        first = {partition: 0 for partition in ends if state is None or partition not in state.next}
        commit_advance(uri, state, RawAdvance(topic, "id", schema, files, first, ends))
    return {topic: open_raw(lake, "Raw", topic) for topic in ("a", "b")}


def unseen(states: Mapping[str, RawState | None], seen: Mapping[tuple[str, int], int]) -> dict[str, list[OffsetRange]]:
    return {
        topic: []
        if state is None
        else new_ranges({partition: seen.get((topic, partition), 0) for partition in state.next}, state.next)
        for topic, state in states.items()
    }


commits = st.lists(
    st.dictionaries(
        st.tuples(st.sampled_from("ab"), st.integers(0, 2)),
        # Each record: the offsets and the milliseconds since the record before it.
        st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0, 0, 1, 5, 400])), min_size=1, max_size=30),
        min_size=1,
    ),
    max_size=4,
)


@settings(deadline=None, max_examples=30)
@given(commits, st.integers(1, 60), st.none() | st.integers(1, 30))
def test_batches_have_the_sequence_of_one_sort_by_time_wherever_they_end(
    backlog: list[dict[tuple[str, int], list[tuple[int, int]]]], limit: int, most: int | None
) -> None:
    records: dict[tuple[str, int], list[tuple[int, int]]] = {}
    with TemporaryDirectory() as lake:
        states: dict[str, RawState | None] = {"a": None, "b": None}
        for commit in backlog:
            new: dict[tuple[str, int], list[tuple[int, int]]] = {}
            for place, steps in commit.items():
                offset, time = records[place][-1] if place in records else (-1, 1_700_000_000_000)
                for gap, pause in steps:
                    offset, time = offset + gap, time + pause
                    new.setdefault(place, []).append((offset, time))
                records.setdefault(place, []).extend(new[place])
            states = append(lake, new)
        seen: dict[tuple[str, int], int] = {}
        sequence: list[tuple[int, str, int, int]] = []
        while any(ranges := unseen(states, seen).values()):
            batch = time_batch(states, unseen(states, seen), limit, most)
            assert any(batch.values())
            assert most is None or offset_count(part for parts in batch.values() for part in parts) <= most
            found: list[tuple[int, str, int, int]] = []
            for topic, parts in batch.items():
                for part in parts:
                    assert part.first == seen.get((topic, part.partition), 0)
                    seen[topic, part.partition] = part.end
                    found += [
                        (time, topic, part.partition, offset)
                        for offset, time in records[topic, part.partition]
                        if part.first <= offset < part.end
                    ]
            sequence += sorted(found)
        assert not any(ranges)
    assert sequence == sorted((time, *place, offset) for place, rows in records.items() for offset, time in rows)


def test_a_small_backlog_is_taken_whole_without_a_look_at_its_files(tmp_path: Path) -> None:
    states = append(str(tmp_path), {("a", 0): [(3, 7)], ("a", 1): [(0, 9)]})
    for path in tmp_path.rglob("*.parquet"):
        path.unlink()
    ranges = {"a": (OffsetRange(0, 0, 4), OffsetRange(1, 0, 1)), "b": ()}
    assert time_batch(states, ranges, 2) == ranges
    assert time_batch(states, ranges, 1) == {"a": (OffsetRange(0, 0, 4),), "b": ()}
    with pytest.raises(LakeError):
        time_batch(states, ranges, 1, 1)


def test_a_batch_is_not_much_smaller_than_its_bound_where_times_are_uneven(tmp_path: Path) -> None:
    """Most records of a file are of its last moment."""
    later = 1_700_000_000_000
    times = [(offset, later * (offset > 0) + offset) for offset in range(20)]
    states = append(str(tmp_path), {("a", partition): times for partition in (0, 1)})
    ranges = {"a": (OffsetRange(0, 0, 20), OffsetRange(1, 0, 20))}
    assert offset_count(time_batch(states, ranges, 10, 10)["a"]) == 10


def test_offsets_without_records_are_taken_whole(tmp_path: Path) -> None:
    """All of them were quarantined, or retention removed them: the range has no file."""
    states = append(str(tmp_path), {("a", 0): [(2, 7)], ("a", 1): [(0, 9), (1, 9)]})
    ranges = {"a": (OffsetRange(0, 3, 9), OffsetRange(1, 0, 2)), "b": ()}
    assert time_batch(states, ranges, 1) == {"a": (OffsetRange(0, 3, 9), OffsetRange(1, 0, 1)), "b": ()}
