"""The runs of Dagster's instance, and the problems that a sensor meets.

The sensor reads active runs, failed runs and failed checks only if a step is due, so that an idle tick costs nothing.

A problem has the time when it began and the time when it came last. A tick that fails can ask for no run, and so the ticks
take turns. While a problem lasts, the ticks in the first seconds of each minute fail with the problems. The other ticks keep
the other topics going, and have the problems among their reasons. Dagster keeps each failed tick with a stack trace. A failed
tick keeps the old cursor, so that the next tick reports and asks for what the failed tick left undone.
"""

from __future__ import annotations

import json
import math
import re
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import psutil
from dagster import (
    AssetCheckEvaluation,
    AssetCheckKey,
    AssetCheckSeverity,
    AssetKey,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    DefaultRunLauncher,
    RunRecord,
    RunRequest,
    RunsFilter,
)

from zync_assets.assets import names
from zync_assets.assets.checks import LAKE_MARK
from zync_assets.assets.facts import BROKER, DueStep, Facts, RawEnds, table_evaluation, topic_evaluation
from zync_assets.assets.names import Names
from zync_assets.checks.raw_checks import BLOCKING
from zync_assets.checks.remote_checks import REACHABLE, sink_subject
from zync_assets.lake import raw
from zync_assets.lake.check_results import remedy
from zync_assets.lake.snapshot import Snapshot
from zync_assets.pipeline import Pipeline, pool_path, topic_path
from zync_assets.private import private

MOST_RUNS = 2
"""Runs of one pipeline that the sensor has under way at once: each is a process with a Spark session of its own. At most one
of them is the long load of a target table. The sensor allows a run that awaits ingest beside these runs."""
SINK_SECONDS = 300.0
"""After this time, a run that the sensor asked for begins no further batch of a target table. Other tables have their turn."""
LASTS_SECONDS = 20.0
"""Seconds after which a problem counts as lasting. A broker restarts in less time."""
PERIOD_SECONDS = 60.0
RED_SECONDS = 10.0
"""During a lasting problem, the ticks in the first seconds of each period are red."""
PROBLEMS = "problems"
REACHABILITY = "reachable"
FAILING = "failing"
"""Keys of the cursor. An asset's path has a slash."""


@dataclass(frozen=True)
class Troubles:
    """The problems of a tick. ``since``: place → when it was first met, in seconds since the epoch."""

    texts: Mapping[str, str]
    since: Mapping[str, float]
    now: float

    @property
    def lasting_places(self) -> list[str]:
        return [place for place in self.texts if self.now - self.since[place] >= LASTS_SECONDS]

    @property
    def red(self) -> bool:
        """Whether this tick shows the problems."""
        if not self.lasting_places:
            return False
        age = self.now - min(self.since[place] for place in self.lasting_places)
        return (age - LASTS_SECONDS) % PERIOD_SECONDS < RED_SECONDS

    @property
    def lines(self) -> list[str]:
        return [f"{place}: {text}" for place, text in self.texts.items()]


def troubles(texts: Mapping[str, str], cursor: Mapping[str, Any], now: float) -> Troubles:
    """The problems of this tick, as old as the cursor knows them."""
    starts = cursor.get(PROBLEMS, {})
    return Troubles(texts, {place: float(starts.get(place, now)) for place in texts}, now)


def reachability(
    names: Names, facts: Facts, current: Troubles, cursor: Mapping[str, Any], moved: Collection[AssetKey]
) -> tuple[list[AssetCheckEvaluation], dict[str, bool]]:
    """The results of check ``reachable`` that differ from the last ones, and each input topic's result for the cursor.

    A topic is out of reach once its problem lasts. ``moved``: the assets that this tick materializes. Dagster's graph does not
    count a result before the last materialization as passed.
    """
    results: dict[str, bool] = dict(cursor.get(REACHABILITY, {}))
    events: list[AssetCheckEvaluation] = []
    for item in names.pipeline.inputs:
        why = facts.unreachable.get(item.topic)
        places = {BROKER, topic_path(item.topic), pool_path(item.pool, item.topic)}
        if why is not None and not places & set(current.lasting_places):
            continue
        key = names.topic_key(item.topic)
        if results.get(item.topic) is not (why is None) or key in moved:
            results[item.topic] = why is None
            events.append(_reachable(key, why))
    return events, results


def _reachable(asset: AssetKey, why: str | None) -> AssetCheckEvaluation:
    return AssetCheckEvaluation(
        asset_key=asset,
        check_name=REACHABLE,
        passed=why is None,
        severity=AssetCheckSeverity.ERROR,
        description=why or "The broker answers for every partition.",
    )


