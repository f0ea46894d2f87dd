"""Ranges of real topics: what is in them, where they end, and what is an error."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException, Producer

from zync_assets.codecs import arrays
from zync_assets.errors import BrokerUnavailable, DataLoss, TopicMissing, TopicTruncated
from zync_assets.kafka import reader
from zync_assets.kafka.client import Connection
from zync_assets.kafka.reader import MARK_DISTANCE, mark_of, read_range
from zync_assets.kafka.topics import create_topic, delete_topic, topic_states
from zync_assets.kafka.writer import InOrder
from zync_assets.kafka.zero_copy import HEADERS, LATEST, RECORD_SCHEMA, timestamps
from zync_assets.offsets import Mark
from zync_assets_tests.kafka.conftest import Fill, await_end
from zync_assets_tests.kafka.test_topics import delete_records


@pytest.fixture(params=["by plain Python", "by compiled code"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many records a range has, it is read alike."""
    monkeypatch.setattr(arrays, "ENOUGH", 0 if request.param == "by compiled code" else 1 << 40)


@pytest.fixture
def soon_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic that is unknown is waited for a second and not for five: this broker comes back from nowhere."""
    monkeypatch.setattr(reader, "PROPAGATION", 1.0)
    monkeypatch.setattr(reader, "_PROMISES", {**reader._PROMISES, "topic.metadata.propagation.max.ms": 1000})


def end_of(kafka: dict[str, str], topic: str) -> int:
    return topic_states(kafka, [topic])[topic].partitions[0].end


def read(kafka: dict[str, str], topic: str, first: int, end: int) -> pa.Table:
    return pa.Table.from_batches(read_range(kafka, topic, 0, first, end), RECORD_SCHEMA)


def values(kafka: dict[str, str], topic: str, first: int, end: int) -> dict[int, bytes | None]:
    table = read(kafka, topic, first, end)
    return dict(zip(table["offset"].to_pylist(), table["value"].to_pylist(), strict=True))


@pytest.mark.usefixtures("both_ways")
def test_a_header_s_name_may_hold_any_text(kafka: dict[str, str], topic: str) -> None:
    """Kafka counts the bytes of a name, and a zero byte is one of them."""
    rows: list[list[dict[str, Any]] | None] = [
        [{"key": "a", "value": b"1"}, {"key": "é" * 300, "value": None}],
        [
            {"key": "a\0b", "value": None},
            {"key": "", "value": b""},
            {"key": "\0", "value": b"\0"},
            {"key": "a", "value": b"2"},
        ],
        None,
        [{"key": "a\0\0", "value": b"3"}],
        [],
        [{"key": "z", "value": None}],
    ]
    records = pa.record_batch(
        {"key": pa.nulls(6, pa.binary()), "value": pa.array([b"v"] * 6), "headers": pa.array(rows, HEADERS)}
    )
    with InOrder(kafka, topic, 0, 0, "zync to-kafka") as writer:
        writer.write(records.slice(0, 2))
        writer.write(records.slice(2))
    assert read(kafka, topic, 0, 6)["headers"].to_pylist() == [row or None for row in rows]


@pytest.mark.usefixtures("both_ways")
def test_a_record_comes_with_all_that_it_has(kafka: dict[str, str], topic: str, fill: Fill) -> None:
    fill(
        {"key": b"k", "value": b"v", "timestamp": 1234, "headers": [("a", b"1"), ("a", None), ("b", b"")]},
        {"key": None, "value": None, "timestamp": 5678},
        {"key": b"", "value": b"", "timestamp": 9},
    )
    assert read(kafka, topic, 0, 3).to_pylist() == [
        {
            "offset": 0,
            "timestamp": 1234,
            "headers": [{"key": "a", "value": b"1"}, {"key": "a", "value": None}, {"key": "b", "value": b""}],
            "key": b"k",
            "value": b"v",
        },
        {"offset": 1, "timestamp": 5678, "headers": None, "key": None, "value": None},
        {"offset": 2, "timestamp": 9, "headers": None, "key": b"", "value": b""},
    ]


@pytest.mark.usefixtures("both_ways")
def test_a_range_in_the_middle(kafka: dict[str, str], topic: str, fill: Fill) -> None:
    fill(*"abcdef")
    assert values(kafka, topic, 2, 4) == {2: b"c", 3: b"d"}


@pytest.mark.parametrize(("first", "end"), [(0, 0), (2, 2), (2, 1)])
def test_an_empty_range_has_no_batches(kafka: dict[str, str], topic: str, fill: Fill, first: int, end: int) -> None:
    fill("a", "b")
    assert list(read_range(kafka, topic, 0, first, end)) == []


@pytest.mark.usefixtures("both_ways")
def test_batches_keep_to_their_limits(kafka: dict[str, str], topic: str, fill: Fill) -> None:
    fill(*(b"x" * 1000 for _ in range(5000)))
    by_records = [len(batch) for batch in read_range(kafka, topic, 0, 0, 5000, batch_records=700)]
    by_bytes = [batch.nbytes for batch in read_range(kafka, topic, 0, 0, 5000, batch_bytes=100_000)]
    assert sum(by_records) == 5000
    assert max(by_records) <= 1400
    assert max(by_bytes) < 1_200_000
    assert len(by_bytes) > 5


@pytest.mark.usefixtures("both_ways")
def test_aborted_transactions_and_markers_are_not_there(
    kafka: dict[str, str], topic: str, transactional: Producer
) -> None:
    for value, commit in (("one", True), ("two", False), ("three", True), ("four", False)):
        transactional.begin_transaction()
        transactional.produce(topic, value, partition=0)
        transactional.flush(10)
        (transactional.commit_transaction if commit else transactional.abort_transaction)(10)
    await_end(kafka, topic, 8)
    assert values(kafka, topic, 0, 8) == {0: b"one", 4: b"three"}
    # A range that holds nothing visible, at the end and in the middle.
    assert values(kafka, topic, 5, 8) == {}
    assert values(kafka, topic, 1, 3) == {}


@pytest.mark.usefixtures("both_ways")
def test_a_range_ends_before_an_open_transaction(
    kafka: dict[str, str], topic: str, fill: Fill, transactional: Producer
) -> None:
    fill("before")
    transactional.begin_transaction()
    transactional.produce(topic, "open", partition=0)
    transactional.flush(10)
    fill("behind")
    assert end_of(kafka, topic) == 1
    assert values(kafka, topic, 0, 1) == {0: b"before"}


def test_records_that_compaction_removed_are_no_reason_to_wait(kafka: dict[str, str], unique: str) -> None:
    config = {
        "cleanup.policy": "compact",
        "segment.ms": "100",
        "min.cleanable.dirty.ratio": "0.01",
        "max.compaction.lag.ms": "100",
        "delete.retention.ms": "0",
    }
    create_topic(kafka, unique, 1, 1, config)
    producer = Producer({**kafka, "log_level": 0})
    last: dict[int, bytes | None] = {}
    for count in range(60):
        for _ in range(10):
            producer.produce(unique, b"v%d" % count, b"same key", 0)
        producer.flush(10)
        end = end_of(kafka, unique)
        last = values(kafka, unique, 0, end)
        if len(last) < end:
            break
        time.sleep(0.5)
    assert 0 < len(last) < end, "the broker compacted nothing in half a minute"
    assert max(last) == end - 1


def test_records_before_the_low_watermark_are_a_loss(kafka: dict[str, str], topic: str, fill: Fill) -> None:
    fill(*"abcd")
    delete_records(kafka, topic, 2)
    with pytest.raises(DataLoss, match=rf"{topic}/0.*offset 0.*begins at 2.*on-data-loss"):
        read(kafka, topic, 0, 4)
    assert values(kafka, topic, 2, 4) == {2: b"c", 3: b"d"}


def test_an_end_past_the_topics_end_is_a_loss(kafka: dict[str, str], topic: str, fill: Fill) -> None:
    fill("a")
    with pytest.raises(DataLoss, match=rf"{topic}/0 ends at offset 1, before the wanted end 7"):
        read(kafka, topic, 0, 7)


@pytest.mark.usefixtures("both_ways")
def test_records_that_go_while_they_are_read_are_a_loss(
    kafka: dict[str, str], topic: str, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The range is checked first; here the records are deleted right after.
    fill(*"abcd")
    monkeypatch.setattr(reader, "check_range", lambda *_: delete_records(kafka, topic, 3))
    with pytest.raises(DataLoss, match=rf"{topic}/0 no longer holds offset 1"):
        read(kafka, topic, 1, 4)


def values_after(kafka: dict[str, str], topic: str, mark: Mark, first: int, end: int) -> list[bytes | None]:
    batches = read_range(kafka, topic, 0, first, end, mark=mark)
    return pa.Table.from_batches(batches, RECORD_SCHEMA)["value"].to_pylist()


@pytest.mark.usefixtures("both_ways")
def test_another_record_before_a_range_shows_that_the_topic_was_truncated(
    kafka: dict[str, str], topic: str, fill: Fill
) -> None:
    fill(*"abcd")
    (records,) = read_range(kafka, topic, 0, 0, 2)
    mark = mark_of(records)
    assert mark.offset == 1
    assert values_after(kafka, topic, mark, 2, 4) == [b"c", b"d"]
    assert values_after(kafka, topic, mark, 3, 4) == [b"d"]
    for other in (Mark(1, mark.digest + 1), Mark(0, mark.digest)):
        with pytest.raises(TopicTruncated, match=rf"topic {topic}, partition 0, offset {other.offset}: .*another pool"):
            values_after(kafka, topic, other, 2, 4)


def test_a_mark_tells_records_apart_by_time_key_and_value() -> None:
    rows = [
        (at, key, value) for at in (None, 1, 12) for key in (None, b"", b"k", b"12") for value in (None, b"", b"2k")
    ]
    columns: list[pa.Array] = [
        pa.array([7] * len(rows), pa.int64()),
        pa.array([row[0] for row in rows], pa.int64()),
        pa.nulls(len(rows), HEADERS),
        pa.array([row[1] for row in rows], pa.binary()),
        pa.array([row[2] for row in rows], pa.binary()),
    ]
    records = pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)
    assert len({mark_of(records.slice(at, 1)) for at in range(len(rows))}) == len(rows)
    # The lake keeps digests, so that they may not change.
    assert mark_of(records.slice(0, 12)) == Mark(7, 35_480_143_921_982_425)


@pytest.mark.usefixtures("both_ways")
def test_a_record_that_kafka_no_longer_has_is_not_compared(
    kafka: dict[str, str], topic: str, fill: Fill, transactional: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill("a")
    transactional.begin_transaction()
    transactional.produce(topic, "b", partition=0)
    transactional.flush(10)
    transactional.abort_transaction(10)
    await_end(kafka, topic, 3)
    fill(*"def")
    # Offset 1 is as invisible as if compaction had removed the record, and offset 2 is a marker of Kafka's.
    for offset in (1, 2):
        assert values_after(kafka, topic, Mark(offset, 1), 3, 6) == [b"d", b"e", b"f"]
    monkeypatch.setattr(reader, "MARK_DISTANCE", 2)
    assert values_after(kafka, topic, Mark(0, 1), 3, 6) == [b"d", b"e", b"f"]
    monkeypatch.setattr(reader, "MARK_DISTANCE", MARK_DISTANCE)
    real = reader.check_range

    def removed_after_the_check(*arguments: Any) -> int:
        low = real(*arguments)
        delete_records(kafka, topic, 4)
        return low

    monkeypatch.setattr(reader, "check_range", removed_after_the_check)
    assert values_after(kafka, topic, Mark(3, 1), 4, 6) == [b"e", b"f"]
    # From now on, retention removed it before the check.
    assert values_after(kafka, topic, Mark(3, 1), 4, 6) == [b"e", b"f"]


@pytest.mark.usefixtures("soon_known")
def test_a_missing_topic_or_partition_is_named(kafka: dict[str, str], topic: str) -> None:
    with pytest.raises(TopicMissing, match=f"{topic}-missing"):
        read(kafka, f"{topic}-missing", 0, 1)
    with pytest.raises(TopicMissing, match="no partition 7"):
        list(read_range(kafka, topic, 7, 0, 1))
    assert topic_states(kafka, [f"{topic}-missing"]) == {}


def test_a_broker_that_is_gone_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "STALL_SECONDS", 1.0)
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
        read({"bootstrap.servers": "127.0.0.1:1"}, "orders", 0, 1)


def test_the_time_that_a_broker_is_away_does_not_count_for_a_topic_that_it_does_not_know_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broker comes back and leads its partitions a moment later; no real one takes a given time for that."""
    monkeypatch.setattr(reader, "PROPAGATION", 0.3)
    away, unknown = (KafkaException(ClientError(code)) for code in (ClientError._TRANSPORT, ClientError._UNKNOWN_TOPIC))

    class ComesBack:
        said: Iterator[Exception | tuple[int, int]] = iter([*[away] * 5, unknown, (3, 7)])

        def watermarks(self, _: float) -> tuple[int, int]:
            found = next(self.said)
            if isinstance(found, Exception):
                raise found
            return found

        def poll(self, _: float) -> None:
            pass

    connection = Connection({"bootstrap.servers": "127.0.0.1:1"}, {})
    broker = ComesBack()
    reader.check_range(broker, connection, "t", 0, 3, 7)  # type: ignore[arg-type]
    assert next(broker.said, None) is None, "every answer was asked for"


