"""The order of a record in its source: the positions of Debezium's connectors, or a field that the pipeline file names.

An order is a pair of longs, ``high`` and ``low``, compared as a tuple (``lake.raw_files.ORDER_TYPE``). The functions here give
a record its own order, or null where a record has none: tombstones, and Debezium's incremental snapshots. ``lake.raw_files``
carries the orders within a partition. Records of an initial snapshot come before all changes, and have the order LOWEST.

An envelope shows its connector by the fields of its ``source`` struct. The functions work on whole columns.

An END record of Debezium's transaction topic has the *end* of its transaction as its order: the least order above the orders
of the transaction's changes. The id of the record holds the position (``transaction_ends``). A BEGIN record has no order. The
ids of MySQL and MariaDB hold no end. Their END records have no order either, and ETL finds the places of the transactions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.errors import SchemaError
from zync_assets.lake.raw_files import LOWEST, ORDER_KINDS, ORDER_TYPE, is_orderly
from zync_assets.pipeline import SourceOrder
from zync_assets.spark.sql import name_sql

Pair = tuple[pa.Array, pa.Array]
"""``high`` and ``low``, as longs."""
Longs = npt.NDArray[np.int64]

_SNAPSHOTS = ("true", "first", "first_in_data_collection", "last_in_data_collection", "last", "initial")
_SEQUENCE = r'^\[\s*(?:"(?P<high>[0-9]{1,18})"|null)\s*,\s*(?:"(?P<low>[0-9]{1,18})"|null)\s*\]$'
_TRANSACTION_ID = r"^(?P<txid>[0-9]{1,20}):(?P<lsn>[0-9]{1,18})$"
_BINLOG_ID = r"^(file=.+,pos=[0-9]+|[0-9A-Fa-f-]{36}(:[a-z_0-9]+)?:[0-9]+|[0-9]+-[0-9]+-[0-9]+)$"
"""The ids of MySQL's and MariaDB's transactions: the place of the transaction's begin, or the GTID of one of the two."""
_FILE_NUMBER = r"\.(?P<number>[0-9]{1,6})$"


@dataclass(frozen=True)
class Connector:
    """A kind of Debezium source: the fields that show it, and the position of its records. ``unique``: whether no two changes of
    a row have one position. MySQL gives all changes of a compressed transaction the position of the transaction, and MongoDB's
    numbers count operations, not changes."""

    numbers: frozenset[str]
    texts: frozenset[str]
    position: Callable[[pa.StructArray], Pair]
    unique: bool

    def fits(self, source: pa.DataType) -> bool:
        types = {item.name: item.type for item in source}
        return (
            all(name in types and pa.types.is_integer(types[name]) for name in self.numbers)
            and all(name in types and pa.types.is_string(types[name]) for name in self.texts | {"connector"})
            and "snapshot" in types
        )


def connector_of(value: pa.DataType) -> Connector | None:
    """The connector that an envelope's type shows; None for another type, and for a connector without a known order."""
    if not pa.types.is_struct(value) or value.get_field_index("source") < 0:
        return None
    source = value.field("source").type
    return (
        next((connector for connector in _CONNECTORS if connector.fits(source)), None)
        if pa.types.is_struct(source)
        else None
    )


def has_orders(order: SourceOrder | None, value: pa.DataType | None) -> bool:
    """Whether ``own_orders`` gives orders for records with values of a type (None: not known yet)."""
    if order is not None and (order.time or order.by is not None):
        return order.path is not None
    if order is not None and order.transactions:
        return value is not None
    return value is not None and connector_of(value) is not None


