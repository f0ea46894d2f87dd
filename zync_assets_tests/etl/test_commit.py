"""ETL's semantics on small topics: which rule takes a record, what pairs, what waits, and what is an error."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from deltalake import DeltaTable

from zync_assets.audit.guard import exactly_once_done_coverage
from zync_assets.errors import BadRecords, CommitConflict, EtlError, KafkaError, TopicMissing
from zync_assets.etl import batch, positions
from zync_assets.etl.commit import commit_staging
from zync_assets.etl.plan import plan_etl, read_raw, transform
from zync_assets.etl.rules import denorm
from zync_assets.ingest import commit
from zync_assets.kafka.topics import create_topic
from zync_assets.lake import staging, storage, tables
from zync_assets.lake.compaction import commit as compaction_commit
from zync_assets.lake.compaction import rewrite
from zync_assets.lake.head import Head, head_rows
from zync_assets.lake.raw import open_raw
from zync_assets.lake.raw_files import time_floors
from zync_assets.lake.staging import open_staging
from zync_assets.local.services import Services
from zync_assets.runner import etl_all
from zync_assets_tests.mini import BOTH, JOIN, Mini, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Make = Callable[..., Mini]


@pytest.fixture
def make(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Make:
    """``make(text)``: a pipeline with topics of its own."""

    def made(text: str, partitions: int = 1) -> Mini:
        return mini(services, spark, tmp_path, unique, text, partitions)

    return made


RULES = """
transforms:
  - {name: first, type: stateless, in: $left, where: value.v = 'a', out: $out, key: in.key,
     value: {id: in.value.id, by: "'first'"}}
  - {name: second, type: stateless, in: $left, where: value.id > 1, out: $out, key: in.key,
     value: {id: in.value.id, by: "'second'"}}
  - {name: gone, type: stateless, in: $left, where: value IS NULL AND key = 'gone', out: $out, key: in.key, value: null}
  - {name: rest, type: stateless, in: $right, out: $out, key: in.key, value: {id: in.value.id, by: "'rest'"}}
"""


@pytest.mark.usefixtures("of_each_size")
def test_the_first_rule_that_holds_takes_a_record(make: Make) -> None:
    it = make(BOTH + RULES)
    it.send(
        it.left,
        row(2, "a"),  # both hold: the first
        row(2, "b"),
        row(1, "b"),  # neither
        {"op": "c", "id": None, "v": None},  # both conditions are null, which is not true
        ("gone", None),
        ("other", None),  # a tombstone that no rule takes
        b"{ garbage",
    )
    it.send(it.right, row(7), ("k", None))  # a rule without where takes no tombstones
    it.step()
    assert [(found["key"], found["value"]) for found in it.staged()] == [
        ("k0", {"id": 2, "by": "first"}),
        ("k0", {"id": 7, "by": "rest"}),
        ("k1", {"id": 2, "by": "second"}),
        ("gone", None),
    ]
    assert it.classes(it.left) == {"done": 3, "unmatched": 2, "dropped": 1, "quarantined": 1}
    assert it.classes(it.right) == {"done": 1, "dropped": 1}


def test_unmatched_records_are_dropped_where_the_file_says_so(make: Make) -> None:
    it = make(BOTH.replace("topic: $left, ", "topic: $left, unmatched: drop, ") + RULES)
    it.send(it.left, row(1, "b"), row(2))
    it.step()
    assert it.classes(it.left) == {"done": 1, "dropped": 1}


def test_unmatched_records_stop_the_batch_where_the_file_says_so(make: Make) -> None:
    it = make(BOTH.replace("topic: $left, ", "topic: $left, unmatched: fail, ") + RULES)
    it.send(it.left, row(2), row(1, "b"), row(1, "c"))
    with pytest.raises(EtlError, match=rf"topic {it.left}, partition 0, offset 1: no rule takes"):
        it.step()
    assert open_staging(it.lake, "Staging") is None
    left = list(Path(it.pipeline.lake, "Staging").rglob("*.parquet"))
    assert not left, "what a batch that fails has written goes: it is tried again and again"


TWO_POOLS = BOTH.replace(
    "outputs:\n",
    "outputs:\n  - {topic: $out.copy, pool: Copies, key-format: string, value-format: json, create: {replication-factor: 1}}\n",
)
COPY_RULES = """  - {name: copy, type: stateless, in: $left, out: $out.copy, key: in.key, value: {v: in.value.v}}
  - {name: erase, type: stateless, in: $left, where: value IS NULL, out: $out.copy, key: in.key, value: null}
