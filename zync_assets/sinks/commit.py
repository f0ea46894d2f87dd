"""The commit half of a sink: Spark tasks load a batch in parallel, and one short transaction merges it.

A target may append records without load tables (``Target.append``): then one task does all in one transaction.

The transaction has the data, the next offsets, and what the target refused. It first compares the offsets with the plan's.
A run that was overtaken by another run therefore changes nothing, and a killed run leaves load tables only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa

from zync_assets.audit.guard import refuse_blocks, refuse_disorder, refuse_unsound
from zync_assets.codecs.arrays import pc
from zync_assets.crashes import crash_point
from zync_assets.errors import BadRecords, SinkError, TableUnfit, TargetRefused
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Sink
from zync_assets.sinks.columns import FAILED, OFFSET, PARTITION, TIME, Layout
from zync_assets.sinks.fold import fold_all, sorted_rows
from zync_assets.sinks.plan import (
    REPLAYS,
    PlainSource,
    SinkBatch,
    SinkPlan,
    UnsentValue,
    plain_source,
    reset_command,
    source_frame,
    writers,
)
from zync_assets.sinks.target import BadRecord, LoadTable, Merge, Place, TableSpec, Target, gathered, open_target
from zync_assets.spark.failures import cause_line, is_of_data
from zync_assets.spark.tasks import (
    BATCH_BYTES,
    MEASURED,
    frame_results,
    planned_once,
    run_tasks,
    search_settings,
    slots,
    unmeasured,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

T = TypeVar("T")

WRITE_OUTCOME = "Nothing was written to the target."

TASK_ROWS = 50_000
"""Offsets for which a further Spark task is worth its start."""

PART_BYTES = 1 << 20
"""The records that a task changes into rows at one time. Spark's batches are smaller, and each costs some time."""

SEARCH_OFFSETS = 4_000
"""The most offsets in which one Spark task looks for refused records. It holds their records in memory."""

MOST_REFUSALS = 100
"""The number of refused records in a row that ends a batch, because the table itself must be wrong. Other sinks then get their
turn."""

TEXT_LENGTH = 2_000
"""The most characters of a refused record's key, and of the target's message, in the sink's quarantine."""


@dataclass(frozen=True)
class SinkCommit:
    """The result of one batch. ``records``: rows that were loaded, after the fold; ``quarantined``: refused records; ``left``:
    the offsets that the source had beyond the batch when the batch was planned."""

    sink: str
    table: str
    source: str
    ranges: tuple[OffsetRange, ...]
    records: int
    quarantined: int
    seconds: float
    left: int = 0


def commit_sink(batch: SinkBatch, *, evolves: bool = True) -> SinkCommit:
    """Write one batch, exactly once. ``evolves``: whether a table with records may be changed.

    Raises CommitConflict if another run wrote first, TableUnfit, TargetUnavailable, and BadRecords by ``on-bad-record``.
    Raises TargetRefused if the target refused a record and the batch is too large to search. The next batch is smaller then.
    """
    start, plan = time.monotonic(), batch.plan
    target, layout = plan.target(), batch.layout()
    # 1. Stop at a failed check, as publishing and ETL do. Then create the table, or change it.
    _refuse_failures(plan)
    with target.session():
        prepare_table(target, plan, layout.spec, evolves=evolves)
        crash_point("sink:prepared")
        source = plain_source(plan, layout)
        appends = target.appends(layout.spec, whole=layout.is_whole or source is not None)
    bad: Sequence[BadRecord] = ()
    count: int | None = None
    try:
        if appends:
            # 2. If the target can append: one task appends the records and moves the positions, in one transaction.
            with suppress(UnsentValue):
                count = _append(batch, layout, source)
        if count is None:
            with target.run(plan.place) as run:
                # 3. If it did not append: tasks load the folded records. No key is in two load tables.
                loads = _load(batch, layout, run, target.tasks)
                # 4. One transaction merges the load tables and moves the positions.
                target.merge(replace(_merge_of(plan, layout), loads=tuple(loads)))
                count = sum(load.rows for load in loads)
    except TargetRefused as error:
        if plan.offsets > SEARCH_OFFSETS:
            raise
        # 5. The target refused a record. One task applies smaller and smaller parts until it finds the record, and notes it.
        reason = error.reason if isinstance(error, ExpressionFailure) else ""
        with target.run(plan.place) as run:
            count, bad = _search(batch, layout, run, reason)
    lag, seconds = plan.lag - plan.offsets, time.monotonic() - start
    return SinkCommit(plan.sink.name, plan.table.name, plan.table.source, plan.ranges, count, len(bad), seconds, lag)


