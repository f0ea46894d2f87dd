"""The torture's schedule is its seed's; a short run of it finds nothing, and one goes on where another ended."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from zync_assets_tests.etl.views import test_maintenance
from zync_assets_tests.sinks import test_commit
from zync_assets_tests.test_crashes import CASES
from zync_assets_tests.torture import plan
from zync_assets_tests.torture.__main__ import main
from zync_assets_tests.torture.report import FILE

SCHEDULES: dict[str, Callable[[int], object]] = {
    "one instance": lambda seed: list(itertools.islice(plan.children(seed, 0), 300)),
    "another instance": lambda seed: list(itertools.islice(plan.children(seed, 1), 300)),
    "daemons": lambda seed: list(itertools.islice(plan.daemons(seed), 300)),
    "faults": lambda seed: list(itertools.islice(plan.faults(seed), 300)),
    "traffic": lambda seed: list(itertools.islice(plan.traffic(seed, 10.0), 300)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_same_seed_is_the_same_schedule(name: str) -> None:
    drawn = SCHEDULES[name]
    assert drawn(1) == drawn(1) != drawn(2)


def test_a_schedule_has_every_end_and_every_point() -> None:
    plans = list(itertools.islice(plan.children(1, 0), 3000))
    assert {item.end for item in plans} == {"point", "moment", "start", "term", "itself"}
    assert {item.command for item in plans} == {"run", "from-kafka", "etl", "to-kafka", "sink"}
    points = {*CASES, *test_commit.POINTS, *test_maintenance.POINTS}
    # Cleaning comes every hundred commits, in files that a week made old.
    assert {item.point for item in plans if item.end == "point"} == points - {"clean:done"}


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_whatever_is_killed(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    runs, kills = 2, 12
    for _ in range(runs):
        code = main(["--minutes", "5", "--kills", str(kills), "--seed", "5", "--folder", str(tmp_path / "torture")])
        found = json.loads((tmp_path / "torture" / FILE).read_text())
        assert code == 0, found["runs"][-1]["findings"]
    assert len(found["runs"]) == runs
    for number, run in enumerate(found["runs"]):
        done, checked = sum(run["kills"].values()), run["checked"]
        record_property(
            "table: torture", f"run {number} | {done} kills | {run['faults']} | {checked['published']} published"
        )
        assert done >= kills
