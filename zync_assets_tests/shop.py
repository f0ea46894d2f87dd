"""Changes of two tables of a shop as a CDC tool writes them, a pipeline over them, and the same pipeline as a model.

Orders have 3 partitions and statuses 2. Topic names have dots, and keys are strings. The changes include creations with a
counterpart on the other side, several creations with the same join key, orphans, null join keys and updates. They also
include deletes with tombstones, records that no rule takes, and bytes that are not Avro.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import fastavro
from confluent_kafka import Producer

from zync_assets.kafka.registry import Registry
from zync_assets.local.services import Services
from zync_assets.pipeline import Pipeline, RegistryConfig
from zync_assets_tests.mini import framed, make_pipeline
from zync_assets_tests.model import GARBAGE, Model, Record
from zync_assets_tests.shop_rules import Topics, customers_topic, event_topics, shop_model, shop_topics

EPOCH = 1_700_000_000_000


def _envelope(name: str, fields: list[dict[str, Any]]) -> dict[str, Any]:
    row = {"type": "record", "name": f"{name}Row", "fields": fields}
    return {
        "type": "record",
        "name": f"{name}Envelope",
        "fields": [
            {"name": "before", "type": ["null", row]},
            {"name": "after", "type": ["null", f"{name}Row"]},
            {"name": "op", "type": "string"},
        ],
    }


ORDER = _envelope(
    "Order",
    [
        {"name": "id", "type": ["null", "long"]},
        {"name": "customer", "type": "string"},
        {"name": "item", "type": ["null", "string"]},
    ],
)
STATUS = _envelope("Status", [{"name": "order_id", "type": ["null", "long"]}, {"name": "status", "type": "string"}])

FILE = """
inputs:
  - {topic: $orders, pool: Raw, key-format: string, value-format: avro, unmatched: drop}
  - {topic: $status, pool: Raw, key-format: string, value-format: avro${retention}}
outputs:
  - {topic: $new, pool: Staging, format: avro${held}, create: {partitions: $count, replication-factor: 1}}
  - {topic: $audit, pool: Staging, key-format: string, value-format: avro, create: {replication-factor: 1}}$view$outputs
transforms:
  - name: new-order
    type: denorm
    where: value.op IN ('c', 'r')
    left: $orders
    right: $status
    join-on: left.value.after.id = right.value.after.order_id
    out: $new
    key: {id: left.value.after.id}
    value:
      id: left.value.after.id
      customer: left.value.after.customer
      item: left.value.after.item
      status: right.value.after.status
  - name: status-update
    type: stateless
    where: value.op = 'u'
    in: $status
    out: $new
    key: {id: in.value.after.order_id}
    value: {id: in.value.after.order_id, status: in.value.after.status}
  - name: erase-item
    type: stateless
    where: value.op = 'u' AND value.after.item IS NULL
    in: $orders
    out: $new
    key: {id: in.value.after.id}
    value: {id: in.value.after.id, item: NULL}
  - name: order-change
    type: stateless
    where: value.op = 'u'
    in: $orders
    out: $audit
    key: in.key
    value: {customer: in.value.after.customer, at: in.kafka.offset}
  - name: order-delete
    type: stateless
    where: value.op = 'd'
    in: $orders
    out: $new
    key: {id: in.value.before.id}
    value: null
"""
VIEW = """
  - {topic: $customers, pool: Views, format: avro, create: {replication-factor: 1}}"""
VIEWS = """
  - name: customer-orders
    type: view
    tables: {o: $orders, s: $status}
    from: o LEFT JOIN s ON s.order_id = o.id
    out: $customers
    key: {customer: o.customer}
    value:
      customer: o.customer
      sent: count(*) FILTER (WHERE s.status = 'sent')
      orders: collect_list(struct(o.id, o.item, s.status))
