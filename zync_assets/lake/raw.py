"""Raw tables: one a topic, and how far each partition of it has been ingested.

Progress is kept as Delta ``txn`` actions, which survive log clean-up:

    zync:next:<partition>    the next offset to ingest
    zync:first:<partition>   the offset where the first ingest of the partition began
    zync:bad:<partition>     how many records of it were quarantined, ever
    zync:left-out:<partition>  how many records of it were left out by an input's shape or as repeats, ever
    zync:began:<partition>   where the last batch that took offsets of it began
    zync:attempt:<partition> the last committed attempt at a batch that put records of it into ``quarantine_table``
    zync:records:<partition>  how many records of it were ingested, ever; replayed records do not count
    zync:time:<partition>    the highest time of all its records before the next offset, quarantined and left-out ones too,
                             in milliseconds since the epoch; tables of older versions lack it (``raw_files.highest_times``)
    zync:order-high:<partition>, zync:order-low:<partition>
                             the highest order of all its records before the next offset, in a table with a source order
    zync:mark:<partition>, zync:mark-digest:<partition>
                             the offset and the digest (``offsets.Mark``) of its last record before the next offset, quarantined
                             and left-out ones too; tables of older versions lack them
    zync:domain:<name>       how often the table's domain was set; the name with the highest number is the domain, and an
                             empty name means time order
    zync:kept:<partition>    below this offset retention (``upkeep``) removed the records, but not replayed records
    zync:removed:<partition>  the number of records that retention removed
    zync:reached:<partition>  the highest time of the removed records
    zync:partitions          the number of partitions that have the numbers above
    zync:schemas:<side>      the number of writer schemas, of keys or of values, that have the five numbers below
    zync:schema:<side>:<n>   the registry id of the n-th writer schema, in the order of arrival; -1: no id
    …:partition, …:offset    the first record with the writer schema
    …:digest                 a digest of the schema that has the id; tables of older versions lack it
    …:changes                1 if the writer schema's columns differ from the columns of the schemas before, else 0
    zync:replay              how many replays were committed: records that were in quarantine and are here now
    zync:topic:<topic id>    the topic that this table was made from (its version says nothing)

A replay adds files of its own, named ``replay-<its number>-…``. Their offsets lie between the offsets of the other files.
No offset is in two files. A record leaves quarantine when a replay file holds its offset; the side table keeps its entry.
One commit therefore moves the record: at no moment is it in both places or in neither. Replay files must keep their
names.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.crashes import crash_point
from zync_assets.errors import CommitConflict
from zync_assets.lake import storage, tables, tampering
from zync_assets.lake.log import DataFile, LakeTable, Order
from zync_assets.offsets import Mark, OffsetRange, normalize

ORDER = "order"
"""The column of a record's place in its source's order."""
_REPLAY = "replay-"
_DOMAIN = "zync:domain:"


@dataclass(frozen=True)
class WriterSchema:
    """A writer schema of a topic's keys or values, and the first record that came with it.

    ``id``: the registry's id; None for a format without schema ids. ``changes``: the schema adds or changes columns.
    ``digest``: of the schema, as ``codecs.avro.schema.digest``; None if it is not known.
    """

    side: str
    id: int | None
    partition: int
    offset: int
    changes: bool
    digest: int | None = None


@dataclass(frozen=True)
class RawState:
    """How far a topic has been ingested, as one version of its raw table says."""

    table: LakeTable = field(repr=False)
    first: Mapping[int, int]
    """Partition → the offset where its first ingest began."""
    next: Mapping[int, int]
    """Partition → the next offset to ingest."""
    bad: Mapping[int, int]
    """Partition → entries that were ever put into quarantine; replayed ones are among them."""
    replays: int = 0
    """How many replays were committed."""
    left_out: Mapping[int, int] = field(default_factory=dict)
    """Partition → records that were left out, ever: the input's shape excludes them, or they repeat earlier ones."""
    batch_start: Mapping[int, int] = field(default_factory=dict)
    """Partition → where its last batch began."""
    attempt: Mapping[int, int] = field(default_factory=dict)
    """Partition → the last committed attempt that put entries of it into the side table."""
    retention_start: Mapping[int, int] = field(default_factory=dict)
    """Partition → the first offset that retention left, for partitions with removed records."""
    retention_count: Mapping[int, int] = field(default_factory=dict)
    """Partition → records that retention removed, ever."""
    retention_time: Mapping[int, int] = field(default_factory=dict)
    """Partition → the highest time of the records that retention removed, in milliseconds since the epoch."""
    records: Mapping[int, int] = field(default_factory=dict)
    """Partition → records that were ever ingested, without replayed records. Tables of older versions may not have counted
    their first records."""
    times: Mapping[int, int] = field(default_factory=dict)
    """Partition → the highest time of all records before the next offset, milliseconds since the epoch, as the log has it;
    ``raw_files.highest_times`` is the whole answer."""
    orders: Mapping[int, Order] = field(default_factory=dict)
    """Partition → the highest order of all records before the next offset, where records have a source order."""
    marks: Mapping[int, Mark] = field(default_factory=dict)
    """Partition → its last record before the next offset. Another record there shows that the topic was truncated."""
    reader_schema: pa.Schema | None = field(default=None, repr=False, kw_only=True)
    """The table's columns and the fields that a reader asks for before any record has them; None: no reader asks for such a
    field."""
    with_ids: bool = field(default=False, kw_only=True)
    """Whether a reader of records wants the registry ids of their schemas, in ``kafka``."""
    with_order: bool = field(default=False, kw_only=True)
    """Whether a reader of records wants their source order too."""

    @property
    def schema(self) -> pa.Schema:
        """The columns of a record, for its readers. ``order`` is no part of the record."""
        return self.reader_schema or self._record_schema

    @cached_property
    def _record_schema(self) -> pa.Schema:
        columns = self.table.schema
        return columns.remove(columns.get_field_index(ORDER)) if self.has_order else columns

    @property
    def has_order(self) -> bool:
        """Whether the table has the column ``order``. Its older files may lack the column."""
        return ORDER in self.table.schema.names

    @cached_property
    def files(self) -> tuple[DataFile, ...]:
        """All files, sorted by partition and offset as numbers."""
        files = [item for item in self.table.files if item.partition is not None]
        return tuple(sorted(files, key=lambda item: (item.partition or 0, item.first or 0)))

    @cached_property
    def writers(self) -> tuple[WriterSchema, ...]:
        """The writer schemas that came, keys' before values', in the order in which they came."""
        writers: list[WriterSchema] = []
        for side in ("key", "value"):
            for index in range(self.table.number(f"zync:schemas:{side}") or 0):
                name = f"zync:schema:{side}:{index}"
                number = self.table.number(name)
                place = [self.table.number(f"{name}:{part}") or 0 for part in ("partition", "offset", "changes")]
                digest = self.table.numbers.get(f"{name}:digest")
                schema_id = None if number == -1 else number
                writers.append(WriterSchema(side, schema_id, place[0], place[1], bool(place[2]), digest))
        return tuple(writers)

    @cached_property
    def digests(self) -> dict[int, int]:
        """The registry's id of a writer schema → the schema's digest, where it is known."""
        return {item.id: item.digest for item in self.writers if item.id is not None and item.digest is not None}

    @cached_property
    def domain(self) -> str | None:
        """The name of the total order that the records' ``order`` belongs to; None for the order of time."""
        return self._domains[-1][1] or None if self._domains else None

    @cached_property
    def _domains(self) -> list[tuple[int, str]]:
        """Number and name of each domain that the table had, in that order."""
        domain_numbers = ((number, name) for name, number in self.table.numbers.items() if name.startswith(_DOMAIN))
        return sorted((number, name.removeprefix(_DOMAIN)) for number, name in domain_numbers)

    def domain_number(self, name: str | None) -> dict[str, int]:
        """The number that sets the table's domain to ``name`` (None: time order); empty where it is the domain already."""
        if name == self.domain:
            return {}
        return {f"{_DOMAIN}{name or ''}": self._domains[-1][0] + 1 if self._domains else 1}

    @property
    def table_id(self) -> str:
        """The Delta table id. A new table at the same place has another id."""
        return str(self.table.metadata.id)

    def is_from(self, topic_id: str) -> bool:
        return self.table.number(f"zync:topic:{topic_id}") is not None


