"""A pipeline file that means harm, or is noise: every error of it is one of ours, and soon."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zync_assets.codecs.spark_types import parse_ddl
from zync_assets.errors import PipelineFileError, SchemaError
from zync_assets.pipeline_file import load

GOOD = (
    "inputs: [{topic: A, pool: R, value-format: json, key-format: string, schema: 'a int'}]\n"
    "output: {topic: O, pool: S, format: string}\n"
    "transforms: [{type: stateless, in: A, out: O, key: in.key, value: in.value.a}]\n"
)
BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 10)}]\n" for i in range(20)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB + GOOD, "anchors are not supported"),
        ("inputs: &a [*a]", "aliases are not supported"),
        ("x: " + "[" * 20_000 + "]" * 20_000, "nested deeper than 32 levels"),
        (GOOD + "#" * 1_000_000, "larger than 512 KiB"),
        ("!!python/object/apply:os.system ['true']", "tags are not supported"),
        (GOOD.replace("topic: A", "topic: ../../etc"), "no legal topic name"),
        (GOOD.replace("topic: A", 'topic: "A\'; DROP TABLE x --"'), "no legal topic name"),
        (GOOD.replace("pool: R", "pool: ../R"), "must consist of letters"),
        (GOOD.replace("pool: R", "pool: R, from: 9223372036854775808"), "must be earliest, latest"),
        (GOOD.replace("pool: R", "pool: R, from: -1"), "must be earliest, latest"),
        (GOOD.replace("pool: R", "pool: R, retention: " + "9" * 5000 + "d"), "must be a time"),
        (GOOD + "settle: " + "9" * 100_000, "must be a number"),
        (GOOD.replace("in.value.a", "'" + "(" * 9000 + "1" + ")" * 9000 + "'"), "value"),
        (GOOD.replace("'a int'", "'" + "array<" * 5000 + "int" + ">" * 5000 + "'"), "nested deeper than 100 levels"),
        (GOOD.replace("'a int'", "'a decimal(" + "9" * 5000 + ")'"), "a number expected"),
    ],
)
def test_what_means_harm_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(PipelineFileError, match=message) as caught:
        load(tmp_path / "p.yaml", {})
    assert len(str(caught.value)) < 20_000


def test_a_schema_of_ten_thousand_fields() -> None:
    assert parse_ddl(", ".join(f"field_{number} struct<a: int>" for number in range(10_000))).num_fields == 10_000


@given(st.text(alphabet="abint strucay<>(),:`'\"0123456789\\\n", max_size=60))
@settings(max_examples=300, deadline=None)
def test_noise_as_a_type_is_a_type_or_an_error_of_ours(text: str) -> None:
    try:
        parse_ddl(text)
    except SchemaError as error:
        assert "character" in str(error) or "two fields are called" in str(error)


@given(
    st.integers(0, len(GOOD) - 1),
    st.integers(0, 12),
    st.text(alphabet=st.characters(codec="utf-8"), max_size=8)
    | st.sampled_from(
        ["&a ", "*a", "!!x ", "<<: ", "${", "${A:-", "}", "{", "[", ": ", "\n- ", "'", '"', "|", "%", "\t", "\x00"]
    ),
)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_with_noise_in_it_is_read_or_is_an_error_of_ours(
    tmp_path: Path, at: int, length: int, noise: str
) -> None:
    (tmp_path / "p.yaml").write_text(GOOD[:at] + noise + GOOD[at + length :])
    try:
        load(tmp_path / "p.yaml", {})
    except PipelineFileError as error:
        assert all(problem.line >= 1 for problem in error.problems)
