"""PostgreSQL → Debezium → ``zync run`` → JDBC sink → PostgreSQL, all at once: the target is the source's join, row by row.

Two sessions change three tables in transactions that overlap. The changes come in bursts, which Debezium sends with one
timestamp. The connector starts in the middle of a burst, so that its snapshot runs beside the changes. With transaction metadata,
every staging commit also shows a state that the source had.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import psutil
import psycopg
import pytest
from confluent_kafka import Consumer, TopicPartition
from deltalake import DeltaTable

from zync_assets import pipeline_file
from zync_assets.kafka.topics import survey
from zync_assets.lake.head import Head
from zync_assets.lake.log import LakeTable
from zync_assets.lake.raw import open_raw
from zync_assets.lake.staging import open_staging, staging_state
from zync_assets.lake.storage import staging_uri
from zync_assets.local.services import Services
from zync_assets.pipeline import Pipeline
from zync_assets.runner import etl_all, ingest_all, publish_all
from zync_assets_tests.connect import Postgres, Worker, postgres, sink_settings, source_settings, worker
from zync_assets_tests.mini import start
from zync_assets_tests.services import SPARK

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SOURCE = (
    """CREATE TABLE orders (
      id bigint PRIMARY KEY,
      customer text NOT NULL,
      item text,
      quantity integer NOT NULL,
      price numeric(10, 2) NOT NULL,
      ordered_at timestamptz NOT NULL
    )""",
    """CREATE TABLE order_status (
      order_id bigint PRIMARY KEY REFERENCES orders ON UPDATE CASCADE ON DELETE CASCADE,
      status text NOT NULL,
      changed_at timestamptz NOT NULL
    )""",
    """CREATE TABLE shipments (
      order_id bigint PRIMARY KEY REFERENCES order_status ON UPDATE CASCADE ON DELETE CASCADE,
      carrier text NOT NULL
    )""",
)
COLUMNS = "id, customer, item, quantity, price, ordered_at, status, changed_at, carrier"
JOIN = f"""SELECT {COLUMNS} FROM orders JOIN order_status ON order_status.order_id = id
  LEFT JOIN shipments ON shipments.order_id = id ORDER BY id"""
TARGET = """CREATE TABLE orders (id bigint PRIMARY KEY, customer text, item text, quantity integer, price numeric(10, 2),
  ordered_at timestamptz, status text, changed_at timestamptz, carrier text)"""
"""PostgreSQL checks NOT NULL before it looks for a conflict. An upsert of some columns therefore needs nullable ones."""

PIPELINE = """
name: $name
kafka: {bootstrap.servers: "$servers"}
registry: {url: "$registry"}
lake: $lake
spark: $spark
inputs:
  - {topic: $prefix.public.orders, pool: Raw$order}
  - {topic: $prefix.public.order_status, pool: Raw$order}
  - {topic: $prefix.public.shipments, pool: Raw$order}
$metadata
outputs:
  - {topic: $out, pool: Staging, create: {replication-factor: 1}}
transforms:
  - name: order
    type: denorm
    where: value.op IN ('c', 'r')
    left: $prefix.public.orders
    right: $prefix.public.order_status
    join-on: left.value.after.id = right.value.after.order_id
    out: $out
    key: {id: left.value.after.id}
    value:
      id: left.value.after.id
      customer: left.value.after.customer
      item: left.value.after.item
      quantity: left.value.after.quantity
      price: left.value.after.price
      ordered_at: left.value.after.ordered_at
      status: right.value.after.status
      changed_at: right.value.after.changed_at
  - name: order-update
    type: stateless
    where: value.op = 'u'
    in: $prefix.public.orders
    out: $out
    key: {id: in.value.after.id}
    value: in.value.after
  - name: order-delete
    type: stateless
    where: value.op = 'd'
    in: $prefix.public.orders
    out: $out
    key: {id: in.value.before.id}
    value: null
  - name: status-update
    type: stateless
    where: value.op = 'u'
    in: $prefix.public.order_status
    out: $out
    key: {id: in.value.after.order_id}
    value:
      id: in.value.after.order_id
      status: in.value.after.status
      changed_at: in.value.after.changed_at
  - name: shipment
    type: stateless
    where: value.op IN ('c', 'r', 'u')
    in: $prefix.public.shipments
    out: $out
    key: {id: in.value.after.order_id}
    value: {id: in.value.after.order_id, carrier: in.value.after.carrier}
