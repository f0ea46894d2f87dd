"""Commits and log checkpoints killed with SIGKILL anywhere inside delta-rs: each is there whole or not at all.

No JVM: a process that has loaded everything forks writers, each of which goes on where the one before was killed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from zync_assets.lake import log, tables
from zync_assets_tests.checker.delta import open_table

WRITERS = """
import os, random, signal, sys, time
import pyarrow as pa
from zync_assets.lake import log, tables

uri, kills = sys.argv[1], int(sys.argv[2])
dice = random.Random(1)


def entry(number):
    os.makedirs(uri, exist_ok=True)
    open(f"{uri}/part-{number}.parquet", "w").close()
    return log.DataFile(f"part-{number}.parquet", 1, 1, 0, number, number)


def write():
    opened = tables.open_table(uri)
    if opened is None:
        tables.create_table(uri, pa.schema([("n", pa.int64())]), "killed", [entry(1)], {"number": 1})
        opened = tables.open_table(uri)
    while True:
        number = opened.number("number")
        assert len(log.list_files(opened)) == number
        tables.commit(opened, [entry(number + 1)], {"number": number + 1})
        if number % 5 == 0:
            opened.delta.create_checkpoint()
        opened = tables.open_table(uri)


def versions():
    try:
        return sum(name.endswith(".json") for name in os.listdir(uri + "/_delta_log"))
    except FileNotFoundError:
        return 0


def checkpoints():
    return [name for name in os.listdir(uri + "/_delta_log") if name.endswith(".checkpoint.parquet")]


# A machine under load commits slowly. The first writer shows how long six commits and a checkpoint last here.
span = None
for _ in range(kills):
    before = versions()
    child = os.fork()
    if child == 0:
        try:
            write()
        finally:
            os._exit(1)
    while versions() == before and os.waitpid(child, os.WNOHANG)[0] == 0:
        time.sleep(0.001)
    if span is None:
        start = time.monotonic()
        while not checkpoints() and os.waitpid(child, os.WNOHANG)[0] == 0:
            time.sleep(0.001)
        span = time.monotonic() - start
    time.sleep(dice.uniform(0, span / 2))
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, "a writer ended before it was killed"
"""


def test_a_commit_that_was_killed_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    done = subprocess.run(
        [sys.executable, "-c", WRITERS, uri, "30"], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    opened, read_by_hand = tables.open_table(uri), open_table(Path(uri))
    assert opened is not None
    assert read_by_hand is not None
    assert list((tmp_path / "table" / "_delta_log").glob("*.checkpoint.parquet"))
    number = opened.number("number")
    assert number is not None
    assert number >= 20
    assert {item.path for item in log.list_files(opened)} == {f"part-{n}.parquet" for n in range(1, number + 1)}
    assert (read_by_hand.version, read_by_hand.numbers["number"]) == (opened.version, number)
    assert len(read_by_hand.files) == number
