"""The account of a small batch, fetched in one Spark job: what became of its records, without their keys and values.

To count in Spark and then to fetch what waits takes several jobs, and each job longer than the records of a small batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from zync_assets.compute import pc
from zync_assets.etl.numbering import Fact

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RECORDS = 20_000
"""New raw records of a batch that is small: all of it is one Spark task."""

_FACT = ["kind", "out", "rule", "topic", "partition", "old"]


def account(rows: DataFrame) -> pa.Table:
    """A row for each raw record that a batch's arranged results come from: kind, out, rule, hash, suspect, topic, partition,
    first, end, old (whether it was pending), and ``leads``: whether it is the first one of its result."""
    names = ["kind", "out", "rule", "hash", "suspect"]
    return rows.selectExpr(*names, "waited", "posexplode(source) AS (place, of)").selectExpr(
        *names,
        "of.topic AS topic",
        "of.partition AS partition",
        "of.offset AS first",
        "of.offset + 1 AS end",
        "waited[place] AS old",
        "place = 0 AS leads",
    ).toArrow()


def facts(found: pa.Table) -> list[Fact]:
    """What ``numbering.facts`` says; all of it is in one bucket."""
    sums: list[Any] = [([], "count_all"), ("leads", "sum"), ("suspect", "max")]
    grouped = found.group_by(_FACT, use_threads=False).aggregate(sums).to_pylist()
    return [
        Fact(
            row["kind"],
            row["out"],
            row["rule"],
            0,
            row["topic"],
            row["partition"],
            row["old"],
            row["count_all"],
            row["leads_sum"],
            row["suspect_max"],
        )
        for row in grouped
    ]


def exceptions(found: pa.Table) -> list[dict[str, Any]]:
    """What ``ledger.exceptions`` says."""
    asked = pc.and_(pc.invert(pc.is_in(found["kind"], pa.array(["out", "quarantined"]))), pc.invert(found["old"]))
    return found.filter(asked).select(["kind", "topic", "partition", "first", "end", "rule", "hash"]).to_pylist()


def completed(found: pa.Table) -> list[dict[str, Any]]:
    """What ``ledger.completed`` says."""
    asked = pc.and_(pc.is_in(found["kind"], pa.array(["out", "dropped"])), found["old"])
    return [
        row | {"kind": "completed", "text": "dropped" if row["kind"] == "dropped" else None}
        for row in found.filter(asked).select(["kind", "topic", "partition", "first", "end", "rule"]).to_pylist()
    ]
