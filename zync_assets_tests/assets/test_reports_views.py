"""What the asset of a view's output shows: its query, its state, and what each batch emitted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from zync_assets.local.services import Services
from zync_assets_tests import mini
from zync_assets_tests.assets.rig import FILE, OPEN, Rig, make_rig, orders, payments, told

VIEW = """
transforms:
  - name: sale
    type: view
    tables: {o: $prefix.orders, p: $prefix.payments}
    from: o LEFT JOIN p ON p.id = o.id
    out: $prefix.sales
    key: CAST(o.id AS STRING)
    value: {item: o.item, paid: p.paid}
  - name: note
    type: stateless
    in: $prefix.notes
    lookup: {o: {table: $prefix.orders, on: o.item = in.value, missing: null}}
    out: $prefix.refunds
    key: in.key
    value: {id: o.id}
"""


@pytest.fixture
def rig(services: Services, tmp_path: Path, unique: str) -> Iterator[Rig]:
    with make_rig(services, tmp_path, unique, file=FILE.split("transforms:")[0] + VIEW) as made:
        yield made


@pytest.mark.slow
def test_the_asset_of_a_view_shows_its_query_its_state_and_what_a_batch_emitted(rig: Rig) -> None:
    key = rig.names.pool_key("Staging", rig.sales)
    defined = rig.definitions.resolve_assets_def(key).metadata_by_key[key]
    assert "LEFT JOIN p ON (o.id) = (p.id)" in str(defined["sql"].value)
    assert defined["tables"] == f"o: {rig.orders}, p: {rig.payments}"
    other = rig.names.pool_key("Staging", rig.pipeline.outputs[1].topic)
    looked_up = rig.definitions.resolve_assets_def(other).metadata_by_key[other]
    assert looked_up["tables"] == f"o: {rig.orders}"
    begun = time.time()
    rig.send(rig.orders, orders(1, 2, 3))
    rig.send(rig.payments, payments(1))
    rig.ingest(rig.orders)
    rig.ingest(rig.payments)
    said = told(rig.stage(), key)[OPEN]
    assert (said["upserts"], said["tombstones"], said["state_rows"]) == (3, 0, 4)
    assert said["state_bytes"] > 1_000
    assert int(begun) <= said["last_change"] <= time.time()
    assert 0 <= said["seconds_since_last_change"] <= time.time() - said["last_change"] + 1
    # One row changes, one goes, and one stays.
    mini.send(rig.pipeline, rig.orders, [("2", None)])
    rig.send(rig.payments, payments(3))
    rig.ingest(rig.orders)
    rig.ingest(rig.payments)
    later = told(rig.stage(), key)[OPEN]
    assert (later["upserts"], later["tombstones"], later["state_rows"]) == (1, 1, 5)
    assert later["last_change"] >= said["last_change"]
