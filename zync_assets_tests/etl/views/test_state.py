"""The last record of each key, from sorted records in any batches."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zync_assets.etl.views import state
from zync_assets.etl.views.state import KeyWriter
from zync_assets.etl.views.tables import VERSION_TYPE
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw_files import ORDER_TYPE

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
