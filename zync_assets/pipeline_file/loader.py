"""Loads and checks a pipeline file, with its lake and its connections.

The loader reports every problem of the file at once, with its line, key and cure. It needs no JVM and no network. Other steps
check the properties that only data or a broker shows: fields of records, and types of join keys.

The key ``lake`` is a folder, an object store's URI, or a mapping of ``uri`` and the store's settings.

A file without ``kafka:`` or ``registry:`` gets the connections of brimdata's ``zync`` command, ``~/.zync/kafka.json`` and
``~/.zync/schema_registry.json``. Keys without a dot are zync's own (``cli/flags.go`` of github.com/brimdata/zync). Keys with a
dot go unchanged to librdkafka or to Confluent's registry client.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args
from urllib.parse import unquote, urlsplit

from zync_assets.errors import PipelineFileError, Problem, SetupError
from zync_assets.lake.stores import GENERAL, KINDS, StoreKind, with_environment
from zync_assets.pipeline import (
    UNAVAILABLE_VALUE,
    Input,
    LakeUri,
    MissingField,
    OnRuleChange,
    Output,
    Pipeline,
    RegistryConfig,
    Rule,
)
from zync_assets.pipeline_file.fields import Fields, http_fault, kind, one_slash, suggestion, tables, word_list
from zync_assets.pipeline_file.grammar import FILE
from zync_assets.pipeline_file.key import (
    FILE_HINTS,
    KAFKA_NAMES,
    REGISTRY_NAMES,
    known_names,
    read_kafka,
    read_spark,
    registry_faults,
)
from zync_assets.pipeline_file.outs import with_patterns
from zync_assets.pipeline_file.rules import read_rules
from zync_assets.pipeline_file.sinks import read_sinks
from zync_assets.pipeline_file.source import UNSET, Items, Scalar, YamlTable, read
from zync_assets.pipeline_file.topics import NO_PATTERN, read_inputs, read_outputs
from zync_assets.pipeline_file.transactions import read_transactions, with_transaction_topic

DEFAULT_LAKE = "./lake"

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def read_lake(fields: Fields, path: Path, env: Mapping[str, str]) -> str:
    """An absolute path, or a ``LakeUri`` with its settings."""
    node = fields.node("lake")
    if isinstance(node, YamlTable):
        return _mapping_lake(Fields(node, "lake", fields.problems, None), path, env)
    if node is not None and not isinstance(node, Scalar):
        fields.problem("lake", f"must be a folder, a URI or a mapping with uri:, not {kind(node)}")
        return ""
    text = fields.text("lake") if node is not None else DEFAULT_LAKE
    return "" if text is None else _place(fields, "lake", text, {}, path, env)


def _mapping_lake(lake: Fields, path: Path, env: Mapping[str, str]) -> str:
    settings = lake.flat()
    uri = settings.pop("uri", None)
    if uri is None:
        if "uri" not in lake:
            lake.problem("uri", "is missing; write the URI of the bucket and folder, as in s3://bucket/folder")
        return ""
    return _place(lake, "uri", uri, settings, path, env)


def _place(fields: Fields, key: str, text: str, settings: Mapping[str, str], path: Path, env: Mapping[str, str]) -> str:
    if UNSET in text:
        return ""
    match = _URI.match(text)
    if (fault := one_slash(text)) and not text.startswith("file:"):
        fields.problem(key, fault)
    if match is None or match[1].lower() == "file":
        for name in settings:
            fields.problem(name, "is a setting of an object store, and the lake is a folder; remove it")
        return _folder(fields, key, text, path)
    store = KINDS.get(match[1].lower())
    if store is None:
        schemes = word_list(f"{name}://" for name in KINDS)
        fields.problem(key, f"is in no kind of store that is known here; known are {schemes}, or write a folder")
        return ""
    if not text[match.end() :].strip("/"):
        fields.problem(key, "names no bucket or folder; write it as in s3://bucket/folder")
        return ""
    _check(fields, store, settings)
    uri = text.rstrip("/")
    return LakeUri(uri, with_environment(uri, settings, env))


def _check(fields: Fields, store: StoreKind, settings: Mapping[str, str]) -> None:
    unknown = [name for name in settings if not (name in (*store.settings, *GENERAL) or name.startswith(store.prefix))]
    for name in unknown:
        names = ("uri", *store.settings)
        fields.problem(
            name,
            f"is no setting of {store.name}; there are {word_list(names)}, and delta-rs's own storage options"
            f" ({store.prefix}…){suggestion(name, names)}",
        )
    if fault := http_fault(settings.get("endpoint", "http://h")):
        fields.problem("endpoint", fault)
    # A misspelt setting may be the partner.
    if not unknown and ("access-key-id" in settings) != ("secret-access-key" in settings):
        key, partner = sorted(("access-key-id", "secret-access-key"), key=lambda name: name not in settings)
        fields.problem(key, f"takes {partner}: beside it")


def _folder(fields: Fields, key: str, text: str, path: Path) -> str:
    if _URI.match(text):
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            fields.problem(key, "a file: URI needs an absolute path, as in file:///data/lake; or write a folder")
        text = unquote(parts.path)
    try:
        folder = (path.absolute().parent / Path(text).expanduser()).resolve()
        if any(ancestor.is_file() for ancestor in (folder, *folder.parents)):
            fields.problem(key, "is a file, or a path below one; name a folder")
        return str(folder)
    except (OSError, RuntimeError, ValueError):
        fields.problem(key, "is no path that this system takes; write a folder")
        return ""


_REGISTRY = ("url", "user", "password")


def default_kafka(env: Mapping[str, str]) -> dict[str, str]:
    """librdkafka's properties where neither a file nor an option names a broker.

    ``$KAFKA_BOOTSTRAP_SERVERS`` comes before ``~/.zync/kafka.json``. Empty where there is neither.
    """
    servers = env.get("KAFKA_BOOTSTRAP_SERVERS")
    return {"bootstrap.servers": servers} if servers else home_kafka(env)


def default_registry(env: Mapping[str, str]) -> RegistryConfig | None:
    """The registry of ``$SCHEMA_REGISTRY_URL``, else of ``~/.zync/schema_registry.json``; None where there is neither.

    SetupError for a variable that is no URL.
    """
    url = env.get("SCHEMA_REGISTRY_URL")
    if url and (fault := http_fault(url)):
        raise SetupError(f"the environment variable SCHEMA_REGISTRY_URL {fault}")
    return RegistryConfig(url) if url else home_registry(env)


def home_kafka(env: Mapping[str, str]) -> dict[str, str]:
    """librdkafka's properties from ``kafka.json``; none where there is no such file.

    PipelineFileError, with that file's name, for a file that is no such thing.
    """
    path, values = _read(env, "kafka.json", tuple(KAFKA_NAMES))
    properties = {KAFKA_NAMES.get(key, key): value for key, value in values.items()}
    skip_verify = values.get("tls_server_insecure_skip_verify")
    if skip_verify is not None:
        if skip_verify not in ("true", "false"):
            raise PipelineFileError(str(path), [Problem(0, "tls_server_insecure_skip_verify", "must be true or false")])
        properties["enable.ssl.certificate.verification"] = "false" if skip_verify == "true" else "true"
    return properties


def home_registry(env: Mapping[str, str]) -> RegistryConfig | None:
    """The registry of ``schema_registry.json``; None if the file or its ``url`` is missing."""
    path, values = _read(env, "schema_registry.json", _REGISTRY)
    url, user, password = (values.pop(key, "") for key in _REGISTRY)
    if not url:
        return None
    if fault := http_fault(url):
        raise PipelineFileError(str(path), [Problem(0, "url", fault)])
    return RegistryConfig(url, {**({"basic.auth.user.info": f"{user}:{password}"} if user else {}), **values})


def _read(env: Mapping[str, str], name: str, names: tuple[str, ...]) -> tuple[Path, dict[str, str]]:
    """The file's path, and its values as text; empty ones count as left out, as zync has them."""
    if not env.get("HOME"):
        return Path(name), {}
    path = Path(env["HOME"]) / ".zync" / name
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return path, {}
    except (OSError, ValueError) as error:
        # Not the parser's words: they could repeat a secret.
        problem = Problem(getattr(error, "lineno", 0), "", "can't be read as JSON; correct it, or take it away")
        raise PipelineFileError(str(path), [problem]) from None
    if not isinstance(content, dict):
        raise PipelineFileError(str(path), [Problem(0, "", "must be a JSON object")])
    problems: list[Problem] = []
    values: dict[str, str] = {}
    for key, value in content.items():
        if key not in names and "." not in key:
            cure = suggestion(key, names) or f"; known here: {word_list(names)}, and names with a dot"
            problems.append(Problem(0, key, f"is no key that is known here{cure}"))
        elif not isinstance(value, str | int | float):
            problems.append(Problem(0, key, "must be one value"))
        elif value != "":
            values[key] = str(value).lower() if isinstance(value, bool) else str(value)
    if problems:
        raise PipelineFileError(str(path), problems)
    return path, values


