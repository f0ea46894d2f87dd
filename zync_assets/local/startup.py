"""The broker and the registry on this machine: their commands, their start, and the state of their folder.

The broker is a single-node Kafka (KRaft: broker and controller in one process). The registry has Confluent's API (Apicurio
Registry 2.6). Each keeps its data in the folder. ``launch`` starts a service, and ``await_ready`` waits until it answers.

``services.json`` in the folder holds the state of the services between two commands. ``up`` writes the file before any other
file, and ``down --clean`` removes it last. The other files in a folder with this file therefore belong to the services.
"""

from __future__ import annotations

import base64
import dataclasses
import http.client
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from zync_assets.errors import SetupError
from zync_assets.local import processes
from zync_assets.local.java import Jars
from zync_assets.local.processes import token_option

BROKER_LOG = "broker.log"

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


def prepare_broker(
    folder: Path, *, java: Path, jars: Path, port: int, controller_port: int, extra: Mapping[str, str]
) -> None:
    """Write the broker's settings for these ports, and format the broker's storage once.

    Listeners in ``extra`` are added to the broker's own plain one.
    """
    addresses = {
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    }
    combined_addresses = {name: f"{address},{extra[name]}" for name, address in addresses.items() if name in extra}
    settings = {**SETTINGS, **extra, **addresses, **combined_addresses}
    (folder / "server.properties").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    marker = folder / "formatted"
    if marker.exists():
        return
    # Without the marker no broker ever ran here: the folder may hold half of an interrupted format.
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
    marker.write_text(cluster)


def broker_command(java: Path, jars: Path, token: str) -> list[str]:
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


def broker_ready(folder: Path, port: int) -> bool:
    """Whether the broker's log reports the start (the broker is then registered and unfenced), and its port answers."""
    try:
        log_has_start = "Kafka Server started" in (folder / BROKER_LOG).read_text(errors="replace")
    except FileNotFoundError:
        return False
    if not log_has_start:
        return False
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


REGISTRY_LOG = "registry.log"

# In memory, Apicurio's default, schema ids end with the process while the records that carry them don't. And an id
# that was given out must not be lost by a kill: by default H2 writes up to half a second later.
DATABASE = "jdbc:h2:file:./registry;WRITE_DELAY=0"


def registry_url(port: int) -> str:
    """The address for clients of Confluent's API."""
    return f"http://127.0.0.1:{port}/apis/ccompat/v7"


def registry_command(java: Path, jar: Path, token: str, port: int) -> list[str]:
    """The command line of the registry, to be run in its folder."""
    heap = ["-Xms64m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    settings = [
        "-Dquarkus.http.host=127.0.0.1",
        f"-Dquarkus.http.port={port}",
        f"-Dquarkus.datasource.jdbc.url={DATABASE}",
    ]
    return [str(java), *heap, token_option(token), *settings, "-jar", str(jar)]


def registry_ready(folder: Path, port: int) -> bool:
    """Whether the registry's log reports the port, and the port answers. The log rules out another server on the port."""
    try:
        if f"Listening on: http://127.0.0.1:{port}" not in (folder / REGISTRY_LOG).read_text(errors="replace"):
            return False
    except FileNotFoundError:
        return False
    # The environment's proxies are not for addresses of this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{registry_url(port)}/subjects", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


FILE = "services.json"
KIND = "zync local services"

Name: TypeAlias = Literal["kafka", "registry"]
NAMES: tuple[Name, ...] = ("registry", "kafka")


@dataclass(frozen=True)
class ServiceEntry:
    """One service: its port, which is kept for the next start; the token and the pid of the last start."""

    port: int
    token: str = ""
    pid: int | None = None


@dataclass(frozen=True)
class State:
    """``lake``: the folder that belongs to these services and is removed with them."""

    lake: str
    kafka: ServiceEntry | None = None
    registry: ServiceEntry | None = None
    controller_port: int | None = None

    def entry(self, name: Name) -> ServiceEntry | None:
        return self.kafka if name == "kafka" else self.registry

    def with_entry(self, name: Name, entry: ServiceEntry) -> State:
        if name == "kafka":
            return dataclasses.replace(self, kafka=entry)
        return dataclasses.replace(self, registry=entry)


def load(home: Path) -> State | None:
    """The state of that folder; None where there never were services. SetupError when the file is damaged."""
    path = home / FILE
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        document = json.loads(text)
        if document["kind"] != KIND:
            raise ValueError(f"kind is not {KIND!r}")
        entries = {name: ServiceEntry(**document[name]) if document[name] else None for name in NAMES}
        return State(lake=document["lake"], controller_port=document["controller_port"], **entries)
    except (ValueError, KeyError, TypeError) as error:
        raise SetupError(f"{path} can't be read ({error}): remove {home} or choose another folder.") from error


def save(home: Path, state: State) -> None:
    """Write the state whole or not at all."""
    new_path = home / (FILE + ".new")
    new_path.write_text(json.dumps({"kind": KIND, **dataclasses.asdict(state)}, indent=2) + "\n")
    new_path.replace(home / FILE)


