"""The cache of jars: filled once, whole or not at all. A script stands in for Java, so that no network is needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from zync_assets.errors import SetupError
from zync_assets.local import java as local_java

IVY_THAT_WORKS = """#!/bin/sh
echo run >> "{runs}"
for last; do :; done
out="${{last%%/\\[conf\\]*}}"
mkdir -p "$out/kafka" "$out/registry" "$out/unpacked"
echo jar > "$out/kafka/kafka.jar"
echo jar > "$out/unpacked/app-runner.jar"
tar -czf "$out/registry/app-all.tar.gz" -C "$out/unpacked" .
sleep {seconds}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "zync"


def script(folder: Path, text: str) -> Path:
    path = folder / "java"
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_two_at_once_fetch_once_and_later_ones_not_at_all(cache: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    java = script(tmp_path, IVY_THAT_WORKS.format(runs=runs, seconds=0.3))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(local_java.resolve, [java, java])

    assert first == second == local_java.resolve(java)
    assert [path.name for path in first.kafka.iterdir()] == ["kafka.jar"]
    assert first.registry.is_file()
    assert runs.read_text() == "run\n"
    assert not list(cache.glob("fetching-*"))


def test_a_kill_in_the_middle_leaves_nothing_that_looks_finished(cache: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    slow = script(tmp_path, IVY_THAT_WORKS.format(runs=runs, seconds=30))
    resolve = "import sys, pathlib; from zync_assets.local import java; java.resolve(pathlib.Path(sys.argv[1]))"
    victim = subprocess.Popen([sys.executable, "-c", resolve, slow], start_new_session=True)
    while not list(cache.glob("fetching-*/out/registry/*.gz")):
        assert victim.poll() is None
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()

    quick = script(tmp_path, IVY_THAT_WORKS.format(runs=runs, seconds=0))

    assert local_java.resolve(quick).registry.is_file()
    assert runs.read_text() == "run\nrun\n"
    assert not list(cache.glob("fetching-*"))


def test_a_fetch_that_fails_says_so_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEFAULT_ARTIFACT_REPOSITORY", "https://somebody:secret@mirror.example/maven")
    java = script(tmp_path, "#!/bin/sh\necho 'module not found: org.apache.kafka#kafka_2.13;1'\nexit 1\n")

    with pytest.raises(
        SetupError, match=r"fetched from https://mirror\.example/maven \(module not found.*proxy"
    ) as error:
        local_java.resolve(java)

    assert "secret" not in str(error.value)
    assert [path.name for path in cache.iterdir()] == ["services.lock"]
