"""The files of a raw table: do they hold the offsets that the Delta log says, each once and in ascending order?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from zync_assets.audit.columns import DamagedFile, positions
from zync_assets.lake import raw, storage
from zync_assets.lake.raw import RawState
from zync_assets.lake.tables import DataFile

MONOTONIC = "monotonic_offsets"
"""The check of a raw table that reports these problems."""


def log_problems(state: RawState, files: Sequence[DataFile]) -> Iterator[str]:
    """What is wrong with some files of a raw table, by the log alone. ``files``: sorted by partition and offset."""
    for before, item in pairwise([item for item in files if not raw.is_replay(item)]):
        if before.partition == item.partition and (item.first or 0) <= (before.last or 0):
            yield (f"files {before.path} and {item.path} of partition {item.partition} overlap at offset {item.first}")
    for partition, end in state.next.items():
        if end < state.first.get(partition, 0):
            yield f"partition {partition}: next offset {end} is below the first, {state.first[partition]}"
    for item in files:
        low, end = state.first.get(item.partition or 0, 0), state.next.get(item.partition or 0, 0)
        if not raw.is_replay(item):
            low = max(low, state.kept.get(item.partition or 0, 0))
        if (item.first or 0) < low or (item.last or 0) >= end:
            yield (
                f"file {item.path} holds offsets {item.first} to {item.last} of partition {item.partition},"
                f" of which {low} to {end - 1} were ingested and kept"
            )


def file_problems(table_uri: str, item: DataFile) -> Iterator[str]:
    """What is wrong with the partitions and offsets of a file's rows."""
    records, first, last = 0, None, -1
    try:
        for partitions, offsets in positions(storage.join(table_uri, item.path)):
            if not len(offsets):
                continue
            if (partitions != item.partition).any():
                stray = partitions[partitions != item.partition][0]
                yield f"file {item.path} of partition {item.partition} holds a record of partition {stray}"
            steps = np.diff(offsets, prepend=last)
            if (steps <= 0).any():
                at = int(np.argmax(steps <= 0))
                yield (
                    f"file {item.path}: offset {offsets[at]} follows {offsets[at - 1] if at else last}"
                    f" in row {records + at}"
                )
            first = int(offsets[0]) if first is None else first
            records, last = records + len(offsets), int(offsets[-1])
    except DamagedFile as error:
        yield str(error)
        return
    if (records, first, last) != (item.records, item.first, item.last):
        yield (
            f"file {item.path} holds {records} records from {first} to {last};"
            f" the log says {item.records} from {item.first} to {item.last}"
        )
