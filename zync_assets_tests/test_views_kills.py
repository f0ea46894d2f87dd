"""Views whose process is killed with SIGKILL at random moments: nothing is lost, and nothing is done twice."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zync_assets.checks.state_checks import state_equals_raw
from zync_assets.local.services import Services
from zync_assets.pipeline import Pipeline
from zync_assets_tests.mini import kill_family, log_of, run, start
from zync_assets_tests.test_views import some_changes
from zync_assets_tests.view_world import World, make_world

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FOLDS = "from zync_assets.etl.views import state_fold; state_fold.RUNS = 2"


def killed(pipeline: Pipeline, staging: Path, files: int) -> bool:
    """Run to idle, and kill the processes when so many new files are in the staging pool. Whether the kill came before the
    end."""
    before, log = _files(staging), log_of(pipeline)
    process = start(pipeline, "run", "--until-idle", first=FOLDS)
    give_up = time.monotonic() + 240
    while process.poll() is None and len(_files(staging) - before) < files:
        assert time.monotonic() < give_up, log.read_text()
        time.sleep(0.001)
    code = kill_family(process)
    assert code in (0, -signal.SIGKILL), log.read_text()
    return code != 0


def _files(folder: Path) -> set[Path]:
    # Folders come and go while this looks: ``os.walk`` passes over those that are gone.
    return {
        Path(at, name) for at, _, names in os.walk(folder) for name in names if name.endswith((".parquet", ".json"))
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_views_that_are_killed_at_random_moments_end_as_duckdb_says(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    choice = random.Random(11)
    world: World = make_world(services, spark, tmp_path, unique, names=["documents", "customers", "newest"])
    staging, kills = Path(world.it.lake, "Staging"), 0
    for _ in range(8):
        world.send(some_changes(choice, 60))
        kills += killed(world.it.pipeline, staging, choice.randint(1, 24))
    assert kills >= 4
    run(world.it.pipeline, "run", "--until-idle", first=FOLDS)
    # The process ingested all of it: the model takes it too.
    world.ingest()
    world.etl()
    world.check()
    assert state_equals_raw(world.it.pipeline, "Staging", lambda: spark).passed
