"""The account of a staging pool and the quarantine of a raw table, as arrays.

The account says which class each input offset is in, by the pool's ledger alone. An offset that was pending and is
completed counts as done. Memory: 17 bytes a range and 25 a record that was ever pending. A done range costs the same
however many records it spans.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.lake import quarantine_table, raw, storage
from zync_assets.lake.check_results import TopicPartition
from zync_assets.lake.parquet_rows import FileOffsets, RecentCache, difference, distinct, integers, read_columns
from zync_assets.lake.raw_files import DROPPED as DROPPED_STAGE
from zync_assets.lake.raw_files import LOSS, RANGE_STAGES
from zync_assets.lake.snapshot import Snapshot
from zync_assets.lake.staging import StagingState, entry_columns, entry_paths
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Rule

CLASSES = ("done", "unmatched", "dropped", "quarantined", "expired", "pending")
DONE, DROPPED, PENDING, EXPIRED = (CLASSES.index(name) for name in ("done", "dropped", "pending", "expired"))
NONE = 255
COUNTED = ("unmatched", "dropped", "quarantined")
"""Classes whose ledger entries say how many records they have."""
ENDED = "ended"
"""The kind of ledger entries for new records that are done without an output, and the text of those for pending records."""
_KINDS = [*CLASSES, "completed"]
_COMPLETED = len(CLASSES)


@dataclass(frozen=True)
class LedgerEntries:
    """The ledger entries of one input partition.

    ``first``, ``end`` and ``kind`` are parallel arrays, sorted by ``first``, with one entry per range or pending record.
    Records that are no longer pending keep their entry, and their offsets are in ``completed``, sorted.
    """

    first: np.ndarray
    end: np.ndarray
    kind: np.ndarray
    completed: np.ndarray
    became: np.ndarray
    """The present class of each offset in ``completed``, as an index of CLASSES."""
    ended: np.ndarray
    """The offsets that are done without an output, since their source row ended; sorted."""

    def classes(self, offsets: np.ndarray) -> np.ndarray:
        """The present class of each offset, as an index of CLASSES; NONE for an offset without an entry."""
        at = np.searchsorted(self.first, offsets, side="right") - 1
        is_known = at >= 0
        is_known[is_known] = offsets[is_known] < self.end[at[is_known]]
        codes = np.full(len(offsets), NONE, np.uint8)
        codes[is_known] = self.kind[at[is_known]]
        entries = codes == PENDING
        places = offsets[entries]
        classes = np.full(len(places), PENDING, np.uint8)
        complete = np.isin(places, self.completed)
        classes[complete] = self.became[np.searchsorted(self.completed, places[complete])]
        codes[entries] = classes
        return codes

    @cached_property
    def waiting(self) -> np.ndarray:
        """The offsets that are pending now, sorted."""
        return difference(self.first[self.kind == PENDING], self.completed)

    def offsets_in(self, kind: int) -> int:
        """How many offsets the ranges of a class span."""
        return int((self.end - self.first)[self.kind == kind].sum())

    def problems(self, first: int, seen: int) -> Iterator[str]:
        """Why the entries don't cover ``first <= offset < seen`` exactly once."""
        reach = np.concatenate([[first], self.end])
        starts = np.concatenate([self.first, [seen]])
        for at in np.flatnonzero(reach != starts)[:1]:
            if starts[at] > reach[at]:
                yield f"offsets {reach[at]} to {starts[at] - 1} are in no class of the account"
            elif at == len(self.first):
                yield f"the account goes to offset {reach[at]}, past the seen offset {seen}"
            else:
                yield f"offset {starts[at]} is in the account twice"
        doubles, times = np.unique(self.completed, return_counts=True)
        if (times > 1).any():
            yield f"offset {doubles[times > 1][0]} was completed twice"
        stray = difference(self.completed, self.first[self.kind == PENDING])
        if len(stray):
            yield f"offset {stray[0]} was completed and never pending"


_Entries = tuple[np.ndarray, np.ndarray, np.ndarray]
"""first, end, kind"""


@dataclass(frozen=True)
class _LedgerFile:
    """The contents of one ledger file.

    ``places``: place → sorted entries (first, end, kind); ``ended``: place → offsets, as in ``LedgerEntries``; ``waiting``: the
    file's change of the number of pending records;
    ``counted``: (place, class) → the sum of the entries' counts, None if an entry has no count.
    """

    places: Mapping[TopicPartition, _Entries]
    ended: Mapping[TopicPartition, np.ndarray]
    waiting: Counter[tuple[str, str]]
    counted: Mapping[tuple[TopicPartition, str], int | None]


_CACHED = 6_000_000
"""The most ledger entries that a process keeps in memory, over all staging tables."""
_Mark = tuple[str, int | None, int | None]
"""Path of a ledger file, its size and the time of its last change."""

