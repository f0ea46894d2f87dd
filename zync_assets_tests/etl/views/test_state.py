"""The slices of a large batch, and the last record of each key, from sorted records in any batches."""

from __future__ import annotations

import datetime
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zync_assets.etl.views import state
from zync_assets.etl.views.state import TASK_RECORDS, KeyWriter, slice_bounds, slice_sql
from zync_assets.etl.views.tables import VERSION_TYPE
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw_files import ORDER_TYPE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = pa.schema(
    [
        ("order", ORDER_TYPE),
        ("version", VERSION_TYPE),
        ("state-key:t", pa.struct([("id", pa.int64())])),
        ("state-row:t", pa.struct([("name", pa.string())])),
    ]
)
KEYS = [3, 3, 3, 5, 8, 8, 9]
OFFSETS = [4, 7, 9, 1, 0, 2, 5]


def records(first: int, end: int) -> pa.RecordBatch:
    """The sorted records ``first`` to ``end``."""
    rows = [
        {
            "first": at == 0 or KEYS[at - 1] != KEYS[at],
            "key": {"id": KEYS[at]},
            "row": None if KEYS[at] == 5 else {"name": f"name {OFFSETS[at]}"},
            "place": {"high": KEYS[at], "low": 0},
            "version": {"partition": 1, "offset": OFFSETS[at], "high": 10 * OFFSETS[at], "low": 0},
        }
        for at in range(first, end)
    ]
    version = pa.struct([(name, pa.int32() if name == "partition" else pa.int64()) for name in VERSION_TYPE.names[:4]])
    kinds = [pa.bool_(), SCHEMA.field("state-key:t").type, SCHEMA.field("state-row:t").type, ORDER_TYPE, version]
    names = ["first", "key", "row", "place", "version"]
    return pa.RecordBatch.from_pylist(rows, pa.schema(list(zip(names, kinds, strict=True))))


