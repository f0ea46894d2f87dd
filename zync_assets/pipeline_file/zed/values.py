"""What the names and the expressions of Zed stand for, and what they demand of the columns' types.

Zed knows the type of each value, and Spark SQL the type of each column. Where Zed's result depends on types that the text does
not show, the compiler notes a ``Demand``. ETL compares the demands with the columns before it runs the rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from zync_assets.pipeline_file.fields import suggestion
from zync_assets.pipeline_file.zed.nodes import Type, ZedPlace, ZedProblem
from zync_assets.queries import Demand, Path
from zync_assets.spark.sql import name_sql

NUMBERS = ("int", "float", "number")
# The parser of SQL reads the two words as the beginning of an expression, also after a dot.
_PLAIN = re.compile(r"(?!(?i:not|select)\Z)[A-Za-z_][A-Za-z0-9_]*")
ELEMENT = "[]"
"""In a path: the elements of an array."""
ATOM, NEGATION, PRODUCT, SUM, COMPARISON, NOT, AND, OR = 9, 8, 7, 6, 5, 4, 3, 2
"""How close the operators of Spark SQL bind."""
DURATIONS = "durations are known only in `time + 1h` and `time - 1h`; in Spark SQL: unix_micros(a) - unix_micros(b) > 3600000000"
"""The problem of a duration in another place: Spark SQL would take it for a number."""


@dataclass(frozen=True)
class FieldRef:
    """A record of a topic, or a field of it."""

    path: Path


@dataclass(frozen=True)
class ClosedRecord:
    """A record with known fields."""

    fields: Mapping[str, Value]


@dataclass(frozen=True)
class FieldEdit:
    """One step to the fields of a record: ``keep`` all fields of ``ref``, ``put`` one, ``drop`` one, or ``rename`` ``old``."""

    kind: str
    name: str = ""
    value: Value | None = None
    old: str = ""


@dataclass(frozen=True)
class OpenRecord:
    """A record with fields that only the topic's schema names."""

    edits: tuple[FieldEdit, ...]


@dataclass(frozen=True)
class Term:
    """An expression of Spark SQL.

    ``kind``: the kind of value, where the text shows it. ``paths``: the fields whose type the result has, where it does not.
    ``level``: how close its outermost operator binds. ``sure``: the result is never null. ``constant``: a literal.
    """

    sql: str
    kind: str | None = None
    level: int = ATOM
    paths: tuple[Path, ...] = ()
    sure: bool = False
    constant: str | None = None

    def within(self, level: int) -> str:
        """The SQL as an operand of an operator that binds so close."""
        return self.sql if self.level >= level else f"({self.sql})"


Value: TypeAlias = "FieldRef | ClosedRecord | OpenRecord | Term"

NULL = Term("NULL", "null", constant="null")
FALSE = Term("false", "bool", sure=True, constant="false")
TRUE = Term("true", "bool", sure=True, constant="true")
TYPES = {
    "bool": ("bool", "BOOLEAN"),
    "int8": ("int", "TINYINT"),
    "int16": ("int", "SMALLINT"),
    "int32": ("int", "INT"),
    "int64": ("int", "BIGINT"),
    "float32": ("float", "FLOAT"),
    "float64": ("float", "DOUBLE"),
    "string": ("text", "STRING"),
    "bytes": ("bytes", "BINARY"),
    "time": ("time", "TIMESTAMP"),
}
"""Type of Zed → its kind, and the type of Spark SQL."""
_OTHER_TYPES = {"uint8": "int16", "uint16": "int32", "uint32": "int64", "uint64": "int64", "float16": "float32"} | {
    "duration": "int64",
    "ip": "string",
    "net": "string",
}


def path_sql(path: Path) -> str:
    """A path as Spark SQL, quoted where a name needs it."""
    return ".".join(name if _PLAIN.fullmatch(name) else name_sql(name) for name in path)


def type_sql(type: Type) -> str:
    """A type as Spark's DDL."""
    if type.name == "record":
        field_texts = ", ".join(f"{name_sql(name)}: {type_sql(part)}" for name, part in type.parts)
        return f"STRUCT<{field_texts}>"
    if type.name == "array":
        return f"ARRAY<{type_sql(type.parts[0][1])}>"
    return known_type(type)[1]


def known_type(type: Type) -> tuple[str, str]:
    """The kind of a type's values, and its name in Spark SQL. ZedProblem for an unknown type."""
    if type.name in TYPES:
        return TYPES[type.name]
    spark_type = _OTHER_TYPES.get(type.name)
    cure = f"; write {spark_type}" if spark_type else f"; there are {', '.join(TYPES)}{suggestion(type.name, TYPES)}"
    raise ZedProblem(type.place, f"`{type.name}` is no type of Spark SQL{cure}")


def type_kind(type: Type) -> str:
    """The kind of a type's values. ZedProblem for an unknown type."""
    return type.name if type.name in ("record", "array") else known_type(type)[0]


