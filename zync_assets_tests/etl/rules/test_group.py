"""Groups: the engine gathers the records that the model gathers, however the batches are cut."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zync_assets.audit.guard import exactly_once_done_coverage
from zync_assets.checks.output_checks import run_all
from zync_assets.cli.records import pending_rows, trace_rows
from zync_assets.errors import EtlError
from zync_assets.etl import commit, positions
from zync_assets.etl.rules import explain_rules
from zync_assets.etl.rules.group import aggregate_types
from zync_assets.etl.rules.kind import Ordering, in_frame
from zync_assets.local.services import Services
from zync_assets.pipeline import Rule
from zync_assets.pipeline_file import load
from zync_assets_tests.etl.rules.engine import Engine, frame, world
from zync_assets_tests.mini import BOTH, Mini, mini, row
from zync_assets_tests.model import Gather, Model, Record

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILE = """
kafka: {bootstrap.servers: "localhost:9092"}
inputs:
  - {topic: O, pool: Raw, format: json}
  - {topic: L, pool: Raw, format: json}
outputs:
  - {topic: Events, pool: Staging, format: json}
transforms:
  - name: event
    type: group
    records: {o: O, l: L}
    group-by: value.id
    complete-when: max(o.value.n) <= count_if(topic = 'L') OR bool_and(value.n > 3) AND count(*) > 1
    out: Events
    key: first(o).value.v
    value:
      sum: sum(value.n)
      least: min(l.value.n)
      count: count(l.value.v)
      some: bool_or(o.value.n = 2)
      lines: transform(list(l), item -> item.value.v)
      first: first(l).value.v
