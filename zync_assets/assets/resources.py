"""Spark for Dagster's runs: one session a run, made when something first asks for it, so that checks start no JVM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster import InitResourceContext, ResourceDefinition, resource
from dagster_pyspark import LazyPySparkResource
from dagster_spark.utils import flatten_dict

from zync_assets.pipeline import Pipeline
from zync_assets.steps.session import session_with
from zync_assets.steps.spark_settings import spark_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class _Spark(LazyPySparkResource):
    """dagster-pyspark's, its session made as the ``zync`` command makes it."""

    def _init_session(self) -> None:
        self._spark_session = session(self)


def spark_resource(pipeline: Pipeline) -> ResourceDefinition:
    """A pipeline's resource ``spark``, a ``LazyPySparkResource`` with the settings of the pipeline's ``spark:``.

    It is made in a function, not declared with its configuration: Dagster's pages show that of a declared one, and
    ``spark:`` may hold an object store's secret.
    """

    @resource(description="The Spark session of a run, made when it is first needed, with the pipeline's `spark:`.")
    def spark(_: InitResourceContext) -> LazyPySparkResource:
        return _Spark(spark_config=spark_settings(pipeline.spark, pipeline.lake))

    return spark


def session(spark: LazyPySparkResource) -> SparkSession:
    """The resource's session with the settings that results depend on.

    SetupError if there is no Java that Spark runs on; a session on a remote Spark needs none.
    """
    return session_with({name: str(value) for name, value in flatten_dict(spark.spark_config)})
