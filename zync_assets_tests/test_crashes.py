"""The real command, killed with SIGKILL right after each effect that others can see, and run again without a trace.

Each case arms one crash point (``zync_assets/crashes.py``) and runs ``zync`` until it dies there, with its JVM and workers.
A second run continues until it is idle. The checker, which shares no code with the package, must find every record exactly
once. Outputs and account must equal the model's, which has no crash.
"""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import zync_assets
from zync_assets import pipeline_file
from zync_assets.etl import ledger
from zync_assets.lake import compaction, staging, storage, tables
from zync_assets.lake.raw import open_raw
from zync_assets.lake.raw_files import RangeWriter
from zync_assets.lake.storage import raw_uri
from zync_assets.local.services import Services
from zync_assets_tests.checker import statement as statements
from zync_assets_tests.checker.evidence import gather
from zync_assets_tests.checker.verdict import judge
from zync_assets_tests.checker.wire import Schemas
from zync_assets_tests.etl import test_rebuild
from zync_assets_tests.etl.views import test_maintenance
from zync_assets_tests.mini import die, run, run_steps
from zync_assets_tests.model import Model
from zync_assets_tests.publish import test_restore
from zync_assets_tests.s3 import S3
from zync_assets_tests.shop import Shop, changes, make_shop
from zync_assets_tests.sinks import conformance, test_commit, test_replay
from zync_assets_tests.test_chain import assert_equals_model

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS = 40

RUN = ("run", "--until-idle")


@dataclass
class Rig:
    """A shop whose topics hold what a case needs, and the model of what must come of it."""

    shop: Shop
    model: Model
    spark: SparkSession | None
    """This process's session; None: the lake is in a bucket, which that session can't read."""

    def produce(self, changes: list[Any]) -> None:
        """Produce the records of the next batch."""
        self.model.batch(self.shop.produce(changes))

    def run_here(self) -> None:
        """Run to idle in this process, whose Spark session is there already, or else in another."""
        if self.spark is None:
            self.run()
            return
        run_steps(self.shop.pipeline)

    def run(self, *command: str) -> None:
        """Run the command as a process of its own."""
        run(self.shop.pipeline, *(command or RUN))

    def die(self, point: str, *command: str) -> None:
        """Run the command and see it die where it should."""
        die(self.shop.pipeline, point, *(command or RUN))


def at_first(rig: Rig) -> None:
    """Everything is new: no table, no output topic."""
    rig.produce(list(changes(rig.shop, range(ORDERS), seed=7)))


