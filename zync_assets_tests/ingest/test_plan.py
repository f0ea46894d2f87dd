"""Ingest on real topics: what is new, what may not be, and what Kafka's offsets look like when they have gaps."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from hypothesis import given
from hypothesis import strategies as st

from zync_assets import offsets
from zync_assets.checks.remote_checks import reachable
from zync_assets.cli.main import main
from zync_assets.errors import CommitConflict, DataLoss, TopicMissing, TopicRecreated
from zync_assets.ingest.commit import commit_raw
from zync_assets.ingest.plan import earliest, now_millis, plan_ingest, read_input
from zync_assets.kafka.topics import create_topic, delete_topic, topic_states
from zync_assets.lake.log import DataFile
from zync_assets.lake.quarantine_table import quarantine_files
from zync_assets.lake.raw import open_raw
from zync_assets.lake.snapshot import Snapshot
from zync_assets.local.services import Services
from zync_assets.offsets import OffsetRange
from zync_assets_tests.mini import BOTH, JOIN, Mini, framed, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Make = Callable[..., Mini]


@pytest.fixture
def make(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Make:
    """``make()``: a pipeline with topics of its own; ``left``: more keys for the left input."""

    def made(left: str = "", partitions: int = 1) -> Mini:
        text = BOTH.replace("topic: $left, ", f"topic: $left, {left}") + JOIN
        return mini(services, spark, tmp_path, unique, text, partitions)

    return made


def places(it: Mini) -> list[tuple[int, int]]:
    return [(found["kafka"]["partition"], found["kafka"]["offset"]) for found in it.raw(it.left)]


def delete_before(it: Mini, offset: int, partition: int = 0) -> None:
    """What retention does, at once."""
    admin = AdminClient(dict(it.pipeline.kafka))
    place = TopicPartition(it.left, partition, offset)
    for future in admin.delete_records([place]).values():
        future.result(10)


def test_records_come_whole_and_each_once(make: Make) -> None:
    it = make(partitions=2)
    it.send(it.left, row(1, "a"), ("k", None), (None, row(None)), times=[5, 9, 7])
    it.send(it.left, row(2), partition=1)
    commit = it.ingest(it.left)[it.left]
    assert (commit.records, commit.quarantined, dict(commit.until)) == (4, 0, {0: 3, 1: 1})
    assert it.ingest(it.left) == {}
    it.send(it.left, row(3), partition=1)
    it.ingest(it.left)
    rows = it.raw(it.left)
    assert places(it) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert [found["key"] for found in rows] == ["k0", "k", None, "k0", "k0"]
    assert [found["value"] for found in rows[:3]] == [row(1, "a"), None, row(None)]
    assert [int(found["kafka"]["time"].timestamp() * 1000) for found in rows[:3]] == [5, 9, 9]
    assert [int(found["kafka"]["timestamp"].timestamp() * 1000) for found in rows[:3]] == [5, 9, 7]


def test_a_long_backlog_is_ingested_in_the_order_of_time(make: Make) -> None:
    """After new partitions, a key has records in several partitions. A later batch has no older record of the key."""
    it = make(partitions=3)
    day = 86_400_000
    for partition, days in ((2, (1, 2, 2, 3)), (0, (2, 4, 1, 9)), (1, (5, 6, 6, 7))):
        it.send(it.left, *(row(1, str(number)) for number in days), partition=partition, times=[d * day for d in days])
    batches: list[dict[int, int]] = []
    while (plan := plan_ingest(it.pipeline, it.left, limit=3)).ranges:
        batches.append({part.partition: part.end for part in plan.ranges})
        commit_raw(it.pipeline, read_input(it.spark, it.pipeline, plan))
    # The third record of partition 0 is of day 1, after a record of day 4.
    assert batches == [{0: 1, 2: 2}, {2: 4, 0: 2}, {0: 3, 1: 2}, {1: 4, 0: 4}]


def test_a_timestamp_in_the_future_does_not_hide_the_times_after_it(make: Make) -> None:
    """Kafka finds no time in partition 0 after its first record. Ingest would take partition 0 last, with older records."""
    it = make(partitions=2)
    it.send(it.left, row(1), times=[now_millis() + 1_800_000])
    it.ingest(it.left)
    now = now_millis()
    it.send(it.left, row(1, "a"), row(1, "c"), row(1, "e"), times=[now, now + 2, now + 4])
    it.send(it.left, row(1, "b"), row(1, "d"), partition=1, times=[now + 1, now + 3])
    batches: list[dict[int, int]] = []
    while (plan := plan_ingest(it.pipeline, it.left, limit=2)).ranges:
        batches.append({part.partition: part.end for part in plan.ranges})
        commit_raw(it.pipeline, read_input(it.spark, it.pipeline, plan))
    assert batches == [{0: 2, 1: 1}, {0: 3, 1: 2}, {0: 4}]


timed = st.lists(st.lists(st.none() | st.integers(0, 5), max_size=8), min_size=1, max_size=4)


@given(timed, st.integers(1, 12))
def test_the_earliest_offsets_are_those_of_one_sort(topic: list[list[int | None]], limit: int) -> None:
    """``topic``: by partition and offset, the time of a record."""

    def first_at(time: int) -> dict[int, int]:
        return {
            partition: next((at for at, own in enumerate(times) if own is not None and own >= time), len(times))
            for partition, times in enumerate(topic)
        }

    carried = [
        (max((time for time in times[: at + 1] if time is not None), default=-1), partition, at)
        for partition, times in enumerate(topic)
        for at in range(len(times))
    ]
    ranges = [OffsetRange(partition, 0, len(times)) for partition, times in enumerate(topic) if times]
    batch = earliest(ranges, limit, first_at)
    places = [(partition, at) for _, partition, at in sorted(carried)[:limit]]
    assert sorted((part.partition, at) for part in batch for at in range(part.first, part.end)) == sorted(places)


def test_an_empty_topic_beside_a_full_one_is_nothing_to_wait_for(make: Make) -> None:
    it = make(partitions=2)
    it.send(it.left, row(1), partition=1)
    assert set(it.ingest()) == {it.left, it.right}
    assert it.next(it.left) == {0: 0, 1: 1}
    assert it.next(it.right) == {0: 0, 1: 0}
    assert it.ingest() == {}
    it.send(it.right, row(1))
    it.step()
    assert it.values() == [{"id": 1, "l": "", "r": ""}]


def test_a_topic_that_is_not_there_is_an_error(make: Make) -> None:
    it = make()
    delete_topic(it.pipeline.kafka, it.left)
    with pytest.raises(TopicMissing, match=f"topic {it.left} is not there. Create it, or take it out of inputs"):
        it.ingest(it.left)


def test_a_topic_that_is_gone_is_an_error_with_the_cure_that_works(make: Make) -> None:
    it = make()
    it.send(it.left, row(1))
    it.ingest(it.left)
    delete_topic(it.pipeline.kafka, it.left)
    message = rf"{it.left} is gone; it was there when it was ingested .* give the input another pool, and its outputs"
    with pytest.raises(TopicMissing, match=message):
        it.ingest(it.left)
    assert re.search(message, reachable(it.pipeline, it.left).summary)


def test_a_topic_that_was_created_again_is_an_error(make: Make) -> None:
    it = make()
    it.send(it.left, row(1))
    it.ingest(it.left)
    delete_topic(it.pipeline.kafka, it.left)
    create_topic(it.pipeline.kafka, it.left, 1, 1, {})
    it.send(it.left, row(2), row(3))
    with pytest.raises(TopicRecreated, match="deleted and created again"):
        it.ingest(it.left)
    assert places(it) == [(0, 0)]
    assert "deleted and created again" in reachable(it.pipeline, it.left).summary


def test_what_retention_took_is_an_error(make: Make) -> None:
    it = make()
    it.send(it.left, *[row(number) for number in range(4)])
    it.ingest(it.left)
    it.send(it.left, *[row(number) for number in range(4)])
    assert reachable(it.pipeline, it.left).passed
    delete_before(it, 6)
    message = "next offset 4 is below the low watermark 6; 2 offsets are gone"
    with pytest.raises(DataLoss, match=message):
        it.ingest(it.left)
    assert it.next(it.left) == {0: 4}
    check = reachable(it.pipeline, it.left)
    assert not check.passed and message in check.summary


def test_a_single_offset_that_retention_took(make: Make) -> None:
    it = make()
    it.send(it.left, row(1))
    it.ingest(it.left)
    it.send(it.left, row(2), row(3))
    delete_before(it, 2)
    with pytest.raises(DataLoss, match=r"; 1 offset is gone by retention, 1\. Set on-data-loss: continue"):
        it.ingest(it.left)


def test_what_retention_took_is_accounted_for_where_the_file_accepts_it(make: Make) -> None:
    it = make("on-data-loss: continue, ")
    it.send(it.left, *[row(number) for number in range(4)])
    it.step()
    it.send(it.left, *[row(number) for number in range(4)])
    delete_before(it, 6)
    it.step()
    assert places(it) == [(0, offset) for offset in (0, 1, 2, 3, 6, 7)]
    dropped = [(found["first"], found["end"]) for found in it.ledger("dropped")]
    assert dropped == [(4, 6)]
    assert it.classes(it.left) == {"pending": 6}


def test_retention_before_the_first_ingest_is_no_loss(make: Make) -> None:
    it = make()
    it.send(it.left, *[row(number) for number in range(4)])
    delete_before(it, 2)
    it.ingest(it.left)
    assert places(it) == [(0, 2), (0, 3)]


def test_a_partition_that_is_added_later_begins_at_its_start(make: Make) -> None:
    it = make("from: latest, ")
    it.send(it.left, row(1))
    it.ingest(it.left)
    assert it.raw(it.left) == []
    add_partitions(it, 3)
    it.send(it.left, row(2), partition=2)
    it.send(it.left, row(3))
    it.ingest(it.left)
    assert places(it) == [(0, 1), (2, 0)]
    assert it.next(it.left) == {0: 2, 1: 0, 2: 1}


def add_partitions(it: Mini, count: int) -> None:
    admin = AdminClient(dict(it.pipeline.kafka))
    for future in admin.create_partitions([NewPartitions(it.left, count)]).values():
        future.result(10)
    give_up = time.monotonic() + 20
    while len(topic_states(it.pipeline.kafka, [it.left])[it.left].partitions) < count and time.monotonic() < give_up:
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["", "from: latest, "])
def test_what_retention_took_of_a_partition_that_was_added_later_is_a_loss(make: Make, start: str) -> None:
    it = make(start, partitions=2)
    it.send(it.left, row(1))
    it.ingest(it.left)
    known = len(places(it))
    add_partitions(it, 4)
    # The partition was there, and empty, when the pipeline began.
    it.send(it.left, *[row(number) for number in range(2)], partition=1)
    for partition in (2, 3):
        it.send(it.left, *[row(number) for number in range(5)], partition=partition)
    delete_before(it, 3, partition=2)
    delete_before(it, 5, partition=3)
    with pytest.raises(
        DataLoss,
        match="partition 2: next offset 0 is below the low watermark 3; 3 offsets are gone by retention, 0 to 2",
    ):
        it.ingest(it.left)
    assert it.next(it.left) == {0: 1, 1: 0}
    text = BOTH.replace("topic: $left, ", f"topic: $left, {start}on-data-loss: continue, ") + JOIN
    accepting = it.edited(text)
    accepting.step()
    assert places(it)[known:] == [(1, 0), (1, 1), (2, 3), (2, 4)]
    assert it.next(it.left) == {0: 1, 1: 2, 2: 5, 3: 5}
    dropped = [(found["partition"], found["first"], found["end"]) for found in it.ledger("dropped")]
    assert sorted(dropped) == [(2, 0, 3), (3, 0, 5)]
    assert it.ingest(it.left) == {}


@pytest.mark.slow
def test_a_loss_that_leaves_nothing_to_read_is_accounted_for_at_once(make: Make) -> None:
    it = make("on-data-loss: continue, ")
    it.send(it.left, row(1))
    it.step()
    it.send(it.left, row(2), row(3))
    delete_before(it, 3)
    done = CliRunner().invoke(main, ["from-kafka", str(it.pipeline.path), "--topic", it.left, "--format", "json"])
    said = json.loads(done.stdout)
    assert (said["records"], said["quarantined"], said["lost_offsets"]) == (0, 0, 2), "nothing is in quarantine"
    it.step()
    assert it.next(it.left) == {0: 3}
    assert [(found["first"], found["end"]) for found in it.ledger("dropped")] == [(1, 3)]
    assert plan_ingest(it.pipeline, it.left).nothing_to_do


def test_a_topic_may_begin_at_a_time(make: Make) -> None:
    it = make("from: 2023-11-14T22:13:20.002Z, ")
    it.send(it.left, *[row(number) for number in range(4)])
    it.ingest(it.left)
    assert places(it) == [(0, 2), (0, 3)]


def test_aborted_transactions_and_markers_leave_gaps(make: Make, unique: str) -> None:
    it = make()
    producer = Producer({**it.pipeline.kafka, "transactional.id": unique, "log_level": 0})
    producer.init_transactions(20)
    for number, commit in enumerate([True, False, True]):
        producer.begin_transaction()
        for again in range(2):
            producer.produce(it.left, json.dumps(row(10 * number + again)).encode(), b"k", 0)
        producer.flush(10)
        if commit:
            producer.commit_transaction(10)
        else:
            producer.abort_transaction(10)
    await_end(it, 9)
    it.step()
    assert [found["value"]["id"] for found in it.raw(it.left)] == [0, 1, 20, 21]
    assert places(it) == [(0, 0), (0, 1), (0, 6), (0, 7)]
    assert it.next(it.left) == {0: 9}
    assert it.classes(it.left) == {"pending": 4}

    # Ingest reads neither the records of an open transaction nor later records.
    producer.begin_transaction()
    producer.produce(it.left, json.dumps(row(30)).encode(), b"k", 0)
    producer.flush(10)
    it.send(it.left, row(31))
    assert it.ingest(it.left) == {}
    producer.abort_transaction(10)
    await_end(it, 12)
    it.step()
    assert [found["value"]["id"] for found in it.raw(it.left)][4:] == [31]
    assert it.classes(it.left) == {"pending": 5}


def await_end(it: Mini, end: int) -> None:
    """A transaction is over a moment before its marker is written."""
    give_up = time.monotonic() + 20
    while topic_states(it.pipeline.kafka, [it.left])[it.left].partitions[0].end < end:
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_a_range_of_nothing_but_aborted_records_is_passed(make: Make, unique: str) -> None:
    it = make()
    producer = Producer({**it.pipeline.kafka, "transactional.id": unique, "log_level": 0})
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce(it.left, b"{}", b"k", 0)
    producer.flush(10)
    producer.abort_transaction(10)
    await_end(it, 2)
    it.step()
    assert it.next(it.left) == {0: 2}
    assert it.head.seen(it.left) == {0: 2}
    assert it.ingest(it.left) == {}


def test_a_timestamp_in_the_future_counts_as_the_time_of_ingest(make: Make) -> None:
    it = make()
    soon = int(time.time() * 1000) + 1_800_000
    it.send(it.left, row(1), row(2), times=[soon, 1000])
    it.ingest(it.left)
    times = [int(found["kafka"]["time"].timestamp() * 1000) for found in it.raw(it.left)]
    assert times[0] == times[1] < soon
    assert times[0] > soon - 1_800_000 - 60_000
    assert int(it.raw(it.left)[0]["kafka"]["timestamp"].timestamp() * 1000) == soon


def millis(moment: datetime) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def side_files(it: Mini) -> list[DataFile]:
    """The files of the quarantine whose entries count."""
    snapshot = Snapshot(it.pipeline)
    state = snapshot.raw(it.left)
    return quarantine_files(state, snapshot.quarantine(it.left)) if state else []


def all_times(it: Mini) -> tuple[dict[int, int], dict[int, int]]:
    """Offset → carried time, of the raw table's records, and of its quarantine's."""
    import pyarrow.parquet as pq

    files = side_files(it)
    aside = [
        entry
        for item in files
        for entry in pq.read_table(f"{it.lake}/~quarantine/Raw/{it.left}/{item.path}").to_pylist()
    ]
    both = [{row["kafka"]["offset"]: millis(row["kafka"]["time"]) for row in rows} for rows in (it.raw(it.left), aside)]
    return both[0], both[1]


@pytest.mark.parametrize("cut", ["one batch", "several batches", "several tasks"])
def test_a_time_is_the_highest_timestamp_up_to_the_record_wherever_ingest_is_cut(
    make: Make, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    """Quarantined records count: what a record is has no say in when it came."""
    it = make()
    sent = [
        (row(1), 3000),
        (b"garbage", 9000),
        (row(2), 1000),
        (b"garbage", 2000),
        (row(3), 9500),
        (row(4), 800),
        (row(5), 9400),
        (row(6), 9600),
    ]
    if cut == "several tasks":
        monkeypatch.setattr(offsets, "LEAST", 2)
    for records in [sent[at : at + 2] for at in range(0, 8, 2)] if cut == "several batches" else [sent]:
        it.send(it.left, *(record for record, _ in records), times=[time for _, time in records])
        it.ingest(it.left)
    files = open_raw(it.lake, "Raw", it.left).files  # type: ignore[union-attr]
    assert len(files) == (1 if cut == "one batch" else 4)
    times, aside = all_times(it)
    assert times == {0: 3000, 2: 9000, 4: 9500, 5: 9500, 6: 9500, 7: 9600}
    assert aside == {1: 9000, 3: 9000}
    assert [(item.min_time, item.max_time) for item in files][-1][1] == 9600
    # Nothing is left of files that were written twice.
    assert len(list(Path(it.lake, "Raw", it.left).glob("*.parquet"))) == len(files)


def test_of_two_ingests_from_one_state_one_is_committed_with_its_quarantine(make: Make) -> None:
    it = make()
    it.send(it.left, row(0))
    it.ingest(it.left)
    it.send(it.left, row(1), b"garbage", row(2))
    one = plan_ingest(it.pipeline, it.left)
    it.send(it.left, b"garbage too")
    other = plan_ingest(it.pipeline, it.left)
    commit_raw(it.pipeline, read_input(it.spark, it.pipeline, one))
    with pytest.raises(CommitConflict):
        commit_raw(it.pipeline, read_input(it.spark, it.pipeline, other))
    assert it.next(it.left) == {0: 4}
    assert places(it) == [(0, 0), (0, 1), (0, 3)]
    assert quarantined(it) == [2]
    it.ingest(it.left)
    assert quarantined(it) == [2, 4]


def quarantined(it: Mini) -> list[int]:
    import pyarrow.parquet as pq

    files = side_files(it)
    found = [
        entry["kafka"]["offset"]
        for item in files
        for entry in pq.read_table(f"{it.lake}/~quarantine/Raw/{it.left}/{item.path}").to_pylist()
    ]
    return sorted(offset for offset in found if offset < it.next(it.left)[0])


def test_a_batch_may_be_narrowed_and_limited(make: Make) -> None:
    it = make(partitions=2)
    for partition in range(2):
        it.send(it.left, *[row(number) for number in range(5)], partition=partition)
    plan = plan_ingest(it.pipeline, it.left, within=[OffsetRange(1, 0, 3)])
    commit_raw(it.pipeline, read_input(it.spark, it.pipeline, plan))
    assert it.next(it.left) == {0: 0, 1: 3}
    plan = plan_ingest(it.pipeline, it.left, limit=4)
    assert plan.lag == 7
    # The records of partition 0 are earlier than the fourth one of partition 1.
    assert plan.ranges == (OffsetRange(0, 0, 4),)
    commit_raw(it.pipeline, read_input(it.spark, it.pipeline, plan))
    it.ingest(it.left)
    assert places(it) == [(partition, offset) for partition in range(2) for offset in range(5)]


AVRO = BOTH.replace('value-format: json, schema: "op string, id bigint, v string"', "value-format: avro")


def test_writers_with_several_schemas_share_a_range_and_added_fields_widen_the_table(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    from zync_assets.kafka.registry import Registry
    from zync_assets.pipeline import RegistryConfig

    it = mini(services, spark, tmp_path, unique, AVRO + JOIN)
    registry = Registry(RegistryConfig(services.registry_url))

    def writer(*extra: dict[str, Any]) -> Callable[[dict[str, Any]], bytes]:
        fields = [{"name": "id", "type": "long"}, {"name": "v", "type": "string"}, *extra]
        schema = {"type": "record", "name": "Row", "fields": fields}
        number = registry.register(f"{it.left}-value", json.dumps(schema))
        return lambda value: framed(number, schema, value)

    note = {"name": "note", "type": ["null", "string"], "default": None}
    vip = {"name": "deep", "default": None, "type": ["null", {"type": "record", "name": "Deep", "fields": [
        {"name": "vip", "type": "boolean"}]}]}  # fmt: skip
    old, new, newest = writer(), writer(note), writer(note, vip)
    it.send(it.left, old({"id": 1, "v": "a"}), new({"id": 2, "v": "b", "note": "n"}), old({"id": 3, "v": "c"}))
    it.ingest(it.left)
    it.send(it.left, newest({"id": 4, "v": "d", "note": None, "deep": {"vip": True}}), old({"id": 5, "v": "e"}))
    commit = it.ingest(it.left)[it.left]
    assert set(commit.added_fields) == {"value.deep", "value.deep.vip"}
    assert [found["value"] for found in it.raw(it.left)] == [
        {"id": 1, "v": "a", "note": None, "deep": None},
        {"id": 2, "v": "b", "note": "n", "deep": None},
        {"id": 3, "v": "c", "note": None, "deep": None},
        {"id": 4, "v": "d", "note": None, "deep": {"vip": True}},
        {"id": 5, "v": "e", "note": None, "deep": None},
    ]
    assert len({found["value_schema_id"] for found in it.raw(it.left)}) == 3
