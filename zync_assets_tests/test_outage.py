"""An outage of the registry or the broker quarantines and commits no record. After the outage, no record is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from zync_assets.errors import BrokerUnavailable, RegistryUnavailable
from zync_assets.ingest.commit import commit_raw
from zync_assets.ingest.plan import plan_ingest, read_input
from zync_assets.kafka.registry import Registry
from zync_assets.lake import storage
from zync_assets.local.services import Services, down, up
from zync_assets_tests.mini import Mini, mini
from zync_assets_tests.test_writers_side_by_side import AVRO, COPY, fastavro_bytes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROW = {"type": "record", "name": "Row", "fields": [{"name": "id", "type": "int"}]}


@pytest.fixture
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """A broker and a registry that a test may stop."""
    home = tmp_path_factory.mktemp("services")
    try:
        yield up(home)
    finally:
        down(home, clean=True)


def kill(pid: int | None) -> None:
    process = psutil.Process(pid)
    process.kill()
    process.wait(30)


def filled(own: Services, spark: SparkSession, folder: Path, name: str) -> Mini:
    it = mini(own, spark, folder, name, AVRO + COPY)
    assert it.pipeline.registry is not None
    number = Registry(it.pipeline.registry).register(f"{it.left}-value", json.dumps(ROW))
    unknown = b"\0" + (number + 9_000).to_bytes(4, "big") + b"\2"
    it.send(it.left, b"\0" + number.to_bytes(4, "big") + fastavro_bytes(ROW, {"id": 7}), unknown)
    return it


@pytest.mark.slow
def test_a_registry_that_is_gone_puts_nothing_into_quarantine(
    own: Services, spark: SparkSession, tmp_path: Path
) -> None:
    it = filled(own, spark, tmp_path, "outage")
    kill(own.registry_pid)
    with pytest.raises(RegistryUnavailable, match=r"no answer from the schema registry"):
        it.ingest(it.left)
    assert it.next(it.left) == {}
    assert not Path(storage.quarantine_uri(it.lake, "Raw", it.left), "_delta_log").exists()
    up(own.state_dir)
    made = it.ingest(it.left)[it.left]
    assert (made.records, made.quarantined) == (1, 1)


@pytest.mark.slow
def test_a_broker_that_goes_in_mid_batch_is_waited_for_and_then_said(
    own: Services, spark: SparkSession, tmp_path: Path
) -> None:
    it = filled(own, spark, tmp_path, "broker")
    batch = read_input(spark, it.pipeline, plan_ingest(it.pipeline, it.left))
    kill(own.kafka_pid)
    with pytest.raises(BrokerUnavailable, match=r"no Kafka broker answered"):
        commit_raw(it.pipeline, batch)
    assert it.next(it.left) == {}
    up(own.state_dir)
    made = it.ingest(it.left)[it.left]
    assert (made.records, made.quarantined) == (1, 1)
