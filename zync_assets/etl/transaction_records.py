"""The transactions of a domain, from the raw tables of the transaction topic and of the changes.

The I/O around ``etl.transactions``. Small columns of single files are read: END records that ETL has not reached, and the
changes in files at the end of their partition. Both are kept in memory from batch to batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.errors import EtlError
from zync_assets.etl.end_records import EndRecords, Events, merge_ends, placed_ends
from zync_assets.etl.transactions import Counting, WholeTransactions, is_free, slowest, whole_transactions
from zync_assets.ingest.order import is_binlog_id, transaction_ends, transaction_names
from zync_assets.lake import quarantine_table, raw, storage
from zync_assets.lake.head import TransactionPosition
from zync_assets.lake.log import DataFile, Order
from zync_assets.lake.parquet_rows import RecentCache
from zync_assets.lake.raw import RawState
from zync_assets.lake.raw_files import LOWEST
from zync_assets.lake.readings import Frontier, Reading, frontier
from zync_assets.lake.sequence import END, File, Longs, OrderKey, ReadOrders, Stream
from zync_assets.lake.snapshot import Snapshot
from zync_assets.pipeline import Input, Pipeline

_ends: RecentCache[str, EndRecords] = RecentCache(2_000_000)
"""URI of a raw file → its END records. A frontier that waits needs the same files again and again."""
_events: RecentCache[str, Events] = RecentCache(2_000_000)
"""URI of a raw file → its changes, which a frontier that waits needs as often."""

_ID, _NUMBER = "id", "data_collection_order"
AGAIN = 200_000
"""The most records of the transaction topic that Debezium may send again after a restart. Where the ids of transactions hold no
end, ETL reads END records this far back."""


@dataclass(frozen=True)
class TransactionStreams:
    """A domain's streams, and those of its transaction topic (``closers``). ``confirmed``: (topic, partition) → the order that
    the stream confirms. ``readings``: the kept readings of all these topics. ``states``: topic → its raw table."""

    streams: Sequence[Stream]
    closers: Sequence[Stream]
    confirmed: Mapping[tuple[str, int], Order]
    readings: Sequence[Reading]
    states: Mapping[str, RawState | None]


def transaction_input(pipeline: Pipeline, domain: str, domains: Mapping[str, object]) -> Input | None:
    """The input with the transactions of a domain; None if the pipeline file names none."""
    transactions = pipeline.transactions
    if transactions is None:
        return None
    is_only = transactions.domain is None and len(domains) == 1
    is_own = is_only or domain == (transactions.domain or transactions.prefix)
    return pipeline.input(transactions.topic) if is_own else None


@dataclass(frozen=True)
class TransactionFrontier:
    """The frontier of a domain at the end of a transaction. ``own``: the streams whose changes name their transactions."""

    whole: WholeTransactions
    frontier: Frontier
    own: Sequence[Stream]
    counting: Counting
    is_binlog: bool

    def stops(self, key: OrderKey) -> Iterator[OrderKey]:
        """The keys at which a batch may end, instead of at ``key``."""
        return self.whole.stops(key, partial(is_free, self.own, self.counting.read))

    def position(self, before: TransactionPosition | None, key: OrderKey) -> TransactionPosition | None:
        """The transactions that ETL has taken after a batch that ends at ``key``; None before the first one."""
        order = key.high, key.low
        end = self.whole.last_end(order) or (before.end if before else None)
        overdue = [name for place, name in self.whole.overdue if place <= order]
        if end is None and not overdue:
            return before
        count, last, offset = (before.incomplete, before.last, before.next) if before else (0, None, None)
        if self.is_binlog:
            if before is None and end == LOWEST and not overdue:
                return None  # transactions of other tables: they confirm nothing
            offset = self.whole.next_offset(order) or offset
        return TransactionPosition(end or LOWEST, count + len(overdue), overdue[-1] if overdue else last, offset)


def transaction_frontier(
    pipeline: Pipeline,
    streams: TransactionStreams,
    front: Frontier,
    before: TransactionPosition | None,
    read: ReadOrders,
) -> TransactionFrontier:
    """The frontier of a domain at the end of a transaction. ``front``: the frontier without regard to transactions.

    Raises LakeError if a file can't be read.
    """
    assert pipeline.transactions is not None
    snapshot = Snapshot(pipeline, streams.states)
    states = streams.states
    read_events = partial(_events_of, states, read)
    parts = _ends_of(states[pipeline.transactions.topic], before)
    is_binlog = any(part.is_binlog for part in parts) or (before is not None and before.next is not None)
    tables, others = dict[str, list[Stream]](), list[Stream]()
    for stream in streams.streams:
        name = collection_of(pipeline, stream.topic, states[stream.topic], is_binlog=is_binlog)
        if name is not None:
            tables.setdefault(name, []).append(stream)
        elif _names_transactions(states[stream.topic]):
            others.append(stream)
    counting = Counting(
        tables,
        streams.closers,
        streams.readings,
        pipeline.transactions.limit,
        read_events,
        partial(_bad_offsets, snapshot),
        others,
        _past_names(parts, before),
    )
    above = None if before is None else before.end
    last = slowest(streams.streams, counting, streams.confirmed, above)
    floor = END if last is None else streams.confirmed[last.name]
    # A single partition keeps the order of its END records. Several partitions must confirm the order, as partitions of changes
    # do.
    confirmed_end = frontier(streams.closers, streams.confirmed).order
    ends = _placed_ends(parts, counting, before) if is_binlog else merge_ends(parts, above, confirmed_end)
    result = whole_transactions(ends, above, front.order, floor, counting)
    all_streams = [*streams.streams, *streams.closers]
    slowest_stream = last if floor < front.order else front.behind
    if result.blocker is not None:
        slowest_stream = next(stream for stream in all_streams if stream.topic in result.blocker.topics)
    return TransactionFrontier(result, Frontier(result.order, slowest_stream), counting.named, counting, is_binlog)


def _placed_ends(parts: Sequence[EndRecords], counting: Counting, before: TransactionPosition | None) -> EndRecords:
    """The END records that ETL has not reached, with the ends that the changes of the domain show."""
    above, first_offset = (None, 0) if before is None else (before.end, before.next or 0)
    changes = (
        counting.read(stream, item)
        for stream in counting.streams
        for item in stream.files
        if (item.max_order or LOWEST) >= (above or LOWEST)
    )
    return placed_ends(parts, first_offset, changes, above, counting.past)


def _past_names(parts: Sequence[EndRecords], before: TransactionPosition | None) -> frozenset[str]:
    """Some transactions that ETL has taken: the last incomplete one, and those with an END record that ETL has passed."""
    if before is None:
        return frozenset()
    names = [] if before.last is None else [before.last]
    first = before.next or 0
    for part in parts:
        names += part.names.filter(pa.array(part.offsets < first)).to_pylist()
    return frozenset(names)


def collection_of(pipeline: Pipeline, topic: str, state: RawState | None, *, is_binlog: bool) -> str | None:
    """The source's name of a topic's table; None if its changes can't be counted. EtlError if they must be counted."""
    assert pipeline.transactions is not None
    shape, name = pipeline.input(topic).shape, pipeline.transactions.collection(topic)
    is_shaped = shape is not None and (shape.where is not None or "value" in shape.sides)
    if is_binlog and (is_shaped or name is None):
        cure = (
            "Remove `where` and `value` from its shape" if is_shaped else "Name its table in `transactions.collections`"
        )
        raise EtlError(
            f"input {topic}: the changes of a transaction can't be counted, and the transaction ids of MySQL and MariaDB hold no"
            f" end. Nothing was transformed. {cure}, or remove `transactions` from the pipeline file."
        )
    if is_shaped:
        return None
    if is_binlog or state is None or "value" not in state.schema.names:
        return name
    return name if _names_transactions(state) else None