DEFAULT_BOOTSTRAP_SERVERS = "localhost:9092"
DEFAULT_REGISTRY = "http://localhost:8081"
DEFAULT_SETTLE_SECONDS = 45.0
DEFAULT_ORDER_DELAY = 1.0

_ALONE = ". Only a file of inputs alone, which ingests, or of outputs alone, which publishes, needs no rules"
_TYPES = "type: denorm, type: group, type: stateless or type: view"
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_HEX = re.compile(r"hex:([0-9A-Fa-f]{2})+")


def load_pipeline(path: str | os.PathLike[str], env: Mapping[str, str] | None = None) -> Pipeline:
    """The pipeline of a file. Needs no broker, registry, lake or JVM.

    ``env``: the variables that ``${NAME}`` in the file stands for; None: those of this process.
    PipelineFileError with all problems of the file, in the order of their lines.

        >>> from pathlib import Path
        >>> from zync_assets import load_pipeline
        >>> _ = Path("shop.yaml").write_text("inputs: [{topic: '${TOPIC}', pool: Raw, format: json}]")
        >>> pipeline = load_pipeline("shop.yaml", {"TOPIC": "orders"})
        >>> pipeline.name, pipeline.inputs[0].topic
        ('shop', 'orders')
    """
    path, env = Path(path), os.environ if env is None else env
    node, problems = read(path, env)
    if isinstance(node, YamlTable):
        file_fields = Fields(node, "", problems, known_names(FILE), FILE_HINTS)
        file = with_patterns(YamlTable(node.line, tuple(file_fields.entries.values())))
        pipeline = _pipeline(Fields(file, "", problems, None), path, env)
        if not problems:
            return pipeline
    elif not problems:
        empty = node is None or (isinstance(node, Scalar) and node.value is None)
        fault = "is empty" if empty or node is None else f"must be a mapping, not {kind(node)}"
        problems.append(Problem(1, "", f"{fault}; a pipeline has inputs:, outputs: and transforms:"))
    # A key that is read twice reports its problem twice.
    raise PipelineFileError(str(path), sorted(dict.fromkeys(_causes(problems)), key=lambda problem: problem.line))


