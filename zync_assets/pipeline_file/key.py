"""A key of the pipeline file: the name that the reader accepts, and the description that ``zync help`` prints.

The readers take their known names from these definitions. A key without a description therefore does not exist. Here stand the
key ``shape``, which inputs and outputs share, and the keys of the connections: Kafka, the schema registry, the lake and
Spark. Kafka's and Spark's are read here too.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zync_assets.pipeline import SHARED, RegistryConfig
from zync_assets.pipeline_file.fields import Fields, suggestion, word_list
from zync_assets.pipeline_file.source import UNSET
from zync_assets.spark.sql import contradictions

_INDEX = re.compile(r"\[[0-9]*\]")


@dataclass(frozen=True)
class Key:
    """One key of one mapping.

    ``type``: the form of the value, in words. ``text``: one to three sentences. ``example``: YAML at the place of the
    key, with the keys that it needs beside it. ``default``: the value, or the effect, where the file lacks the key.
    ``required``: the file must have the key. ``allowed``: every legal value, where there is a list. ``keys``: the
    known keys below this one. ``open``: other names below this one are legal too.
    """

    name: str
    type: str
    text: str
    example: str
    default: str = ""
    required: bool = False
    allowed: Sequence[str] = ()
    keys: tuple[Key, ...] = ()
    open: bool = False

    @property
    def summary(self) -> str:
        """The first sentence of the text."""
        return re.split(r"(?<=[.])\s", self.text, maxsplit=1)[0]


def known_names(keys: Sequence[Key]) -> tuple[str, ...]:
    """The names of keys, for the reader of their mapping."""
    return tuple(key.name for key in keys)


def paths(keys: Sequence[Key], above: str = "") -> Iterator[tuple[str, Key]]:
    """Every key with its path, such as ``inputs.retention``, in the order of the grammar."""
    for key in keys:
        path = f"{above}.{key.name}" if above else key.name
        yield path, key
        yield from paths(key.keys, path)


def found(keys: Mapping[str, Key], path: str) -> str | None:
    """The known path that ``path`` means; None for an unknown one.

    ``inputs[0].topic`` means ``inputs.topic``. A name below an open key, such as a property of librdkafka, means the
    open key.
    """
    plain_path = _INDEX.sub("", path)
    if plain_path in keys:
        return plain_path
    return next((above for above, key in keys.items() if key.open and plain_path.startswith(f"{above}.")), None)


def near(keys: Mapping[str, Key], path: str) -> list[str]:
    """At most three known paths that resemble an unknown one, the closest first."""
    plain_path = _INDEX.sub("", path).lower()
    last_name = plain_path.rpartition(".")[2]
    by_path = difflib.get_close_matches(plain_path, list(keys), n=3, cutoff=0.75)
    by_name = [
        place
        for name in difflib.get_close_matches(last_name, {key.name for key in keys.values()}, n=3, cutoff=0.75)
        for place, key in keys.items()
        if key.name == name
    ]
    return list(dict.fromkeys([*by_path, *by_name]))[:3]


def input_shape() -> Key:
    """The key ``shape`` of an input."""
    return Key(
        "shape",
        "a mapping",
        "Filters and maps each record before the record reaches the lake. The lake never gets the rest, except for"
        " quarantined records, which stay whole.",
        "shape: {where: value.op <> 'r', value: value.after}",
        default="none",
        keys=_shape("`kafka`, `key` and `value` of the record"),
    )


def output_shape() -> Key:
    """The key ``shape`` of an output."""
    return Key(
        "shape",
        "a mapping",
        "Filters and maps each output of the rules before it is numbered. The inputs of a filtered output are *dropped*.",
        "shape: {value: {ID: value.ID}}",
        default="none",
        keys=_shape("`key` and `value` of the output"),
    )


def _shape(roots: str) -> tuple[Key, ...]:
    return (
        Key(
            "where",
            "a condition in Spark SQL",
            f"Keeps the records for which the condition holds; null counts as no. It sees {roots}.",
            "shape: {where: value.ID IS NOT NULL}",
            default="all are kept",
        ),
        Key(
            "key",
            "an expression, or a mapping of names to expressions",
            "The new key.",
            "shape: {key: key}",
            default="the key as it is",
        ),
        Key(
            "value",
            "an expression, or a mapping of names to expressions",
            "The new value. A null value stays null.",
            "shape: {value: {ID: value.ID}}",
            default="the value as it is",
        ),
    )


KAFKA: tuple[Key, ...] = (
    Key(
        "bootstrap.servers",
        "HOST:PORT, with commas between",
        "The brokers to ask first.",
        "kafka: {bootstrap.servers: 'broker:9092'}",
        default="$KAFKA_BOOTSTRAP_SERVERS, else localhost:9092",
    ),
    Key(
        "oauth_cb",
        "package.module:function",
        "A function that makes tokens for OAUTHBEARER. It gets `sasl.oauthbearer.config`, and returns a token and its end in"
        " seconds since the epoch.",
        "kafka: {oauth_cb: 'zync_assets.kafka.msk_iam:token'}",
        default="none",
    ),
)
REGISTRY: tuple[Key, ...] = (
    Key(
        "url",
        "a URL",
        "The address of a schema registry with Confluent's API.",
        "registry: {url: 'https://registry:8081'}",
        default="http://localhost:8081",
    ),
)


def _setting(name: str, scheme: str, text: str, default: str = "none", beside: str = "") -> Key:
    return Key(
        name,
        "text",
        f"{text} For a lake in {scheme}://.",
        f'lake: {{uri: "{scheme}://bucket/folder", {name}: {beside or "…"}}}',
        default=default,
    )


_AWS = "the AWS variables of the environment, else the AWS chain"
LAKE: tuple[Key, ...] = (
    Key(
        "uri", "a URI", "The place of the lake in an object store.", 'lake: {uri: "s3://bucket/folder"}', required=True
    ),
    _setting("endpoint", "s3", "The URL of a server other than Amazon's.", _AWS, '"https://minio:9000"'),
    _setting("region", "s3", "The region of the bucket.", _AWS, "eu-west-1"),
    _setting("access-key-id", "s3", "The access key.", _AWS, '"${KEY}", secret-access-key: "${SECRET}"'),
    _setting("secret-access-key", "s3", "The secret of the access key.", _AWS, '"${SECRET}", access-key-id: "${KEY}"'),
    _setting("session-token", "s3", "The token of a temporary login.", _AWS, '"${TOKEN}"'),
    _setting("service-account", "gs", "The path of a JSON key.", "GOOGLE_SERVICE_ACCOUNT", "/run/secrets/key.json"),
    _setting("account-name", "abfss", "The storage account.", "AZURE_STORAGE_ACCOUNT_NAME", "shop"),
    _setting("account-key", "abfss", "The key of the storage account.", "AZURE_STORAGE_ACCOUNT_KEY", '"${KEY}"'),
    _setting("sas-token", "abfss", "A shared access signature.", "AZURE_STORAGE_SAS_TOKEN", '"${TOKEN}"'),
)
SPARK: tuple[Key, ...] = (
    Key(
        "master",
        "a Spark master",
        "The master of the Spark session.",
        'spark: {master: "local[2]"}',
        default="local[*]",
    ),
    Key(
        "remote",
        "`shared`, or sc://host:port",
        "A Spark Connect server. `shared` starts a server on this machine, or uses the one that runs there already.",
        "spark: {remote: shared}",
        default="$SPARK_REMOTE",
    ),
)


KAFKA_NAMES = {
    "bootstrap_servers": "bootstrap.servers",
    "security_protocol": "security.protocol",
    "sasl_mechanisms": "sasl.mechanism",
    "sasl_username": "sasl.username",
    "sasl_password": "sasl.password",
    "tls_client_cert_file": "ssl.certificate.location",
    "tls_client_key_file": "ssl.key.location",
    "tls_server_ca_cert_file": "ssl.ca.location",
    "tls_server_insecure_skip_verify": "enable.ssl.certificate.verification",
}
_PROPERTIES = (
    *KAFKA_NAMES.values(),
    *("sasl.mechanisms", "sasl.oauthbearer.method", "sasl.oauthbearer.client.id", "sasl.oauthbearer.client.secret"),
    *("sasl.oauthbearer.token.endpoint.url", "sasl.oauthbearer.config", "ssl.key.password", "ssl.ca.pem", "client.id"),
    *(
        "ssl.endpoint.identification.algorithm",
        "acks",
        "linger.ms",
        "compression.type",
        "message.max.bytes",
        "oauth_cb",
    ),
)
"""The usual properties. An error suggests one for a similar name."""
_JAVA = {
    "sasl.jaas.config": "sasl.username and sasl.password",
    "ssl.truststore.location": "ssl.ca.location, a PEM file",
    "ssl.truststore.password": "ssl.ca.location, a PEM file without a password",
    "ssl.truststore.type": "ssl.ca.location, a PEM file",
    "sasl.login.callback.handler.class": "sasl.oauthbearer.method or oauth_cb",
}
"""Properties of Kafka's clients in Java → what librdkafka has in their place."""
_PYTHONS = ("oauth_cb", "sasl.oauthbearer.metadata.authentication.type")
"""Properties that the client reads, with an error of its own, before librdkafka."""
_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_LIST = "https://github.com/confluentinc/librdkafka/blob/master/CONFIGURATION.md"
_REMOTE = re.compile(rf"sc://[^\s/;]+/?(;.*|/;.*)?|{SHARED}")
_WRONG_REMOTE = f"must be sc://host:port, with /;token=… and the like after it where need be, or {SHARED}"
_MASTER = re.compile(
    r"local(\[\s*([1-9][0-9]*|\*)\s*(,\s*[0-9]+\s*)?\])?|local-cluster\[[\s0-9,]+\]|yarn|[A-Za-z][A-Za-z0-9+.-]*://\S+"
)
_WRONG_MASTER = "must be local, local[N], local[*], spark://host:port, yarn or k8s://https://host:port"
_FUNCTION = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*")


