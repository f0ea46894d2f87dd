"""The index of a state: it finds the places of the rows with a value, and no row with a value is elsewhere."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import IntegerType, LongType

from zync_assets import load_pipeline
from zync_assets.codecs.spark_types import spark_type
from zync_assets.etl.views import state_index
from zync_assets.etl.views.state import StateFiles, StateReader
from zync_assets.etl.views.state_index import (
    KeyFilter,
    indexed_columns,
    indexes_of,
    join_columns,
    looked_up_places,
    sql_values,
    unindexed_rows,
    write_index,
)
from zync_assets.etl.views.tables import VERSION_TYPE, Table, TableType
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw_files import ORDER_TYPE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A topic's name may have dots, which are no way to a field.
TABLE = Table("shop.orders", "shop.orders", "key", None, None)
KEY = pa.struct([("id", pa.int64())])
ROW = pa.struct([("id", pa.int64()), ("customer", pa.int64()), ("city", pa.string()), ("price", pa.float64())])
SCHEMA = pa.schema([("order", ORDER_TYPE), ("version", VERSION_TYPE), (TABLE.key_column, KEY), (TABLE.row_column, ROW)])
KIND = TableType(TABLE, spark_type(KEY), spark_type(ROW), "key", "(value)", "false", SCHEMA)

Row = tuple[int, int | None, str | None]
"""Key, customer and city of a row."""


def versions(folder: Path, rows: Sequence[Row | int]) -> DataFile:
    """A file of versions, in a folder of its own. A key alone is a deleted row."""
    made: list[dict[str, Any]] = []
    for item in sorted(rows, key=lambda each: each if isinstance(each, int) else each[0]):
        key, customer, city = (item, None, None) if isinstance(item, int) else item
        row = None if isinstance(item, int) else {"id": key, "customer": customer, "city": city, "price": 0.5}
        version = {"partition": 0, "offset": key, "high": 0, "low": 0, "offsets": [key]}
        made.append(
            {
                "order": {"high": key, "low": 0},
                "version": version,
                TABLE.key_column: {"id": key},
                TABLE.row_column: row,
            }
        )
    path = f"batch-{uuid.uuid4().hex}/state-0/gone=0/part-0.parquet"
    (folder / path).parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(made, SCHEMA), folder / path)
    return DataFile(path, 1, len(made), group=TABLE.versions)


def key_filter(column: str, values: Sequence[int | str]) -> KeyFilter:
    return KeyFilter(None, [f"o.{column}"], column, value_list=[], values=pa.array(values))


def reader_of(folder: Path, spark: SparkSession | None = None) -> StateReader:
    return StateReader(cast("SparkSession", spark), str(folder))


@given(
    runs=st.lists(
        st.lists(
            st.tuples(st.integers(-50, 50), st.none() | st.integers(0, 5), st.none() | st.sampled_from("abé"))
            | st.integers(-50, 50),
            max_size=12,
            unique_by=lambda each: each if isinstance(each, int) else each[0],
        ),
        min_size=1,
        max_size=4,
    ),
    customers=st.lists(st.integers(0, 7), min_size=1),
)
def test_an_index_gives_the_places_of_all_rows_with_a_value(
    runs: list[list[Row | int]], customers: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("state")
    reader = reader_of(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_index, "GROUP_RECORDS", 2)
        patch.setattr(state_index, "SHARE", 0)
        files = StateFiles([versions(folder, rows) for rows in runs])
        made = StateFiles(indexes=write_index(reader, KIND, files.versions, ["customer", "city"], small=True))
        found = looked_up_places(reader, KIND, files + made, key_filter("customer", customers))
        cities = looked_up_places(reader, KIND, files + made, key_filter("city", ["é", "x"]))
    rows = [row for run in runs for row in run if not isinstance(row, int)]
    if not any(runs):
        assert found is None
        return
    assert found is not None and cities is not None
    assert found.highs == sorted({key for key, customer, _ in rows if customer in customers})
    assert cities.highs == sorted({key for key, _, city in rows if city == "é"})


def test_a_large_write_has_the_same_index_in_sorted_files(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_index, "FILE_RECORDS", 50)
    monkeypatch.setattr(state_index, "SHARE", 0)
    files = StateFiles([versions(tmp_path, [(key, key * 7 % 40, None) for key in range(200)])])
    reader = reader_of(tmp_path, spark)
    written = write_index(reader, KIND, files.versions, ["customer", "city"], small=False)
    customers = [item for item in written if item.group == "#index:shop.orders:customer"]
    tables = [
        pq.read_table(tmp_path / item.path)[TABLE.row_column].combine_chunks().field("customer") for item in customers
    ]
    spans = sorted((values[0].as_py(), values[-1].as_py()) for values in tables)
    assert len(spans) == 4 and [low > high for (_, high), (low, _) in pairwise(spans)] == [True] * 3
    assert sum(item.records for item in customers) == 200
    # No row has a city: one file without an entry says so.
    assert [item.records for item in written if item not in customers] == [0]
    both = files + StateFiles(indexes=written)
    found = looked_up_places(reader, KIND, both, key_filter("customer", [3, 39]))
    assert found is not None and found.highs == [key for key in range(200) if key * 7 % 40 in (3, 39)]
    none = looked_up_places(reader, KIND, both, key_filter("city", ["a"]))
    assert none is not None and none.highs == []


def test_a_look_up_reads_all_rows_without_an_index_or_where_it_needs_most_of_them(tmp_path: Path) -> None:
    reader = reader_of(tmp_path)
    old, new = (
        versions(tmp_path, [(key, key % 7, None) for key in range(first, first + 2_000)]) for first in (0, 2_000)
    )
    index = write_index(reader, KIND, [new], ["customer"], small=True)
    # A file of an older version of zync has no index.
    assert looked_up_places(reader, KIND, StateFiles([old, new], indexes=index), key_filter("customer", [3])) is None
    # Each of many places is a page to read.
    assert looked_up_places(reader, KIND, StateFiles([new], indexes=index), key_filter("customer", [3])) is None
    few = looked_up_places(reader, KIND, StateFiles([new], indexes=index), key_filter("customer", [9]))
    assert few is not None and few.highs == []
    assert looked_up_places(reader, KIND, StateFiles([new], indexes=index), key_filter("city", ["a"])) is None
    assert indexes_of(StateFiles([old, new], indexes=index), [new]) == index
    assert indexes_of(StateFiles([old, new], indexes=index), [old]) == []


def test_integers_and_texts_that_are_not_the_order_of_the_files_are_indexed() -> None:
    assert indexed_columns(KIND, ["id", "CUSTOMER", "city", "price", "missing"]) == ["customer", "city"]


def test_the_columns_of_joins_and_look_ups_are_indexed(tmp_path: Path) -> None:
    path = tmp_path / "shop.yaml"
    path.write_text(
        """
