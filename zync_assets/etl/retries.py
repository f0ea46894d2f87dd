"""Retries: records below *seen* that leave their class of the account, and that a batch matches again like new records.

    replays          records that could not be decoded, were quarantined, and are in the raw table now
    Retry.failed     records that were quarantined because a rule failed on them, and expired records that quarantine lists
    Retry.expired    expired records
    Retry.unmatched  records that no rule took, or that wait for a rule that was removed
    Retry.waiting    records that wait for a changed rule
    Waits.overdue    records that have waited too long for the row that they look up

An offset is in exactly one entry of the ledger at any time. The batch that gives an offset its new class writes the files with
the old entry again, without that entry, in the same commit. No entry cancels another entry.

The ledger has the time at which a record began to wait for a row. The pipeline file says how long a record may wait, so that a
new ``wait`` counts for waiting records too. The account's head has a time for each rule: no record of the rule waits since an
earlier time. A tick therefore reads the ledger only if a wait may be over.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.etl import ledger
from zync_assets.lake import raw, staging
from zync_assets.lake.log import DataFile
from zync_assets.lake.quarantine_table import Selection
from zync_assets.lake.raw import RawState
from zync_assets.lake.staging import ACCOUNT_FOLDER, ACCOUNT_TYPE, StagingState
from zync_assets.offsets import OffsetRange, subtract
from zync_assets.pipeline import Pipeline, Rule


@dataclass(frozen=True)
class ClassRange:
    """Offsets of one partition that leave a class: unmatched, quarantined or pending. Each offset is a record.

    ``rule``: the rule that pending records waited for; None for the other classes.
    """

    topic: str
    kind: str
    rule: str | None
    part: OffsetRange

    @property
    def records(self) -> int:
        return self.part.end - self.part.first

    @property
    def places(self) -> list[tuple[int, int]]:
        """Partition and offset of each record."""
        return [(self.part.partition, offset) for offset in range(self.part.first, self.part.end)]

    def entry(self, kind: str) -> dict[str, object]:
        """The ledger row that puts the offsets into class ``kind``."""
        place = {"topic": self.topic, "partition": self.part.partition}
        return {"kind": kind, **place, "first": self.part.first, "end": self.part.end, "count": self.records}


def carve(state: StagingState, parts: Sequence[ClassRange]) -> tuple[list[DataFile], list[DataFile]]:
    """Files to add and files to remove so that the ledger is without ``parts``. The written files are invisible until a
    commit names them."""
    added_files: list[DataFile] = []
    removed_files: list[DataFile] = []
    spans = spans_of(parts)
    for item in state.ledger_files:
        rows = staging.read_entries(state, [item])
        remaining_rows = without(rows, spans)
        if remaining_rows is rows:
            continue
        removed_files.append(item)
        if remaining_rows.num_rows:
            path = f"{ACCOUNT_FOLDER}/carved-{uuid.uuid4().hex}.parquet"
            added_files.append(staging.write_entries(state.table.uri, path, remaining_rows))
    return added_files, removed_files


Spans = Mapping[tuple[str, int, str], tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]
"""(topic, partition, class) → firsts and ends of disjoint ranges, sorted."""


def spans_of(parts: Sequence[ClassRange]) -> Spans:
    """The offsets of ``parts``, to be looked up."""
    ranges: dict[tuple[str, int, str], list[tuple[int, int]]] = {}
    for item in parts:
        ranges.setdefault((item.topic, item.part.partition, item.kind), []).append((item.part.first, item.part.end))
    return {
        place: (np.array([a for a, _ in sorted(parts)]), np.array([b for _, b in sorted(parts)]))
        for place, parts in ranges.items()
    }


def is_in(spans: Spans, place: tuple[str, int, int], kind: str) -> bool:
    """Whether a record of class ``kind`` is in one of the ranges."""
    if (*place[:2], kind) not in spans:
        return False
    firsts, ends = spans[*place[:2], kind]
    at = int(np.searchsorted(firsts, place[2], side="right")) - 1
    return at >= 0 and place[2] < int(ends[at])


def without(rows: pa.Table, spans: Spans) -> pa.Table:
    """Ledger entries without the offsets of ``spans``, in their order; the same object where that changes nothing."""
    keep = np.ones(rows.num_rows, dtype=np.bool_)
    pieces: list[dict[str, object]] = []
    for (topic, partition, kind), (firsts, ends) in spans.items():
        is_place = pc.and_(pc.equal(rows["topic"], topic), pc.equal(rows["partition"], partition))
        at = np.flatnonzero(np.asarray(pc.and_(is_place, pc.equal(rows["kind"], kind)).to_numpy()))
        low = rows["first"].take(pa.array(at)).to_numpy()
        high = rows["end"].take(pa.array(at)).to_numpy()
        # The ranges that share an offset with an entry are those from ``first_index`` to before ``end_index``.
        first_index, end_index = np.searchsorted(ends, low, side="right"), np.searchsorted(firsts, high, side="left")
        for index in np.flatnonzero(first_index < end_index).tolist():
            keep[at[index]] = False
            whole = (
                first_index[index] + 1 == end_index[index]
                and firsts[first_index[index]] <= low[index]
                and high[index] <= ends[first_index[index]]
            )
            if not whole:
                entry = rows.slice(int(at[index]), 1).to_pylist()[0]
                edges = [(int(firsts[n]), int(ends[n])) for n in range(first_index[index], end_index[index])]
                pieces += _cut(entry, edges)
    if keep.all():
        return rows
    remaining_rows = rows.filter(pa.array(keep))
    if not pieces:
        return remaining_rows
    piece_rows = pa.StructArray.from_arrays(
        [pa.array([piece[item.name] for piece in pieces], item.type) for item in ACCOUNT_TYPE],
        fields=list(ACCOUNT_TYPE),
    )
    return pa.concat_tables(
        [remaining_rows, pa.table(piece_rows.flatten(), names=ACCOUNT_TYPE.names).cast(remaining_rows.schema)]
    )


def _cut(entry: Mapping[str, object], edges: Sequence[tuple[int, int]]) -> list[dict[str, object]]:
    """The parts of a ledger entry that remain when the ranges ``edges`` (first offset, end) are cut out."""
    first, end = int(str(entry["first"])), int(str(entry["end"]))
    starts = [first, *(min(stop, end) for _, stop in edges)]
    stops = [*(max(start, first) for start, _ in edges), end]
    return [
        {**entry, "first": start, "end": stop, "count": stop - start}
        for start, stop in zip(starts, stops, strict=True)
        if start < stop
    ]


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retry:
    """The user's request to match records again. Replayed records need no request."""

    unmatched: bool = False
    waiting: tuple[str, ...] = ()
    """Rules."""
    failed: Selection | None = None
    expired: bool = False


