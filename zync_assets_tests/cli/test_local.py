"""``zync local`` from the first start to the last file."""

from __future__ import annotations

import json
import re
import shlex
import socket
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result

from zync_assets.cli.main import main


def zync(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def pasted(message: str) -> Result:
    """Run the command that a message prints."""
    [found] = re.findall(r"zync (local .*)", message)
    return zync(*shlex.split(found))


def test_up_status_down_and_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "services"
    monkeypatch.setenv("ZYNC_LOCAL_DIR", str(home))
    assert json.loads(zync("local", "status", "--format", "json").stdout) == {"running": False}
    try:
        up = pasted(zync("local", "status").stderr)
        assert up.exit_code == 0
        said = json.loads(zync("local", "status", "--format", "json").stdout)
        assert said["running"]
        assert f"export KAFKA_BOOTSTRAP_SERVERS={said['bootstrap_servers']}\n" in up.stdout
        assert f"export SCHEMA_REGISTRY_URL={said['registry_url']}\n" in up.stdout
        assert httpx.get(f"{said['registry_url']}/subjects").json() == []
        host, port = said["bootstrap_servers"].split(":")
        socket.create_connection((host, int(port)), timeout=10).close()

        assert pasted(zync("local", "up", "--kafka-port", int(port) - 1).stderr).stderr == "stopped\n"
        stopped = zync("local", "status").stdout
        assert "running" not in stopped
        assert "export" not in stopped
        assert zync("local", "down").stderr == "nothing runs\n"
        cleaned = pasted(zync("local", "up", "--lake", tmp_path / "other").stderr)
    finally:
        zync("local", "down", "--clean")
    assert str(home) in cleaned.stderr
    assert not home.exists()


def test_an_occupied_port_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = zync("local", "up", "--dir", tmp_path / "services", "--kafka-port", port)

    assert result.exit_code == 1
    assert f"error: Port {port}" in result.stderr
