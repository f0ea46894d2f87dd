"""What became of the inputs of a batch, as ledger rows: ranges of offsets for what is settled, rows for what waits.

New offsets that are in no other class are done; so done facts cost nothing where nothing else happened. That they are
right is checked by counting before the commit: new records = sources of outputs + records in the other classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from zync_assets.offsets import OffsetRange, split

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STRIDE = 1_000_000
"""Offsets of one partition that are made into ranges together, in one task."""

_FIELDS = (
    "kind string, topic string, partition int, first long, end long, rule string, hash long, count long, text string"
)


def whole_ranges(ranges: Mapping[str, Sequence[OffsetRange]]) -> list[dict[str, object]]:
    """Ledger rows of a batch in which every new record is done."""
    return [
        {"kind": "done", "topic": topic, "partition": part.partition, "first": part.first, "end": part.end}
        for topic, parts in sorted(ranges.items())
        for part in parts
        if not part.empty
    ]


def exceptions(rows: DataFrame) -> DataFrame:
    """New records that made no output: kind, topic, partition, first, end, rule, hash."""
    each = rows.where("kind <> 'out'").selectExpr("kind", "rule", "hash", "explode(source) AS of").where("NOT of.old")
    return each.selectExpr(
        "kind",
        "of.topic AS topic",
        "of.partition AS partition",
        "of.offset AS first",
        "of.offset + 1 AS end",
        "rule",
        "hash",
    )


def completed(rows: DataFrame) -> DataFrame:
    """Records that were pending and are done by this batch, or dropped (``text``), a ledger row each."""
    each = rows.where("kind IN ('out', 'dropped')").selectExpr("kind", "rule", "explode(source) AS of").where("of.old")
    return _ledger(
        each.selectExpr(
            "'completed' AS kind",
            "of.topic AS topic",
            "of.partition AS partition",
            "of.offset AS first",
            "of.offset + 1 AS end",
            "rule",
            "CASE WHEN kind = 'dropped' THEN kind END AS text",
        )
    )


def ledger_rows(spark: SparkSession, ranges: Mapping[str, Sequence[OffsetRange]], found: DataFrame) -> DataFrame:
    """Ledger rows that cover ``ranges``: what is in ``found`` (from ``exceptions``), and done ranges between.

    Neighbouring unmatched, dropped or quarantined offsets become one range.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    pieces = [
        (topic, piece.partition, piece.first, piece.end)
        for topic, parts in sorted(ranges.items())
        for part in parts
        for piece in _pieces(part)
    ]
    edges = spark.createDataFrame(pieces, "topic string, partition int, first long, stop long")
    edges = edges.withColumn("kind", F.lit("edge")).withColumn("end", F.col("first"))
    marked = found.withColumn("stride", F.floor(F.col("first") / STRIDE)).unionByName(
        edges.withColumn("stride", F.floor(F.col("first") / STRIDE)), allowMissingColumns=True
    )
    own = Window.partitionBy("topic", "partition", "stride").orderBy("first", "end")
    upto = own.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    before, previous = F.lag("kind").over(own), F.lag("end").over(own)
    joins = (F.col("kind") == before) & (F.col("first") == previous) & ~F.col("kind").isin("pending", "edge")
    rows = (
        marked.withColumn("fresh", (~F.coalesce(joins, F.lit(False))).cast("int"))
        .withColumn("next", F.lead("first").over(own))
        .withColumn("limit", F.max("stop").over(Window.partitionBy("topic", "partition", "stride")))
        .withColumn("island", F.sum("fresh").over(upto))
    )
    classes = (
        rows.filter("kind <> 'edge'")
        .groupBy("topic", "partition", "stride", "island")
        .agg(
            F.first("kind").alias("kind"),
            F.min("first").alias("first"),
            F.max("end").alias("end"),
            F.first("rule").alias("rule"),
            F.first("hash").alias("hash"),
            F.count("*").alias("count"),
        )
    )
    until = F.coalesce(F.col("next"), F.col("limit"))
    done = rows.filter(until > F.col("end")).select(
        F.lit("done").alias("kind"), "topic", "partition", F.col("end").alias("first"), until.alias("end")
    )
    return _ledger(classes.drop("stride", "island")).unionByName(_ledger(done))


def _pieces(part: OffsetRange) -> list[OffsetRange]:
    first = part.first - part.first % STRIDE
    aligned = split(OffsetRange(part.partition, first, part.end), STRIDE) if not part.empty else []
    return [OffsetRange(piece.partition, max(piece.first, part.first), piece.end) for piece in aligned]


def _ledger(frame: DataFrame) -> DataFrame:
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
