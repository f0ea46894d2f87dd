"""Maintenance of a table in use: merges small files, and removes unneeded files.

Maintenance runs after a commit, in the session of the commit, if the table's log shows that it is due. No history is read
in vain. A failure never fails the step; a later commit tries again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from zync_assets.crashes import crash_point
from zync_assets.errors import CommitConflict, ZyncError
from zync_assets.lake import cleaning, compaction, tables
from zync_assets.steps.tasks import run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)

SHARES = 8
"""Files that hold what a retention keeps, at the least, where they are compacted."""


def keep_up(spark: SparkSession, before: tables.Opened | None, retention_ms: int | None = None) -> None:
    """Compact and clean a table after a commit. ``before``: the table before the commit, None for a new table.

    ``retention_ms``: how long records are kept. Compaction then merges only files within a share of this time, so that
    retention can remove files bit by bit.
    """
    span = None if retention_ms is None else retention_ms // SHARES
    if before is None or not (compaction.due(before.files, span) or cleaning.is_due(before)):
        return
    try:
        compact(spark, before.uri, span)
        opened = tables.open_table(before.uri)
        if opened is not None and cleaning.is_due(opened):
            cleaning.clean(opened)
            crash_point("clean:done")
    except CommitConflict as error:
        _log.info("%s", error)
    except (ZyncError, OSError) as error:
        _log.warning("upkeep of table %s: %s", before.uri, error)


def compact(spark: SparkSession, uri: str, span: int | None = None) -> int:
    """Make small neighbouring files one, in Spark tasks, in one commit; returns how many files went. ``span``: see
    ``compaction.due``.

    Raises CommitConflict if another compaction came first; nothing of this one is visible then.
    """
    opened = tables.open_table(uri)
    runs = [
        part for run in (compaction.due(opened.files, span) if opened else []) for part in compaction.alike(uri, run)
    ]
    if opened is None or not runs:
        return 0
    schema = opened.schema
    made = run_tasks(spark, len(runs), lambda index: compaction.rewrite(uri, runs[index], schema))
    crash_point("compact:written")
    compaction.commit(opened, made, runs)
    crash_point("compact:committed")
    return sum(len(run) for run in runs)
