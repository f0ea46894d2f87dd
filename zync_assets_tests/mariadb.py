"""A MariaDB server of the tests' own, as a target and as Debezium's source."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pymysql

from zync_assets.local.processes import free_port
from zync_assets_tests.network.certificates import Authority
from zync_assets_tests.services import await_server, server_process

ANOTHER_HOST = "127.0.0.2"
"""An address of the server that is none of this machine for the sink."""


@dataclass(frozen=True)
class Server:
    port: int
    authority: Authority

    def run(self, database: str, *statements: str) -> list[tuple[Any, ...]]:
        """The rows of the last statement."""
        with self.connected(database) as cursor:
            for statement in statements:
                cursor.execute(statement)
            return list(cursor.fetchall())

    @contextmanager
    def connected(self, database: str) -> Generator[Any]:
        """A cursor of a connection of its own. Each statement is a transaction of its own, unless BEGIN stands before it."""
        options: dict[str, Any] = {"host": "127.0.0.1", "port": self.port, "user": "root", "autocommit": True}
        with closing(pymysql.connect(database=database, **options)) as connection, connection.cursor() as cursor:
            yield cursor

    def await_locked(self) -> None:
        """Wait until a transaction waits for the lock of a row."""
        give_up = time.monotonic() + 30
        while self.run("mysql", "SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")[0][1] == "0":
            assert time.monotonic() < give_up

    def url(self, database: str, user: str = "root") -> str:
        return f"mysql://{user}@127.0.0.1:{self.port}/{database}"


@contextmanager
def mariadb(options: Sequence[str] = ()) -> Generator[Server]:
    """An empty server, removed at the end. ``options``: of the command ``mariadbd``."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="zync-tests-mysql-") as home:
        place = ["--no-defaults", f"--datadir={home}/data", "--user=root"]
        made = [
            "mariadb-install-db",
            *place,
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--skip-log-bin",
        ]
        subprocess.run(made, check=True, capture_output=True)
        authority = Authority(Path(home), "ca")
        issued = authority.server("server", ANOTHER_HOST)
        tls = [f"--ssl-cert={issued.certificate}", f"--ssl-key={issued.key}"]
        addresses = f"--bind-address=127.0.0.1,{ANOTHER_HOST}"
        command = ["mariadbd", *place, *tls, f"--port={port}", addresses, f"--socket={home}/socket"]
        with server_process([*command, *options], Path(home), Path(home, "log"), {}) as log:
            server = Server(port, authority)
            await_server(lambda: bool(server.run("mysql", "SELECT 1")), pymysql.OperationalError, log)
            yield server
