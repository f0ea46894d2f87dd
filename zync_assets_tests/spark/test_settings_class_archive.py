"""The archive of Spark's classes: sessions of this run use it, and nothing that is wrong with it keeps one from starting."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zync_assets.local.java import cache_dir, find_java
from zync_assets.spark import session, settings
from zync_assets.spark.settings import archive_classes, archive_name, find_archive, has_failed, share_classes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_the_jvm_of_a_session_has_the_archive_mapped(spark: SparkSession) -> None:
    name = archive_name(find_java())
    assert name is not None
    archive = find_archive(cache_dir(), name)
    assert archive is not None
    process = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
    assert str(archive.resolve()) in Path(f"/proc/{process.pid}/maps").read_text()


def test_who_waits_for_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(settings, "_PATIENCE", 0.01)
    settings._make(tmp_path, "name")
    assert capsys.readouterr().err == "Archiving Spark's classes, once on this machine (about 20 seconds) …\n"


@pytest.mark.slow
def test_it_holds_what_the_steps_need(spark: SparkSession, tmp_path: Path) -> None:
    session.rehearse(spark, tmp_path)
    assert spark.read.parquet(str(tmp_path / "raw")).count() == 10
    assert spark.read.parquet(str(tmp_path / "staged")).count() == 10


def test_an_archive_that_is_not_whole_is_none(tmp_path: Path) -> None:
    (tmp_path / "spark-classes-x.100.jsa").write_bytes(bytes(99))
    assert find_archive(tmp_path, "spark-classes-x") is None
    (tmp_path / "spark-classes-x.99.jsa").write_bytes(bytes(99))
    assert find_archive(tmp_path, "spark-classes-x") == tmp_path / "spark-classes-x.99.jsa"


def test_where_none_can_be_made_spark_starts_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "-Dmine=1")
    monkeypatch.setattr(settings.sys, "executable", "/nowhere/python")
    archive_classes(find_java())
    monkeypatch.setattr(settings.subprocess, "run", None)  # a second try would fail the test
    archive_classes(find_java())
    monkeypatch.setattr(settings.atexit, "register", None)
    share_classes(find_java())
    assert os.environ["SPARK_SUBMIT_OPTS"] == "-Dmine=1"


def test_a_machine_that_was_busy_tries_again_the_next_day(tmp_path: Path) -> None:
    assert not has_failed(tmp_path, "name")
    marker = tmp_path / "name.failed"
    marker.touch()
    assert has_failed(tmp_path, "name")
    yesterday = time.time() - 25 * 3600
    os.utime(marker, (yesterday, yesterday))
    assert not has_failed(tmp_path, "name")


START = """
import sys
from pathlib import Path
from zync_assets.spark.session import spark_session
spark = spark_session({"master": "local[1]"})
maps = Path(f"/proc/{spark.sparkContext._gateway.proc.pid}/maps").read_text()
print("spark-classes-" in maps)
"""


@pytest.mark.slow
def test_the_first_session_does_not_wait_for_the_archive(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_SUBMIT_OPTS"}
    environment["XDG_CACHE_HOME"] = str(tmp_path)

    def started() -> tuple[str, str]:
        command = [sys.executable, "-c", START]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return done.stdout, done.stderr

    notice = "Spark's classes are archived in the background, once on this machine, for quicker starts.\n"
    output, errors = started()
    assert output == "False\n" and errors.endswith(notice)
    deadline = time.monotonic() + 150
    while not list(tmp_path.glob("zync/*.jsa")):
        assert time.monotonic() < deadline, (tmp_path / "zync" / "spark-classes.log").read_text()
        time.sleep(0.1)
    output, errors = started()
    assert output == "True\n" and "archived" not in errors


@pytest.mark.parametrize("given", ["-Xshare:off", "-XX:SharedArchiveFile=/mine.jsa"])
def test_a_user_s_own_choice_stays(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", given)
    share_classes(find_java())
    assert os.environ["SPARK_SUBMIT_OPTS"] == given
