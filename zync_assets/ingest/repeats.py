"""Changes that a connector sends again: which new records of a partition repeat a change that the raw table has.

A connector that was killed sends the changes since its last committed position again. Kafka holds them twice, at two offsets.
A record is a repeat if an earlier record of its partition has the same change: the same key and value, with the same position
in the log of the source. The time at which the connector made the envelope (``ts_ms``) and the numbers within the transaction
(``transaction``) may differ. All of ``source`` must be equal: a log that begins anew reaches an old position at another time.

A task of ingest sees whether its records go back (``Carrier``). Only then are the files of the batch searched (``leave_out``),
before a commit names them. The orders of the raw table are the positions of the changes that came first, so that statistics
name the files to search. A tombstone has the position of the delete right before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.codecs.arrays import pc, python_rows
from zync_assets.errors import DataLoss
from zync_assets.ingest.order import own_orders
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
    with_orders,
)
from zync_assets.offsets import Mark, OffsetRange
from zync_assets.pipeline import Input

Mask = npt.NDArray[np.bool_]
Longs = npt.NDArray[np.int64]

_ROWS = 50_000
_POSITION_COLUMNS = ("kafka.offset", "key", "value.op", "value.source", ORDER)
_ENVELOPE_TIMES = ("ts_ms", "ts_us", "ts_ns")
"""When the connector made an envelope, in three units."""
REPEAT = "the connector sent this change again"
"""The text of the left-out records in the side table."""


def has_positions(item: Input) -> bool:
    """Whether the records of an input reach the raw table whole, and may have positions in the log of the source. The values of
    ``order.by`` need not tell two changes apart."""
    order = item.order
    return item.shape is None and (order is None or not (order.time or order.transactions or order.by is not None))


class Carrier:
    """Gives the records of one part their carried orders, batch by batch.

    ``first``, ``last``: the orders at both ends; ``position``: the first position of a record. ``goes_back``: whether a record
    has a position that is not above the orders of the records before. Such a record may be a repeat. Of records with one
    position, only those with one key count: PostgreSQL gives the rows of a COPY one position.
    """

    def __init__(self, orders: Mapping[int, Order] | None, partition: int) -> None:
        """``orders``: as in ``RangeReading``. The records begin at the partition's order."""
        self.first: Order | None = None
        self.last = None if orders is None else orders.get(partition, LOWEST)
        self.position: Order | None = None
        self.goes_back = False
        self._last_keys: pa.Array | None = None
        """The keys of the last records, which have the order ``last``. None while these records began before the part."""

    def carry(self, records: pa.RecordBatch) -> pa.RecordBatch:
        own_orders = records.column(ORDER) if ORDER in records.schema.names else None
        before = self.last or LOWEST
        records, self.last = with_orders(records, self.last)
        if not records.num_rows:
            return records
        if self.first is None:
            self.first = order_at(records.column(ORDER), 0) if ORDER in records.schema.names else LOWEST
        if own_orders is not None and not self.goes_back:
            keys = records.column("key") if "key" in records.schema.names else pa.nulls(records.num_rows)
            if _ascends(own_orders, before):
                self.position = self.position or order_at(own_orders, 0)
                self._last_keys = keys.slice(len(keys) - 1)
                return records
            places = _Places(own_orders, records.column(ORDER), before)
            if self.position is None:
                self.position = next((_order(places, at) for at in np.flatnonzero(places.valid).tolist()), None)
            self.goes_back = self._goes_back(keys, places)
        return records

    def _goes_back(self, keys: pa.Array, places: _Places) -> bool:
        if places.below.any():
            return True
        # The runs of one order. Run 0 goes on from the records before.
        runs = np.cumsum(places.valid & ~places.equal)
        goes_on = (places.equal & (runs == 0)).any()
        if goes_on and self._last_keys is None:
            return True
        last_keys = keys.filter(pa.array(places.valid & (runs == runs[-1])))
        earlier_keys = keys.slice(0, 0)
        if self._last_keys is not None and self._last_keys.type.equals(keys.type):
            earlier_keys = self._last_keys
        if runs[-1] > 0:
            self._last_keys = last_keys
        elif self._last_keys is not None:
            self._last_keys = pa.concat_arrays([earlier_keys, last_keys])
        if not places.equal.any():
            return False
        in_run = places.valid & np.isin(runs, runs[places.equal])
        all_runs = np.concatenate([np.zeros(len(earlier_keys), np.int64), runs[in_run]])
        all_keys = pa.concat_arrays([earlier_keys, keys.filter(pa.array(in_run))])
        codes = all_runs * (len(all_keys) + 1) + _codes(all_keys)
        return len(np.unique(codes)) < len(codes)


def _ascends(own_orders: pa.StructArray, before: Order) -> bool:
    """Whether each record has a position above the one before: the common case, in a tenth of the time of ``_Places``."""
    if own_orders.null_count:
        return False
    high, low = (
        np.concatenate([[floor], pc.struct_field(own_orders, name).to_numpy(zero_copy_only=False)])
        for name, floor in zip(ORDER_TYPE.names, before, strict=True)
    )
    return bool(((high[1:] > high[:-1]) | ((high[1:] == high[:-1]) & (low[1:] > low[:-1]))).all())


