"""Kafka Connect's schemas, as JsonConverter writes them: ``{"type": "struct", "fields": [...], "optional": false, ...}``.

Source: Apache Kafka, ``org.apache.kafka.connect.json.JsonConverter`` and ``JsonSchema``; Debezium's documentation of its
connectors, "Data type mappings". Logical types are given by ``name``; those that are not known stay the plain type.

| Connect | Arrow in the lake | Spark | note |
| --- | --- | --- | --- |
| boolean | bool | boolean | |
| int8, int16, int32, int64 | int8, int16, int32, int64 | tinyint, smallint, int, bigint | |
| float, double | float, double | float, double | NaN and infinities are the strings ``"NaN"``, ``"Infinity"``, ``"-Infinity"`` |
| string | string | string | |
| bytes | binary | binary | base64 in JSON |
| array | list | array | |
| map | map | map | an object where keys are strings, else an array of pairs |
| struct | struct | struct | one without fields: boolean, true |
| ``…connect.data.Decimal`` | decimal128(p, scale) | decimal(p, scale) | p: ``connect.decimal.precision``, else 38 |
| the same, p above 38, or a scale below 0 or above 38 | string | string | plain digits |
| ``…connect.data.Date``, ``io.debezium.time.Date`` | date32 | date | |
| ``…connect.data.Timestamp``, ``io.debezium.time.Timestamp``, ``MicroTimestamp`` | timestamp(us, UTC) | timestamp | \
Debezium's two are times without a zone, encoded as if they were UTC |
| ``io.debezium.time.NanoTimestamp`` | int64 | bigint | nanoseconds since the epoch: Delta's unit is the microsecond |
| ``…connect.data.Time``, ``io.debezium.time.Time``, ``MicroTime``, ``NanoTime`` | int32, int32, int64, int64 | \
int, int, bigint, bigint | milli-, milli-, micro-, nanoseconds since midnight: Delta has no time of day |
| ``io.debezium.time.Year``, ``MicroDuration``, ``NanoDuration`` | int32, int64, int64 | int, bigint, bigint | the number |
| ``io.debezium.time.ZonedTimestamp``, ``ZonedTime``, ``Interval``, ``Iso…`` | string | string | as written: offset and \
nanoseconds are kept; ``CAST(… AS TIMESTAMP)`` reads it |
| ``io.debezium.data.Json``, ``Xml``, ``Uuid``, ``Enum``, ``EnumSet``, ``Ltree`` | string | string | |
| ``io.debezium.data.Bits`` | binary | binary | the lowest byte first, as Debezium has it |
| ``io.debezium.data.VariableScaleDecimal`` | string | string | digits with their scale: ``1.50``; ``1E+3`` for -3 |
| ``io.debezium.data.geometry.Point``, ``Geometry``, ``Geography`` | struct | struct | ``x``, ``y``, ``wkb`` (binary), ``srid`` |

A null or missing field is null if the field is ``optional``. Otherwise the field gets its ``default``, and the record is bad
without a default. A missing optional field with a default gets the default, but its null stays null (KIP-581,
``replace.null.with.default=false``).

Plain values ↔ the lake's values: what the logical types of Connect and Debezium change (table above).

Both functions work on whole arrays and raise ValueError if one value does not fit; ``codecs.arrays.isolate`` finds it.
"""

from __future__ import annotations

import decimal
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pyarrow as pa

from zync_assets.codecs.arrays import is_valid, list_of, list_parts, map_entries, struct_of
from zync_assets.codecs.avro import values
from zync_assets.codecs.avro.schema import MAX_DEPTH, Node
from zync_assets.codecs.avro.types import MAX_DECIMAL
from zync_assets.codecs.avro.types import lake_type as avro_lake_type
from zync_assets.codecs.evolution import variable_decimal
from zync_assets.codecs.fields import (
    DATE,
    DEBEZIUM_DATE,
    DEBEZIUM_TIMESTAMP,
    DECIMAL,
    MICRO_TIMESTAMP,
    PLAIN,
    PRECISION,
    TIME,
    TIMESTAMP,
    VARIABLE_DECIMAL,
    Note,
    connect_note,
    field_with_notes,
)
from zync_assets.errors import SchemaError

