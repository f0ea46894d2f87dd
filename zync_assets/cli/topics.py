"""``zync ls``, ``info``, ``consume`` and ``produce``: what is in Kafka and in the registry, without a lake. ``restore``:
archived records back into a topic."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias, TypeVar

import click

from zync_assets.cli.terminal import (
    COUNT,
    DURATION,
    MAX_OFFSET,
    PARTITION,
    TOPIC,
    Format,
    Whole,
    excerpt,
    format_option,
    print_json,
    print_rows,
    whole,
)
from zync_assets.errors import TopicMissing, ZyncError
from zync_assets.kafka.client import servers
from zync_assets.kafka.json_lines import (
    Encode,
    Encoding,
    Line,
    Rendering,
    avro_encoder,
    follow,
    parse_line,
    render,
    text_encoder,
)
from zync_assets.kafka.json_lines import produce as produce_records
from zync_assets.kafka.registry import Registry
from zync_assets.kafka.topics import TopicState, create_topic, topic_state, topic_states
from zync_assets.pipeline import RegistryConfig

_Command = TypeVar("_Command", bound=Callable[..., Any])

BOOTSTRAP_SERVERS = "localhost:9092"
REGISTRY = "http://localhost:8081"


@dataclass(frozen=True)
class Endpoints:
    """Where a command looks."""

    kafka: Mapping[str, str]
    registry: Registry | None


def endpoint_options(command: _Command) -> _Command:
    """``--pipeline``, or ``--bootstrap-servers`` and ``--registry``: the parameters of ``target``."""
    for option in (
        click.option(
            "--registry",
            "registry_url",
            metavar="URL",
            help=f"[default: $SCHEMA_REGISTRY_URL, ~/.zync/schema_registry.json, or {REGISTRY}]",
        ),
        click.option(
            "--bootstrap-servers",
            metavar="HOST:PORT,…",
            help=f"[default: $KAFKA_BOOTSTRAP_SERVERS, ~/.zync/kafka.json, or {BOOTSTRAP_SERVERS}]",
        ),
        click.option(
            "--pipeline",
            metavar="PIPELINE",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="Connect as this pipeline file does.",
        ),
    ):
        command = option(command)
    return command


def endpoints_of(pipeline: Path | None, bootstrap_servers: str | None, registry_url: str | None) -> Endpoints:
    """A pipeline's broker and registry, or those of the options, of the environment, of zync's files, of this machine."""
    # Imported here: a pipeline file's rules need a SQL parser.
    from zync_assets.pipeline_file import load
    from zync_assets.pipeline_file.loader import default_kafka, default_registry

    if pipeline is None:
        kafka = {"bootstrap.servers": bootstrap_servers} if bootstrap_servers else default_kafka(os.environ)
        config = RegistryConfig(registry_url) if registry_url else default_registry(os.environ)
        config = config or RegistryConfig(REGISTRY)
        return Endpoints({"bootstrap.servers": BOOTSTRAP_SERVERS, **kafka}, Registry(config))
    model = load(pipeline)
    kafka = {**model.kafka, **({"bootstrap.servers": bootstrap_servers} if bootstrap_servers else {})}
    config = RegistryConfig(registry_url) if registry_url else model.registry
    return Endpoints(kafka, Registry(config) if config else None)


def _require(registry: Registry | None) -> Registry:
    if registry is None:
        raise ZyncError("the pipeline has no schema registry; add `registry: {url: …}` to it, or give --registry")
    return registry


@click.command()
@endpoint_options
@click.option("--schemas", is_flag=True, help="Show the schema of each latest version too.")
@format_option
def ls(
    pipeline: Path | None, bootstrap_servers: str | None, registry_url: str | None, schemas: bool, fmt: Format
) -> None:
    """List the subjects of the schema registry, each with its latest version and that version's id."""
    registry = _require(endpoints_of(pipeline, bootstrap_servers, registry_url).registry)
    subjects = registry.subjects()
    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(registry.latest_version, subjects))
    rows = [
        {
            "subject": subject,
            "version": version.number,
            "id": version.id,
            "type": version.type,
            "schema": version.schema,
        }
        for subject, version in zip(subjects, versions, strict=True)
        if version is not None
    ]
    print_rows(rows, ["subject", "version", "id", *(("type", "schema") if schemas else ())], fmt)


