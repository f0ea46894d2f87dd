"""Ingest of an input with a ``shape``: every record is filtered and mapped before it reaches the lake.

A Spark task reads and decodes a range, Spark SQL shapes it, and the same task writes the shaped records. No decoded record
is stored on the way. The column types come from earlier batches (the table ``~decoded``, without rows) or from a first read
of the records. A task that finds a wider type stops, and the batch starts again with types that hold both.

The side table keeps the records that the shape excludes, as offset ranges. A record that the shape fails on goes into
quarantine with its bytes from Kafka. A further Spark job finds the failing records (``etl.failures``).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from zync_assets.codecs.spark_types import arrow_type, spark_schema
from zync_assets.errors import SchemaError, ZyncError
from zync_assets.ingest.files import (
    BatchFiles,
    RangeReading,
    batch_files,
    commit_types,
    reader_of,
    shaped_notes,
    shaped_schema,
    with_types,
)
from zync_assets.ingest.order import order_sql
from zync_assets.ingest.source import NewSchema, TopicSource, first_schemas, notes_of, read_chunks, with_schemas
from zync_assets.ingest.task import CONTROL, KEPT, TaskEnd, Types, Writer, decoded_schema, side_types
from zync_assets.lake.raw import ORDER
from zync_assets.lake.raw_files import ORDER_TYPE
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Input, Pipeline, RecordShape
from zync_assets.pipeline_file.conditions import without_root
from zync_assets.pipeline_file.expressions import SqlProblem, columns, parse
from zync_assets.pipeline_file.missing_fields import Expected, expected_fields
from zync_assets.pipeline_file.references import shape_in_lake_names
from zync_assets.spark.failures import (
    MOST,
    TEXT,
    cause_line,
    fails,
    is_of_data,
    is_overflow,
    overflow_records,
    short,
    spark_failures,
)
from zync_assets.spark.sql import edited, leaves, shape_sql
from zync_assets.spark.tasks import run_tasks, search_settings, task_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

T = TypeVar("T")

MOST_FAILURES = 10_000
"""The most records of one batch that a shape may fail on. More failures mean a bad shape instead of bad records."""
TEXTS = 8
"""The most failures of one search that quote Spark's error text. Each text takes a Spark job."""


def looks_at_time(item: Input) -> bool:
    """Whether an input's shape or order names the carried time of a record. A task knows it of one part of a partition."""
    shape = item.shape or RecordShape(None, {})
    shapes = (shape.where, item.order and item.order.by, *shape.sides.values())
    expressions = (sql for side in shapes for _, sql in leaves(side, ""))
    references = (column for sql in expressions for column in columns(parse(sql).tree))
    return any([name.lower() for name in column[:2]] in (["kafka"], ["kafka", "time"]) for column in references)


def shaped_frame(frame: DataFrame, item: Input) -> DataFrame:
    """Decoded records (columns of ``decoded_schema``) with KEPT, their orders, and the shaped sides of kept records. Lazy.

    SchemaError if Spark can't resolve an expression, or the condition is none.
    """
    void, condition, sides, order = _expressions(frame, item)
    whole = frame.selectExpr("*", *(f"NULL AS {side}" for side in void))
    records = whole.selectExpr("*", f"{CONTROL} IS NULL AND coalesce({condition}, false) AS {KEPT}")
    side_columns = [f"CASE WHEN {KEPT} THEN {sql} END AS {side}" for side, sql in sides.items()]
    orders = [] if order is None else [f"{order} AS `{ORDER}`"]
    return records.selectExpr(CONTROL, KEPT, "kafka", *side_columns, "key_schema_id", "value_schema_id", *orders)


def failing_frame(frame: DataFrame, item: Input) -> DataFrame:
    """Partition and offset of the decoded records that a shape fails on, and the rows with CONTROL, within
    ``tasks.search_settings``. Lazy."""
    void, condition, sides, order = _expressions(frame, item)
    whole = frame.selectExpr("*", *(f"NULL AS {side}" for side in void))
    side_failures = " OR ".join(fails(sql) for sql in sides.values())
    always = " OR ".join(fails(sql) for sql in (condition, order) if sql is not None)
    wrong = f"CASE WHEN {always} THEN true WHEN {condition} THEN {side_failures} ELSE false END"
    return whole.where(f"CASE WHEN {CONTROL} IS NOT NULL THEN true ELSE {wrong} END").selectExpr(
        CONTROL, "kafka.partition AS partition", "kafka.offset AS offset"
    )


