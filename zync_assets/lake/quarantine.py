"""The side table of a raw table: records that could not be decoded, whole, and offsets that retention took.

It is committed before the raw table. An entry counts once the raw table's next offset has passed it; entries at or past
the next offset are left over from a writer that did not get to commit, and the next writer replaces them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zync_assets.errors import CommitConflict
from zync_assets.lake import storage, tables
from zync_assets.lake.tables import DataFile
from zync_assets.records import BAD_SCHEMA

_NUMBER = "zync:quarantine"


def replace_uncounted(
    lake: str, pool: str, topic: str, upcoming: Mapping[int, int], files: Sequence[DataFile]
) -> list[DataFile]:
    """Commit quarantine files, in place of those at or past the raw table's next offsets (``upcoming``).

    Returns the files taken out: a writer that then loses the race for the raw table puts them back with ``restore``.
    """
    uri = storage.quarantine_uri(lake, pool, topic)
    opened = tables.open_table(uri)
    if opened is None:
        if files:
            tables.create_table(uri, BAD_SCHEMA, f"Quarantine of topic {topic}", files, {_NUMBER: 1})
        return []
    stale = [item for item in tables.list_files(opened) if (item.first or 0) >= upcoming.get(item.partition or 0, 0)]
    if files or stale:
        tables.commit(opened, files, {_NUMBER: (opened.number(_NUMBER) or 0) + 1}, removed=stale)
    return stale


def restore(lake: str, pool: str, topic: str, upcoming: Mapping[int, int], removed: Sequence[DataFile]) -> None:
    """Put back what ``replace_uncounted`` took out, as far as the raw table has counted it meanwhile."""
    while True:
        opened = tables.open_table(storage.quarantine_uri(lake, pool, topic))
        if opened is None:
            return
        present = {item.path for item in tables.list_files(opened)}
        wanted = [
            item
            for item in removed
            if item.path not in present and (item.last or 0) < upcoming.get(item.partition or 0, 0)
        ]
        if not wanted:
            return
        try:
            tables.commit(opened, wanted, {_NUMBER: (opened.number(_NUMBER) or 0) + 1})
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
