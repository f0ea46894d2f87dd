"""The frontier between transactions: whole transactions alone, none twice, and a limit for those that stay incomplete."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from zync_assets.etl.end_records import EndRecords, Events, merge_ends, placed_ends
from zync_assets.etl.transactions import (
    Counting,
    OpenTransaction,
    WholeTransactions,
    is_free,
    slowest,
    whole_transactions,
)
from zync_assets.lake.log import Order
from zync_assets.lake.raw_files import LOWEST
from zync_assets.lake.readings import Reading, TopicEnds, confirmed_orders, frontier
from zync_assets.lake.sequence import END, Batch, File, OrderKey, Stream, after, batch_of
from zync_assets_tests.lake.streams import RawFile, orders, reading

DELAY = 3
TABLES = ("orders", "status", "lines")


@dataclass(frozen=True)
class Change:
    """A record of a topic. ``number``: its place in its table and transaction; 0 for a record without a transaction."""

    order: Order
    name: str | None = None
    number: int = 0
    deletes: bool = False


@dataclass(frozen=True)
class ChangeFile(RawFile):
    changes: tuple[Change, ...] = ()


@dataclass
class Topic:
    """A topic with one partition, its raw table and its account. ``bad``: the offsets of records in quarantine."""

    name: str
    place: int = 0
    partition: int = 0
    changes: list[Change] = field(default_factory=list)
    visible: int = 0
    next: int = 0
    seen: int = 0
    files: list[ChangeFile] = field(default_factory=list)
    bad: list[int] = field(default_factory=list)

    def ingest(self, end: int, commit_time: int = 0) -> None:
        if end > self.next:
            found = tuple(self.changes[self.next : end])
            self.files.append(ChangeFile(self.next, end - 1, tuple(item.order for item in found), commit_time, found))
            self.next = end

    def merge(self) -> None:
        """Make one file of the last two, as compaction does."""
        if len(self.files) > 1:
            one, other = self.files[-2:]
            changes = one.changes + other.changes
            merged = ChangeFile(one.first, other.last, one.orders + other.orders, other.commit_time, changes)
            self.files[-2:] = [merged]

    def stream(self) -> Stream:
        highest = self.files[-1].orders[-1] if self.files else None
        return Stream(self.name, self.partition, self.place, self.seen, self.next, self.files, highest)


def events(stream: Stream, item: File) -> Events:
    assert isinstance(item, ChangeFile)
    names = pa.array([change.name for change in item.changes], pa.string())
    numbers = np.array([change.number for change in item.changes], np.int64)
    return Events(orders(stream, item), numbers, names, item.changes[-1].deletes)


def closed(*records: tuple[int, str, Mapping[str, int]], since: float = 0) -> EndRecords:
    """END records: the position of the commit, the name, and the numbers of changes."""
    pairs = [(at, table, count) for at, (_, _, counts) in enumerate(records) for table, count in counts.items()]
    return EndRecords(
        np.array([lsn for lsn, _, _ in records], np.int64),
        np.zeros(len(records), np.int64),
        np.arange(len(records)),
        pa.array([name for _, name, _ in records], pa.string()),
        np.full(len(records), since),
        np.array([at for at, _, _ in pairs], np.int64),
        pa.array([table for _, table, _ in pairs], pa.string()),
        np.array([count for _, _, count in pairs], np.int64),
    )


@dataclass
class Domain:
    """Topics of one domain, and the part of their transaction topic that is ingested."""

    topics: Sequence[Topic]
    ends: EndRecords = field(default_factory=closed)
    readings: Sequence[Reading] = ()
    limit: float = math.inf
    position: Order | None = None
    closer: Stream = field(default_factory=lambda: Stream("tx", 0, 9, 0, 0))
    uncounted: Sequence[Topic] = ()
    first: int | None = None
    """The first END record that ETL has not reached, where the ids of transactions hold no end."""
    taken: Sequence[str] = ()

    @property
    def counting(self) -> Counting:
        tables: dict[str, list[Stream]] = {}
        for topic in self.topics:
            tables.setdefault(topic.name, []).append(topic.stream())
        bad = {(topic.name, topic.partition): np.array(topic.bad, np.int64) for topic in self.topics}
        others = [topic.stream() for topic in self.uncounted]
        return Counting(
            tables,
            [self.closer],
            self.readings,
            self.limit,
            events,
            lambda stream: bad[stream.name],
            others,
            self.taken,
        )

    def whole(self) -> WholeTransactions:
        streams = [topic.stream() for topic in (*self.topics, *self.uncounted)]
        confirmed = confirmed_orders([*streams, self.closer], self.readings, DELAY)
        last = slowest(streams, self.counting, confirmed, self.position)
        floor = END if last is None else confirmed[last.name]
        ends = merge_ends([self.ends], self.position, END) if self.first is None else self.placed()
        return whole_transactions(ends, self.position, frontier(streams, confirmed).order, floor, self.counting)

    def placed(self) -> EndRecords:
        assert self.first is not None
        nowhere = np.full(len(self.ends.highs), LOWEST[0])
        changes = [events(each, item) for each in (topic.stream() for topic in self.topics) for item in each.files]
        ends = self.ends._replace(highs=nowhere, lows=np.full(len(nowhere), LOWEST[1]))
        return placed_ends([ends], self.first, changes, self.position, self.taken)


def topic(name: str, *changes: Change, place: int = 0, partition: int = 0, commit_time: int = 0) -> Topic:
    found = Topic(name, place, partition, list(changes), len(changes))
    found.ingest(len(changes), commit_time)
    return found


def change(lsn: int, name: str, number: int, at: int, *, deletes: bool = False) -> Change:
    """``lsn``: the commit before the transaction, as PostgreSQL's connector has it."""
    return Change((lsn, at), name, number, deletes)


