"""A model of ETL in plain Python, without the package's code. Tests compare ETL's results with the model's.

A record goes to the first rule that accepts it. The k-th left record of a join key pairs with the k-th right record, in the
order of partition and offset of the pending records. The records of a group are in the order of outputs, and the group ends with
the first record that makes it complete. A record with an expiry waits until a record of its rule's topics is too late for it. A
batch's outputs are ordered by the time, place, partition and offset of the completing input. Under a source's order, they are
ordered by that in place of the time.

The rules of a held output look at the records one by one, in the order of outputs. A record of a stateless rule is pending
while an earlier record of the same source row (topic and key) is. The record's output follows the output of the earlier
record, at the record's own time if that is later. A tombstone ends the waiting: the row's pending records and the tombstone
are done, and nothing is emitted. But a tombstone is emitted if one of the pending records is an update: its row may be in
the target. A delete that no rule takes ends the waiting too.
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
class Fan:
    """A stateless rule with several outputs: ``outputs`` gives topic, name of the rule, key and value of each."""

    name: str
    topic: str
    where: Callable[[Record], bool]
    outputs: Callable[[Record], Sequence[tuple[str, str, Any, Any]]]
    out: str = ""


@dataclass(frozen=True)
class Expiry:
    """How long, in milliseconds, a record of a rule waits, and whether an expired record makes an output."""

    after: int
    emits: bool = False


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
    expiry: Expiry | None = None
    """With an expiry, the functions get None for an absent side."""
    further: Callable[[Record, Record], Sequence[tuple[str, str, Any, Any]]] | None = None
    """Topic, name of the rule, key and value of each output, for a rule with several."""


@dataclass(frozen=True)
class Gather:
    """A group rule: ``by`` gives a record's group, None for a null one. ``complete``, ``key`` and ``value`` see the records of a
    group in their order."""

    name: str
    topics: tuple[str, ...]
    out: str
    where: Callable[[Record], bool]
    by: Callable[[Record], Any]
    complete: Callable[[Sequence[Record]], bool]
    key: Callable[[Sequence[Record]], Any]
    value: Callable[[Sequence[Record]], Any]
    expiry: Expiry | None = None
    further: Callable[[Sequence[Record]], Sequence[tuple[str, str, Any, Any]]] | None = None
    """As of ``Pair``."""


Rule = OneToOne | Fan | Pair | Gather
Place = tuple[float, ...]
"""The place of an output among those of a batch: time or the source's order, input, partition, offset. With more numbers where
several outputs come before that of one record."""


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
    rules: Sequence[Rule]
    drops: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    """The held output topics."""
    source: Callable[[Record], int] | None = None
    """The source's order of a record, if all inputs have one."""
    outputs: dict[str, list[Out]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    classes: dict[tuple[str, int, int], str] = field(default_factory=dict)
    _waiting: dict[str, list[Record]] = field(default_factory=lambda: defaultdict(list))
    _rows: dict[tuple[object, ...], list[tuple[Rule, Record]]] = field(default_factory=lambda: defaultdict(list))
    """Held output and source row → the pending records of the row, in their order."""
    _times: dict[tuple[str, int, int], int] = field(default_factory=dict)
    _reached: dict[tuple[str, int], int] = field(default_factory=dict)
    _batch: list[Record] = field(default_factory=list)
    """The records of the batch that can be decoded."""

    def batch(self, records: Iterable[Record]) -> None:
        """One ETL batch over new records, each partition's in the order of its offsets."""
        taken: dict[str, list[Record]] = defaultdict(list)
        made: list[tuple[Place, str, Out]] = []
        clocks: dict[str, int] = {}
        held: list[tuple[Record, Rule | None]] = []
        self._batch = []
        for record in records:
            self._see(record)
            if record.value is GARBAGE:
                self._settle(record, "quarantined")
                continue
            self._batch.append(record)
            clocks[record.topic] = max(clocks.get(record.topic, 0), self._times[record.place])
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
            elif isinstance(rule, Fan):
                for record in taken[rule.name]:
                    outputs = rule.outputs(record)
                    self._settle(record, "done" if outputs else "dropped")
                    for out, name, key, value in outputs:
                        made.append((self._order(record), out, Out(name, key, value, (record.place,))))
            elif isinstance(rule, Pair) and rule.expiry is None:
                made += self._paired(rule, taken[rule.name])
            elif isinstance(rule, Pair):
                clock = max(clocks.get(topic, 0) for topic in (rule.left, rule.right))
                made += self._queued(rule, rule.expiry, taken[rule.name], clock)
            else:
                made += self._gathered(rule, taken[rule.name], max(clocks.get(topic, 0) for topic in rule.topics))
        for record, rule in sorted(held, key=lambda item: self._order(item[0])):
            if rule is None:
                for out in self.held:
                    self._end(self._rows[_row(out, record)])
                continue
            made += [(at, rule.out, out) for at, out in self._offered(rule, record)]
        for _, topic, out in sorted(made, key=lambda item: item[0]):
            self.outputs[topic].append(out)

    def _offered(self, rule: Rule, record: Record) -> list[tuple[Place, Out]]:
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
        assert isinstance(rule, OneToOne)
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

    def _end(self, row: list[tuple[Rule, Record]]) -> None:
        for rule, dead in row:
            if isinstance(rule, Pair):
                self._waiting[rule.name].remove(dead)
            self._settle(dead, "done")
        row.clear()

    def _single(self, rule: Rule, record: Record) -> Out:
        assert isinstance(rule, OneToOne)
        self._settle(record, "done")
        return Out(rule.name, rule.key(record), rule.value(record), (record.place,))

    def _paired(self, rule: Pair, new: Sequence[Record]) -> list[tuple[Place, str, Out]]:
        sides: dict[str, dict[Any, list[Record]]] = {rule.left: defaultdict(list), rule.right: defaultdict(list)}
        rest: list[Record] = []
        for record in sorted([*self._waiting[rule.name], *new], key=lambda found: (found.partition, found.offset)):
            join = rule.join(record)
            if join is None:
                rest.append(record)
            else:
                sides[record.topic][join].append(record)
        made: list[tuple[Place, str, Out]] = []
        for join in {**sides[rule.left], **sides[rule.right]}:
            left, right = sides[rule.left][join], sides[rule.right][join]
            for one, other in zip(left, right, strict=False):
                at = max(self._order(one), self._order(other))
                made += [(at, *out) for out in self._outs(rule, one, other)]
            pairs = min(len(left), len(right))
            rest += left[pairs:] + right[pairs:]
        for record in rest:
            self._settle(record, "pending")
        self._waiting[rule.name] = rest
        return made

    def _gathered(self, rule: Gather, new: Sequence[Record], clock: int) -> list[tuple[Place, str, Out]]:
        groups: dict[Any, list[Record]] = defaultdict(list)
        made: list[tuple[Place, str, Out]] = []

        def end(group: list[Record], at: Place | None) -> None:
            """Make the output of a group, unless ``at`` is None: its records expired."""
            outputs = [] if at is None else _results(rule, list(group))
            for each in group:
                self._settle(each, "expired" if at is None else "done" if outputs else "dropped")
            made.extend((at or (0,), *out) for out in outputs)
            group.clear()

        for record in sorted([*self._waiting[rule.name], *new], key=self._order):
            self._settle(record, "pending")
            by = rule.by(record)
            group = groups[record.place if by is None else ("", by)]
            if group and self._is_late(group[0], self._times[record.place], rule.expiry):
                end(group, self._expired_at(group, rule.expiry, rule.topics))
            group.append(record)
            if by is not None and rule.complete(group):
                end(group, self._order(record))
        for group in groups.values():
            if group and self._is_late(group[0], clock, rule.expiry):
                end(group, self._expired_at(group, rule.expiry, rule.topics))
        self._waiting[rule.name] = [record for group in groups.values() for record in group]
        return made

    def _queued(
        self, rule: Pair, expiry: Expiry | None, new: Sequence[Record], clock: int
    ) -> list[tuple[Place, str, Out]]:
        """The pairs of a rule whose records expire: each record with the first that waits on the other side."""
        queues: dict[Any, list[Record]] = defaultdict(list)
        made: list[tuple[Place, str, Out]] = []

        def expire(queue: list[Record], time: int) -> None:
            for record in [each for each in queue if self._is_late(each, time, expiry)]:
                queue.remove(record)
                at = self._expired_at([record], expiry, (rule.left, rule.right))
                self._settle(record, "expired")
                if at is not None:
                    made.extend([(at, *out) for out in self._outs(rule, record, None)])

        for record in sorted([*self._waiting[rule.name], *new], key=self._order):
            join = rule.join(record)
            queue = queues[record.place if join is None else ("", join)]
            expire(queue, self._times[record.place])
            if join is not None and queue and queue[0].topic != record.topic:
                other = queue.pop(0)
                made += [(self._order(record), *out) for out in self._outs(rule, record, other)]
            else:
                self._settle(record, "pending")
                queue.append(record)
        for queue in queues.values():
            expire(queue, clock)
        self._waiting[rule.name] = [record for queue in queues.values() for record in queue]
        return made

    def _outs(self, rule: Pair, record: Record, other: Record | None) -> list[tuple[str, Out]]:
        """The outputs of a pair, or of a record that expired, each with its topic."""
        sides = {each.topic: each for each in (record, other) if each is not None}
        found = _results(rule, [sides.get(rule.left), sides.get(rule.right)])
        for each in sides.values():
            self._settle(each, "done" if found else "dropped")
        return found

    def _is_late(self, record: Record, time: int, expiry: Expiry | None) -> bool:
        return expiry is not None and self._times[record.place] + expiry.after < time

    def _expired_at(self, group: Sequence[Record], expiry: Expiry | None, topics: Sequence[str]) -> Place | None:
        """The place of the output of records that expire: after all records before the expiry. None without an output.

        Under a source's order, the place is just before the first record of the batch that is too late for the group, or that of
        the last record of the group if it comes later.
        """
        if expiry is None or not expiry.emits:
            return None
        first, own = group[0], self._order(group[-1])
        if self.source is None:
            return (self._times[first.place] + expiry.after + 0.5, *own[1:])
        late = [it for it in self._batch if it.topic in topics and self._is_late(first, self._times[it.place], expiry)]
        *cause, offset = min(map(self._order, late))
        return max(own, (*cause, offset - 0.5, *self._order(first)))

    def _see(self, record: Record) -> None:
        """A record's time: the highest timestamp of its partition up to it. A record that is matched again keeps its time."""
        if record.place in self._times:
            return
        place = (record.topic, record.partition)
        self._reached[place] = max(self._reached.get(place, 0), record.timestamp)
        self._times[record.place] = self._reached[place]

    def _order(self, record: Record) -> Place:
        at = self._times[record.place] if self.source is None else self.source(record)
        return at, self.inputs.index(record.topic), record.partition, record.offset

    def _settle(self, record: Record, name: str) -> None:
        old = self.classes.get(record.place)
        if old is not None:
            self.counts[record.topic, record.partition, old] -= 1
        self.classes[record.place] = name
        self.counts[record.topic, record.partition, name] += 1

    def totals(self) -> dict[tuple[str, int, str], int]:
        """(topic, partition, class) → records that are in it now, without zeros."""
        return {place: count for place, count in self.counts.items() if count}


def _results(rule: Pair | Gather, records: Sequence[Record | None]) -> list[tuple[str, Out]]:
    """The outputs of a match, each with its topic. ``records``: of a pair both sides, None for an absent one."""
    each: Any = (records,) if isinstance(rule, Gather) else records
    source = tuple(record.place for record in records if record is not None)
    if rule.further is None:
        return [(rule.out, Out(rule.name, rule.key(*each), rule.value(*each), source))]
    return [(topic, Out(name, key, value, source)) for topic, name, key, value in rule.further(*each)]


def op_of(record: Record) -> Any:
    """Debezium's operation; None for a tombstone, or a value of another kind."""
    return record.value.get("op") if isinstance(record.value, dict) else None


def _row(out: str, record: Record) -> tuple[object, ...]:
    """The held output and the source row of a record. A record without a key is a row of its own."""
    return (out, record.topic, repr(record.key)) if record.key is not None else (out, record.place)


def _names(rule: Rule, topic: str) -> bool:
    if isinstance(rule, Gather):
        return topic in rule.topics
    return topic in ((rule.topic,) if isinstance(rule, OneToOne | Fan) else (rule.left, rule.right))


def _holds(rule: Rule, record: Record) -> bool:
    return bool(rule.where(record))


def without_zeros(counts: Mapping[tuple[str, int, str], int]) -> dict[tuple[str, int, str], int]:
    return {place: count for place, count in counts.items() if count}
