"""The rows that contribute to an output of a view, as ``zync trace`` shows them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zync_assets.etl.views.contributions import contributions
from zync_assets.lake import staging
from zync_assets.local.services import Services
from zync_assets.pipeline import Pipeline
from zync_assets_tests.view_world import Change, World, make_world

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def rows_of(world: World, spark: SparkSession, key: Any) -> list[tuple[str, Any]] | None:
    """The alias and the id of each row that contributes to the latest output of a key."""
    pipeline: Pipeline = world.it.pipeline
    state = staging.open_staging(pipeline.lake, "Staging")
    assert state is not None
    [rule] = pipeline.rules
    offset = max(row["kafka"]["offset"] for row in world.it.staged(rule.out) if row["key"] == key)
    found = contributions(spark, state, [rule], rule, offset)
    if found is None:
        return None
    raw = {topic: world.it.raw(topic) for topic in {each.topic for each in found}}
    ids = {
        (topic, row["kafka"]["partition"], row["kafka"]["offset"]): row["key"]["id"]
        for topic, records in raw.items()
        for row in records
    }
    rows = [(each.alias, ids[each.topic, each.partition, each.offset]) for each in found]
    # A table's rows are ordered by their records.
    return sorted(rows, key=lambda row: ("ocl".index(row[0]), row[1]))


@pytest.mark.slow
def test_the_rows_of_a_document(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> None:
    world = make_world(services, spark, tmp_path, unique, names=["documents"])
    lines = [
        Change("lines", {"id": id}, {"order_id": of, "sku": "tea", "qty": 1}) for id, of in ((1, 1), (2, 1), (3, 2))
    ]
    orders = [
        Change("orders", {"id": id}, {"customer": customer, "status": "new", "fee": 1})
        for id, customer in ((1, 7), (2, 7), (3, 8))
    ]
    customers = [Change("customers", {"id": id}, {"name": "Ann", "region": 1, "note": "n"}) for id in (7, 8)]
    world.send([*lines, *orders, *customers])
    world.ingest()
    world.etl()
    assert rows_of(world, spark, {"id": 1}) == [("o", 1), ("c", 7), ("l", 1), ("l", 2)]
    assert rows_of(world, spark, {"id": 3}) == [("o", 3), ("c", 8)]
    # A line goes to another order, and a document goes.
    world.send([Change("lines", {"id": 2}, {"order_id": 2, "sku": "tea", "qty": 1}), Change("orders", {"id": 3}, None)])
    world.ingest()
    world.etl()
    assert rows_of(world, spark, {"id": 1}) == [("o", 1), ("c", 7), ("l", 1)]
    assert rows_of(world, spark, {"id": 2}) == [("o", 2), ("c", 7), ("l", 2), ("l", 3)]
    assert rows_of(world, spark, {"id": 3}) == []