NOTHING = Retry()


@dataclass(frozen=True)
class Retries:
    """The records that leave their class of the account.

    ``again``: records that the batch matches again; ``expired``: records that the raw table no longer holds, and that expire.
    ``replays``: input topic → the number of the table's replays that the batch takes up. ``joins``: the rules with a changed
    join, whose pending records are among ``again`` and ``expired``.
    """

    again: tuple[ClassRange, ...] = ()
    expired: tuple[ClassRange, ...] = ()
    replays: Mapping[str, int] | None = None
    joins: frozenset[str] = frozenset()
    some: frozenset[tuple[str, str]] = frozenset()
    """Each rule and input topic of which the batch looks again at some waiting records, but not at all of them."""

    @property
    def parts(self) -> tuple[ClassRange, ...]:
        return (*self.again, *self.expired)

    def ranges(self, topic: str) -> list[OffsetRange]:
        """The offsets of a topic that are looked at again, sorted."""
        return sorted(item.part for item in self.again if item.topic == topic)

    @property
    def sides(self) -> frozenset[tuple[str, str]]:
        """Each rule and input topic of which the batch looks again at all waiting records."""
        return frozenset((item.rule, item.topic) for item in self.parts if item.rule is not None) - self.some

    def records(self) -> Counter[tuple[str, int]]:
        """(topic, partition) → records that are looked at again."""
        counts = Counter[tuple[str, int]]()
        for item in self.again:
            counts[item.topic, item.part.partition] += item.records
        return counts


