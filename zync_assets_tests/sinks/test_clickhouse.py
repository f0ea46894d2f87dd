"""ClickHouse as a target, on chdb: the conformance of any target, and what is ClickHouse's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import clickhouse_connect
import pyarrow as pa
import pytest

from zync_assets.checks.sink_checks import sink_results
from zync_assets.checks.state_checks import rows_match
from zync_assets.errors import CommitConflict, SinkError, TableUnfit, TargetUnavailable
from zync_assets.local.services import Services
from zync_assets.sinks.clickhouse import ClickhouseTarget
from zync_assets.sinks.steps import sink_all
from zync_assets.sinks.target import BadRecord, Column, Merge, TableSpec
from zync_assets_tests.mini import mini
from zync_assets_tests.sinks.conformance import (
    ORIGIN,
    PLACE,
    Change,
    apply,
    assert_conforms,
    assert_refuses,
    load,
    model,
    rows_of,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def query(folder: Path, sql: str) -> list[Any]:
    client = clickhouse_connect.get_client(interface="chdb", path=str(folder))
    try:
        if not sql.startswith("S"):
            client.command(sql)
            return []
        return [tuple(row) for row in client.query(sql).result_rows]
    finally:
        client.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of an engine that stays open, so that a further connection is cheap."""
    client = clickhouse_connect.get_client(interface="chdb", path=str(tmp_path))
    yield tmp_path
    client.close()


def target(folder: Path) -> ClickhouseTarget:
    return ClickhouseTarget(f"chdb://{folder}")


def spec(**types: pa.DataType) -> TableSpec:
    columns = tuple(Column(name, kind) for name, kind in types.items())
    return TableSpec("rows", columns, (columns[0].name,), "upsert")


def write(it: ClickhouseTarget, table: TableSpec, batch: Sequence[Change], first: int, *, at: int | None = 0) -> None:
    """Load a batch that begins at offset ``first``. ``at``: the position that the batch was planned from."""
    with it.run(PLACE) as name:
        loads = load(it, table, name, batch, first)
        it.merge(Merge(PLACE, table, ORIGIN, {0: at or None}, {0: first + len(batch)}, tuple(loads)))


def one(number: int, fields: dict[str, Any] | None) -> Change:
    return (number, ""), fields


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_clickhouse_conforms(tmp_path: Path, seed: int) -> None:
    def load_tables() -> list[str]:
        return [name for (name,) in query(tmp_path, "SHOW TABLES") if name.startswith("zync_load")]

    assert_conforms("clickhouse", f"chdb://{tmp_path}", load_tables, seed=seed)


@pytest.mark.slow
def test_random_changes_of_whole_and_partial_rows_give_the_folded_model(folder: Path) -> None:
    it = target(folder)
    apply(it, 7, 8)
    assert rows_of(it) == model(it, 7, 8)
    # Background merges, whenever they come, change nothing that a reader sees.
    query(folder, 'OPTIMIZE TABLE "rows of ""it""" FINAL')
    assert rows_of(it) == model(it, 7, 8)


def test_a_batch_that_is_written_again_or_too_late_changes_nothing(folder: Path) -> None:
    """Without a transaction, a run that is killed before it moves the position leaves rows, which the next run writes again."""
    it = target(folder)
    table = spec(id=pa.int64(), a=pa.string(), b=pa.string())
    it.prepare(table, create=True, evolve="none")
    first = [one(1, {"a": "1", "b": "1"}), one(2, {"a": "2", "b": "2"}), one(3, {"a": "3", "b": "3"})]
    second = [one(1, {"a": "x"}), one(2, None), one(3, {"b": "y"}), one(4, {"a": "z"})]
    write(it, table, first, 0)
    wanted = [(1, "x", "1"), (3, "3", "y"), (4, "z", None)]
    read = "SELECT id, a, b FROM rows FINAL ORDER BY id"
    with it.run(PLACE) as name:
        late = load(it, table, f"{name}late", first, 0)
        again = load(it, table, f"{name}again", second, 3)
        write(it, table, second, 3, at=3)
        assert query(folder, read) == wanted
        # The position is lost, as if its write had not come: both batches are merged once more, in any order.
        query(folder, "TRUNCATE TABLE zync_positions")
        it.merge(Merge(PLACE, table, ORIGIN, {0: None}, {0: 7}, tuple(again)))
        assert query(folder, read) == wanted
        query(folder, "TRUNCATE TABLE zync_positions")
        it.merge(Merge(PLACE, table, ORIGIN, {0: None}, {0: 3}, tuple(late)))
        assert query(folder, read) == wanted
    # The same range in the same shares has the same token, and leaves no second copy.
    third = [one(5, {"a": "5", "b": "5"})]
    for _ in range(2):
        query(folder, "TRUNCATE TABLE zync_positions")
        write(it, table, third, 7)
    assert query(folder, "SELECT count() FROM rows WHERE id = 5") == [(1,)]


