"""Facts about topics and the few things that are done to them, through librdkafka's admin client.

A topic's end here is its *last stable offset*: the offset that a read-committed reader reaches (ListOffsets
with isolation level read-committed, KIP-98), before any transaction that is still open.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from confluent_kafka import (
    OFFSET_INVALID,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka import KafkaError as ClientError
from confluent_kafka.admin import (
    AdminClient,
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    NewTopic,  # pyright: ignore[reportPrivateImportUsage]
    OffsetSpec,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)

from zync_assets.errors import BrokerUnavailable, KafkaError, NotAuthorized, TopicMissing
from zync_assets.kafka.client import Connection, Operation, missing

T = TypeVar("T")

WAIT = 10.0
"""Seconds that a broker has to answer."""
ATTEMPT = 4.0
"""Seconds after which another broker, or by then another leader, is asked the same."""
ELECTION = 3.0
"""How many times as long a cluster has to answer, or the leader of a partition where some broker did: Kafka takes a silent
broker for dead after nine seconds, and then elects another leader."""

LOOK = 0.1
"""Seconds between two looks at what went wrong, while an answer is waited for."""

_admins: dict[tuple[int, frozenset[tuple[str, str]]], _Admin] = {}
_admins_lock = threading.Lock()


@dataclass(frozen=True)
class PartitionState:
    """A partition holds records from ``low`` up to, but not including, ``end`` (the last stable offset)."""

    partition: int
    low: int
    end: int


@dataclass(frozen=True)
class TopicState:
    """A topic now. ``topic_id`` tells it from an earlier topic of that name; partitions are sorted as
    numbers."""

    topic: str
    topic_id: str
    partitions: tuple[PartitionState, ...]


def topic_states(kafka: Mapping[str, str], topics: Sequence[str], timeout: float = WAIT) -> dict[str, TopicState]:
    """The states of those ``topics`` that exist, in the order asked for.

    Three requests a broker, however many partitions there are. Raises BrokerUnavailable after ``timeout`` seconds.
    """
    names = list(dict.fromkeys(topics))
    if not names:
        return {}
    ask = _Question(kafka, f"asking for {_listed(names)}", timeout)
    return ask.until_led(lambda: _states(ask, names))


def _states(ask: _Question, names: list[str]) -> dict[str, TopicState]:
    described: dict[str, tuple[str, list[int]]] = {}
    wait = ask.attempt()
    for topic, future in ask(lambda admin, _: admin.describe_topics(TopicCollection(names), request_timeout=wait)):
        try:
            found = ask.answer(future, topic)
        except TopicMissing:
            continue
        described[topic] = (str(found.topic_id), sorted(item.id for item in found.partitions))
    wanted = [(topic, partition) for topic, (_, partitions) in described.items() for partition in partitions]
    lows = ask.offsets(wanted, OffsetSpec.earliest())
    ends = ask.offsets(wanted, OffsetSpec.latest())
    low, end = ask.collect(lows), ask.collect(ends)
    return {
        topic: TopicState(
            topic,
            described[topic][0],
            tuple(
                PartitionState(partition, low[topic, partition], end[topic, partition])
                for partition in described[topic][1]
            ),
        )
        for topic in names
        # A topic that was deleted between the two questions has a description and no offsets.
        if topic in described and all((topic, p) in low and (topic, p) in end for p in described[topic][1])
    }


def topic_state(kafka: Mapping[str, str], topic: str, timeout: float = WAIT) -> TopicState:
    """The state of one topic; TopicMissing if it is not there."""
    states = topic_states(kafka, [topic], timeout)
    if topic not in states:
        raise missing(topic, _admin(kafka).connection.servers)
    return states[topic]


def offsets_at(kafka: Mapping[str, str], topic: str, timestamp_ms: int) -> dict[int, int]:
    """Per partition the first offset whose timestamp is at or after ``timestamp_ms``; the end where there is none.

    ``timestamp_ms``: milliseconds since the epoch, UTC.
    """
    state = topic_state(kafka, topic)
    ask = _Question(kafka, f"asking for the offsets of {topic} at a time", WAIT)
    wanted = [(topic, item.partition) for item in state.partitions]
    found = ask.until_led(lambda: ask.collect(ask.offsets(wanted, OffsetSpec.for_timestamp(timestamp_ms))))
    return {
        item.partition: min(found[topic, item.partition], item.end)
        if found.get((topic, item.partition), -1) >= 0
        else item.end
        for item in state.partitions
    }


def high_watermark(kafka: Mapping[str, str], topic: str, partition: int) -> int:
    """The offset that the next record of any kind gets: unlike an end, it is past open transactions."""
    ask = _Question(kafka, f"asking for the high watermark of {topic}/{partition}", WAIT)
    # Asking for the offsets of a topic that is not there would create it.
    topic_state(kafka, topic)
    found = ask.until_led(
        lambda: ask.collect(ask.offsets([(topic, partition)], OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED))
    )
    if (topic, partition) not in found:
        raise TopicMissing(f"topic {topic} at {ask.servers} has no partition {partition}")
    return found[topic, partition]


def create_topic(
    kafka: Mapping[str, str],
    topic: str,
    partitions: int,
    replication_factor: int,
    config: Mapping[str, str],
) -> TopicState:
    """Create ``topic`` unless it is there, wait until it can be used, and return its state."""
    ask = _Question(kafka, f"creating topic {topic}", 3 * WAIT, "Create")
    new = NewTopic(topic, num_partitions=partitions, replication_factor=replication_factor, config=dict(config))
    for _, future in ask(lambda admin, left: admin.create_topics([new], request_timeout=left)):
        try:
            ask.result(future)
        except KafkaException as error:
            if error.args[0].code() != ClientError.TOPIC_ALREADY_EXISTS:
                raise ask.connection.error(error, ask.doing, topic, ask.needs) from None
    while True:
        # A new topic is known before all of its partitions have a leader.
        try:
            return topic_state(kafka, topic, ask.left())
        except NotAuthorized:
            raise
        except (TopicMissing, KafkaError):
            if ask.left() <= 0.2:
                raise
        time.sleep(0.05)


def delete_topic(kafka: Mapping[str, str], topic: str) -> None:
    """Delete ``topic`` if it is there, and wait until it is gone."""
    ask = _Question(kafka, f"deleting topic {topic}", 3 * WAIT, "Delete")
    for _, future in ask(lambda admin, left: admin.delete_topics([topic], request_timeout=left)):
        try:
            ask.answer(future, topic)
        except TopicMissing:
            return
    while topic_states(kafka, [topic], max(ask.left(), 0.2)):
        if ask.left() <= 0.2:
            raise KafkaError(f"topic {topic} at {ask.servers} was deleted and is still listed; try again")
        time.sleep(0.05)


def max_message_bytes(kafka: Mapping[str, str], topic: str) -> int:
    """The topic's ``max.message.bytes``: the size in bytes of the largest record batch that it takes."""
    return int(_setting(kafka, topic, "max.message.bytes"))


