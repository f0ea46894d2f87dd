"""Connections to Databend as SQLAlchemy's dialect wants them: of a server, by its driver, and of the embedded engine.

The dialect's own connection opens a session for each statement, and a transaction is a session's. A connection here is one
session.

The embedded engine is the package `databend`. It keeps its tables in the folder `.databend` of the present folder, lets one
process in at a time, and has no way to close. Each connection to it is therefore a process, ``python -m
zync_assets.sinks.databend_engine FOLDER``, and the next one waits until it has ended.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

OPEN_SECONDS = 60.0
"""Seconds that a connection to the embedded engine waits until the connection before it ends."""

BUSY = "another process uses the folder"

_READS = re.compile(r"\s*(SELECT|WITH|SHOW|DESC)\b", re.IGNORECASE)
_BACKTRACE = re.compile(r"\n\s*\n?\s*0: <.*", re.DOTALL)


class Session(Protocol):
    """A session of Databend."""

    def run(self, sql: str) -> tuple[list[str], list[Any]]:
        """The names and the rows of a statement's result. A row has a method ``values``."""
        ...

    def load(self, table: str, columns: str, path: Path) -> None:
        """Append the rows of a Parquet file to a table. Both names are quoted."""
        ...

    def close(self) -> None: ...


class Row(tuple[Any, ...]):
    """A row of the embedded engine."""

    __slots__ = ()

    def values(self) -> tuple[Any, ...]:
        return self


class ServerSession:
    """A session of a server, by the package `databend-driver`."""

    def __init__(self, dsn: str) -> None:
        from databend_driver import BlockingDatabendClient

        self._connection = BlockingDatabendClient(dsn).get_conn()

    def run(self, sql: str) -> tuple[list[str], list[Any]]:
        if not _READS.match(sql):
            self._connection.exec(sql)
            return [], []
        result = self._connection.query_iter(sql)
        return [item.name for item in result.schema().fields()], list(result)

    def load(self, table: str, columns: str, path: Path) -> None:
        statement = f"INSERT INTO {table} ({columns}) VALUES"
        options: Any = {"format_options": {"type": "parquet"}, "copy_options": {"purge": "true"}}
        self._connection.load_file(statement, str(path), **options)

    def close(self) -> None:
        self._connection.close()


class EngineSession:
    """A session of the embedded engine, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "zync_assets.sinks.databend_engine", str(folder)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._answer()

    def run(self, sql: str) -> tuple[list[str], list[Any]]:
        with suppress(BrokenPipeError):
            pickle.dump(sql, self._pipe(self._process.stdin))
            self._pipe(self._process.stdin).flush()
        names, rows = self._answer()
        return names, [Row(row) for row in rows]

    def load(self, table: str, columns: str, path: Path) -> None:
        # The columns of a file find those of the table by their names.
        literal = str(path.resolve()).replace("\\", "\\\\").replace("'", "\\'")
        self.run(f"COPY INTO {table} FROM 'fs://{literal}' FILE_FORMAT = (TYPE = PARQUET) FORCE = TRUE")

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                self._pipe(pipe).close()
        self._process.wait()

    def _answer(self) -> tuple[list[str], list[Any]]:
        try:
            error, names, rows = pickle.load(self._pipe(self._process.stdout))
        except EOFError:
            raise ConnectionError("the embedded engine has ended") from None
        if error is not None:
            raise RuntimeError(error)
        return names, rows

    @staticmethod
    def _pipe(pipe: Any) -> Any:
        assert pipe is not None
        return pipe


class Connection:
    """A connection of Python's database interface. Statements begin and end transactions."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def cursor(self) -> Any:
        from databend_sqlalchemy.connector import Cursor

        return Cursor(_Statements(self.session))

    def commit(self) -> None:
        pass

    def rollback(self) -> None:
        pass

    def close(self) -> None:
        self.session.close()


class _Statements:
    """What the dialect's cursor asks of the driver's cursor."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rows: list[Any] = []
        self.description: Sequence[tuple[Any, ...]] | None = None

    def execute(self, sql: str) -> None:
        names, self._rows = self._session.run(sql)
        self.description = [(name, *[None] * 6) for name in names] or None

    def fetchone(self) -> Any:
        return self._rows.pop(0) if self._rows else None

    def fetchmany(self, size: int | None = None) -> list[Any]:
        size = size or 1
        rows, self._rows = self._rows[:size], self._rows[size:]
        return rows

    def fetchall(self) -> list[Any]:
        rows, self._rows = self._rows, []
        return rows

    def close(self) -> None:
        self._rows = []


def serve(folder: Path) -> None:
    """Answer the statements of standard input until it ends."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What the engine prints is no answer.
    os.chdir(folder)
    with (folder / ".zync-lock").open("w") as lock:
        until = time.monotonic() + OPEN_SECONDS
        while not _try_lock(lock.fileno()):
            if time.monotonic() > until:
                _answer(answers, BUSY)
                return
            time.sleep(0.02)
        try:
            engine: Any = import_module("databend")
        except ImportError as error:
            _answer(answers, f"{error}. Install it: pip install databend==1.2.453.")
            return

        # Only this tenant keeps its tables on the disk.
        session = engine.SessionContext("ten1")
        _answer(answers, None)
        while True:
            try:
                sql = pickle.load(requests)
            except EOFError:
                return
            try:
                names, rows = _result(session, sql)
            except BaseException as error:  # a panic of the engine is no Exception
                _answer(answers, _BACKTRACE.sub("", str(error)))
            else:
                _answer(answers, None, names, rows)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _result(session: Any, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    if not _READS.match(sql):
        session.sql(sql).collect()
        return [], []
    table = session.sql(sql).to_arrow_table()
    return table.column_names, list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def _answer(pipe: Any, error: str | None, names: Sequence[str] = (), rows: Sequence[tuple[Any, ...]] = ()) -> None:
    pickle.dump((error, list(names), list(rows)), pipe)
    pipe.flush()


if __name__ == "__main__":
    serve(Path(sys.argv[1]).resolve())
