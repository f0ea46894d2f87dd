"""``zync rebuild`` of 300,000 records, killed and run again, with the lake in a folder and in a bucket."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zync_assets.local.services import Services
from zync_assets.pipeline import Pipeline
from zync_assets_tests.etl.test_rebuild import COPY
from zync_assets_tests.mini import BOTH, die, mini, published, row, run
from zync_assets_tests.s3 import S3

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RECORDS = 300_000
CHANGED = 3
"""The edit concerns each record whose number is a multiple of this."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_a_long_history(
    services: Services,
    s3: S3,
    spark: SparkSession,
    tmp_path: Path,
    unique: str,
    place: str,
    record_property: Callable[[str, object], None],
) -> None:
    it = mini(services, spark, tmp_path, unique, BOTH + COPY)
    pipeline, path = it.pipeline, it.pipeline.path
    if place == "bucket":
        path.write_text(path.read_text().replace(f"lake: {it.lake}", f"lake: {s3.lake(f'lakes/{unique}')}"))
    it.send(it.left, *((f"k{number}", row(number, f"v{number}")) for number in range(RECORDS)))

    def zync(command: str, *options: str, point: str = "") -> str:
        started = time.monotonic()
        said = die(pipeline, point, command, seconds=400) if point else run(pipeline, command, *options, seconds=400)
        record_property(f"{command} {point}, lake in a {place}", f"{time.monotonic() - started:.1f} s")
        return said

    zync("run", "--until-idle")
    edit = f'"if(in.value.id % {CHANGED} = 0, upper(in.value.v), in.value.v)"'
    path.write_text(path.read_text().replace("{l: in.value.v}", f"{{l: {edit}}}"))
    zync("rebuild", point="rebuild:recomputed")
    assert "~rebuild" not in zync("rebuild", point="publish:produced")
    zync("rebuild")
    changed = len(range(0, RECORDS, CHANGED))
    found = rows_of(pipeline, it.out, RECORDS + changed)
    assert found == {f"k{number}": f"{'v' if number % CHANGED else 'V'}{number}" for number in range(RECORDS)}
    zync("check")
    # Nothing is left to do.
    assert "~rebuild" in zync("rebuild")
    rows_of(pipeline, it.out, RECORDS + changed)


def rows_of(pipeline: Pipeline, topic: str, count: int) -> dict[str, str]:
    """The rows of a topic that has exactly ``count`` records."""
    records = published(pipeline, topic)[0]
    assert len(records) == count
    return {(key or b"").decode(): json.loads(value or b"")["l"] for key, value in records}
