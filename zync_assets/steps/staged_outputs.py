"""Numbered outputs become files of the staging table, a bucket each, in the Spark tasks that hold them.

Parquet is written by Arrow: Spark's own writer takes four times as long for the same file, as it writes row by row.
"""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.errors import ZyncError
from zync_assets.etl.labels import Labels
from zync_assets.lake import staging, storage
from zync_assets.lake.tables import DataFile
from zync_assets.steps.tasks import settle

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PLAIN = ("bucket", "rule", "source", "left_out")
"""The first columns of the rows that are written; then come the topic's own, in order."""

SMALL = 1_000
"""Bytes of a raw record in its file, on the average, below which a batch of Arrow's need not be measured: it is bounded by
``spark.sql.execution.arrow.maxRecordsPerBatch``."""
_BATCH_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"

GROUP_BYTES = 64 << 20

_REPEATED = (
    "kafka.topic",
    "kafka.partition",
    "rule",
    "schema",
    "source.list.element.topic",
    "source.list.element.partition",
)
"""Columns with few values, for which Parquet's dictionary pays; to try it on every column takes half of the writing."""


@dataclass(frozen=True)
class BucketWriter:
    """Writes the rows of one Spark partition, all of one bucket, in order.

    ``folder``: below the table; ``firsts``: each bucket's first offset; ``schemas``: fingerprints of output schemas, by the
    rule's index; ``columns``: the topic's own, with their types.
    """

    uri: str
    folder: str
    topic: str
    firsts: Sequence[int]
    labels: Labels
    schemas: Sequence[str]
    columns: Mapping[str, pa.DataType]
    group: int = 50_000
    """Records of a row group, which ends with GROUP_BYTES if that comes first."""

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        settle()
        try:
            found: object = self._write(batches)
        except ZyncError as error:
            found = error
        yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps(found)])], names=["found"])

    def _write(self, batches: Iterable[pa.RecordBatch]) -> DataFile | None:
        """The file; None where there are no rows."""
        first: int | None = None
        end = 0
        path = f"{self.folder}/part-{uuid.uuid4().hex}.parquet"
        uri = storage.join(self.uri, path)
        writer: pq.ParquetWriter | None = None
        for group in _groups(batches, self.group):
            if first is None:
                first = end = self.firsts[group[0]["bucket"][0].as_py()]
            table = pa.Table.from_batches([self._staged(batch, end + at) for at, batch in _placed(group)])
            end += len(table)
            with storage.accessed(uri, "can't be written"):
                if writer is None:
                    writer = _writer(uri, table.schema)
                writer.write_table(table)
        if writer is None or first is None:
            return None
        with storage.accessed(uri, "can't be written"):
            writer.close()
        return DataFile(path, storage.file_size(uri), end - first, 0, first, end - 1, group=self.topic)

    def _staged(self, batch: pa.RecordBatch, first: int) -> pa.RecordBatch:
        count = len(batch)
        kafka = {
            "topic": pa.repeat(pa.scalar(self.topic), count),
            "partition": pa.repeat(pa.scalar(0, pa.int32()), count),
            "offset": pa.array(np.arange(first, first + count)),
        }
        made: dict[str, pa.Array] = {
            "kafka": pa.StructArray.from_arrays(list(kafka.values()), list(kafka)),
            "rule": pa.array(self.labels.rules, pa.string()).take(batch["rule"]),
            "source": self._named(batch["source"]),
            "schema": pa.array(self.schemas, pa.string()).take(batch["rule"]),
            "left_out": batch["left_out"],
        }
        types = {name: staging.BASE_SCHEMA.field(name).type for name in made} | dict(self.columns)
        made |= dict(zip(self.columns, batch.columns[len(PLAIN) :], strict=True))
        arrays = [
            column if column.type.equals(types[name]) else column.cast(types[name]) for name, column in made.items()
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(list(types.items())))

    def _named(self, source: pa.ListArray) -> pa.ListArray:
        """Sources with topics in place of the inputs' places."""
        places, partitions, offsets = source.values.flatten()
        topics = pa.array(self.labels.topics, pa.string()).take(places)
        each = pa.StructArray.from_arrays([topics, partitions, offsets], fields=list(staging.SOURCE_TYPE.value_type))
        return pa.ListArray.from_arrays(source.offsets, each, staging.SOURCE_TYPE)


def _groups(batches: Iterable[pa.RecordBatch], most: int) -> Iterator[list[pa.RecordBatch]]:
    """Batches with rows, as many together as make a row group."""
    group: list[pa.RecordBatch] = []
    records = size = 0
    for batch in batches:
        if not len(batch):
            continue
        group.append(batch)
        records, size = records + len(batch), size + batch.nbytes
        if records >= most or size >= GROUP_BYTES:
            yield group
            group, records, size = [], 0, 0
    if group:
        yield group


def _placed(group: Sequence[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Each batch with the number of rows before it."""
    place = 0
    for batch in group:
        yield place, batch
        place += len(batch)


def _writer(uri: str, schema: pa.Schema) -> pq.ParquetWriter:
    system, path = storage.filesystem(uri)
    system.create_dir(path.rsplit("/", 1)[0], recursive=True)
    return pq.ParquetWriter(
        path,
        schema,
        filesystem=system,
        compression="snappy",
        use_dictionary=list(_REPEATED),  # type: ignore[arg-type]  # a list of names too
        column_encoding={"kafka.offset": "DELTA_BINARY_PACKED"},
        # Rows are in order of offsets: of other columns the least and the most of a row group help nobody to skip it.
        write_statistics=["kafka.offset"],  # type: ignore[arg-type]
    )


def write_outputs(spark: SparkSession, rows: DataFrame, writer: BucketWriter, size: float) -> list[DataFile]:
    """Write rows (columns PLAIN, then the topic's own); the files, in order of offsets. Raises what a task raised.

    ``size``: bytes of a raw record of the batch, on the average and in its file.
    """
    with _unmeasured(spark) if size < SMALL else nullcontext():
        found = [pickle.loads(bytes(row["found"])) for row in rows.mapInArrow(writer.run, "found binary").collect()]
    for each in found:
        if isinstance(each, ZyncError):
            raise each
    files = [each for each in found if isinstance(each, DataFile)]
    return sorted(files, key=lambda item: item.first or 0)


@contextmanager
def _unmeasured(spark: SparkSession) -> Generator[None]:
    """Arrow's batches end by the number of their rows alone. Else Spark asks after each row how large its batch is by now,
    by a walk over all columns that takes longer than all that is done with the row; large rows are worth it."""
    before = str(spark.conf.get(_BATCH_BYTES))
    spark.conf.set(_BATCH_BYTES, str(2**31 - 1))
    try:
        yield
    finally:
        spark.conf.set(_BATCH_BYTES, before)
