"""Publishing on a real topic: the record at offset k is staging's, wherever a publisher stopped and whoever else wrote."""

from __future__ import annotations

import json
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from confluent_kafka import Producer

from zync_assets.audit import coverage, guard
from zync_assets.checks.remote_checks import staging_equals_topic
from zync_assets.cli.main import main
from zync_assets.errors import (
    CheckFailed,
    ForeignRecord,
    KafkaError,
    LakeError,
    RecordTooLarge,
    TopicMissing,
    TopicRecreated,
)
from zync_assets.kafka.registry import Registry
from zync_assets.kafka.topics import create_topic, delete_topic, topic_states
from zync_assets.lake import tables
from zync_assets.lake.check_results import Look, keep_failure, keep_pass, open_check_state
from zync_assets.lake.publication import commit_publish_state, open_publish_state
from zync_assets.lake.raw import open_raw
from zync_assets.lake.snapshot import Snapshot
from zync_assets.lake.staging import open_staging
from zync_assets.lake.storage import check_uri, publish_uri
from zync_assets.local.services import Services
from zync_assets.offsets import OffsetRange
from zync_assets.publish import commit as step
from zync_assets.publish.commit import recreate_topic
from zync_assets.publish.encoding import encoded_rows, staged_topic
from zync_assets.publish.plan import plan_publish
from zync_assets_tests.checks.damage import change_account, edit
from zync_assets_tests.kafka.conftest import await_end
from zync_assets_tests.kafka.test_topics import delete_records
from zync_assets_tests.mini import BOTH, Mini, mini, openings, read_topic, row
from zync_assets_tests.odd_topics import open_transaction

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RULE = """
transforms:
  - {name: copy, type: stateless, in: $left, out: $out, key: in.key, value: {id: in.value.id, v: in.value.v}}
"""
Make = Callable[..., Mini]


