"""Refused records of targets, written again after the table or the target was corrected, or given up.

A record is written again only if no later record of its key has been written. Otherwise the row would go back in time.

A replay of ingest's quarantine may bring a raw record after the sink has passed its offset. One transaction of the target then
puts the record into the sink's quarantine, and counts the replay. From there it is written as a refused record is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import TypeVar

import pyarrow as pa

from zync_assets.conflicts import retried
from zync_assets.crashes import crash_point
from zync_assets.errors import TableUnfit, TargetRefused
from zync_assets.lake import raw
from zync_assets.lake.check_results import count_text
from zync_assets.lake.quarantine_table import Selection
from zync_assets.lake.raw import RawState
from zync_assets.lake.snapshot import Snapshot
from zync_assets.offsets import OffsetRange, place_text, subtract
from zync_assets.pipeline import Pipeline, Sink, SinkTable
from zync_assets.sinks.columns import IS_DELETE, OFFSET, PARTITION, TIME, Layout, SourceColumn
from zync_assets.sinks.commit import SEARCH_OFFSETS, in_tasks, loaded, prepare_table
from zync_assets.sinks.fold import sorted_rows
from zync_assets.sinks.plan import REPLAYS, SinkBatch, SinkPlan, layout, plan_sink, reset_command, source_frame
from zync_assets.sinks.target import BadRecord, Merge, Place, TableSpec, open_target
from zync_assets.spark.session import Session
from zync_assets.spark.tasks import search_settings

_log = logging.getLogger(__name__)
T = TypeVar("T")

OVERTAKEN = "a later record of its key has been written, and nothing was changed; drop it"

LEFT_OUT = "the sink leaves it out now, by before: {where: ...} or delete: false, and nothing was changed; drop it"

LATE = "a replay brought the record after the sink had passed its offset"

REMOVED = (
    "retention removed the records around it, which may have a later one of its key, and nothing was changed; drop it, and change"
    " the row in the source"
)

Spot = tuple[int, int]
"""Partition and offset."""


@dataclass(frozen=True)
class RefusedRecord:
    """A record in the quarantine of a sink."""

    sink: Sink
    table: SinkTable
    bad: BadRecord

    @property
    def spot(self) -> Spot:
        return self.bad.partition, self.bad.offset

    def __str__(self) -> str:
        place = place_text(self.table.topic, self.bad.partition, self.bad.offset)
        return f"{place}, sink {self.sink.name}/{self.table.name},"


def refused_records(pipeline: Pipeline, selection: Selection) -> Iterator[RefusedRecord]:
    """The records that targets refused. Raises TargetUnavailable."""
    for plan in _plans(pipeline, selection):
        for record in chosen_records(plan, selection):
            yield RefusedRecord(plan.sink, plan.table, record)


def write_refused(batch: SinkBatch, selection: Selection) -> dict[Spot, str]:
    """Write the selected refused records of a table again: place → why the record stays. Raises CommitConflict."""
    records = chosen_records(batch.plan, selection)
    if not records:
        return {}
    _prepare(batch)
    with search_settings(batch.spark):
        return _replay(batch.plan, batch.session, records)


def drop_refused(pipeline: Pipeline, selection: Selection) -> int:
    """Give up refused records; returns their number. Needs no JVM."""

    def drop(plan: SinkPlan) -> int:
        spots = tuple((item.partition, item.offset) for item in chosen_records(plan, selection))
        if spots:
            plan.target().merge(_merge(plan, spots))
        return len(spots)

    plans = _plans(pipeline, selection)
    return sum(retried(partial(plan_sink, pipeline, plan.sink, plan.table), drop, first=plan) for plan in plans)


def late_spots(plan: SinkPlan) -> tuple[Spot, ...]:
    """The records of replays that the sink has passed, and that are not in its quarantine."""
    state, count = plan.state, plan.progress.replays
    if not isinstance(state, RawState) or count is None or count == state.replays:
        return ()
    return tuple(
        (partition, offset)
        for partition, offsets in raw.replay_offsets(state, count).items()
        for offset in offsets.tolist()
        if offset < plan.progress.next.get(partition, 0)
    )


def note_late(plan: SinkPlan) -> SinkPlan:
    """Put the records of replays that the sink has passed into its quarantine, in one transaction; the plan with its progress.

    Raises CommitConflict if another run wrote first.
    """
    spots = late_spots(plan)
    if not spots or not isinstance(plan.state, RawState):
        return plan
    replays, removed = plan.state.replays, _removed_spots(plan, spots)
    records = tuple(BadRecord(*spot, "", REMOVED if spot in removed else LATE) for spot in spots)
    merge = _merge(plan)
    expected = {**merge.expected, REPLAYS: plan.progress.replays}
    plan.target().merge(replace(merge, expected=expected, upcoming={REPLAYS: replays}, bad=records))
    crash_point("sink:late")
    if removed:
        _log.warning(
            "sink %s, table %s: %s of a replay left the rows as they were, and lie in quarantine: retention removed the records"
            " around them, which may have later ones of the same keys. Change these rows in the source, or take an incremental"
            " snapshot, and drop the records. To list them: %s",
            *(plan.sink.name, plan.table.name, count_text(len(removed), "record")),
            plan.pipeline.command("quarantine list", "--sink", plan.sink.name),
        )
    progress = replace(plan.progress, replays=replays, bad=tuple(sorted((*plan.progress.bad, *records))))
    return replace(plan, progress=progress)


def _removed_spots(plan: SinkPlan, spots: Iterable[Spot]) -> set[Spot]:
    """The records of a table whose rows are upserted, below the offset that retention has reached. Nothing tells whether later
    records of their keys were written."""
    starts = plan.state.retention_start if isinstance(plan.state, RawState) and plan.sink.mode == "upsert" else {}
    return {(partition, offset) for partition, offset in spots if offset < starts.get(partition, 0)}


_tries: set[tuple[Place, BadRecord]] = set()
"""The late records that the target refused in this process."""


def late_records(plan: SinkPlan) -> list[BadRecord]:
    """The late records in a sink's quarantine. A process tries a refused one once."""
    return [item for item in plan.progress.bad if item.error == LATE and (plan.place, item) not in _tries]


