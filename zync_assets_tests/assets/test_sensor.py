"""The sensor, tick by tick, on the real broker: its run requests, its reports, and its waits."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka.admin import AdminClient, NewPartitions
from dagster import (
    AddDynamicPartitionsRequest,
    AssetCheckEvaluation,
    AssetMaterialization,
    AssetObservation,
    DagsterEventType,
    DagsterInstance,
    DagsterRunStatus,
    DefaultRunLauncher,
    DefaultSensorStatus,
    RunsFilter,
    SensorResult,
    build_sensor_context,
)
from dagster._core.events import EngineEventData
from dagster._core.storage.tags import GRPC_INFO_TAG

from zync_assets import pipeline_file
from zync_assets.assets import facts, runs, sensor
from zync_assets.assets.build import build_definitions
from zync_assets.assets.facts import DueStep, TickFailure, keys_of_run
from zync_assets.assets.names import AWAITS_TAG, PIPELINE_TAG, Names
from zync_assets.cli.main import main
from zync_assets.ingest import commit
from zync_assets.ingest import plan as ingest_plan
from zync_assets.kafka.topics import PartitionState, create_topic, delete_topic, topic_states
from zync_assets.lake import raw, storage
from zync_assets.local.services import Services
from zync_assets.offsets import OffsetRange, keys_over
from zync_assets.runner import etl_all
from zync_assets.spark.session import spark_session
from zync_assets_tests.assets.rig import OPEN, Rig, failures, make_rig, orders, payments, told
from zync_assets_tests.lake.rows import SCHEMA
from zync_assets_tests.mini import run_steps
from zync_assets_tests.odd_topics import until


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
        definition = self.rig.definitions.resolve_sensor_def(self.rig.names.sensor)
        context = build_sensor_context(instance=self.rig.instance, cursor=self.cursor, definitions=self.rig.definitions)
        result = definition(context)
        assert isinstance(result, SensorResult)
        for event in result.asset_events:
            self.rig.instance.report_runless_asset_event(event)
        for request in result.dynamic_partitions_requests or ():
            if isinstance(request, AddDynamicPartitionsRequest):
                self.rig.instance.add_dynamic_partitions(request.partitions_def_name, list(request.partition_keys))
            else:
                for key in request.partition_keys:
                    self.rig.instance.delete_dynamic_partition(request.partitions_def_name, key)
        self.cursor = result.cursor
        return result

    def run(self, result: SensorResult) -> None:
        """Do what a tick asked for."""
        for request in result.run_requests or ():
            job = self.rig.definitions.resolve_job_def(request.job_name or "")
            selection = list(request.asset_selection) if request.asset_selection else None
            done = job.execute_in_process(
                instance=self.rig.instance, tags=dict(request.tags), asset_selection=selection
            )
            assert done.success


@pytest.fixture
def ticks(rig: Rig) -> Ticks:
    return Ticks(rig)


def jobs(result: SensorResult) -> list[str]:
    return sorted(request.job_name or "" for request in result.run_requests or ())


def reported(result: SensorResult, kind: type = AssetMaterialization) -> dict[tuple[str, str | None], object]:
    return {
        (event.asset_key.to_user_string(), event.partition): event.metadata["last_offset"].value
        for event in result.asset_events
        if isinstance(event, kind) and not isinstance(event, AssetCheckEvaluation) and "last_offset" in event.metadata
    }


def settled(rig: Rig, ticks: Ticks) -> None:
    """Run the sensor's requests until the sensor requests no more runs."""
    for _ in range(8):
        result = ticks()
        if not result.run_requests:
            return
        ticks.run(result)
    raise AssertionError("the sensor does not come to rest")


def test_a_run_does_not_begin_ahead_of_what_is_due() -> None:
    """Dagster keeps keys in the order in which they came. A run takes keys that lie together: the most, but for those ahead."""
    known = ["0:0-999999", "1:0-999999", "2:0-999999", "0:1000000-1999999", "0:2000000-2999999", "2:1000000-1999999"]

    def keys(*partitions: OffsetRange) -> list[str]:
        due_keys = tuple(keys_over(partitions))
        step = DueStep("job", frozenset(), "definition", due_keys, partitions, ())
        return keys_of_run(step, known)

    million = 1_000_000
    assert keys(OffsetRange(0, 900_000, 3 * million), OffsetRange(2, 500_000, 2 * million)) == ["2:0-999999"]
    assert keys(OffsetRange(0, 900_000, 3 * million)) == ["0:0-999999"]
    assert keys(OffsetRange(0, million, 3 * million)) == known[3:5]
    assert keys(OffsetRange(0, 0, 9), OffsetRange(1, 0, 9), OffsetRange(2, 0, 2 * million)) == known[:3]


