"""The END records of a domain's transactions, with their ends. Pure, without I/O.

The id of an END record of PostgreSQL or SQL Server holds the end (``merge_ends``). The ids of MySQL and MariaDB do not. There the
changes with the id of a transaction show its place (``placed_ends``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.ingest.order import transaction_names
from zync_assets.lake.log import Order
from zync_assets.lake.raw_files import LOWEST
from zync_assets.lake.sequence import END, File, Longs, Orders, Stream, after, below, count_below


class EndRecords(NamedTuple):
    """END records. ``owners``, ``collections`` and ``counts`` have an entry for each table of a transaction: the index of the
    transaction, the source's name of the table, and the number of the changes.

    ``highs``, ``lows``: the ends. ``later``: the orders that no change of the transaction reaches, if these are not the ends.
    """

    highs: Longs
    lows: Longs
    offsets: Longs
    names: pa.Array
    since: npt.NDArray[np.float64]
    """When the record was committed to the raw table, in seconds since the epoch."""
    owners: Longs
    collections: pa.Array
    counts: Longs
    later: tuple[Longs, Longs] | None = None
    is_binlog: bool = False
    """Whether the ids are those of MySQL or MariaDB, and the ends are not known before ``placed_ends``."""

    @property
    def bounds(self) -> tuple[Longs, Longs]:
        """For each transaction, the order from which on all changes belong to later transactions. A partition that has reached
        this order has all changes of the transaction."""
        return self.later or (self.highs, self.lows)

    def bound(self, at: int) -> Order:
        """The bound of one transaction."""
        return int(self.bounds[0][at]), int(self.bounds[1][at])


class Events(NamedTuple):
    """The records of a raw file. ``numbers``: the number of each change among the changes of its table in its transaction, 0 for
    a record without a transaction. ``ids``: the id of the transaction of each record. ``deletes``: whether the last record is a
    deletion, which a tombstone may follow."""

    orders: Orders
    numbers: Longs
    ids: pa.Array
    deletes: bool


ReadEvents: TypeAlias = Callable[[Stream, File], Events]
"""Reads some columns of one raw file."""


def merge_ends(parts: Sequence[EndRecords], above: Order | None, below: Order) -> EndRecords:
    """The END records of several files with ends above one order, and at or below another, in the order of the source.

    A record that Debezium sent again after a restart is left out.
    """
    all_ends = _concatenation(parts)
    ranked = np.lexsort((all_ends.lows, all_ends.highs))
    highs, lows = all_ends.highs[ranked], all_ends.lows[ranked]
    first, end = (0 if above is None else count_below(highs, lows, after(above))), len(ranked)
    end = count_below(highs, lows, after(below)) if below < END else end
    is_repeated = np.zeros(len(ranked), np.bool_)
    is_repeated[1:] = (np.diff(highs) == 0) & (np.diff(lows) == 0)
    return _subset(all_ends, ranked[first:end][~is_repeated[first:end]])


def placed_ends(
    parts: Sequence[EndRecords], first: int, events: Iterable[Events], above: Order | None, past_names: Collection[str]
) -> EndRecords:
    """The END records of several files from an offset on, with the ends that the changes show.

    ``events``: the changes at or above ``above``, the highest end that ETL has reached. A transaction without an END record is
    later than all that have one. ``past_names``: transactions that ETL has taken. Debezium may send parts of them again.
    """
    all_ends = _concatenation(parts)
    rows = np.flatnonzero(all_ends.offsets >= first)
    rows = rows[np.argsort(all_ends.offsets[rows], kind="stable")]
    rows = rows[~is_past(all_ends.names.take(pa.array(rows)), past_names)]
    # An END record that Debezium sent again has the id of an earlier one.
    codes = all_ends.names.take(pa.array(rows)).dictionary_encode().indices.to_numpy(zero_copy_only=False)
    unique_ends = _subset(all_ends, rows[np.sort(np.unique(codes, return_index=True)[1])])
    runs = [_runs(item, above or LOWEST, unique_ends.names, past_names) for item in events]
    ranks, highs, lows = (_concat(run[part] for run in runs) for part in range(3))
    sequence = np.lexsort((lows, highs))
    place = np.empty(len(sequence), np.int64)
    place[sequence] = np.arange(len(sequence))
    count = len(unique_ends.names)
    last, first_one = np.full(count + 1, -1, np.int64), np.full(count + 1, len(sequence), np.int64)
    np.maximum.at(last, ranks, place)
    # A lost END record must not make its transaction a later one.
    is_known = (ranks < count) | (place > last[:count].max(initial=-1))
    np.minimum.at(first_one, ranks[is_known], place[is_known])
    base = above or LOWEST
    highs, lows = np.append(highs[sequence], base[0]), np.append(lows[sequence] + 1, base[1])
    # The place -1 is the base: no change of these transactions is known.
    ends = np.maximum.accumulate(last[:count])
    later = np.minimum.accumulate(first_one[::-1])[::-1][1:]
    bounds = np.where(later < len(sequence), later, len(sequence) - 1)
    return unique_ends._replace(
        highs=highs[ends],
        lows=lows[ends],
        later=(highs[bounds], lows[bounds] - (later < len(sequence))),
    )


def is_past(names: pa.Array, past_names: Collection[str]) -> npt.NDArray[np.bool_]:
    """Which transactions ETL has taken."""
    return pc.is_in(names, value_set=pa.array(past_names, pa.string())).to_numpy(zero_copy_only=False)


def _runs(events: Events, above: Order, names: pa.Array, past_names: Collection[str]) -> tuple[Longs, Longs, Longs]:
    """The first and the last change of each transaction at or above an order: the transaction's place in ``names``, and the
    order of the change. The changes of a transaction stand in a row."""
    rows = np.flatnonzero(from_order(events.orders, above) & (events.numbers > 0))
    ids = transaction_names(events.ids.take(pa.array(rows)))
    is_new = ~is_past(ids, past_names)
    rows, ids = rows[is_new], ids.filter(pa.array(is_new))
    ranks = pc.fill_null(pc.index_in(ids, value_set=names), len(names)).to_numpy().astype(np.int64)
    turns = np.flatnonzero(np.diff(ranks))
    at = np.concatenate([[0], turns, turns + 1, [len(ranks) - 1]]).astype(np.int64) if len(ranks) else turns
    return ranks[at], events.orders.highs[rows[at]], events.orders.lows[rows[at]]


def _concatenation(parts: Sequence[EndRecords]) -> EndRecords:
    sizes = np.cumsum([0, *(len(part.highs) for part in parts)]).tolist()
    return EndRecords(
        _concat(part.highs for part in parts),
        _concat(part.lows for part in parts),
        _concat(part.offsets for part in parts),
        pa.concat_arrays([pa.array([], pa.string()), *(part.names for part in parts)]),
        np.concatenate([np.zeros(0), *(part.since for part in parts)]),
        _concat(part.owners + size for part, size in zip(parts, sizes, strict=False)),
        pa.concat_arrays([pa.array([], pa.string()), *(part.collections for part in parts)]),
        _concat(part.counts for part in parts),
    )


def _subset(all_ends: EndRecords, rows: Longs) -> EndRecords:
    """Some of the END records, in the sequence of ``rows``."""
    place = np.full(len(all_ends.highs), -1, np.int64)
    place[rows] = np.arange(len(rows))
    owner_rows = np.flatnonzero(place[all_ends.owners] >= 0)
    return EndRecords(
        all_ends.highs[rows],
        all_ends.lows[rows],
        all_ends.offsets[rows],
        all_ends.names.take(pa.array(rows)),
        all_ends.since[rows],
        place[all_ends.owners[owner_rows]],
        all_ends.collections.take(pa.array(owner_rows)),
        all_ends.counts[owner_rows],
    )


def _concat(parts: Iterable[Longs]) -> Longs:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def from_order(orders: Orders, order: Order) -> npt.NDArray[np.bool_]:
    """Which records have an order or a higher one."""
    return ~below(orders.highs, orders.lows, order)
