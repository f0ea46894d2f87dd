"""The commit half of publishing: verify the topic against staging, then send window by window.

The record at Kafka offset k is the record that staging numbers k. Kafka can't keep a second writer out: with transactions
it could, but then commit markers would take offsets. Publish therefore first compares all unverified records of the topic.
Kafka must then give each delivered record the offset from staging.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import TypeVar

import pyarrow as pa

from zync_assets.audit.guard import refuse_unsound
from zync_assets.crashes import crash_point
from zync_assets.errors import CommitConflict, KafkaError, TopicMissing
from zync_assets.kafka.reader import read_range
from zync_assets.kafka.topics import (
    TopicState,
    create_topic,
    delete_topic,
    is_compacted,
    new_topic_config,
    topic_states,
)
from zync_assets.kafka.writers import Writers
from zync_assets.lake import compaction, storage, tables
from zync_assets.lake.head import OutputPosition
from zync_assets.lake.publication import (
    PublishState,
    WrittenSchema,
    commit_publish_states,
    open_published,
    publish_state,
)
from zync_assets.lake.snapshot import Snapshot
from zync_assets.offsets import OffsetRange, offset_count
from zync_assets.pipeline import Output, Pipeline
from zync_assets.publish.encoding import (
    StagedTopic,
    alike_ids,
    encoded_rows,
    first_difference,
    staged_topic,
)
from zync_assets.publish.plan import (
    OutputBatch,
    PublishPlan,
    difference,
    foreign_record,
    missing_topic,
    settling_highs,
)
from zync_assets.spark.tasks import run_tasks, slots

T = TypeVar("T")

WINDOW_RECORDS = 250_000

WINDOW_BYTES = 64 << 20
"""The records and bytes of a window, of all partitions together. A window is encoded in memory before publish announces it,
so that no record exceeds the topic's limit. A task holds two windows in memory: it encodes the next one while it sends one."""

TASK_RECORDS = 8 * WINDOW_RECORDS
"""The records that one Spark job sends, window by window."""

WRITERS = 16
"""The most partitions that a job writes to. Each partition has open files, and its encoded records wait in memory."""


@dataclass(frozen=True)
class PublishCommit:
    """The result of one publish: the sent range of each partition, and the number of verified records."""

    topic: str
    ranges: tuple[OffsetRange, ...]
    verified_records: int
    seconds: float

    @property
    def records(self) -> int:
        return offset_count(self.ranges)


PublishStates = Mapping[int, PublishState]
"""Partition → how far the partition is published."""

Announcement = tuple[int | None, int | None]
"""The end of the announced window, and the verified offset."""


@dataclass(frozen=True)
class OutputTopic:
    """The output topic that a publisher writes to, with all that its Spark tasks need. ``partitions``: those of the topic that
    have outputs."""

    outputs: StagedTopic = field(repr=False)
    topic_id: str
    partitions: tuple[int, ...]
    kafka: Mapping[str, str] = field(repr=False)
    lake: str = field(repr=False)
    pool: str
    recreate: str
    """The command that publishes all of staging again, for errors."""
    window_records: int
    window_bytes: int

    @property
    def topic(self) -> str:
        return self.outputs.topic

    def publish_states(self) -> PublishStates:
        opened = open_published(self.lake, self.pool)
        return {partition: publish_state(opened, self.topic, partition) for partition in self.partitions}

    def commit(
        self, before: PublishStates, marks: Mapping[int, tuple[int, int]], schemas: Collection[WrittenSchema] = ()
    ) -> PublishStates:
        """Set the ends of the announced windows and the verified offsets of some partitions. CommitConflict if another
        publisher of the partitions came first."""
        states = [before[partition] for partition in self.partitions]
        try:
            return commit_publish_states(self.lake, self.pool, states, marks, self.topic_id, schemas=schemas)
        except CommitConflict:
            # The task of other partitions may have announced the same schemas.
            now = self.publish_states()
            new_schemas = [schema for schema in schemas if not now[self.partitions[0]].has_schema(schema)]
            if _announcements(now) != _announcements(before) or len(new_schemas) == len(schemas):
                raise
            return self.commit(now, marks, new_schemas)


