"""Columns → Kafka payloads. Pure: a typed column in, a column of bytes and the errors out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from zync_assets.codecs.avro_rows import row_writer
from zync_assets.codecs.avro_schema import Node, parse
from zync_assets.codecs.avro_types import lake_type, plain_type
from zync_assets.codecs.avro_write import encode_columns
from zync_assets.codecs.batch import BadRecord, Encoded, bad_records
from zync_assets.codecs.connect_encode import ConnectEncoder
from zync_assets.codecs.connect_schema import from_avro
from zync_assets.codecs.framing import header
from zync_assets.codecs.json_texts import json_texts
from zync_assets.codecs.lake_values import from_lake
from zync_assets.codecs.merge import check_writable, conform, project
from zync_assets.codecs.native import is_native
from zync_assets.codecs.nested import isolate
from zync_assets.codecs.spark_types import spark_ddl
from zync_assets.compute import pc
from zync_assets.errors import SchemaError
from zync_assets.pipeline import Format

__all__ = ["BadRecord", "Encoded", "Encoder", "make_encoder"]


class Encoder(Protocol):
    """Encodes the keys or the values of one topic, by one schema."""

    @property
    def overhead(self) -> int:
        """The bytes of a payload that are not its value: the schema id of Avro, or the schema text of Connect JSON."""
        ...

    def encode(self, values: pa.Array) -> Encoded:
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
        return _PlainEncoder(lambda values: json_texts(values if type is None else _projected(values, type)))
    if format == "string":
        return _PlainEncoder(_text)
    return _PlainEncoder(_raw)


@dataclass(frozen=True)
class _AvroEncoder:
    node: Node
    prefix: bytes
    native: bool

    @property
    def overhead(self) -> int:
        return len(self.prefix)

    def encode(self, values: pa.Array) -> Encoded:
        type = lake_type(self.node)
        check_writable(values.type, type)
        write = self._columns if self.native and is_native(self.node) else self._rows
        payloads, bad = isolate(values, lambda part: write(from_lake(self.node, conform(part, type))), ValueError)
        return Encoded(payloads, bad_records(bad))

    def _columns(self, plain: pa.Array) -> pa.Array:
        return encode_columns(self.node, plain, self.prefix)

    def _rows(self, plain: pa.Array) -> pa.Array:
        assert plain.type == plain_type(self.node)
        write = row_writer(self.node)
        made = [None if value is None else self.prefix + write(value) for value in plain.to_pylist()]
        return pa.array(made, pa.binary())


@dataclass(frozen=True)
class _PlainEncoder:
    write: Callable[[pa.Array], pa.Array]
    overhead: int = 0

    def encode(self, values: pa.Array) -> Encoded:
        payloads, bad = isolate(values, self.write, ValueError)
        return Encoded(payloads, bad_records(bad))


def _projected(values: pa.Array, type: pa.DataType) -> pa.Array:
    check_writable(values.type, type)
    return conform(values, project(type, values.type))


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


def _text(values: pa.Array) -> pa.Array:
    check_fits("string", values.type)
    try:
        return values.cast(pa.string()).cast(pa.binary())
    except pa.ArrowInvalid as error:
        raise ValueError("text that is not UTF-8" if "UTF8" in str(error) else str(error)) from None


def _raw(values: pa.Array) -> pa.Array:
    check_fits("bytes", values.type)
    return values.cast(pa.binary())
