"""Which pending records have one of some join keys' hashes, looked up without Spark, in the ledger's own few columns.

A ledger file never changes. The process therefore keeps the sorted entries of the files that it has read. A batch reads
only the file of the batch before. Spark looks up the entries of a ledger that has more than MOST entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.compute import pc
from zync_assets.lake import staging, storage
from zync_assets.lake.staging import StagingState
from zync_assets.recent import Recent

MOST = 6_000_000
"""Entries of a ledger that is looked up here; they take some 50 bytes each."""

_PLACE = ["topic", "partition", "first"]
_PENDING = pa.schema([staging.ACCOUNT_TYPE.field(name) for name in ("rule", *_PLACE, "hash")])
WANTED = pa.schema([("rule", pa.string()), ("topic", pa.string()), ("hash", pa.int64())])
"""What is looked up."""
_known: Recent[str, dict[str, _Waiting]] = Recent(MOST)
"""Place of a staging table → its ledger files' paths → what they say."""


@dataclass(frozen=True)
class _Waiting:
    """What one ledger file says: ``pending`` (rule, topic, partition, first, hash), sorted by the hash, and ``completed``
    (topic, partition, first)."""

    hashes: npt.NDArray[np.int64]
    pending: pa.Table
    completed: pa.Table


def look_up(state: StagingState, wanted: pa.Table) -> pa.Table | None:
    """The places (rule, topic, partition, first) of what waits and has one of the ``wanted`` rules, topics and hashes.

    None where the ledger is too long for this. LakeError for a file that can't be read.
    """
    files = state.ledger_files
    entries = sum(item.records for item in files)
    if entries > MOST:
        _known.remove(state.opened.uri)
        return None
    before = _known.get(state.opened.uri) or {}
    each = {item.path: before.get(item.path) or _read(state.uri(item)) for item in files}
    _known.put(state.opened.uri, each, entries)
    hashes = np.unique(wanted["hash"].to_numpy())
    found = pa.concat_tables([_with_hashes(item, hashes) for item in each.values()] or [_PENDING.empty_table()])
    found = found.join(wanted, ["rule", "topic", "hash"], join_type="left semi").select(["rule", *_PLACE])
    if not found.num_rows:
        return found
    firsts = found["first"]
    done = [item.completed.filter(pc.is_in(item.completed["first"], firsts)) for item in each.values()]
    return found.join(pa.concat_tables(done), _PLACE, join_type="left anti").select(["rule", *_PLACE])


def _with_hashes(item: _Waiting, hashes: npt.NDArray[np.int64]) -> pa.Table:
    low, high = (np.searchsorted(item.hashes, hashes, side=side) for side in ("left", "right"))
    met = low < high
    spans = zip(low[met].tolist(), high[met].tolist(), strict=True)
    return item.pending.take(pa.array([at for span in spans for at in range(*span)], pa.int64()))


def _read(uri: str) -> _Waiting:
    system, path = storage.filesystem(uri)
    names = ["kind", "topic", "partition", "first", "rule", "hash"]
    with storage.accessed(uri, "can't be read"):
        entries = pq.ParquetFile(path, filesystem=system).read([f"account.{name}" for name in names]).flatten()
    entries = entries.rename_columns([name.removeprefix("account.") for name in entries.column_names])
    is_kind = [pc.equal(entries["kind"], kind) for kind in ("pending", "completed")]
    pending = entries.filter(reduce(pc.and_, [is_kind[0], pc.is_valid(entries["hash"])])).select(_PENDING.names)
    pending = pending.cast(_PENDING).sort_by("hash").combine_chunks()
    completed = entries.filter(is_kind[1]).select(_PLACE).cast(pa.schema([_PENDING.field(name) for name in _PLACE]))
    return _Waiting(pending["hash"].to_numpy(), pending, completed)
