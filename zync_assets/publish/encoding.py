"""Staged rows as the records that Kafka is to hold: keys, values and headers.

Publish sends these records, and publish and the checks compare the topic with them. The headers are those that the rule
made, then the places of the raw records. The encoding uses the output schema that the pool keeps for each row. It never uses
the pipeline file, which may have changed since.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from zync_assets.codecs.arrays import list_of, pc, with_type
from zync_assets.codecs.avro.decoder import HEADER
from zync_assets.codecs.avro.schema import subject_name
from zync_assets.codecs.batches import EncodedBatch
from zync_assets.codecs.dispatch import Encoder, make_encoder
from zync_assets.codecs.fields import topic_type_of
from zync_assets.errors import LakeError, RegistryError, RegistryUnavailable, SchemaError, SchemaUnknown
from zync_assets.etl.rules.output_schemas import (
    FieldPath,
    is_empty,
    nullable_groups,
    parse_group,
    required_fields,
    schema_groups,
    without,
)
from zync_assets.kafka.registry import Registry
from zync_assets.lake import staging, storage
from zync_assets.lake.log import DataFile
from zync_assets.lake.publication import PublishState, WrittenSchema
from zync_assets.lake.raw_files import HEADERS_TYPE
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange, place_text
from zync_assets.pipeline import SOURCE_HEADER, RegistryConfig

BATCH_RECORDS = 20_000

MOST_SOURCES = 1000
"""The most raw records that the headers of a record name. A broker takes no record above ``max.message.bytes``, 1 MB."""

_ENTRY = HEADERS_TYPE.value_type

ENCODED_SCHEMA = pa.schema(
    [("offset", pa.int64()), ("key", pa.binary()), ("value", pa.binary()), ("headers", HEADERS_TYPE)]
)
"""A record as Kafka is to hold it; ``headers`` is null where there are none."""

Row: TypeAlias = tuple[Any, ...]
"""A record with the fields of ENCODED_SCHEMA, as plain values."""
AlikeIds: TypeAlias = Callable[[str, int, int], bool]
"""Side, id of a staged row's schema, id that stands in Kafka → whether both mean one schema."""

NO_ID = 0
"""In place of a registry's id, before a schema is registered. Every id takes four bytes."""


@dataclass(frozen=True)
class SideSchema:
    """How one side of a row is encoded; ``schema`` and ``schema_id`` are None where the side is always null."""

    format: str
    schema: str | None
    schema_id: int | None
    subject: str
    """The registry's subject of an Avro schema."""
    has_lake_names: bool = False
    """Whether fields have other names in the lake than in the schema."""


@dataclass(frozen=True)
class RowSchema:
    """The encoding of a row. ``provenance``: headers name the raw records behind the row."""

    key: SideSchema
    value: SideSchema
    provenance: bool


@dataclass(frozen=True)
class StagedTopic:
    """The picklable facts that a task needs to encode the rows of one output topic."""

    topic: str
    uri: str
    files: tuple[DataFile, ...]
    schemas: Mapping[str, RowSchema]
    """By fingerprint."""
    registry: Registry | None = field(repr=False)


@dataclass(frozen=True)
class Payloads:
    """Rows as they are sent: ``keys``, ``values`` and ``headers``, and why some rows can't be sent, by index."""

    keys: pa.Array
    values: pa.Array
    headers: pa.Array
    errors: Mapping[int, str]

    @property
    def columns(self) -> list[pa.Array]:
        return [self.keys, self.values, self.headers]


def staged_topic(state: StagingState, topic: str, registry: RegistryConfig | None) -> StagedTopic:
    """An output topic of a staging pool, its schemas registered under the subjects that its rules had (``subject_name``).

    Raises RegistryError if the registry refuses one.
    """
    client = Registry(registry) if registry else None
    schemas: dict[str, RowSchema] = {}
    rows = {name: row_schema(topic, text) for name, (of, text) in state.head.schemas.items() if of == topic}
    # A registry takes a schema that reads the records of those before: what is required at first may be null later.
    for name, whole in sorted(rows.items(), key=lambda item: -_required_count(item[1])):
        key, value = (registered(client, topic, side) for side in (whole.key, whole.value))
        schemas[name] = replace(whole, key=key, value=value)
    return StagedTopic(topic, state.table.uri, tuple(state.output_files(topic)), schemas, client)