START_SECONDS = 120.0
KEPT_SECONDS = 1.0
TAIL_LINES = 10
ERROR = re.compile(r"\b(ERROR|FATAL)\b|Exception\b|^Caused by")
LABELS: Mapping[Name, str] = {"kafka": "Kafka", "registry": "the schema registry"}
LOGS: Mapping[Name, str] = {"kafka": BROKER_LOG, "registry": REGISTRY_LOG}


@dataclass(frozen=True)
class Setup:
    """The settings of a start. ``ports``: the ports that the user asked for; None: any free port."""

    home: Path
    java: Path
    jars: Jars
    ports: Mapping[Name, int | None]
    broker_properties: Mapping[str, str]


class EarlyExit(SetupError):
    """A service ended before it answered. ``port_conflict``: another process listens on the service's port."""

    def __init__(self, message: str, *, port_conflict: bool) -> None:
        super().__init__(message)
        self.port_conflict = port_conflict


def running(state: State, name: Name) -> int | None:
    """The pid of the service, None when it does not run."""
    entry = state.entry(name)
    process = processes.find(entry.token, entry.pid) if entry and entry.token else None
    return process.pid if process else None


def check_free(name: Name, port: int | None) -> None:
    """SetupError when a port that was asked for is occupied."""
    if port is not None and not processes.port_is_free(port):
        raise SetupError(
            f"Port {port} of 127.0.0.1, chosen for {LABELS[name]}, is occupied: stop what listens there, "
            f"or choose another --{name}-port, or none to have a free one."
        )


def launch(setup: Setup, state: State, name: Name) -> State:
    """Start a service without waiting for it; the state with its port, token and pid, as it is on disk."""
    folder = setup.home / name
    folder.mkdir(exist_ok=True)
    last_entry = state.entry(name)
    port = setup.ports[name] or _kept_or_free(last_entry.port if last_entry else None)
    if name == "kafka":
        controller_port = _kept_or_free(state.controller_port)
        while controller_port == port:
            controller_port = processes.free_port()
        state = dataclasses.replace(state, controller_port=controller_port)
    entry = ServiceEntry(port, token=secrets.token_hex(8))
    # The token is on disk before the process starts: after a kill in between, the token still finds the process.
    save(setup.home, state.with_entry(name, entry))
    command = _prepare(setup, state, name, entry)
    pid = processes.spawn(command, cwd=folder, log=folder / LOGS[name])
    state = state.with_entry(name, dataclasses.replace(entry, pid=pid))
    save(setup.home, state)
    return state


def settle(setup: Setup, state: State, name: Name) -> State:
    """Wait for a launched service. Launch it again on another port if another process has taken its free port."""
    for _ in range(3):
        try:
            await_ready(setup.home, state, name)
        except EarlyExit as error:
            if not error.port_conflict:
                raise
            check_free(name, setup.ports[name])
            state = launch(setup, state, name)
        else:
            return state
    await_ready(setup.home, state, name)
    return state


def await_ready(home: Path, state: State, name: Name) -> None:
    """Return when the service answers. EarlyExit if the service ends first, SetupError if it takes too long."""
    entry = state.entry(name)
    assert entry is not None
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        # This check precedes the request: another server on the port may answer for a service that ended.
        alive = running(state, name) is not None
        if not alive:
            log = _read_log(home, name).lower()
            port_conflict = any(
                sign in log for sign in ("address already in use", "already bound", "in use by another")
            )
            raise EarlyExit(f"{LABELS[name]} ended while starting.{_tail(home, name)}", port_conflict=port_conflict)
        ready = broker_ready if name == "kafka" else registry_ready
        if ready(home / name, entry.port):
            return
        time.sleep(0.1)
    raise SetupError(f"{LABELS[name]} did not answer within {START_SECONDS:.0f} s.{_tail(home, name)}")


def _prepare(setup: Setup, state: State, name: Name, entry: ServiceEntry) -> list[str]:
    if name == "registry":
        return registry_command(setup.java, setup.jars.registry, entry.token, entry.port)
    assert state.controller_port is not None
    prepare_broker(
        setup.home / name,
        java=setup.java,
        jars=setup.jars.kafka,
        port=entry.port,
        controller_port=state.controller_port,
        extra=setup.broker_properties,
    )
    return broker_command(setup.java, setup.jars.kafka, entry.token)


def _kept_or_free(last_port: int | None) -> int:
    if last_port is None:
        return processes.free_port()
    # A server that was killed a moment ago may hold its port a moment longer.
    deadline = time.monotonic() + KEPT_SECONDS
    while not processes.port_is_free(last_port):
        if time.monotonic() > deadline:
            return processes.free_port()
        time.sleep(0.05)
    return last_port


def _read_log(home: Path, name: Name) -> str:
    try:
        return (home / name / LOGS[name]).read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _tail(home: Path, name: Name) -> str:
    """The first errors of the log, or the log's last lines, as the end of a message. Omits stack frames."""
    log = [line for line in _read_log(home, name).splitlines() if line.strip() and not line.startswith("\t")]
    # The first errors are the cause. Later errors come from the shutdown.
    errors = [line for line in log if ERROR.search(line)]
    lines = errors[:TAIL_LINES] or log[-TAIL_LINES:]
    return f" From {home / name / LOGS[name]}:\n" + "\n".join(f"  {line}" for line in lines)
