"""Output schemas: the notes of their fields, and the fields that single rows leave out.

The notes of an output's schema (``codecs.fields``), which say more about a field than its type.

A field that is a bare column of an input has the column's note. A field has the same note in every rule of its topic.

A path is the names of the fields down to a field; ``[]`` stands for an array's items, and ``{}`` for a map's values.

Output schemas of single rows: without the fields that a row leaves out, and with null for those that it has none
for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Any, TypeAlias

import pyarrow as pa

from zync_assets.codecs.arrays import Mask, pc
from zync_assets.codecs.fields import (
    PLAIN,
    Note,
    common_note,
    connect_note_of,
    default_of,
    field_with_notes,
    fields_of,
    lacking,
    original,
)
from zync_assets.codecs.spark_types import original_name
from zync_assets.pipeline import Shape
from zync_assets.spark.sql import name_sql, path_sql, text_sql

FieldPath: TypeAlias = tuple[str, ...]
Notes: TypeAlias = Mapping[FieldPath, "Note | None"]
"""Path of a field → its note. None: the field is null in all records, and decides nothing."""

_NAME = re.compile(r"\s*(?:`((?:[^`]|``)+)`|([A-Za-z0-9_]+))\s*(\.|$)")
_NULL = re.compile(r"\s*(?:NULL|CAST\s*\(\s*NULL\s+AS\b.*\))\s*", re.IGNORECASE | re.DOTALL)


def shape_notes(
    shape: Shape, kind: pa.DataType, sides: Mapping[str, pa.Schema], *, certain: bool
) -> dict[FieldPath, Note | None]:
    """The notes of what a shape makes. ``kind``: its type; ``sides``: ``in``, ``left``, ``right`` → the raw table's columns, or
    ``""`` → the columns that an input's shape has.

    A field that is never null may lie in a struct that is: ``certain`` says that only fields are required for which this
    can't be.
    """
    return dict(_of_shape(shape, kind, sides, (), certain=certain))


def _of_shape(
    shape: Shape, kind: pa.DataType, sides: Mapping[str, pa.Schema], path: FieldPath, *, certain: bool
) -> Iterator[tuple[FieldPath, Note | None]]:
    if isinstance(shape, Mapping):
        yield path, PLAIN
        for item in fields_of(kind) if pa.types.is_struct(kind) else ():
            yield from _of_shape(shape.get(item.name), item.type, sides, (*path, item.name), certain=certain)
        return
    if shape is None or _NULL.fullmatch(shape):
        yield path, None
        return
    columns = _columns(shape, sides)
    if not columns:
        yield path, PLAIN
        yield from ((inner, PLAIN) for inner, _ in type_notes(kind, path))
        return
    note = connect_note_of(columns[-1])
    if certain and not all(connect_note_of(column).required for column in columns):
        note = replace(note, required=False)
    yield path, note
    of_column = dict(type_notes(columns[-1].type, path))
    yield from ((inner, of_column.get(inner, PLAIN)) for inner, _ in type_notes(kind, path))


def lacking_sql(shape: Shape, sides: Mapping[str, pa.Schema]) -> list[str]:
    """SQL expressions for the fields that a value omits, because the raw record's own schema lacks the field's column.

    An expression gives a path such as ``value.address.street``, or null if the record has the field. The expressions use the
    schema ids in ``kafka`` (``spark.frames``). A column with a value is never omitted: a new registry may give the id of such
    a schema to another schema.
    """
    return list(_lacking(shape, sides, ("value",)))


def _lacking(shape: Shape, sides: Mapping[str, pa.Schema], path: FieldPath) -> Iterator[str]:
    if isinstance(shape, Mapping):
        for name, part in shape.items():
            yield from _lacking(part, sides, (*path, name))
    elif shape is not None and (columns := _columns(shape, sides)) and columns[0].name in ("key", "value"):
        side = name_sql(_names(shape)[0])
        number = f"{side}.kafka.{columns[0].name}_schema_id"
        path_name = ".".join([side, *(name_sql(column.name) for column in columns)])
        # A missing struct has no fields: they are missing too.
        ids = {number for column in columns for number in lacking(column)} if len(path) > 1 else set[int]()
        if ids:
            yield _unless(number, ids, path_name, path)
        yield from _lacking_inside(columns[-1].type, number, path_name, path, ids)


def _lacking_inside(
    kind: pa.DataType, number: str, column: str, path: FieldPath, outer_ids: Collection[int]
) -> Iterator[str]:
    for item in fields_of(kind) if pa.types.is_struct(kind) else ():
        inner, ids = f"{column}.{name_sql(item.name)}", {*lacking(item)} - {*outer_ids}
        if ids:
            yield _unless(number, ids, inner, (*path, item.name))
        yield from _lacking_inside(item.type, number, inner, (*path, item.name), {*outer_ids, *ids})


def _unless(number: str, ids: Collection[int], column: str, path: FieldPath) -> str:
    numbers = ", ".join(map(str, sorted(ids)))
    return f"IF({number} IN ({numbers}) AND {column} IS NULL, {text_sql(path_sql(path))}, NULL)"


def later_fields(rules: Iterable[tuple[Shape, Mapping[str, pa.Schema]]]) -> dict[str, str | None]:
    """The fields of a topic's values that some raw records lack, with their defaults (``codecs.fields.Default``; None: null).

    ``rules``: the value of each rule of the topic, and its ``sides`` as in ``shape_notes``. A value that is a bare column gets a
    field when its source does. A mapping gets a field by an edit, and its earlier records may lack any value of the field.
    """
    texts: dict[str, set[str | None]] = {}
    other_names: set[str] = set()
    for shape, sides in rules:
        if shape is None or isinstance(shape, Mapping):
            other_names.update(shape or ())
            continue
        columns = _columns(shape, sides)
        for item in fields_of(columns[-1].type) if columns and pa.types.is_struct(columns[-1].type) else ():
            if lacking(item):
                default = default_of(item)
                texts.setdefault(original(item), set()).add(None if default is None else default.text)
    return {name: next(iter(found)) for name, found in texts.items() if len(found) == 1 and name not in other_names}


def type_notes(kind: pa.DataType, path: FieldPath = ()) -> Iterator[tuple[FieldPath, Note]]:
    """The notes of all fields inside a type."""
    kinds = pa.types
    if kinds.is_struct(kind):
        for item in fields_of(kind):
            inner = (*path, item.name)
            yield inner, connect_note_of(item)
            yield from type_notes(item.type, inner)
    elif kinds.is_list(kind):
        yield from type_notes(kind.value_type, (*path, "[]"))
    elif kinds.is_map(kind):
        yield from type_notes(kind.item_type, (*path, "{}"))


def _columns(sql: str, sides: Mapping[str, pa.Schema]) -> list[pa.Field]:
    """The columns from a record's side down to the field, if the expression is nothing but the field's name."""
    names = ["", *_names(sql)] if "" in sides else _names(sql)
    if len(names) < 2 or names[0].lower() not in sides:
        return []
    path_fields: list[pa.Field] = []
    fields: Sequence[pa.Field] = list(sides[names[0].lower()])
    for name in names[1:]:
        matches = [item for item in fields if item.name.lower() == name.lower()]
        if not matches:
            return []
        path_fields.append(matches[0])
        fields = fields_of(matches[0].type) if pa.types.is_struct(matches[0].type) else []
    return path_fields


def _names(sql: str) -> list[str]:
    """``left.value.`a b` `` as its names; empty if the text is something else."""
    sql = sql.strip()
    while sql.startswith("(") and sql.endswith(")"):
        sql = sql[1:-1].strip()
    names: list[str] = []
    at = 0
    while at < len(sql):
        part = _NAME.match(sql, at)
        if part is None or (part[3] == "." and part.end() == len(sql)):
            return []
        names.append(part[1].replace("``", "`") if part[1] is not None else part[2])
        at = part.end()
    return names


def topic_notes(
    rules: Iterable[Notes], required: Collection[FieldPath] | None, *, whole: bool
) -> dict[FieldPath, Note]:
    """Path → the common note of a field in every rule of a topic.

    A field is required only if every rule makes the field, and no rule may make it null. A consumer of one rule's records
    must be able to read another rule's records. ``whole``: the types of every rule are known. ``required``: the fields that
    earlier records have as required, None without earlier records.
    """
    parts = list(rules)
    notes: dict[FieldPath, Note] = {}
    for path in dict.fromkeys(path for part in parts for path in part):
        rule_notes = [note for part in parts if (note := part.get(path)) is not None]
        note = reduce(common_note, rule_notes) if rule_notes else PLAIN
        sure = whole and len(rule_notes) == len(parts) and not {"[]", "{}"} & set(path)
        if not sure or (required is not None and path not in required):
            note = replace(note, required=False)
        notes[path] = note
    return notes


def with_notes(kind: pa.DataType, notes: Notes, path: FieldPath = ()) -> pa.DataType:
    """The type with its fields' notes."""
    kinds = pa.types
    if kinds.is_struct(kind):
        fields: list[pa.Field] = []
        for item in fields_of(kind):
            inner = (*path, item.name)
            note = notes.get(inner) or PLAIN
            fields.append(
                field_with_notes(
                    item.name, with_notes(item.type, notes, inner), connect=note, topic_name=original(item)
                )
            )
        return pa.struct(fields)
    if kinds.is_list(kind):
        return pa.list_(with_notes(kind.value_type, notes, (*path, "[]")))
    if kinds.is_map(kind):
        return pa.map_(kind.key_type, with_notes(kind.item_type, notes, (*path, "{}")))
    return kind