def _expressions(frame: DataFrame, item: Input) -> tuple[list[str], str, dict[str, str], str | None]:
    """The sides that have no type yet, the condition, the new sides, and the order (None: records have no order)."""
    assert item.shape is not None
    void = [side for side in ("key", "value") if side not in frame.columns]
    place = f"input {item.topic}, shape"
    types = [pa.null() if side in void else arrow_type(frame.schema[side].dataType) for side in ("key", "value")]
    shape = _in_lake_names(place, item.shape, types)
    condition = "true" if shape.where is None else f"({_without(shape.where, void)})"
    kind = _kind(frame, condition, f"{place}.where", item.shape.where)
    if kind not in ("boolean", "void"):
        raise SchemaError(f"{place}.where: {item.shape.where} is {kind}; it must be a condition")
    whole = frame.selectExpr("*", *(f"NULL AS {side}" for side in void))
    sides: dict[str, str] = {}
    for side in ("key", "value"):
        sql = side
        if side in shape.sides and not (side == "value" and "value" in void):
            sql = shape_sql(edited(shape.sides[side], lambda sql: _without(sql, void)))
            _kind(whole, sql, f"{place}.{side}", sql)
        sides[side] = sql if side == "key" else f"CASE WHEN value IS NOT NULL THEN {sql} END"
    order = f"`{ORDER}`" if ORDER in frame.columns else None
    if item.order is not None and item.order.by is not None and item.order.path is None:
        place = f"input {item.topic}, order.by"
        by = f"({_without(_in_lake_names(place, RecordShape(item.order.by, {}), types).where or 'NULL', void)})"
        _kind(whole, by, place, item.order.by)
        kind = arrow_type(whole.selectExpr(f"{by} AS `it`").schema["it"].dataType)
        order = order_sql(by, kind, f"{place}: {item.order.by}")
    return void, condition, sides, order


def _in_lake_names(place: str, shape: RecordShape, types: Sequence[pa.DataType]) -> RecordShape:
    try:
        return shape_in_lake_names(shape, *types)
    except SqlProblem as problem:
        raise SchemaError(f"{place}: {problem}") from None


def write_with_shape(pipeline: Pipeline, reading: RangeReading) -> BatchFiles:
    """Read, decode, shape and write. The source has the types of ``files.decoded_types``.

    Raises SchemaError if the shape does not fit the records or its result the table, FieldMissing for a field that no record
    has had where the file says so, and the errors of reading.
    """
    item, strict = reading.item, pipeline.missing_field == "fail"
    expectation: Expected | None = None
    baseline: list[NewSchema] = []
    initial: list[NewSchema] = []
    has_types = reading.source.key_type is not None or reading.source.value_type is not None
    if not has_types:
        reading, baseline, initial = _with_first_types(reading)
    job = _Job(reading, {})
    while True:
        try:
            ends = job.run()
        except SchemaError:
            fields = _expectation(pipeline, job.reading.item, job.reading.source)
            if fields is not None and (not has_types or not strict or not fields.missing):
                expectation = fields
                if strict:
                    expectation.say()
                source = replace(job.reading.source, **expectation.types)
                job = replace(job, reading=replace(job.reading, item=expectation.item, source=source))
                continue
            if not has_types:
                raise
            # The shape may need a field that comes with this batch.
            has_types = False
            reading, baseline, initial = _with_first_types(reading)
            job = _Job(reading, {})
            continue
        except _FailsOnData as error:
            failures = _shape_failures(job)
            if not failures:
                raise SchemaError(f"input {item.topic}: its shape fails: {error} Nothing was committed.") from error
            job = replace(job, rejections={**job.rejections, **failures})
            continue
        source = job.reading.source
        wider = [end.read.wider for end in _in_order(reading.parts, ends) if end.read.wider is not None]
        new_schemas = [new_schema for end in ends for new_schema in end.read.new_schemas]
        if wider:
            # With the shape as the file has it: these records may have the missing fields.
            job, expectation = job.with_source(with_types(source, wider), item), None
        elif firsts := first_schemas(source, item, new_schemas):
            baseline += firsts
            job, expectation = job.with_source(with_schemas(source, firsts), item), None
        else:
            break
    if expectation is not None:
        expectation.say()
    schemas = initial or [*baseline, *new_schemas]
    type_columns = commit_types(reading.lake, item, source, notes_of(schemas))
    schema = job.schema()
    return batch_files(job.reading, ends, schema, schemas, shaped_notes(job.reading.item, source, type_columns, schema))


def _with_first_types(reading: RangeReading) -> tuple[RangeReading, list[NewSchema], list[NewSchema]]:
    """Decode the records once for their types. Returns three values.

    The reading with these types; the writer schemas that the batch takes as known; and, if there is no such schema, every
    writer schema of the records. The batch would not report the latter as changes, because the types hold them already.
    """
    types, new_schemas = _first_look(reading)
    firsts = first_schemas(reading.source, reading.item, new_schemas)
    source = with_schemas(reading.source, firsts)
    sides = {first.side for first in firsts}
    side_types = [(None if "key" in sides else key, None if "value" in sides else value) for key, value in types]
    return replace(reading, source=with_types(source, side_types)), firsts, [] if firsts else new_schemas


