"""Merges the ``shape`` of an output into the output's rules. A rule then filters and maps its own outputs.

``value.name`` in a shape stands for the rule's expression of the field ``name``. A rule may lack a field that a field of the
shape needs: the rule's records then omit the shape's field, so that a partial update stays partial. A condition that needs a
missing field is a problem.

The ``transforms`` of a pipeline file, as rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sqlglot import exp

from zync_assets.errors import Problem
from zync_assets.pipeline import Input, Output, RecordShape, Rule, Shape, Side, SideFormat
from zync_assets.pipeline_file.conditions import Span, leaves_nothing, null_spans
from zync_assets.pipeline_file.expressions import columns, parse
from zync_assets.pipeline_file.fields import Fields, suggestion, word_list
from zync_assets.pipeline_file.keys import SECTIONS, VIEW, Section, known_names, rule_keys
from zync_assets.pipeline_file.lookups import read_lookups, with_rows
from zync_assets.pipeline_file.source import Table
from zync_assets.pipeline_file.topics import Check, over, read_condition, read_headers, read_shape
from zync_assets.pipeline_file.views import check_pools, read_query, read_view
from zync_assets.spark.sql import shape_sql


class Missing(Exception):
    """A shape names a field that the rule does not make; the text is its path."""


def composed(rule: Rule, shape: RecordShape) -> Rule:
    """The rule with the shape's ``where`` as its ``keep`` and the shape's sides made of its own.

    Raises Missing if ``where`` or a side that is one expression needs what the rule does not make, or if no field of a
    side is left.
    """
    made = {"key": rule.key, "value": rule.value}
    keep = None if shape.where is None else _expression(shape.where, made)
    sides = {
        side: _guarded(side, rule.value, _side(part, made, side))
        if not (side == "value" and rule.value is None)
        else None
        for side, part in shape.sides.items()
    }
    return replace(rule, keep=keep, **sides)


def unmade(shape: RecordShape, rules: Sequence[Rule]) -> list[str]:
    """The fields of a shape that no composed rule has."""
    return [
        f"{side}.{'.'.join(path)}"
        for side, part in shape.sides.items()
        for path in _paths(part)
        if not any(_has(getattr(rule, side), path) for rule in rules)
    ]


def _paths(shape: Shape) -> Iterator[tuple[str, ...]]:
    if isinstance(shape, Mapping):
        for name, part in shape.items():
            if isinstance(part, Mapping):
                yield from ((name, *path) for path in _paths(part))
            else:
                yield (name,)


def _has(shape: Shape, path: tuple[str, ...]) -> bool:
    for name in path:
        if not isinstance(shape, Mapping):
            # The rule's shape is a single expression here, which may contain any field.
            return shape is not None
        if name not in shape:
            return False
        shape = shape[name]
    return True


def _guarded(side: str, value: Shape, shape: Shape) -> Shape:
    """A value that is null stays null; one that is a mapping never is."""
    if side == "key" or not isinstance(value, str) or shape is None:
        return shape
    return f"CASE WHEN ({value}) IS NOT NULL THEN {shape_sql(shape)} END"


def _side(shape: Shape, made: Mapping[str, Shape], path: str) -> Shape:
    if shape is None:
        return None
    if isinstance(shape, str):
        return _expression(shape, made)
    kept: dict[str, Shape] = {}
    missing: Missing | None = None
    for name, part in shape.items():
        try:
            kept[name] = _side(part, made, f"{path}.{name}")
        except Missing as error:
            missing = error
    if not kept and missing is not None:
        raise missing
    return kept


def _expression(sql: str, made: Mapping[str, Shape]) -> str:
    """The expression with what the rule makes in place of ``key`` and ``value``."""
    edits: list[tuple[int, int, str]] = []
    nulls: list[Span] = []
    expression = parse(sql)
    for column in expression.tree.find_all(exp.Column):
        if next(columns(column), None) is None:
            continue  # a variable of a lambda function
        parts = column.parts
        root, names = parts[0].name.lower(), [part.name for part in parts[1:]]
        text, used = _found(made[root], names, root)
        start, end = int(parts[0].meta["start"]), int(parts[used].meta["end"]) + 1
        if text is None:
            nulls.append((start, end))
        else:
            edits.append((start, end, text))
    wide = null_spans(expression, nulls)
    edits = [edit for edit in edits if not any(start <= edit[0] and edit[1] <= end for start, end in wide)]
    for start, end, text in sorted([*edits, *((start, end, "NULL") for start, end in wide)], reverse=True):
        sql = f"{sql[:start]}{text}{sql[end:]}"
    return sql


def _found(shape: Shape, names: list[str], path: str) -> tuple[str | None, int]:
    """The rule's SQL at a path (None: null), and the number of names that lead to it. The remaining names follow the SQL."""
    for used, name in enumerate(names):
        if shape is None:
            return None, len(names)
        if isinstance(shape, str):
            return f"({shape})", used
        path = f"{path}.{name}"
        # Prefers the exact name to a name in other case.
        fields = {field.lower(): part for field, part in shape.items()} | dict(shape)
        if name not in fields and name.lower() not in fields:
            raise Missing(path)
        shape = fields[name if name in fields else name.lower()]
    return (None if shape is None else shape_sql(shape)), len(names)


