"""ETL against a DuckDB script that does the same join, order, numbers and files, with no guarantee."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pyarrow as pa

from zync_assets import pipeline_file
from zync_assets.codecs.arrays import pc
from zync_assets.lake import raw, storage
from zync_assets.pipeline import Pipeline
from zync_assets.runner import etl_all
from zync_assets.spark.session import spark_session
from zync_assets_tests.bench.data import EPOCH, Known, append_raw, opened_raw, record, texts
from zync_assets_tests.bench.table import time_row
from zync_assets_tests.bench.world import TASKS, World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REST = """
inputs:
  - {topic: invoices, pool: Raw, key-format: string, value-format: avro}
  - {topic: statuses, pool: Raw, key-format: string, value-format: avro}
outputs:
  - {topic: new-invoices, pool: Staging, format: avro, create: {replication-factor: 1}}
transforms:
  - name: new-invoice
    type: denorm
    where: value.op IN ('c', 'r')
    left: invoices
    right: statuses
    join-on: left.value.id = right.value.invoice
    out: new-invoices
    key: {id: left.value.id}
    value: {id: left.value.id, customer: left.value.customer, item: left.value.item, status: right.value.status}
  - name: status-update
    type: stateless
    where: value.op = 'u'
    in: statuses
    out: new-invoices
    key: {id: in.value.invoice}
    value: {id: in.value.invoice, status: in.value.status}
  - name: invoice-delete
    type: stateless
    where: value.op = 'd'
    in: invoices
    out: new-invoices
    key: {id: in.value.id}
    value: null
