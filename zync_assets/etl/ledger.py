"""The waiting records in the ledger: their look-up by hash and by age, and the compaction of ledger files.

A batch appends a ledger file. Its commit never waits for history. The ledger has an entry for a record that becomes pending,
and often in a later file an entry ``completed``, when another record completes the first. Every COMPACTION_FILES batches, a
commit also replaces the small files by one: neighbouring ranges are merged, and completed records become ranges. It also merges
two large files if this shortens them by a quarter.

A search by age goes through large files a part at a time: memory holds what it finds, and not all records that wait.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.lake import staging, storage
from zync_assets.lake.log import DataFile
from zync_assets.lake.parquet_rows import RecentCache
from zync_assets.lake.staging import ACCOUNT_FOLDER, ACCOUNT_TYPE, StagingState

COMPACTION_FILES = 32
"""Ledger files in the table before a commit compacts them."""
SMALL_ENTRIES = 200_000
"""The most entries of a small file."""
COMPACTION_ENTRIES = 600_000
"""The most entries of small files that a commit compacts at once, in half a second and some 200 MB. The next batch compacts the
rest. Two large files may have twice as many entries."""
COMPACTION_GAIN = 0.75
"""The compaction of two large files is worth its cost if it leaves at most this share of their entries."""
_vain: RecentCache[frozenset[str], bool] = RecentCache(10_000)
"""The paths of two large files that are not worth a compaction. A ledger file never changes."""

_WAITING = ("pending", "completed")


def compact_ledger(state: StagingState, without: Collection[DataFile] = ()) -> tuple[list[DataFile], list[DataFile]]:
    """Files to add and files to remove so that the ledger is short; both empty while it is short enough.

    ``without``: files that the batch removes. The written file is invisible until a commit names it.
    """
    removed_paths = {item.path for item in without}
    files = [item for item in state.ledger_files if item.path not in removed_paths]
    small = [item for item in files if item.records <= SMALL_ENTRIES]
    if len(small) < COMPACTION_FILES:
        return [], []
    # The files of neighbouring batches are compacted together. A record that waits after a batch is mostly completed by one of
    # the next batches.
    small.sort(key=lambda item: item.path)
    reach = np.cumsum([item.records for item in small])
    compacted_files = small[: int(np.searchsorted(reach, COMPACTION_ENTRIES, side="right"))]
    added_files = [_write_entries(state, compacted(staging.read_entries(state, compacted_files)))]
    large = _large_pair(files)
    if large is not None:
        rows = compacted(staging.read_entries(state, large))
        if rows.num_rows <= COMPACTION_GAIN * sum(item.records for item in large):
            return [*added_files, _write_entries(state, rows)], [*compacted_files, *large]
        _vain.put(frozenset(item.path for item in large), True)
    return added_files, compacted_files


def _large_pair(files: Sequence[DataFile]) -> list[DataFile] | None:
    """Two large files that may be worth a compaction; None if no two are."""
    large = [item for item in files if item.records > SMALL_ENTRIES]
    for pair in combinations(sorted(large, key=lambda item: item.records), 2):
        if sum(item.records for item in pair) > 2 * COMPACTION_ENTRIES:
            continue
        if frozenset(item.path for item in pair) not in _vain:
            return list(pair)
    return None


def _write_entries(state: StagingState, rows: pa.Table) -> DataFile:
    # A name that a check of the table knows (``lake.tampering``), also in tables of earlier versions.
    path = f"{ACCOUNT_FOLDER}/folded-{uuid.uuid4().hex}.parquet"
    return staging.write_entries(state.table.uri, path, rows)


def compacted(rows: pa.Table) -> pa.Table:
    """The same facts in fewer ledger entries (columns of the account). Pending records come first, sorted by hash."""
    waiting_rows = rows.filter(pc.is_in(rows["kind"], pa.array(_WAITING, pa.string())))
    settled_rows = rows.filter(pc.invert(pc.is_in(rows["kind"], pa.array(_WAITING, pa.string()))))
    pending, completed = (waiting_rows.filter(pc.equal(waiting_rows["kind"], kind)) for kind in _WAITING)
    place = ["topic", "partition", "first"]
    numbered_rows = pending.append_column("at", pa.array(np.arange(pending.num_rows))).select([*place, "at"])
    joined_rows = numbered_rows.join(completed.select([*place, "text"]), place, join_type="inner").combine_chunks()
    places, classes = joined_rows["at"].combine_chunks(), pc.fill_null(joined_rows["text"], "done").combine_chunks()
    matched_rows = pending.take(places)
    open_pending = pending.filter(_mask(pending.num_rows, places)).sort_by("hash")
    # Their pending entry is in another file.
    open_completed = completed.join(pending.select(place), place, join_type="left anti").select(ACCOUNT_TYPE.names)
    now_done = matched_rows.set_column(matched_rows.schema.get_field_index("kind"), "kind", classes)
    with_text = settled_rows.filter(
        pc.is_valid(settled_rows["text"])
    )  # why a rule failed on this record: merging would lose it
    ranges = _with_merged_ranges(pa.concat_tables([settled_rows.filter(pc.is_null(settled_rows["text"])), now_done]))
    return pa.concat_tables([open_pending, open_completed, with_text, ranges])


def _mask(length: int, without: pa.Array) -> pa.Array:
    keep = np.ones(length, dtype=bool)
    keep[without.to_numpy(zero_copy_only=False)] = False
    return pa.array(keep)


def _with_merged_ranges(rows: pa.Table) -> pa.Table:
    """Account rows where touching ranges of the same class are merged into one range."""
    kinds = pa.table({item.name: pa.array([], item.type) for item in ACCOUNT_TYPE}).schema
    parts: list[pa.Table] = []
    keys = rows.group_by(["kind", "topic", "partition"]).aggregate([]).to_pylist()
    for key in keys:
        class_rows = rows.filter(
            pc.and_(
                pc.and_(pc.equal(rows["kind"], key["kind"]), pc.equal(rows["topic"], key["topic"])),
                pc.equal(rows["partition"], key["partition"]),
            )
        ).sort_by("first")
        first, end = (class_rows[name].to_numpy() for name in ("first", "end"))
        count = class_rows["count"].to_numpy(zero_copy_only=False)
        starts = np.flatnonzero(np.concatenate([[True], first[1:] != end[:-1]]))
        ends = np.append(starts[1:], len(first)) - 1
        size = len(starts)
        known_counts = np.add.reduceat(np.nan_to_num(count.astype(float)), starts).astype(np.int64)
        whole = np.logical_and.reduceat(~np.isnan(count.astype(float)), starts)
        columns: dict[str, pa.Array] = {
            "kind": pa.repeat(key["kind"], size),
            "topic": pa.repeat(key["topic"], size),
            "partition": pa.repeat(pa.scalar(key["partition"], pa.int32()), size),
            "first": pa.array(first[starts], pa.int64()),
            "end": pa.array(end[ends], pa.int64()),
            "count": pa.array(known_counts, pa.int64(), mask=~whole),
        }
        parts.append(
            pa.table({item.name: columns.get(item.name, pa.nulls(size, item.type)) for item in kinds}, schema=kinds)
        )
    return pa.concat_tables(parts) if parts else kinds.empty_table()


Hashes = npt.NDArray[np.int64]
"""Hashes of join keys."""
Rows = npt.NDArray[np.int64]
"""Hashes of source rows (see ``source_rows``)."""

LOOKUP_ENTRIES = 6_000_000
"""The most entries of a ledger that the driver searches in memory. An entry takes some 50 bytes."""

PLACE = ["topic", "partition", "first"]
_FIELDS = ["rule", *PLACE, "hash", "text", "row"]
_ENTRY = pa.schema([ACCOUNT_TYPE.field(name) for name in _FIELDS])
# Not by `empty_table`: the conversion of a list imports pandas.
NO_ENTRIES = pa.Table.from_arrays([pa.nulls(0, item.type) for item in _ENTRY], schema=_ENTRY)
"""No pending records."""
WANTED = pa.schema([("rule", pa.string()), ("topic", pa.string()), ("hash", pa.int64())])
"""The keys of a look-up. The look-up finds the pending records with the rule, the input topic and the hash of a key."""


@dataclass(frozen=True)
class _Index:
    """The pending records of a ledger file that have a hash of one kind. ``places``: their places in the file, in the order of
    ``hashes``, which is sorted."""

    hashes: Hashes
    places: npt.NDArray[np.int64]

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> _Index:
        places = np.flatnonzero(pc.is_valid(column).to_numpy())
        hashes = column.drop_null().to_numpy()
        order = np.argsort(hashes, kind="stable")
        return cls(hashes[order], places[order])

    def find(self, hashes: Hashes) -> pa.Array:
        """The places of the records with some hashes. ``hashes`` is sorted, each hash once."""
        if len(self.hashes) < len(hashes):
            at = np.minimum(np.searchsorted(hashes, self.hashes), len(hashes) - 1)
            return pa.array(self.places[hashes[at] == self.hashes])
        low, high = (np.searchsorted(self.hashes, hashes, side=side) for side in ("left", "right"))
        spans = zip(low[low < high].tolist(), high[low < high].tolist(), strict=True)
        return pa.array(self.places[[at for span in spans for at in range(*span)]], pa.int64())


@dataclass(frozen=True)
class _LedgerFile:
    """The entries of a ledger file that tell which records wait. A ledger file never changes.

    ``pending``: the fields of ``NO_ENTRIES``. ``completed``: the places (topic, partition, first) of records that wait no
    more. ``keys``: the pending records by the hash of the join key. ``rows``: by the source row.
    """

    pending: pa.Table
    completed: pa.Table
    keys: _Index
    rows: _Index

    @property
    def weight(self) -> int:
        return 1 + self.pending.num_rows + self.completed.num_rows


_files: RecentCache[str, _LedgerFile] = RecentCache(LOOKUP_ENTRIES)
"""Ledger file → its entries."""
_SCHEMAS = {"pending": NO_ENTRIES.schema, "completed": NO_ENTRIES.select(PLACE).schema}
_PART = 65_536
"""Entries of a large file in memory at once."""


def _ledger_files(state: StagingState) -> list[_LedgerFile]:
    """The entries of every ledger file; LakeError for a file that can't be read."""
    return [_ledger_file(state.uri(item)) for item in state.ledger_files]


