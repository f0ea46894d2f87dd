"""Columns to payloads: projection to the schema's fields, tombstones, values that can't be written."""

from __future__ import annotations

import datetime
import decimal
import io
import json
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from zync_assets.codecs.avro.types import arrow_type, avro_schema
from zync_assets.codecs.dispatch import make_encoder
from zync_assets.errors import SchemaError
from zync_assets_tests.codecs.generated import datums, fewest_bytes, framed


def record(*fields: tuple[str, Any], name: str = "Row") -> str:
    return json.dumps({"type": "record", "name": name, "fields": [{"name": key, "type": type} for key, type in fields]})


ROWS = pa.array(
    [{"id": 1, "name": "a", "more": 1.5}, None, {"id": 2, "name": None, "more": None}],
    pa.struct([("id", pa.int64()), ("name", pa.string()), ("more", pa.float64())]),
)


@pytest.mark.parametrize("native", [True, False])
def test_only_the_schemas_fields_are_written_in_its_order(native: bool) -> None:
    schema = record(("name", ["null", "string"]), ("id", "int"))
    encoded = make_encoder("avro", schema, 9, native=native).encode(ROWS)
    expected = datums(json.loads(schema), [{"id": 1, "name": ("string", "a")}, {"id": 2, "name": None}])
    assert encoded.payloads.to_pylist() == [framed(9, expected[0]), None, framed(9, expected[1])]
    assert encoded.bad == ()


@pytest.mark.parametrize("native", [True, False])
def test_a_value_that_the_schema_has_no_room_for_is_bad_alone(native: bool) -> None:
    schema = record(("id", "int"), ("kind", {"type": "enum", "name": "Kind", "symbols": ["A"]}), ("word", "string"))
    rows: list[dict[str, Any]] = [
        {"id": 1, "kind": "A", "word": ""},
        {"id": 1 << 40, "kind": "A", "word": ""},
        {"id": 1, "kind": "B", "word": ""},
        {"id": 1, "kind": "A", "word": None},
        {"id": 4, "kind": "A", "word": "w"},
    ]
    column = pa.array(rows, pa.struct([("id", pa.int64()), ("kind", pa.string()), ("word", pa.string())]))
    encoded = make_encoder("avro", schema, 9, native=native).encode(column)
    assert [item.index for item in encoded.bad] == [1, 2, 3]
    assert "1099511627776" in encoded.bad[0].error
    assert "'B' is none of the symbols of Kind" in encoded.bad[1].error
    assert "word is null" in encoded.bad[2].error
    expected = datums(json.loads(schema), [rows[0], rows[4]])
    assert encoded.payloads.drop_null().to_pylist() == [framed(9, datum) for datum in expected]


@pytest.mark.parametrize("native", [True, False])
def test_a_union_holds_one_branch(native: bool) -> None:
    schema = json.dumps(["null", "int", "string"])
    column = pa.array(
        [
            {"int": 1, "string": None},
            {"int": None, "string": "a"},
            {"int": 1, "string": "a"},
            {"int": None, "string": None},
        ],
        arrow_type(schema),
    )
    encoded = make_encoder("avro", schema, None, native=native).encode(column)
    assert encoded.payloads.to_pylist() == [b"\x02\x02", b"\x04\x02a", None, b"\x00"]
    assert [item.index for item in encoded.bad] == [2]


def test_texts_that_stand_for_a_value_are_checked() -> None:
    tree = {
        "type": "record",
        "name": "Node",
        "fields": [{"name": "x", "type": "int"}, {"name": "next", "type": ["null", "Node"]}],
    }
    column = pa.array([{"x": 1, "next": text} for text in ['{"x":2}', "{", "[1]", '{"x":"a"}', "null"]])
    encoded = make_encoder("avro", json.dumps(tree), None).encode(pa.array(column, arrow_type(json.dumps(tree))))
    assert [item.index for item in encoded.bad] == [1, 2, 3, 4]
    assert encoded.payloads[0].as_py() == b"\x02\x02\x04\x00"
    money = {"type": "bytes", "logicalType": "decimal", "precision": 40, "scale": 1}
    encoded = make_encoder("avro", json.dumps(money), None).encode(pa.array(["12.3", "1.23", "x", "NaN", "1e50"]))
    assert [item.index for item in encoded.bad] == [1, 2, 3, 4]
    assert encoded.payloads[0].as_py() == b"\x02\x7b"


def test_a_column_of_another_kind_is_refused_as_a_whole() -> None:
    with pytest.raises(SchemaError, match=r"value\.id: a column of type string can't be written as int64"):
        make_encoder("avro", record(("id", "long")), 9).encode(pa.array([{"id": "1"}]))


