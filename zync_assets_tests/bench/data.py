"""The data of the benchmarks: Avro records in topics, and raw tables as ingest leaves them.

All columns are made with numpy from the record's number, so that any slice is the same each time, and encoded by the
package's own encoder: to make data takes a few seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Producer

from zync_assets.codecs.dispatch import make_encoder
from zync_assets.kafka.registry import Registry
from zync_assets.kafka.topics import create_topic, delete_topic, topic_states
from zync_assets.lake import raw, storage
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw import RawState
from zync_assets.lake.raw_files import HEADERS_TYPE, KAFKA_TYPE, RangeWriter, raw_schema
from zync_assets.pipeline import Format, Pipeline

EPOCH = 1_700_000_000_000
SLICE = 100_000

Columns = Callable[[np.ndarray[Any, Any]], pa.Array]
"""Record numbers → their values, as an array of structs."""

_CITIES = np.array(["Amsterdam", "Berlin", "Copenhagen", "Dublin", "Edinburgh", "Florence", "Graz", "Hamburg"])


def record(name: str, *fields: tuple[str, Any]) -> dict[str, Any]:
    """The Avro schema of a record."""
    return {"type": "record", "name": name, "fields": [{"name": field, "type": kind} for field, kind in fields]}


def texts(prefix: str, numbers: np.ndarray[Any, Any]) -> pa.Array:
    """One text per number: the prefix, then the number."""
    return pc.binary_join_element_wise(prefix, pa.array(numbers).cast(pa.string()), "")


ORDER = record(
    "Order",
    ("id", "long"),
    ("customer", "string"),
    ("city", "string"),
    ("item", ["null", "string"]),
    ("amount", "int"),
    ("price", "double"),
    ("paid", "boolean"),
    ("at", "long"),
)


def orders(numbers: np.ndarray[Any, Any]) -> pa.Array:
    """Values of ORDER: 8 fields, some 60 bytes."""
    items = pa.array(np.where(numbers % 5 == 0, None, _CITIES[numbers % 8]), pa.string())  # pyright: ignore[reportCallIssue]
    columns = [
        pa.array(numbers, pa.int64()),
        texts("customer ", numbers % 10_007),
        pa.array(_CITIES[numbers % 8]),
        items,
        pa.array(numbers % 1000, pa.int32()),
        pa.array(numbers / 7),
        pa.array(numbers % 2 == 0),
        pa.array(EPOCH + numbers),
    ]
    return pa.StructArray.from_arrays(columns, [field["name"] for field in ORDER["fields"]])


_ROW = record(
    "Row",
    ("id", "long"),
    ("customer", ["null", "string"]),
    ("price", {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}),
    ("discount", ["null", {"type": "bytes", "logicalType": "decimal", "precision": 14, "scale": 4}]),
    ("picture", ["null", "bytes"]),
    ("created", {"type": "long", "logicalType": "timestamp-micros"}),
)
ENVELOPE = record(
    "Envelope",
    ("before", ["null", _ROW]),
    ("after", ["null", "Row"]),
    ("source", record("Source", ("table", "string"), ("lsn", ["null", "long"]), ("snapshot", ["null", "string"]))),
    ("op", "string"),
    ("ts_ms", ["null", "long"]),
)


def envelopes(numbers: np.ndarray[Any, Any]) -> pa.Array:
    """Values of ENVELOPE, as Debezium writes the changes of a table with decimals and bytes."""
    changed = pa.array(numbers % 3 == 0)
    row = [
        pa.array(numbers, pa.int64()),
        texts("customer ", numbers % 10_007),
        pa.array(numbers % 1_000_000, pa.int32()).cast(pa.decimal128(12, 2)),
        pa.array(numbers % 100, pa.int32()).cast(pa.decimal128(14, 4)),
        pa.array([b"0123456789abcdef"] * len(numbers), pa.binary()),
        pa.array(EPOCH * 1000 + numbers, pa.timestamp("us", "UTC")),
    ]
    names = [field["name"] for field in _ROW["fields"]]
    none = pa.array(~np.asarray(changed), pa.bool_())
    source = pa.StructArray.from_arrays(
        [pa.array(["orders"] * len(numbers)), pa.array(numbers, pa.int64()), pa.nulls(len(numbers), pa.string())],
        ["table", "lsn", "snapshot"],
    )
    return pa.StructArray.from_arrays(
        [
            pa.StructArray.from_arrays(row, names, mask=none),
            pa.StructArray.from_arrays(row, names),
            source,
            pa.array(np.where(numbers % 3 == 0, "u", "c")),
            pa.array(EPOCH + numbers),
        ],
        [field["name"] for field in ENVELOPE["fields"]],
    )


def fill_topic(
    pipeline: Pipeline,
    topic: str,
    partitions: int,
    records: int,
    schema: dict[str, Any],
    columns: Columns,
    format: Format = "avro",
) -> None:
    """Fill a topic with ``records`` records, the same number in each partition. A full topic stays as it is.
    ``format``: of the values; keys are texts."""
    share = records // partitions
    found = topic_states(pipeline.kafka, [topic]).get(topic)
    if found is not None:
        if [part.end for part in found.partitions] == [share] * partitions:
            return
        # An earlier run was stopped while it filled the topic, and left a wrong number of records.
        delete_topic(pipeline.kafka, topic)
    create_topic(pipeline.kafka, topic, partitions, 1, {"retention.ms": "-1"})
    assert pipeline.registry is not None
    text = json.dumps(schema)
    number = Registry(pipeline.registry).register(f"{topic}-value", text) if format == "avro" else None
    encoder = make_encoder(format, text, number)
    producer = Producer({**pipeline.kafka, "linger.ms": "20", "queue.buffering.max.messages": "1000000"})
    for partition in range(partitions):
        for numbers in _slices(partition * share, (partition + 1) * share):
            encoded = encoder.encode(columns(numbers))
            assert not encoded.bad
            values, keys = encoded.payloads.to_pylist(), np.char.add("k", numbers.astype(str)).tolist()
            producer.produce_batch(
                topic,
                [{"key": key, "value": value} for key, value in zip(keys, values, strict=True)],
                partition=partition,
            )
            producer.flush()


def _slices(first: int, end: int) -> Iterator[np.ndarray[Any, Any]]:
    for start in range(first, end, SLICE):
        yield np.arange(start, min(end, start + SLICE))


Known = dict[str, RawState]
"""Topic → the state of its raw table: who makes many commits in a row hands it on, and the log is not read again for each."""


def append_raw(
    lake: str,
    pool: str,
    topic: str,
    offsets: np.ndarray[Any, Any],
    keys: pa.Array,
    values: pa.Array,
    times: pa.Array,
    known: Known | None = None,
) -> None:
    """Commit records to partition 0 of a raw table as ingest would, in files of as many records as a task of it has.
    ``times``: milliseconds since the epoch, as long as ``offsets``."""
    state = opened_raw(lake, pool, topic, known)
    schema = raw_schema(keys.type, values.type)
    start, end = state.next[0] if state else 0, int(offsets[-1]) + 1
    files = []
    for first in range(0, len(offsets), 500_000):
        with RangeWriter(storage.raw_uri(lake, pool, topic), 0) as writer:
            for at in range(first, min(first + 500_000, len(offsets)), 50_000):
                part = slice(at, min(at + 50_000, first + 500_000, len(offsets)))
                count = len(offsets[part])
                time = times[part].cast(pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC"))
                kafka = pa.StructArray.from_arrays(
                    [
                        pa.repeat(pa.scalar(topic), count),
                        pa.repeat(pa.scalar(0, pa.int32()), count),
                        pa.array(offsets[part], pa.int64()),
                        time,
                        time,
                        pa.nulls(count, HEADERS_TYPE),
                    ],
                    fields=list(KAFKA_TYPE),
                )
                ids = pa.repeat(pa.scalar(1, pa.int32()), count)
                columns = [kafka, keys[part], values[part], pa.nulls(count, pa.int32()), ids]
                writer.write(pa.RecordBatch.from_arrays(columns, schema=schema))
        files += [found for found, _ in writer.files]
    advance = raw.RawAdvance(topic, "bench", schema, files, {} if state else {0: start}, {0: end})
    raw.commit_advance(storage.raw_uri(lake, pool, topic), state, advance)
    if known is not None and (made := raw.open_raw(lake, pool, topic)) is not None:
        known[topic] = made


def opened_raw(lake: str, pool: str, topic: str, known: Known | None = None) -> RawState | None:
    """The state of a raw table; what is not known yet is read, and becomes known."""
    state = known.get(topic) if known is not None else None
    state = state or raw.open_raw(lake, pool, topic)
    if known is not None and state is not None:
        known[topic] = state
    return state


def make_empty(uri: str, files: Iterable[DataFile]) -> None:
    """Make empty files of a history that the log alone has: no commit takes a file that is not there."""
    for item in files:
        path = Path(uri, item.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