def open_raw(lake: str, pool: str, topic: str) -> RawState | None:
    """The state of a raw table; None before the first ingest."""
    table = tables.open_table(storage.raw_uri(lake, pool, topic))
    return None if table is None else _state(table)


@lru_cache(64)
def _state(table: LakeTable) -> RawState:
    count = table.number("zync:partitions") or 0

    def of(name: str) -> dict[int, int]:
        numbers = ((p, table.numbers.get(f"zync:{name}:{p}")) for p in range(count))
        return {p: n for p, n in numbers if n is not None}

    bad_counts, replays = dict.fromkeys(range(count), 0) | of("bad"), table.number("zync:replay") or 0
    other_numbers = [
        of(name) for name in ("left-out", "began", "attempt", "kept", "removed", "reached", "records", "time")
    ]
    highs, lows = of("order-high"), of("order-low")
    orders = {partition: (high, lows[partition]) for partition, high in highs.items()}
    digests = of("mark-digest")
    marks = {partition: Mark(offset, digests[partition]) for partition, offset in of("mark").items()}
    return RawState(table, of("first"), of("next"), bad_counts, replays, *other_numbers, orders=orders, marks=marks)


def check_whole(state: RawState) -> None:
    """TableDamaged if another program changed the files of the table. Reads the log alone.

    The signs: a file without statistics, a record count other than ingested minus removed records, or a wrong checksum.
    """
    file_counts = Counter[int]()
    for item in state.table.files:
        if item.partition is None or item.first is None or item.last is None:
            raise tampering.damage(state.table, f"the Delta log has no statistics of file {item.path}")
        if not is_replay(item):
            file_counts[item.partition or 0] += item.records
    for partition, ingest_count in sorted(state.records.items()):
        expectation = ingest_count - state.retention_count.get(partition, 0)
        if file_counts[partition] != expectation:
            raise tampering.damage(
                state.table,
                f"it holds {file_counts[partition]} records of partition {partition}, and {expectation} were ingested",
            )
    tampering.check(state.table)


