"""A batch's result rows on their way: outputs become files of the staging table, and all rows are accounted for, in the Spark
tasks that hold a bucket each.
"""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.spark_types import arrow_frame, spark_schema
from zync_assets.errors import ZyncError
from zync_assets.etl import account, source_rows
from zync_assets.etl.account import ENTRIES, Count, Labels
from zync_assets.etl.encodability import encoding_errors, text_problems
from zync_assets.etl.failures import MOST_FAILURES
from zync_assets.etl.rules.output_schemas import FieldPath, null_masks
from zync_assets.etl.source_rows import NO_HELD_RULES, HeldRules, RowTimes, Settled
from zync_assets.etl.topic_outputs import OutputFile, TopicOutputs
from zync_assets.lake import staging
from zync_assets.lake.log import DataFile
from zync_assets.spark.failures import ignore_release_errors
from zync_assets.spark.frames import union
from zync_assets.spark.tasks import slots, tune_worker, unmeasured

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

_LOOKED_AT, _LOOKED_AT_BYTES = 20_000, 64 << 20
"""The numbers of rows and of bytes that a task handles together, because each step costs a millisecond."""

GROUP_BYTES = 64 << 20
"""Bytes of the row groups that a task gathers at one time."""


@dataclass(frozen=True)
class EncodingFailure:
    """An output that can't be encoded, the raw record that completed the output, the index of the rule, and the error."""

    topic: str
    place: int
    partition: int
    offset: int
    rule: int
    text: str


@dataclass(frozen=True)
class Written:
    """The results of one task: files, output counts, outputs that can't be encoded, and required fields that were null."""

    files: Sequence[DataFile]
    counts: Sequence[Count]
    encoding_failures: Sequence[EncodingFailure]
    nullable: frozenset[tuple[str, FieldPath]]
    times: RowTimes
    settled: bool


@dataclass(frozen=True)
class BucketWriter:
    """Writes the outputs of one Spark partition in order, and accounts for every row. The rows belong to one bucket."""

    uri: str
    topics: Sequence[TopicOutputs]
    labels: Labels
    group: int = 50_000
    """The most records of a row group. A row group also ends when the topics together reach GROUP_BYTES."""
    held: HeldRules = NO_HELD_RULES
    settles: bool = False
    """Whether the task decides on source rows, if it has all results together (``HeldRules.settled``)."""

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows of _RESULT: account entries first, then one row with the pickled results."""
        tune_worker()
        files: dict[tuple[int, int], OutputFile] = {}
        starts: list[int] | None = None
        counts: list[Count] = []
        encoding_failures: list[EncodingFailure] = []
        nullable: set[tuple[str, FieldPath]] = set()
        times: list[RowTimes] = []
        settlement: Settled | None = None
        try:
            for rows_before, batch, is_whole in _larger_batches(batches):
                starts = batch["starts"][0].as_py() if not rows_before else starts
                sources = account.Sources(batch)
                batch_times, records = self.held.report(sources, batch, rows_before)
                times.append(batch_times)
                topic_outputs = list(self._outputs(batch))
                for at, outputs in topic_outputs:
                    # More of them end the batch, and none is looked at further.
                    if len(encoding_failures) <= MOST_FAILURES:
                        encoding_failures += _encoding_failures(self.topics[at], outputs, self.labels)
                    nullable |= {(self.topics[at].topic, path) for path in _null_fields(self.topics[at], outputs)}
                is_decided = is_whole and self.settles and records is not None
                settlement = self.held.settled(batch, batch_times, records, self.labels) if is_decided else None
                if settlement is not None and settlement.changed:
                    sources, topic_outputs = account.Sources(settlement.rows), list(self._outputs(settlement.rows))
                counts += account.counts(sources)
                entries = account.entries(sources, self.labels)
                if len(entries) or records is not None:
                    yield _result(None, entries, records)
                for at, partition, outputs in self._by_partition(topic_outputs):
                    file = files[at, partition] = files.get((at, partition)) or self._new_file(at, partition, starts)
                    file.add(outputs)
                    if file.waiting >= self.group or file.size >= GROUP_BYTES // max(len(self.topics), len(files)):
                        file.write_group()
            closed_files, sums = [file.closed() for file in files.values()], account.summed(counts)
            null, is_settled = frozenset(nullable), settlement is not None
            outcome: object = Written(
                closed_files, sums, encoding_failures, null, source_rows.joined(times), is_settled
            )
        except ZyncError as error:
            outcome = error
        finally:
            for file in files.values():
                file.abandon()
        yield _result(outcome, None, None)

    def _new_file(self, at: int, partition: int, starts: Sequence[int] | None) -> OutputFile:
        """The file of a topic's outputs in a partition. ``starts``: see ``positions.arranged``."""
        staged = self.topics[at]
        path = f"{staged.folder}/part-{uuid.uuid4().hex}.parquet"
        first_number = sum(len(earlier_topic.next) for earlier_topic in self.topics[:at])
        first = staged.next[partition] + (0 if starts is None else starts[first_number + partition])
        return OutputFile(self.uri, path, staged, self.labels, first, partition)

    def _by_partition(
        self, topic_outputs: Iterable[tuple[int, pa.RecordBatch]]
    ) -> Iterator[tuple[int, int, pa.RecordBatch]]:
        """The outputs of each topic by partition, in order within each."""
        for at, outputs in topic_outputs:
            if len(self.topics[at].next) == 1:
                yield at, 0, outputs
                continue
            partitions = self.topics[at].partitions.of(outputs)
            for partition in np.unique(partitions).tolist():
                yield at, partition, outputs.take(pa.array(np.flatnonzero(partitions == partition)))

    def _outputs(self, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Each topic's outputs: the rows' columns, and then LEFT_OUT and the topic's own."""
        about = batch.select(["rule", "source", "last", "suspect"])
        for at, staged in enumerate(self.topics):
            sides = pa.RecordBatch.from_struct_array(batch[f"out{at}"].flatten())
            if not len(sides):
                continue
            outputs = about if len(sides) == len(batch) else about.filter(pc.is_valid(batch[f"out{at}"]))
            for name, column in zip(staged.columns_made, sides.columns, strict=True):
                outputs = outputs.append_column(name, column)
            yield at, outputs


def _larger_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch, bool]]:
    """The same rows in larger batches. With each batch come the number of rows before it, and whether it has all rows."""
    gathered_batches: list[pa.RecordBatch] = []
    rows_before = rows = size = 0
    for batch in batches:
        gathered_batches.append(batch)
        # ``nbytes`` reads the offsets of nested arrays, and an empty array from Spark within a list has no offsets.
        rows, size = rows + len(batch), size + batch.get_total_buffer_size()
        if rows >= _LOOKED_AT or size >= _LOOKED_AT_BYTES:
            yield rows_before, pa.concat_batches(gathered_batches), False
            gathered_batches, rows_before, rows, size = [], rows_before + rows, 0, 0
    if rows:
        yield rows_before, pa.concat_batches(gathered_batches), not rows_before


