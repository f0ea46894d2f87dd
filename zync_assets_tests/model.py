"""A model of ETL in plain Python, without the package's code. Tests compare ETL's results with the model's.

A record goes to the first rule that accepts it. The k-th left record of a join key pairs with the k-th right record, in the
order of partition and offset of the pending records. A batch's outputs are ordered by the time, place, partition and offset
of the completing input.

A held output takes its records one by one, in that order. A record of a stateless rule is pending while a record of the same
source row (topic and key) is. It follows the output that completes the record before it, at its own time if that is later.
A tombstone ends the waiting: the row's pending records and the tombstone are done, and nothing is emitted. But a tombstone is
emitted if one of the pending records is an update: its row may be in the target. A delete that no rule takes ends the waiting
too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

GARBAGE: Any = object()
"""The value of a record that can't be decoded."""


@dataclass(frozen=True)
class Record:
    """One record of an input topic, decoded. ``value`` is None for a tombstone and GARBAGE for what can't be decoded."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: Any
    value: Any

    @property
    def place(self) -> tuple[str, int, int]:
        return self.topic, self.partition, self.offset


@dataclass(frozen=True)
class OneToOne:
    """A stateless rule: functions of one record."""

    name: str
    topic: str
    out: str
    where: Callable[[Record], bool]
    key: Callable[[Record], Any]
    value: Callable[[Record], Any]


@dataclass(frozen=True)
class Pair:
    """A denorm rule: ``join`` gives a side's join key, None for a null one."""

    name: str
    left: str
    right: str
    out: str
    where: Callable[[Record], bool]
    join: Callable[[Record], Any]
    key: Callable[[Record, Record], Any]
    value: Callable[[Record, Record], Any]


@dataclass(frozen=True)
class Out:
    """One output: decoded key and value, the rule, and the records that made it, left before right."""

    rule: str
    key: Any
    value: Any
    source: tuple[tuple[str, int, int], ...]


