"""The sequence of raw records across partitions, and a batch that ends at one place of the sequence.

A *stream* is a partition of an input topic. Within a stream the order never decreases. Streams in the order of the source have
the orders of a *domain*, which the source database gave the records. Other streams have the carried time as their order
(``time_batch``).

A *key* is a place in the sequence: the order, and the tie-breakers input, partition and offset. All streams of a
batch end at one key. The outputs of the batches, one batch after the other, are therefore in the sequence that one sort of all
outputs gives, wherever the batches end.

The functions are pure, but for ``time_batch``, which reads the times of the files at the end of a batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.lake import storage
from zync_assets.lake.log import DataFile, Order
from zync_assets.lake.parquet_rows import RecentCache
from zync_assets.lake.raw import RawState, is_replay, raw_files
from zync_assets.lake.raw_files import LOWEST, Longs, time_floors
from zync_assets.offsets import OffsetRange

END: Order = (2**63, 0)
"""Above every order."""
LEAST, _MOST = -(2**63), 2**63 - 1
"""The bounds of an int64. LEAST is below every other part of a key."""


class File(Protocol):
    """A raw file: the offsets and the number of its records, and bounds of their orders.

    The bounds hold for ``high`` and ``low`` each by itself, as the Delta log keeps them. None: some records, or all, have no
    order, and therefore LOWEST. ``commit_time``: the time of the file's commit, in milliseconds since the epoch.
    """

    @property
    def first(self) -> int | None: ...
    @property
    def last(self) -> int | None: ...
    @property
    def records(self) -> int: ...
    @property
    def min_order(self) -> Order | None: ...
    @property
    def max_order(self) -> Order | None: ...
    @property
    def commit_time(self) -> int | None: ...


@dataclass(frozen=True)
class Stream:
    """One partition of an input topic. ``place``: the topic's place among the inputs of the pipeline."""

    topic: str
    partition: int
    place: int
    seen: int
    """The next offset that ETL looks at."""
    next: int
    """The next offset to ingest."""
    files: Sequence[File] = ()
    """The raw files in the sequence of their offsets, without ``replays``, whose records lie between those of the others."""
    highest: Order | None = None
    """The highest order of all records that were ingested."""
    replays: Sequence[File] = ()

    @property
    def name(self) -> tuple[str, int]:
        return self.topic, self.partition


class OrderKey(NamedTuple):
    """A place in the sequence of a domain's records. A key with LEAST in its last parts is below all that share the rest."""

    high: int
    low: int = LEAST
    place: int = LEAST
    partition: int = LEAST
    offset: int = LEAST


class Orders(NamedTuple):
    """The offsets and orders of a file's records, as three arrays of int64."""

    offsets: Longs
    highs: Longs
    lows: Longs


ReadOrders: TypeAlias = Callable[[Stream, File], Orders]
"""Reads the columns of one raw file."""


def below(highs: Longs, lows: Longs, order: Order) -> npt.NDArray[np.bool_]:
    """Whether each of some orders is below another order."""
    return (highs < order[0]) | ((highs == order[0]) & (lows < order[1]))


def count_below(highs: Longs, lows: Longs, order: Order) -> int:
    """How many of some orders are below another one."""
    return int(np.count_nonzero(below(highs, lows, order)))


def after(order: Order) -> Order:
    """The least order above another one."""
    return (order[0], order[1] + 1) if order[1] < _MOST else (order[0] + 1, LEAST)


def file_below(stream: Stream, end: int) -> File | None:
    """The stream's last file with a record below an offset."""
    at = bisect_left(stream.files, end, key=lambda item: item.first or 0)
    return stream.files[at - 1] if at else None


def offset_at(stream: Stream, key: OrderKey, read: ReadOrders) -> int:
    """The offset at which the stream's records reach a key, at least ``seen``; ``next`` if they do not."""
    order = (key.high, key.low)
    stream_place, tie = (stream.place, stream.partition), (key.place, key.partition)
    if stream_place < tie:
        return _offset(stream, after(order), read)
    if stream_place > tie:
        return _offset(stream, order, read)
    return max(_offset(stream, order, read), min(key.offset, _offset(stream, after(order), read)))


def _offset(stream: Stream, order: Order, read: ReadOrders) -> int:
    """The offset of the stream's first record of an order or a higher one."""
    end = _file_offset(stream, order, read)
    for item in stream.replays:
        if (item.max_order or LOWEST) >= order and (item.first or 0) < end and (item.last or 0) >= stream.seen:
            offsets, highs, lows = read(stream, item)
            end = int(offsets[(offsets >= stream.seen) & ~below(highs, lows, order)].min(initial=end))
    return end


