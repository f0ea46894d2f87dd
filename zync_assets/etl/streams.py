"""The streams of a staging pool's domains, from the raw tables and the kept readings, and what an ETL batch takes of them. And
the readings of the topics' ends.

The I/O around ``lake.sequence``. An input without a source order keeps the order of time, and belongs to no domain.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from zync_assets.codecs.arrays import pc
from zync_assets.errors import LakeError, LakeUnavailable
from zync_assets.etl.transaction_records import (
    TransactionFrontier,
    TransactionStreams,
    transaction_frontier,
    transaction_input,
)
from zync_assets.etl.transactions import OpenTransaction
from zync_assets.ingest.order import has_orders
from zync_assets.kafka.topics import Survey, TopicState, survey
from zync_assets.lake import raw, storage
from zync_assets.lake.head import Head, Late, TransactionPosition
from zync_assets.lake.log import DataFile, Order
from zync_assets.lake.parquet_rows import RecentCache
from zync_assets.lake.raw import ORDER, RawState
from zync_assets.lake.raw_files import LOWEST, ORDER_TYPE
from zync_assets.lake.readings import (
    Frontier,
    Reading,
    TopicEnds,
    are_confirmed,
    confirmed_orders,
    frontier,
    keep_reading,
    read_readings,
)
from zync_assets.lake.sequence import Ends, File, Orders, ReadOrders, Stream, batch_of, highest_below, late_offsets
from zync_assets.lake.snapshot import Snapshot
from zync_assets.offsets import OffsetRange, new_ranges
from zync_assets.pipeline import Input, Pipeline

_log = logging.getLogger(__name__)

States = Mapping[str, RawState | None]
"""Input topic → the state of its raw table, None before the first ingest."""
Ranges = Mapping[str, Sequence[OffsetRange]]
"""Input topic → its new offsets."""
Domains = Mapping[str, Sequence[Input]]
"""Domain → the inputs that its frontier waits for."""

_orders: RecentCache[str, Orders] = RecentCache(4_000_000)
"""Raw file → the orders of its records. A frontier that waits is compared with the same files again and again."""


@dataclass(frozen=True)
class Cut:
    """The part of a domain's new records that a batch takes."""

    frontier: Frontier
    ranges: Mapping[str, tuple[OffsetRange, ...]]
    """Input topic → its offsets in the batch. Only topics whose records the domain takes."""
    reached: Order | None
    """The highest order of the records that ETL has taken, with those of this batch."""
    late: Mapping[tuple[str, int], Late]
    """(topic, partition) → the records of the batch that came below the orders that ETL had taken before."""
    transactions: TransactionPosition | None = None
    """The transactions that ETL has taken, with those of this batch. None where the pipeline file names no transaction topic."""
    blocker: OpenTransaction | None = None
    """The transaction that holds the frontier back."""


def may_be_ordered(item: Input, state: RawState | None) -> bool:
    """Whether an input's records have a source order, or may turn out to have one because no value has come yet."""
    if item.order is not None and item.order.time:
        return False
    if state is None or state.domain is not None or "value" not in state.schema.names:
        return True
    # A table of an older version has no domain before its next batch.
    return has_orders(item.order, state.schema.field("value").type)


def domains_of(inputs: Iterable[Input], states: States) -> Domains:
    """The domains of some inputs. An input that has no value yet may belong to any domain, and is in each."""
    members = [(item, states[item.topic]) for item in inputs if may_be_ordered(item, states[item.topic])]
    names = dict.fromkeys(state.domain for _, state in members if state is not None and state.domain is not None)
    return {name: [item for item, state in members if state is None or state.domain in (name, None)] for name in names}


def unseen(states: States, head: Head) -> dict[str, tuple[OffsetRange, ...]]:
    """Input topic → its offsets that are ingested and new to ETL."""
    return {
        topic: ()
        if state is None
        else tuple(new_ranges({**state.first, **state.retention_start, **head.seen(topic)}, state.next))
        for topic, state in states.items()
    }


def owners(domains: Domains) -> dict[str, str]:
    """Input topic → the domain that takes its records: the first one, for an input that has no value yet."""
    return {item.topic: name for name, members in reversed(list(domains.items())) for item in members}


