"""The side table of a raw table. It holds undecodable records whole, offsets that retention removed, and records that the
input's shape excludes.

A batch commits the side table before the raw table. A file's name has the number of its attempt (``attempt-<number>-…``).
An entry counts once the raw table's next offset has passed the entry's offset. An entry no longer counts once a replay
has put its record into the raw table.

An attempt that adds a file for a partition sets ``zync:sealed:<partition>`` in the same commit, to the next offset that
the attempt was planned on. The attempt also removes the files below that offset that do not count. Every remaining file
below the sealed offset therefore counts. At or above the sealed offset, at most one committed batch has files, and the
raw table names the attempt of that batch. Writers that lost a race, were paused or died left the other files. No attempt
removes a file at or above the raw table's next offset, because the file's writer may be about to commit.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.compute import pc
from zync_assets.errors import CommitConflict, LakeError, TableDamaged
from zync_assets.lake import foreign, raw, storage, tables
from zync_assets.lake.raw import RawState
from zync_assets.lake.tables import DataFile, Opened
from zync_assets.records import BAD_SCHEMA, RANGE_STAGES

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
            raise foreign.changed(
                opened, f"it holds {held[partition]} entries of partition {partition}, and {wanted} were put there"
            )
    foreign.check(opened)


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

    Columns: partition, offset, stage, error, kafka, and what else of ``records.BAD_SCHEMA`` is named. No JVM. Raises
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
