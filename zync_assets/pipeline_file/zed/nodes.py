"""The nodes of a Zed text. Each node knows its place in the text; two nodes are equal wherever they stand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias


class ZedPlace(NamedTuple):
    """A place in a text: line and column, both from 1."""

    line: int
    column: int


START = ZedPlace(1, 1)


class ZedProblem(Exception):
    """A text that is not in the subset of Zed. The message says why, and what to write instead."""

    def __init__(self, place: ZedPlace, message: str) -> None:
        self.place = place
        self.message = message
        super().__init__(f"line {place.line}, column {place.column}: {message}")


Kind: TypeAlias = Literal["null", "bool", "int", "float", "text", "time", "duration", "bytes"]


@dataclass(frozen=True)
class Constant:
    """A literal. ``text``: the value as Zed writes it; of a string, the string itself."""

    kind: Kind
    text: str
    place: ZedPlace = field(default=START, compare=False)


@dataclass(frozen=True)
class Type:
    """A type: ``name`` of a primitive one, ``record`` with the types of its fields, or ``array`` with that of its elements."""

    name: str
    parts: tuple[tuple[str, Type], ...] = ()
    place: ZedPlace = field(default=START, compare=False)


@dataclass(frozen=True)
class Name:
    """A field of ``this``, or ``this``."""

    name: str
    place: ZedPlace = field(default=START, compare=False)


@dataclass(frozen=True)
class Member:
    base: Node
    name: str
    place: ZedPlace = field(default=START, compare=False)


@dataclass(frozen=True)
class Index:
    base: Node
    index: Node
    place: ZedPlace = field(default=START, compare=False)


@dataclass(frozen=True)
class FunctionCall:
    """A function with its arguments. A cast is a call of ``cast`` with a value and a type."""

    name: str
    arguments: tuple[Node, ...]
    place: ZedPlace = field(default=START, compare=False)


@dataclass(frozen=True)
class Unary:
    operator: Literal["!", "-"]
    operand: Node
    place: ZedPlace = field(default=START, compare=False)


@dataclass(frozen=True)
class Binary:
    operator: str
    left: Node
    right: Node
    place: ZedPlace = field(default=START, compare=False)


@dataclass(frozen=True)
class Choice:
    """``a ? b : c`` and ``case``: conditions with their results, and the result where none holds."""

    cases: tuple[tuple[Node, Node], ...]
    otherwise: Node
    place: ZedPlace = field(default=START, compare=False)


@dataclass(frozen=True)
class Spread:
    """``...r`` in a record: the fields of a record."""

    record: Node
    place: ZedPlace = field(default=START, compare=False)


@dataclass(frozen=True)
class RecordLiteral:
    elements: tuple[tuple[str, Node] | Spread, ...]
    place: ZedPlace = field(default=START, compare=False)


@dataclass(frozen=True)
class Elements:
    """An array or a set."""

    items: tuple[Node, ...]
    place: ZedPlace = field(default=START, compare=False)


Node: TypeAlias = (
    "Constant | Type | Name | Member | Index | FunctionCall | Unary | Binary | Choice | RecordLiteral | Elements"
)


@dataclass(frozen=True)
class Operator:
    """One operator of a program. ``put``, ``cut`` and ``rename`` have pairs of target and value, and the others only values."""

    name: Literal["put", "cut", "drop", "rename", "yield", "pass", "bare"]
    pairs: tuple[tuple[Node | None, Node], ...]
    place: ZedPlace = field(default=START, compare=False)
