"""Changes that a connector sends again: which new records of a partition repeat a change that the raw table has.

A connector that was killed sends the changes since its last committed position again. Kafka holds them twice, at two
offsets. A record is a repeat if exactly one earlier record of its partition has its key and its position in the log of the
source, and the values are equal. Only connectors with unique positions have repeats: PostgreSQL's and SQL Server's. The
time at which the connector made the envelope (``ts_ms``) and the numbers within the transaction (``transaction``) may
differ. All of ``source`` must be equal: a log that begins anew reaches an old position at another time.

A task of ingest sees whether its records go back (``carrier``). Only then are the files of the batch searched (``leave_out``),
before a commit names them. The orders of the raw table are the positions of the changes that came first, so that statistics
name the files to search. A tombstone has the position of the delete right before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.codecs.arrays import numeric_type, pc
from zync_assets.errors import DataLoss
from zync_assets.ingest.carrier import Longs, Places, position_at
from zync_assets.ingest.order import connector_of, own_orders
from zync_assets.ingest.source import TopicSource, read_chunks
from zync_assets.lake import storage
from zync_assets.lake.log import DataFile, Order
from zync_assets.lake.raw import ORDER
from zync_assets.lake.raw_files import (
    KAFKA_TYPE,
    LOWEST,
    ORDER_TYPE,
    RangeWriter,
    dropped_rows,
    order_at,
)
from zync_assets.offsets import Mark, OffsetRange
from zync_assets.pipeline import Input

Mask = npt.NDArray[np.bool_]

_ROWS = 50_000
_POSITION_COLUMNS = ("kafka.offset", "key", "value.op", "value.source", ORDER)
_ENVELOPE_TIMES = ("ts_ms", "ts_us", "ts_ns")
"""When the connector made an envelope, in three units."""
RESTART_MILLIS = 1000
"""The least time between two records of one change."""
REPEAT = "the connector sent this change again"
"""The text of the left-out records in the side table."""


def has_positions(item: Input) -> bool:
    """Whether the records of an input reach the raw table whole, and may have positions in the log of the source. The values of
    ``order.by`` need not tell two changes apart."""
    order = item.order
    return item.shape is None and (order is None or not (order.time or order.transactions or order.by is not None))


@dataclass(frozen=True)
class PartitionSearch:
    """A search for repeats among the new records of one partition.

    ``files``: the uncommitted files of the records, with their final orders; ``earlier_files``: the partition's files of the
    raw table; ``before``: the order before the new records; ``end_mark``: the last record before the new records; ``uri``,
    ``side_uri``: the raw table and its side table; ``file_prefix``: of the new files' names.
    """

    source: TopicSource = field(repr=False)
    partition: int
    files: Sequence[DataFile]
    earlier_files: Sequence[DataFile]
    before: Order
    end_mark: Mark | None
    uri: str
    side_uri: str
    file_prefix: str


@dataclass(frozen=True)
class Remainder:
    """The records of a partition without the repeats. ``files``: path of an uncommitted file → the files in its place;
    ``dropped``: side files with the offset ranges of the ``repeats``; ``repeats``: their number."""

    files: Mapping[str, Sequence[DataFile]] = field(default_factory=dict[str, Sequence[DataFile]])
    dropped: Sequence[DataFile] = ()
    repeats: int = 0


class _Candidate(NamedTuple):
    """A record that may be a repeat. ``order``: its position; ``is_below``: the position is below the orders before;
    ``delete``: the offset of the delete before a tombstone, if the delete is among the new records."""

    order: Order
    is_below: bool
    delete: int | None = None


class _Change(NamedTuple):
    """The change of a record. ``key``: a digest of order, key, and whether the record is a tombstone; ``content``: a digest of
    order, key and value; ``creates``: whether it creates a row; ``time``: of the envelope, in milliseconds since the epoch."""

    key: bytes
    content: bytes
    creates: bool
    time: int | None


def leave_out(search: PartitionSearch) -> Remainder:
    """The new records of a partition without those that repeat an earlier record. The old files stay, because Spark may run the
    task again. LakeError if a file can't be read or written."""
    candidates = _candidates(search)
    if not candidates:
        return Remainder()
    repeats = _repeats(search, candidates)
    if not repeats:
        return Remainder()
    offsets = np.array(sorted(repeats), np.int64)
    files: dict[str, Sequence[DataFile]] = {}
    with ExitStack() as writers:
        side = writers.enter_context(RangeWriter(search.side_uri, search.partition, search.file_prefix))
        gaps = Gaps(REPEAT)
        for item in search.files:
            first, last = np.searchsorted(offsets, [item.first or 0, (item.last or 0) + 1])
            if first == last:
                continue
            with RangeWriter(search.uri, search.partition, search.file_prefix) as data:
                for batch in storage.read_parts(storage.join(search.uri, item.path), _ROWS):
                    is_repeat = pc.is_in(pc.struct_field(batch.column("kafka"), "offset"), pa.array(offsets))
                    side.write(gaps.add(batch.column("kafka").cast(KAFKA_TYPE).filter(is_repeat)))
                    data.write(batch.filter(pc.invert(is_repeat)))
            files[item.path] = [data_file for data_file, _ in data.files]
        side.write(gaps.last_range())
    return Remainder(files, [data_file for data_file, _ in side.files], len(repeats))


