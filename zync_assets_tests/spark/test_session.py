"""The Spark session of this process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zync_assets.errors import SetupError
from zync_assets.spark.session import INTERPRETED, session_with, set_compiler
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


UNFIT = """
import sys
from zync_assets.errors import SetupError
from zync_assets.spark.session import spark_session
try:
    spark_session({"master": sys.argv[1]})
except SetupError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("master", "reason"),
    [
        ("lokal", "Master must either be yarn or start with spark, k8s, or local"),
        ("local[x]", "Could not parse Master URL: 'local[x]'"),
    ],
)
def test_a_session_that_does_not_start_is_an_error_with_spark_s_reason(master: str, reason: str) -> None:
    done = subprocess.run([sys.executable, "-c", UNFIT, master], capture_output=True, text=True)
    assert done.stdout == f"Spark did not start: {reason}. Correct master: or a property under spark:.\n", done.stderr


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


def test_a_large_batch_is_compiled_and_has_no_hash_set_for_a_short_list(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    def filter_of(rows: int, settings: Mapping[str, str]) -> str:
        set_compiler(spark, settings, rows)
        frame = spark.range(3).selectExpr("CAST(id AS string) AS op").where("op IN ('c', 'r')")
        frame.explain()
        return capsys.readouterr().out

    try:
        assert "*(1) Filter" in filter_of(INTERPRETED + 1, {})
        assert " IN (c,r)" in filter_of(INTERPRETED + 1, {})
        assert "*(1) Filter" not in filter_of(INTERPRETED, {})
        assert " INSET c, r" in filter_of(INTERPRETED, {})
        users_own = {"sql.optimizer.inSetConversionThreshold": "0"}
        assert " INSET c, r" in filter_of(INTERPRETED + 1, users_own), "the pipeline's setting stays"
    finally:
        set_compiler(spark, {}, 0)