def cuts(
    pipeline: Pipeline, domains: Domains, states: States, head: Head, ranges: Ranges, limits: Mapping[str, int]
) -> dict[str, Cut]:
    """Domain → its part of a batch. ``ranges``: all new offsets; ``limits``: domain → the number of records, about.

    LakeError if a raw file can't be read.
    """
    owner, read, cut_by_domain = owners(domains), partial(_orders_of, states), dict[str, Cut]()
    for name in domains:
        streams, front, transactions = _frontier(pipeline, name, domains, states, head, ranges, read)
        own_streams = [stream for stream in streams if owner[stream.topic] == name]
        stops = [] if transactions is None else [transactions.stops]
        batch = batch_of(own_streams, front.order, limits[name], read, *stops)
        ends = batch.ends
        new_streams = [stream for stream in own_streams if ends[stream.name] > stream.seen]
        old_reach = head.reached.get(name)
        orders = [old_reach, *(highest_below(stream, ends[stream.name], read) for stream in new_streams)]
        new_reach = max((order for order in orders if order is not None), default=None)
        late_records: dict[tuple[str, int], Late] = {}
        for stream in new_streams:
            first, end = late_offsets(stream, old_reach or LOWEST, ends[stream.name], read)
            if first < end:
                late_records[stream.name] = _late(stream, first, end, read)
        position = transactions.position(head.transactions.get(name), batch.key) if transactions else None
        blocker = transactions.whole.blocker if transactions else None
        cut_by_domain[name] = Cut(front, _ranges(own_streams, ranges, ends), new_reach, late_records, position, blocker)
    return cut_by_domain


def _frontier(
    pipeline: Pipeline, domain: str, domains: Domains, states: States, head: Head, ranges: Ranges, read: ReadOrders
) -> tuple[list[Stream], Frontier, TransactionFrontier | None]:
    """The streams of a domain, their frontier, and the transactions at the frontier. Without a transaction topic, the
    transactions are None."""
    members, tables = list(domains[domain]), dict(states)
    topic = transaction_input(pipeline, domain, domains)
    watched = members if topic is None else [*members, topic]
    if topic is not None:
        tables[topic.topic] = raw.open_raw(pipeline.lake, topic.pool, topic.topic)
    readings = _readings(pipeline, watched, tables)
    streams = _streams(pipeline, members, states, ranges, readings)
    closers = [] if topic is None else _streams(pipeline, [topic], tables, {topic.topic: ()}, readings)
    confirmed = confirmed_orders([*streams, *closers], readings, pipeline.order_delay)
    front = frontier(streams, confirmed)
    if topic is None:
        return streams, front, None
    transaction_streams = TransactionStreams(streams, closers, confirmed, readings, tables)
    transactions = transaction_frontier(pipeline, transaction_streams, front, head.transactions.get(domain), read)
    return streams, transactions.frontier, transactions


def _ranges(streams: Sequence[Stream], ranges: Ranges, ends: Ends) -> dict[str, tuple[OffsetRange, ...]]:
    return {
        topic: tuple(
            replace(part, end=min(part.end, end))
            for part in ranges[topic]
            if (end := ends[topic, part.partition]) > part.first
        )
        for topic in dict.fromkeys(stream.topic for stream in streams)
    }


def _late(stream: Stream, first: int, end: int, read: ReadOrders) -> Late:
    """The records of a stream from ``first`` to before ``end``."""
    count, earliest = 0, end
    for item in stream.files:
        low, high = item.first or 0, item.last or 0
        if high < first or low >= end:
            continue
        if first <= low and high < end:
            count, earliest = count + item.records, min(earliest, low)
            continue
        offsets = read(stream, item).offsets
        offsets = offsets[(offsets >= first) & (offsets < end)]
        if len(offsets):
            count, earliest = count + len(offsets), min(earliest, int(offsets[0]))
    return Late(count, earliest)


def _readings(pipeline: Pipeline, members: Sequence[Input], states: States) -> list[Reading]:
    """The kept readings of the members' raw pools. The ends of another topic of the same name are left out."""
    readings: list[Reading] = []
    for pool in dict.fromkeys(item.pool for item in members):
        tables = {item.topic: state for item in members if (state := states[item.topic]) is not None}
        for reading in read_readings(pipeline.lake, pool):
            ids = {topic: ends.topic_id for topic, ends in reading.topics.items() if topic in tables}
            other_topics = [topic for topic, name in ids.items() if name is None or not tables[topic].is_from(name)]
            readings.append(reading.without(other_topics))
    return readings


def _streams(
    pipeline: Pipeline, members: Sequence[Input], states: States, ranges: Ranges, readings: Iterable[Reading]
) -> list[Stream]:
    """The streams of some inputs, with the partitions that only a reading knows. A topic that does not exist
    counts as one stream."""
    places = {item.topic: place for place, item in enumerate(pipeline.inputs)}
    streams: list[Stream] = []
    for item in members:
        topic, state = item.topic, states[item.topic]
        partitions = {
            partition for reading in readings if topic in reading.topics for partition in reading.topics[topic].ends
        }
        if state is None:
            streams += [Stream(topic, partition, places[topic], 0, 0) for partition in sorted(partitions or {0})]
            continue
        first_offsets = {part.partition: part.first for part in ranges[topic]}
        highest, files, replays = state.orders, dict[int, list[DataFile]](), dict[int, list[DataFile]]()
        for file in state.files:
            (replays if raw.is_replay(file) else files).setdefault(file.partition or 0, []).append(file)
        for partition in sorted({*state.next, *partitions}):
            end = state.next.get(partition, 0)
            first = first_offsets.get(partition, end)
            stream_files = files.get(partition, []), highest.get(partition), replays.get(partition, [])
            streams.append(Stream(topic, partition, places[topic], first, end, *stream_files))
    return streams


