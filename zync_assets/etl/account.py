"""The account of an ETL batch: the class of each input record, and the ledger rows that hold it.

The Spark tasks that make the result rows (see ``etl.rules.kind``) count the rows, and make an entry for each record that was
pending or makes no output. Spark SQL would need more jobs over the same rows. Result rows have numbers in place of the names of
topics and rules, because full names would double the size of the rows.

Ledger rows are offset ranges, and one row for each pending record. New offsets without an entry are done. A batch with only done
records therefore needs one row a range. A count before the commit checks the account: new records = sources of outputs + records
in the other classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.spark_types import arrow_frame, spark_schema, spark_type
from zync_assets.etl.ledger import since_text
from zync_assets.etl.retries import wait_limits
from zync_assets.etl.rules.kind import MISSING, SEVERAL
from zync_assets.lake.staging import ACCOUNT_TYPE
from zync_assets.offsets import OffsetRange, normalize, split
from zync_assets.pipeline import Pipeline, Rule
from zync_assets.spark.sql import name_sql
from zync_assets.spark.tasks import tune_worker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class Labels:
    """The names behind the numbers in result rows.

    ``topics``: the input topics, by place. ``rules`` and ``outs``: the names and output topics of a pool's rules, by index.
    ``views``: the indexes of the views. The account counts the sources of a view's output once, when they become rows of a
    table. ``waits``: the indexes of the rules whose records may wait for a row. ``since``: the time at which the batch's
    waiting records begin to wait. ``expiries``: by rule, the reason that quarantine gives for an expired record; None if an
    expired record does not go into quarantine. ``parts``: the index of a rule's further output → the index of the rule's first
    output. The rule's records wait for the first output.
    """

    topics: Sequence[str]
    rules: Sequence[str]
    outs: Sequence[str]
    views: frozenset[int] = frozenset()
    waits: frozenset[int] = frozenset()
    since: str = ""
    expiries: Sequence[str | None] = ()
    parts: Mapping[int, int] = field(default_factory=dict[int, int])

    def rule(self, index: int | None) -> str | None:
        return None if index is None else self.rules[index]

    def taker(self, index: int | None) -> str | None:
        """The name of the rule that took the records of an output. Further outputs of a rule have the name of its first
        output."""
        return None if index is None else self.rules[self.parts.get(index, index)]

    def of_topic(self, topic: str) -> str:
        """The indexes of an output topic's rules, as a list in SQL."""
        return ", ".join(str(index) for index, name in enumerate(self.outs) if name == topic) or "NULL"


def labels_of(pipeline: Pipeline, pool: str) -> Labels:
    """The labels of a staging pool's batches: all inputs of the file, and the pool's own rules."""
    rules = pipeline.rules_of(pool)
    views = frozenset(index for index, rule in enumerate(rules) if rule.view is not None)
    rule_limits = wait_limits(rules)
    waits = frozenset(index for index, rule in enumerate(rules) if rule.name in rule_limits)
    topics = [item.topic for item in pipeline.inputs]
    names, outs = [rule.name for rule in rules], [rule.out for rule in rules]
    expiries = [_expiry_text(rule) for rule in rules]
    parts = {index: names.index(rule.part_of) for index, rule in enumerate(rules) if rule.part_of is not None}
    return Labels(topics, names, outs, views, waits, since_text(), expiries, parts)


def _expiry_text(rule: Rule) -> str | None:
    is_quarantine = rule.expiry is not None and rule.expiry.action == "quarantine"
    return f"rule {rule.name}: {rule.expiry.reason}" if is_quarantine and rule.expiry is not None else None


KINDS = ("out", "pending", "unmatched", "dropped", "quarantined", "untyped", "ended", MISSING, SEVERAL, "expired")
OUT, PENDING, DROPPED, EXPIRED = (KINDS.index(kind) for kind in ("out", "pending", "dropped", "expired"))
CHANGE = "change"
_QUARANTINED = KINDS.index("quarantined")

