"""Small neighbouring files become one that holds the same records."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zync_assets.errors import LakeError
from zync_assets.lake.compaction import FILES, SMALL, due_runs, rewrite, split_by_types
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw import ORDER
from zync_assets.lake.raw_files import MAX_RECORDS, ORDER_TYPE, RangeWriter, raw_schema, time_floors
from zync_assets.lake.staging import ACCOUNT
from zync_assets_tests.lake.rows import SCHEMA, file, records


def small(number: int, size: int = 10, partition: int = 0, name: str = "part", group: str | None = None) -> DataFile:
    return DataFile(f"{name}-{number}", 1, size, partition, number * 10, number * 10 + 9, group=group)


def test_few_small_files_stay_as_they_are() -> None:
    assert due_runs(small(number) for number in range(FILES - 1)) == []


def test_many_small_neighbours_are_one_run_in_the_order_of_their_offsets() -> None:
    files = [small(number) for number in range(FILES)]
    assert due_runs(reversed(files)) == [files]


def test_a_large_file_parts_its_neighbours() -> None:
    files = [small(number) for number in range(2 * FILES - 1)]
    files[FILES - 1] = small(FILES - 1, SMALL + 1)
    assert due_runs(files) == []


def test_partitions_and_topics_are_not_mixed_and_the_account_and_replays_stay() -> None:
    half = FILES // 2 + 1
    for files in (
        [small(number, partition=number % 2) for number in range(2 * half)],
        [small(number, group="ab"[number % 2]) for number in range(2 * half)],
        [small(number, group=ACCOUNT) for number in range(FILES)],
        [small(number, name="replay") for number in range(FILES)],
    ):
        assert due_runs(files) == []


@given(st.lists(st.integers(1, 2 * SMALL), max_size=4 * FILES))
def test_runs_are_neighbours_and_small_and_make_no_file_too_large(sizes: list[int]) -> None:
    files = [small(number, size) for number, size in enumerate(sizes)]
    runs = due_runs(files)
    taken = [item for run in runs for item in run]
    assert len(taken) == len(set(taken))
    for run in runs:
        assert len(run) >= FILES
        assert all(item.records <= SMALL for item in run)
        assert sum(item.records for item in run) <= MAX_RECORDS
        assert all(files.index(after) == files.index(before) + 1 for before, after in pairwise(run))


def test_the_file_holds_the_same_records_with_the_table_s_columns(tmp_path: Path) -> None:
    """One of the files is older than a column, another than a wider type."""
    wide = raw_schema(pa.string(), pa.struct([("id", pa.int64()), ("note", pa.string())]))
    uri = str(tmp_path)
    one = file(uri, records([0, 1, 7]))
    rows = [{**records([9]).to_pylist()[0], "value": {"id": 9, "note": "new"}}]
    with RangeWriter(uri, 0) as writer:
        writer.write(pa.RecordBatch.from_pylist(rows, schema=wide))
    made = rewrite(uri, [one, writer.files[0][0]], wide, "compact-0")
    found = pq.read_table(tmp_path / made.path)
    assert found.schema.equals(wide)
    assert found["value"].to_pylist() == [{"id": n, "note": None} for n in (0, 1, 7)] + [{"id": 9, "note": "new"}]
    assert (made.partition, made.first, made.last, made.records) == (0, 0, 9, 4)


def test_numbers_keep_the_kind_that_they_were_written_with(tmp_path: Path) -> None:
    """As a double a long past 2^53 is another one, and a float has other digits."""
    uri, number = str(tmp_path), 2**53 + 1
    kinds = [
        pa.int32(),
        pa.int64(),
        pa.float64(),
        pa.float64(),
        pa.float32(),
        pa.decimal128(20, 0),
        pa.decimal128(22, 2),
    ]
    files: list[DataFile] = []
    for offset, kind in enumerate(kinds):
        column = pa.list_(pa.struct([("n", kind)]))
        value = number if kind == pa.int64() else 7
        row = {**records([offset]).to_pylist()[0], "value": {"id": 1, "in": [{"n": value}]}}
        with RangeWriter(uri, 0) as writer:
            schema = raw_schema(pa.string(), pa.struct([("id", pa.int64()), ("in", column)]))
            writer.write(pa.RecordBatch.from_pylist([row], schema=schema))
        files.append(writer.files[0][0])
    assert list(split_by_types(uri, files)) == [files[:2], files[2:4]]
    table = raw_schema(pa.string(), pa.struct([("id", pa.int64()), ("in", pa.list_(pa.struct([("n", pa.float64())])))]))
    found = pq.read_table(tmp_path / rewrite(uri, files[:2], table, "compact-0").path)
    assert found["value"].to_pylist() == [{"id": 1, "in": [{"n": n}]} for n in (7, number)]
    with pytest.raises(LakeError, match="numbers of different types"):
        rewrite(uri, files[1:3], table, "compact-0")


def test_times_run_on_as_readers_of_the_single_files_carry_them(tmp_path: Path) -> None:
    uri = str(tmp_path)
    files = [file(uri, records([0, 1], [100, 500])), file(uri, records([2, 3], [200, 600]))]
    files.append(file(uri, records([4], [300])))
    made = rewrite(uri, files, SCHEMA, "compact-0")
    times = [row["time"].timestamp() * 1000 for row in pq.read_table(tmp_path / made.path)["kafka"].to_pylist()]
    assert times == [100, 500, 500, 600, 600]
    assert (made.min_time, made.max_time) == (100, 600)
    assert time_floors([made]) == {}
    stamps = [row["timestamp"].timestamp() * 1000 for row in pq.read_table(tmp_path / made.path)["kafka"].to_pylist()]
    assert stamps == [100, 500, 200, 600, 300]


def test_orders_are_kept_and_a_record_from_before_orders_has_none(tmp_path: Path) -> None:
    uri, table = str(tmp_path), SCHEMA.append(pa.field(ORDER, ORDER_TYPE))
    files = [file(uri, records([0]))]
    for offset, orders in ((1, [(5, 9), (6, 2)]), (3, [(6, 3)])):
        own = pa.array([{"high": high, "low": low} for high, low in orders], ORDER_TYPE)
        batch = records(range(offset, offset + len(orders)))
        files.append(file(uri, batch.append_column(ORDER, own)))
    made = rewrite(uri, files, table, "compact-0")
    rows = pq.read_table(tmp_path / made.path)[ORDER].to_pylist()
    assert rows == [None, *({"high": high, "low": low} for high, low in [(5, 9), (6, 2), (6, 3)])]
    assert (made.min_order, made.max_order) == (None, (6, 9))
    assert rewrite(uri, files[1:], table, "compact-0").min_order == (5, 2)


def test_files_that_overlap_are_not_touched(tmp_path: Path) -> None:
    uri = str(tmp_path)
    with pytest.raises(LakeError, match=r"not in order\. Restore"):
        rewrite(uri, [file(uri, records([0, 5])), file(uri, records([3]))], SCHEMA, "compact-0")


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    gone = file(str(tmp_path), records([0]))
    (tmp_path / gone.path).unlink()
    with pytest.raises(LakeError, match=gone.path):
        rewrite(str(tmp_path), [gone], SCHEMA, "compact-0")
