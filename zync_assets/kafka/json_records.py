"""Single JSON values as Avro or Connect JSON records, and back: for people and their small files.

Types that JSON lacks are JSON strings: bytes and fixed in base64, decimals in digits, dates and times in ISO 8601. An Avro date
or time may also be the plain number that Avro holds. Connect's own JSON has numbers for these types (JsonConverter of Apache
Kafka).

``infer_schema`` gives an Avro schema for JSON values that come without a schema.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import lru_cache, partial
from typing import Any

import fastavro
import pyarrow as pa
from fastavro.schema import SchemaParseException, UnknownType
from fastavro.validation import ValidationError

from zync_assets.codecs.avro.schema import parse
from zync_assets.codecs.avro.types import is_avro_name
from zync_assets.codecs.connect.codec import ConnectDecoder, ConnectEncoder
from zync_assets.codecs.connect.schema import Connect, from_avro, lake_type, parse_connect
from zync_assets.codecs.json.values import json_reader
from zync_assets.errors import SchemaError


@lru_cache(maxsize=256)
def _parse_schema(schema: str) -> tuple[Any, dict[str, Any]]:
    """fastavro's form of a schema, and its named types."""
    types: dict[str, Any] = {}
    try:
        return fastavro.parse_schema(json.loads(schema), named_schemas=types), types
    except (ValueError, SchemaParseException, UnknownType) as error:
        raise SchemaError(f"no Avro schema: {error}") from None


def datum(schema: str, value: Any) -> bytes:
    """``value`` as Avro binary; SchemaError says where it does not fit ``schema`` (JSON)."""
    form, types = _parse_schema(schema)
    stream = io.BytesIO()
    avro_value = _avro_value(form, value, types, "value")
    try:
        fastavro.validate(avro_value, form)
        fastavro.schemaless_writer(stream, form, avro_value, strict_allow_default=True)
    except (ValueError, TypeError, KeyError, AttributeError, ValidationError) as error:
        raise SchemaError(f"a value does not fit its schema: {error}") from None
    return stream.getvalue()


def value_of(schema: str, payload: bytes) -> Any:
    """The value of an Avro datum as fastavro has it; SchemaError for bytes that are not of that schema."""
    stream = io.BytesIO(payload)
    try:
        value = fastavro.schemaless_reader(stream, _parse_schema(schema)[0], None)
    except (ValueError, EOFError, IndexError, TypeError, OverflowError, MemoryError) as error:
        raise SchemaError(f"bytes that do not fit their schema: {error or type(error).__name__}") from None
    if stream.tell() != len(payload):
        raise SchemaError(f"{len(payload) - stream.tell()} bytes more than the schema says")
    return value


def _avro_value(schema: Any, value: Any, types: Mapping[str, Any], path: str) -> Any:
    """``value`` with the strings of a JSON document turned into what fastavro writes."""
    if isinstance(schema, list):
        return _branch(schema, value, types, path)
    if isinstance(schema, str):
        return (
            _avro_value(types[schema], value, types, path) if schema in types else _plain({"type": schema}, value, path)
        )
    kind = schema["type"]
    if kind in ("record", "error") and isinstance(value, Mapping):
        fields = {field["name"]: field["type"] for field in schema["fields"]}
        unknown_names = [str(name) for name in value if name not in fields]
        if unknown_names:
            raise SchemaError(f"{path}: the schema has no field {', '.join(unknown_names)}; add it, or leave it out")
        return {name: _avro_value(fields[name], item, types, f"{path}.{name}") for name, item in value.items()}
    if kind == "array" and isinstance(value, list):
        return [_avro_value(schema["items"], item, types, f"{path}[]") for item in value]
    if kind == "map" and isinstance(value, Mapping):
        return {name: _avro_value(schema["values"], item, types, f"{path}.{name}") for name, item in value.items()}
    if isinstance(kind, (dict, list)):
        return _avro_value(kind, value, types, path)
    return _plain(schema, value, path)


def _branch(schema: list[Any], value: Any, types: Mapping[str, Any], path: str) -> Any:
    failure: SchemaError | None = None
    for branch in schema:
        try:
            avro_value = _avro_value(branch, value, types, path)
        except SchemaError as error:
            failure = error
            continue
        if fastavro.validate(avro_value, _standing_alone(branch, types), raise_errors=False):
            return avro_value
    raise failure or SchemaError(f"{path}: {json.dumps(value)} fits no branch of its union")