"""
"""Orders come first. Among records of one time, the deletion of an order is therefore before the status that completes it."""
METADATA = """
  - {topic: $prefix.transaction, pool: Raw}
transactions: {topic: $prefix.transaction}
"""

BURSTS, BURST = 50, 100
"""The least number of bursts, and the changes of each."""
COMMITS = 5
"""The ETL commits that the changes last for at the least."""


@dataclass(frozen=True)
class Row:
    """An order in the source, and which of the other tables have it."""

    has_status: bool = False
    has_shipment: bool = False


class Session:
    """A session that changes random rows of its own ids, in one transaction after another."""

    def __init__(self, server: Postgres, dice: random.Random, place: int) -> None:
        self.connection = psycopg.connect(host="127.0.0.1", port=server.port, user="postgres", dbname="source")
        self.dice = dice
        self.next_id = place
        self.rows: dict[int, Row] = {}
        """By id, the newest last."""
        self.free: list[int] = []
        """Ids of deleted rows."""
        self.committed: tuple[dict[int, Row], list[int]] = {}, []
        self.changes = self.open = 0

    def change(self) -> None:
        """Make one change. A transaction has five on average, and one in ten is rolled back."""
        if not self.rows or self.dice.random() < 0.3:
            self._create()
        else:
            newest = self.dice.random() < 0.3
            self._change(next(reversed(self.rows)) if newest else self.dice.choice(list(self.rows)))
        self.open += 1
        if self.dice.random() < 0.2:
            self.end(keep=self.dice.random() < 0.9)

    def end(self, *, keep: bool = True) -> None:
        """End the transaction."""
        if keep:
            self.connection.commit()
            self.committed = dict(self.rows), list(self.free)
            self.changes += self.open
        else:
            self.connection.rollback()
            self.rows, self.free = dict(self.committed[0]), list(self.committed[1])
        self.open = 0

    def create_whole(self) -> int:
        """A new order with its status and shipment in a transaction of its own; its id."""
        self.end()
        id = self._new_id()
        self._insert_order(id)
        self._insert_status(id)
        self._run("INSERT INTO shipments VALUES (%s, 'last')", id)
        self.open += 3
        self.end()
        return id

    def _create(self) -> None:
        again = bool(self.free) and self.dice.random() < 0.2
        id = self.free.pop(self.dice.randrange(len(self.free))) if again else self._new_id()
        self._insert_order(id)

    def _change(self, id: int) -> None:
        row, chance = self.rows[id], self.dice.random()
        if chance < 0.15:
            self._run("DELETE FROM orders WHERE id = %s", id)
            del self.rows[id]
            self.free.append(id)
        elif chance < 0.2:
            new = self._new_id()
            self._run("UPDATE orders SET id = %s WHERE id = %s", new, id)
            self.rows[new] = self.rows.pop(id)
            self.free.append(id)
        elif chance < 0.45:
            sets = "item = %s, quantity = %s, price = %s"
            self._run(f"UPDATE orders SET {sets} WHERE id = %s", self._item(), *self._amounts(), id)
        elif not row.has_status:
            self._insert_status(id)
        elif chance < 0.75 or row.has_shipment:
            self._run("UPDATE order_status SET status = %s, changed_at = now() WHERE order_id = %s", self._text(), id)
        else:
            self._run("INSERT INTO shipments VALUES (%s, %s)", id, self._text())
            self.rows[id] = replace(row, has_shipment=True)

    def _insert_order(self, id: int) -> None:
        row = id, self._text(), self._item(), *self._amounts()
        self._run("INSERT INTO orders VALUES (%s, %s, %s, %s, %s, clock_timestamp())", *row)
        self.rows[id] = Row()

    def _insert_status(self, id: int) -> None:
        self._run("INSERT INTO order_status VALUES (%s, %s, clock_timestamp())", id, self._text())
        self.rows[id] = Row(has_status=True)

    def _new_id(self) -> int:
        self.next_id += 2
        return self.next_id

    def _text(self) -> str:
        return f"text {self.dice.randrange(10**6)}"

    def _item(self) -> str | None:
        return None if self.dice.random() < 0.2 else self._text()

    def _amounts(self) -> tuple[int, str]:
        return self.dice.randrange(100), f"{self.dice.randrange(10**6) / 100:.2f}"

    def _run(self, statement: str, *values: object) -> None:
        self.connection.execute(statement.encode(), values)


class Workload:
    """Two sessions whose transactions overlap."""

    def __init__(self, server: Postgres) -> None:
        """Make the database and its first rows."""
        server.run("postgres", "CREATE DATABASE source")
        server.run("source", *SOURCE)
        self.dice = random.Random(18)
        self.sessions = [Session(server, self.dice, place) for place in range(2)]
        self.bursts = 0
        self.burst()

    def burst(self, half_way: Callable[[], None] | None = None) -> None:
        """Many changes at once. Transactions may stay open to the next burst."""
        for place in range(BURST):
            if place == BURST // 2 and half_way is not None:
                half_way()
            self.dice.choice(self.sessions).change()
        self.bursts += 1
        time.sleep(self.dice.uniform(0.1, 2.5))

    def bursts_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.burst()

    def finish(self) -> int:
        """End all transactions and create an order after them; its id."""
        for session in self.sessions:
            session.end()
        id = self.sessions[0].create_whole()
        for session in self.sessions:
            session.connection.close()
        return id

    @property
    def changes(self) -> int:
        """The committed changes."""
        return sum(session.changes for session in self.sessions)


def connector_settings(server: Postgres, prefix: str, topics: Sequence[str]) -> dict[str, str]:
    """The settings of the source connector. ``topics``: of its tables."""
    tables = ",".join(topic.removeprefix(f"{prefix}.") for topic in topics)
    return source_settings(server, "source", tables, prefix, "shop")


def make_pipeline(
    services: Services, folder: Path, name: str, prefix: str, order: str = "", *, whole: bool = False
) -> Pipeline:
    """A pipeline with a lake and an output topic of its own. ``order``: of its inputs. ``whole``: with whole transactions."""
    text = Template(PIPELINE.replace("$metadata", METADATA if whole else "")).substitute(
        name=name,
        servers=services.bootstrap_servers,
        registry=services.registry_url,
        lake=folder / f"{name}-lake",
        spark=json.dumps(SPARK),
        prefix=prefix,
        out=f"{prefix}.{name}",
        order=order,
    )
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return pipeline_file.load(path)


@contextmanager
def zync_run(pipeline: Pipeline, log: Path) -> Generator[subprocess.Popen[bytes]]:
    """``zync run`` beside the test. It must end well when it is asked to."""
    process = start(pipeline, "run", log=log)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(120)
    assert code == 0, log.read_text()


def while_running(process: subprocess.Popen[bytes], holds: Callable[[], bool]) -> Callable[[], bool]:
    """``holds``, which fails if the process has ended."""

    def checked() -> bool:
        assert process.poll() is None, "zync run has ended"
        return holds()

    return checked


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    """The CPU time of a process and of all that it started."""
    root = psutil.Process(process.pid)
    times = [each.cpu_times() for each in [root, *root.children(recursive=True)]]
    return sum(item.user + item.system for item in times)


def head(pipeline: Pipeline) -> Head:
    state = open_staging(pipeline.lake, "Staging")
    return Head() if state is None else state.head


def ends(pipeline: Pipeline, *topics: str) -> dict[str, int]:
    """Topic → number of its records, without topics that are not there."""
    states = survey(pipeline.kafka, topics).states
    return {topic: sum(part.end for part in state.partitions) for topic, state in states.items()}


def start_sink(server: Postgres, connect: Worker, pipeline: Pipeline) -> None:
    """Feed the pipeline's output to the table ``orders`` of a database with the pipeline's name."""
    server.run("postgres", f'CREATE DATABASE "{pipeline.name}"')
    server.run(pipeline.name, TARGET)
    settings = sink_settings(server, pipeline.name, "orders", pipeline.outputs[0].topic)
    connect.start(f"sink-{pipeline.name}", {**settings, "schema.evolution": "none"}, "avro")


def rows(server: Postgres, database: str, query: str) -> dict[Any, tuple[Any, ...]]:
    return {row[0]: row for row in server.run(database, query)}


def differences(server: Postgres, pipeline: Pipeline) -> dict[int, tuple[object, object]]:
    """Id → the row of the source's join, and the target's row."""
    expected = rows(server, "source", JOIN)
    actual = rows(server, pipeline.name, f"SELECT {COLUMNS} FROM orders")
    ids = sorted({*expected, *actual})
    return {id: (expected.get(id), actual.get(id)) for id in ids if expected.get(id) != actual.get(id)}


def milliseconds(pipeline: Pipeline) -> int:
    """The number of distinct Kafka timestamps of all inputs' records."""
    columns = [
        DeltaTable(f"{pipeline.lake}/Raw/{item.topic}").to_pyarrow_table(columns=["kafka"])["kafka"].to_pylist()
        for item in pipeline.inputs
    ]
    return len({record["timestamp"] for column in columns for record in column})


