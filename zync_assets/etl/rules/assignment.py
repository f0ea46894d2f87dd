"""Which rule takes a record, and the results of the rules that make one output of each record.

The frames of records and results are those of ``etl.rules.kind``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zync_assets.errors import EtlError
from zync_assets.etl.rules.kind import LACKING, Columns, Ordering, OutputColumns, source_sql
from zync_assets.etl.rules.shapes import COLUMN as HEADERS
from zync_assets.etl.rules.shapes import expression_type, headers_sql, made_sql, schema_of
from zync_assets.pipeline import Input, Rule
from zync_assets.spark.sql import name_sql, text_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
KEPT = "kept"
"""The column with the output's own condition: whether the output is kept. Null if the output's topic has no condition."""
FAILED, ENDED = -1, -2
"""Values in place of a rule's index. FAILED: an expression fails on the record. ENDED: the record's source row ended
(``etl.hold``)."""


@dataclass(frozen=True)
class Assignment:
    """A topic's new records, and the conditions that choose a record's rule. The first true condition decides.

    ``conditions``: (index of the rule, SQL). ``deletes``: whether a record deletes its source row, as SQL. ``decided``: the
    frame has the columns ``fate`` (``ended``, ``waiting`` or null), ``at`` (``ord`` of the output that the record follows, or
    null) and ``follows``.
    """

    item: Input
    ordering: Ordering
    frame: DataFrame
    conditions: Sequence[tuple[int, str]]
    deletes: str = "false"
    decided: bool = False

    def choice(self, sql_by_index: Mapping[int, str], otherwise: str = "NULL", none: str = "NULL") -> str:
        """An SQL expression for a record. ``sql_by_index``: index of the record's rule → SQL. ``otherwise``:
        the SQL for a rule that is not in ``sql_by_index``. ``none``: the SQL if no rule takes the record.

        Each choice repeats the conditions. Spark evaluates a repeated condition once anyway. With a shared column of the
        rule's index, Spark would not see which fields of a record are used, and would read every field.
        """
        cases = " ".join(
            f"WHEN {condition} THEN {sql_by_index.get(index, otherwise)}" for index, condition in self.conditions
        )
        return f"CASE {cases} ELSE {none} END" if cases else none

    def by(self, index: int) -> DataFrame:
        """The records of the rule ``index``."""
        return self.frame.where(self.choice({index: "true"}, "false", "false"))


def assign(
    item: Input,
    ordering: Ordering,
    frame: DataFrame,
    rules: Sequence[Rule],
    failure_condition: str | None = None,
    *,
    deletes: str = "false",
    decided: bool = False,
) -> Assignment:
    """Give each record to the first of a staging pool's ``rules`` that names its topic and whose ``where`` holds.

    ``failure_condition``: a condition for the records with a known failure. Such a record goes to no rule (FAILED), and no rule's
    condition is evaluated for the record. ``deletes``, ``decided``: as in ``Assignment``.
    """
    fate_conditions = [] if failure_condition is None else [(FAILED, failure_condition)]
    fate_conditions += [(ENDED, "coalesce(fate = 'ended', false)")] if decided else []
    return Assignment(item, ordering, frame, [*fate_conditions, *conditions(item, frame, rules)], deletes, decided)


def conditions(item: Input, frame: DataFrame, rules: Sequence[Rule]) -> list[tuple[int, str]]:
    """The rules that name a topic, by index, each with its condition, in the order in which they are asked."""
    return [
        (index, f"coalesce({_condition(frame, rule, rule.side(item.topic).where)}, false)")
        for index, rule in enumerate(rules)
        if item.topic in rule.topics and rule.part_of is None
    ]


def _condition(frame: DataFrame, rule: Rule, where: str | None) -> str:
    if where is None:
        return "value IS NOT NULL"
    try:
        kind = expression_type({"": frame}, f"({where})", rule.name, "where")
    except EtlError:
        if has_schema(frame):
            raise
        return "false"  # it asks for a field of a value, and all that came are tombstones
    if kind.simpleString() not in ("boolean", "void"):
        raise EtlError(f"rule {rule.name}, where: {where} is {kind.simpleString()}; it must be a condition")
    return f"({where})"


def has_schema(frame: DataFrame) -> bool:
    """Whether a topic's values have a type yet: it has none before the first value that is not null."""
    return schema_of(frame)["value"].dataType.simpleString() != "void"


