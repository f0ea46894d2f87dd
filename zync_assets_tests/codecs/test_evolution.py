"""Writers that change: the column's values against fastavro's own schema resolution (Avro specification, "Schema Resolution")."""

from __future__ import annotations

import io
import json
from decimal import Context, Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zync_assets.codecs.avro.types import avro_schema
from zync_assets.codecs.dispatch import make_decoder
from zync_assets.codecs.evolution import Writer, conform, holds, merge_types, variable_decimal, with_lacking
from zync_assets.codecs.fields import (
    Default,
    Note,
    connect_note_of,
    default_of,
    field_with_notes,
    lacking,
    original,
    topic_type_of,
)
from zync_assets.errors import SchemaError
from zync_assets.pipeline import SideFormat
from zync_assets_tests.codecs.generated import datums, framed

INT = st.integers(-(1 << 31), (1 << 31) - 1)
FLOAT = st.floats(width=32, allow_nan=False)

# Field → the lake's present type, and the types and values that writers may send.
FIELDS: dict[str, tuple[pa.DataType, list[tuple[Any, st.SearchStrategy[Any]]]]] = {
    "whole": (pa.int64(), [("int", INT), ("long", st.integers(-(1 << 63), (1 << 63) - 1))]),
    "real": (pa.float64(), [("int", INT), ("long", INT), ("float", FLOAT), ("double", st.floats(allow_nan=False))]),
    "text": (pa.string(), [("string", st.text(max_size=5)), ("bytes", st.text(max_size=5).map(str.encode))]),
    "raw": (pa.binary(), [("bytes", st.binary(max_size=5)), ("string", st.text(max_size=5))]),
    "list": (pa.list_(pa.int64()), [({"type": "array", "items": "int"}, st.lists(INT, max_size=3))]),
    "maybe": (pa.int64(), [(["null", "int"], st.none() | INT), (["long", "null"], st.none() | INT)]),
}


@st.composite
def writers(draw: st.DrawFn) -> tuple[Any, list[Any]]:
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, unique=True))
    chosen = {name: draw(st.sampled_from(FIELDS[name][1])) for name in names}
    schema = {
        "type": "record",
        "name": "Row",
        "fields": [{"name": name, "type": type} for name, (type, _) in chosen.items()],
    }
    values = st.fixed_dictionaries({name: data for name, (_, data) in chosen.items()})
    return schema, draw(st.lists(values, min_size=1, max_size=3))


@settings(max_examples=100, deadline=None)
@given(st.data(), st.lists(writers(), min_size=1, max_size=4))
def test_the_column_holds_what_avro_s_resolution_gives(data: st.DataObject, wrote: list[tuple[Any, list[Any]]]) -> None:
    there = data.draw(st.permutations(sorted(FIELDS)))
    target = pa.struct([(name, FIELDS[name][0]) for name in there])
    records = [
        (number, datum, datums(schema, [datum])[0]) for number, (schema, values) in enumerate(wrote) for datum in values
    ]
    records = data.draw(st.permutations(records))
    decoder = make_decoder(SideFormat("avro"), lambda number: json.dumps(wrote[number][0]), target)
    decoded = decoder.decode(pa.array([framed(number, datum) for number, _, datum in records]))
    reader = fastavro.parse_schema(json.loads(avro_schema(target, "Row", None)))
    expected = [
        fastavro.schemaless_reader(io.BytesIO(datum), fastavro.parse_schema(wrote[number][0]), reader)
        for number, _, datum in records
    ]
    assert decoded.bad == ()
    assert decoder.type == target
    assert decoded.values.to_pylist() == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(writers(), min_size=2, max_size=4))
def test_a_column_s_fields_never_move_or_vanish_and_hold_what_they_held(wrote: list[tuple[Any, list[Any]]]) -> None:
    decoder = make_decoder(SideFormat("avro"), lambda number: json.dumps(wrote[number][0]), None)
    before = pa.struct([])
    for number, (schema, values) in enumerate(wrote):
        decoded = decoder.decode(pa.array([framed(number, datum) for datum in datums(schema, values)]))
        after = decoder.type
        assert [field.name for field in after][: before.num_fields] == [field.name for field in before]
        assert holds(after, before)
        assert {field.name for field in after} - {field.name for field in before} <= set(values[0])
        # A schema that does not go into the column, or bytes that are no text: nothing else is wrong with any record.
        assert all("does not fit" in item.error for item in decoded.bad)
        before = after