def outputs(pipeline: Pipeline) -> list[tuple[object, ...]]:
    """The staged outputs one after the other: key, value, rule and the places of their inputs."""
    (out,) = (item.topic for item in pipeline.outputs)
    table = DeltaTable(f"{pipeline.lake}/Staging").to_pyarrow_table(filters=[("topic", "=", out)])
    staged = sorted(table.to_pylist(), key=lambda row: row["kafka"]["offset"])
    return [(row[f"key:{out}"], row[f"value:{out}"], row["left_out"], row["rule"], row["source"]) for row in staged]


def is_whole(server: Postgres, pipeline: Pipeline, last: int) -> bool:
    """Whether the target has all columns of the order that was created after all changes."""
    return bool(server.run(pipeline.name, f"SELECT 1 FROM orders WHERE id = {last} AND status <> '' AND carrier <> ''"))


def is_fed(pipeline: Pipeline) -> bool:
    """Whether the pipeline's sink has written all outputs."""
    (out,) = (item.topic for item in pipeline.outputs)
    reader = Consumer({**pipeline.kafka, "group.id": f"connect-sink-{pipeline.name}"})
    try:
        (place,) = reader.committed([TopicPartition(out, 0)], 30)
        return place.offset == ends(pipeline, out)[out]
    finally:
        reader.close()


