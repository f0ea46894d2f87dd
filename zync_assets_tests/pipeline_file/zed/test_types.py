"""The fields of topics in a rule's records, and the types that a rule's Zed demands."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from zync_assets.errors import EtlError
from zync_assets.pipeline import Rule, Side
from zync_assets.pipeline_file.zed.program import compile_program
from zync_assets.pipeline_file.zed.types import explained, kind_of, with_types
from zync_assets.queries import ZedTypes

ROW = pa.struct([("id", pa.int64()), ("Name", pa.string()), ("a b", pa.float64())])
LISTS = [("ns", pa.list_(pa.int64())), ("rs", pa.list_(pa.struct([("s", pa.string())])))]
VALUE = pa.struct([("op", pa.string()), ("after", ROW), ("n", pa.int32()), *LISTS])
RECORD = pa.struct([("key", pa.string()), ("value", VALUE)])


def rule(value: str, key: str = "in.key") -> Rule:
    found = compile_program(f"out:={{key: {key}, value: {value}}}", ["in"])
    side = Side("in", "A")
    return Rule("stateless", "r", (side,), "C", found.key, found.value, zed=ZedTypes(found.demands, found.records))


def typed(value: str, key: str = "in.key") -> Any:
    return with_types(rule(value, key), {"A": RECORD}).value


def test_a_record_gets_the_fields_that_its_topic_has() -> None:
    own = {"id": "in.value.after.id", "Name": "in.value.after.Name", "a b": "in.value.after.`a b`"}
    assert typed("{...in.value.after, x: 1}") == {**own, "x": "1L"}
    assert typed("{id: 0, ...in.value.after, Name: null}") == {**own, "Name": None}
    assert typed("{deep: {...in.value.after}, x: in.key}") == {"deep": own, "x": "in.key"}


def test_a_topic_without_records_has_no_fields_yet() -> None:
    assert with_types(rule("{...in.value.after, x: 1}"), {"A": None}).value == {"x": "1L"}
    assert with_types(rule("{...in.value.after}"), {}).value is None


def test_a_rule_of_spark_sql_stays_as_it_is() -> None:
    plain = Rule("stateless", "r", (Side("in", "A"),), "C", "in.key", "in.value")
    assert with_types(plain, {"A": RECORD}) is plain


def test_explain_shows_a_record_as_sql_to_read() -> None:
    assert explained(rule("{...in.value.after, x: 1}")).value == "struct(in.value.after.* EXCEPT (x), (1L) AS x)"


@pytest.mark.parametrize(
    "value",
    [
        '{a: in.value.op == "u"}',
        "{a: in.value.n == in.value.after.id, b: in.value.n + 1.5}",
        '{a: in.value.missing == 1, b: in.value.after.NAME + "x" == in.key}',
        '{a: in.value.n in in.value.ns, b: in.value.rs[0].s + "!", c: in.value.rs[0].t == 1}',
        "{a: string(in.value.n), b: int64(in.value.op), c: float64(in.value.n)}",
    ],
)
def test_types_that_zed_takes_pass(value: str) -> None:
    assert typed(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{a: in.value.op == 1}", "in.value.op is a text and is compared with a whole number (line 1, column 43"),
        ('{a: in.value.n == "1"}', "in.value.n is a whole number and is compared with a text"),
        ("{a: in.value.n == in.value.op}", "Zed takes in.value.op, which is a text there"),
        ("{a: in.value.op + in.key}", "in.value.op is a text and is an operand of `+`"),
        ("{a: in.value.op ? 1 : 2}", "is a condition"),
        ("{a: lower(in.value.n)}", "is an argument of a function of texts"),
        ('{a: string(in.value.after["a b"])}', "in.value.after.`a b` is a floating-point number and is cast to string"),
        ("{...in.value.op}", "in.value.op is string, and Zed needs a record there"),
        ("{a: in.value.op[0]}", "is a text and has an index"),
        ('{a: "5" in in.value.ns}', "in.value.ns[] is a whole number and is compared with a text"),
        ('{a: in.value.ns[0] == "5"}', "in.value.ns[] is a whole number and is compared with a text"),
        ("{a: in.value.rs[-1].s == in.value.n}", "in.value.rs[].s is a text and is compared"),
    ],
)
def test_a_type_with_another_result_in_spark_is_an_error_with_place_and_cure(value: str, message: str) -> None:
    with pytest.raises(EtlError) as caught:
        typed(value)
    assert message in str(caught.value)
    assert str(caught.value).startswith("rule r: ")


def test_a_condition_sees_the_columns_of_its_record() -> None:
    made = rule("{a: 1}")
    demand = compile_program('out := {key: value.n == "x", value: null}', ["value"]).demands
    with pytest.raises(EtlError, match=r"value\.n is a whole number and is compared with a text"):
        with_types(Rule(made.kind, "r", made.sides, "C", None, None, zed=ZedTypes(demand)), {"A": RECORD})


def test_kinds_of_columns() -> None:
    kinds = [
        pa.bool_(),
        pa.int8(),
        pa.float32(),
        pa.decimal128(9, 2),
        pa.string(),
        pa.binary(),
        pa.timestamp("us"),
        pa.date32(),
    ]
    assert [kind_of(kind) for kind in kinds] == [
        "bool",
        "int",
        "float",
        "number",
        "text",
        "bytes",
        "time",
        "date32[day]",
    ]
