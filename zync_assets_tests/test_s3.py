"""The lake in a bucket of a real S3 server: the real command, with a Spark of its own that reads and writes there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zync_assets.local.services import Services
from zync_assets_tests.checker import statement as statements
from zync_assets_tests.checker.evidence import gather
from zync_assets_tests.checker.verdict import judge
from zync_assets_tests.checker.wire import Schemas
from zync_assets_tests.s3 import S3
from zync_assets_tests.shop import Shop, changes, make_shop
from zync_assets_tests.test_chain import assert_equals_model


def shop_on(s3: S3, services: Services, folder: Path, prefix: str) -> Shop:
    """A shop whose lake is in the bucket ``lakes``."""
    place = f"lakes/{prefix}"
    return make_shop(services, folder, prefix, lake=s3.lake(place), files=s3.folder / place)


def zync(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    script = "from zync_assets.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.timeout(600)
def test_the_chain_from_topics_to_topics(services: Services, s3: S3, tmp_path: Path, unique: str) -> None:
    shop = shop_on(s3, services, tmp_path, unique)
    model = shop.model()
    whole = list(changes(shop, range(60), seed=3))
    model.batch(shop.produce(whole))
    ran = zync("run", "--until-idle", shop.pipeline.path)
    assert ran.returncode == 0, ran.stderr
    report = judge(
        statements.shop(unique),
        gather(services.bootstrap_servers, shop.files, statements.shop(unique)),
        Schemas(services.registry_url),
        drained=True,
    )
    assert report.sound, str(report)
    assert_equals_model(shop, model)
    told = zync("status", shop.pipeline.path)
    assert told.returncode == 0, told.stderr
    assert s3.secret not in ran.stdout + ran.stderr + told.stdout + told.stderr
