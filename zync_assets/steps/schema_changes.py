"""New writer schemas: which of them change a topic's columns, and which action the pipeline file demands.

The raw table keeps a topic's *known* schemas, each with its first record. A schema is a *change* if no known schema has the
same columns: names, types, aliases, units. A topic's first schema is no change. Connect's JSON has no schema ids: a schema
of Connect is a change if the table's columns lack a field or type of the schema.

``on-schema-change``: ``merge`` widens the table; ``quarantine`` leaves the table and quarantines the records; ``error``
commits nothing of the batch. A schema whose records are in quarantine stays a change until it is merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import pyarrow as pa

from zync_assets.codecs.avro_types import arrow_type
from zync_assets.codecs.connect_notes import Note, agreed, optional
from zync_assets.codecs.field_notes import connect_note_of, with_connect_note, with_lacking
from zync_assets.codecs.merge import merge_types
from zync_assets.codecs.schema_diff import differences, is_change
from zync_assets.errors import SchemaChanged, SchemaError, SchemaUnknown
from zync_assets.kafka.registry import Registry
from zync_assets.kafka.source import Arrived, Source
from zync_assets.lake.raw import RawState, WriterSchema
from zync_assets.pipeline import Input

_SIDES = ("key", "value")


@dataclass(frozen=True)
class SchemaChange:
    """A writer schema with other columns than those before. ``schema_id`` is None for Connect's JSON; ``diff`` has a line
    a field; ``taken``: its records are in the table (else in quarantine)."""

    side: str
    schema_id: int | None
    partition: int
    offset: int
    diff: tuple[str, ...]
    taken: bool

    def __str__(self) -> str:
        name = f"{self.side} schema" + ("" if self.schema_id is None else f" id {self.schema_id}")
        said = "; ".join(self.diff)
        return f"{name}, from partition {self.partition}, offset {self.offset}: {said}{'' if self.taken else ' (quarantined)'}"


def known_ids(state: RawState | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The registry ids of a raw table's keys and values, in the order in which they came."""
    writers = state.writers if state else ()
    keys, values = (tuple(item.id for item in writers if item.side == side and item.id is not None) for side in _SIDES)
    return keys, values


def first_schemas(source: Source, item: Input, arrived: Sequence[Arrived]) -> list[Arrived]:
    """The first schema, by partition and offset, of each side without a known schema. Only for ``quarantine``, else empty.

    The caller must read the batch again with these schemas as known, because a change needs a schema to compare with.
    """
    if item.on_schema_change != "quarantine":
        return []
    firsts: list[Arrived] = []
    for side in _SIDES:
        ordered = _ordered(arrived, side)
        ids, type = getattr(source, f"{side}_schemas"), getattr(source, f"{side}_type")
        if not ordered or ids or (ordered[0].schema.schema_id is None and type is not None):
            continue
        if any(diff for _, diff, _ in _judged(item, ordered, side, None)):
            firsts.append(ordered[0])
    return firsts


def assuming(source: Source, firsts: Sequence[Arrived]) -> Source:
    """The source with these schemas as known."""
    for first in firsts:
        side, schema = first.side, first.schema
        ids = () if schema.schema_id is None else (schema.schema_id,)
        type = merge_types(getattr(source, f"{side}_type"), schema.type, side)
        source = replace(source, **{f"{side}_type": type, f"{side}_schemas": ids})
    return source


def settled(
    item: Input, source: Source, arrived: Sequence[Arrived]
) -> tuple[tuple[WriterSchema, ...], tuple[SchemaChange, ...]]:
    """A batch's new known schemas, and its schema changes. ``source`` has the columns' types after the batch.

    Raises SchemaChanged if there is a change and the pipeline file says ``error``.
    """
    writers: list[WriterSchema] = []
    changes: list[SchemaChange] = []
    for side in _SIDES:
        column = getattr(source, f"{side}_type")
        for each, diff, taken in _judged(item, _ordered(arrived, side), side, column):
            number, partition, offset = each.schema.schema_id, each.partition, each.offset
            if diff:
                changes.append(SchemaChange(side, number, partition, offset, diff, taken))
            if taken:
                writers.append(WriterSchema(side, number, partition, offset, bool(diff)))
    if changes and item.on_schema_change == "error":
        first = min(changes, key=lambda change: (change.partition, change.offset))
        name = "" if first.schema_id is None else f" (id {first.schema_id})"
        raise SchemaChanged(
            f"topic {item.topic}, partition {first.partition}, offset {first.offset}: the writer's schema of the"
            f" {first.side}{name} is new: {'; '.join(first.diff)}. Nothing of this batch was committed. To take it, set"
            " on-schema-change: merge for this input (or quarantine, to put its records aside) and run again."
        )
    return tuple(writers), tuple(changes)


