"""``zync rebuild`` of 300,000 records, killed and run again, with the lake in a folder and in a bucket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, TopicPartition

from zync_assets.local.services import Services
from zync_assets_tests.etl.test_rebuild import COPY
from zync_assets_tests.mini import BOTH, mini, row
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
    path, log = it.pipeline.path, tmp_path / "zync.log"
    if place == "bucket":
        path.write_text(path.read_text().replace(f"lake: {it.lake}", f"lake: {s3.lake(f'lakes/{unique}')}"))
    it.send(it.left, *((f"k{number}", row(number, f"v{number}")) for number in range(RECORDS)))

    def zync(*arguments: str, armed: str = "") -> str:
        script = "from zync_assets.cli.main import main; main()"
        command = [sys.executable, "-c", script, arguments[0], str(path), *arguments[1:]]
        started = time.monotonic()
        with log.open("wb") as out:
            environment = {**os.environ, "ZYNC_CRASH": armed}
            done = subprocess.run(command, stdout=out, stderr=out, env=environment, timeout=400, check=False)
        record_property(f"{arguments[0]} {armed}, lake in a {place}", f"{time.monotonic() - started:.1f} s")
        assert done.returncode == (-signal.SIGKILL if armed else 0), log.read_text()
        return log.read_text()

    zync("run", "--until-idle")
    edit = f'"if(in.value.id % {CHANGED} = 0, upper(in.value.v), in.value.v)"'
    path.write_text(path.read_text().replace("{l: in.value.v}", f"{{l: {edit}}}"))
    zync("rebuild", armed="rebuild:recomputed")
    assert "~rebuild" not in zync("rebuild", armed="publish:produced")
    zync("rebuild")
    changed = len(range(0, RECORDS, CHANGED))
    found = consumed(it.pipeline.kafka["bootstrap.servers"], it.out, RECORDS + changed)
    assert found == {f"k{number}": f"{'v' if number % CHANGED else 'V'}{number}" for number in range(RECORDS)}
    zync("check")
    # Nothing is left to do.
    assert "~rebuild" in zync("rebuild")
    consumed(it.pipeline.kafka["bootstrap.servers"], it.out, RECORDS + changed)


def consumed(servers: object, topic: str, count: int) -> dict[str, str]:
    """The rows of a topic that has exactly ``count`` records."""
    reader = Consumer({"bootstrap.servers": str(servers), "group.id": "long", "log_level": 0})
    assert reader.get_watermark_offsets(TopicPartition(topic, 0), 30) == (0, count)
    reader.assign([TopicPartition(topic, 0, 0)])
    rows: dict[str, str] = {}
    left = count
    while left:
        messages = reader.consume(min(left, 50_000), 30)
        assert messages
        left -= len(messages)
        for message in messages:
            rows[(message.key() or b"").decode()] = json.loads(message.value() or b"")["l"]
    reader.close()
    return rows
