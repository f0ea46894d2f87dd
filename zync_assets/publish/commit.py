"""The commit half of publishing: verify the topic against staging, then send window by window.

The record at Kafka offset k is the record that staging numbers k. Kafka can't keep a second writer out: with transactions
it could, but then commit markers would take offsets. Publish therefore first compares all unverified records of the topic.
Kafka must then give each delivered record the offset from staging.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from zync_assets.audit.guard import refuse_unsound
from zync_assets.crashes import crash_point
from zync_assets.errors import CommitConflict, KafkaError, TopicMissing
from zync_assets.kafka.reader import read_range
from zync_assets.kafka.topics import (
    TopicState,
    create_topic,
    delete_topic,
    high_watermark,
    is_compacted,
    new_topic_config,
    topic_states,
)
from zync_assets.kafka.writer import InOrder
from zync_assets.lake import compaction
from zync_assets.lake.publication import PublishState, WrittenSchema, commit_publish_state, open_publish_state
from zync_assets.lake.snapshot import Snapshot
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Output, Pipeline
from zync_assets.publish.encoding import StagedTopic, alike_ids, encoded_rows, first_difference, staged_topic
from zync_assets.publish.plan import OutputBatch, PublishPlan, foreign_record, missing_topic
from zync_assets.spark.tasks import run_tasks

if TYPE_CHECKING:
    pass

T = TypeVar("T")

WINDOW_RECORDS = 250_000

WINDOW_BYTES = 64 << 20
"""The records and bytes of a window. A window is encoded in memory before publish announces it, so that no record exceeds
the topic's limit. A task holds two windows in memory: it encodes the next window while it sends a window."""

TASK_RECORDS = 8 * WINDOW_RECORDS
"""The records that one Spark task sends, window by window."""


@dataclass(frozen=True)
class PublishCommit:
    """The result of one publish: the sent range, and the number of verified records."""

    topic: str
    range: OffsetRange
    verified_records: int
    seconds: float

    @property
    def records(self) -> int:
        return self.range.end - self.range.first


@dataclass(frozen=True)
class Target:
    """The output partition that a publisher writes to, with all that its Spark tasks need."""

    outputs: StagedTopic = field(repr=False)
    topic_id: str
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

    def publish_state(self) -> PublishState:
        return open_publish_state(self.lake, self.pool, self.topic)

    def commit(
        self, before: PublishState, window: int, verified_end: int, schemas: Iterable[WrittenSchema] = ()
    ) -> PublishState:
        """Set the end of the announced window and the verified offset. CommitConflict if another publisher came first."""
        return commit_publish_state(
            self.lake,
            self.pool,
            before,
            window=window,
            verified_end=verified_end,
            topic_id=self.topic_id,
            schemas=schemas,
        )


def publish(
    pipeline: Pipeline, batch: OutputBatch, progress: Callable[[int, int], None] | None = None
) -> PublishCommit:
    """The commit half: the protocol of publish. ``progress(sent, total)`` is called after each Spark task.

    Raises CheckFailed before anything is sent if a blocking check of the staging pool or of its raw tables failed, or fails
    over what was staged since it passed last. Raises ForeignRecord if the topic holds what staging does not: nothing is
    sent after that is known. Raises CommitConflict if another publisher is at work.
    """
    start = time.monotonic()
    plan = batch.plan
    if plan.position is None or plan.state is None:
        return PublishCommit(batch.topic, OffsetRange(0, 0, 0), 0, 0.0)
    # 1. Stop at a failed check: published records can't be removed from a topic.
    refuse_unsound(plan.snapshot, batch.topic)
    # 2. Create a topic that never existed, and register the schemas of the staged rows.
    topic_state = plan.topic_state or _create(pipeline, plan.output)
    target = Target(
        staged_topic(plan.state, batch.topic, pipeline.registry),
        topic_state.topic_id,
        pipeline.kafka,
        pipeline.lake,
        plan.output.pool,
        plan.recreate,
        WINDOW_RECORDS,
        WINDOW_BYTES,
    )
    # 3. After an unclean stop, wait: a crashed producer's records can still surface.
    high = plan.high if plan.clean else _stable_high(pipeline, plan)
    # 4. Compare the records since the last verified offset with staging, and commit that they are verified. Retention and
    #    compaction may have removed records. The offsets of the removed records prove that the records existed.
    first = max(plan.verified_end, min(topic_state.partitions[0].low, high))
    publish_state, comparisons = plan.publish_state, 0
    if first < high:
        offset, comparisons = run_tasks(batch.spark, 1, partial(_verify, target, first, high))[0]
        if offset is not None:
            raise foreign_record(batch.topic, offset, plan.recreate)
    if first < high or not plan.clean:
        publish_state = target.commit(publish_state, high, high)
        crash_point("publish:verified")
    # 5. Send the rest window by window, several windows a Spark task. A task announces a window, then sends the window.
    for at in range(high, plan.end, TASK_RECORDS):
        until = min(plan.end, at + TASK_RECORDS)
        before = (publish_state.window, publish_state.verified_end)
        announcement = run_tasks(batch.spark, 1, partial(_send, target, at, until, before))[0]
        publish_state = target.publish_state()
        _check_rival(target.topic, publish_state, announcement)
        if progress is not None:
            progress(until - high, plan.end - high)
    # 6. Kafka gave every record its offset: commit that nothing is left to verify.
    if high < plan.end or publish_state.verified_end is None:
        publish_state = target.commit(publish_state, plan.end, plan.end)
        crash_point("publish:window-closed")
    compaction.tidy(publish_state.table)
    return PublishCommit(batch.topic, OffsetRange(0, high, plan.end), comparisons, time.monotonic() - start)


