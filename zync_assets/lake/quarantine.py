"""Quarantine: the side table of a raw table, and the records that lie in quarantine now.

The side table of a raw table. It holds undecodable records whole, offsets that retention removed, and records that
the input's shape excludes.

A batch commits the side table before the raw table. A file's name has the number of its attempt
(``attempt-<number>-…``). An entry counts once the raw table's next offset has passed the entry's offset. An entry no
longer counts once a replay has put its record into the raw table.

An attempt that adds a file for a partition sets ``zync:sealed:<partition>`` in the same commit, to the next offset that
the attempt was planned on. The attempt also removes the files below that offset that do not count. Every remaining file
below the sealed offset therefore counts. At or above the sealed offset, at most one committed batch has files, and the
raw table names the attempt of that batch. Writers that lost a race, were paused or died left the other files. No
attempt removes a file at or above the raw table's next offset, because the file's writer may be about to commit.

Lists the records in quarantine: records that could not be decoded, and records that a rule fails on.

The former are in the side table of their raw table, whole; the latter are in the raw table, and the account of a
staging pool says why they made no output. Read without a JVM.
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
import pyarrow.parquet as pq

from zync_assets.codecs.arrays import pc
from zync_assets.errors import BadRecords, CommitConflict, LakeError, TableDamaged
from zync_assets.lake import raw, staging, storage, tables, tampering
from zync_assets.lake.log import DataFile, Opened
from zync_assets.lake.raw import RawState
from zync_assets.lake.raw_files import BAD_SCHEMA, RANGE_STAGES
from zync_assets.lake.rows import rows_at
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Input, Pipeline

_NUMBER = "zync:quarantine"
_ATTEMPT = "attempt-"
_SEALED = "zync:sealed:"


def new_attempt() -> int:
    """A number for one attempt at ingesting a batch, as good as unique."""
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
    opened = tables.open_table(uri)
    check()
    planned = state.next if state else {}
    sealed = {f"{_SEALED}{p}": planned.get(p, 0) for p in sorted({item.partition or 0 for item in files})}
    if opened is None:
        if files:
            tables.create_table(uri, BAD_SCHEMA, f"Quarantine of topic {topic}", files, {_NUMBER: 1, **sealed})
        return
    left = [item for item in opened.files if _is_left_over(opened, item, state)]
    if files or left:
        tables.commit(opened, files, {_NUMBER: (opened.number(_NUMBER) or 0) + 1, **sealed}, removed=left)


def withdraw(lake: str, pool: str, topic: str, files: Sequence[DataFile]) -> None:
    """Take out the files of an attempt that can't be committed any more. Whoever dies before leaves that to others."""
    while True:
        opened = tables.open_table(storage.quarantine_uri(lake, pool, topic))
        present = {item.path for item in opened.files} if opened else set[str]()
        own = [item for item in files if item.path in present]
        if opened is None or not own:
            return
        with suppress(CommitConflict):  # another writer of the side table was first; look again
            tables.commit(opened, [], {_NUMBER: (opened.number(_NUMBER) or 0) + 1}, removed=own)
            return


def _is_left_over(opened: Opened, item: DataFile, state: RawState | None) -> bool:
    """Whether the raw table has passed a file, and the file is not of the attempt that was committed."""
    partition, first = item.partition or 0, item.first or 0
    if state is None or partition not in state.next:
        return False
    sealed = opened.number(f"{_SEALED}{partition}")
    # A side table from before there were sealed offsets.
    start = state.began.get(partition, state.next[partition]) if sealed is None else sealed
    if not start <= first < state.next[partition]:
        return False
    return not item.path.startswith(file_name(state.attempt.get(partition, 0)))


def check_whole(state: RawState, opened: Opened | None) -> None:
    """TableDamaged if another program changed the side table's files, removed entries, or removed the table.

    ``opened`` must not be older than ``state``.
    """
    if opened is None:
        if any(state.bad.values()) or any(state.left_out.values()):
            raise TableDamaged(
                f"table {state.opened.uri}: records of it are in quarantine, and the quarantine table is missing. Nothing"
                " was done. Restore the folder ~quarantine of the lake from a copy."
            )
        return
    held = Counter[int]()
    for item in opened.files:
        held[item.partition or 0] += item.records
    for partition, wanted in sorted(state.bad.items()):
        if held[partition] < wanted:
            raise tampering.changed(
                opened, f"it holds {held[partition]} entries of partition {partition}, and {wanted} were put there"
            )
    tampering.check(opened)