def _causes(problems: list[Problem]) -> list[Problem]:
    """The problems without those that follow from others, such as a misspelt key or a variable that is not set."""
    explained_keys = {key for item in problems for key in item.explains}
    if explained_keys:
        problems = [
            item for item in problems if item.explains or not (item.key in explained_keys or UNSET in item.message)
        ]
    return [item for item in problems if item.message != NO_PATTERN] or problems


def _pipeline(fields: Fields, path: Path, env: Mapping[str, str]) -> Pipeline:
    name = _name(fields, path)
    kafka = read_kafka(fields) if "kafka" in fields else default_kafka(env)
    # librdkafka has two names for the brokers' addresses, and uses the addresses of both.
    if "metadata.broker.list" not in kafka:
        kafka.setdefault("bootstrap.servers", env.get("KAFKA_BOOTSTRAP_SERVERS") or DEFAULT_BOOTSTRAP_SERVERS)
    lake = read_lake(fields, path, env)
    spark = read_spark(fields, env)
    settle, order_delay = fields.number("settle"), fields.number("order-delay")
    parts = _parts(fields)
    inputs, input_lines = read_inputs(fields) if "inputs" in parts else ({}, {})
    outputs = read_outputs(fields, input_lines) if "outputs" in parts else {}
    rules = _rules(fields, inputs, outputs) if "transforms" in parts else ()
    good_inputs = tuple(item for item in inputs.values() if item is not None)
    good_outputs = tuple(item for item in outputs.values() if item is not None)
    transactions = read_transactions(fields, inputs, outputs, rules)
    if transactions is not None:
        good_inputs = with_transaction_topic(good_inputs, *transactions)
    sinks = read_sinks(fields, inputs, outputs, path)
    sides = [side for item in (*good_inputs, *good_outputs) for side in (item.key, item.value)]
    registry = _registry(fields, env, has_avro=any(side.format == "avro" for side in sides))
    return Pipeline(
        name=name,
        path=path.resolve(),
        kafka=kafka,
        registry=registry,
        lake=lake,
        spark=spark,
        inputs=good_inputs,
        outputs=good_outputs,
        rules=rules,
        settle_seconds=DEFAULT_SETTLE_SECONDS if settle is None else settle,
        unavailable_value=_unavailable_value(fields),
        consumer_group=_consumer_group(fields),
        missing_field=_missing_field(fields),
        on_rule_change=fields.choice("on-rule-change", get_args(OnRuleChange)) or "continue"
        if "on-rule-change" in fields
        else "continue",
        order_delay=DEFAULT_ORDER_DELAY if order_delay is None else order_delay,
        transactions=None if transactions is None else transactions[0],
        sinks=sinks,
    )


