"""The pool ``Events`` at the end: groups and expiring pairs, whose outputs depend on the time at which records came.

The cut of batches decides which late records of a key pair or form a group. Wherever batches are cut, each record is in one
class, and each done record is in one output. The rule makes each output's value of the output's source records. The waiting
records of a key make no output.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from zync_assets_tests.checker.account import Place, read_accounts
from zync_assets_tests.checker.evidence import Evidence, gather
from zync_assets_tests.checker.outputs import equal, is_left, numbering, published, sources, staged_sides
from zync_assets_tests.checker.statement import Output, Statement
from zync_assets_tests.checker.wire import Schemas
from zync_assets_tests.model import GARBAGE, Record
from zync_assets_tests.torture.world import World

FEW = 5
"""How many findings of a kind are told."""


def event_findings(world: World, records: Sequence[Record], schemas: Schemas, checked: Counter[str]) -> Iterator[str]:
    """What is wrong with the pool. ``records``: those of the inputs; ``checked`` gets the numbers of outputs."""
    outputs = tuple(Output(topic, "avro", "avro") for topic in (world.shop.met, world.shop.changed))
    statement = Statement(world.statement.inputs, "Events", outputs, ())
    evidence = gather(world.shop.servers, world.folder / "lake", statement)
    if evidence.staging is None:
        yield "nothing is staged"
        return
    known = {record.place: record for record in records}
    for output in outputs:
        yield from list(numbering(evidence.staging, output))[:FEW]
        logs, marks = evidence.logs[output.topic], evidence.published
        yield from list(published(evidence.staging, output, logs, schemas, marks, checked))[:FEW]
    accounts, strange = read_accounts(evidence.staging)
    seen = {(row["topic"], row["partition"]): row["end"] for row in evidence.staging.of("seen")}
    reached = {place: (end, end) for place, end in seen.items()}
    yield from [*strange, *is_left(statement, evidence.logs, reached, evidence.staging)][:FEW]
    classes: dict[Place, str] = {}
    for (topic, partition), account in accounts.items():
        for offset in (record.offset for record in records if record.place[:2] == (topic, partition)):
            classes[topic, partition, offset] = account.kind(offset) or "none"
    yield from list(_classes(known, classes))[:FEW]
    yield from list(_outputs(world, evidence, known, classes, checked))[:FEW]


def _classes(known: dict[Place, Record], classes: dict[Place, str]) -> Iterator[str]:
    """The rule of a record decides the class of the record. The waiting records of a key make no output."""
    left: dict[object, set[str]] = defaultdict(set)
    for place, record in known.items():
        kind = classes.get(place, "none")
        if record.value is GARBAGE:
            wanted = {"quarantined"}
        elif rule_of(record) is not None:
            wanted = {"done", "pending"}
        else:
            wanted = {"dropped"} if record.value is None or "orders" in record.topic else {"unmatched"}
        if kind not in wanted:
            yield f"{place} is {kind}, and must be {' or '.join(sorted(wanted))}"
        if kind == "pending" and id_of(record) is not None:
            left[rule_of(record), id_of(record)].add(record.topic)
    for (rule, id), topics in left.items():
        if len(topics) > 1:
            yield f"rule {rule}: the records of {id} wait in both topics"


def _outputs(
    world: World, evidence: Evidence, known: dict[Place, Record], classes: dict[Place, str], checked: Counter[str]
) -> Iterator[str]:
    staging = evidence.staging
    assert staging is not None
    used: Counter[Place] = Counter()
    for name, topic in (("met", world.shop.met), ("changed", world.shop.changed)):
        for row, key, value in staged_sides(staging, topic):
            checked[f"outputs of {name}"] += 1
            used.update(sources(row))
            if any(place not in known for place in sources(row)):
                yield f"{topic}: {sources(row)} are no records"
                continue
            of = [known[place] for place in sources(row)]
            orders, statuses = (
                [record for record in of if (record.topic == world.shop.orders) is own] for own in (True, False)
            )
            wanted = _met(orders, statuses) if name == "met" else _changed(orders, statuses)
            keys = {(rule_of(record), id_of(record)) for record in of}
            is_equal = equal(key, wanted[0]) and equal(value, wanted[1])
            if len(keys) > 1 or rule_of(of[0]) != name or not is_equal:
                yield f"{topic}: {key}, {value} of {sources(row)}, which make {wanted}"
            if name == "met" and {record.topic for record in of[:-1]} != {world.shop.orders, world.shop.status} - {
                of[-1].topic
            }:
                yield f"{topic}: {sources(row)} were complete before the last, or are not"
            if name == "changed" and max(len(orders), len(statuses)) > 1:
                yield f"{topic}: {sources(row)} are no pair"
    for place, kind in classes.items():
        if used[place] != (kind == "done"):
            yield f"{place} is {kind}, and in {used[place]} outputs"


def rule_of(record: Record) -> str | None:
    """The rule of the pool that takes a record."""
    op = record.value["op"] if isinstance(record.value, dict) else None
    return {"c": "met", "r": "met", "u": "changed"}.get(op or "")


def id_of(record: Record) -> Any:
    """What the records of a group or a pair share."""
    return record.value["after"]["id" if "id" in record.value["after"] else "order_id"]


def _met(orders: Sequence[Record], statuses: Sequence[Record]) -> Any:
    id = id_of([*orders, *statuses][0])
    customer = orders[0].value["after"]["customer"] if orders else None
    return {"id": id}, {"id": id, "orders": len(orders), "statuses": len(statuses), "customer": customer}


def _changed(orders: Sequence[Record], statuses: Sequence[Record]) -> Any:
    item = orders[0].value["after"]["item"] if orders else None
    status = statuses[0].value["after"]["status"] if statuses else None
    return {"id": id_of([*orders, *statuses][0])}, {"item": item, "status": status}
