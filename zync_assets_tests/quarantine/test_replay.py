"""Replay: what was in quarantine comes into its place, once, wherever a replay is killed and however many run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from zync_assets import upkeep
from zync_assets.audit.guard import exactly_once_done_coverage
from zync_assets.checks.output_checks import run_all
from zync_assets.cli.main import main
from zync_assets.errors import CommitConflict
from zync_assets.etl import history
from zync_assets.etl.retries import Retry
from zync_assets.kafka.registry import Registry
from zync_assets.lake import raw, staging
from zync_assets.lake.quarantine_table import EVERYTHING, quarantined_records
from zync_assets.local.services import Services
from zync_assets.quarantine.replay import commit_drop, commit_replay, plan_drop, plan_replay
from zync_assets.runner import drop_all, etl_all, ingest_all, rebuild_all, replay_all
from zync_assets_tests.mini import BOTH, Mini, mini, row
from zync_assets_tests.test_exactly_once import breaking
from zync_assets_tests.test_writers_side_by_side import AVRO, COPY, fastavro_bytes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ID = {"name": "id", "type": "long"}
MORE = {"name": "more", "type": ["null", "string"], "default": None}


VIEW = """
transforms:
  - {name: last, type: view, tables: {a: {topic: $left, key: "{odd: value.id > 0}"}}, from: a, out: $out,
     key: CAST(a.id > 0 AS STRING), value: {id: a.id}}
"""
"""Every record changes the same row."""


class Late:
    """A topic with records 1, 2 and 3, of which the second names a schema that the registry does not have yet."""

    def __init__(self, it: Mini, times: Sequence[int] = (1000, 5000, 2000)) -> None:
        self.it = it
        name = it.left.partition(".")[0]  # a schema of this test's own: the registry knows the same one again
        narrow, self.wide = ({"type": "record", "name": name, "fields": fields} for fields in ([ID], [ID, MORE]))
        assert it.pipeline.registry is not None
        self.registry = Registry(it.pipeline.registry)
        self.known = self.registry.register(f"{it.left}-value", json.dumps(narrow))
        self.late = self.known + 1
        good = b"\0" + self.known.to_bytes(4, "big")
        bad = b"\0" + self.late.to_bytes(4, "big")
        it.send(
            it.left,
            good + fastavro_bytes(narrow, {"id": 1}),
            bad + fastavro_bytes(self.wide, {"id": 2, "more": "x"}),
            good + fastavro_bytes(narrow, {"id": 3}),
            times=times,
        )

    def mend(self) -> None:
        """The producer's schema is registered after all."""
        assert self.registry.register(f"{self.it.left}-late", json.dumps(self.wide)) == self.late


@pytest.fixture
def late(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Late:
    return Late(mini(services, spark, tmp_path, unique, AVRO + COPY))


def sound(it: Mini) -> None:
    for result in run_all(it.pipeline):
        assert result.passed or result.severity == "warn", f"{result.name}: {result.summary}"


def ids(it: Mini) -> list[int]:
    return [value["id"] for value in it.values()]


def replay(it: Mini) -> None:
    list(replay_all(it.pipeline, lambda: it.spark, EVERYTHING))


@pytest.mark.parametrize("seen", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["seen by ETL", "new to ETL"])
def test_a_record_that_can_be_decoded_now_comes_into_its_place(late: Late, seen: bool) -> None:
    it = late.it
    it.ingest()
    if seen:
        it.etl()
        assert it.classes(it.left) == {"done": 2, "quarantined": 1}
        sound(it)
        replay(it)
    assert len(quarantined_records(it.pipeline)) == 1, "nothing is mended yet"
    late.mend()
    replay(it)
    assert quarantined_records(it.pipeline) == []
    assert [found["kafka"]["offset"] for found in it.raw(it.left)] == [0, 1, 2]
    # As if it could have been decoded at once: a quarantined record's timestamp counts too.
    assert [int(found["kafka"]["time"].timestamp() * 1000) for found in it.raw(it.left)] == [1000, 5000, 5000]
    assert [found["value"]["more"] for found in it.raw(it.left)] == [None, "x", None]
    assert ids(it) == ([1, 3, 2] if seen else [1, 2, 3])
    assert it.classes(it.left) == {"done": 3}
    assert it.etl() is None
    sound(it)
    it.publish()
    sound(it)


@pytest.mark.slow
def test_a_field_that_came_by_a_replay_is_left_out_of_records_whose_schema_lacks_it(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    rule = COPY.replace("{id: in.value.id}", "{id: in.value.id, more: in.value.more}")
    late = Late(mini(services, spark, tmp_path, unique, AVRO + rule))
    it = late.it
    it.ingest()
    late.mend()
    replay(it)
    narrow = {"type": "record", "name": "narrow", "fields": [ID]}
    it.send(it.left, b"\0" + late.known.to_bytes(4, "big") + fastavro_bytes(narrow, {"id": 4}))
    it.step()
    assert [found["left_out"] for found in it.staged()] == [["value.more"], None, ["value.more"], ["value.more"]]


ORDERED = """
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: avro, order: {by: value.id, domain: shop}}
  - {topic: $right, pool: Raw, key-format: string, value-format: avro, order: {by: value.id, domain: shop}}
outputs:
  - {topic: $out, pool: Staging, key-format: string, value-format: json, create: {replication-factor: 1}}
transforms:
  - {name: made, type: stateless, in: $left, out: $out, key: CAST(in.value.id = 2 AS STRING),
     value: {id: in.value.id}}
  - {name: gone, type: stateless, in: $right, out: $out, key: "'true'", value: null}
"""


@pytest.mark.slow
@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_replayed_record_has_its_own_place_in_the_order_of_the_source(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, rebuilt: bool
) -> None:
    """Two topics change the row of record 2: its delete in the other topic comes before the record."""
    late = Late(mini(services, spark, tmp_path, unique, ORDERED))
    it = late.it
    narrow = {"type": "record", "name": "narrow", "fields": [ID]}
    it.send(it.right, b"\0" + late.known.to_bytes(4, "big") + fastavro_bytes(narrow, {"id": 1}))
    list(ingest_all(it.pipeline, lambda: spark, [it.left, it.right]))
    if rebuilt:
        it.etl()
    late.mend()
    replay(it)
    if rebuilt:
        list(rebuild_all(it.pipeline, lambda: spark))
    else:
        assert it.values() == [{"id": 1}, None, {"id": 2}, {"id": 3}]
    rows = {record["key"]: record["value"] for record in it.staged()}
    assert rows == {"false": {"id": 3}, "true": {"id": 2}}
    sound(it)


@pytest.mark.slow
def test_a_replayed_record_waits_for_the_frontier_that_its_neighbour_waits_for(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    late = Late(mini(services, spark, tmp_path, unique, ORDERED))
    it = late.it
    narrow = {"type": "record", "name": "narrow", "fields": [ID]}
    good = b"\0" + late.known.to_bytes(4, "big")
    it.send(it.right, good + fastavro_bytes(narrow, {"id": 2}))
    it.ingest()
    late.mend()
    replay(it)
    assert it.values() == [{"id": 1}]
    it.send(it.right, good + fastavro_bytes(narrow, {"id": 9}))
    list(ingest_all(it.pipeline, lambda: spark, [it.right]))
    list(etl_all(it.pipeline, lambda: spark))
    assert it.values() == [{"id": 1}, {"id": 2}, None, {"id": 3}, None]
    sound(it)


@pytest.mark.slow
def test_the_last_record_of_a_partition_has_its_own_place_after_a_replay(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """Its row was deleted before the record, in another topic. A rebuild must not delete it again."""
    text = ORDERED.replace("in.value.id = 2", "in.value.id % 4 = 2")
    late = Late(mini(services, spark, tmp_path, unique, text))
    it = late.it
    wide, narrow = ({"type": "record", "name": "it", "fields": fields} for fields in ([ID, MORE], [ID]))
    bad, good = (b"\0" + id.to_bytes(4, "big") for id in (late.late, late.known))
    it.send(it.left, bad + fastavro_bytes(wide, {"id": 6, "more": None}))
    it.send(it.right, good + fastavro_bytes(narrow, {"id": 5}))
    list(ingest_all(it.pipeline, lambda: spark, [it.left, it.right]))
    list(etl_all(it.pipeline, lambda: spark))
    late.mend()
    replay(it)
    state = raw.open_raw(it.lake, "Raw", it.left)
    assert state is not None and state.orders == {0: (6, 0)}
    edited = it.edited(text.replace("value: {id: in.value.id}", "value: {id: in.value.id * 10}"))
    list(rebuild_all(edited.pipeline, lambda: spark))
    rows = {record["key"]: record["value"] for record in edited.staged()}
    assert rows == {"false": {"id": 30}, "true": {"id": 60}}
    sound(edited)


def test_a_replay_after_later_records_names_the_partition_and_the_cure(late: Late) -> None:
    it = late.it
    it.step()
    late.mend()
    done = CliRunner().invoke(main, ["quarantine", "replay", str(it.pipeline.path)])
    assert done.stdout == "1 replayed, 0 left\n"
    assert f"note: ETL took later records before the replayed ones, of topic {it.left}, partition 0." in done.stderr
    assert f"zync rebuild {it.pipeline.path}" in done.stderr


@pytest.mark.slow
def test_a_rebuild_that_was_killed_before_a_replay_makes_the_rows_right(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """All records change the same row, and the replayed record is not the last."""
    late = Late(mini(services, spark, tmp_path, unique, AVRO + COPY.replace("in.key", "\"'all'\"")))
    it = late.it
    it.step()
    # The scratch pool has all records that ETL has taken, and is there for the next rebuild.
    assert next(rebuild_all(it.pipeline, lambda: it.spark)).pool == "~rebuild/Staging"
    late.mend()
    replay(it)
    assert ids(it) == [1, 3, 2]
    assert [commit.pool for commit in rebuild_all(it.pipeline, lambda: it.spark)] == ["~rebuild/Staging", "Staging"]
    assert ids(it) == [1, 3, 2, 3]
    assert it.classes(it.left) == {"done": 3}


@pytest.mark.slow
def test_a_rebuild_that_meets_a_replay_has_the_replayed_record(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replay comes between the last batch of the scratch pool and the commit of the rebuild."""
    late = Late(mini(services, spark, tmp_path, unique, AVRO + COPY.replace("in.key", "\"'all'\"")))
    it = late.it
    it.step()
    passes: list[str] = []

    def crash_point(name: str) -> None:
        passes.append(name)
        if passes == ["rebuild:recomputed"]:
            late.mend()
            replay(it)

    monkeypatch.setattr(history, "crash_point", crash_point)
    list(rebuild_all(it.pipeline, lambda: it.spark))
    it.step()
    assert passes == ["rebuild:recomputed", "rebuild:recomputed", "rebuild:committed"]
    assert ids(it) == [1, 3, 2, 3]
    assert it.classes(it.left) == {"done": 3}


@pytest.mark.slow
def test_a_replay_into_the_table_of_a_view_leaves_later_rows_and_says_nothing(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    late = Late(mini(services, spark, tmp_path, unique, AVRO + VIEW))
    late.it.step()
    late.mend()
    done = CliRunner().invoke(main, ["quarantine", "replay", str(late.it.pipeline.path)])
    assert (done.stdout, "note" in done.stderr) == ("1 replayed, 0 left\n", False)
    assert ids(late.it) == [3]
    assert late.it.classes(late.it.left) == {"done": 3}


@pytest.mark.slow
def test_a_replay_before_etl_says_nothing_of_later_records(late: Late) -> None:
    it = late.it
    it.ingest()
    late.mend()
    done = CliRunner().invoke(main, ["quarantine", "replay", str(it.pipeline.path)])
    assert done.stdout == "1 replayed, 0 left\n"
    assert "note" not in done.stderr


def test_a_replay_that_is_killed_at_any_point_goes_on_as_if_nothing_had_been(late: Late) -> None:
    it = late.it
    it.step()
    late.mend()
    for module, name, after in (
        (raw, "commit_replay_files", False),
        (raw, "commit_replay_files", True),
        (staging, "commit_batch", False),
    ):
        with breaking(module, name, after=after):
            replay(it)
        assert exactly_once_done_coverage(it.pipeline, "Staging").passed
        sound(it)
    with breaking(staging, "commit_batch", after=True):
        replay(it)
    assert ids(it) == [1, 3, 2]
    replay(it)
    assert ids(it) == [1, 3, 2]
    assert it.classes(it.left) == {"done": 3}
    sound(it)


@pytest.mark.slow
def test_a_replay_that_ended_before_etl_is_taken_up_by_the_next_batch(late: Late) -> None:
    it = late.it
    it.step()
    late.mend()
    plan = plan_replay(it.pipeline, it.pipeline.input(it.left), EVERYTHING)
    assert plan is not None
    commit_replay(it.spark, it.pipeline, plan)
    sound(it)
    made = it.etl()
    assert made is not None
    assert (made.counts, it.classes(it.left)) == ({"outputs": 1, "done": 1}, {"done": 3})


@pytest.mark.slow
def test_of_two_replays_at_once_one_is_committed(late: Late) -> None:
    it = late.it
    it.step()
    late.mend()
    plans = [plan_replay(it.pipeline, it.pipeline.input(it.left), EVERYTHING) for _ in range(2)]
    for plan, lost in zip(plans, (False, True), strict=True):
        assert plan is not None
        if lost:
            with pytest.raises(CommitConflict):
                commit_replay(it.spark, it.pipeline, plan)
        else:
            commit_replay(it.spark, it.pipeline, plan)
    assert plan_replay(it.pipeline, it.pipeline.input(it.left), EVERYTHING) is None
    it.etl()
    assert it.classes(it.left) == {"done": 3}
    sound(it)


def test_what_is_dropped_is_dropped_once_and_replayed_no_more(late: Late) -> None:
    it = late.it
    it.ingest()
    refused = CliRunner().invoke(main, ["quarantine", "drop", str(it.pipeline.path), "--all"])
    assert (refused.exit_code, "was not seen by ETL yet" in refused.output) == (1, True)
    it.etl()
    with breaking(staging, "commit_batch", after=True):
        commit_drop(plan_drop(it.pipeline, "Staging", EVERYTHING))
    assert drop_all(it.pipeline, EVERYTHING) == 0
    assert it.classes(it.left) == {"done": 2, "dropped": 1}
    assert quarantined_records(it.pipeline) == []
    sound(it)
    late.mend()
    replay(it)
    assert ids(it) == [1, 3]
    sound(it)


@pytest.mark.slow
def test_a_topic_that_no_rule_reads_has_no_account_to_drop_its_records_in(late: Late) -> None:
    it = late.it
    it.send(it.right, b"\0\0\0\0\0")
    it.step()
    for options in (["--all"], ["--topic", it.right]):
        refused = CliRunner().invoke(main, ["quarantine", "drop", str(it.pipeline.path), *options])
        assert refused.exit_code == 1
        assert f"topic {it.right}, partition 0, offset 0 can't be dropped: no rule reads the topic" in refused.output
    assert [record.topic for record in quarantined_records(it.pipeline)] == [it.left, it.right]


UNMATCHED = (
    BOTH
    + """
transforms:
  - {name: copy, type: stateless, in: $left, where: "value.op = 'c'", out: $out, key: in.key, value: {id: in.value.id}}
"""
)


def test_unmatched_records_are_looked_at_again_after_the_rules_changed(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, UNMATCHED)
    it.send(it.left, row(1), row(2, op="u"), row(3, op="x"), row(4), row(5, op="u"))
    it.step()
    assert it.classes(it.left) == {"done": 2, "unmatched": 3}
    it = it.edited(UNMATCHED.replace("= 'c'", "IN ('c','u')"))
    it.send(it.left, row(6))
    it.ingest()
    made = list(etl_all(it.pipeline, lambda: spark, Retry(unmatched=True)))
    assert [commit.counts for commit in made] == [{"outputs": 3, "done": 3, "unmatched": 1}]
    assert ids(it) == [1, 4, 2, 5, 6]
    assert it.classes(it.left) == {"done": 5, "unmatched": 1}
    sound(it)
    # Raw retention removes the rest of the records.
    state = raw.open_raw(it.lake, "Raw", it.left)
    assert state is not None
    first = raw.raw_files(state)[0]
    upkeep.commit_retention(state, [upkeep.Retirement(0, (first,), 5, first.max_time or 0)])
    list(etl_all(it.pipeline, lambda: spark, Retry(unmatched=True)))
    assert it.classes(it.left) == {"done": 5, "expired": 1}
    assert list(etl_all(it.pipeline, lambda: spark, Retry(unmatched=True))) == []


RENAMED = (
    BOTH
    + """
transforms:
  - name: $name
    type: denorm
    left: $$left
    right: $$right
    join-on: left.value.$on = right.value.$on
    out: $$out
    key: left.key
    value: {id: left.value.id, r: right.value.id}
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["renamed", "another join-on"])
def test_what_waits_for_a_rule_that_is_another_one_now_waits_for_it(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, how: str
) -> None:
    def rules(name: str, on: str) -> str:
        return RENAMED.replace("$name", name).replace("$on", on).replace("$$", "$")

    it = mini(services, spark, tmp_path, unique, rules("before", "v"))
    it.send(it.left, row(1, "a"), row(2, "b"))
    it.send(it.right, row(2, "c"))
    it.step()
    assert it.classes(it.left) == {"pending": 2}
    renamed = how == "renamed"
    it = it.edited(rules("after" if renamed else "before", "id"))
    retry = Retry(unmatched=True) if renamed else Retry(waiting=("before",))
    list(etl_all(it.pipeline, lambda: spark, retry))
    assert it.values() == [{"id": 2, "r": 2}]
    assert it.classes(it.left) == {"done": 1, "pending": 1}
    assert {name for name, _ in it.head.waiting if it.head.waiting[name, it.left]} == {"after" if renamed else "before"}
    it.send(it.right, row(1))
    it.step()
    assert it.values() == [{"id": 2, "r": 2}, {"id": 1, "r": 1}]
    sound(it)
