"""Expressions of views: rows under their aliases, with aggregates where they may stand.

A view is computed anew for the keys that a change touches. Therefore an expression of a view may use every deterministic
function of one row, and the aggregates of ``AGGREGATES``. It may not look at rows of other keys, as queries and window
functions do.

A collection has no order of its own. ``ordered`` sorts each collection by its elements: structs by their first field, then by
the second field and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from sqlglot import exp
from sqlglot.tokenizer_core import TokenType

from zync_assets.pipeline import Rule, Shape, View, ViewTable
from zync_assets.pipeline_file.conditions import closing_places
from zync_assets.pipeline_file.expressions import (
    RECORD_ROOTS,
    Expression,
    Scope,
    SqlProblem,
    columns,
    function_problems,
    parse,
    row_problems,
)
from zync_assets.pipeline_file.fields import suggestion, word_list
from zync_assets.queries import Path, view_definition
from zync_assets.spark.sql import edited, leaves

if TYPE_CHECKING:
    import pyarrow as pa

COLLECTIONS = ("collect_list", "collect_set", "array_agg")
AGGREGATES = ("count", "sum", "min", "max", "avg", "bool_and", "bool_or", *COLLECTIONS)
"""The aggregates of a view."""
_CURES = {
    "any": "use bool_or",
    "every": "use bool_and",
    "some": "use bool_or",
    "mean": "use avg",
    "count_if": "use count(*) FILTER (WHERE …)",
    "first": "use min or max",
    "first_value": "use min or max",
    "last": "use min or max",
    "last_value": "use min or max",
    "any_value": "use min or max",
    "max_by": "use max(struct(y, x)).x",
    "min_by": "use min(struct(y, x)).x",
    "listagg": "use array_join(collect_list(…), ',')",
    "string_agg": "use array_join(collect_list(…), ',')",
    "try_sum": "use sum of a wider type",
    "try_avg": "use avg of a wider type",
}
_MAINTENANCE = "a view can't be maintained with it; aggregate by the view's `key:`"
ROWS = Scope(
    query="a view joins its tables in `from:`",
    window=_MAINTENANCE,
    window_call=_MAINTENANCE,
    generator="a view has a row for each joined row of its tables; keep the array as it is",
    clock="use a column of a table",
    aggregate="only the `value:` of a view aggregates",
    cures={},
)
"""The row of each alias."""
GROUPS = Scope(
    query=ROWS.query,
    window=ROWS.window,
    window_call=ROWS.window_call,
    generator=ROWS.generator,
    clock=ROWS.clock,
    aggregate=f"the aggregates of a view are {word_list(AGGREGATES)}",
    aggregates=frozenset(AGGREGATES),
    cures=_CURES,
)
"""The rows of one key of the view, under their aliases."""


@dataclass(frozen=True)
class Call:
    """An aggregate in an expression: the characters of the call, and of the call with its FILTER clause."""

    name: str
    start: int
    end: int

    def holds(self, place: int) -> bool:
        return self.start <= place < self.end


def check_rows(sql: str, aliases: Mapping[str, bool], scope: Scope = ROWS) -> list[str]:
    """The problems of an expression over the rows of ``aliases``; empty if it has none.

    ``aliases``: name in lower case → whether the alias has the default row, which is no whole record.
    """
    try:
        expression = parse(sql, scope)
    except SqlProblem as problem:
        return [str(problem)]
    problems = list(function_problems(expression.tokens, scope)) or [
        *_column_problems(expression.tree, aliases),
        *_aggregate_problems(expression),
    ]
    return list(dict.fromkeys(problems))


def calls(expression: Expression) -> tuple[Call, ...]:
    """The aggregates of an expression."""
    aggregate_calls: list[Call] = []
    tokens, closings = expression.tokens, closing_places(expression.tokens)
    for opening, closing in closings.items():
        name = tokens[opening - 1].text.lower() if opening else ""
        is_field = opening > 1 and tokens[opening - 2].token_type == TokenType.DOT
        if name not in AGGREGATES or is_field:
            continue
        is_filtered = closing + 2 < len(tokens) and tokens[closing + 1].token_type == TokenType.FILTER
        end = closings.get(closing + 2, closing) if is_filtered else closing
        aggregate_calls.append(Call(name, tokens[opening - 1].start, tokens[end].end + 1))
    return tuple(sorted(aggregate_calls, key=lambda call: call.start))


def has_aggregates(sql: str) -> bool:
    """Whether an expression of a view aggregates."""
    return any(name in sql.lower() for name in AGGREGATES) and bool(calls(parse(sql, GROUPS)))


def grouped(sql: str) -> tuple[str, ...]:
    """The SQL that an expression of a view adds to the GROUP BY, beside the view's key. An expression without an aggregate adds
    itself. An expression with aggregates adds the columns outside them. Without such a column, an expression adds nothing."""
    expression = parse(sql, GROUPS)
    column_texts = [sql[start:end] for start, end in _outside(expression)]
    if not calls(expression):
        return (sql,) if column_texts else ()
    return tuple(dict.fromkeys(column_texts))


def with_greatest(sql: str) -> str:
    """The expression with the greatest value of each column that stands outside its aggregates.

    >>> with_greatest("sum(l.qty) + o.fee")
    'sum(l.qty) + max(o.fee)'
    """
    for start, end in sorted(_outside(parse(sql, GROUPS)), reverse=True):
        sql = f"{sql[:start]}max({sql[start:end]}){sql[end:]}"
    return sql


def _outside(expression: Expression) -> list[tuple[int, int]]:
    """The characters of the columns that stand outside aggregates."""
    inside = calls(expression)
    spans: list[tuple[int, int]] = []
    for column in expression.tree.find_all(exp.Column):
        start = int(column.parts[0].meta["start"])
        if next(columns(column), None) is not None and not any(call.holds(start) for call in inside):
            spans.append((start, int(column.parts[-1].meta["end"]) + 1))
    return spans


def aggregated(sql: str) -> tuple[tuple[str, str], ...]:
    """(name, the expression that it aggregates, null where its FILTER leaves the row out) of each aggregate.

    >>> aggregated("sum(l.qty) FILTER (WHERE l.open) + o.fee")
    (('sum', 'CASE WHEN (l.open) THEN (l.qty) END'),)
    """
    expression = parse(sql, GROUPS)
    closings = closing_places(expression.tokens)
    starts = {token.start: at for at, token in enumerate(expression.tokens)}
    pairs: list[tuple[str, str]] = []
    for call in calls(expression):
        opening = starts[call.start] + 1
        closing = closings[opening]
        argument = expression.tokens[opening + 1 : closing]
        if argument and argument[0].token_type == TokenType.DISTINCT:
            argument = argument[1:]
        if not argument or argument[0].token_type == TokenType.STAR:
            continue
        argument_sql = sql[argument[0].start : argument[-1].end + 1]
        if call.end > expression.tokens[closing].end + 1:
            # FILTER ( WHERE … )
            filter_span = expression.tokens[closing + 4].start, expression.tokens[closings[closing + 2]].start
            argument_sql = f"CASE WHEN ({sql[filter_span[0] : filter_span[1]].strip()}) THEN ({argument_sql}) END"
        pairs.append((call.name, argument_sql))
    return tuple(pairs)


def ordered(sql: str) -> str:
    """The expression with each of its collections sorted.

    >>> ordered("collect_list(struct(l.position, l.sku))")
    'sort_array(collect_list(struct(l.position, l.sku)))'
    """
    for call in reversed(calls(parse(sql, GROUPS))):
        if call.name in COLLECTIONS:
            sql = f"{sql[: call.start]}sort_array({sql[call.start : call.end]}){sql[call.end :]}"
    return sql


def aliases_of(sql: str) -> frozenset[str]:
    """The aliases that an expression names, in lower case."""
    return frozenset(parts[0].lower() for parts in columns(parse(sql, GROUPS).tree))


def is_column(sql: str) -> bool:
    """Whether an expression is a column, or a field of a column."""
    return isinstance(parse(sql, GROUPS).tree.unnest(), exp.Column | exp.Dot)


def _aggregate_problems(expression: Expression) -> Iterator[str]:
    aggregate_calls = calls(expression)
    for call in aggregate_calls:
        if any(outer_call is not call and outer_call.holds(call.start) for outer_call in aggregate_calls):
            yield f"`{call.name}()` stands in another aggregate; an aggregate sees the rows of one key"
    for token in expression.tokens:
        if token.token_type == TokenType.ORDER_BY:
            yield "must not hold ORDER BY; a collection is ordered by its elements: put the field to order by first"


def _column_problems(tree: exp.Expr, aliases: Mapping[str, bool]) -> Iterator[str]:
    for parts in columns(tree):
        name, alias = ".".join(parts), parts[0].lower()
        if alias not in aliases:
            yield f"`{name}` is not known here; {_cure(parts, aliases)}"
        else:
            yield from row_problems(parts, aliases[alias])


def _cure(parts: tuple[str, ...], aliases: Collection[str]) -> str:
    field = parts[-1]
    if parts[0].lower() in RECORD_ROOTS:
        return f"a view sees rows, not records: write {_fields(field, aliases)}"
    if len(parts) == 1:
        return f"write {_fields(field, aliases)} (text is written '{field}')"
    return (
        f"no table of the view has the alias `{parts[0]}`; aliases: {word_list(aliases)}{suggestion(parts[0], aliases)}"
    )


def _fields(field: str, aliases: Collection[str]) -> str:
    return " or ".join(f"`{alias}.{field}`" for alias in aliases) or "an alias of `tables:` before it"


Rewrite: TypeAlias = Callable[[str], str]
"""An expression with the lake's names of its fields."""