def _names_transactions(state: RawState | None) -> bool:
    """Whether a topic's changes have the ids of their transactions and their numbers."""
    if state is None or "value" not in state.schema.names:
        return False
    kind = _inner(state.schema.field("value").type, "transaction")
    number = None if kind is None else _inner(kind, _NUMBER)
    text = None if kind is None else _inner(kind, _ID)
    return number is not None and text is not None and pa.types.is_integer(number) and pa.types.is_string(text)


def _inner(kind: pa.DataType, name: str) -> pa.DataType | None:
    return kind.field(name).type if pa.types.is_struct(kind) and kind.get_field_index(name) >= 0 else None


def _bad_offsets(snapshot: Snapshot, stream: Stream) -> Longs:
    """The offsets of all records of a stream that were ever put into quarantine."""
    state = snapshot.raw(stream.topic)
    offset_arrays = [np.zeros(0, np.int64)]
    if state is not None and state.bad.get(stream.partition):
        side = snapshot.quarantine(stream.topic)
        for item in quarantine_table.quarantine_files(state, side):
            if side is not None and item.partition == stream.partition:
                kafka = storage.read_file(storage.join(side.uri, item.path), ["kafka.offset"])["kafka"].combine_chunks()
                offset_arrays.append(pc.struct_field(kafka, "offset").to_numpy(zero_copy_only=False))
    return np.concatenate(offset_arrays)


