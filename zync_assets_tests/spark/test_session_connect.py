"""The steps on the shared Spark server. Each command is a process of its own: a process has one kind of session."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from zync_assets import pipeline_file
from zync_assets.checks.output_checks import run_all
from zync_assets.kafka.topics import high_watermark
from zync_assets.lake import tables
from zync_assets.lake.quarantine_table import quarantined_records
from zync_assets.local import processes
from zync_assets.local.services import Services
from zync_assets.runner import etl_all, ingest_all
from zync_assets.spark import shared_servers
from zync_assets.spark.session import servers_own
from zync_assets.spark.settings import spark_settings
from zync_assets.spark.shared_servers import Server
from zync_assets_tests.mini import BOTH, Mini, mini, row
from zync_assets_tests.services import ON_CONNECT, SPARK
from zync_assets_tests.spark.test_python_daemon import HIDING
from zync_assets_tests.test_writers_side_by_side import AVRO, COPY

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECRET = "hunter2-of-a-store"
LOCAL = f"spark: {json.dumps(SPARK)}"
REMOTE = f"spark: {json.dumps({**SPARK, 'remote': 'shared', 'spark.my.secret': SECRET})}"

RULES = (
    BOTH
    + """
transforms:
  - {name: number, type: stateless, in: $left, where: "value.op = 'n'", out: $out, key: in.key,
     value: {id: in.value.id, l: "CAST(100 DIV CAST(in.value.v AS INT) AS INT)", r: CAST(NULL AS INT)}}
  - {name: join, type: denorm, left: $left, right: $right, out: $out, key: left.key,
     join-on: left.value.id = right.value.id,
     value: {id: left.value.id, l: CAST(left.value.v AS INT), r: CAST(right.value.v AS INT)}}
"""
)


@dataclass
class Warm:
    """A folder of servers, and the outputs of its clients' processes."""

    folder: Path
    outputs: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "ZYNC_SPARK_DIR": str(self.folder)}

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self, process: subprocess.Popen[str], code: int = 0) -> str:
        said, _ = process.communicate(timeout=280)
        output = "".join(line for line in said.splitlines(True) if not line.startswith("Starting a Spark server"))
        self.outputs.append(output)
        assert process.returncode == code, output
        return output

    def zync(self, *arguments: object, code: int = 0) -> str:
        return self.end(self.begin(*ZYNC, *map(str, arguments)), code)

    def python(self, script: str, *arguments: object) -> str:
        return self.end(self.begin("-c", script, *map(str, arguments)))

    def servers(self) -> list[Server]:
        return [
            server
            for path in self.folder.glob("*/ready.json")
            if (server := shared_servers.find(path.parent)) is not None
        ]


ZYNC = ("-c", "from zync_assets.cli.main import main; main()")


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    warm = Warm(tmp_path_factory.mktemp("spark"))
    yield warm
    warm.zync("spark", "down")
    assert not warm.servers()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Warm]:
    """Servers of one test, whose settings are not those of ``warm``."""
    own = Warm(tmp_path / "spark")
    yield own
    own.zync("spark", "down")
    assert not own.servers()


