"""Errors as Dagster shows them: the message, without the stack trace that Dagster puts around an exception."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from dagster import DagsterError, Failure

from zync_assets.errors import ZyncError


class TickFailed(DagsterError):
    """A problem that lasts, as the error of a sensor's tick. Dagster shows an error of its own family as it is."""


@contextmanager
def spoken() -> Generator[None]:
    """Within it an error of this package fails the step with its message."""
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
