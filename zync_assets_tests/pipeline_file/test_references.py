"""Fields by the names of their topic, in expressions over the lake's columns."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from zync_assets.codecs.fields import field_with_notes, lake_type_of
from zync_assets.etl.views.tables import definition_of, has_changed
from zync_assets.pipeline_file.expressions import SqlProblem
from zync_assets.pipeline_file.references import in_lake_names, with_lake_names
from zync_assets_tests.pipeline_file.problems import loaded

ITEM = pa.struct([("Name", pa.string()), ("name", pa.string()), ("a b", pa.int32())])
VALUE = pa.struct(
    [
        ("first name", pa.string()),
        ("plain", pa.string()),
        ("Name", pa.string()),
        ("name", pa.string()),
        ("list", pa.list_(ITEM)),
        ("by key", pa.map_(pa.string(), ITEM)),
        ("inner", pa.struct([("x,y", pa.struct([("deep=er", ITEM)]))])),
    ]
)
ROOTS = {"in": lake_type_of(pa.struct([("key", pa.string()), ("value", VALUE)])), "value": lake_type_of(VALUE)}


@pytest.mark.parametrize(
    ("sql", "made"),
    [
        ("in.value.plain", None),
        ("IN.value.Plain = 'a.`first name`'", None),
        ("in.value.`first name`", "in.value.`first%20name`"),
        ("in.value.`FIRST name`", "in.value.`first%20name`"),
        ("value.`first name` || value.Name", "value.`first%20name` || value.Name"),
        ("in.value.name", "in.value.`%6Eame`"),
        ("in.value.`%6Eame`", None),
        ("in.value.inner.`x,y`.`deep=er`.name", "in.value.inner.`x%2Cy`.`deep%3Der`.`%6Eame`"),
        ("in.value.list[0].name", "in.value.list[0].`%6Eame`"),
        ("in.value.list.name", "in.value.list.`%6Eame`"),
        ("in.value.`by key`['in.value.name'].`a b`", "in.value.`by%20key`['in.value.name'].`a%20b`"),
        ("transform(in.value.list, x -> x.name)", "transform(in.value.list, x -> x.`%6Eame`)"),
        ("filter(in.value.list, (x, i) -> x.`a b` > i)", "filter(in.value.list, (x, i) -> x.`a%20b` > i)"),
        (
            "aggregate(in.value.list, '', (key, x) -> key || x.name)",
            "aggregate(in.value.list, '', (key, x) -> key || x.`%6Eame`)",
        ),
        (
            "transform_values(in.value.`by key`, (k, v) -> v.name)",
            "transform_values(in.value.`by%20key`, (k, v) -> v.`%6Eame`)",
        ),
        ("element_at(in.value.list, 1).`a b`", "element_at(in.value.list, 1).`a%20b`"),
        ("in.value.`not there`", "in.value.`not%20there`"),
        ("in.key", None),
    ],
)
def test_a_reference_names_the_lake_s_field(sql: str, made: str | None) -> None:
    assert in_lake_names(sql, ROOTS) == (made or sql)


@pytest.mark.parametrize("sql", ["in.value.NAME", "element_at(in.value.list, 1).name"])
def test_a_name_that_may_be_two_fields_is_an_error(sql: str) -> None:
    with pytest.raises(SqlProblem, match=r"may be `Name` and `name`, which differ in case alone"):
        in_lake_names(sql, ROOTS)


def test_a_field_that_is_not_known_yet_has_the_name_that_it_will_have() -> None:
    assert in_lake_names("in.value.`a b` = in.value.c", {"in": None}) == "in.value.`a%20b` = in.value.c"


VIEW = """
inputs: [{topic: orders, pool: Raw, format: avro}]
outputs: [{topic: out, pool: Staging, format: json, create: {}}]
transforms:
  - {name: states, type: view, tables: {o: orders}, from: o, key: {id: o.id}, value: {state: o.state}, out: out}
"""


@pytest.mark.parametrize(("other", "is_other_view"), [("o.state", False), ("o.status", False), ("o.id", True)])
def test_a_view_of_an_older_version_is_known_by_the_names_in_the_file(
    tmp_path: Path, other: str, is_other_view: bool
) -> None:
    def view(text: str, *names: str) -> Any:
        status = field_with_notes("status", pa.string(), names)
        raw: Any = SimpleNamespace(schema=pa.schema({"value": pa.struct([("id", pa.int64()), status])}))
        return with_lake_names(loaded(tmp_path, text), {"orders": raw}, None).rules[0]

    # Without a renamed field, the definition is the file's, as all definitions of older versions are.
    stored, rule = definition_of(view(VIEW)), view(VIEW, "state")
    for views in ({"states": stored}, {"states": definition_of(rule)}):
        assert not has_changed(views, rule, [rule])
    changed_rule = view(VIEW.replace("o.state", other), "state")
    assert has_changed({"states": definition_of(rule)}, changed_rule, [changed_rule]) is is_other_view
