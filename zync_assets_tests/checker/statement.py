"""The statement of a pipeline in plain Python: its topics, pools and rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from zync_assets_tests.model import OneToOne, Pair, Record
from zync_assets_tests.shop_rules import customers_topic, shop_rules, shop_topics


@dataclass(frozen=True)
class Input:
    """``drops``: what no rule takes is dropped and not kept as unmatched."""

    topic: str
    pool: str
    key: str
    value: str
    drops: bool = False


@dataclass(frozen=True)
class Output:
    """An output topic; all outputs of a pipeline are staged in one pool here. ``key`` and ``value`` are formats.

    ``held``: a change of a source row waits while an earlier record of the row is pending.
    """

    topic: str
    key: str
    value: str
    held: bool = False


Rows: TypeAlias = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Topic → key → latest row."""


@dataclass(frozen=True)
class View:
    """A view of Debezium's topics. ``tables``: these topics; ``result``: the (key, value) pairs for some latest rows."""

    name: str
    out: str
    tables: tuple[str, ...]
    result: Callable[[Rows], Iterable[tuple[Any, Any]]]


@dataclass(frozen=True)
class SinkTable:
    """A table that a sink writes. ``mode``: ``upsert``, of a staged topic, or ``insert``."""

    sink: str
    pool: str
    topic: str
    name: str
    mode: str = "upsert"

    @property
    def source(self) -> str:
        """The source as the table of positions names it."""
        return f"{self.pool}.{self.topic}"


@dataclass(frozen=True)
class Statement:
    """``inputs`` and ``rules`` are in the pipeline file's order; ``rules`` are those of the staging pool alone. ``sinks`` are
    looked at where their database is given."""

    inputs: Sequence[Input]
    staging: str
    outputs: Sequence[Output]
    rules: Sequence[OneToOne | Pair]
    views: Sequence[View] = ()
    sinks: Sequence[SinkTable] = ()

    @property
    def tables(self) -> frozenset[str]:
        """The inputs that are tables of views."""
        return frozenset(topic for view in self.views for topic in view.tables)

    def is_view(self, output: str) -> bool:
        """Whether an output topic is that of a view."""
        return any(view.out == output for view in self.views)

    def place(self, topic: str) -> int:
        return next(place for place, item in enumerate(self.inputs) if item.topic == topic)

    def rule_of(self, record: Record) -> OneToOne | Pair | None:
        """The first rule that takes a record."""
        return next((rule for rule in self.rules if record.topic in _topics(rule) and rule.where(record)), None)

    def is_held(self, rule: OneToOne | Pair) -> bool:
        """Whether the output of a rule is held."""
        return any(item.held for item in self.outputs if item.topic == rule.out)

    def rule(self, name: str) -> OneToOne | Pair | None:
        return next((rule for rule in self.rules if rule.name == name), None)


def _topics(rule: OneToOne | Pair) -> tuple[str, ...]:
    return (rule.topic,) if isinstance(rule, OneToOne) else (rule.left, rule.right)


def shop(prefix: str) -> Statement:
    """The shop of the tests, its topics named with a prefix."""
    names = shop_topics(prefix)
    return Statement(
        (Input(names.orders, "Raw", "string", "avro", drops=True), Input(names.status, "Raw", "string", "avro")),
        "Staging",
        (Output(names.new, "avro", "avro", held=True), Output(names.audit, "string", "avro")),
        shop_rules(names),
        sinks=(
            SinkTable("latest", "Staging", names.new, "latest"),
            SinkTable("audits", "Staging", names.audit, "audits", "insert"),
            SinkTable("orders", "Raw", names.orders, "orders", "insert"),
        ),
    )


def shop_views(prefix: str) -> Statement:
    """The shop's pool of views."""
    names, out = shop_topics(prefix), customers_topic(prefix)
    view = View(
        "customer-orders",
        out,
        (names.orders, names.status),
        lambda rows: _customers(rows[names.orders], rows[names.status]),
    )
    return replace(shop(prefix), staging="Views", outputs=(Output(out, "avro", "avro"),), rules=(), views=(view,))


def _customers(orders: Any, statuses: Any) -> Iterable[tuple[Any, Any]]:
    states = {row["order_id"]: row["status"] for row in statuses.values() if row["order_id"] is not None}
    found: dict[str, list[dict[str, Any]]] = {}
    for row in orders.values():
        own = {"id": row["id"], "item": row["item"], "status": states.get(row["id"])}
        found.setdefault(row["customer"], []).append(own)
    for customer, own in found.items():
        # Nulls are first.
        own.sort(key=lambda row: [(value is not None, value) for value in row.values()])
        sent = sum(row["status"] == "sent" for row in own)
        yield {"customer": customer}, {"customer": customer, "sent": sent, "orders": own}


def orders(prefix: str) -> Statement:
    """The orders demo. Its topics have the names of the demo, without a prefix."""
    names = tuple(f"{prefix}shop.public.{name}" for name in ("customers", "orders", "lines"))
    view = View(
        "order-document", f"{prefix}OrderDocuments", names, lambda rows: _documents(*(rows[name] for name in names))
    )
    inputs = tuple(Input(name, "Shop", "avro", "avro") for name in names)
    return Statement(inputs, "Documents", (Output(view.out, "avro", "avro"),), (), (view,))


def _documents(customers: Any, orders: Any, lines: Any) -> Iterable[tuple[Any, Any]]:
    of = {row["id"]: row for row in customers.values()}
    for order in orders.values():
        customer = of.get(order["customer_id"])
        if customer is None or order["status"] == "draft":
            continue
        own = [line for line in lines.values() if line["order_id"] == order["id"]]
        own.sort(key=lambda line: (line["position"], line["item"], line["quantity"]))
        yield (
            {"id": order["id"]},
            {
                "id": order["id"],
                "status": order["status"],
                "customer": {"name": customer["name"], "city": customer["city"]},
                "lines": [{name: line[name] for name in ("position", "item", "quantity")} for line in own],
                "total": sum(line["quantity"] * line["price"] for line in own),
            },
        )


KNOWN: dict[str, Callable[[str], Statement]] = {"shop": shop, "shop-views": shop_views, "orders": orders}
"""Pipelines that the command knows by name."""
