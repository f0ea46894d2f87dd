"""Take offsets out of their class of the account, so that an ETL batch can match them again like new records.

An offset is in exactly one entry of the ledger at any time. The batch that gives an offset its new class writes the files
with the old entry again, without that entry, in the same commit. No entry cancels another entry.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.compute import pc
from zync_assets.lake import staging
from zync_assets.lake.staging import ACCOUNT_FOLDER, ACCOUNT_TYPE, StagingState
from zync_assets.lake.tables import DataFile
from zync_assets.offsets import OffsetRange


@dataclass(frozen=True)
class Taken:
    """Offsets of one partition that leave a class: unmatched, quarantined or pending. Each offset is a record.

    ``rule``: the rule that pending records waited for; None for the other classes.
    """

    topic: str
    kind: str
    rule: str | None
    part: OffsetRange

    @property
    def records(self) -> int:
        return self.part.end - self.part.first

    def entry(self, kind: str) -> dict[str, object]:
        """The ledger row that puts the offsets into class ``kind``."""
        place = {"topic": self.topic, "partition": self.part.partition}
        return {"kind": kind, **place, "first": self.part.first, "end": self.part.end, "count": self.records}


def carve(state: StagingState, taken: Sequence[Taken]) -> tuple[list[DataFile], list[DataFile]]:
    """Files to add and files to remove so that the ledger is without ``taken``. The written files are invisible until a
    commit names them."""
    added: list[DataFile] = []
    removed: list[DataFile] = []
    spans = spans_of(taken)
    for item in state.ledger_files:
        rows = staging.read_entries(state, [item])
        left = without(rows, spans)
        if left is rows:
            continue
        removed.append(item)
        if left.num_rows:
            path = f"{ACCOUNT_FOLDER}/carved-{uuid.uuid4().hex}.parquet"
            added.append(staging.write_entries(state.opened.uri, path, left))
    return added, removed


Spans = Mapping[tuple[str, int, str], tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]
"""(topic, partition, class) → firsts and ends of disjoint ranges, sorted."""


def spans_of(taken: Sequence[Taken]) -> Spans:
    """What is taken, to be looked up."""
    found: dict[tuple[str, int, str], list[tuple[int, int]]] = {}
    for item in taken:
        found.setdefault((item.topic, item.part.partition, item.kind), []).append((item.part.first, item.part.end))
    return {
        place: (np.array([a for a, _ in sorted(parts)]), np.array([b for _, b in sorted(parts)]))
        for place, parts in found.items()
    }


def without(rows: pa.Table, spans: Spans) -> pa.Table:
    """Ledger entries without the offsets of ``spans``, in their order; the same object where that changes nothing."""
    keep = np.ones(rows.num_rows, dtype=np.bool_)
    pieces: list[dict[str, object]] = []
    for (topic, partition, kind), (firsts, ends) in spans.items():
        own = pc.and_(pc.equal(rows["topic"], topic), pc.equal(rows["partition"], partition))
        at = np.flatnonzero(np.asarray(pc.and_(own, pc.equal(rows["kind"], kind)).to_numpy()))
        low = rows["first"].take(pa.array(at)).to_numpy()
        high = rows["end"].take(pa.array(at)).to_numpy()
        # The ranges that share an offset with an entry are those from ``one`` to before ``other``.
        one, other = np.searchsorted(ends, low, side="right"), np.searchsorted(firsts, high, side="left")
        for index in np.flatnonzero(one < other).tolist():
            keep[at[index]] = False
            whole = (
                one[index] + 1 == other[index] and firsts[one[index]] <= low[index] and high[index] <= ends[one[index]]
            )
            if not whole:
                entry = rows.slice(int(at[index]), 1).to_pylist()[0]
                edges = [(int(firsts[n]), int(ends[n])) for n in range(one[index], other[index])]
                pieces += _cut(entry, edges)
    if keep.all():
        return rows
    left = rows.filter(pa.array(keep))
    if not pieces:
        return left
    made = pa.StructArray.from_arrays(
        [pa.array([piece[item.name] for piece in pieces], item.type) for item in ACCOUNT_TYPE],
        fields=list(ACCOUNT_TYPE),
    )
    return pa.concat_tables([left, pa.table(made.flatten(), names=ACCOUNT_TYPE.names).cast(left.schema)])


def _cut(entry: Mapping[str, object], edges: Sequence[tuple[int, int]]) -> list[dict[str, object]]:
    """The parts of a ledger entry that remain when the ranges ``edges`` (first offset, end) are cut out."""
    first, end = int(str(entry["first"])), int(str(entry["end"]))
    starts = [first, *(min(stop, end) for _, stop in edges)]
    stops = [*(max(start, first) for start, _ in edges), end]
    return [
        {**entry, "first": start, "end": stop, "count": stop - start}
        for start, stop in zip(starts, stops, strict=True)
        if start < stop
    ]