def raw_files(state: RawState, ranges: Iterable[OffsetRange] | None = None) -> list[DataFile]:
    """The files that hold an offset of ``ranges`` (all files if None), sorted by partition and offset as numbers."""
    if ranges is None:
        return list(state.files)
    spans = normalize(ranges)
    starts = [(part.partition, part.first) for part in spans]
    files: list[DataFile] = []
    for item in state.files:
        at = bisect_left(starts, (item.partition or 0, (item.last or 0) + 1))
        if at and spans[at - 1].partition == item.partition and (item.first or 0) < spans[at - 1].end:
            files.append(item)
    return files


def replay_name(number: int) -> str:
    """The prefix of the names of a replay's files."""
    return f"{_REPLAY}{number:08d}"


def is_replay(item: DataFile) -> bool:
    """Whether a replay wrote the file."""
    return item.path.startswith(_REPLAY)


def replay_offsets(state: RawState, since: int = 0) -> dict[int, npt.NDArray[np.int64]]:
    """Partition → the offsets, sorted, that replays after the ``since``-th brought. Reads one column of their files."""
    offsets: dict[int, list[npt.NDArray[np.int64]]] = {}
    for item in raw_files(state):
        if is_replay(item) and int(item.path.split("-")[1]) > since:
            offsets.setdefault(item.partition or 0, []).append(_offsets(state, item))
    return {partition: np.sort(np.concatenate(parts)) for partition, parts in offsets.items()}


