"""A key of the pipeline file: the name that the reader accepts, and the description that ``zync help`` prints.

The readers take their known names from these definitions. A key without a description therefore does not exist.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_INDEX = re.compile(r"\[[0-9]*\]")


@dataclass(frozen=True)
class Key:
    """One key of one mapping.

    ``type``: the form of the value, in words. ``text``: one to three sentences. ``example``: YAML at the place of the
    key, with the keys that it needs beside it. ``default``: the value, or the effect, where the file lacks the key.
    ``required``: the file must have the key. ``allowed``: every legal value, where there is a list. ``keys``: the
    known keys below this one. ``open``: other names below this one are legal too.
    """

    name: str
    type: str
    text: str
    example: str
    default: str = ""
    required: bool = False
    allowed: Sequence[str] = ()
    keys: tuple[Key, ...] = ()
    open: bool = False

    @property
    def summary(self) -> str:
        """The first sentence of the text."""
        return re.split(r"(?<=[.])\s", self.text, maxsplit=1)[0]


def known_names(keys: Sequence[Key]) -> tuple[str, ...]:
    """The names of keys, for the reader of their mapping."""
    return tuple(key.name for key in keys)


def paths(keys: Sequence[Key], above: str = "") -> Iterator[tuple[str, Key]]:
    """Every key with its path, such as ``inputs.retention``, in the order of the grammar."""
    for key in keys:
        path = f"{above}.{key.name}" if above else key.name
        yield path, key
        yield from paths(key.keys, path)


def found(known: Mapping[str, Key], path: str) -> str | None:
    """The known path that ``path`` means; None for an unknown one.

    ``inputs[0].topic`` means ``inputs.topic``. A name below an open key, such as a property of librdkafka, means the
    open key.
    """
    plain = _INDEX.sub("", path)
    if plain in known:
        return plain
    return next((above for above, key in known.items() if key.open and plain.startswith(f"{above}.")), None)


def near(known: Mapping[str, Key], path: str) -> list[str]:
    """At most three known paths that resemble an unknown one, the closest first."""
    plain = _INDEX.sub("", path).lower()
    last = plain.rpartition(".")[2]
    by_path = difflib.get_close_matches(plain, list(known), n=3, cutoff=0.75)
    by_name = [
        place
        for name in difflib.get_close_matches(last, {key.name for key in known.values()}, n=3, cutoff=0.75)
        for place, key in known.items()
        if key.name == name
    ]
    return list(dict.fromkeys([*by_path, *by_name]))[:3]
