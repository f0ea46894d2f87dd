"""Which records of failing pairs go into quarantine, wherever batches are cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from zync_assets.etl.failures import first_pairs
from zync_assets.etl.hold import HeldRecord, Place, decide
from zync_assets_tests.etl.test_hold import CHANGES, Change, Engine, order_of, pairs, records_of, rule_of
from zync_assets_tests.model import Record

RULES: Any = [SimpleNamespace(name="create", part_of=None)]


class FailingEngine(Engine):
    """Batches without the records that a search finds. ``failed``: the places of these records."""

    def __init__(self, seed: int, records: Sequence[Record]) -> None:
        super().__init__()
        self.seed, self.failed = seed, set[Place]()
        self.orders = {record.place: order_of(record) for record in records}

    def batch(self, new: Sequence[Record], failures: Sequence[HeldRecord] = ()) -> None:
        records, waits = self.pending | {record.place: record for record in new}, [*failures]
        while rows := [*first_pairs(self.failing(records, waits), RULES)]:
            for row in rows:
                place = self.blamed(row)
                self.failed.add(place)
                if row["ord"] > self.orders[place]:
                    waiting = replace(self.held(records[place], {}), hash=None, order=self.orders[place])
                    waits.append(replace(waiting, failure=row["ord"]))
            records = {place: record for place, record in records.items() if place not in self.failed}
        self.pending = {place: record for place, record in self.pending.items() if place in records}
        super().batch([record for record in new if record.place in records], waits)

    def failing(self, records: dict[Place, Record], waits: Sequence[HeldRecord]) -> list[Any]:
        """The failing pairs, as rows of the search."""
        other = pairs(records.values())
        decision = decide([*(self.held(record, other) for record in records.values()), *waits])
        live = [it for it in records.values() if it.value["joins"] and rule_of(it) and it.place not in decision.ended]
        ranks, rank_of = Counter[tuple[str, int]](), dict[Place, int]()
        for record in sorted(live, key=lambda record: record.offset):
            ranks[record.topic, record.value["join"]] += 1
            rank_of[record.place] = ranks[record.topic, record.value["join"]]
        rows: list[Any] = []
        for left, right in pairs(live).items():
            if left[0] == "L" and self.fails(left, right):
                ord = max(self.orders[left], self.orders[right])
                pair = {"pair_key": records[left].value["join"], "pair_rank": rank_of[left]}
                rows.append({"rule": 0, "source": [left, right], "ord": ord, **pair})
        return rows

    def fails(self, *places: Place) -> bool:
        return Random(f"{self.seed} {places}").random() < 0.5

    def blamed(self, row: Any) -> Place:
        """The record of a pair that goes into quarantine: the record that fails alone, or else the record that came last."""
        alone = [place for place in row["source"] if Random(f"{self.seed} {place}").random() < 0.3]
        return alone[0] if len(alone) == 1 else max(row["source"], key=lambda place: self.orders[place])


def transformed(changes: list[Change], cuts: Sequence[int], seed: int) -> tuple[Any, ...]:
    """The outputs, the failing and the pending records."""
    records = records_of(changes)
    engine = FailingEngine(seed, records)
    ends = [*sorted(min(cut, len(records)) for cut in cuts), len(records)]
    for first, end in zip([0, *ends], ends, strict=False):
        engine.batch(records[first:end])
    return engine.sources, engine.failed, set(engine.pending)


@given(CHANGES, st.lists(st.integers(0, 25), max_size=4), st.integers(0, 1000))
def test_failing_pairs_cost_the_same_records_wherever_batches_are_cut(
    changes: list[Change], cuts: list[int], seed: int
) -> None:
    expected = transformed(changes, range(len(changes)), seed)
    assert transformed(changes, [], seed) == expected
    assert transformed(changes, cuts, seed) == expected