_cache: RecentCache[str, dict[_Mark, _LedgerFile]] = RecentCache(_CACHED)
"""Place of a staging table → its ledger files → their contents."""


Counted = Mapping[tuple[TopicPartition, str], "int | None"]
"""(input topic and partition, class) → how many records of the class the ledger counts; None where it does not say."""


def read_account(
    state: StagingState, *, cached: bool = False
) -> tuple[dict[TopicPartition, LedgerEntries], Counter[tuple[str, str]], Counted]:
    """The entries by (input topic, partition), how many records wait by (rule, input topic), and how many there are of the
    classes whose entries count them. Raises DamagedFile.

    ``cached``: a ledger file that this process has read in this way before is not read again, unless another program
    changed the file since.
    """
    cached_files = (_cache.get(state.table.uri) or {}) if cached else {}
    marks = {_mark(state.uri(item), item.path): state.uri(item) for item in state.ledger_files}
    files = {mark: cached_files.get(mark) or _read_file(uri) for mark, uri in marks.items()}
    if cached:
        _cache.put(state.table.uri, files, sum(item.records for item in state.ledger_files))
    parts: dict[TopicPartition, list[_Entries]] = {}
    ended: dict[TopicPartition, list[np.ndarray]] = defaultdict(list)
    waiting: Counter[tuple[str, str]] = Counter()
    counted: dict[tuple[TopicPartition, str], int | None] = {}
    for file in files.values():
        for place, offsets in file.ended.items():
            ended[place].append(offsets)
        waiting.update(file.waiting)
        for key, count in file.counted.items():
            total = counted.get(key, 0)
            counted[key] = None if total is None or count is None else total + count
        for place, arrays in file.places.items():
            parts.setdefault(place, []).append(arrays)
    entries = {
        place: _ledger_entries(
            *_sorted_entries(arrays), np.sort(np.concatenate([np.array([], np.int64), *ended[place]]))
        )
        for place, arrays in sorted(parts.items())
    }
    return entries, +waiting, counted


def _mark(uri: str, path: str) -> _Mark:
    """A file's path, size and modification time, which show a change. In a store every request costs money, and the path
    alone must do."""
    if storage.is_store(uri):
        return path, None, None
    system, place = storage.filesystem(uri)
    info = system.get_file_info(place)
    return path, info.size, info.mtime_ns


def _ledger_entries(first: np.ndarray, end: np.ndarray, kind: np.ndarray, ended: np.ndarray) -> LedgerEntries:
    done_late = kind >= _COMPLETED
    became = np.where(kind[done_late] == _COMPLETED, DONE, DROPPED).astype(np.uint8)
    return LedgerEntries(first[~done_late], end[~done_late], kind[~done_late], first[done_late], became, ended)


def _sorted_entries(parts: Sequence[_Entries]) -> _Entries:
    """Entries by first and end."""
    first, end, kind = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    if not (first[1:] > first[:-1]).all():
        order = np.argsort(first, kind="stable")  # of sorted parts it takes little more than to look at them
        if (first[order[1:]] == first[order[:-1]]).any():
            order = np.lexsort((end, first))
        first, end, kind = first[order], end[order], kind[order]
    return first, end, kind


def _read_file(uri: str) -> _LedgerFile:
    parts: dict[TopicPartition, list[_Entries]] = {}
    waiting: Counter[tuple[str, str]] = Counter()
    counted: dict[tuple[TopicPartition, str], int | None] = {}
    ended: dict[TopicPartition, list[np.ndarray]] = defaultdict(list)
    names = ("kind", "topic", "partition", "first", "end", "rule", "text", "count")
    for batch in read_columns(uri, entry_paths(names)):
        rows = entry_columns(pa.Table.from_batches([batch]), names)
        _count_waiting(rows, waiting)
        codes = integers(pc.index_in(rows["kind"], pa.array(_KINDS, pa.string())))
        codes[(codes == _COMPLETED) & np.asarray(pc.equal(rows["text"], "dropped").fill_null(False))] += 1
        ends = np.asarray(pc.equal(rows["kind"], ENDED).fill_null(False))
        codes[ends] = DONE
        ends |= np.asarray(pc.equal(rows["text"], ENDED).fill_null(False))
        partitions, first, end = (integers(rows[name]) for name in ("partition", "first", "end"))
        counts = integers(rows["count"])
        for topic in rows["topic"].unique().to_pylist():
            of_topic = np.asarray(pc.equal(rows["topic"], topic).to_numpy())
            for partition in distinct(partitions[of_topic]).tolist():
                is_here = of_topic & (partitions == partition) & (codes >= 0)
                arrays = first[is_here], end[is_here], codes[is_here].astype(np.uint8)
                parts.setdefault((topic, partition), []).append(arrays)
                spans = zip(first[is_here & ends].tolist(), end[is_here & ends].tolist(), strict=True)
                ended[topic, partition] += [np.arange(*span) for span in spans]
                for name in COUNTED:
                    class_counts = counts[is_here & (codes == CLASSES.index(name))]
                    late = is_here & (codes == _COMPLETED + 1) if name == "dropped" else np.zeros(0)
                    _count(counted, ((topic, partition), name), class_counts, int(late.sum()))
    ended_arrays = {
        place: np.concatenate(arrays_of_place) for place, arrays_of_place in ended.items() if arrays_of_place
    }
    return _LedgerFile(
        {place: _sorted_entries(arrays_of_place) for place, arrays_of_place in parts.items()},
        ended_arrays,
        waiting,
        counted,
    )


