"""Writer schemas that come for the first time, and what they change, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from zync_assets.codecs.connect_notes import PLAIN, Note
from zync_assets.codecs.field_notes import fields_of, original, places, unit_of, without_connect
from zync_assets.codecs.merge import wider_type
from zync_assets.codecs.spark_types import spark_ddl


@dataclass(frozen=True)
class Arrival:
    """A writer schema that is new to a decoder.

    ``index``: the first record with the schema. ``schema_id``: None for a format without schema ids; ``type`` is then the
    column's type with the schema's fields added. ``before``: the types of the known schemas, the latest last.
    ``note``: the schema's note of the whole value for Kafka Connect.
    """

    index: int
    schema_id: int | None
    type: pa.DataType
    before: tuple[pa.DataType, ...]
    note: Note = PLAIN

    @property
    def is_new(self) -> bool:
        """Whether the table may not know the schema. Schemas without ids are known by their columns."""
        return self.schema_id is not None or not self.before or self.changes

    @property
    def changes(self) -> bool:
        """Whether no known schema has the same columns. Some writers' schemas differ only in names and notes."""
        return is_change(self.before, self.type)


def is_change(before: tuple[pa.DataType, ...], type: pa.DataType) -> bool:
    form = without_connect(type)
    return bool(before) and not any(without_connect(known).equals(form, check_metadata=True) for known in before)


def differences(before: pa.DataType, after: pa.DataType, path: str) -> Iterator[str]:
    """The changes of a writer's schema, one line per field: added, removed, renamed, widened, narrowed or changed."""
    kinds = pa.types
    if before.equals(after, check_metadata=True):
        return
    if kinds.is_struct(before) and kinds.is_struct(after):
        yield from _fields(before, after, path)
    elif kinds.is_list(before) and kinds.is_list(after):
        yield from differences(before.value_type, after.value_type, f"{path}[]")
    elif kinds.is_map(before) and kinds.is_map(after):
        yield from differences(before.item_type, after.item_type, f"{path}{{}}")
    elif before != after:
        both = wider_type(before, after)
        word = "widened" if both == after else "narrowed" if both == before else "changed"
        yield f"{word} {path} from {_name(before)} to {_name(after)}"


def _fields(before: pa.DataType, after: pa.DataType, path: str) -> Iterator[str]:
    old, new = fields_of(before), fields_of(after)
    at = places(before, after)
    for index, field in enumerate(old):
        if index not in at:
            yield f"removed {path}.{original(field)}"
    for index, field in zip(at, new, strict=True):
        below = f"{path}.{original(field)}"
        if index is None:
            yield f"added {below} ({_name(field.type)})"
            continue
        if original(old[index]) != original(field):
            yield f"renamed {path}.{original(old[index])} to {original(field)}"
        if unit_of(old[index]) != unit_of(field):
            yield f"changed {below} from {unit_of(old[index]) or 'no unit'} to {unit_of(field) or 'no unit'}"
        yield from differences(old[index].type, field.type, below)


def _name(type: pa.DataType) -> str:
    return "struct" if pa.types.is_struct(type) else spark_ddl(type)
