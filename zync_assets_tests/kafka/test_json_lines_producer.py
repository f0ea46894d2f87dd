"""JSON values produced as Avro, and read back with fastavro alone."""

from __future__ import annotations

import io
import json

import fastavro
import pytest

from zync_assets.errors import KafkaError, SchemaError, TopicMissing, ZyncError
from zync_assets.kafka.json_lines import Line, parse_line, produce, produce_json, text_encoder
from zync_assets.kafka.reader import read_range
from zync_assets.kafka.registry import Registry
from zync_assets.local.services import Services
from zync_assets.pipeline import RegistryConfig
from zync_assets_tests.kafka.test_registry import record


@pytest.fixture
def registry(services: Services) -> Registry:
    return Registry(RegistryConfig(services.registry_url))


def test_values_keys_and_tombstones(kafka: dict[str, str], registry: Registry, topic: str) -> None:
    value = record("Order", id="long", item=["null", "string"])
    lines = [Line({"id": 1, "item": "tea"}, "k"), Line(None, "k"), Line({"id": 2, "item": None})]
    assert produce_json(kafka, registry, topic, lines, '"string"', value) == 3

    (batch,) = read_range(kafka, topic, 0, 0, 3)
    rows = batch.to_pylist()
    id = int.from_bytes(rows[0]["value"][1:5], "big")
    assert rows[0]["value"][0] == 0
    assert registry.latest(f"{topic}-value") == (id, registry.schema(id))
    schema = json.loads(registry.schema(id))
    read = [row["value"] and fastavro.schemaless_reader(io.BytesIO(row["value"][5:]), schema, None) for row in rows]
    assert read == [{"id": 1, "item": "tea"}, None, {"id": 2, "item": None}]
    assert [row["key"] and row["key"][5:] for row in rows] == [b"\x02k", b"\x02k", None]


def test_a_key_needs_a_schema(kafka: dict[str, str], registry: Registry, topic: str) -> None:
    with pytest.raises(SchemaError, match="key"):
        produce_json(kafka, registry, topic, [Line(1, "k")], None, '"long"')
    assert produce_json(kafka, registry, topic, [Line(1)], None, '"long"') == 1


@pytest.mark.parametrize(
    ("type", "value"),
    [("int", 1 << 40), ("long", "1"), ("string", 1), ("boolean", 1), (["null", "long"], "x"), ("bytes", "not base64")],
)
def test_a_value_that_does_not_fit_is_refused(
    kafka: dict[str, str], registry: Registry, topic: str, type: object, value: object
) -> None:
    with pytest.raises(SchemaError, match="field"):
        produce_json(kafka, registry, topic, [Line({"field": value})], None, record("Order", field=type))


def test_what_the_broker_refuses_is_an_error(kafka: dict[str, str], topic: str) -> None:
    text = text_encoder("string")
    with pytest.raises(TopicMissing):
        produce(kafka, f"{topic}-missing", [Line("a")], text, text)
    with pytest.raises(KafkaError, match=f"producing to {topic}"):
        produce(kafka, topic, [Line("x" * 2_000_000)], text, text)
    with pytest.raises(KafkaError, match=f"{topic}"):
        produce(kafka, topic, [Line("x", partition=7)], text, text)


def test_lines() -> None:
    assert parse_line('{"value": 1}', 1) == Line(1)
    assert parse_line('{"value": 1, "other": 2}', 1) == Line({"value": 1, "other": 2})
    assert parse_line("[1]", 1) == Line([1])
    assert parse_line('{"value": null, "key": "k", "headers": [{"key": "a", "value": {"base64": "/w=="}}]}', 1) == Line(
        None, "k", (("a", b"\xff"),)
    )
    for name in ("null", "5", '"a\\u0000b"'):
        with pytest.raises(ZyncError, match="line 7: the name of a header must be text without the character U"):
            parse_line(f'{{"value": 1, "headers": [{{"key": {name}}}]}}', 7)
    assert parse_line('{"value": 1, "headers": null}', 1) == Line(1)
    assert parse_line('{"value": 1, "headers": []}', 1) == Line(1)
    assert parse_line('{"value": 1, "headers": {"a": "b"}}', 1) == Line(1, headers=(("a", b"b"),))
    for headers in (
        '"a"',
        '""',
        "5",
        "0",
        "false",
        '["a"]',
        '[{"key": "a", "value": "b"}, {"value": "c"}]',
        '{"a": 5}',
    ):
        with pytest.raises(ZyncError, match=r'line 7: headers must be like \[{"key": "name", "value": "text"}\]'):
            parse_line(f'{{"value": 1, "headers": {headers}}}', 7)
