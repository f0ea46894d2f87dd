"""The files of the Spark servers: files of another version, and files of servers that do not listen yet."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from zync_assets.cli.main import main
from zync_assets.errors import SetupError
from zync_assets.local.processes import token_option
from zync_assets.spark import shared_servers

TOKEN = "70ce0f7e57ab1e5c"
GIVEN = {"token": TOKEN, "secret": "s3cret", "settings": {"spark.master": "local[1]"}, "idle_seconds": 60}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZYNC_SPARK_DIR", str(tmp_path))
    return tmp_path.resolve()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Stands for a server's process, which is known by the token on its command line."""
    command = [sys.executable, "-c", "import time; time.sleep(300)", token_option(TOKEN)]
    # The process would inherit that this one ignores SIGTERM, as the library of a target lets it.
    disposition = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with subprocess.Popen(command) as process:
        if disposition is not None:
            signal.signal(signal.SIGTERM, disposition)
        yield process
        process.kill()


def record(folder: Path, given: object, ready: object = None) -> Path:
    folder.mkdir()
    for name, content in (("server.json", given), ("ready.json", ready)):
        if content is not None:
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def spark(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["spark", *arguments])


def test_a_record_of_another_form_is_named_and_hides_no_other_server(
    home: Path, process: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    ready = {"token": TOKEN, "port": 4, "pid": process.pid, "started": 0.0}
    good = record(home / "good", {**GIVEN, "colour": "of a later version"}, {**ready, "colour": "too"})
    bad = {
        record(home / "empty", {}, ready) / "server.json": "token is missing or of another kind",
        record(home / "list", [1], ready) / "server.json": "it is no JSON object",
        record(home / "settings", {**GIVEN, "settings": None}, ready) / "server.json": "settings is missing",
        record(home / "half", '{"token": ', ready) / "server.json": "Expecting value",
        record(home / "no pid", GIVEN, {"token": TOKEN}) / "ready.json": "port is missing or of another kind",
        record(home / "half ready", GIVEN, "{") / "ready.json": "Expecting property name",
    }
    for path, why in bad.items():
        with pytest.raises(SetupError, match=why):
            shared_servers.find(path.parent)
    with caplog.at_level(logging.WARNING):
        status = spark("status", "--format", "json")
    assert (status.exit_code, json.loads(status.stdout)["folder"]) == (0, str(good))
    for path in bad:
        assert caplog.text.count(f"{path} can't be read (") == 1
    assert "remove it" in caplog.text and "s3cret" not in caplog.text
    down = spark("down")
    assert (down.exit_code, down.stderr) == (0, "stopped 1\n")
    assert process.wait(20) != 0
    assert not any(path.name.endswith(".json") for path in good.iterdir())


def test_a_server_that_is_starting_is_seen_and_stopped(home: Path, process: subprocess.Popen[bytes]) -> None:
    record(home / "gone", {**GIVEN, "token": "of one that ended"})
    folder = record(home / "starting", GIVEN)
    assert shared_servers.find_all() == []
    assert shared_servers.find_silent() == [folder]
    status = spark("status")
    assert (status.stdout, status.stderr) == ("", f"starting or ending: the server of {folder}\n")
    assert spark("down").stderr == "stopped 1\n"
    assert process.wait(20) != 0
    assert spark("down").stderr == "nothing runs\n"


def test_a_folder_without_a_process_is_no_server(home: Path) -> None:
    ready = {"token": TOKEN, "port": 4, "pid": os.getpid(), "started": 0.0}
    record(home / "killed", GIVEN, ready)
    assert spark("status").stderr == "nothing runs: `zync spark up` starts one\n"
