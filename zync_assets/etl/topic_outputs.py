"""The outputs of a topic on their way into files of the staging table: the columns of a batch's result rows, and the rows of
a file.

Parquet is written by Arrow: Spark's own writer takes four times as long for the same file, as it writes row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.codecs.spark_types import spark_type
from zync_assets.etl import encodability
from zync_assets.etl.account import Labels
from zync_assets.etl.output_types import OutputType
from zync_assets.etl.partitions import ONE, PARTITION, Partitions
from zync_assets.etl.rules.kind import LACKING
from zync_assets.etl.rules.output_schemas import FieldPath
from zync_assets.etl.rules.shapes import type_sql
from zync_assets.kafka.topics import RecordLimits
from zync_assets.lake import staging, storage
from zync_assets.lake.log import DataFile
from zync_assets.spark.sql import name_sql

_REPEATED = (
    "kafka.topic",
    "kafka.partition",
    "rule",
    "schema",
    *(f"source.list.element.{name}" for name in ("topic", "partition")),
)
"""Columns with few values, for which Parquet's dictionary pays; to try it on every column takes half of the writing."""

LEFT_OUT = "left_out"


@dataclass(frozen=True)
class TopicOutputs:
    """One topic's outputs in a batch. ``folder``: below the table; ``next``: the batch's first offset in each partition, from
    0 on; ``columns``: the topic's own, with their types; ``schemas``: fingerprints of output schemas by the rule's index;
    ``texts``: output schemas by fingerprint; ``limits``: the records that the topic takes, if known; ``required``:
    fields of values that the schemas have no null for."""

    topic: str
    folder: str
    next: Sequence[int]
    columns: Mapping[str, pa.DataType]
    schemas: Sequence[str]
    texts: Mapping[str, str]
    limits: RecordLimits | None
    required: Sequence[FieldPath] = ()
    partitions: Partitions = ONE

    @property
    def columns_made(self) -> tuple[str, ...]:
        """The columns of the topic's outputs that ``row_sql`` makes."""
        return (LEFT_OUT, *([PARTITION] if self.partitions.by else []), *self.columns)

    def rows(self, outputs: pa.RecordBatch, first: int, labels: Labels, partition: int = 0) -> pa.RecordBatch:
        """Outputs as they are staged in a partition, numbered from ``first``."""
        count = len(outputs)
        kafka = {
            "topic": pa.repeat(pa.scalar(self.topic), count),
            "partition": pa.repeat(pa.scalar(partition, pa.int32()), count),
            "offset": pa.array(np.arange(first, first + count)),
        }
        columns: dict[str, pa.Array] = {
            "kafka": pa.StructArray.from_arrays(list(kafka.values()), list(kafka)),
            "rule": pa.array(labels.rules, pa.string()).take(outputs["rule"]),
            "source": _with_topics(outputs["source"], labels),
            "schema": pa.array(self.schemas, pa.string()).take(outputs["rule"]),
            "left_out": outputs[LEFT_OUT],
        }
        types = {name: staging.BASE_SCHEMA.field(name).type for name in columns} | dict(self.columns)
        columns |= {name: outputs[name] for name in self.columns}
        arrays = [
            column if column.type.equals(types[name]) else column.cast(types[name]) for name, column in columns.items()
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(list(types.items())))


def staged_topic(
    kind: OutputType,
    folder: str,
    next: Sequence[int],
    labels: Labels,
    limits: RecordLimits | None,
    partitions: Partitions,
) -> TopicOutputs:
    """The outputs of a topic in a batch. The parameters are those of ``TopicOutputs``."""
    return TopicOutputs(
        kind.topic,
        folder,
        next,
        kind.columns,
        [kind.targets[name].fingerprint if name in kind.targets else "" for name in labels.rules],
        {kind.targets[name].fingerprint: text for name, text in kind.texts.items()},
        limits,
        tuple(kind.required),
        partitions,
    )