def far_ends(
    names: Names, facts: Facts, current: Troubles, cursor: Mapping[str, Any]
) -> tuple[list[AssetCheckEvaluation], list[str]]:
    """Results of the checks of output topics and target tables, and the assets whose problem is reported, for the cursor.

    Runs leave out a topic or a table with a problem, and so no run reports the problem. A problem that lasts fails the check.
    After the problem, the check looks again.
    """
    pipeline, reported = names.pipeline, list[str](cursor.get(FAILING, []))
    if BROKER in facts.problems:
        return [], reported
    looks = {topic_path(item.topic): partial(topic_evaluation, names, item.topic) for item in pipeline.outputs}
    for sink in pipeline.sinks:
        looks |= {sink_subject(sink, table): partial(table_evaluation, names, sink, table) for table in sink.tables}
    events: list[AssetCheckEvaluation] = []
    failing: list[str] = []
    for place, look in looks.items():
        why = facts.problems.get(place)
        if why is None:
            events += [look()] if place in reported else []
        elif place in reported or place in current.lasting_places:
            failing.append(place)
            events += [look(why)] if place not in reported else []
    return events, failing


UNDER_WAY = [
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]
_SERVER_TAG: str = private("dagster", "dagster._core.storage.tags", "GRPC_INFO_TAG")

LAUNCH_SECONDS = 180.0
"""The longest time that the launch of a run takes; Dagster's own default for the start of a run."""
AWAIT_SECONDS = 30.0
"""The longest wait of a run for the ingest of its inputs. Ingest may lie in Dagster's queue behind this run."""
AWAIT_PAUSE = 0.2
FIRST_WAIT = 10.0
LONGEST_WAIT = 300.0
"""Seconds to wait after a failed run. The wait is FIRST_WAIT at first, doubles with each further failure, and stops at
LONGEST_WAIT."""


class ActiveRuns:
    """The runs under way, asked for once, when first needed."""

    def __init__(self, instance: DagsterInstance) -> None:
        self._instance = instance

    @cached_property
    def _runs(self) -> Sequence[DagsterRun]:
        records = self._instance.get_run_records(RunsFilter(statuses=UNDER_WAY))
        return [
            record.dagster_run
            for record in records
            if not _is_dead(self._instance, record.dagster_run) and not _never_started(self._instance, record)
        ]

    def count(self, pipeline: str) -> int:
        """How many runs of a pipeline there are."""
        return len(self._tags(pipeline))

    def wait_reason(self, pipeline: str, step: DueStep, requests: Iterable[RunRequest]) -> str | None:
        """Why a step waits for the end of other runs: those under way, and the ``requests``. None if it may start now."""
        run_tags = [*self._tags(pipeline), *(request.tags for request in requests)]
        if len(run_tags) >= MOST_RUNS:
            return f"{MOST_RUNS} runs are under way"
        if step.is_long_load and any(names.LONG_LOAD_TAG in tags for tags in run_tags):
            return "the long load of another target table is under way"
        return None

    def _tags(self, pipeline: str) -> list[Mapping[str, str]]:
        """The tags of each run of a pipeline."""
        return [run.tags for run in self._runs if run.tags.get(names.PIPELINE_TAG) == pipeline]

    def holds(self, job: str, assets: Iterable[AssetKey]) -> str | None:
        """Why a job can't start now: a run of it, or one that somebody started on its assets. None where it can."""
        own_assets = set(assets)
        for run in self._runs:
            # Jobs of earlier versions did not end in the pipeline's name.
            earlier = f"{run.job_name}_of_{names.identifier(run.tags.get(names.PIPELINE_TAG, ''))}"
            if job in (run.job_name, earlier) or own_assets & set(run.asset_selection or ()):
                return f"run {run.run_id[:8]} is {run.status.value.lower()}"
        return None


def turn_seconds(tags: Mapping[str, str]) -> float:
    """How long a run may write a target table. ``tags``: of the run. A run that a person started has no limit."""
    return SINK_SECONDS if names.STEP_TAG in tags else math.inf


_STARTED = re.compile(r"Started process for run \(pid: (\d+)\)")
"""The event of a process that begins a run."""


def _is_dead(instance: DagsterInstance, run: DagsterRun) -> bool:
    """Whether the code server or the process of a run on this machine has died, as after a power cut. Such a run stays "started"
    for ever.

    The function trusts the status of a run on another machine or by another launcher.
    """
    place = json.loads(run.tags.get(_SERVER_TAG) or "{}")
    path = place.get("socket")
    if run.status == DagsterRunStatus.QUEUED or path is None:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return True
        except OSError:
            return False
    # The proxy of `dagster dev` answers when another code server has taken the place of the run's own server.
    return run.status in (DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING) and _process_is_gone(instance, run)


def _process_is_gone(instance: DagsterInstance, run: DagsterRun) -> bool:
    events = instance.get_records_for_run(run.run_id, of_type=DagsterEventType.ENGINE_EVENT, limit=20).records
    begins = (_STARTED.search(event.event_log_entry.message) for event in events)
    pid = next((int(begin[1]) for begin in begins if begin is not None), None)
    return pid is not None and not psutil.pid_exists(pid)


