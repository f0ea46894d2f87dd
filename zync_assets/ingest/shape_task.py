"""The Spark task that shapes records, and the types of the records before and after the shape.

The two ends of a Spark task that shapes records: Kafka → decoded columns, and shaped columns → files of the raw
table.

The module ``shape`` holds the Spark SQL in the middle. The decoded records pass through the task in memory.

The types of a topic that is shaped: those that its records are decoded to, and those of its raw table.

What records are decoded to is kept in a table without rows (``~decoded``), with the notes of Connect's schemas. A bare
column in the shape passes its notes on to the raw table.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.evolution import conform, holds, merge_types
from zync_assets.codecs.fields import PLAIN, Note, connect_note_of, optional, with_connect_note
from zync_assets.codecs.spark_types import arrow_type
from zync_assets.errors import SchemaError, ZyncError
from zync_assets.etl.rules import output_schemas
from zync_assets.etl.rules.output_schemas import Notes, shape_notes, type_notes
from zync_assets.ingest.files import table_schema
from zync_assets.ingest.source import Arrived, Source, read_chunks, with_side_notes
from zync_assets.lake import storage, tables
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw_files import KAFKA_TYPE, RangeWriter, dropped_rows, raw_schema
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Input
from zync_assets.pipeline_file.references import shape_in_lake_names, with_notes
from zync_assets.spark.tasks import indexes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CONTROL = "control"
"""The column of the one row of a task that is no record: what the reading end has to say (pickled), at the end."""
KEPT = "kept"

Types = tuple[pa.DataType | None, pa.DataType | None]


@dataclass(frozen=True)
class ReadEnd:
    """The results of the reading end. ``wider``: set if the end stopped at records that the source's types don't hold; these
    types hold the records."""

    bad: list[DataFile] = field(default_factory=list)
    wider: Types | None = None
    arrived: list[Arrived] = field(default_factory=list)
    error: ZyncError | None = None
    reached: int = 0
    """The time of the last record, milliseconds since the epoch."""


@dataclass(frozen=True)
class TaskEnd:
    """The results of one task.

    ``dropped``: side files with the offset ranges that the shape excludes; ``left_out``: the number of excluded records.
    """

    read: ReadEnd
    files: list[DataFile] = field(default_factory=list)
    dropped: list[DataFile] = field(default_factory=list)
    left_out: int = 0
    error: ZyncError | None = None


def decoded_schema(source: Source) -> pa.Schema:
    """The columns between the two ends: those of decoded records, and CONTROL."""
    sides = raw_schema(source.key_type or pa.null(), source.value_type or pa.null())
    return pa.schema([pa.field(CONTROL, pa.binary()), *sides])


@dataclass(frozen=True)
class Reader:
    """The reading end. ``refused``: (partition, offset) → why the record goes to quarantine; ``reached``: as in ``Reading``."""

    source: Source
    parts: Sequence[OffsetRange]
    now: int
    reached: Mapping[int, int]
    refused: Mapping[tuple[int, int], str]
    side_uri: str | None
    """The table of the quarantine files; None for a trial run, which writes no files."""
    side_name: str
    """The prefix of the quarantine files' names."""

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for index in indexes(batches):
            yield from self._part(self.parts[index])

    def _part(self, part: OffsetRange) -> Iterator[pa.RecordBatch]:
        schema = decoded_schema(self.source)
        refused = {offset: text for (partition, offset), text in self.refused.items() if partition == part.partition}
        wider: Types | None = None
        arrived: list[Arrived] = []
        writer = RangeWriter(self.side_uri, part.partition, self.side_name) if self.side_uri is not None else None
        reached = self.reached.get(part.partition, 0)
        try:
            with ExitStack() as stack:
                if writer is not None:
                    stack.enter_context(writer)
                for chunk in read_chunks(self.source, part, self.now, refused, reached=reached):
                    arrived.extend(chunk.arrivals)
                    reached = chunk.reached
                    wider = self._wider(chunk.records.schema)
                    if wider is not None:
                        break
                    if writer is not None:
                        writer.write(chunk.bad)
                    yield with_control(chunk.records, schema)
            bad = [item for item, _ in writer.files] if writer is not None else []
            found = ReadEnd(bad, wider, arrived, reached=reached)
        except ZyncError as error:
            found = ReadEnd(error=error)
        yield _control(found, schema)

    def _wider(self, met: pa.Schema) -> Types | None:
        own = {"key": self.source.key_type, "value": self.source.value_type}
        types = {side: met.field(side).type if side in met.names else None for side in own}
        fits = all(kind is None or _holds(own[side], kind) for side, kind in types.items())
        return None if fits else (types["key"], types["value"])


