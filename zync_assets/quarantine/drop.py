"""Drop: a record of quarantine is given up. It stays where it is, and the account has it in the class dropped."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from zync_assets.errors import ZyncError
from zync_assets.etl.retries import Taken, carve, met
from zync_assets.lake import staging
from zync_assets.lake.quarantine import Selection, held
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Pipeline

Place = tuple[str, int, int]


def drop_once(pipeline: Pipeline, pool: str, selection: Selection) -> set[Place]:
    """Drop the selected records in the account of one staging pool, in one commit; their places. No JVM.

    Raises CommitConflict if an ETL batch came first, ZyncError for a record that ETL has not seen yet: the account can't
    say of it that it is dropped.
    """
    state = staging.open_staging(pipeline.lake, pool)
    places: set[Place] = set()
    for record in held(pipeline, selection):
        if record.stage == "etl" and record.pool != pool:
            continue
        if record.stage != "etl" and pool not in pipeline.readers_of(record.topic):
            continue
        if not record.seen:
            raise ZyncError(
                f"topic {record.topic}, partition {record.partition}, offset {record.offset} was not seen by ETL yet. First"
                f" run {pipeline.command('etl')}"
            )
        places.add(record.place)
    if state is None or not places:
        return set()
    taken = list(_quarantined(state, places))
    if not taken:
        return set()
    files, removed = carve(state, taken)
    folder = f"batch-{state.head.batch + 1:012d}-{uuid.uuid4().hex[:12]}/{staging.ACCOUNT_FOLDER}"
    entries = [item.entry("dropped") for item in taken]
    files.append(staging.write_ledger(state.opened.uri, f"{folder}/dropped.parquet", entries))
    counts = Counter(state.head.counts)
    for item in taken:
        counts[item.topic, item.part.partition, "quarantined"] -= item.records
        counts[item.topic, item.part.partition, "dropped"] += item.records
    head = replace(state.head, batch=state.head.batch + 1, counts=dict(counts))
    staging.commit_batch(pipeline.lake, pool, state, head, state.schema, files, removed)
    return places


def _quarantined(state: StagingState, places: Iterable[Place]) -> Iterator[Taken]:
    """The places that are quarantined in this state of the account."""
    wanted: dict[tuple[str, int], list[int]] = {}
    for topic, partition, offset in sorted(places):
        wanted.setdefault((topic, partition), []).append(offset)
    for entry in staging.read_ledger(state, ["quarantined"]).to_pylist():
        topic, partition = entry["topic"], entry["partition"]
        offsets = np.array(wanted.get((topic, partition), []), np.int64)
        for part in met(OffsetRange(partition, entry["first"], entry["end"]), offsets):
            yield Taken(topic, "quarantined", None, part)