def own_orders(topic: str, order: SourceOrder | None, columns: Mapping[str, pa.Array]) -> pa.StructArray | None:
    """The orders of some records, null where a record has none. None for inputs in the order of time, for expressions that
    Spark evaluates, and for values that are no envelope. ``columns``: ``kafka``, ``key``, ``value``.

    SchemaError if the pipeline file names a missing field, a field of a type without an order, or a transaction topic whose
    records have no positions.
    """
    if order is not None and order.transactions:
        return _transaction_orders(topic, columns["kafka"], columns["value"])
    if order is not None and (order.time or order.by is not None):
        return None if order.path is None else _at_path(f"input {topic}, order.by: {order.by}", order.path, columns)
    value = columns["value"]
    connector = connector_of(value.type)
    if connector is None:
        return None
    source = pc.struct_field(value, "source")
    high, low = connector.position(source)
    high = pc.if_else(_is_snapshot(source), pa.scalar(LOWEST[0], pa.int64()), high)
    high = pc.if_else(_is_incremental(source), pa.scalar(None, pa.int64()), high)
    return _orders(high, pc.if_else(_is_snapshot(source), pa.scalar(LOWEST[1], pa.int64()), low))


def _transaction_orders(topic: str, kafka: pa.Array, value: pa.Array) -> pa.StructArray | None:
    """The orders of the records of a transaction topic. SchemaError for records of another kind."""
    if pa.types.is_null(value.type):
        return None
    place, cure = f"transactions.topic: {topic}", "Nothing was ingested. Remove transactions: from the pipeline file"
    fields = [item.name for item in value.type] if pa.types.is_struct(value.type) else []
    missing_names = [name for name in ("id", "status") if name not in fields]
    if missing_names:
        raise SchemaError(
            f"{place} has records without a field {missing_names[0]}, so that it is no transaction topic of Debezium. {cure}."
        )
    ids = pc.struct_field(value, "id")
    if not pa.types.is_string(ids.type):
        raise SchemaError(f"{place} has ids of type {ids.type}, and Debezium's are strings. {cure}.")
    high, low = transaction_ends(ids)
    binlog = pc.fill_null(is_binlog_id(ids), False)
    unknown_ids = ids.filter(pc.and_(pc.is_valid(ids), pc.and_(pc.is_null(high), pc.invert(binlog))))
    if len(unknown_ids):
        raise SchemaError(_position_problem(place, str(unknown_ids[0].as_py())) + f" {cure}.")
    partitions = pc.struct_field(kafka, "partition").filter(binlog)
    if len(partitions) and (partition := pc.max(partitions).as_py()):
        raise SchemaError(
            f"{place} has records in partition {partition}. The ids of MySQL and MariaDB hold no end, so that the order of the"
            " records must show the order of the transactions. Nothing was ingested. Create the topic with one partition."
        )
    # A BEGIN record comes before the changes, and confirms nothing.
    is_end = pc.fill_null(pc.equal(pc.struct_field(value, "status").cast(pa.string()), "END"), False)
    return _orders(pc.if_else(is_end, high, pa.scalar(None, pa.int64())), low)


def _position_problem(place: str, id: str) -> str:
    if id.startswith("{"):
        return (
            f"{place} has the transaction id {id} of MongoDB. MongoDB's connector writes an END record only when another change"
            " comes. The last transaction of a quiet source would wait for ever."
        )
    return (
        f"{place} has the transaction id {id}, which holds no position in the log of the source. The ids of PostgreSQL (Debezium"
        " 2 or later), SQL Server, MySQL and MariaDB are known."
    )


def is_binlog_id(ids: pa.Array) -> pa.Array:
    """Whether each id is a transaction of MySQL or MariaDB: a begin in a file of the binary log, or a GTID."""
    return pc.match_substring_regex(ids, _BINLOG_ID)


