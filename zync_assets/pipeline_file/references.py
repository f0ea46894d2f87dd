"""References to columns in expressions: their names in the lake, and the fields that a type lacks.

A pipeline file has the topics' field names. Spark sees the columns of the lake (``zync_assets.codecs.spark_types``).

A name is looked for in the type of what stands before it: as it is written, else without regard to case, as Spark does.
Variables of lambda functions have the type of the array's or map's elements that they stand for. A rule's own fields get names
that the staging table can hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter

import pyarrow as pa
from sqlglot.dialects.spark import Spark
from sqlglot.tokenizer_core import Token, TokenType

from zync_assets.codecs.fields import (
    fields_named,
    fields_of,
    lake_type_of,
    original,
    other_names,
    topic_type_of,
)
from zync_assets.codecs.spark_types import escape, lake_name, original_name
from zync_assets.errors import EtlError
from zync_assets.lake import staging
from zync_assets.lake.raw import RawState
from zync_assets.lake.raw_files import KAFKA_TYPE
from zync_assets.lake.staging import StagingState
from zync_assets.pipeline import Pipeline, RecordShape, Rule, Shape
from zync_assets.pipeline_file.expressions import SqlProblem
from zync_assets.pipeline_file.view_expressions import row_type, table_with_names, with_names
from zync_assets.queries import view_definition
from zync_assets.spark.sql import edited, name_sql

_OPENING = (TokenType.L_PAREN, TokenType.L_BRACKET)
_CLOSING = (TokenType.R_PAREN, TokenType.R_BRACKET)
_SECOND = ("aggregate", "reduce")
"""Functions whose lambda has the array's element as its second variable."""


def in_lake_names(sql: str, roots: Mapping[str, pa.DataType | None]) -> str:
    """The expression with the lake's names. ``roots``: what it may name (``in``, ``value``), with the lake's types, None if not
    known yet. SqlProblem for a name that two fields have but for case, where the expression does not say which one it means."""
    return _references(sql, roots).rewrite()


def in_first_names(sql: str, roots: Mapping[str, pa.DataType | None], spelled: Callable[[str], str] = name_sql) -> str:
    """The expression where renamed fields have the topic's first names of them. Else as ``in_lake_names``. ``spelled``: a name as
    SQL."""
    return replace(_references(sql, roots), name_in_type=original, name_without_type=str, spelled=spelled).rewrite()