_HINTS = {
    "zed": "write key: and value: with Spark SQL expressions",
    "select": "write key: and value: with Spark SQL expressions",
    "on": "write join-on:",
    "output": "write out:",
    "input": "write in:",
}
_MISSING_KEY = "write one expression or a mapping, or `key: null` for records without a key"
_MISSING_VALUE = "write one expression or a mapping, or `value: null` for a tombstone"


@dataclass(frozen=True)
class _Placed:
    """A rule with its place in the file."""

    rule: Rule
    fields: Fields


def read_rules(
    tables: list[tuple[str, Table]],
    inputs: Mapping[str, Input | None],
    outputs: Mapping[str, Output | None],
    problems: list[Problem],
) -> tuple[Rule, ...]:
    """The rules that could be made; ``inputs`` and ``outputs`` by topic, None where one has problems of its own."""
    placed: list[_Placed] = []
    names: dict[str, int] = {}
    for position, (path, table) in enumerate(tables, start=1):
        fields = Fields(table, path, problems, known_names(rule_keys()), _HINTS)
        found = _read_rule(fields, position, inputs, outputs)
        name = fields.text("name") if "name" in fields else None
        if name is not None and ("\n" in name or len(name) > 200):
            fields.problem("name", "must be one line of at most 200 characters")
        name = name or f"{position}-{fields.text('type') if fields.node('type') else 'rule'}"
        if name in names:
            fields.problem("name", f"the rule on line {names[name]} is called `{name}` already; names are unique")
        names.setdefault(name, fields.line_of("name"))
        if found is not None:
            placed.append(found)
    pools = {topic: item.pool for topic, item in outputs.items() if item is not None}
    _check_reach(placed, pools)
    check_pools([(item.rule, item.fields) for item in placed], pools)
    made = _held(list(_composed(placed, outputs)), outputs)
    for item, rule in zip(placed, made, strict=True):
        _check_formats(item, rule, inputs, outputs.get(rule.out))
    return made


def _held(rules: Sequence[Rule], outputs: Mapping[str, Output | None]) -> tuple[Rule, ...]:
    """The rules with ``held``. An output without pending records has nothing to hold."""
    joins = [rule for rule in rules if any(side.keys for side in rule.sides)]
    # A record that waits for a row does not know its source row.
    looked_up = {rule.out for rule in rules if rule.lookups}
    # Only the results of this kind have the source rows of their records.
    waiting = {rule.out for rule in joins} if all(rule.kind == "denorm" for rule in joins) else set[str]()
    refused = {topic for topic, item in outputs.items() if item is not None and not item.hold}
    return tuple(replace(rule, held=rule.out in waiting - refused - looked_up) for rule in rules)


