"""Checks in runs: one result each, every time, over the run's ranges; a blocking one stands before what is downstream."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from confluent_kafka import Producer
from dagster import (
    AssetCheckEvaluation,
    AssetCheckKey,
    ExecuteInProcessResult,
    InitResourceContext,
    OutputContext,
    SensorResult,
    io_manager,
)

from zync_assets.assets.build import build_definitions
from zync_assets.assets.io_managers import PoolIOManager
from zync_assets.assets.names import Names
from zync_assets.checks.output_checks import run_all
from zync_assets.cli.main import main
from zync_assets.errors import BrokerUnavailable
from zync_assets.etl.plan import EtlBatch
from zync_assets.kafka.topics import high_watermark, topic_states
from zync_assets.lake import check_results, raw, staging, tables
from zync_assets.lake.check_results import Look, open_check_state
from zync_assets.local.services import Services
from zync_assets.offsets import OffsetRange
from zync_assets.runner import etl_all, ingest_all
from zync_assets.spark.session import spark_session
from zync_assets_tests.assets.rig import OPEN, Rig, failures, make_rig, orders, payments
from zync_assets_tests.assets.test_sensor import Ticks, settled
from zync_assets_tests.checks.damage import Rows, change_account, edit, take_out


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
                now = raw.open_raw(self._pipeline.lake, "Raw", state.table.uri.rsplit("/", 1)[1]) if state else None
                if now is not None and raw.raw_files(now):
                    take_out(now.table, *raw.raw_files(now))


def careless(names: Names):
    @io_manager(required_resource_keys={names.resource("spark")})
    def pool_io(context: InitResourceContext) -> Careless:
        return Careless(names, getattr(context.resources, names.resource("spark")))

    return pool_io


@pytest.mark.slow
def test_a_blocking_check_that_fails_holds_back_the_topic(rig: Rig) -> None:
    rig.ingest(rig.orders)
    rig.ingest(rig.payments)
    damaged = replace(rig, definitions=build_definitions(rig.pipeline, resources={"pool_io": careless(rig.names)}))
    run = damaged.stage(fails=True)

    results = {(item.asset_key, item.check_name): item for item in run.get_asset_check_evaluations()}
    failed = results[rig.names.pool_key("Staging", rig.sales), "exactly_once_done_coverage"]
    assert not failed.passed
    assert failed.blocking
    assert results[rig.names.pool_key("Staging", rig.sales), "contiguous_output_offsets"].passed
    assert (rig.names.topic_key(rig.sales), "staging_equals_topic") not in results
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
    keys = {key for key in graph.asset_check_keys if key.asset_key == rig.names.pool_key("Raw", rig.orders)}
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
    keys = {AssetCheckKey(rig.names.pool_key("Raw", rig.orders), "no_unexplained_loss")}
    run = (
        definitions.resolve_implicit_global_asset_job_def()
        .get_subset(asset_selection=set(), asset_check_selection=keys)
        .execute_in_process(instance=rig.instance, raise_on_error=False)
    )
    (result,) = run.get_asset_check_evaluations()
    assert not result.passed
    assert "127.0.0.1:1" in (result.description or "")


class TestBlocks:
    """A failed blocking check blocks downstream steps until the check passes."""

    @pytest.mark.slow
    def test_a_pass_over_another_partition_lifts_nothing(self, rig: Rig) -> None:
        """A raw table that lacks a record: ETL waits, whoever asks for it, until the check passes where it failed."""
        topic, ticks = rig.orders, Ticks(rig)
        rig.ingest(rig.notes)
        rig.send(topic, orders(3))
        rig.ingest(rig.payments)
        rig.ingest(topic)
        whole = lose(rig, topic, offset=1)
        assert not result(rig.ingest(topic, fails=True), "no_unexplained_loss").passed
        assert said(ticks(), "check no_unexplained_loss of Raw/")
        rig.send(topic, orders(4), partition=1)
        passed_there = rig.ingest(topic, "1:0-999999", fails=True)
        assert "an earlier one failed" in (result(passed_there, "no_unexplained_loss").description or "")
        held = ticks()
        assert held.run_requests == []
        remedy = rig.pipeline.command("check")
        assert said(held, f"then this lifts the block: {remedy}")
        assert "Nothing was transformed" in failures(rig.stage(fails=True))[0]
        assert staging.open_staging(rig.pipeline.lake, "Staging") is None

        # A record of blocks that can't be read holds back its own step, and no other topic's.
        (block,) = Path(rig.pipeline.lake, "~checked", "Raw").glob("block-*.parquet")
        away = block.rename(block.with_suffix(".away"))
        check_results._read.cache_clear()  # as in another process
        rig.send(rig.payments, payments(7))
        assert [request.job_name for request in ticks().run_requests or ()] == [rig.names.ingest_job(rig.payments)]
        away.rename(block)
        rig.ingest(rig.payments)

        restore(rig, topic, whole)
        assert all(found.passed for found in run_all(rig.pipeline) if found.severity == "error")
        assert [request.job_name for request in ticks().run_requests or ()] == [rig.names.staging_job("Staging")]

    @pytest.mark.slow
    def test_records_that_no_check_has_passed_are_checked_before_etl(self, rig: Rig) -> None:
        """The run that committed the records may have died before its checks."""
        rig.ingest(rig.payments)
        rig.ingest(rig.orders)
        rig.send(rig.orders, orders(3, 4))
        spark = spark_session(rig.pipeline.spark)
        assert list(ingest_all(rig.pipeline, lambda: spark, [rig.orders]))
        assert passed(rig, "no_unexplained_loss") == 2
        whole = lose(rig, rig.orders, offset=2)
        assert "the record at offset 2 in partition 0" in failures(rig.stage(fails=True))[0]
        assert staging.open_staging(rig.pipeline.lake, "Staging") is None
        restore(rig, rig.orders, whole)
        assert all(found.passed for found in run_all(rig.pipeline) if found.severity == "error")
        rig.stage()
        assert passed(rig, "no_unexplained_loss") == 4

    @pytest.mark.slow
    def test_a_topic_alone_is_not_published_past_a_failed_check(self, rig: Rig) -> None:
        """The account says of a record that it is done, and it made no output: nobody publishes, and ETL waits."""
        rig.ingest(rig.notes)
        rig.send(rig.payments, [{"id": 9, "paid": None}])
        rig.ingest(rig.orders)
        rig.ingest(rig.payments)
        rig.stage()
        state = staging.open_staging(rig.pipeline.lake, "Staging")
        assert state is not None
        change_account(state, edit(lambda row: {**row, "kind": "done"}, kind="unmatched"))
        rig.send(rig.orders, orders(5))
        rig.send(rig.payments, payments(5))
        run_steps_until_published(rig)
        alone = (
            rig.definitions.resolve_implicit_global_asset_job_def()
            .get_subset(asset_selection={rig.names.topic_key(rig.sales)})
            .execute_in_process(instance=rig.instance, tags={"dagster/partition": OPEN}, raise_on_error=False)
        )
        assert "the ledger's entries have 0" in failures(alone)[0]
        assert "Nothing was published" in failures(alone)[0]
        assert high_watermark(rig.pipeline.kafka, rig.sales, 0) == 2
        held = Ticks(rig)()
        assert held.run_requests == []
        assert said(held, "check exactly_once_done_coverage of Staging failed")
        assert CliRunner().invoke(main, ["to-kafka", str(rig.pipeline.path)]).exit_code == 1

        change_account(state, edit(lambda row: {**row, "kind": "unmatched"}, kind="done", rule=None, count=1))
        assert CliRunner().invoke(main, ["check", str(rig.pipeline.path)]).exit_code == 0
        rig.stage()
        assert high_watermark(rig.pipeline.kafka, rig.sales, 0) == 3

    def test_a_check_that_cant_look_blocks_nothing(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        rig.ingest(rig.orders)
        nowhere = replace(rig.pipeline, kafka={**rig.pipeline.kafka, "bootstrap.servers": "127.0.0.1:1"})
        monkeypatch.setattr("zync_assets.kafka.topics.WAIT", 1.0)
        with pytest.raises(BrokerUnavailable):
            list(run_all(nowhere))
        assert open_check_state(rig.pipeline.lake, "Raw").blocks == ()
        assert passed(rig, "no_unexplained_loss") == 2

    @pytest.mark.slow
    def test_a_record_of_another_program_is_named_although_publishing_fails(self, rig: Rig) -> None:
        """Nor is what was not sent reported as published."""
        ticks = Ticks(rig)
        settled(rig, ticks)
        other = Producer({"bootstrap.servers": rig.pipeline.kafka["bootstrap.servers"]})
        other.produce(rig.sales, b"foreign", partition=0)
        assert other.flush(10) == 0
        rig.send(rig.orders, orders(3))
        rig.send(rig.payments, payments(3))
        ticks.run(ticks())
        rig.stage(fails=True)
        found = rig.instance.get_latest_asset_check_evaluation_record(
            AssetCheckKey(rig.names.topic_key(rig.sales), "staging_equals_topic")
        )
        assert found is not None
        assert found.evaluation is not None
        assert not found.evaluation.passed
        assert found.evaluation.description == "the record at offset 2 is not staging's"
        (event,) = [event for event in ticks().asset_events if event.asset_key == rig.names.topic_key(rig.sales)]
        assert event.metadata["lag"].value == 1
        told_last = rig.instance.fetch_materializations(rig.names.topic_key(rig.sales), limit=1).records[0]
        assert told_last.asset_materialization is not None
        assert told_last.asset_materialization.metadata["last_offset"].value == 1
        status = CliRunner().invoke(main, ["status", str(rig.pipeline.path), "--format", "json"])
        [row] = [row for row in map(json.loads, status.stdout.splitlines()) if row.get("topic") == rig.sales]
        assert (row["published"], row["lag"]) == (2, 1)


def result(run: ExecuteInProcessResult, name: str) -> AssetCheckEvaluation:
    [found] = [item for item in run.get_asset_check_evaluations() if item.check_name == name]
    return found


def said(tick: SensorResult, text: str) -> bool:
    assert tick.skip_reason is not None
    return text in (tick.skip_reason.skip_message or "")


def passed(rig: Rig, check: str) -> int | None:
    """The offset up to which a check of the first partition of the orders has passed."""
    state = raw.open_raw(rig.pipeline.lake, "Raw", rig.orders)
    assert state is not None
    look = Look(check, f"Raw/{rig.orders}", state.table_id, {})
    return open_check_state(rig.pipeline.lake, "Raw").progress(look, (rig.orders, 0))


def lose(rig: Rig, topic: str, offset: int) -> Rows:
    """Take one record of partition 0 out of its table, as if it had never come; the rows of its file as they were."""
    rows = rewritten(rig, topic, offset, lambda rows: [row for row in rows if row["kafka"]["offset"] != offset])
    count_records(rig, topic, -1)
    return rows


def restore(rig: Rig, topic: str, rows: Rows) -> None:
    """Undo ``lose``."""
    rewritten(rig, topic, rows[-1]["kafka"]["offset"], lambda _: rows)
    count_records(rig, topic, 1)


def rewritten(rig: Rig, topic: str, offset: int, change: Callable[[Rows], Rows]) -> Rows:
    """Replace the file that holds an offset by another valid raw file. Returns the old rows."""
    state = raw.open_raw(rig.pipeline.lake, "Raw", topic)
    assert state is not None
    [item] = raw.raw_files(state, [OffsetRange(0, offset, offset + 1)])
    table = pq.ParquetFile(Path(state.table.uri) / item.path).read()
    rows = change(table.to_pylist())
    path = f"part-00000-{uuid.uuid4().hex}.parquet"
    pq.write_table(pa.Table.from_pylist(rows, table.schema), Path(state.table.uri) / path)
    offsets = [row["kafka"]["offset"] for row in rows]
    size = (Path(state.table.uri) / path).stat().st_size
    made = replace(item, path=path, size=size, records=len(rows), first=offsets[0], last=offsets[-1])
    tables.commit(state.table, [made], {}, removals=[item])
    return table.to_pylist()


def count_records(rig: Rig, topic: str, more: int) -> None:
    state = raw.open_raw(rig.pipeline.lake, "Raw", topic)
    assert state is not None
    tables.commit(state.table, [], {"zync:records:0": state.records[0] + more})


def run_steps_until_published(rig: Rig) -> None:
    """Ingest and transform what is new, and publish nothing."""
    spark = spark_session(rig.pipeline.spark)
    assert list(ingest_all(rig.pipeline, lambda: spark, [rig.orders, rig.payments]))
    assert list(etl_all(rig.pipeline, lambda: spark))
