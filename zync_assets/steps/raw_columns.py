"""The columns of a raw table after a batch: what its files were written with, as one schema."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa

from zync_assets.codecs.merge import holds, merge_types
from zync_assets.errors import SchemaError
from zync_assets.kafka.source import Source
from zync_assets.lake.widening import has_longs
from zync_assets.records import raw_schema


def settled_types(source: Source, schemas: Sequence[pa.Schema]) -> Source:
    """The source with its sides' types after all files, in their order; what can't be merged has no say."""
    sides = {"key": source.key_type, "value": source.value_type}
    for schema in schemas:
        for name in sides.keys() & set(schema.names):
            with suppress(SchemaError):
                sides[name] = merge_types(sides[name], schema.field(name).type, name)
    return replace(source, key_type=sides["key"], value_type=sides["value"])


def can_read(source: Source, schema: pa.Schema) -> bool:
    """Whether a file can be read with the source's types. A new file has no long where the column is a double: only of a
    column that was widened later do readers expect that."""
    sides = {"key": source.key_type, "value": source.value_type}
    given = [
        (kind, schema.field(name).type) for name, kind in sides.items() if kind is not None and name in schema.names
    ]
    return all(holds(kind, found) and not has_longs(found, kind) for kind, found in given)


def table_schema(known: pa.Schema, source: Source) -> pa.Schema:
    """The raw table's columns after a batch. Present columns keep their order."""
    wanted = raw_schema(source.key_type or pa.null(), source.value_type or pa.null())
    if set(known.names) & {"key", "value"} == set(wanted.names) & {"key", "value"}:
        return pa.schema(
            [wanted.field(name) if name in ("key", "value") else known.field(name) for name in known.names]
        )
    return wanted


def added_fields(old: pa.Schema, new: pa.Schema) -> Iterator[str]:
    """Dotted names of the fields that ``new`` has and ``old`` has not."""
    before, after = set(_paths(old)), _paths(new)
    return (path for path in after if path not in before)


def _paths(schema: pa.Schema) -> Iterator[str]:
    def walk(prefix: str, item: pa.Field) -> Iterator[str]:
        yield prefix + item.name
        if pa.types.is_struct(item.type):
            for child in item.type:
                yield from walk(f"{prefix}{item.name}.", child)

    for item in schema:
        yield from walk("", item)
