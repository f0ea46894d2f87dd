"""Every login mechanism of a broker: accepted with the right settings, and a distinct error for a wrong secret, CA or
host."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import pyarrow as pa
import pytest

from zync_assets.errors import AuthenticationFailed, CertificateRejected
from zync_assets.kafka.reader import check_range, open_intake, read_range
from zync_assets.kafka.topics import create_topic, topic_state
from zync_assets.kafka.writer import InOrder
from zync_assets_tests.network.secured import Secured

TABLE = "table: ways into the broker: accepted, wrong secret, wrong CA, wrong host"
WRONG = "wrong-secret"
TLS = ("SSL", "mutual TLS", "SASL PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
MECHANISMS = ("PLAINTEXT", "SASL PLAIN, no TLS", *TLS)

Kafka: TypeAlias = Mapping[str, str]


def accepted(kafka: Kafka) -> list[bytes]:
    """Create a topic, write two records, and read their values: uses the admin client, a writer and a reader."""
    topic = "t" + secrets.token_hex(4)
    create_topic(kafka, topic, 1, 1, {})
    batch = pa.record_batch({"key": [b"k", None], "value": [b"v", b"w"]})
    with InOrder(kafka, topic, 0, 0, "zync to-kafka") as writer:
        writer.write(batch)
    return [value.as_py() for part in read_range(kafka, topic, 0, 0, 2) for value in part["value"]]


def wrong_secret(secured: Secured, mechanism: str) -> Kafka | None:
    way = secured.ways[mechanism]
    if mechanism == "mutual TLS":
        other = secured.stranger.client("other")
        return {**way, "ssl.certificate.location": str(other.certificate), "ssl.key.location": str(other.key)}
    secret = next((name for name in way if name in ("sasl.password", "sasl.oauthbearer.client.secret")), None)
    return None if secret is None else {**way, secret: WRONG}


def wrong_ca(secured: Secured, mechanism: str) -> Kafka | None:
    if mechanism not in TLS:
        return None
    return {**secured.ways[mechanism], "ssl.ca.location": str(secured.stranger.path)}


def wrong_host(secured: Secured, mechanism: str) -> Kafka | None:
    """The same broker under a name that its certificate does not have."""
    if mechanism not in TLS:
        return None
    way = secured.ways[mechanism]
    return {**way, "bootstrap.servers": way["bootstrap.servers"].replace("127.0.0.1", "localhost")}


CASES: Mapping[str, Callable[[Secured, str], Kafka | None]] = {
    "secret": wrong_secret,
    "ca": wrong_ca,
    "host": wrong_host,
}


def admin(kafka: Kafka) -> None:
    topic_state(kafka, "any")


def reader(kafka: Kafka) -> None:
    with open_intake(kafka, "any", 0, "reading any/0") as (intake, connection):
        check_range(intake, connection, "any", 0, 0, 1)


Attempts: TypeAlias = Mapping[tuple[str, str, str], Future[Any]]


@pytest.fixture(scope="module")
def attempts(secured: Secured) -> Attempts:
    """(mechanism, case, who tries) → how it went; all at once, since each refusal takes a moment."""
    with ThreadPoolExecutor(12) as pool:
        found: dict[tuple[str, str, str], Future[Any]] = {}
        for mechanism in MECHANISMS:
            found[mechanism, "accepted", ""] = pool.submit(accepted, secured.ways[mechanism])
            for case, wrong in CASES.items():
                if (kafka := wrong(secured, mechanism)) is not None:
                    for who in (admin, reader):
                        found[mechanism, case, who.__name__] = pool.submit(who, kafka)
    return found


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_way_into_the_broker(attempts: Attempts, secured: Secured, mechanism: str, record_property: Any) -> None:
    assert attempts[mechanism, "accepted", ""].result() == [b"v", b"w"]
    row = ["accepted"]
    name = "mutual TLS" if mechanism == "mutual TLS" else secured.ways[mechanism].get("sasl.mechanism")
    expected = {
        "secret": (AuthenticationFailed, f"authentication ({name}) failed at"),
        "ca": (CertificateRejected, f"is not signed by the CA in ssl.ca.location ({secured.stranger.path})"),
        "host": (CertificateRejected, "is for another host: it is for 127.0.0.1"),
    }
    for case, (kind, words) in expected.items():
        errors = [tried.exception() for (m, c, _), tried in attempts.items() if (m, c) == (mechanism, case)]
        for error in errors:
            assert type(error) is kind, error
            assert words in str(error)
            assert WRONG not in str(error) and secured.secret not in str(error)
        row.append(kind.__name__ if errors else "-")
    record_property(TABLE, " | ".join([mechanism, *row]))
