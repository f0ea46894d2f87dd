"""Held outputs: which records of a batch wait behind an earlier record of their source row, and which follow it.

A source row is an input topic and a record key. While a record of a row is pending for a held output, later records of the
row that rules without a counterpart take are pending too. When the earlier record is completed, they follow its output. If
one of them makes a tombstone, the row ends: the pending records and the tombstone are done, and nothing is emitted.

Spark pairs the records of a batch without regard to rows. ``source_rows`` finds the few rows in which a record may have to
wait. ``decide`` goes through the records of these rows in the order of the source. One task holds all results of a small
batch, and changes them (``applied``). Otherwise, or if pending records of earlier batches play a part, the batch runs once more
with the decision (``Hold``). A batch without such a row runs once, and sorts nothing.

The second run sorts all outputs again. The place of an output in the sequence gives its Spark task and its number, and the first
run has written the numbers to files. A record that waits leaves the sequence or moves behind another output, and all later
outputs get other numbers. The rows could be known before the sort only from the pairs. Every batch would then compute its
pairs twice, for the few batches in which a record waits.

A delete that no rule takes, or a rule of another output, ends its row too, and keeps its own class. A delete emits its tombstone
all the same if one of the pending records is a change of the row: an earlier record of the row may have made an output.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from zync_assets.etl.account import Fact
from zync_assets.pipeline import Rule

Place = tuple[str, int, int]
"""Input topic, partition, offset."""
Order = tuple[int, ...]
"""The place of a record among all inputs, as outputs are ordered."""
At = tuple[Order, int]
"""The order of the input that completes a pair, and a number among the records that follow the pair."""


@dataclass(frozen=True)
class HeldRecord:
    """A record that a rule of a held output took, or a delete that no rule of the output took (``rule`` None).

    ``row``: the output and the hash of the source row, None without a key.

    ``before``: the record lies below *seen*. ``order``: None for a pending record that the batch did not read. ``joins``: the
    record needs a counterpart. ``hash`` and ``exact``: of its join key, None for a null key; ``exact`` is also None for a
    record that the batch did not read. ``other``: the place of the record that Spark paired it with. ``ends``: its output is
    a tombstone, or it is a delete without such a rule. ``changes``: the record changes its row, and does not create the row.
    ``sequence``: the place of a record below *seen* among those of its row, where these are not in one partition.
    ``failure``: the order of the counterpart with which a rule fails on the record. At this order, the
    record leaves the row.
    """

    place: Place
    rule: str | None
    row: tuple[str, int] | None
    before: bool
    order: Order | None
    joins: bool
    hash: int | None = None
    exact: int | None = None
    other: Place | None = None
    ends: bool = False
    changes: bool = False
    sequence: Order = ()
    failure: Order | None = None

    def may_pair(self, other: HeldRecord) -> bool:
        """Whether the join keys of two records of a rule are equal."""
        if self.rule != other.rule or self.hash is None or self.hash != other.hash or self.place[0] == other.place[0]:
            return False
        return self.exact == other.exact or None in (self.exact, other.exact)


@dataclass(frozen=True)
class Decision:
    """The decision on the records of source rows in which a record waits. ``waiting``: records that are pending behind another
    record. ``ended``: records that are done without an output. ``following``: record → its place among the outputs; None for
    the record's own place."""

    waiting: frozenset[Place] = frozenset()
    ended: frozenset[Place] = frozenset()
    following: Mapping[Place, At | None] = field(default_factory=dict[Place, "At | None"])


NOTHING = Decision()


def possible_outputs(rules: Iterable[Rule], topic: str) -> set[str]:
    """The held outputs in which a pending record of a topic may hold its row, if the pipeline file lacks the record's rule."""
    return {rule.out for rule in rules if rule.held and topic in rule.topics}


