"""Imports point one way, and a command that needs no JVM loads nothing that is slow to load."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import zync_assets

PACKAGE = Path(zync_assets.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

LAYERS = {
    "the public API": 9,
    "definitions": 8,
    "cli": 7, "assets": 7,
    "checks": 6,
    "steps": 5,
    "audit": 4,
    "etl": 3, "lake": 3, "kafka": 3, "local": 3, "reading": 3,
    "codecs": 2,
    "": 1,
}  # fmt: skip
"""A module imports from its own folder and from lower layers. The lowest are the modules beside the folders: the pipeline
file's model, offsets, errors; ``reading`` are those that read the file, which ask the codecs about types."""

READING = ("pipeline_file", "pipeline_topics", "pipeline_rules")


def folder(name: str) -> str:
    """``zync_assets.lake.tables`` → ``lake``; empty for a module that is in none."""
    parts = name.split(".")
    if len(parts) > 1 and parts[1] in READING:
        return "reading"
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else ""


def own_name(path: Path) -> str:
    inner = path.relative_to(PACKAGE.parent).with_suffix("")
    return ".".join(part for part in inner.parts if part != "__init__")


def imported(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, inside functions and for types too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def users(package: str) -> set[str]:
    """The folders of the project whose modules import a package."""
    return {folder(own_name(path)) for path in MODULES if any(name.split(".")[0] == package for name in imported(path))}


@pytest.mark.parametrize("path", MODULES, ids=own_name)
def test_a_module_imports_from_lower_layers_only(path: Path) -> None:
    mine = "the public API" if path == PACKAGE / "__init__.py" else folder(own_name(path))
    for name in imported(path):
        other = folder(name)
        if name.split(".")[0] != "zync_assets" or other == mine:
            continue
        assert LAYERS[other] < LAYERS[mine], f"{own_name(path)} imports {name}"


@pytest.mark.parametrize(
    ("package", "folders"),
    [
        ("confluent_kafka", {"kafka", "cli"}),
        ("deltalake", {"lake", "cli"}),
        ("dagster", {"assets", "definitions", "cli"}),
        ("dagster_pyspark", {"assets", "definitions", "cli"}),
    ],
)
def test_only_one_folder_knows_a_package(package: str, folders: set[str]) -> None:
    """``zync version`` may name any of them."""
    found = users(package)
    assert found
    assert found <= folders
    for path in (PACKAGE / "cli").glob("*.py"):
        if path.name != "version.py":
            assert not any(name.split(".")[0] == package for name in imported(path)), path


@pytest.mark.parametrize("path", MODULES, ids=own_name)
def test_a_module_says_what_it_is_for(path: Path) -> None:
    text = path.read_text()
    if path.name != "__init__.py" or text.strip():
        assert ast.get_docstring(ast.parse(text))


@pytest.mark.parametrize(
    "command",
    [
        "validate",
        "status",
        "check",
        "ls",
        "info",
        "consume",
        "produce",
        "pending",
        "trace",
        "quarantine",
        "etl",
        "to-kafka",
    ],
)
def test_a_command_that_may_need_no_jvm_loads_neither_spark_nor_dagster(command: str) -> None:
    script = (
        "import sys, json\n"
        "from zync_assets.cli.main import main\n"
        f"main([{command!r}, '--help'], standalone_mode=False)\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert "click" in loaded
    assert not loaded & {"pyspark", "py4j", "dagster", "polars", "duckdb"}
