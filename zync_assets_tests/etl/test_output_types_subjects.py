"""The subjects of an output's Avro schemas, and the error for a schema that the registry refuses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.schema_registry import ConfigCompatibilityLevel, SchemaRegistryClient, ServerConfig
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from zync_assets.errors import EtlError, RegistryError, SchemaError
from zync_assets.kafka.registry import Registry
from zync_assets.local.services import Services
from zync_assets.pipeline import RegistryConfig
from zync_assets_tests.mini import BOTH, Mini, mini, read_topic, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RULE = """
transforms:
  - {name: copy, type: stateless, in: $left, out: $out, key: {id: in.value.id}, value: {id: in.value.id, v: in.value.v}}
"""


def text(options: str, rule: str = RULE) -> str:
    start, out = BOTH.split("outputs:")
    out = out.replace("key-format: string, value-format: json,", f"format: avro, {options}")
    return f"{start}outputs:{out}{rule}"


def made(services: Services, spark: SparkSession, folder: Path, unique: str, options: str, rule: str = RULE) -> Mini:
    it = mini(services, spark, folder, unique, text(options, rule))
    it.send(it.left, row(1, "a"))
    it.ingest(it.left)
    return it


@pytest.mark.parametrize("strategy", ["record", "topic-record"])
def test_subjects_are_named_as_the_file_says(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, strategy: str
) -> None:
    space = "com.shop." + "".join(c if c.isalnum() else "_" for c in unique)
    options = f"value-subject-name-strategy: {strategy}, namespace: {space},"
    it = made(services, spark, tmp_path, unique, options)
    it.etl()
    assert it.publish().records == 1
    subject = f"{space}.Value" if strategy == "record" else f"{it.out}-{space}.Value"
    registry = Registry(RegistryConfig(services.registry_url))
    assert {f"{it.out}-key", subject} <= set(registry.subjects())
    assert f"{it.out}-value" not in registry.subjects()
    read = AvroDeserializer(SchemaRegistryClient({"url": services.registry_url}))  # pyright: ignore[reportCallIssue]
    ((_, key, value),) = read_topic(it.pipeline, it.out)
    sides: list[tuple[bytes | None, Any]] = [(key, MessageField.KEY), (value, MessageField.VALUE)]
    assert [read(payload, SerializationContext(it.out, side)) for payload, side in sides] == [
        {"id": 1},
        {"id": 1, "v": "a"},
    ]


def test_a_subject_that_needs_a_record_s_name_refuses_a_value_without_one(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    rule = RULE.replace("key: {id: in.value.id}", "key: in.value.id")
    it = made(services, spark, tmp_path, unique, "subject-name-strategy: record,", rule)
    with pytest.raises(SchemaError, match=r"keys have no record's name .* key-subject-name-strategy: topic"):
        it.etl()


def test_a_schema_that_is_not_compatible_is_refused_in_the_registry_s_words_and_can_be_published_after_the_cure(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = made(services, spark, tmp_path, unique, "")
    it.etl()
    it.publish()
    client = SchemaRegistryClient({"url": services.registry_url})
    subject = f"{it.out}-value"
    client.set_config(subject, ServerConfig(compatibility=ConfigCompatibilityLevel.FULL))
    other = it.edited(
        text("", RULE.replace("v: in.value.v", "v: {text: in.value.v}").replace("name: copy", "name: deep"))
    )
    it.send(it.left, row(2, "b"))
    it.ingest(it.left)
    with pytest.raises(EtlError, match="one type in all rules"):
        other.etl()
    narrow = it.edited(text("", RULE.replace("{id: in.value.id, v", "{id: CAST(in.value.id AS int), v")))
    narrow.etl()
    with pytest.raises(RegistryError) as error:
        narrow.publish()
    for word in (it.out, subject, "compatib", "Nothing that needs it was published"):
        assert word in str(error.value), str(error.value)
    client.set_config(subject, ServerConfig(compatibility=ConfigCompatibilityLevel.NONE))
    assert narrow.publish().records == 1
