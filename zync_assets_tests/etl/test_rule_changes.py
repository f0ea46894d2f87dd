"""The fingerprints of rules, and how the next batch tells what changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zync_assets.errors import EtlError, PipelineFileError
from zync_assets.etl.rule_changes import fingerprint, fingerprints, renamed_rules, report_changes, rule_changes
from zync_assets.lake.head import Head, head_rows, parse_head
from zync_assets.pipeline import Pipeline, Rule, Side
from zync_assets.pipeline_file import load

HEAD = """
inputs: [{topic: A, pool: Raw}, {topic: B, pool: Raw}]
output: {topic: C, pool: Staging}
transforms:
"""
JOIN = (
    "- {name: join, type: denorm, where: value.op = 'c', left: A, right: B, join-on: left.key = right.key, out: C,"
    " key: left.key, value: left.value}\n"
)
COPY = "- {name: copy, type: stateless, in: A, where: value.op = 'u', out: C, key: in.key, value: in.value}\n"


def read(folder: Path, *rules: str, more: str = "") -> Pipeline:
    (folder / "shop.yaml").write_text(more + HEAD + "".join(rules))
    return load(folder / "shop.yaml", {})


def told(folder: Path, before: tuple[str, ...], *rules: str, more: str = "") -> list[str]:
    head = Head(3, rules=fingerprints(read(folder, *before).rules))
    found: list[str] = []
    report_changes(read(folder, *rules, more=more), "Staging", head, found.append)
    return found


def rule(**parts: Any) -> Rule:
    return replace(Rule("stateless", "r", (Side("in", "A"),), "C", "in.key", "in.value"), **parts)


def test_a_fingerprint_is_of_what_a_rule_does_and_not_of_its_name() -> None:
    same = [rule(), rule(name="s"), rule(was="q")]
    assert len({fingerprint(each) for each in same}) == 1
    others = [
        rule(key={"a": "in.key"}),
        rule(value=None),
        rule(out="D"),
        rule(headers={"h": "in.key"}),
        rule(keep="in.key > 1"),
        rule(sides=(Side("in", "B"),)),
        rule(sides=(Side("in", "A", "value.x"),)),
        rule(sides=(Side("in", "A", None, ("in.key",)),)),
    ]
    assert len({fingerprint(each) for each in [*same, *others]}) == len(others) + 1


def test_the_head_keeps_fingerprints() -> None:
    head = Head(3, rules=fingerprints([rule()]))
    assert parse_head(3, head_rows(head)) == head


def test_without_an_edit_and_for_a_lake_of_an_earlier_version_nothing_is_told(tmp_path: Path) -> None:
    assert told(tmp_path, (JOIN, COPY), JOIN, COPY) == []
    assert told(tmp_path, (JOIN, COPY), COPY, JOIN) == []
    assert rule_changes(read(tmp_path, JOIN).rules, Head(3)) == []


def test_an_edit_is_told_with_the_parts_that_changed(tmp_path: Path) -> None:
    edited = COPY.replace("value.op = 'u'", "value.op = 'd'").replace("value: in.value", "value: null")
    new = COPY.replace("copy", "more").replace("'u'", "'r'")
    (text,) = told(tmp_path, (JOIN, COPY), edited, new)
    assert text == (
        "pool Staging: since batch 3, rule copy changed (where, value); rule more is new; rule join is gone. New records go by"
        " the new rules; staged outputs and their numbers stay as they are."
    )


GATHER = (
    "- {name: all, type: group, records: {a: A, b: B}, group-by: value.id, complete-when: count(*) = 2, out: C,"
    " key: max(value.id), value: {n: max(value.n)}}\n"
)


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("value.id, complete", "value.n, complete", "group-by"),
        ("count(*) = 2", "count(*) = 3", "complete-when"),
        ("{n: max(value.n)}", "{n: min(value.n)}", "value"),
        ("{a: A, b: B}", "{a: A}", "records"),
        ("{a: A, b: B}", "{a: A}, where: value.n > 1", "records, where"),
    ],
)
def test_a_part_of_a_group_is_told_as_the_file_spells_it(tmp_path: Path, old: str, new: str, part: str) -> None:
    (text,) = told(tmp_path, (GATHER,), GATHER.replace(old, new))
    assert f"since batch 3, rule all changed ({part}). New" in text
    # A fingerprint of an earlier version has the condition together with the aggregates.
    (kept,) = fingerprints(read(tmp_path, GATHER).rules).values()
    earlier = {name: it for name, it in json.loads(kept).items() if name not in ("condition", "aliases")}
    head = Head(3, rules={"all": json.dumps(earlier)})
    assert rule_changes(read(tmp_path, GATHER).rules, head) == []
    (change,) = rule_changes(read(tmp_path, GATHER.replace("= 2", "= 3")).rules, head)
    assert change.parts == ("complete-when",)


def test_the_outputs_of_a_renamed_rule_are_not_told_by_themselves(tmp_path: Path) -> None:
    outs = "[{topic: C, key: in.key, value: in.value}, {topic: C, key: in.key, value: null}]"
    both = f"- {{name: NAME, type: stateless, in: A, out: {outs}}}\n"
    said = told(tmp_path, (both.replace("NAME", "old"),), both.replace("NAME", "new, was: old"))
    assert "since batch 3, rule new was old; rule new/2 was old/2. New" in said[0]


def test_a_rule_that_passes_others_is_told_once(tmp_path: Path) -> None:
    """Rules that take no record of each other may stand in any order."""
    copies = [COPY.replace("copy", f"copy-{at}").replace("value.op = 'u'", f"value.id > {at}") for at in range(4)]
    before = (*copies, JOIN)
    assert (
        "3, rule copy-3 now stands before copy-0, copy-1, copy-2. New"
        in told(tmp_path, before, copies[3], *copies[:3], JOIN)[0]
    )
    assert (
        "3, rule copy-0 now stands behind copy-1, copy-2. New"
        in told(tmp_path, before, *copies[1:3], copies[0], copies[3], JOIN)[0]
    )
    assert "3, rule join now stands before copy-3. New" in told(tmp_path, before, *copies[:3], JOIN, copies[3])[0]
    (both,) = told(tmp_path, before, copies[1], copies[0], copies[3], copies[2], JOIN)
    assert both.count("now stands") == 2
    assert told(tmp_path, before, *copies[1:], JOIN)[0].count("rule ") == 1
    assert told(tmp_path, (COPY, JOIN), JOIN.replace("'c'", "'r'").replace("name: join", "name: r"), COPY, JOIN)[
        0
    ].endswith("rule r is new. New records go by the new rules; staged outputs and their numbers stay as they are.")


def test_a_renamed_rule_is_told_by_both_names(tmp_path: Path) -> None:
    renamed = JOIN.replace("name: join", "name: pair, was: join")
    assert "rule pair was join. New" in told(tmp_path, (JOIN,), renamed)[0]
    assert (
        "rule pair was join, and changed (key)."
        in told(tmp_path, (JOIN,), renamed.replace("key: left.key", "key: 1"))[0]
    )


def test_a_rule_change_may_stop_etl(tmp_path: Path) -> None:
    fail = "on-rule-change: fail"
    assert told(tmp_path, (JOIN,), JOIN, more=fail) == []
    with pytest.raises(EtlError, match=r"rule copy is new\. Nothing was done, because .* leave the key out"):
        told(tmp_path, (JOIN,), JOIN, COPY, more=fail)


def test_records_that_wait_under_a_former_name_are_looked_at_again(tmp_path: Path) -> None:
    pipeline = read(tmp_path, JOIN.replace("name: join", "name: pair, was: join"), COPY)
    known = fingerprints(pipeline.rules_of("Staging"))

    def retried(*counts: tuple[str, int], rules: dict[str, str] = known) -> tuple[str, ...]:
        return renamed_rules(pipeline, "Staging", Head(waiting={(rule, "A"): n for rule, n in counts}, rules=rules))

    assert retried(("join", 2), ("other", 1)) == ("join",)
    assert retried(("join", 0), ("pair", 1)) == ()
    # A rule that the last commit lacked is back. Early versions kept no rules.
    assert retried(("pair", 1), rules={"copy": known["copy"]}) == ("pair",)
    assert retried(("pair", 1), rules={}) == ()


def test_a_former_name_is_of_no_rule_of_the_file_and_of_no_view(tmp_path: Path) -> None:
    view = "- {name: v, was: w, type: view, tables: {a: A}, from: a, out: C, key: a.id, value: {id: a.id}}\n"
    for rules, message in (
        ((JOIN.replace("name: join", "name: join, was: copy"), COPY), "`copy` is the name of a rule of this file"),
        ((view,), "a renamed view goes on with its result"),
    ):
        with pytest.raises(PipelineFileError, match=message):
            read(tmp_path, *rules)