def known_limits(kafka: Mapping[str, str], topics: Sequence[str], timeout: float = 2.0) -> dict[str, int]:
    """The ``max.message.bytes`` of those ``topics`` that are there and whose configuration may be seen; none where no broker
    answers in time."""
    ask = _Question(kafka, f"asking for the configuration of {_listed(topics)}", timeout, "DescribeConfigs")
    resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
    found: dict[str, int] = {}
    for resource, future in ask(lambda admin, left: admin.describe_configs(resources, request_timeout=left)):
        with suppress(KafkaError):
            found[str(resource.name)] = int(ask.answer(future, str(resource.name))["max.message.bytes"].value)
    return found


def is_compacted(kafka: Mapping[str, str], topic: str) -> bool:
    """Whether compaction may take records out of the topic's middle (``cleanup.policy``)."""
    return "compact" in _setting(kafka, topic, "cleanup.policy")


def _setting(kafka: Mapping[str, str], topic: str, name: str) -> str:
    ask = _Question(kafka, f"asking for the configuration of {topic}", WAIT, "DescribeConfigs")
    resource = ConfigResource(ResourceType.TOPIC, topic)

    def question() -> str:
        wait = ask.attempt()
        answers = ask(lambda admin, _: admin.describe_configs([resource], request_timeout=wait))
        return str(next(ask.answer(future, topic) for _, future in answers)[name].value)

    return ask.until_led(question)


