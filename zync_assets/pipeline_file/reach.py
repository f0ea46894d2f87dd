"""Whether an earlier rule plainly leaves a later one nothing: where its ``where`` is implied by the later rule's.

``None`` stands for a rule without ``where``: it takes everything but tombstones. Only what is plain in the text counts;
where this module says nothing, a rule may still never match.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from sqlglot import exp

from zync_assets.pipeline_file.expressions import columns, parse


def leaves_nothing(earlier: str | None, later: str | None) -> bool:
    """True when every record that ``later`` would take is taken by ``earlier``. Both are conditions that parse."""
    if earlier is None:
        return later is None or _never_takes_tombstones(_tree(later))
    earlier_tree = _tree(earlier)
    if _is_true(earlier_tree):
        return True
    if later is None:
        return False
    conjuncts = list(_conjuncts(_tree(later)))
    return all(any(_implies(given, wanted) for given in conjuncts) for wanted in _conjuncts(earlier_tree))


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


def _conjuncts(tree: exp.Expr) -> Iterator[exp.Expr]:
    if isinstance(tree, exp.And):
        yield from _conjuncts(tree.left)
        yield from _conjuncts(tree.right)
    else:
        yield tree


def _implies(given: exp.Expr, wanted: exp.Expr) -> bool:
    if given == wanted:
        return True
    given_values, wanted_values = _one_of(given), _one_of(wanted)
    if given_values is None or wanted_values is None or given_values[0] != wanted_values[0]:
        return False
    return given_values[1] <= wanted_values[1]


def _one_of(tree: exp.Expr) -> tuple[exp.Expr, frozenset[exp.Expr]] | None:
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
        inner = tree.this
        if isinstance(inner, exp.Is):
            return isinstance(inner.expression, exp.Null) and _of_value(inner.this)
        # NOT of null is null; but NOT of an AND or an OR that is false is true.
        return isinstance(inner, _NULL_IN_NULL_OUT) and _never_takes_tombstones(inner)
    if isinstance(tree, _NULL_IN_NULL_OUT):
        return _of_value(tree.this) or (isinstance(tree, exp.Binary) and _of_value(tree.expression))
    return _of_value(tree)


def _of_value(tree: object) -> bool:
    """A field of ``value``, or ``value`` itself: null in a tombstone."""
    return isinstance(tree, exp.Column) and any(parts[0].lower() == "value" for parts in columns(tree))
