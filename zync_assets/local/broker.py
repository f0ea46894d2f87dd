"""A single-node Kafka broker (KRaft: broker and controller in one process) in a folder."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from zync_assets.errors import SetupError
from zync_assets.local.processes import token_option

LOG = "broker.log"

# A development broker for one machine. Internal topics have one replica and few partitions: fifty partitions would take most
# of the start's time. An unknown topic is an error, so that a typing error creates no topic. No record expires by age,
# because the user removes a local broker as a whole, together with its lake. The cleaner's buffer fits a small heap.
SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "log.dirs": "data",
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    "log.retention.ms": "-1",
    "log.cleaner.dedupe.buffer.size": "16777216",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
}


def prepare(folder: Path, *, java: Path, jars: Path, port: int, controller_port: int, extra: Mapping[str, str]) -> None:
    """Write the broker's settings for these ports and format its storage where that was not done.

    Listeners in ``extra`` are added to the broker's own plain one.
    """
    addresses = {
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    }
    more = {name: f"{own},{extra[name]}" for name, own in addresses.items() if name in extra}
    settings = {**SETTINGS, **extra, **addresses, **more}
    (folder / "server.properties").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    done = folder / "formatted"
    if done.exists():
        return
    # Without that file no broker ever ran here: what is there is half of an interrupted format.
    shutil.rmtree(folder / "data", ignore_errors=True)
    cluster = "z" + base64.urlsafe_b64encode(os.urandom(16)).decode()[1:22]
    tool = [str(java), "-XX:TieredStopAtLevel=1", *_class_path(jars, level="warn"), "kafka.tools.StorageTool"]
    answer = subprocess.run(
        [*tool, "format", "-t", cluster, "-c", "server.properties"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if answer.returncode != 0:
        raise SetupError(f"Kafka could not format its storage in {folder}: {answer.stdout.strip().splitlines()[-1:]}")
    done.write_text(cluster)


def command(java: Path, jars: Path, token: str) -> list[str]:
    """The command line of the broker, to be run in its folder."""
    # The quick compiler alone: the other one costs a start half of its CPU time, and gains nothing on a million records.
    heap = ["-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.awt.headless=true"]
    return [
        str(java),
        *heap,
        token_option(token),
        *_class_path(jars, level="info"),
        "kafka.Kafka",
        "server.properties",
    ]


def _class_path(jars: Path, *, level: str) -> list[str]:
    simple = {"defaultLogLevel": level, "showDateTime": "true", "dateTimeFormat": "yyyy-MM-dd HH:mm:ss.SSS"}
    logging = [f"-Dorg.slf4j.simpleLogger.{name}={value}" for name, value in simple.items()]
    return [*logging, "-cp", f"{jars}/*"]


def ready(folder: Path, port: int) -> bool:
    """Whether the broker's log reports the start (the broker is then registered and unfenced), and its port answers."""
    try:
        started = "Kafka Server started" in (folder / LOG).read_text(errors="replace")
    except FileNotFoundError:
        return False
    if not started:
        return False
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
