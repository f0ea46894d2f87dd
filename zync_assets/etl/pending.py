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
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.spark_types import listed_frame
from zync_assets.etl.hold import NO_HOLD, Place
from zync_assets.etl.plan import EtlBatch
from zync_assets.etl.rules import matching
from zync_assets.etl.rules.matching import RuleRecords
from zync_assets.lake import staging, storage
from zync_assets.lake.log import DataFile
from zync_assets.lake.rows import RecentCache
from zync_assets.lake.staging import ACCOUNT_FOLDER, ACCOUNT_TYPE, StagingState
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Rule
from zync_assets.spark import frames
from zync_assets.spark.sql import text_sql
from zync_assets.spark.tasks import ignore_release_errors

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


def fold_ledger(state: StagingState) -> tuple[list[DataFile], list[DataFile]]:
    """Files to add and files to remove so that the ledger is short; both empty while it is short enough.

    The written file is invisible until a commit names it.
    """
    small = [item for item in state.ledger_files if item.records <= FOLD_SMALL_ENTRIES]
    if len(small) < FOLD_FILES:
        return [], []
    # Batches in their order: what waits in one is most often completed in one of the next.
    small.sort(key=lambda item: item.path)
    reach = np.cumsum([item.records for item in small])
    chosen = small[: int(np.searchsorted(reach, FOLD_ENTRIES, side="right"))]
    added = [_written(state, fold(staging.read_entries(state, chosen)))]
    large = _large_pair(state)
    if large is not None:
        rows = fold(staging.read_entries(state, large))
        if rows.num_rows <= FOLD_GAIN * sum(item.records for item in large):
            return [*added, _written(state, rows)], [*chosen, *large]
        _vain.put(frozenset(item.path for item in large), True)
    return added, chosen


def _large_pair(state: StagingState) -> list[DataFile] | None:
    """Two large files that may be worth a fold; None if no two are."""
    large = [item for item in state.ledger_files if item.records > FOLD_SMALL_ENTRIES]
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


Rows = npt.NDArray[np.int64]
"""Hashes of source rows (see ``source_rows``)."""

LOOKUP_ENTRIES = 6_000_000
"""Entries of a ledger that is looked up here; they take some 50 bytes each."""

_PLACE = ["topic", "partition", "first"]
_PENDING = pa.schema([staging.ACCOUNT_TYPE.field(name) for name in ("rule", *_PLACE, "hash")])
WANTED = pa.schema([("rule", pa.string()), ("topic", pa.string()), ("hash", pa.int64())])
"""What is looked up."""
_known: RecentCache[str, dict[str, _Waiting]] = RecentCache(LOOKUP_ENTRIES)
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
    if entries > LOOKUP_ENTRIES:
        _known.remove(state.table.uri)
        return None
    before = _known.get(state.table.uri) or {}
    each = {item.path: before.get(item.path) or _read(state.uri(item)) for item in files}
    _known.put(state.table.uri, each, entries)
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
    present = low < high
    spans = zip(low[present].tolist(), high[present].tolist(), strict=True)
    return item.pending.take(pa.array([at for span in spans for at in range(*span)], pa.int64()))


def _read(uri: str) -> _Waiting:
    system, path = storage.filesystem(uri)
    names = ["kind", "topic", "partition", "first", "rule", "hash"]
    with storage.access_errors(uri, "can't be read"):
        entries = pq.ParquetFile(path, filesystem=system).read([f"account.{name}" for name in names]).flatten()
    entries = entries.rename_columns([name.removeprefix("account.") for name in entries.column_names])
    is_kind = [pc.equal(entries["kind"], kind) for kind in ("pending", "completed")]
    pending = entries.filter(reduce(pc.and_, [is_kind[0], pc.is_valid(entries["hash"])])).select(_PENDING.names)
    pending = pending.cast(_PENDING).sort_by("hash").combine_chunks()
    completed = entries.filter(is_kind[1]).select(_PLACE).cast(pa.schema([_PENDING.field(name) for name in _PLACE]))
    return _Waiting(pending["hash"].to_numpy(), pending, completed)


