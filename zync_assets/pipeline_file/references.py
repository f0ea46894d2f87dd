"""References to fields in an expression: the topic's names become the lake's names (``zync_assets.names``).

A name is looked for in the type of what stands before it: as it is written, else without regard to case, as Spark does.
Variables of lambda functions have the type of the array's or map's elements that they stand for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from sqlglot.dialects.spark import Spark
from sqlglot.tokenizer_core import Token, TokenType

from zync_assets.codecs.field_notes import fields_of, original
from zync_assets.names import escaped
from zync_assets.pipeline_file.expressions import SqlProblem
from zync_assets.sql_text import name_sql

_OPENING = (TokenType.L_PAREN, TokenType.L_BRACKET)
_CLOSING = (TokenType.R_PAREN, TokenType.R_BRACKET)
_SECOND = ("aggregate", "reduce")
"""Functions whose lambda has the array's element as its second variable."""


def in_lake_names(sql: str, roots: Mapping[str, pa.DataType | None]) -> str:
    """The expression with the lake's names. ``roots``: what it may name (``in``, ``value``), with the types of the lake; None:
    not known yet.

    SqlProblem for a name that two fields have but for case, where the expression does not say which one it means.
    """
    found = _References(sql, tuple(Spark().tokenize(sql)), {name.lower(): type for name, type in roots.items()})
    return found.rewritten()


@dataclass(frozen=True)
class _Variable:
    """A variable of a lambda function, in the tokens from ``first`` to before ``end``."""

    name: str
    type: pa.DataType | None
    first: int
    end: int


@dataclass
class _References:
    sql: str
    tokens: Sequence[Token]
    roots: Mapping[str, pa.DataType | None]
    variables: list[_Variable] = field(default_factory=list[_Variable])

    def rewritten(self) -> str:
        for at, token in enumerate(self.tokens):
            if token.token_type == TokenType.ARROW:
                self.variables += self._bound(at)
        names: dict[int, str] = {}
        for at in range(len(self.tokens)):
            if self._is_root(at):
                names |= self._path(at)[2]
        for at, token in enumerate(self.tokens):
            if at and self.tokens[at - 1].token_type == TokenType.DOT and at not in names and not self._is_call(at):
                names[at] = self._loose(token.text)
        sql = self.sql
        for at, name in sorted(names.items(), reverse=True):
            token = self.tokens[at]
            if name.lower() != token.text.lower():
                sql = f"{sql[: token.start]}{name_sql(name)}{sql[token.end + 1 :]}"
        return sql

    def _kind(self, at: int) -> TokenType | None:
        return self.tokens[at].token_type if 0 <= at < len(self.tokens) else None

    def _is_call(self, at: int) -> bool:
        return self._kind(at + 1) == TokenType.L_PAREN

    def _is_root(self, at: int) -> bool:
        if self._kind(at - 1) == TokenType.DOT or self._kind(at) in (TokenType.STRING, TokenType.RAW_STRING):
            return False
        name = self.tokens[at].text.lower()
        return not self._is_call(at) and (self._variable(at) is not None or name in self.roots)

    def _variable(self, at: int) -> _Variable | None:
        """The variable that a token names, the innermost of that name."""
        name = self.tokens[at].text.lower()
        inside = [one for one in self.variables if one.name == name and one.first <= at < one.end]
        return max(inside, key=lambda one: one.first, default=None)

    def _path(self, at: int) -> tuple[pa.DataType | None, int, dict[int, str]]:
        """The type of the path that begins at a token, the token after it, and the lake's names of those in it."""
        variable = self._variable(at)
        type = variable.type if variable is not None else self.roots[self.tokens[at].text.lower()]
        names: dict[int, str] = {}
        at += 1
        while True:
            if self._kind(at) == TokenType.DOT and at + 1 < len(self.tokens) and not self._is_call(at + 1):
                names[at + 1], type = self._field(type, self.tokens[at + 1].text)
                at += 2
            elif self._kind(at) == TokenType.L_BRACKET:
                type = _element(type)
                at = self._after(at)
            else:
                return type, at, names

    def _field(self, type: pa.DataType | None, name: str) -> tuple[str, pa.DataType | None]:
        """A field's name in the lake, and its type."""
        if type is not None and pa.types.is_list(type):
            found, inner = self._field(type.value_type, name)
            return found, None if inner is None else pa.list_(inner)
        if type is None or not pa.types.is_struct(type):
            return self._loose(name), None
        fields = fields_of(type)
        same = [one for one in fields if original(one) == name] or [one for one in fields if one.name == name]
        alike = same or [one for one in fields if original(one).lower() == name.lower()]
        if len(alike) > 1:
            raise _ambiguous(name, [original(one) for one in alike])
        return (alike[0].name, alike[0].type) if alike else (escaped(name), None)

    def _loose(self, name: str) -> str:
        """The lake's name of a field of something whose type is not known here."""
        alike = {other for type in self.roots.values() if type is not None for other in _twins(type, name)}
        if len(alike) > 1:
            raise _ambiguous(name, sorted(alike))
        return escaped(name)

    def _bound(self, arrow: int) -> list[_Variable]:
        """The variables of the lambda function whose arrow stands there."""
        first, names = arrow - 1, [self.tokens[arrow - 1].text]
        if self._kind(arrow - 1) == TokenType.R_PAREN:
            first = arrow - 2
            while first > 0 and self._kind(first) != TokenType.L_PAREN:
                first -= 1
            names = [one.text for one in self.tokens[first + 1 : arrow - 1] if one.token_type != TokenType.COMMA]
        opening, depth = first - 1, 0
        while opening >= 0 and (depth or self._kind(opening) not in _OPENING):
            depth += (self._kind(opening) in _CLOSING) - (self._kind(opening) in _OPENING)
            opening -= 1
        end, depth = arrow + 1, 0
        while end < len(self.tokens) and (depth or self._kind(end) not in (*_CLOSING, TokenType.COMMA)):
            depth += (self._kind(end) in _OPENING) - (self._kind(end) in _CLOSING)
            end += 1
        types: list[pa.DataType | None] = [None] * len(names)
        if opening > 0 and self._is_root(opening + 1):
            type, after, _ = self._path(opening + 1)
            if self._kind(after) == TokenType.COMMA:
                types = _bound_types(self.tokens[opening - 1].text.lower(), type, len(names))
        return [_Variable(name.lower(), type, first, end) for name, type in zip(names, types, strict=True)]

    def _after(self, opening: int) -> int:
        """The index of the token after the closing bracket. ``opening``: the index of the opening bracket."""
        depth = 0
        for at in range(opening, len(self.tokens)):
            depth += (self._kind(at) in _OPENING) - (self._kind(at) in _CLOSING)
            if depth == 0:
                return at + 1
        return len(self.tokens)


