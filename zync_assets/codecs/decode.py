"""Kafka payloads → columns. Pure: a column of bytes in, a typed column and the errors out.

A payload that can't be decoded does not affect other payloads: its value is null, and ``Decoded.bad`` has its error. An
outage of the registry is no property of a record, and is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from zync_assets.codecs.avro_decode import AvroDecoder
from zync_assets.codecs.batch import BadRecord, Decoded, bad_records
from zync_assets.codecs.connect_decode import ConnectDecoder
from zync_assets.codecs.ddl import parse_ddl
from zync_assets.codecs.json_columns import columns_reader
from zync_assets.codecs.merge import conform, merge_types
from zync_assets.codecs.nested import isolate
from zync_assets.pipeline import SideFormat

__all__ = ["BadRecord", "Decoded", "Decoder", "make_decoder"]


class Decoder(Protocol):
    """Decodes the keys or the values of one topic."""

    @property
    def type(self) -> pa.DataType:
        """The lake column's type so far: the one given, with every writer schema seen; null if nothing is known."""
        ...

    def decode(self, payloads: pa.Array) -> Decoded:
        """Decode binary ``payloads`` (nulls allowed). May widen ``type``; the values are of the widened type."""
        ...


def make_decoder(
    side: SideFormat,
    schema_of: Callable[[int], str],
    target: pa.DataType | None,
    *,
    native: bool = True,
    known: Sequence[int] = (),
    closed: bool = False,
) -> Decoder:
    """A decoder for one side of a topic.

    ``schema_of``: registry id → the Avro schema (one JSON document). If it raises SchemaUnknown or SchemaError, the records
    with the id are bad; any other error, such as an outage, passes through. ``target``: the lake column's present type, None
    without a column. ``native=False`` reads Avro with fastavro alone. ``known``: the registry ids of the earlier schemas, in
    order; ``Decoded.arrivals`` reports other schemas. ``closed``: records whose schema changes the known columns are bad,
    unless no schema is known yet. Raises SchemaError if the format's type can't go into ``target``.
    """
    if side.format == "avro":
        return AvroDecoder(schema_of, target, native, known, closed)
    if side.format == "connect-json":
        return ConnectDecoder(target, None if side.ddl is None else parse_ddl(side.ddl), closed)
    if side.format == "json" and side.ddl is not None:
        type = parse_ddl(side.ddl)
        return _PlainDecoder(merge_types(target, type), columns_reader(type))
    if side.format in ("json", "string"):
        return _PlainDecoder(merge_types(target, pa.string()), _text)
    return _PlainDecoder(merge_types(target, pa.binary()), lambda payloads: (payloads.cast(pa.binary()), {}))


@dataclass(frozen=True)
class _PlainDecoder:
    """For formats that have one type and no schema ids."""

    type: pa.DataType
    read: Callable[[pa.Array], tuple[pa.Array, dict[int, str]]]

    def decode(self, payloads: pa.Array) -> Decoded:
        values, bad = self.read(payloads)
        values, unfit = isolate(values, lambda part: conform(part, self.type), ValueError)
        return Decoded(values, pa.nulls(len(payloads), pa.int32()), bad_records({**unfit, **bad}))


def _text(payloads: pa.Array) -> tuple[pa.Array, dict[int, str]]:
    values, bad = isolate(payloads, lambda part: part.cast(pa.string()), ValueError)
    return values, dict.fromkeys(bad, "not UTF-8")