@pytest.mark.usefixtures("both_ways")
def test_a_reader_can_be_left_in_the_middle(kafka: dict[str, str], topic: str, fill: Fill) -> None:
    fill(*(b"%d" % number for number in range(3000)))
    batches = read_range(kafka, topic, 0, 0, 3000, batch_records=100)
    assert next(batches)["value"][0].as_py() == b"0"
    batches.close()


def test_properties_of_the_user_do_not_change_what_is_read(kafka: dict[str, str], topic: str, fill: Fill) -> None:
    fill(*"abc")
    users = {
        **kafka,
        "auto.offset.reset": "latest",
        "isolation.level": "read_uncommitted",
        "enable.partition.eof": "false",
        "fetch.message.max.bytes": "1000",
        "linger.ms": "5",
        "client.id": "mine",
    }
    assert values(users, topic, 0, 3) == {0: b"a", 1: b"b", 2: b"c"}


def test_a_record_without_a_timestamp_has_none() -> None:
    pairs = [(1, 5), (0, -1), (1, -1), (2, 0), (1, 2**62), (1, LATEST)]
    found = timestamps(np.array(pairs)).to_pylist()
    assert found == [5, None, None, 0, None, LATEST]


def test_arguments_travel_to_a_worker() -> None:
    assert pickle.loads(pickle.dumps(read_range)) is read_range


@pytest.mark.usefixtures("both_ways", "soon_known")
def test_a_topic_that_goes_while_it_is_read_is_missing(
    kafka: dict[str, str], topic: str, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill("a")
    monkeypatch.setattr(reader, "check_range", lambda *_: delete_topic(kafka, topic))
    with pytest.raises(TopicMissing, match=topic):
        read(kafka, topic, 0, 1)


def test_a_record_that_is_larger_than_an_answer_of_librdkafka(
    kafka: dict[str, str], unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default librdkafka takes an answer of 100 MB, and would ask for the record for ever."""
    create_topic(kafka, unique, 1, 1, {"max.message.bytes": "104857600"})
    value = bytes(101_000_000)
    with InOrder(kafka, unique, 0, 0, "") as writer:
        writer.write(pa.record_batch({"key": pa.array([None], pa.binary()), "value": pa.array([value], pa.binary())}))
    assert values(kafka, unique, 0, 1) == {0: value}
    monkeypatch.setattr(reader, "STALL_SECONDS", 1.0)
    with pytest.raises(
        BrokerUnavailable, match=r"a record is larger than receive\.message\.max\.bytes of kafka allows"
    ):
        read({**kafka, "receive.message.max.bytes": "60000000"}, unique, 0, 1)
