"""The ``transforms`` of a pipeline file as rules, merged with the shapes of their outputs.

A rule filters and maps its own outputs by the ``shape`` of its output. ``value.name`` in a shape stands for the rule's
expression of the field ``name``. If a rule lacks a field that a field of the shape needs, its records omit the shape's field. A
partial update therefore stays partial. A condition that needs a missing field is a problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sqlglot import exp

from zync_assets.errors import Problem
from zync_assets.pipeline import Input, Output, RecordShape, Rule, Shape, Side, SideFormat
from zync_assets.pipeline_file.conditions import TextSpan, leaves_nothing, null_spans
from zync_assets.pipeline_file.expressions import columns, parse
from zync_assets.pipeline_file.fields import UNNAMED, Fields, suggestion, word_list
from zync_assets.pipeline_file.groups import GroupSection, group_rule, read_group
from zync_assets.pipeline_file.joins import read_lookups, with_rows
from zync_assets.pipeline_file.key import known_names
from zync_assets.pipeline_file.keys import GROUP, SECTIONS, VIEW, Section, rule_keys
from zync_assets.pipeline_file.outs import (
    ITEM,
    WHERE,
    check_parts,
    each_output,
    former_name,
    held,
    parts,
    read_expiry,
    read_explode,
)
from zync_assets.pipeline_file.source import YamlTable
from zync_assets.pipeline_file.topics import TOPIC, Check, over, read_condition, read_headers, read_shape
from zync_assets.pipeline_file.views import check_pools, read_query, read_view
from zync_assets.queries import field_names
from zync_assets.spark.sql import shape_sql


class Missing(Exception):
    """A shape names a field that the rule does not make; the text is its path."""


def composed(rule: Rule, shape: RecordShape) -> Rule:
    """The rule with the shape's ``where`` as its ``keep`` and the shape's sides made of its own.

    Raises Missing if ``where`` or a side that is one expression needs what the rule does not make, or if no field of a
    side is left.
    """
    shapes = {"key": rule.key, "value": rule.value}
    keep = rule.keep if shape.where is None else _expression(shape.where, shapes)
    if rule.keep is not None and shape.where is not None:
        keep = f"({rule.keep}) AND ({keep})"
    sides = {
        side: _null_guarded(side, rule.value, _side(part, shapes, side))
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


def _null_guarded(side: str, value: Shape, shape: Shape) -> Shape:
    """A value that is null stays null; one that is a mapping never is."""
    if side == "key" or not isinstance(value, str) or shape is None:
        return shape
    return f"CASE WHEN ({value}) IS NOT NULL THEN {shape_sql(shape)} END"


def _side(shape: Shape, shapes: Mapping[str, Shape], path: str) -> Shape:
    if shape is None:
        return None
    if isinstance(shape, str):
        return _expression(shape, shapes)
    fields: dict[str, Shape] = {}
    lack: Missing | None = None
    for name, part in shape.items():
        try:
            fields[name] = _side(part, shapes, f"{path}.{name}")
        except Missing as error:
            lack = error
    if not fields and lack is not None:
        raise lack
    return fields


def _expression(sql: str, shapes: Mapping[str, Shape]) -> str:
    """The expression with what the rule makes in place of ``key`` and ``value``."""
    edits: list[tuple[int, int, str]] = []
    nulls: list[TextSpan] = []
    expression = parse(sql)
    for column in expression.tree.find_all(exp.Column):
        if next(columns(column), None) is None:
            continue  # a variable of a lambda function
        parts = column.parts
        root, names = parts[0].name.lower(), [part.name for part in parts[1:]]
        text, name_count = _sql_at(shapes[root], names, root)
        start, end = int(parts[0].meta["start"]), int(parts[name_count].meta["end"]) + 1
        if text is None:
            nulls.append((start, end))
        else:
            edits.append((start, end, text))
    wide = null_spans(expression, nulls)
    edits = [edit for edit in edits if not any(start <= edit[0] and edit[1] <= end for start, end in wide)]
    for start, end, text in sorted([*edits, *((start, end, "NULL") for start, end in wide)], reverse=True):
        sql = f"{sql[:start]}{text}{sql[end:]}"
    return sql


def _sql_at(shape: Shape, names: list[str], path: str) -> tuple[str | None, int]:
    """The rule's SQL at a path (None: null), and the number of names that lead to it. The remaining names follow the SQL."""
    for name_count, name in enumerate(names):
        if shape is None:
            return None, len(names)
        if isinstance(shape, str):
            return f"({shape})", name_count
        path = f"{path}.{name}"
        # Prefers the exact name to a name in other case.
        fields = {field.lower(): part for field, part in shape.items()} | dict(shape)
        if name not in fields and name.lower() not in fields:
            raise Missing(path)
        shape = fields[name if name in fields else name.lower()]
    return (None if shape is None else shape_sql(shape)), len(names)