def _spelled(name: str) -> str:
    """A name as SQL, as users write it: in back quotes if it needs them."""
    return name if re.fullmatch("[A-Za-z_][A-Za-z_0-9]*", name) else name_sql(name)


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
    name_in_type: Callable[[pa.Field], str] = attrgetter("name")
    name_without_type: Callable[[str], str] = escape
    spelled: Callable[[str], str] = name_sql
    variables: list[_Variable] = field(default_factory=list[_Variable])
    unknown: dict[str, pa.DataType] = field(default_factory=dict[str, pa.DataType])
    """Path of a field → the type that lacks it."""

    def rewrite(self) -> str:
        for at, token in enumerate(self.tokens):
            if token.token_type == TokenType.ARROW:
                self.variables += self._lambda_variables(at)
        names: dict[int, str] = {}
        for at in range(len(self.tokens)):
            if self._is_root(at):
                names |= self._path(at)[2]
        for at, token in enumerate(self.tokens):
            if at and self.tokens[at - 1].token_type == TokenType.DOT and at not in names and not self._is_call(at):
                names[at] = self._name_without_type(token.text)
        sql = self.sql
        for at, name in sorted(names.items(), reverse=True):
            token = self.tokens[at]
            if name.lower() != token.text.lower():
                sql = f"{sql[: token.start]}{self.spelled(name)}{sql[token.end + 1 :]}"
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
        inside = [
            variable for variable in self.variables if variable.name == name and variable.first <= at < variable.end
        ]
        return max(inside, key=lambda variable: variable.first, default=None)

    def _path(self, at: int) -> tuple[pa.DataType | None, int, dict[int, str]]:
        """The type of the path that begins at a token, the token after it, and the lake's names of those in it."""
        variable, root = self._variable(at), self.tokens[at].start
        type = variable.type if variable is not None else self.roots[self.tokens[at].text.lower()]
        names: dict[int, str] = {}
        at += 1
        while True:
            if self._kind(at) == TokenType.DOT and at + 1 < len(self.tokens) and not self._is_call(at + 1):
                name, owner = self.tokens[at + 1], type
                names[at + 1], type = self._field(owner, name.text)
                if owner not in (None, pa.null()) and type is None:
                    self.unknown[self.sql[root : name.end + 1]] = owner
                at += 2
            elif self._kind(at) == TokenType.L_BRACKET:
                type = _element(type)
                at = self._index_after(at)
            else:
                return type, at, names

    def _field(self, type: pa.DataType | None, name: str) -> tuple[str, pa.DataType | None]:
        """A field's name in the lake, and its type."""
        if type is not None and pa.types.is_list(type):
            field_name, item_type = self._field(type.value_type, name)
            return field_name, None if item_type is None else pa.list_(item_type)
        if type is None or not pa.types.is_struct(type):
            return self._name_without_type(name), None
        alike = fields_named(type, name)
        if len(alike) > 1:
            raise _ambiguity(name, [original(item) for item in alike])
        return (self.name_in_type(alike[0]), alike[0].type) if alike else (self.name_without_type(name), None)

    def _name_without_type(self, name: str) -> str:
        """The lake's name of a field of something whose type is not known here."""
        alike = {twin for type in self.roots.values() if type is not None for twin in _twins(type, name)}
        if len(alike) > 1:
            raise _ambiguity(name, sorted(alike))
        return self.name_without_type(name)

    def _lambda_variables(self, arrow: int) -> list[_Variable]:
        """The variables of the lambda function whose arrow stands there."""
        first, names = arrow - 1, [self.tokens[arrow - 1].text]
        if self._kind(arrow - 1) == TokenType.R_PAREN:
            first = arrow - 2
            while first > 0 and self._kind(first) != TokenType.L_PAREN:
                first -= 1
            names = [token.text for token in self.tokens[first + 1 : arrow - 1] if token.token_type != TokenType.COMMA]
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
            type, next_index, _ = self._path(opening + 1)
            if self._kind(next_index) == TokenType.COMMA:
                types = _variable_types(self.tokens[opening - 1].text.lower(), type, len(names))
        return [_Variable(name.lower(), type, first, end) for name, type in zip(names, types, strict=True)]

    def _index_after(self, opening: int) -> int:
        """The index of the token after the closing bracket. ``opening``: the index of the opening bracket."""
        depth = 0
        for at in range(opening, len(self.tokens)):
            depth += (self._kind(at) in _OPENING) - (self._kind(at) in _CLOSING)
            if depth == 0:
                return at + 1
        return len(self.tokens)


def _references(sql: str, roots: Mapping[str, pa.DataType | None]) -> _References:
    return _References(sql, tuple(Spark().tokenize(sql)), {name.lower(): kind for name, kind in roots.items()})


def _variable_types(function: str, type: pa.DataType | None, count: int) -> list[pa.DataType | None]:
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
    """The original names in a struct of the type that differ from ``name`` at most in case. Structs with only one such name do
    not count."""
    kinds = pa.types
    if kinds.is_list(type):
        return _twins(type.value_type, name)
    if kinds.is_map(type):
        return [*_twins(type.key_type, name), *_twins(type.item_type, name)]
    if not kinds.is_struct(type):
        return []
    alike = [original(item) for item in fields_of(type) if original(item).lower() == name.lower()]
    nested_twins = [twin for item in fields_of(type) for twin in _twins(item.type, name)]
    return [*(alike if len(alike) > 1 else []), *nested_twins]


def _ambiguity(name: str, fields: Sequence[str]) -> SqlProblem:
    choices = " and ".join(f"`{item}`" for item in fields)
    return SqlProblem(
        f"`{name}` may be {choices}, which differ in case alone. Write the field's name as the topic has it, after the whole path"
        " to it, such as in.value.list[0].name"
    )


def _names_differ(type: pa.DataType | None) -> bool:
    """Whether a field of a type, at any depth, has another name in its topic, or had one."""
    kinds = pa.types
    if type is None or not kinds.is_nested(type):
        return False
    if kinds.is_struct(type):
        return any(
            original(item) != item.name or bool(other_names(item)) or _names_differ(item.type)
            for item in fields_of(type)
        )
    if kinds.is_map(type):
        return _names_differ(type.key_type) or _names_differ(type.item_type)
    return _names_differ(type.value_type)