def test_a_run_of_a_new_partition_does_not_have_later_records_alone(rig: Rig) -> None:
    """New partitions move keys. A target would have the earlier record of a key last."""
    rig.send(rig.orders, orders(1))
    rig.send(rig.orders, orders(1), partition=1)
    key = rig.names.pool_key("Raw", rig.orders)
    assert told(rig.ingest(rig.orders, "1:0-999999"), key)["1:0-999999"]["rows"] == 1
    assert rig.instance.get_materialized_partitions(key) == {OPEN, "1:0-999999"}
    state = raw.open_raw(rig.pipeline.lake, "Raw", rig.orders)
    assert state is not None and state.next == {0: 1, 1: 1}


def test_the_sensor_alone_takes_records_all_the_way_and_then_rests(rig: Rig, ticks: Ticks) -> None:
    rig.send(rig.orders, orders(1, 2))
    rig.send(rig.payments, payments(1))
    first = ticks()
    ingest = [rig.names.ingest_job(topic) for topic in (rig.orders, rig.payments)]
    assert jobs(first) == sorted([*ingest, rig.names.staging_job("Staging")])
    assert all(request.run_key is None for request in first.run_requests or ())
    assert reported(first)[f"kafka/{rig.orders}", OPEN] == 1
    ticks.run(first)
    settled(rig, ticks)

    records = rig.instance.fetch_materializations(rig.names.topic_key(rig.sales), limit=10).records
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
        assert added[rig.names.raw_partitions(rig.orders)] == [OPEN, "1:0-999999"]
        assert added[rig.names.staging_partitions("Staging")] == [OPEN]


def test_lag_is_reported_when_it_changed_and_no_materialization_keeps_it(rig: Rig, ticks: Ticks) -> None:
    settled(rig, ticks)
    rig.send(rig.orders, orders(1, 2, 3))
    events = [event for event in ticks().asset_events if event.asset_key == rig.names.topic_key(rig.orders)]
    grown, behind, answers = events
    assert isinstance(grown, AssetMaterialization)
    assert (grown.metadata["last_offset"].value, "lag" in grown.metadata) == (2, False)
    assert isinstance(behind, AssetObservation)
    assert behind.metadata["lag"].value == 3
    assert isinstance(answers, AssetCheckEvaluation)
    rig.ingest(rig.orders)
    (caught_up,) = [event for event in ticks().asset_events if event.asset_key == rig.names.topic_key(rig.orders)]
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


@pytest.mark.slow
def test_what_zync_did_before_the_instance_is_checked_once(rig: Rig, ticks: Ticks) -> None:
    rig.send(rig.orders, orders(1, 2))
    rig.send(rig.payments, payments(1, 2))
    run_steps(rig.pipeline)
    for _ in range(5):
        ticks.run(ticks())
    for check in rig.definitions.resolve_asset_graph().asset_check_keys:
        assert rig.instance.get_latest_asset_check_evaluation_record(check) is not None
    asked = rig.instance.get_runs(RunsFilter(job_name=rig.names.checks_job))
    assert len(asked) == 1


def test_one_step_outside_and_the_sensor_does_the_rest(rig: Rig, ticks: Ticks) -> None:
    settled(rig, ticks)
    rig.send(rig.payments, payments(-7))
    plan = ingest_plan.plan_ingest(rig.pipeline, rig.payments)
    commit.commit_raw(rig.pipeline, ingest_plan.read_input(spark_session(rig.pipeline.spark), rig.pipeline, plan))
    result = ticks()
    assert jobs(result) == [rig.names.staging_job("Staging")]
    assert reported(result)[f"Raw/{rig.payments}", OPEN] == 0


def test_a_step_under_way_is_not_asked_for_again(rig: Rig, ticks: Ticks) -> None:
    settled(rig, ticks)
    rig.send(rig.payments, payments(1))
    job = rig.definitions.resolve_job_def(rig.names.ingest_job(rig.payments))
    run = rig.instance.create_run_for_job(job, status=DagsterRunStatus.STARTED)
    waiting = ticks()
    assert waiting.run_requests == []
    assert waiting.skip_reason is not None
    assert f"run {run.run_id[:8]} is started" in (waiting.skip_reason.skip_message or "")


