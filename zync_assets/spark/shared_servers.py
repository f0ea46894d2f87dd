"""Finds, starts and stops this user's Spark Connect servers on this machine. A set of settings has a server of its own.

The name of a server's folder is a hash of everything that changes results: Spark's properties, the interpreter, the
versions, this package's code, and the environment of Spark's tasks. A client therefore never finds a server with other code.
Only the user may read the folder. It holds ``server.json`` (the arguments of the start, secrets too), ``ready.json`` (the
server's port), a lock for the start, and the log.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import zync_assets
from zync_assets.errors import SetupError
from zync_assets.local import processes
from zync_assets.local.processes import python_environment, python_path

START_SECONDS = 240.0
"""How long a start may take; the first one on a machine writes the archive of Spark's classes."""
IDLE_SECONDS = 1800.0
"""A server ends by itself when it had no session for so long."""
LOG = "server.log"
MODULE = "zync_assets.spark.server"
"""The module that a server's process runs."""
TAIL_LINES = 10

_START, _READY, _LOCK = "server.json", "ready.json", "server.lock"
_Kinds = Mapping[str, type | tuple[type, ...]]
_START_KINDS: _Kinds = {"token": str, "secret": str, "settings": dict, "idle_seconds": (int, float)}
_READY_KINDS: _Kinds = {"token": str, "port": int, "pid": int, "started": (int, float)}
_SEEN_BY_TASKS = re.compile(
    r"(?i)(AWS|AZURE|GOOGLE)_|.*_PROXY$|(SPARK_HOME|SPARK_CONF_DIR|HADOOP_CONF_DIR|ZYNC_NATIVE)$"
)
"""The environment variables that Spark or its tasks read. A server keeps their values from its start."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartArguments:
    """The arguments of a server's start.

    ``token``: identifies the process, on its command line, and is no secret; ``secret``: the clients' password.
    """

    token: str
    secret: str = field(repr=False)
    settings: Mapping[str, str] = field(repr=False)
    idle_seconds: float = IDLE_SECONDS


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    folder: Path
    port: int
    pid: int
    start_time: float
    """Seconds since the epoch."""
    master: str
    secret: str = field(repr=False)


def home() -> Path:
    """The folder of all servers: ``$ZYNC_SPARK_DIR``, else ``~/.zync/spark``."""
    return Path(os.environ.get("ZYNC_SPARK_DIR") or "~/.zync/spark").expanduser().resolve()


def folder_of(settings: Mapping[str, str]) -> Path:
    """The folder of the server with these Spark properties, for this process's code and environment."""
    parts = {
        "settings": dict(settings),
        "python": [sys.executable, os.environ.get("PYSPARK_PYTHON", sys.executable), python_path()],
        "versions": [importlib.metadata.version("pyspark"), sys.version],
        "code": _code(),
        "environment": {name: value for name, value in os.environ.items() if _SEEN_BY_TASKS.match(name)},
    }
    return home() / hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


@functools.cache
def _code() -> tuple[str, int, int]:
    """This package's folder, its number of modules and their latest change. Cached, because this process runs that code."""
    root = Path(zync_assets.__file__).resolve().parent
    times = [path.stat().st_mtime_ns for path in root.rglob("*.py")]
    return str(root), len(times), max(times)


def find(folder: Path) -> Server | None:
    """The server of a folder; None unless the server runs and listens."""
    arguments, ready = load(folder), _read(folder / _READY, _READY_KINDS)
    if arguments is None or ready is None or ready["token"] != arguments.token:
        return None
    if processes.find(arguments.token, ready["pid"]) is None:
        return None
    master = arguments.settings.get("spark.master", "")
    return Server(folder, ready["port"], ready["pid"], ready["started"], master, arguments.secret)


def find_all() -> list[Server]:
    """This user's running servers, the oldest first. Logs a warning for an unreadable folder, and omits the folder."""
    servers: list[Server] = []
    for path in home().glob(f"*/{_START}"):
        try:
            server = find(path.parent)
        except SetupError as error:
            _log.warning("%s", error)
        else:
            servers += [] if server is None else [server]
    return sorted(servers, key=lambda server: server.start_time)


def find_silent() -> list[Path]:
    """The folders of this user's servers whose process is there and does not listen: it is starting, or ending."""
    folders: list[Path] = []
    for path in home().glob(f"*/{_START}"):
        # ``find_all`` warns of unreadable folders.
        with contextlib.suppress(SetupError):
            arguments = load(path.parent)
            if (
                arguments is not None
                and find(path.parent) is None
                and processes.find(arguments.token, None) is not None
            ):
                folders.append(path.parent)
    return folders


