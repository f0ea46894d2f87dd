"""Avro's types, the lake's, Spark's, and what neither can hold."""

from __future__ import annotations

import json
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings

from zync_assets.codecs.avro.types import Outer, arrow_type, avro_schema, field_defaults
from zync_assets.codecs.spark_types import parse_ddl, spark_ddl, spark_type
from zync_assets.errors import SchemaError
from zync_assets_tests.codecs.generated import Kind, kinds

UTC = pa.timestamp("us", tz="UTC")


def logical(base: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": base, "logicalType": name, **more}


def fixed(size: int, **more: Any) -> dict[str, Any]:
    return {"type": "fixed", "name": "F", "size": size, **more}


@pytest.mark.parametrize(
    ("schema", "type"),
    [
        ("int", pa.int32()),
        (["null", "long"], pa.int64()),
        (["long", "null"], pa.int64()),
        (fixed(3), pa.binary()),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, pa.string()),
        ({"type": "array", "items": ["null", "int"]}, pa.list_(pa.int32())),
        ({"type": "map", "values": "double"}, pa.map_(pa.string(), pa.float64())),
        (["null", "int", "string"], pa.struct([("int", pa.int32()), ("string", pa.string())])),
        (logical("bytes", "decimal", precision=38, scale=3), pa.decimal128(38, 3)),
        (logical("bytes", "decimal", precision=39, scale=3), pa.string()),
        (logical("bytes", "decimal", precision=3, scale=4), pa.binary()),
        (fixed(16, logicalType="uuid"), pa.string()),
        (fixed(15, logicalType="uuid"), pa.binary()),
        (logical("int", "date"), pa.date32()),
        (logical("long", "date"), pa.int64()),
        (logical("int", "time-millis"), pa.int32()),
        (logical("long", "timestamp-millis"), UTC),
        (logical("long", "timestamp-micros"), UTC),
        (logical("long", "timestamp-nanos"), pa.int64()),
        (logical("long", "local-timestamp-micros"), pa.int64()),
        (fixed(12, logicalType="duration"), pa.binary()),
        ({"type": "long", "connect.name": "io.debezium.time.MicroTimestamp"}, pa.int64()),
        ({"type": "record", "name": "Empty", "fields": []}, pa.bool_()),
        ({"type": "record", "name": "R", "fields": [{"name": "n", "type": "null"}, {"name": "a", "type": "int"}]},
         pa.struct([("a", pa.int32())])),
    ],
    ids=str,
)  # fmt: skip
def test_avro_in_the_lake(schema: Any, type: pa.DataType) -> None:
    assert arrow_type(json.dumps(schema)) == type


