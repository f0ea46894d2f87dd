"""The plan and the read half of a sink: staged topic or raw table → the records that the target lacks.

plan_sink      how far the target is, and the offsets of the next batch (no JVM)
read_source    the lazy batch: the columns of the table, and marks (``sinks.columns``)

A batch whose columns are fields as they are needs no Spark SQL: a Spark task reads the Parquet files itself (``PlainSource``).
Spark's own reader makes rows of the columns, and columns of the rows again, which takes longer than the insert into a database.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.fields import has_lacking
from zync_assets.codecs.spark_types import arrow_type
from zync_assets.errors import DataLoss, SchemaError, SinkError
from zync_assets.lake.log import DataFile
from zync_assets.lake.parquet_rows import field_of, rows_within
from zync_assets.lake.raw import RawState, raw_files
from zync_assets.lake.raw_files import time_floors
from zync_assets.lake.sequence import time_batch
from zync_assets.lake.snapshot import Snapshot
from zync_assets.lake.staging import HEADERS_COLUMN, StagingState, key_column, later_fields, value_column
from zync_assets.offsets import OffsetRange, offset_count
from zync_assets.pipeline import Pipeline, Sink, SinkTable
from zync_assets.sinks.columns import (
    FAILED,
    IS_DELETE,
    NO_VALUE,
    OFFSET,
    PARTITION,
    TIME,
    Layout,
    SourceColumn,
    make_layout,
)
from zync_assets.sinks.target import Column, Place, Progress, TableSpec, Target, named, open_target
from zync_assets.spark import frames
from zync_assets.spark.failures import fails, spark_failures
from zync_assets.spark.session import Session, lazy_session
from zync_assets.spark.sql import name_sql, placeholder_texts, text_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType

REPLAYS = -3
"""The partition of a position that is the number of the raw table's replays. Targets have marks of their own at -1 and -2."""
BATCH_OFFSETS = 1_000_000
"""The most offsets of a batch. Tasks stream the records, so that the number bounds no memory but the size of load tables."""


@dataclass(frozen=True)
class SinkPlan:
    """The state of a target table compared with its source. ``starts``, ``ends``: partition → the lowest offset that the source
    holds, and the source's end."""

    pipeline: Pipeline = field(repr=False)
    sink: Sink
    table: SinkTable
    progress: Progress = field(repr=False)
    snapshot: Snapshot = field(repr=False)
    state: StagingState | RawState | None = field(repr=False)
    starts: Mapping[int, int]
    ends: Mapping[int, int]
    ranges: tuple[OffsetRange, ...]

    @property
    def place(self) -> Place:
        return place_of(self.pipeline, self.sink, self.table)

    @property
    def origin(self) -> str:
        """The id of the lake's table that the offsets belong to."""
        return "" if self.state is None else str(self.state.table.metadata.id)

    @property
    def nothing_to_do(self) -> bool:
        return not self.ranges

    @property
    def is_ahead(self) -> bool:
        """Whether the target was written up to an offset that the source lacks."""
        return any(offset > self.ends.get(partition, 0) for partition, offset in self.progress.next.items())

    @property
    def missing(self) -> tuple[OffsetRange, ...]:
        """The offsets that the target lacks, those of later batches too."""
        parts = ((p, self.progress.next.get(p, self.starts[p]), end) for p, end in sorted(self.ends.items()))
        return tuple(OffsetRange(p, first, end) for p, first, end in parts if first < end)

    @property
    def lag(self) -> int:
        """The number of offsets that the target lacks."""
        return offset_count(self.missing)

    @property
    def offsets(self) -> int:
        """The number of offsets of the batch."""
        return offset_count(self.ranges)

    @property
    def files(self) -> list[DataFile]:
        """The lake's files with records of the batch."""
        if isinstance(self.state, StagingState):
            return self.state.output_files(self.table.topic, self.ranges)
        return [] if self.state is None else list(raw_files(self.state, self.ranges))

    @property
    def expected(self) -> dict[int, int | None]:
        """Partition → the target's next offset before the batch, and its count of replays."""
        next_offsets = {item.partition: self.progress.next.get(item.partition) for item in self.ranges}
        return next_offsets | ({REPLAYS: self.progress.replays} if isinstance(self.state, RawState) else {})

    @property
    def upcoming(self) -> dict[int, int]:
        """Partition → the target's next offset after the batch. The batch has the records of all replays in its ranges."""
        ends = {item.partition: item.end for item in self.ranges}
        return ends | ({REPLAYS: self.state.replays} if isinstance(self.state, RawState) else {})

    def target(self) -> Target:
        return open_target(self.sink)