def both(*changes: Change) -> Domain:
    """Orders with some changes, and a status topic that is far behind."""
    return Domain([topic("orders", *changes), topic("status", place=1)], position=(4, 0))


def test_an_end_record_confirms_the_position_of_every_topic_once_its_changes_are_there() -> None:
    domain = both(change(10, "a", 1, 11), change(10, "a", 2, 12))
    assert domain.whole().order == (4, 0)
    domain.ends = closed((20, "a", {"orders": 2}))
    assert domain.whole().order == (20, 0)
    domain.ends = closed((20, "a", {"orders": 3}))
    found = domain.whole()
    assert found.order < (10, 11)
    assert found.blocker == OpenTransaction("a", ("orders",))
    domain.ends = closed((20, "a", {"orders": 2, "status": 1}))
    assert domain.whole().blocker == OpenTransaction("a", ("status",))


def test_the_first_end_record_confirms_nothing_since_a_snapshot_may_be_in_flight() -> None:
    domain = both(change(10, "a", 1, 11))
    domain.ends = closed((20, "a", {"orders": 1}))
    domain.closer = Stream("tx", 0, 9, 0, 1, [RawFile(0, 0, ((20, 0),))], (20, 0))
    domain.position = None
    assert domain.whole().order <= after(LOWEST)
    domain.readings = [reading(at, at, orders=1, status=0, tx=1) for at in (1, 9)]
    assert domain.whole().order >= (20, 0)


def test_tables_that_are_no_inputs_are_left_out() -> None:
    domain = both(change(10, "a", 1, 11))
    domain.ends = closed((20, "a", {"orders": 1, "audit": 7}), (30, "b", {"audit": 2}))
    assert domain.whole().order == (30, 0)


def test_a_change_without_an_end_record_waits_and_one_without_a_transaction_does_not() -> None:
    """A snapshot comes before all transactions, and so do changes from before the metadata was switched on."""
    domain = Domain([topic("orders", Change(LOWEST), Change((5, 1)), change(10, "b", 1, 11)), topic("status", place=1)])
    ends = {"orders": 3, "status": 0, "tx": 0}
    domain.readings = [reading(at, at, **ends) for at in (1, 9)]
    found = domain.whole()
    assert found.order == (10, 11)
    assert found.blocker == OpenTransaction("b", ("tx",))
    domain.ends = closed((20, "b", {"orders": 2}))
    assert domain.whole().order > LOWEST


