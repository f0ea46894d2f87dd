"""The lake in a bucket of a real S3 server: the real command, with a Spark of its own that reads and writes there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from zync_assets.local.services import Services
from zync_assets_tests.mini import log_of
from zync_assets_tests.s3 import S3
from zync_assets_tests.shop import changes, make_shop
from zync_assets_tests.test_chain import assert_equals_model
from zync_assets_tests.test_crashes import Rig, assert_sound, bucket_rig


def zync(*arguments: str | Path) -> str:
    """Run ``zync`` in a process. Returns its stdout and stderr."""
    script = "from zync_assets.cli.main import main; main()"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_died_goes_on_in_a_bucket_and_nothing_that_it_writes_down_has_the_keys(
    services: Services, s3: S3, tmp_path: Path, unique: str, record_property: Callable[[str, object], None]
) -> None:
    """Spark's event log has the plans, the session's properties and the JVM's command line, as its pages show them."""
    rig = bucket_rig(services, s3, tmp_path, unique)
    events = tmp_path / "events"
    events.mkdir()
    path = rig.shop.pipeline.path
    options = {"enabled": "true", "compress": "false", "dir": events.as_uri()}
    logged = "".join(f'spark.eventLog.{name}: "{value}", ' for name, value in options.items())
    path.write_text(path.read_text().replace("spark: {", f"spark: {{{logged}"))
    rig.produce(list(changes(rig.shop, range(40), seed=7)))
    rig.die("etl:outputs-written")
    rig.run()
    assert_sound(services, rig, unique, "etl:outputs-written, lake in a bucket", record_property)

    written = log_of(rig.shop.pipeline).read_text() + zync("status", path)
    seen = [item.read_text(errors="replace") for item in events.rglob("*") if item.is_file()]
    assert any("s3a://lakes" in text and "InsertIntoHadoopFsRelationCommand" in text for text in seen)
    for text in [written, *seen]:
        assert s3.secret not in text
        assert s3.key not in text


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_chain_in_a_bucket_beside_the_same_in_a_folder(
    services: Services, s3: S3, tmp_path: Path, unique: str, record_property: Callable[[str, object], None]
) -> None:
    """The test reports the times, and asserts none."""
    orders = 10_000
    for place in ("folder", "bucket"):
        prefix, folder = f"{unique}{place}", tmp_path / place
        folder.mkdir()
        if place == "bucket":
            rig = bucket_rig(services, s3, folder, prefix)
        else:
            shop = make_shop(services, folder, prefix)
            rig = Rig(shop, shop.model(), None)
        rig.produce(list(changes(rig.shop, range(orders), seed=3)))
        started = time.monotonic()
        rig.run()
        first = time.monotonic() - started
        rig.produce(list(changes(rig.shop, range(orders, orders + 100), seed=4)))
        started = time.monotonic()
        rig.run()
        again = time.monotonic() - started
        assert_equals_model(rig.shop, rig.model)
        count = sum(map(len, rig.shop.sent.values()))
        told = f"{place} | {count} records | {first:.1f} s at first | {again:.1f} s for the last 400"
        record_property("table: the lake in a bucket and in a folder", told)