def _required_count(row: RowSchema) -> int:
    return sum(len(_required_paths(side.schema)) for side in (row.key, row.value))


@lru_cache(maxsize=1024)
def _required_paths(schema: str | None) -> tuple[FieldPath, ...]:
    return () if schema is None else tuple(required_fields(json.loads(schema)))


def encoded_rows(
    outputs: StagedTopic, part: OffsetRange, schemas: set[WrittenSchema] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of a range in order, as ENCODED_SCHEMA. ``schemas``: gets the schemas that the rows have, with their ids.

    Raises LakeError for a gap in the numbering, or a file that can't be read, and SchemaError for a value that can't be encoded.
    """
    upcoming, place = part.first, place_text(outputs.topic, part.partition)

    @cache
    def schema_of(group: str) -> RowSchema:
        schema = _row_schema(outputs, group)
        if schemas is not None:
            schemas.update(_written_schemas(schema))
        return schema

    for batch in _rows(outputs, part):
        offsets = pc.struct_field(batch.column("kafka"), "offset")
        result = payloads(outputs.topic, batch, schema_of)
        if result.errors:
            worst = min(result.errors)
            raise SchemaError(
                f"{place}, offset {offsets[worst].as_py()}: {result.errors[worst]}. Nothing from this offset on was"
                " published; the record is staged."
            )
        if offsets[0].as_py() != upcoming or offsets[-1].as_py() != upcoming + len(offsets) - 1:
            raise LakeError(
                f"{place}: staging holds offset {offsets[0].as_py()} where {upcoming} should be. Nothing more is"
                " published. Restore the table to a version before that was so."
            )
        upcoming += len(offsets)
        yield pa.RecordBatch.from_arrays([offsets, *result.columns], schema=ENCODED_SCHEMA)
    if upcoming != part.end:
        raise LakeError(
            f"{place}: staging ends at offset {upcoming} and should reach {part.end}. Restore the table to a version"
            " before that was so."
        )


def _written_schemas(schema: RowSchema) -> Iterator[WrittenSchema]:
    for name, side in (("key", schema.key), ("value", schema.value)):
        if side.schema is not None and side.schema_id is not None:
            yield WrittenSchema(name, side.schema_id, side.schema)


def alike_ids(outputs: StagedTopic, schemas: Collection[WrittenSchema], publish_state: PublishState) -> AlikeIds:
    """A function that says whether a schema id in Kafka and the schema id of a staged row name the same schema.

    The ids name the same schema if the pool published the schema under the id in Kafka (the registry may have been created
    again since), or if the registry has the schema under both ids. ``schemas``: see ``encoded_rows``.
    """

    @cache
    def alike(side: str, staged_id: int, topic_id: int) -> bool:
        texts = [item.schema for item in schemas if (item.side, item.id) == (side, staged_id)]
        return any(
            publish_state.has_schema(WrittenSchema(side, topic_id, text)) or _has(outputs.registry, topic_id, text)
            for text in texts
        )

    return alike


def _has(registry: Registry | None, id: int, schema: str) -> bool:
    if registry is None:
        return False
    try:
        return json.loads(registry.schema(id)) == json.loads(schema)
    except (SchemaError, SchemaUnknown):
        return False


def is_same(row: Row | None, other_row: Row | None, alike: AlikeIds) -> bool:
    """Whether two records (the fields of ENCODED_SCHEMA) are the same but for ids of one schema."""
    if row is None or other_row is None or row == other_row:
        return row == other_row
    sides = zip(("key", "value"), row[1:3], other_row[1:3], strict=True)
    return (row[0], row[3]) == (other_row[0], other_row[3]) and all(_is_same_side(*side, alike) for side in sides)


def _is_same_side(side: str, payload: bytes | None, other_payload: bytes | None, alike: AlikeIds) -> bool:
    if payload is None or other_payload is None or payload == other_payload:
        return payload == other_payload
    if min(len(payload), len(other_payload)) < HEADER or payload[HEADER:] != other_payload[HEADER:]:
        return False
    has_frame = payload[:1] == other_payload[:1] == b"\0"
    return has_frame and alike(side, int.from_bytes(payload[1:HEADER]), int.from_bytes(other_payload[1:HEADER]))


def first_difference(
    staged_batches: Iterator[pa.RecordBatch],
    topic_batches: Iterator[pa.RecordBatch],
    *,
    gaps_until: int = 0,
    alike: AlikeIds = lambda *_: False,
) -> tuple[int | None, int]:
    """Compare staged rows with Kafka's records (columns of ENCODED_SCHEMA): the first offset at which they differ (None:
    they don't) and how many are equal before it.

    ``gaps_until``: below this offset Kafka may lack records, of which it keeps a key's last; ``alike``: see ``alike_ids``.
    """
    staged_rows, equal = _single_rows(staged_batches), 0
    for topic_row in _single_rows(topic_batches):
        staged_row = next(staged_rows, None)
        while staged_row is not None and staged_row[0] < min(topic_row[0], gaps_until):
            staged_row = next(staged_rows, None)
        if not is_same(staged_row, topic_row, alike):
            return min(row[0] for row in (staged_row, topic_row) if row is not None), equal
        equal += 1
    surplus = next((row for row in staged_rows if row[0] >= gaps_until), None)
    return (None if surplus is None else surplus[0]), equal


def _single_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[Row]:
    for batch in batches:
        yield from zip(*(batch.column(name).to_pylist() for name in ENCODED_SCHEMA.names), strict=True)


def row_schema(topic: str, text: str) -> RowSchema:
    """An output schema as the pool keeps it (``etl.output_types.OutputType.texts``). Its Avro sides have the id NO_ID."""
    sides = json.loads(text)
    key, value = (_side(topic, side, sides[side]) for side in ("key", "value"))
    return RowSchema(key, value, sides.get("provenance", False))


def _side(topic: str, side: str, entry: Mapping[str, Any]) -> SideSchema:
    form, schema = str(entry["format"]), entry["schema"]
    if schema is None:
        return SideSchema(form, None, None, "")
    strategy, text, has_lake_names = entry.get("subject", "topic"), json.dumps(schema), entry.get("renamed", False)
    if form != "avro":
        return SideSchema(form, text, None, "", has_lake_names)
    return SideSchema(form, text, NO_ID, subject_name(strategy, topic, side, text), has_lake_names)


def registered(client: Registry | None, topic: str, side: SideSchema) -> SideSchema:
    """The side with the id that the registry has for its Avro schema; another side as it is. Raises RegistryError."""
    if side.format != "avro" or side.schema is None:
        return side
    if client is None:
        raise SchemaError(
            f"topic {topic}, subject {side.subject}: it is Avro and the pipeline has no registry. Add registry: url."
        )
    try:
        return replace(side, schema_id=client.register(side.subject, side.schema))
    except RegistryUnavailable:
        raise
    except RegistryError as error:
        raise RegistryError(
            f"topic {topic}: its schema was not taken for subject {side.subject}: {error}. Nothing that needs it was"
            " published. Cure the cause and run again. If the schema is incompatible: what is staged keeps its schema. Set the"
            " subject's compatibility to one that allows it, or change the rules, and begin anew with another topic and pool."
        ) from None


def without_fields(whole: RowSchema, paths: Collection[str]) -> RowSchema:
    """The schema of rows that leave out some fields: their rule's, less these."""
    if whole.value.schema is None or not paths:
        return whole
    return replace(
        whole,
        value=replace(
            whole.value, schema=without(whole.value.schema, "value", paths, renamed=whole.value.has_lake_names)
        ),
    )


def _row_schema(outputs: StagedTopic, group: str) -> RowSchema:
    name, paths = parse_group(group)
    if name not in outputs.schemas:
        raise LakeError(
            f"topic {outputs.topic}: the pool has no output schema {name}. Restore the table to a version before that was so."
        )
    whole = outputs.schemas[name]
    schema = without_fields(whole, paths)
    return (
        whole if schema is whole else replace(schema, value=registered(outputs.registry, outputs.topic, schema.value))
    )


def _rows(outputs: StagedTopic, part: OffsetRange) -> Iterator[pa.RecordBatch]:
    sides = staging.key_column(outputs.topic), staging.value_column(outputs.topic)
    names = ["kafka.offset", "schema", "left_out", *sides, staging.HEADERS_COLUMN]
    if any(item.provenance for item in outputs.schemas.values()):
        names.append("source")
    for item in outputs.files:
        if item.partition != part.partition or (item.last or 0) < part.first or (item.first or 0) >= part.end:
            continue
        for batch in storage.read_parts(storage.join(outputs.uri, item.path), BATCH_RECORDS, names):
            offsets = pc.struct_field(batch.column("kafka"), "offset")
            inside = pc.and_(pc.greater_equal(offsets, part.first), pc.less(offsets, part.end))
            # A file has its rows in order. The caller refuses rows that are not.
            places = pc.indices_nonzero(inside).to_numpy()
            if len(places):
                yield batch.slice(places[0], places[-1] + 1 - places[0])


def payloads(topic: str, rows: pa.RecordBatch, schema_of: Callable[[str], RowSchema]) -> Payloads:
    """Rows of the staging table as Kafka is to hold them. ``schema_of``: a group (``schema_groups``) → its schema."""
    groups = _with_nulls(topic, rows, schema_groups(rows.column("schema"), rows.column("left_out")), schema_of)
    parts: list[Payloads] = []
    order: list[np.ndarray] = []
    sides = [staging.key_column(topic), staging.value_column(topic)]
    rows = rows.select([name for name in (*sides, staging.HEADERS_COLUMN, "source") if name in rows.schema.names])
    for group in pc.unique(groups).to_pylist():
        places = pc.indices_nonzero(pc.equal(groups, group))
        group_rows = rows if len(places) == rows.num_rows else rows.take(places)
        parts.append(_payloads(topic, schema_of(group), group_rows))
        order.append(places.to_numpy())
    if len(parts) == 1:
        return parts[0]
    back = np.empty(rows.num_rows, np.int64)
    back[np.concatenate(order)] = np.arange(rows.num_rows)
    columns = (pa.concat_arrays(column) for column in zip(*(part.columns for part in parts), strict=True))
    keys, values, headers = (column.take(pa.array(back)) for column in columns)
    errors = {
        int(at[index]): text for at, part in zip(order, parts, strict=True) for index, text in part.errors.items()
    }
    return Payloads(keys, values, headers, errors)


def _with_nulls(topic: str, rows: pa.RecordBatch, groups: pa.Array, schema_of: Callable[[str], RowSchema]) -> pa.Array:
    """The groups, those apart whose values have a null that their schema has none for."""
    name = staging.value_column(topic)
    for group in pc.unique(groups).to_pylist() if name in rows.schema.names else ():
        if paths := _required_paths(schema_of(group).value.schema):
            groups = nullable_groups(groups, group, rows.column(name), paths, "value")
    return groups


def _payloads(topic: str, schema: RowSchema, rows: pa.RecordBatch) -> Payloads:
    headers = rows.column(staging.HEADERS_COLUMN) if staging.HEADERS_COLUMN in rows.schema.names else None
    source = rows.column("source") if schema.provenance else None
    keys = _encode_side(schema.key, rows, staging.key_column(topic))
    values = _encode_side(schema.value, rows, staging.value_column(topic))
    errors = {failure.index: f"its value can't be encoded: {failure.error}" for failure in values.bad}
    errors |= {failure.index: f"its key can't be encoded: {failure.error}" for failure in keys.bad}
    return Payloads(keys.payloads, values.payloads, sent_headers(headers, source, rows.num_rows), errors)


def sent_headers(headers: pa.Array | None, source: pa.Array | None, count: int) -> pa.Array:
    """One array of HEADERS_TYPE, null where a row has no header.

    ``headers``: the staging table's column; ``source``: the raw records (structs of topic, partition, offset) where each is
    to be a header: JSON, ``{"topic":"shop.orders","partition":0,"offset":7}``. A row of more raw records than MOST_SOURCES has
    the last of them, and before them a header with the number of the others, ``{"more":9000}``.
    """
    parts: list[tuple[np.ndarray, pa.Array]] = []
    if headers is not None and headers.null_count < count:
        parts.append((_lengths(headers), headers.flatten().cast(_ENTRY)))
    if source is not None:
        parts.append(_source_entries(source))
    if not parts:
        return pa.nulls(count, HEADERS_TYPE)
    lengths = np.sum([part for part, _ in parts], axis=0)
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    entries = pa.concat_arrays([part for _, part in parts])
    if len(parts) > 1:
        rows = np.concatenate([np.repeat(np.arange(count), part) for part, _ in parts])
        entries = entries.take(pa.array(np.argsort(rows, kind="stable")))
    return list_of(HEADERS_TYPE, offsets, entries, lengths > 0)


def _lengths(lists: pa.Array) -> np.ndarray:
    return pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)


