"""Facts about topics and the few things that are done to them, through librdkafka's admin client.

A topic's end here is its *last stable offset*: the offset that a read-committed reader reaches (ListOffsets
with isolation level read-committed, KIP-98), before any transaction that is still open.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka import KafkaError as ClientError
from confluent_kafka.admin import (
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    NewTopic,  # pyright: ignore[reportPrivateImportUsage]
    OffsetSpec,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)

from zync_assets.errors import BrokerUnavailable, KafkaError, LeaderMissing, NotAuthorized, TopicMissing, TrustError
from zync_assets.kafka.admin import Question
from zync_assets.kafka.client import servers, topic_missing

WAIT = 10.0
"""Seconds that a broker has to answer."""
SHORT_WAIT = 2.0
"""Seconds for an answer that a step can do without."""
LAST_LOOK = 0.3
"""Seconds before the deadline in which an answer is not asked for again."""
DEFAULT_LIMIT = 1_048_588
"""Kafka's default of ``message.max.bytes``."""
_MAX_BYTES, _POLICY = "max.message.bytes", "cleanup.policy"


@dataclass(frozen=True)
class RecordLimits:
    """The records that a topic takes. ``size``: the bytes of the largest record batch (``max.message.bytes``). ``needs_key``:
    whether each record needs a key, as in a compacted topic (``cleanup.policy``)."""

    size: int
    needs_key: bool = False

    @property
    def config(self) -> dict[str, str]:
        """The configuration of a topic that takes the same records."""
        return {_MAX_BYTES: str(self.size), **({_POLICY: "compact"} if self.needs_key else {})}

    @property
    def producer_sizes(self) -> dict[str, int]:
        """The properties of a producer of such records. librdkafka takes from 1000 to a billion bytes; a topic may take more."""
        most = min(max(self.size, 1000), 1_000_000_000)
        return {"message.max.bytes": most, "batch.size": max(min(self.size, 1_000_000), 1)}


@dataclass(frozen=True)
class PartitionState:
    """A partition holds records from ``low`` up to, but not including, ``end`` (the last stable offset).

    ``is_open``: whether a transaction is open. The records of the transaction are past ``end``.
    """

    partition: int
    low: int
    end: int
    is_open: bool = False


@dataclass(frozen=True)
class TopicState:
    """A topic at present. An earlier topic of that name has another ``topic_id``. The partitions are sorted as numbers."""

    topic: str
    topic_id: str
    partitions: tuple[PartitionState, ...]
    away: Mapping[int, KafkaError] = field(default_factory=dict[int, KafkaError])
    """Partitions that have no leader now, and the error of each. They are not among ``partitions``."""


@dataclass(frozen=True)
class Survey:
    """The states of several topics. A missing topic is neither in ``states`` nor in ``problems``."""

    states: Mapping[str, TopicState]
    problems: Mapping[str, KafkaError]
    """Topics whose state is unknown → the error: the right to describe the topic is missing."""

    @property
    def errors(self) -> dict[str, KafkaError]:
        """Topic → its error: a problem, or the error of the first partition without a leader."""
        leader_errors = {topic: min(state.away.items())[1] for topic, state in self.states.items() if state.away}
        return {**self.problems, **leader_errors}


def survey(
    kafka: Mapping[str, str], topics: Sequence[str], timeout: float | None = None, patience: float | None = None
) -> Survey:
    """The states of those ``topics`` that exist, in the order asked for. One topic's problem hides no other topic.

    Four requests a broker, however many partitions there are. ``patience``: seconds to wait for a partition's leader,
    by default ``timeout``. Raises BrokerUnavailable where no broker answers within ``timeout`` seconds (by default WAIT),
    and TrustError.
    """
    names = list(dict.fromkeys(topics))
    if not names:
        return Survey({}, {})
    ask = Question(kafka, f"asking for {_topic_list(names)}", WAIT if timeout is None else timeout)

    def question() -> Survey:
        report = _survey(ask, names)
        for state in report.states.values():
            if state.away and ask.budget() > LAST_LOOK and (patience is None or ask.waiting_time < patience):
                raise LeaderMissing(str(min(state.away.items())[1]))
        return report

    return ask.await_leaders(question)


def topic_states(
    kafka: Mapping[str, str], topics: Sequence[str], timeout: float | None = None
) -> dict[str, TopicState]:
    """As ``survey``, with an error for a problem of any topic or partition."""
    report = survey(kafka, topics, timeout)
    for error in report.errors.values():
        raise error
    return dict(report.states)


def led_state(kafka: Mapping[str, str], topic: str, patience: float) -> TopicState | None:
    """The state of one topic, ``away`` included; None if the topic is missing. ``patience``: as for ``survey``."""
    report = survey(kafka, [topic], patience=patience)
    for error in report.problems.values():
        raise error
    return report.states.get(topic)


