"""The watch over a target's server: statements end when the server's host disappears, and when the server is frozen.

No statement has a time limit, because a merge may take long. TCP_OPTIONS let the kernel end the connections to a lost host.
The kernel of a live host goes on answering for a frozen server, such as a paused container. A thread therefore logs in again
and again while connections are open. A refused login is an answer too. After SILENCE_SECONDS without an answer, the thread
ends the connections, and their statements fail as in any other outage.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Protocol
from weakref import WeakKeyDictionary, finalize

from sqlalchemy import event
from sqlalchemy.engine import Engine

from zync_assets.errors import TargetUnavailable

TCP_OPTIONS: Mapping[str, int] = {
    "TCP_KEEPIDLE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 60_000,
}
"""Options of a connection's socket: seconds, seconds, a number of probes, milliseconds. A system may lack some of them."""

LOOK_SECONDS, SILENCE_SECONDS = 10.0, 60.0
"""How often an open connection's server is asked for a login, and how long the server may answer none."""

_TIMEOUT = re.compile("time(d )?out", re.IGNORECASE)
"""In the messages of psycopg (``connection timeout expired``) and PyMySQL (``timed out``)."""

_watches: WeakKeyDictionary[Engine, _Watch] = WeakKeyDictionary()


class HasDescriptor(Protocol):
    """A socket, or a connection with the descriptor of its socket."""

    def fileno(self) -> int: ...


def watch_server(
    engine: Engine,
    socket_of: Callable[[Any], HasDescriptor],
    tcp_options: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Watch the connections of an engine, whose logins have a time limit. Call it after the engine's other listeners.

    ``socket_of``: a driver's connection → its socket. ``tcp_options``: TCP_OPTIONS, unless the driver sets them itself.
    """
    watch = _watches[engine] = _Watch(engine.dialect.loaded_dbapi, socket_of, tcp_options)
    event.listen(engine, "do_connect", watch.keep_parameters)
    # Before SQLAlchemy's own first statements.
    event.listen(engine, "connect", watch.add, insert=True)
    event.listen(engine, "close", watch.remove)


def silence_error(engine: Engine) -> TargetUnavailable | None:
    """The error of a statement whose connection the watch has ended; None if the watch has ended no connection."""
    watch = _watches.get(engine)
    if watch is None or not watch.is_silent:
        return None
    return TargetUnavailable(
        f"the server has answered no login for {SILENCE_SECONDS:.0f} s: the server, or the way to it, is frozen"
    )


class _Watch:
    """The open connections of one engine, and the thread that asks for logins."""

    def __init__(self, driver: Any, socket_of: Callable[[Any], HasDescriptor], tcp_options: Mapping[str, int]) -> None:
        self.driver, self.socket_of, self.tcp_options = driver, socket_of, tcp_options
        self._parameters: tuple[tuple[Any, ...], Mapping[str, Any]] = (), {}
        """The arguments of the engine's last login."""
        self.is_silent = False
        """Whether the thread has ended connections, and no later login had an answer."""
        self._sockets: dict[int, socket.socket] = {}
        """id of a driver's connection → its socket, with a descriptor that no other file gets while the socket is here."""
        # A garbage collection calls _forget, also in a thread that holds the lock.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None

    def keep_parameters(
        self, dialect: object, record: object, arguments: Sequence[Any], parameters: Mapping[str, Any]
    ) -> None:
        self._parameters = tuple(arguments), dict(parameters)

    def login(self) -> Any:
        """A connection as the engine's last one."""
        arguments, parameters = self._parameters
        return self.driver.connect(*arguments, **parameters)

    def add(self, connection: Any, record: object) -> None:
        self.is_silent = False
        own = socket.socket(fileno=os.dup(self.socket_of(connection).fileno()))
        if own.family != socket.AF_UNIX:
            for name, number in self.tcp_options.items():
                if (option := getattr(socket, name, None)) is not None:
                    own.setsockopt(socket.IPPROTO_TCP, option, number)
        # A connection whose first statements fail is not closed, and has no event of its end.
        finalize(connection, self._forget, id(connection)).atexit = False
        with self._lock:
            self._sockets[id(connection)] = own
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="zync-server-watch", daemon=True)
                self._thread.start()

    def remove(self, connection: Any, record: object) -> None:
        self._forget(id(connection))

    def _forget(self, name: int) -> None:
        with self._lock:
            own = self._sockets.pop(name, None)
        if own is not None:
            own.close()

    def _look(self) -> None:
        answer = time.monotonic()
        former: frozenset[int] = frozenset()
        while True:
            time.sleep(LOOK_SECONDS)
            with self._lock:
                present = frozenset(self._sockets)
                if not present:
                    self._thread = None
                    return
            # A connection that is new is younger than LOOK_SECONDS.
            if not former & present or self._answers():
                answer = time.monotonic()
            elif time.monotonic() - answer >= SILENCE_SECONDS:
                self._end(former & present)
            former = present

    def _answers(self) -> bool:
        """Whether the server answers a login."""
        try:
            self.login().close()
        except Exception as error:  # the drivers' errors have no common class
            return _TIMEOUT.search(str(error)) is None
        return True

    def _end(self, names: frozenset[int]) -> None:
        self.is_silent = True
        with self._lock:
            for name in names & self._sockets.keys():
                with suppress(OSError):
                    self._sockets[name].shutdown(socket.SHUT_RDWR)
