"""Steps done again: after a conflict with another writer, and which errors concern one topic only.

Every step has a read half and a commit half. A commit that loses a race is read and committed again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from zync_assets.errors import (
    BrokerUnavailable,
    CommitConflict,
    LakeUnavailable,
    RegistryUnavailable,
    SetupError,
    SparkLost,
    SparkUnavailable,
    TargetUnavailable,
    TopicMissing,
    TrustError,
    ZyncError,
)

Log = Callable[[str], object]

CONFLICTS = 5
"""The most commit conflicts in a row before a step gives up."""

EVERYWHERE = (RegistryUnavailable, SetupError, TrustError)
"""Errors that every topic and every pool would have."""

PASSING = (
    BrokerUnavailable,
    RegistryUnavailable,
    LakeUnavailable,
    SparkUnavailable,
    SparkLost,
    TargetUnavailable,
    TopicMissing,
)
"""Errors that may pass by themselves: the command ``run`` waits them out. Debezium creates the topic of a table with the table's
first record."""

T = TypeVar("T")
P = TypeVar("P")
_log = logging.getLogger(__name__)


def retried(
    read: Callable[[], P],
    commit: Callable[[P], T],
    progress: Callable[[P], object] | None = None,
    first: P | None = None,
    log: Log = _log.warning,
) -> T:
    """Commit a batch; read and commit another batch if another writer was first, whose commit is as good as ours.

    ``read`` makes a batch of the present state. ``first`` is a batch that was read earlier. An error of the first batch that
    is no conflict is raised too, unless the ``progress`` of the step, by a batch, shows that another writer was first.
    """
    batch = read() if first is None else first
    for _ in range(CONFLICTS):
        try:
            return commit(batch)
        except (*PASSING, *EVERYWHERE):
            raise
        except ZyncError as error:
            if not isinstance(error, CommitConflict) and not (batch is first and _overtaken(read, batch, progress)):
                raise
            # The caller need not run it again.
            log(f"{str(error).removesuffix('; run again')}; going on after it")
        batch = read()
    return commit(batch)


def _overtaken(read: Callable[[], P], batch: P, progress: Callable[[P], object] | None) -> bool:
    """Whether another writer has committed since a batch was read."""
    try:
        return progress is not None and progress(read()) != progress(batch)
    except ZyncError:  # the batch's own error says more
        return False


@contextmanager
def keep_errors(troubles: list[ZyncError]) -> Generator[None]:
    """Add an error of one topic, pool or table to ``troubles``: it holds back no other one. Raises the errors of EVERYWHERE."""
    try:
        yield
    except EVERYWHERE:
        raise
    except ZyncError as error:
        troubles.append(error)


def raise_first(troubles: Sequence[ZyncError]) -> None:
    """The first of the errors of several topics, pools or tables, one that stays before one that may pass. The others are its
    notes, which the command line prints as errors too."""
    if troubles:
        lasting = [error for error in troubles if not isinstance(error, PASSING)]
        first = (lasting or list(troubles))[0]
        for text in dict.fromkeys(text for error in troubles for text in (str(error), *notes_of(error))):
            if text not in (str(first), *notes_of(first)):
                first.add_note(text)
        raise first


def notes_of(error: Exception) -> list[str]:
    """The texts of the errors that ``raise_first`` did not raise."""
    return getattr(error, "__notes__", [])
