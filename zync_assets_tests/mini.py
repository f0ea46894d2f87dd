"""A small pipeline of a test: the file, topics and records, the steps and processes, and the results.

``Mini`` is a pipeline with two input topics. Data and rules of their own have ``shop`` (changes of a CDC tool),
``event_world`` and ``view_world`` (beside a model), ``checks.chain`` (a lake to damage) and ``assets.rig`` (in Dagster).
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import fastavro
import psutil
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from deltalake import DeltaTable

from zync_assets import pipeline_file
from zync_assets.errors import LakeError
from zync_assets.etl.plan import EtlCommit
from zync_assets.etl.retries import NOTHING, Retry
from zync_assets.ingest.commit import RawCommit, commit_raw
from zync_assets.ingest.plan import plan_ingest, read_input
from zync_assets.kafka.registry import Registry
from zync_assets.kafka.topics import create_topic, topic_state
from zync_assets.lake import staging, tables
from zync_assets.lake.head import Head
from zync_assets.lake.log import LakeTable
from zync_assets.lake.raw import open_raw
from zync_assets.lake.staging import open_staging, read_ledger
from zync_assets.local.services import Services
from zync_assets.pipeline import Pipeline
from zync_assets.publish import commit as publish_step
from zync_assets.publish.commit import PublishCommit
from zync_assets.publish.plan import plan_publish, read_staging
from zync_assets.runner import commit_etl, etl_all, ingest_all, publish_all, read_etl
from zync_assets.spark.session import spark_session
from zync_assets_tests.services import SPARK

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HEADER = """
name: $name
kafka: {bootstrap.servers: "$servers"}
registry: {url: "$registry", retries.wait.ms: 10}
lake: $lake
settle: $settle
spark: $spark
"""
"""The tests have one registry server. An id that it does not know now comes through no other server, and is not waited for."""
BOTH = """
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: json, schema: "op string, id bigint, v string"}
  - {topic: $right, pool: Raw, key-format: string, value-format: json, schema: "op string, id bigint, v string"}
outputs:
  - {topic: $out, pool: Staging, key-format: string, value-format: json, create: {replication-factor: 1}}
"""
JOIN = """
transforms:
  - name: join
    type: denorm
    left: $left
    right: $right
    join-on: left.value.id = right.value.id
    out: $out
    key: left.key
    value: {id: left.value.id, l: left.value.v, r: right.value.v}
