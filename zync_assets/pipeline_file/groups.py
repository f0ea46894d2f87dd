"""The section of a group: its records, what they share, and what makes a group complete.

An expression of a group is over aggregates alone. Each aggregate becomes a column, which is called as the file spells it:
``first(o).value.ID`` becomes `` `first(o)`.value.ID``. The engine computes the columns, and Spark computes the expression.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

from sqlglot import exp
from sqlglot.tokenizer_core import Token, TokenType

from zync_assets.pipeline import Headers, Rule, Shape, Side
from zync_assets.pipeline_file.conditions import closing_places
from zync_assets.pipeline_file.expressions import (
    RECORD_ROOTS,
    SqlProblem,
    check_expression,
    columns,
    function_problems,
    parse,
    roots,
    tokenize,
)
from zync_assets.pipeline_file.fields import Fields, kind, word_list
from zync_assets.pipeline_file.joins import alias_problem
from zync_assets.pipeline_file.source import YamlTable
from zync_assets.pipeline_file.topics import over, read_condition
from zync_assets.queries import Aggregate, GroupDefinition
from zync_assets.spark.sql import edited, name_sql

RECORDS = ("first", "list")
"""The functions that give whole records."""
NUMBERS = ("count", "count_if", "bool_or", "bool_and", "sum", "min", "max")
FUNCTIONS = (*RECORDS, *NUMBERS)
_CURES = {
    "any": "bool_or",
    "some": "bool_or",
    "every": "bool_and",
    "avg": "sum(…) / count(…)",
    "mean": "sum(…) / count(…)",
    "collect_list": "transform(list(o), item -> item.value.…)",
    "array_agg": "transform(list(o), item -> item.value.…)",
    "last": "element_at(list(o), -1)",
}
_WORDS = ("topic", "item", "time", "old", "row", "hash", "ord", "source", "lone", "k0", "order_high", "order_low")
"""Names that a group has for other things than records (``etl.rules.group``)."""
_RECORDS_FORM = "write {o: Orders, l: Lines}: an alias for each topic"
_KEY_FORM = "write value.ID, or {o: value.ID, l: value.OrderID}"
_COMPLETE_FORM = "write a condition such as count_if(topic = 'Lines') = max(o.value.lines)"


@dataclass
class GroupSection:
    """The records of a group by alias, and the aggregates of its expressions by the name of their column in lower case.
    ``sides``: alias → topic; None: not known."""

    sides: Mapping[str, str] | None
    aggregates: dict[str, Aggregate] = field(default_factory=dict[str, Aggregate])
    texts: dict[str, str] = field(default_factory=dict[str, str])
    """A call in the file → the name of its column."""
    names: set[str] = field(default_factory=set[str])
    """Other names that expressions see."""

    def check(self, sql: str) -> list[str]:
        """The problems of an expression over the aggregates of a group."""
        if self.sides is None:
            return []
        try:
            self.rewritten(sql)
        except SqlProblem as problem:
            return [str(problem)]
        return []

    def rewritten(self, sql: str) -> str:
        """The expression over columns. SqlProblem for an expression with a problem."""
        tokens, edits = tokenize(sql), list[tuple[int, int, str]]()
        for opening, closing in self._calls(tokens):
            start, end = tokens[opening - 1].start, tokens[closing].end + 1
            function, text = (
                tokens[opening - 1].text.lower(),
                _single_spaced_text(sql, tokens[opening - 1 : closing + 1]),
            )
            inside = sql[tokens[opening].end + 1 : tokens[closing].start].strip()
            edits.append((start, end, name_sql(self._aggregate(function, inside, text))))
        for start, end, text in reversed(edits):
            sql = f"{sql[:start]}{text}{sql[end:]}"
        self._check_outside(sql)
        return sql

    def _calls(self, tokens: Sequence[Token]) -> list[tuple[int, int]]:
        """The tokens of the parentheses of each aggregate. SqlProblem for an aggregate that a group does not have."""
        calls: list[tuple[int, int]] = []
        for opening, closing in sorted(closing_places(tokens).items()):
            name = tokens[opening - 1].text.lower() if opening else ""
            is_field = opening > 1 and tokens[opening - 2].token_type == TokenType.DOT
            if is_field or name not in (*FUNCTIONS, *_CURES) or tokens[opening].token_type != TokenType.L_PAREN:
                continue
            if name in _CURES:
                raise SqlProblem(f"`{name}()` is no aggregate of a group; use {_CURES[name]}")
            if calls and opening < calls[-1][1]:
                raise SqlProblem(
                    f"`{name}()` stands in another aggregate; an aggregate takes the columns of one record"
                )
            if closing + 1 < len(tokens) and tokens[closing + 1].token_type == TokenType.FILTER:
                raise SqlProblem(f"`{name}()` has a FILTER; write count_if(…), or CASE WHEN … THEN … END inside")
            calls.append((opening, closing))
        return calls

    def keys(self, sql: str, alias: str) -> tuple[str, ...]:
        """An expression over one record's columns as an expression over the record ``alias``."""
        return (_prefixed_sql(sql, alias),)

    def _aggregate(self, function: str, inside: str, text: str) -> str:
        """The name of the column of an aggregate."""
        if text in self.texts:
            return self.texts[text]
        name = text
        while name.lower() in self.aggregates:
            # Spark does not tell names apart that differ in case alone.
            name = f"{name} "
        self.texts[text] = name
        aggregate = Aggregate(name, function, dict(self._arguments(function, inside)))
        self.aggregates[name.lower()] = aggregate
        return name

    def _arguments(self, function: str, sql: str) -> Iterator[tuple[str, str]]:
        """Side → the argument of an aggregate."""
        sides = self.sides or {}
        aliases = {alias.lower(): alias for alias in sides}
        if function in RECORDS:
            if sql.lower() not in aliases:
                raise SqlProblem(f"`{function}({sql})` names no alias of `records:`; aliases: {word_list(sides)}")
            yield aliases[sql.lower()], aliases[sql.lower()]
            return
        if function == "count" and sql == "*":
            yield from ((alias, "true") for alias in sides)
            return
        if sql.lower().startswith("distinct "):
            raise SqlProblem(f"`{function}()` has a DISTINCT, which a group does not count; use min or max")
        for message in check_expression(sql, (*aliases, *RECORD_ROOTS, "topic")):
            raise SqlProblem(message)
        names = roots(parse(sql).tree)
        alias_names = names & aliases.keys()
        if len(alias_names) > 1 or (alias_names and names - alias_names):
            raise SqlProblem(
                f"`{function}({sql})` mixes {word_list(sorted(names))}; an aggregate sees one record at a time"
            )
        yield from ((alias, _prefixed_sql(sql, alias)) for alias in ([aliases[name] for name in alias_names] or sides))

    def _check_outside(self, sql: str) -> None:
        """SqlProblem for a column that stands outside of an aggregate."""
        expression = parse(sql)
        for message in function_problems(expression.tokens):
            raise SqlProblem(message)
        for parts in columns(expression.tree):
            if parts[0].lower() not in self.aggregates and parts[0].lower() not in self.names:
                name, alias = ".".join(parts), next(iter(self.sides or {"o": ""}))
                path = f"first({parts[0]}).{name.partition('.')[2]}"
                path = f"first({alias}).{name}" if parts[0].lower() in RECORD_ROOTS else path
                raise SqlProblem(
                    f"`{name}` stands outside of an aggregate, and a group has several records; write `{path}`, or one of"
                    f" {word_list(FUNCTIONS)}"
                )


