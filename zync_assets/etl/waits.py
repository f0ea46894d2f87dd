"""Waits: how long records have waited for the row that they look up, and which of them wait too long.

The ledger has the time at which a record began to wait. The pipeline file says how long a record may wait, so that a new ``wait``
counts for waiting records too. The account's head has a time for each rule: no record of the rule waits since an earlier time.
A tick therefore reads the ledger only if a wait may be over.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from zync_assets.etl.ledger import waiting_since
from zync_assets.etl.retries import ClassRange
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Pipeline, Rule

MOST_OVERDUE = 10_000
"""Records of one batch whose wait is over. The next batch has the others."""


@dataclass(frozen=True)
class Waits:
    """``overdue``: the records whose wait is over. ``oldest``: rule → the time, in milliseconds since the epoch, since which a
    record may wait."""

    overdue: tuple[ClassRange, ...] = ()
    oldest: Mapping[str, int] = field(default_factory=dict[str, int])


NO_WAITS = Waits()


def limits(rules: Sequence[Rule]) -> dict[str, int]:
    """Rule → how long its records may wait, in milliseconds: the longest ``wait`` of its look-ups."""
    return {
        rule.name: max(item.wait_ms for item in rule.lookups)
        for rule in rules
        if any(item.missing == "wait" for item in rule.lookups)
    }


def time_text(milliseconds: int) -> str:
    """A time as the ledger has it. Texts of two times compare as the times do."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")


def since_text() -> str:
    """The time as the ledger has it."""
    return time_text(present())


def time_of(text: str) -> int:
    """The time of a text, in milliseconds since the epoch."""
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def present() -> int:
    """The time, in milliseconds since the epoch."""
    return int(time.time() * 1000)


def waits_of(pipeline: Pipeline, pool: str, state: StagingState | None) -> Waits:
    """The waits of a staging pool at this time."""
    if state is None or not state.head.waits:
        return NO_WAITS
    most, oldest, moment = limits(pipeline.rules_of(pool)), dict(state.head.waits), present()
    due = [rule for rule, since in oldest.items() if rule in most and since + most[rule] <= moment]
    if not due:
        return Waits((), oldest)
    overdue: list[ClassRange] = []
    for rule in due:
        late, rest = waiting_since(state, rule, moment - most[rule] + 1)
        each, most_more = late.sort_by("since").to_pylist(), MOST_OVERDUE - len(overdue)
        for row in each[:most_more]:
            place = OffsetRange(row["partition"], row["first"], row["first"] + 1)
            overdue.append(ClassRange(row["topic"], "pending", rule, place))
        known = [row["since"] for row in each[most_more : most_more + 1]]
        oldest[rule] = known[0] if known else moment if rest is None else rest
    return Waits(tuple(overdue), oldest)


def next_waits(waits: Waits, begun: Mapping[str, int], waiting: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """The times of the account's head after a batch. ``begun``: rule → the time at which records of the batch began to wait;
    ``waiting``: (rule, topic) → records that are pending after the batch."""
    each = {**begun, **waits.oldest}
    known = {rule: min(times.get(rule, since) for times in (begun, waits.oldest)) for rule, since in each.items()}
    still = {rule for (rule, _), count in waiting.items() if count > 0}
    return {rule: since for rule, since in known.items() if rule in still}
