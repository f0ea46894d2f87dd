"""Several outputs of a rule in the pipeline file, and rules for all inputs of a pattern."""

from __future__ import annotations

from pathlib import Path

import pytest

from zync_assets.errors import PipelineFileError
from zync_assets_tests.pipeline_file.problems import assert_problem, loaded

FILE = """
kafka: {bootstrap.servers: "localhost:9092"}
inputs:
  - {topic: shop.orders, pool: Raw, format: avro}
  - {topic: shop.lines, pool: Raw, format: avro}
  - {topic: other, pool: Raw, format: avro}
outputs:
  - {topic: "{topic}.clean", pool: Staging, format: avro}
  - {topic: Items, pool: Staging, format: avro}
  - {topic: Far, pool: Elsewhere, format: avro}
transforms:
  - name: clean
    type: stateless
    in: shop.*
    out:
      - {topic: "{topic}.clean", key: in.key, value: in.value}
      - {topic: Items, where: in.value.open, explode: in.value.items, key: item.id, value: {sku: item.sku}}
  - {type: stateless, in: other, out: Items, key: in.key, value: in.value}
  - {type: stateless, in: other, where: value IS NULL, out: Far, key: in.key, value: null}
"""


def test_a_pattern_and_a_list_make_a_rule_for_each_input_and_output(tmp_path: Path) -> None:
    pipeline = loaded(tmp_path, FILE)
    assert [(rule.name, rule.topics, rule.out, rule.part_of) for rule in pipeline.rules] == [
        ("clean shop.orders", ("shop.orders",), "shop.orders.clean", None),
        ("clean shop.orders/2", ("shop.orders",), "Items", "clean shop.orders"),
        ("clean shop.lines", ("shop.lines",), "shop.lines.clean", None),
        ("clean shop.lines/2", ("shop.lines",), "Items", "clean shop.lines"),
        ("3-stateless", ("other",), "Items", None),
        ("4-stateless", ("other",), "Far", None),
    ]
    assert [item.topic for item in pipeline.outputs] == ["shop.orders.clean", "shop.lines.clean", "Items", "Far"]
    items = pipeline.rules[1]
    assert (items.explode, items.keep, items.key, items.value) == (
        "in.value.items",
        "in.value.open",
        "item.id",
        {"sku": "item.sku"},
    )


def test_the_former_name_of_a_pattern_and_of_a_list_is_that_of_each_rule(tmp_path: Path) -> None:
    rules = loaded(tmp_path, FILE.replace("name: clean", "name: tidy\n    was: clean")).rules
    assert [(rule.name, rule.was) for rule in rules[:3]] == [
        ("tidy shop.orders", "clean shop.orders"),
        ("tidy shop.orders/2", "clean shop.orders/2"),
        ("tidy shop.lines", "clean shop.lines"),
    ]


def test_all_inputs_of_a_pattern_may_have_one_output(tmp_path: Path) -> None:
    text = FILE.partition("  - name: clean")[0].replace(
        '  - {topic: "{topic}.clean", pool: Staging, format: avro}\n', ""
    )
    rule = "  - {type: stateless, in: shop.*, out: Items, key: in.key, value: in.value}\n"
    rules = loaded(tmp_path, text + rule).rules
    assert [(item.topics, item.out) for item in rules] == [(("shop.orders",), "Items"), (("shop.lines",), "Items")]


def test_an_output_that_no_input_of_a_pattern_has_is_one_problem(tmp_path: Path) -> None:
    with pytest.raises(PipelineFileError) as raised:
        loaded(tmp_path, FILE.replace('{topic: "{topic}.clean", pool', '{topic: "{topic}.tidy", pool'))
    found = raised.value.problems
    assert [(problem.line, problem.key) for problem in found] == [(16, "transforms[0].out[0].topic")]
    assert "`{topic}.clean` is no output of this file" in found[0].message


def test_an_output_follows_from_its_rule_s_pattern(tmp_path: Path) -> None:
    for old, new, key in (
        ("in: shop.*", "in: shops.*", "transforms[0].in"),
        ("in: shop.*", "inn: shop.*", "transforms[0].inn"),
        ("inputs:", "imputs:", "imputs"),
    ):
        with pytest.raises(PipelineFileError) as raised:
            loaded(tmp_path, FILE.replace(old, new))
        assert [problem.key for problem in raised.value.problems] == [key]
    with pytest.raises(PipelineFileError, match=r"outputs.3..topic: is in no rule for a pattern of inputs"):
        loaded(tmp_path, FILE.replace("transforms:", '  - {topic: "{topic}.x", pool: Staging}\ntransforms:'))


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("in: shop.*", "in: shops.*", 14, "`shops.*` is no input of this file"),
        ("in: shop.*", "in: shop.*\n    key: in.key", 15, "stands in each output of the list `out:`; move it there"),
        ("{topic: Items, where", "{topic: Item, where", 17, "`Item` is no output of this file; did you mean `Items`?"),
        ("{topic: Items, where", "{topic: Far, where", 17, "the outputs of a rule are one commit: name one pool"),
        ("key: item.id, ", "", 17, "transforms[0].out[1].key: is missing; write one expression or a mapping"),
        ("key: item.id", "key: items.id", 17, "`items.id` is not known here"),
        ("where: in.value.open", "when: in.value.open", 17, "is no key that is known here; did you mean `where`?"),
        (
            "where: in.value.open",
            "where: value.open",
            17,
            "transforms[0].out[1].where: `value.open` is not known here; write `in.value.open`",
        ),
        ("explode: in.value.items", "explode: explode(in.value.items)", 17, "`explode()` makes rows"),
        ("out: Far, key: in.key", "out: Far, key: in.keys", 19, "transforms[2].key: `in.keys` is not known"),
        (
            '      - {topic: "{topic}.clean", key: in.key, value: in.value}',
            "      - Items",
            15,
            "must list mappings of topic",
        ),
        (
            '{topic: "{topic}.clean", key: in.key',
            '{topic: "{topic}.cleaned", key: in.key',
            16,
            'transforms[0].out[0].topic: `{topic}.cleaned` is no output of this file; add `- {topic: "{topic}.cleaned",',
        ),
        (
            "- {type: stateless, in: other, out: Items",
            "- {name: clean shop.lines/2, type: stateless, in: other, out: Items",
            18,
            "an output of rule clean shop.lines is called `clean shop.lines/2` in the account; choose another name",
        ),
    ],
)
def test_a_problem_has_its_line_and_its_cure(tmp_path: Path, old: str, new: str, line: int, message: str) -> None:
    assert_problem(tmp_path, FILE, old, new, line, message)
