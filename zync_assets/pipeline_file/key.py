"""A key of the pipeline file: the name that the reader accepts, and the description that ``zync help`` prints.

The readers take their known names from these definitions. A key without a description therefore does not exist. Here stand the
key ``shape``, which inputs and outputs share, and the keys of the connections: Kafka, the schema registry, the lake and Spark.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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


def found(known: Mapping[str, Key], path: str) -> str | None:
    """The known path that ``path`` means; None for an unknown one.

    ``inputs[0].topic`` means ``inputs.topic``. A name below an open key, such as a property of librdkafka, means the
    open key.
    """
    plain = _INDEX.sub("", path)
    if plain in known:
        return plain
    return next((above for above, key in known.items() if key.open and plain.startswith(f"{above}.")), None)


def near(known: Mapping[str, Key], path: str) -> list[str]:
    """At most three known paths that resemble an unknown one, the closest first."""
    plain = _INDEX.sub("", path).lower()
    last = plain.rpartition(".")[2]
    by_path = difflib.get_close_matches(plain, list(known), n=3, cutoff=0.75)
    by_name = [
        place
        for name in difflib.get_close_matches(last, {key.name for key in known.values()}, n=3, cutoff=0.75)
        for place, key in known.items()
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