_ANY_PRECISION = 4000
"""For decimals that the lake holds as digits and whose schema says no precision. PostgreSQL's numeric has up to 1000 digits.
Debezium sends a numeric of scale -2 with scale 2046, and with as many more zeros."""

_SIMPLE: Mapping[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
}
_OTHER_SPELLINGS = {"float32": "float", "float64": "double"}
# The nodes are Avro's, because ``codecs.avro.values`` defines how the values of these types are converted.
_LOGICAL: Mapping[tuple[str, str], Node] = {
    ("int32", DATE): Node("int", logical="date"),
    ("int32", DEBEZIUM_DATE): Node("int", logical="date"),
    ("int64", TIMESTAMP): Node("long", logical="timestamp-millis"),
    ("int64", DEBEZIUM_TIMESTAMP): Node("long", logical="timestamp-millis"),
    ("int64", MICRO_TIMESTAMP): Node("long", logical="timestamp-micros"),
}


@dataclass(frozen=True, eq=False)
class Connect:
    """One type. ``kind``: Connect's, in JsonConverter's spelling, or ``variable-decimal`` (a struct of Debezium's).

    Compared by identity, as it is looked up for each record; ``repr`` is equal where types are.
    """

    kind: str
    optional: bool = False
    default: str | None = None
    """JSON; None where there is none, or null."""
    logical: Node | None = None
    """The Avro type whose values are converted alike, for those that differ in the lake."""
    fields: tuple[tuple[str, Connect], ...] = ()
    keys: Connect | None = None
    items: Connect | None = None
    note: Note = PLAIN
    """The note of the type itself. ``note_of`` returns the note of a field."""

    @property
    def item(self) -> Connect:
        """The type of an array's items or of a map's values."""
        assert self.items is not None
        return self.items

    @property
    def key(self) -> Connect:
        assert self.keys is not None
        return self.keys

    @property
    def by_name(self) -> bool:
        """Whether a map is an object in JSON."""
        return self.key.kind == "string"


@lru_cache(maxsize=1024)
def parse_connect(schema_json: str) -> Connect:
    """The tree of a Connect schema; SchemaError names what is wrong and where."""
    try:
        document = json.loads(schema_json)
        return _parse(document, "schema")
    except ValueError as error:
        raise SchemaError(f"the Connect schema is not JSON: {error}") from None
    except RecursionError:
        raise SchemaError(f"the Connect schema is nested deeper than {MAX_DEPTH} levels") from None


def _parse(schema: Any, path: str, depth: int = 1) -> Connect:
    if depth > MAX_DEPTH:
        raise SchemaError(f"{path[:100]}: the schema is nested deeper than {MAX_DEPTH} levels")
    if not isinstance(schema, dict):
        raise SchemaError(f"{path}: {json.dumps(schema)[:40]} is no Connect schema")
    kind = _OTHER_SPELLINGS.get(str(schema.get("type")), schema.get("type"))
    optional, default = schema.get("optional", False), schema.get("default")
    if not isinstance(optional, bool):
        raise SchemaError(f"{path}: 'optional' is {json.dumps(optional)[:40]}, not true or false")
    text = None if default is None else json.dumps(default)
    note = connect_note(schema.get("name"), schema.get("version"), schema.get("parameters"), schema.get("doc"))
    if kind == "struct":
        fields = _fields(schema.get("fields"), path, depth)
        variable = schema.get("name") == VARIABLE_DECIMAL and _is_variable_decimal(fields)
        return Connect("variable-decimal" if variable else "struct", optional, text, fields=fields, note=note)
    if kind == "array":
        return Connect("array", optional, text, items=_parse(schema.get("items"), f"{path}[]", depth + 1), note=note)
    if kind == "map":
        keys = _parse(schema.get("keys"), f"{path} (key)", depth + 1)
        items = _parse(schema.get("values"), f"{path}{{}}", depth + 1)
        return Connect("map", optional, text, keys=keys, items=items, note=note)
    if not isinstance(kind, str) or kind not in _SIMPLE:
        raise SchemaError(f"{path}: {json.dumps(kind)[:40]} is no type of Connect")
    return Connect(kind, optional, text, _logical(kind, schema, path), note=note)


