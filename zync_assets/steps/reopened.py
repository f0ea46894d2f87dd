"""The records below *seen* that an ETL batch matches again. The records leave their class of the account, and pass through
the rules like new records.

    replays          records that could not be decoded, were quarantined, and are in the raw table now
    Retry.failed     records that were quarantined because a rule failed on them
    Retry.unmatched  records that no rule took, or that wait for a rule that was removed
    Retry.waiting    records that wait for a changed rule
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from zync_assets.lake import raw, staging
from zync_assets.lake.raw import RawState
from zync_assets.lake.reopen import Taken
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange, subtract
from zync_assets.pipeline import Pipeline
from zync_assets.steps.quarantined import Selection

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retry:
    """The user's request to match records again. Replayed records need no request."""

    unmatched: bool = False
    waiting: tuple[str, ...] = ()
    """Rules."""
    failed: Selection | None = None


NOTHING = Retry()


@dataclass(frozen=True)
class Reopening:
    """The records that leave their class of the account.

    ``again``: records that the batch matches again; ``gone``: records that the raw table no longer holds, and that expire.
    ``replays``: input topic → the number of the table's replays that the batch takes up. ``joins``: the rules with a changed
    join, whose pending records are among ``again`` and ``gone``.
    """

    again: tuple[Taken, ...] = ()
    gone: tuple[Taken, ...] = ()
    replays: Mapping[str, int] | None = None
    joins: frozenset[str] = frozenset()

    @property
    def taken(self) -> tuple[Taken, ...]:
        return (*self.again, *self.gone)

    def ranges(self, topic: str) -> list[OffsetRange]:
        """The offsets of a topic that are looked at again, sorted."""
        return sorted(item.part for item in self.again if item.topic == topic)

    @property
    def sides(self) -> frozenset[tuple[str, str]]:
        """(rule, input topic) of the records that waited for the rule: all of that topic are looked at again."""
        return frozenset((item.rule, item.topic) for item in self.taken if item.rule is not None)

    def records(self) -> Counter[tuple[str, int]]:
        """(topic, partition) → records that are looked at again."""
        found = Counter[tuple[str, int]]()
        for item in self.again:
            found[item.topic, item.part.partition] += item.records
        return found


def reopen(
    pipeline: Pipeline, pool: str, state: StagingState | None, tables: Mapping[str, RawState | None], retry: Retry
) -> Reopening:
    """The records to match again, for one state of the account and of the raw tables.

    Reads the ledger only if the account or ``retry`` names such records.
    """
    if state is None:
        return Reopening()
    seen = {topic: state.head.seen(topic) for topic in tables}
    replays = {
        topic: table.replays
        for topic, table in tables.items()
        if table is not None and table.replays > state.head.replayed.get(topic, 0)
    }
    brought: dict[tuple[str, int], npt.NDArray[np.int64]] = {}
    for topic in replays:
        table = tables[topic]
        assert table is not None
        for partition, offsets in raw.replayed_offsets(table, state.head.replayed.get(topic, 0)).items():
            below = offsets[offsets < seen[topic].get(partition, 0)]
            if len(below):
                brought[topic, partition] = below
    if not brought and retry == NOTHING:
        return Reopening(replays=replays)
    kinds = ["quarantined", *(["unmatched"] if retry.unmatched else [])]
    if retry.unmatched or retry.waiting:
        kinds += ["pending", "completed"]
    entries = staging.read_ledger(state, kinds).to_pylist()
    again: list[Taken] = []
    gone: list[Taken] = []
    for item in _chosen(pipeline, pool, entries, brought, retry):
        table = tables.get(item.topic)
        if table is None:
            continue
        held = raw.held_ranges(table, item.part, state.released(item.topic, item.part.partition))
        for into, parts in ((again, held), (gone, subtract([item.part], held))):
            into += [Taken(item.topic, item.kind, item.rule, part) for part in parts]
    for topic in sorted({item.topic for item in gone}):
        count = sum(item.records for item in gone if item.topic == topic)
        _log.warning(
            "pool %s: %d records of %s can't be transformed again: retention removed them from the raw pool, and they count"
            " as expired now",
            pool,
            count,
            topic,
        )
    return Reopening(tuple(again), tuple(gone), replays)


def with_joins(
    pipeline: Pipeline,
    pool: str,
    state: StagingState,
    tables: Mapping[str, RawState | None],
    before: Reopening,
    rules: frozenset[str],
) -> Reopening:
    """``before``, plus the pending records of ``rules``. The joins of ``rules`` changed, so that old hashes are useless."""
    _log.warning(
        "pool %s: the join of %s changed since records began to wait for it; these records go through the rules again",
        pool,
        ", ".join(sorted(rules)),
    )
    more = reopen(pipeline, pool, state, tables, Retry(waiting=tuple(rules)))
    known = {*before.again, *before.gone}
    again, gone = (
        tuple(item for item in items if item.rule in rules and item not in known) for items in (more.again, more.gone)
    )
    return replace(before, again=(*before.again, *again), gone=(*before.gone, *gone), joins=before.joins | rules)


def _chosen(
    pipeline: Pipeline,
    pool: str,
    entries: Sequence[Mapping[str, Any]],
    brought: Mapping[tuple[str, int], npt.NDArray[np.int64]],
    retry: Retry,
) -> Iterator[Taken]:
    joins = pipeline.joins_of(pool)
    done = {(entry["topic"], entry["partition"], entry["first"]) for entry in entries if entry["kind"] == "completed"}
    for entry in entries:
        topic, partition, kind = entry["topic"], entry["partition"], entry["kind"]
        whole = OffsetRange(partition, entry["first"], entry["end"])
        if kind == "unmatched":
            yield Taken(topic, kind, None, whole)
        elif kind == "pending" and (topic, partition, entry["first"]) not in done:
            if entry["rule"] in retry.waiting or (retry.unmatched and (entry["rule"], topic) not in joins):
                yield Taken(topic, kind, entry["rule"], whole)
        elif kind == "quarantined" and entry["text"] is not None:
            if retry.failed is not None and retry.failed.takes(topic, partition, entry["first"]):
                yield Taken(topic, kind, None, whole)
        elif kind == "quarantined":
            yield from (Taken(topic, kind, None, part) for part in met(whole, brought.get((topic, partition))))


def met(whole: OffsetRange, offsets: npt.NDArray[np.int64] | None) -> Iterable[OffsetRange]:
    """The given sorted offsets that lie in the range ``whole``, as ranges of consecutive offsets."""
    if offsets is None:
        return ()
    one, other = np.searchsorted(offsets, [whole.first, whole.end])
    return raw.runs(whole.partition, offsets[one:other])
