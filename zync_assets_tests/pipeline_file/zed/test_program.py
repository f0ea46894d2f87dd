"""The operators of Zed: what is left in ``out``."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zync_assets.pipeline_file.zed.nodes import ZedProblem
from zync_assets.pipeline_file.zed.program import ZedOutput, compile_program
from zync_assets.queries import FieldStep, FieldSteps
from zync_assets_tests.pipeline_file.zed.test_grammar import NODES, written

STARTS = ["", "yield", "drop", "cut", "put x :=", "out.value.a :=", "out :=", "rename out.a :="]


def made(text: str, *sides: str) -> ZedOutput:
    return compile_program(text, sides or ("in",))


def value(text: str) -> Any:
    return made(f"out:={{key: null, value: in.value}} | {text}").value


def test_a_record_in_out_is_key_and_value() -> None:
    found = made("| out:={key: left.key, value: {ID: left.value.id, deep: {s: right.value.s}}}", "left", "right")
    assert (found.key, found.value) == ("left.key", {"ID": "left.value.id", "deep": {"s": "right.value.s"}})
    assert (found.demands, found.records) == ((), ())


@pytest.mark.parametrize(
    "text",
    [
        "yield {out: {key: in.key, value: {a: 1}}}",
        "{out: {key: in.key, value: {a: 1}}}",
        "put out.key := in.key, out.value.a := 1",
        "put out.value := {a: 1, b: 2} | put out.key := this.in.key | drop out.value.b",
        'cut x := in.key | yield {out: {key: x, value: {"a": 1}}} | pass',
        "yield {x: {key: in.key, value: {b: 1}}, kafka: 1} | rename out := x | rename out.value.a := out.value.b",
        "out := {kafka: in.kafka, key: in.key, value: {a: 1}}",
        "a := 1 | out := {key: in.key, value: {a}}",
        "r := {a: 0, b: 1} | out := {key: in.key, value: {...r, a: 1}} | drop out.value.b, out.value.c",
    ],
)
def test_many_ways_lead_to_one_output(text: str) -> None:
    found = made(text)
    assert (found.key, found.value, found.records) == ("in.key", {"a": "1L"}, ())


def test_the_fields_of_one_put_are_set_at_once() -> None:
    found = made("out:={key: null, value: {a: 1, b: 2}} | out.value.a := out.value.b, out.value.b := out.value.a")
    assert found.value == {"a": "2L", "b": "1L"}


def test_null_is_a_tombstone_and_erases_a_field() -> None:
    found = made("out:={key: in.key, value: cast(null, typeof(in.value.before))}")
    assert (found.key, found.value) == ("in.key", None)
    assert value("yield {out: {key: null, value: {a: null, b: null(int64)}}}") == {
        "a": None,
        "b": "CAST(NULL AS BIGINT)",
    }


def test_a_record_with_the_fields_of_its_topic_is_left_to_the_topic_s_type() -> None:
    found = made(
        "out:={key: in.key, value: {...in.value.after, x: 1}} | drop out.value.y | rename out.value.n := out.value.m"
    )
    assert found.records == (
        FieldSteps(
            (
                FieldStep("keep", path=("in", "value", "after")),
                FieldStep("put", "x", shape="1L"),
                FieldStep("drop", "y"),
                FieldStep("rename", "n", old="m"),
            ),
            ("value",),
        ),
    )
    assert value("out.value.a := out.value.b") == "in.value"
    assert value("drop out.value.a | out.key := out.value.b") == "in.value"


def test_a_change_deep_inside_leaves_the_fields_around_it() -> None:
    found = made("out := in | out.value.after.x := in.value.before.x | drop out.kafka")
    after = FieldSteps(
        (FieldStep("keep", path=("in", "value", "after")), FieldStep("put", "x", shape="in.value.before.x"))
    )
    steps = (FieldStep("keep", path=("in", "value")), FieldStep("put", "after", shape=after))
    assert (found.key, found.records) == ("in.key", (FieldSteps(steps, ("value",)),))


PROBLEMS = {
    "yield 1, 2": "`yield` of several values makes several records; write a rule for each",
    "x := 1": "makes no `out`; write | out:={key: …, value: …}",
    "out := 1": "`out` is no record",
    "out := {key: in.key}": "`out` has no `value`; write `value: null` for a tombstone",
    "out := {value: in.value}": "`out` has no `key`; write `key: null` for records without a key",
    "out := {key: 1, value: 2, headers: 3}": "`out` has `headers`; a record of a topic has key and value alone",
    "out := {key: 1, value: {a: 1h}}": "`out.value.a` is a duration; durations are known only in",
    "out := {key: 1, value: {...in.value, a: coalesce(1h)}}": "durations are known only in",
    "out := {key: 1, value: {}}": "`out.value` has no fields",
    "out := {key: 1, value: left.value}": "`left` is missing; known here: in",
    "out := {key: 1, value: lef}": "`lef` is missing",
    'in.value.op == "u" | out := in': "put a condition into `where:` of the rule",
    "this := in": "`this` can't be set",
    "lower(in) := 1": "must be a field",
    "rename out.a := in": "`rename` keeps a field in its record",
    "out := {a: 1, b: 2} | rename out.a := out.b": "`rename` finds a field `a` already",
    "x := 1 | x.y := 2": "is no record, and gets no field `y`",
    "out := {key: 1, value: {...in.key, ...in.value}} | out.key := out.value.id": "may be of several records here",
    "out := {key: 1, value: in.value} | drop out.value.a | out.key := out.value.a": "an operator before this one removed it",
    "out := {key: 1, value: {...in.key, ...lower(in.value.s)}}": "`...` takes a record of the topic here",
    "out := {key: 1, value: {a: [{...in.value}]}}": "can't stand in an expression",
}


@pytest.mark.parametrize("text", PROBLEMS)
def test_a_program_without_one_output_is_a_problem(text: str) -> None:
    with pytest.raises(ZedProblem) as caught:
        made(text)
    assert PROBLEMS[text] in caught.value.message


def test_a_long_chain_is_a_problem_or_sql() -> None:
    with pytest.raises(ZedProblem, match="nested too deep"):
        made("out := {key: null, value: {a: " + "!" * 5_000 + "in.value.a}}")
    assert made("out := {key: null, value: {a: 1" + " + 1" * 100 + "}}").value == {"a": "1L" + " + 1L" * 100}


@given(st.lists(st.tuples(st.sampled_from(STARTS), NODES), min_size=1, max_size=4))
def test_any_program_is_an_output_or_a_problem(parts: list[tuple[str, Any]]) -> None:
    operators = (f"{start} {written(node)}" for start, node in parts)
    try:
        made(" | ".join(["out:={key: in.key, value: {...in.value, a: 1}}", *operators]))
    except ZedProblem as problem:
        assert problem.message
