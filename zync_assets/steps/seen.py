"""Detects a lost lake table before a step uses its replacement.

A raw table with fewer offsets than ETL has transformed was restored or removed. A new ingest may bring other records to the
same offsets. A missing staging table was removed if its output topics hold records.
"""

from __future__ import annotations

from contextlib import suppress

from zync_assets.errors import KafkaError, LakeError
from zync_assets.kafka.topics import survey
from zync_assets.lake import raw, staging, storage
from zync_assets.lake.raw import RawState
from zync_assets.lake.staging import Head
from zync_assets.pipeline import Input, Pipeline


def check_seen(item: Input, head: Head, found: RawState | None) -> None:
    """LakeError where a staging pool's account has seen more of an input than there is. ``found`` is not older than ``head``."""
    for partition, seen in head.seen(item.topic).items():
        upcoming = found.next.get(partition, 0) if found else 0
        if seen > upcoming:
            has = f"its next offset is {upcoming}" if found else "the table is not there"
            raise LakeError(
                f"table {item.pool}.{item.topic}: partition {partition} was transformed up to offset {seen}, and {has}: it"
                " went back to an older version, or is gone. Nothing was done: what is ingested again need not be what was."
                " Put the newer table back, or begin anew: give the input another pool, and its outputs another staging pool"
                " and other topics."
            )


def check_begins(pipeline: Pipeline, pool: str) -> None:
    """KafkaError where an output topic of a pool without a staging table holds records: the lake vanished, or the topic is
    somebody else's. An output with ``start-at: end`` may begin on such a topic. A topic that can't be asked tells nothing."""
    outputs = [item for item in pipeline.outputs_of(pool) if item.start_at != "end"]
    for topic, state in survey(pipeline.kafka, [item.topic for item in outputs]).states.items():
        used = [f"partition {part.partition}: {part.end}" for part in state.partitions if part.end]
        if used:
            raise KafkaError(
                f"topic {topic} holds records already (its ends: {', '.join(used)}), and the lake has no table"
                f" {storage.staging_uri(pipeline.lake, pool)}, which they came from if this pipeline ran before. Nothing was"
                " done. If the lake was removed, moved or is not mounted, put it back. If the pipeline is new, give the"
                " output an empty topic, or set start-at: end."
            )


def check_before_ingest(pipeline: Pipeline, item: Input, found: RawState | None) -> None:
    """The same before a batch is added to the table."""
    heads: list[Head] = []
    if found is None and not any(staging.has_begun(pipeline.lake, pool) for pool in pipeline.staging_pools):
        for pool in pipeline.readers_of(item.topic):
            check_begins(pipeline, pool)
    for pool in pipeline.staging_pools:
        # ETL reports a damaged staging table. Ingest continues, because Kafka's retention removes records meanwhile.
        with suppress(LakeError):
            if (state := staging.open_staging(pipeline.lake, pool)) is not None:
                heads.append(state.head)
    for head in heads:
        try:
            check_seen(item, head, found)
        except LakeError:
            # Another process may have ingested and transformed since the table was opened.
            check_seen(item, head, raw.open_raw(pipeline.lake, item.pool, item.topic))
    if found is not None:
        raw.check_whole(found)
