"""``shape:`` of an output: what rules make is filtered and mapped before it is numbered, and the account knows what became
of its inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zync_assets.checks.output_checks import run_all
from zync_assets.etl import ledger
from zync_assets.lake.quarantine_table import quarantined_records
from zync_assets.local.services import Services
from zync_assets_tests.mini import BOTH, JOIN, Mini, mini, read_topic, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RULES = (
    JOIN
    + """
  - {name: update, type: stateless, where: value.op = 'u', in: $left, out: $out, key: in.key,
     value: {id: in.value.id, l: in.value.v}}
  - {name: gone, type: stateless, where: value.op = 'd', in: $left, out: $out, key: in.key, value: null}
"""
).replace("    type: denorm\n", "    type: denorm\n    where: value.op = 'c'\n")
SHAPE = """shape:
      where: value is null or value.id < 10
      key: {k: key}
      value: {ID: value.id, both: "concat(value.l, value.r)", l: upper(value.l)}
"""
OUTPUT = """
outputs:
  - topic: $out
    pool: Staging
    format: json
    create: {replication-factor: 1}
    """


def made(services: Services, spark: SparkSession, folder: Path, prefix: str) -> Mini:
    return mini(services, spark, folder, prefix, BOTH[: BOTH.index("outputs:")] + OUTPUT.lstrip() + SHAPE + RULES)


@pytest.mark.slow
def test_outputs_are_mapped_and_filtered_and_those_that_waited_are_dropped(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = made(services, spark, tmp_path, unique)
    it.send(it.left, row(1, "a"), row(11, "b"), row(2, "x", "u"), row(12, "y", "u"), row(3, op="d"))
    it.send(it.right, row(99, "r"))
    it.step()
    assert it.classes(it.left) == {"done": 2, "dropped": 1, "pending": 2}
    it.send(it.right, row(1, "A"), row(11, "B"), row(12, "C"))
    it.send(it.left, row(12, "z"))
    it.step()
    # The pair of 11 had a side that waited, that of 12 had none: both are dropped whole.
    assert it.classes(it.left) == {"done": 3, "dropped": 3}
    assert it.classes(it.right) == {"done": 1, "dropped": 2, "pending": 1}
    it.publish()
    found = read_topic(it.pipeline, it.out)
    assert [(offset, json.loads(key or b""), value and json.loads(value)) for offset, key, value in found] == [
        (0, {"k": "k2"}, {"ID": 2, "l": "X"}),
        (1, {"k": "k4"}, None),
        (2, {"k": "k0"}, {"ID": 1, "both": "aA", "l": "A"}),
    ]
    problems = [item.summary for item in run_all(it.pipeline) if item.severity == "error" and not item.passed]
    assert problems == []
    monkeypatch.setattr(ledger, "COMPACTION_FILES", 2)
    it.send(it.right, row(13, "D"))
    it.step()
    assert it.ledger("completed") == []
    assert sum(entry["end"] - entry["first"] for entry in it.ledger("dropped") if entry["topic"] == it.left) == 3
    assert [item.summary for item in run_all(it.pipeline) if item.severity == "error" and not item.passed] == []


def test_of_what_is_filtered_nothing_is_mapped_and_so_nothing_fails(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    text = (
        BOTH[: BOTH.index("outputs:")]
        + OUTPUT.lstrip()
        + """shape: {where: CAST(value.v AS INT) > 5, value: {n: 100 DIV CAST(value.v AS INT)}}
transforms:
  - {name: copy, type: stateless, in: $left, out: $out, key: in.key, value: {v: in.value.v},
     headers: {h: CAST(in.value.id AS STRING)}}
"""
    )
    it = mini(services, spark, tmp_path, unique, text)
    it.send(it.left, row(1, "10"), row(2, "x"), row(3, "0"), row(4, "50"))
    it.step()
    assert it.classes(it.left) == {"done": 2, "dropped": 1, "quarantined": 1}
    assert [(found.offset, found.error.split(":")[0]) for found in quarantined_records(it.pipeline)] == [(1, "shape")]
    assert it.values() == [{"n": 10}, {"n": 2}]