def test_appended_records_have_their_coordinates_in_the_sorting_key(folder: Path) -> None:
    it = target(folder)
    coordinates = [Column(f"kafka_{name}", kind, f"kafka.{name}") for name, kind in COORDINATES.items()]
    table = TableSpec(
        "log", (*coordinates, Column("v", pa.string())), tuple(item.name for item in coordinates), "insert"
    )
    it.prepare(table, create=True, evolve="none")
    rows = pa.RecordBatch.from_pylist(
        [{"kafka_topic": "t", "kafka_partition": 0, "kafka_offset": at, "v": "same"} for at in (4, 7)],
        pa.schema([(item.name, item.type) for item in table.columns]),
    )
    marks = [pa.array(["u", "u"]), pa.nulls(2, pa.string()), rows.column(2)]
    names = ["zync_op", "zync_set", "zync_offset"]
    whole = pa.RecordBatch.from_arrays([*rows.columns, *marks], names=[*rows.schema.names, *names])
    for expected in (None, 8):
        with it.run(PLACE) as name:
            loads = (it.load(table, name, iter([whole])),)
            it.merge(Merge(PLACE, table, ORIGIN, {0: expected}, {0: 8 + (expected or 0)}, loads))
    assert query(folder, "SELECT kafka_offset, v FROM log FINAL ORDER BY 1") == [(4, "same"), (7, "same")]
    with pytest.raises(TableUnfit, match="include name kafka_topic, kafka_partition and kafka_offset"):
        it.prepare(TableSpec("other", table.columns[2:], ("kafka_offset",), "insert"), create=True, evolve="none")


COORDINATES = {"topic": pa.string(), "partition": pa.int32(), "offset": pa.int64()}


def test_values_that_clickhouse_would_change_are_refused(folder: Path) -> None:
    it = target(folder)
    table = spec(id=pa.int64(), day=pa.date32(), at=pa.timestamp("us"))
    for fields, words in (
        (
            {"day": date(1899, 12, 31)},
            "the column day is 1899-12-31; ClickHouse's date goes from 1900-01-01 to 2299-12-31",
        ),
        ({"at": datetime(2300, 1, 1)}, "the column at is 2300-01-01T00:00:00; ClickHouse's timestamp_ntz goes from"),
    ):
        assert words in assert_refuses(it, table, [one(1, fields)])
    query(
        folder,
        "CREATE TABLE own (id Int64, u Nullable(UUID), e Enum8('a', 'b') DEFAULT 'b', zync_offset UInt64, zync_deleted UInt8)"
        " ENGINE = ReplacingMergeTree(zync_offset, zync_deleted) ORDER BY id",
    )
    own = TableSpec(
        "own", (Column("id", pa.int64()), Column("u", pa.string()), Column("e", pa.string())), ("id",), "upsert"
    )
    for fields, words in (
        ({"u": "no uuid", "e": "a"}, "the column u is 'no uuid', which is no UUID"),
        ({"u": None, "e": "c"}, "Unknown element 'c' for enum"),
        ({"u": None, "e": None}, "Cannot convert NULL value to non-Nullable type"),
        ({"e": None}, "Cannot convert NULL value to non-Nullable type"),
    ):
        text = assert_refuses(it, own, [one(1, fields)])
        assert words in text and "zync_load" not in text
    uuid = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"
    write(it, own, [one(1, {"u": uuid, "e": "a"}), one(2, {"u": uuid})], 0)
    write(it, own, [one(1, {"u": None}), one(2, {"e": "a"}), one(3, None)], 2, at=2)
    assert query(folder, "SELECT id, toString(u), e FROM own FINAL ORDER BY id") == [(1, None, "a"), (2, uuid, "a")]


