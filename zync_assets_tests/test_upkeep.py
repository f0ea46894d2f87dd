"""Tables are looked after while they are used, and nobody who uses them notices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zync_assets import upkeep
from zync_assets.checks.output_checks import run_all
from zync_assets.errors import CommitConflict
from zync_assets.etl.commit import commit_staging
from zync_assets.etl.plan import plan_etl, read_raw, transform
from zync_assets.kafka.reader import read_range
from zync_assets.lake import compaction, raw, staging, tables
from zync_assets.local.services import Services
from zync_assets_tests.mini import BOTH, JOIN, Mini, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def it(services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch) -> Mini:
    """A pipeline whose tables are compacted when there are four files in a row."""
    monkeypatch.setattr(compaction, "FILES", 4)
    return mini(services, spark, tmp_path, unique, BOTH + JOIN)


def raw_files(it: Mini, topic: str) -> list[tables.DataFile]:
    state = raw.open_raw(it.lake, "Raw", topic)
    assert state is not None
    return raw.raw_files(state)


@pytest.mark.slow
def test_small_files_become_one_by_themselves_and_the_pipeline_goes_on(it: Mini) -> None:
    it.send(it.left, row(100, "orphan"), times=[9_000])
    it.step()
    for number in range(5):
        it.send(it.left, row(number), times=[1_000 + number])
        it.send(it.right, row(number), times=[2_000 + number])
        it.step()
    it.send(it.right, row(100, "late"))
    it.step()
    assert len(raw_files(it, it.left)) < 6
    assert any(item.path.startswith("compact-") for item in raw_files(it, it.left))
    state = staging.open_staging(it.lake, "Staging")
    assert state is not None
    assert any(item.path.startswith("compact-") for item in state.output_files(it.out))
    assert [value["id"] for value in it.values()] == [0, 1, 2, 3, 4, 100]
    it.publish()
    assert all(result.passed for result in run_all(it.pipeline))


@pytest.mark.slow
def test_what_was_staged_before_a_column_became_wider_is_published_as_it_was(it: Mini) -> None:
    """Its long stays a long: as a double it would be another one, and nothing that the record's schema can be written with."""
    narrow = (
        BOTH
        + """
transforms:
  - {name: copy, type: stateless, in: $left, out: $out, key: in.key, value: {n: in.value.id}}
"""
    )
    number = 2**53 + 1
    text = narrow
    for step in range(6):
        if step == 3:
            text = narrow.replace("n: in.value.id", "n: CAST(in.value.id AS DOUBLE)")
        now = it.edited(text)
        now.send(now.left, row(number if step < 3 else 1))
        now.step()
        if step == 0:
            now.publish()
    state = staging.open_staging(it.lake, "Staging")
    assert state is not None
    assert len(state.output_files(it.out)) == 3
    it.publish()
    assert all(result.passed for result in run_all(it.pipeline))
    sent = [
        json.loads(payload)
        for batch in read_range(it.pipeline.kafka, it.out, 0, 0, 6)
        for payload in batch.column("value").to_pylist()
    ]
    assert sent == [{"n": number}] * 3 + [{"n": 1.0}] * 3


def test_of_two_compactions_at_once_one_is_committed(it: Mini) -> None:
    for number in range(3):
        it.send(it.left, row(number))
        it.ingest(it.left)
    it.send(it.left, row(3))
    it.ingest(it.left)
    opened = tables.open_table(f"{it.lake}/Raw/{it.left}")
    assert opened is not None
    runs = compaction.due_runs(opened.files)
    made = [compaction.rewrite(opened.uri, run, opened.schema, "compact-0") for run in runs]
    assert upkeep.compact(it.spark, opened.uri) == 4
    with pytest.raises(CommitConflict):
        compaction.commit(opened, made, runs)
    assert [found["kafka"]["offset"] for found in it.raw(it.left)] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_batch_that_was_planned_before_is_committed_after(it: Mini) -> None:
    """It reads the files that the compaction replaced: they stay on disk."""
    for number in range(4):
        it.send(it.left, row(number))
        it.send(it.right, row(number))
        it.ingest()
    plan = plan_etl(it.pipeline, "Staging")
    slices = {topic: read_raw(it.spark, it.pipeline, plan, topic) for topic in plan.ranges}
    batch = transform(it.spark, plan, slices)
    for topic in (it.left, it.right):
        assert upkeep.compact(it.spark, f"{it.lake}/Raw/{topic}") == 4
    assert commit_staging(it.pipeline, batch).counts["outputs"] == 4
    assert it.etl() is None


def test_what_goes_wrong_in_upkeep_does_not_fail_the_step(
    it: Mini, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(4):
        it.send(it.left, row(number))
        it.ingest(it.left)
    (Path(it.lake) / "Raw" / it.left / raw_files(it, it.left)[1].path).unlink()
    it.send(it.left, row(4))
    assert it.ingest(it.left)[it.left].records == 1
    assert "can't be read" in caplog.text
    # Each later commit tries again, and would fill the disk with the files of its attempts.
    assert not list(Path(it.lake, "Raw", it.left).rglob("compact-*/*.parquet"))


@pytest.mark.slow
def test_side_tables_are_looked_after_too(it: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "COMMITS", 2)
    for number in range(3):
        it.send(it.left, row(number), b"{ no json")
        it.send(it.right, row(number))
        it.step()
        it.publish()
    for side in (f"~quarantine/Raw/{it.left}", "~published/Staging"):
        opened = tables.open_table(f"{it.lake}/{side}")
        assert opened is not None
        assert opened.number("zync:cleaned")
        assert not compaction.is_due(opened)
    assert all(result.passed for result in run_all(it.pipeline) if result.name != "quarantine_size")