def _composed(placed: Sequence[_Placed], outputs: Mapping[str, Output | None]) -> Iterator[Rule]:
    """The rules with the shapes of their outputs in them."""
    made: dict[str, list[tuple[_Placed, Rule]]] = {}
    for item in placed:
        output, rule = outputs.get(item.rule.out), item.rule
        if output is not None and output.shape is not None and rule.view is not None:
            message = (
                f"`{rule.out}` has a shape; put it into `where:`, `key:` and `value:` of the view, and remove it there"
            )
            item.fields.problem("out", message)
        elif output is not None and output.shape is not None:
            try:
                rule = composed(rule, output.shape)
            except Missing as error:
                item.fields.problem(
                    "out",
                    f"`{rule.out}` has a shape that needs `{error}`, which this rule does not make; make it, or change the"
                    " shape",
                )
            made.setdefault(rule.out, []).append((item, rule))
        yield rule
    for topic, rules in made.items():
        output = outputs.get(topic)
        assert output is not None and output.shape is not None
        for path in unmade(output.shape, [rule for _, rule in rules]):
            message = (
                f"`{topic}` has a shape whose `{path}` needs what no rule makes; make it, or take it out of the shape"
            )
            rules[0][0].fields.problem("out", message)


def _check_formats(placed: _Placed, rule: Rule, inputs: Mapping[str, Input | None], output: Output | None) -> None:
    """Problems of keys and values whose type is plain to see, and that the output's format has no form for."""
    if output is None:
        return
    # An alias of a view is a row, not a record.
    sides = () if rule.view is not None else rule.sides
    known = {side.name: item for side in sides if (item := inputs.get(side.topic)) is not None}
    for side, shape, form in (("key", rule.key, output.key.format), ("value", rule.value, output.value.format)):
        if isinstance(shape, str) and form in ("string", "bytes"):
            # Here: few files need it, and it loads the codecs.
            from zync_assets.pipeline_file.references import format_problem

            if (message := format_problem(shape, form, known)) is not None:
                placed.fields.problem(side, message)


def _read_rule(
    fields: Fields, position: int, inputs: Mapping[str, Input | None], outputs: Mapping[str, Output | None]
) -> _Placed | None:
    before = len(fields.problems)
    section = _section(fields)
    if section is None:
        return None
    name = (fields.text("name") if "name" in fields else None) or f"{position}-{section.kind}"
    out = _topic(fields, "out", outputs, inputs, "output", "input")
    output = outputs.get(out) if out is not None else None
    query = None
    if section is VIEW:
        query = read_query(fields, lambda item, key: _topic(item, key, inputs, outputs, "input", "output"))
    rows = read_lookups(fields, section, lambda item, key: _topic(item, key, inputs, outputs, "input", "output"))
    check = with_rows(section.sides, rows) if query is None else query.check()
    checks = check if query is None else query.check(aggregates=True)
    key = _shape_of(fields, "key", check, _MISSING_KEY, output.key if output else None)
    value = _shape_of(fields, "value", checks, _MISSING_VALUE, output.value if output else None)
    headers = read_headers(fields, checks, output is not None and output.provenance)
    _refuse_others(fields, section)
    if query is not None:
        rule = read_view(fields, name, out or "", query, key, value, headers)
        return (
            _Placed(rule, fields) if rule is not None and out is not None and len(fields.problems) == before else None
        )
    topics = {side: _topic(fields, side, inputs, outputs, "input", "output") for side in section.sides}
    first: dict[str, str] = {}
    for side, topic in topics.items():
        if topic is not None and first.setdefault(topic, side) != side:
            fields.problem(
                side,
                f"is the topic that `{first[topic]}` names, `{topic}`; a {section.kind} rule joins two topics",
            )
    parts = section.read_join(fields)
    wheres = _wheres(fields, section)
    sides = [
        Side(side, topic, wheres[side], parts.get(side, ())) for side, topic in topics.items() if topic is not None
    ]
    if len(fields.problems) > before or len(sides) < len(topics) or out is None:
        return None
    return _Placed(Rule(section.kind, name, tuple(sides), out, key, value, headers, lookups=rows.lookups), fields)