def _bound_types(function: str, type: pa.DataType | None, count: int) -> list[pa.DataType | None]:
    if type is not None and pa.types.is_map(type):
        return [type.key_type, type.item_type][:count] + [None] * (count - 2)
    element = _element(type)
    if function in _SECOND:
        return [None, element][:count]
    if function == "array_sort":
        return [element] * count
    return [element, *[None] * (count - 1)]


def _element(type: pa.DataType | None) -> pa.DataType | None:
    if type is not None and pa.types.is_list(type):
        return type.value_type
    return type.item_type if type is not None and pa.types.is_map(type) else None


def _twins(type: pa.DataType, name: str) -> list[str]:
    """The original names, in some struct of a type, that are ``name`` but for case, where these are several."""
    kinds = pa.types
    if kinds.is_list(type):
        return _twins(type.value_type, name)
    if kinds.is_map(type):
        return [*_twins(type.key_type, name), *_twins(type.item_type, name)]
    if not kinds.is_struct(type):
        return []
    alike = [original(one) for one in fields_of(type) if original(one).lower() == name.lower()]
    inner = [found for one in fields_of(type) for found in _twins(one.type, name)]
    return [*(alike if len(alike) > 1 else []), *inner]


def _ambiguous(name: str, fields: Sequence[str]) -> SqlProblem:
    listed = " and ".join(f"`{one}`" for one in fields)
    return SqlProblem(
        f"`{name}` may be {listed}, which differ in case alone. Write the field's name as the topic has it, after the whole path"
        " to it, such as in.value.list[0].name"
    )
