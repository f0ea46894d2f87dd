"""Processes that a process has started, and free ports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from zync_assets.local import processes

SCRIPT = """
import os, subprocess, sys, time
from zync_assets.local import processes

earlier_child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
earlier = processes.children()
# A child between fork and exec, where a Ctrl-C may find it.
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
processes.kill_children(earlier)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), earlier_child.poll())
earlier_child.kill()
"""


def test_new_children_are_killed_before_they_begin_their_program_and_earlier_ones_stay() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert run.stdout == "-9 None\n"


def test_ports_that_are_free_at_once_differ() -> None:
    ports = processes.free_ports(200)
    assert len({*ports}) == 200
    assert all(processes.port_is_free(port) for port in ports)


@pytest.mark.parametrize(
    ("variables", "locale"),
    [
        ({}, "C.UTF-8"),
        ({"LANG": "C.UTF-8"}, None),
        ({"LANG": "C.UTF-8", "LC_ALL": "C"}, "C.UTF-8"),
        ({"LANG": "C", "LC_CTYPE": "en_US.UTF-8"}, None),
    ],
)
def test_java_gets_a_locale_that_has_every_file_name(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], locale: str | None
) -> None:
    for name in ("LANG", "LC_CTYPE", "LC_ALL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert processes.python_environment().get("LC_ALL") == locale
