"""The printed table of the benchmarks, one row per goal."""

from __future__ import annotations

from collections.abc import Sequence

from zync_assets_tests.bench.rounds import median, spread

COLUMNS = ("step", "work", "measured", "reference", "ratio", "goal", "spread", "rounds")


def rate_row(
    step: str, work: str, records: int, ours: Sequence[float], reference: Sequence[float], goal: float
) -> dict[str, object]:
    """Records a second of both, and their ratio: at least ``goal`` is wanted. The numbers are seconds."""
    mine, other = median(list(ours)), median(list(reference))
    return {
        "step": step,
        "work": work,
        "measured": f"{records / mine:,.0f}/s",
        "reference": f"{records / other:,.0f}/s",
        "ratio": round(other / mine, 2),
        "goal": f"≥ {goal}",
        "spread": spread(list(ours)),
        "rounds": len(ours),
    }


def time_row(
    step: str, work: str, ours: Sequence[float], reference: Sequence[float] | None, goal: str, unit: str = "s"
) -> dict[str, object]:
    """A row with both measurements and the ratio of ours to the reference. The goal is the highest allowed ratio."""
    mine = median(list(ours))
    other = median(list(reference)) if reference else None
    return {
        "step": step,
        "work": work,
        "measured": f"{mine:,.2f} {unit}",
        "reference": "" if other is None else f"{other:,.2f} {unit}",
        "ratio": "" if other is None else round(mine / other, 2),
        "goal": goal,
        "spread": spread(list(ours)),
        "rounds": len(ours),
    }
