"""Connect JSON to columns: Debezium's records, null and default, schemas that change, records without one, and wrong ones."""

from __future__ import annotations

import datetime
import decimal
import json
from typing import Any

import pyarrow as pa
import pytest

from zync_assets.codecs.batches import BadPayload, DecodedBatch
from zync_assets.codecs.dispatch import Decoder, make_decoder
from zync_assets.errors import SchemaError
from zync_assets.pipeline import SideFormat
from zync_assets_tests.codecs.connect_generated import VARIABLE, base64_of, enveloped
from zync_assets_tests.codecs.debezium import (
    CONNECT,
    DATA,
    MYSQL,
    MYSQL_AFTER,
    MYSQL_ROW,
    MYSQL_SOURCE,
    TIME,
    decimal_of,
    envelope,
    field,
    struct,
)

UTC = datetime.UTC


def decoder(ddl: str | None = None, target: pa.DataType | None = None) -> Decoder:
    return make_decoder(SideFormat("connect-json", ddl), str, target)


def decode(*payloads: bytes | None, by: Decoder | None = None) -> DecodedBatch:
    decoded = (by or decoder()).decode(pa.array(payloads, pa.binary()))
    decoded.values.validate(full=True)
    return decoded


def single(schema: dict[str, Any], payload: Any) -> Any:
    """The lake's form of one field's value."""
    decoded = decode(enveloped(struct(field("x", schema)), {"x": payload}))
    assert decoded.bad == ()
    return decoded.values[0].as_py()["x"]


def test_a_debezium_envelope_of_mysql() -> None:
    schema = envelope(MYSQL_SOURCE, *MYSQL_ROW)
    deleted = {**MYSQL, "before": MYSQL_AFTER, "after": None, "op": "d"}
    decoded = decode(enveloped(schema, MYSQL), enveloped(schema, deleted), None)
    assert decoded.bad == ()
    after = MYSQL_AFTER | {
        "price": decimal.Decimal("-12.30"),
        "made_on": datetime.date(2024, 2, 29),
        "sold_at": datetime.datetime(2024, 2, 29, 10, 0, 0, 123_000, UTC),
        "flags": b"\x01\x08",
        "place": {"x": 1.5, "y": -2.0, "wkb": b"\x01\x01\x00\x00\x00", "srid": None},
    }
    assert decoded.values.to_pylist() == [{**MYSQL, "after": after}, {**deleted, "before": after}, None]
    assert decoded.schema_ids.to_pylist() == [None, None, None]
    row = decoded.values.type.field("after").type
    assert row.field("price").type == pa.decimal128(10, 2)
    assert row.field("active").type == pa.int16()


def test_a_debezium_envelope_of_postgresql() -> None:
    row = (
        field("id", "string", f"{DATA}.Uuid", optional=False),
        field("amount", VARIABLE),
        field("money", "bytes", f"{CONNECT}.Decimal", parameters={"scale": "2"}),
        field("at", "int64", f"{TIME}.MicroTimestamp"),
        field("at_zone", "string", f"{TIME}.ZonedTimestamp"),
        field("clock", "string", f"{TIME}.ZonedTime"),
        field("span", "int64", f"{TIME}.MicroDuration"),
        field("document", "string", f"{DATA}.Xml"),
        field("labels", {"type": "array", "items": {"type": "string", "optional": True}}),
        field(
            "attributes",
            {
                "type": "map",
                "keys": {"type": "string", "optional": False},
                "values": {"type": "string", "optional": True},
            },
        ),
        field(
            "shape", struct(field("wkb", "bytes", optional=False), field("srid", "int32")), f"{DATA}.geometry.Geometry"
        ),
        field("raw", "bytes"),
    )
    source = struct(field("connector", "string"), field("lsn", "int64"), field("sequence", "string"))
    after = {
        "id": "f81d4fae-7dec-11d0-a765-00a0c91e6bf6",
        "amount": {"scale": 3, "value": decimal_of("1.500", 3)},
        "money": decimal_of("99999999.99", 2),
        "at": 1_709_200_800_123_456,
        "at_zone": "2024-02-29T10:00:00.123456Z",
        "clock": "10:00:00Z",
        "span": -5,
        "document": "<a/>",
        "labels": ["x", None, ""],
        "attributes": {"k": "v", "n": None},
        "shape": {"wkb": "AQE=", "srid": 4326},
        "raw": "",
    }
    payload = {
        "before": None,
        "after": after,
        "source": {"connector": "postgresql", "lsn": 1 << 40, "sequence": '["1","2"]'},
        "transaction": {"id": "571:53195832", "total_order": 1},
        "op": "r",
        "ts_ms": None,
    }
    decoded = decode(enveloped(envelope(source, *row), payload))
    assert decoded.bad == ()
    made = decoded.values[0].as_py()
    assert made["after"] == after | {
        "amount": "1.500",
        "money": decimal.Decimal("99999999.99"),
        "at": datetime.datetime(2024, 2, 29, 10, 0, 0, 123_456, UTC),
        "attributes": [("k", "v"), ("n", None)],
        "shape": {"wkb": b"\x01\x01", "srid": 4326},
        "raw": b"",
    }
    assert {name: value for name, value in made.items() if name != "after"} == {
        name: value for name, value in payload.items() if name != "after"
    }


