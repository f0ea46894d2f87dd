"""``zync`` processes, one after the other in each instance, and their ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from zync_assets_tests.torture.plan import POOLS, ChildPlan
from zync_assets_tests.torture.report import Tally
from zync_assets_tests.torture.world import World

PATIENCE = 40.0
"""Seconds after which a process that was to die at a point, and does not get there, is killed where it is."""
POLL = 0.02

_LAUNCH = """
import sys
from pathlib import Path
import zync_assets.cli.run as run
from zync_assets.etl.views import state_fold
from zync_assets.pipeline import Pipeline
state_fold.RUNS = 3
made = run.spark_session
marker = Path(sys.argv.pop(1))
first = sys.argv.pop(1)
pools = Pipeline.staging_pools.fget
Pipeline.staging_pools = property(lambda pipeline: sorted(pools(pipeline), key=lambda pool: pool != first))
def marked(*settings, **how):
    session = made(*settings, **how)
    marker.touch()
    return session
run.spark_session = marked
from zync_assets.cli.main import main
main()
"""
"""The command as it is, but that a file says when it has its Spark session: from then on a kill hits work. The state of views
is folded after a few batches, and not after many. ETL begins with one of the staging pools."""

EXPECTED: dict[str, str] = {
    "broker unavailable": r"no Kafka broker answered|could not be reached",
    "registry unavailable": r"schema registry at \S+ could not answer|no answer from the schema registry",
    "another writer was first": r"another writer (committed|changed)|was created by another writer",
    "a Spark task was killed": r"a Spark task failed|the Spark task that published was lost",
    "foreign record": r"holds a record at offset|is not staging's",
    "topic made anew by another": r"was deleted and created again|is gone; it was there|does not exist at|is not there\."
    r"|which is another topic|was truncated or created again|the topic has lost records",
    "a rule whose other input has not come yet": r"NULL has no type, and no other rule gives the field one",
    "nothing to make anew yet": r"nothing is staged for it",
    "broker between two leaders": r"No leaders found|NOT_LEADER|LEADER_NOT_AVAILABLE|_TRANSPORT|NOT_ENOUGH_REPLICAS",
}
"""The allowed errors of a command while other processes work and services are down. Any other error is a finding."""


class Instance(threading.Thread):
    """Runs one plan after the other until the world stops."""

    def __init__(self, world: World, tally: Tally, place: int, plans: Iterator[ChildPlan]) -> None:
        super().__init__(name=f"instance {place}", daemon=True)
        self.world, self.tally, self.place, self.plans = world, tally, place, plans
        self.process: subprocess.Popen[bytes] | None = None
        self.done = 0

    def run(self) -> None:
        try:
            while not self.world.stopping.is_set():
                self._one(next(self.plans))
                self.done += 1
        except Exception as error:
            self.tally.find(f"the harness itself: instance {self.place}: {error!r}")
            raise

    def _one(self, plan: ChildPlan) -> None:
        log, marker = (self.world.folder / f"instance-{self.place}.{name}" for name in ("log", "ready"))
        marker.unlink(missing_ok=True)
        armed = {"ZYNC_CRASH": f"{plan.point}@{plan.count}"} if plan.end == "point" else {}
        options = ("--recreate", getattr(self.world.shop, plan.recreate)) if plan.recreate else ()
        self.process = start(self.world.pipeline, plan.command, log, marker, armed, *options, pool=plan.pool)
        self._watch(self.process, plan, marker)
        code, text = self.process.wait(), log.read_text(errors="replace")
        self.process = None
        if code == -signal.SIGKILL:
            where = re.search(r"^killed at (\S+)$", text, re.MULTILINE)
            self.tally.count("kills", f"{plan.command}, {where[1]}" if where else f"{plan.command}, at some moment")
        elif code in (0, -signal.SIGTERM):
            self.tally.count("ends", f"{plan.command}{' --recreate' if plan.recreate else ''}, done")
        else:
            self.tally.count("ends", f"{plan.command}, error")
            self._explain(plan, text)

    def _watch(self, process: subprocess.Popen[bytes], plan: ChildPlan, marker: Path) -> None:
        """Wait for the process to end, and see to it that it ends as planned."""
        started, ready = time.monotonic(), None
        while process.poll() is None:
            now = time.monotonic()
            if ready is None and marker.exists():
                ready = now
            since = now - started if plan.end == "start" else (now - ready if ready is not None else -1.0)
            if self.world.stopping.is_set() or since > (PATIENCE if plan.end in ("point", "itself") else plan.delay):
                if plan.end == "term" and since <= PATIENCE:
                    with suppress(ProcessLookupError):
                        process.terminate()
                else:
                    kill_family(process.pid)
            time.sleep(POLL)

    def _explain(self, plan: ChildPlan, text: str) -> None:
        said = next((line for line in reversed(text.splitlines()) if line.startswith("error: ")), None)
        if said is None:
            # A stack trace before such a line is of a Spark worker that was killed, told by Spark's own daemon.
            self.tally.find(f"zync {plan.command} ended without saying why: {text[-3000:]}")
            return
        for name, pattern in EXPECTED.items():
            if re.search(pattern, said):
                self.tally.count("errors", name)
                return
        self.tally.find(f"zync {plan.command} said: {said}")


def start(
    pipeline: Path,
    command: str,
    log: Path,
    marker: Path,
    environment: dict[str, str],
    *options: str,
    pool: str = POOLS[0],
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, its output in ``log``. ``pool``: the staging pool whose ETL is first."""
    arguments = [sys.executable, "-c", _LAUNCH, str(marker), pool, command, str(pipeline), *options]
    with log.open("wb") as out:
        return subprocess.Popen(
            arguments, stdout=out, stderr=out, env={**os.environ, **environment}, start_new_session=True
        )


def kill_family(pid: int) -> None:
    """SIGKILL a process and all that it started: the JVM, and Spark's Python workers in their own process group."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