def read_group(
    fields: Fields, topic: Callable[[Fields, str], str | None], base_group: GroupSection | None = None
) -> GroupSection:
    """The ``records`` of a group. All outputs of a rule share the aggregates.

    ``topic``: reads the name of an input; ``base_group``: the group, as earlier outputs of the rule have it.
    """
    node = fields.node("records")
    if not isinstance(node, YamlTable) or not node.entries:
        fault = "is missing" if node is None else f"must be a mapping with two topics or one, not {kind(node)}"
        fields.problem("records", f"{fault}; {_RECORDS_FORM}")
        return GroupSection(None)
    records = Fields(node, fields.key("records"), fields.problems, None)
    sides: dict[str, str] = {}
    problem_count = len(fields.problems)
    for alias in records.entries:
        if message := alias_problem(alias, list(sides)):
            records.problem(alias, message)
        elif alias.lower() in _WORDS or re.fullmatch(r"a\d+", alias.lower()):
            records.problem(alias, "is a word of its own in groups; choose another alias, such as o")
        name = topic(records, alias)
        if name is not None and name in sides.values():
            records.problem(alias, f"`{name}` has an alias already; a topic has one")
        sides[alias] = name or ""
    correct_sides = sides if len(fields.problems) == problem_count else None
    return (
        GroupSection(correct_sides)
        if base_group is None
        else GroupSection(correct_sides, base_group.aggregates, base_group.texts)
    )


