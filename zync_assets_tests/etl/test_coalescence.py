"""Merged outputs: what a target folds of them is what it folds of all changes, and each input is still in an output."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import StructType

from zync_assets.checks.output_checks import run_all
from zync_assets.etl.coalescence import with_merged_outputs
from zync_assets.etl.rules.kind import OutputColumns
from zync_assets.local.services import Services
from zync_assets.pipeline import UNAVAILABLE_VALUE, Rule, Side
from zync_assets_tests.mini import BOTH, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FIELDS = ({"a", "b", "c"}, {"a", "b"}, {"c"}, set[str]())
"""The fields of the rules; the last one makes tombstones."""


@dataclass(frozen=True)
class Change:
    """An output before it is merged. ``value``: None for a tombstone; UNAVAILABLE_VALUE for a field that was not sent."""

    at: int
    rule: int
    key: str | None
    value: dict[str, str | None] | None

    @property
    def fields(self) -> dict[str, str | None]:
        return {name: text for name, text in (self.value or {}).items() if text != UNAVAILABLE_VALUE}


def changes(seed: int, count: int) -> list[Change]:
    chance, made = random.Random(seed), list[Change]()
    for at in range(count):
        rule = chance.randrange(4)
        texts = [None, f"v{at}", f"v{at}", UNAVAILABLE_VALUE]
        value = {name: chance.choice(texts) for name in sorted(FIELDS[rule])} if FIELDS[rule] else None
        made.append(Change(at, rule, chance.choice([None, *map(str, range(count // 5))]), value))
    return made


def merged(each: Sequence[Change]) -> list[tuple[int, list[int], str | None, dict[str, str | None] | None]]:
    """Rule, sources, key and value of the outputs, in their order."""
    made: list[tuple[int, list[int], str | None, dict[str, str | None] | None]] = []
    last: dict[str, int] = {}
    for change in each:
        place = last.get(change.key or "")
        before = None if place is None or change.key is None else made[place]
        after = _merge(before, change) if before is not None else None
        if place is not None and after is not None:
            made[place] = after
        else:
            made.append((change.rule, [change.at], change.key, change.value))
            if change.key is not None:
                last[change.key] = len(made) - 1
    return sorted(made, key=lambda item: item[1][-1])


def _merge(before: tuple[int, list[int], Any, Any], change: Change) -> tuple[int, list[int], Any, Any] | None:
    rule, sources, key, value = before
    both = [*sources, change.at]
    if change.value is None:
        return change.rule, both, key, None
    if value is None:
        whole = set(change.fields) == FIELDS[0]
        return (change.rule, both, key, change.value) if whole else None
    if FIELDS[change.rule] >= FIELDS[rule]:
        return change.rule, both, key, {**change.value, **{k: v for k, v in value.items() if k not in change.fields}}
    if FIELDS[rule] >= FIELDS[change.rule]:
        return rule, both, key, {**value, **change.fields}
    return None


def test_changes_of_a_key_are_merged_as_in_the_model(spark: SparkSession) -> None:
    each = changes(1, 400)
    whole = StructType.fromDDL("a string, b string, c string")
    text = StructType.fromDDL("k string")["k"].dataType
    rules = [Rule("stateless", f"r{at}", (Side("in", "T"),), "out", None, None) for at in range(4)]
    own = [StructType([item for item in whole if item.name in fields]) for fields in FIELDS]
    targets = {
        rule.name: OutputColumns("", ("key:out", text, text), ("value:out", kind, whole))
        for rule, kind in zip(rules, own, strict=True)
    }
    rows = [
        (
            "out",
            item.rule,
            (item.at,),
            [(0, 0, item.at)],
            0,
            item.at % 2,
            item.key,
            item.value and dict.fromkeys("abc") | item.value,
        )
        for item in each
    ]
    rows.append(("pending", 0, (1000,), [(0, 0, 1000)], 0, 0, None, None))
    source = "array<struct<place: int, partition: int, offset: bigint>>"
    frame = spark.createDataFrame(
        rows,
        f"kind string, rule int, ord struct<offset: bigint>, source {source}, last int, waited int, `key:out` string,"
        " `value:out` struct<a: string, b: string, c: string>",
    ).selectExpr("*", "CAST(NULL AS array<boolean>) AS olds")
    found = with_merged_outputs(frame, rules, "out", targets, UNAVAILABLE_VALUE).sort("ord").collect()
    made = [
        (
            item["rule"],
            [place["offset"] for place in item["source"]],
            item["key:out"],
            item["value:out"] and {name: item["value:out"][name] for name in sorted(FIELDS[item["rule"]])},
        )
        for item in found
        if item["kind"] == "out"
    ]
    wanted = merged(each)
    assert made == wanted
    assert len(wanted) < 330
    assert all(item["last"] == len(item["source"]) - 1 for item in found)
    places = [place["offset"] % 2 == 1 for item in found if item["kind"] == "out" for place in item["source"]]
    assert [old for item in found if item["kind"] == "out" for old in item["olds"] or [item["waited"] == 1]] == places
    assert [item["source"][0]["offset"] for item in found if item["kind"] == "pending"] == [1000]


RULES = """
transforms:
  - name: whole
    type: denorm
    left: $left
    right: $right
    where: {left: value.op = 'c', right: value.op = 'c'}
    join-on: left.value.id = right.value.id
    out: $out
    key: left.key
    value: {id: left.value.id, l: left.value.v, r: right.value.v}
  - {name: part, type: stateless, in: $right, where: value.op = 'u', out: $out, key: in.key, value: {r: in.value.v}}
  - {name: gone, type: stateless, in: $left, where: value.op = 'd', out: $out, key: in.key, value: null}