@dataclass
class Model:
    """One staging pool. ``inputs``: topics in the pipeline file's order; ``rules``: those of the pool alone, in the file's order,
    since each pool takes a record by its own rules. ``drops``: topics that say ``unmatched: drop``."""

    inputs: Sequence[str]
    rules: Sequence[OneToOne | Pair]
    drops: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    """The held output topics."""
    outputs: dict[str, list[Out]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    classes: dict[tuple[str, int, int], str] = field(default_factory=dict)
    _waiting: dict[str, list[Record]] = field(default_factory=lambda: defaultdict(list))
    _rows: dict[tuple[object, ...], list[tuple[OneToOne | Pair, Record]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Held output and source row → the pending records of the row, in their order."""
    _times: dict[tuple[str, int, int], int] = field(default_factory=dict)
    _reached: dict[tuple[str, int], int] = field(default_factory=dict)

    def batch(self, records: Iterable[Record]) -> None:
        """One ETL batch over new records, each partition's in the order of its offsets."""
        taken: dict[str, list[Record]] = defaultdict(list)
        made: list[tuple[tuple[int, int, int, int], str, Out]] = []
        held: list[tuple[Record, OneToOne | Pair | None]] = []
        for record in records:
            self._see(record)
            if record.value is GARBAGE:
                self._settle(record, "quarantined")
                continue
            rule = next((rule for rule in self.rules if _names(rule, record.topic) and _holds(rule, record)), None)
            if rule is not None and rule.out in self.held:
                held.append((record, rule))
            elif rule is not None:
                taken[rule.name].append(record)
            else:
                self._settle(record, "dropped" if record.value is None or record.topic in self.drops else "unmatched")
                held += [(record, None)] if record.value is None or op_of(record) == "d" else []
        for rule in self.rules:
            if isinstance(rule, OneToOne):
                for record in taken[rule.name]:
                    self._settle(record, "done")
                    out = Out(rule.name, rule.key(record), rule.value(record), (record.place,))
                    made.append((self._order(record), rule.out, out))
            else:
                made += self._paired(rule, taken[rule.name])
        for record, rule in sorted(held, key=lambda item: self._order(item[0])):
            if rule is None:
                for out in self.held:
                    self._end(self._rows[_row(out, record)])
                continue
            made += [(at, rule.out, out) for at, out in self._offered(rule, record)]
        for _, topic, out in sorted(made, key=lambda item: item[0]):
            self.outputs[topic].append(out)

    def _offered(self, rule: OneToOne | Pair, record: Record) -> list[tuple[tuple[int, int, int, int], Out]]:
        """The outputs that a record of a held output completes, each with its place among the batch's outputs."""
        row, at = self._rows[_row(rule.out, record)], self._order(record)
        if isinstance(rule, Pair):
            own = rule.join(record)
            others = [one for one in self._waiting[rule.name] if one.topic != record.topic and rule.join(one) == own]
            if own is None or not others:
                self._waiting[rule.name].append(record)
                row.append((rule, record))
                self._settle(record, "pending")
                return []
            other = min(others, key=lambda one: (one.partition, one.offset))
            self._waiting[rule.name].remove(other)
            left, right = (record, other) if record.topic == rule.left else (other, record)
            behind = self._rows[_row(rule.out, other)]
            behind.remove((rule, other))
            self._settle(other, "done")
            self._settle(record, "done")
            at = max(at, self._order(other))
            made = [(at, Out(rule.name, rule.key(left, right), rule.value(left, right), (left.place, right.place)))]
            while behind and isinstance(behind[0][0], OneToOne):
                at = max(at, self._order(behind[0][1]))
                made.append((at, self._single(*behind.pop(0))))
            return made
        if rule.value(record) is None:
            emitted = not row or any(isinstance(each, Pair) and op_of(pending) == "u" for each, pending in row)
            self._end(row)
            self._settle(record, "done")
            return [(at, self._single(rule, record))] if emitted else []
        if not row:
            return [(at, self._single(rule, record))]
        row.append((rule, record))
        self._settle(record, "pending")
        return []

    def _end(self, row: list[tuple[OneToOne | Pair, Record]]) -> None:
        for rule, dead in row:
            if isinstance(rule, Pair):
                self._waiting[rule.name].remove(dead)
            self._settle(dead, "done")
        row.clear()

    def _single(self, rule: OneToOne | Pair, record: Record) -> Out:
        assert isinstance(rule, OneToOne)
        self._settle(record, "done")
        return Out(rule.name, rule.key(record), rule.value(record), (record.place,))

    def _paired(self, rule: Pair, new: Sequence[Record]) -> list[tuple[tuple[int, int, int, int], str, Out]]:
        sides: dict[str, dict[Any, list[Record]]] = {rule.left: defaultdict(list), rule.right: defaultdict(list)}
        rest: list[Record] = []
        for record in sorted([*self._waiting[rule.name], *new], key=lambda found: (found.partition, found.offset)):
            join = rule.join(record)
            if join is None:
                rest.append(record)
            else:
                sides[record.topic][join].append(record)
        made: list[tuple[tuple[int, int, int, int], str, Out]] = []
        for join in {**sides[rule.left], **sides[rule.right]}:
            left, right = sides[rule.left][join], sides[rule.right][join]
            for one, other in zip(left, right, strict=False):
                self._settle(one, "done")
                self._settle(other, "done")
                out = Out(rule.name, rule.key(one, other), rule.value(one, other), (one.place, other.place))
                made.append((max(self._order(one), self._order(other)), rule.out, out))
            pairs = min(len(left), len(right))
            rest += left[pairs:] + right[pairs:]
        for record in rest:
            self._settle(record, "pending")
        self._waiting[rule.name] = rest
        return made

    def _see(self, record: Record) -> None:
        """A record's time: the highest timestamp of its partition up to it."""
        place = (record.topic, record.partition)
        self._reached[place] = max(self._reached.get(place, 0), record.timestamp)
        self._times[record.place] = self._reached[place]

    def _order(self, record: Record) -> tuple[int, int, int, int]:
        return self._times[record.place], self.inputs.index(record.topic), record.partition, record.offset

    def _settle(self, record: Record, name: str) -> None:
        old = self.classes.get(record.place)
        if old is not None:
            self.counts[record.topic, record.partition, old] -= 1
        self.classes[record.place] = name
        self.counts[record.topic, record.partition, name] += 1

    def totals(self) -> dict[tuple[str, int, str], int]:
        """(topic, partition, class) → records that are in it now, without zeros."""
        return {place: count for place, count in self.counts.items() if count}


def op_of(record: Record) -> Any:
    """Debezium's operation; None for a tombstone, or a value of another kind."""
    return record.value.get("op") if isinstance(record.value, dict) else None


def _row(out: str, record: Record) -> tuple[object, ...]:
    """The held output and the source row of a record. A record without a key is a row of its own."""
    return (out, record.topic, repr(record.key)) if record.key is not None else (out, record.place)


def _names(rule: OneToOne | Pair, topic: str) -> bool:
    return topic in ((rule.topic,) if isinstance(rule, OneToOne) else (rule.left, rule.right))


def _holds(rule: OneToOne | Pair, record: Record) -> bool:
    return bool(rule.where(record))


def without_zeros(counts: Mapping[tuple[str, int, str], int]) -> dict[tuple[str, int, str], int]:
    return {place: count for place, count in counts.items() if count}
