"""A group in the pipeline file: its aggregates become columns, and each problem has a line and a cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from zync_assets_tests.pipeline_file.problems import assert_problem, loaded

FILE = """
kafka: {bootstrap.servers: "localhost:9092"}
inputs:
  - {topic: Orders, pool: Raw, format: avro}
  - {topic: Lines, pool: Raw, format: avro}
outputs:
  - {topic: Events, pool: Staging, format: avro}
transforms:
  - name: event
    type: group
    records: {o: Orders, l: Lines}
    group-by: {o: value.ID, l: value.OrderID}
    complete-when: count_if(topic = 'Lines') = max(o.value.lines)
    out: Events
    key: {ID: first(o).value.ID}
    value: {n: count(*), total: sum(l.value.price * l.value.qty), skus: "transform(list(l), item -> item.value.sku)"}
"""


def test_aggregates_are_columns_and_their_arguments_name_the_record(tmp_path: Path) -> None:
    (rule,) = loaded(tmp_path, FILE).rules
    assert [(side.name, side.topic, side.keys) for side in rule.sides] == [
        ("o", "Orders", ("o.value.ID",)),
        ("l", "Lines", ("l.value.OrderID",)),
    ]
    assert rule.key == {"ID": "`first(o)`.value.ID"}
    assert rule.value == {
        "n": "`count(*)`",
        "total": "`sum(l.value.price * l.value.qty)`",
        "skus": "transform(`list(l)`, item -> item.value.sku)",
    }
    assert rule.group is not None
    assert rule.group.complete == "`count_if(topic = 'Lines')` = `max(o.value.lines)`"
    assert {item.name: dict(item.arguments) for item in rule.group.aggregates} == {
        "count_if(topic = 'Lines')": {"o": "o.kafka.topic = 'Lines'", "l": "l.kafka.topic = 'Lines'"},
        "max(o.value.lines)": {"o": "o.value.lines"},
        "first(o)": {"o": "o"},
        "count(*)": {"o": "true", "l": "true"},
        "sum(l.value.price * l.value.qty)": {"l": "l.value.price * l.value.qty"},
        "list(l)": {"l": "l"},
    }
    assert not rule.held


def test_two_aggregates_that_differ_in_case_alone_are_two_columns(tmp_path: Path) -> None:
    text = FILE.replace("n: count(*)", "n: count_if(topic = 'lines')")
    (rule,) = loaded(tmp_path, text).rules
    assert rule.group is not None
    assert len({item.name.lower() for item in rule.group.aggregates}) == len(rule.group.aggregates) == 6


def test_aggregates_of_literals_with_other_spaces_are_two_and_spaces_between_words_are_one(tmp_path: Path) -> None:
    one, other = "count_if(l.value.s = 'a b')", "count_if(l.value.s = 'a  b')"
    text = FILE.replace("n: count(*)", f'n: "{one} + {other} + {one.replace(" =", "   =")}"')
    (rule,) = loaded(tmp_path, text).rules
    assert isinstance(rule.value, dict)
    assert rule.value["n"] == f"`{one}` + `{other}` + `{one}`"
    assert rule.group is not None
    arguments = {item.name: item.arguments["l"] for item in rule.group.aggregates if item.name in (one, other)}
    assert arguments == {one: "l.value.s = 'a b'", other: "l.value.s = 'a  b'"}


def test_all_outputs_of_a_group_have_the_aggregates_of_all(tmp_path: Path) -> None:
    head, _, _ = FILE.partition("    out: Events")
    outputs = (
        "    out:\n      - {topic: Events, key: first(o).key, value: {n: sum(l.value.n)}}\n"
        "      - {topic: Events, key: first(o).key, value: {n: SUM(l.value.n), l: max(l.value.n)}}\n"
    )
    first, second = loaded(tmp_path, head + outputs).rules
    assert first.group == second.group is not None
    assert second.value == {"n": "`SUM(l.value.n) `", "l": "`max(l.value.n)`"}
    assert first.group is not None
    names = {item.name for item in first.group.aggregates}
    assert names >= {"first(o)", "sum(l.value.n)", "SUM(l.value.n) ", "max(l.value.n)"}


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("{o: Orders, l: Lines}", "{o: Orders, source: Lines}", 11, "is a word of its own in groups; choose another"),
        ("    records: {o: Orders, l: Lines}\n", "", 9, "records: is missing; write {o: Orders, l: Lines}"),
        ("l: Lines}", "l: Line}", 11, "`Line` is no input of this file; did you mean `Lines`?"),
        ("l: Lines}", "l: Orders}", 11, "`Orders` has an alias already"),
        ("{o: Orders, l", "{value: Orders, l", 11, "is a word of its own in expressions; choose another alias"),
        (
            "{o: value.ID, l: value.OrderID}",
            "{o: value.ID}",
            12,
            "has nothing for `l`; write value.ID, or {o: value.ID",
        ),
        ("{o: value.ID, l: value.OrderID}", "o.value.ID", 12, "`o.value.ID` is not known here"),
        ("    group-by: {o: value.ID, l: value.OrderID}\n", "", 9, "group-by: is missing"),
        ("count_if(topic = 'Lines') = max(o.value.lines)", "value.done", 13, "write `first(o).value.done`"),
        ("count_if(topic = 'Lines') = max(o.value.lines)", "o.value.done", 13, "write `first(o).value.done`"),
        ("count_if(topic = 'Lines') = max(o.value.lines)", "1 = 1", 13, "must aggregate the records of the group"),
        ("count_if(topic = 'Lines')", "size(list(l))", 13, "must not hold `list(l)`; count the records"),
        ("count_if(topic = 'Lines')", "every(l.value.done)", 13, "`every()` is no aggregate of a group; use bool_and"),
        (
            "max(o.value.lines)",
            "max(o.value.lines + l.value.n)",
            13,
            "mixes l, o; an aggregate sees one record at a time",
        ),
        ("max(o.value.lines)", "max(sum(o.value.lines))", 13, "`sum()` stands in another aggregate"),
        ("max(o.value.lines)", "max(x.value.lines)", 13, "`x.value.lines` is not known here"),
        ("max(o.value.lines)", "count(*) FILTER (WHERE true)", 13, "`count()` has a FILTER; write count_if"),
        ("n: count(*)", "n: count(DISTINCT l.key)", 16, "`count()` has a DISTINCT"),
        ("n: count(*)", "n: rand()", 16, "`rand()` is not deterministic"),
        ("first(o).value.ID", "first(x).value.ID", 15, "`first(x)` names no alias of `records:`; aliases: o, l"),
        (
            "    out: Events",
            "    left: Orders\n    out: Events",
            14,
            "belongs to a rule of type denorm; a group rule has",
        ),
        ("    out: Events", "    expire-after: soon\n    out: Events", 14, "must be a time, such as 90m"),
        (
            "    out: Events",
            "    on-expire: drop\n    out: Events",
            14,
            "goes with expire-after; write expire-after: 1h",
        ),
        ("    out: Events", "    on-expire: wait\n    out: Events", 14, "must be one of quarantine, drop, emit"),
        ("    out: Events", "    lookup: {c: {table: Lines}}\n    out: Events", 14, "a group rule has no look-ups"),
    ],
)
def test_a_problem_has_its_line_and_its_cure(tmp_path: Path, old: str, new: str, line: int, message: str) -> None:
    assert_problem(tmp_path, FILE, old, new, line, message)
