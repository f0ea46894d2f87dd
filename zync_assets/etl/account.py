"""The account of a batch's input records: counts, and an entry for each record that was pending or makes no output.

The Spark tasks that make the result rows (see ``matching``) also account for the rows, in Arrow batches. Spark SQL would need
more jobs over the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from zync_assets.compute import pc
from zync_assets.etl.labels import Labels

KINDS = ("out", "pending", "unmatched", "dropped", "quarantined", "untyped")
_OUT, _DROPPED, _QUARANTINED = (KINDS.index(kind) for kind in ("out", "dropped", "quarantined"))

ENTRIES = pa.schema(
    {
        "kind": pa.string(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "first": pa.int64(),
        "end": pa.int64(),
        "rule": pa.string(),
        "hash": pa.int64(),
        "text": pa.string(),
    }
)
"""An input record that is no longer pending (kind ``completed``; ``text``: ``dropped`` for a dropped record), or a new record
without an output. Records that a rule failed on have no entry here: see ``etl_failures``."""


class Count(NamedTuple):
    """Result rows of one kind and rule, counted for the sources in one input partition.

    ``entries``: the number of sources; ``rows``: the number of rows, counted at their first source; ``place``: the input's
    label; ``old``: whether the sources were pending.
    """

    kind: str
    rule: int | None
    place: int
    partition: int
    old: bool
    entries: int
    rows: int


class Fact(NamedTuple):
    """A batch's counts. ``out``: the output topic; ``topic``: the input's; the rest is as of Count."""

    kind: str
    out: str | None
    rule: str | None
    topic: str
    partition: int
    old: bool
    entries: int
    rows: int


class Sources:
    """The sources of result rows, each as an element of arrays of one length."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        """``rows``: with kind, rule, source, waited and hash."""
        lengths = pc.list_value_length(rows["source"]).to_numpy()
        self.row = np.repeat(np.arange(len(rows)), lengths)
        """The index of its row."""
        self.at = np.arange(len(self.row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        """Its index in its row."""
        place, partition, offset = rows["source"].flatten().flatten()
        self.place, self.partition, self.offset = place.to_numpy(), partition.to_numpy(), offset.to_numpy()
        self.kind = pc.index_in(rows["kind"], pa.array(KINDS)).to_numpy()[self.row]
        self.rule = rows["rule"].fill_null(-1).to_numpy()[self.row]
        self.old = (rows["waited"].to_numpy()[self.row] >> self.at & 1).astype(bool)
        self.hash = rows["hash"]


def counts(found: Sources) -> list[Count]:
    """Few, whatever the number of sources."""
    # One number for all that they are counted by; a partition's takes 31 bits.
    rules, places = (int(each.max(initial=0)) + 2 for each in (found.rule, found.place))
    code = ((found.kind * rules + found.rule + 1) * places + found.place) * 2 + found.old
    each = pa.array(code.astype(np.int64) << 31 | found.partition).dictionary_encode()
    index = each.indices.to_numpy()
    entries, rows = (np.bincount(index, weights).tolist() for weights in (None, found.at == 0))
    made: list[Count] = []
    for number, known in enumerate(each.dictionary.to_pylist()):
        rest, partition = divmod(known, 1 << 31)
        rest, old = divmod(rest, 2)
        rest, place = divmod(rest, places)
        kind, rule = divmod(rest, rules)
        made.append(
            Count(
                KINDS[kind],
                rule - 1 if rule else None,
                place,
                partition,
                bool(old),
                entries[number],
                int(rows[number]),
            )
        )
    return made


def summed(found: Iterable[Count]) -> list[Count]:
    """The counts of all rows together. ``found``: counts of some rows each."""
    sums: dict[tuple[str, int | None, int, int, bool], Count] = {}
    for one in found:
        key = one[:5]
        before = sums.get(key, Count(*key, 0, 0))
        sums[key] = Count(*key, before.entries + one.entries, before.rows + one.rows)
    return list(sums.values())


def fact(one: Count, labels: Labels) -> Fact:
    """A count with names in place of numbers."""
    out = labels.outs[one.rule] if one.kind == "out" and one.rule is not None else None
    return Fact(one.kind, out, labels.rule(one.rule), labels.topics[one.place], *one[3:])


def entries(found: Sources, labels: Labels) -> pa.RecordBatch:
    """The rows of ENTRIES for the sources that were pending or make no output."""
    completed = found.old & np.isin(found.kind, (_OUT, _DROPPED))
    wanted = np.flatnonzero(completed | ~found.old & ~np.isin(found.kind, (_OUT, _QUARANTINED)))
    kind, rule, offset = found.kind[wanted], found.rule[wanted], found.offset[wanted]
    done = completed[wanted]
    columns = {
        "kind": _named((*KINDS, "completed"), np.where(done, len(KINDS), kind)),
        "topic": _named(labels.topics, found.place[wanted]),
        "partition": pa.array(found.partition[wanted]),
        "first": pa.array(offset),
        "end": pa.array(offset + 1),
        "rule": _named(labels.rules, rule, rule < 0),
        "hash": pc.if_else(pa.array(done), None, found.hash.take(pa.array(found.row[wanted]))),
        "text": _named(("dropped",), np.zeros(len(wanted), np.int8), ~(done & (kind == _DROPPED))),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=ENTRIES)


def _named(names: Iterable[str], index: np.ndarray, null: np.ndarray | None = None) -> pa.Array:
    return pa.array(list(names), pa.string()).take(pa.array(index, mask=null))