"""


def test_each_staging_pool_takes_a_record_by_its_own_rules(make: Make) -> None:
    it = make(TWO_POOLS + JOIN + COPY_RULES)
    it.send(it.left, row(1, "a"), row(2, "b"), None)
    it.send(it.right, row(1, "c"))
    it.ingest()
    list(etl_all(it.pipeline, lambda: it.spark))
    assert [(value["l"], value["r"]) for value in it.values()] == [("a", "c")]
    assert it.classes(it.left) == {"done": 1, "pending": 1, "dropped": 1}
    copies = DeltaTable(f"{it.lake}/Copies").to_pyarrow_table(filters=[("topic", "=", f"{it.out}.copy")]).to_pylist()
    assert [found[f"value:{it.out}.copy"] for found in sorted(copies, key=lambda found: found["kafka"]["offset"])] == [
        {"v": "a"},
        {"v": "b"},
        None,
    ]
    for check in (exactly_once_done_coverage(it.pipeline, pool) for pool in ("Staging", "Copies")):
        assert check.passed, check.summary
    edited = it.edited(TWO_POOLS + JOIN + COPY_RULES.replace("copy, type", "copy, where: value.v = 'd', type"))
    edited.send(it.left, row(3, "d"), row(4, "e"))
    edited.ingest()
    list(etl_all(edited.pipeline, lambda: it.spark))
    head = open_staging(it.lake, "Copies").head  # type: ignore[union-attr]
    assert {kind: n for (_, _, kind), n in head.counts.items()} == {"done": 4, "unmatched": 1}
    assert edited.classes(it.left) == {"done": 1, "pending": 3, "dropped": 1}


@pytest.mark.usefixtures("of_each_size")
def test_the_kth_left_pairs_with_the_kth_right_and_the_surplus_waits(make: Make) -> None:
    it = make(BOTH + JOIN)
    it.send(it.left, row(1, "l1"), row(2, "m1"), row(1, "l2"), row(1, "l3"), row(None, "null"))
    it.send(it.right, row(1, "r1"), row(3, "n1"), row(1, "r2"), row(None, "null"))
    it.step()
    assert it.values() == [{"id": 1, "l": "l1", "r": "r1"}, {"id": 1, "l": "l2", "r": "r2"}]
    assert it.classes(it.left) == {"done": 2, "pending": 3}
    waiting = {(found["topic"], found["first"], found["hash"] is None) for found in it.ledger("pending")}
    assert waiting == {
        (it.left, 1, False),
        (it.left, 3, False),
        (it.left, 4, True),
        (it.right, 1, False),
        (it.right, 3, True),
    }

    it.send(it.right, row(1, "r3"), row(2, "m2"))
    it.step()
    assert it.values()[2:] == [{"id": 1, "l": "l3", "r": "r3"}, {"id": 2, "l": "m1", "r": "m2"}]
    assert it.classes(it.left) == {"done": 4, "pending": 1}
    assert {found["first"] for found in it.ledger("completed")} == {1, 3}


@pytest.mark.usefixtures("of_each_size")
def test_a_late_side_is_joined_whichever_it_is_and_one_that_has_no_table_yet(make: Make) -> None:
    it = make(BOTH + JOIN)
    it.send(it.right, row(1, "r1"), row(2, "r2"))
    it.step()
    assert it.values() == []
    assert it.classes(it.right) == {"pending": 2}
    it.send(it.left, row(2, "l2"))
    it.step()
    assert it.values() == [{"id": 2, "l": "l2", "r": "r2"}]
    it.send(it.left, row(1, "l1"))
    it.step()
    assert it.values()[1:] == [{"id": 1, "l": "l1", "r": "r1"}]
    assert it.classes(it.right) == {"done": 2}


def test_outputs_come_in_the_order_in_which_they_became_possible(make: Make) -> None:
    """By the latest time of their inputs, then the completing input's place, partition and offset."""
    update = """
  - {name: update, type: stateless, in: $right, where: value.op = 'u', out: $out, key: in.key,
     value: {id: in.value.id, r: in.value.v}}
"""
    it = make(BOTH + JOIN.replace("left: $left", "where: value.op = 'c'\n    left: $left") + update)
    it.send(it.left, row(1, "a"), row(2, "b"), row(3, "c"), times=[1000, 1001, 1500])
    it.send(
        it.right,
        row(1, "A"),  # complete at 1000, by the right one
        row(2, "B"),  # 1001
        row(1, "u1", "u"),  # 1001, after B by its offset
        row(3, "C"),  # complete at 1500: the left one came last
        row(2, "u2", "u"),  # 1499
        row(3, "u3", "u"),  # its own time is 900, its partition has been at 1499 already
        row(1, "u4", "u"),  # 1500, and after C: the left topic is named first
        times=[1000, 1001, 1001, 1100, 1499, 900, 1500],
    )
    it.step()
    assert [found["r"] for found in it.values()] == ["A", "B", "u1", "u2", "u3", "C", "u4"]


