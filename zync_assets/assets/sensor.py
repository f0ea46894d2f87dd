"""One sensor a pipeline: compares facts every few seconds, asks for the runs that are due, reports what moved.

It asks for a step only while no run of it is queued or under way, and waits longer after each failure. It sets no run
key: Dagster would never again start a run with a key that it has seen, a failed one included.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from dagster import (
    AddDynamicPartitionsRequest,
    AssetMaterialization,
    AssetObservation,
    DagsterInstance,
    DefaultSensorStatus,
    RunRecord,
    RunRequest,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    sensor,
)
from dagster._core.storage.tags import (
    ASSET_PARTITION_RANGE_END_TAG,
    ASSET_PARTITION_RANGE_START_TAG,
    PARTITION_NAME_TAG,
)

from zync_assets.assets import names, partitions, runs
from zync_assets.assets.due import Step, chosen, due, keys_there
from zync_assets.assets.facts import Facts, gather
from zync_assets.assets.outside import standings, unreported
from zync_assets.errors import BrokerUnavailable, SetupError, TrustError
from zync_assets.pipeline import Pipeline

INTERVAL_SECONDS = 4
"""A tick every 5 s: that is how often Dagster's daemon looks, and at 5 it finds the interval not quite over every second
time."""
MOST_RUNS = 2
"""Runs of one pipeline that the sensor has under way at once: each is a process with a Spark session of its own."""


def build_sensor(pipeline: Pipeline, jobs: Sequence[Any], *, running: bool) -> SensorDefinition:
    """The sensor of a pipeline. ``running``: whether it is on from the start, or waits to be switched on."""

    @sensor(
        name=names.sensor_name(pipeline.name),
        description=(
            f"Keeps pipeline {pipeline.name} going: ingest, ETL and publishing wherever something is new. Reports what"
            " is new in the topics, and what `zync` did outside Dagster."
        ),
        jobs=jobs,
        minimum_interval_seconds=INTERVAL_SECONDS,
        default_status=DefaultSensorStatus.RUNNING if running else DefaultSensorStatus.STOPPED,
    )
    def tick(context: SensorEvaluationContext) -> SensorResult:
        return evaluate(pipeline, context.instance, context.cursor)

    return tick


def evaluate(pipeline: Pipeline, instance: DagsterInstance, cursor: str | None) -> SensorResult:
    """One tick. The cursor holds each asset's position and lag when it was last looked at."""
    try:
        facts = gather(pipeline)
    except (BrokerUnavailable, SetupError, TrustError) as error:
        return SensorResult(skip_reason=f"No broker, so nothing is known of the topics: {error}", cursor=cursor)
    added: list[AddDynamicPartitionsRequest] = []
    known: dict[str, list[str]] = {}
    for name, wanted in keys_there(pipeline, facts).items():
        known[name] = list(instance.get_dynamic_partitions(name))
        new = partitions.lacking(known[name], wanted)
        if new:
            added.append(AddDynamicPartitionsRequest(name, new))
            known[name] += new
    active = runs.Active(instance)
    events, position = _moved(pipeline, facts, instance, active, json.loads(cursor) if cursor else {})
    requests: list[RunRequest] = []
    notes = [f"{place}: {problem}" for place, problem in facts.problems.items()]
    for step, last in _in_turn(pipeline, instance, due(pipeline, facts)):
        held = active.holds(step.job, step.assets) or runs.backing_off(last)
        held = held or runs.held_back(instance, step.upstream)
        if not held and active.count(pipeline.name) + len(requests) >= MOST_RUNS:
            held = f"waits, for {MOST_RUNS} runs are under way"
        if held:
            notes.append(f"{step.job}: {held}")
        else:
            requests.append(_request(pipeline, step, chosen(step, known[step.partitions])))
    return SensorResult(
        run_requests=requests,
        skip_reason=None if requests else _said(notes),
        cursor=json.dumps(position, sort_keys=True),
        dynamic_partitions_requests=added,
        asset_events=events,
    )


def _in_turn(
    pipeline: Pipeline, instance: DagsterInstance, steps: Iterable[Step]
) -> list[tuple[Step, Sequence[RunRecord]]]:
    """The steps with their last runs, the one that has waited longest since its last run first."""
    found = [(step, runs.asked_for(instance, pipeline.name, step.job)) for step in steps]
    return sorted(found, key=lambda item: item[1][0].create_timestamp.timestamp() if item[1] else 0.0)


def _request(pipeline: Pipeline, step: Step, keys: Sequence[str]) -> RunRequest:
    tags = {names.PIPELINE_TAG: pipeline.name, names.STEP_TAG: step.job}
    if len(keys) == 1:
        tags[PARTITION_NAME_TAG] = keys[0]
    else:
        tags |= {ASSET_PARTITION_RANGE_START_TAG: keys[0], ASSET_PARTITION_RANGE_END_TAG: keys[-1]}
    return RunRequest(job_name=step.job, tags=tags)


def _moved(
    pipeline: Pipeline, facts: Facts, instance: DagsterInstance, active: runs.Active, before: dict[str, Any]
) -> tuple[list[AssetMaterialization | AssetObservation], dict[str, Any]]:
    """The events of this tick, and the new cursor. While a job runs its assets wait: it reports them itself."""
    events: list[AssetMaterialization | AssetObservation] = []
    after: dict[str, Any] = dict(before)
    for standing in standings(pipeline, facts):
        place = "/".join(standing.key.path)
        old = before.get(place, {})
        now = {"next": {str(p): end for p, end in sorted(standing.next.items())}, "lag": standing.lag}
        if now == old:
            continue
        if standing.job is not None and active.holds(standing.job, [standing.key]):
            continue
        found = unreported(pipeline, facts, instance, standing, {int(p): end for p, end in old.get("next", {}).items()})
        events += found
        if not found and standing.lag is not None and old.get("lag") != standing.lag:
            events.append(AssetObservation(standing.key, metadata={"lag": standing.lag}))
        after[place] = now
    return events, after


def _said(notes: Iterable[str]) -> str:
    return "; ".join(notes) or "Everything is up to date."