@click.command()
@click.argument("topic", type=TOPIC)
@endpoint_options
@format_option
def info(
    topic: str, pipeline: Path | None, bootstrap_servers: str | None, registry_url: str | None, fmt: Format
) -> None:
    """Show per partition of TOPIC the first offset (low) and the next one that a reader will see (end)."""
    state = topic_state(endpoints_of(pipeline, bootstrap_servers, registry_url).kafka, topic)
    rows = [
        {"topic": topic, "topic_id": state.topic_id, "partition": item.partition, "low": item.low, "end": item.end}
        for item in state.partitions
    ]
    columns = ["partition", "low", "end"]
    print_rows(rows, ["topic", "topic_id", *columns] if fmt == "json" else columns, fmt)


Start: TypeAlias = Literal["earliest", "latest"] | int


class StartType(click.ParamType):
    """``earliest``, ``latest`` or an offset."""

    name = "start"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Start:
        text = str(value)
        if text == "earliest" or text == "latest":
            return text
        offset = whole(text, MAX_OFFSET)
        if offset is None:
            self.fail(f"{excerpt(text)!r} is not earliest, latest or an offset up to {MAX_OFFSET}", param, ctx)
        return offset


RENDERINGS = click.Choice(["auto", "avro", "connect-json", "json", "string", "bytes"])


@click.command()
@click.argument("topic", type=TOPIC)
@endpoint_options
@click.option(
    "--from",
    "start",
    type=StartType(),
    default="earliest",
    show_default=True,
    metavar="earliest|latest|OFFSET",
    help="Where to begin, in every partition.",
)
@click.option("--partition", type=PARTITION, help="Only this partition.")
@click.option("--count", type=COUNT, help="Stop after so many records.")
@click.option("--until-end", is_flag=True, help="Stop at the end that the topic has now.")
@click.option("--timeout", type=DURATION, metavar="TIME", help="Stop after so long without a record, such as 10s.")
@click.option("--key-format", type=RENDERINGS, default="auto", show_default=True)
@click.option("--value-format", type=RENDERINGS, default="auto", show_default=True)
def consume(
    topic: str,
    pipeline: Path | None,
    bootstrap_servers: str | None,
    registry_url: str | None,
    start: Start,
    partition: int | None,
    count: int | None,
    until_end: bool,
    timeout: float | None,
    key_format: Rendering,
    value_format: Rendering,
) -> None:
    """Print the records of TOPIC as JSON lines, and go on with new ones until Ctrl-C.

    A format of auto is Avro where the bytes begin with the id of a schema that the registry knows, else text
    where it is UTF-8, else {"base64": …}.
    """
    where = endpoints_of(pipeline, bootstrap_servers, registry_url)
    state = topic_state(where.kafka, topic)
    starts = _starts(state, start, partition)
    ends = {item.partition: item.end for item in state.partitions} if until_end else None
    for record in islice(follow(where.kafka, topic, starts, ends, timeout), count):
        print_json(render(record, where.registry, key_format, value_format))


def _starts(state: TopicState, start: Start, partition: int | None) -> dict[int, int]:
    """Per partition the offset to begin with."""
    own_partitions = [item for item in state.partitions if partition in (None, item.partition)]
    if not own_partitions:
        raise ZyncError(f"topic {state.topic} has no partition {partition}; it has 0 to {len(state.partitions) - 1}")
    if start == "earliest":
        return {item.partition: item.low for item in own_partitions}
    if start == "latest":
        return {item.partition: item.end for item in own_partitions}
    return {item.partition: min(max(start, item.low), item.end) for item in own_partitions}


