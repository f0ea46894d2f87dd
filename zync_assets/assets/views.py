"""Metadata of the asset of a view's output: the view's SQL and tables, the size of its state, and the outputs of a batch.

The numbers come from the log, from a column of the batch's files and from one raw record, without a JVM.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from dagster import MetadataValue

from zync_assets.etl.rules import explain_rules
from zync_assets.etl.views.state import state_files
from zync_assets.etl.views.tables import table_of
from zync_assets.lake import storage
from zync_assets.lake.parquet_rows import rows_at
from zync_assets.lake.raw import raw_files
from zync_assets.lake.snapshot import Snapshot
from zync_assets.lake.staging import StagingState, value_column
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Pipeline, Rule

Metadata = dict[str, Any]

SQL, TABLES = "sql", "tables"
STATE_ROWS, STATE_BYTES, UPSERTS, TOMBSTONES = "state_rows", "state_bytes", "upserts", "tombstones"
LAST_CHANGE, IDLE_SECONDS = "last_change", "seconds_since_last_change"


def definition_metadata(pipeline: Pipeline, topic: str) -> Metadata:
    """The SQL of the rules of an output that read tables, and their tables; nothing for an output without such a rule."""
    rules = _rules(pipeline, topic)
    if not rules:
        return {}
    names = {rule.name for rule in rules}
    texts = [item.sql for item in explain_rules(pipeline) if item.name in names and item.kind in ("rule", "plan")]
    tables = dict.fromkeys(f"{table.alias}: {table.topic}" for rule in rules for table in rule.tables)
    return {SQL: MetadataValue.md(_code("\n\n".join(texts))), TABLES: ", ".join(tables)}


def batch_metadata(snapshot: Snapshot, topic: str, ranges: Iterable[OffsetRange]) -> Metadata:
    """The state of an output's tables, what a batch emitted, and the time of the last change at the source.

    ``ranges``: the output offsets of the batch. ``state_bytes``: of the files, compressed.
    """
    pipeline = snapshot.pipeline
    rules, state = _rules(pipeline, topic), snapshot.staging(pipeline.output(topic).pool)
    if not rules or state is None:
        return {}
    tables = {table_of(item).name: table_of(item) for rule in rules for item in rule.tables}
    files = [state_files(state, table) for table in tables.values()]
    upserts, tombstones = _emission_counts(state, topic, ranges)
    metadata: Metadata = {
        STATE_ROWS: sum(table_files.records for table_files in files),
        STATE_BYTES: sum(item.size for table_files in files for item in table_files.all),
        UPSERTS: upserts,
        TOMBSTONES: tombstones,
    }
    change_time = _last_change(snapshot, state, topic)
    if change_time is not None:
        metadata[LAST_CHANGE] = MetadataValue.timestamp(change_time)
        metadata[IDLE_SECONDS] = round(max(0.0, time.time() - change_time), 1)
    return metadata


def _rules(pipeline: Pipeline, topic: str) -> list[Rule]:
    return [rule for rule in pipeline.rules if rule.out == topic and rule.tables]


def _code(sql: str) -> str:
    """A block of code in Markdown."""
    return f"```sql\n{sql}\n```"


def _emission_counts(state: StagingState, topic: str, ranges: Iterable[OffsetRange]) -> tuple[int, int]:
    """The upserts and the tombstones at some output offsets."""
    name, counts = value_column(topic), [0, 0]
    leaf = next(_leaves(state.schema.field(name))) if name in state.schema.names else None
    for part in ranges:
        for item in state.output_files(topic):
            if item.partition != part.partition or (item.first or 0) >= part.end or (item.last or 0) < part.first:
                continue
            columns = ["kafka.offset", *([] if leaf is None else [leaf])]
            table = storage.read_file(state.uri(item), columns)
            offsets = table["kafka"].combine_chunks().field("offset").to_numpy()
            inside = (offsets >= part.first) & (offsets < part.end)
            upserts = table[name].is_valid().to_numpy()[inside].sum() if name in table.column_names else 0
            counts[0] += int(upserts)
            counts[1] += int(inside.sum()) - int(upserts)
    return counts[0], counts[1]


def _leaves(item: pa.Field) -> Iterator[str]:
    """The dotted paths of a column's plain fields; of another column, its name."""
    if pa.types.is_struct(item.type):
        for at in range(item.type.num_fields):
            inner = item.type.field(at)
            yield from (f"{item.name}.{path}" for path in _leaves(inner))
    else:
        yield item.name


def _last_change(snapshot: Snapshot, state: StagingState, topic: str) -> float | None:
    """The time of the latest raw record that changed the output, in seconds since the epoch; None if it is not there any more."""
    sources: list[dict[str, Any]] = []
    for partition, position in state.head.positions(topic).items():
        last_offset = position.next - 1
        if last_offset >= position.base:
            row = rows_at(state.table.uri, state.output_files(topic), partition, [last_offset], ["source"]).get(
                last_offset, {}
            )
            sources += row.get("source") or ()
    times: list[float] = []
    for place in sources:
        is_input = any(item.topic == place["topic"] for item in snapshot.pipeline.inputs)
        raw = snapshot.raw(place["topic"]) if is_input else None
        if raw is not None:
            files = raw_files(raw, [OffsetRange(place["partition"], place["offset"], place["offset"] + 1)])
            record = rows_at(raw.table.uri, files, place["partition"], [place["offset"]], []).get(place["offset"])
            times += [record["kafka"]["time"].timestamp()] if record else []
    return max(times, default=None)