def start(folder: Path, settings: Mapping[str, str], *, idle_seconds: float = IDLE_SECONDS) -> Server:
    """The server of a folder, started if necessary. A lock lets only one of several processes start the server.

    Raises SetupError with the end of the log if the server does not start.
    """
    with _folder_lock(folder):
        server = find(folder)
        if server is not None:
            return server
        arguments = load(folder)
        if arguments is None or processes.find(arguments.token, None) is None:
            arguments = StartArguments(secrets.token_hex(8), secrets.token_urlsafe(32), settings, idle_seconds)
            (folder / _READY).unlink(missing_ok=True)
            # On disk before the process is there: who is killed in between leaves one that can be found.
            _write(folder / _START, {**vars(arguments), "settings": dict(settings)})
            command = [sys.executable, "-m", MODULE, processes.token_option(arguments.token), str(folder)]
            processes.spawn(command, cwd=folder, log=folder / LOG, env=_environment())
        return _await_server(folder, arguments.token)


def stop(folder: Path) -> None:
    """Stop the server of a folder. Waits until a present start is complete. The running steps of clients fail."""
    with _folder_lock(folder):
        arguments = load(folder)
        process = None if arguments is None else processes.find(arguments.token, None)
        if process is not None:
            # The server's JVM ends after the server. Waits for both.
            family = [process, *process.children(recursive=True)]
            processes.stop([process])
            processes.stop(processes.wait(family, 20.0), gently=False)
        for name in (_READY, _START):
            (folder / name).unlink(missing_ok=True)


def load(folder: Path) -> StartArguments | None:
    """The arguments of the folder's last start; None before the first start."""
    values = _read(folder / _START, _START_KINDS)
    return None if values is None else StartArguments(**values)


def announce(folder: Path, token: str, port: int) -> None:
    """Write the server's port to ``ready.json``. Called by the server with the token ``token``; clients wait for the file."""
    _write(folder / _READY, {"token": token, "port": port, "pid": os.getpid(), "started": time.time()})


def withdraw(folder: Path, token: str) -> None:
    """Remove the ``ready.json`` that ``announce`` wrote, unless another server has replaced the file."""
    ready = _read(folder / _READY, _READY_KINDS)
    if ready is not None and ready["token"] == token:
        (folder / _READY).unlink(missing_ok=True)


def _await_server(folder: Path, token: str) -> Server:
    deadline = time.monotonic() + START_SECONDS
    pid: int | None = None
    while time.monotonic() < deadline:
        # Checks the process before ``ready.json``: a server may write the file and then end.
        process = processes.find(token, pid)
        if process is None:
            raise SetupError(f"The Spark server ended while it started.{_tail(folder)}")
        pid = process.pid
        server = find(folder)
        if server is not None:
            return server
        time.sleep(0.05)
    raise SetupError(f"The Spark server did not answer within {START_SECONDS:.0f} s.{_tail(folder)}")


def _environment() -> dict[str, str]:
    # The switches of PySpark's client are not for a server, nor are the points at which a client is to die.
    names = ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "SPARK_LOCAL_REMOTE", "ZYNC_CRASH", "ZYNC_CRASH_ROOT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    return environment | python_environment()


@contextlib.contextmanager
def _folder_lock(folder: Path) -> Generator[None]:
    try:
        for path in (folder.parent, folder):
            path.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        with FileLock(folder / _LOCK, timeout=START_SECONDS):
            yield
    except Timeout as error:
        raise SetupError(f"Another process starts or stops the Spark server of {folder} and does not end.") from error
    except OSError as error:
        raise SetupError(f"The folder {folder} can't be used for a Spark server: {error}.") from error


def _read(path: Path, kinds: _Kinds) -> dict[str, Any] | None:
    """The values of a JSON file under the names in ``kinds``; None for a missing file.

    Ignores other names, which another version may have written.
    """
    try:
        document: Any = json.loads(path.read_text())
        if not isinstance(document, dict):
            raise ValueError("it is no JSON object")
        for name, kind in kinds.items():
            if not isinstance(document.get(name), kind):
                raise ValueError(f"{name} is missing or of another kind")
        return {name: document[name] for name in kinds}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} can't be read ({error}): remove it.") from error


def _write(path: Path, content: Mapping[str, object]) -> None:
    """Whole or not at all, for this user alone."""
    new_path = path.with_name(path.name + ".new")
    new_path.touch(mode=0o600)
    new_path.write_text(json.dumps(content))
    new_path.replace(path)


def _tail(folder: Path) -> str:
    """The last lines of the log, as the end of a message; no stack frames."""
    try:
        lines = (folder / LOG).read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    messages = [
        f"  {line}" for line in lines if line.strip() and not line.startswith((" ", "\t", "Traceback", "WARNING"))
    ]
    return f" From {folder / LOG}:\n" + "\n".join(messages[-TAIL_LINES:])
