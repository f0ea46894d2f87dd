"""Object stores: what a pipeline file says of one, in the words of delta-rs and of Hadoop.

delta-rs opens the log and, for pyarrow, the files (its storage options are those of the Rust crate object_store); Spark reads
and writes Parquet by Hadoop's file systems (hadoop-aws: "S3A", hadoop-azure: "ABFS", the Cloud Storage connector). A commit is
a conditional put (``If-None-Match: *``), so that of two writers one loses and no lock table is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from zync_assets.errors import LakeError


@dataclass(frozen=True)
class Setting:
    """One key of ``lake:`` beside ``uri``. ``hadoop`` may hold ``{account}``; empty where Hadoop has no such property.
    ``env``: the variables of the environment that stand in for the key, first match first."""

    delta: str
    hadoop: str = ""
    env: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kind:
    """A kind of store. ``delta`` and ``hadoop``: what is always set; ``prefix``: what delta-rs's own names begin with."""

    name: str
    prefix: str
    settings: Mapping[str, Setting]
    delta: Mapping[str, str] = field(default_factory=dict)
    hadoop: Mapping[str, str] = field(default_factory=dict)


GENERAL = (
    *("allow_http", "allow_invalid_certificates", "connect_timeout", "timeout", "max_retries", "retry_timeout"),
    *("proxy_url", "user_agent", "pool_idle_timeout", "pool_max_idle_per_host"),
)
"""delta-rs's storage options that are the same for all stores."""

_PATIENT = {"connect_timeout": "5s", "timeout": "60s", "max_retries": "8", "retry_timeout": "40s"}
"""delta-rs's own patience of three minutes is more than who waits at a terminal has."""

_S3 = Kind(
    "S3",
    "aws_",
    {
        "endpoint": Setting("aws_endpoint_url", "fs.s3a.endpoint", ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")),
        "region": Setting("aws_region", "fs.s3a.endpoint.region", ("AWS_REGION", "AWS_DEFAULT_REGION")),
        "access-key-id": Setting("aws_access_key_id", "fs.s3a.access.key", ("AWS_ACCESS_KEY_ID",)),
        "secret-access-key": Setting("aws_secret_access_key", "fs.s3a.secret.key", ("AWS_SECRET_ACCESS_KEY",)),
        "session-token": Setting("aws_session_token", "fs.s3a.session.token", ("AWS_SESSION_TOKEN",)),
    },
    {**_PATIENT, "aws_conditional_put": "etag"},
    {"fs.s3a.connection.establish.timeout": "5s", "fs.s3a.attempts.maximum": "5", "fs.s3a.retry.limit": "5"},
)
_GCS = Kind(
    "Google Cloud Storage",
    "google_",
    {
        "service-account": Setting(
            "google_service_account",
            "fs.gs.auth.service.account.json.keyfile",
            ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_APPLICATION_CREDENTIALS"),
        ),
    },
    _PATIENT,
    {"fs.gs.impl": "com.google.cloud.hadoop.fs.gcs.GoogleHadoopFileSystem"},
)
_AZURE = Kind(
    "Azure",
    "azure_",
    {
        "account-name": Setting("azure_storage_account_name", "", ("AZURE_STORAGE_ACCOUNT_NAME",)),
        "account-key": Setting(
            "azure_storage_account_key", "fs.azure.account.key.{account}", ("AZURE_STORAGE_ACCOUNT_KEY",)
        ),
        "sas-token": Setting(
            "azure_storage_sas_key", "fs.azure.sas.fixed.token.{account}", ("AZURE_STORAGE_SAS_TOKEN",)
        ),
    },
    _PATIENT,
)
KINDS: Mapping[str, Kind] = {"s3": _S3, "s3a": _S3, "gs": _GCS, "abfss": _AZURE, "abfs": _AZURE}
"""Scheme of a lake's URI → kind."""

_CREDENTIALS = ("access-key-id", "secret-access-key", "session-token")
"""They belong together: none is taken from the environment where the file has one."""


def scheme(uri: str) -> str:
    return uri.partition("://")[0].lower()


def with_environment(uri: str, settings: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """The settings, completed from the environment.

    Each library would read other environment variables itself. With the completed settings, every library and Spark's tasks
    on other machines use the same values.
    """
    found = dict(settings)
    given = any(name in settings for name in _CREDENTIALS)
    for name, item in KINDS[scheme(uri)].settings.items():
        if name not in found and not (given and name in _CREDENTIALS):
            value = next((env[variable] for variable in item.env if env.get(variable)), None)
            if value is not None:
                found[name] = value
    return found


def delta_options(uri: str, settings: Mapping[str, str]) -> dict[str, str]:
    """delta-rs's storage options. A setting without a translation is an option of delta-rs, and stays as it is."""
    kind = kind_of(uri)
    options = dict(kind.delta)
    for name, value in settings.items():
        options[kind.settings[name].delta if name in kind.settings else name] = value
    endpoint = settings.get("endpoint")
    if kind is _S3 and endpoint:
        options.setdefault("aws_region", "us-east-1")
        if endpoint.startswith("http://"):
            options.setdefault("aws_allow_http", "true")
    return options


def hadoop_options(uri: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Hadoop's properties for the same store."""
    kind = kind_of(uri)
    account = urlsplit(uri).hostname or ""
    options = dict(kind.hadoop)
    for name, item in kind.settings.items():
        if name in settings and item.hadoop:
            options[item.hadoop.format(account=account)] = settings[name]
    if kind is _S3:
        if "access-key-id" not in settings:
            # The AWS SDK's own chain, as delta-rs has it: profile, web identity, container, machine.
            options["fs.s3a.aws.credentials.provider"] = (
                "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
            )
        if endpoint := settings.get("endpoint"):
            options.setdefault("fs.s3a.endpoint.region", "us-east-1")
            options["fs.s3a.path.style.access"] = "true"
            options["fs.s3a.connection.ssl.enabled"] = str(not endpoint.startswith("http://")).lower()
    if kind is _GCS and "service-account" in settings:
        options["fs.gs.auth.type"] = "SERVICE_ACCOUNT_JSON_KEYFILE"
    if kind is _AZURE and "sas-token" in settings:
        options[f"fs.azure.account.auth.type.{account}"] = "SAS"
    return options


def kind_of(uri: str) -> Kind:
    """The kind of a URI's store; LakeError for an unknown scheme."""
    try:
        return KINDS[scheme(uri)]
    except KeyError:
        known = ", ".join(f"{name}://" for name in KINDS)
        raise LakeError(f"lake {uri}: no store of that kind is known here; known are {known} and folders") from None
