"""A small pipeline with topics of its own on the test run's broker, and a Dagster instance to run it in.

Orders and payments are plain JSON with a string key; a sale needs both. Notes are strings that no rule takes. Topic names
have dots, which the names of Dagster's ops and jobs must spell out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from dagster import AssetKey, DagsterInstance, Definitions, ExecuteInProcessResult

from zync_assets.assets.build import build_definitions
from zync_assets.assets.names import Names
from zync_assets.local.services import Services
from zync_assets.pipeline import Pipeline
from zync_assets_tests import mini

FILE = """
inputs:
  - {topic: $prefix.orders, pool: Raw, key-format: string, value-format: json, value-schema: "id BIGINT, item STRING"}
  - {topic: $prefix.payments, pool: Raw, key-format: string, value-format: json, value-schema: "id BIGINT, paid BIGINT"}
  - {topic: $prefix.notes, pool: Raw, format: string}
outputs:
  - {topic: $prefix.sales, pool: Staging, key-format: string, value-format: json, create: {replication-factor: 1}}
  - {topic: $prefix.refunds, pool: Staging, key-format: string, value-format: json, create: {replication-factor: 1}}
transforms:
  - name: sale
    type: denorm
    where: {left: value.id > 0, right: value.paid >= 0}
    left: $prefix.orders
    right: $prefix.payments
    join-on: left.value.id = right.value.id
    out: $prefix.sales
    key: left.key
    value: {id: left.value.id, item: left.value.item, paid: right.value.paid}
  - name: refund
    type: stateless
    where: value.paid < 0
    in: $prefix.payments
    out: $prefix.refunds
    key: in.key
    value: {id: in.value.id}
"""

OPEN = "0:0-999999"


@dataclass(frozen=True)
class Rig:
    """A pipeline, its definitions and an instance."""

    pipeline: Pipeline
    instance: DagsterInstance
    definitions: Definitions

    @property
    def names(self) -> Names:
        return Names(self.pipeline)

    @property
    def orders(self) -> str:
        return self.pipeline.inputs[0].topic

    @property
    def payments(self) -> str:
        return self.pipeline.inputs[1].topic

    @property
    def notes(self) -> str:
        return self.pipeline.inputs[2].topic

    @property
    def sales(self) -> str:
        return self.pipeline.outputs[0].topic

    def send(self, topic: str, rows: Sequence[Mapping[str, Any]], partition: int = 0) -> None:
        send(self.pipeline, topic, rows, partition)

    def add_keys(self, definition: str, *keys: str) -> None:
        self.instance.add_dynamic_partitions(definition, list(keys))

    def raw_keys(self, topic: str, *keys: str) -> None:
        self.add_keys(self.names.raw_partitions(topic), *keys)

    def run(
        self, job: str, first: str = OPEN, last: str | None = None, *, fails: bool = False
    ) -> ExecuteInProcessResult:
        """Run a job over one range, or over all from one to another."""
        tags = {"dagster/partition": first}
        if last is not None:
            tags = {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last}
        done = self.definitions.resolve_job_def(job).execute_in_process(
            instance=self.instance, tags=tags, raise_on_error=not fails
        )
        assert done.success is not fails
        return done

    def ingest(self, topic: str, first: str = OPEN, last: str | None = None, *, fails: bool = False):
        return self.run(self.names.ingest_job(topic), first, last, fails=fails)

    def stage(self, first: str = OPEN, *, fails: bool = False):
        return self.run(self.names.staging_job("Staging"), first, fails=fails)


def make_pipeline(services: Services, folder: Path, prefix: str, more: str = "", file: str = FILE) -> Pipeline:
    """The pipeline, its two input topics there and empty; orders have two partitions. ``more``: further keys of the file."""
    text = Template(file + more).substitute(prefix=prefix)
    return mini.make_pipeline(services, folder, text, name=prefix, lake="./lake", partitions=(2, 1, 1))


@contextmanager
def make_rig(
    services: Services, folder: Path, prefix: str, *, keys: bool = True, more: str = "", file: str = FILE
) -> Iterator[Rig]:
    """The pipeline in ``folder``, with an instance of its own. With ``keys``, the open ranges have theirs.

    The instance keeps its runs in memory: each run's file of SQLite costs more than the run. On disk they are where a webserver
    or another process looks at them (``test_graph_webserver``, ``test_secrets``, ``test_two_writers``).
    """
    pipeline = make_pipeline(services, folder, prefix, more, file)
    with DagsterInstance.ephemeral(settings={"telemetry": {"enabled": False}}) as instance:
        rig = Rig(pipeline, instance, build_definitions(pipeline))
        if keys:
            rig.raw_keys(rig.orders, OPEN, "1:0-999999")
            rig.raw_keys(rig.payments, OPEN)
            rig.raw_keys(rig.notes, OPEN)
            rig.add_keys(rig.names.staging_partitions("Staging"), OPEN)
        yield rig


def send(pipeline: Pipeline, topic: str, rows: Sequence[Mapping[str, Any]], partition: int = 0) -> None:
    """Produce JSON values, keyed by their id."""
    now = int(time.time() * 1000)
    mini.send(pipeline, topic, [(str(row["id"]), row) for row in rows], partition, times=[now] * len(rows))


def orders(*ids: int) -> list[dict[str, Any]]:
    return [{"id": number, "item": f"item {number}"} for number in ids]


def payments(*ids: int) -> list[dict[str, Any]]:
    return [{"id": number, "paid": 10 * number} for number in ids]


def told(run: ExecuteInProcessResult, key: AssetKey) -> dict[str, dict[str, Any]]:
    """A run's materialisations of an asset: range → metadata."""
    return {
        event.partition or "": {name: value.value for name, value in event.materialization.metadata.items()}
        for event in run.get_asset_materialization_events()
        if event.asset_key == key
    }


def failures(run: ExecuteInProcessResult) -> list[str]:
    """The messages of a run's failed steps."""
    return [
        event.step_failure_data.user_failure_data.description or ""
        for event in run.get_step_failure_events()
        if event.step_failure_data.user_failure_data is not None
    ]
