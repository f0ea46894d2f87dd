"""Imports point one way and form no circle, modules stay few and short, and a command that needs no JVM loads nothing slow."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import zync_assets

PACKAGE = Path(zync_assets.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = [path for path in FILES if path.name != "__init__.py"]

MOST_MODULES = 220
MOST_LINES = 450

LAYERS = {
    "the public API": 13,
    "definitions": 12, "__main__": 12,
    "cli": 11, "assets": 11,
    "runner": 10, "checks": 10,
    "quarantine": 9,
    "etl": 8, "sinks": 8,
    "ingest": 7, "publish": 7,
    "etl.rules": 6,
    "audit": 5, "upkeep": 5, "pipeline_file": 5,
    "spark": 4,
    "lake": 3, "kafka": 3, "local": 3,
    "codecs": 2,
    "": 1,
}  # fmt: skip
"""A module imports from its own folder and from lower layers. The lowest are the plain modules beside the folders: the model
of a pipeline file, offsets, errors. ETL stands above publish, since ETL encodes an output before it numbers the output. The
SQL of rules stands below every step, since the shapes of ingest use it too."""


def folder(name: str) -> str:
    """``zync_assets.lake.tables`` → ``lake``; empty for a plain module at the top."""
    parts = name.split(".")
    if parts[1:3] == ["etl", "rules"]:
        return "etl.rules"
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else ""


def own_name(path: Path) -> str:
    inner = path.relative_to(PACKAGE.parent).with_suffix("")
    return ".".join(part for part in inner.parts if part != "__init__")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, inside functions and for types too."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def users(package: str) -> set[str]:
    """The folders of the project whose modules import a package."""
    return {folder(own_name(path)) for path in FILES if any(name.split(".")[0] == package for name in imported(path))}


def test_modules_are_few_and_short() -> None:
    lengths = {own_name(path): len(path.read_text().splitlines()) for path in MODULES}
    assert len(lengths) <= MOST_MODULES
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


@pytest.mark.parametrize("path", FILES, ids=own_name)
def test_a_module_imports_from_lower_layers_only(path: Path) -> None:
    mine = "the public API" if path == PACKAGE / "__init__.py" else folder(own_name(path))
    for name in imported(path):
        other = folder(name)
        if name.split(".")[0] != "zync_assets" or other == mine:
            continue
        assert LAYERS[other] < LAYERS[mine], f"{own_name(path)} imports {name}"


def test_imports_form_no_circle() -> None:
    """Not even inside a folder, or by an import inside a function. The root imports the public API lazily and is left out."""
    names = {own_name(path) for path in FILES} - {"zync_assets"}
    left = {
        own_name(path): {
            name if name in names else name.rpartition(".")[0]
            for name in imported(path)
            if name.split(".")[0] == "zync_assets"
        }
        & names - {own_name(path)}
        for path in FILES
    }
    while leaves := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in leaves}
    assert {name: sorted(others & left.keys()) for name, others in left.items()} == {}


CHAIN = {
    "chain", "connect_chain", "connect_defaults", "connect_order", "connect_sink", "connect_types", "exactly_once",
    "evolution", "field_names", "events", "events_kills", "edits", "edits_generated", "feature_mix", "topics_as_they_are",
    "two_writers", "writers_side_by_side", "kills", "outage", "lake_faults", "replication", "many_topics", "s3", "secrets",
    "upgrades", "cluster_spark", "remedies", "readme", "packages", "public_api", "layers", "style", "checker", "torture",
    "partitions", "views", "views_kills", "views_tpch", "view_oracle",
}  # fmt: skip
"""Test files for the whole chain or the whole project. They stand beside the folders."""


def test_the_test_file_of_a_module_has_the_modules_name() -> None:
    """``etl/test_ledger.py`` and ``etl/test_ledger_compaction.py`` test ``etl/ledger.py``."""
    tests = PACKAGE.parent / "zync_assets_tests"
    strays: list[str] = []
    for path in tests.rglob("test_*.py"):
        inner, name = path.parent.relative_to(tests), path.stem.removeprefix("test_")
        if (PACKAGE / inner).is_dir() and not (inner == Path() and name in CHAIN):
            modules = {item.stem for item in (PACKAGE / inner).glob("*.py")}
            if not any(name == module or name.startswith(f"{module}_") for module in modules):
                strays.append(str(path.relative_to(tests)))
    assert strays == []


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
        if path.name != "validate.py":
            assert not any(name.split(".")[0] == package for name in imported(path)), path


@pytest.mark.parametrize("path", FILES, ids=own_name)
def test_a_module_says_what_it_is_for(path: Path) -> None:
    if path.name != "__init__.py" or path.read_text().strip():
        assert ast.get_docstring(tree(path))


COMMANDS_WITHOUT_JVM = (
    *("validate", "status", "check", "ls", "info", "consume", "produce"),
    *("pending", "trace", "quarantine", "etl", "to-kafka"),
)

LOADED_BY = f"""
import sys, json
from zync_assets.cli.main import main
loaded = {{}}
for command in {COMMANDS_WITHOUT_JVM}:
    main([command, "--help"], standalone_mode=False)
    loaded[command] = sorted({{name.split(".")[0] for name in sys.modules}})
print(json.dumps(loaded))
"""
"""Prints the packages that are loaded after each command, in one process: the modules of earlier commands stay loaded."""


def test_a_command_that_may_need_no_jvm_loads_neither_spark_nor_dagster() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED_BY], capture_output=True, text=True, check=True)
    for command, loaded in json.loads(done.stdout.splitlines()[-1]).items():
        assert "click" in loaded
        assert not {*loaded} & {"pyspark", "py4j", "dagster", "polars", "duckdb"}, command