class _FailsOnData(Exception):
    """An expression failed on a record. The text is Spark's error."""


class _Overflows(_FailsOnData):
    """An expression overflowed Java's stack on a record."""


@dataclass(frozen=True)
class _Job:
    """One attempt at a batch, or at a part of it."""

    reading: RangeReading
    rejections: Mapping[tuple[int, int], str]

    def with_source(self, source: TopicSource, item: Input) -> _Job:
        return replace(self, reading=replace(self.reading, source=source, item=item))

    def run(self) -> list[TaskEnd]:
        """The ends of the tasks, in the order of the parts. Raises _FailsOnData, and what a task raised."""
        reading = self.reading
        schema, frame = self.schema(), self._frame(reading.side_uri)
        if reading.orders is not None or ORDER in frame.columns:
            schema = schema.append(pa.field(ORDER, ORDER_TYPE))
        writer = Writer(reading.uri, reading.side_uri, reading.file_prefix, schema, reading.orders)
        rows = self._collect(frame.mapInArrow(writer.run, "found binary"))
        ends: list[TaskEnd] = [pickle.loads(bytes(row["found"])) for row in rows]
        for end in ends:
            for error in (end.read.error, end.error):
                if error is not None:
                    raise error
        return ends

    def failed_places(self) -> list[tuple[int, int]]:
        """Partition and offset of the records that the shape fails on, in one Spark job that writes nothing.

        Returns at most MOST_FAILURES + 1 places, the lowest. A task that stops early reports only the places before its stop.
        """
        most = MOST_FAILURES + 1
        with search_settings(self.reading.spark):
            frame = failing_frame(_decoded_frame(self.reading, self.rejections, None), self.reading.item)
            rows = self._collect(frame.limit(most + len(self.reading.parts)))
        for row in rows:
            if row[CONTROL] is not None and (end := pickle.loads(bytes(row[CONTROL]))).error is not None:
                raise end.error
        return sorted((row["partition"], row["offset"]) for row in rows if row[CONTROL] is None)[:most]

    def fails(self, part: OffsetRange) -> str | None:
        """Spark's error for a failing expression in this part; None if no expression fails. Writes nothing."""
        part_job = replace(self, reading=replace(self.reading, parts=[part]))
        frame = part_job._frame(None)
        try:
            part_job._collect(frame.drop("kafka", "key_schema_id", "value_schema_id").mapInArrow(_ends, "found binary"))
        except _FailsOnData as error:
            return str(error)
        return None

    def overflows(self, part: OffsetRange) -> bool:
        """Whether an expression overflows Java's stack on a record of this part. Nothing is written."""
        try:
            replace(self, reading=replace(self.reading, parts=[part])).failed_places()
        except _Overflows:
            return True
        return False

    def schema(self) -> pa.Schema:
        """The raw table's columns, with what the shape makes."""
        empty = replace(self.reading, parts=[])
        frame = shaped_frame(_decoded_frame(empty, {}, None), self.reading.item)
        return shaped_schema(self.reading.item, self.reading.source, self.reading.table, frame)

    def _frame(self, side_uri: str | None) -> DataFrame:
        return shaped_frame(_decoded_frame(self.reading, self.rejections, side_uri), self.reading.item)

    def _collect(self, frame: DataFrame) -> list[Mapping[str, Any]]:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        with spark_failures(self._task_failure):
            try:
                return frame.collect()  # type: ignore[return-value]
            except (PySparkException, Py4JError) as error:
                if is_overflow(error):
                    raise _Overflows(TEXT) from error
                if is_of_data(error):
                    raise _FailsOnData(cause_line(error)) from error
                raise

    def _task_failure(self, text: str) -> ZyncError:
        return ZyncError(
            f"input {self.reading.item.topic}: a Spark task failed: {text}. Nothing was committed; run it again."
        )


def resolvable(
    pipeline: Pipeline, item: Input, source: TopicSource, frame: Callable[[TopicSource], DataFrame]
) -> tuple[Input, TopicSource]:
    """The input and the source of decoded records, with what the input's shape names and no record has had.

    SchemaError or FieldMissing if Spark can't resolve the shape.
    """
    try:
        shaped_frame(frame(source), item)
    except SchemaError:
        expectation = _expectation(pipeline, item, source)
        if expectation is None:
            raise
        expectation.say()
        return expectation.item, replace(source, **expectation.types)
    return item, source


