"""Detects that another program changed a table: by foreign file names, and by commits without zync's token.

A lake is open to every Delta tool, and any tool may have deleted, restored, optimised or appended. This module repairs
nothing. It finds and names the change, and names the cure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from zync_assets.errors import LakeError, TableDamaged
from zync_assets.lake import log_entries, storage, sums
from zync_assets.lake.opened import TOKEN, DataFile, Opened

_OWN = re.compile(
    r"(part|replay-\d+|attempt-[0-9a-f]+)-\d{5}-[0-9a-f]{32}\.parquet"  # ingest, replay
    r"|compact-[0-9a-f]{32}(\.parquet|/.*)"
    r"|batch-\d{12}-[0-9a-f]{12}/.*"  # ETL
    r"|topic=(%23|#)account/(head|folded|carved)-.*"
)
_HARMLESS = ("VACUUM START", "VACUUM END")
_RECENT = 200
"""Commits that are looked at for what another program did."""
_SUMS = 20
"""Older sums that are compared for a table whose newest sum is wrong. Each comparison opens a version of the table."""


def commits(opened: Opened) -> str:
    """The last commits of other programs, and the version to restore; empty where the log says nothing of one."""
    try:
        with opened.lock:
            history = opened.table.history(_RECENT)
    except (DeltaError, OSError):
        return ""
    others = [item for item in history if TOKEN not in item and item.get("operation") not in _HARMLESS]
    if not others:
        return ""
    # From the newest back to the last of ours before them: what we committed after them would be lost by a restore too.
    before = [item["version"] for item in history if item["version"] < others[0]["version"] and TOKEN in item]
    since = [item for item in others if not before or item["version"] > before[0]]
    told = ", ".join(_told(item) for item in reversed(since))
    back = f" Restore version {before[0]}." if before else ""
    return f" Another program committed {told} to it.{back}"


def _told(item: Mapping[str, Any]) -> str:
    return f"version {item['version']} ({item.get('operation', 'unknown')})"


def strange_file(opened: Opened, items: Iterable[DataFile]) -> str | None:
    """An error text that names the first foreign file; None if this package wrote every file."""
    first = next((item for item in items if not _OWN.fullmatch(item.path)), None)
    return None if first is None else f"file {first.path} was written by another program.{commits(opened)}"


def changed(opened: Opened, sign: str) -> TableDamaged:
    """The error for a table whose files contradict its counters. ``sign``: the sign of the change, for the user."""
    others = commits(opened)
    cure = "" if "Restore" in others else " Restore the table to an earlier version, or from a copy."
    return TableDamaged(f"table {opened.uri} was changed by another program: {sign}. Nothing was done.{others}{cure}")


def check(opened: Opened) -> None:
    """TableDamaged if another program changed the files of a table since our last commit to it."""
    if not sums.is_untouched(opened) and not _is_all_ours(opened):
        raise changed(opened, "its files differ from the files that zync committed")


def _is_all_ours(opened: Opened) -> bool:
    """Whether every commit since a version with a right sum is ours. An older version of zync commits without a sum.

    A commit with a sum may have been rebased onto a commit without one: then its sum is wrong, and an earlier sum is right.
    """
    compared = 0
    for version in range(opened.version, -1, -1):
        entry = log_entries.entry(opened.uri, version)
        if entry is None:
            return False
        if version < opened.version and sums.is_set(entry.numbers):
            if _has_right_sum(opened.uri, version):
                return True
            compared += 1
        if compared == _SUMS or (TOKEN not in entry.info and entry.info.get("operation") not in _HARMLESS):
            return False
    return False


def _has_right_sum(uri: str, version: int) -> bool:
    try:
        table = DeltaTable(uri, version=version, storage_options=storage.delta_options(uri))
        return sums.is_untouched(Opened(uri, table))
    except (DeltaError, OSError, LakeError):
        return False  # the log no longer reaches back to that version
