"""A sink writes each record once into a table of SQLite, wherever it is killed."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zync_assets.local.services import Services
from zync_assets.runner import reset_sink, sink_all
from zync_assets_tests.mini import BOTH, Mini, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RULES = """
transforms:
  - {name: whole, type: stateless, where: value.op = 'c', in: $left, out: $out, key: {id: in.value.id},
     value: {id: in.value.id, v: in.value.v, twice: "concat(in.value.v, in.value.v)"}}
  - {name: part, type: stateless, where: value.op = 'u', in: $left, out: $out, key: {id: in.value.id},
     value: {id: in.value.id, v: in.value.v}}
  - {name: gone, type: stateless, where: value.op = 'd', in: $left, out: $out, key: {id: in.value.id}, value: null}
sinks:
  - {name: shop, type: sqlite, url: shop.db, from: [Staging.$out], table: rows}
"""
TEXT = BOTH.replace("key-format: string, value-format: json, create", "format: avro, create") + RULES


def rows(it: Mini, sql: str = "SELECT * FROM rows ORDER BY id") -> list[tuple[Any, ...]]:
    with sqlite3.connect(it.pipeline.path.parent / "shop.db") as connection:
        return connection.execute(sql).fetchall()


def write(it: Mini) -> list[int]:
    """Everything that was staged; the numbers of loaded rows."""
    return [made.records for made in sink_all(it.pipeline, lambda: it.spark)]


def test_a_batch_is_folded_and_written_once(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, TEXT)
    it.send(it.left, row(1, "a"), row(2, "b"), row(1, "A", op="u"), row(3, "c"), row(3, op="d"))
    it.step()
    assert write(it) == [3]
    assert rows(it) == [(1, "A", "aa"), (2, "b", "bb")]
    assert write(it) == []
    # A partial record changes its columns only; a delete and a later insert make a new row.
    it.send(it.left, row(2, "B", op="u"), row(1, op="d"), row(1, "n", op="u"), row(4, "d", op="u"))
    it.step()
    assert write(it) == [3]
    assert rows(it) == [(1, "n", None), (2, "B", "bb"), (4, "d", None)]
    assert rows(it, "SELECT source, partition, next FROM zync_positions") == [(f"Staging.{it.out}", 0, 9)]
    assert not list(tmp_path.glob("shop.db-*"))
    reset_sink(it.pipeline, lambda: spark, "shop", "rows")
    assert rows(it) == []
    assert write(it) == [4]
    assert rows(it) == [(1, "n", None), (2, "B", "bb"), (4, "d", None)]
