"""The fields of a column: the notes that a table keeps of them, and the notes of Kafka Connect.

The note of a field in a writer's schema: Kafka Connect's name, version and parameters, and whether the field is NOT
NULL.

A sink of Kafka Connect chooses a column's type by the note: a string with the name ``io.debezium.data.Uuid`` becomes a
uuid. A column keeps the note of its field (see below), and an output that is a bare column has the note again.

A column's note holds the properties that every writer's schema has. A column without a note may be null and stays
without a note, because its earlier values have no note.

Source: Confluent's and Apicurio's ``AvroData``, which write Connect's schemas into Avro as ``connect.*`` properties;
Apache Kafka, ``org.apache.kafka.connect.json.JsonSchema``.

The notes of a column's field, which the table keeps: its name in the topic, its other names, a unit of time, and
Connect's note.

Notes are metadata of Arrow's fields and of the Delta table's fields (Delta protocol, "Schema Serialization Format").
Readers that don't know the notes lose nothing.

A field's name in the lake differs from its name in the topic if the lake can't hold the topic's name
(``zync_assets.codecs.spark_types``).

Other names come from the aliases in writers' schemas (Avro specification, "Aliases"). A field goes into the column of
its own name. Without such a column, the field goes into a column that its aliases name, or that has the field's name as
another name.

A time that is a plain number has a unit, because its type does not show the unit: 5 may be seconds or nanoseconds. A
number in a coarser unit is converted to the column's unit. A number in a finer unit can't go into the column.

The properties of Kafka Connect's schemas are a note too (see above). Another note names the writers' schemas that lack the
field, by their registry ids: a null in their records is no null of the source. The last note is the field's default: ADD
COLUMN ... DEFAULT gives the value to the rows that are there, and a source makes no records of them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from zync_assets.codecs.spark_types import lake_name, original_name

DECIMAL = "org.apache.kafka.connect.data.Decimal"
PRECISION = "connect.decimal.precision"
DATE = "org.apache.kafka.connect.data.Date"
TIME = "org.apache.kafka.connect.data.Time"
TIMESTAMP = "org.apache.kafka.connect.data.Timestamp"
DEBEZIUM_DATE = "io.debezium.time.Date"
DEBEZIUM_TIMESTAMP = "io.debezium.time.Timestamp"
MICRO_TIMESTAMP = "io.debezium.time.MicroTimestamp"
ZONED_TIMESTAMP = "io.debezium.time.ZonedTimestamp"
DEBEZIUM_JSON = "io.debezium.data.Json"
VARIABLE_DECIMAL = "io.debezium.data.VariableScaleDecimal"
ZONED_TIME = "io.debezium.time.ZonedTime"
BITS = "io.debezium.data.Bits"
POINT = "io.debezium.data.geometry.Point"
TSVECTOR = "io.debezium.data.Tsvector"

_IMPLIED_NAMES = {"time-millis": TIME, "timestamp-millis": TIMESTAMP}
"""Names that the converters give Avro's logical types."""


@dataclass(frozen=True)
class Note:
    """``name``: "" without a name; ``version``: None without a version. ``required``: null only inside a null struct.

    ``item``: the note of an array's items, or of a map's values; ``logical``: Avro's logical type, if Connect has none.
    """

    name: str = ""
    version: int | None = None
    parameters: tuple[tuple[str, str], ...] = ()
    doc: str = ""
    required: bool = False
    item: Note | None = None
    logical: str = ""

    def __bool__(self) -> bool:
        return self != PLAIN

    @property
    def of_items(self) -> Note:
        return self.item or PLAIN


PLAIN = Note()


def connect_note(
    name: object, version: object, parameters: object, doc: object, logical: str = "", *, decimal: bool = False
) -> Note:
    """The note of a type, of the parts of its schema as they stand in JSON; what has another form is ignored.

    A decimal's name and digits are its type's, and no note.
    """
    entries = parameters if isinstance(parameters, Mapping) else {}
    texts = {str(key): value for key, value in entries.items() if isinstance(value, str)}
    label = name if isinstance(name, str) else _IMPLIED_NAMES.get(logical, "")
    if decimal or label == DECIMAL:
        texts = {key: value for key, value in texts.items() if key not in ("scale", PRECISION)}
        label, version = "", None
    return Note(
        label,
        version if isinstance(version, int) else 1 if label and not isinstance(name, str) else None,
        tuple(sorted(texts.items())),
        doc if isinstance(doc, str) else "",
        logical="" if label else logical if logical == "timestamp-micros" else "",
    )