def test_the_schema_of_a_column_writes_it_and_reads_as_it() -> None:
    type = pa.struct(
        [
            ("id", pa.int64()),
            ("price", pa.decimal128(10, 2)),
            ("at", pa.timestamp("us", tz="UTC")),
            ("on", pa.date32()),
            ("inner", pa.struct([("tags", pa.list_(pa.string())), ("by", pa.map_(pa.string(), pa.float32()))])),
            ("raw", pa.binary()),
        ]
    )
    moment = datetime.datetime(2026, 1, 31, 12, 0, 0, 7, tzinfo=datetime.UTC)
    value = {
        "id": 1,
        "price": decimal.Decimal("-1.50"),
        "at": moment,
        "on": moment.date(),
        "inner": {"tags": ["a", None], "by": [("k", 0.5)]},
        "raw": b"\0",
    }
    schema = avro_schema(type, "Value", "shop")
    fastavro.parse_schema(json.loads(schema))
    assert json.loads(schema)["namespace"] == "shop"
    assert all(field["type"][0] == "null" and field["default"] is None for field in json.loads(schema)["fields"])
    assert arrow_type(schema) == type
    column = pa.array([value, dict.fromkeys(value)], type)
    by_column, by_record = (make_encoder("avro", schema, 1, native=native).encode(column) for native in (True, False))
    assert by_column.bad == by_record.bad == ()
    assert by_column.payloads.equals(by_record.payloads)
    stream = by_column.payloads[0].as_py()[5:]

    back = fastavro.schemaless_reader(io.BytesIO(stream), fastavro.parse_schema(json.loads(schema)), None)
    assert back == {**value, "inner": {"tags": ["a", None], "by": {"k": 0.5}}}


def test_decimals_of_any_length_take_the_fewest_bytes() -> None:
    for digits in (1, 127, 128, 255, 256, 32767, 32768, 10**18, 10**37):
        for number in (digits, -digits, -digits - 1):
            schema = json.dumps({"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 0})
            column = pa.array([decimal.Decimal(number)], pa.decimal128(38, 0))
            expected = datums("bytes", [fewest_bytes(number)])
            assert make_encoder("avro", schema, None).encode(column).payloads.to_pylist() == expected


def test_slices_are_written_as_slices() -> None:
    schema = record(("name", ["null", "string"]), ("id", "long"))
    encoder = make_encoder("avro", schema, 9)
    whole = encoder.encode(ROWS).payloads
    for first, count in [(0, 1), (1, 2), (2, 1), (0, 0)]:
        assert encoder.encode(ROWS.slice(first, count)).payloads.equals(whole.slice(first, count))


NASTY = "".join(map(chr, range(0x20))) + '"\\/é\u2028😀\x7f'


def test_json_is_one_compact_object_a_record() -> None:
    type = pa.struct(
        [
            ("id", pa.int64()),
            ("text", pa.string()),
            ("ok", pa.bool_()),
            ("part", pa.float64()),
            ("price", pa.decimal128(10, 2)),
            ("tags", pa.list_(pa.string())),
            ("by", pa.map_(pa.string(), pa.int32())),
            ("inner", pa.struct([("on", pa.date32()), ("raw", pa.binary())])),
            ("at", pa.timestamp("us", tz="UTC")),
        ]
    )
    moment = datetime.datetime(2026, 1, 31, 12, 0, 0, 7, tzinfo=datetime.UTC)
    full = {
        "id": -1,
        "text": NASTY,
        "ok": False,
        "part": 1e300,
        "price": decimal.Decimal("1.50"),
        "tags": ["a", None, '"'],
        "by": [("k\n", 1), ("l", None)],
        "inner": {"on": moment.date(), "raw": b"\xff"},
        "at": moment,
    }
    column = pa.array([full, dict.fromkeys(full), None, {**full, "tags": [], "by": [], "inner": None}], type)
    encoded = make_encoder("json", None, None).encode(column)
    assert encoded.bad == ()
    shown = {
        **full,
        "price": 1.5,
        "by": {"k\n": 1, "l": None},
        "inner": {"on": "2026-01-31", "raw": "/w=="},
        "at": "2026-01-31T12:00:00.000007Z",
    }
    texts = encoded.payloads.to_pylist()
    assert texts[2] is None
    assert [json.loads(text) for text in texts if text] == [
        shown,
        dict.fromkeys(full),
        {**shown, "tags": [], "by": {}, "inner": None},
    ]
    assert texts[1].startswith(b'{"id":null,"text":null,')


def test_json_by_a_schema_keeps_its_order_and_leaves_out_what_is_not_there() -> None:
    schema = record(("name", ["null", "string"]), ("absent", ["null", "int"]), ("id", "long"))
    encoded = make_encoder("json", schema, None).encode(ROWS)
    assert encoded.payloads.to_pylist() == [b'{"name":"a","id":1}', None, b'{"name":null,"id":2}']


def test_json_has_no_nan_and_only_that_record_suffers() -> None:
    encoded = make_encoder("json", None, None).encode(pa.array([{"x": 1.0}, {"x": float("nan")}, {"x": None}]))
    assert [item.index for item in encoded.bad] == [1]
    assert [json.loads(text) if text else None for text in encoded.payloads.to_pylist()] == [
        {"x": 1.0},
        None,
        {"x": None},
    ]


def test_text_and_bytes_are_written_as_they_are() -> None:
    assert make_encoder("string", None, None).encode(pa.array(["é", None, ""])).payloads.to_pylist() == [
        "é".encode(),
        None,
        b"",
    ]
    assert make_encoder("bytes", None, None).encode(pa.array([b"\xff", None])).payloads.to_pylist() == [b"\xff", None]
    with pytest.raises(SchemaError, match="one string column"):
        make_encoder("string", None, None).encode(ROWS)