def with_names(rule: Rule, view: View, record_rewrites: Mapping[str, Rewrite], row_rewrite: Rewrite) -> View:
    """A rule's view with the lake's names.

    ``record_rewrites``: alias → for expressions over the records of its topic; ``row_rewrite``: for expressions over rows.
    """

    joins = (
        replace(join, on=tuple((row_rewrite(near_sql), row_rewrite(alias_sql)) for near_sql, alias_sql in join.on))
        for join in view.joins
    )
    where, choice = (edited(sql, row_rewrite) for sql in (view.where, view.on_duplicate_key))
    tables = tuple(table_with_names(item, record_rewrites[item.alias]) for item in view.tables)
    definition = view_definition(view, rule.key, rule.value, rule.headers, rule.out)
    query = replace(view, tables=tables, joins=tuple(joins), where=where, on_duplicate_key=choice)
    return replace(
        query,
        definition=view.definition or definition,
        file_definition=view.file_definition or definition,
    )


def table_with_names(item: ViewTable, rewrite: Rewrite) -> ViewTable:
    """The table with the lake's names. ``rewrite``: for expressions over the records of its topic."""
    row, deleted = (edited(sql, rewrite) for sql in (item.row, item.deleted))
    return replace(item, key=edited(item.key, rewrite), row=row, deleted=deleted)