def test_a_change_that_came_twice_counts_once_and_a_tombstone_does_not_count() -> None:
    domain = both(change(10, "a", 1, 11, deletes=True), Change((10, 11)), change(10, "a", 1, 11))
    domain.ends = closed((20, "a", {"orders": 2}))
    assert domain.whole().blocker == OpenTransaction("a", ("orders",))


def test_an_end_record_that_came_twice_counts_once() -> None:
    domain = both(change(10, "a", 1, 11), change(20, "b", 1, 21))
    domain.ends = closed((20, "a", {"orders": 1}), (30, "b", {"orders": 1}), (20, "a", {"orders": 1}))
    assert domain.whole().order == (30, 0)
    assert list(merge_ends([domain.ends], (20, 0), END).highs) == [30]
    assert list(merge_ends([domain.ends], None, (20, 5)).highs) == [20]


def test_a_record_in_quarantine_counts_if_no_later_record_shows_where_it_belongs() -> None:
    domain = both(change(10, "a", 1, 11), change(20, "b", 1, 21))
    orders = domain.topics[0]
    domain.ends = closed((20, "a", {"orders": 1}), (30, "b", {"orders": 2}))
    orders.bad = [0]
    assert domain.whole().blocker == OpenTransaction("b", ("orders",))
    orders.bad = [2]
    assert domain.whole().order == (30, 0)


def test_the_partitions_of_a_topic_are_counted_together() -> None:
    """A partition past the end has all its changes, and the other one may lack some."""
    past = topic("orders", change(10, "a", 2, 12), change(20, "b", 1, 21))
    domain = Domain([past, topic("orders", partition=1)], closed((20, "a", {"orders": 2})), position=(4, 0))
    assert domain.whole().blocker == OpenTransaction("a", ("orders",))
    domain.topics = [past, topic("orders", change(10, "a", 1, 11), partition=1)]
    assert domain.whole().order == (20, 0)


def test_a_topic_whose_last_record_is_a_deletion_confirms_the_end_by_readings() -> None:
    domain = both(change(10, "a", 1, 11, deletes=True))
    domain.ends = closed((20, "a", {"orders": 1}))
    domain.closer = Stream("tx", 0, 9, 0, 1, [RawFile(0, 0, ((20, 0),))], (20, 0))
    assert domain.whole().order <= (10, 11)
    domain.readings = [reading(at, at, orders=1, status=0, tx=1) for at in (1, 9)]
    assert domain.whole().order >= (20, 0)


def test_a_topic_that_cannot_be_counted_confirms_the_end_by_itself() -> None:
    counted, other = topic("orders", change(10, "a", 1, 11)), topic("other", Change((10, 12)), place=1)
    domain = Domain([counted], closed((20, "a", {"orders": 1})), position=(4, 0), uncounted=[other])
    assert domain.whole().order <= (10, 12)
    other = topic("other", Change((10, 12)), Change((20, 1)), place=1)
    assert replace(domain, uncounted=[other]).whole().order == (20, 0)


def test_an_open_transaction_holds_the_changes_back_that_cannot_be_counted() -> None:
    counted = topic("orders", change(10, "a", 1, 11), change(20, "b", 2, 25), Change((50, 1)))
    other = topic("other", change(20, "b", 1, 21), Change((50, 2)), place=1)
    domain = Domain([counted], closed((20, "a", {"orders": 1})), position=(4, 0), uncounted=[other])
    found = domain.whole()
    assert (found.order, found.blocker) == ((20, 21), OpenTransaction("b", ("tx",)))


def test_a_transaction_that_stays_incomplete_waits_up_to_the_limit() -> None:
    """The topics of the missing changes must have been ingested up to ends that were read after the limit."""
    domain = both(change(10, "a", 1, 11), change(20, "b", 1, 21))
    domain.ends = closed((20, "a", {"status": 1}), (30, "b", {"orders": 1}), since=100)
    domain.limit = 60
    for began, end in ((159, 0), (161, 1)):
        domain.readings = [reading(began, began, status=end)]
        assert domain.whole().blocker == OpenTransaction("a", ("status",))
    domain.readings = [reading(160, 160, status=0)]
    found = domain.whole()
    assert found.order == (30, 0)
    assert found.overdue == [((20, 0), "a")]
    assert found.blocker is None
    domain.position = (20, 0)
    assert domain.whole().overdue == []


