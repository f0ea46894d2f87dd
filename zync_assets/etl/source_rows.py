"""Source rows: in which of a batch's results records may have to wait (see ``hold``), found without a join or a sort in Spark.

The tasks that write the results report the hashes of source rows, as arrays. A row is in question if one of its records
comes before the output that completes a pending record of the row, or if the ledger has pending records of the row.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.fields import deletes_sql
from zync_assets.codecs.spark_types import arrow_type
from zync_assets.etl.account import DROPPED, OUT, PENDING, Labels, Sources
from zync_assets.etl.hold import HeldRecord, Place, applied, decide
from zync_assets.etl.rules.shapes import type_sql
from zync_assets.lake.raw import RawState
from zync_assets.pipeline import Rule
from zync_assets.spark import frames
from zync_assets.spark.sql import text_sql
from zync_assets.spark.tasks import tune_worker

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

Rows = npt.NDArray[np.int64]
"""Hashes of source rows (``row_sql``)."""
Numbers = npt.NDArray[np.int64]
"""Numbers of result rows in the order of outputs, across all buckets."""

Mask = npt.NDArray[np.bool_]

_NEVER = np.iinfo(np.int64).max
_BUCKET = 40
"""Bits of a result row's number within its bucket."""
_SLOT_BITS = 22
"""Bits of a row's slot at most: 32 MiB of numbers."""


def row_sql(topic: str, key: DataType) -> str:
    """The hash of a record's source row, null for a record without a key. ``key``: the type of the topic's keys."""
    from pyspark.sql.types import NullType

    if isinstance(key, NullType):
        return "CAST(NULL AS bigint)"
    return f"CASE WHEN key IS NOT NULL THEN xxhash64({text_sql(topic)}, {_row_key_sql('key', key)}) END"


def changes_sql(value: DataType) -> str:
    """Whether a record changes its source row, and does not create the row. ``value``: the type of the topic's values.

    Only Debezium tells: an update changes the row, and an incremental snapshot repeats the row. A record without an operation may
    do either.
    """
    if not _has_text(value, "op"):
        return "coalesce(value.`__op` IN ('u', 'r'), false)" if _has_text(value, "__op") else "true"
    repeats = "value.source.snapshot = 'incremental'" if _has_text(value, "source", "snapshot") else "false"
    return f"coalesce(value.op = 'u' OR {repeats}, false)"


def ends_sql(value: DataType) -> str:
    """Whether a record ends its source row: it deletes the row (``codecs.fields.deletes_sql``), or its operation is a delete."""
    operation = "coalesce(value.op = 'd', false)" if _has_text(value, "op") else "false"
    return f"({deletes_sql(arrow_type(value))} OR {operation})"


def _has_text(kind: DataType, *path: str) -> bool:
    """Whether a struct has a text at a path of its fields."""
    from pyspark.sql.types import StringType, StructType

    for name in path:
        if not isinstance(kind, StructType) or name not in kind.names:
            return False
        kind = kind[name].dataType
    return isinstance(kind, StringType)


def _row_key_sql(sql: str, key: DataType) -> str:
    """A record key as it is hashed. A key has the same hash after its column got a wider type."""
    kind = _hashed_type(key)
    # Spark hashes no map.
    return f"to_json(struct({sql}))" if kind is None else f"CAST({sql} AS {type_sql(kind)})"


def _hashed_type(kind: DataType) -> DataType | None:
    """The type with the widest integers and floats in place of narrower types; None for a type that Spark does not hash."""
    from pyspark.sql.types import ArrayType, DoubleType, FloatType, IntegralType, LongType, StructField, StructType

    if isinstance(kind, StructType):
        inner = [(item.name, _hashed_type(item.dataType)) for item in kind]
        whole = [StructField(name, inner_type) for name, inner_type in inner if inner_type is not None]
        return StructType(whole) if len(whole) == len(inner) else None
    if isinstance(kind, ArrayType):
        inner_type = _hashed_type(kind.elementType)
        return None if inner_type is None else ArrayType(inner_type)
    if kind.typeName() in ("map", "variant"):
        return None
    return LongType() if isinstance(kind, IntegralType) else DoubleType() if isinstance(kind, FloatType) else kind


