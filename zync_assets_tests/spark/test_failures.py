"""Spark's own failures, which are no fault of the pipeline, get an error text of zync."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException

from zync_assets.errors import EtlError, SetupError, SparkLost
from zync_assets.spark.failures import spark_failures
from zync_assets.spark.tasks import run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_worker_that_is_killed(spark: SparkSession) -> None:
    with pytest.raises(SetupError, match=r"its Python worker ended, killed or out of memory\..* run it again\.$"):
        run_tasks(spark, 1, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    assert run_tasks(spark, 1, lambda index: index) == [0]


@pytest.mark.parametrize(
    "text",
    [
        'status = StatusCode.UNAVAILABLE\n\tdetails = "Socket closed"',
        'status = StatusCode.UNKNOWN\n\tdetails = "Stream removed (RST_STREAM (Received RST_STREAM with error code 8))"',
    ],
)
def test_a_server_that_ended_in_the_middle_of_a_request(text: str) -> None:
    with pytest.raises(SparkLost, match="the Spark Connect server ended"), spark_failures(EtlError):
        raise PySparkException(text)


@pytest.mark.parametrize(
    "text",
    [
        "(java.lang.IllegalStateException) Cannot call methods on a stopped SparkContext.",
        "org.apache.spark.SparkException: Job 7 cancelled because SparkContext was shut down",
        "java.lang.IllegalStateException: SparkContext has been shutdown",
    ],
)
def test_a_jvm_that_answers_while_it_ends(text: str) -> None:
    with pytest.raises(SparkLost, match=r"Spark ended during a step\..* run it again\.$"), spark_failures(EtlError):
        raise PySparkException(text)


def test_what_fails_while_a_ctrl_c_unwinds_is_the_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt), spark_failures(lambda said: EtlError(f"{said} Correct the rule.")):
        try:
            raise KeyboardInterrupt
        finally:
            raise PySparkException("An error occurred while calling o1.unpersist.")


@pytest.mark.parametrize(
    "text",
    [
        "An error occurred while calling o1.collect.\n: org.apache.spark.SparkException: EOFException occurred while reading"
        " the port number from zync_assets.spark.python_daemon's stdout.\n\tat org.apache.spark.api.python",
        "java.io.IOException: Python worker failed to connect back.",
    ],
)
def test_a_worker_that_never_was(text: str) -> None:
    """Spark's error texts after a kill of its Python daemon before the daemon forked a worker."""
    with (
        pytest.raises(SetupError, match="its Python worker ended"),
        spark_failures(lambda said: EtlError(f"{said} Correct the rule.")),
    ):
        raise PySparkException(text)