def transaction_ends(ids: pa.Array) -> Pair:
    """The ends of transactions by the ids of their END records, null for an id that holds no position.

    PostgreSQL: the number of the transaction, and the LSN of its commit. The changes of the next transaction have this LSN as
    ``high``. SQL Server: the LSN of the commit, which the orders of the changes begin with.
    """
    lsn = _digits(pc.struct_field(pc.extract_regex(ids, _TRANSACTION_ID), "lsn"))
    file, block, slot = _lsn(ids)
    high = (np.maximum(file, 0) & 0x7FFF_FFFF) << 32 | np.maximum(block, 0)
    is_last = slot >= 0x7FFF
    is_lsn, null = pa.array(file >= 0), pa.scalar(None, pa.int64())
    low = np.where(is_last, -(2**63), (np.clip(slot, 0, 0x7FFE) + 1) << 48)
    server = [pc.if_else(is_lsn, pa.array(numbers), null) for numbers in (high + is_last, low)]
    zero = pc.if_else(pc.is_valid(lsn), pa.scalar(0, pa.int64()), null)
    return pc.coalesce(lsn, server[0]), pc.coalesce(zero, server[1])


def transaction_names(ids: pa.Array) -> pa.Array:
    """The ids of transactions without the positions that PostgreSQL's connector puts after them: each change of a transaction
    has a position of its own."""
    number = pc.struct_field(pc.extract_regex(ids, _TRANSACTION_ID), "txid")
    return pc.coalesce(pc.if_else(pc.equal(number, ""), pa.scalar(None, pa.string()), number), ids)


def source_name(records: pa.RecordBatch) -> str | None:
    """The ``source.name`` of the first envelope among some records."""
    if "value" not in records.schema.names:
        return None
    value = records.column("value")
    if connector_of(value.type) is None or value.type.field("source").type.get_field_index("name") < 0:
        return None
    names = pc.struct_field(pc.struct_field(value, "source"), "name").drop_null()
    return names[0].as_py() if len(names) else None


def order_sql(sql: str, kind: pa.DataType, place: str) -> str:
    """An order in Spark SQL, of an expression of a type; null where the expression is null. ``place``: the expression's place
    and text, for the error. SchemaError for a type without an order."""
    if pa.types.is_null(kind):
        return "CAST(NULL AS STRUCT<high: BIGINT, low: BIGINT>)"
    if not is_orderly(kind):
        raise _no_order(place, kind)
    pair = [(sql, kind)]
    if pa.types.is_struct(kind):
        pair = [(f"{sql}.{name_sql(item.name)}", item.type) for item in kind]
    high, low = [*(_long_sql(*part) for part in pair), "0L"][:2]
    return f"CASE WHEN {high} IS NOT NULL THEN named_struct('high', {high}, 'low', coalesce({low}, 0L)) END"


def _long_sql(sql: str, kind: pa.DataType) -> str:
    """As ``_long``, in Spark SQL."""
    if pa.types.is_timestamp(kind):
        return f"unix_micros(CAST({sql} AS TIMESTAMP))"
    return f"CAST({f'unix_date({sql})' if pa.types.is_date(kind) else sql} AS BIGINT)"


def _no_order(place: str, kind: pa.DataType) -> SchemaError:
    return SchemaError(
        f"{place} is {kind}, and an order is {ORDER_KINDS}. Nothing was ingested. Name such a field, or CAST the expression."
    )


def _at_path(place: str, path: tuple[str, ...], columns: Mapping[str, pa.Array]) -> pa.StructArray | None:
    column = columns[path[0]]
    for name in path[1:]:
        if pa.types.is_null(column.type):
            return None  # the records have nulls alone so far
        names = [item.name for item in column.type] if pa.types.is_struct(column.type) else []
        # Spark SQL compares names without regard to case, and so does a path.
        exact = [item for item in names if item == name] or [item for item in names if item.lower() == name.lower()]
        if not exact:
            raise SchemaError(
                f"{place}: the records have no field {name}. Nothing was ingested. Correct the name in the pipeline file."
            )
        column = pc.struct_field(column, exact[0])
    if pa.types.is_null(column.type):
        return None
    if not is_orderly(column.type):
        raise _no_order(place, column.type)
    if pa.types.is_struct(column.type):
        high, low = (_long(pc.struct_field(column, item.name)) for item in column.type)
        return _orders(high, low)
    high = _long(column)
    return _orders(high, pa.repeat(pa.scalar(0, pa.int64()), len(high)))


