"""Rows as Python values: what Python has no time for becomes text, and nothing else changes."""

from __future__ import annotations

import base64
import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zync_assets.codecs import arrays
from zync_assets.codecs.arrays import base64_bytes, python_rows
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


ENCODED = st.binary(max_size=9).map(lambda raw: base64.b64encode(raw).decode())
NEARLY_ENCODED = st.text("AZaz09+/=-_ é", max_size=9)


def decoded(text: str) -> bytes | None:
    """The bytes of a base64 text; None for no such text. Python also takes a padding too many, which RFC 4648 lacks."""
    try:
        return base64.b64decode(text, validate=True) if text.isascii() and len(text) % 4 == 0 else None
    except ValueError:
        return None


@pytest.mark.parametrize("enough", [0, 1 << 60], ids=["by compiled loops", "by numpy"])
@given(
    texts=st.lists(st.none() | ENCODED | NEARLY_ENCODED, max_size=9),
    empty_is_odd=st.booleans(),
    first=st.integers(0, 2),
)
def test_base64_is_read_as_python_reads_it(
    enough: int, texts: list[str | None], empty_is_odd: bool, first: int
) -> None:
    whole = pa.array(texts, pa.string())
    # The buffers of a message can't be written to.
    message = pa.RecordBatch.from_arrays([whole], ["text"]).serialize()
    whole = pa.ipc.read_record_batch(pa.py_buffer(message.to_pybytes()), pa.schema([("text", pa.string())]))["text"]
    array, wanted = whole[first:], [None if text is None else decoded(text) for text in texts[first:]]
    valid = None if array.null_count == 0 else array.is_valid().to_numpy(zero_copy_only=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "ENOUGH", enough)
        values, odd = base64_bytes(array, valid, empty_is_odd=empty_is_odd)
    values.validate(full=True)
    is_odd = [
        text is not None and (value is None or (empty_is_odd and not text))
        for text, value in zip(texts[first:], wanted, strict=True)
    ]
    assert odd.tolist() == is_odd
    assert values.to_pylist() == [None if wrong else value for value, wrong in zip(wanted, is_odd, strict=True)]