def _fields(documents: Any, path: str, depth: int) -> tuple[tuple[str, Connect], ...]:
    if not isinstance(documents, list):
        raise SchemaError(f"{path}: a struct without 'fields'")
    fields: list[tuple[str, Connect]] = []
    for field in documents:
        name = field.get("field") if isinstance(field, dict) else None
        if not isinstance(name, str):
            raise SchemaError(f"{path}: a struct's field without its name ('field')")
        if not name:
            raise SchemaError(f"{path}: a struct's field whose name ('field') is empty")
        fields.append((name, _parse(field, f"{path}.{name}", depth + 1)))
    if twice := [name for name, count in Counter(name for name, _ in fields).items() if count > 1]:
        raise SchemaError(f"{path}: two fields are called {twice[0]!r}")
    return tuple(fields)


def _is_variable_decimal(fields: tuple[tuple[str, Connect], ...]) -> bool:
    return {name: field.kind for name, field in fields} == {"scale": "int32", "value": "bytes"}


def _logical(kind: str, schema: Mapping[str, Any], path: str) -> Node | None:
    name = schema.get("name")
    if kind != "bytes" or name != DECIMAL:
        return _LOGICAL.get((kind, name)) if isinstance(name, str) else None
    parameters = schema.get("parameters")
    settings = parameters if isinstance(parameters, dict) else {}
    try:
        scale = int(settings["scale"])
        precision = int(settings[PRECISION]) if PRECISION in settings else None
    except (KeyError, TypeError, ValueError):
        raise SchemaError(f"{path}: a Decimal needs the parameter scale, a whole number, not {settings}") from None
    if not -_ANY_PRECISION <= scale <= _ANY_PRECISION or not 0 < (precision or 1) <= _ANY_PRECISION:
        raise SchemaError(f"{path}: a Decimal of scale {scale} and precision {precision} is out of range")
    digits = max(precision or MAX_DECIMAL, scale)
    if scale < 0 or digits > MAX_DECIMAL:
        digits = _ANY_PRECISION
    return Node("bytes", logical="decimal", precision=digits, scale=scale)


@lru_cache(maxsize=4096)
def lake_type(node: Connect) -> pa.DataType:
    """The type that values of ``node`` have in the lake (the table above)."""
    if node.kind == "variable-decimal":
        return pa.string()
    if node.kind == "struct" and node.fields:
        return pa.struct(
            [field_with_notes(name, lake_type(child), connect=note_of(child)) for name, child in node.fields]
        )
    return avro_lake_type(node.logical) if node.logical else nested_type(node, lake_type)


def note_of(node: Connect) -> Note:
    """The note of a field with this type, and whether the field is required."""
    item = note_of(node.item) if node.kind in ("array", "map") else PLAIN
    return replace(node.note, required=not node.optional, item=item or None)


@lru_cache(maxsize=4096)
def plain_type(node: Connect) -> pa.DataType:
    """The type that values have on the way: as in the lake, but with no logical types."""
    return nested_type(node, plain_type)


def nested_type(node: Connect, inner: Any) -> pa.DataType:
    """The node's own type, with ``inner`` of those inside it."""
    if node.kind in _SIMPLE:
        return _SIMPLE[node.kind]
    if node.kind == "array":
        return pa.list_(inner(node.item))
    if node.kind == "map":
        return pa.map_(inner(node.key), inner(node.item))
    return pa.struct([(name, inner(child)) for name, child in node.fields]) if node.fields else pa.bool_()


def from_avro(node: Node) -> dict[str, Any]:
    """The Connect schema of values of an Avro schema that ``codecs.avro.types.avro_schema`` made.

    The Connect schema has the names in the Avro schema's notes. A timestamp in microseconds without a name becomes Debezium's
    MicroTimestamp, because Connect's own Timestamp has milliseconds.
    """
    return _from_avro(node, False)


