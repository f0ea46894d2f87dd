"""Starting one service of a state folder and waiting until it answers."""

from __future__ import annotations

import dataclasses
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zync_assets.errors import SetupError
from zync_assets.local import broker, processes, registry
from zync_assets.local.jars import Jars
from zync_assets.local.state import Entry, Name, State, save

START_SECONDS = 120.0
KEPT_SECONDS = 1.0
TAIL_LINES = 10
ERROR = re.compile(r"\b(ERROR|FATAL)\b|Exception\b|^Caused by")
LABELS: Mapping[Name, str] = {"kafka": "Kafka", "registry": "the schema registry"}
LOGS: Mapping[Name, str] = {"kafka": broker.LOG, "registry": registry.LOG}


@dataclass(frozen=True)
class Setup:
    """What a start takes. ``chosen``: ports that the user asked for; None: any."""

    home: Path
    java: Path
    jars: Jars
    chosen: Mapping[Name, int | None]
    broker_properties: Mapping[str, str]


class Died(SetupError):
    """A service ended before it answered. ``port_taken``: another process listens on the service's port."""

    def __init__(self, message: str, *, port_taken: bool) -> None:
        super().__init__(message)
        self.port_taken = port_taken


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
    last = state.entry(name)
    port = setup.chosen[name] or _kept_or_free(last.port if last else None)
    if name == "kafka":
        state = dataclasses.replace(state, controller_port=_kept_or_free(state.controller_port))
    entry = Entry(port, token=secrets.token_hex(8))
    # The token is on disk before the process is there: who is killed in between leaves one that can be found.
    save(setup.home, state.with_entry(name, entry))
    command = _prepare(setup, state, name, entry)
    pid = processes.spawn(command, cwd=folder, log=folder / LOGS[name])
    state = state.with_entry(name, dataclasses.replace(entry, pid=pid))
    save(setup.home, state)
    return state


def settle(setup: Setup, state: State, name: Name) -> State:
    """Wait for a service that was launched; on another port, should somebody have taken its free one meanwhile."""
    for _ in range(3):
        try:
            await_ready(setup.home, state, name)
        except Died as error:
            if not error.port_taken:
                raise
            check_free(name, setup.chosen[name])
            state = launch(setup, state, name)
        else:
            return state
    await_ready(setup.home, state, name)
    return state


def await_ready(home: Path, state: State, name: Name) -> None:
    """Return when the service answers; Died when it ended, SetupError when it takes too long."""
    entry = state.entry(name)
    assert entry is not None
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        # Looked at before the answer is: another server on that port may answer for one that died.
        alive = running(state, name) is not None
        if not alive:
            log = _read_log(home, name).lower()
            taken = any(sign in log for sign in ("address already in use", "already bound", "in use by another"))
            raise Died(f"{LABELS[name]} ended while starting.{_tail(home, name)}", port_taken=taken)
        ready = broker.ready if name == "kafka" else registry.ready
        if ready(home / name, entry.port):
            return
        time.sleep(0.1)
    raise SetupError(f"{LABELS[name]} did not answer within {START_SECONDS:.0f} s.{_tail(home, name)}")


def _prepare(setup: Setup, state: State, name: Name, entry: Entry) -> list[str]:
    if name == "registry":
        return registry.command(setup.java, setup.jars.registry, entry.token, entry.port)
    assert state.controller_port is not None
    broker.prepare(
        setup.home / name,
        java=setup.java,
        jars=setup.jars.kafka,
        port=entry.port,
        controller_port=state.controller_port,
        extra=setup.broker_properties,
    )
    return broker.command(setup.java, setup.jars.kafka, entry.token)


def _kept_or_free(last: int | None) -> int:
    if last is None:
        return processes.free_port()
    # A server that was killed a moment ago may hold its port a moment longer.
    deadline = time.monotonic() + KEPT_SECONDS
    while not processes.port_is_free(last):
        if time.monotonic() > deadline:
            return processes.free_port()
        time.sleep(0.05)
    return last


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
