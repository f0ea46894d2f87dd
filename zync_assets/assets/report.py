"""A run's report: the metadata of each range of the run, and a separate event for each other range that the run reached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pyarrow as pa
from dagster import OutputContext

from zync_assets.assets import metadata, partitions
from zync_assets.assets.extents import Extent, raw_extents, staging_extents, staging_schema, topic_extents, topic_schema
from zync_assets.errors import EtlError, LakeError, RangeUnknown
from zync_assets.kafka.topics import topic_states
from zync_assets.lake import raw, staging
from zync_assets.lake.published import open_published
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange, format_key, key_of, keys_over
from zync_assets.pipeline import Pipeline

PENDING = "pending"
"""Metadata of a staging topic's ranges: the input records of the whole pool that wait for their counterparts now."""
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
    refuse_ahead(pool, state, own)
    counts = state.head.counts if state else {}
    context.add_output_metadata({PENDING: sum(n for (_, _, kind), n in counts.items() if kind == PENDING)})
    schema = staging_schema(state, topic) if state else None
    _report(context, staging_extents(state, topic, own), staging_extents(state, topic, more), schema)


def published(pipeline: Pipeline, context: OutputContext, topic: str, sent: OffsetRange) -> None:
    """Report an output topic's ranges. ``sent``: the offsets that this run published."""
    found = topic_states(pipeline.kafka, [topic]).get(topic)
    state = staging.open_staging(pipeline.lake, pipeline.output(topic).pool)
    own, more = _keys(context, [sent])
    schema = topic_schema(state, topic) if state else None
    if found is None:
        _report(context, [Extent(key, key.first, key.first, False, 0) for key in own], [], schema)
        return
    done = open_published(pipeline.lake, pipeline.output(topic).pool, topic).verified
    position = state.head.outputs.get((topic, 0)) if state else None
    verified = {0: OffsetRange(0, min(position.base, done), done)} if position and done is not None else {}
    _report(context, topic_extents(found, own, verified), topic_extents(found, more, verified), schema)


def _keys(context: OutputContext, ranges: Iterable[OffsetRange]) -> tuple[list[OffsetRange], list[OffsetRange]]:
    """The run's keys, and the other keys that ``ranges`` overlap."""
    own = partitions.served(context.asset_partition_keys, context.asset_key.to_user_string())
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


def refuse_partitions(pool: str, keys: Iterable[OffsetRange]) -> None:
    """RangeUnknown for a range of another partition than 0: outputs have one partition."""
    for key in keys:
        if key.partition:
            raise RangeUnknown(
                f"pool {pool} has no range {format_key(key)}: outputs have partition 0 alone. Run"
                f" {format_key(replace(key, partition=0))} instead, and delete the partition {format_key(key)} in Dagster."
            )


def refuse_ahead(pool: str, state: StagingState | None, keys: Iterable[OffsetRange]) -> None:
    """EtlError for a range that no output topic of the pool has reached.

    The run's ETL batch may have been committed before this error. A second run of the range does no harm.
    """
    ends = [item.next for item in state.head.outputs.values()] if state else []
    reached = max(ends, default=0)
    for key in keys:
        if key.first > reached:
            raise EtlError(
                f"pool {pool}, range {format_key(key)} lies ahead of the next offset: outputs end before {reached}."
                f" Run {format_key(key_of(0, reached))} instead."
            )
