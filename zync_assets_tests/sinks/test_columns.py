"""The user's function over a batch, what it may return, and its errors; and what conditions make of records."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import sqlalchemy as sa

from zync_assets.checks.state_checks import rows_match
from zync_assets.codecs.fields import (
    DEBEZIUM_DATE,
    MICRO_TIMESTAMP,
    ZONED_TIMESTAMP,
    Default,
    Note,
    field_with_notes,
    lacked_by,
    with_default,
)
from zync_assets.errors import SinkError, TargetRefused
from zync_assets.lake.check_results import CheckResult
from zync_assets.lake.raw import open_raw
from zync_assets.pipeline import Sink, SinkMode, SinkTable
from zync_assets.sinks.columns import IS_DELETE, Layout, make_layout
from zync_assets.sinks.fold import OFFSET
from zync_assets.sinks.mysql import MysqlTarget
from zync_assets.sinks.postgres import PostgresTarget
from zync_assets.sinks.sql_types import default_text
from zync_assets.sinks.sqlite import SqliteTarget
from zync_assets.sinks.steps import sink_all
from zync_assets.sinks.target import Target
from zync_assets_tests.bench.data import append_raw
from zync_assets_tests.pipeline_file.problems import loaded

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = "zync_assets_tests.sinks.functions"


def made(function: str) -> Layout:
    return layout_of(Sink("shop", "sqlite", "shop.db", before=f"{HERE}:{function}"))


def layout_of(sink: Sink) -> Layout:
    sides = {"key": pa.struct([("id", pa.int64())]), "value": pa.struct([("v", pa.string())])}
    return make_layout(sink, SinkTable("Raw", "t", "rows", staged=False), SqliteTarget(""), sides, "", {}, None, {})


def test_two_columns_of_one_name_are_an_error() -> None:
    sink = Sink("shop", "sqlite", "shop.db", rename={"v": "id"})
    sides = {"key": pa.struct([("id", pa.int64())]), "value": pa.struct([("v", pa.string())])}
    with pytest.raises(SinkError, match=r"sink shop, Raw\.t: two columns would be called id"):
        make_layout(sink, SinkTable("Raw", "t", "rows", staged=False), SqliteTarget(""), sides, "", {}, None, {})


def test_names_that_differ_in_case_are_one_name_where_the_target_says_so() -> None:
    sink = Sink("shop", "sqlite", "shop.db", rename={"v": "ID"})
    with pytest.raises(SinkError, match=r"sink shop, Raw\.t: two columns would be called id"):
        layout_of(sink)


@pytest.mark.parametrize("word", ["include", "rename"])
def test_a_name_that_the_records_do_not_have_is_an_error(word: str) -> None:
    sink = Sink("shop", "sqlite", "shop.db")
    sink = replace(sink, include=("nope",)) if word == "include" else replace(sink, rename={"nope": "q"})
    with pytest.raises(
        SinkError, match=rf"columns: {word} names nope, and the records have id, v\. Correct the name\."
    ):
        layout_of(sink)
    if word == "rename":
        # Another table of the sink may have the column.
        layout_of(
            replace(sink, tables=(SinkTable("Raw", "t", "t", staged=False), SinkTable("Raw", "u", "u", staged=False)))
        )


def test_a_column_with_a_name_of_a_load_table_is_an_error() -> None:
    with pytest.raises(SinkError, match=r"a load table has a column ZYNC_op too\. Give yours another name"):
        layout_of(Sink("shop", "sqlite", "shop.db", rename={"v": "ZYNC_op"}))


def test_an_interval_is_refused_with_the_column_s_name() -> None:
    sides = {"key": pa.struct([("id", pa.int64())]), "value": pa.struct([("v", pa.duration("us"))])}
    sink = Sink("shop", "sqlite", "shop.db")
    with pytest.raises(SinkError, match=r"column v is an interval, .* with before: {set: ...} and CAST"):
        make_layout(sink, SinkTable("Raw", "t", "rows", staged=False), SqliteTarget(""), sides, "", {}, None, {})


def test_a_default_is_a_value_of_the_target() -> None:
    def field(name: str, kind: pa.DataType, text: str, **notes: Any) -> pa.Field:
        return with_default(lacked_by(field_with_notes(name, kind, **notes), [3]), Default(text, (3,)))

    value = pa.struct(
        [
            field("plain", pa.string(), "it's"),
            field("clock", pa.int64(), "3600000000", unit="time-micros"),
            field("late", pa.int64(), "86400000000", unit="time-micros"),
            field("day", pa.int32(), "20000", connect=Note(DEBEZIUM_DATE)),
            field("wall", pa.timestamp("us", "UTC"), "2024-10-04 01:02:03Z", connect=Note(MICRO_TIMESTAMP)),
        ]
    )
    sink, table = Sink("shop", "sqlite", "shop.db"), SinkTable("Raw", "t", "rows", staged=False)
    made = make_layout(sink, table, SqliteTarget(""), {"key": pa.int64(), "value": value}, "", {}, None, {})
    defaults = {item.column.name: item.column.default and item.column.default.as_py() for item in made.columns}
    wall = datetime(2024, 10, 4, 1, 2, 3)
    # No day has the hour 24: the target would refuse the default in each row.
    assert defaults == {"key": None, "plain": "it's", "clock": time(1), "late": None, "day": 20_000, "wall": wall}
    day = next(item.column for item in made.columns if item.column.name == "day")
    assert (default_text(day, sa.Date()), default_text(day, sa.Integer())) == ("2024-10-04", "20000")
    assert made.select(staged=False)[1] == (
        "CASE WHEN kafka.value_schema_id IN (3) THEN CAST('it\\'s' AS string)"
        " WHEN coalesce(kafka.value_schema_id IN (3), false) THEN NULL ELSE value.`plain` END AS c1"
    )
    # Targets have other days and instants. Debezium makes the number of infinity.
    lite, house, lake = SqliteTarget(""), PostgresTarget(""), MysqlTarget("")
    for kind, note, text, holders in (
        (pa.int32(), DEBEZIUM_DATE, "-719162", {lite, house}),
        (pa.int32(), DEBEZIUM_DATE, "-2147472692", set[Target]()),
        (pa.date32(), "", "0999-12-31", {lite, house}),
        (pa.string(), ZONED_TIMESTAMP, "9999-12-31T23:59:59.999999Z", {lite, house, lake}),
        (pa.string(), ZONED_TIMESTAMP, "0001-01-01T00:00:00.000000Z", {lite, house}),
        (pa.string(), ZONED_TIMESTAMP, "infinity", {lite, house}),
        (pa.string(), ZONED_TIMESTAMP, "-0043-03-15T00:00:00.000000Z", {lite}),
        (pa.string(), ZONED_TIMESTAMP, "2024-10-04T01:02:03.1234567Z", {lite}),
    ):
        row = pa.struct([field("at", kind, text, connect=Note(note))])
        for target in (lite, house, lake):
            made = make_layout(sink, table, target, {"key": pa.int64(), "value": row}, "", {}, None, {})
            assert (made.columns[1].column.default is not None) == (target in holders), (target, text)
    # A function of the user changes values, and the database could not change a default.
    changed = make_layout(
        replace(sink, before=f"{HERE}:upper"),
        table,
        SqliteTarget(""),
        {"key": pa.int64(), "value": value},
        "",
        {},
        None,
        {},
    )
    assert all(item.column.default is None for item in changed.columns)


@pytest.mark.parametrize(
    ("unit", "number", "wanted"),
    [
        ("time-millis", 86_399_999, time(23, 59, 59, 999_000)),
        (
            "time-millis",
            86_400_000,
            "the column at is 86400000000 microseconds, which is not a time of day from 0 to 24 hours",
        ),
        ("time-micros", -1, "the column at is -1 microseconds, which is not a time of day"),
        ("timestamp-millis", -1, datetime(1969, 12, 31, 23, 59, 59, 999_000)),
        ("timestamp-millis", 2**62, "the column at has a time that is too far away"),
        ("local-timestamp-micros", -62_135_596_800_000_000, datetime(1, 1, 1)),
        ("timestamp-micros", 253_402_300_800_000_000, "microseconds, which is not a time in the years 1 to 9999"),
        ("timestamp-nanos", 5, 5),
    ],
)
def test_a_number_with_a_unit_of_time_becomes_a_time(unit: str, number: int, wanted: object) -> None:
    value = pa.struct([field_with_notes("at", pa.int64(), unit=unit)])
    sink, table = Sink("shop", "sqlite", "shop.db"), SinkTable("Raw", "t", "rows", staged=False)
    whole = make_layout(sink, table, SqliteTarget(""), {"key": pa.int64(), "value": value}, "", {}, None, {})
    batch = pa.RecordBatch.from_pydict({"c0": [1], "c1": [number], IS_DELETE: [False], OFFSET: [0]})
    if isinstance(wanted, str):
        with pytest.raises(TargetRefused) as refusal:
            whole.records(batch)
        assert wanted in str(refusal.value)
    else:
        assert whole.records(batch).rows.column("at").to_pylist() == [wanted]


def rows(layout: Layout) -> pa.RecordBatch:
    return layout.records(
        pa.RecordBatch.from_pydict({"c0": [1, 2], "c1": ["a", "b"], IS_DELETE: [False, False], OFFSET: [0, 1]})
    ).rows


def test_a_function_may_add_a_column() -> None:
    assert rows(made("upper")).to_pydict() == {"id": [1, 2], "v": ["a", "b"], "upper": ["A", "B"]}


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("failing", f"before: function {HERE}:failing fails: ValueError: no such country"),
        ("absent", f"before: function {HERE}:absent failed: AttributeError: "),
        ("missing", f"before: function {HERE}:missing: AttributeError: "),
        ("shifting", "returns column size as int64, and of an empty batch as int32"),
        ("lossy", "returns column v as nothing, and of an empty batch as string"),
        (
            "rekeying",
            "changes the key column id. Let it keep the key columns, and change the key with before: {set: ...}",
        ),
        ("untyped", "must give column size a type, for an empty batch too"),
    ],
)
def test_the_error_of_a_function_names_it(function: str, text: str) -> None:
    with pytest.raises(SinkError) as error:
        rows(made(function))
    assert text in str(error.value)
    # A value of a record may be the cause of a ValueError, and of nothing else.
    assert isinstance(error.value, TargetRefused) == (function == "failing")


@pytest.mark.parametrize(
    ("where", "mode", "delete", "conditions", "deletes"),
    [
        (
            "value.v = 'a' OR true",
            "upsert",
            True,
            ("coalesce(value IS NULL, true) OR coalesce(value.v = 'a' OR true, false) OR (key.`id` IS NOT NULL)",),
            "(value IS NULL) OR NOT (coalesce(value.v = 'a' OR true, false))",
        ),
        ("KEY.id < 3", "upsert", True, ("KEY.id < 3",), "value IS NULL"),
        (
            "value.v = 'a'",
            "upsert",
            False,
            ("coalesce(value.v = 'a', false)", "coalesce(NOT (value IS NULL), true)"),
            "value IS NULL",
        ),
        ("value.v = 'a'", "insert", True, ("value.v = 'a'",), "false"),
    ],
)
def test_a_record_that_does_not_meet_a_condition_on_the_value_deletes_its_row(
    where: str, mode: SinkMode, delete: bool, conditions: tuple[str, ...], deletes: str
) -> None:
    sink = Sink("shop", "sqlite", "shop.db", mode=mode, where=where, delete=delete)
    made = layout_of(sink)
    assert (made.where, made.delete_sql, made.update_sql) == (conditions, deletes, None)


ENVELOPE = pa.struct(
    [
        ("before", ROW := pa.struct([("id", pa.int64()), ("v", pa.string()), ("n", pa.struct([("a", pa.string())]))])),
        ("after", ROW),
        ("op", pa.string()),
    ]
)


@pytest.mark.parametrize(
    ("where", "update"),
    [
        (
            "value.after.V = 'a'",
            """coalesce(value.after.`v` IN ('__not_sent', '{"__not_sent":"__not_sent"}'), false)""",
        ),
        ("value.after.id > 1 AND value.op <> 'r'", None),
        ("key.id < 3", None),
    ],
)
def test_a_value_that_was_not_sent_meets_no_condition_and_fails_none(where: str, update: str | None) -> None:
    sink = Sink("shop", "sqlite", "shop.db", where=where)
    sides = {"key": pa.struct([("id", pa.int64())]), "value": ENVELOPE}
    table = SinkTable("Raw", "t", "rows", staged=False)
    made = make_layout(sink, table, SqliteTarget(""), sides, "", {}, "__not_sent", {})
    assert made.update_sql == update


TIMES = {
    "day": ("int", DEBEZIUM_DATE, pa.int32()),
    "at": ("long", MICRO_TIMESTAMP, pa.timestamp("us")),
    "clock": ("int", "io.debezium.time.Time", pa.time64("us")),
    "zoned": ("string", ZONED_TIMESTAMP, pa.string()),
}
"""Field → its type in Avro and Connect's name for it, and the type of its column."""


