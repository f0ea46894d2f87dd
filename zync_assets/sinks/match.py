"""The rows of a target table compared with the fold of all records that were written to it.

Spark folds the source by key, reads the table in one task, and joins both by key. A column that no record of a row has set is
not compared: the table's own default is in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa

from zync_assets.errors import SinkError
from zync_assets.offsets import OffsetRange
from zync_assets.sinks.columns import OFFSET, PARTITION, Layout
from zync_assets.sinks.commit import loaded
from zync_assets.sinks.fold import DELETE, OP, SET
from zync_assets.sinks.plan import SinkPlan, layout, source_frame
from zync_assets.sinks.target import TableSpec, Target
from zync_assets.spark.session import Session
from zync_assets.spark.tasks import spark_failures, task_frame

MOST = 10
"""Differences that are named."""


def differences(plan: SinkPlan, session: Session) -> list[str]:
    """The first rows, by key, that differ between the table and the fold of its source; at most MOST."""
    made, spark = layout(plan, session), session()
    ranges = tuple(
        OffsetRange(partition, min(plan.starts.get(partition, 0), upcoming), upcoming)
        for partition, upcoming in sorted(plan.progress.next.items())
    )
    frame = source_frame(spark, plan, made, ranges)
    for bad in plan.progress.bad:
        frame = frame.where(f"NOT ({PARTITION} = {bad.partition} AND {OFFSET} = {bad.offset})")
    frame = frame.repartition(*made.key_names).sortWithinPartitions(*made.key_names, PARTITION, OFFSET)
    with spark_failures(lambda text: SinkError(f"sink {plan.sink.name}, table {plan.table.name}: {text}")):
        ours = frame.mapInArrow(partial(_folded, made), "name string, wanted string, marks string")
        theirs = task_frame(spark, 1).mapInArrow(
            partial(_stored, plan.target(), made.spec), "name string, found string"
        )
        pairs = ours.join(theirs, "name", "full_outer")
        found = pairs.mapInArrow(partial(_compared, made.spec), "name string, text string")
        rows = found.orderBy("name").limit(MOST).collect()
    return [f"{row['name']}: {row['text']}" for row in rows]


def _folded(made: Layout, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows that the source makes: key, values, and which columns were set."""
    for batch in loaded(made, (batch for batch in batches if batch.num_rows)):
        rows = [row for row in batch.to_pylist() if row[OP] != DELETE]
        others = [column.name for column in made.spec.others]
        yield _batch(
            name=[_key(made.spec, row) for row in rows],
            wanted=[_values(made.spec, row) for row in rows],
            marks=[row[SET] or "1" * len(others) for row in rows],
        )


def _stored(target: Target, spec: TableSpec, _: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of the table."""
    for batch in target.rows(spec):
        rows = batch.to_pylist()
        yield _batch(name=[_key(spec, row) for row in rows], found=[_values(spec, row) for row in rows])


def _compared(spec: TableSpec, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        texts = {row["name"]: text for row in batch.to_pylist() if (text := _difference(spec, row)) is not None}
        yield _batch(name=list(texts), text=list(texts.values()))


def _difference(spec: TableSpec, row: dict[str, Any]) -> str | None:
    if row["found"] is None:
        return "the table lacks the row"
    if row["wanted"] is None:
        return "the source has no such row"
    pairs = zip(spec.others, json.loads(row["wanted"]), json.loads(row["found"]), row["marks"], strict=True)
    names = [column.name for column, wanted, found, mark in pairs if mark == "1" and wanted != found]
    return f"another value in {', '.join(names)}" if names else None


def _key(spec: TableSpec, row: dict[str, Any]) -> str:
    return ", ".join(f"{name}={row[name]!r}" for name in spec.key)


def _values(spec: TableSpec, row: dict[str, Any]) -> str:
    """The values outside the key, as texts that are equal where the values are."""
    values = (row[column.name] for column in spec.others)
    parts = zip(spec.others, values, strict=True)
    return json.dumps(
        [json.loads(item) if column.as_json and item is not None else repr(item) for column, item in parts]
    )


def _batch(**columns: list[str]) -> pa.RecordBatch:
    arrays = [pa.array(values, pa.string()) for values in columns.values()]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))
