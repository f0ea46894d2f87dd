"""The read half of ingest: a range of offsets becomes typed columns. Runs inside a Spark task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from zync_assets.codecs.decode import BadRecord, Decoded, Decoder, make_decoder
from zync_assets.codecs.schema_diff import Arrival
from zync_assets.compute import pc
from zync_assets.errors import SchemaError
from zync_assets.kafka.reader import read_range
from zync_assets.kafka.registry import Registry
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import RegistryConfig, SideFormat
from zync_assets.records import BAD_SCHEMA, HEADERS_TYPE, KAFKA_TYPE, raw_schema

_TIME = pa.timestamp("us", "UTC")


@dataclass(frozen=True)
class Source:
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
    closed: bool = False
    """Whether records of a schema with other columns go into quarantine."""


@dataclass(frozen=True)
class Arrived:
    """A writer schema that came for the first time, and the first record that has it."""

    side: str
    partition: int
    offset: int
    schema: Arrival


@dataclass(frozen=True)
class Chunk:
    """Some records of one partition, in offset order: those that could be decoded (columns of ``records.raw_schema``),
    and those that could not (``records.BAD_SCHEMA``). ``reached``: the time of the last record, milliseconds since the
    epoch."""

    records: pa.RecordBatch
    bad: pa.RecordBatch
    reached: int
    arrivals: tuple[Arrived, ...] = ()


def read_chunks(
    source: Source, part: OffsetRange, now: int, refused: Mapping[int, str] | None = None, *, reached: int = 0
) -> Iterator[Chunk]:
    """All records of a range, decoded. ``now``: the time of ingest, milliseconds since the epoch; ``refused``: offset →
    why that record counts as bad (stage ``shape``); ``reached``: the time of the record before the range, so that times
    run on from there.

    Raises what ``read_range`` and the registry raise; a record that can't be decoded raises nothing.
    """
    key, value = make_decoders(source)
    for batch in read_range(source.kafka, source.topic, part.partition, part.first, part.end):
        chunk = _decode(source.topic, part.partition, batch, key, value, reached, now, refused or {})
        reached = chunk.reached
        yield chunk


def make_decoders(source: Source) -> tuple[Decoder, Decoder]:
    """The decoders of keys and of values. SchemaError if the pipeline file's types don't fit the raw table's."""
    registry = Registry(source.registry) if source.registry else None
    schema_of = registry.schema if registry else _no_registry

    def decoder(side: str, form: SideFormat, type: pa.DataType | None, known: tuple[int, ...]) -> Decoder:
        try:
            return make_decoder(form, schema_of, type, known=known, closed=source.closed)
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
    topic: str,
    partition: int,
    batch: pa.RecordBatch,
    key: Decoder,
    value: Decoder,
    highest: int,
    now: int,
    refused: Mapping[int, str],
) -> Chunk:
    rows = batch.num_rows
    keys, values = key.decode(batch.column("key")), value.decode(batch.column("value"))
    errors = bad_sides(keys, values)
    if refused:
        for index in np.flatnonzero(np.isin(batch.column("offset").to_numpy(), list(refused))).tolist():
            error = BadRecord(index, refused[batch.column("offset")[index].as_py()])
            errors.setdefault(index, ("shape", error))
    good = np.ones(rows, dtype=bool)
    good[list(errors)] = False
    times = running_times(batch.column("timestamp"), highest, now)
    kafka = pa.StructArray.from_arrays(
        [
            pa.repeat(pa.scalar(topic), rows),
            pa.repeat(pa.scalar(partition, pa.int32()), rows),
            batch.column("offset"),
            _timestamps(batch.column("timestamp")),
            _timestamps(pa.array(times, pa.int64())),
            batch.column("headers").cast(HEADERS_TYPE),
        ],
        fields=list(KAFKA_TYPE),
    )
    records = record_batch(kafka, keys, values)
    reached = int(times[-1])
    arrivals = arrived(partition, batch.column("offset"), keys, values)
    if not errors:
        return Chunk(records, _no_rows(), reached, arrivals)
    return Chunk(records.filter(pa.array(good)), _bad_rows(kafka, batch, errors), reached, arrivals)


def arrived(partition: int, offsets: pa.Array, keys: Decoded, values: Decoded) -> tuple[Arrived, ...]:
    """The writer schemas that came for the first time, with their places."""
    return tuple(
        Arrived(side, partition, offsets[found.index].as_py(), found)
        for side, decoded in (("key", keys), ("value", values))
        for found in decoded.arrivals
    )


def bad_sides(keys: Decoded, values: Decoded) -> dict[int, tuple[str, BadRecord]]:
    """Row index → the side that could not be decoded, and the error. Only the key is named if both sides fail."""
    return {item.index: ("value", item) for item in values.bad} | {item.index: ("key", item) for item in keys.bad}


def record_batch(kafka: pa.Array, keys: Decoded, values: Decoded) -> pa.RecordBatch:
    """The columns of ``records.raw_schema``, bad records among them."""
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


def _bad_rows(kafka: pa.Array, batch: pa.RecordBatch, errors: Mapping[int, tuple[str, BadRecord]]) -> pa.RecordBatch:
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