def _shape_failures(job: _Job) -> dict[tuple[int, int], str]:
    """(partition, offset) of every record that the shape fails on, with Spark's error for the first TEXTS records.

    SchemaError if there are more than MOST_FAILURES; the error names the first record.
    """
    failures: dict[tuple[int, int], str] = {}
    try:
        places = job.failed_places()
    except _Overflows:
        return _overflow_failures(job)
    texts = TEXTS if len(places) <= MOST_FAILURES else 1
    for partition, offset in places:
        words = job.fails(OffsetRange(partition, offset, offset + 1)) if len(failures) < texts else None
        failures[partition, offset] = words or "an expression fails on this record."
    if len(failures) > MOST_FAILURES:
        (partition, offset), text = min(failures.items())
        raise SchemaError(
            f"input {job.reading.item.topic}: its shape fails on too many records, the first at partition {partition}, offset"
            f" {offset}: {text} Nothing was committed; correct the shape (try_cast gives NULL where cast fails)."
        )
    return failures


def _overflow_failures(job: _Job) -> dict[tuple[int, int], str]:
    """(partition, offset) of the records on which the shape overflows Java's stack, with the reason. SchemaError if there are
    more than MOST."""
    overflows: dict[tuple[int, int], str] = {}
    for part in job.reading.parts:
        for record_range in islice(overflow_records(part, job.overflows), MOST + 1):
            overflows[record_range.partition, record_range.first] = TEXT
        if len(overflows) > MOST:
            partition, offset = min(overflows)
            raise SchemaError(
                f"input {job.reading.item.topic}: its shape fails on too many records, the first at partition {partition},"
                f" offset {offset}: {TEXT} Nothing was committed; correct the shape."
            )
    return overflows


def _ends(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The pickled results of the reading ends, without the evaluated records."""
    for batch in batches:
        ends = batch.column(0).drop_null()
        if len(ends):
            yield pa.RecordBatch.from_arrays([ends], names=["found"])


def shaped_records(reading: RangeReading) -> DataFrame:
    """The records of some ranges, shaped, as a lazy frame with the columns of a raw table; their types are looked at first."""
    types, _ = _first_look(reading)
    decoded_frame = _decoded_frame(replace(reading, source=with_types(reading.source, types)), {}, None)
    frame = shaped_frame(decoded_frame, reading.item).filter(KEPT)
    sides = [side for side in ("key", "value") if frame.schema[side].dataType.simpleString() != "void"]
    return frame.select("kafka", *sides, "key_schema_id", "value_schema_id")


def _decoded_frame(reading: RangeReading, rejections: Mapping[tuple[int, int], str], side_uri: str | None) -> DataFrame:
    reader = reader_of(reading, rejections, side_uri)
    schema = spark_schema(decoded_schema(reading.source))
    return task_frame(reading.spark, len(reading.parts)).mapInArrow(reader.run, schema)


def _first_look(reading: RangeReading) -> tuple[list[Types], list[NewSchema]]:
    """The types of all records, and the new writer schemas, by decoding the records without a write."""
    source, parts, now = reading.source, reading.parts, reading.now

    def work(index: int) -> tuple[Types, list[NewSchema]]:
        types: Types = (None, None)
        new_schemas: list[NewSchema] = []
        for chunk in read_chunks(source, parts[index], now):
            types = side_types(chunk.records.schema)
            new_schemas += chunk.new_schemas
        return types, new_schemas

    results = run_tasks(reading.spark, len(parts), work)
    return [types for types, _ in _in_order(parts, results)], [
        new_schema for _, schemas in results for new_schema in schemas
    ]


def _in_order(parts: Sequence[OffsetRange], results: Sequence[T]) -> list[T]:
    """The results of the parts, sorted by partition and offset. The order of types must not depend on Spark's division of
    the work."""
    return [result for _, result in sorted(zip(parts, results, strict=True), key=lambda pair: pair[0])]


def _kind(frame: DataFrame, sql: str, place: str, label: str | None) -> str:
    from pyspark.errors import AnalysisException, ParseException

    try:
        return frame.selectExpr(f"{sql} AS `it`").schema["it"].dataType.simpleString()
    except (AnalysisException, ParseException) as error:
        raise SchemaError(f"{place}: {label}: {short(error)}") from error


def _without(sql: str, void: Sequence[str]) -> str:
    for side in void:
        sql = without_root(sql, side)
    return sql


def _expectation(pipeline: Pipeline, item: Input, source: TopicSource) -> Expected | None:
    """The fields that the shape of an input names and no record has had."""
    types = {"key": source.key_type, "value": source.value_type}
    return expected_fields(pipeline, item, types, {"key": source.key_schemas, "value": source.value_schemas})