def prepare_table(target: Target, plan: SinkPlan, spec: TableSpec, *, evolves: bool) -> None:
    """Create the table, or change it to fit. SinkError if the table lacks the records before the position, or has records after
    it."""
    is_begun = plan.progress.origin is not None
    try:
        evolve = plan.sink.evolve if evolves or not is_begun else "none"
        target.prepare(spec, create=plan.sink.create and not is_begun, evolve=evolve)
    except TableUnfit as error:
        if not is_begun:
            raise
        if not target.has_table(spec):
            raise _lost_table(plan) from None
        remedy = f"If you make the table anew, load it from the start: {reset_command(plan)}"
        raise TableUnfit(f"{error}\n{remedy}", error.missing) from None
    if is_begun or spec.mode == "upsert":
        return
    if places := target.past_places(plan.place, spec, plan.origin, writers(plan)):
        if not places[0].sink:
            raise SinkError(
                f"sink {plan.sink.name}, table {spec.name}: the table has records of {plan.table.topic}, and the target has no"
                " position of them. The target's table zync_positions was lost, or another program wrote the records. Records"
                f" would be in the table twice. Put zync_positions back; or load the table again: {reset_command(plan)}"
            )
        name = (
            places[0].sink if places[0].pipeline == plan.place.pipeline else f"{places[0].sink} of {places[0].pipeline}"
        )
        raise SinkError(
            f"sink {plan.sink.name}, table {spec.name}: the table has rows, and a sink that the pipeline file does not have"
            f" ({name}) has written {plan.table.source} to this target. Records would be in the table twice. Give the sink, and"
            f" the pipeline, the old name; or load the table again: {reset_command(plan)}"
        )


def check_table(plan: SinkPlan) -> None:
    """TableUnfit if records were written, and their table is not there."""
    spec = TableSpec(plan.table.name, (), (), plan.sink.mode)
    if plan.progress.origin is not None and not plan.target().has_table(spec):
        raise _lost_table(plan)


def _lost_table(plan: SinkPlan) -> TableUnfit:
    """The error for a missing table: a new one would lack the records that the position has passed."""
    return TableUnfit(
        f"table {plan.table.name} is not there, and sink {plan.sink.name} has written {plan.table.source} to its table before."
        f" Move that table here, or load this one from the start: {reset_command(plan)}"
    )


def _refuse_failures(plan: SinkPlan) -> None:
    """CheckFailed while a blocking check of the source has failed."""
    topic = plan.table.topic
    if plan.table.staged:
        refuse_unsound(plan.snapshot, topic, outcome=WRITE_OUTCOME)
        return
    refuse_blocks(plan.snapshot, str(plan.place), [topic], WRITE_OUTCOME)
    refuse_disorder(plan.snapshot, str(plan.place), {topic: plan.ranges}, WRITE_OUTCOME)


def _append(batch: SinkBatch, layout: Layout, source: PlainSource | None) -> int:
    """Append the records of a batch in one Spark task, which ends in the commit."""
    merge = _merge_of(batch.plan, layout)
    work = partial(_append_task, batch.plan.sink, layout, merge)
    if source is not None:
        return sum(run_tasks(batch.spark, 1, lambda _: work(source.batches(layout))))
    with _plan_settings(batch):
        counts = in_tasks(batch.dataframe(layout).coalesce(1), work)
    if not counts:
        batch.plan.target().merge(merge)
    return sum(counts)