def _standing_alone(branch: Any, types: Mapping[str, Any]) -> Any:
    return types.get(branch, branch) if isinstance(branch, str) else branch


def _plain(schema: Mapping[str, Any], value: Any, path: str) -> Any:
    if not isinstance(value, str):
        return value
    kind, logical = schema["type"], schema.get("logicalType", "")
    convert = _OF_TEXT.get(logical) or (_OF_TEXT["bytes"] if kind in ("bytes", "fixed") else None)
    if convert is not None and logical == "decimal":
        convert = partial(_decimal, precision=schema["precision"], scale=schema.get("scale", 0))
    if convert is None:
        return value
    try:
        return convert(value)
    except (ValueError, InvalidOperation, binascii.Error):
        raise SchemaError(f"{path}: {value!r} is no {logical or kind}") from None


def _decimal(text: str, precision: int, scale: int) -> Decimal:
    """The number. ValueError for one with too many digits before or after the point, some of which fastavro takes."""
    number = Decimal(text)
    exponent = number.as_tuple().exponent
    if not isinstance(exponent, int) or exponent < -scale or (number and number.adjusted() >= precision - scale):
        raise ValueError(f"{text} is no decimal({precision}, {scale})")
    return number


def _of_time(read: Callable[[str], Any], digits: int) -> Callable[[str], Any]:
    """The function ``read``, with ValueError for a text with more ``digits`` of a second: Avro would cut them."""

    def convert(text: str) -> Any:
        if re.search(rf"\.\d{{{digits}}}\d*[1-9]", text):
            raise ValueError(f"{text} has more than {digits} digits of a second")
        return read(text)

    return convert


def _utc(text: str) -> datetime.datetime:
    time = datetime.datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)


def _local(text: str) -> datetime.datetime:
    time = datetime.datetime.fromisoformat(text)
    if time.tzinfo is not None:
        raise ValueError(f"{text} has a zone")
    return time


_TIMES = {"time": datetime.time.fromisoformat, "timestamp": _utc, "local-timestamp": _local}
_OF_TEXT: Mapping[str, Callable[[str], Any]] = {
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "date": datetime.date.fromisoformat,
    **{f"{name}-millis": _of_time(read, 3) for name, read in _TIMES.items()},
    **{f"{name}-micros": _of_time(read, 6) for name, read in _TIMES.items()},
}


@dataclass
class _Samples:
    """The values found at one path. ``kinds``: a subset of boolean, long, double, string, record, array."""

    kinds: set[str] = field(default_factory=set)
    null: bool = False
    records: int = 0
    fields: dict[str, _Samples] = field(default_factory=dict)
    times: int = 0
    items: _Samples | None = None


def infer_schema(values: Iterable[object], name: str) -> str:
    """The Avro schema (JSON) of JSON values, as ``json.loads`` gives them.

    Whole numbers are long; other numbers, and mixtures of both, are double. Objects are records: the outermost record is
    ``name``, and an inner record is ``name_field``. A field that is null or missing in a value is ``["null", T]`` with
    default null. A field that is null in every value is null or a string. SchemaError names a path with different types, or
    a name that breaks Avro's rules.
    """
    samples = _Samples()
    for value in values:
        _look(samples, value, name)
    if not samples.kinds and not samples.null:
        raise SchemaError(f"{name}: no value to infer a schema from")
    return json.dumps(_schema(samples, name, samples.null))


def _look(samples: _Samples, value: Any, path: str) -> None:
    samples.times += 1
    if value is None:
        samples.null = True
        return
    kind = _kind(value, path)
    if kind == "long" and not -(1 << 63) <= value < 1 << 63:
        raise SchemaError(f"{path}: {value} is out of the range of Avro's long")
    other_kinds = samples.kinds - {kind}
    if other_kinds and not {kind, *other_kinds} <= {"long", "double"}:
        raise SchemaError(
            f"{path}: {kind} here, {other_kinds.pop()} in another value; make them one type, or give a schema"
        )
    samples.kinds.add(kind)
    if kind == "record":
        samples.records += 1
        for key, item in value.items():
            if not key or not is_avro_name(key):
                raise SchemaError(f"{path}.{key}: Avro names are letters, digits and _, not starting with a digit")
            _look(samples.fields.setdefault(key, _Samples()), item, f"{path}.{key}")
    elif kind == "array":
        samples.items = samples.items or _Samples()
        for item in value:
            _look(samples.items, item, f"{path}[]")


