"""Held outputs: a change of a source row waits while an earlier record of the row is pending."""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zync_assets.audit.guard import exactly_once_done_coverage
from zync_assets.checks import output_checks
from zync_assets.checks.output_checks import pending_age
from zync_assets.cli.records import pending_rows, trace_rows
from zync_assets.errors import LakeError
from zync_assets.kafka.topics import create_topic
from zync_assets.lake.staging import open_staging
from zync_assets.runner import etl_all, ingest_all
from zync_assets_tests.etl.test_hold import EPOCH, Source, SourceChange, folded
from zync_assets_tests.mini import BOTH, Mini, mini
from zync_assets_tests.model import Model, OneToOne, Pair, Record, without_zeros

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from zync_assets.local.services import Services

Make = Callable[..., Mini]

RULES = """
transforms:
  - {name: create, type: denorm, where: value.op = 'c' OR value.op = 'u' AND value.id > 6, left: $left, right: $right,
     join-on: left.value.id = right.value.id, out: $out, key: left.key,
     value: {id: left.value.id, l: left.value.v, r: right.value.v}}
  - {name: left-update, type: stateless, where: value.op = 'u', in: $left, out: $out, key: in.key,
     value: {id: in.value.id, l: in.value.v}}
  - {name: right-update, type: stateless, where: value.op = 'u', in: $right, out: $out,
     key: "concat('k', in.value.id)", value: {id: in.value.id, r: in.value.v}}
  - {name: left-delete, type: stateless, where: value.op = 'd', in: $left, out: $out, key: in.key, value: null}
"""


