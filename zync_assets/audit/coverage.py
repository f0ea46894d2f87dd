"""The coverage of raw records: by the files of a raw table, and by the account of a staging pool.

- The files of a raw table hold the offsets that the Delta log says, each once and in ascending order.
- The account of a staging pool agrees with its raw tables and with the sources of its outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from zync_assets.audit.account import (
    CLASSES,
    DONE,
    EXPIRED,
    PENDING,
    Counted,
    LedgerEntries,
    quarantined_offsets,
    read_account,
    touches,
)
from zync_assets.codecs.arrays import pc
from zync_assets.lake import raw, storage, tampering
from zync_assets.lake.check_results import Number
from zync_assets.lake.head import Position
from zync_assets.lake.log import DataFile
from zync_assets.lake.parquet_rows import (
    DamagedFile,
    FileOffsets,
    difference,
    distinct,
    integers,
    positions,
    read_columns,
)
from zync_assets.lake.raw import RawState
from zync_assets.lake.snapshot import Snapshot
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange, normalize

MONOTONIC = "monotonic_offsets"
"""The check of a raw table that reports these problems."""


def log_problems(state: RawState, files: Sequence[DataFile]) -> Iterator[str]:
    """What is wrong with some files of a raw table, by the log alone. ``files``: sorted by partition and offset."""
    for prior, item in pairwise([item for item in files if not raw.is_replay(item)]):
        if prior.partition == item.partition and (item.first or 0) <= (prior.last or 0):
            yield (f"files {prior.path} and {item.path} of partition {item.partition} overlap at offset {item.first}")
    for partition, end in state.next.items():
        if end < state.first.get(partition, 0):
            yield f"partition {partition}: next offset {end} is below the first, {state.first[partition]}"
    for item in files:
        low, end = state.first.get(item.partition or 0, 0), state.next.get(item.partition or 0, 0)
        if not raw.is_replay(item):
            low = max(low, state.retention_start.get(item.partition or 0, 0))
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


CHUNK = 1_000_000
"""Offsets in a chunk."""


class Marks:
    """Marked offsets per topic and partition, and the offsets that were marked twice. An offset takes a byte of a chunk, and the
    first mark in a chunk makes the chunk."""

    def __init__(self, rows: frozenset[str] = frozenset()) -> None:
        """``rows``: topics whose records may make any number of outputs."""
        self.rows = rows
        self.doubled: list[tuple[str, int, int]] = []
        """(topic, partition, offset) of offsets that were marked again."""
        self.count = 0
        """Marks that were set, without doubles."""
        self._chunks: dict[tuple[str, int], dict[int, np.ndarray]] = {}

    def add(self, topic: str, partition: int, offsets: np.ndarray) -> None:
        """Mark some offsets, in any order."""
        unique, times = np.unique(offsets, return_counts=True)
        self._note(topic, partition, unique[times > 1])
        chunks = self._chunks.setdefault((topic, partition), {})
        for number in distinct(unique // CHUNK).tolist():
            chunk = chunks.setdefault(number, np.zeros(CHUNK, dtype=bool))
            places = unique[unique // CHUNK == number] - number * CHUNK
            is_marked = chunk[places]
            self._note(topic, partition, places[is_marked] + number * CHUNK)
            chunk[places] = True
            self.count += int((~is_marked).sum())

    def between(self, topic: str, partition: int, first: int, end: int) -> np.ndarray:
        """The marked offsets with ``first <= offset < end``, sorted."""
        parts = [np.empty(0, np.int64)]
        for number, chunk in sorted(self._chunks.get((topic, partition), {}).items()):
            base = number * CHUNK
            if base < end and first < base + CHUNK:
                parts.append(np.flatnonzero(chunk) + base)
        offsets = np.concatenate(parts)
        return offsets[(offsets >= first) & (offsets < end)]

    def places(self) -> Iterator[tuple[str, int]]:
        """Topic and partition of all marks, sorted."""
        yield from sorted(self._chunks)

    def chunks(self, topic: str, partition: int) -> Set[int]:
        """The numbers of the chunks that hold a mark."""
        return self._chunks.get((topic, partition), {}).keys()

    def _note(self, topic: str, partition: int, offsets: np.ndarray) -> None:
        if topic in self.rows:
            return
        # A few doubles show the place. There could be as many doubles as records.
        self.doubled += [(topic, partition, offset) for offset in offsets[: max(0, 100 - len(self.doubled))].tolist()]


Ranges = Mapping[str, Sequence[OffsetRange]]


def problems(
    snapshot: Snapshot, state: StagingState, ranges: Ranges | None, numbers: dict[str, Number]
) -> Iterator[str]:
    """The problems of the account, the worst first within a partition. Fills ``numbers``. Raises DamagedFile."""
    # A check of one batch repeats often, and may use cached files. A check of the whole account reads the present files.
    entries, waiting, entry_counts = read_account(state, cached=ranges is not None)
    for place in sorted({*entries, *state.head.inputs}):
        yield from _ledger_problems(place, entries.get(place), state.head.inputs.get(place))
    heads = Counter({place: count for place, count in state.head.waiting.items() if count})
    for rule, topic in sorted((heads - waiting) | (waiting - heads)):
        yield (
            f"rule {rule}: {heads[rule, topic]} records of {topic} were counted as pending,"
            f" and the ledger has {waiting[rule, topic]}"
        )
    if ranges is not None:
        yield from _count_problems(state, entry_counts)
    if (strange := tampering.strange_file(state.table, state.files)) is not None:
        yield strange
    marks, matches = Marks(state.head.table_topics | state.head.several), _matches(snapshot, state)
    yield from _read_sources(state, ranges, marks, matches, numbers)
    for topic, partition, offset in marks.doubled[:1]:
        yield f"{topic} {partition}:{offset} made more than one output"
    for rule, topic, partition, offset in matches.doubled[:1]:
        yield f"{topic} {partition}:{offset} made the outputs of a match of rule {rule} more than once"
    for topic, partition in marks.places():
        if (topic, partition) not in entries:
            yield f"outputs were made of {topic}, partition {partition}, which is not in the account"
    totals: Counter[str] = Counter()
    for (topic, partition), place_entries in entries.items():
        position = state.head.inputs.get((topic, partition))
        if position is None or topic not in {item.topic for item in snapshot.pipeline.inputs}:
            continue
        part = _InputPartition(snapshot, state, topic, partition, position, place_entries, marks)
        yield from part.problems(None if ranges is None else ranges.get(topic, ()), ranges is None, totals)
    numbers["sources"] = marks.count
    numbers |= {name: totals[name] for name in CLASSES if totals[name]}


def _count_problems(state: StagingState, entry_counts: Counted) -> Iterator[str]:
    """A class that was changed in the ledger, in whatever batch, is found without a look at a record."""
    for (place, name), entries in sorted(entry_counts.items()):
        head = state.head.counts.get((*place, name), 0)
        if entries is not None and entries != head:
            yield (
                f"{place[0]}, partition {place[1]}: {head} records were counted as {name}, and the ledger's entries have"
                f" {entries}"
            )


def _ledger_problems(place: tuple[str, int], entries: LedgerEntries | None, position: Position | None) -> Iterator[str]:
    name = f"{place[0]}, partition {place[1]}"
    if position is None:
        yield f"{name}: the ledger has entries and the account no position"
    elif entries is None:
        if position.seen > position.first:
            yield f"{name}: offsets {position.first} to {position.seen - 1} are in no class of the account"
    else:
        yield from (f"{name}: {text}" for text in entries.problems(position.first, position.seen))


@dataclass(frozen=True)
class Matches:
    """The sources of outputs whose rules make several of a match, each rule, topic and partition by itself.

    The outputs of a match lie side by side in a file: a record that is the first source of outputs elsewhere made them twice.
    ``topics``: the inputs of such rules; ``outs``: the output topics; ``sizes``: rule → the most sources of a match, as against a
    merged output."""

    topics: Sequence[str]
    outs: frozenset[str]
    sizes: Mapping[str, int]
    marks: dict[tuple[str, str, int], Marks]

    @property
    def doubled(self) -> list[tuple[str, str, int, int]]:
        """(rule, topic, partition, offset)"""
        return [(place[0], *double) for place, marks in sorted(self.marks.items()) for double in marks.doubled]

    def add(self, out: str, partition: int, rules: pa.Array, sources: pa.ListArray, last: dict[str, list[int]]) -> None:
        """Mark some outputs of a file. ``last``: rule → the first source of its last output in the file."""
        rows = pc.greater(pc.list_value_length(sources), 0)
        rules, sources = rules.filter(rows), sources.filter(rows)
        sizes = integers(pc.list_value_length(sources))
        topics, parts, offsets = sources.flatten().flatten()
        firsts = pa.array(np.cumsum(sizes) - sizes)
        code = integers(pc.index_in(topics.take(firsts), pa.array(self.topics, pa.string())))
        first_sources = np.column_stack([code, integers(parts.take(firsts)), integers(offsets.take(firsts))])
        for rule in rules.unique().to_pylist():
            is_known = (code >= 0) & (sizes <= self.sizes.get(rule, 0))
            at = np.flatnonzero(is_known & np.asarray(pc.equal(rules, rule).to_numpy(zero_copy_only=False)))
            if not len(at):
                continue
            previous = np.vstack([last.get(rule, [-1, -1, -1]), first_sources[at[:-1]]])
            last[rule] = first_sources[at[-1]].tolist()
            begins = sources.take(pa.array(at[(first_sources[at] != previous).any(axis=1)]))
            _mark(begins.flatten(), self.marks.setdefault((rule, out, partition), Marks()))


def _matches(snapshot: Snapshot, state: StagingState) -> Matches:
    outs = frozenset(item.topic for item in snapshot.pipeline.outputs if not item.coalesce)
    sizes = {rule.name: len(rule.sides) if rule.group is None else 1 << 62 for rule in snapshot.pipeline.rules}
    return Matches(sorted(state.head.several - state.head.table_topics), outs, sizes, {})


def _read_sources(
    state: StagingState, ranges: Ranges | None, marks: Marks, matches: Matches, numbers: dict[str, Number]
) -> Iterator[str]:
    outputs = 0
    for name in sorted({topic for topic, _ in state.head.outputs}):
        for item in state.output_files(name):
            if ranges is not None and not item.meets(ranges.get(name, ())):
                continue
            outputs += item.records
            rebuilt = state.head.rebuilt.get((name, item.partition or 0), 0)
            is_whole, last_sources = rebuilt <= (item.first or 0), dict[str, list[int]]()
            several = bool(matches.topics) and name in matches.outs
            columns = ["source", *([] if is_whole else ["kafka.offset"]), *(["rule"] if several else [])]
            for batch in read_columns(state.uri(item), columns):
                column = batch.column("source")
                if pc.any(pc.fill_null(pc.equal(pc.list_value_length(column), 0), True)).as_py():
                    yield f"file {item.path} holds an output that no input made"
                if not is_whole:
                    # The outputs of a rebuild, and those before, are not of the present account.
                    batch = batch.filter(pc.greater_equal(batch.column("kafka").field("offset"), rebuilt))
                    column = batch.column("source")
                _mark(column.flatten(), marks)
                if several and len(batch):
                    matches.add(name, item.partition or 0, batch.column("rule"), column, last_sources)
    numbers["outputs"] = outputs


def _mark(sources: pa.StructArray, marks: Marks) -> None:
    topics, partitions, offsets = sources.flatten()
    parts, places = integers(partitions), integers(offsets)
    for topic in topics.unique().to_pylist():
        of_topic = np.asarray(pc.equal(topics, topic).to_numpy(zero_copy_only=False))
        for partition in distinct(parts[of_topic]).tolist():
            marks.add(topic, partition, places[of_topic & (parts == partition)])


@dataclass(frozen=True)
class _InputPartition:
    """One input partition: its ledger entries, its raw records, and the records' outputs."""

    snapshot: Snapshot
    state: StagingState
    topic: str
    partition: int
    position: Position
    entries: LedgerEntries
    marks: Marks

    def problems(self, batch: Sequence[OffsetRange] | None, is_whole: bool, totals: Counter[str]) -> Iterator[str]:
        name = f"{self.topic}, partition {self.partition}"
        pool = self.snapshot.pipeline.input(self.topic).pool
        table = self.snapshot.raw(self.topic)
        next_offset = 0 if table is None else table.next.get(self.partition, 0)
        if table is None or self.position.seen > next_offset:
            yield f"{name}: seen is {self.position.seen}, past the next offset {next_offset} of {pool}.{self.topic}"
            return
        if self.position.table not in (None, table.table_id):
            yield f"{name}: the account is of another raw table than {table.table.uri}, which was made since"
            return
        retention_start = table.retention_start.get(self.partition, 0)
        if self.position.seen < retention_start:
            yield f"{name}: seen is {self.position.seen}, and retention removed all below offset {retention_start}"
            return
        low = table.first.get(self.partition, -1)
        # A pool that came after retention removed something begins where the raw pool began then.
        if self.position.first != low and not low < self.position.first <= retention_start:
            yield (f"{name}: the account begins at offset {self.position.first}, {pool}.{self.topic} at {low}")
        for first, end in ((0, self.position.first), (self.position.seen, 1 << 62)):
            for offset in self.marks.between(self.topic, self.partition, first, end)[:1]:
                yield f"{name}: offset {offset} made an output and is outside of what the account covers"
        span = OffsetRange(self.partition, self.position.first, self.position.seen)
        raw_offsets = FileOffsets(table.table.uri, raw.raw_files(table, [span]))
        windows = list(self._windows(batch, is_whole, retention_start))
        parts = normalize(OffsetRange(self.partition, first, end) for first, end in windows)
        aside = quarantined_offsets(self.snapshot, self.topic, parts)
        counts = np.zeros(len(CLASSES), np.int64)
        kinds: set[str] = set()
        present = 0
        for first, end in windows:
            quarantined = aside[(aside >= first) & (aside < end)]
            existing = distinct(np.concatenate([raw_offsets.between(first, end), quarantined]))
            present += len(existing)
            if end <= retention_start:
                # Retention removed the records. The outputs' sources, and the ended records, show which records existed.
                ended = self.entries.ended[(self.entries.ended >= first) & (self.entries.ended < end)]
                marks = self.marks.between(self.topic, self.partition, first, end)
                existing = distinct(np.concatenate([existing, marks, ended]))
            classes = self.entries.classes(existing)
            counts += np.bincount(classes[classes < len(CLASSES)], minlength=len(CLASSES))
            for kind, text in self._window_problems(first, end, existing, classes, quarantined, batch):
                if kind not in kinds:
                    kinds.add(kind)
                    yield f"{name}: {text}"
        # Expired records are in no raw file any more; the ledger's ranges of them have no gaps.
        counts[EXPIRED] = self.entries.offsets_in(EXPIRED)
        if is_whole:
            retention_count = None
            if self.position.first < retention_start:
                counts = self._with_retention(counts)
                # A pool that was added later saw an unknown part of the removed records.
                retention_count = table.retention_count.get(self.partition, 0) if self.position.first == low else None
            yield from (f"{name}: {text}" for text in self._counter_problems(counts))
            if retention_count is not None and self.position.records != retention_count + present:
                yield (
                    f"{name}: {self.position.records} records were counted below seen; {present} are there, and retention"
                    f" removed {retention_count}"
                )
        totals.update(dict(zip(CLASSES, counts.tolist(), strict=True)))

    def _with_retention(self, counts: np.ndarray) -> np.ndarray:
        """The counts of classes where retention removed records that made no output: the account's counters are believed."""
        # Of a record that was done at a rebuild, or became a row of a view's table, perhaps no output tells.
        totals, head = counts.copy(), self.state.head
        is_silent = (self.topic, self.partition) in head.rebuilt or self.topic in head.table_topics
        for name in ("unmatched", "dropped", *(["done"] if is_silent else [])):
            code = CLASSES.index(name)
            head_count = head.counts.get((self.topic, self.partition, name), 0)
            totals[code] = max(head_count, counts[code])
        return totals

    def _windows(
        self, batch: Sequence[OffsetRange] | None, whole: bool, retention_start: int
    ) -> Iterator[tuple[int, int]]:
        """Spans of a chunk's size at the most, none of which reaches over ``retention_start``. They have all offsets, or those
        from the first to the last of the batch's offsets and of its outputs' sources in the chunk."""
        low, high = self.position.first, self.position.seen
        for base in range(low - low % CHUNK, high, CHUNK):
            least, most = base, base + CHUNK
            if not whole:
                parts = [part for part in batch or () if touches(OffsetRange(self.partition, least, most), [part])]
                if not parts and base // CHUNK not in self.marks.chunks(self.topic, self.partition):
                    continue
                sources = self.marks.between(self.topic, self.partition, least, most)
                least = max(least, min([*(part.first for part in parts), *sources[:1].tolist()]))
                most = min(most, max([*(part.end for part in parts), *(sources[-1:] + 1).tolist()]))
            for first, end in ((least, min(most, retention_start)), (max(least, retention_start), most)):
                if max(first, low) < min(end, high):
                    yield max(first, low), min(end, high)

    def _window_problems(
        self,
        first: int,
        end: int,
        existing: np.ndarray,
        classes: np.ndarray,
        quarantined: np.ndarray,
        batch: Sequence[OffsetRange] | None,
    ) -> Iterator[tuple[str, str]]:
        sources = self.marks.between(self.topic, self.partition, first, end)
        done_offsets = existing[classes == DONE]
        wrong_offsets = np.setdiff1d(sources, done_offsets, assume_unique=True)
        if len(wrong_offsets):
            code = self.entries.classes(wrong_offsets[:1])[0]
            fate = "done and not in the raw pool" if code == DONE else _class_name(code)
            yield "made", f"offset {wrong_offsets[0]} made an output and is {fate}"
        idle = difference(np.setdiff1d(done_offsets, sources, assume_unique=True), self.entries.ended)
        idle = idle[idle >= self.state.head.rebuilt.get((self.topic, self.partition), 0)]
        if self.topic in self.state.head.table_topics:
            # A record that becomes a row of a view's table need not change the view's result.
            idle = idle[:0]
        if batch is not None:
            # Of an earlier batch's new records, and of those completed since, the outputs were not looked at.
            keep = np.zeros(len(idle), dtype=bool)
            for part in batch:
                keep |= (part.partition == self.partition) & (idle >= part.first) & (idle < part.end)
            idle = difference(idle[keep], self.entries.completed)
        if len(idle):
            yield "idle", f"offset {idle[0]} is done and made no output"
        waiting = self.entries.waiting
        missing_offsets = difference(waiting[(waiting >= first) & (waiting < end)], existing[classes == PENDING])
        if len(missing_offsets):
            yield "missing", f"offset {missing_offsets[0]} is pending and not in the raw pool"
        codes = self.entries.classes(quarantined)
        aside = (CLASSES.index("quarantined"), CLASSES.index("dropped"))  # dropped: given up by hand
        strays = quarantined[~np.isin(codes, aside)]
        if len(strays):
            code = self.entries.classes(strays[:1])[0]
            yield "undecoded", f"offset {strays[0]} is in quarantine and the account says {_class_name(code)}"

    def _counter_problems(self, counts: np.ndarray) -> Iterator[str]:
        for name, count in zip(CLASSES, counts.tolist(), strict=True):
            head_count = self.state.head.counts.get((self.topic, self.partition, name), 0)
            if head_count != count:
                yield f"{head_count} records were counted as {name}, and {count} are"
        if self.position.records != int(counts.sum()):
            yield f"{self.position.records} records were counted below seen, and {int(counts.sum())} are there"


def _class_name(code: int) -> str:
    return CLASSES[code] if code < len(CLASSES) else "in no class"