def _candidates(search: PartitionSearch) -> dict[int, _Candidate]:
    """Offset → the records that may be repeats. A tombstone may be a repeat if the delete right before it may be."""
    candidates: dict[int, _Candidate] = {}
    before, delete, has_begun = search.before, None, False
    for item in search.files:
        for records in storage.read_parts(storage.join(search.uri, item.path), _ROWS, _POSITION_COLUMNS):
            if ORDER not in records.schema.names or "value" not in records.schema.names:
                continue
            if not identifies_changes(records.schema.field("value").type):
                return {}
            values, offsets = records.column("value"), pc.struct_field(records.column("kafka"), "offset").to_pylist()
            places = Places(_own_orders(search.source, records), records.column(ORDER), before)
            before = order_at(records.column(ORDER), -1)
            keys = records.column("key") if "key" in records.schema.names else pa.nulls(len(values))
            has_key = keys.is_valid().to_numpy(zero_copy_only=False)
            for at in np.flatnonzero(places.below | (places.equal & has_key)).tolist():
                candidates[offsets[at]] = _Candidate(position_at(places, at), bool(places.below[at]))
            if not has_begun and not values[0].is_valid:
                delete = _delete_before(search)
            has_begun = True
            is_delete = _is_delete(values)
            for at in np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False)).tolist():
                if at > 0:
                    delete = _delete_at(keys, at - 1, candidates, offsets[at - 1]) if is_delete[at - 1] else None
                if delete is not None and delete.key == _key_at(keys, at):
                    candidates[offsets[at]] = delete.candidate
            last = len(values) - 1
            delete = _delete_at(keys, last, candidates, offsets[last]) if is_delete[last] else None
    return candidates


def identifies_changes(value: pa.DataType) -> bool:
    """Whether ``source`` identifies a change of a row: by a position that is unique in the log, and by the time of the change.
    A log that begins anew reaches an old position at another time."""
    connector = connector_of(value)
    return connector is not None and connector.unique and value.field("source").type.get_field_index("ts_ms") >= 0


def _own_orders(source: TopicSource, records: pa.RecordBatch) -> pa.StructArray:
    """The positions of some records, null where a record has none. Records with null values alone have no column ``value``."""
    sides = {name: records.column(name) for name in ("kafka", "key", "value") if name in records.schema.names}
    orders = own_orders(source.topic, source.order, sides) if "value" in sides else None
    return pa.nulls(records.num_rows, ORDER_TYPE) if orders is None else orders


def _is_delete(values: pa.Array) -> Mask:
    if not pa.types.is_struct(values.type) or values.type.get_field_index("op") < 0:
        return np.zeros(len(values), np.bool_)
    is_delete = pc.equal(pc.struct_field(values, "op"), pa.scalar("d", values.type.field("op").type))
    return pc.fill_null(is_delete, False).to_numpy(zero_copy_only=False)


class _Delete(NamedTuple):
    """A delete that may be a repeat, and the content of its key."""

    key: Any
    candidate: _Candidate


def _delete_at(keys: pa.Array, at: int, candidates: Mapping[int, _Candidate], offset: int) -> _Delete | None:
    candidate = candidates.get(offset)
    if candidate is None or not keys[at].is_valid:
        return None
    return _Delete(_key_at(keys, at), candidate._replace(delete=offset))


def _key_at(keys: pa.Array, at: int) -> Any:
    return _content(_python_rows(pa.record_batch([keys.slice(at, 1)], ["key"]))[0]["key"])