@dataclass(frozen=True)
class SinkBatch:
    """A lazy batch of records for a target table."""

    plan: SinkPlan
    session: Session = field(repr=False)

    @property
    def spark(self) -> SparkSession:
        return self.session()

    def layout(self) -> Layout:
        """The table's columns."""
        return layout(self.plan, self.session)

    def dataframe(self, table_layout: Layout) -> DataFrame:
        """The records as ``Layout.records`` takes them."""
        return source_frame(self.spark, self.plan, table_layout, self.plan.ranges)


class UnsentValue(SinkError):
    """A record of a plain source has a column elsewhere, or leaves it as it is, because it has Debezium's placeholder."""


@dataclass(frozen=True)
class PlainSource:
    """The records of a batch as a Spark task reads them from files. ``sides``: ``key`` and ``value`` → their columns, of those
    that the files have. ``has_deletes``: whether a record without a value deletes; ``keeps_deletes``: whether it is a record.
    ``placeholder``: the texts that say that a value was not sent."""

    uri: str
    files: tuple[DataFile, ...]
    ranges: tuple[OffsetRange, ...]
    sides: Mapping[str, str]
    has_deletes: bool
    keeps_deletes: bool
    placeholder: tuple[str, ...] = ()

    def batches(self, table_layout: Layout) -> Iterator[pa.RecordBatch]:
        """The records with the columns of a source's frame that ``Layout.appended`` needs. Raises UnsentValue."""
        paths = [self._place(item) for item in table_layout.columns]
        marks = {PARTITION: pa.int32(), OFFSET: pa.int64()}
        marks |= {TIME: pa.timestamp("us", "UTC")} if table_layout.spec.is_timed else {}
        places = [("kafka", name.removeprefix("zync_")) for name in marks]
        value = self.sides.get("value", "")
        # Without a field of the value, the whole value tells whether it is null.
        sides = [(value,)] if self.has_deletes and value and all(path[0] != value for path in paths) else []
        names = [*(f"c{number}" for number in range(len(paths))), *marks, IS_DELETE]
        column_types = [pa.int64() if item.units else item.column.type for item in table_layout.columns]
        kinds = [*column_types, *marks.values()]
        for batch in rows_within(self.uri, self.files, self.ranges, [*places, *paths, *sides]):
            arrays = [field_of(batch, path, kind) for path, kind in zip([*paths, *places], kinds, strict=True)]
            for item, values in zip(table_layout.columns, arrays, strict=False):
                if item.unset is not None and pc.any(pc.is_in(values, pa.array(self.placeholder))).as_py():
                    raise UnsentValue(f"column {item.column.name} has a value that was not sent")
                if item.has_other and values.null_count:
                    raise UnsentValue(f"column {item.column.name} has its value elsewhere in the record")
            is_delete = pa.array(np.full(batch.num_rows, self.has_deletes))
            if self.has_deletes and value in batch.schema.names:
                is_delete = batch.column(value).is_null()
            records = pa.RecordBatch.from_arrays([*arrays, is_delete], names=names)
            yield records if self.keeps_deletes else records.filter(pc.invert(is_delete))

    def _place(self, item: SourceColumn) -> tuple[str, ...]:
        assert item.path is not None
        side, *names = item.path
        return (self.sides.get(side, side), *names)