def _events_of(states: Mapping[str, RawState | None], read: ReadOrders, stream: Stream, item: File) -> Events:
    state = states[stream.topic]
    assert state is not None and isinstance(item, DataFile)
    uri = storage.join(state.table.uri, item.path)
    cached_events = _events.get(uri)
    if cached_events is not None:
        return cached_events
    orders = read(stream, item)
    table = storage.read_file(uri, ["value.op", f"value.transaction.{_ID}", f"value.transaction.{_NUMBER}"])
    count = len(orders.offsets)
    value = table["value"].combine_chunks() if "value" in table.column_names else pa.nulls(count)
    transaction = _field(value, "transaction", count)
    numbers = _field(transaction, _NUMBER, count).cast(pa.int64())
    ids = _field(transaction, _ID, count).cast(pa.string())
    op = _field(value, "op", count).cast(pa.string())
    deletes = count > 0 and value[-1].is_valid and op[-1].as_py() in ("d", None)
    events = Events(orders, pc.fill_null(numbers, 0).to_numpy(zero_copy_only=False), ids, deletes)
    _events.put(uri, events, count)
    return events


def _field(values: pa.Array, name: str, count: int) -> pa.Array:
    """A field of some structs; nulls where the structs lack it."""
    return pa.nulls(count) if _inner(values.type, name) is None else pc.struct_field(values, name)


def _ends_of(state: RawState | None, before: TransactionPosition | None) -> list[EndRecords]:
    """The END records in the files of a transaction topic's table that may have some which ETL has not reached."""
    if state is None:
        return []
    raw.check_whole(state)
    files = state.files
    if before is not None and before.next is not None:
        files = [item for item in files if (item.last or 0) >= before.next - AGAIN]
    elif before is not None:
        files = [item for item in files if (item.max_order or LOWEST) >= before.end]
    return [end_records for item in files if (end_records := _ends_in(state, item)) is not None]


def _ends_in(state: RawState, item: DataFile) -> EndRecords | None:
    uri = storage.join(state.table.uri, item.path)
    records = _ends.get(uri)
    if records is None:
        table = storage.read_file(uri, ["kafka.offset", "value.status", "value.id", "value.data_collections"])
        if "value" not in table.column_names:
            return None
        records = _end_records(
            pc.struct_field(table["kafka"].combine_chunks(), "offset"), table["value"].combine_chunks()
        )
        _ends.put(uri, records, len(records.highs) + len(records.owners))
    since = np.inf if item.commit_time is None else item.commit_time / 1000
    return records._replace(since=np.full(len(records.highs), since))


def _end_records(offsets: pa.Array, value: pa.Array) -> EndRecords:
    """The END records among the records of a transaction topic."""
    ids = _field(value, "id", len(value)).cast(pa.string())
    highs, lows = transaction_ends(ids)
    is_binlog = pc.fill_null(is_binlog_id(ids), False)
    is_end = pc.equal(_field(value, "status", len(value)).cast(pa.string()), "END")
    is_chosen = pc.fill_null(pc.and_(is_end, pc.or_(pc.is_valid(highs), is_binlog)), False)
    rows, count = value.filter(is_chosen), pc.sum(is_chosen).as_py() or 0
    highs, lows = (
        pc.fill_null(collections.filter(is_chosen), part)
        for collections, part in zip((highs, lows), LOWEST, strict=True)
    )
    counts = _field(rows, "data_collections", count)
    if not pa.types.is_list(counts.type):
        counts = pa.nulls(count, pa.list_(pa.null()))
    collections = pc.list_flatten(counts)
    return EndRecords(
        highs.to_numpy(zero_copy_only=False),
        lows.to_numpy(zero_copy_only=False),
        offsets.filter(is_chosen).to_numpy(zero_copy_only=False),
        transaction_names(ids.filter(is_chosen)),
        np.zeros(count),
        pc.list_parent_indices(counts).to_numpy(zero_copy_only=False).astype(np.int64),
        _field(collections, "data_collection", len(collections)).cast(pa.string()),
        pc.fill_null(_field(collections, "event_count", len(collections)).cast(pa.int64()), 0).to_numpy(
            zero_copy_only=False
        ),
        is_binlog=bool(pc.any(is_binlog).as_py()),
    )
