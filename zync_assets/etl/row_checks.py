"""The check of a batch's source rows: whether records of held outputs must wait behind others of their row (see ``hold``).

The tasks that write the results report the hashes of source rows. The driver reads the records of few rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.etl import ledger, retries, source_rows
from zync_assets.etl.account import CHANGE
from zync_assets.etl.batch import Transform, records_at
from zync_assets.etl.failures import Failures
from zync_assets.etl.hold import HeldRecord, Hold, Place, decide
from zync_assets.etl.source_rows import Fetch, RowTimes


class RowsWait(Exception):
    """Records have to wait behind others of their source row, or to follow them. Nothing was done."""

    def __init__(self, hold: Hold) -> None:
        super().__init__(f"{len(hold.decision.waiting)} records wait")
        self.hold = hold


def check_rows(
    transform: Transform, times: RowTimes, fetch: Fetch, hold: Hold, known: Failures, *, settled: bool
) -> None:
    """RowsWait if records of held outputs have to wait behind others of their source row, or to follow them.

    ``times``, ``fetch``, ``settled``: of the batch's results (``Results``). ``hold``: the decision that the results followed.
    """
    if not transform.held:
        return
    plan, state, labels = transform.plan, transform.plan.state, transform.labels
    held = {rule.name: rule for rule in transform.rules if rule.held}
    failed = {failure.place for failure in known.of(plan, old=True)}
    waits_in = state if state is not None and any(plan.head.waiting.values()) else None
    rows, before = times.in_question(), np.array([], np.int64)
    if waits_in is not None:
        joining = {rule.name for rule in held.values() if rule.sides[0].keys}
        expired = {
            (item.topic, item.part.partition, offset)
            for item in plan.reopening.expired
            for offset in range(item.part.first, item.part.end)
            if item.kind == "pending"
        }
        before = ledger.rows_before(waits_in, times.single, times.completed, joining)
        before = np.union1d(before, ledger.rows_at(waits_in, failed | expired))
    rows = np.union1d(rows, before)
    if not len(before if settled else rows):
        return
    records, rows, freed = source_rows.records_in_question(fetch, rows)
    entries = ledger.NO_ENTRIES if waits_in is None else ledger.pending_in(waits_in, rows)
    waiting: frozenset[Place] = frozenset()
    if not failed and not plan.reopening.parts:
        plain, waits = source_rows.plainly_waiting(records, entries, freed, transform.held, labels)
        waiting = frozenset(source_rows.places(records.filter(pa.array(waits)), labels))
        plain_rows = pc.unique(records.filter(pa.array(plain))["row"])
        records = records.filter(pa.array(~plain))
        entries = entries.filter(pc.invert(pc.is_in(entries["row"], plain_rows)))
    gone = failed | hold.decision.ended | {*source_rows.places(records, labels)}
    again = retries.spans_of(plan.reopening.parts)
    rules: dict[Place, str] = {}
    seen = {place: position.seen for place, position in plan.head.inputs.items()}
    each = list(source_rows.held_records(records, transform.held, labels, seen))
    for entry in entries.to_pylist():
        place: Place = entry["topic"], entry["partition"], entry["first"]
        rule = held.get(entry["rule"])
        if rule is None or retries.is_in(again, place, "pending"):
            continue
        rules[place] = rule.name
        if place not in gone:
            row, joins, changes = (rule.out, entry["row"]), bool(rule.sides[0].keys), entry["text"] == CHANGE
            each.append(HeldRecord(place, rule.name, row, True, None, joins, entry["hash"], changes=changes))
    decision = decide(_with_sequences(transform, each))
    decision = replace(decision, waiting=decision.waiting | waiting)
    if not hold.covers(decision):
        raise RowsWait(hold.extended(decision, rules))


def _with_sequences(transform: Transform, records: Sequence[HeldRecord]) -> list[HeldRecord]:
    """The records, with ``sequence`` where a row has records below *seen* in several partitions: the key moved."""
    partitions: dict[object, set[int]] = defaultdict(set)
    for item in records:
        if item.before and item.row is not None:
            partitions[item.row].add(item.place[1])
    moved = [item for item in records if item.before and len(partitions[item.row]) > 1]
    orders = {item.place: item.order for item in moved if item.order is not None}
    unread = {item.place for item in moved} - orders.keys()
    for topic in sorted({topic for topic, *_ in unread}):
        state = transform.plan.raw[topic]
        assert state is not None
        frame = transform.ordering.carried(
            records_at(transform, state, [at[1:] for at in unread if at[0] == topic]), topic
        )
        order = transform.ordering.sql(topic, "kafka.partition", "kafka.offset")
        for row in frame.selectExpr("kafka.partition AS part", "kafka.offset AS offset", f"{order} AS ord").collect():
            orders[topic, row["part"], row["offset"]] = tuple(row["ord"])
    return [replace(item, sequence=orders[item.place]) if item.place in orders else item for item in records]