def _long(values: pa.Array) -> pa.Array:
    """Integers; timestamps as microseconds and dates as days, both since the epoch."""
    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.timestamp("us", values.type.tz))
    if pa.types.is_date(values.type):
        values = values.cast(pa.date32()).cast(pa.int32())
    return values.cast(pa.int64())


def _orders(high: pa.Array, low: pa.Array) -> pa.StructArray:
    low = pc.if_else(pc.is_valid(high), pc.fill_null(low, 0), pa.scalar(None, pa.int64()))
    return pa.StructArray.from_arrays([high, low], fields=list(ORDER_TYPE), mask=pc.is_null(high))


def _is_snapshot(source: pa.StructArray) -> pa.Array:
    snapshot = pc.struct_field(source, "snapshot")
    is_boolean = pa.types.is_boolean(snapshot.type)
    return pc.fill_null(snapshot, False) if is_boolean else pc.is_in(snapshot, pa.array(_SNAPSHOTS))


def _is_incremental(source: pa.StructArray) -> pa.Array:
    snapshot = pc.struct_field(source, "snapshot")
    if pa.types.is_boolean(snapshot.type):
        return pa.repeat(pa.scalar(False), len(source))
    return pc.fill_null(pc.equal(snapshot, "incremental"), False)


def _number(source: pa.StructArray, name: str) -> pa.Array:
    return pc.struct_field(source, name).cast(pa.int64())


def _postgres(source: pa.StructArray) -> Pair:
    """``sequence`` has the LSN of the last commit before the transaction, and the LSN of the change. The LSN of the change
    alone runs backwards where transactions overlap, since Debezium sends a transaction at its commit. The first transaction
    that a connector reads has no commit before it (null)."""
    lsn = _number(source, "lsn")
    if source.type.get_field_index("sequence") < 0:
        return lsn, lsn
    text = pc.struct_field(source, "sequence")
    high, low = _sequence(text)
    is_pair = pc.is_valid(low)
    return pc.if_else(is_pair, pc.fill_null(high, 0), lsn), pc.if_else(is_pair, low, lsn)


def _sequence(text: pa.Array) -> Pair:
    """The two numbers of each text such as ``["24023128","24023400"]``. Null where a text has no number."""
    valid = pc.is_valid(text)
    dense = text.filter(valid)
    # Whole texts of two numbers are the common case, and a split is quicker than a regular expression.
    try:
        numbers = pc.split_pattern(pc.utf8_slice_codeunits(dense, 2, -2), '","').flatten().cast(pa.int64())
    except pa.ArrowInvalid:
        numbers = pa.array([], pa.int64())
    if len(numbers) == 2 * len(dense):
        numbers_by_row = numbers.to_numpy(zero_copy_only=False).reshape(-1, 2)
        pair = [pa.array(np.ascontiguousarray(numbers_by_row[:, side])) for side in (0, 1)]
    else:
        match = pc.extract_regex(dense, _SEQUENCE)
        pair = [_digits(pc.struct_field(match, side)) for side in ("high", "low")]
    high, low = (pc.replace_with_mask(pa.nulls(len(text), pa.int64()), valid, half) for half in pair)
    return high, low


def _digits(text: pa.Array) -> pa.Array:
    return pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text).cast(pa.int64())


def _mysql(source: pa.StructArray) -> Pair:
    """The number of the binary log's file, the position in the file, and the row within the event."""
    files = pc.struct_field(source, "file").dictionary_encode()
    number = _digits(pc.struct_field(pc.extract_regex(files.dictionary, _FILE_NUMBER), "number"))
    high = pc.bit_wise_or(pc.shift_left(number.take(files.indices), 40), _number(source, "pos"))
    return high, _number(source, "row")


