"""Finds the records that an expression fails on. Spark stops at the first failing record, and does not name the record.

``fails`` is a condition that is true for a record on which an expression fails: Spark's ``try_to_binary`` returns NULL for
any error inside its argument. One pass over a batch therefore finds every failing record. The pass needs the settings
SETTINGS. Otherwise Spark computes an expression that occurs twice once, outside of ``try_to_binary``.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from zync_assets.etl.headers import headers_sql
from zync_assets.etl.join_keys import key_types
from zync_assets.etl.matching import Target, conditions, has_schema, wanted
from zync_assets.etl.shapes import type_sql
from zync_assets.pipeline import Denorm, Input, Rule
from zync_assets.sql_text import shape_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SETTINGS: Mapping[str, str] = {
    "spark.sql.subexpressionElimination.enabled": "false",
    "spark.sql.legacy.allowHashOnMapType": "true",
}


@contextmanager
def looking(spark: SparkSession) -> Generator[None]:
    """The session with SETTINGS."""
    before = {name: spark.conf.get(name) for name in SETTINGS}
    try:
        for name, value in SETTINGS.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, str(value))


def fails(sql: str) -> str:
    """An SQL condition: whether an expression fails. The hash makes Spark compute the whole expression."""
    return f"(try_to_binary(CAST(xxhash64({sql}) AS STRING), 'utf-8') IS NULL)"


def sides_sql(rule: Rule, target: Target) -> dict[str, str]:
    """A rule's output expressions: side (shape, key, value, headers) → SQL."""
    sides = {} if rule.keep is None else {"shape": rule.keep}
    sides |= {side: wanted(rule, shape_sql(shape)) for side, shape in (("key", rule.key), ("value", rule.value))}
    if target.headers and rule.headers is not None:
        sides["headers"] = wanted(rule, headers_sql(rule.headers))
    return sides


def failing_sides(rule: Rule, target: Target) -> list[tuple[str, str]]:
    """The columns ``failed`` and ``blamed`` for ``matching.singles`` and ``paired``, as (name, SQL).

    ``failed``: the output side whose expression fails. ``blamed``: the input side, left or right, whose record makes the
    expression fail with any record on the other side. Null if both records fail alone, or if only the pair fails.
    """
    sides = sides_sql(rule, target)
    found = " ".join(f"WHEN {fails(sql)} THEN '{side}'" for side, sql in sides.items())
    blamed = "CAST(NULL AS STRING)"
    if isinstance(rule, Denorm):
        alone = {sql: (fails_alone(sql, "left"), fails_alone(sql, "right")) for sql in sides.values()}
        cases = [
            f"WHEN {fails(sql)} THEN CASE WHEN {left} AND NOT {right} THEN 'left' WHEN {right} AND NOT {left} THEN 'right' END"
            for sql, (left, right) in alone.items()
        ]
        blamed = f"CASE {' '.join(cases)} END"
    return [("failed", f"CASE {found} END"), ("blamed", blamed)]


def first_failing(expressions: Sequence[tuple[str, str]]) -> str:
    """The index of the first of a rule's expressions that fails; null where none does. ``expressions``: (place, SQL)."""
    cases = " ".join(f"WHEN {fails(f'({sql})')} THEN {index}" for index, (_, sql) in enumerate(expressions))
    return f"CAST(CASE {cases} END AS INT)"


def fails_alone(sql: str, side: str) -> str:
    """Whether an expression fails with one side's record while the other's is null."""
    other = "right" if side == "left" else "left"
    absent = f"CASE WHEN `{other}`.kafka.offset < 0 THEN `{other}` END"
    return fails(f"transform(array({absent}), `{other}` -> {sql})")


def failing_records(
    item: Input,
    frame: DataFrame,
    rules: Sequence[Rule],
    others: Mapping[str, DataFrame],
    known: str,
) -> DataFrame:
    """The records of a topic that fail in a ``where`` or a ``join-on``: partition, offset, ``rule`` (its index), ``failed``.

    ``rules``: the staging pool's; ``others``: the record frames of all topics that have a table;
    ``known``: a condition for records that are not looked at.
    """
    asked = conditions(item, frame, rules)
    chosen = [
        f"CASE {' '.join(f'WHEN {sql} THEN {index}' for index, sql in asked[: end + 1])} END"
        for end in range(len(asked))
    ]
    # The first rule at which the conditions fail is the failing rule.
    where = " ".join(f"WHEN {fails(sql)} THEN {index}" for (index, _), sql in zip(asked, chosen, strict=True))
    if not asked or not has_schema(frame):
        return frame.where("false").selectExpr("0 AS partition", "0L AS offset", "0 AS rule", "'' AS failed")
    frame = frame.where(f"NOT ({known})").selectExpr("*", f"CASE {where} END AS wrong")
    frame = frame.selectExpr("*", f"CASE WHEN wrong IS NULL THEN {chosen[-1]} END AS taken")
    frame = frame.selectExpr(
        "kafka", "wrong", "taken", "struct(kafka, key, value) AS `left`", "struct(kafka, key, value) AS `right`"
    )
    joins: list[str] = []
    for index, rule in enumerate(rules):
        if not isinstance(rule, Denorm) or item.topic not in rule.topics:
            continue
        sides = {"left": rule.left, "right": rule.right}
        kinds = key_types(
            rule,
            {side: others[topic] for side, topic in sides.items() if topic in others and has_schema(others[topic])},
        )
        place = 0 if item.topic == rule.left else 1
        keys = ", ".join(
            f"CAST(({pair[place]}) AS {type_sql(kind)})" for kind, pair in zip(kinds, rule.join_on, strict=True)
        )
        joins.append(f"WHEN taken = {index} AND {fails(keys)} THEN 'join-on'")
    joined = f"WHEN wrong IS NULL THEN CASE {' '.join(joins)} END" if joins else ""
    return frame.selectExpr(
        "kafka.partition AS partition",
        "kafka.offset AS offset",
        "coalesce(wrong, taken) AS rule",
        f"CASE WHEN wrong IS NOT NULL THEN 'where' {joined} END AS failed",
    ).where("failed IS NOT NULL")
