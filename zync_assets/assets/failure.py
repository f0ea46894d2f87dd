"""Errors as Dagster shows them, and the check of a topic that runs although publishing to the topic fails."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from dagster import AssetCheckEvaluation, AssetCheckSeverity, DagsterError, DagsterInstance, Failure

from zync_assets.assets.names import Names
from zync_assets.checks import topic_checks
from zync_assets.errors import ZyncError
from zync_assets.lake.published import open_published
from zync_assets.offsets import OffsetRange

_NO_END = 1 << 62


class TickFailed(DagsterError):
    """A problem that lasts, as the error of a sensor's tick. Dagster shows an error of its own family as it is."""


@contextmanager
def spoken() -> Generator[None]:
    """Within it an error of this package fails the step with its message alone, without a stack trace."""
    try:
        yield
    except ZyncError as error:
        raise Failure(str(error)) from None


def said(error: Exception) -> str:
    """An error in a line: the message of this package's errors, with the type's name before that of any other."""
    text = str(error).strip()
    if isinstance(error, ZyncError):
        return text
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


@contextmanager
def publishing(names: Names, instance: DagsterInstance, topic: str) -> Generator[None]:
    """Within it, an error also runs the topic's check over all that is not verified, and reports the result.

    Dagster skips the check of an asset whose step failed, and this check alone names the record that stands in the way.
    """
    try:
        yield
    except ZyncError:
        instance.report_runless_asset_event(_look(names, topic))
        raise


def _look(names: Names, topic: str) -> AssetCheckEvaluation:
    pipeline = names.pipeline
    key, name = names.topic_key(topic), topic_checks.STAGING_EQUALS_TOPIC
    try:
        done = open_published(pipeline.lake, pipeline.output(topic).pool, topic)
        found = topic_checks.staging_equals_topic(pipeline, topic, [OffsetRange(0, done.verified or 0, _NO_END)])
    except ZyncError as error:
        return AssetCheckEvaluation(key, name, False, severity=AssetCheckSeverity.WARN, description=str(error))
    severity = AssetCheckSeverity.ERROR if found.severity == "error" else AssetCheckSeverity.WARN
    return AssetCheckEvaluation(
        key, name, found.passed, metadata=dict(found.numbers), severity=severity, description=found.summary
    )