def group_rule(
    fields: Fields,
    name: str,
    out: str,
    section: GroupSection,
    key: Shape,
    value: Shape,
    headers: Headers | None,
    explode: str | None = None,
    keep: str | None = None,
) -> Rule | None:
    """The rule of a group; None if a part of it is not known. Reads ``group-by``, ``where`` and ``complete-when``."""
    complete = fields.text("complete-when", _COMPLETE_FORM)
    if section.sides is None:
        return None
    keys = _alias_expressions(fields, "group-by", section.sides, _KEY_FORM)
    wheres = _alias_expressions(fields, "where", section.sides, "") if "where" in fields else dict[str, str]()
    for problem in section.check(complete) if complete is not None else ():
        fields.problem("complete-when", problem)
    try:
        complete_sql = section.rewritten(complete or "")
        outputs = edited(key, section.rewritten), edited(value, section.rewritten)
        headers = edited(headers, section.rewritten)
        explode, keep = (edited(sql, section.rewritten) for sql in (explode, keep))
        sides = tuple(
            Side(alias, topic, wheres.get(alias), section.keys(keys[alias], alias))
            for alias, topic in section.sides.items()
            if alias in keys
        )
    except SqlProblem:
        # An expression with problems is reported already.
        return None
    used_aggregates = [item for item in section.aggregates.values() if name_sql(item.name) in complete_sql]
    if not used_aggregates:
        fields.problem("complete-when", f"must aggregate the records of the group: {word_list(NUMBERS)} or first")
    if lists := [item for item in used_aggregates if item.function == "list"]:
        message = f"must not hold `{lists[0].name}`; count the records: count_if(topic = '…')"
        fields.problem("complete-when", message)
    return Rule(
        "group",
        name,
        sides,
        out,
        *outputs,
        headers,
        keep,
        explode=explode,
        group=GroupDefinition(tuple(section.aggregates.values()), complete_sql),
    )


def _alias_expressions(fields: Fields, key: str, sides: Mapping[str, str], form: str) -> dict[str, str]:
    """Alias → an expression over a record of the alias's topic. A single expression in the file holds for every alias."""
    node = fields.node(key)
    if not isinstance(node, YamlTable):
        if node is None:
            fields.problem(key, f"is missing; {form}")
        sql = read_condition(fields, key, over())
        return {} if sql is None else dict.fromkeys(sides, sql)
    alias_fields = Fields(node, fields.key(key), fields.problems, tuple(sides))
    expressions = {alias: sql for alias in sides if (sql := read_condition(alias_fields, alias, over())) is not None}
    if form and (missing_aliases := [alias for alias in sides if alias not in alias_fields]):
        fields.problem(key, f"has nothing for {word_list(f'`{alias}`' for alias in missing_aliases)}; {form}")
    return expressions


def _single_spaced_text(sql: str, tokens: Sequence[Token]) -> str:
    """The text of some tokens, with one space for the white space between two of them. Literals stay as they are."""
    gaps = (sql[token.end + 1 : next_token.start] for token, next_token in pairwise(tokens))
    between = [" ".join(f"<{gap}>".split())[1:-1] for gap in gaps]
    texts = (sql[token.start : token.end + 1] for token in tokens)
    return "".join(part for pair in zip_longest(texts, between, fillvalue="") for part in pair)


def _prefixed_sql(sql: str, alias: str) -> str:
    """An expression over ``kafka``, ``key``, ``value`` and ``topic`` as one over the record ``alias``."""
    for column in sorted(parse(sql).tree.find_all(exp.Column), key=lambda column: -int(column.parts[0].meta["start"])):
        names = next(columns(column), None)
        start = int(column.parts[0].meta["start"])
        if names is None or names[0].lower() == alias.lower():
            continue
        path = f"{alias}.kafka" if names[0].lower() == "topic" else alias
        sql = f"{sql[:start]}{path}.{sql[start:]}"
    return sql
