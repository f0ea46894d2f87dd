"""A raw table that has less than was transformed of it went back, or is gone: what is ingested again need not be what was."""

from __future__ import annotations

from contextlib import suppress

from zync_assets.errors import LakeError
from zync_assets.lake import raw, staging
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


def check_before_ingest(pipeline: Pipeline, item: Input, found: RawState | None) -> None:
    """The same before a batch is added to the table."""
    heads: list[Head] = []
    for pool in pipeline.staging_pools:
        # What is wrong with a staging table is for ETL to say: ingest goes on, since topics don't keep their records for ever.
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
