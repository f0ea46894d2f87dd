"""A session that a batch asks for again keeps the settings of the piece of work under way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zync_assets.spark.session import lazy_session, spark_session
from zync_assets.spark.tasks import SETTINGS, search_settings
from zync_assets_tests.services import SPARK

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_batch_s_session_keeps_the_settings_of_a_search(spark: SparkSession) -> None:
    session = lazy_session(lambda: spark_session(SPARK))
    with search_settings(session()):
        assert {name: session().conf.get(name) for name in SETTINGS} == SETTINGS