def test_a_table_that_does_not_fit_is_left_as_it_is_and_the_error_has_the_ddl(folder: Path) -> None:
    it = target(folder)
    table = spec(id=pa.int64(), n=pa.int32(), p=pa.decimal128(5, 2))
    with pytest.raises(TableUnfit, match=r"Set create: true, or run:\nCREATE TABLE `rows` \(`id` Int64, `n` Nullable"):
        it.prepare(table, create=False, evolve="none")
    it.prepare(table, create=True, evolve="none")
    new = spec(id=pa.int64(), n=pa.int64(), p=pa.decimal128(8, 3), more=pa.string())
    with pytest.raises(
        TableUnfit, match=r"Set evolve: widen, or run:\nALTER TABLE `rows` ALTER COLUMN `n` TYPE Nullable"
    ):
        it.prepare(new, create=True, evolve="add")
    it.prepare(new, create=True, evolve="widen")
    write(it, new, [one(1, {"n": 2**40, "p": Decimal("12345.678"), "more": "m"})], 0)
    assert query(folder, "SELECT n, p, more FROM rows") == [(2**40, Decimal("12345.678"), "m")]
    with pytest.raises(TableUnfit, match=r"column n is Nullable\(Int64\), and its source is string; change the column"):
        it.prepare(spec(id=pa.int64(), n=pa.string()), create=True, evolve="widen")
    query(folder, "CREATE TABLE plain (id Int64) ENGINE = MergeTree ORDER BY id")
    with pytest.raises(TableUnfit, match=r"no ReplacingMergeTree\(zync_offset, zync_deleted\) ordered by \(id\)"):
        it.prepare(TableSpec("plain", (Column("id", pa.int64()),), ("id",), "upsert"), create=True, evolve="widen")


@pytest.mark.slow
def test_a_refused_record_counts_when_the_position_has_passed_it(folder: Path) -> None:
    it = target(folder)
    table = spec(id=pa.int64(), v=pa.string())
    it.prepare(table, create=True, evolve="none")
    bad = BadRecord(0, 1, "id=1", "no")
    it.merge(Merge(PLACE, table, ORIGIN, {0: None}, {0: 2}, bad=(bad,)))
    assert it.progress(PLACE).bad == (bad,)
    # A run was killed before it moved the position. The next run finds that the record is good now.
    query(folder, "TRUNCATE TABLE zync_positions")
    assert it.progress(PLACE).bad == ()
    write(it, table, [one(1, {"v": "a"}), one(2, {"v": "b"})], 0)
    assert it.progress(PLACE).bad == ()
    later = BadRecord(0, 2, "id=3", "no")
    it.merge(Merge(PLACE, table, ORIGIN, {0: 2}, {0: 3}, bad=(later,)))
    it.merge(Merge(PLACE, table, ORIGIN, {0: 3}, {}, cured=((0, 2),)))
    assert it.progress(PLACE).bad == ()


