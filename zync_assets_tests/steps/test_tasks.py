"""How many Spark tasks there may be at one time is known, in whatever way Spark is reached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zync_assets.steps.tasks import slots

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class WithoutContext:
    """A session as it is over Spark Connect."""

    def __init__(self, spark: SparkSession) -> None:
        self.range = spark.range


def test_tasks_at_one_time(spark: SparkSession) -> None:
    assert slots(spark) == 2
    assert slots(WithoutContext(spark)) == 2  # type: ignore[arg-type]