def named_sides(
    sides: Mapping[str, pa.DataType], texts: Collection[str], is_number: Callable[[str], bool]
) -> dict[str, pa.DataType]:
    """The types of keys and values, with Connect's names for the types of their fields. ``texts``: the topic's output schemas;
    ``is_number``: whether a field that is a whole number stays so, without a name."""
    return {side: _with_names(kind, _type_names(texts, side), is_number) for side, kind in sides.items()}


def _with_names(kind: pa.DataType, names: Mapping[str, str], is_number: Callable[[str], bool]) -> pa.DataType:
    """A record's type with ``names`` (field → name). A timestamp of the lake is an instant without a name."""
    if not pa.types.is_struct(kind):
        return kind
    fields: list[pa.Field] = []
    for item in fields_of(kind):
        name = original(item)
        note = Note("" if pa.types.is_timestamp(item.type) else names.get(name, ""))
        if note and not (pa.types.is_integer(item.type) and is_number(name)):
            item = field_with_notes(item.name, item.type, connect=note, topic_name=name)
        fields.append(item)
    return pa.struct(fields)


def _type_names(texts: Iterable[str], side: str) -> dict[str, str]:
    """Field of a side of output schemas → Connect's name for its type, if all schemas with the field have this name."""
    names: dict[str, set[str]] = {}
    for text in texts:
        for field in _fields_of_side(text, side) or ():
            kinds = field["type"] if isinstance(field["type"], list) else [field["type"]]
            names.setdefault(field["name"], set()).update(
                kind.get("connect.name", "") if isinstance(kind, dict) else "" for kind in kinds if kind != "null"
            )
    return {field: name for field, (name, *others) in names.items() if name and not others}