INT32, INT64, FLOAT32, DOUBLE = pa.int32(), pa.int64(), pa.float32(), pa.float64()


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (INT32, INT64, INT64),
        (INT32, FLOAT32, DOUBLE),
        (INT64, DOUBLE, DOUBLE),
        (FLOAT32, DOUBLE, DOUBLE),
        (pa.decimal128(5, 2), pa.decimal128(9, 2), pa.decimal128(9, 2)),
        (pa.decimal128(5, 2), pa.decimal128(9, 6), pa.decimal128(9, 6)),
        (pa.decimal128(9, 2), pa.decimal128(9, 6), pa.decimal128(13, 6)),
        (INT32, pa.decimal128(9, 2), pa.decimal128(12, 2)),
        (INT64, pa.decimal128(9, 2), pa.decimal128(22, 2)),
    ],
)
def test_a_column_gets_the_narrowest_type_that_holds_what_two_writers_send(
    one: pa.DataType, other: pa.DataType, both: pa.DataType
) -> None:
    for first, second in ((one, other), (other, one)):
        assert merge_types(first, second) == both
        nested = merge_types(pa.list_(pa.struct([("a", first)])), pa.list_(pa.struct([("a", second)])))
        assert nested == pa.list_(pa.struct([("a", both)]))
        assert holds(both, first) and holds(both, second)


@pytest.mark.parametrize(
    ("column", "writer"),
    [
        (pa.decimal128(38, 2), pa.decimal128(38, 4)),
        (pa.string(), INT32),
        (DOUBLE, pa.decimal128(5, 2)),
        (pa.date32(), pa.timestamp("us", "UTC")),
        (pa.struct([("a", INT32)]), pa.list_(INT32)),
        (pa.bool_(), INT32),
    ],
)
def test_what_no_column_holds_is_an_error_that_names_both_types(column: pa.DataType, writer: pa.DataType) -> None:
    with pytest.raises(SchemaError, match=r"value: .* does not fit into the lake's "):
        merge_types(column, writer)


def record(*fields: tuple[str, Any], **notes: list[str]) -> dict[str, Any]:
    return {
        "type": "record",
        "name": "Row",
        "fields": [
            {"name": name, "type": kind, **({"aliases": notes[name]} if name in notes else {})} for name, kind in fields
        ],
    }


def rows_of(*schemas: tuple[dict[str, Any], dict[str, Any]]) -> tuple[pa.DataType, list[Any], list[str]]:
    """A column's type, values and errors after one batch of each writer. A decoder knows the type after the batch before."""
    known: pa.DataType | None = None
    batches: list[pa.Array] = []
    bad: list[str] = []
    for schema, value in schemas:
        decoder = make_decoder(SideFormat("avro"), lambda _, schema=schema: json.dumps(schema), known)
        decoded = decoder.decode(pa.array([framed(1, datum) for datum in datums(schema, [value])]))
        bad += [item.error for item in decoded.bad]
        batches.append(decoded.values)
        known = decoder.type
    assert known is not None
    return known, [conform(batch, known)[0].as_py() for batch in batches], bad


V1 = record(("id", "int"), ("name", "string"))
V2 = record(("id", "int"), ("full_name", "string"), full_name=["name"])
V3 = record(("id", "int"), ("title", "string"), title=["full_name"])


def test_a_renamed_field_stays_in_its_column() -> None:
    known, rows, bad = rows_of(
        (V1, {"id": 1, "name": "a"}), (V2, {"id": 2, "full_name": "b"}), (V3, {"id": 3, "title": "c"})
    )
    assert [field.name for field in known] == ["id", "name"]
    assert rows == [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}, {"id": 3, "name": "c"}]
    assert bad == []


def test_a_record_by_the_old_name_that_comes_after_the_new_one_is_in_the_same_column() -> None:
    known, rows, bad = rows_of((V2, {"id": 2, "full_name": "b"}), (V1, {"id": 1, "name": "a"}))
    assert [field.name for field in known] == ["id", "full_name"]
    assert rows == [{"id": 2, "full_name": "b"}, {"id": 1, "full_name": "a"}]
    assert bad == []


def test_a_name_goes_before_an_alias() -> None:
    both = record(("name", "string"), ("full_name", "string"), full_name=["name"])
    known, rows, _ = rows_of((V1, {"id": 1, "name": "a"}), (both, {"name": "x", "full_name": "y"}))
    assert [field.name for field in known] == ["id", "name", "full_name"]
    assert rows[1] == {"id": None, "name": "x", "full_name": "y"}


def test_a_branch_of_a_union_that_is_a_renamed_record_stays_in_its_column() -> None:
    def union(name: str, aliases: list[str]) -> dict[str, Any]:
        inner = {"type": "record", "name": name, "aliases": aliases, "fields": [{"name": "x", "type": "int"}]}
        return record(("u", ["string", inner]))

    known, rows, bad = rows_of(
        (union("Old", []), {"u": ("Old", {"x": 1})}), (union("New", ["Old"]), {"u": ("New", {"x": 2})})
    )
    assert [field.name for field in known.field("u").type] == ["string", "Old"]
    assert rows == [{"u": {"string": None, "Old": {"x": 1}}}, {"u": {"string": None, "Old": {"x": 2}}}]
    assert bad == []


