"""Types that the file shows, and the fields that they lack."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from zync_assets import pipeline_file
from zync_assets.pipeline import Input, SideFormat
from zync_assets.pipeline_file.plain_types import plain_type, unknown_fields

FILE = """
kafka: {bootstrap.servers: "localhost:9092"}
missing-field: MISSING
inputs:
  - topic: A
    pool: Raw
    key-format: string
    value-format: json
    schema: "op string, after struct<Id: bigint, `first name`: string, lines: array<struct<sku: string>>>"
  - {topic: B, pool: Raw, key-format: string, value-format: json, schema: "id bigint, name string"}
  - {topic: C, pool: Raw, format: avro}
registry: {url: "http://localhost:8081"}
outputs:
  - {topic: Out, pool: STAGING, key-format: string, value-format: json}
transforms:
  - RULE
"""
STATELESS = "{name: r, type: stateless, in: A, out: Out, where: 'WHERE', key: in.key, value: {x: 'VALUE'}}"
VIEW = (
    "{name: r, type: view, tables: {a: {topic: A}, b: {topic: B}, c: {topic: C}},"
    " from: 'a JOIN b ON a.id = b.ON JOIN c ON c.x = b.id',"
    " key: 'cast(a.id AS string)', value: {x: 'VALUE', n: b.name}, out: Out}"
)


def unknown(tmp_path: Path, rule: str, missing: str = "null") -> tuple[list[str], list[str]]:
    path = tmp_path / "shop.yaml"
    pool = "Views" if "view" in rule else "Staging"
    path.write_text(FILE.replace("RULE", rule).replace("STAGING", pool).replace("MISSING", missing))
    problems, notes = unknown_fields(pipeline_file.load(path))
    return [f"{item.key}: {item.message}" for item in problems], notes


def test_types_in_the_file_are_of_the_exact_name_first() -> None:
    item = Input("rows", "Raw", SideFormat("string"), SideFormat("json", "Name string, name int, `a b` int"))
    found = {name: plain_type(f"in.value.{name}", {"in": item}) for name in ("Name", "name", "`A b`")}
    assert found == {"Name": pa.string(), "name": pa.int32(), "`A b`": pa.int32()}


@pytest.mark.parametrize("where", ['value.op = "c"', "value.AFTER.id > 1", "kafka.offset > 0"])
@pytest.mark.parametrize(
    "value", ["in.value.after.ID", "in.value.after.`first name`", "transform(in.value.after.lines, it -> it.sku)"]
)
def test_known_fields_are_no_problem(tmp_path: Path, where: str, value: str) -> None:
    assert unknown(tmp_path, STATELESS.replace("WHERE", where).replace("VALUE", value)) == ([], [])


@pytest.mark.parametrize(
    ("value", "lack"),
    [
        (
            "in.value.after.idd",
            "in.value.after.idd: the input's schema has no such field; there are Id, first name, lines",
        ),
        (
            "in.value.aftr.id",
            "in.value.aftr: the input's schema has no such field; there are op, after; did you mean `after`?",
        ),
        (
            "in.value.after.lines[0].skuu",
            "in.value.after.lines[0].skuu: the input's schema has no such field; there are sku",
        ),
        ("transform(in.value.after.lines, it -> it.s)", "it.s: the input's schema has no such field; there are sku"),
    ],
)
def test_a_field_that_the_schema_lacks_is_a_note_where_it_is_null(tmp_path: Path, value: str, lack: str) -> None:
    rule = STATELESS.replace("WHERE", "true").replace("VALUE", value)
    problems, (note,) = unknown(tmp_path, rule)
    assert problems == []
    assert note.startswith(f"rule r: {lack}")
    assert note.endswith("The field is null, by missing-field: null")
    (problem,), notes = unknown(tmp_path, rule, "fail")
    assert notes == []
    assert problem.startswith(f"rule r: {lack}")


def test_a_text_has_no_fields(tmp_path: Path) -> None:
    rule = STATELESS.replace("WHERE", "true").replace("VALUE", "in.key.id")
    cure = "For the fields of a JSON text, give the input `format: json` and a `schema:`."
    assert unknown(tmp_path, rule) == ([f"rule r: in.key.id: string has no fields. {cure}"], [])


def test_a_view_names_columns_of_rows_and_none_of_them_is_null(tmp_path: Path) -> None:
    good = VIEW.replace("b.ON", "b.id")
    assert unknown(tmp_path, good.replace("VALUE", "a.`first name`")) == ([], [])
    # Nothing is known of the columns of Avro before the first record.
    assert unknown(tmp_path, good.replace("VALUE", "a.lines[0].sku")) == ([], [])
    problems, notes = unknown(tmp_path, VIEW.replace("b.ON", "b.idd").replace("VALUE", "a.first"))
    assert notes == []
    assert [problem.partition(";")[0] for problem in problems] == [
        "rule r: b.idd: the input's schema has no such field",
        "rule r: a.first: the input's schema has no such field",
    ]
