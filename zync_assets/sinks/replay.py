"""Refused records of targets, written again after the table or the target was corrected, or given up.

A record is written again only if no later record of its key has been written. Otherwise the row would go back in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

import pyarrow as pa

from zync_assets.conflicts import retried
from zync_assets.errors import TargetRefused
from zync_assets.lake.quarantine_table import Selection
from zync_assets.offsets import OffsetRange, place_text
from zync_assets.pipeline import Pipeline, Sink, SinkTable
from zync_assets.sinks.columns import OFFSET, PARTITION, TIME, Layout
from zync_assets.sinks.commit import in_tasks, loaded
from zync_assets.sinks.plan import SinkPlan, layout, plan_sink, reset_command, source_frame
from zync_assets.sinks.target import BadRecord, Merge, TableSpec, open_target
from zync_assets.spark.session import Session, lazy_session
from zync_assets.spark.tasks import search_settings

OVERTAKEN = "a later record of its key has been written, and nothing was changed; drop it"

LEFT_OUT = "the sink leaves it out now, by before: {where: ...} or delete: false, and nothing was changed; drop it"

Spot = tuple[int, int]
"""Partition and offset."""


@dataclass(frozen=True)
class RefusedRecord:
    """A record in the quarantine of a sink."""

    sink: Sink
    table: SinkTable
    bad: BadRecord

    def __str__(self) -> str:
        place = place_text(self.table.topic, self.bad.partition, self.bad.offset)
        return f"{place}, sink {self.sink.name}/{self.table.name},"


def refused_records(pipeline: Pipeline, selection: Selection) -> Iterator[RefusedRecord]:
    """The records that targets refused. Raises TargetUnavailable."""
    for plan in _plans(pipeline, selection):
        for record in _chosen_records(plan, selection):
            yield RefusedRecord(plan.sink, plan.table, record)


def replay_refused(pipeline: Pipeline, session: Session, selection: Selection) -> tuple[int, dict[str, str]]:
    """Write refused records again: the number that was written, and record → why it stays."""
    count, reason_by_record, session = 0, dict[str, str](), lazy_session(session)
    for plan in _plans(pipeline, selection):
        if records := _chosen_records(plan, selection):
            with search_settings(session()):
                reasons = retried(
                    partial(plan_sink, pipeline, plan.sink, plan.table),
                    lambda new: _replay(new, session, _chosen_records(new, selection)),
                    first=plan,
                )
            count += len(records) - len(reasons)
            by_spot = {(item.partition, item.offset): item for item in records}
            reason_by_record |= {
                str(RefusedRecord(plan.sink, plan.table, by_spot[at])): text for at, text in reasons.items()
            }
    return count, reason_by_record


def drop_refused(pipeline: Pipeline, selection: Selection) -> int:
    """Give up refused records; returns their number. Needs no JVM."""

    def drop(plan: SinkPlan) -> int:
        spots = tuple((item.partition, item.offset) for item in _chosen_records(plan, selection))
        if spots:
            # No load table is merged, so that the columns do not matter.
            plan.target().merge(_merge(plan, TableSpec(plan.table.name, (), (), plan.sink.mode), spots))
        return len(spots)

    plans = _plans(pipeline, selection)
    return sum(retried(partial(plan_sink, pipeline, plan.sink, plan.table), drop, first=plan) for plan in plans)


def _plans(pipeline: Pipeline, selection: Selection) -> Iterator[SinkPlan]:
    for sink in pipeline.sinks:
        if selection.sinks and sink.name not in selection.sinks:
            continue
        for table in sink.tables:
            if not selection.topics or table.topic in selection.topics:
                yield plan_sink(pipeline, sink, table)


def _chosen_records(plan: SinkPlan, selection: Selection) -> list[BadRecord]:
    records = [
        record for record in plan.progress.bad if selection.takes(plan.table.topic, record.partition, record.offset)
    ]
    return sorted(records, key=lambda record: (record.partition, record.offset))


def _merge(plan: SinkPlan, spec: TableSpec, cured: tuple[Spot, ...]) -> Merge:
    """A transaction that moves no position. Another run that moved one in the meantime makes it a conflict."""
    return Merge(plan.place, spec, plan.origin, dict(plan.progress.next), {}, cured=cured)


def _replay(plan: SinkPlan, session: Session, records: Sequence[BadRecord]) -> dict[Spot, str]:
    """Write refused records of one table again: place → why the record stays. CommitConflict if another run wrote to the table,
    or took one of the records out of quarantine."""
    if not records:
        return {}
    table_layout = layout(plan, session)
    spots = [(item.partition, item.offset) for item in records]
    ranges = tuple(OffsetRange(partition, offset, offset + 1) for partition, offset in spots)
    frame = source_frame(session(), plan, table_layout, ranges, guarded=True)
    overtaken_spots = (
        _find_overtaken(plan, session, table_layout, records) if plan.sink.mode == "upsert" else set[Spot]()
    )
    # After new partitions, refused records of a key may be in several of them.
    frame = frame.coalesce(1).sortWithinPartitions(TIME, PARTITION, OFFSET)
    with plan.target().run(plan.place) as run:
        merge = _merge(plan, table_layout.spec, ())
        # The later record may leave out fields that this one sets.
        reason = f"{OVERTAKEN}. If the row lacks values of it, load the table again: {reset_command(plan)}"
        task = ReplayTask(plan.sink, table_layout, run, merge, frozenset(overtaken_spots), reason)
        reason_by_spot = {
            spot: reason
            for task_reasons in in_tasks(frame, partial(_replay_task, task))
            for spot, reason in task_reasons.items()
        }
    return {spot: reason for spot in spots if (reason := reason_by_spot.get(spot, LEFT_OUT)) is not None}


def _find_overtaken(plan: SinkPlan, session: Session, table_layout: Layout, records: Sequence[BadRecord]) -> set[Spot]:
    """The records after which a record of the same key was written."""
    from pyspark.sql import functions as F

    refused_spots = {(item.partition, item.offset) for item in plan.progress.bad}
    starts = {
        item.partition: min(record.offset for record in records if record.partition == item.partition)
        for item in records
    }
    if len(starts) > 1 and not plan.table.staged:
        # A key that new partitions moved has later records at lower offsets. A staged key stays in its partition.
        starts = {}
    ranges = tuple(
        OffsetRange(partition, starts.get(partition, plan.starts.get(partition, next_offset)), next_offset)
        for partition, next_offset in plan.progress.next.items()
        if starts.get(partition, plan.starts.get(partition, next_offset)) < next_offset
    )
    names = table_layout.key_names
    later = source_frame(session(), plan, table_layout, ranges, guarded=True).select(*names, TIME, PARTITION, OFFSET)
    spots = tuple(OffsetRange(item.partition, item.offset, item.offset + 1) for item in records)
    refused_frame = source_frame(session(), plan, table_layout, spots, guarded=True)
    refused_frame = refused_frame.select(
        *(F.col(name).alias(f"own_{name}") for name in names),
        F.col(TIME).alias("t"),
        F.col(PARTITION).alias("p"),
        F.col(OFFSET).alias("o"),
    )
    is_same_key = reduce(
        lambda left, right: left & right, [F.col(name).eqNullSafe(F.col(f"own_{name}")) for name in names]
    )
    # A staged record has no time here: its key stays in one partition.
    follows = F.expr(f"{TIME} > t OR ({TIME} <=> t AND ({PARTITION} > p OR ({PARTITION} = p AND {OFFSET} > o)))")
    rows = (
        later.join(F.broadcast(refused_frame), is_same_key & follows)
        .select("p", "o", PARTITION, OFFSET)
        .distinct()
        .collect()
    )
    return {(row[0], row[1]) for row in rows if (row[2], row[3]) not in refused_spots}


@dataclass(frozen=True)
class ReplayTask:
    """The input of a replay's task. ``merge``: moves no position; ``overtaken``: records that are too late,
    and why they stay."""

    sink: Sink
    layout: Layout
    run: str
    merge: Merge
    overtaken: frozenset[Spot]
    overtaken_reason: str


def _replay_task(task: ReplayTask, batches: Iterator[pa.RecordBatch]) -> dict[Spot, str | None]:
    """Place → why the record stays; None: it was written."""
    target, reasons = open_target(task.sink), dict[Spot, str | None]()
    for batch in batches:
        for index in range(batch.num_rows):
            row = batch.slice(index, 1)
            spot = row.column(PARTITION)[0].as_py(), row.column(OFFSET)[0].as_py()
            if spot in task.overtaken:
                reasons[spot] = task.overtaken_reason
                continue
            try:
                name = f"{task.run}r{spot[0]}_{spot[1]}"
                target.apply(replace(task.merge, cured=(spot,)), name, loaded(task.layout, [row]))
                reasons[spot] = None
            except TargetRefused as error:
                reasons[spot] = str(error)
    return reasons