Rewrite = Callable[[str], str]
Rewriter = Callable[[Mapping[str, pa.DataType | None]], Rewrite]
"""Makes the function that rewrites expressions, of the names that these may begin with (``in``, ``value``) and their types."""


def with_lake_names(pipeline: Pipeline, raw: Mapping[str, RawState | None], state: StagingState | None) -> Pipeline:
    """The pipeline with rules that name fields as the lake does. ``raw``: the states of the inputs' tables; ``state``: the
    staging pool's.

    EtlError for a name that may be two fields which differ in case alone.
    """
    types = {
        topic: record_type(() if table_state is None else table_state.schema) for topic, table_state in raw.items()
    }
    names_differ = any(_names_differ(type) for type in types.values())
    lake_fields: dict[str, _LakeFields] = {}
    have = {item.name: item.type for item in state.schema} if state is not None else {}
    rules: list[Rule] = []
    for rule in pipeline.rules:
        columns = {"key": staging.key_column(rule.out), "value": staging.value_column(rule.out)}
        sides = {
            side: lake_fields.setdefault(column, _LakeFields.from_type(have.get(column)))
            for side, column in columns.items()
        }
        defined_rule = _with_definition(rule, types) if names_differ else rule
        rules.append(_rewritten(defined_rule, types, sides, partial(_rewriter, names_differ=names_differ)))
    return replace(pipeline, rules=tuple(rules))


def _with_definition(rule: Rule, types: Mapping[str, pa.StructType]) -> Rule:
    """A view's rule with its definition, which has the topic's first names of renamed fields: another name of a field makes no
    other view."""
    if rule.view is None or rule.view.definition:
        return rule
    sides = {"key": _TopicFields(), "value": _TopicFields()}
    first = _rewritten(rule, types, sides, lambda roots: partial(in_first_names, roots=roots, spelled=_spelled))
    assert first.view is not None
    definition = view_definition(first.view, first.key, first.value, first.headers, rule.out)
    return replace(rule, view=replace(rule.view, definition=definition))


def lacking_fields(rule: Rule, types: Mapping[str, pa.StructType]) -> dict[str, pa.DataType]:
    """The fields that a rule names and a record can't have: path in an expression → the type that lacks the field.

    ``types``: input topic → ``struct<kafka, key, value>`` (``record_type``); a side of an unknown type is null. EtlError as
    ``with_lake_names``.
    """
    type_by_path: dict[str, pa.DataType] = {}

    def collector(roots: Mapping[str, pa.DataType | None]) -> Rewrite:
        def collect(sql: str) -> str:
            references = _references(sql, roots)
            references.rewrite()
            type_by_path.update(references.unknown)
            return sql

        return collect

    _rewritten(rule, types, {"key": _LakeFields(), "value": _LakeFields()}, collector)
    return type_by_path


def shape_in_lake_names(shape: RecordShape, key: pa.DataType, value: pa.DataType) -> RecordShape:
    """An input's shape over decoded records of some types, which have the lake's names. SqlProblem as ``in_lake_names``."""
    roots = {"kafka": KAFKA_TYPE, "key": with_notes(key), "value": with_notes(value)}
    names_differ = any(_names_differ(type) for type in roots.values())
    rewrite = _rewriter(roots, names_differ)
    sides = {side: _LakeFields().shape(part, rewrite) for side, part in shape.sides.items()}
    return replace(shape, where=edited(shape.where, rewrite), sides=sides)


def with_notes(type: pa.DataType) -> pa.DataType:
    """A type of lake names that came from Spark, which keeps no notes, with the names of its fields in the topic."""
    return lake_type_of(topic_type_of(type))


def record_type(sides: Iterable[pa.Field]) -> pa.StructType:
    """The type of a record, ``struct<kafka, key, value>``, as far as it is known. ``sides``: fields, others too."""
    return pa.struct([pa.field("kafka", KAFKA_TYPE), *(item for item in sides if item.name in ("key", "value"))])


