"""Runs everything with marked secrets, by command line and by Dagster, with right and wrong logins. Then searches for them.

The broker demands SCRAM over TLS, and the registry a login over TLS. The search covers the processes' output at the highest
log level, errors, reprs, Spark's plans and event log, Dagster's storage with its events and metadata, and the lake. It also
covers the arguments of every process, read while the processes run.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Template

import psutil
import pytest
from confluent_kafka import Producer

from zync_assets.kafka.registry import Registry
from zync_assets.kafka.topics import create_topic, topic_state
from zync_assets.pipeline import RegistryConfig
from zync_assets_tests.mini import framed
from zync_assets_tests.network.front import front
from zync_assets_tests.network.processes import arguments, family, listening
from zync_assets_tests.network.secured import USER, Secured

pytestmark = pytest.mark.slow

FILE = """
name: secrets
kafka:
  bootstrap.servers: "$servers"
  security.protocol: SASL_SSL
  sasl.mechanism: SCRAM-SHA-512
  sasl.username: zync
  sasl.password: $${TEST_PASSWORD}
  ssl.ca.location: $ca
registry: {url: "$registry", basic.auth.user.info: "zync:$${TEST_LOGIN}", ssl.ca.location: $ca}
lake: ./lake
spark:
  master: "local[2]"
  spark.sql.shuffle.partitions: "2"
  spark.ui.enabled: "true"
  spark.eventLog.enabled: "true"
  spark.eventLog.compress: "false"
  spark.eventLog.dir: $events
  spark.hadoop.fs.s3a.secret.key: $${TEST_STORE}
inputs: [{topic: $source, pool: Raw, key-format: string, value-format: avro}]
outputs: [{topic: $target, pool: Staging, key-format: string, value-format: avro, create: {replication-factor: 1}}]
transforms: [{type: stateless, in: $source, out: $target, key: in.key, value: {id: in.value.id}}]
"""
SCHEMA = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}

RUN = """
import os, sys, time, traceback
from pathlib import Path
from dagster import DagsterInstance, EnvVar
from zync_assets.assets.names import Names
from zync_assets.assets.build import build_definitions
from zync_assets.assets.resources import KafkaResource, RegistryResource
from zync_assets.assets.sensor import evaluate
from zync_assets.cli.main import main
from zync_assets.pipeline_file import load
from zync_assets.ingest.plan import plan_ingest, read_input
from zync_assets.spark.session import spark_session

file, home = Path(sys.argv[1]), sys.argv[2]

def zync(*words):
    try:
        main(["-vv", *words], standalone_mode=False)
    except SystemExit as ended:
        print("ended", ended.code)

for step in ("from-kafka", "etl", "to-kafka"):
    zync(step, str(file))
zync("etl", "--explain", str(file))
zync("status", str(file))
zync("check", str(file))
pipeline = load(file)
topic = pipeline.inputs[0].topic
spark = spark_session(pipeline.spark)
plan = plan_ingest(pipeline, topic)
batch = read_input(spark, pipeline, plan)
print(repr(pipeline), repr(plan), repr(batch), repr(batch.source))
batch.dataframe().explain(True)
kafka = KafkaResource(
    bootstrap_servers=pipeline.kafka["bootstrap.servers"], security_protocol="SASL_SSL", sasl_mechanism="SCRAM-SHA-512",
    sasl_username="zync", sasl_password=EnvVar("TEST_PASSWORD"), ssl_ca_location=pipeline.kafka["ssl.ca.location"],
)
registry = RegistryResource(
    url=pipeline.registry.url, basic_auth_user_info=EnvVar("TEST_BASIC"), ssl_ca_location=pipeline.kafka["ssl.ca.location"],
)

def materialise(instance, **expected):
    made = build_definitions(pipeline, kafka=kafka, registry=registry)
    instance.add_dynamic_partitions(Names(pipeline).raw_partitions(topic), ["0:0-999999"])
    done = made.resolve_job_def(Names(pipeline).ingest_job(topic)).execute_in_process(
        instance=instance, tags={"dagster/partition": "0:0-999999"}, raise_on_error=False)
    print("materialised", done.success, kafka, registry, made.resources)
    for event in done.all_events:
        print(event)

with DagsterInstance.local_temp(home, {"telemetry": {"enabled": False}}) as instance:
    materialise(instance)
    for name in ("TEST_PASSWORD", "TEST_LOGIN"):
        os.environ[name] = os.environ[name + "_WRONG"]
    os.environ["TEST_BASIC"] = "zync:" + os.environ["TEST_LOGIN"]
    materialise(instance)
    for command in ("status", "from-kafka"):
        zync(command, str(file))
    try:
        print(evaluate(Names(load(file)), instance, None, time.time()))
        zync("ls", "--pipeline", str(file))
    except Exception:
        traceback.print_exc()
