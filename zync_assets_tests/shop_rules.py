"""The shop pipeline's transforms, written again as plain functions; knows nothing of the package."""

from __future__ import annotations

from typing import Any, NamedTuple

from zync_assets_tests.model import Model, OneToOne, Pair, Record


class Topics(NamedTuple):
    """The names of a shop's topics: two inputs, two outputs."""

    orders: str
    status: str
    new: str
    audit: str


def shop_topics(prefix: str) -> Topics:
    return Topics(
        f"{prefix}.shop.public.orders",
        f"{prefix}.shop.public.order_status",
        f"{prefix}.out.new-orders",
        f"{prefix}.out.new.orders",
    )


def customers_topic(prefix: str) -> str:
    """The name of the topic of the shop's view."""
    return f"{prefix}.out.customers"


def event_topics(orders: str) -> tuple[str, str]:
    """The output topics of the pool ``Events``."""
    prefix = orders.removesuffix(".shop.public.orders")
    return f"{prefix}.out.met", f"{prefix}.out.changed"


def shop_model(orders: str, status: str, new: str, audit: str, *, held: bool = True) -> Model:
    """A model of the pipeline, nothing in it yet. ``held``: whether the new orders are."""
    rules = shop_rules(Topics(orders, status, new, audit))
    return Model((orders, status), rules, frozenset({orders}), frozenset({new} if held else ()))


def shop_rules(topics: Topics) -> tuple[OneToOne | Pair, ...]:
    """The transforms, in the file's order."""
    orders, status, new, audit = topics

    def created(it: Record) -> bool:
        return it.value is not None and it.value["op"] in ("c", "r")

    def updated(it: Record) -> bool:
        return it.value is not None and it.value["op"] == "u"

    def deleted(it: Record) -> bool:
        return it.value is not None and it.value["op"] == "d"

    def state(it: Record) -> Any:
        return {"id": it.value["after"]["order_id"], "status": it.value["after"]["status"]}

    def row(left: Record, right: Record) -> Any:
        after = left.value["after"]
        kept = {name: after[name] for name in ("id", "customer", "item")}
        return {**kept, "status": right.value["after"]["status"]}

    return (
        Pair(
            "new-order",
            orders,
            status,
            new,
            created,
            lambda it: it.value["after"]["id" if it.topic == orders else "order_id"],
            lambda left, _: {"id": left.value["after"]["id"]},
            row,
        ),
        OneToOne("status-update", status, new, updated, lambda it: {"id": it.value["after"]["order_id"]}, state),
        OneToOne(
            "erase-item",
            orders,
            new,
            lambda it: updated(it) and it.value["after"]["item"] is None,
            lambda it: {"id": it.value["after"]["id"]},
            lambda it: {"id": it.value["after"]["id"], "item": None},
        ),
        OneToOne(
            "order-change",
            orders,
            audit,
            updated,
            lambda it: it.key,
            lambda it: {"customer": it.value["after"]["customer"], "at": it.offset},
        ),
        OneToOne("order-delete", orders, new, deleted, lambda it: {"id": it.value["before"]["id"]}, lambda _: None),
    )
