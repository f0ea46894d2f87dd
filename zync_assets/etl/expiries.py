"""Expiries: the pending records of earlier batches that may expire in a batch.

They go through the rules again, as new records do, and so does every pending record of their group. The rule decides which of
them expire (``etl.rules.expiry``), and the others are pending again. The account's head has a time for each rule: no record of
the rule has an earlier time. A batch therefore reads the ledger only if a record may expire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.etl.batch import Transform
from zync_assets.etl.retries import ClassRange
from zync_assets.etl.waits import waiting_entries
from zync_assets.lake import raw


@dataclass(frozen=True)
class Expiries:
    """``overdue``: records that may expire. ``oldest``: rule → the earliest time of its other pending records, in ms."""

    overdue: tuple[ClassRange, ...] = ()
    oldest: Mapping[str, int] = field(default_factory=dict[str, int])


def expiries_of(transform: Transform) -> Expiries:
    """The pending records that may expire in a batch."""
    plan, oldest = transform.plan, dict(transform.plan.waits.oldest)
    overdue: list[ClassRange] = []
    for rule in transform.rules:
        waits = any(plan.head.waiting.get((rule.name, topic)) for topic in rule.topics)
        if rule.expiry is None or plan.state is None or not waits:
            continue
        clock = max((item.max_time or 0 for topic in rule.topics for item in transform.files.get(topic, ())), default=0)
        if rule.name in oldest and oldest[rule.name] + rule.expiry.after_ms >= clock:
            continue
        entries = waiting_entries(plan.state)
        own = entries.filter(pc.and_(pc.equal(entries["rule"], rule.name), pc.is_valid(entries["text"])))
        since = own["text"].cast(pa.int64()).to_numpy()
        late = since + rule.expiry.after_ms < clock
        if rule.group is not None:
            # The whole group expires with its first record.
            hashes = own.filter(pa.array(late))["hash"].drop_null().combine_chunks()
            late |= pc.is_in(own["hash"], hashes).to_numpy()
        due = own.filter(pa.array(late))
        for place in due.group_by(["topic", "partition"]).aggregate([("first", "list")]).to_pylist():
            parts = raw.runs(place["partition"], np.sort(place["first_list"]))
            overdue += [ClassRange(place["topic"], "pending", rule.name, part) for part in parts]
        rest = since[~late]
        oldest[rule.name] = int(np.min(rest)) if len(rest) else clock
    return Expiries(tuple(overdue), oldest)


def begun(transform: Transform) -> dict[str, int]:
    """Rule → a time that no record of the batch is before, for rules whose records expire."""
    found: dict[str, int] = {}
    for rule in transform.rules:
        times = [item.min_time or 0 for topic in rule.topics for item in transform.files.get(topic, ())]
        if rule.expiry is not None and times:
            found[rule.name] = min(times)
    return found
