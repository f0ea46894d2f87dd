"""Every step on a Spark standalone cluster, the lake in a shared folder: how many records does each task handle?

No stage may leave most of the work to few of the tasks that there could be, nor the driver get or send rows in numbers
that grow with the records. Publishing is one task a partition of the output, as it must be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import pytest
from confluent_kafka import Producer
from deltalake import DeltaTable

from zync_assets import pipeline_file
from zync_assets.codecs.dispatch import make_encoder
from zync_assets.kafka.registry import Registry
from zync_assets.kafka.topics import create_topic, topic_states
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw import open_raw, raw_files
from zync_assets.lake.staging import open_staging
from zync_assets.local.services import Services
from zync_assets.pipeline import Pipeline
from zync_assets_tests.bench.data import EPOCH, ORDER, orders
from zync_assets_tests.network.processes import arguments, family, listening
from zync_assets_tests.standalone import Standalone, standalone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PARTITIONS = 8
RECORDS = 100_000
"""Of each of the two topics."""
SCALE = 20
"""A batch of four million records is cut into buckets, strides and tasks; one of a twentieth of that is cut as finely."""
TASKS = (2, 4, 8)
SMALL = 2_000
"""Records that a stage handles without being asked how, rows that pass between driver and tasks: facts, ranges, plans."""

FILE = """
name: cluster$cores
kafka: {bootstrap.servers: "$servers"}
registry: {url: "$registry"}
lake: $lake
settle: 1
spark:
  master: $master
  spark.cores.max: "$cores"
  spark.executor.cores: "$each"
  spark.executor.memory: 512m
  spark.scheduler.minRegisteredResourcesRatio: "1.0"
  spark.sql.shuffle.partitions: "$shuffle"
  # Spark gives what is little in bytes to one task: at a twentieth of a real size, all of a ledger.
  spark.sql.adaptive.coalescePartitions.enabled: "false"
  spark.sql.files.openCostInBytes: "16384"
  spark.authenticate: "true"
  spark.authenticate.secret: $secret
  spark.eventLog.enabled: "true"
  spark.eventLog.dir: file://$events
  spark.eventLog.compress: "false"
  spark.eventLog.rolling.enabled: "false"
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: avro}
  - {topic: $right, pool: Raw, key-format: string, value-format: avro}
outputs:
  - {topic: $joined, pool: Staging, key-format: string, value-format: avro, create: {replication-factor: 1}}
  - {topic: $single, pool: Staging, key-format: string, value-format: avro, create: {replication-factor: 1}}
transforms:
  # Of a thousand amounts 500 have both sides, 100 wait on the left, 200 have one side alone, the others are no rule's.
  - name: pair
    type: denorm
    where: {left: value.amount < 600, right: value.amount < 500}
    left: $left
    right: $right
    join-on: left.value.id = right.value.id
    out: $joined
    key: left.key
    value: {id: left.value.id, customer: left.value.customer, price: right.value.price}
  - name: single
    type: stateless
    where: value.amount >= 800
    in: $left
    out: $single
    key: in.key
    value: {id: in.value.id, city: in.value.city}
"""


@dataclass
class Stage:
    """The work of a stage's tasks, from Spark's event log."""

    name: str
    tasks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Task → records read and written, shuffles included."""
    executors: set[str] = field(default_factory=set)

    @property
    def total(self) -> int:
        return sum(max(task) for task in self.tasks.values())

    @property
    def largest(self) -> int:
        return max(max(task) for task in self.tasks.values())


