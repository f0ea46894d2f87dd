"""The source of ingest: ranges of offsets as typed columns, and the writer schemas that change the columns.

In a Spark task, ``read_chunks`` makes typed columns of a range of offsets. It is the read half of ingest.

``schema_changes`` finds the new writer schemas that change a topic's columns, and the action that the pipeline file asks for.
The raw table keeps a topic's *known* schemas, each with its first record. A schema is a *change* if no known schema has the
same columns: names, types, aliases, units. A topic's first schema is no change. Connect's JSON has no schema ids: a schema of
Connect is a change if the table's columns lack a field or type of the schema.

``on-schema-change``: ``merge`` widens the table; ``quarantine`` leaves the table and quarantines the records; ``error`` commits
nothing of the batch. A schema whose records are in quarantine stays a change until it is merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.avro.schema import with_digests
from zync_assets.codecs.avro.types import arrow_type, field_defaults
from zync_assets.codecs.batches import BadPayload, DecodedBatch
from zync_assets.codecs.dispatch import Decoder, make_decoder
from zync_assets.codecs.evolution import (
    KEPT_TYPE,
    Arrival,
    Writer,
    is_change,
    merge_types,
    type_differences,
    with_lacking,
)
from zync_assets.codecs.fields import Note, common_note, connect_note_of, optional, with_connect_note
from zync_assets.errors import SchemaChanged, SchemaError, SchemaUnknown
from zync_assets.ingest.order import own_orders
from zync_assets.kafka.reader import mark_of, read_range
from zync_assets.kafka.registry import Registry
from zync_assets.lake.raw import ORDER, RawState, WriterSchema
from zync_assets.lake.raw_files import BAD_SCHEMA, HEADERS_TYPE, KAFKA_TYPE, raw_schema
from zync_assets.offsets import Mark, OffsetRange
from zync_assets.pipeline import Input, RegistryConfig, SideFormat, SourceOrder

_TIME = pa.timestamp("us", "UTC")


@dataclass(frozen=True)
class TopicSource:
    """All that a task needs to read a topic. ``key_type`` and ``value_type`` are the raw table's present types, if any."""

    kafka: Mapping[str, str] = field(repr=False)
    registry: RegistryConfig | None
    topic: str
    key: SideFormat
    value: SideFormat
    key_type: pa.DataType | None
    value_type: pa.DataType | None
    key_schemas: tuple[int, ...] = ()
    value_schemas: tuple[int, ...] = ()
    """The registry ids that came before, in that order."""
    digests: Mapping[int, int] = field(default_factory=dict[int, int])
    """Registry id → the digest of its schema when its first record came."""
    fixed_schema: bool = False
    """Whether records of a schema with other columns go into quarantine."""
    order: SourceOrder | None = None
    """The pipeline file's order of the input."""
    marks: Mapping[tuple[int, int], Mark] = field(default_factory=dict[tuple[int, int], Mark])
    """(Partition, its next offset) → the last record of the partition that was ingested."""


@dataclass(frozen=True)
class NewSchema:
    """A writer schema that came for the first time, and the first record that has it."""

    side: str
    partition: int
    offset: int
    schema: Arrival


@dataclass(frozen=True)
class RecordChunk:
    """Some records of one partition, in offset order: the decoded records, and the bad records (``lake.raw_files.BAD_SCHEMA``).

    Decoded records have the columns of ``lake.raw_files.raw_schema``, and ``order`` where records have orders of their own.
    ``last_time``: the time of the last record, milliseconds since the epoch; ``mark``: the last record.
    """

    records: pa.RecordBatch
    bad: pa.RecordBatch
    last_time: int
    mark: Mark
    new_schemas: tuple[NewSchema, ...] = ()


def read_chunks(
    source: TopicSource, part: OffsetRange, now: int, rejections: Mapping[int, str] | None = None, *, floor: int = 0
) -> Iterator[RecordChunk]:
    """All records of a range, decoded. ``now``: the time of ingest, milliseconds since the epoch; ``rejections``: offset →
    why that record counts as bad (stage ``shape``); ``floor``: the time of the record before the range, so that times run
    on from there.

    Raises what ``read_range`` and the registry raise; a record that can't be decoded raises nothing.
    """
    key, value = make_decoders(source)
    mark = source.marks.get((part.partition, part.first))
    for batch in read_range(source.kafka, source.topic, part.partition, part.first, part.end, mark=mark):
        chunk = _decode(source, part.partition, batch, key, value, floor, now, rejections or {})
        floor = chunk.last_time
        yield chunk