@pytest.fixture
def make(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Make:
    """``make(name, text)``: a pipeline with topics and a lake of its own."""

    def made(name: str, text: str = BOTH + RULES) -> Mini:
        folder = tmp_path / name
        folder.mkdir()
        return mini(services, spark, folder, f"{unique}.{name}", text)

    return made


def the_model(it: Mini) -> Model:
    """The rules as plain functions."""

    def op(name: str) -> Callable[[Record], bool]:
        return lambda found: found.value is not None and found.value["op"] == name

    def joins(found: Record) -> bool:
        return found.value is not None and (found.value["op"] == "c" or (found.value["op"] == "u" and id_of(found) > 6))

    def id_of(found: Record) -> Any:
        return found.value["id"]

    rules = (
        Pair(
            "create",
            it.left,
            it.right,
            it.out,
            joins,
            id_of,
            lambda left, _: left.key,
            lambda left, right: {"id": id_of(left), "l": left.value["v"], "r": right.value["v"]},
        ),
        OneToOne("left-update", it.left, it.out, op("u"), lambda found: found.key, _changed("l")),
        OneToOne("right-update", it.right, it.out, op("u"), lambda found: f"k{id_of(found)}", _changed("r")),
        OneToOne("left-delete", it.left, it.out, op("d"), lambda found: found.key, lambda _: None),
    )
    return Model((it.left, it.right), rules, held=frozenset({it.out}))


def _changed(name: str) -> Callable[[Record], Any]:
    return lambda found: {"id": found.value["id"], name: found.value["v"]}


def sent(it: Mini, changes: Sequence[tuple[str, str, int, int]], offsets: dict[str, int]) -> list[Record]:
    """Send changes (side, op, id, time); the records, as the model has them."""
    found: list[Record] = []
    for side, op, id, time in changes:
        topic = it.left if side == "left" else it.right
        key, offset = f"{'k' if side == 'left' else 's'}{id}", offsets[topic]
        found.append(Record(topic, 0, offset, EPOCH + time, key, {"op": op, "id": id, "v": f"{op}{offset}"}))
        offsets[topic] += 1
    for topic in (it.left, it.right):
        mine = [item for item in found if item.topic == topic]
        it.send(topic, *((item.key, item.value) for item in mine), times=[item.timestamp for item in mine])
    return found


def check(it: Mini, model: Model) -> None:
    staged = [(json.dumps(row["key"]), _without_nulls(row["value"])) for row in it.staged()]
    assert staged == [(json.dumps(out.key), out.value) for out in model.outputs[it.out]]
    assert [tuple((one["topic"], one["partition"], one["offset"]) for one in row["source"]) for row in it.staged()] == [
        out.source for out in model.outputs[it.out]
    ]
    counts = {place: count for place, count in it.head.counts.items() if count}
    assert counts == without_zeros(model.totals())
    assert sum(it.head.waiting.values()) == sum(count for (_, _, kind), count in counts.items() if kind == "pending")


def _without_nulls(value: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if value is None else {name: each for name, each in value.items() if each is not None}


STORY = [
    # An update and a delete of pending rows, before the counterpart comes.
    ("left", "c", 1, 0),
    ("left", "u", 1, 0),
    ("left", "c", 2, 0),
    ("left", "u", 2, 1),
    ("left", "d", 2, 1),
    ("right", "c", 3, 1),
    ("right", "u", 3, 2),
    ("left", "c", 4, 2),
    ("right", "c", 4, 2),
    ("left", "u", 4, 3),
    ("right", "c", 1, 4),
    ("left", "u", 1, 5),
    # The id is used again: the counterpart belongs to the new row.
    ("left", "c", 2, 6),
    ("right", "c", 2, 7),
    ("left", "u", 2, 7),
    ("left", "d", 4, 8),
    ("left", "c", 3, 9),
    ("left", "d", 1, 9),
    # A delete that no rule takes ends its row too.
    ("right", "c", 5, 10),
    ("right", "d", 5, 10),
    ("left", "c", 5, 11),
    ("right", "c", 5, 12),
    # An update that needs a counterpart is pending. Its row is in the target.
    ("left", "c", 7, 12),
    ("right", "c", 7, 12),
    ("left", "u", 7, 13),
    ("left", "d", 7, 14),
]


@pytest.mark.usefixtures("of_each_size")
@pytest.mark.parametrize(
    "cuts", [(), pytest.param((2, 5, 7, 11, 20, 25), marks=pytest.mark.slow)], ids=["whole", "cut"]
)
def test_a_change_waits_behind_the_pending_creation_of_its_row(make: Make, cuts: tuple[int, ...]) -> None:
    it = make("story")
    model, offsets = the_model(it), defaultdict[str, int](int)
    for first, end in zip((0, *cuts), (*cuts, len(STORY)), strict=True):
        model.batch(sent(it, STORY[first:end], offsets))
        it.step()
        check(it, model)
    assert exactly_once_done_coverage(it.pipeline, "Staging").passed


TYPE = (
    "op string, id bigint, v string,"
    " source struct<connector: string, name: string, snapshot: string, lsn: bigint, sequence: string>"
)
THREE = f"""
order-delay: 0.05
inputs:
  - {{topic: $left, pool: Raw, key-format: string, value-format: json, schema: "{TYPE}"}}
  - {{topic: $right, pool: Raw, key-format: string, value-format: json, schema: "{TYPE}"}}
  - {{topic: $left.third, pool: Raw, key-format: string, value-format: json, schema: "{TYPE}"}}
outputs:
  - {{topic: $out, pool: Staging, key-format: string, value-format: json, create: {{replication-factor: 1}}}}
  - {{topic: $out.third, pool: Third, key-format: string, value-format: json, create: {{replication-factor: 1}}}}
transforms:
""" + "".join(
    f"""
  - {{name: create{number}, type: denorm, where: value.op = 'c', left: $left, right: {right}, out: {out},
     join-on: left.value.id = right.value.id, key: left.key, value: {{l: left.value.v, r: right.value.v}}}}
  - {{name: left{number}, type: stateless, where: value.op = 'u', in: $left, out: {out}, key: in.key,
     value: {{l: in.value.v}}}}
  - {{name: right{number}, type: stateless, where: value.op = 'u', in: {right}, out: {out}, key: in.key,
     value: {{r: in.value.v}}}}
  - {{name: delete{number}, type: stateless, where: value.op = 'd', in: $left, out: {out}, key: in.key, value: null}}
"""
    for number, right, out in ((1, "$right", "$out"), (2, "$left.third", "$out.third"))
)
"""An order (left), its status (right) and its payment (third). Each of the two outputs joins the order with one of them."""


def topics(it: Mini) -> dict[str, str]:
    return {"left": it.left, "right": it.right, "third": f"{it.left}.third"}


def send_changes(it: Mini, changes: Sequence[SourceChange]) -> None:
    """Each table's changes in their order. A deletion is followed by its tombstone."""
    for table, topic in topics(it).items():
        mine = [(key, value, time) for name, _, key, value, time in changes if name == table]
        records = [
            (key, each, time)
            for key, value, time in mine
            for each in ([value, None] if value["op"] == "d" else [value])
        ]
        it.send(topic, *((key, value) for key, value, _ in records), times=[time for *_, time in records])


def consume(it: Mini, *tables: str) -> None:
    """Ingest the topics of some tables, all by default, and transform what the frontier lets pass."""
    known = topics(it)
    list(ingest_all(it.pipeline, lambda: it.spark, [known[table] for table in tables or known]))
    list(etl_all(it.pipeline, lambda: it.spark))


def outputs(it: Mini, pool: str, topic: str) -> list[tuple[str, dict[str, str] | None]]:
    table = DeltaTable(f"{it.lake}/{pool}").to_pyarrow_table(filters=[("topic", "=", topic)])
    rows = sorted(table.to_pylist(), key=lambda row: row["kafka"]["offset"])
    return [(row[f"key:{topic}"], _without_nulls(row[f"value:{topic}"])) for row in rows]


@pytest.mark.slow
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, database=None)
@given(random=st.randoms(use_true_random=False))
def test_the_target_is_the_sources_join_whatever_the_bursts_and_the_cuts(make: Make, random: Random) -> None:
    name = uuid.uuid4().hex[:8]
    source = Source(random)
    whole, cut = make(f"{name}.whole", THREE), make(f"{name}.cut", THREE)
    for it in (whole, cut):
        create_topic(it.pipeline.kafka, f"{it.left}.third", 1, 1, {})
    sent = 0
    for _ in range(5):
        for _ in range(random.randint(1, 8)):
            source.transaction()
        send_changes(cut, source.changes[sent:])
        sent = len(source.changes)
        consume(cut, *random.sample(("left", "right", "third"), random.randint(1, 3)))
    consume(cut)
    send_changes(whole, source.changes)
    consume(whole)
    for pool, table in (("Staging", "right"), ("Third", "third")):
        expected = outputs(whole, pool, whole.out if table == "right" else f"{whole.out}.third")
        assert folded(expected) == source.join(table)
        assert outputs(cut, pool, cut.out if table == "right" else f"{cut.out}.third") == expected
        assert exactly_once_done_coverage(cut.pipeline, pool).passed


def test_pending_and_trace_show_which_record_waits_behind_which_until_hold_is_off(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_checks, "MAX_AGE_SECONDS", float("inf"))
    it = make("story")
    sent(it, STORY[:2], defaultdict(int))
    it.step()
    creation, change = pending_rows(it.pipeline, "Staging")
    assert str(creation["why"]).startswith("no counterpart in")
    assert change["why"] == "waits behind partition 0, offset 0 of its source row, which is pending for create"
    age = pending_age(it.pipeline, "Staging")
    assert (age.passed, age.numbers["pending"], age.numbers["null_keys"]) == (True, 2, 0), age.summary
    traced = [trace_rows(it.pipeline, it.left, 0, offset) for offset in (0, 1)]
    assert [[(row["role"], row["offset"], row["rule"]) for row in rows] for rows in traced] == [
        [("pending", 0, "create"), ("behind", 1, "left-update")],
        [("pending", 1, "left-update"), ("before", 0, "create")],
    ]
    with pytest.raises(LakeError, match="offset 9 is not pending"):
        trace_rows(it.pipeline, it.left, 0, 9)
    free = it.edited((BOTH + RULES).replace("topic: $out, ", "topic: $out, hold: false, "))
    sent(free, [("left", "c", 9, 1)], defaultdict(int, {it.left: 2}))
    free.step()
    assert [_without_nulls(value) for value in free.values()] == [{"id": 1, "l": "u1"}]
    assert free.classes(it.left) == {"pending": 2, "done": 1}
    assert exactly_once_done_coverage(free.pipeline, "Staging").passed


@pytest.mark.slow
@pytest.mark.usefixtures("of_each_size")
def test_records_that_an_older_version_left_pending_hold_their_rows_from_the_first_batch_on(make: Make) -> None:
    """Earlier versions kept no hashes of source rows. An edit of the file to ``hold: true`` has the same result."""
    text = BOTH + RULES
    it = make("older", text.replace("topic: $out, ", "topic: $out, hold: false, "))
    offsets = defaultdict[str, int](int)
    sent(it, [("left", "c", 1, 0), ("left", "u", 1, 1), ("left", "c", 2, 1), ("left", "c", 3, 1)], offsets)
    it.step()
    state = open_staging(it.lake, "Staging")
    assert state is not None
    for item in state.ledger_files:
        entries = pq.read_table(state.uri(item))["account"].combine_chunks()
        kept = [field for field in entries.type if field.name != "row"]
        older = pa.StructArray.from_arrays([entries.field(field.name) for field in kept], fields=kept)
        pq.write_table(pa.table({"account": older}), state.uri(item))
    held = it.edited(text)
    sent(held, [("left", "u", 1, 2), ("left", "u", 2, 2), ("left", "d", 2, 3), ("left", "u", 3, 4)], offsets)
    held.step()
    assert [_without_nulls(value) for value in held.values()] == [{"id": 1, "l": "u1"}], "of the older version"
    assert held.classes(it.left) == {"pending": 4, "done": 4}
    sent(held, [("right", "c", 1, 5), ("right", "c", 2, 5)], offsets)
    held.step()
    assert [_without_nulls(value) for value in held.values()][1:] == [
        {"id": 1, "l": "c0", "r": "c0"},
        {"id": 1, "l": "u4"},
    ]
    # What waits goes its way when the file says so, and newer records hold their rows when the file says so again.
    free = it.edited(text.replace("topic: $out, ", "topic: $out, hold: false, "))
    sent(free, [("left", "u", 5, 6)], offsets)
    free.step()
    again = it.edited(text)
    sent(again, [("left", "u", 3, 7)], offsets)
    again.step()
    assert [_without_nulls(value) for value in again.values()][3:] == [{"id": 3, "l": "u7"}, {"id": 5, "l": "u8"}]
    sent(again, [("right", "c", 3, 8)], offsets)
    again.step()
    assert [_without_nulls(value) for value in again.values()][5:] == [
        {"id": 3, "l": "c3", "r": "c2"},
        {"id": 3, "l": "u9"},
    ]
    assert again.classes(it.left) == {"done": 10}
    assert exactly_once_done_coverage(again.pipeline, "Staging").passed


def step(it: Mini, *changes: tuple[str, str, int, int], offsets: dict[str, int]) -> None:
    """A batch of changes (side, op, id, time)."""
    sent(it, changes, offsets)
    it.step()


def rows(it: Mini) -> dict[str, dict[str, Any]]:
    """The rows of a target: key → its fields, as the outputs set and delete them."""
    found: dict[str, dict[str, Any]] = {}
    for output in it.staged():
        key = output["key"].replace("s", "k")
        if output["value"] is None:
            found.pop(key, None)
        else:
            found[key] = found.get(key, {}) | {name: it for name, it in output["value"].items() if it is not None}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "repair",
    [
        pytest.param("name: create", id="restored", marks=pytest.mark.slow),
        pytest.param("name: create2, was: create", id="renamed"),
    ],
)
def test_a_record_of_a_rule_that_the_file_lacks_holds_its_row_until_the_rule_is_back(make: Make, repair: str) -> None:
    it, offsets = make("renamed"), defaultdict[str, int](int)
    step(it, ("left", "c", 1, 1), ("left", "c", 2, 2), ("left", "c", 3, 3), offsets=offsets)
    it = it.changed("name: create,", "name: create2,")
    step(it, ("left", "u", 1, 4), ("left", "d", 2, 5), ("left", "d", 3, 6), offsets=offsets)
    # The deletes end their rows. The update waits.
    assert it.staged() == []
    assert [row["why"] for row in pending_rows(it.pipeline, "Staging") if row["offset"] == 3] == [
        "waits behind partition 0, offset 0 of its source row, which is pending for create"
    ]
    it = it.changed("name: create2,", f"{repair},")
    step(it, ("left", "c", 3, 7), offsets=offsets)
    step(it, ("right", "c", 1, 8), ("right", "c", 2, 9), ("right", "c", 3, 10), offsets=offsets)
    assert rows(it) == {"k1": {"id": 1, "l": "u3", "r": "c0"}, "k3": {"id": 3, "l": "c6", "r": "c2"}}
    # The counterpart of the row that was deleted waits.
    assert it.classes(it.left) == {"done": 7}
    assert it.classes(it.right) == {"done": 2, "pending": 1}


