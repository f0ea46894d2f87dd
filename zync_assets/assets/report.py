"""A run's report: metadata of each of its ranges, and an event of its own for each further range that it reached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa
from dagster import OutputContext

from zync_assets.assets import metadata, partitions
from zync_assets.assets.extents import Extent, raw_extents, staging_extents, staging_schema, topic_extents
from zync_assets.errors import EtlError, LakeError
from zync_assets.kafka.topics import topic_states
from zync_assets.lake import raw, staging
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange, format_key, key_of, keys_over
from zync_assets.pipeline import Pipeline

CONSUMED = "consumed"
"""Metadata of a staging topic's ranges: the input offsets that the run's ETL batch took, as JSON (topic → keys)."""


def ingested(pipeline: Pipeline, context: OutputContext, topic: str, ranges: Iterable[OffsetRange]) -> None:
    """Report a raw table's ranges, verified. ``ranges``: the offsets that this run committed."""
    state = raw.open_raw(pipeline.lake, pipeline.input(topic).pool, topic)
    if state is None:
        raise LakeError(f"{pipeline.input(topic).pool}.{topic} has no table after its ingest")
    own, more = _keys(context, ranges)
    _report(context, raw_extents(state, own), raw_extents(state, more), state.schema)


def staged(pipeline: Pipeline, context: OutputContext, topic: str, ranges: Iterable[OffsetRange]) -> None:
    """Report an output topic's ranges in its staging pool, verified. ``ranges``: the offsets that this run numbered."""
    pool = pipeline.output(topic).pool
    state = staging.open_staging(pipeline.lake, pool)
    own, more = _keys(context, ranges)
    _refuse_ahead(pool, state, own)
    schema = staging_schema(state, topic) if state else None
    _report(context, staging_extents(state, topic, own), staging_extents(state, topic, more), schema)


def published(pipeline: Pipeline, context: OutputContext, topic: str, sent: OffsetRange) -> None:
    """Report an output topic's ranges. ``sent``: the offsets that this run published."""
    found = topic_states(pipeline.kafka, [topic]).get(topic)
    state = staging.open_staging(pipeline.lake, pipeline.output(topic).pool)
    own, more = _keys(context, [sent])
    schema = staging_schema(state, topic) if state else None
    if found is None:
        _report(context, [Extent(key, key.first, key.first, False, 0) for key in own], [], schema)
        return
    _report(context, topic_extents(found, own, gapless=True), topic_extents(found, more, gapless=True), schema)


def _keys(context: OutputContext, ranges: Iterable[OffsetRange]) -> tuple[list[OffsetRange], list[OffsetRange]]:
    """The run's keys, and those that ``ranges`` reach beside them."""
    own = partitions.in_order(context.asset_partition_keys)
    return own, sorted(set(keys_over(ranges)) - set(own))


def _report(context: OutputContext, own: Sequence[Extent], more: Sequence[Extent], schema: pa.Schema | None) -> None:
    for extent in own:
        context.step_context.add_asset_metadata(
            metadata.of_extent(extent, schema), asset_key=context.asset_key, partition_key=format_key(extent.key)
        )
    if more:
        name = context.asset_partitions_def.name  # type: ignore[attr-defined]
        partitions.add(context.step_context.instance, name, [extent.key for extent in more])
    for extent in more:
        context.log_event(metadata.materialization(context.asset_key, extent, schema))


def _refuse_ahead(pool: str, state: StagingState | None, keys: Iterable[OffsetRange]) -> None:
    """A range that no output topic of the pool has reached can't be reported. What ETL found ready is committed by
    then; running it again changes nothing."""
    reached: dict[int, int] = {0: 0}
    for (_, partition), item in state.head.outputs.items() if state else ():
        reached[partition] = max(reached.get(partition, 0), item.next)
    for key in keys:
        upcoming = reached.get(key.partition)
        if upcoming is None or key.first > upcoming:
            partition, at = (key.partition, upcoming) if upcoming is not None else (0, reached[0])
            raise EtlError(
                f"pool {pool}, range {format_key(key)} lies ahead of the next offset: outputs go to partition"
                f" {partition} and end before {at}. Run {format_key(key_of(partition, at))} instead."
            )
