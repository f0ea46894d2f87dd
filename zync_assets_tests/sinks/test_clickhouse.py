"""ClickHouse as a target, on chdb: the conformance of any target, and what is ClickHouse's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import clickhouse_connect
import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, NewPartitions

from zync_assets.checks.state_checks import rows_match
from zync_assets.errors import CommitConflict, SinkError, TableUnfit, TargetUnavailable
from zync_assets.local.services import Services
from zync_assets.sinks.clickhouse import ClickhouseTarget
from zync_assets.sinks.fold import fold
from zync_assets.sinks.steps import reset_sink, sink_all
from zync_assets.sinks.target import BadRecord, Column, Merge, TableSpec, load_names
from zync_assets_tests.mini import mini
from zync_assets_tests.sinks.batches import apply_days, assert_defaults_of_older_rows_alone
from zync_assets_tests.sinks.conformance import (
    LATER,
    ORIGIN,
    PLACE,
    Change,
    Update,
    apply,
    assert_conforms,
    assert_refuses,
    load,
    model,
    records,
    rows_of,
)
from zync_assets_tests.sinks.story import play

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
    query(folder, 'OPTIMIZE TABLE "rows of ""it"" at 5%s" FINAL')
    assert rows_of(it) == model(it, 7, 8)


def test_a_number_of_days_becomes_a_date_in_a_new_column_alone(folder: Path) -> None:
    apply_days(target(folder))
    rows = query(folder, "SELECT old, toString(day) FROM rows FINAL ORDER BY id")
    assert rows == [(-1, None), (19782, "2024-02-29"), (None, "1969-12-31")]


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
    # The pipeline file was edited in between: the same range in the same shares has other values, and they count.
    for value in ("5", "x", "5"):
        query(folder, "TRUNCATE TABLE zync_positions")
        write(it, table, [one(5, {"a": value, "b": "5"})], 7)
        assert query(folder, "SELECT a FROM rows FINAL WHERE id = 5") == [(value,)]


class Killed(Exception):
    """The run ends here."""


def killed(*_: Any) -> None:
    raise Killed


def step(number: int) -> list[dict[str, Any] | None]:
    """The records that may be the ``number``-th of a key."""
    return [Update(a=f"update {number}"), {"a": f"new {number}"}, {"b": f"new {number}"}, None]


@pytest.mark.parametrize("again", [1, 2, 3])
@pytest.mark.parametrize("dead", [1, 2, 3])
def test_a_killed_batch_may_come_again_with_fewer_or_more_records(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dead: int, again: int
) -> None:
    """There is a key for each sequence of three records, with an existing row and without a row. A killed run wrote ``dead``
    records of each key. The next run commits ``again`` records, and a third run commits all."""
    it = target(folder)
    # A new row has the default if its record lacks the column.
    monkeypatch.setitem(LATER, "b", "default")
    table = spec(id=pa.int64(), a=pa.string(), b=pa.string())
    it.prepare(table, create=True, evolve="none")
    start: list[dict[str, Any] | None] = [None, {"a": "old", "b": "old"}]
    histories = list(enumerate(product(start, *map(step, range(3)))))

    def commit(first: int, end: int) -> None:
        """Commit a part of each history. The keys have two partitions, whose offsets differ."""
        batch = [one(key, fields) for key, history in histories for fields in history[first:end]]
        offsets = [key + len(histories) * (at + key % 2) for key, _ in histories for at in range(first, end)]
        made = replace(records(table, batch, 0), versions=pa.array(offsets, pa.int64()))
        with it.run(PLACE) as name:
            load = it.load(table, f"{name}0", iter([fold(made, table.key, ["a", "b"])]))
            expected = {partition: first * len(histories) or None for partition in (0, 1)}
            it.merge(Merge(PLACE, table, ORIGIN, expected, dict.fromkeys((0, 1), end * len(histories)), (load,)))

    def rows(end: int) -> list[Any]:
        found: dict[int, dict[str, Any]] = {}
        for key, history in histories:
            for fields in history[:end]:
                if fields is None:
                    found.pop(key, None)
                elif key in found or not isinstance(fields, Update):
                    found.setdefault(key, {"a": None, "b": LATER["b"]}).update(fields)
        return [(key, row["a"], row["b"]) for key, row in sorted(found.items())]

    commit(0, 1)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(it, "_advance", killed)
        commit(1, 1 + dead)
    # A reader sees the rows of the killed run until the positions pass them.
    for first, end in [(1, 1 + again), *([(1 + again, 4)] if again < 3 else [])]:
        commit(first, end)
        if end > dead:
            assert query(folder, "SELECT id, a, b FROM rows FINAL ORDER BY id") == rows(end)


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
    # The same range with the same values has the same token, and leaves no second copy. Other values take their place.
    query(folder, "SYSTEM STOP MERGES log")
    query(folder, "TRUNCATE TABLE log")
    for value, copies in (("a", 1), ("a", 1), (None, 2), (None, 2)):
        query(folder, "TRUNCATE TABLE zync_positions")
        column = pa.array([value] * 2, pa.string())
        with it.run(PLACE) as name:
            loads = (it.load(table, name, iter([whole.set_column(3, "v", column)])),)
            it.merge(Merge(PLACE, table, ORIGIN, {0: None}, {0: 8}, loads))
        assert query(folder, "SELECT count() FROM log WHERE kafka_offset = 4") == [(copies,)]
        assert query(folder, "SELECT v FROM log FINAL WHERE kafka_offset = 4") == [(value,)]
    with pytest.raises(TableUnfit, match="include name kafka_topic, kafka_partition and kafka_offset"):
        it.prepare(TableSpec("other", table.columns[2:], ("kafka_offset",), "insert"), create=True, evolve="none")


WHOLE = TableSpec("whole", (Column("id", pa.int64()), Column("v", pa.string())), ("id",), "upsert")
RECORDS = [(1, "a", 0), (2, "b", 1), (1, None, 2), (2, "c", 3), (3, "d", 4)]
"""Key, value (None: the record deletes) and offset of each record."""


def append(it: ClickhouseTarget, records: Sequence[tuple[int, str | None, int]], expected: int | None) -> int:
    """Append records, two batches in any order, as the Spark task of a sink does."""
    ids, values, offsets = (list(column) for column in zip(*records, strict=True))
    marks = {"zync_op": ["d" if value is None else "u" for value in values], "zync_offset": offsets}
    rows = pa.RecordBatch.from_pydict({"id": ids, "v": pa.array(values, pa.string()), **marks})
    merge = Merge(PLACE, WHOLE, ORIGIN, {0: expected}, {0: max(offsets) + 1})
    return it.append(merge, iter([rows.slice(2), rows.slice(0, 2)]))


def test_whole_records_that_are_appended_again_or_too_late_change_nothing(folder: Path) -> None:
    it = target(folder)
    it.prepare(WHOLE, create=True, evolve="none")
    assert it.appends(WHOLE, whole=True) and not it.appends(WHOLE, whole=False)
    read = "SELECT id, v FROM whole FINAL ORDER BY id"
    # As a run leaves it that is killed before it moves the position.
    assert append(it, RECORDS[:3], None) == 3
    query(folder, "TRUNCATE TABLE zync_positions")
    assert append(it, RECORDS, None) == 5
    assert query(folder, read) == [(2, "c"), (3, "d")]
    assert it.progress(PLACE).next == {0: 5}
    with pytest.raises(CommitConflict):
        append(it, RECORDS[:3], None)
    query(folder, "TRUNCATE TABLE zync_positions")
    append(it, RECORDS[:3], None)
    assert query(folder, read) == [(2, "c"), (3, "d")]
    # A table of other types needs conversions.
    query(
        folder,
        "CREATE TABLE own (id Int64, v Nullable(UUID), zync_offset UInt64, zync_deleted UInt8)"
        " ENGINE = ReplacingMergeTree(zync_offset, zync_deleted) ORDER BY id",
    )
    assert not it.appends(replace(WHOLE, name="own"), whole=True)


def test_a_run_whose_table_is_emptied_meanwhile_moves_no_position(folder: Path) -> None:
    it = target(folder)
    it.prepare(WHOLE, create=True, evolve="none")
    reset = Merge(PLACE, WHOLE, ORIGIN, {}, {}, clear=True)

    def rows(offset: int) -> Iterator[pa.RecordBatch]:
        names = {"id": [offset], "v": ["a"], "zync_op": ["u"], "zync_offset": [offset]}
        yield pa.RecordBatch.from_pydict(names)
        it.merge(reset)

    # In the first batch, and in a later one.
    for expected in (None, 5):
        if expected is not None:
            append(it, RECORDS, None)
        merge = Merge(PLACE, WHOLE, ORIGIN, {0: expected}, {0: 8})
        with pytest.raises(CommitConflict):
            it.append(merge, rows(expected or 0))
        assert (it.progress(PLACE).next, it.progress(PLACE).origin) == ({}, None)
    # What the run wrote late are records that come again.
    assert append(it, RECORDS, None) == 5
    assert query(folder, "SELECT id, v FROM whole FINAL ORDER BY id") == [(2, "c"), (3, "d"), (5, "a")]


def test_a_batch_that_fails_leaves_no_load_table(folder: Path) -> None:
    it = target(folder)
    table = spec(id=pa.int64(), v=pa.string())
    it.prepare(table, create=True, evolve="none")
    for change in (one(1, {"v": "a"}), one(1, None)):
        with pytest.raises(CommitConflict):
            write(it, table, [change], 0, at=9)
        assert load_names(it.tables(), PLACE) == []


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
    ) as error:
        it.prepare(new, create=True, evolve="add")
    assert "more" not in str(error.value)  # The sink may add the column.
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


@pytest.mark.slow
def test_a_sink_of_a_pipeline_writes_to_clickhouse(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    house = tmp_path / "house"
    play(services, spark, tmp_path, unique, "clickhouse", f"chdb://{house}", partial(query, house), " FINAL")


ENVELOPE = """
inputs:
  - {topic: $left, pool: Raw, format: json, key-schema: id bigint,
     value-schema: "before struct<id: bigint>, after struct<id: bigint, n: int>, op string"}
  - {topic: $right, pool: Raw, format: json}