def seen_by_commit(pipeline: Pipeline) -> list[dict[tuple[str, int], int]]:
    """For each staging commit: (input topic, partition) → the first offset that ETL has not looked at."""
    uri = staging_uri(pipeline.lake, "Staging")
    found: list[dict[tuple[str, int], int]] = []
    for version in range(DeltaTable(uri).version() + 1):
        state = staging_state(LakeTable(uri, DeltaTable(uri, version=version)))
        if state is not None:
            found.append({place: position.seen for place, position in state.head.inputs.items()})
    return found


def transactions(pipeline: Pipeline) -> dict[str, set[tuple[str, int, int]]]:
    """Transaction → the topics, partitions and offsets of its changes, without those of the snapshot."""
    found: dict[str, set[tuple[str, int, int]]] = {}
    for topic in [item.topic for item in pipeline.inputs if item.topic.rpartition(".")[2] != "transaction"]:
        table = DeltaTable(f"{pipeline.lake}/Raw/{topic}").to_pyarrow_table(columns=["kafka", "value"])
        for kafka, value in zip(table["kafka"].to_pylist(), table["value"].to_pylist(), strict=True):
            if value is not None and value["transaction"] is not None:
                place = topic, kafka["partition"], kafka["offset"]
                found.setdefault(value["transaction"]["id"].partition(":")[0], set()).add(place)
    return found


