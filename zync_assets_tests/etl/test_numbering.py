"""Outputs are put into buckets by time and numbered without meeting on one task."""

from __future__ import annotations

import datetime as dt
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zync_assets.etl import numbering
from zync_assets.etl.numbering import BUCKET_RECORDS, TimeSpan, arranged, facts, numbered, time_bounds

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


@pytest.mark.parametrize("bounds", [[], [30], [10, 30, 31, 90]])
def test_the_numbers_follow_the_order_over_all_buckets(spark: SparkSession, bounds: list[int]) -> None:
    """Two topics share the buckets; each is numbered by itself."""
    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    rows = [
        ("out", "a" if number % 3 else "b", "r", (epoch + dt.timedelta(milliseconds=number * 7 % 60), 0, 0, number),
         [("t", 0, number)], [False])
        for number in range(40)
    ] + [("pending", None, "r", (epoch, 0, 0, 100), [("t", 0, 100)], [False])]  # fmt: skip
    schema = (
        "kind string, out string, rule string, ord struct<time: timestamp, place: int, partition: int, offset: long>,"
        " source array<struct<topic: string, partition: int, offset: long>>, waited array<boolean>"
    )
    frame = spark.createDataFrame(rows, schema).repartition(3)
    made = arranged(frame, bounds).persist()
    counted = facts(made)
    assert sum(row.rows for row in counted if row.kind == "out") == 40
    assert sum(row.entries for row in counted if row.kind == "pending") == 1
    for topic in ("a", "b"):
        sizes = [0] * (len(bounds) + 1)
        for row in counted:
            if row.out == topic:
                sizes[row.bucket] += row.rows
        firsts = [1000 + sum(sizes[:place]) for place in range(len(sizes))]
        result = sorted(numbered(made, topic, firsts).collect(), key=lambda row: row.kafka.offset)
        assert [row.kafka.offset for row in result] == list(range(1000, 1000 + sum(sizes)))
        assert [row.ord for row in result] == sorted(row.ord for row in result)
        assert {row.kafka.topic for row in result} == {topic}
    made.unpersist()


def test_a_bucket_holds_what_lies_from_its_bound_on(spark: SparkSession) -> None:
    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    times = [epoch + dt.timedelta(milliseconds=millis) for millis in (9, 10, 11, 20)]
    frame = spark.createDataFrame(
        [("out", "a", (time, 0)) for time in times], "kind string, out string, ord struct<time: timestamp, place: int>"
    )
    assert [row.bucket for row in numbering.arranged(frame, [10, 20]).orderBy("ord").collect()] == [0, 1, 1, 2]
