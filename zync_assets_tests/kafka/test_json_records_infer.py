"""Inferred Avro schemas of JSON values."""

from __future__ import annotations

import json

import fastavro
import pytest

from zync_assets.errors import SchemaError
from zync_assets.kafka.json_records import infer_schema


def test_each_json_type_has_its_avro_type() -> None:
    schema = infer_schema([{"b": True, "i": 1, "f": 1.5, "s": "a", "l": [1], "o": {"x": 1}}], "Row")
    assert json.loads(schema) == {
        "type": "record",
        "name": "Row",
        "fields": [
            {"name": "b", "type": "boolean"},
            {"name": "i", "type": "long"},
            {"name": "f", "type": "double"},
            {"name": "s", "type": "string"},
            {"name": "l", "type": {"type": "array", "items": "long"}},
            {"name": "o", "type": {"type": "record", "name": "Row_o", "fields": [{"name": "x", "type": "long"}]}},
        ],
    }
    fastavro.parse_schema(json.loads(schema))


def test_null_or_missing_anywhere_is_nullable_and_a_mixture_of_numbers_double() -> None:
    values = [{"a": 1, "n": 1, "o": {"x": 1}}, {"a": None, "n": 1.5, "o": {}}, {"n": 2, "m": "x"}]
    fields = {field["name"]: field for field in json.loads(infer_schema(values, "Row"))["fields"]}
    assert fields["a"] == {"name": "a", "type": ["null", "long"], "default": None}
    assert fields["n"] == {"name": "n", "type": "double"}
    assert fields["m"] == {"name": "m", "type": ["null", "string"], "default": None}
    assert fields["o"]["type"][1]["fields"] == [{"name": "x", "type": ["null", "long"], "default": None}]


def test_single_values_and_values_of_nothing() -> None:
    assert infer_schema([1, 2], "Key") == '"long"'
    assert json.loads(infer_schema([None, "a"], "Key")) == ["null", "string"]
    assert json.loads(infer_schema([[]], "Key")) == {"type": "array", "items": ["null", "string"]}
    with pytest.raises(SchemaError, match="no value"):
        infer_schema([], "Key")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([{"a": {"b": [1]}}, {"a": {"b": ["x"]}}], r"Row\.a\.b\[\]: string here, long in another value"),
        ([{"a": True}, {"a": 1}], r"Row\.a: long here, boolean in another"),
        ([{"a b": 1}], r"Row\.a b: Avro names"),
        ([{"a": 1 << 63}], r"Row\.a: 9223372036854775808 is out of the range"),
    ],
)
def test_what_avro_cannot_hold_is_named_by_its_path(values: list[object], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        infer_schema(values, "Row")
