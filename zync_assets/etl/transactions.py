"""Whole transactions: the frontier of a domain stands between two transactions of the source. Pure, without I/O.

Debezium's transaction topic has an END record for each transaction, with the number of its changes in each table of the
source. The topic is an input of the pipeline, and ingest keeps its records in a raw table. The id of an END record holds the
*end* of the transaction: an order above all changes of the transaction, and at or below all changes of later ones.

The ids of MySQL and MariaDB hold no end. The binary log has all changes of a transaction in a row, and its END records in the
same sequence. The changes with the id of a transaction therefore show its place (``etl.end_records.placed_ends``). The end of the
transaction is the order after the last known change of the transaction and of earlier ones. While the transaction is not whole,
a missing change may lie above this end. A partition has all its changes if it has a record at or above the first known change of
a later transaction.

A transaction is *whole* if the raw tables of the domain have all its changes:

- A partition with a record at or above the end has all changes of the transaction, since it keeps the order.
- In other partitions, changes are counted. Debezium numbers the changes of a transaction in each table, and so a change that
  came twice counts once. A record in quarantine behind the changes of earlier transactions may be a change, and counts.
- The changes of an input cannot be counted if it has a shape that leaves out records or the number, or if its topic is not
  known by a name of the source. Such a partition must confirm the end as in ``lake.readings``. So must a partition whose last
  record is a deletion, since the tombstone may still follow.

The frontier is the end of the last transaction before the first one that is not whole. The END record confirms this order for
every stream: nothing else needs to be read. The first END record of a domain confirms nothing, since records of a snapshot may
still be in flight, and nobody counts them. Past the last END record, only records without a transaction are taken (snapshots,
and records from before the metadata was switched on), up to the first change of a transaction.

A transaction that is not whole *is overdue* if the topics of the missing changes were ingested up to ends that were read
``limit`` after its END record was committed to the lake. No clock but our own is compared. An overdue transaction does not
hold the frontier back any more. It is counted, and its late changes are late records.

A batch that has to end within the backlog ends at the end of a transaction too, however many records that makes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.etl.end_records import EndRecords, Events, ReadEvents, from_order, is_past
from zync_assets.ingest.order import transaction_names
from zync_assets.lake.log import Order
from zync_assets.lake.raw_files import LOWEST
from zync_assets.lake.readings import Reading
from zync_assets.lake.sequence import END, File, Longs, OrderKey, Orders, Stream, after, below, count_below


@dataclass(frozen=True)
class Counting:
    """The means to count the changes of a domain's transactions.

    ``tables``: the source's name of a table → its streams, as far as their changes can be counted. ``bad``: returns the offsets
    of a stream's records in quarantine. ``closers``: the streams of the transaction topic. ``others``: the streams whose changes
    can't be counted, and name their transactions all the same.
    """

    tables: Mapping[str, Sequence[Stream]]
    closers: Sequence[Stream]
    readings: Sequence[Reading]
    limit: float
    read: ReadEvents
    bad: Callable[[Stream], Longs]
    others: Sequence[Stream] = ()
    past: Collection[str] = ()
    """Transactions that ETL has taken, as far as they are known: their END records come before the others, or ETL took the
    transaction without all its changes. Late changes, and changes that come again, hold nothing back."""

    @property
    def streams(self) -> list[Stream]:
        return [stream for streams in self.tables.values() for stream in streams]

    @property
    def named(self) -> list[Stream]:
        """The streams whose changes name their transactions."""
        return [*self.streams, *self.others]

    def is_overdue(self, since: float | None, streams: Iterable[Stream]) -> bool:
        """Whether the streams were ingested up to ends that were read ``limit`` after a time."""
        names = list(streams)
        return since is not None and any(
            reading.began >= since + self.limit and all(_is_read(stream, reading) for stream in names)
            for reading in self.readings
        )


def _is_read(stream: Stream, reading: Reading) -> bool:
    end = reading.end(stream.topic, stream.partition)
    return end is not None and stream.next >= end


@dataclass(frozen=True)
class OpenTransaction:
    """A transaction that is not whole. ``topics``: the topics that lack changes; the transaction topic if the END record is
    missing."""

    name: str
    topics: tuple[str, ...]


@dataclass(frozen=True)
class WholeTransactions:
    """The frontier between transactions. ``order``: records of lower orders are all there, and so are their transactions.

    ``highs``, ``lows``: the ends of the transactions below ``order``, ascending. ``overdue``: the transactions among them
    that are not whole, each with its end, or with the order after its first change if the END record is missing. ``blocker``:
    the first transaction that holds the frontier back. ``offsets``: of the END records of the transactions.
    """

    order: Order
    highs: Longs
    lows: Longs
    offsets: Longs
    overdue: Sequence[tuple[Order, str]]
    blocker: OpenTransaction | None

    def last_end(self, order: Order) -> Order | None:
        """The highest end at or below an order."""
        at = count_below(self.highs, self.lows, after(order))
        return (int(self.highs[at - 1]), int(self.lows[at - 1])) if at else None

    def next_offset(self, order: Order) -> int | None:
        """The offset after the last END record with an end at or below an order."""
        at = count_below(self.highs, self.lows, after(order))
        return int(self.offsets[at - 1]) + 1 if at else None

    def stops(self, key: OrderKey, is_free: Callable[[OrderKey], bool]) -> Iterator[OrderKey]:
        """The keys at which a batch may end, instead of at ``key``. ``is_free``: whether no new record below a key belongs to a
        transaction. Records of a snapshot have no transaction."""
        if key.high == LOWEST[0]:
            yield key
            return
        at = count_below(self.highs, self.lows, after((key.high, key.low)))
        if at:
            yield OrderKey(int(self.highs[at - 1]), int(self.lows[at - 1]))
        if is_free(key):
            yield key
        if at < len(self.highs):
            yield OrderKey(int(self.highs[at]), int(self.lows[at]))


def slowest(
    streams: Sequence[Stream], counting: Counting, confirmed: Mapping[tuple[str, int], Order], position: Order | None
) -> Stream | None:
    """Of the streams that must confirm the end of each transaction, the stream that confirms the lowest order. None if END
    records confirm the ends for all streams. ``confirmed``: see ``confirmed_orders``."""
    counted_names = {stream.name for stream in counting.streams}
    strict_streams = [
        stream
        for stream in streams
        if (position is None and len(streams) > 1)
        or stream.name not in counted_names
        or (stream.files and counting.read(stream, stream.files[-1]).deletes)
    ]
    return min(strict_streams, key=lambda stream: confirmed[stream.name], default=None)


def whole_transactions(
    ends: EndRecords, position: Order | None, limit: Order, floor: Order, counting: Counting
) -> WholeTransactions:
    """The frontier between transactions.

    ``ends``: the END records above ``position``, the highest end that ETL has reached. ``limit``: the frontier without regard to
    transactions. ``floor``: the lowest order that the streams confirm which must confirm the end of each transaction.
    """
    stop = count_below(ends.highs, ends.lows, after(floor)) if floor < END else len(ends.highs)
    overdue: list[tuple[Order, str]] = []
    blocker: OpenTransaction | None = None
    for at in _counted_transactions(ends, counting.tables):
        if at >= stop:
            break
        end = int(ends.highs[at]), int(ends.lows[at])
        start = (int(ends.highs[at - 1]), int(ends.lows[at - 1])) if at else position or LOWEST
        name = str(ends.names[at].as_py())
        short_streams = [
            streams
            for collection, count in _counts(ends, at)
            if (streams := counting.tables.get(collection)) is not None
            and not _has_all_changes(streams, name, count, start, ends.bound(at), counting)
        ]
        if not short_streams:
            continue
        if counting.is_overdue(float(ends.since[at]), [stream for streams in short_streams for stream in streams]):
            overdue.append((end, name))
            continue
        stop, blocker = (
            at,
            OpenTransaction(
                name, _topics(stream for collection_streams in short_streams for stream in collection_streams)
            ),
        )
    highs, lows, offsets = ends.highs[:stop], ends.lows[:stop], ends.offsets[:stop]
    last = (int(highs[-1]), int(lows[-1])) if stop else position or LOWEST
    if stop < len(ends.highs):
        # Snapshots come before all transactions.
        return WholeTransactions(max(last, min(limit, after(LOWEST))), highs, lows, offsets, overdue, blocker)
    order, unclosed = END, dict[str, Order]()
    # A transaction that is overdue in one stream goes on in newer files of others. The first round finds all of them.
    for stream in counting.named:
        _first_unclosed(stream, last, counting, unclosed)
    for stream in counting.named:
        unclosed_change = _first_unclosed(stream, last, counting, unclosed)
        if unclosed_change is not None and unclosed_change[0] < order:
            order, blocker = unclosed_change[0], OpenTransaction(unclosed_change[1], _topics(counting.closers))
    order = max(last, min(limit, order))
    overdue += sorted((after(place), name) for name, place in unclosed.items() if place < order)
    return WholeTransactions(order, highs, lows, offsets, overdue, blocker if limit > order else None)


def _topics(streams: Iterable[Stream]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(stream.topic for stream in streams))


def is_free(streams: Iterable[Stream], read: ReadEvents, key: OrderKey) -> bool:
    """Whether no new record below a key belongs to a transaction."""
    order = key.high, key.low
    # Some records of the order may lie below a key that ends between records of one order.
    bound = order if key == OrderKey(*order) else after(order)
    for stream in streams:
        for item in _files_from(stream, LOWEST):
            if (item.min_order or LOWEST) >= bound:
                break
            events = read(stream, item)
            is_new_change = ~from_order(events.orders, bound) & (events.orders.offsets >= stream.seen)
            if bool(np.any(is_new_change & (events.numbers > 0))):
                return False
    return True


def _counted_transactions(ends: EndRecords, tables: Mapping[str, Sequence[Stream]]) -> list[int]:
    """The transactions with changes in partitions that have no record at or above the end, ascending."""
    indexes: set[int] = set()
    for collection, streams in tables.items():
        past_order = min(stream.highest or LOWEST for stream in streams)
        rows = pc.equal(ends.collections, collection).to_numpy(zero_copy_only=False) & (ends.counts > 0)
        owners = ends.owners[np.flatnonzero(rows)]
        highs, lows = ends.bounds
        indexes.update(owners[~below(highs[owners], lows[owners], after(past_order))].tolist())
    return sorted(indexes)


def _counts(ends: EndRecords, at: int) -> list[tuple[str, int]]:
    rows = np.flatnonzero(ends.owners == at)
    return [(str(ends.collections[int(row)].as_py()), int(ends.counts[row])) for row in rows]


def _has_all_changes(
    streams: Sequence[Stream], name: str, count: int, start: Order, end: Order, counting: Counting
) -> bool:
    """Whether the streams of a table have all changes of a transaction, whose orders are from ``start`` to below ``end``."""
    numbers, unknown = set[int](), 0
    late_names = [stream.name for stream in streams if (stream.highest or LOWEST) < end]
    for stream in streams if late_names else ():
        first = 0
        for item in reversed(stream.files):
            if (item.max_order or LOWEST) < start:
                first = (item.last or 0) + 1
                break
            if (item.min_order or LOWEST) >= end:
                continue
            events = counting.read(stream, item)
            rows = from_order(events.orders, start) & ~from_order(events.orders, end) & (events.numbers > 0)
            change_rows = np.flatnonzero(rows)
            of_name = pc.fill_null(pc.equal(_names(events, change_rows), name), False).to_numpy(zero_copy_only=False)
            numbers.update(events.numbers[change_rows[of_name]].tolist())
            earlier_offsets = events.orders.offsets[~from_order(events.orders, start)]
            if len(earlier_offsets):
                first = int(earlier_offsets[-1]) + 1
                break
        if stream.name in late_names:
            unknown += int(np.count_nonzero(counting.bad(stream) >= first))
    return not late_names or sum(number <= count for number in numbers) + unknown >= count


def _first_unclosed(
    stream: Stream, last: Order, counting: Counting, overdue: dict[str, Order]
) -> tuple[Order, str] | None:
    """The order and the transaction of the first new change at or above ``last``. The END record is missing. Changes of overdue
    transactions are left out, and put into ``overdue``."""
    for item in _files_from(stream, last):
        events = counting.read(stream, item)
        rows = from_order(events.orders, last) & (events.orders.offsets >= stream.seen) & (events.numbers > 0)
        changes = np.flatnonzero(rows)
        if not len(changes):
            continue
        since = None if item.commit_time is None else item.commit_time / 1000
        is_overdue = counting.is_overdue(since, [*counting.named, *counting.closers])
        if is_overdue or overdue or _names(events, changes[:1])[0].as_py() in counting.past:
            changes = changes[~is_past(_names(events, changes), counting.past)]
        if not is_overdue and not overdue:
            changes = changes[:1]  # a transaction of millions of changes may be under way
        names = [str(name) for name in _names(events, changes).to_pylist()]
        if is_overdue:
            for row, name in zip(changes.tolist(), names, strict=True):
                overdue.setdefault(name, _order(events.orders, row))
        for row, name in zip(changes.tolist(), names, strict=True):
            if name not in overdue:
                return _order(events.orders, row), name
    return None


def _names(events: Events, rows: Longs) -> pa.Array:
    """The transactions of some records."""
    return transaction_names(events.ids.take(pa.array(rows)))


def _files_from(stream: Stream, order: Order) -> Iterator[File]:
    """The files that may hold new records of an order or a higher one."""
    for item in stream.files:
        if (item.last or 0) >= stream.seen and (item.max_order or LOWEST) >= order:
            yield item


def _order(orders: Orders, row: int) -> Order:
    return int(orders.highs[row]), int(orders.lows[row])
