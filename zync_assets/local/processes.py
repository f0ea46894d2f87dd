"""Processes beside this one: services that outlive their starter, Python processes with this package, and Spark's JVM.

A token on a service's command line identifies it.

A pid alone proves nothing, because the system gives the pid to another process later. Every start makes a new token,
and only the started process has this token. The token also finds a process whose starter died before it could write the
pid.

The Python processes are Spark's workers, a shared Spark server and a rehearsal. None of them may import from the current
folder. A user's file ``re.py`` there would stand in for Python's own ``re``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path

import psutil

import zync_assets
from zync_assets.errors import SetupError

TOKEN_PROPERTY = "zync.service"

_JUNK = b"WARNING: Using incubator modules"
"""The beginning of a line that Java prints about a module that Spark needs. No option of Java turns the line off."""
_LAST = b"\0the end of the output of Spark's JVM\n"
"""Ends the copy of the JVM's output. Java prints no such line."""
_HEARD = 50
"""The number of first lines of the JVM's output that are kept for an error."""


def token_option(token: str) -> str:
    """The JVM option that carries a token."""
    return f"-D{TOKEN_PROPERTY}={token}"


def spawn(command: Sequence[str], *, cwd: Path, log: Path, env: Mapping[str, str] | None = None) -> int:
    """Start a process in a session of its own, its output in ``log``; its pid. ``env``: its whole environment.

    The previous log is kept as ``<log>.1``. A shell in between makes the process a child of init, so that
    whoever called this neither has to wait for it nor leaves a zombie.
    """
    if log.exists():
        log.replace(log.with_name(log.name + ".1"))
    script = 'log=$1; shift; "$@" >"$log" 2>&1 </dev/null & echo $!'
    answer = subprocess.run(
        ["/bin/sh", "-c", script, "sh", str(log), *command],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        check=True,
    )
    return int(answer.stdout)


def find(token: str, pid: int | None) -> psutil.Process | None:
    """The running process with that token; ``pid`` is where to look first."""
    if pid is not None and _carries(pid, token):
        return psutil.Process(pid)
    return next((psutil.Process(candidate) for candidate in psutil.pids() if _carries(candidate, token)), None)


def _carries(pid: int, token: str) -> bool:
    try:
        process = psutil.Process(pid)
        return token_option(token) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def stop(processes: Iterable[psutil.Process], *, gently: bool = True, seconds: float = 20.0) -> None:
    """End these processes: asked first where ``gently``, killed when they don't end in time."""
    survivors = list(processes)
    if gently:
        for process in survivors:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        survivors = wait(survivors, seconds)
    for process in survivors:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for process in wait(survivors, seconds):
        raise SetupError(f"Process {process.pid} does not end: it waits for the disk, or is another user's.")


def children() -> frozenset[psutil.Process]:
    """The processes that this process has started."""
    return frozenset(psutil.Process().children())


def kill_children(earlier: frozenset[psutil.Process]) -> None:
    """Kill the children of this process but ``earlier`` children: also a child that has not begun its own program yet, whose
    command and environment are still those of this process."""
    for child in children() - earlier:
        with contextlib.suppress(psutil.Error):
            child.kill()


