"""Outputs are put into buckets by time and numbered without meeting on one task."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from zync_assets.etl import positions
from zync_assets.etl.positions import BUCKET_RECORDS, Numbered, bucket_bounds
from zync_assets.lake.raw_files import LOWEST
from zync_assets.lake.sequence import OrderSpan
from zync_assets.spark.sql import long_sql

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTS = ("high", "place", "partition", "offset")
OUTS = [Numbered("0"), Numbered("1")]
spans = st.builds(
    lambda low, length, records: OrderSpan((low, 0), (low + length, 0), records),
    st.integers(0, 10**16),
    st.integers(0, 10**12),
    st.integers(1, 5_000_000),
)


@given(st.lists(spans, max_size=12))
def test_bounds_ascend_and_lie_within_the_orders(found: list[OrderSpan]) -> None:
    bounds = bucket_bounds([found], PARTS)
    assert all(one < other for one, other in pairwise(bounds))
    if bounds:
        assert min(span.low for span in found)[0] <= bounds[0][0]
        assert bounds[-1][0] <= max(span.high for span in found)[0]
        assert len(bounds) < sum(span.records for span in found) / BUCKET_RECORDS


@given(st.integers(2, 40), st.integers(10_000, 10**9))
def test_one_even_span_is_cut_into_equal_parts(count: int, length: int) -> None:
    bounds = bucket_bounds([[OrderSpan((0, 0), (length, 0), count * BUCKET_RECORDS)]], PARTS)
    assert len(bounds) == count - 1
    edges = [0, *(bound[0] for bound in bounds), length]
    assert all(abs((other - one) - length / count) <= 2 for one, other in pairwise(edges))


def test_little_is_one_bucket() -> None:
    assert bucket_bounds([[]], PARTS) == []
    assert bucket_bounds([[OrderSpan((0, 0), (10**6, 0), 2 * BUCKET_RECORDS - 1)]], PARTS) == []


def test_many_records_of_one_order_are_separated_by_their_offsets() -> None:
    snapshot = OrderSpan(LOWEST, LOWEST, 3 * BUCKET_RECORDS, 1, 0, 0, 3 * BUCKET_RECORDS)
    parts = ("high", "low", "place", "partition", "offset")
    assert bucket_bounds([[snapshot]], parts) == [(*LOWEST, 1, 0, count * BUCKET_RECORDS) for count in (1, 2)]


def test_each_group_of_topics_has_buckets_of_its_own() -> None:
    groups = [[OrderSpan((5, 0), (105, 0), 2 * BUCKET_RECORDS)], [OrderSpan((0, 0), (10, 0), 2 * BUCKET_RECORDS)]]
    assert bucket_bounds(groups, ("rank", *PARTS)) == [(0, 55), (1,), (1, 5)]


def test_a_bucket_holds_what_lies_from_its_bound_on(spark: SparkSession) -> None:
    frame = spark.createDataFrame(
        [("out", number % 2, number, (high, 0, 0, number)) for number, high in enumerate((9, 10, 11, 20))],
        "kind string, rule int, number int, ord struct<high: long, place: int, partition: int, offset: long>",
    )
    rows = positions.arranged(frame, PARTS, [(10,), (20,)], ["number"], OUTS).collect()
    assert {row.number: row.bucket for row in rows} == {0: 0, 1: 1, 2: 1, 3: 2}
    assert {row.bucket: row.starts for row in rows if row.number != 2} == {0: [0, 0], 1: [1, 0], 2: [2, 1]}, "by topic"
    assert [row.starts for row in rows if row.number == 2] == [None], "the first row of a bucket has it"
    whole = positions.arranged(frame, PARTS, [], ["number"], OUTS, together=True).collect()
    assert [(row.number, row.bucket, row.starts) for row in whole] == [(number, 0, None) for number in range(4)]
    # Bounds of several parts, the lowest order among them.
    least = f"named_struct('high', {long_sql(LOWEST[0])}, 'place', 0, 'partition', 0, 'offset', ord.offset)"
    frame = frame.selectExpr("* EXCEPT (ord)", f"{least} AS ord")
    rows = positions.arranged(frame, PARTS, [(LOWEST[0], 0, 0, 1), (LOWEST[0], 1)], ["number"], OUTS).collect()
    assert {row.number: row.bucket for row in rows} == {0: 0, 1: 1, 2: 1, 3: 1}


def test_rows_without_any_output_topic_are_put_into_buckets(spark: SparkSession) -> None:
    frame = spark.createDataFrame(
        [("pending", 0, number, (number, 0, 0, 0)) for number in range(4)],
        "kind string, rule int, number int, ord struct<high: long, place: int, partition: int, offset: long>",
    )
    rows = positions.arranged(frame, PARTS, [(2,)], ["number"], []).collect()
    assert sorted((row.number, row.bucket, row.starts) for row in rows) == [
        (0, 0, None),
        (1, 0, None),
        (2, 1, None),
        (3, 1, None),
    ]