def _holds(own: pa.DataType | None, kind: pa.DataType) -> bool:
    """Whether a type has room for the values of another one, and says of them for Kafka Connect what the other one says."""
    if own is None or own.equals(kind, check_metadata=True):
        return own is not None
    return holds(own, kind) and list(type_notes(own)) == list(type_notes(kind))


def with_control(records: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Decoded records with the columns of ``decoded_schema``."""
    columns = [
        conform(records.column(item.name), item.type)
        if item.name in records.schema.names
        else pa.nulls(records.num_rows, item.type)
        for item in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _control(found: ReadEnd, schema: pa.Schema) -> pa.RecordBatch:
    columns = [pa.array([pickle.dumps(found)]) if item.name == CONTROL else pa.nulls(1, item.type) for item in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@dataclass(frozen=True)
class Writer:
    """The writing end. Its input has CONTROL, KEPT and the columns of ``schema``, in the order of offsets."""

    uri: str
    side_uri: str
    side_name: str
    schema: pa.Schema

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            found = self._write(batches)
        except ZyncError as error:
            found = TaskEnd(ReadEnd(), error=error)
        yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps(found)])], names=["found"])

    def _write(self, batches: Iterable[pa.RecordBatch]) -> TaskEnd:
        data = side = None
        read, left_out = ReadEnd(), 0
        gaps = _Gaps()
        for batch in batches:
            is_record = pc.is_null(batch.column(CONTROL))
            for text in batch.column(CONTROL).drop_null().to_pylist():
                read = pickle.loads(text)
            rows = batch.filter(is_record)
            if not rows.num_rows:
                continue
            kafka = rows.column("kafka").cast(KAFKA_TYPE)
            if data is None or side is None:
                partition = kafka[0]["partition"].as_py()
                data, side = RangeWriter(self.uri, partition), RangeWriter(self.side_uri, partition, self.side_name)
            kept = rows.column(KEPT)
            out = kafka.filter(pc.invert(kept))
            left_out += len(out)
            side.write(gaps.add(out))
            data.write(shaped_batch(kafka.filter(kept), rows.filter(kept), self.schema))
        if data is None or side is None:
            return TaskEnd(read)
        side.write(gaps.rest())
        data.close()
        side.close()
        return TaskEnd(read, [item for item, _ in data.files], [item for item, _ in side.files], left_out)


def shaped_batch(kafka: pa.Array, rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Shaped rows with the columns of the raw table; ``kafka`` in place of theirs."""
    columns: list[pa.Array] = []
    for item in schema:
        if item.name == "kafka":
            columns.append(kafka)
        elif item.name in rows.schema.names:
            columns.append(conform(rows.column(item.name), item.type))
        else:
            columns.append(pa.nulls(rows.num_rows, item.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class _Gaps:
    """Records that are left out, as ranges. None goes over an offset that is not there: it may lie in quarantine."""

    def __init__(self) -> None:
        self._open: tuple[pa.StructArray, int, int] | None = None

    def add(self, kafka: pa.StructArray) -> pa.RecordBatch:
        """The ranges that are complete by now."""
        if not len(kafka):
            return _no_ranges()
        offsets = pc.struct_field(kafka, "offset").to_numpy()
        starts = np.concatenate([[0], np.flatnonzero(np.diff(offsets) != 1) + 1])
        ends = np.concatenate([starts[1:], [len(offsets)]]) - 1
        firsts, lasts = offsets[starts], offsets[ends] + 1
        places = kafka.take(pa.array(starts))
        if self._open is not None:
            place, first, end = self._open
            if end == firsts[0]:
                firsts = np.concatenate([[first], firsts[1:]])
            else:
                firsts, lasts = np.concatenate([[first], firsts]), np.concatenate([[end], lasts])
                places = pa.concat_arrays([place, places])
        self._open = (places.slice(len(places) - 1), int(firsts[-1]), int(lasts[-1]))
        return dropped_rows(places.slice(0, len(places) - 1), pa.array(firsts[:-1]), pa.array(lasts[:-1]))

    def rest(self) -> pa.RecordBatch:
        if self._open is None:
            return _no_ranges()
        place, first, end = self._open
        return dropped_rows(place, pa.array([first]), pa.array([end]))


def _no_ranges() -> pa.RecordBatch:
    return dropped_rows(pa.array([], KAFKA_TYPE), pa.array([], pa.int64()), pa.array([], pa.int64()))


def known_types(lake: str, item: Input) -> Types | None:
    """The decoded types of a shaped topic's key and value, before the shape; None before the first batch."""
    opened = tables.open_table(storage.decoded_uri(lake, item.pool, item.topic))
    if opened is None:
        return None
    names = opened.schema.names
    key, value = (opened.schema.field(side).type if side in names else None for side in ("key", "value"))
    return key, value


def remember(lake: str, item: Input, source: Source, notes: Mapping[str, Note]) -> pa.Schema:
    """Keep the types that records are decoded to, with the notes of their sides; returns the columns that are kept."""
    uri = storage.decoded_uri(lake, item.pool, item.topic)
    schema = raw_schema(source.key_type or pa.null(), source.value_type or pa.null())
    opened = tables.open_table(uri)
    schema = with_side_notes(schema, opened.schema if opened else None, notes)
    if opened is None:
        tables.create_table(uri, schema, f"Types of topic {item.topic} before it is shaped; no records", [], {})
    else:
        tables.widen(opened, schema)
    return schema


def with_types(source: Source, met: Sequence[Types]) -> Source:
    """The source with its types widened by the types ``met``. A type that can't be merged is skipped: the first type wins."""
    key, value = source.key_type, source.value_type
    for one, other in met:
        with suppress(SchemaError):
            key = key if one is None else merge_types(key, one, "key")
        with suppress(SchemaError):
            value = value if other is None else merge_types(value, other, "value")
    return replace(source, key_type=key, value_type=value)


def shaped_schema(item: Input, source: Source, table: pa.Schema, made: DataFrame) -> pa.Schema:
    """The raw table's present columns (``table``) merged with the columns of a shaped frame.

    Raises SchemaError for types that can't be merged.
    """
    types: dict[str, pa.DataType] = {}
    for side in ("key", "value"):
        have = table.field(side).type if side in table.names else None
        try:
            kind = with_notes(arrow_type(made.schema[side].dataType))
            noted = output_schemas.with_notes(kind, _notes(item, source, side, kind))
            types[side] = merge_types(have, noted, side)
        except SchemaError as error:
            raise SchemaError(
                f"input {item.topic}, shape: the result does not fit the columns of the raw table: {error}. Nothing was"
                " ingested. CAST the result to the type of the table. Or begin anew: give the input another pool, and its"
                " outputs another staging pool and other topics."
            ) from None
    return table_schema(table, replace(source, key_type=types["key"], value_type=types["value"]))


def shaped_notes(item: Input, source: Source, decoded: pa.Schema, shaped: pa.Schema) -> dict[str, Note]:
    """Side → what Connect's schemas say of the whole key or value after the shape. ``decoded``, ``shaped``: the columns before
    and after it."""
    own = {side: connect_note_of(decoded.field(side)) for side in ("key", "value") if side in decoded.names}
    return {
        side: optional(_notes(item, source, side, shaped.field(side).type, own).get(()) or PLAIN)
        for side in ("key", "value")
        if side in shaped.names
    }


def _notes(
    item: Input, source: Source, side: str, kind: pa.DataType, own: Mapping[str, Note] = MappingProxyType({})
) -> Notes:
    """What Connect's schemas say of a side as the shape makes it. ``kind``: its type; ``own``: what they say of a whole key or
    value before it is shaped."""
    assert item.shape is not None
    types = {"key": source.key_type or pa.null(), "value": source.value_type or pa.null()}
    shape = shape_in_lake_names(item.shape, types["key"], types["value"])
    # A null value stays null: within the shaped value, the value before is there.
    columns = [
        with_connect_note(pa.field(name, type), replace(own.get(name, PLAIN), required=name == side == "value"))
        for name, type in types.items()
    ]
    return shape_notes(shape.sides.get(side, side), kind, {"": pa.schema(columns)}, certain=True)
