"""The commit half of publishing: verify the topic against staging, then send window by window.

The record at Kafka offset k is the record that staging numbers k. Kafka can't keep a second writer out (with
transactions it could, but then commit markers would take offsets). Publish therefore first compares all unverified
records of the topic. Kafka must then give each delivered record the offset from staging.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
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
from zync_assets.lake import compaction, staging, storage
from zync_assets.lake.publication import WrittenSchema, commit_published, open_published
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Output, Pipeline
from zync_assets.publish.encoding import alike_ids, encoded_rows, first_difference, staged_topic
from zync_assets.publish.plan import OutputBatch, PublishPlan, foreign_record
from zync_assets.spark.tasks import run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")


def windows(batches: Iterable[pa.RecordBatch], records: int, size: int) -> Iterator[list[pa.RecordBatch]]:
    """``batches`` in lists of ``records`` records, fewer where they have ``size`` bytes before that, and at the end."""
    window: list[pa.RecordBatch] = []
    left, room = records, size
    for batch in batches:
        at = 0
        while at < len(batch):
            piece = batch.slice(at, left)
            at += len(piece)
            window.append(piece)
            left, room = left - len(piece), room - piece.nbytes
            if left == 0 or room <= 0:
                yield window
                window, left, room = [], records, size
    if window:
        yield window


@contextmanager
def ahead(items: Iterator[T]) -> Generator[Iterator[T]]:
    """``with ahead(items) as same``: the first item is made at once by a thread, each other one while the one before it is
    used, and none earlier."""
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, items, None)

        def same() -> Iterator[T]:
            upcoming = first
            while (item := upcoming.result()) is not None:
                upcoming = pool.submit(next, items, None)
                yield item

        yield same()


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
    verified: int
    seconds: float

    @property
    def records(self) -> int:
        return self.range.end - self.range.first


def publish(
    pipeline: Pipeline, batch: OutputBatch, progress: Callable[[int, int], None] | None = None
) -> PublishCommit:
    """The commit half. ``progress(sent, total)`` is called after each window.

    Raises CheckFailed before anything is sent if a blocking check of the staging pool or of its raw tables failed, or fails
    over what was staged since it passed last. Raises ForeignRecord if the topic holds what staging does not: nothing is
    sent after that is known.
    """
    started = time.monotonic()
    plan = batch.plan
    if plan.position is None or plan.state is None:
        return PublishCommit(batch.topic, OffsetRange(0, 0, 0), 0, 0.0)
    refuse_unsound(pipeline, batch.topic)
    topic_state = plan.topic_state or _create(pipeline, plan.output)
    run = _Publisher(pipeline, batch.spark, plan, topic_state)
    high = run.settle() if not plan.clean else plan.high
    verified = run.verify(plan.verified, high)
    run.send(high, plan.end, progress)
    compaction.tidy(storage.published_uri(pipeline.lake, plan.output.pool))
    return PublishCommit(batch.topic, OffsetRange(0, high, plan.end), verified, time.monotonic() - started)


def recreate_topic(pipeline: Pipeline, topic: str) -> TopicState:
    """Delete an output topic and create it anew, so that all of staging is published again: the way back from a foreign
    record. The new one is as ``create:`` says. Nothing is deleted where that can't be done, nor where the checks of the
    staging pool, over all that would be published again, fail (CheckFailed)."""
    item = pipeline.output(topic)
    state = staging.open_staging(pipeline.lake, item.pool)
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
    refuse_unsound(pipeline, topic, whole=True)
    if topic_states(pipeline.kafka, [topic]):
        delete_topic(pipeline.kafka, topic)
        crash_point("publish:topic-deleted")
    made = _create(pipeline, item)
    done = open_published(pipeline.lake, item.pool, topic)
    commit_published(pipeline.lake, item.pool, done, window=0, verified=0, topic_id=made.topic_id, replaced=True)
    return made


def _create(pipeline: Pipeline, item: Output) -> TopicState:
    if item.create is None:
        raise TopicMissing(f"topic {item.topic} is not there. Create it, or add create: to the output.")
    how = item.create
    config, _ = new_topic_config(pipeline.kafka, how.config)
    made = create_topic(pipeline.kafka, item.topic, how.partitions, how.replication_factor, config)
    crash_point("publish:topic-created")
    return made


class _Publisher:
    """Publishes one output partition to Kafka. Keeps the published table's state from one commit to the next."""

    def __init__(self, pipeline: Pipeline, spark: SparkSession, plan: PublishPlan, topic_state: TopicState) -> None:
        assert plan.state is not None
        self.pipeline, self.spark, self.plan = pipeline, spark, plan
        self.topic, self.topic_id = plan.output.topic, topic_state.topic_id
        self.low = topic_state.partitions[0].low
        self.kafka = pipeline.kafka
        self.recreate = pipeline.command("to-kafka", "--recreate", self.topic)
        self.state = plan.published
        self.staged = staged_topic(plan.state, self.topic, pipeline.registry)

    def settle(self) -> int:
        """After an unclean stop: wait until all that was announced is there, or the high watermark has stood still for
        longer than a lagging replica may take. A crashed producer's records can still surface with replication."""
        announced, still = self.plan.published.window or 0, time.monotonic()
        high = self.plan.high
        while high < announced and time.monotonic() - still < self.pipeline.settle_seconds:
            time.sleep(0.2)
            now = high_watermark(self.kafka, self.topic, 0)
            if now != high:
                high, still = now, time.monotonic()
        if high > self.plan.end:
            raise foreign_record(self.topic, self.plan.end, self.recreate)
        return high

    def verify(self, first: int, high: int) -> int:
        """Compare the topic's records from the last verified offset on with staging; returns the number of compared records.

        Records that retention or compaction removed meanwhile can't be compared. Their offsets prove that they existed.
        """
        first = max(first, min(self.low, high))
        if first < high:
            staged, kafka, topic = self.staged, self.kafka, self.topic
            lake, pool = self.pipeline.lake, self.plan.output.pool
            compacted = is_compacted(kafka, topic)

            def compare(_: int) -> tuple[int | None, int]:
                # Publish uses no transactions: a record in an open, committed or aborted transaction is foreign.
                theirs = read_range(kafka, topic, 0, first, high, uncommitted=True)
                used: set[WrittenSchema] = set()
                ours = encoded_rows(staged, first, high, used)
                alike = alike_ids(staged, used, open_published(lake, pool, topic))
                return first_difference(ours, theirs, compacted=compacted, alike=alike)

            offset, equal = run_tasks(self.spark, 1, compare)[0]
            if offset is not None:
                raise foreign_record(self.topic, offset, self.recreate)
            self._commit(high, high)
            crash_point("publish:verified")
            return equal
        if not self.plan.clean:
            self._commit(high, high)
        return 0

    def send(self, first: int, end: int, progress: Callable[[int, int], None] | None) -> None:
        """Send it window by window, some windows a task; the last ones are verified by a commit of their own."""
        at = first
        while at < end:
            until = min(end, at + TASK_RECORDS)
            told = run_tasks(self.spark, 1, self._windows(at, until))[0]
            self.state = open_published(self.pipeline.lake, self.plan.output.pool, self.topic)
            if (self.state.window, self.state.verified) != told:
                raise _overtaken(self.topic)
            at = until
            if progress is not None:
                progress(at - first, end - first)
        if first < end or self.state.verified is None:
            self._commit(end, end)
            crash_point("publish:window-closed")

    def _windows(self, first: int, end: int) -> Callable[[int], tuple[int | None, int | None]]:
        """The task that announces and sends the windows from ``first`` up to ``end``. It returns its last announcement.

        The task encodes and measures a window before it announces the window, so that a record that can't be sent leaves no
        announcement. The task encodes a window while it sends the window before. Up to two windows may therefore be announced
        and unverified. If the task announces nothing for longer than ``settle``, another publisher may start and announce a
        window. The records of that window are not foreign."""
        staged, kafka, topic_id, recreate = self.staged, self.kafka, self.topic_id, self.recreate
        lake, pool = self.pipeline.lake, self.plan.output.pool
        known = (self.state.window, self.state.verified)
        records, size = WINDOW_RECORDS, WINDOW_BYTES

        def work(_: int) -> tuple[int | None, int | None]:
            _refuse_second_attempt(staged.topic)
            announced = known
            now = open_published(lake, pool, staged.topic)
            used: set[WrittenSchema] = set()
            noted = set[WrittenSchema]()
            rows = encoded_rows(staged, first, end, used)
            with (
                ahead(windows(rows, records, size)) as encoded,
                InOrder(kafka, staged.topic, 0, first, recreate) as writer,
            ):
                for window in encoded:
                    if (now.window, now.verified) != announced:
                        raise _overtaken(staged.topic)
                    writer.check_sizes(window)
                    announced = writer.sent + sum(len(batch) for batch in window), writer.verified
                    until, verified = announced
                    # The rows of the window are encoded; their schemas are known.
                    new = used.copy() - noted
                    now = commit_published(
                        lake, pool, now, window=until, verified=verified, topic_id=topic_id, schemas=new
                    )
                    noted |= new
                    crash_point("publish:window-announced")
                    for batch in window:
                        writer.write(batch)
            return announced

        return work

    def _commit(self, window: int, verified: int) -> None:
        pool = self.plan.output.pool
        self.state = commit_published(
            self.pipeline.lake, pool, self.state, window=window, verified=verified, topic_id=self.topic_id
        )


def _overtaken(topic: str) -> CommitConflict:
    return CommitConflict(f"topic {topic}: another publisher went on in place of this one; run again")


def _refuse_second_attempt(topic: str) -> None:
    """A task that Spark runs again would take what its first attempt sent for another program's."""
    from pyspark import TaskContext

    task = TaskContext.get()
    if task is not None and task.attemptNumber() > 0:
        raise KafkaError(
            f"topic {topic}: the Spark task that published was lost on its way. Run it again: what it sent is verified first."
        )