def _ledger_file(uri: str) -> _LedgerFile:
    def read() -> _LedgerFile:
        rows = storage.read_file(uri, _columns("pending"))
        pending, completed = _entries(rows, "pending").combine_chunks(), _entries(rows, "completed")
        return _LedgerFile(pending, completed, _Index.of(pending["hash"]), _Index.of(pending["row"]))

    return _files.load(uri, read, lambda item: item.weight)


def _columns(kind: str) -> list[str]:
    """The columns of a ledger file that entries of a kind need."""
    return staging.entry_paths(["kind", *_SCHEMAS[kind].names])


def _entries(rows: pa.Table, kind: str) -> pa.Table:
    """The entries of a kind. ``rows``: of a ledger file, with the columns of its kind."""
    schema = _SCHEMAS[kind]
    entries = staging.entry_columns(rows, ["kind", *schema.names])
    return entries.filter(pc.equal(entries["kind"], kind)).select(schema.names).cast(schema)


def _parts(state: StagingState, kind: str) -> Iterator[pa.Table]:
    """The entries of a kind, a part of the ledger at a time; LakeError for a file that can't be read.

    Small files stay in memory for the next batch.
    """
    columns = _columns(kind)
    for item in state.ledger_files:
        uri = state.uri(item)
        ledger_file = _files.get(uri) if item.records > SMALL_ENTRIES else _ledger_file(uri)
        if ledger_file is not None:
            yield ledger_file.pending if kind == "pending" else ledger_file.completed
        else:
            for part in storage.read_parts(uri, _PART, columns):
                yield _entries(pa.Table.from_batches([part]), kind)


