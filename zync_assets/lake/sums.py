"""The checksum of a table's files. It shows whether another program changed the table.

A commit of ours that adds or removes files carries the change of the sum in a Delta ``txn`` action. These numbers survive
the clean-up of the log, and a Delta tool that is not ours never sets them.

    zync:files          the sum over the files that the table had when the first of these numbers was set
    zync:files:<name>   by how much commits with the number ``name`` changed the sum since

An older version of zync, without sums, changes the files and no number. ``foreign.check`` recognises its commits. The next
commit then corrects ``zync:files``, and the numbers add up again.

The table is untouched if the numbers add up to the sum over its files. Two commits that rebase onto each other set numbers
of different names, and each number keeps its own part of the sum. A sum is modulo MODULUS, since a ``txn`` has 63 bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from urllib.parse import unquote
from weakref import WeakKeyDictionary

from zync_assets.lake.opened import DataFile, Opened

MODULUS = 1 << 62
_BASE = "zync:files"
_of_tables: WeakKeyDictionary[Opened, int] = WeakKeyDictionary()
"""The sums over the files of opened tables, because a commit needs the sum twice."""


def of_files(files: Iterable[DataFile]) -> int:
    """The sum over some files, by their paths and sizes in the log."""
    return sum(_of_file(item.path, item.size) for item in files) % MODULUS


def is_untouched(opened: Opened) -> bool:
    """Whether the files are those that our commits left. True for a table from before sums were kept."""
    return not _is_kept(opened.numbers) or _recorded(opened.numbers) == _of_table(opened)


def is_set(numbers: Iterable[str]) -> bool:
    """Whether a part of the sum is among the numbers of a commit."""
    return any(map(_is_part, numbers))


def carried(
    opened: Opened, numbers: Iterable[str], added: Iterable[DataFile], removed: Iterable[DataFile]
) -> dict[str, int]:
    """The numbers that a commit sets for the files that it adds and removes. ``numbers``: the names of its other numbers.

    Two commits that share a name conflict, and so do two commits that both begin the sum. Where the numbers do not add up,
    the commit begins the sum anew.
    """
    change = of_files(added) - of_files(removed)
    if not change:
        return {}
    name = f"{_BASE}:{min(numbers, default='')}"
    lacking = (_of_table(opened) - _recorded(opened.numbers)) % MODULUS
    base: dict[str, int] = {}
    if lacking or not _is_kept(opened.numbers):
        base = {_BASE: (opened.numbers.get(_BASE, 0) + lacking) % MODULUS}
    return base | {name: (opened.numbers.get(name, 0) + change) % MODULUS}


def begun(files: Iterable[DataFile]) -> dict[str, int]:
    """The number that the first commit of a table sets."""
    return {_BASE: of_files(files)}


def _is_kept(numbers: Mapping[str, int]) -> bool:
    return _BASE in numbers


def _recorded(numbers: Mapping[str, int]) -> int:
    return sum(number for name, number in numbers.items() if _is_part(name)) % MODULUS


def _is_part(name: str) -> bool:
    return name == _BASE or name.startswith(f"{_BASE}:")


def _of_table(opened: Opened) -> int:
    if opened not in _of_tables:
        _of_tables[opened] = of_files(opened.files)
    return _of_tables[opened]


@lru_cache(1 << 15)
def _of_file(path: str, size: int) -> int:
    # No path is used twice. The log may have the path quoted once more than the commit has it.
    told = f"{unquote(path)} {size}"
    return int.from_bytes(hashlib.blake2b(told.encode(), digest_size=7).digest())