def plain_source(plan: SinkPlan, table_layout: Layout) -> PlainSource | None:
    """The source of a batch that a task reads without Spark SQL; None if SQL makes a column, or chooses records.

    Of a value that was not sent, a task knows the form as a text only.
    """
    sink, state, staged = plan.sink, plan.state, plan.table.staged
    is_plain = (
        sink.where is None
        and not (isinstance(state, RawState) and sink.mode == "upsert" and _has_lacking(state))
        and not sink.added
        and all(
            item.path is not None
            and not item.column.as_json
            and (item.unset is None or pa.types.is_string(item.column.type))
            for item in table_layout.columns
        )
    )
    if table_layout.spec.is_timed and isinstance(state, RawState):
        # Files of older versions lack times of the files before them.
        is_plain = is_plain and not time_floors(raw_files(state), state.retention_time)
    has_deletes = sink.mode == "upsert"
    if state is None or not is_plain or (has_deletes and (staged or table_layout.delete_sql != NO_VALUE)):
        return None
    present_sides = {side: name for side, name in side_names(plan).items() if name in state.schema.names}
    return PlainSource(
        state.table.uri,
        tuple(plan.files),
        plan.ranges,
        present_sides,
        has_deletes,
        keeps_deletes=sink.delete or not has_deletes,
        placeholder=placeholder_texts(plan.pipeline.unavailable_value or ""),
    )


def _has_lacking(state: RawState) -> bool:
    """Whether the schema of some writer lacks a field of the values."""
    return "value" in state.schema.names and has_lacking(state.schema.field("value").type)


def side_names(plan: SinkPlan) -> dict[str, str]:
    """``key`` and ``value`` → the columns of the source's table."""
    if plan.table.staged:
        return {"key": key_column(plan.table.topic), "value": value_column(plan.table.topic)}
    return {"key": "key", "value": "value"}


def place_of(pipeline: Pipeline, sink: Sink, table: SinkTable) -> Place:
    """The place of a sink's position."""
    return Place(pipeline.name, sink.name, table.source)


def progress_of(pipeline: Pipeline, sink: Sink, table: SinkTable) -> Progress:
    """How far the source of a target table was written. Raises TargetUnavailable."""
    progress = open_target(sink).progress(place_of(pipeline, sink, table))
    next_offsets = {partition: offset for partition, offset in progress.next.items() if partition != REPLAYS}
    return replace(progress, next=next_offsets, replays=progress.next.get(REPLAYS))


def writers(plan: SinkPlan) -> dict[Place, bool]:
    """The places of the pipeline file, and whether each writes the plan's table."""
    own_table = plan.sink.kind, plan.sink.url, plan.table.name
    pairs = [(sink, item) for sink in plan.pipeline.sinks for item in sink.tables]
    return {place_of(plan.pipeline, sink, item): (sink.kind, sink.url, item.name) == own_table for sink, item in pairs}


