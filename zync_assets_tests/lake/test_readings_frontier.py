"""The frontier of a domain: no topic runs ahead, everything is consumed in the end, and the sequence has no cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from zync_assets.lake.log import Order
from zync_assets.lake.raw_files import LOWEST
from zync_assets.lake.readings import Frontier, Reading, TopicEnds, confirmed_orders, frontier
from zync_assets.lake.sequence import END, Stream, after, batch_of
from zync_assets_tests.lake.streams import RawFile, orders, reading, whole

DELAY = 3


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


def frontier_of(streams: Sequence[Stream], readings: Sequence[Reading], delay: float) -> Frontier:
    return frontier(streams, confirmed_orders(streams, readings, delay))


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
