"""Reports of runs: the metadata of each range of a run, and an event for each other range that the run reached.

The metadata of a range are its offsets, rows and schema. They come from the range's extent in a raw table, in a
staging table or in a topic. The output of a view reports its tables' state, and what a batch emitted, too. A report reads the
log, footers, single columns and single records, without a JVM.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
from dagster import (
    AssetKey,
    AssetMaterialization,
    MetadataValue,
    OutputContext,
    TableColumn,
    TableColumnConstraints,
    TableSchema,
)

from zync_assets.assets.names import add_keys, run_keys
from zync_assets.checks.raw_checks import raw_time
from zync_assets.errors import EtlError, LakeError, RangeUnknown
from zync_assets.etl.views.state import state_files
from zync_assets.etl.views.tables import table_of
from zync_assets.kafka.topics import TopicState, topic_states
from zync_assets.lake import storage
from zync_assets.lake.log import DataFile
from zync_assets.lake.parquet_rows import rows_at
from zync_assets.lake.raw import RawState, is_replay, raw_files
from zync_assets.lake.snapshot import Snapshot
from zync_assets.lake.staging import StagingState, key_column, value_column
from zync_assets.offsets import OffsetRange, format_key, key_of, keys_over
from zync_assets.pipeline import Pipeline, Rule
from zync_assets.sinks.plan import SinkPlan


@dataclass(frozen=True)
class Extent:
    """A key's range, and the processed part of the range.

    ``first`` and ``end``: the processed offsets are ``first <= offset < end``; equal before the first offset. ``rows``: the
    number of processed records, None if only a read of the records could count them. ``complete``: the range is full.
    """

    key: OffsetRange
    first: int
    end: int
    complete: bool
    rows: int | None

    @property
    def last(self) -> int | None:
        return self.end - 1 if self.end > self.first else None


def raw_extents(state: RawState, keys: Iterable[OffsetRange]) -> list[Extent]:
    """The extent of each key in the raw table. Counts records by files; LakeError if the log and the files disagree."""
    extents: list[Extent] = []
    files = raw_files(state)
    for key in sorted(keys):
        next_offset = state.next.get(key.partition, 0)
        low = max(state.first.get(key.partition, 0), state.retention_start.get(key.partition, 0))
        part = _clip(key, low, next_offset)
        rows = _count(state.table.uri, [item for item in files if item.meets([part])], part)
        extents.append(Extent(key, part.first, part.end, next_offset >= key.end, rows))
    return extents


def staging_extents(state: StagingState | None, topic: str, keys: Iterable[OffsetRange]) -> list[Extent]:
    """The extent of each key of an output topic in the staging table. LakeError for a gap in the offsets."""
    extents: list[Extent] = []
    files = state.output_files(topic) if state else []
    for key in sorted(keys):
        position = state.head.outputs.get((topic, key.partition)) if state else None
        if state is None or position is None:
            extents.append(Extent(key, key.first, key.first, False, 0))
            continue
        part = _clip(key, position.base, position.next)
        own_files = [item for item in files if item.meets([part])]
        rows = _count(state.table.uri, own_files, part)
        if rows != part.end - part.first:
            raise LakeError(
                f"table {state.table.uri}: {topic}, range {format_key(key)} holds {rows} records where offsets"
                f" {part.first} to {part.end - 1} are numbered. Restore the table to a version before that was so."
            )
        extents.append(Extent(key, part.first, part.end, position.next >= key.end, rows))
    return extents


def topic_extents(
    state: TopicState, keys: Iterable[OffsetRange], staging_ranges: Mapping[int, OffsetRange] | None = None
) -> list[Extent]:
    """The extent of each key in a topic.

    ``staging_ranges``: for an output topic, partition → the offsets at which the topic's records equal staging's. Other records
    in the topic are foreign. The published offsets have no gaps, and so give the number of records.
    """
    places = {item.partition: item for item in state.partitions}
    extents: list[Extent] = []
    for key in sorted(keys):
        place = places.get(key.partition)
        staging_range = staging_ranges.get(key.partition) if staging_ranges is not None else None
        if place is None or (staging_ranges is not None and staging_range is None):
            extents.append(Extent(key, key.first, key.first, False, None if staging_ranges is None else 0))
            continue
        low, end = (
            (max(place.low, staging_range.first), min(place.end, staging_range.end))
            if staging_range
            else (place.low, place.end)
        )
        part = _clip(key, low, end)
        extents.append(
            Extent(key, part.first, part.end, end >= key.end, part.end - part.first if staging_range else None)
        )
    return extents


def sink_extents(plan: SinkPlan, keys: Iterable[OffsetRange]) -> list[Extent]:
    """The extent of each key in a target table. The number of rows is not known: the records of a key are one row."""
    extents: list[Extent] = []
    for key in sorted(keys):
        start = plan.starts.get(key.partition, key.first)
        next_offset = plan.progress.next.get(key.partition, start)
        part = _clip(key, start, next_offset)
        extents.append(Extent(key, part.first, part.end, next_offset >= key.end, None))
    return extents


def staging_schema(state: StagingState, topic: str) -> pa.Schema:
    """The columns of ``Pool.Topic``, as ``zync query`` has them: ``key`` and ``value`` are the topic's own."""
    names = {
        "kafka": "kafka",
        key_column(topic): "key",
        value_column(topic): "value",
        "rule": "rule",
        "source": "source",
    }
    schema = state.schema
    return pa.schema([schema.field(name).with_name(alias) for name, alias in names.items() if name in schema.names])


