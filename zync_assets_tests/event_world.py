"""Events of every kind in one pipeline: a group, a pair that expires, a rule with several outputs, and merged changes.

Two input topics feed the rules. Records have random times, keys and operations, and some can't be decoded. The same rules are a
model in plain Python (``model``). Outputs have three partitions, but for the pairs.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from zync_assets.checks.output_checks import run_all
from zync_assets.kafka.partitioner import key_partitions
from zync_assets.local.services import Services
from zync_assets_tests.mini import Mini, mini, published
from zync_assets_tests.model import GARBAGE, Expiry, Fan, Gather, Model, OneToOne, Pair, Record

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EPOCH = 1_700_000_000_000
SECONDS = 60
"""How long a record waits."""
ACTIONS = ("", "drop", "quarantine", "emit")
"""What becomes of records that expire; nothing expires with the first."""
OUTPUTS = ("events", "pairs", "lines", "latest")

FILE = """
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: json, schema: "op string, id bigint, n int, items array<string>"}
  - {topic: $right, pool: Raw, key-format: string, value-format: json, schema: "op string, id bigint, n int, items array<string>"}
outputs:
  - {topic: $out.events, pool: Staging, key-format: string, value-format: json, create: {partitions: 3, replication-factor: 1}}
  - {topic: $out.pairs, pool: Staging, key-format: string, value-format: json, create: {replication-factor: 1}}
  - {topic: $out.lines, pool: Staging, key-format: string, value-format: json, create: {partitions: 3, replication-factor: 1}}
  - {topic: $out.latest, pool: Staging, key-format: string, value-format: json, coalesce: true,
     create: {partitions: 3, replication-factor: 1}}
transforms:
  - name: event
    type: group
    records: {l: $left, r: $right}
    where: value.op = 'group'
    group-by: value.id
    complete-when: max(l.value.n) <= count_if(topic = '$right') OR sum(value.n) > 9
    out:
      - {topic: $out.events, key: CAST(max(value.id) AS STRING),
         value: {sum: sum(value.n), all: count(*), first: first(l).key, right: "transform(list(r), it -> it.value.n)"}}
      - {topic: $out.lines, explode: "transform(list(l), it -> it.value.n)", key: CAST(item AS STRING), where: count(l.value) > 1,
         value: {n: item, item: CAST(min(value.id) AS STRING)}}
  - name: pair
    type: denorm
    left: $left
    right: $right
    where: value.op = 'pair'
    join-on: left.value.id = right.value.id
    out:
      - {topic: $out.pairs, where: left.value.n IS NULL OR left.value.n <> 1, key: "coalesce(left.key, right.key)",
         value: {left: left.value.n, right: right.value.n}}
      - {topic: $out.lines, explode: "concat(coalesce(left.value.items, array()), coalesce(right.value.items, array()))",
         where: item <> 'x', key: item, value: {n: right.value.n, item: item}}
  - name: join
    type: denorm
    left: $left
    right: $right
    where: value.op = 'join'
    join-on: left.value.id = right.value.id
    out: $out.latest
    key: left.key
    value: {n: right.value.n, id: left.value.id}
  - name: fan
    type: stateless
    in: $left
    where: value.op = 'fan'
    out:
      - {topic: $out.events, where: in.value.n > 2, key: in.key, value: {sum: CAST(in.value.n AS BIGINT), first: in.key}}
      - {topic: $out.lines, explode: in.value.items, where: item <> 'x', key: item, value: {n: in.value.n, item: item}}
  - {name: whole, type: stateless, in: $right, where: value.op = 'whole', out: $out.latest, key: in.key,
     value: {n: in.value.n, id: in.value.id}}
  - {name: part, type: stateless, in: $right, where: value.op = 'part', out: $out.latest, key: in.key, value: {n: in.value.n}}
  - {name: gone, type: stateless, in: $right, where: value.op = 'gone', out: $out.latest, key: in.key, value: null}