_HINTS = {
    "select": "write key: and value: with Spark SQL expressions",
    "on": "write join-on:",
    "output": "write out:",
    "input": "write in:",
}
_MISSING_KEY = "write one expression or a mapping, or `key: null` for records without a key"
_MISSING_VALUE = "write one expression or a mapping, or `value: null` for a tombstone"


@dataclass(frozen=True)
class _Entry:
    """A rule with its place in the file. ``group``: the section of a group."""

    rule: Rule
    fields: Fields
    group: GroupSection | None = None


def read_rules(
    tables: list[tuple[str, YamlTable]],
    inputs: Mapping[str, Input | None],
    outputs: Mapping[str, Output | None],
    problems: list[Problem],
) -> tuple[Rule, ...]:
    """The rules that could be made; ``inputs`` and ``outputs`` by topic, None where one has problems of its own."""
    entries: list[_Entry] = []
    names: dict[str, int] = {}
    for position, (path, table) in enumerate(tables, start=1):
        fields = Fields(table, path, problems, known_names(rule_keys()), _HINTS)
        rules: list[_Entry | None] = []
        for item in each_output(fields):
            rules.append(_read_rule(item, position, inputs, outputs, rules[0] and rules[0].group if rules else None))
        name = fields.text("name") if "name" in fields else None
        if name is not None and ("\n" in name or len(name) > 200):
            fields.problem("name", "must be one line of at most 200 characters")
        name = name or f"{position}-{fields.text('type') if fields.node('type') else 'rule'}"
        if name in names:
            fields.problem("name", f"the rule on line {names[name]} is called `{name}` already; names are unique")
        names.setdefault(name, fields.line_of("name"))
        entries += [
            _Entry(replace(rule, was=former_name(item.fields, rule)), item.fields)
            for item, rule in parts(rules, lambda item: item.rule)
        ]
    for item in entries:
        if item.rule.was in names:
            item.fields.problem("was", f"`{item.rule.was}` is the name of a rule of this file; remove the key")
    # An output with a problem is in a pool of its own here: its true pool may not be known.
    pools = {topic: f"of {topic}" if item is None else item.pool for topic, item in outputs.items()}
    _check_reach(entries, pools)
    check_parts([(item.rule, item.fields) for item in entries], outputs)
    check_pools([(item.rule, item.fields) for item in entries], pools)
    final_rules = held(list(_with_shapes(entries, outputs)), outputs)
    for item, rule in zip(entries, final_rules, strict=True):
        _check_formats(item, rule, inputs, outputs.get(rule.out))
    return final_rules


def _with_shapes(entries: Sequence[_Entry], outputs: Mapping[str, Output | None]) -> Iterator[Rule]:
    """The rules with the shapes of their outputs in them."""
    rules_by_topic: dict[str, list[tuple[_Entry, Rule]]] = {}
    for item in entries:
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
            rules_by_topic.setdefault(rule.out, []).append((item, rule))
        yield rule
    for topic, rules in rules_by_topic.items():
        output = outputs.get(topic)
        assert output is not None and output.shape is not None
        # A rule with a problem is not here, and may make the field.
        for path in () if rules[0][0].fields.problems else unmade(output.shape, [rule for _, rule in rules]):
            message = (
                f"`{topic}` has a shape whose `{path}` needs what no rule makes; make it, or take it out of the shape"
            )
            rules[0][0].fields.problem("out", message)


def _check_formats(entry: _Entry, rule: Rule, inputs: Mapping[str, Input | None], output: Output | None) -> None:
    """Problems of keys and values whose type is plain to see, and that the output's format has no form for."""
    if output is None:
        return
    # An alias of a view is a row, not a record, and a group has several records.
    sides = () if rule.view is not None or rule.group is not None else rule.sides
    input_by_side = {side.name: item for side in sides if (item := inputs.get(side.topic)) is not None}
    for side, shape, form in (("key", rule.key, output.key.format), ("value", rule.value, output.value.format)):
        if isinstance(shape, str) and form in ("string", "bytes"):
            # Here: few files need it, and it loads the codecs.
            from zync_assets.pipeline_file.plain_types import format_problem

            if (message := format_problem(shape, form, input_by_side)) is not None:
                entry.fields.problem(side, message)
        for name in field_names(shape) if form == "avro" else ():
            if not (name.isascii() and name.isidentifier()):
                entry.fields.problem(side, f"has a field `{name}`, no name in Avro; rename it, or set another format")


