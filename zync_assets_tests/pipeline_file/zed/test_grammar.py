"""The grammar of Zed: what is written comes back, and any other text is a problem with a place."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zync_assets.pipeline_file.zed.grammar import MAX_DEPTH, parse_condition, parse_join, parse_program
from zync_assets.pipeline_file.zed.nodes import (
    Binary,
    Choice,
    Constant,
    Elements,
    FunctionCall,
    Index,
    Kind,
    Member,
    Name,
    Node,
    RecordLiteral,
    Spread,
    Type,
    Unary,
    ZedPlace,
    ZedProblem,
)

NAMES = st.sampled_from(["in", "left", "value", "after", "ID", "order", "yield", "x1", "_y", "größe", "$z"])
ROOTS = st.sampled_from(["in", "left", "this", "x1", "größe"])
WORDS = ["==", "!=", "<", "<=", ">", ">=", "in", "and", "or", "+", "-", "*", "/", "%"]


def constants() -> st.SearchStrategy[Node]:
    texts: dict[Kind, st.SearchStrategy[str]] = {
        "null": st.just("null"),
        "bool": st.sampled_from(["true", "false"]),
        "int": st.integers(0, 10**20).map(str),
        "float": st.sampled_from(["1.", ".5", "2.25", "1.5e-3"]),
        "text": st.text(st.characters(codec="utf-8")),
        "time": st.sampled_from(["2024-01-01T00:00:00Z", "2024-01-01T00:00:00.125+02:00"]),
        "duration": st.sampled_from(["1h", "90s", "1h30m", "2.5d"]),
        "bytes": st.sampled_from(["0x", "0x0aFF"]),
    }
    return st.one_of([text.map(lambda text, kind=kind: Constant(kind, text)) for kind, text in texts.items()])


def compound(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    elements = st.one_of(st.tuples(NAMES, inner), inner.map(Spread))
    return st.one_of(
        st.builds(Member, inner, NAMES),
        st.builds(Index, inner, inner),
        st.builds(FunctionCall, st.sampled_from(["lower", "is", "int64"]), st.lists(inner, max_size=3).map(tuple)),
        st.builds(Unary, st.just("!"), inner),
        st.builds(Unary, st.just("-"), ROOTS.map(Name)),
        st.builds(Binary, st.sampled_from(WORDS), inner, inner),
        st.builds(Choice, st.tuples(st.tuples(inner, inner)), inner),
        st.lists(elements, max_size=3).map(lambda found: RecordLiteral(tuple(found))),
        st.lists(inner, max_size=3).map(lambda found: Elements(tuple(found))),
    )


NODES: st.SearchStrategy[Node] = st.recursive(st.one_of(constants(), ROOTS.map(Name)), compound, max_leaves=12)


def written(node: Node) -> str:
    """A node as Zed, with parentheses around each operand."""
    match node:
        case Constant("text", text):
            return json.dumps(text, ensure_ascii=False)
        case Constant(_, text) | Name(text):
            return text
        case Member(base, name):
            return f"({written(base)}).{name}"
        case Index(base, index):
            return f"({written(base)})[{written(index)}]"
        case FunctionCall(name, arguments):
            return f"{name}({', '.join(map(written, arguments))})"
        case Unary(operator, operand):
            return f"{operator}({written(operand)})"
        case Binary(operator, left, right):
            return f"({written(left)}) {operator} ({written(right)})"
        case Choice(((test, then),), otherwise):
            return f"({written(test)}) ? ({written(then)}) : ({written(otherwise)})"
        case RecordLiteral(elements):
            parts = (
                f"...{written(each.record)}" if isinstance(each, Spread) else f"{each[0]}: {written(each[1])}"
                for each in elements
            )
            return f"{{{', '.join(parts)}}}"
        case Elements(items):
            return f"[{', '.join(map(written, items))}]"
        case _:
            raise AssertionError(node)


@given(NODES)
def test_an_expression_that_is_written_is_read_again(node: Node) -> None:
    try:
        assert parse_condition(written(node)) == node
    except ZedProblem as problem:
        assert str(MAX_DEPTH) in problem.message


@given(
    st.text()
    | st.lists(
        st.sampled_from(['"', "|", "{", "}", "[", "(", ")", ":=", "in", "x", ".", "1", "\n", "\\", "<", "->", "…"])
    ).map(" ".join)
)
def test_any_text_is_read_or_a_problem_with_a_place_in_it(text: str) -> None:
    for parse in (parse_program, parse_condition, parse_join):
        try:
            parse(text)
        except ZedProblem as problem:
            line, column = problem.place
            assert 1 <= line <= text.count("\n") + 1
            assert 1 <= column <= len(text) + 1


def test_operators_bind_as_in_zed() -> None:
    a, b, c = Name("a"), Name("b"), Name("c")
    assert parse_condition("a or b and c") == Binary("or", a, Binary("and", b, c))
    assert parse_condition("!a == b") == Binary("==", Unary("!", a), b)
    assert parse_condition("not a and b") == Binary("and", Unary("!", a), b)
    assert parse_condition("a - b - c * -1") == Binary("-", Binary("-", a, b), Binary("*", c, Constant("int", "-1")))
    assert parse_condition("a ? b : a ? b : c") == Choice(((a, b),), Choice(((a, b),), c))


def test_keywords_are_names_of_fields_and_names_may_begin_with_them() -> None:
    for word in ("in", "and", "case", "null", "yield", "type", "end"):
        assert parse_condition(f"in.{word}") == Member(Name("in"), word)
        assert parse_condition(f"{{{word}: a}}") == RecordLiteral(((word, Name("a")),))
    assert parse_condition("inner == nullable") == Binary("==", Name("inner"), Name("nullable"))


def test_types_stand_in_casts() -> None:
    x, null = Name("x"), Constant("null", "null")
    assert parse_condition("<int64>(x)") == FunctionCall("cast", (x, Type("int64")))
    assert (
        parse_condition("null(int64)")
        == parse_condition("null(<int64>)")
        == FunctionCall("cast", (null, Type("int64")))
    )
    made = Type("record", (("a", Type("int64")), ("b", Type("array", (("", Type("string")),)))))
    assert parse_condition('cast(x, <{a: int64, "b": [string]}>)') == FunctionCall("cast", (x, made))


def test_case_is_a_choice() -> None:
    found = parse_condition('case x when 1 then "a" when 2 then "b" end')
    one, two = (Binary("==", Name("x"), Constant("int", number)) for number in "12")
    cases = ((one, Constant("text", "a")), (two, Constant("text", "b")))
    assert found == Choice(cases, Constant("null", "null"))


def test_a_program_has_operators_and_comments() -> None:
    text = """| out := {a: 1} // the output
      | rename out.b := out.a /* a
      comment */ | drop out.c, out.d
      | {out: {k: "//"}}| yield this"""
    assert [operator.name for operator in parse_program(text)] == ["put", "rename", "drop", "bare", "yield"]


PROBLEMS = {
    "out := ": (1, 7, "something is missing at the end"),
    "out = {}": (1, 5, "write `==` to compare, and `:=` to set a field"),
    "out:={a: x\n ~ /b/}": (2, 2, "in Spark SQL: value.name RLIKE"),
    "pass | over x => (y)": (1, 8, "`over` is not supported; a rule of Spark SQL has `explode:`"),
    "sort -r x": (1, 1, "one record for each"),
    "const x = 1 out:=x": (1, 1, "write the value in its place"),
    "yield x[1:2]": (1, 7, "in Spark SQL: substring("),
    "yield |{1:2}|": (1, 7, "in Spark SQL: map("),
    "yield [...a, b]": (1, 8, "in Spark SQL: concat("),
    "yield 10.0.0.1": (1, 7, 'compare texts, such as "10.0.0.1"'),
    'yield f"{a}"': (1, 7, 'write "text" + string(value)'),
    r'yield "\d"': (1, 7, r"`\d` is no escape of Zed"),
    r'yield "\u{d800}"': (1, 7, "is no escape of Zed"),
    "yield <|[int64]|>": (1, 8, "write an array"),
    "yield {a: |[2, 1, 1]|}": (1, 11, "a set is supported after `in`"),
    "yield " + "(" * 31: (1, 37, "nested deeper than 30 levels"),
    "yield " + "x" * 20_000: (1, 1, "longer than 20000 characters"),
}


@pytest.mark.parametrize("text", PROBLEMS, ids=range(len(PROBLEMS)))
def test_what_is_outside_the_subset_has_a_place_and_a_cure(text: str) -> None:
    line, column, message = PROBLEMS[text]
    with pytest.raises(ZedProblem) as caught:
        parse_program(text)
    assert caught.value.place == ZedPlace(line, column)
    assert message in caught.value.message
