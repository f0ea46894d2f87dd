"""A Spark standalone cluster on loopback: a master and workers as processes, from PySpark's own jars, with a secret."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyspark

from zync_assets.local import processes
from zync_assets.local.java import find_java
from zync_assets_tests.network.processes import family

HOME = Path(pyspark.__file__).parent
_SERVER = "org.apache.spark.deploy"


@dataclass(frozen=True)
class Standalone:
    """``secret``: what applications need to speak to master and executors (``spark.authenticate.secret``)."""

    master: str
    secret: str
    servers: tuple[psutil.Process, ...]


@contextmanager
def standalone(folder: Path, workers: int, cores: int, memory: str) -> Generator[Standalone]:
    """A master and so many workers, each with ``cores`` and ``memory`` for its executors; stopped with them at the end."""
    folder.mkdir(parents=True)
    secret, port = secrets.token_hex(16), processes.free_port()
    settings = folder / "secret.conf"
    settings.touch(0o600)
    settings.write_text(f"spark.authenticate true\nspark.authenticate.secret {secret}\n")
    master = f"spark://127.0.0.1:{port}"
    common = ["--host", "127.0.0.1", "--webui-port", "0", "--properties-file", str(settings)]
    started = [_start(folder, "master", ["--port", str(port), *common])]
    try:
        _await_port(port, started[0], folder / "master.log")
        for number in range(workers):
            work = folder / f"worker-{number}"
            work.mkdir()
            size = ["--cores", str(cores), "--memory", memory, "--work-dir", str(work)]
            started.append(_start(folder, f"worker-{number}", [*size, *common, master], "worker.Worker"))
        yield Standalone(master, secret, tuple(started))
    finally:
        processes.stop([each for server in started for each in family(server)])


def _start(folder: Path, name: str, arguments: list[str], server: str = "master.Master") -> psutil.Process:
    # SPARK_LOCAL_IP is where their web pages listen; executors get the workers' environment.
    environment = {
        "SPARK_HOME": str(HOME),
        "JAVA_HOME": str(find_java().parent.parent),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    command = ["env", *(f"{key}={value}" for key, value in environment.items())]
    command += [str(HOME / "bin" / "spark-class"), f"{_SERVER}.{server}", *arguments]
    return psutil.Process(processes.spawn(command, cwd=folder, log=folder / f"{name}.log"))


def _await_port(port: int, server: psutil.Process, log: Path) -> None:
    give_up = time.monotonic() + 120
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert server.is_running() and time.monotonic() < give_up, log.read_text()
        time.sleep(0.1)
