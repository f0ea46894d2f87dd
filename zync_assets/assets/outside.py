"""Reports work to Dagster that no run has reported: work by ``zync`` outside Dagster, or before this instance existed.

The sensor's cursor keeps the reported position of each asset's partitions. After a position has moved, Dagster's last event
of the range shows whether a run has reported the range. A tick reports a bounded number of ranges, and a later tick
continues. Growing ranges are reported at a bounded rate, however many records arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from dagster import (
    AssetKey,
    AssetMaterialization,
    AssetObservation,
    AssetRecordsFilter,
    DagsterEventType,
    DagsterInstance,
)

from zync_assets.assets import metadata
from zync_assets.assets.extents import Extent, raw_extents, staging_extents, staging_schema, topic_extents
from zync_assets.assets.facts import Facts
from zync_assets.assets.names import KAFKA, Names
from zync_assets.offsets import OffsetRange, format_key, keys_over

Positions = Mapping[int, int]
News = AssetMaterialization | AssetObservation

RANGES = 50
"""The most ranges of an asset in one tick. A tick may take 60 s, and an event takes about 20 ms."""
EVENT_SECONDS = 60.0
"""The seconds between two events of an asset's growing ranges and lag, on the average."""
SAVED_SECONDS = 600.0
"""The most unused seconds that an asset saves. After a quiet time, the asset may report several events at once."""


@dataclass(frozen=True)
class Standing:
    """The position of an asset. ``first`` and ``next``: partition → the first offset, and the next offset."""

    key: AssetKey
    job: str | None
    """The job whose runs report the asset themselves; None for a source topic, which only the sensor reports."""
    first: Positions
    next: Positions
    lag: int | None = None

    @property
    def place(self) -> str:
        """The asset's path, as the cursor and the problems have it."""
        return "/".join(self.key.path)

    def moved(self, before: Mapping[str, Any]) -> bool:
        """Whether the asset stands elsewhere than the cursor says."""
        return before.get("next") != _as_json(self.next) or before.get("lag") != self.lag


def standings(names: Names, facts: Facts) -> Iterator[Standing]:
    """The standing of each asset, upstream assets first."""
    for topic, plan in facts.ingest.items():
        parts = plan.topic_state.partitions
        lows, ends = {p.partition: p.low for p in parts}, {p.partition: p.end for p in parts}
        # The pipeline that the topic's asset is named after reports its lag there.
        elsewhere = names.follows(topic)
        yield Standing(names.topic_key(topic), None, lows, ends, None if elsewhere else plan.lag)
        if plan.state is not None:
            key = names.pool_key(plan.input.pool, topic)
            lag = plan.lag if elsewhere else None
            yield Standing(key, names.ingest_job(topic), plan.state.first, plan.state.next, lag)
    for pool, plan in facts.etl.items():
        for item in names.pipeline.outputs_of(pool):
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
                {0: min(plan.verified, plan.end)},
                plan.lag,
            )


def news(
    facts: Facts, instance: DagsterInstance, standing: Standing, before: Mapping[str, Any], now: float
) -> tuple[list[News], dict[str, Any]]:
    """Events of the ranges in which an asset moved since ``before`` and which no run has reported as they are now; and
    what the cursor says of the asset after them.

    ``before`` and the second result: ``next`` (partition → offset up to which all is reported), ``lag``, ``turn`` (the
    partition whose turn is first), ``used`` (seconds since the epoch up to which the asset's time is used up).
    """
    used = max(float(before.get("used", 0.0)), now - SAVED_SECONDS)
    growing = used <= now
    position, keys, turn = _turn(standing, before, growing)
    fresh = [key for key in keys if key not in _reported(instance, standing, keys)]
    more = {} if standing.lag is None else {"lag": standing.lag}
    extents, schema = _extents(facts, standing, fresh)
    events: list[News] = [metadata.materialization(standing.key, extent, schema, more) for extent in extents]
    spent = sum(not extent.complete for extent in extents)
    lag = standing.lag if events else before.get("lag")
    if growing and lag != standing.lag:
        events.append(AssetObservation(standing.key, metadata=more))
        spent, lag = spent + 1, standing.lag
    after: dict[str, Any] = {"next": _as_json(position), "lag": lag}
    if turn is not None:
        after["turn"] = turn
    if spent or used > now - SAVED_SECONDS:
        after["used"] = round(used + spent * EVENT_SECONDS, 1)
    return events, after


def _as_json(position: Positions) -> dict[str, int]:
    return {str(partition): end for partition, end in sorted(position.items())}


def _turn(
    standing: Standing, before: Mapping[str, Any], growing: bool
) -> tuple[dict[int, int], list[OffsetRange], int | None]:
    """Each partition's position after this tick, the ranges of this tick, and the partition whose turn is first in the
    next one (None: any). ``growing``: whether ranges that still grow have their turn."""
    old = {int(p): end for p, end in before.get("next", {}).items()}
    first = before.get("turn", -1)
    position: dict[int, int] = {}
    keys: list[OffsetRange] = []
    turn: int | None = None
    for partition in sorted(standing.next, key=lambda p: (p < first, p)):
        end = standing.next[partition]
        at = min(old.get(partition, standing.first.get(partition, end)), end)
        for key in keys_over([OffsetRange(partition, at, end)]):
            if key.end > end and not growing:
                break
            if len(keys) == RANGES:
                turn = partition if turn is None else turn
                break
            keys.append(key)
            at = min(key.end, end)
        position[partition] = at
    return position, keys, turn


def _reported(instance: DagsterInstance, standing: Standing, keys: Iterable[OffsetRange]) -> set[OffsetRange]:
    """Those ranges whose last event says where the range ends now. Two queries, however many ranges there are."""
    wanted = {format_key(key): key for key in keys}
    if not wanted:
        return set()
    kind = DagsterEventType.ASSET_MATERIALIZATION
    latest = instance.get_latest_storage_id_by_partition(standing.key, kind, set(wanted))
    if not latest:
        return set()
    asked = AssetRecordsFilter(asset_key=standing.key, storage_ids=list(latest.values()))
    found: set[OffsetRange] = set()
    for record in instance.fetch_materializations(asked, limit=len(latest)).records:
        event = record.asset_materialization
        key = wanted.get(event.partition or "") if event is not None else None
        if event is None or key is None:
            continue
        last = event.metadata.get("last")
        if last is not None and last.value == min(standing.next[key.partition], key.end) - 1:
            found.add(key)
    return found


def _extents(facts: Facts, standing: Standing, keys: Sequence[OffsetRange]) -> tuple[list[Extent], pa.Schema | None]:
    place, topic = standing.key.path[-2:]
    if not keys:
        return [], None
    if place == KAFKA:
        if topic in facts.publish:
            state = facts.publish[topic].topic_state
            published = {p: OffsetRange(p, standing.first[p], end) for p, end in standing.next.items()}
            return (topic_extents(state, keys, published), None) if state else ([], None)
        return topic_extents(facts.ingest[topic].topic_state, keys), None
    if place in facts.etl:
        state = facts.etl[place].state
        return staging_extents(state, topic, keys), staging_schema(state, topic) if state else None
    state = facts.ingest[topic].state
    return (raw_extents(state, keys), state.schema) if state else ([], None)