@pytest.mark.parametrize(
    ("schema", "payload", "value"),
    [
        ({"type": "int8"}, -128, -128),
        ({"type": "float32"}, 1.5, 1.5),
        ({"type": "float64"}, 1, 1.0),
        # More than the largest float, and rounded to it.
        (
            {"type": "map", "keys": {"type": "string"}, "values": {"type": "float"}},
            {"a": 3.4028235e38},
            [("a", 2.0**128 - 2.0**104)],
        ),
        ({"type": "double"}, "-Infinity", float("-inf")),
        ({"type": "int32", "name": f"{CONNECT}.Time"}, 5, 5),
        ({"type": "int64", "name": f"{TIME}.NanoTimestamp"}, 1_709_200_800_123_456_789, 1_709_200_800_123_456_789),
        ({"type": "string", "name": f"{TIME}.Interval"}, "P1Y2M", "P1Y2M"),
        # A name that its type does not go with says nothing.
        ({"type": "string", "name": f"{TIME}.Date"}, "x", "x"),
        # decimal.format=NUMERIC
        ({"type": "bytes", "name": f"{CONNECT}.Decimal", "parameters": {"scale": "2"}}, 1.5, decimal.Decimal("1.50")),
        ({"type": "bytes", "name": f"{CONNECT}.Decimal", "parameters": {"scale": "-2"}}, decimal_of("12", 0), "1200"),
        # Debezium's form of PostgreSQL's numeric(5, -2).
        (
            {
                "type": "bytes",
                "name": f"{CONNECT}.Decimal",
                "parameters": {"scale": "2046", "connect.decimal.precision": "5"},
            },
            decimal_of("12300", 2046),
            f"12300.{2046 * '0'}",
        ),
        (VARIABLE, {"scale": -3, "value": base64_of(b"\x01")}, "1E+3"),
        (VARIABLE, {"scale": 0, "value": base64_of(b"\xff")}, "-1"),
        (struct(), {}, True),
        (
            {"type": "map", "keys": {"type": "int32"}, "values": {"type": "string"}},
            [[1, "a"], [2, "b"]],
            [(1, "a"), (2, "b")],
        ),
        (
            {"type": "array", "items": struct(field("a", "bytes"))},
            [{"a": "AQ=="}, {"a": None}],
            [{"a": b"\x01"}, {"a": None}],
        ),
    ],
)
def test_types(schema: dict[str, Any], payload: Any, value: Any) -> None:
    assert single(schema, payload) == value


def test_nothing_empty_bytes_and_null_are_tombstones() -> None:
    schema = struct(field("id", "int32"))
    payloads = [
        None,
        b"",
        b"null",
        b" null ",
        b" \n",
        enveloped(None, None),
        enveloped(schema, None),
        enveloped(schema, {"id": 1}),
    ]
    decoded = decode(*payloads)
    assert decoded.bad == ()
    assert decoded.values.to_pylist() == [None] * 7 + [{"id": 1}]


def test_only_nulls_have_no_type_yet() -> None:
    assert decode(None, b"", b"null", b" \n").values.type == pa.null()