def plan_sink(
    pipeline: Pipeline,
    sink: Sink,
    table: SinkTable,
    limit: int = BATCH_OFFSETS,
    snapshot: Snapshot | None = None,
    *,
    check: bool = True,
) -> SinkPlan:
    """The next batch of a target table. ``limit``: the most offsets of the batch. ``check``: False for the state alone, without
    a batch. The position need not fit the lake then, and no raw file is read.

    Raises SinkError for the position of another table of the lake, DataLoss for lost raw records, and TargetUnavailable.
    """
    snapshot = snapshot or Snapshot(pipeline)
    # The target before its source: another run may be at work, and must not look ahead of the lake.
    progress = progress_of(pipeline, sink, table)
    if table.staged:
        state = snapshot.staging(table.pool)
        outputs = state.head.positions(table.topic) if state else {}
        starts, ends = {p: item.base for p, item in outputs.items()}, {p: item.next for p, item in outputs.items()}
    else:
        state = snapshot.raw(table.topic)
        # A target that keeps whole records also keeps the ids of their schemas. The ids also say which fields a record lacks.
        if state is not None and (open_target(sink).whole_records or _has_lacking(state)):
            state = replace(state, with_ids=True)
        starts, ends = ({}, {}) if state is None else ({**state.first, **state.retention_start}, dict(state.next))
    plan = SinkPlan(pipeline, sink, table, progress, snapshot, state, starts, ends, ())
    if not check:
        return plan
    _check_origin(plan)
    if plan.lag <= limit:
        return replace(plan, ranges=plan.missing)
    if isinstance(state, RawState) and sink.mode == "upsert" and len(plan.missing) > 1:
        # After new partitions, the records of a key may be in several of them. A later batch must not have an older record.
        return replace(plan, ranges=time_batch({"": state}, {"": plan.missing}, limit, limit)[""])
    ranges: list[OffsetRange] = []
    for number, part in enumerate(plan.missing):
        share = max(1, (limit - offset_count(ranges)) // (len(plan.missing) - number))
        ranges.append(replace(part, end=min(part.end, part.first + share)))
    return replace(plan, ranges=tuple(ranges))


def reset_command(plan: SinkPlan) -> str:
    """The command that loads the table again from the start."""
    return plan.pipeline.command("sink", "--sink", plan.sink.name, "--reset", plan.table.name)


def _check_origin(plan: SinkPlan) -> None:
    progress, table = plan.progress, plan.table
    if progress.origin is not None and (progress.origin != plan.origin or plan.is_ahead):
        raise SinkError(
            f"sink {plan.sink.name}, table {table.name}: its position is that of another table of the lake, or of a later"
            f" state of {table.source}. Mount the lake that it was written from; or load the table again:"
            f" {reset_command(plan)}"
        )
    for partition, next_offset in progress.next.items():
        start = plan.starts.get(partition, 0)
        if not table.staged and next_offset < start:
            raise DataLoss(
                f"sink {plan.sink.name}, table {table.name}: retention removed the records {next_offset} to {start - 1} of"
                f" {table.source}, partition {partition}, before they were written. Load what is left again:"
                f" {reset_command(plan)}"
            )


def read_source(spark: SparkSession | Session, plan: SinkPlan) -> SinkBatch:
    """The read half: a lazy batch of what the target lacks."""
    return SinkBatch(plan, lazy_session(spark))


def layout(plan: SinkPlan, session: Session) -> Layout:
    """The columns of a plan's table. Starts a session only for ``before: {set: ...}``."""
    sink, table, state, names = plan.sink, plan.table, plan.state, side_names(plan)
    schema = state.schema if state is not None else pa.schema([])
    comment = f"{plan.pipeline.name}: {table.source}"
    if plan.target().whole_records:
        sides = {"kafka": "kafka", **names}
        columns = {side: schema.field(name).type for side, name in sides.items() if name in schema.names}
        if isinstance(state, RawState) and state.with_ids:
            ids = [schema.field(name) for name in frames.SCHEMA_IDS]
            columns["kafka"] = pa.struct([*schema.field("kafka").type, *ids])
        return _whole_layout(sink, table, columns | _staged_columns(schema, staged=table.staged), comment)
    sides = {side: schema.field(name).type for side, name in names.items() if name in schema.names}
    schemas = (
        {name: text for name, (topic, text) in state.head.schemas.items() if topic == table.topic}
        if isinstance(state, StagingState)
        else {}
    )
    types: dict[str, pa.DataType] = {}
    if sink.added:
        with spark_failures(lambda text: SinkError(f"sink {sink.name}, before: set: {text}")):
            expressions = [f"{sql} AS {name_sql(name)}" for name, sql in sink.added.items()]
            frame = _records(session(), plan, plan.ranges).selectExpr(*expressions)
            kinds = {item.name: item.dataType for item in frame.schema}
        types = {name: _held_type(plan, name, kind) for name, kind in kinds.items()}
    target = plan.target()
    about = comment, schemas, plan.pipeline.unavailable_value, types, later_fields(schema, names["value"])
    table_layout = make_layout(sink, table, target, sides, *about)
    _check_names(plan, target, table_layout)
    # New partitions move keys, and then the offsets of a key's records may fall. A staged key stays in its partition.
    is_timed = target.has_versions and sink.mode == "upsert" and not table.staged and len(plan.ends) > 1
    return replace(table_layout, spec=replace(table_layout.spec, is_timed=is_timed))


def _whole_layout(sink: Sink, table: SinkTable, columns: Mapping[str, pa.DataType], comment: str) -> Layout:
    """The layout of records that are written as the source has them. ``columns``: of the source's frame."""
    source_columns = [
        SourceColumn(Column(name, kind, name), name) for name, kind in columns.items() if not pa.types.is_null(kind)
    ]
    spec = TableSpec(table.name, tuple(item.column for item in source_columns), (), "insert", comment)
    return Layout(spec, tuple(source_columns), "false", (sink.where,) if sink.where is not None else ())


def _held_type(plan: SinkPlan, name: str, kind: DataType) -> pa.DataType:
    """The Arrow type of a column of ``before: {set: ...}``. SinkError for a type that targets do not have."""
    try:
        return arrow_type(kind)
    except SchemaError:
        raise SinkError(
            f"sink {plan.sink.name}, table {plan.table.name}: column {name} is {kind.simpleString()}, which targets do not have."
            f" Make it a text with before: {{set: ...}}: {name}: CAST({plan.sink.added[name]} AS STRING)."
        ) from None


def _check_names(plan: SinkPlan, target: Target, table_layout: Layout) -> None:
    """SinkError for a name that the target does not take. PostgreSQL would cut a long one, and not find the column again."""
    source_names = {item.column.name for item in table_layout.columns}
    names = [(part, "table", "table:") for part in named(table_layout.spec) if part is not None]
    function = f"before: function {table_layout.function}"
    names += [
        (item.name, "column", "columns: {rename: ...}" if item.name in source_names else function)
        for item in table_layout.spec.columns
    ]
    for name, object_kind, key in names:
        subject = f"sink {plan.sink.name}, {plan.table.source}: the name {name} of the {object_kind}"
        if target.odd_names is not None and (odd := target.odd_names.search(name)):
            raise SinkError(
                f"{subject} has the character {odd[0]}, which the target does not take. Give a name with {key}."
            )
        if target.name_limit is None:
            continue
        limit, unit = target.name_limit
        if (length := len(name.encode() if unit == "bytes" else name)) > limit:
            raise SinkError(
                f"{subject} has {length} {unit}, and the target takes {limit} at the most. Give a shorter name with {key}."
            )


def _staged_columns(schema: pa.Schema, *, staged: bool) -> dict[str, pa.DataType]:
    """What an ``output_frame`` has beside the sides: headers, and the fields that a record leaves out."""
    names = (HEADERS_COLUMN, "left_out") if staged else ()
    return {name: schema.field(name).type for name in names if name in schema.names}


def source_frame(
    spark: SparkSession, plan: SinkPlan, table_layout: Layout, ranges: tuple[OffsetRange, ...], *, guarded: bool = False
) -> DataFrame:
    """The records of some ranges, as ``Layout.records`` takes them. ``guarded``: a record on which an expression of ``before:``
    fails has the expression in FAILED, and stops nothing. The session needs ``search_settings`` for it."""
    sink = plan.sink
    expressions = {f"before: set: {name}: {sql}": sql for name, sql in sink.added.items()}
    expressions |= {} if sink.where is None else {f"before: where: {sink.where}": sink.where}
    guarded = guarded and bool(expressions)
    with spark_failures(lambda text: SinkError(f"sink {sink.name}, {plan.table.source}: {text}")):
        frame = _records(spark, plan, ranges)
        if guarded:
            skips = {item.sql: item.unset for item in table_layout.columns}
            skips[sink.where or ""] = table_layout.update_sql
            cases = " ".join(
                f"WHEN NOT coalesce({skips.get(sql) or 'false'}, false) AND {fails(f'({sql})')} THEN {text_sql(name)}"
                for name, sql in expressions.items()
            )
            frame = frame.selectExpr("*", f"CASE {cases} END AS {FAILED}")
        for condition in table_layout.where:
            frame = frame.where(f"CASE WHEN {FAILED} IS NULL THEN {condition} ELSE true END" if guarded else condition)
        guarded_sql = frozenset(sink.added.values()) if guarded else None
        return frame.selectExpr(*table_layout.select(staged=plan.table.staged, guarded=guarded_sql))


def _records(spark: SparkSession, plan: SinkPlan, ranges: tuple[OffsetRange, ...]) -> DataFrame:
    if isinstance(plan.state, StagingState):
        return frames.output_frame(spark, plan.state, plan.table.topic, ranges)
    assert plan.state is not None
    return frames.record_frame(spark, plan.state, ranges)