def staged_layout(folder: Path, sink: Sink, *others: str) -> Layout:
    """The layout of a staged topic with TIMES. ``others``: the types of ``at`` in further output schemas, as JSON."""
    types: dict[str, Any] = {name: {"type": kind, "connect.name": note} for name, (kind, note, _) in TIMES.items()}
    key = {"type": "record", "name": "Key", "fields": [{"name": "id", "type": "long"}]}
    schemas: dict[str, str] = {}
    for number, at in enumerate([types["at"], *map(json.loads, others)]):
        fields = [{"name": name, "type": ["null", kind]} for name, kind in {**types, "at": at}.items()]
        value = {"type": "record", "name": "Row", "fields": fields}
        schemas[str(number)] = json.dumps({"key": {"schema": key}, "value": {"schema": value}})
    kinds = {"int": pa.int32(), "long": pa.int64(), "string": pa.string()}
    row = pa.struct([(name, kinds[kind]) for name, (kind, _, _) in TIMES.items()])
    sides = {"key": pa.struct([("id", pa.int64())]), "value": row}
    table = SinkTable("Staging", "t", "rows", staged=True)
    return make_layout(sink, table, SqliteTarget(f"sqlite:///{folder}/shop.db"), sides, "", schemas, None, {})


def unchanged(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def column_types(layout: Layout) -> dict[str, pa.DataType]:
    return {column.name: column.type for column in layout.spec.others}


def test_a_number_of_a_staged_topic_is_a_time_by_the_output_schemas(tmp_path: Path) -> None:
    sink = Sink("shop", "sqlite", "shop.db")
    it = staged_layout(tmp_path, sink)
    assert column_types(it) == {name: kind for name, (_, _, kind) in TIMES.items()}
    assert [column.note for column in it.spec.others] == [note for _, note, _ in TIMES.values()]
    # Another schema of the topic has a number without a name.
    assert column_types(staged_layout(tmp_path, sink, '"long"'))["at"] == pa.int64()
    # The numbers of a function stay what they were.
    it = staged_layout(tmp_path, replace(sink, before=f"{__name__}:unchanged"))
    assert column_types(it)["at"] == pa.int64()


def test_a_table_that_has_numbers_for_the_times_of_a_staged_topic_keeps_them(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, day NUMERIC, moment BIGINT, clock TEXT)")
    sink = Sink("shop", "sqlite", "shop.db", rename={"at": "moment"})
    it = staged_layout(tmp_path, sink)
    assert column_types(it) == {"day": pa.int32(), "moment": pa.int64(), "clock": pa.time64("us"), "zoned": pa.string()}
    assert [column.note for column in it.spec.others] == ["", "", *(note for _, note, _ in [*TIMES.values()][2:])]


def test_a_field_that_a_staged_record_leaves_out_meets_no_condition_and_fails_none() -> None:
    def schema(*names: str) -> str:
        fields = [{"name": name, "type": ["null", "string"]} for name in names]
        value = {"type": "record", "name": "Row", "fields": fields}
        return json.dumps({"key": {"schema": None}, "value": {"schema": value}})

    sink = Sink("shop", "sqlite", "shop.db", where="value.v = 'a' AND value.n.a = 'b'")
    sides = {"key": pa.struct([("id", pa.int64())]), "value": ROW}
    table = SinkTable("Staging", "t", "rows", staged=True)
    schemas = {"all": schema("id", "v", "n"), "some": schema("id", "v"), "none": schema("id")}
    made = make_layout(sink, table, SqliteTarget(""), sides, "", schemas, None, {})
    left_out = "coalesce(arrays_overlap(left_out, array('value.n', 'value.n.a', 'value.v')), false)"
    assert made.update_sql == f"schema IN ('none', 'some') OR {left_out}"


RAW = """\
kafka: {bootstrap.servers: localhost}
lake: ./lake
inputs:
  - {topic: rows, pool: Raw, key-format: string, value-format: json, schema: "id bigint"}
sinks:
  - {name: shop, type: sqlite, url: shop.db, from: [Raw.rows], table: rows, OPTIONS}
"""


def written(
    spark: SparkSession,
    folder: Path,
    records: Sequence[tuple[Any, Any]],
    key: pa.DataType,
    value: pa.DataType,
    options: str,
) -> list[tuple[Any, ...]]:
    """The rows of SQLite after a sink with some options has written further raw records: pairs of key and value."""
    state = open_raw(f"{folder}/lake", "Raw", "rows")
    start = state.next[0] if state else 0
    offsets = np.arange(start, start + len(records))
    keys, values = (pa.array([record[side] for record in records], kind) for side, kind in enumerate((key, value)))
    append_raw(f"{folder}/lake", "Raw", "rows", offsets, keys, values, pa.array(offsets))
    list(sink_all(loaded(folder, RAW.replace("OPTIONS", options)), lambda: spark))
    return asked(folder, "SELECT * FROM rows ORDER BY 1")


def asked(folder: Path, statement: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(folder / "shop.db") as connection:
        return connection.execute(statement).fetchall()


def comparison(spark: SparkSession, folder: Path, options: str) -> CheckResult:
    pipeline = loaded(folder, RAW.replace("OPTIONS", options))
    (sink,) = pipeline.sinks
    return rows_match(pipeline, lambda: spark, sink, sink.tables[0])


def test_times_inside_a_struct_keep_their_microseconds(spark: SparkSession, tmp_path: Path) -> None:
    at = datetime(2024, 1, 2, 3, 4, 5, 123456)
    inner = pa.struct([("local", pa.timestamp("us")), ("instant", pa.timestamp("us", "UTC"))])
    kind = pa.struct([("it", inner), ("list", pa.list_(pa.timestamp("us")))])
    value = {"it": {"local": at, "instant": at.replace(tzinfo=UTC)}, "list": [at, None]}
    assert written(spark, tmp_path, [("a", value)], pa.string(), kind, "key: [key]") == [
        (
            "a",
            '{"local":"2024-01-02T03:04:05.123456","instant":"2024-01-02T03:04:05.123456Z"}',
            '["2024-01-02T03:04:05.123456",null]',
        )
    ]


@pytest.mark.slow
def test_a_field_that_came_later_equals_a_null_in_rows_that_were_written_before(
    spark: SparkSession, tmp_path: Path
) -> None:
    options, inner = "key: [key]", [("a", pa.int64()), ("at", pa.timestamp("us"))]

    def kind(*more: tuple[str, pa.DataType]) -> pa.DataType:
        it = pa.struct([*inner, *more])
        return pa.struct([("it", it), ("list", pa.list_(it)), ("map", pa.map_(pa.string(), it))])

    def record(key: str, **more: object) -> tuple[str, object]:
        it = {"a": 1, "at": datetime(2024, 1, 2, 3, 4, 5, 123000), **more}
        return key, {"it": it, "list": [it], "map": [("k", it)]}

    first = written(spark, tmp_path, [record("a"), record("b")], pa.string(), kind(), options)
    second = written(spark, tmp_path, [record("c", n=None)], pa.string(), kind(("n", pa.string())), options)
    assert second[:2] == first
    assert ['"n":null' in text for text in second[2][1:]] == [True] * 3
    assert comparison(spark, tmp_path, options).passed
    # Earlier versions wrote milliseconds.
    asked(tmp_path, "UPDATE rows SET it = replace(it, '.123000', '.123')")
    assert comparison(spark, tmp_path, options).passed
    for key, column, change in (("a", "list", "'}]', ',\"n\":\"x\"}]'"), ("b", "it", "'\"a\":1', '\"a\":2'")):
        asked(tmp_path, f"UPDATE rows SET {column} = replace({column}, {change}) WHERE key = '{key}'")
    result = comparison(spark, tmp_path, options)
    assert not result.passed
    assert "key='a': another value in list; key='b': another value in it." in result.summary


def test_a_delete_of_an_envelope_has_its_key_in_before(spark: SparkSession, tmp_path: Path) -> None:
    row = pa.struct([("id", pa.int64()), ("v", pa.string())])
    kind = pa.struct([("before", row), ("after", row), ("op", pa.string())])

    def change(op: str, before: int | None, after: int | None, v: str = "") -> tuple[None, object]:
        sides = [None if number is None else {"id": number, "v": v} for number in (before, after)]
        return None, {"before": sides[0], "after": sides[1], "op": op}

    options = "key: [value.id]"
    first = [change("c", None, 7, "a"), change("c", None, 8, "b"), change("u", 8, 8, "c")]
    assert written(spark, tmp_path, first, pa.string(), kind, options) == [(7, "a"), (8, "c")]
    # A tombstone follows a delete. A delete without `before`, and an update without a key, are refused.
    row_without_key = (None, {"before": {"id": 8, "v": ""}, "after": {"id": None, "v": "x"}, "op": "u"})
    more = [change("d", 7, None), (None, None), change("d", None, None), row_without_key]
    assert written(spark, tmp_path, more, pa.string(), kind, options) == [(8, "c")]
    refusals = 'SELECT "offset", error FROM zync_quarantine ORDER BY 1'
    assert asked(tmp_path, refusals) == [(offset, "the key column id is null") for offset in (5, 6)]
    assert comparison(spark, tmp_path, options).passed


def test_a_record_without_a_key_has_the_key_in_the_field_of_that_name(spark: SparkSession, tmp_path: Path) -> None:
    kind = pa.struct([("id", pa.int64()), ("v", pa.string())])
    records = [(None, {"id": 1, "v": "a"}), (None, {"id": 1, "v": "b"}), ("own", {"id": 1, "v": "c"})]
    assert written(spark, tmp_path, records, pa.string(), kind, "key: [id]") == [("1", "b"), ("own", "c")]
    assert comparison(spark, tmp_path, "key: [id]").passed


ROW_AS_TEXT = pa.struct(
    [("after", pa.string()), ("op", pa.string()), ("source", pa.struct([("collection", pa.string())]))]
)
UNWRAPPED = pa.struct([("id", pa.int64()), ("v", pa.string()), ("__deleted", pa.string())])


@pytest.mark.parametrize(
    ("kind", "change", "delete"),
    [
        (ROW_AS_TEXT, {"after": "{}", "op": "u", "source": {"collection": "c"}}, {"after": None, "op": "d"}),
        (UNWRAPPED, {"id": 1, "v": "a", "__deleted": "false"}, {"id": 1, "v": None, "__deleted": "true"}),
    ],
)
def test_a_delete_is_known_by_debezium_s_marks_whatever_form_the_row_has(
    spark: SparkSession, tmp_path: Path, kind: pa.DataType, change: object, delete: object
) -> None:
    records = [("1", change), ("2", change), ("3", change), ("1", delete), ("3", None)]
    assert [row[0] for row in written(spark, tmp_path, records, pa.string(), kind, "evolve: none")] == ["2"]
    # An appended record is a row, whatever it says.
    log = RAW.replace("OPTIONS", "mode: insert").replace("table: rows", "table: log")
    list(sink_all(loaded(tmp_path, log.replace("name: shop", "name: log")), lambda: spark))
    assert asked(tmp_path, "SELECT count(*) FROM log") == [(5,)]
