"""The graph at work, in this process: every hop through its IO manager, ranges, and what each run reports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from confluent_kafka import Producer
from dagster import AssetIn, AssetKey, Definitions, InputContext, IOManager, OutputContext, asset
from pyspark.sql import DataFrame

from zync_assets.assets import io_managers, resources
from zync_assets.assets.build import build_definitions
from zync_assets.etl.plan import EtlPlan
from zync_assets.ingest import plan
from zync_assets.ingest.plan import RawBatch
from zync_assets.lake import raw, staging
from zync_assets.local.services import Services
from zync_assets.pipeline import Pipeline
from zync_assets_tests.assets.rig import FILE, OPEN, Rig, failures, make_rig, orders, payments, told
from zync_assets_tests.mini import run_steps

SECOND = "1:0-999999"


@pytest.fixture
def rig(services: Services, tmp_path: Path, unique: str) -> Iterator[Rig]:
    with make_rig(services, tmp_path, unique) as made:
        yield made


def test_the_whole_way_and_what_each_hop_reports(rig: Rig) -> None:
    rig.send(rig.orders, orders(1, 2, 3))
    rig.send(rig.orders, orders(4), partition=1)
    rig.send(rig.payments, payments(2, 4, -9))

    ingested = rig.ingest(rig.orders, OPEN, SECOND)
    loaded = [event for event in ingested.all_events if event.event_type_value == "LOADED_INPUT"]
    handled = [event for event in ingested.all_events if event.event_type_value == "HANDLED_OUTPUT"]
    assert [event.event_specific_data.manager_key for event in (*loaded, *handled)] == [
        rig.names.resource("kafka_io"),
        rig.names.resource("pool_io"),
    ]
    told_raw = told(ingested, rig.names.pool_key("Raw", rig.orders))
    assert {key: (said["first_offset"], said["last_offset"], said["rows"]) for key, said in told_raw.items()} == {
        OPEN: (0, 2, 3),
        SECOND: (0, 0, 1),
    }
    assert told_raw[OPEN]["complete"] is False
    columns = [column.name for column in told_raw[OPEN]["dagster/column_schema"].columns]
    assert columns == ["kafka", "key", "value", "key_schema_id", "value_schema_id"]

    rig.ingest(rig.payments)
    done = rig.stage()
    assert [
        event.event_specific_data.manager_key for event in done.all_events if event.event_type_value == "HANDLED_OUTPUT"
    ] == [rig.names.resource(name) for name in ("pool_io", "pool_io", "kafka_io", "kafka_io")]
    said = told(done, rig.names.pool_key("Staging", rig.sales))[OPEN]
    assert (said["rows"], said["last_offset"], said["batch"]) == (2, 1, 1)
    assert json.loads(said["consumed"])[rig.orders] == ["0:0-2", "1:0-0"]
    assert said["pending"] == 2
    of_topic = told(done, rig.names.topic_key(rig.sales))[OPEN]
    assert of_topic["dagster/partition_row_count"] == 2
    assert [column.name for column in of_topic["dagster/column_schema"].columns] == ["key", "value"]
    assert all(check.passed for check in done.get_asset_check_evaluations())
    assert len(done.get_asset_check_evaluations()) == 2 * 4 + 2

    again = rig.stage()
    said = told(again, rig.names.pool_key("Staging", rig.sales))[OPEN]
    assert "batch" not in said
    assert said["pending"] == 2
    assert told(again, rig.names.topic_key(rig.sales))[OPEN]["published"] == 0


@pytest.mark.slow
def test_each_partition_of_an_output_has_ranges_of_its_own(services: Services, tmp_path: Path, unique: str) -> None:
    one = "sales, pool: Staging, key-format: string, value-format: json, create: {"
    with make_rig(services, tmp_path, unique, file=FILE.replace(one, f"{one}partitions: 3, ")) as rig:
        rig.send(rig.orders, orders(*range(1, 13)))
        rig.send(rig.payments, payments(*range(1, 13)))
        rig.ingest(rig.orders)
        rig.ingest(rig.payments)
        done = rig.stage()
        for key in (rig.names.pool_key("Staging", rig.sales), rig.names.topic_key(rig.sales)):
            said = told(done, key)
            # The run has one key, and reports the ranges of the other partitions beside it.
            reported = {*said, *rig.instance.get_materialized_partitions(key)}
            assert reported == {OPEN, SECOND, "2:0-999999"}
        known = rig.instance.get_dynamic_partitions(rig.names.staging_partitions("Staging"))
        assert {*known} == {OPEN, SECOND, "2:0-999999"}
        again = told(rig.stage(SECOND), rig.names.topic_key(rig.sales))[SECOND]
        assert (again["published"], again["rows"] > 0) == (0, True)
        rig.add_keys(rig.names.staging_partitions("Staging"), "3:0-999999")
        [refused] = failures(rig.stage("3:0-999999", fails=True))
        assert "outputs have partitions 0 to 2" in refused


@pytest.mark.slow
def test_ranges_complete_open_and_ahead(rig: Rig) -> None:
    """A range of a million offsets, so this produces a million records."""
    producer = Producer({"bootstrap.servers": rig.pipeline.kafka["bootstrap.servers"], "linger.ms": 50})
    for number in range(1_000_005):
        producer.produce(rig.notes, b"n", partition=0)
        if number % 50_000 == 0:
            producer.flush(30)
    assert producer.flush(60) == 0
    following, ahead = "0:1000000-1999999", "0:2000000-2999999"
    rig.raw_keys(rig.notes, following, ahead)

    refused = rig.ingest(rig.notes, following, fails=True)
    assert f"lies ahead of the next offset 0 of partition 0. Run {OPEN} first." in failures(refused)[0]

    both = told(rig.ingest(rig.notes, OPEN, following), rig.names.pool_key("Raw", rig.notes))
    assert [(both[key]["rows"], both[key]["complete"]) for key in (OPEN, following)] == [(1_000_000, True), (5, False)]

    version = table_version(rig)
    verified = told(rig.ingest(rig.notes, OPEN), rig.names.pool_key("Raw", rig.notes))
    assert verified[OPEN]["rows"] == 1_000_000
    assert table_version(rig) == version

    refused = rig.ingest(rig.notes, ahead, fails=True)
    assert f"next offset 1000005 of partition 0. Run {following} first." in failures(refused)[0]


STRANGE = {
    "foo": f"Run {OPEN} instead",
    "0:0-499999": f"Run {OPEN} instead",
    "7:0-999999": OPEN,
}
"""A partition key that a user added in the UI → the text of its error."""


@pytest.mark.parametrize("key", STRANGE)
def test_a_key_that_is_not_of_the_grid_is_refused_before_its_run_does_anything(rig: Rig, key: str) -> None:
    rig.send(rig.payments, payments(-1))
    rig.raw_keys(rig.payments, key)
    rig.add_keys(rig.names.staging_partitions("Staging"), key)
    (refused,) = failures(rig.ingest(rig.payments, key, fails=True))
    assert key in refused and STRANGE[key] in refused
    assert raw.open_raw(rig.pipeline.lake, "Raw", rig.payments) is None

    rig.ingest(rig.payments)
    (refused,) = failures(rig.stage(key, fails=True))
    assert key in refused and STRANGE[key] in refused
    assert staging.open_staging(rig.pipeline.lake, "Staging") is None

    run_steps(rig.pipeline)
    job = rig.definitions.resolve_job_def(rig.names.staging_job("Staging"))
    alone = job.execute_in_process(
        instance=rig.instance,
        tags={"dagster/partition": key},
        asset_selection=[rig.names.topic_key(rig.sales)],
        raise_on_error=False,
    )
    assert STRANGE[key] in failures(alone)[0]


def test_a_run_over_many_offsets_is_several_commits(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.send(rig.orders, orders(1, 2, 3, 4, 5))
    rig.send(rig.orders, orders(6), partition=1)
    monkeypatch.setitem(plan.plan_ingest.__kwdefaults__, "limit", 2)
    said = told(rig.ingest(rig.orders, OPEN, SECOND), rig.names.pool_key("Raw", rig.orders))
    assert (said[OPEN]["rows"], said[SECOND]["rows"]) == (5, 1)
    assert (said[OPEN]["ingested"], said[OPEN]["commits"]) == (6, 3)


def test_a_run_with_nothing_to_do_asks_for_no_spark_session(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.send(rig.orders, orders(1))
    rig.send(rig.payments, payments(1))
    run_steps(rig.pipeline)

    def refused(_: object) -> None:
        raise AssertionError("a session was asked for")

    monkeypatch.setattr(resources, "session_with", refused)
    assert told(rig.ingest(rig.orders), rig.names.pool_key("Raw", rig.orders))[OPEN]["rows"] == 1
    assert told(rig.stage(), rig.names.topic_key(rig.sales))[OPEN]["published"] == 0


def table_version(rig: Rig) -> int:
    state = raw.open_raw(rig.pipeline.lake, "Raw", rig.notes)
    assert state is not None
    return state.table.version


def test_a_complete_range_is_not_verified_when_a_file_is_gone(rig: Rig) -> None:
    rig.send(rig.payments, payments(1))
    rig.ingest(rig.payments)
    state = raw.open_raw(rig.pipeline.lake, "Raw", rig.payments)
    assert state is not None
    lost = Path(state.table.uri) / raw.raw_files(state)[0].path
    lost.unlink()
    assert f"{lost} is not there" in failures(rig.ingest(rig.payments, fails=True))[0]


class Recorder(IOManager):
    """Stands in for ``pool_io``: keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[object] = []

    def handle_output(self, context: OutputContext, obj: object) -> None:
        self.given.append(obj)

    def load_input(self, context: InputContext) -> object:
        raise AssertionError("nothing is loaded from it here")