def wait(processes: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those of the processes that still run when all have ended or the time is over.

    Unlike psutil's own function it takes a zombie for ended, since in a container nobody may ever collect it; but
    one whose threads are still ending holds its ports and files.
    """
    deadline = time.monotonic() + seconds
    survivors = [process for process in processes if not _has_ended(process)]
    while survivors and time.monotonic() < deadline:
        time.sleep(0.02)
        survivors = [process for process in survivors if not _has_ended(process)]
    return survivors


def _has_ended(process: psutil.Process) -> bool:
    try:
        if not process.is_running():
            return True
        return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
    except psutil.NoSuchProcess:
        return True


def port_is_free(port: int) -> bool:
    """Whether a server could listen on that port of 127.0.0.1 now."""
    with socket.socket() as probe:
        # As Java's server sockets do: connections that were closed a moment ago don't hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now; somebody may a moment later."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different ports, as ``free_port``: two calls may give the same port."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@contextlib.contextmanager
def interrupts_later() -> Generator[None]:
    """Keep Ctrl-C from the work within: this process's handler hears of it at the end. A second Ctrl-C is heard at once.

    The process has its own handler again at the end, whatever the work installed.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signals: list[int] = []
    pid = os.getpid()

    def deliver() -> None:
        signal.signal(signal.SIGINT, handler)
        while signals:
            signal.raise_signal(signals.pop())

    def hold(number: int, frame: object) -> None:
        # A child has this handler until it begins its own program.
        if os.getpid() == pid:
            signals.append(number)
            if len(signals) > 1:
                deliver()

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        deliver()


@contextlib.contextmanager
def children_outlive_sigterm() -> Generator[None]:
    """Programs that this thread starts within, with a ``preexec_fn``, ignore SIGTERM.

    ``timeout`` signals a process's group, and systemd all processes of a unit. A JVM would end at once and so fail the batch
    that its process lets end. A JVM that starts with an ignored signal goes on ignoring the signal.
    """
    _thread.outlives_sigterm = True
    try:
        yield
    finally:
        _thread.outlives_sigterm = False


def _ignore_sigterm() -> None:
    if _thread.outlives_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class _Thread(threading.local):
    outlives_sigterm: bool = False


_thread = _Thread()
# subprocess calls the hooks of a fork where there is a `preexec_fn`: pyspark gives one that ignores Ctrl-C.
os.register_at_fork(after_in_child=_ignore_sigterm)


_ORIGIN = "import importlib.util as u; found = u.find_spec('zync_assets'); print(found.origin if found else '')"


def python_environment() -> dict[str, str]:
    """The environment variables with which a Python process imports this package, and nothing from the current folder.

    A JVM that starts with them finds files by any name. In the locale C, Java takes no name for one that is not ASCII.
    """
    locale = next((text for name in ("LC_ALL", "LC_CTYPE", "LANG") if (text := os.environ.get(name))), "C")
    return {
        "PYTHONPATH": python_path(),
        "PYTHONSAFEPATH": "1",
        **({"LC_ALL": "C.UTF-8"} if locale in ("C", "POSIX") else {}),
    }


def python_path() -> str:
    """PYTHONPATH for a process in another folder: absolute, and with this package where it is not installed."""
    # Python takes an empty part for the current folder.
    paths = [str(Path(part).resolve()) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    root = Path(zync_assets.__file__).resolve().parents[1]
    package_paths = [] if _is_installed(root) else [str(root)]
    return os.pathsep.join(dict.fromkeys([*package_paths, *paths]))


@functools.cache
def _is_installed(root: Path) -> bool:
    """Whether Python finds this package in ``root`` by itself. Of an editable install only Python knows."""
    if root.name in ("site-packages", "dist-packages"):
        return True
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    answer = subprocess.run(
        [sys.executable, "-P", "-c", _ORIGIN], env=environment, capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() == str(root / "zync_assets" / "__init__.py")


@contextlib.contextmanager
def jvm_output() -> Generator[tuple[int, Callable[[], str]]]:
    """A file descriptor for the output of a JVM that starts within. And a function: the line with the reason, once the JVM has
    ended.

    A thread copies the process's lines to this process's stderr, but for _JUNK. This process ends after the copy of all
    lines that were written before: Java's last words may be the cause of the end.
    """
    source, sink = os.pipe()
    heard: list[str] = []
    copier = threading.Thread(target=_copy, args=(source, heard), name="output of Spark's JVM", daemon=True)
    copier.start()
    atexit.register(_end_copy, sink, copier)

    def first_words() -> str:
        _end_copy(sink, copier)
        line = next((line for line in heard if re.search("Exception|Error|Invalid", line)), "".join(heard[:1]))
        return line.rpartition("Exception: ")[2].strip()

    yield sink, first_words


def _copy(source: int, heard: list[str]) -> None:
    with open(source, "rb", buffering=0) as lines, contextlib.suppress(OSError):
        for line in lines:
            words, end, _ = line.partition(_LAST)
            if not words.startswith(_JUNK):
                os.write(2, words)
                if len(heard) < _HEARD:
                    heard.append(words.decode(errors="replace"))
            if end:
                return


def _end_copy(sink: int, copier: threading.Thread) -> None:
    with contextlib.suppress(OSError):
        os.write(sink, _LAST)
    copier.join()