"""
EVENT_OUTPUTS = """
  - {topic: $met, pool: Events, format: avro, create: {partitions: 3, replication-factor: 1}}
  - {topic: $changed, pool: Events, format: avro, create: {partitions: 3, replication-factor: 1}}"""
EVENTS = """
  - name: met
    type: group
    records: {o: $orders, s: $status}
    where: value.op IN ('c', 'r')
    group-by: {o: value.after.id, s: value.after.order_id}
    complete-when: count_if(topic = '$orders') > 0 AND count_if(topic = '$status') > 0
    out: $met
    key: {id: max(o.value.after.id)}
    value: {id: max(o.value.after.id), orders: count(o.value), statuses: count(s.value), customer: first(o).value.after.customer}
  - name: changed
    type: denorm
    left: $orders
    right: $status
    where: value.op = 'u'
    join-on: left.value.after.id = right.value.after.order_id
    expire-after: 2s
    on-expire: emit
    out: $changed
    key: {id: 'coalesce(left.value.after.id, right.value.after.order_id)'}
    value: {item: left.value.after.item, status: right.value.after.status}
"""
SINKS = """
sinks:
  - {name: latest, type: sqlite, url: shop.db, from: [Staging.$new], table: latest}
  - {name: audits, type: sqlite, url: shop.db, from: [Staging.$audit], table: audits, mode: insert}
  - {name: orders, type: sqlite, url: shop.db, from: [Raw.$orders], table: orders, mode: insert}
"""


@dataclass
class Shop:
    """A pipeline with its topics. ``sent``: (topic, partition) → the records that are in Kafka, in order."""

    pipeline: Pipeline
    servers: str
    registry: Registry
    orders: str
    status: str
    new: str
    audit: str
    customers: str
    """The topic of the view, if the pipeline has one."""
    ids: Mapping[str, int]
    files: Path
    """The folder that the lake's files lie in."""
    held: bool
    sent: dict[tuple[str, int], list[Record]] = field(default_factory=dict)

    def partitions(self, topic: str) -> list[int]:
        return sorted(partition for name, partition in self.sent if name == topic)

    def produce(self, changes: Iterable[tuple[str, int, int, Any, Any]]) -> list[Record]:
        """Send (topic, partition, timestamp, key, value) to Kafka; the records as they lie there."""
        producer = Producer({"bootstrap.servers": self.servers, "linger.ms": 20, "enable.idempotence": True})
        made: list[Record] = []
        for topic, partition, timestamp, key, value in changes:
            log = self.sent[topic, partition]
            record = Record(topic, partition, len(log), timestamp, key, GARBAGE if isinstance(value, bytes) else value)
            log.append(record)
            made.append(record)
            producer.produce(topic, self.encoded(topic, value), key, partition, timestamp=timestamp)
            if len(made) % 1000 == 0:
                producer.poll(0)
        assert producer.flush(60) == 0
        return made

    def encoded(self, topic: str, value: Any) -> bytes | None:
        """A value of one of the input topics as Kafka holds it."""
        if value is None or isinstance(value, bytes):
            return value
        return framed(self.ids[topic], _PARSED[topic == self.orders], value)

    @property
    def met(self) -> str:
        return event_topics(self.orders)[0]

    @property
    def changed(self) -> str:
        return event_topics(self.orders)[1]

    @property
    def topics(self) -> Topics:
        return Topics(self.orders, self.status, self.new, self.audit)

    def model(self) -> Model:
        return shop_model(*self.topics, held=self.held)


_PARSED = {True: fastavro.parse_schema(ORDER), False: fastavro.parse_schema(STATUS)}