def _kind(value: Any, path: str) -> str:
    # bool before int: True is an int in Python.
    for kind, type in _KINDS:
        if isinstance(value, type):
            return kind
    raise SchemaError(f"{path}: {value!r} is no JSON value")


_KINDS: tuple[tuple[str, type], ...] = (
    ("boolean", bool),
    ("long", int),
    ("double", float),
    ("string", str),
    ("record", dict),
    ("array", list),
)


def _schema(samples: _Samples, name: str, nullable: bool) -> Any:
    avro_type = _type(samples, name)
    return ["null", avro_type] if nullable else avro_type


def _type(samples: _Samples, name: str) -> Any:
    if samples.kinds == {"long", "double"}:
        return "double"
    if not samples.kinds:
        return "string"
    kind = next(iter(samples.kinds))
    if kind == "array":
        items = samples.items or _Samples()
        return {"type": "array", "items": _schema(items, f"{name}_item", items.null or not items.kinds)}
    if kind != "record":
        return kind
    fields: list[dict[str, Any]] = []
    for key, inner in samples.fields.items():
        if inner.null or inner.times < samples.records:
            fields.append({"name": key, "type": _schema(inner, f"{name}_{key}", True), "default": None})
        else:
            fields.append({"name": key, "type": _schema(inner, f"{name}_{key}", False)})
    return {"type": "record", "name": name, "fields": fields}


def connect_value(payload: bytes) -> Any:
    """The value of a Connect JSON record, typed by the record's own schema; a record without a schema is plain JSON.

    >>> connect_value(b'{"schema":{"type":"int32","name":"org.apache.kafka.connect.data.Date"},"payload":1}')
    datetime.date(1970, 1, 2)

    Raises SchemaError for bytes that are no such record.
    """
    try:
        document = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"bytes that are no JSON: {error}") from None
    if not isinstance(document, dict) or set(document) != {"schema", "payload"}:
        return document
    if document["schema"] is None:
        return document["payload"]
    batch = ConnectDecoder(None, None).decode(pa.array([payload], pa.binary()))
    if batch.bad:
        raise SchemaError(batch.bad[0].error)
    return batch.values.to_pylist(maps_as_pydicts="lossy")[0]


def connect_encoder(schema: str) -> Callable[[Any], bytes]:
    """Encodes a JSON value with a Connect schema (JSON, as JsonConverter writes the schema) beside it.

    Raises SchemaError for a schema that is none; the encoder raises SchemaError for a value that does not fit.
    """
    node = parse_connect(schema)
    read = json_reader(lake_type(node))
    encoder = ConnectEncoder(json.dumps(json.loads(schema), separators=(",", ":")))

    def encode(value: Any) -> bytes:
        _check(node, value, "value")
        column, errors = read(pa.array([json.dumps(value).encode()], pa.binary()))
        if not errors:
            batch = encoder.encode(column)
            errors = {item.index: item.error for item in batch.bad}
            if not errors and (payload := batch.payloads[0].as_py()) is not None:
                return payload
        raise SchemaError(f"a value does not fit its schema: {errors.get(0, 'it is null')}")

    return encode


def inferred_connect_schema(values: Sequence[Any], name: str) -> str:
    """The Connect schema, as JSON, that all of the values fit. SchemaError where there is none."""
    return json.dumps(from_avro(parse(infer_schema(values, name))), separators=(",", ":"))


def _check(node: Connect, value: Any, path: str) -> None:
    """SchemaError for a field that the schema lacks, which would not be sent, and for a required field without a value."""
    if node.kind == "struct" and isinstance(value, dict):
        fields = dict(node.fields)
        if unknown_names := [name for name in value if name not in fields]:
            raise SchemaError(f"{path}: the schema has no field {', '.join(unknown_names)}; add it, or leave it out")
        for name, kind in fields.items():
            if value.get(name) is not None:
                _check(kind, value[name], f"{path}.{name}")
            elif not kind.optional:
                raise SchemaError(f"{path}: the field {name} is required and has no value; give one")
    elif node.kind == "array" and isinstance(value, list):
        for item in value:
            _check(node.item, item, f"{path}[]")
    elif node.kind == "map" and isinstance(value, dict):
        for name, item in value.items():
            _check(node.item, item, f"{path}.{name}")
