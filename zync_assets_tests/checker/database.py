"""A file of SQLite that sinks write, as plain rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Database:
    """``tables``: name → rows, each with its columns by name; ``left``: the files of load tables."""

    tables: Mapping[str, list[dict[str, Any]]]
    left: list[str]


def read_database(path: Path) -> Database | None:
    """The tables of a database; None if there is none yet."""
    if not path.exists():
        return None
    left = [item.name for item in path.parent.glob(f"{path.name}-zync_load*")]
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = {
            name: connection.execute('SELECT * FROM "' + name.replace('"', '""') + '"').fetchall() for name in names
        }
    return Database({name: [dict(row) for row in found] for name, found in rows.items()}, left)