def _append_task(sink: Sink, layout: Layout, merge: Merge, batches: Iterator[pa.RecordBatch]) -> int:
    """The Spark task of ``_append``. If Spark runs it again after the commit, it finds that the positions have moved."""
    return open_target(sink).append(merge, loaded(layout, batches, whole=True))


def _load(batch: SinkBatch, layout: Layout, run: str, max_tasks: int) -> list[LoadTable]:
    """Load the records of a batch in Spark tasks."""
    plan = batch.plan
    frame = batch.dataframe(layout)
    count = max(1, min(max_tasks, plan.offsets // TASK_ROWS))
    count = min(count, slots(batch.spark)) if count > 1 else 1
    # Rows are appended by the tasks that read them: a shuffle costs more than tasks of equal size save.
    is_spread = layout.spec.mode == "upsert" and count > 1
    frame = frame.repartition(count, *layout.key_names) if is_spread else frame.coalesce(count)
    if layout.spec.mode == "upsert":
        # The carried time never decreases within a partition. After new partitions, a key may be in several of them.
        frame = frame.sortWithinPartitions(*layout.key_names, TIME, PARTITION, OFFSET)
    elif plan.target().whole_records:
        frame = frame.sortWithinPartitions(PARTITION, OFFSET)
    with _plan_settings(batch):
        results = in_tasks(frame, partial(_load_task, plan.sink, layout, run))
    return [load for load in results if load is not None and load.rows]


def _plan_settings(batch: SinkBatch) -> AbstractContextManager[None]:
    """A small batch is planned once: to plan it again takes longer than its records. Of a large one, no row is measured."""
    if batch.plan.offsets < TASK_ROWS:
        return planned_once(batch.spark)
    files = batch.plan.files
    is_measured = BATCH_BYTES in batch.plan.pipeline.spark or any(item.size > MEASURED * item.records for item in files)
    return nullcontext() if is_measured else unmeasured(batch.spark)


def _load_task(sink: Sink, layout: Layout, run: str, batches: Iterator[pa.RecordBatch]) -> LoadTable | None:
    """The Spark task of step 3."""
    from pyspark import TaskContext

    task = TaskContext.get()
    # A task that Spark runs again must not append to what its first attempt wrote.
    name = f"{run}{task.partitionId()}_{task.attemptNumber()}" if task is not None else f"{run}0_0"
    first_batch = next(batches, None)
    if first_batch is None:
        return None
    return open_target(sink).load(layout.spec, name, loaded(layout, chain([first_batch], batches)))


def loaded(layout: Layout, batches: Iterable[pa.RecordBatch], *, whole: bool = False) -> Iterator[pa.RecordBatch]:
    """The rows of a load table. ``whole``: one for each record, without a fold."""
    parts = map(_checked_batch, gathered(iter(batches), PART_BYTES))
    if whole or layout.spec.mode == "insert":
        return (layout.appended(part) for part in parts)
    other_names = [column.name for column in layout.spec.others]
    return fold_all((layout.records(part) for part in parts), layout.spec.key, other_names)


def _checked_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch. TargetRefused if an expression of ``before:`` fails on a record."""
    failures = pc.unique(batch.column(FAILED).drop_null()).to_pylist() if FAILED in batch.schema.names else []
    if failures:
        raise TargetRefused(f"{failures[0]} fails")
    return batch


def in_tasks(frame: DataFrame, work: Callable[[Iterator[pa.RecordBatch]], T]) -> list[T]:
    """``work(batches)`` for each partition of a frame, in Spark tasks. Raises the errors of tasks as they were, and TargetRefused
    if an expression of ``before:`` fails on a record."""

    def failure(text: str) -> SinkError:
        return SinkError(f"a Spark task of a sink failed: {text.rstrip('.')}. Run it again.")

    try:
        # A refused record is looked for only if nothing else is wrong.
        return frame_results(frame, work, failure, last=TargetRefused)
    except SinkError as error:
        if not isinstance(error.__cause__, Exception) or not is_of_data(error.__cause__):
            raise
        reason = cause_line(error.__cause__).rstrip(".")
        refusal = ExpressionFailure(f"an expression of before: fails: {reason}. Correct it in the pipeline file.")
        refusal.reason = reason
        raise refusal from error


class ExpressionFailure(TargetRefused):
    """An expression of ``before:`` fails on a record."""

    reason = ""
    """Spark's words."""


def _search(batch: SinkBatch, layout: Layout, run: str, reason: str) -> tuple[int, Sequence[BadRecord]]:
    """Apply a small batch part by part in one Spark task: the number of loaded rows, and the refused records. ``reason``: of an
    expression that fails in the batch."""
    plan = batch.plan
    task = SearchTask(plan.sink, layout, f"{run}s", _merge_of(plan, layout), len(plan.progress.bad), reason)
    with search_settings(batch.spark):
        frame = source_frame(batch.spark, plan, layout, plan.ranges, guarded=True)
        times = [TIME] if layout.spec.mode == "upsert" else []
        frame = frame.coalesce(1).sortWithinPartitions(*times, PARTITION, OFFSET)
        return in_tasks(frame, partial(_search_task, task))[0]


def _merge_of(plan: SinkPlan, layout: Layout) -> Merge:
    return Merge(plan.place, layout.spec, plan.origin, plan.expected, plan.upcoming)


def kept_text(text: str) -> str:
    """A text as any target takes it into its quarantine: not too long, and without the character NUL.

    >>> kept_text("id=a\\0b")
    'id=a\\\\0b'
    """
    plain = text.replace("\0", "\\0")
    return plain if len(plain) <= TEXT_LENGTH else f"{plain[:TEXT_LENGTH]}…"


@dataclass(frozen=True)
class SearchTask:
    """The arguments of the task of step 5. ``merge``: the merge of the whole batch, without load tables. ``bad_count``: the
    number of records in the sink's quarantine. ``reason``: why an expression fails in the batch."""

    sink: Sink
    layout: Layout
    run: str
    merge: Merge
    bad_count: int
    reason: str

    @property
    def place(self) -> Place:
        return self.merge.place


def _search_task(task: SearchTask, batches: Iterator[pa.RecordBatch]) -> tuple[int, Sequence[BadRecord]]:
    """The Spark task of step 5. Every part is a transaction of its own that moves the positions. A kill at any moment therefore
    loses nothing."""
    table = pa.Table.from_batches(list(batches)).combine_chunks()
    rows = table.to_batches()[0] if table.num_rows else pa.RecordBatch.from_pylist([], schema=table.schema)
    search = Search(task, rows)
    search.apply(0, rows.num_rows)
    search.finish()
    return search.count, search.bad


class Search:
    """Applies the records of a small batch in order, in the largest parts that the target takes."""

    def __init__(self, task: SearchTask, rows: pa.RecordBatch) -> None:
        self.task = task
        self.rows = rows
        self.target = open_target(task.sink)
        self.position = dict(task.merge.expected)
        self.bad: list[BadRecord] = []
        self.count = 0
        self.loads = 0
        self.refusals = 0
        """Refused records since the last record that was applied."""
        has_one_failure = FAILED in rows.schema.names and rows.num_rows - rows.column(FAILED).null_count == 1
        self.reason = task.reason if has_one_failure else ""
        """Why an expression fails on the only record on which one fails."""

    def apply(self, first: int, end: int) -> None:
        """Apply the records ``first <= index < end``."""
        if first == end:
            return
        try:
            self._write(first, end)
        except TargetRefused as error:
            if end - first == 1:
                self._put_aside(first, str(error))
                return
            middle = (first + end) // 2
            self.apply(first, middle)
            self.apply(middle, end)

    def finish(self) -> None:
        """Move the positions to the end of the batch, past offsets without a record."""
        if not self.task.merge.upcoming.items() <= self.position.items():
            self._merge(self.task.merge.upcoming, ())

    def _write(self, first: int, end: int) -> None:
        records = self.rows.slice(first, end - first)
        layout = self.task.layout
        if layout.spec.mode == "upsert":
            records = sorted_rows(records, [*layout.key_names, TIME, PARTITION, OFFSET])
        self.loads += 1
        positions, merge = self._merge_to(self._positions_at(end))
        self.count += self.target.apply(merge, f"{self.task.run}{self.loads}", loaded(layout, [records]))
        self.position |= positions
        self.refusals = 0

    def _put_aside(self, index: int, error: str) -> None:
        row = self.rows.slice(index, 1)
        place = row.column(PARTITION)[0].as_py(), row.column(OFFSET)[0].as_py()
        sink, layout = self.task.sink, self.task.layout
        if self.reason and row.column(FAILED).null_count == 0:
            error = f"{error}: {self.reason}"
        is_ours = error.startswith("before: ")
        refusal = error if is_ours else f"the target refused the record: {error}"
        source = f"table {layout.spec.name}, {self.task.place.source}, partition {place[0]}, offset {place[1]}"
        message = f"sink {sink.name}, {source}: {refusal}"
        culprit = "the expression, as with try_cast," if is_ours else "the table"
        if sink.on_bad_record == "fail":
            raise BadRecords(f"{message}. Correct {culprit} and run again; or set on-bad-record: quarantine.")
        if sink.max_bad_records is not None and self.task.bad_count + len(self.bad) >= sink.max_bad_records:
            raise BadRecords(
                f"{message}. Already {sink.max_bad_records} records of the source are in quarantine, as many as max-bad-records"
                f" allows. Correct {culprit} or raise the limit, and run again."
            )
        numbers = [number for number, item in enumerate(layout.columns) if item.column.name in layout.spec.key]
        key = ", ".join(f"{layout.columns[at].column.name}={row.column(at)[0].as_py()}" for at in numbers)
        bad_record = BadRecord(*place, kept_text(key), kept_text(error))
        self._merge(self._positions_at(index + 1), (bad_record,))
        self.bad.append(bad_record)
        self.refusals += 1
        if self.refusals >= MOST_REFUSALS:
            raise BadRecords(
                f"{message}. {self.refusals} records one after the other were refused, and are in quarantine. Correct {culprit},"
                " run again, and replay the quarantine."
            )

    def _positions_at(self, end: int) -> dict[int, int]:
        """Partition → next offset when the records before index ``end`` are applied. Any part counts the replays."""
        partitions = self.rows.column(PARTITION).to_numpy()
        offsets = self.rows.column(OFFSET).to_numpy()
        positions: dict[int, int] = {}
        for partition, end_offset in self.task.merge.upcoming.items():
            indexes = np.flatnonzero(partitions == partition)
            applied_indexes = indexes[indexes < end]
            if len(applied_indexes) == len(indexes):
                if end == len(partitions) or len(indexes) or partition == REPLAYS:
                    positions[partition] = end_offset
            elif len(applied_indexes):
                positions[partition] = int(offsets[applied_indexes[-1]]) + 1
        return positions

    def _merge(self, positions: Mapping[int, int], bad_records: tuple[BadRecord, ...]) -> None:
        new_positions, merge = self._merge_to(positions)
        self.target.merge(replace(merge, bad=bad_records))
        self.position |= new_positions

    def _merge_to(self, positions: Mapping[int, int]) -> tuple[dict[int, int], Merge]:
        """The new positions (partition → next offset) of a batch, and the merge that commits the positions."""
        new_ends = {partition: end for partition, end in positions.items() if self.position.get(partition) != end}
        expected = {partition: self.position.get(partition) for partition in {*new_ends, *self.position}}
        return new_ends, replace(self.task.merge, expected=expected, upcoming=new_ends)
