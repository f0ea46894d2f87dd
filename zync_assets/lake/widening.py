"""Tables whose columns got wider types than their older files have.

The files stay as they are, and a reader widens their values. delta-rs, DuckDB and Spark's Parquet reader widen the changes
that the Delta protocol lists under "Supported Type Changes". The tables do without the protocol's feature ``typeWidening``,
because delta-rs 1.6 refuses tables with this feature and no reader needs the feature.

Spark's reader refuses one change that Avro allows: a long that became a double. The schema marks such a column, and its
files are read by their own types and cast.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.codecs.merge import holds
from zync_assets.errors import SchemaError
from zync_assets.lake import storage

_LONGS = b"zync.longs"
"""On a column: some files hold a long where the table has a double."""


def widened(have: pa.Schema, wanted: pa.Schema) -> pa.Schema:
    """The columns of ``have``, with those of ``wanted`` in their places or after them.

    SchemaError names a column whose values the wanted type has no room for.
    """
    fields = {field.name: field for field in have}
    for field in wanted:
        if field.name in fields and not holds(field.type, fields[field.name].type):
            raise SchemaError(
                f"column {field.name}: {field.type} does not hold what is there, {fields[field.name].type}"
            )
        notes = dict(fields[field.name].metadata or {}) if field.name in fields else {}
        notes |= field.metadata or {}
        if field.name in fields and has_longs(fields[field.name].type, field.type):
            notes[_LONGS] = b"true"
        fields[field.name] = pa.field(field.name, field.type, metadata=notes or None)
    return pa.schema(list(fields.values()))


def has_longs(old: pa.DataType, new: pa.DataType) -> bool:
    """Whether a long of the first type is a double in the second."""
    kinds = pa.types
    if kinds.is_struct(old) and kinds.is_struct(new):
        types = {item.name: item.type for item in new}
        return any(item.name in types and has_longs(item.type, types[item.name]) for item in old)
    if kinds.is_list(old) and kinds.is_list(new):
        return has_longs(old.value_type, new.value_type)
    if kinds.is_map(old) and kinds.is_map(new):
        return has_longs(old.key_type, new.key_type) or has_longs(old.item_type, new.item_type)
    return kinds.is_int64(old) and kinds.is_float64(new)


def by_own_types(uri: str, paths: Sequence[str], schema: pa.Schema) -> list[tuple[pa.Schema, list[str]]]:
    """The files in groups, each with the schema that Spark can read them with: the table's, but for longs that the table
    has as doubles. Only tables with such a column look into their files (the footers)."""
    if not any(_LONGS in (field.metadata or {}) for field in schema):
        return [(schema, list(paths))]
    groups: dict[pa.Schema, list[str]] = {}
    for path in paths:
        system, place = storage.filesystem(storage.join(uri, path))
        own = {field.name: field.type for field in pq.read_schema(place, filesystem=system)}
        read = pa.schema(
            [
                pa.field(item.name, _with_longs(item.type, own[item.name])) if item.name in own else item
                for item in schema
            ]
        )
        groups.setdefault(read, []).append(path)
    return list(groups.items())


def _with_longs(table: pa.DataType, file: pa.DataType) -> pa.DataType:
    """The table's type, with the file's longs where the table has doubles."""
    kinds = pa.types
    if kinds.is_struct(table) and kinds.is_struct(file):
        types = {item.name: item.type for item in file}
        return pa.struct(
            [(item.name, _with_longs(item.type, types.get(item.name, item.type))) for item in table],
        )
    if kinds.is_list(table) and kinds.is_list(file):
        return pa.list_(_with_longs(table.value_type, file.value_type))
    if kinds.is_map(table) and kinds.is_map(file):
        key, item = _with_longs(table.key_type, file.key_type), _with_longs(table.item_type, file.item_type)
        return pa.map_(key, item)
    return file if kinds.is_float64(table) and kinds.is_int64(file) else table