def commit_group_offsets(
    kafka: Mapping[str, str], group: str, topic: str, offsets: Mapping[int, int], timeout: float = 2.0
) -> None:
    """Note the next offset of each partition under a consumer group, for those who look there; nothing here reads it.

    KafkaError where the group has members of its own, a partition is gone, or the right to READ the group is missing.
    """
    ask = _Question(kafka, f"committing offsets of {topic} for consumer group {group}", timeout)
    places = [TopicPartition(topic, partition, offset) for partition, offset in sorted(offsets.items())]
    wanted = [ConsumerGroupTopicPartitions(group, places)]
    for _, future in ask(lambda admin, left: admin.alter_consumer_group_offsets(wanted, request_timeout=left)):
        for place in ask.answer(future, topic).topic_partitions:
            if place.error is not None:
                raise ask.connection.error(place.error, ask.doing, topic)


class _Admin:
    """An admin client that is kept: connecting takes longer than any of its answers."""

    def __init__(self, kafka: Mapping[str, str]) -> None:
        # librdkafka's admin client is a producer, and checks a producer's properties.
        self.connection = Connection(kafka, {"enable.idempotence": False, "enable.gapless.guarantee": False})
        try:
            self.client = AdminClient(self.connection.properties)
        except (KafkaException, ValueError) as error:
            raise self.connection.error(_as_exception(error), "setting up a client") from None


def _as_exception(error: Exception) -> KafkaException:
    return error if isinstance(error, KafkaException) else KafkaException(str(error))


def _admin(kafka: Mapping[str, str]) -> _Admin:
    # librdkafka's threads do not survive a fork, so a child process makes a client of its own.
    key = (os.getpid(), frozenset(kafka.items()))
    with _admins_lock:
        if key not in _admins:
            _admins[key] = _Admin(kafka)
        return _admins[key]


def _another_admin(kafka: Mapping[str, str], old: _Admin) -> _Admin:
    """A client in place of ``old``, for all who ask from now on."""
    with _admins_lock:
        for key, found in list(_admins.items()):
            if found is old:
                del _admins[key]
    return _admin(kafka)


_BETWEEN_LEADERS = {
    ClientError.NOT_LEADER_FOR_PARTITION,
    ClientError.LEADER_NOT_AVAILABLE,
    ClientError.FENCED_LEADER_EPOCH,
    ClientError.UNKNOWN_LEADER_EPOCH,
    # A new leader does not know yet how far its followers are (KIP-207).
    ClientError.OFFSET_NOT_AVAILABLE,
    # librdkafka's "No leaders found": of none of the partitions that were asked for, as while a lone broker comes back.
    ClientError._NOENT,
}