def make_decoders(source: TopicSource) -> tuple[Decoder, Decoder]:
    """The decoders of keys and of values. SchemaError if the pipeline file's types don't fit the raw table's."""
    registry = Registry(source.registry) if source.registry else None
    schema_of = with_digests(registry.schema, source.digests) if registry else _no_registry

    def decoder(side: str, form: SideFormat, type: pa.DataType | None, schema_ids: tuple[int, ...]) -> Decoder:
        try:
            return make_decoder(form, schema_of, type, side, schema_ids=schema_ids, fixed_schema=source.fixed_schema)
        except SchemaError as error:
            raise SchemaError(
                f"topic {source.topic}: the pipeline file's format and schema of the {side} do not fit the raw table that is"
                f" there: {error}. Nothing was ingested. Give {side}-format and {side}-schema back the types of the table, or"
                " wider ones; or begin anew: give the input another pool, and its outputs another staging pool and other"
                " topics."
            ) from None

    return (
        decoder("key", source.key, source.key_type, source.key_schemas),
        decoder("value", source.value, source.value_type, source.value_schemas),
    )


def _no_registry(schema_id: int) -> str:
    raise ValueError(f"schema id {schema_id} needs a registry")


def running_times(timestamps: pa.Array, highest: int, now: int) -> np.ndarray:
    """The prefix maximum of the timestamps in milliseconds, from ``highest``, none later than ``now``. A missing timestamp
    counts as the one before it."""
    millis = pc.fill_null(timestamps, 0).to_numpy(zero_copy_only=False)
    return np.maximum(np.maximum.accumulate(np.minimum(millis, now)), highest)


def _decode(
    source: TopicSource,
    partition: int,
    batch: pa.RecordBatch,
    key: Decoder,
    value: Decoder,
    highest: int,
    now: int,
    rejections: Mapping[int, str],
) -> RecordChunk:
    rows = batch.num_rows
    keys, values = key.decode(batch.column("key")), value.decode(batch.column("value"))
    errors = bad_sides(keys, values)
    if rejections:
        for index in np.flatnonzero(np.isin(batch.column("offset").to_numpy(), list(rejections))).tolist():
            error = BadPayload(index, rejections[batch.column("offset")[index].as_py()])
            errors.setdefault(index, ("shape", error))
    is_good = np.ones(rows, dtype=bool)
    is_good[list(errors)] = False
    times = running_times(batch.column("timestamp"), highest, now)
    kafka = pa.StructArray.from_arrays(
        [
            pa.repeat(pa.scalar(source.topic), rows),
            pa.repeat(pa.scalar(partition, pa.int32()), rows),
            batch.column("offset"),
            _timestamps(batch.column("timestamp")),
            _timestamps(pa.array(times, pa.int64())),
            batch.column("headers").cast(HEADERS_TYPE),
        ],
        fields=list(KAFKA_TYPE),
    )
    records = record_batch(kafka, keys, values)
    orders = own_orders(source.topic, source.order, {"kafka": kafka, "key": keys.values, "value": values.values})
    if orders is not None:
        records = records.append_column(ORDER, orders)
    last_time, mark = int(times[-1]), mark_of(batch)
    arrivals = new_schemas(partition, batch.column("offset"), keys, values)
    if not errors:
        return RecordChunk(records, _no_rows(), last_time, mark, arrivals)
    bad = _bad_rows(kafka, batch, errors)
    return RecordChunk(records.filter(pa.array(is_good)), bad, last_time, mark, arrivals)


def new_schemas(partition: int, offsets: pa.Array, keys: DecodedBatch, values: DecodedBatch) -> tuple[NewSchema, ...]:
    """The writer schemas that came for the first time, with their places."""
    return tuple(
        NewSchema(side, partition, offsets[arrival.index].as_py(), arrival)
        for side, batch in (("key", keys), ("value", values))
        for arrival in batch.arrivals
    )


def bad_sides(keys: DecodedBatch, values: DecodedBatch) -> dict[int, tuple[str, BadPayload]]:
    """Row index → the side that could not be decoded, and the error. Only the key is named if both sides fail."""
    return {item.index: ("value", item) for item in values.bad} | {item.index: ("key", item) for item in keys.bad}


def record_batch(kafka: pa.Array, keys: DecodedBatch, values: DecodedBatch) -> pa.RecordBatch:
    """The columns of ``lake.raw_files.raw_schema``, bad records among them."""
    schema = raw_schema(keys.values.type, values.values.type)
    columns = {
        "kafka": kafka,
        "key": keys.values,
        "value": values.values,
        "key_schema_id": keys.schema_ids,
        "value_schema_id": values.schema_ids,
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def _no_rows() -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], item.type) for item in BAD_SCHEMA], schema=BAD_SCHEMA)