def _encoding_failures(staged: TopicOutputs, outputs: pa.RecordBatch, labels: Labels) -> Iterator[EncodingFailure]:
    errors = text_problems(outputs, staged.columns)
    is_suspect = outputs["suspect"].to_numpy(zero_copy_only=False).copy()
    is_suspect[list(errors)] = False
    if is_suspect.any():
        places = np.flatnonzero(is_suspect)
        rows = staged.rows(outputs.take(pa.array(places)), 0, labels)
        error_by_index = encoding_errors(staged.topic, staged.texts, staged.limits, rows)
        errors |= {int(places[index]): text for index, text in error_by_index.items()}
    for index, text in sorted(errors.items()):
        row = outputs.slice(index, 1).select(["source", "last", "rule"]).to_pylist()[0]
        yield EncodingFailure(staged.topic, **row["source"][row["last"]], rule=row["rule"], text=text)


def _null_fields(staged: TopicOutputs, outputs: pa.RecordBatch) -> list[FieldPath]:
    """The required fields that are null in some outputs. In the source, the struct around such a field is null."""
    name = staging.value_column(staged.topic)
    return list(null_masks(outputs[name], staged.required)) if staged.required and name in staged.columns else []


_RECORDS = "records binary"
_RESULT = f"found binary, entries binary, {_RECORDS}"
"""Rows of tasks: what a task found (``Written``, or the error that stopped it), or some rows of ``account.ENTRIES`` and the
records of held outputs (``HeldRules.records``)."""


def _result(outcome: object, entries: pa.RecordBatch | None, records: pa.RecordBatch | None) -> pa.RecordBatch:
    row = [None if value is None else pickle.dumps(value) for value in (outcome, entries, records)]
    return pa.RecordBatch.from_arrays(
        [pa.array([value], pa.binary()) for value in row], ["found", "entries", "records"]
    )


@dataclass(frozen=True)
class ResultQuery:
    """``rows``: result rows in buckets (``positions.arranged``), as ``row_sql`` has them; ``writer``: of their outputs."""

    rows: DataFrame
    writer: BucketWriter


