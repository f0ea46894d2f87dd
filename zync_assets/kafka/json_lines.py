"""Records as JSON lines: followed in a topic, printed, parsed and produced.

``follow`` reads a topic record by record, for a person who watches. Steps use ``kafka.reader``, which is much faster.

A printed line is ``{"kafka": {"topic", "partition", "offset", "timestamp"}, "headers": [{"key", "value"}], "key": …, "value":
…}``. ``headers`` is there only if the record has headers. ``parse_line`` takes the same line and ignores ``kafka``;
``partition`` and ``timestamp`` (milliseconds) may stand beside it. Any other JSON value is a record's value, with a null key.
Bytes that are no text are ``{"base64": "…"}``.

``produce`` sends JSON values, encoded by format, with librdkafka's idempotent producer. The producer keeps the order and
retries.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition
from confluent_kafka import KafkaError as ClientError

from zync_assets.errors import KafkaError, NotAuthorized, RegistryError, RegistryUnavailable, SchemaError, ZyncError
from zync_assets.kafka.client import Connection, topic_missing
from zync_assets.kafka.json_records import datum, value_of
from zync_assets.kafka.reader import STALL_SECONDS, reading_connection, reported_end
from zync_assets.kafka.registry import Registry
from zync_assets.kafka.topics import topic_states
from zync_assets.kafka.zero_copy import troubles_of

log = logging.getLogger(__name__)

ANSWER = 10.0
"""Seconds that a broker has to answer before it counts as absent."""


@dataclass(frozen=True)
class Record:
    """A record as it is in Kafka. ``timestamp``: milliseconds since the epoch, None where it has none."""

    topic: str
    partition: int
    offset: int
    timestamp: int | None
    headers: tuple[tuple[str, bytes | None], ...]
    key: bytes | None
    value: bytes | None


def follow(
    kafka: Mapping[str, str],
    topic: str,
    starts: Mapping[int, int],
    ends: Mapping[int, int] | None = None,
    patience: float | None = None,
) -> Iterator[Record]:
    """The records of the partitions in ``starts`` from those offsets on: up to ``ends`` by partition, or for ever.

    In order within a partition; partitions come as they answer. With ``ends``, BrokerUnavailable after a
    minute without progress; without, an outage is logged and waited for. ``patience``: seconds without a record
    after which the records end; BrokerUnavailable if no broker answers at that moment.
    """
    open_ends = {place: ends[place] for place, first in starts.items() if first < ends[place]} if ends else None
    if open_ends is not None and not open_ends:
        return
    doing = f"reading {topic}"
    with _open_consumer(kafka, doing) as (consumer, connection):
        offsets = starts if open_ends is None else {place: starts[place] for place in open_ends}
        consumer.assign([TopicPartition(topic, place, first) for place, first in sorted(offsets.items())])
        progress = time.monotonic()
        while open_ends is None or open_ends:
            # Ctrl-C is heard between two calls only.
            messages = consumer.consume(500, 0.1)
            connection.raise_missing(topic)
            if messages:
                progress = time.monotonic()
            elif patience is not None and time.monotonic() - progress > patience:
                _ask_broker(consumer, connection, topic, doing)
                return
            elif open_ends is not None and time.monotonic() - progress > STALL_SECONDS:
                raise connection.unavailable(doing)
            elif open_ends is None and connection.trouble is not None:
                log.warning("%s: %s; waiting", connection.servers, connection.trouble.str())
                connection.trouble = None
            for message in messages:
                place = message.partition() or 0
                if message.error() is None:
                    next_offset = (message.offset() or 0) + 1
                    if open_ends is None or next_offset <= open_ends.get(place, 0):
                        yield _record(topic, message)
                else:
                    wanted_offset = str(starts.get(place, ""))
                    (trouble,) = troubles_of([message])
                    next_offset = reported_end(trouble, connection, f"{topic}/{place}", wanted_offset) or 0
                if open_ends is not None and next_offset >= open_ends.get(place, next_offset + 1):
                    del open_ends[place]


@contextmanager
def _open_consumer(kafka: Mapping[str, str], doing: str) -> Generator[tuple[Consumer, Connection]]:
    """A consumer of several partitions, closed at the end."""
    connection = reading_connection(kafka)
    try:
        consumer = Consumer(connection.properties)
    except (KafkaException, ValueError) as error:
        raise connection.error(error, "setting up a consumer") from None
    try:
        yield consumer, connection
    except KafkaException as error:
        raise connection.error(error, doing) from None
    finally:
        consumer.close()


def _ask_broker(consumer: Consumer, connection: Connection, topic: str, doing: str) -> None:
    """BrokerUnavailable unless a broker answers: silence of an absent broker is no end of the records."""
    try:
        consumer.list_topics(topic, timeout=ANSWER)
    except KafkaException:
        raise connection.unavailable(doing) from None


def _record(topic: str, message: Message) -> Record:
    kind, milliseconds = message.timestamp()
    return Record(
        topic,
        message.partition() or 0,
        message.offset() or 0,
        milliseconds if kind and milliseconds >= 0 else None,
        tuple((str(name), value) for name, value in message.headers() or ()),  # type: ignore[misc]
        message.key(),  # type: ignore[arg-type]
        message.value(),  # type: ignore[arg-type]
    )


Rendering: TypeAlias = Literal["auto", "avro", "connect-json", "json", "string", "bytes"]

_MOST_INT32, _MOST_INT64 = (1 << 31) - 1, (1 << 63) - 1

ENVELOPE = frozenset({"kafka", "key", "value", "headers", "partition", "timestamp"})


@dataclass(frozen=True)
class Line:
    """The record to produce for one JSON line. ``timestamp``: milliseconds since the epoch, None: now."""

    value: Any
    key: Any = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    partition: int | None = None
    timestamp: int | None = None


def parse_line(text: str, number: int) -> Line:
    """The record of line ``number``; ZyncError if it is no JSON, or a part of it is of the wrong kind."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ZyncError(f"line {number} is no JSON: {error}; put one JSON value on each line") from None
    except RecursionError:
        raise ZyncError(f"line {number} is nested too deep to be read; make it flatter") from None
    if not isinstance(document, dict) or "value" not in document or not ENVELOPE.issuperset(document):
        return Line(document)
    partition, timestamp = document.get("partition"), document.get("timestamp")
    for name, item, most in (("partition", partition, _MOST_INT32), ("timestamp", timestamp, _MOST_INT64)):
        if item is not None and (isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= most):
            raise ZyncError(
                f"line {number}: {name} is {json.dumps(item)[:80]}; it must be a whole number from 0 to {most}"
            )
    return Line(document["value"], document.get("key"), _headers(document, number), partition, timestamp)


