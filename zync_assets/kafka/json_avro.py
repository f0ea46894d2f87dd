"""Converts one JSON value to one Avro datum, and back, for small files that people write.

Avro types that JSON lacks are JSON strings: bytes and fixed in base64, decimals in digits, dates and times in ISO 8601. A
date or time may also be the plain number that Avro holds.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import io
import json
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any

import fastavro
from fastavro.schema import SchemaParseException, UnknownType
from fastavro.validation import ValidationError

from zync_assets.errors import SchemaError


@lru_cache(maxsize=256)
def _parsed(schema: str) -> tuple[Any, dict[str, Any]]:
    """fastavro's form of a schema, and its named types."""
    named: dict[str, Any] = {}
    try:
        return fastavro.parse_schema(json.loads(schema), named_schemas=named), named
    except (ValueError, SchemaParseException, UnknownType) as error:
        raise SchemaError(f"no Avro schema: {error}") from None


def datum(schema: str, value: Any) -> bytes:
    """``value`` as Avro binary; SchemaError says where it does not fit ``schema`` (JSON)."""
    parsed, named = _parsed(schema)
    stream = io.BytesIO()
    typed = _typed(parsed, value, named, "value")
    try:
        fastavro.validate(typed, parsed)
        fastavro.schemaless_writer(stream, parsed, typed, strict_allow_default=True)
    except (ValueError, TypeError, KeyError, AttributeError, ValidationError) as error:
        raise SchemaError(f"a value does not fit its schema: {error}") from None
    return stream.getvalue()


def value_of(schema: str, payload: bytes) -> Any:
    """The value of an Avro datum as fastavro has it; SchemaError for bytes that are not of that schema."""
    stream = io.BytesIO(payload)
    try:
        value = fastavro.schemaless_reader(stream, _parsed(schema)[0], None)
    except (ValueError, EOFError, IndexError, TypeError, OverflowError, MemoryError) as error:
        raise SchemaError(f"bytes that do not fit their schema: {error or type(error).__name__}") from None
    if stream.tell() != len(payload):
        raise SchemaError(f"{len(payload) - stream.tell()} bytes more than the schema says")
    return value


def _typed(schema: Any, value: Any, named: Mapping[str, Any], path: str) -> Any:
    """``value`` with the strings of a JSON document turned into what fastavro writes."""
    if isinstance(schema, list):
        return _branch(schema, value, named, path)
    if isinstance(schema, str):
        return _typed(named[schema], value, named, path) if schema in named else _plain(schema, None, value, path)
    kind = schema["type"]
    if kind in ("record", "error") and isinstance(value, Mapping):
        fields = {field["name"]: field["type"] for field in schema["fields"]}
        unknown = [str(name) for name in value if name not in fields]
        if unknown:
            raise SchemaError(f"{path}: the schema has no field {', '.join(unknown)}; add it, or leave it out")
        return {name: _typed(fields[name], item, named, f"{path}.{name}") for name, item in value.items()}
    if kind == "array" and isinstance(value, list):
        return [_typed(schema["items"], item, named, f"{path}[]") for item in value]
    if kind == "map" and isinstance(value, Mapping):
        return {name: _typed(schema["values"], item, named, f"{path}.{name}") for name, item in value.items()}
    if isinstance(kind, (dict, list)):
        return _typed(kind, value, named, path)
    return _plain(kind, schema.get("logicalType"), value, path)


def _branch(schema: list[Any], value: Any, named: Mapping[str, Any], path: str) -> Any:
    failure: SchemaError | None = None
    for branch in schema:
        try:
            typed = _typed(branch, value, named, path)
        except SchemaError as error:
            failure = error
            continue
        if fastavro.validate(typed, _standing_alone(branch, named), raise_errors=False):
            return typed
    raise failure or SchemaError(f"{path}: {json.dumps(value)} fits no branch of its union")


def _standing_alone(branch: Any, named: Mapping[str, Any]) -> Any:
    return named.get(branch, branch) if isinstance(branch, str) else branch


def _plain(kind: str, logical: str | None, value: Any, path: str) -> Any:
    if not isinstance(value, str):
        return value
    convert = _OF_TEXT.get(logical or "") or (_OF_TEXT["bytes"] if kind in ("bytes", "fixed") else None)
    if convert is None:
        return value
    try:
        return convert(value)
    except (ValueError, InvalidOperation, binascii.Error):
        raise SchemaError(f"{path}: {value!r} is no {logical or kind}") from None


def _utc(text: str) -> datetime.datetime:
    time = datetime.datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)


_OF_TEXT: Mapping[str, Callable[[str], Any]] = {
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "decimal": Decimal,
    "date": datetime.date.fromisoformat,
    "time-millis": datetime.time.fromisoformat,
    "time-micros": datetime.time.fromisoformat,
    "timestamp-millis": _utc,
    "timestamp-micros": _utc,
    "local-timestamp-millis": datetime.datetime.fromisoformat,
    "local-timestamp-micros": datetime.datetime.fromisoformat,
}
