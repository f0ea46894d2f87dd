"""What a column's field says beside its name and type, kept with it in the table: other names, a unit of time, and
Connect's note.

All are metadata of Arrow's fields, and of the Delta table's (Delta protocol, "Schema Serialization Format"): readers
that don't know them lose nothing.

Other names are those that writers give the field, by the aliases of their schemas (Avro specification, "Aliases"). A
field goes into the column of its own name, else into one that its aliases name, or whose other names have it.

A time that is held as a plain number has a unit, which neither its Avro type nor the column's says: 5 may be seconds, or
nanoseconds. A number in a coarser unit is converted to the column's; one in a finer unit can't go in.

What Kafka Connect's schemas say of a field is its third note (``connect_notes``). The fourth note names the writers' schemas
that lack the field, by their registry ids: a null in their records is no null of the source.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import pyarrow as pa

from zync_assets.codecs.connect_notes import PLAIN, Note, agreed, note_text, optional, read_note

_NAMES = b"zync.names"
_UNIT = b"zync.unit"
_CONNECT = b"zync.connect"
_LACKING = b"zync.lacking"

_FACTORS = {"millis": 1_000_000, "micros": 1_000, "nanos": 1}


def noted(
    name: str, type: pa.DataType, other_names: Sequence[str] = (), unit: str = "", connect: Note = PLAIN
) -> pa.Field:
    """A field that says its other names, its unit, such as ``time-micros``, and what Connect's schema says."""
    notes: dict[bytes, bytes] = {}
    if other_names:
        notes[_NAMES] = ",".join(other_names).encode()
    if unit:
        notes[_UNIT] = unit.encode()
    if connect:
        notes[_CONNECT] = note_text(connect).encode()
    return pa.field(name, type, metadata=notes or None)


def other_names(field: pa.Field) -> tuple[str, ...]:
    found = (field.metadata or {}).get(_NAMES, b"").decode()
    return tuple(found.split(",")) if found else ()


def unit_of(field: pa.Field) -> str:
    return (field.metadata or {}).get(_UNIT, b"").decode()


def connect_note_of(field: pa.Field) -> Note:
    text = (field.metadata or {}).get(_CONNECT)
    return PLAIN if text is None else read_note(text.decode())


def lacking(field: pa.Field) -> tuple[int, ...]:
    """The registry ids of the writers' schemas that lack the field."""
    text = (field.metadata or {}).get(_LACKING, b"").decode()
    return tuple(int(number) for number in text.split(",")) if text else ()


def has_lacking(type: pa.DataType) -> bool:
    """Whether some writer's schema lacks a field of the column."""
    return pa.types.is_struct(type) and any(lacking(item) or has_lacking(item.type) for item in fields_of(type))


def lacked_by(field: pa.Field, numbers: Collection[int]) -> pa.Field:
    """The field with the registry ids of the writers' schemas that lack it."""
    if not numbers:
        return field
    text = ",".join(map(str, sorted(numbers)))
    return field.with_metadata({**(field.metadata or {}), _LACKING: text.encode()})


def with_lacking(type: pa.DataType, writers: Mapping[int, pa.DataType]) -> pa.DataType:
    """A column's type; each of its fields, in structs alone, says which writers' schemas lack it. ``writers``: by registry id."""
    if not pa.types.is_struct(type):
        return type
    at = {number: places(type, own) for number, own in writers.items() if pa.types.is_struct(own)}
    fields: list[pa.Field] = []
    for index, item in enumerate(fields_of(type)):
        own = {
            number: fields_of(writers[number])[found.index(index)].type
            for number, found in at.items()
            if index in found
        }
        fields.append(lacked_by(item.with_type(with_lacking(item.type, own)), at.keys() - own.keys()))
    return pa.struct(fields)


def without_connect(type: pa.DataType) -> pa.DataType:
    """The type without Connect's notes, which say nothing of the column's form."""
    kinds = pa.types
    if kinds.is_struct(type):
        return pa.struct(
            [noted(item.name, without_connect(item.type), other_names(item), unit_of(item)) for item in fields_of(type)]
        )
    if kinds.is_list(type):
        return pa.list_(without_connect(type.value_type))
    if kinds.is_map(type):
        return pa.map_(type.key_type, without_connect(type.item_type))
    return type


def maybe_missing(field: pa.Field) -> pa.Field:
    """The field of a column in which some records have no value."""
    note = connect_note_of(field)
    if not note.required:
        return field
    made = noted(field.name, field.type, other_names(field), unit_of(field), optional(note))
    return lacked_by(made, lacking(field))


def fields_of(type: pa.DataType) -> list[pa.Field]:
    """A struct's fields."""
    return [type.field(index) for index in range(type.num_fields)]


def places(target: pa.DataType, given: pa.DataType) -> list[int | None]:
    """For each field of the struct ``given`` the index of the field of ``target`` that it goes into; None: a new one.

    Names come first: an alias takes only a field that no other field of ``given`` has by name.
    """
    ours, theirs = fields_of(target), fields_of(given)
    by_name = {field.name: index for index, field in enumerate(ours)}
    found: list[int | None] = [by_name.get(field.name) for field in theirs]
    taken = {index for index in found if index is not None}
    if len(taken) == len(theirs):
        return found
    known = {name: index for index, field in enumerate(ours) for name in other_names(field)} | by_name
    for place, field in enumerate(theirs):
        if found[place] is None:
            for name in (field.name, *other_names(field)):
                index = known.get(name)
                if index is not None and index not in taken:
                    found[place] = index
                    taken.add(index)
                    break
    return found


def merged_notes(target: pa.Field, given: pa.Field, type: pa.DataType) -> pa.Field:
    """The column's field with its type, and what ``given`` adds to its names and its unit. Of Connect's notes what both
    say."""
    names = [*other_names(target), given.name, *other_names(given)]
    kept = [name for name in dict.fromkeys(names) if name != target.name]
    converted = bool(unit_of(target) and unit_of(given))
    note = agreed(connect_note_of(target), connect_note_of(given), same_values=converted)
    made = noted(target.name, type, kept, unit_of(target) or unit_of(given), note)
    return lacked_by(made, {*lacking(target), *lacking(given)})


def unit_factor(target: pa.Field, given: pa.Field) -> int | None:
    """What numbers of ``given`` are multiplied with to be in ``target``'s unit; None: they can't be."""
    to, of = unit_of(target), unit_of(given)
    if not to or not of or to == of:
        return 1
    (kind, _, fine), (other, _, coarse) = to.rpartition("-"), of.rpartition("-")
    if kind != other or _FACTORS[coarse] < _FACTORS[fine]:
        return None
    return _FACTORS[coarse] // _FACTORS[fine]
