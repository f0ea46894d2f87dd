"""The results of converting a batch of records, and the choice between the ways of a codec.

A converted batch is a column and the records that could not be converted. ``assemble`` joins the parts of a batch that were
decoded by different writers' schemas.

A schema's records are converted column by column, or record by record. ``ZYNC_NATIVE=off`` in the environment sends all Avro
records through fastavro. This is slower and uses no code that reads columns. A comparison shows which of the two ways gave a
doubtful value. Spark's workers take the setting from the environment of the process that starts the session, or from
``spark.executorEnv.ZYNC_NATIVE``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.codecs.arrays import isolate, validity_buffer
from zync_assets.codecs.avro.schema import Node, is_recursive, parse
from zync_assets.codecs.evolution import Arrival, conform
from zync_assets.codecs.json.columns import has_columns
from zync_assets.codecs.spark_types import parse_ddl
from zync_assets.pipeline import SideFormat


@dataclass(frozen=True)
class BadPayload:
    """A record that could not be converted. ``index`` is its place in the array that was given."""

    index: int
    error: str


@dataclass(frozen=True)
class DecodedBatch:
    """A decoded batch of payloads.

    ``values``: as long as the input, of the decoder's type; null for a null or bad payload.
    ``schema_ids``: int32; null for a null payload, and for a payload without a schema id.
    ``bad``: ascending by index, at most one entry per index. ``arrivals``: new writer schemas.
    """

    values: pa.Array
    schema_ids: pa.Array
    bad: tuple[BadPayload, ...]
    arrivals: tuple[Arrival, ...] = ()


@dataclass(frozen=True)
class EncodedBatch:
    """A batch as payloads.

    ``payloads``: binary, as long as the input; null where the value is null (a tombstone) or bad.
    ``bad``: ascending by index, at most one an index.
    """

    payloads: pa.Array
    bad: tuple[BadPayload, ...]


def bad_records(errors: dict[int, str]) -> tuple[BadPayload, ...]:
    """The errors by index, in order."""
    return tuple(BadPayload(index, errors[index]) for index in sorted(errors))


Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """The good records of one writer schema: their indices in the batch and, as many, their values."""

    rows: Ints
    values: pa.Array


def assemble(type: pa.DataType, groups: list[Group], count: int, errors: dict[int, str]) -> pa.Array:
    """The groups' values at their places, as the column's type; those that don't fit it are null and in ``errors``."""
    parts: list[pa.Array] = []
    value_indices = np.full(count, -1, dtype=np.int64)
    total = 0
    for group in groups:
        if pa.types.is_null(type):
            continue
        values, misfits = isolate(group.values, lambda part: conform(part, type), ValueError)
        for index, error in misfits.items():
            errors[int(group.rows[index])] = f"does not fit the lake's column: {error}"
        value_indices[group.rows] = np.arange(total, total + len(values))
        value_indices[[int(group.rows[index]) for index in misfits]] = -1
        parts.append(values)
        total += len(values)
    if not parts:
        return pa.nulls(count, type)
    if len(parts) == 1 and total == count and bool((value_indices == np.arange(count)).all()):
        return parts[0]
    indices = pa.Array.from_buffers(
        pa.int64(), count, [validity_buffer(value_indices >= 0), pa.py_buffer(value_indices)]
    )
    return pa.concat_arrays(parts).take(indices)


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