def topic_schema(state: StagingState, topic: str) -> pa.Schema:
    """The columns of an output topic: of its records, not of the staging rows that they are made of."""
    schema = staging_schema(state, topic)
    return pa.schema([field for field in schema if field.name in ("key", "value")])


def _clip(key: OffsetRange, first: int, end: int) -> OffsetRange:
    low = min(max(key.first, first), key.end)
    return OffsetRange(key.partition, low, max(low, min(key.end, end)))


def _count(uri: str, files: Sequence[DataFile], part: OffsetRange) -> int:
    """The records of a range. Every file must be there, whole; those that reach past the range are looked into."""
    if part.empty:
        return 0
    # A replay's file lies between the offsets of others.
    for previous_file, next_file in pairwise([item for item in files if not is_replay(item)]):
        if (next_file.first or 0) <= (previous_file.last or 0):
            raise LakeError(
                f"table {uri}: the files {previous_file.path} and {next_file.path} share offsets of partition {part.partition}:"
                " records are there twice. Restore the table to a version before that was so."
            )
    total = 0
    for item in files:
        place = storage.join(uri, item.path)
        if storage.file_size(place) != item.size:
            raise LakeError(f"file {place} is not as long as the table says; it was changed. Restore it.")
        inside = (item.first or 0) >= part.first and (item.last or 0) < part.end
        total += item.records if inside else _count_inside(place, part)
    return total


def _count_inside(place: str, part: OffsetRange) -> int:
    offsets = storage.read_file(place, ["kafka.offset"]).flatten()["kafka.offset"].to_numpy()
    return int(((offsets >= part.first) & (offsets < part.end)).sum())


Metadata = dict[str, Any]

LAST_OFFSET = "last_offset"


def last_offset(event: AssetMaterialization) -> int | None:
    """The last offset in an event's metadata; None for an empty range. Older versions called the offset ``last``."""
    entry = event.metadata.get(LAST_OFFSET, event.metadata.get("last"))
    return entry.value if entry is not None and isinstance(entry.value, int) else None


def of_extent(extent: Extent, schema: pa.Schema | None = None) -> Metadata:
    """The metadata of one key. An empty range has no last offset. A range with an unknown number of rows has no ``rows``."""
    metadata: Metadata = {
        "first_offset": extent.first,
        "complete": extent.complete,
        "time": MetadataValue.timestamp(time.time()),
    }
    if extent.last is not None:
        metadata[LAST_OFFSET] = extent.last
    if extent.rows is not None:
        metadata["rows"] = extent.rows
        metadata["dagster/partition_row_count"] = extent.rows
    if schema is not None:
        metadata["dagster/column_schema"] = column_schema(schema)
    return metadata