def _file_offset(stream: Stream, order: Order, read: ReadOrders) -> int:
    """As ``_offset``, without replays."""
    if (stream.highest or LOWEST) < order:
        return stream.next
    at = bisect_left(stream.files, order[0], key=lambda item: (item.max_order or LOWEST)[0])
    for item in stream.files[at:]:
        if (item.max_order or LOWEST) < order or (item.last or 0) < stream.seen:
            continue
        if (item.min_order or LOWEST) >= order:
            return max(stream.seen, item.first or 0)
        orders = read(stream, item)
        position = count_below(orders.highs, orders.lows, order)
        if position < len(orders.offsets):
            return max(stream.seen, int(orders.offsets[position]))
    return stream.next


def highest_below(stream: Stream, end: int, read: ReadOrders) -> Order | None:
    """The order of the stream's last record below an offset; None if there is no record."""
    item = file_below(stream, end)
    if item is None:
        return None
    if end >= stream.next:
        return stream.highest or LOWEST
    if item.min_order == item.max_order:
        return item.max_order or LOWEST
    orders = read(stream, item)
    last = int(np.searchsorted(orders.offsets, end)) - 1
    return int(orders.highs[last]), int(orders.lows[last])


def late_offsets(stream: Stream, order: Order, end: int, read: ReadOrders) -> tuple[int, int]:
    """The first offset and the end of the stream's records before ``end`` that come too late: below ``order``.

    Records with the order LOWEST have no place among the changes, and are never late.
    """
    first, last = (min(end, _offset(stream, least, read)) for least in (after(LOWEST), order))
    return first, max(first, last)


Ends: TypeAlias = dict[tuple[str, int], int]
"""(topic, partition) → the end of a batch."""


class Batch(NamedTuple):
    """The part of the streams that a batch takes: the records below ``key``, and therefore the offsets below ``ends``."""

    key: OrderKey
    ends: Ends


def batch_of(
    streams: Sequence[Stream],
    limit: Order,
    records: int,
    read: ReadOrders,
    stops: Callable[[OrderKey], Iterable[OrderKey]] = lambda key: (key,),
) -> Batch:
    """A batch of about ``records`` records whose orders are below ``limit``.

    The batch takes from each stream the records below one key. A batch without records ends where the streams were seen.
    ``stops``: the keys at which a batch may end, for a key at which it has enough records.
    """
    whole = Batch(OrderKey(*limit), _ends(streams, OrderKey(*limit), read))
    spans = [span for stream in streams for span in spans_of(stream, whole.ends[stream.name])]
    total, target = sum(span.records for span in spans), records
    while target < total:
        # The key is an estimate: files do not say how their orders are spread.
        for key in (stop for estimate in keys_at(spans, [target]) for stop in stops(estimate)):
            ends = {name: min(end, whole.ends[name]) for name, end in _ends(streams, key, read).items()}
            if any(ends[stream.name] > stream.seen for stream in streams):
                return Batch(key, ends)
        target *= 2
    return whole


def _ends(streams: Iterable[Stream], key: OrderKey, read: ReadOrders) -> Ends:
    return {stream.name: max(stream.seen, offset_at(stream, key, read)) for stream in streams}


@dataclass(frozen=True)
class OrderSpan:
    """Some records of one file, with their lowest and highest order. Their offsets are ``first`` to before ``end``."""

    low: Order
    high: Order
    records: float
    place: int = 0
    partition: int = 0
    first: int = 0
    end: int = 0


def spans_of(stream: Stream, end: int) -> list[OrderSpan]:
    """The spans of a stream's records from ``seen`` to ``end``. A part of a file counts as its share of the offsets."""
    spans: list[OrderSpan] = []
    for item in stream.files:
        low, high = item.first or 0, (item.last or 0) + 1
        first, last = max(low, stream.seen), min(high, end)
        if first < last:
            share = item.records * (last - first) / (high - low)
            orders = item.min_order or LOWEST, item.max_order or LOWEST
            spans.append(OrderSpan(*orders, share, stream.place, stream.partition, first, last))
    return spans


def keys_at(spans: Sequence[OrderSpan], counts: Sequence[float]) -> list[OrderKey]:
    """Ascending keys, each with about one of the ``counts`` (ascending) of records below it. Equal keys are one.

    The records of a span count as spread evenly over its orders.
    """
    parts = (part for span in spans for part in (span.low[0], span.high[0]) if part > LOWEST[0])
    # A file may begin with records before all changes. Its other records lie among the changes.
    least = min(parts, default=LOWEST[0])
    whole = [
        OrderSpan((least, LEAST), span.high, span.records, span.place, span.partition, span.first, span.end)
        if span.low[0] == LOWEST[0] < span.high[0]
        else span
        for span in spans
    ]
    return sorted(set(_keys(whole, counts, ())))