def _survey(ask: Question, names: list[str]) -> Survey:
    problems: dict[str, KafkaError] = {}
    ids: dict[str, str] = {}
    away: dict[str, dict[int, KafkaError]] = {}
    places: list[tuple[str, int]] = []
    wait = ask.attempt()
    for topic, future in ask(lambda admin, _: admin.describe_topics(TopicCollection(names), request_timeout=wait)):
        try:
            description = ask.answer(future, topic)
        except TopicMissing:
            continue
        except (BrokerUnavailable, TrustError):
            raise
        except KafkaError as error:
            problems[topic] = error
            continue
        ids[topic], away[topic] = str(description.topic_id), {}
        for item in sorted(description.partitions, key=lambda entry: entry.id):
            if item.leader is None or item.leader.id < 0:
                away[topic][item.id] = _leaderless(ask, topic, item.id, [entry.id for entry in item.replicas])
            else:
                places.append((topic, item.id))
    # All are asked at once, and awaited one after the other. An end below a high watermark that was read before it shows an
    # open transaction, and nothing else.
    requests = (
        ask.offsets(places, OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED),
        ask.offsets(places, OffsetSpec.earliest()),
        ask.offsets(places, OffsetSpec.latest()),
    )
    high, low, end = (_offsets(ask, answers, away, problems) for answers in requests)
    partitions: dict[str, list[PartitionState]] = {topic: [] for topic in ids}
    for place in places:
        topic, partition = place
        if all(place in offsets for offsets in (high, low, end)):
            partitions[topic].append(PartitionState(partition, low[place], end[place], end[place] < high[place]))
        elif partition not in away[topic]:
            # Deleted between the two questions, or the broker has just started and does not lead it yet: asked once more,
            # the description knows.
            away[topic][partition] = LeaderMissing(
                f"topic {topic} at {ask.servers} is described and has no offsets; try again when all its brokers are up"
            )
    known_topics = [topic for topic in names if topic in ids and topic not in problems]
    states = {topic: TopicState(topic, ids[topic], tuple(partitions[topic]), away[topic]) for topic in known_topics}
    return Survey(states, problems)


def _offsets(
    ask: Question,
    answers: Iterable[tuple[TopicPartition, Future[Any]]],
    away: Mapping[str, dict[int, KafkaError]],
    problems: dict[str, KafkaError],
) -> dict[tuple[str, int], int]:
    """(topic, partition) → offset. Adds the errors of the other partitions to ``away`` or ``problems``."""
    offsets: dict[tuple[str, int], int] = {}
    for (topic, partition), offset in ask.offsets_or_errors(answers):
        if isinstance(offset, int):
            offsets[topic, partition] = offset
        elif isinstance(offset, BrokerUnavailable):
            away[topic].setdefault(partition, offset)
        elif not isinstance(offset, TopicMissing):
            problems.setdefault(topic, offset)
    return offsets


def _leaderless(ask: Question, topic: str, partition: int, replicas: Sequence[int]) -> LeaderMissing:
    brokers = ", ".join(map(str, replicas))
    return LeaderMissing(
        f"topic {topic}, partition {partition} at {ask.servers} has no leader, so it can't be read or written. Start one of"
        f" the brokers that hold it (broker.id {brokers})."
    )


def topic_state(kafka: Mapping[str, str], topic: str, timeout: float | None = None) -> TopicState:
    """The state of one topic; TopicMissing for an unknown topic."""
    states = topic_states(kafka, [topic], timeout)
    if topic not in states:
        raise topic_missing(topic, servers(kafka))
    return states[topic]


def offsets_at(
    kafka: Mapping[str, str], topic: str, timestamp_ms: int, state: TopicState | None = None
) -> dict[int, int]:
    """Partition → the first offset whose timestamp is at or after ``timestamp_ms``; the partition's end if none is.

    ``timestamp_ms``: milliseconds since the epoch, UTC; ``state``: of the topic, if it is known.
    """
    state = state or topic_state(kafka, topic)
    ask = Question(kafka, f"asking for the offsets of {topic} at a time", WAIT)
    places = [(topic, item.partition) for item in state.partitions]
    offsets = ask.await_leaders(lambda: ask.collect(ask.offsets(places, OffsetSpec.for_timestamp(timestamp_ms))))
    return {
        item.partition: min(offsets[topic, item.partition], item.end)
        if offsets.get((topic, item.partition), -1) >= 0
        else item.end
        for item in state.partitions
    }


def high_watermark(kafka: Mapping[str, str], topic: str, partition: int) -> int:
    """The offset that the next record of any kind gets: unlike an end, it is past open transactions."""
    return high_watermarks(kafka, topic, [partition])[partition]


