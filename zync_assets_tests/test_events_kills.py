"""Groups, expiry, several outputs and merged changes in topics with three partitions: the real command, killed and run again.

Each case dies at one crash point after another (as in ``test_crashes``) with records that expire, and goes on. The result is that
of the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zync_assets.local.services import Services
from zync_assets_tests.event_world import SECONDS, EventWorld, assert_equals_model, event_world
from zync_assets_tests.mini import die, publish, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AT_FIRST = ("etl:table-created", "publish:topic-created")
"""The points of the first batch."""
IN_ETL = (
    "etl:outputs-written",
    "etl:ledger-written",
    "etl:ledger-compacted",
    "etl:head-written",
    "etl:committed",
)
"""The points of a batch that lets records of an earlier batch expire: until the last one, nothing is committed."""
IN_PUBLISH = (
    "publish:window-announced",
    "publish:acknowledged",
    "publish:window-closed",
    "publish:produced@2",
    "publish:verified",
)
"""The points of a publisher. Each publisher begins with the records that the killed publisher before it left. The last publisher
verifies such records, and sends none."""
ACTIONS = [("emit", "drop"), ("drop", "quarantine"), ("quarantine", "emit")]
"""The treatment of expired records: of the group, and of the pairs."""
RUN = ("run", "--until-idle")


def die_at(world: EventWorld, *points: str) -> None:
    """Run the command once for each point. The command dies at its point."""
    for point in points:
        die(world.it.pipeline, point, *RUN)


def finish(world: EventWorld) -> None:
    """Run the command to its end: the result is that of the model."""
    run(world.it.pipeline, *RUN)
    assert_equals_model(world)


@pytest.fixture(params=ACTIONS, ids="-".join)
def world(
    request: pytest.FixtureRequest, services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> EventWorld:
    return event_world(services, spark, tmp_path, unique, *request.param)


def begin(world: EventWorld) -> None:
    """A first batch is transformed and published in this process."""
    world.send_batch(1, 0, 60)
    assert world.it.step() is not None
    publish(world.it.pipeline)
    assert set(world.model.classes.values()) >= {"pending", "done"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_first_run_that_died_goes_on(world: EventWorld) -> None:
    world.send_batch(2, SECONDS, 60)
    die_at(world, *AT_FIRST)
    finish(world)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_batch_that_died_at_each_point_in_turn_goes_on(world: EventWorld) -> None:
    begin(world)
    world.send_batch(2, SECONDS, 60)
    die_at(world, *IN_ETL)
    finish(world)
    assert "expired" in world.model.classes.values()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_publisher_that_died_at_each_point_in_turn_goes_on(world: EventWorld) -> None:
    begin(world)
    for number, point in enumerate(IN_PUBLISH, 1):
        if point != IN_PUBLISH[-1]:
            world.send_batch(1 + number, number * SECONDS, 40)
        die_at(world, point)
    finish(world)
