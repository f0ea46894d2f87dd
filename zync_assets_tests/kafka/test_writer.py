"""Records that must land at offsets known before they are sent."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer

from zync_assets.errors import BrokerUnavailable, DataLoss, ForeignRecord, KafkaError, RecordTooLarge, TopicMissing
from zync_assets.kafka import writer
from zync_assets.kafka.reader import read_range
from zync_assets.kafka.topics import RecordLimits, create_topic, high_watermark
from zync_assets.kafka.writer import InOrder
from zync_assets.kafka.zero_copy import HEADERS
from zync_assets_tests.kafka.conftest import Fill
from zync_assets_tests.odd_topics import configure

REBUILD = "zync to-kafka shop.yaml --recreate New"


def write_in_order(
    kafka: dict[str, str], topic: str, partition: int, first: int, batches: Iterable[pa.RecordBatch]
) -> int:
    with InOrder(kafka, topic, partition, first, REBUILD) as writer:
        for each in batches:
            writer.write(each)
    assert writer.sent == writer.confirmed == writer.verified
    return writer.sent


def batch(values: list[bytes | None], keys: list[bytes | None] | None = None) -> pa.RecordBatch:
    keys = keys or [None] * len(values)
    return pa.record_batch({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})


def numbered(first: int, count: int) -> pa.RecordBatch:
    return batch([b"%d" % number for number in range(first, first + count)])


def rows(kafka: dict[str, str], topic: str) -> list[dict[str, Any]]:
    end = high_watermark(kafka, topic, 0)
    return [row for each in read_range(kafka, topic, 0, 0, end) for row in each.to_pylist()]


def values(kafka: dict[str, str], topic: str) -> list[bytes | None]:
    return [row["value"] for row in rows(kafka, topic)]


def test_record_k_lands_at_offset_k(kafka: dict[str, str], topic: str) -> None:
    assert write_in_order(kafka, topic, 0, 0, [numbered(0, 1), numbered(1, 5000)]) == 5001
    assert write_in_order(kafka, topic, 0, 5001, [numbered(5001, 3000)]) == 8001
    assert values(kafka, topic) == [b"%d" % number for number in range(8001)]


def test_nothing_to_write(kafka: dict[str, str], topic: str) -> None:
    assert write_in_order(kafka, topic, 0, 0, []) == 0
    assert write_in_order(kafka, topic, 0, 0, [batch([])]) == 0


def test_a_header_without_a_name_is_refused(kafka: dict[str, str], topic: str) -> None:
    headers = pa.array([None, [{"key": "a", "value": b"1"}, {"key": None, "value": b"2"}]], HEADERS)
    with pytest.raises(KafkaError, match="header's name is null"):
        write_in_order(kafka, topic, 0, 0, [batch([b"u", b"v"]).append_column("headers", headers)])


def test_keys_tombstones_and_headers(kafka: dict[str, str], topic: str) -> None:
    headers = [{"key": "a", "value": b"1"}, {"key": "a", "value": None}, {"key": "b", "value": b""}]
    plain = batch([None, b"", b"v"], [b"k", b"", None])
    rich = pa.record_batch(
        {
            "key": pa.array([b"k", None], pa.binary()),
            "value": pa.array([None, b"v"], pa.binary()),
            "headers": pa.array([headers, None], HEADERS),
        }
    )
    assert write_in_order(kafka, topic, 0, 0, [plain, rich]) == 5
    assert [(row["key"], row["value"], row["headers"]) for row in rows(kafka, topic)] == [
        (b"k", None, None),
        (b"", b"", None),
        (None, b"v", None),
        (b"k", None, headers),
        (None, b"v", None),
    ]


def test_empty_values_and_nulls_of_a_slice_stay_apart(kafka: dict[str, str], topic: str) -> None:
    keys: list[bytes | None] = [b"left", None, b"", b"k", None, b"", b"key", b"k"]
    given: list[bytes | None] = [b"out", b"v", b"", None, b"", b"value", None, b"v"]
    only_empty = batch([None, b"", b"", None], [b"", b"", None, b""])
    assert write_in_order(kafka, topic, 0, 0, [batch(given, keys).slice(1), only_empty]) == 11
    found = [(row["key"], row["value"]) for row in rows(kafka, topic)]
    assert found[:7] == list(zip(keys, given, strict=True))[1:]
    assert found[7:] == [(b"", None), (b"", b""), (None, b""), (b"", None)]


@pytest.mark.parametrize("first", [0, 1])
def test_a_topic_that_ends_elsewhere_is_not_written_to(
    kafka: dict[str, str], topic: str, fill: Fill, first: int
) -> None:
    fill("theirs", "theirs too")
    with pytest.raises(ForeignRecord, match=rf"{topic}/0 .* offset {first} .*with: {REBUILD}$"):
        write_in_order(kafka, topic, 0, first, [numbered(0, 1)])
    with pytest.raises(DataLoss, match=rf"{topic}/0 ends at offset 2, before 5"):
        write_in_order(kafka, topic, 0, 5, [numbered(0, 1)])
    assert len(values(kafka, topic)) == 2


def test_a_record_of_another_writer_is_found_at_its_offset(kafka: dict[str, str], topic: str, fill: Fill) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield numbered(0, 1)
        # The first record is confirmed by itself, so that this one gets offset 1.
        fill("theirs")
        yield numbered(1, 1000)
        yield numbered(1001, 1000)

    with pytest.raises(ForeignRecord, match=rf"{topic}/0 .* offset 1 .*with: {REBUILD}$"):
        write_in_order(kafka, topic, 0, 0, batches())
    assert values(kafka, topic)[:2] == [b"0", b"theirs"]


def test_records_of_another_writer_are_found_among_thousands(kafka: dict[str, str], topic: str) -> None:
    stop = threading.Event()

    def interfere() -> None:
        other = Producer({**kafka, "log_level": 0, "linger.ms": 0})
        while not stop.wait(0.005):
            other.produce(topic, b"theirs", partition=0)
            other.flush(5)

    def batches() -> Iterator[pa.RecordBatch]:
        yield numbered(0, 5000)
        thread.start()
        for first in range(5000, 2_000_000, 5000):
            yield numbered(first, 5000)

    thread = threading.Thread(target=interfere)
    try:
        with pytest.raises(ForeignRecord) as caught:
            write_in_order(kafka, topic, 0, 0, batches())
    finally:
        stop.set()
        thread.join()
    assert f"offset {values(kafka, topic).index(b'theirs')} " in str(caught.value)


def test_a_record_that_is_too_large_is_refused_before_its_batch_is_sent(kafka: dict[str, str], unique: str) -> None:
    create_topic(kafka, unique, 1, 1, {"max.message.bytes": "5000"})
    large = batch([b"small", b"x" * 5000, b"small"])
    with pytest.raises(
        RecordTooLarge, match=rf"offset 11 of {unique}/0 takes 5\d\d\d bytes.* 5000 .*max\.message\.bytes"
    ):
        write_in_order(kafka, unique, 0, 0, [numbered(0, 10), large])
    assert high_watermark(kafka, unique, 0) <= 10


@pytest.mark.parametrize("headers", [None, [{"key": "é" * 100, "value": b"x" * 200}, {"key": "n", "value": None}]])
def test_the_largest_record_that_passes_is_the_largest_that_the_broker_takes(
    kafka: dict[str, str], unique: str, headers: list[dict[str, Any]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 3000
    create_topic(kafka, unique, 1, 1, {"max.message.bytes": str(limit)})
    record = {"key": b"key", "value": b"", "headers": headers}
    fitting = max(size for size in range(limit) if writer.batch_size({**record, "value": bytes(size)}) <= limit)

    def one(size: int) -> pa.RecordBatch:
        return pa.record_batch(
            {
                "key": pa.array([b"key"], pa.binary()),
                "value": pa.array([bytes(size)], pa.binary()),
                "headers": pa.array([headers], HEADERS),
            }
        )

    with pytest.raises(RecordTooLarge):
        write_in_order(kafka, unique, 0, 0, [one(fitting + 1)])
    assert write_in_order(kafka, unique, 0, 0, [one(fitting), one(fitting)]) == 2
    # The broker's own opinion of one byte more.
    monkeypatch.setattr(writer, "_check_sizes", lambda *_: None)
    with pytest.raises(KafkaError, match=r"(?i)too large|larger"):
        write_in_order(kafka, unique, 0, 2, [one(fitting + 1)])
    assert high_watermark(kafka, unique, 0) == 2


def test_a_topic_that_takes_less_in_the_middle_of_a_write_names_its_limit(kafka: dict[str, str], unique: str) -> None:
    create_topic(kafka, unique, 1, 1, {})

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(40):
            if number == 20:
                configure(kafka, unique, max_message_bytes="1000")
            yield batch([b"%d" % number + bytes(1500)] * 50)

    with pytest.raises(RecordTooLarge, match=rf"raise max\.message\.bytes of {unique}, then run it again"):
        write_in_order(kafka, unique, 0, 0, batches())
    end = high_watermark(kafka, unique, 0)
    configure(kafka, unique, max_message_bytes="2000")
    assert write_in_order(kafka, unique, 0, end, [batch([bytes(1500)] * 10)]) == end + 10


def test_many_records_just_below_the_limit(kafka: dict[str, str], unique: str) -> None:
    create_topic(kafka, unique, 1, 1, {"max.message.bytes": "20000"})
    assert write_in_order(kafka, unique, 0, 0, [batch([bytes(size) for size in range(18000, 19900, 10)])]) == 190


def test_the_first_record_that_the_broker_refuses_leaves_its_offset_empty(kafka: dict[str, str], unique: str) -> None:
    # A compacted topic takes no record without a key: only the broker knows.
    create_topic(kafka, unique, 1, 1, {"cleanup.policy": "compact"})
    for keys in ([None, *[b"k"] * 3000], [*[b"k"] * 2500, None, *[b"k"] * 5000]):
        first = high_watermark(kafka, unique, 0)
        refused = keys.index(None)
        numbers = [b"%d" % number for number in range(len(keys))]
        with pytest.raises(KafkaError, match=rf"{unique}/0 from offset \d+ on.*validate"):
            write_in_order(kafka, unique, 0, first, [batch(numbers, keys)])
        assert high_watermark(kafka, unique, 0) <= first + refused


def test_a_missing_topic_is_not_created(kafka: dict[str, str], unique: str) -> None:
    with pytest.raises(TopicMissing, match=unique):
        write_in_order(kafka, unique, 0, 0, [numbered(0, 1)])
    with pytest.raises(TopicMissing, match=unique):
        high_watermark(kafka, unique, 0)


def test_a_broker_that_stops_answering_is_given_up(
    kafka: dict[str, str], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "STALL_SECONDS", 1.0)
    monkeypatch.setattr(writer, "record_limits", lambda *_: RecordLimits(1_000_000))
    monkeypatch.setattr(writer, "high_watermark", lambda *_: 0)
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1 .*min\.insync\.replicas.*up to offset 0"):
        write_in_order({"bootstrap.servers": "127.0.0.1:1"}, topic, 0, 0, [numbered(0, 10)])


def test_properties_of_the_user_do_not_break_the_promise(kafka: dict[str, str], topic: str) -> None:
    users = {
        **kafka,
        "acks": "0",
        "enable.idempotence": "false",
        "transactional.id": "mine",
        "delivery.timeout.ms": "1",
        "queue.buffering.max.messages": "10",
        "message.max.bytes": "1000",
        "compression.type": "zstd",
        "auto.offset.reset": "latest",
    }
    assert write_in_order(users, topic, 0, 0, [numbered(0, 3000)]) == 3000
    assert values(kafka, topic) == [b"%d" % number for number in range(3000)]