def _keys(spans: Sequence[OrderSpan], counts: Sequence[float], shared: tuple[int, ...]) -> list[OrderKey]:
    """``shared``: the parts of the key that all spans have in common."""
    part = len(shared)
    if part == len(LOWEST):
        return [_key_in_tie(spans, count, shared) for count in counts]
    points, counts_below, at = spread([(span.low[part], span.high[part], span.records) for span in spans])
    keys: list[OrderKey] = []
    for count in counts:
        index = int(np.searchsorted(counts_below + at, count))
        if index == len(points):
            continue
        if count > counts_below[index]:
            tied_spans = [span for span in spans if span.low[part] == span.high[part] == points[index]]
            keys += _keys(tied_spans, [count - float(counts_below[index])], (*shared, points[index]))
        elif index:
            start, count_before = points[index - 1], float(counts_below[index - 1] + at[index - 1])
            share = (count - count_before) / (float(counts_below[index]) - count_before)
            value = start + max(1, int((points[index] - start) * share))
            keys.append(OrderKey(*[*shared, min(value, points[index])]))
    return keys


def _key_in_tie(spans: Sequence[OrderSpan], count: float, shared: tuple[int, ...]) -> OrderKey:
    """The key in a sequence of records that share one order."""
    sorted_spans = sorted(spans, key=lambda span: (span.place, span.partition, span.first))
    totals = np.cumsum([span.records for span in sorted_spans])
    at = min(int(np.searchsorted(totals, count)), len(sorted_spans) - 1)
    span = sorted_spans[at]
    share = 1 - (float(totals[at]) - count) / span.records
    offset = span.first + round((span.end - span.first) * min(1.0, share))
    return OrderKey(*[*shared, span.place, span.partition, offset])