@dataclass(frozen=True)
class RowTimes:
    """Source rows of results, and the numbers of these results.

    ``pending``, ``until``: the row of a record that needs a counterpart, and the number of the output that completes it.
    ``single``, ``at``: the row of a record without a counterpart, or of a delete, and the number of its result.
    ``completed``: the rows of the records that were pending before the batch.
    """

    pending: Rows
    until: Numbers
    single: Rows
    at: Numbers
    completed: Rows

    def in_question(self) -> Rows:
        """The rows with a single record before the output that completes a pending record of the row."""
        # Rows share slots. A slot's latest output excludes nearly all rows, in a tenth of the time of a sort.
        slots = 1 << min(_SLOT_BITS, (4 * len(self.pending)).bit_length())
        latest = np.full(slots, -1)
        np.maximum.at(latest, self.pending & (slots - 1), self.until)
        may_wait = self.at < latest[self.single & (slots - 1)]
        single, at = self.single[may_wait], self.at[may_wait]
        may_wait = np.isin(self.pending, single)
        if not may_wait.any():
            return np.array([], np.int64)
        pending, index = np.unique(self.pending[may_wait], return_inverse=True)
        until = np.full(len(pending), -1)
        np.maximum.at(until, index, self.until[may_wait])
        place = np.minimum(np.searchsorted(pending, single), len(pending) - 1)
        return np.unique(single[(pending[place] == single) & (at < until[place])])


def joined(all_times: Sequence[RowTimes]) -> RowTimes:
    """The rows of all tasks."""
    names = ("pending", "until", "single", "at", "completed")
    none = np.array([], np.int64)
    return RowTimes(*(np.concatenate([none, *(getattr(times, name) for times in all_times)]) for name in names))


class Settled(NamedTuple):
    """Result rows. ``changed``: whether a record waits, ended or follows another."""

    rows: pa.RecordBatch
    changed: bool


