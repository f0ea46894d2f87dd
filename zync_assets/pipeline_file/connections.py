"""The keys of the pipeline file's connections: Kafka, the schema registry, the lake and Spark."""

from __future__ import annotations

from zync_assets.pipeline_file.keys import Key

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
