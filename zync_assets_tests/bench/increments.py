"""A small ETL batch after a long history: it should take no longer than after a short one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from zync_assets.lake import raw, staging
from zync_assets.pipeline import Pipeline
from zync_assets.runner import etl_all
from zync_assets_tests.bench.data import Known
from zync_assets_tests.bench.etl import REST, append_invoices
from zync_assets_tests.bench.table import time_row
from zync_assets_tests.bench.world import World

NEW = 2_000


@dataclass(frozen=True)
class History:
    """What came before. ``step``, ``paired`` and ``orphan`` as of ``append_invoices``; ``commits``: made in so many."""

    work: str
    records: int
    step: int = 1
    paired: int = 1
    orphan: bool = False
    commits: int = 1


HISTORIES = (
    History("0.6 million", 600_000),
    History("5 million", 5_000_000),
    History("20 million", 20_000_000),
    History("5 million, an orphan at offset 0", 5_000_000, orphan=True),
    History("5 million, every second pending", 5_000_000, paired=2),
    History("5 million, a gap every 3 offsets", 5_000_000, step=3),
)
COMMITS = (History("50 commits", 60_000, commits=50), History("5,000 commits", 60_000, commits=5_000))


_FREE = REST.replace("{topic: new-invoices,", "{topic: new-invoices, hold: false,")
_PAIR = _FREE.partition("    type: denorm")[2].partition("    key:")[0]
_GROUP = """\
    type: group
    where: value.op IN ('c', 'r')
    records: {i: invoices, s: statuses}
    group-by: {i: value.id, s: value.invoice}
    complete-when: count(*) = 2
    out: new-invoices
"""
EVENTS = {
    "none of it": _FREE,
    "hold": REST,
    "12 partitions": _FREE.replace("create: {", "create: {partitions: 12, "),
    "a group": _FREE.replace(f"    type: denorm{_PAIR}", _GROUP)
    .replace("id: left.value.id", "id: max(i.value.id)")
    .replace(": left.value", ": first(i).value")
    .replace(": right.value", ": first(s).value"),
}
"""Name of a feature → the pipeline with it."""


def measure_increment(world: World) -> Iterator[dict[str, object]]:
    """2,000 new records after each history, in turn."""
    yield from _measure(world, "increment", HISTORIES, "≤ 1.2, ≤ 1.5 s")


def measure_commits(world: World) -> Iterator[dict[str, object]]:
    """2,000 new records after the same history in few commits and in many."""
    yield from _measure(world, "many commits", COMMITS, "≤ 1.3")


def measure_events(world: World) -> Iterator[dict[str, object]]:
    """2,000 new records after 0.6 million, with the features of events and without."""
    history = History("0.6 million", 600_000)
    made = {work: Growing(world, history, text, f"events-{place}") for place, (work, text) in enumerate(EVENTS.items())}
    found = world.rounds.measure(f"events, {world.scale}", {work: growing.increment for work, growing in made.items()})
    for work in EVENTS:
        yield time_row("events", f"{NEW:,} with {work}", found[work], found["none of it"], "≤ 1.2")


def _measure(world: World, step: str, histories: tuple[History, ...], goal: str) -> Iterator[dict[str, object]]:
    made = {history.work: Growing(world, history) for history in histories}
    found = world.rounds.measure(f"{step}, {world.scale}", {work: growing.increment for work, growing in made.items()})
    least = found[histories[0].work]
    for history in histories:
        yield time_row(step, f"{NEW:,} after {history.work}", found[history.work], least, goal)


class Growing:
    """A lake with a history, made when it is first needed, which each increment makes longer by NEW records."""

    def __init__(
        self, world: World, history: History, text: str = REST, name: str = "increment", lake: str | None = None
    ) -> None:
        self.world, self.history = world, history
        name = f"{name}-{history.work.replace(' ', '-').replace(',', '')}-{world.scale}"
        self.pipeline = world.pipeline(name, text, lake=lake)
        self.invoice = 0

    def increment(self) -> float:
        spark = self.world.spark(self.pipeline)
        if not self.invoice:
            self._make()
        self.invoice = self._append(self.invoice, NEW)
        started = time.monotonic()
        list(etl_all(self.pipeline, lambda: spark))
        return time.monotonic() - started

    def _make(self) -> None:
        history, spark = self.history, self.world.spark(self.pipeline)
        records = self.world.sized(history.records)
        made = _statuses(self.pipeline)
        if staging.open_staging(self.pipeline.lake, "Staging") is not None and made * 3 // 2 >= records:
            self.invoice = made // 2
            return
        self.world.empty(self.pipeline)
        share = max(3, min(1_500_000, records // history.commits))
        known: Known = {}
        while self.invoice * 3 < records:
            self.invoice = self._append(self.invoice, share, known)
        list(etl_all(self.pipeline, lambda: spark))

    def _append(self, first: int, records: int, known: Known | None = None) -> int:
        end = first + max(1, records // 3)
        history = self.history
        orphan = history.orphan and first == 0
        append_invoices(self.pipeline, first, end, step=history.step, paired=history.paired, orphan=orphan, known=known)
        return end


def _statuses(pipeline: Pipeline) -> int:
    """How many raw statuses there are: two for each invoice number."""
    state = raw.open_raw(pipeline.lake, "Raw", "statuses")
    return 0 if state is None else sum(item.records for item in raw.raw_files(state))
