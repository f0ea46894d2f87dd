"""The sensor, tick by tick, on the real broker: what it asks for, what it reports, when it waits."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from dagster import (
    AssetCheckEvaluation,
    AssetMaterialization,
    AssetObservation,
    DagsterRunStatus,
    DefaultSensorStatus,
    SensorResult,
    build_sensor_context,
)
from dagster._core.storage.tags import GRPC_INFO_TAG

from zync_assets.assets import facts, names, sensor
from zync_assets.assets.build import build_definitions
from zync_assets.kafka.topics import topic_states
from zync_assets.lake import raw
from zync_assets.local.services import Services
from zync_assets.steps import ingest
from zync_assets.steps.session import spark_session
from zync_assets_tests.assets.rig import OPEN, Rig, make_rig, orders, payments
from zync_assets_tests.checks.chain import run_steps
from zync_assets_tests.lake.rows import SCHEMA


@pytest.fixture
def rig(services: Services, tmp_path: Path, unique: str) -> Iterator[Rig]:
    with make_rig(services, tmp_path, unique) as made:
        yield made


class Ticks:
    """A sensor's ticks one after another, with what the daemon does after each."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.cursor: str | None = None

    def __call__(self) -> SensorResult:
        definition = self.rig.definitions.resolve_sensor_def(names.sensor_name(self.rig.pipeline.name))
        context = build_sensor_context(instance=self.rig.instance, cursor=self.cursor, definitions=self.rig.definitions)
        result = definition(context)
        assert isinstance(result, SensorResult)
        for event in result.asset_events:
            self.rig.instance.report_runless_asset_event(event)
        for request in result.dynamic_partitions_requests or ():
            self.rig.instance.add_dynamic_partitions(request.partitions_def_name, list(request.partition_keys))
        self.cursor = result.cursor
        return result

    def run(self, result: SensorResult) -> None:
        """Do what a tick asked for."""
        for request in result.run_requests or ():
            job = self.rig.definitions.resolve_job_def(request.job_name or "")
            assert job.execute_in_process(instance=self.rig.instance, tags=dict(request.tags)).success


@pytest.fixture
def ticks(rig: Rig) -> Ticks:
    return Ticks(rig)


def jobs(result: SensorResult) -> list[str]:
    return sorted(request.job_name or "" for request in result.run_requests or ())


def reported(result: SensorResult, kind: type = AssetMaterialization) -> dict[tuple[str, str | None], object]:
    return {
        (event.asset_key.to_user_string(), event.partition): event.metadata["last"].value
        for event in result.asset_events
        if isinstance(event, kind) and not isinstance(event, AssetCheckEvaluation) and "last" in event.metadata
    }


def settled(rig: Rig, ticks: Ticks) -> None:
    """Everything that there is goes through all steps, at the sensor's bidding."""
    for _ in range(8):
        result = ticks()
        if not result.run_requests:
            return
        ticks.run(result)
    raise AssertionError("the sensor does not come to rest")


def test_the_sensor_alone_takes_records_all_the_way_and_then_rests(rig: Rig, ticks: Ticks) -> None:
    rig.send(rig.orders, orders(1, 2))
    rig.send(rig.payments, payments(1))
    first = ticks()
    assert len(jobs(first)) == sensor.MOST_RUNS
    assert all(request.run_key is None for request in first.run_requests or ())
    assert reported(first)[f"kafka/{rig.orders}", OPEN] == 1
    ticks.run(first)
    settled(rig, ticks)

    records = rig.instance.fetch_materializations(names.topic_key(rig.sales), limit=10).records
    assert records[0].partition_key == OPEN
    assert records[0].asset_materialization is not None
    assert records[0].asset_materialization.metadata["rows"].value == 1
    rest = ticks()
    assert rest.run_requests == []
    assert rest.asset_events == []
    assert rest.skip_reason is not None
    assert rest.skip_reason.skip_message == "Everything is up to date."


def test_keys_are_added_before_they_are_run(services: Services, tmp_path: Path, unique: str) -> None:
    with make_rig(services, tmp_path, unique, keys=False) as rig:
        result = Ticks(rig)()
        added = {
            item.partitions_def_name: list(item.partition_keys) for item in result.dynamic_partitions_requests or ()
        }
        assert added[names.raw_partitions(rig.pipeline.name, "Raw", rig.orders)] == [OPEN, "1:0-999999"]
        assert added[names.staging_partitions(rig.pipeline.name, "Staging")] == [OPEN]


def test_lag_is_reported_when_it_changed(rig: Rig, ticks: Ticks) -> None:
    settled(rig, ticks)
    rig.send(rig.orders, orders(1, 2, 3))
    (grown,) = [event for event in ticks().asset_events if event.asset_key == names.topic_key(rig.orders)]
    assert isinstance(grown, AssetMaterialization)
    assert grown.metadata["lag"].value == 3
    rig.ingest(rig.orders)
    (caught_up,) = [event for event in ticks().asset_events if event.asset_key == names.topic_key(rig.orders)]
    assert isinstance(caught_up, AssetObservation)
    assert caught_up.metadata["lag"].value == 0


def test_what_zync_did_outside_is_reported_and_what_a_run_did_is_not_again(rig: Rig, ticks: Ticks) -> None:
    rig.send(rig.orders, orders(1, 2))
    rig.send(rig.payments, payments(1, 2))
    rig.ingest(rig.orders)
    run_steps(rig.pipeline)
    found = reported(ticks())
    assert (f"Raw/{rig.orders}", OPEN) not in found
    assert found[f"Raw/{rig.payments}", OPEN] == 1
    assert found[f"Staging/{rig.sales}", OPEN] == 1
    assert found[f"kafka/{rig.sales}", OPEN] == 1
    assert reported(ticks()) == {}