@pytest.mark.parametrize("alive", [True, False])
def test_a_run_whose_server_is_gone_holds_nothing_back(rig: Rig, ticks: Ticks, tmp_path: Path, alive: bool) -> None:
    settled(rig, ticks)
    rig.send(rig.payments, payments(1))
    job = rig.definitions.resolve_job_def(rig.names.ingest_job(rig.payments))
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        if alive:
            server.listen()
        tags = {GRPC_INFO_TAG: json.dumps({"host": "localhost", "socket": str(path)})}
        rig.instance.create_run_for_job(job, status=DagsterRunStatus.STARTED, tags=tags)
        due = sorted([rig.names.ingest_job(rig.payments), rig.names.staging_job("Staging")])
        assert jobs(ticks()) == ([] if alive else due)


@pytest.mark.parametrize("alive", [True, False])
def test_a_run_whose_process_is_gone_holds_nothing_back(rig: Rig, ticks: Ticks, tmp_path: Path, alive: bool) -> None:
    """The proxy of `dagster dev` listens on, whichever code server had the run."""
    settled(rig, ticks)
    rig.send(rig.payments, payments(1))
    job = rig.definitions.resolve_job_def(rig.names.ingest_job(rig.payments))
    with subprocess.Popen(["sleep", "60"]) as process, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        tags = {GRPC_INFO_TAG: json.dumps({"host": "localhost", "socket": str(tmp_path / "s")})}
        run = rig.instance.create_run_for_job(job, status=DagsterRunStatus.STARTED, tags=tags)
        began = f"Started process for run (pid: {process.pid})."
        rig.instance.report_engine_event(began, run, EngineEventData.in_process(process.pid))
        if not alive:
            process.kill()
            process.wait()
        due = sorted([rig.names.ingest_job(rig.payments), rig.names.staging_job("Staging")])
        assert jobs(ticks()) == ([] if alive else due)
        process.kill()


@pytest.mark.parametrize("status", [DagsterRunStatus.NOT_STARTED, DagsterRunStatus.STARTING])
def test_a_run_whose_launch_was_cut_off_holds_nothing_back(
    rig: Rig, ticks: Ticks, monkeypatch: pytest.MonkeyPatch, status: DagsterRunStatus
) -> None:
    """The daemon was killed before the run had a server: nobody launches the run again."""
    settled(rig, ticks)
    rig.send(rig.payments, payments(1))
    ingest = rig.names.ingest_job(rig.payments)
    run = rig.instance.create_run_for_job(rig.definitions.resolve_job_def(ingest), status=status)
    waiting = ticks()
    assert waiting.skip_reason is not None
    assert f"run {run.run_id[:8]} is {status.value.lower()}" in (waiting.skip_reason.skip_message or "")
    monkeypatch.setattr("zync_assets.assets.runs.LAUNCH_SECONDS", 0.0)
    monkeypatch.setattr(type(rig.instance), "run_launcher", DefaultRunLauncher())
    assert jobs(ticks()) == sorted([ingest, rig.names.staging_job("Staging")])


def test_a_failed_step_is_asked_for_again_later(rig: Rig, ticks: Ticks, monkeypatch: pytest.MonkeyPatch) -> None:
    settled(rig, ticks)
    rig.send(rig.payments, payments(1))
    request, _ = ticks().run_requests or ()
    assert request.job_name == rig.names.ingest_job(rig.payments)
    job = rig.definitions.resolve_job_def(request.job_name or "")
    run = rig.instance.create_run_for_job(job, tags=dict(request.tags))
    rig.instance.report_run_failed(run)
    waiting = ticks()
    assert waiting.skip_reason is not None
    assert "failed (1 in a row); asked for again in" in (waiting.skip_reason.skip_message or "")
    monkeypatch.setattr("zync_assets.assets.runs.FIRST_WAIT", 0.0)
    assert jobs(ticks()) == sorted([request.job_name, rig.names.staging_job("Staging")])


