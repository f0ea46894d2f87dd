"""Pending records in the ledger: their look-up by the hash of the join key, and the fold of ledger files.

A batch appends a ledger file, so that its commit never waits for history. The ledger has an entry for a record that becomes
pending, and an entry ``completed`` when another record completes it, often in a later file. Every FOLD_FILES batches, a commit
also replaces the small files by one: neighbouring ranges are merged, and completed records become ranges. A fold also merges two
large files if this shortens them by a quarter.

A batch looks up the pending records of all rules once, however often the batch is tried. Most batches of a close sequence find
no pending record, and go on without pending records.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.spark_types import listed_frame
from zync_assets.etl.hold import NO_HOLD, Place
from zync_assets.etl.plan import EtlBatch
from zync_assets.etl.retries import is_in, spans_of
from zync_assets.etl.rules.kind import RuleRecords, union
from zync_assets.lake import staging, storage
from zync_assets.lake.log import DataFile
from zync_assets.lake.parquet_rows import RecentCache
from zync_assets.lake.staging import ACCOUNT_FOLDER, ACCOUNT_TYPE, StagingState
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Rule
from zync_assets.spark import frames
from zync_assets.spark.failures import ignore_release_errors
from zync_assets.spark.sql import text_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FOLD_FILES = 32
"""Ledger files in the table before a commit folds them."""
FOLD_SMALL_ENTRIES = 200_000
"""Entries of a file up to which it takes part."""
FOLD_ENTRIES = 600_000
"""Entries that are folded at once, in half a second and some 200 MB; what is left is folded with the next batch. Of two large
files twice as many."""
FOLD_GAIN = 0.75
"""Share of its entries that two large files keep, at the most, to be replaced."""
_vain: RecentCache[frozenset[str], bool] = RecentCache(10_000)
"""The paths of two large files that are not worth a fold. A ledger file never changes."""

_WAITING = ("pending", "completed")


def fold_ledger(state: StagingState, without: Collection[DataFile] = ()) -> tuple[list[DataFile], list[DataFile]]:
    """Files to add and files to remove so that the ledger is short; both empty while it is short enough.

    ``without``: files that the batch removes. The written file is invisible until a commit names it.
    """
    gone = {item.path for item in without}
    files = [item for item in state.ledger_files if item.path not in gone]
    small = [item for item in files if item.records <= FOLD_SMALL_ENTRIES]
    if len(small) < FOLD_FILES:
        return [], []
    # Batches in their order: what waits in one is most often completed in one of the next.
    small.sort(key=lambda item: item.path)
    reach = np.cumsum([item.records for item in small])
    chosen = small[: int(np.searchsorted(reach, FOLD_ENTRIES, side="right"))]
    added = [_written(state, fold(staging.read_entries(state, chosen)))]
    large = _large_pair(files)
    if large is not None:
        rows = fold(staging.read_entries(state, large))
        if rows.num_rows <= FOLD_GAIN * sum(item.records for item in large):
            return [*added, _written(state, rows)], [*chosen, *large]
        _vain.put(frozenset(item.path for item in large), True)
    return added, chosen


def _large_pair(files: Sequence[DataFile]) -> list[DataFile] | None:
    """Two large files that may be worth a fold; None if no two are."""
    large = [item for item in files if item.records > FOLD_SMALL_ENTRIES]
    for pair in combinations(sorted(large, key=lambda item: item.records), 2):
        if sum(item.records for item in pair) > 2 * FOLD_ENTRIES:
            continue
        if frozenset(item.path for item in pair) not in _vain:
            return list(pair)
    return None


def _written(state: StagingState, rows: pa.Table) -> DataFile:
    path = f"{ACCOUNT_FOLDER}/folded-{uuid.uuid4().hex}.parquet"
    return staging.write_entries(state.table.uri, path, rows)


def fold(rows: pa.Table) -> pa.Table:
    """The same facts in fewer ledger entries (columns of the account). Pending records come first, sorted by hash."""
    waiting = rows.filter(pc.is_in(rows["kind"], pa.array(_WAITING, pa.string())))
    settled = rows.filter(pc.invert(pc.is_in(rows["kind"], pa.array(_WAITING, pa.string()))))
    pending, completed = (waiting.filter(pc.equal(waiting["kind"], kind)) for kind in _WAITING)
    place = ["topic", "partition", "first"]
    numbered = pending.append_column("at", pa.array(np.arange(pending.num_rows))).select([*place, "at"])
    joined = numbered.join(completed.select([*place, "text"]), place, join_type="inner").combine_chunks()
    places, classes = joined["at"].combine_chunks(), pc.fill_null(joined["text"], "done").combine_chunks()
    done = pending.take(places)
    open_pending = pending.filter(_mask(pending.num_rows, places)).sort_by("hash")
    # Their pending entry is in another file.
    open_completed = completed.join(pending.select(place), place, join_type="left anti").select(ACCOUNT_TYPE.names)
    now_done = done.set_column(done.schema.get_field_index("kind"), "kind", classes)
    with_text = settled.filter(pc.is_valid(settled["text"]))  # why a rule failed on this record: merging would lose it
    ranges = _merged(pa.concat_tables([settled.filter(pc.is_null(settled["text"])), now_done]))
    return pa.concat_tables([open_pending, open_completed, with_text, ranges])


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


Hashes = npt.NDArray[np.int64]
"""Hashes of join keys."""
Rows = npt.NDArray[np.int64]
"""Hashes of source rows (see ``source_rows``)."""

LOOKUP_ENTRIES = 6_000_000
"""Entries of a ledger that is looked up here; they take some 50 bytes each."""

_PLACE = ["topic", "partition", "first"]
_FIELDS = ["rule", *_PLACE, "hash", "text", "row"]
NO_ENTRIES = pa.schema([ACCOUNT_TYPE.field(name) for name in _FIELDS]).empty_table()
"""No pending records."""
WANTED = pa.schema([("rule", pa.string()), ("topic", pa.string()), ("hash", pa.int64())])
"""What is looked up."""


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

    def find(self, wanted: Hashes) -> pa.Array:
        """The places of the records with some hashes. ``wanted`` is sorted, each hash once."""
        if len(self.hashes) < len(wanted):
            at = np.minimum(np.searchsorted(wanted, self.hashes), len(wanted) - 1)
            return pa.array(self.places[wanted[at] == self.hashes])
        low, high = (np.searchsorted(self.hashes, wanted, side=side) for side in ("left", "right"))
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


def _ledger_files(state: StagingState) -> list[_LedgerFile]:
    """The entries of every ledger file; LakeError for a file that can't be read."""
    uris = [state.uri(item) for item in state.ledger_files]
    return [_files.load(uri, lambda uri=uri: _read(uri), lambda item: item.weight) for uri in uris]