def stages_of(log: Path) -> list[Stage]:
    """The stages of an application that ran, in order, by the names that ``counting_driver`` gave to their jobs."""
    found: dict[int, Stage] = {}
    for line in log.read_text().splitlines():
        event: dict[str, Any] = json.loads(line)
        if event["Event"] == "SparkListenerJobStart":
            name = event["Properties"].get("spark.job.description", "unnamed")
            for number in event["Stage IDs"]:
                found.setdefault(number, Stage(name))
        elif event["Event"] == "SparkListenerTaskEnd" and event["Task End Reason"]["Reason"] == "Success":
            stage, info, metrics = found[event["Stage ID"]], event["Task Info"], event["Task Metrics"]
            read = metrics["Input Metrics"]["Records Read"] + metrics["Shuffle Read Metrics"]["Total Records Read"]
            written = metrics["Output Metrics"]["Records Written"]
            written += metrics["Shuffle Write Metrics"]["Shuffle Records Written"]
            stage.tasks[info["Index"]] = read, written
            stage.executors.add(info["Executor ID"])
    return [stage for _, stage in sorted(found.items()) if stage.tasks]


@dataclass(frozen=True)
class Ran:
    stages: list[Stage]
    rows: Mapping[str, int]
    """Rows that passed to or from the driver, by the place that asked for them."""
    ingested: Mapping[str, list[int]]
    """Input topic → the number of records in each raw file. One task wrote each file."""
    staged: Mapping[str, list[Any]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    folder = tmp_path_factory.mktemp("cluster") / "spark"
    with standalone(folder, workers=2, cores=4, memory="2g") as found, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLUSTER_SECRET", found.secret)
        yield found


@pytest.fixture(scope="module")
def ran(services: Services, cluster: Standalone, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Ran]:
    """The pipeline with so many cores, run once."""
    prefix = f"t{os.getpid()}"

    @cache
    def run(cores: int) -> Ran:
        folder = tmp_path_factory.mktemp(f"cores-{cores}")
        (folder / "events").mkdir()
        left, right = f"{prefix}.left", f"{prefix}.right"
        text = Template(FILE).substitute(
            cores=cores,
            each=max(1, cores // 4),
            shuffle=3 * cores,
            servers=services.bootstrap_servers,
            registry=services.registry_url,
            lake=folder / "lake",
            master=cluster.master,
            secret="${CLUSTER_SECRET}",
            events=folder / "events",
            left=left,
            right=right,
            joined=f"{prefix}.joined-{cores}",
            single=f"{prefix}.single-{cores}",
        )
        path = folder / "cluster.yaml"
        path.write_text(text)
        loaded = pipeline_file.load(path)
        for topic in (left, right):
            _fill(loaded, topic)
        # The left topic alone first: what its join waits for comes in the second batch.
        steps = f"from-kafka {path} --topic {left} + etl {path} + from-kafka {path} + etl {path} + to-kafka {path}"
        command = ["-m", "zync_assets_tests.counting_driver", str(folder / "rows.json"), str(SCALE), *steps.split()]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        log = _event_log(folder / "events")
        rows: dict[str, int] = json.loads((folder / "rows.json").read_text())
        names = {"left": left, "right": right}
        ingested = {name: [item.records for item in _files(loaded.lake, topic)] for name, topic in names.items()}
        return Ran(stages_of(log), rows, ingested, _staged(loaded.lake))

    return run


def _event_log(folder: Path) -> Path:
    """The log of Spark's events. The JVM completes the log when the command has ended."""
    deadline = time.monotonic() + 30
    while not (found := [item for item in folder.iterdir() if item.suffix != ".inprogress"]):
        assert time.monotonic() < deadline, list(folder.iterdir())
        time.sleep(0.1)
    (log,) = found
    return log


def _fill(pipeline: Pipeline, topic: str) -> None:
    """The topic, if it is not there yet: neighbours in time lie in different partitions."""
    if topic_states(pipeline.kafka, [topic]):
        return
    create_topic(pipeline.kafka, topic, PARTITIONS, 1, {"retention.ms": "-1"})
    assert pipeline.registry is not None
    number = Registry(pipeline.registry).register(f"{topic}-value", json.dumps(ORDER))
    values = make_encoder("avro", json.dumps(ORDER), number).encode(orders(np.arange(RECORDS))).payloads.to_pylist()
    producer = Producer({**pipeline.kafka, "linger.ms": "20", "queue.buffering.max.messages": "1000000"})
    for place, value in enumerate(values):
        producer.produce(topic, value, f"k{place}", place % PARTITIONS, timestamp=EPOCH + place)
    assert producer.flush(60) == 0


def _files(lake: str, topic: str) -> list[DataFile]:
    state = open_raw(lake, "Raw", topic)
    assert state is not None
    return raw_files(state)


def _staged(lake: str) -> dict[str, list[Any]]:
    """Each output topic's records, without the topic's name."""
    state = open_staging(lake, "Staging")
    assert state is not None
    found: dict[str, list[Any]] = {}
    for topic in sorted({name for name, _ in state.head.outputs}):
        table = DeltaTable(f"{lake}/Staging").to_pyarrow_table(
            filters=[("topic", "=", topic)], columns=["kafka", f"key:{topic}", f"value:{topic}"]
        )
        rows = [(row["kafka"]["offset"], *list(row.values())[1:]) for row in table.to_pylist()]
        found[topic.split(".")[1].split("-")[0]] = sorted(rows, key=lambda row: row[0])
    return found


@pytest.mark.parametrize("cores", TASKS)
def test_no_task_handles_much_more_than_its_share(ran: Callable[[int], Ran], cores: int, record_property: Any) -> None:
    title = (
        f"table: Spark standalone, {cores} tasks at once, {2 * RECORDS} records: what the tasks of each stage handle"
    )
    record_property(title, "#|stage|tasks|executors|records|largest task|times its share")
    one = ran(cores)
    uneven: list[str] = []
    for number, stage in enumerate(one.stages):
        if stage.total <= SMALL:
            continue
        times = stage.largest * cores / stage.total
        cells = (f"{number:02}", stage.name, len(stage.tasks), len(stage.executors), stage.total, stage.largest)
        record_property(title, "|".join(map(str, (*cells, f"{times:.2f}"))))
        if times > 2:
            uneven.append(f"{stage}")
    # Spark's event log does not count the records of ingest and publish. The files do: a task writes one file.
    for topic, sizes in one.ingested.items():
        times = max(sizes) * cores / sum(sizes)
        record_property(title, f"99|ingest of {topic}|{len(sizes)}||{sum(sizes)}|{max(sizes)}|{times:.2f}")
        assert sum(sizes) == RECORDS
        assert times <= 2
    assert not uneven
    assert len({name for stage in one.stages for name in stage.executors}) == min(cores, 4)
    assert sum(stage.name.startswith("publish.") for stage in one.stages) == 2


@pytest.mark.parametrize("cores", TASKS)
def test_few_rows_pass_between_driver_and_tasks(ran: Callable[[int], Ran], cores: int, record_property: Any) -> None:
    for place, count in ran(cores).rows.items():
        record_property("table: Rows between the driver and Spark's tasks", f"{cores} tasks|{place}|{count}")
    assert sum(ran(cores).rows.values()) <= SMALL


def test_the_outputs_and_their_numbers_are_the_same(ran: Callable[[int], Ran]) -> None:
    first = ran(TASKS[0]).staged
    assert {name: len(rows) for name, rows in first.items()} == {"joined": RECORDS // 2, "single": RECORDS // 5}
    assert [rows[0] for rows in first["joined"]] == list(range(RECORDS // 2))
    for cores in TASKS[1:]:
        assert ran(cores).staged == first


def test_the_cluster_listens_on_loopback_and_shows_no_secret(cluster: Standalone) -> None:
    processes = [each for server in cluster.servers for each in family(server)]
    assert {address for address, _ in listening(processes)} <= {"127.0.0.1", "::ffff:127.0.0.1"}
    assert not any(cluster.secret in word for word in arguments(processes))