def _read_rule(
    fields: Fields,
    position: int,
    inputs: Mapping[str, Input | None],
    outputs: Mapping[str, Output | None],
    base_group: GroupSection | None,
) -> _Entry | None:
    """``base_group``: the group, as earlier outputs of the rule have it."""
    count = len(fields.problems)
    section = _section(fields)
    if section is None:
        return None
    name = (fields.text("name") if "name" in fields else None) or f"{position}-{section.kind}"
    out = _topic(fields, "out", outputs, inputs, "output", "input")
    output = outputs.get(out) if out is not None else None
    if "zed" in fields:
        zed = _read_zed(fields, section, name, out or "", output, inputs, outputs)
        return _Entry(zed, fields) if zed is not None and out is not None and len(fields.problems) == count else None
    query = None
    if section is VIEW:
        query = read_query(fields, lambda item, key: _topic(item, key, inputs, outputs, "input", "output"))
    group = None
    if section is GROUP:
        group = read_group(fields, lambda item, key: _topic(item, key, inputs, outputs, "input", "output"), base_group)
    rows = read_lookups(fields, section, lambda item, key: _topic(item, key, inputs, outputs, "input", "output"))
    check = with_rows(section.sides, rows) if query is None else query.check()
    checks = check if query is None else query.check(aggregates=True)
    if group is not None:
        check = checks = group.check
    explode = read_explode(fields, section, check)
    if "explode" in fields and group is not None:
        group.names.add(ITEM)
    elif "explode" in fields and section is not VIEW:
        check = checks = with_rows(section.sides, replace(rows, rows={**(rows.rows or {}), ITEM: False}))
    keep = read_condition(fields, WHERE, check) if WHERE in fields else None
    key = _read_side(fields, "key", check, _MISSING_KEY, output.key if output else None)
    value = _read_side(fields, "value", checks, _MISSING_VALUE, output.value if output else None)
    headers = read_headers(fields, checks, output is not None and output.provenance)
    _refuse_other_keys(fields, section)
    expiry = read_expiry(fields, section)
    rule = None if query is None else read_view(fields, name, out or "", query, key, value, headers)
    if group is not None:
        rule = group_rule(fields, name, out or "", group, key, value, headers, explode, keep)
    if query is not None or group is not None:
        is_known = rule is not None and out is not None and len(fields.problems) == count
        return _Entry(replace(rule, expiry=expiry), fields, group) if rule is not None and is_known else None
    topics = _topics(fields, section, inputs, outputs)
    parts = section.read_join(fields)
    wheres = _wheres(fields, section)
    sides = [Side(side, topic, wheres[side], parts.get(side, ())) for side, topic in topics.items()]
    if len(fields.problems) > count or out is None:
        return None
    rule = Rule(section.kind, name, tuple(sides), out, key, value, headers, keep, lookups=rows.lookups, expiry=expiry)
    return _Entry(replace(rule, explode=explode), fields)


def _read_zed(
    fields: Fields,
    section: Section,
    name: str,
    out: str,
    output: Output | None,
    inputs: Mapping[str, Input | None],
    outputs: Mapping[str, Output | None],
) -> Rule | None:
    """A rule in Zed."""
    # Here: few files need it, and it loads a parser.
    from zync_assets.pipeline_file.zed.program import read_zed

    topics = _topics(fields, section, inputs, outputs)
    headers = read_headers(fields, over(section.sides), output is not None and output.provenance)
    _refuse_other_keys(fields, section)
    zed = read_zed(fields, section)
    if zed is None or len(topics) < len(section.sides):
        return None
    if output is not None and output.shape is not None and zed.types.records:
        fields.problem("out", f"`{out}` has a shape, which needs the names of all fields; write them in place of `...`")
    for side, shape, form in (("key", zed.key, output and output.key), ("value", zed.value, output and output.value)):
        if isinstance(shape, Mapping) and form is not None and form.format in ("string", "bytes"):
            fields.problem("zed", f"must make one value as {side}: the output's {side} format is {form.format}")
    sides = [Side(side, topic, zed.wheres[side], zed.parts.get(side, ())) for side, topic in topics.items()]
    return Rule(section.kind, name, tuple(sides), out, zed.key, zed.value, headers, zed=zed.types)


