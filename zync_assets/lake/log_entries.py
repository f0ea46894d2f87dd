"""The entries of a Delta log by themselves: whether a version is still the newest, and the numbers that versions set.

To open a table is to read its log from the last checkpoint on, and to ask it for one number is to read it again. A small
batch would spend half of its time on that.

Delta protocol: "Delta Log Entries", "Transaction Identifiers".
"""

from __future__ import annotations

import json

from zync_assets.lake import storage

Mark = tuple[int | None, int | None]
"""What tells a version's entry from another's at its place: its size, and when it was written."""


def newest_mark(uri: str, version: int) -> Mark | None:
    """The mark of a version; None if it is not the newest, or has no entry (any more)."""
    system, path = storage.filesystem(storage.join(uri, "_delta_log"))
    entry, following = system.get_file_info([storage.join(path, _name(n)) for n in (version, version + 1)])
    if not entry.is_file or following.is_file:
        return None
    return entry.size, entry.mtime_ns


def mark(uri: str, version: int) -> Mark | None:
    """The mark of a version; None if it has no entry (any more)."""
    system, path = storage.filesystem(storage.join(uri, "_delta_log"))
    entry = system.get_file_info(storage.join(path, _name(version)))
    return (entry.size, entry.mtime_ns) if entry.is_file else None


def numbers_set(uri: str, first: int, last: int) -> dict[str, int]:
    """Application ids that the versions from ``first`` to ``last`` set, each with its last number. FileNotFoundError if one
    of them has no entry (any more)."""
    system, path = storage.filesystem(storage.join(uri, "_delta_log"))
    found: dict[str, int] = {}
    for version in range(first, last + 1):
        with system.open_input_file(storage.join(path, _name(version))) as file:
            for line in file.read().decode().splitlines():
                action = json.loads(line) if '"txn"' in line else {}
                if "txn" in action:
                    found[action["txn"]["appId"]] = action["txn"]["version"]
    return found


def _name(version: int) -> str:
    return f"{version:020d}.json"
