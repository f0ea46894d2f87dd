"""The Spark session of this process, outside Dagster."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from zync_assets.steps.spark_settings import spark_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Session = Callable[[], "SparkSession"]
"""Gives the session. A step calls it only when there is work: the first call may start a JVM."""


def deferred(spark: SparkSession | Session) -> Session:
    """A session, or what gives one, as what gives one."""
    return spark if callable(spark) else lambda: spark


def spark_session(spark: Mapping[str, str], lake: str = "", *, long: bool = False) -> SparkSession:
    """The session of this process, made at the first call: with a JVM of its own, or on the server that ``remote`` names.

    Raises SetupError if there is no Java that Spark runs on, or no such server. ``lake`` and ``long``: as for
    ``spark_settings``.
    """
    return session_with(spark_settings(spark, lake, long=long))


def session_with(settings: Mapping[str, str]) -> SparkSession:
    """The session with these Spark properties; see ``spark_session``."""
    _hush()
    if "spark.remote" in settings:
        from zync_assets.steps.connect import remote_session

        return remote_session(settings)
    from zync_assets.steps.local_session import local_session

    return local_session(settings)


def _hush() -> None:
    """PySpark logs each error that it raises to stderr, as JSON, plan and all; who catches it says it in a line."""
    from pyspark.logger import PySparkLogger

    # Connect's word about a server that is away, which is an error soon after.
    warnings.filterwarnings("ignore", message=r"\[RETRIES_EXCEEDED\]")
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel("CRITICAL")
