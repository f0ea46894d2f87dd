"""Every dependency of the project is necessary: without the package, some work fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zync_assets.local.services import Services

ROOT = Path(__file__).resolve().parents[1]

PIPELINE = """
kafka: {{bootstrap.servers: "{servers}"}}
lake: ./lake
spark: {{master: "local[1]"}}
inputs: [{{topic: source.rows, pool: Raw, format: string}}]
outputs: [{{topic: out.rows, pool: Staging, format: string, create: {{replication-factor: 1}}}}]
transforms: [{{type: stateless, in: source.rows, out: out.rows, key: in.key, value: in.value}}]
"""

BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""

WORK = {
    "dagster": """
from zync_assets.definitions import defs
keys = {key.to_user_string() for key in defs.resolve_all_asset_keys()}
assert {"kafka/source.rows", "Raw/source.rows", "Staging/out.rows", "kafka/out.rows"} <= keys, keys
""",
    "dagster_webserver": """
from dagster import DagsterInstance
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import WorkspaceFileTarget
from dagster_webserver.webserver import DagsterWebserver
from starlette.testclient import TestClient
with DagsterInstance.local_temp() as instance:
    with WorkspaceProcessContext(instance, WorkspaceFileTarget(["workspace.yaml"])) as context:
        client = TestClient(DagsterWebserver(context).create_asgi_app())
        answer = client.post("/graphql", json={"query": "{assetNodes {assetKey {path}}}"}).json()
        assert ["Raw", "source.rows"] in [node["assetKey"]["path"] for node in answer["data"]["assetNodes"]], answer
""",
    "dagster_pyspark": """
import os
from pathlib import Path
from dagster import build_resources
from zync_assets.assets.resources import session, spark_resource
from zync_assets.pipeline_file import load
with build_resources({"spark": spark_resource(load(Path(os.environ["ZYNC_PIPELINE"])))}) as resources:
    assert session(resources.spark).conf.get("spark.sql.ansi.enabled") == "true"
""",
    "pyspark": """
from zync_assets.spark.session import spark_session
from zync_assets.spark.tasks import run_tasks
assert run_tasks(spark_session({"master": "local[1]"}), 2, lambda index: index * 10) == [0, 10]
""",
    "fastavro": """
import pyarrow as pa
from zync_assets.codecs.dispatch import make_decoder
from zync_assets.pipeline import SideFormat
schema = '{"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}]}'
made = make_decoder(SideFormat("avro"), lambda number: schema, None).decode(pa.array([b"\\0\\0\\0\\0\\1\\x0e"]))
assert made.values.to_pylist() == [{"id": 7}], made
""",
    "confluent_kafka": """
import os
from zync_assets.kafka.topics import create_topic, topic_states
kafka = {"bootstrap.servers": os.environ["SERVERS"]}
create_topic(kafka, os.environ["TOPIC"], 2, 1, {})
assert len(topic_states(kafka, [os.environ["TOPIC"]])[os.environ["TOPIC"]].partitions) == 2
""",
}


def run(script: str, services: Services, folder: Path, topic: str) -> subprocess.CompletedProcess[str]:
    path = folder / "packages.yaml"
    path.write_text(PIPELINE.format(servers=services.bootstrap_servers))
    env = {
        **os.environ,
        "ZYNC_PIPELINE": str(path),
        "SERVERS": services.bootstrap_servers,
        "TOPIC": topic,
        "DAGSTER_HOME": str(folder),
    }
    return subprocess.run(
        [sys.executable, "-c", script], env=env, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.parametrize("package", WORK)
def test_without_a_package_its_work_fails(services: Services, tmp_path: Path, unique: str, package: str) -> None:
    with_it = run(WORK[package], services, tmp_path, unique)
    assert with_it.returncode == 0, with_it.stderr
    without = run(BLOCKER.format(package=package) + WORK[package], services, tmp_path, unique)
    assert without.returncode != 0
    assert f"No module named '{package}" in without.stderr
