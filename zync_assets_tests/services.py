"""A broker and a registry of the test run's own, started by the code that is tested.

Each pytest process, also each worker of pytest-xdist, has its own pair. A killed run leaves processes and a folder behind.
The next run removes the processes and folders whose pytest process has ended.
"""

from __future__ import annotations

import getpass
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from zync_assets.local.services import Services, down, up

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ON_CONNECT = "ZYNC_TESTS_ON_CONNECT"
"""The environment variable with which the fixture ``spark``, and the pipelines of ``mini``, use the shared Spark server."""

SPARK = {"master": "local[2]", "spark.sql.shuffle.partitions": "2"} | (
    {"remote": "shared"} if ON_CONNECT in os.environ else {}
)
"""The ``spark:`` of small pipelines."""

START_SECONDS = 120.0

HOME = Path(tempfile.gettempdir()) / f"zync-tests-{getpass.getuser()}"

# The broker's housekeeping at once instead of after minutes, for tests of compaction and retention.
HASTY = {
    "log.initial.task.delay.ms": "500",
    "log.cleaner.backoff.ms": "500",
    "log.retention.check.interval.ms": "1000",
}


@pytest.fixture(scope="session")
def services() -> Iterator[Services]:
    """A running Kafka broker and schema registry for the whole run, removed at its end.

    With ``ZYNC_TEST_SERVICES=FOLDER`` they lie in that folder and go on running: the next run needs not start them.
    """
    if kept := os.environ.get("ZYNC_TEST_SERVICES"):
        yield up(Path(kept) / os.environ.get("PYTEST_XDIST_WORKER", "alone"), broker_properties=HASTY)
        return
    for folder in HOME.glob("*"):
        if folder.name == str(os.getpid()) or not psutil.pid_exists(int(folder.name)):
            down(folder, clean=True)
    home = HOME / str(os.getpid())
    try:
        yield up(home, broker_properties=HASTY)
    finally:
        down(home, clean=True)


@pytest.fixture(scope="session")
def spark() -> SparkSession:
    """The run's one Spark session, made by the code that is tested; pipelines in this process share it."""
    from zync_assets.local.java import find_java
    from zync_assets.spark.session import spark_session
    from zync_assets.spark.settings import archive_classes

    # Hundreds of commands of the run start quicker then.
    archive_classes(find_java())
    return spark_session(SPARK)


@pytest.fixture
def unique() -> str:
    """A prefix for the topics and subjects of one test, so that tests share a broker without meeting."""
    return "t" + secrets.token_hex(4)


@contextmanager
def server_process(
    command: Sequence[str | Path], cwd: Path, log: Path, user: Mapping[str, Any], stop: str = "TERM"
) -> Generator[Path]:
    """A process whose output goes to ``log``. The process ends with this one, even if a signal kills this one.
    ``stop``: the signal that ends the process."""
    script = 'log=$1; shift; "$@" >"$log" 2>&1 </dev/null & server=$!; read _; kill -$0 $server; wait $server'
    # A JVM that begins with an ignored SIGTERM goes on ignoring the signal, and this process may ignore it.
    disposition = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    process = subprocess.Popen(
        ["/bin/sh", "-c", script, stop, str(log), *command],
        cwd=cwd,
        stdin=subprocess.PIPE,
        start_new_session=True,
        **user,
    )
    if disposition is not None:
        signal.signal(signal.SIGTERM, disposition)
    try:
        yield log
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def await_server(ready: Callable[[], bool], refusal: type[Exception], log: Path) -> None:
    """Wait until a server is ready. ``refusal``: the error of ``ready`` before that; ``log``: for the error of a long wait."""
    give_up = time.monotonic() + START_SECONDS
    while True:
        try:
            if ready():
                return
        except refusal:
            pass
        assert time.monotonic() < give_up, log.read_text(errors="replace")[-3000:] if log.exists() else "no log"
        time.sleep(0.1)