def column_schema(schema: pa.Schema) -> TableSchema:
    """An Arrow schema as Dagster shows one."""
    return TableSchema(
        columns=[
            TableColumn(item.name, str(item.type), constraints=TableColumnConstraints(nullable=item.nullable))
            for item in schema
        ]
    )


def materialization(key: AssetKey, extent: Extent, schema: pa.Schema | None = None) -> AssetMaterialization:
    """The materialisation event of one key, for work that was done outside the reporting run."""
    return AssetMaterialization(key, partition=format_key(extent.key), metadata=of_extent(extent, schema))


PENDING = "pending"
"""Metadata of a staging topic's ranges: the input records of the whole pool that wait for their counterparts now."""
INPUT_RANGES = "consumed"
"""Metadata of a staging topic's ranges: the input offsets that the run's ETL batch took, as JSON (topic → keys)."""


def report_raw(snapshot: Snapshot, context: OutputContext, topic: str, ranges: Iterable[OffsetRange]) -> None:
    """Report a raw table's ranges, verified. ``snapshot``: after the run's commits; ``ranges``: the committed offsets."""
    state = snapshot.raw(topic)
    if state is None:
        raise LakeError(f"{snapshot.pipeline.input(topic).pool}.{topic} has no table after its ingest")
    own_keys, other_keys = _keys(context, ranges)
    _report(context, raw_extents(state, own_keys), raw_extents(state, other_keys), state.schema)


def report_staging(snapshot: Snapshot, context: OutputContext, topic: str, ranges: Iterable[OffsetRange]) -> None:
    """Report an output topic's ranges in its staging pool, verified. ``snapshot``: after the run's commit; ``ranges``: the
    offsets that this run numbered."""
    pool = snapshot.pipeline.output(topic).pool
    state = snapshot.staging(pool)
    parts = list(ranges)
    own_keys, other_keys = _keys(context, parts)
    refuse_ahead(pool, state, own_keys)
    counts = state.head.counts if state else {}
    pending_count = sum(n for (_, _, kind), n in counts.items() if kind == PENDING)
    context.add_output_metadata({PENDING: pending_count, **_batch_metadata(snapshot, topic, parts)})
    schema = staging_schema(state, topic) if state else None
    _report(context, staging_extents(state, topic, own_keys), staging_extents(state, topic, other_keys), schema)


def report_topic(snapshot: Snapshot, context: OutputContext, topic: str, ranges: Iterable[OffsetRange]) -> None:
    """Report an output topic's ranges. ``snapshot``: after the run's commits; ``ranges``: the published offsets."""
    topic_state = topic_states(snapshot.pipeline.kafka, [topic]).get(topic)
    pool = snapshot.pipeline.output(topic).pool
    state = snapshot.staging(pool)
    own_keys, other_keys = _keys(context, ranges)
    schema = topic_schema(state, topic) if state else None
    if topic_state is None:
        _report(context, [Extent(key, key.first, key.first, False, 0) for key in own_keys], [], schema)
        return
    verified = snapshot.verified_parts(pool, topic)
    staging_ranges = {
        partition: OffsetRange(partition, min(position.base, verified[partition]), verified[partition])
        for partition, position in (state.head.positions(topic) if state else {}).items()
        if partition in verified
    }
    _report(
        context,
        topic_extents(topic_state, own_keys, staging_ranges),
        topic_extents(topic_state, other_keys, staging_ranges),
        schema,
    )


def report_table(context: OutputContext, plan: SinkPlan, ranges: Iterable[OffsetRange]) -> None:
    """Report the ranges of a target table. ``plan``: after the run's commits; ``ranges``: the written offsets.

    EtlError for a range that lies ahead of the target's position.
    """
    own_keys, other_keys = _keys(context, ranges)
    for key in own_keys:
        next_offset = plan.progress.next.get(key.partition, plan.starts.get(key.partition, 0))
        if key.first > next_offset:
            raise EtlError(
                f"{plan.sink.name}/{plan.table.name}, range {format_key(key)} lies ahead of the next offset {next_offset} of"
                f" partition {key.partition}. Run {format_key(key_of(key.partition, next_offset))} instead."
            )
    _report(context, sink_extents(plan, own_keys), sink_extents(plan, other_keys), None)


