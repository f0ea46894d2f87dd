"""Lists of values as conditions."""

from __future__ import annotations

import duckdb
import pytest

from zync_assets.spark.sql import MOST_IN, in_sql


@pytest.mark.parametrize("count", [0, 1, MOST_IN, MOST_IN + 1, 1_000, 16 * MOST_IN, 16 * MOST_IN + 1])
def test_a_list_of_any_length_has_its_values_alone(count: int) -> None:
    values = [str(3 * number) for number in range(count)]
    sql = f"SELECT count(*), coalesce(sum(k), 0)::BIGINT FROM (SELECT unnest(range(9000)) AS k) WHERE {in_sql('k', values)}"
    assert duckdb.connect().execute(sql).fetchone() == (count, sum(map(int, values)))


def test_no_part_of_a_list_that_parquet_gets_is_long() -> None:
    text = in_sql("k", [str(number) for number in range(2_000)])
    _, *parts = text.split(" IN (")
    assert [part.count(",") + 1 for part in parts] == [2_000, *[125] * 16]
