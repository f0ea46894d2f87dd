"""The conditions of rules: ``join-on`` as pairs of expressions, and ``where`` compared between rules.

``join-on`` is equalities joined by AND. Each equality compares a left-only expression and a right-only expression.

An earlier rule leaves a later rule no records if the later rule's ``where`` implies the earlier rule's. ``None`` stands for a
rule without ``where``: it takes everything but tombstones. The comparison uses only the text of the conditions. A rule may
still take no record where the comparison shows nothing.

``with_nulls`` puts NULL in the place of columns that no record has. Spark finds no element or field in a NULL without a type,
and some functions refuse such a NULL. All of these give null for null. NULL therefore replaces the smallest expression around
the column for which Spark accepts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

from sqlglot import exp
from sqlglot.tokenizer_core import Token, TokenType

from zync_assets.pipeline_file.expressions import (
    RECORD_FUNCTIONS,
    Expression,
    SqlProblem,
    check_expression,
    columns,
    parse,
    roots,
)

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
        for conjunct in conjuncts(expression.tokens, expression):
            pairs.append(_pair(conjunct, expression, left_root, right_root))
    except SqlProblem as problem:
        return (), [str(problem)]
    return tuple(pairs), []


def conjuncts(tokens: Sequence[Token], expression: Expression, form: str = _SHAPE) -> list[Sequence[Token]]:
    """The conditions that AND joins. ``form``: the correct form, in words. SqlProblem for OR."""
    tokens = _unwrap(tokens)
    tree = parse(text_of(tokens, expression)).tree
    if isinstance(tree, exp.Or):
        raise SqlProblem(f"{form}; OR is not supported: write a rule for each")
    if not isinstance(tree, exp.And):
        return [tokens]
    pieces = _split(tokens, TokenType.AND)
    if len(pieces) < 2 or not all(pieces):
        raise SqlProblem(form)
    return [conjunct for piece in pieces for conjunct in conjuncts(piece, expression, form)]


def equality(tokens: Sequence[Token], expression: Expression, form: str = _SHAPE) -> JoinPair:
    """The two sides of an equality as the file spells them. SqlProblem for another condition."""
    text = text_of(tokens, expression)
    tree = parse(text).tree
    if isinstance(tree, exp.NullSafeEQ):
        raise SqlProblem(f"`{text}`: use `=`; a null join key matches nothing")
    sides = _split(tokens, TokenType.EQ)
    if not isinstance(tree, exp.EQ) or len(sides) != 2 or not all(sides):
        raise SqlProblem(f"`{text}` is no equality of the two sides; {form}")
    texts = [text_of(side, expression) for side in sides]
    trees = [parse(side).tree for side in texts]
    # Spark and sqlglot bind `a between 1 and 2 = b` differently; parentheses leave no doubt.
    doubtful = any(isinstance(side, exp.Predicate | exp.Not | exp.RegexpLike) for side in trees)
    if doubtful or (tree.this, tree.expression) != tuple(trees):
        raise SqlProblem(f"`{text}` can be read in two ways; put each side in parentheses")
    return texts[0], texts[1]


def _pair(tokens: Sequence[Token], expression: Expression, left_root: str, right_root: str) -> JoinPair:
    text = text_of(tokens, expression)
    texts = equality(tokens, expression)
    root_sets = [roots(parse(side).tree) for side in texts]
    if root_sets == [{left_root}, {right_root}]:
        return texts[0], texts[1]
    if root_sets == [{right_root}, {left_root}]:
        return texts[1], texts[0]
    for side, names in zip(texts, root_sets, strict=True):
        if len(names) > 1:
            raise SqlProblem(f"`{side}` mixes {left_root} and {right_root}; each side of `=` must be of one of them")
        if not names:
            raise SqlProblem(
                f"`{side}` is of neither {left_root} nor {right_root}; put a condition on one side into where"
            )
    only = next(iter(root_sets[0]))
    raise SqlProblem(f"`{text}` compares {only} with itself; put a condition on one side into where")


def _unwrap(tokens: Sequence[Token]) -> Sequence[Token]:
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


def _split(tokens: Sequence[Token], separator: TokenType) -> list[Sequence[Token]]:
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


def text_of(tokens: Sequence[Token], expression: Expression) -> str:
    """The tokens as the file spells them."""
    return expression.sql[tokens[0].start : tokens[-1].end + 1]


def leaves_nothing(earlier: str | None, later: str | None) -> bool:
    """True when every record that ``later`` would take is taken by ``earlier``. Both are conditions that parse."""
    if earlier is None:
        return later is None or _never_takes_tombstones(_tree(later))
    earlier_tree = _tree(earlier)
    if _is_true(earlier_tree):
        return True
    if later is None:
        return False
    conjuncts = list(_joined_by_and(_tree(later)))
    return all(
        any(_implies(conjunct, condition) for conjunct in conjuncts) for condition in _joined_by_and(earlier_tree)
    )


def are_apart(left: str | None, right: str | None) -> bool:
    """True when plainly no record is taken by both conditions: they want other texts, or other numbers, of one column."""
    if left is None or right is None:
        return False
    value_sets = [
        [column_values for conjunct in _joined_by_and(_tree(sql)) if (column_values := _column_values(conjunct))]
        for sql in (left, right)
    ]
    return any(
        column == another and _kinds(values | other_values) == 1 and not _texts(values) & _texts(other_values)
        for column, values in value_sets[0]
        for another, other_values in value_sets[1]
    )


def is_of_key(where: str) -> bool:
    """Whether a condition depends on the key and the partition only. All records of a key then give the same answer. True for a
    condition with a problem of its own.

    >>> is_of_key("key.id < 3 AND kafka.partition = 0"), is_of_key("key.id < 3 AND value.country = 'DE'")
    (True, False)
    """
    places = {("kafka", "topic"), ("kafka", "partition")}
    try:
        names = [tuple(part.lower() for part in parts) for parts in columns(parse(where).tree)]
    except SqlProblem:
        return True
    return all(parts[0] == "key" or parts[:2] in places for parts in names)


def _kinds(literals: frozenset[exp.Expr]) -> int:
    return len({bool(item.args.get("is_string")) for item in literals})


def _texts(literals: frozenset[exp.Expr]) -> set[str]:
    """Literals as a collation that knows no case may compare them."""
    return {item.name.casefold().strip() for item in literals}


# A rule is compared with every earlier one of its topic.
@lru_cache(maxsize=4096)
def _tree(sql: str) -> exp.Expr:
    tree = parse(sql).tree.unnest()
    for paren in list(tree.find_all(exp.Paren)):
        paren.replace(paren.this)
    for name in tree.find_all(exp.Identifier):
        name.set("this", name.name.lower())
        name.set("quoted", False)
    return tree


def _is_true(tree: exp.Expr) -> bool:
    return isinstance(tree, exp.Boolean) and bool(tree.this)


def _joined_by_and(tree: exp.Expr) -> Iterator[exp.Expr]:
    if isinstance(tree, exp.And):
        yield from _joined_by_and(tree.left)
        yield from _joined_by_and(tree.right)
    else:
        yield tree


def _implies(premise: exp.Expr, conclusion: exp.Expr) -> bool:
    if premise == conclusion:
        return True
    premise_values, conclusion_values = _column_values(premise), _column_values(conclusion)
    if premise_values is None or conclusion_values is None or premise_values[0] != conclusion_values[0]:
        return False
    return premise_values[1] <= conclusion_values[1]


def _column_values(tree: exp.Expr) -> tuple[exp.Expr, frozenset[exp.Expr]] | None:
    """``column = literal`` and ``column IN (literals)`` as the column and its values."""
    if isinstance(tree, exp.EQ):
        sides = (tree.left, tree.right)
        for column, literal in (sides, sides[::-1]):
            if isinstance(column, exp.Column) and isinstance(literal, exp.Literal):
                return column, frozenset([literal])
    if isinstance(tree, exp.In) and isinstance(tree.this, exp.Column):
        literals = frozenset(item for item in tree.expressions if isinstance(item, exp.Literal))
        if literals and len(literals) == len(set(tree.expressions)):
            return tree.this, literals
    return None


_NULL_IN_NULL_OUT = (
    exp.EQ,
    exp.NEQ,
    exp.GT,
    exp.GTE,
    exp.LT,
    exp.LTE,
    exp.In,
    exp.Like,
    exp.ILike,
    exp.Between,
)


def _never_takes_tombstones(tree: exp.Expr) -> bool:
    """True when the condition is plainly null or false where ``value`` is null."""
    if isinstance(tree, exp.And):
        return _never_takes_tombstones(tree.left) or _never_takes_tombstones(tree.right)
    if isinstance(tree, exp.Or):
        return _never_takes_tombstones(tree.left) and _never_takes_tombstones(tree.right)
    if isinstance(tree, exp.Not):
        operand = tree.this
        if isinstance(operand, exp.Is):
            return isinstance(operand.expression, exp.Null) and _is_value_column(operand.this)
        # NOT of null is null; but NOT of an AND or an OR that is false is true.
        return isinstance(operand, _NULL_IN_NULL_OUT) and _never_takes_tombstones(operand)
    if isinstance(tree, _NULL_IN_NULL_OUT):
        return _is_value_column(tree.this) or (isinstance(tree, exp.Binary) and _is_value_column(tree.expression))
    return _is_value_column(tree)


def _is_value_column(tree: object) -> bool:
    """A field of ``value``, or ``value`` itself: null in a tombstone."""
    return isinstance(tree, exp.Column) and any(parts[0].lower() == "value" for parts in columns(tree))


TextSpan: TypeAlias = tuple[int, int]
"""Characters of an expression: the first, and the one after the last."""

_FIRST = """
    aggregate array_append array_compact array_contains array_distinct array_except array_insert array_intersect array_join
    array_max array_min array_position array_prepend array_remove array_size array_sort array_union arrays_overlap arrays_zip
    cardinality element_at exists filter flatten forall get map_concat map_contains_key map_entries map_filter
    map_from_arrays map_from_entries map_keys map_values map_zip_with reduce sequence size slice sort_array to_csv to_json
    to_xml transform transform_keys transform_values try_element_at zip_with
    """
_SECOND = """
    array_contains array_except array_intersect array_position array_remove array_union arrays_overlap arrays_zip element_at
    map_concat map_contains_key map_from_arrays map_zip_with sequence try_element_at zip_with
    """
TYPED_ARGUMENTS: frozenset[tuple[str, int]] = frozenset(
    [*((name, 0) for name in _FIRST.split()), *((name, 1) for name in _SECOND.split())]
)
"""Functions and the places of their arguments that refuse a NULL without a type. The function is null for a null there."""


def without_root(sql: str, root: str) -> str:
    """The expression with NULL for everything under ``root``, which is null in every record."""
    expression = parse(sql)
    places: list[TextSpan] = []
    for column in expression.tree.find_all(exp.Column):
        parts = column.parts
        if parts[0].name.lower() == root and next(columns(column), None) is not None:
            places.append((int(parts[0].meta["start"]), int(parts[-1].meta["end"]) + 1))
    return with_nulls(expression, places)


def with_nulls(expression: Expression, places: Iterable[TextSpan]) -> str:
    """The expression with NULL for some of its columns. ``places``: where their names stand."""
    sql = expression.sql
    for start, end in sorted(null_spans(expression, places), reverse=True):
        sql = f"{sql[:start]}NULL{sql[end:]}"
    return sql


def null_spans(expression: Expression, places: Iterable[TextSpan]) -> set[TextSpan]:
    """The parts of an expression that NULL replaces if some of its columns are null; none of them is in another."""
    tokens = expression.tokens
    closings = closing_places(tokens)
    spans = {_null_span(tokens, closings, *place) for place in places}
    return {
        (start, end)
        for start, end in spans
        if not any((first, last) != (start, end) and first <= start and end <= last for first, last in spans)
    }


def _null_span(tokens: Sequence[Token], closings: Mapping[int, int], start: int, end: int) -> TextSpan:
    first = max(at for at, token in enumerate(tokens) if token.start <= start)
    last = min(at for at, token in enumerate(tokens) if token.end + 1 >= end)
    # A field of a call's result: the column is within the call.
    for opening, closing in closings.items():
        if opening < first < closing < last:
            is_call = opening and tokens[opening - 1].text.lower() in RECORD_FUNCTIONS
            first = opening - 1 if is_call else opening
    while True:
        next_kind = _kind(tokens, last + 1)
        if next_kind == TokenType.L_BRACKET:
            last = closings[last + 1]
            continue
        if next_kind == TokenType.DOT:
            last += 2
            continue
        opening, place = _argument(tokens, closings, first, last)
        if opening is None:
            return tokens[first].start, tokens[last].end + 1
        closing = closings[opening]
        if opening and (tokens[opening - 1].text.lower(), place) in TYPED_ARGUMENTS:
            first, last = opening - 1, closing
        elif (first, last) == (opening + 1, closing - 1) and _only_groups(tokens, opening, closing):
            first, last = opening, closing
        else:
            return tokens[first].start, tokens[last].end + 1


def _argument(tokens: Sequence[Token], closings: Mapping[int, int], first: int, last: int) -> tuple[int | None, int]:
    """Returns the opening parenthesis of the list in which the tokens are one whole item, and the item's place in the list. The
    parenthesis is None if the tokens are no such item."""
    ends = (TokenType.COMMA, TokenType.L_PAREN), (TokenType.COMMA, TokenType.R_PAREN)
    if _kind(tokens, first - 1) not in ends[0] or _kind(tokens, last + 1) not in ends[1]:
        return None, 0
    opening = max((at for at, closing in closings.items() if at < first and last < closing), default=None)
    if opening is None:
        return None, 0
    commas = [at for at in range(opening, first) if tokens[at].token_type == TokenType.COMMA]
    inner_pairs = [(at, closing) for at, closing in closings.items() if opening < at < first]
    return opening, sum(not any(at < comma < closing for at, closing in inner_pairs) for comma in commas)


def _only_groups(tokens: Sequence[Token], opening: int, closing: int) -> bool:
    """Whether a pair of parentheses plainly is around an expression, neither of a call nor of IN."""
    if opening and tokens[opening - 1].text.lower() in RECORD_FUNCTIONS:
        return False
    next_kind = _kind(tokens, closing + 1)
    previous_kind = _kind(tokens, opening - 1)
    return next_kind in (TokenType.L_BRACKET, TokenType.DOT) or previous_kind in (
        None,
        TokenType.L_PAREN,
        TokenType.COMMA,
    )


def _kind(tokens: Sequence[Token], at: int) -> TokenType | None:
    return tokens[at].token_type if 0 <= at < len(tokens) else None


def closing_places(tokens: Sequence[Token]) -> dict[int, int]:
    """The place of each opening parenthesis or bracket → the place of the closing one."""
    closings: dict[int, int] = {}
    openings: list[int] = []
    for at, token in enumerate(tokens):
        if token.token_type in (TokenType.L_PAREN, TokenType.L_BRACKET):
            openings.append(at)
        elif token.token_type in (TokenType.R_PAREN, TokenType.R_BRACKET) and openings:
            closings[openings.pop()] = at
    return closings
