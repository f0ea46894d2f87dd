"""``dagster dev`` with nothing but a pipeline: the sensor alone takes what is produced to the output topic."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zync_assets.ingest import commit
from zync_assets.ingest import plan as ingest_plan
from zync_assets.kafka.topics import topic_states
from zync_assets.local.processes import free_port
from zync_assets.local.services import Services
from zync_assets.pipeline import Pipeline
from zync_assets.spark.session import spark_session
from zync_assets_tests.assets.rig import make_pipeline, orders, payments, send
from zync_assets_tests.assets.webserver import ROOT, stop


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_sensor_alone_fills_the_topic_also_after_a_step_outside(
    services: Services, tmp_path: Path, unique: str
) -> None:
    pipeline = make_pipeline(services, tmp_path, unique)
    home = tmp_path / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text((ROOT / "demo" / "dagster.yaml").read_text())
    env = {"DAGSTER_HOME": str(home), "ZYNC_PIPELINE": str(pipeline.path), "ZYNC_SENSOR": "running"}
    log = tmp_path / "dev.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "dagster", "dev", "--port", str(free_port())],
            cwd=ROOT,
            env={**os.environ, **env},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        send(pipeline, f"{unique}.orders", orders(1, 2))
        send(pipeline, f"{unique}.payments", payments(1, 2))
        assert filled(pipeline, 2), log.read_text()[-5000:]

        send(pipeline, f"{unique}.orders", orders(3))
        send(pipeline, f"{unique}.payments", payments(3))
        spark = spark_session(pipeline.spark)
        for item in pipeline.inputs:
            plan = ingest_plan.plan_ingest(pipeline, item.topic)
            if not plan.nothing_to_do:
                commit.commit_raw(pipeline, ingest_plan.read_input(spark, pipeline, plan))
        assert filled(pipeline, 3), log.read_text()[-5000:]
    finally:
        stop(process)


def filled(pipeline: Pipeline, count: int) -> bool:
    """Whether the first output topic has come to hold that many records."""
    topic = pipeline.outputs[0].topic
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        state = topic_states(pipeline.kafka, [topic]).get(topic)
        if state is not None and state.partitions[0].end == count:
            return True
        time.sleep(0.5)
    return False
