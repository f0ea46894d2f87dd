"""Problems that a sensor meets: since when, which last, and when a tick shows them in red.

A tick that fails can ask for no run. So the ticks take turns: while a problem lasts, a tick with nothing else to do fails
with the problems, and so does each tick in the first seconds of a minute. The other ticks keep the rest going. A failed
tick keeps the old cursor, so that the next one reports and asks for what the failed one left undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dagster import AssetCheckEvaluation, AssetCheckSeverity, AssetKey

from zync_assets.assets.facts import BROKER, Facts
from zync_assets.assets.names import KAFKA, Names
from zync_assets.checks.topic_checks import REACHABLE

LASTS_SECONDS = 20.0
"""Seconds after which a problem counts as lasting. A broker restarts in less time."""
PERIOD_SECONDS = 60.0
RED_SECONDS = 10.0
"""During a lasting problem, the ticks in the first seconds of each period are red, even if steps are due."""
PROBLEMS = "problems"
CHECKED = "reachable"
"""Keys of the cursor. An asset's path has a slash."""


@dataclass(frozen=True)
class Troubles:
    """The problems of a tick. ``since``: place → when it was first met, in seconds since the epoch."""

    texts: Mapping[str, str]
    since: Mapping[str, float]
    now: float

    @property
    def lasting(self) -> list[str]:
        return [place for place in self.texts if self.now - self.since[place] >= LASTS_SECONDS]

    def red(self, *, idle: bool) -> bool:
        """Whether this tick shows the problems. ``idle``: no step is due in this tick."""
        if not self.lasting:
            return False
        age = self.now - min(self.since[place] for place in self.lasting)
        return idle or age % PERIOD_SECONDS < RED_SECONDS

    @property
    def lines(self) -> list[str]:
        return [f"{place}: {text}" for place, text in self.texts.items()]


def troubles(texts: Mapping[str, str], cursor: Mapping[str, Any], now: float) -> Troubles:
    """The problems of this tick, as old as the cursor knows them."""
    known = cursor.get(PROBLEMS, {})
    return Troubles(texts, {place: float(known.get(place, now)) for place in texts}, now)


def reachability(
    names: Names, facts: Facts, found: Troubles, cursor: Mapping[str, Any]
) -> tuple[list[AssetCheckEvaluation], dict[str, bool]]:
    """The results of check ``reachable`` that differ from the last ones, and each input topic's result for the cursor.

    A topic is out of reach once its problem lasts.
    """
    known: dict[str, bool] = dict(cursor.get(CHECKED, {}))
    events: list[AssetCheckEvaluation] = []
    for item in names.pipeline.inputs:
        why = facts.unreachable.get(item.topic)
        places = {BROKER, f"{KAFKA}/{item.topic}", f"{item.pool}/{item.topic}"}
        if why is not None and not places & set(found.lasting):
            continue
        if known.get(item.topic) is not (why is None):
            known[item.topic] = why is None
            events.append(_evaluation(names.topic_key(item.topic), why))
    return events, known


def _evaluation(asset: AssetKey, why: str | None) -> AssetCheckEvaluation:
    return AssetCheckEvaluation(
        asset_key=asset,
        check_name=REACHABLE,
        passed=why is None,
        severity=AssetCheckSeverity.ERROR,
        description=why or "The broker answers for every partition.",
    )