def _parts(fields: Fields) -> frozenset[str]:
    """The sections that the file must have. A file of inputs alone ingests; a file of outputs alone publishes."""
    sections = {
        *(name for name in ("inputs", "outputs", "transforms") if name in fields),
        *(("outputs",) if "output" in fields else ()),
    }
    return frozenset(sections if sections in ({"inputs"}, {"outputs"}) else ("inputs", "outputs", "transforms"))


def _name(fields: Fields, path: Path) -> str:
    name = fields.text("name") if "name" in fields else None
    if name is None:
        return re.sub(r"[^A-Za-z0-9._-]", "_", path.stem) or "pipeline"
    if not _NAME.fullmatch(name):
        fields.problem("name", "must consist of letters, digits, `.`, `_` and `-`")
    return name


def _registry(fields: Fields, env: Mapping[str, str], has_avro: bool) -> RegistryConfig | None:
    table = fields.table("registry", "{url: 'http://host:8081'}")
    if table is None:
        try:
            config = None if "registry" in fields else default_registry(env)
        except SetupError as error:
            fields.problem("registry", f"is missing, and {error}")
            return None
        if config is not None:
            return config
        return RegistryConfig(DEFAULT_REGISTRY) if has_avro else None
    registry = Fields(table, "registry", fields.problems, None)
    properties = registry.flat()
    url = properties.pop("url", DEFAULT_REGISTRY)
    if fault := http_fault(url):
        registry.problem("url", fault)
    for key in registry_faults(properties):
        registry.problem(key, f"is no property of Confluent's client for Python{suggestion(key, REGISTRY_NAMES)}")
    return RegistryConfig(url, properties)


def _consumer_group(fields: Fields) -> str | None:
    group = fields.text("consumer-group") if "consumer-group" in fields else None
    if group is not None and not group.strip():
        fields.problem("consumer-group", "is empty; write the name of a consumer group, or leave the key out")
    return group


def _unavailable_value(fields: Fields) -> str | None:
    key = "unavailable-value"
    node = fields.node(key)
    if node is None:
        return UNAVAILABLE_VALUE
    if isinstance(node, Scalar) and node.value is None:
        return None
    text = fields.text(key, "write Debezium's unavailable.value.placeholder, or null where there is none")
    if text is not None and text.startswith("hex:") and not _HEX.fullmatch(text):
        fields.problem(key, "after hex: come pairs of hexadecimal digits, as in Debezium's configuration")
    return text


def _missing_field(fields: Fields) -> MissingField:
    node = fields.node("missing-field")
    if node is None or (isinstance(node, Scalar) and node.value is None):
        return "null"
    return fields.choice("missing-field", ("null", "fail")) or "null"


def _rules(fields: Fields, inputs: dict[str, Input | None], outputs: dict[str, Output | None]) -> tuple[Rule, ...]:
    node = fields.node("transforms")
    if node is None:
        alone = "" if "transforms" in fields else _ALONE
        fields.problem("transforms", f"is missing; write a list of rules, each with {_TYPES}{alone}")
        return ()
    if not isinstance(node, Items) or not node.items:
        fault = "is empty" if isinstance(node, Items) else f"must be a list, not {kind(node)}"
        fields.problem("transforms", f"{fault}; write at least one rule, with {_TYPES}")
        return ()
    return read_rules(tables(node, "transforms", fields.problems), inputs, outputs, fields.problems)