def _keys(context: OutputContext, ranges: Iterable[OffsetRange]) -> tuple[list[OffsetRange], list[OffsetRange]]:
    """The run's keys, and the other keys that ``ranges`` overlap."""
    own_keys = run_keys(context.asset_partition_keys, context.asset_key.to_user_string())
    return own_keys, sorted(set(keys_over(ranges)) - set(own_keys))


def _report(
    context: OutputContext, own_extents: Sequence[Extent], other_extents: Sequence[Extent], schema: pa.Schema | None
) -> None:
    for extent in own_extents:
        context.step_context.add_asset_metadata(
            of_extent(extent, schema), asset_key=context.asset_key, partition_key=format_key(extent.key)
        )
    if other_extents:
        name = context.asset_partitions_def.name  # type: ignore[attr-defined]
        add_keys(context.step_context.instance, name, [extent.key for extent in other_extents])
    for extent in other_extents:
        context.log_event(materialization(context.asset_key, extent, schema))


def refuse_partitions(pool: str, state: StagingState | None, keys: Iterable[OffsetRange]) -> None:
    """RangeUnknown for a range of a partition that no output topic of the pool has."""
    partitions = sorted({0, *(partition for _, partition in state.head.outputs)} if state else {0})
    for key in keys:
        if key.partition not in partitions:
            have = "partition 0 alone" if partitions == [0] else f"partitions 0 to {partitions[-1]}"
            raise RangeUnknown(
                f"pool {pool} has no range {format_key(key)}: outputs have {have}. Run"
                f" {format_key(replace(key, partition=0))} instead, and delete the partition {format_key(key)} in Dagster."
            )


def refuse_ahead(pool: str, state: StagingState | None, keys: Iterable[OffsetRange]) -> None:
    """EtlError for a range that no output topic of the pool has reached.

    The run's ETL batch may have been committed before this error. A second run of the range does no harm.
    """
    outputs = state.head.outputs if state else {}
    for key in keys:
        end = max((item.next for (_, partition), item in outputs.items() if partition == key.partition), default=0)
        if key.first > end:
            raise EtlError(
                f"pool {pool}, range {format_key(key)} lies ahead of the next offset: outputs end before {end}."
                f" Run {format_key(key_of(key.partition, end))} instead."
            )


def table_rules(pipeline: Pipeline, topic: str) -> list[Rule]:
    """The rules of an output that read tables."""
    return [rule for rule in pipeline.rules if rule.out == topic and rule.tables]


def _batch_metadata(snapshot: Snapshot, topic: str, ranges: Iterable[OffsetRange]) -> Metadata:
    """The state of an output's tables, what a batch emitted, and the time of the last change at the source.

    ``ranges``: the output offsets of the batch. ``state_bytes``: of the files, compressed.
    """
    pipeline = snapshot.pipeline
    rules, state = table_rules(pipeline, topic), snapshot.staging(pipeline.output(topic).pool)
    if not rules or state is None:
        return {}
    tables = {table_of(item).name: table_of(item) for rule in rules for item in rule.tables}
    files = [state_files(state, table) for table in tables.values()]
    upserts, tombstones = _emission_counts(state, topic, ranges)
    metadata: Metadata = {
        "state_rows": sum(table_files.records for table_files in files),
        "state_bytes": sum(item.size for table_files in files for item in table_files.all),
        "upserts": upserts,
        "tombstones": tombstones,
    }
    change_time = _last_change(snapshot, state, topic)
    if change_time is not None:
        metadata["last_change"] = MetadataValue.timestamp(change_time)
        metadata["seconds_since_last_change"] = round(max(0.0, time.time() - change_time), 1)
    return metadata


def _emission_counts(state: StagingState, topic: str, ranges: Iterable[OffsetRange]) -> tuple[int, int]:
    """The upserts and the tombstones at some output offsets."""
    name, counts = value_column(topic), [0, 0]
    leaf = next(_leaves(state.schema.field(name))) if name in state.schema.names else None
    for part in ranges:
        for item in state.output_files(topic):
            if not item.meets([part]):
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
    times = [raw_time(snapshot, place["topic"], place["partition"], place["offset"]) for place in sources]
    return max((moment for moment in times if moment is not None), default=None)
