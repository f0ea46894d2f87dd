"""Records that can't be decoded: what the pipeline file lets pass, and what is shown of them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from zync_assets.cli.main import main
from zync_assets.errors import BadRecords
from zync_assets.local.services import Services
from zync_assets_tests.steps.mini import BOTH, JOIN, Mini, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Make = Callable[..., Mini]


@pytest.fixture
def make(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Make:
    """``make()``: a pipeline with topics of its own; ``left``: more keys for the left input."""

    def made(left: str = "", partitions: int = 1) -> Mini:
        return mini(services, spark, tmp_path, unique, text(left), partitions)

    return made


def text(left: str = "") -> str:
    return BOTH.replace("topic: $left, ", f"topic: $left, {left}") + JOIN


def zync(it: Mini, *given: str) -> list[dict[str, Any]]:
    """``zync quarantine`` with these arguments: the rows that it prints."""
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
    it = it.edited(text())
    assert it.ingest(it.left)[it.left].quarantined == 1


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
