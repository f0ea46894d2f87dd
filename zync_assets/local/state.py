"""The state of the local services between two commands: ``services.json`` in their folder.

``up`` writes the file before any other file, and ``down --clean`` removes it last. The other files in a folder with this file
therefore belong to the services.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from zync_assets.errors import SetupError

FILE = "services.json"
KIND = "zync local services"

Name: TypeAlias = Literal["kafka", "registry"]
NAMES: tuple[Name, ...] = ("registry", "kafka")


@dataclass(frozen=True)
class Entry:
    """One service: its port, which is kept for the next start; the token and the pid of the last start."""

    port: int
    token: str = ""
    pid: int | None = None


@dataclass(frozen=True)
class State:
    """``lake``: the folder that belongs to these services and is removed with them."""

    lake: str
    kafka: Entry | None = None
    registry: Entry | None = None
    controller_port: int | None = None

    def entry(self, name: Name) -> Entry | None:
        return self.kafka if name == "kafka" else self.registry

    def with_entry(self, name: Name, entry: Entry) -> State:
        if name == "kafka":
            return dataclasses.replace(self, kafka=entry)
        return dataclasses.replace(self, registry=entry)


def load(home: Path) -> State | None:
    """The state of that folder; None where there never were services. SetupError when the file is damaged."""
    path = home / FILE
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        data = json.loads(text)
        if data["kind"] != KIND:
            raise ValueError(f"kind is not {KIND!r}")
        entries = {name: Entry(**data[name]) if data[name] else None for name in NAMES}
        return State(lake=data["lake"], controller_port=data["controller_port"], **entries)
    except (ValueError, KeyError, TypeError) as error:
        raise SetupError(f"{path} can't be read ({error}): remove {home} or choose another folder.") from error


def save(home: Path, state: State) -> None:
    """Write the state whole or not at all."""
    new = home / (FILE + ".new")
    new.write_text(json.dumps({"kind": KIND, **dataclasses.asdict(state)}, indent=2) + "\n")
    new.replace(home / FILE)