def later(rig: Rig) -> None:
    """A first batch went through; the second widens the raw table of orders and the outputs, which had no type yet."""
    whole = list(changes(rig.shop, range(ORDERS), seed=7))
    first = [item for item in whole[: len(whole) // 2] if item[0] == rig.shop.status or item[4] is None]
    rig.produce(first)
    rig.run_here()
    rig.produce([item for item in whole if item not in first])


def with_many_ledger_files(rig: Rig) -> None:
    """As after many batches: the ledger is due to be compacted."""
    later(rig)
    state = staging.open_staging(rig.shop.pipeline.lake, "Staging")
    assert state is not None
    folder = rig.shop.files / "Staging"
    rows = pa.concat_tables([pq.ParquetFile(folder / item.path).read() for item in state.ledger_files])
    assert rows.num_rows >= 10
    pieces = [rows.slice(place, 1) for place in range(rows.num_rows)]
    pieces += [rows.slice(0, 0)] * (ledger.COMPACTION_FILES + 1 - len(pieces))
    made = []
    for place, piece in enumerate(pieces):
        path = f"{staging.ACCOUNT_FOLDER}/piece-{place}.parquet"
        uri = storage.join(state.table.uri, path)
        storage.make_folder(uri.rpartition("/")[0])
        system, full = storage.filesystem(uri)
        pq.write_table(piece, full, filesystem=system)
        made.append(tables.DataFile(path, storage.file_size(uri), piece.num_rows, group=staging.ACCOUNT))
    tables.commit(state.table, made, {}, removals=state.ledger_files, partition_by=["topic"])


def with_many_raw_files(rig: Rig) -> None:
    """As after many batches: small files are due to become one."""
    whole = list(changes(rig.shop, range(3 * ORDERS), seed=7))
    rig.produce(whole[:-20])
    rig.run_here()
    state = open_raw(rig.shop.pipeline.lake, "Raw", rig.shop.status)
    assert state is not None
    item = next(item for item in state.table.files if item.partition == 0)
    rows = pq.ParquetFile(rig.shop.files / "Raw" / rig.shop.status / item.path).read()
    assert rows.num_rows >= compaction.FILES
    made = []
    for place in range(rows.num_rows):
        with RangeWriter(state.table.uri, 0) as writer:
            [batch] = rows.slice(place, 1).to_batches()
            writer.write(batch)
        made += [found for found, _ in writer.files]
    tables.commit(state.table, made, {}, removals=[item], rewritten=True)
    rig.produce(whole[-20:])


def after_many_commits(rig: Rig) -> None:
    """Make the search for files that no commit names due."""
    later(rig)
    for number in range(compaction.COMMITS):
        opened = tables.open_table(raw_uri(rig.shop.pipeline.lake, "Raw", rig.shop.status))
        assert opened is not None
        tables.commit(opened, [], {"tests": number})


def past_their_time(rig: Rig) -> None:
    """Raw records that are done and old, and an input that does not keep them."""
    whole = list(changes(rig.shop, range(ORDERS), seed=7))
    updates = [
        item for item in whole if item[0] == rig.shop.status and isinstance(item[4], dict) and item[4]["op"] == "u"
    ]
    rig.produce(updates)
    rig.run_here()
    path = rig.shop.pipeline.path
    path.write_text(path.read_text().replace("pool: Raw,", "pool: Raw, retention: 30d,"))
    rig.shop.pipeline = pipeline_file.load(path)
    rig.produce([item for item in whole if item not in updates])


def after_a_crash(rig: Rig) -> None:
    """A publisher died with records in the topic that the next one must verify."""
    at_first(rig)
    rig.die("publish:produced@2")


def published(rig: Rig) -> None:
    """Every step has finished. The case recreates the output topic."""
    at_first(rig)
    rig.run_here()


@dataclass(frozen=True)
class Case:
    prepare: Callable[[Rig], None]
    recreate: bool = False
    count: int = 1


CASES: dict[str, Case] = {
    "ingest:files-written": Case(at_first),
    "ingest:quarantine-written": Case(at_first),
    "ingest:table-created": Case(at_first),
    "ingest:columns-added": Case(later),
    "ingest:committed": Case(later),
    "etl:outputs-written": Case(at_first),
    "etl:ledger-written": Case(later),
    "etl:ledger-compacted": Case(with_many_ledger_files),
    "etl:head-written": Case(later),
    "etl:table-created": Case(at_first),
    "etl:columns-added": Case(later),
    "etl:committed": Case(with_many_ledger_files),
    "compact:written": Case(with_many_raw_files),
    "compact:committed": Case(with_many_raw_files),
    "clean:done": Case(after_many_commits),
    "retention:released": Case(past_their_time),
    "retention:removed": Case(past_their_time),
    "publish:topic-created": Case(at_first),
    "publish:window-announced": Case(later),
    "publish:produced": Case(later, count=2),
    "publish:acknowledged": Case(at_first),
    "publish:verified": Case(after_a_crash),
    "publish:window-closed": Case(at_first),
    "publish:topic-deleted": Case(published, recreate=True),
}
ELSEWHERE = {
    *test_commit.POINTS,
    *test_replay.POINTS,
    *conformance.RESET_POINTS,
    *test_maintenance.POINTS,
    *test_rebuild.OWN_POINTS,
    *test_restore.POINTS,
}
"""The points of sinks, views, rebuilds and restores, which the shop has none of."""
AGAIN: dict[str, Case] = {"publish:topic-created": Case(published, recreate=True)}
"""A point that is passed on two ways."""


def test_every_crash_point_has_a_case() -> None:
    found: set[str] = set()
    for path in Path(zync_assets.__file__).parent.rglob("*.py"):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if "crash_point(" in source else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "crash_point":
                [name] = node.args
                assert isinstance(name, ast.Constant), path
                found.add(str(name.value))
    assert found == {*CASES, *ELSEWHERE}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lake", ["folder", "bucket"])
@pytest.mark.parametrize(("name", "case"), [*CASES.items(), *AGAIN.items()])
def test_every_point_with_processes_alone(
    services: Services,
    spark: SparkSession,
    s3: S3,
    tmp_path: Path,
    unique: str,
    name: str,
    case: Case,
    lake: str,
    record_property: Callable[[str, object], None],
) -> None:
    rig = (
        make_rig(services, spark, tmp_path, unique) if lake == "folder" else bucket_rig(services, s3, tmp_path, unique)
    )
    case.prepare(rig)
    command = ("to-kafka", "--recreate", rig.shop.new) if case.recreate else RUN
    rig.die(f"{name}@{case.count}", *command)
    rig.run(*command)
    assert_sound(services, rig, unique, f"{name}, lake in a {lake}", record_property)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("etl:", "publish:"))])
