"""Connections as Dagster resources: typed, with secrets from the environment that nothing shows."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from dagster import EnvVar

from zync_assets.assets.resources import KafkaResource, RegistryResource, with_connections
from zync_assets.errors import SetupError
from zync_assets.pipeline import Pipeline

PIPELINE = Pipeline("p", Path("p.yaml"), {"bootstrap.servers": "file:9092"}, None, "lake", {}, (), (), ())
KAFKA = KafkaResource(
    bootstrap_servers="broker:9093",
    security_protocol="SASL_SSL",
    sasl_mechanism="SCRAM-SHA-512",
    sasl_username="zync",
    sasl_password=EnvVar("TEST_PASSWORD"),
    oauth_cb="package.module:function",
    properties={"socket.timeout.ms": "5000"},
)


def test_fields_are_librdkafkas_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_PASSWORD", "hidden")
    found = with_connections(PIPELINE, KAFKA, None)
    assert dict(found.kafka) == {
        "bootstrap.servers": "broker:9093",
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "zync",
        "sasl.password": "hidden",
        "oauth_cb": "package.module:function",
        "socket.timeout.ms": "5000",
    }
    assert pickle.loads(pickle.dumps(found.kafka)) == dict(found.kafka)
    assert "hidden" not in f"{found!r} {KAFKA!r} {found.kafka!r}"


def test_a_variable_is_asked_for_when_it_is_needed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_PASSWORD", raising=False)
    found = with_connections(PIPELINE, KAFKA, None)
    with pytest.raises(SetupError, match="KafkaResource: the environment has no TEST_PASSWORD"):
        dict(found.kafka)


def test_the_registry_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_LOGIN", "zync:hidden")
    resource = RegistryResource(
        url="https://registry:8081", basic_auth_user_info=EnvVar("TEST_LOGIN"), ssl_ca_location="ca"
    )
    found = with_connections(PIPELINE, None, resource).registry
    assert found is not None
    assert found.url == "https://registry:8081"
    assert dict(found.properties) == {"basic.auth.user.info": "zync:hidden", "ssl.ca.location": "ca"}
    assert "hidden" not in f"{found!r} {resource!r}"


@pytest.mark.parametrize(
    ("resource", "message"),
    [
        (
            KafkaResource(bootstrap_servers="b:9092", security_protocol="TLS"),
            "KafkaResource: security.protocol must be one of PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL",
        ),
        (
            KafkaResource(bootstrap_servers="b:9092", properties={"client.idd": "1"}),
            "KafkaResource: client.idd is no property of librdkafka; did you mean `client.id`?",
        ),
        (
            KafkaResource(bootstrap_servers="b:9092", oauth_cb="tokens"),
            "KafkaResource: oauth_cb must name a function, as in package.module:function",
        ),
        (RegistryResource(url="foo"), "RegistryResource: url must begin with http:// or https:// and a host"),
    ],
)
def test_a_wrong_value_is_named_as_in_a_file(resource: KafkaResource | RegistryResource, message: str) -> None:
    with pytest.raises(SetupError) as caught:
        resource.settings()
    assert str(caught.value) == message


def test_the_place_of_a_file_may_be_a_path() -> None:
    files: dict[str, Any] = {"ssl_ca_location": Path("/ca.pem"), "ssl_key_location": "/key.pem"}
    found = {"ssl.ca.location": "/ca.pem", "ssl.key.location": "/key.pem"}
    assert KafkaResource(bootstrap_servers="b", **files).settings() == {"bootstrap.servers": "b", **found}
    assert RegistryResource(url="http://r", **files).settings() == {"url": "http://r", **found}


def test_no_repr_and_no_error_of_a_resource_shows_a_secret() -> None:
    kafka = KafkaResource(
        bootstrap_servers="b:9092",
        sasl_password="hunter2",
        ssl_key_password="hunter2",
        sasl_oauthbearer_client_secret="hunter2",
        sasl_oauthbearer_config="principal=zync secret=hunter2",
        properties={"ssl.key.pem": "hunter2"},
    )
    registry = RegistryResource(url="https://zync:hunter2@registry", bearer_auth_token="hunter2")
    assert "hunter2" not in f"{kafka!r} {kafka} {registry!r} {registry}"
    for wrong in ({"sasl_password": ["hunter2"]}, {"sasl_pasword": "hunter2"}, {"properties": {"a": ["hunter2"]}}):
        given: dict[str, Any] = {"bootstrap_servers": "b:9092", **wrong}
        with pytest.raises(ValueError, match=next(iter(wrong))) as caught:
            KafkaResource(**given)
        assert "hunter2" not in str(caught.value)
