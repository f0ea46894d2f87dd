"""The statement of a pipeline in plain Python: its topics, pools and rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zync_assets_tests.model import OneToOne, Pair, Record
from zync_assets_tests.shop_rules import shop_rules, shop_topics


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


@dataclass(frozen=True)
class Statement:
    """``inputs`` and ``rules`` are in the pipeline file's order; ``rules`` are those of the staging pool alone."""

    inputs: Sequence[Input]
    staging: str
    outputs: Sequence[Output]
    rules: Sequence[OneToOne | Pair]

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
    )


KNOWN: dict[str, Callable[[str], Statement]] = {"shop": shop}
"""Pipelines that the command knows by name."""