def _delete_before(search: PartitionSearch) -> _Delete | None:
    """The record before the new records, if it is a delete that was left out. Kafka has it: the raw table has not."""
    if search.end_mark is None:
        return None
    part = OffsetRange(search.partition, search.end_mark.offset, search.end_mark.offset + 1)
    try:
        chunks = list(read_chunks(search.source, part, now=0))
    except DataLoss:
        return None  # retention or compaction removed it
    for records in (
        chunk.records for chunk in chunks if chunk.records.num_rows and "key" in chunk.records.schema.names
    ):
        order = records.column(ORDER)[0] if ORDER in records.schema.names else pa.scalar(None)
        if "value" in records.schema.names and order.is_valid and _is_delete(records.column("value"))[0]:
            own = order["high"].as_py(), order["low"].as_py()
            return _Delete(_key_at(records.column("key"), 0), _Candidate(own, own < search.before))
    return None


def _repeats(search: PartitionSearch, candidates: Mapping[int, _Candidate]) -> set[int]:
    """The offsets of the candidates that repeat a change: one earlier record, and no other, has the position and the key, and its
    content is the same.

    A creation at the position of the record right before may be an equal row of a table without a primary key. It is a repeat
    only if the connector made it RESTART_MILLIS later: a restart takes longer, and the rows of a COPY come at once.
    """
    repeats = set[int]()
    changes: dict[bytes, _Change | None] = {}
    """The change with a position and a key; None where there are several."""
    for offset, order, key, value in _rows(search, candidates):
        candidate = candidates.get(offset)
        change = _change(candidate.order if candidate else order, key, value)
        earlier = changes.get(change.key)
        if candidate is not None and earlier is not None and earlier.content == change.content:
            follows_repeat = candidate.delete is None or candidate.delete in repeats
            if follows_repeat and (candidate.is_below or not change.creates or _is_later(earlier, change)):
                repeats.add(offset)
                # An equal row of the same COPY may follow the repeat at once.
                changes[change.key] = change
                continue
        changes[change.key] = None if change.key in changes else change
    return repeats


def _is_later(earlier: _Change, change: _Change) -> bool:
    return earlier.time is not None and change.time is not None and change.time - earlier.time >= RESTART_MILLIS


def _rows(search: PartitionSearch, candidates: Mapping[int, _Candidate]) -> Iterator[tuple[int, Order, Any, Any]]:
    """The records at the candidates' positions, by offset: offset, position (of a tombstone: carried order), key and value.
    Without the candidates whose position no other record has."""
    orders = _pairs(*(np.array([item.order[side] for item in candidates.values()], np.int64) for side in (0, 1)))
    offsets = np.fromiter(candidates, np.int64, len(candidates))
    earlier_files = sorted(search.earlier_files, key=lambda item: item.first or 0)
    files = [*(item for item in earlier_files if _meets(item, orders)), *search.files]
    places = [(item, *_at_orders(storage.join(search.uri, item.path), orders)) for item in files]
    known_orders = np.concatenate([pairs for _, _, pairs in places])
    offsets = offsets[np.isin(orders, known_orders)]
    for item, near_offsets, _ in places:
        inside = offsets[(offsets >= (item.first or 0)) & (offsets <= (item.last or 0))]
        file_offsets = pa.array(np.union1d(near_offsets, inside))
        if not len(file_offsets):
            continue
        for rows in storage.read_parts(storage.join(search.uri, item.path), _ROWS):
            batch = rows.filter(pc.is_in(pc.struct_field(rows.column("kafka"), "offset"), file_offsets))
            if not batch.num_rows:
                continue
            sides = batch.select([name for name in ("key", "value") if name in batch.schema.names])
            orders_of_rows = pc.coalesce(_own_orders(search.source, batch), batch.column(ORDER)).to_pylist()
            row_offsets = pc.struct_field(batch.column("kafka"), "offset").to_pylist()
            for offset, order, row in zip(row_offsets, orders_of_rows, _python_rows(sides), strict=True):
                yield offset, (order["high"], order["low"]), row.get("key"), row.get("value")


def _pairs(high: Longs, low: Longs) -> npt.NDArray[np.void]:
    pairs = np.empty(len(high), [("high", np.int64), ("low", np.int64)])
    pairs["high"], pairs["low"] = high, low
    return pairs