"""


def test_a_batch_has_one_output_of_a_key_and_the_account_is_whole(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    text = BOTH.replace("{topic: $out,", "{topic: $out, coalesce: true,") + RULES
    it = mini(services, spark, tmp_path, unique, text)
    it.send(it.left, ("a", row(1, "l")), ("b", row(2, "l")), times=[1_700_000_000_000] * 2)
    it.send(it.right, ("a", row(1, "1")), ("a", row(1, "2", "u")), ("a", row(1, "3", "u")))
    assert it.step() is not None
    assert it.values() == [{"id": 1, "l": "l", "r": "3"}]
    assert it.classes(it.right) == {"done": 3}
    # The next batch has a change of another batch's record beside a new one, and a delete.
    it.send(it.right, ("b", row(2, "1")), ("b", row(2, "2", "u")), ("a", row(1, "4", "u")))
    it.send(it.left, ("a", row(1, "", "d")), times=[1_700_000_010_000])
    assert it.step() is not None
    assert [(item["key"], item["value"], len(item["source"])) for item in it.staged()[1:]] == [
        ("b", {"id": 2, "l": "l", "r": "2"}, 3),
        ("a", None, 2),
    ]
    assert it.classes(it.left) == {"done": 3}
    it.publish()
    assert [result for result in run_all(it.pipeline) if result.severity == "error" and not result.passed] == []


BAD = """
transforms:
  - {name: whole, type: stateless, in: $left, where: value.op = 'c', out: $out, key: in.key,
     value: {id: in.value.id, z: "IF(in.value.id < 0, double('NaN'), 1D)", t: "CAST(unhex(in.value.v) AS STRING)"}}
  - {name: part, type: stateless, in: $left, where: value.op = 'u', out: $out, key: in.key, value: {id: in.value.id}}