def quarantine_files(
    lake: str, pool: str, topic: str, upcoming: Mapping[int, int], *, checked: bool = True
) -> list[DataFile]:
    """The files whose entries count, where the raw table's next offsets are ``upcoming``; sorted by partition and offset.

    Raises TableDamaged if another program changed the side table. ``checked`` false: the caller reports the damage itself.
    """
    # Opens the raw table first, so that the side table is not older. A file of a later attempt then counts as left over.
    state = raw.open_raw(lake, pool, topic)
    opened = tables.open_table(storage.quarantine_uri(lake, pool, topic))
    if state is not None and checked:
        check_whole(state, opened)
    if opened is None:
        return []
    counted = [
        item
        for item in opened.files
        if (item.first or 0) < upcoming.get(item.partition or 0, 0) and not _is_left_over(opened, item, state)
    ]
    return sorted(counted, key=lambda item: (item.partition or 0, item.first or 0))


def held_entries(lake: str, pool: str, topic: str, state: RawState, columns: Sequence[str] = ()) -> pa.Table:
    """The records that lie in quarantine now: those that count and were not replayed, by partition and offset.

    Columns: partition, offset, stage, error, kafka, and what else of ``raw_files.BAD_SCHEMA`` is named. No JVM. Raises
    LakeError for a file that can't be read.
    """
    wanted = ["kafka", "stage", "error", *columns]
    empty = pa.schema([BAD_SCHEMA.field(name) for name in wanted]).empty_table()
    parts = [empty]
    uri = storage.quarantine_uri(lake, pool, topic)
    for item in quarantine_files(lake, pool, topic, state.next):
        place = storage.join(uri, item.path)
        system, path = storage.filesystem(place)
        try:
            table = pq.ParquetFile(path, filesystem=system).read(columns=wanted)
        except (OSError, pa.ArrowInvalid) as error:
            raise LakeError(f"file {place} can't be read: {error}. Restore it from a copy.") from error
        parts.append(table.select(wanted).cast(empty.schema))
    rows = pa.concat_tables(parts)
    rows = rows.filter(pc.invert(pc.is_in(rows["stage"], pa.array(RANGE_STAGES))))
    for place, name in enumerate(("partition", "offset")):
        rows = rows.add_column(place, name, pc.struct_field(rows["kafka"], name))
    if rows.num_rows == 0:
        return rows
    partitions, offsets = rows["partition"].to_numpy(), rows["offset"].to_numpy()
    here = np.ones(rows.num_rows, dtype=np.bool_)
    for partition, replayed in raw.replayed_offsets(state).items():
        here &= (partitions != partition) | ~np.isin(offsets, replayed)
    return rows.filter(pa.array(here)).sort_by([("partition", "ascending"), ("offset", "ascending")])


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
    fresh = held_entries(pipeline.lake, item.pool, item.topic, state) if any(state.bad.values()) else None
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
            f"{doing}: {place}: {first.error}. on-bad-record is fail, so nothing was committed. Remove"
            " the cause, or set on-bad-record: quarantine, so that the other records pass. List the records in quarantine:"
            f" {pipeline.command('quarantine list')}"
        )
    if item.max_bad_records is None:
        return
    have = count_held(pipeline, item, state)
    if have + fresh > item.max_bad_records:
        raise BadRecords(
            f"{doing}: {fresh} bad records and {have} that lie in quarantine are more than max-bad-records"
            f" {item.max_bad_records} of topic {topic}; the first of this batch is at {place.partition(', ')[2]}:"
            f" {first.error}. Nothing of the batch was committed. Remove the cause, raise max-bad-records, or"
            f" replay or drop records in quarantine. List the records in quarantine: {pipeline.command('quarantine list')}"
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
    for row in held_entries(pipeline.lake, item.pool, item.topic, state).to_pylist():
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