def retries_of(
    pipeline: Pipeline, pool: str, state: StagingState | None, tables: Mapping[str, RawState | None], retry: Retry
) -> Retries:
    """The records to match again, for one state of the account and of the raw tables.

    Reads the ledger only if the account or ``retry`` names such records.
    """
    if state is None:
        return Retries()
    seen_offsets = {topic: state.head.seen(topic) for topic in tables}
    replays = {
        topic: table.replays
        for topic, table in tables.items()
        if table is not None and table.replays > state.head.replayed.get(topic, 0)
    }
    replayed_offsets: dict[tuple[str, int], npt.NDArray[np.int64]] = {}
    for topic in replays:
        table = tables[topic]
        assert table is not None
        for partition, offsets in raw.replay_offsets(table, state.head.replayed.get(topic, 0)).items():
            old_offsets = offsets[offsets < seen_offsets[topic].get(partition, 0)]
            if len(old_offsets):
                replayed_offsets[topic, partition] = old_offsets
    if not replayed_offsets and retry == NOTHING:
        return Retries(replays=replays)
    kinds = ["quarantined", *(["unmatched"] if retry.unmatched else [])]
    kinds += ["expired"] if retry.expired or retry.failed is not None else []
    if retry.unmatched or retry.waiting:
        kinds += ["pending", "completed"]
    entries = staging.read_ledger(state, kinds).to_pylist()
    held_parts, lost_parts = split(_retried_parts(pipeline, pool, entries, replayed_offsets, retry), state, tables)
    for topic in sorted({item.topic for item in lost_parts}):
        count = sum(item.records for item in lost_parts if item.topic == topic)
        _log.warning(
            "pool %s: %d records of %s can't be transformed again: retention removed them from the raw pool, and they count"
            " as expired now",
            pool,
            count,
            topic,
        )
    return Retries(tuple(held_parts), tuple(lost_parts), replays)


def split(
    items: Iterable[ClassRange], state: StagingState, tables: Mapping[str, RawState | None]
) -> tuple[list[ClassRange], list[ClassRange]]:
    """The records that the raw tables hold, and those that they no longer hold."""
    held_parts: list[ClassRange] = []
    lost_parts: list[ClassRange] = []
    places: dict[tuple[str, int], list[ClassRange]] = {}
    for item in items:
        places.setdefault((item.topic, item.part.partition), []).append(item)
    for (topic, partition), place_items in places.items():
        table = tables.get(topic)
        if table is None:
            continue
        # At once: a file with gaps is read once for all records.
        held_ranges = raw.record_ranges(table, [item.part for item in place_items], state.released(topic, partition))
        firsts, ends = (np.array([getattr(part, name) for part in held_ranges], np.int64) for name in ("first", "end"))
        begins = np.searchsorted(ends, [item.part.first for item in place_items], side="right").tolist()
        stops = np.searchsorted(firsts, [item.part.end for item in place_items], side="left").tolist()
        for item, begin, stop in zip(place_items, begins, stops, strict=True):
            first, end = item.part.first, item.part.end
            item_ranges = [
                OffsetRange(partition, max(first, at.first), min(end, at.end)) for at in held_ranges[begin:stop]
            ]
            for target, ranges in ((held_parts, item_ranges), (lost_parts, subtract([item.part], item_ranges))):
                target += [ClassRange(topic, item.kind, item.rule, part) for part in ranges]
    return held_parts, lost_parts


def with_joins(
    pipeline: Pipeline,
    pool: str,
    state: StagingState,
    tables: Mapping[str, RawState | None],
    retries: Retries,
    rules: frozenset[str],
) -> Retries:
    """``retries``, plus the pending records of ``rules``. The joins of ``rules`` changed, so that old hashes are useless."""
    _log.warning(
        "pool %s: the join, the hold or the look-ups of %s changed since records began to wait for it, or a table got its"
        " schema; these records go through the rules again",
        pool,
        ", ".join(sorted(rules)),
    )
    rule_retries = retries_of(pipeline, pool, state, tables, Retry(waiting=tuple(rules)))
    again_parts, expired_parts = (
        (*(item for item in kept_items if item.rule not in rules), *(item for item in items if item.rule in rules))
        for kept_items, items in ((retries.again, rule_retries.again), (retries.expired, rule_retries.expired))
    )
    return replace(retries, again=again_parts, expired=expired_parts, joins=retries.joins | rules)