def test_every_point_of_outputs_with_three_partitions(
    services: Services,
    spark: SparkSession,
    tmp_path: Path,
    unique: str,
    name: str,
    record_property: Callable[[str, object], None],
) -> None:
    rig, case = make_rig(services, spark, tmp_path, unique, count=3), CASES[name]
    case.prepare(rig)
    command = ("to-kafka", "--recreate", rig.shop.new) if case.recreate else RUN
    rig.die(f"{name}@{case.count}", *command)
    rig.run(*command)
    assert_sound(services, rig, unique, f"{name}, three partitions", record_property)


def make_rig(services: Services, spark: SparkSession, folder: Path, prefix: str, count: int = 1) -> Rig:
    """``count``: the partitions of the topic of new orders."""
    shop = make_shop(services, folder, prefix, settle="1", count=count)
    return Rig(shop, shop.model(), spark)


def bucket_rig(services: Services, s3: S3, folder: Path, prefix: str) -> Rig:
    place = f"lakes/{prefix}"
    shop = make_shop(services, folder, prefix, lake=s3.lake(place), files=s3.folder / place)
    return Rig(shop, shop.model(), None)


def assert_sound(
    services: Services, rig: Rig, prefix: str, name: str, record_property: Callable[[str, object], None]
) -> None:
    statement = statements.shop(prefix)
    evidence = gather(services.bootstrap_servers, rig.shop.files, statement)
    report = judge(statement, evidence, Schemas(services.registry_url), drained=True)
    record_property("table: crash points", f"{name} | killed there | run again: {str(report).splitlines()[0]}")
    assert report.sound, str(report)
    assert_equals_model(rig.shop, rig.model)


def test_a_point_that_is_not_armed_does_nothing() -> None:
    script = "from zync_assets.crashes import crash_point\ncrash_point('etl:committed')\nprint('lives')"
    for armed in ("", "etl:head-written", "etl:committed@2"):
        environment = {**os.environ, "ZYNC_CRASH": armed}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (0, "lives\n")


def test_the_run_dies_whichever_of_its_processes_gets_there() -> None:
    """A crash point in a worker also kills the process that began the run, and that process's other descendants."""
    worker = "from zync_assets.crashes import crash_point; crash_point('publish:produced')"
    script = (
        "import subprocess, sys, time, zync_assets.crashes\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(other.pid, flush=True)\n"
        f"subprocess.run([sys.executable, '-c', {worker!r}], start_new_session=True)\n"
        "print('lives')"
    )
    environment = {**os.environ, "ZYNC_CRASH": "publish:produced"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert "killed at publish:produced" in done.stderr
    [other] = done.stdout.split()
    assert ends(int(other))


def ends(pid: int) -> bool:
    """Whether a process is dead, or dies now that SIGKILL was sent: the system takes a moment for it.

    In a container a dead process may stay a zombie, which nobody collects.
    """
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        deadline = time.monotonic() + 30
        while process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
    return True
