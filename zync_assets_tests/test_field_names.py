"""Names of fields from the source's topic to the output's, and columns of nulls alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from click.testing import CliRunner

from zync_assets.cli.main import main
from zync_assets.local.services import Services
from zync_assets_tests.mini import mini, published

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
    assert [json.loads(text) for text in published(it, it.out)] == [{"ü": "x", "a.b": {"1": 1}}]
    assert [json.loads(text)["payload"] for text in published(it, f"{it.out}.c")] == [rows[1]]
    sql = f"select key, value.id from Raw.`{it.left}` order by kafka.offset"
    shown = CliRunner().invoke(main, ["query", str(it.pipeline.path), sql, "--format", "json"])
    assert [json.loads(line) for line in shown.stdout.splitlines()] == [{"key": None, "id": 1}, {"key": None, "id": 2}]
