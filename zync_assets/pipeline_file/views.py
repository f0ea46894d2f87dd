"""The section of a view: its tables, its joins, and what makes a view one that can be maintained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zync_assets.pipeline import Headers, Rule, Shape, Side, View, ViewTable
from zync_assets.pipeline_file.expressions import SqlProblem
from zync_assets.pipeline_file.fields import Fields, kind
from zync_assets.pipeline_file.joins import JoinTree, alias_problem, read_from, read_table
from zync_assets.pipeline_file.key import known_names
from zync_assets.pipeline_file.keys import VIEW
from zync_assets.pipeline_file.source import Scalar, YamlTable
from zync_assets.pipeline_file.topics import Check, read_condition
from zync_assets.pipeline_file.view_expressions import GROUPS, ROWS, aliases_of, check_rows, has_aggregates, is_column
from zync_assets.spark.sql import leaves

_FORM = "write {o: shop.orders}, or {o: {topic: shop.orders}}"
_TABLE_KEYS = next(key.keys for key in VIEW.keys if key.name == "tables")


@dataclass(frozen=True)
class FromClause:
    """The tables and joins of a view. ``rows``: alias → whether it has the default row; None: not known, for want of tables."""

    tables: tuple[ViewTable, ...]
    tree: JoinTree | None
    rows: Mapping[str, bool] | None

    def check(self, aggregates: bool = False) -> Check:
        """The check of an expression over the joined rows. ``aggregates``: whether it may aggregate."""
        if self.rows is None:
            return lambda sql: ()
        rows = {alias.lower(): default for alias, default in self.rows.items()}
        return lambda sql: check_rows(sql, rows, GROUPS if aggregates else ROWS)


def read_query(fields: Fields, topic: Callable[[Fields, str], str | None]) -> FromClause:
    """The ``tables`` and the ``from`` of a view. ``topic``: reads the name of an input."""
    tables, rows = _tables(fields, topic)
    sql = fields.text("from", "name the joined aliases, such as o JOIN c ON o.customer_id = c.id")
    if sql is None or rows is None:
        return FromClause(tables, None, rows)
    tree, problems, unknown = read_from(sql, rows)
    for message in problems:
        fields.problem("from", message)
    if tree is not None:
        for alias in rows:
            if alias not in tree.aliases:
                fields.problem("tables", f"`{alias}` is not joined; join it in `from:`, or remove it")
    # An alias that `from:` alone has is one problem; the other expressions may name it too.
    return FromClause(tables, tree, {**dict.fromkeys(unknown, False), **rows})


def read_view(
    fields: Fields, name: str, out: str, query: FromClause, key: Shape, value: Shape, headers: Headers | None
) -> Rule | None:
    """The rule of a view; None if a part of the query is not known. Reads ``where`` and ``on-duplicate-key``.

    The rule has a side for each topic, under the first alias of the topic.
    """
    where = read_condition(fields, "where", query.check()) if _is_condition(fields) else None
    choice = fields.text("on-duplicate-key")
    if choice is not None:
        for message in query.check(aggregates=_aggregates(value))(choice):
            fields.problem("on-duplicate-key", message)
    if value is None and isinstance(node := fields.node("value"), Scalar) and node.value is None:
        fields.problem("value", "must not be null; a view makes its tombstones itself: name the fields of a row")
    if query.tree is None:
        return None
    try:
        _check_key(fields, key, query.tree)
        view = View(query.tables, query.tree.root, query.tree.joins, where, choice)
        aliases = {table.topic: table.alias for table in reversed(query.tables)}
        topics = dict.fromkeys(table.topic for table in query.tables)
        sides = tuple(Side(aliases[topic], topic) for topic in topics)
        return Rule("view", name, sides, out, key, value, headers, view=view)
    except SqlProblem:
        # An expression with problems is reported already.
        return None


def check_pools(rules: Sequence[tuple[Rule, Fields]], pools: Mapping[str, str]) -> None:
    """A problem for each topic that is both a table and an event input of a staging pool, and for each output of a view that
    another rule has too. ``pools``: output topic → staging pool."""
    for at, (rule, fields) in enumerate(rules):
        for item in rule.lookups:
            if item.table.topic in rule.topics:
                message = (
                    f"`{item.table.topic}` is an event input of the rule itself; a topic is a table or an event input"
                )
                fields.problem("lookup", message)
        for earlier, place in rules[:at]:
            if rule.out == earlier.out and (rule.view or earlier.view):
                owner = f"view `{earlier.name}`" if earlier.view else f"rule `{earlier.name}`"
                fields.problem(
                    "out",
                    f"`{rule.out}` is the topic of {owner} (line {place.line}); a view has a topic of its own: name another",
                )
            if pools.get(rule.out) != pools.get(earlier.out):
                continue
            uses, earlier_uses = _uses(rule), _uses(earlier)
            for topic in uses.keys() & earlier_uses.keys():
                if uses[topic][0] != earlier_uses[topic][0]:
                    use, key = earlier_uses[topic][1], uses[topic][2]
                    fields.problem(
                        key,
                        f"`{topic}` is {use} `{earlier.name}` (line {place.line}) in the pool {pools.get(rule.out)}; a"
                        " topic is a table or an event input of a pool: use two pools, one for views, one for other rules",
                    )


def _uses(rule: Rule) -> dict[str, tuple[bool, str, str]]:
    """Topic → whether it is a table, the use in words, and the key of the rule that names the topic."""
    if rule.view is not None:
        return {table.topic: (True, "a table of view", "tables") for table in rule.tables}
    key = "records" if rule.group is not None else None
    side_uses = {side.topic: (False, "an event input of rule", key or side.name) for side in rule.sides}
    return side_uses | {table.topic: (True, "a table of rule", "lookup") for table in rule.tables}


def _is_condition(fields: Fields) -> bool:
    if isinstance(fields.node("where"), YamlTable):
        fields.problem(
            "where", "must be one expression over the rows of the view's tables, such as o.status <> 'draft'"
        )
        return False
    return True


def _aggregates(value: Shape) -> bool:
    try:
        return any(has_aggregates(sql) for _, sql in leaves(value, "value"))
    except SqlProblem:
        return True


def _check_key(fields: Fields, key: Shape, tree: JoinTree) -> None:
    key_aliases: set[str] = set()
    for path, sql in leaves(key, "key"):
        names = aliases_of(sql)
        key_aliases |= names
        # Any other expression may have a value for a missing row, as coalesce() has.
        if names & tree.optional and is_column(sql):
            fields.problem(
                "key",
                f"`{path}` is null where the LEFT JOIN finds no row, and a row without a key goes into quarantine; write"
                f" coalesce({sql}, …), or JOIN `{next(iter(names))}`",
            )
    if "key" not in fields:
        return
    if not key_aliases:
        fields.problem("key", "names no column; a view needs a key that tells its rows apart, such as {id: o.id}")
    elif _holds_null(key):
        fields.problem("key", "holds a null, and a row with a null in its key goes into quarantine; remove the field")


def _holds_null(key: Shape) -> bool:
    if isinstance(key, Mapping):
        return any(map(_holds_null, key.values()))
    return key is None or key.strip().lower() == "null"


def _tables(
    fields: Fields, topic: Callable[[Fields, str], str | None]
) -> tuple[tuple[ViewTable, ...], Mapping[str, bool] | None]:
    """The tables, and the aliases of all entries, those with problems included."""
    node = fields.node("tables")
    if node is None:
        fields.problem("tables", f"is missing; {_FORM}")
        return (), None
    if not isinstance(node, YamlTable) or not node.entries:
        fault = "is empty" if isinstance(node, YamlTable) else f"must be a mapping of aliases, not {kind(node)}"
        fields.problem("tables", f"{fault}; {_FORM}")
        return (), None
    section = Fields(node, fields.key("tables"), fields.problems, None)
    tables: list[ViewTable] = []
    rows: dict[str, bool] = {}
    for alias, entry in section.entries.items():
        if message := alias_problem(alias, list(rows)):
            section.problem(alias, message)
        item = entry.node
        if isinstance(item, YamlTable):
            table_fields = Fields(item, section.key(alias), fields.problems, known_names(_TABLE_KEYS))
            table = read_table(table_fields, alias, topic(table_fields, "topic"))
        else:
            name = topic(section, alias)
            table = None if name is None else ViewTable(alias, name)
        rows[alias] = not (isinstance(item, YamlTable) and any(entry.key == "row" for entry in item.entries))
        if table is not None:
            tables.append(table)
    return tuple(tables), rows