def _from_avro(node: Node, optional: bool) -> dict[str, Any]:
    if node.kind == "option":
        return _from_avro(node.child, True)
    # The order of the parts stays as it is: records are compared with those that were published before.
    document = {**_own_schema(node), "optional": optional}
    if node.kind == "record":
        document["name"] = node.name
    kind, name = _NAMES.get(node.logical, ("", ""))
    if kind:
        document |= {"type": kind, "name": name, "version": 1}
    digits = {"scale": str(node.scale), PRECISION: str(node.precision)} if name == DECIMAL else {}
    note = node.note
    if note.name:
        document["name"] = note.name
    if note.version is not None:
        document["version"] = note.version
    if note.parameters or digits:
        document["parameters"] = {**digits, **dict(note.parameters)}
    if note.doc:
        document["doc"] = note.doc
    return document


def _own_schema(node: Node) -> dict[str, Any]:
    if node.kind == "record":
        fields = [{**_from_avro(child, False), "field": name} for name, child in node.fields]
        return {"type": "struct", "fields": fields}
    if node.kind == "array":
        return {"type": "array", "items": _from_avro(node.child, False)}
    if node.kind == "map":
        return {
            "type": "map",
            "keys": {"type": "string", "optional": False},
            "values": _from_avro(node.child, False),
        }
    if node.kind not in _KINDS:
        raise SchemaError(f"Connect has no type for Avro's {node.kind} {node.name}".rstrip())
    return {"type": node.logical if node.logical in ("int8", "int16") else _KINDS[node.kind]}


_KINDS = {
    "boolean": "boolean",
    "int": "int32",
    "long": "int64",
    "float": "float",
    "double": "double",
    "string": "string",
    "bytes": "bytes",
}
_NAMES = {
    "decimal": ("bytes", DECIMAL),
    "date": ("int32", DATE),
    "time-millis": ("int32", TIME),
    "timestamp-millis": ("int64", TIMESTAMP),
    "timestamp-micros": ("int64", MICRO_TIMESTAMP),
}


_LONGEST = 1000
"""Digits after the point that are written out; more of them make an exponent."""


def to_lake(node: Connect, array: pa.Array) -> pa.Array:
    """An array of the plain type as one of the lake's type."""
    if node.kind == "variable-decimal":
        return pa.array([_digits(value) for value in array.to_pylist()], pa.string())
    return _convert(node, array, values.to_lake, to_lake, lake_type)


def from_lake(node: Connect, array: pa.Array) -> pa.Array:
    """An array of the lake's type as one of the plain type."""
    if node.kind == "variable-decimal":
        return pa.array([variable_decimal(text) for text in array.to_pylist()], plain_type(node))
    return _convert(node, array, values.from_lake, from_lake, plain_type)


def _convert(
    node: Connect,
    array: pa.Array,
    leaf: Callable[[Node, pa.Array], pa.Array],
    inner: Callable[[Connect, pa.Array], pa.Array],
    type_of: Callable[[Connect], pa.DataType],
) -> pa.Array:
    if plain_type(node) == lake_type(node):
        return array
    if node.logical:
        return leaf(node.logical, array)
    type, valid = type_of(node), is_valid(array)
    if node.kind == "struct":
        parts = [inner(child, part) for (_, child), part in zip(node.fields, array.flatten(), strict=True)]
        return struct_of(type, parts, len(array), valid)
    offsets, values = list_parts(array)
    if node.kind == "array":
        return list_of(type, offsets, inner(node.item, values), valid)
    keys, items = values.flatten()
    return list_of(type, offsets, map_entries(type, inner(node.key, keys), inner(node.item, items)), valid)


def _digits(value: dict[str, int | bytes | None] | None) -> str | None:
    if value is None:
        return None
    raw, scale = value["value"], value["scale"]
    assert isinstance(raw, bytes) and isinstance(scale, int)
    if not raw:
        raise ValueError("a decimal of no bytes")
    number = decimal.Decimal(int.from_bytes(raw, "big", signed=True)).as_tuple()
    if not 0 <= scale <= _LONGEST:
        return f"{'-' * number.sign}{''.join(map(str, number.digits))}E{-scale:+d}"
    return format(decimal.Decimal((number.sign, number.digits, -scale)), "f")
