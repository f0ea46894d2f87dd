"""The types of a topic that is shaped: the types that its records are decoded to, and the types of its raw table.

A table without rows (``~decoded``) keeps the decoded types, with the notes of Connect's schemas. A bare column in the shape
passes its notes on to the raw table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.codecs.evolution import merge_types
from zync_assets.codecs.fields import PLAIN, Note, connect_note_of, optional, with_connect_note
from zync_assets.codecs.spark_types import arrow_type
from zync_assets.errors import SchemaError
from zync_assets.etl.rules import output_schemas
from zync_assets.etl.rules.output_schemas import Notes, shape_notes
from zync_assets.ingest.files import table_schema
from zync_assets.ingest.shape_task import Types
from zync_assets.ingest.source import Source, with_side_notes
from zync_assets.lake import storage, tables
from zync_assets.lake.raw_files import raw_schema
from zync_assets.pipeline import Input
from zync_assets.pipeline_file.references import shape_in_lake_names, with_notes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


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
