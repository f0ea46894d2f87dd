"""Avro types and the lake's types.

| Avro | Arrow in the lake | Spark | note |
| --- | --- | --- | --- |
| null | no column; ``string``, always null, inside a map or alone | | |
| boolean | bool | boolean | |
| int, long | int32, int64 | int, bigint | |
| int, ``connect.type`` int8 or int16 | int8, int16 | tinyint, smallint | |
| float, double | float, double | float, double | |
| bytes, fixed | binary | binary | a fixed's length is checked when it is written |
| string, enum | string | string | an enum's symbols are checked when it is written |
| array, map | list, map<string, ·> | array, map | |
| record | struct | struct | one without fields: boolean, true |
| null and one type | that type | | everything is nullable |
| any other union | struct, a field a branch | struct | named by type or record; the others null, all null: null |
| record inside itself | string | string | JSON of that subtree, see ``values`` |
| decimal, precision up to 38 | decimal128(p, s) | decimal(p, s) | |
| decimal, wider | string | string | plain digits, e.g. ``-12.340`` |
| uuid | string | string | ``xxxxxxxx-xxxx-…``, also on fixed(16) |
| date | date32 | date | |
| time-millis, time-micros | int32, int64 | int, bigint | the number of units: Delta has no time of day |
| timestamp-millis, -micros | timestamp(us, UTC) | timestamp | |
| timestamp-nanos | int64 | bigint | nanoseconds since the epoch: Delta's unit is the microsecond |
| local-timestamp-* | int64 | bigint | in their unit: Delta's timestampNtz is a feature that not every reader knows |
| duration | binary | binary | the 12 bytes |

A type of Kafka Connect or Debezium that is a plain Avro type with a ``connect.name`` stays that plain type; the column's
field has a note of its name (``codecs.fields``).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

import fastavro
import pyarrow as pa

from zync_assets.codecs.avro.schema import Node, branch_names, note_of, parse, visible_fields
from zync_assets.codecs.fields import (
    DATE,
    DEBEZIUM_DATE,
    DEBEZIUM_TIMESTAMP,
    MICRO_TIMESTAMP,
    PLAIN,
    TIME,
    VARIABLE_DECIMAL,
    ZONED_TIMESTAMP,
    Note,
    connect_note_of,
    field_with_notes,
)
from zync_assets.codecs.fields import TIMESTAMP as CONNECT_TIMESTAMP
from zync_assets.errors import SchemaError

MAX_DECIMAL = 38
TIMESTAMP = pa.timestamp("us", tz="UTC")
_SHORT = {"int8": pa.int8(), "int16": pa.int16()}

_MOMENTS = (DEBEZIUM_DATE, DEBEZIUM_TIMESTAMP, MICRO_TIMESTAMP, ZONED_TIMESTAMP, "io.debezium.time.NanoTimestamp")
"""Names of types that are days or points in time."""
_MOMENT_TYPES: Mapping[str, pa.DataType] = {
    "date": pa.date32(),
    "timestamp-millis": pa.timestamp("ms", "UTC"),
    "timestamp-micros": pa.timestamp("us", "UTC"),
}
"""Logical types of days and points in time, and the types of the numbers."""

_PLAIN: dict[str, pa.DataType] = {
    "null": pa.string(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "fixed": pa.binary(),
    "string": pa.string(),
    "enum": pa.string(),
    "ref": pa.string(),
}


def arrow_type(schema_json: str) -> pa.DataType:
    """The lake's type for values of an Avro schema; SchemaError if the schema can't be parsed or held."""
    return lake_type(parse(schema_json))


@lru_cache(maxsize=4096)
def lake_type(node: Node) -> pa.DataType:
    """The type that values of ``node`` have in the lake (the table above)."""
    if node.logical == "decimal":
        wide = node.precision > MAX_DECIMAL
        return pa.string() if wide else pa.decimal128(node.precision, node.scale)
    if node.logical == "uuid":
        return pa.string()
    if node.logical == "date":
        return pa.date32()
    if node.logical in _SHORT:
        return _SHORT[node.logical]
    if node.logical in ("timestamp-millis", "timestamp-micros"):
        return TIMESTAMP
    return _nest(node, lake_type, _noted_members(node))


@lru_cache(maxsize=4096)
def plain_type(node: Node) -> pa.DataType:
    """The type that values have on the way: as in the lake, but with no logical types."""
    return _nest(node, plain_type, [pa.field(name, plain_type(child)) for name, child in members(node)])


def _nest(node: Node, inner: Any, fields: list[pa.Field]) -> pa.DataType:
    if node.kind in _PLAIN:
        return _PLAIN[node.kind]
    if node.kind == "option":
        return inner(node.child)
    if node.kind == "array":
        return pa.list_(inner(node.child))
    if node.kind == "map":
        return pa.map_(pa.string(), inner(node.child))
    return pa.struct(fields) if fields else pa.bool_()


def _noted_members(node: Node) -> list[pa.Field]:
    """The fields of the struct that a record or a union becomes, with their other names and units."""
    if node.kind == "record":
        names = dict(zip((name for name, _ in node.fields), node.field_aliases, strict=False))
        return [
            field_with_notes(name, lake_type(child), names.get(name, ()), _unit(child), note_of(child))
            for name, child in members(node)
        ]
    if node.kind != "union":
        return []
    member_names = {name for name, _ in members(node)}
    return [
        field_with_notes(
            name,
            lake_type(child),
            [short for full in child.aliases if (short := full.rpartition(".")[2]) not in member_names],
        )
        for name, child in members(node)
    ]


def _unit(node: Node) -> str:
    return node.child.unit if node.kind == "option" else node.unit


def members(node: Node) -> tuple[tuple[str, Node], ...]:
    """Names and types of the struct that a record or a union becomes."""
    if node.kind == "record":
        return visible_fields(node)
    pairs = zip(branch_names(node), node.branches, strict=True)
    return tuple((name, branch) for name, branch in pairs if name)


def field_defaults(schema_json: str) -> dict[tuple[str, ...], str]:
    """Path of a field → its default, for fields of records in records. Arrow casts the text to the field's type in the lake.

    A default null, and a default of a type without such a text, is none. The epoch as a date or a timestamp is none either:
    Debezium's connectors write it for a function such as CURRENT_TIMESTAMP.

    >>> field_defaults('{"type": "record", "name": "R", "fields": [{"name": "a", "type": "int", "default": 7}]}')
    {('a',): '7'}
    """
    return dict(_defaults(parse(schema_json), ()))


def _defaults(node: Node, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    node = node.child if node.kind == "option" else node
    if node.kind != "record":
        return
    for (name, child), default in zip(node.fields, node.field_defaults, strict=True):
        if default and (text := _default_text(child, json.loads(default))) is not None:
            yield (*path, name), text
        yield from _defaults(child, (*path, name))


def _default_text(node: Node, value: Any) -> str | None:
    """A default in JSON (Avro specification, "Complex Types", Records) as the text of a value in the lake."""
    node = node.child if node.kind == "option" else node
    is_time = node.logical.startswith(("date", "timestamp")) or node.note.name in _MOMENTS
    if isinstance(value, bool) or node.kind == "boolean":
        return json.dumps(value) if isinstance(value, bool) and node.kind == "boolean" else None
    if is_time and (value == 0 or str(value).startswith("1970-01-01T00:00:00")):
        return None
    if isinstance(value, str) and node.kind in ("string", "enum"):
        # No DDL holds the character NUL.
        return None if "\0" in value else value
    if isinstance(value, str) and node.logical == "decimal" and all(character < "\u0100" for character in value):
        unscaled = int.from_bytes(value.encode("latin-1"), "big", signed=True)
        return f"{Decimal(unscaled).scaleb(-node.scale):f}"
    if not isinstance(value, (int, float)) or node.kind not in ("int", "long", "float", "double"):
        return None
    if (kind := _MOMENT_TYPES.get(node.logical)) is None:
        # A column that becomes double has a float's exact value.
        return repr(pa.scalar(value, pa.float32()).as_py() if node.kind == "float" else value)
    try:
        return pa.scalar(int(value), kind).cast(pa.string()).as_py()
    except (OverflowError, pa.ArrowException):
        return None


@dataclass(frozen=True)
class Outer:
    """The properties of an output schema that the columns' types lack.

    ``notes``: whether the schema has Connect's properties (``codecs.fields``), for formats that use them. ``note``: the note
    of the whole value. ``forms``: path → Avro's type (long, string or record) in the topic's earlier records, because a
    registry accepts no other type. ``micros``: a bare column of Avro's timestamp-micros keeps this type; Connect's own
    schemas lack the type. ``any_names``: field names may break Avro's rules, for formats that use the schema only as a
    description (``json``, ``connect-json``).
    """

    notes: bool = True
    note: Note = PLAIN
    forms: Mapping[str, str] | None = None
    micros: bool = True
    any_names: bool = False


def avro_schema(type: pa.DataType, name: str, namespace: str | None, outer: Outer = Outer(notes=False)) -> str:
    """The Avro schema (JSON) of values of an Arrow type: a struct's fields are ``["null", T]`` with default null, but for
    those whose note says that they are never null.

    Inner records are named ``<name>_<field>``, and with a number after it where another one has that name already.
    Paths begin with ``name``. SchemaError names a field whose type or name Avro doesn't have.
    """
    schema = _to_avro(type, name, name, set(), outer, outer.note)
    if namespace and isinstance(schema, dict) and schema.get("type") == "record":
        schema = {"type": "record", "name": name, "namespace": namespace, **schema}
    return json.dumps(schema)


def _to_avro(type: pa.DataType, name: str, path: str, records: set[str], outer: Outer, note: Note) -> Any:
    """``records``: the names that are taken. ``a.b`` and ``a_b`` would have one, and Avro defines a name once."""
    kinds = pa.types
    if not outer.notes:
        note = PLAIN
    if kinds.is_struct(type):
        name = next(free for free in _name_candidates(name) if free not in records)
        records.add(name)
        fields = [type.field(index) for index in range(type.num_fields)]
        for field in fields:
            if not outer.any_names and not is_avro_name(field.name):
                raise SchemaError(
                    f"{path}.{field.name}: Avro names are letters, digits and _, not starting with a digit. Rename the field,"
                    " or give the output another format"
                )
        avro_fields = [_field(field, name, path, records, outer) for field in fields]
        return {"type": "record", "name": name, "fields": avro_fields, **_properties(note)}
    if kinds.is_list(type) or kinds.is_large_list(type):
        items = _to_avro(type.value_type, f"{name}_item", f"{path}[]", records, outer, note.of_items)
        return {"type": "array", "items": ["null", items], **_properties(note)}
    if kinds.is_map(type):
        if not kinds.is_string(type.key_type) and not kinds.is_large_string(type.key_type):
            raise SchemaError(
                f"{path}: the keys of a map are strings here, not {type.key_type}; write"
                " transform_keys(…, (k, v) -> string(k)) in the pipeline file"
            )
        values = _to_avro(type.item_type, f"{name}_value", f"{path}{{}}", records, outer, note.of_items)
        return {"type": "map", "values": ["null", values], **_properties(note)}
    if kinds.is_decimal(type):
        avro_type = {"type": "bytes", "logicalType": "decimal", "precision": type.precision, "scale": type.scale}
        return avro_type | _properties(note)
    if outer.notes and (of_connect := _of_connect(type, name, path, records, outer, note)) is not None:
        return of_connect
    if kinds.is_timestamp(type):
        return {"type": "long", "logicalType": "timestamp-micros"}
    for check, avro_type in _SCALARS:
        if check(type):
            return _with_properties(avro_type, note)
    raise SchemaError(f"{path}: there is no Avro type for {type}; cast it to another one in the pipeline file")


def _field(field: pa.Field, name: str, path: str, records: set[str], outer: Outer) -> dict[str, Any]:
    note, below = connect_note_of(field), f"{path}.{field.name}"
    avro_type = _to_avro(field.type, f"{name}_{_record_part(field.name)}", below, records, outer, note)
    if outer.notes and note.required:
        return {"name": field.name, "type": avro_type}
    return {"name": field.name, "type": ["null", avro_type], "default": None}


def _record_part(field: str) -> str:
    """A field's name as a part of a record's name."""
    return re.sub(r"[^A-Za-z0-9_]", "_", field)


def _of_connect(
    type: pa.DataType, name: str, path: str, records: set[str], outer: Outer, note: Note
) -> dict[str, Any] | None:
    """The schema of a type that Connect's converters know by a name of its own; None for other types.

    The form of earlier records wins over the form in a column's note. A timestamp of the lake without a note is an instant in
    microseconds. Connect's Timestamp has only milliseconds, and Debezium's MicroTimestamp has no zone. The value is therefore
    a text, which Debezium's sinks read as an instant.
    """
    kinds, form = pa.types, (outer.forms or {}).get(path)
    if type in _SHORT.values():
        return {"type": "int", "connect.type": str(type), **_properties(note)}
    if kinds.is_date32(type) and note.name == DEBEZIUM_DATE:
        return {"type": "int", **_properties(note)}
    if kinds.is_date32(type):
        return {"type": "int", "logicalType": "date", **(_properties(note) if note.name in ("", DATE) else {})}
    if kinds.is_int32(type) and note.name == TIME:
        return {"type": "int", "logicalType": "time-millis", **_properties(note)}
    variable = note.name == VARIABLE_DECIMAL
    if kinds.is_string(type) and (form == "record" or (variable and form != "string")):
        struct_type = pa.struct(
            [
                field_with_notes("scale", pa.int32(), connect=_REQUIRED_NOTE),
                field_with_notes("value", pa.binary(), connect=_REQUIRED_NOTE),
            ]
        )
        return _to_avro(struct_type, name, path, records, outer, note if variable else Note(VARIABLE_DECIMAL, 1))
    if kinds.is_string(type) and variable:
        return {"type": "string"}
    if not kinds.is_timestamp(type):
        return None
    if type.tz is None:
        return {"type": "long", **_properties(Note(MICRO_TIMESTAMP, 1))}
    if form == "string":
        return _ZONED_STRING
    if note.name == CONNECT_TIMESTAMP:
        return {"type": "long", "logicalType": "timestamp-millis", **_properties(note)}
    if note.name in (DEBEZIUM_TIMESTAMP, MICRO_TIMESTAMP):
        return {"type": "long", **_properties(note)}
    if (outer.micros and note.logical == "timestamp-micros") or form == "long":
        return {"type": "long", "logicalType": "timestamp-micros"}
    return _ZONED_STRING


_REQUIRED_NOTE = Note(required=True)


def _with_properties(avro_type: Any, note: Note) -> Any:
    properties = _properties(note)
    if not properties:
        return avro_type
    return {**(avro_type if isinstance(avro_type, dict) else {"type": avro_type}), **properties}


def _properties(note: Note) -> dict[str, Any]:
    properties = {
        "connect.doc": note.doc or None,
        "connect.version": note.version,
        "connect.name": note.name or None,
        "connect.parameters": dict(note.parameters) or None,
    }
    return {key: value for key, value in properties.items() if value is not None}


_ZONED_STRING = {"type": "string", **_properties(Note(ZONED_TIMESTAMP, 1))}


def _name_candidates(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}_{number}" for number in itertools.count(2))


_SCALARS: tuple[tuple[Any, Any], ...] = (
    (pa.types.is_null, "string"),
    (pa.types.is_boolean, "boolean"),
    (lambda type: pa.types.is_integer(type) and type.bit_width <= 32 and type != pa.uint32(), "int"),
    (lambda type: pa.types.is_integer(type) and type != pa.uint64(), "long"),
    (lambda type: pa.types.is_float16(type) or pa.types.is_float32(type), "float"),
    (pa.types.is_float64, "double"),
    (lambda type: pa.types.is_string(type) or pa.types.is_large_string(type), "string"),
    (lambda type: pa.types.is_binary(type) or pa.types.is_large_binary(type), "bytes"),
    (pa.types.is_date32, {"type": "int", "logicalType": "date"}),
)


def is_avro_name(name: str) -> bool:
    return bool(name) and name.isascii() and name.replace("_", "a").isalnum() and not name[0].isdigit()


@lru_cache(maxsize=512)
def fastavro_schema(node: Node) -> Any:
    """fastavro's parsed schema with the same bytes as ``node`` (see above)."""
    return fastavro.parse_schema(_plain(node, set()))


