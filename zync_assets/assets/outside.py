"""What is there and was never reported: done by ``zync`` outside Dagster, or before this instance existed.

The cursor keeps, for each asset, each partition's position when it was last looked at. Where one moved, Dagster's own
last event of the range tells whether a run has reported it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from dagster import AssetKey, AssetMaterialization, AssetRecordsFilter, DagsterInstance

from zync_assets.assets import metadata, names
from zync_assets.assets.extents import Extent, raw_extents, staging_extents, staging_schema, topic_extents
from zync_assets.assets.facts import Facts
from zync_assets.offsets import OffsetRange, format_key, keys_over
from zync_assets.pipeline import Pipeline

Positions = Mapping[int, int]


@dataclass(frozen=True)
class Standing:
    """Where an asset stands: partition → offset where it begins, and the next offset."""

    key: AssetKey
    job: str | None
    """The job whose runs report the asset themselves; None for a source topic, which only the sensor reports."""
    first: Positions
    next: Positions
    lag: int | None = None


def standings(pipeline: Pipeline, facts: Facts) -> Iterator[Standing]:
    """Where each asset stands, upstream first."""
    for topic, plan in facts.ingest.items():
        parts = facts.topics[topic].partitions
        lows, ends = {p.partition: p.low for p in parts}, {p.partition: p.end for p in parts}
        yield Standing(names.topic_key(topic), None, lows, ends, plan.lag)
        if plan.state is not None:
            key = names.pool_key(plan.input.pool, topic)
            yield Standing(key, names.ingest_job(topic), plan.state.first, plan.state.next)
    for pool, plan in facts.etl.items():
        for item in pipeline.outputs_of(pool):
            placed = {p: at for (topic, p), at in plan.head.outputs.items() if topic == item.topic}
            if placed:
                base = {p: at.base for p, at in placed.items()}
                upcoming = {p: at.next for p, at in placed.items()}
                yield Standing(names.pool_key(pool, item.topic), names.staging_job(pool), base, upcoming)
    for topic, plan in facts.publish.items():
        if plan.topic_state is not None and plan.position is not None:
            yield Standing(
                names.topic_key(topic),
                names.staging_job(plan.output.pool),
                {0: plan.position.base},
                {0: min(plan.high, plan.end)},
                plan.lag,
            )


def unreported(
    pipeline: Pipeline, facts: Facts, instance: DagsterInstance, standing: Standing, before: Positions
) -> list[AssetMaterialization]:
    """Events for the ranges in which an asset moved since ``before`` and which no run has reported as they are now."""
    moved = [
        OffsetRange(p, min(before.get(p, standing.first.get(p, end)), end), end)
        for p, end in standing.next.items()
        if before.get(p, standing.first.get(p, end)) != end
    ]
    keys = [key for key in keys_over(moved) if not _told(instance, standing, key)]
    if not keys:
        return []
    more = {} if standing.lag is None else {"lag": standing.lag}
    extents, schema = _extents(facts, standing, keys)
    return [metadata.materialization(standing.key, extent, schema, more) for extent in extents]


def _told(instance: DagsterInstance, standing: Standing, key: OffsetRange) -> bool:
    """Whether the last event of a range says where the range ends now."""
    records = instance.fetch_materializations(
        AssetRecordsFilter(asset_key=standing.key, asset_partitions=[format_key(key)]), limit=1
    ).records
    event = records[0].asset_materialization if records else None
    said = event.metadata.get("last") if event else None
    return said is not None and said.value == min(standing.next[key.partition], key.end) - 1


def _extents(facts: Facts, standing: Standing, keys: Sequence[OffsetRange]) -> tuple[list[Extent], pa.Schema | None]:
    place, topic = standing.key.path
    if place == names.KAFKA:
        return topic_extents(facts.topics[topic], keys, gapless=topic in facts.publish), None
    if place in facts.etl:
        state = facts.etl[place].state
        return staging_extents(state, topic, keys), staging_schema(state, topic) if state else None
    state = facts.ingest[topic].state
    return (raw_extents(state, keys), state.schema) if state else ([], None)
