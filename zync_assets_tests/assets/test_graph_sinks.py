"""Target tables in the graph: assets, runs, checks and the sensor."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zync_assets.local.services import Services
from zync_assets.sinks.steps import sink_all
from zync_assets.spark.session import spark_session
from zync_assets_tests.assets.rig import OPEN, Rig, failures, make_rig, orders, payments, told
from zync_assets_tests.assets.test_sensor import Ticks, jobs, reported, settled
from zync_assets_tests.mini import run_steps

SINKS = """
sinks:
  - {name: shop_$prefix, type: sqlite, url: shop.db, from: [Staging.$prefix.sales, Raw.$prefix.payments], key: [id]}
"""


@pytest.fixture
def rig(services: Services, tmp_path: Path, unique: str) -> Iterator[Rig]:
    with make_rig(services, tmp_path, unique, more=SINKS) as made:
        yield made


def rows(rig: Rig, sql: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(rig.pipeline.path.parent / "shop.db") as connection:
        return connection.execute(sql).fetchall()


def sink(rig: Rig) -> str:
    return rig.pipeline.sinks[0].name


def test_a_target_table_is_an_asset_with_its_source_s_ranges(rig: Rig) -> None:
    rig.send(rig.orders, orders(1, 2))
    rig.send(rig.payments, payments(1, 2))
    rig.ingest(rig.orders)
    rig.ingest(rig.payments)
    rig.stage()
    job, key = rig.names.sink_job(sink(rig), "sales"), rig.names.sink_key(sink(rig), "sales")
    done = rig.run(job)
    said = told(done, key)[OPEN]
    assert (said["first"], said["last"], said["complete"], said["written"]) == (0, 1, False, 2)
    assert {check.check_name: check.passed for check in done.get_asset_check_evaluations()} == {
        "sink_position": True,
        "sink_quarantine": True,
    }
    assert rows(rig, "SELECT id, item, paid FROM sales") == [("1", "item 1", 10), ("2", "item 2", 20)]
    assert "written" not in told(rig.run(job), key)[OPEN]
    ahead = "0:1000000-1999999"
    rig.add_keys(rig.names.staging_partitions("Staging"), ahead)
    (refused,) = failures(rig.run(job, ahead, fails=True))
    assert f"lies ahead of the next offset 2 of partition 0. Run {OPEN} instead" in refused


def test_the_sensor_writes_what_is_due_and_reports_what_was_done_outside(rig: Rig) -> None:
    ticks = Ticks(rig)
    rig.send(rig.payments, payments(3, 4))
    settled(rig, ticks)
    assert rows(rig, "SELECT id, paid FROM payments") == [("3", 30), ("4", 40)]
    assert jobs(ticks()) == []
    rig.send(rig.payments, payments(5))
    run_steps(rig.pipeline)
    list(sink_all(rig.pipeline, lambda: spark_session(rig.pipeline.spark)))
    found = reported(ticks())
    assert found[f"{sink(rig)}/payments", OPEN] == 2
    assert jobs(ticks()) == []