"""


def rule_of(folder: Path) -> Rule:
    path = folder / "shop.yaml"
    path.write_text(FILE)
    return load(path, {}).rules[0]


def value_of(group: Sequence[Record]) -> dict[str, Any]:
    lines = [record.value for record in group if record.topic == "L"]
    numbers = [record.value["n"] for record in group if record.value["n"] is not None]
    twos = [record.value["n"] == 2 for record in group if record.topic == "O" and record.value["n"] is not None]
    return {
        "sum": sum(numbers) if numbers else None,
        "least": min((line["n"] for line in lines if line["n"] is not None), default=None),
        "count": sum(line["v"] is not None for line in lines),
        "some": any(twos) if twos else None,
        "lines": [line["v"] for line in lines],
        "first": lines[0]["v"] if lines else None,
    }


def is_complete(group: Sequence[Record]) -> bool:
    wanted = [record.value["n"] for record in group if record.topic == "O" and record.value["n"] is not None]
    lines = sum(record.topic == "L" for record in group)
    large = [record.value["n"] > 3 for record in group if record.value["n"] is not None]
    return bool(wanted and max(wanted) <= lines) or (bool(large) and all(large) and len(group) > 1)


def key_of(group: Sequence[Record]) -> str | None:
    return next((record.value["v"] for record in group if record.topic == "O"), None)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_groups_are_those_of_the_model_wherever_batches_are_cut(spark: SparkSession, tmp_path: Path, seed: int) -> None:
    records, chance = world(seed, 600), random.Random(seed)
    rule = Gather(
        "event", ("O", "L"), "Events", lambda _: True, lambda it: it.value["id"], is_complete, key_of, value_of
    )
    model, at_once = Model(("O", "L"), [rule]), Model(("O", "L"), [rule])
    engine = Engine(spark, rule_of(tmp_path))
    cuts = [0, *sorted(chance.sample(range(1, len(records)), 3)), len(records)]
    for first, end in itertools.pairwise(cuts):
        model.batch(records[first:end])
        engine.batch(records[first:end])
        waiting = {place for place, name in model.classes.items() if name == "pending"}
        assert {record.place for record in engine.pending} == waiting
    at_once.batch(records)
    wanted = [(out.key, out.value, out.source) for out in model.outputs["Events"]]
    assert len(wanted) > 50
    assert max(len(source) for _, _, source in wanted) > 4
    assert engine.outputs == wanted == [(out.key, out.value, out.source) for out in at_once.outputs["Events"]]


RULES = """
transforms:
  - name: event
    type: group
    records: {l: $left, r: $right}
    where: {r: value.op <> 'x'}
    group-by: value.id
    complete-when: count_if(topic = '$right') = max(CAST(l.value.v AS INT))
    out: $out
    key: first(l).key
    value: {id: first(l).value.id, r: "transform(list(r), item -> item.value.v)", share: 12 DIV sum(CAST(r.value.v AS INT))}
  - {name: rest, type: stateless, in: $right, out: $out, key: in.key, value: {id: in.value.id}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("small", [True, False])
def test_a_group_waits_for_its_last_record_and_a_bad_record_costs_itself(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    monkeypatch.setattr(positions, "SMALL", positions.SMALL if small else 0)
    it = mini(services, spark, tmp_path, unique, BOTH + RULES)
    # Before the right topic has a schema, all records wait.
    it.send(it.left, ("a", row(1, "2")), ("b", row(2, "1")), ("c", row(3, "1")), ("n", row(None, "1")))
    assert it.step() is not None
    assert it.classes(it.left) == {"pending": 4}
    it.send(it.right, ("b", row(2, "4")), ("a", row(1, "1")), ("z", row(9, "", "x")), ("c", row(3, "zero")))
    assert it.step() is not None
    # What is no number is no member of a group.
    assert it.classes(it.left) == {"done": 1, "pending": 3}
    assert it.classes(it.right) == {"done": 2, "pending": 1, "quarantined": 1}
    # A group whose output fails waits without the record that completed it.
    it.send(it.right, ("c", row(3, "0")), ("a", row(1, "2")), ("c", row(3, "6")))
    assert it.step() is not None
    assert [item["value"] for item in it.staged() if item["rule"] == "event"] == [
        {"id": 2, "r": ["4"], "share": 3},
        {"id": 1, "r": ["1", "2"], "share": 4},
        {"id": 3, "r": ["6"], "share": 2},
    ]
    assert it.classes(it.left) == {"done": 3, "pending": 1}
    assert it.classes(it.right) == {"done": 5, "quarantined": 2}
    errors = [entry["text"] for entry in it.ledger("quarantined")]
    assert ["group-by" in errors[0], "value.share" in errors[1]] == [True, True], errors
    assert exactly_once_done_coverage(it.pipeline, "Staging").passed
    assert [each["why"] for each in pending_rows(it.pipeline, "Staging")] == ["null join key: nothing matches it"]
    offset = next(item["kafka"]["offset"] for item in it.staged() if item["value"]["id"] == 1)
    trace = trace_rows(it.pipeline, it.out, 0, offset)
    assert [(each["role"], each["offset"]) for each in trace[1:]] == [("l", 0), ("r", 1), ("r", 5)]
    it.publish()
    assert [result for result in run_all(it.pipeline) if result.severity == "error" and not result.passed] == []
    assert_sql(it, spark)


def assert_sql(it: Mini, spark: SparkSession) -> None:
    """The explained statement is one that Spark takes."""
    sql = next(each.sql for each in explain_rules(it.pipeline) if each.name == "event")
    assert "SELECT (`first(l)`.key) AS key" in sql
    record = (
        "SELECT 'event' AS rule, struct('t' AS topic) AS kafka, 'k' AS key, named_struct('id', 1, 'v', '1') AS value"
    )
    spark.sql(f"EXPLAIN WITH `{it.left}` AS ({record}), `{it.right}` AS ({record}) {sql}")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sum(value.n)", "sum(value.v)", "sum(value.v) is over string, and sum takes a number"),
        (
            "bool_or(o.value.n = 2)",
            "bool_or(o.value.n)",
            "bool_or(o.value.n) is over int, and bool_or takes a condition",
        ),
        (
            "max(o.value.n) <= count_if(topic = 'L') OR bool_and(value.n > 3) AND count(*) > 1",
            "count(*) + max(o.value.n)",
            "complete-when: `count(*)` + `max(o.value.n)` is bigint; it must be a condition",
        ),
    ],
)
def test_an_aggregate_of_a_wrong_type_is_an_error(
    spark: SparkSession, tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "shop.yaml"
    path.write_text(FILE.replace(old, new))
    [rule] = load(path, {}).rules
    frames: Mapping[str, DataFrame] = {
        side: in_frame(frame(spark, world(1, 20), old=False), side, Ordering({"O": 0, "L": 1})) for side in "ol"
    }
    with pytest.raises(EtlError) as raised:
        aggregate_types(rule, frames)
    assert message in str(raised.value)


FAILING = """
transforms:
  - name: event
    type: group
    records: {l: $left, r: $right}
    where: value.op = 'c'
    group-by: value.id
    complete-when: 10 DIV min(r.value.id) > 1 OR count_if(topic = '$left') > 1
    expire-after: 1h
    on-expire: emit
    out:
      - {topic: $out, key: first(l).key, value: {n: count(*), sum: sum(CAST(l.value.v AS BIGINT))}}
      - {topic: $out, key: first(l).key, value: {n: 12 DIV sum(CAST(l.value.v AS BIGINT))}}
"""


@pytest.mark.slow
def test_a_record_that_fails_in_its_group_costs_itself(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """In the condition, in an aggregate, and in the output. There are more of them than a search has jobs."""
    it = mini(services, spark, tmp_path, unique, BOTH + FAILING)
    largest = str(2**63 - 1)
    it.send(it.left, ("big", row(1, largest)), ("bigger", row(1, "1")), ("less", row(1, "-1")))
    it.send(it.right, ("zero", row(0)), ("other", row(2, "", "x")))
    it.send(it.left, *((f"none {at}", row(3, "0")) for at in range(60)), times=[1_700_000_000_100] * 60)
    assert it.step() is not None
    assert [(item["rule"], item["value"]) for item in it.staged()] == [
        ("event", {"n": 2, "sum": 2**63 - 2}),
        ("event/2", {"n": 0, "sum": None}),
    ]
    assert it.classes(it.left) == {"done": 2, "pending": 1, "quarantined": 60}
    assert it.classes(it.right) == {"quarantined": 1, "unmatched": 1}
    words = {entry["text"].partition(":")[0] for entry in it.ledger("quarantined")}
    assert words == {"aggregate", "complete-when", "value.n"}
    # The group that expires fails as a whole.
    it.send(it.left, ("none", row(4, "0")), ("late", row(9, "0")), times=[1_700_000_000_000, 1_700_010_000_000])
    assert it.step() is not None
    assert it.classes(it.left) == {"done": 2, "pending": 1, "quarantined": 62}
    assert exactly_once_done_coverage(it.pipeline, "Staging").passed
    it.publish()
    assert [result for result in run_all(it.pipeline) if result.severity == "error" and not result.passed] == []


BEGIN = """
transforms:
  - name: event
    type: group
    records: {l: $left}
    group-by: value.id
    complete-when: 10 DIV sum(CAST(value.v AS INT)) > 0 AND count(*) > 1
    expire-after: 60s
    on-expire: $action
    out: $out
    key: first(l).key
    value: {n: "10 DIV (count(*) - 1)"}
"""


@pytest.mark.slow
@pytest.mark.parametrize("action", ["emit", "drop"])
@pytest.mark.parametrize("each", [1, 9])
def test_a_group_waits_from_its_first_record_that_does_not_fail(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, action: str, each: int
) -> None:
    """The first record fails and begins no group. The group of the second one has time for the third, and alone would fail."""
    it = mini(services, spark, tmp_path, unique, BOTH + BEGIN.replace("$action", action))
    records = [(0, row(1, "0")), (50, row(1, "1")), (70, row(1, "1")), (71, row(2, "0")), (140, row(2, "1"))]
    for first in range(0, len(records), each):
        part = records[first : first + each]
        it.send(
            it.left, *(("k", value) for _, value in part), times=[1_700_000_000_000 + 1000 * time for time, _ in part]
        )
        it.step()
    assert [entry["first"] for entry in it.ledger("quarantined")] == [0, 3]
    assert it.values() == [{"n": 10}]
    assert it.classes(it.left) == {"done": 2, "pending": 1, "quarantined": 2}


SHARED = """
transforms:
  - name: pair
    type: denorm
    left: $left
    right: $right
    join-on: left.value.id = right.value.id
    out:
      - {topic: $out, where: left.value.v = 'first', key: left.key, value: {v: right.value.v}}
      - {topic: $out, key: left.key, value: {v: CAST(CAST(left.value.v AS BIGINT) AS STRING)}}
"""


@pytest.mark.slow
def test_a_pending_record_of_a_rule_with_several_outputs_leaves_its_rule(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """Whichever of the outputs it makes, or fails on."""
    it = mini(services, spark, tmp_path, unique, BOTH + SHARED)
    it.send(it.left, ("a", row(1, "7")), ("b", row(2, "bad")), ("c", row(3, "8")))
    it.send(it.right, ("x", row(9)))
    assert it.step() is not None
    it.send(it.right, ("a", row(1)), ("b", row(2)))
    assert it.step() is not None
    assert it.values() == [{"v": "7"}]
    assert {place: count for place, count in it.head.waiting.items() if count} == {
        ("pair", it.left): 1,
        ("pair", it.right): 2,
    }
    assert exactly_once_done_coverage(it.pipeline, "Staging").passed


SMALL = BOTH.replace("factor: 1}", "factor: 1, config: {max.message.bytes: 2000}}")
EXPIRES = "    expire-after: 10s\n    on-expire: emit\n"
UNSENT = """
transforms:
  - name: event
    type: group
    records: {l: $left}
    group-by: value.id
    complete-when: count(*) >= 2
    out: $out
    key: first(l).key
    value: {n: count(*), z: "IF(bool_or(value.v = 'nan'), double('NaN'), 1D)", all: "transform(list(l), it -> it.value.v)"}
"""


@pytest.mark.slow
@pytest.mark.parametrize("each", [1, 40])
def test_records_whose_groups_can_not_be_encoded_leave_wherever_batches_are_cut(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch, each: int
) -> None:
    """The record that completes such a group leaves it, be it for a number or for the size of the group's output."""
    monkeypatch.setattr(commit, "ROUNDS", 2)
    it = mini(services, spark, tmp_path, unique, SMALL + UNSENT)
    records = [("c", row(3, "large" * 500)), *[("c", row(3, "1"))] * 3]
    records += [("a", row(1, "nan")), ("b", row(2, "1")), ("b", row(2, "nan")), ("b", row(2, "2"))]
    records += [("a", row(1, "3"))] * (4 if each == 1 else 36)
    for first in range(0, len(records), each):
        it.send(it.left, *records[first : first + each])
        it.step()
    assert it.values() == [{"n": 2, "z": 1.0, "all": ["1", "2"]}]
    assert it.classes(it.left) == {"done": 2, "pending": 2, "quarantined": len(records) - 4}
    texts = [entry["text"] for entry in it.ledger("quarantined")]
    assert "(max.message.bytes)" in texts[0]
    assert "NaN and infinities have no form in JSON" in texts[3]
    assert all(text.startswith(f"output to {it.out}: ") for text in texts)


@pytest.mark.slow
def test_an_expired_group_that_can_not_be_encoded_leaves_as_a_whole(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    text = UNSENT.replace("count(*) >= 2", "count(*) = 90").replace("    out:", EXPIRES + "    out:")
    it = mini(services, spark, tmp_path, unique, SMALL + text)
    groups = [*("1", "nan", "2"), *("1", "large" * 500, "2"), *("1", "2", "3")]
    it.send(it.left, *(("k", row(at // 3, v)) for at, v in enumerate(groups)), times=[1_700_000_000_000] * 9)
    # The last record of this key comes after the others have expired.
    it.send(it.left, ("k", row(0, "late")), times=[1_700_000_060_000])
    it.step()
    assert [value["all"] for value in it.values()] == [["1", "2", "3"]]
    assert it.classes(it.left) == {"done": 3, "pending": 1, "quarantined": 6}


NAMES = """
transforms:
  - name: event
    type: group
    records: {l: $left}
    group-by: value.id
    complete-when: "count(*) = 2 AND exists(array(1, 2), now -> now = count(*))"
    out: $out
    key: first(l).key
    value:
      n: "aggregate(list(l), 0, (acc, records) -> acc + CAST(records.value.v AS INT) * size(list(l)))"
      group_: "transform(array(1), group_ -> group_ + max(value.id))"
"""


@pytest.mark.slow
def test_names_in_an_expression_hide_none_of_the_engine(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """Nor in the search for a bad record, which the list of its group goes on without."""
    it = mini(services, spark, tmp_path, unique, BOTH + NAMES)
    it.send(it.left, ("a", row(1, "3")), ("a", row(1, "4")), ("b", row(2, "5")), ("b", row(2, "x")), ("b", row(2, "6")))
    it.step()
    assert it.values() == [{"n": 14, "group_": [2]}, {"n": 22, "group_": [3]}]
    assert it.classes(it.left) == {"done": 4, "quarantined": 1}


ALIASES = """
transforms:
  - {name: event, type: group, records: {cause: $left, ALIAS: $right}, group-by: value.op, complete-when: count(*) > 1,
     expire-after: 60s, on-expire: emit, out: $out, key: first(ALIAS).key,
     value: {n: sum(CAST(value.v AS INT)), first: first(cause).value.v}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("alias", ["chosen", "wrong"])
def test_an_alias_hides_no_column_of_the_engine(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, alias: str
) -> None:
    """Neither where a group expires in a source's order, nor in the search for a bad record."""
    ordered = BOTH.replace("schema:", "order: {by: value.id, domain: shop}, schema:")
    it = mini(services, spark, tmp_path, unique, ordered + ALIASES.replace("ALIAS", alias))
    times = [1_700_000_000_000 + seconds * 1000 for seconds in (0, 0, 100, 101)]
    it.send(it.left, row(1, "1", "a"), row(3, "x", "b"), row(9, "5", "c"), row(11, "5", "d"), times=times)
    it.send(it.right, row(2, "2", "a"), row(4, "4", "b"), row(10, "6", "e"), row(12, "6", "f"), times=times)
    it.step()
    assert it.values() == [{"n": 3, "first": "1"}, {"n": 4, "first": None}]
    assert [entry["first"] for entry in it.ledger("quarantined")] == [1]