def singles(
    assignment: Assignment,
    rules: Sequence[Rule],
    targets: Mapping[int, OutputColumns],
    others: Sequence[int],
    untyped: Sequence[int],
    columns_of: Columns,
    *,
    held: bool = False,
) -> DataFrame:
    """The results of a topic's new records in one pass, without the records of ``others``.

    ``targets``: the pool's rules of a ``single`` kind, by index; ``others``: the indexes of the rules of other kinds;
    ``untyped``: rules with unresolved types, which must take no record (kind ``untyped``). ``columns_of``: see ``Columns``.
    ``held``: as in ``Emission``.

    A record without a rule is unmatched, or dropped if the pipeline file says so. A tombstone without a rule is dropped,
    since Debezium writes a tombstone after each delete.
    """
    fate = "dropped" if assignment.item.unmatched == "drop" else "unmatched"
    kinds = dict.fromkeys(targets, "out") | dict.fromkeys(untyped, "untyped") | {FAILED: "quarantined", ENDED: "ended"}
    fates = assignment.choice(
        {index: text_sql(name) for index, name in kinds.items()},
        none=f"CASE WHEN in.value IS NULL THEN 'dropped' ELSE '{fate}' END",
    )
    ordering, topic = assignment.ordering, assignment.item.topic
    order = ordering.sql(topic, "kafka.partition", "kafka.offset")
    none = (f"CAST(NULL AS bigint) AS {name}" for name in ("other_row", "joined", "exact"))
    rows = ("row", "CAST(changes AS int) AS changes", *none, f"array({order}) AS ords")
    follows = "CAST(NULL AS int)"
    if assignment.decided:
        fates = f"CASE WHEN {fates} = 'out' AND fate = 'waiting' THEN 'pending' ELSE {fates} END"
        # A pending record of an earlier batch may have a later time than both sides of a pair that came late.
        order, follows = f"greatest(at, {order})", "follows"
    deletes = assignment.choice(dict.fromkeys(targets, assignment.deletes), "false", assignment.deletes)
    rows += (f"{follows} AS follows", f"{deletes} AS deletes")
    index_choice = assignment.choice({index: str(index) for index in (*targets, *untyped)})
    sides: dict[str, dict[int, str]] = {}
    for index, target in targets.items():
        for name, sql in columns_of(rules[index], target):
            sides.setdefault(name, {})[index] = sql
    frame = assignment.frame
    if others:
        frame = frame.where(assignment.choice(dict.fromkeys(others, "false"), "true", "true"))
    extra_columns = (*ordering.columns, "old", *(("fate", "at", "follows") if assignment.decided else ()))
    return frame.selectExpr("kafka", "key", "value", "struct(kafka, key, value) AS in", *extra_columns).selectExpr(
        f"{fates} AS kind",
        f"CAST({index_choice} AS int) AS rule",
        f"{order} AS ord",
        f"array({source_sql(ordering.places[topic], 'kafka.partition', 'kafka.offset')}) AS source",
        "0 AS last",
        "CAST(old AS int) AS waited",
        "CAST(NULL AS bigint) AS hash",
        *(rows if held else ()),
        *(f"{assignment.choice(choice)} AS {name_sql(name)}" for name, choice in sides.items()),
    )


def without_dropped(results: DataFrame, rules: Iterable[Rule]) -> DataFrame:
    """The results, where an output is dropped if its own condition is false."""
    # Without conditions, skips ``results.columns``, which takes Spark as long as the analysis of the whole batch.
    if all(rule.keep is None for rule in rules) or KEPT not in results.columns:
        return results
    names = [name_sql(name) for name in results.columns if name not in ("kind", KEPT)]
    return results.selectExpr(f"CASE WHEN kind = 'out' AND NOT {KEPT} THEN 'dropped' ELSE kind END AS kind", *names)


def columns(rule: Rule, target: OutputColumns) -> list[tuple[str, str]]:
    """The columns for a rule's key, value and headers, each with the SQL of its value."""
    columns = [
        (side[0], if_kept(rule, made_sql(shape, side[1], side[2])))
        for shape, side in ((rule.key, target.key), (rule.value, target.value))
        if side is not None
    ]
    if target.headers:
        headers = "NULL" if rule.headers is None else headers_sql(rule.headers)
        columns.append(("headers", if_kept(rule, f"CAST({headers} AS {HEADERS})")))
    if target.lacking:
        columns.append((LACKING, f"array_compact(array({', '.join(target.lacking)}))"))
    if rule.keep is not None:
        columns.append((KEPT, f"coalesce({rule.keep}, false)"))
    return columns


def if_kept(rule: Rule, sql: str) -> str:
    """A rule's expression, evaluated only if the output's own condition is true. A dropped output can't fail."""
    return sql if rule.keep is None else f"CASE WHEN {rule.keep} THEN {sql} END"
