"""The ``from:`` of a view: an equi-join tree over the view's tables.

    o JOIN c ON o.customer_id = c.id LEFT JOIN l ON l.order_id = o.id

Each join adds an alias. The ON of the join compares this alias with one earlier alias. The texts of both sides are cut out of
the file's own text, so that Spark parses what the user wrote.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sqlglot.tokenizer_core import Token, TokenType

from zync_assets.pipeline_file.conditions import conjuncts, equality
from zync_assets.pipeline_file.expressions import SqlProblem, parse, roots, tokenize
from zync_assets.pipeline_file.fields import suggestion, word_list
from zync_assets.pipeline_file.view_expressions import check_rows
from zync_assets.queries import ViewJoin

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
        kind: Literal["inner", "left"] = "left" if "LEFT" in words else "inner"
        pairs = self._pairs(alias, kind, on_tokens)
        if pairs is None:
            return None
        [near] = {self.names[name] for near_sql, _ in pairs for name in roots(parse(near_sql).tree)}
        return ViewJoin(kind, alias, pairs, near)

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
