"""The Spark session of this process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
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


START = """
import sys
from zync_assets.spark.session import spark_session
spark = spark_session({"master": "local[1]"})
print(spark.sparkContext._gateway.proc.pid, flush=True)
sys.stdin.read()
for number in range(200):
    spark._jvm.System.out.println(f"Java's line {number}")
spark._jvm.System.out.print("Java's last word")
spark._jvm.System.out.flush()
"""


@pytest.mark.slow
def test_who_reads_the_output_of_a_process_does_not_wait_for_its_jvm() -> None:
    command = [sys.executable, "-c", START]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        java = int(process.stdout.readline())
        outputs = [Path(f"/proc/{pid}/fd/1").readlink() for pid in (process.pid, java)]
        rest, errors = process.communicate("")
    assert outputs[0] != outputs[1]
    words = [line for line in errors.splitlines() if line.startswith("Java's ")]
    assert (rest, words) == ("", [*(f"Java's line {number}" for number in range(200)), "Java's last word"])
