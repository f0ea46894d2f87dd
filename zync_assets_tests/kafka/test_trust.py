"""librdkafka's reports of lasting trouble, as opposed to passing trouble."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import KafkaError as ClientError

from zync_assets.errors import KafkaError, RegistryError
from zync_assets.kafka.client import Connection
from zync_assets.kafka.registry import Registry
from zync_assets.kafka.topics import create_topic
from zync_assets.kafka.trust import is_refusal, trust_error
from zync_assets.pipeline import RegistryConfig
from zync_assets_tests.network.certificates import Authority

TOKEN = "Failed to acquire SASL OAUTHBEARER token: "


@pytest.mark.parametrize(
    ("code", "text", "refused"),
    [
        (ClientError._AUTHENTICATION, "SASL authentication error: Authentication failed", True),
        (ClientError._AUTHENTICATION, TOKEN + '{"error": "invalid_client"}', True),
        (ClientError._AUTHENTICATION, TOKEN + "Failed to connect to 127.0.0.1:1 after 0 ms: Could not connect", False),
        (ClientError._TRANSPORT, "ssl://h:1/bootstrap: error:0A000086:SSL routines::certificate verify failed", True),
        (ClientError._SSL, "ssl://h:1/1: Receive failed: ssl/tls alert bad certificate: SSL alert number 42", True),
        (ClientError._TRANSPORT, "ssl://h:1/1: SSL handshake failed: Disconnected: connection closed by peer", False),
        (ClientError._ALL_BROKERS_DOWN, "1/1 brokers are down", False),
    ],
)
def test_a_refusal_is_told_from_an_outage(code: int, text: str, refused: bool) -> None:
    assert is_refusal(ClientError(code, text)) is refused


def test_a_login_at_a_listener_without_logins_has_its_cure() -> None:
    words = (
        "SASL PLAIN mechanism handshake failed: Broker: Request not valid in current SASL state: supported mechanisms: "
    )
    error = trust_error(
        ClientError(ClientError._AUTHENTICATION, words), {"sasl.mechanism": "PLAIN"}, "h:1", "reading t"
    )
    assert str(error).endswith(
        "; correct security.protocol, or the port in bootstrap.servers: the listener seems to have another protocol"
    )


def test_the_number_of_brokers_that_are_down_is_no_reason() -> None:
    connection = Connection({"bootstrap.servers": "h:1"}, {})
    note = connection.properties["error_cb"]
    down = ClientError(ClientError._ALL_BROKERS_DOWN, "0/2 brokers are down")
    note(down)
    outage = "no Kafka broker answered at h:1 while reading t"
    assert str(connection.unavailable("reading t")).startswith(f"{outage}; check bootstrap.servers")
    for error in (ClientError(ClientError._TRANSPORT, "h:1/bootstrap: Connect failed: Connection refused"), down):
        note(error)
        assert str(connection.unavailable("reading t")).startswith(f"{outage} (h:1/bootstrap: Connect failed")


def test_tls_at_a_listener_without_tls_has_its_cure() -> None:
    connection = Connection({"bootstrap.servers": "h:1"}, {})
    connection.trouble = ClientError(
        ClientError._SSL, "SSL connection closed by peer: connecting to a PLAINTEXT broker listener? (after 0ms)"
    )
    assert "; correct security.protocol, or the port" in str(connection.unavailable("reading t"))
    connection.trouble = None
    assert str(connection.unavailable("reading t")).endswith("; check bootstrap.servers and that the broker is up")


@pytest.mark.parametrize("name", ["ssl.ca.location", "ssl.certificate.location", "ssl.key.location"])
def test_a_file_that_is_missing_is_named(name: str) -> None:
    kafka = {"bootstrap.servers": "h:1", "security.protocol": "SSL", name: "/absent/file.pem"}
    with pytest.raises(KafkaError, match=f" at h:1: {name}: there is no /absent/file.pem; correct the path"):
        create_topic(kafka, "t", 1, 1, {})
    with pytest.raises(RegistryError, match=f": {name}: there is no /absent/file.pem; correct the path"):
        Registry(RegistryConfig("https://127.0.0.1:1", {name: "/absent/file.pem"})).subjects()


def test_a_key_that_its_password_does_not_open_has_its_cure(tmp_path: Path) -> None:
    client = Authority(tmp_path, "authority").client("client")
    kafka = {"ssl.certificate.location": str(client.certificate), "ssl.key.location": str(tmp_path)}
    with pytest.raises(KafkaError, match=r"ssl.key.location failed: .*; check ssl.key.password, and that the key"):
        create_topic({"bootstrap.servers": "h:1", "security.protocol": "SSL", **kafka}, "t", 1, 1, {})
