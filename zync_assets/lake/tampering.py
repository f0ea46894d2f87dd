"""Changes that another program made to a table: the checksum of its files, and the signs of a foreign commit.

A lake is open to every Delta tool, and any tool may have deleted, restored, optimised or appended. This module repairs
nothing. It finds and names the change, and names the cure. The signs are file names that zync does not give, commits
without zync's token, and a wrong checksum.

A commit of zync that adds or removes files carries the change of the sum in a Delta ``txn`` action. These numbers
survive the clean-up of the log, and no other Delta tool sets them.

    zync:files          the sum over the files that the table had when the first of these numbers was set
    zync:files:<name>   by how much commits with the number ``name`` changed the sum since

The table is untouched if the numbers add up to the sum over its files. Two commits that rebase onto each other set
numbers of different names, and each number keeps its own part of the sum. A sum is modulo MODULUS, since a ``txn`` has
63 bits.

An older version of zync, without sums, changes the files and no number. ``check`` recognises its commits. The next
commit then corrects ``zync:files``, and the numbers add up again.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import unquote
from weakref import WeakKeyDictionary

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from zync_assets.errors import LakeError, TableDamaged
from zync_assets.lake import log, storage, stores
from zync_assets.lake.log import TOKEN, DataFile, LakeTable

MODULUS = 1 << 62
_BASE = "zync:files"
_of_tables: WeakKeyDictionary[LakeTable, int] = WeakKeyDictionary()
"""The sums over the files of opened tables, because a commit needs the sum twice."""


def of_files(files: Iterable[DataFile]) -> int:
    """The sum over some files, by their paths and sizes in the log."""
    return sum(_of_file(item.path, item.size) for item in files) % MODULUS


def is_untouched(table: LakeTable) -> bool:
    """Whether the files are those that our commits left. True for a table from before sums were kept."""
    return not _has_sum(table.numbers) or _number_sum(table.numbers) == _of_table(table)


def is_set(numbers: Iterable[str]) -> bool:
    """Whether a part of the sum is among the numbers of a commit."""
    return any(map(_is_part, numbers))


def sum_numbers(
    table: LakeTable, numbers: Iterable[str], additions: Iterable[DataFile], removals: Iterable[DataFile]
) -> dict[str, int]:
    """The numbers that a commit sets for the files that it adds and removes. ``numbers``: the names of its other numbers.

    Two commits that share a name conflict, and so do two commits that both begin the sum. Where the numbers do not add up,
    the commit begins the sum again.
    """
    change = of_files(additions) - of_files(removals)
    if not change:
        return {}
    name = f"{_BASE}:{min(numbers, default='')}"
    shortfall = (_of_table(table) - _number_sum(table.numbers)) % MODULUS
    base: dict[str, int] = {}
    if shortfall or not _has_sum(table.numbers):
        base = {_BASE: (table.numbers.get(_BASE, 0) + shortfall) % MODULUS}
    return base | {name: (table.numbers.get(name, 0) + change) % MODULUS}


def first_numbers(files: Iterable[DataFile]) -> dict[str, int]:
    """The number that the first commit of a table sets."""
    return {_BASE: of_files(files)}


def _has_sum(numbers: Mapping[str, int]) -> bool:
    return _BASE in numbers


def _number_sum(numbers: Mapping[str, int]) -> int:
    return sum(number for name, number in numbers.items() if _is_part(name)) % MODULUS


def _is_part(name: str) -> bool:
    return name == _BASE or name.startswith(f"{_BASE}:")


def _of_table(table: LakeTable) -> int:
    if table not in _of_tables:
        _of_tables[table] = of_files(table.files)
    return _of_tables[table]


@lru_cache(1 << 15)
def _of_file(path: str, size: int) -> int:
    # No path is used twice. The log may have the path quoted once more than the commit has it.
    text = f"{unquote(path)} {size}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


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


def commits(table: LakeTable) -> str:
    """The last commits of other programs, and the version to restore; empty where the log says nothing of one."""
    try:
        with table.lock:
            history = table.delta.history(_RECENT)
    except (DeltaError, OSError):
        return ""
    foreign_commits = [item for item in history if TOKEN not in item and item.get("operation") not in _HARMLESS]
    if not foreign_commits:
        return ""
    # From the newest back to the last of ours before them: what we committed after them would be lost by a restore too.
    before = [item["version"] for item in history if item["version"] < foreign_commits[0]["version"] and TOKEN in item]
    since = [item for item in foreign_commits if not before or item["version"] > before[0]]
    versions = ", ".join(_commit_text(item) for item in reversed(since))
    text = f" Another program committed {versions} to it."
    if not before:
        return text
    text += f" Restore version {before[0]}."
    if any(item.get("operation") == "VACUUM END" and item["version"] > before[0] for item in history):
        text += f" A VACUUM since may have removed its files: then restore the table from a copy, or {stores.ANEW}."
    if not storage.is_store(table.uri):
        code = f"from deltalake import DeltaTable; DeltaTable({table.uri!r}).restore({before[0]})"
        text += f" Run: python -c {_quoted(code)}"
    return text


def _quoted(code: str) -> str:
    """Python's code as a word of a shell, readable where double quotes do."""
    return shlex.quote(code) if set(code) & set('"$`\\!') else f'"{code}"'


def _commit_text(item: Mapping[str, Any]) -> str:
    return f"version {item['version']} ({item.get('operation', 'unknown')})"


def strange_file(table: LakeTable, items: Iterable[DataFile]) -> str | None:
    """An error text that names the first foreign file; None if this package wrote every file."""
    first = next((item for item in items if not _OWN.fullmatch(item.path)), None)
    return None if first is None else f"file {first.path} was written by another program.{commits(table)}"


def damage(table: LakeTable, sign: str) -> TableDamaged:
    """The error for a table whose files contradict its counters. ``sign``: the sign of the change, for the user."""
    foreign_commits = commits(table)
    cure = "" if "Restore" in foreign_commits else " Restore the table to an earlier version, or from a copy."
    return TableDamaged(
        f"table {table.uri} was changed by another program: {sign}. Nothing was done.{foreign_commits}{cure}"
    )


def check(table: LakeTable) -> None:
    """TableDamaged if another program changed the files of a table since our last commit to it."""
    if not is_untouched(table) and not _is_all_own(table):
        raise damage(table, "its files differ from the files that zync committed")


def _is_all_own(table: LakeTable) -> bool:
    """Whether every commit since a version with a right sum is ours. An older version of zync commits without a sum.

    A commit with a sum may have been rebased onto a commit without one: then its sum is wrong, and an earlier sum is right.
    """
    comparisons = 0
    for version in range(table.version, -1, -1):
        entry = log.entry(table.uri, version)
        if entry is None:
            return False
        if version < table.version and is_set(entry.numbers):
            if _has_right_sum(table.uri, version):
                return True
            comparisons += 1
        if comparisons == _SUMS or (TOKEN not in entry.info and entry.info.get("operation") not in _HARMLESS):
            return False
    return False


def _has_right_sum(uri: str, version: int) -> bool:
    try:
        table = DeltaTable(uri, version=version, storage_options=storage.delta_options(uri))
        return is_untouched(LakeTable(uri, table))
    except (DeltaError, OSError, LakeError):
        return False  # the log no longer reaches back to that version