def high_watermarks(kafka: Mapping[str, str], topic: str, partitions: Iterable[int]) -> dict[int, int]:
    """Partition → its high watermark. TopicMissing if the topic, or one of the partitions, is not there."""
    # Asking for the offsets of a topic that is not there would create it.
    topic_state(kafka, topic)
    places = [(topic, partition) for partition in partitions]
    names = ", ".join(str(partition) for _, partition in places[:3]) + (", …" if len(places) > 3 else "")
    ask = Question(kafka, f"asking for the high watermark of {topic}/{names}", WAIT)
    offsets = ask.await_leaders(
        lambda: ask.collect(ask.offsets(places, OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED))
    )
    for place in places:
        if place not in offsets:
            raise TopicMissing(f"topic {topic} at {ask.servers} has no partition {place[1]}")
    return {partition: offsets[topic, partition] for _, partition in places}


def known_watermarks(kafka: Mapping[str, str], partitions: Mapping[str, Iterable[int]]) -> dict[str, dict[int, int]]:
    """Topic → partition → its high watermark, of existing topics. A topic has no entry if the brokers do not
    answer at once for all of its partitions. One request a broker, however many topics there are."""
    places = [(topic, partition) for topic, numbers in partitions.items() for partition in numbers]
    ask = Question(kafka, f"asking for the high watermarks of {_topic_list(list(partitions))}", WAIT)
    answers = ask.offsets_or_errors(ask.offsets(places, OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED))
    offsets = {place: offset for place, offset in answers if isinstance(offset, int)}
    highs: dict[str, dict[int, int]] = {}
    for (topic, partition), offset in offsets.items():
        highs.setdefault(topic, {})[partition] = offset
    return {
        topic: offset_by_partition
        for topic, offset_by_partition in highs.items()
        if len(offset_by_partition) == len(list(partitions[topic]))
    }


def create_topic(
    kafka: Mapping[str, str],
    topic: str,
    partitions: int,
    replication_factor: int,
    config: Mapping[str, str],
    *,
    anew: bool = False,
) -> TopicState:
    """Create ``topic`` unless the topic exists, wait for a leader of each partition, and return the topic's state.

    ``anew``: KafkaError if the topic exists.
    """
    ask = Question(kafka, f"creating topic {topic}", 3 * WAIT, "Create")
    new = NewTopic(topic, num_partitions=partitions, replication_factor=replication_factor, config=dict(config))
    for _, future in ask(lambda admin, budget: admin.create_topics([new], request_timeout=budget)):
        try:
            ask.result(future)
        except KafkaException as error:
            code, problem = error.args[0].code(), ask.connection.error(error, ask.doing, topic, ask.needs)
            if code == ClientError.INVALID_REPLICATION_FACTOR:
                raise KafkaError(f"{problem}; start the missing brokers, or lower replication-factor") from None
            if code != ClientError.TOPIC_ALREADY_EXISTS:
                raise problem from None
            if anew:
                raise KafkaError(
                    f"topic {topic} at {ask.servers} was deleted, and another program created it at once, perhaps with other"
                    " partitions and properties; stop the programs that read the topic or write to it, then run it again"
                ) from None
    while True:
        # A new topic is known before all of its partitions have a leader.
        try:
            return topic_state(kafka, topic, ask.budget())
        except NotAuthorized:
            raise
        except (TopicMissing, KafkaError):
            if ask.budget() <= 0.2:
                raise
        time.sleep(0.05)


def delete_topic(kafka: Mapping[str, str], topic: str) -> None:
    """Delete ``topic`` if the topic exists, and wait until the brokers no longer list the topic."""
    ask = Question(kafka, f"deleting topic {topic}", 3 * WAIT, "Delete")
    for _, future in ask(lambda admin, budget: admin.delete_topics([topic], request_timeout=budget)):
        try:
            ask.answer(future, topic)
        except TopicMissing:
            return
    while topic_states(kafka, [topic], max(ask.budget(), 0.2)):
        if ask.budget() <= 0.2:
            raise KafkaError(f"topic {topic} at {ask.servers} was deleted and is still listed; try again")
        time.sleep(0.05)


def record_limits(kafka: Mapping[str, str], topic: str) -> RecordLimits:
    """The records that a topic takes."""
    return _limits(_settings(kafka, topic))


def _limits(settings: Mapping[str, Any]) -> RecordLimits:
    return RecordLimits(int(settings[_MAX_BYTES].value), _has_compaction(str(settings[_POLICY].value)))


def _has_compaction(policy: str) -> bool:
    """Whether a ``cleanup.policy`` compacts: ``compact``, or ``compact,delete``."""
    return "compact" in policy


