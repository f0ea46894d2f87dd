"""The registry's client against a real registry."""

from __future__ import annotations

import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fastavro
import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient

from zync_assets.errors import RegistryError, RegistryUnavailable, SchemaError, SchemaUnknown
from zync_assets.kafka.registry import Registry, inline
from zync_assets.local.services import Services
from zync_assets.pipeline import RegistryConfig


def record(full_name: str, **fields: Any) -> str:
    """A record's schema as JSON."""
    namespace, _, name = full_name.rpartition(".")
    listed = [{"name": field, "type": type} for field, type in fields.items()]
    return json.dumps({"type": "record", "name": name, "namespace": namespace, "fields": listed})


ORDER = record("shop.Order", id="long")
OTHER = record("shop.Order", id="string")
WIDER = json.dumps(
    {
        **json.loads(ORDER),
        "fields": [{"name": "id", "type": "long"}, {"name": "item", "type": "string", "default": "-"}],
    }
)


@pytest.fixture
def registry(services: Services) -> Registry:
    return Registry(RegistryConfig(services.registry_url))


@pytest.mark.parametrize("url", ["http://host:abc", "http://[::1"])
def test_an_address_that_is_none_is_an_error_of_the_registry(url: str) -> None:
    with pytest.raises(RegistryError, match=r"listing subjects: .*; check `registry:`$") as caught:
        Registry(RegistryConfig(url)).subjects()
    assert not isinstance(caught.value, RegistryUnavailable)


def test_a_registered_schema_comes_back_by_id(registry: Registry, unique: str) -> None:
    id = registry.register(f"{unique}-value", ORDER)
    assert json.loads(registry.schema(id)) == json.loads(ORDER)
    assert registry.register(f"{unique}-value", ORDER) == id


def test_clients_that_create_a_subject_at_the_same_moment_get_one_id(services: Services, unique: str) -> None:
    config, clients = RegistryConfig(services.registry_url), 8
    for number in range(10):
        start, subject = threading.Barrier(clients), f"{unique}-{number}-value"

        def register(_: int, start: threading.Barrier = start, subject: str = subject) -> int:
            registry = Registry(config)
            start.wait()
            return registry.register(subject, ORDER)

        with ThreadPoolExecutor(clients) as pool:
            assert len(set(pool.map(register, range(clients)))) == 1


def test_a_subject_keeps_its_versions(registry: Registry, unique: str) -> None:
    subject = f"{unique}.with.dots-value"
    assert registry.latest(subject) is None
    registry.register(subject, ORDER)
    second = registry.register(subject, WIDER)
    latest = registry.latest(subject)
    assert latest is not None
    assert (latest[0], json.loads(latest[1])) == (second, json.loads(WIDER))
    assert registry.versions(subject) == [1, 2]
    assert subject in registry.subjects()


def test_a_primitive_schema(registry: Registry, unique: str) -> None:
    assert json.loads(registry.schema(registry.register(f"{unique}-key", '"string"'))) == "string"


def test_an_incompatible_schema_is_refused_in_the_registrys_words(
    services: Services, registry: Registry, unique: str
) -> None:
    subject = f"{unique}-value"
    registry.register(subject, ORDER)
    SchemaRegistryClient({"url": services.registry_url}).set_compatibility(subject, "BACKWARD")
    with pytest.raises(RegistryError, match=rf"(?i){subject}.*compatib"):
        registry.register(subject, OTHER)


def test_an_unknown_id_is_named(services: Services) -> None:
    with pytest.raises(SchemaUnknown, match="987654321"):
        Registry(RegistryConfig(services.registry_url, {"max.retries": "0"})).schema(987654321)


def test_an_address_that_is_no_registry_says_nothing_of_an_id(services: Services) -> None:
    """Its 404 must not put good records into quarantine. A proxy gives it while the registry restarts: ``run`` waits."""
    with pytest.raises(RegistryUnavailable) as caught:
        Registry(RegistryConfig(f"{services.registry_url}/elsewhere", {"max.retries": "0"})).schema(1)
    assert not isinstance(caught.value, SchemaUnknown)
    assert str(caught.value).endswith("; check registry.url, its path too")


def test_references_are_put_into_one_document(services: Services, registry: Registry, unique: str) -> None:
    client = SchemaRegistryClient({"url": services.registry_url})
    client.register_schema(f"{unique}-money", Schema(record("shop.types.Money", cents="long"), "AVRO"))
    bill = record("shop.Bill", net="shop.types.Money", tax=["null", "shop.types.Money"])
    reference = SchemaReference("shop.types.Money", f"{unique}-money", 1)
    id = client.register_schema(f"{unique}-bill", Schema(bill, "AVRO", [reference]))

    parsed = fastavro.parse_schema(json.loads(registry.schema(id)))

    assert fastavro.schema.fullname(parsed) == "shop.Bill"
    latest = registry.latest(f"{unique}-bill")
    assert latest is not None and "cents" in latest[1]


def test_names_keep_their_meaning_when_definitions_move() -> None:
    unit = '{"type": "enum", "name": "Unit", "symbols": ["KG"]}'
    weight = record("a.Weight", unit="Unit", next=["null", "Weight"])
    box = record(
        "b.Box",
        w={"type": "array", "items": "a.Weight"},
        m={"type": "map", "values": "a.Weight"},
        t={"type": "long", "logicalType": "timestamp-millis"},
    )
    whole = inline(box, [unit, weight])
    parsed = fastavro.parse_schema(json.loads(whole))
    weight_type = json.loads(whole)["fields"][0]["type"]["items"]
    assert (weight_type["namespace"], weight_type["name"]) == ("a", "Weight")
    assert weight_type["fields"][0]["type"]["namespace"] == ""
    assert json.loads(whole)["fields"][1]["type"]["values"] == "a.Weight"
    assert fastavro.schema.fullname(parsed) == "b.Box"


def test_a_name_that_nothing_defines_is_an_error() -> None:
    with pytest.raises(SchemaError, match=r"shop\.Nothing"):
        inline('{"type": "record", "name": "shop.A", "fields": [{"name": "x", "type": "Nothing"}]}', [])


def test_a_registry_travels_to_a_worker(registry: Registry, unique: str) -> None:
    id = registry.register(unique, ORDER)
    assert json.loads(pickle.loads(pickle.dumps(registry)).schema(id)) == json.loads(ORDER)


def test_a_registry_that_is_gone_is_reported_without_secrets() -> None:
    gone = Registry(RegistryConfig("http://user:secret@127.0.0.1:1/api", {"max.retries": "1", "retries.wait.ms": "10"}))
    with pytest.raises(RegistryUnavailable, match=r"http://127\.0\.0\.1:1/api") as caught:
        gone.subjects()
    assert "secret" not in str(caught.value)


def test_what_was_seen_is_known_in_an_outage(registry: Registry, services: Services, unique: str) -> None:
    config = RegistryConfig(services.registry_url)
    id = Registry(config).register(unique, ORDER)
    Registry(config).schema(id)
    blind = Registry(RegistryConfig(services.registry_url, {"proxy": "http://127.0.0.1:1", "max.retries": "0"}))
    assert json.loads(blind.schema(id)) == json.loads(ORDER)
    with pytest.raises(RegistryUnavailable):
        blind.subjects()


def test_an_unknown_property_is_an_error() -> None:
    with pytest.raises(RegistryError, match=r"no\.such"):
        Registry(RegistryConfig("http://127.0.0.1:1", {"no.such": "1"})).subjects()
