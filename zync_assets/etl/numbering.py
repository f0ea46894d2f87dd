"""Order and number outputs without putting them all on one task.

Results are cut into buckets by time, a Spark partition each, and sorted within. The number of a row is then the bucket's
first number (known once each bucket's rows are counted) plus its place in the bucket. Bounds of buckets come from the
statistics of the raw files: sampling the rows, as ``repartitionByRange`` does, would run the joins twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

BUCKET_RECORDS = 250_000
"""New raw records for each bucket, about."""
_PLACE_BITS = (1 << 33) - 1
"""``monotonically_increasing_id``: the upper 31 bits are the Spark partition, the lower 33 the row's place in it."""


@dataclass(frozen=True)
class TimeSpan:
    """Some raw records and the times that they lie between, in milliseconds."""

    low: int
    high: int
    records: int


def time_bounds(spans: Sequence[TimeSpan]) -> list[int]:
    """Ascending times which cut the records into buckets of about BUCKET_RECORDS, taking each span as spread evenly.

    Fewer bounds where many records share one time: a bound separates times, never records of one time.
    """
    total = sum(span.records for span in spans)
    count = total // BUCKET_RECORDS
    if count < 2:
        return []
    points = sorted({span.low for span in spans} | {span.high for span in spans})
    below = [sum(_below(span, point) for span in spans) for point in points]
    bounds: set[int] = set()
    for number in range(1, count):
        wanted = total * number / count
        place = next(i for i, found in enumerate(below) if found >= wanted) if below[-1] >= wanted else len(below) - 1
        if place == 0:
            continue
        low, high = points[place - 1], points[place]
        weight = (wanted - below[place - 1]) / max(1.0, below[place] - below[place - 1])
        bounds.add(int(low + (high - low) * weight))
    return sorted(bounds)


def _below(span: TimeSpan, point: int) -> float:
    if point >= span.high:
        return float(span.records)
    if point <= span.low:
        return 0.0
    return span.records * (point - span.low) / (span.high - span.low)


def arranged(results: DataFrame, bounds: Sequence[int]) -> DataFrame:
    """Result rows in buckets, sorted within each: outputs first, by topic and order."""
    from pyspark.sql import functions as F

    bucket = F.lit(0)
    if bounds:
        millis = F.unix_millis(F.col("ord.time"))
        limits = F.array(*(F.lit(bound).cast("long") for bound in bounds))
        bucket = F.size(F.filter(limits, lambda bound: bound <= millis))
    return (
        results.withColumn("bucket", bucket.cast("int"))
        .repartitionById(len(bounds) + 1, "bucket")
        .sortWithinPartitions((F.col("kind") != "out").asc(), "out", "ord")
    )


def facts(rows: DataFrame) -> list[Row]:
    """Counts of what is in arranged rows, small whatever their number: by kind, out, rule, bucket and source partition.

    Columns kind, out, rule, bucket, topic, partition, old, ``entries`` (sources) and ``rows`` (rows, counted at their
    first source).
    """
    from pyspark.sql import functions as F

    each = rows.select("kind", "out", "rule", "bucket", F.posexplode("source").alias("place", "of"))
    return (
        each.groupBy(
            "kind",
            "out",
            "rule",
            "bucket",
            F.col("of.topic").alias("topic"),
            F.col("of.partition").alias("partition"),
            F.col("of.old").alias("old"),
        )
        .agg(F.count("*").alias("entries"), F.sum((F.col("place") == 0).cast("long")).alias("rows"))
        .collect()
    )


def numbered(rows: DataFrame, topic: str, firsts: Sequence[int]) -> DataFrame:
    """The outputs of one topic with their column ``kafka``; ``firsts[bucket]`` is the bucket's first number."""
    from pyspark.sql import functions as F

    first = F.element_at(F.array(*(F.lit(number).cast("long") for number in firsts)), F.col("bucket") + 1)
    place = F.monotonically_increasing_id().bitwiseAND(F.lit(_PLACE_BITS))
    chosen = rows.filter((F.col("kind") == "out") & (F.col("out") == topic)).withColumn("place", place)
    kafka = F.struct(
        F.lit(topic).alias("topic"), F.lit(0).cast("int").alias("partition"), (first + F.col("place")).alias("offset")
    )
    return chosen.withColumn("kafka", kafka)
