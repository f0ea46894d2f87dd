"""Turns an object store's refusal into one line that names the place and the cure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from zync_assets.errors import LakeError, LakeUnavailable
from zync_assets.stores import kind_of

_TRACE = re.compile(r"(stack backtrace|\d+: |at )", re.IGNORECASE)
"""Of Rust's backtraces, which some errors of delta-rs carry."""
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"\b(40[0-9]|412|429|50[0-9]) [A-Z]")
_UNANSWERED = (
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
"""Codes of a store that has trouble of its own, or too much to do."""
_OF_HADOOP = re.compile(
    r"AWSClientIOException|AWSNoResponseException|AWSServiceThrottledException|AWSStatus500Exception|ApiCallTimeout"
    r"|ConnectTimeoutException|NoHttpResponseException"
)
"""Exceptions of Hadoop's S3 client, which Spark reads with, for the same."""
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_NO_LOGIN = ("SignatureDoesNotMatch", "InvalidAccessKeyId", "InvalidToken", "ExpiredToken", "AuthenticationFailed")
_NO_CREDENTIALS = ("credentials provider", "CredentialsNotLoaded", "no providers in chain", "169.254.169.254")


def refusal(uri: str, settings: Mapping[str, str], error: BaseException) -> LakeError | None:
    """The error for a store's refusal, with the cure; None for another kind of error.

    The text omits the store's answer, because the answer may quote signed requests.
    """
    text = str(error)
    bucket, kind = urlsplit(uri).netloc, kind_of(uri)
    where = f"at {endpoint}" if (endpoint := settings.get("endpoint")) else f"in {kind.name}"
    found = _CODE.search(text) or _STATUS.search(text)
    code = found[1] if found else ""
    if any(sign in text for sign in _NO_BUCKET):
        return LakeError(
            f"lake {uri}: there is no bucket {bucket} {where}. Create it, or correct lake: in the pipeline file."
        )
    if code in _NO_LOGIN or code == "401":
        return LakeError(
            f"lake {uri}: the store {where} does not know the credentials ({code}). Correct the keys of lake: in the pipeline"
            " file, or the environment variables that stand for them."
        )
    if any(sign in text for sign in _NO_CREDENTIALS):
        return LakeError(
            f"lake {uri}: no credentials were found. Set them in lake: of the pipeline file or by environment variables"
            f" ({', '.join(item.env[0] for item in kind.settings.values() if item.env)})."
        )
    if code in ("AccessDenied", "403") or "lacked the necessary privileges" in text:
        return LakeError(
            f"lake {uri}: the store {where} does not let these credentials do that ({code or 'AccessDenied'}). They need to"
            f" list, read, write and delete objects below {uri}."
        )
    if any(sign in text for sign in _UNANSWERED):
        return LakeUnavailable(
            f"lake {uri}: no answer from the store {where}. Nothing is lost: run again when it is up, or correct endpoint"
            " and region of lake: in the pipeline file."
        )
    if code in _TROUBLE:
        return LakeUnavailable(f"lake {uri}: the store {where} has trouble ({code}). Nothing is lost: run again later.")
    return None


def no_answer(text: str) -> LakeUnavailable | None:
    """The error for an object store that did not answer Spark; None where Spark's text is of something else."""
    found = _OF_HADOOP.search(text)
    if found is None or any(sign in text for sign in _NO_CREDENTIALS):
        return None
    return LakeUnavailable(
        f"the lake's store does not answer Spark ({found[0]}). Nothing is lost: run again when it is up, or correct endpoint and"
        " region of lake: in the pipeline file."
    )


_DISK = (
    (
        r"No space left|os error 28|[Ee]rrno 28|Disk quota|os error 122|[Ee]rrno 122",
        "the disk is full (No space left on device). Make room",
    ),
    (r"Read-only file system|os error 30|[Ee]rrno 30", "it is read-only. Make it writable"),
    (
        r"Permission denied|Operation not permitted|os error 13|[Ee]rrno 13",
        "this user may not do that. Give it the right to write",
    ),
)


def disk_refusal(place: str, text: str) -> LakeError | None:
    """What the file system at a place refuses; None where the text is of something else."""
    for pattern, told in _DISK:
        if re.search(pattern, text):
            return LakeError(
                f"{place}: {told}, and run again: nothing of this step is visible, and what was committed before is kept."
            )
    return None


def missing_file(text: str) -> LakeError | None:
    """The error for a data file that Spark did not find; None for the text of another error."""
    found = re.search(r"(?:PATH_NOT_FOUND|FILE_NOT_EXIST|FILE_READ|FAILED_READ_FILE|FileNotFound)", text)
    if found is None:
        return None
    place = re.search(r"(?:file|s3a?|gs|abfss?):/[^\s,]+\.parquet", text)
    name = re.sub("^file:/+", "/", place[0]) if place else "of a table"
    table = f"table {_table(name)}: " if place else ""
    return LakeError(
        f"{table}file {name} is in the Delta log and can't be read: another program removed or changed it, as a vacuum of"
        " less than a week does. Nothing was committed. Restore the file from a copy, and"
        " look for others that are missing."
    )


def _table(file: str) -> str:
    """The table that a data file belongs to. Compaction and ETL write into folders of the table."""
    found = re.fullmatch(r"(.+?)/(?:(?:batch-\d{12}-[0-9a-f]{12}|compact-[0-9a-f]{32}|topic=[^/]+)/.+|[^/]+)", file)
    return found[1] if found else file


def first_line(error: BaseException) -> str:
    """A library's error of many lines as one line, without the XML answer of a store and without stack traces."""
    lines = [re.sub(r"\x1b\[[0-9;]*m|↳", "", line).strip() for line in str(error).splitlines()]
    plain = [line for line in lines if line and "<?xml" not in line and not _TRACE.match(line)]
    return ": ".join(plain[:1] + plain[-1:] if len(plain) > 1 else plain) or type(error).__name__
