"""The way to a small pipeline of a test: its file, its topics, its records and its three steps.

``Mini`` is a pipeline over two JSON topics. ``shop``, ``checks.chain`` and ``assets.rig`` have data and rules of their own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from deltalake import DeltaTable

from zync_assets import pipeline_file
from zync_assets.errors import LakeError
from zync_assets.etl.plan import EtlCommit
from zync_assets.etl.retries import NOTHING, Retry
from zync_assets.ingest.commit import RawCommit, commit_raw
from zync_assets.ingest.plan import plan_ingest, read_input
from zync_assets.kafka.topics import create_topic
from zync_assets.lake import staging, tables
from zync_assets.lake.head import Head
from zync_assets.lake.log import LakeTable
from zync_assets.lake.raw import open_raw
from zync_assets.lake.staging import open_staging, read_ledger
from zync_assets.local.services import Services
from zync_assets.pipeline import Pipeline
from zync_assets.publish.commit import PublishCommit, publish
from zync_assets.publish.plan import plan_publish, read_staging
from zync_assets.runner import commit_etl, etl_all, ingest_all, publish_all, read_etl
from zync_assets.spark.session import spark_session
from zync_assets_tests.services import SPARK

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HEADER = """
name: $name
kafka: {bootstrap.servers: "$servers"}
registry: {url: "$registry"}
lake: $lake
settle: $settle
spark: $spark
"""
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
        return publish(self.pipeline, read_staging(self.spark, self.pipeline, plan))

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
        path = self.pipeline.path
        path.write_text((path.parent / "header").read_text() + _filled(text, *self.topics))
        return Mini(pipeline_file.load(path), self.spark, *self.topics)


def make_pipeline(
    services: Services, folder: Path, text: str, *, name: str = "mini", lake: str | None = None, settle: str = "1"
) -> Pipeline:
    """The pipeline of a file in ``folder`` that has HEADER and then ``text``."""
    header = Template(HEADER).substitute(
        name=name,
        servers=services.bootstrap_servers,
        registry=services.registry_url,
        lake=lake or folder / "lake",
        settle=settle,
        spark=json.dumps(SPARK),
    )
    (folder / "header").write_text(header)
    path = folder / "pipeline.yaml"
    path.write_text(header + text)
    return pipeline_file.load(path)


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


def run_steps(pipeline: Pipeline) -> None:
    """Ingest, transform and publish all that is there, in this process."""

    def session() -> SparkSession:
        return spark_session(pipeline.spark)

    list(ingest_all(pipeline, session, [item.topic for item in pipeline.inputs]))
    list(etl_all(pipeline, session))
    list(publish_all(pipeline, session, [item.topic for item in pipeline.outputs]))


def openings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """The tables that this process opens from now on: folder in the lake, and version."""
    found: list[tuple[str, int | None]] = []
    open_table = tables.open_table

    def noted(uri: str, version: int | None = None) -> LakeTable | None:
        opened = open_table(uri, version)
        found.append((uri.partition("/lake/")[2], None if opened is None else opened.version))
        return opened

    monkeypatch.setattr(tables, "open_table", noted)
    return found


def published(it: Mini, topic: str) -> list[bytes]:
    """Publish an output topic; the values of all its records."""
    reader = Consumer({**it.pipeline.kafka, "group.id": "names", "log_level": 0})
    reader.assign([TopicPartition(topic, 0, 0)])
    found = reader.consume(it.publish(topic).ranges[0].end, 30)
    reader.close()
    return [message.value() or b"" for message in found]


def mini(services: Services, spark: SparkSession, folder: Path, prefix: str, text: str, partitions: int = 1) -> Mini:
    """Topics ``$left`` and ``$right``, and a pipeline whose text follows HEADER. ``$out`` is left to be created."""
    left, right, out = (f"{prefix}.{name}" for name in ("left.rows", "right.rows", "out.rows"))
    pipeline = make_pipeline(services, folder, _filled(text, left, right, out))
    for topic in (left, right):
        create_topic(pipeline.kafka, topic, partitions, 1, {})
    return Mini(pipeline, spark, left, right, out)


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
