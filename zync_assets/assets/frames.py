"""Records for an asset of a user's own, in the shape that its argument is annotated with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from zync_assets.errors import LakeError
from zync_assets.lake import raw, staging
from zync_assets.lake.raw import raw_files
from zync_assets.lake.reading import output_frame, raw_frame
from zync_assets.offsets import OffsetRange, normalize
from zync_assets.pipeline import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def converted(frame: DataFrame, wanted: object, place: str) -> object:
    """A Spark DataFrame as ``wanted``: itself (where the argument has no annotation, too), a pyarrow Table, or a polars
    LazyFrame. The last two bring all rows into this process. LakeError for another type."""
    name = f"{getattr(wanted, '__module__', '')}.{getattr(wanted, '__qualname__', wanted)}"
    if wanted is Any or (name.startswith("pyspark.sql.") and name.endswith(".DataFrame")):
        return frame
    if wanted is pa.Table:
        return frame.toArrow()
    if name.startswith("polars.") and name.endswith(".LazyFrame"):
        import polars

        return polars.from_arrow(frame.toArrow()).lazy()  # type: ignore[union-attr]
    raise LakeError(
        f"{place} can't be read as {name}. Annotate the argument with pyspark.sql.DataFrame, pyarrow.Table or"
        " polars.LazyFrame."
    )


def pool_frame(
    spark: SparkSession, pipeline: Pipeline, pool: str, topic: str, keys: Sequence[OffsetRange] | None
) -> DataFrame:
    """The records of a topic in a pool, of some ranges or (None) all. LakeError where there is no table yet."""
    if pool in pipeline.staging_pools:
        state = staging.open_staging(pipeline.lake, pool)
        if state is None:
            raise LakeError(f"pool {pool} has no table yet. Run ETL first.")
        whole = [
            OffsetRange(partition, item.base, item.next)
            for (name, partition), item in state.head.outputs.items()
            if name == topic
        ]
        return output_frame(spark, state, topic, whole if keys is None else normalize(keys))
    found = raw.open_raw(pipeline.lake, pool, topic)
    if found is None:
        raise LakeError(f"{pool}.{topic} has no table yet. Ingest the topic first.")
    ranges = None if keys is None else normalize(keys)
    frame = raw_frame(spark, found, raw_files(found, ranges))
    if ranges is None:
        return frame
    inside = " OR ".join(
        f"(kafka.partition = {part.partition} AND kafka.offset >= {part.first} AND kafka.offset < {part.end})"
        for part in ranges
    )
    return frame.filter(inside or "false")