def _sql_server(source: pa.StructArray) -> Pair:
    """The LSN of the commit, then the LSN of the change, then the number of the event.

    Debezium reads changes in the order of their commits. The LSN of the change alone would run backwards where transactions
    overlap. An LSN has 80 bits: virtual log file, block and slot. ``high`` holds file and block of the commit. ``low`` holds
    the commit's slot (15 bits), and the change within its transaction in 48 bits: files before the commit's file (6), block
    (26), slot (12), event (4). A number that needs more bits counts as the highest one. Such records share an order, and
    never change places.
    """
    texts = [pc.struct_field(source, name) for name in ("commit_lsn", "change_lsn")]
    commit = _lsn(pc.coalesce(texts[0], texts[1]))
    change = _lsn(pc.coalesce(texts[1], texts[0]))
    valid = pa.array(commit[0] >= 0)
    high = (np.maximum(commit[0], 0) & 0x7FFF_FFFF) << 32 | np.maximum(commit[1], 0)
    event = pc.fill_null(_number(source, "event_serial_no"), 0).to_numpy(zero_copy_only=False)
    distance = np.maximum(commit[0] - change[0], 0)
    within = (63 - np.minimum(distance, 63)) << 42
    within |= np.clip(change[1], 0, (1 << 26) - 1) << 16
    within |= np.clip(change[2], 0, (1 << 12) - 1) << 4 | np.clip(event, 0, 15)
    within[(distance > 63) | (change[0] < 0)] = 0
    low = np.clip(commit[2], 0, 0x7FFF) << 48 | within
    null = pa.scalar(None, pa.int64())
    return pc.if_else(valid, pa.array(high), null), pc.if_else(valid, pa.array(low), null)


_LSN_WIDTH = 22
_DIGITS = np.full(256, 255, np.uint8)
"""The value of each hexadecimal digit, and of the colon between two numbers; 255 for other bytes."""
_DIGITS[ord(":")] = 0
for _sign in "0123456789abcdefABCDEF":
    _DIGITS[ord(_sign)] = int(_sign, 16)


def _lsn(text: pa.Array) -> tuple[Longs, Longs, Longs]:
    """The three numbers of each text such as ``0000002d:00000378:0012``; -1 where a text is no LSN."""
    fits = pc.fill_null(pc.equal(pc.binary_length(text), _LSN_WIDTH), False)
    dense = text.filter(fits)
    # A filtered array begins at the start of its buffers.
    data = dense.buffers()[2] if len(dense) else b""
    digits = _DIGITS[np.frombuffer(data, np.uint8, len(dense) * _LSN_WIDTH).reshape(-1, _LSN_WIDTH)]
    whole = (digits < 16).all(axis=1) if digits.max(initial=0) > 15 else np.ones(len(digits), np.bool_)
    lsn = np.full((3, len(text)), -1, np.int64)
    at = np.flatnonzero(fits.to_numpy(zero_copy_only=False))
    for numbers, span, kind in zip(lsn, (slice(0, 8), slice(9, 17), slice(18, 22)), (">u4", ">u4", ">u2"), strict=True):
        part = digits[:, span]
        words = np.ascontiguousarray(part[:, 0::2] << 4 | part[:, 1::2]).view(kind).ravel()
        numbers[at] = np.where(whole, words.astype(np.int64), -1)
    return lsn[0], lsn[1], lsn[2]


def _mongodb(source: pa.StructArray) -> Pair:
    """The second of the operation, and its number within the second."""
    return pc.divide(_number(source, "ts_ms"), pa.scalar(1000, pa.int64())), _number(source, "ord")


_CONNECTORS = (
    Connector(frozenset({"event_serial_no"}), frozenset({"change_lsn", "commit_lsn"}), _sql_server, unique=True),
    Connector(frozenset({"pos", "row"}), frozenset({"file"}), _mysql, unique=False),
    Connector(frozenset({"lsn"}), frozenset(), _postgres, unique=True),
    Connector(frozenset({"ord", "ts_ms"}), frozenset(), _mongodb, unique=False),
)