def common_note(first: Note, second: Note, *, same_values: bool = False) -> Note:
    """What both say. ``same_values``: the values of the second become such as the first has, whatever they are called."""
    same_name = first.name == second.name
    return Note(
        first.name if same_name or same_values else "",
        first.version if (same_name and first.version == second.version) or same_values else None,
        tuple(pair for pair in first.parameters if pair in second.parameters),
        first.doc if first.doc == second.doc else "",
        first.required and second.required,
        (common_note(first.item, second.item) or None) if first.item and second.item else None,
        first.logical if first.logical == second.logical else "",
    )


def optional(note: Note) -> Note:
    return replace(note, required=False)


def note_text(note: Note) -> str:
    """A note as JSON, without what is empty."""
    return json.dumps(_document(note), separators=(",", ":"), sort_keys=True)


def read_note(text: str) -> Note:
    return _note(json.loads(text))


def _document(note: Note) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": note.name,
        "version": note.version,
        "parameters": dict(note.parameters),
        "doc": note.doc,
        "required": note.required,
        "item": _document(note.item) if note.item else None,
        "logical": note.logical,
    }
    return {key: value for key, value in document.items() if value not in (None, "", False, {})}


def _note(document: Mapping[str, Any]) -> Note:
    item = document.get("item")
    return Note(
        document.get("name", ""),
        document.get("version"),
        tuple(sorted(document.get("parameters", {}).items())),
        document.get("doc", ""),
        document.get("required", False),
        _note(item) if item else None,
        document.get("logical", ""),
    )


_NAMES = b"zync.names"
_ORIGINAL = b"zync.name"
_UNIT = b"zync.unit"
_CONNECT = b"zync.connect"
_LACKING = b"zync.lacking"
_DEFAULT = b"zync.default"

_FACTORS = {"millis": 1_000_000, "micros": 1_000, "nanos": 1}


def field_with_notes(
    name: str,
    type: pa.DataType,
    other_names: Sequence[str] = (),
    unit: str = "",
    connect: Note = PLAIN,
    topic_name: str = "",
) -> pa.Field:
    """A field with notes: its other names, its unit, such as ``time-micros``, Connect's note, and its name in the topic if
    this name differs from ``name``."""
    notes: dict[bytes, bytes] = {}
    if topic_name and topic_name != name:
        notes[_ORIGINAL] = topic_name.encode()
    if other_names:
        notes[_NAMES] = ",".join(other_names).encode()
    if unit:
        notes[_UNIT] = unit.encode()
    if connect:
        notes[_CONNECT] = note_text(connect).encode()
    return pa.field(name, type, metadata=notes or None)


def original(field: pa.Field) -> str:
    """The field's name in its topic."""
    name = (field.metadata or {}).get(_ORIGINAL)
    return field.name if name is None else name.decode()


def in_lake(field: pa.Field, siblings: Collection[str] = ()) -> pa.Field:
    """The field under the lake's names, its inner fields too. ``siblings``: the names of the fields before it."""
    name, type = lake_name(original(field), siblings), lake_type_of(field.type)
    if name == field.name and type is field.type:
        return field
    notes = dict(field.metadata or {})
    notes.pop(_ORIGINAL, None)
    if name != original(field):
        notes[_ORIGINAL] = original(field).encode()
    return pa.field(name, type, metadata=notes or None)


def lake_type_of(type: pa.DataType) -> pa.DataType:
    """A type with the lake's names of its fields; the same object if all have their own."""
    kinds = pa.types
    if kinds.is_struct(type):
        old, new = fields_of(type), list[pa.Field]()
        for field in old:
            new.append(in_lake(field, [sibling.name for sibling in new]))
        return type if all(field is sibling for field, sibling in zip(old, new, strict=True)) else pa.struct(new)
    if kinds.is_list(type):
        inner = lake_type_of(type.value_type)
        return type if inner is type.value_type else pa.list_(inner)
    if kinds.is_map(type):
        key, item = lake_type_of(type.key_type), lake_type_of(type.item_type)
        return type if key is type.key_type and item is type.item_type else pa.map_(key, item)
    return type


