"""Spark reads the files that the Delta log lists, as Parquet, with the table's schema. No jar beyond PySpark's is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.codecs.spark_types import rows_frame, spark_schema
from zync_assets.errors import EtlError
from zync_assets.lake import storage, stores
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw import ORDER, RawState, raw_files
from zync_assets.lake.raw_files import LOWEST, ORDER_TYPE, time_floors
from zync_assets.lake.staging import ACCOUNT_TYPE, HEADERS_COLUMN, StagingState, key_column, value_column
from zync_assets.lake.storage import by_own_types
from zync_assets.offsets import OffsetRange
from zync_assets.spark.sql import long_sql, name_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.types import StructType

SPAN = 4096
"""Offsets of one partition that are looked up together when records are sought by their places."""
SCHEMA_IDS = ("key_schema_id", "value_schema_id")
"""The raw table's columns with the registry ids of the writers' schemas."""
MANY_RANGES = 32
"""A query with more ranges than this joins with them. Fewer ranges stand in its condition."""

_PLACES = pa.schema([("at_partition", pa.int32()), ("low", pa.int64()), ("high", pa.int64())])
_SPANS = 50_000
"""The most spans of equal length into which the offsets of files with a carried time are cut."""
_SPAN_TIMES = pa.schema([("at", pa.int32()), ("low", pa.int64()), ("high", pa.int64()), ("reached", pa.int64())])


def schema_condition(ids: Iterable[int]) -> str:
    """The condition for records whose value has one of the writers' schemas, as SQL. ``ids``: registry ids."""
    return f"kafka.{SCHEMA_IDS[1]} IN ({', '.join(map(str, ids))})"


