"""Writers side by side, ways back, and tables that came anew: nobody is told of damage that is not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zync_assets.errors import CommitConflict
from zync_assets.kafka.topics import topic_states
from zync_assets.lake import staging
from zync_assets.lake.published import commit_published, open_published
from zync_assets.lake.staging import StagingState
from zync_assets.local.services import Services
from zync_assets.steps.ingest import plan_ingest
from zync_assets.steps.publish import plan_publish
from zync_assets_tests.steps.mini import BOTH, Mini, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Make = Callable[..., Mini]

COPY = """
transforms:
  - {name: copy, type: stateless, in: $left, out: $out, key: in.key, value: {id: in.value.id}}
"""


@pytest.fixture
def make(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Make:
    """``make(text)``: a pipeline with topics of its own."""

    def made(text: str, partitions: int = 1) -> Mini:
        return mini(services, spark, tmp_path, unique, text, partitions)

    return made


def test_of_two_publishers_that_announce_the_same_window_one_is_refused(tmp_path: Path) -> None:
    lake = str(tmp_path)
    for window in (5, 9):
        ours, theirs = (open_published(lake, "Staging", "out") for _ in range(2))
        commit_published(lake, "Staging", theirs, window=window, verified=0, topic_id="one")
        with pytest.raises(CommitConflict):
            commit_published(lake, "Staging", ours, window=window, verified=0, topic_id="one")


def test_a_topic_that_was_known_before_another_writer_ingested_more_has_lost_nothing(make: Make) -> None:
    it = make(BOTH + COPY)
    it.send(it.left, row(1))
    known = topic_states(it.pipeline.kafka, [it.left])
    it.send(it.left, row(2))
    it.ingest(it.left)
    assert plan_ingest(it.pipeline, it.left, known=known).nothing_to_do


def test_another_publisher_s_records_are_not_foreign(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    it = make(BOTH + COPY)
    it.send(it.left, row(1))
    it.step()
    it.publish()
    opened, others = staging.open_staging, [1]

    def open_before_another_is_done(lake: str, pool: str) -> StagingState | None:
        state = opened(lake, pool)
        if others:
            others.pop()
            it.send(it.left, row(2))
            it.step()
            it.publish()
        return state

    monkeypatch.setattr(staging, "open_staging", open_before_another_is_done)
    plan_publish(it.pipeline, it.out)