def _write_late(plan: SinkPlan, session: Session) -> SinkPlan:
    """Write the late records in a sink's quarantine; the plan with the new progress. Raises CommitConflict.

    A record that a later record of its key has overtaken is given up. A record that the target refuses stays in quarantine.
    """
    records = late_records(plan)
    with search_settings(session()):
        reason_by_spot = _replay(plan, session, records)
    passed = [spot for spot, reason in reason_by_spot.items() if reason.startswith((OVERTAKEN, LEFT_OUT))]
    if passed:
        plan.target().merge(_merge(plan, tuple(passed)))
    subject = f"sink {plan.sink.name}, table {plan.table.name}"
    if count := sum(reason_by_spot[spot].startswith(OVERTAKEN) for spot in passed):
        _log.warning(
            "%s: %s of a replay came after later records of the same keys, and left the rows as they were. If a row lacks values"
            " of such a record, load the table again: %s",
            *(subject, count_text(count, "record"), reset_command(plan)),
        )
    refusals = {spot: reason for spot, reason in reason_by_spot.items() if spot not in passed}
    _tries.update((plan.place, item) for item in records if (item.partition, item.offset) in refusals)
    for (partition, offset), reason in list(refusals.items())[:1]:
        _log.warning(
            "%s: the target refused %s of a replay. The first is partition %s, offset %s: %s. Once that is corrected, run: %s",
            *(subject, count_text(len(refusals), "record"), partition, offset, reason.rstrip(".")),
            plan.pipeline.command("quarantine replay"),
        )
    cured = {(item.partition, item.offset) for item in records} - refusals.keys()
    bad_records = tuple(item for item in plan.progress.bad if (item.partition, item.offset) not in cured)
    return replace(plan, progress=replace(plan.progress, bad=bad_records))


def write_replays(batch: SinkBatch) -> SinkBatch:
    """Write the raw records of replays that the sink has passed; the batch with the new progress. Raises CommitConflict."""
    batch = replace(batch, plan=note_late(batch.plan))
    if not late_records(batch.plan):
        return batch
    _prepare(batch)
    return replace(batch, plan=_write_late(batch.plan, batch.session))