@pytest.mark.parametrize("written", ["as JsonConverter does", "in another order"])
def test_null_missing_and_default(written: str) -> None:
    schema = struct(
        field("a", "int32"),
        field("b", "int32", default=2),
        field("c", "int32", optional=False, default=3),
        field("d", "bytes", optional=False, default="AQ=="),
    )
    given = [{"a": None, "b": None, "c": None, "d": None}, {}, {"a": 7, "b": 8, "c": 9, "d": "", "unheard": 1}]
    payloads = [enveloped(schema, one) for one in given]
    if written == "in another order":
        payloads = [json.dumps({"payload": one, "schema": schema}).encode() for one in given]
    decoded = decode(*payloads)
    assert decoded.bad == ()
    assert decoded.values.to_pylist() == [
        {"a": None, "b": None, "c": 3, "d": b"\x01"},
        {"a": None, "b": 2, "c": 3, "d": b"\x01"},
        {"a": 7, "b": 8, "c": 9, "d": b""},
    ]


ROW = struct(field("id", "int32", optional=False), field("after", struct(field("price", "bytes"), optional=True)))


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (b"\xff", "not UTF-8"),
        (b'{"schema":', "no JSON: "),
        (enveloped(ROW, {"id": "7", "after": None}), 'payload.id: "7" is not a whole number (int32)'),
        (enveloped(ROW, {"id": 1 << 31, "after": None}), "payload.id: 2147483648 is out of the range of int32"),
        (enveloped(ROW, {"id": 1.5, "after": None}), "payload.id: "),
        (enveloped(ROW, {"id": True, "after": None}), "payload.id: true is not a whole number"),
        (enveloped(ROW, {"id": None, "after": None}), "payload.id: is null, and its schema says required"),
        (enveloped(ROW, {"after": None}), "payload.id: is missing, and its schema says required"),
        (enveloped(ROW, {"id": 1, "after": {"price": "é"}}), "payload.after.price: "),
        (enveloped(ROW, {"id": 1, "after": []}), "payload.after: [] is not an object"),
        (enveloped(struct(field("id", "float")), {"id": 3.5e38}), "payload.id: 3.5E+38 is out of range"),
        (enveloped({"type": "int33"}, 1), 'schema: "int33" is no type of Connect'),
        (enveloped(struct(field("a", {"type": "array"})), {}), "schema.a[]: null is no Connect schema"),
        (enveloped(struct(field("a", "int32"), field("a", "int32")), {}), "two fields are called 'a'"),
        (
            enveloped(struct(field("a", "bytes", f"{CONNECT}.Decimal")), {}),
            "schema.a: a Decimal needs the parameter scale",
        ),
        (
            enveloped(struct(field("id", "string")), {"id": "x"}),
            "payload.id: string does not fit into the lake's int32",
        ),
        (b'{"id": 1}', "a record without schema and payload"),
        (enveloped(ROW, {"id": 1})[:-1] + b',"more":1}', "a record without schema and payload"),
        (b'{"schema":' + b"[" * 100_000, "nested too deep"),
    ],
)
def test_a_wrong_record_costs_only_itself(payload: bytes, error: str) -> None:
    good = enveloped(ROW, {"id": 1, "after": {"price": "AQ=="}})
    row = {"id": 1, "after": {"price": b"\x01"}}
    decoded = decode(good, payload, good)
    assert [bad.index for bad in decoded.bad] == [1]
    assert error in decoded.bad[0].error
    assert decoded.values.to_pylist() == [row, None, row]


def test_a_number_too_large_for_its_decimal_is_bad() -> None:
    parameters = {"scale": "2", "connect.decimal.precision": "4"}
    schema = struct(field("p", "bytes", f"{CONNECT}.Decimal", parameters=parameters))
    decoded = decode(*(enveloped(schema, {"p": decimal_of(digits, 2)}) for digits in ("99.99", "100.00")))
    assert [bad.index for bad in decoded.bad] == [1]
    assert decoded.values[0].as_py() == {"p": decimal.Decimal("99.99")}


