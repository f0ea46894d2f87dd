"""The account of an ETL batch: what became of each input record, and the ledger rows of it.

The names behind the numbers in result rows (see ``etl.rules.matching``). Full names would double the size of the
rows.

The account of a batch's input records: counts, and an entry for each record that was pending or makes no output.

The Spark tasks that make the result rows (see ``etl.rules.matching``) also account for the rows, in Arrow batches.
Spark SQL would need more jobs over the same rows.

The account of a batch's inputs as ledger rows: offset ranges for finished records, and one row for each pending
record.

New offsets in no other class are done. A batch with only done records therefore needs one entry a range. A count before
the commit checks the account: new records = sources of outputs + records in the other classes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.spark_types import listed_frame
from zync_assets.offsets import OffsetRange, normalize, split
from zync_assets.pipeline import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class Labels:
    """``topics``: of the inputs, by place; ``rules`` and ``outs``: names and output topics of a pool's rules, by index."""

    topics: Sequence[str]
    rules: Sequence[str]
    outs: Sequence[str]

    def rule(self, index: int | None) -> str | None:
        return None if index is None else self.rules[index]

    def of_topic(self, out: str) -> str:
        """The indexes of an output topic's rules, as a list in SQL."""
        return ", ".join(str(index) for index, name in enumerate(self.outs) if name == out) or "NULL"


def labels_of(pipeline: Pipeline, pool: str) -> Labels:
    """The labels of a staging pool's batches: all inputs of the file, and the pool's own rules."""
    rules = pipeline.rules_of(pool)
    return Labels([item.topic for item in pipeline.inputs], [rule.name for rule in rules], [rule.out for rule in rules])


KINDS = ("out", "pending", "unmatched", "dropped", "quarantined", "untyped")
_OUT, _DROPPED, _QUARANTINED = (KINDS.index(kind) for kind in ("out", "dropped", "quarantined"))

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
    }
)
"""An input record that is no longer pending (kind ``completed``; ``text``: ``dropped`` for a dropped record), or a new record
without an output. Records that a rule failed on have no entry here: see ``failures``."""


class Count(NamedTuple):
    """Result rows of one kind and rule, counted for the sources in one input partition.

    ``entries``: the number of sources; ``rows``: the number of rows, counted at their first source; ``place``: the input's
    label; ``old``: whether the sources were pending.
    """

    kind: str
    rule: int | None
    place: int
    partition: int
    old: bool
    entries: int
    rows: int


class Fact(NamedTuple):
    """A batch's counts. ``out``: the output topic; ``topic``: the input's; the rest is as of Count."""

    kind: str
    out: str | None
    rule: str | None
    topic: str
    partition: int
    old: bool
    entries: int
    rows: int