def test_a_missing_end_record_expires_by_the_time_of_the_changes() -> None:
    orders = topic("orders", change(10, "a", 1, 11), change(10, "a", 2, 12), commit_time=100_000)
    domain = Domain([orders, topic("status", Change((50, 1)), place=1)], position=(4, 0), limit=60)
    orders.changes += [change(10, "a", 3, 13), change(40, "c", 1, 41)]
    orders.ingest(4, commit_time=150_000)
    domain.readings = [reading(160, 160, orders=4, status=1, tx=0)]
    found = domain.whole()
    assert found.order == (40, 41)
    assert [name for _, name in found.overdue] == ["a"]
    assert orders.changes[1].order < found.order
    # An end of the transaction topic that is not ingested yet may close the transaction.
    domain.readings = [reading(160, 160, orders=4, status=1, tx=1)]
    assert domain.whole().order == (10, 11)


def test_the_late_changes_of_an_overdue_transaction_hold_nothing_back() -> None:
    """Its END record was taken, so that the changes show no place."""
    domain = replace(both(change(10, "a", 2, 12), change(20, "b", 1, 21)), first=1, position=(10, 12))
    domain.ends = closed((0, "a", {"orders": 2}), (0, "b", {"orders": 1}))
    domain.readings = [reading(at, at, orders=2, status=0, tx=0) for at in (1, 9)]
    assert domain.whole().order == (20, 22)
    domain.topics = [topic("orders", change(10, "a", 2, 12)), topic("status", place=1)]
    domain.ends, domain.readings = closed(), [reading(at, at, orders=1, status=0, tx=0) for at in (1, 9)]
    assert domain.whole().blocker == OpenTransaction("a", ("tx",))
    domain.taken = ["a"]
    assert domain.whole().order > (10, 12)


def test_what_a_connector_sends_again_after_a_restart_holds_nothing_back() -> None:
    """The end of ``a`` comes again with the last of its changes, and the end of ``b`` without a change."""
    changes = change(10, "a", 1, 11), change(10, "a", 2, 12), change(20, "b", 1, 21), change(20, "a", 2, 22)
    domain = replace(both(*changes), first=2, position=(20, 22))
    domain.ends = closed(*[(0, "a", {"orders": 2}), (0, "b", {"orders": 1})] * 2)
    assert domain.whole().blocker == OpenTransaction("a", ("orders",))
    domain.taken = ["a", "b"]
    domain.readings = [reading(at, at, orders=4, status=0, tx=4) for at in (1, 9)]
    assert (len(domain.placed().names), domain.whole().blocker) == (0, None)
    assert domain.whole().order > (20, 22)


def test_a_batch_ends_at_the_end_of_a_transaction_unless_no_change_belongs_to_one() -> None:
    changes = [Change((number, 0)) for number in range(6)]
    changes += [change(10, "a", number + 1, 11 + number) for number in range(6)]
    changes += [change(20, "b", 1, 21)]
    domain = both(*changes)
    domain.ends = closed((20, "a", {"orders": 6}), (30, "b", {"orders": 1}))
    found = domain.whole()
    assert (found.order, found.last_end((29, 9)), found.last_end((19, 0))) == ((30, 0), (20, 0), None)
    orders_stream = domain.topics[0].stream()
    free = [is_free([orders_stream], events, key) for key in (OrderKey(3), OrderKey(10, 11), OrderKey(10, 12))]
    assert free == [True, True, False]
    sizes: list[int] = []
    while domain.topics[0].seen < len(changes):
        domain.topics[0].seen = _batch(domain, found, 4).ends["orders", 0]
        sizes.append(domain.topics[0].seen)
    assert sizes[-2:] == [12, 13]
    assert len(sizes) > 2