def _open_entries(pending: pa.Table, completed: Iterable[pa.Table]) -> pa.Table:
    """The pending entries of records that are not completed."""
    if not pending.num_rows:
        return pending
    firsts = np.unique(pending["first"].to_numpy())

    def candidates(item: pa.Table) -> pa.Table:
        offsets = item["first"].to_numpy()
        return item.filter(pa.array(firsts[np.minimum(np.searchsorted(firsts, offsets), len(firsts) - 1)] == offsets))

    completed_places = pa.concat_tables([NO_ENTRIES.select(PLACE), *map(candidates, completed)])
    return pending.join(completed_places, PLACE, join_type="left anti").select(pending.column_names)


def look_up(state: StagingState, lookup_keys: pa.Table) -> pa.Table | None:
    """The places (rule, topic, partition, first) of the pending records with one of the ``lookup_keys`` (rule, topic, hash).

    None where the ledger is too long for this. LakeError for a file that can't be read.
    """
    if sum(item.records for item in state.ledger_files) > LOOKUP_ENTRIES:
        return None
    files, hashes = _ledger_files(state), np.unique(lookup_keys["hash"].to_numpy())
    matches = [item.pending.take(item.keys.find(hashes)) for item in files] if len(hashes) else []
    matches = [
        rows.join(lookup_keys, ["rule", "topic", "hash"], join_type="left semi").select(_FIELDS) for rows in matches
    ]
    open_entries = _open_entries(pa.concat_tables([NO_ENTRIES, *matches]), [item.completed for item in files])
    return open_entries.select(["rule", *PLACE])


def search(state: StagingState, lookup_keys: pa.Table) -> pa.Table:
    """As ``look_up``, for a ledger of any length, a part of it at a time."""
    keys = ["rule", "topic", "hash"]
    matches = [
        pending.join(lookup_keys, keys, join_type="left semi").select(_FIELDS) for pending in _parts(state, "pending")
    ]
    open_entries = _open_entries(pa.concat_tables([NO_ENTRIES, *matches]), _parts(state, "completed"))
    return open_entries.select(["rule", *PLACE])


