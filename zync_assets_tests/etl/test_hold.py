"""The decision which records wait and which follow, against the model of held outputs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from zync_assets.etl.hold import At, HeldRecord, Place, decide
from zync_assets_tests.model import Model, OneToOne, Pair, Record

CHANGES = st.lists(
    st.tuples(
        st.sampled_from("LR"), st.sampled_from("cccuuudj"), st.integers(0, 2), st.integers(0, 2), st.integers(0, 1)
    ),
    max_size=25,
)
"""Topic, operation, id, join key, and the time since the change before. Operation j: an update that the denorm rule takes."""


Change = tuple[str, str, int, int, int]


def records_of(changes: Iterable[Change]) -> list[Record]:
    offsets = defaultdict[str, int](int)
    found: list[Record] = []
    time = 0
    for topic, op, id, join, later in changes:
        time += later
        # Most rows are joined by their id.
        value = {"op": "u" if op == "j" else op, "id": id, "joins": op in "cj", "join": max(id, join)}
        found.append(Record(topic, 0, offsets[topic], time, {"id": id}, value))
        offsets[topic] += 1
    return sorted(found, key=order_of)


def order_of(record: Record) -> tuple[int, ...]:
    return record.timestamp, "LR".index(record.topic), record.partition, record.offset


def new_model() -> Model:
    def takes(op: str) -> Any:
        return lambda found: found.value["op"] == op and not found.value["joins"]

    def joins(found: Record) -> Any:
        return found.value["joins"]

    def change(found: Record) -> Any:
        return found.topic, found.offset

    rules = (
        Pair("create", "L", "R", "out", joins, lambda it: it.value["join"], lambda *_: 0, lambda *_: "row"),
        OneToOne("update", "L", "out", takes("u"), change, change),
        OneToOne("update", "R", "out", takes("u"), change, change),
        OneToOne("delete", "L", "out", takes("d"), change, lambda _: None),
    )
    return Model(("L", "R"), rules, held=frozenset({"out"}))


class Engine:
    """Batches as ETL makes them: pairs by rank, the decision on all records, and pairs without the ended ones."""

    def __init__(self) -> None:
        self.pending: dict[Place, Record] = {}
        self.sources: list[tuple[Place, ...]] = []

    def batch(self, new: Sequence[Record], failures: Sequence[HeldRecord] = ()) -> None:
        """``failures``: the records on which a rule fails, and that waited before."""
        records = self.pending | {record.place: record for record in new}
        other = pairs(records.values())
        decision = decide([*(self.held(record, other) for record in records.values()), *failures])
        live = {
            place: record
            for place, record in records.items()
            if place not in decision.ended and rule_of(record) is not None
        }
        other = pairs(live.values())
        outputs: list[tuple[At, tuple[Place, ...]]] = []
        self.pending = {}
        for place, record in live.items():
            if record.value["joins"]:
                if place not in other:
                    self.pending[place] = record
                elif record.topic == "L":
                    last = max(order_of(record), order_of(records[other[place]]))
                    outputs.append(((last, 0), (place, other[place])))
            elif place in decision.waiting:
                self.pending[place] = record
            else:
                outputs.append((decision.following.get(place) or (order_of(record), 0), (place,)))
        self.sources += [source for _, source in sorted(outputs)]

    def held(self, record: Record, other: dict[Place, Place]) -> HeldRecord:
        before, joins, rule = record.place in self.pending, record.value["joins"], rule_of(record)
        found = HeldRecord(
            place=record.place,
            rule=rule,
            row=(record.topic, record.value["id"]),
            before=before,
            order=order_of(record),
            joins=joins,
            hash=record.value["join"] if joins else None,
            exact=record.value["join"] if joins else None,
            other=other.get(record.place),
            ends=record.value["op"] == "d",
            changes=record.value["op"] != "c",
        )
        # Spark does not read a pending record without a counterpart.
        return found if found.other or not before else replace(found, order=None, exact=None)


def rule_of(record: Record) -> str | None:
    """The rule that takes a record. No rule takes a delete of R."""
    if record.value["joins"]:
        return "create"
    return None if (record.topic, record.value["op"]) == ("R", "d") else record.value["op"]


def pairs(records: Iterable[Record]) -> dict[Place, Place]:
    sides: dict[int, dict[str, list[Place]]] = defaultdict(lambda: {"L": [], "R": []})
    for record in sorted(records, key=lambda item: item.offset):
        if record.value["joins"]:
            sides[record.value["join"]][record.topic].append(record.place)
    found = [pair for side in sides.values() for pair in zip(side["L"], side["R"], strict=False)]
    return dict(found) | {right: left for left, right in found}


@given(CHANGES, st.lists(st.integers(0, 25), max_size=4))
def test_the_outputs_are_the_models_wherever_batches_are_cut(changes: list[Change], cuts: list[int]) -> None:
    records = records_of(changes)
    whole, parts, engine = new_model(), new_model(), Engine()
    whole.batch(records)
    ends = [*sorted(min(cut, len(records)) for cut in cuts), len(records)]
    for first, end in zip([0, *ends], ends, strict=False):
        parts.batch(records[first:end])
        engine.batch(records[first:end])
    expected = [out.source for out in whole.outputs["out"]]
    assert [out.source for out in parts.outputs["out"]] == expected
    assert engine.sources == expected
    assert parts.classes == whole.classes
    assert set(engine.pending) == {place for place, kind in whole.classes.items() if kind == "pending"}


def test_a_delete_is_emitted_if_its_row_may_have_made_an_output() -> None:
    """The creation may be joined long ago. Only an update of the row, which also needs a counterpart, is pending."""
    update = HeldRecord(("L", 0, 7), "create", ("out", 1), True, None, True, 9, changes=True)
    delete = HeldRecord(("L", 0, 8), "delete", ("out", 1), False, (1,), False, ends=True)
    assert decide([update, delete]).ended == {update.place}
    assert decide([replace(update, changes=False), delete]).ended == {update.place, delete.place}


EPOCH = 1_700_000_000_000

Output = tuple[str, dict[str, str] | None]
"""Key and value."""
SourceChange = tuple[str, str, str, dict[str, Any], int]
"""Table, operation, key, value and time."""


class Source:
    """A database with three tables. A status or a payment belongs to an order, and is deleted with the order."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.tables: dict[str, dict[int, str]] = {"left": {}, "right": {}, "third": {}}
        self.changes: list[SourceChange] = []
        self.newest = 0
        self.commit = self.lsn = 100
        self.time = EPOCH

    def transaction(self) -> None:
        """One to four changes. Transactions share a millisecond now and then."""
        self.time += self.random.choice((0, 0, 1, 400))
        before = self.commit
        for _ in range(self.random.randint(1, 4)):
            # Three in ten changes are on the newest row.
            self.change(self.newest if self.random.random() < 0.3 else self.random.randrange(5), before)
        self.commit = self.lsn

    def change(self, id: int, commit: int) -> None:
        orders = self.tables["left"]
        if id not in orders:
            self.newest = id
            self.put("left", "c", id, commit)
        elif self.random.random() < 0.25:
            for table in ("right", "third", "left"):
                if id in self.tables[table]:
                    self.put(table, "d", id, commit)
        else:
            table = self.random.choice(("left", "right", "third"))
            self.put(table, "u" if id in self.tables[table] else "c", id, commit)

    def put(self, table: str, op: str, id: int, commit: int) -> None:
        self.lsn += 1
        text = f"{table}{self.lsn}"
        if op == "d":
            del self.tables[table][id]
        else:
            self.tables[table][id] = text
        source = {"connector": "postgresql", "name": "shop", "snapshot": "false", "lsn": self.lsn}
        value = {
            "op": op,
            "id": id,
            "v": text,
            "source": {**source, "sequence": json.dumps([str(commit), str(self.lsn)])},
        }
        self.changes.append((table, op, str(id), value, self.time))

    def join(self, table: str) -> dict[str, dict[str, str]]:
        orders, others = self.tables["left"], self.tables[table]
        return {str(id): {"l": orders[id], "r": others[id]} for id in orders.keys() & others.keys()}