def _batch(domain: Domain, found: WholeTransactions, limit: int) -> Batch:
    streams = [item.stream() for item in domain.topics]

    def stops(key: OrderKey) -> Iterable[OrderKey]:
        return found.stops(key, lambda each: is_free(streams, events, each))

    return batch_of(streams, found.order, limit, orders, stops)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_every_batch_leaves_a_state_that_the_source_had(seed: int, with_tombstones: bool, with_ends: bool) -> None:
    """A producer may take any time for each topic. Where deletions have tombstones, it takes ``order-delay`` at the most.

    ``with_ends``: the ids of transactions hold their ends, as those of PostgreSQL do, and those of MySQL do not.
    """
    random = Random(seed)
    topics = [Topic(name, place) for place, name in enumerate(TABLES)]
    records, source = _source(topics, random, with_tombstones)
    known = Topic("tx", 9, changes=[Change((lsn, 0) if with_ends else LOWEST) for lsn, _, _ in records])
    states = {tuple(item[:3]) for item in source}
    everything = [*topics, known]
    committed = [(0, 0, 0, 0)] * DELAY
    domain, consumed, at = Domain(topics, first=None if with_ends else 0), list[tuple[Order, int, int]](), 0
    for time in range(4_000):
        at = min(len(source) - 1, at + random.choice([0, 0, 1, 2, 9]))
        committed.append(source[at])
        for place, item in enumerate(everything):
            least = committed[-DELAY - 1][place]
            least = least if with_tombstones else min(least, source[0][place])
            most = random.randint(0, committed[-1][place]) if random.random() < 0.3 else 0
            item.visible = max(item.visible, least, most)
        if random.random() < 0.4:
            ends = {item.name: TopicEnds("id", {0: item.visible}) for item in everything}
            domain.readings = [*domain.readings[-random.randint(1, 6) :], Reading(time, time, ends)]
        for item in everything:
            if random.random() < 0.3:
                item.ingest(random.randint(item.next, item.visible))
            if random.random() < 0.1:
                item.merge()
        domain.ends, domain.closer = closed(*records[: known.next]), known.stream()
        if random.random() < 0.5:
            found = domain.whole()
            key, ends = _batch(domain, found, random.choice([1, 3, 1000]))
            batch: list[tuple[Order, int, int]] = []
            for item in topics:
                end = ends[item.name, 0]
                batch += [(item.changes[offset].order, item.place, offset) for offset in range(item.seen, end)]
                item.seen = end
            consumed += sorted(batch)
            if batch:
                reached = found.last_end((key.high, key.low))
                if reached is not None and reached > LOWEST:
                    domain.position = reached
                    domain.first = None if with_ends else found.next_offset((key.high, key.low))
                snapshot = all(item.changes[item.seen - 1].order == LOWEST for item in topics if item.seen)
                assert snapshot or tuple(item.seen for item in topics) in states
        if at == len(source) - 1 and len(consumed) == sum(len(item.changes) for item in topics):
            break
    expected = [(each.order, item.place, offset) for item in topics for offset, each in enumerate(item.changes)]
    assert consumed == sorted(expected)


def _source(
    topics: Sequence[Topic], random: Random, with_tombstones: bool
) -> tuple[list[tuple[int, str, Mapping[str, int]]], list[tuple[int, int, int, int]]]:
    """Fill the topics with a snapshot and transactions. END records, and the records of each topic and of the transaction
    topic after each transaction."""
    records: list[tuple[int, str, Mapping[str, int]]] = []
    for item in topics:
        item.changes += [Change(LOWEST)] * random.randint(0, 2)
    found = [_lengths(topics, 0)]
    lsn = last = 1
    for number in range(random.randint(1, 25)):
        counts: dict[str, int] = {}
        for _ in range(random.choice([0, 1, 1, 2, 3, 9])):
            item, lsn = random.choice(topics), lsn + 1
            counts[item.name] = counts.get(item.name, 0) + 1
            deletes = with_tombstones and random.random() < 0.3
            item.changes.append(change(last, f"t{number}", counts[item.name], lsn, deletes=deletes))
            if deletes:
                item.changes.append(Change((last, lsn)))
        lsn = last = lsn + 2
        records.append((last, f"t{number}", counts))
        found.append(_lengths(topics, len(records)))
    return records, found


def _lengths(topics: Sequence[Topic], records: int) -> tuple[int, int, int, int]:
    first, second, third = (len(item.changes) for item in topics)
    return first, second, third, records
