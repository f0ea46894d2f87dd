"""SQL expressions of a pipeline file: what may stand there, and what the message says about the rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlglot import exp

from zync_assets.pipeline_file.conditions import leaves_nothing, split_join, with_nulls
from zync_assets.pipeline_file.expressions import check_expression, parse

RECORD = ("kafka", "key", "value")


@pytest.mark.parametrize(
    "sql",
    [
        "in.value.after.ID",
        "IN.Value.after.id",
        "`in`.value.`a.b`",
        "in",
        "to_json(in)",
        "in.value.x in (1, 2)",
        "in.value.x IN (in.value.y)",
        "not in.value.x",
        "in.value.in",
        "in.value.user",
        "in['value']['op']",
        "in.value.xs[0].y.z.a.b.c",
        "left(in.value.x, 1) || right(in.value.x, 1)",
        "transform(in.value.xs, x -> x.a.b.c.d + in.value.n)",
        "case when in.value.x then 'rand()' else \"now()\" end",
        "cast(in.value.x as decimal(10, 2))",
        "in.value.x::bigint",
        "date '2024-01-01' + interval 3 days",
        "unix_timestamp(in.value.x)",
        "in.value.x like any ('a', 'b')",
        "exists(in.value.xs, x -> x > 1)",
        "timestampadd(DAY, 1, in.kafka.time)",
        "from_json(in.value, 'a int').a",
        "struct(in.key.a as b, 1 as c)",
        "null",
    ],
)
def test_spark_s_expressions_over_a_record_pass(sql: str) -> None:
    assert check_expression(sql, ("in",)) == []


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("", "is empty"),
        ("in.value.x +", "does not parse: something is missing next to `+` at character 12"),
        ("(in.value.x", "`)` is missing"),
        ("in.value.x foo bar", "`bar` at character 16"),
        ("'a", "a quote or a comment is not closed"),
        ("cast(in.value.x as foo)", "`foo` at character 20 is no type"),
        ("in.value.x; in.key", "without `;`"),
        ("in.value.x -- why", "comment"),
        ("select 1", "not a statement"),
        ("show tables", "not a statement"),
        ("in.key as k", "alias"),
        ("in.*", "`*`"),
        ("count(*)", "`count()` is an aggregate"),
        ("(select 1)", "query"),
        ("in.value.x in (select 1)", "query"),
        ("exists(select 1)", "query"),
        ("sum(in.value.x) over (order by 1)", "window function"),
        ("row_number()", "window function"),
        ("SUM(in.value.x)", "`sum()` is an aggregate"),
        ("any(in.value.x)", "aggregate"),
        ("first(in.value.x) ignore nulls", "aggregate"),
        ("explode(in.value.xs)", "makes rows"),
        ("upr(in.value.x)", "no function `upr`; did you mean `upper`?"),
        (":p", "parameter"),
        ("?", "parameter"),
        ("struct(" * 30 + "1" + ")" * 30, "nested too deep"),
        ("(" * 200, "nested too deep"),
        ("1" + "+1" * 20_000, "longer than"),
    ],
)
def test_what_is_no_expression_over_one_record(sql: str, message: str) -> None:
    problems = check_expression(sql, ("in",))
    assert len(problems) == 1
    assert message in problems[0]


@pytest.mark.parametrize(
    "sql",
    [
        "rand()",
        "RANDN(3)",
        "random()",
        "uuid ( )",
        "`uuid`()",
        "concat(in.value.x, uuid())",
        "shuffle(in.value.xs)",
        "now()",
        "current_date",
        "CURRENT_TIMESTAMP",
        "current_timestamp()",
        "localtimestamp()",
        "user",
        "session_user()",
        "unix_timestamp()",
        "date 'today'",
        "timestamp 'now'",
        "timestamp 'nowUTC'",
        "CAST('now' AS TIMESTAMP)",
        "' Today '::date",
        "to_timestamp ('now UTC')",
        "monotonically_increasing_id()",
        "spark_partition_id()",
        "input_file_name()",
        "aes_encrypt('a', '0123456789abcdef')",
        "reflect('java.lang.Math', 'random')",
        "uniform(1, 2)",
        "randstr(3)",
    ],
)
def test_the_clock_and_chance_are_refused(sql: str) -> None:
    problems = check_expression(sql, ("in",))
    assert len(problems) == 1
    assert "not deterministic" in problems[0]


@pytest.mark.parametrize(
    ("sql", "allowed", "cure"),
    [
        ("value.op", ("in",), "write `in.value.op`"),
        ("value.op", ("left", "right"), "write `left.value.op` or `right.value.op`"),
        ("in.value.op", RECORD, "write `value.op`"),
        ("in.value.op", ("left", "right"), "write `left` or `right`"),
        ("left.key", ("in",), "write `in`"),
        ("abc", ("in",), "text is written 'abc'"),
        ("vaule.op", RECORD, "did you mean `value`?"),
        ("in.op", ("in",), "a record has in.kafka, in.key, in.value"),
        ("kafka.ofset", RECORD, "did you mean `offset`?"),
        ("transform(in.value.xs, x -> x + y)", ("in",), "`y` is not known"),
    ],
)
def test_a_name_that_is_not_known_there_comes_with_its_cure(sql: str, allowed: tuple[str, ...], cure: str) -> None:
    (problem,) = check_expression(sql, allowed)
    assert cure in problem


@given(st.text(max_size=60) | st.text(alphabet="in.left value()'`,=+x1 \n;?*-/", max_size=40))
def test_any_text_gets_an_answer(sql: str) -> None:
    assert all(isinstance(problem, str) for problem in check_expression(sql, RECORD))


@pytest.mark.parametrize(
    ("sql", "pairs"),
    [
        ("left.key = right.key", [("left.key", "right.key")]),
        ("right.value.a == left.key.`x.y`", [("left.key.`x.y`", "right.value.a")]),
        (
            "(left.key.a = right.key.a AND left.key.b = right.key.b) and (right.key.c) = lower(left.key.c)",
            [("left.key.a", "right.key.a"), ("left.key.b", "right.key.b"), ("lower(left.key.c)", "(right.key.c)")],
        ),
        ("concat(left.key.a, ' and = ') = right.key.b", [("concat(left.key.a, ' and = ')", "right.key.b")]),
        (
            "case when left.key.a and left.key.b = 1 then 1 end = right.key.c",
            [("case when left.key.a and left.key.b = 1 then 1 end", "right.key.c")],
        ),
        ("left.value.end = right.value.and", [("left.value.end", "right.value.and")]),
        ("left(left.key.a, 1) = right(right.key.a, 1)", [("left(left.key.a, 1)", "right(right.key.a, 1)")]),
    ],
)
def test_join_on_is_cut_into_its_pairs(sql: str, pairs: list[tuple[str, str]]) -> None:
    assert split_join(sql) == (tuple(pairs), [])


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("left.key", "no equality of the two sides"),
        ("left.key > right.key", "no equality of the two sides"),
        ("left.key != right.key", "no equality of the two sides"),
        ("not left.key = right.key", "no equality of the two sides"),
        ("left.key = right.key or left.value = right.value", "OR is not supported"),
        ("left.key <=> right.key", "a null join key matches nothing"),
        ("left.key = right.key and left.value.x = 1", "`1` is of neither left nor right"),
        ("left.key.a = left.key.b", "compares left with itself"),
        ("left.key.a + right.key.a = left.key.b", "mixes left and right"),
        ("left.key = right.key = true", "no equality of the two sides"),
        ("left.value.a between 1 and 2 = right.value.b", "parentheses"),
        ("value.ID = right.value.ID", "write `left.value.ID` or `right.value.ID`"),
        ("left.key =", "does not parse"),
    ],
)
def test_join_on_that_is_no_equality_of_the_two_sides(sql: str, message: str) -> None:
    pairs, problems = split_join(sql)
    assert pairs == ()
    assert len(problems) == 1
    assert message in problems[0]


@pytest.mark.parametrize(
    ("earlier", "later", "nothing_left"),
    [
        (None, None, True),
        (None, "value.op = 'u'", True),
        (None, "value.op = 'u' and kafka.offset > 3", True),
        (None, "value is null", False),
        (None, "kafka.offset > 3", False),
        (None, "coalesce(value.op, 'd') = 'd'", False),
        (None, "value.op = 'u' or kafka.offset = 1", False),
        (None, "not (value.op = 'a' and kafka.offset = 1)", False),
        ("true", "value is null", True),
        ("value.op = 'u'", "(VALUE.op) = 'u'", True),
        ("value.op = 'u'", "value.op = 'U'", False),
        ("value.op in ('c', 'r')", "value.op = 'c'", True),
        ("value.op in ('c', 'r')", "value.x > 1 and value.op = 'r'", True),
        ("value.op in ('c', 'r')", "value.op in ('c', 'u')", False),
        ("value.op = 'c' and value.x > 1", "value.op = 'c'", False),
        ("value.op = 'u'", None, False),
    ],
)
def test_what_an_earlier_rule_leaves(earlier: str | None, later: str | None, nothing_left: bool) -> None:
    assert leaves_nothing(earlier, later) is nothing_left


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("none + 1", "NULL + 1"),
        ("coalesce(none[0], id)", "coalesce(NULL, id)"),
        ("none[0].name['k'] IS NULL", "NULL IS NULL"),
        ("(none)[0] || ((none)).f", "NULL || NULL"),
        ("id IN (none)", "id IN (NULL)"),
        ("upper((none)) = (none)", "upper(NULL) = (NULL)"),
        ("element_at(none, 'a')", "NULL"),
        ("Element_At ( tags , none ).f > 1", "NULL > 1"),
        ("size(transform(none, item -> item.f)) > 0", "NULL > 0"),
        ("if(array_contains(none, id), map_keys(tags)[0], 'x')", "if(NULL, map_keys(tags)[0], 'x')"),
        ("zip_with(tags, none, (a, b) -> a + b)[1]", "NULL"),
        ("zip_with(tags, id, (a, b) -> none[a] + b)", "zip_with(tags, id, (a, b) -> NULL + b)"),
        ("array_insert(tags, 1, none)", "array_insert(tags, 1, NULL)"),
        ("element_at(tags, 1).none + 1", "element_at(tags, 1).none + 1"),
        ("array_join(map_values(none), none)", "NULL"),
        ("`none`[id] = tags[none]", "NULL = tags[NULL]"),
    ],
)
def test_null_replaces_the_smallest_expression_that_spark_accepts(sql: str, expected: str) -> None:
    """Spark finds no element or field in a NULL, and refuses one as an array or a map."""
    expression = parse(sql)
    places = [
        (int(column.parts[0].meta["start"]), int(column.parts[-1].meta["end"]) + 1)
        for column in expression.tree.find_all(exp.Column)
        if column.parts[0].name == "none"
    ]
    assert with_nulls(expression, places) == expected
