"""Concurrent writers, cures, and tables that were created again: no error or check reports damage that does not exist."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastavro
import pytest
from click.testing import CliRunner
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from zync_assets.cli.main import main
from zync_assets.errors import CheckFailed, CommitConflict, EtlError, LakeError, TopicMissing, ZyncError
from zync_assets.ingest.plan import plan_ingest
from zync_assets.kafka.registry import Registry
from zync_assets.kafka.topics import create_topic, delete_topic, topic_states
from zync_assets.lake import staging, tables
from zync_assets.lake.log import LakeTable
from zync_assets.lake.publication import commit_publish_state, open_publish_state
from zync_assets.lake.staging import StagingState
from zync_assets.local.services import Services
from zync_assets.publish import commit as publishing
from zync_assets.publish.commit import recreate_topic
from zync_assets.publish.plan import plan_publish
from zync_assets.runner import publish_all
from zync_assets.spark.tasks import run_tasks
from zync_assets_tests.mini import BOTH, Mini, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Make = Callable[..., Mini]

COPY = """
transforms:
  - {name: copy, type: stateless, in: $left, out: $out, key: in.key, value: {id: in.value.id}}
"""

AVRO = """
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: avro}
  - {topic: $right, pool: Raw, key-format: string, value-format: avro}
outputs:
  - {topic: $out, pool: Staging, key-format: string, value-format: avro, create: {replication-factor: 1}}
