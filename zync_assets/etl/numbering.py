"""The queries of a batch: result rows in order, numbered, written as outputs, and counted.

A batch of one bucket has a query for each component of its rules (``components``), and a larger one a single query. The outputs
of a topic are in one query.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from zync_assets.etl import positions
from zync_assets.etl.account import Labels
from zync_assets.etl.batch import ResultFrame, ResultRows, Transform
from zync_assets.etl.encodability import suspect_sql
from zync_assets.etl.hold import NO_HOLD, Hold
from zync_assets.etl.output_files import BucketWriter, ResultQuery, Results
from zync_assets.etl.partitions import Partitions, counts_of, topic_partitions, with_partition_columns
from zync_assets.etl.positions import Bound, Numbered
from zync_assets.etl.rebuild import rebuild_bounds
from zync_assets.etl.result_checks import Positions
from zync_assets.etl.rules.kind import LACKING, TURN, OutputColumns
from zync_assets.etl.rules.results import output_columns
from zync_assets.etl.topic_outputs import TopicOutputs, row_sql, staged_topic
from zync_assets.kafka.topics import RecordLimits
from zync_assets.lake import raw, staging
from zync_assets.lake.head import Partitioning
from zync_assets.pipeline import Rule
from zync_assets.spark.sql import name_sql
from zync_assets.spark.tasks import BATCH_BYTES, MEASURED

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_ABOUT = ("kind", "rule", "source", "last", "waited", "hash")
_ORDER = ("ords", "joined", "exact")
"""Columns of the records of held outputs, which the driver of a large batch asks for when it needs them."""


class Numbering:
    """The numbering of one attempt at a batch. ``uri``: the URI of the staging table. ``folder``: the folder below it for the
    attempt's files. ``outputs``: the positions of the outputs before the batch."""

    def __init__(self, transform: Transform, uri: str, folder: str, outputs: Positions) -> None:
        self.transform, self.uri, self.folder, self.outputs = transform, uri, folder, outputs
        self.partitions: dict[str, Partitions] = {}
        """Output topic → how its outputs are shared among its partitions. Known from ``results`` on, as is ``kept``."""
        self.kept: dict[str, Partitioning] = {}
        """As in ``Head.partitionings``."""
        self._present: dict[str, set[str]] = defaultdict(set)
        """Output topic → the names of the columns with the keys, values and headers of its rules."""

    def columns(self, rule: Rule, target: OutputColumns) -> list[tuple[str, str]]:
        """The columns of a rule's outputs (``rules.kind.Columns``)."""
        # Notes the columns here, because ``frame.columns`` takes as long as the analysis of the whole batch.
        columns = output_columns(rule, target)
        self._present[rule.out].update(name for name, _ in columns)
        return columns

    def results(self, rows: ResultRows, hold: Hold) -> Results:
        """Run the queries. ``hold``: the decision that the rows follow."""
        transform = self.transform
        plan, pipeline, types = transform.plan, transform.pipeline, transform.types
        counts = counts_of(self.outputs)
        if plan.recomputed is not None:
            [frame] = rows.frames
            self._present |= {topic: {*frame.frame.columns} for topic in counts}
        # An output that the file has no more keeps its place in the account.
        staged_types = {
            topic: types[topic]
            for topic in counts
            if topic in types and self._present[topic].issuperset(types[topic].columns)
        }
        self.partitions, self.kept = topic_partitions(pipeline, plan.head, staged_types, transform.labels, counts)
        limits, parts = transform.limits, transform.ordering.parts
        bounds = transform.bounds if plan.recomputed is None else rebuild_bounds(transform, parts)
        queries = [self._query(at, frame, bounds, limits, hold) for at, frame in enumerate(rows.frames)]

        def records() -> DataFrame:
            # The rows of all queries.
            topics = [topic for query in queries for topic in query.writer.topics]
            row_columns = [*_ABOUT, *self._row(topics), *_ORDER]
            return positions.arranged(
                rows.frame, parts, bounds, row_columns, [], ties=["follows", *_turns(*rows.frames)]
            )

        small, measured = transform.small, _has_large_records(transform)
        return Results(transform.spark, queries, small=small, measured=measured, records=records)

    def _query(
        self, at: int, frame: ResultFrame, bounds: Sequence[Bound], limits: Mapping[str, RecordLimits], hold: Hold
    ) -> ResultQuery:
        """The query of some rows. ``at``: its number in the batch."""
        transform, labels = self.transform, self.transform.labels
        partitions = {topic: item for topic, item in self.partitions.items() if topic in frame.outputs}
        present = {name for topic in frame.outputs for name in self._present[topic]}
        topics = [
            staged_topic(
                transform.types[topic],
                f"{self.folder}/topic={topic}",
                [self.outputs[topic, partition].next for partition in range(item.count)],
                labels,
                limits.get(topic),
                item,
            )
            for topic, item in partitions.items()
        ]
        rows = with_partition_columns(frame.frame, transform.pipeline, partitions, labels, present)
        types = {topic: kind for topic, kind in transform.types.items() if topic in frame.outputs}
        suspect = suspect_sql(transform.pipeline, labels, types, present, limits)
        columns = row_sql(topics, labels, suspect, transform.pipeline.unavailable_value, lacking=LACKING in present)
        columns += frame.optional
        has_held, small = bool(transform.held), transform.small
        if has_held:
            columns += [*self._row(topics), *(_ORDER if small else ())]
        # A single bucket has no earlier buckets to count. Spark takes milliseconds to make each topic's column.
        numbered_topics = partitions if bounds else {}
        outs = [Numbered(labels.of_topic(name), item.count, item.column()) for name, item in numbered_topics.items()]
        ties: list[str | Column] = ["follows"] if has_held and hold is not NO_HOLD else []
        unused = [*([] if small else _ORDER), *([] if ties else ["follows"])] if has_held else ()
        ties += [*_turns(frame), *(["number"] if "number" in frame.optional else [])]
        parts = transform.ordering.parts
        arranged = positions.arranged(
            rows, parts, bounds, columns, outs, together=small, query=at, ties=ties, unused=unused
        )
        settles = small and hold is NO_HOLD
        return ResultQuery(arranged, BucketWriter(self.uri, topics, labels, held=transform.held, settles=settles))

    def _row(self, topics: Sequence[TopicOutputs]) -> list[str]:
        """The columns about source rows."""
        ends = _ends_sql(topics, self.transform.labels)
        return ["row", "other_row", "changes", "coalesce(deletes, false) AS deletes", f"{ends} AS ends"]


