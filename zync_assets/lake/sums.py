"""The checksum of a table's files: by it a table that another program committed to is told from one that it did not touch.

A commit of ours that adds or removes files carries the change of the sum in a Delta ``txn`` action. These numbers survive
the clean-up of the log, and a Delta tool that is not ours never sets them.

    zync:files          the sum over the files that the table had when the first of these numbers was set
    zync:files:<name>   by how much commits with the number ``name`` changed the sum since

The table is untouched if the numbers add up to the sum over its files. Commits that rebase onto each other set numbers of
different names, so each keeps its own part of the sum. Sums are taken modulo MODULUS, since a ``txn`` has 63 bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from urllib.parse import unquote

from zync_assets.lake.opened import DataFile, Opened

MODULUS = 1 << 62
_BASE = "zync:files"


def of_files(files: Iterable[DataFile]) -> int:
    """The sum over some files, by their paths and sizes in the log."""
    return sum(map(_of_file, files)) % MODULUS


def is_untouched(opened: Opened) -> bool:
    """Whether the files are those that our commits left. True for a table from before sums were kept."""
    return not _is_kept(opened.numbers) or _recorded(opened.numbers) == of_files(opened.files)


def carried(
    opened: Opened, numbers: Iterable[str], added: Iterable[DataFile], removed: Iterable[DataFile]
) -> dict[str, int]:
    """The numbers that a commit sets for the files that it adds and removes. ``numbers``: the names of its other numbers.

    Two commits that share a name conflict, and so do two commits that both begin the sum.
    """
    change = of_files(added) - of_files(removed)
    if not change:
        return {}
    name = f"{_BASE}:{min(numbers, default='')}"
    base = {} if _is_kept(opened.numbers) else {_BASE: of_files(opened.files)}
    return base | {name: (opened.numbers.get(name, 0) + change) % MODULUS}


def begun(files: Iterable[DataFile]) -> dict[str, int]:
    """The number that the first commit of a table sets."""
    return {_BASE: of_files(files)}


def _is_kept(numbers: Mapping[str, int]) -> bool:
    return _BASE in numbers


def _recorded(numbers: Mapping[str, int]) -> int:
    return sum(number for name, number in numbers.items() if name == _BASE or name.startswith(f"{_BASE}:")) % MODULUS


def _of_file(item: DataFile) -> int:
    # No path is used twice. The log may have the path quoted once more than the commit has it.
    told = f"{unquote(item.path)} {item.size}"
    return int.from_bytes(hashlib.blake2b(told.encode(), digest_size=7).digest())
