"""That the benchmarks measure what they say, at a size at which their numbers mean nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

from zync_assets.kafka.topics import create_topic, topic_state
from zync_assets.local.services import Services
from zync_assets_tests.bench import __main__ as command
from zync_assets_tests.bench import codecs, data, latency
from zync_assets_tests.bench.__main__ import BEGINNINGS, STEPS, bench
from zync_assets_tests.bench.ingest import REST
from zync_assets_tests.bench.rounds import Rounds
from zync_assets_tests.bench.table import rate_row, time_row
from zync_assets_tests.bench.world import World


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


def _first_only(numbers: np.ndarray[Any, Any]) -> pa.Array:
    if numbers[0] != 0:
        raise KeyboardInterrupt
    return data.orders(numbers)


@pytest.fixture
def world(services: Services, tmp_path: Path) -> World:
    return World(tmp_path, services, Rounds(tmp_path / "kept.json", 1), 1.0, ThreadPoolExecutor())


def test_a_topic_whose_filling_was_stopped_is_filled_anew(world: World, unique: str) -> None:
    pipeline = world.pipeline(unique, REST.format(topic=unique))

    def fill() -> tuple[str, list[int]]:
        data.fill_topic(pipeline, unique, 2, 40, data.ORDER, data.orders)
        state = topic_state(pipeline.kafka, unique)
        return state.topic_id, [part.end for part in state.partitions]

    with pytest.raises(KeyboardInterrupt):
        data.fill_topic(pipeline, unique, 2, 40, data.ORDER, _first_only)
    stopped = topic_state(pipeline.kafka, unique).topic_id
    first = fill()
    assert first[0] != stopped and first[1] == [20, 20]
    assert fill() == first


def test_latency_ends_with_the_run_that_it_measures(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "ZYNC", (sys.executable, "-c", "import sys; sys.exit('no Java is here')"))
    with pytest.raises(click.ClickException, match=r"(?s)exit code 1 .*latency\.log:\nno Java is here"):
        list(latency.measure_latency(world))


def test_latency_waits_for_no_record_that_does_not_come(
    services: Services, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_topic({"bootstrap.servers": services.bootstrap_servers}, unique, 1, 1, {})
    log = tmp_path / "log"
    log.touch()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        monkeypatch.setattr(latency, "LIMIT", 0)
        with pytest.raises(click.ClickException, match=f"within 0 s: see {re.escape(str(log))}"):
            latency._received(services.bootstrap_servers, [unique], 1, latency.watch(process, log))
        monkeypatch.undo()
        process.kill()
        process.wait()
        with pytest.raises(click.ClickException, match="exit code -9"):
            latency._received(services.bootstrap_servers, [unique], 1, latency.watch(process, log))


def test_where_results_go_is_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "measure_codecs", lambda _: pytest.fail("it measures"))
    (tmp_path / "file").touch()
    for option, path, said in (
        ("--json", tmp_path / "no" / "rows", "can't be written (No such file or directory): choose another file"),
        ("--json", tmp_path, "can't be written (Is a directory)"),
        ("--folder", tmp_path / "file", "is a file"),
        ("--folder", tmp_path / "file" / "below", "can't be made (Not a directory): choose another folder"),
    ):
        done = CliRunner().invoke(bench, ["codecs", option, str(path)])
        told = " ".join(done.output.split())
        assert done.exit_code == 2 and f"'{option}'" in told and str(path) in told and said in told, done.output


@contextmanager
def _kept_only(folder: Path, rounds: Rounds, scale: float) -> Generator[dict[str, object]]:
    yield {**rounds.kept()}


def test_again_drops_what_the_named_steps_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "world", _kept_only)
    seen: list[object] = []
    for name in STEPS:
        monkeypatch.setitem(STEPS, name, lambda kept: iter(seen.append(list(kept)) or ()))
    names = ["ingest, 8 fields, 8", "etl, 8", "many commits, 1.0", "warm start"]
    (tmp_path / "measured.json").write_text(json.dumps({name: {"ours": [1.0]} for name in names}))
    for arguments in (["etl"], ["etl", "--again"], ["commits", "warm", "--again"]):
        done = CliRunner().invoke(bench, [*arguments, "--folder", str(tmp_path)])
        assert done.exit_code == 0, done.output
    assert seen == [names, [names[0], *names[2:]], names[:1], names[:1]]


def test_sigterm_stops_the_services_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    @contextmanager
    def world(*_: object) -> Generator[None]:
        try:
            yield
        finally:
            told.append("stopped")

    def step(_: object) -> Generator[dict[str, object]]:
        os.kill(os.getpid(), signal.SIGTERM)
        told.append("went on")
        yield {}

    monkeypatch.setattr(command, "world", world)
    monkeypatch.setitem(STEPS, "ingest", step)
    monkeypatch.setattr(sys, "argv", ["bench", "ingest", "--folder", str(tmp_path)])
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(SystemExit) as ended:
            command.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 1 and told == ["stopped"]


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
        "topics",
        "sensor",
        "memory",
        "warm start",
        "sinks",
        "views",
    }
    kept = json.loads((tmp_path / "measured.json").read_text())
    assert kept and all(name.startswith(tuple(BEGINNINGS.values())) for name in kept)