def _count(
    counted: dict[tuple[TopicPartition, str], int | None],
    key: tuple[TopicPartition, str],
    counts: np.ndarray,
    extra: int,
) -> None:
    total = counted.get(key, 0)
    # An entry without a count is -1 here.
    counted[key] = None if total is None or (counts < 0).any() else total + int(counts.sum()) + extra


def _count_waiting(rows: pa.Table, pending_counts: Counter[tuple[str, str]]) -> None:
    changes = rows.filter(pc.is_in(rows["kind"], pa.array(["pending", "completed"])))
    for group in changes.group_by(["kind", "rule", "topic"]).aggregate([([], "count_all")]).to_pylist():
        sign = 1 if group["kind"] == "pending" else -1
        pending_counts[group["rule"], group["topic"]] += sign * group["count_all"]


def read_waiting(state: StagingState) -> pa.Table:
    """The records that are pending now: topic, partition, offset, rule, hash (null: a null join key, or none), row (the hash
    of the source row, null where the output is not held) and text (``lake.staging``), sorted. Raises DamagedFile."""
    pending: list[pa.Table] = []
    completed: list[pa.Table] = []
    names = ("kind", "topic", "partition", "first", "rule", "hash", "text", "row")
    for item in state.ledger_files:
        for batch in read_columns(state.uri(item), entry_paths(names)):
            rows = entry_columns(pa.Table.from_batches([batch]), names)
            pending.append(rows.filter(pc.equal(rows["kind"], "pending")).drop_columns("kind"))
            completed.append(
                rows.filter(pc.equal(rows["kind"], "completed")).drop_columns(["kind", "rule", "hash", "text", "row"])
            )
    if not pending:
        return pa.table({name: [] for name in ("topic", "partition", "offset", "rule", "hash", "text", "row")})
    places = ["topic", "partition", "first"]
    pending_rows = pa.concat_tables(pending).join(pa.concat_tables(completed), places, join_type="left anti")
    return pending_rows.sort_by([(name, "ascending") for name in places]).rename_columns(
        ["topic", "partition", "offset", "rule", "hash", "text", "row"]
    )


def null_key_records(state: StagingState, joins: Mapping[tuple[str, str], Rule]) -> int:
    """The number of records that are pending with a null join key. ``joins``: see ``Pipeline.joins_of``. Raises DamagedFile."""
    for item in state.ledger_files:
        rows = (pa.Table.from_batches([b]).flatten() for b in read_columns(state.uri(item), _PENDING_KEYS))
        if any(pc.any(_null_keys(table)).as_py() for table in rows):
            break
    else:
        return 0
    # A record may be completed since, and a record without a join key has no hash either.
    waiting = read_waiting(state)
    waiting = waiting.filter(pc.is_null(waiting["hash"])).select(["rule", "topic"]).to_pylist()
    keyed = {place for place, rule in joins.items() if rule.side(place[1]).keys}
    return sum((record["rule"], record["topic"]) in keyed for record in waiting)


_PENDING_KEYS = ["account.kind", "account.hash"]


def _null_keys(rows: pa.Table) -> pa.ChunkedArray:
    return pc.and_(pc.equal(rows["account.kind"], "pending"), pc.is_null(rows["account.hash"]))


@dataclass(frozen=True)
class Quarantined:
    """The quarantine of an input, within some ranges.

    ``records``: int64 rows (partition, offset) of the records that could not be decoded, sorted; ``lost``: accepted losses.
    Of the whole input: ``left_out``, int64 rows (partition, first, end) of what ingest left out, sorted; ``entries``, partition →
    the number of all other entries.
    """

    records: np.ndarray
    lost: tuple[OffsetRange, ...]
    left_out: np.ndarray
    entries: Mapping[int, int]

    def offsets(self, partition: int) -> np.ndarray:
        """The offsets of a partition's records, sorted."""
        return self.records[self.records[:, 0] == partition, 1]

    def left_out_records(self, partition: int) -> int:
        """The number of records that ingest left out, in a partition."""
        rows = self.left_out[self.left_out[:, 0] == partition]
        return int((rows[:, 2] - rows[:, 1]).sum())

    def leaves_out(self, partition: int, offset: int) -> bool:
        """Whether ingest left a record out."""
        rows = self.left_out[self.left_out[:, 0] == partition]
        return bool(((rows[:, 1] <= offset) & (offset < rows[:, 2])).any())

    def unexplained(self, partition: int, offsets: np.ndarray) -> np.ndarray:
        """Those offsets that lie in no accepted loss and that ingest did not leave out."""
        rows = self.left_out[self.left_out[:, 0] == partition]
        at = np.searchsorted(rows[:, 1], offsets, side="right") - 1
        keep = at < 0
        keep[~keep] = offsets[~keep] >= rows[at[~keep], 2]
        for part in self.lost:
            if part.partition == partition:
                keep &= (offsets < part.first) | (offsets >= part.end)
        return offsets[keep]


