"""Any history of events is the model's: groups, expiry, several outputs, merged changes and partitions, in one pipeline.

Hypothesis chooses the records, the cuts of batches, which side comes late, commits that break, restarts, and looks at expired
records again. The model follows each batch that was committed. A batch costs Spark four seconds of planning, however few its
records are: histories therefore have few batches of many records, and most batches are made in one task, which costs half.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from zync_assets.etl import ledger, positions
from zync_assets.etl.retries import NOTHING, Retry
from zync_assets.lake.parquet_rows import RecentCache
from zync_assets.local.services import Services
from zync_assets_tests.event_world import ACTIONS, OUTPUTS, SECONDS, EventWorld, assert_equals_model, event_world
from zync_assets_tests.mini import failing_commit
from zync_assets_tests.model import GARBAGE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OPS = ("group", "group", "group", "pair", "pair", "join", "join", "fan", "whole", "part", "gone", "none")
VALUES = st.fixed_dictionaries(
    {
        "op": st.sampled_from(OPS),
        "id": st.sampled_from([1, 1, 2, 3, 4, None]),
        "n": st.sampled_from([1, 2, 3, 4, None]),
        "items": st.none() | st.lists(st.sampled_from(["a", "b", "x", None]), max_size=3),
    }
)
RECORDS = st.lists(
    st.tuples(
        st.booleans(),
        st.integers(0, 1),
        st.sampled_from([0, 0, 1, 10, 10, 40, 100]),
        st.sampled_from([0, 0, 0, 0, 0, 25, 90]),
        st.sampled_from(["a", "b", "c", "d", None]),
        st.one_of(VALUES, VALUES, VALUES, VALUES, VALUES, VALUES, VALUES, st.none(), st.just(GARBAGE)),
    ),
    min_size=4,
    max_size=24,
)
"""Left or right, partition, seconds since the record before, seconds that the timestamp is behind, key, value."""


Sent = tuple[bool, int, int, int, str | None, Any]


@dataclass(frozen=True)
class Step:
    """Records are sent, and one batch is made of them. ``topics``: which of the topics are ingested; ``how``: whether the commit
    breaks; ``one_task``: as small batches are made, or else as large ones are; ``again``: expired records are matched again;
    ``restart``: another process does it, which remembers nothing; ``publish``: the outputs that are published."""

    records: Sequence[Sent]
    topics: tuple[bool, ...]
    how: str
    one_task: bool
    again: bool
    restart: bool
    publish: Sequence[str]


STEPS = st.builds(
    Step,
    RECORDS,
    st.sampled_from([(True, False), (True, False), (True,), (False,)]),
    st.sampled_from(["once", "once", "once", "broken", "broken after"]),
    st.sampled_from([True, True, False]),
    st.sampled_from([False, False, True]),
    st.booleans(),
    st.lists(st.sampled_from(OUTPUTS), max_size=2),
)


@dataclass
class History:
    world: EventWorld
    now: int = 0
    ingested: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    seen: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])

    def go(self, step: Step) -> None:
        it = self.world.it
        self.produce(step.records)
        for left in step.topics:
            self.ingest(it.left if left else it.right)
        if step.restart:
            for module, name in ((ledger, "_files"), (ledger, "_vain")):
                setattr(module, name, RecentCache[Any, Any](1000))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(positions, "SMALL", positions.SMALL if step.one_task else 0)
            self.etl(step.how, again=step.again)
        for name in step.publish if self.seen else ():
            it.publish(f"{it.out}.{name}")

    def produce(self, records: Sequence[Sent]) -> None:
        it = self.world.it
        for left, partition, pause, back, key, value in records:
            self.now += pause
            self.world.send(it.left if left else it.right, partition, max(0, self.now - back), key, value)

    def ingest(self, topic: str) -> None:
        self.world.it.ingest(topic)
        self.ingested |= {place: len(log) for place, log in self.world.sent.items() if place[0] == topic}

    def etl(self, how: str, *, again: bool) -> None:
        it, model, sent = self.world.it, self.world.model, self.world.sent
        expired = [place for place, name in model.classes.items() if name == "expired"] if again else []
        new = [record for place, end in self.ingested.items() for record in sent[place][self.seen.get(place, 0) : end]]
        retry = Retry(expired=True) if expired else NOTHING
        if how == "once":
            assert (it.etl(retry=retry) is None) == (not new and not expired)
        else:
            with failing_commit(after=how == "broken after"):
                it.etl(retry=retry)
        if how != "broken":
            model.batch([*(sent[topic, partition][offset] for topic, partition, offset in expired), *new])
            self.seen = dict(self.ingested)


@pytest.mark.slow
def test_a_history_of_events_is_that_of_the_model(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    world = event_world(services, spark, tmp_path, unique, "emit", "quarantine")
    for number in range(2):
        world.send_batch(number, SECONDS * number, 60)
        assert world.it.step() is not None
    for name in OUTPUTS:
        world.it.publish(f"{world.it.out}.{name}")
    assert_equals_model(world)
    assert set(world.model.classes.values()) == {"done", "pending", "unmatched", "dropped", "expired", "quarantined"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", range(3))
def test_any_history_of_events_is_that_of_the_model(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, number: int
) -> None:
    """Each test plays three histories. Hypothesis makes the first history as simple as it can."""
    folders = (tmp_path / f"{unique}-{at}" for at in itertools.count())

    @seed(number)
    @settings(
        max_examples=3,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.sampled_from(ACTIONS), st.sampled_from(ACTIONS), st.lists(STEPS, min_size=4, max_size=8))
    def check(group: str, pair: str, each: list[Step]) -> None:
        folder = next(folders)
        folder.mkdir()
        history = History(event_world(services, spark, folder, folder.name, group, pair))
        # A rule begins when each of its topics has a schema.
        whole = {"op": "none", "id": None, "n": None, "items": None}
        begin = Step(
            [(left, 0, 0, 0, "first", whole) for left in (True, False)], (True, False), "once", True, False, False, ()
        )
        for step in [begin, *each, replace(begin, records=())]:
            history.go(step)
        for name in OUTPUTS:
            history.world.it.publish(f"{history.world.it.out}.{name}")
        assert_equals_model(history.world)

    check()
