"""Small Parquet files with raw records, written as ingest writes them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pyarrow as pa

from zync_assets.lake.log import DataFile
from zync_assets.lake.raw_files import BAD_SCHEMA, RangeWriter, raw_schema

SCHEMA = raw_schema(pa.string(), pa.struct([("id", pa.int64())]))
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def records(offsets: Sequence[int], times: Sequence[int] | None = None, partition: int = 0) -> pa.RecordBatch:
    """A record at each offset, its time in milliseconds (default: the offset)."""
    rows = [
        {
            "kafka": {"topic": "t", "partition": partition, "offset": offset, "timestamp": at, "time": at},
            "key": f"k{offset}",
            "value": {"id": offset},
        }
        for offset, time in zip(offsets, times or offsets, strict=True)
        for at in (EPOCH + timedelta(milliseconds=time),)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def bad_records(offsets: Sequence[int], partition: int = 0) -> pa.RecordBatch:
    rows = [
        {
            "kafka": {"topic": "t", "partition": partition, "offset": offset, "time": EPOCH},
            "value": b"?",
            "stage": "value",
            "error": "no Avro",
            "end": offset + 1,
        }
        for offset in offsets
    ]
    return pa.RecordBatch.from_pylist(rows, schema=BAD_SCHEMA)


def file(uri: str, batch: pa.RecordBatch, name: str = "part") -> DataFile:
    """The batch as one file of a table, not yet committed."""
    partition = batch.column("kafka")[0]["partition"].as_py()
    with RangeWriter(uri, partition, name) as writer:
        writer.write(batch)
    return writer.files[0][0]