def _retried_parts(
    pipeline: Pipeline,
    pool: str,
    entries: Sequence[Mapping[str, Any]],
    replayed_offsets: Mapping[tuple[str, int], npt.NDArray[np.int64]],
    retry: Retry,
) -> Iterator[ClassRange]:
    joins = pipeline.joins_of(pool)
    completed_places = {
        (entry["topic"], entry["partition"], entry["first"]) for entry in entries if entry["kind"] == "completed"
    }
    for entry in entries:
        topic, partition, kind = entry["topic"], entry["partition"], entry["kind"]
        whole = OffsetRange(partition, entry["first"], entry["end"])
        if kind == "unmatched":
            yield ClassRange(topic, kind, None, whole)
        elif kind == "pending" and (topic, partition, entry["first"]) not in completed_places:
            if entry["rule"] in retry.waiting or (retry.unmatched and (entry["rule"], topic) not in joins):
                yield ClassRange(topic, kind, entry["rule"], whole)
        elif kind == "expired" and retry.expired:
            yield ClassRange(topic, kind, None, whole)
        elif kind in ("quarantined", "expired") and entry["text"] is not None:
            if retry.failed is not None and retry.failed.takes(topic, partition, entry["first"]):
                yield ClassRange(topic, kind, None, whole)
        elif kind == "quarantined":
            yield from (
                ClassRange(topic, kind, None, part)
                for part in runs_within(whole, replayed_offsets.get((topic, partition)))
            )


def runs_within(whole: OffsetRange, offsets: npt.NDArray[np.int64] | None) -> Iterable[OffsetRange]:
    """The given sorted offsets that lie in the range ``whole``, as ranges of consecutive offsets."""
    if offsets is None:
        return ()
    first_index, end_index = np.searchsorted(offsets, [whole.first, whole.end])
    return raw.runs(whole.partition, offsets[first_index:end_index])


MOST_OVERDUE = 10_000
"""Records of one batch whose wait is over. The next batch has the others."""


@dataclass(frozen=True)
class Waits:
    """The waits of records for a row. ``overdue``: the records whose wait is over. ``oldest``: rule → a time in milliseconds
    since the epoch. No record that still waits for the rule began to wait earlier."""

    overdue: tuple[ClassRange, ...] = ()
    oldest: Mapping[str, int] = field(default_factory=dict[str, int])


def wait_limits(rules: Sequence[Rule]) -> dict[str, int]:
    """Rule → how long its records may wait, in milliseconds: the longest ``wait`` of its look-ups."""
    return {
        rule.name: max(item.wait_ms for item in rule.lookups)
        for rule in rules
        if any(item.missing == "wait" for item in rule.lookups)
    }


def waits_of(pipeline: Pipeline, pool: str, state: StagingState | None) -> Waits:
    """The waits of a staging pool at this time."""
    if state is None or not state.head.waits:
        return Waits()
    limits, oldest, moment = wait_limits(pipeline.rules_of(pool)), dict(state.head.waits), ledger.present()
    due_rules = [rule for rule, since in oldest.items() if rule in limits and since + limits[rule] <= moment]
    if not due_rules:
        return Waits((), oldest)
    overdue: list[ClassRange] = []
    for rule in due_rules:
        late_entries, next_oldest = ledger.waiting_since(state, rule, moment - limits[rule] + 1)
        sorted_entries, room = late_entries.sort_by("since").to_pylist(), MOST_OVERDUE - len(overdue)
        for row in sorted_entries[:room]:
            place = OffsetRange(row["partition"], row["first"], row["first"] + 1)
            overdue.append(ClassRange(row["topic"], "pending", rule, place))
        next_times = [row["since"] for row in sorted_entries[room : room + 1]]
        oldest[rule] = next_times[0] if next_times else moment if next_oldest is None else next_oldest
    return Waits(tuple(overdue), oldest)


def waits_on(state: StagingState | None) -> Waits:
    """The waits for a batch that ends none of them. The next batch looks for the records whose wait is over."""
    return Waits() if state is None else Waits((), dict(state.head.waits))


def next_waits(waits: Waits, start_times: Mapping[str, int], waiting: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """The times of the account's head after a batch. ``start_times``: rule → when records of the batch began to wait;
    ``waiting``: (rule, topic) → records that are pending after the batch."""
    all_times = {**start_times, **waits.oldest}
    oldest_times = {
        rule: min(times.get(rule, since) for times in (start_times, waits.oldest)) for rule, since in all_times.items()
    }
    waiting_rules = {rule for (rule, _), count in waiting.items() if count > 0}
    return {rule: since for rule, since in oldest_times.items() if rule in waiting_rules}
