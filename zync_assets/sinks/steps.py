"""The sinks of a pipeline, planned and committed, batch by batch: the same for the command line and Dagster."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from zync_assets import upkeep
from zync_assets.conflicts import EVERYWHERE, Log, raise_first, retried
from zync_assets.errors import TargetRefused, TargetUnavailable, ZyncError
from zync_assets.lake import raw
from zync_assets.pipeline import Pipeline, SinkTable
from zync_assets.sinks.commit import SEARCH_OFFSETS, SinkCommit, commit_sink, reset_table
from zync_assets.sinks.plan import BATCH_OFFSETS, SinkBatch, layout, place_of, plan_sink, read_source
from zync_assets.sinks.target import Place, open_target
from zync_assets.spark.session import Session

OUTAGES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds to wait before a sink tries again, outage by outage. Then the step ends, and `run` waits on."""

_log = logging.getLogger(__name__)


def sink_all(pipeline: Pipeline, session: Session, sinks: Sequence[str] = ()) -> Iterator[SinkCommit]:
    """Write every table of the sinks up to the source's end at the start of the table, a commit a batch.

    ``sinks``: their names; none: all. A table's error holds back no other table: it is raised when the others are done.
    """
    troubles: list[ZyncError] = []
    for sink in pipeline.sinks:
        for table in sink.tables if not sinks or sink.name in sinks else ():
            try:
                yield from sink_table(pipeline, session, sink.name, table.name)
            except EVERYWHERE:
                raise
            except ZyncError as error:
                troubles.append(error)
    raise_first(troubles)


def sink_table(
    pipeline: Pipeline, session: Session, sink: str, table: str, first: SinkBatch | None = None
) -> Iterator[SinkCommit]:
    """Write one table of a sink up to the source's end, a commit a batch. An outage of the target is waited out for a while.

    ``first``: a batch that was read already.
    """
    limit, outages, commits = BATCH_OFFSETS, 0, 0
    while True:
        try:
            batch, first = first, None
            made = sink_once(pipeline, partial(read_sink, pipeline, session, sink, table, limit), batch)
        except TargetRefused:
            # Somewhere in the batch is a record that the target refuses. A smaller batch has it, or is written without it.
            limit = max(SEARCH_OFFSETS, limit // 8)
            continue
        except TargetUnavailable as error:
            if outages == len(OUTAGES):
                raise
            _log.warning("sink %s, table %s: %s; trying again in %s s", sink, table, error, OUTAGES[outages])
            time.sleep(OUTAGES[outages])
            outages += 1
            continue
        if made is None:
            _remove_leftovers(pipeline, sink, table)
            if commits:
                _apply_retention(pipeline, pipeline.sink(sink).table(table))
            return
        limit, outages, commits = min(BATCH_OFFSETS, limit * 8), 0, commits + 1
        yield made


_cleaned: set[Place] = set()


def _remove_leftovers(pipeline: Pipeline, sink: str, table: str) -> None:
    """Remove the load tables of killed runs, once in a process: a batch removes them too, but there may be none to come."""
    found = pipeline.sink(sink)
    place = place_of(pipeline, found, found.table(table))
    if place not in _cleaned:
        with open_target(found).run(place):
            _cleaned.add(place)


def _apply_retention(pipeline: Pipeline, table: SinkTable) -> None:
    """Remove old records of a raw table that every sink has written."""
    if not table.staged:
        item = pipeline.input(table.topic)
        state = raw.open_raw(pipeline.lake, item.pool, item.topic) if item.retention_ms is not None else None
        upkeep.apply_retention(pipeline, item, state, partial(wanted_from, pipeline, item.topic))


def wanted_from(pipeline: Pipeline, topic: str) -> dict[int, int]:
    """Partition → the first offset of a raw table that a sink may still want. A sink wants unwritten and refused records, and
    every record before its first batch. Raises TargetUnavailable."""
    limits: dict[int, int] | None = None
    for sink, table in pipeline.raw_sinks(topic):
        progress = open_target(sink).progress(place_of(pipeline, sink, table))
        own = dict(progress.next)
        for bad in progress.bad:
            own[bad.partition] = min(own.get(bad.partition, bad.offset), bad.offset)
        limits = own if limits is None else {p: min(limits[p], own[p]) for p in limits.keys() & own.keys()}
    return limits or {}


def read_sink(pipeline: Pipeline, session: Session, sink: str, table: str, limit: int = BATCH_OFFSETS) -> SinkBatch:
    """The next batch of a target table. The batch is lazy and starts no session."""
    found = pipeline.sink(sink)
    return read_source(session, plan_sink(pipeline, found, found.table(table), limit))


def sink_once(
    pipeline: Pipeline, read: Callable[[], SinkBatch], first: SinkBatch | None = None, log: Log = _log.warning
) -> SinkCommit | None:
    """Write one batch; None if there is nothing to do. ``first``: a batch that was read already."""

    def commit(batch: SinkBatch) -> SinkCommit | None:
        return None if batch.plan.nothing_to_do else commit_sink(batch)

    return retried(read, commit, first=first, log=log)


def reset_sink(pipeline: Pipeline, session: Session, sink: str, table: str) -> None:
    """Empty a table of a sink and forget its position."""
    found = pipeline.sink(sink)
    plan = plan_sink(pipeline, found, found.table(table), check=False)
    if plan.ends:
        reset_table(plan, layout(plan, session))
