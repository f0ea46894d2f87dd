"""The components of a pool's rules, and a batch with a query for each of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zync_assets import pipeline_file
from zync_assets.audit.guard import exactly_once_done_coverage
from zync_assets.etl.rules import results
from zync_assets.etl.rules.results import Component
from zync_assets.kafka.topics import create_topic
from zync_assets.local.services import Services
from zync_assets_tests.mini import Mini, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAMES = ("left", "right", "third", "fourth", "fifth")
FORM = 'pool: Raw, key-format: string, value-format: json, schema: "op string, id bigint, v string"'
OUT = "pool: Staging, key-format: string, value-format: json, create: {replication-factor: 1}"
TEXT = f"""
inputs:
  - {{topic: $left, {FORM}}}
  - {{topic: $right, {FORM}}}
  - {{topic: $left.third, unmatched: drop, {FORM}}}
  - {{topic: $left.fourth, {FORM}}}
  - {{topic: $left.fifth, {FORM}}}
outputs:
  - {{topic: $out, {OUT}}}
  - {{topic: $out.pairs, {OUT}}}
  - {{topic: $out.numbers, {OUT}}}
  - {{topic: $out.last, coalesce: true, {OUT}}}
transforms:
  - {{name: join, type: denorm, left: $left, right: $right, join-on: left.value.id = right.value.id, out: $out, key: left.key,
     where: "value.op in ('c', 'u')", value: {{id: left.value.id, l: left.value.v, r: right.value.v}}}}
  - {{name: change, type: stateless, in: $left, where: value.op = 'x', out: $out, key: in.key,
     value: {{id: in.value.id, l: in.value.v, r: "'changed'"}}}}
  - {{name: pair, type: denorm, left: $left.third, right: $left.fourth, join-on: left.value.id = right.value.id,
     where: value.op = 'c', out: $out.pairs, key: left.key, value: {{id: left.value.id, v: right.value.v}}}}
  - {{name: erase, type: stateless, in: $left.third, where: value.op = 'd', out: $out.pairs, key: in.key, value: null}}
  - {{name: number, type: stateless, in: $left.fifth, where: value.op = 'n', out: $out.numbers, key: in.key,
     value: {{n: CAST(in.value.v AS INT)}}}}
  - {{name: last, type: stateless, in: $left.fifth, where: value.op = 'l', out: $out.last, key: in.key, value: {{v: in.value.v}}}}
"""


def test_rules_that_share_a_topic_are_one_component(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pipeline.yaml"
    header = f'name: some\nkafka: {{bootstrap.servers: "localhost:9"}}\nlake: {tmp_path / "lake"}\n'
    file.write_text(header + TEXT.replace("$left", "in").replace("$right", "in.second").replace("$out", "out"))
    model = pipeline_file.load(file)
    topics = [*(item.topic for item in model.inputs), "of-no-rule"]
    monkeypatch.setattr(results, "MOST_TOPICS", 1)
    first = Component(frozenset({"in", "in.second"}), frozenset({"out"}))
    second = Component(frozenset({"in.third", "in.fourth"}), frozenset({"out.pairs"}))
    third = Component(frozenset({"in.fifth"}), frozenset({"out.numbers", "out.last"}))
    alone = Component(frozenset({"of-no-rule"}), frozenset())
    assert results.components(model.rules, topics) == [first, second, third, alone]
    monkeypatch.setattr(results, "MOST_TOPICS", 6)
    assert results.components(model.rules, topics) == [first | second, third | alone]
    assert results.one_component(model.rules, topics) == replace(first | second | third | alone, views=True)


@pytest.fixture(params=[1, pytest.param(1000, marks=pytest.mark.slow)])
def it(
    request: pytest.FixtureRequest,
    services: Services,
    spark: SparkSession,
    tmp_path: Path,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Mini:
    """A pipeline. Its batches have a query for each component in the first case, and a single query in the second."""
    monkeypatch.setattr(results, "MOST_TOPICS", request.param)
    made = mini(services, spark, tmp_path, unique, TEXT)
    for name in NAMES[2:]:
        create_topic(made.pipeline.kafka, f"{made.left}.{name}", 1, 1, {})
    return made


def outputs(it: Mini, topic: str) -> list[Any]:
    return [(found["key"], found["value"]) for found in it.staged(it.out + topic)]


@pytest.mark.slow
@pytest.mark.usefixtures("of_each_size")
def test_a_batch_of_several_queries_is_one_of_a_single_query(it: Mini) -> None:
    """Records that pair, wait, fail, go to no rule, or follow a pending record of their source row."""
    third, fourth, fifth = (f"{it.left}.{name}" for name in NAMES[2:])
    it.send(
        it.left,
        ("a", row(1, "l1", op="c")),
        ("b", row(2, "l2", op="c")),
        ("b", row(2, "later", op="x")),
        row(9, op="?"),
    )
    it.send(it.right, row(1, "r1", op="c"))
    # The deletion of row x ends the row's record that waits, and has no output itself.
    it.send(third, ("c", row(1)), ("d", row(2)), ("gone", None), ("x", row(7)), ("x", row(7, op="d")))
    it.send(fourth, row(1, "v1"), row(3, "v3"), b"{ garbage")
    it.send(fifth, row(1, "7", op="n"), row(2, "none", op="n"), ("k", row(3, "x", op="l")), ("k", row(4, "y", op="l")))
    it.step()
    assert outputs(it, "") == [("a", {"id": 1, "l": "l1", "r": "r1"})]
    assert outputs(it, ".pairs") == [("c", {"id": 1, "v": "v1"})]
    assert outputs(it, ".numbers") == [("k0", {"n": 7})]
    assert outputs(it, ".last") == [("k", {"v": "y"})]
    assert it.classes(it.left) == {"done": 1, "pending": 2, "unmatched": 1}
    assert it.classes(it.right) == {"done": 1}
    assert it.classes(third) == {"done": 3, "pending": 1, "dropped": 1}
    assert it.classes(fourth) == {"done": 1, "pending": 1, "quarantined": 1}
    assert it.classes(fifth) == {"done": 3, "quarantined": 1}
    it.send(it.right, row(2, "r2", op="c"))
    it.send(third, ("e", row(3)))
    it.step()
    assert outputs(it, "")[1:] == [
        ("b", {"id": 2, "l": "l2", "r": "r2"}),
        ("b", {"id": 2, "l": "later", "r": "changed"}),
    ]
    assert outputs(it, ".pairs")[1:] == [("e", {"id": 3, "v": "v3"})]
    # The rules of all other components have no new record.
    it.send(fifth, row(5, "8", op="n"), ("k", None))
    it.step()
    assert outputs(it, ".numbers")[1:] == [("k0", {"n": 8})]
    assert it.classes(fifth) == {"done": 4, "dropped": 1, "quarantined": 1}
    check = exactly_once_done_coverage(it.pipeline, "Staging")
    assert check.passed, check.summary