ENTRIES = pa.schema(
    {
        "kind": pa.string(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "first": pa.int64(),
        "end": pa.int64(),
        "rule": pa.string(),
        "hash": pa.int64(),
        "text": pa.string(),
        "row": pa.int64(),
    }
)
"""The columns of account entries. An entry is an input record that is no longer pending (kind ``completed``; text ``dropped``
for a dropped record), or a new record without an output. The text CHANGE marks a pending record that changes its row. Records
that a rule failed on have no entry here: see ``failures``."""


class Count(NamedTuple):
    """Result rows of one kind and rule, counted for the sources in one input partition.

    ``entries``: the number of sources; ``rows``: the number of rows, counted at their first source; ``place``: the input's
    label; ``old``: whether the sources were pending; ``taker``: the rule for which they were.
    """

    kind: str
    rule: int | None
    taker: int | None
    place: int
    partition: int
    old: bool
    entries: int
    rows: int


class Fact(NamedTuple):
    """One count of a batch. ``out``: the name of the output topic; ``topic``: the name of the input topic. The other fields are
    those of ``Count``. Without ``taker``, the sources were pending for ``rule``."""

    kind: str
    out: str | None
    rule: str | None
    topic: str
    partition: int
    old: bool
    entries: int
    rows: int
    taker: str | None = None


class Sources:
    """The sources of result rows, as arrays of equal length. Each array has one element for each source."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        """``rows``: with kind, rule, source, waited and hash, ``row``, ``other_row`` and ``changes`` where an output is
        held, ``olds`` where a rule gathers records, and ``takers`` and ``rows`` where outputs are merged."""
        lengths = pc.list_value_length(rows["source"]).to_numpy()
        self.row = np.repeat(np.arange(len(rows)), lengths)
        """The index of its row."""
        self.at = np.arange(len(self.row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        """Its index in its row."""
        place, partition, offset = rows["source"].flatten().flatten()
        self.place, self.partition, self.offset = place.to_numpy(), partition.to_numpy(), offset.to_numpy()
        self.kind = pc.index_in(rows["kind"], pa.array(KINDS)).to_numpy()[self.row]
        self.rule = rows["rule"].fill_null(-1).to_numpy()[self.row]
        self.old = (rows["waited"].to_numpy()[self.row] >> np.minimum(self.at, 62) & 1).astype(bool)
        self.taker = self.rule.copy()
        """The rule that took the source."""
        for name, into in (("olds", self.old), ("takers", self.taker)):
            if name in rows.schema.names:
                valid_rows = np.flatnonzero(pc.is_valid(rows[name]).to_numpy(zero_copy_only=False))
                into[np.isin(self.row, valid_rows)] = rows[name].flatten().to_numpy(zero_copy_only=False)
        self.hash = rows["hash"]
        extra = rows["extra"].fill_null(False) if "extra" in rows.schema.names else pa.repeat(False, len(rows))
        self.extra = extra.to_numpy(zero_copy_only=False)[self.row]
        """Whether the row is a further output of a match: its sources are counted already."""
        self.since = rows["since"] if "since" in rows.schema.names else None
        self.source_row: pa.Array = pa.nulls(len(self.row), pa.int64())
        """The hashes of source rows."""
        self.changes = np.zeros(len(self.row), bool)
        """Whether the record changes its source row, and does not create the row."""
        if "row" in rows.schema.names:
            self._add_rows(rows)

    def _add_rows(self, rows: pa.RecordBatch) -> None:
        hashes, has_hash = np.zeros(len(self.row), np.int64), np.zeros(len(self.row), bool)
        for at, name in enumerate(("row", "other_row")):
            is_side = self.at == at
            hashes[is_side] = rows[name].fill_null(0).to_numpy()[self.row[is_side]]
            has_hash[is_side] = rows[name].is_valid().to_numpy(zero_copy_only=False)[self.row[is_side]]
        self.changes = (rows["changes"].fill_null(0).to_numpy()[self.row] >> np.minimum(self.at, 31) & 1).astype(bool)
        if "rows" in rows.schema.names:
            is_merged = np.isin(self.row, np.flatnonzero(pc.is_valid(rows["rows"]).to_numpy(zero_copy_only=False)))
            row, changes = rows["rows"].flatten().flatten()
            hashes[is_merged] = row.fill_null(0).to_numpy()
            has_hash[is_merged] = row.is_valid().to_numpy(zero_copy_only=False)
            self.changes[is_merged] = changes.to_numpy(zero_copy_only=False)
        self.source_row = pa.array(hashes, mask=~has_hash)


def counts(sources: Sources) -> list[Count]:
    """Counts the result rows by kind, rule, taker and input partition. The list is short, however many sources there are."""
    # One integer holds all values that rows are counted by. Its lower 31 bits are the partition.
    taker = np.where(sources.old, sources.taker, sources.rule)
    rules, takers, places = (int(codes.max(initial=0)) + 2 for codes in (sources.rule, taker, sources.place))
    code = (((sources.kind * rules + sources.rule + 1) * takers + taker + 1) * places + sources.place) * 2 + sources.old
    codes = pa.array(code.astype(np.int64) << 31 | sources.partition).dictionary_encode()
    index = codes.indices.to_numpy()
    entries, rows = (np.bincount(index, weights).tolist() for weights in (~sources.extra, sources.at == 0))
    totals: list[Count] = []
    for number, code_number in enumerate(codes.dictionary.to_pylist()):
        rest, partition = divmod(code_number, 1 << 31)
        rest, old = divmod(rest, 2)
        rest, place = divmod(rest, places)
        rest, taker_number = divmod(rest, takers)
        kind, rule = divmod(rest, rules)
        totals.append(
            Count(
                KINDS[kind],
                rule - 1 if rule else None,
                taker_number - 1 if taker_number else None,
                place,
                partition,
                bool(old),
                int(entries[number]),
                int(rows[number]),
            )
        )
    return totals


def summed(parts: Iterable[Count]) -> list[Count]:
    """The counts of all rows together. ``parts``: counts of some rows each."""
    sums: dict[tuple[str, int | None, int | None, int, int, bool], Count] = {}
    for count in parts:
        key = count[:6]
        total = sums.get(key, Count(*key, 0, 0))
        sums[key] = Count(*key, total.entries + count.entries, total.rows + count.rows)
    return list(sums.values())


def fact(count: Count, labels: Labels) -> Fact:
    """A count with names in place of numbers."""
    topic = labels.outs[count.rule] if count.kind == "out" and count.rule is not None else None
    taker = labels.taker(count.taker) if count.taker != count.rule or count.rule in labels.parts else None
    named_fact = Fact(count.kind, topic, labels.rule(count.rule), labels.topics[count.place], *count[4:], taker)
    return named_fact._replace(entries=0) if count.rule in labels.views else named_fact


def entries(sources: Sources, labels: Labels) -> pa.RecordBatch:
    """The rows of ENTRIES for the sources that were pending or make no output."""
    completed = sources.old & np.isin(sources.kind, (OUT, DROPPED)) & ~sources.extra
    indexes = np.flatnonzero(completed | ~sources.old & ~np.isin(sources.kind, (OUT, _QUARANTINED)))
    kind, rule, offset = sources.kind[indexes], sources.taker[indexes], sources.offset[indexes]
    takers = [labels.taker(index) for index in range(len(labels.rules))]
    is_completed = completed[indexes]
    changes = (kind == PENDING) & sources.changes[indexes]
    waits = (kind == PENDING) & np.isin(rule, list(labels.waits))
    text = np.where(is_completed, 0, np.where(waits, 2, 1))
    columns = {
        "kind": _names_at((*KINDS, "completed"), np.where(is_completed, len(KINDS), kind)),
        "topic": _names_at(labels.topics, sources.place[indexes]),
        "partition": pa.array(sources.partition[indexes]),
        "first": pa.array(offset),
        "end": pa.array(offset + 1),
        "rule": _names_at(takers, rule, rule < 0),
        "hash": pc.if_else(pa.array(kind == PENDING), sources.hash.take(pa.array(sources.row[indexes])), None),
        "text": _names_at(
            ("dropped", CHANGE, labels.since), text, ~(is_completed & (kind == DROPPED) | changes | waits)
        ),
        "row": pc.if_else(pa.array(kind == PENDING), sources.source_row.take(pa.array(indexes)), None),
    }
    if sources.since is not None:
        since = sources.since.take(pa.array(sources.row[indexes])).cast(pa.string())
        texts = _names_at(labels.expiries, rule, (rule < 0) | (kind != EXPIRED))
        columns["text"] = pc.coalesce(columns["text"], since, texts)
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=ENTRIES)


def _names_at(names: Iterable[str | None], index: np.ndarray, null: np.ndarray | None = None) -> pa.Array:
    return pa.array(list(names), pa.string()).take(pa.array(index, mask=null))


STRIDE = 100_000
"""The number of offsets whose ledger rows a single task makes. A low number gives many tasks to a batch of one partition."""

FEW = 20_000
"""Up to this number of entries, the driver makes the ledger rows. A Spark job for them would take longer."""

LEDGER = pa.schema(list(ACCOUNT_TYPE))
"""The columns of ledger rows."""

_EDGES = ("open", "close")
"""The kinds of the rows that mark where a range begins and ends. Offsets between two ranges are in no ledger row."""

_PLACE = ("topic", "partition", "stride")
_MARKED = pa.schema([*ENTRIES, pa.field("records", pa.int64()), pa.field("stride", pa.int64())])


def failed_entries(records: Iterable[tuple[str, int, int, str, str]]) -> pa.Table:
    """Records that a rule failed on, as rows of ENTRIES. ``records``: (topic, partition, offset, rule, why)."""
    rows = [
        {
            "kind": "quarantined",
            "topic": topic,
            "partition": at,
            "first": offset,
            "end": offset + 1,
            "rule": rule,
            "text": why,
        }
        for topic, at, offset, rule, why in records
    ]
    return pa.Table.from_pylist(rows, ENTRIES)


def ledger_table(ranges: Mapping[str, Sequence[OffsetRange]], entries: pa.Table) -> pa.Table:
    """The ledger rows of a batch (LEDGER): rows that cover ``ranges``, and rows for completed records.

    ``entries``: rows of ENTRIES. Offsets of ``ranges`` without an entry are done. Entries of one class without a text become
    one row where they touch, except for pending records.
    """
    completed = pc.equal(entries["kind"], "completed")
    edges = _edges((topic, part, 0) for topic, parts in ranges.items() for part in normalize(parts))
    coverage = covering(pa.concat_tables([edges, _with_fields(entries.filter(pc.invert(completed)), _MARKED)]))
    return pa.concat_tables([coverage, _with_fields(entries.filter(completed), LEDGER)])


def ledger_frame(spark: SparkSession, ranges: Mapping[str, Sequence[OffsetRange]], entries: DataFrame) -> DataFrame:
    """The rows of ``ledger_table``, made by Spark tasks, a stride each. ``entries`` may have the column ``records``: how many
    records there are in an entry, one by default."""
    pieces = ((topic, piece) for topic, parts in ranges.items() for part in normalize(parts) for piece in _pieces(part))
    edges = arrow_frame(spark, _edges((topic, piece, piece.first // STRIDE) for topic, piece in pieces))
    marked = entries.where("kind <> 'completed'").selectExpr("*", f"first DIV {STRIDE} AS stride")
    coverage = (
        _select(marked, _MARKED).unionByName(edges).groupBy(*_PLACE).applyInArrow(_covering_task, spark_schema(LEDGER))
    )
    return coverage.unionByName(_select(entries.where("kind = 'completed'"), LEDGER))


def _covering_task(marked: pa.Table) -> pa.Table:
    tune_worker()
    return covering(marked.cast(_MARKED))


def covering(marked: pa.Table) -> pa.Table:
    """The ledger rows that cover the ranges between edges. ``marked``: entries and edges (_MARKED), in any order.

    Both sides of a range have an edge. A row never spans two strides.
    """
    rows = marked.sort_by([(name, "ascending") for name in (*_PLACE, "first", "end")]).combine_chunks()
    if not rows.num_rows:
        return LEDGER.empty_table()
    first, end = (rows[name].to_numpy() for name in ("first", "end"))
    place = np.all([_same_as_before(rows[name]) for name in _PLACE], axis=0)
    touches = place & (first == np.append(first[:1], end[:-1]))
    silent = rows["text"].is_null().to_numpy()
    apart = pc.is_in(rows["kind"], pa.array([*_EDGES, "pending"])).to_numpy()
    joins = touches & _same_as_before(rows["kind"]) & ~apart & silent & np.append(False, silent[:-1])
    starts = np.flatnonzero(~joins)
    counts = np.add.reduceat(rows["records"].fill_null(1).to_numpy(), starts)
    classes = rows.take(pa.array(starts)).select(ENTRIES.names)
    classes = classes.set_column(
        classes.schema.get_field_index("end"), "end", pa.array(np.append(end[starts[1:] - 1], end[-1]))
    )
    classes = classes.append_column("count", pa.array(counts))
    classes = classes.filter(pc.invert(pc.is_in(classes["kind"], pa.array(_EDGES))))
    # A gap lies between an entry (or the start of a range) and the next row of the same range. The records in a gap are done.
    gaps = np.flatnonzero(place[1:] & (first[1:] > end[:-1]) & pc.not_equal(rows["kind"], "close").to_numpy()[:-1])
    done_rows = rows.take(pa.array(gaps)).select(["topic", "partition"])
    done_rows = done_rows.append_column("kind", pa.repeat("done", len(gaps)))
    done_rows = done_rows.append_column("first", pa.array(end[gaps])).append_column("end", pa.array(first[gaps + 1]))
    return pa.concat_tables([_with_fields(classes, LEDGER), _with_fields(done_rows, LEDGER)])


def _same_as_before(column: pa.ChunkedArray) -> np.ndarray:
    """Whether each value is that of the row before; false for the first row."""
    codes = column.combine_chunks().dictionary_encode().indices.to_numpy()
    return np.append(False, codes[1:] == codes[:-1])


def _edges(ranges: Iterable[tuple[str, OffsetRange, int]]) -> pa.Table:
    """The edges of ranges (topic, range, stride), as rows of _MARKED."""
    rows = [
        {"kind": kind, "topic": topic, "partition": part.partition, "first": at, "end": at, "stride": stride}
        for topic, part, stride in ranges
        for kind, at in (("open", part.first), ("close", part.end))
    ]
    return pa.Table.from_pylist(rows, _MARKED)


def _pieces(part: OffsetRange) -> list[OffsetRange]:
    first = part.first - part.first % STRIDE
    aligned = split(OffsetRange(part.partition, first, part.end), STRIDE) if not part.empty else []
    return [OffsetRange(piece.partition, max(piece.first, part.first), piece.end) for piece in aligned]


def _with_fields(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with exactly the columns of a schema. A missing column is null, or 0 for ``stride``."""
    columns = {
        item.name: table[item.name].cast(item.type)
        if item.name in table.column_names
        else pa.nulls(len(table), item.type)
        for item in schema
    }
    if "stride" in columns:
        columns["stride"] = pa.repeat(pa.scalar(0, pa.int64()), len(table))
    return pa.table(columns, schema=schema)


def _select(frame: DataFrame, schema: pa.Schema) -> DataFrame:
    """The frame with exactly the columns of a schema. A missing column is null."""
    names = set(frame.columns)
    columns = [(name_sql(item.name), spark_type(item.type).simpleString(), item.name in names) for item in schema]
    return frame.selectExpr(
        *(f"CAST({name if is_present else 'NULL'} AS {kind}) AS {name}" for name, kind, is_present in columns)
    )


def cut_at_strides(ranges: DataFrame) -> DataFrame:
    """The same ranges, none across a stride's border: ``ledger_frame`` works on one stride at a time."""
    from pyspark.sql import functions as F

    strides = F.sequence(F.floor(F.col("first") / STRIDE), F.floor((F.col("end") - 1) / STRIDE))
    pieces = ranges.withColumn("at", F.explode(strides))
    return (
        pieces.withColumn("first", F.greatest(F.col("first"), F.col("at") * STRIDE))
        .withColumn("end", F.least(F.col("end"), (F.col("at") + 1) * STRIDE))
        .drop("at")
    )
