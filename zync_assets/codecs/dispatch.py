"""The codecs by format: Kafka payloads to columns, and columns to Kafka payloads.

Pure: a column of bytes becomes a typed column and errors, and a typed column becomes a column of bytes and errors.

A payload that can't be decoded does not affect other payloads: its value is null, and ``DecodedBatch.bad`` has its error. An
outage of the registry is no property of a record, and is raised.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from zync_assets.codecs.arrays import is_valid, isolate, list_of, list_parts, map_entries, pc, struct_of
from zync_assets.codecs.avro.column_writer import encode_columns
from zync_assets.codecs.avro.decoder import AvroDecoder, header
from zync_assets.codecs.avro.schema import Node, parse
from zync_assets.codecs.avro.types import lake_type, plain_type
from zync_assets.codecs.avro.values import from_lake, row_writer
from zync_assets.codecs.batches import DecodedBatch, EncodedBatch, bad_records, is_native
from zync_assets.codecs.connect.codec import ConnectDecoder, ConnectEncoder
from zync_assets.codecs.connect.schema import from_avro
from zync_assets.codecs.evolution import check_writable, conform, merge_types, project
from zync_assets.codecs.fields import fields_of, original, places, unit_factor
from zync_assets.codecs.json.columns import columns_reader, json_texts
from zync_assets.codecs.spark_types import original_name, parse_ddl, spark_ddl
from zync_assets.errors import SchemaError
from zync_assets.pipeline import Format, SideFormat


class Decoder(Protocol):
    """Decodes the keys or the values of one topic."""

    @property
    def type(self) -> pa.DataType:
        """The lake column's type so far: the one given, with every writer schema seen; null if nothing is known."""
        ...

    def decode(self, payloads: pa.Array) -> DecodedBatch:
        """Decode binary ``payloads`` (nulls allowed). May widen ``type``; the values are of the widened type."""
        ...


def make_decoder(
    side: SideFormat,
    schema_of: Callable[[int], str],
    target: pa.DataType | None,
    name: str = "value",
    *,
    native: bool = True,
    schema_ids: Sequence[int] = (),
    fixed_schema: bool = False,
) -> Decoder:
    """A decoder for one side of a topic.

    ``schema_of``: registry id → the Avro schema (one JSON document). If it raises SchemaUnknown or SchemaError, the records
    with the id are bad; any other error, such as an outage, passes through. ``target``: the lake column's present type, None
    without a column. ``name``: the column's name in errors. ``native=False`` reads Avro with fastavro alone. ``schema_ids``:
    the registry ids of the earlier schemas, in order; ``DecodedBatch.arrivals`` reports other schemas. ``fixed_schema``:
    records whose schema changes the known columns are bad, unless no schema is known yet. Raises SchemaError if the format's
    type can't go into ``target``.
    """
    if side.format == "avro":
        return AvroDecoder(schema_of, target, name, native, schema_ids, fixed_schema)
    if side.format == "connect-json":
        return ConnectDecoder(target, None if side.ddl is None else parse_ddl(side.ddl), fixed_schema)
    if side.format == "json" and side.ddl is not None:
        type = parse_ddl(side.ddl)
        return _PlainDecoder(merge_types(target, type, name), columns_reader(type))
    if side.format in ("json", "string"):
        return _PlainDecoder(merge_types(target, pa.string(), name), _text)
    return _PlainDecoder(merge_types(target, pa.binary(), name), lambda payloads: (payloads.cast(pa.binary()), {}))


@dataclass(frozen=True)
class _PlainDecoder:
    """For formats that have one type and no schema ids."""

    type: pa.DataType
    read: Callable[[pa.Array], tuple[pa.Array, dict[int, str]]]

    def decode(self, payloads: pa.Array) -> DecodedBatch:
        values, errors = self.read(payloads)
        values, misfits = isolate(values, lambda part: conform(part, self.type), ValueError)
        return DecodedBatch(values, pa.nulls(len(payloads), pa.int32()), bad_records({**misfits, **errors}))