def member(value: Value, name: str, place: ZedPlace) -> Value:
    """A field of a value. ZedProblem if the program made a record without it."""
    if isinstance(value, FieldRef):
        return FieldRef((*value.path, name))
    if isinstance(value, Term):
        if value.kind not in (None, "null", "record", "array"):
            raise ZedProblem(place, f"`{value.sql}` is {noun(value.kind)} and has no field `{name}`")
        return Term(f"{value.within(ATOM)}.{path_sql((name,))}", paths=tuple((*path, name) for path in value.paths))
    if isinstance(value, ClosedRecord):
        if name not in value.fields:
            field_names = ", ".join(value.fields) or "nothing"
            cure = suggestion(name, value.fields) or f"; known here: {field_names}"
            raise ZedProblem(place, f"`{name}` is missing{cure}")
        return value.fields[name]
    return _edited_member(value.edits, name, place)


def _edited_member(edits: Sequence[FieldEdit], name: str, place: ZedPlace) -> Value:
    for at in range(len(edits) - 1, -1, -1):
        edit = edits[at]
        if edit.kind == "put" and edit.name == name:
            assert edit.value is not None
            return edit.value
        if edit.kind == "rename" and edit.name == name:
            return _edited_member(edits[:at], edit.old, place)
        if (edit.kind == "drop" and edit.name == name) or (edit.kind == "rename" and edit.old == name):
            raise ZedProblem(place, f"`{name}` is missing; an operator before this one removed it")
        if edit.kind == "keep":
            if at > 0:
                raise ZedProblem(place, f"`{name}` may be of several records here; name the record that has it")
            assert isinstance(edit.value, FieldRef)
            return FieldRef((*edit.value.path, name))
    raise ZedProblem(place, f"`{name}` is missing")


def element_paths(array: Term) -> tuple[Path, ...]:
    """The paths of the elements of an array."""
    return tuple((*path, ELEMENT) for path in array.paths)


@dataclass
class Demands:
    """The demands of a rule's expressions."""

    entries: list[Demand] = field(default_factory=list[Demand])

    def demand(self, term: Term, kinds: Sequence[str], place: ZedPlace, role: str) -> None:
        """Note that a term must be of some kinds. ZedProblem if the text shows that it is not."""
        if term.kind is None:
            self.entries += [Demand(path, tuple(kinds), role, place) for path in term.paths]
        elif term.kind != "null" and not _meets(term.kind, kinds):
            raise ZedProblem(place, f"`{term.sql}` is {noun(term.kind)} and {role}, which takes {nouns(kinds)}")

    def alike(self, terms: Sequence[Term], place: ZedPlace, subject: str) -> Term:
        """A term that has the kind of all terms. ZedProblem if two of them plainly have different kinds."""
        typed_terms = [term for term in terms if term.kind not in (None, "null")]
        if any(term.kind == "duration" for term in typed_terms):
            raise ZedProblem(place, DURATIONS)
        kinds = {group_of(term.kind) for term in typed_terms}
        if len(kinds) > 1:
            kind_text = " and ".join(sorted(noun(kind) for kind in kinds))
            raise ZedProblem(
                place, f"{subject} has values of one type in Spark SQL, and these are {kind_text}; cast them"
            )
        if typed_terms:
            for term in terms:
                self.demand(
                    term,
                    (group_of(typed_terms[0].kind),),
                    place,
                    f"is in {subject} with {noun(typed_terms[0].kind or '')}",
                )
            exact = {term.kind for term in typed_terms}
            return replace(
                NULL,
                kind=typed_terms[0].kind
                if len(exact) == 1 and len(typed_terms) == len(terms)
                else group_of(typed_terms[0].kind),
            )
        paths = tuple(path for term in terms for path in term.paths)
        return Term("", None if paths else (terms[0].kind if terms else None), paths=paths)

    def same(self, left: Term, right: Term, place: ZedPlace) -> None:
        """Demand one kind of two sides."""
        for side, other_side in ((left, right), (right, left)):
            if other_side.kind is not None and side.kind is None:
                self.demand(side, (group_of(other_side.kind),), place, f"is compared with {noun(other_side.kind)}")
        if left.kind is None and right.kind is None:
            self.entries += [
                Demand(left_path, (), "is compared", place, right_path)
                for left_path in left.paths[:1]
                for right_path in right.paths[:1]
            ]


def differ(left: Term, right: Term) -> bool:
    """Whether two terms plainly have values of two types."""
    kinds = {group_of(left.kind), group_of(right.kind)} - {"", "null"}
    return len(kinds) > 1


def group_of(kind: str | None) -> str:
    """A kind without the width of numbers; empty for an unknown one."""
    return "number" if kind in NUMBERS else kind or ""


def _meets(kind: str, kinds: Sequence[str]) -> bool:
    return (
        kind in kinds
        or (kind in NUMBERS and "number" in kinds)
        or (kind == "number" and not {"int", "float"}.isdisjoint(kinds))
    )


_NOUNS = {
    "text": "a text",
    "int": "a whole number",
    "float": "a floating-point number",
    "number": "a number",
    "bool": "a boolean",
    "time": "a time",
    "bytes": "bytes",
    "array": "an array",
    "record": "a record",
    "duration": "a duration",
    "null": "null",
}


def noun(kind: str | None) -> str:
    """A kind in words, for a problem."""
    return _NOUNS.get(kind or "", kind or "a value")


def nouns(kinds: Sequence[str]) -> str:
    """Several kinds in words, joined by "or"."""
    number_kinds = ["number"] if "number" in kinds else []
    return " or ".join(
        noun(kind) for kind in [*number_kinds, *(kind for kind in kinds if kind not in NUMBERS or not number_kinds)]
    )