def fields_named(type: pa.DataType, name: str) -> list[pa.Field]:
    """The fields of a struct that a name in an expression may mean. The name in the topic comes first, then the name in the lake,
    then the name without regard to case, then the other names of a renamed field. Several fields differ in case alone."""
    fields, lower = fields_of(type), name.lower()
    return (
        [field for field in fields if original(field) == name]
        or [field for field in fields if field.name == name]
        or [field for field in fields if original(field).lower() == lower]
        or [field for field in fields if lower in map(str.lower, other_names(field))][:1]
    )


def topic_type_of(type: pa.DataType) -> pa.DataType:
    """A type of lake names with the names that its fields have in a topic; of their notes Connect's are kept."""
    kinds = pa.types
    if kinds.is_struct(type):
        return pa.struct(
            [
                field_with_notes(original_name(field.name), topic_type_of(field.type), connect=connect_note_of(field))
                for field in fields_of(type)
            ]
        )
    if kinds.is_list(type):
        return pa.list_(topic_type_of(type.value_type))
    if kinds.is_map(type):
        return pa.map_(topic_type_of(type.key_type), topic_type_of(type.item_type))
    return type


def other_names(field: pa.Field) -> tuple[str, ...]:
    names = (field.metadata or {}).get(_NAMES, b"").decode()
    return tuple(names.split(",")) if names else ()


def unit_of(field: pa.Field) -> str:
    return (field.metadata or {}).get(_UNIT, b"").decode()


def connect_note_of(field: pa.Field) -> Note:
    text = (field.metadata or {}).get(_CONNECT)
    return PLAIN if text is None else read_note(text.decode())


def with_connect_note(field: pa.Field, note: Note) -> pa.Field:
    """The field with another note. A plain note is written too where the field had one: metadata of a table's columns is only
    ever added."""
    if note == connect_note_of(field):
        return field
    return field.with_metadata({**(field.metadata or {}), _CONNECT: note_text(note).encode()})


def lacking(field: pa.Field) -> tuple[int, ...]:
    """The registry ids of the writers' schemas that lack the field."""
    text = (field.metadata or {}).get(_LACKING, b"").decode()
    return tuple(int(number) for number in text.split(",")) if text else ()


@dataclass(frozen=True)
class Default:
    """The value that earlier records have in a field which came later. ``text``: Arrow casts it to the field's type; ``ids``: the
    registry ids of the writers' schemas before the first schema with the field, whose default it is."""

    text: str
    ids: tuple[int, ...]


def default_of(field: pa.Field) -> Default | None:
    """The default of a column's field; None without one."""
    text = (field.metadata or {}).get(_DEFAULT)
    if text is None:
        return None
    document = json.loads(text)
    return Default(document["text"], tuple(document["ids"]))


def with_default(field: pa.Field, default: Default | None) -> pa.Field:
    """The field with a default that some records lack."""
    if default is None or not default.ids:
        return field
    text = json.dumps({"ids": default.ids, "text": default.text})
    return field.with_metadata({**(field.metadata or {}), _DEFAULT: text.encode()})


def has_lacking(type: pa.DataType) -> bool:
    """Whether some writer's schema lacks a field of the column."""
    return pa.types.is_struct(type) and any(lacking(item) or has_lacking(item.type) for item in fields_of(type))


def lacked_by(field: pa.Field, numbers: Collection[int]) -> pa.Field:
    """The field with the registry ids of the writers' schemas that lack it."""
    if not numbers:
        return field
    text = ",".join(map(str, sorted(numbers)))
    return field.with_metadata({**(field.metadata or {}), _LACKING: text.encode()})


