"""Any interleaving of the three steps, with writers that collide and steps that break in the middle: exactly once.

Hypothesis chooses what happens; the model follows each ETL batch that was committed. At the end all that is left is done,
and outputs, account and checks must agree with the model.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from zync_assets.errors import CommitConflict, EtlError, LakeError
from zync_assets.etl import positions
from zync_assets.etl.commit import commit_staging
from zync_assets.etl.plan import plan_etl, read_raw, transform
from zync_assets.ingest.commit import commit_raw
from zync_assets.ingest.plan import plan_ingest, read_input
from zync_assets.kafka.topics import topic_states
from zync_assets.lake import raw, staging
from zync_assets.local.services import Services
from zync_assets.publish import commit as publishing
from zync_assets.publish.commit import publish
from zync_assets.publish.plan import plan_publish, read_staging
from zync_assets_tests.model import Model, Record
from zync_assets_tests.shop import Shop, changes, make_shop
from zync_assets_tests.test_chain import assert_equals_model

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MOST_PARTITIONS = 3


@contextmanager
def breaking(module: Any, name: str, *, after: bool = False) -> Iterator[None]:
    """A function that fails as if the process had been killed there: before its work, or after it."""
    real = getattr(module, name)

    def broken(*args: Any, **named: Any) -> None:
        if after:
            real(*args, **named)
        raise LakeError("broken on purpose")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(LakeError, match="on purpose"):
        patch.setattr(module, name, broken)
        yield


class Steps(RuleBasedStateMachine):
    services: Services
    spark: SparkSession
    folders: Iterator[Path]

    @initialize(count=st.sampled_from([1, 3]))
    def begin(self, count: int) -> None:
        folder = next(self.folders)
        folder.mkdir()
        self.shop: Shop = make_shop(self.services, folder, folder.name, partitions=(1, 2), settle="0.2", count=count)
        self.model: Model = self.shop.model()
        self.orders = 0
        self.ingested: dict[tuple[str, int], int] = {}
        self.seen: dict[tuple[str, int], int] = {}

    @rule(count=st.integers(1, 12))
    def produce(self, count: int) -> None:
        upcoming = range(self.orders, self.orders + count)
        self.orders += count
        self.shop.produce(list(changes(self.shop, upcoming, seed=self.orders)))

    @precondition(lambda self: len(self.shop.partitions(self.shop.orders)) < MOST_PARTITIONS)
    @rule()
    def add_a_partition(self) -> None:
        topic = self.shop.orders
        count = len(self.shop.partitions(topic)) + 1
        admin = AdminClient({"bootstrap.servers": self.shop.servers})
        for future in admin.create_partitions([NewPartitions(topic, count)]).values():
            future.result(10)
        give_up = time.monotonic() + 20
        while len(topic_states(self.shop.pipeline.kafka, [topic])[topic].partitions) < count:
            assert time.monotonic() < give_up
            time.sleep(0.02)
        self.shop.sent[topic, count - 1] = []

    @rule(left=st.booleans(), how=st.sampled_from(["once", "twice", "broken", "broken after"]))
    def ingest(self, left: bool, how: str) -> None:
        pipeline, topic = self.shop.pipeline, self.shop.orders if left else self.shop.status
        plans = [plan_ingest(pipeline, topic) for _ in range(2)]
        if plans[0].nothing_to_do:
            return
        batches = [read_input(self.spark, pipeline, plan) for plan in plans]
        if how.startswith("broken"):
            with breaking(raw, "commit_advance", after=how == "broken after"):
                commit_raw(pipeline, batches[0])
        if how != "broken":
            self.ingested |= {place: len(log) for place, log in self.shop.sent.items() if place[0] == topic}
        if how in ("once", "twice"):
            commit_raw(pipeline, batches[0])
        if how == "twice":
            with pytest.raises(CommitConflict):
                commit_raw(pipeline, batches[1])

    @rule(how=st.sampled_from(["once", "twice", "broken", "broken after"]), one_task=st.booleans())
    def etl(self, how: str, one_task: bool) -> None:
        """``one_task``: as small batches are made, or else as large ones are."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(positions, "SMALL", positions.SMALL if one_task else 0)
            self._etl(how)

    def _etl(self, how: str) -> None:
        pipeline = self.shop.pipeline
        plans = [plan_etl(pipeline, "Staging") for _ in range(2)]
        new = [
            record
            for place, end in self.ingested.items()
            for record in self.shop.sent[place][self.seen.get(place, 0) : end]
        ]
        assert plans[0].nothing_to_do == (not new)
        if plans[0].nothing_to_do:
            return
        batches = [
            transform(
                self.spark,
                plan,
                {topic: read_raw(self.spark, pipeline, plan, topic) for topic in plan.ranges},
            )
            for plan in plans
        ]
        if self.is_too_early(new):
            with pytest.raises(EtlError, match="NULL has no type"):
                commit_staging(pipeline, batches[0])
            return
        if how.startswith("broken"):
            with breaking(staging, "commit_batch", after=how == "broken after"):
                commit_staging(pipeline, batches[0])
        if how != "broken":
            self.model.batch(new)
            self.seen = dict(self.ingested)
        if how in ("once", "twice"):
            commit_staging(pipeline, batches[0])
        if how == "twice":
            with pytest.raises(CommitConflict):
                commit_staging(pipeline, batches[1])

    def is_too_early(self, new: Sequence[Record]) -> bool:
        """A record of erase-item is there, and not yet the topic by which the rule beside it knows the item's type."""
        erased = any(
            record.topic == self.shop.orders
            and isinstance(record.value, dict)
            and record.value["op"] == "u"
            and record.value["after"]["item"] is None
            for record in new
        )
        status = raw.open_raw(self.shop.pipeline.lake, "Raw", self.shop.status)
        return erased and (status is None or "value" not in status.schema.names)

    @rule(audit=st.booleans(), how=st.sampled_from(["once", "broken", "broken after"]))
    def publish(self, audit: bool, how: str) -> None:
        pipeline, topic = self.shop.pipeline, self.shop.audit if audit else self.shop.new
        plan = plan_publish(pipeline, topic)
        if plan.nothing_to_do:
            return
        batch = read_staging(self.spark, plan)
        if how == "once" or plan.lag == 0:
            publish(pipeline, batch)
            return
        with breaking(publishing, "run_tasks", after=how == "broken after"):
            publish(pipeline, batch)

    def teardown(self) -> None:
        if not hasattr(self, "shop"):
            return
        self.produce(1)
        for left in (True, False):
            self.ingest(left, "once")
        self._etl("once")
        for audit in (True, False):
            self.publish(audit, "once")
        assert_equals_model(self.shop, self.model)


@pytest.mark.parametrize(
    ("examples", "steps"),
    [pytest.param(1, 12, id="a few"), pytest.param(40, 40, id="many", marks=pytest.mark.slow)],
)
@pytest.mark.timeout(1800)
def test_any_interleaving_is_exactly_once(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, examples: int, steps: int
) -> None:
    Steps.services, Steps.spark = services, spark
    Steps.folders = (tmp_path / f"{unique}-{number}" for number in itertools.count())
    run_state_machine_as_test(
        Steps,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
