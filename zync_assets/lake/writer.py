"""The write half of ingest inside a Spark task: record batches become Parquet files that a later commit names."""

from __future__ import annotations

import uuid
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.compute import pc
from zync_assets.lake import storage
from zync_assets.lake.tables import DataFile

MAX_RECORDS = 1_000_000
"""The most records in one file. The limit keeps a batch cheap if the batch needs one record of the file."""


_CONSTANT = ["kafka.topic", "kafka.partition", "key_schema_id", "value_schema_id"]
_ASCENDING = ("kafka.offset", "kafka.timestamp", "kafka.time")
"""Parquet's dictionary suits the columns with few values, and its delta encoding (DELTA_BINARY_PACKED) suits the ascending
columns. A trial dictionary for every column would double the time of a write."""


_WRITTEN = "can't be written"


class RangeWriter:
    """Writes the batches of one Kafka partition, in offset order, as sorted files of a table.

    A file has one schema: when a batch is wider than the one before (a record with a newer writer schema came), the next
    file begins. Files that no commit names are invisible; nothing is removed on failure.
    """

    def __init__(self, table_uri: str, partition: int, name: str = "part") -> None:
        """``name``: what the files' names begin with."""
        self._uri = table_uri
        self._partition = partition
        self._name = name
        self._open: _OpenFile | None = None
        self._done: list[tuple[DataFile, pa.Schema]] = []

    def __enter__(self) -> RangeWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        current = self._open
        if current is not None and (not current.schema.equals(batch.schema) or current.records >= MAX_RECORDS):
            self.close()
            current = None
        if current is None:
            current = self._open = _OpenFile(self._uri, self._partition, batch.schema, self._name)
        current.write(batch)

    def close(self) -> None:
        if self._open is not None:
            self._done.append((self._open.finish(), self._open.schema))
            self._open = None

    @property
    def files(self) -> list[tuple[DataFile, pa.Schema]]:
        """The finished files, each with its own Arrow schema."""
        return self._done


class _OpenFile:
    def __init__(self, table_uri: str, partition: int, schema: pa.Schema, name: str) -> None:
        self.schema = schema
        self.records = 0
        self._partition = partition
        self._path = f"{name}-{partition:05d}-{uuid.uuid4().hex}.parquet"
        self._uri = storage.join(table_uri, self._path)
        self._first: int | None = None
        self._last = 0
        self._low: int | None = None
        self._high = 0
        system, path = storage.filesystem(self._uri)
        with storage.accessed(self._uri, _WRITTEN):
            system.create_dir(path.rsplit("/", 1)[0], recursive=True)
            self._writer = pq.ParquetWriter(
                path,
                schema,
                filesystem=system,
                compression="snappy",
                use_dictionary=_CONSTANT,  # type: ignore[arg-type]  # a sequence of names too
                column_encoding=dict.fromkeys(_ASCENDING, "DELTA_BINARY_PACKED"),
                # Of other columns the least and the most of a row group, in order of offsets, help no reader to skip one.
                write_statistics=_ASCENDING,  # type: ignore[arg-type]
            )

    def write(self, batch: pa.RecordBatch) -> None:
        kafka = batch.column("kafka")
        offsets, times = pc.struct_field(kafka, "offset"), pc.struct_field(kafka, "time")
        if self._first is None:
            self._first, self._low = offsets[0].as_py(), times[0].value // 1000
        self._last, self._high = offsets[-1].as_py(), times[-1].value // 1000
        self.records += batch.num_rows
        with storage.accessed(self._uri, _WRITTEN):
            self._writer.write_batch(batch)

    def finish(self) -> DataFile:
        with storage.accessed(self._uri, _WRITTEN):
            self._writer.close()
        return DataFile(
            self._path,
            storage.file_size(self._uri),
            self.records,
            self._partition,
            self._first,
            self._last,
            self._low,
            self._high,
        )