def folded(found: Sequence[Output]) -> dict[str, dict[str, str]]:
    """The table that takes over the outputs one by one. An output changes the fields that it has."""
    rows: dict[str, dict[str, str]] = {}
    for key, value in found:
        if value is None:
            rows.pop(key, None)
        else:
            rows[key] = {**rows.get(key, {}), **value}
    return rows


@given(st.randoms(use_true_random=False), st.integers(0, 25), st.lists(st.integers(0, 60), max_size=4))
def test_the_target_is_the_sources_join_wherever_batches_are_cut(random: Random, count: int, cuts: list[int]) -> None:
    """The frontier lets a batch take every table up to one place in the source's order."""
    source = Source(random)
    for _ in range(count):
        source.transaction()
    for table in ("right", "third"):
        records = records_from(source.changes, table)
        whole, parts = Engine(), Engine()
        whole.batch(records)
        ends = [*sorted(min(cut, len(records)) for cut in cuts), len(records)]
        for first, end in zip([0, *ends], ends, strict=False):
            parts.batch(records[first:end])
        assert parts.sources == whole.sources
        assert folded(outputs_of(whole.sources, records)) == source.join(table)


def records_from(changes: Sequence[SourceChange], table: str) -> list[Record]:
    """The changes of the orders (L) and of another table (R), as the denorm rule and the others take them."""
    offsets = defaultdict[str, int](int)
    found: list[Record] = []
    for place, (name, op, key, value, _) in enumerate(changes):
        if name in ("left", table):
            topic = "L" if name == "left" else "R"
            own = {"op": op, "id": key, "joins": op == "c", "join": key, "v": value["v"]}
            found.append(Record(topic, 0, offsets[topic], place, {"id": key}, own))
            offsets[topic] += 1
    return found


def outputs_of(sources: Sequence[tuple[Place, ...]], records: Sequence[Record]) -> list[Output]:
    by_place = {record.place: record for record in records}
    made: list[Output] = []
    for source in sources:
        each = [by_place[place] for place in source]
        value = {("l" if record.topic == "L" else "r"): record.value["v"] for record in each}
        made.append((each[0].value["id"], None if each[0].value["op"] == "d" else value))
    return made


def test_a_follower_goes_its_way_when_the_record_before_it_left_the_ledger() -> None:
    orphan = HeldRecord(("L", 0, 7), "update", ("out", 1), before=True, order=None, joins=False)
    assert decide([orphan]).following == {orphan.place: None}


def test_join_keys_of_one_hash_do_not_pair_if_their_values_differ() -> None:
    """Two integers beyond 2^53 may become one double, and share a hash. The ended row's counterpart may be of the other."""
    left = HeldRecord(("L", 0, 0), "create", ("out", 1), False, (1,), True, 9, 100)
    end = HeldRecord(("L", 0, 1), "delete", ("out", 1), False, (2,), False, ends=True)
    other = HeldRecord(("L", 0, 2), "create", ("out", 2), False, (3,), True, 9, 101, ("R", 0, 0))
    right = HeldRecord(("R", 0, 0), "create", ("out", 3), False, (4,), True, 9, 101, ("L", 0, 2))
    change = HeldRecord(("L", 0, 3), "update", ("out", 2), False, (5,), False)
    decision = decide([left, end, other, right, change])
    assert decision.ended == {left.place, end.place}
    assert not decision.waiting
