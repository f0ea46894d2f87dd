"""The account of a small batch, fetched in one Spark job: how many outputs were made of new records, and each other record.

To count in Spark and then to fetch what waits takes several jobs, and each job longer than the records of a small batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from zync_assets.etl.labels import Labels
from zync_assets.etl.matching import WAITED
from zync_assets.etl.numbering import Fact, counted, fact

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

RECORDS = 20_000
"""New raw records of a batch that is small: all of it is one Spark task."""


def account(rows: DataFrame) -> list[Row]:
    """Of a batch's arranged results: kind, rule, place, partition, old, entries, rows and suspects, as ``numbering.facts``
    counts them, and of each record that was pending or makes no output: hash and ``first``, its offset."""
    first = f"CASE WHEN kind <> 'out' OR {WAITED} THEN of.offset END"
    return counted(rows.coalesce(1), ["kind", "rule", "hash"], {"first": first}).collect()


def facts(found: Iterable[Row], labels: Labels) -> list[Fact]:
    """What ``numbering.facts`` says; all of it is in one bucket."""
    sums: dict[tuple[Any, ...], tuple[int, int, bool]] = {}
    for row in found:
        key = row["kind"], row["rule"], 0, row["place"], row["partition"], row["old"]
        entries, rows, suspects = sums.get(key, (0, 0, False))
        sums[key] = entries + row["entries"], rows + row["rows"], suspects or row["suspects"]
    return [fact(labels, *key, *values) for key, values in sums.items()]


def exceptions(found: Iterable[Row], labels: Labels) -> list[dict[str, Any]]:
    """What ``ledger.exceptions`` says."""
    return [_entry(row, labels) for row in found if row["kind"] not in ("out", "quarantined") and not row["old"]]


def completed(found: Iterable[Row], labels: Labels) -> list[dict[str, Any]]:
    """What ``ledger.completed`` says."""
    return [
        _entry(row, labels)
        | {"kind": "completed", "hash": None, "text": "dropped" if row["kind"] == "dropped" else None}
        for row in found
        if row["kind"] in ("out", "dropped") and row["old"]
    ]


def _entry(row: Row, labels: Labels) -> dict[str, Any]:
    names = {"topic": labels.topics[row["place"]], "rule": labels.rule(row["rule"])}
    return {**{name: row[name] for name in ("kind", "partition", "first", "hash")}, **names, "end": row["first"] + 1}
