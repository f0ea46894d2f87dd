"""Take away files that no one needs: those that a commit replaced long ago, and those that no commit ever named.

A reader may still be at a version whose files were replaced since, and a writer's files lie there before its commit names
them. Both have RETENTION_HOURS for it: seven days, Delta's own default (Delta protocol, "Vacuum";
``deletedFileRetentionDuration``).
A writer that took longer is refused by ``tables.commit``, a day before, so that no commit names a file that is gone.
"""

from __future__ import annotations

from pyarrow import fs

from zync_assets.lake import storage, tables
from zync_assets.lake.tables import Opened

RETENTION_HOURS = tables.UNCOMMITTED_HOURS + 24
COMMITS = 100
"""Commits of a table between two cleanings."""
_NUMBER = "zync:cleaned"


def is_due(opened: Opened) -> bool:
    return opened.version // COMMITS > (opened.number(_NUMBER) or 0)


def clean(opened: Opened, hours: float = RETENTION_HOURS) -> list[str]:
    """Remove what is older than ``hours`` and no longer, or not, in the table. Returns the paths, relative to the table.

    Raises CommitConflict if another writer cleans the table at the same moment.
    """
    partition_by = opened.table.metadata().partition_columns
    tables.commit(opened, [], {_NUMBER: opened.version // COMMITS}, partition_by=partition_by)
    found = tables.open_table(opened.uri)
    if found is None:
        return []
    system, base = storage.filesystem(opened.uri)
    gone = [path for path in tables.unneeded(found, hours) if not _of_another_table(system, base, path)]
    for path in gone:
        system.delete_file(f"{base.rstrip('/')}/{path}")
    return gone


def _of_another_table(system: fs.FileSystem, base: str, path: str) -> bool:
    """Whether the file lies in a table below this one, as a raw table does below a staging pool of its pool's name."""
    folders = path.split("/")[:-1]
    logs = ["/".join([base.rstrip("/"), *folders[: count + 1], "_delta_log"]) for count in range(len(folders))]
    return any(info.type != fs.FileType.NotFound for info in system.get_file_info(logs))