"""


@pytest.mark.parametrize("each", [pytest.param(1, marks=pytest.mark.slow), 30])
def test_a_change_that_can_not_be_encoded_costs_itself_wherever_batches_are_cut(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, each: int
) -> None:
    """However many changes of its key follow, and also if they set its fields again."""
    text = BOTH.replace("{topic: $out,", "{topic: $out, coalesce: true,") + BAD
    it = mini(services, spark, tmp_path, unique, text)
    records = [("a", row(-1, "61")), ("a", row(2, "61")), ("a", row(3, "FF")), ("a", row(4, "", "u"))]
    records += [("b", row(-1, "61")), *(("b", row(at, "", "u")) for at in range(5 if each == 1 else 26))]
    for first in range(0, len(records), each):
        it.send(it.left, *records[first : first + each])
        it.step()
    rows: dict[str, dict[str, Any]] = {}
    for item in it.staged():
        fields = item["value"] if item["rule"] == "whole" else {"id": item["value"]["id"]}
        rows[item["key"]] = {**rows.get(item["key"], {}), **fields}
    assert rows == {"a": {"id": 4, "z": 1.0, "t": "a"}, "b": {"id": records[-1][1]["id"]}}
    bad = it.ledger("quarantined")
    assert [(entry["first"], entry["rule"]) for entry in bad] == [(0, "whole"), (2, "whole"), (4, "whole")]
    assert it.classes(it.left) == {"done": len(records) - 3, "quarantined": 3}


@pytest.mark.slow
@pytest.mark.parametrize("each", [1, 9])
def test_a_change_whose_partition_by_fails_costs_itself_wherever_batches_are_cut(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, each: int
) -> None:
    text = BOTH.replace("{topic: $out,", '{topic: $out, coalesce: true, partition-by: "6 DIV value.id",')
    text = text.replace("factor: 1}", "factor: 1, partitions: 3}")
    rule = "  - {name: copy, type: stateless, in: $left, out: $out, key: in.key, value: {id: in.value.id, v: in.value.v}}\n"
    it = mini(services, spark, tmp_path, unique, f"{text}transforms:\n{rule}")
    records = [("a", row(id, v)) for id, v in ((1, "1"), (0, "2"), (2, "3"), (0, "4"))] + [("b", row(0, "5"))]
    for first in range(0, len(records), each):
        it.send(it.left, *records[first : first + each])
        it.step()
    assert it.classes(it.left) == {"done": 2, "quarantined": 3}
    assert [entry["first"] for entry in it.ledger("quarantined")] == [1, 3, 4]
    assert {item["key"]: item["value"] for item in it.staged()} == {"a": {"id": 2, "v": "3"}}


def test_changes_that_together_are_too_large_are_several_outputs(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    text = BOTH.replace("{topic: $out,", "{topic: $out, coalesce: true,")
    text = text.replace("factor: 1}", "factor: 1, config: {max.message.bytes: 2000}}")
    rule = "  - {name: %s, type: stateless, in: $%s, out: $out, key: in.key, value: {id: in.value.id, %s}}\n"
    whole = rule % ("whole", "left", "l: in.value.v, r: \"repeat('r', CAST(in.value.id AS INT))\"")
    it = mini(
        services, spark, tmp_path, unique, f"{text}transforms:\n{whole}{rule % ('part', 'right', 'l: in.value.v')}"
    )
    it.send(it.left, ("a", row(150, "l")), ("b", row(10, "l")))
    it.send(it.right, ("a", row(150, "l" * 150)), ("b", row(10, "m" * 40)))
    it.step()
    assert [(item["key"], item["rule"]) for item in it.staged()] == [("a", "whole"), ("a", "part"), ("b", "whole")]


def test_keys_of_other_fields_are_other_keys(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """{id: 1} and {id: 1, v: null} are two rows of a target."""
    both = BOTH.replace(
        "{topic: $out, pool: Staging, key-format: string", "{topic: $out, coalesce: true, pool: Staging"
    )
    rule = "  - {name: %s, type: stateless, in: $%s, out: $out, key: %s, value: {v: in.value.op}}\n"
    rules = rule % ("one", "left", "{id: in.value.id}") + rule % ("two", "right", "{id: in.value.id, v: in.value.v}")
    it = mini(services, spark, tmp_path, unique, f"{both}transforms:\n{rules}")
    it.send(it.left, row(1, "l"), row(1, "m", "u"))
    it.send(it.right, row(1, None), row(1, None, "u"))
    it.step()
    assert [(item["rule"], item["value"]["v"]) for item in it.staged()] == [("one", "u"), ("two", "u")]
