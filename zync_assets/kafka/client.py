"""librdkafka's clients: their configuration, their log, their tokens, and their errors as this package's own.

Tokens for OAUTHBEARER may come from a function of the user or of this package: ``oauth_cb: module:function``.
librdkafka fetches tokens itself from a server that accepts client credentials (``sasl.oauthbearer.method: oidc``). For other
servers librdkafka calls a callback, confluent-kafka's ``oauth_cb``. In a pipeline file ``oauth_cb`` is the function's name,
which travels to Spark's executors as text. An executor imports the function, and the function finds its credentials there.

A pipeline's ``kafka:`` mapping may hold any librdkafka property. The user's properties decide where and how to connect. The
package's own properties, on which exactly-once depends, override the user's.
"""

from __future__ import annotations

import importlib
import logging
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, TypeAlias

from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException, Producer, libversion

from zync_assets.errors import (
    AuthenticationFailed,
    BrokerUnavailable,
    KafkaError,
    NotAuthorized,
    SetupError,
    TopicMissing,
    ZyncError,
)
from zync_assets.kafka.trust import is_refusal, listener_cure, missing_file, trust_error

Token: TypeAlias = "tuple[str, float] | tuple[str, float, str, dict[str, str]]"
"""The token and when it ends (seconds since the epoch); then perhaps a principal and SASL extensions (RFC 7628)."""

Callback: TypeAlias = Callable[[str], Token]


def token_callback(name: str, config: str) -> Callback:
    """The function ``module:function`` as a callback for librdkafka.

    The function is called once now, with ``config`` (``sasl.oauthbearer.config``). Otherwise librdkafka would wait ten seconds
    for a missing token, and not report the cause. Raises SetupError for a missing function, and AuthenticationFailed if the
    function raises.
    """
    function = _function(name)
    ready = [_call(function, name, config)]

    def callback(config: str) -> Token:
        try:
            return ready.pop()
        except IndexError:
            return _call(function, name, config)

    return callback


def _function(name: str) -> Callback:
    module, _, attribute = name.partition(":")
    try:
        function: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SetupError(
            f"oauth_cb is {name}, and there is no such function ({error}); write module:function"
        ) from None
    return function


def _call(function: Callback, name: str, config: str) -> Token:
    try:
        return function(config)
    except ZyncError:
        raise
    except Exception as error:
        # The kind alone: what a stranger's error says may hold what it signed with.
        raise AuthenticationFailed(
            f"oauth_cb {name} made no token ({type(error).__name__}); run it by itself"
        ) from None


log = logging.getLogger(__name__)

ALIASES: Mapping[str, str] = {
    "acks": "request.required.acks",
    "message.timeout.ms": "delivery.timeout.ms",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "max.partition.fetch.bytes": "fetch.message.max.bytes",
    "retries": "message.send.max.retries",
    "linger.ms": "queue.buffering.max.ms",
}
"""Properties that librdkafka knows by two names: who overrides one must drop the other."""

METADATA_SECONDS = 1.0
"""The longest wait of a new producer for a broker."""

_METADATA = "sasl.oauthbearer.metadata.authentication.type"

RECONNECT: Mapping[str, str] = {
    # librdkafka waits half of this time between the connections to a bootstrap server and to a broker.
    "reconnect.backoff.ms": "20",
    # librdkafka waits up to 10 s before it tries again; a sensor asks every 5 s.
    "reconnect.backoff.max.ms": "1000",
    # Of several brokers, the one that takes a connection and says nothing is left after this time and not after 10 s.
    "api.version.request.timeout.ms": "3000",
}
"""How soon a broker that does not answer is asked again, or another one in its place."""

_LOGIN = " --command-config admin.properties"
"""The option of ``kafka-acls.sh`` for a listener with logins: a file with the login of an administrator."""
_ANSWER_BYTES = "receive.message.max.bytes"
UNREACHABLE = frozenset(
    {
        ClientError._TRANSPORT,
        ClientError._ALL_BROKERS_DOWN,
        ClientError._RESOLVE,
        ClientError._TIMED_OUT,
        ClientError._TIMED_OUT_QUEUE,
        ClientError._MSG_TIMED_OUT,
        ClientError._WAIT_COORD,
        # A login or certificate that was refused has its own error before this point. Here remain passing troubles: a token
        # endpoint that is down, a broken handshake.
        ClientError._AUTHENTICATION,
        ClientError._SSL,
        ClientError.REQUEST_TIMED_OUT,
        ClientError.BROKER_NOT_AVAILABLE,
        ClientError.NETWORK_EXCEPTION,
    }
)

