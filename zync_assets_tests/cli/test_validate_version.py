"""``zync version`` says what a bug report needs, whatever is missing."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version

import confluent_kafka
import pytest
from click.testing import CliRunner

from zync_assets.cli.main import main
from zync_assets.kafka import librdkafka


def test_versions_as_json() -> None:
    result = CliRunner().invoke(main, ["version", "--format", "json"])

    said = json.loads(result.stdout)
    assert said["zync-assets"] == version("zync-assets")
    assert said["python"] == platform.python_version()
    assert said["pyspark"] == version("pyspark")
    assert said["librdkafka"] == confluent_kafka.libversion()[0]
    assert said["records"] == f"librdkafka {said['librdkafka']} directly, compiled"


def test_a_librdkafka_that_lacks_a_function_and_a_folder_that_cannot_be_written_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/dev/null/none")
    said = json.loads(CliRunner().invoke(main, ["version", "--format", "json"]).stdout)
    assert "not compiled: numba can write its compiled code to none of /dev/null/none" in said["records"]
    assert "set NUMBA_CACHE_DIR" in said["records"]

    monkeypatch.setattr(librdkafka, "_FUNCTIONS", {"rd_kafka_of_tomorrow": (None, [])})
    librdkafka.library.cache_clear()
    try:
        found = CliRunner().invoke(main, ["version", "--format", "json"])
    finally:
        monkeypatch.undo()
        librdkafka.library.cache_clear()
    assert f"confluent-kafka {version('confluent-kafka')} shows no function rd_kafka_of_tomorrow" in found.stdout


def test_a_missing_package_and_a_missing_java_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zync_assets.cli.validate.PACKAGES", ("no-such-package",))
    monkeypatch.setenv("JAVA_HOME", "/nowhere")

    result = CliRunner().invoke(main, ["version", "--format", "json"])

    said = json.loads(result.stdout)
    assert result.exit_code == 0
    assert said["no-such-package"] == "not installed"
    assert "JAVA_HOME is /nowhere" in said["java"]
