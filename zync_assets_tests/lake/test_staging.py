"""The staging table: outputs and the whole account in one commit, and a head that each commit replaces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from zync_assets.errors import CommitConflict, LakeError
from zync_assets.lake import staging, storage
from zync_assets.lake.head import Head, OutputPosition, Position
from zync_assets.lake.log import DataFile
from zync_assets.lake.staging import (
    BASE_SCHEMA,
    StagingState,
    commit_batch,
    open_staging,
    read_ledger,
    write_ledger,
)

OUT = "out.new-orders"
SCHEMA = BASE_SCHEMA.append(pa.field(staging.key_column(OUT), pa.string()))
HEAD = Head(
    1,
    {("shop.orders", 0): Position(0, 5, 5), ("shop.orders", 10): Position(7, 9, 1)},
    {(OUT, 0): OutputPosition(0, 3, "topic-id", 1)},
    {("shop.orders", 0, "done"): 3, ("shop.orders", 0, "pending"): 2},
    {("new-order", "shop.orders"): 2},
    {"0123456789abcdef": (OUT, '{"key":{}}')},
)


@pytest.fixture
def lake(tmp_path: Path) -> str:
    return str(tmp_path)


def outputs(lake: str, first: int, end: int, name: str = "") -> DataFile:
    """A file with output records ``first`` to before ``end``."""
    uri = storage.staging_uri(lake, "Staging")
    path = f"batch-{first}{name}/topic={OUT}/part-0.parquet"
    rows = [
        {"kafka": {"topic": OUT, "partition": 0, "offset": offset}, "rule": "new-order", "schema": "0123456789abcdef"}
        for offset in range(first, end)
    ]
    storage.make_folder(storage.join(uri, path.rsplit("/", 1)[0]))
    schema = pa.schema([field for field in BASE_SCHEMA if field.name in ("kafka", "rule", "schema")])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), storage.join(uri, path))
    size = storage.file_size(storage.join(uri, path))
    return DataFile(path, size, len(rows), 0, first, end - 1, group=OUT)


def ledger(lake: str, name: str, *entries: dict[str, object]) -> DataFile:
    uri = storage.staging_uri(lake, "Staging")
    return write_ledger(uri, f"{name}/{staging.ACCOUNT_FOLDER}/part-0.parquet", entries)


def state(lake: str) -> StagingState:
    found = open_staging(lake, "Staging")
    assert found is not None
    return found


def first_batch(lake: str) -> StagingState:
    done = {"kind": "done", "topic": "shop.orders", "partition": 0, "first": 0, "end": 5}
    commit_batch(lake, "Staging", None, HEAD, SCHEMA, [outputs(lake, 0, 3), ledger(lake, "b1", done)])
    return state(lake)


def second(head: Head, end: int) -> Head:
    return replace(head, batch=2, outputs={(OUT, 0): replace(head.outputs[OUT, 0], next=end)})


def offsets(lake: str) -> list[int]:
    """Output offsets as delta-rs itself reads them."""
    table = DeltaTable(storage.staging_uri(lake, "Staging")).to_pyarrow_table(
        columns=["kafka"], filters=[("topic", "=", OUT)]
    )
    return sorted(row["kafka"]["offset"] for row in table.to_pylist())


def test_the_head_comes_back_as_it_was_committed(lake: str) -> None:
    assert open_staging(lake, "Staging") is None
    found = first_batch(lake)
    assert found.head == HEAD
    assert offsets(lake) == [0, 1, 2]
    assert [item.first for item in found.output_files(OUT)] == [0]


def test_a_commit_replaces_the_head_and_adds_to_the_ledger(lake: str) -> None:
    before = first_batch(lake)
    waits = {
        "kind": "pending",
        "topic": "shop.orders",
        "partition": 0,
        "first": 5,
        "end": 6,
        "rule": "new-order",
        "hash": 1,
    }
    commit_batch(
        lake, "Staging", before, second(before.head, 5), SCHEMA, [outputs(lake, 3, 5), ledger(lake, "b2", waits)]
    )
    found = state(lake)
    assert found.head == second(HEAD, 5)
    assert offsets(lake) == [0, 1, 2, 3, 4]
    assert sorted(read_ledger(found)["kind"].to_pylist()) == ["done", "pending"]
    assert read_ledger(found, ["pending"]).to_pylist() == [{**dict.fromkeys(staging.ACCOUNT_TYPE.names), **waits}]


def test_of_two_batches_from_one_state_one_wins(lake: str) -> None:
    before = first_batch(lake)
    commit_batch(lake, "Staging", before, second(before.head, 5), SCHEMA, [outputs(lake, 3, 5)])
    with pytest.raises(CommitConflict):
        commit_batch(lake, "Staging", before, second(before.head, 6), SCHEMA, [outputs(lake, 3, 6, "again")])
    assert offsets(lake) == [0, 1, 2, 3, 4]
    assert state(lake).head.outputs[OUT, 0].next == 5


def test_widening_does_not_let_a_second_batch_through(lake: str) -> None:
    before = first_batch(lake)
    commit_batch(lake, "Staging", before, second(before.head, 5), SCHEMA, [outputs(lake, 3, 5)])
    wide = SCHEMA.append(pa.field(staging.value_column(OUT), pa.struct([("id", pa.int64())])))
    with pytest.raises(CommitConflict):
        commit_batch(lake, "Staging", before, second(before.head, 6), wide, [outputs(lake, 3, 6, "again")])
    assert offsets(lake) == [0, 1, 2, 3, 4]


def test_widening_does_not_let_a_batch_past_a_release_of_raw_records(lake: str) -> None:
    """The batch may look again at a record that is about to be removed."""
    before = first_batch(lake)
    staging.release(before, "shop.orders", {0: 4})
    wide = SCHEMA.append(pa.field(staging.value_column(OUT), pa.struct([("id", pa.int64())])))
    with pytest.raises(CommitConflict):
        commit_batch(lake, "Staging", before, second(before.head, 6), wide, [outputs(lake, 3, 6, "again")])
    assert offsets(lake) == [0, 1, 2]


@pytest.mark.parametrize(("first", "end", "upcoming"), [(4, 6, 6), (3, 5, 6), (2, 5, 5), (3, 6, 5)])
def test_numbers_with_a_gap_are_refused(lake: str, first: int, end: int, upcoming: int) -> None:
    before = first_batch(lake)
    with pytest.raises(LakeError, match="gap"):
        commit_batch(lake, "Staging", before, second(before.head, upcoming), SCHEMA, [outputs(lake, first, end)])
    assert offsets(lake) == [0, 1, 2]


def test_what_an_abandoned_task_of_spark_still_writes_is_no_part_of_a_batch(tmp_path: Path) -> None:
    late = tmp_path / "topic=t" / "_temporary" / "0" / "attempt_1"
    late.mkdir(parents=True)
    for folder in (tmp_path / "topic=t", late):
        (folder / "part-0.snappy.parquet").touch()
    assert storage.list_files(str(tmp_path / "topic=t"), ".parquet") == ["part-0.snappy.parquet"]


def test_an_account_without_its_head_is_refused(lake: str) -> None:
    found = first_batch(lake)
    heads = [item for item in found.files if "head-" in item.path]
    from zync_assets.lake.tables import commit

    commit(found.table, [], {"foreign": 1}, removals=heads, partition_by=["topic"])
    with pytest.raises(LakeError, match="0 head files"):
        open_staging(lake, "Staging")