def wanted_from(pipeline: Pipeline, topic: str) -> dict[int, int]:
    """Partition → the first offset of a raw table that a sink may still want. A sink wants unwritten and refused records, and
    every record before its first batch. Retention keeps records of replays anyway. Raises TargetUnavailable."""
    limits: dict[int, int] | None = None
    snapshot = Snapshot(pipeline)
    for sink, table in pipeline.raw_sinks(topic):
        plan = plan_sink(pipeline, sink, table, snapshot=snapshot, check=False)
        next_offsets = dict(plan.progress.next)
        for partition, offset in [*((item.partition, item.offset) for item in plan.progress.bad), *late_spots(plan)]:
            if offset >= plan.starts.get(partition, 0):
                next_offsets[partition] = min(next_offsets.get(partition, offset), offset)
        limits = (
            next_offsets
            if limits is None
            else {p: min(limits[p], next_offsets[p]) for p in limits.keys() & next_offsets.keys()}
        )
    return limits or {}


def _plans(pipeline: Pipeline, selection: Selection) -> Iterator[SinkPlan]:
    return (plan_sink(pipeline, sink, table) for sink, table in chosen_tables(pipeline, selection))


def chosen_tables(pipeline: Pipeline, selection: Selection) -> Iterator[tuple[Sink, SinkTable]]:
    """The sinks and tables that may have selected records."""
    for sink in pipeline.sinks:
        if not selection.sinks or sink.name in selection.sinks:
            yield from (
                (sink, table) for table in sink.tables if not selection.topics or table.topic in selection.topics
            )


def chosen_records(plan: SinkPlan, selection: Selection) -> list[BadRecord]:
    """The selected records in the quarantine of a table, in order."""
    records = [
        record for record in plan.progress.bad if selection.takes(plan.table.topic, record.partition, record.offset)
    ]
    return sorted(records, key=lambda record: (record.partition, record.offset))


def _merge(plan: SinkPlan, cured: tuple[Spot, ...] = (), spec: TableSpec | None = None) -> Merge:
    """A transaction that moves no position. Another run that moved one in the meantime makes it a conflict. ``spec``: None if no
    load table is merged: the columns do not matter then."""
    spec = spec or TableSpec(plan.table.name, (), (), plan.sink.mode)
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
    # The later record may leave out fields that this one sets.
    overtaken_reason = f"{OVERTAKEN}. If the row lacks values of it, load the table again: {reset_command(plan)}"
    reasons = dict.fromkeys(overtaken_spots, overtaken_reason)
    reasons |= dict.fromkeys(_removed_spots(plan, set(spots) - overtaken_spots), REMOVED)
    # After new partitions, refused records of a key may be in several of them.
    frame = frame.coalesce(1).sortWithinPartitions(TIME, PARTITION, OFFSET)
    with plan.target().run(plan.place) as run:
        task = ReplayTask(plan.sink, table_layout, run, _merge(plan, spec=table_layout.spec), reasons)
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
    """The input of a replay's task. ``merge``: moves no position; ``reasons``: place → why the record stays, of those that are
    too late."""

    sink: Sink
    layout: Layout
    run: str
    merge: Merge
    reasons: Mapping[Spot, str]


def _replay_task(task: ReplayTask, batches: Iterator[pa.RecordBatch]) -> dict[Spot, str | None]:
    """Place → why the record stays; None: it was written."""
    writer = PartWriter(task)
    for batch in batches:
        for first in range(0, batch.num_rows, SEARCH_OFFSETS):
            writer.apply(batch.slice(first, SEARCH_OFFSETS))
    return writer.reasons


