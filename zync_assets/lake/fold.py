"""Keeps the ledger short. A fold merges small files, merges neighbouring ranges, and replaces completed records by ranges.

A batch appends a file, so that its commit never waits for history. Every FILES batches, a commit also replaces the small
files. A pending record in a large file may have its ``completed`` entry in another file, and readers join both. A fold also
folds two large files if this shortens them by a quarter.
"""

from __future__ import annotations

import uuid
from itertools import combinations

import numpy as np
import pyarrow as pa

from zync_assets.compute import pc
from zync_assets.lake import staging
from zync_assets.lake.staging import ACCOUNT_FOLDER, ACCOUNT_TYPE, StagingState
from zync_assets.lake.tables import DataFile
from zync_assets.recent import Recent

FILES = 32
"""Ledger files in the table before a commit folds them."""
SMALL_RECORDS = 200_000
"""Entries of a file up to which it takes part."""
MOST = 600_000
"""Entries that are folded at once, in half a second and some 200 MB; what is left is folded with the next batch. Of two large
files twice as many."""
GAIN = 0.75
"""Share of its entries that two large files keep, at the most, to be replaced."""
_vain: Recent[frozenset[str], bool] = Recent(10_000)
"""The paths of two large files that are not worth a fold. A ledger file never changes."""

_WAITING = ("pending", "completed")


def fold_ledger(state: StagingState) -> tuple[list[DataFile], list[DataFile]]:
    """Files to add and files to remove so that the ledger is short; both empty while it is short enough.

    The written file is invisible until a commit names it.
    """
    small = [item for item in state.ledger_files if item.records <= SMALL_RECORDS]
    if len(small) < FILES:
        return [], []
    # Batches in their order: what waits in one is most often completed in one of the next.
    small.sort(key=lambda item: item.path)
    reach = np.cumsum([item.records for item in small])
    chosen = small[: int(np.searchsorted(reach, MOST, side="right"))]
    added = [_written(state, fold(staging.read_entries(state, chosen)))]
    large = _large_pair(state)
    if large is not None:
        rows = fold(staging.read_entries(state, large))
        if rows.num_rows <= GAIN * sum(item.records for item in large):
            return [*added, _written(state, rows)], [*chosen, *large]
        _vain.put(frozenset(item.path for item in large), True)
    return added, chosen


def _large_pair(state: StagingState) -> list[DataFile] | None:
    """Two large files that may be worth a fold; None if no two are."""
    large = [item for item in state.ledger_files if item.records > SMALL_RECORDS]
    for pair in combinations(sorted(large, key=lambda item: item.records), 2):
        if sum(item.records for item in pair) > 2 * MOST:
            continue
        if frozenset(item.path for item in pair) not in _vain:
            return list(pair)
    return None


def _written(state: StagingState, rows: pa.Table) -> DataFile:
    path = f"{ACCOUNT_FOLDER}/folded-{uuid.uuid4().hex}.parquet"
    return staging.write_entries(state.opened.uri, path, rows)


def fold(rows: pa.Table) -> pa.Table:
    """The same facts in fewer ledger entries (columns of the account). Pending records come first, sorted by hash."""
    waiting = rows.filter(pc.is_in(rows["kind"], pa.array(_WAITING, pa.string())))
    settled = rows.filter(pc.invert(pc.is_in(rows["kind"], pa.array(_WAITING, pa.string()))))
    pending, completed = (waiting.filter(pc.equal(waiting["kind"], kind)) for kind in _WAITING)
    place = ["topic", "partition", "first"]
    numbered = pending.append_column("at", pa.array(np.arange(pending.num_rows))).select([*place, "at"])
    joined = numbered.join(completed.select([*place, "text"]), place, join_type="inner").combine_chunks()
    met, became = joined["at"].combine_chunks(), pc.fill_null(joined["text"], "done").combine_chunks()
    done = pending.take(met)
    open_pending = pending.filter(_mask(pending.num_rows, met)).sort_by("hash")
    unmet = completed.join(pending.select(place), place, join_type="left anti").select(ACCOUNT_TYPE.names)
    now_done = done.set_column(done.schema.get_field_index("kind"), "kind", became)
    told = settled.filter(pc.is_valid(settled["text"]))  # why a rule failed on this record: merging would lose it
    ranges = _merged(pa.concat_tables([settled.filter(pc.is_null(settled["text"])), now_done]))
    return pa.concat_tables([open_pending, unmet, told, ranges])


def _mask(length: int, without: pa.Array) -> pa.Array:
    keep = np.ones(length, dtype=bool)
    keep[without.to_numpy(zero_copy_only=False)] = False
    return pa.array(keep)


def _merged(rows: pa.Table) -> pa.Table:
    """Account rows where touching ranges of the same class are merged into one range."""
    kinds = pa.table({item.name: pa.array([], item.type) for item in ACCOUNT_TYPE}).schema
    parts: list[pa.Table] = []
    keys = rows.group_by(["kind", "topic", "partition"]).aggregate([]).to_pylist()
    for key in keys:
        own = rows.filter(
            pc.and_(
                pc.and_(pc.equal(rows["kind"], key["kind"]), pc.equal(rows["topic"], key["topic"])),
                pc.equal(rows["partition"], key["partition"]),
            )
        ).sort_by("first")
        first, end = (own[name].to_numpy() for name in ("first", "end"))
        count = own["count"].to_numpy(zero_copy_only=False)
        starts = np.flatnonzero(np.concatenate([[True], first[1:] != end[:-1]]))
        ends = np.append(starts[1:], len(first)) - 1
        size = len(starts)
        known = np.add.reduceat(np.nan_to_num(count.astype(float)), starts).astype(np.int64)
        whole = np.logical_and.reduceat(~np.isnan(count.astype(float)), starts)
        columns: dict[str, pa.Array] = {
            "kind": pa.repeat(key["kind"], size),
            "topic": pa.repeat(key["topic"], size),
            "partition": pa.repeat(pa.scalar(key["partition"], pa.int32()), size),
            "first": pa.array(first[starts], pa.int64()),
            "end": pa.array(end[ends], pa.int64()),
            "count": pa.array(known, pa.int64(), mask=~whole),
        }
        parts.append(
            pa.table({item.name: columns.get(item.name, pa.nulls(size, item.type)) for item in kinds}, schema=kinds)
        )
    return pa.concat_tables(parts) if parts else kinds.empty_table()