"""


@dataclass
class EventWorld:
    """The pipeline and its model. ``sent``: (topic, partition) → the records that are in Kafka."""

    it: Mini
    model: Model
    sent: dict[tuple[str, int], list[Record]] = field(default_factory=lambda: defaultdict(list))

    def send(self, topic: str, partition: int, time: int, key: str | None, value: Any) -> Record:
        """One record; its place and content as the model sees it. ``time``: in seconds."""
        log = self.sent[topic, partition]
        record = Record(topic, partition, len(log), EPOCH + 1000 * time, key, value)
        log.append(record)
        payload = b"no JSON" if value is GARBAGE else value
        self.it.send(topic, (key, payload), partition=partition, times=[record.timestamp])
        return record

    def send_batch(self, seed: int, begin: int, count: int) -> None:
        """Random records for the next batch. ``begin``: the time of the first, in seconds."""
        dice, topics, made = random.Random(seed), (self.it.left, self.it.right), list[Record]()
        for at in range(count):
            value: Any = {
                "op": dice.choice(("group", "group", "pair", "pair", "join", "fan", "whole", "part", "gone", "none")),
                "id": dice.choice((*range(count // 6), None)),
                "n": dice.choice((1, 2, 3, 4, None)),
                "items": dice.choice((None, [], ["a"], ["b", "x", None])),
            }
            key, value = dice.choice((*"abcdefgh", None)), dice.choice((*[value] * 20, None, GARBAGE))
            made.append(self.send(dice.choice(topics), dice.randrange(2), begin + at // 2, key, value))
        self.model.batch(made)


def event_world(
    services: Services, spark: SparkSession, folder: Path, prefix: str, group: str, pair: str
) -> EventWorld:
    """An empty world. ``group``, ``pair``: one of ACTIONS for the rules with a wait."""
    text = FILE
    for name, action in (("event", group), ("pair", pair)):
        expiry = f"\n    expire-after: {SECONDS}s\n    on-expire: {action}" if action else ""
        text = text.replace(f"  - name: {name}\n", f"  - name: {name}{expiry}\n")
    it = mini(services, spark, folder, prefix, text, partitions=2)
    return EventWorld(it, event_model(it.left, it.right, it.out, group, pair))


def event_model(left: str, right: str, out: str, group: str, pair: str) -> Model:
    """The pipeline's rules, written again as plain functions."""

    def expiry(action: str) -> Expiry | None:
        return Expiry(SECONDS * 1000, action == "emit") if action else None

    def taken(op: str) -> Any:
        return lambda it: it.value is not None and it.value["op"] == op

    def by(it: Record) -> Any:
        return it.value["id"]

    def complete(records: Sequence[Record]) -> bool:
        wanted = [it.value["n"] for it in records if it.topic == left and it.value["n"] is not None]
        rights = sum(it.topic == right for it in records)
        return bool(wanted and max(wanted) <= rights) or (_sum(records) or 0) > 9

    def event(records: Sequence[Record]) -> list[tuple[str, str, Any, Any]]:
        lefts, rights = ([it for it in records if it.topic == topic] for topic in (left, right))
        id = None if by(records[0]) is None else str(by(records[0]))
        first, numbers = lefts[0].key if lefts else None, [it.value["n"] for it in rights]
        value = {"sum": _sum(records), "all": len(records), "first": first, "right": numbers}
        own = [it.value["n"] for it in lefts] if len(lefts) > 1 else []
        more = [(f"{out}.lines", "event/2", None if n is None else str(n), {"n": n, "item": id}) for n in own]
        return [(f"{out}.events", "event", id, value), *more]

    def pair_of(one: Record | None, other: Record | None) -> list[tuple[str, str, Any, Any]]:
        numbers = {"left": one and one.value["n"], "right": other and other.value["n"]}
        key = next((it.key for it in (one, other) if it is not None and it.key is not None), None)
        items = [item for it in (one, other) if it is not None for item in it.value["items"] or ()]
        own = [(f"{out}.pairs", "pair", key, numbers)] if numbers["left"] != 1 else []
        return [*own, *lines("pair/2", items, numbers["right"])]

    def lines(rule: str, items: Sequence[str | None], n: Any) -> list[tuple[str, str, Any, Any]]:
        return [(f"{out}.lines", rule, item, {"n": n, "item": item}) for item in items if item not in (None, "x")]

    def fan(it: Record) -> list[tuple[str, str, Any, Any]]:
        n = it.value["n"]
        own = [(f"{out}.events", "fan", it.key, {"sum": n, "first": it.key})] if (n or 0) > 2 else []
        return [*own, *lines("fan/2", it.value["items"] or (), n)]

    def none(*_: Any) -> None:
        return None

    return Model(
        (left, right),
        (
            Gather("event", (left, right), "", taken("group"), by, complete, none, none, expiry(group), event),
            Pair("pair", left, right, "", taken("pair"), by, none, none, expiry(pair), pair_of),
            Pair(
                *("join", left, right, f"{out}.latest", taken("join"), by),
                lambda one, _: one.key,
                lambda one, other: {"n": other.value["n"], "id": one.value["id"]},
            ),
            Fan("fan", left, taken("fan"), fan),
            OneToOne("whole", right, f"{out}.latest", taken("whole"), lambda it: it.key, _row("n", "id")),
            OneToOne("part", right, f"{out}.latest", taken("part"), lambda it: it.key, _row("n")),
            OneToOne("gone", right, f"{out}.latest", taken("gone"), lambda it: it.key, lambda _: None),
        ),
    )


