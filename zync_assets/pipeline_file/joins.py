"""The tables that a rule joins: the ``from:`` of a view, and the ``lookup:`` of another rule.

    from: o JOIN c ON o.customer_id = c.id LEFT JOIN l ON l.order_id = o.id
    lookup: {c: {table: Customers, on: c.id = in.value.after.customer_id, missing: wait}}

A ``from:`` is an equi-join tree. Each join adds an alias, and its ON compares this alias with one earlier alias. A look-up says
what happens to a record if a row is missing. The texts of both sides are cut out of the file's own text, so that Spark parses
what the user wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from sqlglot.dialects.spark import Spark
from sqlglot.tokenizer_core import Token, TokenType

from zync_assets.pipeline import Shape, ViewTable
from zync_assets.pipeline_file import source
from zync_assets.pipeline_file.conditions import conjuncts, equality
from zync_assets.pipeline_file.expressions import RECORD_ROOTS, SqlProblem, check_expression, parse, roots, tokenize
from zync_assets.pipeline_file.fields import Fields, kind, suggestion, word_list
from zync_assets.pipeline_file.key import known_names
from zync_assets.pipeline_file.keys import LOOKUP, VIEW, Section
from zync_assets.pipeline_file.source import Scalar, YamlTable
from zync_assets.pipeline_file.topics import Check, over, read_condition, read_shape
from zync_assets.pipeline_file.view_expressions import check_rows
from zync_assets.queries import Lookup, Missing, ViewJoin

WAIT_MS = 600_000
"""How long a record waits for its row, if the file does not say."""
_LOOKUP_FORM = "write {c: {table: Customers, on: c.id = in.value.after.customer_id, missing: wait}}"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORDS = frozenset(["JOIN", "INNER", "LEFT", "RIGHT", "FULL", "CROSS", "SEMI", "ANTI", "NATURAL", "OUTER", "LATERAL"])
_NAMES = (TokenType.VAR, TokenType.IDENTIFIER)
_FORM = "must be equalities joined by AND, such as o.customer_id = c.id"
_CURES: Mapping[str, str] = {
    "inner": "put another condition into `where:`",
    "left": "put a condition on one table into its side: CASE WHEN l.open THEN l.order_id END = o.id",
}
_REFUSED: Mapping[str, str] = {
    "RIGHT": "RIGHT JOIN is not supported; begin with the table on the right, and LEFT JOIN the others",
    "FULL": "FULL JOIN is not supported; write a view with a LEFT JOIN for each of the two tables, each with its own topic",
    "CROSS": "CROSS JOIN is not supported: a change would touch every row; write JOIN … ON with an equality",
    "NATURAL": "NATURAL JOIN is not supported; name the columns: JOIN … ON o.customer_id = c.id",
    "SEMI": "SEMI JOIN is not supported; write JOIN, and aggregate by the view's `key:`",
    "ANTI": "ANTI JOIN is not supported; write LEFT JOIN, and `where:` … IS NULL",
    "LATERAL": "LATERAL is not supported; a view joins the tables of `tables:`",
}


@dataclass(frozen=True)
class JoinTree:
    """The aliases of a view, joined from ``root`` on."""

    root: str
    joins: tuple[ViewJoin, ...]

    @property
    def aliases(self) -> tuple[str, ...]:
        return self.root, *(join.alias for join in self.joins)

    @property
    def optional(self) -> frozenset[str]:
        """The aliases whose row may be missing, in lower case."""
        return frozenset(join.alias.lower() for join in self.joins if join.kind == "left")


def read_from(sql: str, aliases: Mapping[str, bool]) -> tuple[JoinTree | None, list[str], Collection[str]]:
    """The join tree of a ``from:`` (None: with problems), all of its problems, and the aliases that ``tables:`` lacks.
    ``aliases``: as ``tables:`` spells them, see ``view_expressions.check_rows``."""
    try:
        tokens = tokenize(sql)
    except SqlProblem as problem:
        return None, [str(problem)], ()
    reader = _Reader(sql, {alias.lower(): alias for alias in aliases}, {a.lower(): row for a, row in aliases.items()})
    tree = reader.tree(tokens)
    return (None if reader.problems else tree), list(dict.fromkeys(reader.problems)), reader.unknown


class _Reader:
    def __init__(self, sql: str, names: Mapping[str, str], rows: Mapping[str, bool]) -> None:
        self.sql = sql
        self.names = names
        self.rows = rows
        self.problems: list[str] = []
        self.joined: list[str] = []
        self.unknown: set[str] = set()
        """Aliases that `from:` alone has, in lower case."""

    def tree(self, tokens: Sequence[Token]) -> JoinTree | None:
        first_part, *other_parts = _parts(tokens)
        root, surplus = self._alias(first_part)
        if surplus and root is not None:
            self._surplus(root, surplus)
        joins = [join for part in other_parts if (join := self._join(part)) is not None]
        return None if root is None else JoinTree(root, tuple(joins))

    def _join(self, tokens: Sequence[Token]) -> ViewJoin | None:
        count = next((at for at in range(len(tokens)) if not _is_join_word(tokens, at)), len(tokens))
        words = [token.text.upper() for token in tokens[:count]]
        alias, on_tokens = self._alias(tokens[count:])
        if words == [","]:
            self.problems.append("must not hold `,`; write JOIN … ON with an equality")
            return None
        refusals = [_REFUSED[word] for word in words if word in _REFUSED]
        if refusals:
            self.problems.append(refusals[0])
            return None
        if "JOIN" not in words:
            self.problems.append(f"the word JOIN is missing after {' '.join(words)}")
            return None
        if alias is None:
            return None
        join_kind: Literal["inner", "left"] = "left" if "LEFT" in words else "inner"
        pairs = self._pairs(alias, join_kind, on_tokens)
        if pairs is None:
            return None
        [near] = {self.names[name] for near_sql, _ in pairs for name in roots(parse(near_sql).tree)}
        return ViewJoin(join_kind, alias, pairs, near)

    def _alias(self, tokens: Sequence[Token]) -> tuple[str | None, Sequence[Token]]:
        """The alias that begins a part, and the tokens after it."""
        if not tokens:
            self.problems.append("a table is missing; write an alias of `tables:`")
            return None, ()
        name, later_tokens = tokens[0], tokens[1:]
        alias_text = f"aliases: {word_list(self.names.values())}"
        if name.token_type == TokenType.L_PAREN:
            self.problems.append(
                f"must not hold parentheses around tables; write the joins one after another; {alias_text}"
            )
            return None, ()
        alias = self.names.get(name.text.lower()) if name.token_type in _NAMES else None
        if alias is None:
            self.unknown.add(name.text.lower())
            hint = suggestion(name.text, self.names.values())
            self.problems.append(f"`{name.text}` is no alias of `tables:`; {alias_text}{hint}")
            return None, ()
        if alias in self.joined:
            self.problems.append(f"joins `{alias}` twice; give the topic a second alias in `tables:`")
            return None, ()
        self.joined.append(alias)
        return alias, later_tokens

    def _surplus(self, alias: str, surplus: Sequence[Token]) -> None:
        if surplus[0].token_type == TokenType.DOT:
            self.problems.append(f"must name aliases of `tables:`, not columns or topics: `{alias}.…`")
        else:
            self.unknown |= {token.text.lower() for token in surplus[:2]}
            cure = f"`tables:` names the aliases; aliases: {word_list(self.names.values())}"
            self.problems.append(f"`{surplus[0].text}` can't stand after `{alias}`; {cure}")

    def _pairs(
        self, alias: str, kind: Literal["inner", "left"], tokens: Sequence[Token]
    ) -> tuple[tuple[str, str], ...] | None:
        earlier_aliases = self.joined[:-1]
        example = f"ON {earlier_aliases[0] if earlier_aliases else 'o'}.… = {alias}.…"
        if tokens and tokens[0].text.upper() == "USING":
            self.problems.append(f"must not hold USING, which names no table; write {example}")
            return None
        if not tokens or tokens[0].text.upper() != "ON":
            if tokens:
                self._surplus(alias, tokens)
            else:
                self.problems.append(f"JOIN {alias} has no ON; write {example}")
            return None
        if len(tokens) == 1:
            self.problems.append(f"nothing follows ON of {alias}; write {example}")
            return None
        text = self.sql[tokens[1].start : tokens[-1].end + 1]
        # An alias that is not known may be a misspelt one.
        later = {name.lower() for name in self.names.values() if name not in self.joined and not self.unknown}
        rows = {**dict.fromkeys(self.unknown, False), **self.rows}
        problems = [f"ON of {alias}: {message}" for message in check_rows(text, rows)]
        try:
            problems = problems or [f"ON of {alias}: {message}" for message in self._order(text, later)]
            if not problems and not roots(parse(text).tree) & self.unknown:
                return tuple(self._equalities(text, alias, kind))
        except SqlProblem as problem:
            problems = [f"ON of {alias}: {problem}"]
        self.problems += problems
        return None

    def _order(self, text: str, later: set[str]) -> Iterator[str]:
        for name in sorted(roots(parse(text).tree) & later):
            yield f"`{self.names[name]}` is joined later, or never; compare with a table before it"

    def _equalities(self, text: str, alias: str, kind: Literal["inner", "left"]) -> list[tuple[str, str]]:
        """The pairs of an ON, the side of the alias before it first."""
        form = f"{_FORM}; {_CURES[kind]}"
        expression = parse(text)
        pairs: list[tuple[str, str]] = []
        partners: dict[str, None] = {}
        for conjunct in conjuncts(expression.tokens, expression, form):
            sides = equality(conjunct, expression, form)
            names = [{self.names[name] for name in roots(parse(side).tree)} for side in sides]
            shown = f"`{sides[0]} = {sides[1]}`"
            for side, side_aliases in zip(sides, names, strict=True):
                if len(side_aliases) > 1:
                    raise SqlProblem(f"`{side}` mixes {' and '.join(sorted(side_aliases))}; a side is of one table")
            if {alias} not in names or not all(names) or names[0] == names[1]:
                raise SqlProblem(f"{shown} does not compare {alias} with a table before it; {_CURES[kind]}")
            alias_index = names.index({alias})
            partners |= dict.fromkeys(names[1 - alias_index])
            pairs.append((sides[1 - alias_index], sides[alias_index]))
        if len(partners) > 1:
            where_cure = "and put the other equalities into `where:`"
            cure = f"keep one table{', ' + where_cure if kind == 'inner' else '; a LEFT JOIN compares with one table'}"
            raise SqlProblem(f"compares {alias} with {' and '.join(partners)}; the joins form a tree: {cure}")
        return pairs


def _parts(tokens: Sequence[Token]) -> list[Sequence[Token]]:
    """The first table, and each join from its first word on."""
    starts, depth = [0], 0
    for at, token in enumerate(tokens):
        depth += (token.token_type == TokenType.L_PAREN) - (token.token_type == TokenType.R_PAREN)
        begins = at > 0 and not depth and _is_join_word(tokens, at)
        if begins and (tokens[at].text == "," or not _is_join_word(tokens, at - 1)):
            starts.append(at)
    return [tokens[start:end] for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True)]


def _is_join_word(tokens: Sequence[Token], at: int) -> bool:
    token = tokens[at]
    if token.token_type == TokenType.COMMA:
        return True
    if token.token_type in (TokenType.IDENTIFIER, TokenType.STRING, TokenType.RAW_STRING):
        return False
    is_field = at > 0 and tokens[at - 1].token_type == TokenType.DOT
    # LEFT and RIGHT are functions too.
    is_call = at + 1 < len(tokens) and tokens[at + 1].token_type == TokenType.L_PAREN and token.text.upper() != "JOIN"
    return token.text.upper() in _WORDS and not is_field and not is_call


@dataclass(frozen=True)
class LookedUpRows:
    """The look-ups of a rule. ``rows``: alias in lower case → whether the alias has the default row; of faulty look-ups too.
    ``is_known``: whether the aliases are known."""

    lookups: tuple[Lookup, ...] = ()
    rows: Mapping[str, bool] | None = None
    is_known: bool = True


def with_rows(sides: Sequence[str], looked_up_rows: LookedUpRows) -> Check:
    """The check of an expression over the records of a rule and the rows that it looks up."""
    rows = looked_up_rows.rows or {}
    if not looked_up_rows.is_known:
        return lambda sql: ()
    return lambda sql: check_expression(sql, sides, rows)


def read_lookups(fields: Fields, section: Section, topic: Callable[[Fields, str], str | None]) -> LookedUpRows:
    """The look-ups of a rule. ``topic``: reads the name of an input."""
    node = fields.node("lookup")
    if node is None:
        return LookedUpRows()
    if not section.sides:
        cure = "a view joins its tables in `from:`" if section is VIEW else f"a {section.kind} rule has no look-ups"
        fields.problem("lookup", f"belongs to a stateless or a denorm rule; {cure}")
        return LookedUpRows(is_known=False)
    if not isinstance(node, YamlTable) or not node.entries:
        fault = "is empty" if isinstance(node, YamlTable) else f"must be a mapping of aliases, not {kind(node)}"
        fields.problem("lookup", f"{fault}; {_LOOKUP_FORM}")
        return LookedUpRows(is_known=False)
    lookup_fields = Fields(node, fields.key("lookup"), fields.problems, None)
    rows: dict[str, bool] = {}
    lookups: list[Lookup] = []
    for alias, entry in lookup_fields.entries.items():
        if message := alias_problem(alias, list(rows)):
            lookup_fields.problem(alias, message)
        if not isinstance(entry.node, YamlTable):
            lookup_fields.problem(alias, f"must be a mapping, not {kind(entry.node)}; {_LOOKUP_FORM}")
            rows[alias.lower()] = False
            continue
        item = Fields(entry.node, lookup_fields.key(alias), fields.problems, known_names(LOOKUP.keys))
        rows[alias.lower()] = "row" not in item
        lookup = _lookup(item, alias, section, rows[alias.lower()], topic(item, "table"))
        lookups += [] if lookup is None else [lookup]
    return LookedUpRows(tuple(lookups), rows)


def _lookup(item: Fields, alias: str, section: Section, is_default: bool, name: str | None) -> Lookup | None:
    table = read_table(item, alias, name)
    on = item.text("on", f"write an equality, such as {alias}.id = {section.sides[0]}.value.after.{alias}_id")
    sides, pairs, problems = _record_pairs(on, alias, section.sides, is_default) if on is not None else ([], [], [])
    for message in problems:
        item.problem("on", message)
    missing = _read_missing(item)
    wait = item.duration("wait")
    if "wait" in item and missing in ("null", "quarantine"):
        item.problem("wait", f"goes with missing: wait; with {missing} no record waits")
    if missing == "wait" and len(section.sides) > 1:
        item.problem(
            "missing",
            f"must be null or quarantine in a {section.kind} rule: a pair can't wait for a row. A replay of its quarantine tries"
            " again",
        )
        missing = None
    if table is None or missing is None or not pairs:
        return None
    return Lookup(table, sides[0], tuple(pairs), missing, (wait or WAIT_MS) if missing == "wait" else 0)


def _read_missing(item: Fields) -> Missing | None:
    words: tuple[Missing, ...] = get_args(Missing)
    node = item.node("missing")
    if isinstance(node, Scalar) and node.value is None and node.text:
        return "null"
    if node is None:
        item.problem("missing", f"is missing; write one of {word_list(words)}: what happens without a row")
    return item.choice("missing", words)


def _record_pairs(
    sql: str, alias: str, sides: Sequence[str], is_default: bool
) -> tuple[list[str], list[tuple[str, str]], list[str]]:
    """The sides of the records, the pairs (record, row), and the problems of an ``on``."""
    form = f"must be equalities joined by AND, such as {alias}.id = {sides[0]}.value.after.{alias}_id"
    problems = check_expression(sql, sides, {alias.lower(): is_default})
    if problems:
        return [], [], problems
    expression = parse(sql)
    pairs: list[tuple[str, str]] = []
    record_names, row = dict[str, None](), frozenset({alias.lower()})
    try:
        for conjunct in conjuncts(expression.tokens, expression, form):
            texts = equality(conjunct, expression, form)
            names = [roots(parse(text).tree) for text in texts]
            if row not in names or not all(len(side_names) == 1 for side_names in names) or names[0] == names[1]:
                records = " or ".join(f"`{side}`" for side in sides)
                raise SqlProblem(f"`{texts[0]} = {texts[1]}` does not compare `{alias}` with {records}; {form}")
            row_index = names.index(row)
            record_names |= dict.fromkeys(names[1 - row_index])
            pairs.append((texts[1 - row_index], texts[row_index]))
    except SqlProblem as problem:
        return [], [], [str(problem)]
    if len(record_names) > 1:
        return [], [], [f"compares `{alias}` with {word_list(record_names)}; a row is looked up for one record"]
    return list(record_names), pairs, []


def read_table(item: Fields, alias: str, name: str | None) -> ViewTable | None:
    """A table with its ``key``, ``row`` and ``deleted``. ``name``: of its topic, None for a topic with problems."""
    key: Shape = "key"
    if "key" in item:
        key = _table_key(item)
    row = item.text("row")
    for message in over()(row) if row is not None else ():
        item.problem("row", message)
    deleted = read_condition(item, "deleted", over())
    latest = (
        item.choice("key-in-many-partitions", ("fail", "latest-time")) if "key-in-many-partitions" in item else None
    )
    return None if name is None else ViewTable(alias, name, key, row, deleted, latest == "latest-time")


def _table_key(item: Fields) -> Shape:
    """The key of a table; text in braces is a mapping too."""
    node = item.node("key")
    assert node is not None
    if isinstance(node, Scalar) and node.text.strip().startswith("{"):
        key_node, problems = source.parse(node.text, {})
        if isinstance(key_node, YamlTable) and not problems:
            node = key_node
    if isinstance(node, Scalar) and node.value is None:
        item.problem("key", "must not be null; a row needs a key")
        return "key"
    return read_shape(node, item.key("key"), item.line_of("key"), over(), item.problems)


def alias_problem(alias: str, earlier_aliases: Sequence[str]) -> str | None:
    """Why a name can't be an alias; None if it can. ``earlier_aliases``: the aliases before it."""
    if not _NAME.fullmatch(alias):
        return "is no alias; write letters, digits and `_`, such as o"
    if alias.lower() in (*RECORD_ROOTS, "in") or len(tokens := Spark().tokenize(alias)) != 1:
        return "is a word of its own in expressions; choose another alias, such as o"
    if alias.lower().startswith("z_"):
        return "begins with `z_`, as the project's own columns do; choose another alias, such as o"
    if tokens[0].token_type != TokenType.VAR:
        return "is a word of SQL; choose another alias, such as o"
    twins = [earlier_alias for earlier_alias in earlier_aliases if earlier_alias.lower() == alias.lower()]
    return f"differs from `{word_list(twins)}` in case only; choose another alias" if twins else None