def test_another_pool_io_receives_the_batch(rig: Rig) -> None:
    rig.send(rig.orders, orders(1))
    rig.ingest(rig.orders)
    rig.send(rig.orders, orders(2, 3))
    recorder = Recorder()
    replace(rig, definitions=build_definitions(rig.pipeline, resources={"pool_io": recorder})).ingest(rig.orders)
    batch = recorder.given[0]
    assert isinstance(batch, RawBatch)
    assert [row.value.item for row in batch.dataframe().collect()] == ["item 2", "item 3"]
    state = raw.open_raw(rig.pipeline.lake, "Raw", rig.orders)
    assert state is not None
    assert state.next[0] == 1


@pytest.mark.slow
def test_an_asset_of_ones_own_says_how_it_wants_its_rows(rig: Rig) -> None:
    rig.send(rig.orders, orders(1, 2))
    rig.send(rig.payments, payments(1))
    rig.ingest(rig.orders)
    rig.ingest(rig.payments)
    rig.stage()
    sales, kept = AssetIn(rig.names.pool_key("Staging", rig.sales)), AssetIn(rig.names.pool_key("Raw", rig.orders))
    found: dict[str, object] = {}

    @asset(ins={"rows": kept})
    def with_spark(rows: DataFrame) -> None:
        found["spark"] = rows.count()

    @asset(ins={"rows": kept})
    def with_arrow(rows: pa.Table) -> None:
        found["arrow"] = rows["value"].to_pylist()

    @asset(ins={"rows": sales})
    def with_polars(rows: pl.LazyFrame) -> None:
        found["polars"] = rows.select(pl.col("value").struct.field("paid")).collect().to_series().to_list()

    @asset(ins={"rows": AssetIn(rig.names.topic_key(rig.sales))})
    def of_the_topic(rows: pa.Table) -> None:
        found["topic"] = rows["value"].to_pylist()

    @asset(ins={"rows": kept})
    def with_a_list(rows: list) -> None:
        pass

    own = [with_spark, with_arrow, with_polars, of_the_topic, with_a_list]
    merged = Definitions.merge(build_definitions(rig.pipeline), Definitions(assets=own))
    job = merged.resolve_implicit_global_asset_job_def()
    done = job.execute_in_process(instance=rig.instance, asset_selection=[AssetKey(item.key.path) for item in own[:4]])
    assert done.success
    assert found == {
        "spark": 2,
        "arrow": [{"id": 1, "item": "item 1"}, {"id": 2, "item": "item 2"}],
        "polars": [10],
        "topic": [{"id": 1, "item": "item 1", "paid": 10}],
    }
    refused = job.execute_in_process(instance=rig.instance, asset_selection=[own[4].key], raise_on_error=False)
    assert "Annotate the argument with pyspark.sql.DataFrame, pyarrow.Table or polars.LazyFrame" in failures(refused)[0]


