"""Crash points: places where tests can kill a run, to examine the state after a crash.

``crash_point(name)`` stands after an effect that other processes can see. It does nothing unless the environment variable
ZYNC_CRASH names the point: ``ingest:files-written``, or ``publish:produced@2`` for a process's second pass. SIGKILL then ends
the whole run: the first process that was started with the variable and its descendants, the JVM and its Python workers too.
"""

from __future__ import annotations

import os
import signal

_VARIABLE, _ROOT = "ZYNC_CRASH", "ZYNC_CRASH_ROOT"


class _Countdown:
    """The point that was asked for, and how often this process has yet to pass it."""

    def __init__(self, text: str) -> None:
        self.name, _, count = text.partition("@")
        self.passes = int(count or 1)
        # Inherited by the JVM and its workers: whichever of them gets to the point knows where the run began.
        os.environ.setdefault(_ROOT, str(os.getpid()))


_countdown = _Countdown(os.environ[_VARIABLE]) if os.environ.get(_VARIABLE) else None


def crash_point(name: str) -> None:
    """Die here, if this is the place."""
    if _countdown is None or _countdown.name != name:
        return
    _countdown.passes -= 1
    if _countdown.passes == 0:
        _kill_the_run(name)


def _kill_the_run(name: str) -> None:
    import psutil

    root = psutil.Process(int(os.environ[_ROOT]))
    log = _standard_error(root.pid)
    # Spark's Python workers are in a process group of their own: only descent finds them.
    for process in [root, *root.children(recursive=True)]:
        if process.pid != os.getpid():
            os.kill(process.pid, signal.SIGKILL)
    os.write(log, f"killed at {name}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def _standard_error(pid: int) -> int:
    """A descriptor of the process's standard error.

    A worker's own standard error is a pipe to the JVM. The JVM dies before it copies the pipe's last line.
    """
    try:
        return os.open(f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_APPEND)
    except OSError:
        # No /proc, or a socket, which can't be opened by a path.
        return 2
