"""Each private name of a library is there in the versions that we allow, and its absence is an error with a cure."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import zync_assets
from zync_assets import private
from zync_assets.errors import SetupError

PACKAGE = Path(zync_assets.__file__).parent
LIBRARIES = ("confluent_kafka", "dagster", "deltalake", "fastavro", "numba", "pyarrow", "pyspark", "sqlglot")


@pytest.mark.parametrize(("package", "place", "name"), private.NAMES)
def test_a_private_name_is_there_or_an_error_says_so(
    package: str, place: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert private.private(package, place, name) is not ...
    module, _, owner = place.rpartition(".")
    held: Any = getattr(import_module(module), owner) if owner[0].isupper() else import_module(place)
    monkeypatch.delattr(held, name)
    monkeypatch.setattr(private.importlib, "import_module", _without(name))
    with pytest.raises(SetupError, match=rf"{package} \d.* has no .*{name}.*pip install '{package}"):
        private.private(package, place, name)


def _without(name: str) -> Any:
    def found(path: str) -> Any:
        if path.endswith(f".{name}"):
            raise ImportError(path)
        return import_module(path)

    return found


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("confluent-kafka", "_rest_client"),
        ("confluent-kafka", "verify"),
        ("pyspark", "_channel"),
        ("PyMySQL", "_read_timeout"),
    ],
)
def test_a_private_attribute_that_an_object_lacks_is_an_error(package: str, name: str) -> None:
    with pytest.raises(SetupError, match=rf"{package} \d.* has no object\.{name}.*pip install"):
        private.of(package, object(), name)
    with pytest.raises(SetupError, match=rf"{package} \d.* has no object\.{name}.*pip install"):
        private.put(package, object(), name, None)


def test_private_names_of_libraries_are_imported_nowhere_else() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {module}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for module in _imported(node)
        if module.split(".")[0] in LIBRARIES and any(part.startswith("_") for part in module.split("."))
    ]
    assert found == []


def test_private_attributes_of_libraries_are_read_nowhere_else() -> None:
    ours = {"_collect", "_frame", "_replace"}
    found = [
        f"{path.relative_to(PACKAGE)}: {ast.unparse(node)}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        # The codes of librdkafka's own errors, such as ClientError._TRANSPORT, are public.
        if ast.unparse(node.value) not in ("self", "cls", "super()", "ClientError", "KafkaError")
        and node.attr not in ours
    ]
    assert found == []


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []
