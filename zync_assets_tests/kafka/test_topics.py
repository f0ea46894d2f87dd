"""Questions about topics, and questions to a missing broker."""

from __future__ import annotations

import socket
import time
from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,  # pyright: ignore[reportPrivateImportUsage]
    ListOffsetsResultInfo,  # pyright: ignore[reportPrivateImportUsage]
)

from zync_assets.errors import BrokerUnavailable, KafkaError, TopicMissing
from zync_assets.kafka import topics
from zync_assets.kafka.client import librdkafka_version
from zync_assets.kafka.topics import PartitionState, create_topic, delete_topic, survey, topic_states
from zync_assets_tests.kafka.conftest import Fill, await_end


def delete_records(kafka: dict[str, str], topic: str, before: int) -> None:
    client = AdminClient({**kafka})
    for future in client.delete_records([TopicPartition(topic, 0, before)]).values():
        future.result(10)


def test_states_of_several_topics_leave_out_those_that_are_missing(
    kafka: dict[str, str], topic: str, fill: Fill
) -> None:
    other = f"{topic}.with.dots"
    create_topic(kafka, other, 12, 1, {})
    fill("a", "b")

    states = topic_states(kafka, [topic, f"{topic}-missing", other])

    assert list(states) == [topic, other]
    assert states[topic].partitions == (PartitionState(0, 0, 2),)
    assert [item.partition for item in states[other].partitions] == list(range(12))
    assert states[topic].topic_id != states[other].topic_id


def test_asking_for_a_missing_topic_does_not_create_it(kafka: dict[str, str], unique: str) -> None:
    assert topic_states(kafka, [unique]) == {}
    for ask in (lambda: topics.high_watermark(kafka, unique, 0), lambda: topics.offsets_at(kafka, unique, 0)):
        with pytest.raises(TopicMissing, match=unique):
            ask()
    with pytest.raises(TopicMissing, match=unique):
        topics.record_limits(kafka, unique)
    assert topic_states(kafka, [unique]) == {}


def test_nothing_is_asked_for_no_topics() -> None:
    assert topic_states({"bootstrap.servers": "127.0.0.1:1"}, []) == {}


def test_low_is_where_deleted_records_end(kafka: dict[str, str], topic: str, fill: Fill) -> None:
    fill("a", "b", "c")
    delete_records(kafka, topic, 2)
    assert topic_states(kafka, [topic])[topic].partitions == (PartitionState(0, 2, 3),)


def test_the_end_is_before_an_open_transaction(
    kafka: dict[str, str], topic: str, fill: Fill, transactional: Producer
) -> None:
    fill("committed")
    transactional.begin_transaction()
    transactional.produce(topic, "open", partition=0)
    transactional.flush(10)

    assert topic_states(kafka, [topic])[topic].partitions == (PartitionState(0, 0, 1, is_open=True),)
    assert topics.high_watermark(kafka, topic, 0) == 2

    transactional.commit_transaction(10)
    # One offset more than records: the transaction's marker.
    await_end(kafka, topic, 3)
    assert topic_states(kafka, [topic])[topic].partitions == (PartitionState(0, 0, 3),)


def test_a_topic_that_is_created_again_has_another_id(kafka: dict[str, str], topic: str) -> None:
    before = topic_states(kafka, [topic])[topic].topic_id
    delete_topic(kafka, topic)
    assert topic_states(kafka, [topic]) == {}
    assert create_topic(kafka, topic, 1, 1, {}).topic_id != before


def test_deleting_a_missing_topic_is_no_error(kafka: dict[str, str], unique: str) -> None:
    delete_topic(kafka, unique)
    assert topic_states(kafka, [unique]) == {}


def test_creating_a_topic_that_is_there_gives_its_state(kafka: dict[str, str], topic: str, fill: Fill) -> None:
    fill("a")
    again = create_topic(kafka, topic, 5, 1, {})
    assert again.partitions == (PartitionState(0, 0, 1),)


def test_a_created_topic_has_its_configuration(kafka: dict[str, str], unique: str) -> None:
    created = create_topic(kafka, unique, 3, 1, {"max.message.bytes": "12345"})
    assert [item.partition for item in created.partitions] == [0, 1, 2]
    assert topics.record_limits(kafka, unique).size == 12345


def test_a_refused_creation_says_why(kafka: dict[str, str], unique: str) -> None:
    with pytest.raises(KafkaError, match=r"no\.such\.property"):
        create_topic(kafka, unique, 1, 1, {"no.such.property": "1"})
    with pytest.raises(KafkaError, match=r"(?i)replication.*start the missing brokers, or lower replication-factor"):
        create_topic(kafka, unique, 1, 3, {})


def test_offsets_at_a_time_are_the_first_at_or_after_it(kafka: dict[str, str], topic: str, fill: Fill) -> None:
    fill(*({"value": str(time), "timestamp": time} for time in (1000, 2000, 3000)))
    assert [topics.offsets_at(kafka, topic, time) for time in (0, 2000, 2001, 3001)] == [{0: 0}, {0: 1}, {0: 2}, {0: 3}]


def test_no_broker_is_reported_in_time_and_by_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable, match=address):
            topic_states({"bootstrap.servers": address}, ["orders"], timeout=1.0)
        assert time.monotonic() - began < 10


def test_a_broker_that_accepts_and_says_nothing_is_reported_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(BrokerUnavailable, match=address):
            topic_states({"bootstrap.servers": address}, ["orders"], timeout=1.0)


def test_an_unknown_property_is_named() -> None:
    with pytest.raises(KafkaError, match=r"no\.such\.property"):
        topic_states({"bootstrap.servers": "127.0.0.1:1", "no.such.property": "1"}, ["orders"])


def test_nothing_is_written_to_stderr_when_the_broker_is_gone(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BrokerUnavailable):
        topic_states({"bootstrap.servers": "127.0.0.1:1"}, ["orders"], timeout=1.0)
    assert capfd.readouterr().err == ""


def test_the_version_of_the_library_below() -> None:
    assert librdkafka_version().count(".") >= 2


@pytest.mark.parametrize(
    ("code", "said"),
    [(ClientError._NOENT, "No leaders found"), (ClientError.UNKNOWN_TOPIC_OR_PART, "is described and has no offsets")],
)
def test_a_topic_without_a_leader_is_asked_again_and_then_waited_for(
    kafka: dict[str, str], topic: str, monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    """As librdkafka says it of a lone broker that is coming back, and such a broker of what it does not lead yet."""
    real, refusals = AdminClient.list_offsets, [2]

    def refused(client: AdminClient, request: dict[Any, Any], **named: Any) -> dict[Any, Any]:
        if not refusals[0]:
            return real(client, request, **named)
        refusals[0] -= 1
        answers: dict[Any, Any] = {place: Future() for place in request}
        for answer in answers.values():
            answer.set_exception(KafkaException(ClientError(code, said)))
        return answers

    monkeypatch.setattr(AdminClient, "list_offsets", refused)
    assert topic_states(kafka, [topic])[topic].partitions == (PartitionState(0, 0, 0),)
    refusals[0] = 1_000_000
    with pytest.raises(BrokerUnavailable, match=said):
        topic_states(kafka, [topic], timeout=0.3)


def test_an_answer_without_an_offset_is_none(
    kafka: dict[str, str], topic: str, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As librdkafka gives it for a leader that was killed under the question: no error, and offset -1001."""
    fill("a")
    real, missing = AdminClient.list_offsets, [2]

    def unanswered(client: AdminClient, request: dict[Any, Any], **named: Any) -> dict[Any, Any]:
        if not missing[0]:
            return real(client, request, **named)
        missing[0] -= 1
        answers: dict[Any, Any] = {place: Future() for place in request}
        for answer in answers.values():
            answer.set_result(ListOffsetsResultInfo(-1001, -1, -1))
        return answers

    monkeypatch.setattr(AdminClient, "list_offsets", unanswered)
    assert topic_states(kafka, [topic])[topic].partitions == (PartitionState(0, 0, 1),)
    missing[0] = 1_000_000
    with pytest.raises(BrokerUnavailable, match=f"leader of {topic}/0"):
        topic_states(kafka, [topic], timeout=0.3)


def test_a_partition_without_a_leader_hides_neither_its_topic_nor_others(
    kafka: dict[str, str], topic: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = f"{unique}.other"
    create_topic(kafka, other, 2, 1, {})
    real = AdminClient.list_offsets

    def unled(client: AdminClient, request: dict[Any, Any], **named: Any) -> dict[Any, Any]:
        lost = {place for place in request if (place.topic, place.partition) == (other, 1)}
        answers = dict(real(client, {place: spec for place, spec in request.items() if place not in lost}, **named))
        for place in lost:
            answers[place] = Future()
            answers[place].set_exception(KafkaException(ClientError(ClientError.LEADER_NOT_AVAILABLE)))
        return answers

    monkeypatch.setattr(AdminClient, "list_offsets", unled)
    found = survey(kafka, [topic, other], patience=0.0)
    assert found.states[topic].partitions == (PartitionState(0, 0, 0),)
    assert found.states[other].partitions == (PartitionState(0, 0, 0),)
    assert list(found.states[other].away) == [1]
    assert list(found.errors) == [other]
    with pytest.raises(BrokerUnavailable, match="Leader not available"):
        topic_states(kafka, [topic, other], timeout=0.3)
