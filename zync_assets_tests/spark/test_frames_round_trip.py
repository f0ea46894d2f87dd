"""Random Avro schemas and data through Delta files and Spark, and back to the bytes that they came from.

One run has many schemas, with a column for each schema, so that Spark runs only two jobs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zync_assets.codecs.dispatch import make_decoder, make_encoder
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw import RawAdvance, commit_advance, open_raw, raw_files
from zync_assets.lake.storage import file_size, raw_uri
from zync_assets.lake.tables import create_table, open_table
from zync_assets.pipeline import SideFormat
from zync_assets.spark.frames import parquet_frame, raw_frame
from zync_assets_tests.codecs.generated import Kind, datums, framed, kinds, recursive_kinds
from zync_assets_tests.lake.rows import SCHEMA, file, records

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


def test_a_carried_time_is_exact_to_the_microsecond_after_2038_and_found_among_many_files(
    spark: SparkSession, tmp_path: Path
) -> None:
    """As older versions wrote files: with a maximum within each alone. In seconds as a double such a time is another one."""
    late, lake = 177_073_514_769_771, str(tmp_path)
    uri = raw_uri(lake, "Raw", "t")
    files = [
        file(uri, records([0, 1], [5, late])),
        *(file(uri, records([at, at + 5000], [7, 9])) for at in (10, 9000, 90_000)),
    ]
    files += [file(uri, records([3], [6], partition=1)), file(uri, records([4, 5], [late + 1, late + 2], partition=1))]
    commit_advance(uri, None, RawAdvance("t", "id", SCHEMA, files, {0: 0, 1: 0}, {0: 100_000, 1: 6}))
    state = open_raw(lake, "Raw", "t")
    assert state is not None
    found = raw_frame(spark, state, raw_files(state)).selectExpr(
        "kafka.partition AS p", "kafka.offset AS o", "unix_micros(kafka.time) AS t", "value.id AS id"
    )
    rows = sorted(found.collect())
    assert [(row.p, row.o, row.t) for row in rows] == [
        (0, 0, 5000),
        (0, 1, late * 1000),
        *((0, at, late * 1000) for at in (10, 5010, 9000, 14_000, 90_000, 95_000)),
        (1, 3, 6000),
        (1, 4, (late + 1) * 1000),
        (1, 5, (late + 2) * 1000),
    ]
    assert [row.id for row in rows] == [row.o for row in rows]
