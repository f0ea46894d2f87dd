"""Expressions of Zed as Spark SQL: the text, and the values that Spark gives for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given

from zync_assets.pipeline_file.expressions import RECORD_ROOTS, check_expression
from zync_assets.pipeline_file.zed.expressions import Compiler
from zync_assets.pipeline_file.zed.grammar import parse_condition
from zync_assets.pipeline_file.zed.nodes import Binary, Constant, Elements, Node, ZedProblem
from zync_assets.pipeline_file.zed.program import compile_program
from zync_assets.pipeline_file.zed.values import ClosedRecord, Demands, FieldRef
from zync_assets_tests.pipeline_file.zed.test_grammar import NODES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RECORD = ClosedRecord({root: FieldRef((root,)) for root in RECORD_ROOTS})


def condition(text: str, demands: Demands | None = None) -> str:
    return Compiler(demands or Demands()).condition(parse_condition(text), RECORD, positive=True).sql


CONDITIONS = {
    'value.op in ["c", "r"]': "value.op IN ('c', 'r')",
    'value.op=="u"': "value.op = 'u'",
    'value.op!="u"': "NOT value.op <=> 'u'",
    'this.value["a b"].order == "u"': "value.`a b`.order = 'u'",
    'value.select == "u" and value["Not"].not == 1': "value.`select` = 'u' AND value.`Not`.`not` = 1L",
    "value.n > 3 and value.n <= 5": "value.n > 3L AND value.n <= 5L",
    "value.a == value.b": "value.a <=> value.b",
    "value.a <= value.b": "coalesce(value.a <= value.b, value.a IS NULL AND value.b IS NULL)",
    "value.before == null": "value.before IS NULL",
    "null != value.before": "value.before IS NOT NULL",
    "value.ok": "value.ok",
    "!value.ok": "NOT coalesce(value.ok, false)",
    '!(value.op=="u")': "NOT value.op <=> 'u'",
    "!(value.n < 3)": "NOT coalesce(value.n < 3L, false)",
    'value.x in ["a", null]': "coalesce(value.x IN ('a'), false) OR value.x IS NULL",
    "value.x in [value.a, 1]": "value.x <=> value.a OR value.x = 1L",
    'value.x in |["a"]| or value.x in value.list': "value.x IN ('a') OR exists(value.list, x -> x <=> value.x)",
    "value.x in []": "false",
    '1 == "a"': "false",
    '1 != "a"': "true",
    "null == null": "true",
    "null < 1": "false",
    '"a" in [1, 2]': "false",
    "is(value.x, <int64>)": "typeof(value.x) = 'bigint'",
    "typeof(value.x) == typeof(value.y)": "typeof(value.x) = typeof(value.y)",
    "kafka.offset % 2 == 0": "coalesce(kafka.offset, 0Y) % 2L = 0L",
    "kafka.time >= 2024-01-01T00:00:00Z - 1h": "kafka.time >= timestamp_micros(unix_micros(TIMESTAMP"
    " '2024-01-01 00:00:00Z') - 3600000000L)",
}


@pytest.mark.parametrize("text", CONDITIONS, ids=range(len(CONDITIONS)))
def test_a_condition_is_short_sql_that_the_other_modules_read(text: str) -> None:
    assert condition(text) == CONDITIONS[text]
    assert check_expression(condition(text), RECORD_ROOTS) == []


@given(NODES)
@example(Binary("<", Elements(()), Elements(())))
@example(Binary("<", Elements((Constant("null", "null"),)), Elements(())))
def test_any_expression_is_sql_or_a_problem(node: Node) -> None:
    this = ClosedRecord({name: FieldRef(("in", name)) for name in ("in", "left", "x1", "größe")})
    try:
        sql = Compiler(Demands()).term(node, this).sql
    except ZedProblem:
        return
    problems = [problem for problem in check_expression(sql, ("in", "left")) if "is not known" not in problem]
    assert problems == [] or "nested too deep" in problems[0] or "parameter marker" in problems[0], sql


PROBLEMS = {
    "value.a / 2 == 1": "write int64(…) or float64(…) around it",
    '1 + "a" == "1a"': "string(…) makes a text of a number",
    '-"a" == 1': "'a'` is a text and is the operand of `-`",
    "(1h).x == 1": "is a duration and has no field `x`",
    "null": "null is no condition",
    '"a"': "is a text and is a condition, which takes a boolean",
    "<int64>": "a type is no value",
    "uint8(value.a) == 1": "`uint8` is no type of Spark SQL; write int16",
    "int6(value.a) == 1": "did you mean `int64`",
    'lowr(value.a) == ""': "did you mean `lower`",
    'lower(value.a, "b") == ""': "takes 1 argument, not 2",
    "now() > kafka.time": "such as in.kafka.time",
    "has(value.a)": "in Spark SQL: value.name IS NOT NULL",
    "value.t - value.u > 1h": "durations are known only in",
    "kafka.time - kafka.timestamp == 1": "in Spark SQL: unix_micros(a) - unix_micros(b)",
    'value.x in [1, "a"]': "values of one type in Spark SQL, and these are a number and a text",
    "value[value.x] == 1": "in Spark SQL: element_at(map, key)",
    "cast(value.a, typeof(value.b)) == 1": "nothing but null to the type of another field",
    "string(2.5) == value.a": "in another way than Spark SQL",
    "99999999999999999999 == value.a": "is no int64",
    "2024-13-01T00:00:00Z == kafka.time": "is no time",
    "value.x in [1h]": "durations are known only in",
    "value.x == {a: 1h}": "durations are known only in",
    "kafka.time == kafka.time + (value.b ? 1h : 2h)": "durations are known only in",
    "1ns == value.d": "whole microseconds",
    "0xabc == value.b": "pairs of hexadecimal digits",
    "key2 == 1": "`key2` is missing; did you mean `key`?",
}


@pytest.mark.parametrize("text", PROBLEMS, ids=str)
def test_what_spark_would_compute_in_another_way_is_a_problem_with_a_cure(text: str) -> None:
    with pytest.raises(ZedProblem) as caught:
        condition(text)
    assert PROBLEMS[text] in caught.value.message


def test_types_that_the_text_does_not_show_are_demanded() -> None:
    demands = Demands()
    condition('value.a == "x" and value.b > value.c and value.d + 1 == 2 and value.e in value.f', demands)
    assert [(each.path[1], each.kinds, each.other[1:], each.place) for each in demands.entries] == [
        ("a", ("text",), (), (1, 9)),
        ("b", (), ("c",), (1, 28)),
        ("d", ("int", "float", "number"), (), (1, 50)),
        ("f", ("array",), (), (1, 71)),
        ("e", (), ("f", "[]"), (1, 71)),
    ]


COLUMNS = {
    "s": ("'Taco'", "STRING"),
    "n": ("7", "INT"),
    "l": ("-9L", "BIGINT"),
    "f": ("2.5D", "DOUBLE"),
    "b": ("true", "BOOLEAN"),
    "t": ("TIMESTAMP '2024-07-30 20:05:15.118252Z'", "TIMESTAMP"),
    "a": ("array('x', 'y')", "ARRAY<STRING>"),
    "r": ("named_struct('x', 1)", "STRUCT<x: INT>"),
}


NANOS = 1_722_369_915_118_252_000
"""The time of the row with values."""
VALUES: dict[str, tuple[Any, Any]] = {
    "in.n * 2 + in.l": (5, 0),
    "in.n % 2": (1, 0),
    "int64(in.n) / 2": (3, 0),
    "int64(in.l) / 4": (-2, 0),
    "in.f / 2.0": (1.25, 0.0),
    "-in.l": (9, None),
    "abs(in.l)": (9, 0),
    'lower(in.s) + "!" + string(in.n)': ("taco!7", "!"),
    "upper(in.s)": ("TACO", None),
    'trim("\\t a b\u00a0")': ("a b", "a b"),
    "len(in.s)": (4, 0),
    'len("größe")': (7, 7),
    'rune_len("größe")': (5, 5),
    'replace(in.s, "T", "t")': ("taco", None),
    'split("a.b.", ".")': (["a", "b", ""], ["a", "b", ""]),
    'join(in.a, "-")': ("x-y", ""),
    "in.a[0]": ("x", None),
    "in.a[-1]": ("y", None),
    "in.a[2]": (None, None),
    '"y" in in.a': (True, False),
    'in.s == "Taco"': (True, False),
    'in.s != "Taco"': (False, True),
    "in.s == null": (False, True),
    "in.n < 8": (True, False),
    "in.n <= in.l": (False, True),
    "in.l <= in.l": (True, True),
    "!in.b": (False, True),
    'in.b ? "yes" : "no"': ("yes", "no"),
    'case when in.n > 5 then "big" when in.n > 0 then "small" else "none" end': ("big", "none"),
    "coalesce(in.n, 1)": (7, 1),
    "is(in.n, <int32>)": (True, True),
    "typeof(in.f) == <float64>": (True, True),
    "int64(in.t)": (NANOS, None),
    "int64(time(1722369915118252999))": (NANOS, NANOS),
    "int64(time(in.l))": (-1000 * (9 // 1000), None),
    'int64(time("2024-07-30T20:05:15.118252Z"))': (NANOS, NANOS),
    "int64(in.t + 1h30m)": (NANOS + 5_400_000_000_000, None),
    "int64(bucket(in.t, 1h))": (NANOS // 3_600_000_000_000 * 3_600_000_000_000, None),
    'strftime("%d/%m/%Y it\'s %H:%M %%", in.t)': ("30/07/2024 it's 20:05 %", None),
    "float64(in.n)": (7.0, None),
    "int64(2.9)": (2, 2),
    "pow(2, 3)": (8.0, 8.0),
    "sqrt(9)": (3.0, 3.0),
    "ceil(float64(in.f))": (3.0, None),
    "floor(float64(in.f) * 1.0e300 / 1.0)": (2.5e300, 0.0),
    "ceil(float64(in.f) * 1.0e308 * 10.0)": (math.inf, 0.0),
    "typeof(int32(2024-07-30T20:05:15Z)) == <int32>": (True, True),
    "round(in.f)": (3.0, 0.0),
    "0x0aff": (b"\x0a\xff", b"\x0a\xff"),
    "null(int64)": (None, None),
    "in.r.x + 1": (2, 1),
}


def test_spark_gives_the_values_that_zed_gives(spark: SparkSession) -> None:
    """A row with values, and a row with nulls: arithmetic takes null as 0, and a comparison with null is false."""
    full = ", ".join(f"'{name}', {sql}" for name, (sql, _) in COLUMNS.items())
    nulls = ", ".join(f"'{name}', CAST(NULL AS {kind})" for name, (_, kind) in COLUMNS.items())
    rows = spark.sql(f"SELECT 0 AS i, named_struct({full}) AS in UNION ALL SELECT 1, named_struct({nulls}) ORDER BY i")
    fields = ", ".join(f"v{at}: {text}" for at, text in enumerate(VALUES))
    value = compile_program(f"out:={{key: null, value: {{{fields}}}}}", ["in"]).value
    assert isinstance(value, dict)
    found = rows.selectExpr(*(f"{value[f'v{at}'] or 'NULL'} AS v{at}" for at in range(len(VALUES)))).collect()
    seen = {text: tuple(_plain(row[f"v{at}"]) for row in found) for at, text in enumerate(VALUES)}
    assert seen == VALUES


def _plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, bytearray) else value
