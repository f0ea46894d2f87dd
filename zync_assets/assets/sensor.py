"""The sensor of a pipeline: compares facts every few seconds, asks for the runs that are due, and reports what moved.

The sensor asks for a step only while no run of the step is queued or under way, and waits longer after each failure. It sets
no run key: Dagster never starts a second run with a run key, even if the first run failed.

The sensor also reports work that no run has reported: work by ``zync`` outside Dagster, or before this instance existed. The
sensor's cursor keeps the reported position of each asset's partitions. After a position has moved, Dagster's last event of
the range shows whether a run has reported the range. A tick reports a bounded number of ranges, and a later tick continues.
Growing ranges are reported at a bounded rate, however many records arrive.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from dagster import (
    AddDynamicPartitionsRequest,
    AssetCheckEvaluation,
    AssetCheckKey,
    AssetKey,
    AssetMaterialization,
    AssetObservation,
    AssetRecordsFilter,
    DagsterEventType,
    DagsterInstance,
    DefaultSensorStatus,
    DeleteDynamicPartitionsRequest,
    RunRecord,
    RunRequest,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    sensor,
)

from zync_assets.assets import reports, runs
from zync_assets.assets.facts import (
    DueStep,
    Facts,
    Grid,
    TickFailure,
    due_steps,
    error_line,
    gather,
    grids,
    keys_of_run,
)
from zync_assets.assets.names import KAFKA, PIPELINE_TAG, REST, STEP_TAG, Names, keys_of, range_of
from zync_assets.assets.reports import Extent, last_offset, raw_extents, staging_extents, staging_schema, topic_extents
from zync_assets.assets.runs import FAILING, PROBLEMS, REACHABILITY, far_ends, reachability, troubles
from zync_assets.checks.raw_checks import BLOCKING
from zync_assets.errors import ZyncError
from zync_assets.offsets import OffsetRange, format_key, keys_over
from zync_assets.pipeline import Pipeline
from zync_assets.private import private
from zync_assets.sinks.plan import SinkPlan

Positions = Mapping[int, int]
News = AssetMaterialization | AssetObservation

RANGES = 50
"""The most ranges of an asset in one tick. A tick may take 60 s, and an event takes about 20 ms."""
EVENT_SECONDS = 60.0
"""The seconds between two events of an asset's growing ranges and lag, on the average."""
SAVED_SECONDS = 600.0
"""The most unused seconds that an asset saves. After a quiet time, the asset may report several events at once."""


@dataclass(frozen=True)
class AssetPosition:
    """The position of an asset. ``first`` and ``next``: partition → the first offset, and the next offset."""

    key: AssetKey
    job: str | None
    """The job whose runs report the asset themselves; None for a source topic, which only the sensor reports."""
    first: Positions
    next: Positions
    lag: int | None = None
    sink: SinkPlan | None = None
    """The plan of a target table."""

    @property
    def place(self) -> str:
        """The asset's path, as the cursor and the problems have it."""
        return "/".join(self.key.path)

    def differs(self, entry: Mapping[str, Any]) -> bool:
        """Whether the asset stands elsewhere than the cursor says."""
        return entry.get("next") != _as_json(self.next) or entry.get("lag") != self.lag


