"""The package's root: which names it exports, that they are loaded late, and that the example of each one runs."""

from __future__ import annotations

import doctest
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import zync_assets
from zync_assets import errors

EXPORTS = {
    *("load_pipeline", "build_definitions", "Pipeline", "KafkaResource", "RegistryResource", "ZyncPipelineComponent"),
    *(name for name, item in vars(errors).items() if inspect.isclass(item) and item.__module__ == errors.__name__),
}
"""The list of exports: the API of a pipeline, and every error with its parts."""


def test_the_root_exports_the_api_and_every_error() -> None:
    assert sorted(zync_assets.__all__) == sorted(EXPORTS)
    assert set(dir(zync_assets)) >= EXPORTS
    assert all(getattr(zync_assets, name).__name__ == name for name in EXPORTS)
    with pytest.raises(AttributeError, match="module 'zync_assets' has no attribute 'pipelines'"):
        zync_assets.pipelines  # noqa: B018
    assert (Path(zync_assets.__file__).parent / "py.typed").is_file()


def test_the_help_of_an_export_holds_no_value_of_the_environment() -> None:
    script = (
        "import pydoc, zync_assets, zync_assets.definitions as dagster\n"
        "for item in [dagster.load_definitions, *(getattr(zync_assets, name) for name in zync_assets.__all__)]:\n"
        "    print(pydoc.plain(pydoc.render_doc(item)))\n"
    )
    environment = {**os.environ, "A_PASSWORD_OF_MINE": "hunter2"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert "load_pipeline(path: " in done.stdout and "load_definitions(env: " in done.stdout
    assert "A_PASSWORD_OF_MINE" not in done.stdout and "hunter2" not in done.stdout


@pytest.mark.parametrize("name", ["", "ZyncError", "load_pipeline"])
def test_the_root_loads_neither_dagster_nor_spark_for_names_that_need_neither(name: str) -> None:
    script = (
        f"import json, sys, zync_assets\ngetattr(zync_assets, {name!r}, None)\nprint(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {module.split(".")[0] for module in json.loads(done.stdout)}
    assert not loaded & {"dagster", "pyspark", "confluent_kafka", "deltalake", "pandas"}


@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_the_example_of_an_export_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    item = getattr(zync_assets, name)
    (example,) = doctest.DocTestFinder(recurse=False).find(item, name, globs={})
    report: list[str] = []
    outcome = doctest.DocTestRunner().run(example, out=report.append)
    assert outcome.attempted > 0, f"{name} has no example"
    assert outcome.failed == 0, "".join(report)
