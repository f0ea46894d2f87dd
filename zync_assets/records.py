"""The columns of a raw record and of a quarantined one, as Arrow schemas."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from zync_assets.offsets import OffsetRange

HEADERS_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

KAFKA_TYPE = pa.struct(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("time", pa.timestamp("us", "UTC")),
        ("headers", HEADERS_TYPE),
    ]
)
"""Where a record comes from. ``timestamp`` is the record's own; ``time`` never runs back within a partition: the highest
timestamp up to the record, a missing one taken from the record before, a future one cut to the time of ingest."""

BAD_SCHEMA = pa.schema(
    [
        ("kafka", KAFKA_TYPE),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("stage", pa.string()),
        ("error", pa.string()),
        ("end", pa.int64()),
    ]
)
"""A quarantined record, whole: its bytes and headers as Kafka had them, and why it is here.
``stage``: ``key`` or ``value`` (could not be decoded), ``shape`` (the input's shape fails on it), or one of RANGE_STAGES.
``end`` is the offset after the entry."""

LOST, DROPPED = "lost", "dropped"
RANGE_STAGES = (LOST, DROPPED)
"""Entries that stand for the offsets from ``kafka.offset`` to before ``end``, ``key`` and ``value`` null: retention removed
them before they were ingested; or the input's shape left out these records."""


def raw_schema(key: pa.DataType, value: pa.DataType) -> pa.Schema:
    """The columns of a raw table. A side of which only nulls were seen has no type yet, and no column."""
    sides = [pa.field(name, kind) for name, kind in (("key", key), ("value", value)) if not pa.types.is_null(kind)]
    ids = [pa.field("key_schema_id", pa.int32()), pa.field("value_schema_id", pa.int32())]
    return pa.schema([pa.field("kafka", KAFKA_TYPE), *sides, *ids])


def lost_rows(topic: str, lost: Iterable[OffsetRange], now: int) -> list[pa.RecordBatch]:
    """Side-table rows for offset ranges that retention removed, one batch per range. ``now``: milliseconds since the epoch."""
    return [
        pa.RecordBatch.from_pylist(
            [
                {
                    "kafka": {"topic": topic, "partition": part.partition, "offset": part.first, "time": now * 1000},
                    "stage": LOST,
                    "end": part.end,
                    "error": f"offsets {part.first} to {part.end - 1} were gone by retention before they were ingested",
                }
            ],
            schema=BAD_SCHEMA,
        )
        for part in lost
    ]


def dropped_rows(kafka: pa.StructArray, firsts: pa.Array, ends: pa.Array) -> pa.RecordBatch:
    """Side-table rows for records that the input's shape excludes, one row per range of consecutive records.

    ``kafka``: the ``kafka`` struct of one record per range, of which only place and time are kept.
    """
    count = len(firsts)
    columns = dict(zip(KAFKA_TYPE.names, kafka.flatten(), strict=True))
    columns |= {"offset": firsts, "timestamp": pa.nulls(count, KAFKA_TYPE.field("timestamp").type)}
    columns["headers"] = pa.nulls(count, HEADERS_TYPE)
    place = pa.StructArray.from_arrays([columns[name] for name in KAFKA_TYPE.names], fields=list(KAFKA_TYPE))
    nothing = pa.nulls(count, pa.binary())
    stages = pa.repeat(pa.scalar(DROPPED), count)
    return pa.RecordBatch.from_arrays(
        [place, nothing, nothing, stages, pa.nulls(count, pa.string()), ends], schema=BAD_SCHEMA
    )
