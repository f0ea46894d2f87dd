"""The account of a batch's inputs as ledger rows: offset ranges for finished records, and one row for each pending record.

New offsets in no other class are done. A batch with only done records therefore needs one entry a range. A count before the
commit checks the account: new records = sources of outputs + records in the other classes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from zync_assets.codecs.spark_types import listed_frame
from zync_assets.etl.account import ENTRIES
from zync_assets.offsets import OffsetRange, normalize, split

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
    """Records that a rule failed on, as in ``account.ENTRIES``. ``records``: (topic, partition, offset, rule, why)."""
    rows = [("quarantined", topic, part, offset, offset + 1, rule, why) for topic, part, offset, rule, why in records]
    return listed_frame(spark, _FAILED, rows)


def few_rows(
    ranges: Mapping[str, Sequence[OffsetRange]], found: Iterable[Mapping[str, Any]]
) -> list[dict[str, object]]:
    """The rows of ``ledger_rows``, made from fetched rows. ``found``: rows of ``account.ENTRIES``, and failures."""
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
    """Ledger rows that cover ``ranges``: what is in ``found`` (new records' ``account.ENTRIES``), and done ranges between.

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