def _sum(records: Sequence[Record]) -> int | None:
    known = [it.value["n"] for it in records if it.value["n"] is not None]
    return sum(known) if known else None


def _row(*names: str) -> Any:
    return lambda it: {name: it.value[name] for name in names}


def assert_equals_model(world: EventWorld) -> None:
    """Outputs in Kafka and in staging, their partitions and numbers, the account, and all checks."""
    it, model = world.it, world.model
    for name in OUTPUTS:
        topic = f"{it.out}.{name}"
        wanted = model.outputs[topic]
        found = records_of(it, topic)
        for partition, pairs in found.items():
            rows = [row for row in it.staged(topic) if row["kafka"]["partition"] == partition]
            assert [row["kafka"]["offset"] for row in rows] == list(range(len(rows))), topic
            made = [(row["rule"], tuple(tuple(place.values()) for place in row["source"])) for row in rows]
            own = [out for out in wanted if place_of(out.key, len(found)) == partition]
            if name == "latest":
                assert Counter(place for _, places in made for place in places) == Counter(
                    place for out in own for place in out.source
                )
                assert folded(pairs) == folded([(out.key, out.value) for out in own]), topic
            else:
                assert made == [(out.rule, out.source) for out in own], topic
                assert pairs == [(out.key, out.value) for out in own], topic
    assert {place: count for place, count in it.head.counts.items() if count} == model.totals()
    failed = [result.summary for result in run_all(it.pipeline) if result.severity == "error" and not result.passed]
    assert failed == []


def place_of(key: str | None, count: int) -> int:
    """The partition of a key."""
    return int(key_partitions(pa.array([None if key is None else key.encode()], pa.binary()), count)[0])


def folded(pairs: Sequence[tuple[str | None, Any]]) -> tuple[Mapping[str, Any], Counter[str]]:
    """The rows of a target that applies changes by key, and the changes without a key."""
    rows: dict[str, Any] = {}
    others: Counter[str] = Counter()
    for key, value in pairs:
        if key is None:
            others[json.dumps(value)] += 1
        elif value is None:
            rows.pop(key, None)
        else:
            rows[key] = {**rows.get(key, {}), **value}
    return rows, others


def records_of(it: Mini, topic: str) -> dict[int, list[tuple[str | None, Any]]]:
    """Partition → key and value of the records in an output topic, in order."""
    found = published(it.pipeline, topic)
    return {
        partition: [(key and key.decode(), value and json.loads(value)) for key, value in pairs]
        for partition, pairs in found.items()
    }