def _section(fields: Fields) -> Section | None:
    kinds = sorted(SECTIONS)
    word = fields.text("type", f"write one of {word_list(kinds)}")
    if word is not None and word not in SECTIONS:
        fields.problem("type", f"is no type of rule; known: {word_list(kinds)}{suggestion(word, kinds)}")
    return None if word is None else SECTIONS.get(word)


def _refuse_others(fields: Fields, section: Section) -> None:
    """A problem for each key that only another kind of rule has."""
    own = " and ".join(f"`{name}`" for name in section.sides or known_names(section.keys))
    known = set(known_names(section.keys))
    for other in SECTIONS.values():
        for key in known_names(other.keys):
            if key in fields and key not in known:
                known.add(key)
                fields.problem(key, f"belongs to a rule of type {other.kind}; a {section.kind} rule has {own}")


def _topic(
    fields: Fields, key: str, known: Mapping[str, object], others: Mapping[str, object], noun: str, other: str
) -> str | None:
    topic = fields.text(key, f"name a topic of {noun}s ({word_list(known)})")
    if topic is None or topic in known:
        return topic
    if topic in others:
        fields.problem(key, f"`{topic}` is an {other}, not an {noun}; {noun}s: {word_list(known)}")
    else:
        cure = suggestion(topic, known) or f"; {noun}s: {word_list(known)}"
        fields.problem(key, f"`{topic}` is no {noun} of this file{cure}")
    return None


def _wheres(fields: Fields, section: Section) -> dict[str, str | None]:
    """Side → its condition. One expression is the condition of every side."""
    node = fields.node("where")
    if not isinstance(node, Table):
        return dict.fromkeys(section.sides, read_condition(fields, "where", over()))
    if not section.where:
        others = (
            f"only a {other.kind} rule has a {' and a '.join(other.sides)}"
            for other in SECTIONS.values()
            if other.where
        )
        fields.problem("where", "; ".join(["must be one expression", *others]))
        return dict.fromkeys(section.sides)
    sides = Fields(node, fields.key("where"), fields.problems, known_names(section.where))
    if not node.entries:
        each = " and ".join(f"{side}:" for side in section.sides)
        fields.problem("where", f"is empty; write an expression, or {each} with one each")
    return {side: read_condition(sides, side, over()) for side in section.sides}


def _shape_of(fields: Fields, key: str, check: Check, cure: str, side: SideFormat | None) -> Shape:
    node = fields.node(key)
    if node is None:
        fields.problem(key, f"is missing; {cure}")
        return None
    if isinstance(node, Table) and side is not None and side.format in ("string", "bytes"):
        message = f"must be one expression, not a mapping: the output's {key} format is {side.format}"
        fields.problem(key, message)
    return read_shape(node, fields.key(key), fields.line_of(key), check, fields.problems)


def _check_reach(placed: list[_Placed], pools: Mapping[str, str]) -> None:
    """A problem for each rule whose records an earlier rule of the same staging pool takes. ``pools``: of the outputs."""
    for index, later in enumerate(placed):
        rivals = [item for item in placed[:index] if pools.get(item.rule.out) == pools.get(later.rule.out)]
        for topic, condition in _conditions(later.rule).items():
            for earlier in rivals:
                others = _conditions(earlier.rule)
                if topic in others and leaves_nothing(others[topic], condition):
                    where = "where" if "where" in later.fields else later.rule.sides[0].name
                    line = earlier.fields.line
                    later.fields.problem(
                        where,
                        f"never matches: rule `{earlier.rule.name}` (line {line}) takes all such records of "
                        f"`{topic}` first; narrow its where, or put this rule before it",
                    )
                    break


def _conditions(rule: Rule) -> dict[str, str | None]:
    """Topic → the condition on its records; nothing for a view, which takes no record from other rules."""
    return {} if rule.view is not None else {side.topic: side.where for side in rule.sides}