def _never_started(instance: DagsterInstance, record: RunRecord) -> bool:
    """Whether the daemon or the webserver died while it launched a run. Nobody launches such a run again.

    A launched run has the address of its server, if it is a run of Dagster's own launcher. Runs of another launcher may take
    long to start.
    """
    run = record.dagster_run
    never_launched = run.status == DagsterRunStatus.NOT_STARTED or (
        run.status == DagsterRunStatus.STARTING
        and _SERVER_TAG not in run.tags
        and isinstance(instance.run_launcher, DefaultRunLauncher)
    )
    return never_launched and time.time() - record.update_timestamp.timestamp() > LAUNCH_SECONDS


def request_history(instance: DagsterInstance, pipeline: str, job: str, step: str | None = None) -> Sequence[RunRecord]:
    """The last runs of a job that the sensor asked for, latest first; enough to know how long to wait. ``step``: the tag
    of the runs, the job's name by default."""
    return instance.get_run_records(
        RunsFilter(job_name=job, tags={names.PIPELINE_TAG: pipeline, names.STEP_TAG: step or job}), limit=8
    )


def failed_ops(instance: DagsterInstance, run_id: str) -> set[str]:
    """The ops of a run that failed."""
    statistics = instance.get_run_step_stats(run_id)
    return {stats.step_key for stats in statistics if stats.status is not None and stats.status.value == "FAILURE"}


def backoff_reason(records: Sequence[RunRecord]) -> str | None:
    """Why a job that failed waits, by its last runs; None where it does not."""
    failures = 0
    for record in records:
        if record.dagster_run.status not in (DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED):
            break
        failures += 1
    if not failures:
        return None
    end = records[0].end_time or records[0].update_timestamp.timestamp()
    wait = end + min(LONGEST_WAIT, FIRST_WAIT * 2 ** (failures - 1)) - time.time()
    if wait <= 0:
        return None
    return f"run {records[0].dagster_run.run_id[:8]} failed ({failures} in a row); asked for again in {wait:.0f} s"


def raw_ends(text: str) -> RawEnds:
    """The value of AWAITS_TAG."""
    return {topic: {int(partition): end for partition, end in ends.items()} for topic, ends in json.loads(text).items()}


def await_ingest(names: Names, instance: DagsterInstance, ends: RawEnds) -> None:
    """Return when the raw tables have reached the ends, when no run ingests them, or after AWAIT_SECONDS.

    A later tick of the sensor requests a run for records that the tables lack then.
    """
    pipeline, deadline = names.pipeline, time.monotonic() + AWAIT_SECONDS
    while True:
        # In this order: a run that ends after the look at its table is still under way here.
        active = ActiveRuns(instance)
        late = [
            topic
            for topic in ends
            if active.holds(names.ingest_job(topic), [names.pool_key(pipeline.input(topic).pool, topic)])
            and not _has_reached(pipeline, topic, ends[topic])
        ]
        if not late or time.monotonic() > deadline:
            return
        time.sleep(AWAIT_PAUSE)


def _has_reached(pipeline: Pipeline, topic: str, ends: Mapping[int, int]) -> bool:
    state = raw.open_raw(pipeline.lake, pipeline.input(topic).pool, topic)
    return state is not None and all(state.next.get(partition, 0) >= end for partition, end in ends.items())


def hold_reason(pipeline: Pipeline, instance: DagsterInstance, step: DueStep) -> str | None:
    """Why a step waits for a failed check of its sources; None where none stands. Ingest waits for no check.

    The lake says which checks block (``lake.check_results``). A failed evaluation that another program reported to Dagster is
    in Dagster's event log alone, and holds until a later evaluation of the check passes. A check that is planned, or whose
    run died, has no result and changes nothing.
    """
    for block in step.blocks(Snapshot(pipeline)) if step.blocks is not None else ():
        return f"{block} {remedy(pipeline)}"
    for asset in step.upstream:
        for name in BLOCKING:
            if _reported_failure(instance, AssetCheckKey(asset, name)):
                return f"check {name} of {asset.to_user_string()} failed; repair the lake and run the check again"
    return None


def _reported_failure(instance: DagsterInstance, key: AssetCheckKey) -> bool:
    """Whether the last result of a check was reported by another program, and is a failure."""
    status: Any = private(
        "dagster", "dagster._core.storage.asset_check_execution_record", "AssetCheckExecutionRecordStatus"
    )
    statuses = {status.SUCCEEDED, status.FAILED}
    records = instance.event_log_storage.get_asset_check_execution_history(key, limit=1, status=statuses)
    evaluation = records[0].evaluation if records else None
    return evaluation is not None and not evaluation.passed and LAKE_MARK not in evaluation.metadata