@pytest.mark.slow
def test_a_change_that_waits_goes_on_once_its_rule_is_back(make: Make) -> None:
    it, offsets = make("back"), defaultdict[str, int](int)
    step(it, ("left", "c", 1, 1), ("left", "u", 1, 2), offsets=offsets)
    it = it.changed("name: left-update,", "name: other,")
    step(it, ("right", "c", 1, 3), offsets=offsets)
    assert rows(it) == {"k1": {"id": 1, "l": "c0", "r": "c0"}}
    it = it.changed("name: other,", "name: left-update,")
    [row] = pending_rows(it.pipeline, "Staging")
    assert row["why"] == "the next batch gives it to rule left-update"
    assert it.etl() is not None
    assert rows(it) == {"k1": {"id": 1, "l": "u1", "r": "c0"}}
    assert it.etl() is None


@pytest.mark.parametrize("kind", ["string", pytest.param("boolean", marks=pytest.mark.slow)])
def test_a_flattened_delete_that_no_rule_takes_ends_the_row(make: Make, kind: str) -> None:
    """Debezium's ExtractNewRecordState writes such records in the mode ``rewrite``. No tombstone follows."""
    text = BOTH.replace("op string", f"`__deleted` {kind}") + RULES.partition("  - {name: left-update")[0]
    text = text.replace("value.op = 'c' OR value.op = 'u' AND value.id > 6", "NOT CAST(value.__deleted AS boolean)")
    it = make("flat", text)

    def change(id: int, v: str, *, deleted: bool = False) -> tuple[str, dict[str, Any]]:
        return f"k{id}", {"__deleted": str(deleted).lower() if kind == "string" else deleted, "id": id, "v": v}

    it.send(it.left, change(1, "old"), change(1, "old", deleted=True), change(2, "gone"), times=[1, 2, 3])
    it.step()
    it.send(it.left, change(2, "gone", deleted=True), change(1, "new"), times=[4, 5])
    it.send(it.right, change(1, "r1"), change(2, "r2"), times=[6, 7])
    it.step()
    assert rows(it) == {"k1": {"id": 1, "l": "new", "r": "r1"}}