"""


@dataclass
class Mini:
    pipeline: Pipeline
    spark: SparkSession
    left: str
    right: str
    out: str

    @property
    def topics(self) -> tuple[str, str, str]:
        return self.left, self.right, self.out

    @property
    def lake(self) -> str:
        return self.pipeline.lake

    def send(
        self,
        topic: str,
        *records: Any,
        partition: int = 0,
        times: Sequence[int] | None = None,
        headers: Sequence[tuple[str, bytes | None]] | None = None,
    ) -> None:
        send(self.pipeline, topic, records, partition, times=times, headers=headers)

    def ingest(self, *topics: str) -> dict[str, RawCommit]:
        done: dict[str, RawCommit] = {}
        for topic in topics or [item.topic for item in self.pipeline.inputs]:
            plan = plan_ingest(self.pipeline, topic)
            if not plan.nothing_to_do:
                done[topic] = commit_raw(self.pipeline, read_input(self.spark, self.pipeline, plan))
        return done

    def etl(self, pool: str = "Staging", retry: Retry = NOTHING) -> EtlCommit | None:
        """One ETL batch; None if there is nothing to do."""
        return commit_etl(self.pipeline, partial(read_etl, self.pipeline, lambda: self.spark, pool, retry))

    def step(self) -> EtlCommit | None:
        self.ingest()
        return self.etl()

    def publish(self, topic: str | None = None) -> PublishCommit:
        plan = plan_publish(self.pipeline, topic or self.out)
        return publish_step.publish(self.pipeline, read_staging(self.spark, plan))

    def published(self, topic: str) -> list[bytes]:
        """Publish an output topic; the values of all its records."""
        self.publish(topic)
        return [value or b"" for _, _, value in read_topic(self.pipeline, topic)]

    def raw(self, topic: str) -> list[dict[str, Any]]:
        """Raw records as delta-rs itself reads them, by partition and offset."""
        rows = DeltaTable(f"{self.lake}/Raw/{topic}").to_pyarrow_table().to_pylist()
        return sorted(rows, key=lambda row: (row["kafka"]["partition"], row["kafka"]["offset"]))

    def next(self, topic: str) -> Mapping[int, int]:
        state = open_raw(self.lake, "Raw", topic)
        return state.next if state else {}

    def staged(self, topic: str | None = None) -> list[dict[str, Any]]:
        """Output records as delta-rs itself reads them, by offset, with columns named ``key`` and ``value``."""
        topic = topic or self.out
        if open_staging(self.lake, "Staging") is None:
            return []
        table = DeltaTable(f"{self.lake}/Staging").to_pyarrow_table(filters=[("topic", "=", topic)])
        rows = [
            {"key": row.get(f"key:{topic}"), "value": row.get(f"value:{topic}"), **row} for row in table.to_pylist()
        ]
        rows.sort(key=lambda row: row["kafka"]["offset"])
        return rows

    def values(self, topic: str | None = None) -> list[Any]:
        return [row["value"] for row in self.staged(topic)]

    @property
    def head(self) -> Head:
        state = open_staging(self.lake, "Staging")
        assert state is not None
        return state.head

    def classes(self, topic: str) -> dict[str, int]:
        """Class → records of a topic that are in it."""
        found = Counter[str]()
        for (name, _, kind), count in self.head.counts.items():
            if name == topic:
                found[kind] += count
        return {kind: count for kind, count in found.items() if count}

    def ledger(self, kind: str) -> list[dict[str, Any]]:
        state = open_staging(self.lake, "Staging")
        assert state is not None
        return read_ledger(state, [kind]).to_pylist()

    def edited(self, text: str) -> Mini:
        """The same topics and lake with another text for the file, placeholders as in ``mini``."""
        header = self.pipeline.path.read_text().splitlines(keepends=True)[: HEADER.count("\n")]
        self.pipeline.path.write_text("".join(header) + _filled(text, *self.topics))
        return self.loaded()

    def changed(self, old: str, new: str) -> Mini:
        """The same topics and lake with a change in the text of the file."""
        path = self.pipeline.path
        path.write_text(path.read_text().replace(old, new))
        return self.loaded()

    def loaded(self) -> Mini:
        """The same with the file as it is now."""
        return replace(self, pipeline=pipeline_file.load(self.pipeline.path))


def make_pipeline(
    services: Services,
    folder: Path,
    text: str,
    *,
    name: str = "mini",
    lake: str | None = None,
    settle: str = "1",
    spark: str = json.dumps(SPARK),
    partitions: int | Sequence[int] = (),
) -> Pipeline:
    """The pipeline of a file in ``folder`` that has HEADER and then ``text``.

    ``partitions``: of the inputs' topics, which are created; default: the topics are there or come later. ``spark``: as in
    a file.
    """
    header = Template(HEADER).substitute(
        name=name,
        servers=services.bootstrap_servers,
        registry=services.registry_url,
        lake=lake or folder / "lake",
        settle=settle,
        spark=spark,
    )
    path = folder / f"{name}.yaml"
    path.write_text(header + text)
    pipeline = pipeline_file.load(path)
    counts = [partitions] * len(pipeline.inputs) if isinstance(partitions, int) else partitions
    for item, count in zip(pipeline.inputs, counts, strict=bool(counts)):
        create_topic(pipeline.kafka, item.topic, count, 1, {})
    return pipeline


def send(
    pipeline: Pipeline,
    topic: str,
    records: Sequence[Any],
    partition: int = 0,
    *,
    times: Sequence[int] | None = None,
    headers: Sequence[tuple[str, bytes | None]] | None = None,
) -> None:
    """Produce values, or pairs of a key and a value. A mapping becomes JSON; bytes and None stay as they are.

    ``times``: milliseconds, by default from 2023 on, a millisecond a record.
    """
    producer = Producer({**pipeline.kafka, "linger.ms": 0, "log_level": 0})
    errors: list[object] = []

    def delivery(error: object, _: object) -> None:
        if error is not None:
            errors.append(error)

    for place, record in enumerate(records):
        key, value = record if isinstance(record, tuple) else (f"k{place}", record)
        payload = json.dumps(value) if isinstance(value, Mapping) else value
        time = times[place] if times is not None else 1_700_000_000_000 + place
        more = {} if headers is None else {"headers": list(headers)}
        if len(producer) >= 50_000:
            producer.flush()
        producer.produce(topic, payload, key, partition, timestamp=time, on_delivery=delivery, **more)
    assert producer.flush(30) == 0
    assert not errors


def ingest(pipeline: Pipeline, *topics: str) -> None:
    """Ingest the topics, by default of all inputs, in this process."""
    list(ingest_all(pipeline, partial(_session, pipeline), topics or [item.topic for item in pipeline.inputs]))


def transform(pipeline: Pipeline) -> int:
    """Transform all raw records in this process. Returns the number of batches."""
    return len(list(etl_all(pipeline, partial(_session, pipeline))))


def publish(pipeline: Pipeline) -> None:
    """Publish all outputs, in this process."""
    list(publish_all(pipeline, partial(_session, pipeline), [item.topic for item in pipeline.outputs]))


def run_steps(pipeline: Pipeline) -> None:
    """Ingest, transform and publish all that is there, in this process."""
    ingest(pipeline)
    transform(pipeline)
    publish(pipeline)


def _session(pipeline: Pipeline) -> SparkSession:
    return spark_session(pipeline.spark)


ZYNC = "from zync_assets.cli.main import main; main()"


def log_of(pipeline: Pipeline) -> Path:
    """The log file of the commands. Each command empties the file first."""
    return pipeline.path.with_suffix(".log")


def start(
    pipeline: Pipeline, command: str, *options: str, point: str = "", first: str = "", log: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start ``zync command FILE options`` as a process that leads a session.

    ``point``: the crash point at which the process dies. ``first``: Python code that runs before the command.
    """
    line = [sys.executable, "-c", f"{first}\n{ZYNC}", command, str(pipeline.path), *options]
    with (log or log_of(pipeline)).open("wb") as out:
        environment = {**os.environ, "ZYNC_CRASH": point}
        return subprocess.Popen(line, stdout=out, stderr=out, env=environment, start_new_session=True)