def _topics(
    fields: Fields, section: Section, inputs: Mapping[str, Input | None], outputs: Mapping[str, Output | None]
) -> dict[str, str]:
    """Side → its topic, but for sides with a problem."""
    topics: dict[str, str] = {}
    for side in section.sides:
        topic = _topic(fields, side, inputs, outputs, "input", "output")
        twin = next((name for name, side_topic in topics.items() if side_topic == topic), None)
        if twin is not None:
            fields.problem(side, f"is the topic that `{twin}` names, `{topic}`; a {section.kind} rule joins two topics")
        elif topic is not None:
            topics[side] = topic
    return topics


def _section(fields: Fields) -> Section | None:
    kinds = sorted(SECTIONS)
    word = fields.text("type", f"write one of {word_list(kinds)}")
    if word is not None and word not in SECTIONS:
        fields.problem("type", f"is no type of rule; known: {word_list(kinds)}{suggestion(word, kinds)}")
    return None if word is None else SECTIONS.get(word)


def _refuse_other_keys(fields: Fields, section: Section) -> None:
    """A problem for each key that only another kind of rule has."""
    keys = " and ".join(f"`{name}`" for name in section.sides or known_names(section.keys))
    known_keys = set(known_names(section.keys))
    for other_section in SECTIONS.values():
        for key in known_names(other_section.keys):
            if key in fields and key not in known_keys:
                known_keys.add(key)
                fields.problem(key, f"belongs to a rule of type {other_section.kind}; a {section.kind} rule has {keys}")


def _topic(
    fields: Fields, key: str, topics: Mapping[str, object], rivals: Mapping[str, object], noun: str, rival: str
) -> str | None:
    topic = fields.text(key, f"name a topic of {noun}s ({word_list(topics)})")
    if topic is None or topic in topics:
        return topic
    if topic in rivals:
        fields.problem(key, f"`{topic}` is an {rival}, not an {noun}; {noun}s: {word_list(topics)}")
    elif UNNAMED not in topics:
        cure = suggestion(topic, topics) or f"; {noun}s: {word_list(topics)}"
        if TOPIC in topic and noun == "output":
            cure = f'; add `- {{topic: "{topic}", pool: Staging, format: avro}}` to outputs, with a pool and format of your own'
        fields.problem(key, f"`{topic}` is no {noun} of this file{cure}")
    return None


def _wheres(fields: Fields, section: Section) -> dict[str, str | None]:
    """Side → its condition. One expression is the condition of every side."""
    node = fields.node("where")
    if not isinstance(node, YamlTable):
        return dict.fromkeys(section.sides, read_condition(fields, "where", over()))
    if not section.where:
        advice = (
            f"only a {other_section.kind} rule has a {' and a '.join(other_section.sides)}"
            for other_section in SECTIONS.values()
            if other_section.where
        )
        fields.problem("where", "; ".join(["must be one expression", *advice]))
        return dict.fromkeys(section.sides)
    sides = Fields(node, fields.key("where"), fields.problems, known_names(section.where))
    if not node.entries:
        fields.problem("where", f"is empty; write an expression, or {':, '.join(section.sides)}: with one each")
    return {side: read_condition(sides, side, over()) for side in section.sides}


def _read_side(fields: Fields, key: str, check: Check, cure: str, side: SideFormat | None) -> Shape:
    node = fields.node(key)
    if node is None:
        fields.problem(key, f"is missing; {cure}")
        return None
    if isinstance(node, YamlTable) and side is not None and side.format in ("string", "bytes"):
        fields.problem(key, f"must be one expression, not a mapping: the output's {key} format is {side.format}")
    return read_shape(node, fields.key(key), fields.line_of(key), check, fields.problems)


def _check_reach(entries: list[_Entry], pools: Mapping[str, str]) -> None:
    """A problem for each rule whose records an earlier rule of the same staging pool takes. ``pools``: of the outputs."""
    for index, later in enumerate(entries):
        rivals = [item for item in entries[:index] if pools.get(item.rule.out) == pools.get(later.rule.out)]
        for topic, condition in _conditions(later.rule).items():
            for earlier in rivals:
                conditions = _conditions(earlier.rule)
                if topic in conditions and leaves_nothing(conditions[topic], condition):
                    side = "records" if later.rule.group is not None else later.rule.sides[0].name
                    where = "where" if "where" in later.fields else side
                    later.fields.problem(
                        where,
                        f"never matches: rule `{earlier.rule.name}` (line {earlier.fields.line}) takes all such records of "
                        f"`{topic}` first; narrow its where, or put this rule before it",
                    )
                    break


def _conditions(rule: Rule) -> dict[str, str | None]:
    """Topic → the condition on its records; nothing for a view and for a further output of a rule: these take no records."""
    return {} if rule.view is not None or rule.part_of is not None else {side.topic: side.where for side in rule.sides}
