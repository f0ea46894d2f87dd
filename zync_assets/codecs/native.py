"""Which way a schema's records take.

``ZYNC_NATIVE=off`` in the environment sends all of them through fastavro: slower, and without any of the code that reads
columns, to find out which of the two a doubtful value comes from. Spark's workers take it from the environment of the
process that starts the session, or from ``spark.executorEnv.ZYNC_NATIVE``.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Literal

from zync_assets.codecs.avro_schema import Node, is_recursive, parse

SWITCH = "ZYNC_NATIVE"


def decode_way(schema_json: str) -> Literal["native", "fastavro"]:
    """``native``: column by column (``avro_columns``); ``fastavro``: record by record.

    Records of a native schema that are damaged, or encoded in an unusual way, still go through fastavro one by one.
    """
    return "native" if is_native(parse(schema_json)) else "fastavro"


def is_native(node: Node) -> bool:
    """All schemas but recursive ones, whose depth differs from record to record; none where ZYNC_NATIVE is off."""
    return os.environ.get(SWITCH) != "off" and _has_columns(node)


@lru_cache(maxsize=1024)
def _has_columns(node: Node) -> bool:
    return not is_recursive(node)