def run(pipeline: Pipeline, command: str, *options: str, first: str = "", seconds: int = 280) -> str:
    """What the command says. It must end well."""
    code = _ended(start(pipeline, command, *options, first=first), seconds)
    said = log_of(pipeline).read_text()
    assert code == 0, said
    return said


def die(pipeline: Pipeline, point: str, command: str, *options: str, first: str = "", seconds: int = 280) -> str:
    """Run the command, which must die at the crash point. Returns what the command said."""
    code = _ended(start(pipeline, command, *options, point=point, first=first), seconds)
    said = log_of(pipeline).read_text()
    assert code == -signal.SIGKILL, (point, said)
    assert f"killed at {point.partition('@')[0]}" in said, said
    return said


def _ended(process: subprocess.Popen[bytes], seconds: int) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        kill_family(process)
        raise


def kill(process: subprocess.Popen[bytes], log: Path) -> None:
    """Kill the leader of a session, with its JVM and workers. The process must not have ended."""
    assert kill_family(process) == -signal.SIGKILL, f"it ended before the kill: {log.read_text()}"


def kill_family(process: subprocess.Popen[bytes]) -> int:
    """Kill the leader of a session, with its JVM and workers, unless it has ended. Returns the exit code."""
    # Spark puts its Python workers into a process group of their own.
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in family:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    code = process.wait(30)
    psutil.wait_procs(family, 30)
    return code


