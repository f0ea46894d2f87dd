"""The commit half of ingest: files, quarantine and next offsets, once."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from zync_assets.crashes import crash_point
from zync_assets.errors import CommitConflict, DataLoss, KafkaError, TopicMissing
from zync_assets.ingest import source
from zync_assets.ingest.files import (
    BatchFiles,
    RangeReading,
    added_fields,
    carry_times,
    own_writers,
    without_repeats,
    write_losses,
    write_plain,
)
from zync_assets.ingest.plan import LEADER_SECONDS, IngestPlan, RawBatch, now_millis, recreation_error, task_ranges
from zync_assets.ingest.shape import write_with_shape
from zync_assets.ingest.source import SchemaChange
from zync_assets.kafka.topics import commit_group_offsets, led_state
from zync_assets.lake import compaction, quarantine_table, raw, storage, tables
from zync_assets.lake.log import DataFile, Order
from zync_assets.lake.parquet_rows import rows_at
from zync_assets.lake.quarantine_table import QuarantinedRecord, admit
from zync_assets.lake.raw import ORDER, RawAdvance, WriterSchema
from zync_assets.lake.raw_files import ORDER_TYPE, highest_times, raw_schema
from zync_assets.offsets import OffsetRange, offset_count
from zync_assets.pipeline import Pipeline
from zync_assets.upkeep import apply_retention, keep_up

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RawCommit:
    """The result of one ingest commit. ``until``: partition → its next offset after the commit."""

    topic: str
    ranges: tuple[OffsetRange, ...]
    records: int
    quarantined: int
    until: Mapping[int, int]
    added_fields: tuple[str, ...]
    schema_changes: tuple[SchemaChange, ...]
    seconds: float
    left_out: int = 0
    """Records that the input's shape left out."""
    lost_offsets: int = 0
    """Offsets that retention removed before they were ingested. They are in no quarantine."""
    repeats: int = 0
    """Records that repeat a change, because the connector sent the change again. They are left out."""


def commit_raw(pipeline: Pipeline, batch: RawBatch) -> RawCommit:
    """The commit half: read the batch, and commit its records with the next offsets (design.md, section 3).

    Nothing of the batch is visible after an error. Raises CommitConflict if another writer committed first, SchemaChanged if
    the pipeline file accepts no new schema, and BadRecords if the file accepts no undecodable records.
    """
    start = time.monotonic()
    plan, item = batch.plan, batch.plan.input
    reading = _reading(pipeline, batch)
    with storage.uncommitted(reading.uri, reading.side_uri, prefix=reading.file_prefix):
        # 1. Read, decode and write. No commit names the files yet, so that a kill leaves nothing visible.
        try:
            files = write_plain(reading) if item.shape is None else write_with_shape(pipeline, reading)
        except DataLoss:
            # A recreated topic also lacks records. A pipeline file that accepts a loss to retention does not accept this case.
            _check_identity(pipeline, plan)
            raise
        # 2. Compare the topic with the topic of the plan: another topic of the same name has other records.
        _check_identity(pipeline, plan)
        # 3. Carry the times and orders from task to task. Leave out the changes that the connector sent again.
        files, times, orders = carry_times(reading, files)
        files = without_repeats(reading, files, plan.state)
        lost_files = write_losses(reading, plan.losses)
        crash_point("ingest:files-written")
        # 4. Decide on new writer schemas and on bad records, as the pipeline file says.
        writers, changes = source.schema_changes(item, files.source, files.new_schemas)
        schema = _table_schema(plan, files, writers)
        _admit(pipeline, plan, files.bad)
    # 5. Commit quarantine and dropped ranges to the side table. The entries count from step 6 on.
    side_files = [*files.bad, *lost_files, *files.dropped]
    uri = storage.raw_uri(pipeline.lake, item.pool, item.topic)
    quarantine_table.add(
        pipeline.lake, item.pool, item.topic, plan.state, side_files, lambda: _check_next(pipeline.lake, plan)
    )
    if side_files:
        crash_point("ingest:quarantine-written")
    # 6. Commit the files and the next offsets on the table as the plan opened it. The loser of a race gets a conflict.
    advance = _advance(plan, reading, files, lost_files, schema, writers, times)
    advance = _with_order(pipeline, plan, files, advance, orders)
    try:
        raw.commit_advance(uri, plan.state, advance)
    except CommitConflict:
        quarantine_table.withdraw(pipeline.lake, item.pool, item.topic, side_files)
        raise
    # 7. Show the progress in Kafka, and look after the tables. A failure here does not undo the commit.
    until = {**(plan.state.next if plan.state else {}), **advance.next}
    _show_progress(pipeline, item.topic, until)
    keep_up(batch.spark, plan.state.table if plan.state else None, item.retention_ms)
    if side_files:
        side = storage.quarantine_uri(pipeline.lake, item.pool, item.topic)
        with compaction.log_failures(side):
            compaction.tidy(tables.open_table(side))
    apply_retention(pipeline, item, plan.state)
    return RawCommit(
        item.topic,
        plan.ranges,
        sum(file.records for file in files.files),
        sum(file.records for file in files.bad),
        until,
        tuple(added_fields(reading.table, schema)) if plan.state else (),
        changes,
        time.monotonic() - start,
        sum(files.left_out.values()) - files.repeats,
        offset_count(plan.losses),
        files.repeats,
    )


