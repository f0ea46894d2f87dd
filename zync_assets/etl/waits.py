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
    """The waits of records for a row. ``overdue``: the records whose wait is over. ``oldest``: rule → a time in milliseconds
    since the epoch. No record that still waits for the rule began to wait earlier."""

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
    wait_limits, oldest, moment = limits(pipeline.rules_of(pool)), dict(state.head.waits), present()
    due_rules = [rule for rule, since in oldest.items() if rule in wait_limits and since + wait_limits[rule] <= moment]
    if not due_rules:
        return Waits((), oldest)
    overdue: list[ClassRange] = []
    for rule in due_rules:
        late_entries, next_oldest = waiting_since(state, rule, moment - wait_limits[rule] + 1)
        sorted_entries, room = late_entries.sort_by("since").to_pylist(), MOST_OVERDUE - len(overdue)
        for row in sorted_entries[:room]:
            place = OffsetRange(row["partition"], row["first"], row["first"] + 1)
            overdue.append(ClassRange(row["topic"], "pending", rule, place))
        next_times = [row["since"] for row in sorted_entries[room : room + 1]]
        oldest[rule] = next_times[0] if next_times else moment if next_oldest is None else next_oldest
    return Waits(tuple(overdue), oldest)


def next_waits(waits: Waits, start_times: Mapping[str, int], waiting: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """The times of the account's head after a batch. ``start_times``: rule → when records of the batch began to wait;
    ``waiting``: (rule, topic) → records that are pending after the batch."""
    all_times = {**start_times, **waits.oldest}
    oldest_times = {
        rule: min(times.get(rule, since) for times in (start_times, waits.oldest)) for rule, since in all_times.items()
    }
    waiting_rules = {rule for (rule, _), count in waiting.items() if count > 0}
    return {rule: since for rule, since in oldest_times.items() if rule in waiting_rules}
