"""The ledger of a batch covers the new offsets exactly once, in as few entries as can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from zync_assets.codecs.spark_types import arrow_frame
from zync_assets.etl import account
from zync_assets.etl.account import (
    ENTRIES,
    Labels,
    Sources,
    counts,
    cut_at_strides,
    fact,
    failed_entries,
    ledger_frame,
    ledger_table,
)
from zync_assets.offsets import OffsetRange

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAMES = ("topic", "partition", "first", "end", "kind", "count", "rule", "hash", "text")


def entries(
    spark: SparkSession, ranges: dict[str, list[OffsetRange]], *found: tuple[Any, ...]
) -> list[tuple[Any, ...]]:
    each = [dict(zip(ENTRIES.names, (*item, None, None, None), strict=False)) for item in found]
    return [row[:6] for row in ledger(spark, ranges, pa.Table.from_pylist(each, ENTRIES))]


def ledger(spark: SparkSession, ranges: dict[str, list[OffsetRange]], found: pa.Table) -> list[tuple[Any, ...]]:
    frame = ledger_frame(spark, ranges, arrow_frame(spark, found))
    rows = sorted((tuple(row[name] for name in NAMES) for row in frame.collect()), key=lambda row: row[:3])
    here = [tuple(row[name] for name in NAMES) for row in ledger_table(ranges, found).to_pylist()]
    assert sorted(here, key=lambda row: row[:3]) == rows, "the driver makes the same rows as Spark's tasks"
    return rows


def test_a_batch_in_which_all_is_done_is_a_range_a_partition() -> None:
    ranges = {"b": [OffsetRange(0, 5, 9), OffsetRange(1, 3, 3)], "a": [OffsetRange(2, 0, 1)]}
    rows = ledger_table(ranges, ENTRIES.empty_table()).to_pylist()
    assert [(row["topic"], row["partition"], row["first"], row["end"]) for row in rows] == [
        ("a", 2, 0, 1),
        ("b", 0, 5, 9),
    ]
    assert {row["kind"] for row in rows} == {"done"}


def test_what_is_between_the_exceptions_is_done(spark: SparkSession) -> None:
    found = entries(
        spark,
        {"t": [OffsetRange(0, 10, 30)]},
        ("unmatched", "t", 0, 10, 11),
        ("unmatched", "t", 0, 11, 12),
        ("pending", "t", 0, 15, 16, "rule", 7),
        ("pending", "t", 0, 16, 17, "rule", 7),
        ("dropped", "t", 0, 17, 18),
        ("quarantined", "t", 0, 18, 19),
        ("dropped", "t", 0, 29, 30),
    )
    assert found == [
        ("t", 0, 10, 12, "unmatched", 2),
        ("t", 0, 12, 15, "done", None),
        ("t", 0, 15, 16, "pending", 1),
        ("t", 0, 16, 17, "pending", 1),
        ("t", 0, 17, 18, "dropped", 1),
        ("t", 0, 18, 19, "quarantined", 1),
        ("t", 0, 19, 29, "done", None),
        ("t", 0, 29, 30, "dropped", 1),
    ]


def test_what_is_between_two_ranges_is_in_no_entry(spark: SparkSession) -> None:
    ranges = [OffsetRange(0, 40, 50), OffsetRange(0, 5, 6), OffsetRange(0, 6, 8), OffsetRange(0, 20, 21)]
    assert entries(spark, {"t": ranges}, ("unmatched", "t", 0, 7, 8), ("unmatched", "t", 0, 40, 41)) == [
        ("t", 0, 5, 7, "done", None),
        ("t", 0, 7, 8, "unmatched", 1),
        ("t", 0, 20, 21, "done", None),
        ("t", 0, 40, 41, "unmatched", 1),
        ("t", 0, 41, 50, "done", None),
    ]


def test_each_record_that_a_rule_failed_on_keeps_its_reason(spark: SparkSession) -> None:
    failed = failed_entries([("t", 0, 1, "rule", "why"), ("t", 0, 2, "rule", "because")])
    other = pa.Table.from_pylist([{"kind": "quarantined", "topic": "t", "partition": 0, "first": 3, "end": 4}], ENTRIES)
    rows = ledger(spark, {"t": [OffsetRange(0, 0, 5)]}, pa.concat_tables([failed, other]))
    kept = [(first, end, kind, rule, text) for _, _, first, end, kind, _, rule, _, text in rows]
    assert kept == [
        (0, 1, "done", None, None),
        (1, 2, "quarantined", "rule", "why"),
        (2, 3, "quarantined", "rule", "because"),
        (3, 4, "quarantined", None, None),
        (4, 5, "done", None, None),
    ]


def test_partitions_and_topics_do_not_meet(spark: SparkSession) -> None:
    ranges = {"a": [OffsetRange(0, 0, 2), OffsetRange(1, 2, 4)], "b": [OffsetRange(0, 0, 1)]}
    found = entries(spark, ranges, ("dropped", "a", 0, 1, 2), ("dropped", "a", 1, 2, 3))
    assert [row[:5] for row in found] == [
        ("a", 0, 0, 1, "done"),
        ("a", 0, 1, 2, "dropped"),
        ("a", 1, 2, 3, "dropped"),
        ("a", 1, 3, 4, "done"),
        ("b", 0, 0, 1, "done"),
    ]


def test_a_long_range_of_lost_offsets_is_one_entry_a_stride(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(account, "STRIDE", 10)
    lost = spark.createDataFrame(
        [("dropped", "t", 0, 5, 32)], "kind string, topic string, partition int, first long, end long"
    )
    pieces = cut_at_strides(lost)
    assert sorted((row["first"], row.end) for row in pieces.collect()) == [(5, 10), (10, 20), (20, 30), (30, 32)]
    rows = ledger_frame(spark, {"t": [OffsetRange(0, 5, 40)]}, pieces).collect()
    covered = sorted((row["first"], row.end, row.kind) for row in rows)
    assert covered == [
        (5, 10, "dropped"),
        (10, 20, "dropped"),
        (20, 30, "dropped"),
        (30, 32, "dropped"),
        (32, 40, "done"),
    ]


def test_a_completed_record_has_a_row_beside_those_that_cover_the_range(spark: SparkSession) -> None:
    found = entries(spark, {"t": [OffsetRange(0, 5, 7)]}, ("completed", "t", 0, 1, 2), ("unmatched", "t", 0, 5, 6))
    assert found == [("t", 0, 1, 2, "completed", None), ("t", 0, 5, 6, "unmatched", 1), ("t", 0, 6, 7, "done", None)]


def test_a_pending_record_leaves_the_rule_that_took_it() -> None:
    """The rule of the output may be a further output of the rule, or the rule of a change that the record was merged with."""
    source = [{"place": 0, "partition": 0, "offset": 4}, {"place": 1, "partition": 0, "offset": 5}]
    rows = [
        {"kind": "out", "rule": 1, "source": source, "waited": 1},
        {"kind": "out", "rule": 2, "source": source, "waited": 0, "olds": [True, False], "takers": [0, 2]},
    ]
    place = pa.struct([("place", pa.int32()), ("partition", pa.int32()), ("offset", pa.int64())])
    types = {"kind": pa.string(), "rule": pa.int32(), "source": pa.list_(place), "waited": pa.int32()}
    types |= {"hash": pa.int64(), "olds": pa.list_(pa.bool_()), "takers": pa.list_(pa.int32())}
    labels = Labels(["L", "R"], ["join", "join/2", "gone"], ["out", "out", "out"], parts={1: 0})
    for row in rows:
        found = Sources(pa.RecordBatch.from_pylist([row], pa.schema(types)))
        facts = [fact(one, labels) for one in counts(found)]
        assert [(each.rule, each.taker or each.rule) for each in facts if each.old] == [
            (labels.rules[row["rule"]], "join")  # pyright: ignore[reportCallIssue]
        ]
        assert [(each["kind"], each["rule"]) for each in account.entries(found, labels).to_pylist()] == [
            ("completed", "join")
        ]
