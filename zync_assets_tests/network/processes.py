"""The visible properties of processes for other users of a machine: arguments, and addresses that accept connections."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def family(root: psutil.Process) -> list[psutil.Process]:
    """A process and its descendants."""
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def arguments(processes: Iterable[psutil.Process]) -> set[str]:
    """Every word of their command lines."""
    found: set[str] = set()
    for process in processes:
        try:
            found |= set(process.cmdline())
        except psutil.Error:
            # It ended meanwhile.
            continue
    return found


def listening(processes: Iterable[psutil.Process]) -> dict[tuple[str, int], str]:
    """(Address, port) on which a process accepts connections → the program's name."""
    found: dict[tuple[str, int], str] = {}
    for process in processes:
        try:
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found[connection.laddr.ip, connection.laddr.port] = process.name()
        except psutil.Error:
            continue
    return found