def row_path(item: ViewTable, record: Mapping[str, pa.DataType | None]) -> list[str]:
    """The path of a table's row in a record, where the row is the default row or a field of the record. ``record``: the types of
    the record's columns."""
    # Here alone: it loads pyarrow, which the reference of the keys does without.
    from zync_assets.codecs.fields import is_envelope

    path = [part.strip().strip("`") for part in (item.row or "value").split(".")]
    kind = record.get(path[0].lower())
    return [*path, "after"] if item.row is None and kind is not None and is_envelope(kind) else path


def row_type(item: ViewTable, record: Mapping[str, pa.DataType | None]) -> pa.DataType | None:
    """The type of a table's row; None where another expression makes the row. ``record``: as in ``row_path``."""
    from zync_assets.codecs.fields import type_at

    column, *names = row_path(item, record)
    return type_at(record.get(column.lower()), names)


def row_expressions(
    rule: Rule, columns: Mapping[str, Mapping[str, pa.DataType]]
) -> Iterator[tuple[str, Mapping[str, tuple[str, Path]]]]:
    """The expressions over the rows of a rule's tables, and those that make the rows. Each has the names that it may begin with:
    name → the topic, and the path in a record of it. ``columns``: topic → the types of its columns."""
    rows: dict[str, tuple[str, Path]] = {}
    for item in rule.tables:
        rows[item.alias.lower()] = item.topic, tuple(row_path(item, columns.get(item.topic, {})))
        for shape in (item.key, item.row, item.deleted):
            yield from ((sql, {"": (item.topic, ())}) for _, sql in leaves(shape, ""))
    pairs = [pair for item in rule.lookups for pair in item.on]
    shapes: list[Shape] = [rule.key, rule.value, rule.headers, rule.keep, rule.explode] if rows else []
    if rule.view is not None:
        pairs += [pair for join in rule.view.joins for pair in join.on]
        shapes += [rule.view.where, rule.view.on_duplicate_key]
    yield from ((sql, rows) for shape in shapes for _, sql in leaves(shape, ""))
    yield from ((sql, rows) for pair in pairs for sql in pair)