@pytest.mark.slow
def test_an_asset_of_ones_own_names_the_damaged_file_that_it_would_read(rig: Rig) -> None:
    rig.send(rig.orders, orders(1, 2))
    rig.send(rig.payments, payments(1))
    run_steps(rig.pipeline)

    @asset(ins={"rows": AssetIn(rig.names.pool_key("Staging", rig.sales))})
    def with_spark(rows: DataFrame) -> int:
        return rows.count()

    @asset(ins={"rows": AssetIn(rig.names.pool_key("Staging", rig.sales))})
    def with_arrow(rows: pa.Table) -> None: ...

    @asset(ins={"rows": AssetIn(rig.names.pool_key("Raw", rig.orders))})
    def with_raw(rows: DataFrame) -> int:
        return rows.count()

    own = [with_spark, with_arrow, with_raw]
    job = Definitions.merge(
        build_definitions(rig.pipeline), Definitions(assets=own)
    ).resolve_implicit_global_asset_job_def()
    state, kept = (
        staging.open_staging(rig.pipeline.lake, "Staging"),
        raw.open_raw(rig.pipeline.lake, "Raw", rig.orders),
    )
    assert state is not None and kept is not None
    staged = Path(state.table.uri) / state.output_files(rig.sales, None)[0].path
    ingested = Path(kept.table.uri) / raw.raw_files(kept)[0].path
    whole = staged.read_bytes()
    # The pages of a file that its footer does not belie are read by Spark alone.
    for file, content, assets in (
        (staged, whole[:-9], own[:2]),
        (staged, b"PAR1" + bytes(len(whole) - 12) + whole[-8:], own[:2]),
        (staged, bytes(4) + whole[4:12] + bytes(200) + whole[212:], own[1:2]),
        (staged, None, own[:2]),
        (ingested, b"no Parquet", own[2:]),
    ):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        for item in assets:
            done = job.execute_in_process(instance=rig.instance, asset_selection=[item.key], raise_on_error=False)
            [failure] = failures(done)
            assert file.name in failure and "Restore" in failure and "Spark" not in failure, failure


