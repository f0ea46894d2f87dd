"""The Zed of one rule of a pipeline file, each problem with its line and column.

In a rule with ``zed:``, ``where:`` and the join key are Zed too, as in zync's own files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from zync_assets.errors import Problem
from zync_assets.pipeline_file.conditions import split_join
from zync_assets.pipeline_file.expressions import RECORD_ROOTS, check_expression
from zync_assets.pipeline_file.fields import Fields
from zync_assets.pipeline_file.keys import Section
from zync_assets.pipeline_file.source import Scalar, YamlTable
from zync_assets.pipeline_file.zed.expressions import Compiler
from zync_assets.pipeline_file.zed.grammar import parse_condition, parse_join
from zync_assets.pipeline_file.zed.nodes import START, ZedPlace, ZedProblem
from zync_assets.pipeline_file.zed.program import ZedOutput, compile_program
from zync_assets.pipeline_file.zed.values import SUM, ClosedRecord, Demands, FieldRef, Value
from zync_assets.queries import Demand, FieldStep, FieldSteps, Shape, ZedTypes
from zync_assets.spark.sql import leaves

Result = TypeVar("Result")


@dataclass(frozen=True)
class ZedRule:
    """A rule in Zed as Spark SQL. ``wheres`` and ``parts``: side → its condition, and its parts of the join key."""

    key: Shape
    value: Shape
    wheres: Mapping[str, str | None]
    parts: Mapping[str, tuple[str, ...]]
    types: ZedTypes


def read_zed(fields: Fields, section: Section) -> ZedRule | None:
    """The rule; None if it has problems."""
    problem_count = len(fields.problems)
    for key in ("key", "value"):
        if key in fields:
            fields.problem(key, "stands in `zed:` already, as `| out:={key: …, value: …}`; remove one of the two")
    if "lookup" in fields:
        fields.problem("lookup", "needs a rule in Spark SQL; write key: and value: in place of zed:")
    if not section.sides:
        fields.problem("zed", f"belongs to a rule of type stateless or denorm; a {section.kind} rule is in Spark SQL")
        return None
    demands = Demands()
    output = _compile(
        fields, "zed", "write | out:={key: …, value: …}", lambda text: compile_program(text, section.sides)
    )
    if output is not None:
        _check_sql(fields, output, section.sides)
    wheres = _wheres(fields, section, demands)
    parts = _join(fields, demands) if section.join else {}
    if output is None or len(fields.problems) > problem_count:
        return None
    all_demands = (*(_in_file(fields, "zed", demand) for demand in output.demands), *demands.entries)
    return ZedRule(output.key, output.value, wheres, parts, ZedTypes(all_demands, output.records))


def _wheres(fields: Fields, section: Section, demands: Demands) -> dict[str, str | None]:
    node = fields.node("where")
    if not isinstance(node, YamlTable):
        return dict.fromkeys(section.sides, _where(fields, "where", demands))
    if not section.where:
        fields.problem("where", "must be one expression; only a denorm rule has a left and a right")
        return dict.fromkeys(section.sides)
    sides = Fields(node, fields.key("where"), fields.problems, [key.name for key in section.where])
    return {side: _where(sides, side, demands) for side in section.sides}


def _where(fields: Fields, key: str, demands: Demands) -> str | None:
    node = fields.node(key)
    if isinstance(node, Scalar) and isinstance(node.value, bool):
        return node.text.lower()
    condition_demands = Demands()

    def condition(text: str) -> str:
        this = ClosedRecord({root: FieldRef((root,)) for root in RECORD_ROOTS})
        return Compiler(condition_demands).condition(parse_condition(text), this, positive=True).sql

    sql = _compile(fields, key, None, condition)
    demands.entries += [_in_file(fields, key, demand) for demand in condition_demands.entries]
    if sql is not None:
        for message in check_expression(sql, RECORD_ROOTS):
            fields.problem(key, f"gives the Spark SQL {sql}, which {message}")
    return sql


def _join(fields: Fields, demands: Demands) -> Mapping[str, tuple[str, ...]]:
    this: Value = ClosedRecord({side: FieldRef((side,)) for side in ("left", "right")})
    join_demands = Demands()

    def equality_sqls(text: str) -> list[str]:
        term_pairs = [[Compiler(join_demands).term(side, this) for side in pair] for pair in parse_join(text)]
        return [" = ".join(side.within(SUM) for side in pair) for pair in term_pairs]

    def key_part_sql(text: str) -> str:
        return Compiler(join_demands).term(parse_condition(text), this).within(SUM)

    if "join-on" in fields or not {"left-key", "right-key"} & fields.entries.keys():
        equality_texts = _compile(fields, "join-on", "write left.key.ID=right.value.after.ID", equality_sqls)
        sql = " AND ".join(equality_texts) if equality_texts is not None else None
        for key in ("left-key", "right-key"):
            if key in fields:
                fields.problem(key, "says what join-on says; remove one of the two")
    else:
        keys = [_compile(fields, key, "write the other side's part of the join key", key_part_sql) for key in _KEYS]
        sql = f"{keys[0]} = {keys[1]}" if None not in keys else None
    if sql is None:
        return {}
    key = "join-on" if "join-on" in fields else "left-key"
    demands.entries += [_in_file(fields, key, demand) for demand in join_demands.entries]
    pairs, messages = split_join(sql)
    for message in messages:
        fields.problem(key, message)
    return {"left": tuple(pair[0] for pair in pairs), "right": tuple(pair[1] for pair in pairs)}


_KEYS = ("left-key", "right-key")


def _compile(fields: Fields, key: str, cure: str | None, compile: Callable[[str], Result]) -> Result | None:
    """What a function makes of a key's text; None after a problem. ``cure``: what to write where the key is missing."""
    text = fields.text(key, cure)
    if text is None:
        return None
    try:
        return compile(text)
    except ZedProblem as problem:
        place, message = problem.place, problem.message
    except RecursionError:
        place, message = START, "is nested too deep"
    line, column = _place(fields, key, place)
    fields.problems.append(Problem(line, fields.key(key), f"column {column}: {message}"))
    return None


def _place(fields: Fields, key: str, place: ZedPlace) -> ZedPlace:
    node = fields.node(key)
    return ZedPlace(*node.place(*place)) if isinstance(node, Scalar) else place


def _in_file(fields: Fields, key: str, demand: Demand) -> Demand:
    line, column = _place(fields, key, ZedPlace(*demand.place))
    return Demand(demand.path, demand.kinds, demand.role, (line, column), demand.other)


def _check_sql(fields: Fields, output: ZedOutput, sides: Sequence[str]) -> None:
    """A problem for SQL that the other modules can't read, such as SQL that is nested too deep."""
    shapes = [("key", output.key), ("value", output.value)]
    shapes += [(".".join(record.place), shape) for record in output.records for shape in _shapes(record.steps)]
    for name, shape in shapes:
        for path, sql in leaves(shape, name):
            for message in check_expression(sql, sides):
                fields.problem("zed", f"out.{path} gives the Spark SQL {sql}, which {message}")


def _shapes(steps: Sequence[FieldStep]) -> list[Shape]:
    shapes: list[Shape] = []
    for step in steps:
        shapes += _shapes(step.shape.steps) if isinstance(step.shape, FieldSteps) else [step.shape]
    return shapes
