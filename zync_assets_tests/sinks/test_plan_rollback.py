"""A lake from an older copy: no target table lacks a record, or has one twice, because ETL numbers other records."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import pytest

from zync_assets import runner
from zync_assets.errors import LakeError
from zync_assets.lake import tables
from zync_assets.local.services import Services
from zync_assets.sinks import plan
from zync_assets.sinks.steps import reset_sink, sink_all
from zync_assets_tests.mini import BOTH, Mini, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEXT = """
transforms:
  - {name: l, type: stateless, in: $left, out: $out, key: in.value.v, value: {v: in.value.v}}
  - {name: r, type: stateless, in: $right, out: $out, key: in.value.v, value: {v: in.value.v}}
sinks:
  - {name: rows, type: sqlite, url: shop.db, from: [Staging.$out], table: rows, key: [v]}
  - {name: log, type: sqlite, url: shop.db, from: [Staging.$out], table: log, mode: insert}
"""
START = 1_700_000_000_000


def sink(it: Mini) -> None:
    list(sink_all(it.pipeline, lambda: it.spark))


def written(it: Mini, table: str) -> list[str]:
    with closing(sqlite3.connect(it.pipeline.path.parent / "shop.db")) as connection:
        return sorted(text for (text,) in connection.execute(f"SELECT v FROM {table}"))


def test_etl_does_not_number_records_that_a_target_has_under_other_numbers(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, BOTH + TEXT)
    it.send(it.left, row(0, "l0"), times=[START])
    it.send(it.right, row(0, "r0"), times=[START + 1])
    it.step()
    sink(it)
    copy = shutil.copytree(it.lake, tmp_path / "copy")
    it.send(it.left, row(1, "l1"), row(2, "l2"), times=[START + 10, START + 11])
    it.step()
    sink(it)
    # The record comes late, and an ETL over all records puts it before l1.
    it.send(it.right, row(1, "r1"), times=[START + 5])
    shutil.rmtree(it.lake)
    shutil.copytree(copy, it.lake)
    tables.forget(it.lake)

    with pytest.raises(LakeError, match="went back to an older version") as caught:
        it.step()
    commands = [it.pipeline.command("sink", "--sink", name, "--reset", name) for name in ("rows", "log")]
    assert str(caught.value).endswith(f"load the target tables again: {'; '.join(commands)}")
    assert len(it.staged()) == 2
    for name in ("rows", "log"):
        reset_sink(it.pipeline, lambda: it.spark, name, name)
    sink(it)
    it.step()
    sink(it)
    assert [written(it, name) for name in ("rows", "log")] == [["l0", "l1", "l2", "r0", "r1"]] * 2


def test_etl_goes_on_while_a_target_is_away(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, BOTH + TEXT.replace("shop.db", "gone/shop.db"))
    it.send(it.left, row(0, "l0"))
    it.step()
    assert [value["v"] for value in it.values()] == ["l0"]


def test_etl_does_not_wait_for_a_frozen_target(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, answer = mini(services, spark, tmp_path, unique, BOTH + TEXT), Event()
    monkeypatch.setattr(runner, "ASK_SECONDS", 0.1)
    monkeypatch.setattr(plan, "progress_of", lambda *_: answer.wait(60))
    it.send(it.left, row(0, "l0"))
    it.step()
    assert [value["v"] for value in it.values()] == ["l0"]
    assert not answer.is_set()
    monkeypatch.undo()
    answer.set()


def test_a_table_whose_topic_the_older_copy_does_not_have(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    later = "  - {topic: $out.later, pool: Staging, format: json, create: {replication-factor: 1}}\n"
    it = mini(services, spark, tmp_path, unique, BOTH + TEXT)
    it.send(it.left, row(0, "l0"))
    it.send(it.right, row(0, "r0"))
    it.step()
    copy = shutil.copytree(it.lake, tmp_path / "copy")
    it = it.edited(
        (BOTH + later + TEXT.replace("in: $right, out: $out", "in: $right, out: $out.later"))
        .replace("Staging.$out]", "Staging.$out.later]")
        .replace("$out.", "${out}.")
    )
    it.send(it.right, row(1, "r1"))
    it.step()
    sink(it)
    shutil.rmtree(it.lake)
    shutil.copytree(copy, it.lake)
    tables.forget(it.lake)
    with pytest.raises(LakeError, match="went back to an older version"):
        it.step()
    # A user may drop a table by hand. Its position is still there.
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("DROP TABLE rows")
    for name in ("rows", "log"):
        reset_sink(it.pipeline, lambda: it.spark, name, name)
    it.step()
    sink(it)
    assert [written(it, name) for name in ("rows", "log")] == [["r1"]] * 2