def spread(
    spans: Sequence[tuple[int, int, float]],
) -> tuple[list[int], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The values at which spans begin or end, ascending; the records below each value; and the records at each value.

    ``spans``: the lowest value, the highest value, and the number of records. The records of a span with one value are at the
    value. The records of another span are spread evenly.
    """
    points = sorted({value for low, high, _ in spans for value in (low, high)})
    index = {value: at for at, value in enumerate(points)}
    rates, under_way, at_once = (np.zeros(len(points)) for _ in range(3))
    for low, high, records in spans:
        if low == high:
            at_once[index[low]] += records
            continue
        rate = records / (high - low)
        rates[index[low]] += rate
        rates[index[high]] -= rate
        under_way[index[low]] += 1
        under_way[index[high]] -= 1
    widths = np.array([float(high - low) for low, high in pairwise(points)])
    # Between spans the rate must be zero, but rounding errors of the sums remain.
    between_values = np.where(np.cumsum(under_way) > 0, np.cumsum(rates), 0.0)[:-1] * widths
    spread_below = np.concatenate([[0.0], np.cumsum(np.maximum(0.0, between_values))])[: len(points)]
    below_values = np.concatenate([[0.0], np.cumsum(at_once)])[: len(points)]
    return points, spread_below + below_values, at_once


def bounded(streams: Sequence[Stream], ends: Ends, most: int, read: ReadOrders) -> Ends:
    """The ends of a batch's first records in the sequence, such that the batch has at most ``most`` offsets, and at least one."""
    if sum(ends[stream.name] - stream.seen for stream in streams) <= most:
        return ends
    sorted_streams = sorted(streams, key=lambda stream: (stream.place, stream.partition))
    steps = [_steps(stream, ends[stream.name], read) for stream in sorted_streams]
    counts = [len(step.offsets) for step in steps]
    numbers = np.repeat(np.arange(len(steps)), counts)
    stops, highs, lows = (np.concatenate(columns) for columns in zip(*steps, strict=True))
    widths = np.concatenate(
        [np.diff(step.offsets, prepend=stream.seen) for step, stream in zip(steps, sorted_streams, strict=True)]
    )
    order = np.lexsort((stops, numbers, lows, highs))
    count = int(np.searchsorted(np.cumsum(widths[order]), most, side="right"))
    new_ends = np.array([stream.seen for stream in sorted_streams])
    if count:
        np.maximum.at(new_ends, numbers[order[:count]], stops[order[:count]])
    else:
        # The first record lies behind a long gap.
        new_ends[numbers[order[0]]] += most
    return {stream.name: int(end) for stream, end in zip(sorted_streams, new_ends, strict=True)}


def _steps(stream: Stream, end: int, read: ReadOrders) -> Orders:
    """The records of a stream before ``end``, with the offset after each. The last record's is ``end``. A gap without records
    counts as one record of the order LOWEST."""
    files = [item for item in stream.files if (item.first or 0) < end and (item.last or 0) >= stream.seen]
    parts = [read(stream, item) for item in files]
    offsets, highs, lows = (np.concatenate([np.empty(0, np.int64), *(part[at] for part in parts)]) for at in range(3))
    inside = (offsets >= stream.seen) & (offsets < end)
    stops, highs, lows = offsets[inside] + 1, highs[inside], lows[inside]
    if len(stops):
        stops[-1] = end
    elif end > stream.seen:
        stops, highs, lows = (np.array([number], np.int64) for number in (end, *LOWEST))
    return Orders(stops, highs, lows)


@dataclass(frozen=True)
class TimedFile:
    """A raw file in the order of the carried time. An order is a time in milliseconds since the epoch, and 0."""

    uri: str
    first: int
    last: int
    records: int
    min_order: Order
    max_order: Order
    commit_time: int | None = None


def time_batch(
    states: Mapping[str, RawState | None],
    ranges: Mapping[str, Sequence[OffsetRange]],
    records: int,
    most: int | None = None,
) -> dict[str, tuple[OffsetRange, ...]]:
    """The part of new offsets that has about ``records`` records, the earliest by carried time, input, partition and offset.

    ``ranges``: topic → its new offsets, one range a partition; ``most``: the most offsets of the part. Later batches have the
    later records, so that the order of records does not depend on the ends of batches. Offsets without a record have no time,
    and are taken whole. LakeError if a file can't be read.
    """
    parts = {topic: (state, ranges[topic]) for topic, state in states.items() if state is not None and topic in ranges}
    files = {topic: [item for item in raw_files(*part) if not is_replay(item)] for topic, part in parts.items()}
    if most is None and sum(item.records for items in files.values() for item in items) <= records:
        return {topic: tuple(items) for topic, items in ranges.items()}
    streams = [
        stream
        for place, topic in enumerate(ranges)
        if topic in parts
        for stream in _time_streams(topic, place, *parts[topic], files[topic])
    ]
    times: RecentCache[str, Orders] = RecentCache(4_000_000)

    def read(_: Stream, item: File) -> Orders:
        assert isinstance(item, TimedFile)
        return times.load(item.uri, lambda: _times(item), lambda orders: len(orders.offsets))

    ends = batch_of(streams, END, records, read).ends
    if most is not None:
        least = min(most, sum(stream.next - stream.seen for stream in streams)) // 2
        # Where times are uneven, the estimate would take a few records again and again.
        while sum(ends[stream.name] - stream.seen for stream in streams) < least:
            records *= 2
            ends = batch_of(streams, END, records, read).ends
        ends = bounded(streams, ends, most, read)
    return {
        topic: tuple(replace(part, end=end) for part in items if (end := ends[topic, part.partition]) > part.first)
        for topic, items in ranges.items()
    }


def _time_streams(
    topic: str, place: int, state: RawState, ranges: Iterable[OffsetRange], files: Sequence[DataFile]
) -> Iterator[Stream]:
    floors = time_floors(raw_files(state), state.retention_time)
    for part in ranges:
        time, timed_files = 0, list[TimedFile]()
        for item in files:
            if item.partition == part.partition:
                low = max(time, floors.get(item.path, 0), item.min_time or 0)
                time = max(low, item.max_time or 0)
                uri = storage.join(state.table.uri, item.path)
                offsets = item.first or 0, item.last or 0
                timed_files.append(TimedFile(uri, *offsets, item.records, (low, 0), (time, 0)))
        highest = (time, 0) if timed_files else None
        yield Stream(topic, part.partition, place, part.first, part.end, timed_files, highest)


def _times(item: TimedFile) -> Orders:
    """The carried times in a raw file; LakeError if the file can't be read."""
    kafka = storage.read_file(item.uri, ["kafka.offset", "kafka.time"])["kafka"].combine_chunks()
    offsets, times = (
        pc.fill_null(pc.struct_field(kafka, name).cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
        for name in ("offset", "time")
    )
    # A table of an older version has a running maximum within each file only.
    millis = np.maximum.accumulate(np.maximum(times // 1000, item.min_order[0]))
    return Orders(offsets, millis, np.zeros_like(millis))
