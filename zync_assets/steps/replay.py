"""Replay: decodes quarantined records again, and puts them into their places in the raw table.

The side table holds the records whole, so that replay does not read Kafka. One commit adds the files of every record that
can be decoded now. A record in the raw table is no longer in quarantine, although its entry stays in the side table. ETL
compares the number of replays with its account, and so finds the replayed records below *seen*. A kill before the commit
leaves no trace; after the commit, the replay is complete. Of two concurrent replays, the second conflicts and plans again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from zync_assets.lake import quarantine, raw, storage
from zync_assets.lake.raw import RawState
from zync_assets.pipeline import Input, Pipeline
from zync_assets.steps import replay_shaping, schema_changes
from zync_assets.steps.ingest import source_of
from zync_assets.steps.quarantined import Selection, held
from zync_assets.steps.raw_columns import table_schema
from zync_assets.steps.replay_task import Offsets, ReplayTask, floors_of
from zync_assets.steps.tasks import run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class ReplayPlan:
    """The quarantined offsets of one topic to decode again, for one state of the raw table."""

    input: Input
    state: RawState
    wanted: Offsets


@dataclass(frozen=True)
class ReplayCommit:
    """The result of one replay: the number of replayed records, and why the other records stay in quarantine.

    ``reasons``: (partition, offset) → error text.
    """

    topic: str
    records: int
    reasons: Mapping[tuple[int, int], str]
    """(partition, offset) → why the record stays."""


def plan_replay(pipeline: Pipeline, item: Input, selection: Selection) -> ReplayPlan | None:
    """The selected records of a topic that could not be decoded; None if there are none."""
    state = raw.open_raw(pipeline.lake, item.pool, item.topic)
    if state is None:
        return None
    # ``held`` opens the raw table after ``state``. If another replay committed in between, this replay's commit conflicts.
    places: dict[int, list[int]] = {}
    for record in held(pipeline, Selection((item.topic,), selection.ranges)):
        if record.stage != "etl":
            places.setdefault(record.partition, []).append(record.offset)
    return ReplayPlan(item, state, {p: np.array(found, np.int64) for p, found in places.items()}) if places else None


def commit_replay(spark: SparkSession, pipeline: Pipeline, plan: ReplayPlan) -> ReplayCommit:
    """Decode, write and commit. One Spark task suffices for the few quarantined records, and gives one type per column.

    Raises CommitConflict if another replay came first, and SchemaChanged if the pipeline file accepts no new schema. Nothing
    of this replay is visible after an error.
    """
    item, state = plan.input, plan.state
    files = quarantine.quarantine_files(pipeline.lake, item.pool, item.topic, state.next)
    task = ReplayTask(
        source_of(pipeline, item, state),
        storage.quarantine_uri(pipeline.lake, item.pool, item.topic),
        tuple(found for found in files if found.partition in plan.wanted),
        plan.wanted,
        state.opened.uri,
        raw.replay_name(state.replays + 1),
        floors_of(state, plan.wanted),
    )
    if item.shape is not None:
        done, schema = replay_shaping.write(spark, pipeline, item, task, state.schema)
        source = replace(task.source, key_type=done.key_type, value_type=done.value_type)
    else:
        [done] = run_tasks(spark, 1, lambda _: task.run())
        source = replace(task.source, key_type=done.key_type, value_type=done.value_type)
        schema = table_schema(state.schema, source)
        schema = schema_changes.with_side_notes(schema, state.schema, schema_changes.notes_of(done.arrived))
    if done.files:
        writers, _ = schema_changes.settled(item, source, done.arrived)
        raw.commit_replay(state, schema, done.files, writers)
    records = sum(found.records for found in done.files)
    return ReplayCommit(item.topic, records, done.reasons)