def _orders_of(states: States, stream: Stream, item: File) -> Orders:
    """The orders in a raw file; LakeError if the file can't be read."""
    state = states[stream.topic]
    assert state is not None and isinstance(item, DataFile)
    uri = storage.join(state.table.uri, item.path)
    cached_orders = _orders.get(uri)
    if cached_orders is not None:
        return cached_orders
    table = storage.read_file(uri, ["kafka.offset", ORDER])
    offsets = pc.struct_field(table["kafka"].combine_chunks(), "offset").to_numpy(zero_copy_only=False)
    columns = [np.full(len(offsets), part) for part in LOWEST]
    if ORDER in table.column_names:
        orders = table[ORDER].combine_chunks()
        parts = zip(ORDER_TYPE.names, LOWEST, strict=True)
        columns = [
            pc.fill_null(pc.struct_field(orders, name), part).to_numpy(zero_copy_only=False) for name, part in parts
        ]
    file_orders = Orders(offsets, *columns)
    _orders.put(uri, file_orders, len(offsets))
    return file_orders


def read_ends(pipeline: Pipeline, patience: float | None = None, snapshot: Snapshot | None = None) -> Survey:
    """Read the ends of all inputs together, before any of them is ingested, and keep them in the lake.

    ``snapshot``: the raw tables, where they are open. Raises BrokerUnavailable and TrustError.
    """
    began = time.time()
    topic_ends = survey(pipeline.kafka, [item.topic for item in pipeline.inputs], patience=patience)
    keep_ends(snapshot or Snapshot(pipeline), topic_ends, began, time.time())
    return topic_ends


def keep_ends(snapshot: Snapshot, topic_ends: Survey, began: float, ended: float) -> None:
    """Keep the ends of the inputs that have a source order, or may have one.

    ``began``, ``ended``: the times around the request for ``topic_ends``, in seconds since the epoch. A lake that can't be
    written keeps nothing, which only delays ETL; a warning says so.
    """
    pipeline = snapshot.pipeline
    limit = math.inf if pipeline.transactions is None else pipeline.transactions.limit
    for pool, tables in _ordered_tables(snapshot).items():
        ends = {topic: _ends(topic_ends.states.get(topic)) for topic in tables if topic not in topic_ends.problems}
        try:
            keep_reading(pipeline.lake, pool, Reading(began, ended, ends), pipeline.order_delay, limit)
        except LakeError as error:
            _log.warning("the ends of the topics of %s are not kept: %s", pool, error)


def confirm_ends(pipeline: Pipeline, patience: float | None = None) -> Survey | None:
    """Read the ends of the inputs again if they were read but once, ``order-delay`` after the first time. Waits for that long.

    Returns the later ends, None if nothing was read. When the inputs are ingested up to the later ends, ETL transforms every
    record below the earlier ends. Without a source order, or with one stream alone, there is nothing to read.
    """
    snapshot = Snapshot(pipeline)
    tables = _ordered_tables(snapshot)
    states = [state for pool_tables in tables.values() for state in pool_tables.values()]
    streams = sum(1 if state is None else len(state.next) for state in states)
    if streams < 2 or all(state is None or state.domain is None for state in states):
        return None
    pool_readings = [read_readings(pipeline.lake, pool) for pool in tables]
    if all(are_confirmed(readings, pipeline.order_delay) for readings in pool_readings):
        return None
    since = time.time() - max((readings[-1].ended for readings in pool_readings if readings), default=0.0)
    time.sleep(max(0.0, min(pipeline.order_delay, pipeline.order_delay - since)))
    return read_ends(pipeline, patience, snapshot)


def _ordered_tables(snapshot: Snapshot) -> dict[str, dict[str, RawState | None]]:
    """Raw pool → topic → table, of the inputs that have a source order, or may have one. The step that uses a table reports a
    table that can't be opened."""
    tables_by_pool: dict[str, dict[str, RawState | None]] = {}
    for item in snapshot.pipeline.inputs:
        try:
            state = snapshot.raw(item.topic)
        except LakeUnavailable:
            return {}
        except LakeError:
            continue
        if may_be_ordered(item, state):
            tables_by_pool.setdefault(item.pool, {})[item.topic] = state
    return tables_by_pool


def _ends(state: TopicState | None) -> TopicEnds:
    if state is None:
        return TopicEnds(None)
    ends = {part.partition: part.end for part in state.partitions}
    return TopicEnds(state.topic_id, ends, frozenset(part.partition for part in state.partitions if part.is_open))
