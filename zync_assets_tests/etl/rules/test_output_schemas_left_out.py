"""Fields that the source did not send are left out of records, down to the schema, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from zync_assets.checks.remote_checks import staging_equals_topic
from zync_assets.codecs.dispatch import make_encoder
from zync_assets.etl.rules.output_schemas import is_empty, null_masks, parse_group, schema_groups, without
from zync_assets.kafka.registry import Registry
from zync_assets.local.services import Services
from zync_assets_tests.mini import BOTH, Mini, decoded, mini, read_topic, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOLDER = "__debezium_unavailable_value"
RULES = """
transforms:
  - name: pair
    type: denorm
    where: value.op = 'c'
    left: $left
    right: $right
    join-on: left.value.id = right.value.id
    out: $out
    key: left.key
    value: {id: left.value.id, l: left.value.v, r: right.value.v}
  - {name: update, type: stateless, where: value.op = 'u', in: $left, out: $out, key: in.key,
     value: {id: in.value.id, l: in.value.v, more: {l: in.value.v}}}
  - {name: only, type: stateless, where: value.op = 'o', in: $left, out: $out, key: in.key, value: {l: in.value.v}}
"""


def staged(services: Services, spark: SparkSession, folder: Path, prefix: str, form: str) -> Mini:
    text = BOTH.replace("value-format: json, create", f"value-format: {form}, create")
    it = mini(services, spark, folder, prefix, text + RULES)
    it.send(it.right, row(1, HOLDER))
    it.send(it.left, row(1, "a"), row(2, "b", op="u"), row(3, HOLDER, op="u"), row(4, "c", op="u"))
    it.send(it.left, row(5, HOLDER, op="o"), row(6, "d", op="o"), times=[1_700_000_001_000, 1_700_000_001_001])
    it.step()
    it.publish()
    return it


EXPECTED = [
    {"id": 1, "l": "a"},
    {"id": 2, "l": "b", "more": {"l": "b"}},
    {"id": 3},
    {"id": 4, "l": "c", "more": {"l": "c"}},
    {},
    {"l": "d"},
]


@pytest.mark.parametrize("form", ["avro", "json", "connect-json"])
def test_records_without_what_was_not_sent(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, form: str
) -> None:
    it = staged(services, spark, tmp_path, unique, form)
    registry = Registry(it.pipeline.registry) if it.pipeline.registry else None
    found: list[Any] = []
    for _, _, payload in read_topic(it.pipeline, it.out):
        if form == "avro":
            assert registry is not None
            found.append(decoded(registry, payload))
        else:
            document = json.loads(payload or b"")
            found.append(document["payload"] if form == "connect-json" else document)
            if form == "connect-json":
                assert [field["field"] for field in document["schema"]["fields"]] == list(document["payload"])
    assert found == EXPECTED
    assert [item["left_out"] for item in it.staged()] == [
        ["value.r"],
        None,
        ["value.l", "value.more.l"],
        None,
        ["value.l"],
        None,
    ]
    assert staging_equals_topic(it.pipeline, it.out).passed
    if form == "avro" and registry is not None:
        assert len(registry.versions(f"{it.out}-value")) == 6  # three rules, and three without what was left out
        it.send(it.left, row(7, HOLDER, op="u"))
        it.step()
        it.publish()
        assert len(registry.versions(f"{it.out}-value")) == 6


def test_with_null_a_placeholder_is_a_text_like_any_other(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, "unavailable-value: null\n" + BOTH + RULES)
    it.send(it.left, row(5, HOLDER, op="o"))
    it.step()
    assert [(item["left_out"], item["value"]["l"]) for item in it.staged()] == [(None, HOLDER)]


SCHEMA = json.dumps(
    {
        "type": "record",
        "name": "Value",
        "fields": [
            {"name": "a", "type": ["null", "long"], "default": None},
            {
                "name": "in",
                "type": ["null", {"type": "record", "name": "Value_in", "fields": [{"name": "b", "type": "string"}]}],
                "default": None,
            },
        ],
    }
)


def names(schema: str) -> list[str]:
    return [field["name"] for field in json.loads(schema)["fields"]]


def test_a_record_of_which_nothing_is_left_is_left_out_the_whole_value_is_not() -> None:
    assert names(without(SCHEMA, "value", ["value.a"])) == ["in"]
    assert names(without(SCHEMA, "value", ["value.in.b"])) == ["a"]
    assert names(without(SCHEMA, "value", ["value.b", "key.a"])) == ["a", "in"]
    whole = without(SCHEMA, "value", ["value.a", "value.in.b"])
    assert names(whole) == []
    assert is_empty(whole)


@pytest.mark.parametrize(("form", "payload"), [("avro", b"\0\0\0\0\x07"), ("json", b"{}")])
def test_a_record_without_fields(form: Any, payload: bytes) -> None:
    schema = without(SCHEMA, "value", ["value.a", "value.in"])
    encoded = make_encoder(form, schema, 7).encode(pa.array([True, None]))
    assert encoded.payloads.to_pylist() == [payload, None]


def test_rows_are_told_apart_by_schema_and_by_what_they_leave_out() -> None:
    prints = pa.array(["s", "t", "s", "s"])
    some = pa.array([None, ["value.a"], [], ["value.a", "value.b.c"]], pa.list_(pa.string()))
    groups = schema_groups(prints, some).to_pylist()
    assert [parse_group(group) for group in groups] == [
        ("s", ()),
        ("t", ("value.a",)),
        ("s", ()),
        ("s", ("value.a", "value.b.c")),
    ]
    assert schema_groups(prints, pa.nulls(4, pa.list_(pa.string()))) is prints


def test_rows_have_the_lake_s_names_and_schemas_the_topic_s() -> None:
    field = {"type": ["null", "int"], "default": None}
    schema = {
        "type": "record",
        "name": "R",
        "fields": [{"name": name, **field} for name in ("5 off", "5%20off", "Name", "name")],
    }
    text = json.dumps(schema)
    assert names(without(text, "value", ["value.5%20off", "value.%6Eame"], renamed=True)) == ["5%20off", "Name"]
    assert names(without(text, "value", ["value.5%20off"])) == ["5 off", "Name", "name"]
    rows = pa.array([{"Name": 1, "%6Eame": None}, {"Name": None, "%6Eame": 1}])
    masks = null_masks(rows, [("Name",), ("name",)])
    assert {path: list(mask) for path, mask in masks.items()} == {("Name",): [False, True], ("name",): [True, False]}
