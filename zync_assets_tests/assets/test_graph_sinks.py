"""Target tables in the graph: assets, runs, checks and the sensor."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from dagster import AssetCheckKey, AssetMaterialization, DagsterInstance, DagsterRunStatus

from zync_assets.assets import facts, io_managers, runs
from zync_assets.assets.build import build_definitions
from zync_assets.assets.facts import gather
from zync_assets.assets.reports import last_offset
from zync_assets.checks.output_checks import run_all
from zync_assets.checks.remote_checks import sink_results
from zync_assets.errors import CheckFailed, TargetUnavailable
from zync_assets.local.services import Services
from zync_assets.runner import ingest_all
from zync_assets.sinks.sqlite import SqliteTarget
from zync_assets.sinks.steps import read_sink, sink_all
from zync_assets.spark.session import spark_session
from zync_assets_tests.assets.rig import OPEN, Rig, failures, make_rig, orders, payments, told
from zync_assets_tests.assets.test_checks import lose, restore, result, said
from zync_assets_tests.assets.test_sensor import Ticks, jobs, reported, settled
from zync_assets_tests.mini import run_steps
from zync_assets_tests.sinks.test_replay import LOG, ROWS, Passed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SINKS = """
sinks:
  - {name: shop_$prefix, type: sqlite, url: shop.db, from: [Staging.$prefix.sales, Raw.$prefix.payments], key: [id]}