def test_one_wrong_record_in_a_large_batch() -> None:
    payloads = [enveloped(ROW, {"id": index, "after": {"price": "AQI="}}) for index in range(5000)]
    payloads[4321] = payloads[4321].replace(b'"id":4321', b'"id":"no"')
    decoded = decode(*payloads)
    assert decoded.bad == (BadPayload(4321, 'payload.id: "no" is not a whole number (int32)'),)
    assert [row["id"] for row in decoded.values.drop_null().to_pylist()] == [i for i in range(5000) if i != 4321]


def test_schemas_that_change_widen_the_column() -> None:
    old = struct(field("id", "int32"), field("name", "string"))
    new = struct(field("since", "int64", f"{CONNECT}.Timestamp"), field("id", "int32"))
    by = decoder()
    first = decode(enveloped(old, {"id": 1, "name": "a"}), by=by)
    second = decode(enveloped(new, {"since": 0, "id": 2}), enveloped(old, {"id": 3, "name": None}), by=by)
    assert [item.name for item in first.values.type] == ["id", "name"]
    assert second.values.to_pylist() == [
        {"id": 2, "name": None, "since": datetime.datetime(1970, 1, 1, tzinfo=UTC)},
        {"id": 3, "name": None, "since": None},
    ]
    assert by.type == second.values.type


def test_more_schemas_than_are_looked_for_at_once() -> None:
    payloads = [enveloped(struct(field("id", "int32"), name=f"v{index % 100}"), {"id": index}) for index in range(300)]
    decoded = decode(*payloads)
    assert decoded.bad == ()
    assert decoded.values.to_pylist() == [{"id": index} for index in range(300)]


def test_a_column_that_is_there_already_is_kept() -> None:
    target = pa.struct([("id", pa.int64()), ("gone", pa.string())])
    decoded = decode(enveloped(struct(field("id", "int32")), {"id": 1}), by=decoder(target=target))
    assert decoded.values.type == target
    assert decoded.values.to_pylist() == [{"id": 1, "gone": None}]


def test_keys_may_be_no_structs() -> None:
    assert decode(enveloped({"type": "string"}, "k"), b"").values.to_pylist() == ["k", None]


def test_without_schemas_a_ddl_gives_the_type() -> None:
    payloads = [b'{"id": 1, "more": 2}', b"null", b"", b'{"id": "x"}', enveloped(None, {"id": 3})]
    decoded = decode(*payloads, by=decoder("id BIGINT, name STRING"))
    assert decoded.bad == (BadPayload(3, 'value.id: "x" is not a whole number (int64)'),)
    rows = decoded.values.to_pylist()
    assert [rows[0], rows[4]] == [{"id": 1, "name": None}, {"id": 3, "name": None}]
    assert rows[1:4] == [None, None, None]


def test_without_schemas_and_without_a_ddl_a_record_is_its_text() -> None:
    decoded = decode(b'{"id": 1.50}', b"null", b"{", enveloped(None, {"id": 1.5}))
    assert decoded.values.to_pylist() == ['{"id": 1.50}', None, None, '{"id": 1.5}']
    assert [bad.index for bad in decoded.bad] == [2]


def test_a_schema_that_does_not_fit_is_a_change_that_the_column_does_not_take() -> None:
    """Ingest reports it, as it reports a schema of the registry."""
    first, second = (
        enveloped(struct(field("id", kind)), {"id": value}) for kind, value in (("int32", 1), ("string", "x"))
    )
    decoded = decode(first, second)
    assert ["let the connector write the table to a new topic" in bad.error for bad in decoded.bad] == [True]
    _, arrival = decoded.arrivals
    assert (arrival.index, arrival.type, arrival.before, arrival.is_new) == (
        1,
        pa.struct([("id", pa.string())]),
        (pa.struct([("id", pa.int32())]),),
        True,
    )


def test_a_ddl_that_the_column_can_not_take_is_an_error() -> None:
    with pytest.raises(SchemaError, match="id: int64 does not fit into the lake's string"):
        decoder("id BIGINT", pa.struct([("id", pa.string())]))


def test_a_slice_of_a_batch_is_decoded_as_it_is() -> None:
    payloads = pa.array([enveloped(ROW, {"id": index, "after": None}) for index in range(6)] + [None], pa.binary())
    decoded = decoder().decode(payloads.slice(2))
    assert [row and row["id"] for row in decoded.values.to_pylist()] == [2, 3, 4, 5, None]