"""


def fastavro_bytes(schema: dict[str, Any], record: dict[str, Any]) -> bytes:
    """One Avro datum, without framing."""
    into = BytesIO()
    fastavro.schemaless_writer(into, schema, record)
    return into.getvalue()


@pytest.fixture
def make(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Make:
    """``make(text)``: a pipeline with topics of its own."""

    def made(text: str, partitions: int = 1) -> Mini:
        return mini(services, spark, tmp_path, unique, text, partitions)

    return made


def test_of_two_publishers_that_announce_the_same_window_one_is_refused(tmp_path: Path) -> None:
    lake = str(tmp_path)
    for window in (5, 9):
        ours, theirs = (open_publish_state(lake, "Staging", "out") for _ in range(2))
        commit_publish_state(lake, "Staging", theirs, window=window, verified_end=0, topic_id="one")
        with pytest.raises(CommitConflict):
            commit_publish_state(lake, "Staging", ours, window=window, verified_end=0, topic_id="one")


def test_a_topic_that_was_known_before_another_writer_ingested_more_has_lost_nothing(make: Make) -> None:
    it = make(BOTH + COPY)
    it.send(it.left, row(1))
    known = topic_states(it.pipeline.kafka, [it.left])
    it.send(it.left, row(2))
    it.ingest(it.left)
    assert plan_ingest(it.pipeline, it.left, topic_states=known).nothing_to_do


def test_another_publisher_s_records_are_not_foreign(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    it = make(BOTH + COPY)
    it.send(it.left, row(1))
    it.step()
    it.publish()
    state_of, others = staging.staging_state, [1]

    def state_before_another_is_done(table: LakeTable | None) -> StagingState | None:
        state = state_of(table)
        if others:
            others.pop()
            it.send(it.left, row(2))
            it.step()
            it.publish()
        return state

    monkeypatch.setattr(staging, "staging_state", state_before_another_is_done)
    plan = plan_publish(it.pipeline, it.out)
    assert (plan.parts[0].high, plan.parts[0].end, len(it.staged())) == (1, 1, 2)


@pytest.mark.parametrize(("first", "second"), [("long", "string"), ("int", "long"), ("double", "long")])
def test_writers_share_the_wider_type_and_where_there_is_none_the_first_partition_s_has_the_column(
    make: Make, first: str, second: str
) -> None:
    it = make(AVRO + COPY, partitions=2)
    assert it.pipeline.registry is not None
    registry = Registry(it.pipeline.registry)
    for partition, kind in enumerate((first, second)):
        schema = {"type": "record", "name": "Row", "fields": [{"name": "id", "type": kind}]}
        number = registry.register(f"{it.left}-{partition}-value", json.dumps(schema))
        payload = fastavro_bytes(schema, {"id": "7" if kind == "string" else 7})
        it.send(it.left, b"\0" + number.to_bytes(4, "big") + payload, partition=partition)
    made = it.ingest(it.left)[it.left]
    fits = second == "long"
    assert (made.records, made.quarantined) == ((2, 0) if fits else (1, 1))
    it.etl()
    assert it.values() == [{"id": 7}] * made.records


def test_a_task_that_fails_is_an_error_in_a_line(spark: SparkSession) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    def killed(_: int) -> None:
        os._exit(9)

    for work, why in ((full, "No space left on device"), (killed, "its Python worker ended")):
        with pytest.raises(ZyncError, match=why) as raised:
            run_tasks(spark, 1, work)
        assert "\n" not in str(raised.value)


def test_a_raw_file_that_spark_can_t_read_is_an_error_in_a_line(make: Make) -> None:
    it = make(BOTH + COPY)
    it.send(it.left, row(1))
    it.ingest()
    [path] = Path(it.lake, "Raw", it.left).glob("*.parquet")
    path.write_bytes(b"PAR1" + b"\0" * 100 + b"PAR1")
    with pytest.raises(CheckFailed, match=rf"file {path} can't be read: .*Nothing was transformed") as raised:
        it.etl()
    assert "\n" not in str(raised.value)


def test_a_raw_table_that_was_made_anew_is_an_error_and_not_skipped(make: Make) -> None:
    it = make(BOTH + COPY)
    it.send(it.left, row(1), row(2))
    it.step()
    shutil.rmtree(f"{it.lake}/Raw/{it.left}")
    delete_topic(it.pipeline.kafka, it.left)
    create_topic(it.pipeline.kafka, it.left, 1, 1, {})
    tables.forget(it.lake)  # as in another process
    it.send(it.left, row(3), row(4), row(5))
    with pytest.raises(LakeError, match="transformed up to offset 2, and the table is not there"):
        it.ingest(it.left)
    away = Path(it.lake, "Staging").rename(Path(it.lake, "Away"))
    tables.forget(it.lake)
    it.ingest(it.left)
    shutil.rmtree(it.lake + "/Staging", ignore_errors=True)
    away.rename(Path(it.lake, "Staging"))
    with pytest.raises(EtlError, match="another raw table"):
        it.etl()
    assert it.values() == [{"id": 1}, {"id": 2}]


def test_recreating_deletes_nothing_where_the_topic_can_t_be_created_again(make: Make) -> None:
    it = make(BOTH.replace(", create: {replication-factor: 1}", "") + COPY)
    create_topic(it.pipeline.kafka, it.out, 1, 1, {})
    it.send(it.left, row(1))
    it.step()
    it.publish()
    with pytest.raises(TopicMissing, match="nothing was deleted"):
        recreate_topic(it.pipeline, it.out)
    assert plan_publish(it.pipeline, it.out).nothing_to_do


def test_recreating_deletes_nothing_where_staging_is_damaged(make: Make) -> None:
    it = make(BOTH + COPY)
    it.send(it.left, row(1))
    it.step()
    it.publish()
    [path] = Path(it.lake, "Staging").rglob(f"topic={it.out}/*.parquet")
    path.unlink()
    ended = CliRunner().invoke(main, ["to-kafka", str(it.pipeline.path), "--recreate", it.out])
    assert ended.exit_code == 1
    assert "Nothing was published" in ended.output
    assert plan_publish(it.pipeline, it.out).parts[0].high == 1


def test_what_retention_took_after_a_kill_is_not_asked_for_again(make: Make) -> None:
    it = make(BOTH + COPY)
    it.send(it.left, row(1), row(2))
    it.step()
    it.publish()
    killed = open_publish_state(it.lake, "Staging", it.out)
    topic_id = topic_states(it.pipeline.kafka, [it.out])[it.out].topic_id
    commit_publish_state(it.lake, "Staging", killed, window=2, verified_end=0, topic_id=topic_id)
    admin = AdminClient({"bootstrap.servers": it.pipeline.kafka["bootstrap.servers"]})
    for future in admin.delete_records([TopicPartition(it.out, 0, 1)]).values():
        future.result()
    it.send(it.left, row(3))
    it.step()
    made = it.publish()
    assert (made.verified_records, made.records) == (1, 1)


def test_a_publisher_that_comes_second_goes_on_after_the_first(make: Make) -> None:
    it = make(BOTH + COPY)
    it.send(it.left, row(1))
    it.step()
    others = [1]

    def while_another_publishes() -> SparkSession:
        if others:
            others.pop()
            it.publish()
        return it.spark

    assert list(publish_all(it.pipeline, while_another_publishes, [it.out])) == []
    assert plan_publish(it.pipeline, it.out).nothing_to_do


def test_a_publisher_that_was_taken_for_dead_before_it_began_finds_no_foreign_record(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had announced its window, and then stood still for longer than ``settle``."""
    it = make(BOTH + COPY)
    it.send(it.left, row(1), row(2))
    it.step()
    real, others = publishing.run_tasks, [1]

    def after_another_went_on(*arguments: Any) -> Any:
        if others:
            others.pop()
            assert it.publish().records == 2
        return real(*arguments)

    monkeypatch.setattr(publishing, "run_tasks", after_another_went_on)
    with pytest.raises(CommitConflict, match="another publisher went on"):
        it.publish()
    assert plan_publish(it.pipeline, it.out).nothing_to_do