def record_fields(schema: Any) -> Sequence[Mapping[str, Any]] | None:
    """The fields of an output schema (Avro, as JSON has it) that is a record, or null or a record; None for another type."""
    for branch in schema if isinstance(schema, list) else [schema]:
        if isinstance(branch, dict) and branch.get("type") == "record":
            return branch["fields"]
    return None


def required_fields(schema: Any, path: FieldPath = ()) -> Iterator[FieldPath]:
    """The paths of the fields, in structs alone, that an Avro schema (as JSON has it) has no null for."""
    for field in record_fields(schema) or ():
        inner = (*path, field["name"])
        if not isinstance(field["type"], list):
            yield inner
        yield from required_fields(field["type"], inner)


def written_forms(schema: Any, path: str) -> Iterator[tuple[str, str]]:
    """The fields of an Avro schema that are long, string or record, by paths as ``codecs.avro.types.avro_schema`` has them: a
    type of the lake may have two of these forms."""
    for field in record_fields(schema) or ():
        yield from written_forms(field["type"], f"{path}.{field['name']}")
    for branch in schema if isinstance(schema, list) else [schema]:
        form = branch.get("type") if isinstance(branch, dict) else branch
        if form in ("long", "string", "record"):
            yield path, form
        if form == "array":
            yield from written_forms(branch["items"], f"{path}[]")
        if form == "map":
            yield from written_forms(branch["values"], f"{path}{{}}")


_NULLABLE = "?"


def schema_groups(prints: pa.Array, left_out: pa.Array) -> pa.Array:
    """One text per row that identifies the row's schema: the fingerprint, then each left-out path on a line."""
    if left_out.null_count == len(left_out):
        return prints
    # Spark writes lists whose items can't be null, and pyarrow joins only those whose items can.
    paths = pc.fill_null(pc.binary_join(left_out.cast(pa.list_(pa.string())), "\n"), "")
    return pc.if_else(pc.equal(paths, ""), prints, pc.binary_join_element_wise(prints, paths, "\n"))