def parquet_frame(
    spark: SparkSession,
    uri: str,
    files: Sequence[DataFile],
    schema: pa.Schema,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """A lazy frame over some files of a table; columns that a file lacks are null, those that it has narrower are widened.
    ``options``: Parquet's, for reading."""
    from pyspark.errors import AnalysisException

    kind = spark_schema(schema)
    if not files:
        return spark.createDataFrame([], kind)
    frames: list[DataFrame] = []
    for file_schema, paths in by_own_types(uri, [item.path for item in files], schema):
        places = [storage.spark_pattern(storage.join(uri, path)) for path in paths]
        try:
            frame = (
                spark.read.options(**(options or {}), **storage.spark_options(uri))
                .schema(spark_schema(file_schema))
                .parquet(*places)
            )
        except AnalysisException as error:
            raise stores.missing_file(str(error)) or error from None
        frames.append(frame if file_schema.equals(schema) else _cast(frame, kind))
    return union(frames)


def union(frames: Iterable[DataFrame]) -> DataFrame:
    """The rows of one or more frames with the same columns."""
    return reduce(lambda first, second: first.unionByName(second), frames)


def _cast(frame: DataFrame, kind: StructType) -> DataFrame:
    from pyspark.sql import functions as F

    return frame.select(*(F.col(f"`{item.name}`").cast(item.dataType).alias(item.name) for item in kind))


def record_frame(spark: SparkSession, state: RawState, ranges: Iterable[OffsetRange]) -> DataFrame:
    """The raw records in some offset ranges: ``kafka``, ``key``, ``value``, and ``time``, which is ``kafka.time``. A side
    that has no type yet is void. With ``state.with_order``, also the source order: ``order_high`` and ``order_low``."""
    parts = list(ranges)
    files = raw_files(state, parts)
    return in_ranges(_file_records(spark, state, files), files, parts)


def record_types(state: RawState) -> StructType:
    """The types of ``kafka``, ``key`` and ``value`` in a ``record_frame``."""
    from pyspark.sql.types import NullType, StructField, StructType

    fields_by_name = {item.name: item for item in spark_schema(state.schema)}
    if state.with_ids:
        kafka = fields_by_name["kafka"].dataType
        assert isinstance(kafka, StructType)
        fields_by_name["kafka"] = StructField(
            "kafka", StructType([*kafka, *(fields_by_name[name] for name in SCHEMA_IDS)])
        )
    return StructType([fields_by_name.get(name, StructField(name, NullType())) for name in ("kafka", "key", "value")])


def records_at(
    spark: SparkSession, state: RawState, places: DataFrame, within: Sequence[OffsetRange], *, few: bool = False
) -> DataFrame:
    """The raw records at some places (columns ``partition`` and ``first``, the offset), reading only files that hold one.

    ``within``: the spans of the places (see ``spans``); ``few``: every task gets all places. The columns are those of
    ``record_frame``.
    """
    frame = _file_records(spark, state, raw_files(state, within))
    from pyspark.sql import functions as F

    targets = places.selectExpr("partition AS at_partition", "first AS at_offset")
    condition = F.expr("kafka.partition = at_partition AND kafka.offset = at_offset")
    return frame.join(F.broadcast(targets) if few else targets, condition, "left_semi")


def spans(places: DataFrame, *columns: str) -> list[tuple[Row, OffsetRange]]:
    """The ranges of SPAN offsets that contain places (columns ``partition`` and ``first``). Few rows for any number of places.

    ``columns``: columns of ``places`` to keep in the rows.
    """
    rows = places.selectExpr(*columns, "partition", f"first DIV {SPAN} AS span").distinct().collect()
    return [(row, OffsetRange(row["partition"], row["span"] * SPAN, (row["span"] + 1) * SPAN)) for row in rows]


def ledger_frame(spark: SparkSession, state: StagingState) -> DataFrame:
    """The ledger's entries, with the fields of the account column."""
    schema = pa.schema([("account", ACCOUNT_TYPE)])
    return parquet_frame(spark, state.table.uri, state.ledger_files, schema).select("account.*")


def raw_frame(spark: SparkSession, state: RawState, files: Sequence[DataFile]) -> DataFrame:
    """The records of some files of a raw table, with its columns. ``kafka.time`` never runs back within a partition. A side
    that has no type yet, since all of it was null, is a column of nulls."""
    schema = _columns(state)
    frame = _with_carried_times(spark, parquet_frame(spark, state.table.uri, files, schema), state, files, schema)
    if {"key", "value"} <= set(state.schema.names):
        return frame
    sides = [name if name in state.schema.names else f"NULL AS {name}" for name in ("key", "value")]
    columns = (name_sql(name) for name in schema.names if name not in ("kafka", "key", "value"))
    return frame.selectExpr("kafka", *sides, *columns)


def _file_records(spark: SparkSession, state: RawState, files: Sequence[DataFile]) -> DataFrame:
    """The records of some files, with the columns of a ``record_frame``."""
    orders = _orders(state) if state.with_order else []
    columns = [*orders, "kafka.time AS time"]
    return _sides(raw_frame(spark, state, files), state.schema, columns, with_ids=state.with_ids)


def _columns(state: RawState) -> pa.Schema:
    """The columns to read from the raw files."""
    return state.schema.append(pa.field(ORDER, ORDER_TYPE)) if state.with_order and state.has_order else state.schema


def _orders(state: RawState) -> list[str]:
    """The source order of a record. Files of older versions lack the column."""
    columns = ((name, f"{name_sql(ORDER)}.{name}" if state.has_order else "NULL") for name in ORDER_TYPE.names)
    return [
        f"coalesce({field_sql}, {long_sql(least)}) AS order_{name}"
        for (name, field_sql), least in zip(columns, LOWEST, strict=True)
    ]


def _sides(frame: DataFrame, schema: pa.Schema, columns: Sequence[str], *, with_ids: bool) -> DataFrame:
    """``schema``: the frame's, known here; to ask Spark takes longer. ``with_ids``: ``kafka`` has the writers' schemas too.
    ``columns``: further columns."""
    kafka = f"struct(kafka.*, {', '.join(SCHEMA_IDS)}) AS kafka" if with_ids else "kafka"
    sides = (name if name in schema.names else f"NULL AS {name}" for name in ("key", "value"))
    return frame.selectExpr(kafka, *sides, *columns)


def in_ranges(frame: DataFrame, files: Sequence[DataFile], parts: Sequence[OffsetRange] | None) -> DataFrame:
    """The records of a frame in some ranges; None: all. ``files``: the frame's own."""
    # No filter where the files hold nothing else: the same plan for every batch is one that Spark has compiled before.
    if parts is None or all(item.lies_in(parts) for item in files):
        return frame
    if len(parts) > MANY_RANGES:
        rows = [(part.partition, part.first, part.end) for part in parts]
        spans = f"explode(sequence(low DIV {SPAN}, (high - 1) DIV {SPAN})) AS span"
        places = rows_frame(frame.sparkSession, _PLACES, rows).selectExpr("*", spans)
        condition = f"kafka.partition = at_partition AND kafka.offset DIV {SPAN} = span"
        from pyspark.sql import functions as F

        return frame.join(places, F.expr(f"{condition} AND kafka.offset >= low AND kafka.offset < high"), "left_semi")
    within = " OR ".join(
        f"(kafka.partition = {part.partition} AND kafka.offset >= {part.first} AND kafka.offset < {part.end})"
        for part in parts
    )
    return frame.where(within or "false")


def _with_carried_times(
    spark: SparkSession, frame: DataFrame, state: RawState, files: Sequence[DataFile], schema: pa.Schema
) -> DataFrame:
    """The frame with carried times for tables of older versions, which have a running maximum within each file only.

    If an earlier file of the partition has a higher time, that time replaces lower times in later files.
    """
    times_by_path = time_floors(raw_files(state), state.retention_time)
    rows = [
        (item.partition, item.first, item.last, times_by_path[item.path])
        for item in files
        if item.path in times_by_path
    ]
    if not rows:
        return frame
    from pyspark.sql import functions as F

    # Joined by equal spans: a join by partition alone would compare each record with all files of its partition.
    span = max(
        SPAN, sum((item.last or 0) - (item.first or 0) for item in files if item.path in times_by_path) // _SPANS
    )
    spans = f"explode(sequence(low DIV {span}, high DIV {span})) AS span"
    span_times = rows_frame(spark, _SPAN_TIMES, rows).selectExpr(
        "at", "low", "high", "timestamp_millis(reached) AS reached", spans
    )
    inside = f"kafka.partition = at AND kafka.offset DIV {span} = span AND kafka.offset BETWEEN low AND high"
    fields = (
        "greatest(kafka.time, reached) AS time" if item.name == "time" else f"kafka.{name_sql(item.name)}"
        for item in state.schema.field("kafka").type
    )
    kafka = f"struct({', '.join(fields)}) AS kafka"
    columns = [name_sql(name) for name in schema.names if name != "kafka"]
    return frame.join(F.broadcast(span_times), F.expr(inside), "left").selectExpr(kafka, *columns)


def output_frame(
    spark: SparkSession, state: StagingState, topic: str, ranges: Iterable[OffsetRange] | None = None
) -> DataFrame:
    """An output topic's records: ``kafka``, ``key``, ``value``, ``rule``, ``source``, ``schema``, ``left_out``, and
    ``headers`` where the table has some."""
    from pyspark.sql import functions as F

    names = {"key": key_column(topic), "value": value_column(topic)}
    present = {side: name for side, name in names.items() if name in state.schema.names}
    record_columns = ["kafka", "rule", "source", "schema", "left_out"]
    record_columns += [HEADERS_COLUMN] if HEADERS_COLUMN in state.schema.names else []
    schema = pa.schema([state.schema.field(name) for name in ["kafka", *present.values(), *record_columns[1:]]])
    parts = None if ranges is None else list(ranges)
    files = state.output_files(topic, parts)
    frame = parquet_frame(spark, state.table.uri, files, schema)
    sides = [(F.col(f"`{present[side]}`") if side in present else F.lit(None)).alias(side) for side in ("key", "value")]
    return in_ranges(frame.select("kafka", *sides, *record_columns[1:]), files, parts)


def refuse_scattered_keys(places: DataFrame, topic: str, outcome: str) -> None:
    """EtlError for a key in several partitions, as a ``partition-by`` over the value puts it: its last record is unknown.

    ``places``: the ``key`` and ``partition`` of records; ``outcome``: for the error, such as "staged".
    """
    from pyspark.sql import functions as F

    parts = places.where("key IS NOT NULL").groupBy("key")
    parts = parts.agg(F.expr("min(partition) AS low"), F.expr("max(partition) AS high")).where("low <> high")
    for row in parts.selectExpr("to_json(struct(key)) AS text", "low", "high").limit(1).collect():
        raise EtlError(
            f"topic {topic}: records with the {row['text']} are in the partitions {row['low']} and {row['high']}, which have"
            f" no common order, so that the row of the key is not known. Nothing was {outcome}. Name another output topic: it"
            " gets all records again."
        )


def latest_records(frame: DataFrame) -> DataFrame:
    """The last record of each key in an ``output_frame``, with all columns. A key whose last record is a tombstone is absent."""
    other_columns = [name_sql(name) for name in frame.columns if name != "key"]
    from pyspark.sql import functions as F

    latest = frame.groupBy("key").agg(F.expr(f"max_by(struct({', '.join(other_columns)}), kafka.offset) AS latest"))
    columns = [f"latest.{name} AS {name}" for name in other_columns]
    return latest.where("latest.value IS NOT NULL").selectExpr(columns[0], "key", *columns[1:])


def checkpoint(frame: DataFrame, *, eager: bool = True) -> DataFrame:
    """The frame, with its rows computed only once: now if ``eager``, else at the first use. Its plan reads the computed rows,
    however long the plan before was. Otherwise, plans that contain plans would grow without end."""
    from pyspark import StorageLevel

    return frame.localCheckpoint(eager=eager, storageLevel=StorageLevel.DISK_ONLY)
