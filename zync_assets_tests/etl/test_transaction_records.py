"""Whole transactions, from Debezium's transaction topic to the staging commits."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from string import Template
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from zync_assets.checks.output_checks import run_all, source_order
from zync_assets.errors import EtlError, SchemaError
from zync_assets.etl import plan as etl_plan
from zync_assets.etl.plan import plan_etl
from zync_assets.etl.transaction_records import collection_of
from zync_assets.etl.transactions import OpenTransaction
from zync_assets.kafka.topics import create_topic
from zync_assets.lake import storage
from zync_assets.lake.head import TransactionPosition
from zync_assets.lake.log import Order
from zync_assets.lake.raw import ORDER, RawAdvance, commit_advance, open_raw
from zync_assets.lake.raw_files import LOWEST, ORDER_TYPE
from zync_assets.lake.readings import Reading, TopicEnds, keep_reading
from zync_assets.lake.staging import open_staging
from zync_assets.lake.storage import raw_uri
from zync_assets.local.services import Services
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Pipeline, RecordShape
from zync_assets.pipeline_file import load
from zync_assets.runner import ingest_all
from zync_assets_tests.etl.test_streams import SHOP, TYPE, batch, change, etl, outputs, status, target
from zync_assets_tests.lake.rows import SCHEMA, file, records
from zync_assets_tests.mini import Mini, kill, log_of, mini, run, start

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TRANSACTION = "transaction struct<id: string, total_order: bigint, data_collection_order: bigint>"
EVENT = f"{TYPE}, {TRANSACTION}"
BINLOG = TYPE.replace("lsn: bigint, sequence: string", "gtid: string, file: string, pos: bigint, row: int")
IDS = {
    "mysql": "file=mysql-bin.000003,pos={begin}",
    "mysql with GTIDs": "3e11fa47-71ca-11e1-9e33-c80aa9429562:{number}",
    "mariadb": "0-1-{number}",
}
"""The ids of the connectors for MySQL and MariaDB."""
Change = tuple[str, str, int, str]
"""The side of a change, its operation, the id of the row, and the row's text."""


@dataclass
class Source:
    """A source database with a connector that sends transaction metadata. ``lsn``: the position of its log; ``connector``: one of
    IDS, or None for PostgreSQL's."""

    it: Mini
    topic: str
    connector: str | None = None
    lsn: int = 100
    begins: dict[int, int] = field(default_factory=dict[int, int])
    """Transaction → the position of its begin."""
    sent: dict[int, dict[str, int]] = field(default_factory=dict[int, dict[str, int]])
    """Transaction → side → changes that were sent."""
    committed: int = 100
    delayed: list[tuple[str, str, Any]] = field(default_factory=list[tuple[str, str, Any]])
    """Topic, key and value of the changes that the producer has in flight."""

    def name(self, side: str) -> str:
        return self.it.left if side == "left" else self.it.right

    def id(self, transaction: int) -> str:
        begin = self.begins.setdefault(transaction, self.lsn)
        if self.connector is None:
            return f"{transaction}:{self.lsn}"
        return IDS[self.connector].format(begin=begin, number=transaction)

    def changes(self, transaction: int, *changes: Change, delayed: bool = False) -> None:
        """Send changes of a transaction to the topics of their tables. ``delayed``: ``deliver`` sends them."""
        for side, op, id, text in changes:
            self.lsn += 1
            counts = self.sent.setdefault(transaction, {})
            counts[side] = counts.get(side, 0) + 1
            value = change(op, id, text, self.lsn)
            if self.connector is None:
                value["source"]["sequence"] = json.dumps([str(self.committed), str(self.lsn)])
            else:
                place = {"file": "mysql-bin.000003", "pos": self.lsn, "row": 0}
                value["source"] = {"connector": self.connector.split()[0], "name": "shop", "snapshot": "false", **place}
            order = {"total_order": sum(counts.values()), "data_collection_order": counts[side]}
            value["transaction"] = {"id": self.id(transaction), **order}
            if delayed:
                self.delayed.append((self.name(side), str(id), value))
            else:
                self.it.send(self.name(side), (str(id), value))

    def deliver(self) -> None:
        """Send the delayed changes."""
        for topic, key, value in self.delayed:
            self.it.send(topic, (key, value))
        self.delayed = []

    def begin(self, transaction: int) -> None:
        """Send the BEGIN record."""
        self.lsn += 1
        id = self.id(transaction)
        self.it.send(self.topic, (json.dumps({"id": id}), {"status": "BEGIN", "id": id}))

    def commit(self, transaction: int, **counts: int) -> None:
        """Send the END record. ``counts``: side → changes, if not all of them were sent."""
        self.lsn += 10
        self.committed = self.lsn
        prefix = self.topic.rpartition(".")[0]
        numbers: Mapping[str, int] = self.sent.get(transaction, {}) | counts
        collections = [
            {"data_collection": self.name(side).removeprefix(f"{prefix}."), "event_count": count}
            for side, count in numbers.items()
        ]
        id = self.id(transaction)
        value = {"status": "END", "id": id, "event_count": sum(numbers.values()), "data_collections": collections}
        self.it.send(self.topic, (json.dumps({"id": id}), value))

    def ingest(self) -> None:
        topics = [item.topic for item in self.it.pipeline.inputs]
        list(ingest_all(self.it.pipeline, lambda: self.it.spark, topics))

    def run(self) -> None:
        """Ingest everything, and transform what can be transformed."""
        self.ingest()
        etl(self.it)


