"""The ``lookup`` of a rule: the rows that the rule finds for its outputs, and what happens if a row is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from zync_assets.pipeline_file.conditions import conjuncts, equality
from zync_assets.pipeline_file.expressions import SqlProblem, check_expression, parse, roots
from zync_assets.pipeline_file.fields import Fields, kind, word_list
from zync_assets.pipeline_file.key import known_names
from zync_assets.pipeline_file.keys import LOOKUP, VIEW, Section
from zync_assets.pipeline_file.source import Scalar, YamlTable
from zync_assets.pipeline_file.topics import Check
from zync_assets.pipeline_file.views import alias_problem, read_table
from zync_assets.queries import Lookup, Missing

WAIT_MS = 600_000
"""How long a record waits for its row, if the file does not say."""
_FORM = "write {c: {table: Customers, on: c.id = in.value.after.customer_id, missing: wait}}"


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
        fields.problem("lookup", f"{fault}; {_FORM}")
        return LookedUpRows(is_known=False)
    lookup_fields = Fields(node, fields.key("lookup"), fields.problems, None)
    rows: dict[str, bool] = {}
    lookups: list[Lookup] = []
    for alias, entry in lookup_fields.entries.items():
        if message := alias_problem(alias, list(rows)):
            lookup_fields.problem(alias, message)
        if not isinstance(entry.node, YamlTable):
            lookup_fields.problem(alias, f"must be a mapping, not {kind(entry.node)}; {_FORM}")
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
    sides, pairs, problems = _pairs(on, alias, section.sides, is_default) if on is not None else ([], [], [])
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


def _pairs(
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