def _bad_rows(kafka: pa.Array, batch: pa.RecordBatch, errors: Mapping[int, tuple[str, BadPayload]]) -> pa.RecordBatch:
    index = pa.array(sorted(errors), pa.int64())
    return pa.RecordBatch.from_arrays(
        [
            kafka.take(index),
            batch.column("key").take(index),
            batch.column("value").take(index),
            pa.array([errors[i][0] for i in sorted(errors)], pa.string()),
            pa.array([errors[i][1].error for i in sorted(errors)], pa.string()),
            pc.add(batch.column("offset").take(index), pa.scalar(1, pa.int64())),
        ],
        schema=BAD_SCHEMA,
    )


def _timestamps(millis: pa.Array) -> pa.Array:
    return pc.multiply(millis, pa.scalar(1000, pa.int64())).cast(_TIME)


_SIDES = ("key", "value")


@dataclass(frozen=True)
class SchemaChange:
    """A writer schema with other columns than those before. ``schema_id`` is None for Connect's JSON; ``diff`` has a line
    a field; ``in_table``: its records are in the table (else in quarantine)."""

    side: str
    schema_id: int | None
    partition: int
    offset: int
    diff: tuple[str, ...]
    in_table: bool

    def __str__(self) -> str:
        name = f"{self.side} schema" + ("" if self.schema_id is None else f" id {self.schema_id}")
        changes = "; ".join(self.diff) + ("" if self.in_table else " (quarantined)")
        return f"{name}, from partition {self.partition}, offset {self.offset}: {changes}"


