"""The Spark session of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from zync_assets.errors import SetupError
from zync_assets.spark.session import session_with
from zync_assets.spark.settings import spark_settings
from zync_assets_tests.services import SPARK

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_jvm_that_lacks_the_jars_of_a_pipeline_is_an_error(spark: SparkSession) -> None:
    settings = {
        **spark_settings({"master": SPARK["master"]}),
        "spark.jars": "/jars/hadoop-aws-3.4.2.jar,/jars/s3-2.29.52.jar",
    }
    with pytest.raises(SetupError, match=r"JVM of this process started without hadoop-aws-3\.4\.2\.jar.*begin with"):
        session_with(settings)
