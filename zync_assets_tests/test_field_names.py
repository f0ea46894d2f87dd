"""Names of fields from the source's topic to the output's, and columns of nulls alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from zync_assets.cli.main import main
from zync_assets.local.services import Services
from zync_assets_tests.mini import mini

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAMES = """
inputs:
  - {topic: $left, pool: Raw, key-format: connect-json, value-format: connect-json}
outputs:
  - {topic: $out, pool: Staging, key-format: string, value-format: json, create: {replication-factor: 1}}
  - {topic: $out.c, pool: Staging, key-format: string, value-format: connect-json, create: {replication-factor: 1}}
transforms:
  - {name: one, type: stateless, in: $left, where: value.id = 1, out: $out, key: null,
     value: {"ü": in.value.`a.b`, "a.b": {"1": in.value.id}}}
  - {name: two, type: stateless, in: $left, out: $out.c, key: null, value: in.value}
"""
FIELDS = [{"type": "int32", "field": "id"}, {"type": "string", "field": "a.b"}, {"type": "string", "field": "ü"}]


def test_json_outputs_take_names_that_avro_lacks_and_keys_that_are_null_have_a_column(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, NAMES)
    rows = [{"id": id, "a.b": "x", "ü": "y"} for id in (1, 2)]
    it.send(it.left, *[(None, {"schema": {"type": "struct", "fields": FIELDS}, "payload": row}) for row in rows])
    it.step()
    assert [json.loads(text) for text in it.published(it.out)] == [{"ü": "x", "a.b": {"1": 1}}]
    assert [json.loads(text)["payload"] for text in it.published(f"{it.out}.c")] == [rows[1]]
    sql = f"select key, value.id from Raw.`{it.left}` order by kafka.offset"
    shown = CliRunner().invoke(main, ["query", str(it.pipeline.path), sql, "--format", "json"])
    assert [json.loads(line) for line in shown.stdout.splitlines()] == [{"key": None, "id": 1}, {"key": None, "id": 2}]


ODD = """
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: json, schema: "$schema"}
  - {topic: $right, pool: Raw, key-format: string, value-format: json, schema: "$schema"}
outputs:
  - {topic: $out, pool: Staging, key-format: string, value-format: json, partition-by: "length(value.`first name`)",
     create: {partitions: 3, replication-factor: 1}}
  - {topic: $out.lines, pool: Staging, key-format: string, value-format: json, create: {replication-factor: 1}}
transforms:
  - name: event
    type: group
    records: {order: $left, r: $right}
    where: {order: value.`from` IS NULL, r: value.`größe` > 0}
    group-by: {order: value.`tx.id`, r: "coalesce(value.`tx.id`, value.`größe`)"}
    complete-when: bool_or(value.`all done`) AND sum(order.value.`größe`) > 1 AND max(r.value.`a``b`) = 'x'
    out:
      - {topic: $out, key: max(value.`first name`), where: count(order.value.`a``b`) = 0,
         value: {"first name": max(order.value.`first name`), "a`b": first(r).value.`a``b`, select: sum(value.`größe`)}}
      - {topic: $out.lines, explode: "flatten(transform(list(order), it -> it.value.`li.nes`))", where: item.`from` > 0,
         key: item.`s ku`, value: {"s ku": item.`s ku`, "from": item.`from`, "ü": max(order.value.`größe`)}}
  - name: lines
    type: stateless
    in: $left
    where: value.`from` = 1
    out: $out.lines
    explode: in.value.`li.nes`
    key: item.`s ku`
    value: {"s ku": item.`s ku`, "from": item.`from`, "ü": CAST(in.value.`größe` AS INT)}
"""
SCHEMA = (
    "`tx.id` bigint, `first name` string, `größe` int, `from` int, `a``b` string, `all done` boolean,"
    " `li.nes` array<struct<`s ku`: string, `from`: int>>"
)


@pytest.mark.slow
def test_keys_of_groups_elements_and_partitions_may_have_any_names(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, ODD.replace("$schema", SCHEMA))
    lines = [{"s ku": "tea", "from": 1}, {"s ku": "cup", "from": 0}, {"s ku": None, "from": 2}]
    it.send(it.left, {"tx.id": 5, "first name": "Anna", "größe": 2, "li.nes": lines}, {"from": 1, "li.nes": lines[:1]})
    it.step()
    it.send(it.right, {"größe": 5, "a`b": "x", "all done": True}, {"größe": 0})
    it.step()
    # The lake's names.
    assert it.values() == [{"first%20name": "Anna", "a`b": "x", "select": 7}]
    assert it.staged()[0]["kafka"]["partition"] == 1
    assert it.classes(it.right) == {"done": 1, "unmatched": 1}
    assert [json.loads(text) for text in it.published(f"{it.out}.lines")] == [
        {"s ku": "tea", "from": 1, "ü": None},
        {"s ku": "tea", "from": 1, "ü": 2},
        {"s ku": None, "from": 2, "ü": 2},
    ]
