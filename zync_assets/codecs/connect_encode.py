"""A column → Connect JSON: the schema, the same in all records, and the payload."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa

from zync_assets.codecs.avro_schema import Node
from zync_assets.codecs.avro_types import lake_type as avro_lake_type
from zync_assets.codecs.batch import Encoded, bad_records
from zync_assets.codecs.connect_columns import has_columns
from zync_assets.codecs.connect_rows import write_row
from zync_assets.codecs.connect_schema import Connect, lake_type, parse_connect
from zync_assets.codecs.connect_values import from_lake
from zync_assets.codecs.json_texts import json_texts
from zync_assets.codecs.lake_values import from_lake as from_avro_lake
from zync_assets.codecs.merge import check_writable, conform
from zync_assets.codecs.nested import isolate
from zync_assets.compute import pc

_END = b"}"


@dataclass(frozen=True)
class ConnectEncoder:
    """See ``encode.Encoder``. ``schema``: Connect's schema as JSON, copied into each record without a change.

    ``avro``: the Avro schema behind ``schema``, if known. Both schemas have the same plain values.
    """

    schema: str
    avro: Node | None = None

    @property
    def overhead(self) -> int:
        return len(self._head) + len(_END)

    @property
    def _head(self) -> bytes:
        return b'{"schema":' + self.schema.encode() + b',"payload":'

    def encode(self, values: pa.Array) -> Encoded:
        node, avro = parse_connect(self.schema), self.avro
        type = lake_type(node) if avro is None else avro_lake_type(avro)
        check_writable(values.type, type)

        def payloads(part: pa.Array) -> pa.Array:
            own = conform(part, type)
            return _payloads(node, from_lake(node, own) if avro is None else from_avro_lake(avro, own))

        texts, bad = isolate(values, payloads, ValueError)
        return Encoded(pc.binary_join_element_wise(self._head, texts, _END, b""), bad_records(bad))


def _payloads(node: Connect, plain: pa.Array) -> pa.Array:
    """As binary; null for null."""
    if _as_columns(node):
        try:
            return json_texts(plain)
        except ValueError:
            # NaN and infinities: JsonConverter writes them as strings.
            pass
    made = [None if value is None else _text(node, value).encode() for value in plain.to_pylist()]
    return pa.array(made, pa.binary())


def _text(node: Connect, value: object) -> str:
    return json.dumps(write_row(node, value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


@lru_cache(maxsize=1024)
def _as_columns(node: Connect) -> bool:
    """All but structs without fields, and maps that are arrays of pairs."""
    if has_columns(node):
        return True
    inner = [child for _, child in node.fields] + ([node.items] if node.items else [])
    hollow = node.kind == "struct" and not node.fields
    return not hollow and (node.kind != "map" or node.by_name) and all(_as_columns(child) for child in inner)