def torn_transactions(pipeline: Pipeline) -> list[str]:
    """The transactions of which a staging commit has some changes and not the others."""
    each = transactions(pipeline)
    torn: list[str] = []
    for seen in seen_by_commit(pipeline):
        below = {name: {offset < seen.get((topic, part), 0) for topic, part, offset in at} for name, at in each.items()}
        torn += [name for name, sides in below.items() if len(sides) == 2]
    return torn


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("whole", [False, True], ids=["records", "transactions"])
def test_the_target_of_a_running_chain_is_the_source_s_join(
    services: Services,
    spark: SparkSession,
    tmp_path: Path,
    unique: str,
    record_property: Callable[[str, object], None],
    *,
    whole: bool,
) -> None:
    prefix = f"{unique}.shop"
    shop = make_pipeline(services, tmp_path, "shop", prefix, whole=whole)
    at_once = make_pipeline(services, tmp_path, "at-once", prefix, whole=whole)
    by_time = make_pipeline(services, tmp_path, "by-time", prefix, ", order: time")
    inputs = [item.topic for item in by_time.inputs]
    with postgres() as server, worker(services, tmp_path, "America/New_York") as connect:
        load = Workload(server)
        settings = connector_settings(server, prefix, inputs)
        settings |= {"topic.creation.default.partitions": "2", "provide.transaction.metadata": str(whole).lower()}
        load.burst(half_way=partial(connect.start, "source", settings, "avro"))
        load.bursts_until(lambda: len(ends(shop, *inputs)) == len(inputs))
        with zync_run(shop, tmp_path / "run.log") as process:
            began = time.monotonic()
            load.bursts_until(while_running(process, lambda: head(shop).batch > 0))
            start_sink(server, connect, shop)
            load.bursts_until(while_running(process, lambda: load.bursts >= BURSTS and head(shop).batch >= COMMITS))
            last = load.finish()
            changed = time.monotonic()
            arrived = while_running(process, lambda: is_whole(server, shop, last) and is_fed(shop))
            connect.wait("the last change is in the target", arrived, 300)
            ended = time.monotonic()
            cpu = cpu_seconds(process)
        for pipeline in (at_once, by_time):
            list(ingest_all(pipeline, lambda: spark, [item.topic for item in pipeline.inputs]))
            list(etl_all(pipeline, lambda: spark))
        list(publish_all(by_time, lambda: spark, [by_time.outputs[0].topic]))
        start_sink(server, connect, by_time)
        connect.wait("the target has all outputs in the order of time", lambda: is_fed(by_time))
        wrong, wrong_by_time = differences(server, shop), differences(server, by_time)
        count = len(server.run("source", JOIN))
    records = sum(ends(shop, *inputs).values())
    for text in (
        f"changes|{load.changes}",
        f"their records and milliseconds|{records}|{milliseconds(shop)}",
        f"rows of the join|{count}",
        f"ETL commits|{head(shop).batch}",
        f"seconds of changes, and to the last row|{changed - began:.1f}|{ended - changed:.1f}",
        f"seconds of CPU of zync run|{cpu:.1f}",
        f"rows that differ, in the source's order and by time|{len(wrong)}|{len(wrong_by_time)}",
    ):
        record_property("table: PostgreSQL to PostgreSQL in the order of the source", text)
    assert count > 500
    assert wrong_by_time, "the changes do not show an order that is wrong"
    assert wrong == {}
    assert head(shop).late == {}
    assert outputs(shop) == outputs(at_once)
    if whole:
        torn = torn_transactions(shop)
        record_property(
            "table: PostgreSQL to PostgreSQL in the order of the source",
            f"transactions, and torn ones|{len(transactions(shop))}|{len(torn)}",
        )
        assert torn == []


