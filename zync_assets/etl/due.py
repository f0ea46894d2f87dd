"""Due records: pending records of earlier batches that go through the rules again, as new records do.

arrived   The record waits for a row, and the batch brings a row with the values that the record looks up. The ledger has the
          hash of these values.
overdue   The record may expire in the batch. All pending records of its group are due with the record. The rule decides which
          of the records expire (``etl.rules.expiry``), and the others are pending again. The account's head has a time for
          each rule: no record of the rule has an earlier time. A batch reads the ledger only if a record may expire.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.etl import ledger, lookups
from zync_assets.etl.batch import Transform
from zync_assets.etl.failures import NONE, Failures
from zync_assets.etl.result_checks import refuse_many
from zync_assets.etl.retries import ClassRange
from zync_assets.etl.rules.shapes import has_schema
from zync_assets.etl.views.changes import record_rows
from zync_assets.etl.views.failures import row_checks, table_failures
from zync_assets.etl.views.tables import TableType, table_of, table_type
from zync_assets.lake import raw
from zync_assets.lake.staging import StagingState
from zync_assets.pipeline import Rule
from zync_assets.queries import Lookup
from zync_assets.spark.failures import spark_errors
from zync_assets.spark.sql import text_sql


@dataclass(frozen=True)
class Due:
    """``parts``: the due records. ``oldest``: rule → the earliest time of its other pending records, in milliseconds."""

    parts: tuple[ClassRange, ...] = ()
    oldest: Mapping[str, int] = field(default_factory=dict[str, int])


def due_records(transform: Transform) -> Due:
    """The pending records that a batch looks at again."""
    oldest = dict(transform.plan.waits.oldest)
    parts = [*dict.fromkeys(_arrivals(transform)), *_expiries(transform, oldest)]
    return Due(tuple(parts), oldest)


def start_times(transform: Transform) -> dict[str, int]:
    """Rule whose records expire → a time. No record of the batch has an earlier time."""
    times_by_rule: dict[str, int] = {}
    for rule in transform.rules:
        times = [item.min_time or 0 for topic in rule.topics for item in transform.files.get(topic, ())]
        if rule.expiry is not None and times:
            times_by_rule[rule.name] = min(times)
    return times_by_rule


def _arrivals(transform: Transform) -> Iterator[ClassRange]:
    """The waiting records for which the batch may have the row."""
    plan = transform.plan
    for rule in transform.rules:
        for item in rule.lookups if _has_waiting(transform, rule) else ():
            topic = item.table.topic
            # A user may have asked to match all of them again.
            matches_all = (rule.name, rule.sides[0].topic) in plan.retries.sides
            if item.missing == "wait" and topic in transform.rows and plan.reads(topic) and not matches_all:
                assert plan.state is not None
                yield from _arrivals_of_rule(transform, plan.state, rule, item)


def _has_waiting(transform: Transform, rule: Rule) -> bool:
    plan = transform.plan
    return plan.state is not None and any(plan.head.waiting.get((rule.name, topic)) for topic in rule.topics)


def _arrivals_of_rule(transform: Transform, state: StagingState, rule: Rule, item: Lookup) -> Iterator[ClassRange]:
    rows = lookups.row_frames(rule, transform.rows, state)
    sides = {side.name: transform.frames[side.topic] for side in rule.sides if side.topic in transform.frames}
    if not rows or len(sides) < len(rule.sides) or not all(map(has_schema, sides.values())):
        # The records wait for a schema, and go through the rules again when it is there.
        return
    types = lookups.key_types(rule, {**sides, **rows})[rule.lookups.index(item)]
    topic = next(side.topic for side in rule.sides if side.name == item.side)
    kind = table_type(table_of(item.table), transform.rows[item.table.topic], state)
    hash_column = lookups.waiting_hash(item, lookups.row_keys(item, types), types)
    names = f"{text_sql(rule.name)} AS rule", f"{text_sql(topic)} AS topic"
    wanted_keys = _hashes(transform, rule, item, kind, hash_column, names)
    places = ledger.look_up(state, wanted_keys)
    yield from _ranges(rule, ledger.search(state, wanted_keys) if places is None else places)


def _hashes(
    transform: Transform, rule: Rule, item: Lookup, kind: TableType, hash_column: str, names: Sequence[str]
) -> pa.Table:
    """The hashes of the batch's rows, with ``names``. A record that fails in its table brings no row: the batch finds it too."""
    topic, failures = item.table.topic, NONE
    while True:
        records = transform.stage(failures).records(topic)
        rows = record_rows(kind, records, transform.ordering).where("row IS NOT NULL")
        rows = rows.selectExpr(lookups.row_sql(rule, item, kind.state_row))
        hashes = rows.selectExpr(f"{hash_column} AS hash").where("hash IS NOT NULL").distinct()
        try:
            return hashes.selectExpr(*names, "hash").toArrow().cast(ledger.WANTED)
        except spark_errors():
            name = kind.table.name
            checks = row_checks(transform.spark, [rule], {name: kind})
            failure_by_place = table_failures(transform.spark, {name: (kind, records)}, checks)
            if not failure_by_place:
                raise
            failures = Failures({**failures.found, **failure_by_place})
            refuse_many(transform.plan, failures.found)


def _expiries(transform: Transform, oldest: dict[str, int]) -> Iterator[ClassRange]:
    """The records that may expire. Sets ``oldest`` of their rules."""
    for rule in transform.rules:
        plan, state = transform.plan, transform.plan.state
        # A user may have asked to match all of them again.
        matches_all = all(
            (rule.name, topic) in plan.retries.sides
            for topic in rule.topics
            if plan.head.waiting.get((rule.name, topic))
        )
        if rule.expiry is None or state is None or matches_all:
            continue
        clock = max((item.max_time or 0 for topic in rule.topics for item in transform.files.get(topic, ())), default=0)
        if rule.name in oldest and oldest[rule.name] + rule.expiry.after_ms >= clock:
            continue
        late_entries, next_oldest = ledger.waiting_since(state, rule.name, clock - rule.expiry.after_ms)
        oldest[rule.name] = clock if next_oldest is None else next_oldest
        yield from _ranges(rule, late_entries if rule.group is None else _groups(state, rule, late_entries))


def _groups(state: StagingState, rule: Rule, late_entries: pa.Table) -> pa.Table:
    """The pending records of the groups of some records: a group expires as a whole, with its first record."""
    hashes = pc.unique(late_entries["hash"].drop_null())
    hash_tables = [
        pa.table([pa.repeat(rule.name, len(hashes)), pa.repeat(topic, len(hashes)), hashes], schema=ledger.WANTED)
        for topic in rule.topics
    ]
    members = ledger.search(state, pa.concat_tables(hash_tables))
    alone = late_entries.filter(pc.is_null(late_entries["hash"])).select(members.column_names)
    return pa.concat_tables([members, alone])


def _ranges(rule: Rule, entries: pa.Table) -> Iterator[ClassRange]:
    """Pending records of a rule. ``entries``: with topic, partition and first."""
    for place in entries.group_by(["topic", "partition"]).aggregate([]).to_pylist():
        is_place = pc.and_(
            pc.equal(entries["topic"], place["topic"]), pc.equal(entries["partition"], place["partition"])
        )
        offsets = entries.filter(is_place)["first"].to_numpy()
        for part in raw.runs(place["partition"], np.sort(offsets)):
            yield ClassRange(place["topic"], "pending", rule.name, part)
