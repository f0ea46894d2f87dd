"""Raw records that are old go by themselves, once no staging pool wants them, and everything still adds up."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from zync_assets import upkeep
from zync_assets.audit.guard import exactly_once_done_coverage
from zync_assets.checks.output_checks import run_all
from zync_assets.cli.main import main
from zync_assets.errors import CommitConflict, EtlError
from zync_assets.etl.commit import commit_staging
from zync_assets.etl.plan import plan_etl, read_raw, transform
from zync_assets.etl.retries import Retry
from zync_assets.lake import compaction, raw, staging, tables
from zync_assets.lake.raw import RawState
from zync_assets.local.services import Services
from zync_assets.upkeep import compact, retire
from zync_assets_tests.mini import BOTH, JOIN, Mini, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KEEP = BOTH.replace("pool: Raw,", "pool: Raw, retention: 30d,")
LAST = """
  - {name: last, type: stateless, where: "value.op = 'u'", in: $left, out: $out, key: in.key, value: {id: in.value.id}}
"""


@pytest.fixture
def it(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Mini:
    """Records that ``send`` sends are old, but for those with ``now()``."""
    return mini(
        services,
        spark,
        tmp_path,
        unique,
        KEEP + JOIN.replace("type: denorm", "type: denorm\n    where: \"value.op = 'c'\"") + LAST,
    )


def now() -> list[int]:
    return [int(time.time() * 1000)]


def table(it: Mini, topic: str) -> RawState:
    state = raw.open_raw(it.lake, "Raw", topic)
    assert state is not None
    return state


def offsets(it: Mini, topic: str) -> list[int]:
    return [found["kafka"]["offset"] for found in it.raw(topic)]


def lose(state: RawState, found: Sequence[upkeep.Retirement]) -> None:
    raise CommitConflict(f"{state.table.uri}: another was first")


def sound(it: Mini) -> bool:
    it.publish()
    return all(result.passed for result in run_all(it.pipeline) if result.severity == "error")


def command(it: Mini, *arguments: str) -> list[dict[str, Any]]:
    name, *rest = arguments
    done = CliRunner().invoke(main, [name, str(it.pipeline.path), *rest, "--format", "json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_old_records_go_by_themselves_when_they_are_done(it: Mini) -> None:
    it.send(it.left, row(1, "a"), row(2, "b"))
    it.send(it.right, row(1), row(2))
    it.step()
    assert offsets(it, it.left) == []
    it.send(it.left, row(3, "c"), times=now())
    it.send(it.right, row(3), times=now())
    it.step()
    assert offsets(it, it.left) == [2]
    assert (table(it, it.left).retention_start, table(it, it.left).retention_count) == ({0: 2}, {0: 2})
    assert [value["l"] for value in it.values()] == ["a", "b", "c"]
    assert sound(it)
    assert [found["kept"] for found in command(it, "status") if found["kind"] == "input"] == [2, 2]
    traced = command(it, "trace", it.out, "0")
    assert [(found["role"], found["offset"], found["value"]) for found in traced[1:]] == [
        ("left", 0, None),
        ("right", 0, None),
    ]


@pytest.mark.slow
def test_what_waits_keeps_its_record_and_all_that_comes_after(it: Mini) -> None:
    it.send(it.left, row(1, "a"))
    it.send(it.right, row(1))
    it.step()
    it.send(it.left, row(2, "waits"))
    it.step()
    it.send(it.left, row(3, "c"))
    it.send(it.right, row(3))
    it.step()
    assert offsets(it, it.left) == [1, 2]
    it.send(it.right, row(2), times=now())
    it.step()
    assert [value["l"] for value in it.values()] == ["a", "c", "waits"]
    assert offsets(it, it.left) == []
    assert sound(it)


@pytest.mark.slow
def test_what_no_rule_took_goes_and_looking_again_says_so(it: Mini, caplog: pytest.LogCaptureFixture) -> None:
    it.send(it.left, row(1, "odd", op="x"), row(2, "odd", op="x"))
    it.send(it.right, row(9, "odd", op="x"), times=now())
    it.step()
    assert it.classes(it.left) == {"unmatched": 2}
    assert offsets(it, it.left) == []
    it.etl(retry=Retry(unmatched=True))
    assert "2 records of " + it.left in caplog.text
    assert it.classes(it.left) == {"expired": 2}
    assert exactly_once_done_coverage(it.pipeline, "Staging").passed


@pytest.mark.slow
def test_a_batch_that_looks_again_and_a_retention_at_once(it: Mini) -> None:
    """In either order of the commits, every pending record still has its raw record."""
    kept = it.edited(BOTH + JOIN.replace("type: denorm", "type: denorm\n    where: \"value.op = 'c'\""))
    kept.send(it.left, row(1, "odd", op="x"))
    kept.send(it.right, row(7))
    kept.step()
    taken = kept.edited(KEEP + JOIN)  # the rule takes every record now
    plan = plan_etl(taken.pipeline, "Staging", Retry(unmatched=True))
    slices = {topic: read_raw(it.spark, taken.pipeline, plan, topic) for topic in plan.ranges}
    batch = transform(it.spark, plan, slices)
    assert retire(taken.pipeline, taken.pipeline.input(it.left), now()[0])
    with pytest.raises(CommitConflict):
        commit_staging(taken.pipeline, batch)
    assert offsets(it, it.left) == []
    assert exactly_once_done_coverage(taken.pipeline, "Staging").passed


def test_a_retention_that_died_half_way_is_taken_up_again(it: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = it.edited(BOTH + JOIN)
    kept.send(it.left, row(1, "a"))
    kept.send(it.right, row(1))
    kept.step()
    again = kept.edited(KEEP + JOIN)
    item = again.pipeline.input(it.left)
    with monkeypatch.context() as patch:
        patch.setattr(upkeep, "commit_retention", lose)
        with pytest.raises(CommitConflict):
            retire(again.pipeline, item, now()[0])
    state = staging.open_staging(it.lake, "Staging")
    assert state is not None
    assert (state.released(it.left, 0), offsets(it, it.left)) == (1, [0])
    assert sound(again)
    assert [cut.start for cut in retire(again.pipeline, item, now()[0])] == [1]
    assert offsets(it, it.left) == []
    assert sound(again)


@pytest.mark.slow
def test_of_a_compaction_and_a_retention_at_once_one_is_committed(it: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = it.edited(BOTH + JOIN)
    for number in range(4):
        kept.send(it.left, row(number))
        kept.send(it.right, row(number))
        kept.step()
    monkeypatch.setattr(compaction, "FILES", 4)
    before = table(it, it.left)
    runs = compaction.due_runs(before.table.files)
    made = [compaction.rewrite(before.table.uri, run, before.schema, "compact-0") for run in runs]
    again = kept.edited(KEEP + JOIN)
    assert retire(again.pipeline, again.pipeline.input(it.left), now()[0])
    with pytest.raises(CommitConflict):
        compaction.commit(before.table, made, runs)
    right = table(it, it.right)
    needed = {0: 4}
    cuts = upkeep.retirements(right, now()[0], needed)
    assert compact(it.spark, right.table.uri) == 4
    with pytest.raises(CommitConflict):
        upkeep.commit_retention(right, cuts)
    assert (offsets(it, it.left), offsets(it, it.right)) == ([], [0, 1, 2, 3])
    assert sound(again)


def test_a_staging_pool_that_comes_later_begins_with_what_is_kept(it: Mini) -> None:
    it.send(it.left, row(1, op="u"))
    it.send(it.right, row(1, op="u"))
    it.step()
    it.send(it.left, row(2, op="u"), times=now())
    rule = (
        LAST.replace("name: last", "name: more")
        .replace("out: $out", "out: $out.more")
        .replace("'u'", "'u' AND value.id = 2")
    )
    more = it.edited(
        KEEP
        + "  - {topic: $out.more, pool: More, key-format: string, value-format: json, create: {replication-factor: 1}}\n"
        + "transforms:\n"
        + rule
        + LAST
    )
    more.ingest()
    assert more.etl("More") is not None
    state = staging.open_staging(it.lake, "More")
    assert state is not None
    assert state.head.inputs[it.left, 0].first == 1
    assert exactly_once_done_coverage(more.pipeline, "More").passed


def test_a_pool_that_the_file_did_not_name_is_told_what_it_lost(it: Mini) -> None:
    it.send(it.left, row(1, op="u"))
    it.send(it.right, row(1, op="u"))
    it.step()
    it.send(it.left, row(2, op="u"), row(3, op="u"))
    it.ingest()
    state = table(it, it.left)
    upkeep.commit_retention(state, upkeep.retirements(state, now()[0], {0: 3}))
    with pytest.raises(EtlError, match=r"transformed up to offset 1, and .* begins at offset 3"):
        it.etl()
    assert not exactly_once_done_coverage(it.pipeline, "Staging").passed


@pytest.mark.slow
def test_a_batch_and_a_retention_of_another_process_between_two_looks(
    it: Mini, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who saw the account before them and the raw table after them takes nothing for lost."""
    look = raw.open_raw

    def late(lake: str, pool: str, topic: str) -> RawState | None:
        monkeypatch.setattr(raw, "open_raw", look)
        it.etl()
        return look(lake, pool, topic)

    it.send(it.left, row(1, op="u"))
    it.send(it.right, row(1, op="u"))
    it.step()
    it.send(it.left, row(2, op="u"))
    it.ingest()
    monkeypatch.setattr(raw, "open_raw", late)
    assert plan_etl(it.pipeline, "Staging").nothing_to_do
    it.send(it.left, row(3, op="u"))
    it.ingest()
    monkeypatch.setattr(raw, "open_raw", late)
    assert exactly_once_done_coverage(it.pipeline, "Staging").passed
    assert table(it, it.left).retention_start == {0: 3}
    assert it.classes(it.left) == {"done": 3}


def test_what_retention_took_is_counted(it: Mini) -> None:
    it.send(it.left, row(1, "odd", op="x"), row(2, "odd", op="x"))
    it.send(it.right, row(9, "odd", op="x"), times=now())
    it.step()
    state = table(it, it.left)
    assert state.retention_count == {0: 2}
    tables.commit(state.table, [], {"zync:removed:0": 1})
    told = exactly_once_done_coverage(it.pipeline, "Staging")
    assert not told.passed
    assert "2 records were counted below seen; 0 are there, and retention removed 1" in told.summary
