"""The component in a real ``dg`` project: scaffolded, checked, listed, beside a plain asset downstream."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from dagster import Definitions, ScaffoldRequest
from dagster.components.scaffold.scaffold import NoParams

import zync_assets
from zync_assets import build_definitions, load_pipeline
from zync_assets.assets.component import ZyncPipelineScaffolder

PYPROJECT = """
[project]
name = "warehouse"
version = "0.1"
[tool.dg]
directory_type = "project"
[tool.dg.project]
root_module = "warehouse"
"""
DEFINITIONS = """
from pathlib import Path
import dagster
@dagster.definitions
def defs():
    return dagster.load_from_defs_folder(path_within_project=Path(__file__).parent)
"""
DOWNSTREAM = """
import dagster
import polars
@dagster.asset(ins={"rows": dagster.AssetIn(["eu", "Raw", "orders"])})
def revenue(rows: polars.LazyFrame) -> None: ...
"""
DEFS_YAML = """
type: zync_assets.ZyncPipelineComponent
attributes:
  pipeline: shop.yaml
  key_prefix: eu
  owners: ["team:sales"]
  groups: {source_topics: topics, Raw: lake}
"""


class Project:
    """A project of ``dg`` in a folder, and its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.defs = folder / "src/warehouse/defs"
        self.defs.mkdir(parents=True)
        (folder / "pyproject.toml").write_text(PYPROJECT)
        (folder / "src/warehouse/__init__.py").touch()
        (self.defs / "__init__.py").touch()
        (folder / "src/warehouse/definitions.py").write_text(DEFINITIONS)

    def dg(self, *words: str) -> str:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self.folder / "src"), str(Path(zync_assets.__file__).parents[1])]),
            "DAGSTER_DISABLE_TELEMETRY": "yes",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        command = [sys.executable, "-m", "dagster_dg_cli.cli", *words]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def test_two_starters_stand_side_by_side_and_their_lakes_lie_outside_the_package(tmp_path: Path) -> None:
    component = "zync_assets.ZyncPipelineComponent"
    loaded: list[Definitions] = []
    for name in ("shop", "second"):
        folder = tmp_path / name
        folder.mkdir()
        ZyncPipelineScaffolder().scaffold(ScaffoldRequest(component, folder, "yaml", tmp_path, NoParams()))
        defs_yaml = yaml.safe_load((folder / "defs.yaml").read_text())
        assert defs_yaml == {"type": component, "attributes": {"pipeline": f"{name}.yaml", "key_prefix": name}}
        loaded.append(build_definitions(folder / f"{name}.yaml", key_prefix=name))
        assert load_pipeline(folder / f"{name}.yaml", {}).lake == str(Path.home() / ".zync/lakes" / name)
        assert load_pipeline(folder / f"{name}.yaml", {"ZYNC_LAKE": "s3://b/lake"}).lake == f"s3://b/lake/{name}"
    merged = Definitions.merge(*loaded)
    Definitions.validate_loadable(merged)
    keys = {key.to_user_string() for key in merged.resolve_all_asset_keys()}
    assert keys == {f"{name}/{pool}/orders" for name in ("shop", "second") for pool in ("kafka", "Raw")}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_dg_scaffolds_checks_and_lists_a_pipeline_beside_a_downstream_asset(tmp_path: Path) -> None:
    project = Project(tmp_path)
    assert "zync_assets.ZyncPipelineComponent" in project.dg("list", "components")
    project.dg("scaffold", "defs", "zync_assets.ZyncPipelineComponent", "shop")
    assert "pipeline: shop.yaml" in (project.defs / "shop/defs.yaml").read_text()
    project.dg("check", "defs")

    (project.defs / "shop/defs.yaml").write_text(DEFS_YAML)
    (project.defs / "revenue.py").write_text(DOWNSTREAM)
    project.dg("check", "defs")
    project.dg("check", "yaml")
    listed = {item["asset_key"]: item for item in json.loads(project.dg("list", "defs", "--json"))["assets"]}
    assert set(listed) == {"eu/kafka/orders", "eu/Raw/orders", "revenue"}
    assert listed["revenue"]["dependency_keys"] == ["eu/Raw/orders"]
    raw, source = listed["eu/Raw/orders"], listed["eu/kafka/orders"]
    assert raw["dependency_keys"] == ["eu/kafka/orders"]
    assert (raw["group_name"], source["group_name"]) == ("lake", "topics")
    assert raw["owners"] == source["owners"] == [{"team": "sales"}]
