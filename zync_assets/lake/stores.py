"""Object stores: the settings that a pipeline file gives for a store, and the errors of a store in words.

Settings become options of delta-rs and properties of Hadoop. delta-rs opens the log and, for pyarrow, the files. Its storage
options are those of the Rust crate object_store. Spark reads and writes Parquet by Hadoop's file systems (hadoop-aws: "S3A",
hadoop-azure: "ABFS", the Cloud Storage connector). A commit is a conditional put (``If-None-Match: *``). If two writers commit,
one loses, and no lock table is needed.

``refusal`` turns a store's refusal into one line that names the place and the cure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from zync_assets.errors import LakeError, LakeUnavailable


@dataclass(frozen=True)
class Setting:
    """One key of ``lake:`` beside ``uri``. ``hadoop`` may hold ``{account}``; empty where Hadoop has no such property.
    ``env``: the variables of the environment that stand in for the key, first match first."""

    delta: str
    hadoop: str = ""
    env: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoreKind:
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
"""delta-rs by itself tries for three minutes, which is too long for a user at a terminal."""

_S3 = StoreKind(
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
_GCS = StoreKind(
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
_AZURE = StoreKind(
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
KINDS: Mapping[str, StoreKind] = {"s3": _S3, "s3a": _S3, "gs": _GCS, "abfss": _AZURE, "abfs": _AZURE}
"""Scheme of a lake's URI → kind."""

_CREDENTIALS = ("access-key-id", "secret-access-key", "session-token")
"""Settings that belong together. If the file has one of them, none is taken from the environment."""


def scheme(uri: str) -> str:
    return uri.partition("://")[0].lower()


def with_environment(uri: str, settings: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """The settings, completed from the environment.

    Each library would read other environment variables itself. With the completed settings, every library and Spark's tasks
    on other machines use the same values.
    """
    values = dict(settings)
    has_credentials = any(name in settings for name in _CREDENTIALS)
    for name, item in KINDS[scheme(uri)].settings.items():
        if name not in values and not (has_credentials and name in _CREDENTIALS):
            value = next((env[variable] for variable in item.env if env.get(variable)), None)
            if value is not None:
                values[name] = value
    return values


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


def kind_of(uri: str) -> StoreKind:
    """The kind of a URI's store; LakeError for an unknown scheme."""
    try:
        return KINDS[scheme(uri)]
    except KeyError:
        schemes = ", ".join(f"{name}://" for name in KINDS)
        raise LakeError(f"lake {uri}: no store of that kind is known here; known are {schemes} and folders") from None


_TRACE = re.compile(r"(stack backtrace|\d+: |at )", re.IGNORECASE)
"""The lines of Rust's backtraces, which some errors of delta-rs carry."""
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"\b(40[0-9]|412|429|50[0-9]) [A-Z]")
_SILENCE = (
    "error sending request",
    "tcp connect",
    "dns error",
    "timed out",
    "Connection refused",
    "connection closed",
    "NETWORK_CONNECTION",
)
_TROUBLE = (
    "429",
    "500",
    "502",
    "503",
    "504",
    "InternalError",
    "RequestTimeout",
    "ServerBusy",
    "ServiceUnavailable",
    "SlowDown",
)
"""Codes of a store that has an internal error, or too much to do."""
_OF_HADOOP = re.compile(
    r"AWSClientIOException|AWSNoResponseException|AWSServiceThrottledException|AWSStatus500Exception|ApiCallTimeout"
    r"|ConnectTimeoutException|NoHttpResponseException"
)
"""Exceptions for the same troubles from Hadoop's S3 client, with which Spark reads."""
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_NO_LOGIN = ("SignatureDoesNotMatch", "InvalidAccessKeyId", "InvalidToken", "ExpiredToken", "AuthenticationFailed")
_NO_CREDENTIALS = ("credentials provider", "CredentialsNotLoaded", "no providers in chain", "169.254.169.254")


