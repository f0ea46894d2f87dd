"""Dagster loads the pipeline that the environment names, without a network."""

from __future__ import annotations

import gc
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from dagster import DagsterInstance, DefaultSensorStatus, Definitions
from dagster._core.workspace.load_target import PyProjectFileTarget

from zync_assets import definitions as module
from zync_assets.definitions import load_definitions
from zync_assets.errors import PipelineFileError, SetupError

FILE = """
kafka: {bootstrap.servers: "192.0.2.1:9092"}
registry: {url: "http://192.0.2.1:8081"}
lake: ./lake
inputs: [{topic: a, pool: Raw}]
outputs: [{topic: b, pool: Staging}]
transforms: [{type: stateless, in: a, out: b, key: in.key, value: in.value}]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "unreachable.yaml"
    path.write_text(FILE)
    return path


def test_loading_asks_no_broker_no_registry_no_lake_and_starts_no_jvm(file: Path) -> None:
    definitions = load_definitions({"ZYNC_PIPELINE": str(file)})
    Definitions.validate_loadable(definitions)
    assert not (file.parent / "lake").exists()
    assert [item.name for item in definitions.resolve_all_job_defs() if not item.name.startswith("__")] == [
        "check_unreachable",
        "etl_and_publish_Staging_of_unreachable",
        "ingest_a_of_unreachable",
    ]


@pytest.mark.parametrize("is_on", [True, False])
def test_loading_leaves_the_garbage_collector_as_it_was(file: Path, is_on: bool) -> None:
    before = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        load_definitions({"ZYNC_PIPELINE": str(file)})
        assert gc.isenabled() is is_on
        with pytest.raises(SetupError):
            load_definitions({"ZYNC_SENSOR": "perhaps"})
        assert gc.isenabled() is is_on
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize(
    ("kept", "assets", "jobs"),
    [
        ("inputs", {"kafka/a", "Raw/a"}, ["check_unreachable", "ingest_a_of_unreachable"]),
        ("outputs", {"Staging/b", "kafka/b"}, ["check_unreachable", "etl_and_publish_Staging_of_unreachable"]),
    ],
)
def test_a_file_of_inputs_alone_or_of_outputs_alone_is_a_graph(
    file: Path, kept: str, assets: set[str], jobs: list[str]
) -> None:
    dropped = ("transforms", "outputs" if kept == "inputs" else "inputs")
    file.write_text("".join(line for line in FILE.splitlines(keepends=True) if not line.startswith(dropped)))
    definitions = load_definitions({"ZYNC_PIPELINE": str(file)})
    Definitions.validate_loadable(definitions)
    graph = definitions.resolve_asset_graph()
    assert {key.to_user_string() for key in graph.get_all_asset_keys()} == assets
    assert {key.to_user_string() for key in graph.executable_asset_keys} == (
        {"Raw/a"} if kept == "inputs" else {"kafka/b"}
    )
    assert [item.name for item in definitions.resolve_all_job_defs() if not item.name.startswith("__")] == jobs


def test_a_broken_file_says_all_that_is_wrong_with_it(file: Path) -> None:
    file.write_text(FILE.replace("pool: Raw", "pool: kafka").replace("type: stateless", "type: statelss"))
    with pytest.raises(PipelineFileError) as caught:
        load_definitions({"ZYNC_PIPELINE": str(file)})
    assert len(caught.value.problems) == 2


def test_a_file_that_is_not_there_and_a_sensor_that_is_neither(file: Path) -> None:
    with pytest.raises(SetupError, match=r"ZYNC_PIPELINE is gone\.yaml"):
        load_definitions({"ZYNC_PIPELINE": "gone.yaml"})
    with pytest.raises(SetupError, match="ZYNC_SENSOR is 'on'"):
        load_definitions({"ZYNC_PIPELINE": str(file), "ZYNC_SENSOR": "on"})


@pytest.mark.parametrize(
    ("env", "status"),
    [
        ({}, DefaultSensorStatus.STOPPED),
        ({"ZYNC_SENSOR": "running"}, DefaultSensorStatus.RUNNING),
    ],
)
def test_the_sensor_of_ones_own_pipeline_is_switched_on_by_hand(
    file: Path, env: dict[str, str], status: DefaultSensorStatus
) -> None:
    definitions = load_definitions({"ZYNC_PIPELINE": str(file), **env})
    assert definitions.resolve_sensor_def("zync_unreachable").default_status == status


def test_without_a_name_it_is_the_demo_with_its_sensor_on(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("ZYNC_")}
    script = (
        "from zync_assets.definitions import defs\n"
        "print(*sorted(key.to_user_string() for key in defs.resolve_asset_graph().get_all_asset_keys()))\n"
        "print(defs.resolve_sensor_def('zync_invoices').default_status.value)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**env, "ZYNC_DEMO_DIR": str(tmp_path / "none")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    keys, status = done.stdout.splitlines()[-2:]
    assert (
        keys
        == "Raw/InvoiceStatus Raw/Invoices Staging/NewInvoices kafka/InvoiceStatus kafka/Invoices kafka/NewInvoices"
        " warehouse/NewInvoices"
    )
    assert status == "RUNNING"


def test_another_demo_has_the_services_of_the_demo_and_its_sensor_on(monkeypatch: pytest.MonkeyPatch) -> None:
    services = {
        "KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1",
        "SCHEMA_REGISTRY_URL": "http://127.0.0.1:2",
        "ZYNC_LAKE": "/tmp/lake",
    }
    monkeypatch.setattr(module, "demo_environment", lambda: services)
    definitions = load_definitions({"ZYNC_PIPELINE": "demo/orders.yaml"})
    assert definitions.resolve_sensor_def("zync_orders").default_status == DefaultSensorStatus.RUNNING


ROOT = Path(__file__).parents[1]


def test_the_folder_is_a_project_of_dagster_and_of_dg() -> None:
    (origin,) = PyProjectFileTarget(str(ROOT / "pyproject.toml")).create_origins()
    assert (origin.location_name, origin.loadable_target_origin.module_name) == (
        "zync_assets",
        "zync_assets.definitions",
    )


@pytest.mark.slow
def test_the_assets_are_listed_by_the_command_of_its_page() -> None:
    [command] = re.findall(
        r"^    (dagster asset list.*?)(?: +#.*)?$", (ROOT / "demo" / "dagster.md").read_text(), re.MULTILINE
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("ZYNC_")}
    listed = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)], env=env, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "Staging/NewInvoices" in listed.stdout.splitlines()


def test_the_settings_of_the_page_on_dagster_show_no_dialog() -> None:
    with DagsterInstance.ephemeral(settings=yaml.safe_load((ROOT / "demo" / "dagster.yaml").read_text())) as instance:
        assert not instance.nux_enabled
        assert not instance.telemetry_enabled
