"""Requests to the brokers through librdkafka's admin client, with a deadline. Another broker may get the same request.

A broker may hang or be dead while it is the leader of a partition. Kafka then elects another leader, and the request goes to
the new leader.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from confluent_kafka import OFFSET_INVALID, IsolationLevel, KafkaException, TopicPartition
from confluent_kafka import KafkaError as ClientError
from confluent_kafka.admin import (
    AdminClient,  # pyright: ignore[reportPrivateImportUsage]
    OffsetSpec,  # pyright: ignore[reportPrivateImportUsage]
)

from zync_assets.errors import BrokerUnavailable, KafkaError, LeaderMissing, TopicMissing, TrustError
from zync_assets.kafka.client import Connection, Operation

T = TypeVar("T")

ATTEMPT = 4.0
"""Seconds to wait for one broker. The request then goes to another broker, or to a leader that was elected since."""
ELECTION = 3.0
"""The factor on a timeout for a cluster of several brokers, and for a partition's leader if any broker has answered. Kafka
takes a silent broker for dead after nine seconds, and then elects another leader."""

LOOK = 0.1
"""Seconds between two looks at a client's errors while a request is open."""

_admins: dict[tuple[int, frozenset[tuple[str, str]]], _Admin] = {}
_admins_lock = threading.Lock()


class _Admin:
    """An admin client that is kept: connecting takes longer than any of its answers."""

    def __init__(self, kafka: Mapping[str, str]) -> None:
        # librdkafka's admin client is a producer, and checks a producer's properties.
        self.connection = Connection(kafka, {"enable.idempotence": False, "enable.gapless.guarantee": False})
        try:
            self.client = AdminClient(self.connection.properties)
        except (KafkaException, ValueError) as error:
            raise self.connection.error(error, "setting up a client") from None


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
        for key, admin in list(_admins.items()):
            if admin is old:
                del _admins[key]
    return _admin(kafka)


BETWEEN_LEADERS = {
    ClientError.NOT_LEADER_FOR_PARTITION,
    ClientError.LEADER_NOT_AVAILABLE,
    ClientError.FENCED_LEADER_EPOCH,
    ClientError.UNKNOWN_LEADER_EPOCH,
    # A new leader does not know yet how far its followers are (KIP-207).
    ClientError.OFFSET_NOT_AVAILABLE,
    # librdkafka's "No leaders found": of none of the partitions that were asked for, as while a lone broker comes back.
    ClientError._NOENT,
}


class Question:
    """Several requests with one common deadline, and one name for error messages."""

    def __init__(
        self,
        kafka: Mapping[str, str],
        doing: str,
        timeout: float,
        needs: Operation = "Describe",
        group: str | None = None,
    ) -> None:
        self._kafka = kafka
        self._admin = _admin(kafka)
        # Trouble reports wait in a queue. The reports of an earlier question are outdated.
        self._admin.client.poll(0)
        self.connection = self._admin.connection
        self.connection.trouble = None
        self.servers = self.connection.servers
        self.doing = doing
        self.needs: Operation = needs
        self.group = group
        self._began = time.monotonic()
        self._timeout = timeout
        # With several known brokers, another broker can take over.
        self._deadline = self._began + timeout * (ELECTION if "," in self.servers else 1)

    def budget(self) -> float:
        """Seconds to the deadline, at least a tenth."""
        return max(self._deadline - time.monotonic(), 0.1)

    @property
    def waiting_time(self) -> float:
        """Seconds since the first request."""
        return time.monotonic() - self._began

    def attempt(self) -> float:
        """Seconds for a question that is asked again."""
        return min(self.budget(), ATTEMPT)

    def __call__(
        self, request: Callable[[AdminClient, float], Mapping[Any, Future[Any]]]
    ) -> Iterable[tuple[Any, Future[Any]]]:
        try:
            return request(self._admin.client, self.budget()).items()
        except (KafkaException, ValueError) as error:
            raise self.connection.error(error, self.doing) from None

    def answer(self, future: Future[T], topic: str) -> T:
        try:
            result = self.result(future)
        except KafkaException as error:
            self._admin.client.poll(0)
            problem = self.connection.error(error, self.doing, topic, self.needs, self.group)
            if error.args and isinstance(error.args[0], ClientError) and error.args[0].code() in BETWEEN_LEADERS:
                raise BrokerUnavailable(str(problem)) from None
            raise problem from None
        except FutureTimeout:
            self._admin.client.poll(0)
            raise self.connection.unavailable(self.doing) from None
        self.connection.note_answer()
        self._deadline = max(self._deadline, self._began + ELECTION * self._timeout)
        return result

    def result(self, future: Future[T]) -> T:
        """The answer; TrustError as soon as it is plain that none will come, FutureTimeout after the deadline."""
        give_up = time.monotonic() + self.budget() + 1
        while True:
            try:
                return future.result(LOOK)
            except FutureTimeout:
                self._admin.client.poll(0)
                self.connection.raise_refusal(self.doing, self._began)
                if time.monotonic() > give_up:
                    raise

    def await_leaders(self, question: Callable[[], T]) -> T:
        """Ask again until the deadline.

        A partition may have no leader yet, because the partition is new or its leader has just failed. The broker that
        received the request may hang.
        """
        start = time.monotonic()
        while True:
            try:
                return question()
            except BrokerUnavailable:
                if self.budget() <= 0.2:
                    raise
            if time.monotonic() > start + ATTEMPT - 1:
                # A client keeps its first broker until it learns of another broker. It also keeps a refused leader epoch
                # until its metadata expires. A new client has neither.
                self._admin = _another_admin(self._kafka, self._admin)
                self.connection = self._admin.connection
                start = time.monotonic()
            time.sleep(0.1)

    def offsets(
        self,
        places: Iterable[tuple[str, int]],
        spec: OffsetSpec | None,
        isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
    ) -> Iterable[tuple[TopicPartition, Future[Any]]]:
        request: dict[Any, Any] = {TopicPartition(topic, partition): spec for topic, partition in places}
        if not request:
            return ()
        wait = self.attempt()
        return self(lambda admin, _: admin.list_offsets(request, isolation_level=isolation, request_timeout=wait))

    def collect(self, answers: Iterable[tuple[TopicPartition, Future[Any]]]) -> dict[tuple[str, int], int]:
        """The offsets by topic and partition, without those that do not exist (any more)."""
        offsets: dict[tuple[str, int], int] = {}
        for place, offset in self.offsets_or_errors(answers):
            if isinstance(offset, TopicMissing):
                continue
            if isinstance(offset, KafkaError):
                raise offset
            offsets[place] = offset
        return offsets

    def offsets_or_errors(
        self, answers: Iterable[tuple[TopicPartition, Future[Any]]]
    ) -> Iterator[tuple[tuple[str, int], int | KafkaError]]:
        """The offset of each topic and partition, or why there is none. Raises TrustError."""
        for place, future in answers:
            try:
                offset: int | KafkaError = self.answer(future, place.topic).offset
            except TrustError:
                raise
            except KafkaError as error:
                offset = error
            if offset == OFFSET_INVALID:
                # So librdkafka answers for a leader that went away under the question.
                offset = LeaderMissing(
                    f"the leader of {place.topic}/{place.partition} at {self.servers} did not answer while {self.doing}; "
                    "try again when there is a leader"
                )
            yield (place.topic, place.partition), offset