def _turns(*frames: ResultFrame) -> list[Column]:
    """The column that sorts the results of equal ``ord``, if some rows have it."""
    from pyspark.sql import functions as F

    return [F.asc_nulls_last(TURN)] if any(frame.in_turn for frame in frames) else []


def _ends_sql(topics: Sequence[TopicOutputs], labels: Labels) -> str:
    """Whether an output is a tombstone, or a record without a rule deletes its source row."""
    cases: list[str] = []
    for staged in topics:
        value = staging.value_column(staged.topic)
        null = f"{name_sql(value)} IS NULL" if value in staged.columns else "true"
        cases.append(f"WHEN rule IN ({labels.of_topic(staged.topic)}) THEN {null}")
    return f"CASE WHEN kind <> 'out' THEN coalesce(deletes, false) {' '.join(cases)} ELSE false END"


def _has_large_records(transform: Transform) -> bool:
    """Whether records may be large.

    Records may be large if the mean record size of a new or pending input's file is, or if the pipeline file limits the
    bytes of an Arrow batch.
    """
    plan = transform.plan
    topics = {topic for (_, topic), count in plan.head.waiting.items() if count}
    old_files = (raw.raw_files(state) for topic, state in plan.raw.items() if state is not None and topic in topics)
    files = [item for topic_files in (*transform.files.values(), *old_files) for item in topic_files]
    return BATCH_BYTES in transform.pipeline.spark or any(item.size > MEASURED * item.records for item in files)