def test_a_record_s_time_does_not_run_back_from_file_to_file(make: Make) -> None:
    it = make(
        BOTH
        + "transforms:\n  - {name: one, type: stateless, in: $left, out: $out, key: in.key, value: {v: in.value.v}}\n"
        "  - {name: two, type: stateless, in: $right, out: $out, key: in.key, value: {v: in.value.v}}\n"
    )
    it.send(it.left, row(1, "a"), times=[5000])
    it.send(it.right, row(1, "x"), row(1, "y"), times=[3000, 6000])
    it.ingest()
    it.send(it.left, row(1, "b"), row(1, "c"), times=[2000, 7000])
    it.step()
    assert [found["v"] for found in it.values()] == ["x", "a", "b", "y", "c"]


TIMES = """
transforms:
  - {name: join, type: denorm, left: $left, right: $right, join-on: left.value.id = right.value.id, out: $out,
     where: "value.op = 'c'", key: left.key,
     value: {id: left.value.id, l: unix_micros(left.kafka.time), r: unix_micros(right.kafka.time)}}
  - {name: alone, type: stateless, in: $left, out: $out, key: in.key,
     value: {id: in.value.id, l: unix_micros(in.kafka.time), r: "0L"}}
"""
LATE = 1_700_000_000_123


@pytest.mark.slow
@pytest.mark.parametrize("made_by", ["this version", "an older version"])
def test_the_time_in_an_expression_is_the_carried_time_wherever_batches_are_cut(
    make: Make, monkeypatch: pytest.MonkeyPatch, made_by: str
) -> None:
    """For a new record, for one that waited, and after a compaction of its file. An older version wrote a maximum within each
    file alone."""
    it = make(BOTH + TIMES)
    if made_by == "an older version":
        monkeypatch.setattr(commit, "highest_times", lambda _: {})
    sent = [(row(9, op="x"), LATE), (row(1), 1000), (row(8, op="x"), 2000), (row(2), LATE + 7), (row(3), 4000)]
    for number, (record, time) in enumerate(sent):
        it.send(it.left, (f"row {number}", record), times=[time])
        it.step()
    state = open_raw(it.lake, "Raw", it.left)
    assert state is not None
    assert bool(time_floors(state.files)) == (made_by == "an older version")
    it.send(it.right, row(1), times=[5000])
    it.step()
    run = list(state.files)[1:3]
    compaction_commit(state.table, [rewrite(state.table.uri, run, state.schema, "compact-0")], [run])
    it.send(it.right, row(2), row(3), times=[LATE + 9, 5000])
    it.step()
    micros = [LATE * 1000, (LATE + 7) * 1000, (LATE + 9) * 1000]
    assert it.values() == [
        {"id": 9, "l": micros[0], "r": 0},
        {"id": 8, "l": micros[0], "r": 0},
        {"id": 1, "l": micros[0], "r": 5_000_000},
        {"id": 2, "l": micros[1], "r": micros[2]},
        {"id": 3, "l": micros[1], "r": micros[2]},
    ]


