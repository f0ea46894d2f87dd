"""Outputs in the order of the source: what a batch takes of the topics of one domain, and what a target makes of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from string import Template
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from confluent_kafka import Producer

from zync_assets.checks.output_checks import source_order
from zync_assets.cli.main import main
from zync_assets.etl import plan as etl_plan
from zync_assets.etl import streams
from zync_assets.etl.commit import commit_staging
from zync_assets.etl.plan import plan_etl, read_raw, transform
from zync_assets.etl.streams import read_ends
from zync_assets.ingest.commit import commit_raw
from zync_assets.ingest.plan import plan_ingest, read_input
from zync_assets.kafka.topics import Survey
from zync_assets.lake import tables
from zync_assets.lake.head import Late
from zync_assets.lake.log import Order
from zync_assets.lake.raw import ORDER, RawAdvance, commit_advance, open_raw
from zync_assets.lake.raw_files import LOWEST, ORDER_TYPE
from zync_assets.lake.readings import Reading, TopicEnds, keep_reading
from zync_assets.lake.storage import raw_uri
from zync_assets.local.services import Services
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Pipeline, SourceOrder
from zync_assets.pipeline_file import load
from zync_assets.runner import etl_all, ingest_all
from zync_assets_tests.kafka.conftest import await_end
from zync_assets_tests.lake.rows import file, records
from zync_assets_tests.mini import Mini, mini

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Make = Callable[..., Mini]
Change = tuple[str, str, int, str]
"""The side of a change, its operation, the id of the row, and the row's text."""

TYPE = (
    "op string, id bigint, v string,"
    " source struct<connector: string, name: string, snapshot: string, lsn: bigint, sequence: string>"
)
SHOP = f"""
order-delay: 0.05
inputs:
  - {{topic: $left, pool: Raw, key-format: string, value-format: json, schema: "{TYPE}"}}
  - {{topic: $right, pool: Raw, key-format: string, value-format: json, schema: "{TYPE}"}}
outputs:
  - {{topic: $out, pool: Staging, key-format: string, value-format: json, create: {{replication-factor: 1}}}}
transforms:
  - {{name: create, type: denorm, where: "value.op IN ('c', 'r')", left: $left, right: $right, out: $out,
     join-on: left.value.id = right.value.id, key: CAST(left.value.id AS string),
     value: {{l: left.value.v, r: right.value.v}}}}
  - {{name: change-left, type: stateless, where: value.op = 'u', in: $left, out: $out, key: CAST(in.value.id AS string),
     value: {{l: in.value.v}}}}
  - {{name: change-right, type: stateless, where: value.op = 'u', in: $right, out: $out, key: CAST(in.value.id AS string),
     value: {{r: in.value.v}}}}
  - {{name: delete, type: stateless, where: value.op = 'd', in: $left, out: $out, key: CAST(in.value.id AS string), value: null}}
"""
"""An order (left) and its status (right). A deletion removes the row of the target."""
SAME_TIME = 1_700_000_000_000


