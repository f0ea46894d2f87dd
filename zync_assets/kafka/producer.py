"""Produces JSON values, encoded by format. Order and retries are librdkafka's idempotent producer's."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException, Message, Producer

from zync_assets.errors import KafkaError, NotAuthorized, SchemaError
from zync_assets.kafka.client import Connection, missing
from zync_assets.kafka.json_avro import datum
from zync_assets.kafka.json_lines import Line, text_bytes
from zync_assets.kafka.registry import Registry
from zync_assets.kafka.topics import topic_states

Encoding: TypeAlias = Literal["avro", "connect-json", "json", "string"]
Encode: TypeAlias = Callable[[Any], bytes]

STALLED = 30.0
"""Seconds without a delivery after which the broker counts as gone."""

_PROMISES: Mapping[str, Any] = {"enable.idempotence": True, "acks": "all"}

_DEFAULTS: Mapping[str, str] = {
    # The partition that Java's producer gives a key, so that either can write a topic.
    "partitioner": "murmur2_random"
}


def produce_json(
    kafka: Mapping[str, str],
    registry: Registry,
    topic: str,
    records: Iterable[Line],
    key_schema: str | None,
    value_schema: str,
) -> int:
    """Produce ``records`` as Avro, registered under ``<topic>-key`` and ``<topic>-value``; return how many.

    A null key or value stays null. ``key_schema`` may be None where all keys are null. Raises SchemaError for
    a value that does not fit, TopicMissing, BrokerUnavailable, and what the registry says.
    """
    key = avro_encoder(registry, f"{topic}-key", key_schema) if key_schema is not None else _no_key
    return produce(kafka, topic, records, key, avro_encoder(registry, f"{topic}-value", value_schema))


def avro_encoder(registry: Registry, subject: str, schema: str) -> Encode:
    """Encodes in Confluent's wire format; ``schema`` is registered under ``subject`` now."""
    header = b"\0" + registry.register(subject, schema).to_bytes(4, "big")
    return lambda value: header + datum(schema, value)


def text_encoder(encoding: Literal["json", "string"]) -> Encode:
    """``json``: the JSON text. ``string``: the text itself, or the bytes of ``{"base64": …}``."""
    return _string if encoding == "string" else lambda value: json.dumps(value, ensure_ascii=False).encode()


def _string(value: Any) -> bytes:
    try:
        return text_bytes(value)
    except ValueError as error:
        raise SchemaError(f"{error}; give a JSON string, or produce as json") from None


def _no_key(value: Any) -> bytes:
    raise SchemaError(f"the key {json.dumps(value)} needs a schema")


def produce(
    kafka: Mapping[str, str], topic: str, records: Iterable[Line], encode_key: Encode, encode_value: Encode
) -> int:
    """Produce ``records`` to an existing topic. Returns the number of records, which are all acknowledged."""
    connection = Connection(kafka, _PROMISES, _DEFAULTS)
    doing = f"producing to {topic}"
    if topic not in topic_states(kafka, [topic]):
        raise missing(topic, connection.servers)
    failures: list[ClientError] = []

    def delivered(error: ClientError | None, _: Message) -> None:
        if error is not None:
            failures.append(error)

    sent = 0
    try:
        producer = Producer(connection.properties)
        for record in records:
            arguments: dict[str, Any] = {
                "key": None if record.key is None else encode_key(record.key),
                "value": None if record.value is None else encode_value(record.value),
                "headers": list(record.headers) or None,
                **({} if record.partition is None else {"partition": record.partition}),
                **({} if record.timestamp is None else {"timestamp": record.timestamp}),
            }
            while True:
                try:
                    producer.produce(topic, on_delivery=delivered, **arguments)
                    break
                except BufferError:
                    producer.poll(0.5)
            sent += 1
            producer.poll(0)
            if failures:
                break
        _drain(producer, connection, doing, failures)
    except (KafkaException, ValueError) as error:
        raise connection.error(error, doing, topic, "Write") from None
    if failures:
        said = connection.error(failures[0], doing, topic, "Write")
        if isinstance(said, NotAuthorized):
            raise said
        raise KafkaError(f"{doing} at {connection.servers}: {failures[0].str()}; {len(failures)} records were refused")
    return sent


def _drain(producer: Producer, connection: Connection, doing: str, failures: list[ClientError]) -> None:
    waiting = len(producer)
    progress = time.monotonic()
    while waiting and not failures:
        left = producer.flush(0.5)
        if left < waiting:
            progress = time.monotonic()
        elif time.monotonic() - progress > STALLED:
            producer.purge()
            raise connection.unavailable(doing)
        waiting = left