class _Places:
    """How the own orders of a partition's records lie to the carried orders. ``before``: the order before the records.

    ``valid``: the record has a position, and is no snapshot; ``below``: the position is below the order of the records before;
    ``equal``: the position is that order.
    """

    def __init__(self, own_orders: pa.StructArray, orders: pa.StructArray, before: Order) -> None:
        own, carried = (
            [pc.fill_null(pc.struct_field(part, name), 0).to_numpy(zero_copy_only=False) for name in ("high", "low")]
            for part in (own_orders, orders)
        )
        has_order = own_orders.is_valid().to_numpy(zero_copy_only=False)
        self.valid = has_order & (own[0] != LOWEST[0])
        self.below = self.valid & ((own[0] != carried[0]) | (own[1] != carried[1]))
        self.equal = self.valid & ~self.below
        for values, floor, order in zip(own, before, carried, strict=True):
            self.equal &= values == np.concatenate([[floor], order[:-1]])
        self.own = np.column_stack(own)


def _order(places: _Places, at: int) -> Order:
    return int(places.own[at, 0]), int(places.own[at, 1])


def _codes(array: pa.Array) -> Longs:
    """A number for each value of an array, the same for equal values, below the array's length."""
    if pa.types.is_struct(array.type):
        codes = array.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)
        for child in array.flatten():
            codes = np.unique(codes * (len(array) + 1) + _codes(child), return_inverse=True)[1]
        return codes
    try:
        return array.dictionary_encode("encode").indices.to_numpy().astype(np.int64)
    except pa.ArrowNotImplementedError:  # lists and maps
        numbers: dict[str, int] = {}
        return np.array([numbers.setdefault(repr(value), len(numbers)) for value in array.to_pylist()], np.int64)


@dataclass(frozen=True)
class PartitionSearch:
    """A search for repeats among the new records of one partition.

    ``files``: the uncommitted files of the records, with their final orders; ``earlier_files``: the partition's files of the
    raw table; ``before``: the order before the new records; ``end_mark``: the last record before the new records; ``uri``,
    ``side_uri``: the raw table and its side table; ``side_name``: the prefix of the side files' names.
    """

    source: TopicSource = field(repr=False)
    partition: int
    files: Sequence[DataFile]
    earlier_files: Sequence[DataFile]
    before: Order
    end_mark: Mark | None
    uri: str
    side_uri: str
    side_name: str


@dataclass(frozen=True)
class Remainder:
    """The records of a partition without the repeats. ``files``: path of an uncommitted file → the files in its place;
    ``dropped``: side files with the offset ranges of the ``repeats``; ``repeats``: their number."""

    files: Mapping[str, Sequence[DataFile]] = field(default_factory=dict[str, Sequence[DataFile]])
    dropped: Sequence[DataFile] = ()
    repeats: int = 0


class _Candidate(NamedTuple):
    """A record that may be a repeat. ``order``: its position; ``is_below``: the position is below the orders before."""

    order: Order
    is_below: bool


class _Change(NamedTuple):
    """The change of a record. ``key``: a digest of order, key, and whether the record is a tombstone; ``content``: a digest of
    order, key and value."""

    key: bytes
    content: bytes


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
        side = writers.enter_context(RangeWriter(search.side_uri, search.partition, search.side_name))
        gaps = Gaps(REPEAT)
        for item in search.files:
            first, last = np.searchsorted(offsets, [item.first or 0, (item.last or 0) + 1])
            if first == last:
                continue
            with RangeWriter(search.uri, search.partition) as data:
                for rows in storage.read_parts(storage.join(search.uri, item.path), _ROWS):
                    batch = rows.combine_chunks().to_batches()[0]
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
        for rows in storage.read_parts(storage.join(search.uri, item.path), _ROWS, _POSITION_COLUMNS):
            if ORDER not in rows.column_names or "value" not in rows.column_names:
                continue
            records = rows.combine_chunks().to_batches()[0]
            values, offsets = records.column("value"), pc.struct_field(records.column("kafka"), "offset").to_pylist()
            places = _Places(_own_orders(search.source, records), records.column(ORDER), before)
            before = order_at(records.column(ORDER), -1)
            keys = records.column("key") if "key" in records.schema.names else pa.nulls(len(values))
            has_key = keys.is_valid().to_numpy(zero_copy_only=False)
            for at in np.flatnonzero(places.below | (places.equal & has_key)).tolist():
                candidates[offsets[at]] = _Candidate(_order(places, at), bool(places.below[at]))
            if not has_begun and not values[0].is_valid:
                delete = _delete_before(search)
            has_begun = True
            is_delete = _is_delete(values)
            for at in np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False)).tolist():
                if at > 0:
                    delete = _delete_at(keys, at - 1, candidates.get(offsets[at - 1])) if is_delete[at - 1] else None
                if delete is not None and delete.key == _key_at(keys, at):
                    candidates[offsets[at]] = delete.candidate
            last = len(values) - 1
            delete = _delete_at(keys, last, candidates.get(offsets[last])) if is_delete[last] else None
    return candidates


