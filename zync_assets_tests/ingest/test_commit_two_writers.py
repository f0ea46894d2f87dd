"""Two writers ingest the same records, some of which can't be decoded, and die anywhere: each is in quarantine once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zync_assets.errors import CommitConflict
from zync_assets.ingest import commit as ingest_commit
from zync_assets.ingest import plan as step
from zync_assets.lake import raw
from zync_assets.lake.quarantine_table import quarantined_records
from zync_assets.local.services import Services
from zync_assets_tests.mini import BOTH, JOIN, Mini, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Killed(BaseException):
    """The end of a process."""


@pytest.fixture
def it(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Mini:
    made = mini(services, spark, tmp_path, unique, BOTH + JOIN)
    made.send(made.left, row(1), b"not JSON", row(2))
    return made


def held(it: Mini) -> list[int]:
    return [entry.offset for entry in quarantined_records(it.pipeline)]


def before_the_raw_commit(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """``act`` runs once, between a writer's commits of the quarantine and of the records."""
    real, left = raw.commit_advance, [act]

    def commit_advance(*arguments: Any, **named: Any) -> None:
        if left:
            left.pop()()
        real(*arguments, **named)

    monkeypatch.setattr(raw, "commit_advance", commit_advance)


def ingest(it: Mini, upto: int | None = None) -> None:
    """Ingest the left topic, up to an offset."""
    plan = step.plan_ingest(it.pipeline, it.left, limit=upto or step.BATCH_OFFSETS)
    ingest_commit.commit_raw(it.pipeline, step.read_input(it.spark, it.pipeline, plan))


def ingest_and_die(it: Mini, upto: int | None = None) -> None:
    """Another writer, killed when its quarantine is committed and its records are not."""

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(raw, "commit_advance", die)
        ingest(it, upto)


@pytest.mark.parametrize("upto", [None, 1, 2])
def test_one_goes_on_where_another_died_beside_it(it: Mini, monkeypatch: pytest.MonkeyPatch, upto: int | None) -> None:
    """The one that died had as many records, or fewer, with or without the one that can't be decoded."""
    before_the_raw_commit(monkeypatch, lambda: ingest_and_die(it, upto))
    ingest(it)
    assert held(it) == [1]
    it.send(it.left, b"neither JSON", row(3))
    it.step()
    assert held(it) == [1, 3]
    assert it.classes(it.left) == {"pending": 3, "quarantined": 2}


@pytest.mark.slow
def test_a_longer_one_died_beside_it(it: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    it.send(it.left, b"neither JSON", row(3))
    before_the_raw_commit(monkeypatch, lambda: ingest_and_die(it))
    ingest(it, upto=2)
    assert held(it) == [1]
    it.step()
    assert held(it) == [1, 3]
    assert it.classes(it.left) == {"pending": 3, "quarantined": 2}


@pytest.mark.slow
def test_both_die_and_the_one_that_was_committed_counts(it: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its commit an ingest only reports. A kill after the commit therefore loses no work."""
    for upto in (None, 1, 2):
        ingest_and_die(it, upto)
    ingest(it)
    for upto in (None, 1):
        it.send(it.left, row(4))
        ingest_and_die(it, upto)
    assert held(it) == [1]
    it.step()
    assert held(it) == [1]
    assert it.classes(it.left) == {"pending": 4, "quarantined": 1}


def test_a_writer_that_comes_late_takes_nothing_out_that_counts(it: Mini) -> None:
    late = step.plan_ingest(it.pipeline, it.left)
    ingest(it)
    with pytest.raises(CommitConflict):
        ingest_commit.commit_raw(it.pipeline, step.read_input(it.spark, it.pipeline, late))
    assert held(it) == [1]