SINK_HINTS = {
    "connector.class": "write type:",
    "connection.url": "write url:",
    "topics": "write from:",
    "table.name.format": "write table:, with {topic} for the topic's name",
    "collection.name.format": "write table:, with {topic} for the topic's name",
    "insert.mode": "write mode:",
    "pk.fields": "write key:",
    "primary.key.fields": "write key:",
    "auto.create": "write create:",
    "auto.evolve": "write evolve: add",
    "schema.evolution": "write evolve: add",
    "delete.enabled": "write delete:",
    "fields.whitelist": "write columns: {include: [...]}",
    "field.include.list": "write columns: {include: [...]}",
    "errors.tolerance": "write on-bad-record:",
    **dict.fromkeys(("pk.mode", "primary.key.mode"), "demo/sinks.md has what to write, beside Kafka Connect's modes"),
    **dict.fromkeys(
        ("user", "username", "password", "host", "port", "database", "connection.username", "connection.password"),
        "it is a part of `url`, and a secret of it comes from the environment",
    ),
}
INPUT_HINTS = {
    "key.converter": "write key-format:",
    "value.converter": "write value-format:",
    "auto.offset.reset": "write from:",
    "startingOffsets": "write from:",
    "group.id": "write consumer-group, beside `inputs`",
}
FILE_HINTS = {
    "input": "write inputs:",
    "sources": "write inputs:",
    "rules": "write transforms:",
    "models": "write transforms:",
    "targets": "write sinks:",
    "connector.class": "Kafka Connect's connectors are `sinks` here, and `zync help sinks` describes them",
}
"""Keys of Kafka Connect, Debezium, Spark and dbt → a hint for the user. Each section of the file has its own mapping."""


