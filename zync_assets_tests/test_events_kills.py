"""Groups, expiry, several outputs and merged changes in topics with three partitions: the real command, killed and run again.

Each case dies at one crash point (as in ``test_crashes``) with records that expire, and goes on. The result is that of the model.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zync_assets.local.services import Services
from zync_assets.runner import publish_all
from zync_assets_tests.event_world import OUTPUTS, SECONDS, EventWorld, assert_equals_model, event_world

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AT_FIRST = ("etl:table-created", "publish:topic-created")
"""The points of the first batch."""
LATER = (
    "etl:outputs-written",
    "etl:ledger-written",
    "etl:ledger-folded",
    "etl:head-written",
    "etl:committed",
    "publish:window-announced",
    "publish:produced",
    "publish:acknowledged",
    "publish:window-closed",
    "publish:verified",
)
"""The points of a batch that lets records of an earlier batch expire."""
RUN = ("run", "--until-idle")


def run(world: EventWorld, folder: Path, armed: str = "") -> int:
    """The exit code of the command. ``armed``: the point at which it is to die."""
    script = "from zync_assets.cli.main import main; main()"
    name, *options = RUN
    arguments = [sys.executable, "-c", script, name, str(world.it.pipeline.path), *options]
    environment = {**os.environ, "ZYNC_CRASH": armed}
    with (folder / "zync.log").open("wb") as log:
        done = subprocess.run(arguments, stdout=log, stderr=log, env=environment, timeout=280, check=False)
    return done.returncode


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("action", ["quarantine", "emit"])
@pytest.mark.parametrize("point", [*AT_FIRST, *LATER])
def test_a_run_that_died_goes_on(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, point: str, action: str
) -> None:
    world = event_world(services, spark, tmp_path, unique, action, action)
    if point in LATER:
        world.send_batch(1, 0, 60)
        assert world.it.step() is not None
        list(publish_all(world.it.pipeline, lambda: spark, [f"{world.it.out}.{name}" for name in OUTPUTS]))
        assert set(world.model.classes.values()) >= {"pending", "done"}
    world.send_batch(2, SECONDS, 60)
    for armed in ("publish:produced@2", point) if point == "publish:verified" else (point,):
        assert run(world, tmp_path, armed) == -signal.SIGKILL, (tmp_path / "zync.log").read_text()
    assert run(world, tmp_path) == 0, (tmp_path / "zync.log").read_text()
    assert_equals_model(world)
    if point in LATER and action == "quarantine":
        assert "expired" in world.model.classes.values()