def test_nothing_new_commits_nothing_and_only_pending_ones_do(make: Make) -> None:
    it = make(BOTH + JOIN)
    assert plan_etl(it.pipeline, "Staging").nothing_to_do
    it.send(it.left, row(1))
    commit = it.step()
    assert commit is not None
    assert (commit.outputs, commit.counts) == ({}, {"pending": 1})
    version = DeltaTable(f"{it.lake}/Staging").version()
    assert it.step() is None
    assert DeltaTable(f"{it.lake}/Staging").version() == version


def test_topics_that_hold_nothing_but_tombstones_wait_for_a_schema(make: Make) -> None:
    it = make(BOTH + JOIN)
    it.send(it.left, ("a", None), ("b", None))
    it.send(it.right, row(1, "r"))
    it.step()
    it.send(it.left, row(1, "l"))
    it.step()
    assert it.values() == [{"id": 1, "l": "l", "r": "r"}]
    assert it.classes(it.left) == {"dropped": 2, "done": 1}


def one_rule(value: str, more: str = "") -> str:
    return f"{BOTH}\ntransforms:\n  - {{name: one, type: stateless, in: $left, out: $out, key: in.key, value: {value}}}\n{more}"


OTHER = "  - {name: two, type: stateless, in: $right, out: $out, key: in.key, value: {id: in.value.v}}\n"


def test_two_rules_that_give_one_field_two_types_are_an_error_that_names_both(make: Make) -> None:
    it = make(one_rule("{id: in.value.id}", OTHER))
    it.send(it.left, row(1))
    it.send(it.right, row(1))
    with pytest.raises(EtlError, match=r"value\.id is string in rule two and bigint in rule one"):
        it.step()
    assert open_staging(it.lake, "Staging") is None


def test_null_takes_its_type_from_another_rule_and_is_an_error_alone(make: Make) -> None:
    it = make(one_rule("{id: NULL}", OTHER))
    it.send(it.left, row(1))
    it.send(it.right, row(1, "x"))
    it.step()
    assert it.values() == [{"id": None}, {"id": "x"}]


def test_null_may_wait_for_its_type_until_a_record_needs_it(make: Make) -> None:
    """The rule that gives the type can't be resolved before its topic has a record."""
    it = make(one_rule("{id: NULL}", OTHER).replace("in: $left, ", "in: $left, where: value.op = 'u', "))
    it.send(it.left, row(1))
    it.step()
    assert it.classes(it.left) == {"unmatched": 1}
    it.send(it.left, row(2, op="u"))
    with pytest.raises(EtlError, match=r"rule one, value\.id: NULL has no type"):
        it.step()
    it.send(it.right, row(1, "x"))
    it.step()
    assert it.values() == [{"id": None}, {"id": "x"}]


def test_null_without_a_type_is_an_error(make: Make) -> None:
    it = make(one_rule("{id: in.value.id, nested: {what: NULL}}"))
    it.send(it.left, row(1))
    with pytest.raises(EtlError, match=r"rule one, value\.nested\.what: NULL has no type"):
        it.step()


def test_join_keys_of_two_types_are_an_error(make: Make) -> None:
    it = make(BOTH + JOIN.replace("= right.value.id", "= right.value.v"))
    it.send(it.left, row(1))
    it.send(it.right, row(1))
    with pytest.raises(EtlError, match=r"left\.value\.id is bigint and right\.value\.v is string. CAST"):
        it.step()


def test_a_bad_cast_stops_the_batch_where_the_file_says_so_and_nothing_is_committed(make: Make) -> None:
    strict = one_rule("{n: CAST(in.value.v AS int)}").replace("topic: $left,", "topic: $left, on-bad-record: fail,")
    it = make(strict)
    it.send(it.left, row(1, "12"), row(2, "twelve"))
    with pytest.raises(BadRecords, match="nothing was committed") as failed:
        it.step()
    assert "twelve" in str(failed.value)
    assert "\n" not in str(failed.value)
    assert open_staging(it.lake, "Staging") is None
    mended = it.edited(one_rule("{n: TRY_CAST(in.value.v AS int)}"))
    mended.step()
    assert mended.values() == [{"n": 12}, {"n": None}]


def test_an_expression_that_names_no_column_is_an_error(make: Make) -> None:
    it = make(one_rule("{n: in.value.nothing}"))
    it.send(it.left, row(1))
    with pytest.raises(EtlError, match=r"rule one.*"):
        it.step()


