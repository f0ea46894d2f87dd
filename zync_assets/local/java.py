"""Which Java runs the broker, the registry and Spark.

Spark 4 needs Java 17 or 21 with the module ``jdk.incubator.vector``, which trimmed runtimes leave out; Kafka and
the registry are content with the same.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from zync_assets.errors import SetupError

SUPPORTED = (17, 21)
VECTOR_MODULE = "jdk.incubator.vector"
INSTALL = (
    "Install one (Debian, Ubuntu: apt-get install openjdk-17-jdk-headless; other systems: Temurin 17 from "
    "https://adoptium.net/temurin/releases?version=17)"
)


def find_java() -> Path:
    """The ``java`` of JAVA_HOME, else the one on PATH, as a resolved path.

    Raises SetupError where there is none, where it is neither 17 nor 21, or where it lacks a module that Spark
    needs. No JVM is started when the installation has a ``release`` file, as all OpenJDK builds do.
    """
    home = os.environ.get("JAVA_HOME")
    executable = _of_home(Path(home)) if home else _on_path()
    version = java_version(executable)
    said = re.match(r"(?:1\.)?(\d+)", version)
    major = int(said.group(1)) if said else 0
    if major not in SUPPORTED:
        fault = "too old" if major < SUPPORTED[0] else "too new" if major > SUPPORTED[-1] else "not supported"
        raise SetupError(f"Java {version} at {executable} is {fault}: a full Java 17 or 21 is needed. {_cure(home)}")
    modules = _release(executable).get("MODULES")
    if modules is not None and VECTOR_MODULE not in modules.split():
        raise SetupError(
            f"Java {version} at {executable} lacks the module {VECTOR_MODULE} that Spark needs: "
            f"a full Java 17 or 21 is needed. {_cure(home)}"
        )
    return executable


def java_version(executable: Path) -> str:
    """The version of a ``java``, such as ``17.0.15``; SetupError if the executable does not run."""
    return _release(executable).get("JAVA_VERSION") or _ask(executable)


def _cure(home: str | None) -> str:
    return f"{INSTALL}, and set JAVA_HOME to its folder" + (f" (it is {home} now)." if home else ".")


def _of_home(home: Path) -> Path:
    executable = home / "bin" / "java"
    if not os.access(executable, os.X_OK):
        raise SetupError(
            f"JAVA_HOME is {home}, which holds no bin/java: set it to the folder of a full Java 17 or 21, "
            f"or unset it. {INSTALL}."
        )
    return executable.resolve()


def _on_path() -> Path:
    found = shutil.which("java")
    if found is None:
        raise SetupError(f"There is no Java: JAVA_HOME is not set and PATH holds no java. {INSTALL}.")
    return Path(found).resolve()


def _release(executable: Path) -> dict[str, str]:
    """The NAME="value" lines of the installation's ``release`` file; empty when there is no such file."""
    try:
        text = (executable.parent.parent / "release").read_text(errors="replace")
    except OSError:
        return {}
    return dict(re.findall(r'^(\w+)="(.*)"\s*$', text, re.MULTILINE))


def _ask(executable: Path) -> str:
    try:
        answer = subprocess.run([executable, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"Java at {executable} does not run ({error}). {INSTALL}.") from error
    match = re.search(r'version "([^"]+)"', answer.stderr + answer.stdout)
    if match is None:
        raise SetupError(f"Java at {executable} does not tell its version. {INSTALL}.")
    return match.group(1)