def refusal(uri: str, settings: Mapping[str, str], error: BaseException) -> LakeError | None:
    """The error for a store's refusal, with the cure; None for another kind of error.

    The text omits the store's answer, because the answer may quote signed requests.
    """
    text = str(error)
    bucket, kind = urlsplit(uri).netloc, kind_of(uri)
    place = f"at {endpoint}" if (endpoint := settings.get("endpoint")) else f"in {kind.name}"
    match = _CODE.search(text) or _STATUS.search(text)
    code = match[1] if match else ""
    if any(sign in text for sign in _NO_BUCKET):
        return LakeError(
            f"lake {uri}: there is no bucket {bucket} {place}. Create it, or correct lake: in the pipeline file."
        )
    if code in _NO_LOGIN or code == "401":
        return LakeError(
            f"lake {uri}: the store {place} does not know the credentials ({code}). Correct the keys of lake: in the pipeline"
            " file, or the environment variables that stand for them."
        )
    if any(sign in text for sign in _NO_CREDENTIALS):
        return LakeError(
            f"lake {uri}: no credentials were found. Set them in lake: of the pipeline file or by environment variables"
            f" ({', '.join(item.env[0] for item in kind.settings.values() if item.env)})."
        )
    if code in ("AccessDenied", "403") or "lacked the necessary privileges" in text:
        return LakeError(
            f"lake {uri}: the store {place} does not let these credentials do that ({code or 'AccessDenied'}). They need to"
            f" list, read, write and delete objects below {uri}."
        )
    if any(sign in text for sign in _SILENCE):
        return LakeUnavailable(
            f"lake {uri}: no answer from the store {place}. Nothing is lost: run again when it is up, or correct endpoint"
            " and region of lake: in the pipeline file."
        )
    if code in _TROUBLE:
        return LakeUnavailable(f"lake {uri}: the store {place} has trouble ({code}). Nothing is lost: run again later.")
    return None


def no_answer(text: str) -> LakeUnavailable | None:
    """The error for an object store that did not answer Spark; None where Spark's text is of something else."""
    match = _OF_HADOOP.search(text)
    if match is None or any(sign in text for sign in _NO_CREDENTIALS):
        return None
    return LakeUnavailable(
        f"the lake's store does not answer Spark ({match[0]}). Nothing is lost: run again when it is up, or correct endpoint and"
        " region of lake: in the pipeline file."
    )


ANEW = "begin anew, with other pools and other output topics"
"""The last cure of a table that lost records or its account."""

_DISK: tuple[tuple[str, type[LakeError], str], ...] = (
    (
        r"No space left|os error 28|[Ee]rrno 28|Disk quota|os error 122|[Ee]rrno 122",
        LakeUnavailable,
        "the disk is full (No space left on device). Make room",
    ),
    (r"Read-only file system|os error 30|[Ee]rrno 30", LakeError, "it is read-only. Make it writable"),
    (
        r"Permission denied|Operation not permitted|os error 13|[Ee]rrno 13",
        LakeError,
        "this user may not do that. Give it the right to read and write",
    ),
    (r"[Ee]rrno 2\] Cannot create directory", LakeError, "no folder can be made there. Name another folder"),
    # Hadoop's file system does not say why.
    (
        "Mkdirs failed to create",
        LakeError,
        "no folder can be made there: it is read-only, or this user may not write. Give the user the right to write",
    ),
)


def disk_refusal(place: str, text: str) -> LakeError | None:
    """What the file system at a place refuses; None where the text is of something else. A full disk is LakeUnavailable: room
    is made while the command ``run`` waits."""
    for pattern, kind, fault in _DISK:
        if re.search(pattern, text):
            return kind(
                f"{place}: {fault}, and run again: nothing of this step is visible, and what was committed before is kept."
            )
    return None


def missing_file(text: str) -> LakeError | None:
    """The error for a data file that Spark did not find; None for the text of another error."""
    match = re.search(r"(?:PATH_NOT_FOUND|FILE_NOT_EXIST|FILE_READ|FAILED_READ_FILE|FileNotFound)", text)
    if match is None:
        return None
    place = re.search(r"(?:file|s3a?|gs|abfss?):/[^\s,]+\.parquet", text)
    name = re.sub("^file:/+", "/", place[0]) if place else "of a table"
    table = f"table {_table(name)}: " if place else ""
    return LakeError(
        f"{table}file {name} is in the Delta log and can't be read: another program removed or changed it, as a vacuum of"
        " less than a week does. Nothing was committed. Restore the file from a copy, and"
        " look for others that are missing." + (_STATE_CURE if is_state_file(name) else f" Without a copy, {ANEW}.")
    )


_STATE_CURE = " Or make the state of the views again, by a rebuild with the option --state."


def is_state_file(text: str) -> bool:
    """Whether a text names a file of a view's state (``etl.views.state``)."""
    return re.search(r"/state-\d+/", text) is not None


def _table(file: str) -> str:
    """The table that a data file belongs to. Compaction and ETL write into folders of the table."""
    match = re.fullmatch(r"(.+?)/(?:(?:batch-\d{12}-[0-9a-f]{12}|compact-[0-9a-f]{32}|topic=[^/]+)/.+|[^/]+)", file)
    return match[1] if match else file


def first_line(error: BaseException) -> str:
    """A library's error of many lines as one line, without the XML answer of a store, stack traces and a full stop."""
    lines = [re.sub(r"\x1b\[[0-9;]*m|↳", "", line).strip() for line in str(error).splitlines()]
    plain = [line for line in lines if line and "<?xml" not in line and not _TRACE.match(line)]
    text = ": ".join(plain[:1] + plain[-1:] if len(plain) > 1 else plain)
    return text.rstrip(".") or type(error).__name__
