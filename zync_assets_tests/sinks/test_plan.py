"""A Spark task that reads files by itself gets the same rows as Spark SQL. A column that no target can have is an error."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from zync_assets.errors import LakeError, SinkError
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Sink, SinkTable
from zync_assets.sinks.columns import IS_DELETE, OFFSET, PARTITION
from zync_assets.sinks.commit import in_tasks
from zync_assets.sinks.plan import layout, plain_source, plan_sink, source_frame
from zync_assets_tests.bench.data import append_raw, texts
from zync_assets_tests.lake.test_sequence import append
from zync_assets_tests.pipeline_file.problems import loaded

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEXT = """\
kafka: {bootstrap.servers: localhost}
lake: ./lake
unavailable-value: null
inputs:
  - {topic: rows, pool: Raw, key-format: string, value-format: json, schema: "id bigint"}
"""


def filled(folder: Path) -> None:
    """Three files. Each later one has wider types, and a further field."""
    types: list[list[tuple[str, pa.DataType]]] = [
        [("id", pa.int32()), ("n", pa.int64()), ("d", pa.decimal128(5, 2))],
        [("id", pa.int64()), ("n", pa.float64()), ("d", pa.decimal128(12, 4)), ("late", pa.list_(pa.string()))],
    ]
    for at, fields in enumerate((types[0], types[1], types[1])):
        numbers = np.arange(at * 10, at * 10 + 10)
        first = 0.5 if at else 2**53 + 1
        values: list[dict[str, Any] | None] = [
            None
            if number % 5 == 4
            else {
                "id": number,
                "n": first + number,
                "d": Decimal(number) / 4,
                "late": [str(number), None],
            }
            for number in numbers.tolist()
        ]
        kind = pa.struct(fields)
        rows = [None if row is None else {name: row[name] for name, _ in fields} for row in values]
        append_raw(
            f"{folder}/lake", "Raw", "rows", numbers, texts("k", numbers), pa.array(rows, kind), pa.array(numbers)
        )


@pytest.mark.parametrize("include", [None, ("late",), ("n",)])
@pytest.mark.parametrize(("first", "end"), [(0, 30), (3, 27), (12, 13)])
def test_a_task_reads_what_spark_reads(
    spark: SparkSession, tmp_path: Path, include: tuple[str, ...] | None, first: int, end: int
) -> None:
    filled(tmp_path)
    table = SinkTable("Raw", "rows", "rows", staged=False)
    plan = plan_sink(loaded(tmp_path, TEXT), Sink("all", "sqlite", f"sqlite:///{tmp_path}/it.db"), table)
    sink = Sink("all", "postgres", "postgresql://localhost/none", (table,), include=include)
    for mode, delete in (("insert", True), ("upsert", True), ("upsert", False)):
        part = replace(plan, sink=replace(sink, mode=mode, delete=delete), ranges=(OffsetRange(0, first, end),))
        whole = layout(part, lambda: spark)
        source = plain_source(part, whole)
        assert source is not None
        names = [*(f"c{number}" for number in range(len(whole.columns))), PARTITION, OFFSET, IS_DELETE]
        ours = pa.Table.from_batches(list(source.batches(whole))).select(names).to_pylist()
        frame = source_frame(spark, part, whole, part.ranges)
        found = in_tasks(frame, lambda batches: [row for batch in batches for row in batch.to_pylist()])
        theirs = sorted((row for rows in found for row in rows), key=lambda row: row[OFFSET])
        assert ours == [{name: row[name] for name in names} for row in theirs]


def test_the_error_of_a_type_that_no_target_has_names_the_column_and_the_cure(
    spark: SparkSession, tmp_path: Path
) -> None:
    filled(tmp_path)
    table = SinkTable("Raw", "rows", "shop_rows", staged=False)
    added = {"year": "2024", "wait": "kafka.time - kafka.time"}
    sink = Sink("house", "sqlite", f"sqlite:///{tmp_path}/it.db", (table,), "insert", added=added)
    plan = plan_sink(loaded(tmp_path, TEXT), sink, table)
    with pytest.raises(SinkError) as error:
        layout(plan, lambda: spark)
    cure = "wait: CAST(kafka.time - kafka.time AS STRING)"
    assert str(error.value) == (
        "sink house, table shop_rows: column wait is interval day to second, which targets do not have. Make it a text with"
        f" before: {{set: ...}}: {cure}."
    )
    cured = replace(sink, added={**added, "wait": cure.removeprefix("wait: ")})
    columns = {item.name: item.type for item in layout(replace(plan, sink=cured), lambda: spark).spec.columns}
    assert columns["wait"] == pa.string()


@pytest.mark.parametrize(
    ("kind", "name", "rename", "text"),
    [
        (
            "postgres",
            "t" * 64,
            {},
            f"the name {'t' * 64} of the table has 64 bytes, and the target takes 63 at the most.",
        ),
        ("postgres", "é" * 32, {}, f"the name {'é' * 32} of the table has 64 bytes"),
        ("postgres", f"{'s' * 64}.t", {}, f"the name {'s' * 64} of the table has 64 bytes"),
        ("postgres", f"{'s' * 63}.{'t' * 63}", {"n": "n" * 63}, None),
        ("postgres", "t", {"n": "n" * 64}, f"the name {'n' * 64} of the column has 64 bytes"),
        ("mysql", "t" * 65, {}, "of the table has 65 characters, and the target takes 64 at the most."),
        ("mysql", "é" * 64, {"n": "é" * 64}, None),
        ("mysql", "t", {"n": "é" * 65}, "of the column has 65 characters"),
        ("sqlite", "t" * 300, {"n": "n" * 300}, None),
    ],
)
def test_a_name_that_the_target_would_cut_is_refused(
    tmp_path: Path, kind: str, name: str, rename: dict[str, str], text: str | None
) -> None:
    filled(tmp_path)
    own = SinkTable("Raw", "rows", name, staged=False)
    plan = plan_sink(loaded(tmp_path, TEXT), Sink("all", "sqlite", f"sqlite:///{tmp_path}/it.db"), own)
    sink = Sink("house", kind, f"{kind}://localhost/none", (own,), rename=rename)
    found = ""
    try:
        layout(replace(plan, sink=sink), lambda: pytest.fail("a session is started"))
    except SinkError as error:
        found = str(error)
    if text is None:
        assert found == ""
    else:
        key = "columns: {rename: ...}" if rename else "table:"
        assert found.startswith("sink house, Raw.rows: ")
        assert text in found
        assert found.endswith(f"Give a shorter name with {key}.")


def test_a_raw_file_that_is_gone_stops_the_next_batch_and_hides_no_state(tmp_path: Path) -> None:
    times = [(offset, offset) for offset in range(15)]
    append(f"{tmp_path}/lake", {("rows", 0): times, ("rows", 1): times})
    text = TEXT + "sinks: [{name: shop, type: sqlite, url: shop.db, from: [Raw.rows], table: rows, key: [id]}]\n"
    pipeline = loaded(tmp_path, text)
    [sink] = pipeline.sinks
    folder = tmp_path / "lake/Raw/rows"
    for file in folder.glob("*.parquet"):
        file.unlink()
    with pytest.raises(
        LakeError, match=rf"file {folder}/.*\.parquet can't be read: .*No such file.* Restore it from a copy"
    ):
        plan_sink(pipeline, sink, sink.tables[0], 5)
    plan = plan_sink(pipeline, sink, sink.tables[0], 5, check=False)
    assert (plan.lag, plan.nothing_to_do) == (30, True)


def test_a_position_past_the_end_of_the_source_is_no_lag(tmp_path: Path) -> None:
    """A lake that came back from a copy. ``zync status`` shows the table, and the sink says what to do."""
    filled(tmp_path)
    sink = Sink("all", "sqlite", f"sqlite:///{tmp_path}/it.db")
    plan = plan_sink(loaded(tmp_path, TEXT), sink, SinkTable("Raw", "rows", "rows", staged=False))
    assert plan.lag == 30
    assert replace(plan, progress=replace(plan.progress, next={0: 31})).lag == 0