def asset_positions(names: Names, facts: Facts) -> Iterator[AssetPosition]:
    """The position of each asset, upstream assets first."""
    for topic, plan in facts.ingest.items():
        parts = plan.topic_state.partitions
        lows, ends = {p.partition: p.low for p in parts}, {p.partition: p.end for p in parts}
        # The pipeline that the topic's asset is named after reports its lag there.
        elsewhere = names.follows(topic)
        yield AssetPosition(names.topic_key(topic), None, lows, ends, None if elsewhere else plan.lag)
        if plan.state is not None:
            key = names.pool_key(plan.input.pool, topic)
            lag = plan.lag if elsewhere else None
            yield AssetPosition(key, names.ingest_job(topic), plan.state.first, plan.state.next, lag)
    for pool, plan in facts.etl.items():
        for item in names.pipeline.outputs_of(pool):
            positions = {p: at for (topic, p), at in plan.head.outputs.items() if topic == item.topic}
            if positions:
                base = {p: at.base for p, at in positions.items()}
                next_offsets = {p: at.next for p, at in positions.items()}
                yield AssetPosition(names.pool_key(pool, item.topic), names.staging_job(pool), base, next_offsets)
    for topic, plan in facts.publish.items():
        if plan.topic_state is not None and plan.parts:
            yield AssetPosition(
                names.topic_key(topic),
                names.staging_job(plan.output.pool),
                {part.partition: part.position.base for part in plan.parts},
                {part.partition: min(part.verified_end, part.end) for part in plan.parts},
                plan.lag,
            )
    for plan in facts.sinks.values():
        sink, table = plan.sink.name, plan.table.name
        job = names.sink_job(sink, table)
        yield AssetPosition(names.sink_key(sink, table), job, plan.starts, plan.progress.next, plan.lag, plan)


def news(
    facts: Facts, instance: DagsterInstance, asset: AssetPosition, entry: Mapping[str, Any], now: float
) -> tuple[list[News], dict[str, Any]]:
    """Events for the ranges in which an asset moved since ``entry``, without ranges that a run has reported as they are now.
    Also returns the asset's new entry in the cursor.

    Entries hold ``next`` (partition → the offset up to which everything is reported), ``lag``, ``turn`` (the partition that the
    next tick takes first), ``used`` (seconds since the epoch up to which the asset's time is used up).
    """
    busy_until = max(float(entry.get("used", 0.0)), now - SAVED_SECONDS)
    has_turn = busy_until <= now
    position, keys, turn = _turn(asset, entry, has_turn)
    fresh = [key for key in keys if key not in _known_ranges(instance, asset, keys)]
    extents, schema = _extents(facts, asset, fresh)
    events: list[News] = [reports.materialization(asset.key, extent, schema) for extent in extents]
    cost, lag = sum(not extent.complete for extent in extents), entry.get("lag")
    if has_turn and lag != asset.lag and len(events) < RANGES:
        # An observation: Dagster would show the lag of the latest materialization, which stays when the lag is gone.
        events.append(AssetObservation(asset.key, metadata={} if asset.lag is None else {"lag": asset.lag}))
        cost, lag = cost + 1, asset.lag
    new_entry: dict[str, Any] = {"next": _as_json(position), "lag": lag}
    if turn is not None:
        new_entry["turn"] = turn
    if cost or busy_until > now - SAVED_SECONDS:
        new_entry["used"] = round(busy_until + cost * EVENT_SECONDS, 1)
    return events, new_entry


def _as_json(position: Positions) -> dict[str, int]:
    return {str(partition): end for partition, end in sorted(position.items())}


def _turn(
    asset: AssetPosition, entry: Mapping[str, Any], has_turn: bool
) -> tuple[dict[int, int], list[OffsetRange], int | None]:
    """Each partition's position after this tick, the ranges of this tick, and the partition whose turn is first in the
    next one (None: any). ``has_turn``: whether ranges that still grow have their turn."""
    old_offsets = {int(p): end for p, end in entry.get("next", {}).items()}
    first = entry.get("turn", -1)
    position: dict[int, int] = {}
    keys: list[OffsetRange] = []
    turn: int | None = None
    for partition in sorted(asset.next, key=lambda p: (p < first, p)):
        end = asset.next[partition]
        at = min(old_offsets.get(partition, asset.first.get(partition, end)), end)
        for key in keys_over([OffsetRange(partition, at, end)]):
            if key.end > end and not has_turn:
                break
            if len(keys) == RANGES:
                turn = partition if turn is None else turn
                break
            keys.append(key)
            at = min(key.end, end)
        position[partition] = at
    return position, keys, turn


