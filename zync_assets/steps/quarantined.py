"""Lists the records in quarantine: records that could not be decoded, and records that a rule fails on.

The former are in the side table of their raw table, whole; the latter are in the raw table, and the account of a staging
pool says why they made no output. Read without a JVM.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from zync_assets.errors import BadRecords
from zync_assets.lake import quarantine, raw, staging
from zync_assets.lake.raw import RawState
from zync_assets.lake.rows import rows_at
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Input, Pipeline


@dataclass(frozen=True)
class Selection:
    """Selects records by topics and offset ranges. Empty ``topics`` or empty ``ranges`` select everything."""

    topics: tuple[str, ...] = ()
    ranges: tuple[OffsetRange, ...] = ()

    def takes(self, topic: str, partition: int, offset: int) -> bool:
        if self.topics and topic not in self.topics:
            return False
        return not self.ranges or any(
            part.partition == partition and part.first <= offset < part.end for part in self.ranges
        )


EVERYTHING = Selection()


@dataclass(frozen=True)
class Held:
    """A record in quarantine.

    ``stage``: ``key`` or ``value`` (the side could not be decoded), or ``etl`` (``rule`` could not transform the record).
    ``pool``: the raw pool for ``key`` and ``value``, the staging pool for ``etl``. ``seen``: whether the offset is below
    seen in every pool that reads the topic.
    """

    pool: str
    topic: str
    partition: int
    offset: int
    stage: str
    rule: str | None
    error: str
    time: datetime | None
    seen: bool

    @property
    def place(self) -> tuple[str, int, int]:
        return self.topic, self.partition, self.offset


def held(pipeline: Pipeline, selection: Selection = EVERYTHING) -> list[Held]:
    """The selected records that lie in quarantine, by topic in the file's order, partition and offset."""
    found: list[Held] = []
    accounts = {pool: _account(pipeline, pool) for pool in pipeline.staging_pools}
    for item in pipeline.inputs:
        if selection.topics and item.topic not in selection.topics:
            continue
        state = raw.open_raw(pipeline.lake, item.pool, item.topic)
        if state is None:
            continue
        here = [*_undecoded(pipeline, item, state, accounts), *_failed(item, state, accounts)]
        here.sort(key=lambda record: (record.partition, record.offset))
        found += [record for record in here if selection.takes(*record.place)]
    return found


def count_held(pipeline: Pipeline, item: Input, state: RawState | None) -> int:
    """How many records of a topic lie in quarantine: in the account of the pool that has most, and what ETL has yet to see."""
    if state is None:
        return 0
    heads = [
        found.head
        for pool in pipeline.readers_of(item.topic)
        if (found := staging.open_staging(pipeline.lake, pool)) is not None
    ]
    counts = [
        sum(n for (topic, _, kind), n in head.counts.items() if topic == item.topic and kind == "quarantined")
        for head in heads
    ]
    seen = heads[counts.index(max(counts))].seen(item.topic) if heads else {}
    fresh = quarantine.held_entries(pipeline.lake, item.pool, item.topic, state) if any(state.bad.values()) else None
    unseen = 0
    if fresh is not None:
        places = zip(fresh["partition"].to_pylist(), fresh["offset"].to_pylist(), strict=True)
        unseen = sum(offset >= seen.get(partition, 0) for partition, offset in places)
    return max(counts, default=0) + unseen


def admit(pipeline: Pipeline, item: Input, state: RawState | None, fresh: int, first: Held, doing: str) -> None:
    """Raise BadRecords unless ``fresh`` more records of a topic, the lowest of which is ``first``, may go into quarantine.

    ``doing``: what is not committed then ("ingest", "pool Staging, batch 3").
    """
    topic, partition, offset = first.place
    place = f"topic {topic}, partition {partition}, offset {offset}"
    if item.on_bad_record == "fail":
        raise BadRecords(
            f"{doing}: {place}: {first.error}. on-bad-record is fail, so nothing was committed. Mend the"
            " cause; or set on-bad-record: quarantine: the other records go on, and this shows such records:"
            f" {pipeline.command('quarantine list')}"
        )
    if item.max_bad_records is None:
        return
    have = count_held(pipeline, item, state)
    if have + fresh > item.max_bad_records:
        raise BadRecords(
            f"{doing}: {fresh} bad records and {have} that lie in quarantine are more than max-bad-records"
            f" {item.max_bad_records} of topic {topic}; the first of this batch is at {place.partition(', ')[2]}:"
            f" {first.error}. Nothing of the batch was committed. Mend the cause; or raise max-bad-records; or"
            f" replay or drop what lies there, which this shows: {pipeline.command('quarantine list')}"
        )


@dataclass(frozen=True)
class _Account:
    """Seen positions, and ledger entries of the classes quarantined and dropped, sorted, by topic and partition."""

    seen: Mapping[tuple[str, int], int]
    entries: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]

    def fate(self, topic: str, partition: int, offset: int) -> str | None:
        """The class of an offset: quarantined, dropped or other; None where ETL has not passed it."""
        if offset >= self.seen.get((topic, partition), 0):
            return None
        entries = self.entries.get((topic, partition), ())
        at = bisect_right(entries, offset, key=lambda entry: entry["first"]) - 1
        return entries[at]["kind"] if at >= 0 and offset < entries[at]["end"] else "other"


def _account(pipeline: Pipeline, pool: str) -> _Account | None:
    state = staging.open_staging(pipeline.lake, pool)
    if state is None:
        return None
    entries: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    if not any(n for (_, _, kind), n in state.head.counts.items() if kind in ("quarantined", "dropped")):
        return _Account({place: item.seen for place, item in state.head.inputs.items()}, entries)
    for entry in staging.read_ledger(state, ["quarantined", "dropped"]).sort_by("first").to_pylist():
        entries.setdefault((entry["topic"], entry["partition"]), []).append(entry)
    return _Account({place: item.seen for place, item in state.head.inputs.items()}, entries)


def _undecoded(
    pipeline: Pipeline, item: Input, state: RawState, accounts: Mapping[str, _Account | None]
) -> Iterable[Held]:
    if not any(state.bad.values()):
        return
    mine = [accounts[pool] for pool in pipeline.readers_of(item.topic)]
    for row in quarantine.held_entries(pipeline.lake, item.pool, item.topic, state).to_pylist():
        partition, offset = row["partition"], row["offset"]
        fates = [account.fate(item.topic, partition, offset) if account else None for account in mine]
        if fates and all(fate == "dropped" for fate in fates):
            continue
        yield Held(
            item.pool,
            item.topic,
            partition,
            offset,
            row["stage"],
            None,
            row["error"],
            row["kafka"]["timestamp"],
            bool(fates) and None not in fates,
        )


def _failed(item: Input, state: RawState, accounts: Mapping[str, _Account | None]) -> Iterable[Held]:
    for pool, account in accounts.items():
        for (topic, partition), rows in (account.entries if account else {}).items():
            if topic != item.topic:
                continue
            # A range without a text stands for entries of the side table.
            own = [entry for entry in rows if entry["kind"] == "quarantined" and entry["text"] is not None]
            if not own:
                continue
            offsets = [entry["first"] for entry in own]
            span = OffsetRange(partition, min(offsets), max(offsets) + 1)
            there = rows_at(state.opened.uri, raw.raw_files(state, [span]), partition, offsets, [])
            for entry in own:
                found = there.get(entry["first"])
                when = found["kafka"]["timestamp"] if found else None
                yield Held(pool, topic, partition, entry["first"], "etl", entry["rule"], entry["text"], when, True)
