"""Look-ups: the values of a list as SQL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.types import IntegerType, LongType

from zync_assets.etl.views.key_filter import listed_values

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_the_least_and_the_greatest_number_of_each_type_are_listed(spark: SparkSession) -> None:
    for kind, bits in ((IntegerType(), 31), (LongType(), 63)):
        numbers = [-(2**bits), -1, 2**bits - 1]
        listed = listed_values(kind, numbers)
        assert listed is not None
        [row] = spark.sql(f"SELECT array({', '.join(listed)}) AS numbers").collect()
        assert row["numbers"] == numbers
        assert spark.sql(f"SELECT {listed[0]} AS least").schema[0].dataType == kind
    # No int equals a larger number.
    assert listed_values(IntegerType(), [7, 2**31, -(2**31) - 1]) == ["7"]
