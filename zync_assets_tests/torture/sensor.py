"""Dagster's daemon with the pipeline's sensor: runs are asked for, started and killed, and the daemon is killed too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
from dagster import DagsterEventType, DagsterInstance, DagsterRunStatus, RunsFilter
from dagster._core.scheduler.instigation import TickStatus

from zync_assets_tests.torture.children import EXPECTED, kill_family
from zync_assets_tests.torture.plan import DaemonPlan
from zync_assets_tests.torture.report import Tally
from zync_assets_tests.torture.world import World

ROOT = Path(__file__).resolve().parents[2]
POLL = 0.2
PATIENCE = 60.0
"""Seconds that a daemon has to start its code server."""

EXPECTED_IN_DAGSTER = {
    **EXPECTED,
    "a check failed while a service was down": r"[Cc]heck .* failed|could not be looked at|[Bb]lock",
    "run of a killed daemon": r"[Rr]un timed out|code server|[Cc]ould not reach|UNAVAILABLE|grpc",
}
"""The messages that a run or a tick may end with, besides those of the commands."""


class Daemon(threading.Thread):
    """Runs one daemon after the other until the world stops. Dagster's instance lies in the world's folder."""

    def __init__(self, world: World, tally: Tally, plans: Iterator[DaemonPlan]) -> None:
        super().__init__(name="daemon", daemon=True)
        self.world, self.tally, self.plans = world, tally, plans
        self.home = world.folder / "dagster"
        self.home.mkdir(exist_ok=True)
        (self.home / "dagster.yaml").write_text((ROOT / "demo" / "dagster.yaml").read_text())
        self.done = 0
        self.began = time.time()

    def run(self) -> None:
        try:
            while not self.world.stopping.is_set():
                self._one(next(self.plans))
                self.done += 1
        except Exception as error:
            self.tally.find(f"the harness itself: daemon: {error!r}")
            raise

    def judge(self) -> None:
        """After the end: each red tick and each failed run must name a trouble that was made."""
        with DagsterInstance.from_config(str(self.home)) as instance:
            self._judge_ticks(instance)
            self._judge_runs(instance)

    def _one(self, plan: DaemonPlan) -> None:
        armed = {"ZYNC_CRASH": f"{plan.point}@1"} if plan.point else {}
        env = {"DAGSTER_HOME": str(self.home), "ZYNC_PIPELINE": str(self.world.pipeline), "ZYNC_SENSOR": "running"}
        log = self.world.folder / "daemon.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "dagster._daemon", "run", "-w", str(ROOT / "workspace.yaml")],
                cwd=ROOT,
                env={**os.environ, **env, **armed},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            self._watch(process, plan, log)
        finally:
            kill_family(process.pid)
            process.wait()

    def _watch(self, process: subprocess.Popen[bytes], plan: DaemonPlan, log: Path) -> None:
        """Kill runs at the plan's moments, until the daemon's time is over or its code server has died at a point."""
        started, server = time.monotonic(), None
        kills = [started + moment for moment in plan.run_kills]
        while not self.world.stopping.is_set() and time.monotonic() - started < plan.lasts:
            time.sleep(POLL)
            if process.poll() is not None:
                self.tally.find(f"the daemon ended by itself: {log.read_text(errors='replace')[-2000:]}")
                return
            found = _servers(process.pid)
            if server is None and found:
                server = found[0]
            elif server is not None and server not in found:
                where = re.search(r"killed at (\S+)", log.read_text(errors="replace"))
                self.tally.count("kills", f"dagster, {where[1]}" if where else "dagster, at some moment")
                return
            elif server is None and time.monotonic() - started > PATIENCE:
                return
            if kills and time.monotonic() > kills[0]:
                kills.pop(0)
                if server is not None and (runs := _runs(server)):
                    kill_family(runs[-1].pid)
                    self.tally.count("kills", "dagster run, at some moment")
        self.tally.count("kills", "dagster daemon, at some moment")

    def _judge_ticks(self, instance: DagsterInstance) -> None:
        for state in instance.all_instigator_state():
            for tick in instance.get_ticks(state.instigator_origin_id, state.selector_id, after=self.began):
                self.tally.count("ticks", tick.status.value.lower())
                if tick.status == TickStatus.FAILURE and tick.error is not None:
                    self._explain(f"tick {tick.tick_id}", tick.error.to_string())

    def _judge_runs(self, instance: DagsterInstance) -> None:
        for run in instance.get_runs(RunsFilter()):
            self.tally.count("ends", f"dagster {run.job_name}, {run.status.value.lower()}")
            if run.status != DagsterRunStatus.FAILURE:
                continue
            records = instance.get_records_for_run(run.run_id, of_type=DagsterEventType.STEP_FAILURE).records
            texts = [record.event_log_entry.message for record in records]
            errors = [
                event.step_failure_data.error.to_string()
                for record in records
                if (event := record.event_log_entry.dagster_event) is not None and event.step_failure_data.error
            ]
            failure = "\n".join([*texts, *errors])
            if failure:
                self._explain(f"run {run.run_id[:8]} of {run.job_name}", failure)

    def _explain(self, name: str, text: str) -> None:
        for label, pattern in EXPECTED_IN_DAGSTER.items():
            if re.search(pattern, text):
                self.tally.count("errors", label)
                return
        self.tally.find(f"dagster: {name} failed: {text[-1500:]}")


def _servers(daemon: int) -> list[psutil.Process]:
    """The code servers that a daemon started."""
    with suppress(psutil.NoSuchProcess):
        return [child for child in psutil.Process(daemon).children() if _has(child, "grpc")]
    return []


def _runs(server: psutil.Process) -> list[psutil.Process]:
    """The processes of the runs of a code server, the newest last."""
    with suppress(psutil.NoSuchProcess):
        return [child for child in server.children() if _has(child, "spawn_main")]
    return []


def _has(process: psutil.Process, word: str) -> bool:
    try:
        return any(word in part for part in process.cmdline())
    except psutil.Error:
        return False