def known_limits(kafka: Mapping[str, str], topics: Sequence[str]) -> dict[str, RecordLimits | None]:
    """The records that those ``topics`` take whose configuration may be seen, None for a topic that is not there.
    No entry for the others, and for none where no broker answers in time."""
    ask = Question(kafka, f"asking for the configuration of {_topic_list(topics)}", SHORT_WAIT, "DescribeConfigs")
    resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
    limits: dict[str, RecordLimits | None] = {}
    for resource, future in ask(lambda admin, budget: admin.describe_configs(resources, request_timeout=budget)):
        topic = str(resource.name)
        try:
            limits[topic] = _limits(ask.answer(future, topic))
        except TopicMissing:
            limits[topic] = None
        except KafkaError:
            continue
    return limits


def new_topic_config(kafka: Mapping[str, str], config: Mapping[str, str]) -> tuple[dict[str, str], RecordLimits]:
    """The configuration to create a topic with, and the records that the topic will take. The largest size is that of ``config``,
    else the brokers' ``message.max.bytes``.

    If a right to read the brokers' configuration is missing, the topic gets Kafka's default limit as its own setting. ETL
    measures outputs by this limit before the topic exists.
    """
    limit, needs_key = config.get(_MAX_BYTES, "").strip(), _has_compaction(config.get(_POLICY, ""))
    if limit.isdigit():
        return dict(config), RecordLimits(int(limit), needs_key)
    try:
        return dict(config), RecordLimits(_broker_limit(kafka), needs_key)
    except BrokerUnavailable:
        raise
    except KafkaError:
        return {**config, _MAX_BYTES: str(DEFAULT_LIMIT)}, RecordLimits(DEFAULT_LIMIT, needs_key)


def _broker_limit(kafka: Mapping[str, str]) -> int:
    ask = Question(kafka, "asking for the brokers' message.max.bytes", WAIT, "DescribeConfigs")

    def question() -> int:
        wait = ask.attempt()
        answers = ask(lambda admin, _: {"": admin.describe_cluster(request_timeout=wait)})
        broker = next(ask.answer(future, "cluster") for _, future in answers).nodes[0]
        resource = ConfigResource(ResourceType.BROKER, str(broker.id))
        answers = ask(lambda admin, _: admin.describe_configs([resource], request_timeout=wait))
        return int(next(ask.answer(future, "cluster") for _, future in answers)["message.max.bytes"].value)

    return ask.await_leaders(question)


def is_compacted(kafka: Mapping[str, str], topic: str) -> bool:
    """Whether compaction may take records out of the topic's middle (``cleanup.policy``)."""
    return _has_compaction(str(_settings(kafka, topic)[_POLICY].value))


def refuse_broker_times(kafka: Mapping[str, str], topic: str) -> None:
    """KafkaError for a topic whose broker replaces the timestamps of records (``message.timestamp.type``)."""
    if _settings(kafka, topic)["message.timestamp.type"].value == "LogAppendTime":
        raise KafkaError(
            f"topic {topic} has message.timestamp.type=LogAppendTime: the broker replaces the timestamps of its records."
            " Set CreateTime, or use another topic."
        )


def _settings(kafka: Mapping[str, str], topic: str) -> Mapping[str, Any]:
    ask = Question(kafka, f"asking for the configuration of {topic}", WAIT, "DescribeConfigs")
    resource = ConfigResource(ResourceType.TOPIC, topic)

    def question() -> Mapping[str, Any]:
        wait = ask.attempt()
        answers = ask(lambda admin, _: admin.describe_configs([resource], request_timeout=wait))
        return next(ask.answer(future, topic) for _, future in answers)

    return ask.await_leaders(question)


def commit_group_offsets(kafka: Mapping[str, str], group: str, topic: str, offsets: Mapping[int, int]) -> None:
    """Commit the next offset of each partition for a consumer group, for monitoring tools. The package never reads it.

    Raises KafkaError if the group has members, a partition is missing, or the right to READ the group is missing.
    """
    ask = Question(kafka, f"committing offsets of {topic} for consumer group {group}", SHORT_WAIT, "Read", group)
    places = [TopicPartition(topic, partition, offset) for partition, offset in sorted(offsets.items())]
    request = [ConsumerGroupTopicPartitions(group, places)]
    for _, future in ask(lambda admin, budget: admin.alter_consumer_group_offsets(request, request_timeout=budget)):
        for place in ask.answer(future, topic).topic_partitions:
            if place.error is not None:
                raise ask.connection.error(place.error, ask.doing, topic, ask.needs, group)


def _topic_list(topics: Sequence[str]) -> str:
    names = ", ".join(topics[:3])
    return f"topic {names}" if len(topics) == 1 else f"topics {names}" + (", …" if len(topics) > 3 else "")
