"""The frontier of a domain: no topic runs ahead, everything is consumed in the end, and the sequence has no cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zync_assets.etl.frontier import (
    END,
    File,
    Frontier,
    OrderKey,
    Orders,
    OrderSpan,
    Stream,
    after,
    batch_of,
    confirmed_orders,
    frontier,
    highest_below,
    keys_at,
    late_offsets,
    offset_at,
    spread,
)
from zync_assets.lake.log import Order
from zync_assets.lake.raw_files import LOWEST
from zync_assets.lake.readings import Reading, TopicEnds

DELAY = 3


@dataclass(frozen=True)
class RawFile:
    first: int
    last: int
    orders: tuple[Order, ...]
    commit_time: int | None = None

    @property
    def records(self) -> int:
        return len(self.orders)

    @property
    def min_order(self) -> Order:
        return min(high for high, _ in self.orders), min(low for _, low in self.orders)

    @property
    def max_order(self) -> Order:
        return max(high for high, _ in self.orders), max(low for _, low in self.orders)


@dataclass
class Topic:
    """A topic with one partition, its raw table and its account. Offsets have no gaps."""

    name: str
    place: int
    orders: list[Order] = field(default_factory=list)
    visible: int = 0
    next: int = 0
    seen: int = 0
    files: list[RawFile] = field(default_factory=list)

    def ingest(self, end: int, random: Random) -> None:
        if end > self.next:
            self.files.append(RawFile(self.next, end - 1, tuple(self.orders[self.next : end])))
            self.next = end
        if len(self.files) > 1 and random.random() < 0.3:
            one, other = self.files[-2:]
            self.files[-2:] = [RawFile(one.first, other.last, one.orders + other.orders)]

    def stream(self) -> Stream:
        highest = self.files[-1].orders[-1] if self.files else None
        return Stream(self.name, 0, self.place, self.seen, self.next, self.files, highest)


def orders(stream: Stream, item: File) -> Orders:
    assert isinstance(item, RawFile)
    offsets = np.arange(item.first, item.last + 1)
    return Orders(offsets, *(np.array([order[part] for order in item.orders]) for part in (0, 1)))


def reading(began: float, ended: float, **ends: int) -> Reading:
    return Reading(began, ended, {name: TopicEnds("id", {0: end}) for name, end in ends.items()})


def frontier_of(streams: Sequence[Stream], readings: Sequence[Reading], delay: float) -> Frontier:
    return frontier(streams, confirmed_orders(streams, readings, delay))


def whole(name: str, place: int, found: Sequence[Order], seen: int = 0) -> Stream:
    """A stream with one file."""
    files = [RawFile(0, len(found) - 1, tuple(found))] if found else []
    return Stream(name, 0, place, seen, len(found), files, found[-1] if found else None)


def test_a_single_stream_has_no_frontier() -> None:
    assert frontier([whole("a", 0, [(1, 0)])], {}).order == END


def test_without_readings_the_frontier_is_the_least_of_the_highest_orders() -> None:
    """A tombstone may still follow in the stream with the least of the highest orders: that order is not there whole."""
    found = frontier_of([whole("a", 0, [(1, 0), (5, 0)]), whole("b", 1, [(2, 0), (3, 7)])], [], 1)
    assert found.order == (3, 7)
    assert found.behind is not None and found.behind.topic == "b"


def test_an_idle_topic_is_passed_once_its_end_was_read_again_after_the_delay() -> None:
    streams = [whole("a", 0, [(1, 0), (5, 0)]), whole("b", 1, [])]
    first = reading(10, 10.1, a=2, b=0)
    assert frontier_of(streams, [first, reading(11, 11.1, a=2, b=0)], 1).order == LOWEST
    assert frontier_of(streams, [first, reading(11.1, 11.2, a=2, b=0)], 1).order == after((5, 0))


def test_an_end_before_an_open_transaction_confirms_nothing() -> None:
    streams = [whole("a", 0, [(1, 0), (5, 0)]), whole("b", 1, [(2, 0)])]
    first, later = reading(10, 10, a=2, b=1), reading(20, 20, a=2, b=1)
    is_open = replace(later, topics={**later.topics, "b": TopicEnds("id", {0: 1}, frozenset({0}))})
    found = frontier_of(streams, [first, is_open], 1)
    assert found.order == (2, 0)
    assert found.behind is not None and found.behind.topic == "b"
    assert frontier_of(streams, [first, is_open, later], 1).order == after((5, 0))


def test_a_topic_that_is_not_ingested_to_its_later_end_holds_the_frontier_back() -> None:
    streams = [whole("a", 0, [(1, 0), (5, 0)]), whole("b", 1, [(2, 0)])]
    readings = [reading(10, 10, a=2, b=1), reading(20, 20, a=2, b=2)]
    found = frontier_of(streams, readings, 1)
    assert found.order == (2, 0)
    assert found.behind is not None and found.behind.topic == "b"


def test_an_unknown_end_confirms_nothing_and_a_missing_topic_has_no_records() -> None:
    streams = [whole("a", 0, [(1, 0)]), whole("b", 1, [])]
    ends = {"a": TopicEnds("id", {0: 1})}
    unknown = [Reading(at, at, ends) for at in (10.0, 20.0)]
    assert frontier_of(streams, unknown, 1).order == LOWEST
    missing = [Reading(at, at, {**ends, "b": TopicEnds(None)}) for at in (10.0, 20.0)]
    assert frontier_of(streams, missing, 1).order == after((1, 0))


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
    """Orders that differ, one transaction with many changes, and a snapshot, whose records all have one order."""
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


@settings(deadline=None, max_examples=60)
@given(st.randoms(use_true_random=False))
def test_the_sequence_is_that_of_one_sort_wherever_reads_and_batches_are_cut(random: Random) -> None:
    topics = [Topic(name, place) for place, name in enumerate(("orders", "status", "lines"))]
    source = _source(topics, random)
    consumed: list[tuple[Order, int, int]] = []
    readings: list[Reading] = []
    committed: list[tuple[int, ...]] = [
        (0, 0, 0)
    ] * DELAY  # the records of each topic that the source had committed, at each time
    at = 0
    for time in range(2_000):
        at = min(len(source) - 1, at + random.choice([0, 0, 1, 2, 9]))
        committed.append(source[at])
        for topic in topics:
            # A producer sends what was committed DELAY ago, and perhaps some of what came since.
            certain, most = (committed[-ago][topic.place] for ago in (DELAY + 1, 1))
            topic.visible = max(topic.visible, random.randint(certain, most))
        if random.random() < 0.4:
            ends = {topic.name: TopicEnds("id", {0: topic.visible}) for topic in topics}
            readings = [*readings[-random.randint(1, 6) :], Reading(time, time, ends)]
        for topic in topics:
            if random.random() < 0.3:
                topic.ingest(random.randint(topic.next, topic.visible), random)
        if random.random() < 0.5:
            consumed += _batch(topics, readings, random.choice([1, 3, 1000]))
        if at == len(source) - 1 and len(consumed) == sum(len(topic.orders) for topic in topics):
            break
    whole = [(order, topic.place, offset) for topic in topics for offset, order in enumerate(topic.orders)]
    assert consumed == sorted(whole)


def _source(topics: Sequence[Topic], random: Random) -> list[tuple[int, ...]]:
    """Fill the topics with transactions. The records of each topic after each transaction. Tombstones follow some records."""
    found: list[tuple[int, ...]] = [(0, 0, 0)]
    for number in range(random.randint(0, 25)):
        position = 0 if number % 2 == 0 else 50
        places = [random.randrange(len(topics)) for _ in range(random.randint(1, 4))]
        for place in places:
            position += 1
            topics[place].orders += [(number // 2, position)] * random.choice([1, 1, 2])
        found.append(tuple(len(topic.orders) for topic in topics))
    return found


def _batch(topics: Sequence[Topic], readings: Sequence[Reading], limit: int) -> list[tuple[Order, int, int]]:
    """Consume one batch: the records sorted as a batch sorts its outputs."""
    streams = [topic.stream() for topic in topics]
    ends = batch_of(streams, frontier_of(streams, readings, DELAY).order, limit, orders).ends
    found: list[tuple[Order, int, int]] = []
    for topic in topics:
        end = ends[topic.name, 0]
        found += [(topic.orders[offset], topic.place, offset) for offset in range(topic.seen, end)]
        topic.seen = end
    return sorted(found)
