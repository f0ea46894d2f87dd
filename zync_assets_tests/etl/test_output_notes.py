"""What an output's records leave out, and which forms its schemas keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.codecs.field_notes import lacked_by
from zync_assets.etl.output_notes import lacking_sql

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