inputs:
  - {topic: orders, pool: Raw, format: json, key-schema: id bigint, value-schema: "id bigint, customer bigint"}
  - {topic: lines, pool: Raw, format: json, key-schema: id bigint, value-schema: "id bigint, of bigint, shop bigint"}
  - {topic: events, pool: Raw, format: json, key-schema: id bigint, value-schema: "id bigint, line bigint"}
outputs:
  - {topic: documents, pool: Staging, format: json, create: {}}
  - {topic: alerts, pool: Staging, format: json, create: {}}
transforms:
  - type: view
    tables: {o: orders, l: lines, m: lines, n: lines}
    from: >-
      o JOIN l ON l.of = o.id JOIN m ON abs(m.shop) = o.customer
      JOIN n ON n.of = o.id AND n.shop = o.customer
    key: {id: o.id, l: l.id, m: m.id, n: n.id}
    value: {id: o.id}
    out: documents
  - type: stateless
    in: events
    lookup: {line: {table: lines, on: line.id = in.value.line, missing: "null"}}
    key: in.key
    value: {of: line.of}
    out: alerts
"""
    )
    found = join_columns(load_pipeline(path).rules)
    assert found == {"lines": ["of", "id"], "orders": ["id", "customer"]}


def test_rows_that_an_index_lacks_are_counted(tmp_path: Path, spark: SparkSession) -> None:
    reader = reader_of(tmp_path, spark)
    file = versions(tmp_path, [(1, 7, "a"), (2, 8, None), 3])
    files = StateFiles([file], indexes=write_index(reader, KIND, [file], ["customer", "city"], small=True))
    assert unindexed_rows(reader, KIND, files) == 0
    # Another program replaces the file of versions under its name.
    moved = versions(tmp_path, [(1, 7, "a"), (2, 9, "b"), (4, None, "a")])
    (tmp_path / moved.path).replace(tmp_path / file.path)
    assert unindexed_rows(reader, KIND, files) == 3


def test_the_least_and_the_greatest_number_of_each_type_are_listed(spark: SparkSession) -> None:
    for kind, bits in ((IntegerType(), 31), (LongType(), 63)):
        numbers = [-(2**bits), -1, 2**bits - 1]
        listed = sql_values(kind, numbers)
        assert listed is not None
        [row] = spark.sql(f"SELECT array({', '.join(listed)}) AS numbers").collect()
        assert row["numbers"] == numbers
        assert spark.sql(f"SELECT {listed[0]} AS least").schema[0].dataType == kind
    # No int equals a larger number.
    assert sql_values(IntegerType(), [7, 2**31, -(2**31) - 1]) == ["7"]
