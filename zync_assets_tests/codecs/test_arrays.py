"""Rows as Python values: what Python has no time for becomes text, and nothing else changes."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zync_assets.codecs.arrays import python_rows
from zync_assets.lake.log import DataFile
from zync_assets.lake.parquet_rows import rows_at

UTC = pa.timestamp("us", tz="UTC")
YEAR_10000 = 253_402_300_800_000_000
DAY_OF_10000 = 2_932_897


@pytest.mark.parametrize(
    ("number", "kind", "wanted"),
    [
        (YEAR_10000, UTC, "10000-01-01T00:00:00+00:00"),
        (YEAR_10000 + 5, UTC, "10000-01-01T00:00:00.000005+00:00"),
        (YEAR_10000, pa.timestamp("us"), "10000-01-01T00:00:00"),
        (DAY_OF_10000, pa.date32(), "10000-01-01"),
        (-62_135_596_800_000_001, UTC, "0000-12-31T23:59:59.999999+00:00"),
        (0, UTC, datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)),
        (None, UTC, None),
    ],
)
def test_a_time_that_python_lacks_is_text_wherever_it_stands(
    number: int | None, kind: pa.DataType, wanted: Any
) -> None:
    far = pa.array([YEAR_10000], UTC)
    one = pa.array([number], kind)
    arrays = {
        "far": far,
        "one": one,
        "struct": pa.StructArray.from_arrays([one, pa.array(["x"])], names=["at", "name"]),
        "list": pa.ListArray.from_arrays([0, 1], one),
        "map": pa.MapArray.from_arrays([0, 1], pa.array(["k"]), one),
        "raw": pa.array([b"\xff"]),
    }
    [row] = python_rows(pa.RecordBatch.from_pydict(arrays))
    assert row == {
        "far": "10000-01-01T00:00:00+00:00",
        "one": wanted,
        "struct": {"at": wanted, "name": "x"},
        "list": [wanted],
        "map": {"k": wanted},
        "raw": b"\xff",
    }


def test_a_raw_record_with_a_time_past_9999_is_read(tmp_path: Path) -> None:
    kafka = pa.array([{"partition": 0, "offset": 7}], pa.struct([("partition", pa.int32()), ("offset", pa.int64())]))
    value = pa.array([{"at": YEAR_10000}], pa.struct([("at", UTC)]))
    pq.write_table(pa.table({"kafka": kafka, "value": value}), tmp_path / "one.parquet")
    found = rows_at(str(tmp_path), [DataFile("one.parquet", 1, 1, 0, 7, 7)], 0, [7], ["value"])
    assert found[7]["value"] == {"at": "10000-01-01T00:00:00+00:00"}
