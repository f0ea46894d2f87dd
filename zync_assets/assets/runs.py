"""Runs in Dagster's instance: active runs, failed runs, and failed checks.

The sensor reads runs only if a step is due, so that an idle tick costs nothing.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from dagster import AssetCheckKey, AssetKey, DagsterInstance, DagsterRun, DagsterRunStatus, RunRecord, RunsFilter

from zync_assets.assets import names
from zync_assets.assets.checks import KEPT
from zync_assets.assets.due import Step
from zync_assets.audit.guard import blocks
from zync_assets.audit.verdict import lifted
from zync_assets.checks.raw_checks import BLOCKING
from zync_assets.pipeline import Pipeline
from zync_assets.private import private

UNDER_WAY = [
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]
_SERVER_TAG: str = private("dagster", "dagster._core.storage.tags", "GRPC_INFO_TAG")

FIRST_WAIT = 10.0
LONGEST_WAIT = 300.0
"""Seconds to wait after a failed run: the first, doubled with each further failure, at the most the second."""


class Active:
    """The runs under way, asked for once, when first needed."""

    def __init__(self, instance: DagsterInstance) -> None:
        self._instance = instance

    @cached_property
    def _runs(self) -> Sequence[DagsterRun]:
        found = self._instance.get_runs(RunsFilter(statuses=UNDER_WAY))
        return [run for run in found if not _abandoned(run)]

    def count(self, pipeline: str) -> int:
        """How many runs of a pipeline there are."""
        return sum(run.tags.get(names.PIPELINE_TAG) == pipeline for run in self._runs)

    def holds(self, job: str, assets: Iterable[AssetKey]) -> str | None:
        """Why a job can't start now: a run of it, or one that somebody started on its assets. None where it can."""
        wanted = set(assets)
        for run in self._runs:
            # Jobs of earlier versions did not end in the pipeline's name.
            earlier = f"{run.job_name}_of_{names.identifier(run.tags.get(names.PIPELINE_TAG, ''))}"
            if job in (run.job_name, earlier) or wanted & set(run.asset_selection or ()):
                return f"run {run.run_id[:8]} is {run.status.value.lower()}"
        return None


def _abandoned(run: DagsterRun) -> bool:
    """Whether the code server of a run on this machine has died, as after a power cut. Such a run stays "started" for ever.

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
    return False


def asked_for(instance: DagsterInstance, pipeline: str, job: str, step: str | None = None) -> Sequence[RunRecord]:
    """The last runs of a job that the sensor asked for, latest first; enough to know how long to wait. ``step``: the tag
    of the runs, the job's name by default."""
    return instance.get_run_records(
        RunsFilter(job_name=job, tags={names.PIPELINE_TAG: pipeline, names.STEP_TAG: step or job}), limit=8
    )


def failed_ops(instance: DagsterInstance, run_id: str) -> set[str]:
    """The ops of a run that failed."""
    found = instance.get_run_step_stats(run_id)
    return {stats.step_key for stats in found if stats.status is not None and stats.status.value == "FAILURE"}


def backing_off(records: Sequence[RunRecord]) -> str | None:
    """Why a job that failed waits, by its last runs; None where it does not."""
    failures = 0
    for record in records:
        if record.dagster_run.status not in (DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED):
            break
        failures += 1
    if not failures:
        return None
    ended = records[0].end_time or records[0].update_timestamp.timestamp()
    left = ended + min(LONGEST_WAIT, FIRST_WAIT * 2 ** (failures - 1)) - time.time()
    if left <= 0:
        return None
    return f"run {records[0].dagster_run.run_id[:8]} failed ({failures} in a row); asked for again in {left:.0f} s"


def held_back(pipeline: Pipeline, instance: DagsterInstance, step: Step) -> str | None:
    """Why ETL and publishing of a staging pool wait for a failed check; None where none stands.

    The lake says which checks block (``lake.checked``). A failed evaluation that another program reported to Dagster is
    in Dagster's event log alone, and holds until a later evaluation of the check passes. A check that is planned, or whose
    run died, has no result and changes nothing.
    """
    if step.pool is None:
        return None
    for block in blocks(pipeline, step.pool, [item.topic for item in pipeline.outputs_of(step.pool)]):
        return f"{block} {lifted(pipeline)}"
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
    done = {status.SUCCEEDED, status.FAILED}
    records = instance.event_log_storage.get_asset_check_execution_history(key, limit=1, status=done)
    evaluation = records[0].evaluation if records else None
    return evaluation is not None and not evaluation.passed and KEPT not in evaluation.metadata