MOST_MATCHES = 20_000
"""Places that are handed to Spark from here."""

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
            for side in rule.sides:
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
        if small and self._look_up_here(plan.state, matching.union(hashes)):
            return
        entries = frames.ledger_frame(self.batch.spark, plan.state)
        matches = (
            entries.where("kind = 'pending' AND hash IS NOT NULL")
            .select("rule", "topic", "partition", "first", "hash")
            .join(matching.union(hashes), ["rule", "topic", "hash"], "left_semi")
            .join(
                entries.where("kind = 'completed'").select("topic", "partition", "first"),
                ["topic", "partition", "first"],
                "left_anti",
            )
            .select("rule", "topic", "partition", "first")
        )
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
        rows = [tuple(row.values()) for row in matches.to_pylist()]
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


_ROW_FIELDS = ["rule", *_PLACE, "hash", "text", "row"]
NO_ENTRIES = pa.schema([ACCOUNT_TYPE.field(name) for name in _ROW_FIELDS]).empty_table()
"""No pending records of source rows."""


@dataclass(frozen=True)
class _RowEntries:
    """The contents of a ledger file. ``pending``: its pending records with a source row, sorted by it (``rows``).
    ``completed``: the places of records that are pending no more."""

    rows: Rows
    pending: pa.Table
    completed: pa.Table


_rows_of: RecentCache[str, _RowEntries] = RecentCache(LOOKUP_ENTRIES)
"""Ledger file → its entries; so many entries at the most, of some 50 bytes each."""


def pending_in(state: StagingState, rows: Rows) -> pa.Table:
    """The pending records of source rows in the ledger: rule, topic, partition, first, hash, text, row. LakeError for a file
    that can't be read."""
    wanted = np.unique(rows)
    each = [_row_entries(state.uri(item)) for item in state.ledger_files]
    found = [item.pending.take(pa.array(_positions(item.rows, wanted))) for item in each] if len(wanted) else []
    pending = pa.concat_tables([NO_ENTRIES, *found])
    if not pending.num_rows:
        return pending
    done = [
        item.completed.filter(pc.is_in(item.completed["first"], pending["first"].combine_chunks())) for item in each
    ]
    return pending.join(pa.concat_tables(done), _PLACE, join_type="left anti").select(_ROW_FIELDS)


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
    for item in state.ledger_files if places else ():
        pending = _row_entries(state.uri(item)).pending
        near = pending.filter(pc.is_in(pending["first"], offsets)).to_pylist()
        rows += [entry["row"] for entry in near if (entry["topic"], entry["partition"], entry["first"]) in places]
    return np.array(rows, np.int64)


def _positions(rows: Rows, wanted: Rows) -> Rows:
    """The positions in ``rows`` of those in ``wanted``; both are sorted."""
    if len(rows) < len(wanted):
        at = np.minimum(np.searchsorted(wanted, rows), len(wanted) - 1)
        return np.flatnonzero(wanted[at] == rows)
    low, high = np.searchsorted(rows, wanted, side="left"), np.searchsorted(rows, wanted, side="right")
    spans = zip(low[low < high].tolist(), high[low < high].tolist(), strict=True)
    return np.array([at for span in spans for at in range(*span)], np.int64)


def _row_entries(uri: str) -> _RowEntries:
    known = _rows_of.get(uri)
    if known is None:
        known = _read_rows(uri)
        _rows_of.put(uri, known, 1 + len(known.rows) + known.completed.num_rows)
    return known


def _read_rows(uri: str) -> _RowEntries:
    system, path = storage.filesystem(uri)
    with storage.access_errors(uri, "can't be read"):
        file = pq.ParquetFile(path, filesystem=system)
        # A file of an older version has no source rows.
        held = file.schema_arrow.field("account").type.get_field_index("row") >= 0
        names = ["kind", *(name for name in _ROW_FIELDS if name != "row" or held)]
        entries = file.read([f"account.{name}" for name in names]).flatten()
    entries = entries.rename_columns([name.removeprefix("account.") for name in entries.column_names])
    if not held:
        entries = entries.append_column("row", pa.nulls(entries.num_rows, pa.int64()))
    is_pending = reduce(pc.and_, [pc.equal(entries["kind"], "pending"), pc.is_valid(entries["row"])])
    pending = entries.filter(is_pending).select(_ROW_FIELDS).sort_by("row").combine_chunks()
    completed = entries.filter(pc.equal(entries["kind"], "completed")).select(_PLACE)
    return _RowEntries(pending["row"].to_numpy(), pending, completed)
