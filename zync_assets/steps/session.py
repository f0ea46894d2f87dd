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
    """A function that returns the session. Accepts a session or such a function."""
    return spark if callable(spark) else lambda: spark


def spark_session(spark: Mapping[str, str], lake: str = "", *, long: bool = False) -> SparkSession:
    """The session of this process, created at the first call: in the process's own JVM, or on the server ``remote``.

    Raises SetupError if no fitting Java is found, or the server does not answer. ``lake`` and ``long``: as for
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
    """Silence PySpark's loggers. PySpark logs each raised error to stderr as JSON with the plan; zync prints one line."""
    from pyspark.logger import PySparkLogger

    # Spark Connect warns of an unreachable server, and raises an error soon after.
    warnings.filterwarnings("ignore", message=r"\[RETRIES_EXCEEDED\]")
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel("CRITICAL")
