"""The writers of raw files leave no file open, whatever happens."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from zync_assets.lake.raw_files import PartitionWriters, RangeWriter
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
