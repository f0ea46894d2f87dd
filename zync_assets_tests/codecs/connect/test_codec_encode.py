"""Columns to Connect JSON: the schema that an output's fields become, and what stays out of a partial update."""

from __future__ import annotations

import datetime
import decimal
import json
from typing import Any

import pyarrow as pa
import pytest

from zync_assets.codecs.avro.types import TIMESTAMP, avro_schema
from zync_assets.codecs.dispatch import make_decoder, make_encoder
from zync_assets.errors import SchemaError
from zync_assets.pipeline import SideFormat
from zync_assets_tests.codecs.generated import same

WIDE = pa.struct(
    [
        ("id", pa.int64()),
        ("price", pa.decimal128(10, 2)),
        ("day", pa.date32()),
        ("at", TIMESTAMP),
        ("raw", pa.binary()),
        ("rate", pa.float64()),
        ("tags", pa.list_(pa.string())),
        ("counts", pa.map_(pa.string(), pa.int32())),
        ("inner", pa.struct([("ok", pa.bool_())])),
    ]
)
ROW = {
    "id": 1,
    "price": decimal.Decimal("-12.30"),
    "day": datetime.date(2024, 2, 29),
    "at": datetime.datetime(2024, 2, 29, 10, 0, 0, 123_456, datetime.UTC),
    "raw": b"\x00\xff",
    "rate": 1.5,
    "tags": ['a"b', None],
    "counts": [("x", 1)],
    "inner": {"ok": True},
}


def encode(values: pa.Array, type: pa.DataType | None = None) -> list[Any]:
    schema = avro_schema(type or values.type, "Value", "shop")
    encoded = make_encoder("connect-json", schema, None).encode(values)
    assert encoded.bad == ()
    return [None if made is None else json.loads(made) for made in encoded.payloads.to_pylist()]


def test_schema_and_payload() -> None:
    made, tombstone = encode(pa.array([ROW, None], WIDE))
    assert tombstone is None
    assert made["payload"] == {
        "id": 1,
        "price": "+zI=",
        "day": 19_782,
        "at": 1_709_200_800_123_456,
        "raw": "AP8=",
        "rate": 1.5,
        "tags": ['a"b', None],
        "counts": {"x": 1},
        "inner": {"ok": True},
    }
    schema = made["schema"]
    assert (schema["type"], schema["optional"], schema["name"]) == ("struct", False, "shop.Value")
    assert all(item["optional"] for item in schema["fields"])
    by_name = {item["field"]: item for item in schema["fields"]}
    assert by_name["price"]["name"] == "org.apache.kafka.connect.data.Decimal"
    assert by_name["price"]["parameters"] == {"scale": "2", "connect.decimal.precision": "10"}
    assert by_name["day"]["name"] == "org.apache.kafka.connect.data.Date"
    assert by_name["at"]["name"] == "io.debezium.time.MicroTimestamp"
    assert by_name["counts"]["keys"] == {"type": "string", "optional": False}


def test_what_is_written_is_read_again() -> None:
    values = pa.array([ROW, None, dict.fromkeys(ROW), {**ROW, "rate": float("nan")}], WIDE)
    schema = avro_schema(WIDE, "Value", None)
    payloads = make_encoder("connect-json", schema, None).encode(values).payloads
    decoded = make_decoder(SideFormat("connect-json"), str, None).decode(payloads)
    assert decoded.bad == ()
    assert decoded.values.type == WIDE
    assert same(decoded.values, values)


def test_a_partial_update_stays_partial() -> None:
    """The staging column has the fields of all rules, the schema those of the rule that made the record."""
    own = pa.struct([("at", TIMESTAMP), ("id", pa.int64())])
    (made,) = encode(pa.array([{**ROW, "at": None}], WIDE), own)
    assert made["payload"] == {"at": None, "id": 1}
    assert [item["field"] for item in made["schema"]["fields"]] == ["at", "id"]


def test_keys_may_be_no_structs() -> None:
    assert encode(pa.array(["k", None])) == [{"schema": {"type": "string", "optional": False}, "payload": "k"}, None]


@pytest.mark.parametrize(("value", "text"), [(float("nan"), "NaN"), (float("-inf"), "-Infinity")])
def test_numbers_that_json_does_not_have_are_strings(value: float, text: str) -> None:
    made = encode(
        pa.array([{"a": value, "b": 0.1}, {"a": 1.0, "b": 2.0}], pa.struct([("a", pa.float64()), ("b", pa.float32())]))
    )
    assert [one["payload"] for one in made] == [{"a": text, "b": 0.1}, {"a": 1.0, "b": 2.0}]


def test_an_output_without_a_schema_is_an_error() -> None:
    with pytest.raises(SchemaError, match="needs a schema"):
        make_encoder("connect-json", None, None)


def test_a_type_that_connect_lacks_is_an_error() -> None:
    union = json.dumps(["null", "int", "string"])
    with pytest.raises(SchemaError, match="Connect has no type for Avro's union"):
        make_encoder("connect-json", union, None)
