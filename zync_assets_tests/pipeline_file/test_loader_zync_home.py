"""``~/.zync/kafka.json`` and ``~/.zync/schema_registry.json``, as zync writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zync_assets.cli.topics import endpoints_of
from zync_assets.errors import PipelineFileError
from zync_assets.pipeline import Pipeline
from zync_assets.pipeline_file import load

FILE = """
inputs: [{topic: A, pool: Raw, format: avro}]
outputs: [{topic: B, pool: Staging, format: avro}]
transforms: [{type: stateless, in: A, out: B, key: in.key, value: in.value}]
"""
KAFKA = {
    "bootstrap_servers": "broker:9094",
    "security_protocol": "SASL_SSL",
    "sasl_mechanisms": "PLAIN",
    "sasl_username": "zync",
    "sasl_password": "hidden",
    "tls_server_ca_cert_file": "/ca.pem",
    "tls_client_cert_file": "",
    "tls_server_insecure_skip_verify": False,
    "socket.timeout.ms": 5000,
}
REGISTRY = {"url": "https://registry:8081", "user": "zync", "password": "hidden"}


def home(folder: Path, **files: Any) -> Path:
    (folder / ".zync").mkdir()
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / ".zync" / f"{name}.json").write_text(text)
    return folder


def loaded(folder: Path, text: str = FILE) -> Pipeline:
    path = folder / "p.yaml"
    path.write_text(text)
    return load(path, {"HOME": str(folder)})


def test_they_are_read_where_the_file_says_nothing(tmp_path: Path) -> None:
    found = loaded(home(tmp_path, kafka=KAFKA, schema_registry=REGISTRY))
    assert found.kafka == {
        "bootstrap.servers": "broker:9094",
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "zync",
        "sasl.password": "hidden",
        "ssl.ca.location": "/ca.pem",
        "enable.ssl.certificate.verification": "true",
        "socket.timeout.ms": "5000",
    }
    assert found.registry is not None
    assert found.registry.url == "https://registry:8081"
    assert found.registry.properties == {"basic.auth.user.info": "zync:hidden"}
    assert "hidden" not in repr(found)


def test_what_the_file_says_wins_as_a_whole(tmp_path: Path) -> None:
    own = 'kafka: {bootstrap.servers: "own:9092"}\nregistry: {url: "http://own:8081"}\n'
    found = loaded(home(tmp_path, kafka=KAFKA, schema_registry=REGISTRY), own + FILE)
    assert found.kafka == {"bootstrap.servers": "own:9092"}
    assert found.registry is not None and (found.registry.url, dict(found.registry.properties)) == (
        "http://own:8081",
        {},
    )


def test_the_environment_comes_before_them(tmp_path: Path) -> None:
    path = home(tmp_path, kafka=KAFKA, schema_registry=REGISTRY) / "p.yaml"
    env = {"HOME": str(tmp_path), "KAFKA_BOOTSTRAP_SERVERS": "env:9092", "SCHEMA_REGISTRY_URL": "http://env:8081"}
    path.write_text(FILE)
    found = load(path, env)
    assert found.kafka == {"bootstrap.servers": "env:9092"}
    assert found.registry is not None and found.registry.url == "http://env:8081"
    path.write_text("kafka: {client.id: shop}\n" + FILE)
    assert load(path, env).kafka == {"client.id": "shop", "bootstrap.servers": "env:9092"}


def test_without_them_the_defaults_hold(tmp_path: Path) -> None:
    for folder in (tmp_path, home(tmp_path, schema_registry={})):
        found = loaded(folder)
        assert found.kafka == {"bootstrap.servers": "localhost:9092"}
        assert found.registry is not None and found.registry.url == "http://localhost:8081"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"sasl_password": "hidden",}', "can't be read as JSON"),
        ('["hidden"]', "must be a JSON object"),
        ('{"sasl_passwort": "hidden"}', "sasl_passwort: is no key that is known here; did you mean `sasl_password`?"),
        ('{"sasl_password": ["hidden"]}', "sasl_password: must be one value"),
        ('{"tls_server_insecure_skip_verify": "hidden"}', "must be true or false"),
    ],
)
def test_a_broken_one_is_named_without_its_secrets(tmp_path: Path, content: str, said: str) -> None:
    with pytest.raises(PipelineFileError) as caught:
        loaded(home(tmp_path, kafka=content))
    assert said in str(caught.value)
    assert str(tmp_path / ".zync" / "kafka.json") in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_commands_without_a_pipeline_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home(tmp_path, kafka=KAFKA, schema_registry=REGISTRY)))
    for name in ("KAFKA_BOOTSTRAP_SERVERS", "SCHEMA_REGISTRY_URL"):
        monkeypatch.delenv(name, raising=False)
    found = endpoints_of(None, None, None)
    assert found.kafka["sasl.password"] == "hidden"
    assert found.registry is not None and found.registry.url == "https://registry:8081"
    assert endpoints_of(None, "other:9092", None).kafka == {"bootstrap.servers": "other:9092"}
