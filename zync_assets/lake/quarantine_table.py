"""Quarantine: the side table of a raw table, and the records that lie in quarantine now.

The side table holds undecodable records whole, offsets that retention removed, and records that the input's shape
excludes. A record that a rule fails on lies in the raw table, and the account of a staging pool says why the record made
no output. Nothing here needs a JVM.

A batch commits the side table before the raw table. A file's name has the number of its attempt
(``attempt-<number>-…``). An entry counts once the raw table's next offset has passed the entry's offset. An entry no
longer counts once a replay has put its record into the raw table.

An attempt that adds a file for a partition sets ``zync:sealed:<partition>`` in the same commit, to the next offset that
the attempt was planned on. The attempt also removes the files below that offset that do not count. Every remaining file
below the sealed offset therefore counts. At or above the sealed offset, at most one committed batch has files, and the
raw table names the attempt of that batch. Writers that lost a race, were paused or died left the other files. No
attempt removes a file at or above the raw table's next offset, because the file's writer may be about to commit.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.errors import BadRecords, CommitConflict, TableDamaged
from zync_assets.lake import raw, staging, storage, tables, tampering
from zync_assets.lake.log import DataFile, LakeTable
from zync_assets.lake.parquet_rows import rows_at
from zync_assets.lake.raw import RawState
from zync_assets.lake.raw_files import BAD_SCHEMA, RANGE_STAGES
from zync_assets.lake.snapshot import Snapshot
from zync_assets.offsets import OffsetRange, place_text
from zync_assets.pipeline import Input, Pipeline

_NUMBER = "zync:quarantine"
_ATTEMPT = "attempt-"
_SEAL = "zync:sealed:"


def new_attempt() -> int:
    """A random number for one attempt at ingesting a batch. Two attempts hardly ever have the same number."""
    return secrets.randbits(62) + 1


def file_name(attempt: int) -> str:
    """The prefix of the names of an attempt's files."""
    return f"{_ATTEMPT}{attempt:016x}"


def add(
    lake: str, pool: str, topic: str, state: RawState | None, files: Sequence[DataFile], check: Callable[[], None]
) -> None:
    """Commit an attempt's files, and take out what other attempts at the raw table's last batches left.

    ``state``: the raw table that the attempt was planned on. ``check`` is called once the side table is opened, and raises
    CommitConflict if the raw table is another one by now.
    """
    uri = storage.quarantine_uri(lake, pool, topic)
    table = tables.open_table(uri)
    check()
    next_offsets = state.next if state else {}
    seals = {f"{_SEAL}{p}": next_offsets.get(p, 0) for p in sorted({item.partition or 0 for item in files})}
    if table is None:
        if files:
            tables.create_table(uri, BAD_SCHEMA, f"Quarantine of topic {topic}", files, {_NUMBER: 1, **seals})
        return
    leftovers = [item for item in table.files if _is_leftover(table, item, state)]
    if files or leftovers:
        tables.commit(table, files, {_NUMBER: (table.number(_NUMBER) or 0) + 1, **seals}, removals=leftovers)


def withdraw(lake: str, pool: str, topic: str, files: Sequence[DataFile]) -> None:
    """Remove the files of an attempt that can no longer be committed. If this process dies first, a later attempt removes
    them."""
    while True:
        table = tables.open_table(storage.quarantine_uri(lake, pool, topic))
        paths = {item.path for item in table.files} if table else set[str]()
        table_files = [item for item in files if item.path in paths]
        if table is None or not table_files:
            return
        with suppress(CommitConflict):  # another writer of the side table was first; look again
            tables.commit(table, [], {_NUMBER: (table.number(_NUMBER) or 0) + 1}, removals=table_files)
            return


def _is_leftover(table: LakeTable, item: DataFile, state: RawState | None) -> bool:
    """Whether the raw table has passed a file, and the file is not of the attempt that was committed."""
    partition, first = item.partition or 0, item.first or 0
    if state is None or partition not in state.next:
        return False
    seal = table.number(f"{_SEAL}{partition}")
    # A side table from before there were sealed offsets.
    start = state.batch_start.get(partition, state.next[partition]) if seal is None else seal
    if not start <= first < state.next[partition]:
        return False
    return not item.path.startswith(file_name(state.attempt.get(partition, 0)))


def check_whole(state: RawState, table: LakeTable | None) -> None:
    """TableDamaged if another program changed the side table's files, removed entries, or removed the table.

    ``table`` must not be older than ``state``.
    """
    if table is None:
        if any(state.bad.values()) or any(state.left_out.values()):
            raise TableDamaged(
                f"table {state.table.uri}: records of it are in quarantine, and the quarantine table is missing. Nothing"
                " was done. Restore the folder ~quarantine of the lake from a copy."
            )
        return
    entry_counts = Counter[int]()
    for item in table.files:
        entry_counts[item.partition or 0] += item.records
    for partition, count in sorted(state.bad.items()):
        if entry_counts[partition] < count:
            raise tampering.damage(
                table,
                f"it holds {entry_counts[partition]} entries of partition {partition}, and {count} were put there",
            )
    tampering.check(table)


