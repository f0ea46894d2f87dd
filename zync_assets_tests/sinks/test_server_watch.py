"""A frozen server ends the statements that wait for it. A busy server does not, and a server that refuses logins does not."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager

import psutil
import pytest
import sqlalchemy as sa

from zync_assets.errors import TargetUnavailable
from zync_assets.sinks import mysql, server_watch
from zync_assets.sinks.postgres import PostgresTarget
from zync_assets.sinks.sql import SqlTarget
from zync_assets_tests.connect import postgres
from zync_assets_tests.mariadb import mariadb


@contextmanager
def frozen_server(port: int) -> Generator[None]:
    """Suspend all processes of the server that listens on the port."""
    listeners = [
        item.pid for item in psutil.net_connections("tcp") if item.status == "LISTEN" and item.laddr[1] == port
    ]
    head = psutil.Process(next(pid for pid in listeners if pid))
    processes = [head, *head.children(recursive=True)]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


@pytest.fixture(scope="module", params=["postgres", "mysql"])
def target(request: pytest.FixtureRequest) -> Generator[tuple[SqlTarget, int, str]]:
    """A target, its server's port, and a statement of three seconds. A login may take two seconds."""
    if request.param == "postgres":
        with postgres() as server:
            url = f"postgresql://postgres@127.0.0.1:{server.port}/postgres?connect_timeout=2"
            yield PostgresTarget(url), server.port, "SELECT pg_sleep(3)"
    else:
        if shutil.which("mariadbd") is None:
            pytest.skip("no MariaDB server is installed")
        with mariadb() as server, pytest.MonkeyPatch.context() as patch:
            patch.setattr(mysql, "CONNECT_SECONDS", 2)
            yield mysql.MysqlTarget(server.url("mysql")), server.port, "SELECT sleep(3)"


@pytest.fixture(autouse=True, scope="module")
def haste() -> Generator[None]:
    """For the whole module: the thread of a watch may begin its rest between two tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_watch, "LOOK_SECONDS", 0.5)
        patch.setattr(server_watch, "SILENCE_SECONDS", 1.0)
        yield


def test_a_statement_ends_when_its_server_is_frozen(target: tuple[SqlTarget, int, str]) -> None:
    place, port, statement = target
    start = time.monotonic()
    with (
        pytest.raises(TargetUnavailable, match="answered no login"),
        place.connection() as connection,
        frozen_server(port),
    ):
        connection.execute(sa.text(statement.replace("3", "300")))
    assert time.monotonic() - start < 60
    with place.connection() as connection:
        assert connection.execute(sa.text("SELECT 1")).scalar() == 1
    with pytest.raises(Exception, match="nonsense") as caught, place.connection() as connection:
        connection.execute(sa.text("SELECT nonsense"))
    assert not isinstance(caught.value, TargetUnavailable), "the server answers again"


def test_a_long_statement_of_a_server_that_answers_goes_on(target: tuple[SqlTarget, int, str]) -> None:
    place, _, statement = target
    with place.connection() as connection:
        connection.execute(sa.text(statement))


def test_a_refused_login_is_an_answer(target: tuple[SqlTarget, int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    place, _, statement = target
    refusals: list[str] = []

    def refuse() -> None:
        refusals.append("no")
        raise ConnectionError("FATAL: sorry, too many clients already")

    monkeypatch.setattr(server_watch._watches[place.engine()], "login", refuse)
    with place.connection() as connection:
        connection.execute(sa.text(statement))
    assert refusals


def test_a_connection_whose_first_statement_fails_is_no_longer_watched(target: tuple[SqlTarget, int, str]) -> None:
    place, _, _ = target
    engine = place.engine()

    def refuse(connection: object, record: object) -> None:
        raise ConnectionError("the first statement fails")

    sa.event.listen(engine, "connect", refuse)
    try:
        with pytest.raises(ConnectionError), engine.connect():
            pass
    finally:
        sa.event.remove(engine, "connect", refuse)
    gc.collect()
    assert server_watch._watches[engine]._sockets == {}
