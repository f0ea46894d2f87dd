"""The Zed of a rule in a pipeline file: its program as the key and the value of an output, its conditions and its join key.

In a rule with ``zed:``, ``where:`` and the join key are Zed too, as in zync's own files. Each problem has its line and column.

The operators of a program run over values that only the text shows: ``this`` begins as a record of the rule's sides, and the
program must leave a record in ``out``. A record keeps its fields in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from zync_assets.errors import Problem
from zync_assets.pipeline_file.conditions import split_join
from zync_assets.pipeline_file.expressions import RECORD_ROOTS, check_expression
from zync_assets.pipeline_file.fields import Fields
from zync_assets.pipeline_file.keys import Section
from zync_assets.pipeline_file.source import Scalar, YamlTable
from zync_assets.pipeline_file.zed.expressions import Compiler
from zync_assets.pipeline_file.zed.grammar import parse_condition, parse_join, parse_program
from zync_assets.pipeline_file.zed.nodes import (
    START,
    Constant,
    Index,
    Member,
    Name,
    Node,
    Operator,
    RecordLiteral,
    ZedPlace,
    ZedProblem,
)
from zync_assets.pipeline_file.zed.values import (
    DURATIONS,
    SUM,
    ClosedRecord,
    Demands,
    FieldEdit,
    FieldRef,
    OpenRecord,
    Term,
    Value,
    member,
    path_sql,
)
from zync_assets.queries import Demand, FieldStep, FieldSteps, Path, Shape, ZedTypes
from zync_assets.spark.sql import leaves

Result = TypeVar("Result")

_PARTS = ("key", "value")
_JOIN_KEYS = ("left-key", "right-key")


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
    for key in _PARTS:
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

    if "join-on" in fields or fields.entries.keys().isdisjoint(_JOIN_KEYS):
        equality_texts = _compile(fields, "join-on", "write left.key.ID=right.value.after.ID", equality_sqls)
        sql = " AND ".join(equality_texts) if equality_texts is not None else None
        for key in _JOIN_KEYS:
            if key in fields:
                fields.problem(key, "says what join-on says; remove one of the two")
    else:
        keys = [
            _compile(fields, key, "write the other side's part of the join key", key_part_sql) for key in _JOIN_KEYS
        ]
        sql = f"{keys[0]} = {keys[1]}" if None not in keys else None
    if sql is None:
        return {}
    key = "join-on" if "join-on" in fields else "left-key"
    demands.entries += [_in_file(fields, key, demand) for demand in join_demands.entries]
    pairs, messages = split_join(sql)
    for message in messages:
        fields.problem(key, message)
    return {"left": tuple(pair[0] for pair in pairs), "right": tuple(pair[1] for pair in pairs)}


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


@dataclass(frozen=True)
class ZedOutput:
    """What a program makes: the shapes of key and value, and what it leaves to the types of the topics.

    A record with fields of its topic is, in the shape, the expression of the record that it begins with.
    """

    key: Shape
    value: Shape
    demands: tuple[Demand, ...]
    records: tuple[FieldSteps, ...]


def compile_program(text: str, sides: Sequence[str]) -> ZedOutput:
    """The output of a program over the records of some sides. ZedProblem for a text outside the subset."""
    this: Value = ClosedRecord({side: FieldRef((side,)) for side in sides})
    compiler = Compiler(Demands())
    try:
        for operator in parse_program(text):
            this = _operator_result(operator, this, compiler)
        key, value = (_part(this, name) for name in _PARTS)
        shapes = _Shapes(compiler)
        return ZedOutput(
            shapes.shape(key, ("key",)),
            shapes.shape(value, ("value",)),
            tuple(dict.fromkeys(compiler.demands.entries)),
            tuple(shapes.records),
        )
    except RecursionError:
        raise ZedProblem(START, "is nested too deep") from None


def _part(this: Value, name: str) -> Value:
    """The key or the value of ``out``."""
    cure = "write | out:={key: …, value: …}"
    if isinstance(this, ClosedRecord) and "out" not in this.fields:
        raise ZedProblem(START, f"makes no `out`; {cure}")
    out = member(this, "out", START)
    if isinstance(out, Term):
        raise ZedProblem(START, f"`out` is no record; {cure}")
    if isinstance(out, ClosedRecord):
        if other_fields := [f"`{field}`" for field in out.fields if field not in (*_PARTS, "kafka")]:
            raise ZedProblem(START, f"`out` has {', '.join(other_fields)}; a record of a topic has key and value alone")
        if name not in out.fields:
            null = "records without a key" if name == "key" else "a tombstone"
            raise ZedProblem(START, f"`out` has no `{name}`; write `{name}: null` for {null}")
    return member(out, name, START)


def _operator_result(operator: Operator, this: Value, compiler: Compiler) -> Value:
    """What an operator makes of ``this``."""
    match operator.name:
        case "pass":
            return this
        case "yield":
            node, *other_nodes = (node for _, node in operator.pairs)
            if other_nodes:
                cure = "write a rule for each, or a rule of Spark SQL with a list of outputs"
                raise ZedProblem(operator.place, f"`yield` of several values makes several records; {cure}")
            return compiler.value(node, this)
        case "bare":
            node, *_ = (node for _, node in operator.pairs)
            if not isinstance(node, RecordLiteral):
                cure = "write `yield …` for a value, or put a condition into `where:` of the rule"
                raise ZedProblem(operator.place, f"an operator is missing; {cure}")
            return compiler.value(node, this)
        case "put":
            assignments = [(_target(target), compiler.value(node, this), node.place) for target, node in operator.pairs]
            for path, value, place in assignments:
                this = _with_assignment(this, path, value, place)
            return this
        case "cut":
            record: Value = ClosedRecord({})
            for target, node in operator.pairs:
                path = _target(node if target is None else target)
                record = _with_assignment(record, path, compiler.value(node, this), node.place)
            return record
        case "drop":
            for _, node in operator.pairs:
                this = _without_field(this, _target(node))
            return this
        case "rename":
            for target, node in operator.pairs:
                new_path, old_path = _target(target), _target(node)
                if new_path[:-1] != old_path[:-1]:
                    raise ZedProblem(
                        node.place, "`rename` keeps a field in its record; `out.a:=out.b.c` sets another one"
                    )
                this = _with_renamed_field(this, old_path, new_path[-1], node.place)
            return this


def _target(node: Node | None) -> Path:
    """The names of a field that an operator sets or removes."""
    match node:
        case Name("this", place):
            raise ZedProblem(place, "`this` can't be set; write `yield …`")
        case Name(name):
            return (name,)
        case Member(Name("this"), name) | Index(Name("this"), Constant("text", name)):
            return (name,)
        case Member(base, name) | Index(base, Constant("text", name)):
            return (*_target(base), name)
        case None:
            raise ZedProblem(START, "a field is missing")
        case _:
            raise ZedProblem(node.place, "must be a field, such as out.value.name")


def _with_assignment(base: Value, path: Path, value: Value, place: ZedPlace) -> Value:
    name, inner_path = path[0], path[1:]
    if isinstance(base, Term):
        raise ZedProblem(place, f"`{base.sql}` is no record, and gets no field `{name}`")
    if inner_path:
        inner_value = (
            base.fields.get(name, ClosedRecord({})) if isinstance(base, ClosedRecord) else member(base, name, place)
        )
        value = _with_assignment(inner_value, inner_path, value, place)
    return _with_field(base, name, value)


def _without_field(base: Value, path: Path) -> Value:
    name, inner_path = path[0], path[1:]
    if isinstance(base, Term) or (isinstance(base, ClosedRecord) and name not in base.fields):
        return base
    if inner_path:
        inner_value = _without_field(member(base, name, START), inner_path)
        return (
            ClosedRecord({**base.fields, name: inner_value})
            if isinstance(base, ClosedRecord)
            else _with_edit(base, FieldEdit("put", name, inner_value))
        )
    if isinstance(base, ClosedRecord):
        return ClosedRecord({field: part for field, part in base.fields.items() if field != name})
    return _with_edit(base, FieldEdit("drop", name))


def _with_renamed_field(base: Value, path: Path, new_name: str, place: ZedPlace) -> Value:
    name, inner_path = path[0], path[1:]
    if isinstance(base, Term) or (isinstance(base, ClosedRecord) and name not in base.fields):
        return base
    if inner_path:
        inner_value = _with_renamed_field(member(base, name, place), inner_path, new_name, place)
        return (
            ClosedRecord({**base.fields, name: inner_value})
            if isinstance(base, ClosedRecord)
            else _with_edit(base, FieldEdit("put", name, inner_value))
        )
    if not isinstance(base, ClosedRecord):
        return _with_edit(base, FieldEdit("rename", new_name, old=name))
    if new_name in base.fields:
        raise ZedProblem(place, f"`rename` finds a field `{new_name}` already; drop it first")
    return ClosedRecord({new_name if field == name else field: part for field, part in base.fields.items()})


def _with_field(base: FieldRef | ClosedRecord | OpenRecord, name: str, value: Value) -> Value:
    if isinstance(base, ClosedRecord):
        return ClosedRecord({**base.fields, name: value})
    return _with_edit(base, FieldEdit("put", name, value))


def _with_edit(base: FieldRef | OpenRecord, edit: FieldEdit) -> OpenRecord:
    edits = (FieldEdit("keep", value=base),) if isinstance(base, FieldRef) else base.edits
    return OpenRecord((*edits, edit))


@dataclass
class _Shapes:
    """Makes shapes of values, and notes the records with the fields of their topics."""

    compiler: Compiler

    def __post_init__(self) -> None:
        self.records: list[FieldSteps] = []

    def shape(self, value: Value, place: Path) -> Shape:
        if isinstance(value, Term):
            if value.kind == "duration":
                raise ZedProblem(START, f"`{'.'.join(('out', *place))}` is a duration; {DURATIONS}")
            return None if value.sql == "NULL" else value.sql
        if isinstance(value, FieldRef):
            return path_sql(value.path)
        if isinstance(value, ClosedRecord):
            return self._fields(value.fields, place)
        self.records.append(replace(_steps(value, self), place=place))
        return path_sql(next(edit.value.path for edit in value.edits if isinstance(edit.value, FieldRef)))

    def _fields(self, fields: Mapping[str, Value], place: Path) -> Shape:
        if not fields:
            raise ZedProblem(START, f"`{'.'.join(('out', *place))}` has no fields; name at least one")
        return {name: self.shape(value, (*place, name)) for name, value in fields.items()}


def _steps(value: OpenRecord, shapes: _Shapes) -> FieldSteps:
    steps: list[FieldStep] = []
    for edit in value.edits:
        if edit.kind == "keep" and isinstance(edit.value, FieldRef):
            steps.append(FieldStep("keep", path=edit.value.path))
        elif edit.kind == "put" and edit.value is not None:
            part = edit.value
            shape = _steps(part, shapes) if isinstance(part, OpenRecord) else _Shapes(shapes.compiler).shape(part, ())
            steps.append(FieldStep("put", edit.name, shape=shape))
        elif edit.kind == "drop":
            steps.append(FieldStep("drop", edit.name))
        else:
            steps.append(FieldStep("rename", edit.name, old=edit.old))
    return FieldSteps(tuple(steps))
