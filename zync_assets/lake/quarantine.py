"""The side table of a raw table: records that could not be decoded, whole, offsets that retention took, and those that the
input's shape left out.

It is committed before the raw table. An entry counts once the raw table's next offset has passed it; entries at or past
the next offset are left over from a writer that did not get to commit, and the next writer replaces them. It stops counting
when the raw table has its offset: then it was replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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


def replace_uncounted(
    lake: str,
    pool: str,
    topic: str,
    upcoming: Mapping[int, int],
    files: Sequence[DataFile],
    check: Callable[[], None] = lambda: None,
) -> list[DataFile]:
    """Commit quarantine files, in place of those at or past the raw table's next offsets (``upcoming``).

    ``check`` is called once the table is opened, and raises CommitConflict if the raw table's next offsets are others by
    now: a writer that comes after that conflicts here, since ``settle`` commits too. Returns the files taken out.
    """
    uri = storage.quarantine_uri(lake, pool, topic)
    opened = tables.open_table(uri)
    check()
    if opened is None:
        if files:
            tables.create_table(uri, BAD_SCHEMA, f"Quarantine of topic {topic}", files, {_NUMBER: 1})
        return []
    stale = [item for item in tables.list_files(opened) if (item.first or 0) >= upcoming.get(item.partition or 0, 0)]
    if files or stale:
        tables.commit(opened, files, {_NUMBER: (opened.number(_NUMBER) or 0) + 1}, removed=stale)
    return stale


def settle(lake: str, pool: str, topic: str, kept: Sequence[DataFile], dropped: Sequence[DataFile]) -> None:
    """After the race for the raw table: make sure that ``kept`` is there and ``dropped`` is not.

    The winner keeps its own files, which a loser may have taken out a moment before; a loser puts back what it took out
    and counts by now, and drops its own.
    """
    while True:
        opened = tables.open_table(storage.quarantine_uri(lake, pool, topic))
        if opened is None:
            return
        present = {item.path for item in tables.list_files(opened)}
        absent = [item for item in kept if item.path not in present]
        wrong = [item for item in dropped if item.path in present]
        try:
            tables.commit(opened, absent, {_NUMBER: (opened.number(_NUMBER) or 0) + 1}, removed=wrong)
            return
        except CommitConflict:
            continue  # another writer of the side table was first; look again


def quarantine_files(lake: str, pool: str, topic: str, upcoming: Mapping[int, int]) -> list[DataFile]:
    """The files whose entries count, sorted by partition and offset."""
    opened = tables.open_table(storage.quarantine_uri(lake, pool, topic))
    if opened is None:
        return []
    counted = [item for item in tables.list_files(opened) if (item.first or 0) < upcoming.get(item.partition or 0, 0)]
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
        system, path = storage.filesystem(storage.join(uri, item.path))
        try:
            table = pq.ParquetFile(path, filesystem=system).read(columns=wanted)
        except (OSError, pa.ArrowInvalid) as error:
            raise LakeError(f"file {path} can't be read: {error}; run zync check") from error
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
