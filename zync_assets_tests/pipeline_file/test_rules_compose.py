"""An output's shape in the rules that write to it: by text, without Spark."""

from __future__ import annotations

import pytest

from zync_assets.pipeline import RecordShape, Rule, Shape, Side
from zync_assets.pipeline_file.rules import Missing, composed, unmade

VALUE: Shape = {"ID": "in.value.id", "more": {"name": "upper(in.value.n)", "none": None}}


def rule(value: Shape = VALUE, key: Shape = "in.key") -> Rule:
    return Rule("stateless", "r", (Side("in", "A"),), "C", key, value)


def made(where: str | None = None, of: Shape = VALUE, **sides: Shape) -> Rule:
    return composed(rule(of), RecordShape(where, sides))


def test_fields_are_what_the_rule_makes_of_them() -> None:
    assert made(value={"id": "value.id + 1", "n": "value.more.name", "z": "value.more.none"}).value == {
        "id": "(in.value.id) + 1",
        "n": "(upper(in.value.n))",
        "z": "NULL",
    }
    assert made(key="value.more").key == "named_struct('name', (upper(in.value.n)), 'none', NULL)"
    assert made(key={"k": "concat(key, value.ID)"}).key == {"k": "concat((in.key), (in.value.id))"}


def test_null_stands_for_a_whole_element_of_what_the_rule_makes_null() -> None:
    found = made("value.more.none[0] IS NULL AND size(value.more.none) > value.ID", of=VALUE)
    assert found.keep == "NULL IS NULL AND NULL > (in.value.id)"
    assert made(value={"a": "element_at(value.more.none, value.ID).b"}).value == {"a": "NULL"}


def test_of_one_expression_the_rest_of_a_path_stays_and_null_stays_null() -> None:
    found = made("value.op = 'c' AND key.id > 1", of="in.value", value={"a": "value.after.a"})
    assert found.keep == "(in.value).op = 'c' AND (in.key).id > 1"
    assert found.value == "CASE WHEN (in.value) IS NOT NULL THEN named_struct('a', ((in.value).after.a)) END"


def test_a_tombstone_stays_one() -> None:
    found = made("value IS NULL OR value.a = 1", of=None, value={"a": "value.a"}, key="coalesce(value.a, key)")
    assert (found.value, found.keep, found.key) == (None, "NULL IS NULL OR NULL = 1", "coalesce(NULL, (in.key))")


def test_variables_of_lambda_functions_are_left_alone() -> None:
    assert made(key="filter(value.ID, value -> value > 1)").key == "filter((in.value.id), value -> value > 1)"


def test_a_partial_update_stays_partial() -> None:
    shape = RecordShape(
        None, {"value": {"id": "value.ID", "s": "value.status", "deep": {"t": "value.t", "i": "value.ID"}}}
    )
    part = composed(rule(), shape)
    assert part.value == {"id": "(in.value.id)", "deep": {"i": "(in.value.id)"}}
    assert unmade(shape, [part]) == ["value.s", "value.deep.t"]
    assert unmade(shape, [part, composed(rule({"ID": "1", "status": "2", "t": "3"}), shape)]) == []


@pytest.mark.parametrize("shape", [RecordShape("value.x = 1", {}), RecordShape(None, {"value": {"x": "value.x"}})])
def test_what_a_rule_does_not_make_and_can_t_be_without_is_missing(shape: RecordShape) -> None:
    with pytest.raises(Missing, match=r"value\.x"):
        composed(rule(), shape)