_NEXT = 1_000
"""The number of records to keep among the records that are not yet overdue, the oldest first. The oldest record that still
waits gives the time of the next look."""
_AGED = pa.schema([("rule", pa.string()), *map(NO_ENTRIES.schema.field, [*PLACE, "hash"]), ("since", pa.int64())])


def waiting_since(state: StagingState, rule: str, until: int) -> tuple[pa.Table, int | None]:
    """Returns the records that began to wait for a rule before ``until``, with the column ``since``. Also returns the time
    before which no other record began to wait.

    The times are milliseconds since the epoch. None if no other record waits since a known time.
    """
    late_parts, rest = [_AGED.empty_table()], _AGED.empty_table()
    for pending in _parts(state, "pending"):
        rule_entries = pending.filter(pc.equal(pending["rule"], rule))
        rule_entries = rule_entries.append_column("since", times_of(rule_entries["text"])).select(_AGED.names)
        late_parts.append(rule_entries.filter(pc.less(rule_entries["since"], until)))
        rest = pa.concat_tables([rest, rule_entries.filter(pc.greater_equal(rule_entries["since"], until))])
        rest = rest.take(pc.select_k_unstable(rest, min(_NEXT, rest.num_rows), [("since", "ascending")]))
    open_entries = _open_entries(pa.concat_tables([*late_parts, rest]), _parts(state, "completed"))
    others = open_entries.filter(pc.greater_equal(open_entries["since"], until))
    # Perhaps all of the oldest records are completed. No other record is older than they are.
    bound = pc.max(rest["since"]).as_py() if rest.num_rows == _NEXT else None
    return open_entries.filter(pc.less(open_entries["since"], until)), pc.min(
        others["since"]
    ).as_py() if others.num_rows else bound


def times_of(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """The times of pending entries, in milliseconds since the epoch. The text of an entry is a number if its rule has an expiry,
    and a timestamp if its rule looks up rows. Null for another text."""
    moments, numbers = (
        pc.if_else(pc.match_substring_regex(texts, form), texts, None)
        for form in (r"^\d{4}-\d\d-\d\dT.*Z?$", r"^-?\d+$")
    )
    return pc.coalesce(numbers.cast(pa.int64()), moments.cast(pa.timestamp("ms", "UTC")).cast(pa.int64()))


def present() -> int:
    """The time, in milliseconds since the epoch."""
    return int(time.time() * 1000)


def since_text() -> str:
    """The time as a pending entry has it. Texts of two times compare as the times do."""
    return datetime.fromtimestamp(present() / 1000, UTC).isoformat(timespec="milliseconds")


def time_of(text: str) -> int:
    """The time of a text (``since_text``), in milliseconds since the epoch."""
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def pending_in(state: StagingState, rows: Rows) -> pa.Table:
    """The pending records of source rows in the ledger: rule, topic, partition, first, hash, text, row. LakeError for a file
    that can't be read."""
    files, unique_rows = _ledger_files(state), np.unique(rows)
    matches = [item.pending.take(item.rows.find(unique_rows)) for item in files] if len(unique_rows) else []
    return _open_entries(pa.concat_tables([NO_ENTRIES, *matches]), [item.completed for item in files])


def rows_before(state: StagingState, single: Rows, completed: Rows, joining: Collection[str]) -> Rows:
    """The source rows in which pending records of earlier batches matter.

    They matter to the ``single`` rows, which have a record without a counterpart. Or they wait behind a record of the
    ``completed`` rows. ``joining``: the rules with counterparts.
    """
    entries = pending_in(state, np.union1d(single, completed))
    follows = pc.invert(pc.is_in(entries["rule"], pa.array(list(joining), pa.string())))
    return entries.filter(pc.or_(follows, pc.is_in(entries["row"], pa.array(single))))["row"].to_numpy()


def rows_at(state: StagingState, places: Collection[tuple[str, int, int]]) -> Rows:
    """The source rows of pending records in the ledger."""
    offsets = pa.array(sorted({offset for _, _, offset in places}), pa.int64())
    rows: list[int] = []
    for item in _ledger_files(state) if places else ():
        candidates = item.pending.filter(pc.is_in(item.pending["first"], offsets)).to_pylist()
        entries = [entry for entry in candidates if entry["row"] is not None]
        rows += [entry["row"] for entry in entries if (entry["topic"], entry["partition"], entry["first"]) in places]
    return np.array(rows, np.int64)