def _read(uri: str) -> _LedgerFile:
    names = ["kind", *_FIELDS]
    entries = storage.read_file(uri, [f"account.{name}" for name in names]).flatten()
    entries = entries.rename_columns([name.removeprefix("account.") for name in entries.column_names])
    if "row" not in entries.column_names:
        # A file of an older version has no source rows.
        entries = entries.append_column("row", pa.nulls(entries.num_rows, pa.int64()))
    pending = entries.filter(pc.equal(entries["kind"], "pending")).select(_FIELDS).cast(NO_ENTRIES.schema)
    pending = pending.combine_chunks()
    completed = entries.filter(pc.equal(entries["kind"], "completed")).select(_PLACE)
    completed = completed.cast(NO_ENTRIES.select(_PLACE).schema)
    return _LedgerFile(pending, completed, _Index.of(pending["hash"]), _Index.of(pending["row"]))


def _waiting(entries: Sequence[pa.Table], files: Sequence[_LedgerFile]) -> pa.Table:
    """Those of the pending entries that no file of the ledger completes."""
    found = pa.concat_tables([NO_ENTRIES, *entries])
    if not found.num_rows:
        return found
    firsts = found["first"].combine_chunks()
    done = [item.completed.filter(pc.is_in(item.completed["first"], firsts)) for item in files]
    return found.join(pa.concat_tables(done), _PLACE, join_type="left anti").select(_FIELDS)


def look_up(state: StagingState, wanted: pa.Table) -> pa.Table | None:
    """The places (rule, topic, partition, first) of what waits and has one of the ``wanted`` rules, topics and hashes.

    None where the ledger is too long for this. LakeError for a file that can't be read.
    """
    if sum(item.records for item in state.ledger_files) > LOOKUP_ENTRIES:
        return None
    files, hashes = _ledger_files(state), np.unique(wanted["hash"].to_numpy())
    found = [item.pending.take(item.keys.find(hashes)) for item in files] if len(hashes) else []
    found = [each.join(wanted, ["rule", "topic", "hash"], join_type="left semi").select(_FIELDS) for each in found]
    return _waiting(found, files).select(["rule", *_PLACE])


def pending_in(state: StagingState, rows: Rows) -> pa.Table:
    """The pending records of source rows in the ledger: rule, topic, partition, first, hash, text, row. LakeError for a file
    that can't be read."""
    files, wanted = _ledger_files(state), np.unique(rows)
    found = [item.pending.take(item.rows.find(wanted)) for item in files] if len(wanted) else []
    return _waiting(found, files)


def rows_before(state: StagingState, single: Rows, completed: Rows, joining: Collection[str]) -> Rows:
    """The source rows in which pending records of earlier batches matter.

    They matter to the ``single`` rows, which have a record without a counterpart. Or they wait behind a record of the
    ``completed`` rows. ``joining``: the rules with counterparts.
    """
    entries = pending_in(state, np.union1d(single, completed))
    follows = pc.invert(pc.is_in(entries["rule"], pa.array(list(joining), pa.string())))
    return entries.filter(pc.or_(follows, pc.is_in(entries["row"], pa.array(single))))["row"].to_numpy()


