"""The rules of a pipeline as Spark SQL, to read: what ``zync etl --explain`` prints. Nothing runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from zync_assets.etl.rules.shapes import headers_sql
from zync_assets.pipeline import Denorm, Input, Pipeline, RecordShape, Rule, Stateless
from zync_assets.spark.sql import shape_sql


@dataclass(frozen=True)
class Statement:
    """One SQL statement. ``kind``: ``shape`` or ``assignment`` of the input ``name``, or the ``rule`` of that name; ``pool``:
    the staging pool of an assignment or a rule."""

    kind: Literal["shape", "assignment", "rule"]
    name: str
    sql: str
    pool: str | None = None


def explain_rules(pipeline: Pipeline) -> list[Statement]:
    """The SQL statements of a pipeline, in the file's order.

    An input with a shape has one statement. An input of a staging pool has one statement that chooses the pool's rule for a
    record. The statement of a rule makes the rule's outputs.
    """
    found = [Statement("shape", item.topic, _shape(item, item.shape)) for item in pipeline.inputs if item.shape]
    for pool in pipeline.staging_pools:
        rules = pipeline.rules_of(pool)
        found += [
            Statement("assignment", item.topic, _assignment(item, pool, rules), pool)
            for item in pipeline.inputs_of(pool)
        ]
    for rule in pipeline.rules:
        sql = _stateless(rule) if isinstance(rule, Stateless) else _denorm(rule)
        found.append(Statement("rule", rule.name, sql, pipeline.output(rule.out).pool))
    return found


def _shape(item: Input, shape: RecordShape) -> str:
    key, value = (shape_sql(shape.sides[side]) if side in shape.sides else side for side in ("key", "value"))
    return "\n".join(
        [
            f"-- {item.topic}: what of each record gets into the raw pool",
            f"SELECT kafka, {key} AS key, CASE WHEN value IS NOT NULL THEN {value} END AS value",
            f"FROM {_taken(item.topic)} WHERE {shape.where or 'true'}",
        ]
    )


def _assignment(item: Input, pool: str, rules: tuple[Rule, ...]) -> str:
    cases = list(_cases(item.topic, rules))
    settled = "'dropped'" if item.unmatched == "drop" else "'unmatched'"
    lines = [f"  WHEN {condition} THEN '{name}'" for name, condition in cases]
    lines.append(f"  WHEN value IS NULL THEN 'dropped' ELSE {settled}")
    return "\n".join(
        [
            f"-- {item.topic}, for {pool}: the first rule of the pool whose condition holds takes the record",
            "SELECT kafka, key, value, CASE",
            *lines,
            f"END AS rule FROM {_table(item.pool, item.topic)}",
        ]
    )


def _cases(topic: str, rules: tuple[Rule, ...]) -> Iterator[tuple[str, str]]:
    for rule in rules:
        if isinstance(rule, Stateless):
            sides = [(rule.input, rule.where)]
        else:
            sides = [(rule.left, rule.where_left), (rule.right, rule.where_right)]
        for name, where in sides:
            if name == topic:
                yield rule.name, f"({where})" if where else "value IS NOT NULL"


def _stateless(rule: Stateless) -> str:
    return "\n".join(
        [
            f"-- {rule.name}: one output for each record that it takes{_dropping(rule)}",
            f"SELECT {_made(rule)}",
            f"FROM (SELECT struct(kafka, key, value) AS in FROM {_taken(rule.input)} WHERE rule = '{rule.name}')",
            *([] if rule.keep is None else [f"WHERE {rule.keep}"]),
        ]
    )


def _dropping(rule: Rule) -> str:
    return "" if rule.keep is None else "; those that the output's condition does not hold for are dropped"


def _denorm(rule: Denorm) -> str:
    equal = " AND ".join(f"({left}) = ({right})" for left, right in rule.join_on)
    keys = {"left": ", ".join(pair[0] for pair in rule.join_on), "right": ", ".join(pair[1] for pair in rule.join_on)}

    def ranked(side: str, topic: str) -> str:
        return (
            f"(SELECT *, row_number() OVER (PARTITION BY {keys[side]}"
            f" ORDER BY {side}.kafka.partition, {side}.kafka.offset) AS k\n"
            f"      FROM (SELECT struct(kafka, key, value) AS {side} FROM {_taken(topic)} WHERE rule = '{rule.name}'))"
        )

    return "\n".join(
        [
            f"-- {rule.name}: the k-th left record of a join key with the k-th right one; the others wait{_dropping(rule)}",
            f"SELECT {_made(rule)}",
            f"FROM {ranked('left', rule.left)} AS l",
            f"JOIN {ranked('right', rule.right)} AS r",
            f"ON {equal} AND l.k = r.k",
            *([] if rule.keep is None else [f"WHERE {rule.keep}"]),
        ]
    )


def _made(rule: Rule) -> str:
    headers = "" if rule.headers is None else f", {headers_sql(rule.headers)} AS headers"
    return f"{shape_sql(rule.key)} AS key, {shape_sql(rule.value)} AS value{headers}"


def _taken(topic: str) -> str:
    return f"`{topic}`"


def _table(pool: str, topic: str) -> str:
    return f"{pool}.`{topic}`"
