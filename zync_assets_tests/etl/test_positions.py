"""Outputs are put into buckets by time and numbered without meeting on one task."""

from __future__ import annotations

import datetime as dt
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zync_assets.etl import positions
from zync_assets.etl.positions import BUCKET_RECORDS, TimeSpan, time_bounds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

spans = st.builds(
    lambda low, length, records: TimeSpan(low, low + length, records),
    st.integers(0, 10**13),
    st.integers(0, 10**9),
    st.integers(0, 5_000_000),
)


@given(st.lists(spans, max_size=12))
def test_bounds_ascend_and_lie_within_the_times(found: list[TimeSpan]) -> None:
    bounds = time_bounds(found)
    assert all(one < other for one, other in pairwise(bounds))
    if bounds:
        assert min(span.low for span in found) <= bounds[0]
        assert bounds[-1] <= max(span.high for span in found)
        assert len(bounds) < sum(span.records for span in found) / BUCKET_RECORDS


@given(st.lists(spans, min_size=1, max_size=12))
def test_what_lies_below_a_time_is_the_sum_over_all_spans(found: list[TimeSpan]) -> None:
    def below(span: TimeSpan, point: int) -> float:
        if point >= span.high:
            return span.records
        return span.records * (point - span.low) / (span.high - span.low) if point > span.low else 0

    points, reached = positions._reached(found)
    wanted = [sum(below(span, point) for span in found) for point in points.tolist()]
    assert points.tolist() == sorted({time for span in found for time in (span.low, span.high)})
    # Of buckets of 150,000.
    assert np.allclose(reached, wanted, rtol=1e-6, atol=100.0)


@given(st.integers(2, 40), st.integers(10_000, 10**9))
def test_one_even_span_is_cut_into_equal_parts(count: int, length: int) -> None:
    bounds = time_bounds([TimeSpan(0, length, count * BUCKET_RECORDS)])
    assert len(bounds) == count - 1
    edges = [0, *bounds, length]
    assert all(abs((other - one) - length / count) <= 2 for one, other in pairwise(edges))


def test_little_is_one_bucket() -> None:
    assert time_bounds([]) == []
    assert time_bounds([TimeSpan(0, 10**6, 2 * BUCKET_RECORDS - 1)]) == []


def test_many_records_of_one_time_are_not_separated() -> None:
    assert len(time_bounds([TimeSpan(5, 5, 10 * BUCKET_RECORDS)])) <= 1


def test_a_bucket_holds_what_lies_from_its_bound_on(spark: SparkSession) -> None:
    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    times = [epoch + dt.timedelta(milliseconds=millis) for millis in (9, 10, 11, 20)]
    frame = spark.createDataFrame(
        [("out", number % 2, number, (time, 0, 0, 0)) for number, time in enumerate(times)],
        "kind string, rule int, number int, ord struct<time: timestamp, place: int, partition: int, offset: long>",
    )
    rows = positions.arranged(frame, [10, 20], ["number"], ["0", "1"]).collect()
    assert {row.number: row.bucket for row in rows} == {0: 0, 1: 1, 2: 1, 3: 2}
    assert {row.number: row.first for row in rows} == {0: 0, 1: 0, 2: 1, 3: 1}, "how many of its topic come before"
    whole = positions.arranged(frame, [], ["number"], ["0", "1"], together=True).collect()
    assert [(row.number, row.bucket, row.first) for row in whole] == [(number, 0, 0) for number in range(4)]


def test_rows_without_any_output_topic_are_put_into_buckets(spark: SparkSession) -> None:
    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    frame = spark.createDataFrame(
        [("pending", 0, number, (epoch + dt.timedelta(milliseconds=number), 0, 0, 0)) for number in range(4)],
        "kind string, rule int, number int, ord struct<time: timestamp, place: int, partition: int, offset: long>",
    )
    rows = positions.arranged(frame, [2], ["number"], []).collect()
    assert sorted((row.number, row.bucket, row.first) for row in rows) == [(0, 0, 0), (1, 0, 0), (2, 1, 0), (3, 1, 0)]