def _known_ranges(instance: DagsterInstance, asset: AssetPosition, keys: Iterable[OffsetRange]) -> set[OffsetRange]:
    """Those ranges whose last event says where the range ends now. Two queries, however many ranges there are."""
    keys_by_name = {format_key(key): key for key in keys}
    if not keys_by_name:
        return set()
    kind = DagsterEventType.ASSET_MATERIALIZATION
    latest = instance.get_latest_storage_id_by_partition(asset.key, kind, set(keys_by_name))
    if not latest:
        return set()
    records_filter = AssetRecordsFilter(asset_key=asset.key, storage_ids=list(latest.values()))
    ranges: set[OffsetRange] = set()
    for record in instance.fetch_materializations(records_filter, limit=len(latest)).records:
        event = record.asset_materialization
        key = keys_by_name.get(event.partition or "") if event is not None else None
        if event is None or key is None:
            continue
        if last_offset(event) == min(asset.next[key.partition], key.end) - 1:
            ranges.add(key)
    return ranges


def _extents(facts: Facts, asset: AssetPosition, keys: Sequence[OffsetRange]) -> tuple[list[Extent], pa.Schema | None]:
    place, topic = asset.key.path[-2:]
    if not keys:
        return [], None
    if asset.sink is not None:
        return reports.sink_extents(asset.sink, keys), None
    if place == KAFKA:
        if topic in facts.publish:
            state = facts.publish[topic].topic_state
            ranges = {p: OffsetRange(p, asset.first[p], end) for p, end in asset.next.items()}
            return (topic_extents(state, keys, ranges), None) if state else ([], None)
        return topic_extents(facts.ingest[topic].topic_state, keys), None
    if place in facts.etl:
        state = facts.etl[place].state
        return staging_extents(state, topic, keys), staging_schema(state, topic) if state else None
    state = facts.ingest[topic].state
    return (raw_extents(state, keys), state.schema) if state else ([], None)


_log = logging.getLogger(__name__)

_TAGS = "dagster._core.storage.tags"
PARTITION_NAME_TAG: str = private("dagster", _TAGS, "PARTITION_NAME_TAG")
ASSET_PARTITION_RANGE_START_TAG: str = private("dagster", _TAGS, "ASSET_PARTITION_RANGE_START_TAG")
ASSET_PARTITION_RANGE_END_TAG: str = private("dagster", _TAGS, "ASSET_PARTITION_RANGE_END_TAG")

INTERVAL_SECONDS = 4
"""With 4, the sensor ticks every 5 s: Dagster's daemon looks at the sensor every 5 s. With 5, the interval would be not quite
over at every second look."""
FIRST_CHECKS = "checked"
"""Key of the cursor: whether it is settled that everything is checked that was there before this instance."""
FIRST_OFFSETS = 1_000_000
"""The most offsets that the sensor checks without a user's request."""
MOST_KEYS = 500
"""The most partition keys that a tick adds to a definition, because Dagster's daemon looks up every new key."""


def build_sensor(names: Names, jobs: Sequence[Any], *, running: bool) -> SensorDefinition:
    """The sensor of a pipeline. ``running``: whether the sensor is on by default."""
    pipeline = names.pipeline

    @sensor(
        name=names.sensor,
        description=(
            f"Keeps pipeline {pipeline.name} going: ingest, ETL and publishing wherever something is new. Reports what"
            " is new in the topics, and what `zync` did outside Dagster."
        ),
        jobs=jobs,
        minimum_interval_seconds=INTERVAL_SECONDS,
        default_status=DefaultSensorStatus.RUNNING if running else DefaultSensorStatus.STOPPED,
    )
    def tick(context: SensorEvaluationContext) -> SensorResult:
        try:
            return evaluate(names, context.instance, context.cursor, time.time())
        except TickFailure:
            raise
        except Exception as error:
            _log.exception("the tick of pipeline %s ended early", pipeline.name)
            raise TickFailure(
                f"Pipeline {pipeline.name}: {error_line(error)}. The tick ended early and nothing is lost: the next tick looks"
                " again. If this stays, the log of the code server has the details."
            ) from None

    return tick


