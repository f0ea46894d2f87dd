"""Which way a schema's records take."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from zync_assets.codecs.avro_schema import Node, is_recursive, parse


def decode_way(schema_json: str) -> Literal["native", "fastavro"]:
    """``native``: column by column (``avro_columns``); ``fastavro``: record by record.

    Records of a native schema that are damaged, or encoded in an unusual way, still go through fastavro one by one.
    """
    return "native" if is_native(parse(schema_json)) else "fastavro"


@lru_cache(maxsize=1024)
def is_native(node: Node) -> bool:
    """All schemas but recursive ones: how deep those go differs from record to record."""
    return not is_recursive(node)
