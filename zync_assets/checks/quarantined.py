"""What the quarantine of a raw table holds, as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap

import numpy as np
import pyarrow as pa

from zync_assets.checks.columns import integers, read_columns
from zync_assets.lake import quarantine, raw, storage
from zync_assets.lake.raw import RawState
from zync_assets.offsets import OffsetRange


@dataclass(frozen=True)
class Quarantined:
    """``records``: int64 rows (partition, offset) of the records that could not be decoded, sorted; ``lost``: accepted
    losses; ``first_error``: why the first record is here; ``entries``: all entries of a partition, of either kind."""

    records: np.ndarray
    lost: tuple[OffsetRange, ...]
    entries: Mapping[int, int]
    first_error: str

    def offsets(self, partition: int) -> np.ndarray:
        return self.records[self.records[:, 0] == partition, 1]

    def not_lost(self, partition: int, offsets: np.ndarray) -> np.ndarray:
        """Those offsets that lie in no accepted loss."""
        keep = np.ones(len(offsets), dtype=bool)
        for part in self.lost:
            if part.partition == partition:
                keep &= (offsets < part.first) | (offsets >= part.end)
        return offsets[keep]


def read_quarantine(lake: str, pool: str, topic: str, state: RawState, ranges: Sequence[OffsetRange]) -> Quarantined:
    """The records of ``ranges`` that lie in quarantine, and the losses; ``entries`` counts all that were ever there.
    Raises DamagedFile."""
    replayed = raw.replayed_offsets(state)
    uri = storage.quarantine_uri(lake, pool, topic)
    records: list[np.ndarray] = []
    lost: list[OffsetRange] = []
    entries: dict[int, int] = {}
    first_error = ""
    for item in quarantine.quarantine_files(lake, pool, topic, state.next):
        columns = ["kafka.partition", "kafka.offset", "stage", "error", "end"]
        for batch in read_columns(storage.join(uri, item.path), columns):
            table = pa.Table.from_batches([batch]).flatten()
            partitions, offsets = integers(table["kafka.partition"]), integers(table["kafka.offset"])
            for partition, count in zip(
                *(part.tolist() for part in np.unique(partitions, return_counts=True)), strict=True
            ):
                entries[partition] = entries.get(partition, 0) + count
            gone = np.asarray(table["stage"].to_pylist()) == "lost"
            ends = integers(table["end"])
            spans = zip(partitions[gone].tolist(), offsets[gone].tolist(), ends[gone].tolist(), strict=True)
            lost += [span for span in starmap(OffsetRange, spans) if touches(span, ranges)]
            wanted = ~gone & inside(partitions, offsets, ranges)
            for partition, places in replayed.items():
                wanted &= (partitions != partition) | ~np.isin(offsets, places)
            records.append(np.column_stack([partitions[wanted], offsets[wanted]]))
            if not first_error and wanted.any():
                first_error = str(table["error"][int(np.argmax(wanted))].as_py())
    found = np.concatenate(records) if records else np.empty((0, 2), np.int64)
    return Quarantined(found[np.lexsort((found[:, 1], found[:, 0]))], tuple(sorted(lost)), entries, first_error)


def inside(partitions: np.ndarray, offsets: np.ndarray, ranges: Iterable[OffsetRange]) -> np.ndarray:
    """Which of the records (by partition and offset) lie in one of the ranges."""
    keep = np.zeros(len(offsets), dtype=bool)
    for part in ranges:
        keep |= (partitions == part.partition) & (offsets >= part.first) & (offsets < part.end)
    return keep


def touches(span: OffsetRange, ranges: Iterable[OffsetRange]) -> bool:
    """Whether a range shares an offset with one of the others."""
    return any(span.partition == part.partition and span.first < part.end and part.first < span.end for part in ranges)