@pytest.mark.parametrize("cuts", [(0, 7), (0, 1, 2, 3, 4, 5, 6, 7), (0, 2, 7), (0, 3, 6, 7)])
def test_each_key_has_its_last_record_and_all_offsets(
    tmp_path: Path, cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each batch is looked at by itself, and is a row group.
    monkeypatch.setattr(state, "_GATHERED", 1)
    monkeypatch.setattr(state, "ROW_GROUP", 1)
    writer = KeyWriter(str(tmp_path), "batch", "#state:t", SCHEMA)
    batches = (records(first, end) for first, end in pairwise(cuts))
    [found] = [each.column(0)[0].as_py() for each in writer.run(batches)]
    entry: DataFile = pickle.loads(found)
    assert (entry.records, entry.group, entry.min_order, entry.max_order) == (4, "#state:t", (3, 0), (9, 0))
    rows = pq.read_table(tmp_path / entry.path).to_pylist()
    assert [(row["state-key:t"]["id"], row["version"]["offset"], row["version"]["offsets"]) for row in rows] == [
        (3, 9, [4, 7, 9]),
        (5, 1, [1]),
        (8, 2, [0, 2]),
        (9, 5, [5]),
    ]
    assert [row["state-row:t"] for row in rows] == [{"name": "name 9"}, None, {"name": "name 2"}, {"name": "name 5"}]
    assert [row["version"]["high"] for row in rows] == [90, 10, 20, 50]


def test_a_task_without_records_writes_no_file(tmp_path: Path) -> None:
    assert list(KeyWriter(str(tmp_path), "batch", "#state:t", SCHEMA).run([])) == []
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1), st.integers(0, 1))), st.integers(0, 9 * TASK_RECORDS))
def test_slices_begin_at_places_of_the_sample(sample: list[tuple[int, int, int]], count: int) -> None:
    bounds = slice_bounds(sample, count)
    assert bounds == sorted(bounds) and set(bounds) <= set(sample)
    assert len(bounds) == (max(1, -(-count // TASK_RECORDS)) - 1 if sample else 0)


@pytest.mark.parametrize(
    "places",
    [
        # Each key has a place of its own; or all keys have a few places; or most keys have one place among others.
        pytest.param([(id - 500, 0) for id in range(1_000)], id="distinct"),
        pytest.param([(id % 3, id % 2) for id in range(1_000)], id="few"),
        pytest.param([(7 if id % 10 else id, 2**62) for id in range(1_000)], id="one"),
    ],
)
def test_slices_are_about_equal_and_in_the_order_of_places(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, places: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(state, "TASK_RECORDS", 100)
    rows = pa.table({"key": range(len(places)), "place": [{"high": high, "low": low} for high, low in places]})
    frame = spark.createDataFrame(rows).selectExpr("key", "struct(place.high, place.low, xxhash64(key)) AS place")
    sample = random.Random(1).sample([tuple(row["place"]) for row in frame.collect()], 300)
    bounds = slice_bounds(sample, len(places))
    found = frame.selectExpr("key", f"{slice_sql(bounds, 'place')} AS slice").collect()
    sizes, spans = Counter(row["slice"] for row in found), dict[int, list[tuple[int, int]]]()
    for row in found:
        spans.setdefault(row["slice"], []).append(places[row["key"]])
    assert set(sizes) <= set(range(10)) and max(sizes.values()) <= 200
    assert all(max(spans[one]) <= min(spans[next]) for one, next in pairwise(sorted(spans)))


def test_an_error_leaves_no_file_of_versions_open(tmp_path: Path) -> None:
    order = pa.array([{"high": 0, "low": 0}], ORDER_TYPE)

    def tables() -> Iterator[pa.Table]:
        yield pa.table({"order": order, "version": pa.nulls(1, VERSION_TYPE)})
        assert any(str(tmp_path) in item.path for item in psutil.Process().open_files())
        raise ValueError("no further table")

    # The error keeps the writer in memory.
    with pytest.raises(ValueError, match="no further table") as error:
        state.write_versions(str(tmp_path), "folder", "group", tables())
    assert [item.path for item in psutil.Process().open_files() if str(tmp_path) in item.path] == []
    assert error.tb is not None


MOMENT, MICROS = datetime.datetime(1960, 1, 1), datetime.timedelta(hours=1, microseconds=1)
KINDS: dict[str, tuple[pa.DataType, Callable[[int], Any]]] = {
    "byte": (pa.int8(), lambda at: at % 100 - 50),
    "short": (pa.int16(), lambda at: -at),
    "int": (pa.int32(), lambda at: at * 700_000 - 5),
    "long": (pa.int64(), lambda at: (at - 1500) * 10**15),
    "flag": (pa.bool_(), lambda at: at % 3 == 0),
    "float": (pa.float32(), lambda at: at / 4),
    "double": (pa.float64(), lambda at: at / 7),
    "text": (pa.string(), lambda at: f"näme {at % 17}"),
    "bytes": (pa.binary(), lambda at: bytes([at % 256]) * (at % 5)),
    "decimal9": (pa.decimal128(9, 2), lambda at: Decimal(at) / 100),
    "decimal18": (pa.decimal128(18, 3), lambda at: Decimal(at * 10**9) / 1000),
    "decimal38": (pa.decimal128(38, 5), lambda at: Decimal(at * 10**20) / 100_000),
    "date": (pa.date32(), lambda at: MOMENT.date() + datetime.timedelta(at)),
    "instant": (pa.timestamp("us", "UTC"), lambda at: MOMENT.replace(tzinfo=datetime.UTC) + at * MICROS),
    "time": (pa.timestamp("us"), lambda at: MOMENT + at * MICROS),
    "numbers": (pa.list_(pa.int64()), lambda at: list(range(at % 4))),
    "texts": (pa.list_(pa.string()), lambda at: ["a"] * (at % 3)),
    "map": (pa.map_(pa.string(), pa.int32()), lambda at: [("k", at)]),
    "struct": (pa.struct([("a", pa.int32()), ("t", pa.string())]), lambda at: {"a": at, "t": str(at)}),
}
"""Columns by name: the type of each column, and its value in a row."""


@pytest.mark.parametrize("writer", ["arrow", "spark"])
def test_values_of_each_type_come_back_from_a_page_of_any_file(
    spark: SparkSession, tmp_path: Path, writer: str
) -> None:
    """A large batch writes with Arrow, and a large fold with Spark. Spark reads both, page by page; a small fold reads with
    Arrow. The table's name has dots, as the names of Debezium's topics."""
    count = 6 * state.PAGE_RECORDS
    columns = [
        pa.array([None if at % 7 == 3 else make(at) for at in range(count)], kind) for kind, make in KINDS.values()
    ]
    row = pa.StructArray.from_arrays(columns, list(KINDS))
    version = [{"partition": 0, "offset": at, "high": at, "low": 0, "offsets": [at, at + 1]} for at in range(count)]
    rows = pa.table(
        {
            "order": pa.array([{"high": at, "low": 0} for at in range(count)], ORDER_TYPE),
            "version": pa.array(version, VERSION_TYPE),
            "state-key:shop.t": pa.StructArray.from_arrays([pa.array(range(count), pa.int64())], ["id"]),
            "state-row:shop.t": row,
        }
    )
    entry = state.write_versions(str(tmp_path), "written", "group", [rows])
    assert entry is not None
    path = tmp_path / entry.path
    if writer == "spark":
        spark.read.parquet(str(path)).coalesce(1).write.options(**state._WRITING).parquet(str(tmp_path / "spark"))
        [path] = (tmp_path / "spark").glob("*.parquet")
    with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
        assert file.read()["state-row:shop.t"].to_pylist() == row.to_pylist()
        pages = file.metadata.row_group(0)
        encodings = {
            pages.column(at).path_in_schema: pages.column(at).encodings for at in range(file.metadata.num_columns)
        }
    assert all("DICTIONARY" not in name for names in encodings.values() for name in names)
    assert "DELTA_BINARY_PACKED" in encodings["order.high"] and "DELTA_BYTE_ARRAY" in encodings["state-row:shop.t.text"]
    wanted = [0, 5, 499, 500, 1712, count - 1]
    frame = spark.read.parquet(str(path)).where(f"order.high IN ({', '.join(map(str, wanted))})")
    for name, column in zip(KINDS, columns, strict=True):
        selected = frame.selectExpr("order.high AS high", f"`state-row:shop.t`.`{name}` AS value").toArrow()
        by_place = dict(zip(selected["high"].to_pylist(), selected["value"].to_pylist(), strict=True))
        assert by_place == {at: column[at].as_py() for at in wanted}, name
