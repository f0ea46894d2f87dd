"""Which way a schema's records take.

``ZYNC_NATIVE=off`` in the environment sends all of them through fastavro: slower, and without any of the code that reads
columns, to find out which of the two a doubtful value comes from. Spark's workers take it from the environment of the
process that starts the session, or from ``spark.executorEnv.ZYNC_NATIVE``.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Literal, TypeAlias

import pyarrow as pa

from zync_assets.codecs.avro_schema import Node, is_recursive, parse
from zync_assets.codecs.ddl import parse_ddl
from zync_assets.codecs.json_columns import has_columns
from zync_assets.pipeline import SideFormat

SWITCH = "ZYNC_NATIVE"


Way: TypeAlias = Literal["native", "fastavro", "python"]
"""``native``: column by column; ``fastavro`` and ``python``: record by record, by fastavro or by our own code."""


def decode_way(schema_json: str) -> Way:
    """Which way records of an Avro schema take; the way back is the same.

    Records of a native schema that are damaged, or encoded in an unusual way, still go through fastavro one by one.
    """
    return "native" if is_native(parse(schema_json)) else "fastavro"


def plain_way(side: SideFormat, column: pa.DataType | None) -> Way:
    """Which way records of another format take. ``column``: the lake's type, as far as it is known."""
    if side.format == "json" and side.ddl is not None:
        return "native" if has_columns(parse_ddl(side.ddl)) else "python"
    if side.format == "connect-json" and column is not None and _has_map(column):
        return "python"
    return "native"


def _has_map(type: pa.DataType) -> bool:
    if pa.types.is_map(type):
        return True
    if pa.types.is_list(type):
        return _has_map(type.value_type)
    return pa.types.is_struct(type) and any(_has_map(field.type) for field in type)


def is_native(node: Node) -> bool:
    """All schemas but recursive ones, whose depth differs from record to record; none where ZYNC_NATIVE is off."""
    return os.environ.get(SWITCH) != "off" and _has_columns(node)


@lru_cache(maxsize=1024)
def _has_columns(node: Node) -> bool:
    return not is_recursive(node)
