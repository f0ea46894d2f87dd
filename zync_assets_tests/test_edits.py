"""Edits of a pipeline file between two runs: every step, check and command goes on, and no record is lost or numbered twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from zync_assets.assets import facts, sensor
from zync_assets.assets.names import Names
from zync_assets.cli.main import main
from zync_assets.errors import ZyncError
from zync_assets.etl.retries import NOTHING, Retry
from zync_assets.kafka.reader import read_range
from zync_assets.kafka.topics import create_topic
from zync_assets.local.services import Services
from zync_assets.runner import etl_all, rebuild_all
from zync_assets_tests.mini import Mini, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Make = Callable[..., Mini]


@pytest.fixture
def make(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Make:
    """``make(text)``: a pipeline with topics of its own."""

    def made(text: str) -> Mini:
        return mini(services, spark, tmp_path, unique, text)

    return made


def given(
    topic: str, pool: str = "Raw", more: str = "value-format: json, schema: 'op string, id bigint, v string'"
) -> str:
    return f"  - {{topic: {topic}, pool: {pool}, key-format: string, {more}}}\n"


def made(topic: str = "$out", pool: str = "Staging", form: str = "json") -> str:
    return f"  - {{topic: {topic}, pool: {pool}, key-format: string, value-format: {form}, create: {{}}}}\n"


def copy(name: str, topic: str, where: str = "true", out: str = "$out") -> str:
    return (
        f'  - {{name: {name}, type: stateless, in: {topic}, where: "{where} AND value IS NOT NULL", out: {out}, key: in.key,'
        " value: {l: in.value.v, r: CAST(NULL AS STRING)}}\n"
    )


def join(name: str | None, on: str = "id", where: str = "true", right: str = "$right") -> str:
    called = "" if name is None else f"name: {name}, "
    return (
        f'  - {{{called}type: denorm, left: $left, right: {right}, where: "value IS NOT NULL AND {where}", out: $out,'
        f" join-on: left.value.{on} = right.value.{on}, key: left.key, value: {{l: left.value.v, r: right.value.v}}}}\n"
    )


def text(*rules: str, inputs: str = given("$left") + given("$right"), outputs: str = made()) -> str:
    return f"\ninputs:\n{inputs}outputs:\n{outputs}transforms:\n{''.join(rules)}"


def settle(it: Mini, retry: Retry = NOTHING) -> None:
    """A run of every step; then all that looks at the lake, the sensor too."""
    it.ingest()
    list(etl_all(it.pipeline, lambda: it.spark, retry))
    for output in it.pipeline.outputs:
        it.publish(output.topic)
    for command in ("check", "status"):
        said(it, command)
    looked = facts.gather(it.pipeline)
    assert looked.problems == {}
    assert list(facts.due_steps(Names(it.pipeline), looked)) == []
    list(facts.grids(Names(it.pipeline), looked))
    list(sensor.asset_positions(Names(it.pipeline), looked))


def said(it: Mini, command: str, *arguments: str) -> list[dict[str, Any]]:
    found = CliRunner().invoke(main, [command, str(it.pipeline.path), *arguments, "--format", "json"])
    assert found.exit_code == 0, (command, found.output, found.exception)
    return [json.loads(line) for line in found.stdout.splitlines()]


def waits(it: Mini) -> list[tuple[str, str, str]]:
    return [(each["rule"], each["key"], each["why"]) for each in said(it, "pending")]


def pairs(it: Mini, topic: str | None = None) -> list[tuple[str | None, str | None]]:
    """The (key, value) pairs in staging. Asserts that the topic holds the same records."""
    staged = it.staged(topic)
    assert [found["kafka"]["offset"] for found in staged] == list(range(len(staged)))
    sent = [
        json.loads(value)
        for batch in read_range(it.pipeline.kafka, topic or it.out, 0, 0, len(staged))
        for value in batch.column("value").to_pylist()
    ]
    assert [found["value"] for found in staged] == sent
    return [(found["value"]["l"], found["value"]["r"]) for found in staged]


@pytest.mark.slow
def test_a_rule_with_a_former_name_keeps_the_records_that_wait(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """The new rule takes them in the next batch, although nothing else is new."""
    it = make(text(join("one")))
    it.send(it.left, ("a", row(1, "a")), ("b", row(2, "b")))
    it.send(it.right, ("a", row(1, "A")))
    settle(it)
    assert waits(it) == [("one", "b", f"no counterpart in {it.right} yet")]
    it = it.edited(text(join("two").replace("name: two", "name: two, was: one")))
    assert len(list(facts.due_steps(Names(it.pipeline), facts.gather(it.pipeline)))) == 1
    settle(it)
    assert waits(it) == [("two", "b", f"no counterpart in {it.right} yet")]
    assert "rule two was one." in caplog.text
    it.send(it.right, ("b", row(2, "B")))
    settle(it)
    assert (pairs(it), waits(it)) == ([("a", "A"), ("b", "B")], [])


@pytest.mark.slow
def test_a_join_moves_to_another_pool_by_a_rebuild(make: Make) -> None:
    both = made() + made("$out.more", "Other")
    it = make(text(join("one"), copy("rest", "$left", "value.op = 'x'", "$out.more"), outputs=both))
    more = f"{it.out}.more"
    it.send(it.left, ("a", row(1, "a")), ("b", row(2, "b")))
    it.send(it.right, ("a", row(1, "A")))
    settle(it)
    moved = join("two").replace("name: two", "name: two, was: one").replace("out: $out", "out: $out.more")
    it = it.edited(text(copy("other", "$left", "value.op = 'y'"), moved, outputs=both))
    with pytest.raises(
        ZyncError, match=r"rule two was one of pool Staging, where 1 records wait for it.* zync rebuild"
    ):
        list(etl_all(it.pipeline, lambda: it.spark))
    list(rebuild_all(it.pipeline, lambda: it.spark, topics=[more]))
    settle(it)
    it.send(it.right, ("b", row(2, "B")))
    settle(it)
    [batch] = read_range(it.pipeline.kafka, more, 0, 0, 2)
    assert [json.loads(value)["r"] for value in batch.column("value").to_pylist()] == ["A", "B"]


@pytest.mark.slow
def test_rules_are_renamed_added_back_moved_and_removed(make: Make) -> None:
    it = make(text(join("one"), copy("rest", "$left", "value.op = 'x'")))
    it.send(it.left, ("a", row(1, "a")), ("b", row(2, "b")))
    it.send(it.right, ("a", row(1, "A")))
    settle(it)
    it = it.edited(text(join("two")))
    it.send(it.right, ("b", row(2, "B")))
    settle(it)
    gone = "the pipeline file has no denorm or group rule one of this topic and pool any more"
    assert waits(it) == [("one", "b", gone), ("two", "b", f"no counterpart in {it.left} yet")]
    (age,) = [each for each in said(it, "check") if each["check"] == "pending_age"]
    assert it.pipeline.command("etl", "--retry-unmatched") in age["summary"]
    it = it.edited(text(copy("rest", "$left", "value.op = 'x'"), join("one")))
    it.send(it.left, ("c", row(3, "c", op="x")))
    settle(it)
    assert pairs(it) == [("a", "A"), ("c", None)]
    settle(it, Retry(unmatched=True))
    assert pairs(it) == [("a", "A"), ("c", None), ("b", "B")]
    it = it.edited(text(copy("one", "$right")))
    settle(it)
    it.send(it.right, ("d", row(4, "D")))
    it.send(it.left, ("d", row(4, "d")))
    settle(it)
    it = it.edited(text(join("one")))
    settle(it)
    assert pairs(it)[3:] == [("D", None)]
    assert waits(it) == [("one", "d", f"no counterpart in {it.right} yet")]


@pytest.mark.slow
def test_what_waits_for_a_rule_without_a_name_goes_to_the_rule_that_takes_it_when_rules_are_moved(make: Make) -> None:
    first, second = join(None, "id", "value.op = 'c'"), join(None, "v", "value.op = 'u'")
    it = make(text(first, second))
    it.send(it.left, ("a", row(1, "a")), ("b", row(2, "b", op="u")))
    settle(it)
    it = it.edited(text(second, first))
    # By its id the first is another rule's; by its text it is nobody's.
    it.send(it.right, ("a", row(1, "A")), ("b", row(9, "b", op="u")))
    settle(it)
    assert pairs(it) == [("a", "A"), ("b", "b")]
    assert it.classes(it.left) == it.classes(it.right) == {"done": 2}


@pytest.mark.slow
def test_outputs_are_removed_added_back_renamed_moved_and_encoded_otherwise(make: Make) -> None:
    two, rules = made() + made("$out.more"), (copy("l", "$left"), copy("r", "$right", out="$out.more"))
    it = make(text(*rules, outputs=two))
    more = f"{it.out}.more"
    it.send(it.left, row(1, "a"))
    it.send(it.right, row(1, "A"))
    settle(it)
    it = it.edited(text(rules[0]))
    it.send(it.left, row(2, "b"))
    it.send(it.right, row(2, "B"))
    settle(it)
    assert pairs(it) == [("a", None), ("b", None)]
    it = it.edited(text(*rules, outputs=two))
    settle(it)
    assert pairs(it, more) == [("A", None), ("B", None)]
    it = it.edited(text(rules[0], rules[1].replace("$out.more", "$out.new"), outputs=made() + made("$out.new")))
    it.send(it.right, row(3, "C"))
    settle(it)
    assert pairs(it, f"{it.out}.new") == [("C", None)]
    moved = it.edited(text(*rules, outputs=made() + made("$out.more", "Other")))
    with pytest.raises(ZyncError, match=f"topic {more} holds records already"):
        list(etl_all(moved.pipeline, lambda: it.spark))
    it = it.edited(text(*rules, outputs=made(form="avro") + made("$out.more")))
    it.send(it.left, row(4, "d"))
    settle(it)
    assert [found["value"]["l"] for found in it.staged()] == ["a", "b", "d"]
    assert it.classes(it.left) == {"done": 3}
    assert it.classes(it.right) == {"done": 3}


@pytest.mark.slow
def test_inputs_are_removed_added_back_renamed_moved_and_decoded_otherwise(make: Make) -> None:
    both = text(join("join"), copy("rest", "$left", "value.op = 'x'"))
    it = make(text(join("join", where="value.op <> 'x'"), copy("rest", "$left")))
    it.send(it.left, ("a", row(1, "a")), ("b", row(2, "b")))
    it.send(it.right, ("a", row(1, "A")), ("z", row(9, "Z")))
    settle(it)
    it = it.edited(text(copy("rest", "$left"), inputs=given("$left")))
    it.send(it.left, ("c", row(3, "c")))
    it.send(it.right, ("b", row(2, "B")))
    settle(it)
    # A record of the removed input can't be read.
    assert {(rule, key) for rule, key, _ in waits(it)} == {("join", "b"), ("join", None)}
    assert [each["role"] for each in said(it, "trace", it.out, "0")] == ["output", "source", "source"]
    assert said(it, "query", f"select count(*) AS n from Staging.`{it.out}`") == [{"n": 2}]
    it = it.edited(both)
    settle(it)
    assert pairs(it) == [("a", "A"), ("c", None), ("b", "B")]
    other = f"{it.right}.new"
    create_topic(it.pipeline.kafka, other, 1, 1, {})
    it.send(other, ("d", row(4, "D")))
    it.send(it.left, ("d", row(4, "d")))
    it = it.edited(text(join("join", right=other), inputs=given(other) + given("$left")))
    settle(it)
    assert pairs(it)[3:] == [("d", "D")]
    assert [(rule, key) for rule, key, _ in waits(it)] == [("join", None)]
    moved = it.edited(text(copy("rest", "$left"), inputs=given("$left", "Other")))
    with pytest.raises(ZyncError, match=f"Other.{it.left}: partition 0 was transformed up to offset 4"):
        moved.ingest()
    it = it.edited(text(copy("rest", "$left"), inputs=given("$left", more="value-format: bytes")))
    it.send(it.left, ("e", row(5, "e")))
    with pytest.raises(
        ZyncError, match=f"topic {it.left}: .*value: binary does not fit .* give the input another pool"
    ):
        it.ingest()
    it = it.edited(text(copy("rest", "$left"), inputs=given("$left")))
    settle(it)
    assert pairs(it)[4:] == [("e", None)]