def test_fields_of_two_rules_that_differ_in_case_alone_are_two(make: Make) -> None:
    it = make(
        BOTH
        + """
transforms:
  - {name: one, type: stateless, in: $left, out: $out, key: in.key, value: {ID: in.value.id}}
  - {name: two, type: stateless, in: $right, out: $out, key: in.key, value: {id: in.value.id}}
"""
    )
    it.send(it.left, row(1))
    it.send(it.right, row(2))
    it.step()
    it.publish()
    assert sorted(it.values(), key=str) == [{"ID": 1, "%69d": None}, {"ID": None, "%69d": 2}]


def test_output_topics_that_differ_in_case_alone_are_an_error_that_names_both(make: Make) -> None:
    it = make(
        BOTH
        + """  - {topic: $out.A, pool: Staging, key-format: string, value-format: json, create: {replication-factor: 1}}
  - {topic: $out.a, pool: Staging, key-format: string, value-format: json, create: {replication-factor: 1}}
transforms:
  - {name: none, type: stateless, in: $left, where: value.id = 0, out: $out, key: in.key, value: {id: in.value.id}}
  - {name: one, type: stateless, in: $left, out: $out.A, key: in.key, value: {id: in.value.id}}
  - {name: two, type: stateless, in: $right, out: $out.a, key: in.key, value: {id: in.value.id}}
"""
    )
    it.send(it.left, row(1))
    it.send(it.right, row(2))
    with pytest.raises(EtlError, match="differ in case alone"):
        it.step()


LOST_TASK = """
import os, sys
from pathlib import Path
from zync_assets import pipeline_file
from zync_assets.publish import commit
from zync_assets.publish.plan import plan_publish, read_staging
from zync_assets.spark.session import spark_session

path, flag = Path(sys.argv[1]), Path(sys.argv[2])
it = pipeline_file.load(path)
send = commit._send

def killed_once(*given):
    # Spark sends this function to its worker by value, because it belongs to the main program.
    result = send(*given)
    if not flag.exists():
        flag.touch()
        os._exit(9)
    return result

commit._send = killed_once
plan = plan_publish(it, sys.argv[3])
commit.publish(it, read_staging(spark_session({"master": "local[1,2]"}), plan))
"""


@pytest.mark.slow
def test_what_a_lost_task_sent_is_not_foreign_to_the_one_that_spark_runs_in_its_place(
    make: Make, tmp_path: Path
) -> None:
    it = make(BOTH + COPY)
    it.send(it.left, row(1), row(2))
    it.step()
    given = [sys.executable, "-c", LOST_TASK, str(it.pipeline.path), str(tmp_path / "flag"), it.out]
    ended = subprocess.run(given, capture_output=True, text=True, timeout=120, check=False)
    assert "was lost on its way" in ended.stderr
    made = it.publish()
    assert (made.verified_records, made.records) == (2, 0)
