"""The files of a table that are due for a fold, and the fold of few records with Arrow beside Spark's."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zync_assets.codecs.spark_types import spark_type
from zync_assets.etl.views import state_fold
from zync_assets.etl.views.state import StateFiles, StateReader, write_state
from zync_assets.etl.views.state_fold import RUNS, due_files
from zync_assets.etl.views.tables import VERSION_TYPE, Table, TableType
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw_files import ORDER_TYPE
from zync_assets.spark.tasks import run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(name: str, *records: int) -> list[DataFile]:
    """The files of one write."""
    return [DataFile(f"{name}/part-{at}.parquet", 1, count) for at, count in enumerate(records)]


def paths(files: StateFiles | None) -> list[str]:
    return [] if files is None else [item.path for item in files.all]


def test_many_files_of_one_write_are_not_due() -> None:
    large = run("batch-1", *[250_000] * 100)
    small = [item for at in range(2, RUNS + 1) for item in run(f"batch-{at}", 1_000)]
    assert paths(due_files(StateFiles([*large, *small]))) == []
    newest = run("batch-99", 1_000)
    # The small files become one. The large ones are left alone.
    assert paths(due_files(StateFiles([*large, *small, *newest]))) == [item.path for item in [*small, *newest]]


def test_the_replaced_versions_of_a_write_belong_to_its_run() -> None:
    versions = [item for at in range(RUNS - 1) for item in run(f"batch-{at}/state-0/gone=0", 10_000)]
    replaced = [item for at in range(RUNS - 1) for item in run(f"batch-{at}/state-0/gone=1", 1)]
    assert due_files(StateFiles(versions, replaced)) is None
    newest = run("batch-99/state-0/gone=0", 10_000)
    assert len(paths(due_files(StateFiles([*versions, *newest], replaced)))) == 2 * RUNS - 1


def test_all_files_are_due_if_a_quarter_of_the_versions_is_replaced() -> None:
    versions, replaced = (
        run("batch-1", 300, 300),
        [item for at in range(RUNS) for item in run(f"batch-{at}/gone", 150 // RUNS + 1)],
    )
    assert paths(due_files(StateFiles(versions, replaced))) == [item.path for item in [*versions, *replaced]]
    assert paths(due_files(StateFiles(versions * 5, replaced))) == [item.path for item in replaced]


def test_a_record_is_folded_as_often_as_its_run_can_double() -> None:
    runs, folded = list[list[DataFile]](), 0
    for at in range(1000):
        runs.append(run(f"batch-{at}", 1))
        due = due_files(StateFiles([item for each in runs for item in each]))
        if due is not None:
            own = set(paths(due))
            count = sum(item.records for item in due.all)
            runs = [*(each for each in runs if each[0].path not in own), run(f"fold-{at}", count)]
            folded += count
    assert len(runs) <= 10 + RUNS and folded <= 10 * 1000


@given(st.lists(st.lists(st.integers(1, 1_000), min_size=1, max_size=4), max_size=3 * RUNS))
def test_files_of_one_write_are_due_together(runs: list[list[int]]) -> None:
    files = [item for at, records in enumerate(runs) for item in run(f"batch-{at}", *records)]
    due = set(paths(due_files(StateFiles(files))))
    assert not due or len(runs) >= RUNS
    for at, records in enumerate(runs):
        own = {item.path for item in run(f"batch-{at}", *records)}
        assert own <= due or not own & due


TYPES = {
    "id": pa.int64(),
    "at": pa.timestamp("us", "UTC"),
    "local": pa.timestamp("us"),
    "day": pa.date32(),
    "price": pa.decimal128(38, 10),
    "raw": pa.binary(),
    "name": pa.string(),
    "share": pa.float64(),
    "tags": pa.list_(pa.string()),
    "inner": pa.struct([("n", pa.int32()), ("list", pa.list_(pa.struct([("x", pa.int64())])))]),
}
TIMES = [datetime(1, 1, 1), datetime(1582, 10, 10), datetime(1899, 12, 31, 23, 59, 59, 999999), datetime(9999, 12, 31)]
ROW = {
    "id": 7,
    "at": TIMES[0].replace(tzinfo=UTC),
    "local": TIMES[0],
    "day": date(1582, 10, 10),
    "price": Decimal("-1234567890123456789012345678.0123456789"),
    "raw": b"\x00\xff",
    "name": "\u00f6\u0000",
    "share": float("-inf"),
    "tags": ["a", None, ""],
    "inner": {"n": None, "list": [{"x": 1}, None]},
}


def version_row(key: int, offset: int, row: dict[str, Any] | None, gone: int = 0) -> dict[str, Any]:
    version = {"partition": key % 2, "offset": offset, "high": offset, "low": 0, "offsets": [offset]}
    return {"key": {"id": key, "part": str(key)}, "row": row, "version": version, "gone": gone}


@pytest.mark.parametrize("deleted", [False, True])
def test_arrow_folds_as_spark_does(spark: SparkSession, tmp_path: Path, deleted: bool) -> None:
    table = Table("t", "t", "key", None, None)
    key, row = pa.struct([("id", pa.int64()), ("part", pa.string())]), pa.struct(list(TYPES.items()))
    columns = [("order", ORDER_TYPE), ("version", VERSION_TYPE), (table.key_column, key), (table.row_column, row)]
    kind = TableType(table, spark_type(key), spark_type(row), "key", "row", "false", pa.schema(columns))
    writes = [
        # Version 9 of key 3, of an older file that is not folded, is replaced.
        [
            version_row(key, key, {**ROW, "at": time.replace(tzinfo=UTC), "local": time})
            for key, time in enumerate(TIMES)
        ],
        [version_row(1, 11, None), version_row(1, 1, ROW, 1), version_row(3, 9, ROW, 1)],
        [version_row(5, 21, dict.fromkeys(TYPES)), version_row(2, 22, ROW), version_row(2, 2, ROW, 1)],
    ]
    reader, due = StateReader(spark, str(tmp_path)), StateFiles()
    schema = pa.schema([("key", key), ("row", row), ("version", VERSION_TYPE), ("gone", pa.int32())])
    for at, rows in enumerate(writes):
        frame = spark.createDataFrame(pa.Table.from_pylist(rows, schema))
        due += write_state(frame, kind, str(tmp_path), f"batch-{at}/state-0", small=True)
    fold = state_fold._Fold(str(tmp_path), "fold", kind, due, due, deleted)
    by_spark, small = fold.by_spark(reader), replace(fold, folder="small")
    [by_arrow] = run_tasks(spark, 1, lambda _: small.by_arrow())
    assert by_arrow is not None
    for theirs, mine in ((by_spark.versions, by_arrow.versions), (by_spark.replaced, by_arrow.replaced)):
        assert [(item.records, item.group, item.min_order, item.max_order) for item in mine] == [
            (item.records, item.group, item.min_order, item.max_order) for item in theirs
        ]
        found = [sorted(reader.rows(kind, files).toArrow().to_pylist(), key=str) for files in (theirs, mine)]
        assert found[0] == found[1] and len(found[0]) > 0
        places = [pq.read_table(tmp_path / item.path)["order"].to_pylist() for item in (*theirs, *mine)]
        assert places[0] == places[1] == sorted(places[0], key=lambda place: (place["high"], place["low"]))
    # Spark reads the files of before a column was widened.
    wider = kind.schema.set(3, pa.field(table.row_column, pa.struct([*row, ("more", pa.int32())])))
    assert replace(small, kind=replace(kind, schema=wider)).by_arrow() is None
