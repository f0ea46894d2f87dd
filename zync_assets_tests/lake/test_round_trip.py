"""Random Avro schemas and data through Delta files and Spark, and back to the bytes that they came from.

One run holds many schemas, a column each, so that Spark is asked twice in all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zync_assets.codecs.decode import make_decoder
from zync_assets.codecs.encode import make_encoder
from zync_assets.lake.reading import parquet_frame
from zync_assets.lake.storage import file_size
from zync_assets.lake.tables import DataFile, create_table, open_table
from zync_assets.pipeline import SideFormat
from zync_assets_tests.codecs.generated import Kind, datums, framed, kinds, recursive_kinds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 6


@st.composite
def columns(draw: st.DrawFn) -> tuple[Any, list[bytes]]:
    """A schema, and datums of it."""
    kind: Kind = draw(st.one_of(kinds(depth=3), kinds(depth=3, top=True), recursive_kinds()))
    return kind.schema, datums(kind.schema, draw(st.lists(kind.data, min_size=1, max_size=ROWS)))


@settings(
    max_examples=4,  # the first is the simplest there is
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
@given(st.lists(columns(), min_size=30, max_size=30), st.uuids())
def test_bytes_come_back_from_delta_and_spark(
    spark: SparkSession, tmp_path: Path, wrote: list[tuple[Any, list[bytes]]], run: Any
) -> None:
    payloads = [pa.array([framed(1, datum) for datum in datums_], pa.binary()) for _, datums_ in wrote]
    held: dict[str, pa.Array] = {}
    for place, ((schema, _), column) in enumerate(zip(wrote, payloads, strict=True)):
        decoded = make_decoder(SideFormat("avro"), lambda _, schema=schema: json.dumps(schema), None).decode(column)
        assert decoded.bad == ()
        if not pa.types.is_null(decoded.values.type):
            rest = pa.nulls(ROWS - len(column), decoded.values.type)
            held[f"c{place}"] = pa.concat_arrays([decoded.values, rest])
    table = pa.table({"row": pa.array(range(ROWS)), **held})
    uri = str(tmp_path / str(run))
    Path(uri).mkdir()
    pq.write_table(table, f"{uri}/a.parquet")
    file = DataFile("a.parquet", file_size(f"{uri}/a.parquet"), ROWS)
    create_table(uri, table.schema, "round trip", [file], {})
    opened = open_table(uri)
    assert opened is not None
    read = parquet_frame(spark, uri, opened.files, opened.schema).orderBy("row").toArrow()
    for name in held:
        (schema, _), column = wrote[int(name[1:])], payloads[int(name[1:])]
        values = read.column(name).combine_chunks().slice(0, len(column))
        encoded = make_encoder("avro", json.dumps(schema), 1).encode(values)
        assert encoded.bad == ()
        # Null itself has no other form than no record.
        assert encoded.payloads.drop_null().equals(column.filter(values.is_valid())), schema
        assert values.null_count == 0 or _may_be_null(schema), schema


def _may_be_null(schema: Any) -> bool:
    return schema == "null" or (isinstance(schema, list) and "null" in schema)