def _text(payloads: pa.Array) -> tuple[pa.Array, dict[int, str]]:
    values, errors = isolate(payloads, lambda part: part.cast(pa.string()), ValueError)
    return values, dict.fromkeys(errors, "not UTF-8")


class Encoder(Protocol):
    """Encodes the keys or the values of one topic, by one schema."""

    @property
    def overhead(self) -> int:
        """The bytes of a payload that are not its value: the schema id of Avro, or the schema text of Connect JSON."""
        ...

    def encode(self, values: pa.Array) -> EncodedBatch:
        """Encode a column. Nulls stay null. SchemaError if the column's type is not one that the schema can take."""
        ...


def make_encoder(format: Format, schema: str | None, schema_id: int | None, *, native: bool = True) -> Encoder:
    """An encoder for one side of a topic.

    ``schema``: Avro JSON, needed for ``avro`` and ``connect-json``, possible for ``json``: of a struct column only the
    fields that the schema has are written, in its order, so that a partial update stays partial. ``schema_id``: the
    registry's id, which precedes each Avro datum; None: bare datums. ``native=False`` writes Avro with fastavro alone.
    """
    if format == "avro":
        if schema is None:
            raise SchemaError("an Avro output needs a schema")
        prefix = b"" if schema_id is None else header(schema_id)
        return _AvroEncoder(parse(schema), prefix, native)
    if format == "connect-json":
        if schema is None:
            raise SchemaError("a Connect output needs a schema")
        node = parse(schema)
        return ConnectEncoder(json.dumps(from_avro(node), separators=(",", ":")), node)
    if format == "json":
        node = None if schema is None else parse(schema)
        if node is not None and node.kind == "record" and not node.fields:
            return _PlainEncoder(lambda values: pc.if_else(values.is_valid(), b"{}", pa.scalar(None, pa.binary())))
        type = None if node is None else lake_type(node)
        return _PlainEncoder(lambda values: json_texts(values if type is None else _projection(values, type)))
    if format == "string":
        return _PlainEncoder(_text_bytes)
    return _PlainEncoder(_raw)


@dataclass(frozen=True)
class _AvroEncoder:
    node: Node
    prefix: bytes
    native: bool

    @property
    def overhead(self) -> int:
        return len(self.prefix)

    def encode(self, values: pa.Array) -> EncodedBatch:
        type = lake_type(self.node)
        check_writable(values.type, type)
        write = self._columns if self.native and is_native(self.node) else self._rows
        payloads, errors = isolate(values, lambda part: write(from_lake(self.node, conform(part, type))), ValueError)
        return EncodedBatch(payloads, bad_records(errors))

    def _columns(self, plain: pa.Array) -> pa.Array:
        return encode_columns(self.node, plain, self.prefix)

    def _rows(self, plain: pa.Array) -> pa.Array:
        assert plain.type == plain_type(self.node)
        write = row_writer(self.node)
        payloads = [None if value is None else self.prefix + write(value) for value in plain.to_pylist()]
        return pa.array(payloads, pa.binary())


@dataclass(frozen=True)
class _PlainEncoder:
    write: Callable[[pa.Array], pa.Array]
    overhead: int = 0

    def encode(self, values: pa.Array) -> EncodedBatch:
        payloads, errors = isolate(values, self.write, ValueError)
        return EncodedBatch(payloads, bad_records(errors))


def _projection(values: pa.Array, type: pa.DataType) -> pa.Array:
    check_writable(values.type, type)
    return conform(values, project(type, values.type))