def recreate_topic(pipeline: Pipeline, topic: str) -> TopicState:
    """Delete an output topic and create it anew, so that all of staging is published again: the way back from a foreign
    record. The new one is as ``create:`` says. Nothing is deleted where that can't be done, nor where the checks of the
    staging pool, over all that would be published again, fail (CheckFailed)."""
    item, snapshot = pipeline.output(topic), Snapshot(pipeline)
    # 1. Refuse where staging does not have every record of the topic, or a check fails.
    state = snapshot.staging(item.pool)
    position = state.head.outputs.get((topic, 0)) if state else None
    if position is None:
        raise KafkaError(f"topic {topic}: nothing is staged for it, so there is nothing to publish again")
    if position.base:
        raise KafkaError(
            f"topic {topic} began at offset {position.base} (start-at: end); records before that are not in the lake and"
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
    topic_state = _create(pipeline, item)
    # 3. Commit that nothing is published to the new topic.
    before = open_publish_state(pipeline.lake, item.pool, topic)
    commit_publish_state(
        pipeline.lake, item.pool, before, window=0, verified_end=0, topic_id=topic_state.topic_id, replacement=True
    )
    return topic_state


def _create(pipeline: Pipeline, item: Output) -> TopicState:
    if item.create is None:
        raise missing_topic(item.topic)
    config, _ = new_topic_config(pipeline.kafka, item.create.config)
    topic_state = create_topic(
        pipeline.kafka, item.topic, item.create.partitions, item.create.replication_factor, config
    )
    crash_point("publish:topic-created")
    return topic_state


def _stable_high(pipeline: Pipeline, plan: PublishPlan) -> int:
    """Wait until the topic holds all that was announced, or its high watermark has stood still for longer than a lagging
    replica may take; the high watermark. Raises ForeignRecord if the topic holds more than staging."""
    window, last_move = plan.publish_state.window or 0, time.monotonic()
    high = plan.high
    while high < window and time.monotonic() - last_move < pipeline.settle_seconds:
        time.sleep(0.2)
        new_high = high_watermark(pipeline.kafka, plan.output.topic, 0)
        if new_high != high:
            high, last_move = new_high, time.monotonic()
    if high > plan.end:
        raise foreign_record(plan.output.topic, plan.end, plan.recreate)
    return high


def _verify(target: Target, first: int, high: int, _: int) -> tuple[int | None, int]:
    """The Spark task of step 4: the first offset at which topic and staging differ, and how many records are equal."""
    tolerates_gaps = is_compacted(target.kafka, target.topic)
    # Publish uses no transactions: a record in an open, committed or aborted transaction is foreign.
    theirs = read_range(target.kafka, target.topic, 0, first, high, uncommitted=True)
    schemas: set[WrittenSchema] = set()
    ours = encoded_rows(target.outputs, first, high, schemas)
    return first_difference(
        ours, theirs, tolerates_gaps=tolerates_gaps, alike=alike_ids(target.outputs, schemas, target.publish_state())
    )


Announcement = tuple[int | None, int | None]
"""The end of the announced window, and the verified offset."""


def _send(target: Target, first: int, end: int, before: Announcement, _: int) -> Announcement:
    """The Spark task of step 5: send the staged records ``first <= offset < end``; returns its last announcement.

    ``before``: the announcement before the task. Up to two windows may be announced and unverified, because the task encodes
    a window while it sends the window before. If the task announces nothing for longer than ``settle``, another publisher
    may start and announce a window. The records of that window are not foreign.
    """
    _refuse_second_attempt(target.topic)
    announcement, publish_state = before, target.publish_state()
    schemas: set[WrittenSchema] = set()
    old_schemas = set[WrittenSchema]()
    rows = encoded_rows(target.outputs, first, end, schemas)
    with (
        prefetch(windows(rows, target.window_records, target.window_bytes)) as encoded_windows,
        InOrder(target.kafka, target.topic, 0, first, target.recreate) as writer,
    ):
        for window in encoded_windows:
            _check_rival(target.topic, publish_state, announcement)
            # a. Measure every record: a record that can't be sent leaves no announcement.
            writer.check_sizes(window)
            # b. Announce the window, with the schemas of its rows.
            announcement = writer.sent + sum(len(batch) for batch in window), writer.verified
            new_schemas = schemas.copy() - old_schemas
            publish_state = target.commit(publish_state, *announcement, schemas=new_schemas)
            old_schemas |= new_schemas
            crash_point("publish:window-announced")
            # c. Send it. Nothing is sent after a record that Kafka did not accept.
            for batch in window:
                writer.write(batch)
    return announcement


def _check_rival(topic: str, publish_state: PublishState, announcement: Announcement) -> None:
    if (publish_state.window, publish_state.verified_end) != announcement:
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
    """``batches`` in lists of ``records`` records, fewer where they have ``size`` bytes before that, and at the end."""
    window: list[pa.RecordBatch] = []
    free_records, free_bytes = records, size
    for batch in batches:
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
    """``with ahead(items) as results``: the first item is made at once by a thread, each other one while the one before it is
    used, and none earlier."""
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, items, None)

        def results() -> Iterator[T]:
            upcoming = first
            while (item := upcoming.result()) is not None:
                upcoming = pool.submit(next, items, None)
                yield item

        yield results()