def row_sql(
    topics: Sequence[TopicOutputs], labels: Labels, suspect: str, placeholder: str | None, *, lacking: bool = False
) -> list[str]:
    """The columns of result rows that a task writes. ``suspect``: a condition that marks outputs that may be impossible to
    encode. ``placeholder``: Debezium's text for a value that it did not send (``etl.encodability``). ``lacking``: whether the
    rows have the column LACKING (``etl.rules.kind``)."""
    columns = ["kind", "rule", "source", "last", "waited", "hash", f"coalesce({suspect}, false) AS suspect"]
    for at, staged in enumerate(topics):
        values, paths = {name: name_sql(name) for name in staged.columns}, "CAST(NULL AS array<string>)"
        value = staging.value_column(staged.topic)
        if value in values:
            output_struct = encodability.left_out(
                values[value], spark_type(staged.columns[value]), "value", placeholder
            )
            values[value], paths = output_struct or (values[value], paths)
            if lacking:
                all_paths = f"array_distinct(concat(coalesce({paths}, array()), coalesce({LACKING}, array())))"
                paths = f"IF({name_sql(value)} IS NULL OR size({all_paths}) = 0, NULL, {all_paths})"
        # Under names without dots, which mapInArrow would take for paths.
        sides = (
            f"CAST({sql} AS {type_sql(spark_type(staged.columns[name]))}) AS side{side}"
            for side, (name, sql) in enumerate(values.items())
        )
        # The struct lies in an array, which is null in the rows of other topics. A null struct would be a null in each of its
        # fields.
        part = [] if staged.partitions.sql is None else [f"{staged.partitions.sql} AS {PARTITION}"]
        output_struct = f"array(struct({', '.join([f'{paths} AS {LEFT_OUT}', *part, *sides])}))"
        columns.append(
            f"CASE WHEN kind = 'out' AND rule IN ({labels.of_topic(staged.topic)}) THEN {output_struct} END AS out{at}"
        )
    return columns


@dataclass
class OutputFile:
    """A file of outputs that is being written. Its latest records wait in memory for the next row group."""

    uri: str
    path: str
    staged: TopicOutputs
    labels: Labels
    first: int
    partition: int = 0
    written: int = 0
    waiting: int = 0
    size: int = 0
    _group: list[pa.RecordBatch] = field(default_factory=list[pa.RecordBatch])
    _writer: pq.ParquetWriter | None = None

    def add(self, outputs: pa.RecordBatch) -> None:
        """Number the next outputs. They wait for ``write_group``."""
        self._group.append(
            self.staged.rows(outputs, self.first + self.written + self.waiting, self.labels, self.partition)
        )
        self.waiting, self.size = self.waiting + len(outputs), self.size + outputs.get_total_buffer_size()

    def write_group(self) -> None:
        """Write the waiting outputs as a row group. LakeError if the file can't be written."""
        uri = storage.join(self.uri, self.path)
        table = pa.Table.from_batches(self._group)
        with storage.access_errors(uri, "can't be written"):
            if self._writer is None:
                self._writer = _writer(uri, table.schema)
            self._writer.write_table(table)
        self.written += len(table)
        self._group, self.waiting, self.size = [], 0, 0

    def closed(self) -> DataFile:
        """The file with all outputs, as a commit names it. LakeError as ``write_group``."""
        if self._group:
            self.write_group()
        uri = storage.join(self.uri, self.path)
        with storage.access_errors(uri, "can't be written"):
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            size = storage.file_size(uri)
        last_offset = self.first + self.written - 1
        return DataFile(self.path, size, self.written, self.partition, self.first, last_offset, group=self.staged.topic)

    def abandon(self) -> None:
        """Leave nothing open after an error. A closed file stays."""
        if self._writer is not None:
            storage.abandon(self._writer)
            self._writer = None


def _with_topics(source: pa.ListArray, labels: Labels) -> pa.ListArray:
    """Sources with topics in place of the inputs' places."""
    places, partitions, offsets = source.values.flatten()
    topics = pa.array(labels.topics, pa.string()).take(places)
    sources = pa.StructArray.from_arrays([topics, partitions, offsets], fields=list(staging.SOURCE_TYPE.value_type))
    return pa.ListArray.from_arrays(source.offsets, sources, staging.SOURCE_TYPE)


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
        # Rows are sorted by offset. No reader could skip a row group by the statistics of another column.
        write_statistics=["kafka.offset"],  # type: ignore[arg-type]
    )
