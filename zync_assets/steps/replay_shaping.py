"""Replay into the raw table of an input with a ``shape``: what is decoded goes through the shape on its way, as in ingest.

Two looks come first, in which nothing is written: at the types of what can be decoded, and at the records that the shape
fails on. Both, and what the shape leaves out, stay in quarantine.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.codecs.spark_types import spark_schema
from zync_assets.compute import pc
from zync_assets.errors import ZyncError
from zync_assets.etl.failing import looking
from zync_assets.lake.tables import DataFile
from zync_assets.lake.writer import RangeWriter
from zync_assets.pipeline import Input, Pipeline
from zync_assets.records import KAFKA_TYPE
from zync_assets.steps.failures import spark_failures
from zync_assets.steps.replay_task import Decoded, ReplayTask
from zync_assets.steps.shaped_types import shaped_schema
from zync_assets.steps.shaping import failing_frame, resolvable, shaped_frame
from zync_assets.steps.shaping_task import KEPT, decoded_schema, shaped_batch, with_control
from zync_assets.steps.tasks import indexes, run_tasks, task_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Places = frozenset[tuple[int, int]]
"""Partition and offset."""


def write(
    spark: SparkSession, pipeline: Pipeline, item: Input, task: ReplayTask, table: pa.Schema
) -> tuple[Decoded, pa.Schema]:
    """Decode, shape and write; returns what came of it, and the raw table's columns after it. ``table``: those that it has.

    SchemaError if the shape does not fit the records, or its result the table; FieldMissing for a field that no record has
    had where the file says so.
    """
    [found] = run_tasks(spark, 1, lambda _: task.look())
    source = replace(task.source, key_type=found.key_type, value_type=found.value_type)
    item, source = resolvable(pipeline, item, source, lambda own: _frame(spark, replace(task, source=own), frozenset()))
    task = replace(task, source=source)
    with looking(spark), spark_failures(_failed(item)):
        rows = failing_frame(_frame(spark, task, frozenset()), item).collect()
    failed: Places = frozenset((row["partition"], row["offset"]) for row in rows)
    shaped = shaped_frame(_frame(spark, task, failed), item)
    schema = shaped_schema(item, task.source, table, shaped)
    writer = _Writer(task.uri, task.name, schema)
    with spark_failures(_failed(item)):
        [row] = shaped.mapInArrow(writer.run, "found binary").collect()
    result: tuple[list[DataFile], list[tuple[int, int]]] | ZyncError = pickle.loads(bytes(row["found"]))
    if isinstance(result, ZyncError):
        raise result
    found.files, left_out = result
    found.reasons |= dict.fromkeys(failed, "its shape fails on the record")
    found.reasons |= dict.fromkeys(left_out, "its shape leaves the record out; it can only be dropped")
    return found, schema


def _failed(item: Input):
    return lambda text: ZyncError(
        f"input {item.topic}: the replay failed: {text} Nothing was committed; correct the shape, or run it again."
    )


def _frame(spark: SparkSession, task: ReplayTask, without: Places) -> DataFrame:
    """The decoded records, in the order of their places, less those at some."""
    schema = decoded_schema(task.source)

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in indexes(batches):
            for partition, records in task.decoded(Decoded()):
                skipped = pa.array([offset for at, offset in without if at == partition], pa.int64())
                offsets = pc.struct_field(records.column("kafka"), "offset")
                yield with_control(records.filter(pc.invert(pc.is_in(offsets, skipped))), schema)

    return task_frame(spark, 1).mapInArrow(read, spark_schema(schema))


class _Writer:
    """Shaped records → the replay's files, and the places of the records that the shape left out."""

    def __init__(self, uri: str, name: str, schema: pa.Schema) -> None:
        self.uri, self.name, self.schema = uri, name, schema

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            found: object = self._write(batches)
        except ZyncError as error:
            found = error
        yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps(found)])], names=["found"])

    def _write(self, batches: Iterable[pa.RecordBatch]) -> tuple[list[DataFile], list[tuple[int, int]]]:
        writers: dict[int, RangeWriter] = {}
        left_out: list[tuple[int, int]] = []
        for batch in batches:
            others = batch.filter(pc.invert(batch.column(KEPT))).column("kafka")
            numbers = (pc.struct_field(others, name).to_pylist() for name in ("partition", "offset"))
            left_out += zip(*numbers, strict=True)
            kept = batch.filter(batch.column(KEPT))
            partitions = pc.struct_field(kept.column("kafka"), "partition")
            for partition in partitions.unique().to_pylist():
                writer = writers.setdefault(partition, RangeWriter(self.uri, partition, self.name))
                rows = kept.filter(pc.equal(partitions, partition))
                writer.write(shaped_batch(rows.column("kafka").cast(KAFKA_TYPE), rows, self.schema))
        for writer in writers.values():
            writer.close()
        return [item for writer in writers.values() for item, _ in writer.files], left_out
