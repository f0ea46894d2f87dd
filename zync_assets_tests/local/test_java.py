"""The choice of a Java installation, and the error without a fitting Java. The installations are folders with a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from zync_assets.errors import SetupError
from zync_assets.local.java import VECTOR_MODULE, find_java, java_version

FULL = f"java.base java.sql {VECTOR_MODULE}"


def install(home: Path, version: str | None, *, modules: str = FULL, says: str = "") -> Path:
    """An installation with a ``release`` file of that version (None: no such file) and a ``java`` that says that."""
    (home / "bin").mkdir(parents=True)
    java = home / "bin" / "java"
    java.write_text(f"#!/bin/sh\ntouch {home}/started\necho '{says}' >&2\n")
    java.chmod(0o755)
    if version:
        (home / "release").write_text(f'IMPLEMENTOR="Somebody"\nJAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    return java


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with no Java at all; the folder to install some in."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


@pytest.mark.parametrize("version", ["17", "17.0.15", "21.0.2"])
def test_java_home_comes_before_path_and_starts_no_jvm(
    only: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    install(only, "11.0.1")
    java = install(only / "jdk", version)
    monkeypatch.setenv("JAVA_HOME", str(only / "jdk"))

    assert find_java() == java
    assert java_version(java) == version
    assert not (only / "jdk" / "started").exists()


def test_a_link_on_path_is_followed_to_the_installation(only: Path) -> None:
    java = install(only / "jdk", "17.0.15")
    (only / "bin").mkdir()
    (only / "bin" / "java").symlink_to(java)

    assert find_java() == java


def test_without_a_release_file_java_is_asked(only: Path) -> None:
    java = install(only, None, says='openjdk version "21.0.2" 2024-01-16')

    assert find_java() == java
    assert java_version(java) == "21.0.2"


@pytest.mark.parametrize(
    ("version", "fault"),
    [("1.8.0_402", "too old"), ("11.0.22", "too old"), ("18.0.1", "not supported"), ("25.0.3", "too new")],
)
def test_another_version_is_named_with_its_place_and_the_cure(only: Path, version: str, fault: str) -> None:
    java = install(only, version)

    with pytest.raises(SetupError, match=fault) as error:
        find_java()
    assert version in str(error.value)
    assert str(java) in str(error.value)
    assert "openjdk-17-jdk-headless" in str(error.value)
    assert "Temurin 17" in str(error.value)


def test_a_trimmed_java_is_not_enough(only: Path) -> None:
    install(only, "17.0.15", modules="java.base java.sql")

    with pytest.raises(SetupError, match=VECTOR_MODULE):
        find_java()


def test_no_java_at_all(only: Path) -> None:
    with pytest.raises(SetupError, match=r"no Java.*openjdk-17-jdk-headless"):
        find_java()


def test_a_wrong_java_home_is_an_error_even_when_path_has_a_java(only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(only, "17.0.15")
    monkeypatch.setenv("JAVA_HOME", str(only / "gone"))

    with pytest.raises(SetupError, match=r"JAVA_HOME is .*gone.*openjdk-17-jdk-headless"):
        find_java()


def test_a_java_that_does_not_run(only: Path) -> None:
    # macOS has such a stub where no Java is installed.
    install(only, None, says="Unable to locate a Java Runtime.")

    with pytest.raises(SetupError, match=r"does not tell its version.*openjdk-17-jdk-headless"):
        find_java()
