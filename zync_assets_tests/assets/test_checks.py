"""Checks in runs: one result each, every time, over the run's ranges; a blocking one stands before what is downstream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from dagster import AssetCheckKey, InitResourceContext, OutputContext, io_manager

from zync_assets.assets import names
from zync_assets.assets.build import build_definitions
from zync_assets.assets.pool_io import PoolIOManager
from zync_assets.kafka.topics import topic_states
from zync_assets.lake import raw, staging
from zync_assets.local.services import Services
from zync_assets.pipeline import Pipeline
from zync_assets.steps.etl import EtlBatch
from zync_assets_tests.assets.rig import Rig, make_rig, orders, payments
from zync_assets_tests.checks.damage import take_out


@pytest.fixture
def rig(services: Services, tmp_path: Path, unique: str) -> Iterator[Rig]:
    with make_rig(services, tmp_path, unique) as made:
        made.send(made.orders, orders(1, 2))
        made.send(made.payments, payments(1, 2))
        yield made


class Careless(PoolIOManager):
    """Commits, and then a raw file that the batch was made from goes missing from its table."""

    def handle_output(self, context: OutputContext, obj: object) -> None:
        super().handle_output(context, obj)
        if isinstance(obj, EtlBatch):
            for state in obj.plan.raw.values():
                now = raw.open_raw(self._pipeline.lake, "Raw", state.opened.uri.rsplit("/", 1)[1]) if state else None
                if now is not None and raw.raw_files(now):
                    take_out(now.opened, *raw.raw_files(now))


def careless(pipeline: Pipeline):
    @io_manager(required_resource_keys={"spark"})
    def pool_io(context: InitResourceContext) -> Careless:
        return Careless(pipeline, context.resources.spark)

    return pool_io


def test_a_blocking_check_that_fails_holds_back_the_topic(rig: Rig) -> None:
    rig.ingest(rig.orders)
    rig.ingest(rig.payments)
    damaged = replace(rig, definitions=build_definitions(rig.pipeline, resources={"pool_io": careless(rig.pipeline)}))
    run = damaged.stage(fails=True)

    results = {(item.asset_key, item.check_name): item for item in run.get_asset_check_evaluations()}
    failed = results[names.pool_key("Staging", rig.sales), "exactly_once_done_coverage"]
    assert not failed.passed
    assert failed.blocking
    assert results[names.pool_key("Staging", rig.sales), "contiguous_output_offsets"].passed
    assert (names.topic_key(rig.sales), "staging_equals_topic") not in results
    assert {event.asset_key.path[0] for event in run.get_asset_materialization_events()} == {"Staging"}
    state = staging.open_staging(rig.pipeline.lake, "Staging")
    assert state is not None
    assert state.head.outputs[rig.sales, 0].next == 2
    assert topic_states(rig.pipeline.kafka, [rig.sales]) == {}


def test_checks_say_what_they_counted(rig: Rig) -> None:
    results = {item.check_name: item for item in rig.ingest(rig.orders).get_asset_check_evaluations()}
    assert set(results) == {"monotonic_offsets", "no_unexplained_loss", "schema_change", "quarantine_size"}
    assert results["no_unexplained_loss"].metadata["compared"].value == 2
    assert results["monotonic_offsets"].blocking
    assert not results["schema_change"].blocking


def test_a_check_by_itself_looks_at_everything_without_a_jvm(rig: Rig) -> None:
    rig.ingest(rig.orders)
    rig.send(rig.orders, orders(3), partition=1)
    rig.ingest(rig.orders, "1:0-999999")
    graph = rig.definitions.resolve_asset_graph()
    keys = {key for key in graph.asset_check_keys if key.asset_key == names.pool_key("Raw", rig.orders)}
    run = (
        rig.definitions.resolve_implicit_global_asset_job_def()
        .get_subset(asset_selection=set(), asset_check_selection=keys)
        .execute_in_process(instance=rig.instance)
    )
    results = {item.check_name: item for item in run.get_asset_check_evaluations()}
    assert len(results) == 4
    assert results["monotonic_offsets"].metadata["records"].value == 3


def test_a_check_that_cant_look_has_a_result_too(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.ingest(rig.orders)
    nowhere = replace(rig.pipeline, kafka={**rig.pipeline.kafka, "bootstrap.servers": "127.0.0.1:1"})
    monkeypatch.setattr("zync_assets.kafka.topics.WAIT", 1.0)
    definitions = build_definitions(nowhere)
    keys = {AssetCheckKey(names.pool_key("Raw", rig.orders), "no_unexplained_loss")}
    run = (
        definitions.resolve_implicit_global_asset_job_def()
        .get_subset(asset_selection=set(), asset_check_selection=keys)
        .execute_in_process(instance=rig.instance, raise_on_error=False)
    )
    (result,) = run.get_asset_check_evaluations()
    assert not result.passed
    assert "127.0.0.1:1" in (result.description or "")