def quarantine_files(state: RawState, side: LakeTable | None, *, check: bool = True) -> list[DataFile]:
    """The files whose entries count for a raw table, sorted by partition and offset. ``side``: its side table, not older.

    Raises TableDamaged if another program changed the side table. ``check`` false: the caller reports the damage itself.
    """
    if check:
        check_whole(state, side)
    files = [
        item
        for item in (side.files if side else ())
        if side is not None
        and (item.first or 0) < state.next.get(item.partition or 0, 0)
        and not _is_leftover(side, item, state)
    ]
    return sorted(files, key=lambda item: (item.partition or 0, item.first or 0))


def entries(state: RawState, side: LakeTable | None, columns: Sequence[str] = ()) -> pa.Table:
    """The entries of records that lie in quarantine now: they count and were not replayed. Sorted by partition and offset.

    Columns: partition, offset, stage, error, kafka, and ``columns`` of ``raw_files.BAD_SCHEMA``. Raises LakeError for a file
    that can't be read.
    """
    all_columns = ["kafka", "stage", "error", *columns]
    empty = pa.schema([BAD_SCHEMA.field(name) for name in all_columns]).empty_table()
    parts = [empty]
    for item in quarantine_files(state, side):
        assert side is not None
        table = storage.read_file(storage.join(side.uri, item.path), all_columns)
        parts.append(table.select(all_columns).cast(empty.schema))
    rows = pa.concat_tables(parts)
    rows = rows.filter(pc.invert(pc.is_in(rows["stage"], pa.array(RANGE_STAGES))))
    for place, name in enumerate(("partition", "offset")):
        rows = rows.add_column(place, name, pc.struct_field(rows["kafka"], name))
    if rows.num_rows == 0:
        return rows
    partitions, offsets = rows["partition"].to_numpy(), rows["offset"].to_numpy()
    is_quarantined = np.ones(rows.num_rows, dtype=np.bool_)
    for partition, replay_offsets in raw.replay_offsets(state).items():
        is_quarantined &= (partitions != partition) | ~np.isin(offsets, replay_offsets)
    return rows.filter(pa.array(is_quarantined)).sort_by([("partition", "ascending"), ("offset", "ascending")])


@dataclass(frozen=True)
class Selection:
    """Selects records by topics and offset ranges. Empty ``topics`` or empty ``ranges`` select everything. ``sinks``: the sinks
    whose refused records are selected; empty for all."""

    topics: tuple[str, ...] = ()
    ranges: tuple[OffsetRange, ...] = ()
    sinks: tuple[str, ...] = ()

    def takes(self, topic: str, partition: int, offset: int) -> bool:
        if self.topics and topic not in self.topics:
            return False
        return not self.ranges or any(
            part.partition == partition and part.first <= offset < part.end for part in self.ranges
        )


EVERYTHING = Selection()


@dataclass(frozen=True)
class QuarantinedRecord:
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


def quarantined_records(
    pipeline: Pipeline, selection: Selection = EVERYTHING, snapshot: Snapshot | None = None
) -> list[QuarantinedRecord]:
    """The selected records that lie in quarantine, by topic in the file's order, partition and offset."""
    snapshot = snapshot or Snapshot(pipeline)
    records: list[QuarantinedRecord] = []
    accounts = {pool: _account(snapshot, pool) for pool in pipeline.staging_pools}
    for item in pipeline.inputs:
        if selection.topics and item.topic not in selection.topics:
            continue
        state = snapshot.raw(item.topic)
        if state is None:
            continue
        topic_records = [*_codec_failures(snapshot, item, state, accounts), *_rule_failures(item, state, accounts)]
        topic_records.sort(key=lambda record: (record.partition, record.offset))
        records += [record for record in topic_records if selection.takes(*record.place)]
    return records


def quarantine_count(snapshot: Snapshot, item: Input) -> int:
    """The number of a topic's records in quarantine: the records in the account of the pool that has the most, and the records
    that ETL has yet to see."""
    state = snapshot.raw(item.topic)
    if state is None:
        return 0
    pools = [snapshot.staging(pool) for pool in snapshot.pipeline.readers_of(item.topic)]
    heads = [pool_state.head for pool_state in pools if pool_state is not None]
    counts = [
        sum(n for (topic, _, kind), n in head.counts.items() if topic == item.topic and kind == "quarantined")
        for head in heads
    ]
    seen_offsets = heads[counts.index(max(counts))].seen(item.topic) if heads else {}
    unseen_count = 0
    if any(state.bad.values()):
        fresh = entries(state, snapshot.quarantine(item.topic))
        places = zip(fresh["partition"].to_pylist(), fresh["offset"].to_pylist(), strict=True)
        unseen_count = sum(offset >= seen_offsets.get(partition, 0) for partition, offset in places)
    return max(counts, default=0) + unseen_count