"""


@pytest.fixture
def rig(services: Services, tmp_path: Path, unique: str) -> Iterator[Rig]:
    with make_rig(services, tmp_path, unique, more=SINKS) as made:
        yield made


def rows(rig: Rig, sql: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(rig.pipeline.path.parent / "shop.db") as connection:
        return connection.execute(sql).fetchall()


def sink(rig: Rig) -> str:
    return rig.pipeline.sinks[0].name


@pytest.mark.slow
def test_a_target_table_is_an_asset_with_its_source_s_ranges(rig: Rig) -> None:
    rig.send(rig.orders, orders(1, 2))
    rig.send(rig.payments, payments(1, 2))
    rig.ingest(rig.orders)
    rig.ingest(rig.payments)
    rig.stage()
    job, key = rig.names.sink_job(sink(rig), "sales"), rig.names.sink_key(sink(rig), "sales")
    done = rig.run(job)
    said = told(done, key)[OPEN]
    assert (said["first_offset"], said["last_offset"], said["complete"], said["written"]) == (0, 1, False, 2)
    assert {check.check_name: check.passed for check in done.get_asset_check_evaluations()} == {
        "sink_position": True,
        "sink_quarantine": True,
    }
    assert rows(rig, "SELECT id, item, paid FROM sales") == [("1", "item 1", 10), ("2", "item 2", 20)]
    graph = rig.definitions.resolve_asset_graph()
    assert f"The table **sales** of the sink {sink(rig)}, written from " in (graph.get(key).description or "")
    rows_check = graph.get_check_spec(AssetCheckKey(key, "rows_match"))
    assert f"in the job {rig.names.rows_job} or" in (rows_check.description or "")
    assert "written" not in told(rig.run(job), key)[OPEN]
    ahead = "0:1000000-1999999"
    rig.add_keys(rig.names.staging_partitions("Staging"), ahead)
    (refused,) = failures(rig.run(job, ahead, fails=True))
    assert f"lies ahead of the next offset 2 of partition 0. Run {OPEN} instead" in refused


def test_the_sensor_writes_what_is_due_and_reports_what_was_done_outside(rig: Rig) -> None:
    ticks = Ticks(rig)
    rig.send(rig.payments, payments(3, 4))
    settled(rig, ticks)
    assert rows(rig, "SELECT id, paid FROM payments") == [("3", 30), ("4", 40)]
    assert jobs(ticks()) == []
    rig.send(rig.payments, payments(5))
    run_steps(rig.pipeline)
    list(sink_all(rig.pipeline, lambda: spark_session(rig.pipeline.spark)))
    found = reported(ticks())
    assert found[f"{sink(rig)}/payments", OPEN] == 2
    assert jobs(ticks()) == []


def test_the_sensor_reports_a_table_whose_name_no_asset_key_can_have(
    services: Services, tmp_path: Path, unique: str
) -> None:
    more = "sinks: [{name: shop_$prefix, type: sqlite, url: shop.db, from: [Raw.$prefix.payments], table: 'paid $$ {topic}'}]"
    with make_rig(services, tmp_path, unique, more=more) as rig:
        rig.send(rig.payments, payments(1))
        run_steps(rig.pipeline)
        list(sink_all(rig.pipeline, lambda: spark_session(rig.pipeline.spark)))
        key = rig.names.sink_key(sink(rig), "paid $ payments")
        assert reported(Ticks(rig)())[key.to_user_string(), OPEN] == 0


def test_the_sensor_writes_a_record_of_a_replay_that_a_sink_has_passed(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """As after a replay by another pipeline file, or one that ended before it wrote to the target."""
    passed = Passed(services, spark, tmp_path, unique)
    passed.replay()
    pipeline = passed.it.pipeline
    assert {found.summary for found in sink_results(pipeline) if found.name == "sink_position"} == {
        "1 record of a replay is left to write"
    }
    with DagsterInstance.ephemeral(settings={"telemetry": {"enabled": False}}) as instance:
        rig = Rig(pipeline, instance, build_definitions(pipeline))
        settled(rig, Ticks(rig))
    assert passed.sql(ROWS) == [(1, None), (2, "x"), (3, None)]
    assert passed.sql(LOG) == [(1, 0), (3, 2), (2, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("is_long", [True, False])
def test_a_long_load_of_a_table_leaves_a_run_to_the_other_steps(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    ticks = Ticks(rig)
    settled(rig, ticks)
    rig.send(rig.orders, orders(1))
    rig.send(rig.payments, payments(1))
    run_steps(rig.pipeline)
    tables = {rig.names.sink_job(sink(rig), table) for table in ("sales", "payments")}
    ticks()
    if is_long:
        monkeypatch.setattr(facts, "LONG_LOAD", 0)
    result = ticks()
    assert len(jobs(result)) == (1 if is_long else 2)
    assert tables.issuperset(jobs(result))
    request, *_ = result.run_requests or ()
    rig.instance.create_run_for_job(
        rig.definitions.resolve_job_def(request.job_name or ""),
        status=DagsterRunStatus.STARTED,
        tags=dict(request.tags),
    )
    rig.send(rig.payments, payments(2))
    result = ticks()
    assert (rig.names.ingest_job(rig.payments) in jobs(result)) is is_long
    assert tables.isdisjoint(jobs(result)) is is_long


@pytest.mark.slow
def test_a_run_of_the_sensor_gives_other_tables_their_turn(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks(rig)
    settled(rig, ticks)
    monkeypatch.setattr(io_managers, "read_sink", partial(read_sink, limit=2))
    monkeypatch.setattr(runs, "SINK_SECONDS", 0.0)
    rig.send(rig.payments, payments(*range(5)))
    rig.ingest(rig.payments)
    rig.stage()
    load = rig.names.sink_job(sink(rig), "payments")
    ticks()
    result = ticks()
    assert load in jobs(result)
    ticks.run(result)
    assert rows(rig, "SELECT count(*) FROM payments") == [(2,)]
    assert load in jobs(ticks())
    # A person's run has no limit.
    rig.run(load)
    assert rows(rig, "SELECT count(*) FROM payments") == [(5,)]


def test_an_outage_of_a_target_names_the_sink_and_the_cure(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise TargetUnavailable("connection refused")

    rig.send(rig.payments, payments(1))
    rig.ingest(rig.payments)
    monkeypatch.setattr(SqliteTarget, "progress", away)
    told = f"sink {sink(rig)}, table payments: connection refused. Check the url, and that the target is up."
    assert told in gather(rig.pipeline).problems.values()
    (failed,) = failures(rig.run(rig.names.sink_job(sink(rig), "payments"), fails=True))
    assert told in failed


@pytest.mark.slow
def test_all_rows_are_compared_in_a_job_of_their_own(rig: Rig) -> None:
    rig.send(rig.payments, payments(1, 2))
    rig.ingest(rig.payments)
    rig.run(rig.names.sink_job(sink(rig), "payments"))
    key = AssetCheckKey(rig.names.sink_key(sink(rig), "payments"), "rows_match")
    compare = rig.definitions.resolve_job_def(rig.names.rows_job)
    done = compare.execute_in_process(instance=rig.instance)
    assert {check.asset_check_key.asset_key.path[-1]: check.passed for check in done.get_asset_check_evaluations()} == {
        "payments": True,
        "sales": True,
    }
    with sqlite3.connect(rig.pipeline.path.parent / "shop.db") as connection:
        connection.execute("UPDATE payments SET paid = 0 WHERE id = '2'")
    done = compare.execute_in_process(instance=rig.instance)
    (result,) = [check for check in done.get_asset_check_evaluations() if check.asset_check_key == key]
    assert (result.passed, result.blocking) == (False, False)
    assert "id='2': another value in paid" in (result.description or "")
    # Neither the job of all other checks nor a run that writes the table compares rows.
    for job in (rig.names.checks_job, rig.names.sink_job(sink(rig), "payments")):
        ops = [node.name for node in rig.definitions.resolve_job_def(job).nodes]
        assert rig.names.check_op("sink_position", key.asset_key) in ops
        assert rig.names.check_op("rows_match", key.asset_key) not in ops
    whole = rig.definitions.resolve_implicit_global_asset_job_def().get_subset(
        asset_selection={key.asset_key}, asset_check_selection={key}
    )
    written = whole.execute_in_process(instance=rig.instance, tags={"dagster/partition": OPEN})
    assert [check.check_name for check in written.get_asset_check_evaluations()] == []


def test_a_failed_check_of_a_raw_table_stops_the_sink_that_reads_it(rig: Rig) -> None:
    job, ticks = rig.names.sink_job(sink(rig), "payments"), Ticks(rig)
    settled(rig, ticks)
    rig.send(rig.payments, payments(1, 2, 3))
    rig.ingest(rig.payments)
    whole = lose(rig, rig.payments, offset=1)
    assert not result(rig.ingest(rig.payments, fails=True), "no_unexplained_loss").passed
    held = ticks()
    assert job not in [request.job_name for request in held.run_requests or ()]
    assert said(held, f"{job}: check no_unexplained_loss of Raw/")
    (refused,) = failures(rig.run(job, fails=True))
    assert "check no_unexplained_loss of Raw/" in refused
    assert "is in Kafka and not in the lake. Nothing was written to the target." in refused
    with pytest.raises(CheckFailed, match="Nothing was written to the target"):
        list(sink_all(rig.pipeline, lambda: spark_session(rig.pipeline.spark)))
    assert not Path(rig.pipeline.path.parent, "shop.db").exists()

    restore(rig, rig.payments, whole)
    assert all(found.passed for found in run_all(rig.pipeline) if found.severity == "error")
    rig.run(job)
    assert rows(rig, "SELECT id, paid FROM payments") == [("1", 10), ("2", 20), ("3", 30)]


def test_raw_records_that_no_check_has_passed_are_checked_before_they_are_written(rig: Rig) -> None:
    """A run may have died between its commit and its checks."""
    rig.send(rig.payments, payments(1, 2))
    list(ingest_all(rig.pipeline, lambda: spark_session(rig.pipeline.spark), [rig.payments]))
    lose(rig, rig.payments, offset=1)
    (refused,) = failures(rig.run(rig.names.sink_job(sink(rig), "payments"), fails=True))
    assert "the record at offset 1 in partition 0" in refused
    assert "is in Kafka and not in the lake. Nothing was written to the target." in refused


def test_the_events_of_older_versions_have_their_last_offset_too() -> None:
    assert last_offset(AssetMaterialization("a", metadata={"last": 3})) == 3
    assert last_offset(AssetMaterialization("a", metadata={"last_offset": 4})) == 4
    assert last_offset(AssetMaterialization("a")) is None