@pytest.fixture
def it(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Mini:
    """A pipeline whose file says ``remote: shared``."""
    return shared(mini(services, spark, tmp_path, unique, RULES))


def shared(it: Mini) -> Mini:
    path = it.pipeline.path
    path.write_text(path.read_text().replace(LOCAL, REMOTE))
    return replace(it, pipeline=pipeline_file.load(path))


def fill(it: Mini) -> None:
    it.send(
        it.left, *(row(number, str(number)) for number in range(20)), b"{broken", row(7, "4", "n"), row(8, "0", "n")
    )
    it.send(it.right, *(row(number, str(10 * number)) for number in range(5, 25)), row(2, "no number"))


def told(it: Mini) -> dict[str, Any]:
    """The staged records, classes and errors of a pipeline, without the names of topics."""
    text = json.dumps(
        {
            "staged": [
                {name: item[name] for name in ("kafka", "key", "value", "rule", "source")} for item in it.staged()
            ],
            "classes": [it.classes(it.left), it.classes(it.right)],
            "held": sorted((one.topic, one.offset, one.rule, one.error) for one in quarantined_records(it.pipeline)),
        },
        default=str,
    )
    return json.loads(text.replace(it.left.split(".")[0], "unique"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_chain_is_as_in_a_local_session_and_each_command_finds_the_server(
    warm: Warm, it: Mini, services: Services, spark: SparkSession, tmp_path: Path
) -> None:
    fill(it)
    both = [warm.begin(*ZYNC, "from-kafka", str(it.pipeline.path), "--topic", topic) for topic in (it.left, it.right)]
    for process in both:
        warm.end(process)
    (server,) = warm.servers()  # of two that asked at once
    warm.zync("run", it.pipeline.path, "--until-idle")
    rows = warm.zync("query", it.pipeline.path, f"select count(*) AS n from Staging.`{it.out}`", "--format", "json")
    assert json.loads(rows) == {"n": len(it.staged())}
    assert warm.servers() == [server]
    for result in run_all(it.pipeline):
        assert result.passed or result.severity == "warn", f"{result.name}: {result.summary}"

    (tmp_path / "local").mkdir()
    other = mini(services, spark, tmp_path / "local", f"{it.left.split('.')[0]}local", RULES)
    fill(other)
    list(ingest_all(other.pipeline, lambda: spark, [other.left, other.right]))
    list(etl_all(other.pipeline, lambda: spark))
    mine, theirs = told(it), told(other)
    assert len(mine["held"]) == 3
    assert json.dumps(mine) == json.dumps(theirs).replace("uniquelocal", "unique")

    # No file, command line or output shows a secret of the clients or of the pipeline.
    for path in server.folder.iterdir():
        assert path.name == "server.json" or (SECRET not in (text := path.read_text()) and server.secret not in text)
    assert {oct(path.stat().st_mode & 0o77) for path in (server.folder, server.folder / "server.json")} == {"0o0"}
    lines = [" ".join(process.cmdline()) for process in family(server)]
    assert any("java" in line for line in lines)
    for text in (*lines, *warm.outputs, repr(server)):
        assert server.secret not in text and SECRET not in text
    addresses = {c.laddr.ip for process in family(server) for c in process.net_connections() if c.status == "LISTEN"}
    assert {address.removeprefix("::ffff:") for address in addresses} == {"127.0.0.1"}


def family(server: Server) -> list[psutil.Process]:
    """The processes of a server. A worker that has ended, and whose parent has not noticed, has no command line."""
    process = psutil.Process(server.pid)
    every = [process, *process.children(recursive=True)]
    return [each for each in every if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


REFUSED = """
import sys
from zync_assets.errors import SetupError
from zync_assets.spark import session
session.ANSWER_SECONDS = 3
for url in sys.argv[1:]:
    try:
        session.remote_session({"spark.remote": url})
    except SetupError as error:
        print("refused:", error)
"""


@pytest.mark.slow
def test_a_server_that_refuses_or_does_not_answer_is_an_error_without_the_token(warm: Warm, it: Mini) -> None:
    warm.zync("spark", "up", it.pipeline.path)
    (server,) = warm.servers()
    here, nobody = f"sc://localhost:{server.port}", f"sc://localhost:{processes.free_port()}"
    urls = (f"{here}/;token=wr0ng", here, f"{nobody}/;token=wr0ng", f"{here}/;token=wr0ng=")
    wrong, without, away, odd = warm.python(REFUSED, *urls).splitlines()
    assert f"refused: The Spark Connect server {here} refuses: it does not know this token." in wrong
    assert f"refused: The Spark Connect server {here} refuses:" in without
    assert f"refused: The Spark Connect server {nobody} does not answer. Start it" in away
    assert f"refused: spark: remote: {here} is no URL" in odd
    assert "wr0ng" not in wrong + away + odd


OTHER_SECRET = """
from dataclasses import replace
from zync_assets.errors import SetupError
from zync_assets.spark import session, shared_servers
from zync_assets.spark.settings import spark_settings
find = shared_servers.find
shared_servers.find = lambda folder: replace(find(folder), secret="wr0ng")
try:
    session.remote_session(spark_settings({"remote": "shared"}, ""))
except SetupError as error:
    print("refused:", error)
"""


@pytest.mark.slow
def test_the_commands_in_messages_about_a_server_do_what_the_messages_say(warm: Warm) -> None:
    def pasted(message: str) -> list[str]:
        return [warm.zync(*words.split()) for words in re.findall(r"`zync ([^`]+)`", message)]

    warm.zync("spark", "down")
    pasted(warm.zync("spark", "status"))
    (server,) = warm.servers()
    shown, stopped = pasted(warm.python(OTHER_SECRET))
    assert str(server.port) in shown
    assert "stopped 1" in stopped
    assert not warm.servers()


@pytest.mark.slow
def test_a_bad_record_of_a_batch_without_good_ones_goes_into_quarantine(
    warm: Warm, services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = shared(mini(services, spark, tmp_path, unique, AVRO + COPY))
    it.send(it.left, b"\0ga")
    warm.zync("run", it.pipeline.path, "--until-idle")
    assert it.classes(it.left) == {"quarantined": 1}
    assert [(one.topic, one.offset, one.stage) for one in quarantined_records(it.pipeline)] == [(it.left, 0, "value")]
    assert warm.zync("quarantine", "drop", it.pipeline.path, "--all") == "1 dropped\n"
    assert it.classes(it.left) == {"dropped": 1}


QUARANTINE = (
    "ingest/test_commit_bad_records.py",
    "ingest/test_commit_two_writers.py",
    "ingest/test_shape.py",
    "quarantine/test_replay.py",
    "etl/test_failure_search.py",
    "etl/test_output_files_shape.py",
    "test_evolution.py",
)
"""The test modules that look into quarantine."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tests_of_quarantine_pass_on_a_server(own: Warm) -> None:
    modules = [str(Path(__file__).parents[1] / name) for name in QUARANTINE]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ON_CONNECT, "1")
        process = own.begin("-m", "pytest", "-q", "-n", "0", "-m", "", *modules)
    output, _ = process.communicate()
    assert process.returncode == 0, output


@pytest.mark.slow
def test_a_lake_that_was_removed_and_made_again_is_published_by_the_same_server(
    warm: Warm, services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    servers: list[list[Server]] = []
    for number in range(3):
        it = shared(mini(services, spark, tmp_path, f"{unique}{number}", RULES))
        fill(it)
        for command in ("from-kafka", "etl", "to-kafka"):
            warm.zync(command, it.pipeline.path)
        assert len(it.staged()) == high_watermark(it.pipeline.kafka, it.out, 0) > 0
        servers.append(warm.servers())
        assert servers[0] == servers[-1]
        tables.forget(it.lake)
        shutil.rmtree(it.lake)


@pytest.mark.slow
def test_files_in_the_server_s_folder_are_no_modules_of_its_workers(
    warm: Warm, it: Mini, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZYNC_SPARK_DIR", str(warm.folder / "modules"))
    folder = shared_servers.folder_of(servers_own(spark_settings(it.pipeline.spark)))
    folder.mkdir(parents=True)
    for name in HIDING:
        (folder / name).write_text("raise ImportError(f'{__file__} was imported')")
    fill(it)
    try:
        run = (*ZYNC, "run", str(it.pipeline.path), "--until-idle")
        done = subprocess.run([sys.executable, *run], capture_output=True, text=True, check=False)
        assert (done.returncode, shared_servers.find(folder) is not None) == (0, True), done.stderr
    finally:
        shared_servers.stop(folder)


KILLED = """
import os, signal, sys
from pathlib import Path
from zync_assets.errors import SetupError
from zync_assets.etl.commit import commit_staging
from zync_assets.etl.plan import plan_etl, read_raw, transform
from zync_assets.pipeline_file import load
from zync_assets.runner import commit_etl, read_etl
from zync_assets.spark import shared_servers
from zync_assets.spark.session import spark_session
pipeline = load(Path(sys.argv[1]))
session = lambda: spark_session(pipeline.spark, pipeline.lake)
plan = plan_etl(pipeline, "Staging")
spark = session()
batch = transform(spark, plan, {topic: read_raw(spark, pipeline, plan, topic) for topic in plan.ranges})
(server,) = shared_servers.find_all()
os.kill(server.pid, signal.SIGKILL)
try:
    commit_staging(pipeline, batch)
except SetupError as error:
    print("error:", error)
assert not Path(pipeline.lake, "Staging", "_delta_log").exists()
commit_etl(pipeline, lambda: read_etl(pipeline, session, "Staging"))
(other,) = shared_servers.find_all()
print("other:", other.pid != server.pid)
"""


PINNED = """
import sys
from zync_assets import pipeline_file
from zync_assets.spark.sql import PINS
from zync_assets.spark.session import remote_session, spark_session
from pathlib import Path
settings = pipeline_file.load(Path(sys.argv[1])).spark
for _ in range(2):
    session = spark_session(settings)
    # A server does not say what it redacts by.
    own = {name: value for name, value in PINS.items() if ".redaction." not in name}
    print({name: session.conf.get(name) for name in own} == own, session.sql(r"SELECT '\\\\'").first()[0])
    session.conf.set("spark.sql.ansi.enabled", "false")
own = {"spark.remote": sys.argv[2], "spark.sql.timestampType": "TIMESTAMP_NTZ"}
print(remote_session(own).conf.get("spark.sql.timestampType"))
"""


@pytest.mark.slow
def test_results_on_a_server_depend_on_no_setting_of_it_or_of_the_session(warm: Warm, it: Mini) -> None:
    warm.zync("spark", "up", it.pipeline.path)
    (server,) = warm.servers()
    url = f"sc://localhost:{server.port}/;token={server.secret}"
    lines = warm.python(PINNED, it.pipeline.path, url).splitlines()
    assert not [line for line in lines if "deprecated" in line]
    assert lines[-3:] == ["True \\", "True \\", "TIMESTAMP_LTZ"]


@pytest.mark.slow
def test_a_server_that_is_killed_in_a_batch_costs_that_batch(warm: Warm, it: Mini) -> None:
    fill(it)
    warm.zync("from-kafka", it.pipeline.path)
    (server,) = warm.servers()
    jvm = next(process for process in family(server) if process.name() == "java")
    error, other = warm.python(KILLED, it.pipeline.path).splitlines()
    assert error.startswith("error: the Spark Connect server ended, or can't be reached any more. Nothing of this step")
    assert other == "other: True"
    assert it.classes(it.left)
    assert not processes.wait([jvm], 20)


@pytest.mark.slow
def test_a_run_goes_on_with_another_server(warm: Warm, it: Mini) -> None:
    it.send(it.left, row(1, "2", "n"))
    run = warm.begin(*ZYNC, "run", str(it.pipeline.path), "--exit-after", "10m")
    try:
        await_staged(it, 1, run)
        (server,) = warm.servers()
        os.kill(server.pid, signal.SIGKILL)
        it.send(it.left, row(2, "2", "n"))
        await_staged(it, 2, run)
        run.terminate()
        warm.end(run)
    finally:
        run.kill()


def await_staged(it: Mini, count: int, run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while len(it.staged()) < count:
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.mark.slow
def test_a_server_that_nobody_uses_ends(warm: Warm, it: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZYNC_SPARK_DIR", str(warm.folder / "idle"))
    settings = servers_own(spark_settings(it.pipeline.spark))
    folder = shared_servers.folder_of(settings)
    server = shared_servers.start(folder, settings, idle_seconds=2)
    assert shared_servers.find_all() == [server]
    assert not processes.wait([psutil.Process(server.pid)], 60)
    assert shared_servers.find_all() == []
    assert not (folder / "ready.json").exists()


DAGSTER = """
import json, sys
from pathlib import Path
from dagster import DagsterInstance
from pyspark import SparkContext
from zync_assets.assets.names import Names
from zync_assets.assets.build import build_definitions
from zync_assets.pipeline_file import load
import psutil
pipeline = load(Path(sys.argv[1]))
topic = pipeline.inputs[0].topic
with DagsterInstance.ephemeral() as instance:
    instance.add_dynamic_partitions(Names(pipeline).raw_partitions(topic), ["0:0-999999"])
    job = build_definitions(pipeline).resolve_job_def(Names(pipeline).ingest_job(topic))
    done = job.execute_in_process(instance=instance, tags={"dagster/partition": "0:0-999999"})
    print("rows", [event.materialization.metadata["rows"].value for event in done.get_asset_materialization_events()])
assert SparkContext._active_spark_context is None
assert "java" not in [process.name() for process in psutil.Process().children(recursive=True)]
"""


@pytest.mark.slow
def test_a_run_of_dagster_uses_it(warm: Warm, it: Mini) -> None:
    fill(it)
    assert "rows [22]" in warm.python(DAGSTER, it.pipeline.path)
    assert len(it.raw(it.left)) == 22


KEPT = """
import contextlib, io, os, signal, sys
from zync_assets.spark.session import spark_session
soon = {"defaultSessionTimeout": "15s", "maintenanceInterval": "1s"}
spark = spark_session(
    {"remote": "shared", "master": "local[1]"}
    | {f"spark.connect.session.manager.{name}": value for name, value in soon.items()}
)
frame = spark.range(1000).selectExpr("id", "id % 7 AS of")
plan = io.StringIO()
with contextlib.redirect_stdout(plan):
    frame.explain()
print("InMemoryTableScan" in plan.getvalue())
if sys.argv[1] == "killed":
    frame.persist().count()
    with contextlib.redirect_stdout(plan):
        frame.explain()
    print("InMemoryTableScan" in plan.getvalue(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_what_a_killed_client_had_cached_goes(own: Warm) -> None:
    assert own.end(own.begin("-c", KEPT, "killed"), -9).split() == ["False", "True"]
    # Each look is a session; the server clears up when there was none for a moment.
    for _ in range(10):
        if own.python(KEPT, "looks").split() == ["False"]:
            return
        time.sleep(10)
    pytest.fail("it is still there")