@pytest.mark.slow
def test_a_batch_opens_each_of_its_tables_once_until_it_is_committed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan, the transformation, its next attempt without a failing record, and the commit share one snapshot."""
    it = make(BOTH + JOIN.replace("r: right.value.v", 'r: "CAST(right.value.v AS INT)"'))
    it.send(it.left, row(1, "a"), row(2, "b"))
    it.step()
    it.send(it.right, row(1, "7"), row(2, "no number"))
    it.ingest()
    opens, before = Counter[str](), Counter[str]()
    open_table, commit_batch = tables.open_table, staging.commit_batch

    def counted(uri: str) -> tables.LakeTable | None:
        opens[uri] += 1
        return open_table(uri)

    def committed(*args: Any) -> None:
        before.update(opens)
        commit_batch(*args)

    monkeypatch.setattr(tables, "open_table", counted)
    monkeypatch.setattr(staging, "commit_batch", committed)
    assert it.etl() is not None
    assert it.classes(it.right) == {"done": 1, "quarantined": 1}
    own = [storage.staging_uri(it.lake, "Staging"), *(storage.raw_uri(it.lake, "Raw", t) for t in (it.left, it.right))]
    assert {uri: before[uri] for uri in own} == dict.fromkeys(own, 1)


def test_of_two_batches_over_the_same_records_one_is_committed(make: Make) -> None:
    it = make(one_rule("{id: in.value.id}"))
    it.send(it.left, row(1))
    it.ingest()
    plans = [plan_etl(it.pipeline, "Staging") for _ in range(2)]
    batches = [
        transform(it.spark, plan, {t: read_raw(it.spark, it.pipeline, plan, t) for t in plan.ranges}) for plan in plans
    ]
    commit_staging(it.pipeline, batches[0])
    with pytest.raises(CommitConflict):
        commit_staging(it.pipeline, batches[1])
    assert it.values() == [{"id": 1}]
    assert it.etl() is None


def test_an_output_topic_that_is_not_empty_is_an_error_unless_numbering_begins_at_its_end(make: Make) -> None:
    it = make(one_rule("{id: in.value.id}"))
    create_topic(it.pipeline.kafka, it.out, 1, 1, {})
    producer = Producer(dict(it.pipeline.kafka))
    producer.produce(it.out, b"of another program")
    assert producer.flush(10) == 0
    it.send(it.left, row(1))
    with pytest.raises(KafkaError, match="holds records already"):
        it.step()
    assert open_staging(it.lake, "Staging") is None

    at_end = it.edited(one_rule("{id: in.value.id}").replace("topic: $out, ", "topic: $out, start-at: end, "))
    at_end.step()
    assert [found["kafka"]["offset"] for found in at_end.staged()] == [1]


def test_an_output_topic_that_is_not_there_and_not_to_be_created_is_an_error(make: Make) -> None:
    it = make(one_rule("{id: in.value.id}").replace(", create: {replication-factor: 1}", ""))
    it.send(it.left, row(1))
    with pytest.raises(TopicMissing, match="add create: to the output"):
        it.step()


@pytest.mark.slow
def test_partitions_pair_in_the_order_of_partition_and_offset(make: Make) -> None:
    it = make(BOTH + JOIN, partitions=11)
    it.send(it.left, row(1, "l10"), partition=10)
    it.send(it.left, row(1, "l9"), partition=9)
    it.send(it.right, row(1, "r0"), partition=0)
    it.step()
    assert [found["l"] for found in it.values()] == ["l9"]
    it.send(it.right, row(1, "r1"), partition=1)
    it.step()
    assert [(found["l"], found["r"]) for found in it.values()] == [("l9", "r0"), ("l10", "r1")]


def test_an_edited_rule_widens_the_topic_and_leaves_what_is_staged(make: Make) -> None:
    it = make(one_rule("{id: in.value.id}"))
    it.send(it.left, row(1, "a"))
    it.step()
    edited = it.edited(one_rule("{v: in.value.v, id: in.value.id}"))
    edited.send(it.left, row(2, "b"))
    edited.step()
    assert edited.values() == [{"id": 1, "v": None}, {"id": 2, "v": "b"}]
    assert len({found["schema"] for found in edited.staged()}) == 2


def test_a_backlog_goes_in_batches_and_gives_the_same(make: Make) -> None:
    """The earlier files first, whatever their topic; a record whose counterpart is in a later batch waits for it."""
    it = make(BOTH + JOIN)
    for number in range(3):
        it.send(it.left, row(number), times=[1_000 + number])
        it.send(it.right, row(number), times=[2_000 + number])
        it.ingest()
    made: list[dict[str, int]] = []
    while not (plan := plan_etl(it.pipeline, "Staging", limit=2)).nothing_to_do:
        slices = {topic: read_raw(it.spark, it.pipeline, plan, topic) for topic in plan.ranges}
        batch = transform(it.spark, plan, slices)
        made.append(dict(commit_staging(it.pipeline, batch).counts))
    assert made == [{"pending": 2}, {"pending": 1, "outputs": 1, "done": 2}, {"outputs": 2, "done": 4}]
    assert [value["id"] for value in it.values()] == [0, 1, 2]
    assert it.classes(it.left) == it.classes(it.right) == {"done": 3}


KEYS = BOTH.replace("id bigint, v string", "id bigint, v string, ids array<int>", 1).replace(
    'id bigint, v string"', 'id bigint, v string, ids array<bigint>"'
)
BY_BOTH = JOIN.replace(
    "left.value.id = right.value.id",
    "collate(left.value.v, 'UTF8_LCASE') = collate(right.value.v, 'UTF8_LCASE') AND left.value.ids = right.value.ids",
)


def keyed(v: str, number: int) -> dict[str, object]:
    return {**row(number, v), "ids": [number, 7]}


def without_joins(rows: Callable[[Head], list[dict[str, object]]]) -> Callable[[Head], list[dict[str, object]]]:
    return lambda head: [each for each in rows(head) if each["kind"] != "join"]


@pytest.mark.slow
@pytest.mark.usefixtures("of_each_size")
def test_keys_that_are_equal_pair_whatever_batches_they_come_in(make: Make) -> None:
    """Equal by a collation, and arrays of an int and of a long; the other side has no type yet when the first begins to wait."""
    it = make(KEYS + BY_BOTH)
    it.send(it.left, keyed("Abc", 1), keyed("x", 2), keyed("aBC", 1))
    it.step()
    it.send(it.right, keyed("abC", 1), keyed("X", 3))
    it.step()
    it.send(it.right, keyed("ABC", 1), keyed("X", 2))
    it.step()
    assert [(value["l"], value["r"]) for value in it.values()] == [("Abc", "abC"), ("x", "X"), ("aBC", "ABC")]
    assert it.classes(it.right) == {"done": 3, "pending": 1}


@pytest.mark.slow
def test_records_that_an_older_version_hashed_otherwise_go_on_matching(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That version hashed collated texts and arrays as they were, and did not say by what the records waited."""
    it = make(KEYS + BY_BOTH)
    with monkeypatch.context() as older:
        older.setattr(denorm, "_is_collated", lambda kind: False)
        older.setattr(denorm, "_hashed_type", lambda kind: kind)
        older.setattr(batch, "_is_changed", lambda plan, records: False)
        older.setattr(staging, "head_rows", without_joins(head_rows))
        it.send(it.left, keyed("Abc", 1), keyed("x", 2))
        it.step()
        it.send(it.right, keyed("aBC", 1))
        it.step()
        assert it.classes(it.left) == {"pending": 2}
    it.send(it.right, keyed("X", 2))
    it.step()
    assert [(value["l"], value["r"]) for value in it.values()] == [("Abc", "aBC"), ("x", "X")]
    assert it.classes(it.left) == it.classes(it.right) == {"done": 2}
    assert json.loads(it.head.joins["join"])["hashed"] == ["string collate UTF8_LCASE", "array<double>"]
    assert exactly_once_done_coverage(it.pipeline, "Staging").passed