@pytest.fixture
def make(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Make:
    """``make(5)``: a pipeline with topics of its own and 5 staged records."""

    def made(count: int, output: str = "") -> Mini:
        text = BOTH.replace("topic: $out, ", f"topic: $out, {output}") + RULE
        it = mini(services, spark, tmp_path, unique, text)
        stage(it, range(count))
        return it

    return made


def stage(it: Mini, numbers: range) -> None:
    it.send(it.left, *[row(number, f"v{number}") for number in numbers])
    it.step()


def ids(it: Mini) -> list[tuple[int, Any]]:
    """(offset, id) of the records in the output topic."""
    return [
        (offset, json.loads(value)["id"] if value is not None else None)
        for offset, _, value in read_topic(it.pipeline, it.out)
    ]


def write(it: Mini, *values: bytes) -> None:
    """As another program would."""
    producer = Producer({**it.pipeline.kafka, "linger.ms": 0})
    for value in values:
        producer.produce(it.out, value, b"foreign", 0)
    assert producer.flush(10) == 0


def announce(it: Mini, window: int, verified: int = 0) -> None:
    """Commit like a publisher that was killed after the announcement of a window."""
    found = topic_states(it.pipeline.kafka, [it.out])[it.out]
    before = open_publish_state(it.lake, "Staging", it.out)
    commit_publish_state(it.lake, "Staging", before, window=window, verified_end=verified, topic_id=found.topic_id)


def test_all_that_is_staged_is_published_and_then_nothing_is_to_do(make: Make) -> None:
    it = make(3)
    commit = it.publish()
    assert (commit.records, commit.verified_records, commit.ranges[0].first) == (3, 0, 0)
    assert plan_publish(it.pipeline, it.out).nothing_to_do
    stage(it, range(3, 5))
    commit = it.publish()
    assert (commit.records, commit.verified_records, commit.ranges[0].first) == (2, 0, 3)
    assert ids(it) == [(number, number) for number in range(5)]


@pytest.mark.parametrize("task", [100, 3])
def test_windows_follow_each_other(make: Make, monkeypatch: pytest.MonkeyPatch, task: int) -> None:
    monkeypatch.setattr(step, "WINDOW_RECORDS", 2)
    monkeypatch.setattr(step, "TASK_RECORDS", task)
    it = make(5)
    it.publish()
    assert ids(it) == [(number, number) for number in range(5)]
    done = open_publish_state(it.lake, "Staging", it.out)
    assert (done.window, done.verified_end) == (5, 5)


def test_a_rule_that_is_edited_while_rows_wait_does_not_change_them(make: Make) -> None:
    it = make(2)
    edited = it.edited(BOTH + RULE.replace("id: in.value.id", "id: -in.value.id"))
    stage(edited, range(2, 3))
    edited.publish()
    assert ids(it) == [(0, 0), (1, 1), (2, -2)]


@pytest.mark.parametrize("sent", [0, 2, 5])
def test_what_a_killed_publisher_sent_is_verified_and_the_rest_follows(make: Make, sent: int) -> None:
    it = make(5)
    create_topic(it.pipeline.kafka, it.out, 1, 1, {})
    announce(it, window=5)
    producer = Producer({**it.pipeline.kafka, "linger.ms": 0})
    for found in it.staged()[:sent]:
        producer.produce(it.out, json.dumps(found["value"], separators=(",", ":")), found["key"], 0)
    assert producer.flush(10) == 0
    commit = it.publish()
    assert (commit.verified_records, commit.records) == (sent, 5 - sent)
    assert ids(it) == [(number, number) for number in range(5)]
    assert plan_publish(it.pipeline, it.out).nothing_to_do


@pytest.mark.slow
def test_records_that_were_published_under_other_ids_of_the_registry_are_staging_s(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registry that was created anew has other ids, and gives the old ones to other schemas."""
    text = BOTH.replace("value-format: json, create", "value-format: avro, create") + RULE
    it = mini(services, spark, tmp_path, unique, text)
    stage(it, range(3))
    register = Registry.register
    with monkeypatch.context() as before:
        before.setattr(Registry, "register", lambda *given: register(*given) + 1_000_000)
        it.publish()
    announce(it, window=3)
    commit = it.publish()
    assert (commit.verified_records, commit.records) == (3, 0)
    assert staging_equals_topic(it.pipeline, it.out).passed
    # The same bytes under an id that nothing was published with are somebody else's.
    stage(it, range(3, 4))
    announce(it, window=4, verified=3)
    state = open_staging(it.lake, "Staging")
    assert state is not None
    [rows] = encoded_rows(staged_topic(state, it.out, it.pipeline.registry), OffsetRange(0, 3, 4))
    producer = Producer({**it.pipeline.kafka, "linger.ms": 0})
    value = (2_000_000).to_bytes(4)
    producer.produce(it.out, b"\0" + value + rows["value"][0].as_py()[5:], rows["key"][0].as_py(), 0)
    assert producer.flush(10) == 0
    with pytest.raises(ForeignRecord, match="the record at offset 3"):
        it.publish()
    assert not staging_equals_topic(it.pipeline, it.out).passed


def test_a_foreign_record_within_an_announced_window_is_found_and_named(make: Make) -> None:
    it = make(5)
    create_topic(it.pipeline.kafka, it.out, 1, 1, {})
    announce(it, window=5)
    write(it, b"{}")
    with pytest.raises(
        ForeignRecord, match=rf"topic {it.out}, partition 0: the record at offset 0 .* --recreate {it.out}"
    ):
        it.publish()
    assert len(read_topic(it.pipeline, it.out)) == 1


def test_a_foreign_record_after_the_staged_ones_is_found_and_recreating_is_the_way_back(make: Make) -> None:
    it = make(3)
    it.publish()
    write(it, b"{}")
    with pytest.raises(ForeignRecord, match="the record at offset 3 is not"):
        plan_publish(it.pipeline, it.out)
    stage(it, range(3, 6))
    with pytest.raises(ForeignRecord, match="the record at offset 3 is not") as found:
        it.publish()
    _, remedy = str(found.value).split("Stop that program, then: zync ")
    assert CliRunner().invoke(main, shlex.split(remedy)).exit_code == 0
    assert ids(it) == [(number, number) for number in range(6)]


def test_a_topic_that_was_created_again_is_an_error(make: Make) -> None:
    it = make(3)
    it.publish()
    delete_topic(it.pipeline.kafka, it.out)
    with pytest.raises(TopicMissing, match=f"--recreate {it.out}"):
        plan_publish(it.pipeline, it.out)
    create_topic(it.pipeline.kafka, it.out, 1, 1, {})
    with pytest.raises(TopicRecreated, match=f"--recreate {it.out}"):
        plan_publish(it.pipeline, it.out)
    recreate_topic(it.pipeline, it.out)
    it.publish()
    assert ids(it) == [(0, 0), (1, 1), (2, 2)]


def test_a_topic_that_another_program_creates_at_once_is_not_taken_for_ours(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brokers may create the topic that a consumer still asks for, with properties of their own."""
    it = make(3)
    it.publish()

    def delete(kafka: Mapping[str, str], topic: str) -> None:
        delete_topic(kafka, topic)
        create_topic(kafka, topic, 1, 1, {})

    with monkeypatch.context() as patch:
        patch.setattr(step, "delete_topic", delete)
        with pytest.raises(KafkaError, match=r"another program created it at once.* stop the programs that read"):
            recreate_topic(it.pipeline, it.out)
    with pytest.raises(TopicRecreated):
        plan_publish(it.pipeline, it.out)
    recreate_topic(it.pipeline, it.out)
    assert it.publish().records == 3


def test_a_topic_that_was_numbered_and_created_again_before_the_first_publish_is_an_error(make: Make) -> None:
    it = make(0)
    create_topic(it.pipeline.kafka, it.out, 1, 1, {})
    stage(it, range(2))
    delete_topic(it.pipeline.kafka, it.out)
    create_topic(it.pipeline.kafka, it.out, 1, 1, {})
    with pytest.raises(TopicRecreated):
        plan_publish(it.pipeline, it.out)


def test_numbering_may_begin_at_the_topic_s_end(make: Make) -> None:
    it = make(0, "start-at: end, ")
    create_topic(it.pipeline.kafka, it.out, 1, 1, {})
    write(it, b'{"id": "theirs"}', b'{"id": "theirs"}')
    stage(it, range(2))
    it.publish()
    assert ids(it) == [(0, "theirs"), (1, "theirs"), (2, 0), (3, 1)]


@pytest.mark.parametrize("start", ["", "start-at: end, "], ids=["empty", "end"])
def test_numbering_does_not_begin_at_an_open_transaction(make: Make, unique: str, start: str) -> None:
    it = make(0, start)
    create_topic(it.pipeline.kafka, it.out, 1, 1, {})
    producer = open_transaction(it.pipeline.kafka, it.out, unique, b'{"id": "theirs"}')
    with pytest.raises(KafkaError, match="partition 0 has an open transaction of another program"):
        stage(it, range(2))
    producer.commit_transaction(20)
    # The broker answers before it ends the transaction in the topic.
    await_end({**it.pipeline.kafka}, it.out, 2)
    if not start:
        with pytest.raises(KafkaError, match=r"holds records already \(its ends: partition 0: 2\)"):
            it.etl()
        return
    it.etl()
    it.publish()
    assert ids(it) == [(0, "theirs"), (2, 0), (3, 1)]


def test_a_record_that_is_too_large_stops_before_anything_of_its_window_is_sent_past_it(make: Make) -> None:
    it = make(2, "")
    it.send(it.left, row(2, "x" * 5000), row(3))
    it.step()
    create_topic(it.pipeline.kafka, it.out, 1, 1, {"max.message.bytes": "2000"})
    with pytest.raises(RecordTooLarge, match="offset 2"):
        it.publish()
    assert [offset for offset, _ in ids(it)] == list(range(len(ids(it))))
    assert len(ids(it)) <= 2


def test_two_topics_of_one_form_each_have_their_own_records(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    form = "key-format: string, value-format: string, create: {replication-factor: 1}}"
    outputs = f"outputs:\n  - {{topic: $out, pool: Staging, {form}\n  - {{topic: $out.b, pool: Staging, {form}\n"
    rules = "transforms:\n" + "".join(
        f"  - {{name: {side}, type: stateless, in: ${side}, out: {out}, key: null, value: in.value.v}}\n"
        for side, out in (("left", "$out"), ("right", "$out.b"))
    )
    it = mini(services, spark, tmp_path, unique, BOTH[: BOTH.index("outputs:")] + outputs + rules)
    it.send(it.left, row(1, "one"))
    it.send(it.right, row(2, "two"))
    it.step()
    for topic, value in ((it.out, b"one"), (f"{it.out}.b", b"two")):
        it.publish(topic)
        assert read_topic(it.pipeline, topic) == [(0, None, value)]


def test_a_publish_opens_each_version_of_a_table_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan, the guard and the commit share one snapshot. A table is opened again only after a commit to it."""
    it = make(3)
    opened = openings(monkeypatch)
    it.publish()
    assert set(Counter(opened).values()) == {1}
    versions = {name: [version for other, version in opened if other == name] for name, _ in opened}
    # Both inputs are ingested already. The guard keeps the results of two checks; publish announces and verifies.
    assert {name: len(found) for name, found in versions.items()} == {
        "~published/Staging": 3,
        "Staging": 1,
        "~checked/Staging": 3,
        f"Raw/{it.left}": 1,
        f"~quarantine/Raw/{it.left}": 1,
        "~checked/Raw": 1,
    }
    opened.clear()
    assert plan_publish(it.pipeline, it.out).nothing_to_do
    assert [name for name, _ in opened] == ["~published/Staging", "Staging"]


UNMATCHED = RULE.replace("type: stateless,", "type: stateless, where: \"value.op = 'c'\",")


def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose outputs' sources the guard reads from now on."""
    found: list[str] = []
    read = coverage.read_columns

    def noted(uri: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        found.append(uri)
        return read(uri, columns)

    monkeypatch.setattr(coverage, "read_columns", noted)
    return found


def test_what_passed_the_guard_is_not_looked_at_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in a lake of before the guard kept what it found: it begins at what is not published."""
    it = make(3)
    files = looked_at(monkeypatch)
    it.publish()
    assert len(files) == 1
    stage(it, range(3, 5))
    it.publish()
    assert len(files) == 2
    state = open_staging(it.lake, "Staging")
    assert state is not None
    guard.refuse_unsound(Snapshot(it.pipeline), it.out)
    assert [Path(uri).name for uri in files] == [Path(item.path).name for item in state.output_files(it.out)]
    shutil.rmtree(Path(it.lake) / "~checked")
    tables.forget(check_uri(it.lake, "Staging"))
    guard.refuse_unsound(Snapshot(it.pipeline), it.out)
    stage(it, range(5, 6))
    it.publish()
    assert len(files) == 3
    assert ids(it) == [(number, number) for number in range(6)]


def test_a_damaged_account_is_never_published_and_the_printed_command_is_the_way_out(make: Make) -> None:
    """Damage of a record that made no output: it lies outside of what is to be published."""
    it = make(2)
    it.publish()
    edited = it.edited(BOTH + UNMATCHED)
    edited.send(it.left, row(7, op="x"), row(2))
    edited.step()
    state = open_staging(it.lake, "Staging")
    assert state is not None
    change_account(state, edit(lambda entry: {**entry, "kind": "done"}, kind="unmatched"))
    with pytest.raises(CheckFailed, match=r"Nothing was published\. Repair the lake; then this lifts the block: "):
        edited.publish()
    with pytest.raises(CheckFailed, match="exactly_once_done_coverage") as refused:
        recreate_topic(edited.pipeline, it.out)
    assert len(ids(it)) == 2
    stage(edited, range(8, 9))
    change_account(state, edit(lambda entry: {**entry, "kind": "unmatched"}, kind="done", count=1))
    with pytest.raises(CheckFailed, match="check exactly_once_done_coverage of Staging failed over"):
        edited.publish()
    _, remedy = str(refused.value).split("this lifts the block: zync ")
    assert CliRunner().invoke(main, shlex.split(remedy)).exit_code == 0
    edited.publish()
    assert [found for _, found in ids(it)] == [0, 1, 2, 8]


def damage(uri: str) -> None:
    """Truncate the log of a table, before another process opens the table."""
    for entry in Path(uri, "_delta_log").glob("*.json"):
        entry.write_text(entry.read_text()[:20])
    tables.forget(uri)


def test_where_the_record_of_what_is_published_is_damaged_the_topic_tells_it_again(make: Make) -> None:
    it = make(3)
    it.publish()
    for count in (5, 7):
        damage(uri := publish_uri(it.lake, "Staging"))
        with pytest.raises(
            LakeError, match=rf"{uri}: the Delta log can't be read: .*\. Remove the folder of this table: "
        ):
            it.publish()
        shutil.rmtree(uri)
        stage(it, range(count - 2, count))
        it.publish()
        assert ids(it) == [(number, number) for number in range(count)]
    damage(uri)
    shutil.rmtree(uri)
    write(it, b"{}")
    with pytest.raises(ForeignRecord, match="the record at offset 7 is not"):
        it.publish()


def test_a_topic_that_was_cut_is_published_again_where_the_lake_does_not_know_what_is_published(make: Make) -> None:
    it = make(3)
    it.publish()
    uri, away = publish_uri(it.lake, "Staging"), f"{it.lake}-away"
    shutil.move(uri, away)
    tables.forget(uri)
    delete_records(dict(it.pipeline.kafka), it.out, 2)
    stage(it, range(3, 4))
    with pytest.raises(ForeignRecord, match=rf"offset 0 is gone .* {uri} was removed, put it back") as caught:
        it.publish()
    shutil.move(away, uri)
    assert it.publish().records == 1
    shutil.rmtree(uri)
    tables.forget(uri)
    command = shlex.split(str(caught.value).rpartition("zync ")[2])
    assert CliRunner().invoke(main, command).exit_code == 0
    assert ids(it) == [(number, number) for number in range(4)]


def test_where_the_results_of_checks_are_damaged_the_checks_find_them_again(make: Make) -> None:
    it = make(2)
    it.publish()
    edited = it.edited(BOTH + UNMATCHED)
    edited.send(it.left, row(7, op="x"), row(2))
    edited.step()
    state = open_staging(it.lake, "Staging")
    assert state is not None
    change_account(state, edit(lambda entry: {**entry, "kind": "done"}, kind="unmatched"))
    with pytest.raises(CheckFailed, match="exactly_once_done_coverage"):
        edited.publish()
    damage(uri := check_uri(it.lake, "Staging"))
    with pytest.raises(LakeError, match=rf"{uri}: the Delta log can't be read: .*\. Remove the folder of this table, "):
        edited.publish()
    shutil.rmtree(uri)
    assert CliRunner().invoke(main, ["check", str(edited.pipeline.path)]).exit_code == 1
    with pytest.raises(CheckFailed, match="exactly_once_done_coverage"):
        edited.publish()
    assert len(ids(it)) == 2


def test_a_raw_table_that_failed_its_check_is_not_transformed(make: Make) -> None:
    it = make(1)
    state = open_raw(it.lake, "Raw", it.left)
    assert state is not None
    look = Look("no_unexplained_loss", f"Raw/{it.left}", state.table_id, {it.left: (OffsetRange(0, 0, 1),)})
    keep_failure(open_check_state(it.lake, "Raw"), look, "a record is missing.")
    it.send(it.left, row(1))
    with pytest.raises(CheckFailed, match=r"a record is missing\. Nothing was transformed"):
        it.step()
    with pytest.raises(CheckFailed, match=r"a record is missing\. Nothing was published"):
        it.publish()
    keep_pass(open_check_state(it.lake, "Raw"), look)
    assert it.etl() is not None
    it.publish()