def decide(records: Iterable[HeldRecord]) -> Decision:
    """The decision on whole source rows. ``records``: every pending and every new record of the rows, and of the rows of the
    records that they may pair with."""
    all_records = list(records)
    old_records = sorted(
        (item for item in all_records if item.before), key=lambda item: item.sequence or item.place[1:]
    )
    arrivals = [(item.order or (), True, item) for item in all_records if not item.before]
    failures = [(item.failure, False, item) for item in all_records if item.failure is not None]
    # At one order, a failing record leaves its row before the counterpart arrives.
    turns = sorted([*failures, *arrivals], key=lambda turn: (*turn[:2], turn[2].order or ()))
    repaired_hashes: set[int] = set()
    """The hashes of join keys whose records Spark pairs in another way, since a record of theirs ended."""
    while True:
        rows = _Rows(repaired_hashes)
        for item in old_records:
            rows.add(item)
        for _, arrives, item in turns:
            if arrives:
                rows.add(item)
            else:
                rows.leave(item)
        if rows.ended_hashes <= repaired_hashes:
            return rows.decision()
        repaired_hashes |= rows.ended_hashes


class _Rows:
    """The source rows while their records come one by one."""

    def __init__(self, repaired_hashes: set[int]) -> None:
        self.repaired_hashes = repaired_hashes
        self.queues: dict[object, list[HeldRecord]] = defaultdict(list)
        """Row → its pending records, in their order."""
        self.ended: set[Place] = set()
        self.ended_hashes: set[int] = set()
        self.following: dict[Place, At | None] = {}
        self.followers = Counter[Order]()
        """Order → the number of the records that follow the record of this order."""
        self.open: dict[tuple[str | None, int], list[HeldRecord]] = defaultdict(list)
        """(rule, hash of the join key) → records without a counterpart."""

    def add(self, item: HeldRecord) -> None:
        queue = self._queue(item)
        if item.joins:
            counterpart = self._counterpart(item)
            if counterpart is None:
                queue.append(item)
                if item.hash is not None:
                    self.open[item.rule, item.hash].append(item)
                return
            self.open[item.rule, counterpart.hash or 0].remove(counterpart)
            counterpart_queue = self._queue(counterpart)
            counterpart_queue.remove(counterpart)
            last_order = max(record.order for record in (item, counterpart) if record.order is not None)
            self._follow(counterpart_queue, last_order)
        elif item.ends:
            self._end(item, queue)
        elif queue:
            queue.append(item)
        elif item.order is None:
            # The record before it left the ledger in another way: into quarantine, or expired.
            self.following[item.place] = None

    def leave(self, item: HeldRecord) -> None:
        """A rule fails on the pending record ``item`` and its counterpart. The records behind it follow the counterpart."""
        queue = self._queue(item)
        if item in queue and item.failure is not None:
            queue.remove(item)
            self._follow(queue, item.failure)

    def _follow(self, queue: list[HeldRecord], order: Order) -> None:
        """The first records of a row follow the record of an order, up to the next record that needs a counterpart."""
        while queue and not queue[0].joins:
            self.followers[order] += 1
            self.following[queue.pop(0).place] = order, self.followers[order]

    def _end(self, item: HeldRecord, queue: list[HeldRecord]) -> None:
        """The delete ``item`` ends its row, whose pending records are in ``queue``."""
        self.ended |= {dead.place for dead in queue if dead.failure is None}
        if queue and item.rule is not None and not any(dead.changes for dead in queue if dead.joins):
            self.ended.add(item.place)
        for dead in queue:
            if dead.joins and dead.hash is not None:
                self.open[dead.rule, dead.hash].remove(dead)
                self.ended_hashes.add(dead.hash)
        queue.clear()

    def decision(self) -> Decision:
        pending_places = (item.place for queue in self.queues.values() for item in queue if not item.joins)
        return Decision(frozenset(pending_places), frozenset(self.ended), self.following)

    def _queue(self, item: HeldRecord) -> list[HeldRecord]:
        return self.queues[item.place if item.row is None else item.row]

    def _counterpart(self, item: HeldRecord) -> HeldRecord | None:
        if item.hash is None or item.order is None:
            return None
        fits = [other for other in self.open[item.rule, item.hash] if item.may_pair(other)]
        if item.hash not in self.repaired_hashes:
            # Spark's own pairs: `=` decides, and the order within a join key.
            return next((other for other in fits if other.place == item.other), None)
        return min(fits, key=lambda other: other.place[1:], default=None)