def null_masks(values: pa.Array, required: Collection[FieldPath]) -> dict[FieldPath, Mask]:
    """Required field → a mask of the rows in which the field is null and the struct around it is not null. A field without such
    a row has no entry.

    ``values`` have the lake's names, and paths the topic's.
    """
    masks: dict[FieldPath, Mask] = {}
    for path in required:
        column, struct_mask = values, values.is_valid()
        for name in path:
            index = _place(column.type, name) if pa.types.is_struct(column.type) else -1
            if index < 0:
                break
            struct_mask = column.is_valid()
            column = column.flatten()[index]
        else:
            if column.null_count and (mask := pc.and_(struct_mask, column.is_null())).true_count:
                masks[path] = mask.to_numpy(zero_copy_only=False)
    return masks


def _place(type: pa.DataType, name: str) -> int:
    """The index of a struct's field by its name in the topic; -1: there is none."""
    names = [type.field(at).name for at in range(type.num_fields)]
    originals = [original_name(name) for name in names]
    # Tables from before fields were renamed may have a name that looks encoded.
    return originals.index(name) if name in originals else names.index(name) if name in names else -1


def nullable_groups(
    groups: pa.Array, group: str, values: pa.Array, required: Collection[FieldPath], side: str
) -> pa.Array:
    """The groups, with marks in the rows of ``group``. A mark is a question mark and the path of a required field that is null
    in the row. The output schema then allows null for the field."""
    inside = pc.equal(groups, group)
    for path, mask in null_masks(values, required).items():
        marked = pc.binary_join_element_wise(groups, f"{_NULLABLE}{path_sql((side, *path))}", "\n")
        groups = pc.if_else(pc.and_(inside, pa.array(mask)), marked, groups)
    return groups


def parse_group(group: str) -> tuple[str, tuple[str, ...]]:
    """Fingerprint and paths."""
    name, *paths = group.split("\n")
    return name, tuple(paths)


def without(schema: str, side: str, paths: Collection[str], *, renamed: bool = False) -> str:
    """An output schema (Avro JSON) without the fields at ``paths`` (``value.address.street``); ``side``: key or value. Those
    behind a question mark stay, and may be null. ``renamed``: the others have the lake's names, which differ from the schema's.

    A record inside it that would have no field left is left out itself; the whole one stays, even without fields.
    """
    document = json.loads(schema)
    if renamed:
        paths = {path if path.startswith(_NULLABLE) else original_name(path) for path in paths}
    return json.dumps(_without(document, (side,), frozenset(paths)))


def _without(schema: Any, path: tuple[str, ...], paths: frozenset[str]) -> Any:
    if isinstance(schema, list):
        return [_without(branch, path, paths) for branch in schema]
    if not isinstance(schema, dict) or schema.get("type") != "record":
        return schema
    fields: list[Any] = []
    for field in schema["fields"]:
        inner = (*path, field["name"])
        if path_sql(inner) in paths:
            continue
        field_type = _without(field["type"], inner, paths)
        if _NULLABLE + path_sql(inner) in paths and not isinstance(field_type, list):
            fields.append({**field, "type": ["null", field_type], "default": None})
            continue
        if field_type == field["type"] or record_fields(field_type) != []:
            fields.append({**field, "type": field_type})
    return {**schema, "fields": fields}


@lru_cache(maxsize=256)
def is_empty(schema: str) -> bool:
    """Whether no field is left."""
    return record_fields(json.loads(schema)) == []


def side_fields(text: str, side: str) -> frozenset[str] | None:
    """The fields of an output schema's key or value; None for a key or a value that is no record."""
    fields = _fields_of_side(text, side)
    return None if fields is None else frozenset(item["name"] for item in fields)


@lru_cache(maxsize=256)
def _fields_of_side(text: str, side: str) -> Sequence[Mapping[str, Any]] | None:
    """As ``record_fields``, of an output schema's key or value. Each batch of a sink asks for these fields."""
    return record_fields(json.loads(text)[side]["schema"])


def split_key(texts: Iterable[str]) -> list[list[str]]:
    """The fields of each key in the output schemas of a topic, if no key has the fields of all of them; else nothing."""
    forms = {side_fields(text, "key") for text in texts}
    keys = {form for form in forms if form is not None}
    return sorted(map(sorted, keys)) if keys == forms and frozenset().union(*keys) not in keys else []
