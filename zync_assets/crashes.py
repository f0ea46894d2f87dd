"""Places where a run can be made to die, so that tests see what a crash leaves behind just there.

``crash_point(name)`` stands after an effect that others can see. It does nothing unless the environment variable ZYNC_CRASH
names it: ``ingest:files-written``, or ``publish:produced@2`` for the second time that one process gets there. Then the whole
run ends by SIGKILL: the process that was started first with the variable, and all that it started, the JVM and its Python
workers too.
"""

from __future__ import annotations

import os
import signal

_VARIABLE, _ROOT = "ZYNC_CRASH", "ZYNC_CRASH_ROOT"


class _Armed:
    """The point that was asked for, and how often this process has yet to pass it."""

    def __init__(self, asked: str) -> None:
        self.name, _, count = asked.partition("@")
        self.left = int(count or 1)
        # Inherited by the JVM and its workers: whichever of them gets to the point knows where the run began.
        os.environ.setdefault(_ROOT, str(os.getpid()))


_armed = _Armed(os.environ[_VARIABLE]) if os.environ.get(_VARIABLE) else None


def crash_point(name: str) -> None:
    """Die here, if this is the place."""
    if _armed is None or _armed.name != name:
        return
    _armed.left -= 1
    if _armed.left == 0:
        _kill_the_run(name)


def _kill_the_run(name: str) -> None:
    import psutil

    os.write(2, f"killed at {name}\n".encode())
    root = psutil.Process(int(os.environ[_ROOT]))
    # Spark's Python workers are in a process group of their own: only descent finds them.
    for process in [root, *root.children(recursive=True)]:
        if process.pid != os.getpid():
            os.kill(process.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