spark.stop()
"""


@dataclass(frozen=True)
class Traces:
    """The traces of a run: the folder with its files, its output, and the words of the command lines."""

    folder: Path
    printed: str
    words: frozenset[str]
    places: frozenset[tuple[str, int]]
    """Addresses and ports on which the processes listened."""
    marks: tuple[str, ...]
    topic: str


@pytest.fixture(scope="module")
def traces(secured: Secured, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traces]:
    folder = tmp_path_factory.mktemp("run")
    topic, mark = "t" + secrets.token_hex(4), secrets.token_hex(8)
    given = {
        "TEST_PASSWORD": secured.secret,
        "TEST_PASSWORD_WRONG": f"wrong-password-{mark}",
        "TEST_LOGIN": f"login-{mark}",
        "TEST_LOGIN_WRONG": f"wrong-login-{mark}",
        "TEST_STORE": f"store-{mark}",
        "TEST_BASIC": f"zync:login-{mark}",
    }
    with front(secured.services.registry_url, secured.authority.server("front", "127.0.0.1")) as server:
        server.wanted = "Basic " + base64.b64encode(given["TEST_BASIC"].encode()).decode()
        for name in ("events", "home"):
            (folder / name).mkdir()
        file = folder / "secrets.yaml"
        file.write_text(
            Template(FILE).substitute(
                servers=secured.ways["SCRAM-SHA-512"]["bootstrap.servers"],
                ca=secured.authority.path,
                registry=server.url,
                events=(folder / "events").as_uri(),
                source=topic,
                target=f"{topic}.out",
            )
        )
        _fill(secured, topic)
        with (folder / "printed").open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", RUN, str(file), str(folder / "home")],
                env={**os.environ, **given},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            words: set[str] = set()
            places: set[tuple[str, int]] = set()
            root = psutil.Process(process.pid)
            while True:
                now = family(root)
                words |= arguments(now)
                places |= set(listening(now))
                try:
                    process.wait(0.3)
                except subprocess.TimeoutExpired:
                    continue
                break
    printed = (folder / "printed").read_text(errors="replace")
    assert process.returncode == 0, printed[-3000:]
    marks = [given[name] for name in given if name != "TEST_BASIC"]
    coded = [text for mark in (*marks, *(f"zync:{mark}" for mark in marks)) for text in _in_base64(mark)]
    yield Traces(folder, printed, frozenset(words), frozenset(places), (*marks, *coded), topic)


def _in_base64(mark: str) -> list[str]:
    """How a text looks within something larger in base64: what its neighbours don't touch, at each of three alignments."""
    return [base64.b64encode(b"-" * shift + mark.encode()).decode()[4 if shift else 0 : -4] for shift in range(3)]


def _fill(secured: Secured, topic: str) -> None:
    plain = secured.ways["PLAINTEXT"]
    create_topic(plain, topic, 1, 1, {})
    id = Registry(RegistryConfig(secured.services.registry_url)).register(f"{topic}-value", json.dumps(SCHEMA))
    producer = Producer(plain)  # pyright: ignore[reportCallIssue]
    for number in range(20):
        producer.produce(topic, framed(id, SCHEMA, {"id": number}), f"k{number}")
    assert producer.flush(10) == 0


def test_the_chain_runs_over_tls_with_logins(traces: Traces, secured: Secured) -> None:
    assert topic_state(secured.ways["PLAINTEXT"], f"{traces.topic}.out").partitions[0].end == 20
    assert "materialised True" in traces.printed


def test_what_is_refused_says_so_without_a_stack_trace_of_ours(traces: Traces) -> None:
    assert "note: asking for topics" in traces.printed
    assert "authentication (SCRAM-SHA-512) failed" in traces.printed
    assert "materialised False" in traces.printed
    assert "refused the login (HTTP status 401)" in traces.printed
    assert "Traceback" not in traces.printed


def test_no_secret_is_in_anything_that_a_run_leaves(traces: Traces) -> None:
    files = [path for path in traces.folder.rglob("*") if path.is_file()]
    contents = {path: path.read_bytes() for path in files}
    assert not [
        (str(path.relative_to(traces.folder)), mark)
        for path, content in contents.items()
        for mark in traces.marks
        if mark.encode() in content
    ]
    # That the search would find something: the topic's name is nearly everywhere.
    for part in ("events", "home", "lake", "printed"):
        assert any(traces.topic.encode() in found for path, found in contents.items() if part in path.parts), part
    assert any(USER.encode() in content for content in contents.values())


def test_no_secret_is_among_the_arguments_of_a_process(traces: Traces) -> None:
    assert any("org.apache.spark.deploy.SparkSubmit" in word for word in traces.words)
    assert any("zync_assets.spark.python_daemon" in word for word in traces.words)
    assert not [mark for mark in traces.marks for word in traces.words if mark in word]


def test_spark_listens_on_loopback_only(traces: Traces) -> None:
    # The driver, its block manager, the way to Python, and the pages.
    assert len(traces.places) >= 4
    assert {address.removeprefix("::ffff:") for address, _ in traces.places} == {"127.0.0.1"}, traces.places


def test_broker_and_registry_listen_on_loopback_only(secured: Secured) -> None:
    for pid in (secured.services.kafka_pid, secured.services.registry_pid):
        assert pid is not None
        places = set(listening(family(psutil.Process(pid))))
        assert places
        assert {address.removeprefix("::ffff:") for address, _ in places} == {"127.0.0.1"}, places
