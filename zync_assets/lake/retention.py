"""Take old records out of a raw table, as whole files, by the log's statistics alone.

Retention removes a prefix of a partition. One number, ``zync:kept:<partition>``, says where the remaining records begin;
the commit that removes the files sets the number. A record's age counts from its time, as in Kafka's own retention: the
highest timestamp in its partition up to the record, never later than its ingest. Retention removes a file when its
youngest record is old enough. Retention keeps replayed records: without its record in the raw table, an entry of the
quarantine would count again.

The files stay on disk for present readers, until ``cleaning`` removes the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zync_assets.compute import pc
from zync_assets.lake import raw, staging, tables
from zync_assets.lake.raw import RawState
from zync_assets.lake.staging import StagingState
from zync_assets.lake.tables import DataFile

SLACK = 16
"""A removal waits until a file is older than the retention by a 16th of it, and then removes every file past the
retention. Few commits suffice."""


@dataclass(frozen=True)
class Cut:
    """The removable files of a partition, all below offset ``kept``.

    ``reached``: the highest time of all removed records, of earlier removals too, in milliseconds since the epoch.
    """

    partition: int
    files: tuple[DataFile, ...]
    kept: int
    reached: int


def is_due(state: RawState, now: int, retention_ms: int) -> bool:
    """Whether a partition begins with a file that is past its time by a good while."""
    limit = now - retention_ms - retention_ms // SLACK
    return any(_old(files, limit) for files in _by_partition(state).values())


def cuts(state: RawState, limit: int, needed: Mapping[int, int]) -> list[Cut]:
    """The removable files of each partition: the first files whose records are all older than ``limit`` (milliseconds since
    the epoch) and below the offset that staging pools need (``needed``: partition → offset)."""
    found: list[Cut] = []
    for partition, files in _by_partition(state).items():
        upto = needed.get(partition, 0)
        below = next((place for place, item in enumerate(files) if (item.last or 0) >= upto), len(files))
        old = _old(files[:below], limit)
        if old:
            reached = max(state.reached.get(partition, 0), *(item.max_time or 0 for item in old))
            found.append(Cut(partition, tuple(old), (old[-1].last or 0) + 1, reached))
    return found


def _by_partition(state: RawState) -> dict[int, list[DataFile]]:
    found: dict[int, list[DataFile]] = {}
    for item in raw.raw_files(state):
        if not raw.is_replay(item):
            found.setdefault(item.partition or 0, []).append(item)
    return found


def _old(files: Sequence[DataFile], limit: int) -> Sequence[DataFile]:
    """The first files that are old. Where records have no time (0), only a later record shows their age."""
    count = 0
    for place, item in enumerate(files):
        if item.max_time is None or item.max_time >= limit:
            break
        if item.max_time > 0:
            count = place + 1
    return files[:count]


def needed_from(state: StagingState, topic: str) -> dict[int, int]:
    """Partition → the first offset whose raw record a staging pool may still want: the cursor, and what a rule failed on.

    The ledger is read only where something waits.
    """
    needed = state.head.seen(topic)
    waits = [
        partition
        for (name, partition, kind), count in state.head.counts.items()
        if name == topic and kind in ("pending", "quarantined") and count
    ]
    if not waits:
        return needed
    rows = staging.read_ledger(state, ["pending", "completed", "quarantined"])
    rows = rows.filter(pc.equal(rows["topic"], topic))
    for partition in set(waits):
        own = rows.filter(pc.equal(rows["partition"], partition))
        of = {kind: own.filter(pc.equal(own["kind"], kind)) for kind in ("pending", "completed", "quarantined")}
        failed = of["quarantined"].filter(pc.is_valid(of["quarantined"]["text"]))
        waiting = np.setdiff1d(of["pending"]["first"].to_numpy(), of["completed"]["first"].to_numpy())
        needed[partition] = min([needed.get(partition, 0), *waiting[:1].tolist(), *failed["first"].to_pylist()])
    return needed


def commit(state: RawState, found: Sequence[Cut]) -> None:
    """Remove the files and say where the partitions begin now. CommitConflict if a compaction came first."""
    numbers = {f"zync:kept:{cut.partition}": cut.kept for cut in found}
    numbers |= {f"zync:reached:{cut.partition}": cut.reached for cut in found}
    numbers |= {
        f"zync:removed:{cut.partition}": state.removed.get(cut.partition, 0) + sum(item.records for item in cut.files)
        for cut in found
    }
    # A compaction puts records of such files into another one.
    numbers["zync:compacted"] = state.opened.number("zync:compacted") or 0
    tables.commit(state.opened, [], numbers, removed=[item for cut in found for item in cut.files])
