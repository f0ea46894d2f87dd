"""Undecodable records: the limits in the pipeline file, and the output of ``zync quarantine``."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from zync_assets.checks.output_checks import run_all
from zync_assets.cli.main import main
from zync_assets.errors import BadRecords
from zync_assets.ingest.commit import commit_raw
from zync_assets.ingest.plan import plan_ingest, read_input
from zync_assets.kafka.registry import Registry
from zync_assets.lake import raw
from zync_assets.lake.quarantine_table import quarantined_records
from zync_assets.local.services import Services
from zync_assets_tests.mini import BOTH, JOIN, Mini, mini, row
from zync_assets_tests.test_exactly_once import breaking
from zync_assets_tests.test_writers_side_by_side import AVRO, COPY, fastavro_bytes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Make = Callable[..., Mini]


@pytest.fixture
def make(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Make:
    """``make()``: a pipeline with topics of its own; ``left``: more keys for the left input."""

    def made(left: str = "", partitions: int = 1) -> Mini:
        return mini(services, spark, tmp_path, unique, text(left), partitions)

    return made


@pytest.fixture
def make_avro(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Make:
    return lambda: mini(services, spark, tmp_path, unique, AVRO + COPY)


def text(left: str = "") -> str:
    return BOTH.replace("topic: $left, ", f"topic: $left, {left}") + JOIN


def zync(it: Mini, *given: str) -> list[dict[str, Any]]:
    """The rows that ``zync quarantine`` prints for the arguments."""
    command, *rest = given
    done = CliRunner().invoke(main, ["quarantine", command, str(it.pipeline.path), *rest, "--format", "json"])
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_bad_record_stops_the_run_where_the_file_says_so(make: Make) -> None:
    it = make("on-bad-record: fail, ", partitions=2)
    it.send(it.left, row(1), b"garbage", partition=1)
    with pytest.raises(BadRecords, match=rf"topic {it.left}, partition 1, offset 1: value: .*nothing was committed"):
        it.ingest()
    assert it.next(it.left) == {}
    # A sensor tries again with each of its ticks.
    assert not list(Path(it.lake).rglob("*.parquet"))
    it = it.edited(text())
    assert it.ingest(it.left)[it.left].quarantined == 1


@pytest.mark.slow
def test_more_bad_records_than_allowed_stop_the_run_however_batches_are_cut(make: Make) -> None:
    it = make("max-bad-records: 2, ")
    it.send(it.left, row(1), b"one", b"two", row(2))
    assert it.ingest(it.left)[it.left].quarantined == 2
    it.etl()
    it.send(it.left, row(3), b"three", b"four")
    with pytest.raises(BadRecords, match=r"2 bad records and 2 .*max-bad-records 2 .*partition 0, offset 5"):
        it.ingest(it.left)
    assert it.next(it.left) == {0: 4}
    it = it.edited(text("max-bad-records: 4, "))
    assert it.ingest(it.left)[it.left].quarantined == 2


def test_a_record_in_quarantine_is_shown_whole(make: Make) -> None:
    it = make(partitions=2)
    it.send(it.left, row(1), ("k", b"gar\xffbage"), partition=1, times=[7, 9])
    it.send(it.left, b"{")
    it.ingest()
    listed = zync(it, "list")
    assert [(found["partition"], found["offset"], found["stage"]) for found in listed] == [
        (0, 0, "value"),
        (1, 1, "value"),
    ]
    assert zync(it, "list", "--topic", it.left, "--offsets", "1:1-5") == listed[1:]
    assert zync(it, "list", "--topic", it.right) == []
    [whole] = zync(it, "show", it.left, "1", "--partition", "1")
    assert base64.b64decode(whole["key"]) == b"k"
    assert base64.b64decode(whole["value"]) == b"gar\xffbage"
    assert (whole["key_text"], "value_text" in whole, whole["error"]) == ("k", False, listed[1]["error"])
    shown = CliRunner().invoke(main, ["quarantine", "show", str(it.pipeline.path), it.left, "1", "--partition", "1"])
    assert "67 61 72 ff 62 61 67 65" in shown.stdout
    missing = CliRunner().invoke(main, ["quarantine", "show", str(it.pipeline.path), it.left, "5"])
    assert missing.exit_code == 1
    assert "offset 5 is not in quarantine" in missing.output


@pytest.mark.slow
def test_a_writer_that_is_killed_in_a_race_leaves_no_bad_record_twice(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = make()
    it.send(it.left, row(1), b"one", row(2))
    first = read_input(it.spark, it.pipeline, plan_ingest(it.pipeline, it.left))
    it.send(it.left, b"two")
    second = read_input(it.spark, it.pipeline, plan_ingest(it.pipeline, it.left))
    commit = raw.commit_advance

    def after_the_other_was_killed(*given: Any) -> None:
        monkeypatch.setattr(raw, "commit_advance", commit)
        with breaking(raw, "commit_advance"):
            commit_raw(it.pipeline, second)
        commit(*given)

    monkeypatch.setattr(raw, "commit_advance", after_the_other_was_killed)
    commit_raw(it.pipeline, first)
    it.etl()
    assert [record.offset for record in quarantined_records(it.pipeline)] == [1]
    assert it.classes(it.left) == {"pending": 2, "quarantined": 1}
    assert it.ingest(it.left)[it.left].quarantined == 1
    it.etl()
    assert [record.offset for record in quarantined_records(it.pipeline)] == [1, 3]
    assert it.classes(it.left) == {"pending": 2, "quarantined": 2}
    for result in run_all(it.pipeline):
        assert result.passed or result.severity == "warn", f"{result.name}: {result.summary}"


EVENT = {
    "type": "record",
    "name": "Event",
    "fields": [
        {"name": "id", "type": "int"},
        {"name": "text", "type": "string"},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}


def test_garbage_of_all_kinds_costs_only_itself(make_avro: Make) -> None:
    it = make_avro()
    assert it.pipeline.registry is not None
    number = Registry(it.pipeline.registry).register(f"{it.left}-value", json.dumps(EVENT))
    frame = b"\0" + number.to_bytes(4, "big")

    def event(id: int) -> bytes:
        return fastavro_bytes(EVENT, {"id": id, "text": "text", "kind": "A", "at": 0})

    good = event(1)
    garbage = {
        "too short": b"",
        "first byte": b"\1" + frame[1:] + good,
        "unknown schema id": b"\0" + (number + 9_999_999).to_bytes(4, "big") + good,
        "ends before": frame + good[:-2],
        "goes on after": frame + good + b"\0",
        "UTF-8": frame + good.replace(b"text", b"t\xffxt"),
        "out of range": frame + good[:-2] + b"\x08" + good[-1:],
        "2 bytes": b"\0\0",
        "": frame + b"\xff" * 40,
    }
    it.send(it.left, *[record for bad in garbage.values() for record in (bad, frame + event(2))])
    made = it.ingest(it.left)[it.left]
    assert (made.records, made.quarantined) == (len(garbage), len(garbage))
    for place, (why, record) in enumerate(zip(garbage, quarantined_records(it.pipeline), strict=True)):
        assert (record.offset, record.stage) == (2 * place, "value")
        assert why in record.error
    assert {found["value"]["id"] for found in it.raw(it.left)} == {2}
    it.etl()
    assert it.classes(it.left) == {"done": len(garbage), "quarantined": len(garbage)}
    status = CliRunner().invoke(main, ["status", str(it.pipeline.path), "--format", "json"])
    shown = next(row for line in status.stdout.splitlines() if (row := json.loads(line))["topic"] == it.left)
    assert (shown["done"], shown["quarantined"]) == (len(garbage), len(garbage))