def known_ids(state: RawState | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The registry ids of a raw table's keys and values, in the order in which they came."""
    writers = state.writers if state else ()
    keys, values = (tuple(item.id for item in writers if item.side == side and item.id is not None) for side in _SIDES)
    return keys, values


def first_schemas(source: TopicSource, item: Input, schemas: Sequence[NewSchema]) -> list[NewSchema]:
    """The first schema, by partition and offset, of each side without a known schema. Only for ``quarantine``, else empty.

    The caller must read the batch again with these schemas as known, because a change needs a schema to compare with.
    """
    if item.on_schema_change != "quarantine":
        return []
    firsts: list[NewSchema] = []
    for side in _SIDES:
        side_schemas = _in_order(schemas, side)
        ids, type = getattr(source, f"{side}_schemas"), getattr(source, f"{side}_type")
        if not side_schemas or ids or (side_schemas[0].schema.schema_id is None and type is not None):
            continue
        if any(diff for _, diff, _ in _schema_steps(item, side_schemas, side, None)):
            firsts.append(side_schemas[0])
    return firsts


def with_schemas(source: TopicSource, firsts: Sequence[NewSchema]) -> TopicSource:
    """The source with these schemas as known."""
    for first in firsts:
        side, schema = first.side, first.schema
        ids = () if schema.schema_id is None else (schema.schema_id,)
        type = merge_types(getattr(source, f"{side}_type"), schema.type, side)
        source = replace(source, **{f"{side}_type": type, f"{side}_schemas": ids})
    return source


def schema_changes(
    item: Input, source: TopicSource, schemas: Sequence[NewSchema]
) -> tuple[tuple[WriterSchema, ...], tuple[SchemaChange, ...]]:
    """A batch's new known schemas, and its schema changes. ``source`` has the columns' types after the batch.

    Raises SchemaChanged if there is a change and the pipeline file says ``error``.
    """
    writers: list[WriterSchema] = []
    changes: list[SchemaChange] = []
    misfits: list[SchemaChange] = []
    for side in _SIDES:
        column = getattr(source, f"{side}_type")
        for new_schema, diff, in_table in _schema_steps(item, _in_order(schemas, side), side, column):
            number, partition, offset = new_schema.schema.schema_id, new_schema.partition, new_schema.offset
            if diff:
                changes.append(SchemaChange(side, number, partition, offset, diff, in_table))
                if not _merges(column, new_schema.schema.type):
                    misfits.append(changes[-1])
            if in_table:
                writers.append(WriterSchema(side, number, partition, offset, bool(diff), new_schema.schema.digest))
    if changes and item.on_schema_change == "error":
        first = min(changes, key=lambda change: (change.partition, change.offset))
        cure = "To take it, set on-schema-change: merge for this input (or quarantine, to put its records aside) and run again."
        if first in misfits:
            cure = f"Its records can only be put aside, by on-schema-change: quarantine. {KEPT_TYPE}."
        name = "" if first.schema_id is None else f" (id {first.schema_id})"
        raise SchemaChanged(
            f"topic {item.topic}, partition {first.partition}, offset {first.offset}: the writer's schema of the"
            f" {first.side}{name} is new: {'; '.join(first.diff)}. Nothing of this batch was committed. {cure}"
        )
    return tuple(writers), tuple(changes)


def with_lacking_fields(
    schema: pa.Schema, source: TopicSource, state: RawState | None, writers: Sequence[WriterSchema]
) -> pa.Schema:
    """A raw table's columns. Each field notes its default, and the writers' schemas without the field. The notes change if one of
    ``writers`` is new to the table.

    A schema that the registry no longer has is passed over. RegistryError if the registry can't be asked.
    """
    if source.registry is None:
        return schema
    schema_of = with_digests(Registry(source.registry).schema, state.digests if state else {})
    for side in {writer.side for writer in writers if writer.id is not None} & set(schema.names):
        known_ids, new_ids = (
            [writer.id for writer in side_writers if writer.side == side and writer.id is not None]
            for side_writers in (state.writers if state else (), writers)
        )
        # A registry counts its ids up. A batch has the new schemas by partition, which says nothing of their time.
        ids = [*known_ids, *sorted(new_ids)]
        column = schema.field(side)
        if len(ids) > 1:
            parts = [(number, _writer_of(schema_of, number)) for number in ids]
            # A schema before the others may have had the field with another default.
            is_whole = all(writer is not None for _, writer in parts)
            known_writers = {
                number: writer if is_whole else Writer(writer.type, {})
                for number, writer in parts
                if writer is not None
            }
            kind = with_lacking(column.type, known_writers)
            schema = schema.set(schema.get_field_index(side), column.with_type(kind))
    return schema


def notes_of(schemas: Sequence[NewSchema]) -> dict[str, Note]:
    """Side → what all schemas that came say of the whole key or value."""
    side_notes: dict[str, Note] = {}
    for new_schema in schemas:
        note = optional(new_schema.schema.note)
        side_notes[new_schema.side] = (
            common_note(side_notes[new_schema.side], note) if new_schema.side in side_notes else note
        )
    return side_notes


def with_side_notes(schema: pa.Schema, table: pa.Schema | None, notes: Mapping[str, Note]) -> pa.Schema:
    """A raw table's columns; ``key`` and ``value`` have the notes, as far as the table says the same of the records before.

    ``table``: the table's columns before the batch; None if there is no table.
    """
    for side in _SIDES:
        if side in schema.names:
            column = schema.field(side)
            side_notes = [notes[side]] if side in notes else []
            if table is not None and side in table.names:
                column = column.with_metadata(table.field(side).metadata)
                side_notes.append(connect_note_of(column))
            if side_notes:
                schema = schema.set(
                    schema.get_field_index(side), with_connect_note(column, reduce(common_note, side_notes))
                )
    return schema


def _writer_of(schema_of: Callable[[int], str], number: int) -> Writer | None:
    """A schema; None if the registry no longer has the schema, or has another or no Avro schema by that id."""
    try:
        text = schema_of(number)
        return Writer(arrow_type(text), field_defaults(text))
    except (SchemaError, SchemaUnknown):
        return None


def _schema_steps(
    item: Input, side_schemas: Sequence[NewSchema], side: str, column: pa.DataType | None
) -> Iterator[tuple[NewSchema, tuple[str, ...], bool]]:
    """Each new schema of a side once, in order, with its differences from the known schemas, and whether it becomes known.

    ``column``: the column's type after the batch.
    """
    types = side_schemas[0].schema.before if side_schemas else ()
    ids: set[int] = set()
    for new_schema in side_schemas:
        schema = new_schema.schema
        if schema.schema_id in ids:
            continue
        type, diff = _change(types, schema.type, side, of_table=schema.schema_id is None)
        if schema.schema_id is not None:
            ids.add(schema.schema_id)
        elif types and not diff:
            continue
        in_table = _merges(column, schema.type) and (not diff or item.on_schema_change == "merge")
        if in_table:
            types = (*types, type)
        yield new_schema, diff, in_table


def _change(
    types: tuple[pa.DataType, ...], type: pa.DataType, side: str, *, of_table: bool
) -> tuple[pa.DataType, tuple[str, ...]]:
    """The type to know from now on, and what it changes. ``of_table``: types are the table's, not a writer's."""
    if not of_table or not types:
        return type, tuple(type_differences(types[-1], type, side)) if is_change(types, type) else ()
    if not _merges(types[-1], type):
        return types[-1], tuple(type_differences(types[-1], type, side))
    merged_type = merge_types(types[-1], type, side)
    return merged_type, tuple(type_differences(types[-1], merged_type, side))


def _merges(column: pa.DataType | None, type: pa.DataType) -> bool:
    try:
        merge_types(column, type)
    except SchemaError:
        return False
    return True


def _in_order(schemas: Sequence[NewSchema], side: str) -> list[NewSchema]:
    """A side's new schemas by partition and offset."""
    new = (new_schema for new_schema in schemas if new_schema.side == side and new_schema.schema.is_new)
    return sorted(new, key=lambda new_schema: (new_schema.partition, new_schema.offset))
