"""Records as JSON lines, and JSON lines as records.

A line out is ``{"kafka": {"topic", "partition", "offset", "timestamp"}, "headers": [{"key", "value"}], "key":
…, "value": …}`` with headers only where there are some. A line in is the same, its ``kafka`` ignored, with
``partition`` and ``timestamp`` (milliseconds) beside it if they matter; any other JSON value is a record's
value, with a null key. Bytes that are no text are ``{"base64": "…"}``.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from zync_assets.errors import RegistryError, RegistryUnavailable, SchemaError, ZyncError
from zync_assets.kafka.json_avro import value_of
from zync_assets.kafka.registry import Registry
from zync_assets.kafka.tail import Record

Rendering: TypeAlias = Literal["auto", "avro", "connect-json", "json", "string", "bytes"]

_MOST_INT32, _MOST_INT64 = (1 << 31) - 1, (1 << 63) - 1

ENVELOPE = frozenset({"kafka", "key", "value", "headers", "partition", "timestamp"})


@dataclass(frozen=True)
class Line:
    """The record to produce for one JSON line. ``timestamp``: milliseconds since the epoch, None: now."""

    value: Any
    key: Any = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    partition: int | None = None
    timestamp: int | None = None


def parse_line(text: str, number: int) -> Line:
    """The record of line ``number``; ZyncError if it is no JSON, or a part of it is of the wrong kind."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ZyncError(f"line {number} is no JSON: {error}; put one JSON value on each line") from None
    except RecursionError:
        raise ZyncError(f"line {number} is nested too deep to be read; make it flatter") from None
    if not isinstance(document, dict) or "value" not in document or not ENVELOPE.issuperset(document):
        return Line(document)
    partition, timestamp = document.get("partition"), document.get("timestamp")
    for name, given, most in (("partition", partition, _MOST_INT32), ("timestamp", timestamp, _MOST_INT64)):
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= most):
            raise ZyncError(
                f"line {number}: {name} is {json.dumps(given)[:80]}; it must be a whole number from 0 to {most}"
            )
    return Line(document["value"], document.get("key"), _headers(document, number), partition, timestamp)


def _headers(document: dict[str, Any], number: int) -> tuple[tuple[str, bytes | None], ...]:
    given = document.get("headers") or []
    pairs = given.items() if isinstance(given, dict) else [(item["key"], item.get("value")) for item in _objects(given)]
    try:
        return tuple((str(name), None if value is None else text_bytes(value)) for name, value in pairs)
    except (ValueError, KeyError):
        raise ZyncError(f'line {number}: headers must be like [{{"key": "name", "value": "text"}}]') from None


def _objects(given: Any) -> list[dict[str, Any]]:
    return [item for item in given if isinstance(item, dict) and "key" in item] if isinstance(given, list) else []


def render(
    record: Record, registry: Registry | None, key: Rendering = "auto", value: Rendering = "auto"
) -> dict[str, Any]:
    """A record as the object of a JSON line. Values keep Python's types for dates, decimals and bytes inside Avro.

    ``auto``: Avro where the bytes begin like Confluent's framing (zero, four bytes of a schema id) and the
    registry knows the id; else text where it is UTF-8; else base64.
    """
    place = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
    }
    headers = [{"key": name, "value": _text(data)} for name, data in record.headers]
    at = f"{record.topic}/{record.partition} offset {record.offset}"
    return {
        "kafka": place,
        **({"headers": headers} if headers else {}),
        "key": _rendered(record.key, registry, key, f"the key of {at}"),
        "value": _rendered(record.value, registry, value, f"the value of {at}"),
    }


def _rendered(data: bytes | None, registry: Registry | None, rendering: Rendering, what: str) -> Any:
    if data is None:
        return None
    if rendering == "bytes":
        return _base64(data)
    if rendering == "json":
        try:
            return json.loads(data)
        except ValueError as error:
            raise SchemaError(f"{what} is no JSON: {error}; try another format") from None
    if rendering == "connect-json":
        # Imported here: Arrow takes longer to load than most commands run.
        from zync_assets.kafka.json_connect import connect_value

        try:
            return connect_value(data)
        except SchemaError as error:
            raise SchemaError(f"{what}: {error}; try another format") from None
    framed = len(data) > 4 and data[0] == 0
    if rendering == "avro" and not framed:
        raise SchemaError(f"{what} is no Avro with a schema id; try another format")
    if framed and registry is not None and rendering in ("avro", "auto"):
        try:
            return value_of(registry.schema(int.from_bytes(data[1:5], "big")), data[5:])
        except RegistryUnavailable:
            raise
        except (RegistryError, SchemaError) as error:
            if rendering == "avro":
                raise SchemaError(f"{what}: {error}") from None
    return _text(data)


def _text(data: bytes | None) -> Any:
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return _base64(data or b"")


def _base64(data: bytes) -> dict[str, str]:
    return {"base64": base64.b64encode(data).decode()}


def text_bytes(value: Any) -> bytes:
    """The bytes of a text, or of ``{"base64": …}``; ValueError for anything else."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and set(value) == {"base64"}:
        try:
            return base64.b64decode(value["base64"], validate=True)
        except (TypeError, binascii.Error) as error:
            raise ValueError(str(error)) from None
    raise ValueError(f"{json.dumps(value)} is no text")