PATIENCE = 1.0
"""Seconds that a refusal stands before it is the answer: another broker of the list may answer meanwhile, or this one at
the next try."""

AUTHORIZATION_ERRORS = frozenset(
    {
        ClientError.TOPIC_AUTHORIZATION_FAILED,
        # Who may write to no topic at all gets no producer id (KIP-679).
        ClientError.CLUSTER_AUTHORIZATION_FAILED,
    }
)

Operation: TypeAlias = Literal["Describe", "DescribeConfigs", "Read", "Write", "Create", "Delete"]
"""The operations of an ACL on a topic, spelled as in Kafka's own tools. Read, Write and Delete allow Describe too."""

UNKNOWN_TOPIC = frozenset(
    {ClientError.UNKNOWN_TOPIC_OR_PART, ClientError._UNKNOWN_TOPIC, ClientError._UNKNOWN_PARTITION}
)


def librdkafka_version() -> str:
    """The version of the C library below, such as ``2.16.0``."""
    return str(libversion()[0])


def servers(kafka: Mapping[str, str]) -> str:
    """The broker's addresses, for a message."""
    return kafka.get("bootstrap.servers") or kafka.get("metadata.broker.list") or "(no bootstrap.servers given)"


class Connection:
    """One client's configuration, and the last trouble that the client reported.

    librdkafka reports trouble with a broker to a callback and tries again. The caller decides when the wait is too long,
    and then names the trouble in the error.
    """

    def __init__(
        self,
        kafka: Mapping[str, str],
        overrides: Mapping[str, Any],
        defaults: Mapping[str, str] | None = None,
    ) -> None:
        """``overrides`` wins over the user's ``kafka``, which overrides ``defaults``.

        Raises SetupError or AuthenticationFailed where ``oauth_cb`` names a function that makes no token; SetupError for a
        login that only confluent-kafka's own clients know.
        """
        self.servers = servers(kafka)
        self.trouble: ClientError | None = None
        self._kafka = kafka
        self._refusal: tuple[ClientError, float] | None = None
        exclusions = set(overrides) | {ALIASES[name] for name in overrides if name in ALIASES}
        # Nothing here is transactional: a marker would take an offset.
        exclusions.add("transactional.id")
        users = {name: value for name, value in kafka.items() if name not in exclusions}
        tokens: dict[str, Any] = {}
        if "oauth_cb" in users:
            tokens["oauth_cb"] = token_callback(users["oauth_cb"], users.get("sasl.oauthbearer.config", ""))
        elif users.get(_METADATA) == "aws_iam":
            raise SetupError(
                f"{_METADATA}: aws_iam is a setting of confluent-kafka's clients, and records go by librdkafka's functions,"
                " which do not know it; name a function that makes the token: oauth_cb: module:function"
            )
        self.properties: dict[str, Any] = {
            **RECONNECT,
            **(defaults or {}),
            **users,
            **tokens,
            **overrides,
            "error_cb": self._note,
            "logger": _LOG,
        }

    def _note(self, error: ClientError) -> None:
        # A sum of the brokers that are down gives no reason.
        if self.trouble is None or error.code() != ClientError._ALL_BROKERS_DOWN:
            self.trouble = error
        if is_refusal(error) and self._refusal is None:
            self._refusal = error, time.monotonic()
        log.debug("%s: %s", self.servers, error.str())

    def idempotent_producer(self, topic: str) -> Producer:
        """A producer that asks for its id now, as ``zero_copy.Handover`` does, and not half a second later.

        Raises KafkaException and ValueError for a property that librdkafka refuses. Without a broker, a later call has the
        error.
        """
        producer = Producer(self.properties)
        with suppress(KafkaException):
            for _ in range(2):
                producer.list_topics(topic, timeout=METADATA_SECONDS)
        return producer

    def note_answer(self) -> None:
        """A broker answered: what was refused before is over."""
        self._refusal = None

    def raise_refusal(self, doing: str, since: float) -> None:
        """Raise TrustError if a broker and this client do not trust each other, and nobody answered in time.

        ``since``: when the waiting began (``time.monotonic``). librdkafka itself would go on trying for ever.
        """
        if self._refusal is not None and time.monotonic() > max(self._refusal[1], since) + PATIENCE:
            raise trust_error(self._refusal[0], self._kafka, self.servers, doing)

    def raise_missing(self, topic: str) -> None:
        """Raise TopicMissing if the last trouble was that ``topic`` is not there (any more): waiting won't help."""
        if self.trouble is not None and self.trouble.code() in UNKNOWN_TOPIC:
            raise topic_missing(topic, self.servers)

    def unavailable(self, doing: str) -> BrokerUnavailable:
        """The error for "no answer in time" while ``doing`` (a phrase such as "reading orders")."""
        is_concrete = self.trouble is not None and self.trouble.code() != ClientError._ALL_BROKERS_DOWN
        trouble = self.trouble.str() if self.trouble is not None and is_concrete else ""
        cure = listener_cure(trouble) or "check bootstrap.servers and that the broker is up"
        if _ANSWER_BYTES in trouble:
            cure = f"a record is larger than {_ANSWER_BYTES} of kafka allows: set it higher in the pipeline file"
        return BrokerUnavailable(
            f"no Kafka broker answered at {self.servers} while {doing}{trouble and f' ({trouble})'}; {cure}"
        )

    def stalled(self, doing: str) -> BrokerUnavailable:
        """The error for "no acknowledgement in time" while ``doing``. librdkafka does not report that replicas are missing."""
        rule = "a partition takes no record while fewer replicas are in sync than its min.insync.replicas"
        return BrokerUnavailable(f"{self.unavailable(doing)}; {rule}")

    def error(
        self,
        error: ClientError | Exception,
        doing: str,
        topic: str | None = None,
        needs: Operation = "Describe",
        group: str | None = None,
    ) -> KafkaError:
        """librdkafka's error, or what its client raised instead (a ValueError for a property), as one of this package's, for
        the caller to raise.

        ``topic``: what was asked for; ``needs``: the operation on it that an ACL must allow; ``group``: the consumer group that
        was asked for.
        """
        cause = error.args[0] if isinstance(error, KafkaException) and error.args else error
        if not isinstance(cause, ClientError):
            return KafkaError(f"{doing} at {self.servers}: {cause}")
        if is_refusal(cause):
            return trust_error(cause, self._kafka, self.servers, doing)
        if cause.code() in UNREACHABLE:
            if self._refusal is not None:
                return trust_error(self._refusal[0], self._kafka, self.servers, doing)
            if self.trouble is None:
                self.trouble = cause
            return self.unavailable(doing)
        if topic is not None and cause.code() in UNKNOWN_TOPIC:
            return topic_missing(topic, self.servers)
        if topic is not None and _is_authorization_error(cause):
            return self._authorization_error(doing, "topic", topic, needs)
        if group is not None and cause.code() == ClientError.GROUP_AUTHORIZATION_FAILED:
            return self._authorization_error(doing, "group", group, needs)
        reason = f"{cause.str()} ({cause.name()})"
        if cause.code() == ClientError._INVALID_ARG and "ssl.key.location" in reason:
            reason += "; check ssl.key.password, and that the key is that of ssl.certificate.location"
        fault = missing_file(self._kafka) if cause.code() == ClientError._INVALID_ARG else None
        return KafkaError(f"{doing} at {self.servers}: {fault or reason}")

    def _authorization_error(self, doing: str, kind: str, name: str, needs: Operation) -> NotAuthorized:
        """The error for a missing right, with the command that grants it. A user's name is no secret."""
        user = self._kafka.get("sasl.username") or self._kafka.get("sasl.user.name")
        principal = f"User:{user}" if user else "this client's principal"
        # A listener that knows its clients wants to know the administrator, too.
        login = "" if self._kafka.get("security.protocol", "plaintext").lower() == "plaintext" else _LOGIN
        return NotAuthorized(
            f"{doing} at {self.servers}: {principal} may not {needs} {kind} {name}; remove an ACL that denies it, or allow it:"
            f" kafka-acls.sh --bootstrap-server {self.servers}{login} --add --allow-principal"
            f" {shlex.quote(principal) if user else 'User:…'} --operation {needs} --{kind} {shlex.quote(name)}"
        )


def _is_authorization_error(error: ClientError) -> bool:
    # The fatal error of an idempotent producer has its own code, and quotes the broker's error in its text.
    return error.code() in AUTHORIZATION_ERRORS or any(
        ClientError(code).str() in error.str() for code in AUTHORIZATION_ERRORS
    )


def topic_missing(topic: str, at: str) -> TopicMissing:
    """The error for a topic that ``at`` does not have."""
    return TopicMissing(f"topic {topic} does not exist at {at}; create it, or correct the name")


class _DebugLog:
    """librdkafka's own log lines, which go to stderr by default, as debug lines of Python's logging."""

    def log(self, level: int, message: str, *args: object) -> None:
        log.debug(message, *args)


_LOG = _DebugLog()