def kill_worker(folder: Path) -> None:
    """Kill a worker before it commits the position of its connector."""
    [java] = [
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] == "java" and str(folder / "worker.properties") in (process.info["cmdline"] or [])
    ]
    java.kill()


def changes_of(pipeline: Pipeline, topic: str) -> list[tuple[object, ...]]:
    """The changes of the raw table: key, position and kind of each, without the snapshot and the tombstones."""
    state = open_raw(pipeline.lake, "Raw", topic)
    table = [] if state is None else DeltaTable(state.table.uri).to_pyarrow_table().to_pylist()
    values = [(row["key"], row["value"]) for row in table if row["value"] and row["value"]["op"] != "r"]
    return [(*key.values(), value["source"]["lsn"], value["op"]) for key, value in values]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_changes_that_a_killed_connector_sends_again_are_left_out(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """The worker commits its position when it is stopped, and not before it is killed. One pipeline ingests before the kill and
    after it. Another pipeline ingests all records at once. Both have each change once."""
    prefix = f"{unique}.shop"
    shop = make_pipeline(services, tmp_path, "shop", prefix)
    at_once = make_pipeline(services, tmp_path, "at-once", prefix)
    inputs = [item.topic for item in shop.inputs]
    repeats: dict[str, int] = {}

    def has_order(pipeline: Pipeline, id: int) -> bool:
        for commit in ingest_all(pipeline, lambda: spark, inputs):
            repeats[pipeline.name] = repeats.get(pipeline.name, 0) + commit.repeats
        return all(any(change[0] == id for change in changes_of(pipeline, topic)) for topic in inputs)

    def is_transformed(pipeline: Pipeline) -> bool:
        list(ingest_all(pipeline, lambda: spark, inputs))
        list(etl_all(pipeline, lambda: spark))
        next_offsets = {topic: open_raw(pipeline.lake, "Raw", topic) for topic in inputs}
        return all(
            state is not None and head(pipeline).seen(topic) == state.next for topic, state in next_offsets.items()
        )

    with postgres() as server:
        load = Workload(server)
        settings = connector_settings(server, prefix, inputs)
        with worker(services, tmp_path, "UTC") as connect:
            connect.start("source", settings, "avro")
            load.bursts_until(lambda: len(ends(shop, *inputs)) == len(inputs))
            id = load.sessions[0].create_whole()
            connect.wait("the lake has the snapshot", lambda: has_order(shop, id))
        committed = {topic: len(changes_of(shop, topic)) for topic in inputs}
        with worker(services, tmp_path, "UTC", flush_seconds=600) as connect:
            connect.start("source", settings, "avro")
            load.bursts_until(lambda: load.bursts >= 10)
            id = load.sessions[0].create_whole()
            connect.wait("the lake has the changes before the kill", lambda: has_order(shop, id))
            kill_worker(tmp_path)
        before = {topic: len(changes_of(shop, topic)) for topic in inputs}
        again = sum(before.values()) - sum(committed.values())
        with worker(services, tmp_path, "UTC") as connect:
            connect.start("source", settings, "avro")
            load.burst()
            id = load.finish()
            connect.wait("the lake has the changes after the kill", lambda: has_order(shop, id))
            assert has_order(at_once, id)
            for pipeline in (shop, at_once):
                connect.wait("all is transformed", lambda pipeline=pipeline: is_transformed(pipeline))
        ids = {row[0] for row in server.run("source", JOIN)}
    assert repeats["shop"] == repeats["at-once"] >= again > 300
    for topic in inputs:
        changes = changes_of(shop, topic)
        assert len(set(changes)) == len(changes) > before[topic]
        assert sorted(changes) == sorted(changes_of(at_once, topic))
    assert outputs(shop) == outputs(at_once)
    target: dict[object, object] = {}
    for key, value, *_ in outputs(shop):
        target[key["id"]] = value  # type: ignore[index]
    assert {id for id, value in target.items() if value is not None} == ids
