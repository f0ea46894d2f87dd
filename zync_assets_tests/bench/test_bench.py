"""That the benchmarks measure what they say, at a size at which their numbers mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from zync_assets_tests.bench import codecs
from zync_assets_tests.bench.__main__ import STEPS, bench
from zync_assets_tests.bench.rounds import Rounds
from zync_assets_tests.bench.table import rate_row, time_row


def test_every_family_of_types_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "LEAST", 0)
    done = CliRunner().invoke(bench, ["codecs", "--scale", "0.01", "--json", str(tmp_path / "rows")])
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "rows").read_text())
    assert [row["family"] for row in rows] == list(codecs.FAMILIES)
    assert all(
        row[f"{what} {way}"] > 0 for row in rows for what in ("decode", "encode") for way in ("native", "fastavro")
    )


def test_a_step_that_is_none_is_an_error() -> None:
    done = CliRunner().invoke(bench, ["colours"])
    assert done.exit_code == 2 and "'ingest'" in done.output


def test_ways_take_turns_and_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    turns: list[str] = []

    def way(name: str, fails_at: int = 0) -> float:
        turns.append(name)
        if turns.count(name) == fails_at:
            raise KeyboardInterrupt
        return float(turns.count(name))

    rounds = Rounds(tmp_path / "kept.json", 3)
    with pytest.raises(KeyboardInterrupt):
        rounds.measure("work", {"a": lambda: way("a"), "b": lambda: way("b", fails_at=3)})
    # The first time warms up, and does not count; what the broken round had is dropped.
    assert turns == ["a", "b"] * 3
    assert rounds.kept() == {"work": {"a": [2.0], "b": [2.0]}}
    found = rounds.measure("work", {"a": lambda: way("a"), "b": lambda: way("b")})
    assert found == {"a": [2.0, 5.0, 6.0], "b": [2.0, 5.0, 6.0]}
    assert rounds.measure("work", {"a": lambda: way("a"), "b": lambda: way("b")}) == found and len(turns) == 12


def test_ratios_are_of_medians() -> None:
    rate = rate_row("ingest", "work", 600, ours=[3.0, 1.0, 2.0], reference=[1.0, 1.0, 9.0], goal=0.6)
    assert (rate["measured"], rate["reference"], rate["ratio"], rate["spread"]) == ("300/s", "600/s", 0.5, "0.50–1.50")
    row = time_row("etl", "work", [3.0], [2.0], "≤ 4")
    assert (row["measured"], row["reference"], row["ratio"]) == ("3.00 s", "2.00 s", 1.5)


@pytest.mark.slow
def test_each_step_gives_its_rows(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        bench,
        [*STEPS, "--folder", str(tmp_path), "--rounds", "1", "--scale", "0.001", "--json", str(tmp_path / "rows")],
    )
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "rows").read_text())
    assert {row["step"] for row in rows} >= {
        "ingest",
        "etl",
        "publish",
        "increment",
        "many commits",
        "latency",
        "memory",
        "warm start",
    }
