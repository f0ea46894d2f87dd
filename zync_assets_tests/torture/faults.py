"""Harm to what the pipeline stands on: the broker, the registry, single workers of Spark."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress

import psutil

from zync_assets_tests.torture.children import Instance
from zync_assets_tests.torture.plan import FaultPlan
from zync_assets_tests.torture.report import Tally
from zync_assets_tests.torture.world import World, up_again

NAMES = {
    "restart": "broker restarted",
    "kill": "broker killed",
    "outage": "registry gone and back",
    "worker": "Spark worker killed",
}


class Faults(threading.Thread):
    """Does one plan after the other until the world stops; services run again when it has ended."""

    def __init__(self, world: World, tally: Tally, plans: Iterator[FaultPlan], instances: Sequence[Instance]) -> None:
        super().__init__(name="faults", daemon=True)
        self.world, self.tally, self.plans, self.instances = world, tally, plans, instances
        self.done = 0

    def run(self) -> None:
        try:
            while True:
                plan = next(self.plans)
                if self.world.stopping.wait(plan.pause):
                    return
                self._one(plan)
                self.done += 1
        except Exception as error:
            self.tally.find(f"the harness itself: faults: {error!r}")
            raise

    def _one(self, plan: FaultPlan) -> None:
        if plan.kind == "worker":
            if not self._kill_worker():
                return
        else:
            service = "registry" if plan.kind == "outage" else "kafka"
            self.world.end(service, signal.SIGTERM if plan.kind == "restart" else signal.SIGKILL)
            if plan.kind == "outage":
                self.world.stopping.wait(plan.lasts)
            up_again(self.world)
        self.tally.count("faults", NAMES[plan.kind])

    def _kill_worker(self) -> bool:
        """One Python process of Spark, of whichever instance has one."""
        for instance in self.instances:
            process = instance.process
            if process is None:
                continue
            with suppress(psutil.Error):
                family = psutil.Process(process.pid).children(recursive=True)
                # A helper that the JVM is just starting has the JVM's command line, PySpark's jars among it.
                workers = [child for child in family if "zync_assets.spark.python_daemon" in child.cmdline()]
                if workers:
                    workers[-1].kill()
                    return True
        return False