class _Question:
    """Requests that share one deadline and one name for the errors."""

    def __init__(self, kafka: Mapping[str, str], doing: str, timeout: float, needs: Operation = "Describe") -> None:
        self._kafka = kafka
        self._admin = _admin(kafka)
        # Reports of trouble queue up until they are asked for; those of an earlier question are old news.
        self._admin.client.poll(0)
        self.connection = self._admin.connection
        self.connection.trouble = None
        self.servers = self.connection.servers
        self.doing = doing
        self.needs: Operation = needs
        self._began = time.monotonic()
        self._timeout = timeout
        # Where several brokers are known, there is one to take over.
        self._deadline = self._began + timeout * (ELECTION if "," in self.servers else 1)

    def left(self) -> float:
        """Seconds to the deadline, at least a tenth."""
        return max(self._deadline - time.monotonic(), 0.1)

    def attempt(self) -> float:
        """Seconds for a question that is asked again."""
        return min(self.left(), ATTEMPT)

    def __call__(
        self, request: Callable[[AdminClient, float], Mapping[Any, Future[Any]]]
    ) -> Iterable[tuple[Any, Future[Any]]]:
        try:
            return request(self._admin.client, self.left()).items()
        except (KafkaException, ValueError) as error:
            raise self.connection.error(_as_exception(error), self.doing) from None

    def answer(self, future: Future[T], topic: str) -> T:
        try:
            found = self.result(future)
        except KafkaException as error:
            self._admin.client.poll(0)
            said = self.connection.error(error, self.doing, topic, self.needs)
            if error.args and isinstance(error.args[0], ClientError) and error.args[0].code() in _BETWEEN_LEADERS:
                raise BrokerUnavailable(str(said)) from None
            raise said from None
        except FutureTimeout:
            self._admin.client.poll(0)
            raise self.connection.unavailable(self.doing) from None
        self.connection.answered()
        self._deadline = max(self._deadline, self._began + ELECTION * self._timeout)
        return found

    def result(self, future: Future[T]) -> T:
        """The answer; TrustError as soon as it is plain that none will come, FutureTimeout after the deadline."""
        give_up = time.monotonic() + self.left() + 1
        while True:
            try:
                return future.result(LOOK)
            except FutureTimeout:
                self._admin.client.poll(0)
                self.connection.raise_refused(self.doing, self._began)
                if time.monotonic() > give_up:
                    raise

    def until_led(self, question: Callable[[], T]) -> T:
        """Ask again, up to the deadline: a partition may be between two leaders, since it was just added or its leader has
        just gone, and the broker that was asked may be the one that hangs."""
        while True:
            asked = time.monotonic()
            try:
                return question()
            except BrokerUnavailable:
                if self.left() <= 0.2:
                    raise
            if time.monotonic() > asked + ATTEMPT - 1:
                # The client goes on asking the broker that it chose once, for as long as it is told of no other.
                self._admin = _another_admin(self._kafka, self._admin)
                self.connection = self._admin.connection
            time.sleep(0.1)

    def offsets(
        self,
        wanted: Iterable[tuple[str, int]],
        spec: OffsetSpec | None,
        isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
    ) -> Iterable[tuple[TopicPartition, Future[Any]]]:
        request: dict[Any, Any] = {TopicPartition(topic, partition): spec for topic, partition in wanted}
        if not request:
            return ()
        wait = self.attempt()
        return self(lambda admin, _: admin.list_offsets(request, isolation_level=isolation, request_timeout=wait))

    def collect(self, answers: Iterable[tuple[TopicPartition, Future[Any]]]) -> dict[tuple[str, int], int]:
        """The offsets by topic and partition, without those that do not exist (any more)."""
        found: dict[tuple[str, int], int] = {}
        for place, future in answers:
            try:
                offset = self.answer(future, place.topic).offset
            except TopicMissing:
                continue
            if offset == OFFSET_INVALID:
                # So librdkafka answers for a leader that went away under the question.
                raise BrokerUnavailable(
                    f"the leader of {place.topic}/{place.partition} at {self.servers} did not answer while {self.doing}; "
                    "try again when there is a leader"
                )
            found[place.topic, place.partition] = offset
        return found


def _listed(topics: Sequence[str]) -> str:
    shown = ", ".join(topics[:3])
    return f"topic {shown}" if len(topics) == 1 else f"topics {shown}" + (", …" if len(topics) > 3 else "")