def without_connect(type: pa.DataType) -> pa.DataType:
    """The type without Connect's notes, which say nothing of the column's form."""
    kinds = pa.types
    if kinds.is_struct(type):
        return pa.struct(
            [
                field_with_notes(
                    item.name,
                    without_connect(item.type),
                    other_names(item),
                    unit_of(item),
                    topic_name=original(item),
                )
                for item in fields_of(type)
            ]
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
    nullable = field_with_notes(
        field.name, field.type, other_names(field), unit_of(field), optional(note), original(field)
    )
    return with_default(lacked_by(nullable, lacking(field)), default_of(field))


def fields_of(type: pa.DataType) -> list[pa.Field]:
    """A struct's fields."""
    return [type.field(index) for index in range(type.num_fields)]


def places(target: pa.DataType, source: pa.DataType) -> list[int | None]:
    """For each field of the struct ``source`` the index of the field of ``target`` that it goes into; None: a new one.

    Names come first: an alias takes only a field that no other field of ``source`` has by name.
    """
    target_fields, source_fields = fields_of(target), fields_of(source)
    by_name = {original(field): index for index, field in enumerate(target_fields)}
    indices: list[int | None] = [by_name.get(original(field)) for field in source_fields]
    claims = {index for index in indices if index is not None}
    if len(claims) == len(source_fields):
        return indices
    index_by_name = {
        name: index for index, field in enumerate(target_fields) for name in (*other_names(field), field.name)
    } | by_name
    for place, field in enumerate(source_fields):
        if indices[place] is None:
            for name in (original(field), *other_names(field)):
                index = index_by_name.get(name)
                if index is not None and index not in claims:
                    indices[place] = index
                    claims.add(index)
                    break
    return indices


def merge_notes(target: pa.Field, source: pa.Field, type: pa.DataType) -> pa.Field:
    """The column's field with the type ``type``, with the names and unit of ``source`` added. Connect's note keeps the
    properties that both fields have."""
    names = [*other_names(target), original(source), *other_names(source)]
    aliases = [name for name in dict.fromkeys(names) if name not in (target.name, original(target))]
    same_values = bool(unit_of(target) and unit_of(source))
    note = common_note(connect_note_of(target), connect_note_of(source), same_values=same_values)
    field = field_with_notes(target.name, type, aliases, unit_of(target) or unit_of(source), note, original(target))
    return with_default(lacked_by(field, {*lacking(target), *lacking(source)}), default_of(target))


def unit_factor(target: pa.Field, source: pa.Field) -> int | None:
    """The factor from numbers of ``source`` to ``target``'s unit; None if no whole factor exists."""
    to, of = unit_of(target), unit_of(source)
    if not to or not of or to == of:
        return 1
    (kind, _, fine), (other_kind, _, coarse) = to.rpartition("-"), of.rpartition("-")
    if kind != other_kind or _FACTORS[coarse] < _FACTORS[fine]:
        return None
    return _FACTORS[coarse] // _FACTORS[fine]


def type_at(kind: pa.DataType | None, path: Sequence[str]) -> pa.DataType | None:
    """The type of a field below a type; None if the type has no such field. ``path``: names in the topic."""
    for name in path:
        fields = fields_of(kind) if kind is not None and pa.types.is_struct(kind) else []
        kind = next((item.type for item in fields if original(item) == name), None)
    return kind


NO_ROW = "an envelope without `after` changes a row only if its op is d"


def is_envelope(value: pa.DataType) -> bool:
    """Whether values are those of Debezium: a struct with ``op`` and a row ``after``."""
    op, after = type_at(value, ["op"]), type_at(value, ["after"])
    return op is not None and pa.types.is_string(op) and after is not None and pa.types.is_struct(after)


def deletes_sql(value: pa.DataType) -> str:
    """Whether a record deletes its row, as SQL over ``value`` that is never null.

    A tombstone does, and ``op = 'd'`` of Debezium's envelopes, whatever form the row has: MongoDB's ``after`` is a text. So does
    ``__deleted``, which Debezium's ExtractNewRecordState adds to a row.
    """
    tests = ["value IS NULL"]
    op, source, after = (type_at(value, [name]) for name in ("op", "source", "after"))
    has_source = source is not None and pa.types.is_struct(source) and after is not None
    if is_envelope(value) or (has_source and op is not None and pa.types.is_string(op)):
        tests.append("coalesce(value.op = 'd', false)")
    mark = type_at(value, ["__deleted"])
    if mark is not None and pa.types.is_string(mark):
        tests.append("coalesce(value.`__deleted` = 'true', false)")
    if mark is not None and pa.types.is_boolean(mark):
        tests.append("coalesce(value.`__deleted`, false)")
    return " OR ".join(tests)