ENCODINGS = click.Choice(["avro", "connect-json", "json", "string"])
_WITH_SCHEMA = ("avro", "connect-json")
SCHEMA_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("topic", type=TOPIC)
@click.argument("file", type=click.File(encoding="utf-8"), default="-")
@endpoint_options
@click.option("--format", "encoding", type=ENCODINGS, default="avro", show_default=True, help="How values are written.")
@click.option("--key-format", "key_encoding", type=ENCODINGS, help="How keys are written.  [default: as values are]")
@click.option("--schema", type=SCHEMA_FILE, help="The values' schema.  [default: inferred from all of FILE]")
@click.option("--key-schema", type=SCHEMA_FILE, help="The keys' schema.  [default: inferred from all of FILE]")
@click.option("--create", is_flag=True, help="Create the topic if it is not there.")
@click.option("--partitions", type=Whole(1, 100_000), default=1, show_default=True, help="Of a topic that is created.")
def produce(
    topic: str,
    file: IO[str],
    pipeline: Path | None,
    bootstrap_servers: str | None,
    registry_url: str | None,
    encoding: Encoding,
    key_encoding: Encoding | None,
    schema: Path | None,
    key_schema: Path | None,
    create: bool,
    partitions: int,
) -> None:
    """Produce JSON lines from FILE, or from stdin, to TOPIC.

    A line is {"key": …, "value": …}, with headers, partition and timestamp if need be, as `zync consume`
    prints them; or any other JSON value, which becomes a value with a null key. A null value is a tombstone.
    A schema is one of Avro, or with connect-json one of Kafka Connect. Avro schemas are registered under TOPIC-key and
    TOPIC-value.
    """
    keys = key_encoding or encoding
    for option, given, form in (("--schema", schema, encoding), ("--key-schema", key_schema, keys)):
        if given is not None and form not in _WITH_SCHEMA:
            raise click.UsageError(
                f"{option} goes with {' and '.join(_WITH_SCHEMA)}, and the format is {form}; remove it"
            )
    where = endpoints_of(pipeline, bootstrap_servers, registry_url)
    lines: Iterable[Line] = _lines(file)
    infers = (encoding in _WITH_SCHEMA and schema is None) or (keys in _WITH_SCHEMA and key_schema is None)
    if infers:
        lines = list(lines)
    samples = lines if isinstance(lines, list) else []
    if not create and topic not in topic_states(where.kafka, [topic]):
        at = servers(where.kafka)
        raise TopicMissing(f"topic {topic} does not exist at {at}; create it with --create, or correct the name")
    encode_key = _encoder(where, topic, "key", keys, key_schema, [line.key for line in samples])
    encode_value = _encoder(where, topic, "value", encoding, schema, [line.value for line in samples])
    if create:
        create_topic(where.kafka, topic, partitions, 1, {})
    count = produce_records(where.kafka, topic, lines, encode_key, encode_value)
    click.echo(f"{count} record{'s' * (count != 1)} produced to {topic}", err=True)


def _lines(file: IO[str]) -> Iterator[Line]:
    number = 0
    try:
        for number, text in enumerate(file, 1):
            if text.strip():
                yield parse_line(text, number)
    except UnicodeDecodeError as error:
        raise ZyncError(f"after line {number} come bytes that are no UTF-8: {error.reason}; give UTF-8 text") from None


def _encoder(
    where: Endpoints,
    topic: str,
    side: Literal["key", "value"],
    encoding: Encoding,
    schema: Path | None,
    values: list[Any],
) -> Encode:
    if encoding == "json" or encoding == "string":
        return text_encoder(encoding)
    samples = [value for value in values if value is not None]
    if schema is None and not samples:
        # Nothing but nulls: there is nothing to encode, and nothing to register.
        return text_encoder("json")
    text = None if schema is None else schema.read_text(encoding="utf-8")
    name = avro_name(topic if side == "value" else f"{topic}_key")
    # Imported here: Arrow takes longer to load than most commands run.
    if encoding == "connect-json":
        from zync_assets.kafka.json_records import connect_encoder, inferred_connect_schema

        return connect_encoder(text or inferred_connect_schema(samples, name))
    from zync_assets.kafka.json_records import infer_schema

    return avro_encoder(_require(where.registry), f"{topic}-{side}", text or infer_schema(samples, name))


def avro_name(text: str) -> str:
    """``text`` as the name of an Avro record: letters, digits and underscores, no digit first."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", text)
    return f"_{name}" if name[0].isdigit() else name


RESTORED = ("topic", "partition", "verified", "sent")


@click.command()
@click.argument("pipeline", type=click.Path(path_type=Path))
@click.option("--from", "source", required=True, metavar="ARCHIVE", help="Raw.Topic, or files:URL/topic.")
@click.option("--to", "topic", required=True, metavar="TOPIC", type=TOPIC, help="The topic; made if it is missing.")
@click.option("--since", metavar="TIME", help="The first time to restore, as in 2026-11-23T03:00Z.")
@click.option("--until", metavar="TIME", help="The time before which records are restored.")
@format_option
def restore(pipeline: Path, source: str, topic: str, since: str | None, until: str | None, fmt: Format) -> None:
    """Publish archived records of PIPELINE into a topic again, in order, with their keys, headers and timestamps.

    A second run with the same options goes on where the first one stopped.
    """
    from zync_assets.pipeline_file import load
    from zync_assets.publish.restore import restore as restored

    first, end = _micros("--since", since), _micros("--until", until)
    if first is not None and end is not None and first >= end:
        raise click.UsageError(f"--until {until} is not after --since {since}. Write a later time for --until.")
    commits = restored(load(pipeline), source, topic, first, end, partial(click.echo, err=True))
    print_rows((vars(item) for item in commits), RESTORED, fmt)


def _micros(option: str, text: str | None) -> int | None:
    """A time in microseconds since the epoch. A time without a zone is in UTC."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ZyncError(f"{option} {excerpt(text)} is no time. Write it as in 2026-11-23T03:00Z.") from None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1_000_000)