def _headers(document: dict[str, Any], number: int) -> tuple[tuple[str, bytes | None], ...]:
    try:
        pairs = _header_pairs(document.get("headers"))
        # confluent-kafka would cut such a name off at its zero byte.
        if any(not isinstance(name, str) or "\0" in name for name, _ in pairs):
            raise ZyncError(f"line {number}: the name of a header must be text without the character U+0000")
        return tuple((name, None if value is None else text_bytes(value)) for name, value in pairs)
    except (ValueError, TypeError, KeyError):
        raise ZyncError(f'line {number}: headers must be like [{{"key": "name", "value": "text"}}]') from None


def _header_pairs(headers: Any) -> list[tuple[Any, Any]]:
    """Names and values. TypeError or KeyError for headers of another form."""
    if headers is None:
        return []
    if isinstance(headers, dict):
        return list(headers.items())
    if not isinstance(headers, list) or not all(isinstance(item, dict) for item in headers):
        raise TypeError
    return [(item["key"], item.get("value")) for item in headers]


def render(
    record: Record, registry: Registry | None, key: Rendering = "auto", value: Rendering = "auto"
) -> dict[str, Any]:
    """A record as the object of a JSON line. Values keep Python's types for dates, decimals and bytes inside Avro.

    ``auto``: Avro where the bytes begin like Confluent's framing (zero, four bytes of a schema id) and the
    registry knows the id; else text where it is UTF-8; else base64.
    """
    place = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
    }
    headers = [{"key": name, "value": _text(data)} for name, data in record.headers]
    at = f"{record.topic}/{record.partition} offset {record.offset}"
    return {
        "kafka": place,
        **({"headers": headers} if headers else {}),
        "key": _render(record.key, registry, key, f"the key of {at}"),
        "value": _render(record.value, registry, value, f"the value of {at}"),
    }


