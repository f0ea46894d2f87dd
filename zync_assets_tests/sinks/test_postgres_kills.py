"""The whole command into PostgreSQL, killed at every crash point and at random moments, and twice at one time.

Random inserts, partial updates and deletes go through Kafka, ETL and the sink, and a column is added on the way. The table
equals the changes folded in plain Python each time.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from zync_assets.checks.state_checks import rows_match
from zync_assets.local.services import Services
from zync_assets.sinks.target import LOAD_PREFIX
from zync_assets_tests.connect import Postgres, postgres
from zync_assets_tests.mini import Mini, mini, row
from zync_assets_tests.sinks.test_commit import POINTS, TEXT
from zync_assets_tests.test_kills import kill

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WHOLE = 'twice: "concat(in.value.v, in.value.v)"'
WITH_NOTE = WHOLE + ", note: \"concat('n', in.value.v)\""
KEYS, CHANGES = 60, 400
WAIT = 240.0


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with postgres() as running:
        yield running


@dataclass
class World:
    """A pipeline into a table of PostgreSQL, and the rows that the changes make."""

    it: Mini
    server: Postgres
    database: str
    chance: random.Random
    text: str
    folder: Path
    wanted: dict[int, list[Any]] = field(default_factory=dict)
    has_note: bool = False

    def send(self) -> None:
        """Random changes, some with a null."""
        changes = [(self.chance.choice("cccuuud"), self.chance.randrange(KEYS)) for _ in range(CHANGES)]
        records: list[Any] = []
        for number, (op, key) in enumerate(changes):
            v = None if number % 17 == 0 else f"v{self.chance.randrange(10**6)}"
            records.append({**row(key, op=op), "v": v})
            if op == "d":
                self.wanted.pop(key, None)
                continue
            old = self.wanted.setdefault(key, [None, None, None])
            old[0] = v
            if op == "c":
                old[1] = v and v + v
                old[2] = (v and f"n{v}") if self.has_note else old[2]
        self.it.send(self.it.left, *records)

    def add_column(self) -> None:
        """From now on, whole rows have a further column."""
        self.text = self.text.replace(WHOLE, WITH_NOTE)
        self.it = self.it.edited(self.text)
        self.has_note = True

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        command, *rest = arguments
        line = [sys.executable, "-c", "from zync_assets.cli.main import main; main()"]
        line += [command, str(self.it.pipeline.path), *rest]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                line, stdout=log, stderr=log, env={**os.environ, **environment}, start_new_session=True
            )

    def run(self, *arguments: str, **environment: str) -> int:
        return self.start(*arguments, **environment).wait(WAIT)

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        return self.server.run(self.database, statement)

    def loads(self) -> set[str]:
        """The load tables of all runs."""
        pattern = LOAD_PREFIX.replace("_", r"\_")
        return {name for (name,) in self.sql(f"SELECT relname FROM pg_class WHERE relname LIKE '{pattern}%'")}

    def position(self) -> int:
        (found,) = self.sql("SELECT coalesce(max(next), 0) FROM zync_positions")
        return found[0]

    def assert_equals_model(self) -> None:
        columns = "id, v, twice" + (", note" if self.has_note else "")
        found = {key: list(values) for key, *values in self.sql(f"SELECT {columns} FROM rows")}
        assert found == {key: values[: 3 if self.has_note else 2] for key, values in self.wanted.items()}, self.log()
        assert self.position() == self.it.head.outputs[self.it.out, 0].next
        assert self.loads() == set()
        assert self.sql("SELECT * FROM zync_quarantine") == []

    def log(self) -> str:
        return (self.folder / "log").read_text()[-3000:]


@pytest.fixture
def world(services: Services, spark: SparkSession, tmp_path: Path, unique: str, server: Postgres) -> World:
    server.run("postgres", f"CREATE DATABASE {unique}")
    url = f"postgresql://postgres@127.0.0.1:{server.port}/{unique}"
    text = TEXT.replace("type: sqlite, url: shop.db", f'type: postgres, url: "{url}", evolve: add')
    it = mini(services, spark, tmp_path, unique, text)
    return World(it, server, unique, random.Random(20), text, tmp_path)


def test_a_sink_killed_at_each_crash_point_goes_on(world: World) -> None:
    for number, point in enumerate(POINTS):
        if number == 2:
            world.add_column()
        world.send()
        world.it.step()
        assert world.run("sink", ZYNC_CRASH=point) == -signal.SIGKILL, world.log()
        assert world.run("sink") == 0, world.log()
        world.assert_equals_model()
    (sink,) = world.it.pipeline.sinks
    assert rows_match(world.it.pipeline, lambda: world.it.spark, sink, sink.tables[0]).passed
    world.sql("UPDATE rows SET note = 'another' WHERE note IS NOT NULL")
    assert (
        "another value in note" in rows_match(world.it.pipeline, lambda: world.it.spark, sink, sink.tables[0]).summary
    )


def test_all_steps_killed_at_random_moments_go_on(world: World) -> None:
    """A run that goes on and on, under traffic: each kill comes a random time after the table got something new."""
    for number in range(6):
        if number == 3:
            # The rules change between two runs: what was sent before has passed the old ones.
            assert world.run("run", "--until-idle") == 0, world.log()
            world.assert_equals_model()
            world.add_column()
        world.send()
        process = world.start("run")
        before = world.position() if number else 0
        await_true(world, process, lambda before=before: bool(world.sql(EXISTS)[0][0]) and world.position() > before)
        world.send()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(world.chance.uniform(0, 4))
        kill(process, world.folder / "log")
    assert world.run("run", "--until-idle") == 0, world.log()
    world.assert_equals_model()


EXISTS = "SELECT to_regclass('zync_positions') IS NOT NULL"


def await_true(world: World, process: subprocess.Popen[bytes], holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WAIT
    while not holds():
        assert process.poll() is None and time.monotonic() < give_up, world.log()
        time.sleep(0.05)


def test_of_two_sinks_at_one_time_one_writes_and_the_other_goes_on(world: World) -> None:
    """Both have loaded the same batch when the first one merges: of the first batch, and of a later one."""
    world.send()
    world.it.step()
    assert world.run("sink") == 0, world.log()
    for is_first in (True, False):
        if is_first:
            world.sql("TRUNCATE rows, zync_positions")
        world.send()
        world.it.step()
        with psycopg.connect(host="127.0.0.1", port=world.server.port, user="postgres", dbname=world.database) as gate:
            # Reads go on, and claims of the position wait.
            gate.execute("LOCK TABLE zync_positions IN EXCLUSIVE MODE")
            processes = [world.start("sink") for _ in range(2)]
            for process in processes:
                await_true(world, process, lambda: len({name.rsplit("_", 2)[0] for name in world.loads()}) == 2)
            assert [process.poll() for process in processes] == [None, None]
        assert [process.wait(WAIT) for process in processes] == [0, 0], world.log()
        assert "another run wrote first" in world.log()
        world.assert_equals_model()


def test_a_table_is_emptied_while_a_run_writes_it(world: World) -> None:
    """And some of the commands that empty the table are killed."""
    process = world.start("run")
    for point in ("", "sink:emptied", "sink:merging", "sink:merged", ""):
        world.send()
        await_true(world, process, lambda: bool(world.sql(EXISTS)[0][0]) and world.position() > 0)
        code = world.run("sink", "--reset", "rows", **({"ZYNC_CRASH": point} if point else {}))
        assert code == (-signal.SIGKILL if point else 0), world.log()
    assert process.poll() is None, world.log()
    kill(process, world.folder / "log")
    assert world.run("run", "--until-idle") == 0, world.log()
    world.assert_equals_model()
    assert "Traceback" not in (world.folder / "log").read_text()
