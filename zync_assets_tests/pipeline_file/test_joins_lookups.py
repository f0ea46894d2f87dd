"""Look-ups in a pipeline file: what the model holds, and what is refused, with the place and the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from zync_assets.errors import PipelineFileError
from zync_assets.pipeline import Rule, ViewTable
from zync_assets.pipeline_file import load
from zync_assets.queries import Lookup

TEXT = """\
inputs:
  - {{topic: Orders, pool: Raw}}
  - {{topic: Payments, pool: Raw}}
  - {{topic: Customers, pool: Raw}}
outputs:
  - {{topic: Out, pool: Staging}}
  - {{topic: Others, pool: {pool}}}
transforms:
  - name: order
    {sides}
    lookup: {lookup}
    key: 1
    value: {value}
    out: Out
{more}"""
LOOKUP = "{c: {table: Customers, on: c.id = in.value.after.customer, missing: wait}}"
STATELESS = "type: stateless\n    in: Orders"
DENORM = "type: denorm\n    left: Orders\n    right: Payments\n    join-on: left.key = right.key"
VIEW = "  - {type: view, tables: {c: Customers}, from: c, key: c.id, value: {name: c.name}, out: Others}\n"
EVENTS = "  - {type: stateless, in: Customers, key: in.key, value: in.value, out: Others}\n"


def read(
    folder: Path,
    lookup: str = LOOKUP,
    *,
    sides: str = STATELESS,
    value: str = "{name: c.name}",
    more: str = "",
    pool: str = "Staging",
) -> tuple[Rule, ...]:
    file = folder / "shop.yaml"
    file.write_text(TEXT.format(lookup=lookup, sides=sides, value=value, more=more, pool=pool))
    return load(file, {}).rules


def problems(folder: Path, lookup: str = LOOKUP, **parts: str) -> list[str]:
    with pytest.raises(PipelineFileError) as caught:
        read(folder, lookup, **parts)
    return [f"{problem.line} {problem.key}: {problem.message}" for problem in caught.value.problems]


def test_a_lookup_is_a_table_and_what_its_row_must_have(tmp_path: Path) -> None:
    [rule] = read(tmp_path)
    on = (("in.value.after.customer", "c.id"),)
    assert rule.lookups == (Lookup(ViewTable("c", "Customers"), "in", on, "wait", 600_000),)
    assert rule.topics == ("Orders",)
    assert rule.inputs == ("Orders", "Customers")
    text = (
        "{C: {table: Customers, key: '{id: value.id}', row: value, deleted: value.gone, missing: wait, wait: 90s,"
        " on: in.key.a = upper(c.a) AND c.b = in.value.b + 1}}"
    )
    [rule] = read(tmp_path, text)
    table = ViewTable("C", "Customers", {"id": "value.id"}, "value", "value.gone")
    pairs = (("in.key.a", "upper(c.a)"), ("in.value.b + 1", "c.b"))
    assert rule.lookups == (Lookup(table, "in", pairs, "wait", 90_000),)
    [rule] = read(tmp_path, "{c: {table: Customers, on: c.id = right.value.id, missing: null}}", sides=DENORM)
    assert rule.lookups == (Lookup(ViewTable("c", "Customers"), "right", (("right.value.id", "c.id"),), "null"),)


@pytest.mark.parametrize(
    ("lookup", "message"),
    [
        ("{}", "lookup: is empty; write {c: {table: Customers,"),
        ("c", "lookup: must be a mapping of aliases, not text"),
        ("{c: Customers}", "lookup.c: must be a mapping, not text; write {c: {table"),
        (
            "{in: {table: Customers, on: in.id = in.key, missing: null}}",
            "lookup.in: is a word of its own in expressions",
        ),
        (
            "{c: {table: Customer, on: c.id = in.key, missing: null}}",
            "lookup.c.table: `Customer` is no input of this file",
        ),
        ("{c: {on: c.id = in.key, missing: null}}", "lookup.c.table: is missing; name a topic of inputs"),
        (
            "{c: {table: Customers, missing: null}}",
            "lookup.c.on: is missing; write an equality, such as c.id = in.value",
        ),
        (
            "{c: {table: Customers, on: c.id = in.key}}",
            "lookup.c.missing: is missing; write one of wait, null, quarantine",
        ),
        ("{c: {table: Customers, on: c.id = in.key, missing: skip}}", "lookup.c.missing: must be one of wait, null,"),
        (
            "{c: {table: Customers, on: c.id = in.key, missing: null, wait: 1m}}",
            "lookup.c.wait: goes with missing: wait",
        ),
        ("{c: {table: Customers, on: c.id = in.key, missing: wait, wait: soon}}", "lookup.c.wait: must be a time"),
        ("{c: {table: Customers, on: c.id > in.key, missing: null}}", "lookup.c.on: `c.id > in.key` is no equality"),
        (
            "{c: {table: Customers, on: c.id = c.no, missing: null}}",
            "lookup.c.on: `c.id = c.no` does not compare `c` with `in`",
        ),
        (
            "{c: {table: Customers, on: c.id = 7, missing: null}}",
            "lookup.c.on: `c.id = 7` does not compare `c` with `in`",
        ),
        (
            "{c: {table: Customers, on: c.id = in.key OR c.id = in.key.a, missing: null}}",
            "lookup.c.on: must be equalities",
        ),
        (
            "{c: {table: Customers, on: c.value.after.id = in.key, missing: null}}",
            "is a row of the table already: write `c.id`",
        ),
        (
            "{c: {table: Customers, on: c.id = key.id, missing: null}}",
            "lookup.c.on: `key.id` is not known here; write `in.key.id`",
        ),
        ("{c: {table: Customers, on: rand() = in.key, missing: null}}", "`rand()` is not deterministic"),
        (
            "{c: {table: Customers, of: x, on: c.id = in.key, missing: null}}",
            "lookup.c.of: is no key that is known here",
        ),
        (
            "{c: {table: Orders, on: c.id = in.key, missing: null}}",
            "lookup: `Orders` is an event input of the rule itself",
        ),
    ],
)
def test_a_lookup_that_cannot_work_is_refused_with_its_line_and_a_cure(
    tmp_path: Path, lookup: str, message: str
) -> None:
    found = problems(tmp_path, lookup)
    assert any(f"transforms[0].{message}" in problem or message in problem for problem in found), found
    assert found[0].startswith("12 ")


def test_a_rule_uses_the_rows_that_it_looks_up(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, value="{name: d.name}")
    assert problem.endswith("`d.name` is not known here; known here: in.kafka, in.key, in.value, c")
    [problem] = problems(tmp_path, sides=STATELESS + "\n    where: c.id = 1")
    assert "transforms[0].where: `c.id` is not known here" in problem
    [problem] = problems(tmp_path, LOOKUP.replace("in.", "left."), sides=DENORM, value="{name: c.name}")
    assert "lookup.c.missing: must be null or quarantine in a denorm rule: a pair can't wait for a row" in problem


def test_a_topic_is_a_table_or_an_event_input_of_a_pool(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, more=EVENTS)
    assert (
        "`Customers` is a table of rule `order` (line 9) in the pool Staging; a topic is a table or an event" in problem
    )
    assert len(read(tmp_path, more=EVENTS, pool="Other")) == 2
    # A view of the pool shares the table.
    assert len(read(tmp_path, more=VIEW)) == 2