@pytest.mark.slow
def test_what_waits_goes_through_the_rules_again_once_the_join_was_changed(make: Make) -> None:
    it = make(KEYS + BY_BOTH)
    it.send(it.left, keyed("a", 1), keyed("b", 2))
    it.send(it.right, keyed("c", 1))
    it.step()
    assert it.classes(it.left) == {"pending": 2}
    it = it.edited(KEYS + JOIN)
    it.send(it.right, keyed("d", 2))
    it.step()
    assert [(value["l"], value["r"]) for value in it.values()] == [("a", "c"), ("b", "d")]
    assert exactly_once_done_coverage(it.pipeline, "Staging").passed
    carved = len(it.ledger("pending"))
    it.send(it.left, keyed("e", 3))
    it.step()
    assert len(it.ledger("pending")) == carved + 1, "and only once"


UNTYPED = BOTH.replace('value-format: json, schema: "op string, id bigint, v string"', "value-format: avro")
"""Inputs whose values have no type before the first one comes with its schema."""
UNTYPED_RIGHT = BOTH.replace(
    '$right, pool: Raw, key-format: string, value-format: json, schema: "op string, id bigint, v string"',
    "$right, pool: Raw, key-format: string, value-format: avro",
)
"""The right input's values have no type before the first one."""


SNAPSHOT = JOIN.replace(
    "transforms:\n",
    """transforms:
  - {name: gone, type: stateless, in: $left, where: value.op = 'd', out: $out, key: in.key, value: {id: in.value.id}}
""",
)