def admit(
    pipeline: Pipeline, item: Input, state: RawState | None, fresh: int, first: QuarantinedRecord, doing: str
) -> None:
    """Raise BadRecords unless ``fresh`` more records of a topic, the lowest of which is ``first``, may go into quarantine.

    ``doing``: what is not committed then ("ingest", "pool Staging, batch 3").
    """
    topic, partition, offset = first.place
    place = place_text(topic, partition, offset)
    if item.on_bad_record == "fail":
        raise BadRecords(
            f"{doing}: {place}: {first.error}. on-bad-record is fail, so nothing was committed. Remove"
            " the cause and run again, or set on-bad-record: quarantine. Then the other records pass, and this one is in the list"
            f" of {pipeline.command('quarantine list')}"
        )
    if item.max_bad_records is None:
        return
    have = quarantine_count(Snapshot(pipeline, {item.topic: state}), item)
    if have + fresh > item.max_bad_records:
        raise BadRecords(
            f"{doing}: {fresh} bad records and {have} that lie in quarantine are more than max-bad-records"
            f" {item.max_bad_records} of topic {topic}; the first of this batch is at {place.partition(', ')[2]}:"
            f" {first.error}. Nothing of the batch was committed. Remove the cause, raise max-bad-records, or"
            f" replay or drop records in quarantine. List the records in quarantine: {pipeline.command('quarantine list')}"
        )


_KEPT = ("quarantined", "dropped", "expired")


@dataclass(frozen=True)
class _Account:
    """Seen positions, and ledger entries of the classes quarantined, dropped and expired, sorted, by topic and partition."""

    seen: Mapping[tuple[str, int], int]
    entries: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]

    def fate(self, topic: str, partition: int, offset: int) -> str | None:
        """The class of an offset: quarantined, dropped or other; None where ETL has not passed it."""
        if offset >= self.seen.get((topic, partition), 0):
            return None
        entries = self.entries.get((topic, partition), ())
        at = bisect_right(entries, offset, key=lambda entry: entry["first"]) - 1
        return entries[at]["kind"] if at >= 0 and offset < entries[at]["end"] else "other"


def _account(snapshot: Snapshot, pool: str) -> _Account | None:
    state = snapshot.staging(pool)
    if state is None:
        return None
    entries: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    if not any(n for (_, _, kind), n in state.head.counts.items() if kind in _KEPT):
        return _Account({place: item.seen for place, item in state.head.inputs.items()}, entries)
    for entry in staging.read_ledger(state, _KEPT).sort_by("first").to_pylist():
        entries.setdefault((entry["topic"], entry["partition"]), []).append(entry)
    return _Account({place: item.seen for place, item in state.head.inputs.items()}, entries)


def _codec_failures(
    snapshot: Snapshot, item: Input, state: RawState, accounts: Mapping[str, _Account | None]
) -> Iterable[QuarantinedRecord]:
    if not any(state.bad.values()):
        return
    readers = [accounts[pool] for pool in snapshot.pipeline.readers_of(item.topic)]
    for row in entries(state, snapshot.quarantine(item.topic)).to_pylist():
        partition, offset = row["partition"], row["offset"]
        fates = [account.fate(item.topic, partition, offset) if account else None for account in readers]
        if fates and all(fate == "dropped" for fate in fates):
            continue
        yield QuarantinedRecord(
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


def _rule_failures(
    item: Input, state: RawState, accounts: Mapping[str, _Account | None]
) -> Iterable[QuarantinedRecord]:
    for pool, account in accounts.items():
        for (topic, partition), rows in (account.entries if account else {}).items():
            if topic != item.topic:
                continue
            # A range without a text stands for entries of the side table.
            failures = [entry for entry in rows if entry["kind"] != "dropped" and entry["text"] is not None]
            if not failures:
                continue
            offsets = [entry["first"] for entry in failures]
            span = OffsetRange(partition, min(offsets), max(offsets) + 1)
            raw_rows = rows_at(state.table.uri, raw.raw_files(state, [span]), partition, offsets, [])
            for entry in failures:
                row = raw_rows.get(entry["first"])
                timestamp = row["kafka"]["timestamp"] if row else None
                yield QuarantinedRecord(
                    pool, topic, partition, entry["first"], "etl", entry["rule"], entry["text"], timestamp, True
                )