outputs: [{topic: $out, pool: Staging}]
transforms: [{type: stateless, in: $right, out: $out, key: null, value: {v: in.value}}]
sinks:
  - {name: house, type: clickhouse, url: "chdb://FOLDER", from: [Raw.$left], table: rows}
"""


def test_the_delete_of_an_envelope_needs_no_tombstone(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """Whole records are appended, but a task that reads the files without SQL knows no operation of an envelope."""
    house = tmp_path / "house"
    it = mini(services, spark, tmp_path, unique, ENVELOPE.replace("FOLDER", str(house)))
    for number in (1, 2):
        it.send(it.left, (f'{{"id": {number}}}', {"before": None, "after": {"id": number, "n": 5}, "op": "c"}))
    it.send(it.left, (b'{"id": 1}', {"before": {"id": 1}, "after": None, "op": "d"}))
    it.ingest()
    assert sum(made.records for made in sink_all(it.pipeline, lambda: spark)) == 3
    assert query(house, "SELECT id, n FROM rows FINAL") == [(2, 5)]


FLATTENED = """
inputs:
  - {topic: $left, pool: Raw, format: json, key-schema: id bigint, value-schema: "id bigint, v string, w string"}
sinks:
  - {name: house, type: clickhouse, url: "chdb://FOLDER", from: [Raw.$left], table: rows}