def publish(
    pipeline: Pipeline, batch: OutputBatch, progress: Callable[[int, int], None] | None = None
) -> PublishCommit:
    """The commit half: the protocol of publish. ``progress(sent, total)`` is called after each Spark task.

    Raises CheckFailed before anything is sent if a blocking check of the staging pool or of its raw tables failed, or fails
    over what was staged since it passed last. Raises ForeignRecord if the topic holds what staging does not. The task that finds
    it sends nothing more, and tasks of other partitions end first. Raises CommitConflict if another publisher is at work.
    """
    start = time.monotonic()
    plan = batch.plan
    if not plan.parts or plan.state is None:
        return PublishCommit(batch.topic, (), 0, 0.0)
    # 1. Stop at a failed check: published records can't be removed from a topic.
    refuse_unsound(plan.snapshot, batch.topic)
    # 2. Create a topic that never existed, and register the schemas of the staged rows.
    topic_state = plan.topic_state or _create(pipeline, plan.output, plan.parts[0].position)
    target = OutputTopic(
        staged_topic(plan.state, batch.topic, pipeline.registry),
        topic_state.topic_id,
        tuple(part.partition for part in plan.parts),
        pipeline.kafka,
        pipeline.lake,
        plan.output.pool,
        plan.recreate,
        WINDOW_RECORDS,
        WINDOW_BYTES,
    )
    # 3. After an unclean stop, wait: a crashed producer's records can still surface.
    highs = {part.partition: part.high for part in plan.parts} if plan.clean else _stable_highs(pipeline, plan)
    # 4. Compare the records since the last verified offsets with staging, and commit that they are verified. Retention and
    #    compaction may have removed announced records. The offsets of the removed records prove that the records existed.
    lows = {part.partition: part.low for part in topic_state.partitions}
    compared_parts: list[OffsetRange] = []
    for part in plan.parts:
        low, high = lows.get(part.partition, 0), highs[part.partition]
        if low > part.announced_end:
            raise difference(plan, part.partition, part.announced_end, was_cut=True)
        compared_parts.append(OffsetRange(part.partition, max(part.verified_end, min(low, high)), high))
    compared_parts = [part for part in compared_parts if not part.empty]
    announced_ends = {part.partition: part.announced_end for part in plan.parts}
    publish_states: PublishStates = {part.partition: part.publish_state for part in plan.parts}
    comparisons = 0
    if compared_parts:
        pairs = run_tasks(batch.spark, len(compared_parts), partial(_verify, target, compared_parts, announced_ends))
        for part, (offset, count) in zip(compared_parts, pairs, strict=True):
            if offset is not None:
                cut = is_compacted(target.kafka, batch.topic)
                raise difference(plan, part.partition, offset, was_cut=cut)
            comparisons += count
    # The first commit of a topic has every partition, so that a reader of the lake knows them all.
    new = len(plan.parts) > 1 and any(part.publish_state.verified_end is None for part in plan.parts)
    if compared_parts or not plan.clean or new:
        publish_states = target.commit(publish_states, {partition: (high, high) for partition, high in highs.items()})
        crash_point("publish:verified")
    # 5. Send the rest window by window. A Spark task announces a window of some partitions, and then sends the window. Spark runs
    #    the tasks of other partitions at the same time.
    ranges = [OffsetRange(part.partition, highs[part.partition], part.end) for part in plan.parts]
    total, sent_count = offset_count(ranges), 0
    for parts in task_parts(ranges, TASK_RECORDS):
        records = offset_count(parts)
        shares = shared(parts, min(-(-records // WINDOW_RECORDS), slots(batch.spark)))
        announcements = _announcements(publish_states)
        for task_announcements in run_tasks(batch.spark, len(shares), partial(_send, target, shares, announcements)):
            announcements |= task_announcements
        publish_states = target.publish_states()
        _check_rival(target.topic, publish_states, announcements)
        sent_count += records
        if progress is not None:
            progress(sent_count, total)
    # 6. Kafka gave every record its offset: commit that nothing is left to verify.
    marks = {
        part.partition: (part.end, part.end)
        for part in ranges
        if not part.empty or publish_states[part.partition].verified_end is None
    }
    if marks:
        publish_states = target.commit(publish_states, marks)
        crash_point("publish:window-closed")
    compaction.tidy(next(iter(publish_states.values())).table)
    return PublishCommit(batch.topic, tuple(ranges), comparisons, time.monotonic() - start)


def task_parts(ranges: Iterable[OffsetRange], records: int) -> Iterator[list[OffsetRange]]:
    """The ranges in lists for a Spark job each: WRITERS partitions and about ``records`` records at the most, in equal shares."""
    todo = [part for part in ranges if not part.empty]
    while todo:
        parts, later = todo[:WRITERS], todo[WRITERS:]
        share = max(1, records // len(parts))
        yield [replace(part, end=min(part.end, part.first + share)) for part in parts]
        more = [replace(part, first=part.first + share) for part in parts if part.first + share < part.end]
        todo = more + later


def shared(parts: Sequence[OffsetRange], count: int) -> list[list[OffsetRange]]:
    """The ranges of ``parts`` in ``count`` lists at the most, which have about as many records each."""
    shares: list[list[OffsetRange]] = [[] for _ in range(min(max(1, count), len(parts)))]
    for part in sorted(parts, key=lambda part: part.first - part.end):
        min(shares, key=offset_count).append(part)
    return shares


def recreate_topic(pipeline: Pipeline, topic: str) -> TopicState:
    """Delete an output topic and create it again, so that all of staging is published again: the way back from a foreign
    record. The new one is as ``create:`` says. Nothing is deleted where that can't be done, nor where the checks of the
    staging pool, over all that would be published again, fail (CheckFailed)."""
    item, snapshot = pipeline.output(topic), Snapshot(pipeline)
    # 1. Refuse where staging does not have every record of the topic, or a check fails.
    state = snapshot.staging(item.pool)
    positions = state.head.positions(topic) if state else {}
    if not positions:
        raise KafkaError(f"topic {topic}: nothing is staged for it, so there is nothing to publish again")
    base = max(position.base for position in positions.values())
    if base:
        raise KafkaError(
            f"topic {topic} began at offset {base} (start-at: end); records before that are not in the lake and"
            " would be lost. Publish to another topic instead."
        )
    if item.create is None:
        raise TopicMissing(
            f"topic {topic}: the pipeline file does not say how to create it anew, and nothing was deleted. Add create: to the"
            " output."
        )
    refuse_unsound(snapshot, topic, whole=True)
    # 2. Delete the topic, if it is there, and create it.
    if topic_states(pipeline.kafka, [topic]):
        delete_topic(pipeline.kafka, topic)
        crash_point("publish:topic-deleted")
    topic_state = _create(pipeline, item, positions[0], anew=True)
    # 3. Commit that nothing is published to the new topic.
    opened = tables.open_table(storage.publish_uri(pipeline.lake, item.pool))
    before = [publish_state(opened, topic, partition) for partition in positions]
    marks = dict.fromkeys(positions, (0, 0))
    commit_publish_states(pipeline.lake, item.pool, before, marks, topic_state.topic_id, replacement=True)
    return topic_state


def _create(pipeline: Pipeline, item: Output, position: OutputPosition, *, anew: bool = False) -> TopicState:
    """Make the topic, with the partitions that its outputs are numbered for. ``anew``: as in ``create_topic``."""
    if item.create is None:
        raise missing_topic(item.topic)
    config, _ = new_topic_config(pipeline.kafka, item.create.config)
    count = position.partitions or item.create.partitions
    topic_state = create_topic(pipeline.kafka, item.topic, count, item.create.replication_factor, config, anew=anew)
    crash_point("publish:topic-created")
    return topic_state


def _stable_highs(pipeline: Pipeline, plan: PublishPlan) -> dict[int, int]:
    """Wait until the topic holds all that was announced, or its high watermarks have stood still for longer than a lagging
    replica may take; the high watermarks. Raises ForeignRecord if the topic holds more than staging, and CommitConflict if
    another publisher sent the surplus."""
    windows = {part.partition: part.publish_state.window or 0 for part in plan.parts if not part.clean}
    highs = first_highs = {part.partition: part.high for part in plan.parts}
    for highs in settling_highs(pipeline, plan.output.topic, windows, first_highs):
        _check_surplus(pipeline, plan, highs)
    return highs


def _check_surplus(pipeline: Pipeline, plan: PublishPlan, highs: Mapping[int, int]) -> None:
    """Raise ForeignRecord if the topic holds more than staging held at the time of the plan. Raise CommitConflict if another
    publisher went on since: staging may hold more by now."""
    surplus = [part for part in plan.parts if highs[part.partition] > part.end]
    if not surplus:
        return
    opened = tables.open_table(storage.publish_uri(pipeline.lake, plan.output.pool))
    before = {part.partition: part.publish_state for part in plan.parts}
    now = {partition: publish_state(opened, plan.output.topic, partition) for partition in before}
    _check_rival(plan.output.topic, now, _announcements(before))
    raise foreign_record(plan.output.topic, surplus[0].partition, surplus[0].end, plan.recreate)


def _verify(
    target: OutputTopic, parts: Sequence[OffsetRange], announced_ends: Mapping[int, int], index: int
) -> tuple[int | None, int]:
    """A Spark task of step 4: the first offset at which topic and staging differ, and how many records are equal.

    Compaction may have removed records below the announced end. A gap past the announced end is a record of another program,
    such as the marker of a transaction.
    """
    part = parts[index]
    gaps_until = announced_ends[part.partition] if is_compacted(target.kafka, target.topic) else 0
    # Publish uses no transactions: a record in an open, committed or aborted transaction is foreign.
    topic_rows = read_range(target.kafka, target.topic, part.partition, part.first, part.end, uncommitted=True)
    schemas: set[WrittenSchema] = set()
    staged_rows = encoded_rows(target.outputs, part, schemas)
    alike = alike_ids(target.outputs, schemas, target.publish_states()[part.partition])
    return first_difference(staged_rows, topic_rows, gaps_until=gaps_until, alike=alike)


Announcements = Mapping[int, Announcement]
"""Partition → its announcement."""


def _announcements(states: PublishStates) -> dict[int, Announcement]:
    return {partition: (item.window, item.verified_end) for partition, item in states.items()}


def _send(
    target: OutputTopic, shares: Sequence[Sequence[OffsetRange]], before: Announcements, index: int
) -> Announcements:
    """A Spark task of step 5: send the staged records of a share; returns the last announcements of its partitions. All tasks
    together hold the records and bytes of two windows.

    ``before``: the announcements before the task. Up to two windows of a partition may be announced and unverified, because
    the task encodes windows while it sends the windows before. If the task announces nothing for longer than ``settle``,
    another publisher may start and announce a window. The records of that window are not foreign.
    """
    _refuse_second_attempt(target.topic)
    parts = shares[index]
    target = replace(
        target,
        partitions=tuple(part.partition for part in parts),
        window_records=target.window_records // len(shares),
        window_bytes=target.window_bytes // len(shares),
    )
    announcements = {partition: before[partition] for partition in target.partitions}
    publish_states = target.publish_states()
    schemas: set[WrittenSchema] = set()
    old_schemas = set[WrittenSchema]()
    with (
        prefetch(_windows_of_parts(target, parts, schemas)) as encoded_windows,
        Writers(target.kafka, target.topic, parts, target.recreate) as writers,
    ):
        for windows_by_part in encoded_windows:
            _check_rival(target.topic, publish_states, announcements)
            # a. Check every record: a record that can't be sent leaves no announcement.
            writers.check_records(windows_by_part)
            # b. Announce a window of each partition, with the schemas of its rows.
            marks = writers.marks(windows_by_part)
            announcements |= marks
            new_schemas = schemas.copy() - old_schemas
            publish_states = target.commit(publish_states, marks, schemas=new_schemas)
            old_schemas |= new_schemas
            crash_point("publish:window-announced")
            # c. Send them. Nothing is sent to a partition after a record that Kafka did not accept.
            writers.write(windows_by_part)
    return announcements


def _windows_of_parts(
    target: OutputTopic, parts: Sequence[OffsetRange], schemas: set[WrittenSchema]
) -> Iterator[dict[int, list[pa.RecordBatch]]]:
    """A window of each partition at a time; together they have the records and bytes of one window."""
    records, size = target.window_records // len(parts), target.window_bytes // len(parts)
    iterators = [windows(encoded_rows(target.outputs, part, schemas), max(1, records), max(1, size)) for part in parts]
    for next_windows in zip_longest(*iterators):
        yield {part.partition: window for part, window in zip(parts, next_windows, strict=True) if window is not None}


def _check_rival(topic: str, publish_states: PublishStates, announcements: Announcements) -> None:
    if _announcements(publish_states) != announcements:
        raise CommitConflict(f"topic {topic}: another publisher went on in place of this one; run again")


def _refuse_second_attempt(topic: str) -> None:
    """A task that Spark runs again would take what its first attempt sent for another program's."""
    from pyspark import TaskContext

    task = TaskContext.get()
    if task is not None and task.attemptNumber() > 0:
        raise KafkaError(
            f"topic {topic}: the Spark task that published was lost on its way. Run it again: what it sent is verified first."
        )


def windows(batches: Iterable[pa.RecordBatch], records: int, size: int) -> Iterator[list[pa.RecordBatch]]:
    """Groups ``batches`` into windows of at most ``records`` records. A window that reaches ``size`` bytes ends earlier.

    Only a batch that is larger than a window is divided: the rest of a divided batch would be encoded before the window is sent.
    """
    window: list[pa.RecordBatch] = []
    free_records, free_bytes = records, size
    for batch in batches:
        if window and len(batch) > free_records:
            yield window
            window, free_records, free_bytes = [], records, size
        at = 0
        while at < len(batch):
            piece = batch.slice(at, free_records)
            at += len(piece)
            window.append(piece)
            free_records, free_bytes = free_records - len(piece), free_bytes - piece.nbytes
            if free_records == 0 or free_bytes <= 0:
                yield window
                window, free_records, free_bytes = [], records, size
    if window:
        yield window


@contextmanager
def prefetch(items: Iterator[T]) -> Generator[Iterator[T]]:
    """``with prefetch(items) as results``: a thread computes the first item at once. It computes each later item while the
    caller uses the item before, and never earlier."""
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, items, None)

        def results() -> Iterator[T]:
            upcoming = first
            while (item := upcoming.result()) is not None:
                upcoming = pool.submit(next, items, None)
                yield item

        yield results()
