"""The quarantine of a raw table as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap

import numpy as np
import pyarrow as pa

from zync_assets.audit.columns import HeldOffsets, integers, read_columns, without
from zync_assets.lake import quarantine, raw, storage
from zync_assets.lake.raw import RawState
from zync_assets.offsets import OffsetRange
from zync_assets.records import DROPPED, LOST, RANGE_STAGES


@dataclass(frozen=True)
class Quarantined:
    """``records``: int64 rows (partition, offset) of the records that could not be decoded, sorted; ``lost``: accepted
    losses; ``left_out``: int64 rows (partition, first, end) of what the input's shape left out, sorted and not only of the
    ranges; ``first_error``: why the first record is here; ``entries``: all entries of a partition but for the left-out."""

    records: np.ndarray
    lost: tuple[OffsetRange, ...]
    left_out: np.ndarray
    entries: Mapping[int, int]
    first_error: str

    def offsets(self, partition: int) -> np.ndarray:
        return self.records[self.records[:, 0] == partition, 1]

    def left_out_records(self, partition: int) -> int:
        own = self.left_out[self.left_out[:, 0] == partition]
        return int((own[:, 2] - own[:, 1]).sum())

    def unexplained(self, partition: int, offsets: np.ndarray) -> np.ndarray:
        """Those offsets that lie in no accepted loss and that no shape left out."""
        own = self.left_out[self.left_out[:, 0] == partition]
        at = np.searchsorted(own[:, 1], offsets, side="right") - 1
        keep = at < 0
        keep[~keep] = offsets[~keep] >= own[at[~keep], 2]
        for part in self.lost:
            if part.partition == partition:
                keep &= (offsets < part.first) | (offsets >= part.end)
        return offsets[keep]


def read_quarantine(lake: str, pool: str, topic: str, state: RawState, ranges: Sequence[OffsetRange]) -> Quarantined:
    """The quarantined records and the losses within ``ranges``. ``entries``: partition → every entry of the side table.

    Raises DamagedFile.
    """
    replayed = raw.replayed_offsets(state)
    uri = storage.quarantine_uri(lake, pool, topic)
    records: list[np.ndarray] = []
    lost: list[OffsetRange] = []
    entries: dict[int, int] = {}
    left_out: list[np.ndarray] = []
    first_error = ""
    for item in quarantine.quarantine_files(lake, pool, topic, state.next, checked=False):
        columns = ["kafka.partition", "kafka.offset", "stage", "error", "end"]
        for batch in read_columns(storage.join(uri, item.path), columns):
            table = pa.Table.from_batches([batch]).flatten()
            partitions, offsets = integers(table["kafka.partition"]), integers(table["kafka.offset"])
            stages, ends = np.asarray(table["stage"].to_pylist()), integers(table["end"])
            gone, out = stages == LOST, stages == DROPPED
            counts = np.unique(partitions[~out], return_counts=True)
            for partition, count in zip(*(part.tolist() for part in counts), strict=True):
                entries[partition] = entries.get(partition, 0) + count
            spans = zip(partitions[gone].tolist(), offsets[gone].tolist(), ends[gone].tolist(), strict=True)
            lost += [span for span in starmap(OffsetRange, spans) if touches(span, ranges)]
            left_out.append(np.column_stack([partitions[out], offsets[out], ends[out]]))
            wanted = ~gone & ~out & inside(partitions, offsets, ranges)
            for partition, places in replayed.items():
                wanted &= (partitions != partition) | ~np.isin(offsets, places)
            records.append(np.column_stack([partitions[wanted], offsets[wanted]]))
            if not first_error and wanted.any():
                first_error = str(table["error"][int(np.argmax(wanted))].as_py())
    found = np.concatenate(records) if records else np.empty((0, 2), np.int64)
    spans_out = np.concatenate(left_out) if left_out else np.empty((0, 3), np.int64)
    return Quarantined(
        found[np.lexsort((found[:, 1], found[:, 0]))],
        tuple(sorted(lost)),
        spans_out[np.lexsort((spans_out[:, 1], spans_out[:, 0]))],
        entries,
        first_error,
    )


def quarantined_offsets(lake: str, pool: str, topic: str, state: RawState, ranges: Sequence[OffsetRange]) -> np.ndarray:
    """The offsets, sorted, of the records of ``ranges`` that could not be decoded. The ranges are of one partition.

    Reads only files with entries of the ranges. Raises DamagedFile.
    """
    if not ranges:
        return np.empty(0, np.int64)
    files = [
        item
        for item in quarantine.quarantine_files(lake, pool, topic, state.next, checked=False)
        if touches(OffsetRange(item.partition or 0, item.first or 0, (item.last or 0) + 1), ranges)
    ]
    found = [np.empty(0, np.int64)]
    for item in files:
        place = storage.join(storage.quarantine_uri(lake, pool, topic), item.path)
        for batch in read_columns(place, ["kafka.partition", "kafka.offset", "stage"]):
            table = pa.Table.from_batches([batch]).flatten()
            partitions, offsets = integers(table["kafka.partition"]), integers(table["kafka.offset"])
            records = ~np.isin(np.asarray(table["stage"].to_pylist()), RANGE_STAGES)
            found.append(offsets[records & inside(partitions, offsets, ranges)])
    offsets = np.sort(np.concatenate(found))
    if len(offsets):
        replays = [item for item in raw.raw_files(state, ranges) if raw.is_replay(item)]
        replayed = HeldOffsets(state.opened.uri, replays).between(int(offsets[0]), int(offsets[-1]) + 1)
        offsets = without(offsets, replayed)
    return offsets


def inside(partitions: np.ndarray, offsets: np.ndarray, ranges: Iterable[OffsetRange]) -> np.ndarray:
    """Which of the records (by partition and offset) lie in one of the ranges."""
    keep = np.zeros(len(offsets), dtype=bool)
    for part in ranges:
        keep |= (partitions == part.partition) & (offsets >= part.first) & (offsets < part.end)
    return keep


def touches(span: OffsetRange, ranges: Iterable[OffsetRange]) -> bool:
    """Whether a range shares an offset with one of the others."""
    return any(span.partition == part.partition and span.first < part.end and part.first < span.end for part in ranges)