def rows_at(state: StagingState, places: Collection[Place]) -> Rows:
    """The source rows of pending records in the ledger."""
    offsets = pa.array(sorted({offset for _, _, offset in places}), pa.int64())
    rows: list[int] = []
    for item in _ledger_files(state) if places else ():
        near = item.pending.filter(pc.is_in(item.pending["first"], offsets)).to_pylist()
        known = [entry for entry in near if entry["row"] is not None]
        rows += [entry["row"] for entry in known if (entry["topic"], entry["partition"], entry["first"]) in places]
    return np.array(rows, np.int64)


MOST_MATCHES = 20_000
"""Places that are handed to Spark from here."""

_REOPENED = pa.schema([("topic", pa.string()), ("partition", pa.int32()), ("first", pa.int64())])
_PLACES = pa.schema([("rule", pa.string()), ("topic", pa.string()), ("partition", pa.int32()), ("first", pa.int64())])

Side = tuple[str, str]
"""A rule's name and the topic of one of its sides."""


class PendingRecords:
    """Looked up when first asked for; ``release`` when the batch is done."""

    def __init__(self, batch: EtlBatch) -> None:
        self.batch = batch
        self.hold = NO_HOLD
        """The decision on the batch's source rows."""
        self._places: DataFrame | None = None
        """rule, topic, partition, first"""
        self._spans: dict[Side, list[OffsetRange]] | None = None
        self._few = False
        """Whether the places were found here, and need no release."""

    def look_up(self, each: Iterable[RuleRecords], *, small: bool) -> None:
        """Find the pending records that match the batch's new records, for every rule.

        ``small``: the driver fetches the hashes of the new records.
        """
        plan = self.batch.plan
        if self._spans is not None:
            return
        hashes: list[DataFrame] = []
        for new in each:
            rule = new.rule
            for side in (side for side in rule.sides if side.keys):
                counted = plan.head.waiting.get((rule.name, side.topic), 0)
                # A reopened record is new for this batch, and is no longer pending.
                if not counted or (rule.name, side.topic) in plan.reopening.sides:
                    continue
                names = f"{text_sql(rule.name)} AS rule", f"{text_sql(side.topic)} AS topic"
                for other in rule.counterparts(side):
                    if other.name in new.frames and plan.reads(other.topic):
                        hashes.append(new.frames[other.name].selectExpr(*names, "hash"))
        if not hashes or plan.state is None:
            self._spans = {}
            return
        if small and self._look_up_here(plan.state, union(hashes)):
            return
        entries = frames.ledger_frame(self.batch.spark, plan.state)
        matches = (
            entries.where("kind = 'pending' AND hash IS NOT NULL")
            .select("rule", "topic", "partition", "first", "hash")
            .join(union(hashes), ["rule", "topic", "hash"], "left_semi")
            .join(
                entries.where("kind = 'completed'").select("topic", "partition", "first"),
                ["topic", "partition", "first"],
                "left_anti",
            )
            .select("rule", "topic", "partition", "first")
        )
        reopened = [(item.topic, *at) for item in plan.reopening.parts if item.kind == "pending" for at in item.places]
        if reopened:
            # A reopened record is new for this batch.
            matches = matches.join(listed_frame(self.batch.spark, _REOPENED, reopened), _PLACE, "left_anti")
        self.release()  # of an attempt whose join keys failed
        self._places = matches.persist()
        found: dict[Side, list[OffsetRange]] = defaultdict(list)
        for row, span in frames.spans(self._places, "rule", "topic"):
            found[row["rule"], row["topic"]].append(span)
        self._spans = dict(found)

    def _look_up_here(self, state: StagingState, hashes: DataFrame) -> bool:
        """In the ledger's files, without Spark; False where that does not do."""
        wanted = hashes.where("hash IS NOT NULL").toArrow()
        matches = look_up(state, wanted.cast(WANTED))
        if matches is None or matches.num_rows > MOST_MATCHES:
            return False
        found: dict[Side, list[OffsetRange]] = defaultdict(list)
        again = spans_of(self.batch.plan.reopening.parts)
        rows = [tuple(row.values()) for row in matches.to_pylist()]
        # A reopened record is new for this batch.
        rows = [row for row in rows if not is_in(again, (row[1], row[2], row[3]), "pending")]
        for rule, topic, partition, span in sorted({(*row[:3], row[3] // frames.SPAN) for row in rows}):
            found[rule, topic].append(OffsetRange(partition, span * frames.SPAN, (span + 1) * frames.SPAN))
        if rows:
            self._places = listed_frame(self.batch.spark, _PLACES, rows)
        self._spans, self._few = dict(found), True
        return True

    def records(self, rule: Rule, topic: str) -> DataFrame | None:
        """The pending records of one side; None if the side has none."""
        state = self.batch.plan.raw[topic]
        spans = (self._spans or {}).get((rule.name, topic))
        if not spans or self._places is None or state is None:
            return None
        mine = self._places.where(f"rule = {text_sql(rule.name)} AND topic = {text_sql(topic)}")
        found = frames.records_at(self.batch.spark, state, mine, spans, few=self._few)
        return found.selectExpr("*", "true AS old")

    def release(self) -> None:
        if self._places is not None and not self._few:
            with ignore_release_errors():
                self._places.unpersist()
