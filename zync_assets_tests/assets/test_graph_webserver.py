"""The graph as the web pages have it: the real webserver, its own run processes, everything asked for over GraphQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from zync_assets.assets.names import Names
from zync_assets.local.services import Services
from zync_assets.pipeline import Pipeline
from zync_assets_tests.assets.rig import OPEN, make_pipeline, orders, payments, send
from zync_assets_tests.assets.webserver import REPOSITORY, Webserver, events, webserver
from zync_assets_tests.network.processes import family, listening

SECOND = "1:0-999999"
NODES = """
{ assetNodes {
    assetKey { path } groupName kinds description isMaterializable isExecutable
    owners { ... on TeamAssetOwner { team } }
    dependencyKeys { path }
} }"""
LOCATION = """
query Location($name: String!) {
  workspaceLocationEntryOrError(name: $name) {
    ... on WorkspaceLocationEntry { locationOrLoadError { __typename ... on PythonError { errorChain { error { message } } } } }
  }
}"""


@pytest.fixture(scope="module")
def pipeline(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    made = make_pipeline(services, tmp_path_factory.mktemp("web"), "web.shop")
    send(made, "web.shop.orders", orders(1, 2, 3))
    send(made, "web.shop.orders", orders(4), partition=1)
    send(made, "web.shop.payments", payments(2, 4, -9))
    return made


@pytest.fixture(scope="module")
def names(pipeline: Pipeline) -> Names:
    return Names(pipeline)


@pytest.fixture(scope="module")
def server(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Webserver]:
    with webserver(tmp_path_factory.mktemp("dagster") / "home", pipeline.path) as running:
        yield running


def test_it_listens_on_this_machine_alone(server: Webserver) -> None:
    """The pages, and the process that loads the definitions."""
    places = {address.removeprefix("::ffff:") for address, _ in listening(family(psutil.Process(server.pid)))}
    assert places == {"127.0.0.1"}


def test_the_graph_says_what_things_are_for(server: Webserver) -> None:
    nodes = {"/".join(node["assetKey"]["path"]): node for node in server.ask(NODES)["assetNodes"]}
    assert {name: node["groupName"] for name, node in nodes.items() if "notes" not in name} == {
        "kafka/web.shop.orders": "source_topics",
        "kafka/web.shop.payments": "source_topics",
        "Raw/web.shop.orders": "Raw",
        "Raw/web.shop.payments": "Raw",
        "Staging/web.shop.sales": "Staging",
        "Staging/web.shop.refunds": "Staging",
        "kafka/web.shop.sales": "output_topics",
        "kafka/web.shop.refunds": "output_topics",
    }
    assert not nodes["kafka/web.shop.orders"]["isExecutable"]
    assert nodes["Raw/web.shop.orders"]["kinds"] == ["deltalake", "spark"]
    assert nodes["Raw/web.shop.orders"]["owners"] == []
    assert "web.shop.orders with web.shop.payments" in nodes["Staging/web.shop.sales"]["description"]
    above = {"/".join(key["path"]) for key in nodes["Staging/web.shop.sales"]["dependencyKeys"]}
    assert above == {"Raw/web.shop.orders", "Raw/web.shop.payments"}


@pytest.mark.slow
def test_a_range_run_and_the_way_to_the_topic(server: Webserver, names: Names) -> None:
    raw = names.raw_partitions("web.shop.orders")
    for definition, keys in {
        raw: (OPEN, SECOND),
        names.raw_partitions("web.shop.payments"): (OPEN,),
        names.staging_partitions("Staging"): (OPEN,),
    }.items():
        for key in keys:
            server.add_key(definition, key)

    both = {"dagster/asset_partition_range_start": OPEN, "dagster/asset_partition_range_end": SECOND}
    run = server.launch(names.ingest_job("web.shop.orders"), both)
    succeeded(run)
    assert [event["managerKey"] for event in events(run, "LoadedInputEvent")] == [names.resource("kafka_io")]
    assert [event["managerKey"] for event in events(run, "HandledOutputEvent")] == [names.resource("pool_io")]
    made = {event["partition"]: numbers(event) for event in events(run, "MaterializationEvent")}
    assert made == {
        OPEN: {"rows": 3, "first_offset": 0, "last_offset": 2},
        SECOND: {"rows": 1, "first_offset": 0, "last_offset": 0},
    }
    (columns,) = {
        tuple(column["name"] for column in entry["schema"]["columns"])
        for event in events(run, "MaterializationEvent")
        for entry in event["metadataEntries"]
        if entry["label"] == "dagster/column_schema"
    }
    assert columns == ("kafka", "key", "value", "key_schema_id", "value_schema_id")
    checks = {
        event["evaluation"]["checkName"]: event["evaluation"] for event in events(run, "AssetCheckEvaluationEvent")
    }
    assert set(checks) == {"monotonic_offsets", "no_unexplained_loss", "schema_change", "quarantine_size"}
    assert all(check["success"] for check in checks.values())
    assert counted(checks["no_unexplained_loss"])["compared"] == 4

    succeeded(server.launch(names.ingest_job("web.shop.payments"), {"dagster/partition": OPEN}))
    run = server.launch(names.staging_job("Staging"), {"dagster/partition": OPEN})
    succeeded(run)
    hops = [event["managerKey"] for event in events(run, "LoadedInputEvent")]
    pool_io, kafka_io = names.resource("pool_io"), names.resource("kafka_io")
    assert hops == [pool_io] * 4
    assert [event["managerKey"] for event in events(run, "HandledOutputEvent")] == [pool_io] * 2 + [kafka_io] * 2
    made = {
        "/".join(event["assetKey"]["path"]): numbers(event)["rows"] for event in events(run, "MaterializationEvent")
    }
    assert made == {
        "Staging/web.shop.sales": 2,
        "Staging/web.shop.refunds": 1,
        "kafka/web.shop.sales": 2,
        "kafka/web.shop.refunds": 1,
    }
    evaluated = [event["evaluation"] for event in events(run, "AssetCheckEvaluationEvent")]
    assert all(check["success"] for check in evaluated)
    (equal,) = [
        counted(check)
        for check in evaluated
        if check["checkName"] == "staging_equals_topic" and check["assetKey"]["path"][1] == "web.shop.sales"
    ]
    assert equal["compared"] == 2


@pytest.mark.slow
def test_a_range_ahead_fails_with_the_one_to_run_first(server: Webserver, names: Names) -> None:
    ahead = "0:7000000-7999999"
    server.add_key(names.raw_partitions("web.shop.payments"), ahead)
    run = server.launch(names.ingest_job("web.shop.payments"), {"dagster/partition": ahead})
    assert run["status"] == "FAILURE"
    (failure,) = events(run, "ExecutionStepFailureEvent")
    assert f"{ahead} lies ahead of the next offset" in failure["error"]["message"]
    assert f"Run {OPEN} first." in failure["error"]["message"]


@pytest.mark.slow
def test_a_broken_pipeline_file_is_shown_as_such(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("inputs: [{topic: a, pool: Raw, formt: avro}]\n")
    with webserver(tmp_path / "home", path) as server:
        entry = server.ask(LOCATION, name=REPOSITORY["repositoryLocationName"])["workspaceLocationEntryOrError"]
    assert entry["locationOrLoadError"]["__typename"] == "PythonError"
    chain = entry["locationOrLoadError"]["errorChain"]
    assert any("line 1: inputs[0].formt" in item["error"]["message"] for item in chain)


def succeeded(run: dict) -> None:
    assert run["status"] == "SUCCESS", [
        event for event in run["eventConnection"]["events"] if "Failure" in event["__typename"]
    ]


def numbers(event: dict) -> dict[str, int]:
    wanted = ("first_offset", "last_offset", "rows")
    return {entry["label"]: entry["intValue"] for entry in event["metadataEntries"] if entry["label"] in wanted}


def counted(check: dict) -> dict[str, int]:
    return {entry["label"]: entry.get("intValue") for entry in check["metadataEntries"]}