class PartWriter:
    """Applies refused records in order, in the largest parts that the target takes. A transaction writes a part, and takes it out
    of quarantine."""

    def __init__(self, task: ReplayTask) -> None:
        self.task = task
        self.target = open_target(task.sink)
        self.reasons: dict[Spot, str | None] = {}
        self.loads = 0

    def apply(self, rows: pa.RecordBatch) -> None:
        """Apply the records that are not too late."""
        spots, reasons = _spots(rows), self.task.reasons
        self.reasons |= {spot: reasons[spot] for spot in spots if spot in reasons}
        self._write(rows.filter(pa.array([spot not in reasons for spot in spots], pa.bool_())))

    def _write(self, rows: pa.RecordBatch) -> None:
        if not rows.num_rows:
            return
        layout, spots = self.task.layout, _spots(rows)
        keys = [*layout.key_names, TIME] if layout.spec.mode == "upsert" else []
        self.loads += 1
        try:
            merge = replace(self.task.merge, cured=spots)
            records = sorted_rows(rows, [*keys, PARTITION, OFFSET])
            self.target.apply(merge, f"{self.task.run}r{self.loads}", loaded(layout, [records]))
            self.reasons |= dict.fromkeys(spots)
        except TargetRefused as error:
            if len(spots) == 1:
                self.reasons[spots[0]] = str(error)
                return
            middle = len(spots) // 2
            self._write(rows.slice(0, middle))
            self._write(rows.slice(middle))


def _spots(rows: pa.RecordBatch) -> tuple[Spot, ...]:
    return tuple(zip(rows.column(PARTITION).to_pylist(), rows.column(OFFSET).to_pylist(), strict=True))


def evolving(batch: SinkBatch, work: Callable[[bool], T]) -> T:
    """The result of ``work(evolves)``, which may change the table only after a look for values that the change would lose."""
    try:
        return work(False)
    except TableUnfit as error:
        _refuse_lost_values(batch, error)
        return work(True)


def _prepare(batch: SinkBatch) -> None:
    """Change the table to fit: a refused record may have a column that the table lacks. Raises TableUnfit."""
    plan, target, spec = batch.plan, batch.plan.target(), batch.layout().spec
    with target.session():
        evolving(batch, lambda evolves: prepare_table(target, plan, spec, evolves=evolves))


def _refuse_lost_values(batch: SinkBatch, error: TableUnfit) -> None:
    """TableUnfit if the table lacks a column that written records have values for: another program dropped or renamed the
    column. A new column would be empty in the rows of these records. Values that can't be seen any more count by default."""
    plan = batch.plan
    if not error.missing:
        return
    table_layout = batch.layout()
    passed_ranges = [
        OffsetRange(partition, min(plan.starts.get(partition, 0), next_offset), next_offset)
        for partition, next_offset in sorted(plan.progress.next.items())
    ]
    refusals = [OffsetRange(item.partition, item.offset, item.offset + 1) for item in plan.progress.bad]
    ranges = tuple(subtract(passed_ranges, refusals))
    with search_settings(batch.spark):
        # The default of a field that came later is no value of a record.
        own_columns = tuple(replace(item, default=None) for item in table_layout.columns)
        frame = source_frame(batch.spark, plan, replace(table_layout, columns=own_columns), ranges, guarded=True)
        # A column that a function of the user adds is in no record.
        conditions = {item.column.name: _has_value(at, item) for at, item in enumerate(table_layout.columns)}
        missing = [name for name in error.missing if name in conditions]
        lost = [name for name in missing if frame.where(conditions[name]).limit(1).count()]
    if not lost:
        has_gaps = isinstance(plan.state, RawState) and plan.state.retention_start
        unseen = "retention removed some" if has_gaps else ""
        if len(missing) < len(error.missing):
            unseen = "a function of before: made them"
        if plan.sink.evolve == "own" and unseen:
            names = ", ".join(error.missing)
            raise TableUnfit(f"{error}\nRecords that are written may have values for {names}: {unseen}.") from None
        return
    values = f"records that are written already have values for {', '.join(lost)}"
    if plan.sink.evolve in ("none", "own"):
        raise TableUnfit(f"{error}\nLoad it from the start after this DDL too: {values}.") from None
    names = ", ".join(lost)
    raise TableUnfit(
        f"table {plan.table.name}: {names} is missing, and {values}. Put it back with its values, or load the table again:"
        f" {reset_command(plan)}"
    ) from None


def _has_value(number: int, item: SourceColumn) -> str:
    """Whether a record has a value for the column, as SQL over a source's frame. A new column would have its default in place of
    a null, too."""
    has_value = f"c{number} IS NOT NULL"
    if item.column.default is None or item.unset is None:
        return has_value
    return f"{has_value} OR NOT (u{number} OR coalesce({IS_DELETE}, true))"