class Sources:
    """The sources of result rows, each as an element of arrays of one length."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        """``rows``: with kind, rule, source, waited and hash."""
        lengths = pc.list_value_length(rows["source"]).to_numpy()
        self.row = np.repeat(np.arange(len(rows)), lengths)
        """The index of its row."""
        self.at = np.arange(len(self.row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        """Its index in its row."""
        place, partition, offset = rows["source"].flatten().flatten()
        self.place, self.partition, self.offset = place.to_numpy(), partition.to_numpy(), offset.to_numpy()
        self.kind = pc.index_in(rows["kind"], pa.array(KINDS)).to_numpy()[self.row]
        self.rule = rows["rule"].fill_null(-1).to_numpy()[self.row]
        self.old = (rows["waited"].to_numpy()[self.row] >> self.at & 1).astype(bool)
        self.hash = rows["hash"]


def counts(found: Sources) -> list[Count]:
    """Few, whatever the number of sources."""
    # One number for all that they are counted by; a partition's takes 31 bits.
    rules, places = (int(each.max(initial=0)) + 2 for each in (found.rule, found.place))
    code = ((found.kind * rules + found.rule + 1) * places + found.place) * 2 + found.old
    each = pa.array(code.astype(np.int64) << 31 | found.partition).dictionary_encode()
    index = each.indices.to_numpy()
    entries, rows = (np.bincount(index, weights).tolist() for weights in (None, found.at == 0))
    made: list[Count] = []
    for number, known in enumerate(each.dictionary.to_pylist()):
        rest, partition = divmod(known, 1 << 31)
        rest, old = divmod(rest, 2)
        rest, place = divmod(rest, places)
        kind, rule = divmod(rest, rules)
        made.append(
            Count(
                KINDS[kind],
                rule - 1 if rule else None,
                place,
                partition,
                bool(old),
                entries[number],
                int(rows[number]),
            )
        )
    return made


def summed(found: Iterable[Count]) -> list[Count]:
    """The counts of all rows together. ``found``: counts of some rows each."""
    sums: dict[tuple[str, int | None, int, int, bool], Count] = {}
    for one in found:
        key = one[:5]
        before = sums.get(key, Count(*key, 0, 0))
        sums[key] = Count(*key, before.entries + one.entries, before.rows + one.rows)
    return list(sums.values())


def fact(one: Count, labels: Labels) -> Fact:
    """A count with names in place of numbers."""
    out = labels.outs[one.rule] if one.kind == "out" and one.rule is not None else None
    return Fact(one.kind, out, labels.rule(one.rule), labels.topics[one.place], *one[3:])


def entries(found: Sources, labels: Labels) -> pa.RecordBatch:
    """The rows of ENTRIES for the sources that were pending or make no output."""
    completed = found.old & np.isin(found.kind, (_OUT, _DROPPED))
    wanted = np.flatnonzero(completed | ~found.old & ~np.isin(found.kind, (_OUT, _QUARANTINED)))
    kind, rule, offset = found.kind[wanted], found.rule[wanted], found.offset[wanted]
    done = completed[wanted]
    columns = {
        "kind": _named((*KINDS, "completed"), np.where(done, len(KINDS), kind)),
        "topic": _named(labels.topics, found.place[wanted]),
        "partition": pa.array(found.partition[wanted]),
        "first": pa.array(offset),
        "end": pa.array(offset + 1),
        "rule": _named(labels.rules, rule, rule < 0),
        "hash": pc.if_else(pa.array(done), None, found.hash.take(pa.array(found.row[wanted]))),
        "text": _named(("dropped",), np.zeros(len(wanted), np.int8), ~(done & (kind == _DROPPED))),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=ENTRIES)


def _named(names: Iterable[str], index: np.ndarray, null: np.ndarray | None = None) -> pa.Array:
    return pa.array(list(names), pa.string()).take(pa.array(index, mask=null))


STRIDE = 100_000
"""The number of offsets whose ranges a single task makes. A low number gives many tasks to a batch of one partition."""

FEW = 20_000
"""Up to this number of rows, the driver fetches the rows and makes the ranges. A Spark job would take longer."""

_EDGES = ("open", "close")
_EDGE = pa.schema(
    {
        "kind": pa.string(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "first": pa.int64(),
        "end": pa.int64(),
        "stride": pa.int64(),
    }
)
_FAILED = pa.schema([field for field in ENTRIES if field.name != "hash"])
_FIELDS = (
    "kind string, topic string, partition int, first long, end long, rule string, hash long, count long, text string"
)


def whole_ranges(ranges: Mapping[str, Sequence[OffsetRange]]) -> list[dict[str, object]]:
    """Ledger rows of a batch in which every new record is done."""
    return [
        _done(topic, part.partition, part.first, part.end)
        for topic, parts in sorted(ranges.items())
        for part in normalize(parts)
    ]


def failed(spark: SparkSession, records: Iterable[tuple[str, int, int, str, str]]) -> DataFrame:
    """Records that a rule failed on, as in ``ENTRIES``. ``records``: (topic, partition, offset, rule, why)."""
    rows = [("quarantined", topic, part, offset, offset + 1, rule, why) for topic, part, offset, rule, why in records]
    return listed_frame(spark, _FAILED, rows)


def few_rows(
    ranges: Mapping[str, Sequence[OffsetRange]], found: Iterable[Mapping[str, Any]]
) -> list[dict[str, object]]:
    """The rows of ``ledger_rows``, made from fetched rows. ``found``: rows of ``ENTRIES``, and failures."""
    places: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for row in sorted(found, key=lambda row: row["first"]):
        places[row["topic"], row["partition"]].append(row)
    made: list[dict[str, object]] = []
    for topic, parts in sorted(ranges.items()):
        for part in normalize(parts):
            inside = [row for row in places[topic, part.partition] if part.first <= row["first"] < part.end]
            made += _covering(topic, part, inside)
    return made


def _covering(topic: str, part: OffsetRange, found: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, object]]:
    """Entries that cover one range: the entries found there, with neighbours of a class merged, and done in between."""
    last: dict[str, Any] = {"kind": "open", "end": part.first}
    for row in found:
        text = row.get("text")
        if row["first"] > last["end"]:
            yield from _closed(last)
            last = _done(topic, part.partition, last["end"], row["first"])
        if row["kind"] == last["kind"] != "pending" and text is None and last["text"] is None:
            last = last | {"end": row["end"], "count": last["count"] + 1}
            continue
        yield from _closed(last)
        names = ("kind", "topic", "partition", "first", "end", "rule")
        last = {name: row[name] for name in names} | {"hash": row.get("hash"), "count": 1, "text": text}
    yield from _closed(last)
    if last["end"] < part.end:
        yield _done(topic, part.partition, last["end"], part.end)


def _closed(entry: dict[str, Any]) -> Iterator[dict[str, object]]:
    if entry["kind"] != "open":
        yield entry


def _done(topic: str, partition: int, first: int, end: int) -> dict[str, Any]:
    return {"kind": "done", "topic": topic, "partition": partition, "first": first, "end": end}


def ledger_rows(spark: SparkSession, ranges: Mapping[str, Sequence[OffsetRange]], found: DataFrame) -> DataFrame:
    """Ledger rows that cover ``ranges``: what is in ``found`` (new records' ``ENTRIES``), and done ranges between.

    Neighbouring unmatched, dropped or quarantined offsets become one range, but for those that have a text. ``found`` may
    have a column ``records``: how many there are in an entry, one by default.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    # Each piece is opened by an edge and closed by one: what lies between two of them is in no range.
    edges = [
        (kind, topic, piece.partition, at, at, piece.first // STRIDE)
        for topic, parts in sorted(ranges.items())
        for part in normalize(parts)
        for piece in _pieces(part)
        for kind, at in (("open", piece.first), ("close", piece.end))
    ]
    frame = listed_frame(spark, _EDGE, edges)
    for name, kind in (("text", "string"), ("records", "long")):
        found = found if name in found.columns else found.withColumn(name, F.lit(None).cast(kind))
    marked = found.withColumn("stride", F.floor(F.col("first") / STRIDE)).unionByName(frame, allowMissingColumns=True)
    own = Window.partitionBy("topic", "partition", "stride").orderBy("first", "end")
    upto = own.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    before, previous = F.lag("kind").over(own), F.lag("end").over(own)
    silent = F.col("text").isNull() & F.lag("text").over(own).isNull()
    joins = (F.col("kind") == before) & (F.col("first") == previous) & ~F.col("kind").isin("pending", *_EDGES) & silent
    rows = (
        marked.withColumn("fresh", (~F.coalesce(joins, F.lit(False))).cast("int"))
        .withColumn("next", F.lead("first").over(own))
        .withColumn("island", F.sum("fresh").over(upto))
    )
    classes = (
        rows.filter(~F.col("kind").isin(*_EDGES))
        .groupBy("topic", "partition", "stride", "island")
        .agg(
            F.first("kind").alias("kind"),
            F.min("first").alias("first"),
            F.max("end").alias("end"),
            F.first("rule").alias("rule"),
            F.first("hash").alias("hash"),
            F.sum(F.coalesce("records", F.lit(1))).alias("count"),
            F.first("text").alias("text"),
        )
    )
    done = rows.filter((F.col("kind") != "close") & (F.col("next") > F.col("end"))).select(
        F.lit("done").alias("kind"), "topic", "partition", F.col("end").alias("first"), F.col("next").alias("end")
    )
    return as_rows(classes.drop("stride", "island")).unionByName(as_rows(done))


def _pieces(part: OffsetRange) -> list[OffsetRange]:
    first = part.first - part.first % STRIDE
    aligned = split(OffsetRange(part.partition, first, part.end), STRIDE) if not part.empty else []
    return [OffsetRange(piece.partition, max(piece.first, part.first), piece.end) for piece in aligned]


def as_rows(frame: DataFrame) -> DataFrame:
    """The frame with all fields of a ledger row, in order."""
    from pyspark.sql import functions as F

    wanted = [field.split(" ") for field in _FIELDS.split(", ")]
    return frame.select(
        *((F.col(name) if name in frame.columns else F.lit(None)).cast(kind).alias(name) for name, kind in wanted)
    )


def cut_at_strides(found: DataFrame) -> DataFrame:
    """The same ranges, none across a stride's border: ``ledger_rows`` works on one stride at a time."""
    from pyspark.sql import functions as F

    strides = F.sequence(F.floor(F.col("first") / STRIDE), F.floor((F.col("end") - 1) / STRIDE))
    each = found.withColumn("at", F.explode(strides))
    return (
        each.withColumn("first", F.greatest(F.col("first"), F.col("at") * STRIDE))
        .withColumn("end", F.least(F.col("end"), (F.col("at") + 1) * STRIDE))
        .drop("at")
    )