@dataclass(frozen=True)
class HeldRules:
    """The indexes of the rules of held outputs: ``joining`` with a counterpart, ``single`` without. ``topics``: their inputs.

    False if there are none.
    """

    joining: frozenset[int] = frozenset()
    single: frozenset[int] = frozenset()
    topics: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.joining)

    def report(
        self, sources: Sources, rows: pa.RecordBatch, rows_before: int
    ) -> tuple[RowTimes, pa.RecordBatch | None]:
        """The source rows and the records of result ``rows``, which come after ``rows_before`` others of their bucket.
        ``sources``: the sources of the rows. No records if the rows lack their columns."""
        if not self:
            return joined([]), None
        deletes = rows["deletes"].to_numpy(zero_copy_only=False)[sources.row]
        deletes &= sources.source_row.is_valid().to_numpy(zero_copy_only=False)
        numbers = (rows["bucket"].to_numpy().astype(np.int64) << _BUCKET) + rows_before + np.arange(len(rows))
        records = self.records(sources, rows, numbers, deletes) if "ords" in rows.schema.names else None
        return self.times(sources, rows, numbers, deletes), records

    def record_task(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows with the pickled records (``records``) of the result rows of one bucket."""
        tune_worker()
        before = 0
        for rows in batches:
            _, records = self.report(Sources(rows), rows, before)
            before += len(rows)
            yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps(records)], pa.binary())], ["records"])

    def settled(self, rows: pa.RecordBatch, times: RowTimes, records: pa.RecordBatch, labels: Labels) -> Settled | None:
        """All result ``rows`` of a batch, with the decision on its source rows. ``times``, ``records``: from ``report``.

        None if the decision needs pending records of earlier batches, or other pairs than Spark's.
        """
        waits = times.in_question()
        if not len(waits):
            return Settled(rows, False)
        records_of_rows, _, _ = records_in_question(partial(about, pa.table(records)), waits)
        candidates = list(held_records(records_of_rows, self, labels, {}))
        decision = decide(candidates)
        paired_places = {item.place for item in candidates if item.joins and item.other is not None}
        if pc.any(records_of_rows["old"]).as_py() or decision.ended & paired_places:
            return None
        indexes = records_of_rows["result"].to_numpy() & ((1 << _BUCKET) - 1)
        at = dict(zip(places(records_of_rows, labels), indexes.tolist(), strict=True))
        completed = {item.order: at[item.place] for item in candidates if item.place in paired_places}
        return Settled(applied(rows, decision, at, completed), True)

    def times(self, sources: Sources, rows: pa.RecordBatch, numbers: Numbers, deletes: Mask) -> RowTimes:
        """The source rows of result ``rows``. ``sources``: their sources."""
        row, number = sources.source_row.fill_null(0).to_numpy(), numbers[sources.row]
        has_row = sources.source_row.is_valid().to_numpy(zero_copy_only=False)
        joins = has_row & np.isin(sources.rule, list(self.joining))
        is_done, waits = joins & np.isin(sources.kind, (OUT, DROPPED)), joins & (sources.kind == PENDING)
        # The record that completes a pair was never pending.
        first = is_done & (sources.at != rows["last"].to_numpy()[sources.row])
        single = has_row & (deletes | np.isin(sources.rule, list(self.single)) & (sources.kind == OUT))
        return RowTimes(
            np.concatenate([row[waits], row[first]]),
            np.concatenate([np.full(np.count_nonzero(waits), _NEVER), number[first]]),
            row[single],
            number[single],
            row[is_done & sources.old],
        )

    def records(self, sources: Sources, rows: pa.RecordBatch, numbers: Numbers, deletes: Mask) -> pa.RecordBatch:
        """The records of held outputs among the sources of result ``rows``, for ``held_records``."""
        joins = np.isin(sources.rule, list(self.joining)) & np.isin(sources.kind, (OUT, PENDING, DROPPED))
        # A record without a counterpart that the output's condition drops waits for nothing.
        singles = np.isin(sources.rule, list(self.single)) & np.isin(sources.kind, (OUT, PENDING))
        indexes = np.flatnonzero(joins | singles | deletes)
        index_array, result = pa.array(indexes), pa.array(sources.row[indexes])
        columns = {
            "result": pa.array(numbers[sources.row[indexes]]),
            **{
                name: pa.array(getattr(sources, name)[indexes])
                for name in ("place", "partition", "offset", "kind", "rule")
            },
            "row": sources.source_row.take(index_array),
            "changes": pa.array(sources.changes[indexes]),
            "deletes": pa.array(deletes[indexes]),
            "old": pa.array(sources.old[indexes]),
            **_order(rows["ords"].flatten().take(index_array)),
            "hash": rows["joined"].take(result),
            **{name: rows[name].take(result) for name in ("exact", "ends")},
        }
        return pa.RecordBatch.from_pydict(columns)


NO_HELD_RULES = HeldRules()
FAILING_COLUMNS = ("row", "other_row", "ords", "changes", "waited")
"""The columns of result rows about the source rows of a pair."""
_NAMES = ("result", "place", "partition", "offset", "kind", "rule", "row", "hash", "exact")
_RECORDS = pa.schema(
    [(name, pa.int64()) for name in _NAMES] + [(name, pa.bool_()) for name in ("changes", "deletes", "old", "ends")]
)
"""The columns of ``HeldRules.records`` of no results."""
_ORDER = "order_"


def _order(ord: pa.StructArray) -> dict[str, pa.Array]:
    """The parts of ``ord`` as integers; a timestamp as its microseconds."""
    return {f"{_ORDER}{at}": part.cast(pa.int64()) for at, part in enumerate(ord.flatten())}


def records_about(pickles: Iterable[bytes | None], rows: Rows, hashes: Rows) -> pa.Table:
    """The records of ``HeldRules.records`` of those results that have a record of the source ``rows``, or of the join
    ``hashes``. ``pickles``: some tables of records each, pickled."""
    tables = [about(pa.table(pickle.loads(pickled)), rows, hashes) for pickled in pickles if pickled is not None]
    return pa.concat_tables(tables) if tables else _RECORDS.empty_table()


def about(records: pa.Table, rows: Rows, hashes: Rows) -> pa.Table:
    """The ``records_about`` source rows and join hashes."""
    is_near = pc.or_(pc.is_in(records["row"], pa.array(rows)), pc.is_in(records["hash"], pa.array(hashes)))
    return records.filter(pc.is_in(records["result"], pc.unique(records.filter(is_near)["result"])))


def about_task(rows: Rows, hashes: Rows, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows of ``record_task``, with the records of ``records_about`` alone."""
    tune_worker()
    for batch in batches:
        pickles = [pickle.dumps(records_about([pickled], rows, hashes)) for pickled in batch["records"].to_pylist()]
        yield pa.RecordBatch.from_arrays([pa.array(pickles, pa.binary())], ["records"])


Fetch = Callable[[Rows, Rows], pa.Table]
"""Source rows and join hashes → the records of the batch's results ``about`` them."""


def records_in_question(fetch: Fetch, rows: Rows) -> tuple[pa.Table, Rows, Rows]:
    """The records that the decision on source ``rows`` needs, the rows of these records, and the join hashes of which a record
    may pair in another way."""
    hashes = np.array([], np.int64)
    while True:
        records = fetch(rows, hashes)
        # A row that ends frees the counterparts of its pending records. They pair with others, and complete them.
        ends = pc.or_(records["ends"], records["deletes"])
        ending = pc.is_in(records["row"], pc.unique(pc.drop_null(records.filter(ends)["row"])))
        freed = np.union1d(hashes, pc.drop_null(records.filter(ending)["hash"]).to_numpy())
        more_rows = np.union1d(rows, pc.drop_null(records["row"]).to_numpy())
        if len(more_rows) == len(rows) and len(freed) == len(hashes):
            return records, rows, hashes
        rows, hashes = more_rows, freed


def plainly_waiting(
    records: pa.Table, entries: pa.Table, freed: Rows, rules: HeldRules, labels: Labels
) -> tuple[Mask, Mask]:
    """Two masks of ``records``. The first marks the records whose row only waits. The second marks the records among the first
    that wait behind another record.

    The batch completes and deletes nothing of such a row. A batch may have millions of such records. The function works on
    columns, and makes no Python object for a record.
    ``records``, ``freed``: as in ``records_in_question``; ``entries``: the rows' pending records in the ledger.
    """
    names = sorted(set(labels.outs))
    out_of = np.array([names.index(out) for out in labels.outs])
    kind, rule, result = (records[name].to_numpy() for name in ("kind", "rule", "result"))
    joins = np.isin(rule, list(rules.joining))
    is_freed = pc.is_in(records["hash"], pa.array(freed)).to_numpy()
    plain = np.where(
        joins,
        (kind == PENDING) & ~is_freed,
        np.isin(rule, list(rules.single)) & (kind == OUT) & ~pc.or_(records["ends"], records["deletes"]).to_numpy(),
    )
    plain &= records["row"].is_valid().to_numpy()
    old_rule = pc.index_in(entries["rule"], pa.array(labels.rules)).fill_null(-1).to_numpy()
    old_plain = np.isin(old_rule, list(rules.joining)) & ~pc.is_in(entries["hash"], pa.array(freed)).to_numpy()
    all_rows = np.concatenate([records["row"].fill_null(0).to_numpy(), entries["row"].to_numpy()])
    _, row = np.unique(all_rows, return_inverse=True)
    of, old = row[: len(records)], row[len(records) :]
    out = out_of[np.concatenate([rule, old_rule])]
    least, most, first = (np.full(len(all_rows), number) for number in (len(names), -1, _NEVER))
    np.minimum.at(least, row, out)
    np.maximum.at(most, row, out)
    is_plain_row = least == most
    is_plain_row[of[~plain]] = False
    is_plain_row[old[~old_plain]] = False
    np.minimum.at(first, of[joins], result[joins])
    first[old] = -1
    return is_plain_row[of], is_plain_row[of] & ~joins & (result > first[of])


def places(records: pa.Table, labels: Labels) -> Iterator[Place]:
    """The places of records."""
    topics = [labels.topics[int(place)] for place in records["place"].to_pylist()]
    offsets: list[int] = records["offset"].to_pylist()
    partitions: list[int] = records["partition"].to_pylist()
    return iter(zip(topics, partitions, offsets, strict=True))


def held_records(
    records: pa.Table, rules: HeldRules, labels: Labels, seen_offsets: Mapping[tuple[str, int], int]
) -> Iterator[HeldRecord]:
    """The records as ``hold.decide`` needs them. ``seen_offsets``: (input topic, partition) → the first offset that no
    earlier batch looked at."""
    names = [name for name in records.column_names if name.startswith(_ORDER)]
    items: list[dict[str, Any]] = records.to_pylist()
    pairs: dict[int, list[Place]] = defaultdict(list)
    outs = sorted({labels.outs[rule] for rule in rules.joining})
    for item in items:
        item["at"] = labels.topics[item["place"]], item["partition"], item["offset"]
        if item["kind"] != PENDING:
            pairs[item["result"]].append(item["at"])
    for item in items:
        place, rule = item["at"], int(item["rule"])
        joins, order = rule in rules.joining, tuple(item[name] for name in names)
        out_topic = labels.outs[rule] if joins or rule in rules.single else None
        # A delete ends its row in every held output, whichever rule takes the delete.
        for out in outs if item["deletes"] else ():
            if out != out_topic:
                yield HeldRecord(place, None, (out, item["row"]), False, order, False, ends=True)
        if out_topic is None:
            continue
        yield HeldRecord(
            place=place,
            rule=labels.rules[rule],
            row=None if item["row"] is None else (out_topic, item["row"]),
            before=place[2] < seen_offsets.get(place[:2], 0),
            order=order,
            joins=joins,
            hash=item["hash"] if joins else None,
            exact=item["exact"],
            other=next((counterpart for counterpart in pairs[item["result"]] if counterpart != place), None),
            ends=item["ends"],
            changes=item["changes"],
        )


def failing_record(rule: Rule, place: Place, side: int, pair: Mapping[str, Any]) -> HeldRecord | None:
    """A record on which a pair of a held output fails, as ``hold.decide`` needs it. None if the record did not wait.

    ``side``: the index of the record in the pair. ``pair``: a result row with ord and FAILING_COLUMNS.
    """
    row, order, failure = pair["other_row" if side else "row"], tuple(pair["ords"][side]), tuple(pair["ord"])
    if row is None or order >= failure:
        return None
    before, changes = (bool(pair[name] >> side & 1) for name in ("waited", "changes"))
    return HeldRecord(place, rule.name, (rule.out, row), before, order, True, changes=changes, failure=failure)


def held_rules(rules: Sequence[Rule]) -> HeldRules:
    """The rules of held outputs."""
    joins = {index: bool(rule.sides[0].keys) for index, rule in enumerate(rules) if rule.held}
    joining, single = (
        frozenset(index for index, has_keys in joins.items() if has_keys is kind) for kind in (True, False)
    )
    return HeldRules(joining, single, frozenset(topic for index in joins for topic in rules[index].topics))


def row_columns(topic: str, state: RawState, held: HeldRules) -> list[str]:
    """The columns ``row`` and ``changes`` of a record frame, where an output is held. Only records of a held output are hashed:
    a hash takes time."""
    if not held:
        return []
    if topic not in held.topics:
        return ["CAST(NULL AS bigint) AS row", "false AS changes"]
    types = frames.record_types(state)
    row, changes = row_sql(topic, types["key"].dataType), changes_sql(types["value"].dataType)
    return [f"{row} AS row", f"{changes} AS changes"]
