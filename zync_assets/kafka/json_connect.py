"""One JSON value as one Connect JSON record, and back: for people and their small files.

Types that JSON lacks are strings for people: bytes in base64, decimals in digits, dates and times in ISO 8601. Connect's
own JSON has numbers for them (JsonConverter of Apache Kafka).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from zync_assets.codecs.avro_schema import parse
from zync_assets.codecs.connect_decode import ConnectDecoder
from zync_assets.codecs.connect_encode import ConnectEncoder
from zync_assets.codecs.connect_schema import Connect, from_avro, lake_type, parse_connect
from zync_assets.codecs.infer import infer_schema
from zync_assets.codecs.json_values import json_reader
from zync_assets.errors import SchemaError


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
    decoded = ConnectDecoder(None, None).decode(pa.array([payload], pa.binary()))
    if decoded.bad:
        raise SchemaError(decoded.bad[0].error)
    return decoded.values.to_pylist(maps_as_pydicts="lossy")[0]


def connect_encoder(schema: str) -> Callable[[Any], bytes]:
    """Encodes a JSON value with a Connect schema (JSON, as JsonConverter writes the schema) beside it.

    Raises SchemaError for a schema that is none; the encoder raises SchemaError for a value that does not fit.
    """
    node = parse_connect(schema)
    read = json_reader(lake_type(node))
    encoder = ConnectEncoder(json.dumps(json.loads(schema), separators=(",", ":")))

    def encode(value: Any) -> bytes:
        _check(node, value, "value")
        column, bad = read(pa.array([json.dumps(value).encode()], pa.binary()))
        if not bad:
            encoded = encoder.encode(column)
            bad = {item.index: item.error for item in encoded.bad}
            if not bad and (payload := encoded.payloads[0].as_py()) is not None:
                return payload
        raise SchemaError(f"a value does not fit its schema: {bad.get(0, 'it is null')}")

    return encode


def inferred_connect_schema(values: Sequence[Any], name: str) -> str:
    """The Connect schema, as JSON, that all of the values fit. SchemaError where there is none."""
    return json.dumps(from_avro(parse(infer_schema(values, name))), separators=(",", ":"))


def _check(node: Connect, value: Any, path: str) -> None:
    """SchemaError for a field that the schema lacks, which would not be sent, and for a required field without a value."""
    if node.kind == "struct" and isinstance(value, dict):
        fields = dict(node.fields)
        if unknown := [name for name in value if name not in fields]:
            raise SchemaError(f"{path}: the schema has no field {', '.join(unknown)}; add it, or leave it out")
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