def _at_orders(uri: str, orders: npt.NDArray[np.void]) -> tuple[Longs, npt.NDArray[np.void]]:
    """The offsets of a file's records with some carried orders, and these orders."""
    table = storage.read_file(uri, ["kafka.offset", ORDER]).combine_chunks()
    if ORDER not in table.column_names:
        return np.array([], np.int64), orders[:0]
    pairs = _pairs(
        *(
            pc.fill_null(pc.struct_field(table[ORDER], name), floor).to_numpy()
            for name, floor in zip(ORDER_TYPE.names, LOWEST, strict=True)
        )
    )
    is_near = np.isin(pairs, orders)
    return pc.struct_field(table["kafka"], "offset").to_numpy()[is_near], pairs[is_near]


def _meets(item: DataFile, orders: npt.NDArray[np.void]) -> bool:
    """Whether a file of the raw table may have a record with one of the orders. A file without ``max_order`` has no orders."""
    if item.max_order is None:
        return False
    low = (item.min_order or LOWEST)[0]
    return bool(low <= orders["high"].max() and orders["high"].min() <= item.max_order[0])


def _change(order: Order, key: Any, value: Any) -> _Change:
    time, creates = None, False
    if isinstance(value, Mapping):
        time, creates = value.get("ts_ms"), value.get("op") == "c"
        value = {name: part for name, part in value.items() if name not in (*_ENVELOPE_TIMES, "transaction")}
    key_content = _content(key)
    digests = _digest(order, key_content, value is None), _digest(order, key_content, _content(value))
    return _Change(*digests, creates, time if isinstance(time, int) else None)


def _python_rows(rows: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows by column names. Maps are lists of pairs. If Python can't hold one time of a row, the row has numbers for all its
    times. The other rows are as they would be alone."""
    with suppress(OverflowError, ValueError):
        return rows.to_pylist()
    if rows.num_rows > 1:
        return [row for at in range(rows.num_rows) for row in _python_rows(rows.slice(at, 1))]
    return rows.cast(pa.schema([item.with_type(numeric_type(item.type)) for item in rows.schema])).to_pylist()


def _digest(*content: Any) -> bytes:
    return hashlib.blake2b(repr(content).encode(errors="surrogatepass"), digest_size=16).digest()


def _content(value: Any) -> Any:
    """A value in one form for all types of its column: without null fields, since a column gets more fields with time, and
    with numbers in their shortest form."""
    if isinstance(value, Mapping):
        return sorted((name, _content(part)) for name, part in value.items() if part is not None)
    if isinstance(value, list | tuple):
        return [_content(part) for part in value]
    if isinstance(value, Decimal):
        text = format(value, "f")
        return text.rstrip("0").rstrip(".") if "." in text else text
    return value


class Gaps:
    """The offsets of left-out records, as ranges. No range spans a missing offset, because that record may be in quarantine."""

    def __init__(self, text: str | None = None) -> None:
        """``text``: why the records are left out. A shape excludes records without a text."""
        self._text = text
        self._open_range: tuple[pa.StructArray, int, int] | None = None

    def add(self, kafka: pa.StructArray) -> pa.RecordBatch:
        """The ranges that are complete by now. ``kafka``: places of left-out records, by offset."""
        if not len(kafka):
            return self._rows(kafka, [], [])
        offsets = pc.struct_field(kafka, "offset").to_numpy()
        starts = np.concatenate([[0], np.flatnonzero(np.diff(offsets) != 1) + 1])
        ends = np.concatenate([starts[1:], [len(offsets)]]) - 1
        firsts, lasts = offsets[starts], offsets[ends] + 1
        places = kafka.take(pa.array(starts))
        if self._open_range is not None:
            place, first, end = self._open_range
            if end == firsts[0]:
                firsts = np.concatenate([[first], firsts[1:]])
            else:
                firsts, lasts = np.concatenate([[first], firsts]), np.concatenate([[end], lasts])
                places = pa.concat_arrays([place, places])
        self._open_range = (places.slice(len(places) - 1), int(firsts[-1]), int(lasts[-1]))
        return self._rows(places.slice(0, len(places) - 1), firsts[:-1], lasts[:-1])

    def last_range(self) -> pa.RecordBatch:
        if self._open_range is None:
            return self._rows(pa.array([], KAFKA_TYPE), [], [])
        place, first, end = self._open_range
        return self._rows(place, [first], [end])

    def _rows(
        self, places: pa.StructArray, firsts: Sequence[int] | Longs, ends: Sequence[int] | Longs
    ) -> pa.RecordBatch:
        return dropped_rows(places, pa.array(firsts, pa.int64()), pa.array(ends, pa.int64()), self._text)
