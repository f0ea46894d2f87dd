"""``join-on``: equalities joined by AND, each of a left-only and a right-only expression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from sqlglot import exp
from sqlglot.tokenizer_core import Token, TokenType

from zync_assets.pipeline_file.expressions import Expression, SqlProblem, check_expression, parse, roots

JoinPair: TypeAlias = tuple[str, str]
"""(left-only expression, right-only expression), as the file spells them."""

_OPENING = (TokenType.L_PAREN, TokenType.L_BRACKET, TokenType.CASE)
_CLOSING = (TokenType.R_PAREN, TokenType.R_BRACKET, TokenType.END)
_SHAPE = "must be equalities joined by AND, such as left.value.a = right.value.b"


def split_join(sql: str, left_root: str = "left", right_root: str = "right") -> tuple[tuple[JoinPair, ...], list[str]]:
    """The pairs of a ``join-on``, and what is wrong with it; no pairs when something is.

    The texts are cut out of ``sql``, not written anew, so Spark parses what the user wrote.
    """
    problems = check_expression(sql, (left_root, right_root))
    if problems:
        return (), problems
    expression = parse(sql)
    pairs: list[JoinPair] = []
    try:
        for conjunct in _conjuncts(expression.tokens, expression):
            pairs.append(_pair(conjunct, expression, left_root, right_root))
    except SqlProblem as problem:
        return (), [str(problem)]
    return tuple(pairs), []


def _conjuncts(tokens: Sequence[Token], whole: Expression) -> list[Sequence[Token]]:
    tokens = _unwrapped(tokens)
    tree = parse(_text(tokens, whole)).tree
    if isinstance(tree, exp.Or):
        raise SqlProblem(f"{_SHAPE}; OR is not supported: write a rule for each")
    if not isinstance(tree, exp.And):
        return [tokens]
    pieces = _cut(tokens, TokenType.AND)
    if len(pieces) < 2 or not all(pieces):
        raise SqlProblem(_SHAPE)
    return [found for piece in pieces for found in _conjuncts(piece, whole)]


def _pair(tokens: Sequence[Token], whole: Expression, left_root: str, right_root: str) -> JoinPair:
    text = _text(tokens, whole)
    tree = parse(text).tree
    if isinstance(tree, exp.NullSafeEQ):
        raise SqlProblem(f"`{text}`: use `=`; a null join key matches nothing")
    sides = _cut(tokens, TokenType.EQ)
    if not isinstance(tree, exp.EQ) or len(sides) != 2 or not all(sides):
        raise SqlProblem(f"`{text}` is no equality of the two sides; {_SHAPE}")
    texts = [_text(side, whole) for side in sides]
    parsed = [parse(side).tree for side in texts]
    # Spark and sqlglot bind `a between 1 and 2 = b` differently; parentheses leave no doubt.
    doubtful = any(isinstance(side, exp.Predicate | exp.Not | exp.RegexpLike) for side in parsed)
    if doubtful or (tree.this, tree.expression) != tuple(parsed):
        raise SqlProblem(f"`{text}` can be read in two ways; put each side in parentheses")
    used = [roots(side) for side in parsed]
    if used == [{left_root}, {right_root}]:
        return texts[0], texts[1]
    if used == [{right_root}, {left_root}]:
        return texts[1], texts[0]
    for side, names in zip(texts, used, strict=True):
        if len(names) > 1:
            raise SqlProblem(f"`{side}` mixes {left_root} and {right_root}; each side of `=` must be of one of them")
        if not names:
            raise SqlProblem(
                f"`{side}` is of neither {left_root} nor {right_root}; put a condition on one side into where"
            )
    only = next(iter(used[0]))
    raise SqlProblem(f"`{text}` compares {only} with itself; put a condition on one side into where")


def _unwrapped(tokens: Sequence[Token]) -> Sequence[Token]:
    """Without the parentheses around the whole."""
    while len(tokens) > 2 and tokens[0].token_type == TokenType.L_PAREN and _closes(tokens) == len(tokens) - 1:
        tokens = tokens[1:-1]
    return tokens


def _closes(tokens: Sequence[Token]) -> int:
    depth = 0
    for index, token in enumerate(tokens):
        depth += _step(tokens, index, token)
        if depth == 0:
            return index
    return -1


def _step(tokens: Sequence[Token], index: int, token: Token) -> int:
    if index and tokens[index - 1].token_type == TokenType.DOT:
        return 0  # a field that is called like a keyword
    return (token.token_type in _OPENING) - (token.token_type in _CLOSING)


def _cut(tokens: Sequence[Token], separator: TokenType) -> list[Sequence[Token]]:
    """The stretches between separators that stand outside parentheses, brackets and CASE."""
    depth, begin = 0, 0
    pieces: list[Sequence[Token]] = []
    for index, token in enumerate(tokens):
        field = index > 0 and tokens[index - 1].token_type == TokenType.DOT
        depth += _step(tokens, index, token)
        if depth == 0 and not field and token.token_type == separator:
            pieces.append(tokens[begin:index])
            begin = index + 1
    return [*pieces, tokens[begin:]]


def _text(tokens: Sequence[Token], whole: Expression) -> str:
    return whole.sql[tokens[0].start : tokens[-1].end + 1]