def record_ranges(state: RawState, parts: Sequence[OffsetRange], release: int = 0) -> list[OffsetRange]:
    """The offsets of some ranges of one partition that the table has a record of, normalized.

    Only files with gaps are read: one column, a file at a time. Below ``release`` only replayed records count, because other
    records may be removed at any moment.
    """
    searched_ranges = normalize(parts)
    firsts, ends = (np.array([getattr(part, name) for part in searched_ranges], np.int64) for name in ("first", "end"))
    ranges: list[OffsetRange] = []
    for item in raw_files(state, searched_ranges):
        low, end = item.first or 0, (item.last or 0) + 1
        first = low if is_replay(item) else max(low, release)
        if first < end and item.records == end - low:
            near_ranges = searched_ranges[
                np.searchsorted(ends, first, side="right") : np.searchsorted(firsts, end, side="left")
            ]
            ranges += [OffsetRange(part.partition, max(part.first, first), min(part.end, end)) for part in near_ranges]
        elif first < end:
            offsets = _offsets(state, item)
            at = np.searchsorted(firsts, offsets, side="right") - 1
            ranges += runs(searched_ranges[0].partition, offsets[(first <= offsets) & (at >= 0) & (offsets < ends[at])])
    return normalize(ranges)


def runs(partition: int, offsets: npt.NDArray[np.int64]) -> list[OffsetRange]:
    """Sorted offsets as ranges."""
    if not len(offsets):
        return []
    breaks = np.flatnonzero(np.diff(offsets) != 1) + 1
    firsts, lasts = offsets[np.append(0, breaks)], offsets[np.append(breaks, len(offsets)) - 1]
    return [OffsetRange(partition, a, b + 1) for a, b in zip(firsts.tolist(), lasts.tolist(), strict=True)]


def _offsets(state: RawState, item: DataFile) -> npt.NDArray[np.int64]:
    table = storage.read_file(storage.join(state.table.uri, item.path), ["kafka.offset"])
    return table.flatten().column(0).to_numpy()


def commit_replay_files(
    before: RawState,
    schema: pa.Schema,
    files: Sequence[DataFile],
    writers: Sequence[WriterSchema],
    orders: Mapping[int, Order] | None = None,
) -> None:
    """Commit the files of a replay, made for number ``before.replays + 1``; ``writers``: the writer schemas that are new;
    ``orders``: partition → its highest order, where the replay raises it.

    Raises CommitConflict if another replay came first, or if ingest did, where orders rise; nothing of this replay is visible
    then.
    """
    old_writers = before.writers  # widening takes the opened table along
    table = tables.widen(before.table, schema)
    if table is not before.table and (
        (table.number("zync:replay") or 0) != before.replays
        or _count_writers(table) != len(old_writers)
        or (orders and _state(table).orders != before.orders)
    ):
        raise CommitConflict(f"table {table.uri}: another writer committed first; run again")
    numbers = _writer_numbers(before, writers) | _order_numbers(orders or {})
    tables.commit(table, files, {"zync:replay": before.replays + 1, **numbers})


@dataclass(frozen=True)
class RawAdvance:
    """The advance of a raw table by one ingest batch: the files of the batch, and the table's new numbers.

    ``first`` and ``next`` name offsets, by partition. The counts and times are by partition too.
    """

    topic: str
    topic_id: str
    schema: pa.Schema
    """The table's columns after the batch."""
    files: Sequence[DataFile]
    first: Mapping[int, int]
    """New partition → its first offset."""
    next: Mapping[int, int]
    """Partition → its next offset after the batch, where the batch changes it."""
    bad: Mapping[int, int] = field(default_factory=dict[int, int])
    """Partition → records of the batch in quarantine."""
    left_out: Mapping[int, int] = field(default_factory=dict[int, int])
    """Partition → records of the batch that the input's shape leaves out."""
    attempts: Mapping[int, int] = field(default_factory=dict[int, int])
    """Partition → the attempt whose files in the side table count from now on."""
    times: Mapping[int, int] = field(default_factory=dict[int, int])
    """Partition → the highest time of its records, in milliseconds since the epoch."""
    marks: Mapping[int, Mark] = field(default_factory=dict[int, Mark])
    """Partition → its last record, where the batch has one."""
    writers: Sequence[WriterSchema] = ()
    """The writer schemas that the batch brought first."""
    orders: Mapping[int, Order] = field(default_factory=dict[int, Order])
    """Partition → the highest order of its records, where records have a source order."""
    domain: str | None = None
    """The domain of the orders after the batch; None for the order of time."""


