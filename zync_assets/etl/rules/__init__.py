"""The kinds of rules, and the rules of a pipeline as Spark SQL, to read: what ``zync etl --explain`` prints.

A module of this folder is a kind of rule (``stateless``, ``denorm``) or what the kinds share: ``kind`` has their interface.
The section of a kind in the pipeline file's grammar is in ``pipeline_file.keys``. Ingest's shapes use ``shapes`` too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from zync_assets.etl.rules.denorm import Denorm
from zync_assets.etl.rules.group import GroupKind
from zync_assets.etl.rules.kind import Kind
from zync_assets.etl.rules.shapes import headers_sql
from zync_assets.etl.rules.stateless import Stateless
from zync_assets.etl.rules.view import ViewKind, latest_sql, plan_text, query_sql
from zync_assets.pipeline import Input, Pipeline, RecordShape, Rule
from zync_assets.spark.sql import name_sql, shape_sql

KINDS: dict[str, Kind] = {kind.name: kind for kind in (Stateless(), Denorm(), ViewKind(), GroupKind())}
"""``type`` of a rule → its kind. ``pipeline_file.keys.SECTIONS`` has the same kinds; Spark's workers load no parser for it."""


def kind_of(rule: Rule) -> Kind:
    """The kind of a rule."""
    return KINDS[rule.kind]


def is_apart(rule: Rule, manifold: Collection[str]) -> bool:
    """Whether the results of a rule need more than the one pass over the topic (``singles``). ``manifold``: the rules with
    several outputs of a match."""
    if rule.part_of is not None:
        return False
    return bool(rule.lookups) or not kind_of(rule).single or rule.name in manifold


@dataclass(frozen=True)
class Statement:
    """One SQL statement. ``kind``: ``shape`` or ``assignment`` of the input ``name``, the ``rule`` of that name, or the ``plan``
    that keeps a view, in comments; ``pool``: the staging pool of an assignment, a rule or a plan."""

    kind: Literal["shape", "assignment", "rule", "plan"]
    name: str
    sql: str
    pool: str | None = None


def explain_rules(pipeline: Pipeline) -> list[Statement]:
    """The SQL statements of a pipeline, in the file's order.

    An input with a shape has one statement. An input of a staging pool has one statement that chooses the pool's rule for a
    record. The statement of a rule makes the rule's outputs. A view has its query and its plan.
    """
    statements = [Statement("shape", item.topic, _shape(item, item.shape)) for item in pipeline.inputs if item.shape]
    for pool in pipeline.staging_pools:
        rules = pipeline.rules_of(pool)
        statements += [
            Statement("assignment", item.topic, _assignment(item, pool, rules), pool)
            for item in pipeline.inputs_of(pool)
            if any(rule.view is None and item.topic in rule.topics for rule in rules)
        ]
    # Here: Spark's workers load no parser.
    from zync_assets.pipeline_file.zed.types import explained

    for rule in map(explained, pipeline.rules):
        pool, kind = pipeline.output(rule.out).pool, kind_of(rule)
        if isinstance(kind, ViewKind):
            statements.append(Statement("rule", rule.name, query_sql(rule, kind, pipeline), pool))
            statements.append(Statement("plan", rule.name, plan_text(rule), pool))
        else:
            statements.append(Statement("rule", rule.name, _outputs(rule, pipeline), pool))
    return statements


def _shape(item: Input, shape: RecordShape) -> str:
    key, value = (shape_sql(shape.sides[side]) if side in shape.sides else side for side in ("key", "value"))
    return "\n".join(
        [
            f"-- {item.topic}: what of each record gets into the raw pool",
            f"SELECT kafka, {key} AS key, CASE WHEN value IS NOT NULL THEN {value} END AS value",
            f"FROM {name_sql(item.topic)} WHERE {shape.where or 'true'}",
        ]
    )


def _assignment(item: Input, pool: str, rules: tuple[Rule, ...]) -> str:
    cases = list(_cases(item.topic, rules))
    rest = "'dropped'" if item.unmatched == "drop" else "'unmatched'"
    lines = [f"  WHEN {condition} THEN '{name}'" for name, condition in cases]
    lines.append(f"  WHEN value IS NULL THEN 'dropped' ELSE {rest}")
    return "\n".join(
        [
            f"-- {item.topic}, for {pool}: the first rule of the pool whose condition holds takes the record",
            "SELECT kafka, key, value, CASE",
            *lines,
            f"END AS rule FROM {item.pool}.{name_sql(item.topic)}",
        ]
    )


def _cases(topic: str, rules: tuple[Rule, ...]) -> Iterator[tuple[str, str]]:
    for rule in rules:
        if topic in rule.topics and rule.part_of is None:
            where = rule.side(topic).where
            yield rule.name, f"({where})" if where else "value IS NOT NULL"


_MISSING = {
    "wait": "a record without its row is pending until the row comes, {} s at the most, and then goes into quarantine",
    "null": "without a row, the columns are null",
    "quarantine": "a record without its row goes into quarantine",
}


def _outputs(rule: Rule, pipeline: Pipeline) -> str:
    kind = kind_of(rule)
    drop_note = "" if rule.keep is None else "; those that the output's condition does not hold for are dropped"
    headers = "" if rule.headers is None else f", {headers_sql(rule.headers)} AS headers"
    return "\n".join(
        [
            f"-- {rule.name}: {kind.summary}{drop_note}",
            f"SELECT {shape_sql(rule.key)} AS key, {shape_sql(rule.value)} AS value{headers}",
            f"FROM {kind.from_sql(rule)}",
            *([] if rule.explode is None else [f"LATERAL VIEW explode({rule.explode}) items AS item"]),
            *(
                line
                for item in rule.lookups
                for line in (
                    f"-- {item.alias}: the row after the batch; {_MISSING[item.missing].format(item.wait_ms // 1000)}",
                    f"LEFT JOIN ({latest_sql(item.table, pipeline)}) ON {item.condition}",
                )
            ),
            *([] if rule.keep is None else [f"WHERE {rule.keep}"]),
        ]
    )