def evaluate(names: Names, instance: DagsterInstance, cursor: str | None, now: float) -> SensorResult:
    """One tick, at ``now`` (seconds since the epoch). The cursor holds each asset's reported positions, and the start of each
    problem.

    Raises TickFailure for lasting problems, but only in some ticks. The other ticks request runs (see ``runs``).
    """
    pipeline = names.pipeline
    old_state: dict[str, Any] = json.loads(cursor) if cursor else {}
    facts = gather(pipeline)
    texts = dict(facts.problems)
    active = runs.ActiveRuns(instance)
    changes: list[AddDynamicPartitionsRequest | DeleteDynamicPartitionsRequest] = []
    keys_by_definition: dict[str, list[str]] = {}
    for grid in grids(names, facts):
        keys_by_definition[grid.definition], grid_changes = definition_keys(instance, active, grid)
        changes += grid_changes
    events: list[News | AssetCheckEvaluation] = []
    new_state = dict(old_state)
    for asset in asset_positions(names, facts):
        entry = old_state.get(asset.place, {})
        if not asset.differs(entry):
            continue
        if asset.job is not None and active.holds(asset.job, [asset.key]):
            # Its run reports it.
            continue
        try:
            asset_news, new_state[asset.place] = news(facts, instance, asset, entry, now)
        except Exception as error:
            # Whatever it is, the other assets are reported.
            texts.setdefault(asset.place, error_line(error))
            continue
        events += asset_news
    requests: list[RunRequest] = []
    notes: list[str] = []
    for step, history in _in_turn(pipeline, instance, due_steps(names, facts)):
        keys = keys_of_run(step, keys_by_definition[step.partitions])
        if not keys:
            # Dagster does not know them yet: a later tick adds them.
            continue
        if step.awaits:
            if active.count(pipeline.name) + len(requests) <= runs.MOST_RUNS and _starts_now(
                names, instance, active, step, history, requests
            ):
                requests.append(_request(pipeline, step, keys))
        elif under_way := active.holds(step.job, step.assets):
            notes.append(f"{step.job}: {under_way}")
        elif reason := _hold_reason(pipeline, instance, step):
            texts[step.job] = reason
        elif reason := runs.backoff_reason(history):
            texts[step.job] = reason
            remainder = step.rest(runs.failed_ops(instance, history[0].dagster_run.run_id))
            tag = REST + step.job
            rest_history = runs.request_history(instance, pipeline.name, step.job, tag)
            is_free = active.wait_reason(pipeline.name, step, requests) is None
            if remainder is not None and is_free and not runs.backoff_reason(rest_history):
                requests.append(_request(pipeline, remainder, keys, tag))
        elif reason := active.wait_reason(pipeline.name, step, requests):
            notes.append(f"{step.job}: waits, for {reason}")
        else:
            requests.append(_request(pipeline, step, keys))
    idle = not (requests or events or changes or notes or texts)
    if idle and not old_state.get(FIRST_CHECKS) and not active.count(pipeline.name):
        requests, new_state[FIRST_CHECKS] = _first_checks(names, facts, instance)
    current_troubles = troubles(texts, old_state, now)
    moved = {event.asset_key for event in events if isinstance(event, AssetMaterialization)}
    results, new_state[REACHABILITY] = reachability(names, facts, current_troubles, old_state, moved)
    failures, new_state[FAILING] = far_ends(names, facts, current_troubles, old_state)
    events += [*results, *failures]
    new_state[PROBLEMS] = current_troubles.since
    if current_troubles.red:
        raise TickFailure("\n".join([f"Pipeline {pipeline.name} has problems that last:", *current_troubles.lines]))
    return SensorResult(
        run_requests=requests,
        skip_reason=None if requests else "; ".join([*current_troubles.lines, *notes]) or "Everything is up to date.",
        cursor=json.dumps(new_state, sort_keys=True),
        dynamic_partitions_requests=changes,
        asset_events=events,
    )


def _hold_reason(pipeline: Pipeline, instance: DagsterInstance, step: DueStep) -> str | None:
    """Why a step's checks hold it back. A record of blocks that can't be read holds its own step back, and no other."""
    try:
        return runs.hold_reason(pipeline, instance, step)
    except ZyncError as error:
        return error_line(error)