def _own_orders(source: TopicSource, records: pa.RecordBatch) -> pa.StructArray:
    sides = {name: records.column(name) for name in ("kafka", "key", "value") if name in records.schema.names}
    orders = own_orders(source.topic, source.order, sides)
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


def _delete_at(keys: pa.Array, at: int, candidate: _Candidate | None) -> _Delete | None:
    return None if candidate is None or not keys[at].is_valid else _Delete(_key_at(keys, at), candidate)


def _key_at(keys: pa.Array, at: int) -> Any:
    return _content(python_rows(pa.record_batch([keys.slice(at, 1)], ["key"]))[0]["key"])


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
            return _delete_at(records.column("key"), 0, _Candidate(own, own < search.before))
    return None


def _repeats(search: PartitionSearch, candidates: Mapping[int, _Candidate]) -> set[int]:
    """The offsets of the candidates that repeat a change.

    A position below the orders before: an earlier record has the change. The position of the records right before: the last
    record with its key and this position has the change. A position that several changes share is no proof: MySQL gives the
    changes of a compressed transaction one position, and a row may get an old value back.
    """
    repeats = set[int]()
    contents = set[bytes]()
    last_contents: dict[bytes, bytes] = {}
    for offset, order, key, value in _rows(search, candidates):
        candidate = candidates.get(offset)
        change = _change(candidate.order if candidate else order, key, value)
        if candidate is not None:
            is_known = (
                change.content in contents if candidate.is_below else last_contents.get(change.key) == change.content
            )
            if is_known:
                repeats.add(offset)
                continue
        contents.add(change.content)
        last_contents[change.key] = change.content
    return repeats


def _rows(search: PartitionSearch, candidates: Mapping[int, _Candidate]) -> Iterator[tuple[int, Order, Any, Any]]:
    """The candidates and the records with their orders, by offset: offset, carried order, key and value."""
    orders = {candidate.order for candidate in candidates.values()}
    highs, lows = (np.array(sorted({order[side] for order in orders}), np.int64) for side in (0, 1))
    offsets = np.array(sorted(candidates), np.int64)
    earlier_files = [item for item in search.earlier_files if _meets(item, highs)]
    for item in (*sorted(earlier_files, key=lambda item: item.first or 0), *search.files):
        uri = storage.join(search.uri, item.path)
        places = storage.read_file(uri, ["kafka.offset", ORDER]).combine_chunks()
        if ORDER not in places.column_names:
            continue
        file_offsets = pc.struct_field(places["kafka"], "offset").to_numpy()
        high, low = (
            pc.fill_null(pc.struct_field(places[ORDER], name), floor).to_numpy()
            for name, floor in zip(ORDER_TYPE.names, LOWEST, strict=True)
        )
        is_near = (np.isin(high, highs) & np.isin(low, lows)) | np.isin(file_offsets, offsets)
        if not is_near.any():
            continue
        near_offsets = pa.array(file_offsets[is_near])
        for rows in storage.read_parts(uri, _ROWS, ["kafka.offset", "key", "value", ORDER]):
            near_rows = rows.filter(pc.is_in(pc.struct_field(rows["kafka"], "offset"), near_offsets))
            for row in python_rows(near_rows):
                order = row[ORDER] or dict(zip(ORDER_TYPE.names, LOWEST, strict=True))
                yield row["kafka"]["offset"], (order["high"], order["low"]), row.get("key"), row.get("value")


def _meets(item: DataFile, highs: Longs) -> bool:
    """Whether a file of the raw table may have a record with one of the orders. ``highs``: their first parts, ascending."""
    if item.max_order is None or item.max_order[0] < highs[0]:
        return False
    return item.min_order is None or item.min_order[0] <= highs[-1]


def _change(order: Order, key: Any, value: Any) -> _Change:
    if isinstance(value, Mapping):
        value = {name: part for name, part in value.items() if name not in (*_ENVELOPE_TIMES, "transaction")}
    key_content = _content(key)
    return _Change(_digest(order, key_content, value is None), _digest(order, key_content, _content(value)))


def _digest(*content: Any) -> bytes:
    return hashlib.blake2b(repr(content).encode(errors="surrogatepass"), digest_size=16).digest()


def _content(value: Any) -> Any:
    """A value in one form for all types of its column: without null fields, since a column gets more fields with time, and
    with numbers in their shortest form."""
    if isinstance(value, Mapping):
        return sorted((name, _content(part)) for name, part in value.items() if part is not None)
    if isinstance(value, list):
        return [_content(part) for part in value]
    return format(value.normalize(), "f") if isinstance(value, Decimal) and value.is_finite() else value


class Gaps:
    """The offsets of left-out records, as ranges. No range spans a missing offset, because that record may be in quarantine."""

    def __init__(self, text: str | None = None) -> None:
        """``text``: why the records are left out; None for those that a shape excludes."""
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
