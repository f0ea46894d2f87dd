"""The side table of a raw table: records that could not be decoded, whole, offsets that retention took, and those that the
input's shape left out.

It is committed before the raw table, each file under the number of the attempt that wrote it (``attempt-<number>-…``). An
entry counts once the raw table's next offset has passed it, and while the raw table has no record at its offset: that is
one that was replayed. Of the offsets of a partition's last batch only the files of the attempt that was committed count,
which the raw table names in that same commit: others were left by writers that came second or died, and what they say
of a record is the same or out of date. The next attempt, whoever makes it, takes them out before it commits itself, so that none
is below an older batch. Nobody takes out what has not been passed yet: its writer may be about to commit.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.compute import pc
from zync_assets.errors import CommitConflict, LakeError
from zync_assets.lake import raw, storage, tables
from zync_assets.lake.raw import RawState
from zync_assets.lake.tables import DataFile
from zync_assets.records import BAD_SCHEMA, RANGE_STAGES

_NUMBER = "zync:quarantine"
_ATTEMPT = "attempt-"


def new_attempt() -> int:
    """A number for one attempt at ingesting a batch, as good as unique."""
    return secrets.randbits(62) + 1


def file_name(attempt: int) -> str:
    """What the names of an attempt's files begin with."""
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
    if opened is None:
        if files:
            tables.create_table(uri, BAD_SCHEMA, f"Quarantine of topic {topic}", files, {_NUMBER: 1})
        return
    left = [item for item in opened.files if _is_left_over(item, state)]
    if files or left:
        tables.commit(opened, files, {_NUMBER: (opened.number(_NUMBER) or 0) + 1}, removed=left)


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


def _is_left_over(item: DataFile, state: RawState | None) -> bool:
    """Whether a file lies within a partition's last batch and another attempt than its own was committed."""
    partition, first = item.partition or 0, item.first or 0
    if state is None or partition not in state.began or not state.began[partition] <= first < state.next[partition]:
        return False
    return not item.path.startswith(file_name(state.attempt[partition]))


def quarantine_files(lake: str, pool: str, topic: str, upcoming: Mapping[int, int]) -> list[DataFile]:
    """The files whose entries count, where the raw table's next offsets are ``upcoming``; sorted by partition and offset."""
    # The raw table first: what is left over of its last batches is then told from what came after.
    state = raw.open_raw(lake, pool, topic)
    opened = tables.open_table(storage.quarantine_uri(lake, pool, topic))
    if opened is None:
        return []
    counted = [
        item
        for item in opened.files
        if (item.first or 0) < upcoming.get(item.partition or 0, 0) and not _is_left_over(item, state)
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