@pytest.mark.slow
def test_a_table_that_is_emptied_begins_again(folder: Path) -> None:
    it = target(folder)
    table = spec(id=pa.int64(), v=pa.string())
    it.prepare(table, create=True, evolve="none")
    batch = [one(1, {"v": "a"}), one(2, {"v": "b"})]
    write(it, table, batch, 0)
    it.merge(Merge(PLACE, table, ORIGIN, {}, {}, clear=True))
    assert it.progress(PLACE).next == {}
    assert query(folder, "SELECT count() FROM rows") == [(0,)]
    # The same ranges come again: the tokens of the emptied table are forgotten.
    write(it, table, batch, 0)
    assert query(folder, "SELECT v FROM rows FINAL ORDER BY id") == [("a",), ("b",)]
    # A kill in the middle leaves the mark, and no batch is taken until the table is emptied again.
    mark = "('pipe', 'sink', 'Staging.rows', -1, 0, 'table-1')"
    query(folder, f"INSERT INTO zync_positions VALUES {mark}")
    assert it.progress(PLACE).origin != ORIGIN
    with pytest.raises(CommitConflict):
        write(it, table, batch, 2, at=2)
    it.merge(Merge(PLACE, table, ORIGIN, {}, {}, clear=True))
    assert it.progress(PLACE).origin is None
    write(it, table, batch, 0)


def test_an_outage_is_no_refusal_and_no_error_has_the_password() -> None:
    for address in ("clickhouse://me:secret@127.0.0.1:1/shop", "clickhouse://me:secret@[bad/shop"):
        with pytest.raises(SinkError) as error:
            ClickhouseTarget(address).progress(PLACE)
        assert "secret" not in str(error.value)
        assert isinstance(error.value, TargetUnavailable)


def test_the_error_names_the_extra_that_is_missing() -> None:
    code = (
        "import sys; sys.modules['clickhouse_connect'] = None\n"
        "from zync_assets.sinks.target import open_target\n"
        "from zync_assets_tests.sinks.conformance import sink\n"
        "open_target(sink('clickhouse', 'clickhouse://host/shop'))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Install it: pip install 'zync-assets[clickhouse]'" in ended.stderr


PIPELINE = """
inputs:
  - {topic: $left, pool: Raw, key-format: json, key-schema: "id bigint", value-format: json,
     schema: "before struct<id: bigint>, after struct<id: bigint, v string, n struct<a: int>>, op string"}
  - {topic: $right, pool: Raw, key-format: string, value-format: json, schema: "id bigint, v string"}
sinks:
  - {name: house, type: clickhouse, url: "chdb://$lake/../house", from: [Raw.$left], table: rows}
  - {name: log, type: clickhouse, url: "chdb://$lake/../house", from: [Raw.$right], table: log, mode: insert}
"""


@pytest.mark.slow
def test_a_sink_of_a_pipeline_writes_to_clickhouse(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, PIPELINE.replace("$lake/..", str(tmp_path)))

    def change(op: str, key: int, v: str | None = None) -> tuple[bytes, Any]:
        after = None if op == "d" else {"id": key, "v": v, "n": {"a": key}}
        return f'{{"id": {key}}}'.encode(), {"before": None, "after": after, "op": op}

    it.send(it.left, change("c", 1, "a"), change("c", 2, "b"), change("c", 3, "c"), change("d", 3))
    it.send(it.right, {"id": 1, "v": "x"}, {"id": 1, "v": "x"})
    it.ingest()
    assert sum(made.records for made in sink_all(it.pipeline, lambda: spark)) == 5
    it.send(it.left, change("u", 1, "__debezium_unavailable_value"), change("d", 2), change("u", 4, "d"))
    it.ingest()
    assert sum(made.records for made in sink_all(it.pipeline, lambda: spark)) == 3
    assert list(sink_all(it.pipeline, lambda: spark)) == []
    house = tmp_path / "house"
    assert query(house, "SELECT id, v, n FROM rows FINAL ORDER BY id") == [(1, "a", '{"a":1}'), (4, "d", '{"a":4}')]
    assert query(house, "SELECT kafka_offset, id, v FROM log FINAL ORDER BY 1") == [(0, 1, "x"), (1, 1, "x")]
    results = list(sink_results(it.pipeline))
    assert [result.passed for result in results] == [True] * len(results)
    for sink in it.pipeline.sinks:
        assert rows_match(it.pipeline, lambda: spark, sink, sink.tables[0]).passed