def _reading(pipeline: Pipeline, batch: RawBatch) -> RangeReading:
    plan = batch.plan
    table = plan.state.schema if plan.state else raw_schema(pa.null(), pa.null())
    parts, times = task_ranges(batch.spark, plan), highest_times(plan.state)
    orders = plan.state.orders if plan.state and plan.state.has_order else None
    attempt, now = quarantine_table.new_attempt(), now_millis()
    return RangeReading(batch.spark, pipeline.lake, plan.input, batch.source, parts, now, table, attempt, times, orders)


def _table_schema(plan: IngestPlan, files: BatchFiles, writers: Sequence[WriterSchema]) -> pa.Schema:
    """The raw table's columns after the batch, with the notes of Kafka Connect and the writers that lack a field."""
    schema = source.with_side_notes(files.schema, plan.state.schema if plan.state else None, files.notes)
    return source.with_lacking_fields(schema, files.source, plan.state, own_writers(plan.input, writers))


def _advance(
    plan: IngestPlan,
    reading: RangeReading,
    files: BatchFiles,
    lost_files: Sequence[DataFile],
    schema: pa.Schema,
    writers: Sequence[WriterSchema],
    times: Mapping[int, int],
) -> RawAdvance:
    next_offsets = plan.state.next if plan.state else {}
    ends = {**plan.first, **{part.partition: part.end for part in (*plan.losses, *plan.ranges)}}
    bad_counts = Counter[int]()
    for file in (*files.bad, *lost_files):
        bad_counts[file.partition or 0] += file.records
    return RawAdvance(
        plan.input.topic,
        plan.topic_state.topic_id,
        schema,
        files.files,
        plan.first,
        {partition: end for partition, end in ends.items() if next_offsets.get(partition) != end},
        bad=bad_counts,
        left_out=files.left_out,
        attempts={file.partition or 0: reading.attempt for file in (*files.bad, *lost_files, *files.dropped)},
        times=times,
        marks=files.marks,
        writers=writers,
    )


def _with_order(
    pipeline: Pipeline, plan: IngestPlan, files: BatchFiles, advance: RawAdvance, orders: Mapping[int, Order]
) -> RawAdvance:
    """The advance of a table with a source order: its column, its orders and its domain. Other advances stay as they are."""
    table_domain = plan.state.domain if plan.state else None
    rule = plan.input.order
    if rule is not None and rule.time:
        domain = None
    elif not orders:
        domain = table_domain
    else:
        domain = (
            (rule.domain if rule else None) or table_domain or (files.domain if not rule or rule.by is None else None)
        )
        domain = domain or pipeline.name
    if orders:
        advance = replace(advance, schema=advance.schema.append(pa.field(ORDER, ORDER_TYPE)), orders=orders)
    return replace(advance, domain=domain)


def _check_next(lake: str, plan: IngestPlan) -> None:
    """CommitConflict if the table's next offsets are no longer those of the plan."""
    now = raw.open_raw(lake, plan.input.pool, plan.input.topic)
    if (now.next if now else {}) != (plan.state.next if plan.state else {}):
        uri = storage.raw_uri(lake, plan.input.pool, plan.input.topic)
        raise CommitConflict(f"table {uri}: another writer committed first; run again")


def _show_progress(pipeline: Pipeline, topic: str, until: Mapping[int, int]) -> None:
    """Tell Kafka's own tools the next offsets. No step reads them: the lake alone holds the progress of ingest."""
    if pipeline.consumer_group is None:
        return
    try:
        commit_group_offsets(pipeline.kafka, pipeline.consumer_group, topic, until)
    except KafkaError as error:
        _log.warning("the lag that Kafka shows for %s is out of date, and nothing else: %s", topic, error)


def _admit(pipeline: Pipeline, plan: IngestPlan, bad_files: Sequence[DataFile]) -> None:
    """BadRecords if the pipeline file does not accept the undecodable records. ``bad_files``: these records' files, not yet
    committed."""
    item = plan.input
    if item.on_bad_record == "quarantine" and item.max_bad_records is None:
        return
    if not bad_files:
        return
    lowest = min(bad_files, key=lambda file: (file.partition or 0, file.first or 0))
    place = (lowest.partition or 0, lowest.first or 0)
    uri = storage.quarantine_uri(pipeline.lake, item.pool, item.topic)
    row = rows_at(uri, [lowest], place[0], [place[1]], ["stage", "error"])[place[1]]
    first = QuarantinedRecord(
        item.pool, item.topic, *place, row["stage"], None, f"{row['stage']}: {row['error']}", None, False
    )
    admit(pipeline, item, plan.state, sum(file.records for file in bad_files), first, "ingest")


def _check_identity(pipeline: Pipeline, plan: IngestPlan) -> None:
    """TopicRecreated if the topic is another topic than the topic of the plan. Offsets alone can't show this: the new topic
    may have as many records."""
    topic = plan.input.topic
    state = led_state(pipeline.kafka, topic, LEADER_SECONDS)
    if state is None:
        raise TopicMissing(f"topic {topic} went away while it was read; nothing of the batch was committed.")
    if state.topic_id != plan.topic_state.topic_id:
        raise recreation_error(plan.input, state)
