"""The orders of a partition's records at ingest: carried from record to record, and whether a record's position goes back.

A connector that sends changes again goes back in the log of the source. Such records may be repeats (``repeats``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.lake import storage
from zync_assets.lake.log import DataFile, Order
from zync_assets.lake.raw import ORDER, RawState
from zync_assets.lake.raw_files import LOWEST, ORDER_TYPE, Longs, order_at, running_orders, with_orders


class Carrier:
    """Gives the records of one part their carried orders, batch by batch.

    ``first``, ``last``: the orders at both ends; ``position``: the first position of a record. ``goes_back``: whether a record
    has a position that is not above the orders of the records before. Such a record may be a repeat. A record with
    the position of the record before counts only if both have one key: PostgreSQL gives the rows of a COPY one position.
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
            places = Places(own_orders, records.column(ORDER), before)
            if self.position is None:
                self.position = next((position_at(places, at) for at in np.flatnonzero(places.valid).tolist()), None)
            self.goes_back = self._goes_back(keys, places)
        return records

    def _goes_back(self, keys: pa.Array, places: Places) -> bool:
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
    """Whether each record has a position above the one before: the common case, in a tenth of the time of ``Places``."""
    if own_orders.null_count:
        return False
    high, low = (
        np.concatenate([[floor], pc.struct_field(own_orders, name).to_numpy(zero_copy_only=False)])
        for name, floor in zip(ORDER_TYPE.names, before, strict=True)
    )
    return bool(((high[1:] > high[:-1]) | ((high[1:] == high[:-1]) & (low[1:] > low[:-1]))).all())


class Places:
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


def position_at(places: Places, at: int) -> Order:
    """The own order of the record at a place, which must be valid."""
    return int(places.own[at, 0]), int(places.own[at, 1])


def orders_between(own_orders: pa.StructArray | None, before: Longs, after: Longs) -> pa.StructArray:
    """The carried orders of records that come into their places late. A record keeps its own order between ``before`` and
    ``after``. An order below ``before`` becomes ``before``, and one above ``after`` becomes ``after``. A record without an order
    gets ``before``.

    ``before``, ``after``: as in ``raw_files.orders_around``.
    """
    orders = before.copy()
    if own_orders is not None:
        parts = (pc.fill_null(pc.struct_field(own_orders, name), LOWEST[0]) for name in ORDER_TYPE.names)
        own = np.column_stack([part.to_numpy(zero_copy_only=False) for part in parts])
        is_above = own_orders.is_valid().to_numpy(zero_copy_only=False) & _is_below(before, own)
        orders[is_above] = np.where(_is_below(after, own)[:, None], after, own)[is_above]
    columns = [pa.array(orders[:, side].copy()) for side in (0, 1)]
    # Several of them may lie between two records.
    return running_orders(pa.StructArray.from_arrays(columns, fields=list(ORDER_TYPE)), LOWEST)


def highest_orders(state: RawState, files: Sequence[DataFile]) -> dict[int, Order]:
    """Partition → the highest order in the new files of a replay, where it is above all orders of the partition before.

    LakeError if a file can't be read.
    """
    highest: dict[int, Order] = {}
    for item in files:
        partition = item.partition or 0
        if item.max_order is not None and item.max_order > (known := state.orders.get(partition, LOWEST)):
            orders = storage.read_file(storage.join(state.table.uri, item.path), [ORDER])[ORDER].combine_chunks()
            highest[partition] = max(order_at(orders, -1), known, highest.get(partition, LOWEST))
    return {partition: order for partition, order in highest.items() if order > state.orders.get(partition, LOWEST)}


def _is_below(left: Longs, right: Longs) -> npt.NDArray[np.bool_]:
    return (left[:, 0] < right[:, 0]) | ((left[:, 0] == right[:, 0]) & (left[:, 1] < right[:, 1]))


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
