"""``python -m zync_assets_tests.torture``: break everything for some minutes; exit code 1 on any finding."""

from __future__ import annotations

import argparse
import itertools
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from zync_assets_tests.torture import plan, report
from zync_assets_tests.torture.children import Instance
from zync_assets_tests.torture.faults import Faults
from zync_assets_tests.torture.judgement import drain, verdict
from zync_assets_tests.torture.report import FILE, History, Tally, read_history
from zync_assets_tests.torture.traffic import Traffic
from zync_assets_tests.torture.world import World, close, make_world, up_again

if TYPE_CHECKING:
    from zync_assets_tests.torture.sensor import Daemon

T = TypeVar("T")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m zync_assets_tests.torture", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--kills", type=int, default=0, help="end after so many, if the time is not over before")
    parser.add_argument("--seed", type=int, default=1, help="the same seed, the same schedule")
    parser.add_argument(
        "--folder", type=Path, help="go on with what is there, and leave it there; else a new one, removed"
    )
    parser.add_argument("--instances", type=int, default=2, help="processes at once")
    parser.add_argument("--rate", type=float, default=10.0, help="orders a second, some four changes each")
    parser.add_argument("--sensor", action="store_true", help="run Dagster's daemon with the pipeline's sensor too")
    chosen = parser.parse_args(arguments)
    if chosen.folder is not None:
        return _run(chosen, chosen.folder.absolute(), keep=True)
    with tempfile.TemporaryDirectory(prefix="zync-torture-") as name:
        return _run(chosen, Path(name), keep=False)


def _run(chosen: argparse.Namespace, folder: Path, *, keep: bool) -> int:
    there = (folder / FILE).exists()
    history = read_history(folder, f"torture{secrets.token_hex(3)}")
    world = make_world(folder, history.prefix, there=there)
    history.save()
    tally = Tally()
    daemon = None
    if chosen.sensor:
        # Imported here: Dagster takes seconds to load, and a run without it needs none.
        from zync_assets_tests.torture.sensor import Daemon

        daemon = Daemon(world, tally, _later(plan.daemons(chosen.seed), _passed(history, chosen.seed, "daemon")))
    try:
        _trouble(chosen, world, tally, history, daemon)
        if daemon is not None:
            daemon.judge()
        drain(world, tally)
        verdict(world, tally)
    finally:
        history.runs.append({"seed": chosen.seed, "minutes": chosen.minutes, **tally.plain()})
        history.save()
        close(world, clean=not keep)
    if there:
        print("this run:")
        print(report.text(tally, 1))
        print("all runs:")
    whole = history.total()
    print(report.text(whole, len(history.runs)))
    return 1 if whole.findings else 0


def _trouble(chosen: argparse.Namespace, world: World, tally: Tally, history: History, daemon: Daemon | None) -> None:
    """All threads at work for the given time; then all processes are dead, and the services run."""
    began = time.monotonic()
    instances = [
        Instance(
            world,
            tally,
            place,
            _later(plan.children(chosen.seed, place), _passed(history, chosen.seed, f"instance {place}")),
        )
        for place in range(chosen.instances)
    ]
    faults = Faults(world, tally, _later(plan.faults(chosen.seed), _passed(history, chosen.seed, "faults")), instances)
    traffic = Traffic(world, tally, plan.traffic(chosen.seed, chosen.rate), history.orders)
    daemons = [] if daemon is None else [daemon]
    threads = [*instances, faults, traffic, *daemons]
    for thread in threads:
        thread.start()
    try:
        while time.monotonic() - began < chosen.minutes * 60 and all(thread.is_alive() for thread in threads):
            if chosen.kills and tally.kills.total() >= chosen.kills:
                break
            time.sleep(0.2)
    finally:
        world.stopping.set()
        for thread in threads:
            thread.join(180)
        tally.seconds = time.monotonic() - began
        up_again(world)
        traffic.close()
        history.orders = traffic.orders
    tally.passed = {item.name: item.done for item in [*instances, faults, *daemons]}


def _later(plans: Iterator[T], passed: int) -> Iterator[T]:
    """A schedule without what an earlier run with this seed had of it."""
    return itertools.islice(plans, passed, None)


def _passed(history: History, seed: int, name: str) -> int:
    return sum(run["passed"].get(name, 0) for run in history.runs if run["seed"] == seed)


if __name__ == "__main__":
    sys.exit(main())