def test_branches_of_one_short_name_are_told_apart() -> None:
    branches = [
        {"type": "record", "name": "Thing", "namespace": space, "fields": [{"name": "x", "type": "int"}]}
        for space in ("a", "b")
    ]
    assert [field.name for field in arrow_type(json.dumps(branches))] == ["a_Thing", "b_Thing"]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "not JSON"),
        ('"Unknown"', "'Unknown' is neither Avro's nor defined"),
        (
            '{"type":"record","name":"R","fields":[{"name":"a","type":"int"},{"name":"a","type":"int"}]}',
            "two fields are called 'a'",
        ),
        (
            '{"type":"record","name":"R","fields":[{"name":"a","type":["int","int"]}]}',
            r"schema\.a: a union holds one type twice",
        ),
        ('{"type":"array","items":"null"}', "take no bytes"),
        ('{"type":"fixed","name":"F"}', "size"),
        ('{"type":"record","name":"R"}', "no fields"),
    ],
)
def test_schemas_that_cannot_be_held_say_why(schema: str, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        arrow_type(schema)


def test_a_format_that_is_not_avro_takes_names_that_avro_lacks() -> None:
    type = pa.struct(
        [("a.b", pa.struct([("ü", pa.string()), ("1", pa.int32())])), ("a_b", pa.struct([("c", pa.int32())]))]
    )
    schema = json.loads(avro_schema(type, "Row", None, Outer(notes=False, any_names=True)))
    fastavro.parse_schema(
        json.loads(json.dumps(schema).replace("a.b", "x").replace("\\u00fc", "y").replace('"1"', '"z"'))
    )
    assert [field["name"] for field in schema["fields"]] == ["a.b", "a_b"]
    assert arrow_type(json.dumps(schema)) == type
    spaced = json.loads(avro_schema(pa.struct([("a b", pa.int32())]), "Row", None, Outer(any_names=True)))
    assert [field["name"] for field in spaced["fields"]] == ["a b"]


def test_a_column_that_avro_cannot_name_or_type_says_where() -> None:
    with pytest.raises(SchemaError, match=r"Row\.a b: Avro names"):
        avro_schema(pa.struct([("a b", pa.int32())]), "Row", None)
    with pytest.raises(SchemaError, match=r"Row\.a: there is no Avro type for duration"):
        avro_schema(pa.struct([("a", pa.duration("s"))]), "Row", None)
    with pytest.raises(SchemaError, match=r"Row\.a: the keys of a map .* int32; write transform_keys"):
        avro_schema(pa.struct([("a", pa.map_(pa.int32(), pa.string()))]), "Row", None)


def test_inner_records_have_a_name_each() -> None:
    """Avro defines a name once: ``a.b`` and ``a_b`` must not be one, nor an array's items and a field beside it."""
    inner = [pa.struct([(name, pa.int32())]) for name in "xyz"]
    type = pa.struct(
        [
            ("a", pa.struct([("b", inner[0])])),
            ("a_b", inner[1]),
            ("a_b_2", inner[2]),
            ("c", pa.list_(inner[0])),
            ("c_item", inner[1]),
            ("d", pa.map_(pa.string(), inner[0])),
            ("d_value", inner[2]),
        ]
    )
    schema = avro_schema(type, "Value", "shop")
    fastavro.parse_schema(json.loads(schema))
    assert arrow_type(schema) == type


@settings(max_examples=60, deadline=None)
@given(kinds(depth=3, top=True))
def test_spark_has_every_type_of_the_lake_and_reads_its_own_words(kind: Kind) -> None:
    type = arrow_type(json.dumps(kind.schema))
    assert spark_type(type).simpleString().replace("`", "") == spark_ddl(type).replace("`", "")
    assert parse_ddl(spark_ddl(type)) == type


@pytest.mark.parametrize(
    ("ddl", "type"),
    [
        ("string", pa.string()),
        ("DECIMAL(10, 2)", pa.decimal128(10, 2)),
        ("decimal", pa.decimal128(10, 0)),
        ("a int", pa.struct([("a", pa.int32())])),
        ("int int", pa.struct([("int", pa.int32())])),
        ("a: bigint, `b_d` STRING", pa.struct([("a", pa.int64()), ("b_d", pa.string())])),
        ("a INT NOT NULL COMMENT 'of, it' , b date", pa.struct([("a", pa.int32()), ("b", pa.date32())])),
        (
            "b struct<c: string, d: array<map<string,struct<`e`:timestamp>>>>",
            pa.struct(
                [
                    (
                        "b",
                        pa.struct([("c", pa.string()), ("d", pa.list_(pa.map_(pa.string(), pa.struct([("e", UTC)]))))]),
                    )
                ]
            ),
        ),
        ("array<varchar(3)>", pa.list_(pa.string())),
    ],
)
def test_ddl(ddl: str, type: pa.DataType) -> None:
    assert parse_ddl(ddl) == type


@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        ("", "a column name expected at character 1"),
        ("a", "a type expected at character 2"),
        ("a itn", "unknown type 'itn' at character 3"),
        ("array<int", "'>' expected at character 10"),
        ("a int b int", "',' or the end expected at character 7"),
        ("a decimal(39,0)", "out of range"),
        ("a int, a int", "two fields are called 'a'"),
        ("a int; b int", "unexpected character at character 6"),
    ],
)
def test_ddl_that_makes_no_sense_says_where(ddl: str, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        parse_ddl(ddl)


@pytest.mark.parametrize(
    ("kind", "default", "text"),
    [
        ("int", 7, "7"),
        ("int", True, None),
        ("boolean", False, "false"),
        ("boolean", 0, None),
        ("double", 0.1, "0.1"),
        ("float", 0.1, "0.10000000149011612"),
        (["string", "null"], "", ""),
        ("string", "a\0b", None),
        (["null", "string"], None, None),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "A", "A"),
        ("bytes", "ab", None),
        ({"type": "array", "items": "int"}, [], None),
        (["int", "string"], 7, None),
        (logical("bytes", "decimal", precision=10, scale=2), "\u00fb\u0032", "-12.30"),
        (logical("bytes", "decimal", precision=10, scale=2), "\u0100", None),
        (logical("int", "date"), 20_000, "2024-10-04"),
        (logical("int", "date"), 2**70, None),
        (logical("long", "timestamp-micros"), 1_700_000_000_123_456, "2023-11-14 22:13:20.123456Z"),
        (logical("long", "timestamp-millis"), -1, "1969-12-31 23:59:59.999Z"),
        (logical("long", "time-micros"), 0, "0"),
        ({"type": "int", "connect.name": "io.debezium.time.Date"}, 5, "5"),
        # Debezium writes the epoch for a function such as CURRENT_TIMESTAMP.
        (logical("int", "date"), 0, None),
        (logical("long", "timestamp-millis"), 0, None),
        ({"type": "int", "connect.name": "io.debezium.time.Date"}, 0, None),
        ({"type": "string", "connect.name": "io.debezium.time.ZonedTimestamp"}, "1970-01-01T00:00:00Z", None),
    ],
)
def test_a_default_as_text(kind: Any, default: Any, text: str | None) -> None:
    row = {"type": "record", "name": "Row", "fields": [{"name": "f", "type": kind, "default": default}]}
    schema = {"type": "record", "name": "Envelope", "fields": [{"name": "after", "type": ["null", row]}]}
    assert field_defaults(json.dumps(schema)) == ({} if text is None else {("after", "f"): text})
    if text is not None:
        after = arrow_type(json.dumps(schema)).field("after").type
        assert pa.scalar(text).cast(after.field("f").type).is_valid