class TestEtlAwaitsIngest:
    """The run of ETL starts together with the ingest of a few records, and awaits them."""

    def test_one_tick_asks_for_all_runs_of_a_new_record(self, rig: Rig, ticks: Ticks) -> None:
        settled(rig, ticks)
        rig.send(rig.payments, payments(-7))
        both = ticks()
        ingest, staging = both.run_requests or ()
        assert ingest.job_name == rig.names.ingest_job(rig.payments)
        assert staging.job_name == rig.names.staging_job("Staging")
        assert json.loads(staging.tags[AWAITS_TAG]) == {rig.payments: {"0": 1}}
        ticks.run(both)
        assert ends(rig) == [0, 1]
        assert ticks().run_requests == []

    def test_a_long_backlog_is_ingested_first(self, rig: Rig, ticks: Ticks, monkeypatch: pytest.MonkeyPatch) -> None:
        settled(rig, ticks)
        monkeypatch.setattr(facts, "SMALL_OFFSETS", 2)
        rig.send(rig.payments, payments(-1, -2, -3))
        assert jobs(ticks()) == [rig.names.ingest_job(rig.payments)]

    def test_more_topics_than_runs_are_ingested_first(self, rig: Rig, ticks: Ticks) -> None:
        settled(rig, ticks)
        rig.send(rig.payments, payments(1))
        rig.send(rig.orders, orders(1))
        job = rig.definitions.resolve_job_def(rig.names.checks_job)
        tags = {PIPELINE_TAG: rig.pipeline.name}
        rig.instance.create_run_for_job(job, status=DagsterRunStatus.STARTED, tags=tags)
        (request,) = ticks().run_requests or ()
        assert request.job_name in [rig.names.ingest_job(topic) for topic in (rig.orders, rig.payments)]

    def test_the_wait_ends_when_the_table_has_the_records(self, rig: Rig) -> None:
        rig.send(rig.payments, payments(1))
        job = rig.definitions.resolve_job_def(rig.names.ingest_job(rig.payments))
        rig.instance.create_run_for_job(job, status=DagsterRunStatus.STARTED)
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(runs.await_ingest, rig.names, rig.instance, {rig.payments: {0: 1}})
            with pytest.raises(TimeoutError):
                done.result(3 * runs.AWAIT_PAUSE)
            plan = ingest_plan.plan_ingest(rig.pipeline, rig.payments)
            session = spark_session(rig.pipeline.spark)
            commit.commit_raw(rig.pipeline, ingest_plan.read_input(session, rig.pipeline, plan))
            done.result(runs.AWAIT_SECONDS / 2)

    def test_the_wait_ends_when_ingest_fails(self, rig: Rig, tmp_path: Path) -> None:
        rig.send(rig.payments, payments(1))
        job = rig.definitions.resolve_job_def(rig.names.ingest_job(rig.payments))
        # On disk: of two threads, SQLite in memory refuses one at once.
        settings = {"telemetry": {"enabled": False}}
        with DagsterInstance.local_temp(str(tmp_path), overrides=settings) as instance, ThreadPoolExecutor(1) as thread:
            run = instance.create_run_for_job(job, status=DagsterRunStatus.STARTED)
            done = thread.submit(runs.await_ingest, rig.names, instance, {rig.payments: {0: 1}})
            with pytest.raises(TimeoutError):
                done.result(3 * runs.AWAIT_PAUSE)
            instance.report_run_failed(run)
            done.result(runs.AWAIT_SECONDS / 2)

    def test_the_wait_has_an_end(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        rig.send(rig.payments, payments(1))
        job = rig.definitions.resolve_job_def(rig.names.ingest_job(rig.payments))
        rig.instance.create_run_for_job(job, status=DagsterRunStatus.STARTING)
        monkeypatch.setattr(runs, "AWAIT_SECONDS", 0.5)
        began = time.monotonic()
        runs.await_ingest(rig.names, rig.instance, {rig.payments: {0: 1}})
        assert time.monotonic() - began >= 0.5


def test_a_raw_check_that_failed_holds_back_etl(rig: Rig, ticks: Ticks) -> None:
    rig.send(rig.payments, payments(-1))
    rig.ingest(rig.payments)
    failed = AssetCheckEvaluation(
        asset_key=rig.names.pool_key("Raw", rig.payments), check_name="monotonic_offsets", passed=False
    )
    rig.instance.report_runless_asset_event(failed)
    ticks.run(ticks())
    held = ticks()
    assert rig.names.staging_job("Staging") not in jobs(held)
    assert held.skip_reason is not None
    assert "check monotonic_offsets of Raw/" in (held.skip_reason.skip_message or "")


def test_a_failed_check_is_not_lifted_by_a_run_that_never_checks(rig: Rig, ticks: Ticks) -> None:
    """A check that is planned has no result, neither before its run begins nor after the run died."""
    rig.ingest(rig.notes)
    rig.ingest(rig.orders, OPEN, "1:0-999999")
    rig.send(rig.payments, payments(-1))
    rig.ingest(rig.payments)
    key = rig.names.pool_key("Raw", rig.payments)
    rig.instance.report_runless_asset_event(
        AssetCheckEvaluation(asset_key=key, check_name="no_unexplained_loss", passed=False)
    )
    ticks()
    run = rig.instance.create_run_for_job(
        rig.definitions.resolve_job_def(rig.names.ingest_job(rig.payments)),
        tags={"dagster/partition": OPEN},
    )
    for _ in range(2):
        held = ticks()
        assert rig.names.staging_job("Staging") not in jobs(held)
        assert held.skip_reason is not None
        assert "check no_unexplained_loss of Raw/" in (held.skip_reason.skip_message or "")
        rig.instance.report_run_failed(run)


def test_without_a_broker_it_skips_and_says_so(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "BROKER_SECONDS", 1.0)
    nowhere = replace(rig.pipeline, kafka={"bootstrap.servers": "127.0.0.1:1"})
    result = Ticks(replace(rig, pipeline=nowhere, definitions=build_definitions(nowhere)))()
    assert result.skip_reason is not None
    assert "No broker" in (result.skip_reason.skip_message or "")
    assert "127.0.0.1:1" in (result.skip_reason.skip_message or "")


def test_a_broker_that_stays_away_turns_the_tick_red_and_the_topics_out_of_reach(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "BROKER_SECONDS", 1.0)
    nowhere = replace(rig.pipeline, kafka={"bootstrap.servers": "127.0.0.1:1"})
    away = sensor.evaluate(Names(nowhere), rig.instance, None, 1000.0)
    assert away.asset_events == []
    lasting = sensor.evaluate(Names(nowhere), rig.instance, away.cursor, 1035.0)
    assert reached(lasting) == {f"kafka/{item.topic}": False for item in rig.pipeline.inputs}
    with pytest.raises(TickFailure, match=r"broker: No broker.*127\.0\.0\.1:1"):
        sensor.evaluate(Names(nowhere), rig.instance, lasting.cursor, 1085.0)
    back = sensor.evaluate(rig.names, rig.instance, lasting.cursor, 1045.0)
    assert reached(back) == {f"kafka/{item.topic}": True for item in rig.pipeline.inputs}


def reached(result: SensorResult) -> dict[str, bool]:
    return passes(result, "reachable")


def passes(result: SensorResult, check: str) -> dict[str, bool]:
    return {
        event.asset_key.to_user_string(): event.passed
        for event in result.asset_events
        if isinstance(event, AssetCheckEvaluation) and event.check_name == check
    }


@pytest.mark.slow
def test_a_problem_that_stays_is_red_in_a_few_of_many_ticks(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "BROKER_SECONDS", 1.0)
    names = Names(replace(rig.pipeline, kafka={"bootstrap.servers": "127.0.0.1:1"}))
    cursor = sensor.evaluate(names, rig.instance, None, 1000.0).cursor
    reds: list[int] = []
    for second in range(5, 100, 5):
        try:
            tick = sensor.evaluate(names, rig.instance, cursor, 1000.0 + second)
        except TickFailure:
            reds.append(second)
        else:
            assert tick.skip_reason is not None
            assert "No broker" in (tick.skip_reason.skip_message or "")
    assert reds == [20, 25, 80, 85]


def test_a_new_range_of_a_source_topic_keeps_its_check_up_to_date(rig: Rig, ticks: Ticks) -> None:
    ticks()
    rig.send(rig.orders, orders(1))
    assert reached(ticks()) == {f"kafka/{rig.orders}": True}


SINK = """
sinks:
  - {name: warehouse, type: sqlite, url: ./warehouse.db, from: [Raw.$prefix.notes], mode: insert}
"""


def test_an_output_topic_and_a_table_that_no_run_can_write_fail_their_checks_until_they_are_cured(
    services: Services, tmp_path: Path, unique: str
) -> None:
    with make_rig(services, tmp_path, unique, more=SINK) as rig:
        rig.send(rig.orders, orders(1))
        rig.send(rig.payments, payments(1))
        run_steps(rig.pipeline)
        rig.send(rig.sales, [{"id": 0, "by": "another program"}])
        (tmp_path / "warehouse.db").mkdir()
        topic, table = [f"kafka/{rig.sales}"], ["warehouse/notes"]

        def tick(cursor: str | None, second: int) -> SensorResult:
            return sensor.evaluate(rig.names, rig.instance, cursor, 1000.0 + second)

        first = tick(None, 0)
        assert not passes(first, "staging_equals_topic") | passes(first, "sink_position")
        lasting = tick(first.cursor, 35)
        assert passes(lasting, "staging_equals_topic") == dict.fromkeys(topic, False)
        assert passes(lasting, "sink_position") == dict.fromkeys(table, False)
        (text,) = [
            event.description
            for event in lasting.asset_events
            if isinstance(event, AssetCheckEvaluation) and event.check_name == "staging_equals_topic"
        ]
        assert f"--recreate {rig.sales}" in (text or "")
        later = tick(lasting.cursor, 40)
        assert not passes(later, "staging_equals_topic") | passes(later, "sink_position")

        recreate = ["to-kafka", str(rig.pipeline.path), "--recreate", rig.sales]
        assert CliRunner().invoke(main, recreate).exit_code == 0
        (tmp_path / "warehouse.db").rmdir()
        cured = tick(later.cursor, 45)
        assert passes(cured, "staging_equals_topic") == dict.fromkeys(topic, True)
        assert passes(cured, "sink_position") == dict.fromkeys(table, True)


def test_a_check_that_can_t_look_ends_no_tick(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError("no right to read")

    monkeypatch.setattr(facts.remote_checks, "staging_equals_topic", denied)
    cursor = json.dumps({runs.FAILING: [f"kafka/{rig.sales}"]})
    tick = sensor.evaluate(rig.names, rig.instance, cursor, time.time())
    (found,) = (event for event in tick.asset_events if getattr(event, "check_name", "") == "staging_equals_topic")
    assert isinstance(found, AssetCheckEvaluation)
    assert (found.passed, found.description) == (False, "PermissionError: no right to read")


def test_a_missing_raw_file_lets_the_other_topics_go_on_and_turns_ticks_red(rig: Rig, ticks: Ticks) -> None:
    settled(rig, ticks)
    rig.send(rig.orders, orders(1))
    rig.ingest(rig.orders)
    state = raw.open_raw(rig.pipeline.lake, "Raw", rig.orders)
    assert state is not None
    lost = Path(state.table.uri) / raw.raw_files(state)[0].path
    lost.unlink()
    rig.send(rig.orders, orders(2))
    plan = ingest_plan.plan_ingest(rig.pipeline, rig.orders)
    commit.commit_raw(rig.pipeline, ingest_plan.read_input(spark_session(rig.pipeline.spark), rig.pipeline, plan))
    rig.send(rig.payments, payments(-3))

    now = time.time()
    first = sensor.evaluate(rig.names, rig.instance, ticks.cursor, now)
    assert rig.names.ingest_job(rig.payments) in jobs(first)
    # While there is work, the red ticks are a few of all.
    seen: list[str] = []
    for second in range(31, 151, 5):
        try:
            result = sensor.evaluate(rig.names, rig.instance, first.cursor, now + second)
            assert rig.names.ingest_job(rig.payments) in jobs(result)
            seen.append("green")
        except TickFailure as failed:
            assert f"Raw/{rig.orders}: " in str(failed)
            assert f"{lost} is not there" in str(failed)
            seen.append("red")
    assert 2 <= seen.count("red") <= len(seen) // 4


@pytest.mark.slow
def test_a_missing_raw_file_stops_the_staging_pools_that_read_it_and_no_other(rig: Rig, tmp_path: Path) -> None:
    path = rig.pipeline.path
    shared, own = f"topic: {rig.pipeline.outputs[1].topic}, pool: Staging", "pool: Refunds"
    path.write_text(path.read_text().replace(shared, shared.replace("pool: Staging", own)))
    pipeline = pipeline_file.load(path)
    rig = Rig(pipeline, rig.instance, build_definitions(pipeline))
    ticks = Ticks(rig)
    rig.send(rig.orders, orders(1))
    rig.send(rig.payments, payments(1, -1))
    settled(rig, ticks)
    assert ends(rig) == [1, 1]

    # A record that waits is read again with its counterpart.
    rig.send(rig.orders, orders(2))
    settled(rig, ticks)
    state = raw.open_raw(pipeline.lake, "Raw", rig.orders)
    assert state is not None
    lost = Path(state.table.uri) / raw.raw_files(state)[-1].path
    lost.rename(tmp_path / "away")
    rig.send(rig.payments, payments(2, -2))
    rig.send(rig.notes, [{"id": 0}])
    said: list[str] = []
    for _ in range(3):
        result = ticks()
        for request in result.run_requests or ():
            job = rig.definitions.resolve_job_def(request.job_name or "")
            done = job.execute_in_process(instance=rig.instance, tags=dict(request.tags), raise_on_error=False)
            assert done.success == (request.job_name != rig.names.staging_job("Staging"))
            said += failures(done)
    assert ends(rig) == [1, 2]
    [text] = set(said)
    assert text.startswith(f"table {state.table.uri}: file {lost} is in the Delta log and can't be read")
    assert "Restore the file from a copy" in text

    (tmp_path / "away").rename(lost)
    rig.stage()
    assert ends(rig) == [2, 2]


@pytest.mark.slow
def test_an_output_topic_with_a_problem_lets_the_other_outputs_go_on(rig: Rig, ticks: Ticks) -> None:
    rig.send(rig.orders, orders(1))
    rig.send(rig.payments, payments(1))
    run_steps(rig.pipeline)
    delete_topic(rig.pipeline.kafka, rig.sales)
    create_topic(rig.pipeline.kafka, rig.sales, 1, 1, {})
    rig.send(rig.payments, payments(-5))
    settled(rig, ticks)
    refunds = rig.pipeline.outputs[1].topic
    assert topic_states(rig.pipeline.kafka, [refunds])[refunds].partitions[0].end == 1
    rest = ticks()
    assert rest.skip_reason is not None
    assert f"kafka/{rig.sales}: topic {rig.sales} is another topic" in (rest.skip_reason.skip_message or "")
    checked = rig.instance.fetch_materializations(rig.names.pool_key("Staging", refunds), limit=1).records[0]
    run = checked.event_log_entry.run_id
    evaluations = rig.instance.get_records_for_run(run, of_type=DagsterEventType.ASSET_CHECK_EVALUATION).records
    assert len(evaluations) == 2 * 4 + 1


@pytest.mark.slow
def test_an_output_that_fails_in_runs_lets_the_other_outputs_go_on(
    rig: Rig, ticks: Ticks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zync_assets.assets.runs.FIRST_WAIT", 300.0)
    monkeypatch.setattr("zync_assets.assets.runs.LASTS_SECONDS", 3600.0)
    settled(rig, ticks)
    rig.send(rig.orders, orders(1))
    rig.send(rig.payments, payments(1, -5))
    rig.ingest(rig.orders)
    rig.ingest(rig.payments)
    list(etl_all(rig.pipeline, lambda: spark_session(rig.pipeline.spark)))
    create_topic(rig.pipeline.kafka, rig.sales, 1, 1, {})
    rig.send(rig.sales, [{"id": 0, "by": "another program"}])

    (request,) = ticks().run_requests or ()
    assert request.asset_selection is None
    job = rig.definitions.resolve_job_def(request.job_name or "")
    failed = job.execute_in_process(instance=rig.instance, tags=dict(request.tags), raise_on_error=False)
    assert [event.step_key for event in failed.get_step_failure_events()] == [rig.names.publish_op(rig.sales)]
    assert ends(rig) == [1, 1]

    rig.send(rig.payments, payments(-6))
    rig.ingest(rig.payments)
    rest = ticks()
    (request,) = rest.run_requests or ()
    assert rig.names.topic_key(rig.sales) not in (request.asset_selection or [rig.names.topic_key(rig.sales)])
    ticks.run(rest)
    assert ends(rig) == [1, 2]
    assert ticks().run_requests == []


def ends(rig: Rig) -> list[int]:
    """Where the output topics end."""
    found = topic_states(rig.pipeline.kafka, [item.topic for item in rig.pipeline.outputs])
    return [state.partitions[0].end for state in found.values()]


def test_keys_that_name_no_range_are_deleted(rig: Rig, ticks: Ticks) -> None:
    definition = rig.names.raw_partitions(rig.payments)
    rig.add_keys(definition, "june", "0:0-499999", "7:0-999999")
    ticks()
    assert rig.instance.get_dynamic_partitions(definition) == [OPEN]


def test_a_topic_that_grew_since_it_was_looked_at_is_ingested(
    services: Services, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process ingests, and adds a partition, between the look at the topics and the look at the tables."""
    with make_rig(services, tmp_path, unique, keys=False) as rig:
        early = facts.survey(rig.pipeline.kafka, [item.topic for item in rig.pipeline.inputs])
        rig.send(rig.payments, payments(1))
        run_steps(rig.pipeline)
        admin = AdminClient({"bootstrap.servers": rig.pipeline.kafka["bootstrap.servers"]})
        for future in admin.create_partitions([NewPartitions(rig.payments, 2)]).values():
            future.result(10)
        until(f"{rig.payments} has 2 partitions", lambda: partitions_of(rig, rig.payments) == 2)
        rig.send(rig.payments, payments(2), partition=1)
        monkeypatch.setattr(facts, "survey", lambda *_: early)
        assert rig.names.ingest_job(rig.payments) in jobs(Ticks(rig)())


def partitions_of(rig: Rig, topic: str) -> int:
    return len(topic_states(rig.pipeline.kafka, [topic])[topic].partitions)


def grown(rig: Rig, ends: Sequence[int]) -> tuple[facts.Facts, sensor.AssetPosition]:
    """The orders' topic as it would be with these ends of its partitions."""
    plan = ingest_plan.plan_ingest(rig.pipeline, rig.orders)
    parts = tuple(PartitionState(partition, 0, end) for partition, end in enumerate(ends))
    plan = replace(plan, topic_state=replace(plan.topic_state, partitions=parts))
    made = facts.Facts({rig.orders: plan}, {}, {})
    return made, next(sensor.asset_positions(rig.names, made))


def test_the_events_of_a_tick_are_bounded_and_the_next_tick_goes_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two partitions of 200 million offsets."""
    made, standing = grown(rig, [200_000_005, 200_000_005])
    queries: list[object] = []
    fetch = rig.instance.fetch_materializations

    def counted(*arguments: Any, **named: Any) -> Any:
        queries.append(arguments)
        return fetch(*arguments, **named)

    monkeypatch.setattr(rig.instance, "fetch_materializations", counted)
    cursor: dict[str, Any] = {}
    reported: list[str | None] = []
    for turn in range(12):
        events, cursor = sensor.news(made, rig.instance, standing, cursor, 1e9 + 5 * turn)
        assert len(events) <= sensor.RANGES
        assert len(queries) <= turn + 1
        reported += [event.partition for event in events if isinstance(event, AssetMaterialization)]
    assert len(set(reported)) == len(reported) == 402
    assert cursor["next"] == {"0": 200_000_005, "1": 200_000_005}


def test_what_runs_reported_is_looked_up_at_once(rig: Rig) -> None:
    made, standing = grown(rig, [20_000_005])
    events, _ = sensor.news(made, rig.instance, standing, {}, 1e9)
    for event in events[1:]:
        rig.instance.report_runless_asset_event(event)
    again, cursor = sensor.news(made, rig.instance, standing, {}, 1e9)
    # Beside the range, the lag.
    assert [event.partition for event in again] == [OPEN, None]
    assert cursor["next"] == {"0": 20_000_005}


@pytest.mark.slow
def test_a_day_of_a_live_topic_makes_a_bounded_number_of_events(rig: Rig) -> None:
    counts = Counter[str | None]()
    cursor: dict[str, Any] = {}
    start, made, standing = 1e9, *grown(rig, [0] * 7)
    plan = made.ingest[rig.orders]
    for tick in range(24 * 3600 // 5):
        ends = {partition: (tick + 1) * (partition + 1) for partition in range(7)}
        parts = tuple(PartitionState(partition, 0, end) for partition, end in ends.items())
        now = facts.Facts({rig.orders: replace(plan, topic_state=replace(plan.topic_state, partitions=parts))}, {}, {})
        events, cursor = sensor.news(now, rig.instance, replace(standing, next=ends), cursor, start + 5 * tick)
        counts.update(event.partition for event in events)
    assert counts.total() <= 24 * 60 + 20
    # The lag, which stands still.
    assert counts.pop(None) == 1
    assert len(counts) == 7 and max(counts.values()) - min(counts.values()) <= 1


def test_a_lake_that_is_away_for_a_while_is_said_and_nothing_is_begun_anew(rig: Rig, ticks: Ticks) -> None:
    """Such as a disk that is not mounted: raw tables that are gone are no topics that were never ingested."""
    for topic, state in topic_states(rig.pipeline.kafka, [item.topic for item in rig.pipeline.inputs]).items():
        start = {item.partition: 0 for item in state.partitions}
        advance = raw.RawAdvance(topic, state.topic_id, SCHEMA, [], start, start)
        raw.commit_advance(storage.raw_uri(rig.pipeline.lake, "Raw", topic), None, advance)
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
        assert f"{rig.payments}: table {lake}/Raw/{rig.payments} existed before, and is missing now" in told
        assert "or is not mounted. Put the folder back" in told
    lake.rmdir()
    away.rename(lake)
    assert jobs(ticks()) == sorted([rig.names.ingest_job(rig.payments), rig.names.staging_job("Staging")])


def test_it_waits_to_be_switched_on_unless_asked_for(rig: Rig) -> None:
    name = rig.names.sensor
    assert rig.definitions.resolve_sensor_def(name).default_status == DefaultSensorStatus.STOPPED
    started = build_definitions(rig.pipeline, sensor_running=True).resolve_sensor_def(name)
    assert started.default_status == DefaultSensorStatus.RUNNING