@pytest.fixture
def source(
    request: pytest.FixtureRequest, services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> Source:
    connector: str | None = getattr(request, "param", None)
    topic = f"{unique}.transaction"
    event = EVENT if connector is None else f"{BINLOG}, {TRANSACTION}"
    text = SHOP.replace(TYPE, event) + f"transactions: {{topic: {topic}, format: json}}\n"
    it = mini(services, spark, tmp_path, unique, text)
    create_topic(it.pipeline.kafka, topic, 1, 1, {})
    return Source(it, topic, connector)


@pytest.mark.parametrize("source", [None, pytest.param("mysql with GTIDs", marks=pytest.mark.slow)], indirect=True)
def test_a_transaction_is_transformed_when_all_its_changes_are_there(source: Source) -> None:
    """A change in quarantine counts, and the topics of the input and of the transactions are ingested together."""
    it = source.it
    second, third = ("2", "3") if source.connector is None else (source.id(2), source.id(3))
    source.begin(1)
    source.changes(1, ("left", "c", 1, "a"), ("right", "c", 1, "new"))
    source.commit(1)
    source.begin(2)
    source.changes(2, ("left", "u", 1, "b"))
    source.changes(2, ("right", "u", 1, "paid"), delayed=True)
    source.commit(2)
    source.begin(3)
    source.changes(3, ("left", "c", 2, "c"), ("left", "u", 1, "d"))
    source.run()
    assert target(it) == {"1": {"l": "a", "r": "new"}}
    waiting = status(it)
    assert waiting == {**waiting, "waiting": 3, "topic": it.right, "transaction": second, "incomplete": 0}
    source.deliver()
    source.run()
    assert target(it) == {"1": {"l": "b", "r": "paid"}}
    assert status(it) == {**waiting, "waiting": 2, "topic": source.topic, "transaction": third}
    it.send(it.right, ("2", b"{no JSON"))
    source.commit(3, right=1)
    source.run()
    assert target(it) == {"1": {"l": "d", "r": "paid"}}
    assert status(it) == {**waiting, "waiting": 0, "topic": None, "partition": None, "transaction": None}
    assert [found.name for found in run_all(it.pipeline) if not found.passed and found.severity == "error"] == []
    found = source_order(it.pipeline, "Staging")
    assert (found.passed, found.numbers["incomplete_transactions"]) == (True, 0)
    assert {topic for topic, _ in it.head.inputs} == {it.left, it.right}


@pytest.mark.slow
def test_a_staging_commit_has_whole_transactions_however_many_records_they_have(source: Source) -> None:
    """The outputs do not depend on the limit of a batch."""
    it = source.it
    for number in range(4):
        source.changes(number, ("left", "c", number, "a"), ("right", "c", number, "new"))
        source.changes(number, *[("left", "u", number, f"b{count}") for count in range(3)])
        source.commit(number)
    source.ingest()
    sizes: list[int] = []
    while batch(it, 3):
        sizes.append(len(outputs(it)))
    assert sizes == [4, 8, 12, 16]
    assert [key for key, _ in outputs(it)] == [str(number) for number in range(4) for _ in range(4)]
    assert it.head.transactions == {"shop": TransactionPosition((source.committed, 0))}


def staged_ends(it: Mini) -> list[int]:
    """The numbers of outputs that the versions of the staging table show, in the order of the versions."""
    if open_staging(it.pipeline.lake, "Staging") is None:
        return []
    table, ends = DeltaTable(f"{it.pipeline.lake}/Staging"), list[int]()
    for version in range(table.version() + 1):
        table.load_as_version(version)
        files = pa.table(table.get_add_actions(flatten=True)).to_pylist()
        ends.append(sum(row["num_records"] for row in files if row["partition.topic"] == it.out))
    return ends


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_never_stages_a_part_of_a_transaction(source: Source) -> None:
    """``zync run`` is killed six times at random moments while transactions are on their way."""
    it, random = source.it, Random(3)
    source.changes(0, *((side, "c", id, "0") for id in range(5) for side in ("left", "right")))
    source.commit(0)
    sizes = Counter({"0": 5})
    for _ in range(6):
        process = start(it.pipeline, "run")
        last = len(staged_ends(it)) + random.randint(1, 6)
        while len(staged_ends(it)) < last:
            number = len(sizes)
            rows = [(random.choice(["left", "right"]), "u", random.randrange(5), str(number)) for _ in range(6)]
            cut = random.randint(0, 5)
            source.changes(number, *rows[:cut])
            with suppress(subprocess.TimeoutExpired):
                process.wait(random.uniform(0, 0.2))
            source.changes(number, *rows[cut:])
            source.commit(number)
            sizes[str(number)] = len(rows)
        kill(process, log_of(it.pipeline))
    run(it.pipeline, "run", "--until-idle")
    texts = [next(text for text in value.values() if text is not None) for _, value in outputs(it)]
    assert Counter(texts) == sizes
    ends = staged_ends(it)
    assert len(ends) > 6
    for end in ends:
        assert all(count == sizes[text] for text, count in Counter(texts[:end]).items()), end


@pytest.mark.slow
def test_a_transaction_that_stays_incomplete_is_let_through_and_named(source: Source) -> None:
    it = source.it
    source.changes(1, ("left", "c", 1, "a"), ("right", "c", 1, "new"))
    source.commit(1)
    source.changes(2, ("left", "u", 1, "b"))
    source.changes(2, ("right", "u", 1, "paid"), ("right", "u", 1, "sent"), delayed=True)
    source.commit(2)
    source.run()
    assert target(it) == {"1": {"l": "a", "r": "new"}}
    assert it.pipeline.transactions is not None
    it.pipeline = replace(it.pipeline, transactions=replace(it.pipeline.transactions, limit=0.0))
    source.run()
    assert target(it) == {"1": {"l": "b", "r": "new"}}
    found = source_order(it.pipeline, "Staging")
    assert not found.passed
    assert found.severity == "warn"
    assert "1 transactions of shop" in found.summary
    assert "the last of them 2" in found.summary
    assert status(it)["incomplete"] == 1
    source.deliver()
    source.run()
    assert target(it) == {"1": {"l": "b", "r": "sent"}}
    assert it.head.transactions["shop"].incomplete == 1


def test_an_input_with_a_shape_confirms_the_end_of_a_transaction_by_readings(source: Source) -> None:
    """The deletion is left out before the lake."""
    it = source.it
    first, second = it.pipeline.inputs[:2]
    shaped = replace(first, shape=RecordShape("value.op <> 'd'", {}))
    it.pipeline = replace(it.pipeline, inputs=(shaped, second, *it.pipeline.inputs[2:]))
    source.changes(1, ("left", "c", 1, "a"), ("left", "d", 1, "a"), ("right", "c", 1, "new"))
    source.commit(1)
    source.run()
    assert target(it) == {"1": {"l": "a", "r": "new"}}


def raw_table(pipeline: Pipeline, topic: str, rows: Sequence[tuple[Order, dict[str, Any]]], kind: pa.DataType) -> None:
    """Commit one file with orders and values to the raw table of a topic."""
    uri = raw_uri(pipeline.lake, "Raw", topic)
    columns = records(list(range(len(rows)))).to_pydict() | {"value": [value for _, value in rows]}
    columns["order"] = [{"high": high, "low": low} for (high, low), _ in rows]
    schema = SCHEMA.set(SCHEMA.get_field_index("value"), pa.field("value", kind)).append(pa.field(ORDER, ORDER_TYPE))
    batch = pa.RecordBatch.from_pydict(columns, schema)
    advance = RawAdvance(topic, "id", schema, [file(uri, batch)], {0: 0}, {0: len(rows)})
    commit_advance(uri, None, replace(advance, orders={0: rows[-1][0]}, domain="shop"))


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """A pipeline whose plans need neither a broker nor Spark."""
    monkeypatch.setattr(etl_plan, "check_begins", lambda *_: None)
    path = tmp_path / "shop.yaml"
    text = SHOP.replace(TYPE, EVENT) + "transactions: {topic: shop.transaction, format: json}\n"
    path.write_text(Template(f"lake: lake\n{text}").substitute(left="shop.left", right="shop.right", out="out"))
    return load(path)


@pytest.mark.parametrize("connector", [None, *IDS])
def test_changes_are_counted_in_the_files_of_the_lake(offline: Pipeline, connector: str | None) -> None:
    """Columns that a file lacks are null. The ids of MySQL and MariaDB hold no ends, and the changes show them."""
    pipeline = offline
    event = pa.struct(
        [("op", pa.string()), ("transaction", pa.struct([("id", pa.string()), ("data_collection_order", pa.int64())]))]
    )
    end = pa.struct(
        [
            ("status", pa.string()),
            ("id", pa.string()),
            (
                "data_collections",
                pa.list_(pa.struct([("data_collection", pa.string()), ("event_count", pa.int64())])),
            ),
        ]
    )

    def id_of(name: int, lsn: int) -> str:
        return f"{name}:{lsn}" if connector is None else IDS[connector].format(begin=name, number=name)

    def changed(name: int, number: int) -> dict[str, Any]:
        return {"op": "c", "transaction": {"id": id_of(name, 7), "data_collection_order": number}}

    def ended(name: int, lsn: int, **counts: int) -> tuple[Order, dict[str, Any]]:
        numbers = [{"data_collection": table, "event_count": count} for table, count in counts.items()]
        row = {"status": "END", "id": id_of(name, lsn), "data_collections": numbers}
        return (lsn, 0) if connector is None else LOWEST, row

    left = [((10, 11), changed(1, 1)), ((10, 12), changed(1, 2)), ((20, 21), changed(2, 1)), ((30, 31), changed(3, 1))]
    raw_table(pipeline, "shop.left", left, event)
    raw_table(pipeline, "shop.right", [((10, 13), changed(1, 1)), ((20, 22), changed(2, 1))], event)
    closed = [ended(1, 20, left=2, right=1), ended(2, 30, left=1, right=1), ended(3, 40, left=1, right=1)]
    raw_table(pipeline, "shop.transaction", closed, end)
    ends = {topic: TopicEnds("id", {0: count}) for topic, count in (("shop.left", 4), ("shop.right", 2))}
    ends["shop.transaction"] = TopicEnds("id", {0: 3})
    for at in (1.0, 2.0):
        keep_reading(pipeline.lake, "Raw", Reading(at, at, ends), pipeline.order_delay)
    plan = plan_etl(pipeline, "Staging")
    assert plan.ranges == {"shop.left": (OffsetRange(0, 0, 3),), "shop.right": (OffsetRange(0, 0, 2),)}
    ends_of_two = [(20, 0), (30, 0)] if connector is None else [(10, 14), (20, 23)]
    first, second = (TransactionPosition(end, next=at) for end, at in zip(ends_of_two, (1, 2), strict=True))
    if connector is None:
        first, second = replace(first, next=None), replace(second, next=None)
    assert plan.cuts["shop"].transactions == second
    assert plan.cuts["shop"].blocker == OpenTransaction("3" if connector is None else id_of(3, 0), ("shop.right",))
    plan = plan_etl(pipeline, "Staging", limit=2)
    assert plan.ranges == {"shop.left": (OffsetRange(0, 0, 2),), "shop.right": (OffsetRange(0, 0, 1),)}
    assert plan.cuts["shop"].transactions == first


def test_an_input_of_mysql_that_cannot_be_counted_is_an_error(offline: Pipeline) -> None:
    pipeline = offline
    state = open_raw(pipeline.lake, "Raw", "shop.left")
    for changes, cure in (
        ({"inputs": (replace(pipeline.inputs[0], shape=RecordShape("value.op <> 'd'", {})),)}, "Remove `where`"),
        ({"transactions": replace(pipeline.transactions, topic="other.transaction")}, "transactions.collections"),
    ):
        made = replace(pipeline, **{"inputs": pipeline.inputs, **changes})
        with pytest.raises(EtlError, match=rf"input shop.left: .* hold no end.*{cure}"):
            collection_of(made, "shop.left", state, is_binlog=True)


def test_a_topic_without_positions_is_refused(source: Source) -> None:
    source.it.send(source.topic, ("k", {"status": "END", "id": "0a001b00fe010000"}))
    with pytest.raises(SchemaError, match=r"0a001b00.*holds no position.*Remove transactions:"):
        source.ingest()


def test_a_tick_without_new_records_reads_no_transactions(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    source.changes(1, ("left", "c", 1, "a"))
    source.commit(1)
    source.run()
    monkeypatch.setattr(storage, "read_file", None)
    assert plan_etl(source.it.pipeline, "Staging").nothing_to_do
    source.changes(2, ("left", "u", 1, "b"))
    source.it.ingest(source.it.left)
    monkeypatch.undo()
    plan_etl(source.it.pipeline, "Staging")
    monkeypatch.setattr(storage, "read_file", None)
    assert plan_etl(source.it.pipeline, "Staging").nothing_to_do, "the files were read already"