def narrowed(values: pa.Array, target: pa.DataType, column: pa.DataType) -> pa.Array:
    """The values of one writer in a column, with the writer's types and units. A column may have a wider type and a finer unit
    than its writer (``evolution``). An encoder takes numbers for ones of the writer's unit.

    ``values``: under the names of the lake or of the topic; ``target``: the lake's type of the writer's schema. Fields that
    ``target`` lacks stay as they are. ``column``: the column's type, whose notes have the units of its numbers. ValueError
    (pyarrow's) if a value is none of the writer's type.
    """
    kinds = pa.types
    if kinds.is_struct(values.type) and kinds.is_struct(target):
        return _narrowed_fields(values, target, column)
    if kinds.is_list(values.type) and kinds.is_list(target) and kinds.is_list(column):
        offsets, items = list_parts(values)
        items = narrowed(items, target.value_type, column.value_type)
        return list_of(pa.list_(items.type), offsets, items, is_valid(values))
    if kinds.is_map(values.type) and kinds.is_map(target) and kinds.is_map(column):
        offsets, entries = list_parts(values)
        keys, items = entries.flatten()
        items = narrowed(items, target.item_type, column.item_type)
        type = pa.map_(keys.type, items.type)
        return list_of(type, offsets, map_entries(type, keys, items), is_valid(values))
    return values.cast(target) if kinds.is_integer(target) else values


def _narrowed_fields(values: pa.StructArray, target: pa.DataType, column: pa.DataType) -> pa.Array:
    whole_column = column if pa.types.is_struct(column) else values.type
    columns = {original(item): item for item in fields_of(whole_column)}
    # A writer may have renamed a field: the column then names it among its other names.
    places_of_targets = zip(fields_of(target), places(whole_column, target), strict=True)
    targets = {original(whole_column.field(at)): own for own, at in places_of_targets if at is not None}
    fields: list[pa.Field] = []
    children: list[pa.Array] = []
    for item, child in zip(fields_of(values.type), values.flatten(), strict=True):
        name = item.name if item.name in columns else original_name(item.name)
        own = targets.get(name)
        if own is not None:
            whole = columns[name]
            item = item if own.name in (item.name, name) else item.with_name(own.name)
            factor = unit_factor(whole, own)
            if factor not in (1, None):
                child = pc.divide(child, pa.scalar(factor, child.type))
            child = narrowed(child, own.type, whole.type)
        fields.append(item.with_type(child.type))
        children.append(child)
    return struct_of(pa.struct(fields), children, len(values), is_valid(values))


def has_fields(type: pa.DataType, target: pa.DataType) -> bool:
    """Whether a type has every field of another type."""
    kinds = pa.types
    if kinds.is_struct(target):
        field_types = {item.name: item.type for item in type} if kinds.is_struct(type) else {}
        return all(item.name in field_types and has_fields(field_types[item.name], item.type) for item in target)
    if kinds.is_list(target):
        return kinds.is_list(type) and has_fields(type.value_type, target.value_type)
    if kinds.is_map(target):
        return kinds.is_map(type) and has_fields(type.item_type, target.item_type)
    return True


def check_fits(format: Format, type: pa.DataType) -> None:
    """SchemaError if values of ``type`` have no form in a format without a schema: ``string`` and ``bytes``."""
    kinds = pa.types
    if kinds.is_null(type) or _is_text(type):
        return
    if format == "string" and kinds.is_nested(type):
        raise SchemaError(
            f"a string output takes one string column, not {spark_ddl(type)}. Write one field of it, to_json(…), or an output"
            " of another format"
        )
    if format == "bytes":
        raise SchemaError(
            f"a bytes output takes one binary or string column, not {spark_ddl(type)}. CAST it AS STRING, write to_json(…), or"
            " an output of another format"
        )


def _is_text(type: pa.DataType) -> bool:
    kinds = pa.types
    return kinds.is_string(type) or kinds.is_large_string(type) or kinds.is_binary(type) or kinds.is_large_binary(type)


def _text_bytes(values: pa.Array) -> pa.Array:
    check_fits("string", values.type)
    try:
        return values.cast(pa.string()).cast(pa.binary())
    except pa.ArrowInvalid as error:
        raise ValueError("text that is not UTF-8" if "UTF8" in str(error) else str(error)) from None


def _raw(values: pa.Array) -> pa.Array:
    check_fits("bytes", values.type)
    return values.cast(pa.binary())
