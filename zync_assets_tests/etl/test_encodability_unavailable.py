"""Debezium's placeholder for an unsent value, by type, and its treatment in outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import DataType, StructType

from zync_assets.etl.encodability import left_out
from zync_assets.spark.sql import placeholder_bytes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOLDER = "__debezium_unavailable_value"
BYTES = list(HOLDER.encode())

# (type, a value as SQL, whether it is the placeholder)
CASES = [
    ("string", f"'{HOLDER}'", True),
    ("string", f'\'{{"{HOLDER}":"{HOLDER}"}}\'', True),
    ("string", f"'{HOLDER} '", False),
    ("string", "''", False),
    ("binary", f"CAST('{HOLDER}' AS BINARY)", True),
    ("binary", "X''", False),
    ("array<string>", f"array('{HOLDER}')", True),
    ("array<string>", f"array('{HOLDER}', 'x')", False),
    ("array<string>", f"array({', '.join(f'{one!r}' for one in map(str, BYTES))})", True),
    ("array<binary>", f"array(CAST('{HOLDER}' AS BINARY))", True),
    *((f"array<{kind}>", f"CAST(array{tuple(BYTES)} AS ARRAY<{kind}>)", True) for kind in ("int", "bigint", "double")),
    ("array<int>", "array(1, 2)", False),
    ("array<decimal(10,2)>", f"transform(array{tuple(BYTES)}, x -> CAST(x / 100 AS DECIMAL(10,2)))", True),
    ("array<date>", f"transform(array{tuple(BYTES)}, x -> date_from_unix_date(x))", True),
    ("array<timestamp>", f"transform(array{tuple(BYTES)}, x -> timestamp_micros(x))", True),
    ("map<string,string>", f"map('{HOLDER}', '{HOLDER}')", True),
    ("map<string,string>", f"map('{HOLDER}', '{HOLDER}', 'a', 'b')", False),
    ("map<string,string>", "map()", False),
]


def spark_struct(ddl: str) -> StructType:
    kind = DataType.fromDDL(ddl)
    assert isinstance(kind, StructType)
    return kind


def made(spark: SparkSession, ddl: str, value: str, placeholder: str | None = HOLDER) -> Any:
    """(value, left_out) of one struct; None where nothing is looked for."""
    frame = spark.sql(f"SELECT CAST({value} AS STRUCT<{ddl}>) AS value")
    found = left_out("value", frame.schema["value"].dataType, "value", placeholder)
    if found is None:
        return None
    row = frame.selectExpr(f"{found[0]} AS value", f"{found[1]} AS paths").collect()[0]
    return row["value"].asDict(recursive=True) if row["value"] is not None else None, row["paths"]


def test_each_type_has_its_own_form(spark: SparkSession) -> None:
    fields = ", ".join(f"f{place}: {kind}" for place, (kind, _, _) in enumerate(CASES))
    value = ", ".join(f"'f{place}', {sql}" for place, (_, sql, _) in enumerate(CASES))
    found, paths = made(spark, fields, f"named_struct({value})")
    expected = [f"value.f{place}" for place, (_, _, is_it) in enumerate(CASES) if is_it]
    assert paths == expected
    assert {name for name, one in found.items() if one is None} == {path.partition(".")[2] for path in expected}


def test_uuids_are_made_of_the_placeholder_as_java_does(spark: SparkSession) -> None:
    import hashlib

    digest = bytearray(hashlib.md5(HOLDER.encode()).digest())
    digest[6], digest[8] = digest[6] & 0x0F | 0x30, digest[8] & 0x3F | 0x80
    text = digest.hex()
    name = "-".join([text[:8], text[8:12], text[12:16], text[16:20], text[20:]])
    assert made(spark, "u: array<string>", f"named_struct('u', array('{name}'))") == ({"u": None}, ["value.u"])


def test_fields_are_found_at_any_depth_and_the_rest_stays(spark: SparkSession) -> None:
    value = f"named_struct('a', 1, 'in', named_struct('x.y', '{HOLDER}', 'z', 'z'), 'none', NULL)"
    found = made(spark, "a: int, `in`: struct<`x.y`: string, z: string>, none: struct<s: string>", value)
    assert found == ({"a": 1, "in": {"x.y": None, "z": "z"}, "none": None}, ["value.in.`x.y`"])


def test_nulls_and_tombstones_hold_nothing(spark: SparkSession) -> None:
    assert made(spark, "a: string, b: binary, c: array<int>, d: map<string, string>", "NULL") == (None, None)
    nulls = "named_struct('a', NULL, 'b', NULL, 'c', NULL, 'd', NULL)"
    assert made(spark, "a: string, b: binary, c: array<int>, d: map<string, string>", nulls)[1] is None


@pytest.mark.parametrize(
    ("ddl", "placeholder"),
    [("a: int, b: struct<c: double>, d: array<boolean>, e: map<string, int>", HOLDER), ("a: string", None)],
)
def test_what_can_t_hold_it_is_not_looked_at(spark: SparkSession, ddl: str, placeholder: str | None) -> None:
    assert made(spark, ddl, "NULL", placeholder) is None


def test_a_placeholder_may_be_given_in_hexadecimal() -> None:
    assert placeholder_bytes("hex:ff00") == b"\xff\x00"
    assert placeholder_bytes("ä") == "ä".encode()
