"""A model of ETL in plain Python, without the package's code. Tests compare ETL's results with the model's.

A record goes to the first rule that accepts it. The k-th left record of a join key pairs with the k-th right record, in the
order of partition and offset of the pending records. A batch's outputs are ordered by the time, place, partition and offset
of the completing input.
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
    outputs: dict[str, list[Out]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    classes: dict[tuple[str, int, int], str] = field(default_factory=dict)
    _waiting: dict[str, list[Record]] = field(default_factory=lambda: defaultdict(list))
    _times: dict[tuple[str, int, int], int] = field(default_factory=dict)
    _reached: dict[tuple[str, int], int] = field(default_factory=dict)

    def batch(self, records: Iterable[Record]) -> None:
        """One ETL batch over new records, each partition's in the order of its offsets."""
        taken: dict[str, list[Record]] = defaultdict(list)
        made: list[tuple[tuple[int, int, int, int], str, Out]] = []
        for record in records:
            self._see(record)
            if record.value is GARBAGE:
                self._settle(record, "quarantined")
                continue
            rule = next((rule for rule in self.rules if _names(rule, record.topic) and _holds(rule, record)), None)
            if rule is not None:
                taken[rule.name].append(record)
            elif record.value is None or record.topic in self.drops:
                self._settle(record, "dropped")
            else:
                self._settle(record, "unmatched")
        for rule in self.rules:
            if isinstance(rule, OneToOne):
                for record in taken[rule.name]:
                    self._settle(record, "done")
                    out = Out(rule.name, rule.key(record), rule.value(record), (record.place,))
                    made.append((self._order(record), rule.out, out))
            else:
                made += self._paired(rule, taken[rule.name])
        for _, topic, out in sorted(made, key=lambda item: item[0]):
            self.outputs[topic].append(out)

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


def _names(rule: OneToOne | Pair, topic: str) -> bool:
    return topic in ((rule.topic,) if isinstance(rule, OneToOne) else (rule.left, rule.right))


def _holds(rule: OneToOne | Pair, record: Record) -> bool:
    return bool(rule.where(record))


def without_zeros(counts: Mapping[tuple[str, int, str], int]) -> dict[tuple[str, int, str], int]:
    return {place: count for place, count in counts.items() if count}
