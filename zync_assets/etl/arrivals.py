"""Arrivals: the waiting records whose row comes in a batch.

A record that waits for a row goes through the rules again, as a new record does, in the batch that brings a row with the values
that the record looks up. The ledger has the hash of these values.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zync_assets.codecs.arrays import pc
from zync_assets.etl.batch import Transform
from zync_assets.etl.failures import NONE
from zync_assets.etl.pending import WANTED, look_up
from zync_assets.etl.retries import ClassRange
from zync_assets.etl.rules import lookups
from zync_assets.etl.rules.assignment import has_schema
from zync_assets.etl.views.changes import record_rows
from zync_assets.etl.views.event_rows import row_frames, row_sql
from zync_assets.etl.views.tables import table_of, table_type
from zync_assets.etl.waits import waiting_entries
from zync_assets.lake import raw
from zync_assets.lake.staging import StagingState
from zync_assets.pipeline import Rule
from zync_assets.queries import Lookup
from zync_assets.spark.sql import text_sql


def arrivals(transform: Transform) -> list[ClassRange]:
    """The waiting records for which the batch may have the row."""
    plan, found = transform.plan, list[ClassRange]()
    if plan.state is None:
        return found
    for rule in transform.rules:
        waits = any(plan.head.waiting.get((rule.name, topic)) for topic in rule.topics)
        for item in rule.lookups if waits else ():
            topic = item.table.topic
            # A user may have asked to match all of them again.
            again = (rule.name, rule.sides[0].topic) in plan.reopening.sides
            if item.missing == "wait" and topic in transform.rows and plan.reads(topic) and not again:
                found += _arrived(transform, plan.state, rule, item)
    return list(dict.fromkeys(found))


def _arrived(transform: Transform, state: StagingState, rule: Rule, item: Lookup) -> Iterator[ClassRange]:
    rows = row_frames(rule, transform.rows, state)
    sides = {side.name: transform.frames[side.topic] for side in rule.sides if side.topic in transform.frames}
    if not rows or len(sides) < len(rule.sides) or not all(map(has_schema, sides.values())):
        # The records wait for a schema, and go through the rules again when it is there.
        return
    types = lookups.key_types(rule, {**sides, **rows})[rule.lookups.index(item)]
    topic, table = next(side.topic for side in rule.sides if side.name == item.side), item.table.topic
    kind = table_type(table_of(item.table), transform.rows[table], state)
    made = record_rows(kind, transform.stage(NONE).records(table), transform.ordering)
    made = made.where("row IS NOT NULL").selectExpr(row_sql(rule, item, kind.state_row))
    hashed = lookups.waiting_hash(item, lookups.row_keys(item, types), types)
    hashes = made.selectExpr(f"{hashed} AS hash").where("hash IS NOT NULL").distinct()
    names = f"{text_sql(rule.name)} AS rule", f"{text_sql(topic)} AS topic"
    wanted = hashes.selectExpr(*names, "hash").toArrow().cast(WANTED)
    places = look_up(state, wanted)
    if places is None:
        places = waiting_entries(state).join(wanted, ["rule", "topic", "hash"], join_type="left semi")
    for partition in pc.unique(places["partition"]).to_pylist():
        offsets = places.filter(pc.equal(places["partition"], partition))["first"].to_numpy()
        for part in raw.runs(partition, np.sort(offsets)):
            yield ClassRange(topic, "pending", rule.name, part)