def applied(
    rows: pa.RecordBatch, decision: Decision, results: Mapping[Place, int], completed: Mapping[Order | None, int]
) -> pa.RecordBatch:
    """A batch's result rows with a decision. ``results``: record → the index of its row; ``completed``: the order of a record
    that completes a pair → the index of the pair's row."""
    kinds = rows["kind"].to_pylist()
    outputs = np.ones(len(rows), bool)
    for kind, places in (("pending", decision.waiting), ("ended", decision.ended)):
        for place in places:
            kinds[results[place]] = kind
            outputs[results[place]] = False
    anchor_rows, number = np.arange(len(rows)), np.zeros(len(rows), np.int64)
    for place, at in decision.following.items():
        if at is not None:
            anchor_rows[results[place]], number[results[place]] = completed[at[0]], at[1]
    order = np.lexsort((number, anchor_rows))
    output_rows = pa.array(order, mask=~outputs[order])
    columns = {
        name: pa.array(kinds, column.type).take(pa.array(order))
        if name == "kind"
        else column.take(output_rows if name.startswith("out") else pa.array(order))
        for name, column in zip(rows.schema.names, rows.columns, strict=True)
    }
    return pa.RecordBatch.from_pydict(columns)


class DecidedRecord(NamedTuple):
    """A record and the decision on it. ``fate``: ``ended`` or ``waiting``; None if the record makes its output. ``order`` and
    ``number``: the place of the output among the outputs; None if the record's own place is kept."""

    partition: int
    offset: int
    fate: str | None
    order: Order | None = None
    number: int | None = None


@dataclass(frozen=True)
class Hold:
    """The decision on the source rows of a batch. ``rules``: pending records of earlier batches → the rules that took them."""

    decision: Decision = NOTHING
    rules: Mapping[Place, str] = field(default_factory=dict[Place, str])

    def covers(self, other: Decision) -> bool:
        """Whether this decision contains another decision."""
        decision = self.decision
        is_contained = all(
            place in decision.following and decision.following[place] == at for place, at in other.following.items()
        )
        return is_contained and other.waiting <= decision.waiting and other.ended <= decision.ended

    def extended(self, other: Decision, rules: Mapping[Place, str]) -> Hold:
        """This decision, extended by another decision. For a record in both, the other decision counts."""
        decision = self.decision
        ended_places = decision.ended | other.ended
        all_following = {**decision.following, **other.following}
        following = {place: at for place, at in all_following.items() if place not in ended_places}
        waiting_places = (decision.waiting | other.waiting) - ended_places - following.keys()
        return Hold(Decision(waiting_places, ended_places, following), {**self.rules, **rules})

    def concerns(self, topic: str) -> bool:
        """Whether there is a decision on a record of a topic."""
        place_sets = self.decision.waiting, self.decision.ended, self.decision.following
        return any(place[0] == topic for places in place_sets for place in places)

    def rows(self, topic: str) -> list[DecidedRecord]:
        """The decision on a topic's records."""
        decision = self.decision
        fates = dict.fromkeys(decision.waiting, "waiting") | dict.fromkeys(decision.ended, "ended")
        decided_records = [DecidedRecord(*place[1:], fate) for place, fate in fates.items() if place[0] == topic]
        for (name, partition, offset), at in decision.following.items():
            if name == topic:
                order, number = at or (None, None)
                decided_records.append(DecidedRecord(partition, offset, None, order, number))
        return decided_records

    def released(self) -> dict[tuple[str, str], list[tuple[int, int]]]:
        """(rule, input topic) → partition and offset of the pending records of earlier batches that make their outputs now."""
        places: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        for place, rule in sorted(self.rules.items()):
            if place in self.decision.following:
                places[rule, place[0]].append(place[1:])
        return places

    def ended_facts(self) -> list[Fact]:
        """The counts of pending records of earlier batches that are done without an output."""
        counts = Counter((self.rules[place], *place[:2]) for place in self._ended_places())
        return [Fact("ended", None, *place, True, count, 0) for place, count in counts.items()]

    def ended_entries(self) -> list[dict[str, object]]:
        """The ledger rows of these records."""
        names = ("topic", "partition", "first", "end", "rule")
        places = ((*place, place[2] + 1, self.rules[place]) for place in self._ended_places())
        return [{"kind": "completed", "text": "ended", **dict(zip(names, place, strict=True))} for place in places]

    def _ended_places(self) -> list[Place]:
        return sorted(self.decision.ended & self.rules.keys())


NO_HOLD = Hold()
