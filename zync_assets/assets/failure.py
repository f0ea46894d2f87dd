"""Errors as Dagster shows them: the message alone, without the stack trace that Dagster puts around an exception."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from dagster import Failure

from zync_assets.errors import ZyncError


@contextmanager
def spoken() -> Generator[None]:
    """Within it an error of this package fails the step with its message."""
    try:
        yield
    except ZyncError as error:
        raise Failure(str(error)) from None