def make_shop(
    services: Services,
    folder: Path,
    prefix: str,
    *,
    partitions: tuple[int, int] = (3, 2),
    settle: str = "1",
    there: bool = False,
    lake: str | None = None,
    files: Path | None = None,
    retention: str = "",
    held: bool = True,
    count: int = 1,
    sinks: bool = False,
    views: bool = False,
    events: bool = False,
) -> Shop:
    """Empty topics and a pipeline over them, its lake in ``folder``, or as the text ``lake`` says, with its files in ``files``.
    ``there``: the topics were made before, and what they hold is not in ``sent``; ``retention``: of the raw statuses;
    ``held``: whether a change waits behind a pending record of its row; ``count``: the partitions of the topic of new orders;
    ``sinks``: whether SQLite gets tables; ``views``: whether a second staging pool has a view; ``events``: whether a
    pool has a group and pairs that expire (``torture.events``)."""
    orders, status, new, audit = shop_topics(prefix)
    options = {
        "retention": f", retention: {retention}" if retention else "",
        "held": "" if held else ", hold: false",
        "count": str(count),
    }
    customers = customers_topic(prefix)
    met, changed = event_topics(orders)
    text = FILE.replace("$view", VIEW if views else "").replace("$outputs", EVENT_OUTPUTS if events else "")
    text += "".join([VIEWS if views else "", EVENTS if events else "", SINKS if sinks else ""])
    names = {"orders": orders, "status": status, "new": new, "audit": audit, "customers": customers}
    text = Template(text).substitute(names, met=met, changed=changed, **options)
    made = () if there else partitions
    pipeline = make_pipeline(services, folder, text, name="shop", lake=lake, settle=settle, partitions=made)
    registry = Registry(RegistryConfig(services.registry_url))
    ids = {
        topic: registry.register(f"{topic}-value", json.dumps(schema))
        for topic, schema in ((orders, ORDER), (status, STATUS))
    }
    empty: dict[tuple[str, int], list[Record]] = {
        (topic, partition): []
        for topic, count in zip((orders, status), partitions, strict=True)
        for partition in range(count)
    }
    return Shop(
        pipeline,
        services.bootstrap_servers,
        registry,
        orders,
        status,
        new,
        audit,
        customers,
        ids,
        files or folder / "lake",
        held,
        empty,
    )


def changes(shop: Shop, orders: range, seed: int, *, sticky: bool = True) -> Iterator[tuple[str, int, int, Any, Any]]:
    """About four records for each order. The times of records mostly ascend, like in real tables.

    ``sticky``: the records of a key share a partition, so that the pairs do not depend on the cut of batches. Otherwise
    creations of a key lie in any partition.
    """
    dice = random.Random(seed)
    now = EPOCH + orders.start * 10

    def send(topic: str, key: str, value: Any, anywhere: bool = False) -> tuple[str, int, int, Any, Any]:
        nonlocal now
        now += dice.choice((0, 0, 1, 5))
        found = shop.partitions(topic)
        partition = dice.choice(found) if anywhere and not sticky else hash_of(key) % len(found)
        back = dice.randrange(2000) if dice.random() < 0.05 else 0
        return topic, partition, now - back, key, value

    for number in orders:
        key = f"order-{number}"
        row = {"id": number, "customer": f"customer {number % 97}", "item": dice.choice(("book", "lamp", None))}
        state = {"order_id": number, "status": "open"}
        yield send(shop.orders, key, _change("c" if number % 2 else "r", None, row))
        if number % 13:
            yield send(shop.status, key, _change("r", None, state))
        if number % 20 == 3:
            for again in range(dice.randrange(1, 4)):
                yield send(shop.orders, key, _change("c", None, {**row, "item": f"again {again}"}), anywhere=True)
            for again in range(dice.randrange(1, 4)):
                yield send(shop.status, key, _change("c", None, {**state, "status": f"s{again}"}), anywhere=True)
        if number % 3 == 0:
            yield send(shop.status, key, _change("u", None, {**state, "status": "paid"}))
            yield send(shop.orders, key, _change("u", row, {**row, "item": dice.choice((None, "chair"))}))
        if number % 2 == 0:
            yield send(shop.status, key, _change("u", state, {**state, "status": "sent"}))
        if number % 17 == 0:
            yield send(shop.orders, key, _change("d", row, None))
            yield send(shop.orders, key, None)
            yield send(shop.status, key, _change("d", state, None))
            yield send(shop.status, key, None)
        if number % 101 == 0:
            yield send(shop.orders, key, _change("c", None, {**row, "id": None}))
            yield send(shop.status, key, _change("c", None, {**state, "order_id": None}))
            yield send(shop.orders, key, _change("t", None, None))
        if number % 211 == 0:
            yield send(shop.orders, key, b"no avro at all")
            yield send(shop.status, key, b"\0" + shop.ids[shop.status].to_bytes(4, "big") + b"\2")
            yield send(shop.status, key, b"\0\x7f\xff\xff\xff\2")


def _change(op: str, before: Any, after: Any) -> dict[str, Any]:
    return {"before": before, "after": after, "op": op}


def hash_of(key: str) -> int:
    """The same in every process, unlike ``hash``."""
    return sum(key.encode()) * 31 + len(key)
