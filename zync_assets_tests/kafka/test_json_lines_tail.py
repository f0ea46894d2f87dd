"""Following a topic of several partitions."""

from __future__ import annotations

from itertools import islice

import pytest
from confluent_kafka import Producer

from zync_assets.errors import DataLoss
from zync_assets.kafka.json_lines import Record, follow
from zync_assets.kafka.topics import create_topic
from zync_assets_tests.kafka.conftest import Fill, await_end
from zync_assets_tests.kafka.test_topics import delete_records


def test_every_partition_up_to_its_end(kafka: dict[str, str], unique: str) -> None:
    create_topic(kafka, unique, 3, 1, {})
    producer = Producer({**kafka, "log_level": 0})
    for number in range(7):
        producer.produce(unique, b"%d" % number, partition=number % 2, timestamp=1000 + number, headers={"h": b"x"})
    producer.flush(10)

    records = list(follow(kafka, unique, {0: 1, 1: 0, 2: 0}, {0: 3, 1: 3, 2: 0}))

    assert [record.value for record in records if record.partition == 0] == [b"2", b"4"]
    assert [record.value for record in records if record.partition == 1] == [b"1", b"3", b"5"]
    assert Record(unique, 0, 1, 1002, (("h", b"x"),), None, b"2") in records


def test_without_ends_it_goes_on_with_what_comes(kafka: dict[str, str], topic: str, fill: Fill) -> None:
    fill("old")
    records = follow(kafka, topic, {0: 0})
    assert next(records).value == b"old"
    fill("new", None)
    assert [record.value for record in islice(records, 2)] == [b"new", None]
    records.close()  # type: ignore[attr-defined]


def test_an_end_behind_a_transactions_marker_is_reached(
    kafka: dict[str, str], topic: str, transactional: Producer
) -> None:
    transactional.begin_transaction()
    transactional.produce(topic, "aborted", partition=0)
    transactional.flush(10)
    transactional.abort_transaction(10)
    await_end(kafka, topic, 2)
    assert list(follow(kafka, topic, {0: 0}, {0: 2})) == []


def test_records_that_are_gone_are_an_error(kafka: dict[str, str], topic: str, fill: Fill) -> None:
    fill("a", "b")
    delete_records(kafka, topic, 1)
    with pytest.raises(DataLoss, match=rf"{topic}/0 no longer holds offset 0"):
        list(follow(kafka, topic, {0: 0}, {0: 2}))