class _SideRows(NamedTuple):
    """Entries of the side table, as parallel arrays. ``ends``: of entries that stand for a range."""

    partitions: np.ndarray
    offsets: np.ndarray
    stages: np.ndarray
    ends: np.ndarray


def _side_rows(snapshot: Snapshot, topic: str, ranges: Sequence[OffsetRange] | None = None) -> Iterator[_SideRows]:
    """The entries that count of an input's side table, batch by batch: of every file, or of those that touch ``ranges``.
    Raises DamagedFile."""
    state, side = snapshot.raw(topic), snapshot.quarantine(topic)
    columns = ["kafka.partition", "kafka.offset", "stage", "end"]
    for item in quarantine_table.quarantine_files(state, side, check=False) if state and side else ():
        if side is None or (ranges is not None and not item.meets(ranges)):
            continue
        for batch in read_columns(storage.join(side.uri, item.path), columns):
            table = pa.Table.from_batches([batch]).flatten()
            partitions, offsets, ends = (integers(table[name]) for name in ("kafka.partition", "kafka.offset", "end"))
            yield _SideRows(partitions, offsets, np.asarray(table["stage"].to_pylist()), ends)


def read_quarantine(snapshot: Snapshot, topic: str, ranges: Sequence[OffsetRange]) -> Quarantined:
    """The quarantine of an input, within ``ranges``. Raises DamagedFile."""
    state = snapshot.raw(topic)
    replayed_offsets = raw.replay_offsets(state) if state else {}
    records: list[np.ndarray] = []
    lost_ranges: list[OffsetRange] = []
    entries: dict[int, int] = {}
    left_out: list[np.ndarray] = []
    for rows in _side_rows(snapshot, topic):
        partitions, offsets, ends = rows.partitions, rows.offsets, rows.ends
        losses, out = rows.stages == LOSS, rows.stages == DROPPED_STAGE
        counts = np.unique(partitions[~out], return_counts=True)
        for partition, count in zip(*(part.tolist() for part in counts), strict=True):
            entries[partition] = entries.get(partition, 0) + count
        spans = zip(partitions[losses].tolist(), offsets[losses].tolist(), ends[losses].tolist(), strict=True)
        lost_ranges += [span for span in starmap(OffsetRange, spans) if touches(span, ranges)]
        left_out.append(np.column_stack([partitions[out], offsets[out], ends[out]]))
        is_record = ~losses & ~out & inside(partitions, offsets, ranges)
        for partition, places in replayed_offsets.items():
            is_record &= (partitions != partition) | ~np.isin(offsets, places)
        records.append(np.column_stack([partitions[is_record], offsets[is_record]]))
    pairs = np.concatenate(records) if records else np.empty((0, 2), np.int64)
    spans_out = np.concatenate(left_out) if left_out else np.empty((0, 3), np.int64)
    return Quarantined(
        pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))],
        tuple(sorted(lost_ranges)),
        spans_out[np.lexsort((spans_out[:, 1], spans_out[:, 0]))],
        entries,
    )


def quarantined_offsets(snapshot: Snapshot, topic: str, ranges: Sequence[OffsetRange]) -> np.ndarray:
    """The offsets, sorted, of the records of ``ranges`` that could not be decoded. The ranges are of one partition.

    Reads only files with entries of the ranges. Raises DamagedFile.
    """
    arrays = [np.empty(0, np.int64)]
    for rows in _side_rows(snapshot, topic, ranges) if ranges else ():
        records = ~np.isin(rows.stages, RANGE_STAGES) & inside(rows.partitions, rows.offsets, ranges)
        arrays.append(rows.offsets[records])
    offsets = np.sort(np.concatenate(arrays))
    state = snapshot.raw(topic)
    if state is not None and len(offsets):
        replays = [item for item in raw.raw_files(state, ranges) if raw.is_replay(item)]
        replayed_offsets = FileOffsets(state.table.uri, replays).between(int(offsets[0]), int(offsets[-1]) + 1)
        offsets = difference(offsets, replayed_offsets)
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
