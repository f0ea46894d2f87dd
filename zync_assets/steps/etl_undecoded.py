"""Reads the side table of a raw table within a batch's new offsets: undecodable records, and offset ranges that retention
removed or that an input's shape excludes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.codecs.spark_types import listed_frame
from zync_assets.etl import ledger, matching
from zync_assets.lake import quarantine, raw, reading, storage
from zync_assets.lake.raw import RawState
from zync_assets.lake.tables import DataFile
from zync_assets.pipeline import Pipeline
from zync_assets.records import BAD_SCHEMA, RANGE_STAGES
from zync_assets.steps.etl_plan import EtlPlan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def undecoded_rows(spark: SparkSession, pipeline: Pipeline, plan: EtlPlan) -> DataFrame | None:
    """The quarantined and lost offsets within the new ranges, as rows like ``account.ENTRIES`` with a column ``records``.

    None without such offsets.
    """
    frames: list[DataFrame] = []
    for topic, ranges in plan.ranges.items():
        state = plan.raw[topic]
        if not ranges or state is None or not any([*state.bad.values(), *state.left_out.values()]):
            continue
        place = (pipeline.lake, pipeline.input(topic).pool, topic)
        files = [
            item
            for item in quarantine.quarantine_files(*place, state.next)
            if any(part.partition == item.partition and part.first <= (item.last or 0) for part in ranges)
        ]
        if files:
            frames.append(_rows(spark, plan, topic, state, storage.quarantine_uri(*place), files))
    return matching.union(frames) if frames else None


def quarantined(rows: DataFrame | None) -> Counter[tuple[str, int]]:
    """(topic, partition) → quarantined records in the new ranges; ranges hold none."""
    if rows is None:
        return Counter()
    found = rows.where("kind = 'quarantined'").groupBy("topic", "partition").count().collect()
    return Counter({(row["topic"], row["partition"]): row["count"] for row in found})


def _rows(
    spark: SparkSession, plan: EtlPlan, topic: str, state: RawState, uri: str, files: Sequence[DataFile]
) -> DataFrame:
    from pyspark.sql import functions as F

    of_range = F.col("stage").isin(*RANGE_STAGES)
    frame = reading.parquet_frame(spark, uri, files, BAD_SCHEMA).select(
        F.when(of_range, "dropped").otherwise("quarantined").alias("kind"),
        F.lit(topic).alias("topic"),
        F.col("kafka.partition").alias("partition"),
        F.col("kafka.offset").alias("first"),
        "end",
        F.when(of_range, 0).otherwise(1).cast("long").alias("records"),
    )
    inside = F.lit(False)
    for part in plan.ranges[topic]:
        inside = inside | ((F.col("partition") == part.partition) & F.col("first").between(part.first, part.end - 1))
    frame = frame.filter(inside)
    replayed = [(p, offset) for p, found in raw.replayed_offsets(state).items() for offset in found.tolist()]
    if replayed:
        # They are in the raw table, and go through the rules.
        places = listed_frame(spark, pa.schema([("partition", pa.int32()), ("first", pa.int64())]), replayed)
        frame = frame.join(places, ["partition", "first"], "left_anti")
    return ledger.cut_at_strides(frame)