@pytest.fixture
def make(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Make:
    """``make(text)``: a pipeline with topics of its own."""
    return lambda text=SHOP: mini(services, spark, tmp_path, unique, text)


def change(op: str, id: int, v: str, lsn: int, snapshot: str = "false") -> dict[str, Any]:
    """A change as Debezium's connector for PostgreSQL sends it."""
    source = {"connector": "postgresql", "name": "shop", "snapshot": snapshot, "lsn": lsn}
    return {"op": op, "id": id, "v": v, "source": {**source, "sequence": json.dumps([str(lsn - 1), str(lsn)])}}


def send(it: Mini, *changes: Change, lsn: int = 100) -> None:
    """Send changes with ascending LSNs, all in one millisecond. A deletion is followed by its tombstone."""
    for number, (side, op, id, v) in enumerate(changes):
        records = [(str(id), change(op, id, v, lsn + number))]
        records += [(str(id), None)] if op == "d" else []
        it.send(it.left if side == "left" else it.right, *records, times=[SAME_TIME] * len(records))


def ingest(it: Mini, *topics: str) -> None:
    list(ingest_all(it.pipeline, lambda: it.spark, topics or [it.left, it.right]))


def etl(it: Mini) -> None:
    list(etl_all(it.pipeline, lambda: it.spark))


def outputs(it: Mini) -> list[tuple[str, Any]]:
    return [(row["key"], row["value"]) for row in it.staged()]


def target(it: Mini) -> dict[str, dict[str, str]]:
    """The rows of a table that takes over the outputs one by one. An output changes the fields that it has."""
    rows: dict[str, dict[str, str]] = {}
    for row in it.staged():
        value, left_out = row["value"], row["left_out"] or []
        if value is None:
            rows.pop(row["key"], None)
        else:
            known = {name: text for name, text in value.items() if text is not None and name not in left_out}
            rows[row["key"]] = {**rows.get(row["key"], {}), **known}
    return rows


def status(it: Mini) -> dict[str, Any]:
    """The row of ``zync status`` about the order."""
    found = CliRunner().invoke(main, ["status", str(it.pipeline.path), "--format", "json"])
    assert found.exit_code == 0, found.output
    (row,) = [row for line in found.stdout.splitlines() if (row := json.loads(line))["kind"] == "order"]
    return row


def raw_table_of(pipeline: Pipeline, topic: str, *orders: Order, first: int = 0, fields: int = 0) -> None:
    """Commit one file of records with these orders to a topic's raw table. ``fields``: of a value that is a struct."""
    uri = raw_uri(pipeline.lake, "Raw", topic)
    batch = records(list(range(first, first + len(orders))))
    if fields:
        value = pa.array([{f"f{number}": number for number in range(fields)}] * len(orders))
        batch = batch.set_column(batch.schema.get_field_index("value"), "value", value)
    batch = batch.append_column(ORDER, pa.array([{"high": high, "low": low} for high, low in orders], ORDER_TYPE))
    files = [file(uri, batch)]
    advance = RawAdvance(topic, "id", batch.schema, files, {} if first else {0: 0}, {0: first + len(orders)})
    commit_advance(uri, open_raw(pipeline.lake, "Raw", topic), replace(advance, orders={0: orders[-1]}, domain="shop"))


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """A pipeline whose plans need no broker: the output topics are not looked at."""
    monkeypatch.setattr(etl_plan, "check_begins", lambda *_: None)
    path = tmp_path / "shop.yaml"
    path.write_text(Template(f"lake: lake\n{SHOP}").substitute(left="left", right="right", out="out"))
    return load(path)


@pytest.mark.parametrize(
    ("fields", "properties"),
    [(0, tables.CONFIGURATION), (40, tables.CONFIGURATION), (40, {})],
    ids=["few columns", "many columns", "many columns of an older table"],
)
def test_a_batch_ends_at_one_order_within_the_files_of_its_topics(
    offline: Pipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fields: int,
    properties: Mapping[str, str | None],
) -> None:
    """Delta's statistics bound ``high`` and ``low`` each by itself: the column of a file with both sides is read."""
    pipeline, raw_table = offline, partial(raw_table_of, fields=fields)
    monkeypatch.setattr(tables, "CONFIGURATION", properties)
    assert plan_etl(pipeline, "Staging").nothing_to_do
    raw_table(pipeline, "left", LOWEST, (5, 9), (7, 1), (7, 8))
    assert plan_etl(pipeline, "Staging").nothing_to_do, "the other topic was never read"
    raw_table(pipeline, "right", (6, 3), (7, 2), (9, 0))
    plan = plan_etl(pipeline, "Staging")
    assert plan.ranges == {"left": (OffsetRange(0, 0, 3),), "right": (OffsetRange(0, 0, 2),)}
    assert plan.cuts["shop"].frontier.order == (7, 8)
    assert plan.cuts["shop"].reached == (7, 2)
    half = plan_etl(pipeline, "Staging", limit=3)
    assert half.ranges == {"left": (OffsetRange(0, 0, 2),), "right": (OffsetRange(0, 0, 1),)}
    assert half.cuts["shop"].reached == (6, 3)
    ends = {topic: TopicEnds("id", {0: end}) for topic, end in (("left", 4), ("right", 3))}
    for at in (1.0, 2.0):
        keep_reading(pipeline.lake, "Raw", Reading(at, at, ends), pipeline.order_delay)
    assert plan_etl(pipeline, "Staging").ranges == {"left": (OffsetRange(0, 0, 4),), "right": (OffsetRange(0, 0, 3),)}
    for topic, item in ends.items():
        ends[topic] = replace(item, topic_id="of an earlier topic")
    shutil.rmtree(tmp_path / "lake/~readings")
    for at in (1.0, 2.0):
        keep_reading(pipeline.lake, "Raw", Reading(at, at, ends), pipeline.order_delay)
    assert plan_etl(pipeline, "Staging").ranges == plan.ranges
    raw_table(pipeline, "right", (10, 0), first=3)
    raw_table(pipeline, "left", (9, 5), (11, 0), first=4)
    plan = plan_etl(pipeline, "Staging")
    assert plan.ranges == {"left": (OffsetRange(0, 0, 5),), "right": (OffsetRange(0, 0, 3),)}


def test_inputs_in_the_order_of_time_have_no_frontier(offline: Pipeline) -> None:
    inputs = tuple(replace(item, order=SourceOrder(time=True)) for item in offline.inputs)
    pipeline = replace(offline, inputs=inputs)
    raw_table_of(pipeline, "left", (5, 9), (7, 1))
    plan = plan_etl(pipeline, "Staging")
    assert plan.ranges == {"left": (OffsetRange(0, 0, 2),), "right": ()}
    assert (plan.domains, plan.cuts) == ({}, {})


def test_changes_of_one_millisecond_reach_the_target_in_the_order_of_the_source(make: Make) -> None:
    """(create, status, delete) leaves no ghost row, and (create, status, update) no stale row. An order of the snapshot comes
    before all of them."""
    it = make()
    it.send(it.left, ("9", change("r", 9, "old", 500, "true")), times=[SAME_TIME])
    it.send(it.right, ("9", change("r", 9, "shipped", 500, "last")), times=[SAME_TIME])
    send(it, ("left", "c", 1, "a"), ("right", "c", 1, "new"), ("left", "d", 1, "a"))
    send(it, ("left", "c", 2, "b"), ("right", "c", 2, "new"), ("left", "u", 2, "c"), ("left", "u", 9, "x"), lsn=200)
    ingest(it)
    etl(it)
    assert [key for key, _ in outputs(it)] == ["9", "1", "1", "2", "2", "9"]
    assert target(it) == {"2": {"l": "c", "r": "new"}, "9": {"l": "x", "r": "shipped"}}
    assert status(it) == {**status(it), "domain": "shop", "pool": "Staging", "waiting": 0, "topic": None, "late": 0}
    assert it.head.reached == {"shop": (202, 203)}


def test_an_update_between_the_ingests_of_two_topics_waits_for_the_creation(make: Make) -> None:
    it = make()
    ingest(it, it.left)
    send(it, ("left", "c", 1, "a"), ("right", "c", 1, "new"), ("right", "u", 1, "paid"))
    ingest(it, it.right)
    etl(it)
    assert outputs(it) == []
    assert status(it) == {**status(it), "waiting": 2, "topic": it.left, "partition": 0}
    ingest(it)
    etl(it)
    assert target(it) == {"1": {"l": "a", "r": "paid"}}
    assert status(it)["waiting"] == 0


def test_a_record_that_comes_before_the_second_reading_of_the_ends_holds_no_record_back(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``zync run --until-idle`` would otherwise end while records wait for the frontier."""
    it, readings, survey = make(), list[int](), streams.survey

    def later(*arguments: Any, **options: Any) -> Survey:
        readings.append(len(readings))
        if readings == [0, 1]:
            send(it, ("left", "c", 2, "b"), lsn=300)
        return survey(*arguments, **options)

    monkeypatch.setattr(streams, "survey", later)
    send(it, ("left", "c", 1, "a"), ("right", "c", 1, "new"))
    ingest(it)
    etl(it)
    assert target(it) == {"1": {"l": "a", "r": "new"}}
    assert len(readings) == 2


def test_a_topic_with_an_open_transaction_holds_the_others_back(make: Make, unique: str) -> None:
    """Its records were sent, and come when the transaction ends. The topic is not idle."""
    it = make()
    send(it, ("left", "c", 1, "a"), ("right", "c", 1, "new"), ("left", "u", 1, "b"))
    producer = Producer({**it.pipeline.kafka, "transactional.id": unique, "log_level": 0})
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce(it.left, json.dumps(change("u", 1, "c", 200)), "1", 0)
    producer.flush(10)
    send(it, ("left", "u", 1, "d"), ("right", "u", 1, "paid"), lsn=300)
    ingest(it)
    etl(it)
    assert target(it) == {"1": {"l": "a", "r": "new"}}
    assert status(it) == {**status(it), "waiting": 2, "topic": it.left, "partition": 0}
    producer.commit_transaction(10)
    await_end({**it.pipeline.kafka}, it.left, 5)
    ingest(it)
    etl(it)
    assert [value["l"] or value["r"] for _, value in outputs(it)] == ["a", "b", "c", "d", "paid"]
    assert status(it) == {**status(it), "waiting": 0, "late": 0}


@pytest.mark.slow
def test_a_record_below_the_frontier_is_processed_counted_and_named(make: Make) -> None:
    """A topic that comes into being late brings a snapshot, which is not late."""
    it = make()
    send(it, ("left", "c", 1, "a"))
    send(it, ("right", "c", 1, "new"), lsn=300)
    ingest(it)
    etl(it)
    assert it.head.reached == {"shop": (299, 300)}
    assert source_order(it.pipeline, "Staging").passed
    for lsn in (200, 250):
        send(it, ("left", "u", 1, f"b{lsn}"), lsn=lsn)
        ingest(it)
        etl(it)
    assert target(it) == {"1": {"l": "b250", "r": "new"}}
    assert it.head.late == {(it.left, 0): Late(2, 2)}
    found = source_order(it.pipeline, "Staging")
    assert not found.passed
    assert found.severity == "warn"
    assert f"2 records of {it.left}, partition 0" in found.summary
    assert f"{it.left} 0:2 is the first" in found.summary
    assert found.numbers["late"] == 2
    assert status(it)["late"] == 2
    assert it.head.reached == {"shop": (299, 300)}
    assert f"check {it.pipeline.path} --accept source_order" in found.summary
    done = CliRunner().invoke(main, ["check", str(it.pipeline.path), "--accept", "source_order", "--format", "json"])
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["result"], row["numbers"]["late"]) for row in rows if row["check"] == "source_order"] == [
        ("passed", 0)
    ]
    send(it, ("left", "u", 1, "c"), lsn=270)
    ingest(it)
    etl(it)
    found = source_order(it.pipeline, "Staging")
    assert (found.passed, found.numbers["late"]) == (False, 1), "an accepted count hides no later record"


@pytest.mark.slow
def test_the_sequence_of_outputs_is_the_same_wherever_ingest_and_batches_are_cut(make: Make, tmp_path: Path) -> None:
    random = Random(7)
    it = make()
    lsn = 100
    for _ in range(5):
        id, sides = random.randint(1, 3), random.sample(["left", "right"], 2)
        changes = [(side, "c", id, f"{side} {lsn}") for side in sides] + [(random.choice(sides), "u", id, f"u {lsn}")]
        send(it, *changes, lsn=lsn)
        lsn += random.randint(len(changes), 50)
    ingest(it)
    etl(it)
    whole = outputs(it)
    assert len(whole) == 10
    other = replace(it, pipeline=replace(it.pipeline, lake=str(tmp_path / "other")))
    batches = 0
    for _ in range(60):
        read_ends(other.pipeline)
        plan = plan_ingest(other.pipeline, random.choice([it.left, it.right]), limit=random.choice([4, 8]))
        if not plan.nothing_to_do:
            commit_raw(other.pipeline, read_input(it.spark, other.pipeline, plan))
        batches += batch(other, random.choice([3, 6]))
        if len(outputs(other)) == len(whole):
            break
    assert outputs(other) == whole
    assert batches > 2


def batch(it: Mini, limit: int) -> bool:
    """One batch of about ``limit`` records. Whether there was anything to take."""
    plan = plan_etl(it.pipeline, "Staging", limit=limit)
    if plan.nothing_to_do:
        return False
    slices = {topic: read_raw(it.spark, it.pipeline, plan, topic) for topic in plan.ranges}
    commit_staging(it.pipeline, transform(it.spark, plan, slices))
    return True
