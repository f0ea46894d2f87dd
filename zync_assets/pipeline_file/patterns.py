"""Rules for all inputs of a pattern: ``in: shop.public.*`` with ``out: "{topic}.clean"``.

The file is rewritten before it is read. A stateless rule with a pattern becomes a rule for each input that fits, in the order of
the inputs. An output that is called as the rule writes it becomes an output for each of these rules. Problems keep their lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from zync_assets.pipeline_file.source import Items, Node, Scalar, YamlEntry, YamlTable

TOPIC = "{topic}"


def with_patterns(file: YamlTable) -> YamlTable:
    """The file without patterns. A pattern that no input fits stays, and is a problem for the reader."""
    topics = [
        node.text for table in _tables(_node(file, "inputs")) if isinstance(node := _node(table, "topic"), Scalar)
    ]
    made: dict[str, list[str]] = {}
    tables = _tables(_node(file, "transforms"))
    rules = [rule for table in tables for rule in _rules(table, topics, made)]
    if rules == tables:
        return file
    outputs = {
        name: [item for table in _tables(_node(file, name)) for item in _outputs(table, made)]
        for name in ("outputs", "output")
    }
    return _with(file, {"transforms": rules, **outputs})


def _rules(table: YamlTable, topics: Sequence[str], made: dict[str, list[str]]) -> Iterator[YamlTable]:
    """The rules of a mapping; ``made``: topic as an output writes it → the topics that it stands for."""
    node = _node(table, "in")
    found = [
        topic for topic in topics if isinstance(node, Scalar) and "*" in node.text and fnmatchcase(topic, node.text)
    ]
    if not found:
        yield table
    for topic in found:

        def named(item: Node, topic: str = topic) -> Node:
            if isinstance(item, Items):
                return replace(item, items=tuple(map(named, item.items)))
            if isinstance(item, YamlTable):
                return _mapped(item, {"topic": named})
            if TOPIC in item.text:
                text = item.text.replace(TOPIC, topic)
                made.setdefault(item.text, [])
                made[item.text] += [text] if text not in made[item.text] else []
                return replace(item, text=text)
            return item

        def own(item: Node, topic: str = topic) -> Node:
            return replace(item, text=topic) if isinstance(item, Scalar) else item

        def title(item: Node, topic: str = topic) -> Node:
            return replace(item, text=f"{item.text} {topic}") if isinstance(item, Scalar) else item

        yield _mapped(table, {"in": own, "out": named, "name": title, "was": title})


def _outputs(table: YamlTable, made: Mapping[str, Sequence[str]]) -> Iterator[YamlTable]:
    node = _node(table, "topic")
    topics = made.get(node.text, ()) if isinstance(node, Scalar) else ()
    if not topics:
        yield table
    for topic in topics:
        yield _mapped(table, {"topic": lambda item, topic=topic: replace(item, text=topic)})


def _node(table: YamlTable, key: str) -> Node | None:
    return next((entry.node for entry in table.entries if entry.key == key), None)


def _tables(node: Node | None) -> list[YamlTable]:
    """The mappings of a list; a single mapping counts as a list of one."""
    if isinstance(node, YamlTable):
        return [node]
    return [item for item in node.items if isinstance(item, YamlTable)] if isinstance(node, Items) else []


def _mapped(table: YamlTable, changes: Mapping[str, Callable[..., Node]]) -> YamlTable:
    entries = (
        replace(entry, node=changes[entry.key](entry.node)) if entry.key in changes else entry
        for entry in table.entries
    )
    return replace(table, entries=tuple(entries))


def _with(file: YamlTable, lists: Mapping[str, Sequence[YamlTable]]) -> YamlTable:
    """The file with other mappings in some lists."""

    def entry(item: YamlEntry) -> YamlEntry:
        tables = lists.get(item.key)
        return item if not tables else replace(item, node=Items(item.node.line, tuple(tables)))

    return replace(file, entries=tuple(map(entry, file.entries)))