@pytest.mark.slow
def test_a_large_batch_of_one_side_alone_waits(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side never had a value, and the topic has its columns from another rule."""
    monkeypatch.setattr(positions, "SMALL", 0)
    monkeypatch.setattr(positions, "BUCKET_RECORDS", 2)
    it = make(UNTYPED_RIGHT + SNAPSHOT)
    it.send(it.right, ("k", None))
    it.send(it.left, row(1, op="d"))
    it.step()
    it.send(it.left, *(row(number) for number in range(6)))
    it.step()
    assert it.values() == [{"id": 1}]
    assert it.classes(it.left) == {"done": 1, "pending": 6}


@pytest.mark.slow
def test_300_000_records_of_one_side_alone_wait(make: Make) -> None:
    it = make(UNTYPED_RIGHT + SNAPSHOT)
    it.send(it.right, ("k", None))
    it.send(it.left, row(1, op="d"))
    it.step()
    for first in range(0, 310_000, 10_000):
        it.send(it.left, *(row(number) for number in range(first, first + 10_000)), times=range(first, first + 10_000))
    it.step()
    assert it.classes(it.left) == {"done": 1, "pending": 310_000}


def test_tombstones_that_come_before_the_first_value_are_taken_by_a_rule_for_them(make: Make) -> None:
    """The type of the key is known, and only the tombstones' rule takes the tombstones."""
    it = make(UNTYPED + RULES)
    it.send(it.left, ("gone", None), ("other", None))
    it.step()
    assert [(found["key"], found["value"]) for found in it.staged()] == [("gone", None)]
    assert it.classes(it.left) == {"done": 1, "dropped": 1}


def test_a_rule_that_takes_such_tombstones_and_needs_their_values_is_an_error(make: Make) -> None:
    rule = "{type: stateless, name: gone, in: $left, where: value IS NULL, out: $out, key: in.value.id, value: null}"
    it = make(UNTYPED + "\ntransforms:\n  - " + rule)
    it.send(it.left, ("gone", None))
    with pytest.raises(EtlError, match=r"rule gone, key: .*only tombstones"):
        it.step()


def test_a_field_of_the_whole_value_waits_for_the_first_value(make: Make) -> None:
    """Only a rule that takes a tombstone stops ETL."""
    rule = "{type: stateless, name: copy, in: $left, out: $out, key: in.key, value: {v: in.value}}"
    it = make(UNTYPED.replace("value-format: avro", "value-format: connect-json") + "\ntransforms:\n  - " + rule)
    it.send(it.left, ("gone", None))
    it.step()
    assert it.classes(it.left) == {"dropped": 1}
    it = it.changed("in: " + it.left, f"where: 'true', in: {it.left}")
    it.send(it.left, ("gone", None))
    with pytest.raises(EtlError, match=r"rule copy, value\.v: it has no type yet\. .*only tombstones"):
        it.step()
    it.send(it.left, ("first", {"schema": {"type": "int64"}, "payload": 5}))
    it.step()
    assert it.values() == [{"v": None}, {"v": 5}]
    assert it.classes(it.left) == {"dropped": 1, "done": 2}