def definition_keys(
    instance: DagsterInstance, active: runs.ActiveRuns, grid: Grid
) -> tuple[list[str], list[AddDynamicPartitionsRequest | DeleteDynamicPartitionsRequest]]:
    """The keys of a definition as they are after this tick, in Dagster's order, and what has to be changed for that.

    Keys that somebody added and that name no range are deleted, unless a run may be on its way to refuse them.
    """
    keys = list(instance.get_dynamic_partitions(grid.definition))
    changes: list[AddDynamicPartitionsRequest | DeleteDynamicPartitionsRequest] = []
    old_keys, grid_keys = set(keys), list(keys_of(grid.spans))
    other_keys = sorted(old_keys.difference(grid_keys))
    strange_keys = [
        key for key in other_keys if (part := range_of(key)) is None or part.partition not in grid.partitions
    ]
    if strange_keys and not active.holds(grid.job, grid.assets):
        changes.append(DeleteDynamicPartitionsRequest(grid.definition, strange_keys))
        keys = [key for key in keys if key not in strange_keys]
    if new_keys := [key for key in grid_keys if key not in old_keys][:MOST_KEYS]:
        changes.append(AddDynamicPartitionsRequest(grid.definition, new_keys))
    return keys + new_keys, changes


def _in_turn(
    pipeline: Pipeline, instance: DagsterInstance, steps: Iterable[DueStep]
) -> list[tuple[DueStep, Sequence[RunRecord]]]:
    """The steps with their last runs. The step with the oldest last run comes first. Steps that await ingest come last."""
    pairs = [(step, runs.request_history(instance, pipeline.name, step.job)) for step in steps]

    def turn(pair: tuple[DueStep, Sequence[RunRecord]]) -> tuple[bool, float]:
        step, history = pair
        return bool(step.awaits), history[0].create_timestamp.timestamp() if history else 0.0

    return sorted(pairs, key=turn)


def _starts_now(
    names: Names,
    instance: DagsterInstance,
    active: runs.ActiveRuns,
    step: DueStep,
    history: Sequence[RunRecord],
    requests: Sequence[RunRequest],
) -> bool:
    """Whether a step that awaits ingest may start together with ingest: this tick asks for all of the ingest, and nothing
    holds the step back. Otherwise a tick after the ingest asks for the step, and gives the reason of a hold."""
    jobs = {request.job_name for request in requests}
    if any(names.ingest_job(topic) not in jobs for topic in step.awaits):
        return False
    if active.holds(step.job, step.assets) or runs.backoff_reason(history):
        return False
    return _hold_reason(names.pipeline, instance, step) is None


def _first_checks(names: Names, facts: Facts, instance: DagsterInstance) -> tuple[list[RunRequest], bool]:
    """A run of all checks, once, where ``zync`` did the work before this instance existed: no run has checked it, so the
    checks' pages would be empty. None for a lot of records, since the checks read all of them. And whether that is settled.
    """
    states = [plan.state for plan in facts.ingest.values() if plan.state is not None]
    if not states:
        return [], False
    offsets = sum(sum(state.next.values()) - sum(state.first.values()) for state in states)
    keys = [
        AssetCheckKey(names.pool_key(plan.input.pool, topic), check)
        for topic, plan in facts.ingest.items()
        if plan.state is not None
        for check in BLOCKING
    ]
    is_unchecked = any(instance.get_latest_asset_check_evaluation_record(key) is None for key in keys)
    if not is_unchecked or offsets > FIRST_OFFSETS:
        return [], True
    job = names.checks_job
    return [RunRequest(job_name=job, tags={PIPELINE_TAG: names.pipeline.name, STEP_TAG: job})], True


def _request(pipeline: Pipeline, step: DueStep, keys: Sequence[str], tag: str | None = None) -> RunRequest:
    tags = {PIPELINE_TAG: pipeline.name, STEP_TAG: tag or step.job, **step.tags}
    if len(keys) == 1:
        tags[PARTITION_NAME_TAG] = keys[0]
    else:
        tags |= {ASSET_PARTITION_RANGE_START_TAG: keys[0], ASSET_PARTITION_RANGE_END_TAG: keys[-1]}
    return RunRequest(job_name=step.job, tags=tags, asset_selection=step.selection)