@pytest.mark.slow
def test_an_asset_without_partitions_reads_ranges_that_dagster_does_not_know_yet(rig: Rig) -> None:
    """The command line has moved the records, and no sensor has added keys. A key that is no range stands in nobody's way."""
    rig.send(rig.orders, orders(1, 2))
    rig.send(rig.payments, payments(1))
    run_steps(rig.pipeline)
    found: dict[str, list[int]] = {"staged": [], "sent": []}

    @asset(ins={"rows": AssetIn(rig.names.pool_key("Staging", rig.sales))})
    def staged(rows: pa.Table) -> None:
        found["staged"].append(len(rows))

    @asset(ins={"rows": AssetIn(rig.names.topic_key(rig.sales))})
    def sent(rows: pa.Table) -> None:
        found["sent"].append(len(rows))

    merged = Definitions.merge(build_definitions(rig.pipeline), Definitions(assets=[staged, sent]))
    job, name = merged.resolve_implicit_global_asset_job_def(), rig.names.staging_partitions("Staging")
    for keys in ([], ["junk"], ["1:0-999999"]):
        rig.instance.add_dynamic_partitions(name, keys)
        assert job.execute_in_process(instance=rig.instance, asset_selection=[staged.key, sent.key]).success
    assert found == {"staged": [1, 1, 1], "sent": [1, 1, 1]}


@pytest.mark.slow
@pytest.mark.parametrize("batches_before", [0, 1])
def test_a_writer_that_was_first_is_taken_into_account(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, batches_before: int
) -> None:
    """Somebody's ``zync run`` takes a batch all the way between this run's look and its commit."""
    for number in range(1, batches_before + 1):
        rig.send(rig.orders, orders(number))
        rig.send(rig.payments, payments(number))
        run_steps(rig.pipeline)
    rig.send(rig.orders, orders(8))
    rig.send(rig.payments, payments(8))
    rig.ingest(rig.orders)
    look, raced = io_managers.plan_etl, list[str]()

    def slow(pipeline: Pipeline, pool: str) -> EtlPlan:
        plan = look(pipeline, pool)
        if not raced:
            raced.append(pool)
            run_steps(rig.pipeline)
        return plan

    monkeypatch.setattr(io_managers, "plan_etl", slow)
    done = rig.stage()
    assert told(done, rig.names.pool_key("Staging", rig.sales))[OPEN]["rows"] == batches_before + 1
    assert told(done, rig.names.topic_key(rig.sales))[OPEN]["rows"] == batches_before + 1


@pytest.mark.slow
def test_a_retention_that_was_first_is_taken_into_account(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process releases raw records between this run's plan and its commit. The run repeats its batch."""
    rig.send(rig.orders, orders(1))
    rig.send(rig.payments, payments(1))
    run_steps(rig.pipeline)
    rig.send(rig.orders, orders(8))
    rig.send(rig.payments, payments(8))
    rig.ingest(rig.orders)
    rig.ingest(rig.payments)
    look, raced = io_managers.plan_etl, list[str]()

    def slow(pipeline: Pipeline, pool: str) -> EtlPlan:
        plan = look(pipeline, pool)
        if not raced and plan.state is not None:
            raced.append(pool)
            staging.release(plan.state, rig.orders, {0: 1})
            plan = replace(plan, state=before.pop())
        return plan

    before = [staging.open_staging(rig.pipeline.lake, "Staging")]
    monkeypatch.setattr(io_managers, "plan_etl", slow)
    assert told(rig.stage(), rig.names.pool_key("Staging", rig.sales))[OPEN]["rows"] == 2
    assert raced
