"""Turns of the steps in ``zync run``: a long backlog holds up no other topic, table or step for long."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zync_assets import runner
from zync_assets.etl.plan import plan_etl
from zync_assets.local.services import Services
from zync_assets.offsets import OffsetRange
from zync_assets.sinks import steps
from zync_assets.sinks.plan import BATCH_OFFSETS
from zync_assets.sinks.steps import TURN_OFFSETS, TURN_SECONDS, SinkCommit, Turn, next_limit, sink_all, sink_awake
from zync_assets_tests.mini import BOTH, Mini, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEXT = (
    BOTH
    + """
transforms:
  - {type: stateless, in: $left, out: $out, key: in.key, value: in.value}
sinks:
  - {name: shop, type: sqlite, url: shop.db, from: [Raw.$left, Raw.$right], table: '{whole-topic}', mode: insert}
"""
)


def backlog(services: Services, spark: SparkSession, folder: Path, unique: str) -> Mini:
    """Five records of one topic and one of another."""
    it = mini(services, spark, folder, unique, TEXT)
    it.send(it.left, *(row(number) for number in range(5)))
    it.send(it.right, row(1))
    return it


def test_each_table_has_a_batch_a_turn(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = backlog(services, spark, tmp_path, unique)
    it.ingest()
    monkeypatch.setattr(steps, "next_limit", lambda commit: 2)
    places = {steps.place_of(it.pipeline, sink, table) for sink in it.pipeline.sinks for table in sink.tables}
    turns = {place: Turn(limit=2) for place in places}

    def turn() -> list[tuple[str, int]]:
        return [(commit.source, commit.records) for commit in sink_awake(it.pipeline, lambda: spark, turns)]

    large, small = f"Raw.{it.left}", f"Raw.{it.right}"
    assert turn() == [(large, 2), (small, 1)]
    assert turn() == [(large, 2)]
    assert turn() == [(large, 1)]
    assert turn() == []
    # `sink_all` writes the whole backlog.
    it.send(it.left, *(row(number) for number in range(5)))
    it.ingest()
    assert [commit.records for commit in sink_all(it.pipeline, lambda: spark)] == [5]


@pytest.mark.parametrize(
    ("offsets", "seconds", "limit"),
    [
        (100_000, 1.0, int(100_000 * TURN_SECONDS)),
        (100_000, 0.0, BATCH_OFFSETS),
        (50_000, 100.0, TURN_OFFSETS),
    ],
)
def test_a_batch_is_as_large_as_the_target_is_quick(offsets: int, seconds: float, limit: int) -> None:
    ranges = (OffsetRange(0, 10, 10 + offsets),)
    assert next_limit(SinkCommit("shop", "orders", "Raw.orders", ranges, offsets, 0, seconds)) == limit


def test_each_topic_and_pool_has_a_batch_a_turn(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = backlog(services, spark, tmp_path, unique)
    monkeypatch.setattr(runner, "TURN_OFFSETS", 2)
    monkeypatch.setattr(runner, "plan_etl", partial(plan_etl, limit=1))

    def ingested() -> list[tuple[str, int]]:
        commits = runner.ingest_all(it.pipeline, lambda: spark, [it.left, it.right], whole=False)
        return [(commit.topic, commit.records) for commit in commits]

    assert ingested() == [(it.left, 2), (it.right, 1)]
    assert ingested() == [(it.left, 2)]
    assert len(list(runner.etl_all(it.pipeline, lambda: spark, whole=False))) == 1
    assert ingested() == [(it.left, 1)]
    assert ingested() == []
    assert len(list(runner.etl_all(it.pipeline, lambda: spark))) >= 1
    assert [value["id"] for value in it.values()] == [0, 1, 2, 3, 4]