def _plain(node: Node, names: set[str]) -> Any:
    if node.kind == "option":
        child = _plain(node.child, names)
        return ["null", child] if node.null_index == 0 else [child, "null"]
    if node.kind == "union":
        pairs = zip(branch_names(node), node.branches, strict=True)
        return [_wrapper_record(node, name, branch, names) if name else "null" for name, branch in pairs]
    if node.kind in ("array", "map"):
        key = "items" if node.kind == "array" else "values"
        return {"type": node.kind, key: _plain(node.child, names)}
    if not node.name:
        return node.kind
    name = own_name(node.name)
    if name in names:
        return name
    names.add(name)
    if node.kind == "fixed":
        return {"type": "fixed", "name": name, "size": node.size}
    if node.kind == "enum":
        return {"type": "enum", "name": name, "symbols": list(node.symbols)}
    fields = [{"name": field, "type": _plain(child, names)} for field, child in node.fields]
    return {"type": "record", "name": name, "fields": fields}


def own_name(name: str) -> str:
    """A name that no namespace around it can change."""
    return f"named.{name}"


def _wrapper_record(union: Node, name: str, branch: Node, names: set[str]) -> Any:
    wrapper = wrapper_name(union, name)
    if wrapper in names:
        return wrapper
    names.add(wrapper)
    return {"type": "record", "name": wrapper, "fields": [{"name": name, "type": _plain(branch, names)}]}


@lru_cache(maxsize=512)
def wrapper_name(union: Node, name: str) -> str:
    """The name of the record around a branch: one for one union, wherever in a schema it is."""
    return f"branch.{name}_{hashlib.sha256(repr(union).encode()).hexdigest()[:16]}"