def openings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """The tables that this process opens from now on: folder in the lake, and version."""
    found: list[tuple[str, int | None]] = []
    open_table = tables.open_table

    def noted(uri: str) -> LakeTable | None:
        opened = open_table(uri)
        found.append((uri.partition("/lake/")[2], None if opened is None else opened.version))
        return opened

    monkeypatch.setattr(tables, "open_table", noted)
    return found


def read_topic(pipeline: Pipeline, topic: str, partition: int = 0) -> list[tuple[int, bytes | None, bytes | None]]:
    """(offset, key, value) of all records in a partition."""
    consumer = Consumer({**pipeline.kafka, "group.id": "tests", "enable.auto.commit": False, "log_level": 0})
    found: list[tuple[int, bytes | None, bytes | None]] = []
    try:
        low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)
        consumer.assign([TopicPartition(topic, partition, low)])
        while low < high and (not found or found[-1][0] < high - 1):
            # No more than is there: a consume of more waits out its time.
            for message in consumer.consume(min(10_000, high - low - len(found)), timeout=1):
                assert message.error() is None
                found.append((message.offset() or 0, message.key(), message.value()))
    finally:
        consumer.close()
    return found


def published(pipeline: Pipeline, topic: str) -> dict[int, list[tuple[bytes | None, bytes | None]]]:
    """Partition → key and value of its records, in order; their offsets are 0, 1, 2 …"""
    found: dict[int, list[tuple[bytes | None, bytes | None]]] = {}
    for part in topic_state(pipeline.kafka, topic).partitions:
        records = read_topic(pipeline, topic, part.partition)
        assert [offset for offset, _, _ in records] == list(range(part.end))
        found[part.partition] = [(key, value) for _, key, value in records]
    return found


def framed(schema_id: int, schema: Mapping[str, Any], value: Any) -> bytes:
    """A datum in Confluent's wire format: a zero byte, the schema's id, the Avro binary encoding."""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(dict(schema)), value)
    return b"\0" + schema_id.to_bytes(4, "big") + out.getvalue()


def decoded(registry: Registry, payload: bytes | None) -> Any:
    """A datum in Confluent's wire format, by fastavro and with the writer's schema alone; None for None."""
    if payload is None:
        return None
    assert payload[0] == 0
    number = int.from_bytes(payload[1:5], "big")
    schema = _writers.get(number)
    if schema is None:
        schema = _writers[number] = fastavro.parse_schema(json.loads(registry.schema(number)))
    return fastavro.schemaless_reader(io.BytesIO(payload[5:]), schema, None)


_writers: dict[int, Any] = {}


def mini(
    services: Services,
    spark: SparkSession,
    folder: Path,
    prefix: str,
    text: str,
    partitions: int = 1,
) -> Mini:
    """Topics ``$left`` and ``$right``, and a pipeline whose text follows HEADER. ``$out`` is left to be created."""
    left, right, out = (f"{prefix}.{name}" for name in ("left.rows", "right.rows", "out.rows"))
    pipeline = make_pipeline(services, folder, _filled(text, left, right, out))
    for topic in (left, right):
        create_topic(pipeline.kafka, topic, partitions, 1, {})
    return Mini(pipeline, spark, left, right, out)


def mini_of(pipeline: Pipeline, spark: SparkSession) -> Mini:
    """A pipeline whose first inputs and output are left, right and out."""
    left, *others = (item.topic for item in pipeline.inputs)
    return Mini(pipeline, spark, left, others[0] if others else left, pipeline.outputs[0].topic)


def _filled(text: str, left: str, right: str, out: str) -> str:
    return Template(text).substitute(left=left, right=right, out=out)


def row(id: int | None, v: str = "", op: str = "c") -> dict[str, Any]:
    return {"op": op, "id": id, "v": v}


@contextmanager
def failing_commit(*, after: bool) -> Generator[None]:
    """Every commit of a staging pool fails as if the process had been killed, before or after the commit. Not every batch has
    a commit."""
    real = staging.commit_batch

    def fail(*args: Any, **named: Any) -> Any:
        if after:
            real(*args, **named)
        raise LakeError("broken on purpose")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "commit_batch", fail)
        try:
            yield
        except LakeError as error:
            assert "on purpose" in str(error)