def with_lacking_fields(
    schema: pa.Schema, source: Source, state: RawState | None, writers: Sequence[WriterSchema]
) -> pa.Schema:
    """A raw table's columns, each field with the writers' schemas that lack it, where one of ``writers`` is new to the table.

    A schema that the registry no longer has is passed over. RegistryError if the registry can't be asked.
    """
    if source.registry is None:
        return schema
    registry = Registry(source.registry)
    for side in {each.side for each in writers if each.id is not None} & set(schema.names):
        ids = [
            each.id
            for each in (*(state.writers if state else ()), *writers)
            if each.side == side and each.id is not None
        ]
        column = schema.field(side)
        if len(ids) > 1:
            types = {number: type for number in ids if (type := _type_of(registry, number)) is not None}
            kind = with_lacking(column.type, types)
            schema = schema.set(schema.get_field_index(side), column.with_type(kind))
    return schema


def notes_of(arrived: Sequence[Arrived]) -> dict[str, Note]:
    """Side → what all schemas that came say of the whole key or value."""
    found: dict[str, Note] = {}
    for each in arrived:
        note = optional(each.schema.note)
        found[each.side] = agreed(found[each.side], note) if each.side in found else note
    return found


def with_side_notes(schema: pa.Schema, known: pa.Schema | None, notes: Mapping[str, Note]) -> pa.Schema:
    """A raw table's columns; ``key`` and ``value`` have the notes, as far as the table says the same of the records before.

    ``known``: the table's columns before the batch; None if there is no table.
    """
    for side in _SIDES:
        if side in schema.names:
            column = schema.field(side)
            said = [notes[side]] if side in notes else []
            if known is not None and side in known.names:
                column = column.with_metadata(known.field(side).metadata)
                said.append(connect_note_of(column))
            if said:
                schema = schema.set(schema.get_field_index(side), with_connect_note(column, reduce(agreed, said)))
    return schema


def _type_of(registry: Registry, number: int) -> pa.DataType | None:
    """The type of a schema; None if the registry no longer has the schema, or has no Avro schema by that id."""
    try:
        return arrow_type(registry.schema(number))
    except (SchemaError, SchemaUnknown):
        return None


def _judged(
    item: Input, ordered: Sequence[Arrived], side: str, column: pa.DataType | None
) -> Iterator[tuple[Arrived, tuple[str, ...], bool]]:
    """Each new schema of a side once, in order, with its differences from the known schemas, and whether it becomes known.

    ``column``: the column's type after the batch.
    """
    known = ordered[0].schema.before if ordered else ()
    met: set[int] = set()
    for each in ordered:
        schema = each.schema
        if schema.schema_id in met:
            continue
        type, diff = _change(known, schema.type, side, of_table=schema.schema_id is None)
        if schema.schema_id is not None:
            met.add(schema.schema_id)
        elif known and not diff:
            continue
        taken = _merges(column, schema.type) and (not diff or item.on_schema_change == "merge")
        if taken:
            known = (*known, type)
        yield each, diff, taken


def _change(
    known: tuple[pa.DataType, ...], type: pa.DataType, side: str, *, of_table: bool
) -> tuple[pa.DataType, tuple[str, ...]]:
    """The type to know from now on, and what it changes. ``of_table``: types are the table's, not a writer's."""
    if not of_table or not known:
        return type, tuple(differences(known[-1], type, side)) if is_change(known, type) else ()
    if not _merges(known[-1], type):
        return known[-1], tuple(differences(known[-1], type, side))
    merged = merge_types(known[-1], type, side)
    return merged, tuple(differences(known[-1], merged, side))


def _merges(column: pa.DataType | None, type: pa.DataType) -> bool:
    try:
        merge_types(column, type)
    except SchemaError:
        return False
    return True


def _ordered(arrived: Sequence[Arrived], side: str) -> list[Arrived]:
    """A side's new schemas by partition and offset."""
    new = (each for each in arrived if each.side == side and each.schema.is_new)
    return sorted(new, key=lambda each: (each.partition, each.offset))
