"""The outputs of a rule: ``out`` as a list, ``explode``, expiry, and which outputs are held; and rules for a pattern of inputs.

A rule with a list is read once for each output, as a rule with one. The first of these rules takes the records, and the others
are ``part_of`` it.

``in: shop.public.*`` with ``out: "{topic}.clean"`` is a rule for all inputs of a pattern. The file is rewritten before it is
read. A stateless rule with a pattern becomes a rule for each input that fits, in the order of the inputs. An output that is
called as the rule writes it becomes an output for each of these rules. Problems keep their lines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeVar, get_args

from zync_assets.pipeline import Output, Rule
from zync_assets.pipeline_file.fields import Fields, kind
from zync_assets.pipeline_file.key import known_names
from zync_assets.pipeline_file.keys import EXPIRY, OUT, VIEW, Section, joining_kinds
from zync_assets.pipeline_file.source import Items, Node, Scalar, YamlEntry, YamlTable
from zync_assets.pipeline_file.topics import TOPIC, Check, read_condition
from zync_assets.queries import Expiry, OnExpire

Candidate = TypeVar("Candidate")

ITEM = "item"
"""The name of an element of ``explode`` in expressions."""
WHERE = "out.where"
"""The key of an output's own condition."""
_OF_OUTPUTS = ("key", "value", "headers", "explode")


def each_output(fields: Fields) -> Iterator[Fields]:
    """A rule's mapping, once for each output of its ``out``."""
    node = fields.node("out")
    if not isinstance(node, Items):
        yield fields
        return
    if not node.items:
        fields.problem("out", "is empty; name a topic, or list mappings of topic, key and value")
    for name in _OF_OUTPUTS:
        if name in fields:
            fields.problem(name, "stands in each output of the list `out:`; move it there")
    rule_entries = [entry for name, entry in fields.entries.items() if name not in ("out", *_OF_OUTPUTS)]
    for at, item in enumerate(node.items):
        if not isinstance(item, YamlTable):
            fields.problem("out", f"must list mappings of topic, key and value, not {kind(item)}")
            continue
        output_fields = Fields(item, f"{fields.key('out')}[{at}]", fields.problems, known_names(OUT.keys))
        names = {"topic": "out", "where": WHERE}
        output_entries = [replace(entry, key=names.get(entry.key, entry.key)) for entry in item.entries]
        places = {names.get(key.name, key.name): output_fields.key(key.name) for key in OUT.keys}
        table = YamlTable(item.line, (*_remaining_entries(rule_entries, output_entries), *output_entries))
        yield Fields(table, fields.path, fields.problems, None, places=places)


def _remaining_entries(entries: Sequence[YamlEntry], overrides: Sequence[YamlEntry]) -> list[YamlEntry]:
    keys = {entry.key for entry in overrides}
    return [entry for entry in entries if entry.key not in keys]


def parts(candidates: Sequence[Candidate | None], rule: Callable[[Candidate], Rule]) -> list[tuple[Candidate, Rule]]:
    """The rules of one mapping, all but the first as parts of the first. Nothing if one of them has a problem."""
    valid_candidates = [item for item in candidates if item is not None]
    if len(valid_candidates) < len(candidates) or not valid_candidates:
        return []
    # The last output knows the aggregates of all outputs.
    last_group = rule(valid_candidates[-1]).group
    pairs = [(item, rule(item)) for item in valid_candidates]
    if last_group is not None:
        pairs = [
            (item, replace(part, group=replace(part.group, aggregates=last_group.aggregates)))
            for item, part in pairs
            if part.group is not None
        ]
    first_pair, *other_pairs = pairs
    name = first_pair[1].name
    return [
        first_pair,
        *((item, replace(part, name=f"{name}/{at}", part_of=name)) for at, (item, part) in enumerate(other_pairs, 2)),
    ]


def former_name(fields: Fields, rule: Rule) -> str | None:
    """The former name of a rule, or of its output."""
    name = fields.text("was") if "was" in fields else None
    if name is not None and rule.view is not None:
        fields.problem("was", "belongs to a rule that records can wait for; a renamed view goes on with its result")
    return name if name is None or rule.part_of is None else name + rule.name.removeprefix(rule.part_of)


