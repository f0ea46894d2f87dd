"""Several outputs of a match: each element of an array, each output of a list, in one commit, and each input counted once."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zync_assets.checks.output_checks import run_all
from zync_assets.cli.records import trace_rows
from zync_assets.errors import EtlError
from zync_assets.etl import positions
from zync_assets.etl.rules import explain_rules
from zync_assets.local.services import Services
from zync_assets_tests.mini import Mini, mini
from zync_assets_tests.model import Fan, Model, Record

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILE = """
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: json, schema: "id bigint, v string, items array<string>"}
  - {topic: $right, pool: Raw, key-format: string, value-format: json, schema: "id bigint, v string, items array<string>"}
outputs:
  - {topic: "{topic}.clean", pool: Staging, key-format: string, value-format: json, create: {replication-factor: 1}}
  - {topic: $out, pool: Staging, key-format: string, value-format: json, create: {replication-factor: 1}}
  - {topic: $left.clean, pool: Staging, key-format: string, value-format: json, create: {replication-factor: 1}}
transforms:
  - name: both
    type: denorm
    left: $left
    right: $right
    where: {left: value.v = 'pair', right: value.v = 'pair'}
    join-on: left.value.id = right.value.id
    out:
      - {topic: $out, key: left.key, value: {id: left.value.id}}
      - {topic: $left.clean, explode: "array_union(left.value.items, right.value.items)", key: item,
         value: {id: right.value.id, v: item}}
  - name: fan
    type: stateless
    in: $left
    out:
      - {topic: $out, where: in.value.id > 2, key: in.key, value: {id: in.value.id}}
      - {topic: $out, explode: in.value.items, where: item <> 'x', key: item, value: {id: CAST(item AS BIGINT)}}
  - name: clean
    type: stateless
    in: "*.right.rows"
    out: "{topic}.clean"
    key: in.key
    value: in.value
"""


def outputs(out: str, record: Record) -> list[tuple[str, str, Any, Any]]:
    value = record.value
    first = [(out, "fan", record.key, {"id": value["id"]})] if (value["id"] or 0) > 2 else []
    each = [item for item in value["items"] or () if item is not None and item != "x"]
    return [*first, *((out, "fan/2", item, {"id": int(item)}) for item in each)]


def produced(it: Mini, chance: random.Random, count: int, offset: int) -> list[Record]:
    values = [
        {
            "id": chance.choice([None, 1, 2, 3, 4]),
            "v": "v",
            "items": chance.choice([None, [], ["1"], ["2", "x", "3"], ["x"], [None, "4"], ["5", "6", "7", "8"]]),
        }
        for _ in range(count)
    ]
    times = [1_700_000_000_000 + offset + at for at in range(count)]
    it.send(it.left, *((f"k{offset + at}", value) for at, value in enumerate(values)), times=times)
    return [Record(it.left, 0, offset + at, times[at], f"k{offset + at}", value) for at, value in enumerate(values)]


@pytest.mark.slow
@pytest.mark.parametrize("small", [True, False])
def test_a_record_makes_all_its_outputs_in_one_commit(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    monkeypatch.setattr(positions, "SMALL", positions.SMALL if small else 0)
    it = mini(services, spark, tmp_path, unique, FILE)
    model = Model((it.left, it.right), [Fan("fan", it.left, lambda _: True, lambda record: outputs(it.out, record))])
    chance = random.Random(1)
    for first, end in itertools.pairwise([0, 40, 41, 100]):
        model.batch(produced(it, chance, end - first, first))
        assert it.step() is not None
    wanted = [(out.rule, out.key, out.value, out.source) for out in model.outputs[it.out]]
    assert [
        (row["rule"], row["key"], row["value"], tuple(tuple(place.values()) for place in row["source"]))
        for row in it.staged()
    ] == wanted
    assert {(it.left, 0, name): count for name, count in it.classes(it.left).items()} == model.totals()
    assert min(it.classes(it.left)["done"], it.classes(it.left)["dropped"]) > 10
    last = trace_rows(it.pipeline, it.out, 0, len(wanted) - 1)
    assert [(each["role"], each["offset"]) for each in last[1:]] == [("in", wanted[-1][3][0][2])]

    # A pair has an output in each of two topics, one of them for each element, beside the records that are passed through.
    whole = {"id": 1, "v": "v", "items": ["a"]}
    it.send(it.left, ("p", {"id": 9, "v": "pair", "items": ["a"]}), ("bad", {"id": 3, "v": "v", "items": ["1", "no"]}))
    it.send(it.right, ("q", whole), ("p", {"id": 9, "v": "pair", "items": ["b"]}), ("gone", None))
    assert it.step() is not None
    assert it.values()[len(wanted) :] == [{"id": 9}]
    assert it.values(f"{it.left}.clean") == [{"id": 9, "v": "a"}, {"id": 9, "v": "b"}]
    assert it.values(f"{it.right}.clean") == [whole]
    assert it.classes(it.right) == {"done": 2, "dropped": 1}
    assert it.classes(it.left)["quarantined"] == 1
    assert [entry["rule"] for entry in it.ledger("quarantined")] == ["fan/2"]
    for topic in (it.out, f"{it.left}.clean", f"{it.right}.clean"):
        it.publish(topic)
    assert [result for result in run_all(it.pipeline) if result.severity == "error" and not result.passed] == []
    [sql] = [each.sql for each in explain_rules(it.pipeline) if each.name == "fan/2"]
    record = "SELECT 'fan' AS rule, 1 AS kafka, 'k' AS key, named_struct('items', array('1')) AS value"
    spark.sql(f"EXPLAIN WITH `{it.left}` AS ({record}) {sql}")


@pytest.mark.slow
def test_the_condition_of_an_output_is_a_condition(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, FILE.replace("where: in.value.id > 2", "where: in.value.id"))
    it.send(it.left, {"id": 3, "v": "v", "items": []})
    place = f"rule fan, where of output {it.out}: in.value.id is bigint; it must be a condition"
    with pytest.raises(EtlError, match=re.escape(place)):
        it.step()


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            "CAST(item AS BIGINT)",
            "item.sku",
            "rule fan/2, value.id: (item.sku): an element of the array is string, and has no fields. Write item alone, or explode"
            " an array of structs.",
        ),
        ("item <> 'x'", "item.sku > 0", "(item.sku > 0): an element of the array is string, and has no fields."),
        ("id: in.value.id}}", "id: in.value.id.no}}", "(in.value.id.no): in.value.id is bigint, and has no fields."),
    ],
)
def test_a_field_of_what_has_no_fields_is_told_with_its_cure(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, old: str, new: str, text: str
) -> None:
    it = mini(services, spark, tmp_path, unique, FILE.replace(old, new))
    it.send(it.left, {"id": 3, "v": "v", "items": ["1"]})
    with pytest.raises(EtlError, match=re.escape(text)):
        it.step()
