"""The classes of targets: what is said where a driver is missing, and whose load tables are left by a killed run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from zync_assets.sinks.files import FilesTarget
from zync_assets.sinks.sqlite import SqliteTarget
from zync_assets.sinks.target import LOAD_PREFIX, Target, is_alive, process_mark
from zync_assets_tests.sinks.conformance import PLACE

DRIVERS = {
    "clickhouse": "clickhouse_connect",
    "databend": "databend_sqlalchemy",
    "mysql": "pymysql",
    "postgres": "psycopg",
}


@pytest.mark.parametrize("kind", sorted(DRIVERS))
def test_the_error_has_the_command_that_installs_a_missing_driver(kind: str) -> None:
    code = (
        f"import sys; sys.modules[{DRIVERS[kind]!r}] = None\n"
        "from zync_assets.sinks.target import open_target\n"
        "from zync_assets_tests.sinks.conformance import sink\n"
        f"open_target(sink({kind!r}, '{kind}://host/shop'))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"Install it: pip install 'zync-assets[{kind}]'" in ended.stderr


def dead_mark() -> str:
    """The mark of a process that has ended."""
    code = "from zync_assets.sinks.target import process_mark; print(process_mark())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_a_run_removes_what_dead_runs_of_its_place_have_left(tmp_path: Path) -> None:
    mine, dead = process_mark(), dead_mark()
    assert is_alive(mine) and not is_alive(dead)
    database = tmp_path / "shop.db"
    names = [f"{PLACE.load_prefix}{mine}_0", f"{PLACE.load_prefix}{dead}_0", f"{LOAD_PREFIX}other_{dead}_0"]
    for name in names:
        (tmp_path / f"shop.db-{name}").touch()
        load = tmp_path / "archive" / "_zync" / "loads" / name
        load.mkdir(parents=True)
        (load / "0.parquet").touch()
    targets: Sequence[Target] = (SqliteTarget(f"sqlite:///{database}"), FilesTarget(str(tmp_path / "archive")))
    for target in targets:
        with target.run(PLACE) as prefix:
            assert is_alive(prefix.removeprefix(PLACE.load_prefix))
        assert sorted(target.tables()) == sorted([names[0], names[2]])