def _source_entries(source: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """The number of headers of each row, and the headers of all rows."""
    lengths, places = _lengths(source), source.flatten()
    # A topic's name has no character that JSON would escape.
    topic, partition, offset = (
        pc.struct_field(places, name).cast(pa.string()) for name in ("topic", "partition", "offset")
    )
    texts = pc.binary_join_element_wise('{"topic":"', topic, '","partition":', partition, ',"offset":', offset, "}", "")
    if (lengths > MOST_SOURCES).any():
        over = np.maximum(lengths - MOST_SOURCES, 0)
        at = np.arange(len(places)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        # The last of the raw records that are left out gives its place to their number.
        is_last, is_kept = at == np.repeat(over, lengths) - 1, at >= np.repeat(over, lengths) - 1
        counts = pc.binary_join_element_wise('{"more":', pa.array(np.repeat(over, lengths)).cast(pa.string()), "}", "")
        texts = pc.if_else(pa.array(is_last), counts, texts).filter(pa.array(is_kept))
        lengths = lengths - np.maximum(over - 1, 0)
    name = pa.repeat(pa.scalar(SOURCE_HEADER), len(texts))
    return lengths, pa.StructArray.from_arrays([name, texts.cast(pa.binary())], fields=list(_ENTRY))


def _encode_side(side: SideSchema, rows: pa.RecordBatch, column: str) -> EncodedBatch:
    if side.schema is None or column not in rows.schema.names:
        return EncodedBatch(pa.nulls(rows.num_rows, pa.binary()), ())
    return encode_values(side, rows.column(column))


def encode_values(side: SideSchema, values: pa.Array) -> EncodedBatch:
    """The payloads of staged keys or values. ``side`` has a schema."""
    assert side.schema is not None
    if side.has_lake_names:
        values = with_type(values, topic_type_of(values.type))
    if pa.types.is_struct(values.type) and is_empty(side.schema):
        # No field is left: a record without fields, which the codecs have as a boolean.
        values = pc.if_else(values.is_valid(), True, pa.scalar(None, pa.bool_()))
    return encoder_of(side).encode(values)


@lru_cache(maxsize=256)
def encoder_of(side: SideSchema) -> Encoder:
    """The encoder of a side's values. ``side`` has a schema."""
    return make_encoder(side.format, side.schema, side.schema_id)  # type: ignore[arg-type]