def _render(data: bytes | None, registry: Registry | None, rendering: Rendering, label: str) -> Any:
    if data is None:
        return None
    if rendering == "bytes":
        return _base64(data)
    if rendering == "json":
        try:
            return json.loads(data)
        except ValueError as error:
            raise SchemaError(f"{label} is no JSON: {error}; try another format") from None
    if rendering == "connect-json":
        # Imported here: Arrow takes longer to load than most commands run.
        from zync_assets.kafka.json_records import connect_value

        try:
            return connect_value(data)
        except SchemaError as error:
            raise SchemaError(f"{label}: {error}; try another format") from None
    has_schema_id = len(data) > 4 and data[0] == 0
    if rendering == "avro" and not has_schema_id:
        raise SchemaError(f"{label} is no Avro with a schema id; try another format")
    if has_schema_id and registry is not None and rendering in ("avro", "auto"):
        try:
            return value_of(registry.schema(int.from_bytes(data[1:5], "big")), data[5:])
        except RegistryUnavailable:
            raise
        except (RegistryError, SchemaError) as error:
            if rendering == "avro":
                raise SchemaError(f"{label}: {error}") from None
    return _text(data)


def _text(data: bytes | None) -> Any:
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return _base64(data or b"")


def _base64(data: bytes) -> dict[str, str]:
    return {"base64": base64.b64encode(data).decode()}


def text_bytes(value: Any) -> bytes:
    """The bytes of a text, or of ``{"base64": …}``; ValueError for anything else."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and set(value) == {"base64"}:
        try:
            return base64.b64decode(value["base64"], validate=True)
        except (TypeError, binascii.Error) as error:
            raise ValueError(str(error)) from None
    raise ValueError(f"{json.dumps(value)} is no text")


Encoding: TypeAlias = Literal["avro", "connect-json", "json", "string"]
Encode: TypeAlias = Callable[[Any], bytes]

DELIVERY_SECONDS = 30.0
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
        raise topic_missing(topic, connection.servers)
    failures: list[ClientError] = []

    def note_delivery(error: ClientError | None, _: Message) -> None:
        if error is not None:
            failures.append(error)

    count = 0
    try:
        producer = connection.idempotent_producer(topic)
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
                    producer.produce(topic, on_delivery=note_delivery, **arguments)
                    break
                except BufferError:
                    producer.poll(0.5)
            count += 1
            producer.poll(0)
            if failures:
                break
        _drain(producer, connection, doing, failures)
    except (KafkaException, ValueError) as error:
        raise connection.error(error, doing, topic, "Write") from None
    if failures:
        problem = connection.error(failures[0], doing, topic, "Write")
        if isinstance(problem, NotAuthorized):
            raise problem
        raise KafkaError(f"{doing} at {connection.servers}: {failures[0].str()}; {len(failures)} records were refused")
    return count


def _drain(producer: Producer, connection: Connection, doing: str, failures: list[ClientError]) -> None:
    queue_length = len(producer)
    progress = time.monotonic()
    while queue_length and not failures:
        queue_size = producer.flush(0.5)
        if queue_size < queue_length:
            progress = time.monotonic()
        elif time.monotonic() - progress > DELIVERY_SECONDS:
            producer.purge()
            raise connection.unavailable(doing)
        queue_length = queue_size
