"""``zync version`` says what a bug report needs, whatever is missing."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version

import confluent_kafka
import pytest
from click.testing import CliRunner

from zync_assets.cli.main import main


def test_versions_as_json() -> None:
    result = CliRunner().invoke(main, ["version", "--format", "json"])

    said = json.loads(result.stdout)
    assert said["zync-assets"] == version("zync-assets")
    assert said["python"] == platform.python_version()
    assert said["pyspark"] == version("pyspark")
    assert said["librdkafka"] == confluent_kafka.libversion()[0]


def test_a_missing_package_and_a_missing_java_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zync_assets.cli.version.PACKAGES", ("no-such-package",))
    monkeypatch.setenv("JAVA_HOME", "/nowhere")

    result = CliRunner().invoke(main, ["version", "--format", "json"])

    said = json.loads(result.stdout)
    assert result.exit_code == 0
    assert said["no-such-package"] == "not installed"
    assert "JAVA_HOME is /nowhere" in said["java"]