@dataclass
class _LakeFields:
    """The fields that rules make in one struct of an output: name in the topic → name in the lake, and what is inside."""

    names: dict[str, str] = field(default_factory=dict[str, str])
    children: dict[str, _LakeFields] = field(default_factory=dict)

    @classmethod
    def from_type(cls, type: pa.DataType | None) -> _LakeFields:
        lake_fields = cls()
        if type is not None and pa.types.is_struct(type):
            for at in range(type.num_fields):
                item = type.field(at)
                lake_fields.names[original_name(item.name)] = item.name
                lake_fields.children[original_name(item.name)] = cls.from_type(item.type)
        return lake_fields

    def shape(self, shape: Shape, rewrite: Rewrite) -> Shape:
        if shape is None:
            return None
        if isinstance(shape, str):
            return rewrite(shape)
        shapes: dict[str, Shape] = {}
        for name, part in shape.items():
            if name not in self.names:
                self.names[name] = lake_name(name, self.names.values())
            shapes[self.names[name]] = self.children.setdefault(name, _LakeFields()).shape(part, rewrite)
        return shapes


class _TopicFields(_LakeFields):
    """The fields that rules make, by their names in the topic."""

    def shape(self, shape: Shape, rewrite: Rewrite) -> Shape:
        return edited(shape, rewrite)


_ODD = re.compile(r"`[^`]*[ ,;{}()=%\x00-\x1f\x7f][^`]*`")
"""A quoted name that may have another one in the lake."""


def _rewriter(roots: Mapping[str, pa.DataType | None], names_differ: bool) -> Rewrite:
    """A function that rewrites an expression. ``names_differ``: whether a field of the roots has another name in the lake.
    Without such a field, most expressions stay as they are and are not parsed."""
    return lambda sql: in_lake_names(sql, roots) if names_differ or _ODD.search(sql) else sql


def _rewritten(
    rule: Rule, types: Mapping[str, pa.StructType], lake_fields: Mapping[str, _LakeFields], make: Rewriter
) -> Rule:
    """The rule with other expressions."""

    def rewriter(roots: Mapping[str, pa.DataType | None]) -> Rewrite:
        def rewrite(sql: str) -> str:
            try:
                return make(roots)(sql)
            except SqlProblem as problem:
                raise EtlError(f"rule {rule.name}: {sql}: {problem}") from None

        return rewrite

    def condition(where: str | None, topic: str) -> str | None:
        column_types = {name: _side(types.get(topic), name) for name in ("kafka", "key", "value")}
        return edited(where, rewriter(column_types))

    roots: dict[str, pa.DataType | None] = {side.name: types.get(side.topic) for side in rule.sides}
    view = rule.view
    records = {item.alias: types.get(item.topic) for item in rule.tables}
    columns_by_alias = {
        alias: {name: _side(kind, name) for name in ("kafka", "key", "value")} for alias, kind in records.items()
    }
    # An alias of a view is a row, and no record.
    roots = {} if view is not None else roots
    roots |= {item.alias: row_type(item, columns_by_alias[item.alias]) for item in rule.tables}
    for item in rule.group.named("first", "list") if rule.group is not None else ():
        side_type = roots[next(iter(item.arguments))]
        roots[item.name] = side_type if item.function == "first" or side_type is None else pa.list_(side_type)
    if view is not None:
        view = with_names(
            rule,
            view,
            {alias: rewriter(column_types) for alias, column_types in columns_by_alias.items()},
            rewriter(roots),
        )
    rewrite = rewriter(roots)
    sides = (
        replace(side, where=condition(side.where, side.topic), keys=tuple(map(rewrite, side.keys)))
        for side in rule.sides
    )
    return replace(
        rule,
        sides=tuple(sides),
        key=lake_fields["key"].shape(rule.key, rewrite),
        value=lake_fields["value"].shape(rule.value, rewrite),
        headers=edited(rule.headers, rewrite),
        keep=edited(rule.keep, rewrite),
        explode=edited(rule.explode, rewrite),
        view=view,
        group=None if rule.group is None else rule.group.edited(rewrite),
        lookups=tuple(
            replace(
                item,
                table=table_with_names(item.table, rewriter(columns_by_alias[item.alias])),
                on=tuple((rewrite(record), rewrite(row_sql)) for record, row_sql in item.on),
            )
            for item in rule.lookups
        ),
    )


def _side(type: pa.StructType | None, name: str) -> pa.DataType | None:
    return None if type is None or type.get_field_index(name) < 0 else type.field(name).type