def commit_advance(uri: str, before: RawState | None, advance: RawAdvance) -> None:
    """Commit the files and next offsets of a batch together. ``before``: the state that the batch was planned on.

    Raises CommitConflict if another writer committed first; nothing of this batch is visible then.
    """
    numbers = _numbers(before, advance)
    if before is None:
        numbers[f"zync:topic:{advance.topic_id}"] = 0
        description = f"Kafka topic {advance.topic}, id {advance.topic_id}"
        tables.create_table(uri, advance.schema, description, advance.files, numbers)
        crash_point("ingest:table-created")
        return
    old_writers = before.writers  # widening takes the opened table along
    table = tables.widen(before.table, advance.schema)
    if table is not before.table:
        crash_point("ingest:columns-added")
        new_state = _state(table)
        if (new_state.next, new_state.first, new_state.writers) != (before.next, before.first, old_writers):
            raise CommitConflict(f"table {uri}: another writer committed first; run again")
    tables.commit(table, advance.files, numbers)
    crash_point("ingest:committed")


def _numbers(before: RawState | None, advance: RawAdvance) -> dict[str, int]:
    """Application id → number, for the commit of a batch."""

    def old_numbers(name: str) -> Mapping[int, int]:
        return getattr(before, name) if before else {}

    bad_counts, records, left_out, next_offsets = (
        old_numbers("bad"),
        old_numbers("records"),
        old_numbers("left_out"),
        old_numbers("next"),
    )
    starts = {**next_offsets, **advance.first}
    numbers = {f"zync:next:{p}": end for p, end in advance.next.items()}
    numbers |= {f"zync:first:{p}": start for p, start in advance.first.items()}
    if advance.first:
        numbers["zync:partitions"] = max([*advance.first, *old_numbers("first")]) + 1
    numbers |= {f"zync:bad:{p}": bad_counts.get(p, 0) + count for p, count in advance.bad.items() if count}
    numbers |= {f"zync:began:{p}": starts[p] for p in advance.next}
    numbers |= {f"zync:attempt:{p}": attempt for p, attempt in advance.attempts.items()}
    for partition in advance.next:
        # A table of an older version may lack the count.
        old_count = records.get(partition) if partition in next_offsets else 0
        if old_count is not None:
            new = sum(item.records for item in advance.files if item.partition == partition)
            numbers[f"zync:records:{partition}"] = old_count + new
    numbers |= {f"zync:time:{p}": time for p, time in advance.times.items() if p in advance.next}
    for partition, mark in advance.marks.items():
        numbers |= {f"zync:mark:{partition}": mark.offset, f"zync:mark-digest:{partition}": mark.digest}
    numbers |= _order_numbers({p: order for p, order in advance.orders.items() if p in advance.next})
    if before is not None:
        numbers |= before.domain_number(advance.domain)
    elif advance.domain is not None:
        numbers[f"{_DOMAIN}{advance.domain}"] = 1
    numbers |= _writer_numbers(before, advance.writers)
    numbers |= {f"zync:left-out:{p}": left_out.get(p, 0) + count for p, count in advance.left_out.items()}
    return numbers


def _order_numbers(orders: Mapping[int, Order]) -> dict[str, int]:
    parts = ((p, part) for p, pair in orders.items() for part in zip(("high", "low"), pair, strict=True))
    return {f"zync:order-{name}:{partition}": number for partition, (name, number) in parts}


def _count_writers(table: LakeTable) -> int:
    return sum(table.number(f"zync:schemas:{side}") or 0 for side in ("key", "value"))


def _writer_numbers(before: RawState | None, writers: Sequence[WriterSchema]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for side in ("key", "value"):
        have = sum(writer.side == side for writer in before.writers) if before else 0
        for index, item in enumerate([item for item in writers if item.side == side], have):
            name = f"zync:schema:{side}:{index}"
            numbers |= {name: -1 if item.id is None else item.id, f"{name}:changes": int(item.changes)}
            if item.digest is not None:
                numbers[f"{name}:digest"] = item.digest
            numbers |= {
                f"{name}:partition": item.partition,
                f"{name}:offset": item.offset,
                f"zync:schemas:{side}": index + 1,
            }
    return numbers
