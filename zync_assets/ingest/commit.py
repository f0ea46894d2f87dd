"""The commit half of ingest: files, quarantine and next offsets, once."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from zync_assets.crashes import crash_point
from zync_assets.errors import CommitConflict, DataLoss, KafkaError, TopicMissing
from zync_assets.ingest import source
from zync_assets.ingest.files import Reading, added_fields, with_carried_times, write_lost, write_plain
from zync_assets.ingest.plan import LEADER_SECONDS, IngestPlan, RawBatch, now_millis, recreated, task_ranges
from zync_assets.ingest.shape import write_shaped
from zync_assets.ingest.source import SchemaChange
from zync_assets.kafka.topics import commit_group_offsets, led_state
from zync_assets.lake import compaction, quarantine, raw, storage
from zync_assets.lake.log import DataFile
from zync_assets.lake.quarantine import Held, admit
from zync_assets.lake.raw_files import highest_times, raw_schema
from zync_assets.lake.rows import rows_at
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Pipeline
from zync_assets.upkeep import keep_short, keep_up

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


def commit_raw(pipeline: Pipeline, batch: RawBatch) -> RawCommit:
    """The commit half: run the batch, write its files, commit quarantine, then data with the next offsets.

    Nothing of the batch is visible after an error. Raises CommitConflict if another writer committed first, SchemaChanged if
    the pipeline file accepts no new schema, and BadRecords if the file accepts no undecodable records.
    """
    started = time.monotonic()
    plan, item = batch.plan, batch.plan.input
    lake, pool, topic = pipeline.lake, item.pool, item.topic
    known = plan.state.schema if plan.state else raw_schema(pa.null(), pa.null())
    attempt = quarantine.new_attempt()
    parts, reached = task_ranges(batch.spark, plan), highest_times(plan.state)
    reading = Reading(batch.spark, lake, item, batch.source, parts, now_millis(), known, attempt, reached)
    try:
        made = write_plain(reading) if item.shape is None else write_shaped(pipeline, reading)
    except DataLoss:
        # A recreated topic also lacks records. A pipeline file that accepts a loss to retention does not accept this case.
        _check_identity(pipeline, plan)
        raise
    _check_identity(pipeline, plan)
    made, reached = with_carried_times(reading, made)
    lost = write_lost(reading, plan.lost)
    crash_point("ingest:files-written")
    files, schema = made.files, made.schema
    writers, changes = source.settled(item, made.source, made.arrived)
    schema = source.with_side_notes(schema, plan.state.schema if plan.state else None, made.notes)
    if item.shape is None:
        schema = source.with_lacking_fields(schema, made.source, plan.state, writers)
    _admit(pipeline, plan, made.bad)
    bad = [*made.bad, *lost, *made.dropped]
    before = dict(plan.state.next if plan.state else {}) | dict(plan.first)
    until = before | {part.partition: part.end for part in plan.lost} | {p.partition: p.end for p in plan.ranges}
    changed = {p: end for p, end in until.items() if plan.state is None or plan.state.next.get(p) != end}
    bad_counts: dict[int, int] = {}
    for found in (*made.bad, *lost):
        bad_counts[found.partition or 0] = bad_counts.get(found.partition or 0, 0) + found.records

    def still_first() -> None:
        now = raw.open_raw(lake, pool, topic)
        if (now.next if now else {}) != (plan.state.next if plan.state else {}):
            raise CommitConflict(
                f"table {storage.raw_uri(lake, pool, topic)}: another writer committed first; run again"
            )

    quarantine.add(lake, pool, topic, plan.state, bad, still_first)
    if bad:
        crash_point("ingest:quarantine-written")
    try:
        raw.commit_raw(
            lake,
            pool,
            topic,
            plan.topic_state.topic_id,
            plan.state,
            schema,
            files,
            plan.first,
            changed,
            bad_counts,
            writers,
            made.left_out,
            {found.partition or 0: attempt for found in bad},
            reached,
        )
    except CommitConflict:
        quarantine.withdraw(lake, pool, topic, bad)
        raise
    _show_progress(pipeline, topic, until)
    keep_up(batch.spark, plan.state.opened if plan.state else None, item.retention_ms)
    if bad:
        compaction.tidy(storage.quarantine_uri(lake, pool, topic))
    keep_short(pipeline, item, plan.state)
    return RawCommit(
        topic,
        plan.ranges,
        sum(found.records for found in files),
        sum(bad_counts.values()),
        until,
        tuple(added_fields(known, schema)) if plan.state else (),
        changes,
        time.monotonic() - started,
        sum(made.left_out.values()),
    )


def _show_progress(pipeline: Pipeline, topic: str, until: Mapping[int, int]) -> None:
    """Tell Kafka's own tools how far the topic is read. Nothing depends on it: what is ingested, the lake alone says."""
    if pipeline.consumer_group is None:
        return
    try:
        commit_group_offsets(pipeline.kafka, pipeline.consumer_group, topic, until)
    except KafkaError as error:
        _log.warning("the lag that Kafka shows for %s is out of date, and nothing else: %s", topic, error)


def _admit(pipeline: Pipeline, plan: IngestPlan, bad: Sequence[DataFile]) -> None:
    """BadRecords where what could not be decoded may not be committed. ``bad`` is on disk; no commit names it yet."""
    item = plan.input
    if item.on_bad_record == "quarantine" and item.max_bad_records is None:
        return
    if not bad:
        return
    lowest = min(bad, key=lambda each: (each.partition or 0, each.first or 0))
    place = (lowest.partition or 0, lowest.first or 0)
    uri = storage.quarantine_uri(pipeline.lake, item.pool, item.topic)
    row = rows_at(uri, [lowest], place[0], [place[1]], ["stage", "error"])[place[1]]
    first = Held(item.pool, item.topic, *place, row["stage"], None, f"{row['stage']}: {row['error']}", None, False)
    admit(pipeline, item, plan.state, sum(each.records for each in bad), first, "ingest")


def _check_identity(pipeline: Pipeline, plan: IngestPlan) -> None:
    """TopicRecreated if the topic that was read is not the one that the plan was made for: offsets alone don't tell, since
    the new one may have as many records."""
    topic = plan.input.topic
    found = led_state(pipeline.kafka, topic, LEADER_SECONDS)
    if found is None:
        raise TopicMissing(f"topic {topic} went away while it was read; nothing of the batch was committed.")
    if found.topic_id != plan.topic_state.topic_id:
        raise recreated(plan.input, found)