@pytest.mark.parametrize("op", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_flattened_delete_is_emitted_if_its_row_may_have_made_an_output(make: Make, op: bool) -> None:
    """The creation is joined. An update, which also needs a counterpart, is pending."""
    text = BOTH.replace("op string", f"`__deleted` string{', `__op` string' if op else ''}")
    text += (
        RULES.partition("  - {name: left-update")[0] + RULES.partition("in: $right, out: $out,\n")[2].partition("\n")[2]
    )
    text = text.replace("value.op = 'c' OR value.op = 'u' AND value.id > 6", "value.__deleted = 'false'")
    it = make("update", text.replace("value.op = 'd'", "value.__deleted = 'true'"))

    def change(id: int, v: str, op: str) -> tuple[str, dict[str, Any]]:
        return f"k{id}", {"__deleted": "true" if op == "d" else "false", "__op": op, "id": id, "v": v}

    it.send(it.left, change(1, "a", "c"), times=[1])
    it.send(it.right, change(1, "r", "c"), times=[2])
    it.step()
    it.send(it.left, change(1, "b", "u"), change(1, "b", "d"), times=[3, 4])
    it.step()
    assert rows(it) == {}


def test_a_tombstone_of_plain_records_is_emitted_if_its_row_may_have_made_an_output(make: Make) -> None:
    text = BOTH.replace("op string, ", "") + RULES.partition("  - {name: left-update")[0]
    text = text.replace("value.op = 'c' OR value.op = 'u' AND value.id > 6", "value IS NOT NULL")
    text += "  - {type: stateless, where: value IS NULL, in: $left, out: $out, key: in.key, value: null}\n"
    it = make("plain", text)
    it.send(it.left, ("k1", {"id": 1, "v": "a"}), times=[1])
    it.send(it.right, ("k1", {"id": 1, "v": "r"}), times=[2])
    it.step()
    it.send(it.left, ("k1", {"id": 1, "v": "b"}), ("k1", None), times=[3, 4])
    it.step()
    assert rows(it) == {}


@pytest.mark.slow
def test_a_delete_that_a_rule_of_another_output_takes_ends_the_row(make: Make) -> None:
    """No tombstone follows: Debezium's ``tombstones.on.delete`` is false."""
    text = BOTH.replace("outputs:\n", "outputs:\n  - {topic: $out.gone, pool: Staging, format: json, create: {}}\n")
    rules = RULES.partition("  - {name: left-delete")[0]
    rules += "  - {name: gone, type: stateless, where: value.op = 'd', in: $left, out: $out.gone, key: in.key,"
    rules += " value: {id: in.value.id}}\n"
    it, offsets = make("gone", text + rules), defaultdict[str, int](int)
    step(it, ("left", "c", 1, 1), ("left", "u", 1, 2), ("left", "d", 1, 3), ("left", "c", 1, 4), offsets=offsets)
    step(it, ("left", "c", 2, 5), offsets=offsets)
    step(it, ("left", "d", 2, 6), ("left", "c", 2, 7), ("right", "c", 1, 8), ("right", "c", 2, 9), offsets=offsets)
    assert rows(it) == {"k1": {"id": 1, "l": "c3", "r": "c0"}, "k2": {"id": 2, "l": "c6", "r": "c1"}}
    assert len(it.staged(f"{it.out}.gone")) == 2
    assert it.classes(it.left) == {"done": 7}
