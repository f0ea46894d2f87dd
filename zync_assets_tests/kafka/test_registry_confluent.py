"""confluent-kafka's deserializer reads our records, and we read its serializer's records, over a real registry."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import (
    Schema,
    SchemaReference,
    SchemaRegistryClient,
    record_subject_name_strategy,
    topic_record_subject_name_strategy,
    topic_subject_name_strategy,
)
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from zync_assets.codecs.avro.schema import subject_name
from zync_assets.codecs.avro.types import arrow_type
from zync_assets.codecs.dispatch import make_decoder, make_encoder
from zync_assets.kafka.registry import Registry
from zync_assets.local.services import Services
from zync_assets.pipeline import RegistryConfig, SideFormat

ADDRESS = {"type": "record", "name": "Address", "namespace": "shop", "fields": [{"name": "city", "type": "string"}]}
FIELDS: dict[str, tuple[Any, Any, Any]] = {
    # Field: schema, what Python's serializer takes, what the lake holds.
    "id": ("long", 7, 7),
    "price": (
        {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
        Decimal("12.50"),
        Decimal("12.50"),
    ),
    "day": ({"type": "int", "logicalType": "date"}, datetime.date(2024, 2, 29), datetime.date(2024, 2, 29)),
    "at": (
        {"type": "long", "logicalType": "timestamp-micros"},
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4, datetime.UTC),
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4, datetime.UTC),
    ),
    "note": (["null", "string"], None, None),
    "wide": (["null", "string", "long"], 5, {"string": None, "long": 5}),
    "tags": ({"type": "array", "items": "string"}, ["a", "b"], ["a", "b"]),
    "sizes": ({"type": "map", "values": "int"}, {"s": 1}, [("s", 1)]),
    "mood": ({"type": "enum", "name": "Mood", "symbols": ["GOOD", "BAD"]}, "BAD", "BAD"),
    "hash": ({"type": "fixed", "name": "Hash", "size": 2}, b"\0\xff", b"\0\xff"),
}
VALUE = {name: value for name, (_, value, _) in FIELDS.items()}
HELD = {name: held for name, (_, _, held) in FIELDS.items()}
SCHEMA = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [{"name": name, "type": kind} for name, (kind, _, _) in FIELDS.items()],
}


@pytest.fixture
def client(services: Services) -> SchemaRegistryClient:
    return SchemaRegistryClient({"url": services.registry_url})


@pytest.fixture
def registry(services: Services) -> Registry:
    return Registry(RegistryConfig(services.registry_url))


def place(topic: str, side: MessageField = MessageField.VALUE) -> SerializationContext:
    return SerializationContext(topic, side)


def test_what_confluent_s_serializer_writes_is_read(
    client: SchemaRegistryClient, registry: Registry, unique: str
) -> None:
    payload = AvroSerializer(client, json.dumps(SCHEMA))(VALUE, place(unique))  # pyright: ignore[reportCallIssue]
    for native in (True, False):
        decoded = make_decoder(SideFormat("avro"), registry.schema, None, native=native).decode(pa.array([payload]))
        assert (decoded.bad, decoded.values.to_pylist()) == ((), [HELD])


def test_what_we_write_is_read_by_confluent_s_deserializer(
    client: SchemaRegistryClient, registry: Registry, unique: str
) -> None:
    number = registry.register(f"{unique}-value", json.dumps(SCHEMA))
    column = pa.array([HELD, None], arrow_type(json.dumps(SCHEMA)))
    for native in (True, False):
        encoded = make_encoder("avro", json.dumps(SCHEMA), number, native=native).encode(column)
        read = AvroDeserializer(client)  # pyright: ignore[reportCallIssue]
        assert [read(payload, place(unique)) for payload in encoded.payloads.to_pylist()] == [VALUE, None]


def test_a_schema_that_refers_to_another_subject_s(
    client: SchemaRegistryClient, registry: Registry, unique: str
) -> None:
    client.register_schema(f"{unique}-address", Schema(json.dumps(ADDRESS), "AVRO"))
    fields = [{"name": "home", "type": "shop.Address"}, {"name": "work", "type": ["null", "shop.Address"]}]
    customer = json.dumps({"type": "record", "name": "Customer", "namespace": "shop", "fields": fields})
    schema = Schema(customer, "AVRO", [SchemaReference("shop.Address", f"{unique}-address", 1)])
    value = {"home": {"city": "Ulm"}, "work": None}
    payload = AvroSerializer(client, schema)(value, place(unique))  # pyright: ignore[reportCallIssue]
    decoded = make_decoder(SideFormat("avro"), registry.schema, None).decode(pa.array([payload]))
    assert (decoded.bad, decoded.values.to_pylist()) == ((), [value])
    number = decoded.schema_ids[0].as_py()
    again = make_encoder("avro", registry.schema(number), number).encode(decoded.values)
    assert again.payloads.to_pylist() == [payload]
    assert AvroDeserializer(client)(again.payloads[0].as_py(), place(unique)) == value  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("topic", topic_subject_name_strategy),
        ("record", record_subject_name_strategy),
        ("topic-record", topic_record_subject_name_strategy),
    ],
)
def test_a_schema_is_where_confluent_s_serializers_look_for_it(
    client: SchemaRegistryClient, registry: Registry, unique: str, ours: Any, theirs: Any
) -> None:
    schema = {**SCHEMA, "namespace": unique.replace("-", "_").replace(".", "_")}
    subject = subject_name(ours, unique, "value", json.dumps(schema))
    number = registry.register(subject, json.dumps(schema))
    conf = {"subject.name.strategy": theirs, "auto.register.schemas": False}
    serializer = AvroSerializer(client, json.dumps(schema), conf=conf)  # pyright: ignore[reportCallIssue]
    payload = serializer(VALUE, place(unique))
    assert payload is not None and int.from_bytes(payload[1:5], "big") == number
    deserializer = AvroDeserializer(client, conf={"subject.name.strategy": theirs})  # pyright: ignore[reportCallIssue]
    assert deserializer(payload, place(unique)) == VALUE