def time(unit: str) -> dict[str, Any]:
    return record(("at", {"type": "int" if unit == "time-millis" else "long", "logicalType": unit}))


def debezium_time(name: str) -> dict[str, Any]:
    return record(("at", ["null", {"type": "long", "connect.name": f"io.debezium.time.{name}"}]))


def test_a_time_in_a_coarser_unit_is_converted_and_one_in_a_finer_unit_has_no_place() -> None:
    for coarse, fine in (
        (time("time-millis"), time("time-micros")),
        (time("local-timestamp-micros"), time("local-timestamp-nanos")),
        (debezium_time("Timestamp"), debezium_time("MicroTimestamp")),
    ):
        known, rows, bad = rows_of((fine, {"at": 5_000}), (coarse, {"at": 7}))
        assert known.field("at").type == pa.int64()
        assert (rows, bad) == ([{"at": 5_000}, {"at": 7_000}], [])
        _, rows, bad = rows_of((coarse, {"at": 7}), (fine, {"at": 5_000}))
        assert rows == [{"at": 7}, None]
        assert len(bad) == 1 and "can't be held in the lake's" in bad[0]


def test_a_writer_s_field_that_was_removed_is_null_and_its_default_is_not_filled_in() -> None:
    without = record(("id", "int"))
    added = record(("id", "int"))
    added["fields"].append({"name": "level", "type": "int", "default": 7})
    _, rows, _ = rows_of((added, {"id": 1, "level": 2}), (without, {"id": 3}))
    assert rows == [{"id": 1, "level": 2}, {"id": 3, "level": None}]


def test_a_field_keeps_its_name_in_the_topic_through_changes_of_its_schema() -> None:
    required = field_with_notes("a b", pa.int32(), connect=Note(required=True))
    column = merge_types(None, pa.struct([required]))
    more = merge_types(column, pa.struct([field_with_notes("a b", pa.int64()), ("A b", pa.int32())]))
    without = merge_types(column, pa.struct([("c", pa.int32())]))
    assert [(item.name, original(item)) for item in more] == [("a%20b", "a b"), ("%41%20b", "A b")]
    assert [(item.name, original(item)) for item in without] == [("a%20b", "a b"), ("c", "c")]
    assert not connect_note_of(without.field(0)).required
    assert topic_type_of(more) == pa.struct([("a b", pa.int64()), ("A b", pa.int32())])


@pytest.mark.parametrize("text", [f"-{10**4200}{10**4200}.125", "0", "-0.00", "1E+3", "-128"])
def test_a_number_of_any_length_goes_into_debezium_s_struct(text: str) -> None:
    """PostgreSQL's numeric has up to 131,072 digits before the point. Python makes no integer of a text of so many."""
    made = variable_decimal(text)
    assert made is not None
    value, scale = made["value"], made["scale"]
    assert isinstance(value, bytes) and isinstance(scale, int)
    number = Decimal(int.from_bytes(value, "big", signed=True))
    assert number.scaleb(-scale, Context(prec=10_000)) == Decimal(text)


def test_the_default_is_that_of_the_first_schema_with_the_field() -> None:
    def writer(fields: dict[str, str | None], bits: int = 32) -> Writer:
        row = pa.struct([(name, pa.int64() if bits == 64 else pa.int32()) for name in fields])
        texts = {("after", name): text for name, text in fields.items() if text is not None}
        return Writer(pa.struct([("after", row)]), texts)

    column = pa.struct([("after", pa.struct([(name, pa.int32()) for name in "abcd"]))])
    writers = {
        9: writer({"a": "1"}),
        3: writer({"a": "2", "b": "5", "c": None}),
        4: writer({"a": "3", "b": "6", "c": "7", "d": "no number"}),
        5: writer({"a": "3"}),
    }
    found = with_lacking(column, writers).field("after").type
    # Schema 5 comes after the column: the source dropped the columns.
    assert [default_of(item) for item in found] == [None, Default("5", (9,)), None, None]
    assert [lacking(item) for item in found] == [(), (5, 9), (5, 9), (3, 5, 9)]
    # A default stays, whatever the registry still has, and whatever type the column gets.
    known = with_lacking(pa.struct([("after", found)]), {4: writers[4], 3: writers[3]})
    wider = merge_types(known, writer({"b": "8"}, 64).type, "value").field("after").type
    assert default_of(wider.field("b")) == Default("5", (9,))
    assert wider.field("b").type == pa.int64()
