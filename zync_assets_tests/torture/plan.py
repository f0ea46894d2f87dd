"""The plan of a torture run: an endless sequence of events for each source of trouble, determined by a seed.

The times of events also depend on the machine, because a child's next plan begins at the end of its last plan.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

POINTS: dict[str, tuple[str, ...]] = {
    "from-kafka": (
        "ingest:files-written",
        "ingest:quarantine-written",
        "ingest:table-created",
        "ingest:columns-added",
        "ingest:committed",
        "compact:written",
        "compact:committed",
        "retention:released",
        "retention:removed",
    ),
    "etl": (
        "etl:state-written",
        "etl:outputs-written",
        "etl:ledger-written",
        "etl:ledger-compacted",
        "etl:head-written",
        "etl:table-created",
        "etl:columns-added",
        "etl:committed",
        "fold:written",
        "fold:committed",
        "compact:written",
        "compact:committed",
        "retention:released",
        "retention:removed",
    ),
    "to-kafka": (
        "publish:topic-created",
        "publish:window-announced",
        "publish:produced",
        "publish:acknowledged",
        "publish:verified",
        "publish:window-closed",
    ),
    "sink": ("sink:prepared", "sink:loaded", "sink:merging", "sink:merged"),
}
POOLS = ("Staging", "Views", "Events")
"""The staging pools."""
RECREATING = ("publish:topic-deleted", "publish:topic-created")
OUTPUTS = ("new", "audit", "customers", "met", "changed")
RARE = frozenset(
    {
        "ingest:table-created",
        "ingest:columns-added",
        "etl:table-created",
        "etl:columns-added",
        "publish:topic-created",
        "compact:written",
        "compact:committed",
        "retention:released",
        "retention:removed",
    }
)
"""Points that are passed once in a pipeline's life, or once in many batches."""


@dataclass(frozen=True)
class ChildPlan:
    """One ``zync`` process. ``end``: how it is to end.

    point    at a crash point, armed in its environment, when it passes it for the ``count``-th time
    moment   ``delay`` seconds after it has its Spark session
    start    ``delay`` seconds after it was started, session or not
    term     SIGTERM, ``delay`` seconds after it has its session
    itself   when it is done

    ``recreate``: which of the output topics it makes anew; ``pool``: the staging pool whose ETL is first. An end at a crash point
    of ETL comes in that pool, and after a moment the others may not have begun.
    """

    command: str
    end: str
    point: str = ""
    count: int = 1
    delay: float = 0.0
    recreate: str = ""
    pool: str = POOLS[0]


@dataclass(frozen=True)
class FaultPlan:
    """A fault of a service after ``pause`` seconds: ``restart`` or ``kill`` the broker, an ``outage`` of the registry for
    ``lasts`` seconds, or the kill of a ``worker`` process of Spark."""

    pause: float
    kind: str
    lasts: float = 0.0


@dataclass(frozen=True)
class TrafficPlan:
    """The changes of so many orders, after ``pause`` seconds. ``how``: ``plain``, in a transaction that is ``committed``,
    or in one that is ``aborted`` and sent again. ``ahead``: some of them have a timestamp in the future; ``grows``: ``orders``
    or ``status``, a topic that gets one more partition before."""

    pause: float
    orders: int
    how: str
    seed: int
    ahead: bool = False
    grows: str = ""


@dataclass(frozen=True)
class DaemonPlan:
    """One daemon of Dagster. It is killed after ``lasts`` seconds, or dies with its runs at a crash point.

    ``run_kills``: seconds after the daemon's start at which its newest run is killed.
    """

    lasts: float
    point: str
    run_kills: tuple[float, ...]


def children(seed: int, place: int) -> Iterator[ChildPlan]:
    """The processes that an instance runs one after the other."""
    dice = random.Random(f"{seed} children {place}")
    while True:
        yield replace(_child(dice), pool=dice.choice(POOLS))


def _child(dice: random.Random) -> ChildPlan:
    command = dice.choices(("run", "from-kafka", "etl", "to-kafka", "sink", "recreate"), (16, 4, 8, 12, 6, 1))[0]
    if command == "recreate":
        ends = [*(ChildPlan("to-kafka", "point", point) for point in RECREATING), ChildPlan("to-kafka", "itself")]
        return replace(dice.choices(ends, (1, 1, 8))[0], recreate=dice.choice(OUTPUTS))
    end = dice.choices(("point", "moment", "start", "term", "itself"), (60, 25, 3, 4, 8))[0]
    if end == "point":
        step = dice.choice(tuple(POINTS)) if command == "run" else command
        weights = [0.1 if point in RARE else 1.0 for point in POINTS[step]]
        count = dice.choice((1, 1, 2, 3)) if command == "run" else dice.choice((1, 1, 2))
        return ChildPlan(command, end, dice.choices(POINTS[step], weights)[0], count)
    if end == "start":
        return ChildPlan(command, end, delay=dice.uniform(0, 6))
    return ChildPlan(command, end, delay=dice.uniform(0, 8))


def daemons(seed: int) -> Iterator[DaemonPlan]:
    """The daemons, one after the other. Most live for some minutes: a run of theirs takes half a minute."""
    dice = random.Random(f"{seed} daemons")
    steps = [point for points in POINTS.values() for point in points]
    weights = [0.1 if point in RARE else 1.0 for point in steps]
    while True:
        point = dice.choices(steps, weights)[0] if dice.random() < 0.4 else ""
        lasts = dice.uniform(60, 240)
        kills = tuple(sorted(dice.uniform(20, lasts) for _ in range(dice.randrange(3))))
        yield DaemonPlan(lasts, point, kills)


def faults(seed: int) -> Iterator[FaultPlan]:
    dice = random.Random(f"{seed} faults")
    while True:
        pause = dice.uniform(5, 25)
        kind = dice.choices(("restart", "kill", "outage", "worker"), (2, 4, 3, 8))[0]
        yield FaultPlan(pause, kind, dice.uniform(1, 10))


def traffic(seed: int, rate: float) -> Iterator[TrafficPlan]:
    """About ``rate`` orders a second, in bursts."""
    dice = random.Random(f"{seed} traffic")
    while True:
        pause = dice.uniform(0.2, 2.0)
        how = dice.choices(("plain", "committed", "aborted"), (6, 3, 1))[0]
        orders = max(1, round(rate * pause * dice.uniform(0.3, 1.7)))
        grows = dice.choice(("orders", "status")) if dice.random() < 0.004 else ""
        yield TrafficPlan(pause, orders, how, dice.randrange(1 << 30), dice.random() < 0.03, grows)