def check_parts(rules: Sequence[tuple[Rule, Fields]], outputs: Mapping[str, Output | None]) -> None:
    """Note a problem for an output in another staging pool than the rule's first output. Several outputs to a topic whose changes
    are merged are a problem too, and so is a rule with the name of another rule's output."""
    pools = {topic: item.pool for topic, item in outputs.items() if item is not None}
    firsts = {rule.name: rule for rule, _ in rules if rule.part_of is None}
    owners = {rule.name: rule.part_of for rule, _ in rules if rule.part_of is not None}
    for rule, fields in rules:
        output = outputs.get(rule.out)
        if rule.part_of is None and rule.name in owners:
            owner = owners[rule.name]
            fields.problem(
                "name", f"an output of rule {owner} is called `{rule.name}` in the account; choose another name"
            )
        is_part = rule.part_of is not None or rule.name in owners.values()
        is_one = rule.view is None and not is_part and rule.explode is None and WHERE not in fields
        if output is not None and output.coalesce and not is_one:
            fields.problem("out", f"`{rule.out}` has coalesce: true, for rules with one output; remove it there")
        pool_pair = pools.get(rule.out), pools.get(firsts.get(rule.part_of or "", rule).out)
        if None not in pool_pair and pool_pair[0] != pool_pair[1]:
            fields.problem(
                "out",
                f"`{rule.out}` is in the pool {pool_pair[0]}, and the rule's first output in {pool_pair[1]}; the outputs of a"
                " rule are one commit: name one pool",
            )


def read_explode(fields: Fields, section: Section, check: Check) -> str | None:
    """The array of a rule, each element of which makes an output."""
    if "explode" in fields and section is VIEW:
        fields.problem("explode", "belongs to a rule of events; a view has a row for each key: keep the array as it is")
        return None
    return read_condition(fields, "explode", check)


def read_expiry(fields: Fields, section: Section) -> Expiry | None:
    """The expiry of a rule. Only a record of a rule with a join key waits for another record."""
    delay, action = fields.duration("expire-after"), fields.choice("on-expire", get_args(OnExpire))
    present = [key.name for key in EXPIRY if key.name in fields]
    if present and not section.join:
        fields.problem(present[0], f"belongs to a {joining_kinds()} rule; no record waits for a {section.kind} rule")
    elif present and "expire-after" not in fields:
        fields.problem("on-expire", "goes with expire-after; write expire-after: 1h, or remove this line")
    elif present and "lookup" in fields:
        fields.problem("expire-after", "can't stand beside `lookup:`; look the row up in a view, or remove one of both")
    return None if delay is None else Expiry(delay, action or "quarantine", fields.text("expire-after") or "")


def held(rules: Sequence[Rule], outputs: Mapping[str, Output | None]) -> tuple[Rule, ...]:
    """The rules with ``held``. An output without pending records has nothing to hold."""
    joins = [rule for rule in rules if any(side.keys for side in rule.sides)]
    # A record that waits for a row does not know its source row. A record that expires leaves its source row without an output.
    looked_up = {rule.out for rule in rules if rule.lookups or rule.expiry is not None}
    # Of several outputs of a match, each would be held by itself.
    divided_rules = {
        rule.part_of or rule.name for rule in rules if rule.part_of is not None or rule.explode is not None
    }
    looked_up |= {rule.out for rule in rules if (rule.part_of or rule.name) in divided_rules}
    # Only the results of this kind have the source rows of their records.
    waiting = {rule.out for rule in joins} - {rule.out for rule in joins if rule.kind != "denorm"}
    unheld_topics = {topic for topic, item in outputs.items() if item is not None and (not item.hold or item.coalesce)}
    return tuple(replace(rule, held=rule.out in waiting - unheld_topics - looked_up) for rule in rules)


def unheld(rules: Sequence[Rule], outputs: Sequence[Output]) -> dict[str, str]:
    """Output topic → why a change of a source row does not wait for a pending record of the row, though the file does not say
    so."""
    reason_by_topic: dict[str, str] = {}
    for item in outputs:
        topic_rules = [rule for rule in rules if rule.out == item.topic]
        if (
            not item.hold
            or any(rule.held for rule in topic_rules)
            or not any(side.keys for rule in topic_rules for side in rule.sides)
        ):
            continue
        groups = [rule.name for rule in topic_rules if rule.kind != "denorm" and any(side.keys for side in rule.sides)]
        expiring = [rule.name for rule in topic_rules if rule.expiry is not None]
        looking = [rule.name for rule in topic_rules if rule.lookups]
        reasons = {
            "coalesce is true": item.coalesce,
            f"rule {(groups or [''])[0]} gathers records": bool(groups),
            f"records of rule {(expiring or [''])[0]} expire": bool(expiring),
            f"rule {(looking or [''])[0]} looks rows up": bool(looking),
        }
        reason_by_topic[item.topic] = next(
            (text for text, holds in reasons.items() if holds), "a rule has several outputs of a match"
        )
    return reason_by_topic