def read_kafka(fields: Fields) -> dict[str, str]:
    """librdkafka's properties, checked by librdkafka itself without a broker."""
    table = fields.table("kafka", "{bootstrap.servers: 'host:9092'}")
    if table is None:
        return {}
    kafka = Fields(table, "kafka", fields.problems, None)
    properties = kafka.flat()
    for key in [name for name in properties if name in KAFKA_NAMES]:
        kafka.problem(key, f"is a key of zync's kafka.json; write {KAFKA_NAMES[key]}, as librdkafka spells it")
    for key, reason in kafka_faults({key: value for key, value in properties.items() if key not in KAFKA_NAMES}):
        kafka.problem(key, reason)
    return properties


def kafka_faults(properties: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The properties that librdkafka itself refuses, without a broker, and the fault of each, without its value.

    Properties of a plugin are not known here: the plugin would run. No property is checked beside a plugin's.
    """
    if "oauth_cb" in properties and not _FUNCTION.fullmatch(properties["oauth_cb"]):
        yield "oauth_cb", "must name a function, as in package.module:function"
    if "http://" in (servers := properties.get("bootstrap.servers", "").lower()) or "https://" in servers:
        yield "bootstrap.servers", "must be host:port, without http:// or https://"
    checked_properties = {key: value for key, value in properties.items() if key not in _PYTHONS and UNSET not in value}
    if checked_properties.keys() <= {"bootstrap.servers"} or "plugin.library.paths" in checked_properties:
        return
    # Here alone: a file that names no more than its brokers needs no library.
    from zync_assets.kafka.librdkafka import refused_properties

    for key, is_known in refused_properties(checked_properties).items():
        if key in _JAVA:
            yield key, f"is a property of Kafka's clients in Java; write {_JAVA[key]}"
        elif not is_known:
            yield key, f"is no property of librdkafka{suggestion(key, _PROPERTIES) or f'; see {_LIST}'}"
        elif key == "security.protocol":
            yield key, f"must be one of {word_list(_PROTOCOLS)}"
        else:
            yield key, f"has a value that librdkafka does not take; see {_LIST}"


REGISTRY_NAMES = (
    *(
        "url",
        "basic.auth.user.info",
        "ssl.ca.location",
        "ssl.certificate.location",
        "ssl.key.location",
        "ssl.key.password",
    ),
    *("timeout", "max.retries", "retries.wait.ms", "retries.max.wait.ms", "proxy"),
)
"""The usual properties. An error suggests one for a similar name."""


def registry_faults(properties: Mapping[str, str]) -> list[str]:
    """The properties that the registry's client does not know."""
    if properties.keys() <= set(REGISTRY_NAMES):
        return []
    # Here alone: few files name more.
    from zync_assets.kafka.registry import unknown_properties

    return unknown_properties(RegistryConfig("http://localhost", properties))


def read_spark(fields: Fields, env: Mapping[str, str]) -> dict[str, str]:
    """Spark's properties, and ``master`` or ``remote``."""
    default = {"master": "local[*]"}
    if remote := env.get("SPARK_REMOTE"):
        # As PySpark has it, and `shared`.
        default = {"remote": remote}
    table = fields.table("spark", "{master: 'local[*]'}")
    if table is None:
        return _check_default(fields, default)
    spark = Fields(table, "spark", fields.problems, None)
    properties = spark.flat()
    for key in spark.entries:
        if key in ("spark.master", "spark.remote"):
            spark.problem(key, f"write {key.removeprefix('spark.')}:")
        elif key not in ("master", "remote") and not key.startswith("spark."):
            hint = suggestion(key, ("master", "remote")) or f"; did you mean `spark.{key}`?"
            spark.problem(key, f"`{key}` is no Spark property: they begin with `spark.`{hint}")
    for key, reason in contradictions(properties):
        spark.problem(key, reason)
    if "master" in spark and "remote" in spark and properties.get("remote") != SHARED:
        spark.problem("remote", "excludes master: a session is a local or a cluster's one, or a Spark Connect server's")
    elif not _REMOTE.fullmatch(properties.get("remote", SHARED)):
        spark.problem("remote", _WRONG_REMOTE)
    elif not _MASTER.fullmatch(properties.get("master", "local")):
        spark.problem("master", _WRONG_MASTER)
    if "master" not in spark and "remote" not in spark:
        properties |= _check_default(fields, default)
    return properties


def _check_default(fields: Fields, default: dict[str, str]) -> dict[str, str]:
    if not _REMOTE.fullmatch(default.get("remote", SHARED)):
        fields.problem("spark", f"names no master, and the environment variable SPARK_REMOTE {_WRONG_REMOTE}")
    return default
