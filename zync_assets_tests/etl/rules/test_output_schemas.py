"""The fields that an output's records omit, and the forms that its schemas keep."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from zync_assets.codecs.avro.types import Outer, avro_schema
from zync_assets.codecs.fields import (
    DEBEZIUM_TIMESTAMP,
    MICRO_TIMESTAMP,
    PLAIN,
    TIMESTAMP,
    VARIABLE_DECIMAL,
    Default,
    Note,
    field_with_notes,
    lacked_by,
    with_default,
)
from zync_assets.etl.rules.output_schemas import (
    lacking_sql,
    later_fields,
    record_fields,
    written_forms,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_field_with_a_value_is_never_left_out(spark: SparkSession) -> None:
    """A registry that was created anew may give the id of the schema that lacks the field to the schema that has it."""
    street = lacked_by(pa.field("the street", pa.string()), [2])
    row = pa.struct([lacked_by(pa.field("coupon", pa.int32()), [1]), pa.field("address", pa.struct([street]))])
    sides = {"in": pa.schema([pa.field("value", row)])}
    found = lacking_sql({"c": "in.value.COUPON", "a": {"b": "in.value.address"}}, sides)
    rows = spark.sql(
        "SELECT named_struct('kafka', named_struct('value_schema_id', id), 'value', named_struct('coupon', coupon,"
        " 'address', named_struct('the street', street))) AS `in` FROM VALUES"
        " (1, 5, 'x'), (1, NULL, NULL), (2, NULL, 'x'), (2, NULL, NULL), (3, NULL, NULL) AS rows(id, coupon, street)"
    )
    left_out = rows.selectExpr(f"array_compact(array({', '.join(found)})) AS paths").collect()
    assert [each["paths"] for each in left_out] == [[], ["value.c"], [], ["value.a.b.the street"], []]


def test_a_whole_row_has_the_later_fields_of_its_source_and_a_mapping_has_none() -> None:
    region, plain = (lacked_by(pa.field(name, pa.string()), [1]) for name in ("region", "plain"))
    row = pa.struct([pa.field("id", pa.int64()), with_default(region, Default("eu", (1,))), plain])
    sides = {"in": pa.schema([pa.field("value", pa.struct([pa.field("after", row)]))])}
    whole = "in.value.after", sides
    mapping = {"id": "in.value.after.id", "region": "in.value.after.region"}, sides
    status = {"id": "in.value.after.id", "status": "'new'"}, sides
    others = (None, sides), ("upper(in.value.after)", sides)
    assert later_fields([whole]) == later_fields([whole, status, whole, *others]) == {"region": "eu", "plain": None}
    assert later_fields([whole, mapping]) == {"plain": None}
    assert later_fields([mapping, status, *others]) == {}


def test_the_fields_of_a_schema_are_those_of_its_record_beside_null_or_not() -> None:
    record = {"type": "record", "name": "r", "fields": [{"name": "a", "type": ["null", "int"]}]}
    assert record_fields(record) == record_fields(["null", record]) == record["fields"]
    assert record_fields({**record, "fields": []}) == []
    assert [record_fields(other) for other in ("string", ["null", "int"], {"type": "map", "values": record})] == [
        None
    ] * 3


UTC = pa.timestamp("us", "UTC")
TIMES = [
    PLAIN,
    Note(logical="timestamp-micros"),
    *(Note(name) for name in (TIMESTAMP, DEBEZIUM_TIMESTAMP, MICRO_TIMESTAMP)),
]
DIGITS = [PLAIN, Note(VARIABLE_DECIMAL, 1, required=True)]


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        (kind, *pair)
        for kind, notes in ((UTC, TIMES), (pa.string(), DIGITS))
        for pair in itertools.permutations(notes, 2)
    ],
)
def test_a_field_keeps_the_form_of_earlier_records(kind: pa.DataType, before: Note, after: Note) -> None:
    """A registry refuses a string where earlier records have a long."""

    def schema(note: Note, outer: Outer) -> dict[str, str]:
        field = field_with_notes("at", kind, connect=note)
        type = pa.struct([field, pa.field("more", pa.list_(pa.struct([field])))])
        return json.loads(avro_schema(type, "Value", None, outer))

    first = dict(written_forms(schema(before, Outer()), "Value"))
    assert {"Value.at", "Value.more[].at"} < first.keys()
    second = schema(after, Outer(forms=first))
    assert dict(written_forms(second, "Value")) == first
    said = json.dumps(second)
    assert (VARIABLE_DECIMAL in said) == (kind == pa.string() and first["Value.at"] == "record")