"""


def append_invoices(
    pipeline: Pipeline,
    first: int,
    end: int,
    *,
    step: int = 1,
    paired: int = 1,
    orphan: bool = False,
    known: Known | None = None,
) -> int:
    """Raw records for the invoices ``first <= number < end``: a creation, its status, an update of it. How many records.

    ``step``: the distance of offsets; ``paired``: only every so-many-th status comes with its invoice, the others' lack
    one and wait; ``orphan``: an invoice that never gets a status comes first, at offset 0; ``known``: see ``append_raw``.
    """
    numbers = np.arange(first, end)
    invoices = numbers[numbers % paired == 0]
    lone = np.array([-1]) if orphan else np.array([], dtype=np.int64)
    keys = np.concatenate([lone, invoices])
    made = _append(pipeline, "invoices", invoices_of(keys), keys, step, known)
    records = np.arange(2 * first, 2 * end)
    return made + _append(pipeline, "statuses", statuses_of(records), records // 2, step, known)


INVOICE = record("Invoice", ("op", "string"), ("id", "long"), ("customer", "string"), ("item", "string"))
STATUS = record("Status", ("op", "string"), ("invoice", "long"), ("status", "string"))


def invoices_of(numbers: np.ndarray[Any, Any]) -> pa.Array:
    """Values of INVOICE: the creations of these invoices."""
    columns = [
        pa.array(["c"] * len(numbers)),
        pa.array(numbers, pa.int64()),
        texts("customer ", numbers % 10_007),
        texts("item ", numbers % 101),
    ]
    return pa.StructArray.from_arrays(columns, [field["name"] for field in INVOICE["fields"]])


def statuses_of(records: np.ndarray[Any, Any]) -> pa.Array:
    """Values of STATUS, two of each invoice: the creation of its status, and an update."""
    # pyarrow makes chunks of a large array of NumPy's texts.
    is_update = pa.array(records % 2 == 1)
    columns = [
        pc.if_else(is_update, "u", "c"),
        pa.array(records // 2, pa.int64()),
        pc.if_else(is_update, "paid", "new"),
    ]
    return pa.StructArray.from_arrays(columns, [field["name"] for field in STATUS["fields"]])


def _append(
    pipeline: Pipeline,
    topic: str,
    values: pa.Array,  # type: ignore[type-arg]
    numbers: np.ndarray,  # type: ignore[type-arg]
    step: int,
    known: Known | None,
) -> int:
    state = opened_raw(pipeline.lake, "Raw", topic, known)
    start = state.next[0] if state else 0
    offsets = start + np.arange(len(numbers)) * step
    times = pa.array(EPOCH + np.maximum(numbers, 0))
    append_raw(pipeline.lake, "Raw", topic, offsets, texts("k", numbers), values, times, known)
    return len(numbers)


def measure_etl(world: World) -> Iterator[dict[str, object]]:
    """600,000 and 4.5 million raw records: a third joined with a third, a third updates."""
    # The larger one first: one round of the smaller does not warm a JVM.
    for records, goal, first_goal in ((4_500_000, "≤ 2.5", "≤ 5"), (600_000, "≤ 2 s", "")):
        records = world.sized(records)
        pipeline = world.pipeline(f"etl-{records}", REST)
        world.empty(pipeline)
        append_invoices(pipeline, 0, records // 3)
        found = world.rounds.measure(
            f"etl, {records}",
            {
                "ours": lambda pipeline=pipeline, records=records: _ours(world, pipeline, records),
                "first": lambda pipeline=pipeline, records=records: _first(world, pipeline, records),
                "reference": lambda pipeline=pipeline, records=records: reference(world, pipeline, records),
            },
        )
        world.empty(pipeline)
        yield time_row("etl", f"{records:,} raw records", found["ours"], found["reference"], goal)
        work = f"{records:,} raw records, first of a session"
        yield time_row("etl", work, found["first"], found["reference"], first_goal)


def _ours(world: World, pipeline: Pipeline, records: int) -> float:
    world.empty(pipeline, "Staging")
    return etl_seconds(pipeline, world.spark(pipeline), records)


def _first(world: World, pipeline: Pipeline, records: int) -> float:
    world.empty(pipeline, "Staging")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(first_etl_seconds, pipeline.path, records).result()


def first_etl_seconds(path: Path, records: int) -> float:
    """Seconds of the first batch of a Spark session. The session runs, and has done a job."""
    pipeline = pipeline_file.load(path)
    spark = spark_session(pipeline.spark, pipeline.lake, long=True)
    spark.range(1).count()
    return etl_seconds(pipeline, spark, records)


def etl_seconds(pipeline: Pipeline, spark: SparkSession, records: int) -> float:
    """Seconds of one ETL of all ``records``, which must give an output for two of three."""
    started = time.monotonic()
    made = 0
    for commit in etl_all(pipeline, lambda: spark):
        made += sum(part.end - part.first for parts in commit.outputs.values() for part in parts)
    took = time.monotonic() - started
    assert made == records // 3 * 2
    return took


SCRIPT = """
COPY (
    SELECT row_number() OVER (ORDER BY "time", partition, "offset") - 1 AS number, *
    FROM (
        SELECT
            greatest(l.kafka.time, r.kafka.time) AS "time", l.kafka.partition AS partition, l.kafka.offset AS "offset",
            [{{'topic': l.kafka.topic, 'partition': l.kafka.partition, 'offset': l.kafka.offset}},
             {{'topic': r.kafka.topic, 'partition': r.kafka.partition, 'offset': r.kafka.offset}}] AS source,
            {{'id': l.value.id}} AS key,
            {{'id': l.value.id, 'customer': l.value.customer, 'item': l.value.item, 'status': r.value.status}} AS value
        FROM read_parquet({invoices}) l JOIN read_parquet({statuses}) r ON l.value.id = r.value.invoice
        WHERE l.value.op IN ('c', 'r') AND r.value.op IN ('c', 'r')
        UNION ALL
        SELECT
            kafka.time, kafka.partition, kafka.offset,
            [{{'topic': kafka.topic, 'partition': kafka.partition, 'offset': kafka.offset}}],
            {{'id': value.invoice}},
            {{'id': value.invoice, 'customer': NULL, 'item': NULL, 'status': value.status}}
        FROM read_parquet({statuses}) WHERE value.op = 'u'
        UNION ALL
        SELECT
            kafka.time, kafka.partition, kafka.offset,
            [{{'topic': kafka.topic, 'partition': kafka.partition, 'offset': kafka.offset}}],
            {{'id': value.id}}, NULL
        FROM read_parquet({invoices}) WHERE value.op = 'd'
    )
    ORDER BY number
) TO '{target}' (FORMAT parquet, COMPRESSION snappy)
"""


def reference(world: World, pipeline: Pipeline, records: int) -> float:
    """The script's seconds, in a database that is in memory."""
    target = world.folder / "duckdb.parquet"
    paths = {topic: _paths(pipeline, topic) for topic in ("invoices", "statuses")}
    with duckdb.connect(config={"threads": TASKS}) as database:
        started = time.monotonic()
        made = database.execute(SCRIPT.format(target=target, **paths)).fetchall()
        took = time.monotonic() - started
    assert made == [(records // 3 * 2,)]
    target.unlink()
    return took


def _paths(pipeline: Pipeline, topic: str) -> list[str]:
    state = raw.open_raw(pipeline.lake, "Raw", topic)
    assert state is not None
    return [str(Path(storage.join(state.table.uri, item.path))) for item in raw.raw_files(state)]