"""


@pytest.mark.slow
def test_records_are_appended_unless_a_value_was_not_sent(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    house = tmp_path / "house"
    it = mini(services, spark, tmp_path, unique, FLATTENED.replace("FOLDER", str(house)))
    unsent = "__debezium_unavailable_value"
    for values, count, row in (
        # Appended: both records of the key are there, and FINAL chooses.
        ((("a", "b"), ("c", "d")), 2, ("c", "d")),
        # Merged: one row of the key, with the value that is in the table.
        (((unsent, "e"), (unsent, "f")), 1, ("c", "f")),
        ((("g", "h"), (unsent, "i")), 1, ("g", "i")),
    ):
        it.send(it.left, *((b'{"id": 1}', {"id": 1, "v": v, "w": w}) for v, w in values))
        it.ingest()
        assert sum(made.records for made in sink_all(it.pipeline, lambda: spark)) == count
        assert query(house, "SELECT v, w FROM rows FINAL") == [row]
    sink = it.pipeline.sinks[0]
    assert rows_match(it.pipeline, lambda: spark, sink, sink.tables[0]).passed


@pytest.mark.slow
def test_the_latest_record_of_a_key_wins_after_new_partitions_moved_the_key(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """The key is in partitions where its offsets are lower than before. Its table was made for one partition."""
    house = tmp_path / "house"
    it = mini(services, spark, tmp_path, unique, FLATTENED.replace("FOLDER", str(house)))
    sink, time, key = it.pipeline.sinks[0], 1_700_000_000_000, b'{"id": 1}'

    def moved(partition: int, *values: str | None) -> None:
        nonlocal time
        records = [(key, None if v is None else {"id": 1, "v": v, "w": "w"}) for v in values]
        it.send(it.left, *records, partition=partition, times=range(time, time := time + len(records)))

    def write() -> list[Any]:
        it.ingest()
        list(sink_all(it.pipeline, lambda: spark))
        assert rows_match(it.pipeline, lambda: spark, sink, sink.tables[0]).passed
        return query(house, "SELECT v, w FROM rows FINAL")

    moved(0, "a", "b", "c", "d")
    assert write() == [("d", "w")]
    admin = AdminClient(dict(it.pipeline.kafka))
    [future] = admin.create_partitions([NewPartitions(it.left, 3)]).values()
    future.result(10)
    moved(2, "e", "f")
    assert write() == [("f", "w")]
    # In one batch, a record of each partition.
    for partition, text in ((0, "g"), (2, "h"), (1, "i")):
        moved(partition, text)
    assert write() == [("i", "w")]
    # By way of load tables: a value that was not sent is that of the row before.
    moved(2, "j")
    it.ingest()
    moved(0, "__debezium_unavailable_value")
    assert write() == [("j", "w")]
    moved(1, None)
    assert write() == []
    moved(1, "k")
    moved(0, "l", "__debezium_unavailable_value")
    assert write() == [("l", "w")]
    # Loaded again from the start, in a table with these versions from the first row on.
    reset_sink(it.pipeline, lambda: spark, sink.name, "rows")
    assert write() == [("l", "w")]
    query(house, "DROP TABLE rows")
    reset_sink(it.pipeline, lambda: spark, sink.name, "rows")
    assert write() == [("l", "w")]
    # Another source of the table may have one partition, and offsets as versions.
    columns = (Column("id", pa.int64()), Column("v", pa.string()), Column("w", pa.string()))
    other = TableSpec("rows", columns, ("id",), "upsert")
    ours = target(house)
    assert ours.appends(other, whole=True)
    for number, (offset, text) in enumerate(((5, "x"), (4, "y"))):
        row = {"id": [2], "v": [text], "w": [None], "zync_op": ["u"], "zync_offset": [offset]}
        batch = pa.RecordBatch.from_pydict(row)
        batch = batch.set_column(2, "w", pa.array([None], pa.string()))
        ours.append(Merge(PLACE, other, ORIGIN, {0: number or None}, {0: number + 1}), iter([batch]))
    assert query(house, "SELECT v FROM rows FINAL WHERE id = 2") == [("x",)]


def test_an_outage_names_the_server_and_the_first_cause_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TargetUnavailable) as error:
        ClickhouseTarget("clickhouse://me:secret@127.0.0.1:1/shop").progress(PLACE)
    assert str(error.value) == "127.0.0.1:1 does not answer: Connection refused"
    assert caplog.records == []


def test_the_default_of_a_new_column_is_for_older_rows_alone(folder: Path) -> None:
    assert_defaults_of_older_rows_alone(target(folder))