def test_one_step_outside_and_the_sensor_does_the_rest(rig: Rig, ticks: Ticks) -> None:
    settled(rig, ticks)
    rig.send(rig.payments, payments(-7))
    plan = ingest.plan_ingest(rig.pipeline, rig.payments)
    ingest.commit_raw(rig.pipeline, ingest.read_input(spark_session(rig.pipeline.spark), rig.pipeline, plan))
    result = ticks()
    assert jobs(result) == [names.staging_job("Staging")]
    assert reported(result)[f"Raw/{rig.payments}", OPEN] == 0


def test_a_step_under_way_is_not_asked_for_again(rig: Rig, ticks: Ticks) -> None:
    settled(rig, ticks)
    rig.send(rig.payments, payments(1))
    job = rig.definitions.resolve_job_def(names.ingest_job(rig.payments))
    run = rig.instance.create_run_for_job(job, status=DagsterRunStatus.STARTED)
    waiting = ticks()
    assert waiting.run_requests == []
    assert waiting.skip_reason is not None
    assert f"run {run.run_id[:8]} is started" in (waiting.skip_reason.skip_message or "")


@pytest.mark.parametrize("alive", [True, False])
def test_a_run_whose_server_is_gone_holds_nothing_back(rig: Rig, ticks: Ticks, tmp_path: Path, alive: bool) -> None:
    settled(rig, ticks)
    rig.send(rig.payments, payments(1))
    job = rig.definitions.resolve_job_def(names.ingest_job(rig.payments))
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        if alive:
            server.listen()
        tags = {GRPC_INFO_TAG: json.dumps({"host": "localhost", "socket": str(path)})}
        rig.instance.create_run_for_job(job, status=DagsterRunStatus.STARTED, tags=tags)
        assert jobs(ticks()) == ([] if alive else [names.ingest_job(rig.payments)])


def test_a_failed_step_is_asked_for_again_later(rig: Rig, ticks: Ticks, monkeypatch: pytest.MonkeyPatch) -> None:
    settled(rig, ticks)
    rig.send(rig.payments, payments(1))
    (request,) = ticks().run_requests or ()
    job = rig.definitions.resolve_job_def(request.job_name or "")
    run = rig.instance.create_run_for_job(job, tags=dict(request.tags))
    rig.instance.report_run_failed(run)
    waiting = ticks()
    assert waiting.skip_reason is not None
    assert "failed (1 in a row); asked for again in" in (waiting.skip_reason.skip_message or "")
    monkeypatch.setattr("zync_assets.assets.runs.FIRST_WAIT", 0.0)
    assert jobs(ticks()) == [request.job_name]


def test_a_raw_check_that_failed_holds_back_etl(rig: Rig, ticks: Ticks) -> None:
    rig.send(rig.payments, payments(-1))
    rig.ingest(rig.payments)
    failed = AssetCheckEvaluation(
        asset_key=names.pool_key("Raw", rig.payments), check_name="monotonic_offsets", passed=False
    )
    rig.instance.report_runless_asset_event(failed)
    ticks.run(ticks())
    held = ticks()
    assert names.staging_job("Staging") not in jobs(held)
    assert held.skip_reason is not None
    assert "check monotonic_offsets of Raw/" in (held.skip_reason.skip_message or "")


def test_without_a_broker_it_skips_and_says_so(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "BROKER_SECONDS", 1.0)
    nowhere = replace(rig.pipeline, kafka={"bootstrap.servers": "127.0.0.1:1"})
    result = Ticks(replace(rig, pipeline=nowhere, definitions=build_definitions(nowhere)))()
    assert result.skip_reason is not None
    assert "No broker" in (result.skip_reason.skip_message or "")
    assert "127.0.0.1:1" in (result.skip_reason.skip_message or "")


def test_a_lake_that_is_away_for_a_while_is_said_and_nothing_is_begun_anew(rig: Rig, ticks: Ticks) -> None:
    """Such as a disk that is not mounted: raw tables that are gone are no topics that were never ingested."""
    for topic, state in topic_states(rig.pipeline.kafka, [item.topic for item in rig.pipeline.inputs]).items():
        start = {item.partition: 0 for item in state.partitions}
        raw.commit_raw(rig.pipeline.lake, "Raw", topic, state.topic_id, None, SCHEMA, [], start, start, {})
    assert jobs(ticks()) == []
    rig.send(rig.payments, payments(1))
    lake, away = Path(rig.pipeline.lake), Path(f"{rig.pipeline.lake}-away")
    lake.rename(away)
    for mount_point in (False, True):
        if mount_point:
            lake.mkdir()
        gone = ticks()
        assert jobs(gone) == []
        assert gone.skip_reason is not None
        told = gone.skip_reason.skip_message or ""
        assert f"{rig.payments}: table {lake}/Raw/{rig.payments} was there and is gone" in told
        assert "or is not mounted. Put it back" in told
    lake.rmdir()
    away.rename(lake)
    assert jobs(ticks()) == [names.ingest_job(rig.payments)]


def test_it_waits_to_be_switched_on_unless_asked_for(rig: Rig) -> None:
    name = names.sensor_name(rig.pipeline.name)
    assert rig.definitions.resolve_sensor_def(name).default_status == DefaultSensorStatus.STOPPED
    started = build_definitions(rig.pipeline, sensor_running=True).resolve_sensor_def(name)
    assert started.default_status == DefaultSensorStatus.RUNNING
