"""``consumer-group``: Kafka's own tools see how far ingest is, and nothing depends on what they see."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from zync_assets.local.services import Services
from zync_assets_tests.mini import BOTH, JOIN, Mini, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def shown(it: Mini, group: str) -> dict[tuple[str, int], int]:
    """What ``kafka-consumer-groups --describe`` would show."""
    admin = AdminClient({**it.pipeline.kafka})
    [future] = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)]).values()
    return {(place.topic, place.partition): place.offset for place in future.result(20).topic_partitions}


def test_a_group_shows_the_next_offsets_and_is_never_read(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    group = f"{unique}-lag"
    it = mini(services, spark, tmp_path, unique, f"consumer-group: {group}\n{BOTH}{JOIN}", partitions=2)
    it.send(it.left, row(1), row(2))
    it.send(it.left, row(3), partition=1)
    it.ingest()
    assert shown(it, group) == {(it.left, 0): 2, (it.left, 1): 1, (it.right, 0): 0, (it.right, 1): 0}

    admin = AdminClient({**it.pipeline.kafka})
    forged = [TopicPartition(it.left, 0, 0), TopicPartition(it.left, 1, 99)]
    for future in admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, forged)]).values():
        future.result(20)
    it.send(it.left, row(4))
    it.ingest()
    assert [item["value"]["id"] for item in it.raw(it.left)] == [1, 2, 4, 3]
    assert shown(it, group)[it.left, 0] == 3
    assert shown(it, group)[it.left, 1] == 1

    for future in admin.delete_consumer_groups([group]).values():
        future.result(20)
    it.send(it.left, row(5), partition=1)
    it.ingest()
    assert [item["value"]["id"] for item in it.raw(it.left)] == [1, 2, 4, 3, 5]
    assert shown(it, group) == {(it.left, 0): 3, (it.left, 1): 2}


def test_a_group_that_can_not_be_written_is_a_warning(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    group = f"{unique}-taken"
    it = mini(services, spark, tmp_path, unique, f"consumer-group: {group}\n{BOTH}{JOIN}")
    it.send(it.left, row(1))
    member = Consumer({**it.pipeline.kafka, "group.id": group, "auto.offset.reset": "earliest"})
    try:
        member.subscribe([it.left])
        while member.poll(0.2) is None:
            pass
        with caplog.at_level(logging.WARNING):
            it.ingest(it.left)
    finally:
        member.close()
    assert it.next(it.left) == {0: 1}
    [told] = [item.getMessage() for item in caplog.records if item.name == "zync_assets.ingest.commit"]
    assert f"the lag that Kafka shows for {it.left} is out of date, and nothing else" in told
    assert group in told


def test_without_the_key_there_is_no_group(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, BOTH + JOIN)
    it.send(it.left, row(1))
    it.ingest(it.left)
    admin = AdminClient({**it.pipeline.kafka})
    groups = admin.list_consumer_groups().result(20)
    assert not [found for found in groups.valid if found.group_id.startswith(unique)]