class Results:
    """The results of a batch's rows. Call ``release`` at the end of the batch."""

    def __init__(
        self,
        spark: SparkSession,
        queries: Sequence[ResultQuery],
        *,
        small: bool,
        measured: bool = False,
        records: Callable[[], DataFrame] | None = None,
    ) -> None:
        """Runs the batch's queries. Raises the error of a failed task.

        ``queries``: no two of them share a topic. ``small``: the driver fetches the account at once. ``measured``: a thousand
        rows may be too large for the memory. ``records``: a function that returns the rows with the columns of
        ``HeldRules.records``, if the rows of the queries lack them.
        """
        from pyspark import StorageLevel

        self._spark = spark
        self._frames = [query.rows.mapInArrow(query.writer.run, _RESULT) for query in queries]
        self._is_cached = not small
        writer = queries[0].writer
        self._record_rows, self._record_task, self._cache = records, writer.held.record_task, StorageLevel.DISK_ONLY
        self._records: DataFrame | None = None
        if self._is_cached:
            # Which of the entries are needed, and where, is known when all is counted.
            self._frames = [frame.persist(StorageLevel.DISK_ONLY) for frame in self._frames]
        fetched_frames = (
            self._frames if small else [frame.where("found IS NOT NULL").select("found") for frame in self._frames]
        )
        try:
            with nullcontext() if measured else unmeasured(spark):
                fetched = _collect_rows(spark, fetched_frames)
            tasks = [_task_results(row["found"]) for row in fetched if row["found"] is not None]
        except BaseException:
            self.release()
            raise
        self.files = sorted((file for task in tasks for file in task.files), key=_place)
        """By topic and partition, in order of offsets."""
        counts = account.summed(count for task in tasks for count in task.counts)
        self.facts = [account.fact(count, writer.labels) for count in counts]
        self.encoding_failures = [item for task in tasks for item in task.encoding_failures]
        self.nullable = frozenset(item for task in tasks for item in task.nullable)
        self.times = source_rows.joined([task.times for task in tasks])
        """The source rows of the results."""
        self.settled = len(tasks) == len(queries) and all(task.settled for task in tasks)
        """Whether the results follow the decision on these source rows, as far as the batch alone tells."""
        self._fetched = fetched if small else None
        self._entries = _entry_table(fetched, "entries", ENTRIES) if small else None

    def few_entries(self) -> pa.Table:
        """The rows of ``account.ENTRIES``, fetched to the driver."""
        if self._entries is not None:
            return self._entries
        rows = _collect_rows(self._spark, self._frames)
        _raise_errors(row["found"] for row in rows)
        return _entry_table(rows, "entries", ENTRIES)

    def held_records(self, rows: source_rows.Rows, hashes: source_rows.Rows) -> pa.Table:
        """The rows of ``HeldRules.records`` about source rows and join hashes, fetched to the driver."""
        fetched = self._fetched or []
        if self._fetched is None and self._record_rows is not None:
            if self._records is None:
                # The driver asks again and again, for more rows.
                self._records = self._record_rows().mapInArrow(self._record_task, _RECORDS).persist(self._cache)
            fetched = self._records.mapInArrow(partial(source_rows.about_task, rows, hashes), _RECORDS).collect()
        return source_rows.records_about((row["records"] for row in fetched), rows, hashes)

    def entries(self) -> DataFrame:
        """Rows of ``account.ENTRIES``."""
        if self._entries is not None:
            # The entries of the query that ran. A second run of the query would write its files again.
            return arrow_frame(self._spark, self._entries)
        return union(frame.mapInArrow(_entry_rows, spark_schema(ENTRIES)) for frame in self._frames)

    def release(self) -> None:
        """Free Spark's cache."""
        for frame in (*(self._frames if self._is_cached else ()), *([] if self._records is None else [self._records])):
            with ignore_release_errors():
                frame.unpersist()


def _collect_rows(spark: SparkSession, frames: Sequence[DataFrame]) -> list[Row]:
    """The rows of all frames. Several queries run at the same time: one is planned while another one's task runs."""
    if len(frames) == 1:
        return frames[0].collect()
    with ThreadPoolExecutor(slots(spark)) as threads:
        return [row for rows in threads.map(lambda frame: frame.collect(), frames) for row in rows]


def _place(file: DataFile) -> tuple[str, int, int]:
    return file.group or "", file.partition or 0, file.first or 0


def _task_results(pickled: bytearray) -> Written:
    """The unpickled results of a task. Raises the error of a failed task."""
    outcome = pickle.loads(bytes(pickled))
    if isinstance(outcome, ZyncError):
        raise outcome
    return outcome


def _entry_table(rows: Iterable[Row], name: str, schema: pa.Schema | None = None) -> pa.Table:
    return pa.Table.from_batches([pickle.loads(bytes(row[name])) for row in rows if row[name] is not None], schema)


def _entry_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    tune_worker()
    for batch in batches:
        outcomes, entries, _ = (column.to_pylist() for column in batch.columns)
        _raise_errors(outcomes)
        yield from (pickle.loads(pickled) for pickled in entries if pickled is not None)


def _raise_errors(outcomes: Iterable[bytearray | None]) -> None:
    """Raise the error of a task that Spark recomputed for an evicted cache block. Such a task has too few entries."""
    for pickled in outcomes:
        if pickled is not None:
            _task_results(pickled)
