"""Two of everything at once, as real processes: one wins each commit, and the other stops or goes on with a clear message."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer

from zync_assets.kafka.topics import high_watermark
from zync_assets.local.services import Services
from zync_assets_tests.checker import statement as statements
from zync_assets_tests.checker.evidence import gather
from zync_assets_tests.checker.verdict import judge
from zync_assets_tests.checker.wire import Schemas
from zync_assets_tests.shop import Shop, changes, make_shop
from zync_assets_tests.torture.children import EXPECTED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ZYNC = "from zync_assets.cli.main import main; main()"
DAGSTER = """
import sys
from pathlib import Path
from dagster import DagsterInstance
from zync_assets import pipeline_file
from zync_assets.assets.names import Names
from zync_assets.assets.build import build_definitions

pipeline = pipeline_file.load(Path(sys.argv[1]))
definitions = build_definitions(pipeline)
names = Names(pipeline)
with DagsterInstance.local_temp(sys.argv[2], {"telemetry": {"enabled": False}}) as instance:
    def run(job, keys, key):
        instance.add_dynamic_partitions(keys, [key])
        done = definitions.resolve_job_def(job).execute_in_process(
            instance=instance, tags={"dagster/partition": key}, raise_on_error=False
        )
        for event in done.get_step_failure_events():
            print("error:", event.step_failure_data.user_failure_data or event.step_failure_data.error.message, file=sys.stderr)
    for item in pipeline.inputs:
        for partition in range(2):
            run(names.ingest_job(item.topic), names.raw_partitions(item.topic), f"{partition}:0-999999")
    run(names.staging_job("Staging"), names.staging_partitions("Staging"), "0:0-999999")
"""


def start(*arguments: str, script: str = ZYNC) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, said = process.communicate(timeout=400)
    return process.returncode, out + said


def zync(shop: Shop, command: str, *options: str) -> tuple[int, str]:
    return ended(start(command, str(shop.pipeline.path), *options))


def is_explained(said: str) -> bool:
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    return bool(lines) and all(any(re.search(pattern, line) for pattern in EXPECTED.values()) for line in lines)


@pytest.fixture
def shop(services: Services, tmp_path: Path, unique: str) -> Shop:
    made = make_shop(services, tmp_path, unique, partitions=(2, 2), settle="20")
    made.produce(changes(made, range(400), seed=4))
    return made


def assert_exactly_once(shop: Shop, services: Services, unique: str) -> None:
    statement = statements.shop(unique)
    evidence = gather(shop.servers, Path(shop.pipeline.lake), statement)
    report = judge(statement, evidence, Schemas(services.registry_url), drained=True)
    assert report.sound, str(report)


def test_two_of_each_step(shop: Shop, services: Services, unique: str) -> None:
    for step in ("from-kafka", "etl", "to-kafka"):
        both = [ended(process) for process in [start(step, str(shop.pipeline.path)) for _ in range(2)]]
        assert 0 in [code for code, _ in both], both
        for code, said in both:
            assert code == 0 or is_explained(said), said
        code, said = zync(shop, step)
        assert code == 0 and "nothing to do" in said
    assert_exactly_once(shop, services, unique)


def test_a_dagster_run_beside_zync_run(shop: Shop, services: Services, unique: str, tmp_path: Path) -> None:
    folder = tmp_path / "dagster"
    folder.mkdir()
    beside = start(str(shop.pipeline.path), str(folder), script=DAGSTER)
    code, said = zync(shop, "run", "--until-idle")
    assert code == 0 or is_explained(said), said
    code, said = ended(beside)
    assert code == 0, said
    assert "error: " not in said or is_explained(said), said
    assert zync(shop, "run", "--until-idle")[0] == 0
    assert_exactly_once(shop, services, unique)


def test_a_foreign_record_stops_everything_and_the_messages_words_are_the_way_back(
    shop: Shop, services: Services, unique: str
) -> None:
    assert zync(shop, "run", "--until-idle")[0] == 0
    end = high_watermark(shop.pipeline.kafka, shop.new, 0)
    other = Producer({"bootstrap.servers": shop.servers})
    other.produce(shop.new, b"foreign", partition=0)
    assert other.flush(10) == 0
    shop.produce(changes(shop, range(400, 500), seed=5))
    code, said = zync(shop, "run", "--until-idle")
    assert code == 1 and f"the record at offset {end} is not staging's" in said, said
    assert high_watermark(shop.pipeline.kafka, shop.new, 0) == end + 1
    code, found = zync(shop, "check")
    assert code == 1 and f"offset {end} " in found, found
    [remedy] = re.findall(r"(zync to-kafka .*)$", said, re.MULTILINE)
    assert remedy == shop.pipeline.command("to-kafka", "--recreate", shop.new)
    assert zync(shop, "to-kafka", "--recreate", shop.new)[0] == 0
    assert zync(shop, "run", "--until-idle")[0] == 0
    assert zync(shop, "check")[0] == 0
    assert_exactly_once(shop, services, unique)