def with_patterns(file: YamlTable) -> YamlTable:
    """The file without patterns. A pattern that no input fits stays, and is a problem for the reader."""
    topics = [
        node.text for table in _tables(_node(file, "inputs")) if isinstance(node := _node(table, "topic"), Scalar)
    ]
    topics_by_pattern: dict[str, list[str]] = {}
    tables = _tables(_node(file, "transforms"))
    output_topics = {
        node.text
        for name in ("outputs", "output")
        for table in _tables(_node(file, name))
        if isinstance(node := _node(table, "topic"), Scalar)
    }
    rules = [
        (at, rule)
        for at, table in enumerate(tables)
        for rule in _rules_of_inputs(table, topics, output_topics, topics_by_pattern)
    ]
    if [rule for _, rule in rules] == tables:
        return file
    outputs = {
        name: [
            (at, item)
            for at, table in enumerate(_tables(_node(file, name)))
            for item in _outputs(table, topics_by_pattern)
        ]
        for name in ("outputs", "output")
    }
    return _with_lists(file, {"transforms": rules, **outputs})


def _rules_of_inputs(
    table: YamlTable, topics: Sequence[str], outputs: Collection[str], topics_by_pattern: dict[str, list[str]]
) -> Iterator[YamlTable]:
    """The rules of a mapping. ``outputs``: the topics of the file's outputs, as the file has them.

    ``topics_by_pattern``: an output's topic as the file has it → the topics of the rules for its inputs. A topic without
    an output stays as the file has it: the file then has one problem, and not a problem for each input.
    """
    node = _node(table, "in")
    matching_topics = [
        topic for topic in topics if isinstance(node, Scalar) and "*" in node.text and fnmatchcase(topic, node.text)
    ]
    if not matching_topics:
        yield table
    for topic in matching_topics:

        def with_output_topic(item: Node, topic: str = topic) -> Node:
            if isinstance(item, Items):
                return replace(item, items=tuple(map(with_output_topic, item.items)))
            if isinstance(item, YamlTable):
                return _with_nodes(item, {"topic": with_output_topic})
            own_names = {item.text, *(item.text.replace(TOPIC, name) for name in matching_topics)}
            if TOPIC in item.text and not own_names.isdisjoint(outputs):
                text = item.text.replace(TOPIC, topic)
                topics_by_pattern.setdefault(item.text, [])
                topics_by_pattern[item.text] += [text] if text not in topics_by_pattern[item.text] else []
                return replace(item, text=text)
            return item

        def with_input_topic(item: Node, topic: str = topic) -> Node:
            return replace(item, text=topic) if isinstance(item, Scalar) else item

        def with_title(item: Node, topic: str = topic) -> Node:
            return replace(item, text=f"{item.text} {topic}") if isinstance(item, Scalar) else item

        yield _with_nodes(
            table, {"in": with_input_topic, "out": with_output_topic, "name": with_title, "was": with_title}
        )


def _outputs(table: YamlTable, topics_by_pattern: Mapping[str, Sequence[str]]) -> Iterator[YamlTable]:
    node = _node(table, "topic")
    topics = topics_by_pattern.get(node.text, ()) if isinstance(node, Scalar) else ()
    if not topics:
        yield table
    for topic in topics:
        yield _with_nodes(table, {"topic": lambda item, topic=topic: replace(item, text=topic)})


def _node(table: YamlTable, key: str) -> Node | None:
    return next((entry.node for entry in table.entries if entry.key == key), None)


def _tables(node: Node | None) -> list[YamlTable]:
    """The mappings of a list; a single mapping counts as a list of one."""
    if isinstance(node, YamlTable):
        return [node]
    return [item for item in node.items if isinstance(item, YamlTable)] if isinstance(node, Items) else []


def _with_nodes(table: YamlTable, changes: Mapping[str, Callable[..., Node]]) -> YamlTable:
    entries = (
        replace(entry, node=changes[entry.key](entry.node)) if entry.key in changes else entry
        for entry in table.entries
    )
    return replace(table, entries=tuple(entries))


def _with_lists(file: YamlTable, lists: Mapping[str, Sequence[tuple[int, YamlTable]]]) -> YamlTable:
    """The file with other mappings in some lists, each with the number of the mapping that it was made of."""

    def entry(item: YamlEntry) -> YamlEntry:
        tables = tuple(replace(table, at=at) for at, table in lists.get(item.key, ()))
        return item if not tables else replace(item, node=Items(item.node.line, tables))

    return replace(file, entries=tuple(map(entry, file.entries)))
