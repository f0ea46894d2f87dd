"""A key of the pipeline file: the name that the reader accepts, and the description that ``zync help`` prints.

The readers take their known names from these definitions. A key without a description therefore does not exist. The key
``shape`` stands here because inputs and outputs share it.
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


def input_shape() -> Key:
    """The key ``shape`` of an input."""
    return Key(
        "shape",
        "a mapping",
        "Filters and maps each record before the record reaches the lake. The lake never gets the rest, except for"
        " quarantined records, which stay whole.",
        "shape: {where: value.op <> 'r', value: value.after}",
        default="none",
        keys=_shape("`kafka`, `key` and `value` of the record"),
    )


def output_shape() -> Key:
    """The key ``shape`` of an output."""
    return Key(
        "shape",
        "a mapping",
        "Filters and maps each output of the rules before it is numbered. The inputs of a filtered output are *dropped*.",
        "shape: {value: {ID: value.ID}}",
        default="none",
        keys=_shape("`key` and `value` of the output"),
    )


def _shape(roots: str) -> tuple[Key, ...]:
    return (
        Key(
            "where",
            "a condition in Spark SQL",
            f"Keeps the records for which the condition holds; null counts as no. It sees {roots}.",
            "shape: {where: value.ID IS NOT NULL}",
            default="all are kept",
        ),
        Key(
            "key",
            "an expression, or a mapping of names to expressions",
            "The new key.",
            "shape: {key: key}",
            default="the key as it is",
        ),
        Key(
            "value",
            "an expression, or a mapping of names to expressions",
            "The new value. A null value stays null.",
            "shape: {value: {ID: value.ID}}",
            default="the value as it is",
        ),
    )
