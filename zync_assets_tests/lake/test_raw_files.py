"""The writers of raw files leave no file open, whatever happens. A wide table keeps the orders of its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from zync_assets.errors import TableDamaged
from zync_assets.lake import compaction, log, storage, tables
from zync_assets.lake.raw import ORDER, RawAdvance, check_whole, commit_advance, open_raw
from zync_assets.lake.raw_files import ORDER_TYPE, PartitionWriters, RangeWriter
from zync_assets_tests.lake.rows import records


def open_files(folder: Path) -> list[str]:
    return [item.path for item in psutil.Process().open_files() if str(folder) in item.path]


def test_an_error_leaves_no_file_of_a_partition_open(tmp_path: Path) -> None:
    writer = RangeWriter(str(tmp_path), 0)
    with pytest.raises(ValueError, match="no further batch"), writer:
        writer.write(records([0]))
        assert len(open_files(tmp_path)) == 1
        raise ValueError("no further batch")
    assert open_files(tmp_path) == []
    assert writer.files == []


def test_an_error_leaves_no_file_of_any_partition_open(tmp_path: Path) -> None:
    writers = PartitionWriters(str(tmp_path), "replay")
    with pytest.raises(ValueError, match="no further batch"), writers:
        for partition in (0, 1):
            writers[partition].write(records([0], partition=partition))
        assert len(open_files(tmp_path)) == 2
        raise ValueError("no further batch")
    assert open_files(tmp_path) == []
    assert writers.files == []


def test_every_partition_has_its_files(tmp_path: Path) -> None:
    with PartitionWriters(str(tmp_path), "replay") as writers:
        for partition in (0, 1, 0):
            writers[partition].write(records([len(writers)], partition=partition))
    assert [(item.partition, item.records) for item in writers.files] == [(0, 2), (1, 1)]
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("fields", [22, 40], ids=["high is column 32", "many columns"])
@pytest.mark.parametrize("properties", [tables.CONFIGURATION, {}], ids=["new", "older"])
def test_a_wide_table_keeps_the_orders_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, properties: Mapping[str, str | None], fields: int
) -> None:
    """delta-rs reads the statistics of 32 columns unless the table says otherwise. An older table does not: its log is read,
    of which a checkpoint may be the first part."""
    monkeypatch.setattr(tables, "CONFIGURATION", properties)
    uri = storage.raw_uri(str(tmp_path), "Raw", "t")
    rows = records(range(3))
    value = pa.array([{f"f{number}": 1 for number in range(fields)}] * 3)
    rows = rows.set_column(rows.schema.get_field_index("value"), "value", value)
    rows = rows.append_column(ORDER, pa.array([{"high": 5, "low": low} for low in range(3)], ORDER_TYPE))
    for number in range(3):
        with RangeWriter(uri, 0) as writer:
            writer.write(rows)
        state = open_raw(str(tmp_path), "Raw", "t")
        files = [item for item, _ in writer.files]
        advance = RawAdvance("t", "id", rows.schema, files, {} if number else {0: 0}, {0: 3 * number + 3})
        commit_advance(uri, state, replace(advance, orders={0: (5, 2)}, domain="shop"))
        if number == 1:
            DeltaTable(uri).create_checkpoint()
    tables.forget(uri)
    state = open_raw(str(tmp_path), "Raw", "t")
    assert state is not None
    assert [(item.min_order, item.max_order) for item in state.files] == [((5, 0), (5, 2))] * 3


def test_a_file_that_an_earlier_version_compacted_keeps_its_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That version knew no orders of a wide table's files, and logged none of the compacted file. The first records may have
    none. A file of another program, without statistics, is named."""
    monkeypatch.setattr(tables, "CONFIGURATION", {})
    uri = storage.raw_uri(str(tmp_path), "Raw", "t")
    value = pa.array([{f"f{number}": 1 for number in range(40)}] * 3)
    for number in range(3):
        rows = records(range(3 * number, 3 * number + 3))
        rows = rows.set_column(rows.schema.get_field_index("value"), "value", value)
        if number:
            orders = pa.array([{"high": 5 * number, "low": low} for low in range(3)], ORDER_TYPE)
            rows = rows.append_column(ORDER, orders)
        with RangeWriter(uri, 0) as writer:
            writer.write(rows)
        state = open_raw(str(tmp_path), "Raw", "t")
        files = [item for item, _ in writer.files]
        advance = RawAdvance("t", "id", rows.schema, files, {} if number else {0: 0}, {0: 3 * number + 3})
        commit_advance(uri, state, replace(advance, orders={0: (5 * number, 2)} if number else {}, domain="shop"))
    for first, bounds in ((1, ((5, 0), (10, 2))), (0, (None, (10, 2)))):
        table = tables.open_table(uri)
        assert table is not None
        run = sorted(table.files, key=lambda item: item.first or 0)[first:]
        compacted = compaction.rewrite(uri, run, table.schema, "compact-0")
        Path(uri, compacted.path).rename(Path(uri, f"compact-{first}.parquet"))
        compacted = replace(compacted, path=f"compact-{first}.parquet", min_order=None, max_order=None)
        compaction.commit(table, [compacted], [run])
        tables.forget(uri)
        state = open_raw(str(tmp_path), "Raw", "t")
        assert state is not None
        assert (state.files[-1].min_order, state.files[-1].max_order) == bounds
    entry = {"path": "foreign.parquet", "partitionValues": {}, "size": 1, "modificationTime": 0, "dataChange": True}
    Path(uri, "_delta_log", log.name(state.table.version + 1)).write_text(json.dumps({"add": entry}))
    with pytest.raises(TableDamaged, match=r"no statistics of file foreign\.parquet"):
        check_whole(open_raw(str(tmp_path), "Raw", "t") or state)
