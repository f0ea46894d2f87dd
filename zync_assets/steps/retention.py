"""Retention of raw data: removes records older than an input's ``retention``, once no staging pool needs them.

Retention takes two commits, because two tables change. First every staging pool releases the records (``staging.release``).
The release conflicts with every batch planned before it, and no later batch reads a released record, not even to retry
unmatched records. Second, the raw table removes the files. After a kill in between, the next attempt continues. A batch that
still reads the files finds them on disk, because only ``cleaning`` deletes them, days later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from datetime import timedelta

from zync_assets.crashes import crash_point
from zync_assets.errors import CommitConflict, ZyncError
from zync_assets.lake import raw, retention, staging
from zync_assets.lake.raw import RawState
from zync_assets.lake.retention import Cut
from zync_assets.lake.staging import StagingState
from zync_assets.pipeline import Input, Pipeline

_log = logging.getLogger(__name__)


def keep_short(pipeline: Pipeline, item: Input, known: RawState | None) -> None:
    """Remove what is old, where it is due by the table as it was when it was ``known``. It never fails the step: what could
    not be done is done after another commit."""
    if item.retention_ms is None or known is None:
        return
    try:
        now = int(time.time() * 1000)
        if retention.is_due(known, now, item.retention_ms):
            removed = sum(each.records for cut in retire(pipeline, item, now) for each in cut.files)
            age = timedelta(milliseconds=item.retention_ms)
            if removed:
                _log.info("%s.%s: %d records older than %s are removed", item.pool, item.topic, removed, age)
    except CommitConflict as error:
        _log.info("%s", error)
    except (ZyncError, OSError) as error:
        _log.warning("retention of %s.%s: %s", item.pool, item.topic, error)


def retire(pipeline: Pipeline, item: Input, now: int) -> Sequence[Cut]:
    """Remove an input's raw records that are older at ``now`` (milliseconds since the epoch) than it keeps them, and that no
    staging pool wants; what went. CommitConflict if a batch or a compaction came first.
    """
    table = raw.open_raw(pipeline.lake, item.pool, item.topic)
    pools = _pools(pipeline, item)
    if table is None or item.retention_ms is None or pools is None:
        return ()
    needed = dict(table.next)
    for state in pools:
        wanted = retention.needed_from(state, item.topic)
        needed = {partition: min(end, wanted.get(partition, 0)) for partition, end in needed.items()}
    found = retention.cuts(table, now - item.retention_ms, needed)
    if not found:
        return ()
    for state in pools:
        staging.release(state, item.topic, {cut.partition: cut.kept for cut in found})
    crash_point("retention:released")
    retention.commit(table, found)
    crash_point("retention:removed")
    return found


def _pools(pipeline: Pipeline, item: Input) -> list[StagingState] | None:
    """The staging pools that read an input, or did; None while one has not begun."""
    found: list[StagingState] = []
    readers = pipeline.readers_of(item.topic)
    for pool in pipeline.staging_pools:
        state = staging.open_staging(pipeline.lake, pool)
        reads = pool in readers
        if state is None and reads:
            return None
        if state is not None and (reads or state.head.seen(item.topic)):
            found.append(state)
    return found
